"""The commands for the service itself: start, stop, serve, agent, health, open."""

from __future__ import annotations

import contextlib
import json
import os

from ..formats.codec import encode_json
from ..machine.clock import wait_until
from ..machine.config_file import choose_config, load_config
from ..machine.disk import find_user, read_json, read_text, write_atomic
from ..machine.layout import Layout, make_layout
from ..machine.processes import is_alive
from ..page.page import DASHBOARD_PAGE
from ..runner.supervisor import end_supervisors
from ..server.service_lock import RunsAlready, mark_stopped
from ..server.start import check_start, import_modules, run_agent, serve
from ..values.causes import CAUSES
from ..values.errors import NexusError
from ..values.job import PENDING
from ..values.text import format_count, refuse
from ..values.value import replace
from ..views.prometheus import format_health
from ..views.show import SHOW_LINES, form_rows
from .client import Client, Reader
from .context import Context
from .find_service import find_service, start_service
from .transport import DISK, encode_query


def find_config(context: Context) -> str:
    """The path of --config, else of the last start, else the default.  Raises: usage."""
    path, layout = context.options.config, context.layout
    if path and not os.path.isfile(path) and os.path.abspath(path) != layout.config_file:
        refuse(f"there is no file {path}", hint="nexus config sample prints one")
    return os.path.abspath(path) if path else choose_config(DISK, layout)


def cmd_start(context: Context) -> None:
    options, path = context.options, find_config(context)
    if find_service(context.layout) is None:
        start_service(context.layout, context.environ, path, options.log_level)
        return context.say(f"the service runs at {context.client.url}")
    if options.config or options.log_level:
        refuse("the service runs already; these options take effect at its next start",
               hint="nexus restart takes them too; jobs go on")
    context.say(f"the service runs already, at {context.client.url}")


def cmd_stop(context: Context) -> None:
    waiting = stop_service(context)
    again = "nexus start on its own machine" if context.is_remote else "the next nexus command"
    waits = f"; {format_count(waiting, 'pending job')} may start then (nexus pause first holds them)" if waiting else ""
    context.say("the service does not run" if waiting is None else
                f"the service has ended; running jobs go on, and {again} starts it again{waits}")


def stop_service(context: Context) -> int | None:
    """End the service; return how many jobs wait; None: there was none."""
    running = None
    if not context.is_remote:
        mark_stopped(DISK, context.layout, True)         # the supervisor could start it again just now
        running = find_service(context.layout)
        if running is None:
            await_supervisors(context.layout)
            return None
    client = Client.find(context.environ, is_starting=False)

    def is_gone() -> bool:
        if running:
            return not is_alive(running)
        try:                                    # a tunnel accepts connections although nothing listens behind it
            Client.find(context.environ).ask("GET", "/")
        except NexusError:
            return True
        return False

    _, waiting = client.ask_list("/jobs" + encode_query({"status": PENDING, "limit": 1, "fields": "id"}))
    client.stop()
    if not wait_until(is_gone, 60.0):
        raise NexusError("unavailable", "the service does not end", hint="nexus logs service says why")
    if not context.is_remote:
        await_supervisors(context.layout)
    return waiting


def await_supervisors(layout: Layout) -> None:
    """Wait until a stopped service has no supervisor any more; somebody may start it again meanwhile."""
    wait_until(lambda: not end_supervisors(layout, waiting_only=True) or not os.path.exists(layout.stopped_file), 10.0)


def find_former_config(context: Context) -> str | None:
    """After a crash, the copy of the configuration that the service had, if the file has not that text any more."""
    running = read_json(DISK, context.layout.service_file) if "NEXUS_HAS_RUN" in context.environ else None
    copy, given = str((running or {}).get("config_copy")), context.options.config or context.layout.config_file
    if not os.path.isfile(copy):
        return None
    with contextlib.suppress(NexusError):               # it is there, and cannot be read
        return copy if (read_text(DISK, given) or "") != read_text(DISK, copy) else None
    return copy


def cmd_serve(context: Context) -> None:
    """Run the service in the foreground.  An error is also written to a file, for the command that has started it."""
    layout, environ = context.layout, context.environ
    if environ.get("NEXUS_ROLE") == "check":            # whether this Python can run it
        import_modules()
        config = load_config(DISK, find_former_config(context) or find_config(context), environ)
        check_start(DISK, make_layout(layout.home, config), config)
        return
    try:
        former = find_former_config(context)
        if former:
            given = context.options.config or layout.config_file
            environ = {**environ, "NEXUS_CHANGED": " and ".join(filter(None, (environ.get("NEXUS_CHANGED"), given)))}
        path = former or find_config(context)
        config = load_config(DISK, path, environ)
        if context.options.log_level:
            config = replace(config, service=replace(config.service, log_level=context.options.log_level))
        layout = make_layout(layout.home, config)
        if context.out.isatty() and not find_service(layout):
            context.say(f"serving; the log is in {layout.service_log}; Ctrl-C ends the service, jobs go on")
        page = DASHBOARD_PAGE.replace("FORM_ROWS", json.dumps(form_rows()))
        page = page.replace("SHOW_ROWS", json.dumps(SHOW_LINES))
        page = page.replace("CAUSE_ROWS", json.dumps({word: vars(row) for word, row in CAUSES.items()}))
        serve(layout, config, environ, page, path)
    except RunsAlready:
        raise
    except NexusError as error:
        with contextlib.suppress(NexusError):
            write_atomic(DISK, layout.start_error_file, [encode_json(error.to_json())], is_synced=False)
        raise


def cmd_agent(context: Context) -> None:
    """What a head runs on its nodes, over ssh."""
    config = load_config(DISK, choose_config(DISK, context.layout), context.environ)
    jobs = replace(config.jobs, launcher="screen" if config.jobs.launcher == "slurm" else config.jobs.launcher)
    run_agent(context.layout.home, replace(config, jobs=jobs), context.options.head, context.environ)


def cmd_health(context: Context) -> int:
    health = context.client.health()
    context.show(health, format_health)
    return int(not health["is_healthy"])


def cmd_open(context: Context) -> None:
    """Print the page's address, and how it is reached from elsewhere."""
    import socket
    if isinstance(context.client, Reader):         # it shows no page
        raise context.client.error
    url = context.client.url
    context.print(url)
    checks = [] if context.options.url or context.is_remote else context.client.health()["checks"]
    for moved in [row["reading"] for row in checks if row["name"] == "port"]:
        context.say(moved)
    if not context.options.url and not context.is_remote and context.environ.get("SSH_CONNECTION"):
        port = url.rpartition(":")[2]
        context.say(f"from where you sit, first: ssh -L {port}:127.0.0.1:{port} {find_user(os.geteuid())}@"
                    f"{socket.gethostname()}")

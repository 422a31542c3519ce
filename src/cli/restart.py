"""`nexus restart`: the new service is tried before the former one ends, which runs again if the new one cannot."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from ..machine.config_file import load_config, remember_config
from ..machine.disk import read_bytes, read_text
from ..machine.layout import Layout, hash_code, make_layout
from ..machine.processes import read_proc_words
from ..machine.programs import run
from ..opening import TYPE_CHECKING
from ..runner.supervisor import end_supervisors, service_argv, service_environ
from ..server.endpoint import keep_port, open_port
from ..server.listener import listen, offer_sockets
from ..server.start import check_start
from ..values.config import Config
from ..values.errors import NexusError
from ..values.text import format_line
from ..values.value import Value
from .channel import parse_url
from .client import Client
from .context import Context
from .control import cmd_start, find_config, stop_service
from .find_service import find_service, launch_service, make_service_argv, start_service
from .transport import DISK

if TYPE_CHECKING:
    from typing import Any

CHECK_TIMEOUT_S = 30.0


def cmd_restart(context: Context) -> None:
    running = find_service(context.layout)
    if running:
        return replace_service(context, running)
    config = load_config(DISK, find_config(context), context.environ)
    check_start(DISK, make_layout(context.layout.home, config), config)
    stop_service(context)                          # the supervisor could start it again just now
    cmd_start(context)


def replace_service(context: Context, running: Mapping[str, Any]) -> None:
    """End the service and start it anew.  Raises: why that is not possible; then the old one goes on, or runs again."""
    layout, log_level = context.layout, context.options.log_level
    with contextlib.ExitStack() as stack:
        try:
            path = find_config(context)
            config = load_config(DISK, path, context.environ)
            check_start(DISK, make_layout(layout.home, config), config)
            check_as_service(layout, context.environ, make_service_argv(layout, path, log_level))
            port, sockets = open_port(DISK, layout, config.service, lambda port: (
                port, listen(config.service.host, port, former_port=parse_url(running["url"])[1])))
            stack.enter_context(offer_sockets(DISK, layout, sockets))
            with contextlib.suppress(NexusError):       # the disk is full
                keep_port(DISK, layout, config.service, port, time.time())
        except NexusError as error:
            raise NexusError(error.kind, f"not restarted, the service goes on as it was: {error.message}",
                             error.hint) from None
        former = find_former(layout, running)
        stop_service(context)
        try:
            url = start_service(layout, context.environ, path, log_level)["url"]
            await_answer(layout, url)
            return context.say(f"the service runs at {url}")
        except NexusError as error:
            failure = error
    raise start_again(layout, former, failure)


def check_as_service(layout: Layout, environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Run a service only so far that it has read all it needs.  Raises: unavailable."""
    done = run(argv, CHECK_TIMEOUT_S, {**service_environ(layout, environ), "NEXUS_ROLE": "check"})
    if done.exit_code:
        words = [line for line in done.output.splitlines() if line.strip() and not line.startswith("hint: ")]
        raise NexusError("unavailable", f"the new service fails with exit code {done.exit_code}: "
                         f"{format_line(words[-1] if words else 'it says nothing', 300)}", hint="try it: nexus serve")


class FormerService(Value):
    """A running service, as it can be started again."""
    argv: Sequence[str]
    environ: Mapping[str, str]
    choice: str                                 # the path of the configuration that the next start takes
    config: Config


def find_former(layout: Layout, running: Mapping[str, Any]) -> FormerService | NexusError:
    """What starts a running service again as it is now; or why that is not possible."""
    choice = (read_text(DISK, layout.choice_file) or layout.config_file).strip("\n")
    # Without a service.json, which a full disk may have refused, only its url and hash are known.
    path, copy = running.get("config") or choice, running.get("config_copy") or ""
    words = read_proc_words(running["pid"], "cmdline")
    environ = dict(word.partition("=")[::2] for word in read_proc_words(running["pid"], "environ"))
    given = words[words.index("serve") + 1:] if "serve" in words else []
    is_service = words[1:3] == ["-I", "-c"] and words[7:8] == ["serve"] and os.access(words[0], os.X_OK)
    programs = [*words[6:7], os.path.abspath(__file__),
                layout.copy_of(running.get("hash"), ".py")]
    try:
        same = [each for each in programs
                if os.path.isfile(each) and hash_code(read_bytes(DISK, each)) == running.get("hash")]
        if not same:
            return NexusError("unavailable", f"its nexus.py (nexus {running.get('version')}) is not there any more",
                              hint="put it back where it was, and run it: python3 nexus.py start")
        if os.path.isfile(copy) and f"-{hash_code((read_text(DISK, path) or '').encode())}." not in copy:
            path = copy                         # the file was edited
        options = [*given, "--config", path]
        # Else a person or systemd runs it, or its Python is gone.
        argv = [*words[:6], same[0], "serve", *options] if is_service else service_argv(layout, same[0], options)
        return FormerService(argv, environ, choice, load_config(DISK, path, environ))
    except NexusError as error:
        return error


def await_answer(layout: Layout, url: str) -> None:
    """Wait until a service that has just started replies.  Raises: unavailable, when it does not, or ends."""
    try:
        Client(url, "", layout).ask("GET", "/")
    except NexusError as error:
        raise NexusError(error.kind, error.message, hint=f"see {layout.service_log}") from None


def start_again(layout: Layout, former: FormerService | NexusError, failure: NexusError) -> NexusError:
    """Start the former service after a failed restart; return what is to be said."""
    end_supervisors(layout)                     # they would go on trying
    try:
        if isinstance(former, NexusError):
            raise former
        remember_config(DISK, layout, former.choice)
        running = launch_service(layout, former.environ, former.config, former.argv)
    except NexusError as error:
        return NexusError(failure.kind, f"the new service cannot start: {failure.message}; and the former one cannot "
                          f"be started again: {error.message}", error.hint or failure.hint)
    return NexusError(failure.kind, f"the new service cannot start: {failure.message}; the former one runs again, "
                      f"nexus {running['version']} ({running['hash']}), as it was", failure.hint)

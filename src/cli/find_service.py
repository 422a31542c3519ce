"""The service of this machine: whether it runs, and how it is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..machine.clock import wait_until
from ..machine.config_file import load_config
from ..machine.disk import check_folder, disk_errors, is_own_file, read_json, remove_file
from ..machine.launchers import prepare_launcher
from ..machine.layout import Layout, make_layout
from ..machine.processes import Processes, find_pid_namespace, is_alive, is_this_machine, read_boot_id, read_machine
from ..opening import TYPE_CHECKING
from ..runner.supervisor import end_supervisors, service_argv, start_supervisor
from ..server.handler import read_credentials
from ..server.service_lock import mark_stopped, refuse_elsewhere
from ..server.start import check_start
from ..values.config import Config
from ..values.errors import NexusError, decode_error
from ..views.api_json import pick
from .transport import DISK, OWNER_TIMEOUT_S, connect_to_own, read_answer, send_request

if TYPE_CHECKING:
    from typing import Any

START_TIMEOUT_S = 30.0
GIVE_UP_TIMEOUT_S = 5.0          # for a supervisor whose service could not start


def find_service(layout: Layout) -> dict[str, Any] | None:
    """service.json of a running service, or None.

    Raises: forbidden, when others may write into the home; conflict, for another machine's.
    """
    if not os.path.isdir(layout.home):
        return None
    with disk_errors("look at", layout.home):
        check_folder(DISK, layout.home, "NEXUS_HOME")
    running = read_json(DISK, layout.service_file) if is_own_file(DISK, layout.service_file) else None
    if not running or not isinstance(running.get("pid"), int):
        return ask_for_service(layout)
    if not is_this_machine(running):
        refuse_elsewhere(DISK, layout, running)
        return None
    return running if is_alive(running) else ask_for_service(layout)


def ask_for_service(layout: Layout) -> dict[str, Any] | None:
    """What service.json would say of a service that listens at api.sock, where a full disk has refused it; or None."""
    try:
        connection = connect_to_own(layout, OWNER_TIMEOUT_S)
        with connection:
            own = Processes().find(read_credentials(connection)[0])
            told = read_answer(send_request(connection, "GET", "/", {"Host": "localhost"}))
        return {**pick(told, ("url", "version", "hash")), "pid": own.pid, "started": own.started,
                "boot_id": read_boot_id(), "machine": read_machine(), "pid_namespace": find_pid_namespace(),
                } if own else None
    except NexusError as error:
        if error.kind == "forbidden":
            raise
    except (OSError, LookupError, TypeError, ValueError):
        pass                                            # nobody listens, or no nexus does
    return None


def start_service(layout: Layout, environ: Mapping[str, str], path: str,
                  log_level: str | None = None) -> dict[str, Any]:
    """Start the service with the config file at `path`; wait until it replies.  Raises: why it could not start."""
    config = load_config(DISK, path, environ)
    check_start(DISK, make_layout(layout.home, config), config)     # before any code of the home runs
    return launch_service(layout, environ, config, make_service_argv(layout, path, log_level))


def make_service_argv(layout: Layout, path: str, log_level: str | None) -> list[str]:
    """How this nexus.py runs as the service."""
    options = ["--config", path, *(["--log-level", log_level] if log_level else [])]
    return service_argv(layout, os.path.abspath(__file__), options)


def launch_service(layout: Layout, environ: Mapping[str, str], config: Config, argv: Sequence[str]) -> dict[str, Any]:
    """Start a service with its supervisor; wait until it replies.  Raises: why it could not start."""
    remove_file(DISK, layout.start_error_file)
    launcher, _ = prepare_launcher(config.jobs.launcher, DISK, layout)
    mark_stopped(DISK, layout, False)
    start_supervisor(DISK, layout, launcher, environ, argv)

    def look() -> dict[str, Any] | None:
        error = read_json(DISK, layout.start_error_file)
        if error:
            # The supervisor gives up when it sees the file, too, which the next start removes.
            wait_until(lambda: not end_supervisors(layout, waiting_only=True), GIVE_UP_TIMEOUT_S)
            raise decode_error(error)
        return find_service(layout)

    running = wait_until(look, START_TIMEOUT_S)
    if not running:
        raise NexusError("unavailable", f"the service did not start within {START_TIMEOUT_S:g} s",
                         hint=f"see {layout.service_log}, or try it in the foreground: nexus serve")
    return running

"""How a service starts: serve(); and how the agent of a node does: run_agent()."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping

from ..hosting.agent import Agent
from ..machine.clock import Clock, wait_until
from ..machine.config_file import remember_config
from ..machine.disk import (
    Disk,
    disk_errors,
    find_files,
    find_status,
    is_locked,
    open_file,
    read_json,
    read_text,
    remove_file,
    secure_folders,
    take_lock,
    write_atomic,
    write_if_changed,
)
from ..machine.inherited import describe_inherited
from ..machine.layout import Layout
from ..machine.machine import Machine
from ..machine.processes import (
    CONTAINER,
    find_pid_namespace,
    import_psutil,
    is_this_machine,
    read_boot_id,
    read_machine,
)
from ..machine.search_path import complete_path, keep_programs
from ..opening import TYPE_CHECKING, __version__
from ..service.service import Service
from ..store.store import Store
from ..values.config import Config
from ..values.errors import NexusError
from ..values.schema import check
from .api import Api
from .endpoint import find_former_port, keep_port, keep_token, load_tls, open_port, read_token
from .listener import Server
from .service_lock import LOCK_TIMEOUT_S, copy_start, keep_copies, mark_stopped, refuse_elsewhere, take_service_lock
from .service_log import make_log

if TYPE_CHECKING:
    import ssl


# What functions of the rooms above import, or lead to: the Python that runs the service may be updated or removed.
MODULES = (
    "ast", "base64", "collections", "csv", "datetime", "difflib", "encodings.idna", "encodings.utf_8_sig", "errno",
    "fcntl", "hashlib", "heapq", "hmac", "http.server", "itertools", "logging.handlers", "pwd", "queue",
    "resource", "select", "shutil", "signal", "stat", "statistics", "struct", "subprocess", "tempfile", "textwrap",
    "threading", "tokenize", "traceback", "unicodedata", "urllib.parse", "xml.etree.ElementTree", "zlib")


def import_modules() -> None:
    """Raises: unavailable, when this Python lacks one."""
    import importlib
    try:
        for name in MODULES:
            importlib.import_module(name)
    except ImportError as error:
        raise NexusError("unavailable", f"{sys.executable} cannot run the service: {error}",
                         hint="it is not a complete Python: install the rest of it, or use another one") from None


def serve(layout: Layout, config: Config, environ: Mapping[str, str], page: str, config_file: str) -> None:
    """Run the service until it is stopped.  `page`: for browsers; `config_file`: where `config` is from.

    Raises: conflict, when a service runs; unavailable; usage.
    """
    import_modules()
    sys.setswitchinterval(0.001)                    # a start waits for the interpreter many times beside a long request
    clock, disk = Clock(), Disk()
    environ = {"NEXUS_UMASK": f"{os.umask(0o077):03o}", **environ,
               "PATH": complete_path(disk, layout, environ.get("PATH"))}
    os.environ["PATH"] = environ["PATH"]            # for what is run without an environment of its own
    tls = check_start(disk, layout, config)
    if environ.get("NEXUS_ROLE") != "service":      # a person wants it; a supervisor only repeats an earlier wish
        mark_stopped(disk, layout, False)
    lock = take_service_lock(disk, layout, clock)
    log = make_log(layout, config.service)
    store = Store(layout, clock, disk, log)
    store.recover()
    token = read_token(disk, layout) or clock.new_token()
    machine = Machine(config, layout, disk, store.service_id)
    service = Service(config, layout, store, machine, clock, disk, log, environ)
    service.inherited = describe_inherited()
    api = Api(service, token, page)
    # Its address may go while it runs, as DHCP's does: a service that was killed comes back without.
    is_needed = "NEXUS_HAS_RUN" not in environ
    server = open_port(disk, layout, config.service, lambda port: Server(
        api, config.service.host, port, tls, is_needed), may_move=is_needed)
    service.lost_host = config.service.host if server.host != config.service.host else ""
    set_signals(service)
    announce(service, server, token, "https" if tls else "http", config_file)
    # Checked after api.sock is there; `nexus stop` does the reverse, so that one of the two sees the other.
    if find_status(disk, layout.stopped_file):
        service.withdraw()
        return
    log.info("Service started: nexus %s (%s), pid %d, %s", __version__, service.hash, os.getpid(), service.url)
    if service.lost_host:
        log.warning("%s is no address of this machine now: it listens on %s alone", service.lost_host, service.url)
    if service.former_python:
        log.warning("%s runs it, since %s cannot any more", sys.executable, service.former_python)
    if service.changed_files:
        log.warning("It runs with copies of what it had: %s changed meanwhile", service.changed_files)
    service.housekeeping.write_soon(service.pool.begin_nodes)       # before the first request can name a node
    server.serve()
    service.run(lock)
    if not service.is_stopping:
        return
    mark_stopped(disk, layout, True)
    for act in (store.save_checkpoint, service.withdraw):
        try:
            act()
        except (OSError, NexusError) as error:
            log.warning("At the end: %s", error)
    log.info("Service ended; running jobs go on")


def set_signals(service: Service) -> None:
    import signal
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, lambda *_: None)       # not SIG_IGN, which jobs would inherit for ever
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def announce(service: Service, server: Server, token: str, scheme: str, config_file: str) -> None:
    """Write what clients find a service by, and what its next start needs; on a full disk as soon as there is room."""
    layout, config, disk = service.layout, service.config.service, service.disk
    write_soon = service.housekeeping.write_soon
    host = f"[{server.host}]" if ":" in server.host else server.host
    service.url = f"{scheme}://{host}:{server.port}"
    write_soon(lambda: keep_port(disk, layout, config, server.port, service.clock.now()))
    service.former_port = find_former_port(disk, layout, server.port, service.clock.now())
    write_soon(lambda: keep_token(disk, layout, token))
    write_soon(lambda: keep_programs(disk, layout, service.environ["PATH"]))
    if os.path.dirname(config_file) != layout.cache_dir:        # not a copy, with which a service was started again
        write_soon(lambda: remember_config(disk, layout, config_file))
    copies = copy_start(disk, layout, config_file)
    write_soon(lambda: keep_copies(disk, copies))
    own = service.machine.processes.find(os.getpid())
    running = json.dumps({
        "pid": os.getpid(), "started": own.started if own else 0, "boot_id": service.machine.boot_id,
        "url": service.url, "port": server.port, "socket": server.socket_path, "config": config_file,
        "version": __version__, "hash": service.hash, "config_copy": copies[-1][0],
        "machine": service.store.machine_id, "pid_namespace": find_pid_namespace()})
    write_soon(lambda: write_if_changed(disk, layout.service_file, running + "\n"))


def check_start(disk: Disk, layout: Layout, config: Config) -> ssl.SSLContext | None:
    """Check what would keep a service from starting; return the context for https.  Raises: why it cannot start."""
    secure_folders(disk, layout)
    with disk_errors("lock", layout.lock_file), open_file(disk, layout.lock_file, os.O_RDWR | os.O_CREAT):
        pass                                    # the one file that it must have: said here, not by a log that is full
    running = read_json(disk, layout.service_file)
    if running and not is_this_machine(running):
        refuse_elsewhere(disk, layout, running)
        remove_file(disk, layout.service_file)  # else it would seem to belong to this machine, which has the lock now
    if config.jobs.max_memory_gb and config.jobs.launcher != "slurm" and not import_psutil():   # Slurm limits memory
        raise NexusError("usage", "[jobs] max_memory_gb needs psutil, to see what jobs use, and "
                         f"{sys.executable} does not have it",
                         hint=f"{sys.executable} -m pip install psutil; or take max_memory_gb out of config.toml")
    return load_tls(disk, config.service)


def run_agent(home: str, config: Config, head: str, environ: Mapping[str, str]) -> None:
    """Run the agent of a head, given as its service_id, in the place of an earlier one.  Raises: unavailable, usage."""
    import signal
    import_modules()
    disk = Disk()
    check({"type": "string", "pattern": r"^\d+-[0-9a-f]{8}$"}, head, "a head's id")
    # Machines may share a home directory; and one that jobs run on may get another name.
    folder = os.path.join(home, "agent", f"{head}-{read_machine().partition(CONTAINER)[0]}")
    boot = f"{read_boot_id()} {find_pid_namespace()}"
    for other in find_files(disk, os.path.join(home, "agent", f"{head}-")):
        if read_text(disk, os.path.join(other, "boot")) == boot:
            folder = other
    layout = Layout(folder, os.path.join(folder, "state.json"), os.path.join(folder, "jobs"))
    with disk_errors("make", folder):
        disk.makedirs(layout.log_dir)
    environ = {**environ, "PATH": complete_path(disk, layout, environ.get("PATH"))}
    os.environ["PATH"] = environ["PATH"]            # ssh runs it without a login shell
    with disk_errors("lock", layout.lock_file):
        lock = take_lock(disk, layout.lock_file)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if lock is None:
                with contextlib.suppress(OSError, ValueError):
                    pid = int(read_text(disk, layout.lock_file) or "")
                    os.kill(max(2, pid), number)            # -1 would be all of this user's
                wait_until(lambda: not is_locked(disk, layout.lock_file), LOCK_TIMEOUT_S, 0.01)
                lock = take_lock(disk, layout.lock_file)
    if lock is None:
        raise NexusError("unavailable", f"another agent of this head does not end: {layout.lock_file}",
                         hint=f"see what it is: fuser -v {layout.lock_file}")
    # A full disk keeps no agent from its jobs; and it has room for another pid in the place of the former agent's.
    with contextlib.suppress(OSError):
        disk.pwrite(lock, f"{os.getpid():<20}".encode(), 0)
    with contextlib.suppress(NexusError):
        write_atomic(disk, os.path.join(folder, "boot"), [boot], is_synced=False)
    signal.signal(signal.SIGHUP, lambda *_: None)       # not SIG_IGN, which jobs would inherit for ever
    Agent(layout, config, disk, head, environ, make_log(layout, config.service)).run()

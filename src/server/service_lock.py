"""One service for a home: its lock, who else runs, and the copies of what it was started with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from ..machine.clock import Clock
from ..machine.disk import (
    Disk,
    disk_errors,
    find_files,
    make_folder,
    open_file,
    read_json,
    read_text,
    take_lock,
    write_if_changed,
)
from ..machine.layout import Layout, hash_code
from ..machine.processes import is_alive, is_elsewhere
from ..opening import TYPE_CHECKING
from ..store.recovery import describe_other_machine
from ..values.errors import NexusError

if TYPE_CHECKING:
    from typing import Any

LOCK_TIMEOUT_S = 10.0           # for a service that is ending, or just starting


class RunsAlready(NexusError):
    """Another service has this home."""


def mark_stopped(disk: Disk, layout: Layout, is_stopped: bool) -> None:
    """Tell supervisors that wait to restart the service whether anybody wants it."""
    with contextlib.suppress(OSError):
        if is_stopped:
            with open_file(disk, layout.stopped_file, os.O_WRONLY | os.O_CREAT):
                pass
        else:
            disk.unlink(layout.stopped_file)


def refuse_elsewhere(disk: Disk, layout: Layout, running: Mapping[str, Any]) -> None:
    """`running`: of another boot or container.  Raises: conflict, when it is of a service on another machine."""
    machine = str(running.get("machine"))
    if is_elsewhere(disk, machine, layout.lock_file):
        raise describe_other_machine(machine, f"{layout.service_file} says so", f"rm {layout.service_file}")


def take_service_lock(disk: Disk, layout: Layout, clock: Clock) -> int:
    """Lock the home for as long as this process lives; return the lock's descriptor.

    Raises: conflict, when a service runs.  One that has removed its service.json is about to end.
    """
    give_up_at = clock.monotonic() + LOCK_TIMEOUT_S
    while True:
        with disk_errors("lock", layout.lock_file):
            lock = take_lock(disk, layout.lock_file)
        if lock is not None:
            return lock
        running = read_json(disk, layout.service_file)
        if (running and is_alive(running)) or clock.monotonic() > give_up_at:
            pid = (running or {}).get("pid", "unknown")
            raise RunsAlready("conflict", f"a nexus service for {layout.home} runs already (pid {pid})",
                              hint="nexus stop ends it; nexus restart starts it anew")
        clock.sleep(0.02)


def copy_start(disk: Disk, layout: Layout, config_file: str) -> list[tuple[str, str]]:
    """[(a path for a copy, its text)] of what this service was started with: its nexus.py, its configuration."""
    code, settings = read_text(disk, os.path.abspath(__file__)) or "", read_text(disk, config_file) or ""
    return [(layout.copy_of(hash_code(text.encode()), kind), text)
            for text, kind in ((code, ".py"), (settings, ".toml"))]


def keep_copies(disk: Disk, copies: Sequence[tuple[str, str]]) -> None:
    """Keep what this service was started with, as both files may change while it runs.  Raises: unavailable.

    Those of the service before it stay too: `nexus restart` starts that one again if this one fails.
    """
    for path, text in copies:
        folder, kind = os.path.dirname(path), os.path.splitext(path)[1]
        make_folder(disk, folder)
        write_if_changed(disk, path, text)
        with disk_errors("write", path):
            disk.touch(path)                        # the newest are kept
            for begin, end in ((folder, kind), (os.path.join(folder, "__pycache__"), ".pyc")):
                kept = find_files(disk, os.path.join(begin, "nexus-"), end)
                for other in sorted(kept, key=lambda each: disk.stat(each).st_mtime)[:-2]:
                    disk.unlink(other)

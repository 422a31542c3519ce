"""`nexus health`: what is wrong with the service and its machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from ..hosting.loop import Component
from ..hosting.pool import check_node
from ..machine.disk import describe_disk_error, find_status
from ..machine.machine import NO_BASH, NO_BASH_HINT
from ..machine.peers import find_port_users
from ..machine.search_path import list_hung_folders
from ..opening import TYPE_CHECKING
from ..schedule.capacity import is_left_out
from ..values.text import format_count, format_duration, format_memory, join_some
from ..values.value import Value

if TYPE_CHECKING:
    from typing import Any

    from .service import Service

SMI_SLOW_S = 2.0
DISK_INTERVAL_S = 5.0           # between two disk checks
LITTLE_MIB, LITTLE_SHARE = 1024, 0.01   # so much free is little: whichever is less
FAILED_WRITE_S = 3600.0         # for so long a write that failed is told
DISK_TIMEOUT_S = 30.0           # after which a disk that does not answer counts as hung


class Check(Value):
    """One thing that was looked at."""
    name: str
    is_ok: bool
    reading: str
    hint: str                   # for GET /status: what the owner should know or do; "": nothing


class Health(Component):
    """Says what does not work, and what the owner can do."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.look_at_disks()

    def check(self) -> dict[str, Any]:
        """GET /health."""
        return {**health_json(self.list_checks()), "disk_use": self.service.disk_use.measured}

    def list_checks(self) -> list[Check]:
        return [Check(*row) for row in self.yield_checks()]

    def yield_checks(self) -> Iterator[tuple[str, bool, str, str]]:
        """Yield the name, is_ok, the reading and the hint of each Check."""
        service, watch, observation = self.service, self.service.gpu_watch, self.service.observer.observation
        now, leases, file = self.clock.monotonic(), self.machine.leases, service.jobs_file
        yield "scheduler", now - service.turned_at < 30, f"last turn {now - service.turned_at:.1f} s ago", ""
        last = f", the last: {service.last_failure}" if service.last_failure else ""
        is_past = not service.failure_count or now - service.failed_at > 300
        yield "failures", is_past, f"{service.failure_count} internal errors{last}", ""
        if not service.is_slurm:
            source, faulty = self.machine.gpu_source, list[str]()
            for gpu in watch.gpus:
                if gpu.fault and not is_left_out(gpu, self.config.gpu):
                    note = " (if it was taken out: nexus restart)" if gpu.fault == source.not_shown else ""
                    faulty.append(f"GPU {gpu.place}: {gpu.fault}{note}")
            fault, limit = service.observer.find_gpu_error() or "; ".join(faulty), watch.describe_limit()
            hint = source.slow_hint if observation.took_s > SMI_SLOW_S else ""
            hint = observation.hint if observation.error else hint
            asked = f"{format_count(len(watch.gpus), 'GPU')}, asked in {observation.took_s:.2f} s"
            yield "GPUs", not fault, (limit and f"{limit}; ") + (fault or asked), hint
            if not self.machine.has_bash():
                yield "bash", False, NO_BASH, f"{NO_BASH}: {NO_BASH_HINT}"
        hung = list_hung_folders()
        if hung:
            reading = f"{join_some(hung)} does not answer"
            yield "folders", False, reading, f"{reading}: no program or script is looked for there until it does"
        if leases:
            error = service.observer.find_lease_error()
            yield "GPU leases", not error, f"{error.message}; {error.hint}" if error else f"in {leases.folder}", ""
        if service.lost_host:
            reading = f"{service.lost_host} is no address of this machine now: nexus listens on {service.url} alone"
            yield "address", False, reading, f"{reading}; nexus restart takes the address when it is back"
        if service.former_port:
            users = find_port_users(service.former_port)
            whose = f"that of {users}" if users else "free"
            reading = (f"port {service.former_port}, where nexus was, is {whose} now: close tabs and tunnels to it; "
                       f"nexus is at {service.url}")
            yield "port", True, reading, reading
        if service.former_python:
            reading = f"{sys.executable} runs the service, since {service.former_python} cannot any more"
            yield "Python", True, reading, f"{reading}: nexus restart takes the Python that it is called with"
        if service.inherited:
            yield "starter", True, f"it and its jobs have from whoever started it: {service.inherited}", ""
        if service.changed_files:
            reading = f"it started again by itself as it was: {service.changed_files} changed meanwhile"
            yield "copies", True, reading, f"{reading}, which nexus restart takes"
        yield from self.yield_state_checks(now)
        if service.cluster:
            error = service.cluster.find_error()
            reading = error.message if error else f"asked in {service.cluster.took_s:.2f} s"
            yield "Slurm", not error, reading, error.hint if error else ""
        for node in service.pool.nodes.values():
            if not node.is_leaving:
                yield (f"node {node.name}", *check_node(node, now), "")
        if file:
            is_read, faults = not file.error, join_some(file.faults, 3, "; ")
            if now - file.began_at > DISK_TIMEOUT_S:
                is_read, faults = False, f"it has not answered for {format_duration(now - file.began_at)}"
            yield ("jobs file", is_read, faults or f"{file.path} is watched", faults and f"{file.path}: {faults}")
        silent_s = now - self.disks_seen_at
        if silent_s > DISK_TIMEOUT_S:
            yield "disks", False, f"they have not answered for {format_duration(silent_s)}", ""
        yield from self.disks

    def yield_state_checks(self, now: float) -> Iterator[tuple[str, bool, str, str]]:
        """The checks of what is written and read, as yield_checks() has them."""
        error = self.store.last_error
        hint = f"{error.message}: nothing new is accepted or started until there is room" if error else ""
        yield "state", not error, error.message if error else "written", hint
        error = self.service.housekeeping.write_error
        if error:
            yield "files", False, error.message, f"{error.message}: it is written when there is room"
        failed_at, words = self.store.failed_write or (float("-inf"), "")
        if now - failed_at < FAILED_WRITE_S and not (self.store.last_error or self.service.housekeeping.write_error):
            ago = format_duration(now - failed_at)
            reading = f"the last one that failed was {ago} ago: {words}"
            yield "writes", True, reading, f"a write failed {ago} ago, and may again: {words}"
        damaged = ", ".join(self.store.list_damaged())
        if damaged:
            yield ("lost", False,
                   f"the unreadable part of the state is kept in {damaged}: look at it, and move it away", "")
        damage = self.store.state.damage
        if damage:
            paused = f"the queue is paused, as a start did not find the state whole: {damage}"
            yield "damage", False, f"{paused}; nexus resume goes on", f"{paused}: see nexus health, then nexus resume"

    def look_at_disks(self) -> float:
        """Check the disks, and PATH; in a thread of its own, so that a hanging disk blocks no request."""
        self.machine.look_for_programs()
        checks, low = [], set[tuple[float, int]]()
        for name, folder in (("state disk", self.layout.journal_dir), ("log disk", self.layout.log_dir)):
            try:
                if find_status(self.disk, folder, is_followed=False):
                    status = self.disk.statvfs(os.path.join(folder, ""))    # a file is an error
                else:                                   # it was removed, and is made again at the next start of a job
                    status = self.disk.statvfs(os.path.join(os.path.dirname(folder), ""))
                free_mib = status.f_bavail * status.f_frsize / 2**20
                size_mib, hint = status.f_blocks * status.f_frsize / 2**20, ""
                is_little = free_mib < min(LITTLE_MIB, LITTLE_SHARE * size_mib)
                if is_little and (size_mib, status.f_bavail) not in low:    # else it is the same disk
                    low.add((size_mib, status.f_bavail))
                    hint = (f"{format_memory(free_mib)} are left on the disk of {folder}: logs are cut when it is full;"
                            " nexus clear --older 30d --dry-run says what that would free")
                little = ", which is little" if is_little else ""
                checks.append((name, free_mib > 1, f"{format_memory(free_mib)} free{little}", hint))
            except OSError as error:
                reading = describe_disk_error(error, "use", folder)
                hint = f"{reading.message}: nothing is started until it can be used"
                checks.append((name, False, "; ".join(filter(None, (reading.message, reading.hint))), hint))
        if told := self.service.disk_use.tell():
            checks.append(("logs", True, told, ""))
        self.disks: Sequence[tuple[str, bool, str, str]] = checks
        self.disks_seen_at = self.clock.monotonic()
        return DISK_INTERVAL_S

    def list_hints(self, checks: Sequence[Check]) -> list[str]:
        """Return what the owner should know or do, one line each."""
        hints = [row.hint for row in checks if row.hint]
        if self.machine.is_mock:
            hints.append("these GPUs are made up; for the real ones: nexus restart, without NEXUS_MOCK_GPUS")
        error = self.machine.launcher_error
        if error:
            hints.append(f"{error.message}: jobs run directly, without attach ({error.hint})")
        return hints


def health_json(checks: Sequence[Check]) -> dict[str, Any]:
    """GET /health."""
    rows = [{"name": row.name, "is_ok": row.is_ok, "reading": row.reading} for row in checks]
    return {"is_healthy": all(row.is_ok for row in checks), "checks": rows}

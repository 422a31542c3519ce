"""Hooks: programs that are told of jobs, groups and the service's health."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..hosting.events import WATCH_INTERVAL_S, Worker
from ..machine.programs import run
from ..opening import TYPE_CHECKING
from ..values.changes import list_finished
from ..values.errors import NexusError
from ..values.job import Job
from ..values.state import Put, State, change_job
from ..values.text import format_line
from ..views.api_json import describe_group_notice, describe_notice

if TYPE_CHECKING:
    from .service import Service

HEALTH_INTERVAL_S = 5.0         # between two checks for on_unhealthy
HOOK_TIMEOUT_S = 60.0           # of one [hooks] command
MAX_HOOK_TEXT = 32000           # characters of a variable
GROUP_QUIET_S = 60.0            # nothing of a group has waited or run for so long: it has ended


class Hooks:
    """Runs the [hooks] commands in a thread.

    State notes the jobs for which on_finish is due, and on_group_finish for their group: each runs at least once.
    """

    def __init__(self, service: Service) -> None:
        import collections
        self.service, self.config = service, service.config.hooks
        self.is_healthy, self.looked_at = True, float("-inf")
        self.due: collections.deque[tuple[str, Job]] = collections.deque()      # (hook, job; State may lack it)
        self.groups = set[tuple[str, str]]()                # (user, group) of those that may have ended
        self.worker = Worker(service, "running hooks", self.look)

    def begin(self) -> None:
        """Record which hooks are configured, and queue the jobs for which a former service has not run them."""
        store = self.service.store
        facts = {"has_hook": bool(self.config.on_finish), "has_group_hook": bool(self.config.on_group_finish)}
        puts = [Put("facts", name, fact) for name, fact in facts.items() if getattr(store.state, name) != fact]
        if puts:
            store.update(lambda state: puts)
        self.note_status_changes(list_finished(store.state))

    def note_status_changes(self, jobs: Iterable[Job]) -> None:
        """Queue on_finish for those jobs that have ended, and look at their groups."""
        jobs = list(jobs)
        self.queue("on_finish", [job for job in jobs if job.is_hook_due])
        groups = {(job.user, job.group) for job in jobs if job.is_group_due and job.group}
        if groups and self.config.on_group_finish:
            self.groups.update(groups)
            self.worker.wanted.set()

    def queue(self, name: str, jobs: Iterable[Job]) -> None:
        """Run a hook for each of these jobs, if it is configured."""
        if getattr(self.config, name):
            self.due.extend((name, job) for job in jobs)
            self.worker.wanted.set()

    def look(self) -> float | None:
        """Run the hooks that are due; return the seconds until the next call, or None to wait for `wanted`."""
        self.look_at_health()
        if not self.due:
            pauses = [WATCH_INTERVAL_S] if self.config.on_unhealthy else []
            return min([*pauses, *self.look_at_groups()], default=None)
        name, job = self.due.popleft()
        last = job.current
        self.call(name, {
            "NEXUS_JOB_ID": job.id, "NEXUS_JOB_STATUS": job.status, "NEXUS_JOB_CAUSE": last.cause or "",
            "NEXUS_JOB_EXIT_CODE": "" if last.exit_code is None else str(last.exit_code),
            "NEXUS_JOB_COMMAND": job.command, "NEXUS_JOB_GPU": ",".join(last.gpu_places),
            "NEXUS_JOB_NAME": job.name or "", **self.make_message(describe_notice(
                job, "is idle" if name == "on_idle" else job.status, self.service.config.service.public_url))})
        if job.is_hook_due:
            self.record(
                lambda state: [change_job(state.jobs[job.id], is_hook_due=False)] if job.id in state.jobs else [])
        return 0.0

    def record(self, make_puts: Callable[[State], Sequence[Put]]) -> None:
        """Note what has run.  On a disk that takes nothing it stays due: the next service runs it again."""
        with contextlib.suppress(NexusError):               # starting a job reports it
            self.service.store.update(make_puts)

    def make_message(self, lines: Sequence[str]) -> dict[str, str]:
        """The variables that have a message; one has it as JSON, from which no text can break out."""
        text = "\n".join(lines)
        return {"NEXUS_JOB_TITLE": lines[0], "NEXUS_JOB_MESSAGE": text, "NEXUS_JOB_MESSAGE_JSON": json.dumps(text)}

    def look_at_groups(self) -> list[float]:
        """Run on_group_finish for the groups that have ended; return in how many seconds others may have."""
        pauses = []
        for key in list(self.groups):
            self.groups.discard(key)                        # first: whatever ends from now on puts it in again
            state, now = self.service.store.state, self.service.clock.now()
            user, group = key
            if key in state.queued_in or any((job.user, job.group) == key for job in state.running.values()):
                continue
            jobs = [state.jobs[job_id] for owner, job_id in state.members.get(group, ()) if owner == user]
            jobs = [job for job in jobs if job.is_group_due]
            left_s = max((job.current.finished_at or 0.0 for job in jobs), default=now) + GROUP_QUIET_S - now
            if left_s > 0:
                self.groups |= {key} if jobs else set()
                pauses += [left_s] if jobs else []
            else:
                self.call_for_group(group, jobs)
        return pauses

    def call_for_group(self, group: str, jobs: Sequence[Job]) -> None:
        """Run on_group_finish for a group, of which these jobs have ended since it ran last."""
        jobs = sorted(jobs, key=lambda job: job.number)
        lines = describe_group_notice(group, jobs, self.service.config.service.public_url)
        self.call("on_group_finish", {"NEXUS_GROUP": group, **self.make_message(lines)})
        numbers = {job.id: job.number for job in jobs}
        self.record(lambda state: [
            change_job(state.jobs[job_id], is_group_due=False) for job_id, number in numbers.items()
            if job_id in state.jobs and state.jobs[job_id].number == number])

    def look_at_health(self) -> None:
        service, now = self.service, self.service.clock.monotonic()
        is_due = now - self.looked_at >= HEALTH_INTERVAL_S and service.gpu_watch.first_probe.is_set()
        if not self.config.on_unhealthy or not is_due:
            return
        self.looked_at, health = now, service.health.check()
        if health["is_healthy"] != self.is_healthy:
            self.is_healthy = health["is_healthy"]
            bad = [f"{row['name']}: {row['reading']}" for row in health["checks"] if not row["is_ok"]]
            self.call("on_unhealthy", {
                "NEXUS_HEALTH": "HEALTHY" if self.is_healthy else "UNHEALTHY", "NEXUS_HEALTH_REASON": "; ".join(bad)})

    def call(self, name: str, variables: Mapping[str, str]) -> None:
        """Run one hook, with these variables cut to a size that exec() accepts in any encoding."""
        environ = {**self.service.environ, **{key: text[:MAX_HOOK_TEXT] for key, text in variables.items()}}
        command = f"umask {self.service.umask:03o}\n{getattr(self.config, name)}"
        try:
            done = run(["/bin/sh", "-c", command], HOOK_TIMEOUT_S, environ)
            error = f"exit code {done.exit_code}: {format_line(done.output.strip()[-200:])}" if done.exit_code else ""
        except (NexusError, ValueError) as failure:
            error = str(failure)
        if error:
            self.service.log.warning("%s: %s", name, error)

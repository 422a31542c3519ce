"""One reducer for what the backends report: starts, ends, requeues."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from ..formats.cause_lines import TAIL_BYTES, find_cause_lines
from ..formats.runner_events import News, Result
from ..hosting.hosted_job import HostedJob
from ..hosting.job_host import JobHost
from ..hosting.loop import Component
from ..hosting.observer import JobUsage
from ..machine.disk import is_folder
from ..machine.job_files import STREAM_FILES, measure_logs
from ..machine.log_reader import read_tail
from ..opening import TYPE_CHECKING
from ..runner.claims import take_claim
from ..schedule.capacity import find_age
from ..schedule.ends import MACHINE_DOWN, Ended, Evidence, count_group_end, find_reboot_backoff_s, judge_end
from ..schedule.explain import describe_next_attempt
from ..values.causes import KILLED, LAUNCH, REBOOT, SIGNAL, get_cause
from ..values.changes import change_status, end_job, requeue
from ..values.job import CANCELLED, COMPLETED, PENDING, RUNNING, SUBMITTED, Job, Usage
from ..values.queue_order import has_pending
from ..values.state import Group, Put, State, change_attempt, change_job
from ..values.text import format_line
from ..values.value import replace
from ..views.api_json import get_outcome
from ..views.show import format_place

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes
    from .service import Service

MACHINE_DOWN_EARLY = "the machine went down before it began"


class Outcomes(Component):
    """Records what the backends report: starts, ends, requeues."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.unrecorded: dict[str, Result] = {}             # {job id: how its attempt has ended}
        self.learned: dict[str, Mapping[str, Any]] = {}     # {job id: what else is new of it}

    def take_news(self, job: Job, news: News) -> None:
        """Record what is new of an attempt; an end is left to record_ends_and_start().  Raises: unavailable."""
        is_over = news.result is not None and job.status == RUNNING
        if is_over and news.result:
            self.note_end(job, news.result)             # also where the disk refuses its facts
        if is_over and "stop_cause" not in news.facts:
            self.learned[job.id] = news.facts           # it is recorded with the end
        elif news.facts:
            self.learn({job.id: news.facts})
        if news.requeue:
            self.requeue(job, news)
        elif news.result and not is_over:               # of one that was in Slurm's queue
            self.note_end(job, news.result)

    def requeue(self, job: Job, news: News) -> None:
        """Record that an attempt has not begun.  Raises: unavailable."""
        now, log_sizes = self.clock.now(), measure_logs(self.disk, self.layout.folder_of(job))
        facts: dict[str, Any] = {"pid": None, "pid_started": None, "log_base": log_sizes}
        if news.excluded_nodes is not None:
            facts["excluded_nodes"] = news.excluded_nodes
        self.store.update(lambda state: requeue(state, state.jobs[job.id], news.requeue, now, **facts))
        self.forget(job)
        self.service.observer.annotate(self.service.local.list_own())       # shows who holds the GPU
        self.service.gpu_watch.show_gpus()
        after = "" if get_cause(job.current.stop_cause).cancels else " and goes back to the queue"
        self.log.warning("Job %s could not start%s: %s", job.id, after, news.requeue)

    def note_end(self, job: Job, result: Result) -> None:
        former = self.unrecorded.get(job.id)            # as of a tick before, where the disk refused the record
        if (former and former.is_cut) or (not job.current.node and self.is_disk_full(job)):
            result = replace(result, is_cut=True)
        if result.cause == LAUNCH and not job.current.node:
            with contextlib.suppress(OSError):          # a late runner must find the attempt claimed
                take_claim(self.disk, self.layout.folder_of(job), job.attempt_key)
        self.unrecorded[job.id] = result

    def learn(self, learned: Mapping[str, Mapping[str, Any]]) -> None:
        """Record what is new of jobs' attempts: {job id: facts}.  A job's files say it too, but not Slurm's id.

        Raises: unavailable.
        """
        now = self.clock.now()

        def change(state: State) -> Changes:
            for job_id, facts in learned.items():
                job = state.jobs[job_id]
                if "started_at" in facts:
                    yield change_status(job, RUNNING, now, **facts)
                else:
                    yield change_attempt(job, **facts)

        self.store.update(change, any("slurm_id" in facts for facts in learned.values()))
        for job_id, facts in learned.items():
            if "started_at" in facts:
                self.service.starter.tell_start(self.store.state.jobs[job_id])
            if "stop_line" in facts:
                self.log.info("Job %s is stopped: %s", job_id, facts["stop_line"])
                self.service.wake()

    def end_attempt(self, state: State, job: Job, result: Result, evidence: Evidence, now: float) -> Changes:
        """The changes at the end of an attempt: of its job, of its dependents, of its group."""
        if job.status == SUBMITTED and result.cause == KILLED:          # it was cancelled in Slurm's queue
            line = None if job.current.stop_cause else result.cause_line
            yield from end_job(state, job, CANCELLED, now, cause=KILLED, cause_line=line)
            return
        if job.status == SUBMITTED:             # Slurm refused it
            yield change_status(job, RUNNING, now, started_at=now)
            job = state.jobs[job.id]
        runtime_s = self.find_runtime_s(job, now) if result.runtime_seconds is None else result.runtime_seconds
        is_reboot = (job.current.stop_cause or result.cause) == REBOOT
        if is_reboot and self.config.jobs.on_reboot == "requeue":
            has_run = job.current.pid is not None
            yield change_job(job, stop_cause=None, log_base=evidence.log_sizes,
                             runtime_seconds=runtime_s if has_run else None,
                             retry_at=now + find_reboot_backoff_s(job) if has_run else None)
            cause_line = MACHINE_DOWN if has_run else MACHINE_DOWN_EARLY
            yield from requeue(state, state.jobs[job.id], cause_line, now, has_run)
            return
        status, facts = judge_end(job, result, evidence, runtime_s, self.config.jobs, now)
        if status == PENDING:
            yield change_status(job, PENDING, now, **facts)
            return
        yield from end_job(state, job, status, now, **facts)
        if job.group:
            group = state.groups.get(job.group) or Group(job.group)
            is_soon = runtime_s <= self.config.gpu.guard_seconds and get_cause(facts["cause"]).may_be_quick
            last_words = (" / ".join(find_cause_lines(evidence.stderr, 3)) or facts["cause_line"]
                          or f"{facts['cause']} {facts['exit_code']}")
            counted = count_group_end(group, status, facts["cause"], is_soon, last_words, has_pending(state, job.group))
            if counted != group:
                yield Put("groups", job.group, counted)

    def gather_evidence(self, job: Job, result: Result) -> Evidence:
        """What tells why an attempt failed, and what its processes used."""
        folder, error = self.layout.folder_of(job), None
        sizes = measure_logs(self.disk, folder)
        has_output = sizes[0] > job.log_base[0] or sizes[1] > job.log_base[1]
        stdout = stderr = ""
        if result.exit_code and has_output:
            stdout, stderr = [read_tail(self.disk, os.path.join(folder, name), start, TAIL_BYTES)
                              for name, start in zip(STREAM_FILES, job.log_base)]
        if result.is_cut:
            error = f"No space left on device: {job.current.node or folder} (the job's logs may be cut)"
        elif result.exit_code and not job.current.node and not is_folder(self.disk, folder):
            error = f"its log folder is gone: {folder}"
        watch = self.service.log_watch
        find = watch.find_last_line if result.exit_code else watch.find_telling_line
        last_line = find(folder, job.log_base) if has_output else None
        metric_line = watch.find_metric_line(folder, job.log_base) if has_output else None
        samples = self.service.observer.find_usage(job.id).samples
        return Evidence(stderr, sizes, error, samples, stdout, last_line, metric_line)

    def is_disk_full(self, job: Job) -> bool:
        with contextlib.suppress(OSError):
            return self.disk.statvfs(self.layout.folder_of(job)).f_bavail == 0
        return False

    def describe_unrecorded(self, job: Job) -> str | None:
        """How a running job has ended, while the disk refuses the record."""
        result = self.unrecorded.get(job.id)
        if result is None or self.store.last_error is None:
            return None
        how = f" ({result.cause})" if result.exit_code is None else f" with {result.exit_code}"
        return f"it has ended{how}, to be recorded when there is room"

    def keep_samples(self) -> None:
        """Record the usage of running jobs before a restart.  Raises: unavailable."""
        def write(state: State) -> Changes:
            for job in [job for job in state.running.values() if not job.current.node]:
                yield change_attempt(job, **vars(self.service.observer.find_usage(job.id).samples))
        self.store.update(write)

    def find_runtime_s(self, job: Job, now: float) -> float:
        """Seconds that a job has run.  The wall clock, which may have been set, is the last resort."""
        job_host: JobHost = self.service.job_host
        hosted = job_host.hosted.get(job.attempt_key) or HostedJob(job_host, job)
        runtime_s = hosted.find_runtime_s()
        return max(0.0, find_age(job, now)) if runtime_s is None else runtime_s

    def forget(self, job: Job) -> None:
        """Drop what was kept for a running job."""
        for table in (self.unrecorded, self.learned, self.service.observer.usage):
            table.pop(job.id, None)
        self.service.job_host.forget(job)

    def report_end(self, before: Job, job: Job) -> None:
        """Log an end, and tell the GPU guard of it.  `before`: the job as it ran."""
        ran, done = before.current, job.attempts[-1]
        has_run_briefly = (done.runtime_seconds or 0) <= self.config.gpu.guard_seconds
        is_soon = get_cause(done.cause).blames_gpu and has_run_briefly
        self.service.gpu_watch.ended.append(Ended(
            ran.gpu_uuids, job.code or job.command, job.status == COMPLETED, is_soon, ran.started_at or 0.0))
        place = format_place(ran.gpu_places, ran.node)
        if job.status == COMPLETED:
            self.service.tell(before, "Job %s completed successfully%s", job.id, place)
            return
        code = f", exit code {done.exit_code}" if done.exit_code is not None else ""
        line = f" ({format_line(done.cause_line, 300)})" if done.cause_line else ""
        again = f"; {describe_next_attempt(job, self.clock.now())}" if job.status == PENDING else ""
        cause = f"signal {get_outcome(done)}" if done.cause == SIGNAL else done.cause
        what, how = "failed" if again else job.status, f"{cause}{code}{line}{again}"
        if get_cause(done.cause).requeues and job.status == PENDING:
            what, how = "ended", f"{done.cause_line}; it goes back to the queue"
        self.service.tell(before, "Job %s %s%s: %s", job.id, what, place, how)

    def adopt(self) -> None:
        """After a start of the service: find out what became of the jobs that are recorded as running."""
        now, refresh_s = self.clock.now(), self.config.service.refresh_rate_seconds
        for job in self.service.running_jobs():
            if not job.current.node:
                recorded = Usage(*(getattr(job.current, name) for name in Usage.NAMES))
                # The recorded mean counts for as many readings as there were, about.
                looks = 0 if recorded.mean_gpu_util is None else 1 + int(self.find_runtime_s(job, now) / refresh_s)
                self.service.observer.usage[job.id] = JobUsage(recorded, look_count=looks)
        self.service.take_in(self.service.local, ())
        for job in self.service.running_jobs():
            if job.id not in self.unrecorded and not job.current.node:
                self.log.info("Job %s goes on", job.id)

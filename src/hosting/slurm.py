"""Jobs that Slurm places: submitted, followed and cancelled by one thread."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..formats.cause_lines import TAIL_BYTES
from ..formats.runner_events import News, Result, RunnerEvent
from ..formats.slurm import (
    REQUEUED_BY_SLURM,
    SLURM_ENDS,
    SLURM_WAITING,
    SlurmJob,
    SlurmPartition,
    build_sbatch,
    describe_submitted,
    find_slurm_line,
    read_refusal,
)
from ..machine.clock import Backoff
from ..machine.disk import Disk
from ..machine.git import find_commit
from ..machine.log_reader import read_tail
from ..machine.slurm_commands import Slurm
from ..opening import TYPE_CHECKING
from ..runner.claims import read_claim, read_result, take_claim
from ..schedule.capacity import find_age
from ..schedule.ends import OUR_CLAIM, Claim, judge_slurm_end, match_slurm_jobs
from ..schedule.limits import find_limits, find_stop
from ..values.causes import KILLED, LAUNCH
from ..values.errors import NexusError
from ..values.job import RUNNING, SUBMITTED, Job, Use
from ..values.text import format_line
from ..values.value import replace
from ..views.api_json import pick
from .events import WATCH_INTERVAL_S, Worker
from .job_host import HOLD_S
from .loop import Backend
from .observer import find_probe_pause_s

if TYPE_CHECKING:
    from typing import Any

    from ..service.service import Service
    from .loop import Finding

PARTITIONS_INTERVAL_S = 30.0    # between two looks at Slurm's partitions and their GPUs
OUTAGE_PAUSE_S = 10.0           # the longest pause while Slurm does not answer: most of a run time is waiting then
FAST_POLL_S = 0.2               # between two calls of squeue when something is about to change
HURRY_S = 3.0                   # how long squeue runs so often


def take_slurm_claim(disk: Disk, job: Job, folder: str) -> Claim | None:
    """take_claim() of a job that Slurm has.  What cannot be claimed is Slurm's to end."""
    with contextlib.suppress(OSError):
        return take_claim(disk, folder, job.attempt_key)
    return None


class SlurmBackend(Backend):
    """The Slurm of `launcher = "slurm"`.  A thread submits, cancels and queries, so that nothing else waits for Slurm.

    Jobs are submitted one at a time, so the others keep nexus's order.  A job's key is journaled before it is
    submitted, Slurm's id after.  A job whose key Slurm does not know is requeued, once its attempt is claimed.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.slurm = Slurm(service.store.service_id, service.environ)
        self.worker = Worker(service, "talking to Slurm", self.step)
        self.live = self.list_live()                        # Slurm's jobs as recorded; it cancels all others of ours
        self.submitting: Job | None = None                  # recorded, and not submitted yet
        self.found: Sequence[Finding] = ()                  # the thread waits until the loop has taken these
        self.seen: Mapping[str | None, SlurmJob] = {}       # {slurm_key: squeue's last row}
        self.name = ""                                      # of the cluster
        self.partitions: Sequence[SlurmPartition] = ()
        self.partitions_at = float("-inf")                  # monotonic: when they were read
        self.looked_at, self.took_s = float("-inf"), 0.0    # monotonic: when squeue was run, and for how long
        self.hasty_until = float("-inf")                    # monotonic: squeue is run often until then
        self.error: NexusError | None = NexusError("unavailable", "Slurm has not been asked yet")
        self.submit_backoff = Backoff(*HOLD_S)              # as Slurm took no job; `conflict`: it has enough of ours
        self.over_at: dict[str | None, float] = {}          # {slurm_key: monotonic, when it was first seen ended}

    def step(self) -> float:
        """In the thread: submit a job, and run squeue when it is time; return the pause in seconds."""
        if self.found:
            return WATCH_INTERVAL_S
        live = self.live                                    # read before squeue runs
        try:
            job = self.submitting
            news = self.hand_in(job) if job else None
            if job and news:
                self.found, self.submitting = [(job, news)], None
            if not self.found and self.find_pause_s() <= 0:
                self.run_squeue(live)
        except NexusError as error:
            if self.error is None or error.message != self.error.message:
                self.service.log.error("Slurm: %s", error.message)
            self.error = error
        if self.found:
            self.service.wake()
        return min(WATCH_INTERVAL_S, self.find_pause_s())

    def find_pause_s(self) -> float:
        """Seconds until squeue runs next."""
        now, refresh_s = self.service.clock.monotonic(), self.service.config.service.refresh_rate_seconds
        is_hasty = now < self.hasty_until and not self.error and not self.store.last_error
        pause_s = find_probe_pause_s(FAST_POLL_S if is_hasty else refresh_s, self.took_s)
        if self.error:
            pause_s = min(pause_s, OUTAGE_PAUSE_S)
        return max(0.0, self.looked_at + self.took_s + pause_s - now)

    def hand_in(self, job: Job) -> News | None:
        """Submit a job; return None while it must wait.  Raises: unavailable; Slurm may have the job all the same."""
        service, folder, config = self.service, self.service.layout.folder_of(job), self.service.config
        state = service.store.state
        recorded, variables = state.jobs.get(job.id), state.environments.get(job.environment)
        if recorded is None or recorded.current.slurm_key != job.current.slurm_key or recorded.current.stop_cause:
            return News(requeue="it was taken back before it was submitted to Slurm")
        if state.paused or self.error or self.submit_backoff.find_error(service.clock.monotonic()):
            return None
        try:
            service.job_host.write_script(service.starter.make_order(job, variables))
        except (OSError, NexusError) as error:
            return service.job_host.judge_start_error(error, job)
        try:
            limits = find_limits(job, config.jobs)
            slurm_id, words = self.slurm.run_sbatch(build_sbatch(job, self.slurm.service_id, folder, limits,
                                                                 config.slurm))
        except Exception as error:                          # squeue shows whether Slurm has the job
            self.submitting, self.looked_at = None, float("-inf")
            if isinstance(error, NexusError) and read_refusal(error.message)[0] == "limit":
                self.rest(error.message, error.hint, True)  # at its limit, sbatch retries until its own timeout
            raise
        at_fault, hint = read_refusal(words)
        if slurm_id:
            self.submit_backoff.succeed()
            self.hurry()
            return News({"slurm_id": slurm_id})
        if at_fault in ("config", "limit"):                 # Slurm would refuse the others too: this job waits
            self.rest(words, hint, at_fault == "limit")
            return None
        line = format_line(f"Slurm refuses it: {words}" + (f" ({hint})" if hint else ""), 400)
        return News(result=Result(None, None, 0.0, LAUNCH, line, may_pass=not at_fault))

    def rest(self, words: str, hint: str, is_limit: bool) -> None:
        """Submit nothing for a while, or until one of our jobs has ended there."""
        message = f"Slurm takes no {'more jobs now' if is_limit else 'jobs'}: {words}"
        if self.submit_backoff.error is None or self.submit_backoff.error.message != message:
            self.service.log.warning("%s", message)
        error = NexusError("conflict" if is_limit else "unavailable", message, hint)
        self.submit_backoff.fail(self.service.clock.monotonic(), error)

    def run_squeue(self, live: Sequence[Job]) -> None:
        """Run squeue, find what is new, and cancel unwanted jobs.  Raises: unavailable."""
        clock = self.service.clock
        self.looked_at = clock.monotonic()
        try:
            self.name = self.name or self.slurm.query_name()
            jobs = self.slurm.query_jobs()
            if self.error:
                self.service.log.info("Slurm answers")
            self.error = None
            unsent = self.submitting.current.slurm_key if self.submitting else None
            live = [job for job in live if job.current.slurm_key != unsent]
            self.seen = match_slurm_jobs(live, jobs)
            self.found = list(self.compare(live))
            wanted = {job.current.slurm_key for job in live if not job.current.stop_cause}
            unwanted = [slurm_job for slurm_job in jobs if slurm_job.key and slurm_job.key not in wanted]
            self.cancel([*unwanted, *self.list_stopped(live)])
            if clock.monotonic() - self.partitions_at >= PARTITIONS_INTERVAL_S:
                self.partitions, self.partitions_at = self.slurm.query_partitions(), clock.monotonic()
        finally:
            self.took_s = clock.monotonic() - self.looked_at

    def list_stopped(self, live: Iterable[Job]) -> list[SlurmJob]:
        """What squeue has of those that must end."""
        keys = [job.current.slurm_key for job in live if job.current.stop_cause]
        return [self.seen[key] for key in keys if key in self.seen]

    def compare(self, live: Sequence[Job]) -> Iterator[Finding]:
        """What squeue says that is not recorded yet."""
        now, over_at, self.over_at = self.service.clock.monotonic(), self.over_at, {}
        for job in live:
            key, seen = job.current.slurm_key, self.seen.get(job.current.slurm_key)
            claim = read_claim(self.disk, self.service.layout.folder_of(job), job.attempt_key)
            is_waiting = seen is not None and seen.state in SLURM_WAITING
            # By Slurm: its node was lost, or slurmctld crashed before it saved that the job began.
            is_requeued = is_waiting and (job.status == RUNNING or bool(claim and claim.pid))
            if seen is None or seen.state in SLURM_ENDS or is_requeued:
                self.over_at[key] = over_at.get(key, now)
                news = self.find_end(job, seen, now - self.over_at[key])
                if news:
                    yield job, news
            elif job.status == SUBMITTED and not is_waiting:
                yield job, News(self.find_start(job, seen))
            elif not job.current.slurm_id:
                yield job, News({"slurm_id": seen.id})

    def find_start(self, job: Job, seen: SlurmJob | None) -> dict[str, Any]:
        """The start, as the end of the second that Slurm tells, so that no time limit is reached early."""
        seen, now = seen or SlurmJob(job.current.slurm_id or "", ""), self.service.clock.now()
        started_at = now if seen.started_at is None else min(now, seen.started_at + 1)
        return {"started_at": started_at, "slurm_id": seen.id or None, "slurm_node": seen.nodes or "a node",
                "commit": find_commit(self.disk, job)}

    def find_end(self, job: Job, seen: SlurmJob | None, over_s: float) -> News | None:
        """Judge a job that Slurm calls ended or does not know, by its files; None: it is too early for that."""
        folder = self.service.layout.folder_of(job)
        self.hurry()
        if seen and seen.state in SLURM_WAITING:
            seen = replace(seen, state=REQUEUED_BY_SLURM, reason=f"queued again: {seen.reason}", started_at=None)
        claim = read_claim(self.disk, folder, job.attempt_key)
        result = read_result(self.disk, folder, job.attempt_key)
        text = read_tail(self.disk, os.path.join(folder, f"slurm-{job.attempt}.log"), 0, TAIL_BYTES)
        news = judge_slurm_end(seen, claim, result, over_s, find_slurm_line(text), folder)
        if not news:
            return None
        is_cancelled = claim is None and news.result is not None and news.result.cause == KILLED
        if news.requeue or is_cancelled:
            is_as_judged = take_slurm_claim(self.disk, job, folder) in (OUR_CLAIM, claim)
            return news if is_as_judged else None
        if job.status == SUBMITTED:
            return replace(news, facts=self.find_start(job, seen))
        return news

    def cancel(self, unwanted: Iterable[SlurmJob]) -> None:
        """Raises: unavailable."""
        ids = sorted({slurm_job.id for slurm_job in unwanted if slurm_job.state not in (*SLURM_ENDS, "COMPLETING")})
        if ids:
            self.hurry()
            words = self.slurm.cancel(ids)
            if words and not re.search("Invalid job id|already completing|already finished", words):
                self.service.log.warning("scancel %s: %s", " ".join(ids), words)

    def has(self, job: Job) -> bool:
        return job.current.slurm_key is not None

    def start(self, job: Job, variables: Mapping[str, str] | None) -> bool:
        """Give the job to the thread."""
        self.live, self.submitting = (*self.live, job), job
        self.worker.wanted.set()
        return False

    def list_live(self) -> tuple[Job, ...]:
        state, ended = self.service.store.state, self.service.outcomes.unrecorded
        return tuple(job for job in state.live.values() if job.current.slurm_key and job.id not in ended)

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterator[Finding]:
        """Return what the thread has found, then let it go on."""
        ids = {job.id for job in self.live}
        if any(event.job_id in ids for event in runner_events):
            self.hurry()                                    # squeue will show the change
        found = self.found
        for job, news in found:
            yield job, news
            if news.result:
                self.submit_backoff.succeed()               # there is room for another
                self.service.wake()
            elif news.facts and "started_at" not in news.facts:
                command = format_line(job.command, 500)
                self.log.info("Submitted to Slurm as %s: job %s: %s", news.facts["slurm_id"], job.id, command)
        for job in self.live:
            # Slurm enforces limits of whole minutes.
            limits = find_limits(job, self.config.jobs)
            if job.status == RUNNING and not job.current.stop_cause and limits.timeout_seconds % 60:
                stop = find_stop(limits, Use(find_age(job, self.clock.now())))
                if stop:
                    yield job, News({"stop_cause": stop[0], "stop_line": stop[1]})
        self.live = self.list_live()
        if any(slurm_job.state != "COMPLETING" for slurm_job in self.list_stopped(self.live)):
            self.hurry()                                    # after squeue, the thread cancels them
        if found:                                           # what the disk has refused, squeue will show again
            self.found = ()
            self.worker.wanted.set()

    def hurry(self) -> None:
        """Run squeue often for a while."""
        self.hasty_until = self.service.clock.monotonic() + HURRY_S
        self.worker.wanted.set()

    def find_reason(self) -> str | None:
        """Why no job can be submitted now; None: one can."""
        is_submitting, backoff, error = self.submitting is not None, self.submit_backoff, self.error
        if not error:           # while a job is being submitted, the last error counts after its pause, too
            error = backoff.error if is_submitting else backoff.find_error(self.service.clock.monotonic())
        if error:
            return error.message
        return "the job before it is being submitted to Slurm" if is_submitting else None

    def find_error(self) -> NexusError | None:
        """The error that needs somebody's attention."""
        error = self.error                                  # its thread may set it meanwhile
        if error:
            return error
        refusal: NexusError | None = self.submit_backoff.error
        return None if refusal and refusal.kind == "conflict" else refusal

    def find_wait(self, job: Job) -> str:
        error = self.error or (self.submit_backoff.error if job.current.slurm_id is None else None)
        return describe_submitted(job, self.seen.get(job.current.slurm_key), error.message if error else None)

    def describe(self) -> dict[str, Any]:
        """The `slurm` of GET /status."""
        running = sum(job.status == RUNNING for job in self.live)
        error = self.find_error()
        return {"cluster": self.name or None, "trouble": error.message if error else None,
                "handed_jobs": len(self.live) - running, "running_jobs": running,
                "max_submitted": self.service.config.slurm.max_submitted,
                "partitions": [pick(vars(partition), partition.NAMES) for partition in self.partitions]}

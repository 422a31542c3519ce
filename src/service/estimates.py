"""When pending jobs will start, and how far running ones are."""

from __future__ import annotations

from collections.abc import Mapping

from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..schedule.estimates import MAX_ESTIMATED_JOBS, estimate_starts, know_run_times
from ..values.changes import list_finished
from ..values.job import COMPLETED, Job
from ..values.queue_order import PendingQueue
from ..views.api_json import progress_json

if TYPE_CHECKING:
    from typing import Any

    from .service import Service

ESTIMATE_INTERVAL_S = 3.0       # estimates are made anew at the earliest after this
ESTIMATE_BACKOFF_FACTOR = 100   # and after so many times what it took, which may be 0.5 s
MAX_ESTIMATE_PAUSE_S = 60.0     # but after this
PROGRESS_AFTER_S = 30.0         # of a job's run time: before that, nothing is told of its progress
MAX_LIKE = 100                  # ended jobs of a group, of which the median counts


class Estimates(Component):
    """Estimates when pending jobs start, and when running ones end."""

    def __init__(self, service: Service) -> None:
        import threading
        super().__init__(service)
        self.starts: Mapping[str, float] = {}               # {pending job: when it will start}
        self.plan_key: tuple[Any, ...] = ()                 # make_plan_key() of the plan that they were made of
        self.starts_until = float("-inf")                   # monotonic: before that they are not made again
        self.lock = threading.Lock()

    def find_starts(self) -> Mapping[str, float]:
        """Return {pending job: estimated start}.  They are made once for a plan, and take a small part of the time."""
        with self.lock:
            began, plan_key = self.clock.monotonic(), self.make_plan_key()
            if plan_key != self.plan_key and began >= self.starts_until:
                self.starts, self.plan_key = self.make_starts(), plan_key
                now = self.clock.monotonic()
                pause_s = min(MAX_ESTIMATE_PAUSE_S, ESTIMATE_BACKOFF_FACTOR * (now - began))
                self.starts_until = now + max(ESTIMATE_INTERVAL_S, pause_s)
            return self.starts

    def make_plan_key(self) -> tuple[Any, ...]:
        """Return what tells a plan from another: the state, what is closed, and the minute, as an end may be late."""
        planned = self.service.plan
        cards = [(capacity.gpu.uuid, capacity.reason and capacity.reason.code) for capacity in planned.gpus]
        box = self.service.turn_taking.box
        users = [(user.uid, user.wants, user.holdings) for user in box.users] if box else []
        return self.store.state.seq, planned.reason, dict(planned.machines), cards, self.clock.now() // 60, users

    def make_starts(self) -> Mapping[str, float]:
        import itertools
        state = self.store.state
        first = itertools.islice(PendingQueue(state).walk(state.queued), MAX_ESTIMATED_JOBS)
        jobs = [*state.running.values(), *first]
        is_unknown = self.service.is_slurm or state.paused or self.service.plan.reason        # Slurm decides then
        if not jobs or is_unknown or self.service.gpu_watch.find_gpu_error():
            return {}
        return estimate_starts(
            jobs, list(state.groups.values()), know_run_times(jobs, list_finished(state)),
            self.service.gpu_watch.see_gpus(state), self.config, self.clock.now(), self.service.pool.view_nodes(),
            self.service.turn_taking.box)

    def estimate_progress(self, job: Job, now: float) -> dict[str, Any]:
        """How far a running job is, and when it ends, by their keys in its JSON."""
        runtime_s = self.service.outcomes.find_runtime_s(job, now)
        if runtime_s < PROGRESS_AFTER_S:
            return {}
        found = self.service.log_watch.find_progress(job.log_dir)
        if found.reached:                       # it may have fallen: then nothing is told
            end = None if found.left_s is None else max(now, found.at + found.left_s)
            return progress_json(found.fraction, end, "output")
        expected_s, by = job.expected_time, "expected"
        if expected_s is None:
            expected_s, by = self.find_median_s(job), "group"
        if expected_s and runtime_s < expected_s:
            return progress_json(runtime_s / expected_s, now + expected_s - runtime_s, by)
        return {}

    def find_median_s(self, job: Job) -> float | None:
        """The median run time of the jobs of its group and user that have completed lately, in seconds."""
        import statistics
        if not job.group:
            return None
        state, times = self.store.state, list[float]()
        for *_, job_id in state.ended_in.get((job.user, job.group), ())[-MAX_LIKE:]:
            ended = state.jobs[job_id]
            if ended.status == COMPLETED and ended.current.runtime_seconds is not None:
                times.append(ended.current.runtime_seconds)
        return statistics.median(times) if times else None

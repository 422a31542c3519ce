"""The scheduler in simulated time.

    replay = Replay([gpu(0)], config())
    replay.add("abc", 60.0)                     # it will run for a minute
    replay.start_jobs()
    replay.advance(60.0)
    assert replay.ended_at == {"abc": 60.0}
"""
from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import nexus


class Replay:
    """Simulate the queue: plan() decides, and each job ends after its run time."""

    def __init__(self, gpus: Sequence[nexus.Gpu], config: nexus.Config) -> None:
        self.gpus, self.config, self.now = gpus, config, 0.0
        self.state = nexus.State()
        self.run_times: dict[str, float | None] = {}            # {job id: seconds; None: unknown}
        self.started_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        self.ends: list[tuple[float, str]] = []                 # of the running jobs whose run time is known, ascending
        self.delayed_until: float | None = None                 # when the next --begin or backoff ends

    def add(self, job_id: str, run_time: float | None, **fields: Any) -> None:
        """Queue a job that will run for `run_time` seconds.  `fields`: as in Job."""
        place = nexus.next_place(self.state, fields.pop("priority", 1))
        job = nexus.Job(**{"id": job_id, "command": job_id, "cwd": "/", "user": "", "created_at": self.now, "environment": "",
                           **place, **fields})
        for change in nexus.add_job(job):
            self.state.put(change)
        self.run_times[job_id] = run_time

    def decide(self) -> nexus.Plan:
        return nexus.plan(self.state, self.gpus, None, self.config, self.now)

    def start_jobs(self) -> nexus.Plan:
        """Start the jobs of plan(); return the plan."""
        planned = self.decide()
        for start in planned.starts:
            begun = nexus.begin_attempt(self.state.jobs[start.job_id], started_at=self.now, gpu_indices=start.gpu_indices,
                                        gpu_uuids=start.gpu_uuids)
            self.state.put(nexus.change_status(begun, nexus.RUNNING, self.now))
            self.started_at[start.job_id] = self.now
            run_time = self.run_times[start.job_id]
            if run_time is not None:
                bisect.insort(self.ends, (self.now + run_time, start.job_id))
        self.delayed_until = planned.delayed_until
        return planned

    def next_event_at(self) -> float | None:
        """When the next job ends, or may be tried again; None if no such time is known."""
        times = [at for at in (*(at for at, _ in self.ends[:1]), self.delayed_until) if at is not None]
        return max(self.now, min(times)) if times else None

    def advance(self, until: float) -> None:
        """Move the time to `until`, and end the jobs that end before."""
        self.now = until
        while self.ends and self.ends[0][0] <= until:
            _, job_id = self.ends.pop(0)
            for change in nexus.end_job(self.state, self.state.jobs[job_id], nexus.COMPLETED, until):
                self.state.put(change)
            self.ended_at[job_id] = until

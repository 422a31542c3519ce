"""Jobs in JSON, each as a caller may see it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..formats.codec import encode_json
from ..formats.progress import drop_bar
from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..runner.environment import find_python_env
from ..schedule.plan import find_delay_s
from ..schedule.reasons import format_reasons
from ..values.job import FINAL, LIVE, PENDING, RUNNING, Job
from ..values.queue_order import PendingQueue
from ..values.state import State
from ..values.text import format_time
from ..views.api_json import QUEUE_KEYS, JobTexts, job_json, pick_json, place_json, reason_json, round_known
from .access import Identity

if TYPE_CHECKING:
    from typing import Any

    from .service import Service

JOBS_A_PIECE = 200              # of a list that is streamed
PYTHON_KEYS = {"python", "python_env"}


class JobSerializer(Component):
    """Makes the JSON of jobs: of what State has, of the plan, and of what is measured while they run."""

    def __init__(self, service: Service) -> None:
        import threading
        super().__init__(service)
        self.texts = {is_public: JobTexts(is_public) for is_public in (False, True)}
        self.texts_lock = threading.Lock()

    def describe_jobs(self, jobs: Sequence[Job], fields: Sequence[str] = (),
                      describe: Callable[[Job], dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return jobs for the API, with these fields; none named: with all.  `describe`: of make_describe()."""
        now = self.clock.now()
        describe = describe or self.make_describe(jobs, fields)
        shown = []
        for job in jobs:
            facts = self.measure_running(job, now) if job.status == RUNNING else describe(job)
            if not fields or not PYTHON_KEYS.isdisjoint(fields):
                facts = {**facts, **self.describe_python(job)}
            node = self.find_place(job)
            shown.append(pick_json(job, now, node, fields, **facts) if fields else job_json(job, now, node, **facts))
        return shown

    def encode_jobs(self, caller: Identity, jobs: Sequence[Job], fields: Sequence[str],
                    rename: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[bytes]:
        """Yield the JSON of a list of jobs, as the caller may see it."""
        describe, most = self.make_describe(jobs, fields), 2 * len(self.store.state.jobs)
        for at in range(0, len(jobs), JOBS_A_PIECE):
            texts, part = [], jobs[at:at + JOBS_A_PIECE]
            if fields:
                texts = [encode_json(rename(caller.show(job.user, row)))
                         for job, row in zip(part, self.describe_jobs(part, fields, describe))]
            for job in part if not fields else ():
                if job.status in LIVE:                  # it changes all the time
                    texts.append(encode_json(caller.show(job.user, self.describe_jobs([job], (), describe)[0])))
                    continue
                planned = {**describe(job), **place_json(job, self.find_place(job))}
                with self.texts_lock:
                    kept = self.texts[not caller.may_see(job.user)]
                    texts.append(kept.format(job, planned, most, self.describe_python))
            yield (("," if at else "[") + ",".join(texts)).encode()
        yield b"]\n" if jobs else b"[]\n"

    def make_describe(self, jobs: Sequence[Job], fields: Sequence[str] = ()) -> Callable[[Job], dict[str, Any]]:
        """Make what returns what of these jobs depends on the queue and the plan, as far as it is asked for."""
        now, state = self.clock.now(), self.store.state
        pending = [job for job in jobs if job.shown_status == PENDING]
        wanted = {*(fields or QUEUE_KEYS)}
        estimates = self.service.estimates.find_starts() if pending and "estimated_start" in wanted else {}
        positions = self.find_positions(state, pending) if pending and "position" in wanted else {}
        has_reasons, planned = not wanted.isdisjoint(QUEUE_KEYS[1:]), self.service.explainer.find_plan(state)

        def describe(job: Job) -> dict[str, Any]:
            facts: dict[str, Any] = {**dict.fromkeys(QUEUE_KEYS), "position": positions.get(job.id)}
            if job.shown_status == PENDING and has_reasons:
                reasons, start = self.service.explainer.list_reasons(job, state, planned), estimates.get(job.id)
                if start is None and reasons[0].code == "begin-time":
                    start = now + find_delay_s(job, now)
                start = start and max(start, now)           # an estimate may be a minute old
                facts.update(waiting_for=format_reasons(reasons), reason=reason_json(reasons[0]),
                             estimated_start=format_time(start))
            return facts

        return describe

    def find_positions(self, state: State, jobs: Sequence[Job]) -> Mapping[str, int]:
        """{id: how many are before it} of pending jobs."""
        queue = PendingQueue(state)
        if len(jobs) * len(state.queued) > len(state.pending) / 4:      # all of them together are quicker
            return {job.id: position for position, job in enumerate(queue.walk(state.queued))}
        return {job.id: queue.find_position(state.pending[job.id]) for job in jobs if job.id in state.pending}

    def find_place(self, job: Job) -> str | None:
        """Return the machine that a job ran on, runs on, or must run on; None if it may still be any."""
        if job.current.slurm_node:
            return job.current.slurm_node
        has_begun = job.status == RUNNING or (job.status in FINAL and job.current.started_at is not None)
        name = job.current.node if has_begun or not self.service.pool.nodes else job.only_node
        return None if name is None else name or self.service.node

    def describe_python(self, job: Job) -> dict[str, Any]:
        """Which Python a job has, and in which environment.  What conda or a node makes of its PATH is not known."""
        variables = {**self.store.state.environments.get(job.environment, {}), **dict(job.variables)}
        if job.conda:
            return {"python": None, "python_env": f"conda {job.conda}"}
        path = None if job.only_node or job.current.node else variables.get("PATH") or os.defpath
        return {"python": path and self.machine.find_job_python(path, self.clock.now()),
                "python_env": find_python_env(variables)}

    def measure_running(self, job: Job, now: float) -> dict[str, Any]:
        """Return what a running job uses, and its run time, by their keys in its JSON."""
        usage, node = self.service.observer.find_usage(job.id), self.service.pool.nodes.get(job.current.node)
        line = self.service.log_watch.find_last_line(job.log_dir, job.log_base)
        return {
            **{name: round_known(number) for name, number in vars(usage.samples).items()},
            "rss_mib": round_known(usage.rss_mib), "cpu_percent": round_known(usage.cpu_percent),
            "runtime_seconds": round(self.service.outcomes.find_runtime_s(job, now), 3),
            **(node.describe_unknown(job) if node else {}),
            "idle_since": format_time(self.service.gpu_watch.find_idle_since(job)),
            "last_line": line and drop_bar(line),
            "metric_line": self.service.log_watch.get_metric_line(job.log_dir),
            "unrecorded": self.service.outcomes.describe_unrecorded(job),
            **self.service.estimates.estimate_progress(job, now)}

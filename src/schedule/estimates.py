"""When pending jobs will start: the scheduler in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..values.changes import change_status, end_job
from ..values.config import Config
from ..values.gpu import Gpu
from ..values.job import COMPLETED, RUNNING, Job, begin_attempt
from ..values.state import Group, Put, State
from ..values.value import replace
from .capacity import find_age
from .plan import plan
from .reasons import NodeView

MAX_ESTIMATED_STEPS = MAX_ESTIMATED_JOBS = 500
OVERDUE = 0.25                  # of the expected run time: the end of a job that exceeds it by more is unknown


def estimate_starts(jobs: Iterable[Job], groups: Iterable[Group], run_times: Mapping[str, float | None],
                    gpus: Sequence[Gpu], config: Config, now: float,
                    nodes: Sequence[NodeView] = ()) -> dict[str, float]:
    """{id of a pending job: when it will start, UTC epoch seconds}, for the jobs whose start can be estimated.

    `jobs`: the running and the first pending jobs, in order.  `run_times`: the whole run time of each, None if unknown.
    A job of unknown run time never ends here; once one has started, later starts get no estimate.
    """
    state, estimates, ends = State(), dict[str, float](), dict[str, float]()        # {job id: start}, {job id: end}
    for group in groups:
        state.put(Put("groups", group.name, group))
    for job in jobs:
        state.put(Put("jobs", job.id, job))
        age, run_s = find_age(job, now), run_times.get(job.id)
        if job.status == RUNNING and run_s is not None and age <= (1 + OVERDUE) * run_s:
            ends[job.id] = now + abs(run_s - age)       # x seconds over its time, it needs x more
    held = {uuid for job in state.running.values() for uuid in job.current.gpu_uuids}
    # Inside a container no process shows: all use is the jobs', and ends with them
    gpus = [replace(gpu, memory_used_mib=None) if gpu.uuid in held and not gpu.processes else gpu for gpu in gpus]
    for _ in range(MAX_ESTIMATED_STEPS):
        planned = plan(state, gpus, None, config, now, nodes)
        for start in planned.starts:
            begun = begin_attempt(state.jobs[start.job_id], started_at=now, gpu_indices=start.gpu_indices,
                                  gpu_uuids=start.gpu_uuids, node=start.node)
            state.put(change_status(begun, RUNNING, now))
            estimates[start.job_id] = now
            ends[start.job_id] = now + (run_times.get(start.job_id) or 0.0)
        times = [at for at in (*ends.values(), planned.delayed_until) if at is not None]
        if not times or any(run_times.get(start.job_id) is None for start in planned.starts):
            break
        now = max(now, min(times))
        for job_id in [job_id for job_id, at in ends.items() if at <= now]:
            del ends[job_id]
            for change in end_job(state, state.jobs[job_id], COMPLETED, now):
                state.put(change)
    return estimates


def know_run_times(jobs: Iterable[Job], finished: Iterable[Job]) -> dict[str, float | None]:
    """{job id: run time in seconds}: its submitter's, else the median of its command, else of its group."""
    import statistics
    past: dict[tuple[str, str | None], list[float]] = {}
    for job in finished:
        if job.status == COMPLETED and job.current.runtime_seconds is not None:
            past.setdefault(("command", job.command), []).append(job.current.runtime_seconds)
            past.setdefault(("group", job.group), []).append(job.current.runtime_seconds)
    run_times: dict[str, float | None] = {}
    for job in jobs:
        like = past.get(("command", job.command)) or (past.get(("group", job.group)) if job.group else None)
        run_times[job.id] = statistics.median(like[-100:]) if like and job.expected_time is None else job.expected_time
    return run_times

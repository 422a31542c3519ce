"""When pending jobs will start: the scheduler in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..values.bid import Bid, Holding, Want
from ..values.changes import change_status, end_job
from ..values.config import Config
from ..values.gpu import Gpu
from ..values.job import COMPLETED, RUNNING, Job, begin_attempt, list_shares
from ..values.state import Group, Put, State
from ..values.value import replace
from .capacity import find_age
from .plan import plan
from .reasons import NodeView, Plan
from .turns import Box, BoxUser, Ledger, credit, predict_end

MAX_ESTIMATED_STEPS = MAX_ESTIMATED_JOBS = 500
MAX_SHARED_STEPS = 50           # where other users have services on this box
OVERDUE = 0.25                  # of the expected run time: the end of a job that exceeds it by more is unknown


def estimate_starts(jobs: Iterable[Job], groups: Iterable[Group], run_times: Mapping[str, float | None],
                    gpus: Sequence[Gpu], config: Config, now: float,
                    nodes: Sequence[NodeView] = (), box: Box | None = None) -> dict[str, float]:
    """{id of a pending job: when it will start, UTC epoch seconds}, for the jobs whose start can be estimated.

    `jobs`: the running and the first pending jobs, in order.  `run_times`: the whole run time of each, None if unknown.
    `box`: other users of this box, whose jobs take turns with these.
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
    shared = SharedBox(box, now) if box else None
    for _ in range(MAX_SHARED_STEPS if shared else MAX_ESTIMATED_STEPS):
        planned = plan(state, gpus, None, config, now, nodes, box=shared.box if shared else None)
        for start in planned.starts:
            begun = begin_attempt(state.jobs[start.job_id], started_at=now, gpu_indices=start.gpu_indices,
                                  gpu_uuids=start.gpu_uuids, node=start.node)
            state.put(change_status(begun, RUNNING, now))
            estimates[start.job_id] = now
            ends[start.job_id] = now + (run_times.get(start.job_id) or 0.0)
        if shared and not state.pending:
            break
        if shared:
            shared.take_turns(planned, state.running.values(), now)
        other_end = shared.find_next_end() if shared else None
        times = [at for at in (*ends.values(), planned.delayed_until, other_end) if at is not None]
        if not times or any(run_times.get(start.job_id) is None for start in planned.starts):
            break
        now = max(now, min(times))
        for job_id in [job_id for job_id, at in ends.items() if at <= now]:
            del ends[job_id]
            for change in end_job(state, state.jobs[job_id], COMPLETED, now):
                state.put(change)
        gpus = shared.move_on(gpus, state.running.values(), now) if shared else gpus
    return estimates


class SharedBox:
    """The other users of this box in simulated time: their jobs end, and take the GPUs when it is their turn."""

    def __init__(self, box: Box, now: float) -> None:
        self.box = replace(box, users=tuple(
            user if user.uid == box.own_uid else replace(user, run_s=max(1.0, user.run_s), holdings=tuple(
                replace(holding, since=predict_end(holding, user.run_s, now) - max(1.0, user.run_s))
                for holding in user.holdings)) for user in box.users))
        self.looked_at = now

    def take_turns(self, planned: Plan, running: Iterable[Job], now: float) -> None:
        """The others take the GPUs that the plan has left to them, unless they still collect."""
        users = list[BoxUser]()
        for user in self.box.users:
            if user.uid == self.box.own_uid:
                users.append(replace(user, wants=planned.wants, holdings=list_holdings(running, now)))
                continue
            left = [uuid for uuid, owner in planned.turns.owners.items() if owner == user.uid]
            began = now if user.run_s != Bid.run_s else float("inf")        # nobody knows when such a one ends
            users.append(take_turn(user, left, user.uid == planned.turns.collector, began))
        self.box = replace(self.box, users=tuple(users))
        self.looked_at = now

    def find_next_end(self) -> float | None:
        ends = [holding.since + user.run_s for user in self.box.users if user.uid != self.box.own_uid
                for holding in user.holdings]
        return min((at for at in ends if at < float("inf")), default=None)

    def move_on(self, gpus: Sequence[Gpu], running: Iterable[Job], now: float) -> Sequence[Gpu]:
        """Count what each has had until now, and end what ends; return the GPUs as they are then."""
        users = self.box.users
        before = Ledger(self.box.had, {user.uid: user for user in users}, self.looked_at, now)
        held = dict[str, str]()                             # {GPU uuid: the other user who has it}
        after = list[BoxUser]()
        for user in users:
            if user.uid == self.box.own_uid:
                after.append(replace(user, holdings=list_holdings(running, now)))
                continue
            left = tuple(holding for holding in user.holdings if holding.since + user.run_s > now)
            held.update((holding.uuid, user.name) for holding in left)
            after.append(replace(user, holdings=left))
        ended = {holding.uuid for user in users for holding in user.holdings} - held.keys()
        self.box = replace(self.box, users=tuple(after), had=credit(before, users, now).had)
        shown = list[Gpu]()
        for gpu in gpus:
            if gpu.uuid in held:
                gpu = replace(gpu, lease_holder=held[gpu.uuid])
            elif gpu.lease_holder and gpu.uuid in ended:            # what its user's processes used is free
                others = tuple(process for process in gpu.processes if process.user != gpu.lease_holder)
                gpu = replace(gpu, lease_holder=None, processes=others,
                              memory_used_mib=0.0 if gpu.memory_used_mib is not None else None)
            shown.append(gpu)
        return shown


def list_holdings(running: Iterable[Job], now: float) -> tuple[Holding, ...]:
    """What jobs have of the GPUs of this machine."""
    return tuple(Holding(uuid, share, job.current.started_at or now) for job in running if not job.current.node
                 for uuid, share in zip(job.current.gpu_uuids, list_shares(job)))


def take_turn(user: BoxUser, left: Sequence[str], is_collecting: bool, began: float) -> BoxUser:
    """A user whose first jobs take the GPUs that are left to that one, if there are enough."""
    wants, holdings = list[Want](), list(user.holdings)
    for number, want in enumerate(user.wants):
        jobs, fitting = want.jobs, [uuid for uuid in left if uuid in want.uuids]
        while jobs and len(fitting) >= want.gpus:
            taken, fitting, jobs = fitting[:want.gpus], fitting[want.gpus:], jobs - 1
            holdings += [Holding(uuid, 100, began) for uuid in taken]
            left = [uuid for uuid in left if uuid not in taken]
        wants += [replace(want, jobs=jobs)] if jobs else []
        if jobs and is_collecting and want.collects:
            wants += user.wants[number + 1:]
            break
    return replace(user, wants=tuple(wants), holdings=tuple(holdings))


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

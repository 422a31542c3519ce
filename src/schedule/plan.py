"""plan(): what to do next, decided from values alone.

Jobs start in the queue's order.  A job that cannot start lets later jobs pass.  Jobs of one request class ask for
the same resources: if the first job of a class cannot start, plan() skips the rest of the class.  A job that waits
for GPUs longer than reserve_after_seconds is starving: plan() reserves GPUs for the first such jobs. Another job
may use reserved GPUs only if it is expected to end before they are needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.bid import Want
from ..values.config import Config, GpuConfig, JobsConfig
from ..values.gpu import Gpu
from ..values.job import Job, add_use, count_use, list_shares
from ..values.queue_order import describe_hold, walk_queue
from ..values.state import Group, State, request_class
from ..values.submission import JOB_FIELDS, format_gpus
from ..values.text import format_count, format_duration
from ..values.value import replace
from .capacity import (
    GpuCapacity,
    choose_gpus,
    find_end,
    format_jobs_there,
    lacks_folder,
    list_capacities,
    may_run_on,
    may_use,
    reserve,
)
from .explain import describe_awaited, describe_failure, describe_next_attempt, find_shortage, find_since
from .preemption import preempt, yield_to_others
from .quotas import Quotas
from .reasons import SHORTAGE, NodeView, Plan, Reason, Start, find_pause
from .turns import MAX_WANTS, Box, Turns

if TYPE_CHECKING:
    from typing import Any


class MachineCapacity:
    """What one machine can still take."""

    def __init__(self, name: str, reason: Reason | None, cpu_slots: int, capacities: Iterable[GpuCapacity]) -> None:
        self.name, self.reason = name, reason
        self.cpu_slots = self.free_slots = cpu_slots
        own = [capacity for capacity in capacities if capacity.gpu.node == name]
        self.gpus = [capacity for capacity in own if capacity.free > 0 and capacity.reason is None]
        self.load = (0.0, 0.0, 0)                               # of the jobs there: expected seconds left, GPUs, count

    def place(self, job: Job, config: GpuConfig, now: float) -> Sequence[GpuCapacity] | Reason:
        """The GPUs that a job gets here now, or why it gets none."""
        if self.reason and (job.gpus or self.name):     # on this machine that concerns its GPUs alone
            return self.reason
        if job.gpus:
            chosen = choose_gpus(job, self.gpus, config, now)
            return SHORTAGE if chosen is None else chosen
        if self.free_slots > 0:
            return ()
        return Reason("resources", "cpu_slots", f"all {self.cpu_slots} CPU slots "
                      f"{f'of {self.name} ' if self.name else ''}are taken ([jobs] cpu_slots)")

    def count(self, job: Job, left_s: float) -> None:
        """Count a job that runs here for `left_s` more seconds."""
        seconds, gpus, jobs = self.load
        self.load = seconds + left_s, gpus + job.gpus, jobs + 1
        self.free_slots -= not job.gpus

    def take(self, job: Job, chosen: Sequence[GpuCapacity], now: float) -> None:
        for capacity, share in zip(chosen, list_shares(job)):
            capacity.take(job, share, now)
        self.gpus = [capacity for capacity in self.gpus if capacity.free > 0]
        self.count(job, job.expected_time or 0.0)


class SlurmCapacity(MachineCapacity):
    """Slurm takes any job: jobs wait there for its GPUs.  One is submitted at a time, so that nexus's order holds."""

    def __init__(self, state: State, reason: Reason | None, most: int) -> None:
        there = sum(1 for job in state.live.values() if job.current.slurm_key)
        full = f"Slurm has {format_count(most, 'job')} of nexus, as many as [slurm] max_submitted allows"
        super().__init__("", reason or (Reason("quota", "max_submitted", full) if there >= most else None), 0, ())

    def place(self, job: Job, config: GpuConfig, now: float) -> Sequence[GpuCapacity] | Reason:
        return find_slurm_reason(job) or self.reason or ()

    def take(self, job: Job, chosen: Sequence[GpuCapacity], now: float) -> None:
        self.reason = Reason("resources", "slurm", "the job before it is being submitted to Slurm")


NOT_IN_SLURM = {name: row.slurm.format(name) for name, row in JOB_FIELDS.items() if row.slurm}


def find_slurm_reason(job: Job) -> Reason | None:
    """Why Slurm can never run this job."""
    if job.gpus % 1:
        return Reason("never", "gpus", f"wants {format_gpus(job.gpus)}, and Slurm gives out whole ones")
    if job.gpu_type and (job.gpu_type.lower() == "full" or not re.fullmatch("[A-Za-z0-9_.-]+", job.gpu_type)):
        return Reason("never", "gpu_type", f"wants a GPU of type {job.gpu_type}, which cannot be a type in Slurm: "
                      "sinfo -o %G shows those that there are, like a100")
    return next((Reason("never", name, detail) for name, detail in NOT_IN_SLURM.items()
                 if getattr(job, name) not in (None, False)), None)


def plan(state: State, gpus: Sequence[Gpu], error: str | None, config: Config, now: float,
         nodes: Sequence[NodeView] = (), reason: str = "", box: Box | None = None) -> Plan:
    """Decide which pending jobs start now and where, and why the others wait.

    `gpus`: as last observed.  `error`: why this machine's readings are unreliable; none of its GPUs is assigned then.
    `nodes`: the other machines.  `reason`: why nothing at all can start.  `box`: other users who share this machine.
    A job starts on the machine with the least load of those that can take it now.
    """
    is_slurm = config.jobs.launcher == "slurm"
    views = [NodeView("", config.jobs.cpu_slots, error), *([] if is_slurm else nodes)]
    folders = {view.name: view.folders for view in views}
    place = "slurm" if is_slurm else ""
    reasons = {view.name: Reason("node-down", place or view.name, view.reason) if view.reason else None
               for view in views}
    capacities = list_capacities(state.running.values(), gpus, config.gpu, now, reasons)
    quotas = Quotas(state, config.jobs)
    planned = Plan((), {}, quotas, tuple(capacities), reasons, folders,
                   Reason("node-down", "", reason) if reason else find_pause(state))
    if planned.reason:
        return planned
    turns = leave_turns(box, capacities, now) if box else Turns()
    machines = make_machines(state, views, reasons, capacities, config, now)
    starts, preempted = list[Start](), list[tuple[str, str]]()
    running = list(state.running.values())
    is_anyone_preemptible = any(job.preemptible for job in running)
    blocked: dict[tuple[Any, ...], Reason] = {}
    wants = WantList(capacities, config.jobs, now)
    delays: list[float] = []
    used = count_use(state)
    classes = state.ready.copy()
    for queue_class, job in walk_queue(state, classes, used):
        if (job.begin_at or job.retry_at) and (delay_s := find_delay_s(job, now)):
            delays.append(delay_s)
            continue
        request = request_class(job)
        if quotas.check(job) or request in blocked:
            waiting = classes.pop(queue_class)
            wants.count(queue_class, 0 if quotas.check(job) else len(waiting))
            continue
        open_to = [machine for name, machine in machines.items()
                   if is_slurm or (may_run_on(job, name) and not lacks_folder(job, folders[name]))]
        placed = place_job(job, open_to, config.gpu, now)
        if isinstance(placed, Reason):
            ends = None
            if is_anyone_preemptible and job.gpus and not job.preemptible:
                names = [machine.name for machine in open_to if not machine.reason]
                ends = preempt(job, names, running, capacities, config.gpu, now)
            if ends is not None:
                preempted += [(other.id, job.id) for other in ends]
                quotas.count(job)                   # it is about to start: no other preempts in its place
                add_use(used, job)
                continue
            blocked[request] = placed
            if wants.is_starving(job):
                reserve(job, capacities)
            wants.add(queue_class, job, len(classes.pop(queue_class)) if machines[""] in open_to else 0)
            continue
        machine, chosen = placed
        cards = [capacity.gpu for capacity in chosen]
        starts.append(Start(job.id, tuple(gpu.index for gpu in cards), tuple(gpu.uuid for gpu in cards),
                            machine.name, cards[0].slice if cards else None))
        wants.note_start(queue_class)
        machine.take(job, chosen, now)
        quotas.count(job)
        add_use(used, job)
    delayed_until = now + min(delays) if delays else None
    yielded = yield_to_others(box, turns, running, now) if box and config.jobs.preemptible_for_others else ()
    return replace(planned, starts=tuple(starts), preempted=tuple(preempted), yielded=tuple(yielded), blocked=blocked,
                   delayed_until=delayed_until, turns=turns, box=box, wants=tuple(wants.wants.values()))


def make_machines(state: State, views: Sequence[NodeView], reasons: Mapping[str, Reason | None],
                  capacities: Sequence[GpuCapacity], config: Config, now: float) -> dict[str, MachineCapacity]:
    """{name: machine}, with the jobs that run there counted."""
    machines = {view.name: MachineCapacity(view.name, reasons[view.name], view.cpu_slots, capacities) for view in views}
    if config.jobs.launcher == "slurm":
        machines[""] = SlurmCapacity(state, reasons[""], config.slurm.max_submitted)
    for job in state.running.values():
        if job.current.node in machines:
            machines[job.current.node].count(job, find_end(job, now) - now)
    return machines


def leave_turns(box: Box, capacities: Sequence[GpuCapacity], now: float) -> Turns:
    """Leave GPUs to other users of this box whose turn it is.

    A GPU that is shared gets no more jobs when the next one is another's turn: it would never become free.
    """
    here = [capacity for capacity in capacities if not capacity.gpu.node]
    told = {holding.uuid for user in box.users for holding in user.holdings}
    for capacity in here:           # who tells that he has a GPU takes turns: it can be kept until he ends
        capacity.is_reachable |= (capacity.gpu.lease_holder is not None and capacity.gpu.uuid in told)
    open_to_all = [capacity for capacity in here if capacity.reason is None and capacity.free > 0]
    open_to_all.sort(key=lambda capacity: bool(capacity.jobs))
    turns = box.find_turns([capacity.gpu.uuid for capacity in open_to_all], now)
    for capacity in open_to_all:
        owner = turns.owners.get(capacity.gpu.uuid, box.own_uid)
        capacity.turn_of = "" if owner == box.own_uid else box.names[owner]
        capacity.collected = turns.wanted if owner == turns.collector and capacity.gpu.uuid in turns.sets else 0
    return turns


class WantList:
    """What other users of this box are told of the jobs that wait for its GPUs."""

    def __init__(self, capacities: Iterable[GpuCapacity], config: JobsConfig, now: float) -> None:
        self.config, self.now = config, now
        self.here = [capacity for capacity in capacities if not capacity.gpu.node
                     and (capacity.reason is None or capacity.gpu.lease_holder)]
        self.wants: dict[tuple[Any, ...], Want] = {}        # {request class: want}
        self.begun: dict[tuple[Any, ...], int] = {}         # {queue class: how many of its jobs start now}

    def is_starving(self, job: Job) -> bool:
        return self.now - find_since(job) >= self.config.reserve_after_seconds

    def note_start(self, queue_class: tuple[Any, ...]) -> None:
        self.begun[queue_class] = self.begun.get(queue_class, 0) + 1

    def add(self, queue_class: tuple[Any, ...], job: Job, count: int) -> None:
        """Add `count` jobs of a class, of which this is the first that does not start, if a GPU here would do.

        Those that give way to other users have what nobody else wants.
        """
        uuids = [capacity.gpu.uuid for capacity in self.here
                 if may_use(job, capacity.gpu) and capacity.most_mib >= (job.gpu_mem_mib or 0)]
        gpus = len(list_shares(job))
        waiting = count - self.begun.get(queue_class, 0)
        if job.preemptible and self.config.preemptible_for_others:
            return
        if waiting > 0 and 0 < gpus <= len(uuids) and len(self.wants) < MAX_WANTS:
            self.wants[request_class(job)] = Want(
                gpus, tuple(uuids), waiting, find_since(job), self.is_starving(job))

    def count(self, queue_class: tuple[Any, ...], count: int) -> None:
        """Count more jobs of the same request, of another group or user."""
        want = self.wants.get(queue_class[-1])
        if want:
            self.wants[queue_class[-1]] = replace(want, jobs=want.jobs + count)


def place_job(job: Job, machines: Iterable[MachineCapacity], config: GpuConfig,
              now: float) -> tuple[MachineCapacity, Sequence[GpuCapacity]] | Reason:
    """The machine with the least load that can take a job now, and the job's GPUs there; or why none can."""
    reasons: dict[Reason, None] = {}
    for machine in sorted(machines, key=lambda machine: machine.load):
        placed = machine.place(job, config, now)
        if not isinstance(placed, Reason):
            return machine, placed
        reasons[placed] = None
    if SHORTAGE in reasons or not reasons:
        return SHORTAGE
    return replace(next(iter(reasons)), detail="; ".join(reason.detail for reason in reasons))


def find_delay_s(job: Job, now: float) -> float:
    """Seconds until the --begin of a pending job, and the backoff after its last attempt, are over."""
    return max(0.0, (job.retry_at or now) - now, (job.begin_at or now) - now)


# Why a job waits

def list_reasons(job: Job, group: Group | None, planned: Plan, config: Config, now: float, reader: str = "",
                 awaited: Mapping[str, Sequence[tuple[int, str]]] = {}) -> list[Reason]:
    """Why a pending job, not in Slurm's queue, does not run now: all that holdings it, or else what it waits for.

    `reader`: the user who is told of "your own jobs".  `awaited`: State's.
    """
    reasons = []
    if job.is_held:
        reasons.append(Reason("held", "job", f"it is held (nexus resume {job.id})"))
    if planned.reason:
        reasons.append(planned.reason)
    if group and group.hold:
        reasons.append(Reason("held", group.name, describe_hold(group)))
    if find_delay_s(job, now):
        begin_at = job.begin_at or now
        if begin_at > (job.retry_at or now):
            delay = Reason("begin-time", "begin_at", f"begins in {format_duration(begin_at - now)}, as asked")
        else:
            failure = describe_failure(job)
            delay = Reason("begin-time", "retry", f"{failure}; {describe_next_attempt(job, now)}")
        reasons.append(delay)
    if job.pending_dependencies:
        parents = format_jobs_there(job.pending_dependencies)
        reasons.append(Reason("dependency", ",".join(job.pending_dependencies), parents))
    for name in job.pending_groups:
        reasons.append(Reason("dependency", name, describe_awaited(name, awaited.get(name, ()))))
    if job.after_process:
        reasons.append(Reason("dependency", "pid", f"process {job.after_process[0]}"))
    return reasons or [find_shortage(job, planned, config, now, reader)]

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
from ..values.config import Config, GpuConfig
from ..values.gpu import Gpu
from ..values.job import Job, add_use, count_use, list_shares
from ..values.queue_order import describe_hold, walk_queue
from ..values.state import Group, State, request_class
from ..values.submission import JOB_FIELDS, format_gpus
from ..values.text import format_count, format_duration
from ..values.value import replace
from .capacity import GpuCapacity, choose_gpus, find_end, format_jobs_there, lacks_folder, list_capacities, may_run_on, reserve
from .explain import describe_awaited, describe_failure, describe_next_attempt, find_shortage
from .preemption import preempt
from .quotas import Quotas
from .reasons import SHORTAGE, NodeView, Plan, Reason, Start, find_pause

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
        return Reason("resources", "cpu_slots", f"all CPU slots of {self.name} are taken" if self.name else
                      f"all {self.cpu_slots} CPU slots are taken (cpu_slots)")

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
         nodes: Sequence[NodeView] = (), reason: str = "") -> Plan:
    """Decide which pending jobs start now and where, and why the others wait.

    `gpus`: as last observed.  `error`: why this machine's readings are unreliable; none of its GPUs is assigned then.
    `nodes`: the other machines.  `reason`: why nothing at all can start.  A job starts on the machine with the least
    load of those that can take it now.
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
    machines = {view.name: MachineCapacity(view.name, reasons[view.name], view.cpu_slots, capacities) for view in views}
    if is_slurm:
        machines[""] = SlurmCapacity(state, reasons[""], config.slurm.max_submitted)
    for job in state.running.values():
        if job.current.node in machines:
            machines[job.current.node].count(job, find_end(job, now) - now)
    starts, preempted = list[Start](), list[tuple[str, str]]()
    running = list(state.running.values())
    is_anyone_preemptible = any(job.preemptible for job in running)
    blocked: dict[tuple[Any, ...], Reason] = {}
    delays: list[float] = []
    used = count_use(state)
    classes = state.ready.copy()
    for queue_class, job in walk_queue(state, classes, used):
        if (job.begin_at or job.retry_at) and (delay_s := find_delay_s(job, now)):
            delays.append(delay_s)
            continue
        request = request_class(job)
        if quotas.check(job) or request in blocked:
            del classes[queue_class]
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
            del classes[queue_class]
            since = job.status_history[-1][1] if job.status_history else job.created_at
            if now - since >= config.jobs.reserve_after_seconds:
                reserve(job, capacities)
            continue
        machine, chosen = placed
        cards = [capacity.gpu for capacity in chosen]
        starts.append(Start(job.id, tuple(gpu.index for gpu in cards), tuple(gpu.uuid for gpu in cards),
                            machine.name, cards[0].slice if cards else None))
        machine.take(job, chosen, now)
        quotas.count(job)
        add_use(used, job)
    delayed_until = now + min(delays) if delays else None
    return replace(planned, starts=tuple(starts), preempted=tuple(preempted), blocked=blocked,
                   delayed_until=delayed_until)


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
    """Why a pending job, not in Slurm's queue, does not run now: all that holds it, or else what it waits for.

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

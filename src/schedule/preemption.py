"""Which running jobs make way for a job of a higher priority, and when the next ones end by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..values.causes import PREEMPTED
from ..values.config import GpuConfig
from ..values.gpu import Gpu
from ..values.job import RUNNING, Job, list_shares
from ..values.state import with_facts
from ..values.value import replace
from .capacity import GpuCapacity, choose_gpus, find_age, find_foreign_memory, list_capacities, may_use
from .reasons import Plan
from .turns import Box, Turns

PREEMPT_AFTER_S = 60.0          # a preemptible job has its GPUs for so long at least


def preempt(job: Job, nodes: Sequence[str], running: list[Job], capacities: Sequence[GpuCapacity],
            config: GpuConfig, now: float) -> list[Job] | None:
    """The preemptible jobs of one machine that must be stopped so that a job can start; None: that is of no use.

    It gets the GPUs whose jobs have run for the shortest time, first those that become free anyway.  They are reserved
    for it.  In `running`, the jobs that are chosen get their stop_cause.
    """
    share = list_shares(job)[-1]
    for capacity in capacities if job.gpus < 1 else ():         # there may be room beside another one that preempts
        if 0 < capacity.kept <= 100 - share and capacity.gpu.node in nodes and may_use(job, capacity.gpu):
            capacity.kept += share
            return []
    for node in nodes:
        there = list_preempted_from(node, capacities, job)
        here = [other for other in running if other.gpus and other.current.node == node]
        others = [other for other in list_preemptible(here) if find_age(other, now) >= PREEMPT_AFTER_S]
        chosen = choose_ends(job, here, others, [capacity.gpu for capacity in there], config, now)
        if chosen is None:
            continue
        ends, placed = chosen
        kept = {capacity.gpu.uuid: 100 - capacity.free + share for capacity, share in zip(placed, list_shares(job))}
        for capacity in there:
            if capacity.gpu.uuid in kept:
                capacity.reserved_for, capacity.reserved_gpus = job.id, job.gpus
                capacity.kept = kept[capacity.gpu.uuid]
        running[:] = [with_facts(other, stop_cause=PREEMPTED) if other in ends else other for other in running]
        return ends
    return None


def yield_to_others(box: Box, turns: Turns, running: Sequence[Job], now: float) -> list[tuple[str, str]]:
    """The preemptible jobs that give way to other users of this box: (job id, user).

    A user for whom enough GPUs are free, or become free, gets no more.
    """
    yielded: list[tuple[str, str]] = []
    here = [job for job in running if job.gpus and not job.current.node]
    ending = {uuid for job in here if job.current.stop_cause for uuid in job.current.gpu_uuids}
    old = sorted((job for job in list_preemptible(here) if find_age(job, now) >= PREEMPT_AFTER_S),
                 key=lambda job: find_age(job, now))
    for user in box.list_waiting(now):
        want = user.wants[0]
        there = {uuid for uuid in want.uuids if turns.owners.get(uuid) == user.uid or uuid in ending}
        chosen = [job for job in old if not there.issuperset(job.current.gpu_uuids)
                  and not set(want.uuids).isdisjoint(job.current.gpu_uuids)]
        ends: list[Job] = []
        while chosen and len(there) < want.gpus:
            ends.append(chosen.pop(0))
            there |= set(want.uuids).intersection(ends[-1].current.gpu_uuids)
        if len(there) >= want.gpus:
            yielded += [(job.id, user.name) for job in ends]
            old = [job for job in old if job not in ends]
            ending -= there
    return yielded


def list_preempted_from(node: str, capacities: Iterable[GpuCapacity], job: Job) -> list[GpuCapacity]:
    """The GPUs of a machine that preempting may free for a job: kept for nobody else, without jobs that start now."""
    return [capacity for capacity in capacities if capacity.gpu.node == node and capacity.reserved_for in (None, job.id)
            and all(other.status == RUNNING for other in capacity.jobs)]


def list_preemptible(running: Iterable[Job]) -> list[Job]:
    return [job for job in running if job.preemptible and not job.current.stop_cause]


def choose_ends(job: Job, here: Sequence[Job], others: Sequence[Job], gpus: Sequence[Gpu], config: GpuConfig,
                now: float) -> tuple[list[Job], list[GpuCapacity]] | None:
    """(those of `others` that must be stopped so that a job can start, its GPUs then); None: that is of no use.

    `here`: all running jobs of the machine, of which some may be ending.
    """
    ending = [other for other in here if other.current.stop_cause]
    others = sorted(others, key=lambda other: find_age(other, now))
    # The oldest job on each GPU counts.
    ages = {uuid: find_age(other, now) for other in others for uuid in other.current.gpu_uuids}
    gpus = sorted(gpus, key=lambda gpu: ages.get(gpu.uuid, 0.0))
    placed = choose_without(job, ending, here, gpus, config, now) or choose_without(
        job, [*ending, *others], here, gpus, config, now)
    if not placed:
        return None
    gpus = [capacity.gpu for capacity in placed]
    ends = [other for other in others if any(gpu.uuid in other.current.gpu_uuids for gpu in gpus)]
    for spared in ends[::-1]:                       # the oldest may stay if the others are enough
        fewer = [other for other in ends if other is not spared]
        if choose_without(job, ending + fewer, here, gpus, config, now):
            ends = fewer
    return ends, choose_without(job, ending + ends, here, gpus, config, now) or []


def find_next_ends(job: Job, planned: Plan, nodes: Iterable[str], config: GpuConfig,
                   now: float) -> tuple[list[Job], float] | None:
    """(the preemptible jobs that are too young to be stopped for a job, in how many seconds they are not)

    None: stopping jobs is of no use, or there is nothing to wait for.
    """
    choices = []
    for node in nodes if job.gpus and not job.preemptible else ():
        gpus = [capacity.gpu for capacity in list_preempted_from(node, planned.gpus, job)]
        here = list({other.id: other for capacity in planned.gpus if capacity.gpu.node == node
                     for other in capacity.jobs if other.status == RUNNING}.values())
        others = sorted(list_preemptible(here), key=lambda other: -find_age(other, now))
        if not others or choose_ends(job, here, others, gpus, config, now) is None:
            continue
        for count in range(1, len(others) + 1):     # the oldest may be stopped first
            chosen = choose_ends(job, here, others[:count], gpus, config, now)
            if chosen:
                left_s = PREEMPT_AFTER_S - find_age(others[count - 1], now)
                choices += [(chosen[0], left_s)] if chosen[0] and left_s > 0 else []
                break
    return min(choices, key=lambda choice: choice[1], default=None)


def choose_without(job: Job, gone: Iterable[Job], running: Sequence[Job], gpus: Sequence[Gpu], config: GpuConfig,
                   now: float) -> list[GpuCapacity] | None:
    """choose_gpus(), as if the jobs in `gone` had ended.  Their memory is free then, also where nothing lists it."""
    ids = {other.id for other in gone}
    left = [other for other in running if other.id not in ids]
    held = {uuid for other in left for uuid in other.current.gpu_uuids}
    freed = {uuid for other in running if other.id in ids for uuid in other.current.gpu_uuids} - held
    then = [gpu if gpu.uuid not in freed or gpu.memory_used_mib is None else replace(
        gpu, memory_used_mib=find_foreign_memory(gpu, list(running)),
        processes=tuple(process for process in gpu.processes if process.job_id not in ids)) for gpu in gpus]
    return choose_gpus(job, list_capacities(left, then, config, now, {}), config, now)

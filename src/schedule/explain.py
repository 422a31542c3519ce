"""Why a job waits, in words: what is short, who has it, and what it comes after."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from ..formats.nvidia_smi import PROHIBITED
from ..values.causes import PREEMPTED, get_cause
from ..values.config import Config, GpuConfig, JobsConfig
from ..values.gpu import Gpu
from ..values.job import Job
from ..values.state import request_class
from ..values.text import format_count, format_duration, format_indices, format_line, format_memory, join_some, list_some
from ..values.value import replace
from .capacity import (
    GpuCapacity,
    describe_kept,
    describe_slices,
    find_foreign,
    find_never,
    format_asked,
    format_jobs_there,
    is_left_out,
    lacks_folder,
    list_verdicts,
    may_run_on,
    may_share,
    may_use,
)
from .preemption import find_next_ends
from .reasons import DEFAULT_MODE, SHORTAGE, Plan, Reason
from .turns import find_next_turn


def describe_awaited(group: str, jobs: Sequence[tuple[int, str]]) -> str:
    """`3 jobs of group g: abc, abd, abe`: of its jobs, those that have not ended."""
    first = [job_id for _, job_id in jobs[:8]]
    more = [f"and {len(jobs) - 8} more"] if len(jobs) > 8 else []
    return f"{format_count(len(jobs), 'job')} of group {group}: {', '.join([*first, *more])}"


def find_shortage(job: Job, planned: Plan, config: Config, now: float, reader: str) -> Reason:
    """What a job waits for that nothing holds."""
    if any(capacity.reserved_for == job.id for capacity in planned.gpus):       # others of its class may not have these
        return explain_shortage(job, planned, config.gpu, now, reader)
    quota = planned.quotas.check(job) if planned.quotas else None
    if quota:
        return quota
    request, blocked = request_class(job), planned.blocked or {}
    alike = job.user, job.preemptible, request          # for these it is the same
    if alike in blocked:
        return blocked[alike]
    reason = blocked.get(request) or Reason("resources", "", "it is about to start")
    if reason == SHORTAGE:
        reason = blocked[alike] = explain_shortage(job, planned, config.gpu, now, reader)
    return reason


def describe_failure(job: Job) -> str:
    """`attempt 4 failed (timeout)`; where the command did not run, or its machine went down, with the reason."""
    if not job.attempts:
        return "it failed"
    last = job.attempts[-1]
    words = f": {last.cause_line}" if get_cause(last.cause).shows_line and last.cause_line else ""
    return f"attempt {job.attempt} failed ({last.cause}{words})"


def describe_next_attempt(job: Job, now: float) -> str:
    return f"it is tried again in {format_duration(max(0.0, (job.retry_at or now) - now))}"


def find_unshared(job: Job, gpus: Iterable[Gpu]) -> Reason | None:
    """Why none of these GPUs can be shared, if the job wants a share and may use some of them."""
    usable = [gpu for gpu in gpus if may_use(job, gpu) and gpu.compute_mode != PROHIBITED]
    if not usable or not job.gpus % 1 or job.exclusive or any(map(may_share, usable)):
        return None
    gpu = usable[0]
    where = f" on {gpu.node}" if gpu.node else ""
    return Reason("never", "compute_mode",
                  f"wants {format_asked(job)}, and each GPU is in compute mode {gpu.compute_mode}, for one process "
                  f"only; to share GPU {gpu.place}{where}: {DEFAULT_MODE.format(gpu.index)}")


def find_since(job: Job) -> float:
    """Since when a pending job waits."""
    return job.status_history[-1][1] if job.status_history else job.created_at


def describe_place(job: Job, position: int, estimate: float | None, gpus: Sequence[GpuCapacity], config: JobsConfig,
                   now: float, is_shared: bool = False) -> list[str]:
    """The facts that `nexus why` prints of a pending job before its list of GPUs.

    `is_shared`: other users have services on this box.
    """
    room = f" with {format_memory(job.gpu_mem_mib)} free on each" if job.gpu_mem_mib else ""
    only = f"; it accepts only GPU {format_indices(job.gpu_ids)} (--gpu-ids)" if job.gpu_ids is not None else ""
    facts = [f"{format_count(position, 'job')} before it in the queue" if position else "it is first in the queue",
             f"it asks for {format_asked(job)}{room}{only}"]
    reserved = [capacity for capacity in gpus if capacity.reserved_for == job.id]
    if reserved:
        count = sum(not capacity.jobs and not capacity.gpu.lease_holder for capacity in reserved)
        facts.append(f"it has waited for over {format_duration(config.reserve_after_seconds)}: GPUs are kept for it, "
                     f"{count} of {len(reserved)} so far")
        ending = list(dict.fromkeys(other.id for capacity in reserved for other in capacity.jobs))
        if ending and estimate is None:
            facts.append(f"it starts when {format_jobs_there(ending)} {'has' if len(ending) == 1 else 'have'} ended: "
                         "when that is, no --expect and no time limit tells")
    elif is_shared and job.gpus > 1 and (left_s := config.reserve_after_seconds - (now - find_since(job))) > 0:
        facts.append(f"if it waits for {format_duration(left_s)} more, GPUs are kept for it as they become free")
    if estimate is not None:
        facts.append("it will start " + (f"in about {format_duration(estimate - now)}" if estimate - now >= 1
                                         else "at any moment"))
    return facts


def describe_holders(job: Job, capacities: Sequence[GpuCapacity], config: GpuConfig, reader: str,
                     is_shared: bool) -> str:
    """`3 taken by your own jobs, 1 by bob`: who has how many of the GPUs that a job lacks; "" where no job runs there.

    Of other users' jobs the same words are for them and for who reads them, so these say names.  `is_shared`: services
    of others count, too.
    """
    if not any(capacity.jobs or (is_shared and capacity.gpu.lease_holder) for capacity in capacities):
        return ""
    counts: dict[str, int] = {}
    for capacity in capacities:
        others = [process.user or "somebody" for process in find_foreign(capacity.gpu, config)]
        others = [capacity.gpu.lease_holder] if is_shared and capacity.gpu.lease_holder else others
        holders = list(dict.fromkeys([other.user for other in capacity.jobs] or others))
        if holders:
            is_own = capacity.jobs and holders == [reader] == [job.user]
            words = "your own jobs" if is_own else " and ".join(holders)
            counts[words] = counts.get(words, 0) + 1
    return ", ".join(f"{count} by {words}" for words, count in counts.items()).replace(" by", " taken by", 1)


def describe_preemption(job: Job, planned: Plan, nodes: Iterable[str], config: GpuConfig, now: float) -> str:
    """`job abc is preemptible and may be stopped for it in 40s`; "" if the job does not wait for that."""
    stopped = {other for other, by in planned.preempted if by == job.id}
    ending = [other.id for capacity in planned.gpus if capacity.reserved_for == job.id for other in capacity.jobs
              if other.id in stopped or other.current.stop_cause == PREEMPTED]
    if ending:
        ids, when = list(dict.fromkeys(ending)), "being stopped for it"
    elif found := find_next_ends(job, planned, nodes, config, now):
        ids = [other.id for other in found[0]]
        when = f"preemptible and may be stopped for it in {format_duration(found[1])}"
    else:
        return ""
    return f"{format_jobs_there(ids)} {'is' if len(ids) == 1 else 'are'} {when}"


def describe_sharing(job: Job, planned: Plan, usable: Container[str], now: float, reader: str) -> str:
    """`bob has 60 waiting; the next GPU is for your first job`: of other users' services that want these GPUs."""
    box, turns = planned.box, planned.turns
    if not box:
        return ""
    name, is_reader = box.names.get(box.own_uid, reader), job.user == reader
    others = [user for user in box.users if user.uid != box.own_uid]
    waiting = [f"{user.name} has {user.waiting} waiting" for user in others
               if any(uuid in usable for want in user.wants for uuid in want.uuids)]
    if not waiting and not any(holding.uuid in usable for user in others for holding in user.holdings):
        return ""
    if turns.collector == box.own_uid and any(capacity.reserved_for == job.id for capacity in planned.gpus):
        count = sum(turns.owners[uuid] == box.own_uid for uuid in turns.sets)
        turn = f"{'you have' if is_reader else f'{name} has'} {count} of the {turns.wanted} GPUs"
    elif found := find_next_turn(box, planned.find_free(), usable, now):
        uid, _ = found
        is_own = uid == box.own_uid and is_reader
        turn = "the next GPU is for your first job" if is_own else f"the next turn is {box.names[uid]}'s"
    else:
        turn = ""
    return "; ".join(filter(None, [join_some(waiting, 3), turn]))


def format_places(places: Sequence[str]) -> str:
    """`GPU 3 is`, `GPUs 2, 3 are`."""
    return f"GPU {places[0]} is" if len(places) == 1 else f"GPUs {', '.join(places)} are"


def explain_shortage(job: Job, planned: Plan, config: GpuConfig, now: float, reader: str) -> Reason:
    """Why a job does not get its GPUs, in short: how many are free, who has the others, and what blocks them else."""
    lacking = [name for name, paths in planned.folders.items() if may_run_on(job, name) and lacks_folder(job, paths)]
    usable = [capacity.gpu for capacity in planned.gpus if not is_left_out(capacity.gpu, config)]
    machines = {name: [gpu for gpu in usable if gpu.node == name]
                for name in planned.machines if may_run_on(job, name) and name not in lacking}
    unable: dict[str, list[str]] = {}                   # {error: the machines that cannot run it}
    for name, error in job.excluded_nodes:
        unable.setdefault(error, []).append(name or "this machine")
    excluded_nodes = [f"{join_some(names)} cannot run it: {error}" for error, names in unable.items()]
    if lacking:
        excluded_nodes.append(
            f"the directory {format_line(job.cwd, 200)} does not exist on {join_some(lacking)}: "
            "make it there, or share it (NFS), or send the work tree along with --snapshot")
    if not machines and not lacking:
        return Reason("never", "node", "; ".join(excluded_nodes) or f"there is no node {job.only_node}")
    # A machine that gets no job now, and shows no GPU, may fit.
    is_unknown = any(planned.machines[name] and not gpus for name, gpus in machines.items())
    never = find_never(job, machines) or find_unshared(job, [gpu for gpus in machines.values() for gpu in gpus])
    if never and not is_unknown and not lacking:
        return never
    details = [reason.detail for reason in map(planned.machines.get, machines) if reason]
    verdicts = [(capacity, reason) for capacity, reason in list_verdicts(job, planned.gpus, config, now)
                if not planned.machines.get(capacity.gpu.node)]
    total, free = len(verdicts), sum(reason is None for _, reason in verdicts)
    only = verdicts[0][1] if total == 1 else None
    kept: dict[str, list[str]] = {}                     # {for which job: GPUs}
    for capacity, reason in verdicts if not only else ():
        if reason and reason.detail == f"is kept for job {describe_kept(capacity)}":
            kept.setdefault(describe_kept(capacity), []).append(capacity.gpu.place)
    others = [f"{format_places(places)} kept for job {words}" for words, places in kept.items()]
    others += [f"GPU {capacity.gpu.place} {reason.detail}"      # what no job can change
              for capacity, reason in verdicts if reason and reason.subject == capacity.gpu.place and not only
              and not reason.detail.startswith("is kept for job ") and not (planned.box and capacity.gpu.lease_holder)]
    nodes = [name for name in machines if not planned.machines[name]]
    preemption = describe_preemption(job, planned, nodes, config, now)
    note = describe_slices(job, (capacity.gpu for capacity in planned.gpus))
    taken = describe_holders(job, [capacity for capacity, reason in verdicts if reason], config, reader,
                             planned.box is not None)
    usable_uuids = {capacity.gpu.uuid for capacity, _ in verdicts if not capacity.gpu.node}
    sharing = describe_sharing(job, planned, usable_uuids, now, reader)
    where = " of one machine" if job.gpus > 1 and len(machines) > 1 else ""
    verb, stop = "is" if free == 1 else "are", ";" if note else ":"
    first = f"needs {format_asked(job)}{where}; {free} of {total} {verb} free{note}" + (taken and f"{stop} {taken}")
    if only:
        first = f"GPU {verdicts[0][0].gpu.place} {only.detail}"
    return replace(only or SHORTAGE, detail="; ".join([
        *([first] if total else []), *filter(None, [preemption]), *list_some(others, 2), *details, *excluded_nodes,
        *filter(None, [sharing])]))

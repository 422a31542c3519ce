"""What a GPU can take: whether a job may run on it, why not, and which GPUs are chosen.

Shares of GPUs are counted in hundredths.  They are accounting: nothing forces a job to keep to its share.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from ..formats.nvidia_smi import EXCLUSIVE, PROHIBITED
from ..values.config import GpuConfig
from ..values.gpu import Gpu, GpuMeans, GpuProcess
from ..values.job import Job, list_shares, needs_folder
from ..values.submission import format_gpus
from ..values.text import format_indices, format_line, format_memory, join_some
from ..values.value import Value
from .reasons import DEFAULT_MODE, Reason

MPS_SERVER = "nvidia-cuda-mps-server"
NAME_LENGTH = 15                                # so many characters of a process's name the kernel keeps


def find_gpu_reason(gpu: Gpu, config: GpuConfig, jobs: Sequence[Job] = ()) -> Reason | None:
    """Why no further job may have this GPU.  A reason of code `resources` may go away when the jobs there end.

    An unknown amount of memory is a reason only if a minimum is configured.
    """
    if gpu.fault:
        return Reason("node-down", gpu.place, f"is unusable ({gpu.fault})")
    if gpu.is_paused:
        note = f" ({gpu.pause_reason}; nexus resume {gpu.place})" if gpu.pause_reason else ""
        return Reason("paused", gpu.place, f"is paused{note}")
    if gpu.compute_mode == PROHIBITED:
        return Reason("held", gpu.place, f"is unusable (compute mode {PROHIBITED}; {DEFAULT_MODE.format(gpu.index)})")
    if gpu.is_withheld:
        return Reason("held", gpu.place, "is not in the service's CUDA_VISIBLE_DEVICES")
    if is_left_out(gpu, config):
        return Reason("held", gpu.place, "is not among [gpu] ids")
    if gpu.is_mig and gpu.slice is None:
        return Reason("held", gpu.place,
                      "is in MIG mode without slices (sudo nvidia-smi mig -cgi PROFILE -C makes them)")
    foreign, room, others = find_foreign(gpu, config), find_room(gpu, jobs), find_foreign_memory(gpu, jobs)
    unseen, detail = find_unseen(gpu, jobs, config), ""
    if gpu.lease_holder:
        detail = f"is held by the nexus of {gpu.lease_holder}"
    elif (foreign and not (config.share_with_others and may_share(gpu))) or unseen:
        detail = f"is in use by {describe_users(foreign, unseen)}"
    elif room is None:
        detail = "does not tell its memory, and min_free_mem_mib is set" if config.min_free_mem_mib else ""
    elif room < config.min_free_mem_mib:
        detail = describe_room(room, config.min_free_mem_mib, "min_free_mem_mib ({})")
    elif others > 0 and others >= config.mem_threshold * (gpu.memory_total_mib or 0):
        detail = f"has {format_memory(others)} of its memory in use by others"
    return Reason("resources", gpu.place, detail) if detail else None


def describe_users(foreign: Sequence[GpuProcess], unseen_mib: float) -> str:
    if foreign:
        return describe_processes(foreign)
    return f"processes that cannot be seen ({format_memory(unseen_mib)}, above max_unseen_mem_mib)"


def find_foreign(gpu: Gpu, config: GpuConfig) -> list[GpuProcess]:
    """The processes of others, without those that do not count: jobs compute through the MPS server, which stays."""
    return [process for process in gpu.processes
            if process.job_id is None and not is_program(process, (MPS_SERVER, *config.ignore_processes))]


def is_program(process: GpuProcess, programs: Iterable[str]) -> bool:
    name = (process.name or "")[:NAME_LENGTH]
    return bool(name) and any(name == program.rpartition("/")[2][:NAME_LENGTH] for program in programs)


def may_share(gpu: Gpu) -> bool:
    """Whether several programs can compute there: under MPS they can, as its server is the one process then."""
    return gpu.compute_mode not in EXCLUSIVE or any(is_program(process, [MPS_SERVER]) for process in gpu.processes)


def find_unseen(gpu: Gpu, jobs: Sequence[Job], config: GpuConfig) -> float:
    """MiB that no listed process accounts for, if that means that others use the GPU: in a container, for example.

    0 if it is little, or unknown, or if it may be a job's.
    """
    listed = [process.memory_mib for process in gpu.processes]
    if config.share_with_others or jobs or gpu.memory_used_mib is None or None in listed:
        return 0.0
    unseen = gpu.memory_used_mib - sum(memory or 0 for memory in listed)
    return unseen if unseen > config.max_unseen_mem_mib else 0.0


def read_gpu(gpu: Gpu, jobs: Sequence[Job], config: GpuConfig, at: float) -> GpuMeans:
    """A reading of a GPU for its history.  `jobs`: those that have it."""
    has_others = gpu.lease_holder or find_foreign(gpu, config) or find_unseen(gpu, jobs, config)
    return GpuMeans(at, 1, gpu.utilization, gpu.memory_used_mib, gpu.temperature, gpu.power_watts,
                    100.0 if has_others else 0.0)


def is_left_out(gpu: Gpu, config: GpuConfig) -> bool:
    """Whether nexus may not use a GPU of this machine."""
    return gpu.is_withheld or (bool(config.ids) and not gpu.node and gpu.index not in config.ids)


def describe_room(room_mib: float, least_mib: float, words: str) -> str:
    return f"has {format_memory(max(0.0, room_mib), 2)} free, less than {words.format(format_memory(least_mib, 2))}"


def find_foreign_memory(gpu: Gpu, jobs: Sequence[Job]) -> float:
    """MiB that others than nexus's jobs use; 0 if the owner is unknown, as of processes inside a container."""
    ours = [process.memory_mib for process in gpu.processes if process.job_id]
    if gpu.memory_used_mib is None or (jobs and (not ours or None in ours)):
        return 0.0
    return max(0.0, gpu.memory_used_mib - sum(memory or 0 for memory in ours))


def find_room(gpu: Gpu, jobs: Sequence[Job]) -> float | None:
    """Free memory in MiB, minus what the jobs there have declared and do not use yet; None if it is unknown.

    What ended jobs still hold counts as free.
    """
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return None
    taken: dict[str | None, float] = dict.fromkeys((job.id for job in jobs), 0.0)
    returning = sum(process.memory_mib or 0 for process in gpu.processes
                    if process.job_id and process.job_id not in taken)
    for process in gpu.processes:
        taken[process.job_id] = taken.get(process.job_id, 0.0) + (process.memory_mib or 0)
    if jobs and not gpu.processes:              # inside a container no process shows: all use is the jobs'
        claimed = max(0.0, sum(job.gpu_mem_mib or 0 for job in jobs) - gpu.memory_used_mib)
    else:
        claimed = sum(max(0.0, (job.gpu_mem_mib or 0) - taken[job.id]) for job in jobs)
    return gpu.memory_total_mib - max(0.0, gpu.memory_used_mib - returning) - claimed


def describe_processes(processes: Sequence[GpuProcess]) -> str:
    """`bob (pid 4242 python, 16GB)`, each."""
    described = []
    for process in processes:
        program = f"pid {process.pid}" + (f" {format_line(process.name, 30)}" if process.name else "")
        memory = "" if process.memory_mib is None else f", {format_memory(process.memory_mib)}"
        described.append(f"{process.user or 'somebody'} ({program}{memory})")
    return join_some(described, 3)


def describe_slices(job: Job, gpus: Iterable[Gpu]) -> str:
    """Why a job of several GPUs gets none of the MIG slices; "" if there are none, or it may have one."""
    is_cut = job.gpus > 1 and any(gpu.slice is not None for gpu in gpus)
    return " beside MIG slices, of which a job can use only one" if is_cut else ""


def format_asked(job: Job) -> str:
    """`2 GPUs of type A100`."""
    return format_gpus(job.gpus) + (f" of type {job.gpu_type}" if job.gpu_type else "")


class Demand(Value):
    """What a job asks of each of its GPUs."""
    field: str                                  # of the job
    words: str                                  # after how many GPUs it wants
    is_met_by: Callable[[Gpu], bool]
    others: str                                 # which GPUs there are


def list_demands(job: Job, gpus: Sequence[Gpu]) -> list[Demand]:
    """`gpus`: all that there are."""
    gpu_type, gpu_ids, memory_mib = job.gpu_type, job.gpu_ids, job.gpu_mem_mib or 0
    demands = [Demand("gpus", words="", is_met_by=lambda gpu: job.gpus <= 1 or gpu.slice is None, others="")]
    if gpu_type:
        types = sorted({gpu.name for gpu in gpus})
        demands.append(Demand("gpu_type", words=f" of type {gpu_type}", is_met_by=lambda gpu: gpu.is_type(gpu_type),
                              others=f"; the types are {join_some(types, 8)}"))
    if gpu_ids:
        indices = format_indices(dict.fromkeys(gpu.local_place for gpu in gpus))
        demands.append(Demand("gpu_ids", words=f" of index {format_indices(gpu_ids)}",
                              is_met_by=lambda gpu: gpu.is_named(gpu_ids), others=f"; the indices are {indices}"))
    if memory_mib:
        largest = max((gpu.memory_total_mib or float("inf") for gpu in gpus), default=0)
        demands.append(Demand("gpu_mem_mib", words=f" with {format_memory(memory_mib, 2)}",
                              is_met_by=lambda gpu: (gpu.memory_total_mib or float("inf")) >= memory_mib,
                              others=f"; the largest has {format_memory(largest, 2)}"))
    return demands


def find_never(job: Job, machines: Mapping[str, Sequence[Gpu]]) -> Reason | None:
    """Why a job can never run; the subject is the field that asks for too much.  `machines`: {name: its GPUs}"""
    gpus = [gpu for there in machines.values() for gpu in there]
    asked, note = format_gpus(job.gpus), describe_slices(job, gpus)
    where = f"{next(iter(machines)) or 'this machine'} has" if len(machines) == 1 else "no machine has more than"
    for demand in list_demands(job, gpus):
        asked += demand.words
        machines = {name: list(filter(demand.is_met_by, there)) for name, there in machines.items()}
        most = max(map(len, machines.values()), default=0)
        if most < job.gpus:
            return Reason("never", demand.field, f"wants {asked}, {where} {most}{note}{demand.others}")
    return None


class GpuCapacity:
    """A GPU while plan() assigns jobs: what is left of it, and for which job it is reserved."""

    def __init__(self, gpu: Gpu, held: Sequence[tuple[Job, int]], config: GpuConfig, now: float,
                 reason: Reason | None = None) -> None:
        """`held`: the running jobs there, each with its share.  `reason`: why the machine gets no job."""
        jobs = [job for job, _ in held]
        self.gpu = gpu
        self.jobs = jobs                            # and those that start there now
        self.free = 100 - sum(share for _, share in held)                       # hundredths
        self.reason = reason or find_gpu_reason(gpu, config, jobs)              # why it gets no further job
        self.is_reachable = self.reason is None or (bool(held) and self.reason.code == "resources")
        self.room_mib = find_room(gpu, jobs)
        # Room after all jobs there; those of who holds the lease count as jobs.
        self.most_mib = (gpu.memory_total_mib or 0) - (0.0 if gpu.lease_holder else find_foreign_memory(gpu, jobs))
        self.ends_at = max([now, *(find_end(job, now) for job in jobs)])     # the earliest time when all is free
        self.turn_of = ""                           # the other user of this box whose turn it is
        self.collected = 0                          # if that one collects GPUs for a job: how many it needs
        self.reserved_for: str | None = None
        self.reserved_gpus = 0.0                    # how many that job needs in all
        self.reserved_until = 0.0
        self.kept = 0                               # hundredths that are taken when who preempts has started there

    def take(self, job: Job, share: int, now: float) -> None:
        self.free -= share
        self.jobs.append(job)
        if self.room_mib is not None and job.gpu_mem_mib:
            self.room_mib -= job.gpu_mem_mib
        self.ends_at = max(self.ends_at, now + (job.expected_time or 0))


def find_age(job: Job, now: float) -> float:
    """Seconds since a job's start by the wall clock; 0 if it has not started."""
    return 0.0 if job.current.started_at is None else now - job.current.started_at


def find_end(job: Job, now: float) -> float:
    """The earliest end to plan with: now, unless the submitter gave an expected time."""
    return now + max(0.0, (job.expected_time or 0) - find_age(job, now))


def list_capacities(running: Iterable[Job], gpus: Sequence[Gpu], config: GpuConfig, now: float,
                    reasons: Mapping[str, Reason | None]) -> list[GpuCapacity]:
    """`reasons`: {machine: why it gets no job}"""
    held: dict[str, list[tuple[Job, int]]] = {}
    for job in running:
        for uuid, share in zip(job.current.gpu_uuids, list_shares(job)):
            held.setdefault(uuid, []).append((job, share))
    return [GpuCapacity(gpu, held.get(gpu.uuid, ()), config, now, reasons.get(gpu.node)) for gpu in gpus]


def may_run_on(job: Job, node: str) -> bool:
    return job.only_node in (None, node) and all(name != node for name, _ in job.excluded_nodes)


def lacks_folder(job: Job, folders: Container[str] | None) -> bool:
    return folders is not None and needs_folder(job) and job.cwd not in folders


def may_use(job: Job, gpu: Gpu) -> bool:
    """Whether a job may ever have a GPU.  CUDA lets a process use one MIG slice only."""
    return ((job.gpus <= 1 or gpu.slice is None) and gpu.is_type(job.gpu_type)
            and (job.gpu_ids is None or gpu.is_named(job.gpu_ids)) and may_run_on(job, gpu.node))


def describe_collection(capacity: GpuCapacity) -> str:
    """What its next user leaves it idle for, in words to append; "" for nothing."""
    return f" (for a job of {capacity.collected} GPUs)" if capacity.collected else ""


def describe_kept(capacity: GpuCapacity) -> str:
    """`frF (4 GPUs)`: for which job it is reserved, and how many that needs; "" for none."""
    return f"{capacity.reserved_for} ({format_gpus(capacity.reserved_gpus)})" if capacity.reserved_for else ""


def find_verdict(capacity: GpuCapacity, share: int, job: Job, config: GpuConfig, now: float) -> Reason | None:
    """Why a job cannot have `share` hundredths of a GPU now; None if it can."""
    gpu, room_mib, asked_mib, detail = capacity.gpu, capacity.room_mib, job.gpu_mem_mib, ""
    ids = [other.id for other in capacity.jobs]
    names = format_jobs_there(ids) if ids else ""
    if share < 100 and not may_share(gpu):
        return Reason("held", gpu.place, f"is in compute mode {gpu.compute_mode}, for one process only")
    if capacity.free < share:
        detail = f"runs {names}" if capacity.free <= 0 else f"has {capacity.free / 100:g} free beside {names}"
        detail += f", and {capacity.reason.detail}" if capacity.reason else ""
        return Reason("resources", ",".join(ids), detail)
    if capacity.reason:
        return capacity.reason
    is_brief = job.expected_time is not None and now + job.expected_time <= capacity.reserved_until
    if capacity.turn_of:
        detail = f"is {capacity.turn_of}'s turn{describe_collection(capacity)}"
    elif capacity.reserved_for not in (None, job.id) and not is_brief:
        detail = f"is kept for job {describe_kept(capacity)}"
    elif names and gpu.utilization is not None and gpu.utilization >= config.load_threshold * 100:
        detail = f"is {gpu.utilization:.0f}% busy with {names} (load_threshold)"
    elif asked_mib and room_mib is None:
        detail = "does not tell its memory, and the job says how much it needs"
    elif asked_mib and room_mib is not None and room_mib < asked_mib:
        detail = describe_room(room_mib, asked_mib, "the {} asked for")
    return Reason("resources", gpu.place, detail) if detail else None


def list_verdicts(job: Job, capacities: Iterable[GpuCapacity], config: GpuConfig, now: float,
                  share: int = 0) -> list[tuple[GpuCapacity, Reason | None]]:
    """Each GPU that a job may have, and why it cannot have `share` of it (0: its largest share); None: it can."""
    share = share or max(list_shares(job), default=0)
    return [(capacity, find_verdict(capacity, share, job, config, now))
            for capacity in capacities if may_use(job, capacity.gpu)]


def format_jobs_there(ids: Sequence[str]) -> str:
    return f"job {ids[0]}" if len(ids) == 1 else f"jobs {join_some(ids, 8)}"


def choose_gpus(job: Job, capacities: Sequence[GpuCapacity], config: GpuConfig,
                now: float) -> list[GpuCapacity] | None:
    """The GPUs of one machine for a job, in the order of its shares; None if it does not fit.

    A share goes to the fullest GPU that fits.  Whole GPUs are chosen by index, or by the least free memory that fits;
    MIG slices come before cards, the smallest first.  After a CUDA out-of-memory error the emptiest GPUs come first,
    and the GPUs of that attempt last.
    """
    def list_fitting(share: int) -> list[GpuCapacity]:
        fitting = [capacity for capacity, reason in list_verdicts(job, capacities, config, now, share) if not reason]
        return sorted(fitting, key=lambda capacity: (
            float("inf") if capacity.gpu.slice is None else capacity.gpu.memory_total_mib or 0.0))

    shares = list_shares(job)
    chosen: list[GpuCapacity] = []
    if shares[-1] < 100:
        chosen = sorted(list_fitting(shares[-1]), key=lambda capacity: (capacity.free, capacity.room_mib or 0))[:1]
        if not chosen:                          # a GPU that is all free may be for one process only
            return None
    whole = [capacity for capacity in list_fitting(100) if capacity not in chosen]
    if len(whole) + len(chosen) < len(shares):
        return None
    if job.exclusive:
        before = job.attempts[-1].gpu_uuids if job.attempts else ()
        whole.sort(key=lambda capacity: (-(capacity.room_mib or 0), capacity.gpu.uuid in before))
    elif job.gpu_mem_mib:
        whole.sort(key=lambda capacity: capacity.room_mib or 0)
    return whole[: len(shares) - len(chosen)] + chosen


def reserve(job: Job, capacities: Sequence[GpuCapacity]) -> None:
    """Reserve GPUs for a starving job: the emptiest ones, of the machine that is expected to have them first.

    For one job of a machine at a time GPUs stay idle: two might each hold what the other needs.  None are reserved if
    the job also needs a GPU that is lost or used by others: the reserved ones would be idle for nothing.
    """
    shares = list_shares(job)
    taken = {capacity.gpu.node for capacity in capacities if capacity.reserved_for and capacity.free > 0}
    usable: dict[str, list[GpuCapacity]] = {}       # {machine: GPUs that the job can have when their jobs have ended}
    for capacity in capacities:
        is_usable = capacity.is_reachable and capacity.reserved_for is None and capacity.most_mib >= (job.gpu_mem_mib
                                                                                                      or 0)
        if is_usable and may_use(job, capacity.gpu):
            usable.setdefault(capacity.gpu.node, []).append(capacity)
    choices = [choose_emptiest(shares, there) for node, there in usable.items() if node not in taken and shares]
    reserved = min(filter(None, choices), default=[], key=lambda chosen: (
        max(capacity.ends_at for capacity in chosen), -sum(capacity.free for capacity in chosen)))
    for capacity in reserved:
        capacity.reserved_for, capacity.reserved_gpus = job.id, job.gpus
        capacity.reserved_until = max(capacity.ends_at for capacity in reserved)


def choose_emptiest(shares: Sequence[int], there: Iterable[GpuCapacity]) -> list[GpuCapacity]:
    """The GPUs for these shares that are expected to be free first; [] if there are not enough."""
    ordered = sorted(there, key=lambda capacity: (-capacity.free, capacity.ends_at, capacity.gpu.index))
    last = [capacity for capacity in ordered if shares[-1] == 100 or may_share(capacity.gpu)][:1]
    chosen = [capacity for capacity in ordered if capacity not in last][:len(shares) - 1] + last
    return chosen if last and len(chosen) == len(shares) else []

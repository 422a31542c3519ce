"""A GPU as it was read, what it did, and what names it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..opening import TYPE_CHECKING
from .causes import REQUEUES
from .errors import NexusError
from .job import FINAL, RUNNING, name_gpu
from .schema import FLAG, FLOAT, INTEGER, JOB_ID, STRING, TIME, list_of, one_of, or_null
from .value import Value, field, optional

if TYPE_CHECKING:
    from .job import Amount, Count, Epoch, Index, JobId, Name, Pid, Uuid, Words


class GpuProcess(Value):
    pid: Pid = field(INTEGER, "its pid")
    memory_mib: Amount | None = field(or_null(FLOAT), "the GPU memory it has")
    job_id: JobId | None = optional(None, JOB_ID, "whose of ours it is; null: somebody else's")
    user: Name | None = optional(None, STRING, "whose it is")
    name: Name | None = optional(None, STRING, "its program")


class Gpu(Value):
    """One GPU as last observed: a card, or a MIG slice of one.  None where the driver does not say."""
    index: Index = field(INTEGER, "its card's index, as its driver counts")
    uuid: Uuid = field(STRING, "its UUID, as its driver says; on a node n1/UUID")
    name: Name = field(STRING, "its model")
    memory_total_mib: Amount | None = optional(None, FLOAT, "its memory")
    memory_used_mib: Amount | None = optional(None, FLOAT, "its memory in use, by whomever")
    utilization: Amount | None = optional(None, FLOAT, "percent, now")
    temperature: Amount | None = optional(None, FLOAT, "degrees Celsius")
    power_watts: Amount | None = optional(None, FLOAT, "the power it draws")
    power_limit_watts: Amount | None = optional(None, FLOAT, "the power it may draw")
    is_mig: bool = optional(False, FLAG, "its card is in MIG mode: cut into slices, or into nothing yet")
    slice: Index | None = optional(None, INTEGER, "its number among the MIG slices of its card; null: a card")
    profile: Name | None = optional(None, STRING, "the size of the slice, like 1g.10gb")
    fault: Words | None = optional(None, STRING, "why it cannot be used, as its driver says")
    is_withheld: bool = False                   # the service's CUDA_VISIBLE_DEVICES does not name it
    compute_mode: str | None = None             # PROHIBITED, or one of EXCLUSIVE; None: Default, or it is unknown
    processes: tuple[GpuProcess, ...] = ()
    node: str = ""                              # the machine it is in; "" = this one
    lease_holder: Name | None = None            # the user whose nexus holds its lease
    is_paused: bool = optional(False, FLAG, "it gets no new job")
    pause_reason: str | None = None             # why nexus itself paused it
    utilization_mean: Amount | None = optional(None, FLOAT, "percent, over the last hour")
    utilization_peak: Amount | None = optional(None, FLOAT, "percent, over the last hour")

    @property
    def place(self) -> str:
        """Its name in commands and paths: `0`, `0.1` for slice 1 of card 0, or `n1:0` on another machine."""
        return f"{self.node}:{self.local_place}" if self.node else self.local_place

    @property
    def local_place(self) -> str:
        return name_gpu(self.index, self.slice)

    def is_type(self, wanted: str | None) -> bool:
        """Whether it is what --gpu-type asks for."""
        if wanted is None:
            return True
        return not self.is_mig if wanted.lower() == "full" else wanted.lower() in self.name.lower()

    def is_named(self, places: Iterable[object]) -> bool:
        """Whether it is among these GPUs of its machine, like 0 or "0.1".  A card's number means all its slices."""
        return not {self.index, str(self.index), self.local_place}.isdisjoint(places)


class GpuMeans(Value):
    """What a GPU did in a minute, or in ten: means of its readings.  None where no reading had it."""
    at: float                                   # when that time begins, UTC epoch seconds
    count: int                                  # of the readings
    utilization: float | None = None            # percent
    memory_used_mib: float | None = None
    temperature: float | None = None            # degrees Celsius
    power_watts: float | None = None
    others: float | None = None                 # percent of the readings in which others used it


SERIES = GpuMeans.NAMES[2:]


def combine_means(at: float, parts: Sequence[GpuMeans]) -> GpuMeans:
    """The means of all these readings together."""
    def find_mean(name: str) -> float | None:
        told = [(number, part.count) for part in parts if (number := getattr(part, name)) is not None]
        return sum(number * count for number, count in told) / sum(count for _, count in told) if told else None

    return GpuMeans(at, sum(part.count for part in parts), *map(find_mean, SERIES))


class GpuRun(Value):
    """An attempt that had GPUs, as the history of these GPUs keeps it: longer than State has its job."""
    id: JobId = field(JOB_ID, "its job; where several are one row, the last one that failed, or else the last")
    attempt: Count = field(INTEGER, "which start of that")
    user: Name = field(STRING, "whose it is")
    gpu_uuids: tuple[Uuid, ...] = field(list_of(STRING), "its GPUs, as in `gpus`")
    started_at: Epoch = field(TIME, "when it began")
    status: str = field(one_of(RUNNING, *FINAL, *REQUEUES),
                        "how it ended; preempted: others needed its GPUs")
    name: Name | None = optional(None, STRING, "its job's name, or the beginning of its command; null: another user's")
    finished_at: Epoch | None = optional(None, TIME, "null: it goes on")
    outcome: Name | None = optional(None, STRING, "the same in a word: exit 1, cuda-oom")

    @property
    def key(self) -> tuple[str, int, float]:
        """What no other attempt has: ids are given again, and numbers too where state.json is lost."""
        return self.id, self.attempt, self.started_at


def is_gpu_meant(wanted: str, place: str) -> bool:
    """Whether the GPU of a place, like `0.1` or `n1:0`, is meant by its own or by its card's."""
    return wanted in (place, re.sub(r"\.\d+$", "", place))


def find_places(wanted: str, places: Iterable[str], node: str) -> list[str]:
    """The GPUs that a person means by a place: that one, or all slices of that card.  `node`: this machine's name.

    Raises: not_found.
    """
    found = [place for place in places if is_gpu_meant(wanted.removeprefix(f"{node}:"), place)]
    if not found:
        raise NexusError("not_found", f"there is no GPU {wanted}", "nexus shows them")
    return found

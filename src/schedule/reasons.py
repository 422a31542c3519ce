"""What a plan is made of: starts, and the reasons why the other jobs wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..opening import TYPE_CHECKING
from ..values.bid import Want
from ..values.state import State
from ..values.value import Value
from .turns import Box, Turns

if TYPE_CHECKING:
    from typing import Any

    from .capacity import GpuCapacity
    from .quotas import Quotas


class Start(Value):
    job_id: str
    gpu_indices: tuple[int, ...]                # whole GPUs first, then the one that is shared
    gpu_uuids: tuple[str, ...]
    node: str = ""                              # "" = on this machine
    gpu_slice: int | None = None                # as in Attempt


class Reason(Value):
    """Why a job waits, or gets no share of a GPU.  The code that decides makes the reason; format_reason() words it."""
    code: str                                   # one of REASON_CODES
    subject: str = ""                           # the GPU, job, group, user, machine or config key that is in the way
    detail: str = ""                            # the reason in words


def format_reason(reason: Reason) -> str:
    return {"dependency": "after ", "never": "never: "}.get(reason.code, "") + reason.detail


def format_reasons(reasons: Iterable[Reason]) -> str:
    """All of them, the shortest first."""
    return "; ".join(sorted(map(format_reason, reasons), key=len))


class NodeView(Value):
    """Another machine for jobs, as plan() sees it."""
    name: str
    cpu_slots: int = 0                          # how many more jobs without a GPU it takes
    reason: str | None = None                   # why it gets no job now, in words; None: it may get jobs
    folders: frozenset[str] | None = None       # directories of jobs that are there; None: it need not be known


class Plan(Value):
    starts: tuple[Start, ...] = ()
    blocked: dict[tuple[Any, ...], Reason] | None = None    # why the jobs of a request class wait, as far as explained
    quotas: Quotas | None = None                # after these starts, like gpus; None: nothing was examined
    gpus: tuple[GpuCapacity, ...] = ()
    machines: Mapping[str, Reason | None] = {}  # why each machine gets no job now
    folders: Mapping[str, frozenset[str] | None] = {}       # of NodeView
    reason: Reason | None = None                # why nothing at all starts
    delayed_until: float | None = None          # when the next --begin or backoff ends
    preempted: tuple[tuple[str, str], ...] = () # (job that must end, job that can start then)
    yielded: tuple[tuple[str, str], ...] = ()   # (job that must end, user of this box who waits for its GPUs)
    turns: Turns = Turns()                      # whose turn the free GPUs of this box are
    box: Box | None = None                      # the other users of this box; None: nobody else has a service here
    wants: tuple[Want, ...] = ()                # of this box's GPUs, as other users' services are told

    def find_free(self) -> list[str]:
        """The GPUs of this box that nobody has."""
        return [capacity.gpu.uuid for capacity in self.gpus
                if not capacity.gpu.node and capacity.reason is None and not capacity.jobs]


PAUSED = Reason("paused", "queue", "the queue is paused (nexus resume)")
PAUSED_BY_DAMAGE = Reason(
    "paused", "queue", "the queue is paused: a start found the state damaged (see nexus health, then nexus resume)")
SHORTAGE = Reason("resources", "gpus")          # explain_shortage() says more, GPU by GPU
DEFAULT_MODE = "sudo nvidia-smi -i {} -c DEFAULT"


def find_pause(state: State) -> Reason | None:
    """Why nothing starts while the queue is paused; None: it is not."""
    if not state.paused:
        return None
    return PAUSED_BY_DAMAGE if state.damage else PAUSED

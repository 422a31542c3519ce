"""What the services of several users tell each other of a box's GPUs: each a bid, what it wants and what it has."""

from __future__ import annotations

from collections.abc import Mapping

from ..opening import TYPE_CHECKING
from .value import Value

if TYPE_CHECKING:
    from .job import Amount, Count, Epoch, Span, Uuid


class Want(Value):
    """Jobs of one service that wait for GPUs of this box, and ask for the same."""
    gpus: Count                                 # of each job; one that asks for a share needs a whole one of others
    uuids: tuple[Uuid, ...]                     # the GPUs that would do
    jobs: Count                                 # how many wait
    since: Epoch                                # since when the first of them waits
    collects: bool = False                      # it has waited for reserve_after_seconds: it collects GPUs as they end


class Holding(Value):
    """A GPU, or a share of one, that a job has."""
    uuid: Uuid
    share: Count                                # hundredths
    since: Epoch                                # when the job began


class Bid(Value):
    """What one service tells the others."""
    wants: tuple[Want, ...] = ()                # in the order of its queue
    holdings: tuple[Holding, ...] = ()
    ended_s: Amount = 0.0                       # GPU seconds that its jobs have had which ended since it began
    run_s: Span = 60.0                          # how long its jobs run, about
    running: Count = 0                          # its jobs with GPUs of this box
    waiting: Count = 0                          # its jobs that wait for them
    leaves: Mapping[str, int] = {}              # {uuid of a free GPU: the uid to whom this service leaves it}

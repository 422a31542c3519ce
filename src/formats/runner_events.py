"""What a job's runner tells: its lines in the FIFO, and how an attempt ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.text import is_job_id
from ..values.value import Value
from .nvidia_smi import is_number

if TYPE_CHECKING:
    from typing import Any

    from ..values.job import EndCause, Epoch, ExitCode, Span, Words

# A line of `screen -ls`: PID.NAME, and `Detached` or the like.  Version and locale decide on the date between them.
SCREEN_SESSION = r"(?m)^\t(\d{1,10}\.[^\t\n]+)\t(?:.*\t)?\(([^\t\n]*)\)\r?$"


class Result(Value):
    """How an attempt ended, from its result file or its runner's event."""
    exit_code: ExitCode | None
    finished_at: Epoch | None = None            # None: now
    runtime_seconds: Span | None = None
    cause: EndCause | None = None               # `launch`: the command could not be started; `bounce`: a GPU was taken
    cause_line: Words | None = None
    may_pass: bool = False                      # of `launch`: another attempt may succeed
    goes_on: bool = False                       # its command has ended, and others of its session go on
    is_cut: bool = False                        # the disk of its logs was full at its end
    ended_itself: bool = False                  # no signal of a stop was sent to it


class News(Value):
    """What is new of an attempt, as where it runs tells it."""
    facts: Mapping[str, Any] = {}               # fields of the attempt; with started_at, it has left Slurm's queue
    result: Result | None = None                # it has ended
    requeue: str = ""                           # it never began, and never will, through no fault of the job: why
    excluded_nodes: tuple[tuple[str, str], ...] | None = None       # with that, Job.excluded_nodes; None: as before

    @property
    def is_end(self) -> bool:
        return bool(self.requeue or self.result)


class RunnerEvent(Value):
    """A line from a runner.

    `start ID ATTEMPT PID STARTED BEGAN`, `end ID ATTEMPT CODE RUNTIME_CS [IS_CUT]`, `bounce ID ATTEMPT WHY` (the GPU
    is somebody else's), or `fail ID ATTEMPT WHY`.
    """
    verb: str
    job_id: str
    attempt: int
    words: tuple[str, ...]


EVENT_NUMBERS: Mapping[str, Sequence[Sequence[str]]] = {       # the kinds of an event's numbers
    "start": [("Pid", "Ticks", "Ticks")], "end": [("Count", "Ticks"), ("Count", "Ticks", "Count")]}


def parse_runner_event(line: str) -> RunnerEvent | None:
    """None: it is no event.  Whatever runs as this user may write to the FIFO."""
    words = line.split()
    if len(words) < 3 or words[0] not in (*EVENT_NUMBERS, "bounce", "fail") or not is_number(words[2], "Count"):
        return None
    rest, rows = tuple(words[3:]), EVENT_NUMBERS.get(words[0])
    is_whole = rows is None or any(len(rest) == len(row) and all(map(is_number, rest, row)) for row in rows)
    if not is_job_id(words[1]) or not is_whole:
        return None
    return RunnerEvent(words[0], words[1], int(words[2]), rest)

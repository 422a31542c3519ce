"""What a service and the agent of a node say to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ..formats.codec import decode, decode_value
from ..opening import TYPE_CHECKING
from ..values.gpu import Gpu
from ..values.job import Limits, Usage
from ..values.text import cut_words, load_json
from ..values.value import Value, replace
from .hosted_job import Order, Progress

if TYPE_CHECKING:
    import queue
    from typing import IO, Any

    from ..opening import Json
    from ..values.job import Amount, AttemptKey, BootId, Count, Epoch, FilePath, FileSize, Name, ScreenVariable, Words

LOOK_WAIT_S = 10.0              # an agent replies when that differs from its last reply, else after this time
LOG_BYTES = 2**20               # of all logs in one reply: a slow connection transfers it within ANSWER_S


def start_writer(stream: IO[bytes], name: str) -> queue.Queue[bytes]:
    """A queue that a thread writes to a stream, as a connection that was cut may block; b"" closes it."""
    import queue
    import threading
    outbox: queue.Queue[bytes] = queue.Queue()

    def write() -> None:
        with contextlib.suppress(OSError):                  # the reader notices it, too
            while content := outbox.get():
                stream.write(content)
                stream.flush()
        with contextlib.suppress(OSError):                  # it may have something left to write
            stream.close()

    threading.Thread(target=write, name=name, daemon=True).start()
    return outbox


class Hello(Value):
    """What an agent says first."""
    machine: Words                              # the boot and the host's name: two names of one machine are noticed
    boot_id: BootId
    python: Name                                # its version
    screen: tuple[ScreenVariable, ...]          # like SCREENDIR=/home/ann/.nexus/screen
    path: FilePath                              # of its nexus.py
    cpu_slots: Count


class Wanted(Value):
    """An attempt that a node shall have."""
    key: str                                    # Job.attempt_key
    log_sizes: tuple[FileSize, FileSize]        # bytes of this attempt's logs that have arrived
    limits: Limits                              # now
    stop_cause: str | None = None               # why it must end
    stop_signal: str | None = None
    order: Order | None = None                  # to start it; None: the node has it already, or has lost it
    has_begun: bool = False                     # it ran there


class Question(Value):
    """What a head asks its agent for: the progress of its jobs.  All others of its jobs there are ended.

    The latest question counts, and those before it do not any more.
    """
    number: int                                 # another one when what is wanted differs from the question before
    jobs: tuple[Wanted, ...]
    folders: tuple[str, ...]                    # are these directories there?

    @property
    def wants(self) -> object:
        """What is replied to at once where it differs."""
        return self.folders, [(wanted.key, wanted.limits, wanted.stop_cause) for wanted in self.jobs]

    @property
    def most_bytes(self) -> int:
        """How many new bytes of each log a reply may have."""
        return LOG_BYTES // max(1, 2 * len(self.jobs))


class JobReport(Value):
    """What is known of an attempt that is wanted."""
    key: AttemptKey
    progress: Progress
    log_sizes: tuple[FileSize, FileSize] | None = None      # of this attempt; None: its logs are not looked at
    log_offsets: tuple[FileSize, FileSize] = (0, 0)         # where in them the new bytes begin
    logs: tuple[bytes, bytes] = (b"", b"")      # its new bytes
    samples: Usage = Usage()
    rss_mib: Amount | None = None


class Report(Value):
    """An agent's reply: all that a head takes from a node, but for a Hello.  It says what it is about."""
    number: Count                               # of the latest question there
    now: Epoch                                  # the node's clock
    jobs: tuple[JobReport, ...]
    folders: Mapping[str, bool]
    trouble: Words                              # why jobs get no GPU there
    gpus: tuple[Gpu, ...] | None                # None: as before


MAX_ANSWER_FACTS = 500000       # in all lists and objects of a reply: empty ones take seconds and half a GiB to read
MAX_NODE_GPUS = 256             # each plan looks at all of them
MAX_GPU_ROWS = 5000             # GPUs of a node, and processes on them


def read_report(text: bytes, question: Question) -> tuple[Report, dict[str, str]]:
    """(a node's reply, {attempt_key: what is wrong with its report of that}), whatever a node sends.

    `question`: the latest.  Of a reply to one before it, what is still wanted counts.  A report that is wrong is not
    among the jobs of the reply.  An attempt of which a reply to the latest says nothing has a wrong one.
    Raises: KeyError, TypeError or ValueError, when what is wrong is about no job, or about one that was not asked for.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_ANSWER_FACTS:
        raise ValueError("its reply has too many parts")
    fields = decode("dict", load_json(text), "the reply")
    number = decode("Count", fields.get("number"), "number")
    if number > question.number:
        raise ValueError(f"it replies to question {number}, and {question.number} were asked")
    asked = dict.fromkeys(wanted.key for wanted in question.jobs)
    told: dict[str, Json] = {}
    for row in decode("tuple[dict, ...]", fields.get("jobs"), "jobs", is_strict=True):
        key = decode("AttemptKey", row.get("key"), "key")
        if key in asked:
            told.setdefault(key, row)
        elif number == question.number:
            raise ValueError(f"it tells of job {key}, which is not its")
    if count_gpu_rows(fields.get("gpus")) > MAX_GPU_ROWS:
        raise ValueError(f"it has more than {MAX_GPU_ROWS} GPUs and processes on them")
    report = decode_value(Report, {**fields, "jobs": []}, "the reply", True)
    if len(report.gpus or ()) > MAX_NODE_GPUS:
        raise ValueError(f"it has more than {MAX_NODE_GPUS} GPUs")
    for names in ([gpu.local_place for gpu in report.gpus or ()], [gpu.uuid for gpu in report.gpus or ()]):
        if len(set(names)) < len(names):
            raise ValueError("two GPUs have one name")
    jobs, faults = list[JobReport](), dict[str, str]()
    expected = asked if number == question.number else told
    for key in expected:
        try:
            jobs.append(check_report(decode_value(JobReport, told[key], f"job {key}", True)))
        except KeyError:
            faults[key] = "nothing is said of it"
        except (TypeError, ValueError) as error:
            faults[key] = cut_words(str(error), 200)
    if sum(len(piece) for job_report in jobs for piece in job_report.logs) > LOG_BYTES:
        raise ValueError(f"it sends more than {LOG_BYTES} bytes of logs at once")
    return replace(report, jobs=tuple(jobs)), faults


def count_gpu_rows(gpus: Any) -> int:
    """How many GPUs, and processes on them, a reply has, whatever they are: to decode too many takes long."""
    rows = gpus if isinstance(gpus, list) else []
    processes = [row.get("processes") for row in rows if isinstance(row, dict)]
    return len(rows) + sum(len(some) for some in processes if isinstance(some, list))


def check_report(report: JobReport) -> JobReport:
    """A report whose pieces of logs are within these.  Raises: ValueError."""
    for piece, offset, size in zip(report.logs, report.log_offsets, report.log_sizes or (0, 0)):
        if piece and len(piece) > size - offset:
            raise ValueError(f"{len(piece)} bytes of a log of {size} are sent, after {offset}")
    return report

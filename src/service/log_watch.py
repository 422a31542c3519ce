"""How logs grow: progress, last lines, silence."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence

from ..formats.cause_lines import drop_escapes, find_last_lines
from ..formats.log_lines import LogMark, order_growth
from ..formats.metrics import find_metric_line
from ..formats.progress import OutputProgress, find_telling_line, read_progress
from ..hosting.events import Worker
from ..hosting.loop import Component
from ..hosting.observer import MAX_PROBE_PAUSE_S
from ..machine.clock import Clock
from ..machine.disk import Disk, read_changed_at
from ..machine.job_files import STREAM_FILES, measure_logs
from ..machine.log_reader import append_log_mark, read_log_times, read_part, read_tail
from ..opening import TYPE_CHECKING
from ..values.value import Value

if TYPE_CHECKING:
    from .service import Service


class LogWatch(Component):
    """Notes to 0.1 s when stdout and stderr of running jobs grow, the only record of their order."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.growths: dict[str, LogGrowth] = {}             # {folder: growth}
        self.worker = Worker(service, "watching logs", self.look)

    def end(self) -> None:
        for growth in list(self.growths.values()):
            growth.note(self.clock)
            growth.write()

    def measure_now(self, folder: str) -> Sequence[LogMark]:
        """Return the marks that log.times does not have yet, with the sizes of this moment."""
        growth = self.growths.get(folder)
        return [growth.seen, *growth.list_marks(self.clock.now())] if growth else []

    def find_last_line(self, folder: str | None, starts: Sequence[int]) -> str | None:
        """The last line of a job's logs from these sizes on."""
        growth = self.growths.get(folder or "") or LogGrowth(self.disk, folder or "")
        return growth.find_last_line(starts) if folder else None

    def find_telling_line(self, folder: str, starts: Sequence[int]) -> str | None:
        """The last line that says more than a bar, of a job's logs from these sizes on."""
        growth = self.growths.get(folder) or LogGrowth(self.disk, folder)
        return find_telling_line(growth.read_ends(starts, END_BYTES))

    def get_metric_line(self, folder: str | None) -> str | None:
        """The last line with numbers of a running job, as far as its logs were read for its progress."""
        growth = self.growths.get(folder or "")
        return growth.reading.metric_line if growth else None

    def find_metric_line(self, folder: str, starts: Sequence[int]) -> str | None:
        """The last line with numbers, of a job's logs from these sizes on, after its end."""
        growth = self.growths.get(folder) or LogGrowth(self.disk, folder)
        return growth.find_metric_line(starts)

    def find_progress(self, folder: str | None) -> OutputProgress:
        """How far a running job is, by what it prints."""
        growth = self.growths.get(folder or "")
        return growth.progress if growth else OutputProgress()

    def look(self) -> float | None:
        began, running = self.clock.monotonic(), self.service.running_jobs()
        folders = {job.log_dir: job.log_base for job in running if job.log_dir}
        for folder in [folder for folder in self.growths if folder not in folders]:
            self.growths[folder].note(self.clock)
            self.growths.pop(folder).write()
        for folder, starts in folders.items():
            if folder not in self.growths:
                self.growths[folder] = LogGrowth(self.disk, folder)
                self.growths[folder].resume()
            self.growths[folder].note(self.clock)
            self.growths[folder].read_progress(self.clock, starts)
        # A job that starts during this look wakes the worker only if `growths` is empty: so check for jobs last.
        is_on = folders or self.service.running_jobs()
        pause_s = max(LOG_LOOK_S, LOG_LOOK_BACKOFF_FACTOR * (self.clock.monotonic() - began))
        return min(pause_s, MAX_PROBE_PAUSE_S) if is_on else None


LOG_LOOK_S, LOG_LOOK_BACKOFF_FACTOR = 0.1, 20   # between two looks; at least this multiple of the time of one
LAST_LINE_BYTES = 4096          # of a log's end, where its last line is looked for
END_BYTES = 16384               # the same of a completed job: its last line may be a bar that was drawn many times
LOG_NOTE_S = 1.0                # between two notes while only one of the two logs grows
PROGRESS_LOOK_S = 1.0           # between two looks at how far a job is
PROGRESS_BYTES = 65536          # of what it has printed since, at most: its end


class LogReading(Value):
    """What was read of a job's two logs."""
    ends: tuple[int, int] = (0, 0)              # bytes
    rests: tuple[str, str] = ("", "")           # what they end with: a line that may not be whole yet
    metric_line: str | None = None              # the last line with numbers


class LogGrowth:
    """How the two logs of one job grow."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk, self.folder = disk, folder
        self.written: LogMark = (0.0, 0, 0)
        self.seen: LogMark = (0.0, 0, 0)
        self.written_at = self.seen_at = float("-inf")      # monotonic: when these two were measured
        self.growing = (True, True)                         # what is not known yet, the times of the files tell
        self.progress, self.looked_at = OutputProgress(), float("-inf")
        self.reading = LogReading()                         # it is replaced at once: other threads look at it

    def resume(self) -> None:
        """Go on from the last mark that an earlier service wrote."""
        for mark in read_log_times(self.disk, self.folder, (sys.maxsize, sys.maxsize))[-1:]:
            self.written = self.seen = mark

    def read_progress(self, clock: Clock, starts: Sequence[int]) -> None:
        """See how far the job is, by what is new in its logs from these sizes on."""
        if clock.monotonic() - self.looked_at < PROGRESS_LOOK_S:
            return
        self.looked_at, now = clock.monotonic(), clock.now()
        if self.is_other_attempt(starts):
            self.progress = OutputProgress()
        self.reading, lines = self.read_on(starts, self.seen[1:])
        for line in lines[0] + lines[1]:
            self.progress = read_progress(self.progress, line, now)

    def is_other_attempt(self, starts: Sequence[int]) -> bool:
        return any(end < start for end, start in zip(self.reading.ends, starts))

    def read_on(self, starts: Sequence[int], sizes: Sequence[int]) -> tuple[LogReading, list[list[str]]]:
        """(what was read then, the new lines of each log): of what is new up to these sizes, the end."""
        former = LogReading((starts[0], starts[1])) if self.is_other_attempt(starts) else self.reading
        ends, rests, found = list(former.ends), list(former.rests), list[list[str]]()
        for stream, size in enumerate(sizes):
            at = max(ends[stream], size - PROGRESS_BYTES)
            rest = "" if at > ends[stream] else rests[stream]
            content = read_part(self.disk, self.find_path(stream), at, size - at) if size > at else b""
            *lines, rest = re.split("[\r\n]+", rest + drop_escapes(content.decode("utf-8", "replace")))
            ends[stream], rests[stream] = max(ends[stream], size), rest[-LAST_LINE_BYTES:]
            found.append([line[:LAST_LINE_BYTES] for line in lines])
        last = self.find_last_written(sizes)
        line = find_metric_line([found[last], found[not last]]) or former.metric_line
        return LogReading((ends[0], ends[1]), (rests[0], rests[1]), line), found

    def find_metric_line(self, starts: Sequence[int]) -> str | None:
        """The last line with numbers from these sizes on, of an attempt that has ended."""
        sizes = measure_logs(self.disk, self.folder)
        reading, _ = self.read_on(starts, sizes)
        last = self.find_last_written(sizes)
        return find_metric_line([[reading.rests[last]], [reading.rests[not last]]]) or reading.metric_line

    def find_last_line(self, starts: Sequence[int]) -> str | None:
        """The last line from these sizes on, of the log that grew last if that has one."""
        texts = self.read_ends(starts, LAST_LINE_BYTES)
        return next((line for text in texts for line in find_last_lines(text, 1)), None)

    def read_ends(self, starts: Sequence[int], most: int) -> Iterator[str]:
        """What both logs end with from these sizes on, that of the log that grew last first; `most`: bytes of each."""
        last = self.find_last_written(measure_logs(self.disk, self.folder))
        return (read_tail(self.disk, self.find_path(stream), starts[stream], most) for stream in (last, not last))

    def find_path(self, stream: int) -> str:
        return os.path.join(self.folder, STREAM_FILES[stream])

    def find_last_written(self, sizes: Sequence[int]) -> int:
        """The log that grew last, with these sizes now: 0 is stdout, 1 stderr."""
        is_new = (sizes[0], sizes[1]) != self.seen[1:]
        growing = (sizes[0] > self.seen[1], sizes[1] > self.seen[2]) if is_new else self.growing
        if not all(growing):
            return int(growing[1])
        out_at, err_at = [read_changed_at(self.disk, self.find_path(stream)) for stream in (0, 1)]
        return int(err_at > out_at)

    def list_marks(self, now: float) -> list[LogMark]:
        """The marks since the last one: one of the present sizes, and where both logs grew, those between."""
        sizes, former = measure_logs(self.disk, self.folder), self.seen[1:]
        if not (sizes[0] > former[0] and sizes[1] > former[1]):
            return [(now, *sizes)]
        changed_at = [read_changed_at(self.disk, self.find_path(stream)) for stream in (0, 1)]
        last = int(changed_at[1] >= changed_at[0])
        at = max(0, sizes[last] - END_BYTES)
        content = read_part(self.disk, self.find_path(last), at, sizes[last] - at)
        return [(now, *step) for step in [*order_growth(former, sizes, changed_at, content), sizes]]

    def note(self, clock: Clock) -> None:
        """Measure the logs.  Write the last mark when the other log grows, to keep their order, and each LOG_NOTE_S."""
        *steps, mark = self.list_marks(clock.now())
        sizes = mark[1:]
        if sizes != self.seen[1:]:
            growing = sizes[0] > self.seen[1], sizes[1] > self.seen[2]
            if growing != self.growing or all(growing) or clock.monotonic() - self.written_at >= LOG_NOTE_S:
                self.write(steps)
            self.seen, self.seen_at, self.growing = mark, clock.monotonic(), growing

    def write(self, steps: Sequence[LogMark] = ()) -> None:
        """Append the last mark to log.times, if it is new, and these."""
        marks = [*([self.seen] if self.seen[1:] != self.written[1:] else []), *steps]
        if marks:
            append_log_mark(self.disk, self.folder, "".join(
                f"{int(at * 10)} {out} {err}\n" for at, out, err in marks))
            self.written, self.written_at = self.seen, self.seen_at

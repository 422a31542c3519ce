"""How logs grow: progress, last lines, silence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from ..formats.cause_lines import drop_escapes, find_last_lines
from ..formats.log_lines import LogMark
from ..formats.progress import OutputProgress, find_telling_line, read_progress
from ..hosting.events import Worker
from ..hosting.loop import Component
from ..hosting.observer import MAX_PROBE_PAUSE_S
from ..machine.clock import Clock
from ..machine.disk import Disk, read_changed_at
from ..machine.job_files import STREAM_FILES, measure_logs
from ..machine.log_reader import append_log_mark, read_part, read_tail
from ..opening import TYPE_CHECKING

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
        return [growth.seen, (self.clock.now(), *measure_logs(self.disk, folder))] if growth else []

    def find_last_line(self, folder: str | None, starts: Sequence[int]) -> str | None:
        """The last line of a job's logs from these sizes on."""
        growth = self.growths.get(folder or "") or LogGrowth(self.disk, folder or "")
        return growth.find_last_line(starts) if folder else None

    def find_telling_line(self, folder: str, starts: Sequence[int]) -> str | None:
        """The last line that says more than a bar, of a job's logs from these sizes on."""
        growth = self.growths.get(folder) or LogGrowth(self.disk, folder)
        return find_telling_line(growth.read_ends(starts, END_BYTES))

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
            self.growths.setdefault(folder, LogGrowth(self.disk, folder)).note(self.clock)
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


class LogGrowth:
    """How the two logs of one job grow."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk, self.folder = disk, folder
        self.written: LogMark = (0.0, 0, 0)
        self.seen: LogMark = (0.0, 0, 0)
        self.written_at = self.seen_at = float("-inf")      # monotonic: when these two were measured
        self.growing = (False, False)
        self.progress, self.looked_at = OutputProgress(), float("-inf")
        self.read_to: list[int] = [0, 0]                    # bytes of both logs in which progress was looked for
        self.rests = ["", ""]                               # what they end with: a line that may not be whole yet

    def read_progress(self, clock: Clock, starts: Sequence[int]) -> None:
        """See how far the job is, by what is new in its logs from these sizes on."""
        if clock.monotonic() - self.looked_at < PROGRESS_LOOK_S:
            return
        self.looked_at, now = clock.monotonic(), clock.now()
        if any(at < start for at, start in zip(self.read_to, starts)):          # another attempt
            self.progress, self.read_to, self.rests = OutputProgress(), list(starts), ["", ""]
        for stream, size in enumerate(self.seen[1:]):
            at = max(self.read_to[stream], size - PROGRESS_BYTES)
            self.rests[stream] = "" if at > self.read_to[stream] else self.rests[stream]
            self.read_to[stream] = max(self.read_to[stream], size)
            path = os.path.join(self.folder, STREAM_FILES[stream])
            content = read_part(self.disk, path, at, size - at) if size > at else b""
            *lines, rest = re.split("[\r\n]+", self.rests[stream] + drop_escapes(content.decode("utf-8", "replace")))
            self.rests[stream] = rest[-LAST_LINE_BYTES:]
            for line in lines:
                self.progress = read_progress(self.progress, line[:LAST_LINE_BYTES], now)

    def find_last_line(self, starts: Sequence[int]) -> str | None:
        """The last line from these sizes on, of the log that grew last if that has one."""
        texts = self.read_ends(starts, LAST_LINE_BYTES)
        return next((line for text in texts for line in find_last_lines(text, 1)), None)

    def read_ends(self, starts: Sequence[int], most: int) -> Iterator[str]:
        """What both logs end with from these sizes on, that of the log that grew last first; `most`: bytes of each."""
        paths, sizes = [os.path.join(self.folder, name) for name in STREAM_FILES], measure_logs(self.disk, self.folder)
        growing = self.growing if sizes == self.seen[1:] else (sizes[0] > self.seen[1], sizes[1] > self.seen[2])
        out_at, err_at = [read_changed_at(self.disk, path) for path in paths] if all(growing) else (0, 0)
        is_stderr = growing[1] and (not growing[0] or err_at > out_at)
        return (read_tail(self.disk, paths[stream], starts[stream], most) for stream in (is_stderr, not is_stderr))

    def note(self, clock: Clock) -> None:
        """Measure the logs.  Write the last mark when the other log grows, to keep their order, and each LOG_NOTE_S."""
        sizes = measure_logs(self.disk, self.folder)
        if sizes != self.seen[1:]:
            growing = sizes[0] > self.seen[1], sizes[1] > self.seen[2]
            if growing != self.growing or all(growing) or clock.monotonic() - self.written_at >= LOG_NOTE_S:
                self.write()
            self.seen, self.seen_at, self.growing = (clock.now(), *sizes), clock.monotonic(), growing

    def write(self) -> None:
        """Append the last mark to log.times, if it is new."""
        if self.seen[1:] != self.written[1:]:
            append_log_mark(self.disk, self.folder, f"{int(self.seen[0] * 10)} {self.seen[1]} {self.seen[2]}\n")
            self.written, self.written_at = self.seen, self.seen_at

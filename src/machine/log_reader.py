"""Reading logs: parts of them, their lines, both streams in the order of time.

A missing or unreadable file, or a link or a FIFO in its place, counts as empty.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from ..formats.log_lines import LogEntry, LogMark, merge_logs, parse_log_times
from ..values.job import Attempt
from ..values.value import replace
from .disk import Disk, append_whole, find_status, measure, open_file
from .job_files import STREAM_FILES, is_real_folder


def read_part(disk: Disk, path: str, start: int, most: int) -> bytes:
    """At most so many bytes of a file, from byte `start` on."""
    with contextlib.suppress(OSError), open_file(disk, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) as handle:
        return disk.pread(handle, most, start)
    return b""


def find_tail(disk: Disk, path: str, lines: int, start: int = 0) -> int:
    """The offset of the last `lines` lines of a file, or `start` if that is later: nothing before it is read."""
    at = measure(disk, path)
    missing = lines + (read_part(disk, path, at - 1, 1) == b"\n") if at and lines > 0 else 0       # newlines to find
    while missing and at > start:
        step = min(65536, at - start)
        at -= step
        block = read_part(disk, path, at, step)
        if block.count(b"\n") >= missing:
            return at + len(block.rsplit(b"\n", missing)[0]) + 1
        missing -= block.count(b"\n")
    return at


def find_line_end(disk: Disk, path: str, start: int, end: int) -> int:
    """Where the last line ends, between these offsets; or else the last state of a progress bar; or else `end`."""
    for mark in (b"\n", b"\r"):
        at = end
        while at > start:
            step = min(65536, at - start)
            at -= step
            if cut := read_part(disk, path, at, step).rfind(mark) + 1:
                return at + cut
    return end


class LineCounts:
    """Counts the lines of logs.  The last count of each is kept: what comes after it is counted from there."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.counted: dict[str, tuple[int, int, int]] = {}      # {path: (inode, bytes, lines that end in them)}

    def count(self, path: str, end: int) -> int:
        """How many lines end in the first `end` bytes."""
        status = find_status(self.disk, path)
        inode, at, lines = self.counted.pop(path, (0, 0, 0))
        if not status or inode != status.st_ino or at > end:
            at = lines = 0
        while at < end and (block := read_part(self.disk, path, at, min(2**20, end - at))):
            lines += block.count(b"\n")
            at += len(block)
        self.counted[path] = status.st_ino if status else 0, at, lines
        for former in list(self.counted)[:-MAX_COUNTED_LOGS]:
            self.counted.pop(former, None)
        return lines


MAX_COUNTED_LOGS = 100
LOG_TIMES = "log.times"
LOG_TIMES_BYTES = 2**24         # its limit


def append_log_mark(disk: Disk, folder: str, line: str) -> None:
    """Append a line to log.times.  Faults are ignored: the logs are complete without it."""
    # The job may put anything in the place of the file and of its folder.
    if not is_real_folder(disk, folder):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
    with contextlib.suppress(OSError), open_file(disk, os.path.join(folder, LOG_TIMES), flags) as handle:
        if disk.size(handle) < LOG_TIMES_BYTES:
            append_whole(disk, handle, line.encode())


def read_log_times(disk: Disk, folder: str, starts: Sequence[int]) -> list[LogMark]:
    """The marks in log.times, from those sizes on at the latest.  The job may have put anything there."""
    path = os.path.join(folder, LOG_TIMES)
    size, step = min(measure(disk, path), LOG_TIMES_BYTES), 4096
    while True:
        lines = read_part(disk, path, max(0, size - step), min(size, step)).splitlines(True)
        marks = list(parse_log_times(lines if step >= size else lines[1:]))
        if step >= size or (marks and marks[0][1] <= starts[0] and marks[0][2] <= starts[1]):
            return marks
        step *= 4


def settle_lines(content: bytes, longest: int, is_first_longer: bool = False) -> bytes:
    """Lines of more than `longest` bytes as they were last: a progress bar begins its line anew with \\r.

    `is_first_longer`: the first of them counts as longer.
    """
    def settle_line(line: bytes) -> bytes:
        shown = line.rstrip(b"\r")
        return shown[shown.rfind(b"\r") + 1:] + line[len(shown):]

    if b"\r" not in content:
        return content
    lines = content.split(b"\n")
    return b"\n".join(settle_line(line) if len(line) > longest or (is_first_longer and not number) else line
                      for number, line in enumerate(lines))


class LogReader:
    """Reads on in one or both logs of a job, in the order in which they grew."""

    def __init__(self, disk: Disk, folder: str, streams: Sequence[int] = (0, 1), names: Sequence[str] = STREAM_FILES,
                 measure_now: Callable[[str], Sequence[LogMark]] = lambda folder: ()) -> None:
        """`streams`: the logs to read; `measure_now`: returns marks after those in log.times."""
        self.disk, self.folder, self.streams, self.names = disk, folder, streams, names
        self.measure_now = measure_now
        self.offsets = [0, 0]                           # of what comes next
        self.limits: Sequence[int] = ()                 # nothing is read from there on; (): all
        self.number = 1                                 # of the line that comes next
        self.lines_left: int | None = None              # that may still be read; None: all
        self.partial: dict[int, LogEntry] = {}          # {stream: an incomplete line before its offset}

    def find_path(self, stream: int) -> str:
        return os.path.join(self.folder, self.names[stream])

    def format_offsets(self, offsets: Sequence[int]) -> str:
        """Those of the logs that are read, as `offset` of the API takes them."""
        return ",".join(str(offsets[stream]) for stream in self.streams)

    def measure(self) -> list[int]:
        sizes = [measure(self.disk, self.find_path(stream)) if stream in self.streams else offset
                 for stream, offset in enumerate(self.offsets)]
        return list(map(min, sizes, self.limits)) if self.limits else sizes

    def begin(self, attempts: Sequence[Attempt], offsets: Sequence[int], tail: int | None) -> None:
        """Begin at these offsets, at 0 in a file that is shorter; or `tail` lines before the end, if that is later.

        A negative offset is counted from the end.
        """
        ends = self.measure()
        for stream, (offset, end) in enumerate(zip(offsets, ends)):
            start = max(0, end + offset) if offset < 0 else offset
            self.offsets[stream] = start if start <= end else 0
        if tail is None:
            return
        for stream in self.streams:
            start = self.offsets[stream]
            self.offsets[stream] = max(start, find_tail(self.disk, self.find_path(stream), tail, start))
        if len(self.streams) > 1:
            self.offsets = self.find_last_lines(attempts, ends, tail)

    def begin_at_line(self, attempts: Sequence[Attempt], number: int) -> None:
        """Begin at the line of this number, from 1, in the order in which lines ended; or at the end."""
        at, missing = [0, 0], number - 1                # newlines to find
        for block in self.walk(attempts, self.measure()) if missing else ():
            count = block.content.count(b"\n")
            rest = block.content.split(b"\n", missing)[-1] if count >= missing else block.content.rpartition(b"\n")[2]
            if count:
                at[block.stream] = block.end - len(rest)
            missing -= min(count, missing)
            if not missing:
                break
        self.offsets, self.number = at, number - missing

    def count_lines(self, counts: LineCounts) -> None:
        """Learn the number of the line that comes next."""
        self.number = 1 + sum(counts.count(self.find_path(stream), self.offsets[stream]) for stream in self.streams)

    def find_last_lines(self, attempts: Sequence[Attempt], ends: Sequence[int], count: int) -> list[int]:
        """The offsets of the last `count` lines of both logs together."""
        lines: list[tuple[int, int]] = []           # (stream, start) of each line, in the order in which they ended
        at = list(self.offsets)
        for block in self.walk(attempts, ends):
            for newline in re.finditer(rb"\n", block.content):
                lines.append((block.stream, at[block.stream]))
                at[block.stream] = block.start + newline.end()
        lines += [(stream, at[stream]) for stream in self.streams if at[stream] < ends[stream]]
        last = lines[max(0, len(lines) - count):]
        return [min((start for number, start in last if number == stream), default=end)
                for stream, end in enumerate(ends)]

    def limit(self, attempts: Sequence[Attempt], most: int) -> bool:
        """Read no more than the next `most` bytes, up to the end of a line; return whether there are more."""
        ends, at = self.measure(), list(self.offsets)
        for part in self.find_parts(attempts, ends):
            at[part.stream] = min(part.end, part.start + most)
            most -= at[part.stream] - part.start
            if not most:
                break
        if at == ends:
            return False
        self.limits = [find_line_end(self.disk, self.find_path(stream), self.offsets[stream], at[stream])
                       if self.offsets[stream] < at[stream] < ends[stream] else at[stream] for stream in (0, 1)]
        return True

    def find_parts(self, attempts: Sequence[Attempt], ends: Sequence[int]) -> Iterator[LogEntry]:
        """The parts between the offsets and `ends`, in the order of arrival, without their content."""
        latest = self.measure_now(self.folder)          # before log.times is read, as it may append to it
        # Marks of a file that is not read need not be looked for.
        starts = [offset if stream in self.streams else sys.maxsize for stream, offset in enumerate(self.offsets)]
        marks = [*read_log_times(self.disk, self.folder, starts), *latest]
        return merge_logs(marks, attempts, self.offsets, ends)

    def walk(self, attempts: Sequence[Attempt], ends: Sequence[int]) -> Iterator[LogEntry]:
        """The output between the offsets and `ends`, in the order of arrival, in blocks."""
        for part in self.find_parts(attempts, ends):
            at, path = part.start, self.find_path(part.stream)
            while at < part.end and (block := read_part(self.disk, path, at, min(65536, part.end - at))):
                yield replace(part, start=at, end=at + len(block), content=block)
                at += len(block)

    def read(self, attempts: Sequence[Attempt] = (), longest: int | None = None) -> Iterator[LogEntry]:
        """The new output, in complete lines.

        Of a line of more than `longest` bytes, only its last state is there: settle_lines().  None: all is there.
        """
        ends = self.measure()
        for stream in [stream for stream in self.streams if ends[stream] < self.offsets[stream]]:        # a new file
            self.offsets[stream] = 0
            self.partial.pop(stream, None)
        for block in self.walk(attempts, ends) if ends != self.offsets else ():
            if any(line.attempt != block.attempt for line in self.partial.values()):
                yield from self.flush()
            self.offsets[block.stream] = block.end
            if block.stream in self.partial:
                line = self.partial.pop(block.stream)
                block = replace(block, start=line.start, content=line.content + block.content)
            cut = block.content.rfind(b"\n") + 1
            start = block.end - len(block.content) + cut if cut else block.start
            if longest is None or not self.is_longer(block.stream, start, ends[block.stream], longest):
                cut = max(cut, block.content.rfind(b"\r") + 1)
            whole, rest = block.content[:cut], block.content[cut:]
            start = block.end - len(rest) if cut else block.start           # of the rest
            if longest is not None:
                is_cut = block.end - block.start > len(block.content)       # former states of its first line are gone
                whole = settle_lines(whole, longest, is_cut)
                rest = settle_lines(rest, longest, is_cut and not cut)
            if not cut and len(rest) > MAX_LOG_LINE:
                whole, rest, start = rest, b"", block.end
            if rest:
                self.partial[block.stream] = replace(block, start=start, content=rest)
            if whole:
                yield replace(block, end=start, content=whole, line=self.number)
                self.number += whole.count(b"\n")

    def read_some(self, attempts: Sequence[Attempt] = (), longest: int | None = None) -> Iterator[LogEntry]:
        """As read(), but no more than the lines that are left; then each progress bar is as it was last."""
        if self.lines_left is None:
            yield from self.read(attempts, longest)
            return
        for piece in self.read(attempts):
            *first, rest = piece.content.split(b"\n", self.lines_left)
            self.lines_left -= len(first)
            content = piece.content if self.lines_left else piece.content[:len(piece.content) - len(rest)]
            yield replace(piece, end=piece.start + len(content), content=settle_lines(content, 0))
            if not self.lines_left:
                self.partial = {}
                break

    def is_longer(self, stream: int, start: int, end: int, longest: int) -> bool:
        """Whether the line that begins there has more than `longest` bytes before `end`."""
        return end - start > longest and b"\n" not in read_part(self.disk, self.find_path(stream), start, longest + 1)

    def flush(self) -> Iterator[LogEntry]:
        """The incomplete lines, when their ends may never come; of a progress bar that was cut, the rest is to come."""
        for line in self.partial.values():
            is_bar = len(line.content) < line.end - line.start          # former states of it are gone
            path, end = self.find_path(line.stream), line.end
            if not (self.limits and is_bar and measure(self.disk, path) > end):
                yield replace(line, line=self.number)
        self.partial = {}


MAX_LOG_LINE = 65536            # a longer line comes in pieces
MAX_BAR_BYTES = 10000           # a longer line is shown as it was last, also without `tail`


def read_tail(disk: Disk, path: str, start: int, most: int) -> str:
    """The end of a log from byte `start` on, at most `most` bytes."""
    size = measure(disk, path)
    begin = max(0, min(start, size), size - most)
    return read_part(disk, path, begin, most).decode("utf-8", "replace") if begin < size else ""

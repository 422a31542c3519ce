"""The lines of a job's logs: when each was written, and the search in them.

log.times, beside a job's logs, has lines `TENTHS STDOUT STDERR`: the logs' sizes at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..values.job import Attempt
from ..values.value import Value, replace

LogMark = tuple[float, int, int]                        # time, size of stdout.log, size of stderr.log


class LogEntry(Value):
    """Output that arrived together on one stream of a job, as far as is known."""
    attempt: int                                        # 0: not a job's log
    stream: int                                         # 0: stdout, 1: stderr
    start: int
    end: int
    at: float | None = None                             # when it had arrived; None: unknown
    content: bytes = b""
    is_after_gap: bool = False                          # a search has left out lines before it, and others before those
    line: int = 1                                       # the number of its first line, of all lines that are read


def parse_log_times(lines: Iterable[bytes]) -> Iterator[LogMark]:
    """Skip torn lines, and those whose sizes go back.  The clock may have been set back."""
    last = [0, 0]
    for line in lines:
        if re.fullmatch(rb"[0-9]{1,11}( [0-9]{1,15}){2}\n", line):
            tenths, *sizes = map(int, line.split())
            if sizes[0] >= last[0] and sizes[1] >= last[1]:
                last = sizes
                yield tenths / 10, sizes[0], sizes[1]


def merge_logs(marks: Iterable[LogMark], attempts: Sequence[Attempt],
               starts: Sequence[int], ends: Sequence[int]) -> Iterator[LogEntry]:
    """The parts of both logs between these sizes, in the order of arrival; at the same time, stdout first."""
    number, at_sizes = 0, list(starts)
    rows: list[tuple[float | None, int, int, int]] = [
        (None, *attempt.log_start, attempt.number) for attempt in attempts]
    rows += [(*mark, 0) for mark in marks]
    rows.sort(key=lambda row: row[1] + row[2])
    for at, out, err, attempt in [*rows, (None, ends[0], ends[1], 0)]:
        for stream, size in enumerate(map(min, (out, err), ends)):
            if size > at_sizes[stream]:
                yield LogEntry(number, stream, at_sizes[stream], size, at)
                at_sizes[stream] = size
        number = attempt or number


def order_growth(former: Sequence[int], sizes: Sequence[int], changed_at: Sequence[int],
                 content: bytes) -> list[tuple[int, int]]:
    """The logs' sizes between these, where both grew meanwhile: what was not written last comes first.

    `changed_at`: of each log, when it was last written to; at one time stdout comes first, but for a bar that has ended
    on stderr.  `content`: the end of the log that was written last, in doubt of stderr.  A bar that began meanwhile,
    right after another had ended, began after the other log's lines.  So does tqdm: bar, `epoch 3`, the next bar.
    """
    last = int(changed_at[1] >= changed_at[0])
    if changed_at[0] == changed_at[1] and re.search(rb"\r[^\n]*\n\Z", content):
        last = 0
    begun = re.search(rb"\r[^\n]*\n([^\n]+)\Z", content)
    steps, at = [], list(former)
    if begun and sizes[last] - len(begun[1]) > former[last]:
        at[last] = sizes[last] - len(begun[1])
        steps.append((at[0], at[1]))
    at[not last] = sizes[not last]
    return [*steps, (at[0], at[1])]


class LogSearch:
    """Makes text of the lines of logs that have a text in them, and of some around each; nothing of the others.

    It is given whole lines.  A line that is too long to be kept comes in pieces, which count as lines.
    """

    def __init__(self, text: str, context: int, make_text: Callable[[LogEntry, Sequence[Attempt]], bytes]) -> None:
        """A text without a capital is found in any case.  `context`: lines to show before and after."""
        import collections
        self.is_exact, self.is_ascii = text != text.lower(), text.isascii()
        self.text, self.context, self.make_text = self.fold(text.encode()), context, make_text
        self.before: collections.deque[LogEntry] = collections.deque(maxlen=context)    # the last lines not shown
        self.due = 0                                # lines to show that come next: they follow one that was found
        self.has_shown, self.left_out = False, 0    # whether any line was shown, and how many were not since
        self.tails: dict[tuple[int, int], bytes] = {}           # {(attempt, stream): the end of a line that goes on}

    def fold(self, content: bytes) -> bytes:
        if self.is_exact:
            return content
        if self.is_ascii:
            return content.lower()
        return content.decode("utf-8", "surrogateescape").lower().encode("utf-8", "surrogateescape")

    def __call__(self, piece: LogEntry, attempts: Sequence[Attempt]) -> bytes:
        key, folded = (piece.attempt, piece.stream), self.fold(piece.content)
        has_begun = self.text in self.tails.pop(key, b"") + folded[:len(self.text)]         # across two pieces
        if not folded.endswith(b"\n"):
            self.tails[key] = folded[max(0, len(folded) - len(self.text) + 1):]
        if not (has_begun or self.text in folded or self.due):
            piece = self.pass_over(piece)           # most pieces: they are not taken apart
        lines = re.findall(rb"[^\n]*\n|[^\n]+", piece.content)
        found = [number for number, line in enumerate(lines)
                 if self.text in self.fold(line) or (has_begun and not number)]
        return b"".join(self.make_text(shown, attempts) for shown in self.choose(piece, lines, found))

    def pass_over(self, piece: LogEntry) -> LogEntry:
        """The end of a piece that has nothing: those lines that may stand before what is found next."""
        content = piece.content
        at = len(content) - content.endswith(b"\n") if self.context else len(content)
        for _ in range(self.context):
            at = content.rfind(b"\n", 0, max(0, at))
        begin = at + 1 if self.context else at
        self.left_out += content.count(b"\n", 0, begin)
        return replace(piece, start=piece.end - len(content) + begin, content=content[begin:],
                       line=piece.line + content.count(b"\n", 0, begin))

    def choose(self, piece: LogEntry, lines: Sequence[bytes], found: Sequence[int]) -> list[LogEntry]:
        """What is shown of these lines of a piece, and before it.  `found`: the numbers of those with the text."""
        spans = [(0, min(self.due, len(lines)))] if self.due else []
        early = list(self.before)[max(0, len(self.before) + found[0] - self.context):] if found else []
        for number in found:
            start, end = max(0, number - self.context), min(len(lines), number + self.context + 1)
            if spans and start <= spans[-1][1]:
                start = spans.pop()[0]
            spans.append((start, end))
        last = found[-1] + self.context + 1 if found else self.due
        self.due = max(0, last - len(lines))
        at = [piece.start]                          # where each line begins, and the last one ends
        for line in lines:
            at.append(at[-1] + len(line))
        if at[-1] != piece.end:                     # former states of a progress bar are gone, and so are these places
            at = [piece.start] * len(lines) + [piece.end]

        def take(start: int, end: int) -> LogEntry:
            content = b"".join(lines[start:end])
            content = content if content.endswith(b"\n") else content.rstrip(b"\r") + b"\n"
            return replace(piece, start=at[start], end=at[end], content=content, line=piece.line + start)

        rest = spans[-1][1] if spans else 0         # the first line that is not shown
        has_gap = self.has_shown and self.left_out + (spans[0][0] if spans else 0) > len(early)
        shown = [replace(part, is_after_gap=bool(self.context) and (number > len(early) or (has_gap and not number)))
                 for number, part in enumerate([*early, *(take(*span) for span in spans)])]
        if shown:
            self.before.clear()
            self.has_shown, self.left_out = True, 0
        self.left_out += len(lines) - rest
        kept = range(max(rest, len(lines) - self.context), len(lines))
        self.before.extend(take(number, number + 1) for number in kept)
        return shown

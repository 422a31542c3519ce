"""How far a job is, by the progress bars and counters in its output."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..values.value import Value, replace
from .cause_lines import PROGRESS_BAR, find_last_lines
from .metrics import read_metrics

# How far a job is, from what it prints.  A bar is tqdm's, rich's or Keras's, and a counter has its word before it: no
# other number counts, as most of them tell something else (`GPU mem 41%`, `rank 3/8`).
TQDM_BAR = r"\d%\|[^|]*\|\s*([\d.]+)([kMGTP]?)/([\d.]+)([kMGTP]?)\w*\s*\[[\d:]+<([\d:]+|\?)"
RICH_BAR = r"[━╸╺]{4}\s+(\d{1,3})%\s+(\d[\d:]+)\s*$"
COUNTED_BAR = (
    r"(?:^|\s)(\d+)/(\d+)\s*\[[=>.]{4}|(?:^|\s)(\d+)/(\d+)\s+[━╸╺]{4}|[━╸╺]{4}\s+(\d+)/(\d+)\s")
COUNTER = (
    r"(?i)(?<![\w/.-])(epoch|step|iteration|iter|batch)(?:es|s)?\b[\s:=#\[(]{0,4}(\d+)\s*(?:/|of\s)\s*(\d+)(?![\w/.])")
EPOCH_LINE = r"(?i)\W{0,20}epoch\W{1,4}\d+\s*(?:/|of\s)\s*\d+\W{0,20}"
EPOCH_ALONE = r"(?i)(?<![\w/.-])epoch[\s:=#]{0,3}\d+(?!\s*(?:/|of\s|\d))"  # Lightning's, of unknown many
ULTRALYTICS = r"^\s*(\d+)/(\d+)\s+[\d.]+G\s.*(?:%\||[━╸╺]{4})"        # its epochs, before a bar
MAIN_SILENCE_S = 600.0          # a bar that stands still for so long, while another goes on, was left
MAX_TOTALS = 20
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


class OutputProgress(Value):
    """How far a job is, by its bars and counters."""
    fraction: float | None = None               # 0 to 1; None: unknown, or it has just fallen
    left_s: float | None = None                 # seconds left, at that time
    at: float = 0.0                             # when that was read
    epoch: tuple[int, int] | None = None        # of the outer counter: the present one, of how many
    is_told_after: bool = False                 # an epoch is told when it has ended
    is_begun: bool = False                      # the present one has just begun when it was told
    total: float | None = None                  # of the bar or counter which counts, in an epoch or alone
    counts: tuple[tuple[float, float], ...] = ()    # (total, what was last counted) of each bar or counter
    stale: float | None = None                  # the count that the former epoch ended with: it may come once more
    is_inner: bool = False                      # what counts begins anew: the whole is not known
    reached: float = 0.0                        # the fraction, also where it has fallen
    begin: tuple[float, float] | None = None    # (when, the fraction) as the counting began


class Counted(Value):
    """What a line counts."""
    epoch: tuple[int, int] | None = None
    count: tuple[float, float] | None = None    # so many, of so many
    left_s: float | None = None                 # as the bar says
    is_part: bool = False                       # of an epoch, of unknown many
    is_begun: bool = False                      # an epoch begins: the line tells nothing else


def read_counted(line: str) -> Counted:
    """What a line counts, if it has one of the forms above."""
    counters = {match[1].lower()[:4]: (int(match[2]), int(match[3])) for match in re.finditer(COUNTER, line)}
    epoch = counters.pop("epoc", None)
    count: tuple[float, float] | None = next(iter(counters.values()), None)
    left_s: float | None = None
    if match := re.search(ULTRALYTICS, line):
        epoch = int(match[1]), int(match[2])
    if match := re.search(TQDM_BAR, line):
        count = float(match[1]) * UNITS[match[2]], float(match[3]) * UNITS[match[4]]
        left_s = None if match[5] == "?" else read_clock(match[5])
    elif match := re.search(RICH_BAR, line):
        count, left_s = (int(match[1]), 100), read_clock(match[2])
    else:
        bars = [(int(done), int(total)) for match in re.finditer(COUNTED_BAR, line)
                for done, total in [filter(None, match.groups())]]
        count = next((bar for bar in reversed(bars) if bar != epoch), count)
    if epoch and not is_count(*epoch):
        epoch = None
    if count and not is_count(*count):
        count = None
    return Counted(epoch, count, left_s if count else None, bool(count and not epoch and re.search(EPOCH_ALONE, line)),
                   bool(epoch and not count and re.fullmatch(EPOCH_LINE, line)))


def is_count(done: float, total: float) -> bool:
    return done <= total and total >= 2


def read_clock(text: str) -> float:
    """Seconds of `12:18`, or of `1:12:18`."""
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part or 0)
    return float(seconds)


def read_progress(before: OutputProgress, line: str, at: float) -> OutputProgress:
    """What is known of a job's progress after another line, printed at that time.

    An outer counter wins.  A bar without one that begins anew is an inner one, of unknown many.
    """
    found = read_counted(line)
    if not (found.epoch or found.count) or before.is_inner:
        return before
    if found.epoch and before.epoch and found.epoch[0] < before.epoch[0]:
        return OutputProgress(is_inner=True)
    now, left_s = before, None
    if found.epoch and found.epoch != before.epoch:
        last = dict(before.counts).get(before.total or 0.0)
        is_first = before.epoch is None
        now = replace(now, epoch=found.epoch, is_begun=found.is_begun, stale=None if found.count else last,
                      is_told_after=bool(is_first and last and not found.count) or now.is_told_after)
    if found.count:
        done, total = found.count
        last = dict(before.counts).get(total, 0.0)
        others = tuple(count for count in now.counts if count[0] != total)
        now = replace(now, counts=(*others, (total, done))[-MAX_TOTALS:])
        if now.total and now.total != total and not is_left(before, at):
            return now                                      # another bar, beside the one that counts
        if not now.epoch and (found.is_part or done < last):
            return OutputProgress(is_inner=True)
        if now.stale is not None and done >= now.stale:
            return now
        now, left_s = replace(now, total=total, stale=None), None if now.epoch else found.left_s
    part = dict(now.counts)[now.total] / now.total if now.total and now.stale is None else 0.0
    reached = part
    if now.epoch:
        # Without an inner counter, an epoch is told at its end, with what it has brought.
        is_over = (now.is_told_after or not now.total) and not now.is_begun
        reached = (now.epoch[0] - (not is_over) + part) / now.epoch[1]
    begin = now.begin
    if begin is None or reached < begin[1] or now.total != before.total or at == begin[0]:
        begin = at, reached                     # of lines that were read at once the last: when they came is unknown
    if left_s is None and reached > begin[1] and at > begin[0]:
        left_s = (at - begin[0]) / (reached - begin[1]) * (1 - reached)
    if reached < before.reached and now.total == before.total:
        return replace(now, fraction=None, left_s=None, at=at, reached=reached, begin=begin)
    return replace(now, fraction=min(1.0, reached), left_s=left_s, at=at, reached=reached, begin=begin)


def is_left(progress: OutputProgress, at: float) -> bool:
    """Whether the bar that counts is over, or stands still, while another goes on."""
    is_over = dict(progress.counts).get(progress.total or 0.0) == progress.total
    return (is_over and not progress.epoch) or at - progress.at > MAIN_SILENCE_S


def drop_bar(line: str) -> str:
    """A line without the bar that is drawn in it."""
    line = re.sub(r"(\d%)\|[^|]*\|", r"\1", line)
    return re.sub(r"\s?(?:[━╸╺]{4,}|\[[=>.]{4,}\])", "", line)


def find_telling_line(texts: Iterable[str]) -> str | None:
    """The last line of the first text that says more than how far a bar is; if there is none, the last line.

    `texts`: the ends of a job's logs, of the one that grew last first.
    """
    last = None
    for text in texts:
        for line in reversed(find_last_lines(text, MAX_BARS)):
            if not is_bare_bar(line):
                return line
            last = last or line
    return last


MAX_BARS = 20                   # lines of a log's end that may be bars


def is_bare_bar(line: str) -> bool:
    has_bar = re.fullmatch(PROGRESS_BAR, line) or re.search(f"{RICH_BAR}|{COUNTED_BAR}", line)
    return bool(has_bar) and not read_metrics(line)

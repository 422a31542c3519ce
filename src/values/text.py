"""Durations, sizes, times, ids, numbers: parse_ from text, format_ to text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence

from ..opening import TYPE_CHECKING
from .errors import NexusError

if TYPE_CHECKING:
    from typing import Any, NoReturn

ID_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"      # base58 without its digits
# Patterns are compiled when they are first needed: `nexus add` needs few.
ID_PATTERN = f"[{ID_LETTERS}]{{3,4}}"
SURROGATES = "\\ud800-\\udc7f\\udd00-\\udfff"   # not encodable; the others stand for bytes that are not UTF-8
CONTROL = (                                # and what changes a line's direction
    f"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069{SURROGATES}]")
# What is not seen in a name: Unicode's Default_Ignorable_Code_Point, marks of annotations, and the blank of braille
INVISIBLE = (
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]")
MAX_ARGUMENT_BYTES = 128 * 1024 - 1        # Linux refuses to exec with a longer one (MAX_ARG_STRLEN)


MAX_TIME = 253402300799                     # UTC epoch seconds of the last second of the year 9999
MAX_WORDS = 1000                            # characters of a text from outside


def format_duration(seconds: float) -> str:
    """`45s`, `12m 5s`, `2h 15m`, `3d 4h`: the two largest units.  What is no number of seconds is `0s`."""
    left = int(min(max(0.0, seconds), MAX_TIME))
    parts = [(left // 86400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count}{unit}" for count, unit in parts[first:first + 2] if count) or "0s"


def format_time(at: float | None) -> str | None:
    """`2024-10-24T15:30:15Z`; None for None, and for a time that is not in the years 1970 to 9999."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) if at is not None and 0 <= at <= MAX_TIME else None


def parse_time(text: str) -> float:
    """UTC epoch seconds of `2024-10-24T15:30:15Z`.  Raises: ValueError."""
    import datetime
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def format_gb(mib: float | None) -> str | None:
    """Memory in whole GB as the API shows it, `24GB`; None if unknown."""
    return None if mib is None else f"{mib / 1024:.0f}GB"


def format_memory(mib: float, decimals: int = 1) -> str:
    """`16GB`, `1.5GB`; below 1 GB, `500MB`."""
    return f"{mib:.0f}MB" if mib < 1024 else format_known(mib / 1024, "GB", decimals)


def format_bytes(size: int) -> str:
    """`1.5GB`, `16MB`; below 1 MB, `3KB`."""
    return format_memory(size / 2**20) if size >= 2**20 else f"{-(-size // 1024)}KB"


def format_known(number: float | None, unit: str, decimals: int = 1) -> str:
    """`2GB`, `0.5GB`: no zeros after the point."""
    return "unknown" if number is None else f"{round(number, decimals):.12g}{unit}"


def format_count(count: int, noun: str) -> str:
    """`1 job`, `3 jobs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def list_some(words: Sequence[str], most: int) -> list[str]:
    """The first `most` of them, and how many more there are."""
    return [*words[:most], *([f"and {len(words) - most} more"] if words[most:] else [])]


def join_some(words: Sequence[str], most: int = 20, mark: str = ", ") -> str:
    return mark.join(list_some(words, most))


def format_line(text: str, width: int = 0) -> str:
    """Text as one harmless line for a terminal: control characters become blanks.

    It is cut at `width` columns unless 0, in its middle: a command's beginning names the program, and its end tells it
    from others.  Between words, where these are short enough.
    """
    text = cut_middle(text, 2 * width + 1) if width else text
    line = text if text.isprintable() else re.sub(CONTROL, " ", text)
    if not width or (len(line) <= 4 * width and count_columns(line) <= width):
        return line
    head, tail = line[:width], line[-width:]
    while count_columns(head) > max(1, width * 3 // 5 - 1):
        head = head[:-1]
    blank = head.rfind(" ")
    if 2 * blank >= len(head) and not line.startswith(f"{head} "):
        head = head[:blank].rstrip()
    while tail and count_columns(head) + 1 + count_columns(tail) > width:
        tail = tail[1:]
    blank = tail.find(" ")
    if 0 <= 3 * blank <= 2 * len(tail) and not line.endswith(f" {tail}"):
        tail = tail[blank:].lstrip()
    return f"{head}…{tail}"


def cut_middle(text: str, most: int) -> str:
    """A text without what is between its first and its last `most` characters."""
    return text if len(text) <= 2 * most else text[:most] + text[-most:]


def cut_words(text: str, most: int = MAX_WORDS) -> str:
    """A text from outside as one harmless line of at most so many characters."""
    return format_line(text if len(text) <= most else f"{text[:most - 1]}…")


def count_columns(text: str) -> int:
    """How many columns of a terminal a line has."""
    if text.isascii():
        return len(text)
    import unicodedata
    return sum(0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
               for letter in text)


DURATION_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
MEMORY_UNITS = {"M": 1, "G": 1024, "T": 1024 * 1024}        # in MiB


def parse_duration(text: str) -> float:
    """Seconds of text as DURATION_TEXT allows, or a number: `45s`, `1.5h`, `2h 30m`, `1:30:00`, `1-12:00:00`, `90`."""
    if ":" in text:
        days, _, clock = text.rpartition("-")
        return int(days or 0) * 86400 + sum(
            int(part) * size for part, size in zip(clock.split(":"), (3600, 60, 1)))
    return sum(float(number) * DURATION_UNITS[unit] for number, unit in re.findall("([0-9.]+) ?([smhdw]?)", text))


ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"


def parse_begin(text: str, now: float) -> float:
    """UTC epoch seconds of a time of starting.  Raises: usage.

    `+2h`: from now.  `22:00`: the next one of the local clock.  `tomorrow 7:00`, `2024-10-24 22:00`: local.  With Z or
    an offset like +02:00, the clock and the day are those of that time zone.
    """
    import datetime
    if text == "now":
        return now
    try:
        if text.startswith("+"):
            return check_time(now + parse_duration(text[1:]))
        text = re.sub("(?<![0-9])([0-9]:)", r"0\1", text.replace("Z", "+00:00"))   # 8:30 is 08:30 to fromisoformat()
        if re.match("[0-9]{4}-", text):
            return check_time(max(0.0, datetime.datetime.fromisoformat(text).timestamp()))
        clock = datetime.time.fromisoformat(re.sub("^to[a-z]+.", "", text))
        at = datetime.datetime.combine(datetime.datetime.fromtimestamp(now, clock.tzinfo), clock)
        if text.startswith("to"):
            return (at + datetime.timedelta(days=int(text.startswith("tomorrow")))).timestamp()
        return (at if at.timestamp() > now else at + datetime.timedelta(days=1)).timestamp()
    except (ValueError, OverflowError, OSError):
        refuse(f"begin: there is no time {format_line(text, 40)}",
               hint="like 22:00, +2h, tomorrow 7:00, 2024-10-24 22:00, 2024-10-24T15:30:15Z or 22:00+02:00")


WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def parse_age(text: str, now: float) -> str:
    """How long ago a time as AGE_TEXT allows was, as a duration.  Raises: usage.

    `24h` is returned as it is.  `yesterday`, `monday` and `2024-10-24` are local days, from their beginning or from a
    clock after them; `22:00` is the last one, and `monday` the last one before today.
    """
    import datetime
    today = datetime.date.fromtimestamp(now)
    match = re.fullmatch(r"([a-z]+|\d{4}-\d\d-\d\d)?[ T]?(\d\d?(?::\d\d){1,2})?", text)
    if match is None or (match[1] is None and text.count(":") != 1):
        return text
    try:
        clock = datetime.time.fromisoformat(re.sub("^([0-9]:)", r"0\1", match[2] or "00:00"))
        if match[1] in WEEKDAYS:
            day = today - datetime.timedelta(days=(today.weekday() - WEEKDAYS.index(match[1]) - 1) % 7 + 1)
        elif match[1] in (None, "today", "yesterday"):
            day = today - datetime.timedelta(days=int(match[1] == "yesterday"))
        else:
            day = datetime.date.fromisoformat(match[1])
        at = datetime.datetime.combine(day, clock).timestamp()
        at -= 86400 if match[1] is None and at > now else 0
    except (ValueError, OverflowError):
        refuse(f"there is no time {format_line(text, 40)}", "like 24h, yesterday, 2024-10-24 or 2024-10-24 22:00")
    if at > now:
        refuse(f"{format_line(text, 40)} is in the future", "like 24h, yesterday, 2024-10-24 or 2024-10-24 22:00")
    left, parts = -int(at - now), ""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        parts += f"{left // size}{unit}" if left >= size else ""
        left %= size
    return parts or "0s"


def check_time(at: float) -> float:
    """A time in the years 1970 to 9999.  Raises: ValueError."""
    if not 0 <= at <= MAX_TIME:
        raise ValueError("it is not in the years 1970 to 9999")
    return at


def parse_memory(text: str) -> int:
    """MiB of text as SIZE_TEXT allows: `500M`, `10G`, `1.5GB`, `10GiB`."""
    number, unit = re.findall("([0-9.]+) ?(.)", text)[0]
    return round(float(number) * MEMORY_UNITS[unit.upper()])


def guess_number(text: str) -> float | str:
    """A text that is no number is returned as it is, for the schema's check to refuse."""
    if not re.fullmatch(r"-?([0-9]{1,12}(\.[0-9]{0,9})?|\.[0-9]{1,9})(e[+-]?[0-9]{1,2})?", text):
        return text
    return int(text) if text.lstrip("-").isdigit() else float(text)


def format_indices(indices: Iterable[object]) -> str:
    return ", ".join(str(index) for index in indices)


MAX_GPUS = 1024                             # of one job
SLICE_PLACE = r"[0-9]{1,4}\.[0-9]{1,2}"     # of MIG slice 1 of card 0: 0.1


def sort_gpu_ids(ids: Iterable[int | str]) -> tuple[int | str, ...]:
    return tuple(sorted(set(ids), key=lambda gpu_id: (float(gpu_id), str(gpu_id))))


def parse_indices(text: str) -> tuple[int | str, ...]:
    """GPU indices of `0`, `0-3,5`, with MIG slices like `0.1`: ascending, each once.  Raises: usage."""
    found: set[int | str] = set()
    for part in text.split(",", MAX_GPUS):                  # a submission may have megabytes
        if re.fullmatch(SLICE_PLACE, part.strip()):
            found.add(part.strip())
            continue
        match = re.fullmatch(r"(\d{1,4})(?:\s*-\s*(\d{1,4}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        found.update(range(first, last + 1))
        if first > last or len(found) > MAX_GPUS:
            raise NexusError("usage", f"'{format_line(text, 60)}' is not a list of GPU indices",
                             hint=f"write them like 0 or 0-3,5, MIG slices like 0.1: at most {MAX_GPUS}")
    return sort_gpu_ids(found)


def format_ranges(numbers: Iterable[int]) -> str:
    """`0-3,8`, which parse_indices() reads."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def list_case_variants(job_id: str) -> Iterator[str]:
    """It, and what differs from it by case alone: some file systems take their folders for one."""
    import itertools
    return map("".join, itertools.product(*zip(job_id.lower(), job_id.upper())))


def is_job_id(text: str) -> bool:
    return re.fullmatch(ID_PATTERN, text) is not None


def refuse(message: str, hint: str = "see nexus help add") -> NoReturn:
    raise NexusError("usage", message, hint)


MAX_COMPARED = 300              # words, each cut at so many letters: difflib takes up to a millisecond for two
MAX_COMPARED_LETTERS = 60


def suggest(word: str, candidates: Iterable[str]) -> str:
    """`did you mean 'abc'?`, or "" if none of the candidates is close to this word."""
    import difflib
    import itertools

    def cut(text: str) -> str:
        return text.lower().lstrip("-")[:MAX_COMPARED_LETTERS]

    name, names = cut(word), {cut(other): other for other in candidates}
    if len(names) > MAX_COMPARED:
        alike = (other for other in names if other.startswith(name[:3]))
        names = {other: names[other] for other in itertools.islice(alike, MAX_COMPARED)}
    near = difflib.get_close_matches(name, names, 1, 0.8) or [
        other for other in difflib.get_close_matches(name, names)
        if other.startswith(name[:3]) or name.startswith(other[:3]) or sorted(other) == sorted(name)]
    return f"did you mean '{names[near[0]]}'?" if near else ""


def fill_marks(text: str, **words: str) -> str:
    """A script or another file with each `@NAME@` in it replaced by the words of that name."""
    return re.sub("@([A-Z]+)@", lambda found: words[found[1]], text)


def load_json(text: str | bytes) -> Any:
    """Raises: ValueError, also where it is nested too deeply for Python's parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(text: str | bytes, what: str) -> Any:
    """Raises: usage, naming `what` and where it is not JSON."""
    try:
        return load_json(text)
    except ValueError as error:
        raise NexusError("usage", f"{what} is not valid JSON: {error}",
                         hint='send an object like {"command": "python train.py"}, in UTF-8') from None


def hash_text(text: str) -> str:
    import hashlib
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

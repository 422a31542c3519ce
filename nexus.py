#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = ["psutil", "tomli; python_version < '3.11'"]
# ///
"""nexus: a job queue for the GPUs of one machine or of many, in one file.

    python3 nexus.py add "python train.py"     queue a job; it runs on the next GPU that is truly free
    python3 nexus.py                           what runs where, what waits
    python3 nexus.py logs -f ID                what it prints
    python3 nexus.py node add me@gpu2          its GPUs too, by ssh
    python3 nexus.py install                   put `nexus` on PATH
    python3 nexus.py help                      everything else

The first command starts a service, which decides what runs; every job is kept alive, logged and judged by a script
of its own, so that the service may be killed at any moment.  All that must last is in ~/.nexus (NEXUS_HOME moves it).

The file reads from top to bottom: values, effects, the service, the command line.  `grep '^# ====' nexus.py` lists its
sections; each uses only those above it.  As a library: `import nexus; nexus.Client.find().add("python train.py")`.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import operator
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from shlex import quote

__version__ = "1.0.0"

# Imports that `nexus add` does not need are local to where they are used: it may take four times as long as
# `python3 -c pass`, and typing, dataclasses, subprocess and http.client cost it 12, 12, 15 and 35 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    import logging
    import queue
    import ssl
    import subprocess
    from collections.abc import Generator
    from io import BufferedReader
    from typing import IO, Any, NoReturn, TextIO, TypeVar, Union
    from xml.etree import ElementTree

    from typing_extensions import dataclass_transform

    T = TypeVar("T")
    Schema = Mapping[str, Any]
    Json = Mapping[str, Any]                    # an object of the API
else:

    def dataclass_transform(**_):
        """For mypy alone."""
        return lambda cls: cls


class Field:
    """A row of a table: what the body of a value class says of one of its fields, beside its name and type."""
    default: Any = ...                          # ... = it must be given
    flag = metavar = like = ""                  # its option of the command line, `--gpus N`, and an example of the text
    text: Schema | None = None                  # a text that may be given instead, of which `parse` makes JSON
    parse: Callable[[str], Any] | None = None   # what makes JSON of a text; None: the type of `schema` says it
    convert: Callable[[Any], Any] | None = None                 # makes the kept value of a JSON value
    asked = kept = False                        # a submission may set it; a retry takes it over
    form = False                                # it is in the first part of the page's form
    chosen = False                              # what is not given is chosen: the sample file has it as a comment
    hidden = public = False                     # no reply has it; other users see it too
    place = ""                                  # where a parameter of a call is: "path", "query" or "header"

    def __init__(self, schema: Schema, help: str = "", marks: str = "", flag: str = "", **facts: Any) -> None:
        self.schema, self.help = schema, help   # what it may be, in JSON; what it means, to people
        self.flag, _, self.metavar = flag.partition(" ")
        vars(self).update(dict.fromkeys(marks.split(), True), **facts)


def field(schema: Schema, help: str = "", marks: str = "", **facts: Any) -> Any:
    """A field that must be given."""
    return Field(schema, help, marks, **facts)


def optional(default: Any, schema: Schema, help: str = "", marks: str = "", **facts: Any) -> Any:
    """A field that may be left out."""
    return Field(schema, help, marks, default=default, **facts)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """A record that does not change.  The body of its class lists the fields, as that of a dataclass does.

    An instance holds what was given; the default of any other field is an attribute of the class.
    """
    NAMES: tuple[str, ...] = ()                 # of the fields, in their order
    KNOWN: frozenset[str] = frozenset()         # these names
    REQUIRED: frozenset[str] = frozenset()      # those without a default
    FIELDS: Mapping[str, Field] = {}            # the rows of the table
    WRITTEN: tuple[str, ...] = ()               # the fields that JSON has even if they are at their defaults

    def __init_subclass__(cls) -> None:
        cls.NAMES = tuple(cls.__annotations__)
        cls.FIELDS = {name: row for name in cls.NAMES if isinstance(row := vars(cls).get(name), Field)}
        for name, row in cls.FIELDS.items():
            if row.default is ...:
                delattr(cls, name)
            else:
                setattr(cls, name, row.default)
        cls.KNOWN = frozenset(cls.NAMES)
        cls.REQUIRED = frozenset(name for name in cls.NAMES if name not in vars(cls))

    def __init__(self, *given: Any, **named: Any) -> None:
        # The service makes thousands of these each second: so this is as short as it can be.
        facts = {**dict(zip(self.NAMES, given)), **named} if given else named
        if not (self.REQUIRED.issubset(facts) and self.KNOWN.issuperset(facts) and len(given) <= len(self.NAMES)):
            wrong = [*self.REQUIRED.difference(facts), *set(facts).difference(self.NAMES)]
            raise TypeError(f"{type(self).__name__}: missing or unknown: {', '.join(wrong) or 'too many'}")
        self.__dict__.update(facts)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is a value: use replace() to make another {name}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in self.NAMES)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.NAMES))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.NAMES)})"


def replace(old: T, **changes: Any) -> T:
    return type(old)(**{**vars(old), **changes})


def is_given(record: Value, name: str) -> bool:
    """Whether a field was given, even at its default."""
    return name in vars(record)


# ==== 1. ERRORS ==== one exception, and a table of what it means outside
# Whoever finds a fault says what was tried, on what, and why it failed (message), and what to type or check next
# (hint).  MAIN prints both and exits with the kind's code; SERVER sends them with the kind's HTTP status; CLIENT raises
# them again.

KINDS = {                            # kind: (exit code, HTTP status, what it means)
    "internal": (1, 500, "a fault of nexus itself"),
    "usage": (2, 400, "malformed, or more than there is"),
    "not_found": (3, 404, "there is no such thing"),
    "conflict": (4, 409, "not in its present state"),
    "unauthorized": (5, 401, "no token where one is needed, or a wrong one"),
    "forbidden": (5, 403, "not yours, or a Host or Origin by which nexus may not be called"),
    "unavailable": (6, 503, "not now: the disk refuses, or the service has just begun"),
    "queue_full": (6, 429, "no room for further jobs"),
    "method_not_allowed": (2, 405, "not a method of this path"),
    "length_required": (2, 411, "a body needs a Content-Length"),
    "too_large": (2, 413, "the body is too large"),
    "unsupported_media_type": (2, 415, "the body is of another type"),
}


class NexusError(Exception):
    """A fault that somebody can do something about.  `kind` is a key of KINDS."""

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint
        self.exit_code, self.http_status, _ = KINDS[kind]

    def to_json(self) -> dict[str, str]:
        return {"error": self.kind, "message": self.message, "hint": self.hint}


def describe_exception(error: BaseException) -> str:
    """Its type and words.  repr() of a UnicodeError holds all of the text, which may be a job's environment."""
    return f"{type(error).__name__}: {error}"


def decode_error(told: object, otherwise: str = "") -> NexusError:
    """The error that to_json() encoded; `otherwise`: its message if no nexus sent it."""
    told = told if isinstance(told, dict) else {}
    kind = told.get("error")
    return NexusError(kind if isinstance(kind, str) and kind in KINDS else "internal",
                      str(told.get("message", otherwise)), str(told.get("hint", "")))


# ==== 2. TEXT ==== durations, sizes, times, ids, numbers: parse_ from text, format_ to text

ID_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"      # base58 without its digits
# Patterns are compiled when they are first needed: `nexus add` needs few.
ID_PATTERN = f"[{ID_LETTERS}]{{3,4}}"
SURROGATES = "\\ud800-\\udc7f\\udd00-\\udfff"   # not encodable; the others stand for bytes that are not UTF-8
CONTROL = (                                # and what changes a line's direction
    f"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069{SURROGATES}]")
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
    from others.
    """
    line = text if text.isprintable() else re.sub(CONTROL, " ", text)
    if not width or (len(line) <= 4 * width and count_columns(line) <= width):
        return line
    head, tail = line[:width], line[-width:]
    while count_columns(head) > max(1, width * 3 // 5 - 1):
        head = head[:-1]
    while tail and count_columns(head) + 1 + count_columns(tail) > width:
        tail = tail[1:]
    return f"{head}…{tail}"


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

    `+2h`: from now.  `22:00`: the next one of the local clock.  `2024-10-24 22:00`: local.  With Z or an offset like
    +02:00, the clock and the day are those of that time zone.
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
        clock = datetime.time.fromisoformat(text)
        at = datetime.datetime.combine(datetime.datetime.fromtimestamp(now, clock.tzinfo), clock)
        return (at if at.timestamp() > now else at + datetime.timedelta(days=1)).timestamp()
    except (ValueError, OverflowError, OSError):
        refuse(f"begin: there is no time {format_line(text, 40)}",
               hint="like 22:00, +2h, 2024-10-24 22:00, 2024-10-24T15:30:15Z or 22:00+02:00")


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
    return tuple(sorted(set(ids), key=lambda one: (float(one), str(one))))


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


def is_job_id(text: str) -> bool:
    return re.fullmatch(ID_PATTERN, text) is not None


def refuse(message: str, hint: str = "see nexus help add") -> NoReturn:
    raise NexusError("usage", message, hint)


MAX_COMPARED = 300              # words, each cut at so many letters: difflib takes up to a millisecond for two
MAX_COMPARED_LETTERS = 60


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'abc'?`, or "" if no known word is close to this one."""
    import difflib
    import itertools

    def cut(text: str) -> str:
        return text.lower().lstrip("-")[:MAX_COMPARED_LETTERS]

    name, names = cut(word), {cut(other): other for other in known}
    if len(names) > MAX_COMPARED:
        alike = (other for other in names if other.startswith(name[:3]))
        names = {other: names[other] for other in itertools.islice(alike, MAX_COMPARED)}
    near = difflib.get_close_matches(name, names, 1, 0.8) or [
        other for other in difflib.get_close_matches(name, names)
        if other.startswith(name[:3]) or name.startswith(other[:3]) or sorted(other) == sorted(name)]
    return f"did you mean '{names[near[0]]}'?" if near else ""


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


# ==== 3. SCHEMA ==== check(schema, value, name); every key of config.toml with its default, its check and its comment
# A schema is a dict in the small part of JSON Schema that nexus uses; openapi.json shows the same dicts.  A value class
# whose fields are made by field() or optional() is a table: each row has a schema, a help text and marks.

JSON_TYPES: Mapping[type, Sequence[str]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), type(None): ("null",),
    list: ("array",), tuple: ("array",), dict: ("object",)}
NO_NUL = f"[^\\x00{SURROGATES}]"
NOTHING = {"type": "null"}
MAX_FAULTS = 20                 # of one object; then it is not checked further: a submission may have millions


def integer_in(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "title": f"a whole number from {least} to {most}"}


def number_in(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most, "title": f"a number from {least} to {most}"}


def one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words), "title": f"one of {', '.join(words)}"}


def matching(pattern: str, title: str, **more: Any) -> Schema:
    """A text that matches; `title` says in words what it must be."""
    return {"type": "string", "pattern": pattern, "title": title, **more}


def list_of(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    limits = {**({"minItems": least} if least else {}), **({} if most is None else {"maxItems": most})}
    words = (f" of at least {least}" if least else "") + ("" if most is None else f" of at most {most}")
    return {"type": "array", "items": items, **limits, "title": "a list" + words}


def or_null(schema: Schema) -> Schema:
    options = schema.get("anyOf", [schema])
    return schema if NOTHING in options else {"anyOf": [*options, NOTHING]}


def object_of(rows: Mapping[str, Field], title: str, nulls: Container[str] = (), **more: Any) -> Schema:
    """An object with these rows as keys.  `nulls`: the keys that may be null, which stands for what was not given."""
    required = more.get("required", [name for name, row in rows.items() if row.default is ...])
    properties = {}
    for name, row in rows.items():
        schema = {"anyOf": [row.schema, row.text]} if row.text else row.schema
        schema = or_null(schema) if name in nulls else schema
        properties[name] = {**schema, "description": row.help}
    return {"type": "object", "title": title, "required": required, "additionalProperties": False,
            "properties": properties, **more}


STRING, INTEGER, FLOAT = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TIME = {"type": "string", "format": "date-time"}
FLAG: Schema = {"type": "boolean"}
TEXT = matching(f"^{NO_NUL}*$", "a text without NUL")
TEXTS = list_of(TEXT)
JOB_ID = matching(f"^{ID_PATTERN}$", "3 or 4 letters of the base58 alphabet (no digits, no I, O, l)", examples=["abc"])
LINE = matching(
    "^[^C]*[^\\sC][^C]*$".replace("C", CONTROL[1:-1]), "one line of at most 200 bytes", **{"x-max-bytes": 200})
PATH = matching(f"^/{NO_NUL}*$", "an absolute path", **{"x-max-bytes": 4095})
SECONDS = number_in(0, 31536000)


def check(schema: Schema, given: Any, name: str) -> Any:
    """The checked value: lists become tuples, and 2.0 becomes 2 as a whole number.

    Raises: usage, with the faults of all keys of an object.
    """
    if "anyOf" in schema:
        return check_any(schema, given, name)
    if isinstance(given, float) and schema.get("type") == "integer" and given.is_integer():
        given = int(given)
    if not fits_alone(schema, given):
        raise describe_fault(schema, given, name)
    if isinstance(given, dict):
        return check_object(schema, given, name)
    if isinstance(given, (list, tuple)):
        items = schema.get("items", {})
        return tuple([check(items, item, f"{name}[{number}]") for number, item in enumerate(given)])
    return given


def read_object(rows: Mapping[str, Field], schema: Schema, given: Any) -> dict[str, Any]:
    """{key: checked value} of an object with these rows.  Raises: usage, with all faults."""
    kept = check(schema, given, "")
    return {key: None if fact is None else keep(rows[key], fact, key) for key, fact in kept.items() if key in rows}


def keep(row: Field, fact: Any, name: str) -> Any:
    """The value of checked JSON.  Raises: usage."""
    if row.text and isinstance(fact, str) and row.parse:
        fact = check(row.schema, row.parse(fact), name)
    return row.convert(fact) if row.convert else fact


def parse_field(row: Field, text: str, name: str) -> Any:
    """The value of a text from the command line or a file.  Raises: usage."""
    is_number = not row.text and row.schema.get("type") in ("integer", "number")
    return keep(row, check(row.text or row.schema, guess_number(text) if is_number else text, name), name)


def fits_alone(schema: Schema, given: Any) -> bool:
    """Whether a value fits, without the values in it."""
    types = JSON_TYPES.get(type(given), ())
    if schema.get("type", "") not in ("", *types) or given not in schema.get("enum", [given]):
        return False
    if isinstance(given, str):
        most = schema.get("x-max-bytes")
        return ((most is None or 4 * len(given) <= most or len(given.encode("utf-8", "surrogatepass")) <= most)
                and ("pattern" not in schema or make_search(schema["pattern"])(given) is not None))
    if isinstance(given, (list, tuple)):
        return bool(schema.get("minItems", 0) <= len(given) <= schema.get("maxItems", len(given)))
    if isinstance(given, dict):
        return bool(len(given) <= schema.get("maxProperties", len(given)))
    if "number" in types:                       # NaN fails both comparisons
        fits = schema.get("minimum", given) <= given <= schema.get("maximum", given)
        return bool(fits and ("x-decimals" not in schema or abs(given - round(given, schema["x-decimals"])) < 1e-8))
    return True


@functools.lru_cache(None)
def make_search(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """What searches a text for a pattern of JSON Schema: Python's $ also matches before a last newline."""
    return re.compile(re.sub(r"\$$", r"\\Z", pattern)).search


def check_object(schema: Schema, given: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    what = schema.get("title") or name
    rows, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    faults = [NexusError("usage", f"{key} is missing" + (f" in {name}" if name else ""))
              for key in schema.get("required", ()) if key not in given]
    if len(given) < schema.get("minProperties", 0):
        faults.append(NexusError("usage", f"{what} needs one of {', '.join(rows)}"))
    checked = {}
    for key, fact in given.items():
        try:
            if key not in rows and others is False:
                refuse(f"'{format_line(key, 40)}' is not a key of {what}",
                       suggest(key, rows) or f"the keys are {', '.join(rows)}")
            if "propertyNames" in schema:
                check(schema["propertyNames"], key, f"a key of {what}")
            checked[key] = check(rows.get(key, others), fact, f"{name}.{key}" if name else key)
        except NexusError as error:
            faults.append(error)
        if len(faults) >= MAX_FAULTS:
            break
    if faults:
        hints = dict.fromkeys(fault.hint for fault in faults if fault.hint)
        raise NexusError("usage", "; ".join(fault.message for fault in faults), "; ".join(hints))
    return checked


def check_any(schema: Schema, given: Any, name: str) -> Any:
    """The first schema that fits.  If none does: what is wrong by the only one beside null, or what all of them are."""
    options = [option for option in schema["anyOf"] if option != NOTHING or given is None]
    if len(options) == 1:
        return check(options[0], given, name)
    for option in options:
        with contextlib.suppress(NexusError):
            return check(option, given, name)
    raise describe_fault(schema, given, name)


def describe_fault(schema: Schema, given: Any, name: str) -> NexusError:
    options = schema.get("anyOf", [schema])
    words = [word for option in options for word in option.get("enum", ())]
    examples = [json.dumps(example) for option in options for example in option.get("examples", ())]
    hint = suggest(given, words) if isinstance(given, str) else ""
    if not hint and examples:
        hint = f"like {' or '.join(examples)}"
    part = given[:60] if isinstance(given, (list, tuple)) else given
    shown = "" if is_secret(schema) else f", not {format_line(json.dumps(part, default=str), 60)}"
    return NexusError("usage", f"{name or schema.get('title')} must be {describe_schema(schema)}{shown}", hint)


def is_secret(schema: Schema) -> bool:
    """Whether a value, or one in it, is only taken in, and shown nowhere: `writeOnly`."""
    inner = (*schema.get("anyOf", ()), *schema.get("properties", {}).values(), schema.get("items", {}))
    return "writeOnly" in schema or any(map(is_secret, filter(None, inner)))


KIND_WORDS = {"string": "a text", "boolean": "true or false", "array": "a list", "object": "an object", "null": "null"}


def describe_schema(schema: Schema) -> str:
    """What a value must be, in words: `a whole number from 1 to 65535`."""
    if "anyOf" in schema:
        return " or ".join(map(describe_schema, schema["anyOf"]))
    kind = schema.get("type", "")
    words = schema["title"] if "title" in schema and kind != "object" else KIND_WORDS.get(kind, "something else")
    words += f" of at most {schema['maxProperties']} keys" if "maxProperties" in schema else ""
    return words + (f", each {describe_schema(schema['items'])}" if "items" in schema else "")


# Kinds of facts, which the annotations of values name beside `int`, `str` and the like.  decode() holds to these rows
# what comes from the disk, from a job's own files and from a node; parsers of other programs' output keep within them.

FACT_KINDS: Mapping[str, Field] = {
    "Epoch": Field(number_in(0, MAX_TIME), "UTC epoch seconds: 1970 to 9999"),
    "Span": Field(number_in(0, MAX_TIME), "seconds"),
    "Ticks": Field(integer_in(0, 10**15), "clock ticks since boot"),
    "Amount": Field(number_in(-10**9, 10**15), "what was measured: MiB, percent, watts, degrees, seconds of CPU"),
    "FileSize": Field(integer_in(0, 2**53), "bytes"),
    "Count": Field(integer_in(0, 10**9), "how many"),
    "Index": Field(integer_in(0, 9999), "the number of a GPU, or of a MIG slice"),
    "Pid": Field(integer_in(1, 2**31 - 1), "the pid of a process; nvidia-smi may name one that is not of this kernel"),
    "ExitCode": Field(integer_in(0, 255), "the exit code of a program"),
    "Signal": Field(integer_in(1, 64), "the number of a signal"),
    "Words": Field(STRING, "a text for people, as one harmless line that is cut", convert=cut_words),
    "Name": Field(STRING, "the name of a thing, likewise", convert=lambda text: cut_words(text, 100)),
    "JobId": Field(JOB_ID),
    "JobKey": Field(matching(f"^{ID_PATTERN}-[0-9]{{1,15}}$", "a job's id and number, like abc-1")),
    "Session": Field(matching("^[0-9]{1,10}\\.[A-Za-z0-9_.-]{1,80}$", "screen's PID.NAME")),
    "Uuid": Field(matching("^[A-Za-z0-9][A-Za-z0-9_./-]{0,119}$", "a GPU's UUID")),
    "BootId": Field(matching("^[A-Za-z0-9-]{1,64}$", "the id of a boot")),
    "FilePath": Field(matching(f"^/[^{CONTROL[1:-1]}]*$", "an absolute path", **{"x-max-bytes": 4095})),
    "ScreenVariable": Field(matching(
        f"^SCREENDIR=/[^{CONTROL[1:-1]}]*$", "where screen has its sockets", **{"x-max-bytes": 4095})),
    "Limit": Field(one_of("timeout", "host-memory"), "the limit that a job has reached"),
    "EndCause": Field(
        one_of("launch", "bounce", "session-lost", "reboot", "signal"), "what ended an attempt, beyond its exit code"),
}
if TYPE_CHECKING:
    Epoch = float
    Span = float
    Amount = float
    Ticks = int
    FileSize = int
    Count = int
    Index = int
    Pid = int
    ExitCode = int
    Signal = int
    Words = str
    Name = str
    JobId = str
    JobKey = str
    Session = str
    Uuid = str
    BootId = str
    FilePath = str
    ScreenVariable = str
    Limit = str
    EndCause = str


# config.toml.  Its sections are tables; the rows make the parser, checks, defaults, `nexus config` and the sample file.

NODE_WORD = "[A-Za-z0-9_]"
GPU_PLACE = rf"([\w.-]+:)?([0-9]{{1,4}}|{SLICE_PLACE})"
NODE_NAME = matching(
    f"^{NODE_WORD}[A-Za-z0-9_.-]{{0,62}}$", "a name of letters, digits, `_`, `.` and `-`", examples=["n1"])
SSH_WORD = f"{NODE_WORD}[^\\s{CONTROL[1:-1]}]{{0,252}}"      # no option


class ServiceConfig(Value):
    host: str = optional("127.0.0.1", TEXT, "any other address requires a token on every request")
    port: int = optional(
        6234, integer_in(1, 65535),
        "where it listens; without this line the first free one from here, at the first start", "chosen")
    allowed_hosts: tuple[str, ...] = optional((), TEXTS, "further Host names it may be called by: with a token only")
    refresh_rate_seconds: float = optional(
        5, number_in(0.1, 3600), "GPU polling interval; job exits are noticed at once")
    log_format: str = optional("text", one_of("text", "json"), "or \"json\": one object a line")
    log_level: str = optional("INFO", one_of("DEBUG", "INFO", "WARNING", "ERROR"), "lowest level kept in service.log")
    log_max_mb: float = optional(100, number_in(0.1, 100000), "service.log is rotated at this size")
    log_backups: int = optional(5, integer_in(0, 1000), "rotated logs kept")
    tls_cert: str = optional("", TEXT, "a PEM file, and with tls_key another: https instead of http")
    tls_key: str = optional("", TEXT, "the certificate's private key")
    node_lost_after_seconds: float = optional(0, SECONDS, "jobs fail on a node out of reach for so long; 0 = never")


PORTS = range(ServiceConfig.port, ServiceConfig.port + 66)      # the first start in a home takes one if none is named


def is_usual(url: str) -> bool:
    """Whether a service has the port that people expect: not one that it took since that was in use."""
    return not any(url.endswith(f":{port}") for port in PORTS[1:])


class StateConfig(Value):
    state_file: str = optional("~/.nexus/state.json", TEXT, "the journal lies beside it; ~/.nexus is NEXUS_HOME")
    log_dir: str = optional("~/.nexus/logs", TEXT, "one folder for each job")
    history_limit: int = optional(
        1000, integer_in(1, 1000000),
        "finished jobs kept, of each user; older ones go, with their logs; those that never ran count apart")


class GpuConfig(Value):
    ids: tuple[int, ...] = optional((), list_of(integer_in(0, 9999)), "GPUs nexus may use, by index; [] = all")
    share_with_others: bool = optional(False, FLAG, "true: a GPU on which a foreign process computes may get a job too")
    ignore_processes: tuple[str, ...] = optional(
        (), TEXTS, "programs whose processes do not count, like [\"Xorg\", \"ollama\"]; their memory still does")
    min_free_mem_mib: int = optional(0, integer_in(0, 100000000), "a GPU with less free memory gets no job")
    max_unseen_mem_mib: int = optional(
        2048, integer_in(0, 100000000), "nor one without jobs, with more in use that no listed process accounts for")
    mem_threshold: float = optional(0.8, number_in(0, 1), "nor one with this fraction of its memory in use by others")
    load_threshold: float = optional(0.8, number_in(0, 1), "nor, for a second job on it, one with this utilization")
    lease_dir: str = optional(
        "", TEXT, "where users' services agree on GPUs; \"\": nexus-leases in /run/lock, or else in /tmp")
    guard_failures: int = optional(
        3, integer_in(0, 1000),
        "a GPU is paused after so many quick failures in a row, while jobs do well on another; 0 = off")
    guard_seconds: float = optional(10, number_in(0, 86400), "quick: within so long of the start")


class JobsConfig(Value):
    launcher: str = optional(
        "screen", one_of("screen", "direct", "slurm"),
        "or \"direct\": no session, no attach; or \"slurm\": see [slurm]")
    default_gpus: int = optional(1, integer_in(0, 1024), "GPUs of a job without --gpus")
    cpu_slots: int = optional(4, integer_in(0, 100000), "how many --gpus 0 jobs run at once")
    max_running: int = optional(0, integer_in(0, 100000), "how many jobs run at once; 0 = as many as fit")
    queue_limit: int = optional(10000, integer_in(1, 10000000), "more pending jobs are refused")
    timeout_seconds: float = optional(0, SECONDS, "time limit of a job without --timeout; 0 = none")
    timeout_multiplier: float = optional(
        2, number_in(1, 1000), "a job with --expect is stopped at this multiple of that time")
    kill_grace_seconds: float = optional(10, number_in(0, 86400), "from SIGTERM to SIGKILL")
    retries: int = optional(0, integer_in(0, 1000), "further attempts of a failed job that has no --retries")
    retry_backoff_seconds: float = optional(
        5, number_in(0, 86400), "before the first; doubles each time, up to an hour")
    launch_attempts: int = optional(5, integer_in(1, 100), "how often a job is tried that cannot even be launched")
    idle_minutes: float = optional(
        30, number_in(0, 100000), "a job whose GPUs do nothing for so long is shown as idle; 0 = never")
    idle_kill_minutes: float = optional(0, number_in(0, 100000), "and stopped after so long; 0 = never")
    on_reboot: str = optional(
        "fail", one_of("fail", "requeue"), "or \"requeue\": what happens to jobs that were running at a reboot")
    reserve_after_seconds: float = optional(300, SECONDS, "a job that waits for so long gets the GPUs that become free")
    jobs_file: str = optional(
        "", TEXT, "watched: each new line `priority,script,conda_env,arguments,allowed_gpus` becomes a job")
    jobs_file_interval_seconds: float = optional(30, number_in(0.1, 86400), "how often it is read")
    llm_config: str = optional(
        "", TEXT, "JSON: the GPUs of a job with `--llm NAME` in its command, {\"models\": {\"qwen2.5-7b-inst\": 0.5}}")
    cuda_arg: str = optional(
        "replace", one_of("replace", "add"), "--cuda X of a jobs_file row becomes its GPUs; \"add\": in every row")
    allowed_script_paths: tuple[str, ...] = optional(
        (), TEXTS,
        "[] = any; else only `[interpreter] SCRIPT ARGS`, SCRIPT below one of these, where only you or root may write")
    max_memory_gb: float = optional(
        0, number_in(0, 1000000), "a job with more host memory is stopped; 0 = any (needs psutil)")
    max_running_per_user: int = optional(
        0, integer_in(0, 100000), "how many jobs of one user run at once; 0 = no limit")


class HooksConfig(Value):
    on_unhealthy: str = optional("", TEXT, "a command, run when `nexus health` turns bad, and again when it is well")
    on_idle: str = optional("", TEXT, "run once for a job that is idle for idle_minutes: NEXUS_JOB_ID, _COMMAND, _GPU")
    on_finish: str = optional(
        "", TEXT, "run at least once for each finished job: NEXUS_JOB_ID, _STATUS, _CAUSE, _EXIT_CODE, _COMMAND, _GPU")


class SlurmConfig(Value):
    partition: str = optional("", TEXT, "where sbatch puts the jobs; \"\" = the cluster's default, here and below")
    account: str = optional("", TEXT, "who is charged for them")
    qos: str = optional("", TEXT, "their quality of service")
    extra_args: tuple[str, ...] = optional(
        (), list_of(matching("^(?!-[aMW]|--(ar|cl|wr|wait$))", "no --array, --clusters, --wait or --wrap of sbatch")),
        "further options of sbatch, like [\"--constraint=a100\"]; what a job asks for counts more")
    max_submitted: int = optional(
        100, integer_in(1, 100000), "jobs in Slurm's queue at once; the others wait in nexus's")


class NodeConfig(Value):
    """Another machine, as the ssh command gets it: no word may begin with -.  "" and 0: ssh_config decides."""
    name: str = field(NODE_NAME, "what it is called here; its host if not said")
    host: str = field(matching(f"^{SSH_WORD}$", "an address, or a Host of ~/.ssh/config", examples=["10.0.0.5"]),
                      "an address, or a Host of ~/.ssh/config")
    user: str = optional("", matching(f"^({SSH_WORD})?$", "a user's name"), "whose nexus runs there")
    port: int = optional(0, integer_in(0, 65535), "of its sshd")
    jump: str = optional("", matching(f"^({SSH_WORD})?$", "[user@]host[:port]"), "through which it is reached")
    identity_file: str = optional(
        "", matching(f"^([~/]{NO_NUL}*)?$", "an absolute path, or one below ~"), "the private key")

    @property
    def destination(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


NODE = object_of(NodeConfig.FIELDS, "a node", required=["host"], examples=[{"host": "10.0.0.5"}])


def section(table: type[Value], name: str) -> Any:
    return optional(table(), object_of(table.FIELDS, f"[{name}]"), name)


class Config(Value):
    service: ServiceConfig = section(ServiceConfig, "service")
    state: StateConfig = section(StateConfig, "state")
    gpu: GpuConfig = section(GpuConfig, "gpu")
    jobs: JobsConfig = section(JobsConfig, "jobs")
    hooks: HooksConfig = section(HooksConfig, "hooks")
    slurm: SlurmConfig = section(SlurmConfig, "slurm")
    nodes: tuple[NodeConfig, ...] = optional((), list_of(NODE), "other machines")
    mock_gpus: int | None = None        # how many GPUs are made up; None: none, the real ones are used


CONFIG = object_of(Config.FIELDS, "config.toml")
SECTIONS: Mapping[str, Any] = {                 # {name: the table's defaults}
    name: row.default for name, row in Config.FIELDS.items() if name != "nodes"}


def parse_config(data: Mapping[str, Any], path: str) -> Config:
    """The configuration of a parsed TOML file.  Raises: usage."""
    if isinstance(data.get("nodes"), list):
        data = {**data, "nodes": list(map(name_node, data["nodes"]))}
    try:
        checked = check(CONFIG, data, "")
        config = Config(**{name: type(table)(**checked.get(name, {})) for name, table in SECTIONS.items()},
                        nodes=tuple(NodeConfig(**node) for node in checked.get("nodes", ())))
        if len({node.name for node in config.nodes}) < len(config.nodes):
            refuse(f"nodes: two have the same name: {', '.join(node.name for node in config.nodes)}", hint="")
        if bool(config.service.tls_cert) != bool(config.service.tls_key):
            refuse("service.tls_cert and service.tls_key belong together: set both, or neither", hint="")
        if config.nodes and config.jobs.launcher == "slurm":
            refuse("jobs.launcher = \"slurm\" and [[nodes]]: Slurm chooses where jobs run; take one out", hint="")
    except NexusError as error:
        hints = [error.hint] if error.hint else []
        raise NexusError("usage", f"{path}: {error.message}",
                         "; ".join([*hints, "all keys and what they mean: nexus config sample"])) from None
    return config


def name_node(node: Any) -> Any:
    """A node's table with a name: its host's, if none is given."""
    return {"name": node["host"], **node} if isinstance(node, dict) and "host" in node else node


def parse_node(data: Any) -> NodeConfig:
    """The body of POST /nodes.  Raises: usage, with all faults at once."""
    return NodeConfig(**check(NODE, name_node(data), ""))


def format_section(name: str, table: Any, before: str = "") -> str:
    """A table of config.toml, each key with its help."""
    facts = {key: json.dumps(getattr(table, key), ensure_ascii=False) for key in table.FIELDS}
    rows = []
    for key, row in table.FIELDS.items():
        mark = "# " if row.chosen and not is_given(table, key) else before
        rows.append(f"{f'{mark}{key} = {facts[key]}':<36} # {row.help}\n")
    return f"\n{before}[{name}]\n" + "".join(rows)


def format_config(config: Config) -> str:
    """The settings in force, in the form of config.toml."""
    return "".join([*(format_section(name, getattr(config, name)) for name in SECTIONS),
                    *(format_section("[nodes]", node) for node in config.nodes)])[1:]


def format_sample_config() -> str:
    """config.toml.example: every key at its default."""
    example = NodeConfig("n1", "10.0.0.5", "gpuuser", 22, "me@gateway", "~/.ssh/id_ed25519")
    return "".join(["# nexus reads this file from ~/.nexus/config.toml (NEXUS_HOME moves it).\n",
                    "# Every key may be left out; these are the defaults.\n",
                    *(format_section(name, table) for name, table in SECTIONS.items()),
                    "\n# Other machines with GPUs, by OpenSSH, whose own configuration, agent and known_hosts apply.  "
                    "Those of\n# `nexus node add` need no lines here.", format_section("[nodes]", example, "# ")])


# ==== 4. MODEL ==== Job, Gpu, State; what may become of a job; changes and what they do to State
# A Job is a value: a change makes a new Job.  State is all that state.json holds, plus indexes of the jobs, so that the
# cost of a start does not grow with the jobs that wait.  Everything else is found by a loop over the jobs, which are
# 10,000 at most.  STORE owns the one State: it changes a copy by put(), which then takes its place.

PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = STATUSES = ("pending", "running", "completed", "failed", "cancelled")
FINAL = (COMPLETED, FAILED, CANCELLED)
STATUS = one_of(*STATUSES)
SUBMITTED = "submitted"             # to Slurm, in whose queue it waits; it never leaves nexus: see Job.shown_status
LIVE = (SUBMITTED, RUNNING)         # those of a job with a present attempt
TRANSITIONS = {                     # from: to.  A status absent on the left is final.
    PENDING: {RUNNING, SUBMITTED, CANCELLED},
    SUBMITTED: {RUNNING, CANCELLED, PENDING},              # only a running job can fail
    RUNNING: {COMPLETED, FAILED, CANCELLED, PENDING},      # PENDING: another attempt
}
PRIORITIES = {"high": 0, "normal": 1, "low": 2}

# The fields that a submission may have.  MAX_ARGUMENT_BYTES is the longest argument that Linux takes.
COMMAND = matching(
    rf"^(?!\s*$){NO_NUL}*$", f"a text that is not empty, in valid Unicode without NUL and of at most "
    f"{MAX_ARGUMENT_BYTES} bytes (put it into a script)", examples=["python train.py"],
    **{"x-max-bytes": MAX_ARGUMENT_BYTES})
VARIABLES: Schema = {
    "type": "object", "writeOnly": True, "maxProperties": 10000,
    "propertyNames": matching("^[^=\\x00]+$", "the name of a variable", **{"x-max-bytes": 1024, "writeOnly": True}),
    "additionalProperties": {**TEXT, "x-max-bytes": MAX_ARGUMENT_BYTES - 1025, "writeOnly": True},
    "examples": [{"WANDB_MODE": "disabled"}]}
CONDA = {**LINE, "pattern": "^[^-\\sC][^C]*$".replace("C", CONTROL[1:-1]),
         "title": "a conda environment's name or path"}
GPU_ID = {"anyOf": [integer_in(0, 9999), matching(f"^{SLICE_PLACE}$", "a MIG slice like 0.1")]}
GPU_COUNT = {**number_in(0, MAX_GPUS), "x-decimals": 2, "examples": [0.5],
             "title": f"a number from 0 to {MAX_GPUS} with at most two decimals"}
PRIORITY = integer_in(-1000000, 1000000)
PRIORITY_TEXT = matching("^([Hh][Ii][Gg][Hh]|[Nn][Oo][Rr][Mm][Aa][Ll]|[Ll][Oo][Ww]|-?(0?[0-9]{1,6}|1000000))$",
                        "high, normal, low or a number")
ID_OR_NAME = f"[^\\s,{CONTROL[1:-1]}]+"
OTHERS: Mapping[str, Any] = {               # of a field with other jobs: `abc,abd`, or lines as `nexus add` prints them
    "text": matching(rf"^\s*{ID_OR_NAME}((\s*,\s*|\s+){ID_OR_NAME})*\s*$", "jobs' ids or names, like abc,abd",
                     examples=["abc,abd"]),
    "like": "abc,abd", "parse": lambda text: text.replace(",", " ").split(),
    "convert": lambda ids: tuple(dict.fromkeys(ids))}
AMOUNT = "[0-9]{1,9}(\\.[0-9]{1,9})?"
DURATION = f"( *{AMOUNT} ?[smhdw])+ *|([0-9]{{1,4}}-)?[0-9]{{1,6}}:[0-5][0-9]:[0-5][0-9]"
DURATION_TEXT = matching(f"^({DURATION}|0)$", "a time with its unit", examples=["90s", "2h", "1h30m", "1:30:00"])
DAY, CLOCK = "[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", "([01]?[0-9]|2[0-3])(:[0-5][0-9]){1,2}"
BEGIN_TEXT = matching(f"^(now|\\+({DURATION})|({DAY}[ T])?{CLOCK}{ZONE}?)$",
                     "a time", examples=["22:00", "+2h", "2024-10-24 22:00", "2024-10-24T15:30:15Z"])
SIZE_TEXT = matching(f"^{AMOUNT} ?[MGTmgt](i?[Bb])?$", "an amount of memory with its unit", examples=["10G", "500M"])


# What one request may cost is bounded: it holds up all others while it changes State.
MAX_JOBS = 100000               # jobs that one request adds or names
MAX_PARENTS = 10000             # jobs after which one job may start
MAX_LINKS = 1000000             # from pending jobs to those after which they start


def round_gpus(gpus: float) -> float:
    return int(gpus) if gpus == int(gpus) else round(gpus, 2)


def name_gpu(index: int, mig_slice: int | None) -> str:
    return str(index) if mig_slice is None else f"{index}.{mig_slice}"


class Attempt(Value):
    """One start of a job: where it ran, and how it ended."""
    number: Count = 0                           # of the job's starts; job.sh claims it; if it never ran, the last one's
    node: str = ""                              # where it was started; "" = on this machine
    gpu_indices: tuple[Index, ...] = optional((), list_of(INTEGER), "its GPUs, as the driver counts", "public")
    gpu_uuids: tuple[str, ...] = optional((), list_of(STRING), "and by UUID", "public")
    gpu_slice: Index | None = None              # its one GPU is this MIG slice of the card; None: it has whole cards
    slurm_key: str | None = None                # stands in the comment of Slurm's job
    slurm_id: str | None = optional(None, STRING, "Slurm's own, like 123; null while it is submitted")
    slurm_node: str | None = None               # where Slurm runs it, in Slurm's form: n[1-2]
    nonce: str | None = None                    # marks its processes, in their environment
    boot_id: str | None = None                  # the boot in which it was started
    session: Session | None = optional(None, STRING, "screen's PID.NAME; null without screen")
    pid: Pid | None = optional(None, INTEGER, "of its job.sh")
    pid_started: Ticks | None = None            # that process's start time
    notes: tuple[Words, ...] = optional((), list_of(STRING), "what could not be given as asked, what was ended with it")
    started_at: Epoch | None = optional(
        None, TIME, "when its start was decided; on a node or in Slurm, when it began; null: it never ran", "public")
    stop_cause: str | None = None               # why it is being stopped; None: it is not
    stop_by: str | None = None                  # who asked for that
    stop_signal: str | None = None              # the first signal for its processes; None: TERM
    stop_line: Words | None = None              # its cause_line once it has ended
    processes_left: Count | None = optional(
        None, INTEGER, "processes that go on, as its command has ended; null: it has not", "public")
    finished_at: Epoch | None = optional(None, TIME, "null: it goes on", "public")
    runtime_seconds: Span | None = None         # by a monotonic clock
    exit_code: ExitCode | None = optional(None, INTEGER, "null where there is none")
    signal: Signal | None = optional(None, INTEGER, "that ended it, if one did")
    cause: str | None = optional(None, STRING, "why it did not complete, in a word")
    cause_line: Words | None = optional(None, STRING, "the line that says so")
    last_line: Words | None = optional(None, STRING, "the last line that it printed, or what its progress bar shows")
    peak_rss_mib: Amount | None = optional(
        None, FLOAT, "host memory of its processes together, shared pages counted once; null without psutil")
    cpu_seconds: Amount | None = optional(None, FLOAT, "CPU time of its processes")
    peak_gpu_mem_mib: Amount | None = optional(None, FLOAT, "GPU memory of its processes on all its GPUs together")
    mean_gpu_util: Amount | None = optional(None, FLOAT, "percent, of its GPUs while it ran")
    is_idle_told: bool = False                  # its GPUs did nothing for idle_minutes, and on_idle was called
    log_start: tuple[FileSize, FileSize] = (0, 0)       # bytes of stdout.log and stderr.log before its start

    @property
    def gpu_places(self) -> tuple[str, ...]:
        """Its GPUs by name, without their node: `0`, or `0.1` for slice 1 of card 0."""
        return tuple(name_gpu(index, self.gpu_slice) for index in self.gpu_indices)


ATTEMPT_FIELDS = frozenset(Attempt.NAMES) - {"number"}


class Usage(Value):
    """What an attempt uses, by the names that its Attempt has for it."""
    peak_rss_mib: Amount | None = None
    cpu_seconds: Amount | None = None
    peak_gpu_mem_mib: Amount | None = None
    mean_gpu_util: Amount | None = None


class Limits(Value):
    """What ends a job: of the job itself and of the configuration, as find_limits() makes it.  It goes with the job."""
    timeout_seconds: Span = 0.0                 # its time limit; 0: none
    timeout_name: Words = ""                    # what sets that, for people
    warn: str | None = None                     # Job.warn
    max_memory_gb: Amount = 0.0                 # host memory of its processes together; 0: any
    kill_grace_seconds: Span = 10.0             # from the first signal to SIGKILL
    idle_kill_seconds: Span = 0.0               # how long its GPUs may do nothing; 0: any time


class Use(Value):
    """What a running job has taken so far of what Limits bound."""
    runtime_s: float | None = None              # None: not known
    memory_mib: float | None = None
    idle_s: float = 0.0                         # for how long all its GPUs have done nothing


class Job(Value):
    id: str = field(JOB_ID, "its name among all jobs kept", "public")
    command: str = field(
        COMMAND, "a shell command, as you would type it", "asked kept form", like="python train.py")
    cwd: str = field(
        PATH, "where it runs (default: here; over the network the home directory)", "asked kept", flag="--cwd DIR")
    user: str = field(TEXT, "whose it is", "kept public")
    created_at: Epoch = field(TIME, "when it was submitted", "public")      # UTC epoch seconds, like every _at
    queue_key: tuple[float, ...]                # (rank, priority, place), lower first; its place is at first its number
    environment: str = field(TEXT, "its environment's key in State.environments, a digest", "kept hidden")
    number: int = 0                             # its sequence number: the first job ever has 1
    gpus: float = optional(
        1, {**GPU_COUNT, "title": f"{GPU_COUNT['title']} (to choose GPUs: --gpu-ids)"},
        "how many GPUs; 0.5 shares one, 0 takes a CPU slot (default: [jobs] default_gpus)",
        "asked kept public form", flag="--gpus N", convert=round_gpus)
    gpu_ids: tuple[Any, ...] | None = optional(
        None, list_of(GPU_ID, 1, MAX_GPUS), "the only GPUs it may have, by index or MIG slice", "asked kept public",
        flag="--gpu-ids LIST", like="0-3,5 or 0.1", text=matching(r"^[0-9][0-9\s,.-]*$", "a list like 0-3,5"),
        parse=parse_indices, convert=sort_gpu_ids)
    only_node: str | None = optional(
        None, TEXT, "the only machine it may run on; in state.json \"\" is this one", "kept")
    excluded_nodes: tuple[tuple[str, str], ...] = ()     # (node, why it cannot run the job)
    gpu_mem_mib: int | None = optional(
        None, {**integer_in(1, 100000000), "title": "a whole number of MiB from 1 to 100000000"},
        "memory that must be free on each of its GPUs", "asked kept public",
        flag="--gpu-mem SIZE", like="10G", text=SIZE_TEXT, parse=parse_memory)
    gpu_type: str | None = optional(
        None, LINE, "full: no MIG slices; else only GPUs with this in their name", "asked kept public",
        flag="--gpu-type NAME", like="A100 or 1g.10gb")
    priority: int = optional(
        1, PRIORITY, "high, normal, low or a number; lower runs first (default: normal = 1)", "asked public",
        flag="--priority P", text=PRIORITY_TEXT,
        parse=lambda text: PRIORITIES.get(text.lower(), guess_number(text)))
    name: str | None = optional(
        None, LINE, "a name, shown before its command", "asked kept form", flag="--name NAME")
    group: str | None = optional(
        None, LINE, "jobs to be waited for, paused, killed or retried together", "asked kept form", flag="--group G")
    after: tuple[str, ...] = optional(
        (), list_of(LINE, most=MAX_PARENTS), "start when these have completed; cancelled when one has not",
        "asked kept", flag="--after ID,...", **OTHERS)
    after_any: tuple[str, ...] = optional(
        (), list_of(LINE, most=MAX_PARENTS), "start when these have ended, however that was", "asked kept",
        flag="--after-any ID,...", **OTHERS)
    pending_dependencies: tuple[str, ...] = ()                 # of `after` and `after_any`, those not ended yet
    after_process: tuple[int, int, str] | None = None   # (pid, start time, boot id) after whose end it starts
    key: str | None = None                      # of its submission, in case the client sends it again
    env_digest: str | None = optional(
        None, TEXT, "digest of its `env`: with command, directory and conda what `unique` compares", "kept")
    conda: str | None = optional(None, CONDA, "activate this conda environment", "asked kept", flag="--conda ENV")
    snapshot: str | None = optional(
        None, matching("^[0-9a-f]{40,64}$", "a commit"), "the commit in whose checkout it runs", "asked kept")
    snapshot_repo: str | None = optional(None, PATH, "the work tree of snapshot", "asked kept hidden")
    # a file of Layout.code_folder; its cwd is a folder of its own
    code: str | None = optional(None, TEXT, "the script that came with it", "kept hidden")
    variables: tuple[tuple[str, str], ...] = optional(
        (), {"type": "object", "additionalProperties": STRING}, "its own over those of `environment`, which many share",
        "kept hidden")
    labels: tuple[tuple[str, str], ...] = optional(
        (), {"type": "object", "additionalProperties": TEXT}, "what its submitter calls it by, for whoever asks",
        "kept")
    cuda_arg: bool = optional(
        False, FLAG, "set --cuda in the command to the GPUs' numbers, which are physical then", "asked kept",
        flag="--cuda-arg")
    tty: bool = optional(
        False, FLAG, "its stdout is a terminal: progress bars and colours as when run by hand", "asked kept",
        flag="--tty")
    retries: int = optional(0, integer_in(0, 1000), "further attempts when it fails", "asked kept", flag="--retries N")
    timeout_seconds: float | None = optional(
        None, SECONDS, "stop it after so long; 0 = no time limit", "asked kept public form",
        flag="--timeout TIME", like="90s, 30m, 2h", text=DURATION_TEXT, parse=parse_duration)
    expected_time: float | None = optional(
        None, number_in(0.001, 31536000),
        "how long it should take: estimates get better, and it may use reserved GPUs; "
        "stopped at twice that", "asked kept public",
        flag="--expect TIME", like="30m", text=DURATION_TEXT, parse=parse_duration)
    warn: str | None = optional(
        None, matching(f"^(USR1|USR2|INT|TERM|HUP|QUIT)@({DURATION})$", "a signal and a time, like USR1@2m"),
        "a signal for its programs that handle it, so long before its time limit", "asked kept",
        flag="--warn SIGNAL@TIME", like="USR1@2m")
    preemptible: bool = optional(
        False, FLAG, "may be stopped and queued again so that a job without this can start", "asked kept public",
        flag="--preemptible")
    umask: int | None = optional(None, integer_in(0, 0o777), "its umask", "asked kept hidden")
    status: str = PENDING
    status_history: tuple[tuple[str, Epoch], ...] = ()
    attempts: tuple[Attempt, ...] = ()          # the last one is `current`
    retried_as: str | None = optional(None, JOB_ID, "the job that was added to do it again")
    is_hook_due: bool = False                   # it has ended, and on_finish has yet to run for it
    begin_at: float | None = optional(None, TIME, "it was asked not to start before")
    is_held: bool = optional(False, FLAG, "it does not start before it is resumed: nexus resume ID")
    retry_at: Epoch | None = optional(None, TIME, "it does not start again before")
    exclusive: bool = False                      # after a CUDA out-of-memory error: it gets whole GPUs, the emptiest
    log_base: tuple[FileSize, FileSize] = (0, 0)        # bytes of stdout.log and stderr.log of former attempts
    log_dir: str | None = optional(None, STRING, "the folder of its logs")
    WRITTEN = ("status",)                       # a job whose status is lost must not look like a pending one

    @property
    def shown_status(self) -> str:
        """One of STATUSES, for whoever asks: a job that waits in Slurm's queue is pending like all that wait."""
        return PENDING if self.status == SUBMITTED else self.status

    @property
    def current(self) -> Attempt:
        """The present or last attempt; an empty one while it is pending."""
        return self.attempts[-1] if self.attempts and self.status != PENDING else NO_ATTEMPT

    @property
    def attempt(self) -> int:
        """The number of its last start; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0


NO_ATTEMPT = Attempt()
# The causes of attempts that ended without the job's fault: not failures
REQUEUED, PREEMPTED = "requeued", "preempted"


def begin_attempt(job: Job, **facts: Any) -> Job:
    """The job with one more attempt, with a new number.  It replaces a requeued attempt: those would pile up."""
    earlier = job.attempts
    if earlier and earlier[-1].cause == REQUEUED and earlier[-1].pid is None:
        earlier = earlier[:-1]
    return replace(job, attempts=(*earlier, Attempt(**{"number": job.attempt + 1, "log_start": job.log_base, **facts})))


class Group(Value):
    name: str
    limit: int = 0                  # how many of them run at once; 0 = as many as fit
    hold: str | None = None         # why none of them starts; None: they may
    failures: int = 0               # how many jobs failed soon, as long as all did; -1: one did not
    is_paused: bool = False         # a user holds it, until it is resumed; else the hold ends with its pending jobs


class UsageSums(Value):
    """What jobs used in some time, and how many of them ended in it."""
    gpu_seconds: Amount = 0.0
    cpu_job_seconds: Amount = 0.0               # how long jobs without a GPU ran
    completed: Count = 0
    failed: Count = 0
    cancelled: Count = 0

    def __add__(self, other: UsageSums) -> UsageSums:
        return UsageSums(*(round(getattr(self, name) + getattr(other, name), 3) for name in self.NAMES))


class PastUsage(Value):
    """What those jobs of a user that are forgotten used in a local day, or in a month."""
    period: str                                 # 2024-10-24, or 2024-10
    user: str
    groups: Mapping[str, UsageSums] = {}        # by group; "": of no group

    @property
    def key(self) -> str:
        return f"{self.period} {self.user}"


class Token(Value):
    """Another user's access.  Only a digest of the token is stored."""
    user: str
    sha256: str
    created_at: float
    expires_at: float | None = None     # None = never

    def is_good(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at


class GpuProcess(Value):
    pid: Pid = field(INTEGER, "its pid")
    memory_mib: Amount | None = field(or_null(FLOAT), "the GPU memory it has")
    job_id: JobId | None = optional(None, JOB_ID, "whose of ours it is; null: somebody else's")
    user: Name | None = optional(None, STRING, "whose it is")
    name: Name | None = optional(None, STRING, "its program")


class Gpu(Value):
    """One GPU as last observed: a card, or a MIG slice of one.  None where the driver does not say."""
    index: Index = field(INTEGER, "its card's index, as its driver counts")
    uuid: Uuid = field(STRING, "its UUID, as its driver says; on a node n1/UUID")
    name: Name = field(STRING, "its model")
    memory_total_mib: Amount | None = optional(None, FLOAT, "its memory")
    memory_used_mib: Amount | None = optional(None, FLOAT, "its memory in use, by whomever")
    utilization: Amount | None = optional(None, FLOAT, "percent, now")
    temperature: Amount | None = optional(None, FLOAT, "degrees Celsius")
    power_watts: Amount | None = optional(None, FLOAT, "the power it draws")
    power_limit_watts: Amount | None = optional(None, FLOAT, "the power it may draw")
    is_mig: bool = optional(False, FLAG, "its card is in MIG mode: cut into slices, or into nothing yet")
    slice: Index | None = optional(None, INTEGER, "its number among the MIG slices of its card; null: a card")
    profile: Name | None = optional(None, STRING, "the size of the slice, like 1g.10gb")
    fault: Words | None = optional(None, STRING, "why it cannot be used, as its driver says")
    is_withheld: bool = False                   # the service's CUDA_VISIBLE_DEVICES does not name it
    compute_mode: str | None = None             # PROHIBITED, or one of EXCLUSIVE; None: Default, or it is unknown
    processes: tuple[GpuProcess, ...] = ()
    node: str = ""                              # the machine it is in; "" = this one
    lease_holder: Name | None = None            # the user whose nexus holds its lease
    is_paused: bool = optional(False, FLAG, "it gets no new job")
    pause_reason: str | None = None             # why nexus itself paused it
    utilization_mean: Amount | None = optional(None, FLOAT, "percent, over the last hour")
    utilization_peak: Amount | None = optional(None, FLOAT, "percent, over the last hour")

    @property
    def place(self) -> str:
        """Its name in commands and paths: `0`, `0.1` for slice 1 of card 0, or `n1:0` on another machine."""
        return f"{self.node}:{self.local_place}" if self.node else self.local_place

    @property
    def local_place(self) -> str:
        return name_gpu(self.index, self.slice)

    def is_type(self, wanted: str | None) -> bool:
        """Whether it is what --gpu-type asks for."""
        if wanted is None:
            return True
        return not self.is_mig if wanted.lower() == "full" else wanted.lower() in self.name.lower()

    def is_named(self, places: Iterable[object]) -> bool:
        """Whether it is among these GPUs of its machine, like 0 or "0.1".  A card's number means all its slices."""
        return not {self.index, str(self.index), self.local_place}.isdisjoint(places)


class KnownNode(Value):
    """Another machine that was added."""
    config: NodeConfig
    is_leaving: bool = False        # it gets no more jobs, and is forgotten after its last job
    was_configured: bool = False    # it was in config.toml


class Put(Value):
    """A change: the new row of a table of State under a key; None removes it."""
    table: str
    key: str
    value: Any


if TYPE_CHECKING:
    Changes = Generator[Put, None, Any]         # Store.update() makes each change as it is yielded
    QueuePlace = tuple[Any, ...]                # (preemptible, *queue_key, id, GPUs it will use) of a pending job


QueueItem = tuple[tuple[float, ...], str]           # (queue_key, id) of a pending job
EndedItem = tuple[float, int, str]                  # (when it ended, number, id) of a finished job
JobClass = tuple[object, ...]                       # of find_class()


class State:
    """All that state.json holds, tables and facts, plus indexes of the jobs.  Only a copy is changed, by put()."""

    # The facts with their defaults; they are a table too
    host: str = ""                                          # whose service wrote state.json last
    service_id: str = ""
    paused: bool = False
    paused_gpus: tuple[Any, ...] = ()                       # uuids; what another program wrote, until the next start
    damage: str = ""                                        # what a start did not find whole, and so paused the queue
    pause_reasons: tuple[tuple[str, str], ...] = ()         # (uuid, why nexus itself paused it)
    has_hook: bool = False                                  # on_finish is configured
    next_number: int = 1                                    # the next job's sequence number

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.environments: dict[str, Mapping[str, str]] = {}
        self.groups: dict[str, Group] = {}                  # groups with a limit, a hold or failures
        self.seen: dict[str, int] = {}                      # rows of the jobs file: {digest: how many times}
        self.nodes: dict[str, KnownNode] = {}
        self.usage: dict[str, PastUsage] = {}               # of jobs that are forgotten, by PastUsage.key
        self.seq = 0                                        # of the last transaction that changed it
        self.running: dict[str, Job] = {}
        self.pending: dict[str, Job] = {}                   # those that are shown so
        self.live: dict[str, Job] = {}
        # INDEXES, each {key: its items, ascending}
        self.ready: dict[JobClass, list[QueueItem]] = {}    # pending jobs by find_class()
        self.dependents: dict[str, list[str]] = {}          # {id: the pending jobs that depend on that job}
        self.named: dict[tuple[str | None, str], list[tuple[int, str]]] = {}    # {(user or None for all, name): jobs}
        self.members: dict[str, list[tuple[str, str]]] = {}                     # {group: (user, id) of its jobs}
        self.queued: dict[str, list[QueuePlace]] = {}       # {user: their pending jobs}
        self.queued_in: dict[tuple[str, str], list[QueuePlace]] = {}            # {(user, group or ""): pending jobs}
        self.prioritized: dict[str, list[str]] = {}         # {name of a priority: pending jobs}
        self.ended: dict[str, list[EndedItem]] = {}         # {status: finished jobs}
        self.ended_in: dict[tuple[str, str], list[EndedItem]] = {}              # {(user, group or ""): finished jobs}
        self.unshared: set[tuple[str, Any]] = set()         # (index, key) of the lists that no other State has
        self.last_starts: dict[str, float] = {}             # {user: when a job of theirs was last started}

    def copy(self) -> State:
        """Another State, whose changes do not show in this one."""
        other = State()
        for name, fact in vars(self).items():
            setattr(other, name, fact.copy() if isinstance(fact, dict) else fact)
        self.unshared, other.unshared = set(), set()        # a list is copied when one of them changes it
        return other

    def put(self, change: Put) -> None:
        """Raises: KeyError, for a table that there is not."""
        table = vars(self) if change.table == "facts" else vars(self)[change.table]
        old = table.get(change.key)
        if change.value is None:
            table.pop(change.key, None)
        else:
            table[change.key] = change.value
        if table is self.jobs:
            self.update_indexes(old, change.value)

    def update_indexes(self, old: Job | None, new: Job | None) -> None:
        indexes: Sequence[tuple[dict[str, Job], Callable[[Job], bool]]] = (
            (self.running, lambda job: job.status == RUNNING), (self.pending, lambda job: job.shown_status == PENDING),
            (self.live, lambda job: job.status in LIVE))
        for index, belongs in indexes:
            if new and belongs(new):
                index[new.id] = new
            elif old:
                index.pop(old.id, None)
        for name, list_entries in INDEXES.items():
            before, after = list_entries(old) if old else [], list_entries(new) if new else []
            if before != after:
                both = {*before}.intersection(after) if before and after else ()
                for key, item in before:
                    if (key, item) not in both:
                        items = self.own_items(name, key)
                        del items[bisect.bisect_left(items, item)]
                        if not items:
                            del vars(self)[name][key]
                for key, item in after:
                    if (key, item) not in both:
                        bisect.insort(self.own_items(name, key), item)
        if new and new.attempts:
            self.last_starts[new.user] = max(self.last_starts.get(new.user, 0.0), new.current.started_at or 0.0)

    def own_items(self, name: str, key: Any) -> list[Any]:
        """The items of an index, to be changed."""
        index: dict[Any, list[Any]] = vars(self)[name]
        if key not in index or (name, key) not in self.unshared:
            index[key] = index.get(key, []).copy()
            self.unshared.add((name, key))
        return index[key]

    def list_dependents(self, job_id: str) -> list[Job]:
        """The pending jobs that depend on a job."""
        return [self.jobs[child_id] for child_id in self.dependents.get(job_id, ())]


FACTS: Mapping[str, Any] = {name: getattr(State, name) for name in State.__annotations__}       # and their defaults
EDITABLE = ("paused", "paused_gpus")        # the facts that other programs may change in state.json
INDEXES: Mapping[str, Callable[[Job], list[tuple[Any, Any]]]] = {       # {field of State: (key, item)s of a job in it}
    "ready": lambda job: [(one, (job.queue_key, job.id))] if (one := find_class(job)) else [],
    "dependents": lambda job: [(one, job.id) for one in job.pending_dependencies] if job.status == PENDING else [],
    "named": lambda job: [((user, job.name), (job.number, job.id)) for user in (None, job.user)] if job.name else [],
    "members": lambda job: [(job.group, (job.user, job.id))] if job.group else [],
    "queued": lambda job: [(job.user, find_queue_place(job))] if job.shown_status == PENDING else [],
    "queued_in": lambda job: (
        [((job.user, job.group or ""), find_queue_place(job))] if job.shown_status == PENDING else []),
    "prioritized": lambda job: [(name_priority(job.priority), job.id)] if job.shown_status == PENDING else [],
    "ended": lambda job: [(job.status, find_end_item(job))] if job.status in FINAL else [],
    "ended_in": lambda job: [((job.user, job.group or ""), find_end_item(job))] if job.status in FINAL else [],
}


def pause_queue(is_paused: bool) -> tuple[Put, ...]:
    """The changes that pause or resume the whole queue: whoever resumes it knows what was damaged."""
    return Put("facts", "paused", is_paused), *(() if is_paused else [Put("facts", "damage", "")])


def needs_folder(job: Job) -> bool:
    """Whether its directory must be there before it starts: a snapshot, or code that was sent, brings its own."""
    return not job.snapshot and not job.code


def request_class(job: Job) -> tuple[Any, ...]:
    """All of a job that decides which GPUs it can have: where one job does not fit, others of its class do not."""
    expected = -1 if job.expected_time is None else int(job.expected_time).bit_length()     # up to which power of two
    return (job.gpus, job.gpu_ids, job.gpu_mem_mib, job.gpu_type, job.exclusive, job.cuda_arg, expected, job.only_node,
            job.excluded_nodes, job.cwd if needs_folder(job) else None)


def find_class(job: Job) -> JobClass | None:
    """Where one job of a class cannot start, those behind it cannot.  None: it waits for something else."""
    if job.status != PENDING or job.is_held or job.pending_dependencies or job.after_process:
        return None
    return job.user, job.group, job.preemptible, request_class(job)


def find_use(job: Job) -> float:
    """What a job counts among its user's GPUs in use: users take turns on CPU slots too."""
    return job.gpus or 0.01


def find_queue_place(job: Job) -> QueuePlace:
    return job.preemptible, *job.queue_key, job.id, find_use(job)


def find_end_item(job: Job) -> EndedItem:
    return job.status_history[-1][1] if job.status_history else 0.0, job.number, job.id


def name_priority(priority: int) -> str:
    normal = PRIORITIES["normal"]
    return "high" if priority < normal else "low" if priority > normal else "normal"


def list_shares(job: Job) -> list[int]:
    """A job's share of each of its GPUs, in hundredths, in the order of gpu_indices: `[100, 50]` for 1.5."""
    whole, part = divmod(round(job.gpus * 100), 100)
    return [100] * whole + ([100 if job.exclusive else part] if part else [])


def add_job(job: Job) -> tuple[Put, ...]:
    """The changes that add a new job."""
    return Put("jobs", job.id, job), Put("facts", "next_number", job.number + 1)


def with_facts(job: Job, **facts: Any) -> Job:
    """The job with these fields of it, or of its last attempt."""
    learned = {name: facts.pop(name) for name in [name for name in facts if name in ATTEMPT_FIELDS]}
    if learned:
        facts["attempts"] = (*job.attempts[:-1], replace(job.attempts[-1], **learned))
    return replace(job, **facts)


def change_job(job: Job, **facts: Any) -> Put:
    """The change of these fields of a job, or of its last attempt."""
    return Put("jobs", job.id, with_facts(job, **facts))


def change_attempt(job: Job, **facts: Any) -> Put:
    """The change of these fields of a job's last attempt, and of nothing else.  Raises: TypeError, for another name."""
    return change_job(job, attempts=(*job.attempts[:-1], replace(job.attempts[-1], **facts)))


MAX_NOTES = 20                  # of an attempt: the last ones


def add_notes(known: tuple[str, ...], told: Sequence[str]) -> tuple[str, ...]:
    """The notes of an attempt, with those that are new; `known` itself when none is, however often they are told."""
    latest = list(dict.fromkeys(map(cut_words, told[-MAX_NOTES:])))
    new = [note for note in latest if note not in known]
    if len(known) + len(new) <= MAX_NOTES or not new:
        return (*known, *new)
    return (*(note for note in known if note not in latest), *latest)[-MAX_NOTES:]


def change_status(job: Job, status: str, now: float, **facts: Any) -> Put:
    """The change of a job to `status`, with further fields.  Raises: conflict."""
    if status not in TRANSITIONS.get(job.status, ()):
        raise NexusError("conflict", f"job {job.id} is {job.shown_status} and cannot become {status}",
                         hint=f"see what it did: nexus show {job.id}")
    history = job.status_history if status == SUBMITTED else (*job.status_history, (status, now))
    return change_job(job, status=status, status_history=history, **facts)


def end_job(state: State, job: Job, status: str, now: float, **facts: Any) -> Changes:
    """The changes that end a job, and that release or cancel the jobs that depend on it.  Raises: conflict."""
    ended = yield from end_branch(state, job, status, now, **facts)
    yield from release_dependents(state, ended)


def end_branch(state: State, job: Job, status: str, now: float, **facts: Any) -> Changes:
    """The changes that end a job, and that cancel the jobs that can never start now; it returns the ids of all those.

    release_dependents() follows, once for all jobs that end together.  Raises: conflict.
    """
    yield end_one(job, status, now, is_hook_due=state.has_hook, **facts)
    ended = [job.id]
    for job_id in ended:                        # it grows: those that come after them, and so on
        parent = state.jobs[job_id]
        for child in state.list_dependents(job_id) if parent.status != COMPLETED else ():
            if job_id in child.after:
                yield end_one(child, CANCELLED, now, cause="dependency", cause_line=describe_parent(parent),
                              is_hook_due=state.has_hook)
                ended.append(child.id)
    return ended


def release_dependents(state: State, ended: Sequence[str]) -> Changes:
    """The changes of what waited for jobs that have ended: of jobs that depend on them, and of groups held so long."""
    released: dict[str, set[str]] = {}
    for job_id in ended:
        for child in state.list_dependents(job_id):
            released.setdefault(child.id, set()).add(job_id)
    for child_id, gone in released.items():     # one change for all: a job may come after thousands
        child = state.jobs[child_id]
        others = tuple(other for other in child.pending_dependencies if other not in gone)
        yield change_job(child, pending_dependencies=others)
    for name in dict.fromkeys(state.jobs[job_id].group or "" for job_id in ended):
        group = state.groups.get(name)
        if group and group.hold and not group.is_paused and not has_pending(state, name):
            yield Put("groups", name, replace(group, hold=None))


def end_one(job: Job, status: str, now: float, **facts: Any) -> Put:
    """The change that ends a job.  A pending job gets an attempt that never ran.  Raises: conflict."""
    waiting = job if job.current.number else begin_attempt(job, number=job.attempt)
    return change_status(waiting, status, now, **{"finished_at": now, **facts})


def has_pending(state: State, group: str) -> bool:
    return any(job_id in state.pending for _, job_id in state.members.get(group, ()))


def describe_hold(group: Group) -> str:
    return f"group {group.name} is held: {group.hold}"


def list_holds(state: State) -> dict[str, str]:
    """{group: why none of its jobs starts} of the groups that are held."""
    return {one.name: describe_hold(one) for one in state.groups.values() if one.hold}


def requeue(state: State, job: Job, why: str, now: float, has_run: bool = False, **facts: Any) -> Changes:
    """The changes that requeue a job whose attempt ended without its fault, at its former place."""
    facts["processes_left"] = None
    if not has_run:
        facts["started_at"] = None
    if job.current.stop_cause not in (None, PREEMPTED):     # do not start it again only to stop it
        yield from end_job(state, job, CANCELLED, now, cause=job.current.stop_cause, **facts)
        return
    history = job.status_history
    if job.status == RUNNING:                   # what has not run goes on waiting since it first did
        history = (*history, (PENDING, now)) if has_run else history[:-1]
    yield change_job(job, **facts, status=PENDING, status_history=history, finished_at=now, cause=REQUEUED,
                     cause_line=why)


def list_finished(state: State) -> list[Job]:
    """All finished jobs, in the order of their ends."""
    return [state.jobs[job_id] for _, _, job_id in sorted(item for items in state.ended.values() for item in items)]


def list_jobs(state: State, statuses: Container[str]) -> list[Job]:
    """The jobs of these statuses: finished by end, running by start, pending in the order of their expected start."""
    return [*(job for job in list_finished(state) if job.status in statuses),
            *(state.running.values() if RUNNING in statuses else ()),
            *(list_pending(state) if PENDING in statuses else ())]


def choose_trimmed(state: State, limit: int) -> list[Job]:
    """Finished jobs to forget now.  Of each user, the last `limit` that ran stay, and as many that never ran."""
    if len(state.jobs) - len(state.running) - len(state.pending) <= limit:
        return []                               # as it is nearly always: this is asked each second
    kept: dict[tuple[str, bool], int] = {}
    trimmed = []
    for job in reversed(list_finished(state)):
        key = job.user, any(attempt.started_at is not None for attempt in job.attempts)
        kept[key] = kept.get(key, 0) + 1
        if kept[key] > limit:
            trimmed.append(job)
    return trimmed[::-1]            # the oldest first


# A job that is forgotten leaves what it used: sums by user, group and local day, after USAGE_DAYS by month.  Usage is
# that of the jobs kept and these sums together.  Days are texts like 2024-10-24, whose order is that of time.

USAGE_DAYS = 60                 # so many days stay days
USAGE_MONTHS_DAYS = 365         # months that are older are dropped
MAX_USAGE_GROUPS = 20           # of a user in a period: further ones count as OTHER_GROUPS
OTHER_GROUPS = "(other)"


def shift_day(day: str, days: int) -> str:
    import datetime
    return (datetime.date.fromisoformat(day) + datetime.timedelta(days=days)).isoformat()


def find_day(at: float) -> str:
    """The local day of a time."""
    import datetime
    return datetime.date.fromtimestamp(at).isoformat()


def find_day_start(period: str) -> float:
    """When a local day, or the first one of a month, begins: at midnight, or at what the clock has in its place."""
    import datetime
    return datetime.datetime.fromisoformat(period if len(period) > 7 else f"{period}-01").timestamp()


def split_days(begin: float, end: float) -> Iterator[tuple[str, float]]:
    """(local day, seconds) of the days from `begin` to `end`; of the first one at least."""
    day = find_day(begin)
    while True:
        following = shift_day(day, 1)
        midnight = find_day_start(following)
        yield day, max(0.0, min(end, midnight) - begin)
        if midnight >= end:
            return
        begin, day = midnight, following


def list_runs(job: Job, now: float) -> list[tuple[float, float]]:
    """When its attempts that ran began and ended, or when it is now; nothing of it lies in the future."""
    runs = [(one.started_at, min(now, now if one.finished_at is None else one.finished_at))
            for one in job.attempts if one.started_at is not None]
    return [(min(begin, end), end) for begin, end in runs]


def measure_run(job: Job, seconds: float, status: str = "") -> UsageSums:
    """What a job uses in so many seconds.  `status`: its last one, if it ended then."""
    gpu_seconds, cpu_job_seconds = (seconds * job.gpus, 0.0) if job.gpus else (0.0, seconds)
    return UsageSums(gpu_seconds, cpu_job_seconds, *(int(status == one) for one in FINAL))


def split_usage(job: Job, now: float) -> dict[str, UsageSums]:
    """{local day: what a finished job used in it}.  The job counts in the day in which its last attempt ended."""
    day = ""
    oldest = now - (USAGE_MONTHS_DAYS + 32) * 86400         # of before then nothing is kept
    seconds_of = dict[str, float]()
    for begin, end in list_runs(job, now):
        for day, seconds in split_days(max(begin, oldest), end):
            seconds_of[day] = seconds_of.get(day, 0.0) + seconds
    return {one: measure_run(job, seconds, job.status if one == day else "") for one, seconds in seconds_of.items()}


def find_period(period: str, today: str) -> str:
    """Where the usage of a day or month is kept: as that day, in its month, or "" for nowhere."""
    if period >= shift_day(today, -USAGE_DAYS):
        return period
    return period[:7] if period[:7] >= shift_day(today, -USAGE_MONTHS_DAYS)[:7] else ""


def add_usage(state: State, period: str, user: str, group: str, more: UsageSums) -> Put:
    """The change that adds to the sums of a user's group in a period."""
    row = PastUsage(period, user)
    row = state.usage.get(row.key, row)
    is_new = group and group not in row.groups
    if is_new and len(row.groups.keys() - {"", OTHER_GROUPS}) >= MAX_USAGE_GROUPS:
        group = OTHER_GROUPS
    return Put("usage", row.key, replace(row, groups={**row.groups, group: row.groups.get(group, UsageSums()) + more}))


def forget_jobs(state: State, jobs: Iterable[Job], now: float) -> Changes:
    """The changes that remove finished jobs, and keep what they used."""
    today, used = find_day(now), dict[tuple[str, str, str], UsageSums]()
    for job in jobs:
        for day, sums in split_usage(job, now).items():
            key = day, job.user, job.group or ""
            used[key] = used[key] + sums if key in used else sums
        yield Put("jobs", job.id, None)
    for (day, user, group), sums in used.items():
        if period := find_period(day, today):
            yield add_usage(state, period, user, group, sums)


def age_usage(state: State, now: float) -> Changes:
    """The changes that make months of the days that are old, and drop the months that are."""
    today = find_day(now)
    for row in list(state.usage.values()):
        period = find_period(row.period, today)
        if period != row.period:
            yield Put("usage", row.key, None)
            for group, sums in row.groups.items() if period else ():
                yield add_usage(state, period, row.user, group, sums)


def list_usage(state: State, since: float, now: float) -> Iterator[tuple[str, str, int, UsageSums, float]]:
    """(user, group, jobs, their sums, since when) of what jobs used since then.

    It is earlier for jobs that are forgotten: of them a period counts as a whole.
    """
    for job in state.jobs.values():
        runs = list_runs(job, now)
        if runs and runs[-1][1] >= since:
            seconds = sum(max(0.0, end - max(begin, since)) for begin, end in runs)
            yield job.user, job.group or "", 1, measure_run(job, seconds, job.status), since
    first_day, oldest_day = find_day(since), shift_day(find_day(now), -USAGE_DAYS)
    for row in state.usage.values():
        is_day = len(row.period) > 7
        if row.period >= first_day if is_day else first_day < oldest_day and row.period >= first_day[:7]:
            begin = min(since, find_day_start(row.period))
            for group, sums in row.groups.items():
                yield row.user, group, sums.completed + sums.failed + sums.cancelled, sums, begin


def describe_parent(parent: Job) -> str:
    last = parent.current
    cause = f" ({last.cause}{f' {last.exit_code}' if last.cause == 'exit' else ''})" if last.cause else ""
    was = "was " if parent.status == CANCELLED else ""
    return f"it was to come after job {parent.id}, which {was}{parent.status}{cause}"


# The pending queue.  Ranks and priorities are strict.  Within a priority, the user with the fewest GPUs in use goes
# first, and among equals the user whose last start is longest ago: a thousand jobs of one do not hold up another's one.
# Of one user, the lowest queue_key goes first, which is the order of submission until a job is moved.

def count_use(state: State) -> dict[str, float]:
    """{user: GPUs in use}"""
    used: dict[str, float] = {}
    for job in state.live.values():
        add_use(used, job)
    return used


def add_use(used: dict[str, float], job: Job) -> None:
    used[job.user] = used.get(job.user, 0.0) + find_use(job)


def walk_queue(state: State, classes: dict[Any, list[QueueItem]],
               used: Mapping[str, float]) -> Iterator[tuple[Any, Job]]:
    """The jobs of the classes, each of one user, in the queue's order: (class, job).  Preemptible ones come last.

    Before the caller takes the next it adds a job that starts to `used`, and takes out a class that it is done with.
    """
    import heapq
    # {user: a heap of (is it preemptible, *queue_key, id, place in its class, class)}
    heads: dict[str, list[tuple[Any, ...]]] = {}
    for one, ((key, job_id), *_) in classes.items():
        job = state.jobs[job_id]
        heads.setdefault(job.user, []).append((job.preemptible, *key, job_id, 0, one))
    for heap in heads.values():
        heapq.heapify(heap)
    while heads:
        user = next(iter(heads)) if len(heads) == 1 else min(heads, key=lambda user: (
            heads[user][0][:3], used.get(user, 0.0), state.last_starts.get(user, 0.0), heads[user][0]))
        preemptible, *_, job_id, at, one = heads[user][0]
        yield one, state.jobs[job_id]
        items = classes.get(one, [])
        if at + 1 < len(items):
            key, job_id = items[at + 1]
            heapq.heapreplace(heads[user], (preemptible, *key, job_id, at + 1, one))
        else:
            heapq.heappop(heads[user])
            if not heads[user]:
                del heads[user]


def list_pending(state: State) -> list[Job]:
    """All pending jobs in the order of PendingQueue."""
    return list(PendingQueue(state).walk(state.queued))


class PendingQueue:
    """The order in which the pending jobs would start if all of them fit: a part of it is had without the rest.

    It is that of walk_queue().  The places of each user are an index.  Between users a place's turn decides: its band
    (preemptible, rank, priority), the GPUs that its user will have in use before it, and the user's last start.  The
    turns of one user ascend, so that the queue is the users' places merged.
    """

    def __init__(self, state: State) -> None:
        import itertools
        self.state, in_use = state, count_use(state)
        self.used: dict[str, list[float]] = {}              # {user: GPUs in use before each place of theirs}
        for user, places in state.queued.items() if len(state.queued) > 1 else ():
            self.used[user] = list(itertools.accumulate([place[-1] for place in places],
                                                        initial=in_use.get(user, 0.0)))

    def find_turn(self, user: str, place: QueuePlace) -> tuple[Any, ...]:
        at = bisect.bisect_left(self.state.queued[user], place)
        return place[:3], self.used[user][at], self.state.last_starts.get(user, 0.0), place

    def walk(self, places_of: Mapping[str, Iterable[QueuePlace]]) -> Iterator[Job]:
        """The jobs at these places, {user: ascending}, in the queue's order."""
        import heapq
        jobs = self.state.jobs
        if len(self.state.queued) <= 1:                     # there are no turns to take
            return (jobs[place[4]] for places in places_of.values() for place in places)

        def list_turns(user: str, places: Iterable[QueuePlace]) -> Iterator[tuple[Any, ...]]:
            return (self.find_turn(user, place) for place in places)

        return (jobs[place[4]] for *_, place in heapq.merge(*(list_turns(*pair) for pair in places_of.items())))

    def find_position(self, job: Job) -> int:
        """How many pending jobs are before a pending job."""
        place, position = find_queue_place(job), 0
        for user, places in self.state.queued.items():
            at = bisect.bisect_left(places, place)
            if user != job.user:
                band, in_use, *rest = self.find_turn(job.user, place)
                first, end = bisect.bisect_left(places, band), bisect.bisect_left(places, (*band, float("inf")))
                used = self.used[user]
                at = bisect.bisect_left(used, in_use, first, end)
                is_tie = at < end and used[at] == in_use
                at += is_tie and [self.state.last_starts.get(user, 0.0), places[at]] < rest
            position += at
        return position


def move_job(state: State, job: Job, is_first: bool) -> Put:
    """The change that puts a pending job before all others, whatever their priority, or behind them.

    It gets the priority of the others there.  Between users the GPUs in use decide who of the last ones is first.
    """
    others = [other.queue_key for other in state.pending.values() if other.id != job.id] or [job.queue_key]
    if is_first:
        rank, priority, _ = min(others)
        key = rank - 1, min(priority, job.priority), float(job.number)
    else:
        rank, priority, place = max(others)
        key = rank, priority, (place + state.next_number) / 2       # between the last of today and whoever comes next
    return change_job(job, queue_key=key, priority=int(key[1]))


def next_place(state: State, priority: int) -> dict[str, Any]:
    """The fields that put a new job behind all jobs of its priority."""
    number = state.next_number
    return {"number": number, "queue_key": (0, priority, number), "priority": priority}


# A submission.  The command line sends the whole `environment`; other clients send `env`, which is added to the
# service's own environment.


EACH_KEYS = {**{name: Job.FIELDS[name] for name in ("command", "name", "group", "cwd")},
             "env": Field(VARIABLES, "its own variables, on top of those that all of them have", default={})}
EACH = object_of(EACH_KEYS, "one of several jobs", required=["command"],
                 examples=[{"command": "python train.py --lr 0.1", "env": {"SEED": "1"}}])
MAX_OWN_VARIABLES = 65536       # bytes of one job's


class Asked(Value):
    """A checked submission: the fields that its Job keeps, and the others."""
    job: Mapping[str, Any]                      # the given fields of Job
    env: Mapping[str, str] = optional({}, VARIABLES, "variables on top of the environment", "asked", like="A_MODE=off")
    environment: Mapping[str, str] | None = optional(
        None, VARIABLES, "the whole environment instead; for the owner alone", "asked")
    node: str | None = optional(
        None, NODE_NAME, "only on the machine of this name: nexus node list (default: wherever it can start first)",
        "asked", flag="--node NAME")
    max_concurrent: int | None = optional(
        None, integer_in(1, 100000), "how many of its group run at once, from now on", "asked",
        flag="--max-concurrent N")
    llm: str | None = optional(None, LINE, "the GPUs llm_config.json names for this model", "asked", flag="--llm MODEL")
    begin: str | None = optional(
        None, BEGIN_TEXT, "start no sooner: at the next 22:00, in 2 hours, or at a time", "asked",
        flag="--begin WHEN", like="22:00, +2h")
    after_pid: int | None = optional(
        None, integer_in(1, 4194304), "start when this process of this machine has ended", "asked",
        flag="--after-pid PID")
    unique: bool = optional(
        False, FLAG, "add nothing if the same waits, runs or has completed", "asked", flag="--unique")
    commands: tuple[str, ...] = optional(
        (), list_of(COMMAND, 1, MAX_JOBS), "instead of command: a job for each of them", "asked")
    names: tuple[str, ...] = optional(
        (), list_of(LINE, most=MAX_JOBS), "with commands: a name for each of them, instead of name", "asked")
    each: tuple[Mapping[str, Any], ...] = optional(
        (), list_of(EACH, 1, MAX_JOBS), "instead of command: a job for each of them, with what differs between them",
        "asked")
    dry_run: bool = optional(False, FLAG, "check, and add nothing", "asked")


JOB_FIELDS = Job.FIELDS
ASKED: Mapping[str, Field] = {name: row for name, row in {**JOB_FIELDS, **Asked.FIELDS}.items() if row.asked}
SUBMISSION = object_of(ASKED, "a job", nulls=ASKED, required=(),
                       examples=[{"command": "python train.py", "gpus": 1}])
KEPT = [name for name, row in JOB_FIELDS.items() if row.kept]      # what a retry takes over from the first job
CHOICE_KEYS = {
    "ids": Field(list_of(STRING, 1, MAX_JOBS), "these jobs", default=None),
    "group": Field(STRING, "jobs of this group", default=None),
    "status": Field(list_of(STATUS, 1), "jobs of these statuses; beside `ids`, what those must be", default=None,
                    text=STATUS, parse=lambda text: (text,)),
}
CHOICE = object_of(CHOICE_KEYS, "which jobs", minProperties=1,
                   examples=[{"ids": ["abc", "abd"]}, {"group": "sweep", "status": "failed"}])
CANCEL_KEYS = {**CHOICE_KEYS, "signal": Field(
    one_of("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL"),
    "what running ones get first, instead of TERM; KILL follows as ever", default=None, like="INT")}
CANCEL = object_of(CANCEL_KEYS, "which jobs", minProperties=1, examples=CHOICE["examples"])
# What `edit` may change of a pending job, and `retry` of a finished one; LIVE_CHANGES: of a running one
CHANGES = {name: JOB_FIELDS[name] for name in (
    "command", "name", "gpus", "gpu_ids", "gpu_mem_mib", "gpu_type", "priority", "timeout_seconds", "expected_time",
    "warn", "retries")}
CHANGES["begin"] = Asked.FIELDS["begin"]
EDITS = {**CHANGES, **{name: JOB_FIELDS[name] for name in ("group", "after", "after_any")}}
CLEARED = EDITS.keys() - {"command"}            # of these, null takes away what was set
LIVE_CHANGES = ("name", "group", "priority", "timeout_seconds", "expected_time", "warn", "retries")
LIVE_FLAGS = ", ".join(str(JOB_FIELDS[name].flag).split()[0] for name in LIVE_CHANGES)
EDIT_KEYS = {
    **EDITS, "is_held": JOB_FIELDS["is_held"], "env": Asked.FIELDS["env"],
    "position": Field({**integer_in(-1, 0), "title": "0 (before all others) or -1 (behind them)"},
                      "0: before all others; -1: behind them", default=None)}
EDIT = object_of(EDIT_KEYS, "a change of a job", nulls=CLEARED, required=(), minProperties=1,
                 examples=[{"gpus": 2}, {"timeout_seconds": None}, {"position": 0}])
CHANGE = object_of(CHANGES, "a change of a job", nulls=CLEARED, required=())
RETRY_KEYS = {
    **CHOICE_KEYS, "change": Field(
        CHANGE, "what is to be otherwise", default=None, convert=functools.partial(read_object, CHANGES, CHANGE))}
RETRY = object_of(RETRY_KEYS, "which jobs, and what is to be otherwise", minProperties=1,
                  examples=[{"ids": ["abc"]}, {"group": "sweep", "change": {"gpus": 2}}])


def parse_submissions(data: Any) -> list[Asked]:
    """The jobs of a body of POST /queue, which is a job or a list of jobs.  Raises: usage."""
    if not isinstance(data, list):
        return parse_submission(data)
    if not data:
        refuse("the list of jobs is empty")
    if len(data) > MAX_JOBS:
        refuse(f"the list has {len(data)} jobs; at most {MAX_JOBS} are taken at once", hint="send it in parts")
    return [asked for number, item in enumerate(data, 1)
            for asked in parse_submission(item, f"job {number} of {len(data)}: ")]


def parse_submission(data: Any, where: str = "") -> list[Asked]:
    """One job, or one for each of `commands`.  Raises: usage, whose message begins with `where`."""
    try:
        fields = {name: fact for name, fact in read_object(ASKED, SUBMISSION, data).items() if fact is not None}
        check_submission(fields)
    except NexusError as error:
        message = f"{where}{error.message}; none was added" if where else error.message
        raise NexusError(error.kind, message, error.hint or "see nexus help add") from None
    others = {name: fields.pop(name) for name in Asked.FIELDS if name in fields}
    rows: list[dict[str, Any]] = [{"command": command} for command in others.pop("commands", ())]
    for row, name in zip(rows, others.pop("names", ())):
        row["name"] = name
    for row in others.pop("each", ()):
        own = {"variables": tuple(row["env"].items())} if "env" in row else {}
        rows.append({**{key: fact for key, fact in row.items() if key != "env"}, **own})
    return [Asked({**fields, **row}, **others) for row in rows or [{}]]


def check_submission(fields: Mapping[str, Any]) -> None:
    """Check that the fields of a submission go together.  Raises: usage."""
    given = [name for name in ("command", "commands", "each") if name in fields]
    if len(given) > 1:
        refuse(f"{given[1]} comes instead of {given[0]}")
    if not given:
        refuse("command is missing")
    if fields.get("names") and len(fields["names"]) != len(fields.get("commands", ())):
        refuse("names has a name for each of commands")
    rows = fields.get("each", ())
    if any(len(json.dumps(row.get("env"))) > MAX_OWN_VARIABLES for row in rows):
        refuse(f"the env of one of `each` is larger than {MAX_OWN_VARIABLES} bytes", hint="write long texts to a file")
    if "max_concurrent" in fields and "group" not in fields and not (rows and all("group" in row for row in rows)):
        refuse("max_concurrent is for a group, and this job has none", hint="name one: --group NAME")
    cwd, repository = fields.get("cwd", ""), fields.get("snapshot_repo", "")
    if ("snapshot" in fields) != bool(repository):
        refuse("snapshot and snapshot_repo come together")
    is_inside = (cwd + "/").startswith(repository.rstrip("/") + "/")
    if repository and (not is_inside or ".." in f"{cwd}/{repository}".split("/")):
        refuse("snapshot_repo must be a folder that cwd is in, and neither may have ..")


def check_gpus(job: Job) -> None:
    """Check that the GPU fields of a job go together.  Raises: usage."""
    for key in ("gpu_ids", "gpu_mem_mib", "gpu_type", "cuda_arg"):
        if job.gpus == 0 and getattr(job, key):
            refuse(f"{key} is for jobs with GPUs, and this one has gpus 0", hint="leave one of the two out")
    if job.gpu_ids is not None and job.gpus > len(job.gpu_ids):
        refuse(f"{format_gpus(job.gpus)} asked for, but only {len(job.gpu_ids)} named in gpu_ids",
               hint="name more, or ask for fewer")


def format_gpus(gpus: float) -> str:
    """`1 GPU`, `0.5 GPU`, `2 GPUs`, `no GPU`."""
    return format_known(gpus, " GPUs" if gpus > 1 else " GPU", 2) if gpus else "no GPU"


# ==== 5. FORMATS ==== what nexus reads from and writes for other programs and the disk, as values; it opens nothing

# One codec serves the disk and nodes.  A value becomes a JSON object of the fields that differ from their defaults;
# bytes become base64.  The annotations of its class say how it is decoded; a fact of another type, or out of the range
# of its kind, is refused.  Strict decoding is for nodes: an unknown key is refused, too, and a list that does not end.


def encode_value(item: Any) -> dict[str, Any]:
    """{field: fact} of the fields that differ from their defaults, and of those that are always written."""
    cls = type(item)
    facts = {name: fact for name, fact in vars(item).items() if fact != getattr(cls, name, ...)}
    return {**facts, **{name: getattr(item, name) for name in cls.WRITTEN}}


def encode_inner(fact: Any) -> Any:
    """Encode a fact that JSON has no form for.  Raises: TypeError."""
    if isinstance(fact, bytes):
        import base64
        return base64.b64encode(fact).decode("ascii")
    if isinstance(fact, Value):
        return encode_value(fact)
    raise TypeError(f"a {type(fact).__name__} cannot be kept")


encode_json = json.JSONEncoder(separators=(",", ":"), default=encode_inner).encode
JSON_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "bytes": (str,), "list": (list,),
    "tuple": (list, tuple), "dict": (dict,)}
MAX_ITEMS = 10000                           # of a list in strict decoding


def decode(kind: str, given: Any, name: str = "it", is_hidden: bool = False, is_strict: bool = False) -> Any:
    """Decode a fact.  `kind` is written as annotations are: `tuple[int, ...] | None`.

    Raises: TypeError, ValueError.  `is_hidden`: they do not show it.
    """
    is_optional = kind.endswith(" | None")
    if kind == "Any" or (is_optional and given is None):
        return given
    outer, _, inner = (kind[:-len(" | None")] if is_optional else kind).partition("[")
    inner = inner[:-1]
    if outer in FACT_KINDS:
        row = FACT_KINDS[outer]
        if not fits_alone(row.schema, given):
            raise TypeError(f"{name} is {describe_fact(given, is_hidden)}, and not {describe_schema(row.schema)}")
        return keep(row, given, name)
    fits = type(given) in JSON_KINDS.get(outer, (dict,))
    if fits and outer in ("int", "float"):
        fits = abs(given) <= 2**64              # NaN is not
    if fits and is_strict and isinstance(given, (list, dict)):
        fits = len(given) <= MAX_ITEMS
    if fits and outer == "tuple":
        kinds = [inner[:-len(", ...")]] * len(given) if inner.endswith(", ...") else inner.split(", ")
        fits = len(kinds) == len(given)
    if not fits:
        raise TypeError(f"{name} is {describe_fact(given, is_hidden or outer == 'Mapping')}, and not {kind}")
    if outer == "tuple":
        return tuple(decode(one, item, name, is_hidden, is_strict) for one, item in zip(kinds, given))
    if outer == "Mapping":                      # its keys are texts, as all keys of JSON
        return {key: decode(inner.partition(", ")[2], item, name, True, is_strict)      # variables
                for key, item in given.items()}
    if outer == "bytes":
        import base64
        return base64.b64decode(given, validate=True)
    return given if outer in JSON_KINDS else decode_value(globals()[outer], given, name, is_strict)


def describe_fact(given: Any, is_hidden: bool) -> str:
    return type(given).__name__ if is_hidden or isinstance(given, (list, dict)) else cut_words(repr(given), 60)


def decode_value(cls: type[T], fields: Any, name: str = "it", is_strict: bool = False) -> T:
    """Fields that the class does not have are ignored, unless `is_strict`.  Raises: TypeError, ValueError."""
    kinds, facts = cls.__annotations__, decode("dict", fields, name)
    unknown = facts.keys() - kinds.keys() if is_strict else ()
    if unknown:
        raise TypeError(f"{cut_words(min(unknown), 60)} is no key of {name}")
    return cls(**{key: decode(kinds[key], fact, key, is_strict=is_strict)
                  for key, fact in facts.items() if key in kinds})


# state.json has State's facts, and its tables with a line for each row.  A line of the journal is one transaction:
# {"put": {table: {key: the whole row, or null}}, "seq": its number}.  decode_row() reads both.
# Each line of the journal, each row of state.json, and its facts together, have a checksum, `crc`: a bit that the disk
# has changed must not start a job again.  It is made of the values, so another program may lay them out anew.

STATE_VERSION = 3
ROWS: Mapping[str, str] = {
    "environments": "Mapping[str, str]", "groups": "Group", "seen": "int", "nodes": "KnownNode", "usage": "PastUsage",
    "jobs": "Job"}
FIRST_TABLES = ("environments", "groups", "seen", "nodes", "jobs")      # of files that do not name theirs
WRAPPED = {"environments": "variables", "seen": "count"}        # rows that are no values: {"key": …, this name: row}
OWN_KEYS: Mapping[str, Callable[[Any], str]] = {                # the key of a row, as the row itself has it
    "groups": lambda row: row.name, "nodes": lambda row: row.config.name, "usage": lambda row: row.key,
    "jobs": lambda row: row.id}
# Names in files of version 2 that no longer mean anything.  Others that are unknown there are damaged.
RETIRED = frozenset((
    "content", "head", "head_attempt", "hooks_since", "inventory", "is_collected", "is_told", "limits", "machine_id",
    "may_pass", "remote_id"))

encode_sorted = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=encode_inner).encode
LIKE_INTEGERS = r"\.0[],}]|e\+"     # floats without a fraction, as they are written


def find_crc(text: str) -> int:
    """The checksum of what encode_sorted() has made; the same for 1.0 as for 1, as programs write either."""
    import zlib
    if re.search(LIKE_INTEGERS, text):
        text = encode_sorted(json.loads(text, parse_float=lambda digits: shorten_float(float(digits))))
    return zlib.crc32(text.encode("ascii"))


def shorten_float(number: float) -> float:
    return int(number) if number.is_integer() else number


def seal(body: Any) -> str:
    """The JSON of an object, with its checksum."""
    text = encode_sorted(body)
    return f'{text[:-1]},"crc":{find_crc(text)}}}'


def check_seal(body: Mapping[str, Any]) -> bool:
    """Whether an object has a checksum.  Raises: ValueError, when it is wrong."""
    if "crc" not in body:
        return False
    if body["crc"] != find_crc(encode_sorted({name: fact for name, fact in body.items() if name != "crc"})):
        raise ValueError("its checksum is wrong")
    return True


def is_known(table: str, key: str) -> bool:
    return key in FACTS if table == "facts" else table in ROWS


def encode_row(table: str, key: str, row: Any) -> Any:
    return {"key": key, WRAPPED[table]: row} if table in WRAPPED and row is not None else row


def decode_row(table: str, key: str, given: Any) -> Any:
    """Raises: KeyError, TypeError or ValueError, whose words show nothing of an environment."""
    kind = State.__annotations__[key] if table == "facts" else ROWS[table]
    if given is None:
        return None
    if table in WRAPPED:
        name, fact = given["key"], given[WRAPPED[table]]
        is_texts = isinstance(fact, dict) and all(isinstance(one, str) for one in fact.values())
        if table == "environments" and not is_texts:
            raise TypeError("its variables are not texts")
        row = decode(kind, fact, WRAPPED[table])
    else:
        row = decode(kind, given, key)
        name = OWN_KEYS[table](row) if table in OWN_KEYS else key
    if isinstance(row, Job) and not (name == key and is_job_id(key) and row.shown_status in STATUSES
                                     and len(row.queue_key) == 3):
        raise ValueError(f"its id is {row.id}, its status {row.status} and its queue_key {row.queue_key}")
    if name != key:
        raise ValueError(f"its name is {name}")
    if isinstance(row, Job) and row.status == PENDING and any(
            one.slurm_key is not None and one.finished_at is None for one in row.attempts[-1:]):
        return replace(row, status=SUBMITTED)           # older ones had no word for what is in Slurm's queue
    return row


def decode_sealed_row(table: str, key: str, given: Any) -> Any:
    """decode_row() of a row of state.json.  Raises: as decode_row()."""
    if not check_seal(decode("dict", given, key)):
        raise ValueError("it has no checksum")
    return decode_row(table, key, given)


def decode_old_row(table: str, key: str, given: Any) -> Any:
    """decode_row() of a row as version 2 wrote it.  Raises: as decode_row(); ValueError, for an unknown name in it."""
    if table in WRAPPED:
        return decode_row(table, key, encode_row(table, key, given))
    row = decode_row(table, key, given)
    unknown = set(list_unknown(row, given)) - RETIRED
    if unknown:
        raise ValueError(f"it has no {join_some(sorted(unknown))}")
    return row


def list_unknown(row: Any, given: Any) -> Iterator[str]:
    """The names in JSON that are no fields of what was decoded from it."""
    if isinstance(row, Value):
        for name, fact in given.items():
            if name in row.NAMES:
                yield from list_unknown(getattr(row, name), fact)
            else:
                yield name
    elif isinstance(row, tuple):
        for one, fact in zip(row, given):
            yield from list_unknown(one, fact)


def encode_transaction(seq: int, changes: Iterable[Put]) -> str:
    tables: dict[str, dict[str, Any]] = {}
    for change in changes:
        tables.setdefault(change.table, {})[change.key] = encode_row(*vars(change).values())
    return seal({"seq": seq, "put": tables}) + "\n"


def read_transaction(line: bytes) -> tuple[int, dict[str, Any], bool]:
    """(its number, {table: rows}, whether it has a checksum) of a line of the journal.

    Raises: KeyError, TypeError or ValueError.
    """
    body: dict[str, Any] = decode("dict", load_json(line))
    is_sealed = check_seal(body)
    if not is_sealed and len(body) > 2:
        raise ValueError("it has an unknown name and no checksum")
    return decode("int", body["seq"], "seq"), decode("dict", body["put"], "put"), is_sealed


def encode_state(state: State) -> Iterator[str]:
    head = {"version": STATE_VERSION, "seq": state.seq, "checksums": True, "tables": list(ROWS),
            "rows": sum(len(getattr(state, table)) for table in ROWS), **{name: getattr(state, name) for name in FACTS}}
    head["crc"] = find_crc(encode_sorted(leave_out_editable(head)))
    yield "{" + ",\n".join(f"{json.dumps(key)}: {json.dumps(fact)}" for key, fact in head.items())
    for table in ROWS:
        rows = ",\n".join(f"{json.dumps(key)}: {seal(encode_row(table, key, row))}"
                          for key, row in getattr(state, table).items())
        yield f',\n"{table}": {{\n{rows}\n}}'
    yield "}\n"


def leave_out_editable(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in body.items() if name not in EDITABLE}


class StateFile(Value):
    """A state.json as it was read; its rows are still to be decoded."""
    version: int
    seq: int                                    # the number of the last change that it contains
    tables: dict[str, Any]                      # {"facts": State's facts, table: rows}
    is_sealed: bool                             # its rows have checksums, and so have later lines of the journal
    faults: tuple[str, ...] = ()                # what is not as nexus wrote it


def read_state(text: str) -> StateFile:
    """Raises: KeyError, TypeError or ValueError, when it is no state.json; conflict, for a newer nexus's."""
    body: dict[str, Any] = decode("dict", load_json(text))
    version, seq = decode("int", body["version"], "version"), decode("int", body["seq"], "seq")
    if version > STATE_VERSION:
        raise NexusError("conflict", "state.json was written by a newer nexus: its version is "
                         f"{version}, and this one reads {STATE_VERSION}",
                         hint="nothing was changed: use the newer nexus.py, or give this one a home of its own: "
                         "NEXUS_HOME=~/.nexus-2 nexus start")
    decode("dict", body["jobs"], "jobs")
    tables = {"facts": {name: body[name] for name in FACTS if name in body},
              **{table: body[table] for table in ROWS if table in body}}
    is_sealed = version == STATE_VERSION or "crc" in body or "checksums" in body
    faults = list(find_head_faults(body) if is_sealed else (
        f"it has no {format_line(name, 60)}" for name in body
        if name not in ("version", "seq", *tables, *tables["facts"], *RETIRED)))
    return StateFile(version, seq, tables, is_sealed, tuple(faults))


def find_head_faults(body: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong in a state.json, but for its rows.  A newer nexus may have further facts and tables."""
    parts = leave_out_editable(body)
    tables = {name: rows for name, rows in parts.items() if isinstance(rows, dict)}
    try:
        if not check_seal({name: fact for name, fact in parts.items() if name not in tables}):
            yield "its facts have no checksum"
    except ValueError:
        yield "the checksum of its facts is wrong"
    named = body.get("tables")
    missing = [table for table in (named if isinstance(named, list) else FIRST_TABLES) if table not in tables]
    if missing:
        yield f"it has no {join_some(missing)}"
    count = sum(map(len, tables.values()))
    if count != body.get("rows"):
        yield f"it has {format_count(count, 'row')}, and had {body.get('rows')}"


# log.times, beside a job's logs, has lines `TENTHS STDOUT STDERR`: the logs' sizes at a time.

LogMark = tuple[float, int, int]                        # time, size of stdout.log, size of stderr.log


class LogEntry(Value):
    """Output that arrived together on one stream of a job, as far as is known."""
    attempt: int                                        # 0: not a job's log
    stream: int                                         # 0: stdout, 1: stderr
    start: int
    end: int
    at: float | None = None                             # when it had arrived; None: unknown
    content: bytes = b""


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
    rows: list[tuple[float | None, int, int, int]] = [(None, *one.log_start, one.number) for one in attempts]
    rows += [(*mark, 0) for mark in marks]
    rows.sort(key=lambda row: row[1] + row[2])
    for at, out, err, attempt in [*rows, (None, ends[0], ends[1], 0)]:
        for stream, size in enumerate(map(min, (out, err), ends)):
            if size > at_sizes[stream]:
                yield LogEntry(number, stream, at_sizes[stream], size, at)
                at_sizes[stream] = size
        number = attempt or number


# nvidia-smi prints everything on stdout, errors too.  A row counts only if it has a cell for each field.

GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu",
              "power.draw", "power.limit", "mig.mode.current", "compute_mode")
BASIC_GPU_FIELDS = GPU_FIELDS[:5]               # known to every driver; one unknown field makes the query fail
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
GPU_LISTED = r"(?m)^GPU ([0-9]{1,4}): .* \(UUID: [\w.-]+\)\s*$"   # of `nvidia-smi -L`: a GPU's index; MIG slices differ
SLICE_LISTED = (                                # a card's index; below it a slice's profile, number and UUID
    r"(?m)^(?:GPU ([0-9]{1,4}): | +MIG (\S{1,60}) +Device +([0-9]{1,4}): \(UUID: (MIG-[A-Za-z0-9_./-]{1,100})\))")
PROHIBITED, EXCLUSIVE = "Prohibited", ("Exclusive_Process", "Exclusive_Thread")     # compute modes besides Default
FAULT_CELLS = ("[GPU is lost]", "[GPU requires reset]")
NEEDED_FIELDS = ("index", "uuid", "memory.total", "memory.used")       # in others, [Unknown Error] is a sensor's


def parse_csv_rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """({field: cell} of each row, other lines) of a `--query-…=FIELDS` reply; other lines are messages."""
    lines = [[cell.strip() for cell in line.split(", ")] for line in text.splitlines() if line.strip()]
    return ([dict(zip(fields, cells)) for cells in lines if len(cells) == len(fields)],
            [", ".join(cells) for cells in lines if len(cells) != len(fields)])


def is_number(text: str, kind: str = "Ticks") -> bool:
    """Whether it is a whole number of this kind: not `²`, and not thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) < 20 and fits_alone(FACT_KINDS[kind].schema, int(text))


def parse_reading(cell: str | None) -> float | None:
    """A number with or without a unit; None for [N/A], [Insufficient Permissions], a fault, or what cannot be."""
    match = re.fullmatch(r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)(?: (?:MiB|%|W|MHz))?", cell or "")
    return float(match[1]) if match else None


def parse_gpus(text: str, fields: Sequence[str], known: Mapping[str, int]) -> tuple[list[Gpu], list[str]]:
    """(GPUs, messages) of a --query-gpu reply.

    `known`: {uuid: index} of earlier replies.  A lost GPU may show its fault in place of its index.
    """
    rows, messages = parse_csv_rows(text, fields)
    gpus = list[Gpu]()
    for row in rows:
        fault = next((cell[1:-1] for name, cell in row.items()
                      if cell in FAULT_CELLS or (cell == "[Unknown Error]" and name in NEEDED_FIELDS)), None)
        uuid = row.get("uuid", "")
        index = int(row["index"]) if is_number(row.get("index", ""), "Index") else known.get(uuid)
        if index is None:
            messages.append(", ".join(row.values()))
            continue
        gpus.append(Gpu(
            index=index, uuid=uuid if re.fullmatch(r"(?a)[A-Za-z0-9][\w.-]{0,119}", uuid) else f"index-{index}",
            name=cut_words(re.sub("^(NVIDIA )?(GeForce )?", "", row.get("name", "")), 100) or "GPU",
            memory_total_mib=parse_reading(row.get("memory.total")),
            memory_used_mib=parse_reading(row.get("memory.used")),
            utilization=parse_reading(row.get("utilization.gpu")),
            temperature=parse_reading(row.get("temperature.gpu")),
            power_watts=parse_reading(row.get("power.draw")),
            power_limit_watts=parse_reading(row.get("power.limit")),
            is_mig=row.get("mig.mode.current") == "Enabled", fault=fault,
            compute_mode=next((mode for mode in (PROHIBITED, *EXCLUSIVE) if mode == row.get("compute_mode")), None)))
    return sorted(gpus, key=lambda gpu: gpu.index), messages


def drop_doubles(gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs with a name and a UUID of their own."""
    kept, taken = list[Gpu](), set[str]()
    for gpu in gpus:
        if taken.isdisjoint((gpu.local_place, gpu.uuid)):
            kept.append(gpu)
        taken |= {gpu.local_place, gpu.uuid}
    return kept


def cut_cards(gpus: Sequence[Gpu], known: Iterable[Gpu], listing: str, report: str, error: str) -> list[Gpu]:
    """The GPUs with MIG slices in place of the cards that are cut.  A card in MIG mode without slices stays.

    `listing` is of `nvidia-smi -L`, which has UUIDs; `report` of `nvidia-smi -q -x`, which has memory and processes.
    `error`: why there is no report.  If a card cannot be read, the slices `known` of it get a fault.
    """
    import xml.etree.ElementTree as etree
    reports: dict[str | None, ElementTree.Element] = {}
    with contextlib.suppress(etree.ParseError):   # a process's name is as its owner likes
        root = etree.fromstring(re.sub("(?s)<process_name>.*?</process_name>", "", report))
        reports = {card.findtext("uuid"): card for card in root.iter("gpu")}
    slices: dict[int, list[tuple[int, str, str]]] = {}
    index = -1
    for card_index, profile, number, uuid in re.findall(SLICE_LISTED, listing):
        index = int(card_index or index)
        slices.setdefault(index, []).extend([(int(number), profile, uuid)] if uuid else [])
    found: list[Gpu] = []
    for gpu in gpus:
        if gpu.fault or not gpu.is_mig:
            found.append(gpu)
        elif gpu.index in slices and gpu.uuid in reports:
            found += [cut_card(gpu, *one, reports[gpu.uuid]) for one in slices[gpu.index]] or [gpu]
        else:
            before = [one for one in known if one.index == gpu.index and one.slice is not None] or [gpu]
            fault = error or "nvidia-smi -q -x does not tell its MIG slices"
            found += [forget_readings(one, fault=fault) for one in before]
    return found


def cut_card(card: Gpu, number: int, profile: str, uuid: str, report: ElementTree.Element) -> Gpu:
    """A MIG slice.  What is measured of the whole card only, like its utilization, is unknown."""
    made = forget_readings(card, uuid=uuid, name=f"{card.name} MIG {profile}", slice=number, profile=profile,
                           memory_total_mib=None, power_limit_watts=None)
    device = next((one for one in report.iter("mig_device") if one.findtext("index") == str(number)), None)
    if device is None or device.findtext("uuid", uuid) != uuid:
        return replace(made, fault="nvidia-smi -q -x does not tell of it")

    return replace(
        made, temperature=card.temperature, memory_total_mib=parse_reading(device.findtext("fb_memory_usage/total")),
        memory_used_mib=parse_reading(device.findtext("fb_memory_usage/used")),
        # Without a list by slice (`N/A`), each process of the card may be on this one
        processes=card.processes if report.findtext("processes", "N/A").strip() else tuple(
            GpuProcess(int(process.findtext("pid", "")), parse_reading(process.findtext("used_memory")))
            for process in report.iter("process_info")
            if is_number(process.findtext("pid", ""), "Pid") and "C" in process.findtext("type", "C") and all(
                process.findtext(name, "N/A") in (device.findtext(name), "N/A")
                for name in ("gpu_instance_id", "compute_instance_id"))))


def parse_visible_devices(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES names, up to an entry that names none: CUDA reads no further.

    A number counts the cards that nvidia-smi shows, and means all slices of a card.  A UUID may be abbreviated.
    """
    found, cards = list[Gpu](), list(dict.fromkeys(gpu.index for gpu in gpus))
    for entry in map(str.strip, text.split(",")):
        numbers = cards[int(entry):int(entry) + 1] if is_number(entry) else []
        named = [gpu for gpu in gpus if gpu.index in numbers or (
            entry and not is_number(entry) and gpu.uuid.startswith(entry))]
        if not named or (len(named) > 1 and not numbers):
            break
        found += named
    return found


def forget_readings(gpu: Gpu, **facts: Any) -> Gpu:
    return replace(
        gpu, memory_used_mib=None, utilization=None, temperature=None, power_watts=None, processes=(), **facts)


def parse_compute_apps(text: str, fields: Sequence[str] = APP_FIELDS) -> dict[str, tuple[GpuProcess, ...]]:
    """{GPU uuid: its compute processes}."""
    rows = [row for row in parse_csv_rows(text, fields)[0] if is_number(row["pid"], "Pid")]
    return {uuid: tuple(GpuProcess(int(row["pid"]), parse_reading(row["used_memory"]))
                        for row in rows if row["gpu_uuid"] == uuid)
            for uuid in {row["gpu_uuid"] for row in rows}}


# Tokens, as in tokens.json

def hash_text(text: str) -> str:
    import hashlib
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def token_json(token: Token) -> dict[str, Any]:
    return {"user": token.user, "sha256": token.sha256, "created_at": format_time(token.created_at),
            "expires_at": format_time(token.expires_at)}


def add_token(tokens: Mapping[str, Token], user: str, text: str,
              expires_at: float | None, now: float) -> dict[str, Token]:
    """Raises: usage; conflict, when somebody has this token."""
    hint = "leave it out, and one is made up"
    if not re.fullmatch(r"[A-Za-z0-9_][\w.@+-]{0,63}", user, re.ASCII):
        refuse(f"'{format_line(user, 80)}' cannot be a user's name",
               "up to 64 letters, digits and _ . @ + -, like bob or bob@lab.org")
    if not re.fullmatch("[!-~]{12,256}", text):
        refuse("a token must have 12 to 256 visible ASCII characters, without blanks", hint)
    digest = hash_text(text)
    if digest in tokens and tokens[digest].is_good(now):
        raise NexusError("conflict", f"this token is {tokens[digest].user}'s already", hint)
    return {**tokens, digest: Token(user, digest, now, expires_at)}


def revoke_tokens(tokens: Mapping[str, Token], given: str) -> dict[str, Token]:
    """Remove a user's tokens, or one token, named by its text or the beginning of its hash.  Raises: not_found."""
    digests = (hash_text(given), given if re.fullmatch("[0-9a-f]{12,64}", given) else "none")
    kept = {digest: token for digest, token in tokens.items()
            if given != token.user and not digest.startswith(digests)}
    if len(kept) == len(tokens):
        users = {token.user for token in tokens.values()}
        raise NexusError("not_found", "this is no token, and no user with one",
                         hint=suggest(given, users) or "nexus token list")
    return kept


# POST /api/submit: a multipart form with a script and flat YAML

FORM_FIELDS = {"code": 5 * 2**20, "config_file": 64 * 2**10}        # {name: bytes at most}
FORM_HINT = 'curl -X POST http://HOST:PORT/api/submit -F "code=@my_script.py" -F "config_file=@config.yaml"'
FORM_KEYS: Mapping[str, Field] = {                               # the keys of config_file
    **{name: Field(LINE, help) for name, help in (
        ("competition_id", "what its submitter calls it by"), ("project_id", "and by"), ("user_id", "whose it is"))},
    "expected_time": Field(JOB_FIELDS["expected_time"].schema, parse=parse_duration,
                           text=matching(f"^({DURATION}|{AMOUNT})$", "seconds, or a time like 90s, 30m, 2h")),
    **{name: JOB_FIELDS[name] for name in ("gpus", "name", "priority")},
    "token": Field({"type": "string"}, "who submits it")}


def parse_submit_form(body: bytes, content_type: str) -> tuple[bytes, dict[str, Any]]:
    """(the script, the fields of config_file) of a multipart/form-data body.  Source: RFC 2046 (5.1), RFC 7578.

    Not by the email package: it takes seconds for 5 MiB of short lines.
    Raises: usage, too_large, unsupported_media_type.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise NexusError("unsupported_media_type",
                         f"the body must be multipart/form-data, not {format_line(kind, 60) or 'nothing'}", FORM_HINT)
    boundary = re.search(r'(?i);\s*boundary=(?:"([^"]{1,70})"|([^";\s]{1,70}))', content_type)
    mark = f"\r\n--{boundary[1] or boundary[2]}" if boundary else "\r\n--"
    first, *parts = (b"\r\n" + body).split(mark.encode(), len(FORM_FIELDS) + 1)
    fields: dict[str, bytes] = {}
    for part in parts[:-1]:
        headers, _, content = part.partition(b"\r\n\r\n")
        named = re.search(rb'(?im)^content-disposition:\s*form-data;\s*name="?([^";\s]+)', headers)
        fields[named[1].decode("utf-8", "replace") if named else ""] = content
    if first or not parts or parts[-1].strip() != b"--" or fields.keys() != FORM_FIELDS.keys():
        refuse("the form must have the fields code and config_file, and no others, and begin and end with the boundary "
               "that its Content-Type names", FORM_HINT)
    for name, most in FORM_FIELDS.items():
        if not fields[name].strip():
            refuse(f"{name} is empty", FORM_HINT)
        if len(fields[name]) > most:
            raise NexusError("too_large", f"{name} has {len(fields[name])} bytes; at most {most} are taken")
    return fields["code"], parse_submit_config(fields["config_file"].decode("utf-8-sig", "replace"))


def parse_submit_config(text: str) -> dict[str, Any]:
    """{key: value} of config_file, which has YAML's lines `key: value`.  Raises: usage."""
    config: dict[str, Any] = {}
    for line in map(str.strip, text.split("\n")):
        if not line or line == "---" or line.startswith("#"):
            continue
        key, _, rest = line.partition(":")
        key, rest = key.rstrip(), rest.strip()
        if key not in FORM_KEYS:
            refuse(f"config_file: '{format_line(key, 40)}' is no key of it",
                   suggest(key, FORM_KEYS) or f"lines like expected_time: 10; the keys are {', '.join(FORM_KEYS)}")
        quoted = re.fullmatch(r"""(["'])(.*)\1\s*(?:#.*)?""", rest)
        item = quoted[2] if quoted else re.split(r"(?:^|\s)#", rest, maxsplit=1)[0].rstrip()
        if item or quoted:
            config[key] = parse_field(FORM_KEYS[key], item, f"config_file: {key}")
    return config


# /proc, screen, the runner's files

PF_KTHREAD = 0x00200000         # source: include/linux/sched.h


class Process(Value):
    """A process.  pid and started together are unique in this boot."""
    pid: int
    started: int                # clock ticks since boot
    parent: int
    session: int
    state: str                  # R, S, D, Z, T ...
    env_start: int              # address of its environment; it changes at an exec, and is 0 during one
    is_kernel: bool = False     # a kernel thread
    cpu_ticks: int = 0          # its own, and those of its ended children
    name: str = ""              # the program's


def parse_proc_stat(text: str) -> Process:
    """Parse /proc/PID/stat.  The name, in parentheses, may hold blanks and parentheses.  Source: proc(5)."""
    pid, _, rest = text.partition(" ")
    name, _, more = rest.rpartition(") ")
    cells = more.split()
    return Process(int(pid), int(cells[19]), int(cells[1]), int(cells[3]), cells[0], int(cells[47]),
                   bool(int(cells[6]) & PF_KTHREAD), sum(map(int, cells[11:15])), name[1:])


CGROUPS = "/sys/fs/cgroup"


def list_oom_files(text: str) -> list[str]:
    """The files that may count a group's `oom_kill`.  `text`: /proc/PID/cgroup.

    In a container, the group may be what is shown as the topmost one.
    Source: cgroups(7), admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst.
    """
    groups = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    second = [f"{CGROUPS}{path.rstrip('/')}/memory.events" for _, names, path in groups if not names]
    first = [f"{CGROUPS}/memory{path.rstrip('/')}/memory.oom_control" for _, names, path in groups
             if "memory" in names.split(",")]
    return [*second, *first, f"{CGROUPS}/memory.events", f"{CGROUPS}/memory/memory.oom_control"]


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


class Requeue(Value):
    """An attempt ended before its command began, through no fault of the job."""
    why: str
    excluded_nodes: tuple[tuple[str, str], ...] | None = None       # Job.excluded_nodes from now on; None: as before


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


def parse_commands(text: str) -> list[tuple[int, str]]:
    """[(line number, command)] of a file with one command a line, without empty lines and those that begin with #.

    A backslash at the end of a line joins the next one to it.
    """
    commands, lines = [], enumerate(text.lstrip("\ufeff").replace("\r\n", "\n").split("\n"), 1)
    for number, line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            while re.search(r"(?<!\\)(\\\\)*\\$", line):          # an odd number of backslashes
                line = line[:-1] + next(lines, (0, ""))[1]
            commands.append((number, line.strip()))
    return commands


LLM_OPTION = r"(?<!\S)--llm(?:=|\s+)['\"]?([^\s'\";|&]+)"
CUDA_OPTION = (                     # with its value, if it has one; the end of the command or of its quotes is none
    r"""(?<!\S)--cuda(?:(?:=|[ \t]+(?!-(?!\d)|[;|&<>)\s]|\d*[<>]))"""
    r"""(?:"[^"]*"|'[^']*'|[^\s;|&<>)"']+)|=?(?=[\s;|&<>)"']|$))""")


def fill_cuda_option(command: str, indices: Iterable[int]) -> str:
    """The command with its `--cuda` set to these GPUs, or with one added."""
    option = "--cuda " + ",".join(map(str, indices))
    filled, count = re.subn(CUDA_OPTION, option, command)
    return filled if count else f"{command} {option}"


TEE_PIPE = r"(?<!\|)\|&?\s*(?:\S*/)?tee\b[^|]*$"       # the last pipe of a command
TEE_ENDING = """
# A pipeline that ends in tee has the exit code of what it pipes.
for nexus_code in "${PIPESTATUS[@]}" "$?"; do [ "$nexus_code" = 0 ] || nexus_last=$nexus_code; done
exit "${nexus_last:-0}"
"""


LLM_CONFIG: Schema = {"type": "object", "title": "this file", "additionalProperties": False, "properties": {
    "default_requirement": GPU_COUNT, "models": {"type": "object", "additionalProperties": GPU_COUNT}}}


class JobsRow(Value):
    line: int                           # its number, from 1
    priority: int
    script: str
    conda: str | None
    arguments: str
    gpu_ids: tuple[int | str, ...] | None

    @property
    def content(self) -> str:
        """The row's identity: without priority and GPUs."""
        return "\0".join((self.script, self.conda or "", self.arguments))


def parse_jobs_file(text: str) -> tuple[list[JobsRow], list[str]]:
    """(rows `priority,script,conda_env,arguments,allowed_gpus`, faults of the other lines).

    The last field may hold commas; arguments with commas stand in double quotes.  A last line without a newline is
    left out, as it may be half written.
    """
    rows, faults = [], []
    for number, line in enumerate(map(str.strip, text.lstrip("\ufeff").split("\n")[:-1]), 1):
        try:
            rows += [parse_jobs_row(number, line)] if line and not line.startswith("#") else []
        except NexusError as error:
            faults.append(f"line {number}, '{format_line(line, 100)}': {error.message}")
    return rows, faults


def parse_jobs_row(number: int, line: str) -> JobsRow:
    """Raises: usage."""
    import csv
    try:
        cells = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        refuse(f"its quotes do not match ({error})")
    if len(cells) < 2 or not cells[1]:
        refuse("it is not like priority,script,conda_env,arguments,allowed_gpus")
    cells += [""] * (5 - len(cells))
    priority = parse_field(JOB_FIELDS["priority"], cells[0], "priority")
    script, conda, arguments, *allowed = cells[1:]
    if not fits_alone(COMMAND, line) or re.sub(CONTROL, "", line.replace("\t", "")) != line.replace("\t", ""):
        refuse("it holds characters that no command can have")
    try:
        gpu_ids = parse_indices(",".join(allowed)) if any(allowed) else None
    except NexusError as error:
        refuse(f"{error.message}; arguments that hold commas stand in double quotes")
    conda_env = parse_field(JOB_FIELDS["conda"], conda, "conda") if conda else None
    return JobsRow(number, priority, script, conda_env, arguments, gpu_ids)


MAX_SWEEP = 10000                       # jobs of one sweep
SPAN_NUMBER = r"[+-]?[0-9]{1,12}(?:\.[0-9]{1,12})?"
PLACEHOLDER = r"(?<!\$)\{([A-Za-z_]\w*)\}"             # `{lr}`, and not the shell's `${lr}`
BRACKETS = {")": "(", "]": "[", "}": "{"}
AWK_WORDS = ("print", "next", "exit", "getline")       # that awk programs have in braces


def parse_sweep(text: str, read_lines: Callable[[str], Iterable[str]]) -> tuple[str, tuple[str, ...]]:
    """(name, values) of `lr=1e-3,1e-4`, `seed=0..4`, `lr=0.1..0.5..0.2`, `s=@values.txt`, `layers=[64,64],[128]`.

    `read_lines`: returns the lines of a file.  Quotes stay in the values.  Raises: usage; what `read_lines` raises.
    """
    name, _, listed = text.partition("=")
    values: list[str] = []
    for part in split_values(listed, f"--sweep {name}"):
        if part.startswith("@@"):
            values.append(part[1:])
        elif part.startswith("@"):
            values += [line.strip() for line in read_lines(part[1:]) if line.strip()]
        elif re.fullmatch(r"(?=.*[0-9])[-+0-9.e]*\.\.[-+0-9.e]*", part):
            values += expand_span(part, f"--sweep {name}")
        else:
            values.append(part)
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or not values or not all(values):
        refuse(f"--sweep {format_line(text, 60)} is not like NAME=VALUE,VALUE",
               hint="--sweep lr=1e-3,1e-4 --sweep seed=0..4")
    return name, tuple(values)


def split_values(text: str, what: str) -> list[str]:
    """The parts between commas, except for commas in brackets and quotes.  Raises: usage, when these do not match."""
    parts, start, still_open = list[str](), 0, list[int]()      # still_open: the places of brackets and of a quote
    for at, letter in enumerate(text):
        last = text[still_open[-1]] if still_open else ""
        if last in ("'", '"'):
            if letter == last:
                still_open.pop()
        elif letter in "'\"([{":
            still_open.append(at)
        elif letter in BRACKETS:
            if last != BRACKETS[letter]:
                refuse(f"{what}: nothing opens the {letter} at character {at + 1} of {format_line(text, 60)}",
                       hint=f'in quotes it stands for itself: "{letter}"')
            still_open.pop()
        elif letter == "," and not still_open:
            parts.append(text[start:at])
            start = at + 1
    if still_open:
        at = still_open[-1]
        refuse(f"{what}: nothing closes the {text[at]} at character {at + 1} of {format_line(text, 60)}",
               hint="commas in brackets and quotes do not split values, so these must match")
    return [*parts, text[start:]]


def expand_span(part: str, what: str) -> list[str]:
    """The numbers of `0..4` or `0.1..0.5..0.2`, with both ends, the last if it is met.  Raises: usage."""
    import decimal
    match = re.fullmatch(f"({SPAN_NUMBER})\\.\\.({SPAN_NUMBER})(?:\\.\\.({SPAN_NUMBER}))?", part)
    hint = "ranges are like 0..4, 20..0..-5 or 0.1..0.5..0.2; list other values, like 1e-4,1e-3"
    if not match:
        refuse(f"{what}: {format_line(part, 60)} is no range", hint)
    if not match[3] and "." in match[1] + match[2]:
        refuse(f"{what}: {part} needs a step", f"like {part}..0.1")
    first, last, step = (decimal.Decimal(number or 1) for number in match.groups())
    if (last - first) * step < 0 or not step:
        refuse(f"{what}: {part} never comes to its end", f"like {match[1]}..{match[2]}..{-1 if last < first else 1}")
    count = min(int((last - first) / step), MAX_SWEEP) + 1      # one more than allowed is enough to refuse it
    return [f"{first + number * step:f}" for number in range(count)]


def list_combinations(sweeps: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    """{name: value} of each combination of the sweeps' values, the last sweep changing fastest.  Raises: usage."""
    import itertools
    import math
    names = [name for name, _ in sweeps]
    for name in names:
        if names.count(name) > 1:
            refuse(f"--sweep {name} is given twice", hint=f"put all values of {name} into one --sweep")
    if math.prod(len(values) for _, values in sweeps) > MAX_SWEEP:
        refuse(f"the sweep has more than {MAX_SWEEP} combinations", hint="sweep over fewer values")
    return [dict(zip(names, values)) for values in itertools.product(*(values for _, values in sweeps))]


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """The text with each `{name}` of `values` replaced, in one pass: what stands in a value stays as it is."""
    return re.sub(PLACEHOLDER, lambda match: values.get(match[1], match[0]), text)


def find_placeholders(text: str) -> list[str]:
    """The names in braces, but for words of awk, as in `awk '{print}'`."""
    return [name for name in re.findall(PLACEHOLDER, text) if name not in AWK_WORDS]


def strip_quotes(text: str) -> str:
    """A text as the shell reads it: without its quotes."""
    return re.sub(r"""(['"])(.*?)\1""", r"\2", text)


# For allowed_script_paths.  Other interpreters (Rscript, zsh, lua) run files of the directory or the home as well: make
# such a script executable, with the interpreter in its first line.
INTERPRETERS = {r"(?:python|pypy)[0-9.]*": (".py",), "bash|sh": (".sh", ".bash")}      # {name: endings of its scripts}
SHELL_CHARACTERS = r"[;&|<>()$`\\\"'*?\[\]{}~#!\n\r]"


def parse_script(command: str) -> tuple[str, str, list[str]]:
    """(interpreter or "", script, arguments) of `[interpreter] SCRIPT ARGS`.  Raises: forbidden."""
    # bash takes only space and tab as blanks; split() takes more.
    found = re.search(SHELL_CHARACTERS, command) or re.search(r"[^\S \t]|[\x00-\x08\x0e-\x1f\x7f-\x9f]", command)
    words = command.split()
    endings = next((row for name, row in INTERPRETERS.items() if len(words) > 1 and re.fullmatch(name, words[0])), ())
    interpreter, script, *arguments = words if endings else ["", *words]
    is_path = script.endswith(endings) if endings else "/" in script           # a bare name would be a program's
    if found or not is_path or script.startswith(("-", "+")) or "=" in script:
        why = f"it holds {json.dumps(found[0])}" if found else f"{format_line(script, 60)} is not a script's path"
        raise NexusError("forbidden",
                         f"only `[interpreter] SCRIPT ARGUMENTS` may be run here (allowed_script_paths), and {why}",
                         hint="put the rest into the script; interpreters are python and pypy for .py files, bash and "
                              "sh for .sh, without options; or name an executable file by its path")
    return interpreter, script, arguments


OUT_OF_MEMORY = (         # PyTorch, CUDA's own libraries, CuPy, JAX, TensorFlow, NCCL, RAPIDS, llama.cpp, vLLM
    r"CUDA out of memory|CUDA (driver |runtime )?error: ?out of memory|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|cuda\.OutOfMemoryError"
    r"|OutOfMemoryError: Out of memory allocating|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor"
    r"|Cuda failure (\d+ )?'out of memory'|out_of_memory: (CUDA|RMM)|cudaMalloc failed: out of memory"
    r"|No available memory for the cache blocks|less than desired GPU memory utilization")
TRACEBACK = "Traceback (most recent call last)"
SEVERAL_COUNT = (           # the last traceback is a launcher's, of a failed process, or follows from those before
    r"\b(ChildFailedError|ProcessExitedException|CalledProcessError)\b"
    r"|During handling of the above|The above exception was")
SOURCE_LINE = r"(\[\w+\]: )? {4}"         # of a traceback; torchrun puts the rank before it


def find_oom_line(text: str) -> str | None:
    """The line that says that a program ended for lack of GPU memory; None if it did not.  `text`: its stderr.

    A program may log such an error and go on: without SEVERAL_COUNT, only the last one of Python's tracebacks counts.
    """
    before, *tracebacks = text.split(TRACEBACK)
    counted = tracebacks if re.search(SEVERAL_COUNT, text) else tracebacks[-1:]
    for line in "".join(counted or [before]).splitlines():
        if re.search(OUT_OF_MEMORY, line) and not re.match(SOURCE_LINE, line):
            return format_line(line.strip(), 300).strip()
    return None


# What bash wrote into stderr.log of a command that a signal ended, until job.sh had its own words go nowhere: the whole
# text, with the variables.  The end of a log may begin in the middle of that.
RUNNER_WORDS = r"/job\.sh: \S+ \d+: +\d+ "          # before the variables
RUNNER_REST = r' /usr/bin/env -u _ -- |"\$@" (bash|/usr/bin/env) '
# What a shell says of a program that a signal ended: `bash: line 1:   565 Aborted     (core dumped) python x.py`.  bash
# puts blanks behind its word, in any language; dash says the word alone; the last ones are zsh's, fish's, and others'.
SIGNAL_WORDS = ("Hangup|Interrupt|Quit|Illegal instruction|Trace/breakpoint trap|Aborted|Bus error|Killed|Terminated"
                "|Floating point exception|User defined signal [12]|Segmentation fault|Alarm clock|Bad system call"
                "|CPU time limit exceeded|File size limit exceeded|Virtual timer expired|Stack fault")
SHELL_WORDS = "|".join((
    rf".*: \S+ \d+: +\d+ (({SIGNAL_WORDS}).*|[^\d\s:][^:]{{1,22}}? {{2,}}.*)", rf".*: +\d+ ({SIGNAL_WORDS}) {{2,}}.*",
    rf"({SIGNAL_WORDS})( +\(core dumped\))?",
    r"\S+:(\d+:)? (hangup|interrupt|quit|illegal hardware instruction|trace trap|abort|bus error|killed|terminated"
    r"|floating point exception|user-defined signal [12]|segmentation fault)( +\(core dumped\))?  +\S.*",
    r"fish: (Job \d+, )?'.*' terminated by signal SIG.*", r"timeout: the monitored command dumped core",
    r"Command terminated by signal \d+"))
MAX_LINES = 1000                # of a log's end
# tqdm's: ` 45%|####5     | 9/20 [00:10<00:12,  1.13s/it]`, or `9it [00:10,  1.13s/it]`
PROGRESS_BAR = r"(?:[^|]*\d{1,3}%\|[^|]*\|(?:[^][]*\[\d+:\d+[^]]*\]|.*)|(?:.*?: )?\d+it \[\d+:\d+[^]]{0,100}\])"


def find_last_lines(text: str, count: int) -> list[str]:
    """The last non-empty lines, as a terminal would show them, without colours and other escape sequences."""
    return take_last((line.rpartition("\r")[2] for line in list_lines(text)), count)


def find_cause_lines(text: str, count: int) -> list[str]:
    """The last lines that may say why a program failed: no progress bars, and no shell's words of a signal."""
    return take_last(map(drop_progress, list_lines(text)), count)


def list_lines(text: str) -> Iterable[str]:
    """From the last to the first, without empty ones, MAX_LINES at most.

    Jobs may end together, and the service waits for this: so it takes as long as the text is long, whatever it says.
    """
    import itertools
    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))", "", text)
    lines = list(itertools.takewhile(lambda line: not is_runner_line(line), text.split("\n")))
    is_rest = re.search(RUNNER_REST, "\n".join(lines))
    said = (line.rstrip("\r") for line in reversed(lines) if line and not line.isspace())
    return [] if is_rest else itertools.islice(said, MAX_LINES)


def is_runner_line(line: str) -> bool:
    before, mark, _ = line.rpartition("NEXUS_JOB_NONCE=")
    return bool(mark and re.search(RUNNER_WORDS, before))


def drop_progress(line: str) -> str:
    """What may be the cause of a failure in a line, or ""."""
    *before, last = line.split("\r")
    words = re.sub(f"^{PROGRESS_BAR}", "", last)        # an error may follow a bar
    if words == last and before and not re.fullmatch(" +", before[-1]):     # it was drawn anew, and not cleared
        return ""
    return "" if re.fullmatch(SHELL_WORDS, words.strip()) else words


def take_last(lines: Iterable[str], count: int) -> list[str]:
    import itertools
    shown = (format_line(line.strip(), 300).strip() for line in lines)
    return list(itertools.islice(filter(None, shown), count))[::-1]


# Slurm's programs.  Times are in UTC; fields are separated by |, and the one that may hold | comes last.
# Source: squeue(1), sbatch(1), src/common/slurm_errno.c and slurm_protocol_defs.c.

SLURM_ID = "[0-9]{1,12}"
SBATCH_ANSWER = rf"(?m)^({SLURM_ID})(;\S*)?$"    # the id, and maybe the cluster; warnings may stand around it
SQUEUE_FORMAT = "%i|%T|%S|%e|%N|%r|%j|%k"       # id, state, start, end, nodes, reason, name, comment
SLURM_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
REQUEUED_BY_SLURM = "REQUEUED"                  # the state, for nexus, of a job that waits again after it began
SLURM_ENDS: Mapping[str, str | None] = {        # {a state in which a job has ended: its cause; None: see its exit code}
    "COMPLETED": None, "FAILED": None, "CANCELLED": "killed", "TIMEOUT": "timeout", "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "host-memory", "NODE_FAIL": "node-fail", "BOOT_FAIL": "node-fail", "PREEMPTED": "preempted",
    "REVOKED": "killed", REQUEUED_BY_SLURM: "node-fail"}
# {what slurmstepd writes into slurm.log when it ends a job: the cause}, for a job that Slurm forgot or calls FAILED
SLURM_KILLS = (("DUE TO TIME LIMIT", "timeout"), ("DUE TO NODE FAILURE", "node-fail"),
               ("DUE TO PREEMPTION", "preempted"), ("CANCELLED AT", "killed"),
               ("(?i)memory limit|oom.kill|out.of.memory", "host-memory"))


class SlurmJob(Value):
    id: str
    state: str                                  # Slurm's word; it runs unless in SLURM_WAITING or SLURM_ENDS
    reason: str = ""
    nodes: str = ""
    started_at: float | None = None             # of a waiting job: Slurm's estimate
    ended_at: float | None = None
    key: str | None = None                      # Attempt.slurm_key; "": not this service's; None: unknown


class SlurmPartition(Value):
    name: str = field(STRING, "its name")
    state: str = field(STRING, "Slurm's word: up, down, drain or inactive")
    is_default: bool = field(FLAG, "jobs get it when no other is asked for")
    time_limit: str = field(STRING, "in Slurm's form: 1-00:00:00, or UNLIMITED")
    gpus: int = field(INTEGER, "GPUs of its nodes")
    gpus_used: int = field(INTEGER, "of these, given to jobs of anybody")


def parse_slurm_partitions(partitions: str, nodes: str) -> tuple[SlurmPartition, ...]:
    """Parse the output of `scontrol show partition -o` and of `scontrol show node -d -o`."""
    gpus: dict[str, list[tuple[int, int]]] = {}         # {partition: (GPUs, GPUs in use) of each of its nodes}
    for facts in map(parse_scontrol, nodes.splitlines()):
        for name in facts.get("Partitions", "").split(","):
            gpus.setdefault(name, []).append((count_gres(facts.get("Gres", "")), count_gres(facts.get("GresUsed", ""))))
    return tuple(SlurmPartition(
        format_line(facts["PartitionName"], 60), format_line(facts.get("State", "unknown").lower(), 60),
        facts.get("Default") == "YES", format_line(facts.get("MaxTime", "?"), 60),
        *map(sum, zip(*gpus.get(facts["PartitionName"], [(0, 0)]))))
        for facts in map(parse_scontrol, partitions.splitlines()) if "PartitionName" in facts)


def parse_scontrol(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show ... -o`; some hold blanks."""
    found = re.findall(r"(?:^|(?<=\s))([A-Z][A-Za-z:/&-]*)=(.*?)(?=\s+[A-Z][A-Za-z:/&-]*=|\s*$)", line)
    return dict(found)


def count_gres(text: str) -> int:
    """GPUs of `gpu:a100:2(S:0-1),gpu:1,shard:8`, `gpu:a100:1(IDX:0,2)` or `gpu:(null):1(IDX:0)`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,]*)?:(\d{1,6})\b", re.sub(r"\([^)]*\)", "", text))
    return sum(map(int, counts))


def parse_slurm_jobs(text: str, service_id: str) -> list[SlurmJob]:
    """Parse the output of `squeue -h -r -o SQUEUE_FORMAT`."""
    found = []
    for line in text.splitlines():
        cells = line.split("|", 7)
        if len(cells) < 8 or not re.fullmatch(SLURM_ID, cells[0]):
            continue                            # a warning, or a task of an array
        owner, _, token = cells[7].partition(f"nexus:{service_id}:")
        is_unknown = cells[6].startswith("nexus_") and "nexus:" not in cells[7]
        key = token if token and not owner else None if is_unknown else ""
        found.append(SlurmJob(cells[0], cells[1], cut_words(cells[5]), cut_words(cells[4]), parse_slurm_time(cells[2]),
                              parse_slurm_time(cells[3]), key))
    return found


def parse_slurm_time(text: str) -> float | None:
    """UTC epoch seconds of `2024-10-24T15:30:15`; None for `N/A`, `Unknown`, `None`, and what is out of range."""
    try:
        return check_time(parse_time(f"{text}Z"))
    except (OverflowError, ValueError):
        return None


def build_sbatch(job: Job, service_id: str, folder: str, limits: Limits, config: SlurmConfig) -> list[str]:
    """The command that submits a job.  Slurm's time limits are minutes; % is special in the path of --output."""
    own, memory_gb, gpu_type = config, limits.max_memory_gb, f"{job.gpu_type}:" if job.gpu_type else ""
    options = {"partition": own.partition, "account": own.account, "qos": own.qos,
               "gres": f"gpu:{gpu_type}{job.gpus}" if job.gpus else "",
               "time": f"{-(-limits.timeout_seconds // 60):.0f}" if limits.timeout_seconds else "",
               "mem": f"{memory_gb * 1024:.0f}M" if memory_gb else ""}
    return ["sbatch", "--parsable", "--export=ALL", "--no-requeue", "--open-mode=append", "--chdir=/",
            *own.extra_args, *(f"--{name}={text}" for name, text in options.items() if text),   # the last of two counts
            f"--job-name=nexus_{job.id}", f"--comment=nexus:{service_id}:{job.current.slurm_key}",
            f"--output={folder.replace('%', '%%')}/slurm-{job.attempt}.log",
            "--wrap", f"exec bash {quote(folder)}/job.sh {job.attempt}"]


# (a pattern of sbatch's error, what is at fault, what to do).  `cluster`: Slurm does not answer; `config`: it takes
# none of our jobs; `limit`: not so many at once; `job`: not this one.  Any other error may pass.
SLURM_REFUSALS = (
    ("job queue full|temporarily unable to accept", "limit", "nexus tries again as jobs end"),
    ("Invalid user: ", "cluster", "the name of this user is not found: getent passwd $UID"),
    ("[Mm]unge|Protocol authentication error|authentication plugin", "cluster",
     "munged must run here: munge -n | unmunge"),
    ("Unable to contact slurm controller|Socket timed out|Connection (refused|timed out)|Zero Bytes"
     "|Communication (connection|shut)|not responding|Unable to establish|in standby mode"
     r"|[Uu]nable to process configuration|establish a configuration source|slurm\.conf", "cluster",
     "nexus goes on when Slurm answers; see: scontrol ping"),
    ("[Ii]nvalid (partition|account|qos|user id|node name|feature|option|--)|partition not available"
     "|group not permitted|Access/permission denied|not authorized|unrecognized option|unknown option"
     "|requires an argument|reservation is invalid", "config",
     "see [slurm] partition, account, qos and extra_args (nexus config edit), then nexus restart"),
    (r"\b(Assoc|QOS)(?!\w*Submit)\w*(GRES|TRES|C[Pp][Uu]|Node|Mem|Wall|Billing)", "job", "ask for less"),
    ("job submit limit|violates accounting/QOS policy|Too many jobs|[Ll]imit on number of jobs|job limit", "limit",
     "nexus tries again as jobs end"),
    ("node configuration is not available|Memory specification|time limit is invalid|Invalid generic resource"
     "|More processors requested|Node count specification|CPU count", "job", "ask for less"))


def read_refusal(words: str) -> tuple[str, str]:
    """(what is at fault, what to do) for an error of sbatch or squeue; both empty when it is unknown."""
    return next(((fault, hint) for pattern, fault, hint in SLURM_REFUSALS if re.search(pattern, words)), ("", ""))


def clean_slurm_words(text: str) -> str:
    """The output of a Slurm program as one line, without the program's name."""
    own = r"^(\w+: (error: |fatal: )?)?((Batch job submission failed|slurm_load_jobs error): )?"
    lines = [re.sub(own, "", line.strip()) for line in text.splitlines()]
    return format_line("; ".join(dict.fromkeys(line for line in lines if line and not line.startswith("Try "))), 400)


def find_slurm_line(text: str) -> str:
    """The most telling line of a slurm.log: what slurmstepd did to the job, or else the last."""
    lines = find_last_lines(text, 50)
    own = [match[1] for line in lines for match in [re.match(r"slurmstepd\S*: error: (.+)", line)] if match]
    told = [line for line in own if re.search(r"\*\*\*|oom|memory", line)]
    return format_line((told or own or lines or [""])[-1].strip("* "), 300)


# The comment lines that a script begins with may hold options: `#NEXUS --gpus 2`, or sbatch's after #SBATCH.

def parse_directives(text: str) -> list[tuple[int, str, str]]:
    """[(line number, NEXUS or SBATCH, the options)]; those after NEXUS come last, as they count more."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        match = re.match(r"#(NEXUS|SBATCH)\s+(.*)", line)
        found += [(number, match[1], match[2])] if match else []
    return sorted(found, key=operator.itemgetter(1), reverse=True)


def translate_sbatch(words: Sequence[str], ignored: list[str]) -> list[str]:
    """Our options for those of sbatch.  `ignored` receives those that nexus does without.  Raises: usage."""
    made, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        match = re.fullmatch(r"--([\w-]+)(?:=(.*))?|-(\w)(.*)", word)
        if not match:
            refuse(f"{word} is not an option of sbatch")
        name, text = (match[1], match[2]) if match[1] else (SBATCH_LETTERS.get(match[3], match[3]), match[4])
        if not text:
            text = left.pop(0) if left and not left[0].startswith("-") else ""
        if name not in SBATCH_OPTIONS or (name == "gres" and "gpu" not in text):
            ignored.append(f"{'--' if len(name) > 1 else '-'}{name}{SBATCH_INSTEAD.get(name, '')}")
            continue
        pattern, translate = SBATCH_OPTIONS[name]
        given = re.fullmatch(pattern, text)
        if not given:
            refuse(f"--{name}={format_line(text, 60)} cannot be read", hint="use an option of nexus: nexus help add")
        made += translate(given)
    return made


def explain_sbatch(words: Sequence[str]) -> str:
    """What to type here for an option of sbatch with its value, perhaps the next word; empty if that is not known."""
    ignored, ours = list[str](), list[str]()
    with contextlib.suppress(NexusError):
        ours = translate_sbatch(words[:1] if "=" in words[0] else words[:2], ignored)
    return " ".join(map(quote, ours)) or " ".join(one for one in ignored if "(" in one)


def translate_limit(given: re.Match[str]) -> list[str]:
    """`30` (minutes), `30:00`, `2:00:00`, `1-12`, `1-12:00:00`; 0 is without limit there, too."""
    days, *clock = (int(part or 0) for part in given.groups())
    hours, minutes, seconds = clock if given[1] or given[4] else (0, *clock[:2])
    return [f"--timeout={days * 86400 + hours * 3600 + minutes * 60 + seconds}s"]


def translate_array(given: re.Match[str]) -> list[str]:
    """`0-3`, `1,5,7`, `0-15:4%2` as a sweep of `task`."""
    values = list[str]()
    for part in given[1].split(","):
        first, last, step = re.findall(r"^(\d+)-?(\d*):?(\d*)$", part)[0]
        values += map(str, range(int(first), int(last or first) + 1, int(step or 1))[:MAX_SWEEP + 1])
    return [f"--sweep=task={','.join(values)}", *([f"--max-concurrent={given[2]}"] if given[2] else [])]


def translate_gpus(given: re.Match[str]) -> list[str]:
    return [f"--gpus={given[2] or 1}", *([f"--gpu-type={given[1]}"] if given[1] else [])]


SBATCH_LETTERS = {"J": "job-name", "G": "gpus", "t": "time", "a": "array", "D": "chdir", "d": "dependency",
                  "b": "begin", "o": "output", "e": "error", "p": "partition", "c": "cpus-per-task", "n": "ntasks",
                  "N": "nodes"}
SBATCH_INSTEAD = {"output": " (nexus logs ID)", "error": " (nexus logs ID)", "nodelist": " (--node)",
                  "export": " (--env)", "requeue": " (--retries)", "hold": " (nexus pause ID)"}
ARRAY_PART = r"\d{1,12}(?:-\d{1,12}(?::[1-9]\d{0,8})?)?"
SBATCH_GPUS = r"([A-Za-z_][\w.-]*)?:?(\d+)?(?:\(.*\))?"
SBATCH_OPTIONS: Mapping[str, tuple[str, Callable[[re.Match[str]], list[str]]]] = {      # {name: (what it takes, ours)}
    "job-name": ("(.+)", lambda given: [f"--name={given[1]}"]),
    "chdir": ("(.+)", lambda given: [f"--cwd={given[1]}"]),
    "gpus": ("(?=.)" + SBATCH_GPUS, translate_gpus),
    "gpus-per-node": ("(?=.)" + SBATCH_GPUS, translate_gpus),
    "gres": (f"(?:.*,)?gpu(?::{SBATCH_GPUS})?(?:,.*)?", translate_gpus),
    "time": (r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", translate_limit),
    "array": (f"({ARRAY_PART}(?:,{ARRAY_PART})*)(?:%([1-9]\\d*))?", translate_array),
    "signal": (r"(?:[BR]+:)?(?:SIG)?([A-Z]\w*)(?:@(\d+))?", lambda given: [f"--warn={given[1]}@{given[2] or 60}s"]),
    "begin": (".+", lambda given: ["--begin=" + re.sub(r"^now\+(\d+)([smhdw]?)[a-z]*$", r"+\1\2", given[0])]),
    "dependency": (r"(after(ok|any)(:\w+)+(,|$))+", lambda given: [
        f"--after{'-any' if kind == 'any' else ''}={ids.replace(':', ',')}"
        for kind, ids in re.findall(r"after(ok|any):([\w:]+)", given[0])])}


def describe_submitted(job: Job, seen: SlurmJob | None, trouble: str | None = None) -> str:
    """Why a job that Slurm has waits.  `trouble`: why Slurm does not answer, or takes no job."""
    if job.current.slurm_id is None:
        where = "it is being submitted to Slurm" if not job.current.stop_cause else "it is taken out of Slurm's queue"
    else:
        where = f"Slurm has it as {job.current.slurm_id}"
        reason = seen.state if seen and seen.state not in SLURM_WAITING else seen.reason.strip("()") if seen else ""
        if not trouble and reason not in ("", "None"):
            return f"{where}: {reason}"
    return f"{where}; {trouble}" if trouble else where


# ==== 6. SCHEDULER ==== what to do next, decided from values alone
# Jobs start in the queue's order.  A job that cannot start lets later jobs pass.  Jobs of one request class ask for the
# same resources: if the first job of a class cannot start, plan() skips the rest of the class.  A job that waits for
# GPUs longer than reserve_after_seconds is starving: plan() reserves GPUs for the first such jobs.
# Another job may use reserved GPUs only if it is expected to end before they are needed.  Shares of GPUs are
# counted in hundredths.  They are accounting: nothing forces a job to keep to its share.


class Start(Value):
    job_id: str
    gpu_indices: tuple[int, ...]                # whole GPUs first, then the one that is shared
    gpu_uuids: tuple[str, ...]
    node: str = ""                              # "" = on this machine
    gpu_slice: int | None = None                # as in Attempt


REASON_CODES = ("resources", "dependency", "held", "paused", "quota", "begin-time", "node-down", "never")


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
    closed: str | None = None                   # why it gets no job now; None: it may get jobs
    folders: frozenset[str] | None = None       # directories of jobs that are there; None: it need not be known


class Plan(Value):
    starts: tuple[Start, ...] = ()
    blocked: dict[tuple[Any, ...], Reason] | None = None    # why the jobs of a request class wait, as far as explained
    quotas: Quotas | None = None                # after these starts, like gpus; None: nothing was examined
    gpus: tuple[GpuCapacity, ...] = ()
    machines: Mapping[str, Reason | None] = {}  # why each machine gets no job now
    folders: Mapping[str, frozenset[str] | None] = {}       # of NodeView
    hold: Reason | None = None                  # why nothing at all starts
    delayed_until: float | None = None          # when the next --begin or backoff ends
    preempted: tuple[tuple[str, str], ...] = () # (job that must end, job that can start then)


PAUSED = Reason("paused", "queue", "the queue is paused (nexus resume)")
PAUSED_BY_DAMAGE = Reason(
    "paused", "queue", "the queue is paused: a start found the state damaged (see nexus health, then nexus resume)")
SHORTAGE = Reason("resources", "gpus")          # explain_shortage() says more, GPU by GPU
MPS_SERVER = "nvidia-cuda-mps-server"
NAME_LENGTH = 15                                # so many characters of a process's name the kernel keeps
DEFAULT_MODE = "sudo nvidia-smi -i {} -c DEFAULT"


def find_pause(state: State) -> Reason | None:
    """Why nothing starts while the queue is paused; None: it is not."""
    return None if not state.paused else PAUSED_BY_DAMAGE if state.damage else PAUSED


def find_gpu_reason(gpu: Gpu, config: GpuConfig, jobs: Sequence[Job] = ()) -> Reason | None:
    """Why no further job may have this GPU.  A reason of code `resources` may go away when the jobs there end.

    An unknown amount of memory is a reason only if a minimum is configured.
    """
    if gpu.fault:
        return Reason("node-down", gpu.place, f"is unusable ({gpu.fault})")
    if gpu.is_paused:
        why = f" ({gpu.pause_reason}; nexus resume {gpu.place})" if gpu.pause_reason else ""
        return Reason("paused", gpu.place, f"is paused{why}")
    if gpu.compute_mode == PROHIBITED:
        return Reason("held", gpu.place, f"is unusable (compute mode {PROHIBITED}; {DEFAULT_MODE.format(gpu.index)})")
    is_uncut = gpu.is_mig and gpu.slice is None
    if is_uncut or is_left_out(gpu, config):
        return Reason("held", gpu.place, "is not in the service's CUDA_VISIBLE_DEVICES" if gpu.is_withheld else
                      "is not among [gpu] ids" if is_left_out(gpu, config) else
                      "is in MIG mode without slices (sudo nvidia-smi mig -cgi PROFILE -C makes them)")
    foreign, room, others = find_foreign(gpu, config), find_room(gpu, jobs), find_foreign_memory(gpu, jobs)
    unseen, why = find_unseen(gpu, jobs, config), ""
    if gpu.lease_holder:
        why = f"is held by the nexus of {gpu.lease_holder}"
    elif (foreign and not (config.share_with_others and may_share(gpu))) or unseen:
        why = f"is in use by {describe_users(foreign, unseen)}"
    elif room is None:
        why = "does not tell its memory, and min_free_mem_mib is set" if config.min_free_mem_mib else ""
    elif room < config.min_free_mem_mib:
        why = describe_room(room, config.min_free_mem_mib, "min_free_mem_mib ({})")
    elif others > 0 and others >= config.mem_threshold * (gpu.memory_total_mib or 0):
        why = f"has {format_memory(others)} of its memory in use by others"
    return Reason("resources", gpu.place, why) if why else None


def describe_users(foreign: Sequence[GpuProcess], unseen_mib: float) -> str:
    return describe_processes(foreign) if foreign else f"processes that cannot be seen ({format_memory(unseen_mib)})"


def find_foreign(gpu: Gpu, config: GpuConfig) -> list[GpuProcess]:
    """The processes of others, without those that do not count: jobs compute through the MPS server, which stays."""
    return [process for process in gpu.processes
            if process.job_id is None and not is_program(process, (MPS_SERVER, *config.ignore_processes))]


def is_program(process: GpuProcess, programs: Iterable[str]) -> bool:
    name = (process.name or "")[:NAME_LENGTH]
    return bool(name) and any(name == program.rpartition("/")[2][:NAME_LENGTH] for program in programs)


def may_share(gpu: Gpu) -> bool:
    """Whether several programs can compute there: under MPS they can, as its server is the one process then."""
    return gpu.compute_mode not in EXCLUSIVE or any(is_program(process, [MPS_SERVER]) for process in gpu.processes)


def find_unseen(gpu: Gpu, jobs: Sequence[Job], config: GpuConfig) -> float:
    """MiB that no listed process accounts for, if that means that others use the GPU: in a container, for example.

    0 if it is little, or unknown, or if it may be a job's.
    """
    listed = [process.memory_mib for process in gpu.processes]
    if config.share_with_others or jobs or gpu.memory_used_mib is None or None in listed:
        return 0.0
    unseen = gpu.memory_used_mib - sum(memory or 0 for memory in listed)
    return unseen if unseen > config.max_unseen_mem_mib else 0.0


def is_left_out(gpu: Gpu, config: GpuConfig) -> bool:
    """Whether nexus may not use a GPU of this machine."""
    return gpu.is_withheld or (bool(config.ids) and not gpu.node and gpu.index not in config.ids)


def describe_room(room_mib: float, least_mib: float, words: str) -> str:
    return f"has {format_memory(max(0.0, room_mib), 2)} free, less than {words.format(format_memory(least_mib, 2))}"


def find_foreign_memory(gpu: Gpu, jobs: Sequence[Job]) -> float:
    """MiB that others than nexus's jobs use; 0 if the owner is unknown, as of processes inside a container."""
    ours = [process.memory_mib for process in gpu.processes if process.job_id]
    if gpu.memory_used_mib is None or (jobs and (not ours or None in ours)):
        return 0.0
    return max(0.0, gpu.memory_used_mib - sum(memory or 0 for memory in ours))


def find_room(gpu: Gpu, jobs: Sequence[Job]) -> float | None:
    """Free memory in MiB, minus what the jobs there have declared and do not use yet; None if it is unknown.

    What ended jobs still hold counts as free.
    """
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return None
    taken: dict[str | None, float] = dict.fromkeys((job.id for job in jobs), 0.0)
    returning = sum(process.memory_mib or 0 for process in gpu.processes
                    if process.job_id and process.job_id not in taken)
    for process in gpu.processes:
        taken[process.job_id] = taken.get(process.job_id, 0.0) + (process.memory_mib or 0)
    if jobs and not gpu.processes:              # inside a container no process shows: all use is the jobs'
        claimed = max(0.0, sum(job.gpu_mem_mib or 0 for job in jobs) - gpu.memory_used_mib)
    else:
        claimed = sum(max(0.0, (job.gpu_mem_mib or 0) - taken[job.id]) for job in jobs)
    return gpu.memory_total_mib - max(0.0, gpu.memory_used_mib - returning) - claimed


def describe_processes(processes: Sequence[GpuProcess]) -> str:
    """`bob (pid 4242 python, 16GB)`, each."""
    described = []
    for process in processes:
        program = f"pid {process.pid}" + (f" {format_line(process.name, 30)}" if process.name else "")
        memory = "" if process.memory_mib is None else f", {format_memory(process.memory_mib)}"
        described.append(f"{process.user or 'somebody'} ({program}{memory})")
    return join_some(described, 3)


def describe_slices(job: Job, gpus: Iterable[Gpu]) -> str:
    """Why a job of several GPUs gets none of the MIG slices; "" if there are none, or it may have one."""
    is_cut = job.gpus > 1 and any(gpu.slice is not None for gpu in gpus)
    return " beside MIG slices, of which a job can use only one" if is_cut else ""


def format_asked(job: Job) -> str:
    """`2 GPUs of type A100`."""
    return format_gpus(job.gpus) + (f" of type {job.gpu_type}" if job.gpu_type else "")


def find_never(job: Job, machines: Mapping[str, Sequence[Gpu]]) -> Reason | None:
    """Why a job can never run; the subject is the field that asks for too much.  `machines`: {name: its GPUs}"""
    import itertools
    gpus, count, asked = list(itertools.chain(*machines.values())), -int(-job.gpus // 1), format_gpus(job.gpus)
    note, sizes = describe_slices(job, gpus), [gpu.memory_total_mib or float("inf") for gpu in gpus]
    where = f"{next(iter(machines)) or 'this machine'} has" if len(machines) == 1 else "no machine has more than"
    types, indices = sorted({gpu.name for gpu in gpus}), format_indices(dict.fromkeys(gpu.local_place for gpu in gpus))
    memory = format_memory(job.gpu_mem_mib or 0, 2)
    steps: Sequence[tuple[str, str, Callable[[Gpu], bool], str]] = (    # field, words, which GPUs fit, which exist
        ("gpus", "", lambda gpu: not note or gpu.slice is None, ""),
        ("gpu_type", f" of type {job.gpu_type}", lambda gpu: gpu.is_type(job.gpu_type),
         f"; the types are {join_some(types, 8)}"),
        ("gpu_ids", f" of index {format_indices(job.gpu_ids or ())}",
         lambda gpu: job.gpu_ids is None or gpu.is_named(job.gpu_ids), f"; the indices are {indices}"),
        ("gpu_mem_mib", f" with {memory}", lambda gpu: (gpu.memory_total_mib or float("inf")) >= (job.gpu_mem_mib or 0),
         f"; the largest has {format_memory(max(sizes, default=0), 2)}"))
    for field, words, fits, others in steps:
        asked += words if getattr(job, field) else ""
        machines = {name: list(filter(fits, there)) for name, there in machines.items()}
        most = max(map(len, machines.values()), default=0)
        if count > most:
            return Reason("never", field, f"wants {asked}, {where} {most}{note}{others}")
    return None


class GpuCapacity:
    """A GPU while plan() assigns jobs: what is left of it, and for which job it is reserved."""

    def __init__(self, gpu: Gpu, held: Sequence[tuple[Job, int]], config: GpuConfig, now: float,
                 closed: Reason | None = None) -> None:
        """`held`: the running jobs there, each with its share.  `closed`: why the machine gets no job."""
        jobs = [job for job, _ in held]
        self.gpu = gpu
        self.jobs = jobs                            # and those that start there now
        self.free = 100 - sum(share for _, share in held)                       # hundredths
        self.reason = closed or find_gpu_reason(gpu, config, jobs)              # why it gets no further job
        self.is_reachable = self.reason is None or (bool(held) and self.reason.code == "resources")
        self.room_mib = find_room(gpu, jobs)
        self.most_mib = (gpu.memory_total_mib or 0) - find_foreign_memory(gpu, jobs)        # room after all jobs there
        self.ends_at = max([now, *(find_end(job, now) for job in jobs)])     # the earliest time when all is free
        self.reserved_for: str | None = None
        self.reserved_until = 0.0
        self.kept = 0                               # hundredths that are taken when who preempts has started there

    def take(self, job: Job, share: int, now: float) -> None:
        self.free -= share
        self.jobs.append(job)
        if self.room_mib is not None and job.gpu_mem_mib:
            self.room_mib -= job.gpu_mem_mib
        self.ends_at = max(self.ends_at, now + (job.expected_time or 0))


def find_age(job: Job, now: float) -> float:
    """Seconds since a job's start by the wall clock; 0 if it has not started."""
    return 0.0 if job.current.started_at is None else now - job.current.started_at


def find_end(job: Job, now: float) -> float:
    """The earliest end to plan with: now, unless the submitter gave an expected time."""
    return now + max(0.0, (job.expected_time or 0) - find_age(job, now))


def list_capacities(running: Iterable[Job], gpus: Sequence[Gpu], config: GpuConfig, now: float,
                    closed: Mapping[str, Reason | None]) -> list[GpuCapacity]:
    """`closed`: {machine: why it gets no job}"""
    held: dict[str, list[tuple[Job, int]]] = {}
    for job in running:
        for uuid, share in zip(job.current.gpu_uuids, list_shares(job)):
            held.setdefault(uuid, []).append((job, share))
    return [GpuCapacity(gpu, held.get(gpu.uuid, ()), config, now, closed.get(gpu.node)) for gpu in gpus]


def may_run_on(job: Job, node: str) -> bool:
    return job.only_node in (None, node) and all(name != node for name, _ in job.excluded_nodes)


def lacks_folder(job: Job, folders: Container[str] | None) -> bool:
    return folders is not None and needs_folder(job) and job.cwd not in folders


def may_use(job: Job, gpu: Gpu) -> bool:
    """Whether a job may ever have a GPU.  CUDA lets a process use one MIG slice only."""
    return ((job.gpus <= 1 or gpu.slice is None) and gpu.is_type(job.gpu_type)
            and (job.gpu_ids is None or gpu.is_named(job.gpu_ids)) and may_run_on(job, gpu.node))


def find_verdict(capacity: GpuCapacity, share: int, job: Job, config: GpuConfig, now: float) -> Reason | None:
    """Why a job cannot have `share` hundredths of a GPU now; None if it can."""
    gpu, room_mib, asked_mib, why = capacity.gpu, capacity.room_mib, job.gpu_mem_mib, ""
    ids = [one.id for one in capacity.jobs]
    names = format_jobs_there(ids) if ids else ""
    if share < 100 and not may_share(gpu):
        return Reason("held", gpu.place, f"is in compute mode {gpu.compute_mode}, for one process only")
    if capacity.free < share:
        why = f"runs {names}" if capacity.free <= 0 else f"has {capacity.free / 100:g} free beside {names}"
        why += f", and {capacity.reason.detail}" if capacity.reason else ""
        return Reason("resources", ",".join(ids), why)
    if capacity.reason:
        return capacity.reason
    is_brief = job.expected_time is not None and now + job.expected_time <= capacity.reserved_until
    if capacity.reserved_for not in (None, job.id) and not is_brief:
        why = f"is kept for job {capacity.reserved_for}"
    elif names and gpu.utilization is not None and gpu.utilization >= config.load_threshold * 100:
        why = f"is {gpu.utilization:.0f}% busy with {names} (load_threshold)"
    elif asked_mib and room_mib is None:
        why = "does not tell its memory, and the job says how much it needs"
    elif asked_mib and room_mib is not None and room_mib < asked_mib:
        why = describe_room(room_mib, asked_mib, "the {} asked for")
    return Reason("resources", gpu.place, why) if why else None


def list_verdicts(job: Job, capacities: Iterable[GpuCapacity], config: GpuConfig, now: float,
                  share: int = 0) -> list[tuple[GpuCapacity, Reason | None]]:
    """Each GPU that a job may have, and why it cannot have `share` of it (0: its largest share); None: it can."""
    share = share or max(list_shares(job), default=0)
    return [(one, find_verdict(one, share, job, config, now)) for one in capacities if may_use(job, one.gpu)]


def format_jobs_there(ids: Sequence[str]) -> str:
    return f"job {ids[0]}" if len(ids) == 1 else f"jobs {join_some(ids, 8)}"


def choose_gpus(job: Job, capacities: Sequence[GpuCapacity], config: GpuConfig,
                now: float) -> list[GpuCapacity] | None:
    """The GPUs of one machine for a job, in the order of its shares; None if it does not fit.

    A share goes to the fullest GPU that fits.  Whole GPUs are chosen by index, or by the least free memory that fits;
    MIG slices come before cards, the smallest first.  After a CUDA out-of-memory error the emptiest GPUs come first,
    and the GPUs of that attempt last.
    """
    def list_fitting(share: int) -> list[GpuCapacity]:
        fitting = [one for one, why in list_verdicts(job, capacities, config, now, share) if not why]
        return sorted(fitting, key=lambda one: (
            float("inf") if one.gpu.slice is None else one.gpu.memory_total_mib or 0.0))

    shares = list_shares(job)
    chosen: list[GpuCapacity] = []
    if shares[-1] < 100:
        chosen = sorted(list_fitting(shares[-1]), key=lambda one: (one.free, one.room_mib or 0))[:1]
        if not chosen:                          # a GPU that is all free may be for one process only
            return None
    whole = [one for one in list_fitting(100) if one not in chosen]
    if len(whole) + len(chosen) < len(shares):
        return None
    if job.exclusive:
        before = job.attempts[-1].gpu_uuids if job.attempts else ()
        whole.sort(key=lambda one: (-(one.room_mib or 0), one.gpu.uuid in before))
    elif job.gpu_mem_mib:
        whole.sort(key=lambda one: one.room_mib or 0)
    return whole[: len(shares) - len(chosen)] + chosen


def reserve(job: Job, capacities: Sequence[GpuCapacity]) -> None:
    """Reserve GPUs for a starving job: the emptiest ones, of the machine that is expected to have them first.

    For one job of a machine at a time GPUs stay idle: two might each hold what the other needs.  None are reserved if
    the job also needs a GPU that is lost or used by others: the reserved ones would be idle for nothing.
    """
    shares = list_shares(job)
    taken = {one.gpu.node for one in capacities if one.reserved_for and one.free > 0}
    usable: dict[str, list[GpuCapacity]] = {}       # {machine: GPUs that the job can have when their jobs have ended}
    for one in capacities:
        is_usable = one.is_reachable and one.reserved_for is None and one.most_mib >= (job.gpu_mem_mib or 0)
        if is_usable and may_use(job, one.gpu):
            usable.setdefault(one.gpu.node, []).append(one)
    choices = [choose_emptiest(shares, there) for node, there in usable.items() if node not in taken and shares]
    reserved = min(filter(None, choices), default=[], key=lambda chosen: (
        max(one.ends_at for one in chosen), -sum(one.free for one in chosen)))
    for one in reserved:
        one.reserved_for, one.reserved_until = job.id, max(one.ends_at for one in reserved)


def choose_emptiest(shares: Sequence[int], there: Iterable[GpuCapacity]) -> list[GpuCapacity]:
    """The GPUs for these shares that are expected to be free first; [] if there are not enough."""
    ordered = sorted(there, key=lambda one: (-one.free, one.ends_at, one.gpu.index))
    last = [one for one in ordered if shares[-1] == 100 or may_share(one.gpu)][:1]
    chosen = [one for one in ordered if one not in last][:len(shares) - 1] + last
    return chosen if last and len(chosen) == len(shares) else []


PREEMPT_AFTER_S = 60.0          # a preemptible job has its GPUs for so long at least


def preempt(job: Job, nodes: Sequence[str], running: list[Job], capacities: Sequence[GpuCapacity],
            config: GpuConfig, now: float) -> list[Job] | None:
    """The preemptible jobs of one machine that must be stopped so that a job can start; None: that is of no use.

    It gets the GPUs whose jobs have run for the shortest time, first those that become free anyway.  They are reserved
    for it.  In `running`, the jobs that are chosen get their stop_cause.
    """
    share = list_shares(job)[-1]
    for capacity in capacities if job.gpus < 1 else ():         # there may be room beside another one that preempts
        if 0 < capacity.kept <= 100 - share and capacity.gpu.node in nodes and may_use(job, capacity.gpu):
            capacity.kept += share
            return []
    for node in nodes:
        there = list_preempted_from(node, capacities)
        here = [one for one in running if one.gpus and one.current.node == node]
        others = [one for one in list_preemptible(here) if find_age(one, now) >= PREEMPT_AFTER_S]
        chosen = choose_ends(job, here, others, [one.gpu for one in there], config, now)
        if chosen is None:
            continue
        ends, placed = chosen
        kept = {one.gpu.uuid: 100 - one.free + share for one, share in zip(placed, list_shares(job))}
        for capacity in there:
            if capacity.gpu.uuid in kept:
                capacity.reserved_for, capacity.kept = job.id, kept[capacity.gpu.uuid]
        running[:] = [with_facts(one, stop_cause=PREEMPTED) if one in ends else one for one in running]
        return ends
    return None


def list_preempted_from(node: str, capacities: Iterable[GpuCapacity]) -> list[GpuCapacity]:
    """The GPUs of a machine that preempting may free: kept for nobody, and without jobs that start now."""
    return [one for one in capacities if one.gpu.node == node and one.reserved_for is None
            and all(job.status == RUNNING for job in one.jobs)]


def list_preemptible(running: Iterable[Job]) -> list[Job]:
    return [job for job in running if job.preemptible and not job.current.stop_cause]


def choose_ends(job: Job, here: Sequence[Job], others: Sequence[Job], gpus: Sequence[Gpu], config: GpuConfig,
                now: float) -> tuple[list[Job], list[GpuCapacity]] | None:
    """(those of `others` that must be stopped so that a job can start, its GPUs then); None: that is of no use.

    `here`: all running jobs of the machine, of which some may be ending.
    """
    ending = [one for one in here if one.current.stop_cause]
    others = sorted(others, key=lambda one: find_age(one, now))
    ages = {uuid: find_age(one, now) for one in others for uuid in one.current.gpu_uuids}       # of the oldest there
    gpus = sorted(gpus, key=lambda gpu: ages.get(gpu.uuid, 0.0))
    placed = choose_without(job, ending, here, gpus, config, now) or choose_without(
        job, [*ending, *others], here, gpus, config, now)
    if not placed:
        return None
    gpus = [one.gpu for one in placed]
    ends = [one for one in others if any(gpu.uuid in one.current.gpu_uuids for gpu in gpus)]
    for one in ends[::-1]:                          # the oldest may stay if the others are enough
        fewer = [other for other in ends if other is not one]
        if choose_without(job, ending + fewer, here, gpus, config, now):
            ends = fewer
    return ends, choose_without(job, ending + ends, here, gpus, config, now) or []


def find_next_ends(job: Job, planned: Plan, nodes: Iterable[str], config: GpuConfig,
                   now: float) -> tuple[list[Job], float] | None:
    """(the preemptible jobs that are too young to be stopped for a job, in how many seconds they are not)

    None: stopping jobs is of no use, or there is nothing to wait for.
    """
    choices = []
    for node in nodes if job.gpus and not job.preemptible else ():
        gpus = [one.gpu for one in list_preempted_from(node, planned.gpus)]
        here = list({one.id: one for capacity in planned.gpus if capacity.gpu.node == node
                     for one in capacity.jobs if one.status == RUNNING}.values())
        others = sorted(list_preemptible(here), key=lambda one: -find_age(one, now))
        if not others or choose_ends(job, here, others, gpus, config, now) is None:
            continue
        for count in range(1, len(others) + 1):     # the oldest may be stopped first
            chosen = choose_ends(job, here, others[:count], gpus, config, now)
            if chosen:
                left_s = PREEMPT_AFTER_S - find_age(others[count - 1], now)
                choices += [(chosen[0], left_s)] if chosen[0] and left_s > 0 else []
                break
    return min(choices, key=lambda choice: choice[1], default=None)


def choose_without(job: Job, gone: Iterable[Job], running: Sequence[Job], gpus: Sequence[Gpu], config: GpuConfig,
                   now: float) -> list[GpuCapacity] | None:
    """choose_gpus(), as if the jobs in `gone` had ended.  Their memory is free then, also where nothing lists it."""
    ids = {one.id for one in gone}
    left = [one for one in running if one.id not in ids]
    held = {uuid for one in left for uuid in one.current.gpu_uuids}
    freed = {uuid for one in running if one.id in ids for uuid in one.current.gpu_uuids} - held
    then = [gpu if gpu.uuid not in freed or gpu.memory_used_mib is None else replace(
        gpu, memory_used_mib=find_foreign_memory(gpu, list(running)),
        processes=tuple(process for process in gpu.processes if process.job_id not in ids)) for gpu in gpus]
    return choose_gpus(job, list_capacities(left, then, config, now, {}), config, now)


def find_limits(job: Job, config: JobsConfig) -> Limits:
    """The limits of a job.  They are the head's, wherever it runs."""
    factor = config.timeout_multiplier
    if job.timeout_seconds is not None:
        limit_s, name = job.timeout_seconds, "its time limit"
    elif job.expected_time is not None:
        limit_s, name = job.expected_time * factor, f"{factor:g} times its expected time (timeout_multiplier)"
    else:
        limit_s, name = config.timeout_seconds, "timeout_seconds"
    return Limits(limit_s, name, job.warn, config.max_memory_gb, config.kill_grace_seconds,
                  config.idle_kill_minutes * 60)


def find_stop(limits: Limits, use: Use) -> tuple[str, str] | None:
    """(the cause, the words) for which a running job must be ended: the limit that it has reached; None: none."""
    limit_s, most_gb, longest_s = limits.timeout_seconds, limits.max_memory_gb, limits.idle_kill_seconds
    if limit_s and use.runtime_s is not None and use.runtime_s >= limit_s:
        words = f"{limits.timeout_name} is {format_duration(limit_s)}"
        return "timeout", f"stopped after {format_duration(use.runtime_s)}: {words}"
    if most_gb and (use.memory_mib or 0) > most_gb * 1024:
        taken = format_memory(use.memory_mib or 0, 2)
        return "host-memory", f"its processes took {taken} of host memory; max_memory_gb is {most_gb:g}"
    if longest_s and use.idle_s >= longest_s:
        words = f"its GPUs did nothing for {format_duration(use.idle_s)}"
        return "idle", f"{words}; idle_kill_minutes is {longest_s / 60:g}"
    return None


def find_warning(limits: Limits, runtime_s: float | None) -> str | None:
    """The signal of --warn, if it is time for it."""
    if limits.warn is None or not limits.timeout_seconds or runtime_s is None:
        return None
    signal, _, before = limits.warn.partition("@")
    return signal if runtime_s >= limits.timeout_seconds - parse_duration(before) else None


class Quotas:
    """The limits of running jobs by group, by user, and in all; and which of them are reached."""

    def __init__(self, state: State, config: JobsConfig) -> None:
        self.config, self.groups = config, state.groups
        self.closed_groups: dict[str | None, Reason] = {
            name: Reason("held", name, why) for name, why in list_holds(state).items()}
        self.closed_users: dict[str | None, Reason] = {}        # users at their limit; the key None: all users
        self.counts: dict[tuple[str, str | None], int] = {}
        for job in state.live.values():
            self.count(job)

    def check(self, group: str | None, user: str) -> Reason | None:
        """Why no further job of this group and user may start; None if one may."""
        return self.closed_groups.get(group) or self.closed_users.get(user) or self.closed_users.get(None)

    def count(self, job: Job) -> None:
        group, config = self.groups.get(job.group or ""), self.config
        most = group.limit if group else 0
        for closed, name, limit, of, key in (
                (self.closed_groups, job.group, most, f"of group {job.group} ", "its --max-concurrent"),
                (self.closed_users, job.user, config.max_running_per_user, f"of {job.user} ", "max_running_per_user"),
                (self.closed_users, None, config.max_running, "", "max_running")):
            count = self.counts[key, name] = self.counts.get((key, name), 0) + 1
            if limit and count >= limit:
                jobs, run = format_count(limit, "job"), "runs" if limit == 1 else "run"
                closed.setdefault(name, Reason("quota", name or key, f"{jobs} {of}{run}, as many as {key} allows"))


class MachineCapacity:
    """What one machine can still take."""

    def __init__(self, name: str, closed: Reason | None, cpu_slots: int, capacities: Iterable[GpuCapacity]) -> None:
        self.name, self.closed = name, closed
        self.cpu_slots = self.free_slots = cpu_slots
        self.gpus = [one for one in capacities if one.gpu.node == name and one.free > 0 and one.reason is None]
        self.load = (0.0, 0.0, 0)                               # of the jobs there: expected seconds left, GPUs, count

    def place(self, job: Job, config: GpuConfig, now: float) -> Sequence[GpuCapacity] | Reason:
        """The GPUs that a job gets here now, or why it gets none."""
        if self.closed and (job.gpus or self.name):     # on this machine that concerns its GPUs alone
            return self.closed
        if job.gpus:
            chosen = choose_gpus(job, self.gpus, config, now)
            return SHORTAGE if chosen is None else chosen
        if self.free_slots > 0:
            return ()
        return Reason("resources", "cpu_slots", f"all CPU slots of {self.name} are taken" if self.name else
                      f"all {self.cpu_slots} CPU slots are taken (cpu_slots)")

    def count(self, job: Job, left_s: float) -> None:
        """Count a job that runs here for `left_s` more seconds."""
        seconds, gpus, jobs = self.load
        self.load = seconds + left_s, gpus + job.gpus, jobs + 1
        self.free_slots -= not job.gpus

    def take(self, job: Job, chosen: Sequence[GpuCapacity], now: float) -> None:
        for one, share in zip(chosen, list_shares(job)):
            one.take(job, share, now)
        self.gpus = [one for one in self.gpus if one.free > 0]
        self.count(job, job.expected_time or 0.0)


class SlurmCapacity(MachineCapacity):
    """Slurm takes any job: jobs wait there for its GPUs.  One is submitted at a time, so that nexus's order holds."""

    def __init__(self, state: State, closed: Reason | None, most: int) -> None:
        there = sum(1 for job in state.live.values() if job.current.slurm_key)
        full = f"Slurm has {format_count(most, 'job')} of nexus, as many as [slurm] max_submitted allows"
        super().__init__("", closed or (Reason("quota", "max_submitted", full) if there >= most else None), 0, ())

    def place(self, job: Job, config: GpuConfig, now: float) -> Sequence[GpuCapacity] | Reason:
        return find_slurm_obstacle(job) or self.closed or ()

    def take(self, job: Job, chosen: Sequence[GpuCapacity], now: float) -> None:
        self.closed = Reason("resources", "slurm", "the job before it is being submitted to Slurm")


NOT_IN_SLURM = {                        # {field of a job that Slurm cannot carry out: why}
    "only_node": "wants a node, and where a job runs is Slurm's to choose",
    "preemptible": "is preemptible, and Slurm preempts by its own rules: qos in [slurm]",
    "warn": "wants a warning, which is Slurm's to send: --signal in [slurm] extra_args",
    **{name: f"wants {name}, and which GPUs a job gets is Slurm's to choose"
       for name in ("gpu_ids", "gpu_mem_mib", "cuda_arg")}}


def find_slurm_obstacle(job: Job) -> Reason | None:
    """Why Slurm can never run this job."""
    if job.gpus % 1:
        return Reason("never", "gpus", f"wants {format_gpus(job.gpus)}, and Slurm gives out whole ones")
    if job.gpu_type and (job.gpu_type.lower() == "full" or not re.fullmatch("[A-Za-z0-9_.-]+", job.gpu_type)):
        return Reason("never", "gpu_type", f"wants a GPU of type {job.gpu_type}, which cannot be a type in Slurm: "
                      "sinfo -o %G shows those that there are, like a100")
    return next((Reason("never", name, why) for name, why in NOT_IN_SLURM.items()
                 if getattr(job, name) not in (None, False)), None)


def plan(state: State, gpus: Sequence[Gpu], error: str | None, config: Config, now: float,
         nodes: Sequence[NodeView] = (), hold: str = "") -> Plan:
    """Decide which pending jobs start now and where, and why the others wait.

    `gpus`: as last observed.  `error`: why this machine's readings are unreliable; none of its GPUs is assigned then.
    `nodes`: the other machines.  `hold`: why nothing at all can start.  A job starts on the machine with the least load
    of those that can take it now.
    """
    is_slurm = config.jobs.launcher == "slurm"
    views = [NodeView("", config.jobs.cpu_slots, error), *([] if is_slurm else nodes)]
    folders = {one.name: one.folders for one in views}
    place = "slurm" if is_slurm else ""
    closed = {one.name: Reason("node-down", place or one.name, one.closed) if one.closed else None for one in views}
    capacities = list_capacities(state.running.values(), gpus, config.gpu, now, closed)
    quotas = Quotas(state, config.jobs)
    planned = Plan((), {}, quotas, tuple(capacities), closed, folders,
                   Reason("node-down", "", hold) if hold else find_pause(state))
    if planned.hold:
        return planned
    machines = {one.name: MachineCapacity(one.name, closed[one.name], one.cpu_slots, capacities) for one in views}
    if is_slurm:
        machines[""] = SlurmCapacity(state, closed[""], config.slurm.max_submitted)
    for job in state.running.values():
        if job.current.node in machines:
            machines[job.current.node].count(job, find_end(job, now) - now)
    starts: list[Start] = []
    preempted: list[tuple[str, str]] = []
    running = list(state.running.values())
    is_anyone_preemptible = any(job.preemptible for job in running)
    blocked: dict[tuple[Any, ...], Reason] = {}
    delays: list[float] = []
    used = count_use(state)
    classes = state.ready.copy()
    for one, job in walk_queue(state, classes, used):
        if (job.begin_at or job.retry_at) and (delay_s := find_delay_s(job, now)):
            delays.append(delay_s)
            continue
        request = request_class(job)
        if quotas.check(job.group, job.user) or request in blocked:
            del classes[one]
            continue
        open_to = [one for name, one in machines.items()
                   if is_slurm or (may_run_on(job, name) and not lacks_folder(job, folders[name]))]
        placed = place_job(job, open_to, config.gpu, now)
        if isinstance(placed, Reason):
            ends = None
            if is_anyone_preemptible and job.gpus and not job.preemptible:
                ends = preempt(job, [one.name for one in open_to if not one.closed], running, capacities, config.gpu,
                               now)
            if ends is not None:
                preempted += [(other.id, job.id) for other in ends]
                quotas.count(job)                   # it is about to start: no other preempts in its place
                add_use(used, job)
                continue
            blocked[request] = placed
            del classes[one]
            since = job.status_history[-1][1] if job.status_history else job.created_at
            if now - since >= config.jobs.reserve_after_seconds:
                reserve(job, capacities)
            continue
        machine, chosen = placed
        starts.append(Start(job.id, tuple(one.gpu.index for one in chosen), tuple(one.gpu.uuid for one in chosen),
                            machine.name, chosen[0].gpu.slice if chosen else None))
        machine.take(job, chosen, now)
        quotas.count(job)
        add_use(used, job)
    delayed_until = now + min(delays) if delays else None
    return replace(planned, starts=tuple(starts), preempted=tuple(preempted), blocked=blocked,
                   delayed_until=delayed_until)


def place_job(job: Job, machines: Iterable[MachineCapacity], config: GpuConfig,
              now: float) -> tuple[MachineCapacity, Sequence[GpuCapacity]] | Reason:
    """The machine with the least load that can take a job now, and the job's GPUs there; or why none can."""
    reasons: dict[Reason, None] = {}
    for machine in sorted(machines, key=lambda machine: machine.load):
        placed = machine.place(job, config, now)
        if not isinstance(placed, Reason):
            return machine, placed
        reasons[placed] = None
    if SHORTAGE in reasons or not reasons:
        return SHORTAGE
    return replace(next(iter(reasons)), detail="; ".join(reason.detail for reason in reasons))


def find_delay_s(job: Job, now: float) -> float:
    """Seconds until the --begin of a pending job, and the backoff after its last attempt, are over."""
    return max(0.0, (job.retry_at or now) - now, (job.begin_at or now) - now)


# Why a job waits

def list_reasons(job: Job, group: Group | None, planned: Plan, config: Config, now: float,
                 reader: str = "") -> list[Reason]:
    """Why a pending job, not in Slurm's queue, does not run now: all that holds it, or else what it waits for.

    `reader`: the user who is told of "your own jobs".
    """
    reasons = []
    if job.is_held:
        reasons.append(Reason("held", "job", f"it is held (nexus resume {job.id})"))
    if planned.hold:
        reasons.append(planned.hold)
    if group and group.hold:
        reasons.append(Reason("held", group.name, describe_hold(group)))
    if find_delay_s(job, now):
        begin_at = job.begin_at or now
        if begin_at > (job.retry_at or now):
            delay = Reason("begin-time", "begin_at", f"begins in {format_duration(begin_at - now)}, as asked")
        else:
            failure = describe_failure(job)
            delay = Reason("begin-time", "retry", f"{failure}; {describe_next_attempt(job, now)}")
        reasons.append(delay)
    if job.pending_dependencies:
        parents = format_jobs_there(job.pending_dependencies)
        reasons.append(Reason("dependency", ",".join(job.pending_dependencies), parents))
    if job.after_process:
        reasons.append(Reason("dependency", "pid", f"process {job.after_process[0]}"))
    return reasons or [find_shortage(job, planned, config, now, reader)]


def find_shortage(job: Job, planned: Plan, config: Config, now: float, reader: str) -> Reason:
    """What a job waits for that nothing holds."""
    if any(one.reserved_for == job.id for one in planned.gpus):     # for the others of its class these are taken
        return explain_shortage(job, planned, config.gpu, now, reader)
    quota = planned.quotas.check(job.group, job.user) if planned.quotas else None
    if quota:
        return quota
    request, blocked = request_class(job), planned.blocked or {}
    alike = job.user, job.preemptible, request          # for these it is the same
    if alike in blocked:
        return blocked[alike]
    reason = blocked.get(request) or Reason("resources", "", "it is about to start")
    if reason == SHORTAGE:
        reason = blocked[alike] = explain_shortage(job, planned, config.gpu, now, reader)
    return reason


def describe_failure(job: Job) -> str:
    """`attempt 4 failed (timeout)`; where the command did not run, or its machine went down, with the reason."""
    if not job.attempts:
        return "it failed"
    last = job.attempts[-1]
    words = f": {last.cause_line}" if last.cause in ("launch", REQUEUED) and last.cause_line else ""
    return f"attempt {job.attempt} failed ({last.cause}{words})"


def describe_next_attempt(job: Job, now: float) -> str:
    return f"it is tried again in {format_duration(max(0.0, (job.retry_at or now) - now))}"


def find_unshared(job: Job, gpus: Iterable[Gpu]) -> Reason | None:
    """Why none of these GPUs can be shared, if the job wants a share and may use some of them."""
    usable = [gpu for gpu in gpus if may_use(job, gpu) and gpu.compute_mode != PROHIBITED]
    if not usable or not job.gpus % 1 or job.exclusive or any(map(may_share, usable)):
        return None
    gpu = usable[0]
    where = f" on {gpu.node}" if gpu.node else ""
    return Reason("never", "compute_mode",
                  f"wants {format_asked(job)}, and each GPU is in compute mode {gpu.compute_mode}, for one process "
                  f"only; to share GPU {gpu.place}{where}: {DEFAULT_MODE.format(gpu.index)}")


def describe_place(job: Job, position: int, estimate: float | None, gpus: Sequence[GpuCapacity], config: JobsConfig,
                   now: float) -> list[str]:
    """The facts that `nexus why` prints of a pending job before its list of GPUs."""
    room = f" with {format_memory(job.gpu_mem_mib)} free on each" if job.gpu_mem_mib else ""
    only = f"; it accepts only GPU {format_indices(job.gpu_ids)} (--gpu-ids)" if job.gpu_ids is not None else ""
    facts = [f"{format_count(position, 'job')} before it in the queue" if position else "it is first in the queue",
             f"it asks for {format_asked(job)}{room}{only}"]
    if any(one.reserved_for == job.id for one in gpus):
        facts.append(f"it has waited for over {format_duration(config.reserve_after_seconds)}: GPUs are kept for it")
    if estimate is not None:
        facts.append(f"it will start in about {format_duration(max(0.0, estimate - now))}")
    return facts


def describe_holders(job: Job, capacities: Sequence[GpuCapacity], config: GpuConfig, reader: str) -> str:
    """`3 taken by your own jobs, 1 by bob`: who has how many of the GPUs that a job lacks; "" where no job runs there.

    Of other users' jobs the same words are for them and for who reads them, so these say names.
    """
    if not any(one.jobs for one in capacities):
        return ""
    counts: dict[str, int] = {}
    for one in capacities:
        others = [process.user or "somebody" for process in find_foreign(one.gpu, config)]
        holders = list(dict.fromkeys([other.user for other in one.jobs] or others))
        if holders:
            is_own = one.jobs and holders == [reader] == [job.user]
            words = "your own jobs" if is_own else " and ".join(holders)
            counts[words] = counts.get(words, 0) + 1
    return ", ".join(f"{count} by {words}" for words, count in counts.items()).replace(" by", " taken by", 1)


def describe_preemption(job: Job, planned: Plan, nodes: Iterable[str], config: GpuConfig, now: float) -> str:
    """`job abc is preemptible and may be stopped for it in 40s`; "" if the job does not wait for that."""
    stopped = {other for other, by in planned.preempted if by == job.id}
    ending = [one.id for capacity in planned.gpus if capacity.reserved_for == job.id for one in capacity.jobs
              if one.id in stopped or one.current.stop_cause == PREEMPTED]
    if ending:
        ids, when = list(dict.fromkeys(ending)), "being stopped for it"
    elif found := find_next_ends(job, planned, nodes, config, now):
        ids = [one.id for one in found[0]]
        when = f"preemptible and may be stopped for it in {format_duration(found[1])}"
    else:
        return ""
    return f"{format_jobs_there(ids)} {'is' if len(ids) == 1 else 'are'} {when}"


def explain_shortage(job: Job, planned: Plan, config: GpuConfig, now: float, reader: str) -> Reason:
    """Why a job does not get its GPUs, in short: how many are free, who has the others, and what blocks them else."""
    lacking = [name for name, paths in planned.folders.items() if may_run_on(job, name) and lacks_folder(job, paths)]
    machines = {name: [one.gpu for one in planned.gpus if one.gpu.node == name and not is_left_out(one.gpu, config)]
                for name in planned.machines if may_run_on(job, name) and name not in lacking}
    unable: dict[str, list[str]] = {}                   # {why: the machines that cannot run it}
    for name, why in job.excluded_nodes:
        unable.setdefault(why, []).append(name or "this machine")
    excluded_nodes = [f"{join_some(names)} cannot run it: {why}" for why, names in unable.items()]
    if lacking:
        excluded_nodes.append(
            f"the directory {format_line(job.cwd, 200)} does not exist on {join_some(lacking)}: "
            "make it there, or share it (NFS), or send the work tree along with --snapshot")
    if not machines and not lacking:
        return Reason("never", "node", "; ".join(excluded_nodes) or f"there is no node {job.only_node}")
    is_unknown = any(planned.machines[name] and not gpus for name, gpus in machines.items())    # a closed one may fit
    never = find_never(job, machines) or find_unshared(job, [gpu for gpus in machines.values() for gpu in gpus])
    if never and not is_unknown and not lacking:
        return never
    closed = [why.detail for name in machines for why in (planned.machines[name],) if why]
    verdicts = [(one, why) for one, why in list_verdicts(job, planned.gpus, config, now)
                if not planned.machines.get(one.gpu.node)]
    total, free = len(verdicts), sum(why is None for _, why in verdicts)
    only = verdicts[0][1] if total == 1 else None
    others = [f"GPU {one.gpu.place} {why.detail}"       # what no job can change
              for one, why in verdicts if why and why.subject == one.gpu.place and not only]
    nodes = [name for name in machines if not planned.machines[name]]
    preemption = describe_preemption(job, planned, nodes, config, now)
    note = describe_slices(job, (one.gpu for one in planned.gpus))
    taken = describe_holders(job, [one for one, why in verdicts if why], config, reader)
    where = " of one machine" if job.gpus > 1 and len(machines) > 1 else ""
    first = (f"needs {format_asked(job)}{where}; {free} of {total} {'is' if free == 1 else 'are'} free{note}"
             + (f"{';' if note else ':'} {taken}" if taken else ""))
    if only:
        first = f"GPU {verdicts[0][0].gpu.place} {only.detail}"
    return replace(only or SHORTAGE, detail="; ".join([
        *([first] if total else []), *filter(None, [preemption]), *list_some(others, 2), *closed, *excluded_nodes]))


# What becomes of a job whose attempt has ended

class Evidence(Value):
    """What is known of an attempt besides its exit code."""
    stderr: str = ""                            # the end of its stderr
    log_sizes: tuple[int, int] = (0, 0)         # of stdout.log and stderr.log, in bytes
    error: str | None = None                    # what went wrong with its logs
    samples: Usage = Usage()
    stdout: str = ""                            # the end of its stdout
    last_line: str | None = None                # the last line that it printed


def judge_end(job: Job, result: Result, evidence: Evidence, runtime_s: float, config: JobsConfig,
              now: float) -> tuple[str, dict[str, Any]]:
    """(the next status of a job whose attempt ended, the attempt's facts); `pending` means another attempt."""
    code = result.exit_code
    number = code - 128 if code is not None and 128 < code < 160 else None
    cause, line = find_cause(job, result, evidence, number)
    finished_at = max(min(result.finished_at or now, now), job.current.started_at or 0)     # another clock may be wrong
    notes = [evidence.error] if evidence.error and evidence.error != line else []
    facts = {"exit_code": code, "signal": number, "cause": cause, "cause_line": line, "finished_at": finished_at,
             "last_line": evidence.last_line, "runtime_seconds": runtime_s, "processes_left": None,
             "notes": add_notes(job.current.notes, notes), **vars(evidence.samples),
             "log_base": tuple(map(max, job.log_base, evidence.log_sizes))}
    if cause is None:
        return COMPLETED, facts
    if cause == "killed":
        return CANCELLED, facts
    if cause == PREEMPTED:                          # for a job that may wait, by nexus or by Slurm
        return PENDING, facts
    is_launch = cause == "launch"
    again = sum((attempt.cause == "launch") == is_launch for attempt in job.attempts[:-1]
                if attempt.cause not in (REQUEUED, PREEMPTED))
    is_over = again >= job.retries
    if is_launch:
        is_over = not (result.may_pass and again + 1 < config.launch_attempts)
    if is_over:
        return FAILED, facts
    return PENDING, {**facts, "retry_at": now + find_backoff_s(config.retry_backoff_seconds, again),
                     "exclusive": job.exclusive or cause == "cuda-oom"}


def find_backoff_s(first_s: float, count: int) -> float:
    """The backoff after an attempt, `count` such ones before it: it doubles each time, up to an hour."""
    return min(first_s * 2.0 ** min(count, 20), max(3600.0, first_s))


REBOOT_BACKOFF_S = 60.0         # for a job whose machine goes down with it for the second time


def find_reboot_backoff_s(job: Job) -> float:
    """The backoff of a job whose machine went down while it ran: none at first.  Each attempt is kept with the job."""
    count = sum(one.cause == REQUEUED and one.pid is not None for one in job.attempts[:-1])
    return find_backoff_s(REBOOT_BACKOFF_S, count - 1) if count else 0.0


def find_cause(job: Job, result: Result, evidence: Evidence, signal: int | None) -> tuple[str | None, str | None]:
    """(why an attempt failed, in one word; the line that says so); (None, None) for a success."""
    if job.current.stop_cause:
        return job.current.stop_cause, job.current.stop_line
    if result.cause:
        return result.cause, result.cause_line
    if result.exit_code == 0:
        return None, None
    if job.gpus and not evidence.error and (line := find_oom_line(evidence.stderr)):
        return "cuda-oom", line
    texts = [evidence.stderr] if signal else [evidence.stderr, evidence.stdout]
    line = next((line for text in texts for line in find_cause_lines(text, 1)), None)
    return "signal" if signal else "exit", evidence.error or line


LACK_OF_MEMORY = "killed (SIGKILL); the kernel ended a process for lack of memory in these seconds"


def explain_kill(job: Job, result: Result, before: int | None, now: int | None) -> Result:
    """The result of an attempt, with the kernel's lack of memory as its cause where SIGKILL ended it meanwhile.

    `before`, `now`: how many processes the kernel had ended for that at the last reading but one, and has now; None:
    unknown.
    """
    is_killed = result.exit_code == 128 + 9 and not result.cause and not job.current.stop_cause
    is_lacking = before is not None and now is not None and now > before
    return replace(result, cause="signal", cause_line=LACK_OF_MEMORY) if is_killed and is_lacking else result


# The processes of a job that must end, or whose command has ended

SHELLS = frozenset(("sh", "bash", "dash", "zsh", "fish", "ksh", "ash"))
WRAPPERS = frozenset((          # they end with the program that they run, and some pass each signal on to it
    "script", "env", "nice", "time", "timeout", "uv", "conda", "mamba", "micromamba"))
IDLE_WINDOW_S, IDLE_CPU = 20.0, 0.1     # processes idle that together used less of a core for so long


def choose_signaled(members: Sequence[Process], first_pids: Container[int], signaled: Container[int],
                    readers: Container[int]) -> list[Process]:
    """The processes of a job that get the first signal now: its programs, and not what these have started.

    It goes down through shells, which may have a trap, and through wrappers, to the first program of each branch.  The
    children of a program get it when that has ended, and who reads a pipe when its writer has ended: a program that
    saves its work needs both.  `first_pids`: the pids when it all began; what a trap starts later is spared with its
    shell.  `signaled`: who has got it.  `readers`: of Processes.find_readers().
    """
    pids, below = {process.pid for process in members}, dict[int, list[Process]]()
    for process in members:
        if process.pid in first_pids:
            below.setdefault(process.parent, []).append(process)
    chosen, todo = [], [process for process in members if process.parent not in pids]
    for process in todo:                        # it grows
        children = below.get(process.pid, [])
        if process.name in SHELLS or process.name in WRAPPERS:
            todo += children
        if process.name not in WRAPPERS or not children:
            chosen.append(process)
    return [process for process in chosen if process.pid not in signaled and process.pid not in readers]


def choose_warned(members: Sequence[Process], catchers: Container[int], signal: str) -> list[Process]:
    """The first of each branch that handles a signal: a trainer, and not torchrun above it or its data loaders below.

    A wrapper handles it only to end, or to pass it on, and bash handles INT always: what handles it below them counts.
    `members`: parents first.  `catchers`: the pids of those that handle it; the others would die of it.
    """
    parents, above = {process.pid: process.parent for process in members}, set[int]()
    for process in members:
        pid = process.parent if process.pid in catchers else 0
        while pid in parents and pid not in above:
            above.add(pid)
            pid = parents[pid]
    chosen, below = [], set[int]()
    for process in members:
        is_between = process.name in WRAPPERS or (process.name in SHELLS and signal == "INT")
        if process.parent in below:
            below.add(process.pid)
        elif process.pid in catchers and not (is_between and process.pid in above):
            chosen.append(process)
            below.add(process.pid)
    return chosen


def choose_session(members: Iterable[Process], session: int | None) -> list[Process]:
    """The processes of a session, and what they have started.  `members`: parents first."""
    chosen = dict[int, Process]()
    for process in members:
        if process.session == session or process.parent in chosen:
            chosen[process.pid] = process
    return list(chosen.values())


class Work(Value):
    """The CPU time that processes use together."""
    ticks: Mapping[int, int] = {}                       # {pid: its CPU ticks at the last reading}
    readings: tuple[tuple[float, int], ...] = ()        # (monotonic, ticks since the first), back to IDLE_WINDOW_S

    def add(self, processes: Iterable[Process], now: float) -> Work:
        ticks = {process.pid: process.cpu_ticks for process in processes}
        used = sum(max(0, count - self.ticks.get(pid, 0)) for pid, count in ticks.items()) if self.readings else 0
        readings = (*self.readings, (now, used + (self.readings[-1][1] if self.readings else 0)))
        late = sum(at <= now - IDLE_WINDOW_S for at, _ in readings)
        return Work(ticks, readings[max(0, late - 1):])

    def is_idle(self, tick_s: float) -> bool:
        """Whether they used less than IDLE_CPU over IDLE_WINDOW_S.  `tick_s`: seconds of a CPU tick."""
        (began_at, before), (now, used) = self.readings[0], self.readings[-1]
        return now - began_at >= IDLE_WINDOW_S and (used - before) * tick_s < IDLE_CPU * IDLE_WINDOW_S


# What becomes of a job that Slurm has

class Claim(Value):
    """Whose an attempt is: its job.sh's, or with pid 0 the service's, which keeps a late job.sh from beginning."""
    pid: int
    started: int                                # clock ticks since boot
    began: int | None = None                    # when its job.sh had its GPUs, before checkout and conda; None: not yet
    is_open: bool = False                       # it is empty: its job.sh is about to write it, or was ended before


OPEN_CLAIM, OUR_CLAIM = Claim(0, 0, is_open=True), Claim(0, 0)
ENDED_EARLY = "its job.sh was ended before it began"


def match_slurm_jobs(live: Iterable[Job], jobs: Sequence[SlurmJob]) -> dict[str | None, SlurmJob]:
    """{slurm_key: Slurm's job}.  An id alone proves little: after a crash, slurmctld may give it to another job."""
    by_key, by_id = {one.key: one for one in jobs if one.key}, {one.id: one for one in jobs if one.key is None}
    asked = [(job.current.slurm_key, job.current.slurm_id) for job in live]
    pairs = ((key, by_key.get(key or "") or by_id.get(slurm_id or "")) for key, slurm_id in asked)
    return {key: one for key, one in pairs if key and one}


def decide(seen: SlurmJob | None, claim: Claim | None, result: Result | None, over_s: float, line: str,
           folder: str) -> Requeue | Result | None:
    """What became of a job that has been over, or unknown to Slurm, for `over_s` seconds; None: too early to say.

    `claim`: of its attempt; a service's keeps its job.sh from beginning.  `line`: the most telling line of slurm.log.
    """
    state = seen.state if seen else ""
    if not result and claim and claim.is_open and state in ("", "COMPLETED", "FAILED", REQUEUED_BY_SLURM):
        return Requeue(ENDED_EARLY) if over_s >= 60.0 else None         # the text may be late, like a result
    if not result and (claim == OUR_CLAIM if claim else state in ("", REQUEUED_BY_SLURM)):
        return Requeue(f"Slurm has not begun it as {seen.id}" if seen else "Slurm does not have it")
    # A shared file system may show the result late, and slurmctld may yet have the job killed that it requeues.
    wait_s = 60.0 if claim and state in ("COMPLETED", REQUEUED_BY_SLURM) else 3.0
    if result or over_s >= wait_s or state in ("NODE_FAIL", "BOOT_FAIL"):
        return make_slurm_end(seen, claim, result, line, folder)
    return None


def make_slurm_end(seen: SlurmJob | None, claim: Claim | None, result: Result | None, line: str, folder: str) -> Result:
    """How an attempt ended: as Slurm says if Slurm ended it, else as its result says.

    A job that wrote its result was not ended by the failure of its node, or of slurmctld, unless slurmstepd says so.
    """
    words, cause = f"Slurm: {line}" if line else "", SLURM_ENDS[seen.state] if seen else None
    slurmstepd_cause = next((cause for pattern, cause in SLURM_KILLS if re.search(pattern, line)), None)
    if not cause and not (seen and result):
        cause = slurmstepd_cause
    if result and (result.cause or not cause or (cause == "node-fail" and not slurmstepd_cause)):
        return result
    node = f" on {seen.nodes}" if seen and seen.nodes else ""
    reason = f" ({seen.reason})" if seen and seen.reason not in ("", "None", "NonZeroExitCode") else ""
    was = f"Slurm: job {seen.id} was {seen.state}{reason}{node}" if seen else ""
    ended_at, started_at = (seen.ended_at, seen.started_at) if seen else (None, None)
    took_s = max(0.0, ended_at - started_at) if ended_at and started_at else None
    if cause:
        return replace(result or Result(None, ended_at, took_s), cause=cause, cause_line=words or was)
    if claim and claim.pid:
        return Result(None, ended_at, took_s, "session-lost",
                      words or f"its job.sh was killed{node}: the exit code is not known")
    advice = f", and its job.sh did not begin: {folder} must be on a file system that the nodes share" if node else ""
    return Result(None, ended_at, 0.0, "launch", was + advice + (f" ({words})" if words else ""))


GROUP_FAILURES = 3              # a group is held if this many of its first jobs all fail soon


def count_group_end(group: Group, status: str, cause: str | None, is_soon: bool, line: str, has_pending: bool) -> Group:
    """The group after one of its jobs has ended.  If the first GROUP_FAILURES jobs all fail soon, the rest is held."""
    if group.failures < 0 or group.hold or cause in ("killed", "dependency"):
        return group
    if status != FAILED or not is_soon:
        return replace(group, failures=-1)
    failures = group.failures + 1
    if failures < GROUP_FAILURES:
        return replace(group, failures=failures)
    hold = (f"its first {failures} jobs failed soon after their start, the last with: {line} "
            f"(fix the error, then: nexus resume --group {group.name})")
    return replace(group, failures=0, hold=hold if has_pending else None)


class Ended(Value):
    """An ended attempt, as the guard against bad GPUs remembers it."""
    gpu_uuids: tuple[str, ...]
    command: str                # or the name of the script that came with the job: such jobs have the same command
    is_success: bool
    is_soon: bool               # it failed within guard_seconds of its start
    started_at: float


def find_bad_gpu(ended: Sequence[Ended], uuid: str, config: GpuConfig) -> str | None:
    """Why a GPU should get no more jobs: its jobs fail soon, one after the other, and such jobs run well elsewhere.

    A failure counts only if the same program has meanwhile succeeded on other GPUs, and has not failed on them.
    """
    import itertools
    def program(end: Ended) -> list[str]:       # all jobs of a sweep have the same
        return end.command.split()[:2]
    there = (end for end in reversed(ended) if uuid in end.gpu_uuids and (end.is_success or end.gpu_uuids == (uuid,)))
    latest = list(itertools.takewhile(operator.attrgetter("is_soon"), there))       # since the last other end
    if not config.guard_failures or len(latest) < config.guard_failures:
        return None
    since = min((end.started_at for end in latest), default=0.0)
    elsewhere = [end for end in ended if uuid not in end.gpu_uuids and end.started_at >= since]
    faulty = [program(end) for end in elsewhere if end.is_soon]
    good = [program(end) for end in elsewhere if end.is_success]
    counted = [end for end in latest if program(end) in good and program(end) not in faulty]
    if len(counted) < config.guard_failures or len({end.command for end in counted}) < 2:
        return None
    return (f"{len(counted)} jobs in a row failed there within {config.guard_seconds:g} s of their start, "
            "and run elsewhere")


# When pending jobs will start: the scheduler in simulated time

MAX_ESTIMATED_STEPS = MAX_ESTIMATED_JOBS = 500
OVERDUE = 0.25                  # of the expected run time: the end of a job that exceeds it by more is unknown


def estimate_starts(jobs: Iterable[Job], groups: Iterable[Group], run_times: Mapping[str, float | None],
                    gpus: Sequence[Gpu], config: Config, now: float,
                    nodes: Sequence[NodeView] = ()) -> dict[str, float]:
    """{id of a pending job: when it will start, UTC epoch seconds}, for the jobs whose start can be estimated.

    `jobs`: the running and the first pending jobs, in order.  `run_times`: the whole run time of each, None if unknown.
    A job of unknown run time never ends here; once one has started, later starts get no estimate.
    """
    state, estimates, ends = State(), dict[str, float](), dict[str, float]()        # {job id: start}, {job id: end}
    for group in groups:
        state.put(Put("groups", group.name, group))
    for job in jobs:
        state.put(Put("jobs", job.id, job))
        age, run_s = find_age(job, now), run_times.get(job.id)
        if job.status == RUNNING and run_s is not None and age <= (1 + OVERDUE) * run_s:
            ends[job.id] = now + abs(run_s - age)       # x seconds over its time, it needs x more
    held = {uuid for job in state.running.values() for uuid in job.current.gpu_uuids}
    # Inside a container no process shows: all use is the jobs', and ends with them
    gpus = [replace(gpu, memory_used_mib=None) if gpu.uuid in held and not gpu.processes else gpu for gpu in gpus]
    for _ in range(MAX_ESTIMATED_STEPS):
        planned = plan(state, gpus, None, config, now, nodes)
        for start in planned.starts:
            begun = begin_attempt(state.jobs[start.job_id], started_at=now, gpu_indices=start.gpu_indices,
                                  gpu_uuids=start.gpu_uuids, node=start.node)
            state.put(change_status(begun, RUNNING, now))
            estimates[start.job_id] = now
            ends[start.job_id] = now + (run_times.get(start.job_id) or 0.0)
        times = [at for at in (*ends.values(), planned.delayed_until) if at is not None]
        if not times or any(run_times.get(start.job_id) is None for start in planned.starts):
            break
        now = max(now, min(times))
        for job_id in [job_id for job_id, at in ends.items() if at <= now]:
            del ends[job_id]
            for change in end_job(state, state.jobs[job_id], COMPLETED, now):
                state.put(change)
    return estimates


def know_run_times(jobs: Iterable[Job], finished: Iterable[Job]) -> dict[str, float | None]:
    """{job id: run time in seconds}: its submitter's, else the median of its command, else of its group."""
    import statistics
    past: dict[tuple[str, str | None], list[float]] = {}
    for job in finished:
        if job.status == COMPLETED and job.current.runtime_seconds is not None:
            past.setdefault(("command", job.command), []).append(job.current.runtime_seconds)
            past.setdefault(("group", job.group), []).append(job.current.runtime_seconds)
    known: dict[str, float | None] = {}
    for job in jobs:
        like = past.get(("command", job.command)) or (past.get(("group", job.group)) if job.group else None)
        known[job.id] = statistics.median(like[-100:]) if like and job.expected_time is None else job.expected_time
    return known


# ==== 7. VIEWS ==== values to what people and programs read: JSON of the API, tables, the coloured snapshot

def round_known(number: float | None) -> float | None:
    return None if number is None else round(number, 1)


# Jobs and GPUs in JSON.  These tables have every key with its meaning, and are shown in openapi.json: the fields of the
# value class that are not hidden, and what is computed.

def object_ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


SHOWN_FIELDS = {cls: {name: row for name, row in cls.FIELDS.items() if not row.hidden}
                for cls in (Job, Attempt, Gpu, GpuProcess)}


# Most fields of a value are not given, and have their defaults.
DEFAULT_FIELDS = {cls: {name: None if row.default is ... else row.default for name, row in rows.items()}
                  for cls, rows in SHOWN_FIELDS.items()}
FORMATTED_FIELDS = {cls: {name: format_time if row.schema is TIME else round_known for name, row in rows.items()
                          if row.schema is TIME or row.schema is FLOAT} for cls, rows in SHOWN_FIELDS.items()}


def fields_json(shown: Job | Attempt | Gpu | GpuProcess) -> dict[str, Any]:
    """The fields of a value that its JSON has: times as text, measurements rounded."""
    defaults, formats, given = DEFAULT_FIELDS[type(shown)], FORMATTED_FIELDS[type(shown)], vars(shown)
    found = {**defaults, **{name: given[name] for name in given if name in defaults}}
    for name in formats:
        if found[name] is not None:
            found[name] = formats[name](found[name])
    return found


PROCESS = SHOWN_FIELDS[GpuProcess]
GPU = {
    **SHOWN_FIELDS[Gpu],
    "node": Field(STRING, "the machine it is in"),
    "place": Field(STRING, "what commands call it: 0, or n1:0 on a node"),
    "memory_total": Field(or_null(STRING), "its memory, like 24GB"),
    "memory_used": Field(or_null(STRING), "its memory in use, like 1GB"),
    "job_id": Field(or_null(JOB_ID), "the first job that has it"),
    "job_ids": Field(list_of(JOB_ID), "all jobs that have it or a share of it"),
    "allocated": Field(FLOAT, "how much of it jobs have, 0 to 1"),
    "state": Field(one_of("Unknown", "Fault", "Paused", "Busy", "Available", "In use", "Unavailable"),
                   "all of this in a word"),
    "is_available": Field(FLAG, "the next job could have all of it"),
    "unavailable": Field(or_null(STRING), "why no further job may have it, like `is paused`"),
    "used_by": Field(or_null(STRING), "who else uses it"),
    "processes": Field(list_of(object_ref("Process")), "what computes on it"),
}
ATTEMPT = {
    "attempt": Field(INTEGER, "its number; 0 before the first"),
    "node": Field(or_null(STRING), "the machine it ran on; null: this one", "public"),
    **SHOWN_FIELDS[Attempt],
    "gpu_places": Field(list_of(STRING), "its GPUs as commands name them; 0.1 is MIG slice 1 of card 0", "public"),
    "runtime_seconds": Field(or_null(FLOAT), "how long it ran, or has run by now", "public"),
    "stopped_by": Field(or_null(STRING), "who wanted its end"),
    "outcome": Field(or_null(STRING), "how it ended, in a word or two: exit 3, SIGSEGV, killed"),
}
# A job: its present state, what was asked for, and its last attempt
JOB: dict[str, Field] = {
    "status": Field(STATUS, "pending, then running, then one of the others", "public"),
    "position": Field(or_null(INTEGER), "how many pending jobs are before it", "public"),
    "waiting_for": Field(or_null(STRING), "why it does not run now"),
    "reason": Field({"type": "object"}, "the same for programs: {code, subject, detail}; what is in the way is the "
                    f"subject, and the code is one of {', '.join(REASON_CODES)}"),
    "estimated_start": Field(or_null(TIME), "when it will run, as far as is known", "public"),
    **SHOWN_FIELDS[Job],
    **ATTEMPT,
    "attempt": Field(INTEGER, "the number of its last attempt; 0 before the first"),
    "gpu_index": Field(or_null(INTEGER), "the first of its GPUs", "public"),
    "stopping": Field(or_null(STRING), "it is to be stopped, for this cause"),
    "attempts": Field(list_of(object_ref("Attempt")), "all that began"),
    "status_history": Field(
        list_of({"type": "array", "prefixItems": [STATUS, or_null(TIME)], "minItems": 2, "maxItems": 2}),
        "[[status, since when], ...]"),
    "unknown_since": Field(or_null(TIME), "since when nothing is known of it: its node cannot be reached"),
    "idle_since": Field(or_null(TIME), "since when its GPUs do nothing, if that is for [jobs] idle_minutes"),
    "rss_mib": Field(or_null(FLOAT), "memory of its processes now, as in peak_rss_mib"),
    "cpu_percent": Field(or_null(FLOAT), "CPU in use now"),
    "unrecorded": Field(or_null(STRING), "how it has ended, while it counts as running: the disk takes no record"),
}
PUBLIC_JOB_KEYS = frozenset(name for name, row in JOB.items() if row.public)
# Of a job that does not run, these depend on the queue, the plan and the machines; all else on the job alone.
QUEUE_KEYS = ("position", "waiting_for", "reason", "estimated_start")
PLANNED_JOB_KEYS = (*QUEUE_KEYS, "only_node", "node")
PLAIN_JOB_KEYS = {"status", *PLANNED_JOB_KEYS, *SHOWN_FIELDS[Job]} - ATTEMPT.keys() - {"labels"} | {"node"}
OVERVIEW_JOB_KEYS = (                           # what GET /status?after= has of a job
    "status", "id", "command", "user", "gpus", "name", "group", "only_node", "node", "gpu_places", "started_at",
    "finished_at", "runtime_seconds", "processes_left", "stopping", "unknown_since", "idle_since", "outcome",
    "cause_line", "waiting_for", "is_held", "estimated_start", "last_line", "unrecorded")
OVERVIEW_GPU_KEYS = ("uuid", "name", "profile", "node", "place", "state", "job_ids", "memory_total_mib", "is_paused",
                     "is_available", "unavailable", "used_by", "fault")
GPU_READINGS = ("memory_used_mib", "utilization", "utilization_mean", "temperature", "power_watts")
PUBLIC_NODE_KEYS = ("name", "gpus", "gpu_names", "running_jobs", "is_reachable", "is_leaving", "unknown_since")


def hide_private(shown: Mapping[str, Any], public: Container[str]) -> dict[str, Any]:
    """A job or node in JSON as other users see it: the keys that are not public are null."""
    return {key: content if key in public else None for key, content in shown.items()}


SIGNAL_NAMES = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
                8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM",
                15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS"}


def get_outcome(attempt: Attempt) -> str | None:
    if attempt.finished_at is None:
        return None
    if attempt.cause == "signal" and attempt.signal:
        return SIGNAL_NAMES.get(attempt.signal, f"signal {attempt.signal}")
    if attempt.cause == "killed" and not attempt.started_at:
        return "removed"
    if attempt.cause not in (None, "exit"):
        return attempt.cause
    return None if attempt.exit_code is None else f"exit {attempt.exit_code}"


def attempt_json(attempt: Attempt, now: float) -> dict[str, Any]:
    runtime_s = attempt.runtime_seconds
    if attempt.started_at is not None and attempt.finished_at is None:
        runtime_s = max(0.0, now - attempt.started_at)
    return {"attempt": attempt.number, "node": attempt.slurm_node or attempt.node or None, **fields_json(attempt),
            "gpu_places": list(attempt.gpu_places),
            "runtime_seconds": None if runtime_s is None else round(runtime_s, 3), "stopped_by": attempt.stop_by,
            "outcome": get_outcome(attempt)}


NO_ATTEMPT_JSON = attempt_json(NO_ATTEMPT, 0.0)


def place_json(job: Job, node: str | None) -> dict[str, Any]:
    """`node`: its machine, by that machine's own name."""
    return {"only_node": node if job.only_node == "" else job.only_node, "node": node}


def job_json(job: Job, now: float, node: str | None, **known: Any) -> dict[str, Any]:
    """A job as the API shows it, never with its environment.  `known`: keys that the job does not hold itself."""
    last = job.current
    current = {**(NO_ATTEMPT_JSON if last is NO_ATTEMPT else attempt_json(last, now)),
               **{key: known[key] for key in known if key in ATTEMPT}}
    return {
        "status": job.shown_status, "position": None, "waiting_for": None, "reason": None, "estimated_start": None,
        **fields_json(job), "labels": dict(job.labels), **current, "attempt": job.attempt, **place_json(job, node),
        "gpu_index": last.gpu_indices[0] if last.gpu_indices else None,
        "stopping": None if job.status in FINAL else last.stop_cause,
        "attempts": [current if one is last else attempt_json(one, now)
                     for one in job.attempts if one.started_at is not None],
        "status_history": [[status, format_time(at)] for status, at in job.status_history],
        "unknown_since": None, "idle_since": None, "rss_mib": None, "cpu_percent": None, "unrecorded": None,
        **known}


def pick_json(job: Job, now: float, node: str | None, fields: Sequence[str], **known: Any) -> dict[str, Any]:
    """These fields of job_json().  The others are not made, unless one of these is computed from more than the job."""
    if not PLAIN_JOB_KEYS.issuperset(fields):
        return pick(job_json(job, now, node, **known), fields)
    found = {"status": job.shown_status, **place_json(job, node), **dict.fromkeys(QUEUE_KEYS), **known}
    for name in fields:
        if name not in found:
            fact, make = getattr(job, name), FORMATTED_FIELDS[Job].get(name)
            found[name] = make(fact) if make and fact is not None else fact
    return pick(found, fields)


class JobTexts:
    """Texts of the JSON of jobs that do not run, for who may see all of them, or for everybody else.

    What depends on the job alone is made once for each version of the job, and kept.  Most of it is alike for many jobs
    and is kept once.
    """

    def __init__(self, is_public: bool) -> None:
        self.is_public = is_public
        self.forget()

    def forget(self) -> None:
        self.kept: dict[str, tuple[Job, str, str]] = {}     # {id: (job, its own keys and contents, the others')}
        self.usual: dict[str, Any] = {}                     # the first job's
        self.others: dict[tuple[str, ...], str] = {}        # {keys that a job has for itself: text of the others}

    def format(self, job: Job, planned: Mapping[str, Any], most: int) -> str:
        """`planned`: its PLANNED_JOB_KEYS.  `most`: how many texts are kept."""
        known = self.kept.get(job.id)
        if known is None or known[0] is not job:
            if len(self.kept) >= most:                      # also of jobs that are forgotten
                self.forget()
            known = self.kept[job.id] = job, *self.format_lasting(job)
        _, own, others = known
        shown = hide_private(planned, PUBLIC_JOB_KEYS) if self.is_public else planned
        return f"{{{encode_json(shown)[1:-1]},{own}{others}}}"

    def format_lasting(self, job: Job) -> tuple[str, str]:
        whole = job_json(job, 0.0, None)
        shown = hide_private(whole, PUBLIC_JOB_KEYS) if self.is_public else whole
        for key in PLANNED_JOB_KEYS:
            del shown[key]
        usual = self.usual = self.usual or shown
        own = {key: content for key, content in shown.items() if content != usual[key]} or {"id": job.id}
        keys = tuple(own)
        if keys not in self.others:
            rest = {key: content for key, content in self.usual.items() if key not in own}
            self.others[keys] = f",{encode_json(rest)[1:-1]}" if rest else ""
        return encode_json(own)[1:-1], self.others[keys]


def make_patch(old: Any, new: Any) -> Any:
    """What makes one document of another: its JSON merge patch (RFC 7396).  {}: nothing."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**{key: make_patch(old.get(key), new[key]) for key in new if old.get(key) != new[key]},
            **{key: None for key in old if key not in new}}


def reason_json(reason: Reason) -> dict[str, str]:
    return {"code": reason.code, "subject": reason.subject, "detail": reason.detail}


def pick(shown: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: shown[name] for name in names}


SUBMITTED_KEYS = ("status", "created_at", "started_at", "finished_at", "exit_code", "cause", "waiting_for",
                  "expected_time")
SUBMITTED_FROM = ("id", "user", "node", "labels", "position", *SUBMITTED_KEYS)      # what submitted_json() reads


def submitted_json(job: Mapping[str, Any], node_numbers: Mapping[str | None, int]) -> dict[str, Any]:
    """A job's JSON in the words of /api."""
    labels = job["labels"] or {}
    return {"job_id": job["id"], "node_id": node_numbers.get(job["node"]), "queue_position": job["position"],
            "user_id": job["user"], "competition_id": labels.get("competition_id"),
            "project_id": labels.get("project_id"), **pick(job, SUBMITTED_KEYS)}


def gpu_json(gpu: Gpu, state: State, config: GpuConfig, trouble: str | None, node: str = "",
             closed: str | None = None) -> dict[str, Any]:
    """A GPU as GET /status shows it.

    `trouble`: why its machine's readings are unreliable; `closed`: why that machine gets no job.
    """
    held = [(job, share) for job in state.running.values()
            for uuid, share in zip(job.current.gpu_uuids, list_shares(job)) if uuid == gpu.uuid]
    jobs, job_ids = [job for job, _ in held], [job.id for job, _ in held]
    foreign, unseen, why = find_foreign(gpu, config), find_unseen(gpu, jobs, config), find_gpu_reason(gpu, config, jobs)
    users, obstacle = describe_users(foreign, unseen) if foreign or unseen else None, why.detail if why else closed
    states = (("Unknown", trouble), ("Fault", gpu.fault), ("Paused", gpu.is_paused), ("Busy", jobs),
              ("Available", not obstacle), ("In use", users), ("Unavailable", True))
    return {
        **fields_json(gpu), "node": node, "place": gpu.place,
        "memory_total": format_gb(gpu.memory_total_mib), "memory_used": format_gb(gpu.memory_used_mib),
        "job_id": job_ids[0] if job_ids else None, "job_ids": job_ids,
        "allocated": sum(share for _, share in held) / 100, "state": next(word for word, holds in states if holds),
        "is_available": not (jobs or obstacle or trouble),
        "unavailable": obstacle or (None if jobs or not trouble else "cannot be read"),
        "used_by": None if gpu.fault or (gpu.is_paused and not jobs) else users,
        "processes": [fields_json(process) for process in gpu.processes]}


# Text.  The command line makes it from the API's replies.

# White is bold: the terminal's default colour is readable on its background, and white is not on a light one.
COLOURS = {"white": "1", "green": "92", "bright": "1", "cyan": "36", "blue": "34", "yellow": "33", "red": "31",
           "magenta": "35"}


class Paint:
    """Makes the text for a terminal from lines that may hold other people's words, with or without colours.

    `mark` is an unguessable word, or empty for no colours.  It stands for the escape character until join() has cleaned
    the lines: nexus's own colours stay, and escape sequences in a job's command or in a reply from NEXUS_URL do not.
    `width`, `height`: the terminal's columns and lines; 0 for a file or a pipe, where nothing is cut.
    """

    def __init__(self, mark: str, width: int = 0, height: int = 0) -> None:
        self.mark, self.width, self.height = mark, width, height

    def __call__(self, colour: str, text: str) -> str:
        return f"{self.mark}[{COLOURS[colour]}m{text}{self.mark}[0m" if self.mark and text and colour else text

    def join(self, lines: Iterable[str]) -> str:
        """The lines with their newlines.  Everything that the command line prints passes here."""
        clean = "".join("\t".join(map(format_line, line.split("\t"))) + "\n" for line in lines)
        return clean.replace(self.mark, "\x1b") if self.mark else clean


def local_time(stamp: str | None, pattern: str = "%H:%M") -> str:
    """A UTC time of the API in the reader's time zone; `-` for none."""
    return "-" if stamp is None else time.strftime(pattern, time.localtime(parse_time(stamp)))


def format_history(status: Json) -> str:
    """`History: 61 jobs completed, 7 failed, 2 cancelled`."""
    others = [f", {status[f'{word}_jobs']} {word}" for word in (FAILED, CANCELLED) if status[f"{word}_jobs"]]
    return f"History: {format_count(status['completed_jobs'], 'job')} completed{''.join(others)}"


def format_snapshot(status: Json, paint: Paint) -> str:
    """The output of `nexus`."""
    paused, url = "[PAUSED]" if status["is_paused"] else "[RUNNING]", status.get("url", "")
    queued = f"Queue: {format_count(status['queued_jobs'], 'job')} pending"
    lines = [f"{paint('blue', queued)} {paint('yellow', paused)}",
             paint("white", format_history(status)),
             *([] if is_usual(url) else [f"Page: {url}"]), ""]
    slurm = status.get("slurm")
    if slurm:
        submitted = format_count(slurm["handed_jobs"] + slurm["running_jobs"], "job")
        heading = paint("white", f"Slurm ({slurm['cluster']}):" if slurm["cluster"] else "Slurm:")
        lines.append(f"{heading} {submitted} of nexus there, {slurm['running_jobs']} running")
        lines += [paint("red", slurm["trouble"])] if slurm["trouble"] else []
        for partition in slurm["partitions"]:
            state = paint("green" if partition["state"] == "up" else "red", partition["state"])
            lines.append(f"Partition {partition['name']}{' (default)' if partition['is_default'] else ''}: {state}, "
                         f"{partition['gpus_used']} of {format_count(partition['gpus'], 'GPU')} in use, "
                         f"time limit {partition['time_limit']}")
    else:
        lines.append(paint("white", "GPUs:"))
    gpu_lines = list_gpu_lines(status, paint)
    if status["gpu_trouble"]:
        lines.append(paint("red", status["gpu_trouble"]))
    lines += gpu_lines or ([] if status["gpu_trouble"] or slurm else ["none"])
    on_gpus = {job_id for gpu in status["gpu_status"] for job_id in gpu["job_ids"]}
    running = status["running_jobs"]
    elsewhere = {
        "Running there:": [job for job in running if job["slurm_id"]],
        "CPU:": [job for job in running if not job["slurm_id"] and not job["gpus"]],
        "On GPUs that cannot be seen now:": [
            job for job in running if not job["slurm_id"] and job["gpus"] and job["id"] not in on_gpus]}
    for heading, jobs in elsewhere.items():
        lines += ["", paint("white", heading)] if jobs else []
        lines += [line for job in jobs for line in format_running(job, paint, bool(status["nodes"]))]
    lines += ["", *(f"hint: {hint}" for hint in status["hints"])] if status["hints"] else []
    return paint.join(lines)


def list_gpu_lines(status: Json, paint: Paint) -> list[str]:
    """The GPUs of all machines; of a node that gets no jobs, the reason and the GPUs with jobs."""
    jobs = {job["id"]: job for job in status["running_jobs"]}
    lines = [line for gpu in status["gpu_status"] if not status["nodes"] or gpu["node"] == status["nodes"][0]["name"]
             for line in format_gpu(gpu, jobs, paint)]
    for node in status["nodes"][1:]:
        gpus, state = [gpu for gpu in status["gpu_status"] if gpu["node"] == node["name"]], describe_node_state(node)
        if state != "ok":
            lines.append(paint("red" if node["unknown_since"] else "yellow", f"{node['name']}: {state}"))
            lines += [f"  {node['hint']}"] if node["hint"] else []
            gpus = [gpu for gpu in gpus if gpu["job_ids"]]
        lines += [line for gpu in gpus for line in format_gpu(gpu, jobs, paint)]
    return lines


def describe_node_state(node: Json) -> str:
    why = node["trouble"] or ""
    if node["unknown_since"]:
        return f"unknown since {local_time(node['unknown_since'], '%m-%d %H:%M')}{why and f': {why}'}"
    return "is being removed: it gets no more jobs" if node["is_leaving"] else why or "ok"


def format_gpu(gpu: Json, jobs: Mapping[str, Json], paint: Paint) -> list[str]:
    what = ", ".join(part for part in (gpu["name"], gpu["memory_total"]) if part)
    header = paint("white", f"GPU {gpu['place']} ({what}):")
    running = [line for job_id in gpu["job_ids"] if job_id in jobs for line in format_running(jobs[job_id], paint)]
    if running:
        note = paint("red", gpu["fault"]) if gpu["fault"] else paint("yellow", "[PAUSED]") if gpu["is_paused"] else ""
        others = [f"  Also used by: {paint('yellow', gpu['used_by'])}"] if gpu["used_by"] else []
        return [f"{header} {note}".rstrip(), *running, *others]
    text = describe_idle_gpu(gpu)
    colour = {"Available": "green", "Fault": "red"}.get(gpu["state"], "" if gpu["used_by"] else "yellow")
    return [f"{header} {paint(colour, text[:1].upper() + text[1:])}"]


def describe_idle_gpu(gpu: Json) -> str:
    """`available`, `in use by bob (pid 4242 python)`, or why no job may have it."""
    if gpu["is_available"]:
        return "available"
    if gpu["used_by"]:
        return f"in use by {gpu['used_by']}"
    return str(gpu["unavailable"] or "is not available").removeprefix("is ")


def format_running(job: Json, paint: Paint, has_node: bool = False) -> list[str]:
    """`has_node`: show its machine."""
    runtime = format_duration(job["runtime_seconds"] or 0)
    stopping = "".join(f" ({word})" for word in list_states(job))
    if job["unknown_since"]:
        stopping += paint("red", f" unknown since {local_time(job['unknown_since'], '%m-%d %H:%M')}")
    share = [f"  GPUs: {format_known(job['gpus'], '', 2)}"] if job["gpus"] % 1 else []
    command = format_line(name_or_command(job), paint.width and max(20, paint.width - 11))
    return [f"  Job ID: {paint('magenta', job['id'])}{stopping}",
            *([f"  Node: {job['node']}"] if has_node else []), *share,
            f"  Command: {paint('bright', command)}",
            *([f"  Slurm: {job['slurm_id']} on {job['node']}"] if job["slurm_id"] else []),
            f"  Runtime: {paint('cyan', runtime)}", f"  Started: {paint('cyan', local_time(job['started_at']))}"]


def list_states(job: Json) -> list[str]:
    """What is special about a running job."""
    count = job["processes_left"]
    left = "1 process goes on" if count == 1 else f"{count} processes go on"
    return [*([f"stopping: {job['stopping']}"] if job["stopping"] else []),
            *([f"its command has ended, {left}"] if count else []),
            *([f"idle for {show_idle(job)}"] if job["idle_since"] else []),
            *([job["unrecorded"]] if job["unrecorded"] else [])]


def show_idle(job: Json) -> str:
    began_at, idle_since = parse_time(job["started_at"]), parse_time(job["idle_since"])
    return format_duration(max(0.0, (job["runtime_seconds"] or 0.0) - (idle_since - began_at)))


def describe_host(host: Json) -> str:
    """`CPU 12%, memory 31 of 64GB`."""
    if host["memory_total_gb"] is None:
        return "CPU and memory unknown: psutil is not installed"
    memory = f"{format_known(host['memory_used_gb'], '')} of {format_known(host['memory_total_gb'], 'GB')}"
    return f"CPU {format_known(host['cpu_percent'], '%', 0)}, memory {memory}"


def format_detailed(status: Json, health: Json, paint: Paint) -> str:
    """`nexus status --detailed`."""
    bands, host = status["queued_by_priority"], status["host"]
    lines = [
        paint("white", "nexus status"), "=" * 50, f"Version: {status['version']}",
        f"Status: {'paused' if status['is_paused'] else 'running'}",
        f"Uptime: {status['uptime_seconds']:.0f} seconds ({format_duration(status['uptime_seconds'])})",
        f"Jobs Processed: {status['completed_jobs'] + status['failed_jobs']}", "",
        paint("white", "Queue Status:"), f"  Total Jobs: {status['queued_jobs']}",
        *(f"  {band.title()} Priority: {bands[band]}" for band in PRIORITIES), "",
        paint("white", "GPU Resources:"), *("  " + paint("red", why) for why in [status["gpu_trouble"]] if why),
        *(describe_gpu_use(gpu, paint) for gpu in status["gpu_status"])]
    if status["nodes"]:
        lines += ["", paint("white", "Nodes:"), *(
            f"  {node['name']}: {format_count(node['gpus'], 'GPU')}, {format_count(node['running_jobs'], 'job')}, "
            + paint("red" if node["unknown_since"] else "bright", describe_node_state(node))
            for node in status["nodes"])]
    lines += ["", f"Host: {host['name']}, {describe_host(host)}",
              "", f"Active Jobs: {len(status['running_jobs'])}"]
    for job in status["running_jobs"]:
        memory = (f", memory {format_known(job['rss_mib'] and job['rss_mib'] / 1024, 'GB')}, "
                  f"CPU {format_known(job['cpu_percent'], '%')}")
        gpus = f"GPUs: [{format_indices(job['gpu_places'])}]" if job["gpu_places"] else "no GPU"
        lines.append(f"  {paint('magenta', job['id'])}: {paint('bright', name_or_command(job))}"
                     f" ({job['node'] + ', ' if status['nodes'] else ''}"
                     f"{gpus}{memory})")
    lines += ["", f"Health: {paint('green', 'HEALTHY') if health['is_healthy'] else paint('red', 'UNHEALTHY')}"]
    return paint.join(lines + [f"hint: {hint}" for hint in status["hints"]])


def describe_gpu_use(gpu: Json, paint: Paint) -> str:
    allocated = f"{gpu['allocated'] * 100:.0f}% allocated"
    if gpu["is_paused"]:
        allocated = paint("yellow", "PAUSED") + (f", {allocated}" if gpu["job_ids"] else "")
    readings = [f"memory {gpu['memory_used']} of {gpu['memory_total']}" if gpu["memory_used"] else "memory unknown",
                *(words.format(gpu[key]) for key, words in (
                    ("utilization", "{:.0f}% busy"), ("temperature", "{:.0f}°C"), ("power_watts", "{:.0f} W"))
                  if gpu[key] is not None)]
    why = "" if gpu["job_ids"] or gpu["is_paused"] or not gpu["unavailable"] else f"; {gpu['unavailable']}"
    why += f"; also used by {gpu['used_by']}" if gpu["job_ids"] and gpu["used_by"] else ""
    return f"  GPU {gpu['place']}: {allocated} ({', '.join(readings)}){why}"


class Column(Value):
    heading: str
    show: Callable[[Any], str]                              # row -> cell
    colour: str = ""
    shown_if: Callable[[Sequence[Any]], bool] | None = None     # whether these rows need the column; None: always
    spare: int = 0              # on a narrow terminal, the columns with the highest are left out first; 0: never


LAST_WIDTH, MOST_WIDTH = 24, 24         # on a terminal: least width of the last column, most width of the others


def format_table(columns: Iterable[Column], rows: Sequence[Any], paint: Paint, below: Sequence[str] = ()) -> str:
    """Columns padded to their widest cell; the last one takes the rest of the line.

    `below`: on a terminal, a line under each row.
    """
    import textwrap
    width = paint.width
    shown = [column for column in columns if column.shown_if is None or column.shown_if(rows)]
    cells_of = {}
    for column in shown:
        most = min(MOST_WIDTH, max(16, width // 5)) if width and column is not shown[-1] else 0
        cells_of[column.heading] = [column.heading, *(format_line(column.show(row), most) for row in rows)]
    sizes = {heading: max(map(count_columns, cells)) for heading, cells in cells_of.items()}
    least = min(LAST_WIDTH, sizes[shown[-1].heading])
    for column in sorted(shown[:-1], key=lambda column: -column.spare):
        if column.spare and width and width - sum(sizes[other.heading] + 2 for other in shown[:-1]) < least:
            shown.remove(column)
    last = max(20, width - sum(sizes[column.heading] + 2 for column in shown[:-1])) if width else 0
    lines = []
    for number in range(len(rows) + 1):
        line = []
        for column in shown:
            cell = cells_of[column.heading][number]
            cell = format_line(cell, last) if column is shown[-1] else (
                cell + " " * (sizes[column.heading] - count_columns(cell)))
            line.append(paint(column.colour if number else "white", cell))
        lines.append("  ".join(line).rstrip())
        if number and width and below:
            lines += textwrap.wrap(below[number - 1], max(20, width), initial_indent="     ", subsequent_indent="     ")
    return paint.join(lines)


def name_or_command(job: Json) -> str:
    if job["command"] is None:                  # another user's job, seen with a token
        return f"({job['user']}'s)"
    return f"{job['name']}: {job['command']}" if job["name"] else str(job["command"])


def format_priority(priority: int) -> str:
    return next((name for name, number in PRIORITIES.items() if number == priority), str(priority))


def field_column(heading: str, key: str, spare: int = 0, colour: str = "", show: Callable[[Any], str] = str) -> Column:
    """A column that is shown when a row has a value for it."""
    return Column(heading, lambda row: "-" if row[key] is None else show(row[key]), colour,
                  lambda rows: any(row[key] is not None for row in rows), spare)


def time_column(heading: str, key: str, spare: int) -> Column:
    return field_column(heading, key, spare, "cyan", lambda stamp: local_time(stamp, "%m-%d %H:%M"))


ID_COLUMN = Column("ID", lambda job: job["id"], "magenta")
RESULT_COLUMN = Column("RESULT", lambda job: "unknown" if job["unknown_since"] else job["outcome"] or "-")
RUNTIME_COLUMN = field_column("RUNTIME", "runtime_seconds", 1, "cyan", format_duration)
LAST_COLUMNS = (
    Column("USER", lambda job: job["user"], shown_if=lambda jobs: len({job["user"] for job in jobs}) > 1, spare=2),
    field_column("GROUP", "group", 4), field_column("NAME", "name", 0, "bright"),
    Column("COMMAND", lambda job: f"({job['user']}'s)" if job["command"] is None else job["command"], "bright"))
QUEUE_COLUMNS = (
    ID_COLUMN,
    Column("PRIORITY", lambda job: format_priority(job["priority"]),
           shown_if=lambda jobs: any(job["priority"] != 1 for job in jobs)),
    Column("NODE", lambda job: job["only_node"] or "any", shown_if=lambda jobs: any(job["only_node"] for job in jobs)),
    Column("GPUS", lambda job: format_known(job["gpus"], "", 2)),
    time_column("ADDED", "created_at", 5), time_column("STARTS", "estimated_start", 1), *LAST_COLUMNS)
QUEUE_FIELDS = ("id", "priority", "only_node", "gpus", "created_at", "estimated_start", "user", "group", "name",
                "command", "waiting_for")               # what the columns of format_queue() show
JOB_COLUMNS = (
    ID_COLUMN,
    Column("STATUS", lambda job: job["status"]),
    Column("NODE", lambda job: job["node"] or "-", shown_if=lambda jobs: (      # when several machines are involved
        len({job["node"] for job in jobs}) > 1 or any(job["only_node"] for job in jobs))),
    Column("GPU", lambda job: format_indices(job["gpu_places"]) or "-"),
    RESULT_COLUMN, RUNTIME_COLUMN,
    time_column("STARTED", "started_at", 5), time_column("FINISHED", "finished_at", 6), *LAST_COLUMNS)


def format_queue(jobs: Sequence[Json], paint: Paint) -> str:
    """On a terminal, a reason stands below the jobs that share it; in a file it is the last column."""
    reasons = [job["waiting_for"] or "" for job in jobs]
    below = [reason if reason != former else "" for reason, former in zip(reasons, ["", *reasons])]
    last = [] if paint.width else [Column("WAITING FOR", lambda job: job["waiting_for"] or "")]
    return format_table([*QUEUE_COLUMNS, *last], jobs, paint, below)


def format_jobs(jobs: Sequence[Json], paint: Paint) -> str:
    """On a terminal, a failed job's last line stands below it, and how one ended that is not recorded yet."""
    below = [format_line(job["cause_line"] or job["unrecorded"] or "", max(20, paint.width - 5)) for job in jobs]
    if not paint.width:
        jobs = [{**job, "status": "; ".join(filter(None, [job["status"], job["unrecorded"]]))} for job in jobs]
    return format_table(JOB_COLUMNS, jobs, paint, below)


# `nexus top`: a row for each GPU; below them what waits, with one row for a group

def format_cell(number: float | None, unit: str) -> str:
    return "-" if number is None else f"{number:.0f}{unit}"


TOP_COLUMNS = (                                 # of (GPU or {}, job or {})
    Column("GPU", lambda row: row[0].get("place", "-")),
    Column("TYPE", lambda row: row[0].get("profile") or row[0].get("name", "-"), spare=4, shown_if=lambda rows: (
        len({gpu["name"] for gpu, _ in rows if gpu}) > 1)),
    Column("UTIL", lambda row: format_cell(row[0].get("utilization"), "%"), spare=1),
    Column("MEMORY", lambda row: f"{row[0]['memory_used'] or '-'}/{row[0]['memory_total'] or '-'}" if row[0] else "-",
           spare=1),
    Column("TEMP", lambda row: format_cell(row[0].get("temperature"), "C"), spare=2),
    Column("POWER", lambda row: format_cell(row[0].get("power_watts"), "W"), spare=3),
    Column("JOB", lambda row: row[1].get("id", "-"), "magenta"),
    Column("RUNTIME", lambda row: format_duration(row[1]["runtime_seconds"] or 0) if row[1] else "-", "cyan"),
    Column("COMMAND", lambda row: describe_run(*row), "bright"),
)
WAITING_COLUMNS = (
    replace(ID_COLUMN, heading="WAITING"),
    Column("GPUS", lambda job: "-" if job["gpus"] is None else format_known(job["gpus"], "", 2), spare=1),
    Column("STARTS", lambda job: local_time(job["estimated_start"]), "cyan", spare=2),
    Column("COMMAND", name_or_command, "bright"),
    Column("WHY", lambda job: job["waiting_for"] or ""),
)
FINISHED_COLUMNS = (
    replace(ID_COLUMN, heading="FINISHED"), RESULT_COLUMN, RUNTIME_COLUMN, Column("COMMAND", name_or_command, "bright"))


def list_top(status: Json, waiting: Sequence[Json], more: int, groups: Sequence[Json], finished: Sequence[Json],
             paint: Paint) -> list[tuple[str, str]]:
    """[(line, the id of its job, or empty)].

    `waiting`: the first pending jobs that are in none of `groups`, the reply of GET /groups; `more`: how many follow.
    """
    def add_table(columns: Iterable[Column], rows: Sequence[Any], ids: Iterable[str]) -> None:
        shown.extend(zip(format_table(columns, rows, paint).split("\n"), ["", *ids]))

    host = status["host"]
    lines = [paint("white", f"{host['name']}  {describe_host(host)}"),
             paint("blue", f"Queue: {format_count(status['queued_jobs'], 'job')} pending ")
             + paint("yellow", "[PAUSED]" if status["is_paused"] else "[RUNNING]")
             + f"  {format_history(status)}",
             *(paint("red", f"{name}: see nexus health") for name in status["bad_checks"][:1]), ""]
    jobs = {job["id"]: job for job in status["running_jobs"]}
    rows = [(gpu, job) for gpu in status["gpu_status"]
            for job in [jobs[job_id] for job_id in gpu["job_ids"] if job_id in jobs] or [{}]]
    on_gpus = {job["id"] for _, job in rows if job}
    rows += [({}, job) for job in status["running_jobs"] if job["id"] not in on_gpus]
    shown = [(line, "") for line in paint.join(lines).split("\n")[:-1]]
    if rows:
        add_table(TOP_COLUMNS, rows, [job.get("id", "") for _, job in rows])
    else:
        shown.append(("no job runs", ""))
    waiting_groups = [
        {"id": "group", "position": group["position"] or 0, "gpus": None, "estimated_start": None, "name": None,
         "command": group["name"], "waiting_for": describe_group(group)}
        for group in groups if group[PENDING] or group[RUNNING]]
    if waiting_groups or waiting:
        waiting = sorted([*waiting_groups, *waiting], key=operator.itemgetter("position"))
        shown.append(("", ""))
        add_table(WAITING_COLUMNS, waiting, [row["id"] if row["id"] != "group" else "" for row in waiting])
        shown += [(f"… {format_count(more, 'more job')}", "")] if more > 0 else []
    if finished:
        shown.append(("", ""))
        add_table(FINISHED_COLUMNS, finished, [job["id"] for job in finished])
    return shown


def describe_group(group: Json) -> str:
    """`40 jobs: 3 running, 12 completed, 1 failed, 24 pending; paused by ann`."""
    total = sum(group[status] for status in STATUSES)
    statuses = (RUNNING, COMPLETED, FAILED, CANCELLED, PENDING)
    counts = [f"{group[status]} {status}" for status in statuses if group[status]]
    return f"{format_count(total, 'job')}: {', '.join(counts)}" + (f"; {group['hold']}" if group["hold"] else "")


def describe_run(gpu: Json, job: Json) -> str:
    if not job:
        return describe_idle_gpu(gpu)
    words = [*(["GPU paused"] if gpu.get("is_paused") else []),
             *([f"also used by {gpu['used_by']}"] if gpu.get("used_by") else []), *list_states(job),
             *(["unknown, its node is not reached"] if job["unknown_since"] else [])]
    return "".join(f"({word}) " for word in words) + name_or_command(job)


def format_attempt(attempt: Json) -> str:
    """`exit 3 on GPU 0 of n1, 2024-10-24 15:30:15, 5s (the last line of its stderr)`."""
    place = format_place(attempt["gpu_places"], attempt["node"])
    line = f" ({attempt['cause_line']})" if attempt["cause_line"] else ""
    return (f"{attempt['outcome'] or 'running'}{place}, {local_time(attempt['started_at'], '%Y-%m-%d %H:%M:%S')}, "
            f"{format_duration(attempt['runtime_seconds'] or 0)}{line}")


def format_place(gpu_places: Sequence[str], node: str | None) -> str:
    """` on GPU 0 of n1`, ` on n1`, or nothing."""
    gpus = f"GPU {format_indices(gpu_places)}" if gpu_places else ""
    return f" on {' of '.join(filter(None, [gpus, node]))}" if gpus or node else ""


def show_time(stamp: str) -> str:
    return local_time(stamp, "%Y-%m-%d %H:%M:%S")


show_percent = "{:.0f}%".format


def show_fact(fact: Any) -> str:
    if isinstance(fact, (list, tuple)):
        return ", ".join(map(str, fact))
    if isinstance(fact, dict):
        return ", ".join(f"{name} {text}" for name, text in fact.items())
    return "yes" if fact is True else str(fact)


# {heading: {key of a job: (its line, what makes the text in it)}}.  All that may be asked for has a line.
SHOW_LINES: Mapping[str, Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "Asked for": {
        **{name: (name.replace("_", " ") + ": {}", show_fact) for name, row in JOB_FIELDS.items() if row.asked},
        "cwd": ("directory: {}", str), "gpus": ("GPUs: {}", lambda gpus: format_known(gpus, "", 2)),
        "gpu_ids": ("only GPUs: {}", show_fact), "gpu_mem_mib": ("GPU memory: {} free on each", format_memory),
        "priority": ("priority: {}", format_priority), "timeout_seconds": ("time limit: {}", format_duration),
        "expected_time": ("expected time: {}", format_duration), "only_node": ("only on: {}", str),
        "begin_at": ("not before: {}", show_time), "conda": ("conda environment: {}", str),
        "cuda_arg": ("set --cuda: {}", show_fact), "tty": ("terminal: {}", show_fact),
        "labels": ("labels: {}", show_fact), "user": ("user: {}", str)},
    "Where and when": {
        "waiting_for": ("waits: {}", str), "position": ("jobs before it: {}", str),
        "estimated_start": ("starts about: {}", show_time), "retry_at": ("next attempt: {}", show_time),
        "created_at": ("submitted: {}", show_time), "started_at": ("started: {}", show_time),
        "place": ("where: {}", str), "others": ("also on {}", str), "finished_at": ("ended: {}", show_time),
        "runtime_seconds": ("runtime: {}", format_duration), "unknown_since": ("nothing known since: {}", show_time),
        "slurm_id": ("Slurm's job: {}", str), "session": ("screen session: {}", str), "pid": ("process: {}", str),
        "log_dir": ("logs: {}", str), "history": ("history: {}", str)},
    "How it ended": {
        "exit_code": ("exit code: {}", str), "signal": ("signal: {}", lambda one: SIGNAL_NAMES.get(one, str(one))),
        "cause": ("cause: {}", str), "cause_line": ("because: {}", str), "stopped_by": ("stopped by: {}", str),
        "notes": ("notes: {}", lambda notes: "; ".join(notes)), "retried_as": ("run again as: {}", str)},
    "What it used": {
        "peak_rss_mib": ("peak memory {}", format_memory), "rss_mib": ("memory {} now", format_memory),
        "cpu_seconds": ("CPU time {}", format_duration), "cpu_percent": ("CPU {} now", show_percent),
        "peak_gpu_mem_mib": ("GPU memory up to {}", format_memory),
        "mean_gpu_util": ("GPUs {} busy on average", show_percent)}}


def form_rows() -> list[dict[str, Any]]:
    """The fields of the page's forms: `first` are shown at once, the others on demand."""
    forms = {"add": ASKED, "pending": EDITS, "running": LIVE_CHANGES, "retry": CHANGES}
    labels = {name: text.partition(":")[0] for name, (text, _) in SHOW_LINES["Asked for"].items()}
    labels.update(begin="not before", env="variables", llm="LLM", node="only on", max_concurrent="most at once")
    return [{"name": name, "help": re.sub(r" \(default: [^)]*\)|[;,] default: [^)]*", "", row.help),
             "like": row.like, "first": row.form,
             "forms": [form for form, names in forms.items() if name in names],
             "label": labels.get(name, name)[0].upper() + labels.get(name, name)[1:],
             "type": "string" if row.text else row.schema["type"]}
            for name, row in ASKED.items() if row.flag or name in ("command", "env")]


def show_rows() -> dict[str, dict[str, tuple[str, str]]]:
    """{heading: {key of a job: (its line, which function of the page makes the text in it)}}."""
    forms = {show_time: "clock", format_duration: "duration", format_memory: "size", show_percent: "percent",
             format_priority: "priority"}
    return {heading: {key: (text, forms.get(show, "text")) for key, (text, show) in rows.items()}
            for heading, rows in SHOW_LINES.items()}


def format_job(job: Json, paint: Paint, last_lines: Sequence[str] = (), gpus: Iterable[Json] = ()) -> str:
    """The output of `nexus show ID`: what SHOW_LINES has words for, and the last lines that it printed.

    `gpus`: all that there are now.
    """
    lines = [f"{paint('white', 'Job ' + job['id'])}: {job['status']}"
             + (f" ({job['outcome'] or '-'})" if job["status"] in FINAL else "")
             + "".join(f"; {state}" for state in list_states(job))]
    # One attempt alone is told by the other lines.
    attempts = job["attempts"] if len(job["attempts"]) > 1 or job["status"] == PENDING else []
    facts: dict[str, Any] = {
        **job, "place": format_place(job["gpu_places"], job["node"])[4:] if job["started_at"] else "",
        "others": "; ".join(f"GPU {gpu['place']}: {gpu['used_by']}" for gpu in gpus
                            if job["id"] in gpu["job_ids"] and gpu["used_by"]),
        "history": ", ".join(f"{status} {local_time(at, '%H:%M:%S')}" for status, at in job["status_history"])}
    if job["status"] in FINAL:
        facts.update(session=None, pid=None, retry_at=None)
    for heading, rows in SHOW_LINES.items():
        found = []
        for key, (text, show) in rows.items():
            fact = facts.get(key)
            if fact or (fact == 0 and fact is not False and key != "retries"):      # other zeros are facts
                colour = {"command": "bright", "unknown_since": "red"}.get(key, "cyan" if show == show_time else "")
                found.append(f"  {paint(colour, text.format(show(fact)))}")
        found += [f"  attempt {attempt['attempt']}: {format_attempt(attempt)}"
                  for attempt in attempts if heading == "How it ended"]
        lines += [paint("white", heading), *found] if found else []
    lines += [paint("white", "Last lines"), *(f"  {line}" for line in last_lines)] if last_lines else []
    if job["idle_since"]:
        lines.append(f"Its GPUs do nothing.  If it waits for an answer: nexus attach {job['id']}")
    return paint.join(lines)


def format_why(reply: Json, paint: Paint) -> str:
    """The output of `nexus why ID`: the decision, and its reasons GPU by GPU."""
    verb = "waits" if reply["status"] == PENDING else f"is {reply['status']}"
    lines = [f"{paint('white', 'Job ' + reply['id'])} {verb}: {reply['why']}",
             *(f"  {fact}" for fact in reply["facts"])]
    return paint.join(lines + [f"  {line}" for line in format_verdicts(reply["gpus"], paint)])


def format_verdicts(gpus: Iterable[Json], paint: Paint) -> list[str]:
    free = paint("green", "it could have this one")
    return [f"GPU {gpu['place']}: {gpu['verdict'] or free}" for gpu in gpus]


USAGE_SINCE = "7d"              # where nobody says since when
USAGE = {
    "user": Field(STRING, "by user: whose jobs"),
    "group": Field(STRING, "by group: of which group; `-`: of none; `(other)`: forgotten jobs of further groups"),
    "jobs": Field(INTEGER, "how many jobs ran"),
    "ended": Field(INTEGER, "how many of them are over"),
    "failed": Field(INTEGER, "how many of these failed"),
    "gpu_hours": Field(FLOAT, "GPUs, times the hours for which jobs had them"),
    "cpu_job_hours": Field(FLOAT, "how long jobs without a GPU ran, together"),
    "forgotten_since": Field(or_null(TIME), "since when its forgotten jobs count, where that is earlier than asked: "
                             f"of them days are whole, and after {USAGE_DAYS} days months; null: nothing is earlier"),
}


def usage_json(state: State, by: str, since: float, now: float,
               may_see: Callable[[str], bool]) -> list[dict[str, Any]]:
    """GET /usage: a row for each user, or for each group whose name the caller may see."""
    totals: dict[str, tuple[int, UsageSums, float]] = {}
    for user, group, jobs, sums, begin in list_usage(state, since, now):
        if by == "user" or may_see(user):
            name = user if by == "user" else group or "-"
            count, total, first = totals.get(name, (0, UsageSums(), since))
            totals[name] = count + jobs, total + sums, min(first, begin)
    return [{by: name, "jobs": count, "ended": total.completed + total.failed + total.cancelled,
             "failed": total.failed, "gpu_hours": total.gpu_seconds / 3600,
             "cpu_job_hours": total.cpu_job_seconds / 3600,
             "forgotten_since": format_time(begin) if begin < since else None}
            for name, (count, total, begin) in sorted(totals.items(), key=lambda item: -item[1][1].gpu_seconds)]


def make_metrics(status: Json, jobs: Sequence[Json]) -> dict[str, Any]:
    """The data of `nexus metrics`: run times of finished jobs, utilization in percent over the last hour."""
    import statistics
    times = [job["runtime_seconds"] for job in jobs if job["started_at"] and job["runtime_seconds"] is not None]
    return {
        "total_jobs": len(jobs), "mean_runtime_seconds": round(statistics.mean(times), 3) if times else None,
        "median_runtime_seconds": round(statistics.median(times), 3) if times else None,
        "by_status": {status: sum(job["status"] == status for job in jobs) for status in FINAL},
        "gpus": status["gpu_status"]}


def format_metrics(metrics: Json, paint: Paint) -> str:
    by_status = ", ".join(f"{count} {status}" for status, count in metrics["by_status"].items() if count)
    lines = [paint("white", "Performance Metrics"), "=" * 30,
             f"Total Jobs: {metrics['total_jobs']}{by_status and f' ({by_status})'}",
             f"Avg Execution Time: {format_known(metrics['mean_runtime_seconds'], 's')}",
             f"Median Execution Time: {format_known(metrics['median_runtime_seconds'], 's')}",
             "", paint("white", "GPU Utilization (last hour):")]
    for gpu in metrics["gpus"]:
        mean, peak = format_known(gpu["utilization_mean"], "%"), format_known(gpu["utilization_peak"], "%")
        paused = f" ({paint('yellow', 'PAUSED')})" if gpu["is_paused"] else ""
        lines.append(f"  GPU {gpu['place']}: {mean} avg, {peak} peak{paused}")
    return paint.join(lines + ([] if metrics["gpus"] else ["  none"]))


# The OpenAPI 3.1 document

API_DESCRIPTION = """A job queue for the GPUs of one machine, and of others that it reaches by ssh.

Whoever calls from this machine as the owner of the service needs no token; everybody else sends one as
`Authorization: Bearer TOKEN`.  The owner's may do all; a user's may submit, read, and cancel its own jobs, and sees of
others' jobs only that they are there: the rest is null.  Every refusal is the object Error.

`GET /status?after=0` replies with all that one looks at: GPUs, running jobs, the first ones that wait (or their
groups), the last that ended, failures, counts.  `?after=STATE_VERSION` replies when something of that has changed, at
the latest after 15 seconds, with the changes as a JSON merge patch (RFC 7396: null is what has gone), or with all of
it when it says `is_whole`.  A choice by text, status, user or group restricts the lists, `limit` their length.

The machines under /api have numbers: 0 is this one, then come the nodes in the order of GET /nodes."""


FORM = {
    "type": "object", "title": "a script, and what it needs", "required": list(FORM_FIELDS),
    "additionalProperties": False, "properties": {
        "code": {**STRING, "contentMediaType": "application/octet-stream", "description": "the script"},
        "config_file": {**STRING, "contentMediaType": "application/yaml", "examples": ["expected_time: 10\n"],
                        "description": f"lines like expected_time: 10; its keys are {', '.join(FORM_KEYS)}"}}}
BODIES = {                                      # {name: schema} of request bodies
    "Submission": SUBMISSION, "Edit": EDIT, "Choice": CHOICE, "CancelChoice": CANCEL, "RetryChoice": RETRY,
    "NodeAdded": NODE, "Form": FORM,
    "Submissions": {"title": "a job, or a list of jobs",
                    "anyOf": [object_ref("Submission"), list_of(object_ref("Submission"), 1, MAX_JOBS)],
                    "examples": SUBMISSION["examples"]}}
ERROR = {
    "error": Field(one_of(*KINDS), "; ".join(f"{kind}: {meaning}" for kind, (_, _, meaning) in KINDS.items())),
    "message": Field(STRING, "what was tried, on what, and why it failed"),
    "hint": Field(STRING, "what to do next"),
}


def object_schema(rows: Mapping[str, Field], public: Container[str] | None = None) -> Schema:
    """The schema of a reply with these keys.  `public`: the keys that are not null for other users; None: all."""
    properties = {}
    for name, row in rows.items():
        is_nullable = row.default is None or (public is not None and name not in public)
        properties[name] = {**(or_null(row.schema) if is_nullable else row.schema), "description": row.help}
    return {"type": "object", "properties": properties}


OBJECTS = {                                     # {name: schema} of replies; those not here are described in words only
    "Job": object_schema(JOB, PUBLIC_JOB_KEYS), "Attempt": object_schema(ATTEMPT), "Gpu": object_schema(GPU),
    "Process": object_schema(PROCESS), "Error": object_schema(ERROR), "Usage": object_schema(USAGE),
    "Status": object_schema({"gpu_status": Field(list_of(object_ref("Gpu")), "the GPUs of all machines")})}


def make_openapi(routes: Sequence[Any], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.summary:
            paths.setdefault(route.pattern, {})[route.method.lower()] = make_operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "nexus", "version": version, "description": API_DESCRIPTION, "license": {"name": "MIT"}},
        "servers": [{"url": "/"}], "security": [{}, {"bearer": []}], "paths": paths,
        "components": {
            "schemas": {**OBJECTS, **BODIES},
            "responses": {"Error": {"description": "refused, or failed", "content": make_content("Error")}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "a token of nexus token create"}}}}


def make_operation(route: Any) -> dict[str, Any]:
    answer = {"description": route.summary, "content": make_content(route.answer)}
    operation = {
        "operationId": re.sub(r"\W+", "_", route.method.lower() + route.pattern).strip("_"),
        "summary": route.summary + (" (the owner alone)" if route.access == "owner" else ""),
        "parameters": [{
            "name": name, "in": row.place, "required": row.place == "path", "description": row.help,
            "schema": row.schema}
            for name, row in route.parameters.items()],
        "responses": {**{str(status): answer for status in route.statuses},
                      "default": {"$ref": "#/components/responses/Error"}}}
    if route.body:
        operation["requestBody"] = {"required": True, "content": make_content(route.body)}
    return operation


def make_content(content: str) -> dict[str, Any]:
    """{media type: {"schema": schema}} of a reply or body: a media type, an object's name, or `Job[]` for a list."""
    if not content or "/" in content:
        return {content: {"schema": STRING}} if content else {}
    name = content.removesuffix("[]")
    schema: Schema = {"type": "object", "title": name}
    if name in OBJECTS or name in BODIES:
        schema = object_ref(name)
    media_type = "multipart/form-data" if name == "Form" else "application/json"
    return {media_type: {"schema": schema if name == content else list_of(schema)}}


# Prometheus' text format, version 0.0.4.  Source: https://prometheus.io/docs/instrumenting/exposition_formats/

GPU_METRICS = (                                 # name, help, key of the GPU, one of it in the metric's unit
    ("memory_used_bytes", "GPU memory in use, by whomever.", "memory_used_mib", 2**20),
    ("memory_total_bytes", "GPU memory there is.", "memory_total_mib", 2**20),
    ("utilization_ratio", "Utilization of the GPU as the driver tells it, 0 to 1.", "utilization", 0.01),
    ("temperature_celsius", "Temperature of the GPU.", "temperature", 1),
    ("power_watts", "Power the GPU draws.", "power_watts", 1),
    ("allocated_ratio", "How much of the GPU nexus has given to jobs, 0 to 1.", "allocated", 1),
)

Samples = Sequence[tuple[Mapping[str, str], float]]     # (labels, number)


def list_metrics(status: Json, health: Json,
                 end_counts: Mapping[tuple[str, str], int]) -> Iterator[tuple[str, str, Samples]]:
    """(name, help, samples) of each metric.

    `status`, `health`: the replies of GET /status and GET /health.
    `end_counts`: {(status, cause): jobs that have ended since the service began}.
    """
    gpus = [({"node": gpu["node"], "gpu": gpu["place"].rpartition(":")[2], "name": gpu["name"],
              "uuid": gpu["uuid"].removeprefix(f"{gpu['node']}/")}, gpu)      # as its driver says it, and others there
            for gpu in status["gpu_status"]]
    for name, help, key, unit in GPU_METRICS:
        yield f"nexus_gpu_{name}", help, [(labels, gpu[key] * unit) for labels, gpu in gpus if gpu[key] is not None]
    yield "nexus_node_up", "1 when the machine can be reached: this one, and each node.", [
        ({"node": node["name"]}, node["is_reachable"]) for node in status["nodes"]]
    yield "nexus_jobs", "Jobs that wait or run.", [
        ({"status": PENDING}, status["queued_jobs"]), ({"status": RUNNING}, len(status["running_jobs"]))]
    yield "nexus_queue_paused", "1 when the whole queue is paused.", [({}, status["is_paused"])]
    yield "nexus_jobs_finished_total", "Jobs that have ended; no cause for completed ones.", [
        ({"status": word, "cause": cause}, count) for (word, cause), count in end_counts.items()]
    yield "nexus_check_ok", "The checks of GET /health: 1 when well.", [
        ({"check": check["name"]}, check["is_ok"]) for check in health["checks"]]


def format_prometheus(metrics: Iterable[tuple[str, str, Samples]]) -> str:
    lines, escapes = [], str.maketrans({"\\": r"\\", "\n": r"\n", '"': r'\"'})
    for name, help, samples in metrics:
        lines += [f"# HELP {name} {help}", f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"]
        for labels, number in samples:
            text = ",".join(f'{label}="{word.translate(escapes)}"' for label, word in labels.items())
            lines.append(f"{name}{{{text}}} {number + 0}" if text else f"{name} {number + 0}")      # True + 0 is 1
    return "\n".join([*lines, ""])


def format_health(health: Mapping[str, Any], paint: Paint) -> str:
    lines = [f"{'ok  ' if check['is_ok'] else paint('red', 'BAD ')} {check['name']}"
             f"{check['reading'] and ': '}{check['reading']}"
             for check in health["checks"]]
    return paint.join([*lines, paint("green", "HEALTHY") if health["is_healthy"] else paint("red", "UNHEALTHY")])


# ==== 8. CLOCK ==== the time, waiting, and fresh ids


class Clock:
    """The real clock; tests pass another.  now() jumps when the clock is set, so it is for timestamps only."""
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def new_token(self) -> str:
        return os.urandom(24).hex()

    def new_job_id(self, taken: Mapping[str, Any]) -> str:
        """An id that no kept job has: of three letters while there are plenty, then four."""
        length = 3 if len(taken) < 20000 else 4
        while True:
            job_id = "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in os.urandom(length))
            if job_id not in taken:
                return job_id


def wait_until(look: Callable[[], T], timeout_s: float, interval_s: float = 0.01) -> T:
    """Call look() until it returns something true, or the time is over; return its last result."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        found = look()
        if found or time.monotonic() > give_up_at:
            return found
        time.sleep(interval_s)


class Backoff:
    """The pause after failures: longer after each one, short again after a success.  Times are monotonic."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self.first_s, self.most_s = first_s, most_s
        self.why: Any = None
        self.succeed()

    def succeed(self) -> None:
        self.rest_s, self.until = 0.0, float("-inf")

    def fail(self, now: float, why: Any = True) -> None:
        """Note a failure.  One during the pause does not count: its attempt began before the pause."""
        self.why = why
        if now >= self.until:
            self.rest_s = min(self.most_s, max(self.first_s, 2 * self.rest_s))
            self.until = now + self.rest_s

    def find_why(self, now: float) -> Any:
        """Why it failed last, during the pause; else None."""
        return self.why if now < self.until else None


# ==== 9. DISK ==== the layout of ~/.nexus; writing that survives a crash, reading what may be torn
# A file that must be complete is written aside, synced, and renamed.  System errors become `unavailable` here.
# The functions are made of the operations of Disk, which is handed to them: so a simulation can have a disk of its own.


class Disk:
    """The files of this machine; a handle is that of an open file.  All operations raise OSError, as those of `os`.

    /proc is the kernel's, and pipes and sockets hold nothing: they are no part of it.
    """

    def open(self, path: str, flags: int, mode: int = 0o600, folder: int | None = None) -> int:
        """A handle, which children do not inherit.  `folder`: the handle of the folder in which `path` is."""
        return os.open(path, flags, mode, dir_fd=folder)

    def close(self, handle: int) -> None:
        os.close(handle)

    def read(self, handle: int, count: int) -> bytes:
        """The next bytes, at most so many; at the end none."""
        return os.read(handle, count)

    def pread(self, handle: int, count: int, at: int) -> bytes:
        """Bytes from byte `at` on, at most so many."""
        return os.pread(handle, count, at)

    def pwrite(self, handle: int, content: bytes, at: int) -> int:
        """Write from byte `at` on; return how many bytes were written, which may be fewer."""
        return os.pwrite(handle, content, at)

    def size(self, handle: int) -> int:
        """The bytes of the file; the next read() is at its end."""
        return os.lseek(handle, 0, os.SEEK_END)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def fsync(self, handle: int) -> None:
        """Put the file, or the names in a folder, where a power cut does not reach them."""
        os.fsync(handle)

    def fdatasync(self, handle: int) -> None:
        """fsync() without the times of the file."""
        os.fdatasync(handle)

    def lock(self, handle: int, is_shared: bool = False, waits: bool = False) -> bool:
        """Lock an open file until it is closed; False when somebody else has locked it, unless this `waits`."""
        import fcntl
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def stat(self, file: str | int, folder: int | None = None, is_followed: bool = True) -> os.stat_result:
        """What is known of a path or a handle.  Not `is_followed`: of a link itself."""
        return os.stat(file, dir_fd=folder, follow_symlinks=is_followed)

    def can_read(self, path: str) -> bool:
        return os.access(path, os.R_OK)

    def chmod(self, file: str | int, mode: int) -> None:
        os.chmod(file, mode)

    def touch(self, file: str | int) -> None:
        """Make the present time that of its last change."""
        os.utime(file)

    def link(self, path: str, other: str) -> None:
        """Give a file a second name."""
        os.link(path, other)

    def replace(self, path: str, other: str) -> None:
        """Rename a file or a folder; a file that is there already goes."""
        os.replace(path, other)

    def unlink(self, path: str, folder: int | None = None) -> None:
        os.unlink(path, dir_fd=folder)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def makedirs(self, path: str, mode: int = 0o700) -> None:
        """Make a folder with its parents, unless it is there."""
        os.makedirs(path, mode, exist_ok=True)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def listdir(self, folder: str | int) -> list[str]:
        return os.listdir(folder)

    def realpath(self, path: str) -> str:
        """The path without links."""
        return os.path.realpath(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """What is free on its file system."""
        return os.statvfs(path)


class Layout:
    """The paths of all files."""

    def __init__(self, home: str, state_file: str, log_dir: str) -> None:
        self.home, self.state_file, self.log_dir = home, state_file, log_dir
        self.config_file = os.path.join(home, "config.toml")
        self.choice_file = os.path.join(home, "config.path")            # the path of the last --config
        self.port_file = os.path.join(home, "port")                     # that of the first start, which chose it
        self.programs_file = os.path.join(home, "programs.json")        # {program: the folder where a service found it}
        self.service_file = os.path.join(home, "service.json")
        self.cache_dir = os.path.join(home, "cache")
        self.start_error_file = os.path.join(home, "start_error.json")
        self.token_file = os.path.join(home, "token")
        self.tokens_file = os.path.join(home, "tokens.json")            # other users' tokens
        self.lock_file = os.path.join(home, "lock")
        self.stopped_file = os.path.join(home, "stopped")               # exists after nexus stop
        self.events_file = os.path.join(home, "events")
        self.socket_file = os.path.join(home, "api.sock")
        self.offer_file = os.path.join(home, "offer.sock")              # exists during nexus restart
        self.service_log = os.path.join(home, "service.log")
        self.screen_rc = os.path.join(home, "screenrc")
        self.supervisor_script = os.path.join(home, "supervisor.sh")
        self.journal_dir = os.path.dirname(state_file)
        self.journal_file = os.path.join(self.journal_dir, "journal.jsonl")
        self.code_folder = os.path.join(self.journal_dir, "submitted-code")

    def code_file(self, name: str) -> str:
        return os.path.join(self.code_folder, f"{name}.py")

    def job_folder(self, job_id: str) -> str:
        return os.path.join(self.log_dir, f"job_{job_id}")

    def folder_of(self, job: Job) -> str:
        """The folder of a job's logs, whether it exists yet or not.  log_dir may have changed since its start."""
        return job.log_dir or self.job_folder(job.id)

    def work_folder(self, job_id: str) -> str:
        return os.path.join(self.job_folder(job_id), "work")        # cwd of a job with an uploaded script


def find_home(disk: Disk, environ: Mapping[str, str]) -> str:
    """~/.nexus, or NEXUS_HOME.  Raises: forbidden, when another user owns it."""
    given = environ.get("NEXUS_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".nexus")
    home = os.path.abspath(os.path.expanduser(given))
    check_owner(disk, home, "NEXUS_HOME")
    return home


def make_layout(home: str, config: Config) -> Layout:
    """Default paths follow NEXUS_HOME."""
    return Layout(home, *(
        os.path.abspath(os.path.expanduser(home + path[len("~/.nexus"):] if path.startswith("~/.nexus/") else path))
        for path in (config.state.state_file, config.state.log_dir)))


def describe_disk_error(error: OSError, action: str, path: str) -> NexusError:
    import errno
    hints = {errno.ENOSPC: "make room there; nexus goes on by itself", errno.EDQUOT: "your quota is used up: make room",
             errno.EACCES: "check who owns it: ls -ld", errno.EROFS: "the file system is mounted read-only"}
    hint = hints.get(error.errno or 0, "")
    return NexusError("unavailable", f"cannot {action} {path or error.filename}: {error.strerror or error}", hint)


class disk_errors:
    """`with disk_errors("write", path):` turns an OSError into NexusError; path "": the error's own."""

    def __init__(self, action: str, path: str) -> None:
        self.action, self.path = action, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise describe_disk_error(error, self.action, self.path) from error


def make_folder(disk: Disk, path: str) -> None:
    """Make a private folder, with its parents.  Raises: unavailable."""
    with disk_errors("make", path):
        disk.makedirs(path)


def find_user(uid: int) -> str:
    import pwd
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


# Whoever can write into a folder of nexus's, or exchange it, can run commands as its owner.  The owner and the group of
# a folder above it are trusted.

def check_owner(disk: Disk, path: str, what: str) -> None:
    """Raises: forbidden, when another user owns it; unavailable."""
    uid = os.geteuid()
    with disk_errors("look at", path), contextlib.suppress(FileNotFoundError):
        uid = disk.stat(path).st_uid
    if uid != os.geteuid():
        raise NexusError("forbidden", f"{path} ({what}) belongs to {find_user(uid)}, and you are "
                         f"{find_user(os.geteuid())}: its owner could run commands as you",
                         hint="name a folder of your own: export NEXUS_HOME=~/.nexus, or nexus config edit")


def check_folder(disk: Disk, path: str, what: str) -> None:
    """Raises: forbidden, when others own a folder, can write into it, or exchange it; OSError, unavailable."""
    import stat
    check_owner(disk, path, what)
    if disk.stat(path).st_mode & 0o022:
        raise NexusError("forbidden", f"others may write into {path} ({what}), and could run commands as you",
                         hint=f"look at what is in it; then chmod go-w {path}, or name another folder")
    trusted = {os.geteuid(), disk.stat("/").st_uid}     # root, which may have another number in a container
    for place in (path, disk.realpath(path)):           # a link may be exchanged, and what it leads to
        while place != "/":
            parent = os.path.dirname(place)
            status, owner = disk.stat(parent), disk.stat(place, is_followed=False).st_uid
            is_sticky = status.st_mode & stat.S_ISVTX and {status.st_uid, owner} <= trusted
            if status.st_mode & 0o002 and not is_sticky:
                raise NexusError("forbidden", f"other users could exchange {place} ({what}), and run commands as you",
                                 hint=f"name a folder elsewhere; or chmod o-w {parent}, if it is yours")
            place = parent


def secure_folders(disk: Disk, layout: Layout) -> None:
    """Make nexus's folders, which nobody else may write into, or exchange.  Raises: forbidden, unavailable."""
    with disk_errors("look at", ""):
        for path, what in ((layout.home, "NEXUS_HOME"), (layout.journal_dir, "the folder of [state] state_file"),
                           (layout.log_dir, "[state] log_dir")):
            make_folder(disk, path)
            check_folder(disk, path, what)
        disk.chmod(layout.home, disk.stat(layout.home).st_mode & 0o7700)


def find_status(disk: Disk, path: str, is_followed: bool = True) -> os.stat_result | None:
    """What is known of a path; None: there is nothing, or nothing that can be looked at."""
    try:
        return disk.stat(path, is_followed=is_followed)
    except (OSError, ValueError):
        return None


def is_file(disk: Disk, path: str) -> bool:
    import stat
    status = find_status(disk, path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(disk: Disk, path: str) -> bool:
    import stat
    status = find_status(disk, path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def find_files(disk: Disk, prefix: str, ending: str = "") -> list[str]:
    """The paths that begin and end so, in the order of their names."""
    folder, name = os.path.split(prefix)
    with contextlib.suppress(OSError):
        return [os.path.join(folder, each) for each in sorted(disk.listdir(folder))
                if each.startswith(name) and each.endswith(ending)]
    return []


class opened:
    """`with opened(disk, path, flags) as handle:` the handle of a file.  Raises: OSError."""

    def __init__(self, disk: Disk, path: str, flags: int) -> None:
        self.disk, self.handle = disk, disk.open(path, flags)

    def __enter__(self) -> int:
        return self.handle

    def __exit__(self, *_: object) -> None:
        self.disk.close(self.handle)


def read_whole(disk: Disk, path: str) -> bytes:
    """What is in a file.  A FIFO in its place does not block.  Raises: OSError."""
    with opened(disk, path, os.O_RDONLY | os.O_NONBLOCK) as handle:
        return b"".join(iter(lambda: disk.read(handle, 2**20), b""))


def decode_text(content: bytes, errors: str = "strict") -> str:
    """The text in a file: lines may end in \\r\\n.  Raises: ValueError."""
    return content.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def read_text(disk: Disk, path: str) -> str | None:
    """The text of a file; None when there is none.  Raises: unavailable."""
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError):
        return decode_text(read_whole(disk, path), "replace")
    return None


JOB_FILE_BYTES = 2**20              # of a small file in a job's folder


def read_job_file(disk: Disk, path: str) -> str | None:
    """The text of a small file in a job's folder; None when there is none.  Raises: unavailable.

    The job may have put anything there: what is no regular file, or is longer than such a file, is empty.
    """
    import errno
    import stat
    with disk_errors("read", path):
        try:
            with opened(disk, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW) as handle:
                status = disk.stat(handle)
                is_small = stat.S_ISREG(status.st_mode) and status.st_size <= JOB_FILE_BYTES
                return disk.pread(handle, JOB_FILE_BYTES, 0).decode("utf-8", "replace") if is_small else ""
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):       # a link, a socket
                return ""
            raise


def read_bytes(disk: Disk, path: str) -> bytes:
    """Raises: unavailable."""
    with disk_errors("read", path):
        return read_whole(disk, path)


MOCK_GPUS = {**integer_in(0, 1024), "examples": [2]}


def load_config(disk: Disk, path: str, environ: Mapping[str, str]) -> Config:
    """The configuration in a file; the defaults when there is none.  Raises: usage, unavailable."""
    if find_status(disk, path, is_followed=False) and not is_file(disk, path):
        refuse(f"{path} is no file, or a link that leads to none", hint=f"put one there, or remove it: ls -l {path}")
    text = read_text(disk, path)
    data: dict[str, Any] = {}
    if text is not None:
        try:
            if sys.version_info >= (3, 11):
                import tomllib
            else:
                import tomli as tomllib
            data = tomllib.loads(text)
        except ImportError:
            version = ".".join(map(str, sys.version_info[:2]))
            raise NexusError("usage", f"{path} cannot be read: Python {version} has no TOML parser",
                             hint=f"{sys.executable} -m pip install tomli, or use Python 3.11 or newer") from None
        except (ValueError, RecursionError) as error:
            raise NexusError("usage", f"{path} is not valid TOML: {error}",
                             hint="nexus config edit; an example: nexus config sample") from None
    config, mock = parse_config(data, path), environ.get("NEXUS_MOCK_GPUS")
    return replace(config, mock_gpus=check(MOCK_GPUS, guess_number(mock), "NEXUS_MOCK_GPUS")) if mock else config


def choose_config(disk: Disk, layout: Layout) -> str:
    """The last --config, or the default path, which need not exist.  Raises: usage, unavailable."""
    chosen = (read_text(disk, layout.choice_file) or "").strip("\n")
    if chosen and not is_file(disk, chosen):
        raise NexusError("usage", f"there is no file {chosen}, the config file that was chosen last",
                         hint=f"choose another: nexus start --config FILE; the usual one is {layout.config_file}")
    return chosen or layout.config_file


def remember_config(disk: Disk, layout: Layout, path: str) -> None:
    """Start the service with this config file from now on.  Raises: unavailable."""
    if path != layout.config_file:
        write_if_changed(disk, layout.choice_file, path + "\n")
    else:
        remove_file(disk, layout.choice_file)


def read_json(disk: Disk, path: str) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is none, or it is torn."""
    with contextlib.suppress(ValueError, TypeError):
        return dict(decode("dict", load_json(read_text(disk, path) or "")))
    return None


def stamp_of(disk: Disk, path: str) -> tuple[int, ...] | None:
    """What identifies a file and its content."""
    status = find_status(disk, path)
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None


def write_at(disk: Disk, handle: int, content: bytes, at: int) -> None:
    """Write all of it, from byte `at` on.  Raises: OSError; then a part may be written."""
    done = 0
    while done < len(content):
        done += disk.pwrite(handle, content[done:], at + done)


def join_blocks(pieces: Iterable[str]) -> Iterator[bytes]:
    """Text in blocks of about 1 MiB: smaller writes release the GIL for too short a time for other threads."""
    block, size = list[str](), 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= 2**20:
            yield "".join(block).encode("utf-8", "surrogateescape")
            block, size = [], 0
    yield "".join(block).encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def written(disk: Disk, aside: str, pieces: Iterable[str], mode: int = 0o600, is_synced: bool = True) -> Iterator[str]:
    """Write a new file; it is removed unless it is renamed in the block.  Raises: OSError, unavailable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        try:
            handle = disk.open(aside, flags, mode)
        except FileExistsError:     # a crash may have left it; and in a shared folder it may be somebody's link
            remove_file(disk, aside)
            handle = disk.open(aside, flags, mode)
        try:
            size = 0
            for block in join_blocks(pieces):
                write_at(disk, handle, block, size)
                size += len(block)
            if is_synced:
                disk.fsync(handle)
        finally:
            disk.close(handle)
        yield aside
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(aside)


def write_atomic(disk: Disk, path: str, pieces: Iterable[str], mode: int = 0o600, is_synced: bool = True) -> None:
    """Replace a file as a whole.  Raises: unavailable; then nothing has changed."""
    import threading
    with disk_errors("write", path):
        with written(disk, f"{path}.{threading.get_native_id()}.tmp", pieces, mode, is_synced) as aside:
            disk.replace(aside, path)
        if is_synced:
            sync_folder(disk, os.path.dirname(path))


def write_new(disk: Disk, path: str, text: str, mode: int) -> bool:
    """Write a file, unless something is there.  Raises: unavailable; then it is not there."""
    with disk_errors("write", path):
        try:
            handle = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            return False
        try:
            write_at(disk, handle, text.encode("utf-8", "surrogateescape"), 0)
        except BaseException:
            disk.unlink(path)
            raise
        finally:
            disk.close(handle)
    return True


def is_own_file(disk: Disk, path: str) -> bool:
    """Whether it is a file of this user's into which nobody else may write, and no link to one."""
    import stat
    status = find_status(disk, path, is_followed=False)
    return (status is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            and not status.st_mode & 0o022)


def write_if_changed(disk: Disk, path: str, text: str) -> None:
    """Write a file unless it is this one already: what is there needs no room on a full disk.  Raises: unavailable."""
    if not is_own_file(disk, path) or read_text(disk, path) != text:
        write_atomic(disk, path, [text])


def sync_folder(disk: Disk, path: str) -> None:
    """Make renames in a folder survive a crash."""
    with opened(disk, path, os.O_DIRECTORY) as handle:
        disk.fsync(handle)


def take_lock(disk: Disk, path: str) -> int | None:
    """Lock a file for as long as this process lives; None when another process has.  Raises: OSError."""
    handle = disk.open(path, os.O_RDWR | os.O_CREAT)
    if disk.lock(handle):
        return handle
    disk.close(handle)
    return None


def is_locked(disk: Disk, path: str) -> bool:
    """Whether anybody has locked a file, even in another container."""
    try:
        with opened(disk, path, os.O_RDWR) as handle:
            return not disk.lock(handle)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)         # other errors: assume that it is


def read_tokens(disk: Disk, path: str) -> dict[str, Token]:
    """{sha256: token} of tokens.json.  Raises: unavailable."""
    text = read_text(disk, path)
    try:
        rows = [] if text is None else load_json(text)["tokens"]
        return {row["sha256"]: Token(str(row["user"]), row["sha256"], parse_time(row["created_at"]),
                                     parse_time(row["expires_at"]) if row.get("expires_at") else None)
                for row in rows}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NexusError("unavailable", f"{path} is not as nexus writes it: {error!r}",
                         hint="repair it, or move it away and make the tokens anew: nexus token create USER") from None


def change_tokens(disk: Disk, path: str, act: Callable[[Mapping[str, Token]], Mapping[str, Token]]) -> None:
    """Replace the tokens by act(tokens).  Raises: unavailable; what `act` raises."""
    make_folder(disk, os.path.dirname(path))
    with disk_errors("write", path), opened(disk, f"{path}.lock", os.O_WRONLY | os.O_CREAT) as lock:
        disk.lock(lock, waits=True)
        rows = [token_json(token) for token in act(read_tokens(disk, path)).values()]
        write_atomic(disk, path, [json.dumps({"tokens": rows}, indent=1) + "\n"])


def append_whole(disk: Disk, handle: int, record: bytes, is_synced: bool = False) -> None:
    """Append to an open file.  Raises: OSError, after removing what was written, if the disk allows it."""
    size = disk.size(handle)
    try:
        write_at(disk, handle, record, size)
        if is_synced:
            disk.fdatasync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.truncate(handle, size)
        raise


# Parts of logs.  A missing or unreadable file, or a FIFO in its place, counts as empty.

def measure(disk: Disk, path: str) -> int:
    import stat
    status = find_status(disk, path)
    if status and status.st_size and stat.S_ISREG(status.st_mode) and disk.can_read(path):
        return status.st_size
    return 0


def check_directory(disk: Disk, name: str, path: str) -> None:
    """Raises: usage, when the directory of a job is none."""
    if not is_folder(disk, path):
        refuse(f"{name} {format_line(path, 200)} is not a directory", hint="make it first: the job runs in it")


def read_changed_at(disk: Disk, path: str) -> int:
    """When a log was last written to, in nanoseconds; 0: never."""
    status = find_status(disk, path)
    return status.st_mtime_ns if status else 0


def read_part(disk: Disk, path: str, start: int, most: int) -> bytes:
    """At most so many bytes of a file, from byte `start` on."""
    with contextlib.suppress(OSError), opened(disk, path, os.O_RDONLY | os.O_NONBLOCK) as handle:
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


LOG_TIMES = "log.times"
LOG_TIMES_BYTES = 2**24         # its limit


def append_log_mark(disk: Disk, folder: str, line: str) -> None:
    """Append a line to log.times.  Faults are ignored: the logs are complete without it."""
    # The job may put anything in the file's place.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
    with contextlib.suppress(OSError), opened(disk, os.path.join(folder, LOG_TIMES), flags) as handle:
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


STREAM_FILES = ("stdout.log", "stderr.log")


def settle_lines(content: bytes, longest: int, is_first_longer: bool = False) -> bytes:
    """Lines of more than `longest` bytes as they were last: a progress bar begins its line anew with \\r.

    `is_first_longer`: the first of them counts as longer.
    """
    def settle(line: bytes) -> bytes:
        shown = line.rstrip(b"\r")
        return shown[shown.rfind(b"\r") + 1:] + line[len(shown):]

    if b"\r" not in content:
        return content
    lines = content.split(b"\n")
    return b"\n".join(settle(line) if len(line) > longest or (is_first_longer and not number) else line
                      for number, line in enumerate(lines))


class LogReader:
    """Reads on in one or both logs of a job, in the order in which they grew."""

    def __init__(self, disk: Disk, folder: str, streams: Sequence[int] = (0, 1), names: Sequence[str] = STREAM_FILES,
                 measure_now: Callable[[str], Sequence[LogMark]] = lambda folder: ()) -> None:
        """`streams`: the logs to read; `measure_now`: returns marks after those in log.times."""
        self.disk, self.folder, self.streams, self.names = disk, folder, streams, names
        self.measure_now = measure_now
        self.offsets = [0, 0]                           # of what comes next
        self.partial: dict[int, LogEntry] = {}          # {stream: an incomplete line before its offset}

    def find_path(self, stream: int) -> str:
        return os.path.join(self.folder, self.names[stream])

    def measure(self) -> list[int]:
        return [measure(self.disk, self.find_path(stream)) if stream in self.streams else offset
                for stream, offset in enumerate(self.offsets)]

    def begin(self, attempts: Sequence[Attempt], offsets: Sequence[int], tail: int | None) -> None:
        """Begin at these offsets, at 0 in a file that is shorter; or `tail` lines before the end, if that is later.

        A negative offset is counted from the end.
        """
        ends = self.measure()
        self.offsets = [max(0, end + offset) if offset < 0 else offset if offset <= end else 0
                        for offset, end in zip(offsets, ends)]
        if tail is None:
            return
        for stream in self.streams:
            start = self.offsets[stream]
            self.offsets[stream] = max(start, find_tail(self.disk, self.find_path(stream), tail, start))
        if len(self.streams) > 1:
            self.offsets = self.find_last_lines(attempts, ends, tail)

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
        return [min((start for one, start in last if one == stream), default=end) for stream, end in enumerate(ends)]

    def walk(self, attempts: Sequence[Attempt], ends: Sequence[int]) -> Iterator[LogEntry]:
        """The output between the offsets and `ends`, in the order of arrival, in blocks."""
        latest = self.measure_now(self.folder)          # before log.times is read, as it may append to it
        # Marks of a file that is not read need not be looked for.
        starts = [offset if stream in self.streams else sys.maxsize for stream, offset in enumerate(self.offsets)]
        marks = [*read_log_times(self.disk, self.folder, starts), *latest]
        for part in merge_logs(marks, attempts, self.offsets, ends):
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
                yield replace(block, end=start, content=whole)

    def is_longer(self, stream: int, start: int, end: int, longest: int) -> bool:
        """Whether the line that begins there has more than `longest` bytes before `end`."""
        return end - start > longest and b"\n" not in read_part(self.disk, self.find_path(stream), start, longest + 1)

    def flush(self) -> Iterator[LogEntry]:
        """The incomplete lines, when their ends may never come."""
        yield from self.partial.values()
        self.partial = {}


MAX_LOG_LINE = 65536            # a longer line comes in pieces
MAX_BAR_BYTES = 10000           # a longer line is shown as it was last, also without `tail`


# The files that nexus puts into a job's log folder.  Others, like work/ and files/, are the job's, or unknown.
OWN_FILES = (r"std(out|err)\.log|log\.times|job\.json|job\.sh(\.\d+\.tmp)?|(attempt|claim|fault)-\d+|"
             r"warned-\d+-[\d.]+|result-\d+\.json|slurm-\d+\.log")


def remove_job_files(disk: Disk, log_dir: str, folder: str) -> None:
    """Remove nexus's files from a job's log folder, and the folder if it is empty then.

    Only a real folder directly below log_dir is touched, and no link is followed.  Raises: unavailable.
    """
    import stat
    if os.path.join(log_dir, os.path.basename(folder)) != folder or not os.path.basename(folder).startswith("job_"):
        raise NexusError("unavailable",
                         f"{folder or 'a folder without a name'} was left: it is no job's, below {log_dir}")
    with disk_errors("remove the logs in", folder), contextlib.suppress(FileNotFoundError):
        with opened(disk, folder, os.O_DIRECTORY | os.O_NOFOLLOW) as handle:
            for name in [name for name in disk.listdir(handle) if re.fullmatch(OWN_FILES, name)]:
                disk.unlink(name, handle)
        work = os.path.join(folder, "work")
        if (status := find_status(disk, work, is_followed=False)) and not stat.S_ISLNK(status.st_mode):
            remove_file(disk, os.path.join(work, "main.py"))
        for path in (work, folder):
            with contextlib.suppress(OSError):      # the folder is not empty
                disk.rmdir(path)


def measure_logs(disk: Disk, folder: str | None) -> tuple[int, int]:
    """(bytes of stdout.log, bytes of stderr.log).  A job that has not begun has no folder."""
    out, err = [measure(disk, os.path.join(folder, name)) if folder else 0 for name in STREAM_FILES]
    return out, err


def append_log(disk: Disk, path: str, piece: bytes, start: int) -> None:
    """Append an attempt's output from a node to a job's log, all or nothing.  Raises: OSError.

    `start`: the bytes of former attempts.  A log that was cut here since has NULs in their place.
    """
    disk.makedirs(os.path.dirname(path))
    with opened(disk, path, os.O_WRONLY | os.O_CREAT) as handle:
        if disk.size(handle) < start:
            disk.truncate(handle, start)
        append_whole(disk, handle, piece)


def remove_file(disk: Disk, path: str) -> None:
    """Raises: unavailable; not for a missing file."""
    with disk_errors("remove", path), contextlib.suppress(FileNotFoundError):
        disk.unlink(path)


# ==== 10. MACHINE ==== other programs, processes, GPUs, sessions, leases: each has one owner here
# Only run() runs other programs, except those which nexus leaves to themselves (a job, the service) or to the user (an
# editor).  A program may hang in the kernel, where SIGKILL does not help.  Such a program is left behind after its
# timeout, and not started again while it lives.  A process is identified by pid and start time, never by its pid alone.

FIRST_LOOK_S = 5.0              # after a start, a request that names a GPU waits so long for the first refresh
SMI_TIMEOUT_S = 60.0            # without persistence mode the driver loads each card at each run: 30 s for eight
SMI_WAIT_S = 10.0               # a refresh waits so long; then it uses the last readings
SMI_SLOW_S = 2.0
EXEC_LOOKS = 500                # half a millisecond apart: the longest wait for an environment during an exec
FORMER_COUNT = 10000            # ended processes whose jobs are remembered
SETTLED_S = 2.0                 # the age at which a process that is nobody's will be nobody's
PROC = "/proc"
MARKS = rb"(?:^|\0)NEXUS_(ROLE|JOB_ID|JOB_NONCE)=([^\0]*)"     # in a process's environment: whose it is
HOST_PIDS = "pid:[4026531836]"  # the namespace outside containers: PROC_PID_INIT_INO of linux/proc_ns.h
TCP_ESTABLISHED, TCP_LISTEN = 1, 10     # source: include/net/tcp_states.h


class Completed(Value):
    exit_code: int
    output: str                 # stdout, and stderr unless is_apart
    errors: str = ""            # stderr, with is_apart


STUCK: dict[str, subprocess.Popen[bytes]] = {}      # {purpose: a program that no signal ends}
OUTPUT_INTERVAL_S = 0.2         # how often the output of a program that may write only so much is measured
STUCK_HINT = "a driver or a file system does not answer: see dmesg; a reboot may be needed"


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a program has ended, and what it has started: it may be a wrapper of the one that hangs."""
    processes = Processes()
    return process.poll() is not None and not any(
        one.session == process.pid for one in processes.read(processes.list_pids()))


def end_program(process: subprocess.Popen[bytes]) -> bool:
    """End a program of run(), and what it has started; return whether they have ended."""
    import signal
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):   # SIGKILL at once can freeze a card
        with contextlib.suppress(OSError):              # the whole group is gone, or another user's
            os.killpg(process.pid, number)
        if wait_until(lambda: has_ended(process), patience_s, 0.02):
            return True
    return False


def run(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None, *,
        stdin: str = "", is_apart: bool = False, undecodable: str = "replace", most_bytes: int = 0, purpose: str = "",
        hint: str = "try it by hand", install: str = "install it") -> Completed:
    """Run a program to its end, or leave it behind: run() always returns in time.

    It is ended when it writes more than `most_bytes`, unless that is 0; a Ctrl-C ends it, too.  While a program that no
    signal ends lives, none is started for the same `purpose`.
    Raises: unavailable, with the program's last words; with the hint `install` when there is no such program.
    """
    import subprocess
    purpose = purpose or argv[0]
    if purpose in STUCK and not has_ended(STUCK[purpose]):
        raise NexusError("unavailable", f"{purpose} (pid {STUCK[purpose].pid}) hangs and cannot be ended", STUCK_HINT)
    with open_scratch() as given, open_scratch() as output, open_scratch() as errors:
        # Files instead of pipes: a background process of the program would keep a pipe open.
        given.write(stdin.encode("utf-8", "surrogateescape"))
        given.seek(0)
        try:
            process = subprocess.Popen(argv, stdin=given, stdout=output, env=environ,
                                       stderr=errors if is_apart else subprocess.STDOUT, start_new_session=True)
        except FileNotFoundError:
            raise NexusError("unavailable", f"{argv[0]} was not found on PATH", install) from None
        except OSError as error:
            raise NexusError("unavailable", f"{argv[0]} cannot be run: {error.strerror}", hint) from None
        give_up_at, why = time.monotonic() + timeout_s, ""
        try:
            while not why:
                left_s = max(0.0, give_up_at - time.monotonic())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    exit_code = process.wait(min(left_s, OUTPUT_INTERVAL_S) if most_bytes else left_s)
                    return Completed(exit_code, read_scratch(output, undecodable), read_scratch(errors, undecodable))
                # No limit of the kernel's: git may write large files meanwhile.
                if most_bytes and any(os.fstat(file.fileno()).st_size > most_bytes for file in (output, errors)):
                    why = f"{purpose} writes more than {format_memory(most_bytes / 2**20)}"
                elif not left_s:
                    why = f"{purpose} did not answer within {timeout_s:g} s"
        except BaseException:                           # this command is being ended: so is what it has started
            end_program(process)
            raise
        if end_program(process):
            last = read_scratch(errors if is_apart else output).strip().rpartition("\n")[2]
            raise NexusError("unavailable", f"{why}{last and ': '}{format_line(last, 200)}", hint)
        STUCK[purpose] = process
        raise NexusError("unavailable", f"{why} and cannot be ended", STUCK_HINT)


def limit_output(process: subprocess.Popen[bytes], most_bytes: int) -> None:
    """End a program that writes more into a file, such as its open_scratch()."""
    import resource
    with contextlib.suppress(OSError):                  # it has ended
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def open_scratch() -> IO[bytes]:
    """A file without a name; in memory where possible, so that a full disk does not truncate output."""
    try:
        return os.fdopen(os.memfd_create("nexus"), "w+b")
    except (AttributeError, OSError):                   # Python was built for an older C library
        import tempfile
        return tempfile.TemporaryFile()


def read_scratch(file: IO[bytes], undecodable: str = "replace") -> str:
    """Its content.  The file's position is shared with its writer, and stays."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", undecodable)


def find_program(name: str, path: str | None = None) -> str | None:
    import shutil
    return shutil.which(name, path=path)


class Spawned(Value):
    """A child of this process."""
    pid: int

    def poll(self) -> int | None:
        """How it has ended, as waitpid() tells it; None: it has not."""
        try:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:                       # whoever started this process has SIGCHLD ignored
            return 0
        return status if ended else None


def spawn(argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes] | Spawned:
    """Start a program of PATH that goes on by itself: in a session of its own, in /, on /dev/null.  Raises: OSError.

    posix_spawn() takes a third of subprocess's time, and of that before Python 3.10, which forks, a thirtieth.  It
    cannot change the directory, and some builds of Python cannot have it make a session.
    """
    import signal
    import subprocess
    if os.getcwd() == "/":
        files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0), *(
            (os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2))]
        paths = (f"{folder}/{argv[0]}" for folder in environ["PATH"].split(":"))
        program = next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), argv[0])
        with contextlib.suppress(NotImplementedError):
            return Spawned(os.posix_spawn(program, list(argv), environ, file_actions=files, setsid=True,
                                          setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]))
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            cwd="/", env=environ, start_new_session=True)


def withhold_descriptors() -> None:
    """Have no program inherit what this process was given, as none inherits what it opens itself."""
    for number in map(int, os.listdir(f"{PROC}/self/fd")):
        with contextlib.suppress(OSError):              # the one of this look
            os.set_inheritable(number, number <= 2)


# A service that `ssh box nexus add` has started, or systemd, or cron, has a bare PATH.
PROGRAMS = ("bash", "nvidia-smi", "screen", "git", "ssh", "sbatch", "squeue", "scancel", "scontrol")   # that it runs
DRIVER_FOLDERS = {              # {a program: where drivers put it, whatever PATH is}
    "nvidia-smi": ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib", "/opt/bin")}


def complete_path(disk: Disk, layout: Layout, path: str | None) -> str:
    """PATH, and behind it where the programs are that it lacks.

    That is where the last service found them, or where drivers put them.
    """
    path, known = path or os.defpath, read_json(disk, layout.programs_file) or {}
    for name in PROGRAMS:
        if not find_program(name, path):
            folders = [folder for folder in [known.get(name)] if isinstance(folder, str) and is_own_folder(folder)]
            folders += DRIVER_FOLDERS.get(name, ())
            path = ":".join([path, *[folder for folder in folders if find_program(name, folder)][:1]])
    return path


def keep_programs(disk: Disk, layout: Layout, path: str) -> None:
    """Remember in which folders the programs are now.  Raises: unavailable."""
    found = {name: os.path.dirname(place) for name in PROGRAMS if (place := find_program(name, path))}
    known = read_json(disk, layout.programs_file) or {}
    write_if_changed(disk, layout.programs_file, encode_json({**known, **found}) + "\n")


NO_SCREEN = "screen is not installed"


def advise_on_screen(reason: str) -> str:
    """What to do where screen cannot be used, for a reason of Screen.prepare()."""
    if reason == NO_SCREEN:
        return "install it: apt install screen"
    if re.search("(?i)director|mode [0-7]{3}|too long|socket", reason):
        return "its folder for sockets: export SCREENDIR=FOLDER, one of your own with mode 700, then nexus restart"
    return "try it by hand: screen -ls"


def is_own_folder(path: str) -> bool:
    """Whether nobody but root and this user can put a program there."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        is_owned = status.st_uid in (os.geteuid(), os.stat("/").st_uid)     # root may have another number
        return is_owned and os.path.isabs(path) and not status.st_mode & 0o002
    return False


class GpuSource:
    """Tells of the GPUs of this machine, by a vendor's program."""
    program = ""
    slow_hint = ""                                      # why it may take long, and what helps

    def query_gpus(self, known: Mapping[str, Gpu]) -> list[Gpu]:
        """The GPUs by index, with their processes.  Those of `known` (by uuid) that are not shown get a fault.

        Raises: unavailable, when nothing is known.
        """
        raise NotImplementedError

    @property
    def not_shown(self) -> str:
        """The fault of a GPU that was there before, and of which nothing is told."""
        return f"{self.program} does not show it"


class NvidiaSmi(GpuSource):
    """nvidia-smi.  Source: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`."""
    program = "nvidia-smi"
    slow_hint = ("nvidia-smi is slow while the driver loads the cards at each run: start nvidia-persistenced, "
                 "or nvidia-smi -pm 1")
    fields: Sequence[str] = GPU_FIELDS

    def query_gpus(self, known: Mapping[str, Gpu]) -> list[Gpu]:
        only: tuple[str, ...] = ()
        answer = self.ask_gpus()
        if answer.exit_code == 6:                       # no devices were found
            return self.find_missing((), known, ())
        indices = {uuid: gpu.index for uuid, gpu in known.items()}
        gpus, messages = parse_gpus(answer.output, self.fields, indices)
        if answer.exit_code not in (0, 14):
            # A card that cannot be opened hides the others unless they are asked for by index; newer drivers show them.
            is_hidden = not gpus and "device handle" in answer.output
            listed = re.findall(GPU_LISTED, self.ask("-L").output) if is_hidden else []
            only = ("-i", ",".join([str(gpu.index) for gpu in gpus if not gpu.fault] + listed))
            answer = self.ask_gpus(*only) if listed else answer
            if not gpus and answer.exit_code not in (0, 14):
                raise fail_smi(answer)
            gpus = parse_gpus(answer.output, self.fields, indices)[0] if listed else gpus
        gpus = sorted([*gpus, *self.find_missing(gpus, known, messages)], key=lambda gpu: gpu.index)
        if all(gpu.fault for gpu in gpus):
            return gpus
        apps = self.ask(*only, f"--query-compute-apps={','.join(APP_FIELDS)}", "--format=csv,noheader,nounits")
        if apps.exit_code not in (0, 3, 14):            # 3: not supported by this device
            raise fail_smi(apps)
        processes = parse_compute_apps(apps.output)
        gpus = [replace(gpu, processes=processes.get(gpu.uuid, ())) for gpu in gpus]
        if not any(gpu.is_mig for gpu in gpus):
            return gpus
        listing, report = self.ask("-L"), self.ask(*only, "-q", "-x")
        error = "" if report.exit_code in (0, 14) else fail_smi(report).message
        return cut_cards(gpus, known.values(), listing.output, report.output, error)

    def ask_gpus(self, *only: str) -> Completed:
        answer = self.ask(*only, f"--query-gpu={','.join(self.fields)}", "--format=csv,noheader,nounits")
        if answer.exit_code == 2 and self.fields is GPU_FIELDS:
            self.fields = BASIC_GPU_FIELDS          # an older driver
            return self.ask_gpus(*only)
        return answer

    def ask(self, *arguments: str) -> Completed:
        return run([self.program, *arguments], SMI_TIMEOUT_S, hint=f"try it by hand: nvidia-smi; {self.slow_hint}",
                   install="install the NVIDIA driver; or where nvidia-smi works, nexus restart: its folder is "
                           "remembered then; without a GPU, nexus add --gpus 0, "
                           "or for a trial NEXUS_MOCK_GPUS=2 nexus restart")

    def find_missing(self, gpus: Sequence[Gpu], known: Mapping[str, Gpu], messages: Sequence[str]) -> list[Gpu]:
        """The GPUs that a message names or that were there before, but have no row now: unusable, but not forgotten."""
        # A GPU whose index is taken was renumbered.
        text, taken = " ".join(messages), {fact for gpu in gpus for fact in (gpu.uuid, gpu.index)}
        faults = {"GPU is lost": "GPU is lost", "Unknown Error": "Unknown Error",
                  "reset must occur": "GPU requires reset"}
        fault = next((fault for words, fault in faults.items() if words in text), self.not_shown)
        missing = [forget_readings(gpu, fault=fault) for gpu in known.values() if not taken & {gpu.uuid, gpu.index}]
        named = set(map(int, re.findall(r"device handle for (?:GPU|gpu) ?(\d{1,4}):(?!\w)", text)))
        new = named - {gpu.index for gpu in [*gpus, *missing]}
        return missing + [Gpu(index, f"index-{index}", "GPU", fault=fault) for index in new]


def fail_smi(answer: Completed) -> NexusError:
    hints = {9: "is the NVIDIA driver loaded?  lsmod | grep nvidia",
             18: "the driver was upgraded under a running kernel: reboot",
             12: "reinstall the NVIDIA driver: libnvidia-ml.so is missing", 4: "check the rights of /dev/nvidia*",
             255: "in a container, restart it: it lost its devices"}
    hint = hints.get(answer.exit_code, "try it by hand: nvidia-smi")
    said = next(filter(None, map(str.strip, answer.output.splitlines())), "no output")
    what = f"nvidia-smi: {said} (exit code {answer.exit_code})"
    if answer.exit_code < 0:
        what = f"nvidia-smi was ended by signal {-answer.exit_code}"
    return NexusError("unavailable", what, hint)


class MockGpus(GpuSource):
    """Made-up idle GPUs, for trials and tests."""
    program = "a made-up program"

    def __init__(self, count: int) -> None:
        self.count = count

    def query_gpus(self, known: Mapping[str, Gpu]) -> list[Gpu]:
        return [Gpu(index, f"MOCK-{index}", "Mock GPU", 24576.0, 0.0, 0.0) for index in range(self.count)]


def read_proc(path: str) -> str:
    """A text of the kernel's; "" when there is none.  Raises: unavailable."""
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read().decode("utf-8", "replace")
    return ""


def read_proc_words(pid: int, file: str) -> list[str]:
    """What /proc has of a process: its arguments (`cmdline`), or its variables (`environ`)."""
    with contextlib.suppress(OSError), open(f"{PROC}/{pid}/{file}", "rb") as content:
        return os.fsdecode(content.read()).split("\0")[:-1]
    return []


class Processes:
    """Finds out which processes belong to which job, from /proc alone.

    A job's processes carry its id and nonce in their environment, descend from its job.sh, or share job.sh's session:
    torchrun's workers leave the process group.  A process that was once found stays its job's, even when its parents
    are gone and it has cleared its environment.  All of /proc is read at each refresh.  The end of a job reads only
    what is new since then, or was found: so it takes no longer beside thousands of other processes.
    """

    def __init__(self) -> None:
        self.uid = os.geteuid()
        self.boot_id = read_boot_id()
        self.marks: dict[tuple[int, int, int], str | None] = {}         # {(pid, started, env_start): mark}
        self.owners: dict[int, tuple[int, str]] = {}        # {pid: (started, its job's mark)}, of ended ones too
        # What is known of processes, by their pids as in /proc: until pids wrap, none is another one
        self.settled: dict[str, str] = {}           # since the last refresh: {pid: its job's mark; "": nobody's}
        self.unowned: dict[str, int] = {}                   # {pid of one that was nobody's when it was read: its start}
        self.latest_pid = 0                                 # the last one at the last look

    def find(self, pid: int) -> Process | None:
        try:
            handle = os.open(f"{PROC}/{pid}/stat", os.O_RDONLY)
            try:
                return parse_proc_stat(os.read(handle, 4096).decode("utf-8", "replace"))
            finally:
                os.close(handle)
        except (OSError, ValueError, IndexError):
            return None

    def is_alive(self, pid: int | None, started: int | None) -> bool:
        process = self.find(pid) if pid else None
        return process is not None and process.started == started and not self.is_gone(process)

    def is_gone(self, process: Process) -> bool:
        """Whether it has ended and waits to be reaped.  When only its main thread has ended, the state is the same."""
        if process.state not in "ZX":
            return False
        with contextlib.suppress(OSError):
            return len(os.listdir(f"{PROC}/{process.pid}/task")) < 2
        return True

    def find_age_s(self, started: int) -> float:
        """Seconds since a start in clock ticks, whatever the wall clock was set to."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")

    def list_pids(self) -> set[int]:
        return {int(name) for name in os.listdir(PROC) if name.isdigit()}

    def read(self, pids: Iterable[int]) -> list[Process]:
        """Those that may be ours: this user's; for root, everybody's.  Parents come first."""
        found = []
        for pid in pids:
            with contextlib.suppress(OSError):
                if self.uid == 0 or self.uid == os.stat(f"{PROC}/{pid}").st_uid:
                    process = self.find(pid)
                    if process and not process.is_kernel and not self.is_gone(process):
                        found.append(process)
        return sorted(found, key=lambda process: (process.started, process.pid))

    def read_mark(self, process: Process) -> str | None:
        """`service`, `viewer`, or `JOB NONCE`, from its environment.  During an exec it has none: wait."""
        key = process.pid, process.started, process.env_start
        if key in self.marks:
            return self.marks[key]
        for _ in range(EXEC_LOOKS):
            try:
                with open(f"{PROC}/{process.pid}/environ", "rb", 0) as file:
                    content = file.read()
            except OSError:
                return None
            marks = {name: text.decode("utf-8", "replace") for name, text in re.findall(MARKS, content)}
            job_id, nonce = marks.get(b"JOB_ID"), marks.get(b"JOB_NONCE")
            mark = marks.get(b"ROLE") or (f"{job_id} {nonce}" if job_id and nonce else None)
            now = process if mark else self.find(process.pid)
            if now is None or now.started != process.started:
                return None
            if now.env_start == process.env_start and (content or now.env_start or now.state in "ZX"):
                self.marks[key] = mark
                return mark
            process = now
            time.sleep(0.0005)
        return None

    def find_members(self, jobs: Sequence[Job], over: Iterable[str] = (), *, others: Sequence[Job] = (),
                     is_refresh: bool = False) -> dict[str, list[Process]]:
        """{job id: its processes}, without job.sh, the viewer of the logs, and what job.sh of an ended job still runs.

        `over`: ids of jobs whose command has ended.  `others`: the other jobs that run here; what is known to be theirs
        is not read again.  `is_refresh`: look at all of the machine; `jobs` are all that run.
        """
        latest_pid = int((read_proc(f"{PROC}/loadavg") or "0").split()[-1])
        has_wrapped, self.latest_pid = latest_pid < self.latest_pid, latest_pid
        names, unowned = os.listdir(PROC), {} if has_wrapped else self.unowned
        if is_refresh or has_wrapped:
            self.settled, self.unowned = {}, {name: unowned[name] for name in names if name in unowned}
        by_mark = {f"{job.id} {job.current.nonce}": job for job in (*others, *jobs)}
        runners = self.locate_runners(by_mark)
        members: dict[str, list[Process]] = {job.id: [] for job in jobs}
        asked, settled = {None, *(mark for mark, job in by_mark.items() if job.id in members)}, self.settled
        # What began before a job did is not the job's, and will not be.
        since, unowned = min((job.current.pid_started or 0 for job in jobs), default=sys.maxsize), self.unowned
        pids = [int(name) for name in names
                if settled.get(name) in asked and unowned.get(name, since) >= since and name.isdigit()]
        processes = self.read(pids)
        tidying = {pid for pid, job in runners.items() if job.id in over}
        found = dict(runners)
        for process in processes:
            pid, parent = process.pid, process.parent
            if parent in tidying and parent in runners:
                tidying.add(pid)
                continue
            leader = runners.get(process.session)
            is_others = leader is not None and leader.id not in members
            mark = "" if pid in runners or is_others else self.read_mark(process) or ""
            if parent in tidying and mark not in by_mark:
                tidying.add(pid)
                continue
            started, former = self.owners.get(pid, (0, ""))
            owner = by_mark.get(former) if started == process.started else None
            owner = runners.get(pid) or owner or by_mark.get(mark) or leader or found.get(parent)
            if owner and mark not in ("service", "viewer"):
                found[pid] = owner
                owner_mark = settled[str(pid)] = f"{owner.id} {owner.current.nonce}"
                self.owners[pid] = process.started, owner_mark
                if pid not in runners and owner.id in members:
                    members[owner.id].append(process)
            elif mark == "viewer":
                self.set_aside(pid)
            else:
                unowned[str(pid)] = process.started
        if is_refresh:
            # What is nobody's stays so; but one that has just begun may be job.sh, on its way to the command.
            young = {process.pid for process in processes if self.find_age_s(process.started) < SETTLED_S}
            settled.update((str(pid), "") for pid in pids if pid not in found and pid not in young)
            self.forget(processes)
        return members

    def find_runners(self, script: str, attempt: int) -> list[Process]:
        """Those that are, or will be, an attempt's job.sh: it is in their arguments, with the attempt's number."""
        return [process for process in self.read(self.list_pids())
                if read_proc_words(process.pid, "cmdline")[-2:] == [script, str(attempt)]]

    def set_aside(self, pid: int) -> None:
        """Note that a process is nobody's, whatever it does."""
        self.settled[str(pid)] = ""

    def locate_runners(self, jobs: Mapping[str, Job]) -> dict[int, Job]:
        """{pid of its job.sh, also when that has ended: job}.  `jobs`: {mark: job}.

        Another process may have got the pid of an ended job.sh; one of an earlier boot means nothing.
        """
        runners: dict[int, Job] = {}
        for mark, job in jobs.items():
            pid = job.current.pid
            if pid and job.current.boot_id == self.boot_id:
                leader = None if self.settled.get(str(pid)) == mark else self.find(pid)
                if leader is None or leader.started == job.current.pid_started:
                    runners[pid] = job
        return runners

    def find_catchers(self, processes: Iterable[Process], number: int) -> set[int]:
        """The pids of those that handle this signal."""
        def handles(process: Process) -> bool:
            masks = re.search("^SigCgt:\\s*([0-9a-f]+)$", read_proc(f"{PROC}/{process.pid}/status"), re.M)
            return bool(masks and int(masks[1], 16) >> (number - 1) & 1)
        return {process.pid for process in processes if handles(process)}

    def find_readers(self, processes: Sequence[Process]) -> set[int]:
        """The pids of those that read a pipe into which another one writes, like `tee` behind `|`."""
        def find_pipe(process: Process, number: int) -> str:
            with contextlib.suppress(OSError):          # it has ended
                return os.readlink(f"{PROC}/{process.pid}/fd/{number}")
            return ""

        written = {find_pipe(process, number) for process in processes for number in (1, 2)}
        pipes = {path for path in written if path.startswith("pipe:")}
        return {process.pid for process in processes if find_pipe(process, 0) in pipes}

    def forget(self, alive: Sequence[Process]) -> None:
        """Drop the marks of ended processes.  Keep the latest ones' jobs: nvidia-smi may still list them."""
        keys = {(process.pid, process.started, process.env_start) for process in alive}
        self.marks = {key: mark for key, mark in self.marks.items() if key in keys}
        ended = self.owners.keys() - {process.pid for process in alive}
        for pid in [pid for pid in self.owners if pid in ended][:-FORMER_COUNT]:
            del self.owners[pid]

    def owner_of(self, pid: int) -> str | None:
        """The job of a pid that nvidia-smi lists, as of the last refresh; None: somebody else's."""
        process, (started, mark) = self.find(pid), self.owners.get(pid, (0, ""))
        is_other = process is not None and process.started != started and not self.is_gone(process)
        return None if is_other else mark.partition(" ")[0] or None

    def send(self, process: Process, number: int) -> None:
        """Signal this process, and no other that has got its pid."""
        with contextlib.suppress(OSError):
            if self.is_alive(process.pid, process.started):
                os.kill(process.pid, number)


def count_oom_kills() -> int | None:
    """How many processes the kernel has ended for lack of memory: of this process's group, else of the machine."""
    with contextlib.suppress(NexusError):
        for path in (*list_oom_files(read_proc(f"{PROC}/self/cgroup")), f"{PROC}/vmstat"):
            match = re.search("(?m)^oom_kill ([0-9]{1,18})$", read_proc(path))
            if match:
                return int(match[1])
    return None


def find_process_user(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return find_user(os.stat(f"{PROC}/{pid}").st_uid)
    return None


TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def import_psutil() -> Any:
    """psutil, or None where it is not installed: then the memory of jobs, and the host's figures, are unknown."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def measure_host(psutil: Any) -> dict[str, float | None]:
    """What the whole machine uses, since the refresh before; None: unknown."""
    if psutil is None:
        return dict.fromkeys(("cpu_percent", "memory_used_gb", "memory_total_gb"))
    memory = psutil.virtual_memory()
    return {"cpu_percent": psutil.cpu_percent(), "memory_used_gb": (memory.total - memory.available) / 2**30,
            "memory_total_gb": memory.total / 2**30}


def measure_memory(psutil: Any, processes: Iterable[Process]) -> float | None:
    """MiB of host memory that processes use, shared pages counted once (PSS).  With 100 GB it takes seconds."""
    if psutil is None:
        return None
    used_bytes = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):         # it has ended
            found = psutil.Process(process.pid)
            try:
                used_bytes += found.memory_full_info().pss
            except psutil.AccessDenied:         # another user's process, or root in a container
                used_bytes += found.memory_info().rss
    return used_bytes / 2**20


def read_boot_id() -> str:
    return (read_proc(f"{PROC}/sys/kernel/random/boot_id") or "unknown").strip()


CONTAINER = " (a container)"


def find_pid_namespace() -> str:
    """Where this process's pids count; "" on a kernel without namespaces."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{PROC}/self/ns/pid")
    return ""


def read_machine() -> str:
    """The name of this machine, or of this container: pids mean other processes elsewhere."""
    return socket.gethostname() + (CONTAINER if find_pid_namespace() not in ("", HOST_PIDS) else "")


def is_elsewhere(disk: Disk, machine: str, lock_file: str = "") -> bool:
    """Whether a service may run on that machine, unseen.  Of a former container, with another name, its lock tells."""
    if machine == read_machine():
        return False
    return not machine.endswith(CONTAINER) or (bool(lock_file) and is_locked(disk, lock_file))


def is_alive(running: Mapping[str, Any]) -> bool:
    """Whether the process in a service.json still lives."""
    return running.get("boot_id") == read_boot_id() and Processes().is_alive(running.get("pid"), running.get("started"))


def find_socket_uid(source: tuple[str, int], destination: tuple[str, int] | None) -> int | None:
    """The uid of the TCP socket at `source` connected to `destination` (None: of the listening one); None: it has none.

    It reads the kernel's socket table, as `ss` does.  Source: sock_diag(7), linux/inet_diag.h.
    """
    import struct
    state = TCP_LISTEN if destination is None else TCP_ESTABLISHED
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    peer = destination or (("::" if ":" in source[0] else "0.0.0.0"), 0)
    with contextlib.suppress(OSError):          # out of descriptors; or no numeric address: a name, or fe80::1%eth0
        request = struct.pack(                  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST
            "=IHHIIBBBxIHH16s16sIII", 72, 20, 1, 1, 0, family, socket.IPPROTO_TCP, 0, 1 << state,
            socket.htons(source[1]), socket.htons(peer[1]), socket.inet_pton(family, source[0]),
            socket.inet_pton(family, peer[0]),
            1, 2**32 - 1, 2**32 - 1)            # 1 is lo: include sockets bound to that device
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as netlink:         # NETLINK_SOCK_DIAG
            netlink.settimeout(2.0)
            netlink.send(request)
            answer = netlink.recv(8192)
        if struct.unpack_from("=H", answer, 4)[0] != 2:                                 # NLMSG_ERROR: no such socket
            found_state, uid, inode = answer[17], *struct.unpack_from("=II", answer, 16 + 4 + 48 + 12)
            return uid if found_state == state and (inode or state == TCP_LISTEN) else None
    return None


def is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def unmap(address: tuple[str, int]) -> tuple[str, int]:
    """An IPv4 address that an IPv6 socket reports, as IPv4."""
    return (address[0][7:] if address[0].startswith("::ffff:") and "." in address[0] else address[0]), address[1]


LEASE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
LEASE_TIMEOUT_S = 0.003         # another service that only looks keeps a file locked for much less
LEASE_TOUCH_S = 3600.0          # more often than cleaners of /tmp run


class Leases:
    """Which user's service has which GPU, without root and without a common service.

    Each GPU has a file in a folder that everybody may write.  Whoever has the GPU keeps a shared lock on it: the
    service until the job's runner does, then the runner and its children.  The text names the service and its user.
    Only who can lock the file alone writes it: so one of two services has the GPU; jobs of one service may share it.
    Anybody can put anything there.  So no other file is looked at, nothing waits for a file, and no link is followed.
    """

    def __init__(self, disk: Disk, folder: str, service_id: str) -> None:
        self.disk, self.folder, self.service_id, self.user = disk, folder, service_id, find_user(os.geteuid())
        self.held: dict[str, list[tuple[str, int]]] = {}    # {job id: files and descriptors}, until its runner has them

    def find_holders(self, uuids: Iterable[str]) -> dict[str, str]:
        """{GPU uuid: user} of those GPUs that other services have.  Raises: unavailable."""
        holders = {}
        with self.opened_folder() as folder:
            for uuid in uuids:
                handle, holder = self.lock(folder, uuid)
                if handle is None:
                    holders[uuid] = holder
                else:
                    self.disk.close(handle)
        return holders

    def take(self, job_id: str, uuids: Sequence[str]) -> None:
        """Take GPUs for a job, all or none.  Raises: conflict, naming the holder; unavailable."""
        self.close_own(job_id)
        files = self.held[job_id] = []
        try:
            with self.opened_folder() as folder:
                for uuid in uuids:
                    handle, holder = self.lock(folder, uuid)
                    if handle is None:
                        raise NexusError("conflict", f"the nexus of {holder} took {uuid} first")
                    files.append((os.path.join(self.folder, name_lease(uuid)), handle))
        except BaseException:
            self.close_own(job_id)
            raise

    def paths(self, job_id: str) -> list[tuple[str, str, str]]:
        """Of each GPU: its file, the path by which job.sh opens it, and the service that it must name.

        The second path is that of an open file, which nobody can replace.
        """
        return [(path, f"{PROC}/{os.getpid()}/fd/{handle}", self.service_id) for path, handle in self.held[job_id]]

    def close_own(self, job_id: str) -> None:
        """Close this service's descriptors for a job: from then on the locks are its runner's alone."""
        for _, handle in self.held.pop(job_id, ()):
            self.disk.close(handle)

    @contextlib.contextmanager
    def opened_folder(self) -> Iterator[int]:
        """The folder's descriptor.  Raises: unavailable, when it is not safe."""
        import stat
        with disk_errors("make", self.folder), contextlib.suppress(FileExistsError):
            if not find_status(self.disk, self.folder, is_followed=False):
                self.disk.mkdir(self.folder, 0o1700)
        with disk_errors("use", self.folder), opened(self.disk, self.folder, os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
            status = self.disk.stat(folder)
            if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o1700:
                self.disk.chmod(folder, 0o1777)     # it is new, or its maker was killed before this
            elif status.st_mode & 0o1002 != 0o1002:
                raise NexusError("unavailable", f"{self.folder}, where users' services agree on GPUs, is not a folder "
                                 "that all may write with the sticky bit",
                                 hint=f"chmod 1777 {self.folder}, or set [gpu] lease_dir in config.toml")
            yield folder

    def lock(self, folder: int, uuid: str) -> tuple[int | None, str]:
        """(a GPU's file, locked for this service, ""), or (None, who has the GPU).  Raises: OSError."""
        import stat
        name = name_lease(uuid)
        try:
            status = self.disk.stat(name, folder, is_followed=False)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):      # fs.protected_regular refuses O_CREAT on another's file
                self.disk.close(self.disk.open(name, LEASE_FLAGS | os.O_CREAT | os.O_EXCL, folder=folder))
            status = self.disk.stat(name, folder, is_followed=False)
        blocked = f"(who put something else at {self.folder}/{name})"
        try:
            handle = self.disk.open(name, LEASE_FLAGS, folder=folder)
        except OSError:                             # no file, or its owner keeps others out
            return None, f"{find_user(status.st_uid)} {blocked}"
        with contextlib.ExitStack() as stack:
            stack.callback(self.disk.close, handle)
            status = self.disk.stat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                return None, f"{find_user(status.st_uid)} {blocked}"
            if (status.st_uid, stat.S_IMODE(status.st_mode), status.st_size) == (os.geteuid(), 0o600, 0):
                self.disk.chmod(handle, 0o666)      # it is new, or its maker was killed before this
            if time.time() - status.st_mtime > LEASE_TOUCH_S:
                self.disk.touch(handle)
            if wait_until(lambda: self.sign(handle), LEASE_TIMEOUT_S, 0.001):
                stack.pop_all()
                return handle, ""
            is_lease = self.disk.lock(handle, is_shared=True)
            return None, self.read(handle)[1] if is_lease else f"somebody (who keeps {self.folder}/{name} locked)"

    def sign(self, handle: int) -> bool:
        """Lock a GPU's file for this service, unless another service has.  Raises: OSError."""
        if self.disk.lock(handle) and self.read(handle) != (self.service_id, self.user):        # nobody has the GPU
            self.disk.pwrite(handle, f"{self.service_id} {self.user}\n".encode(), 0)
        # Between both locks another service may come first: then the text is that one's.
        return self.disk.lock(handle, is_shared=True) and self.read(handle)[0] == self.service_id

    def read(self, handle: int) -> tuple[str, str]:
        """(the service in a GPU's file, its user)"""
        text = self.disk.pread(handle, 200, 0).decode("utf-8", "replace")
        service_id, _, user = text.partition("\n")[0].partition(" ")
        return service_id, format_line(user, 60) or "somebody"


def name_lease(uuid: str) -> str:
    return re.sub(r"[^\w.-]", "_", uuid)


def find_lease_folder(disk: Disk, config: GpuConfig) -> str:
    shared = "/run/lock" if is_folder(disk, "/run/lock") and disk.stat("/run/lock").st_mode & 0o002 else "/tmp"
    return os.path.abspath(os.path.expanduser(config.lease_dir or f"{shared}/nexus-leases"))


MAX_SCREENDIR = 70          # bytes: with a longer socket path screen fails without a message
SCREEN_RC = """\
# Written by nexus for its screen sessions; ~/.screenrc is not read for them.
startup_message off
deflogin off
defnonblock on
defutf8 on
defscrollback 5000
# What would freeze or kill a job by a slip of the finger:
bind s
bind ^s
bind k
bind ^k
bind \\\\
bind ^\\\\
"""


class Screen:
    """GNU screen.  Sessions are named PID.NAME, as screen matches names by their prefixes."""

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self.disk, self.layout, self.rc = disk, layout, layout.screen_rc
        self.own_folder = os.path.join(layout.home, "screen")
        self.folder: str | None = None          # SCREENDIR, where the default does not work

    @functools.cached_property
    def path(self) -> str:
        """PATH, on which screen is if it is installed."""
        return complete_path(self.disk, self.layout, os.environ.get("PATH"))

    def prepare(self) -> str | None:
        """Choose a place for the sockets: the default, or else the home.  Return why screen cannot be used, or None."""
        if not find_program("screen", self.path):
            return NO_SCREEN
        try:
            faults = []
            for folder in (None, self.own_folder):
                self.folder, path = folder, folder or os.environ.get("SCREENDIR", "")
                is_long = len(path) > MAX_SCREENDIR
                if folder and not is_long:
                    make_folder(self.disk, path)
                reply = f"{path} is too long a path for its sockets" if is_long else self.call("-ls").strip()
                if re.search(r"No Sockets found|\((Detached|Attached|Dead)|There (is|are)", reply):
                    break
                faults.append(reply)
            else:
                return f"screen: {format_line('; and '.join(faults), 300)}"
            write_if_changed(self.disk, self.rc, SCREEN_RC)
            self.call("-wipe", "nexus")         # removes sockets of killed sessions with this prefix
            return None
        except (OSError, NexusError) as error:
            return f"screen: {format_line(str(error), 200)}"

    def call(self, *words: str) -> str:
        """Raises: unavailable."""
        return run(["screen", *words], 10, self.environ()).output

    def environ(self) -> dict[str, str]:
        """The environment of screen and of runners; no job gets it."""
        names = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "USER", "LOGNAME", "SHELL", "SCREENDIR")
        passed_on = {name: os.environ[name] for name in names if name in os.environ}
        own = {"SCREENDIR": self.folder} if self.folder else {}
        return {"PATH": self.path, **passed_on, "TERM": "xterm-256color", "SYSSCREENRC": "/dev/null", **own}

    def argv(self, name: str, command: Sequence[str], *, is_daemon: bool) -> list[str]:
        return ["screen", "-c", self.rc, *(["-d", "-m"] if is_daemon else ["-D", "-m"]), "-S", name, *command]

    def list_sessions(self) -> dict[str, str]:
        """{PID.NAME: `Detached` or the like}"""
        return dict(re.findall(SCREEN_SESSION, self.call("-ls")))


SLURM_TIMEOUT_S = 60.0          # without slurmctld or munged, Slurm's programs try for up to 50 s
SLURM_VARIABLES = r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|KRB5\w+|SLURM_CONF|SBATCH_(?!CLUSTERS$|ARRAY_INX$|WAIT$)\w+"


class Slurm:
    """Runs Slurm's programs."""

    def __init__(self, service_id: str, environ: Mapping[str, str]) -> None:
        """Jobs get sbatch's environment: it holds no secrets.  --export=NONE would run each user's login shell."""
        self.service_id = service_id
        kept = {name: text for name, text in environ.items() if re.fullmatch(SLURM_VARIABLES, name)}
        self.environ = {**kept, "TZ": "UTC"}

    def ask(self, *argv: str) -> tuple[Completed, str]:
        """(a program's result, its output as a message).  Raises: unavailable, with Slurm's own words."""
        install = "run nexus where sbatch works (apt install slurm-client), or set [jobs] launcher (nexus config edit)"
        try:
            done = run(argv, SLURM_TIMEOUT_S, self.environ, install=install)
        except NexusError as error:
            raise error if error.hint == install else fail_slurm(error.message) from None
        return done, clean_slurm_words(done.output) or f"{argv[0]} ended with exit code {done.exit_code}"

    def read(self, *argv: str) -> str:
        """The output of a program that must succeed.  Raises: unavailable."""
        done, words = self.ask(*argv)
        # squeue, when the user's name cannot be looked up, shows no job, and its exit code is 0.
        if done.exit_code or re.search("(?m)^squeue: error: Invalid user", done.output):
            raise fail_slurm(words)
        return done.output

    def submit(self, argv: Sequence[str]) -> tuple[str | None, str]:
        """(the job's id or None, Slurm's words).  Raises: unavailable; Slurm may have the job all the same."""
        done, words = self.ask(*argv)
        match = re.search(SBATCH_ANSWER, done.output)
        if match and not done.exit_code:
            return match[1], ""
        if done.exit_code <= 0 or read_refusal(words)[0] == "cluster":
            raise fail_slurm(words)
        return None, words

    def query_jobs(self) -> list[SlurmJob]:
        """All jobs of this user that slurmctld knows, ended ones for its MinJobAge.  Raises: unavailable."""
        text = self.read("squeue", "-h", "-a", "-t", "all", "-u", str(os.geteuid()), "-o", SQUEUE_FORMAT)
        return parse_slurm_jobs(text, self.service_id)

    def cancel(self, ids: Sequence[str]) -> str:
        """Slurm's words when it refuses.  Raises: unavailable."""
        done, words = self.ask("scancel", *ids)
        return words if done.exit_code else ""

    def query_partitions(self) -> tuple[SlurmPartition, ...]:
        """Raises: unavailable."""
        return parse_slurm_partitions(
            self.read("scontrol", "show", "partition", "-o"), self.read("scontrol", "show", "node", "-d", "-o"))

    def query_name(self) -> str:
        """The cluster's name.  Raises: unavailable."""
        match = re.search(r"^ClusterName\s*=\s*(\S+)", self.read("scontrol", "show", "config"), re.MULTILINE)
        return match[1] if match else "?"


def fail_slurm(words: str) -> NexusError:
    return NexusError("unavailable", f"Slurm does not answer: {words}",
                      hint=read_refusal(words)[1] or "nexus goes on when it does; see: scontrol ping")


def find_python(environ: Mapping[str, str]) -> str:
    """`python`, or `python3` where PATH has no python."""
    return "python" if find_program("python", environ.get("PATH") or os.defpath) else "python3"


NO_BASH = "bash was not found on the service's PATH: no job can start"
NO_BASH_HINT = "install bash; or nexus restart in a shell where `type bash` finds it"


class Machine:
    """This machine as the service uses it: GPUs, processes, sessions, leases and launching."""

    def __init__(self, config: Config, layout: Layout, disk: Disk, service_id: str) -> None:
        is_slurm = config.jobs.launcher == "slurm"
        self.is_mock = config.mock_gpus is not None and not is_slurm
        # With Slurm nothing of this machine is used: the GPUs are Slurm's.
        self.gpu_source: GpuSource = NvidiaSmi()
        if is_slurm or self.is_mock:
            self.gpu_source = MockGpus(0 if is_slurm else config.mock_gpus or 0)
        self.processes = Processes()
        self.psutil = import_psutil()
        self.leases = (
            None if self.is_mock or is_slurm else Leases(disk, find_lease_folder(disk, config.gpu), service_id))
        self.screen = Screen(disk, layout)
        self.no_screen_reason: str | None = f'launcher is "{config.jobs.launcher}"'
        if config.jobs.launcher == "screen":
            self.no_screen_reason = self.screen.prepare()
        self.children: dict[str, subprocess.Popen[bytes] | Spawned] = {}        # {job id: its screen or job.sh}
        self.boot_id = read_boot_id()
        self.environ = self.screen.environ()            # of screen and of runners; no job gets it
        if self.no_screen_reason:
            self.environ["LC_ALL"] = "C"                # bash starts sooner without a locale
        withhold_descriptors()

    def launch(self, job: Job, script: str) -> str | None:
        """Start a job's script, directly or in a screen session; return that one's PID.NAME.  Raises: OSError."""
        command, name = ["bash", script, str(job.attempt)], f"nexus_job_{job.id}"
        if not self.no_screen_reason:
            command = self.screen.argv(name, command, is_daemon=False)
        child = self.children[job.id] = spawn(command, self.environ)
        if self.no_screen_reason:
            return None
        self.processes.set_aside(child.pid)
        return f"{child.pid}.{name}"

    def has_bash(self) -> bool:
        """Whether job.sh can be run."""
        return find_program("bash", self.screen.path) is not None

    def count_oom_kills(self) -> int | None:
        return count_oom_kills()

    def is_going_down(self) -> bool:
        """Whether the machine is being shut down, as far as systemd says."""
        with contextlib.suppress(NexusError):
            return run(["systemctl", "is-system-running"], 5).output.strip() == "stopping"
        return False

    def reap(self) -> list[str]:
        """The jobs whose screen or job.sh has ended since the last call."""
        alive = {job_id: child for job_id, child in self.children.items() if child.poll() is None}
        ended, self.children = [job_id for job_id in self.children if job_id not in alive], alive
        return ended


# A work tree is kept through an index of its own: only git's objects and one ref, refs/nexus/COMMIT, are written into
# the user's repository.

GIT_TIMEOUT_S = 600.0
MAX_UNTRACKED_MIB = 500
GIT_OPTIONS = [word for setting in (            # no hook, no daemon; the whole tree, as it is on the disk
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.sparseCheckout=false", "core.ignoreStat=false",
    "core.splitIndex=false", "core.safecrlf=false", "core.logAllRefUpdates=false") for word in ("-c", setting)]


class TreeSnapshot(Value):
    """A git work tree, kept as a commit."""
    commit: str
    repository: str                     # the work tree's top, without symbolic links


def run_git(folder: str, environ: Mapping[str, str], *arguments: str, stdin: str = "", most_bytes: int = 0,
            **variables: str) -> str:
    """The output of git in a folder.  Raises: unavailable, with git's errors, without its warnings and advice."""
    own = {name: text for name, text in environ.items() if not name.startswith("GIT_")}     # a hook's: another index
    own.update({"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", **variables})
    done = run(["git", *GIT_OPTIONS, "-C", folder, *arguments], GIT_TIMEOUT_S, own, stdin=stdin, is_apart=True,
               undecodable="surrogateescape", most_bytes=most_bytes, purpose=f"git in {folder}",
               hint="are there large files? add them to .gitignore",
               install="install git, or add the job without --snapshot")
    if done.exit_code:
        errors = [line for line in done.errors.splitlines() if line.startswith(("fatal: ", "error: "))]
        words = format_line(" ".join(errors or done.errors.split()) or "nothing", 300)
        raise NexusError("unavailable", f"the snapshot of {folder} failed: git {arguments[0]} says: {words}",
                         hint=f"try it by hand: git -C {folder} status; or add the job without --snapshot")
    return done.output


def take_snapshot(cwd: str, environ: Mapping[str, str]) -> TreeSnapshot:
    """Keep the work tree that `cwd` is in: tracked files, and those that git does not ignore.

    The snapshot is a commit on top of HEAD, on no branch; HEAD itself when nothing differs.  Nothing else changes.
    Raises: usage, when there is no work tree or too much in it; unavailable.
    """
    import shutil
    import tempfile
    top = find_work_tree(cwd, environ)
    with tempfile.TemporaryDirectory(prefix="nexus-") as aside:
        index = os.path.join(aside, "index")

        def git(*arguments: str, stdin: str = "", **variables: str) -> str:
            return run_git(top, environ, *arguments, stdin=stdin, most_bytes=0, GIT_INDEX_FILE=index, **variables)

        own_index = os.path.join(top, run_git(top, environ, "rev-parse", "--git-path", "index")[:-1])
        with disk_errors("copy git's index to", aside), contextlib.suppress(FileNotFoundError):     # nothing added yet
            shutil.copy2(own_index, index)      # it holds git's record of unchanged files, and has a time
        # git does not look at files that are marked so.  What a sparse checkout leaves out keeps its mark.
        marks = [(entry[0], entry[2:]) for entry in git("ls-files", "-z", "-v").split("\0")[:-1]]
        assumed = [path for mark, path in marks if mark.islower()]
        present = [path for mark, path in marks if mark in "Ss" and os.path.lexists(os.path.join(top, path))]
        for option, paths in (("--no-assume-unchanged", assumed), ("--no-skip-worktree", present)):
            if paths:
                git("update-index", "-z", option, "--stdin", stdin="".join(f"{path}\0" for path in paths))
        untracked = git("ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]
        # git adds a repository inside this one as a link, and refuses one that has no commit.
        nested = [path[:-1] for path in untracked if path.endswith("/")]
        check_sizes(top, [path for path in untracked if not path.endswith("/")])
        git("add", "-A", *(["--", ".", *(f":(exclude,literal){path}" for path in nested)] if nested else []))
        tree = git("write-tree", "--missing-ok").strip()        # a partial clone lacks objects
        head, head_tree, date = "", "", "0"
        with contextlib.suppress(NexusError, ValueError):       # no commit yet
            head, head_tree, date = git("log", "-1", "--no-show-signature", "--format=%H %T %ct", "HEAD").split()
        commit = head
        if tree != head_tree:                                   # the commit depends on nothing but these two
            who = {f"GIT_{role}_{fact}": text for role in ("AUTHOR", "COMMITTER")
                   for fact, text in (("NAME", "nexus"), ("EMAIL", "nexus@localhost"), ("DATE", f"@{date} +0000"))}
            commit = git("commit-tree", tree, *(["-p", head] if head else []), "-m",
                         "nexus: the work tree as it was at submit", **who).strip()
        if not (fits_alone(JOB_FIELDS["snapshot"].schema, commit) and fits_alone(PATH, top)):
            raise NexusError("unavailable", f"the snapshot of {cut_words(top, 200)} failed: git calls it "
                             f"{cut_words(commit, 60)}", hint="try it by hand: git --version")
        git("update-ref", f"refs/nexus/{commit}", commit)
    return TreeSnapshot(commit, top)


def find_work_tree(cwd: str, environ: Mapping[str, str]) -> str:
    """The top of a folder's work tree.  Raises: usage, unavailable."""
    try:
        return run_git(cwd, environ, "rev-parse", "--show-toplevel")[:-1]
    except NexusError as error:
        if not re.search("not a git repository|must be run in a work tree", error.message):
            raise
        raise NexusError("usage", f"{cwd} is not in a git work tree, and --snapshot needs one", hint="make it one: "
                         f"git -C {cwd} init; or cd to a checkout; or add the job without --snapshot") from None


def check_sizes(top: str, untracked: Sequence[str]) -> None:
    """Raises: usage, when the files that git neither tracks nor ignores are too many or too large."""
    sizes = []
    for path in untracked:
        with contextlib.suppress(OSError):              # the file is gone
            sizes.append((os.lstat(os.path.join(top, path)).st_size / 2**20, path))
    total_mib = sum(size_mib for size_mib, _ in sizes)
    if total_mib > MAX_UNTRACKED_MIB:
        size_mib, path = max(sizes)
        raise NexusError("usage", f"{top} has {format_count(len(sizes), 'file')} that git neither tracks nor ignores, "
                         f"{format_memory(total_mib)} together; a snapshot takes {MAX_UNTRACKED_MIB}MB of them",
                         hint=f"the largest is {format_line(path)} ({format_memory(size_mib)}): add it to .gitignore")


def release_snapshot(repository: str, commit: str, environ: Mapping[str, str]) -> None:
    """Let `git gc` remove a snapshot that no job needs, if the repository still exists."""
    with contextlib.suppress(NexusError):
        run_git(repository, environ, "update-ref", "-d", f"refs/nexus/{commit}")


# Nodes are reached by OpenSSH, which handles keys, agents, jump hosts and host keys.

SSH_TIMEOUT_S = 40.0            # for connecting, also through a jump host
SSH_CALL_TIMEOUT_S = 120.0      # for a command there
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3",
               "ForwardAgent=no", "ForwardX11=no", "PermitLocalCommand=no", "ControlPersist=no", "RemoteCommand=none",
               "StreamLocalBindUnlink=yes")
MAX_SAID_BYTES = 2**20          # of what a command on a node may print, also by git
INSTALL_SSH = "install OpenSSH's client: apt install openssh-client"
SSH_NOISE = ("@", "Warning: Permanently added", "mux_client", "kex_exchange_identification",
             "Connection closed by UNKNOWN", "Connection to UNKNOWN")
SSH_HINTS = (                   # (pattern of ssh's words, what to do)
    ("IDENTIFICATION HAS CHANGED",
     "its host key is another than before: find out why; then ssh-keygen -R {host} forgets the old one"),
    ("Host key verification failed", "accept its host key once, after you have checked it: {ssh} true"),
    ("Permission denied (", "log in by key, without a password: {copy}"),
    ("Too many authentication failures", "name the key that is right: --identity FILE"),
    ("administratively prohibited",
     "the jump host's sshd must allow it: AllowTcpForwarding yes in sshd_config"))


MAX_HEAD_BYTES = 2**16          # of a request or a reply of HTTP


def watch_line(line: socket.socket, timeout_s: float) -> None:
    """Detect a TCP peer that is off, asleep or cut off, even while nothing is sent."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in ((socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, max(1, int(timeout_s))),
                           (socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))):       # for data that is not acknowledged
        line.setsockopt(socket.IPPROTO_TCP, option, number)


def ssh_flags(**given: object) -> list[str]:
    """ssh's one-letter options for the given values."""
    return [word for letter, text in given.items() if text for word in (f"-{letter}", str(text))]


class Ssh:
    """The OpenSSH connection to a node."""

    def __init__(self, node: NodeConfig, environ: Mapping[str, str]) -> None:
        self.node = node
        self.environ = {**environ, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}

    def list_options(self) -> list[str]:
        node, options = self.node, [word for option in SSH_OPTIONS for word in ("-o", option)]
        options += ssh_flags(i=os.path.expanduser(node.identity_file))
        if node.jump:                                   # -J would ask questions, and ignores -i
            user, _, place = node.jump.rpartition("@")
            host, _, port = place.partition(":")
            jump = " ".join(map(quote, ["ssh", *options, *ssh_flags(p=port, l=user)]))
            options += ["-o", f"ProxyCommand={jump} -W [%h]:%p {quote(host)}"]
        return [*options, *ssh_flags(p=node.port)]

    @property
    def by_hand(self) -> str:
        """The command by which a person reaches the node."""
        node = self.node
        words = ["ssh", *ssh_flags(J=node.jump, p=node.port, i=node.identity_file), node.destination]
        return " ".join(map(quote, words))

    def fault(self, what: str, said: str) -> NexusError:
        """The error with the words of ssh, or of a nexus there."""
        said, _, advice = said.partition("\nhint: ")
        lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(SSH_NOISE)]
        why = format_line("; ".join(lines[-3:]), 300) or "the line was cut"
        hint = next((hint for words, hint in SSH_HINTS if words in said), "try it by hand: {ssh}").format(
            host=self.node.host, ssh=self.by_hand,
            copy=self.by_hand.replace("ssh ", "ssh-copy-id ", 1).replace(" -J ", " -o ProxyJump="))
        return NexusError("unavailable", f"{what} {self.node.name}: {why}",
                          f"{format_line(advice.strip(), 300)}; {hint}" if advice else hint)

    def run(self, what: str, command: str, stdin: str = "") -> str:
        """The output of a command there.  Raises: unavailable, with ssh's words; not_found, when the command fails."""
        done = run(self.list_words(command), SSH_CALL_TIMEOUT_S, self.environ, stdin=stdin, is_apart=True,
                   most_bytes=MAX_SAID_BYTES, purpose=f"ssh to {self.node.name}",
                   hint=f"try it by hand: {self.by_hand}",
                   install=INSTALL_SSH)
        if done.exit_code:
            error = self.fault(what, done.errors or done.output or f"exit code {done.exit_code}")
            raise NexusError("unavailable" if done.exit_code == 255 else "not_found", error.message, error.hint)
        return done.output

    def list_words(self, *command: str, is_tty: bool = False) -> list[str]:
        options = [*self.list_options(), "-oClearAllForwardings=yes", "-tt" if is_tty else "-T"]
        return ["ssh", *options, self.node.destination, *command]


def describe_bad_node(name: str, why: object) -> NexusError:
    words = f"{why} is missing" if isinstance(why, KeyError) else str(why)
    return NexusError("unavailable", f"{name} answers what no nexus does: {format_line(words, 200)}",
                      hint=f"see what is wrong there, or give it up: nexus node remove {name} --force")


# git keeps in memory all refs that the other side tells of: so it hears no more than MAX_REFS_BYTES.  dd passes on at
# once what it reads.
SSH_FOR_GIT = '"$@" | dd bs=65536 iflag=count_bytes count="$0" 2> /dev/null'
MAX_REFS_BYTES = 2**24          # 100,000 snapshots have less
RECEIVE_PUSH = 'exec git-receive-pack "$0"'     # git adds the URL's path


def push_snapshot(ssh: Ssh, repository: str, commit: str, name: str, environ: Mapping[str, str]) -> str:
    """Push a snapshot into a node's repository `name`; return its path there.  Raises: as Ssh.run()."""
    script = (f'd=${{NEXUS_HOME:-$HOME/.nexus}}/agent/snapshots/{name}.git; umask 077; mkdir -p "$d" && cd "$d" && '
              "{ [ -e HEAD ] || git init -q --bare .; } && pwd -P")
    said = ssh.run("cannot keep the snapshot on", f"sh -c {quote(script)}")
    path = said.strip().rpartition("\n")[2]
    if not fits_alone(FACT_KINDS["FilePath"].schema, path):
        raise describe_bad_node(ssh.node.name, f"the snapshot's place is {path}")
    through = " ".join(map(quote, ["sh", "-c", SSH_FOR_GIT, str(MAX_REFS_BYTES), *ssh.list_words()[:-1]]))
    # The node's path is no part of the URL: git would take another host, port or user from one like /x@[host:22]/y.
    receive = f"sh -c {quote(RECEIVE_PUSH)} {quote(path)}"
    run_git(repository, environ, "push", "-q", f"--receive-pack={receive}", f"ssh://{ssh.node.destination}/{name}.git",
            f"{commit}:refs/nexus/{commit}", most_bytes=MAX_SAID_BYTES, GIT_SSH_COMMAND=through, GIT_SSH_VARIANT="ssh")
    push_large_files(ssh, repository, commit, path, environ)
    return path


# `git push` leaves out what git-lfs keeps.  A node's repository gets that beside it, and requires git-lfs from then on:
# else a checkout would have git-lfs's pointers in the place of the files.  One line each: csh takes no more in quotes.
PREPARE_LFS = (
    'cd "$0" || exit; git lfs version > /dev/null 2>&1 || { echo "git-lfs is not installed" >&2; exit 1; }; '
    "is_set() { git config filter.lfs.required > /dev/null; }; "
    "is_set || git lfs install --local --skip-repo > /dev/null || is_set || exit; "
    'mkdir -p lfs/objects && cd lfs/objects && number=0 && while read -r name; do [ -e "$name" ] || echo $number; '
    "number=$((number + 1)); done")                     # the numbers of the names that are not there
SEND_LFS = 'tar -C "$0" -chf - -T - | "$@"'
RECEIVE_LFS = (
    'cd "$0/lfs" && part=$(mktemp -d part.XXXXXX) && trap \'rm -rf "$part"\' EXIT && '
    'tar -C "$part" -xf - && cp -Rlf "$part/." objects/')


def push_large_files(ssh: Ssh, repository: str, commit: str, path: str, environ: Mapping[str, str]) -> None:
    """Send the files of a snapshot that git-lfs keeps to a node's repository.  Raises: as Ssh.run()."""
    def on_node(script: str) -> str:
        return f"sh -c {quote(script)} {quote(path)}"

    if "filter.lfs.clean" not in run_git(repository, environ, "config", "--list", "--name-only").split():
        return
    listing = run_git(repository, environ, "lfs", "ls-files", "--long", commit)
    listed = re.findall("^([0-9a-f]{64}) [*-] ", listing, re.M)
    if not listed:
        return
    [folder] = re.findall("^LocalMediaDir=(.*)", run_git(repository, environ, "lfs", "env"), re.M)
    names = sorted({f"./{digest[:2]}/{digest[2:4]}/{digest}" for digest in listed})
    absent = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    if absent:
        raise NexusError("not_found", f"git-lfs has not fetched {format_count(len(absent), 'file')} of the snapshot",
                         hint=f"git -C {repository} lfs fetch")
    said = ssh.run("cannot keep the snapshot on", on_node(PREPARE_LFS), "".join(f"{name}\n" for name in names))
    numbers = set(said.split())
    wanted = "".join(f"{name}\n" for number, name in enumerate(names) if str(number) in numbers)
    if wanted:
        done = run(["sh", "-c", SEND_LFS, folder, *ssh.list_words(on_node(RECEIVE_LFS))], GIT_TIMEOUT_S, ssh.environ,
                   stdin=wanted, is_apart=True, most_bytes=MAX_SAID_BYTES, purpose=f"git-lfs to {ssh.node.name}")
        if done.exit_code:
            raise ssh.fault("cannot keep the snapshot's large files on", done.errors)


# ==== 11. RUNNER ==== job.sh: what runs around each job; and what keeps the service running
# job.sh is bash and a few coreutils: it costs little while the job lives, and can be read and run by hand.  It claims
# its attempt, shares the lock of the GPU lease with the service, says `start`, runs the command with its output
# straight into the log files, says `end`, and leaves a result file.  Its events are acted upon at once; its files say
# the same to a service that missed them.

# job.sh, after build_script()'s assignments.  The functions come first, then what happens, in its order.
JOB_SCRIPT = r'''
say() { [ -p "$events" ] && printf '%s\n' "$*" 1<>"$events"; } 2>/dev/null
uptime_cs() { read -r up rest < /proc/uptime; up=${up%.*}${up#*.}; }
fail() { say fail "$id" "$attempt" "$@"; printf '%s\n' "$*" >&7; exit 0; }
# The locks on the GPUs' lease files keep other users' services off.  The service holds them until this script does.
# Anybody may write the folder, so the files are opened by the descriptors of the service, and must name it.
leases=()
hold_leases() {
  local number file owner
  for number in "${!lease_files[@]}"; do
    { exec {file}<"${lease_handles[number]}"; } 2>/dev/null && leases+=("$file") && flock -s -n "$file" &&
      [ "${lease_files[number]}" -ef "/proc/$$/fd/$file" ] && read -r owner _ <&"$file" &&
      [ "$owner" = "$service_id" ] || return 1
  done
}
release_leases() {
  local file
  for file in "${leases[@]}"; do exec {file}<&-; done
  leases=()
}
# An orphan would be taken for what the command left.  SIGKILL: a shell that was just forked may lose another signal.
end_viewer() { [ -z "$viewer" ] || { kill -9 "$viewer"; wait "$viewer"; } 2>/dev/null; }
# Whether processes of this session are left, beside this script and its children.  After a short command only the pids
# above $first, the last one before it, are looked at: so the other processes of the machine cost nothing.
has_company() {
  local pid stat
  read -r rest rest rest rest last < /proc/loadavg
  if [ "$took" -lt 1000 ] && [ "$last" -ge "$first" ] && [ $((last - first)) -lt 1000 ]; then
    for ((pid = first + 1; pid <= last; pid++)); do
      [ -e "/proc/$pid/stat" ] || continue
      stat='' && read -r -d '' stat < "/proc/$pid/stat"
      set -- ${stat##*) }                 # its state, parent, process group and session
      [ "${4-}" != $$ ] || [ "$2" = $$ ] || [[ $1 = [ZX] ]] || return 0
    done
    return 1
  fi
  # cat goes on where a process ends while its file is read; sed would stop there.
  cat /proc/[0-9]*/stat </dev/null 2>/dev/null |
    sed -n "s/^\([0-9]*\) .*) [^ZX] \([0-9]*\) [0-9]* $$ .*/ \1 \2 /p" | grep -qv " $$ "
}
# Write how it ended: code $1, after $took, for $cause and $words; $goes_on if others of its session do.  A full disk
# loses nothing: retry until there is room, and say that there was none.
finish() {
  until { [ -z "$cause" ] || printf '%s\n' "$words" > "$dir/fault-$attempt"; } &&
      printf '{"exit_code": %s, "runtime_seconds": %s.%02d%s}\n' "$1" $((took / 100)) $((took % 100)) \
        "${cause:+, \"cause\": \"$cause\"}${goes_on:+, \"goes_on\": true}${is_cut:+, \"is_cut\": true}" \
        > "$dir/result-$attempt.json" &&
      { [ -d "/proc/$recorder" ] || sync "$dir/result-$attempt.json"; }      # a running service records the end itself
  do
    is_cut=yes
    sleep 2
    [ -d "$dir" ] || break
    say end "$id" "$attempt" "$1" "$took" 1
  done 2>/dev/null
}
# The command does not run: $1 is the cause, `launch` or `bounce`, and the rest tells why.
refuse() {
  cause=$1 took=0 words=${*:2}
  release_leases
  if [ "$cause" = bounce ]; then say bounce "$id" "$attempt" "$words"
  else printf 'nexus: %s\n' "$words" >> "$dir/stderr.log"; fi
  [ -z "$is_new" ] || rm -rf "$tree"
  finish null
  end_viewer
  exit 0
}

if [ -z "$attempt" ]; then                # by hand
  [ -z "$commit" ] || {
    printf 'nexus: the job ran in a checkout that is gone; make another: git -C %s worktree add DIR %s\n' \
      "$repo" "$commit" >&2
    exit 1
  }
  cd "$cwd" && exec 5>&2 6>&1 7>&2 && command_of_the_job exec
  exit
fi

# Of a command that a signal ended, bash says the whole text, with its variables: this shell's own words are for nobody.
exec 7>&2 2>/dev/null
trap : HUP                                # it outlives screen; the command does not inherit this
trap : INT QUIT TERM                      # Ctrl-C, or `kill 0`, ends the command, not this script
viewer='' cause='' is_new='' goes_on='' is_cut=''

# Whoever makes this file has the attempt: this script, or a service that found no runner.  As long as it is empty, the
# service waits for whoever may be about to write it.
read -r stat < /proc/$$/stat
set -- ${stat##*) }
started=${20}
set -C                                    # an open does not succeed where there is a file
exec 8>"$dir/attempt-$attempt" || {
  [ -e "$dir/attempt-$attempt" ] || fail "the log folder $dir cannot be written"
  exit 0
}
set +C
printf '%s %s\n' "$$" "$started" >&8 || fail "the log folder $dir cannot be written"
exec 8>&-
read -r owner < "$dir/attempt-$attempt"
[ "$owner" = "$$ $started" ] || exit 0    # somebody removed it, and it was made again
hold_leases || refuse bounce a GPU lease was lost before its job began

# From here on the job counts as begun.
uptime_cs
printf '%s\n' "$up" >> "$dir/attempt-$attempt" || fail "the log folder $dir cannot be written"
say start "$id" "$attempt" "$$" "$started" "$up"
if [ "$commit" ]; then
  [ -d "$tree" ] || is_new=yes            # an earlier attempt's tree stays, with what that has written
  said=$(check_out 2>&1) || {
    [ $? -le 128 ] || said="git was ended by a signal"
    refuse launch "the snapshot of $repo cannot be checked out: $said"
  }
fi
cd "$cwd" 2>/dev/null || refuse launch "the directory $cwd cannot be entered; make it again, or add the job with --cwd"
PATH=$job_path type -P bash > /dev/null || refuse launch "bash was not found on PATH, as $dir/job.sh sets it"
exec 5>>"$dir/stderr.log" 6>>"$dir/stdout.log" || refuse launch "the log files in $dir cannot be written"
if [ -t 1 ]; then                         # under screen, its window shows the logs
  (
    release_leases
    NEXUS_ROLE=viewer exec tail -qn 100 -s 0.2 -f --pid=$$ "$dir/stdout.log" "$dir/stderr.log"
  ) </dev/null 5>&- 6>&- 7>&- &
  viewer=$!
fi

uptime_cs; begin=$up
read -r rest rest rest rest first < /proc/loadavg
command_of_the_job
code=$?

trap '' HUP INT QUIT TERM USR1 USR2       # a stop's signals are not for what this script itself runs from here on
umask 077
exec 5>&- 6>&-
if [ -e "$dir/fault-$attempt" ]; then      # from CONDA_SCRIPT; after a signal, the environment is not at fault
  read -r words < "$dir/fault-$attempt"
  rm -f "$dir/fault-$attempt"
  [ "$code" -gt 128 ] || refuse launch "$words"
fi
uptime_cs; took=$((up - begin))
release_leases
[ -z "$commit" ] || has_company || tidy   # before the end is said: the next attempt uses the same checkout
say end "$id" "$attempt" "$code" "$took"
# While others of its session work, the job goes on; the service ends those that idle.  This script stays with them: the
# end of a session's leader hangs up its terminal.  Slurm ends with a job what it left.
[ "${SLURM_JOB_ID-}" ] || ! has_company || goes_on=yes
finish "$code"
if [ "$goes_on" ]; then
  while sleep 1; has_company; do :; done
  uptime_cs; took=$((up - begin)) goes_on=
  finish "$code"
  say end "$id" "$attempt" "$code" "$took"
fi
[ -z "$commit" ] || tidy
end_viewer
'''

# Of a job with --snapshot.  Its checkout is $tree, whose .git borrows all but HEAD and index from the repository: a
# folder `objects` there would hide the repository's git-lfs objects from git-lfs.
# `git worktree add` would write into that, and break other git programs that run at that moment.
SNAPSHOT_SCRIPT = r'''
git_in() (
  hide_environment
  export PATH="$job_path" HOME="$home" LC_ALL=C GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
  exec git $git_options -C "$@"
)
check_out() {
  local common
  umask "$umask"
  rm -f "$tree/.git/index.lock"
  common=$(git_in "$repo" rev-parse --git-common-dir </dev/null) || return
  case $common in /*) ;; *) common=$repo/$common;; esac
  mkdir -p "$tree/.git" && printf '%s\n' "$common" > "$tree/.git/commondir" &&
    printf '%s\n' "$commit" > "$tree/.git/HEAD" && git_in "$tree" read-tree --reset HEAD </dev/null &&
    git_in "$tree" ls-files -z --deleted </dev/null | git_in "$tree" checkout-index -zu --stdin && mkdir -p "$cwd"
}
# Files that the job has written into its checkout stay there; those from git, and compiled Python, go.  The job's own
# changes to HEAD and index do not count.  Where git cannot tell them apart, all files are kept.  git-lfs keeps what it
# is asked about: not in the repository.
git_here() { git_in . -c lfs.storage="$tree/.git/lfs" --git-dir=.git --work-tree=. "$@"; }
tidy() (
  cd "$tree" && [ -d .git ] || exit
  rm -f .git/index.lock
  git_here read-tree --reset "$commit" && {
    git_here update-index -q --refresh
    git_here diff-files -z --name-only --diff-filter=d | git_here update-index -z --force-remove --stdin
  } && { git_here ls-files -z | xargs -0 rm -f --; rm -rf .git; }      # where one is a folder now, that stays
  find . -name __pycache__ -type d -prune -exec rm -rf {} +
  find . -depth -mindepth 1 -type d -empty -delete
  rmdir "$tree"
) 2>/dev/null
'''


CONDA_SCRIPT = r'''
# Activate the conda environment $1, a name or a path, and exec the command in the other words.
# conda, mamba and micromamba print what a shell must evaluate for it.  `conda run` would hold the output back.  All
# names begin with nexus_, so that they do not meet those of the job's environment or of an activation script.
nexus_name=$1 nexus_fault=$NEXUS_JOB_FAULT
nexus_order=${CUDA_DEVICE_ORDER+=$CUDA_DEVICE_ORDER} nexus_devices=${CUDA_VISIBLE_DEVICES+=$CUDA_VISIBLE_DEVICES}
unset NEXUS_JOB_FAULT
nexus_known=(~/{miniconda3,miniforge3,mambaforge,anaconda3}/bin/conda ~/.local/bin/micromamba ~/bin/micromamba
             /opt/{conda,miniconda3,miniforge3,anaconda3}/bin/conda)

# Tell job.sh, or the person who runs it by hand, why the command does not run.
nexus_fail() {
  trap - EXIT
  nexus_words=${1//[[:cntrl:]]/?}         # not `local`: after `set -e`, the trap runs outside any function
  { [ "$nexus_fault" ] && printf '%s\n' "$nexus_words" > "$nexus_fault"; } || printf 'nexus: %s\n' "$nexus_words" >&2
  exit 1
}
nexus_explain() {
  "$nexus_exe" env list </dev/null >&2
  nexus_fail "the conda environment '$nexus_name' was not found, or could not be activated, by ${nexus_exe##*/}:\
 stderr.log says why, and which there are"
}

for nexus_exe in "$CONDA_EXE" "$MAMBA_EXE" "$(type -P conda)" "$(type -P mamba)" "$(type -P micromamba)" \
    "${nexus_known[@]}" ''; do
  [ -f "$nexus_exe" ] && [ -x "$nexus_exe" ] && break
done
[ "$nexus_exe" ] || nexus_fail "no conda was found for the environment '$nexus_name': not by CONDA_EXE or MAMBA_EXE,\
 not as conda, mamba or micromamba on PATH, and none of {~,/opt}/{miniconda3,miniforge3,mambaforge,anaconda3},\
 /opt/conda, {~,~/.local}/bin/micromamba is there"
case ${nexus_exe##*/} in
  *mamba*) nexus_text=$("$nexus_exe" shell activate "$nexus_name" --shell bash </dev/null);;
  *) nexus_text=$("$nexus_exe" shell.posix activate "$nexus_name" </dev/null);;
esac || nexus_explain
eval "nexus_activate() { $nexus_text
}" 2>/dev/null || nexus_explain            # bash would quote what it cannot parse, and PATH stands in it
trap "nexus_fail \"a script of the conda environment '\$nexus_name' ended the activation with exit code \$?\"" EXIT
nexus_activate </dev/null >&2
trap - EXIT
[ -d "$CONDA_PREFIX" ] || nexus_explain   # old micromambas activate whatever they are told
if [ "${VIRTUAL_ENV-}" ]; then             # active where the job was added; its python would come first on PATH
  PATH=$CONDA_PREFIX/bin:$PATH
  unset VIRTUAL_ENV VIRTUAL_ENV_PROMPT
fi
[ -z "$nexus_order" ] || export "CUDA_DEVICE_ORDER$nexus_order"          # whatever a script of the environment says
[ -z "$nexus_devices" ] || export "CUDA_VISIBLE_DEVICES$nexus_devices"
exec "${@:2}"
'''


# What the runner itself was given is not the job's, but for $kept: Slurm's GPUs, job and node.
HIDE_SCRIPT = r"""
hide_environment() {
  local pair
  export -n PWD OLDPWD SHLVL
  while IFS= read -r -d '' pair; do
    [[ ${pair%%=*} =~ ^($kept)$ ]] || export -n "${pair%%=*}"
  done < "/proc/$$/environ"
} 2>/dev/null
"""
SLURM_NAMES = "SLURM[A-Z0-9_]*|[A-Z]+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"


# Everybody can read the arguments of a program: so job.sh gives a job its variables as assignments before its command.
# What bash cannot pass on so comes as NEXUS_JOB_VARIABLE_1, whose text is `NAME=TEXT`: names that are none for bash,
# like those of exported functions, and those that only bash itself sets.
BASH_NAMES = (r"BASH(_VERSINFO|_ARG[CV]|_SOURCE|_LINENO|OPTS|PID)|SHELLOPTS|E?UID|PPID|GROUPS|FUNCNAME"
              r"|(?![A-Za-z_][A-Za-z0-9_]*$)(.|\n)*")
MAX_CACHED = 1000               # characters of a text that quote_variable() keeps
UNPACK_PROGRAM = (              # one line: sh has no $'\n'.  Python may have changed os.environ
    'import os, sys; mark = b"NEXUS_JOB_VARIABLE_"; '
    'found = open("/proc/self/environ", "rb").read().split(bytes(1))[:-1]; '
    'texts = [text.partition(b"=")[2] if text.startswith(mark) else text for text in found]; '
    'os.execvpe(sys.argv[1], sys.argv[1:], dict(text.split(b"=", 1) for text in texts))')
# Of a job with such variables, in command_of_the_job().  Python may be elsewhere on a node of Slurm's.
UNPACK_SCRIPT = r"""
  unpack=()
  for python in @PYTHON@ /usr/bin/python3; do
    [ ! -x "$python" ] || { unpack=("$python" -I -S -c @PROGRAM@); break; }
  done
  [ "${#unpack[@]}" -gt 0 ] || echo "nexus: without Python these variables are not set:" @NAMES@ >&5
"""


# bash makes way for a command that is one program with plain words: so job.sh runs that at once, without its start.
# Not what bash does itself, nor where the job's environment has it do more: BASH_ENV, exported functions.
BASH_WORDS = (
    r"[.:]|alias|bg|bind|break|builtin|caller|case|cd|command|compgen|complete|compopt|continue|coproc|declare|dirs"
    r"|disown|do|done|echo|elif|else|enable|esac|eval|exec|exit|export|false|fc|fg|fi|for|function|getopts|hash|help"
    r"|history|if|in|jobs|kill|let|local|logout|mapfile|popd|printf|pushd|pwd|read|readarray|readonly|return|select"
    r"|set|shift|shopt|source|suspend|test|then|time|times|trap|true|type|typeset|ulimit|umask|unalias|unset|until"
    r"|wait|while")
PLAIN_COMMAND = " *([A-Za-z0-9_./][A-Za-z0-9_./+-]*)( +[A-Za-z0-9_./:,+@%=-]+)* *"
# In command_of_the_job().  Like bash it keeps a PWD that goes through links; bash says why a program cannot be run.
PLAIN_SCRIPT = """
  local place=@PWD@ program=(@WORDS@)
  [ "$place" -ef . ] || place=$PWD
  PATH=$job_path type -P "${program[0]}" > /dev/null || program=(@BASH@)"""


@functools.lru_cache(1024)
def quote_variable(name: str, text: str) -> str | None:
    """A variable as an assignment before a command; None: bash cannot pass it on so.  Jobs share most of theirs."""
    return None if re.fullmatch(BASH_NAMES, name) else f"{name}={quote(text)}"


def build_assignments(environment: Mapping[str, str], is_slurm: bool) -> tuple[dict[str, str], list[str]]:
    """({name: assignment} that give a command its variables; the names that come as NEXUS_JOB_VARIABLE_n)"""
    # Without the nonce, a job.sh that is run by hand is not this job, which the service would end.
    nonce = environment.get("NEXUS_JOB_NONCE", "")
    pairs = {"NEXUS_JOB_NONCE": f'NEXUS_JOB_NONCE="${{attempt:+{nonce}}}"'} if nonce else {}
    if is_slurm:
        pairs["CUDA_VISIBLE_DEVICES"] = 'CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-}"'
        pairs["NEXUS_GPU_ID"] = 'NEXUS_GPU_ID="${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES-}}"'
    carried = list[str]()
    for name, text in environment.items():
        if name in ("NEXUS_JOB_NONCE", "_"):
            continue
        build = quote_variable if len(text) < MAX_CACHED else quote_variable.__wrapped__
        pair = build(name, text)
        if pair is None:
            carried.append(name)
            pairs[name] = f"NEXUS_JOB_VARIABLE_{len(carried)}={quote(f'{name}={text}')}"
        elif is_slurm and re.fullmatch(SLURM_NAMES, name):      # Slurm's own counts more
            pairs[name] = f"{name}=${{{name}-{quote(text)}}}"
        else:
            pairs[name] = pair
    return pairs, carried


def build_launch(job: Job, environment: Mapping[str, str], has_carried: bool) -> tuple[str, dict[str, str], list[str]]:
    """(a script; {name: further assignment}; the quoted words that run a job's command: bash, in a terminal, in conda).

    `has_carried`: "${unpack[@]}" unpacks some of its variables.
    """
    command, pairs = job.command, dict[str, str]()
    if re.search(TEE_PIPE, command) and len(command.encode("utf-8", "replace")) + len(TEE_ENDING) < MAX_ARGUMENT_BYTES:
        command += TEE_ENDING
    launch = list(map(quote, ["bash", "-c", *(["--"] if command.startswith(("-", "+")) else []), command]))
    match, is_bare = re.fullmatch(PLAIN_COMMAND, command), not (has_carried or job.tty or job.conda)
    if match and not re.fullmatch(BASH_WORDS, match[1]) and is_bare and "BASH_ENV" not in environment:
        script = PLAIN_SCRIPT.replace("@PWD@", quote(environment.get("PWD", ""))).replace("@WORDS@", command)
        return script.replace("@BASH@", " ".join(launch)), {"PWD": 'PWD="$place"'}, ['"${program[@]}"']
    words = ['"${unpack[@]}"', *launch] if has_carried else launch
    if job.tty:                                 # script(1) runs $SHELL, which may be fish, or /bin/false
        before, shell = "unset SHELL", environment.get("SHELL")
        if shell is not None:
            pairs["NEXUS_JOB_SHELL"] = f"NEXUS_JOB_SHELL={quote(shell)}"
            before = 'export SHELL="$NEXUS_JOB_SHELL"; unset NEXUS_JOB_SHELL'
        unpack = '"${unpack[*]@Q}"' if has_carried else ""
        inner = quote(f"{before}; exec ") + unpack + quote(f" {' '.join(launch)}")
        words = ["/usr/bin/env SHELL=/bin/sh script -q -e -f -c", inner, "/dev/null"]
    if job.conda:                               # -p: this bash ignores BASH_ENV, which is the command's
        pairs["NEXUS_JOB_FAULT"] = 'NEXUS_JOB_FAULT="${attempt:+$dir/fault-$attempt}"'
        words = [*map(quote, ["bash", "-p", "-c", CONDA_SCRIPT, "nexus", job.conda]), *words]
    return "", pairs, words


def build_script(job: Job, environment: Mapping[str, str], layout: Layout,
                 leases: Sequence[tuple[str, str, str]] = (), recorder: int = 0) -> str:
    """The text of a job's job.sh.

    `recorder`: the pid of a service beside it, which records its end: job.sh need not wait for the disk; 0: none.
    """
    is_slurm = job.current.slurm_key is not None
    variables, carried = build_assignments(environment, is_slurm)
    script, others, words = build_launch(job, environment, bool(carried))
    if carried:
        unpack = UNPACK_SCRIPT.replace("@PYTHON@", quote(sys.executable)).replace("@PROGRAM@", quote(UNPACK_PROGRAM))
        script += unpack.replace("@NAMES@", " ".join(map(quote, carried)))
    folder, cwd = layout.folder_of(job), job.cwd
    settings = {"id": job.id, "dir": folder, "recorder": str(0 if is_slurm else recorder), "events": layout.events_file,
                "kept": SLURM_NAMES if is_slurm else "", "job_path": environment.get("PATH") or os.defpath,
                "commit": job.snapshot or ""}
    if job.snapshot_repo:
        tree = os.path.join(folder, "files")
        cwd = os.path.join(tree, os.path.relpath(job.cwd, job.snapshot_repo))
        settings.update(repo=job.snapshot_repo, tree=tree, home=os.environ.get("HOME") or "/",
                        git_options=" ".join(GIT_OPTIONS))
    settings["cwd"] = cwd
    if leases:
        settings["service_id"] = leases[0][2]
    umask = "$(umask)" if job.umask is None else f"{job.umask:04o}"
    user = re.sub("[^A-Za-z0-9_.-]", "?", job.user)
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# Job {job.id} of nexus, user {user}.  Run by hand (bash job.sh) it just runs the command; nexus calls it "
        "with the attempt's number.", "attempt=${1:-}",
        *(f"{name}={quote(text)}" for name, text in settings.items()), f"umask={umask}",
        f"lease_files=({' '.join(quote(path) for path, _, _ in leases)})",
        f"lease_handles=({' '.join(path for _, path, _ in leases)})", "",
        HIDE_SCRIPT,
        "# $1: `exec`, by hand.", "command_of_the_job() {", '  umask "$umask"', "  hide_environment" + script,
        # The others come first, and count: a job may have a `dir` of its own.
        *(f"  {pair} \\" for pair in {**others, **variables, **others}.values()),
        f'    "$@" {" ".join(words)} >&6 2>&5 5>&- 6>&- 7>&-', "}",
        *([SNAPSHOT_SCRIPT] if job.snapshot else []), JOB_SCRIPT])


def build_environment(job: Job, variables: Mapping[str, str], gpus: Sequence[Gpu], port: int) -> dict[str, str]:
    """The submitter's environment, and nexus's variables over it.

    A job with --cuda sees all GPUs, unless there are MIG slices.  `port`: for torch.distributed, unless it has one.
    """
    is_cut = has_slices(gpus)
    devices = job.current.gpu_uuids if is_cut else map(str, list_cuda_numbers(job, gpus))
    own = {"NEXUS_JOB_PORT": str(port), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(devices),
           "NEXUS_JOB_ID": job.id, "NEXUS_JOB_NONCE": job.current.nonce or "",
           "NEXUS_GPU_ID": ",".join(job.current.gpu_places)}
    is_slurm = job.current.slurm_key is not None        # job.sh learns its GPUs where it runs
    sees_all = is_slurm or (job.cuda_arg and not is_cut)
    unset = {*(["CUDA_VISIBLE_DEVICES"] if sees_all else []), *(["NEXUS_GPU_ID"] if is_slurm else [])}
    passed = {name: text for name, text in variables.items() if name not in own and not is_job_variable(name)
              and not (is_slurm and name.startswith("SLURM_")) and (text or name not in PORT_VARIABLES)}
    passed.update(job.variables)
    port_text = passed.get("MASTER_PORT") or passed.get("PET_MASTER_PORT") or str(port)
    kept = {"SHLVL": "0", "PYTHONUNBUFFERED": "1", **dict.fromkeys(PORT_VARIABLES, port_text), **passed}
    return {**kept, **{name: text for name, text in own.items() if name not in unset}}


PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT")         # of torch.distributed, and what torchrun makes that of


def is_port_of_nexus(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a variable has the port that nexus chose for the job in which this is: only that job may listen there."""
    port = environ.get(name)
    # A job that an older nexus has started has no NEXUS_JOB_PORT.
    return name in PORT_VARIABLES and "NEXUS_JOB_ID" in environ and environ.get("NEXUS_JOB_PORT", port) == port


def has_slices(gpus: Iterable[Gpu]) -> bool:
    """Whether jobs get their GPUs by UUID: no number reaches a MIG slice, and beside slices CUDA counts no cards."""
    return any(gpu.is_mig for gpu in gpus)


def list_cuda_numbers(job: Job, gpus: Sequence[Gpu]) -> list[int]:
    """The numbers that CUDA gives a job's GPUs: under PCI_BUS_ID, their ranks among those that it may open.

    A card without a row in nvidia-smi may not be opened, and one with a fault cannot be.
    """
    if has_slices(gpus):
        return list(range(len(job.current.gpu_indices)))
    usable = sorted(gpu.index for gpu in gpus if not gpu.fault)
    return [usable.index(index) if index in usable else index for index in job.current.gpu_indices]


def fill_cuda_numbers(job: Job, gpus: Sequence[Gpu]) -> Job:
    """The job with its GPUs' numbers in its command, if it has cuda_arg."""
    return replace(job, command=fill_cuda_option(job.command, list_cuda_numbers(job, gpus))) if job.cuda_arg else job


@functools.lru_cache(1024)
def is_job_variable(name: str) -> bool:
    """Whether a variable is one job's alone: jobs and services that a job starts do not get it."""
    return name.startswith(("NEXUS_JOB_", "NEXUS_SWEEP_")) or name in (
        "NEXUS_GPU_ID", "NEXUS_TASK_ID", "NEXUS_ROLE", "NEXUS_UMASK", "NEXUS_FORMER_PYTHON", "STY", "WINDOW")


def list_inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not those of the job in which this is: jobs and services that start here get them."""
    return {name: text for name, text in environ.items()
            if not is_job_variable(name) and not is_port_of_nexus(name, environ)}


def find_visible_devices(environ: Mapping[str, str]) -> str | None:
    """The CUDA_VISIBLE_DEVICES that a service started here gets; inside a job, it is the job's."""
    return None if "NEXUS_JOB_ID" in environ else environ.get("CUDA_VISIBLE_DEVICES")


# PID STARTED, and the time of the begin, in 1/100 s since boot, which are clock ticks on Linux
CLAIM = r"([0-9]{1,7}) ([0-9]{1,15})\n(?:([0-9]{1,15})\n)?"


def read_claim(disk: Disk, folder: str, attempt: int) -> Claim | None:
    """Whose an attempt is; None: nobody's.  Raises: unavailable."""
    text = read_job_file(disk, os.path.join(folder, f"attempt-{attempt}"))
    match = re.match(CLAIM, text or "")
    if match and is_number(match[1], "Pid"):
        return Claim(int(match[1]), int(match[2]), int(match[3]) if match[3] else None)
    if text is None:
        return None
    return OUR_CLAIM if match and int(match[1]) == 0 else OPEN_CLAIM


def take_claim(disk: Disk, folder: str, attempt: int) -> Claim:
    """Claim an attempt that nobody runs; return whose it is.  Its file is empty at no moment.  Raises: OSError."""
    import threading
    path, text = os.path.join(folder, f"attempt-{attempt}"), "0 0\n"
    if not find_status(disk, path, is_followed=False):
        disk.makedirs(folder)
        aside = os.path.join(folder, f"claim-{threading.get_native_id()}")
        with written(disk, aside, [text], is_synced=False), contextlib.suppress(FileExistsError):
            try:
                disk.link(aside, path)
            except PermissionError:                     # the file system takes no hard links
                with opened(disk, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
                    write_at(disk, handle, text.encode(), 0)
    return read_claim(disk, folder, attempt) or OPEN_CLAIM


def withdraw(disk: Disk, processes: Processes, folder: str, attempt: int) -> tuple[bool, list[Process]]:
    """Claim an attempt on this machine that nobody runs.  Raises: OSError.

    Return whether it cannot begin any more; and the processes that may still write an open claim.  As long as there is
    one, it may begin, however slow it is.
    """
    claim = take_claim(disk, folder, attempt)
    if not claim.is_open:
        return not claim.pid, []
    writers = processes.find_runners(os.path.join(folder, "job.sh"), attempt)
    # The last one may have written it before it ended.
    return not writers and not (read_claim(disk, folder, attempt) or claim).pid, writers


def read_result(disk: Disk, folder: str, attempt: int) -> Result | None:
    """How an attempt ended, as its job.sh wrote it; None: it did not, or the file is not as job.sh writes it.

    Raises: unavailable.
    """
    with contextlib.suppress(ValueError, TypeError, OSError):
        path = os.path.join(folder, f"result-{attempt}.json")
        result = decode_value(Result, load_json(read_job_file(disk, path) or ""))
        result = replace(result, finished_at=check_time(disk.stat(path).st_mtime))     # job.sh writes it last
        if result.runtime_seconds is not None and result.cause in (None, "launch", "bounce"):
            if result.goes_on:                                             # these are the command's, not the job's
                return replace(result, finished_at=None, runtime_seconds=None)
            words = read_job_file(disk, os.path.join(folder, f"fault-{attempt}")) if result.cause else None
            return replace(result, cause_line=cut_words(words.strip())) if words else result
    return None


def read_tail(disk: Disk, path: str, start: int, most: int) -> str:
    """The end of a log from byte `start` on, at most `most` bytes."""
    size = measure(disk, path)
    begin = max(0, min(start, size), size - most)
    return read_part(disk, path, begin, most).decode("utf-8", "replace") if begin < size else ""


SUPERVISOR_SCRIPT = r'''
trap : HUP; trap '' INT QUIT
export NEXUS_UMASK=$(umask)               # for jobs without one
umask 077
home=$1; shift
if [ -t 1 ]; then tail -n 100 -F --pid=$$ "$home/service.log" 2>/dev/null & fi
user=$(id -u) root=$(stat -c %u /)        # root may have another number in a container

is_safe() {                               # nobody but root and this user may change this file, or exchange it
  place=$1
  while facts=$(stat -c '%u %a' "$place"); do
    case " $user $root " in *" ${facts% *} "*) ;; *) return 1; esac
    case ${facts#* } in
      [1357]???) [ -d "$place" ] || return 1 ;;                   # sticky: others cannot exchange what is not theirs
      *[2367]?|*[2367]) return 1 ;;
    esac
    [ "$place" != / ] || return 0
    place=${place%/*} place=${place:-/}
  done
  return 1
}

can_run() { NEXUS_ROLE=check timeout 30 "$@" </dev/null >/dev/null 2>&1; }

find_python() {                           # sets python to another one that can run the service
  rest=/usr/bin:/usr/local/bin:$PATH: seen=:
  while [ "$rest" ]; do
    folder=${rest%%:*} rest=${rest#*:}
    for name in "$folder/python3" "$folder"/python3.[0-9] "$folder"/python3.[0-9][0-9]; do
      python=$(readlink -f "$name") || continue                   # what is looked at is what runs
      case $name$seen in [!/]*|*":$python:"*) continue; esac
      seen=$seen$python:
      if [ -f "$python" ] && [ -x "$python" ] && is_safe "$python" && can_run "$python" "$@"; then return; fi
    done
  done
  return 1
}

delay=1 has_run='' has_looked=''
while :; do
  rm -f "$home/start_error.json"
  read -r began rest < /proc/uptime
  log=$home/service.log
  true 2>/dev/null 3>>"$log" || log=/dev/null       # the disk may have no room for it
  "$@" </dev/null >/dev/null 2>>"$log"
  code=$?
  read -r ended rest < /proc/uptime
  ran=$((${ended%.*} - ${began%.*}))
  if [ $ran -gt 10 ]; then delay=1; fi
  if [ $ran -gt 10 ] || [ $code -gt 128 ]; then has_run=yes; fi
  [ $code -ne 0 ] || exit                 # it was stopped
  if [ $code -le 128 ] && [ -e "$home/start_error.json" ]; then      # it was not killed; the file is its own
    [ "$has_run" ] || exit                # the command that started it reports the fault; later it may pass
  elif [ $code -eq 4 ]; then exit; fi     # another service runs, and has a supervisor
  if [ "$has_run" ] && [ $ran -le 10 ] && [ $code -ne 137 ] && [ $code -ne 143 ] && ! can_run "$@"; then
    former=$1; shift                      # this Python was updated or removed
    if find_python "$@"; then
      export NEXUS_FORMER_PYTHON="${NEXUS_FORMER_PYTHON:-$former}"
      set -- "$python" "$@"
      continue
    fi
    set -- "$former" "$@"
    [ "$has_looked" ] || echo "neither $former nor another Python here can run the service" >>"$home/service.log"
    has_looked=yes
  fi
  sleep $delay
  [ ! -e "$home/stopped" ] || exit        # nexus stop
  [ $delay -ge 16 ] || delay=$((delay * 2))
done
'''


# The service runs the compiled form, kept beside nexus.py if that was imported, as `nexus install` has it, or else in
# its own folder.  A child compiles: that takes 28 MB, which stay with it.
SERVICE_STARTER = """\
import os, sys
from importlib import util
sys.path += filter(os.path.isabs, sys.argv.pop(1).split(os.pathsep))
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv.pop(1) or None, False
spec = util.spec_from_file_location("nexus", sys.argv.pop(1))
sys.modules["nexus"] = nexus = util.module_from_spec(spec)
if not os.fork():
    try:
        spec.loader.get_code("nexus")
    finally:
        os._exit(0)
os.wait()
spec.loader.exec_module(nexus)
sys.pycache_prefix = None
sys.exit(nexus.entry())
"""


def service_argv(layout: Layout, program: str, options: Sequence[str]) -> list[str]:
    """How the supervisor runs a nexus.py as the service, with this Python."""
    compiled = __spec__.cached if __spec__ and program == os.path.abspath(__file__) else None
    cache = "" if compiled and os.access(compiled, os.W_OK) else layout.cache_dir
    # -I: a types.py in PYTHONPATH must not hide Python's own.  This sys.path comes last: tomli may be anywhere in it.
    return [sys.executable, "-I", "-c", SERVICE_STARTER, os.pathsep.join(sys.path), cache, program, "serve", *options]


def service_environ(layout: Layout, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service that is started here, without what is the job's in which this may be."""
    started = list_inherited(environ)
    if find_visible_devices(environ) is None:
        started.pop("CUDA_VISIBLE_DEVICES", None)
    return {**started, "NEXUS_HOME": layout.home, "NEXUS_ROLE": "service"}


def start_supervisor(disk: Disk, layout: Layout, screen: Screen | None, environ: Mapping[str, str],
                     argv: Sequence[str]) -> None:
    """Start the supervisor, which keeps the service running: in the screen session `nexus`, or detached."""
    import subprocess
    try:
        write_if_changed(disk, layout.supervisor_script, SUPERVISOR_SCRIPT)
        script = [layout.supervisor_script]
    except NexusError:                          # the disk is full: what waits on it is shown all the same
        script = ["-c", SUPERVISOR_SCRIPT, layout.supervisor_script]
    command = ["/bin/sh", *script, layout.home, *argv]
    started = service_environ(layout, environ)
    if screen:
        started.update({name: text for name, text in screen.environ().items()
                        if name in ("PATH", "SYSSCREENRC", "TERM", "SCREENDIR")})
        command = screen.argv("nexus", command, is_daemon=True)
    else:                                       # the shell between exits at once, and init becomes the parent
        command = ["/bin/sh", "-c", '"$@" &', "nexus", *command]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                     env=started, start_new_session=True).wait()


def end_supervisors(layout: Layout) -> None:
    """Kill the supervisors of this home, and the service that each runs; jobs go on."""
    import signal
    processes = Processes()
    found = processes.read(processes.list_pids())
    words = {each.pid: read_proc_words(each.pid, "cmdline") for each in found}
    mine = [layout.supervisor_script, layout.home]
    ours = {pid for pid, argv in words.items() if mine in (argv[1:3], argv[3:5]) and argv[0] == "/bin/sh"}
    for each in found:                          # parents come first: none starts another service
        if each.pid in ours or each.parent in ours:
            processes.send(each, signal.SIGKILL)


# ==== 12. STORE ==== the one owner of State: journal, state.json, recovery
# A State that others see never changes: changes are made in a copy, which becomes `state` once they are in the journal,
# synced.  So nobody sees what the disk may still refuse, and readers never wait.  To copy 10,000 jobs takes under 1 ms.
# Each line of journal.jsonl has a number; state.json has the number of the last one that it contains.  It is written
# in the background, then the journal begins anew.  The files before stay as state.json.prev and journal.jsonl.prev.
# state.json and state.json.prev are two files: what damages one of them in its place must not damage both.
# Recovery takes state.json, or state.json.prev where less is damaged then, and the lines of the journals after it.
# The locks are taken in this order: `saving` (state.json), `committing` (the journal, and `state`).
# What is damaged is left out, kept in a file and reported, and the queue is paused until its owner has looked.  A job
# that may have started, as far as is known, is held.

MIN_JOURNAL_BYTES = 256 * 1024      # a smaller journal is not worth a new state.json
DAMAGED = ".damaged-"                       # state.json.damaged-20241024-153020


class Journal:
    """journal.jsonl, for appending."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk, self.path, self.handle = disk, path, -1      # -1: it is not open
        self.size = 0                                   # of its whole lines

    def open(self) -> None:
        """Open it, and cut off what a failed write has left.  Raises: OSError."""
        if self.handle >= 0:
            return
        try:
            self.handle = self.disk.open(self.path, os.O_RDWR | os.O_CREAT)
            self.size = min(self.size, self.disk.size(self.handle))
            self.disk.truncate(self.handle, self.size)
            sync_folder(self.disk, os.path.dirname(self.path))      # a power cut must not lose the name
        except BaseException:
            self.close()
            raise

    def append(self, record: bytes, is_synced: bool) -> None:
        """Raises: OSError; then nothing was appended."""
        self.open()
        try:
            append_whole(self.disk, self.handle, record, is_synced)
        except BaseException:
            self.close()                                # nobody knows how much of the line is on the disk
            raise
        self.size += len(record)

    def begin_anew(self, start: int) -> None:
        """Go on in a new file with the lines from byte `start` on; keep the old one.  Raises: OSError."""
        self.open()
        tail = self.disk.pread(self.handle, self.size - start, start)
        with written(self.disk, f"{self.path}.new", [tail.decode("ascii")]) as new:
            make_previous(self.disk, keep_aside(self.disk, self.path), self.path)
            self.disk.replace(new, self.path)
        self.close()
        self.size = len(tail)

    def close(self) -> None:
        if self.handle >= 0:
            self.disk.close(self.handle)
        self.handle = -1


class Store:
    """Keeps State and the disk the same.  Thread-safe."""

    def __init__(self, layout: Layout, clock: Clock, disk: Disk, log: logging.Logger) -> None:
        import threading
        self.layout, self.clock, self.disk, self.log = layout, clock, disk, log
        self.host = read_machine()
        self.state = State()                                # as on the disk; never altered, but replaced
        self.service_id = ""
        self.version = int(clock.now() * 1e6)               # grows with each change that users see, over restarts too
        self.note_status_changes: Callable[[Sequence[Job]], None] = lambda jobs: None       # given the jobs
        self.last_error: NexusError | None = None           # why the last write failed
        self.unsettled: Recovery | None = None              # what was recovered, until it is on the disk again
        self.saving, self.committing, self.counting = (threading.Lock() for _ in range(3))
        self.journal = Journal(disk, layout.journal_file)
        self.stamp: tuple[int, ...] | None = None           # of state.json as last written, or as last taken over
        self.saved_facts: Mapping[str, Any] = {}            # the values of EDITABLE in state.json
        self.bad_edits = 0                                  # how often in a row state.json was no JSON
        self.checkpoint_wanted = threading.Event()
        self.checkpoint_seq = -1                            # of state.json; -1: it must be written anew
        self.is_sound = False                               # state.json is as nexus wrote it: it may become .prev

    def update(self, decide: Callable[[State], Iterable[Put]], is_synced: bool = True) -> Any:
        """Make the changes that `decide` yields, and return what the generator `decide` returns.

        Each change is in the State that `decide` was given before it goes on.  Without `is_synced`, a power cut before
        the next change may lose these changes.
        Raises: what `decide` raises; unavailable, if the disk refuses.  Then nothing has changed.
        """
        with self.committing:
            draft = self.state.copy()
            changes, answer = make_changes(draft, decide(draft))
            if changes:
                draft.seq += 1
                moves = list_status_changes(self.state, changes)
                self.write(encode_transaction(draft.seq, changes), is_synced)
                self.state = draft
                self.note_change()
                self.note_status_changes(moves)
        return answer

    def note_change(self) -> None:
        with self.counting:
            self.version += 1

    def write(self, line: str, is_synced: bool) -> None:
        """Append changes to the journal.  Raises: unavailable."""
        if self.unsettled and (refusal := self.last_error):     # what settle() has to keep aside may be in the journal
            raise NexusError(refusal.kind, refusal.message, refusal.hint)
        try:
            with disk_errors("write", self.journal.path):
                self.journal.append(line.encode("ascii"), is_synced)
        except NexusError as error:
            self.note_refusal(error)
            raise
        if self.last_error is not None:
            self.log.info("The journal can be written again")
            self.checkpoint_wanted.set()                    # lines that were not synced before may be lost
        self.last_error = None
        if self.journal.size > max(MIN_JOURNAL_BYTES, self.stamp[1] if self.stamp else 0):
            self.checkpoint_wanted.set()

    def note_refusal(self, error: NexusError) -> None:
        if self.last_error is None:
            self.log.error("%s: nothing new is accepted or started until it can be written", error.message)
        self.last_error = error

    def look_for_edit(self, take: Callable[[Mapping[str, Any]], None]) -> bool:
        """Call `take` with the keys of EDITABLE that another program changed in state.json; return whether it did.

        Raises: OSError, and what `take` raises; then the next call tries again.
        """
        with self.saving:
            stamp = stamp_of(self.disk, self.layout.state_file)
            if stamp == self.stamp:
                return False
            try:
                text = read_text(self.disk, self.layout.state_file)
                body = decode("dict", load_json(text)) if text is not None else {}     # a deleted file changes nothing
            except (TypeError, ValueError) as error:
                self.bad_edits += 1
                if self.bad_edits < 3:                      # the other program may still be writing
                    return False
                self.log.warning("state.json was edited and is no JSON (%s): it is written anew", error)
                body = {}
            values = {name: tuple(fact) if isinstance(fact := body[name], list) else fact
                      for name in EDITABLE if name in body}
            edit = {name: value for name, value in values.items() if value != self.saved_facts[name]}
            take(edit)
            self.stamp, self.checkpoint_seq, self.is_sound, self.bad_edits = stamp, -1, False, 0
            self.saved_facts = {**self.saved_facts, **edit}
            self.checkpoint_wanted.set()
            return True

    def save_checkpoint(self) -> None:
        """Write state.json, and begin the journal anew.  Raises: OSError, unavailable; then nothing is lost."""
        path = self.layout.state_file
        with self.saving:
            if not self.unsettled:
                self.update(forget_unused)
            with self.committing:
                state, journal_size = self.state, self.journal.size
            if self.checkpoint_seq == state.seq:
                return
            with written(self.disk, f"{path}.new", encode_state(state)) as new:
                found, stamp = stamp_of(self.disk, path), stamp_of(self.disk, new)      # the stamp survives a renaming
                if found not in (None, self.stamp):
                    self.checkpoint_wanted.set()        # somebody has edited it: take that over first
                    return
                was_sound = self.is_sound and found is not None
                aside = keep_aside(self.disk, path) if was_sound else ""
                self.disk.replace(new, path)
                if was_sound:
                    # Last: so the two are never one file, which one fault would damage
                    make_previous(self.disk, aside, path)
            self.checkpoint_seq, self.is_sound, self.stamp = state.seq, True, stamp
            self.saved_facts = {name: getattr(state, name) for name in EDITABLE}
            # What is not as nexus wrote it never becomes state.json.prev: that and its journal stay until the next time
            if not was_sound and not self.is_usable(f"{path}.prev"):
                copy_file(self.disk, path, f"{path}.prev")
            sync_folder(self.disk, self.layout.journal_dir)
            with self.committing:
                if was_sound:
                    self.journal.begin_anew(journal_size)
                else:
                    self.journal.open()                 # cuts off what could not be read of it

    def is_usable(self, path: str) -> bool:
        """Whether a state file could be recovered from."""
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError, NexusError):
            found = read_state(decode_text(read_whole(self.disk, path)))
            return not found.faults and found.tables["facts"]["host"] == self.host
        return False

    def recover(self) -> None:
        """Read State from the disk.  Raises: conflict, if it is another machine's or a newer nexus's; unavailable.

        Where nothing can be written, State is there to be read; settle() is to be called again.
        """
        state_file = self.layout.state_file
        self.stamp = stamp_of(self.disk, state_file)    # later edits are noticed after the recovery
        make_folder(self.disk, self.layout.journal_dir)
        with disk_errors("read", self.layout.journal_dir):
            found = find_recovery(self.disk, self.layout)
            # As older ones left it, or a crash
            is_one_file = is_same_file(self.disk, state_file, f"{state_file}.prev")
        state = found.state
        # A machine that got another name still has the boot of its jobs.
        is_this_boot = any(job.current.boot_id == read_boot_id() for job in state.running.values())
        if state.host and state.running and not is_this_boot and is_elsewhere(self.disk, state.host):
            raise describe_other_machine(
                state.host, f"jobs of {state_file} run there", f"mv {self.layout.home} {self.layout.home}.old")
        self.is_sound = (found.source == state_file and state.host == self.host and not found.damage
                         and not found.has_former_lines)
        is_current = self.is_sound and found.version == STATE_VERSION and not is_one_file and not found.was_resumed
        if not state.service_id or (is_elsewhere(self.disk, state.host) and not state.live):
            # A copy of ~/.nexus for another machine is another service for the nodes, which would end the other's jobs.
            state.service_id = f"{os.geteuid()}-{self.clock.new_token()[:8]}"
        state.host, self.service_id = self.host, state.service_id
        for change in forget_unused(state):             # here: a journal of version 2 gets no further line
            state.put(change)
        self.state, self.saved_facts = state, found.saved_facts
        self.checkpoint_seq, self.journal.size = found.checkpoint_seq if is_current else -1, found.journal_size
        if is_current:
            return
        self.unsettled = found
        try:
            self.settle()
        except NexusError as error:
            self.note_refusal(error)
            self.checkpoint_wanted.set()

    def settle(self) -> None:
        """Keep aside what a recovery found damaged, and write state.json anew.  Raises: unavailable."""
        found = self.unsettled
        assert found
        with disk_errors("write", self.layout.journal_dir):
            self.keep_damage(found)
            self.stamp = stamp_of(self.disk, self.layout.state_file)
            self.save_checkpoint()
        self.unsettled = None

    def keep_damage(self, found: Recovery) -> None:
        """Log what is damaged, and keep it, once, in files for a person to look at.  Raises: OSError."""
        at = time.strftime("%Y%m%d-%H%M%S")
        while found.broken:
            aside = f"{found.broken[0]}.broken-{at}"
            copy_file(self.disk, found.broken[0], aside)        # state.json is there until the next one replaces it
            self.log.error("Recovery: %s is kept as %s", found.broken.pop(0), aside)
        for one in found.damage:
            self.log.error("Recovery: %s", format_line(one["words"], 300))
        if found.damage:
            path = f"{self.layout.state_file}{DAMAGED}{at}"
            write_atomic(self.disk, path, (f"{encode_json(one)}\n" for one in found.damage))
            self.log.error("Recovery: the queue is paused; what cannot be understood is kept in %s", path)
            found.damage = []

    def list_damaged(self) -> list[str]:
        """The files of keep_damage() that are still there."""
        return find_files(self.disk, f"{self.layout.state_file}{DAMAGED}")


def make_changes(draft: State, decided: Iterable[Put]) -> tuple[list[Put], Any]:
    """Make changes in `draft`; return what has become of each row, and what the generator returned."""
    rows: dict[tuple[str, str], Put] = {}
    changes = iter(decided)
    while True:
        try:
            change = next(changes)
        except StopIteration as end:
            return list(rows.values()), end.value
        draft.put(change)
        rows[change.table, change.key] = change


def list_status_changes(state: State, changes: Iterable[Put]) -> list[Job]:
    """The jobs whose status these changes of `state` alter, and the new ones that are over at once."""
    moves = []
    for job in (change.value for change in changes if change.table == "jobs" and change.value):
        former = state.jobs.get(job.id)
        is_new = former is None or former.number != job.number          # it may have an old job's id
        if job.status in FINAL if is_new else former is not None and job.status != former.status:
            moves.append(job)
    return moves


def forget_unused(state: State) -> list[Put]:
    """The changes that remove the environments and groups that no job uses."""
    return [Put(table, key, None) for table, field in (("environments", "environment"), ("groups", "group"))
            for key in getattr(state, table).keys() - {getattr(job, field) for job in state.jobs.values()}]


class Recovery:
    """State as the disk has it: of one state file, and the journals after it."""

    def __init__(self, disk: Disk, layout: Layout, path: str) -> None:
        """Raises: OSError; conflict, if a newer nexus wrote the file."""
        self.disk, self.layout, self.state = disk, layout, State()
        self.damage: list[Json] = []                    # what is not whole: {words, found: its JSON, if it is there}
        self.broken: list[str] = []                     # state files that are not whole
        self.source = ""                                # the file that was read; "" for none
        self.doubtful: set[str] = set()                 # jobs of which a change could not be read
        file, name = StateFile(STATE_VERSION, 0, {}, False), os.path.basename(path)
        try:
            file = read_state(decode_text(read_whole(disk, path)))
            self.source = path
        except FileNotFoundError:
            pass
        except (LookupError, TypeError, ValueError) as error:
            self.note_damage(f"{name} is no state file: {format_line(describe_exception(error), 100)}")
        self.is_there = bool(self.source or self.damage)
        self.version = file.version
        for fault in file.faults:
            self.note_damage(f"{name}: {fault}")
        facts = {"facts": file.tables.pop("facts", {})}
        self.put_rows(facts, name, decode_row if file.is_sealed else decode_old_row)
        self.put_rows(file.tables, name, decode_sealed_row if file.is_sealed else decode_old_row)
        self.broken += [path] if self.damage else []
        self.saved_facts = {name: getattr(self.state, name) for name in EDITABLE}
        self.state.seq = self.last = self.checkpoint_seq = file.seq
        self.read_journals(file.is_sealed, path == layout.state_file)
        self.state.next_number = max([self.state.next_number, *(job.number + 1 for job in self.state.jobs.values())])
        self.was_resumed = bool(self.state.damage) and not self.state.paused        # by hand, in the file
        if self.was_resumed:
            self.state.damage = ""

    def note_damage(self, words: str, found: Any = None) -> None:
        self.damage.append({"words": words, "found": found})

    def read_journals(self, is_sealed: bool, is_newest: bool) -> None:
        """Make the changes after the state file's.  `is_newest`: it is state.json, which has the former journal's.

        Raises: OSError.
        """
        path = self.layout.journal_file
        self.is_sealed = is_sealed
        self.lines: set[bytes] = set()                  # the changes made: journal.jsonl may begin with former ones
        self.unreadable: list[str] = []                 # the last lines so far that cannot be read
        self.read_journal(f"{path}.prev")
        self.has_former_lines = self.last > self.checkpoint_seq         # then it must stay for this state file
        if is_newest:
            self.unreadable = []
        self.journal_size = self.read_journal(path)
        if self.unreadable:
            lost = f"its last {'line' if len(self.unreadable) == 1 else f'{len(self.unreadable)} lines'}"
            self.note_damage(f"{os.path.basename(path)}: {lost} cannot be read", self.unreadable)
        if self.source and not find_status(self.disk, path):
            self.note_damage(f"{os.path.basename(path)} is missing")

    def read_journal(self, path: str) -> int:
        """Make the changes of a journal that come next; return the bytes before its last unreadable lines.

        What is missing in journal.jsonl.prev shows in the numbers of the next one.  Raises: OSError.
        """
        import io
        size, at, name = 0, 0, os.path.basename(path)
        needs_crc = self.is_sealed                      # as all lines that follow one with a checksum
        with contextlib.suppress(FileNotFoundError):
            for line in io.BytesIO(read_whole(self.disk, path)):
                at += len(line)
                if is_torn(line):
                    continue
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("its end is damaged")
                    seq, tables, is_sealed = read_transaction(line)
                    if needs_crc and not is_sealed and seq > self.checkpoint_seq:
                        raise ValueError("it has no checksum")
                    needs_crc |= is_sealed
                except (ValueError, TypeError, KeyError):
                    self.unreadable.append(line.decode("ascii", "backslashreplace"))
                    self.doubtful.update(guess_jobs(line))
                    continue
                if seq > self.checkpoint_seq and line not in self.lines:
                    if seq != self.last + 1:
                        self.note_damage(f"{name}: after change {self.last} comes change {seq}", self.unreadable)
                    self.put_rows(tables, f"{name}: change {seq}", decode_row if is_sealed else decode_old_row)
                    self.lines.add(line)
                    self.last, self.state.seq = seq, max(self.state.seq, seq)
                size, self.unreadable = at, []
        return size

    def put_rows(self, tables: Mapping[str, Any], where: str, decode_one: Callable[[str, str, Any], Any]) -> None:
        """Put the rows of these tables into State.  A row that cannot be decoded leaves what State had before."""
        for table, rows in tables.items():
            if not isinstance(rows, dict):
                self.note_damage(f"{where}: {table} is no object", rows)
                continue
            for key, row in rows.items():
                if not is_known(table, key) and (decode_one is decode_row or not RETIRED.isdisjoint((table, key))):
                    continue                            # an older or a newer nexus knew it
                try:
                    self.state.put(Put(table, key, decode_one(table, key, row)))
                    self.doubtful.discard(key)
                except (KeyError, TypeError, ValueError) as error:
                    name = f"{'job' if table == 'jobs' else table} {format_line(key, 60)}"
                    why = f"it has no {error}" if isinstance(error, KeyError) else error
                    self.note_damage(f"{where}: {name} cannot be understood: {why}", row)
                    if table == "jobs":
                        self.doubtful.add(key)

    def hold_doubtful(self) -> None:
        """Hold the pending jobs that may have started, or may be over, so that none runs twice."""
        waiting = [job for job in self.state.pending.values() if job.status == PENDING and not job.is_held]
        begun = [job for job in waiting if self.has_begun(job)]
        doubtful = [job for job in waiting if job.id in self.doubtful and job not in begun]
        for jobs, why in ((begun, "have begun, though they wait here"), (doubtful, "may have changed since")):
            if jobs:
                self.note_damage(f"held, as they {why} (nexus resume ID): {join_some([job.id for job in jobs])}")
            for job in jobs:
                self.state.put(change_job(job, is_held=True))

    def has_begun(self, job: Job) -> bool:
        """Whether the runner of its next attempt has claimed that, so that the change which says so is lost."""
        claim = os.path.join(self.layout.folder_of(job), f"attempt-{job.attempt + 1}")
        status = find_status(self.disk, claim)
        return status is not None and status.st_mtime > job.created_at  # an earlier one is a former job's of this id

    def pause(self) -> None:
        """Pause the queue for what is damaged."""
        self.state.paused = True
        self.state.damage = format_line(join_some([one["words"] for one in self.damage], 3, "; "), 500)


def find_recovery(disk: Disk, layout: Layout) -> Recovery:
    """State of the state file from which less is lost; the queue is paused if any is damaged.

    Raises: OSError; conflict, if a newer nexus wrote it.
    """
    newest = chosen = Recovery(disk, layout, layout.state_file)
    if newest.damage or not newest.is_there:
        former = Recovery(disk, layout, f"{layout.state_file}.prev")
        if former.source and (not newest.is_there or len(former.damage) < len(newest.damage)):
            chosen = former
            if newest.broken:
                words = f"{newest.damage[0]['words']} (state.json.prev was read in its place)"
                former.damage.insert(0, {"words": words, "found": None})
        elif former.broken and not newest.source:
            newest.note_damage(f"{former.damage[0]['words']}: the jobs of both are lost")
        chosen.broken = [*newest.broken, *former.broken]
    chosen.hold_doubtful()
    if chosen.damage:
        chosen.pause()
    return chosen


def is_torn(line: bytes) -> bool:
    """Whether it is the beginning of a line, as an interrupted write leaves it: nobody heard that it was accepted."""
    if not re.fullmatch(rb"[ -~]*\0*", line):          # a crash of the machine may leave zeros
        return False
    try:
        read_transaction(line[:-1])
        return False                            # a whole line, whose end is damaged
    except (ValueError, TypeError, KeyError):
        return True


def guess_jobs(line: bytes) -> list[str]:
    """The jobs that a damaged line of the journal seems to be about."""
    with contextlib.suppress(ValueError, TypeError, LookupError):
        return list(load_json(line)["put"]["jobs"])
    return []


def keep_aside(disk: Disk, path: str) -> str:
    """Give a file that is about to be replaced another name, or make a copy; return that path.  Raises: OSError."""
    aside = f"{path}.prev.tmp"
    remove_file(disk, aside)
    try:
        disk.link(path, aside)
    except OSError:                         # a file system may have no hard links
        copy_file(disk, path, aside)
    return aside


def make_previous(disk: Disk, aside: str, path: str) -> None:
    """Make PATH.prev what keep_aside() kept.  Raises: OSError."""
    disk.replace(aside, f"{path}.prev")
    remove_file(disk, aside)                # where PATH.prev was the same file already, nothing was renamed


def copy_file(disk: Disk, path: str, target: str) -> None:
    """Make `target` a copy of a file, as a whole.  Raises: OSError, unavailable."""
    aside = f"{target}.new"
    with written(disk, aside, [read_whole(disk, path).decode("utf-8", "surrogateescape")]):
        disk.replace(aside, target)


def is_same_file(disk: Disk, path: str, other: str) -> bool:
    found = [find_status(disk, each) for each in (path, other)]
    first, second = [status and (status.st_dev, status.st_ino) for status in found]
    return first is not None and first == second


def describe_other_machine(host: str, why: str, otherwise: str) -> NexusError:
    return NexusError("conflict", f"the service runs on {host} ({why})",
                      hint=f"use it there, or set NEXUS_HOME=~/.nexus-$(hostname) or NEXUS_URL; "
                           f"if {host} is gone for good: {otherwise}")


# ==== 13. BACKENDS ==== where jobs run: this machine, nodes, Slurm, behind one protocol; one reducer records outcomes

TROUBLE_INTERVAL_S = 30.0       # the longest pause before a failed query is repeated
WATCH_INTERVAL_S = 1.0          # how often runners' pids are checked; their events come at once
TERMINATION_INTERVAL_S = 0.02   # how often the processes of a job being ended are checked, at first
LAUNCH_TIMEOUT_S = 30.0         # a screen without a claim after this time will not start its job
HOLD_S = (5.0, 300.0)           # backoff after the machine could not start a job: at first, at most
RUNNER_TIMEOUT_S = 2.0          # for job.sh to write the result of a killed job
LEASE_BACKOFF_S = (5.0, 60.0)   # first and longest time without new GPUs after a lease failed
MACHINE_DOWN = "the machine went down while it ran"
MACHINE_DOWN_EARLY = "the machine went down before it began"
PROBE_BACKOFF_FACTOR = 10       # pause after nvidia-smi or squeue, as a multiple of its run time
TAIL_BYTES = 65536              # the end of stderr that is searched for the cause of a failure


# The names of errors that each start would meet now
MACHINE_FAULTS = ("EMFILE", "ENFILE", "EAGAIN", "ENOMEM", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "EIO")


def is_machine_fault(error: OSError) -> bool:
    import errno
    return errno.errorcode.get(error.errno or 0) in MACHINE_FAULTS


if TYPE_CHECKING:
    News = Union[dict[str, Any], Requeue, Result]       # what a backend reports: fields of an attempt, or its end
    Finding = tuple[Job, News]


class Part:
    """A part of the service with its own duty; it shares the service's machine, store and clock."""

    def __init__(self, service: Service) -> None:
        self.service, self.config, self.layout, self.store = service, service.config, service.layout, service.store
        self.machine, self.clock, self.disk = service.machine, service.clock, service.disk
        self.log, self.environ = service.log, service.environ


class Backend(Part):
    """Where jobs run: this machine, the nodes, or Slurm.  The loop polls it, and has it start what is recorded.

    A job that must end is recorded too: it has a stop_cause, and its backend ends it.
    """
    name = ""                                           # of the machine or the cluster; "": this machine

    def has(self, job: Job) -> bool:
        """Whether the job's attempt belongs to this backend."""
        raise NotImplementedError

    def start(self, job: Job, variables: Mapping[str, str] | None) -> News | None:
        """Start an attempt whose intent is on disk, with its submitter's `variables`.  Raises: OSError, NexusError."""
        raise NotImplementedError

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterable[Finding]:
        """Return what is not recorded yet of attempts.  Runner events may concern any backend's jobs."""
        raise NotImplementedError


class Worker:
    """A thread that calls step() again and again, also when that fails.

    step() returns the pause in seconds; None: until `wanted` is set, which ends any pause.
    """

    pause_s: float | None = 0.0

    def __init__(self, service: Service | Agent, doing: str, step: Callable[[], float | None]) -> None:
        import threading
        self.service, self.doing, self.step, self.is_ended = service, doing, step, False
        self.wanted, self.thread = threading.Event(), threading.Thread(target=self.run, name=doing, daemon=True)

    def end(self) -> None:
        """Call step() no more."""
        self.is_ended = True
        self.wanted.set()

    def run(self) -> None:
        while True:
            self.wanted.wait(self.pause_s)
            self.wanted.clear()
            if self.is_ended or self.service.is_stopping:
                return
            try:
                self.pause_s = self.step()
            except Exception as error:
                self.service.fail(self.doing, error)
                self.pause_s = None if self.pause_s is None else max(self.pause_s, WATCH_INTERVAL_S)


def measure_output(disk: Disk, job: Job) -> tuple[int, int]:
    """(bytes of stdout.log, bytes of stderr.log) that this attempt's node has sent so far."""
    sizes = measure_logs(disk, job.log_dir)
    return max(0, sizes[0] - job.log_base[0]), max(0, sizes[1] - job.log_base[1])


def take_slurm_claim(disk: Disk, job: Job, folder: str) -> Claim | None:
    """take_claim() of a job that Slurm has.  What cannot be claimed is Slurm's to end."""
    with contextlib.suppress(OSError):
        return take_claim(disk, folder, job.attempt)
    return None


class SlurmBackend(Backend):
    """The Slurm of `launcher = "slurm"`.  A thread submits, cancels and queries, so that nothing else waits for Slurm.

    Jobs are submitted one at a time, so the others keep nexus's order.  A job's key is journaled before it is
    submitted, Slurm's id after.  A job whose key Slurm does not know is requeued, once its attempt is claimed.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.slurm = Slurm(service.store.service_id, service.environ)
        self.worker = Worker(service, "talking to Slurm", self.step)
        self.live = self.list_live()                        # Slurm's jobs as recorded; it cancels all others of ours
        self.submitting: Job | None = None                  # recorded, and not submitted yet
        self.found: Sequence[Finding] = ()                  # the thread waits until the loop has taken these
        self.seen: Mapping[str | None, SlurmJob] = {}       # {slurm_key: squeue's last row}
        self.name = ""                                      # of the cluster
        self.partitions: Sequence[SlurmPartition] = ()
        self.partitions_at = float("-inf")                  # monotonic: when they were read
        self.looked_at, self.took_s = float("-inf"), 0.0    # monotonic: when squeue was run, and for how long
        self.hasty_until = float("-inf")                    # monotonic: squeue is run often until then
        self.error: NexusError | None = NexusError("unavailable", "Slurm has not been asked yet")
        self.refused = Backoff(*HOLD_S)                     # why Slurm took no job; `conflict`: it has enough of ours
        self.over_at: dict[str | None, float] = {}          # {slurm_key: monotonic, when it was first seen ended}

    def step(self) -> float:
        """In the thread: submit a job, and run squeue when it is time; return the pause in seconds."""
        if self.found:
            return WATCH_INTERVAL_S
        live = self.live                                    # read before squeue runs
        try:
            if self.submitting and (news := self.submit(self.submitting)):
                self.found, self.submitting = [(self.submitting, news)], None
            if not self.found and self.find_pause_s() <= 0:
                self.run_squeue(live)
        except NexusError as error:
            if self.error is None or error.message != self.error.message:
                self.service.log.error("Slurm: %s", error.message)
            self.error = error
        if self.found:
            self.service.wake()
        return min(WATCH_INTERVAL_S, self.find_pause_s())

    def find_pause_s(self) -> float:
        """Seconds until squeue runs next."""
        now, refresh_s = self.service.clock.monotonic(), self.service.config.service.refresh_rate_seconds
        pause_s = FAST_POLL_S if now < self.hasty_until and not (self.error or self.store.last_error) else refresh_s
        pause_s = max(pause_s, PROBE_BACKOFF_FACTOR * self.took_s)
        if self.error:
            pause_s = min(pause_s, OUTAGE_PAUSE_S)
        return max(0.0, self.looked_at + self.took_s + pause_s - now)

    def submit(self, job: Job) -> News | None:
        """Submit a job; return None while it must wait.  Raises: unavailable; Slurm may have the job all the same."""
        service, folder, config = self.service, self.service.layout.folder_of(job), self.service.config
        state = service.store.state
        known, variables = state.jobs.get(job.id), state.environments.get(job.environment)
        if known is None or known.current.slurm_key != job.current.slurm_key or known.current.stop_cause:
            return Requeue("it was taken back before it was submitted to Slurm")
        if state.paused or self.error or self.refused.find_why(service.clock.monotonic()):
            return None
        try:
            service.local.host.write_script(service.starter.make_order(job, variables))
        except (OSError, NexusError) as error:
            return service.local.host.judge_start_error(error, job)
        try:
            limits = find_limits(job, config.jobs)
            slurm_id, words = self.slurm.submit(build_sbatch(job, self.slurm.service_id, folder, limits, config.slurm))
        except Exception as error:                          # squeue shows whether Slurm has the job
            self.submitting, self.looked_at = None, float("-inf")
            if isinstance(error, NexusError) and read_refusal(error.message)[0] == "limit":
                self.rest(error.message, error.hint, True)  # at its limit, sbatch retries until its own timeout
            raise
        fault, hint = read_refusal(words)
        if slurm_id:
            self.refused = Backoff(*HOLD_S)
            self.hurry()
            return {"slurm_id": slurm_id}
        if fault in ("config", "limit"):                    # Slurm would refuse the others too: this job waits
            self.rest(words, hint, fault == "limit")
            return None
        line = format_line(f"Slurm refuses it: {words}" + (f" ({hint})" if hint else ""), 400)
        return Result(None, None, 0.0, "launch", line, may_pass=not fault)

    def rest(self, words: str, hint: str, is_limit: bool) -> None:
        """Submit nothing for a while, or until one of our jobs has ended there."""
        message = f"Slurm takes no {'more jobs now' if is_limit else 'jobs'}: {words}"
        if self.refused.why is None or self.refused.why.message != message:
            self.service.log.warning("%s", message)
        error = NexusError("conflict" if is_limit else "unavailable", message, hint)
        self.refused.fail(self.service.clock.monotonic(), error)

    def run_squeue(self, live: Sequence[Job]) -> None:
        """Run squeue, find what is new, and cancel unwanted jobs.  Raises: unavailable."""
        clock = self.service.clock
        self.looked_at = clock.monotonic()
        try:
            self.name = self.name or self.slurm.query_name()
            jobs = self.slurm.query_jobs()
            if self.error:
                self.service.log.info("Slurm answers")
            self.error = None
            unsent = self.submitting.current.slurm_key if self.submitting else None
            live = [job for job in live if job.current.slurm_key != unsent]
            self.seen = match_slurm_jobs(live, jobs)
            self.found = list(self.find_news(live))
            wanted = {job.current.slurm_key for job in live if not job.current.stop_cause}
            stopped = [self.seen[job.current.slurm_key] for job in live
                       if job.current.stop_cause and job.current.slurm_key in self.seen]
            self.cancel([*(one for one in jobs if one.key and one.key not in wanted), *stopped])
            if clock.monotonic() - self.partitions_at >= PARTITIONS_INTERVAL_S:
                self.partitions, self.partitions_at = self.slurm.query_partitions(), clock.monotonic()
        finally:
            self.took_s = clock.monotonic() - self.looked_at

    def find_news(self, live: Sequence[Job]) -> Iterator[Finding]:
        """What squeue says that is not recorded yet."""
        now, over_at, self.over_at = self.service.clock.monotonic(), self.over_at, {}
        for job in live:
            key, seen = job.current.slurm_key, self.seen.get(job.current.slurm_key)
            claim = read_claim(self.disk, self.service.layout.folder_of(job), job.attempt)
            is_waiting = seen is not None and seen.state in SLURM_WAITING
            # By Slurm: its node was lost, or slurmctld crashed before it saved that the job began.
            is_requeued = is_waiting and (job.status == RUNNING or bool(claim and claim.pid))
            if seen is None or seen.state in SLURM_ENDS or is_requeued:
                self.over_at[key] = over_at.get(key, now)
                yield from self.find_end(job, seen, now - self.over_at[key])
            elif job.status == SUBMITTED and not is_waiting:
                yield job, self.find_start(job, seen)
            elif not job.current.slurm_id:
                yield job, {"slurm_id": seen.id}

    def find_start(self, job: Job, seen: SlurmJob | None) -> dict[str, Any]:
        """The start, as the end of the second that Slurm tells, so that no time limit is reached early."""
        seen, now = seen or SlurmJob(job.current.slurm_id or "", ""), self.service.clock.now()
        started_at = now if seen.started_at is None else min(now, seen.started_at + 1)
        return {"started_at": started_at, "slurm_id": seen.id or None, "slurm_node": seen.nodes or "a node"}

    def find_end(self, job: Job, seen: SlurmJob | None, over_s: float) -> Iterator[Finding]:
        """Judge a job that Slurm calls ended or does not know, by its files."""
        folder = self.service.layout.folder_of(job)
        self.hurry()
        if seen and seen.state in SLURM_WAITING:
            seen = replace(seen, state=REQUEUED_BY_SLURM, reason=f"queued again: {seen.reason}", started_at=None)
        claim, result = read_claim(self.disk, folder, job.attempt), read_result(self.disk, folder, job.attempt)
        text = read_tail(self.disk, os.path.join(folder, f"slurm-{job.attempt}.log"), 0, TAIL_BYTES)
        news = decide(seen, claim, result, over_s, find_slurm_line(text), folder)
        if isinstance(news, Requeue) or (news and news.cause == "killed" and claim is None):
            if take_slurm_claim(self.disk, job, folder) in (OUR_CLAIM, claim):      # as it was judged
                yield job, news
        elif news:
            if job.status == SUBMITTED:
                yield job, self.find_start(job, seen)
            yield replace(job, status=RUNNING), news        # once that start is recorded

    def cancel(self, unwanted: Iterable[SlurmJob]) -> None:
        """Raises: unavailable."""
        ids = sorted({one.id for one in unwanted if one.state not in (*SLURM_ENDS, "COMPLETING")})
        if ids:
            self.hurry()
            words = self.slurm.cancel(ids)
            if words and not re.search("Invalid job id|already completing|already finished", words):
                self.service.log.warning("scancel %s: %s", " ".join(ids), words)

    def has(self, job: Job) -> bool:
        return job.current.slurm_key is not None

    def start(self, job: Job, variables: Mapping[str, str] | None) -> None:
        """Give the job to the thread."""
        self.live, self.submitting = (*self.live, job), job
        self.worker.wanted.set()

    def list_live(self) -> tuple[Job, ...]:
        state, ended = self.service.store.state, self.service.outcomes.unrecorded
        return tuple(job for job in state.live.values() if job.current.slurm_key and job.id not in ended)

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterator[Finding]:
        """Return what the thread has found, then let it go on."""
        if {job.id for job in self.live}.intersection(runner_event.job_id for runner_event in runner_events):
            self.hurry()                                    # squeue will show the change
        found = self.found
        for job, news in found:
            yield job, news
            if isinstance(news, Result):
                self.refused.succeed()                      # there is room for another
                self.service.wake()
            elif isinstance(news, dict) and "started_at" not in news:
                command = format_line(job.command, 500)
                self.log.info("Submitted to Slurm as %s: job %s: %s", news["slurm_id"], job.id, command)
        for job in self.live:
            # Slurm enforces limits of whole minutes.
            limits = find_limits(job, self.config.jobs)
            if job.status == RUNNING and not job.current.stop_cause and limits.timeout_seconds % 60:
                stop = find_stop(limits, Use(find_age(job, self.clock.now())))
                if stop:
                    yield job, {"stop_cause": stop[0], "stop_line": stop[1]}
        self.live = self.list_live()
        states = [self.seen[job.current.slurm_key].state for job in self.live
                  if job.current.stop_cause and job.current.slurm_key in self.seen]
        if any(state != "COMPLETING" for state in states):
            self.hurry()                                    # after squeue, the thread cancels them
        if found:                                           # what the disk has refused, squeue will show again
            self.found = ()
            self.worker.wanted.set()

    def hurry(self) -> None:
        """Run squeue often for a while."""
        self.hasty_until = self.service.clock.monotonic() + HURRY_S
        self.worker.wanted.set()

    def find_trouble(self) -> str | None:
        """Why no job can be submitted now; None: one can."""
        refused = self.refused
        error = self.error or (refused.why if self.submitting else refused.find_why(self.service.clock.monotonic()))
        if error:
            return error.message
        return "the job before it is being submitted to Slurm" if self.submitting else None

    def find_error(self) -> NexusError | None:
        """The error that needs somebody's attention."""
        why: NexusError | None = self.refused.why
        return self.error or (why if why and why.kind != "conflict" else None)

    def find_wait(self, job: Job) -> str:
        error = self.error or (self.refused.why if job.current.slurm_id is None else None)
        return describe_submitted(job, self.seen.get(job.current.slurm_key), error.message if error else None)

    def describe(self) -> dict[str, Any]:
        """The `slurm` of GET /status."""
        running = sum(job.status == RUNNING for job in self.live)
        error = self.find_error()
        return {"cluster": self.name or None, "trouble": error.message if error else None,
                "handed_jobs": len(self.live) - running, "running_jobs": running,
                "max_submitted": self.service.config.slurm.max_submitted,
                "partitions": [pick(vars(one), one.NAMES) for one in self.partitions]}


PARTITIONS_INTERVAL_S = 30.0    # between two looks at Slurm's partitions and their GPUs
OUTAGE_PAUSE_S = 10.0           # the longest pause while Slurm does not answer: most of a run time is waiting then
FAST_POLL_S = 0.2               # between two calls of squeue when something is about to change
HURRY_S = 3.0                   # how long squeue runs so often


STARTS_WAIT_S = 0.02            # how long a start waits for the next event: that of a short job is its end


class RunnerEvents:
    """The FIFO into which runners say that they start and end.  It is also what wakes a loop that waits."""

    def __init__(self, path: str, log: logging.Logger) -> None:
        self.received = b""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.mkfifo(path, 0o600)
            self.source = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)       # so a runner finds a reader
            self.target = self.source
        except OSError as error:
            log.warning("%s: %s; ends of jobs are noticed within %g s", path, error, WATCH_INTERVAL_S)
            self.source, self.target = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """End the wait.  Safe in a signal handler and in any thread."""
        with contextlib.suppress(BlockingIOError):          # it is full: the loop wakes anyway
            os.write(self.target, b"\n")

    def wait(self, timeout_s: float) -> list[RunnerEvent]:
        """Wait for events or wake(); return the events.  Starts, on which nothing waits, wait a little for others."""
        give_up_at, events, is_over = time.monotonic() + timeout_s, list[RunnerEvent](), False
        while not is_over:
            lines = self.read(max(0.0, give_up_at - time.monotonic()))
            parsed = [parse_runner_event(line.decode("utf-8", "replace")) for line in lines if line]
            events += [event for event in parsed if event]
            is_over = not lines or b"" in lines or any(event.verb != "start" for event in events)
            give_up_at = min(give_up_at, time.monotonic() + STARTS_WAIT_S)
        return events

    def read(self, timeout_s: float) -> list[bytes]:
        """The lines that come next; b"" is a wake()."""
        import select
        select.select([self.source], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):          # it is empty
            self.received += os.read(self.source, 65536)
        *lines, self.received = self.received.split(b"\n")
        self.received = self.received[-4096:]
        return lines


class Observation(Value):
    """What a GpuSource told, or why it told nothing."""
    gpus: tuple[Gpu, ...]
    error: str | None
    hint: str
    began_at: float                 # monotonic
    took_s: float


class JobUsage(Value):
    """The resources that a running job uses, as of the last refresh."""
    samples: Usage = Usage()
    rss_mib: float | None = None
    cpu_percent: float | None = None
    cpu_read: tuple[float, float] | None = None         # (CPU seconds of its processes, monotonic time of the reading)
    look_count: int = 0                                 # readings in mean_gpu_util

    def add(self, processes: Sequence[Process], rss_mib: float | None, gpu_mem_mib: float, loads: Sequence[float],
            now: float) -> JobUsage:
        """The usage after another reading.  `loads`: its GPUs' utilization in percent."""
        cpu_s = sum(process.cpu_ticks for process in processes) * TICK_S
        (former_s, at), count = self.cpu_read or (0.0, now), self.look_count + bool(loads)
        # CPU time is a maximum too: a process that ends takes its time with it.
        latest = {"peak_rss_mib": rss_mib, "cpu_seconds": cpu_s, "peak_gpu_mem_mib": gpu_mem_mib or None}
        samples = {name: max(number, getattr(self.samples, name) or 0.0)
                   for name, number in latest.items() if number is not None}
        if loads:
            former = self.look_count * (self.samples.mean_gpu_util or 0.0)
            samples["mean_gpu_util"] = (former + sum(loads) / len(loads)) / count
        cpu_percent = 100 * max(0.0, cpu_s - former_s) / (now - at) if now > at else None
        return JobUsage(replace(self.samples, **samples), rss_mib, cpu_percent, (cpu_s, now), count)


class Observer:
    """The GPUs of the machine that this process runs on, who uses them, and what jobs take there."""

    def __init__(self, machine: Machine, clock: Clock, config: Config, log: logging.Logger,
                 visible_devices: str | None) -> None:
        self.machine, self.clock, self.config, self.log, self.visible_devices = (
            machine, clock, config, log, visible_devices)
        self.observation = Observation(
            (), f"{machine.gpu_source.program} has not answered yet", machine.gpu_source.slow_hint, 0.0, 0.0)
        self.latest = self.observation                      # from probe(); take_in() copies it
        self.gpus: tuple[Gpu, ...] = ()                     # with the jobs and users of their processes
        self.released_at: dict[str, float] = {}             # {GPU uuid: monotonic time when a job of ours left it}
        # Other threads read these without a lock: values are replaced, or one key.
        self.usage: dict[str, JobUsage] = {}                # of running jobs
        self.members: Mapping[tuple[str, int], Sequence[Process]] = {}      # {(job id, attempt): its processes}
        self.misplaced: dict[tuple[str, int], str] = {}     # {(job id, attempt): that it uses what it was not given}
        self.memory_mib: Mapping[tuple[str, int], float | None] = {}        # {(job id, attempt): its host memory}
        self.oom_kills: tuple[int | None, ...] = ()         # Machine.count_oom_kills() at the last two refreshes
        self.lease_holders: Mapping[str, str] = {}          # {GPU uuid: the user whose nexus holds it}
        self.lease_error: NexusError | None = None          # why the leases could not be read
        self.lease_backoff = Backoff(*LEASE_BACKOFF_S)      # jobs get no GPU until it is over

    def probe(self, may_lack: bool) -> float:
        """Ask for the GPUs once; return the seconds until the next time.  `may_lack`: the program may be missing."""
        began, refresh_s = self.clock.monotonic(), self.config.service.refresh_rate_seconds
        known = {gpu.uuid: replace(gpu, fault=None) for gpu in self.latest.gpus}            # the last good reading
        gpus, fault, hint = tuple(known.values()), None, ""
        try:
            gpus = tuple(drop_doubles(self.machine.gpu_source.query_gpus(known)))
        except NexusError as error:
            if not may_lack or find_program(self.machine.gpu_source.program):
                fault, hint = error.message, error.hint
        took_s = self.clock.monotonic() - began
        if self.visible_devices is not None:
            visible = parse_visible_devices(self.visible_devices, gpus)
            gpus = tuple(replace(gpu, is_withheld=gpu not in visible) for gpu in gpus)
        self.latest = Observation(gpus, fault, hint, began, took_s)
        pause_s = max(refresh_s, PROBE_BACKOFF_FACTOR * took_s)
        return min(pause_s, TROUBLE_INTERVAL_S) if fault else pause_s

    def take_in(self, running: Sequence[Job]) -> None:
        """Take the latest reading; find the owners of GPU processes, and what the running jobs take."""
        self.observation = self.latest
        self.oom_kills = (*self.oom_kills[-1:], self.machine.count_oom_kills())
        here = [job for job in running if job.current.boot_id == self.machine.boot_id]
        members = self.machine.processes.find_members(here, is_refresh=True)
        self.misplaced = {(job.id, job.attempt): self.misplaced.get((job.id, job.attempt), "") for job in running}
        self.annotate(running)
        self.measure_jobs(here, members)

    def annotate(self, jobs: Iterable[Job]) -> None:
        """Find who uses the GPUs.  `jobs`: those that run here."""
        observation, gpus = self.observation, []
        running = {job.id: job for job in jobs}
        held = {uuid for job in running.values() for uuid in job.current.gpu_uuids}
        if observation.gpus and self.machine.leases:
            try:
                self.lease_holders, self.lease_error = self.machine.leases.find_holders(
                    [gpu.uuid for gpu in observation.gpus]), None
            except NexusError as error:
                if self.lease_error is None:
                    self.log.error("No GPU can be given out: %s (%s)", error.message, error.hint)
                self.lease_error = error
        for gpu in observation.gpus:
            # Our job left after the reading: its memory is free.  Unless told per process, memory in use is unknown.
            was_left = self.released_at.get(gpu.uuid, float("-inf")) >= observation.began_at
            processes = tuple(self.annotate_processes(gpu, running, was_left or gpu.uuid in held))
            is_itemized = bool(processes) and all(process.memory_mib is not None for process in processes)
            is_unknown = was_left and not is_itemized and not self.config.gpu.min_free_mem_mib
            gpus.append(replace(
                gpu, memory_used_mib=None if is_unknown else gpu.memory_used_mib, processes=processes,
                lease_holder=self.lease_holders.get(gpu.uuid)))
        self.gpus = tuple(gpus)

    def annotate_processes(self, gpu: Gpu, running: Mapping[str, Job], is_ours: bool) -> Iterator[GpuProcess]:
        """Add each process's job or user.  `is_ours`: a job of ours has the GPU, or had it at the reading."""
        for process in gpu.processes:
            owner, found = self.machine.processes.owner_of(process.pid), self.machine.processes.find(process.pid)
            if owner is None and found is None and is_ours:
                continue            # a short process of our job, already gone
            # A job that ignores CUDA_VISIBLE_DEVICES and uses a GPU that it was not given counts there as foreign.
            job = running.get(owner or "") if found else None
            if owner and (job is None or gpu.uuid in job.current.gpu_uuids):
                yield replace(process, job_id=owner)
            else:
                if job and not self.misplaced.get((job.id, job.attempt)):
                    why = (f"computes on GPU {gpu.place}, which it was not given (it sets CUDA_VISIBLE_DEVICES "
                           "itself?)")
                    self.misplaced[job.id, job.attempt] = why
                    self.log.warning("Job %s %s", job.id, why)
                yield replace(process, user=find_process_user(process.pid), name=found.name if found else None)

    def find_usage(self, job_id: str) -> JobUsage:
        return self.usage.get(job_id, JobUsage())

    def measure_jobs(self, running: Iterable[Job], members: Mapping[str, Sequence[Process]]) -> None:
        now = self.clock.monotonic()
        self.members = {(job.id, job.attempt): members.get(job.id, ()) for job in running}
        for job in running:
            gpus = [gpu for gpu in self.gpus if gpu.uuid in job.current.gpu_uuids]
            used = sum(process.memory_mib or 0.0
                       for gpu in gpus for process in gpu.processes if process.job_id == job.id)
            loads = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
            self.usage[job.id] = self.find_usage(job.id).add(
                members.get(job.id, ()), self.memory_mib.get((job.id, job.attempt)), used, loads, now)

    def measure_memory(self) -> float:
        """Measure the host memory of running jobs; return the seconds until the next call: this one may take long."""
        began = self.clock.monotonic()
        self.memory_mib = {attempt: measure_memory(self.machine.psutil, processes)
                           for attempt, processes in self.members.items()}
        took_s = self.clock.monotonic() - began
        return max(self.config.service.refresh_rate_seconds, PROBE_BACKOFF_FACTOR * took_s)

    def find_error(self) -> str | None:
        """Return why jobs get no GPU now, or None."""
        error = self.find_lease_error()
        return self.find_gpu_error() or (error.message if error else None)

    def find_lease_error(self) -> NexusError | None:
        return self.lease_error or self.lease_backoff.find_why(self.clock.monotonic())

    def find_gpu_error(self) -> str | None:
        """Return why the GPUs cannot be read, or that it takes much longer than before; or None."""
        observation = self.observation
        silent_s = self.clock.monotonic() - observation.began_at - observation.took_s
        pause_s = max(self.config.service.refresh_rate_seconds, PROBE_BACKOFF_FACTOR * observation.took_s)
        longest_s = pause_s + max(SMI_WAIT_S, 2 * observation.took_s)
        is_silent = silent_s > longest_s
        return observation.error or (
            f"{self.machine.gpu_source.program} has not answered for {silent_s:.0f} s" if is_silent else None)


class Progress(Value):
    """What a machine knows of an attempt there."""
    pid: Pid | None = None                      # of its job.sh, once that has claimed the attempt
    pid_started: Ticks | None = None
    session: Session | None = None
    result: Result | None = None                # its command has ended
    is_over: bool = False                       # and none of its processes is left
    requeue: Words = ""                         # it never began, and never will: why
    processes_left: Count | None = None         # that go on after its command; None: it has not ended
    notes: tuple[Words, ...] = ()               # what was ended after its command
    files: FilePath | None = None               # on a node: the folder with what it wrote into its checkout
    stop: tuple[Limit, Words] | None = None     # the limit that it has reached: find_stop()


def make_progress(news: Requeue | Result) -> Progress:
    """The progress of an attempt that could not be started."""
    return Progress(requeue=news.why) if isinstance(news, Requeue) else Progress(result=news, is_over=True)


class Order(Value):
    """What a machine needs to start an attempt."""
    job: Job
    variables: Mapping[str, str]                # the submitter's environment
    code: str | None = None                     # the Python that was uploaded as its main.py


class HostedJob:
    """An attempt on this machine, as far as this process has followed it."""

    def __init__(self, host: JobHost, job: Job) -> None:
        self.host, self.machine, self.clock, self.disk, self.job = host, host.machine, host.clock, host.disk, job
        self.folder = host.layout.folder_of(job)
        self.pid, self.pid_started = job.current.pid, job.current.pid_started       # known here before it is recorded
        self.session = job.current.session              # screen's, if this process has launched it
        self.began: int | None = None                   # clock ticks since boot: Claim.began
        self.launched_at: float | None = None           # monotonic; None: another process launched it
        self.requeue = ""                               # it never began, and never will: why
        self.result: Result | None = None               # its command has ended
        self.is_over = False                            # and none of its processes is left
        self.work: Work | None = None                   # of what goes on after its command
        self.has_idled = False                          # that idles, and is being ended
        self.processes_left: int | None = None
        self.notes: tuple[str, ...] = ()
        self.stop: tuple[str, str] | None = None        # find_stop()
        self.is_warning_due = False                     # find_warning()
        # Its processes are ended when the job must stop, and again when its command has ended and left some.
        self.ending_since: float | None = None          # monotonic
        self.is_stopped = False                         # since then for a stop
        self.next_look_at = 0.0                         # monotonic
        self.first_pids: set[int] = set()               # the pids when the first signal was due
        self.signaled: set[int] = set()                 # the pids that got it

    @property
    def is_here(self) -> bool:
        """Whether the machine has not been booted since."""
        return self.job.current.boot_id == self.machine.boot_id

    @property
    def limits(self) -> Limits:
        return self.host.get_limits(self.job)

    @property
    def progress(self) -> Progress:
        ran, stop = self.job.current, None if self.is_over else self.stop
        if ran.stop_cause and ran.stop_line:            # of this job, and not of this process
            stop = ran.stop_cause, ran.stop_line
        use = self.host.observer.misplaced.get((self.job.id, self.job.attempt))
        unmet = NO_PSUTIL if self.limits.max_memory_gb and not self.machine.psutil else None
        return Progress(self.pid, self.pid_started, self.session, self.result, self.is_over, self.requeue,
                        self.processes_left, (*self.notes, *filter(None, (use, unmet))), stop=stop)

    @property
    def warned_file(self) -> str:
        """It is there when the signal of --warn was sent for the time limit that the job has now."""
        return f"{self.folder}/warned-{self.job.attempt}-{self.limits.timeout_seconds}"

    def warn(self, members: Sequence[Process]) -> None:
        """Send the signal of --warn.  Raises: OSError."""
        import signal
        name = (self.limits.warn or "").partition("@")[0]
        number, processes = signal.Signals[f"SIG{name}"], self.machine.processes
        warned = choose_warned(members, processes.find_catchers(members, number), name)
        write_atomic(self.disk, self.warned_file, [], is_synced=False)
        for process in warned:
            processes.send(process, number)
        names = join_some([f"{process.name} (pid {process.pid})" for process in warned])
        outcome = f"sent to {names}" if warned else "nothing of it handles that"
        self.notes += (f"{name} before its time limit: {outcome}",)
        self.host.log.info("Job %s: %s", self.job.id, self.notes[-1])

    def see_runner(self) -> Job:
        """The job with the pid of its job.sh, which may not be recorded yet."""
        if self.job.current.pid == self.pid:
            return self.job
        return with_facts(self.job, pid=self.pid, pid_started=self.pid_started)

    def find_runtime_s(self) -> float | None:
        """Seconds since its begin, whatever the wall clock was set to."""
        began = self.began or self.pid_started
        return max(0.0, self.machine.processes.find_age_s(began)) if began is not None and self.is_here else None

    def hear(self, event: RunnerEvent) -> None:
        why = format_line(" ".join(event.words), 300)
        if event.verb == "start":
            self.pid, self.pid_started, self.began = map(int, event.words)
            self.launched_at = None
            if self.machine.leases:                     # the runner has the lease by now
                self.machine.leases.close_own(event.job_id)
                self.host.observer.lease_backoff.succeed()
        elif event.verb == "end":
            code, took_cs, *is_cut = map(int, event.words)
            self.take_result(Result(min(code, 255), None, took_cs / 100, is_cut=any(is_cut)))
        elif event.verb == "fail":
            self.fail_launch(why)
        else:
            self.take_bounce(why)

    def fail_launch(self, why: str) -> None:
        """Its job.sh could not begin with it."""
        self.take_result(Result(None, None, 0.0, "launch", why, may_pass=True))

    def take_bounce(self, why: str) -> None:
        """Its runner could not have a GPU."""
        leases = self.machine.leases
        self.requeue = why or "a GPU was taken"
        if leases and self.job.id in leases.held:       # while it is held here, no runner can lock it
            self.host.observer.lease_backoff.fail(self.clock.monotonic(), NexusError(
                "unavailable", self.requeue, hint=f"does somebody remove files from {leases.folder}?"))

    def take_result(self, result: Result) -> None:
        if result.cause == "bounce":
            return self.take_bounce(result.cause_line or "")
        if result.exit_code == 128 + 9:
            before = next(iter(self.host.observer.oom_kills), None)
            result = explain_kill(self.job, result, before, self.machine.count_oom_kills())
        if not self.result or self.result.goes_on:      # the first end counts, unless others of its session went on
            self.result = result
        self.next_look_at = 0.0

    def check(self, is_child_gone: bool) -> None:
        """See whether it has started or ended, and whether it has reached a limit.  Raises: OSError."""
        if not self.result and not self.requeue:
            self.look_at_files(is_child_gone)
        if not self.requeue and (self.result is None or self.processes_left):
            host = self.host
            memory_mib = host.observer.memory_mib.get((self.job.id, self.job.attempt))
            runtime_s, limits = self.find_runtime_s(), self.limits
            self.stop = self.stop or find_stop(limits, Use(runtime_s, memory_mib))
            self.is_warning_due = (find_warning(limits, runtime_s) is not None
                                   and not self.stop and not find_status(self.disk, self.warned_file))

    def look_at_files(self, is_child_gone: bool) -> None:
        """Look at its files and its pid: the second way to learn that it has started or ended.  Raises: OSError."""
        result, number, claim = read_result(self.disk, self.folder, self.job.attempt), self.job.attempt, None
        with contextlib.suppress(*[] if self.pid is None else [NexusError]):    # a job may have taken its own rights
            claim = read_claim(self.disk, self.folder, number)
        if not self.is_here:
            # What went on after its command has gone down, too.
            is_whole = result and not result.goes_on
            self.take_result(result if result and is_whole else Result(None, None, None, "reboot", MACHINE_DOWN))
        elif self.pid is None:
            self.look_for_claim(claim, is_child_gone)
        elif result and not result.goes_on:
            self.take_result(result)
        elif self.machine.processes.is_alive(self.pid, self.pid_started):
            if result:
                self.take_result(result)
        elif result:
            why = "its job.sh was killed while processes went on after its command"
            self.take_result(replace(result, cause="session-lost", cause_line=why))
        elif (last := read_claim(self.disk, self.folder, number)) and last.pid and last.began is None:
            self.fail_launch("its job.sh ended before it began")
        else:
            # It may have begun, and written its result, since the first looks.
            self.take_result(read_result(self.disk, self.folder, number) or Result(
                None, None, None, "session-lost", "its job.sh was killed: the exit code is not known"))
        if self.pid is not None and self.began is None:
            self.began = (claim and claim.began) or self.pid_started

    def look_for_claim(self, claim: Claim | None, is_child_gone: bool) -> None:
        """Find its runner; if none will come, claim the attempt in its place.  Raises: OSError."""
        import signal
        launched_at = self.launched_at
        if claim and claim.pid:
            self.pid, self.pid_started = claim.pid, claim.started
            return
        if not is_child_gone and launched_at is not None and self.clock.monotonic() - launched_at <= LAUNCH_TIMEOUT_S:
            return
        try:
            is_mine, writers = withdraw(self.disk, self.machine.processes, self.folder, self.job.attempt)
        except OSError as error:
            # Its runner may still begin, until the claim is taken: another attempt would run beside it.
            if is_machine_fault(error):
                return
            raise
        if not is_mine:
            for writer in writers if self.job.current.stop_cause else ():
                self.machine.processes.send(writer, signal.SIGKILL)
        elif claim and claim.is_open:
            self.requeue = ENDED_EARLY
        elif launched_at is None:
            self.requeue = "the service ended before it began"
        else:
            self.fail_launch("screen or sh did not begin with it")

    def begin_ending(self, now: float, is_stopped: bool) -> None:
        self.ending_since, self.is_stopped, self.next_look_at = now, is_stopped, now
        self.first_pids, self.signaled = set(), set()

    def is_due(self, now: float) -> bool:
        """Whether its processes must be looked at, as they are to end."""
        is_stopped = bool(self.job.current.stop_cause)
        if self.is_over or not (is_stopped or self.result):
            return False
        if self.ending_since is None or (is_stopped and not self.is_stopped):
            self.begin_ending(now, is_stopped)
        return now >= self.next_look_at

    def end(self, members: Sequence[Process], now: float) -> None:
        """End what must end of its processes.  `members`: all of them."""
        going_on = self.find_going_on(members, now)
        self.processes_left = len(going_on) or None
        ended = [process for process in members if process not in going_on]
        if ended or going_on or not self.result:
            return self.terminate(ended, now, bool(going_on))
        self.is_over = True
        if self.result.runtime_seconds is None:
            self.result = replace(self.result, runtime_seconds=self.find_runtime_s())

    def find_going_on(self, members: Sequence[Process], now: float) -> list[Process]:
        """The processes for which the job goes on after its command: those of its session, unless they idle."""
        result, going_on, observer = self.result, choose_session(members, self.pid), self.host.observer
        if self.job.current.stop_cause or not result or result.exit_code is None or not going_on or self.has_idled:
            return []
        if self.work:                   # at the first look they may be about to leave the session, as `setsid x &` does
            # They are over at another time than the command.
            result = replace(result, finished_at=None, runtime_seconds=None)
        self.result = replace(result, goes_on=True)
        self.work = (self.work or Work()).add(going_on, now)
        pids = {process.pid for process in going_on}
        is_computing = any(process.pid in pids for gpu in observer.gpus for process in gpu.processes)
        if self.work.is_idle(TICK_S) and not is_computing and not (self.job.gpus and observer.find_gpu_error()):
            self.has_idled = True
            self.begin_ending(now, False)
            return []
        return going_on

    def terminate(self, members: Sequence[Process], now: float, goes_on: bool) -> None:
        """Signal these processes: first the programs, after the grace time all.  `goes_on`: others go on."""
        import signal
        processes, age_s = self.machine.processes, now - (now if self.ending_since is None else self.ending_since)
        grace_s, longest_s = self.limits.kill_grace_seconds, 2.0 if goes_on and not members else 0.5
        self.next_look_at = now + min(longest_s, max(TERMINATION_INTERVAL_S, age_s / 10))
        runner = processes.find(self.pid) if self.pid and self.is_here else None
        if runner and runner.started != self.pid_started:
            runner = None                               # the pid was given to another process
        if not members and not goes_on and runner and age_s >= grace_s + RUNNER_TIMEOUT_S:
            members = [runner]                          # only its job.sh is left, stopped or stuck
        if members and not self.first_pids:
            self.first_pids = {process.pid for process in members}
            if not self.job.current.stop_cause:
                names = join_some([f"{process.name} (pid {process.pid})" for process in members])
                self.host.log.info("Job %s: its command has ended; ending what it left: %s", self.job.id, names)
                self.notes += (f"ended after its command: {names}",)
        signaled, number = list(members), signal.SIGKILL
        if age_s < grace_s:
            number = signal.Signals[f"SIG{self.job.current.stop_signal or 'TERM'}"]
            signaled = choose_signaled(members, self.first_pids, self.signaled, processes.find_readers(members))
        for process in signaled:
            processes.send(process, number)
            processes.send(process, signal.SIGCONT)     # a stopped process handles its signals only then
        self.signaled.update(process.pid for process in signaled)
        if runner and runner.state == "T":
            processes.send(runner, signal.SIGCONT)


NO_PSUTIL = "max_memory_gb does not hold for it: psutil is missing there (python3 -m pip install psutil)"


def find_free_port(number: int) -> int:
    """A TCP port for a job, below those that Linux gives out: no other of the jobs that run at once has it."""
    import socket
    for attempt in range(100):
        port = 20000 + (number + os.getuid() * 101 + attempt * 997) % 10000
        with contextlib.suppress(OSError), socket.socket() as line:
            line.bind(("", port))
            break
    return port


class JobHost:
    """Starts, follows and ends attempts on the machine that this process runs on."""

    def __init__(self, observer: Observer, layout: Layout, disk: Disk, umask: int,
                 get_limits: Callable[[Job], Limits], run_guarded: Callable[..., None], recorder: int = 0) -> None:
        self.observer, self.layout, self.disk = observer, layout, disk
        self.umask = umask                              # for jobs without one
        self.get_limits = get_limits                    # of a job: its head decides
        self.recorder = recorder                        # build_script()
        self.machine, self.clock, self.config, self.log = (
            observer.machine, observer.clock, observer.config, observer.log)
        self.run_guarded = run_guarded                  # what is wrong with one job must not hold up the others
        self.hosted: dict[str, HostedJob] = {}          # {job id: its attempt here}
        self.checked_at = float("-inf")                 # monotonic
        self.start_backoff = Backoff(*HOLD_S)           # nothing is started here during it, nor on nodes or in Slurm

    def start(self, order: Order) -> Requeue | None:
        """Start an attempt; return why it cannot be started now.  Raises: OSError, NexusError; then fail() is due."""
        job, leases = order.job, self.machine.leases if order.job.current.gpu_uuids else None
        why = self.start_backoff.find_why(self.clock.monotonic()) or (self.observer.find_error() if leases else None)
        if why:
            return Requeue(why)
        try:
            if leases:
                leases.take(job.id, job.current.gpu_uuids)
        except NexusError as error:                     # not the job's fault
            if error.kind != "conflict":
                self.observer.lease_backoff.fail(self.clock.monotonic(), error)
            return Requeue(error.message)
        script = self.write_script(order, leases.paths(job.id) if leases else ())
        hosted = self.hosted[job.id] = HostedJob(self, job)
        hosted.launched_at = self.clock.monotonic()
        hosted.session = self.machine.launch(job, script)
        self.start_backoff.succeed()
        return None

    def fail(self, job: Job, error: OSError | NexusError) -> Requeue | Result:
        """Note that an attempt could not be started."""
        news, hosted = self.judge_start_error(error, job), HostedJob(self, job)
        self.hosted[job.id] = hosted                    # so that nobody looks for its runner
        if isinstance(news, Requeue):
            hosted.requeue = news.why
        else:
            hosted.result, hosted.is_over = news, True
        return news

    def judge_start_error(self, error: OSError | NexusError, job: Job) -> Requeue | Result:
        """What becomes of a job that could not be started.  A fault of the machine keeps all others waiting, too."""
        fault = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(fault, OSError):                  # its script has changed or is gone
            return Result(None, None, 0.0, "launch", format_line(str(error), 300))
        path = fault.filename or self.layout.folder_of(job)
        why = format_line(describe_disk_error(fault, "start it with", path).message, 300)
        if not is_machine_fault(fault):
            return Result(None, None, 0.0, "launch", why, may_pass=True)
        self.start_backoff.fail(self.clock.monotonic(), f"{why}; it is tried again")
        self.log.error("Nothing is started for %.0f s: %s", self.start_backoff.rest_s, why)
        return Requeue(why)

    def write_script(self, order: Order, leases: Sequence[tuple[str, str, str]] = ()) -> str:
        """Write a job's folder and its job.sh; return the path of that.  Raises: OSError."""
        job, gpus = order.job, self.observer.observation.gpus
        folder = self.layout.folder_of(job)
        if not is_folder(self.disk, folder):
            self.disk.makedirs(folder)
        if order.code is not None:                      # an earlier attempt may have changed the file
            self.disk.makedirs(job.cwd)
            write_atomic(self.disk, os.path.join(job.cwd, "main.py"), [order.code], is_synced=False)
        job = replace(fill_cuda_numbers(job, gpus), umask=self.umask if job.umask is None else job.umask)
        environ = build_environment(job, order.variables, gpus, find_free_port(job.number))
        text = build_script(job, environ, self.layout, leases, self.recorder)
        script = os.path.join(folder, "job.sh")
        if not write_new(self.disk, script, text, 0o700):       # a shell may be reading that of an earlier attempt
            write_atomic(self.disk, script, [text], 0o700, is_synced=False)
        return script

    def tick(self, jobs: Sequence[Job], events: Sequence[RunnerEvent] = ()) -> list[tuple[Job, Progress]]:
        """Take in events, check files and processes, end what must end; return what is known of each job."""
        now, hosted = self.clock.monotonic(), [self.find(job) for job in jobs]
        for event in events:
            one = self.hosted.get(event.job_id)
            if one and one.job.attempt == event.attempt:
                one.hear(event)
        gone = self.machine.reap()                      # each time: the end of a job looks at all that are dead
        is_time = now - self.checked_at >= WATCH_INTERVAL_S
        self.checked_at = now if is_time else self.checked_at
        for one in hosted:
            if is_time or one.job.id in gone:
                self.run_guarded(f"looking at job {one.job.id}", one.check, one.job.id in gone)
        self.end_processes([one for one in hosted if one.is_due(now)], now)
        return [(job, one.progress) for job, one in zip(jobs, hosted)]

    def find(self, job: Job) -> HostedJob:
        hosted = self.hosted.get(job.id)
        if not hosted or hosted.job.attempt != job.attempt:
            hosted = self.hosted[job.id] = HostedJob(self, job)
        hosted.job = job
        if hosted.stop and not job.current.stop_cause:      # a full disk, where that cannot be recorded, spares no job
            hosted.job = with_facts(job, stop_cause=hosted.stop[0], stop_line=hosted.stop[1])
        return hosted

    def end_processes(self, due: Sequence[HostedJob], now: float) -> None:
        """End jobs with a stop_cause, and what ended commands have left; warn those whose time limit is near."""
        warned = [one for one in self.hosted.values() if one.is_warning_due and not one.result]
        if not due and not warned:
            return
        asked = dict.fromkeys((*due, *warned))
        here, others = ([one.see_runner() for one in several if one.is_here] for several in (
            asked, [one for one in self.hosted.values() if one not in asked]))          # no process outlives a boot
        over = [job_id for job_id, one in self.hosted.items() if one.result]
        members = self.machine.processes.find_members(here, over, others=others)
        for one in warned:
            one.is_warning_due = False
            self.run_guarded(f"warning job {one.job.id}", one.warn, members.get(one.job.id, []))
        for one in due:
            self.run_guarded(f"ending job {one.job.id}", one.end, members.get(one.job.id, []), now)

    def find_next_look_s(self) -> float:
        """Seconds until processes that are being ended must be looked at again; infinite: there are none."""
        due = [one.next_look_at for one in self.hosted.values() if one.ending_since is not None and not one.is_over]
        return max(0.0, min(due, default=float("inf")) - self.clock.monotonic())

    def forget(self, job: Job) -> None:
        """Drop an attempt that is over."""
        self.observer.released_at.update(dict.fromkeys(job.current.gpu_uuids, self.clock.monotonic()))
        self.hosted.pop(job.id, None)
        if self.machine.leases:
            self.machine.leases.close_own(job.id)


def list_news(known: Iterable[tuple[Job, Progress]]) -> Iterator[Finding]:
    """What is not recorded yet of jobs' progress.  A Result comes when none of the job's processes is left."""
    for job, progress in known:
        if progress.requeue:
            yield job, Requeue(progress.requeue)
            continue
        facts: dict[str, Any] = {}
        if progress.stop and not job.current.stop_cause:
            facts.update(stop_cause=progress.stop[0], stop_line=progress.stop[1])
        if progress.pid is not None and job.current.pid is None:
            facts.update(pid=progress.pid, pid_started=progress.pid_started, session=progress.session)
        notes = add_notes(job.current.notes, progress.notes)
        if (notes, progress.processes_left) != (job.current.notes, job.current.processes_left):
            facts.update(processes_left=progress.processes_left, notes=notes)
        if facts:
            yield job, facts
        if progress.is_over and progress.result:
            yield job, progress.result


class MachineBackend(Backend):
    """Jobs that run on one machine: this one, or a node."""

    def has(self, job: Job) -> bool:
        return job.current.slurm_key is None and job.current.node == self.name

    def list_jobs(self) -> list[Job]:
        return [job for job in self.service.running_jobs() if self.has(job)]


class Local(MachineBackend):
    """This machine."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.host = JobHost(service.observer, service.layout, service.disk, service.umask,
                            lambda job: find_limits(job, self.config.jobs), service.run_guarded, os.getpid())

    def start(self, job: Job, variables: Mapping[str, str] | None) -> News | None:
        return self.host.start(self.service.starter.make_order(job, variables))

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterator[Finding]:
        return list_news(self.host.tick(self.list_jobs(), runner_events))


# Nodes.  A job's runner needs no service beside it, so a node has none.  On it an agent, this file at the other end of
# an ssh, looks after the jobs of its head with the same JobHost.  It keeps files only, in ~/.nexus/agent there.  When
# the connection is cut, it goes on for as long as jobs run; the next agent of the same head takes its place.

NOT_REACHED = "it has not been reached yet"
RECONNECT_S = (1.0, 10.0)       # backoff between attempts to reach a node: at first, at most
LOOK_WAIT_S = 10.0              # an agent replies when there is news, else after this time
LATE_S = 1.0                    # a question makes an agent reply at once to the one before; after this it is late
SILENCE_S = 15.0                # a reply that is later than expected by this means that the connection is lost
ANSWER_S = 120.0                # in which a whole reply must arrive, however slow the connection
MAX_ANSWER_BYTES = 16 * 2**20
PIECE_PAUSE_S = 0.001           # between the pieces of a reply: a node that sends single bytes costs little CPU
MAX_LOGIN_LINES = 1000          # that a login may print before the agent begins
MAX_LOGIN_BYTES = 65536         # of such a line, and of the agent's first
MAX_ANSWER_FACTS = 500000       # in all lists and objects of a reply: empty ones take seconds and half a GiB to read
MAX_NODE_GPUS = 256             # each plan looks at all of them
MAX_GPU_ROWS = 5000             # GPUs of a node, and processes on them
MAX_QUESTIONS = 10              # without a reply; then a change waits for one
MAX_ORDERS = 100                # in one question: a node may claim to have slots without end, and read nothing
LOG_BYTES = 2**20               # of all logs in one reply: a slow connection transfers it within ANSWER_S
LOG_INTERVAL_S = 0.1            # how often logs are looked at
HEAD_SILENCE_S = 180.0          # an agent without jobs ends when nobody has asked it for so long
UNKNOWN_S = 0.2                 # a question about a job that an agent does not know is answered after this time
FOLDERS_INTERVAL_S = 1.0        # how often an agent looks whether directories are there
START_BACKOFF_S = 5.0           # a node that could not start a job, or went down with one, gets none for so long
NOTES_INTERVAL_S = 5.0          # notes of a job that runs on a node are recorded no more often
NODE_ALARM_S = 30.0             # health turns bad when a node has been silent for so long

# The variables that a job on a node takes from the node, not from its submitter
OWN_VARIABLES = (
    r"HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TMPDIR|TMP|TEMP|MAIL|HOSTNAME|DISPLAY|XAUTHORITY|WAYLAND_DISPLAY|"
    r"PATH|(XDG|SSH|DBUS|SYSTEMD|NEXUS|SLURM|TMUX|SCREEN)_?\w*|INVOCATION_ID|JOURNAL_STREAM|CUDA_VISIBLE_DEVICES")


def mix_environments(variables: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The submitter's environment, but for what describes a machine: that is the node's own."""
    paths = [*variables.get("PATH", "").split(":"), *(own.get("PATH") or os.defpath).split(":")]
    return {**{name: text for name, text in own.items() if re.fullmatch(OWN_VARIABLES, name)},
            **{name: text for name, text in variables.items() if not re.fullmatch(OWN_VARIABLES, name)},
            "PATH": ":".join(dict.fromkeys(filter(None, paths)))}


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
    key: str                                    # find_key()
    attempt: int
    log_sizes: tuple[FileSize, FileSize]        # bytes of this attempt's logs that have arrived
    limits: Limits                              # now
    stop_cause: str | None = None               # why it must end
    stop_signal: str | None = None
    order: Order | None = None                  # to start it; None: the node has it already, or has lost it
    has_begun: bool = False                     # it ran there


class Question(Value):
    """What a head asks its agent for: the progress of its jobs.  All others of its jobs there are ended."""
    jobs: tuple[Wanted, ...]
    folders: tuple[str, ...]                    # are these directories there?

    @property
    def most_bytes(self) -> int:
        """How many new bytes of each log a reply may have."""
        return LOG_BYTES // max(1, 2 * len(self.jobs))


class JobReport(Value):
    """What is known of an attempt that is wanted."""
    key: JobKey
    attempt: Count
    progress: Progress
    log_sizes: tuple[FileSize, FileSize] | None = None      # of this attempt; None: its logs are not looked at
    logs: tuple[bytes, bytes] = (b"", b"")      # its new bytes
    samples: Usage = Usage()
    rss_mib: Amount | None = None


class Report(Value):
    """The reply to a Question: all that a head takes from a node, but for a Hello."""
    now: Epoch                                  # the node's clock
    jobs: tuple[JobReport, ...]
    folders: Mapping[str, bool]
    trouble: Words                              # why jobs get no GPU there
    gpus: tuple[Gpu, ...] | None                # None: as before


def read_report(text: bytes, question: Question) -> tuple[Report, dict[str, str]]:
    """(the reply to a question, {key of a job: what is wrong with its report}), whatever a node sends.

    A report that is wrong is not among the jobs of the reply.  A job of which nothing is said has a wrong one.
    Raises: KeyError, TypeError or ValueError, when what is wrong is about no job, or about one that was not asked for.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_ANSWER_FACTS:
        raise ValueError("its reply has too many parts")
    fields = decode("dict", load_json(text), "the reply")
    asked = {one.key: one for one in question.jobs}
    told: dict[str, Json] = {}
    for one in decode("tuple[dict, ...]", fields.get("jobs"), "jobs", is_strict=True):
        key = decode("JobKey", one.get("key"), "key")
        if key not in asked:
            raise ValueError(f"it tells of job {key}, which is not its")
        told.setdefault(key, one)
    if count_gpu_rows(fields.get("gpus")) > MAX_GPU_ROWS:
        raise ValueError(f"it has more than {MAX_GPU_ROWS} GPUs and processes on them")
    report = decode_value(Report, {**fields, "jobs": []}, "the reply", True)
    if len(report.gpus or ()) > MAX_NODE_GPUS:
        raise ValueError(f"it has more than {MAX_NODE_GPUS} GPUs")
    for names in ([gpu.local_place for gpu in report.gpus or ()], [gpu.uuid for gpu in report.gpus or ()]):
        if len(set(names)) < len(names):
            raise ValueError("two GPUs have one name")
    jobs, faults = list[JobReport](), dict[str, str]()
    for key, wanted in asked.items():
        try:
            jobs.append(check_report(decode_value(JobReport, told[key], f"job {key}", True), question, wanted))
        except KeyError:
            faults[key] = "nothing is said of it"
        except (TypeError, ValueError) as error:
            faults[key] = cut_words(str(error), 200)
    return replace(report, jobs=tuple(jobs)), faults


def count_gpu_rows(gpus: Any) -> int:
    """How many GPUs, and processes on them, a reply has, whatever they are: to decode too many takes long."""
    rows = gpus if isinstance(gpus, list) else []
    processes = [row.get("processes") for row in rows if isinstance(row, dict)]
    return len(rows) + sum(len(some) for some in processes if isinstance(some, list))


def check_report(report: JobReport, question: Question, wanted: Wanted) -> JobReport:
    """A report that is of this attempt, and has of its logs what comes next.  Raises: ValueError."""
    if report.attempt != wanted.attempt:
        raise ValueError(f"attempt is {report.attempt}, and not {wanted.attempt}")
    for piece, have, size in zip(report.logs, wanted.log_sizes, report.log_sizes or (0, 0)):
        if piece and not len(piece) <= min(question.most_bytes, size - have):
            raise ValueError(f"{len(piece)} bytes of a log of {size} are sent, after {have}")
    return report


def find_key(job: Job) -> str:
    """The name of a job on a node: ids are given again when a job is forgotten."""
    return f"{job.id}-{job.number}"


class Agent:
    """Looks after a head's jobs on the machine that it runs on.

    Each line on stdin is a Question, each line on stdout the Report that replies to it.  What the head wants is in the
    Question; what is not known here yet is started, what is not wanted is ended.  A Question ends the wait for news.
    """

    def __init__(self, layout: Layout, config: Config, disk: Disk, head: str, environ: Mapping[str, str],
                 log: logging.Logger) -> None:
        import collections
        self.clock, self.disk = Clock(), disk
        self.layout, self.config, self.environ, self.log = layout, config, environ, log
        self.machine = Machine(config, layout, disk, head)
        self.observer = Observer(self.machine, self.clock, config, log, find_visible_devices(environ))
        self.limits: dict[str, Limits] = {}             # {find_key(): what the head has said last}
        self.host = JobHost(self.observer, layout, disk, os.umask(0o077), self.get_limits, self.run_guarded)
        self.events = RunnerEvents(layout.events_file, log)
        self.jobs: dict[str, Job] = {}                  # {find_key(): its attempt here}
        self.refused: dict[str, JobReport] = {}         # {find_key(): the attempt that could not be started}
        self.requests: collections.deque[bytes] = collections.deque()
        self.replies = start_writer(sys.stdout.buffer, "replies")
        self.is_connected, self.is_stopping = True, False
        self.question: Question | None = None           # to be answered
        self.wanted: Mapping[str, Wanted] | None = None     # by the latest question
        self.asked_at = self.clock.monotonic()
        self.told: object = None                        # find_news() of the last reply
        self.shown: tuple[Gpu, ...] | None = None       # the GPUs in it
        self.folders: dict[str, bool] = {}

    def fail(self, doing: str, error: BaseException) -> None:
        self.log.error("Internal error while %s", doing, exc_info=error)

    def run_guarded(self, doing: str, act: Callable[..., object], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception as error:
            self.fail(doing, error)

    def run(self) -> None:
        """Serve until the connection has ended, and no job is left."""
        import threading
        self.observer.probe(False)
        for thread in (Worker(self, "reading the GPUs", self.observe).thread,
                       Worker(self, "looking at directories", self.look_at_folders).thread,
                       threading.Thread(target=self.read, daemon=True)):
            thread.start()
        folder = self.machine.screen.folder
        self.reply(Hello(
            f"{self.machine.boot_id} {read_machine()}", self.machine.boot_id, ".".join(map(str, sys.version_info[:3])),
            (f"SCREENDIR={folder}",) if folder else (), os.path.abspath(__file__), self.config.jobs.cpu_slots))
        for name in self.disk.listdir(self.layout.log_dir):     # an earlier agent's; limits hold without a request
            with contextlib.suppress(KeyError, TypeError, ValueError, NexusError):      # what is no job's is left alone
                self.take_over(name)
        self.tick_jobs()
        while self.is_asked() or any(not (one.is_over or one.requeue) for one in self.host.hosted.values()):
            self.tick(self.events.wait(self.find_wait_s()))

    def get_limits(self, job: Job) -> Limits:
        """The limits of a job.  Of one that an older agent kept: what this machine's configuration says."""
        return self.limits.get(find_key(job)) or find_limits(job, self.config.jobs)

    def take_over(self, name: str) -> None:
        """Go on with a job of an earlier agent, from its folder.  Raises: KeyError, TypeError, ValueError, NexusError.

        The job may have changed the file: it must be of this folder's job.
        """
        folder = os.path.join(self.layout.log_dir, name)
        kept = decode("dict", load_json(read_job_file(self.disk, os.path.join(folder, "job.json")) or ""))
        job, key = decode_value(Job, kept), name.partition("_")[2]
        if not (find_key(job) == key and decode("JobKey", key) and job.log_dir == folder and job.attempts):
            raise ValueError(f"{folder} has the file of another job")
        if "limits" in kept:
            self.limits[key] = decode("Limits", kept["limits"])
        self.jobs[key] = job

    def is_asked(self) -> bool:
        """Whether a head is there.  That it has vanished without a word, the connection shows much later."""
        return self.is_connected and self.clock.monotonic() - self.asked_at < HEAD_SILENCE_S

    def observe(self) -> float:
        """Read the GPUs, and what jobs take; return the pause in seconds."""
        pause_s = self.observer.probe(False)
        self.events.wake()
        self.observer.measure_memory()
        return pause_s

    def look_at_folders(self) -> float:
        """See which of the head's directories are there, in a thread, as a file system may hang; return the pause."""
        question = self.question
        found = {path: is_folder(self.disk, path) for path in (question.folders if question else ())}
        if question and found != self.folders:
            self.folders = found
            self.events.wake()
        return FOLDERS_INTERVAL_S if found else 0.05

    def read(self) -> None:
        """In a thread: read the requests."""
        for line in sys.stdin.buffer:
            self.requests.append(line)
            self.events.wake()
        self.is_connected = False
        self.events.wake()

    def reply(self, answer: Value) -> None:
        self.replies.put(encode_json(encode_value(answer)).encode("ascii") + b"\n")

    def find_wait_s(self) -> float:
        """Seconds until something must be looked at."""
        pause_s = LOG_INTERVAL_S if self.question and self.jobs else WATCH_INTERVAL_S
        return min(pause_s, self.host.find_next_look_s())

    def tick(self, events: Sequence[RunnerEvent]) -> None:
        """Take in requests and events, look after the jobs, and reply."""
        while self.requests:
            if self.question:
                self.answer(self.tick_jobs())
            self.run_guarded("taking a request", self.take, self.requests.popleft())
        if self.observer.latest is not self.observer.observation:
            self.observer.take_in(list(self.jobs.values()))
        known = self.tick_jobs(events)
        for key, progress in known.items():
            if progress.stop and not self.jobs[key].current.stop_cause:
                self.run_guarded(f"stopping job {key}", self.stop, key, *progress.stop)
            if self.wanted is not None and key not in self.wanted and (progress.is_over or progress.requeue):
                self.run_guarded(f"forgetting job {key}", self.forget, key)
        if self.question and (self.has_news(known) or self.clock.monotonic() - self.asked_at >= LOOK_WAIT_S):
            self.answer(known)

    def tick_jobs(self, events: Sequence[RunnerEvent] = ()) -> dict[str, Progress]:
        return {find_key(job): progress for job, progress in self.host.tick(list(self.jobs.values()), events)}

    def take(self, line: bytes) -> None:
        """Take in a question: start and end jobs, so that what runs here is what it wants."""
        self.question, self.asked_at = decode("Question", load_json(line), "a question"), self.clock.monotonic()
        self.wanted = {one.key: one for one in self.question.jobs}
        self.refused = {key: refusal for key, refusal in self.refused.items()
                        if key in self.wanted and self.wanted[key].attempt == refusal.attempt}
        for key, job in self.jobs.items():
            same = self.wanted.get(key)
            if same is None or same.attempt != job.attempt:
                same = Wanted(key, job.attempt, (0, 0), self.get_limits(job), stop_cause="killed")
            elif same.limits != self.limits.get(key):
                self.limits[key] = same.limits
                self.run_guarded(f"keeping job {key}", self.keep, job)
            if same.stop_cause and not job.current.stop_cause:
                self.jobs[key] = with_facts(job, stop_cause=same.stop_cause, stop_signal=same.stop_signal)
        for one in self.question.jobs:
            known = self.jobs.get(one.key)
            if one.order and one.key not in self.refused and (known is None or known.attempt != one.attempt):
                news = self.start(one, one.order)
                if news:
                    self.refused[one.key] = JobReport(one.key, one.attempt, make_progress(news))

    def start(self, one: Wanted, order: Order) -> Requeue | Result | None:
        """Start an attempt; return what becomes of one that cannot be started."""
        folder, job = self.layout.job_folder(one.key), order.job
        former = self.host.hosted.get(job.id)
        if one.stop_cause:
            return Requeue("it was killed before it began")
        if job.current.boot_id != self.machine.boot_id:
            return Requeue("it has just been booted")
        is_former_left = any(other.id == job.id and key != one.key for key, other in self.jobs.items())
        if is_former_left or (former and not (former.is_over or former.requeue)):
            return Requeue(f"an earlier job {job.id} is still being ended")
        environ = mix_environments(order.variables, self.environ)
        job = replace(job, log_dir=folder, cwd=job.cwd or os.path.expanduser("~"))
        if order.code is not None:
            job = replace(job, cwd=os.path.join(folder, "work"), command=f"{find_python(environ)} main.py")
        try:
            self.disk.makedirs(folder)
            for name in STREAM_FILES:                           # of an earlier attempt: the head has them
                remove_file(self.disk, os.path.join(folder, name))
            self.limits[one.key] = one.limits
            self.keep(job)                                      # before anything of it can begin
            news: Requeue | Result | None = self.host.start(Order(job, environ, order.code))
        except (OSError, NexusError) as error:
            news = self.host.fail(job, error)
        if news is None:
            self.jobs[one.key] = job
        return news

    def keep(self, job: Job) -> None:
        """Write what a later agent must know of a job, also after a power cut.  Raises: OSError, unavailable."""
        kept = {**encode_value(job), "limits": self.get_limits(job)}
        write_atomic(self.disk, os.path.join(job.log_dir or "", "job.json"), [encode_json(kept)])
        sync_folder(self.disk, self.layout.log_dir)

    def stop(self, key: str, cause: str, line: str) -> None:
        """End a job that has reached a limit: the head may not be there."""
        self.jobs[key] = with_facts(self.jobs[key], stop_cause=cause, stop_line=line)
        self.keep(self.jobs[key])

    def report(self, one: Wanted, progress: Progress | None, most_bytes: int) -> JobReport:
        """What is known of an attempt, and its new output."""
        folder, job = self.layout.job_folder(one.key), self.jobs.get(one.key)
        if one.key in self.refused:
            return self.refused[one.key]
        if job is None or job.attempt != one.attempt or progress is None:
            # What has begun may run still, though its files are gone.
            is_gone, writers = (False, []) if one.has_begun else withdraw(
                self.disk, self.observer.machine.processes, folder, one.attempt)
            if is_gone or writers:
                return JobReport(one.key, one.attempt, Progress(requeue="it was not started there" if is_gone else ""))
            lost = Result(None, None, None, "session-lost", f"its files are gone: {folder}")
            return JobReport(one.key, one.attempt, Progress(result=lost, is_over=True))
        written = os.path.join(folder, "files")
        if progress.is_over and is_folder(self.disk, written):
            progress = replace(progress, files=written)
        sizes = self.measure_output(one)
        out, err = [read_part(self.disk, os.path.join(folder, name), have, min(most_bytes, size - have))
                    if size > have else b""
                    for name, have, size in zip(STREAM_FILES, one.log_sizes, sizes)]
        usage = self.observer.find_usage(job.id)
        return JobReport(one.key, one.attempt, progress, sizes, (out, err), usage.samples, usage.rss_mib)

    def measure_output(self, one: Wanted) -> tuple[int, int]:
        """The sizes of an attempt's logs.  What was lost, or cannot be read, counts if it has arrived."""
        job = self.jobs.get(one.key)
        is_this_boot = job is not None and job.current.boot_id == self.machine.boot_id
        out, err = [size if size and (is_this_boot or size > have) else have
                    for size, have in zip(measure_logs(self.disk, self.layout.job_folder(one.key)), one.log_sizes)]
        return out, err

    def find_news(self, known: Mapping[str, Progress]) -> object:
        """What makes a reply worth sending: it differs from what was last told."""
        return known, list(self.refused), self.folders, self.observer.find_error(), self.observer.gpus

    def has_news(self, known: Mapping[str, Progress]) -> bool:
        wanted = self.question.jobs if self.question else ()
        has_output = any(self.measure_output(one) != one.log_sizes for one in wanted)
        is_unknown = self.clock.monotonic() - self.asked_at >= UNKNOWN_S and any(
            one.key not in known and one.key not in self.refused for one in wanted)
        return has_output or is_unknown or self.find_news(known) != self.told

    def answer(self, known: Mapping[str, Progress]) -> None:
        question, self.question = self.question, None
        assert question
        jobs: list[JobReport] = []
        for one in question.jobs:
            try:
                jobs.append(self.report(one, known.get(one.key), question.most_bytes))
            except (OSError, NexusError) as error:      # what is wrong with one job's folder holds up no other
                why = format_line(f"its folder on the node cannot be used: {error}", 300)
                jobs.append(JobReport(one.key, one.attempt, Progress(notes=(why,))))
        trouble = self.observer.find_error() or ""
        shown = tuple(replace(gpu, fault=gpu.fault or trouble or None) for gpu in self.observer.gpus
                      if not is_left_out(gpu, self.config.gpu))
        self.told = self.find_news(known)
        gpus, self.shown = (None if shown == self.shown else shown), shown
        self.reply(Report(self.clock.now(), tuple(jobs), self.folders, trouble, gpus))

    def forget(self, key: str) -> None:
        """Drop an attempt that the head does not know any more.  Files that it wrote in its checkout stay."""
        self.host.forget(self.jobs.pop(key))
        self.limits.pop(key, None)
        remove_job_files(self.disk, self.layout.log_dir, self.layout.job_folder(key))


# Run on a node: find a Python, bring this nexus.py there if it lacks it, and become the agent.
AGENT_SCRIPT = r'''
for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 /opt/conda/bin/python3 \
    ~/miniconda3/bin/python3; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && exec "$python" -c '
import hashlib, os, sys
wanted, head = sys.argv[1:]
def read(count):                        # unbuffered: what comes after is for the agent
    content = b""
    while len(content) < count:
        piece = os.read(0, count - len(content))
        if not piece:
            sys.exit("the line was cut")
        content += piece
    return content
os.umask(0o077)
folder = os.path.join(os.environ.get("NEXUS_HOME") or os.path.expanduser("~/.nexus"), "agent")
path = os.path.join(folder, "nexus-" + wanted + ".py")
try:
    os.makedirs(folder, exist_ok=True)
    known = open(path, "rb").read() if os.path.isfile(path) else b""
    if hashlib.sha256(known).hexdigest()[:8] != wanted:
        print("nexus-agent: needs", flush=True)
        size = b""
        while size[-1:] != b"\n":
            size += read(1)
        content = read(int(size))
        with open(path + "." + str(os.getpid()), "wb") as file:
            file.write(content)
        os.replace(file.name, path)
except OSError as error:
    sys.exit("nexus.py cannot be written there: " + str(error))
print("nexus-agent: begins", flush=True)
os.execv(sys.executable, [sys.executable, path, "agent", head])
' "$@"
done
echo 'it has no Python that nexus can use: it needs 3.9 or newer there' >&2
echo 'hint: install one and put it on PATH as python3.9, python3.10 ...' >&2
exit 1
'''


def hash_code(content: bytes) -> str:
    """A short hash of a nexus.py: 8 hex digits of its SHA-256."""
    import hashlib
    return hashlib.sha256(content).hexdigest()[:8]


class AgentLine:
    """A connection to a node's agent."""

    def __init__(self, disk: Disk, ssh: Ssh, head: str, digest: str) -> None:
        """Connect, and bring nexus.py there if it is missing.  Raises: unavailable, with ssh's words."""
        import subprocess
        self.ssh, self.name, self.received, self.errors = ssh, ssh.node.name, bytearray(), open_scratch()
        try:
            self.process = subprocess.Popen(
                ssh.list_words(f"sh -s {digest} {head}"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors, env=ssh.environ, start_new_session=True)
        except OSError as error:
            raise NexusError("unavailable", f"ssh cannot be run: {error.strerror}", INSTALL_SSH) from None
        limit_output(self.process, MAX_ANSWER_BYTES)
        assert self.process.stdin
        self.outbox = start_writer(self.process.stdin, f"to node {self.name}")
        try:
            self.outbox.put(AGENT_SCRIPT.encode())
            word = self.read_word()
            if word == "needs":
                content = read_bytes(disk, os.path.abspath(__file__))
                if hash_code(content) != digest:
                    raise NexusError("unavailable", f"{os.path.abspath(__file__)} has changed since the service began",
                                     hint="nexus restart: then the nodes get the new one")
                self.outbox.put(b"%d\n%s" % (len(content), content))
                word = self.read_word()
            first = load_json(self.read_line(SSH_TIMEOUT_S, MAX_LOGIN_BYTES))
            self.hello = decode_value(Hello, first, "its first line", True)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, TypeError, ValueError)):
                raise describe_bad_node(self.name, error) from None
            raise

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request, whose reply read_line() gives in its turn."""
        self.outbox.put(encode_json(request).encode("ascii") + b"\n")

    def read_word(self) -> str:
        """The next line `nexus-agent: WORD`.  A login may print other lines.  Raises: unavailable."""
        for _ in range(MAX_LOGIN_LINES):
            line = self.read_line(SSH_TIMEOUT_S, MAX_LOGIN_BYTES)
            if line.startswith(b"nexus-agent: "):
                return line.decode("utf-8", "replace").split()[-1]
        raise NexusError("unavailable", f"cannot use {self.name}: its login prints more than {MAX_LOGIN_LINES} lines",
                         hint=f"see what its shell prints: {self.ssh.by_hand} true")

    def read_line(self, silence_s: float, most_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """Raises: unavailable."""
        import select
        assert self.process.stdout
        handle, give_up_at = self.process.stdout.fileno(), time.monotonic() + silence_s + ANSWER_S
        end = self.received.find(b"\n")
        while end < 0:
            size = len(self.received)
            if time.monotonic() > give_up_at:
                raise describe_bad_node(self.name, "its reply does not end")
            if size:
                time.sleep(PIECE_PAUSE_S)
            is_ready, _, _ = select.select([handle], [], [], silence_s)
            piece = os.read(handle, 65536) if is_ready else b""
            if not piece:
                self.close()                                # so that ssh has said why
                words = read_scratch(self.errors)
                raise self.ssh.fault("cannot use" if "nexus" in words else "cannot reach", words or (
                    "the line was cut" if is_ready else f"no answer within {silence_s:g} s"))
            self.received += piece
            end = self.received.find(b"\n", size)
            if (len(self.received) if end < 0 else end) > most_bytes:
                raise describe_bad_node(self.name, "its reply is too long")
        line = bytes(self.received[:end])
        del self.received[:end + 1]
        return line

    def close(self) -> None:
        """End ssh, and what its ProxyCommand has started."""
        import signal
        import subprocess
        self.outbox.put(b"")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)                          # it may be ending by itself
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(1.0)


def append_output(disk: Disk, question: Question, found: Iterable[tuple[Job, JobReport]]) -> str:
    """Append jobs' output to their logs here, if these are as in the question; return why some of it was not, or "".

    A log that the job has cut, as `echo done > /dev/stderr` does, begins anew here too.
    """
    asked, why = {(one.key, one.attempt): one.log_sizes for one in question.jobs}, ""
    for job, one in found:
        have, there = asked[one.key, one.attempt], one.log_sizes
        if job.log_dir and there and there != have == measure_output(disk, job):
            try:
                for number, name in enumerate(STREAM_FILES):
                    path, start = os.path.join(job.log_dir, name), job.log_base[number]
                    if one.logs[number]:
                        append_log(disk, path, one.logs[number], start)
                    elif there[number] < have[number]:
                        with opened(disk, path, os.O_WRONLY | os.O_NONBLOCK) as handle:
                            disk.truncate(handle, start)
            except OSError as error:
                why = f"output of jobs there, like {job.id}, cannot be kept ({error}); it is tried again"
    return why


class Unpushed:
    """The attempts whose snapshot must be pushed to a node before they begin.

    One thread does that for all: the node may claim to have slots without end.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.waiting: dict[tuple[str, int], tuple[Job, Mapping[str, str] | None]] = {}      # (job, its variables)
        self.worker = Worker(node.service, f"pushing snapshots to node {node.name}", self.send)
        self.worker.thread.start()

    def add(self, job: Job, variables: Mapping[str, str] | None) -> None:
        self.waiting[job.id, job.attempt] = job, variables
        self.worker.wanted.set()

    def withdraw(self, job: Job) -> bool:
        """Whether this attempt was there, and is not any more."""
        return self.waiting.pop((job.id, job.attempt), None) is not None

    def send(self) -> float | None:
        """Have those that wait started; return the pause."""
        for job, variables in list(self.waiting.values()):
            if self.withdraw(job) and not self.node.is_ended:
                self.node.send(job, variables)
        return 0.0 if self.waiting else None


class Node(MachineBackend):
    """Another machine, whose agent runs jobs for this nexus.

    A thread asks it again and again for their progress and output.  What the service's loop has recorded is wanted.
    """

    def __init__(self, service: Service, address: NodeConfig, is_leaving: bool) -> None:
        import collections
        import threading
        super().__init__(service)
        self.address, self.name, self.is_leaving = address, address.name, is_leaving
        self.ssh = Ssh(address, service.environ)
        self.hello: Hello | None = None                     # of the last connection
        self.trouble: NexusError | None = NexusError("unavailable", NOT_REACHED)
        self.heard_at = self.clock.monotonic()              # its last reply
        self.due_at = float("inf")                          # since when another reply is due; inf: none is
        self.clock_offset_s = 0.0                           # its clock minus ours
        self.gpus: tuple[Gpu, ...] = ()
        self.gpu_error = ""                                 # why its agent gives no GPU
        self.guard = threading.Lock()                       # held to send a question, for the next four
        self.line: AgentLine | None = None
        self.questions: collections.deque[Question] = collections.deque()       # without a reply
        self.latest: Question | None = None                 # on this connection
        # {(job id, attempt)} that the agent may know: recorded by an earlier service (None), or ordered
        self.orders: dict[tuple[str, int], Order | None] = {
            (job.id, job.attempt): None for job in self.list_jobs()}
        self.reports: dict[tuple[str, int], JobReport] = {}
        # {(job id, attempt): (what is wrong with its latest report, UTC when the first such came)}
        self.faults: Mapping[tuple[str, int], tuple[str, float]] = {}
        self.noted_at: dict[tuple[str, int], float] = {}    # monotonic: when its notes changed last
        self.unsent: dict[tuple[str, int], Progress] = {}   # attempts whose order could not be made or sent
        self.folders: Mapping[str, bool] = {}               # directories that were asked for: is it there?
        self.has_none = False                               # the agent knows that no job is wanted
        self.log_error = ""                                 # why output could not be written
        self.trees: dict[str, str] = {}                     # {commit: its path on the node}
        self.start_backoff = Backoff(START_BACKOFF_S, START_BACKOFF_S)
        self.given_up_by = ""                               # the user who removed it with --force
        self.is_ended, self.reconnect_backoff = False, Backoff(*RECONNECT_S)
        self.unpushed = Unpushed(self)
        self.follower = Worker(service, f"following node {self.name}", self.follow)
        self.follower.thread.start()

    def follow(self) -> float:
        """Ask, and take in a reply; return the pause before the next one in seconds."""
        try:
            line = self.line or self.connect()
            with self.guard:
                if not self.questions:
                    self.ask(line)
            began_s = time.thread_time()
            reply = line.read_line(LOOK_WAIT_S + SILENCE_S)
            with self.guard:
                question = self.questions.popleft()
                self.due_at = self.clock.monotonic() if len(self.questions) > 1 else float("inf")
                if line.outbox.qsize() > len(self.questions):
                    raise ValueError("it replies to what it was not sent")      # the unsent would fill the memory
            report, faults = read_report(reply, question)
            self.heard_at = self.clock.monotonic()
            self.take(question, report, faults)
            self.reconnect_backoff.succeed()
            return 2 * (time.thread_time() - began_s + min(1.0, self.service.tick_s))  # a third of a core at most
        except Exception as error:
            self.lose(error)
            self.reconnect_backoff.fail(self.clock.monotonic())
            return self.reconnect_backoff.rest_s

    def connect(self) -> AgentLine:
        """Raises: unavailable; conflict, when the machine has another name here."""
        line = AgentLine(self.disk, self.ssh, self.store.service_id, self.service.hash)
        twin = next((node.name for node in self.service.pool.nodes.values()
                     if node is not self and node.hello and node.hello.machine == line.hello.machine), None)
        if twin or line.hello.machine == f"{self.machine.boot_id} {read_machine()}":
            line.close()
            raise NexusError("conflict", f"{self.name} is {twin or 'this very machine'}",
                             hint=f"it needs no second name: nexus node remove {self.name} --force")
        with self.guard:
            self.line, self.hello, self.latest = line, line.hello, None
            self.questions.clear()
            self.due_at = float("inf")
            if self.is_ended:
                line.close()
        return line

    def ask(self, line: AgentLine) -> None:
        """Ask what is known of the jobs that are wanted now.  The caller holds `guard`."""
        recorded = {(job.id, job.attempt) for job in self.list_jobs()}
        self.orders = {key: order for key, order in self.orders.items() if key in recorded}
        self.noted_at = {key: at for key, at in self.noted_at.items() if key in recorded}
        self.latest = Question(self.list_wanted(), self.service.pool.list_folders(self))
        if self.questions:
            self.due_at = min(self.due_at, self.clock.monotonic())
        self.questions.append(self.latest)
        self.has_none = self.has_none and not self.latest.jobs
        line.ask(encode_value(self.latest))

    def list_due(self) -> list[tuple[Job, Order | None]]:
        """The attempts that it shall have now, with the orders of those that it does not have: MAX_ORDERS of them.

        The oldest orders come first: what it was sent once stays wanted.  The caller holds `guard`.
        """
        jobs = {(job.id, job.attempt): job for job in self.list_jobs()}
        due = [(jobs[key], order) for key, order in self.orders.items() if key in jobs]
        later = {job.id for job in [job for job, order in due if order][MAX_ORDERS:]}
        return [(job, order) for job, order in due if job.id not in later]

    def list_wanted(self) -> tuple[Wanted, ...]:
        return tuple(Wanted(find_key(job), job.attempt, measure_output(self.disk, job),
                            find_limits(job, self.config.jobs), job.current.stop_cause, job.current.stop_signal,
                            order, job.current.pid is not None)
                     for job, order in self.list_due())

    def take(self, question: Question, report: Report, faults: Mapping[str, str]) -> None:
        """Take in what is new.  `faults`: of read_report()."""
        jobs = {(find_key(job), job.attempt): job for job in self.list_jobs()}
        found = [(jobs[one.key, one.attempt], one) for one in report.jobs if (one.key, one.attempt) in jobs]
        error = append_output(self.disk, question, found)
        if error:
            self.clock.sleep(1.0)
            if error != self.log_error:
                self.log.warning("Node %s: %s", self.name, error)
        self.log_error = error
        # Of a wrong report the one before it counts, so that nothing changes.
        wrong = {(job.id, job.attempt): faults[key] for (key, _), job in jobs.items() if key in faults}
        self.reports = {**{key: one for key, one in self.reports.items() if key in wrong},
                        **{(job.id, job.attempt): replace(one, logs=(b"", b"")) for job, one in found}}
        now, former = self.clock.now(), self.faults
        self.faults = {key: (words, former[key][1] if key in former else now) for key, words in wrong.items()}
        for (job_id, _), (words, _) in self.faults.items() if self.faults.keys() - former.keys() else ():
            self.log.warning("Node %s: of job %s it answers what no nexus does: %s", self.name, job_id, words)
        with self.guard:                                    # it has these orders
            self.orders.update((key, None) for key in self.reports if key in self.orders)
            self.has_none = not any(asked.jobs for asked in (question, *self.questions))
        self.folders = {path: report.folders[path] for path in question.folders if path in report.folders}
        self.gpu_error = report.trouble
        self.clock_offset_s = report.now - self.clock.now()
        if report.gpus is not None:                         # of all other fields the head decides
            self.gpus = tuple(replace(
                gpu, node=self.name, uuid=f"{self.name}/{gpu.uuid}", is_paused=False, pause_reason=None,
                utilization_mean=None, utilization_peak=None) for gpu in report.gpus)
        if self.trouble is not None:
            self.trouble = None
            self.log.info("Node %s: connected, %s", self.name, format_count(len(self.gpus), "GPU"))
        self.service.wake()

    def lose(self, error: Exception) -> None:
        """Note that the node cannot be reached or used."""
        with self.guard:
            line, self.line = self.line, None
        if line:
            line.close()
        if self.is_ended:
            return
        if isinstance(error, (KeyError, TypeError, ValueError)):
            error = describe_bad_node(self.name, error)
        elif not isinstance(error, (OSError, NexusError)):
            self.service.fail(f"following node {self.name}", error)
        why = error if isinstance(error, NexusError) else NexusError("unavailable", f"{self.name}: {error}")
        is_news, self.trouble = self.trouble is None or self.trouble.message != why.message, why
        if is_news:
            self.log.warning("Node %s: %s", self.name, why.message)
            self.service.wake()

    def start(self, job: Job, variables: Mapping[str, str] | None) -> None:
        if job.snapshot and job.snapshot not in self.trees:     # to push it may take long
            self.unpushed.add(job, variables)
        else:
            self.send(job, variables)

    def send(self, job: Job, variables: Mapping[str, str] | None) -> None:
        """Have an attempt started.  On any error the job must not wait for ever."""
        key = job.id, job.attempt
        try:
            order: Order = self.service.starter.make_node_order(self, job, variables)
            with self.guard:
                if self.line is None:                       # it was lost since plan()
                    raise NexusError("unavailable", "it cannot be reached")
                self.orders[key] = order                    # ask_anew() sends all that start together
            self.service.wake()
        except Exception as error:
            is_lost = isinstance(error, NexusError) and error.kind == "unavailable"
            hint = f" ({error.hint})" if isinstance(error, NexusError) and error.hint else ""
            why = format_line(f"{error}{hint}", 1000)
            self.unsent[key] = make_progress(Requeue(why) if is_lost else Result(None, None, 0.0, "launch", why))
            self.service.wake()

    def list_progress(self) -> Iterator[tuple[Job, Progress]]:
        jobs, lost = self.list_jobs(), self.find_lost()
        for key in self.unsent.keys() - {(job.id, job.attempt) for job in jobs}:
            del self.unsent[key]
        for job in jobs:
            key = job.id, job.attempt
            if lost:
                yield job, Progress(result=lost, is_over=True)
            elif key in self.unsent:
                yield job, self.unsent[key]
            elif job.current.stop_cause and self.unpushed.withdraw(job):
                yield job, Progress(requeue="it was killed before it began")
            elif key in self.reports:
                yield job, self.translate(job, self.reports[key])

    def find_lost(self) -> Result | None:
        """How its jobs have ended, when it is given up."""
        trouble, limit_s = self.trouble, self.config.service.node_lost_after_seconds
        silence_s = self.clock.monotonic() - self.heard_at
        if self.given_up_by:
            return Result(None, None, None, "node-lost", f"its node {self.name} was removed by {self.given_up_by}")
        if trouble is not None and limit_s and silence_s >= limit_s:
            since = f"{self.name} could not be reached for {format_duration(silence_s)}"
            return Result(None, None, None, "node-lost", f"{since}: {trouble.message}")
        return None

    def find_fault(self) -> str | None:
        """What is wrong with its latest reply, which is taken in all the same."""
        return next((f"of job {job_id} it answers what no nexus does: {words}"
                     for (job_id, _), (words, _) in self.faults.items()), None)

    def describe_unknown(self, job: Job) -> dict[str, Any]:
        """What a job's JSON has when nothing can be known of it now."""
        words, at = self.faults.get((job.id, job.attempt), ("", 0.0))
        if self.is_unheard(job):
            return {"unknown_since": self.since}
        if words:
            return {"unknown_since": format_time(at), "notes": [
                *job.current.notes, f"{self.name} answers what no nexus does of it: {words}"]}
        return {}

    def translate(self, job: Job, report: JobReport) -> Progress:
        """What is known of a job there, with this machine's times.  It is over when all its output has arrived."""
        self.service.observer.usage[job.id] = JobUsage(report.samples, report.rss_mib)
        result, progress, age_s = report.progress.result, report.progress, find_age(job, self.clock.now())
        if result and result.finished_at:
            result = replace(result, finished_at=result.finished_at - self.clock_offset_s)
        if result and result.runtime_seconds and age_s > 0:
            result = replace(result, runtime_seconds=min(result.runtime_seconds, age_s))
        is_over = progress.is_over and report.log_sizes in (None, measure_output(self.disk, job))
        files = progress.files and f"files that it wrote are kept: {self.name}:{progress.files}"
        notes, left = (*progress.notes, *filter(None, [files])), progress.processes_left
        ran, key, now = job.current, (job.id, job.attempt), self.clock.monotonic()
        if (add_notes(ran.notes, notes), left) != (ran.notes, ran.processes_left):
            if not is_over and now < self.noted_at.get(key, float("-inf")) + NOTES_INTERVAL_S:
                notes, left = ran.notes, ran.processes_left     # else each reply could be a line of the journal
            else:
                self.noted_at[key] = now
        return replace(progress, result=result, is_over=is_over, notes=notes, processes_left=left)

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterator[Finding]:
        for job, news in list_news(self.list_progress()):
            if isinstance(news, Requeue):
                self.start_backoff.fail(self.clock.monotonic(), news.why)
                news = replace(news, why=f"{self.name}: {news.why}")
            elif isinstance(news, Result) and news.cause == "reboot":
                self.start_backoff.fail(self.clock.monotonic(), MACHINE_DOWN)
            elif isinstance(news, Result) and news.cause == "launch" and not (news.may_pass or job.current.stop_cause):
                news = self.exclude(job, news.cause_line or "it could not be started")
            yield job, news

    def exclude(self, job: Job, why: str) -> Requeue | Result:
        """What becomes of a job that cannot begin there: another machine may have what is missing."""
        elsewhere = replace(job, excluded_nodes=(*job.excluded_nodes, (self.name, why)))
        gpus = self.service.gpu_watch.see_gpus(self.store.state)
        if any(may_run_on(elsewhere, name)
               and sum(gpu.node == name and may_use(elsewhere, gpu) for gpu in gpus) >= len(list_shares(job))
               for name in ("", *self.service.pool.nodes)):
            return Requeue(f"{self.name}: {why}", elsewhere.excluded_nodes)
        return Result(None, None, 0.0, "launch", f"{self.name}: {why}")

    def ask_anew(self) -> None:
        """Ask again when the wanted jobs or directories are others than in the last question."""
        with self.guard:
            latest, is_heard = self.latest, len(self.questions) < MAX_QUESTIONS
            if self.line and latest and is_heard and (self.service.pool.list_folders(self) != latest.folders or [
                    (find_key(job), job.attempt, find_limits(job, self.config.jobs), job.current.stop_cause)
                    for job, _ in self.list_due()] != [
                    (one.key, one.attempt, one.limits, one.stop_cause) for one in latest.jobs]):
                self.ask(self.line)

    def end(self) -> None:
        self.is_ended = True
        self.follower.end()
        self.unpushed.worker.end()
        with self.guard:
            line, self.line = self.line, None
        if line:
            line.close()

    def is_unheard(self, job: Job) -> bool:
        """Whether nothing is known of a job there; of one that is to end, also while the node takes long to reply."""
        is_late = self.clock.monotonic() - self.due_at > LATE_S
        return self.trouble is not None or (job.current.stop_cause is not None and is_late)

    @property
    def since(self) -> str:
        """The time of its last reply."""
        return format_time(self.clock.now() - self.clock.monotonic() + self.heard_at) or ""

    def find_closed(self, now: float) -> str | None:
        """Why it gets no job now; None: it does."""
        if self.is_leaving:
            return f"{self.name} is being removed"
        trouble, why = self.trouble, self.find_fault() or self.start_backoff.find_why(now)
        return trouble.message if trouble else f"{self.name}: {why}" if why else None       # trouble names it


class Outcomes(Part):
    """Records what the backends report: starts, ends, requeues."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.unrecorded: dict[str, Result] = {}             # {job id: how its attempt has ended}
        self.learned: dict[str, dict[str, Any]] = {}        # {job id: what else is new of it}

    def take_news(self, job: Job, news: News) -> None:
        """Record what is new of an attempt; an end is left to record_ends_and_start().  Raises: unavailable."""
        now = self.clock.now()
        if isinstance(news, dict) and job.status == SUBMITTED and "started_at" in news:
            began = news
            self.store.update(lambda state: [change_status(state.jobs[job.id], RUNNING, now, **began)])
            self.service.starter.tell_start(self.store.state.jobs[job.id])
        elif isinstance(news, dict):
            self.learn({job.id: news}, is_synced=True)
        elif isinstance(news, Requeue):
            why, log_sizes = news.why, measure_logs(self.disk, self.layout.folder_of(job))
            facts: dict[str, Any] = {"pid": None, "pid_started": None, "log_base": log_sizes}
            if news.excluded_nodes is not None:
                facts["excluded_nodes"] = news.excluded_nodes
            self.store.update(lambda state: requeue(state, state.jobs[job.id], why, now, **facts))
            self.forget(job)
            self.service.observer.annotate(self.service.local.list_jobs())      # shows who holds the GPU
            self.service.gpu_watch.show_gpus()
            after = "" if job.current.stop_cause else " and goes back to the queue"
            self.log.warning("Job %s could not start%s: %s", job.id, after, why)
        else:
            former = self.unrecorded.get(job.id)        # as of a tick before, where the disk refused the record
            if (former and former.is_cut) or (not job.current.node and self.is_disk_full(job)):
                news = replace(news, is_cut=True)
            if news.cause == "launch" and not job.current.node:
                with contextlib.suppress(OSError):      # a late runner must find the attempt claimed
                    take_claim(self.disk, self.layout.folder_of(job), job.attempt)
            self.unrecorded[job.id] = news

    def learn(self, learned: Mapping[str, dict[str, Any]], is_synced: bool = False) -> None:
        """Record what is new of running jobs' attempts: {job id: facts}.  A job's files say it too, but not Slurm's id.

        Raises: unavailable.
        """
        self.store.update(
            lambda state: [change_attempt(state.jobs[job_id], **facts) for job_id, facts in learned.items()], is_synced)
        for job_id, facts in learned.items():
            if "stop_line" in facts:
                self.log.info("Job %s is stopped: %s", job_id, facts["stop_line"])
                self.service.wake()

    def end_attempt(self, state: State, job: Job, result: Result, evidence: Evidence, now: float) -> Changes:
        """The changes at the end of an attempt: of its job, of its dependents, of its group."""
        if job.status == SUBMITTED and result.cause == "killed":        # it was cancelled in Slurm's queue
            line = None if job.current.stop_cause else result.cause_line
            yield from end_job(state, job, CANCELLED, now, cause="killed", cause_line=line)
            return
        if job.status == SUBMITTED:             # Slurm refused it
            yield change_status(job, RUNNING, now, started_at=now)
            job = state.jobs[job.id]
        runtime_s = self.find_runtime_s(job, now) if result.runtime_seconds is None else result.runtime_seconds
        is_reboot = (job.current.stop_cause or result.cause) == "reboot"
        if is_reboot and self.config.jobs.on_reboot == "requeue":
            has_run = job.current.pid is not None
            yield change_job(job, stop_cause=None, log_base=evidence.log_sizes,
                             runtime_seconds=runtime_s if has_run else None,
                             retry_at=now + find_reboot_backoff_s(job) if has_run else None)
            why = MACHINE_DOWN if has_run else MACHINE_DOWN_EARLY
            yield from requeue(state, state.jobs[job.id], why, now, has_run)
            return
        status, facts = judge_end(job, result, evidence, runtime_s, self.config.jobs, now)
        if status == PENDING:
            yield change_status(job, PENDING, now, **facts)
            return
        yield from end_job(state, job, status, now, **facts)
        if job.group:
            group = state.groups.get(job.group) or Group(job.group)
            is_soon = runtime_s <= self.config.gpu.guard_seconds and facts["cause"] not in ("timeout", "reboot")
            last_words = " / ".join(find_cause_lines(evidence.stderr, 3)) or facts["cause_line"]
            last_words = last_words or f"{facts['cause']} {facts['exit_code']}"
            counted = count_group_end(group, status, facts["cause"], is_soon, last_words, has_pending(state, job.group))
            if counted != group:
                yield Put("groups", job.group, counted)

    def gather_evidence(self, job: Job, result: Result) -> Evidence:
        """What tells why an attempt failed, and what its processes used."""
        folder, trouble = self.layout.folder_of(job), None
        sizes = measure_logs(self.disk, folder)
        has_output = sizes[0] > job.log_base[0] or sizes[1] > job.log_base[1]
        most = TAIL_BYTES if result.exit_code and has_output else 0
        stdout, stderr = [read_tail(self.disk, os.path.join(folder, name), start, most) if most else ""
                          for name, start in zip(STREAM_FILES, job.log_base)]
        if result.is_cut:
            trouble = f"No space left on device: {job.current.node or folder} (the job's logs may be cut)"
        elif result.exit_code and not job.current.node and not is_folder(self.disk, folder):
            trouble = f"its log folder is gone: {folder}"
        last_line = self.service.log_watch.find_last_line(folder, job.log_base) if has_output else None
        samples = self.service.observer.find_usage(job.id).samples
        return Evidence(stderr, sizes, trouble, samples, stdout, last_line)

    def is_disk_full(self, job: Job) -> bool:
        with contextlib.suppress(OSError):
            return self.disk.statvfs(self.layout.folder_of(job)).f_bavail == 0
        return False

    def describe_unrecorded(self, job: Job) -> str | None:
        """How a running job has ended, while the disk refuses the record."""
        result = self.unrecorded.get(job.id)
        if result is None or self.store.last_error is None:
            return None
        how = f" ({result.cause})" if result.exit_code is None else f" with {result.exit_code}"
        return f"it has ended{how}, to be recorded when there is room"

    def keep_samples(self) -> None:
        """Record the usage of running jobs before a restart.  Raises: unavailable."""
        def keep(state: State) -> Changes:
            for job in [job for job in state.running.values() if not job.current.node]:
                yield change_attempt(job, **vars(self.service.observer.find_usage(job.id).samples))
        self.store.update(keep)

    def find_runtime_s(self, job: Job, now: float) -> float:
        """Seconds that a job has run.  The wall clock, which may have been set, is the last resort."""
        host: JobHost = self.service.local.host
        hosted = host.hosted.get(job.id)
        runtime_s = (hosted if hosted and hosted.job.attempt == job.attempt else HostedJob(host, job)).find_runtime_s()
        return max(0.0, find_age(job, now)) if runtime_s is None else runtime_s

    def forget(self, job: Job) -> None:
        """Drop what was kept for a running job."""
        for table in (self.unrecorded, self.learned, self.service.observer.usage):
            table.pop(job.id, None)
        self.service.local.host.forget(job)

    def report_end(self, before: Job, job: Job) -> None:
        """Log an end, and tell the GPU guard of it.  `before`: the job as it ran."""
        ran, done = before.current, job.attempts[-1]
        has_run_briefly = (done.runtime_seconds or 0) <= self.config.gpu.guard_seconds
        is_soon = done.cause in ("exit", "signal", "cuda-oom") and has_run_briefly
        self.service.gpu_watch.ended.append(Ended(
            ran.gpu_uuids, job.code or job.command, job.status == COMPLETED, is_soon, ran.started_at or 0.0))
        place = format_place(ran.gpu_places, ran.node)
        if job.status == COMPLETED:
            self.service.tell(before, "Job %s completed successfully%s", job.id, place)
            return
        code = f", exit code {done.exit_code}" if done.exit_code is not None else ""
        line = f" ({format_line(done.cause_line, 300)})" if done.cause_line else ""
        again = f"; {describe_next_attempt(job, self.clock.now())}" if job.status == PENDING else ""
        cause = f"signal {get_outcome(done)}" if done.cause == "signal" else done.cause
        what, how = "failed" if again else job.status, f"{cause}{code}{line}{again}"
        if done.cause in (REQUEUED, PREEMPTED) and job.status == PENDING:
            what, how = "ended", f"{done.cause_line}; it goes back to the queue"
        self.service.tell(before, "Job %s %s%s: %s", job.id, what, place, how)

    def adopt(self) -> None:
        """After a start of the service: find out what became of the jobs that are recorded as running."""
        for job in [job for job in self.service.running_jobs() if not job.current.node]:
            self.service.observer.usage[job.id] = JobUsage(Usage(*(
                getattr(job.current, name) for name in Usage.NAMES)))
        self.service.take_in(self.service.local, ())
        for job in self.service.running_jobs():
            if job.id not in self.unrecorded and not job.current.node:
                self.log.info("Job %s goes on", job.id)


class Starter(Part):
    """Starts jobs through their backends."""

    looked_at = float("-inf")                   # monotonic: when the processes of --after-pid were looked at

    def intend(self, job: Job, start: Start, now: float) -> Put:
        where: dict[str, Any] = {"nonce": self.clock.new_token()[:16]}
        cwd = self.layout.work_folder(job.id) if job.code else job.cwd
        folders = {"log_dir": self.layout.job_folder(job.id), "cwd": cwd}
        if self.service.is_slurm:
            begun = begin_attempt(job, slurm_key=self.clock.new_token()[-12:], **where)
            return change_status(begun, SUBMITTED, now, **folders)
        node = self.service.pool.nodes.get(start.node)
        hello = node.hello if node else None
        where.update(node=start.node, boot_id=hello.boot_id if hello else self.machine.boot_id)
        begun = begin_attempt(job, gpu_indices=start.gpu_indices, gpu_uuids=start.gpu_uuids,
                              gpu_slice=start.gpu_slice, started_at=now, **where)
        return change_status(begun, RUNNING, now, **folders)

    def release_waiting(self) -> None:
        """Record which processes of --after-pid have ended."""
        if self.clock.monotonic() - self.looked_at < WATCH_INTERVAL_S:
            return
        self.looked_at = self.clock.monotonic()
        for job in list(self.store.state.pending.values()):
            pid, started, boot_id = job.after_process or (0, 0, "")
            if pid and not (boot_id == self.machine.boot_id and self.machine.processes.is_alive(pid, started)):
                self.service.record(job, after_process=None)
                self.log.info("Job %s: process %d has ended, after which it was to start", job.id, pid)

    def start(self, job: Job, variables: Mapping[str, str] | None) -> None:
        """Start a job whose intent is on disk.  After a crash before its claim, the next service requeues it."""
        try:
            self.make_room(job)
            backend = next((one for one in self.service.backends if one.has(job)), self.service.local)
            news = backend.start(job, variables)
        except (OSError, NexusError) as error:
            news = self.service.local.host.fail(job, error)
        except Exception as error:
            hosted = self.service.local.host.hosted.get(job.id)
            if not hosted or hosted.launched_at is None:
                why = format_line(describe_exception(error), 300)
                self.service.outcomes.take_news(job, Result(None, None, 0.0, "launch", why))
            raise
        if news:
            self.service.outcomes.take_news(job, news)
        elif job.status == RUNNING:                         # Slurm starts the others
            self.tell_start(job)

    def tell_start(self, job: Job) -> None:
        """Log a start."""
        ran = job.current
        place = format_place(ran.gpu_places, ran.slurm_node or ran.node) or " on the CPU"
        slurm = f" as Slurm's {ran.slurm_id}" if ran.slurm_id else ""
        self.service.tell(job, "Started job %s%s%s: %s", job.id, slurm, place, format_line(job.command, 500))

    def make_room(self, job: Job) -> None:
        """Make the folder of a job's logs; what a forgotten job has left there is moved aside.  Raises: OSError."""
        folder = self.layout.folder_of(job)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return self.disk.mkdir(folder)
        if job.attempt == 1 and find_status(self.disk, folder, is_followed=False):
            aside = f"{folder}.old-{self.clock.new_token()[:8]}"
            self.disk.replace(folder, aside)
            self.log.info("Job %s: what was in %s is kept as %s", job.id, folder, aside)
        self.disk.makedirs(folder)

    def make_order(self, job: Job, variables: Mapping[str, str] | None) -> Order:
        """What a machine needs to start it.  Raises: OSError; forbidden, when it may not run any more; not_found."""
        code = None
        if job.code:
            code = read_bytes(self.disk, self.layout.code_file(job.code)).decode("utf-8", "surrogateescape")
        if variables is None:
            raise NexusError("not_found", "its environment was lost with a damaged state file; add the job again")
        return Order(*self.service.scripts.restrain(job, variables), code)

    def make_node_order(self, node: Node, job: Job, variables: Mapping[str, str] | None) -> Order:
        """make_order() with places, GPUs and limits as they are on the node."""
        order = self.make_order(job, variables)
        job = order.job
        cwd = "" if job.cwd == os.path.expanduser("~") else job.cwd
        if job.snapshot and job.snapshot_repo:
            if job.snapshot not in node.trees:
                name = hash_text(f"{self.store.service_id} {job.snapshot_repo}")[:16]
                node.trees[job.snapshot] = push_snapshot(
                    node.ssh, job.snapshot_repo, job.snapshot, name, self.environ)
            tree = node.trees[job.snapshot]
            cwd = os.path.normpath(os.path.join(tree, os.path.relpath(job.cwd, job.snapshot_repo)))
            job = replace(job, snapshot_repo=tree)
        uuids = tuple(uuid.partition("/")[2] for uuid in job.current.gpu_uuids)
        job = replace(job, cwd=cwd, status_history=(), attempts=(replace(job.current, gpu_uuids=uuids),))
        # Whoever sent a script gave no environment: it would be this service's.
        return Order(job, {} if job.code else order.variables, order.code)


class NodePool(Part):
    """The other machines: one Node for each in State, in the order in which they were added."""

    def __init__(self, service: Service) -> None:
        import threading
        super().__init__(service)
        self.nodes: Mapping[str, Node] = {}                 # replaced as a whole: other threads iterate over it
        self.waiting: Sequence[Job] = ()                    # the first pending jobs that need a directory
        self.lock = threading.RLock()                       # held by those who check a node and then change it

    def set_node(self, name: str, known: KnownNode | None) -> None:
        """Record a node, and keep a Node for it; None: forget it.  Raises: unavailable."""
        with self.lock:
            self.store.update(lambda state: [Put("nodes", name, known)] if state.nodes.get(name) != known else [])
            node = self.nodes.get(name)
            if node and (known is None or node.is_ended or node.address != known.config):
                node.end()
                node = None
            if known:
                node = node or Node(self.service, known.config, known.is_leaving)
                node.is_leaving = known.is_leaving
            self.nodes = {key: one for key, one in {**self.nodes, name: node}.items() if one}

    def begin_nodes(self) -> None:
        """Connect to all nodes.  One with running jobs stays as it was until they end, whatever config.toml says."""
        busy = {job.current.node for job in self.service.running_jobs() if job.current.node}
        configured = {node.name: node for node in self.config.nodes}
        kept = dict(self.store.state.nodes)
        for name, known in kept.items():
            if name in configured and name in busy and is_elsewhere_now(known.config, configured[name]):
                self.log.error("Node %s is %s in config.toml, but jobs run on %s: when they have ended, nexus restart",
                               name, configured.pop(name).destination, known.config.destination)
        for name, config in configured.items():
            self.set_node(name, KnownNode(config, was_configured=True))
        for name, known in kept.items():
            if name not in configured:                      # was_configured: it has been removed from config.toml
                is_gone = known.was_configured and name not in busy
                kept_node = replace(known, is_leaving=known.is_leaving or known.was_configured)
                self.set_node(name, None if is_gone else kept_node)

    def add_node(self, config: NodeConfig, who: str) -> None:
        """Add a node, or reconnect to a known one.  Raises: conflict, unavailable."""
        if self.service.is_slurm:
            raise NexusError("conflict", 'jobs run under Slurm here (launcher = "slurm"), which chooses their machines',
                             hint="[jobs] launcher: nexus config edit")
        if config.name == self.service.node:
            raise NexusError("conflict", f"{config.name} is this machine's name", hint="choose another: --name n1")
        with self.lock:
            former = self.nodes.get(config.name)
            is_configured = any(node.name == config.name for node in self.config.nodes)
            if former and is_configured and former.address != config:
                raise NexusError("conflict", f"{config.name} has another address in config.toml",
                                 hint="nexus config edit, then nexus restart")
            if former and is_elsewhere_now(former.address, config) and any(
                    job.current.node == config.name for job in self.service.running_jobs()):
                raise NexusError("conflict",
                                 f"{config.name} is another machine, {former.address.destination}, where jobs run",
                                 hint="choose another name: --name n1")
            self.set_node(config.name, KnownNode(config, was_configured=is_configured))
            node = self.nodes[config.name]
            node.given_up_by = ""
            node.follower.wanted.set()
        self.log.info("Node %s (%s) added by %s", config.name, config.destination, who)
        self.service.wake()

    def remove_node(self, name: str, is_forced: bool, who: str) -> None:
        """Forget a node when its jobs have ended; `is_forced`: now, with its jobs.  Raises: not_found, conflict."""
        with self.lock:
            node = self.find_node(name)
            if any(other.name == name for other in self.config.nodes):
                raise NexusError("conflict", f"{name} is in config.toml", hint="remove it there, then nexus restart")
            self.set_node(name, KnownNode(node.address, is_leaving=True))
            node.given_up_by = who if is_forced else ""
        self.log.info("Node %s is being removed by %s", name, who)
        self.service.wake()

    def find_node(self, name: str) -> Node:
        """Raises: not_found."""
        nodes = self.nodes
        if name not in nodes:
            raise NexusError("not_found", f"there is no node '{format_line(name, 60)}'",
                             hint=suggest(name, nodes) or "nexus node list")
        return nodes[name]

    def view_nodes(self) -> list[NodeView]:
        """The nodes for plan()."""
        now, home = self.clock.monotonic(), os.path.expanduser("~")
        return [NodeView(node.name, node.hello.cpu_slots if node.hello else 0, node.find_closed(now),
                         frozenset([home, *(path for path, is_there in node.folders.items() if is_there)]))
                for node in self.nodes.values()]

    def list_nodes(self) -> list[dict[str, Any]]:
        """GET /nodes: this machine, then the others."""
        jobs = [job.current.node for job in self.service.running_jobs()]

        def describe(node: Node | None) -> dict[str, Any]:
            name, gpus = (node.name, node.gpus) if node else ("", self.service.gpu_watch.gpus)
            address, hello, trouble = (node.address, node.hello, node.trouble) if node else (None,) * 3
            why = trouble.message if trouble else self.service.observer.observation.error if node is None else (
                node.find_fault() or node.gpu_error or node.start_backoff.find_why(self.clock.monotonic()))
            return {"name": name or self.service.node, "gpus": len(gpus),
                    "gpu_names": sorted({gpu.name for gpu in gpus}), "running_jobs": jobs.count(name),
                    **{key: getattr(address, key, None) or None for key in ("host", "port", "jump", "identity_file")},
                    **{key: getattr(hello, key, None) for key in ("python", "path", "screen")},
                    "user": node.address.user or None if node else self.service.user,
                    "is_reachable": trouble is None, "is_leaving": bool(node and node.is_leaving),
                    "trouble": why or None, "hint": trouble.hint if trouble else None,
                    "unknown_since": node.since if node and trouble else None}

        return [describe(node) for node in (None, *self.nodes.values())]

    def take_stock(self) -> None:
        """Have each node told what is wanted there now; forget a leaving node when nothing runs there."""
        home = os.path.expanduser("~")
        pending = sorted(self.store.state.pending.values(), key=lambda job: job.queue_key) if self.nodes else []
        self.waiting = [job for job in pending[:MAX_FOLDERS] if needs_folder(job) and job.cwd != home]
        for node in list(self.nodes.values()):
            self.service.run_guarded(f"asking node {node.name}", node.ask_anew)
            is_told = node.trouble is not None or node.has_none
            if node.is_leaving and is_told and not node.list_jobs():
                with self.lock:
                    if node.is_leaving and self.nodes.get(node.name) is node:   # it was not added again
                        self.set_node(node.name, None)
                        self.log.info("Node %s is removed", node.name)

    def list_folders(self, node: Node) -> tuple[str, ...]:
        """The directories of the pending jobs that may run on a node: it is told of no others."""
        return tuple(dict.fromkeys(job.cwd for job in self.waiting if may_run_on(job, node.name)))

    def number_nodes(self) -> dict[str | None, int]:
        """{machine: its number in /api}; this one is 0."""
        return {name: number for number, name in enumerate((self.service.node, *self.nodes))}


MAX_FOLDERS = 1000              # of how many of the first pending jobs nodes are asked for their directories


def check_node(node: Node, now: float) -> tuple[bool, str]:
    """(whether a node is healthy, its description).  `now`: monotonic.  A short silence is healthy."""
    silence_s, trouble = now - node.heard_at, node.trouble
    if trouble:
        return silence_s < NODE_ALARM_S, f"not heard for {format_duration(silence_s)}: {trouble.message}"
    faults = [f"GPU {gpu.local_place}: {gpu.fault}" for gpu in node.gpus if gpu.fault]
    faults += [node.gpu_error] if node.gpu_error and node.gpus else []
    faults += filter(None, [node.find_fault()])
    return not faults, join_some(faults, 3, "; ") or format_count(len(node.gpus), "GPU")


def is_elsewhere_now(known: NodeConfig, config: NodeConfig) -> bool:
    """Whether the name belongs to another machine in `config`."""
    return (known.destination, known.port) != (config.destination, config.port)


# ==== 14. SERVICE ==== observe, plan, carry out; admission, adoption, what is kept and shown
# One loop.  The FIFO (a job started or ended), requests, and timeouts wake it.  Each tick polls the backends, which end
# the jobs that must stop, records in one transaction which jobs ended and which start next, then starts them.
# A separate thread reads the GPUs and passes the readings to the loop.

LOADS_S = 3600.0                # how long GPUs' utilization is kept
DISK_INTERVAL_S = 5.0           # between two disk checks
ESTIMATE_INTERVAL_S = 3.0       # estimates are made anew at the earliest after this
ESTIMATE_BACKOFF_FACTOR = 100   # and after so many times what it took, which may be 0.5 s
MAX_ESTIMATE_PAUSE_S = 60.0     # but after this
JOBS_A_PIECE = 200              # of a list that is streamed
HEALTH_INTERVAL_S = 5.0         # between two checks for on_unhealthy
HOOK_TIMEOUT_S = 60.0           # of one [hooks] command
MAX_HOOK_TEXT = 32000           # characters of a variable
MAX_FAULTS_LOGGED = 20          # each time the jobs file is read


class JobsFile:
    """Queues the jobs of the jobs file whenever the file changes."""

    def __init__(self, service: Service, path: str) -> None:
        self.service, self.path = service, os.path.abspath(os.path.expanduser(path))
        self.faults: list[str] = []
        self.stamp: tuple[int, ...] | None = None
        self.worker = Worker(service, "reading the jobs file", self.watch)

    def watch(self) -> float:
        """Read the file; return the seconds until the next call."""
        before, self.stamp = self.stamp, stamp_of(self.service.disk, self.path)
        self.load(self.stamp == before)
        return self.service.config.jobs.jobs_file_interval_seconds

    def load(self, is_whole: bool) -> None:
        """Queue new rows of the jobs file; log new faults.  `is_whole`: nobody is writing the file now."""
        try:
            text = read_text(self.service.disk, self.path)
            rows, faults = parse_jobs_file((text or "") + "\n" * is_whole)      # its last line may lack the newline
            faults += [f"there is no file {self.path}"] if text is None else []
            faults += self.submit_rows(rows, is_whole and bool(text))       # empty: a program may be about to write it
        except NexusError as error:
            faults = [error.message]
        for fault in list_some([fault for fault in faults if fault not in self.faults], MAX_FAULTS_LOGGED):
            self.service.log.warning("%s: %s", self.path, fault)
        self.faults = faults

    def submit_rows(self, rows: Sequence[JobsRow], is_whole: bool) -> list[str]:
        """Queue rows with new content; if the file `is_whole`, forget rows that are gone.  Return the faults."""
        from collections import Counter
        digests, faults = [hash_text(row.content)[:16] for row in rows], list[str]()
        counts, caller = Counter(digests), replace(self.service.owner, name="the jobs file")
        before = self.service.store.state.seen
        # A row that was removed from the file counts as new when it comes back.
        seen = {digest: min(count, counts[digest]) if is_whole else count for digest, count in before.items()}
        for digest, row in dict(zip(digests, rows)).items():
            if counts[digest] > seen.get(digest, 0):
                try:
                    self.service.admission.submit([self.make_asked(row)], caller)
                    seen[digest] = counts[digest]
                except NexusError as error:
                    faults.append(f"line {row.line}, '{format_line(row.script, 100)}': {error.message}")
        if seen != before:
            self.service.store.update(lambda state: [
                Put("seen", digest, count or None) for digest, count in seen.items() if count != before.get(digest)])
        return faults

    def make_asked(self, row: JobsRow) -> Asked:
        script, is_adding = os.path.expanduser(row.script), self.service.config.jobs.cuda_arg == "add"
        program = "bash" if script.endswith(".sh") else "python" if row.conda else find_python(self.service.environ)
        command = check(COMMAND, " ".join(filter(None, [program, quote(script), row.arguments])), "the command")
        cuda_arg = is_adding or bool(re.search(CUDA_OPTION, command))
        return Asked({"command": command, "cwd": os.path.dirname(self.path), "priority": row.priority,
                      "conda": row.conda, "gpu_ids": row.gpu_ids, "cuda_arg": cuda_arg}, unique=True)


def find_llm_share(disk: Disk, path: str, model: str) -> float:
    """Return the GPUs for a job of `model` (llm_config.json).  Raises: usage, when the file is wrong; unavailable."""
    path = os.path.abspath(os.path.expanduser(path))
    text = read_text(disk, path)
    if text is None:
        refuse(f"llm_config {path} is not there", "nexus config edit")
    try:
        found = check(LLM_CONFIG, parse_json(text, "this file"), "")
    except NexusError as error:
        example = '{"default_requirement": 1.0, "models": {"qwen2.5-7b-inst": 0.5}}'
        raise NexusError("usage", f"{path}: {error.message}", example) from None
    return round_gpus(found.get("models", {}).get(model, found.get("default_requirement", 1)))


class Hooks:
    """Runs the [hooks] commands in a thread; on_finish at least once for each job: State notes for which it is due."""

    def __init__(self, service: Service) -> None:
        import collections
        self.service, self.config = service, service.config.hooks
        self.is_healthy, self.looked_at = True, float("-inf")
        self.due: collections.deque[tuple[str, Job]] = collections.deque()      # (hook, job; State may lack it)
        self.worker = Worker(service, "running hooks", self.look)

    def begin(self) -> None:
        """Record whether on_finish is configured, and queue the jobs for which a former service has not run it."""
        has_hook, store = bool(self.config.on_finish), self.service.store
        if store.state.has_hook != has_hook:
            store.update(lambda state: [Put("facts", "has_hook", has_hook)])
        self.note_status_changes(list_finished(store.state))

    def note_status_changes(self, jobs: Iterable[Job]) -> None:
        """Queue on_finish for those jobs that have ended."""
        self.queue("on_finish", [job for job in jobs if job.is_hook_due])

    def queue(self, name: str, jobs: Iterable[Job]) -> None:
        """Run a hook for each of these jobs, if it is configured."""
        if getattr(self.config, name):
            self.due.extend((name, job) for job in jobs)
            self.worker.wanted.set()

    def look(self) -> float | None:
        """Run the hooks that are due; return the seconds until the next call, or None to wait for `wanted`."""
        self.look_at_health()
        if not self.due:
            return WATCH_INTERVAL_S if self.config.on_unhealthy else None
        name, job = self.due.popleft()
        last = job.current
        self.call(name, {
            "NEXUS_JOB_ID": job.id, "NEXUS_JOB_STATUS": job.status, "NEXUS_JOB_CAUSE": last.cause or "",
            "NEXUS_JOB_EXIT_CODE": "" if last.exit_code is None else str(last.exit_code),
            "NEXUS_JOB_COMMAND": job.command, "NEXUS_JOB_GPU": ",".join(last.gpu_places)})
        if job.is_hook_due:
            self.service.store.update(
                lambda state: [change_job(state.jobs[job.id], is_hook_due=False)] if job.id in state.jobs else [])
        return 0.0

    def look_at_health(self) -> None:
        service, now = self.service, self.service.clock.monotonic()
        is_due = now - self.looked_at >= HEALTH_INTERVAL_S and service.gpu_watch.first_probe.is_set()
        if not self.config.on_unhealthy or not is_due:
            return
        self.looked_at, health = now, service.health.check()
        if health["is_healthy"] != self.is_healthy:
            self.is_healthy = health["is_healthy"]
            bad = [f"{check['name']}: {check['reading']}" for check in health["checks"] if not check["is_ok"]]
            self.call("on_unhealthy", {
                "NEXUS_HEALTH": "HEALTHY" if self.is_healthy else "UNHEALTHY", "NEXUS_HEALTH_REASON": "; ".join(bad)})

    def call(self, name: str, variables: Mapping[str, str]) -> None:
        """Run one hook, with these variables cut to a size that exec() accepts in any encoding."""
        environ = {**self.service.environ, **{key: text[:MAX_HOOK_TEXT] for key, text in variables.items()}}
        command = f"umask {self.service.umask:03o}\n{getattr(self.config, name)}"
        try:
            done = run(["/bin/sh", "-c", command], HOOK_TIMEOUT_S, environ)
            error = f"exit code {done.exit_code}: {format_line(done.output.strip()[-200:])}" if done.exit_code else ""
        except (NexusError, ValueError) as failure:
            error = str(failure)
        if error:
            self.service.log.warning("%s: %s", name, error)


class Caller(Value):
    """The user or program that sent a request."""
    user: str                   # may see and change this user's jobs
    name: str                   # for the log: also says how the caller was identified
    is_owner: bool = True       # owns the service: may do everything
    sha256: str | None = None   # of the user's token

    def may_see(self, user: str) -> bool:
        return self.is_owner or user == self.user

    def show(self, user: str, job: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a user's job, as the caller may see it."""
        return job if self.may_see(user) else hide_private(job, PUBLIC_JOB_KEYS)


class Choice(Value):
    """Selects jobs: those in `ids`, or else all that match the other fields."""
    ids: Sequence[str] = ()
    status: Sequence[str] = ()
    group: str | None = None
    user: str | None = None
    name: str | None = None
    text: str | None = None                     # part of any text of the job; ignores case

    def fits(self, job: Job) -> bool:
        """Whether a job matches; the caller has checked ids and status."""
        last = job.current
        texts = (job.id, job.name, job.command, job.user, job.group, job.cwd, last.node, last.slurm_node,
                 last.cause, last.cause_line)
        return (self.group in (None, job.group or "") and self.user in (None, job.user)
                and self.name in (None, job.name or "")
                and (not self.text or self.text.lower() in "\n".join(filter(None, texts)).lower()))

    def select_for(self, caller: Caller, jobs: Iterable[Job]) -> list[Job]:
        """The jobs that match.  A choice by group, name or text would reveal what is private of others' jobs."""
        is_public = (self.group, self.name, self.text) == (None,) * 3
        return [job for job in jobs if (is_public or caller.may_see(job.user)) and self.fits(job)]


# Every caller may read these fields, so every caller may sort by them.
SORTED_BY = ("created_at", "started_at", "finished_at", "runtime_seconds", "gpus", "user")


def sort_jobs(jobs: Sequence[Job], by: str) -> list[Job]:
    """Sort by a field of SORTED_BY; `-field` puts the highest first.  Jobs without a value come last."""
    name = by.lstrip("-")
    pairs = [(job, getattr(job if hasattr(job, name) else job.current, name)) for job in jobs]
    with_value = [pair for pair in pairs if pair[1] is not None]
    with_value.sort(key=lambda pair: (pair[1], pair[0].number), reverse=name != by)
    return [job for job, _ in with_value] + [job for job, value in pairs if value is None]


class Added(Value):
    """The result of a submission."""
    ids: tuple[str, ...]                        # one for each submitted job
    known: tuple[str, ...] = ()                 # the ids that existed before
    jobs: Sequence[Job] = ()                    # the new jobs


class DryRun(Exception):
    """Aborts the transaction of a dry run.  Its argument: the Added that a real submission would return."""


class ScriptRules(Part):
    """Enforces allowed_script_paths: a job is a script below one of these folders, with the owner's variables."""

    def is_bound(self, job: Job) -> bool:
        """Whether the rules hold for a job's environment and directory: not for the owner's."""
        return bool(self.config.jobs.allowed_script_paths) and job.user != self.service.user

    def check_path(self, path: str) -> None:
        """Raises: forbidden, when a real path is not in an allowed folder, or where users' files lie."""
        allowed = [os.path.realpath(os.path.expanduser(folder)) for folder in self.config.jobs.allowed_script_paths]
        own = list(map(os.path.realpath, (self.layout.home, self.layout.log_dir, self.layout.code_folder)))
        above = [folder for folder in (*own, *allowed) if f"{path}/".startswith(folder.rstrip("/") + "/")]
        why = (f"not below {' or '.join(allowed)}" if not set(allowed).intersection(above) else
               "in a folder of nexus" if max(above, key=len) in own else "")
        if why:
            raise NexusError("forbidden", f"{format_line(path, 200)} may not be used here: it is {why}",
                             "[jobs] allowed_script_paths says what may; the job's directory must be there too")

    def find_folder(self, command: str) -> str:
        """Where a job runs that does not say: at home; if it must be a script, beside that.  Raises: forbidden."""
        script = parse_script(command)[1] if self.config.jobs.allowed_script_paths else ""
        return os.path.dirname(script) if script.startswith("/") else os.path.expanduser("~")

    def find_script(self, job: Job) -> tuple[str, list[str]]:
        """(interpreter or "", [resolved script, *arguments]); ("", []) if all may run.  Raises: forbidden."""
        if not self.config.jobs.allowed_script_paths:
            return "", []
        if job.conda or job.snapshot or job.code:
            what = "conda" if job.conda else "snapshot" if job.snapshot else "code"
            raise NexusError("forbidden", f"{what} may not be given: only some scripts may run here",
                             "[jobs] allowed_script_paths says which")
        interpreter, script, arguments = parse_script(job.command)
        path = os.path.realpath(os.path.join(job.cwd, script))
        self.check_path(path)
        if self.is_bound(job):          # a version manager runs what a file in the directory says
            self.check_path(os.path.realpath(job.cwd))
        return interpreter, [path, *arguments]

    def restrain(self, job: Job, variables: Mapping[str, str]) -> tuple[Job, Mapping[str, str]]:
        """A job, and its variables, as allowed_script_paths permits at its start.  Raises: forbidden.

        All words are quoted: the shell only executes them.  A user's umask could let others change the files that a
        script writes (such as .pyc).  The real directory: a link may lead elsewhere by now.
        """
        interpreter, words = self.find_script(job)
        if words:
            if not os.path.isfile(words[0]):
                raise NexusError("forbidden", f"{words[0]} is not a file")
            head = read_part(self.disk, words[0], 0, 256)
            if not interpreter and not re.match(rb"\x7fELF|#![ \t]*/", head):     # bash runs it
                raise NexusError("forbidden", f"{words[0]} cannot be run by itself: it does not begin with #!/",
                                 hint="give it a first line like #!/bin/sh, and chmod +x; or name its interpreter")
            job = replace(job, command=" ".join(map(quote, [*filter(None, [interpreter]), *words])))
        if not self.is_bound(job):
            return job, variables
        bound = replace(job, umask=self.service.umask | 0o022, cwd=os.path.realpath(job.cwd), variables=())
        return bound, self.environ


class Drafts(Part):
    """Makes jobs of what was asked, and refuses those that no machine can ever run."""

    @property
    def defaults(self) -> dict[str, Any]:
        """What the configuration says of a job that does not."""
        return {"retries": self.config.jobs.retries, "gpus": self.config.jobs.default_gpus}

    def make(self, submissions: Sequence[Asked], user: str) -> list[tuple[Job, Mapping[str, str], Asked]]:
        """A job for each submission, without place and id, with its environment.  Raises: usage, forbidden."""
        environments: dict[object, tuple[str, Mapping[str, str]]] = {}          # many jobs share one
        drafts = []
        for asked in submissions:
            source = id(asked.environment), id(asked.env)
            if source not in environments:
                base = self.environ if asked.environment is None else asked.environment
                environments[source] = self.make_environment(base, asked.env)
                self.check_bash(environments[source][1])
            digest, variables = environments[source]
            drafts.append((self.make_job(asked, user, digest), variables, asked))
        jobs = [job for job, _, _ in drafts]
        self.check_folders(jobs)
        self.check_ever_run(jobs)
        self.check_commands(jobs)
        return drafts

    def make_job(self, asked: Asked, user: str, digest: str) -> Job:
        config, fields = self.config.jobs, asked.job
        machines = [self.service.node, *self.service.pool.nodes]
        if asked.node is not None and asked.node not in machines:
            refuse(f"there is no node {asked.node}", suggest(asked.node, machines) or "nexus node list")
        if asked.llm and not config.llm_config:
            refuse(f"llm {format_line(asked.llm, 40)}: [jobs] llm_config is not set",
                   "set [jobs] llm_config in config.toml")
        defaults = {"id": "", **self.defaults, "cwd": self.service.scripts.find_folder(fields["command"])}
        named = re.search(LLM_OPTION, fields["command"])
        model = asked.llm or (named and named[1])
        if config.llm_config and model and "gpus" not in fields:
            defaults["gpus"] = find_llm_share(self.disk, config.llm_config, model)
        begin_at = parse_begin(asked.begin, self.clock.now()) if asked.begin else None
        waited = self.machine.processes.find(asked.after_pid) if asked.after_pid else None
        if asked.after_pid and not waited:
            refuse(f"there is no process {asked.after_pid} on {self.service.node}, or it cannot be seen",
                   hint="it has ended? then leave --after-pid out")
        env_digest = hash_text(json.dumps(asked.env, sort_keys=True))[:16] if asked.env else None
        job = Job(**{**defaults, **fields}, user=user, created_at=0.0, queue_key=(), environment=digest,
                  begin_at=begin_at, env_digest=env_digest,
                  after_process=(waited.pid, waited.started, self.machine.boot_id) if waited else None,
                  only_node="" if asked.node == self.service.node else asked.node)
        self.check_job(job)
        return job

    def check_job(self, job: Job) -> None:
        """Raises: usage, forbidden."""
        check_gpus(job)
        if re.fullmatch(GPU_PLACE, job.name or ""):
            refuse(f"the name {job.name} would be taken for a GPU", hint="begin it with a letter, like --name run-1")
        limit_s = find_limits(job, self.config.jobs).timeout_seconds
        if job.warn and limit_s <= parse_duration(job.warn.partition("@")[2]):
            refuse(f"warn {job.warn} needs a longer time limit, and this job "
                   f"{'is stopped after ' + format_duration(limit_s) if limit_s else 'has none'}",
                   hint="set one: --timeout TIME")
        if job.cuda_arg and not re.search(CUDA_OPTION, job.command) and re.search(SHELL_CHARACTERS, job.command):
            refuse("cuda_arg: cannot tell where --cuda belongs in this command",
                   hint="write it there: python train.py --cuda 0 | tee log")
        self.service.scripts.find_script(job)

    def check_folders(self, jobs: Iterable[Job]) -> None:
        """Raises: usage, when the directory of a job is not there that can only run on this machine."""
        is_alone = not self.service.pool.nodes
        if not self.service.is_slurm:           # Slurm's machines are not known
            for folder in {job.cwd: None for job in jobs if needs_folder(job) and (
                    job.only_node == "" or (is_alone and job.only_node is None))}:
                check_directory(self.disk, "cwd", folder)

    def check_bash(self, variables: Mapping[str, str]) -> None:
        """Raises: usage, where no job with this environment can start.  Of other machines that is not known."""
        if self.service.is_slurm or self.service.pool.nodes:
            return
        if not self.service.machine.has_bash():
            raise NexusError("unavailable", NO_BASH, NO_BASH_HINT)
        path = variables.get("PATH") or os.defpath
        if not find_program("bash", path):
            refuse(f"bash was not found on the job's PATH, and runs each command: {format_line(path, 300)}",
                   "add its folder to PATH (type bash shows it)")

    def check_commands(self, jobs: Iterable[Job]) -> None:
        """Raises: usage, for a command that is cut off in quotes."""
        if self.config.jobs.allowed_script_paths:           # check_job() has read them all
            return
        unclear = [command for command in {job.command: None for job in jobs}
                   if command.count('"') % 2 or command.count("'") % 2]
        for command in unclear[:MAX_PARSED]:                # bash decides: it may be valid, for example in a comment
            check_command(command)

    def make_change(self, jobs: Iterable[Job], change: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """The fields of Job for a `change` (None: the default), checked for each job.  Raises: usage, forbidden."""
        check_priority(change.get("priority"), caller)
        drafted = {name: self.defaults.get(name, JOB_FIELDS[name].default) if value is None else value
                   for name, value in change.items() if name != "begin"}
        if "begin" in change:
            drafted["begin_at"] = change["begin"] and parse_begin(change["begin"], self.clock.now())
        changed = {(request_class(job), job.command): replace(job, **drafted) for job in jobs if drafted}.values()
        for job in changed:
            self.check_job(job)
        self.check_ever_run(changed)
        self.check_commands(changed)
        return drafted

    def check_ever_run(self, jobs: Collection[Job]) -> None:
        """Raises: usage, when no machine can ever run one of these jobs."""
        if not self.service.is_slurm and any(job.gpus for job in jobs):
            self.service.gpu_watch.first_probe.wait(2.0)
        for job in {request_class(job): job for job in jobs}.values():      # once for all jobs with the same request
            self.check_ever_runs(job)

    def check_ever_runs(self, job: Job) -> None:
        """Raises: usage, when no machine can ever run the job.  A job passes while a machine's GPUs are unknown."""
        if self.service.is_slurm and (obstacle := find_slurm_obstacle(job)):
            refuse(f"the job {obstacle.detail}", "[jobs] launcher is \"slurm\"; the kind of GPU is chosen by "
                   "--gpu-type, or by [slurm] partition and extra_args")
        if self.service.is_slurm or not job.gpus:
            return
        own = tuple(gpu for gpu in self.service.observer.observation.gpus if not is_left_out(gpu, self.config.gpu))
        machines = {"": own, **{name: node.gpus for name, node in self.service.pool.nodes.items()}}
        machines = {name: gpus for name, gpus in machines.items() if job.only_node in (None, name)}
        if any(not gpus if name else self.service.observer.observation.error for name, gpus in machines.items()):
            return                              # the GPUs of one machine are unknown now
        if never := find_never(job, machines):
            refuse(f"the job {never.detail}",
                   NEVER_HINTS[never.subject] + self.service.gpu_watch.describe_limit("; the service "))

    def make_environment(self, base: Mapping[str, str], added: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """Return (digest, variables) of an environment with further variables.  Raises: usage."""
        own = {name: text for name, text in added.items() if not is_job_variable(name)}
        variables = {**list_inherited(base), **own}
        text = json.dumps(variables, sort_keys=True)
        if len(text) > 1024 * 1024:
            refuse("the environment is larger than 1 MiB", hint="unset what the job does not need")
        return hash_text(text)[:32], variables


class Admission(Part):
    """Does what requests ask for.  `who`: the caller's name for the log; a `caller` may use only its own jobs."""

    def submit(self, submissions: Sequence[Asked], caller: Caller, key: str | None = None,
               is_dry: bool = False) -> Added:
        """Queue jobs, all or none; a dry run changes nothing.  A `key` used before returns the earlier jobs."""
        if key and caller.user != self.service.user:
            key = f"{caller.user} {key}"
        if sum(not asked.unique for asked in submissions) > self.config.jobs.queue_limit:
            raise NexusError("queue_full", f"{len(submissions)} jobs are more than the queue takes: queue_limit is "
                             f"{self.config.jobs.queue_limit}", hint="raise [jobs] queue_limit")
        for asked in submissions:
            check_priority(asked.job.get("priority"), caller)
            self.check_env(asked.env or asked.job.get("variables"), caller)
        drafts, now = self.service.drafts.make(submissions, caller.user), self.clock.now()
        ids, known, new_jobs = list[str](), list[str](), list[Job]()

        def add(state: State) -> Changes:
            earlier = [job for job in state.jobs.values() if job.key == key] if key else []
            if earlier:
                return Added(tuple(job.id for job in sorted(earlier, key=lambda job: job.number)))
            check_link_count(state, [job for job, _, _ in drafts])
            compared = state.jobs.values() if any(asked.unique for asked in submissions) else ()
            contents = {content_of(job): job.id for job in compared if job.status not in (FAILED, CANCELLED)}
            for drafted, variables, asked in drafts:
                job_id = contents.get(content_of(drafted)) if asked.unique else None
                if job_id:
                    known.append(job_id)
                else:
                    job = yield from self.add_job(state, drafted, caller, now, variables, asked.max_concurrent, key=key)
                    job_id = contents[content_of(job)] = job.id
                    new_jobs.append(state.jobs[job_id])
                ids.append(job_id)
            added = Added(tuple(ids), tuple(known), new_jobs)
            if is_dry:
                raise DryRun(added)
            return added

        try:
            added: Added = self.store.update(add)
        except DryRun as tried:
            added, new_jobs = tried.args[0], []
        if new_jobs:
            self.log.info("Job %s added by %s: %s", join_some([job.id for job in new_jobs]), caller.name,
                          format_line(new_jobs[0].command, 300))
            self.service.wake()
        return added

    def check_env(self, env: object, caller: Caller) -> None:
        """Raises: forbidden."""
        if env and self.config.jobs.allowed_script_paths and not caller.is_owner:
            raise NexusError("forbidden", "env may not be given: only some scripts may run here",
                             "give it as an argument: python train.py --seed 1")

    def add_job(self, state: State, job: Job, caller: Caller, now: float, variables: Mapping[str, str] | None = None,
                limit: int | None = None, **facts: Any) -> Changes:
        """Queue a job.  `variables`: None: State has them; `limit`: its group's.

        Raises: queue_full, not_found, forbidden.
        """
        config = self.config.jobs
        if len(state.pending) >= config.queue_limit:
            raise NexusError("queue_full", f"the queue is full: {len(state.pending)} jobs are pending, queue_limit is "
                             f"{config.queue_limit}", hint="wait for some to end, or raise [jobs] queue_limit")
        check_own_group(state, job.group, caller)
        links = find_links(state, job, caller)
        if job.environment not in state.environments and variables is not None:
            yield Put("environments", job.environment, variables)
        group = state.groups.get(job.group or "")
        if job.group and limit and (group is None or group.limit != limit):
            yield Put("groups", job.group, replace(group or Group(job.group), limit=limit))
        job_id = self.clock.new_job_id(state.jobs)
        job = replace(job, id=job_id, cwd=self.layout.work_folder(job_id) if job.code else job.cwd, created_at=now,
                      status_history=((PENDING, now),), **{**links, **next_place(state, job.priority), **facts})
        yield from add_job(job)
        if lost := find_lost_parent(state, job):
            yield from end_job(state, job, CANCELLED, now, cause="dependency", cause_line=describe_parent(lost))
        return job

    def cancel(self, choice: Choice, caller: Caller, signal: str | None = None) -> list[Job]:
        """Remove pending jobs from the queue and stop running jobs; return the jobs that end, as they are then.

        Finished jobs are skipped.  All named ones must have `choice.status`.  Raises: not_found, forbidden, conflict.
        """
        now = self.clock.now()

        def find(state: State) -> list[Job]:
            jobs = choose_jobs(state, choice, caller, (PENDING, RUNNING))
            left = [job for job in jobs if job.status not in FINAL]
            if choice.ids and choice.status:
                for job in jobs if len(jobs) == 1 else left:
                    check_status(job, choice.status, "nothing was done to the others" if len(jobs) > 1 else "", {
                        PENDING: f"take it out of the queue: nexus remove {job.id}",
                        RUNNING: f"stop it: nexus kill {job.id}"})
            if signal and any(job.current.slurm_id for job in left):
                raise NexusError("conflict", "Slurm sends its own signals to the jobs that it runs",
                                 "leave the signal out")
            return left

        # Only when nothing speaks against it: a job whose attempt is claimed here does not run any more.
        withdrawn = {job.current.slurm_key for job in find(self.store.state)
                     if job.status == SUBMITTED and job.current.slurm_id
                     and take_slurm_claim(self.disk, job, self.layout.folder_of(job)) == OUR_CLAIM}

        def stop(state: State) -> Changes:
            left, over = find(state), list[str]()
            for job_id in [job.id for job in left]:
                job = state.jobs[job_id]                            # a job before it may have ended it too
                if job.status == PENDING or job.current.slurm_key in withdrawn:
                    over += yield from end_branch(state, job, CANCELLED, now, cause="killed", stop_by=caller.name)
                elif job.status not in FINAL and job.current.stop_cause != "killed":    # killed means no retry
                    yield change_job(job, stop_cause="killed", stop_by=caller.name, stop_line=None, stop_signal=signal)
            yield from release_dependents(state, over)
            return [state.jobs[job.id] for job in left]

        ended: list[Job] = self.store.update(stop)
        if ended:
            self.log.info("Job %s: stopped by %s", join_some([job.id for job in ended]), caller.name)
            self.service.wake()
        return ended

    def retry(self, choice: Choice, caller: Caller, change: Mapping[str, Any] = {}) -> list[str]:
        """Queue finished jobs again as new ones, all or none, with a `change` by the keys of CHANGES; return their ids.

        A new job depends on the latest retries of the old job's parents.  Without ids, those are retried that failed,
        or lost a parent, or have the status given, and were not retried yet.
        Raises: usage, not_found, forbidden, conflict, queue_full.
        """
        now = self.clock.now()

        def find(state: State) -> list[Job]:
            jobs = choose_jobs(state, choice, caller, FINAL)
            return jobs if choice.ids else [job for job in jobs if job.status in FINAL and not job.retried_as and (
                choice.status or job.status == FAILED or job.current.cause == "dependency")]

        def add(state: State) -> Changes:
            new_ids, jobs, latest = list[str](), find(state), dict[str, str]()
            check_link_count(state, jobs)
            for job in jobs:
                check_status(job, FINAL, "only a finished one can be run again")
                check_status(job, choice.status or FINAL, "nothing was done")
                after, after_any = (
                    tuple(dict.fromkeys(find_retried(state, one, latest) for one in parents if one in state.jobs))
                    for parents in (job.after, job.after_any))
                after = tuple(parent for parent in after if state.jobs[parent].status not in (FAILED, CANCELLED))
                # check_priority(): only the owner may give a priority above normal.
                priority = job.priority if caller.is_owner else max(job.priority, PRIORITIES["normal"])
                fields = {name: getattr(job, name) for name in KEPT}
                again = Job(**{**fields, "after": after, "after_any": after_any, "priority": priority, **change},
                            id="", created_at=now, queue_key=())
                new = yield from self.add_job(state, again, caller, now)
                yield change_job(job, retried_as=new.id)
                new_ids.append(new.id)
            return new_ids

        earlier = find(self.store.state)
        self.service.drafts.check_folders(earlier)
        change = self.service.drafts.make_change(earlier, change, caller)
        new_ids: list[str] = self.store.update(add)
        if new_ids:
            self.log.info("Job %s added by %s, as retries", join_some(new_ids), caller.name)
            self.service.wake()
        return new_ids

    def edit(self, told: str, caller: Caller, position: int | None = None, **change: Any) -> Job:
        """Change a job that has not ended, by the keys of EDITS.  Raises: usage, not_found, forbidden, conflict."""
        asked = {*change, *([] if position is None else ["position"])}
        statuses = (PENDING, RUNNING) if asked <= {*LIVE_CHANGES} else (PENDING,)
        job_id, env = find_own_job(self.store.state, told, caller, statuses).id, change.pop("env", None)
        self.check_env(env, caller)
        change = self.service.drafts.make_change([self.store.state.jobs[job_id]], change, caller)
        if position is not None and not caller.is_owner:
            raise NexusError("forbidden", f"only {self.service.user} may move a job ahead of other users' jobs",
                             hint="a priority may be given")

        def edit(state: State) -> Changes:
            job = find_own_job(state, job_id, caller)
            if "is_held" in asked and job.status == RUNNING:
                raise NexusError("conflict", f"job {job.id} runs, and running jobs cannot be suspended", hint=(
                    f"nexus cancel {job.id} ends it, and nexus retry {job.id} runs it again later; nexus pause keeps "
                    "others from starting"))
            check_status(job, statuses, "only a pending one can be changed so",
                         {RUNNING: f"a running one takes {LIVE_FLAGS}"})
            if job.current.slurm_key is not None and not asked <= {"name", "group", "retries"}:
                there = job.current.slurm_id or "one that is just being submitted"
                raise NexusError("conflict", f"Slurm has job {job.id} as {there}, and orders it among its own",
                                 "there: scontrol update, or top; [slurm] max_submitted says how many it gets at once")
            facts = dict(change)
            if change.get("group") != job.group:
                check_own_group(state, change.get("group"), caller)
            if "after" in change or "after_any" in change:
                links = {name: change.get(name, [one for one in getattr(job, name) if one in state.jobs])
                         for name in ("after", "after_any")}        # a former one may be forgotten by now
                check_link_count(state, [replace(job, **links)])
                facts.update(find_links(state, replace(job, **links), caller))
                check_links(state, replace(job, **facts))
            if env is not None:
                base = state.environments.get(job.environment, {})
                facts["environment"], variables = self.service.drafts.make_environment(base, env)
                facts["variables"] = tuple(pair for pair in job.variables if pair[0] not in env)
                yield Put("environments", facts["environment"], variables)
            if facts:
                check_gpus(replace(job, **facts))           # another request may have changed the job
                place = {"queue_key": (0, change["priority"], job.number)} if "priority" in change else {}
                yield change_job(job, **facts, **place)
            if position is not None:
                yield move_job(state, state.jobs[job.id], position == 0)

        changes = {**change, **({} if position is None else {"position": position}),
                   **({} if env is None else {"env": sorted(env)})}
        self.service.change(edit, "Job %s changed by %s: %s", job_id, caller.name,
                            format_line(encode_json(changes), 300))
        return self.store.state.jobs[job_id]

    def set_paused(self, is_paused: bool, who: str, name: str | None = None) -> None:
        """Pause or resume the queue, or one group.  Raises: not_found."""
        def change(state: State) -> Changes:
            if name is None:
                yield from pause_queue(is_paused)
                return
            check_group(state, name)
            group = state.groups.get(name) or Group(name)
            why = f"paused by {who} (nexus resume --group {name})" if is_paused else None
            yield Put("groups", name, replace(
                group, hold=why, is_paused=is_paused, failures=0 if group.hold and not is_paused else group.failures))

        what = f"Group {name}" if name else "Queue"
        self.service.change(change, "%s %s by %s", what, "paused" if is_paused else "resumed", who)
        self.store.checkpoint_wanted.set()                  # other programs read and edit state.json


IDLE_LOAD = 5.0                 # a GPU whose utilization is below so many percent is idle


class GpuWatch(Part):
    """All GPUs as the scheduler sees them, and why they get no jobs now."""

    def __init__(self, service: Service) -> None:
        import collections
        import threading
        super().__init__(service)
        self.observer: Observer = service.observer
        self.first_probe = threading.Event()
        self.gpus: tuple[Gpu, ...] = ()                     # of this machine
        self.ended: collections.deque[Ended] = collections.deque(maxlen=500)    # attempts, the latest last
        self.host = measure_host(None)
        self.loads: Mapping[str, Sequence[tuple[float, float]]] = {}    # {GPU uuid: (monotonic, percent), last hour}
        # {uuid of an idle GPU: since when, UTC; since when and when last seen so, monotonic}
        self.idle: Mapping[str, tuple[float, float, float]] = {}
        self.looked_at = float("-inf")                      # monotonic: when jobs were looked at for that

    def probe(self) -> float:
        """Read the GPUs once; return the seconds until the next time."""
        pause_s: float = self.observer.probe(bool(self.service.pool.nodes))         # a head may have no GPU
        self.service.wake()
        return pause_s

    def set_gpu_paused(self, place: str, is_paused: bool, who: str) -> None:
        """Pause or resume a GPU, or all slices of a card, also of a node.  Raises: not_found."""
        self.first_probe.wait(FIRST_LOOK_S)
        place = place.removeprefix(f"{self.service.node}:")
        gpus = find_gpus(self.all_gpus(), place)
        if ":" in place:
            self.service.pool.find_node(place.partition(":")[0])
        if not gpus:
            raise NexusError("not_found", f"there is no GPU {place}", "nexus shows them")
        uuids = [gpu.uuid for gpu in gpus]

        def pause(state: State) -> Changes:
            others = tuple(other for other in state.paused_gpus if other not in uuids)
            yield from pause_gpus(state, (*others, *uuids) if is_paused else others)

        self.service.change(pause, "GPU %s %s by %s", format_indices(gpu.place for gpu in gpus),
                            "paused" if is_paused else "resumed", who)
        if not is_paused:
            for uuid in uuids:
                self.ended.append(Ended((uuid,), "", False, False, self.clock.now()))     # resets the guard's count
        self.store.checkpoint_wanted.set()

    def take_in_observation(self) -> None:
        """Take the latest reading of the GPUs, and show it to the scheduler."""
        latest, before = self.observer.latest, self.observer.observation
        if latest is before:
            return
        self.observer.take_in(self.service.local.list_jobs())
        self.show_gpus()
        self.note_loads()
        if (latest.error != before.error or len(latest.gpus) != len(before.gpus)) and not self.service.is_slurm:
            if latest.error:
                self.log.error("GPUs: %s", latest.error)
            else:
                self.log.info("Found %s%s", format_count(len(latest.gpus), "GPU"), self.describe_limit("; nexus "))
        for gpu in latest.gpus:
            if gpu.fault and gpu.fault not in [old.fault for old in before.gpus if old.uuid == gpu.uuid]:
                self.log.error("GPU %s: %s", gpu.place, gpu.fault)
        self.first_probe.set()
        if [gpu.uuid for gpu in latest.gpus] != [gpu.uuid for gpu in before.gpus]:
            # GPU indices that were written while the GPUs were unknown
            self.service.housekeeping.apply_edit({"paused_gpus": self.store.state.paused_gpus})
        self.host = measure_host(self.machine.psutil)

    def show_gpus(self) -> None:
        """Take over the GPUs with their users, and add their mean and peak load."""
        self.gpus = tuple(map(self.add_load, self.observer.gpus))

    def add_load(self, gpu: Gpu) -> Gpu:
        loads = [percent for _, percent in self.loads.get(gpu.uuid, ())]
        return replace(gpu, utilization_mean=sum(loads) / len(loads) if loads else None,
                       utilization_peak=max(loads, default=None))

    def note_loads(self) -> None:
        """Add each GPU's utilization; drop what is over an hour old, and GPUs that are gone."""
        now = self.clock.monotonic()
        self.loads = {gpu.uuid: [
            *(load for load in self.loads.get(gpu.uuid, ()) if now - load[0] < LOADS_S),
            *([] if gpu.utilization is None else [(now, gpu.utilization)])] for gpu in self.all_gpus()}
        unread = {name for name, node in self.service.pool.nodes.items() if node.trouble}
        if self.observer.find_gpu_error():
            unread.add("")
        self.idle = {gpu.uuid: (*self.idle.get(gpu.uuid, (self.clock.now(), now))[:2], now) for gpu in self.all_gpus()
                     if gpu.utilization is not None and gpu.utilization < IDLE_LOAD and gpu.node not in unread}

    def find_idle(self, job: Job) -> tuple[float, float]:
        """(since when, UTC; for how many seconds) all GPUs of a running job are known to be idle."""
        spans = [self.idle[uuid] for uuid in job.current.gpu_uuids if uuid in self.idle]
        if not spans or len(spans) < len(job.current.gpu_uuids):
            return 0.0, 0.0
        began = self.clock.monotonic() - self.service.outcomes.find_runtime_s(job, self.clock.now())
        since = max(began, *(since for _, since, _ in spans))
        return (max(job.current.started_at or 0.0, *(at for at, _, _ in spans)),
                max(0.0, min(last for _, _, last in spans) - since))

    def find_idle_since(self, job: Job) -> float | None:
        """Since when a job has been idle; None: it is not, or not for idle_minutes."""
        (since, idle_s), limit_s = self.find_idle(job), self.config.jobs.idle_minutes * 60
        return since if limit_s and idle_s >= limit_s else None

    def look_for_idle_jobs(self) -> None:
        """Tell of jobs that have been idle for idle_minutes, and stop those that were for idle_kill_minutes."""
        if self.clock.monotonic() - self.looked_at < WATCH_INTERVAL_S:
            return
        self.looked_at = self.clock.monotonic()
        for job in self.service.running_jobs():
            _, idle_s = self.find_idle(job)
            if self.find_idle_since(job) is not None and not job.current.is_idle_told:
                self.service.record(job, is_idle_told=True)
                self.service.tell(job, "Job %s is idle: its GPUs did nothing for %s.  Does it wait for an answer? "
                                  "nexus attach %s", job.id, format_duration(idle_s), job.id)
                self.service.hooks.queue("on_idle", [job])
            stop = find_stop(find_limits(job, self.config.jobs), Use(idle_s=idle_s))
            if stop and not job.current.stop_cause:
                self.service.record(job, stop_cause=stop[0], stop_line=stop[1])

    def describe_limit(self, before: str = "") -> str:
        """Return `before` and which GPUs the service uses, or "" if it may use all."""
        gpus = self.observer.observation.gpus
        if not any(gpu.is_withheld for gpu in gpus):
            return ""
        used, visible = sum(not is_left_out(gpu, self.config.gpu) for gpu in gpus), self.service.visible_devices or ""
        return f"{before}uses {used} of {len(gpus)} GPUs (CUDA_VISIBLE_DEVICES={format_line(visible, 60)})"

    def find_gpu_error(self) -> str | None:
        """Return why jobs get no GPU now, or None."""
        if self.service.cluster and self.service.is_slurm:
            return self.service.cluster.find_trouble()
        return self.observer.find_error()

    def all_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs of this machine, then of the nodes."""
        others = [gpu for node in self.service.pool.nodes.values() for gpu in node.gpus]
        return (*self.gpus, *map(self.add_load, others))

    def see_gpus(self, state: State) -> list[Gpu]:
        """Return all_gpus() with `is_paused` as in `state`."""
        reasons, paused = dict(state.pause_reasons), state.paused_gpus
        return [replace(gpu, is_paused=True, pause_reason=reasons.get(gpu.uuid)) if gpu.uuid in paused else gpu
                for gpu in self.all_gpus()]

    def guard_gpu(self, uuid: str) -> None:
        """Pause a GPU where jobs fail that run well elsewhere; never the last usable GPU."""
        reason = find_bad_gpu(tuple(self.ended), uuid, self.config.gpu)

        def pause(state: State) -> Changes:
            others = [find_gpu_reason(gpu, self.config.gpu) for gpu in self.see_gpus(state) if gpu.uuid != uuid]
            is_last = not any(why is None or why.code == "resources" for why in others)
            if is_last or uuid in state.paused_gpus:
                return False
            yield from pause_gpus(state, (*state.paused_gpus, uuid), (uuid, reason or ""))
            return True

        if reason and self.store.update(pause):
            place = next((gpu.place for gpu in self.all_gpus() if gpu.uuid == uuid), uuid)
            self.log.error("GPU %s is paused: %s; nexus resume %s clears it", place, reason, place)
            self.service.wake()


def find_gpus(gpus: Iterable[Gpu], place: str) -> list[Gpu]:
    """The GPU of a place like `0`, `0.1` or `n1:0`, or all slices of that card."""
    node, _, name = place.rpartition(":")
    return [gpu for gpu in gpus if gpu.node == node and gpu.is_named((name,))]


def pause_gpus(state: State, uuids: Sequence[str], *reasons: tuple[str, str]) -> Changes:
    """Yield the changes that make these the paused GPUs.  `reasons`: (uuid, why nexus itself pauses it)."""
    yield Put("facts", "paused_gpus", tuple(uuids))
    kept = [pair for pair in state.pause_reasons if pair[0] in uuids]
    yield Put("facts", "pause_reasons", (*kept, *reasons))


class Housekeeping(Part):
    """Keeps the disk in order: forgets finished jobs with their files, keeps sent scripts, writes state.json."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.unwritten: list[Callable[[], None]] = []       # what writes each file that the disk refused
        self.refusal: NexusError | None = None              # why it did
        self.usage_day = ""                                 # in which age_usage() was done last

    def write_soon(self, write: Callable[[], None]) -> None:
        """Call `write`, and while it raises `unavailable` call it again: a full disk keeps no service from its jobs."""
        self.unwritten.append(write)
        self.write_rest()

    def write_rest(self) -> None:
        refusal = None
        for write in list(self.unwritten):
            try:
                write()
                self.unwritten.remove(write)
            except NexusError as error:
                refusal = error
        if refusal and not self.refusal:
            self.log.error("%s: it is tried again", refusal.message)
        self.refusal = refusal

    def clear(self, choice: Choice, caller: Caller) -> list[str]:
        """Forget finished jobs, with their logs; return their ids.  Raises: usage; as choose_jobs(); unavailable."""
        if not set(choice.status or FINAL) <= set(FINAL):
            refuse(f"only finished jobs can be cleared: {', '.join(FINAL)}", "nexus cancel ends jobs that wait or run")

        jobs = choose_jobs(self.store.state, choice, caller, FINAL)
        for job in jobs if choice.ids else ():
            check_status(job, choice.status or FINAL, "nothing was cleared")
        gone = [job for job in jobs if job.status in FINAL]
        self.remove(gone, f"as {caller.name} asked")
        return [job.id for job in gone]

    def trim_history(self) -> float:
        """Remove the finished jobs beyond history_limit; return the seconds until the next call."""
        limit = self.config.state.history_limit
        gone = choose_trimmed(self.store.state, limit)
        now = self.clock.now()
        with contextlib.suppress(NexusError):               # the disk is full; starting a job reports it
            self.remove(gone, f"beyond history_limit = {limit}")
            if self.usage_day != (today := find_day(now)):
                self.store.update(lambda state: age_usage(state, now))
                self.usage_day = today
        return WATCH_INTERVAL_S

    def remove(self, gone: Sequence[Job], why: str) -> None:
        """Forget finished jobs, with their logs, but not what they used.  Raises: unavailable.

        Logs go before State: if the service dies between, the next service still knows the jobs.
        """
        if not gone:
            return
        now = self.clock.now()

        def forget(state: State) -> Changes:
            # Another request may have removed one meanwhile, and a new job may have its id.
            known = [(state.jobs.get(job.id), job.number) for job in gone]
            return forget_jobs(state, [job for job, number in known if job and job.number == number], now)

        for job in gone:
            if job.log_dir:
                self.service.run_guarded(f"After job {job.id}", remove_job_files, self.disk, self.layout.log_dir,
                                         job.log_dir)
        self.store.update(forget)
        for code in {job.code for job in gone if job.code}:
            self.service.run_guarded(f"After script {code}", self.drop_code, code)
        for repository, snapshot in {(job.snapshot_repo, job.snapshot) for job in gone if job.snapshot}:
            self.service.run_guarded(f"After snapshot {snapshot}", self.drop_snapshot, repository, snapshot)
        self.log.info("Trimmed %s %s, with their logs: %s", format_count(len(gone), "job"), why,
                      join_some([job.id for job in gone]))

    def drop_snapshot(self, repository: str | None, snapshot: str) -> None:
        """Let go of a snapshot unless a job has it."""
        if repository and not any(job.snapshot == snapshot for job in self.store.state.jobs.values()):
            release_snapshot(repository, snapshot, self.environ)

    @contextlib.contextmanager
    def keep_code(self, name: str, code: bytes | None) -> Iterator[None]:
        """Write a submitted script, if any, before its job is queued; remove it if no job needs it in the end."""
        try:
            if code is not None:
                make_folder(self.disk, self.layout.code_folder)
                write_atomic(self.disk, self.layout.code_file(name), [code.decode("utf-8", "surrogateescape")])
            yield
        finally:
            if code is not None:
                self.drop_code(name)

    def drop_code(self, name: str) -> None:
        """Remove a submitted script unless a job has it: also a retry of the job that it came with."""
        if not any(job.code == name for job in self.store.state.jobs.values()):
            remove_file(self.disk, self.layout.code_file(name))

    # state.json

    def keep_state(self) -> float:
        """Apply edits of state.json; write it when the journal has grown.  Return the seconds until the next call."""
        self.write_rest()
        try:
            if self.store.unsettled:
                self.store.settle()
            self.store.look_for_edit(self.apply_edit)
            if self.store.checkpoint_wanted.is_set() and not self.store.bad_edits:
                self.store.checkpoint_wanted.clear()
                self.store.save_checkpoint()
            return WATCH_INTERVAL_S
        except (OSError, NexusError) as error:
            self.log.warning("state.json could not be written (%s); the journal goes on", error)
            self.store.checkpoint_wanted.set()
            return 10.0

    def apply_edit(self, edit: Mapping[str, Any]) -> None:
        """Apply an edit of state.json.  `paused`: bool; `paused_gpus`: places or uuids of GPUs.  Ignores the rest."""
        is_paused, listed = edit.get("paused"), edit.get("paused_gpus")

        def change(state: State) -> Changes:
            before = state.paused, state.paused_gpus
            if isinstance(is_paused, bool):
                yield from pause_queue(is_paused)
            if isinstance(listed, tuple):
                gpus = self.service.gpu_watch.all_gpus()
                known = {*(gpu.uuid for gpu in gpus), *state.paused_gpus}   # a card that was paused may come back
                named = dict.fromkeys(uuid for item in map(str, listed)
                                      for uuid in [gpu.uuid for gpu in find_gpus(gpus, item)] or [item])
                yield from pause_gpus(state, [uuid for uuid in named if uuid in known or not gpus])
            return before != (state.paused, state.paused_gpus)

        if self.store.update(change):
            self.log.info("Taken over from state.json: %s", format_line(encode_json(edit), 300))
            self.service.wake()


class LogWatch(Part):
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

    def look(self) -> float | None:
        began, running = self.clock.monotonic(), self.service.running_jobs()
        folders = {job.log_dir for job in running if job.log_dir}
        for folder in [folder for folder in self.growths if folder not in folders]:
            self.growths[folder].note(self.clock)
            self.growths.pop(folder).write()
        for folder in folders:
            self.growths.setdefault(folder, LogGrowth(self.disk, folder)).note(self.clock)
        # A job that starts during this look wakes the worker only if `growths` is empty: so check for jobs last.
        is_on = folders or self.service.running_jobs()
        return max(LOG_LOOK_S, LOG_LOOK_BACKOFF_FACTOR * (self.clock.monotonic() - began)) if is_on else None


LOG_LOOK_S, LOG_LOOK_BACKOFF_FACTOR = 0.1, 20   # between two looks; at least this multiple of the time of one
LAST_LINE_BYTES = 4096          # of a log's end, where its last line is looked for
LOG_NOTE_S = 1.0                # between two notes while only one of the two logs grows


class LogGrowth:
    """How the two logs of one job grow."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk, self.folder = disk, folder
        self.written: LogMark = (0.0, 0, 0)
        self.seen: LogMark = (0.0, 0, 0)
        self.written_at = self.seen_at = float("-inf")      # monotonic: when these two were measured
        self.growing = (False, False)

    def find_last_line(self, starts: Sequence[int]) -> str | None:
        """The last line from these sizes on, of the log that grew last if that has one."""
        paths, sizes = [os.path.join(self.folder, name) for name in STREAM_FILES], measure_logs(self.disk, self.folder)
        growing = self.growing if sizes == self.seen[1:] else (sizes[0] > self.seen[1], sizes[1] > self.seen[2])
        out_at, err_at = [read_changed_at(self.disk, path) for path in paths] if all(growing) else (0, 0)
        is_stderr = growing[1] and (not growing[0] or err_at > out_at)
        texts = (read_tail(self.disk, paths[stream], starts[stream], LAST_LINE_BYTES)
                 for stream in (is_stderr, not is_stderr))
        return next((line for text in texts for line in find_last_lines(text, 1)), None)

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


class Health(Part):
    """Says what does not work, and what the owner can do."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.look_at_disks()

    def check(self) -> dict[str, Any]:
        """GET /health."""
        checks = [dict(zip(("name", "is_ok", "reading"), check)) for check in self.list_checks()]
        return {"is_healthy": all(check["is_ok"] for check in checks), "checks": checks}

    def list_checks(self) -> Iterator[tuple[str, bool, str, str]]:
        """Yield (name, is_ok, reading, hint for GET /status) of each check."""
        service, watch, observation = self.service, self.service.gpu_watch, self.service.observer.observation
        now, leases, file = self.clock.monotonic(), self.machine.leases, service.jobs_file
        yield "scheduler", now - service.turned_at < 30, f"last turn {now - service.turned_at:.1f} s ago", ""
        last = f", the last: {service.last_failure}" if service.last_failure else ""
        is_past = not service.failure_count or now - service.failed_at > 300
        yield "failures", is_past, f"{service.failure_count} internal errors{last}", ""
        if not service.is_slurm:
            source, out = self.machine.gpu_source, " (if it was taken out: nexus restart)"
            faulty = [f"GPU {gpu.place}: {gpu.fault}{out if gpu.fault == source.not_shown else ''}"
                      for gpu in watch.gpus if gpu.fault and not is_left_out(gpu, self.config.gpu)]
            fault, limit = service.observer.find_gpu_error() or "; ".join(faulty), watch.describe_limit()
            is_slow = observation.took_s > SMI_SLOW_S
            hint = observation.hint if observation.error else source.slow_hint if is_slow else ""
            asked = f"{format_count(len(watch.gpus), 'GPU')}, asked in {observation.took_s:.2f} s"
            yield "GPUs", not fault, (limit and f"{limit}; ") + (fault or asked), hint
            if not self.machine.has_bash():
                yield "bash", False, NO_BASH, f"{NO_BASH}: {NO_BASH_HINT}"
        if leases:
            error = service.observer.find_lease_error()
            yield "GPU leases", not error, f"{error.message}; {error.hint}" if error else f"in {leases.folder}", ""
        if service.former_python:
            reading = f"{sys.executable} runs the service, since {service.former_python} cannot any more"
            yield "Python", True, reading, f"{reading}: nexus restart takes the Python that it is called with"
        error = self.store.last_error
        hint = f"{error.message}: nothing new is accepted or started until there is room" if error else ""
        yield "state", not error, error.message if error else "written", hint
        refusal = service.housekeeping.refusal
        if refusal:
            yield "files", False, refusal.message, f"{refusal.message}: it is written when there is room"
        damaged = ", ".join(self.store.list_damaged())
        if damaged:
            yield ("lost", False,
                   f"the unreadable part of the state is kept in {damaged}: look at it, and move it away", "")
        damage = self.store.state.damage
        if damage:
            paused = f"the queue is paused, as a start did not find the state whole: {damage}"
            yield "damage", False, f"{paused}; nexus resume goes on", f"{paused}: see nexus health, then nexus resume"
        if service.cluster:
            error = service.cluster.find_error()
            reading = error.message if error else f"asked in {service.cluster.took_s:.2f} s"
            yield "Slurm", not error, reading, error.hint if error else ""
        for node in service.pool.nodes.values():
            if not node.is_leaving:
                yield (f"node {node.name}", *check_node(node, now), "")
        if file:
            faults = join_some(file.faults, 3, "; ")
            yield ("jobs file", bool(find_status(self.disk, file.path)), faults or f"{file.path} is watched",
                   faults and f"{file.path}: {faults}")
        silent_s = now - self.disks_seen_at
        if silent_s > 6 * DISK_INTERVAL_S:
            yield "disks", False, f"they have not answered for {format_duration(silent_s)}", ""
        yield from self.disks

    def look_at_disks(self) -> float:
        """Check the disks; in a thread of its own, so that a hanging disk blocks no request."""
        checks = []
        for name, folder in (("state disk", self.layout.journal_dir), ("log disk", self.layout.log_dir)):
            try:
                status = self.disk.statvfs(folder if is_folder(self.disk, folder) else self.layout.home)
                free_mib = status.f_bavail * status.f_frsize / 2**20
                checks.append((name, free_mib > 1, f"{format_memory(free_mib)} free", ""))
            except OSError as error:
                checks.append((name, False, str(error), ""))
        self.disks: Sequence[tuple[str, bool, str, str]] = checks
        self.disks_seen_at = self.clock.monotonic()
        return DISK_INTERVAL_S

    def list_hints(self) -> list[str]:
        """Return what the owner should know or do, one line each."""
        machine, jobs = self.machine, self.config.jobs
        hints = [
            *(hint for *_, hint in self.list_checks()),
            "these GPUs are made up; for the real ones: nexus restart, without NEXUS_MOCK_GPUS"
            if machine.is_mock else "",
            f"{machine.no_screen_reason}: jobs run directly, without attach "
            f"({advise_on_screen(machine.no_screen_reason)})" if (
                machine.no_screen_reason and jobs.launcher == "screen") else ""]
        return [hint for hint in hints if hint]


class Views(Part):
    """Makes the answers to GET requests."""

    def __init__(self, service: Service) -> None:
        import threading
        super().__init__(service)
        self.estimates: Mapping[str, float] = {}            # {pending job: when it will start}
        self.estimated: tuple[Any, ...] = ()                # what they were made of, as find_estimated() has it
        self.estimates_until = float("-inf")                # monotonic: before that they are not made again
        self.estimates_lock = threading.Lock()
        self.texts = {is_public: JobTexts(is_public) for is_public in (False, True)}
        self.texts_lock = threading.Lock()

    def status(self) -> dict[str, Any]:
        """GET /status."""
        version, state = self.store.version, self.store.state       # in this order: a version is never too new
        watch, cluster = self.service.gpu_watch, self.service.cluster
        return {
            "state_version": version, "gpu_status": self.list_gpus(state), "is_paused": state.paused,
            "queued_jobs": len(state.pending),
            "queued_by_priority": {name: len(state.prioritized.get(name, ())) for name in PRIORITIES},
            **{f"{word}_jobs": len(state.ended.get(word, ())) for word in FINAL},
            "running_jobs": self.describe_jobs(list(state.running.values())), **self.info(),
            "no_screen": self.machine.no_screen_reason,     # why jobs here have no terminal to attach to
            "gpu_trouble": self.service.observer.find_gpu_error(), "slurm": cluster.describe() if cluster else None,
            "hints": [*self.service.health.list_hints(), *list(list_holds(state).values())[:3]],
            "bad_checks": [check["name"] for check in self.service.health.check()["checks"] if not check["is_ok"]],
            "host": {"name": self.service.node, **watch.host},
            "nodes": self.service.pool.list_nodes() if self.service.pool.nodes else []}

    def status_for(self, caller: Caller) -> dict[str, Any]:
        """GET /status, as the caller may see it."""
        status = {**self.status(), "is_owner": caller.is_owner}
        if not caller.is_owner:
            status.update(
                home=None, hints=[], nodes=[hide_private(node, PUBLIC_NODE_KEYS) for node in status["nodes"]],
                running_jobs=[caller.show(job["user"], job) for job in status["running_jobs"]])
        return status

    def list_gpus(self, state: State) -> list[dict[str, Any]]:
        """Return the GPUs of all machines, for the API."""
        now, nodes, shown = self.clock.monotonic(), self.service.pool.nodes, []
        closed = {node.name: node.find_closed(now) for node in nodes.values()}
        for gpu in self.service.gpu_watch.see_gpus(state):
            why = closed.get(gpu.node) if gpu.node else self.service.observer.observation.error
            is_unread = bool(why) and (not gpu.node or nodes[gpu.node].trouble is not None)
            if gpu.node and is_unread:                  # its last readings are too old
                gpu = forget_readings(gpu)
            shown.append(gpu_json(gpu, state, self.config.gpu, why if is_unread else None,
                                  gpu.node or self.service.node, None if is_unread else why))
        return shown

    def find_place(self, job: Job) -> str | None:
        """Return the machine that a job ran on, runs on, or must run on; None if it may still be any."""
        if job.current.slurm_node:
            return job.current.slurm_node
        has_begun = job.status == RUNNING or (job.status in FINAL and job.current.started_at is not None)
        name = job.current.node if has_begun or not self.service.pool.nodes else job.only_node
        return None if name is None else name or self.service.node

    def describe_jobs(self, jobs: Sequence[Job], fields: Sequence[str] = (),
                      describe: Callable[[Job], dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return jobs for the API, with these fields; none named: with all.  `describe`: of make_describe()."""
        now = self.clock.now()
        describe = describe or self.make_describe(jobs, fields)
        shown = []
        for job in jobs:
            known = self.measure_running(job, now) if job.status == RUNNING else describe(job)
            node = self.find_place(job)
            shown.append(pick_json(job, now, node, fields, **known) if fields else job_json(job, now, node, **known))
        return shown

    def encode_jobs(self, caller: Caller, jobs: Sequence[Job], fields: Sequence[str],
                    rename: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[bytes]:
        """Yield the JSON of a list of jobs, as the caller may see it."""
        describe, most = self.make_describe(jobs, fields), 2 * len(self.store.state.jobs)
        for at in range(0, len(jobs), JOBS_A_PIECE):
            texts, part = [], jobs[at:at + JOBS_A_PIECE]
            if fields:
                texts = [encode_json(rename(caller.show(job.user, row)))
                         for job, row in zip(part, self.describe_jobs(part, fields, describe))]
            for job in part if not fields else ():
                if job.status in LIVE:                  # it changes all the time
                    texts.append(encode_json(caller.show(job.user, self.describe_jobs([job], (), describe)[0])))
                    continue
                planned = {**describe(job), **place_json(job, self.find_place(job))}
                with self.texts_lock:
                    texts.append(self.texts[not caller.may_see(job.user)].format(job, planned, most))
            yield (("," if at else "[") + ",".join(texts)).encode()
        yield b"]\n" if jobs else b"[]\n"

    def make_describe(self, jobs: Sequence[Job], fields: Sequence[str] = ()) -> Callable[[Job], dict[str, Any]]:
        """Make what returns what of these jobs depends on the queue and the plan, as far as it is asked for."""
        now, state = self.clock.now(), self.store.state
        pending = [job for job in jobs if job.shown_status == PENDING]
        wanted = {*(fields or QUEUE_KEYS)}
        estimates = self.find_estimates() if pending and "estimated_start" in wanted else {}
        positions = self.find_positions(state, pending) if pending and "position" in wanted else {}
        has_reasons, planned = not wanted.isdisjoint(QUEUE_KEYS[1:]), self.find_plan(state)

        def describe(job: Job) -> dict[str, Any]:
            known: dict[str, Any] = {**dict.fromkeys(QUEUE_KEYS), "position": positions.get(job.id)}
            if job.shown_status == PENDING and has_reasons:
                reasons, start = self.list_reasons(job, state, planned), estimates.get(job.id)
                if start is None and reasons[0].code == "begin-time":
                    start = now + find_delay_s(job, now)
                known.update(waiting_for=format_reasons(reasons), reason=reason_json(reasons[0]),
                             estimated_start=format_time(start))
            return known

        return describe

    def find_positions(self, state: State, jobs: Sequence[Job]) -> Mapping[str, int]:
        """{id: how many are before it} of pending jobs."""
        queue = PendingQueue(state)
        if len(jobs) * len(state.queued) > len(state.pending) / 4:      # all of them together are quicker
            return {job.id: position for position, job in enumerate(queue.walk(state.queued))}
        return {job.id: queue.find_position(state.pending[job.id]) for job in jobs if job.id in state.pending}

    def measure_running(self, job: Job, now: float) -> dict[str, Any]:
        """Return what a running job uses, and its run time, by their keys in its JSON."""
        usage, node = self.service.observer.find_usage(job.id), self.service.pool.nodes.get(job.current.node)
        return {
            **{name: round_known(number) for name, number in vars(usage.samples).items()},
            "rss_mib": round_known(usage.rss_mib), "cpu_percent": round_known(usage.cpu_percent),
            "runtime_seconds": round(self.service.outcomes.find_runtime_s(job, now), 3),
            **(node.describe_unknown(job) if node else {}),
            "idle_since": format_time(self.service.gpu_watch.find_idle_since(job)),
            "last_line": self.service.log_watch.find_last_line(job.log_dir, job.log_base),
            "unrecorded": self.service.outcomes.describe_unrecorded(job)}

    def info(self) -> dict[str, Any]:
        return {"version": __version__, "hash": self.service.hash, "pid": os.getpid(), "user": self.service.user,
                "home": self.layout.home, "url": self.service.url,
                "uptime_seconds": round(self.clock.monotonic() - self.service.started_monotonic, 3)}

    def list_usage(self, caller: Caller, since_s: float | None, by: str) -> list[dict[str, Any]]:
        """GET /usage: of the last `since_s` seconds; None: as USAGE_SINCE."""
        now = self.clock.now()
        since = max(0.0, now - (parse_duration(USAGE_SINCE) if since_s is None else since_s))
        return usage_json(self.store.state, by, since, now, caller.may_see)

    def list_groups(self, caller: Caller) -> list[dict[str, Any]]:
        """GET /groups: the groups that the caller may see, in the order in which they start."""
        state = self.store.state
        groups = list(self.describe_groups(state, list_visible_groups(state, caller)).values())
        return sorted(groups, key=lambda group: (group["position"] is None, group["position"] or 0))

    def describe_groups(self, state: State, users_of: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
        """{name: row of GET /groups} of these groups, {name: whose jobs there count}."""
        queue, planned = PendingQueue(state), self.find_plan(state)
        groups: dict[str, dict[str, Any]] = {}
        running: dict[str, list[Job]] = {}
        for job in state.running.values():
            running.setdefault(job.group or "", []).append(job)
        for name, users in users_of.items():
            here = [job for job in running.get(name, ()) if job.user in users]
            ended = [state.jobs[job_id] for *_, job_id in sorted(
                item for user in users for item in state.ended_in.get((user, name), ()))]
            places = {user: state.queued_in[user, name] for user in users if (user, name) in state.queued_in}
            first, rules = next(queue.walk(places), None), state.groups.get(name) or Group(name)
            statuses, failed = [job.status for job in ended], None
            for job in reversed(ended if FAILED in statuses else ()):
                if job.status == FAILED and not job.retried_as:
                    failed = job
                    break
            times = [job.current.runtime_seconds or 0.0 for job in ended if here and job.status == COMPLETED]
            counts = {PENDING: sum(map(len, places.values())), RUNNING: len(here),
                      **{status: statuses.count(status) for status in FINAL}}
            # As many go on to run at once as now
            left_s = sum(times) / len(times) * (counts[PENDING] / len(here) + 0.5) if times else None
            groups[name] = {
                "name": name, "user": find_group_user(queue, name, users), **counts, "limit": rules.limit,
                "hold": rules.hold, "position": first and queue.find_position(first),
                "waiting_for": first and format_reasons(self.list_reasons(first, state, planned)),
                "failed_id": failed and failed.id, "failed_line": failed and failed.current.cause_line,
                "estimated_end": format_time(None if left_s is None else (self.clock.now() + left_s) // 60 * 60)}
        return groups

    def find_plan(self, state: State) -> Plan:
        """Return the latest plan."""
        plan, pause = self.service.plan, find_pause(state)
        if pause or (plan.hold and plan.hold.code == "paused"):         # it may be out of date
            plan = replace(plan, hold=pause)
        return plan

    def list_reasons(self, job: Job, state: State, plan: Plan) -> list[Reason]:
        """Return why a pending job does not run now, the first that holds it first."""
        error = self.store.last_error
        if error:
            return [Reason("node-down", "", error.message)]
        if self.service.cluster and job.status == SUBMITTED:
            return [Reason("resources", "slurm", self.service.cluster.find_wait(job))]
        return list_reasons(job, state.groups.get(job.group or ""), plan, self.config, self.clock.now(),
                            self.service.user)

    def explain(self, job_id: str, caller: Caller) -> dict[str, Any]:
        """GET /jobs/{id}/why: why a job waits, with a verdict for each GPU.  Raises: not_found, forbidden."""
        now, estimates, state = self.clock.now(), self.find_estimates(), self.store.state
        capacities = () if self.service.is_slurm else self.service.plan.gpus
        job = find_own_job(state, job_id, caller)
        answer: dict[str, Any] = {
            "id": job.id, "status": job.shown_status, "reason": None, "facts": [], "gpus": [], "verdicts": []}
        if job.shown_status != PENDING:
            last = job.current
            place = f" as Slurm's {last.slurm_id}" if last.slurm_id else ""
            place += format_place(last.gpu_places, last.slurm_node or last.node)
            ran = f"it {'runs' if job.status == RUNNING else 'ran'}{place}"
            why = last.cause_line or last.cause or ran
            outcome = f"{get_outcome(last)}: " if last.cause == "signal" and last.cause_line != LACK_OF_MEMORY else ""
            return {**answer, "why": outcome + why}
        position = PendingQueue(state).find_position(job)
        facts = describe_place(job, position, estimates.get(job.id), capacities, self.config.jobs, now)
        for other in state.running.values() if job.gpus and not job.preemptible else ():
            left_s = PREEMPT_AFTER_S - find_age(other, now)
            if other.preemptible and left_s > 0:
                facts.append(f"job {other.id} is preemptible: it may have to end in {format_duration(left_s)} or later")
        verdicts = list_verdicts(job, capacities, self.config.gpu, now) if job.gpus else []
        gpus = [{"node": one.gpu.node or self.service.node, "place": one.gpu.place, "index": one.gpu.index,
                 "verdict": why and why.detail} for one, why in verdicts]
        reasons = self.list_reasons(job, state, self.find_plan(state))
        return {**answer, "why": format_reasons(reasons), "reason": reason_json(reasons[0]), "facts": facts,
                "gpus": gpus, "verdicts": format_verdicts(gpus, Paint(""))}

    def find_estimates(self) -> Mapping[str, float]:
        """Return {pending job: estimated start}.  They are made once for a plan, and take a small part of the time."""
        with self.estimates_lock:
            began, estimated = self.clock.monotonic(), self.find_estimated()
            if estimated != self.estimated and began >= self.estimates_until:
                self.estimates, self.estimated = self.estimate(), estimated
                now = self.clock.monotonic()
                pause_s = min(MAX_ESTIMATE_PAUSE_S, ESTIMATE_BACKOFF_FACTOR * (now - began))
                self.estimates_until = now + max(ESTIMATE_INTERVAL_S, pause_s)
            return self.estimates

    def find_estimated(self) -> tuple[Any, ...]:
        """Return what tells a plan from another: the state, what is closed, and the minute, as an end may be late."""
        plan = self.service.plan
        closed = [(one.gpu.uuid, one.reason and one.reason.code) for one in plan.gpus]
        return self.store.state.seq, plan.hold, dict(plan.machines), closed, self.clock.now() // 60

    def estimate(self) -> Mapping[str, float]:
        import itertools
        state = self.store.state
        first = itertools.islice(PendingQueue(state).walk(state.queued), MAX_ESTIMATED_JOBS)
        jobs = [*state.running.values(), *first]
        is_unknown = self.service.is_slurm or state.paused or self.service.plan.hold        # Slurm decides then
        if not jobs or is_unknown or self.service.gpu_watch.find_gpu_error():
            return {}
        return estimate_starts(
            jobs, list(state.groups.values()), know_run_times(jobs, list_finished(state)),
            self.service.gpu_watch.see_gpus(state), self.config, self.clock.now(), self.service.pool.view_nodes())

def choose_pending(queue: PendingQueue, caller: Caller, choice: Choice) -> tuple[Iterable[Job], int]:
    """(the pending jobs that match, in the queue's order; how many).  Only names and texts are looked for in each."""
    state = queue.state
    if choice.name is not None or choice.text is not None:
        jobs = choice.select_for(caller, queue.walk(state.queued))
        return jobs, len(jobs)
    if choice.group is None:
        places = state.queued
    else:
        places = {user: here for (user, group), here in state.queued_in.items()
                  if group == choice.group and caller.may_see(user)}
    places = {user: here for user, here in places.items() if choice.user in (None, user)}
    return queue.walk(places), sum(map(len, places.values()))


def list_visible_groups(state: State, caller: Caller) -> dict[str, list[str]]:
    """{group: the users of its jobs that the caller may see}; the groups with ended jobs come first."""
    found: dict[str, list[str]] = {}
    for user, group in (*sorted(state.ended_in, key=lambda key: state.ended_in[key][0]),
                        *((job.user, job.group or "") for job in state.running.values()), *state.queued_in):
        if group and caller.may_see(user) and user not in found.setdefault(group, []):
            found[group].append(user)
    return found


def find_group_user(queue: PendingQueue, group: str, users: Sequence[str]) -> str:
    """Whose a group is for those who may see these users' jobs in it: of its first job to end, to run, or to start."""
    state = queue.state
    if len(users) == 1:
        return users[0]
    ended = [state.ended_in[user, group][0] for user in users if (user, group) in state.ended_in]
    running = (job for job in state.running.values() if job.group == group and job.user in users)
    waiting = {user: state.queued_in[user, group] for user in users if (user, group) in state.queued_in}
    return (state.jobs[min(ended)[2]] if ended else next(running, None) or next(queue.walk(waiting))).user


class Overview(Part):
    """GET /status?after=: what has changed of the jobs and GPUs that one looks at all day.

    The latest documents are kept, with their versions: an answer is the difference from the one that the caller has.
    """

    def __init__(self, service: Service) -> None:
        import threading
        super().__init__(service)
        self.lock = threading.Lock()
        self.documents: dict[tuple[Any, int], dict[str, Any]] = {}      # {(whose and which view, version): document}

    def find_changes(self, after: int, caller: Caller, choice: Choice, limit: int) -> dict[str, Any]:
        """The difference from the caller's version; all of it with `is_whole` when that is not known any more."""
        view = caller.user, caller.is_owner, choice, limit
        with self.lock:
            version, document = self.store.version, self.describe(caller, choice, limit)
            if self.documents.get((view, version), document) != document:       # readings and logs change no State
                self.store.note_change()
                version = self.store.version
            self.documents.pop((view, version), None)
            self.documents[view, version] = document
            for key in list(self.documents)[:-MAX_DOCUMENTS]:
                del self.documents[key]
            known = self.documents.get((view, after))
        changes = document if known is None else make_patch(known, document)
        return {"state_version": version, "is_whole": known is None, **changes}

    def describe(self, caller: Caller, choice: Choice, limit: int) -> dict[str, Any]:
        """The document.  Its rows are without what is null."""
        import itertools
        views, state = self.service.views, self.store.state
        status, is_chosen = views.status_for(caller), choice != Choice()
        visible = list_visible_groups(state, caller) if not is_chosen or choice.group else {}
        lists = Lists(state, caller, choice, {} if is_chosen else visible)
        waiting, ended = (list(itertools.islice(jobs, limit)) for jobs in (lists.waiting, lists.ended))
        failures = list(itertools.islice(lists.list_failures(), MAX_FAILURES))
        listed = [*waiting, *ended]
        groups = {job.group for job in listed if lists.is_folded(job)} | {choice.group}
        rows = [*state.running.values(), *(job for job in listed if not lists.is_folded(job)), *failures]
        described = views.describe_jobs(rows, OVERVIEW_JOB_KEYS)
        return {
            **pick(status, (
                "version", "user", "is_owner", "is_paused", "host", "slurm", "gpu_trouble", "bad_checks")),
            # A group's row tells that it is held.
            "hints": self.service.health.list_hints() if caller.is_owner else [],
            "defaults": self.service.drafts.defaults,
            "counts": {PENDING: len(state.pending), RUNNING: len(state.running),
                       **{word: len(state.ended.get(word, ())) for word in FINAL}},
            "readings": {gpu["place"]: drop_nulls(pick(gpu, GPU_READINGS)) for gpu in status["gpu_status"]},
            "gpus": {gpu["place"]: drop_nulls(pick(gpu, OVERVIEW_GPU_KEYS)) for gpu in status["gpu_status"]},
            "nodes": {node["name"]: drop_nulls(node) for node in status["nodes"]},
            "jobs": {job.id: settle(caller.show(job.user, row)) for job, row in zip(rows, described)},
            "groups": {name: drop_nulls(row) for name, row in views.describe_groups(
                state, {name: users for name, users in visible.items() if name in groups}).items()},
            "waiting": [lists.name_entry(job) for job in waiting], "ended": [lists.name_entry(job) for job in ended],
            "failures": [job.id for job in failures],
            "found": {"running": [job.id for job in lists.running] if is_chosen else None,
                      "waiting": lists.waiting_count, "ended": lists.ended_count}}


class Lists:
    """The lists of jobs that a document has the first of: what waits in the queue's order, what has ended last first.

    A group stands in them as its first job that the list has; one that is not over, in the waiting list alone.
    """

    def __init__(self, state: State, caller: Caller, choice: Choice, groups: Mapping[str, Sequence[str]]) -> None:
        """`groups`: those that stand for their jobs, as list_visible_groups() has them."""
        self.state, self.caller = state, caller
        self.queue = PendingQueue(state)
        self.user_of = {group: find_group_user(self.queue, group, users) for group, users in groups.items()}
        statuses = choice.status or STATUSES
        self.running = choice.select_for(caller, state.running.values() if RUNNING in statuses else ())
        self.waiting: Iterable[Job] = ()
        self.ended: Iterable[Job] = ()
        self.waiting_count = self.ended_count = 0
        if choice != Choice():
            if PENDING in statuses:
                self.waiting, self.waiting_count = choose_pending(self.queue, caller, choice)
            self.ended = choice.select_for(caller, [
                job for job in reversed(list_finished(state)) if job.status in statuses])
            self.ended_count = len(self.ended)
        else:
            self.fold_waiting()
            self.fold_ended({*groups}.difference(job.group or "" for job in self.running if caller.may_see(job.user)))

    def is_folded(self, job: Job) -> bool:
        return self.user_of.get(job.group or "") == job.user

    def name_entry(self, job: Job) -> str:
        return f"group:{job.group}" if self.is_folded(job) else job.id

    def fold_waiting(self) -> None:
        import heapq
        heads: dict[str, list[QueuePlace]] = {}             # {user: of the first jobs of their groups}
        others: dict[str, list[list[QueuePlace]]] = {}
        for (user, group), places in self.state.queued_in.items():
            if self.user_of.get(group) == user:
                heads.setdefault(user, []).append(places[0])
            else:
                others.setdefault(user, []).append(places)
        self.waiting = self.queue.walk({user: heapq.merge(sorted(heads.get(user, ())), *others.get(user, ()))
                                        for user in self.state.queued})
        self.waiting_count = sum(map(len, (*heads.values(), *(each for here in others.values() for each in here))))

    def fold_ended(self, quiet: Container[str]) -> None:
        """`quiet`: the groups of which nothing runs."""
        import heapq
        heads: list[EndedItem] = []
        others: list[list[EndedItem]] = []
        waiting = {group for user, group in self.state.queued_in if self.caller.may_see(user)}
        for (user, group), items in self.state.ended_in.items():
            if self.user_of.get(group) != user:
                others.append(items)
            elif group in quiet and group not in waiting:
                heads.append(items[-1])
        lists = [sorted(heads, reverse=True), *map(reversed, others)]
        self.ended = (self.state.jobs[job_id] for *_, job_id in heapq.merge(*lists, reverse=True))
        self.ended_count = sum(map(len, (heads, *others)))

    def list_failures(self) -> Iterator[Job]:
        """The failed jobs that were not queued again, the last first."""
        for *_, job_id in reversed(self.state.ended.get(FAILED, ())):
            job = self.state.jobs[job_id]
            if not job.retried_as and self.caller.may_see(job.user):
                yield job


MAX_DOCUMENTS = 20              # kept of all callers
MAX_FAILURES = 20               # shown at once
NEWS_LOOK_S = 5.0               # between two looks for what is no change of State: GPUs, nodes, jobs' last lines
# What is told with other news, or after NEWS_TIMEOUT_S: it changes all the time.
UNIMPORTANT = {"state_version", "is_whole", "readings", "host"}


def drop_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content for key, content in row.items() if content is not None}


def settle(row: Mapping[str, Any]) -> dict[str, Any]:
    """A job's row without what changes by the second: clients know the time, and a start is an estimate."""
    start = row["estimated_start"]
    return drop_nulls({
        **row, "runtime_seconds": row["runtime_seconds"] if row["status"] in FINAL else None,
        "is_held": row["is_held"] or None,
        "estimated_start": start and f"{start[:17]}00Z"})


class Service:
    """The service: its parts take requests, watch, start and end jobs; its loop drives them."""

    def __init__(self, config: Config, layout: Layout, store: Store, machine: Machine, clock: Clock, disk: Disk,
                 log: logging.Logger, environ: Mapping[str, str]) -> None:
        from collections import Counter
        self.config, self.layout, self.store, self.machine = config, layout, store, machine
        self.clock, self.disk, self.log = clock, disk, log
        self.environ = list_inherited(environ)          # `nexus serve` may be typed in a job
        self.umask = int(environ.get("NEXUS_UMASK", "022"), 8)      # for hooks, and for jobs without one
        self.former_python = environ.get("NEXUS_FORMER_PYTHON", "")     # in whose place the supervisor took another
        self.user = find_user(os.geteuid())
        self.owner = Caller(self.user, self.user)
        self.hash = file_hash(disk)                         # of the running code: the file may change later
        self.url = ""                                       # where it listens, once it does
        self.node = store.host.partition(CONTAINER)[0]
        self.started_monotonic = clock.monotonic()
        self.is_stopping = self.is_going_down = False
        self.plan = Plan(hold=Reason("node-down", "", "the service has not read the GPUs yet"))
        self.turned_at = clock.monotonic()                  # when the last tick ended
        self.tick_s = 0.0                                   # how long that took
        # Jobs that have ended since this service started, for GET /metrics
        self.end_counts = Counter({(COMPLETED, ""): 0, (FAILED, "exit"): 0, (CANCELLED, "killed"): 0})
        store.note_status_changes = self.note_status_changes
        self.failure_count = 0
        self.failed_at = float("-inf")                      # monotonic
        self.last_failure = ""
        self.events = RunnerEvents(layout.events_file, log)
        self.hooks = Hooks(self)
        self.is_slurm = config.jobs.launcher == "slurm"
        self.visible_devices = None if self.is_slurm else find_visible_devices(environ)
        self.observer = Observer(machine, clock, config, log, self.visible_devices)
        self.jobs_file = JobsFile(self, config.jobs.jobs_file) if config.jobs.jobs_file else None
        self.scripts = ScriptRules(self)
        self.drafts = Drafts(self)
        self.admission = Admission(self)
        self.gpu_watch = GpuWatch(self)
        self.outcomes = Outcomes(self)
        self.starter = Starter(self)
        self.local = Local(self)
        self.pool = NodePool(self)
        self.housekeeping = Housekeeping(self)
        self.log_watch = LogWatch(self)
        self.health = Health(self)
        self.views = Views(self)
        self.overview = Overview(self)
        has_slurm_jobs = any(job.current.slurm_key for job in store.state.live.values())
        self.cluster = SlurmBackend(self) if self.is_slurm or has_slurm_jobs else None

    def wake(self) -> None:
        self.events.wake()

    def change(self, decide: Callable[[State], Iterable[Put]], message: str, *details: object) -> Any:
        """Commit the changes of a request, log the message, wake the loop.  Raises: what Store.update() raises."""
        answer = self.store.update(decide)
        self.log.info(message, *details)
        self.wake()
        return answer

    def stop(self) -> None:
        """End the loop.  Safe in a signal handler."""
        self.is_stopping = True
        self.wake()

    def withdraw(self) -> None:
        """Remove what clients find this service by.  Raises: unavailable."""
        for path in (self.layout.service_file, self.layout.socket_file):
            remove_file(self.disk, path)

    def note_status_changes(self, jobs: Sequence[Job]) -> None:
        """The store calls this with jobs whose status has changed."""
        if not self.log_watch.growths:
            self.log_watch.worker.wanted.set()
        self.hooks.note_status_changes(jobs)
        for job in jobs:
            if job.status in FINAL:
                self.end_counts[job.status, job.current.cause or ""] += 1

    def running_jobs(self) -> list[Job]:
        return list(self.store.state.running.values())

    # The loop

    def run(self, lock: int) -> None:
        """Work until stop() is called, or until somebody has removed the home, or the lock that it holds there."""
        self.run_guarded("looking for jobs whose hook is due", self.hooks.begin)
        self.outcomes.adopt()
        for worker in (Worker(self, "asking for the GPUs", self.gpu_watch.probe),
                       Worker(self, "measuring jobs' memory", self.observer.measure_memory),
                       Worker(self, "looking at the disks", self.health.look_at_disks),
                       Worker(self, "writing state.json", self.housekeeping.keep_state),
                       Worker(self, "trimming the history", self.housekeeping.trim_history),
                       self.hooks.worker, self.log_watch.worker,
                       *(one.worker for one in (self.cluster, self.jobs_file) if one)):
            worker.thread.start()
        while not self.is_stopping:
            self.tick(self.events.wait(self.next_wait_s()))
            if not self.disk.stat(lock).st_nlink:
                self.log.warning("Service ended: %s was removed", self.layout.lock_file)
                return
        self.run_guarded("ending jobs", self.end_for_reboot)
        for node in self.pool.nodes.values():
            node.end()
        self.run_guarded("at the end", self.store.look_for_edit, self.housekeeping.apply_edit)
        self.run_guarded("at the end", self.outcomes.keep_samples)
        self.run_guarded("at the end", self.log_watch.end)

    def end_for_reboot(self) -> None:
        """When the machine goes down, let the jobs here save their work: systemd would kill them all at once."""
        if not self.local.list_jobs() or not self.machine.is_going_down():
            return
        self.is_going_down = True

        def end(state: State) -> Changes:
            for job in list(state.running.values()):
                hosted = self.local.host.hosted.get(job.id)
                is_over = job.id in self.outcomes.unrecorded or (hosted and hosted.result and not hosted.processes_left)
                if self.local.has(job) and not job.current.stop_cause and not is_over:
                    yield change_job(job, stop_cause="reboot", stop_line=MACHINE_DOWN)

        self.store.update(end)
        self.log.info("The machine goes down: its jobs are ended")
        give_up_at = self.clock.monotonic() + self.config.jobs.kill_grace_seconds + 2 * RUNNER_TIMEOUT_S
        while self.local.list_jobs() and self.clock.monotonic() < give_up_at:
            self.tick(self.events.wait(self.next_wait_s()))

    def tick(self, runner_events: Sequence[RunnerEvent]) -> None:
        """Run one tick.  A phase that fails is logged and counted; the other phases still run."""
        began = self.clock.monotonic()
        for backend in self.backends:
            self.run_guarded(f"hearing of jobs {backend.name or 'here'}", self.take_in, backend, runner_events)
        self.run_guarded("reading GPUs", self.gpu_watch.take_in_observation)
        self.run_guarded("looking for idle jobs", self.gpu_watch.look_for_idle_jobs)
        self.run_guarded("looking at nodes", self.pool.take_stock)
        self.run_guarded("looking for processes that jobs wait for", self.starter.release_waiting)
        self.run_guarded("scheduling", self.record_ends_and_start)
        self.turned_at = self.clock.monotonic()
        self.tick_s = self.turned_at - began

    def take_in(self, backend: Backend, runner_events: Sequence[RunnerEvent]) -> None:
        """Record the news of a backend: what is learned of jobs that go on together, of others with their ends."""
        learned: dict[str, dict[str, Any]] = {}
        for known, news in backend.poll(runner_events):
            job = self.store.state.jobs.get(known.id)
            if job and (job.attempt, job.status) == (known.attempt, known.status):      # else it will be seen again
                if isinstance(news, dict) and job.current.slurm_key is None:
                    learned[job.id] = news
                    continue
                self.run_guarded(f"hearing of job {job.id}", self.outcomes.take_news, job, news)
                if job.id in learned and job.id in self.outcomes.unrecorded and "stop_cause" not in learned[job.id]:
                    self.outcomes.learned[job.id] = learned.pop(job.id)
        if learned:
            self.run_guarded("hearing of running jobs", self.outcomes.learn, learned)

    @property
    def backends(self) -> Sequence[Backend]:
        return (self.local, *self.pool.nodes.values(), *([self.cluster] if self.cluster else []))

    def run_guarded(self, doing: str, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act`; log an error instead of raising it."""
        try:
            act(*arguments)
        except NexusError as error:
            if self.store.last_error is None:
                self.log.warning("%s: %s", doing, error.message)
        except Exception as error:
            self.fail(doing, error)

    def fail(self, phase: str, error: BaseException) -> None:
        self.failure_count += 1
        failure, before = f"{phase}: {describe_exception(error)}", self.failed_at
        self.failed_at = self.clock.monotonic()
        if failure != self.last_failure or self.failed_at - before > 60:    # repeated errors must not fill the disk
            self.log.error("Internal error while %s", phase, exc_info=error)
        self.last_failure = failure

    def next_wait_s(self) -> float:
        is_late = self.clock.monotonic() - self.failed_at < WATCH_INTERVAL_S
        next_look_s = self.local.host.find_next_look_s()
        if is_late or (self.store.last_error and next_look_s == float("inf")):
            return WATCH_INTERVAL_S             # backoff after a failure
        if self.outcomes.unrecorded:
            return TERMINATION_INTERVAL_S
        until = self.plan.delayed_until
        delay_s = WATCH_INTERVAL_S if until is None else max(0.01, until - self.clock.now())
        return min(WATCH_INTERVAL_S, delay_s, next_look_s)

    def record(self, job: Job, is_synced: bool = True, /, **facts: Any) -> None:
        """Change fields of a job, or of its last attempt.  Raises: unavailable."""
        self.store.update(lambda state: [change_job(state.jobs[job.id], **facts)], is_synced)

    def record_ends_and_start(self) -> None:
        """Record the ends of jobs and plan starts in one transaction; then start the jobs."""
        now, trouble, nodes = self.clock.now(), self.gpu_watch.find_gpu_error(), self.pool.view_nodes()
        over = dict(self.outcomes.unrecorded)
        evidence = {job.id: self.outcomes.gather_evidence(job, over[job.id])
                    for job in self.store.state.live.values() if job.id in over}
        hold = "the machine goes down" if self.is_going_down else (
            self.local.host.start_backoff.find_why(self.clock.monotonic()) or "")
        starting: list[tuple[Job, Mapping[str, str] | None]] = []

        def decide(state: State) -> Changes:
            if self.store.last_error:                       # a harmless write tells whether the disk works again
                yield Put("facts", "paused_gpus", state.paused_gpus)
            ended = []
            for job_id, proof in evidence.items():          # only here a running job ends: it still runs
                if job := state.live.get(job_id):           # in Slurm's queue it may have been cancelled by now
                    job = with_facts(job, **self.outcomes.learned.get(job_id, {}))
                    yield from self.outcomes.end_attempt(state, job, over[job_id], proof, now)
                    ended.append((job, state.jobs[job_id]))
            planned = plan(state, self.gpu_watch.see_gpus(state), trouble, self.config, now, nodes, hold)
            for job_id, waiting_id in planned.preempted:
                yield change_job(state.jobs[job_id], stop_cause=PREEMPTED, stop_by=None,
                                 stop_line=f"job {waiting_id}, which is not preemptible, needs its GPUs")
            for start in planned.starts:
                yield self.starter.intend(state.jobs[start.job_id], start, now)
            jobs = [state.jobs[start.job_id] for start in planned.starts]
            starting.extend((job, state.environments.get(job.environment)) for job in jobs)
            return planned, ended

        self.plan, ended = self.store.update(decide)
        for job_id, waiting_id in self.plan.preempted:
            self.log.info("Job %s is stopped and queued again: job %s needs its GPUs", job_id, waiting_id)
        for job_id in over:
            self.outcomes.unrecorded.pop(job_id, None)
        for before, _ in ended:
            self.outcomes.forget(before)
        for before, after in ended:         # in the log, an end stands before the start that it made possible
            self.outcomes.report_end(before, after)
        for job, variables in starting:
            self.run_guarded(f"starting job {job.id}", self.starter.start, job, variables)
        for uuid in dict.fromkeys(uuid for before, _ in ended for uuid in before.current.gpu_uuids):
            self.gpu_watch.guard_gpu(uuid)

    def tell(self, job: Job, message: str, *details: object) -> None:
        """Log a message about a running job; JSON logs get its fields too."""
        self.log.info(message, *details, extra={
            "job_id": job.id, "gpu_ids": list(job.current.gpu_indices), "required_gpus": job.gpus,
            "attempt": job.attempt})


NEVER_HINTS = {"gpus": "ask for fewer; --gpus 0 runs a job without one", "gpu_ids": "nexus shows them",
               "gpu_type": "a part of a GPU's name will do, as nexus shows it",
               "gpu_mem_mib": "ask for less: it must be free on each of the GPUs"}


def content_of(job: Job) -> tuple[object, ...]:
    """Return the key by which --unique compares jobs.  The number of a script in its sweep is no part of it."""
    own = tuple(pair for pair in job.variables if pair[0] != "NEXUS_TASK_ID")
    return job.user, job.command, job.cwd, job.conda, job.env_digest, own


def find_retried(state: State, job_id: str, known: dict[str, str]) -> str:
    """Return the id of the latest retry of a job, or its own id.  `known`: {id: one of its retries}, which grows."""
    former = []
    while (later := known.get(job_id) or state.jobs[job_id].retried_as) in state.jobs:
        former.append(job_id)
        job_id = str(later)
    known.update(dict.fromkeys(former, job_id))
    return job_id


MAX_PARSED = 100                # commands of one request that bash is asked about: it takes milliseconds for each


def check_command(command: str) -> None:
    """Raises: usage, if bash cannot read it."""
    done = run(["bash", "-p", "-n", "-c", "--", command], 5)
    if done.exit_code:
        why = re.sub(r"^bash: (-c: )?(line [0-9]+: )?", "", done.output.strip().split("\n")[0])
        refuse(f"bash cannot read the command: {format_line(why, 200)}",
               "close each quote; to try it: bash -n -c …")


def check_group(state: State, name: str, caller: Caller | None = None) -> None:
    """Raises: not_found, when the caller may see no job of the group."""
    groups = [group for group in state.members if caller is None or caller.is_owner
              or has_member(state, group, caller.user)]
    if name not in groups:
        raise NexusError("not_found", f"there is no job of group '{format_line(name, 60)}'",
                         hint=suggest(name, groups) or "nexus jobs lists all")


def has_member(state: State, group: str, user: str) -> bool:
    """Whether a job of this user is in the group."""
    members = state.members.get(group, [])
    return user in [first for first, _ in members[bisect.bisect_left(members, (user, "")):][:1]]


def check_own_group(state: State, group: str | None, caller: Caller) -> None:
    """Its jobs share its limit and its hold.  Raises: forbidden, when another user has a job of it."""
    members = state.members.get(group or "", [])
    for user, _ in (*members[:1], *members[-1:]):           # ascending: if these are the caller's, all are
        if not caller.may_see(user):
            raise NexusError("forbidden", f"the group {group} is {user}'s", "take another name")


def choose_jobs(state: State, choice: Choice, caller: Caller, statuses: Sequence[str]) -> list[Job]:
    """The jobs of a choice, for a change of jobs in these statuses.  Raises: not_found; forbidden; conflict."""
    if choice.ids:
        try:
            found = [find_own_job(state, told, caller, choice.status or statuses) for told in dict.fromkeys(choice.ids)]
        except NexusError as error:
            rest = "; nothing was done to the others" if len(choice.ids) > 1 else ""
            raise NexusError(error.kind, error.message + rest, error.hint) from None
        named = list({job.id: job for job in found}.values())
        for job in named:
            if choice.group is not None and choice.group != (job.group or ""):
                raise NexusError("conflict", f"job {job.id} is not of group '{format_line(choice.group, 60)}'",
                                 "nothing was done")
        return named
    if choice.group:
        check_group(state, choice.group, caller)
    return [job for job in list_jobs(state, choice.status or STATUSES) if caller.may_see(job.user) and choice.fits(job)]


def find_own_job(state: State, told: str, caller: Caller, statuses: Container[str] = ()) -> Job:
    """The job of an id, or else the latest of a name; to change it, the only one of that name in these statuses.

    Raises: not_found; forbidden, when it is another user's; conflict, when several have the name.
    """
    job = state.jobs.get(told)
    if job is None:
        named = state.named.get((None if caller.is_owner else caller.user, told))
        if not named:
            seen = [each for each in state.jobs.values() if caller.may_see(each.user)]
            raise NexusError("not_found", f"no job '{format_line(told, 40)}'", hint=(
                f"it is a group, see nexus jobs --group {quote(told)}" if told in [each.group for each in seen] else
                suggest(told, [*state.jobs, *(each.name or "" for each in seen)]) or "nexus jobs lists them"))
        fitting = [job_id for _, job_id in named if state.jobs[job_id].shown_status in statuses] if statuses else []
        if len(fitting) > 1:
            raise NexusError("conflict", f"{len(fitting)} jobs have the name '{told}': {', '.join(fitting[:10])}",
                             hint="name them by their ids")
        job = state.jobs[fitting[0] if fitting else named[-1][1]]
    if not caller.may_see(job.user):
        raise NexusError("forbidden", f"job {job.id} is {job.user}'s",
                         f"{caller.user}'s own: nexus jobs --user {caller.user}")
    return job


def find_links(state: State, job: Job, caller: Caller) -> dict[str, tuple[str, ...]]:
    """The fields of a job that is to start after others, by their ids or names.  Raises: not_found; forbidden."""
    parents, others = ([find_own_job(state, one, caller) for one in told] for told in (job.after, job.after_any))
    return {"after": tuple(parent.id for parent in parents), "after_any": tuple(parent.id for parent in others),
            "pending_dependencies": tuple(dict.fromkeys([
                *(parent.id for parent in parents if parent.status != COMPLETED),
                *(parent.id for parent in others if parent.status not in FINAL)]))}


def check_link_count(state: State, jobs: Sequence[Job]) -> None:
    """Raises: queue_full, when the pending jobs and these would come after too many."""
    asked = sum(len(job.after) + len(job.after_any) for job in jobs)
    if not asked:
        return
    ids = {job.id for job in jobs}
    total = asked + sum(len(job.after) + len(job.after_any) for job in state.pending.values() if job.id not in ids)
    if total > MAX_LINKS:
        raise NexusError("queue_full", f"the jobs that wait would come after {total} others in all; at most "
                         f"{MAX_LINKS} are taken", "let one job come after all of a stage, and the next stage after it")


def find_lost_parent(state: State, job: Job) -> Job | None:
    """A job after which this one was to start, and which has failed or was cancelled."""
    parents = [state.jobs[parent] for parent in job.after]
    return next((parent for parent in parents if parent.status in (FAILED, CANCELLED)), None)


def check_links(state: State, job: Job) -> None:
    """Raises: conflict, when a pending job could never start after those that are named now."""
    if lost := find_lost_parent(state, job):
        raise NexusError("conflict", f"job {job.id} could never start: {describe_parent(lost)}",
                         hint="--after-any: however that ended")
    found, waiting = {*job.pending_dependencies}, [*job.pending_dependencies]
    for parent in waiting:                      # it grows: their parents, and so on
        if parent == job.id:
            raise NexusError("conflict", f"job {job.id} would wait for itself", hint=f"nexus show {job.id}")
        further = [one for one in state.jobs[parent].pending_dependencies if one not in found]
        found.update(further)
        waiting += further


def check_status(job: Job, statuses: Container[str], rule: str, hints: Mapping[str, str] = {}) -> Job:
    """Return the job if its status is one of `statuses`.  `hints`: {its status: what to do}.  Raises: conflict."""
    if job.shown_status not in statuses:
        raise NexusError("conflict", f"job {job.id} is {job.shown_status}{rule and '; '}{rule}",
                         hints.get(job.shown_status, f"nexus show {job.id}"))
    return job


def check_priority(priority: int | None, caller: Caller) -> None:
    """Users of one priority share the GPUs; only the owner may give a higher priority.  Raises: forbidden."""
    if priority is not None and priority < PRIORITIES["normal"] and not caller.is_owner:
        raise NexusError("forbidden", "only the owner of the service may give a priority above normal",
                         hint="normal, low, or a number above 1")


def file_hash(disk: Disk) -> str:
    return hash_code(read_bytes(disk, os.path.abspath(__file__)))


# ==== 15. SERVER ==== ROUTES; handle(request) -> Response; authentication; Handler and Server, by http.server
# Api.handle() decides everything, with a request as a value.  localhost is no boundary: a caller is the owner if the
# kernel says that the socket at the other end is the owner's, or with the owner's token.

MAX_BODY_BYTES = 64 * 2**20
MAX_CONNECTIONS = 256                   # over TCP: so many of the owner, and so many of all others
REQUEST_TIMEOUT_S = 30.0                # for a request without its body
IDLE_TIMEOUT_S = 75.0                   # a connection that reads nothing for so long is closed
BODY_BYTES_PER_S = 65536                # a body that is slower than this is refused
NEWS_TIMEOUT_S = 15.0                   # GET /status?after= replies at the latest after this time
ACCEPT_PAUSE_S = 0.1                    # after a failed accept, as when no descriptor is left
WRONG_TOKEN_DELAY_S = 0.3
REFUSAL_INTERVAL_S = 60.0
MAX_FORMS = 8                           # read at once: who sent a form may stand in it alone
LINGER_S = 5.0                          # how long the rest of a refused body is read
SOCKET_PEER = "localhost"               # the peer of a caller at api.sock; other peers are addresses
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
LOOPBACK = ("127.0.0.1", "::1")         # what localhost may resolve to
STREAMS = ("stdout", "stderr", "both")
NDJSON = "application/x-ndjson"
FORWARDING = (                          # headers that proxies and tunnels add
    "forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "x-forward-for",
    "x-original-forwarded-for", "client-ip", "x-cluster-client-ip", "fly-client-ip", "tailscale-user-login")
MAX_FORM_BYTES = 10 * 2**20
MAX_RESULT_BYTES = 2**20
CANCEL_TIMEOUT_S = 2.0                  # how long /api/cancel waits for the job's end


class Request(Value):
    method: str
    path: str                                   # still quoted, with %2F
    query: Mapping[str, Sequence[str]]          # {name: all values}
    headers: Mapping[str, str]                  # {name in lower case: value}
    read_body: Callable[[], bytes]
    peer: str = "127.0.0.1"                     # the caller's address
    uid: int | None = None                      # of the caller's socket, if that is on this machine and known
    body_length: int = 0

    @property
    def host_name(self) -> str:
        """The name by which nexus is called, without the port."""
        return re.sub(r":\d*$", "", self.headers.get("host", "")).lower()


class Response(Value):
    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}
    stream: Iterator[bytes] | None = None       # instead of a body; at an empty piece the connection is checked
    after: Callable[[], None] | None = None     # called when the reply is sent


class Route(Value):
    """A call of the API: a method of Api, and its description."""
    method: str
    pattern: str
    access: str                                 # "owner"; "user": with a token, for its own jobs; "anyone": without one
    summary: str
    handler: Callable[..., Any]                 # (api, caller, **arguments) -> Response, JSON, or None for 204
    arguments: Sequence[str]                    # "request"; "body", its JSON; names of parameters
    parameters: Mapping[str, Field]             # {name in the request: row}
    answer: str                                 # the reply, for make_answer(); "": none, with 204
    body: str                                   # the request's body, in the same form
    statuses: tuple[int, ...]                   # of a good reply


COUNT = integer_in(0, 10**18 - 1)
COUNTS = matching(
    "^-?[0-9]{1,18}(,-?[0-9]{1,18})?$", "a number of bytes, or two with a comma", examples=["0", "100,20"])
QUERY_FLAG = matching("^([Tt]rue|[Ff]alse|1|0|)$", "true or false", examples=["true"])


def parse_offsets(text: str) -> Sequence[int]:
    """(offset in stdout.log, offset in stderr.log); one number counts for both."""
    numbers = [int(number) for number in text.split(",")]
    return numbers if len(numbers) == 2 else numbers * 2


def parse_flag(text: str) -> bool:
    """`?follow` without a value is true."""
    return text.lower() in ("", "true", "1")


PARAMETERS: Mapping[str, Field] = {             # names with a dash are headers
    "id": Field({**STRING, "examples": ["abc"]}, "the job's id or name"),
    "index": Field(matching(f"^{GPU_PLACE}$", "a GPU like 0 or n1:0", examples=["0"]),
                   "the GPU's index; 0.1 is a MIG slice of GPU 0; of a node, with its name: n1:0"),
    "name": Field({**STRING, "examples": ["n1"]}, "a node's name; of jobs: only those of this name"),
    "force": Field(QUERY_FLAG, "forget it at once: its jobs are given up", parse=parse_flag),
    "status": Field(list_of(STATUS), "jobs of this status; several: status=failed,cancelled"),
    "user": Field(STRING, "jobs of this user alone"),
    "user_id": Field(STRING, "jobs of this user alone"),
    "group": Field(STRING, "only this group's; empty: of no group"),
    "text": Field(
        STRING, "only jobs with this text in their id, name, command, user, group, directory, machine, or cause"),
    "sort": Field(one_of(*(sign + name for name in SORTED_BY for sign in ("", "-"))),
                  "by this field, with - in reverse: sort=-finished_at; jobs without it last"),
    "limit": Field(COUNT, "at most so many, the first ones; the header Total-Count says how many there are"),
    "fields": Field(list_of(one_of(*JOB)), "only these fields of each job: fields=id,status,exit_code"),
    "after": Field(COUNT, "reply when something has changed since this state_version, or after 15 s; 0: at once"),
    "since": Field(DURATION_TEXT, "at most so old, like 24h (7d)", parse=parse_duration),
    "by": Field(one_of("user", "group"), "a row for each user (the default) or group"),
    "wait": Field(integer_in(0, 3600), "reply only when the job has ended, or after so many seconds"),
    "follow": Field(QUERY_FLAG, "go on as it grows, until the end", parse=parse_flag),
    "tail": Field(COUNT, "begin so many lines before the end; a progress bar is shown as it was last"),
    "stream": Field(one_of(*STREAMS), "which of the two files"),
    "offset": Field(COUNTS, "from this byte of the files on, or from 0 in a shorter, new one; negative: from the end; "
                    "two numbers are of stdout.log and of stderr.log; the header Log-Offset says where the reply "
                    f"begins; without it a progress bar of more than {MAX_BAR_BYTES} bytes is shown as it was last",
                    parse=parse_offsets),
    "timestamps": Field(
        QUERY_FLAG, "begin each line with its time of arrival, to a tenth of a second where it is known",
        parse=parse_flag),
    "Idempotency-Key": Field(
        matching("^[\\x21-\\x7e]{8,128}$", "8 to 128 visible characters", examples=["0f0bd5a2-4d1e"]),
        "a random one for each submission: the same again adds nothing, and is answered as the first time"),
}
ROUTES: list[Route] = []


def argument_of(name: str) -> str:
    """The name of a parameter in its handler."""
    return name.lower().replace("-", "_")


def read_parameter(name: str, row: Field, texts: Sequence[str]) -> Any:
    """Parse a parameter.  Raises: usage."""
    value: Any = texts[0]
    if row.place != "path":                     # a name in the path is looked up by its handler
        kind = row.schema.get("type")
        if len(texts) > 1 and kind != "array":
            refuse(f"{name} may be given once, and stands in the address {len(texts)} times", hint="")
        is_whole = kind == "integer" and re.fullmatch("[0-9]{1,18}", value)
        value = ",".join(texts).split(",") if kind == "array" else int(value) if is_whole else value
        check(row.schema, value, name)
    return row.parse(value) if row.parse else value


def route(call: str, access: str, summary: str, answer: str = "", body: str = "",
          statuses: tuple[int, ...] = ()) -> Callable[[T], T]:
    """Make a method of Api answer a call.

    Its arguments after `caller` are names of parameters, `body` (its JSON), or `request`.
    """
    method, pattern = call.split(" ")

    def add(handler: Any) -> Any:
        arguments = handler.__code__.co_varnames[2:handler.__code__.co_argcount]
        parameters = {}
        for name, row in PARAMETERS.items():
            if argument_of(name) in arguments:
                place = "path" if f"{{{name}}}" in pattern else "header" if "-" in name else "query"
                parameters[name] = Field(row.schema, row.help, parse=row.parse, place=place)
        ROUTES.append(Route(method, pattern, access, summary, handler, arguments, parameters, answer, body,
                            statuses or ((200,) if answer else (204,))))
        return handler

    return add


def match_route(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """(the request's route, its path parameters).  Raises: not_found, method_not_allowed."""
    import urllib.parse
    allowed = []
    for route in ROUTES:
        match = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.pattern), path)
        if match and route.method in (method, "GET" if method == "HEAD" else method):
            return route, {name: urllib.parse.unquote(text) for name, text in match.groupdict().items()}
        allowed += [route.method] if match else []
    if allowed:
        raise NexusError("method_not_allowed", f"{method} is not for {path}", hint=f"it takes {', '.join(allowed)}")
    raise NexusError("not_found", f"there is nothing at {format_line(path, 100)}", hint="GET / says what is")


def error_response(error: NexusError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.http_status == 401 else {}
    if error.kind == "method_not_allowed":
        headers["Allow"] = error.hint.replace("it takes ", "")
    return replace(json_response(error.to_json(), error.http_status), headers=headers)


def json_response(data: object, status: int = 200) -> Response:
    return Response(status, (encode_json(data) + "\n").encode())


# nexus has no service worker.  A browser that asks for one got it from another user's program on this port, and it
# would go on answering in place of nexus.  This script replaces it: it unregisters itself and reloads the open tabs.
WORKER_SCRIPT = b"""
addEventListener('install', () => skipWaiting());
addEventListener('activate', (event) => event.waitUntil((async () => {
  for (const name of await caches.keys()) await caches.delete(name);
  await registration.unregister();
  for (const tab of await clients.matchAll({type: 'window'})) tab.navigate(tab.url);
})()));
"""


@functools.lru_cache(maxsize=1)
def page_response(page: str) -> Response:
    """A page that may only run its own <script> and <style>, which the policy names by their hashes."""
    import base64
    import hashlib

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = (f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
              "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return Response(200, page.encode(), "text/html; charset=utf-8", {
        "Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"})


class Gate:
    """Decides who may call, and parses a call's arguments: a function from Request to Response."""

    def __init__(self, service: Service, token: str, page: str = "") -> None:
        """`page`: for browsers at /; without it they get JSON as others do."""
        import threading
        self.service, self.token, self.page = service, token, page
        self.forms = threading.Semaphore(MAX_FORMS)
        self.config = service.config.service
        self.refusal_logged_at, self.unlogged_refusals = float("-inf"), 0
        self.openapi: Response | None = None                        # cached after the first request

    def handle(self, request: Request) -> Response:
        if request.headers.get("service-worker") == "script":
            return Response(200, WORKER_SCRIPT, "text/javascript",
                            {"Cache-Control": "no-store", "Service-Worker-Allowed": "/"})
        known: Caller | None = None
        try:
            self.check_site(request)
            accepted = request.headers.get("accept", "").lower()
            if (self.page and request.path == "/" and request.method in ("GET", "HEAD") and "text/html" in accepted
                    and "application/json" not in accepted):
                return page_response(self.page)       # for anyone: it has no data
            route, path_parameters = match_route(request.method, request.path)
            known = None if route.access == "anyone" else self.identify(request)
            caller = known or Caller("", request.peer, is_owner=False)
            if route.access == "owner" and not caller.is_owner:
                raise NexusError("forbidden", f"{route.method} {route.pattern} is for {self.service.user}, "
                                 "whose service this is")
            response = route.handler(self, caller, **self.read_arguments(request, route, path_parameters))
            if not isinstance(response, Response):
                response = json_response(response) if route.answer else Response(204)
            if response.stream:
                response = replace(response, stream=self.check_stream(request, caller, response.stream))
            return response
        except Exception as error:
            return error_response(self.note_error(request, error, known))

    def read_arguments(self, request: Request, route: Route, path_parameters: Mapping[str, str]) -> dict[str, Any]:
        """The arguments of a route's handler.  Raises: usage; as read_json()."""
        known = [name for name, row in route.parameters.items() if row.place == "query"]
        for name in request.query:
            if name not in known:
                refuse(f"'{format_line(name, 40)}' is not a parameter of {route.pattern}", hint=suggest(name, known))
        found: dict[str, Any] = {"request": request} if "request" in route.arguments else {}
        places: dict[str, Mapping[str, Any]] = {
            "path": path_parameters, "query": request.query, "header": request.headers}
        for name, row in route.parameters.items():
            texts = places[row.place].get(name.lower())
            if texts is not None:
                found[argument_of(name)] = read_parameter(name, row, [texts] if isinstance(texts, str) else texts)
        if "body" in route.arguments:
            found["body"] = self.read_json(request)
        return found

    def note_error(self, request: Request, error: Exception, caller: Caller | None) -> NexusError:
        """The error for the caller.  Refusals, and faults of nexus, are logged too.  `caller`: None when unknown."""
        asked = f"{format_line(request.method, 20)} {format_line(request.path, 100)}"
        if not isinstance(error, NexusError):
            self.service.fail(f"answering {asked}", error)
            return NexusError("internal", "nexus failed to answer this", hint="nexus logs service")
        if error.http_status in (401, 403):
            peer = f"{request.peer} ({find_user(request.uid)})" if request.uid is not None else request.peer
            self.log_refusal(f"Refused {asked} from {caller.name if caller else peer}: {error.message}")
        return error

    def log_refusal(self, text: str) -> None:
        """Log one refusal in REFUSAL_INTERVAL_S: anybody can cause them.  Its line counts those that have none."""
        now = self.service.clock.monotonic()
        if now < self.refusal_logged_at + REFUSAL_INTERVAL_S:
            self.unlogged_refusals += 1
            return
        count, self.unlogged_refusals, self.refusal_logged_at = self.unlogged_refusals, 0, now
        self.service.log.warning("%s%s", text, f" ({count} more since the last such line)" if count else "")

    def check_site(self, request: Request) -> None:
        """Refuse requests that another site's page makes in the owner's browser.  Raises: forbidden."""
        host = request.headers.get("host", "")
        name = request.host_name
        is_ip = re.fullmatch(r"[\d.]+|\[[0-9a-f:.]+\]", name) is not None
        names = [known.lower() for known in (*LOCAL_HOSTS, *self.config.allowed_hosts, self.config.host)]
        own = self.service.node.lower().partition(".")[0]
        is_own = not is_loopback(self.config.host) and (is_ip or name.partition(".")[0] == own)
        if name not in names and not is_own:
            raise NexusError("forbidden", f"the Host '{format_line(host, 60)}' is not one by which nexus may be called",
                             hint="its owner can allow it: [service] allowed_hosts = "
                                  f"[{json.dumps(format_line(name, 60))}]; "
                                  "on this machine call it 127.0.0.1")
        is_change = request.method not in ("GET", "HEAD")
        own_sites = (f"http://{host}".lower(), f"https://{host}".lower())
        for header in ("origin", "referer") if is_change else ("origin",):
            site = request.headers.get(header)
            if site is not None and "/".join(site.lower().split("/")[:3]) not in own_sites:
                raise NexusError("forbidden", f"the {header.title()} '{format_line(site, 60)}' is another site's", "")
        # Another site's page cannot read a reply, but can tell whether it is an error; not so in a window of its own.
        kind = [request.headers.get(f"sec-fetch-{name}") for name in ("mode", "dest")]
        is_link = not is_change and kind == ["navigate", "document"]
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link:
            raise NexusError("forbidden", "another site's page sent this", hint="")

    def identify(self, request: Request) -> Caller:
        """The caller: of its token, or else the one that the kernel names.  Raises: unauthorized."""
        given = request.headers.get("authorization")
        if given is not None:
            bearer = re.fullmatch(r"[Bb]earer +(\S+)", given)
            return self.find_bearer(bearer[1] if bearer else "", request)
        is_here = is_loopback(request.peer)
        where = f"the owner's is in {self.service.layout.token_file}, others'" if is_here else (
            f"{self.service.user} makes it")
        hint = f"send Authorization: Bearer TOKEN; {where}: nexus token create USER"
        forwarded = [name for name in request.headers if name in FORWARDING or name.startswith("x-forwarded-")]
        if forwarded:
            raise self.describe_caller(request, f"a forwarded request ({forwarded[0]}) needs a token", hint)
        if request.host_name not in LOCAL_HOSTS:
            host = format_line(request.headers.get("host", ""), 60)
            raise self.describe_caller(request, f"a request to {host} needs a token", hint)
        if not is_loopback(self.config.host) and request.peer != SOCKET_PEER:
            raise self.describe_caller(
                request, f"nexus listens on {self.config.host}, so every request needs a token", hint)
        if request.uid != os.geteuid() or not is_loopback(request.peer):
            raise self.describe_caller(
                request, f"only {self.service.user}, on this machine, may call without a token", hint)
        return self.service.owner

    def describe_caller(self, request: Request, message: str, hint: str) -> NexusError:
        """Why a caller is refused; another user of this machine may have meant a nexus of his own."""
        if request.uid not in (None, os.geteuid()):
            message = f"this is the nexus of {self.service.user}: {message}"
            hint = f"{hint}; nexus open prints the address of your own"
        return NexusError("unauthorized", message, hint)

    def check_stream(self, request: Request, caller: Caller, stream: Iterator[bytes]) -> Iterator[bytes]:
        """Pass a stream on.  It raises where it ends early, so that nobody takes a part of it for the whole.

        Raises: unauthorized, when the caller's token is revoked meanwhile; internal; the stream's own errors.
        """
        path = self.service.layout.tokens_file
        try:
            for piece in stream:
                token = read_tokens(self.service.disk, path).get(caller.sha256) if caller.sha256 else None
                if caller.sha256 and not (token and token.is_good(self.service.clock.now())):
                    raise NexusError(
                        "unauthorized", f"{caller.user}'s token was good until now; it was revoked, or has expired")
                yield piece
        except Exception as error:
            raise self.note_error(request, error, caller) from None

    def find_bearer(self, text: str, request: Request) -> Caller:
        """The owner of a token.  Wrong tokens all take the same time.  Raises: unauthorized."""
        import hmac
        if hmac.compare_digest(text.encode(), self.token.encode()):
            return Caller(self.service.user, f"{self.service.user} (token, {request.peer})")
        tokens = read_tokens(self.service.disk, self.service.layout.tokens_file)
        token = tokens.get(hash_text(text))             # hashed: its time tells nothing
        if token and token.is_good(self.service.clock.now()):
            return Caller(token.user, f"{token.user} (token, {request.peer})", False, token.sha256)
        self.service.clock.sleep(WRONG_TOKEN_DELAY_S)
        raise self.describe_caller(
            request, "the token is not right", hint=f"{self.service.user} makes them: nexus token create USER")

    def read_json(self, request: Request) -> Any:
        """The body.  Raises: unsupported_media_type, usage, too_large."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise NexusError("unsupported_media_type",
                             f"the body must be application/json, not {format_line(kind, 60) or 'nothing'}",
                             hint="curl: -H 'Content-Type: application/json' -d '{\"command\": \"python train.py\"}'")
        return parse_json(request.read_body(), "the body")


class Calls(Gate):
    """One method for each route, except those that only pass on their arguments, which follow the class."""

    def find_job(self, id: str, caller: Caller) -> Job:
        """Raises: not_found."""
        return find_own_job(self.service.store.state, id, caller)

    def find_now(self, job: Job) -> Job | None:
        """The job as it is now; None when it is forgotten, though a new one may have its id."""
        now = self.service.store.state.jobs.get(job.id)
        return now if now and now.number == job.number else None

    @route("GET /", "user", "name and version of what answers here; a browser gets the dashboard", "Info")
    def get_info(self, caller: Caller) -> dict[str, Any]:
        if not caller.is_owner:
            return {"name": "nexus", "version": __version__, "user": caller.user}
        calls = [f"{route.method} {route.pattern}: {route.summary}" for route in ROUTES if route.summary]
        return {"name": "nexus", **self.service.views.info(), "calls": calls}

    @route("GET /status", "user", "GPUs, running jobs, and how many wait; with `after`: what has changed since then",
           "Status")
    def get_status(self, caller: Caller, after: int | None = None, status: Sequence[str] = (), user: str | None = None,
                   group: str | None = None, text: str | None = None, limit: int = 50) -> Response | dict[str, Any]:
        self.service.gpu_watch.first_probe.wait(SMI_WAIT_S + 5)
        if after is None:
            return self.service.views.status_for(caller)
        clock, store, overview = self.service.clock, self.service.store, self.service.overview
        choice = Choice(status=tuple(status), user=user, group=group, text=text)
        looked: tuple[int | None, float] = None, 0.0                # the version, and when to look again

        def find_news() -> dict[str, Any] | None:
            nonlocal looked
            if store.version == looked[0] and clock.monotonic() < looked[1]:
                return None
            changes = overview.find_changes(after, caller, choice, limit)
            looked = store.version, clock.monotonic() + NEWS_LOOK_S
            return changes if changes["is_whole"] or not changes.keys() <= UNIMPORTANT else None

        return self.reply_when(find_news, NEWS_TIMEOUT_S, lambda: overview.find_changes(after, caller, choice, limit))

    def reply_when(self, find_reply: Callable[[], object], timeout_s: float,
                   describe: Callable[[], object]) -> Response:
        """Reply when there is a reply; with another when that takes too long, or when the service ends."""
        def wait() -> Iterator[bytes]:
            clock = self.service.clock
            give_up_at = clock.monotonic() + timeout_s
            while (reply := find_reply()) is None:
                if clock.monotonic() >= give_up_at or self.service.is_stopping:
                    reply = describe()
                    break
                yield b""                           # checks whether the caller is still connected
                clock.sleep(LOG_LOOK_S)
            yield json_response(reply).body

        return Response(200, stream=wait())

    @route("GET /queue", "user", "pending jobs in the order they would start", "Job[]")
    def get_queue(self, caller: Caller, user: str | None = None, group: str | None = None, name: str | None = None,
                  text: str | None = None, limit: int | None = None, fields: Sequence[str] = ()) -> Response:
        choice = Choice(status=(PENDING,), user=user, group=group, name=name, text=text)
        return self.list_jobs(caller, choice, limit, fields)

    @route("POST /queue", "user", "add a job, or a list of jobs, all or none", "Added", body="Submissions")
    def post_queue(self, caller: Caller, body: Any, idempotency_key: str | None = None) -> dict[str, Any]:
        submissions = parse_submissions(body)
        is_dry = any(asked.dry_run for asked in submissions)
        if not caller.is_owner and any(asked.environment is not None for asked in submissions):
            raise NexusError("forbidden", f"the whole environment is for {self.service.user} to send",
                             hint='send what is to be set as "env"')
        added = self.service.admission.submit(submissions, caller, None if is_dry else idempotency_key, is_dry)
        waiting = [job for job in added.jobs if job.status == PENDING]
        lost = next((job for job in added.jobs if job.status != PENDING), None)
        warning = lost and f"job {lost.id} was cancelled at once: {lost.current.cause_line}"
        warning = self.find_delay(waiting) or warning
        if is_dry:
            shown = [name for name in ASKED if name not in ("umask", *Asked.FIELDS)]
            answer = {"dry_run": True, "jobs": [{name: getattr(job, name) for name in shown} for job in waiting]}
            new = {job.id for job in added.jobs}            # they exist only in the transaction that was tried
            known = [job_id for job_id in added.known if job_id not in new]
            warning = lost and f"it would be cancelled at once: {lost.current.cause_line}"
        else:
            answer = {"id": added.ids[0]} if isinstance(body, dict) and "command" in body else {"ids": added.ids}
            known = list(added.known)
        return {**answer, **({"known": known} if known else {}), **({"warning": warning} if warning else {})}

    def find_delay(self, jobs: Sequence[Job]) -> str:
        """Why new jobs will not start soon; "" when nothing is known to hold them up."""
        waiting = [job for job in jobs if job.status == PENDING]
        state = self.service.store.state
        holds = list_holds(state)
        held = next((holds[job.group] for job in waiting if job.group in holds), None)
        trouble = self.service.observer.observation.error if any(job.gpus for job in waiting) else None
        pause = find_pause(state)
        why = pause.detail if pause and waiting else held or trouble
        return f"it waits: {why}" if why else ""

    @route("PATCH /queue/{id}", "user", "change a job that has not ended, or its position", "Job", body="Edit")
    def patch_queue(self, caller: Caller, id: str, body: Any) -> dict[str, Any]:
        return self.describe(self.service.admission.edit(id, caller, **read_object(EDIT_KEYS, EDIT, body)))

    @route("GET /jobs", "user", "all jobs kept: finished, running, pending", "Job[]")
    def get_jobs(self, caller: Caller, status: Sequence[str] = (), user: str | None = None, group: str | None = None,
                 name: str | None = None, text: str | None = None, sort: str = "", limit: int | None = None,
                 fields: Sequence[str] = ()) -> Response:
        choice = Choice(status=status, user=user, group=group, name=name, text=text)
        return self.list_jobs(caller, choice, limit, fields, sort)

    def list_jobs(self, caller: Caller, choice: Choice, limit: int | None = None, fields: Sequence[str] = (),
                  sort: str = "",
                  rename: Callable[[dict[str, Any]], dict[str, Any]] = lambda job: job) -> Response:
        """The first jobs of a list, with Total-Count, the length of all of it."""
        import itertools
        state = self.service.store.state
        if {*choice.status} == {PENDING} and not sort:
            waiting, total = choose_pending(PendingQueue(state), caller, choice)
            jobs = list(itertools.islice(waiting, limit))
        else:
            jobs = choice.select_for(caller, list_jobs(state, choice.status or STATUSES))
            jobs, total = (sort_jobs(jobs, sort) if sort else jobs)[:limit], len(jobs)
        pieces, headers = self.service.views.encode_jobs(caller, jobs, fields, rename), {"Total-Count": str(total)}
        if len(jobs) <= JOBS_A_PIECE:
            return Response(200, b"".join(pieces), headers=headers)
        return Response(200, headers=headers, stream=pieces)

    @route("GET /jobs/{id}", "user", "one job", "Job")
    def get_job(self, caller: Caller, id: str, wait: int = 0) -> Response | dict[str, Any]:
        job = self.find_job(id, caller)
        if not wait or job.status in FINAL:
            return self.describe(job)
        return self.reply_when_over(job, wait, lambda now: self.describe(now or job))

    def reply_when_over(self, job: Job, timeout_s: float, describe: Callable[[Job | None], object]) -> Response:
        """Reply when a job is over, or when that takes too long."""
        def find_end() -> object:
            now = self.find_now(job)
            return describe(now) if now is None or now.status in FINAL else None

        return self.reply_when(find_end, timeout_s, lambda: describe(self.find_now(job)))

    def describe(self, job: Job) -> dict[str, Any]:
        return self.service.views.describe_jobs([job])[0]

    @route("POST /jobs/cancel", "user",
           "end jobs, pending or running, all or none; those that are over stay as they are", "Ended",
           body="CancelChoice", statuses=(202,))
    def post_cancel(self, caller: Caller, body: Any) -> Response:
        choice = read_object(CANCEL_KEYS, CANCEL, body)
        signal = choice.pop("signal", None)
        jobs = self.service.admission.cancel(Choice(**choice), caller, signal)
        keys = ("id", "status", "node", "unknown_since", "outcome", "cause_line")
        return json_response({
            "ids": [job.id for job in jobs], "jobs": self.service.views.describe_jobs(jobs, keys)}, 202)

    @route("POST /jobs/clear", "user",
           "forget finished jobs, with their logs: those named, or all of a group or status", "Ids", body="Choice")
    def post_clear(self, caller: Caller, body: Any) -> dict[str, Any]:
        return {"ids": self.service.housekeeping.clear(
            Choice(**read_object(CHOICE_KEYS, CHOICE, body)), caller)}

    @route("POST /jobs/retry", "user",
           "run finished jobs again, as new ones, all or none: those named; or of a group or status those that were "
           "not queued again since, the failed ones if none is given", "Ids", body="RetryChoice")
    def post_retries(self, caller: Caller, body: Any) -> dict[str, Any]:
        choice = read_object(RETRY_KEYS, RETRY, body)
        change = choice.pop("change", {})
        ids = self.service.admission.retry(Choice(**choice), caller, change)
        jobs = self.service.store.state.jobs
        warning = self.find_delay([jobs[job_id] for job_id in ids if job_id in jobs])
        return {"ids": ids, **({"warning": warning} if warning else {})}

    @route("GET /jobs/{id}/logs", "user",
           "what a job printed, or prints, in the order in which it came; for programs with Accept: "
           "application/x-ndjson", "text/plain")
    def get_logs(self, caller: Caller, request: Request, id: str, follow: bool = False, stream: str = "both",
                 tail: int | None = None, offset: Sequence[int] | None = None, timestamps: bool = False) -> Response:
        job, streams = self.find_job(id, caller), [STREAMS.index(stream)] if stream != "both" else [0, 1]

        def look() -> tuple[str, Sequence[Attempt], bool]:
            """(the folder, "" before the job has started; its attempts; whether it is over)."""
            now = self.find_now(job)
            return (now or job).log_dir or "", (now or job).attempts, now is None or now.status in FINAL

        folder, attempts, _ = look()
        reader = LogReader(self.service.disk, folder, streams, measure_now=self.service.log_watch.measure_now)
        reader.begin(attempts, offset or (0, 0), tail)
        # Who names an offset goes on where lines may have begun already.
        longest = 0 if tail is not None else MAX_BAR_BYTES if offset is None else None
        if NDJSON in request.headers.get("accept", ""):
            return self.send_logs(reader, look, log_entry_json, follow, NDJSON, longest)
        make_text = make_log_text(timestamps, len(streams) > 1)
        return self.send_logs(reader, look, make_text, follow, longest=longest)

    def send_logs(self, reader: LogReader, look: Callable[[], tuple[str, Sequence[Attempt], bool]],
                  make_text: Callable[[LogEntry, Sequence[Attempt]], bytes], is_followed: bool,
                  kind: str = "text/plain; charset=utf-8", longest: int | None = None) -> Response:
        """Stream logs from the reader's offsets; with `is_followed`, until the job is over.

        `look`: where the logs are, and whether the job is over.  `longest`: for read(), of what is there at first.
        """
        def pieces() -> Iterator[bytes]:
            is_on, limit = True, longest
            while is_on:
                reader.folder, attempts, was_over = look()
                found, text = False, bytearray()        # small entries are joined: each piece costs a system call
                for entry in reader.read(attempts, limit) if reader.folder else ():
                    found = True
                    text += make_text(entry, attempts)
                    if len(text) > MAX_LOG_LINE:
                        yield bytes(text)
                        text.clear()
                limit, is_on = None, is_followed and (found or not was_over)
                for entry in reader.flush() if not found or not is_on else ():
                    text += make_text(entry, attempts)
                yield bytes(text)
                if is_on:
                    self.service.clock.sleep(LOG_LOOK_S)

        headers = {"Log-Offset": ",".join(str(reader.offsets[stream]) for stream in reader.streams)}
        return Response(200, content_type=kind, headers=headers, stream=pieces())

    @route("GET /service/logs", "owner", "the service's log", "text/plain")
    def get_service_logs(self, caller: Caller, follow: bool = False, tail: int | None = None) -> Response:
        layout = self.service.layout
        reader = LogReader(self.service.disk, layout.home, (0,), [os.path.basename(layout.service_log)])
        reader.begin((), (0, 0), tail)
        return self.send_logs(reader, lambda: (reader.folder, (), self.service.is_stopping), make_log_text(), follow)

    @route("POST /service/stop", "owner", "end the service; jobs go on")
    def post_stop(self, caller: Caller) -> Response:
        self.service.log.info("Service stopped by %s", caller.name)
        return Response(204, after=self.service.stop)

    @route("GET /openapi.json", "anyone", "this description", "any")
    def get_openapi(self, caller: Caller) -> Response:
        if self.openapi is None:                        # cached: anyone may ask, as often as they like
            self.openapi = json_response(make_openapi(ROUTES, __version__))
        return self.openapi

    @route("GET /metrics", "user", "GPUs, nodes, jobs, their ends, and the checks of health, for Prometheus",
           "text/plain")
    def get_metrics(self, caller: Caller) -> Response:
        views = self.service.views
        end_counts = dict(self.service.end_counts)              # it grows as jobs end
        text = format_prometheus(list_metrics(views.status(), self.service.health.check(), end_counts))
        return Response(200, text.encode("utf-8", "replace"), "text/plain; version=0.0.4; charset=utf-8")

    @route("GET /health", "user", "each check with its reading; 503 when one is bad", "Health", statuses=(200, 503))
    def get_health(self, caller: Caller) -> Response:
        self.service.gpu_watch.first_probe.wait(SMI_WAIT_S + 5)
        health = self.service.health.check()
        if not caller.is_owner:
            health["checks"] = [{**check, "reading": ""} for check in health["checks"]]
        return json_response(health, 200 if health["is_healthy"] else 503)


class Api(Calls):
    """The REST API; under /api, uploaded scripts, in the words of an earlier server."""

    @route("POST /api/submit", "anyone", "queue a script: a form of code and config_file, with a token in that",
           "FormAdded", body="Form")
    def post_api_submit(self, caller: Caller, request: Request,
                        idempotency_key: str | None = None) -> Response | dict[str, Any]:
        """`caller` is nobody: a token in config_file identifies the sender, and is checked even if none is needed."""
        if request.body_length > MAX_FORM_BYTES:
            raise NexusError("too_large",
                             f"the form has {request.body_length} bytes; at most {MAX_FORM_BYTES} are taken",
                             hint="let the script read what is large from a file")
        try:
            place: Any = contextlib.nullcontext(self.identify(request))
        except NexusError:                      # the form must say who it is: strangers wait for each other
            place = self.forms
        with place:
            code, config = parse_submit_form(request.read_body(), request.headers.get("content-type", ""))
        caller = self.find_bearer(config["token"], request) if "token" in config else self.identify(request)
        try:
            return self.add_form(caller, code, config, idempotency_key)
        except NexusError as error:
            return error_response(self.note_error(request, error, caller))

    def add_form(self, caller: Caller, code: bytes, config: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        """Raises: forbidden; as submit()."""
        user = config.get("user_id", caller.user)
        if not caller.may_see(user):
            raise NexusError("forbidden", f"the token is {caller.user}'s, and user_id is {format_line(user, 60)}",
                             hint=f"user_id: \"{caller.user}\"")
        if user != caller.user:
            caller = Caller(user, f"{caller.name} for {format_line(user, 60)}")
        labels = tuple((name, config[name]) for name in ("competition_id", "project_id") if name in config)
        admission, name = self.service.admission, self.service.clock.new_token()
        asked = Asked({"labels": labels, **{name: value for name, value in config.items() if name in JOB_FIELDS},
                       "command": f"{find_python(self.service.environ)} main.py", "code": name})
        with self.service.housekeeping.keep_code(name, code):
            job = self.describe(self.find_job(admission.submit([asked], caller, key).ids[0], caller))
        return {"job_id": job["id"], "node_id": self.service.pool.number_nodes().get(job["node"]), "status": PENDING,
                "queue_position": job["position"] or 0}        # 0 for one that has started by now, too

    @route("GET /api/results/{id}", "user", "what it printed, and its exit code", "Results")
    def get_api_results(self, caller: Caller, id: str) -> dict[str, Any]:
        job = self.find_job(id, caller)
        disk, folder = self.service.disk, job.log_dir
        printed = {name: read_tail(disk, os.path.join(folder, f"{name}.log"), 0, MAX_RESULT_BYTES) if folder else ""
                   for name in STREAMS[:2]}
        return {"job_id": job.id, "status": job.shown_status, **printed, "exit_code": job.current.exit_code,
                "cause": job.current.cause, "cause_line": job.current.cause_line}

    @route("POST /api/cancel/{id}", "user", "take it out of the queue, or stop it", "Cancelled")
    def post_api_cancel(self, caller: Caller, id: str) -> Response:
        """Most jobs end at once, and the caller need not ask again."""
        job = self.find_job(id, caller)
        self.service.admission.cancel(Choice((job.id,), (PENDING, RUNNING)), caller)
        return self.reply_when_over(job, CANCEL_TIMEOUT_S, lambda now: {
            "job_id": job.id, "status": now.shown_status if now else CANCELLED})

    @route("GET /api/nodes", "user", "machines: their GPUs, what runs there, and what waits", "Node[]")
    def get_api_nodes(self, caller: Caller) -> list[dict[str, Any]]:
        """A job for any machine counts in this machine's queue, number 0; a job for one node in that node's."""
        service = self.service
        service.gpu_watch.first_probe.wait(SMI_WAIT_S + 5)
        now = service.clock.now()
        gpus = service.views.list_gpus(service.store.state)
        running = service.running_jobs()
        waiting = service.store.state.pending.values()
        bad = [check for check in service.health.check()["checks"]
               if not check["is_ok"] and not check["name"].startswith("node ")]

        def describe(number: int, name: str) -> dict[str, Any]:
            own = [gpu for gpu in gpus if gpu["node"] == name]
            run = [job for job in running if (job.current.node or service.node) == name]
            wait = [job for job in waiting
                    if (job.only_node if job.only_node in service.pool.nodes else service.node) == name]
            times = [None if job.expected_time is None else
                     max(0.0, job.expected_time - service.outcomes.find_runtime_s(job, now)) for job in run]
            times += [job.expected_time for job in wait]
            is_well = not bad if number == 0 else service.pool.nodes[name].trouble is None
            return {"node_id": number, "name": name, "gpus": len(own),
                    "free_gpus": sum(gpu["is_available"] for gpu in own),
                    "running_jobs": len(run), "pending_jobs": len(wait),
                    "queue_seconds": None if None in times else round(sum(filter(None, times)), 3),
                    "is_healthy": is_well}
        return [describe(number, name) for number, name in enumerate([service.node, *service.pool.nodes])]

    @route("GET /api/jobs", "user", "all jobs kept: finished, running, pending", "Submitted[]")
    def get_api_jobs(self, caller: Caller, user_id: str | None = None, status: Sequence[str] = (),
                     limit: int | None = None) -> Response:
        nodes = self.service.pool.number_nodes()
        return self.list_jobs(caller, Choice(status=status, user=user_id), limit, fields=SUBMITTED_FROM,
                              rename=lambda job: submitted_json(job, nodes))


# Routes that only pass on their arguments

route("GET /groups", "user", "jobs by group: how many wait, run, have ended, and what holds them up", "GroupInfo[]")(
    lambda api, caller: api.service.views.list_groups(caller))
route("GET /usage", "user", "jobs, GPU-hours and failures of each user, or of each group of one's own", "Usage[]")(
    lambda api, caller, since=None, by="user": api.service.views.list_usage(caller, since, by))
route("DELETE /queue/{id}", "user", "take a pending job out of the queue")(
    lambda api, caller, id: api.service.admission.cancel(Choice((id,), (PENDING,)), caller))
route("DELETE /jobs/{id}", "user", "kill a running job")(
    lambda api, caller, id: api.service.admission.cancel(Choice((id,), (RUNNING,)), caller))
route("GET /jobs/{id}/why", "user", "why a job waits, GPU by GPU", "Why")(
    lambda api, caller, id: api.service.views.explain(id, caller))
route("POST /service/pause", "owner", "start nothing new, or nothing of a group")(
    lambda api, caller, group=None: api.service.admission.set_paused(True, caller.name, group))
route("POST /service/resume", "owner", "start jobs again")(
    lambda api, caller, group=None: api.service.admission.set_paused(False, caller.name, group))
route("POST /gpus/{index}/pause", "owner", "give a GPU no new job")(
    lambda api, caller, index: api.service.gpu_watch.set_gpu_paused(index, True, caller.name))
route("POST /gpus/{index}/resume", "owner", "give it jobs again")(
    lambda api, caller, index: api.service.gpu_watch.set_gpu_paused(index, False, caller.name))
route("GET /nodes", "owner", "this machine and the others that jobs are given to", "NodeInfo[]")(
    lambda api, caller: api.service.pool.list_nodes())
route("POST /nodes", "owner", "give jobs to another machine too, on which nexus is (nexus node add puts it there)",
      body="NodeAdded")(
    lambda api, caller, body: api.service.pool.add_node(parse_node(body), caller.name))
route("DELETE /nodes/{name}", "owner", "give a machine no more jobs; it is forgotten after its last one")(
    lambda api, caller, name, force=False: api.service.pool.remove_node(name, force, caller.name))
route("GET /docs", "anyone", "openapi.json to read, with a form to try each call", "text/html")(
    lambda api, caller: page_response(api.page))                # the page looks at its address
route("GET /api/status/{id}", "user", "where a submitted script stands", "Submitted")(
    lambda api, caller, id: submitted_json(
        api.describe(api.find_job(id, caller)), api.service.pool.number_nodes()))


def find_attempt(entry: LogEntry, attempts: Sequence[Attempt]) -> Attempt:
    return next((one for one in attempts if one.number == entry.attempt), NO_ATTEMPT)


def log_entry_json(entry: LogEntry, attempts: Sequence[Attempt]) -> bytes:
    """Bytes that are no UTF-8 become lone surrogates, as with Python's surrogateescape."""
    attempt = find_attempt(entry, attempts)
    return (json.dumps({
        "attempt": entry.attempt, "started_at": format_time(attempt.started_at), "has_earlier": any(attempt.log_start),
        "stream": STREAMS[entry.stream], "at": format_tenths(entry.at), "end": entry.end,
        "text": entry.content.decode("utf-8", "surrogateescape")}) + "\n").encode()


def stamp_lines(content: bytes, stamp: str, is_at_line: bool) -> bytes:
    """Put the stamp before each line; not before the first, where that continues a line."""
    mark = stamp.encode()
    return (mark if is_at_line else b"") + re.sub(rb"\n(?!\Z)", b"\n" + mark, content)


def format_tenths(at: float | None) -> str | None:
    """A UTC time to a tenth of a second."""
    return None if at is None else f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at * 10) % 10}Z"


def make_log_text(has_times: bool = False, is_both: bool = False) -> Callable[[LogEntry, Sequence[Attempt]], bytes]:
    """Make the function that turns log entries into text.  `is_both`: of both streams, with a line between attempts."""
    former, is_line_whole, last = 0, True, [b"\n", b"\n"]       # `last`: the last byte of each stream

    def make_text(entry: LogEntry, attempts: Sequence[Attempt]) -> bytes:
        nonlocal former, is_line_whole
        heading, content = b"", entry.content
        attempt = find_attempt(entry, attempts)
        if is_both and any(attempt.log_start) and entry.attempt != former:
            began = format_tenths(attempt.started_at) or "-"
            heading = (b"" if is_line_whole else b"\n") + f"---- attempt {entry.attempt}, {began} ----\n".encode()
        former = entry.attempt
        if has_times:
            is_at_line = last[entry.stream] in b"\r\n" or bool(heading)
            content = stamp_lines(content, f"{format_tenths(entry.at) or '-':22} ", is_at_line)
        last[entry.stream] = content[-1:]
        is_line_whole = content.endswith(b"\n")
        return heading + content

    return make_text


SINGLE_HEADERS = ("host", "origin", "authorization", "content-type", "content-length")
if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
else:                               # the service adds them: importing http.server would cost each command 25 ms
    BaseHTTPRequestHandler = ThreadingHTTPServer = object


class Handler(BaseHTTPRequestHandler):
    """One request on a connection, its reply, and the end.  http.server reads the head, with its own limits."""
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"            # for what is no request: the reply has a head
    server: Listener
    client_address: Any                             # (the peer's address, its uid), from Listener
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        connections = self.server.server.connections[self.client_address[1] == os.geteuid()]
        if self.connection in connections:          # else it came by the owner's socket, or has just been shut down
            connections[self.connection] = True
        try:
            response = self.server.api.handle(self.read_request())
        except NexusError as error:
            response = error_response(error)
        try:
            self.send(response)
            self.linger()
        except (OSError, NexusError):           # after a partial reply: a reset shows that it is not complete
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        finally:
            if response.after:
                response.after()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what http.server cannot read, or a method that no call has."""
        kind = "method_not_allowed" if code == 501 else "usage"
        why = f"this is no request of HTTP: {format_line(message or '', 200)}"
        self.send(error_response(NexusError(kind, why, hint="")))
        self.linger()

    def version_string(self) -> str:
        return "nexus"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass                                        # Gate.note_error() logs what matters

    def read_request(self) -> Request:
        """Raises: usage; length_required."""
        import urllib.parse
        headers = {name.lower(): text.strip(" \t") for name, text in self.headers.items()}
        # A line that http.server does not understand ends the head for it, and would hide the lines after it.
        is_torn = self.headers.get_payload() or self.headers.preamble or self.headers.epilogue
        if is_torn or any(len(self.headers.get_all(name, [])) > 1 for name in SINGLE_HEADERS):
            refuse(f"each line of a head is `Name: text`, and {', '.join(SINGLE_HEADERS)} stand there once", hint="")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            raise NexusError("length_required", "a body needs a Content-Length", hint="do not send it in chunks")
        if not re.fullmatch("[0-9]{1,18}", length):
            raise NexusError("usage", "Content-Length must be one number")
        path, _, rest = re.sub("^https?://[^/?]*", "", self.path).partition("?")
        query = urllib.parse.parse_qs(rest, keep_blank_values=True)
        peer, uid = self.client_address
        return Request(self.command, path, query, headers, lambda: self.read_body(int(length)), peer, uid, int(length))

    def read_body(self, expected: int) -> bytes:
        """Raises: usage; too_large."""
        if expected > MAX_BODY_BYTES:
            raise NexusError("too_large", f"the body has {expected} bytes; at most {MAX_BODY_BYTES} are taken",
                             hint="send fewer jobs at once")
        clock, body = self.server.api.service.clock, bytearray()
        give_up_at = clock.monotonic() + REQUEST_TIMEOUT_S + expected / BODY_BYTES_PER_S
        try:
            while len(body) < expected:
                piece = self.rfile.read1(min(65536, expected - len(body)))
                if not piece or clock.monotonic() > give_up_at:
                    refuse(f"the body {'is too slow' if piece else 'ended'}: {len(body)} of {expected} bytes", hint="")
                body += piece
        except OSError as error:
            raise NexusError("usage", f"the body of {expected} bytes did not come: {error.strerror or error}") from None
        return bytes(body)

    def send(self, response: Response) -> None:
        """Send a reply.  Raises: OSError; the stream's own errors."""
        import select
        is_chunked = response.stream is not None and self.request_version == "HTTP/1.1"
        headers = {"X-Content-Type-Options": "nosniff",
                   # Another site's page gets neither replies nor a hold on a window that shows one.
                   "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
                   "Vary": "Accept, Authorization", "Cache-Control": "no-store", "Connection": "close",
                   **response.headers}
        if response.status != 204:
            headers["Content-Type"] = response.content_type
        if is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif response.stream is None and response.status != 204:
            headers["Content-Length"] = str(len(response.body))
        self.connection.settimeout(IDLE_TIMEOUT_S)
        self.send_response(response.status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(response.body)
        poll = select.poll()                    # select() cannot take descriptors above 1023
        poll.register(self.connection, select.POLLRDHUP)
        for piece in response.stream or ():
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
            elif poll.poll(0):                  # the caller has closed its end
                raise ConnectionResetError
        self.wfile.write(b"0\r\n\r\n" if is_chunked else b"")

    def linger(self) -> None:
        """Let the caller finish sending what is not wanted: a reset would destroy the reply."""
        clock = self.server.api.service.clock
        give_up_at = clock.monotonic() + LINGER_S
        self.connection.settimeout(LINGER_S)
        with contextlib.suppress(OSError):      # the caller is gone, or sends nothing more
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(65536) and clock.monotonic() < give_up_at:
                pass


def listen(host: str, port: int, offered: Mapping[str, socket.socket] = {},
           former_port: int | None = None) -> dict[str, socket.socket]:
    """Listen on `host` and on everything that localhost may lead to, or on nothing; return {address: its socket}.

    `offered`: sockets that listen already, by address.  `former_port`: of this user's service that is about to end;
    what it has of these addresses is left out.
    Another user with such an address could answer http://localhost in the owner's browser.  That page's requests to
    nexus would come from nexus's own address, and could not be told from the owner's.
    Raises: conflict, naming who has the port; usage, when there is no such address.
    """
    import errno
    first = address = LOOPBACK[0] if host == "localhost" else host
    unused, opened, covered = dict(offered), dict[str, socket.socket](), tuple[str, ...]()
    try:
        for address in (first, *LOOPBACK):
            if address in covered:
                continue
            try:
                opened[address] = unused.pop(address) if address in unused else listen_on(address, port)
            except OSError as error:
                is_held = (error.errno == errno.EADDRINUSE and port == former_port
                           and find_socket_uid((address, port), None) in (None, os.geteuid()))
                # None: of 0.0.0.0 or ::, or of a name, it has a part.
                # A machine without IPv6 has no ::1, and neither has anybody else there.
                is_missing = error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and address != first
                if not is_held and not is_missing:
                    raise
            if address == first:
                name, port = unmap(opened[first].getsockname()[:2]) if opened else (first, port)
                covered = {"0.0.0.0": LOOPBACK[:1], "::": LOOPBACK}.get(name, (name,))      # `::` takes IPv4 too
        return opened
    except (OSError, OverflowError, TypeError, ValueError) as error:            # or a name that cannot be looked up
        for listener in opened.values():        # before it is looked up who has the port
            listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            holders = [find_socket_uid((host, port), None) for host in (address, "0.0.0.0", "::", *LOOPBACK)]
            users = " or ".join(sorted({find_user(uid) for uid in holders if uid is not None}))
            raise NexusError("conflict", f"port {port} on {address} is in use" + (f" by {users}" if users else ""),
                             hint="set another one: nexus config edit, [service] port") from None
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]
        raise NexusError("usage", f"cannot listen on {address}, port {port}: {reason}",
                         hint="nexus config edit, [service] host and port") from None
    finally:
        for listener in unused.values():
            listener.close()


def find_port(disk: Disk, layout: Layout, config: ServiceConfig) -> int | None:
    """The port that the service must have: that of the configuration, else of the first start; None: it chooses one.

    None is chosen where other machines call: they know it.  Raises: unavailable.
    """
    if is_given(config, "port") or not is_loopback(config.host):
        return config.port
    kept = guess_number((read_text(disk, layout.port_file) or "").strip())
    return int(kept) if fits_alone(ServiceConfig.FIELDS["port"].schema, kept) else None


def keep_port(disk: Disk, layout: Layout, config: ServiceConfig, port: int) -> None:
    """Have the same one at each start, if it was chosen.  Raises: unavailable."""
    if find_port(disk, layout, config) is None:
        write_atomic(disk, layout.port_file, [f"{port}\n"])


def open_port(disk: Disk, layout: Layout, config: ServiceConfig, act: Callable[[int], T]) -> T:
    """act(port), which listens there: on the port that the service must have, or else on the first that is free.

    Raises: conflict, with what chooses another one; as `act`.
    """
    port = find_port(disk, layout, config)
    for each in PORTS if port is None else (port,):
        try:
            return act(each)
        except NexusError as error:
            if error.kind != "conflict" or is_given(config, "port") or not is_loopback(config.host):
                raise
            refusal = error
    if port is None:
        raise NexusError("conflict", f"all ports from {PORTS[0]} to {PORTS[-1]} are in use", refusal.hint)
    raise NexusError("conflict", refusal.message,
                     hint=f"rm {quote(layout.port_file)} has the next start choose another one")


def listen_on(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024,
                                dualstack_ipv6=":" in address and address != LOOPBACK[1])


MAX_SOCKET_PATH = 107           # bytes: the kernel's limit


def open_socket_path(path: str) -> tuple[str, int]:
    """(a socket path that the kernel takes, the descriptor of its folder that it needs, or -1).  Raises: OSError."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path, -1
    folder = os.open(os.path.dirname(path), os.O_PATH)
    return f"/proc/{os.getpid()}/fd/{folder}/{os.path.basename(path)}", folder


def listen_to_own(disk: Disk, layout: Layout) -> tuple[socket.socket, str]:
    """(api.sock for the owner's programs, the path by which they reach it).  Raises: unavailable."""
    return listen_at(disk, layout.socket_file)


def listen_at(disk: Disk, path: str) -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX)
    with disk_errors("make", path):
        remove_file(disk, path)
        path, _ = open_socket_path(path)                # its descriptor stays open
        listener.bind(path)
        disk.chmod(path, 0o600)
        listener.listen(1024)
    return listener, path


# `nexus restart` listens on a new address before the old service ends, and gives the sockets to the new one: nobody
# takes the address in between.  Where the old service has the address, the new one opens it after the old one's end.

OFFER_TIMEOUT_S = 5.0


@contextlib.contextmanager
def offered(disk: Disk, layout: Layout, opened: Mapping[str, socket.socket]) -> Iterator[None]:
    """Give sockets, {address: socket}, to the service that starts in the block.  Raises: unavailable."""
    import threading
    if not opened:
        yield
        return
    listener, _ = listen_at(disk, layout.offer_file)

    def give() -> None:
        with contextlib.suppress(OSError):          # it is closed: no service has asked
            connection, _ = listener.accept()
            with connection:
                handles = [each.fileno() for each in opened.values()]
                socket.send_fds(connection, [encode_json(list(opened)).encode()], handles)

    threading.Thread(target=give, daemon=True).start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)     # so that give() ends
        for each in (listener, *opened.values()):
            each.close()
        remove_file(disk, layout.offer_file)


def take_offered(disk: Disk, layout: Layout, port: int) -> dict[str, socket.socket]:
    """What a `nexus restart` offers: {address: a socket that listens there, on this port}."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(OFFER_TIMEOUT_S)
        if find_status(disk, layout.offer_file):
            line.connect(open_socket_path(layout.offer_file)[0])
            if find_peer_uid(line, None) != os.geteuid():
                return {}
            text, handles, *_ = socket.recv_fds(line, 4096, 8, socket.MSG_CMSG_CLOEXEC)
            found = zip(load_json(text.decode()), [socket.socket(fileno=handle) for handle in handles])
            return {address: one for address, one in found if one.getsockname()[1] == port}
    return {}


class Listener(ThreadingHTTPServer):
    """A listening socket.  Each connection has a thread."""
    daemon_threads = True

    def __init__(self, server: Server, opened: socket.socket, handler: type[Handler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()                         # the one that http.server made
        self.socket, self.server, self.api = opened, server, server.api

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except OSError:                             # as when no descriptor is left
            self.api.service.clock.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        peer, uid = SOCKET_PEER, find_peer_uid(request, client_address)
        if request.family != socket.AF_UNIX:
            peer = unmap(client_address[:2])[0]
            watch_line(request, IDLE_TIMEOUT_S)
            if self.server.tls:                     # the handshake comes with the first read
                request = self.server.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            if not self.admit(request, self.server.connections[uid == os.geteuid()]):
                request.close()
                return
        super().process_request(request, (peer, uid))

    def admit(self, request: socket.socket, connections: dict[socket.socket, bool]) -> bool:
        """Whether there is room for a connection.  The oldest that has sent no request gives way."""
        if len(connections) >= MAX_CONNECTIONS:
            idle = next((one for one, has_asked in list(connections.items()) if not has_asked), None)
            if idle is None:
                return False
            del connections[idle]                   # now: it must not be chosen a second time
            with contextlib.suppress(OSError):      # its thread notices
                socket.socket.shutdown(idle, socket.SHUT_RDWR)
        connections[request] = False
        return True

    def shutdown_request(self, request: Any) -> None:
        for connections in self.server.connections.values():
            connections.pop(request, None)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):         # else: the caller has gone
            self.api.service.fail("a connection", error)


class Server:
    """Listens on the port and on the owner's socket."""

    def __init__(self, api: Api, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Raises: conflict, when the port is taken; usage, when there is no such address."""
        import http.server
        self.api, self.tls = api, tls
        opened = list(listen(host, port, take_offered(api.service.disk, api.service.layout, port)).values())
        self.port: int = opened[0].getsockname()[1]
        own, self.socket_path = listen_to_own(api.service.disk, api.service.layout)
        # {are they the owner's: {a connection over TCP: whether it has sent its request}}, the oldest first.  Others
        # take none from the owner, and neither leave the jobs without descriptors.
        self.connections: dict[bool, dict[socket.socket, bool]] = {True: {}, False: {}}
        handler = type("Handler", (Handler, http.server.BaseHTTPRequestHandler), {})
        listener = type("Listener", (Listener, http.server.ThreadingHTTPServer), {})
        self.listeners: list[Listener] = [listener(self, each, handler) for each in (*opened, own)]

    def serve(self) -> None:
        import threading
        for listener in self.listeners:
            threading.Thread(target=listener.serve_forever, name="http", daemon=True).start()


def find_peer_uid(connection: socket.socket, address: Any) -> int | None:
    """The uid at the other end of a connection; None: not on this machine, closed, or unknown.

    A port is reused: what a sender that is gone has sent must not count as the present caller's.  When the sender is
    gone, our end is not established any more, so that is checked last.
    """
    if connection.family == socket.AF_UNIX:
        return read_credentials(connection)[1]
    uid = find_socket_uid(unmap(address[:2]), unmap(connection.getsockname()[:2]))
    is_open = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED       # tcp(7)
    return uid if is_open else None


def read_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected a Unix socket, or that listens at its other end.  Source: unix(7)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)      # pid, uid, gid
    return int.from_bytes(credentials[:4], sys.byteorder), int.from_bytes(credentials[4:8], sys.byteorder)


def load_tls(config: ServiceConfig) -> ssl.SSLContext | None:
    """The context for https; None for http.  Raises: usage."""
    if not config.tls_cert and not config.tls_key:
        return None
    import ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cert, key = [os.path.abspath(os.path.expanduser(path)) for path in (config.tls_cert, config.tls_key)]
    try:
        context.load_cert_chain(cert, key, lambda: "")
    except (OSError, ValueError) as error:              # SSLError is an OSError
        files = f"tls_cert {config.tls_cert} and tls_key {config.tls_key}"
        reason = getattr(error, "strerror", None) or error
        raise NexusError("usage", f"[service] {files} cannot be used: {reason}",
                         hint="both must be PEM files that can be read, of one key, without a passphrase") from None
    return context


def read_token(disk: Disk, layout: Layout) -> str | None:
    """The owner's token; None: there is none yet.  Raises: unavailable."""
    token = (read_text(disk, layout.token_file) or "").strip()
    return token if len(token) >= 16 else None


def keep_token(disk: Disk, layout: Layout, token: str) -> None:
    """Write the owner's token, unless there is one.  Raises: unavailable."""
    if read_token(disk, layout) is None:
        write_atomic(disk, layout.token_file, [token + "\n"])


def make_log(layout: Layout, config: ServiceConfig) -> logging.Logger:
    """service.log, rotated.  A full disk only loses lines of it."""
    import logging
    import logging.handlers
    import stat
    logging.raiseExceptions = False

    class LogFile(logging.handlers.RotatingFileHandler):
        """Makes a line once, and writes it at once."""

        def format(self, record: logging.LogRecord) -> str:
            return format_log_json(record) if config.log_format == "json" else super().format(record)

        def emit(self, record: logging.LogRecord) -> None:
            try:
                line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
                self.stream = self.stream or self._open()
                status = os.fstat(self.stream.fileno())
                if 0 < self.maxBytes <= status.st_size + len(line) and stat.S_ISREG(status.st_mode):
                    self.doRollover()
                    self.stream = self.stream or self._open()
                os.write(self.stream.fileno(), line)
            except Exception:
                self.handleError(record)

    handler = LogFile(layout.service_log, maxBytes=int(config.log_max_mb * 2**20), backupCount=config.log_backups,
                      encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging._srcfile = None         # where a line was logged, and by which process,
    logging.logProcesses = logging.logMultiprocessing = False       # nobody reads
    log = logging.getLogger("nexus")
    log.handlers = [handler]
    log.setLevel(config.log_level)
    log.propagate = False
    return log


def format_log_json(record: logging.LogRecord) -> str:
    """One object a line."""
    import logging
    names = ("job_id", "gpu_ids", "required_gpus", "attempt")
    facts = {name: getattr(record, name) for name in names if hasattr(record, name)}
    if record.exc_info:
        facts["traceback"] = logging.Formatter().formatException(record.exc_info)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return encode_json({
        "timestamp": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname, "logger": record.name,
        "thread": record.threadName, "message": record.getMessage(), **facts})


LOCK_TIMEOUT_S = 10.0           # for a service that is ending, or just starting


class RunsAlready(NexusError):
    """Another service has this home."""


# What functions of the sections above import, or lead to: the Python that runs the service may be updated or removed.
MODULES = (
    "ast", "base64", "collections", "csv", "datetime", "difflib", "encodings.idna", "encodings.utf_8_sig", "errno",
    "fcntl", "hashlib", "heapq", "hmac", "http.server", "itertools", "logging.handlers", "pwd", "queue",
    "resource", "select", "shutil", "signal", "stat", "statistics", "struct", "subprocess", "tempfile", "textwrap",
    "threading", "tokenize", "traceback", "unicodedata", "urllib.parse", "xml.etree.ElementTree", "zlib")


def import_modules() -> None:
    """Raises: unavailable, when this Python lacks one."""
    import importlib
    try:
        for name in MODULES:
            importlib.import_module(name)
    except ImportError as error:
        raise NexusError("unavailable", f"{sys.executable} cannot run the service: {error}",
                         hint="it is not a complete Python: install the rest of it, or use another one") from None


def serve(layout: Layout, config: Config, environ: Mapping[str, str], page: str, config_file: str) -> None:
    """Run the service until it is stopped.  `page`: for browsers; `config_file`: where `config` is from.

    Raises: conflict, when a service runs; unavailable; usage.
    """
    import_modules()
    clock, disk = Clock(), Disk()
    environ = {"NEXUS_UMASK": f"{os.umask(0o077):03o}", **environ,
               "PATH": complete_path(disk, layout, environ.get("PATH"))}
    os.environ["PATH"] = environ["PATH"]            # for what is run without an environment of its own
    tls = check_start(disk, layout, config)
    if environ.get("NEXUS_ROLE") != "service":      # a person wants it; a supervisor only repeats an earlier wish
        mark_stopped(disk, layout, False)
    lock = take_service_lock(disk, layout, clock)
    log = make_log(layout, config.service)
    store = Store(layout, clock, disk, log)
    store.recover()
    token = read_token(disk, layout) or clock.new_token()
    machine = Machine(config, layout, disk, store.service_id)
    service = Service(config, layout, store, machine, clock, disk, log, environ)
    api = Api(service, token, page)
    server = open_port(disk, layout, config.service, lambda port: Server(api, config.service.host, port, tls))
    set_signals(service)
    announce(service, server, token, "https" if tls else "http", config_file)
    # Checked after api.sock is there; `nexus stop` does the reverse, so that one of the two sees the other.
    if find_status(disk, layout.stopped_file):
        service.withdraw()
        return
    log.info("Service started: nexus %s (%s), pid %d, %s", __version__, service.hash, os.getpid(), service.url)
    if service.former_python:
        log.warning("%s runs it, since %s cannot any more", sys.executable, service.former_python)
    service.housekeeping.write_soon(service.pool.begin_nodes)       # before the first request can name a node
    server.serve()
    service.run(lock)
    if not service.is_stopping:
        return
    mark_stopped(disk, layout, True)
    for act in (store.save_checkpoint, service.withdraw):
        try:
            act()
        except (OSError, NexusError) as error:
            log.warning("At the end: %s", error)
    log.info("Service ended; running jobs go on")


def set_signals(service: Service) -> None:
    import signal
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, lambda *_: None)       # not SIG_IGN, which jobs would inherit for ever
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def announce(service: Service, server: Server, token: str, scheme: str, config_file: str) -> None:
    """Write what clients find a service by, and what its next start needs; on a full disk as soon as there is room."""
    layout, config, disk = service.layout, service.config.service, service.disk
    keep = service.housekeeping.write_soon
    host = f"[{config.host}]" if ":" in config.host else config.host
    service.url = f"{scheme}://{host}:{server.port}"
    keep(lambda: keep_port(disk, layout, config, server.port))
    keep(lambda: keep_token(disk, layout, token))
    keep(lambda: keep_programs(disk, layout, service.environ["PATH"]))
    if os.path.dirname(config_file) != layout.cache_dir:        # not a copy, with which a service was started again
        keep(lambda: remember_config(disk, layout, config_file))
    copies = copy_start(disk, layout, config_file)
    keep(lambda: keep_copies(disk, copies))
    own = service.machine.processes.find(os.getpid())
    running = json.dumps({
        "pid": os.getpid(), "started": own.started if own else 0, "boot_id": service.machine.boot_id,
        "url": service.url, "port": server.port, "socket": server.socket_path, "config": config_file,
        "version": __version__, "hash": service.hash, "config_copy": copies[-1][0], "machine": service.store.host})
    keep(lambda: write_if_changed(disk, layout.service_file, running + "\n"))


def copy_start(disk: Disk, layout: Layout, config_file: str) -> list[tuple[str, str]]:
    """[(a path for a copy, its text)] of what this service was started with: its nexus.py, its configuration."""
    code, settings = read_text(disk, os.path.abspath(__file__)) or "", read_text(disk, config_file) or ""
    return [(os.path.join(layout.cache_dir, f"nexus-{hash_code(text.encode())}{kind}"), text)
            for text, kind in ((code, ".py"), (settings, ".toml"))]


def keep_copies(disk: Disk, copies: Sequence[tuple[str, str]]) -> None:
    """Keep what this service was started with, as both files may change while it runs.  Raises: unavailable.

    Those of the service before it stay too: `nexus restart` starts that one again if this one fails.
    """
    for path, text in copies:
        folder, kind = os.path.dirname(path), os.path.splitext(path)[1]
        make_folder(disk, folder)
        write_if_changed(disk, path, text)
        with disk_errors("write", path):
            disk.touch(path)                        # the newest are kept
            kept = find_files(disk, os.path.join(folder, "nexus-"), kind)
            for other in sorted(kept, key=lambda each: disk.stat(each).st_mtime)[:-2]:
                disk.unlink(other)


def check_start(disk: Disk, layout: Layout, config: Config) -> ssl.SSLContext | None:
    """Check what would keep a service from starting; return the context for https.  Raises: why it cannot start."""
    secure_folders(disk, layout)
    with disk_errors("lock", layout.lock_file), opened(disk, layout.lock_file, os.O_RDWR | os.O_CREAT):
        pass                                    # the one file that it must have: said here, not by a log that is full
    running = read_json(disk, layout.service_file)
    if running and running.get("machine") != read_machine():
        refuse_elsewhere(disk, layout, running)
        remove_file(disk, layout.service_file)  # else it would seem to belong to this machine, which has the lock now
    if config.jobs.max_memory_gb and config.jobs.launcher != "slurm" and not import_psutil():   # Slurm limits memory
        raise NexusError("usage", "[jobs] max_memory_gb needs psutil, to see what jobs use, and "
                         f"{sys.executable} does not have it",
                         hint=f"{sys.executable} -m pip install psutil; or take max_memory_gb out of config.toml")
    return load_tls(config.service)


def take_service_lock(disk: Disk, layout: Layout, clock: Clock) -> int:
    """Lock the home for as long as this process lives; return the lock's descriptor.

    Raises: conflict, when a service runs.  One that has removed its service.json is about to end.
    """
    give_up_at = clock.monotonic() + LOCK_TIMEOUT_S
    while True:
        with disk_errors("lock", layout.lock_file):
            lock = take_lock(disk, layout.lock_file)
        if lock is not None:
            return lock
        running = read_json(disk, layout.service_file)
        if (running and is_alive(running)) or clock.monotonic() > give_up_at:
            pid = (running or {}).get("pid", "unknown")
            raise RunsAlready("conflict", f"a nexus service for {layout.home} runs already (pid {pid})",
                              hint="nexus stop ends it; nexus restart starts it anew")
        clock.sleep(0.02)


def run_agent(home: str, config: Config, head: str, environ: Mapping[str, str]) -> None:
    """Run the agent of a head, given as its service_id, in the place of an earlier one.  Raises: unavailable, usage."""
    import signal
    import_modules()
    disk = Disk()
    check({"type": "string", "pattern": r"^\d+-[0-9a-f]{8}$"}, head, "a head's id")
    # Machines may share a home directory; and one that jobs run on may get another name.
    folder = os.path.join(home, "agent", f"{head}-{read_machine().partition(CONTAINER)[0]}")
    boot = f"{read_boot_id()} {find_pid_namespace()}"
    for other in find_files(disk, os.path.join(home, "agent", f"{head}-")):
        if read_text(disk, os.path.join(other, "boot")) == boot:
            folder = other
    layout = Layout(folder, os.path.join(folder, "state.json"), os.path.join(folder, "jobs"))
    with disk_errors("make", folder):
        disk.makedirs(layout.log_dir)
    environ = {**environ, "PATH": complete_path(disk, layout, environ.get("PATH"))}
    os.environ["PATH"] = environ["PATH"]            # ssh runs it without a login shell
    lock = take_lock(disk, layout.lock_file)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if lock is None:
            with contextlib.suppress(OSError, ValueError):
                pid = int(read_text(disk, layout.lock_file) or "")
                os.kill(max(2, pid), number)            # -1 would be all of this user's
            wait_until(lambda: not is_locked(disk, layout.lock_file), LOCK_TIMEOUT_S, 0.01)
            lock = take_lock(disk, layout.lock_file)
    if lock is None:
        raise NexusError("unavailable", f"another agent of this head does not end: {layout.lock_file}",
                         hint=f"see what it is: fuser -v {layout.lock_file}")
    with contextlib.suppress(OSError, NexusError):      # a full disk keeps no agent from its jobs
        write_atomic(disk, os.path.join(folder, "boot"), [boot], is_synced=False)
        disk.pwrite(lock, f"{os.getpid():<20}".encode(), 0)
    signal.signal(signal.SIGHUP, lambda *_: None)       # not SIG_IGN, which jobs would inherit for ever
    Agent(layout, config, disk, head, environ, make_log(layout, config.service)).run()


def mark_stopped(disk: Disk, layout: Layout, is_stopped: bool) -> None:
    """Tell supervisors that wait to restart the service whether anybody wants it."""
    with contextlib.suppress(OSError):
        if is_stopped:
            with opened(disk, layout.stopped_file, os.O_WRONLY | os.O_CREAT):
                pass
        else:
            disk.unlink(layout.stopped_file)


def refuse_elsewhere(disk: Disk, layout: Layout, running: Mapping[str, Any]) -> None:
    """Raises: conflict, when service.json is of a service on another machine."""
    machine = str(running.get("machine"))
    if is_elsewhere(disk, machine, layout.lock_file):
        raise describe_other_machine(machine, f"{layout.service_file} says so", f"rm {layout.service_file}")


# ==== 16. CLIENT ==== the Python API; one transport; finds, checks and starts the service
# This machine's service is reached by its socket in the home, which only its owner can open.  Before anything is sent
# to it, or to a NEXUS_URL on this machine, the kernel is asked whose program listens there: another user's gets
# nothing.  Safe requests are repeated while the service restarts.

DISK = Disk()                   # of this process; commands and clients have no other

START_TIMEOUT_S = 30.0
OWNER_TIMEOUT_S = 5.0           # until a program has accepted a connection
RETRY_TIMEOUT_S = 30.0          # a restart may take as long as a start
WAIT_S = 2                      # between two looks at several jobs that are waited for
NOT_SENT = (ConnectionRefusedError, FileNotFoundError, BlockingIOError)     # nothing was sent: it is down, or too busy
ANSWER_TIMEOUT_S = 120.0        # for a silent connection; on a stream that may be silent, the kernel probes the peer


# One request a connection.  http.client would cost `nexus add` 35 ms.
CUT_OFF, NO_HTTP = "it closed the connection before its answer was complete", "it does not speak HTTP"


class Answer(Value):
    status: int
    headers: Mapping[str, str]                          # {name in lower case: value}
    pieces: Iterator[bytes]                             # of the body, as they arrive


def send_request(connection: socket.socket, method: str, path: str, headers: Mapping[str, str],
                 content: bytes = b"") -> Answer:
    """Raises, also while pieces are read: OSError, when the connection breaks; ValueError, when it is no HTTP."""
    fields = {**headers, "Connection": "close"}
    if content:
        fields.update({"Content-Type": "application/json", "Content-Length": str(len(content))})
    request = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in fields.items() if text), "", ""]
    with connection:                                # the reader keeps it open, until it is gone itself
        connection.sendall("\r\n".join(request).encode("latin-1", "replace") + content)
        reader = connection.makefile("rb")
    lines = [reader.readline(MAX_HEAD_BYTES)]
    while lines[-1].strip() and len(lines) < 200:
        lines.append(reader.readline(MAX_HEAD_BYTES))
    match = re.match(rb"HTTP/1\.[01] (\d{3})\b", lines[0])
    if not lines[-1]:
        raise ConnectionError(CUT_OFF)
    if not match or lines[-1].strip():
        raise ValueError(NO_HTTP)
    rows = [line.decode("latin-1").partition(":") for line in lines[1:-1]]
    fields = {name.lower(): text.strip() for name, _, text in rows}
    size = int(fields["content-length"]) if "content-length" in fields else float("inf")
    pieces = read_chunks(reader) if "transfer-encoding" in fields else read_pieces(reader, size)
    return Answer(int(match[1]), fields, pieces)


def read_pieces(reader: BufferedReader, size: float) -> Iterator[bytes]:
    """So many bytes, or all until the end."""
    while size > 0 and (piece := reader.read1(int(min(size, 65536)))):
        size -= len(piece)
        yield piece
    if 0 < size < float("inf"):
        raise ConnectionError(CUT_OFF)


def read_chunks(reader: BufferedReader) -> Iterator[bytes]:
    size = 1
    while size:
        text = reader.readline(MAX_HEAD_BYTES)
        if not re.match(b"[0-9a-fA-F]{1,15}\r?\n", text):
            raise ValueError(NO_HTTP) if text.endswith(b"\n") else ConnectionError(CUT_OFF)
        size = int(text, 16)
        yield from read_pieces(reader, size)
        reader.readline(MAX_HEAD_BYTES)


def split_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of a stream, as they are complete, without their ends."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def read_answer(answer: Answer) -> Any:
    """The reply as JSON, text or None.  Raises: the service's error; OSError; ValueError, when it is no nexus."""
    content = b"".join(answer.pieces)
    if answer.status < 400 and answer.headers.get("content-type", "").startswith("text/plain"):
        return content.decode()
    data = load_json(content.strip() or b"null")
    if answer.status >= 400 and not (isinstance(data, dict) and "checks" in data):      # GET /health: 503 with a body
        raise decode_error(data, f"HTTP status {answer.status}")
    return data


class Client:
    """The API for Python and the command line.  Its methods raise the service's NexusErrors.

    It checks whose service this is, and repeats what was interrupted where that is safe.
    """

    def __init__(self, url: str, token: str = "", layout: Layout | None = None) -> None:
        """`layout`: of this machine's service; it is reached by its socket.  None: by the address.  Raises: usage."""
        if not re.fullmatch("[!-~]*", token):
            refuse("a token has letters, digits and signs, and no blanks", hint="look at NEXUS_TOKEN")
        self.url, self.token, self.layout = url, token, layout
        self.host, self.port, self.is_secure, self.owner = ("localhost", 0, False, "") if layout else parse_url(url)
        self.has_started = False            # find() has started the service
        self.retry_timeout_s = RETRY_TIMEOUT_S if layout else 0.0       # with an address, until it has replied once

    def ask(self, method: str, path: str, body: object = None, key: str = "") -> Any:
        """One call; return JSON, a text, or None.  Raises: the service's error; unavailable; usage, for no JSON."""
        content = encode_body(body)
        return self.repeat(f"{method} {path}", lambda: read_answer(self.send(method, path, content, key)),
                           is_repeatable=method == "GET" or bool(key))

    def ask_list(self, path: str) -> tuple[list[dict[str, Any]], int]:
        """(a list or the requested part of it, the length of the whole list)."""
        headers, pieces = self.open_stream(path)
        items = list(load_json(b"".join(pieces)))
        return items, int(headers.get("total-count", len(items)))

    def open_stream(self, path: str, accept: str = "") -> tuple[Mapping[str, str], Iterator[bytes]]:
        """(a reply's headers, its pieces as they arrive; they may be silent for as long as the peer is there).

        Raises: the service's error; unavailable, also later, when the connection breaks.
        """
        def begin() -> Answer:
            answer = self.send("GET", path, accept=accept, is_stream=True)
            if answer.status >= 400:
                read_answer(answer)
            return answer

        def pieces() -> Iterator[bytes]:
            try:
                yield from answer.pieces
            except (OSError, ValueError) as error:
                raise self.describe_loss(f"GET {path}", error) from None

        answer = self.repeat(f"GET {path}", begin)
        return answer.headers, pieces()

    def repeat(self, what: str, act: Callable[[], T], is_repeatable: bool = True) -> T:
        """Call `act`; repeat it while the connection fails, if it may run twice or nothing was sent.

        Raises: unavailable.
        """
        give_up_at = time.monotonic() + self.retry_timeout_s
        while True:
            try:
                result = act()
                self.retry_timeout_s = RETRY_TIMEOUT_S
                return result
            except (OSError, ValueError) as error:
                is_safe = is_repeatable or isinstance(error, NOT_SENT)
                if not is_safe or not isinstance(error, OSError) or time.monotonic() > give_up_at:
                    hint = "" if is_safe else "it may have been done or not: look before you repeat it"
                    raise self.describe_loss(what, error, hint) from None
            time.sleep(0.1)                             # the supervisor restarts it

    def describe_loss(self, what: str, error: Exception, hint: str = "") -> NexusError:
        if not isinstance(error, OSError):
            return describe_stranger(self.url, format_line(str(error), 100))
        usual = "nexus start" if self.layout else "check NEXUS_URL, and whether nexus runs there"
        if "CERTIFICATE" in str(error):
            usual = "SSL_CERT_FILE=cert.pem trusts a certificate of your own"
        reason = getattr(error, "strerror", None) or error or "it was closed"
        return NexusError("unavailable", f"{what}: the connection to the service at {self.url} was lost ({reason})",
                          hint or usual)

    def connect(self) -> socket.socket:
        """Raises: OSError; forbidden, for another user's program; unavailable, when api.sock was deleted."""
        if self.layout:
            running = find_service(self.layout)
            if not running:
                raise ConnectionRefusedError("it does not run")
            try:
                return connect_to_own(self.layout, ANSWER_TIMEOUT_S)
            except FileNotFoundError:
                if find_service(self.layout) != running:
                    raise                               # else it lives, and has not just ended
                raise NexusError("unavailable", f"the service cannot be reached: {self.layout.socket_file} is gone",
                                 hint=f"kill {running['pid']} ends it, and the next command starts it anew; "
                                 "jobs go on") from None
        connection = socket.create_connection((self.host, self.port), ANSWER_TIMEOUT_S)
        try:
            watch_line(connection, ANSWER_TIMEOUT_S)
            if self.is_secure:
                import ssl
                return ssl.create_default_context().wrap_socket(connection, server_hostname=self.host)
            self.check_owner(connection)
            return connection
        except BaseException:
            connection.close()
            raise

    def check_owner(self, connection: socket.socket) -> None:
        """Check whose program has the other end, if that is on this machine.

        Raises: forbidden, when it is no owner's; ConnectionError, when it cannot be known.
        """
        here, there = unmap(connection.getsockname()[:2]), unmap(connection.getpeername()[:2])
        if not is_loopback(there[0]) and there[0] != here[0]:
            return
        give_up_at = time.monotonic() + OWNER_TIMEOUT_S
        while (uid := find_socket_uid(there, here)) is None:        # it has not accepted the connection yet
            if time.monotonic() > give_up_at:
                raise ConnectionError("it did not accept the connection")
            time.sleep(0.001)
        user = find_user(uid)
        # Without a name in NEXUS_URL: one's own programs, as ssh -L is, and root's.
        if user != self.owner if self.owner else uid not in (os.geteuid(), 0):
            raise NexusError("forbidden",
                             f"port {there[1]} on {there[0]} belongs to a program of {user}: nothing was sent to it",
                             hint=f"if you mean the nexus of {user}: NEXUS_URL="
                                  + re.sub("//(.*@)?", f"//{user}@", self.url))

    def send(self, method: str, path: str, content: bytes = b"", key: str = "", accept: str = "",
             is_stream: bool = False) -> Answer:
        """One request on a new connection.  Raises: as connect() and send_request()."""
        host, connection = f"[{self.host}]" if ":" in self.host else self.host, self.connect()
        answer = send_request(connection, method, path, {
            "Host": f"{host}:{self.port}" if self.port else host, "Idempotency-Key": key, "Accept": accept,
            "Authorization": f"Bearer {self.token}" if self.token else ""}, content)
        if is_stream:
            connection.settimeout(None)
        return answer

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None, is_starting: bool = True) -> Client:
        """The client of NEXUS_URL, or of this user's service, which is started unless it runs.

        Raises: unavailable, when no service runs and is_starting is False; conflict, for another machine's service.
        """
        environ = os.environ if environ is None else environ
        if environ.get("NEXUS_URL"):
            return cls(environ["NEXUS_URL"], environ.get("NEXUS_TOKEN", ""))
        layout = Layout(find_home(DISK, environ), "", "")
        running = find_service(layout)
        if running is None and not is_starting:
            raise NexusError("unavailable", f"the nexus service for {layout.home} does not run", hint="nexus start")
        has_started = running is None
        try:
            running = running or start_service(layout, environ, choose_config(DISK, layout))
        except NexusError as error:
            if not is_read_only(error):
                raise
            return Reader(layout, environ, error)
        client = cls(running["url"], "", layout)
        client.has_started = has_started
        return client

    def add(self, command: str, **options: Any) -> str:
        """Queue a command; return the job's id.  Options are the keys of POST /queue."""
        return str(self.submit({"command": command, **options})["id"])

    def add_all(self, commands: str | Iterable[str], **options: Any) -> list[str]:
        """Queue many commands that share their options, all or none; return their ids."""
        return list(self.submit({"commands": list_texts(commands, "commands"), **options})["ids"])

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /queue; return `{"id"}` or `{"ids"}`, with `known` ids that `unique` found, and a `warning` when jobs
        will not start soon.  It is repeated until it is done, and done once.
        """
        return dict(self.ask("POST", "/queue", body, key=os.urandom(16).hex()))

    def status(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/status"))

    def health(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/health"))

    def queue(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/queue" + encode_query(query)))

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/jobs" + encode_query(query)))

    def usage(self, **query: Any) -> list[dict[str, Any]]:
        """What jobs used, as GET /usage: since="7d", by="user" or "group"."""
        return list(self.ask("GET", "/usage" + encode_query(query)))

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/jobs/{quote_path(job_id)}"))

    def why(self, job_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/jobs/{quote_path(job_id)}/why"))

    def cancel(self, **choice: Any) -> list[str]:
        """End jobs, all or none: `ids`, or those of a `group` or `status`; return the ids of those not yet over."""
        return list(self.ask("POST", "/jobs/cancel", choice)["ids"])

    def edit(self, job_id: str, **change: Any) -> dict[str, Any]:
        """Change a job that has not ended by the keys of PATCH /queue/{id}, like `gpus=2`; return the job."""
        return dict(self.ask("PATCH", f"/queue/{quote_path(job_id)}", change))

    def clear(self, **choice: Any) -> list[str]:
        """Forget finished jobs and their logs: `ids`, or those of a `group` or `status`; return their ids."""
        return list(self.ask("POST", "/jobs/clear", choice)["ids"])

    def retry(self, **choice: Any) -> list[str]:
        """Queue finished jobs again, all or none: `ids`, or those of a `group` or `status`; return the new ids.

        `change`: new values, like `{"gpus": 2}`.
        """
        return list(self.ask("POST", "/jobs/retry", choice)["ids"])

    def pause(self, gpu: int | str | None = None, group: str | None = None, verb: str = "pause") -> None:
        """Pause or resume the queue, a group, or a GPU: 0, or "n1:0" on a node."""
        what = "service" if gpu is None else f"gpus/{quote_path(str(gpu))}"
        self.ask("POST", f"/{what}/{verb}" + encode_query({"group": group}))

    def resume(self, gpu: int | str | None = None, group: str | None = None) -> None:
        self.pause(gpu, group, "resume")

    def nodes(self) -> list[dict[str, Any]]:
        """This machine and the nodes."""
        return list(self.ask("GET", "/nodes"))

    def stop(self) -> None:
        self.ask("POST", "/service/stop")

    def logs(self, job_id: str, follow: bool = False, stream: str = "both", tail: int | None = None) -> Iterator[bytes]:
        """A job's output, or the service's log with "service", in pieces as they arrive."""
        query = {"follow": "true" if follow else None, "tail": tail, "stream": None if job_id == "service" else stream}
        path = "/service/logs" if job_id == "service" else f"/jobs/{quote_path(job_id)}/logs"
        return self.open_stream(path + encode_query(query))[1]

    def follow(self, job_id: str, stream: str = "both", tail: int | None = None,
               is_followed: bool = True) -> Iterator[dict[str, Any]]:
        """A job's output until it ends, as `LogEntry` objects; a restart of the service loses and repeats nothing."""
        where: dict[str, Any] = {"tail": tail}
        names = STREAMS[:2] if stream == "both" else (stream,)
        while True:
            query = encode_query({"follow": "true" if is_followed else None, "stream": stream, **where})
            try:
                headers, pieces = self.open_stream(f"/jobs/{quote_path(job_id)}/logs{query}", NDJSON)
                where = {"offset": headers["log-offset"]}
                offsets = dict(zip(names, headers["log-offset"].split(",")))
                for line in split_lines(pieces):
                    entry = load_json(line)
                    offsets[entry["stream"]] = str(entry["end"])
                    where = {"offset": ",".join(offsets.values())}
                    yield entry
                return
            except NexusError as error:
                if error.kind != "unavailable":
                    raise
            time.sleep(0.1)                             # the server may close each stream at once
            self.ask("GET", "/")                        # waits until the service replies again

    def wait(self, job_ids: str | Iterable[str], on_end: Callable[[dict[str, Any]], None] = lambda job: None,
             is_any: bool = False,
             on_look: Callable[[dict[str, Any]], None] = lambda job: None) -> list[dict[str, Any]]:
        """Wait until jobs have finished, or with `is_any` one of them; return them.  The service may restart meanwhile.

        `on_look` is called with each job that goes on, at each look.
        Raises: not_found, for a job that is gone and was not seen to end.
        """
        finished: dict[str, dict[str, Any]] = {}
        job_ids = list_texts(job_ids, "job_ids")
        unfinished, wait_s = list(dict.fromkeys(job_ids)), 0
        while unfinished and not (is_any and finished):
            # The end of the last is heard of at once, that of the others at the next look.
            last = self.ask("GET", f"/jobs/{quote_path(unfinished[-1])}" + encode_query({"wait": wait_s or None}))
            wait_s = WAIT_S
            others = self.jobs(fields="id,status,node,unknown_since") if len(unfinished) > 1 else []
            jobs = {job["id"]: job for job in [*others, last]}
            for job_id in unfinished:
                job = jobs.get(job_id) or self.job(job_id)
                if job["status"] in FINAL and not (is_any and finished):
                    finished[job_id] = job if job is last else self.job(job_id)
                    on_end(finished[job_id])
                elif job["status"] not in FINAL:
                    on_look(job)
            unfinished = [job_id for job_id in unfinished if job_id not in finished]
        return [finished[job_id] for job_id in job_ids if job_id in finished]


def is_read_only(error: NexusError) -> bool:
    """Whether a file system that takes no writes is at fault."""
    import errno
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EROFS


class Reader(Client):
    """Answers in this process what only reads, where no service can run as its home takes no writes."""

    def __init__(self, layout: Layout, environ: Mapping[str, str], error: NexusError) -> None:
        """`error`: why no service can run.  Raises: what keeps the home from being read."""
        import logging
        super().__init__("http://localhost", "", layout)
        self.error = NexusError(
            "unavailable", f"nothing can be changed, and no service runs: {error.message}", error.hint)
        clock, log = Clock(), logging.getLogger("nexus")
        config = load_config(DISK, choose_config(DISK, layout), environ)
        log.addHandler(logging.NullHandler())
        log.propagate = False                           # what cannot be written is told by the error alone
        layout = make_layout(layout.home, config)
        store = Store(layout, clock, DISK, log)
        store.recover()
        machine = Machine(config, layout, DISK, store.service_id)
        service = Service(config, layout, store, machine, clock, DISK, log, environ)
        service.observer.probe(True)
        service.run_guarded("reading GPUs", service.gpu_watch.take_in_observation)
        self.api = Api(service, "", "")

    def send(self, method: str, path: str, content: bytes | None = None, key: str = "", accept: str = "",
             is_stream: bool = False) -> Answer:
        """Raises: unavailable, for what would change something or wait for a change."""
        import urllib.parse
        plain, _, rest = path.partition("?")
        query = urllib.parse.parse_qs(rest, keep_blank_values=True)
        query.pop("follow", None)                       # nothing more would come
        if method != "GET" or "wait" in query:
            raise self.error
        response = self.api.handle(Request(
            "GET", plain, query, {"host": "localhost", "accept": accept}, bytes, SOCKET_PEER, os.geteuid()))
        headers = {name.lower(): text for name, text in response.headers.items()}
        return Answer(response.status, {**headers, "content-type": response.content_type},
                      iter([response.body]) if response.stream is None else response.stream)


def describe_stranger(url: str, why: str) -> NexusError:
    return NexusError("unavailable", f"what answers at {url} is not nexus, or another version of it: {why}",
                      hint="check NEXUS_URL, and nexus --version here and there")


def parse_url(url: str) -> tuple[str, int, bool, str]:
    """(host, port, whether it is https, owner or "") of NEXUS_URL.  Raises: usage."""
    match = re.fullmatch(r"(https?)://(?:([\w.-]+)@)?(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?/?", str(url))
    if not match or (match[2] and match[1] != "http"):
        raise NexusError("usage", f"NEXUS_URL={url} is not an address like http://gpu1:6234 or "
                         "https://gpu1.example.org; for the service of ann on this machine http://ann@127.0.0.1:6234",
                         hint="unset NEXUS_URL to use your own service on this machine")
    port = int(match[4] or (443 if match[1] == "https" else 80))
    return match[3].strip("[]"), port, match[1] == "https", match[2] or ""


def list_texts(given: str | Iterable[str], name: str) -> list[str]:
    """Texts as a list; a text alone is one of them.  Raises: usage."""
    texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not all(isinstance(text, str) for text in texts):
        refuse(f"{name} must be a text or a list of texts, not {format_line(repr(given), 60)}", hint="")
    return texts


def encode_body(body: object) -> bytes:
    """A body as JSON, with paths as texts; empty for None.  Raises: usage."""
    def encode_path(one: object) -> str:
        if isinstance(one, os.PathLike):
            return os.fsdecode(one)
        raise TypeError(f"JSON has no form for a {type(one).__name__}")

    try:
        return b"" if body is None else json.dumps(body, separators=(",", ":"), default=encode_path).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        refuse(f"what is asked cannot be sent: {format_line(str(error), 200)}", hint="")


def quote_path(text: str) -> str:
    """Quote a word as part of a path.  Raises: usage."""
    import urllib.parse
    if not isinstance(text, str):
        refuse(f"an id is a text, not {format_line(repr(text), 60)}", hint="")
    return urllib.parse.quote(text, safe="", errors="surrogateescape") or "%20"


def encode_query(query: Mapping[str, Any]) -> str:
    import urllib.parse
    given = {name: fact for name, fact in query.items() if fact is not None}
    return "?" + urllib.parse.urlencode(given, doseq=True, errors="surrogateescape") if given else ""


def connect_to_own(layout: Layout, timeout_s: float) -> socket.socket:
    """A connection to api.sock.  Raises: OSError; forbidden, when it is another user's program that listens there."""
    connection, (path, home) = socket.socket(socket.AF_UNIX), open_socket_path(layout.socket_file)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        _, uid = read_credentials(connection)
        if uid != os.geteuid():
            raise NexusError("forbidden",
                             f"{layout.socket_file} belongs to a program of {find_user(uid)}: nothing was sent to it",
                             hint=f"others could write into {layout.home}: look at what is in it; then "
                                  f"rm {layout.socket_file} {layout.service_file}, and nexus start")
        return connection
    except BaseException:
        connection.close()
        raise
    finally:
        if home >= 0:
            os.close(home)


def find_service(layout: Layout) -> dict[str, Any] | None:
    """service.json of a running service, or None.

    Raises: forbidden, when others may write into the home; conflict, for another machine's.
    """
    if not os.path.isdir(layout.home):
        return None
    with disk_errors("look at", layout.home):
        check_folder(DISK, layout.home, "NEXUS_HOME")
    running = read_json(DISK, layout.service_file) if is_own_file(DISK, layout.service_file) else None
    if not running or not isinstance(running.get("pid"), int):
        return ask_for_service(layout)
    refuse_elsewhere(DISK, layout, running)
    if running.get("machine") != read_machine():
        return None
    return running if is_alive(running) else ask_for_service(layout)


def ask_for_service(layout: Layout) -> dict[str, Any] | None:
    """What service.json would say of a service that listens at api.sock, where a full disk has refused it; or None."""
    try:
        connection = connect_to_own(layout, OWNER_TIMEOUT_S)
        with connection:
            own = Processes().find(read_credentials(connection)[0])
            told = read_answer(send_request(connection, "GET", "/", {"Host": "localhost"}))
        return {**pick(told, ("url", "version", "hash")), "pid": own.pid, "started": own.started,
                "boot_id": read_boot_id(), "machine": read_machine()} if own else None
    except NexusError as error:
        if error.kind == "forbidden":
            raise
    except (OSError, LookupError, TypeError, ValueError):
        pass                                            # nobody listens, or no nexus does
    return None


def start_service(layout: Layout, environ: Mapping[str, str], path: str,
                  log_level: str | None = None) -> dict[str, Any]:
    """Start the service with the config file at `path`; wait until it replies.  Raises: why it could not start."""
    config = load_config(DISK, path, environ)
    check_start(DISK, make_layout(layout.home, config), config)     # before any code of the home runs
    return launch_service(layout, environ, config, make_service_argv(layout, path, log_level))


def make_service_argv(layout: Layout, path: str, log_level: str | None) -> list[str]:
    """How this nexus.py runs as the service."""
    options = ["--config", path, *(["--log-level", log_level] if log_level else [])]
    return service_argv(layout, os.path.abspath(__file__), options)


def launch_service(layout: Layout, environ: Mapping[str, str], config: Config, argv: Sequence[str]) -> dict[str, Any]:
    """Start a service with its supervisor; wait until it replies.  Raises: why it could not start."""
    remove_file(DISK, layout.start_error_file)
    screen = Screen(DISK, layout) if config.jobs.launcher == "screen" else None
    if screen and screen.prepare():             # screen cannot be used
        screen = None
    mark_stopped(DISK, layout, False)
    start_supervisor(DISK, layout, screen, environ, argv)

    def look() -> dict[str, Any] | None:
        refusal = read_json(DISK, layout.start_error_file)
        if refusal:
            raise decode_error(refusal)
        return find_service(layout)

    running = wait_until(look, START_TIMEOUT_S)
    if not running:
        raise NexusError("unavailable", f"the service did not start within {START_TIMEOUT_S:g} s",
                         hint=f"see {layout.service_log}, or try it in the foreground: nexus serve")
    return running


def await_answer(layout: Layout, url: str) -> None:
    """Wait until a service that has just started replies.  Raises: unavailable, when it does not, or ends."""
    try:
        Client(url, "", layout).ask("GET", "/")
    except NexusError as error:
        raise NexusError(error.kind, error.message, hint=f"see {layout.service_log}") from None


class FormerService(Value):
    """A running service, as it can be started again."""
    argv: Sequence[str]
    environ: Mapping[str, str]
    choice: str                                 # the path of the configuration that the next start takes
    config: Config


def find_former(layout: Layout, running: Mapping[str, Any]) -> FormerService | NexusError:
    """What starts a running service again as it is now; or why that is not possible."""
    choice = (read_text(DISK, layout.choice_file) or layout.config_file).strip("\n")
    # Without a service.json, which a full disk may have refused, only its url and hash are known.
    path, copy = running.get("config") or choice, running.get("config_copy") or ""
    words = read_proc_words(running["pid"], "cmdline")
    environ = dict(word.partition("=")[::2] for word in read_proc_words(running["pid"], "environ"))
    given = words[words.index("serve") + 1:] if "serve" in words else []
    is_usual = words[1:3] == ["-I", "-c"] and words[7:8] == ["serve"] and os.access(words[0], os.X_OK)
    programs = [*words[6:7], os.path.abspath(__file__),
                os.path.join(layout.cache_dir, f"nexus-{running.get('hash')}.py")]
    try:
        same = [each for each in programs
                if os.path.isfile(each) and hash_code(read_bytes(DISK, each)) == running.get("hash")]
        if not same:
            return NexusError("unavailable", f"its nexus.py (nexus {running.get('version')}) is not there any more",
                              hint="put it back where it was, and run it: python3 nexus.py start")
        if os.path.isfile(copy) and f"-{hash_code((read_text(DISK, path) or '').encode())}." not in copy:
            path = copy                         # the file was edited
        options = [*given, "--config", path]
        # Else a person or systemd runs it, or its Python is gone.
        argv = [*words[:6], same[0], "serve", *options] if is_usual else service_argv(layout, same[0], options)
        return FormerService(argv, environ, choice, load_config(DISK, path, environ))
    except NexusError as error:
        return error


CHECK_TIMEOUT_S = 30.0


def check_as_service(layout: Layout, environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Run a service only so far that it has read all it needs.  Raises: unavailable."""
    done = run(argv, CHECK_TIMEOUT_S, {**service_environ(layout, environ), "NEXUS_ROLE": "check"})
    if done.exit_code:
        words = [line for line in done.output.splitlines() if line.strip() and not line.startswith("hint: ")]
        raise NexusError("unavailable", f"the new service fails with exit code {done.exit_code}: "
                         f"{format_line(words[-1] if words else 'it says nothing', 300)}", hint="try it: nexus serve")


# ==== 17. COMMANDS ==== one function for each subcommand: (call) -> exit code; None is 0
# Data goes to stdout, messages to stderr.  The COMMANDS table in the next section says what each command takes.


class Call:
    """One run of the command line: its options, streams and environment."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str], out: TextIO, err: TextIO,
                 commands: Sequence[Command]) -> None:
        self.options, self.environ, self.out, self.err, self.commands = options, environ, out, err, commands
        self.is_remote = bool(environ.get("NEXUS_URL"))
        self.paint = make_paint(out, environ)

    @functools.cached_property
    def client(self) -> Client:
        """The client; starts the service unless it runs."""
        client = Client.find(self.environ)
        if client.has_started and not is_usual(client.url):
            self.say(f"the service runs at {client.url}")
        return client

    def print(self, *lines: str) -> None:
        self.write(self.paint.join(lines))

    def write(self, text: str) -> None:
        write_to(self.out, text)

    def show(self, data: Any, make_text: Callable[[Any, Paint], str], when_empty: str = "") -> None:
        """Write data as JSON with --json, else as text; `when_empty` is the message when there is none."""
        if self.options.json:       # JSON escapes all other unprintable characters itself
            self.write(json.dumps(data, indent=2).replace("\x7f", "\\u007f") + "\n")
        elif data or not when_empty:
            self.write(make_text(data, self.paint))
        else:
            self.say(when_empty)

    def need_local(self, what: str) -> None:
        """Raises: usage, when NEXUS_URL names another machine's service."""
        if what and self.is_remote:
            refuse(f"NEXUS_URL is set, and {what} on the service's own machine", hint="ssh there; or unset NEXUS_URL")

    def say(self, text: str) -> None:
        """Write a message to stderr."""
        self.err.write(f"nexus: {format_line(text)}\n")
        self.err.flush()

    @property
    def own_environ(self) -> dict[str, str]:
        """The environment of the programs that nexus itself runs."""
        return {**self.environ, "PATH": complete_path(DISK, self.layout, self.environ.get("PATH"))}

    @property
    def layout(self) -> Layout:
        """This machine's files, without those that config.toml can move."""
        return Layout(find_home(DISK, self.environ), "", "")


def argument(*flags: str, row: Field | None = None, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of one add_argument() call.  `row` says what the text must be."""
    return flags, {**settings, "type": functools.partial(parse_option, row, flags)} if row else settings


def parse_option(row: Field, flags: Sequence[str], text: str) -> Any:
    """Raises: usage, with the option's names."""
    name = "/".join(flags)
    try:
        return parse_field(row, text, name)
    except NexusError as error:
        message = error.message if name in error.message else f"{name}: {error.message}"
        raise NexusError(error.kind, message, error.hint or (row.like and f"like {flags[0]} {row.like}")) from None


def parse_change(row: Field, flag: str, text: str) -> Any:
    """The value of an option of `edit` and `retry`; NONE for `none`.  Raises: usage, with the option's name."""
    return NONE if text == "none" else parse_option(row, flag, text)


NONE = object()                 # of an option: it takes away what was set


class Command(Value):
    name: str
    summary: str                # empty: nexus help does not list it
    run: Callable[[Call], int | None] | None = None     # None: a verb is required
    arguments: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = ()
    description: str = ""
    verbs: tuple[Command, ...] = ()     # subcommands
    examples: tuple[str, ...] = ()      # without the word nexus
    local: str = ""             # what needs the service's own machine; empty: NEXUS_URL may be set


# {a word of other queues and of the shell: our words}
ALIASES: Mapping[str, Sequence[str]] = {
    "squeue": ["jobs", "--status", "running,pending"], "ls": ["jobs"], "list": ["jobs"], "ps": ["jobs"],
    "sacct": ["history"], "sinfo": ["status"], "gpus": ["status"], "gpu": ["status"], "nvidia-smi": ["status"],
    "watch": ["top"], "rm": ["remove"], "scancel": ["cancel"], "delete": ["cancel"], "submit": ["add"],
    "sbatch": ["add"], "srun": ["run"], "tail": ["logs", "-f"], "cat": ["logs"], "info": ["show"], "seff": ["show"],
    "sstat": ["show"], "describe": ["show"], "inspect": ["show"], "hold": ["pause"], "release": ["resume"],
    "requeue": ["retry"], "resubmit": ["retry"], "rerun": ["retry"], "nodes": ["node"], "sattach": ["attach"],
    "sreport": ["usage"], "sprio": ["queue"]}
ALL_END = "all that wait or run: nexus cancel --status pending,running"
# {our commands, and what is typed there by who knows Slurm or ts (status: nothing but an option): what to type}
FOREIGN = {f"{command} {word}": hint for key, hint in {
    "add -p -A -q -N -c --partition --account --qos --nodes --ntasks --cpus-per-task --mem --exclusive": "leave it out",
    "add --wrap": "the command itself, in quotes", "add -W --wait": "nexus run, or nexus wait ID",
    "add -e": "--env NAME=VALUE", "jobs -u --me": "--user NAME", "jobs -j --jobs": "nexus show ID",
    "jobs -t --state --states running pending failed": "--status running,failed", "jobs -o -O --format": "--json",
    "add --pty -it": "--tty: nexus run --tty bash", "kill -9": "--signal KILL",
    "cancel all --all -u --me": ALL_END, "stop --all": ALL_END, "logs --tail": "-n 5",
    "status -l": "nexus jobs", "status -t": "nexus logs -f ID", "status -c": "nexus logs ID",
    "status -k": "nexus kill ID", "status -w": "nexus wait ID", "status -r": "nexus remove ID",
    "status -C": "nexus clear --all", "status -K": "nexus stop", "status -u": "nexus move ID --first",
    "status -i": "nexus show ID",
    "nexus scontrol": "nexus show ID, edit ID --time 2h, hold ID, release ID, or node list",
    "nexus salloc": "nexus run --tty bash: a shell on a GPU",
    "nexus upgrade update": "run the new nexus.py: python3 nexus.py install, then nexus restart (jobs go on)",
}.items() for command, *words in [key.split()] for word in words}
SAME = {"run": "add", "history": "jobs", "queue": "jobs", "kill": "cancel"}      # in FOREIGN
OTHER_FLAGS = {"gpus": ["-g"], "name": ["-n"], "timeout_seconds": ["--time"]}       # {field of a job: further flags}


def join_command(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else " ".join(map(quote, words))


def complete_command(line: str, folder: str = "") -> str:
    """The command, with what runs the file that its first word is, when a shell would not find it."""
    first = line.partition(" ")[0]
    local = os.path.join(folder, first)
    is_program = os.path.isfile(local) and os.access(local, os.X_OK)
    if not os.path.isfile(local) or find_program(first) or find_script(first, folder) or (is_program and "/" in first):
        return line
    python = "python" if find_program("python") else "python3"
    runners = {".py": python, ".ipynb": "jupyter nbconvert --to notebook --execute --inplace"}
    runner = runners.get(os.path.splitext(first)[1])
    return f"{runner} {line}" if runner else f"{'./' if is_program else 'bash '}{line}"


def find_command(words: Sequence[str], commands: Sequence[Command]) -> Command:
    """Raises: usage; the hint is what to type, or the nearest name."""
    name, first = words[0], words[0].partition(" ")[0]
    for command in commands:
        if command.name == ALIASES.get(name, [name])[0]:
            return command
    hint = FOREIGN.get(f"nexus {name}") or (
        f"to queue it: nexus add {quote(complete_command(join_command(words)))}"
        if find_program(first) or os.path.isfile(first) else
        suggest(name, [command.name for command in commands if command.summary])
        or f"nexus help lists them; of a job: nexus show {quote(format_line(name, 40))}")
    raise NexusError("usage", f"'{format_line(name, 40)}' is not a command", hint)


def make_parser(command: Command) -> argparse.ArgumentParser:
    import argparse
    takes_command = command.name in ("add", "run")

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            unknown, hint = re.match("unrecognized arguments: ([^ =]+)", message), ""
            if unknown and unknown[1][0] == "-":
                hint = suggest(unknown[1], self._option_string_actions)
            elif unknown and command.name in ("jobs", "history", "queue", "status", "top"):
                hint = f"nexus show {unknown[1]}"
            raise NexusError("usage", f"{command.name}: {message}", hint)

        def format_help(self) -> str:
            lines = [f"  nexus {example}\n" for example in command.examples]
            self.formatter_class = argparse.HelpFormatter
            return super().format_help() + ("\nexamples:\n" + "".join(lines) if lines else "")

    parser = Parser(prog=f"nexus {command.name}",
                    description=f"{command.summary[:1].upper()}{command.summary[1:]}. {command.description}",
                    allow_abbrev=False,
                    usage=f'nexus {command.name} [options] "COMMAND"' if takes_command else None,
                    # A formatter is made for each argument; without a width it imports shutil, for 5 ms
                    formatter_class=functools.partial(argparse.HelpFormatter, width=80))
    parser.set_defaults(json=False, chosen=command, subcommand=command.name)
    is_one_of = command.name in ("status", "move")
    exclusive = parser.add_mutually_exclusive_group(required=command.name == "move") if is_one_of else parser
    for flags, settings in command.arguments:
        (exclusive if flags[0].startswith("--") else parser).add_argument(*flags, **settings)
    if command.verbs:
        verbs = parser.add_subparsers(required=not command.run, metavar="|".join(verb.name for verb in command.verbs))
        for verb in command.verbs:
            one = verbs.add_parser(verb.name, help=verb.summary, allow_abbrev=False)
            one.set_defaults(chosen=verb)
            for flags, settings in verb.arguments:
                one.add_argument(*flags, **settings)
    return parser


def parse_words(command: Command, words: Sequence[str], out: TextIO) -> argparse.Namespace:
    """Raises: usage; SystemExit, after --help."""
    parser, name, takes_command, begin = make_parser(command), command.name, command.name in ("add", "run"), 0
    known = parser._option_string_actions
    while begin < len(words) and not (takes_command and (words[begin][:1] != "-" or words[begin] in ("-", "--"))):
        flag, action = words[begin].partition("=")[0], known.get(words[begin])      # None: as --gpus=2, or -g2
        hint = FOREIGN.get(f"{name} {flag}") or FOREIGN.get(f"{SAME.get(name)} {flag}") or (
            explain_sbatch(words[begin:]) if takes_command else "")
        if hint and flag not in known:
            refuse(f"{name} does not know '{flag}'", hint=hint)
        begin += 2 if action and action.nargs is None else 1
    try:
        with contextlib.redirect_stdout(out):
            options = parser.parse_args(words)
        if not takes_command or len(options.command) < 2 or words[begin] == "--" or not any(
                word in known for word in words[begin:]):
            return options
    except NexusError as error:
        if not takes_command or "unrecognized" not in error.message or begin >= len(words) or " " in words[begin] or (
                not any(word[:1] == "-" for word in words[begin:])):
            raise NexusError(error.kind, error.message, error.hint or f"nexus help {name}") from None
    refuse(f"{name}: what stands after {words[begin]} could be meant for it or for nexus", hint=(
        f"nexus {' '.join([name, *map(quote, words[:begin])])} {quote(' '.join(map(quote, words[begin:])))}"))


def write_to(stream: TextIO, piece: str | bytes) -> None:
    """Raises: unavailable; BrokenPipeError, when the reader has closed the pipe."""
    try:
        if isinstance(piece, bytes) and hasattr(stream, "buffer"):
            stream.flush()
            stream.buffer.write(piece)
        else:
            stream.write(piece if isinstance(piece, str) else piece.decode("utf-8", "replace"))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NexusError("unavailable", f"the output cannot be written: {error.strerror}",
                         hint="check where stdout goes") from None


def make_paint(stream: TextIO, environ: Mapping[str, str]) -> Paint:
    is_colourful = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    width, height = os.get_terminal_size(stream.fileno()) if stream.isatty() else (0, 0)
    return Paint(Clock().new_token() if is_colourful else "", width, height)


def cmd_status(call: Call) -> None:
    if call.options.watch:
        return cmd_top(call)
    status = call.client.status()
    if call.options.detailed:
        return call.write(format_detailed(status, call.client.health(), call.paint))
    call.show(status, format_snapshot)
    if status["hash"] != (own := file_hash(DISK)) and not call.is_remote:
        call.say(f"the service is nexus {status['version']} ({status['hash']}), this is {__version__} ({own}); "
                  "nexus restart brings them together")


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Let TERM and HUP end a command as Ctrl-C does: what it has begun is ended, and its files are removed, first."""
    import signal

    def end(number: int, _: object) -> None:
        for other in former:
            signal.signal(other, lambda *_: None)       # a second one would cut that off
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    former = {number: handler for number, handler in former.items() if handler != signal.SIG_IGN}      # nohup
    for number in former:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@unwinding()
def cmd_top(call: Call) -> None:
    """Redraw until q or Ctrl-C.  A terminal's alternate screen is used, so that the shell's screen comes back.

    Without a terminal it is drawn once.
    """
    if not (sys.stdin.isatty() and call.out.isatty()):
        return call.write("".join(f"{line}\n" for line, _ in draw_top(call, Paint(""))))
    import termios
    stdin, top = sys.stdin.fileno(), Top(call)
    before, modes = termios.tcgetattr(stdin), termios.tcgetattr(stdin)
    modes[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)     # keys come at once, Ctrl-C and Ctrl-Z too
    call.write(OWN_SCREEN)
    try:
        termios.tcsetattr(stdin, termios.TCSADRAIN, modes)
        while not top.has_ended:
            top.draw()
            for key in re.findall(r"(?s)\x1b[\[O][0-9;]*[A-Za-z~]|.", read_keys(1.0)):
                top.press(key)
                if top.asked:               # no pasted text answers what is not on the screen yet
                    termios.tcflush(stdin, termios.TCIFLUSH)
                    break
    except KeyboardInterrupt:
        pass
    finally:
        with contextlib.suppress(OSError, termios.error):           # the terminal is gone
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
            call.write(SHELL_SCREEN)


def read_keys(timeout_s: float) -> str:
    """What was typed; empty when that is nothing for so long.  Raises: KeyboardInterrupt, also without a terminal."""
    import select
    stdin, typed = sys.stdin.fileno(), b""
    if not select.select([stdin], [], [], timeout_s)[0]:
        return ""
    with contextlib.suppress(OSError):
        typed = os.read(stdin, 64)
    if not typed or b"\3" in typed:
        raise KeyboardInterrupt
    return typed.decode("utf-8", "ignore")


def draw_top(call: Call, paint: Paint, text: str = "", chosen_id: str = "") -> list[tuple[str, str]]:
    """As list_top().  At a terminal, with the last finished jobs.

    `text`: only jobs that have it.  `chosen_id`: this job is shown wherever it stands in its list, while it is kept.
    """
    try:
        client, chosen = Client.find(call.environ, is_starting=False), text or None
        waiting, total = client.ask_list("/queue" + encode_query({
            "group": None if text else "", "text": chosen, "limit": max(10, paint.height) if paint.height else 50,
            "fields": "id,name,command,user,gpus,position,estimated_start,waiting_for"}))
        status, groups = client.status(), [] if text else client.ask("GET", "/groups")
        finished = client.jobs(text=chosen, status=list(FINAL), sort="-finished_at", limit=5) if paint.height else []
        if text:
            ids = {job["id"] for job in client.jobs(text=text, status=RUNNING, fields="id")}
            status["running_jobs"] = [job for job in status["running_jobs"] if job["id"] in ids]
            status["gpu_status"] = [gpu for gpu in status["gpu_status"] if ids & {*gpu["job_ids"]}]
        more = total - len(waiting)
        lists = {RUNNING: status["running_jobs"], PENDING: waiting, **dict.fromkeys(FINAL, finished)}
        if chosen_id and all(job["id"] != chosen_id for jobs in lists.values() for job in jobs):
            for job in find_kept(client, chosen_id, text):
                lists[job["status"]].append(job)
                more -= job["status"] == PENDING and (not job["group"] or bool(text))
        return list_top(status, waiting, more, groups, finished, paint)
    except NexusError as error:
        if error.kind != "unavailable" or not paint.height:
            raise
        lines = [paint("red", error.message), *([f"hint: {error.hint}"] if error.hint else [])]
        return [(line, "") for line in paint.join(lines).split("\n")]


def find_kept(client: Client, job_id: str, text: str) -> list[dict[str, Any]]:
    """[the job]; [] when it is not kept any more, or does not have the text."""
    try:
        job = client.job(job_id)
    except NexusError as error:
        if error.kind != "not_found":
            raise
        return []
    has_text = not text or job_id in {
        other["id"] for other in client.jobs(text=text, status=job["status"], fields="id")}
    return [job] if has_text else []


TOP_KEYS = {"\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down", "\r": "\n"}
OWN_SCREEN, SHELL_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


class Top:
    """`nexus top` at a terminal: rows of jobs, of which one is chosen, and a line for messages and questions."""

    def __init__(self, call: Call) -> None:
        self.call, self.has_ended = call, False
        self.order = list[str]()                    # the ids of the jobs shown
        self.chosen, self.position = "", 0          # of these; the position serves when the job is no more shown
        self.text = self.message = ""               # `text`: the filter
        self.asked, self.question = "", ("", "")    # the job that may be ended; what is asked: its begin, the job
        self.is_typing = False                      # the filter

    def draw(self) -> None:
        paint = make_paint(self.call.out, self.call.environ)        # the window may have been resized
        width, room = paint.width, paint.height - 1
        rows = draw_top(self.call, Paint(paint.mark, max(1, width - 2), paint.height), self.text, self.chosen)
        self.order = list(dict.fromkeys(job_id for _, job_id in rows if job_id))
        if self.order:
            if self.chosen not in self.order:
                self.chosen = self.order[min(self.position, len(self.order) - 1)]
            self.position = self.order.index(self.chosen)
        at = next((number for number, (_, job_id) in enumerate(rows) if job_id and job_id == self.chosen), 0)
        offset = max(0, at + 1 - room)
        lines = [f"> {line}" if job_id and job_id == self.chosen else f"  {line}" for line, job_id in rows]
        if paint.mark:                              # the chosen one in reverse, without colours of its own
            lines = ["\x1b[7m" + re.sub(r"\x1b\[\d*m", "", line).ljust(width) + "\x1b[0m" if line[0] == ">" else line
                     for line in lines]
        hidden = len(lines) - room - offset
        last = (f"{time.strftime('%H:%M:%S')}  ? shows the keys, q ends" + (f"  /{self.text}" if self.text else "")
                + (f"  … {format_count(hidden, 'more line')}" if hidden > 0 else ""))
        last = f"/{self.text}" if self.is_typing else self.format_question(width) if self.asked else last
        lines = lines[offset:offset + room] + [""] * -hidden + [format_line(self.message or last)[:width]]
        self.call.write("\x1b[H" + "\n".join(f"\x1b[2K{line}" for line in lines) + "\x1b[J")

    def format_question(self, width: int) -> str:
        """The question, with as much of the job's name and command as there is room for."""
        (begin, what), end = self.question, ")? y or n"
        return begin + format_line(what, max(1, width - len(begin + end))) + end

    def press(self, key: str) -> None:
        if self.is_typing:
            self.is_typing = key not in ("\r", "\n", "\x1b")
            shorter = "" if key == "\x1b" else self.text[:-1] if key in ("\x7f", "\b") else self.text
            self.text = shorter + (key if key.isprintable() else "")
            return
        key = TOP_KEYS.get(key, key)
        step = {"up": -1, "down": 1}.get(key, 0)
        stopped, self.asked, self.message = self.asked, "", ""
        if stopped:
            self.act("yes" if key == "y" else "no", stopped)
        elif key == "q":
            self.has_ended = True
        elif key == "?":
            self.visit("help", "top")
        elif key == "/":
            self.is_typing = True
        elif self.order:
            self.chosen = self.order[max(0, min(self.order.index(self.chosen) + step, len(self.order) - 1))]
            self.act(key, self.chosen)

    def act(self, key: str, job_id: str) -> None:
        try:
            client = Client.find(self.call.environ, is_starting=False)
            if key == "\n":
                self.visit("show", job_id)
            elif key == "l":
                self.visit("logs", "-f", "-n", "100", job_id)
            elif key == "x":
                self.ask(client.job(job_id))
            elif key == "yes":
                ended = client.ask("POST", "/jobs/cancel", {"ids": [job_id], "status": [PENDING, RUNNING]})["jobs"]
                words = ["cancelled" if job["status"] in FINAL else "being stopped" for job in ended]
                self.message = f"job {job_id} is {words[0]}" if words else f"job {job_id} had ended before"
            elif key == "p":
                job = client.edit(job_id, is_held=not client.job(job_id)["is_held"])
                self.message = f"job {job_id} is {'held' if job['is_held'] else 'released'}"
            elif key == "r":
                self.message = f"job {job_id} runs again as {client.retry(ids=[job_id])[0]}"
        except NexusError as error:
            self.message = error.message

    def ask(self, job: Json) -> None:
        """Ask whether to end a job."""
        if job["status"] in FINAL:
            self.message = f"job {job['id']} is {job['status']}: there is nothing to stop"
        else:
            self.asked = job["id"]
            verb = "cancel" if job["status"] == PENDING else "stop"
            self.question = f"{verb} job {job['id']} (", name_or_command(job)

    def visit(self, *words: str) -> None:
        """Run another nexus command on the shell's screen, until q or Ctrl-C."""
        import subprocess
        self.call.write(SHELL_SCREEN)
        self.call.say(f"nexus {' '.join(words)}; q goes back")
        argv = [sys.executable, os.path.abspath(__file__), *words]
        child, is_over = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=dict(self.call.environ)), False
        try:
            while "q" not in read_keys(0.2):
                if child.poll() is not None and not is_over:
                    is_over = True
                    self.call.say("that is all; q goes back")
        except KeyboardInterrupt:
            pass
        finally:
            child.terminate()
            child.wait()
            self.call.write(OWN_SCREEN)


def make_options(call: Call) -> dict[str, Any]:
    """The body of POST /queue from the options, the environment and the current directory.  Raises: usage."""
    options = call.options
    if options.snapshot:
        call.need_local("--snapshot keeps a work tree")
    # A git hook that adds a job has these set; in the job they would point to another work tree.
    misleading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE") if options.snapshot else ()
    environ = {name: text for name, text in list_inherited(call.environ).items()
               if name not in ("CUDA_VISIBLE_DEVICES", *misleading)}
    if is_interactive(call):
        environ = {name: text for name, text in environ.items() if name not in TERMINAL_VARIABLES}
        environ["TERM"] = WINDOW_TERM
    body = {**read_fields(call, [name for name, row in ASKED.items() if row.flag]), "env": dict(options.env)}
    if not call.is_remote:
        # With --node, an absolute --cwd is of that machine.
        is_there = options.node and not options.snapshot and (options.cwd or "").startswith("/")
        umask = os.umask(0o077)
        os.umask(umask)
        body.update(environment=environ, cwd=options.cwd if is_there else find_cwd(options.cwd), umask=umask)
    return body


WINDOW_TERM = "screen-256color"         # a window of screen understands this, whatever the terminal is that shows it
TERMINAL_VARIABLES = ("COLORTERM", "COLUMNS", "LINES", "TERMCAP")      # of the terminal that a command is typed at


def is_interactive(call: Call) -> bool:
    """Whether `run --tty` is typed at a terminal, which then shows the job's."""
    options = call.options
    return (options.subcommand == "run" and options.tty and not options.dry_run and sys.stdin.isatty()
            and call.out.isatty())


def read_fields(call: Call, names: Iterable[str]) -> dict[str, Any]:
    """{field of a job: value} from those options that were given.  Raises: usage."""
    values = {name: getattr(call.options, name) for name in names}
    if isinstance(values["begin"], str):        # as UTC: the service may be in another time zone
        values["begin"] = format_time(parse_begin(values["begin"], time.time()))
    return {name: None if value is NONE else value
            for name, value in values.items() if value is not None and value is not False}


def find_cwd(folder: str | None) -> str:
    try:
        path = os.path.abspath(folder) if folder else os.getcwd()
    except FileNotFoundError:
        refuse("the current directory has been deleted", hint="cd somewhere else, or use --cwd DIR")
    check_directory(DISK, "--cwd", path)
    return path


def read_jobs(call: Call) -> list[dict[str, Any]]:
    """What tells the jobs to add apart: the words or the lines of --file, for each combination of --sweep.

    Each is `{"command": …}`; with a sweep as in `each` of POST /queue.  Raises: usage.
    """
    commands, is_script = read_commands(call)       # also takes over a script's options
    if call.options.sweep:
        return spread_sweeps(call, commands, is_script)
    return [{"command": command} for command in commands]


def spread_sweeps(call: Call, commands: Sequence[str], is_script: bool) -> list[dict[str, Any]]:
    """A job for each combination of --sweep.  Options with placeholders are taken out of the call's.  Raises: usage."""
    options, combinations = call.options, list_combinations(call.options.sweep)
    own_env = {name: text for name, text in options.env if find_placeholders(text)}
    options.env = [(name, text) for name, text in options.env if name not in own_env]
    given = {name: text for name in ("name", "group", "cwd")
             if (text := getattr(options, name)) and find_placeholders(text)}
    for name in given:
        setattr(options, name, None)
    shared = {word for text in (*given.values(), *own_env.values()) for word in find_placeholders(text)}
    unfilled = set[str]()
    for command in commands:
        places, names = {*shared, *find_placeholders(command)}, combinations[0]
        unfilled |= places.difference(names)
        unused = [name for name in names if name not in places]
        if unused and not is_script:            # a script has its values in its environment
            refuse(f"--sweep {unused[0]}: there is no {{{unused[0]}}} in the command {format_line(command, 100)}",
                   hint=f"put {{{unused[0]}}} where the value belongs, there or in --name, --group, --env or --cwd")
    if unfilled:
        words = join_some([f"{{{word}}}" for word in sorted(unfilled)])
        call.say(f"{words} stays as it is, as no --sweep has that name")
    rows = []
    for command in commands:
        for number, values in enumerate(combinations):
            plain = {name: strip_quotes(value) for name, value in values.items()}
            words = " ".join(f"{name}={value}" for name, value in plain.items())
            row: dict[str, Any] = {"command": fill_placeholders(command, values)}
            row.update((name, fill_placeholders(text, plain)) for name, text in given.items())
            if "name" not in row:
                row["name"] = format_line(f"{options.name} {words}" if options.name else words, 60)
            if "cwd" in row and not call.is_remote:
                row["cwd"] = find_cwd(row["cwd"])
            env = {name: fill_placeholders(text, plain) for name, text in own_env.items()}
            if is_script:
                env.update({"NEXUS_TASK_ID": str(number), **{f"NEXUS_SWEEP_{name}": plain[name] for name in plain}})
            rows.append({**row, **({"env": env} if env else {})})
    return rows


def read_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """The name and values of a --sweep, some of which may stand in a file.  Raises: usage."""
    def read_lines(path: str) -> list[str]:
        try:
            with open(os.path.expanduser(path), encoding="utf-8", errors="surrogateescape") as file:
                return file.read().splitlines()
        except OSError as error:
            refuse(f"--sweep {format_line(text, 60)}: cannot read {path}: {error.strerror}",
                   hint=f"@FILE gives a value a line; for the value @{path} itself: @@{path}")

    return parse_sweep(text, read_lines)


def read_commands(call: Call) -> tuple[list[str], bool]:
    """(the command, or the lines of --file; whether it runs a script).  Raises: usage."""
    words, path = call.options.command, call.options.file
    if path is None:
        line = join_command(words)
        first, _, rest = line.partition(" ")
        script = find_script(first, call.options.cwd)
        if script and not call.is_remote:
            return [read_script(call, script, first, rest)], True
        if words in ([], ["-"]):
            refuse("there is no command", hint=f'nexus {call.options.subcommand} "python train.py"; '
                   "a list of commands, one a line: nexus add --file -")
        if os.path.isfile("/dev/stdin") and os.lseek(0, 0, os.SEEK_CUR) == 0 < os.fstat(0).st_size:
            call.say("what is piped in here does not reach the job: name the file in the command, like "
                     "'python train.py < data'")
        unread = script or rest.partition(" ")[0]               # as in `bash job.sh`
        if parse_directives(read_script_text(unread)):
            how = " over NEXUS_URL" if call.is_remote else f"; type: nexus {call.options.subcommand} {quote(rest)}"
            call.say(f"the options in {unread} are not read{how}")
        if "/" in first and not call.is_remote and not call.options.node and os.path.isdir(
                os.path.join(call.options.cwd or "", first)):
            refuse(f"{first} is a directory, and no command", hint=f"--cwd {quote(first)} runs a command in it")
        whole = complete_command(line, call.options.cwd or "")
        if whole != line and not call.is_remote:
            refuse(f"{first} is a file, and no command", hint=f"nexus add --file {quote(first)} adds its lines"
                   if first.endswith(".txt") else f"nexus {call.options.subcommand} {quote(whole)}")
        return [line], False
    if words:
        refuse("give a command or --file, not both")
    try:
        with open(0 if path == "-" else path, encoding="utf-8", errors="surrogateescape", closefd=path != "-") as file:
            text = file.read()
    except OSError as error:
        refuse(f"cannot read {path}: {error.strerror}",
               hint="--file takes a file with one command a line, or - for standard input")
    if text.startswith("#!") or path.endswith(".py"):
        refuse(f"{path} is a script, and --file takes a list of commands, one a line",
               hint='nexus add job.sh, or nexus add "python train.py"')
    commands = parse_commands(text)
    if not commands:
        refuse(f"{path} holds no command", hint="one a line; empty lines and those that begin with # are left out")
    for number, command in commands:
        try:
            check(COMMAND, command, "the command")
            check_command(command)
        except NexusError as error:
            refuse(f"line {number}, '{format_line(command, 100)}': {error.message}", error.hint)
    return [command for _, command in commands], False


def read_script_text(path: str) -> str:
    """The first part of a text file; empty for any other."""
    content = read_part(DISK, path, 0, 2**16) if os.path.isfile(path) else b""
    return "" if b"\0" in content else content.decode("utf-8", "replace")


def find_script(first: str, cwd: str | None) -> str:
    """The file of a command's first word, when that begins with #! or has options; empty otherwise."""
    path = next(filter(os.path.isfile, [os.path.join(cwd or "", first), first]), "")
    text = read_script_text(path)
    if not text.startswith("#!") and not parse_directives(text):
        return ""
    program = find_program(first)               # a command of that name
    return path if not program or os.path.samefile(program, path) else ""


def read_script(call: Call, path: str, first: str, rest: str) -> str:
    """The command that runs a script.  Its options are taken into those of the call, which win.  Raises: usage."""
    import argparse
    import shlex
    options, parser, text = call.options, make_parser(call.options.chosen), read_script_text(path)
    given, ignored = argparse.Namespace(), list[str]()
    for number, mark, line in parse_directives(text):
        try:
            words = shlex.split(line, comments=True)
            parser.parse_args(words if mark == "NEXUS" else translate_sbatch(words, ignored), given)
            if given.command or given.file:
                refuse(f"{given.command[0] if given.command else '--file'} is not an option of a script")
        except ValueError as error:                                                 # shlex's
            refuse(f"{path}, line {number}: {error}")
        except NexusError as error:
            message = error.message.replace(f"{options.subcommand}: ", "", 1)
            raise NexusError(error.kind, f"{path}, line {number}: {message}", error.hint) from None
    for name, value in vars(given).items():
        default, ours = parser.get_default(name), getattr(options, name)
        if isinstance(default, list):
            setattr(options, name, [one for one in value if one[0] not in dict(ours)] + ours)
        elif ours == default:
            setattr(options, name, value)
    for pattern, note in SCRIPT_NOTES:
        if (match := re.search(pattern, text)) and not call.client.status()["slurm"]:
            call.say(f"{path}: {match.expand(note)}")
    if ignored:
        call.say(f"{path}: nexus does without {', '.join(dict.fromkeys(ignored))}")
    is_array = "task" in dict(options.sweep)
    options.group = options.group or (is_array and (options.name or os.path.basename(path))) or None
    is_here = os.path.realpath(os.path.join(options.cwd or "", first)) == os.path.realpath(path)
    run = first if is_here else quote(os.path.abspath(path))
    program = re.match("#!(?:/usr/bin/env (?:-S )?)?(.*)", text)
    if not (program and "/" in run and os.access(path, os.X_OK)):
        run = f"{program[1].strip() if program else 'bash'} {run}"
    return " ".join(filter(None, ["SLURM_ARRAY_TASK_ID={task}" if is_array else "", run, rest]))


def cmd_add(call: Call) -> None:
    show_added(call, submit(call, read_jobs(call)))


# (what a command has, what is said of it)
COMMAND_NOTES = (
    ("CUDA_VISIBLE_DEVICES=", "the command sets CUDA_VISIBLE_DEVICES, by which nexus gives a job its GPUs: without it, "
     "the job uses those; --gpu-ids 3 asks for GPU 3"),
    (r"(?s)^(?!.*(?:conda\.sh|bin/activate|hook)).*?\b((?:micro)?mamba|conda) activate ([^\s;&|]+)",
     r"\1 activate is for a terminal, and a job has none: leave it out, and say --conda \2"))
# A program that is given nothing but what is typed
TYPED_TO = (r"(?:\S*/)?(?:(?:(?:ba|z|fi|da|k|c|tc)?sh|i?python[\d.]*|R|julia|node)(?:\s+(?:-[ilq]+|--login|--no\w+))*"
            r"|(?:n?vim?|nano|htop|nvtop)(?:\s+[^-\s]\S*)*)")
# (what a script has, what is said of it, where no Slurm runs the jobs)
SCRIPT_NOTES = (
    (r"(?m)^[ \t]*(?:exec |time )*srun\b", "it calls srun, which has Slurm start programs: nexus has started it, so "
     "leave srun out"),
    (r"\$\{?(SLURM_(?!ARRAY_TASK_ID\b)\w+)", r"it reads $\1, which only Slurm sets: NEXUS_JOB_ID, NEXUS_GPU_ID and "
     "NEXUS_TASK_ID tell a job's id, GPUs and number here"))


def submit(call: Call, jobs: Sequence[Json]) -> dict[str, Any]:
    """Submit what read_jobs() returned, or check it with --dry-run, and warn."""
    options = call.options
    is_one = options.file is None and not options.sweep
    body = {**make_options(call), **(jobs[0] if is_one else {"each": jobs}), "dry_run": options.dry_run}
    if options.snapshot:
        body["cwd"] = os.path.realpath(body["cwd"])
        if options.dry_run:
            find_work_tree(body["cwd"], call.environ)
        else:
            with unwinding():
                snapshot = take_snapshot(body["cwd"], call.own_environ)
            body.update(snapshot=snapshot.commit, snapshot_repo=snapshot.repository)
    answer = call.client.submit(body)
    for job_id in answer.get("known", ()):
        call.say(f"job {job_id} is the same and is there already: nothing was added for it")
    typed_to = next((one["command"] for one in jobs if re.fullmatch(TYPED_TO, one["command"])), None)
    if typed_to and not is_interactive(call):
        call.say(f"{typed_to} waits for what is typed: at a terminal, nexus run --tty {quote(typed_to)} is an "
                 "interactive job; nexus attach ID reaches one that runs")
    for pattern, note in COMMAND_NOTES:
        if match := next(filter(None, (re.search(pattern, one["command"]) for one in jobs)), None):
            call.say(match.expand(note))
    if call.is_remote and not options.cwd:
        call.say(f"it runs in the home directory at {call.client.host}, with the environment there; "
                 "--cwd DIR names another")
    return answer


def show_added(call: Call, answer: Json) -> None:
    if "warning" in answer:
        call.say(answer["warning"])
    if call.options.dry_run:
        call.show(answer["jobs"], lambda jobs, paint: paint.join([job["command"] for job in jobs]))
        asked = describe_changes(read_fields(call, [name for name, row in ASKED.items() if row.flag]))
        call.say(f"{format_count(len(answer['jobs']), 'job')} would be added{asked and ', with '}{asked}; "
                 "this was a dry run")
    else:
        call.show(answer, lambda answer, paint: paint.join(answer.get("ids") or [answer["id"]]))


def cmd_run(call: Call) -> int:
    jobs = read_jobs(call)
    if len(jobs) != 1:
        refuse(f"run takes one command, and these are {len(jobs)}", hint="nexus add queues them all")
    if is_interactive(call):
        check_interactive(call, jobs[0]["command"])
    answer = submit(call, jobs)
    if call.options.dry_run:
        show_added(call, answer)
        return 0
    job_id, = answer.get("ids") or [answer["id"]]
    try:
        call.say(f"job {job_id}")
        wait_until(lambda: call.client.job(job_id)["status"] != PENDING, 1.0, 0.05)
        if reason := call.client.job(job_id)["waiting_for"]:
            call.say(f"it waits: {reason}")
        if is_interactive(call) and (code := show_terminal(call, job_id)) is not None:
            return code
        if not pass_on_logs(call, job_id):
            write_to(call.err, b"\n")
        job = call.client.wait([job_id])[0]
        call.say(describe_seen_end(job))
        return exit_code_of(job)
    except (KeyboardInterrupt, BrokenPipeError) as end:     # Ctrl-C; `nexus run ... | head`
        with contextlib.suppress(BrokenPipeError):          # stderr goes there too
            job = call.client.job(job_id)
            follow = f"nexus attach {job_id}" if is_interactive(call) else f"follow it: nexus logs -f {job_id}"
            call.say(describe_end(job) if job["status"] in FINAL else
                     f"job {job_id} {'still waits' if job['status'] == PENDING else 'goes on'}; "
                     f"{follow}; stop it: nexus cancel {job_id}")
        return 130 if isinstance(end, KeyboardInterrupt) else 141           # 128 + SIGINT, SIGPIPE


def check_interactive(call: Call, command: str) -> None:
    """Raises: usage, where no job has a terminal that can be shown here."""
    line = f"nexus run --tty {quote(command)}"
    without = f"to see only its output: {line} </dev/null"
    if call.is_remote:
        refuse("NEXUS_URL is set, and a job's terminal is shown on the service's own machine", hint=(
            f"there: {line}; {without}"))
    status = call.client.status()
    if status["slurm"]:
        refuse("Slurm's jobs have no terminal to attach to", hint=f"srun --gres=gpu:1 --pty {command}; {without}")
    if status["no_screen"] and not call.options.node:
        refuse(f"{status['no_screen']}: jobs have no terminal to attach to", hint=(
            f'[jobs] launcher = "screen" gives them one: nexus config edit, nexus restart; {without}'
            if "launcher" in status["no_screen"] else f"apt install screen, then nexus restart; {without}"))


def show_terminal(call: Call, job_id: str) -> int | None:
    """Show a job's terminal until it is left or the job has ended; return the exit code.

    None: the job has no terminal, or was over before that could be shown.  Its output says all then.
    """
    attempt = 0
    while True:
        job = await_begin(call, job_id)
        if job["status"] in FINAL or job["attempt"] == attempt:
            return None
        if not job["session"]:
            call.say(f"job {job_id} has no screen session on {job['node']}: this is its output alone")
            return None
        attempt, code = job["attempt"], open_terminal(call, job)
        if code == NOT_OPENED:
            return None
        job = find_left(call, job, code)
        say_left(call, job, code)
        if job["status"] in FINAL:
            return exit_code_of(job)
        if code != SESSION_OVER:
            return code


def await_begin(call: Call, job_id: str) -> dict[str, Any]:
    """The job, once its command runs or it has ended."""
    while True:
        job = call.client.job(job_id)
        if job["status"] in FINAL or (job["status"] == RUNNING and job["pid"]):
            return job
        time.sleep(0.3)


def pass_on_logs(call: Call, job_id: str, follow: bool = True, stream: str = "both", tail: int | None = None,
                 has_times: bool = False) -> bool:
    """Copy a job's stdout and stderr to ours, as they are; with `follow`, until the job ends.

    Returns whether the next line of stderr begins on a new line.
    """
    targets, attempt = {"stdout": call.out, "stderr": call.err}, 1
    last = {"stdout": b"\n", "stderr": b"\n"}               # the last byte of each
    for entry in call.client.follow(job_id, stream, tail, follow):
        name, at = entry["stream"], entry["at"]
        content = entry["text"].encode("utf-8", "surrogateescape")
        if entry["attempt"] != attempt and entry["has_earlier"]:
            call.say(f"attempt {entry['attempt']}, {local_time(entry['started_at'], '%Y-%m-%d %H:%M:%S')}")
        attempt = entry["attempt"]
        if tail is not None and not follow:
            content = content.rstrip(b"\r")                 # of a line that goes on: what comes next would overwrite it
        if not content:
            continue
        former, last[name] = last[name], content[-1:]
        if has_times:
            stamp = f"{local_time(at[:19] + 'Z', '%Y-%m-%d %H:%M:%S')}{at[19:21]}" if at else "-"
            content = stamp_lines(content, f"{stamp:21} ", former in b"\r\n")
        write_to(targets[name], content)
    return last["stderr"] == b"\n" and (last["stdout"] == b"\n" or not call.out.isatty())


def exit_code_of(job: Json) -> int:
    """The exit code of `run` and `wait`: the job's own; 1 when it has none, or was stopped and ended with 0."""
    return int(job["exit_code"] or job["status"] != COMPLETED)


def describe_end(job: Json) -> str:
    why = f" ({job['outcome'] or '-'})" if job["status"] != COMPLETED else ""
    return f"job {job['id']} {job['status']}{why}" + (f": {job['cause_line']}" if job["cause_line"] else "")


def describe_seen_end(job: Json) -> str:
    """Of a job whose output was seen: the cause of a non-zero exit code is its last line, which stands there."""
    return describe_end({**job, "cause_line": None} if job["cause"] == "exit" else job)


def cmd_wait(call: Call) -> int:
    ids = call.options.ids
    if call.options.group is None and not ids:
        refuse("wait takes jobs, or --group", hint="nexus wait ID, or nexus wait --group NAME")
    if call.options.group is not None:
        of_group = [job for job in ask_for_jobs(call) if job["status"] != COMPLETED and not job["retried_as"]]
        ids = [*ids, *(job["id"] for job in of_group)]
    ended, total = set[str](), len(set(ids))

    def say_end(job: Json) -> None:
        ended.add(job["id"])
        call.say(describe_end(job) + (f"; {len(ended)} of {total} have ended" if total > 1 else ""))

    # A name is looked up once: meanwhile another job may get it.
    ids = [job_id if is_job_id(job_id) else call.client.job(job_id)["id"] for job_id in ids]
    jobs = call.client.wait(ids, say_end, call.options.any)
    return next(filter(None, map(exit_code_of, jobs)), 0)


def ask_for_jobs(call: Call) -> list[dict[str, Any]]:
    """All jobs, or those of --group.  Raises: not_found."""
    group = call.options.group
    jobs = call.client.jobs(group=group)
    if group is not None and not jobs:
        known = {job["group"] for job in call.client.jobs() if job["group"]}
        raise NexusError("not_found", f"there is no job of group '{format_line(group, 60)}'",
                         hint=suggest(group, known) or "nexus jobs lists all")
    return jobs


def list_part(call: Call, path: str, **query: Any) -> tuple[list[dict[str, Any]], int]:
    """(the jobs that the options choose, how many there are).  -n is the limit; default: the terminal's height."""
    options = call.options
    most = options.number
    if most is None and call.paint.height and not options.json and not getattr(options, "since", None):
        most = max(10, call.paint.height - 6)
    query.update(limit=most or None, user=options.user, group=options.group, name=options.name)
    return call.client.ask_list(path + encode_query(query))


def describe_choice(call: Call) -> str:
    """Which jobs the options choose, beside their status, for a message: ` of group g`, or "" for all."""
    words = {"user": "of", "group": "of group", "name": "named", "since": "of the last"}
    return "".join(f" {word} {quote(format_line(text, 60))}" for name, word in words.items()
                   if (text := getattr(call.options, name, None)) is not None)


def cmd_queue(call: Call) -> None:
    jobs, total = list_part(call, "/queue", fields=None if call.options.json else ",".join(QUEUE_FIELDS))
    call.show(jobs, format_queue, f"no job{describe_choice(call)} is pending")
    if len(jobs) < total:
        call.say(f"… {total - len(jobs)} more wait behind them; nexus queue -n 0 shows all")


def cmd_history(call: Call) -> None:
    show_latest(call, list(FINAL), "finished_at", f"no job{describe_choice(call)} has finished yet")


def cmd_jobs(call: Call) -> None:
    chosen = describe_choice(call)
    show_latest(call, list(STATUSES), "created_at",
                f"there is no job{chosen}" if chosen else 'no job yet: nexus add "python train.py"')


def show_latest(call: Call, statuses: Sequence[str], order: str, when_empty: str) -> None:
    """Show the newest jobs, the newest last, next to the prompt."""
    since = call.options.since
    if call.options.status:
        statuses = call.options.status
        when_empty = f"no job{describe_choice(call)} is {' or '.join(statuses)}"
    jobs, total = list_part(call, "/jobs", status=statuses, sort=f"-{order}")
    begin = time.time() - parse_duration(since) if since else 0.0
    chosen = [job for job in jobs[::-1] if parse_time(job["finished_at"] or job["created_at"]) >= begin]
    call.show(chosen, format_jobs, when_empty)
    if len(jobs) < total:
        call.say(f"the last {len(jobs)} of {total}; nexus {call.options.subcommand} -n 0 shows all")


ENDED_STATUSES = {"kill": [RUNNING], "remove": [PENDING], "cancel": [PENDING, RUNNING]}     # of jobs given by their ids


def cmd_end(call: Call) -> None:
    """kill, cancel and remove: end jobs, all or none; return when they have ended."""
    options, command = vars(call.options), call.options.subcommand
    targets, takes_all = options["ids"], options.get("all", False)
    choice = {name: options[name] for name in ("group", "status") if options.get(name) is not None}
    if choice.get("group") == "":               # perhaps a variable that is not set
        refuse("--group needs a name", hint="nexus jobs lists the groups")
    if bool(targets) == bool(choice):
        refuse(f"{command} takes jobs, or --group or --status", hint=f"nexus {command} ID; {ALL_END}")
    if command == "kill":
        targets = [job_id for target in targets for job_id in find_targets(call, target, takes_all)]
    if targets:
        choice = {"ids": targets, "status": ENDED_STATUSES[command]}
    if options.get("signal") is not None:
        choice["signal"] = options["signal"]
    jobs = call.client.ask("POST", "/jobs/cancel", choice)["jobs"]
    if not jobs:
        return call.say("no such job is pending or running")
    if len(jobs) < len(set(targets)):
        call.say(f"{len(set(targets)) - len(jobs)} of these jobs had ended before")
    unheard = set[str]()

    def say_late(job: Json) -> None:
        if job["unknown_since"] and job["id"] not in unheard:
            unheard.add(job["id"])
            say_unheard(call, job, f"job {job['id']} is ended when it is back (Ctrl-C leaves it so; nexus node remove "
                        f"{job['node']} --force gives it up)")

    for job in jobs:
        say_late(job)
    ended = [job for job in jobs if job["status"] in FINAL]
    if len(ended) > 1 and not targets:
        group = f" of group {choice['group']}" if "group" in choice else ""
        call.say(f"{len(ended)} pending jobs{group} cancelled")
    else:
        for job in ended:
            call.say(describe_end(job))
    call.client.wait([job["id"] for job in jobs if job["status"] not in FINAL],
                     lambda job: call.say(describe_end(job)), on_look=say_late)
    say_dragged(call, [job["id"] for job in jobs])


def say_unheard(call: Call, job: Json, what: str) -> None:
    call.say(f"{job['node']} has not been heard since {local_time(job['unknown_since'], '%m-%d %H:%M')}: {what}")


def say_dragged(call: Call, ended: Sequence[str]) -> None:
    """Name the jobs that were cancelled because they were to come after these."""
    gone, children = list(ended), [job for job in call.client.jobs(status=CANCELLED, fields="id,after,cause,retried_as")
                                   if job["cause"] == "dependency" and not job["retried_as"]]       # none of others
    for parent in gone:                         # it grows
        gone += [job["id"] for job in children if parent in job["after"] and job["id"] not in gone]
    if dragged := gone[len(ended):]:
        call.say(f"with it {format_count(len(dragged), 'job')} that came after: {join_some(dragged, 10)}; to run all "
                 f"again: nexus retry {' '.join(gone) if len(gone) <= 10 else 'ID...'}")


def find_job(call: Call) -> dict[str, Any]:
    """The job that the id or GPU in the options names."""
    return call.client.job(find_targets(call, call.options.id)[0])


def cmd_show(call: Call) -> None:
    job, lines = find_job(call), list[str]()
    is_on_gpus = job["status"] == RUNNING and job["gpus"] and not call.options.json
    gpus = call.client.status()["gpu_status"] if is_on_gpus else []
    if job["started_at"] and not call.options.json:
        query = encode_query({"tail": LAST_LINES, "offset": -LAST_BYTES})
        _, pieces = call.client.open_stream(f"/jobs/{quote_path(job['id'])}/logs{query}")
        text = re.sub("(?m)^---- attempt .*----$", "", b"".join(pieces).decode("utf-8", "replace"))
        lines = find_last_lines(text, LAST_LINES) or list(filter(None, [job["last_line"]]))
    call.show(job, functools.partial(format_job, last_lines=lines, gpus=gpus))


LAST_LINES = 5                  # that `show` prints
LAST_BYTES = 2**22              # of each log, where it looks for them


def find_targets(call: Call, target: str, takes_all: bool = False) -> list[str]:
    """[job id] for an id, or for a GPU like `0` or `n1:0.1`.  Raises: not_found; conflict, when jobs share the GPU."""
    if not re.fullmatch(GPU_PLACE, target):
        return [target]
    status, (node, _, name) = call.client.status(), target.rpartition(":")
    gpus = [gpu for gpu in status["gpu_status"] if gpu["node"] == (node or status["host"]["name"])
            and name in (str(gpu["index"]), gpu["place"].rpartition(":")[2])]       # a card's number: all its slices
    if not gpus:
        raise NexusError("not_found", f"there is no GPU {target}", hint="nexus shows them")
    job_ids = list(dict.fromkeys(job_id for gpu in gpus for job_id in gpu["job_ids"]))
    if not job_ids:
        raise NexusError("not_found", f"no job of nexus runs on GPU {target}", hint="nexus shows what runs where")
    if len(job_ids) > 1 and not takes_all:
        raise NexusError("conflict", f"jobs {', '.join(job_ids)} share GPU {target}",
                         hint=f"name one, or nexus kill {target} --all")
    return job_ids


def cmd_move(call: Call) -> None:
    options = call.options
    if options.priority is not None:
        job = call.client.edit(options.id, priority=options.priority)
    else:
        job = call.client.edit(options.id, position=0 if options.first else -1)
    before = job["position"]
    call.say(f"job {options.id} " + (f"now has {format_count(before, 'job')} before it" if before else "is now first"))


def cmd_edit(call: Call) -> None:
    change = {**read_fields(call, EDITS), **({"env": dict(call.options.env)} if call.options.env else {})}
    if not change:
        refuse("there is nothing to change", hint="name what, like --gpus 2; nexus help edit lists the options")
    job = call.client.edit(call.options.id, **change)
    call.say(f"job {job['id']} is changed: {describe_changes(change)}")


def describe_changes(change: Json) -> str:
    """`GPUs 2, after abc`; of variables, the names."""
    told = []
    for name, value in change.items():
        line, show = SHOW_LINES["Asked for"].get(name, (f"{name}: {{}}", show_fact))
        told.append(line.replace(":", "", 1).format("none" if value in (None, [], ()) else show(
            list(value) if isinstance(value, dict) else value)))
    return ", ".join(told)


def cmd_retry(call: Call) -> None:
    options, ids = call.options, call.options.ids
    takes_failed = options.failed or options.group is not None
    if bool(ids) == takes_failed:
        refuse("retry takes jobs, or --failed, or --group",
               hint="nexus retry ID, nexus retry --failed, or nexus retry --group NAME")
    if takes_failed:
        ids = [job["id"] for job in ask_for_jobs(call) if not job["retried_as"] and (
            job["status"] == FAILED or job["cause"] == "dependency")]
        if not ids:
            return call.say("no failed job is left to run again")
    change = read_fields(call, CHANGES)
    if not options.dry_run:
        body = {"ids": ids, **({"change": change} if change else {})}
        return show_added(call, call.client.ask("POST", "/jobs/retry", body))
    jobs = [call.client.job(job_id) for job_id in ids]
    for job in jobs:
        if job["status"] not in FINAL:
            raise NexusError("conflict", f"job {job['id']} is {job['status']}; only a finished one can be run again")
    call.print(*(f"{job['id']}: {job['command']}" for job in jobs))
    call.say(f"{format_count(len(jobs), 'job')} would be run again; this was a dry run")


def cmd_metrics(call: Call) -> None:
    call.show(make_metrics(call.client.status(), call.client.jobs(status=list(FINAL))), format_metrics)


def cmd_logs(call: Call) -> None:
    """Print the logs of jobs, one after the other (default: the job that started last), or of the service."""
    options = call.options
    if options.ids == ["service"]:
        return show_service_log(call)
    jobs = [call.client.job(find_targets(call, target)[0]) for target in options.ids] or call.client.jobs(
        sort="-started_at", limit=1, status=[status for status in STATUSES if status != PENDING])
    if not jobs:
        raise NexusError("not_found", "no job has started yet", hint="nexus queue says what waits, and why")
    for job in jobs:
        if len(jobs) > 1 or job["id"] not in options.ids:
            call.say(f"job {job['id']}, {job['status']}: {name_or_command(job)}")
        if job["status"] == PENDING:
            call.say(f"job {job['id']} is pending: {job['waiting_for']}")
        elif not job["started_at"]:
            call.say(f"job {job['id']} never ran: {describe_end(job)}")
        if job["unknown_since"]:
            say_unheard(call, job, f"what job {job['id']} prints comes when it is back")
        pass_on_logs(call, job["id"], options.follow, options.stream, options.number, options.timestamps)


def show_service_log(call: Call) -> None:
    follow, number = call.options.follow, call.options.number
    pieces = call.client.logs("service", follow, tail=number) if call.is_remote else read_service_log(call)
    for line in split_lines(pieces):    # print() escapes control characters: other people's names are in the log
        call.print(line.decode("utf-8", "replace"))


def read_service_log(call: Call) -> Iterator[bytes]:
    """Read the file itself: it is needed most when the service is down."""
    layout = call.layout
    if find_service(layout) is None:
        if not os.path.exists(layout.service_log):
            raise NexusError("unavailable", f"the service for {layout.home} does not run, and there is no log of it",
                             hint="nexus start")
        call.say("the service does not run; this is its last log (to start it: nexus start)")
    reader = LogReader(DISK, layout.home, (0,), [os.path.basename(layout.service_log)])
    reader.begin((), (0, 0), call.options.number)
    while True:
        yield from (entry.content for entry in [*reader.read(), *reader.flush()])
        if not call.options.follow:
            return
        time.sleep(0.2)


def cmd_attach(call: Call) -> int:
    """Attach to a job's screen session, here or on its node; then say whether the job has ended, and how."""
    job = find_job(call)
    if job["status"] != RUNNING:
        raise NexusError("conflict", f"job {job['id']} is {job['status']}: there is nothing to attach to",
                         hint="why it waits: nexus queue" if job["status"] == PENDING else f"nexus logs {job['id']}")
    if not job["session"]:
        raise NexusError("conflict", f"job {job['id']} has no screen session", hint=f"nexus logs -f {job['id']}")
    if not sys.stdin.isatty():
        refuse("attach needs a terminal", hint=f"nexus logs -f {job['id']}")
    code = open_terminal(call, job)
    job = find_left(call, job, code)
    say_left(call, job, code)
    return 0 if job["status"] in FINAL else code


# $0 is the session.  The exit code is 0 when it is still there: it was left.
ATTACH_SCRIPT = 'screen -x "$0" || exit 2; screen -ls "$0" | grep -qF "$0"'
SESSION_OVER, NOT_OPENED, LINE_LOST = 1, 2, 255     # its other exit codes, and ssh's
END_TIMEOUT_S = 10.0            # of a job's end after that of its session, above all on a node


def open_terminal(call: Call, job: Json) -> int:
    """Show a running job's screen session; return 0 when it was left, or another exit code of ATTACH_SCRIPT."""
    import subprocess
    assert call.client.layout
    own = job["session"].partition(".")[0] + "."     # its pid: screen names the session a moment after the start
    words = ["sh", "-c", ATTACH_SCRIPT, own]
    node = next((node for node in call.client.nodes()[1:] if node["name"] == job["node"]), None)
    if node:
        ssh = Ssh(parse_node({key: node[key] for key in NodeConfig.FIELDS if node[key]}), call.own_environ)
        there = ["env", "TERM=xterm-256color", *node["screen"], *words]
        words, environ = ssh.list_words(" ".join(map(quote, there)), is_tty=True), ssh.environ
    else:
        # screen's own TERM: with one that terminfo lacks here it would end at once, with exit code 0.
        environ = {**call.environ, **prepare_screen(call.client.layout).environ()}
    call.say(f"on {job['node']}: {'Ctrl-A a D' if call.environ.get('STY') else 'Ctrl-A D'} leaves; "
             + ("keys and Ctrl-C go to the program" if job["tty"] else "Ctrl-C ends the job"))
    time.sleep(1.5)                                 # to be read: screen clears the terminal
    if call.client.job(job["id"])["status"] in FINAL:
        return NOT_OPENED
    return subprocess.call(words, env=environ)


def find_left(call: Call, job: Json, code: int) -> dict[str, Any]:
    """What has become of a job whose terminal was shown.  Where that is over, the service hears of it in a moment."""
    def find_change() -> dict[str, Any] | None:
        now = call.client.job(job["id"])
        return now if now["status"] != RUNNING or now["attempt"] != job["attempt"] else None

    is_over = code in (SESSION_OVER, NOT_OPENED)
    return wait_until(find_change, END_TIMEOUT_S if is_over else 0, 0.1) or call.client.job(job["id"])


def say_left(call: Call, job: Json, code: int) -> None:
    job_id, lost = job["id"], f"the line to {job['node']} was lost; " if code == LINE_LOST else ""
    if job["status"] in FINAL:
        call.say(f"{describe_seen_end(job)}; what it printed: nexus logs {job_id}")
    elif code == SESSION_OVER:
        call.say(f"this terminal is over; job {job_id} is {job['status']}: nexus show {job_id}")
    else:
        call.say(f"{lost}job {job_id} goes on; nexus attach {job_id} comes back to it")


def prepare_screen(layout: Layout) -> Screen:
    """Raises: unavailable, when there is no usable screen."""
    screen = Screen(DISK, layout)
    reason = screen.prepare()
    if reason:
        raise NexusError("unavailable", reason, advise_on_screen(reason))
    return screen


def cmd_screens(call: Call) -> None:
    assert call.client.layout
    commands = {job["session"]: job["command"] for job in call.client.jobs(status=RUNNING)}
    sessions = prepare_screen(call.client.layout).list_sessions()
    rows = [(session, state, "the service's log" if session.endswith(".nexus") else "over, or of another NEXUS_HOME")
            for session, state in sessions.items() if re.match(r"\d+\.nexus(_job_|$)", session)]
    call.show(rows, functools.partial(format_table, (
        Column("SESSION", lambda row: row[0], "magenta"),
        Column("STATE", lambda row: row[1]),
        Column("WHAT", lambda row: commands.get(row[0], row[2]), "bright"),
    )), "there is no screen session of nexus")


def cmd_clear(call: Call) -> None:
    options = call.options
    if not (options.ids or options.all or options.status or options.group is not None):
        refuse("name the jobs to forget: their logs are deleted too",
               hint="nexus clear ID, --status failed, --group NAME, or --all")
    status = options.status or (None if options.ids else list(FINAL))
    choice = {"ids": options.ids or None, "group": options.group, "status": status}
    if not options.ids and sys.stdin.isatty() and call.err.isatty():
        jobs = call.client.jobs(group=options.group, status=status, fields="id")
        call.say(f"forget {format_count(len(jobs), 'finished job')}, with all logs? (y: yes)")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return call.say("nothing was forgotten")
    ids = call.client.clear(**{name: fact for name, fact in choice.items() if fact is not None})
    call.say(f"{format_count(len(ids), 'finished job')} forgotten, with {'its' if len(ids) == 1 else 'their'} logs")


def cmd_pause(call: Call) -> None:
    """Pause or resume the queue, a group, GPUs, or pending jobs."""
    verb, targets, group = call.options.subcommand, call.options.targets, call.options.group
    goes_on = "; running jobs go on" if verb == "pause" else ""
    if targets and group is not None:
        refuse(f"{verb} takes GPUs and jobs, or --group, not both", hint=f"nexus help {verb}")
    for target in targets:
        if re.fullmatch(GPU_PLACE, target):
            call.client.pause(target, verb=verb)
            call.say(f"GPU {target} is {verb}d{goes_on}")
        else:
            job = call.client.edit(target, is_held=verb == "pause")
            call.say(f"job {job['id']} {'is held: nexus resume ' + job['id'] if job['is_held'] else 'may start'}")
    if not targets:
        call.client.pause(None, group, verb)
        what = f"group {group}" if group is not None else "the queue"
        call.say(f"{what} is {verb}d{goes_on}")
        paused = [gpu["place"] for gpu in call.client.status()["gpu_status"] if gpu["is_paused"]]
        if paused and verb == "resume":
            call.say(f"still paused: GPU {format_indices(paused)}; nexus resume {' '.join(paused)}")


def find_config(call: Call) -> str:
    """The path of --config, else of the last start, else the default.  Raises: usage."""
    path, layout = call.options.config, call.layout
    if path and not os.path.isfile(path) and os.path.abspath(path) != layout.config_file:
        refuse(f"there is no file {path}", hint="nexus config sample prints one")
    return os.path.abspath(path) if path else choose_config(DISK, layout)


def cmd_start(call: Call) -> None:
    options, path = call.options, find_config(call)
    if find_service(call.layout) is None:
        start_service(call.layout, call.environ, path, options.log_level)
        return call.say(f"the service runs at {call.client.url}")
    if options.config or options.log_level:
        refuse("the service runs already; these options take effect at its next start",
               hint="nexus restart takes them too; jobs go on")
    call.say(f"the service runs already, at {call.client.url}")


def cmd_stop(call: Call) -> None:
    waiting = stop_service(call)
    again = "nexus start on its own machine" if call.is_remote else "the next nexus command"
    waits = f"; {format_count(waiting, 'pending job')} may start then (nexus pause first holds them)" if waiting else ""
    call.say("the service does not run" if waiting is None else
             f"the service has ended; running jobs go on, and {again} starts it again{waits}")


def stop_service(call: Call) -> int | None:
    """End the service; return how many jobs wait; None: there was none."""
    running = None
    if not call.is_remote:
        mark_stopped(DISK, call.layout, True)         # the supervisor could start it again just now
        running = find_service(call.layout)
        if running is None:
            return None
    client = Client.find(call.environ, is_starting=False)

    def has_ended() -> bool:
        if running:
            return not is_alive(running)
        try:                                    # a tunnel accepts connections although nothing listens behind it
            Client.find(call.environ).ask("GET", "/")
        except NexusError:
            return True
        return False

    _, waiting = client.ask_list("/jobs" + encode_query({"status": PENDING, "limit": 1, "fields": "id"}))
    client.stop()
    if not wait_until(has_ended, 60.0):
        raise NexusError("unavailable", "the service does not end", hint="nexus logs service says why")
    return waiting


def cmd_restart(call: Call) -> None:
    running = find_service(call.layout)
    if running:
        return replace_service(call, running)
    config = load_config(DISK, find_config(call), call.environ)
    check_start(DISK, make_layout(call.layout.home, config), config)
    stop_service(call)                          # the supervisor could start it again just now
    cmd_start(call)


def replace_service(call: Call, running: Mapping[str, Any]) -> None:
    """End the service and start it anew.  Raises: why that is not possible; then the old one goes on, or runs again."""
    layout, log_level = call.layout, call.options.log_level
    with contextlib.ExitStack() as stack:
        try:
            path = find_config(call)
            config = load_config(DISK, path, call.environ)
            check_start(DISK, make_layout(layout.home, config), config)
            check_as_service(layout, call.environ, make_service_argv(layout, path, log_level))
            port, opened = open_port(DISK, layout, config.service, lambda port: (
                port, listen(config.service.host, port, former_port=parse_url(running["url"])[1])))
            stack.enter_context(offered(DISK, layout, opened))
            with contextlib.suppress(NexusError):       # the disk is full
                keep_port(DISK, layout, config.service, port)
        except NexusError as error:
            raise NexusError(error.kind, f"not restarted, the service goes on as it was: {error.message}",
                             error.hint) from None
        former = find_former(layout, running)
        stop_service(call)
        try:
            url = start_service(layout, call.environ, path, log_level)["url"]
            await_answer(layout, url)
            return call.say(f"the service runs at {url}")
        except NexusError as error:
            failure = error
    raise start_again(layout, former, failure)


def start_again(layout: Layout, former: FormerService | NexusError, failure: NexusError) -> NexusError:
    """Start the former service after a failed restart; return what is to be said."""
    end_supervisors(layout)                     # they would go on trying
    try:
        if isinstance(former, NexusError):
            raise former
        remember_config(DISK, layout, former.choice)
        running = launch_service(layout, former.environ, former.config, former.argv)
    except NexusError as error:
        return NexusError(failure.kind, f"the new service cannot start: {failure.message}; and the former one cannot "
                          f"be started again: {error.message}", error.hint or failure.hint)
    return NexusError(failure.kind, f"the new service cannot start: {failure.message}; the former one runs again, "
                      f"nexus {running['version']} ({running['hash']}), as it was", failure.hint)


def cmd_serve(call: Call) -> None:
    """Run the service in the foreground.  An error is also written to a file, for the command that has started it."""
    layout = call.layout
    if call.environ.get("NEXUS_ROLE") == "check":       # whether this Python can run it
        import_modules()
        config = load_config(DISK, find_config(call), call.environ)
        check_start(DISK, make_layout(layout.home, config), config)
        return
    try:
        path = find_config(call)
        config = load_config(DISK, path, call.environ)
        if call.options.log_level:
            config = replace(config, service=replace(config.service, log_level=call.options.log_level))
        layout = make_layout(layout.home, config)
        if call.out.isatty() and not find_service(layout):
            call.say(f"serving; the log is in {layout.service_log}; Ctrl-C ends the service, jobs go on")
        page = DASHBOARD_PAGE.replace("FORM_ROWS", json.dumps(form_rows()))
        page = page.replace("SHOW_ROWS", json.dumps(show_rows()))
        serve(layout, config, call.environ, page, path)
    except RunsAlready:
        raise
    except NexusError as error:
        with contextlib.suppress(NexusError):
            write_atomic(DISK, layout.start_error_file, [encode_json(error.to_json())], is_synced=False)
        raise


def cmd_agent(call: Call) -> None:
    """What a head runs on its nodes, over ssh."""
    config = load_config(DISK, choose_config(DISK, call.layout), call.environ)
    jobs = replace(config.jobs, launcher="screen" if config.jobs.launcher == "slurm" else config.jobs.launcher)
    run_agent(call.layout.home, replace(config, jobs=jobs), call.options.head, call.environ)


def cmd_config(call: Call) -> None:
    path = choose_config(DISK, call.layout)
    config = load_config(DISK, path, call.environ)
    port = find_port(DISK, call.layout, config.service) or PORTS[0]
    config = replace(config, service=replace(config.service, port=port))
    call.print(f"# {path}" + ("" if os.path.exists(path) else ": there is none; these are the defaults"),
               *format_config(config).rstrip("\n").split("\n"))


def cmd_open(call: Call) -> None:
    """Print the page's address, and how it is reached from elsewhere."""
    import socket
    if isinstance(call.client, Reader):         # it shows no page
        raise call.client.error
    url = call.client.url
    call.print(url)
    if not call.options.url and not call.is_remote and call.environ.get("SSH_CONNECTION"):
        port = url.rpartition(":")[2]
        call.say(f"from where you sit, first: ssh -L {port}:127.0.0.1:{port} {find_user(os.geteuid())}@"
                 f"{socket.gethostname()}")


def cmd_usage(call: Call) -> None:
    """Print jobs, GPU-hours and the share that failed, for each user or group."""
    by, duration = call.options.by, call.options.since or USAGE_SINCE
    since = format_time(time.time() - parse_duration(duration))
    rows = call.client.usage(since=duration, by=by)
    call.show(rows, functools.partial(format_table, (
        Column(by.upper(), lambda row: row[by]),
        Column("JOBS", lambda row: str(row["jobs"])),
        Column("GPU-HOURS", lambda row: f"{row['gpu_hours']:.1f}"),
        Column("CPU-JOB HOURS", lambda row: f"{row['cpu_job_hours']:.1f}",
               shown_if=lambda rows: any(row["cpu_job_hours"] >= 0.05 for row in rows)),
        Column("FAILED", lambda row: f"{row['failed']} of {row['ended']} ended"))), "no job ran in that time")
    whole = min((row["forgotten_since"] for row in rows if row["forgotten_since"]), default=None)
    note = f"; of jobs that are forgotten, whole days since {local_time(whole, '%Y-%m-%d')}" if whole else ""
    call.say(f"since {local_time(since, '%Y-%m-%d %H:%M')}; --since 24h: the last 24 hours{note}")


def cmd_config_edit(call: Call) -> int:
    import shlex
    import subprocess
    path, editor = choose_config(DISK, call.layout), call.environ.get("VISUAL") or call.environ.get("EDITOR") or "vi"
    make_folder(DISK, os.path.dirname(path))
    if not os.path.exists(path):
        write_atomic(DISK, path, [format_sample_config()])
    try:
        code = subprocess.call([*shlex.split(editor), path])
    except (OSError, ValueError) as error:
        refuse(f"the editor '{editor}' cannot be run: {error}", hint="EDITOR=nano nexus config edit")
    load_config(DISK, path, call.environ)
    if code == 0 and find_service(call.layout):
        call.say("the running service takes it over at its next start: nexus restart (jobs go on)")
    return code


def cmd_health(call: Call) -> int:
    health = call.client.health()
    call.show(health, format_health)
    return int(not health["is_healthy"])


# Tokens are rows of a file: the first can be made before the service runs.

def cmd_token_create(call: Call) -> None:
    options, now = call.options, time.time()
    user, text = options.user, options.token or Clock().new_token()
    if user == find_user(os.geteuid()):
        refuse(f"{user} owns this service, and a token in that name would be good for all of its jobs",
               hint=f"choose another name; the owner's own token is in {call.layout.token_file}")
    expires_at = None if options.days is None else now + options.days * 86400
    change_tokens(DISK, call.layout.tokens_file, lambda tokens: add_token(tokens, user, text, expires_at, now))
    call.print(text)
    end = local_time(format_time(expires_at), "%Y-%m-%d %H:%M") if expires_at else "it is revoked"
    call.say(f"it lets {user} in until {end}; it is shown only now")
    call.say(f"use: NEXUS_TOKEN=..., or curl -H 'Authorization: Bearer ...'; to end it: nexus token revoke {user}")


def cmd_token_list(call: Call) -> None:
    now = format_time(time.time()) or ""
    tokens = [token_json(token) for token in read_tokens(DISK, call.layout.tokens_file).values()]
    call.show(tokens, functools.partial(format_table, (
        Column("USER", lambda token: token["user"], "bright"),
        Column("SHA-256", lambda token: token["sha256"][:12]),
        Column("MADE", lambda token: local_time(token["created_at"], "%Y-%m-%d %H:%M"), "cyan"),
        Column("STATE", lambda token: "good" if token["expires_at"] is None else
               f"{'good until' if token['expires_at'] > now else 'expired'} "
               + local_time(token["expires_at"], "%Y-%m-%d %H:%M")),
    )), "nobody has a token; nexus token create USER makes one")


def cmd_node_add(call: Call) -> None:
    """Have the service send jobs to another machine: it brings this nexus.py there."""
    options = call.options
    user, _, host = options.host.rpartition("@")
    facts = {"name": options.name, "host": host, "user": user, "jump": options.jump, "port": options.port,
             "identity_file": options.identity and os.path.abspath(os.path.expanduser(options.identity))}
    config = parse_node({key: fact for key, fact in facts.items() if fact})

    def look() -> dict[str, Any]:
        return next(node for node in call.client.nodes() if node["name"] == config.name)

    if config.name in [node["name"] for node in call.client.nodes()[1:]]:
        raise NexusError("conflict", f"there is a node {config.name} already",
                         hint=f"nexus node list; to change its address: nexus node remove {config.name}, then add it")
    call.say(f"reaching {config.destination}")
    call.client.ask("POST", "/nodes", encode_value(config))
    wait_until(lambda: look()["trouble"] != NOT_REACHED, SSH_TIMEOUT_S, 0.05)
    node = look()
    if not node["is_reachable"]:
        remove_node(call, config.name, is_forced=True)
        hint = re.sub("(, or give it up)?: nexus node remove .*", "", node["hint"] or "nexus node list")
        raise NexusError("unavailable", node["trouble"], hint)
    models = f" ({join_some(list(map(format_line, node['gpu_names'])), 8)})" if node["gpu_names"] else ""
    call.print(f"{config.name}: {format_count(node['gpus'], 'GPU')}{models}, Python {node['python']}")
    if node["trouble"]:
        call.say(f"{config.name}: {node['trouble']}")


def cmd_node_list(call: Call) -> None:
    nodes = call.client.nodes()
    call.show(nodes, functools.partial(format_table, (
        Column("NODE", lambda node: node["name"], "bright"),
        Column("ADDRESS", lambda node: (
            "@".join(filter(None, (node["user"], node["host"]))) if node["host"] else "here")),
        Column("GPUS", lambda node: str(node["gpus"])),
        Column("MODEL", lambda node: ", ".join(node["gpu_names"])),
        Column("JOBS", lambda node: str(node["running_jobs"])),
        Column("STATE", describe_node_state, "yellow"),
    )))
    for node in nodes:
        if node["hint"]:
            call.say(f"{node['name']}: {node['hint']}")


def cmd_node_remove(call: Call) -> None:
    name = call.options.name
    remove_node(call, name, call.options.force)
    call.say(f"{name} is removed; its nexus and what it kept are still there")


def remove_node(call: Call, name: str, is_forced: bool) -> None:
    """Remove a node; return when its last job has ended."""
    call.client.ask("DELETE", f"/nodes/{quote_path(name)}" + encode_query({"force": "true" if is_forced else None}))
    told = 0
    while node := next((node for node in call.client.nodes()[1:] if node["name"] == name), None):
        if node["running_jobs"] not in (0, told):
            told = node["running_jobs"]
            call.say(f"{name} gets no more jobs; {format_count(told, 'job')} there still "
                     f"{'runs' if told == 1 else 'run'} (Ctrl-C leaves it to end by itself; --force gives them up)")
        time.sleep(0.1)


def cmd_token_revoke(call: Call) -> None:
    change_tokens(DISK, call.layout.tokens_file, lambda tokens: revoke_tokens(tokens, call.options.token))
    call.say("it is refused from now on; jobs go on")


def cmd_help(call: Call) -> None:
    import textwrap
    if call.options.topic is not None:
        return call.write(make_parser(find_command([call.options.topic], call.commands)).format_help())
    others = ", ".join([*(f"{word} = {' '.join(ours)}" for word, ours in ALIASES.items()), "stop ID = cancel ID"])
    call.print(
        "nexus: a queue for the GPUs of this machine", "", "nexus [command] [options]", "",
        *(f"  {command.name:<9} {command.summary}" for command in call.commands if command.summary), "",
        *textwrap.wrap(f"Other words for them: {others}", 79), "",
        *textwrap.wrap(
            "nexus help COMMAND explains a command; nexus --version prints the version and the file's hash.  Exit "
            "codes: 0; 1 internal, unhealthy; 2 usage; 3 not found; 4 conflict; 5 forbidden; 6 unavailable.  "
            "NEXUS_HOME moves ~/.nexus; NEXUS_MOCK_GPUS=2 makes up two GPUs, for a trial; NO_COLOR=1: no colours.", 79))


def cmd_complete(call: Call) -> None:
    """For shells: the completions of the last word.  It starts no service and reports no error."""
    *before, begun = call.options.words or [""]
    # --group=exp1 is one word, but three for bash.
    flag, begun = re.findall("(?s)^(--[^=]+=)?=?(.*)", begun)[0]
    names, comma, begun = begun.rpartition(",")
    words = list_completions(call, [word for word in (*before, flag[:-1]) if word not in ("", "=")], begun)
    harmless = [word for word in words if re.fullmatch(r"[\w.:-]+", word)]      # bash expands a completion
    call.print(*(f"{flag}{names}{comma}{word}" for word in harmless if word.startswith(begun)))


def list_completions(call: Call, before: Sequence[str], begun: str) -> list[str]:
    """What may follow these words: commands, options, an option's values, ids; nothing where a file or text does."""
    if not before or before == ["help"]:
        return [each.name for each in call.commands if each.summary]
    name = ALIASES.get(before[0], before)[0]
    command = next((each for each in call.commands if each.name == name), Command("", ""))
    if command.verbs and len(before) == 1:
        return [verb.name for verb in command.verbs]
    command = next((verb for verb in command.verbs if verb.name == before[1]), command)
    arguments = {flag: settings for flags, settings in command.arguments for flag in flags}
    if begun.startswith("-"):
        return [flag for flag in arguments if flag.startswith("--")]
    name = next((flag for flag in arguments if not flag.startswith("-")), "")
    if arguments.get(before[-1], {"action": "none"}).get("action", "append") == "append":
        name = before[-1]                   # an option that takes a value
    fixed = {"--status": STATUSES, "--priority": PRIORITIES}.get(name) or arguments.get(name, {}).get("choices")
    if fixed:
        return list(fixed)
    with contextlib.suppress(NexusError, OSError):
        client = Client.find(call.environ, is_starting=False)
        if name == "--group":
            return [group["name"] for group in client.ask("GET", "/groups")]
        if name in ("--after", "--after-any", "id", "ids", "targets"):
            return [job["id"] for job in client.jobs(limit=1000, fields="id")]
    return []


# nexus install

LAUNCHER = """\
#!/bin/sh
# Made by nexus install.  It imports nexus.py rather than running it, so that its compiled form is kept.
exec {python} -E -c 'import sys
sys.path[0] = sys.argv.pop(1)
import nexus
sys.exit(nexus.entry())' {folder} "$@"
"""
UNIT = """\
[Unit]
Description=nexus, the GPU job queue

[Service]
# By sh, whose arguments may have any character: the name of a unit's executable may not.
ExecStart=/bin/sh {program} serve
Environment={home}
# Only the service is ended with the unit: jobs go on, and the next start adopts them.
KillMode=process
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2 4

[Install]
WantedBy=default.target
"""
BASH_COMPLETION = """\
_nexus() { local IFS=$'\\n'; COMPREPLY=($(nexus complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)); }
complete -o default -F _nexus nexus
"""
ZSH_COMPLETION = """\
#compdef nexus
local -a found=(${(f)"$(nexus complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)"})
if (( $#found )); then compadd -a found; else _files; fi
"""
FISH_COMPLETION = """\
function __nexus_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (nexus complete $words[2..-1] 2>/dev/null)
    test (count $found) -gt 0; and printf "%s\\n" $found; or __fish_complete_path $words[-1]
end
complete -c nexus -f -a '(__nexus_complete)'
"""


def cmd_install(call: Call) -> None:
    """Put `nexus` on PATH with its completion; with --boot, have the service started at boot."""
    home = call.environ.get("HOME") or os.path.expanduser("~")
    base = call.environ.get("XDG_DATA_HOME") or os.path.join(home, ".local", "share")
    binaries = os.path.join(home, ".local", "bin")
    script = os.path.join(base, "nexus", "nexus.py")
    launcher = LAUNCHER.format(python=quote(sys.executable), folder=quote(os.path.dirname(script)))
    install_file(script, read_bytes(DISK, os.path.abspath(__file__)).decode(), 0o755)
    program = os.path.join(binaries, "nexus")
    install_file(program, launcher, 0o755)
    settings = call.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    functions = os.path.join(base, "zsh", "site-functions")
    install_file(os.path.join(base, "bash-completion", "completions", "nexus"), BASH_COMPLETION)
    install_file(os.path.join(settings, "fish", "completions", "nexus.fish"), FISH_COMPLETION)
    install_file(os.path.join(functions, "_nexus"), ZSH_COMPLETION)
    run([program, "--version"], 60, environ=call.environ)       # compiles it, so that no later command must
    call.say(f"installed {program}, with completion for bash, fish and zsh")
    if find_program("zsh"):
        call.say(f"zsh needs this line in ~/.zshrc, before compinit:  fpath+=({quote(functions)})")
    if binaries not in call.environ.get("PATH", "").split(":"):
        line = f'export PATH="{binaries}:$PATH"'
        call.say(f"{binaries} is not on PATH yet: add  {line}  to ~/.profile and log in again")
    call.say(f"ssh reads no ~/.profile for a command:  ssh {socket.gethostname()} "
             "'~/.local/bin/nexus add \"python train.py\"'")
    if call.options.boot:
        install_boot(call, home, program)


def install_file(path: str, text: str, mode: int = 0o644) -> None:
    """Raises: unavailable."""
    with disk_errors("write", path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomic(DISK, path, [text], mode)
        os.chmod(path, mode)


def quote_for_systemd(text: str) -> str:
    """A word of a unit.  Source: systemd.syntax(7), systemd.unit(5)."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def install_boot(call: Call, home: str, program: str) -> None:
    """Start the service at boot by a systemd user unit; without a user manager, print a line for cron."""
    base = call.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    unit = os.path.join(base, "systemd", "user", "nexus.service")
    for text in (program, call.layout.home):
        if "\n" in text:
            refuse(f"{text!r} has a line break: neither systemd nor cron takes it", hint="")
    install_file(unit, UNIT.format(
        program=quote_for_systemd(program).replace("$", "$$"),
        home=quote_for_systemd(f"NEXUS_HOME={call.layout.home}")))
    try:
        is_enabled = not any(run(["systemctl", "--user", *words], 15).exit_code
                             for words in (["daemon-reload"], ["enable", "nexus.service"]))
    except NexusError:                                  # there is no systemctl
        is_enabled = False
    if not is_enabled:
        call.say("there is no systemd user manager here; this line starts the service at boot, after crontab -e:")
        line = f"NEXUS_HOME={quote(call.layout.home)} {quote(program)} start"
        return call.print("@reboot " + line.replace("%", "\\%"))       # cron's line ends at a %
    call.say(f"the service starts with your systemd user manager: {unit}; loginctl enable-linger starts that at boot "
             "instead of at your first login, and lets it and the jobs outlive your logout")


# ==== 18. ARGUMENTS, MAIN ==== argparse from the COMMANDS table; main(argv, environ, out, err) -> exit code


JSON_OPTION = argument("--json", action="store_true", help="print JSON")
SERVICE_OPTIONS = (
    argument("--config", metavar="FILE", help="another config.toml"),
    argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="lowest level kept in service.log"),
)
ENV = argument("--env", metavar="NAME=VALUE", action="append", default=[], row=Field(
    matching("^[^=]+=", "NAME=VALUE", examples=["WANDB_MODE=disabled"], writeOnly=True),
    convert=lambda text: text.split("=", 1)),
               help="a variable on top of the environment; repeatable")
JOB_OPTIONS = (
    argument("command", nargs="*", metavar="COMMAND",
             help="a shell command, in quotes; several words are taken as they are"),
    *(argument(row.flag, dest=name, action="store_true", help=row.help) if row.schema is FLAG else
      # --cwd may be relative here; its row in the API takes absolute paths alone
      argument(row.flag, *OTHER_FLAGS.get(name, ()), dest=name, metavar=row.metavar or None,
               row=row if name != "cwd" else None,
               help=row.help + (f" (like {row.like})" if row.like else ""))
      for name, row in ASKED.items() if row.flag),
    argument("--snapshot", action="store_true", help="run the git work tree as it is now, whatever is edited later"),
    argument("--sweep", metavar="NAME=A,B", action="append", default=[], type=read_sweep,
             help="one job for each value, which replaces {NAME} in the command, name, group, env and cwd; seed=0..4 "
             "and lr=0.1..0.5..0.2 count, @FILE has a value a line; a script gets NEXUS_SWEEP_NAME; repeatable: all "
             "combinations"),
    ENV,
    argument("--file", metavar="FILE", help="one command a line (\\ joins the next), # comments; - is standard input"),
    argument("--dry-run", action="store_true", help="check it, show the commands, add nothing"),
)
GROUP = argument("--group", metavar="G", help="the jobs of this group")
CHANGE_OPTIONS, LINK_OPTIONS = (tuple(
    argument(row.flag or "--command", *OTHER_FLAGS.get(name, ()), dest=name, metavar=row.metavar or "CMD",
             type=functools.partial(parse_change if name in CLEARED else parse_option, row, row.flag or "--command"),
             help=row.help.partition(" (default")[0] + (f" (like {row.like})" if row.like else ""))
    for name, row in EDITS.items() if (name in CHANGES) == is_change) for is_change in (True, False))
NAME = argument("--name", help="the jobs of this name")
STATUS_OPTION = argument("--status", metavar="S,S", row=Field(
    matching(f"^(?i:({'|'.join(STATUSES)})(,({'|'.join(STATUSES)}))*)$",
            f"some of {', '.join(STATUSES)}, with commas between"),
    convert=lambda text: text.lower().split(",")), help=f"of these statuses: {', '.join(STATUSES)}")
LINES = Field(integer_in(0, 10**9), like="20")
NUMBER_OPTION = argument("-n", "--number", row=LINES, metavar="N",
                         help="show N rows; 0: all (default: what fits on the terminal; all if it is none)")
SINCE = argument("--since", metavar="TIME", row=Field(DURATION_TEXT, like="24h"), help="at most so old, like 24h or 7d")
CHOICE_OPTIONS = (argument("--user", help="the jobs of this user"), GROUP, NAME)
IDS = argument("ids", nargs="+", metavar="ID", help="ids or names")
ANY_IDS = argument("ids", nargs="*", metavar="ID", help="ids or names")
ID = argument("id", metavar="ID", help="its id or name")
TARGETS = argument("targets", nargs="*", metavar="GPU|ID", help="GPUs by index, pending jobs; none: the queue")

COMMANDS = (
    Command("status", "what runs where, and what waits (nexus alone does the same)", cmd_status, (
        argument("--watch", action="store_true", help="nexus top"), JSON_OPTION,
        argument("--detailed", action="store_true", help="queue by priority, readings of GPUs and host, health"))),
    Command("top", "a live table: GPUs with their jobs, and what waits (q ends it; also status --watch)", cmd_top, (),
            "Up and down choose a job; Enter shows it, l follows its log, x stops it or takes it out of the queue, p "
            "holds or releases it, r runs it again; / shows only jobs with a text, until Esc. Without a terminal it is "
            "printed once."),
    Command("add", "queue a job; prints its id", cmd_add, (*JOB_OPTIONS, JSON_OPTION),
            "The job runs on the next GPU that is truly free, with this directory, environment and umask. A script may "
            "begin with lines like: #NEXUS --gpus 2 --timeout 2h; #SBATCH lines are read too.",
            examples=(
                'add "python train.py --lr 0.1"',
                'add --gpus 2 --timeout 2h --name baseline "torchrun train.py"',
                'add --sweep lr=0.1,0.01 --sweep seed=0..4 --group exp1 "python train.py --lr {lr} --seed {seed}"',
                'add --after abc "python eval.py"',
                "add job.sh",
                "add --file commands.txt")),
    Command("run", "queue a job, show its output, exit with its exit code", cmd_run, JOB_OPTIONS,
            "Ctrl-C ends only this display; the job goes on.  What is piped to `run` does not reach the job: its input "
            "is empty, or what is typed in its terminal (nexus attach).  With --tty, at a terminal, the job is "
            "interactive: keys and Ctrl-C go to the program, and Ctrl-A D leaves it running.",
            examples=(
                'run "python train.py"', "run --tty bash",
                'run --gpus 0 "python prepare.py" && nexus add "python train.py"')),
    Command("queue", "pending jobs in the order they would start, and why they wait", cmd_queue, (
        NUMBER_OPTION, *CHOICE_OPTIONS, JSON_OPTION)),
    Command("history", "finished jobs", cmd_history, (
        NUMBER_OPTION, SINCE, STATUS_OPTION, *CHOICE_OPTIONS, JSON_OPTION),
            examples=("history --since 24h", "history --status failed")),
    Command("jobs", "all jobs kept", cmd_jobs, (NUMBER_OPTION, SINCE, STATUS_OPTION, *CHOICE_OPTIONS, JSON_OPTION),
            examples=("jobs --status running,pending", "jobs --name baseline --json")),
    Command("show", "all that is known of a job", cmd_show, (ID, JSON_OPTION)),
    Command("why", "why a job waits, GPU by GPU",
            lambda call: call.show(call.client.why(call.options.id), format_why), (ID, JSON_OPTION)),
    Command("wait", "wait for jobs to finish; exit with the first exit code that is not 0", cmd_wait, (
        ANY_IDS, GROUP,
        argument("--any", action="store_true", help="return when the first of them has finished, with its exit code")),
            examples=("wait --group exp1", "wait --any abc abd")),
    Command("logs", "what a job printed, or the service's log", cmd_logs, (
        argument("ids", nargs="*", metavar="ID|GPU|service", help="jobs (default: the last started), or the service"),
        argument("-f", "--follow", action="store_true", help="follow the output until the job ends"),
        argument("-n", "--number", row=LINES, metavar="N", help="the last N lines; a progress bar as it was last"),
        argument("--stream", choices=STREAMS, default="both", help="stdout goes to stdout, stderr to stderr"),
        argument("--timestamps", action="store_true", help="begin each line with the time at which it came")),
            examples=("logs", "logs -f abc", "logs abc abd", "logs service -n 50")),
    Command("kill", "stop running jobs and all they started; returns when they are gone", cmd_end, (
        argument("ids", nargs="*", metavar="ID|GPU"),
        argument("--all", action="store_true", help="with a GPU: all jobs that share it"),
        argument("--group", metavar="G", help="all of this group, pending ones too"),
        STATUS_OPTION,
        argument("--signal", metavar="NAME", row=CANCEL_KEYS["signal"],
                 help="the first signal, like INT (default: TERM); KILL follows in "
                 f"{JobsConfig.kill_grace_seconds:g} s, or what kill_grace_seconds says")),
            examples=("kill abc", "kill 0", "kill --signal INT abc", "kill --group exp1")),
    Command("cancel", "stop jobs, pending or running", cmd_end, (ANY_IDS, GROUP, STATUS_OPTION),
            examples=("cancel abc abd", "cancel --group exp1", "cancel --status pending")),
    Command("remove", "take pending jobs out of the queue", cmd_end, (IDS,)),
    Command("retry", "run finished jobs again, as new ones; prints their ids", cmd_retry, (
        ANY_IDS, argument("--failed", action="store_true", help="all jobs that failed and were not retried yet"),
        argument("--group", metavar="G", help="the failed jobs of this group"),
        argument("--dry-run", action="store_true", help="show them, add nothing"), *CHANGE_OPTIONS),
            "With options like --gpus 2, the new jobs use these instead of the old values; none, as in --timeout none, "
            "takes one away.",
            examples=("retry abc", "retry abc --gpu-mem 20G --timeout 4h", "retry --failed --dry-run")),
    Command("edit", "change a pending job, or the limits and names of a running one", cmd_edit,
            (ID, *CHANGE_OPTIONS, *LINK_OPTIONS, ENV),
            f"Of a running job: {LIVE_FLAGS}.  none takes away what was set.",
            examples=("edit abc --gpus 2 --timeout 4h", "edit abc --after none",
                      'edit abc --command "python train.py --lr 0.01"')),
    Command("clear", "forget finished jobs, with their logs", cmd_clear, (
        ANY_IDS, GROUP, STATUS_OPTION, argument("--all", action="store_true", help="all finished jobs")),
            "Pending and running jobs stay.", examples=("clear abc", "clear --status failed,cancelled")),
    Command("move", "change a pending job's place", cmd_move, (
        ID, argument("--first", action="store_true", help="before all others, whatever their priority"),
        argument("--last", action="store_true", help="behind all that wait now"),
        argument("--priority", metavar="P", row=JOB_FIELDS["priority"])),
            examples=("move abc --first", "move abc --priority low")),
    Command("attach", "attach to a running job's screen session (Ctrl-A D leaves)", cmd_attach, (
        argument("id", metavar="ID|GPU"),), local="attach works"),
    Command("screens", "the screen sessions of nexus", cmd_screens, local="screens are listed"),
    Command("pause", "start nothing new, on all GPUs or some, or of a group; hold pending jobs", cmd_pause,
            (TARGETS, GROUP), examples=("pause", "pause 0 1", "pause --group exp1", "pause abc")),
    Command("resume", "start jobs again", cmd_pause, (TARGETS, GROUP)),
    Command("start", "start the service (any command that needs it does)", cmd_start, SERVICE_OPTIONS,
            local="a service is started"),
    Command("stop", "end the service; running jobs go on", cmd_stop),
    Command("restart", "end the service and start it again; running jobs go on", cmd_restart, SERVICE_OPTIONS,
            local="a service is started"),
    Command("serve", "run the service in the foreground", cmd_serve, SERVICE_OPTIONS),
    Command("agent", "", cmd_agent, (argument("head"),)),
    Command("metrics", "run times of finished jobs, utilization of the GPUs", cmd_metrics, (JSON_OPTION,)),
    Command("usage", "jobs, GPU-hours and failures of each user or group", cmd_usage, (
        SINCE,
        argument("--by", choices=("user", "group"), default="user"), JSON_OPTION)),
    Command("open", "the address of the web page and of the API", cmd_open, (
        argument("--url", action="store_true", help="that alone: curl \"$(nexus open --url)/status\""),)),
    Command("health", "each check with its reading; exit code 1 when one is bad", cmd_health, (JSON_OPTION,)),
    Command("token", "let others in: make a token for a user, list, revoke", cmd_token_list, verbs=(
        Command("create", "make a token; prints it", cmd_token_create, (
            argument("user", metavar="USER"),
            argument("token", nargs="?", metavar="TOKEN", help="default: a random one"),
            argument("--days", metavar="N", row=Field(number_in(1e-9, 36500), like="30"),
                     help="until when it is good; without: until it is revoked"))),
        Command("list", "who has one, and until when", cmd_token_list, (JSON_OPTION,)),
        Command("revoke", "end a token, or all of a user", cmd_token_revoke, (
            argument("token", metavar="USER|TOKEN"),))),
            local="tokens are made",
            examples=("token create ann --days 90", "token list", "token revoke ann")),
    Command("node", "give jobs to other machines too, over ssh: add, list, remove one", cmd_node_list, verbs=(
        Command("add", "bring this nexus there", cmd_node_add, (
            argument("host", metavar="[USER@]HOST|NAME"),
            argument("--name", help="what it is called here (default: its host)"),
            argument("--jump", metavar="[USER@]HOST", help="the machine through which it is reached"),
            argument("--port", row=Field(integer_in(1, 65535), like="22"), help="its sshd's port"),
            argument("--identity", metavar="FILE", help="the private key to log in with"))),
        Command("list", "machines, their GPUs and states", cmd_node_list, (JSON_OPTION,)),
        Command("remove", "give it no more jobs; returns after its last one", cmd_node_remove, (
            argument("name", metavar="NAME"),
            argument("--force", action="store_true", help="at once; the jobs there are given up")))),
            description="Its nexus is this one, copied there; its GPUs and this machine's are one pool.",
            local="nodes are added",
            examples=("node add gpuuser@10.0.0.5 --name n1", "node list", "node remove n1")),
    Command("config", "show the configuration; edit it; its path; a sample", cmd_config, verbs=(
        Command("edit", "open it in your editor", cmd_config_edit),
        Command("path", "where it is", lambda call: call.print(choose_config(DISK, call.layout))),
        Command("sample", "all keys with their defaults", lambda call: call.write(format_sample_config())))),
    Command("install", "put the command `nexus` into ~/.local/bin, with completion", cmd_install, (
        argument("--boot", action="store_true", help="also start the service at boot"),)),
    Command("help", "list the commands, or explain one", cmd_help, (argument("topic", nargs="?", metavar="COMMAND"),)),
    Command("complete", "", cmd_complete, (argument("words", nargs="..."),)),
)


def main(argv: Sequence[str], environ: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    """Run the command line; return its exit code."""
    try:
        if argv and argv[0] in ("--version", "-V", "version"):
            out.write(f"nexus {__version__} ({file_hash(DISK)})\n")
            return 0
        words = ["help", *argv[1:2]] if argv and argv[0] in ("--help", "-h") else list(argv)
        if not words or words[0].startswith("-"):
            words = ["status", *words]
        if words[0] == "help" and words[2:]:
            words = [*words[1:], "--help"]      # nexus help node add
        if words[0] == "stop" and words[1:] and not words[1].startswith("-"):
            words[0] = "cancel"                 # whoever names a job does not mean the service
        command = find_command(words, COMMANDS)
        words = [*ALIASES.get(words[0], [""])[1:], *words[1:]]
        options = parse_words(command, words, out)
        call = Call(options, environ, out, err, COMMANDS)
        call.need_local(command.local)
        return options.chosen.run(call) or 0
    except NexusError as error:
        return tell_error(error, environ, err)
    except SystemExit as end:               # argparse's --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:                 # `nexus jobs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if environ.get("NEXUS_URL"):            # most likely another program has sent what could not be read
            why = format_line(f"{type(error).__name__}: {error}", 200)
            return tell_error(describe_stranger(environ["NEXUS_URL"], why), environ, err)
        with contextlib.suppress(NexusError):
            running = read_json(DISK, os.path.join(find_home(DISK, environ), "service.json"))
            if running and running.get("hash") != file_hash(DISK) and argv[:1] != ["serve"]:
                return tell_error(NexusError("unavailable", "the service that runs is of another nexus.py",
                                             hint="nexus restart, with this one; jobs go on"), environ, err)
        import traceback
        err.write(Paint("").join(["nexus: this is a fault of nexus itself; please report it with what follows",
                                  *traceback.format_exc().rstrip("\n").split("\n")]))
        return 1


def tell_error(error: NexusError, environ: Mapping[str, str], err: TextIO) -> int:
    paint = make_paint(err, environ)
    err.write(paint.join([f"nexus: {paint('red', error.message)}", *([f"hint: {error.hint}"] if error.hint else [])]))
    return error.exit_code


def entry() -> int:
    """The entry point of the `nexus` command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:          # closed: no file opened later may get its number
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = main(sys.argv[1:], os.environ, sys.stdout, sys.stderr)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:                         # reported already; the interpreter would report it again
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return code


# ==== 19. PAGE ==== the page at GET /, one string of HTML, CSS and JavaScript
# It is a client of the API as any other: it has no data of its own, and asks for a token where the API does.  Every
# text reaches the document as a text node, and the answer's Content-Security-Policy lets nothing run but this script.

DASHBOARD_PAGE = r'''<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>nexus</title>
<link id="icon" rel="icon" href="data:,">
<style>
:root { color-scheme: light dark;
  --bg: light-dark(#f3f5f7, #0e1114); --panel: light-dark(#fff, #171b20); --sunk: light-dark(#e9edf0, #242b33);
  --ink: light-dark(#161a1f, #e5e9ee); --muted: light-dark(#57606b, #9ba5b0); --line: light-dark(#dce1e6, #2a3037);
  --edge: light-dark(#868f9a, #6c7682);
  --accent: light-dark(#2159c9, #8db4ff); --accent-soft: light-dark(#e4edfc, #1b2a45);
  --ok: light-dark(#0c6636, #6fd19a); --ok-soft: light-dark(#dff3e7, #12301f);
  --warn: light-dark(#754a00, #e8b75a); --warn-soft: light-dark(#fcefd2, #352811);
  --bad: light-dark(#a81e18, #ff9990); --bad-soft: light-dark(#fde7e5, #3b1a18); --paper: #0d1116; --print: #d5dbe3;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
* { box-sizing: border-box; }
html { scroll-padding-top: 4rem; }
body { margin: 0; background: var(--bg); color: var(--ink); overflow-wrap: anywhere;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
h1, h2, h3, p, ul, pre { margin: 0; padding: 0; list-style: none; }
h1 { font-size: 1.25rem; }
h2, h3 { font-size: 1rem; }
a { color: var(--accent); }
a:not(:hover, dd a, .lines a) { text-decoration: none; }
code, pre, textarea, .command, .id, .line { font-family: var(--mono); font-size: .93em; }
pre { white-space: pre-wrap; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
main:focus, h1:focus { outline: none; }
.muted, .help, .why, .time, .heading { color: var(--muted); }
.small, .help, footer, .heading { font-size: .88em; }
.red, .cause { color: var(--bad); }
.title, .id, .badge, .primary, .brand, .form label { font-weight: 600; }
.head, .bar, .counts, .use, .gauge, .job, .rows > li { display: flex; align-items: center; gap: .2rem .7rem; }
.head, .bar { flex-wrap: wrap; }
.grow { flex: 1; min-width: 0; }
.clip { min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.unseen:not(:focus) { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }

button, input, textarea { font: inherit; color: inherit; border: 1px solid var(--edge); border-radius: 6px;
  background: var(--panel); min-height: 28px; padding: .15rem .6rem; }
button { border-color: var(--line); cursor: pointer; white-space: nowrap; }
button:hover { border-color: var(--edge); }
button:disabled { opacity: .55; cursor: default; }
.primary { background: var(--accent); border-color: var(--accent); color: var(--panel); }
.danger { background: var(--bad); border-color: var(--bad); }
.link { border: 0; background: none; color: var(--accent); padding: 0 .2rem; }
[aria-pressed=true] { background: var(--accent-soft); border-color: var(--accent); color: var(--accent); }
input, textarea { width: 100%; }
[type=checkbox] { width: 18px; min-height: 18px; vertical-align: middle; }
progress { flex: 1; min-width: 0; height: 8px; accent-color: var(--accent); }

header { position: sticky; top: 0; z-index: 5; background: var(--panel); border-bottom: 1px solid var(--line); }
.bar, main, footer { max-width: 1400px; margin: 0 auto; padding: .45rem 1.2rem; }
.brand { font-size: 1.1rem; }
.brand, .counts a:not(.red) { color: var(--ink); }
#filter { flex: 1 1 8rem; max-width: 28rem; }
#connection { margin-left: auto; }
section, #job > div > * { margin-bottom: .8rem; }
.head, dialog h2 { margin-bottom: .35rem; min-height: 28px; }
.panel, dialog, .log, #notices > * { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
.pad, .banner { padding: .4rem .8rem; }
.banner { margin-bottom: .5rem; border-radius: 8px; }
.badge { padding: .02rem .5rem; border-radius: 1em; font-size: .86em; white-space: nowrap; background: var(--sunk);
  color: var(--muted); }
.busy { background: var(--accent-soft); color: var(--accent); }
.ok { background: var(--ok-soft); color: var(--ok); }
.warn { background: var(--warn-soft); color: var(--warn); }
.bad { background: var(--bad-soft); color: var(--bad); }

.rows > li { padding: .2rem .8rem; min-height: 34px; }
.rows > li + li { border-top: 1px solid var(--line); }
.rows + .rows, details > .rows { margin: .5rem 0; }
.job, .group > .title { flex: 0 0 clamp(13rem, 16vw, 18rem); min-width: 0; }
.job { color: inherit; }
.id { flex: 0 0 2.7rem; color: var(--accent); }
.actions { display: flex; flex-wrap: wrap; gap: .3rem .6rem; }
.rows .actions { flex-shrink: 0; min-width: 4.4rem; margin-left: auto; justify-content: flex-end; }
.why, .cause { flex: 1; min-width: 0; }
.time { min-width: 4.5rem; margin-left: auto; text-align: right; white-space: nowrap; }
.time .link { margin-left: .6rem; color: var(--muted); }
.rows > .gpu { display: grid; grid-template-columns: 3.4rem 10rem 10rem minmax(0, 1fr) auto; min-height: 31px; }
.gauge span { min-width: 4.4rem; text-align: right; }
.use .job { flex-shrink: 1; }
.rows .line { flex: 1; color: var(--muted); }
.rows :not(.gauge) > progress { flex: 0 1 6rem; }

.log { overflow: hidden; background: var(--paper); color: var(--print); position: relative; }
.log .head { margin: 0; padding: .3rem .8rem; background: var(--panel); color: var(--ink); }
.lines { min-height: 4rem; max-height: max(16rem, 100dvh - 20rem); overflow: auto; padding: .5rem .8rem;
  font: 12.5px/1.5 var(--mono); white-space: pre-wrap; contain: layout paint; }
.log:not(:has(:checked)) .lines { white-space: pre; overflow-wrap: normal; }
.lines:focus-visible { outline-offset: -3px; }
.lines div { min-height: 1.5em; padding-left: 3ch; text-indent: -2ch; border-left: 2px solid transparent; }
.lines .err { border-left-color: #8e3b36; }
.lines .marked { background: #3b3108; }
#newer { position: absolute; right: 1.2rem; bottom: .8rem; color: var(--ink); }
.sgr1 { font-weight: 700; }
.sgr4 { text-decoration: underline; }
.sgr30, .sgr90 { color: #a6b0bb; }
.sgr31, .sgr91 { color: #ff8a80; }
.sgr32, .sgr92 { color: #5fcf80; }
.sgr33, .sgr93, .lines .attempt { color: #e3b341; }
.sgr34, .sgr94, .lines a { color: #79b0ff; }
.sgr35, .sgr95 { color: #d79bff; }
.sgr36, .sgr96 { color: #4fd0d8; }

.facts, .form { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: .6rem; }
.form > *, #login { display: grid; gap: .3rem; align-content: start; }
.form > .all { grid-column: 1 / -1; }
dialog { width: min(52rem, calc(100vw - 1.5rem)); max-height: calc(100dvh - 2rem); padding: 1.1rem; color: var(--ink); }
dialog:not(:has(.form)) { max-width: 38rem; }
dialog::backdrop { background: rgb(8 12 18 / .5); }
dialog:has(#login)::backdrop { background: var(--bg); }
dialog pre, #docs pre { padding: .5rem; margin: .5rem 0; max-height: 24rem; overflow: auto; background: var(--sunk); }
summary { cursor: pointer; padding: .3rem 0; }
summary > * { display: inline; margin-left: .6rem; }
.buttons { display: flex; justify-content: flex-end; gap: .5rem; margin-top: .9rem; }
#notices { position: fixed; z-index: 8; right: 1rem; bottom: 1rem; width: min(26rem, calc(100vw - 2rem)); }
#notices > * { display: flex; gap: .6rem; margin-top: .5rem; padding: .6rem .8rem; }
.offline button:not(.log *, dialog *) { pointer-events: none; opacity: .5; }
.docs header :not(.bar, .brand) { display: none; }
#docs :is(h2, h3, p, dl, details) { margin: .5rem 0; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) minmax(0, 1fr); gap: .1rem .8rem; }
dd { margin: 0; }
summary b { display: inline-block; min-width: 4rem; color: var(--accent); }

@media (max-width: 1000px) {
  #host, .gauge progress { display: none; }
  .rows > .gpu { grid-template-columns: 2.2rem 2.8rem 4.4rem minmax(0, 1fr) auto; }
  .gauge span { min-width: 0; }
  .group { flex-wrap: wrap; }
  .group .why { order: 1; flex-basis: 100%; }
}
@media (max-width: 700px) {
  .bar, main, footer { padding: .4rem .7rem; }
  .quiet, .heading, .memory, .use :is(.line, progress), #failures .time { display: none !important; }
  header { position: static; }
  #offline { position: sticky; top: 0; z-index: 5; }
  .counts, #filter { order: 2; flex: 0 0 100%; max-width: none; }
  .rows > li { flex-wrap: wrap; }
  .rows > .gpu { grid-template-columns: 2.2rem 2.8rem minmax(0, 1fr) auto; }
  .rows .job { flex: 1 1 6rem; }
  .rows .actions, .time { min-width: 0; }
  .rows > li > :is(.why, .cause) { order: 1; flex-basis: 100%; }
  .group progress { order: 1; flex-basis: 60%; }
}
@media (pointer: coarse) { button, input, textarea { min-height: 40px; } }
</style>
</head>
<body>
<a class="unseen" id="skip" href="#/">Skip to the content</a>
<header><div class="bar">
  <a class="brand" href="./#/">nexus</a>
  <span id="host" class="muted"></span>
  <nav class="counts" id="counts" aria-label="Jobs by status"></nav>
  <input id="filter" type="search" placeholder="Filter jobs  ( / )" aria-label="Filter jobs" autocomplete="off">
  <span id="connection" class="badge" role="status">connecting</span>
  <span id="pause"></span>
  <button id="add" type="button" class="primary">Add job</button>
</div></header>
<main id="main" tabindex="-1">
  <p id="offline" class="banner bad" role="alert" hidden></p>
  <div id="overview" hidden></div>
  <article id="job" hidden>
    <div id="facts"></div>
    <section id="log" class="log" aria-label="Log" hidden>
      <div class="head"><h2>Log</h2> <span id="log-state" class="small muted grow" role="status"></span>
        <button id="to-error" type="button" hidden>Go to the error</button>
        <label><input type="checkbox" checked> Wrap</label>
        <button id="download" type="button">Download</button></div>
      <div id="lines" class="lines" role="log" aria-label="What it printed" aria-live="off" tabindex="0"></div>
      <button id="newer" type="button" hidden>&darr; New lines</button>
    </section>
  </article>
  <div id="docs" hidden>
    <h1>nexus: the API</h1>
    <div id="about">Loading openapi.json &hellip;</div>
    <p><a href="openapi.json">openapi.json</a> &middot; <a href=".">dashboard</a></p>
    <div id="calls"></div>
  </div>
</main>
<footer class="muted"><span id="version"></span>
  <button id="forget" type="button" class="link">Forget the token</button></footer>
<div id="notices" aria-live="polite"></div>
<dialog id="dialog" aria-labelledby="dialog-title"></dialog>
<noscript><p class="banner">This page needs JavaScript. Without it: nexus on the command line.</p></noscript>
<script>
'use strict';
const PAGE = 50;                                // rows of a list that are asked for and shown at first
const NEWS_PAUSE_MS = 1500;                     // between an answer with news and the next question
const HIDDEN_PAUSE_MS = 20000;                  // the same for a tab that nobody sees
const ANSWER_MS = 20000, SILENCE_MS = 45000, TRIAL_MS = 60000, DOWNLOAD_MS = 3600000;      // timeouts
const LOG_TAIL = 2000, LOG_MOST = 20000;        // lines of a log at first; with earlier ones
const LINE_LENGTH = 20000;                      // characters of a line that are shown
const LOG_PAUSE_MS = 1500;                      // between two looks for more of a log
const ANSWER_LENGTH = 200000;                   // characters of an answer that /docs shows
const FINAL = ['completed', 'failed', 'cancelled'];
const PRIORITIES = ['high', 'normal', 'low'];
const SHOWN_FAILURES = 4;
const MANY_GPUS = 16;                           // more are folded by machine at first
const KINDS = {completed: 'ok', failed: 'bad', cancelled: 'warn', running: 'busy', Available: 'ok', Busy: 'busy',
  Paused: 'warn', 'In use': 'warn', Unavailable: 'warn', Fault: 'bad', Unknown: 'bad'};
const MARKS = {completed: '\u2713', failed: '\u2717', cancelled: '\u2298', running: '\u25b6', pending: '\u2026'};

// ---- The document.  Every text becomes a text node; innerHTML is not used.

const byId = (id) => document.getElementById(id);
function el(tag, facts = {}, ...children) {     // keys and handlers become properties; false and null are left out
  const node = document.createElement(tag);
  for (const [name, fact] of Object.entries(facts)) {
    if (name === 'key' || name.startsWith('on')) node[name] = fact;
    else if (known(fact) && fact !== false) node.setAttribute(name, fact === true ? '' : fact);
  }
  node.append(...children.flat(3).filter((child) => known(child) && child !== false && child !== ''));
  return node;
}

const button = (text, onclick, facts = {}) => el('button', {type: 'button', onclick, key: text, ...facts}, text);
const action = (text, name, onclick, facts) =>  // a button of a row; a phone has no room for what is `quiet`
  button(text, onclick, {class: 'quiet', 'aria-label': `${text} ${name}`, ...facts});
const banner = (kind, text) => text && el('p', {class: `banner ${kind}`, key: text}, text);
const muted = (text) => text && el('span', {class: 'muted'}, text);
const badge = (word, text = word) => el('span', {class: `badge ${KINDS[word] ?? ''}`}, text);
const section = (id, title, note, ...content) => el('section', {id, 'aria-label': title},
  el('div', {class: 'head'}, el('h2', {}, title), el('span', {class: 'muted', id: `${id}-count`}, note)), ...content);

// Everything is drawn anew each time, and only differences are applied: rows are kept, moved and updated, so that the
// focus, a selection and the scroll position survive.
function show(parent, ...children) {
  const focused = document.activeElement, hadFocus = parent.contains(focused);
  sync(parent, el('div', {}, ...children));
  if (hadFocus && focused.isConnected) focused.focus({preventScroll: true});    // what was moved has lost it
}

function sync(parent, fresh) {                  // children with the same tag, id and key are the same
  const left = [...parent.childNodes];
  const wanted = [...fresh.childNodes].map((child) => {
    const index = left.findIndex((node) => ['nodeName', 'id', 'key'].every((name) => node[name] === child[name]));
    if (index < 0) return child;
    const [node] = left.splice(index, 1);
    update(node, child);
    return node;
  });
  for (const node of left) node.remove();
  let next = parent.firstChild;
  for (const node of wanted) {
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
}

function update(node, fresh) {
  if (node.nodeType === Node.TEXT_NODE) {       // an equal text is not touched: a selection in it survives
    if (node.data !== fresh.data) node.data = fresh.data;
    return;
  }
  for (const name of new Set([...node.getAttributeNames(), ...fresh.getAttributeNames()])) {
    const value = fresh.getAttribute(name);
    if (name === 'open' || node.getAttribute(name) === value) continue;         // its reader opens and closes it
    if (value === null) node.removeAttribute(name);
    else node.setAttribute(name, value);
  }
  node.onclick = fresh.onclick;
  sync(node, fresh);
}

// ---- Words

function duration(seconds, most = 2) {          // 2h 15m: the largest units
  const left = Math.max(0, Math.floor(seconds));
  const parts = [[left / 86400, 'd'], [left / 3600 % 24, 'h'], [left / 60 % 60, 'm'], [left % 60, 's']]
    .map(([count, unit]) => count >= 1 && Math.floor(count) + unit);
  const first = parts.findIndex(Boolean);
  return parts.slice(first, first + most).filter(Boolean).join(' ') || '0s';
}

const known = (fact) => fact !== null && fact !== undefined;
const number = (count) => count.toLocaleString('en-US');
const counted = (count, word) => `${number(count)} ${word}${count === 1 ? '' : 's'}`;
const sentences = ({message, hint}) => [message, hint].filter(Boolean).join('. ');
const listed = (...parts) => parts.filter(Boolean).join(' \u00b7 ');
const percent = (share) => `${Math.round(share)} %`;
const size = (mib) => mib >= 1024 ? `${(mib / 1024).toFixed(1)} GB` : `${Math.round(mib)} MB`;
const secondsSince = (stamp) => (Date.now() + clockOffset - Date.parse(stamp)) / 1000;        // on the service's clock
const about = (seconds) => duration(Math.max(60, seconds), 1);
const ago = (stamp) => secondsSince(stamp) < 60 ? 'just now' : `${about(secondsSince(stamp))} ago`;
const clock = (stamp) => new Date(stamp).toLocaleString([],
  {month: 'short', day: 'numeric', hour: '2-digit', minute: '2-digit', second: '2-digit'});
const gpuList = (job) => job.gpu_places?.length ? `GPU ${job.gpu_places.join(', ')}` : 'CPU';
const where = (job) => listed(hasNodes() && job.node, gpuList(job));
const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const hasNodes = () => Object.keys(view?.nodes ?? {}).length > 0;
const isOver = (job) => FINAL.includes(job?.status);
const commandOf = (job) => job.command ?? `(${job.user}'s)`;     // a token of another user gets no command
const pathOf = (id) => `jobs/${encodeURIComponent(id)}`;
const addressOf = (id) => `#/${pathOf(id)}`;
const jobLink = (id) => el('a', {class: 'id', href: addressOf(id), 'aria-label': `Job ${id}`}, id);

// ---- Asking the service

let clockOffset = 0;
const failure = (message, hint, status, content) =>             // status 0: no answer has come
  Object.assign(new Error(message), {hint, status, content});

// Returns the answer, and its content as text or as what `as` says.
async function request(method, path, {headers, body, signal, timeout = ANSWER_MS, as = 'text'} = {}) {
  const token = getToken(), late = AbortSignal.timeout(timeout);
  let answer, content;
  try {
    answer = await fetch(path, {method, body, cache: 'no-store', credentials: 'omit',
      headers: token ? {...headers, Authorization: `Bearer ${token}`} : headers,
      signal: AbortSignal.any([late, signal ?? late])});
    content = await (answer.ok ? answer[as]() : answer.text());
  } catch (error) {
    if (signal?.aborted) throw error;
    throw late.aborted ? failure(`The service has not answered for ${timeout / 1000} seconds.`,
      'It may do what was asked all the same.', 0)
      : failure('The service cannot be reached.', 'Is it running? On its machine: nexus start', 0);
  }
  const date = Date.parse(answer.headers.get('Date') ?? '');
  if (date && Math.abs(date - Date.now() - clockOffset) > 2000) clockOffset = date - Date.now();
  if (answer.ok) return {answer, content};
  const isJson = answer.headers.get('Content-Type')?.startsWith('application/json');
  const {message = `The service answered ${answer.status}.`, hint = ''} = isJson ? JSON.parse(content) : {};
  const refusal = failure(message, hint, answer.status, content);
  if (answer.status === 401 && token === getToken()) tokenDialog ??= askForToken(refusal);
  throw refusal;
}

async function ask(method, path, {body, headers, ...options} = {}) {
  const json = body && {body: JSON.stringify(body), headers: {...headers, 'Content-Type': 'application/json'}};
  const {content} = await request(method, path, {...options, ...json});
  return content ? JSON.parse(content) : null;
}

// Does a button's work; says when it is done, or why it failed.
async function act(method, path, body, done, refuse = complain, headers = {}) {
  try {
    const answer = await ask(method, path, {body, headers});
    tell(typeof done === 'function' ? done(answer) : done);
    wake();
    loadJob();
    return answer ?? true;
  } catch (error) {
    return refuse(error);
  }
}

function tell(text) {
  const notice = el('div', {}, text);
  byId('notices').append(notice);
  setTimeout(() => notice.remove(), 6000);
}

function complain({message, hint, status}) {    // it stays until it is closed
  if (status === 401) return;                   // the token dialog says it
  const [text, advice] = known(status) ? [message, hint]
    : [`An error in this page: it may not show everything (${message}).`, 'Load it again.'];
  const notice = el('div', {class: 'bad', role: 'alert'},
    el('div', {class: 'grow'}, el('strong', {}, text), el('div', {}, advice)),
    button('Close', () => notice.remove(), {class: 'link'}));
  for (const old of [...byId('notices').children]) if (old.textContent === notice.textContent) old.remove();
  byId('notices').append(notice);
}

addEventListener('error', ({error}) => error && complain(error));
addEventListener('unhandledrejection', ({reason}) => complain(reason));

// ---- The token, kept for this tab only

let tokenDialog = null;                         // resolved when it is closed
const getToken = () => sessionStorage.getItem('nexus-token');

function keepToken(text) {
  if (text) sessionStorage.setItem('nexus-token', text);
  else sessionStorage.removeItem('nexus-token');
  byId('forget').hidden = !text;
  for (const form of byId('calls').querySelectorAll('form')) form.oninput();    // the curl command shows the token
}

async function askForToken({message, hint}) {
  const advice = getToken() && hint || 'nexus token create makes one; the owner\u2019s is in ~/.nexus/token.';
  const field = el('input', {id: 'token', type: 'password', autocomplete: 'off', spellcheck: 'false', autofocus: true,
    required: true, pattern: '\\s*[!-~]+\\s*', title: 'A token has no spaces and only ASCII letters.'});
  const onsubmit = () => keepToken(field.value.trim());
  keepToken('');
  showConnection('', 'token needed');
  await openDialog('A token for this service', el('form', {id: 'login', method: 'dialog', onsubmit},
    el('p', {class: 'muted', role: 'alert'}, sentences({message, hint: advice})),
    el('label', {for: 'token'}, 'Token'), field,
    el('p', {class: 'small muted'}, 'It is kept for this tab alone, until the tab is closed.'),
    el('button', {class: 'primary'}, 'Continue')));
  tokenDialog = null;
}

byId('forget').onclick = () => { keepToken(''); location.reload(); };

// ---- The one channel: GET /status?after=VERSION answers when something has changed, with what has changed

let view = null, version = 0;                   // what is shown, as the service describes it, and its version
let filter = {}, limit = PAGE;                  // {text, status, group} of the lists, and their length
let following = null, wake = () => {};
const isFiltered = () => Object.keys(filter).length > 0;
const pause = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); wake = resolve; });

function merge(former, changes) {               // a JSON merge patch: RFC 7396
  if (changes?.constructor !== Object) return changes;
  const merged = {...former};
  for (const [name, change] of Object.entries(changes)) {
    if (change === null) delete merged[name];
    else merged[name] = merge(merged[name], change);
  }
  return merged;
}

// A browser has six connections to a service, for all its tabs: a hidden one asks for everything now and then, and
// holds none.
async function follow() {
  for (let delay = 500;;) {
    await tokenDialog;
    following = new AbortController();
    const {signal} = following;
    const query = new URLSearchParams({...filter, limit, after: document.hidden ? 0 : version});
    try {
      const changes = await ask('GET', `status?${query}`, {signal, timeout: SILENCE_MS});
      view = merge(changes.is_whole ? {} : view, changes);
      version = view.state_version;
      delay = 500;
      showConnection(...view.bad_checks.length ? ['warn', 'not well'] : ['ok', 'live']);
      draw();
      if (!isOver(jobPage?.job)) loadJob();
      await pause(document.hidden ? HIDDEN_PAUSE_MS : NEWS_PAUSE_MS);
    } catch (error) {
      if (signal.aborted || tokenDialog) continue;
      if (known(error.status)) showConnection('bad', 'reconnecting');
      if (error.status !== 0) complain(error);
      await pause(delay * (0.75 + Math.random() / 2));
      delay = Math.min(15000, delay * 1.7);
    }
  }
}

function restart() {                            // with another filter or length
  version = 0;
  following?.abort();
  wake();
}

document.addEventListener('visibilitychange', () => document.hidden || wake());

function showConnection(kind, text) {
  const isLost = kind === 'bad';                // the page shows the past: no clock ticks, nothing can be done
  byId('connection').className = `badge ${kind}`;
  show(byId('connection'), text);
  if (isLost && byId('offline').hidden) show(byId('offline'),
    `Not connected since ${clock(new Date())}: what is shown here is of then, and nothing can be done. Jobs go on.`);
  document.body.classList.toggle('offline', isLost);
  byId('offline').hidden = !isLost;
}

setInterval(() => {
  for (const node of document.querySelectorAll('body:not(.offline) [data-since]')) {
    show(node, duration(secondsSince(node.dataset.since)));
  }
}, 1000);

// ---- The overview

function draw() {
  if (view) drawHeader();
  if (jobPage) return drawJobPage();
  if (!view) return;
  const hasJobs = Object.values(view.counts).some(Boolean), checks = view.bad_checks.join(', ');
  const state = [el('div', {id: 'banners'},
    banner('warn', view.is_paused && 'The queue is paused: running jobs go on, nothing new starts.'),
    banner('warn', checks && `Not well: ${checks}. What to do, on the machine: nexus health`),
    banner('bad', view.gpu_trouble), banner('bad', view.slurm?.trouble), view.hints.map((text) => banner('busy', text)),
    banner('busy', !hasJobs
      && 'There is no job yet. Add one with the button above, or on the machine: nexus add "python train.py"')),
  !isFiltered() && drawFailures(), drawGpus()];
  const lists = (hasJobs || isFiltered()) && drawLists();       // what was looked for comes first
  show(byId('overview'), el('h1', {class: 'unseen'}, 'nexus: GPUs and jobs'),
    isFiltered() ? [lists, state] : [state, lists]);
}

function drawHeader() {
  const {counts, host} = view, failures = listFailures().length, job = jobPage?.job;
  const count = (status, word, kind) => el('a', {href: `#/?status=${status}`, class: kind},
    el('b', {}, number(counts[status])), ` ${word}`);
  show(byId('host'), listed(host.name, known(host.cpu_percent) && `CPU ${percent(host.cpu_percent)}`,
    known(host.memory_used_gb) && `${Math.round(host.memory_used_gb)} of ${Math.round(host.memory_total_gb)} GB`));
  show(byId('version'), `nexus ${view.version}, as ${view.user}`);
  show(byId('counts'), count('running', 'running'), count('pending', 'waiting'),
    count('failed', 'failed', failures && 'red'));
  show(byId('pause'), pauseButton(view.is_paused, 'the queue', 'service', {noun: ' queue'}));
  document.title = listed(failures > 0 && `\u2717 ${failures}`,         // tabs behind others tell it, too
    jobPage ? `${MARKS[job?.status] ?? ''} ${job?.name ?? jobPage.id}`.trim()
      : `${number(counts.running)} running, ${number(counts.pending)} waiting`, 'nexus');
  const dot = failures ? '<circle cx="12" cy="4" r="4" fill="#e5322d"/>' : '';
  const icon = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4"
    fill="#2159c9"/><path d="M4.5 12V4l7 8V4" fill="none" stroke="#fff" stroke-width="2"/>${dot}</svg>`;
  byId('icon').href = `data:image/svg+xml,${encodeURIComponent(icon)}`;
}

// Of the queue, a group or a GPU.
function pauseButton(isPaused, name, path, {query = '', noun = '', kind = 'quiet'}) {
  const verb = isPaused ? 'Resume' : 'Pause', label = `${verb} ${name}`;
  const done = isPaused ? `Resumed ${name}.` : `Paused ${name}: what runs goes on, nothing new starts.`;
  return view.is_owner && button(verb + noun, () => act('POST', `${path}/${verb.toLowerCase()}${query}`, null, done),
    {class: isPaused ? null : kind, 'aria-label': label, title: label});
}

// What a row tells of a job.
function describe(job, note, reason = job.waiting_for) {
  const {status, last_line: line, estimated_start: start} = job, isRunning = status === 'running';
  const [, done] = /(?:^|\D)(\d{1,2}|100)(?:\.\d+)? ?%/.exec(line ?? '') ?? [];
  const title = job.name ?? commandOf(job).replace(/^(\S*\/)?(python[\d.]*|bash|sh)\s+(?=[^-\s])(\S*\/)?/, '');
  const since = (word, stamp) => stamp && badge('Paused', `${word} for ${about(secondsSince(stamp))}`);
  return [
    el('a', {class: 'job', href: addressOf(job.id), title: commandOf(job), 'aria-label': `Job ${job.id} ${title}`},
      el('span', {class: 'id'}, job.id), el('span', {class: `clip ${job.name ? 'title' : 'command'}`}, title)),
    job.is_held && badge('Paused', 'held'),
    isOver(job) && badge(status, job.outcome && status !== 'completed' ? job.outcome : `${MARKS[status]} ${status}`),
    muted(job.user !== view.user && job.user), note,
    isRunning && [
      job.gpus % 1 > 0 && el('span', {class: 'quiet muted'}, `${job.gpus} GPU`), since('idle', job.idle_since),
      since('unknown', job.unknown_since), job.stopping && badge('cancelled', 'stopping'),
      job.processes_left > 0 && badge('Paused', 'command ended'),
      done && el('progress', {'aria-label': 'Progress', value: done, max: 100}),
      el('span', {class: 'line clip', title: line}, line)],
    job.unrecorded && el('span', {class: 'why'}, `${status}; ${job.unrecorded}`),
    status === 'pending' && el('span', {class: 'why'}, listed(hasNodes() && job.only_node && `on ${job.only_node}`,
      reason, start && `starts in about ${about(-secondsSince(start))}`)),
    isOver(job) && el('span', {class: 'cause small command clip', title: job.cause_line}, job.cause_line)];
}

function drawTime(job) {                        // how long it runs, or ran, and since when it is over
  const {started_at: start, finished_at: end, runtime_seconds: run} = job;
  if (!isOver(job)) return el('span', {class: 'time', 'data-since': start}, start && duration(secondsSince(start)));
  return el('time', {class: 'time', datetime: end, title: listed(clock(end), start && where(job))},
    known(run) && el('span', {class: 'quiet'}, `${duration(run)} \u00b7 `), ago(end));
}

// Failures stay until they are dismissed, in this browser, or retried.  Those of a group are one line.

const readDismissed = () => (localStorage.getItem('nexus-dismissed') ?? '').split(',');

function listFailures() {
  const dismissed = readDismissed();
  return view.failures.filter((id) => !dismissed.includes(id)).map((id) => view.jobs[id]);
}

function dismiss(jobs) {
  localStorage.setItem('nexus-dismissed', [...readDismissed(), ...jobs.map(({id}) => id)].slice(-500).join());
  draw();
}

function drawFailures() {
  const failures = listFailures();
  const lines = Object.entries(Object.groupBy(failures, ({group, id}) => group ? `group ${group}` : `job ${id}`));
  const drawLine = ([key, jobs]) => {
    const [{id, group}] = jobs, more = jobs.length - 1;
    const note = more > 0 && el('a', {class: 'clip', href: groupAddress(group, 'failed')}, `+${more} of ${group}`);
    return el('li', {key, class: 'bad'}, describe(jobs[0], note), drawTime(jobs[0]),
      action('Retry', key, () => retry(more ? {group} : {ids: [id]})),
      button('\u00d7', () => dismiss(jobs), {'aria-label': `Dismiss ${key}`, title: 'Dismiss'}));
  };
  return el('section', {id: 'failures', 'aria-label': 'Failures'}, lines.length > 0 && el('ul', {class: 'rows panel'},
    lines.slice(0, SHOWN_FAILURES).map(drawLine),
    lines.length > 1 && el('li', {class: 'bad', key: 'all'}, el('span', {class: 'grow'}),
      lines.length > SHOWN_FAILURES && el('a', {href: '#/?status=failed'}, `${lines.length - SHOWN_FAILURES} more`),
      button('Dismiss all', () => dismiss(failures), {class: 'link'}))));
}

// GPUs, a row for each: its load, its memory, and who has it.  Where there are nodes, they are folded by machine.
// Below them, jobs that have none, or one that cannot be seen now.

const localPlace = (gpu) => gpu.place.split(':').at(-1);        // 0, or 0.1 for a slice
const countFree = (gpus) => `${gpus.filter((gpu) => gpu.is_available).length} of ${gpus.length} available`;

function drawGpus() {
  const gpus = Object.values(view.gpus).sort((a, b) => localPlace(a) - localPlace(b)), {slurm} = view;
  const onGpus = new Set(gpus.flatMap((gpu) => gpu.job_ids));
  const others = Object.values(view.jobs).filter((job) => job.status === 'running' && !onGpus.has(job.id));
  return section('gpus', slurm ? 'Slurm' : 'GPUs',
    slurm ? `${slurm.running_jobs} running, ${slurm.handed_jobs} waiting` : gpus.length > 0 && countFree(gpus),
    hasNodes() ? Object.values(view.nodes).map((node) => drawNode(node, gpus)) : drawRows(gpus),
    others.length > 0 && el('ul', {class: 'rows panel', key: 'others'}, others.slice(0, PAGE).map(drawJob)));
}

function drawNode({name, trouble, hint, unknown_since: since, ...node}, all) {
  const gpus = all.filter((gpu) => gpu.node === name);
  return el('details', {key: name, 'data-machine': name, open: all.length <= MANY_GPUS}, el('summary', {},
    el('h3', {}, name), since ? badge('Unknown', `unknown since ${clock(since)}`)
      : (node.is_leaving || trouble) && badge('Paused', node.is_leaving ? 'being removed' : 'closed'),
    muted(listed(gpus.length > 0 && countFree(gpus), node.running_jobs && counted(node.running_jobs, 'job'),
      node.gpu_names.join(', '))),
    trouble && el('span', {class: 'red'}, trouble, hint && `. To do: ${hint}`)), drawRows(gpus));
}

const drawRows = (gpus) => gpus.length > 0 && el('ul', {class: 'rows panel'},
  el('li', {class: 'gpu heading', 'aria-hidden': 'true'},
    ['GPU', 'Load', 'Memory', 'Job'].map((text) => el('span', {}, text))), gpus.map(drawGpu));

function drawGpu(gpu) {
  const {place, state, is_paused: isPaused} = gpu, name = `GPU ${place}`;
  const {utilization, utilization_mean: mean, memory_used_mib: used, temperature, power_watts: watts}
    = view.readings[place] ?? {};
  const jobs = gpu.job_ids.map((id) => view.jobs[id]).filter(Boolean);
  const why = gpu.fault ?? gpu.used_by ?? (jobs.length > 0 || isPaused ? null : gpu.unavailable);
  const title = listed(name, gpu.name, known(mean) && `load in the last hour ${percent(mean)}`,
    known(used) && `${size(used)} of ${size(gpu.memory_total_mib)}`,
    known(temperature) && `${Math.round(temperature)} \u00b0C`, known(watts) && `${Math.round(watts)} W`);
  const gauge = (word, value, max, words) => el('span', {class: `gauge ${word}`, title}, known(value)
    ? [el('progress', {'aria-label': `${name} ${word}`, value, max}), el('span', {}, words(value))] : muted('\u2013'));
  const pause = pauseButton(isPaused, name, `gpus/${encodeURIComponent(place)}`, {noun: ' GPU', kind: 'quiet link'});
  return el('li', {key: gpu.uuid, 'data-gpu': place, class: `gpu ${jobs.some((job) => job.idle_since) ? 'warn' : ''}`},
    el('div', {title}, el('b', {}, localPlace(gpu)),
      gpu.profile && el('div', {class: 'muted quiet small'}, gpu.profile)),
    gauge('load', utilization, 100, percent), gauge('memory', used, gpu.memory_total_mib, size),
    el('div', {}, jobs.map((job) => el('div', {class: 'use', key: job.id, 'data-job': job.id}, describe(job))),
      (state !== 'Busy' || why) && el('div', {class: 'use', key: 'state'}, badge(state), isPaused && pause,
        el('span', {class: gpu.fault ? 'red' : 'muted'}, why))),
    el('span', {class: 'time'}, jobs[0] && drawTime(jobs[0]), !isPaused && pause));
}

// What waits and what has ended.  A group is one row with a bar, and a link to its jobs.

function drawLists() {
  const {found, waiting, ended, counts} = view, {status, group} = filter;
  const wants = (...words) => !status || words.includes(status);
  const chip = (text, isOn, change) => button(text, () => { location.hash = listAddress({...filter, ...change}); },
    {'aria-pressed': `${isOn}`});
  return el('div', {id: 'lists'}, isFiltered() && el('div', {class: 'head', key: 'chips'},
    ['running', 'pending', ...FINAL].map((word) => chip(word, word === status, {status: word === status ? '' : word})),
    group && chip(`group ${group} \u00d7`, true, {group: ''}), el('a', {href: '#/'}, 'Show all')),
  view.groups[group] && el('ul', {class: 'rows panel', key: 'group'}, drawGroup(view.groups[group])),
  found.running?.length > 0 && wants('running') && drawList('running', 'Running', found.running, found.running.length),
  wants('pending') && drawList('waiting', 'Waiting', waiting, found.waiting, 'Nothing waits.', counts.pending),
  wants(...FINAL) && drawList('ended', 'Ended', ended, found.ended, 'No job has ended yet.'));
}

function drawList(id, title, entries, total, empty, jobs = total) {
  const left = total - entries.length;
  const rows = entries.map((entry, index) => {
    const job = view.jobs[entry], reason = job?.waiting_for;
    const isSame = reason && reason === view.jobs[entries[index - 1]]?.waiting_for;
    return job ? drawJob(job, isSame ? 'as above' : reason) : drawGroup(view.groups[entry.slice('group:'.length)]);
  });
  return section(id, title, total > 0 && number(isFiltered() ? total : jobs), el('div', {class: 'panel'},
    rows.length ? el('ul', {class: 'rows'}, rows)
      : el('p', {class: 'pad muted'}, isFiltered() ? 'No job matches the filter.' : empty),
    left > 0 && el('p', {class: 'pad'}, button(`Show ${Math.min(PAGE, left)} more of ${number(left)}`,
      () => { limit += PAGE; restart(); }, {class: 'link'}))));
}

function drawJob(job, reason) {
  const {id, status, group} = job, name = `job ${id}`;
  const note = [group && !filter.group && el('a', {class: 'muted', href: groupAddress(group)}, group),
    status === 'running' && muted(where(job))];
  return el('li', {key: id, 'data-job': id}, describe(job, note, reason), drawTime(job),
    known(job.command) && el('span', {class: 'actions'}, job.is_held && holdButton(job),
      !isOver(job) ? action('Cancel', name, () => cancelJob(job), {disabled: Boolean(job.stopping)})
        : status !== 'completed' && action('Retry', name, () => retry({ids: [id]}))));
}

const edit = (id, change, refuse) => act('PATCH', `queue/${id}`, change, `Job ${id} was changed.`, refuse);
const holdButton = ({id, is_held: isHeld}) => action(isHeld ? 'Resume' : 'Hold', `job ${id}`,
  () => edit(id, {is_held: !isHeld}), {class: null});

function drawGroup(group) {
  const {name, hold, estimated_end: end} = group, isOn = group.pending + group.running > 0;
  const statuses = ['completed', 'running', 'failed', 'cancelled', 'pending'].filter((status) => group[status] > 0);
  const total = statuses.reduce((sum, status) => sum + group[status], 0);
  const ended = total - group.pending - group.running, label = `group ${name}`;
  const kind = filter.group ? null : 'quiet';   // its own page has room
  return el('li', {class: 'group', key: label, 'data-group': name},
    el('a', {class: 'title clip', href: groupAddress(name)}, name),
    el('progress', {'aria-label': `${number(ended)} of ${number(total)} have ended`, value: ended, max: total}),
    statuses.map((status) => el('a', {class: `badge ${KINDS[status] ?? ''}`, key: status, title: status,
      href: groupAddress(name, status)}, `${number(group[status])} ${MARKS[status]}`,
    el('span', {class: 'unseen'}, status))),
    el('span', {class: 'why'}, listed(hold ?? group.waiting_for,
      end && !hold && `about ${about(-secondsSince(end))} left`, !isOn && group.failed_line)),
    el('span', {class: 'actions'}, group.failed_id
      && action('Retry failed', label, () => retry({group: name}), {class: kind}),
    isOn && pauseButton(Boolean(hold), label, 'service', {query: `?group=${encodeURIComponent(name)}`, kind}),
    isOn && action('Cancel', label, () => cancelGroup(group), {class: kind})));
}

// ---- The filter, and its address

function listAddress(wanted) {
  const query = new URLSearchParams(Object.entries(wanted).filter(([, text]) => text));
  return query.size ? `#/?${query}` : '#/';
}

const groupAddress = (group, status) => listAddress({group, status});

byId('filter').oninput = ({target}) => {
  history.replaceState(null, '', listAddress({...filter, text: target.value.trim()}));
  route();
};
addEventListener('keydown', (event) => {
  if (event.key !== '/' || event.target.matches('input, textarea') || isDocs || byId('dialog').open) return;
  event.preventDefault();
  byId('filter').focus();
});

// ---- Actions

// Asks the user; returns what the dialog was closed with, if anything.
function openDialog(title, ...children) {
  const dialog = byId('dialog');
  dialog.replaceChildren(el('h2', {id: 'dialog-title'}, title), ...children);
  dialog.returnValue = '';
  dialog.showModal();                           // closing it gives the focus back
  return new Promise((resolve) => { dialog.onclose = () => resolve(dialog.returnValue); });
}

async function cancel(name, detail, chosen) {
  const loss = 'What runs is asked to end, then killed: what it has not saved is lost. Jobs that wait for its success '
    + 'are cancelled, too.';
  const isSure = await openDialog(`Cancel ${name}?`, el('p', {}, loss), el('pre', {tabindex: 0}, detail),
    el('form', {method: 'dialog', class: 'buttons'}, el('button', {value: '', autofocus: true}, 'Keep'),
      el('button', {value: 'yes', class: 'primary danger'}, `Cancel ${name}`)));
  if (isSure) await act('POST', 'jobs/cancel', chosen, `Cancelled ${name}.`);
}

const cancelJob = (job) => cancel(`job ${job.id}`, commandOf(job), {ids: [job.id]});
const cancelGroup = ({name, pending, running}) => cancel(`group ${name}`,
  `${number(running)} running, ${number(pending)} waiting`, {group: name});

async function retry(chosen, change, refuse) {  // chosen: {ids} or {group}; change: what is to be otherwise
  const added = await act('POST', 'jobs/retry', {...chosen, change}, ({ids, warning}) => listed(ids.length === 1
    ? `Job ${chosen.ids?.[0] ?? ''} runs again as ${ids[0]}.` : `${counted(ids.length, 'job')} run again.`, warning),
  refuse);
  if (added && jobPage) location.hash = addressOf(added.ids[0]);
  return added;
}

// ---- The form of a job: a new one, or one that is changed

const FIELDS = FORM_ROWS;                       // a job's fields, from their table: see form_rows()
const READ = {                                  // the JSON of an input; the service parses times, sizes and lists
  boolean: () => true, number: Number, integer: Number,
  object: (text) => Object.fromEntries(text.split('\n').filter((line) => line.trim())
    .map((line) => [...line.split(/=(.*)/), null].slice(0, 2))),
};

function drawField({name, type, like, label, help}, job) {
  const id = `field-${name}`, isLong = name === 'command' || type === 'object', given = job[name];
  const isTime = ['timeout_seconds', 'expected_time'].includes(name);
  const value = !known(given) ? null : isTime ? duration(given, 4) : name === 'gpu_mem_mib' ? `${given}M` : given;
  const kind = READ[type] === Number ? {type: 'number', min: 0, step: 'any'} : {type: type === 'boolean' && 'checkbox'};
  const facts = {id, name, autocomplete: 'off', spellcheck: 'false', 'aria-describedby': `${id}-help`,
    placeholder: view?.defaults[name] ?? like, required: name === 'command'};
  const input = isLong ? el('textarea', {...facts, rows: 3}, value) : el('input', {...facts, ...kind, value});
  return el('div', {class: isLong && 'all'},
    type === 'boolean' ? el('label', {}, input, ` ${label}`) : [el('label', {for: id}, label), input],
    el('span', {class: 'help', id: `${id}-help`}, help));
}

// `kind`: of FIELDS' forms.  send(asked, refuse, key) does it with what was filled in, changed or emptied (null); an
// equal request has an equal key.
function openForm(kind, title, verb, job, send) {
  const newKey = () => crypto.getRandomValues(new BigUint64Array(2)).join('-');
  let key = newKey();
  const rows = FIELDS.filter(({name, forms}) => forms.includes(kind) && (name !== 'node' || hasNodes()));
  const given = {...job, priority: PRIORITIES[job?.priority] ?? job?.priority};
  const drawFields = (isFirst) => el('div', {class: 'form'},
    rows.filter(({first}) => first === isFirst).map((row) => drawField(row, given)));
  const error = el('p', {class: 'red', role: 'alert'}), go = el('button', {class: 'primary'}, verb);
  const form = el('form', {oninput: () => { key = newKey(); }, onsubmit: submit}, drawFields(true),
    el('details', {open: Boolean(job)}, el('summary', {}, 'More: priority, retries, \u2026'), drawFields(false)),
    error, el('div', {class: 'buttons'}, button('Close', () => byId('dialog').close()), go));
  const former = new FormData(form);
  async function submit(event) {
    event.preventDefault();
    go.disabled = true;
    show(error);
    const texts = new FormData(form), asked = {};
    for (const {name, type} of rows) {
      const text = texts.get(name)?.trim() ?? '';
      if (text !== (former.get(name) ?? '')) asked[name] = text ? (READ[type] ?? String)(text) : null;
    }
    if (await send(asked, (refusal) => show(error, sentences(refusal)), key)) byId('dialog').close();
    go.disabled = false;
  }
  form.elements[0].autofocus = true;
  openDialog(title, form);
}

byId('add').onclick = () => openForm('add', 'Add a job', 'Add job', null, (asked, refuse, key) =>
  act('POST', 'queue', asked, ({id, warning = ''}) => `Job ${id} was added. ${warning}`, refuse,
    {'Idempotency-Key': key}));

// ---- Logs.  16 colours; of a progress bar what it shows last.  Other escapes are dropped.

// colours and the like; OSC; DCS and the like; other escapes; an escape that is incomplete; text
const TOKENS = new RegExp([/\x1b\[([0-?]*)[ -/]*([@-~])/, /\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)/,
  /\x1b[PX^_][^\x1b]*\x1b\\/, /\x1b[ -/]*[0-OQ-WYZ`-~]/, /\x1b[^\x07]*$/, /([^\x00-\x08\x0a-\x1f\x7f]+)/]
  .map((part) => part.source).join('|'), 'g');
const STYLES = [/^(1|22)$/, /^2?4$/, /^[39]\d$/];               // one code of each is in force
const ADDRESS = /(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}])/;

function restyle(style, parameters) {           // a style: the codes in force; 256 colours and more are not shown
  for (const code of parameters.replace(/[34]8;(5;\d+|2;\d+;\d+;\d+)/g, '39').split(';').map(Number)) {
    const rivals = STYLES.find((each) => each.test(code));
    if (!code) style = [];
    else if (rivals) style = [...style.filter((each) => !rivals.test(each)), code];
  }
  return style;
}

function renderLine(raw, style) {               // what a line shows, as [[text, classes]]; and the style at its end
  const runs = [];
  for (const [, parameters, final, text] of raw.replace(/\r+$/, '').split('\r').at(-1).matchAll(TOKENS)) {
    if (final === 'm') style = restyle(style, parameters);
    else if (text) runs.push([text, style.map((code) => `sgr${code}`).join(' ')]);
  }
  return [runs, style];
}

function lineNode(runs, kind) {                 // a line of a log
  const link = (text) => text.split(ADDRESS).map((part, index) => index % 2
    ? el('a', {href: part, target: '_blank', rel: 'noopener noreferrer'}, part) : part);
  return el('div', {class: kind},
    ...runs.map(([text, classes]) => classes ? el('span', {class: classes}, link(text)) : link(text)));
}

// stdout and stderr are parsed separately: a progress bar on one does not run into lines on the other.
class LogSource {
  constructor(kind) {
    Object.assign(this, {kind, offset: 0, raw: '', style: []});
  }

  feed(text) {                                  // returns the completed lines
    const lines = (this.raw + text).split('\n'), last = lines.pop();
    this.raw = last;
    if (last.length > LINE_LENGTH) {            // of a progress bar, keep only what it shows now
      this.raw = last.slice(Math.max(0, last.lastIndexOf('\r', last.length - 2))).slice(0, LINE_LENGTH);
    }
    return lines.map((raw) => {
      const [line, style] = this.render(raw.slice(0, LINE_LENGTH));
      this.style = style;
      return line;
    });
  }

  render(raw) {                                 // a line, and the style at its end; a progress bar is no error
    const [runs, style] = renderLine(raw, this.style);
    return [[runs, /\r./.test(raw) ? null : this.kind], style];
  }
}

// The page polls: an open log holds no connection, and a failed poll does no harm.

const box = byId('lines'), newer = byId('newer');               // `newer` is seen when the end is not
let log = null;                                 // the one that is shown, as it was opened
const isWhole = () => !/[1-9]/.test(log.begin ?? '');
const canLoadEarlier = () => log?.isShown && !isWhole() && log.tail < LOG_MOST;

function closeLog() {
  log = null;
  box.replaceChildren();
  newer.hidden = byId('log').hidden = true;
}

async function openLog(id, tail = LOG_TAIL, isSeeking = false) {
  const mine = log = {id, tail, begin: null, attempt: 1, partials: [], problem: 'opening',
    sources: {stdout: new LogSource(null), stderr: new LogSource('err')}};
  byId('log').hidden = false;
  while (log === mine && !mine.isOver) {
    const isFinal = isOver(jobPage.job);        // then all that it has printed comes now
    const [lines, error] = await readLog(mine).then((found) => [found], (reason) => [[], reason]);
    if (log !== mine) return;
    mine.isOver = error ? error.status >= 400 && error.status < 500 : isFinal;
    mine.problem = error && (error.status ? error.message : 'the connection is lost');
    if (!error) drawLog(lines);
    describeLog();
    if (isSeeking) goToError();
    do await sleep(LOG_PAUSE_MS); while (document.hidden);
  }
}

async function readLog(mine) {                  // returns the lines that are new
  const sources = Object.values(mine.sources), offsets = sources.map(({offset}) => offset).join();
  const query = mine.begin ? `offset=${offsets}` : `tail=${mine.tail}`;
  const {answer, content} = await request('GET', `${pathOf(mine.id)}/logs?${query}`,
    {headers: {Accept: 'application/x-ndjson'}});
  const starts = answer.headers.get('Log-Offset'), lines = [];
  mine.begin ??= starts;
  sources.forEach((source, index) => { source.offset = Number(starts.split(',')[index]); });
  for (const entry of content.split('\n').filter(Boolean).map((line) => JSON.parse(line))) {
    const {attempt, started_at: begun, has_earlier: hasEarlier, stream, end, text} = entry;
    if (hasEarlier && attempt !== mine.attempt) lines.push([[[`attempt ${attempt}, ${clock(begun)}`, '']], 'attempt']);
    mine.attempt = attempt;
    mine.sources[stream].offset = end;
    lines.push(...mine.sources[stream].feed(text));
  }
  return lines;
}

function drawLog(lines) {                       // those that are new; all when it was opened
  const below = box.scrollHeight - box.scrollTop;
  if (!log.isShown) box.replaceChildren();
  for (const node of log.partials) node.remove();
  log.partials = Object.values(log.sources).filter(({raw}) => raw)
    .map((source) => lineNode(...source.render(source.raw)[0]));
  box.append(...lines.slice(-LOG_MOST).map((line) => lineNode(...line)), ...log.partials);
  while (box.children.length > LOG_MOST) box.firstChild.remove();
  if (newer.hidden) box.scrollTop = box.scrollHeight;
  else if (!log.isShown) box.scrollTop = box.scrollHeight - below;              // the lines in view stay in view
  log.isShown = true;
}

function describeLog() {
  const {status, cause_line: line} = jobPage.job ?? {}, count = box.children.length;
  const state = status === 'pending' ? 'the next attempt has not started' : log.isOver ? 'complete' : 'live';
  show(byId('log-state'), listed(log.problem || state, counted(count, 'line'),
    !isWhole() && (canLoadEarlier() ? 'scroll up for earlier ones' : 'earlier ones: Download')));
  byId('to-error').hidden = !FINAL.includes(status) || !line;
}

function goToError() {                          // to the line that says why the job failed
  const wanted = jobPage.job.cause_line.split('\u2026')[0];
  const line = [...box.children].findLast((node) => node.textContent.includes(wanted));
  line?.classList.add('marked');
  line?.scrollIntoView({block: 'center'});
  if (!line && canLoadEarlier()) openLog(log.id, LOG_MOST, true);
}

box.onscroll = () => {
  newer.hidden = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
  if (box.scrollTop < 40 && !newer.hidden && canLoadEarlier()) openLog(log.id, LOG_MOST);
};
newer.onclick = () => { box.scrollTop = box.scrollHeight; };
byId('to-error').onclick = goToError;
byId('download').onclick = async () => {
  const {id} = jobPage, asked = {as: 'blob', timeout: DOWNLOAD_MS};
  const {content} = await request('GET', `${pathOf(id)}/logs?offset=0`, asked);
  const address = URL.createObjectURL(content);
  el('a', {href: address, download: `nexus-${id}.log`}).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
};

// ---- A job's page

const SHOWN = SHOW_ROWS;                        // {heading: {key of a job: [its line, what makes the text in it]}}
const FORMS = {clock, duration, size, percent, priority: (rank) => PRIORITIES[rank] ?? rank,
  text: (fact) => fact === true ? 'yes' : typeof fact === 'object' ? Object.values(fact).join(', ') : fact};
let jobPage = null;                             // {id, job, why, error} of the one that is shown

async function loadJob() {
  const page = jobPage;
  if (!page || page.error) return;
  try {
    const job = await ask('GET', pathOf(page.id));
    const why = job.status === 'pending' ? await ask('GET', `${pathOf(page.id)}/why`) : null;
    Object.assign(page, {job, why});
  } catch (error) {
    if (error.status === 0) return;             // follow() says that the connection is lost
    if (![403, 404].includes(error.status)) return complain(error);
    page.error = error;
  }
  if (jobPage === page) drawJobPage();
}

function drawJobPage() {
  const {id, job, error} = jobPage, isRunning = job?.status === 'running';
  const title = error?.message ?? ['Job ' + id, job?.name].filter(Boolean).join(': ');
  const result = job?.stopping ? 'stopping'
    : isOver(job) && job.status !== 'completed' ? `${job.status}: ${job.outcome ?? '-'}` : job?.status;
  show(byId('facts'), el('p', {}, el('a', {href: homeAddress}, '\u2190 All jobs')),
    el('div', {class: 'head'}, el('h1', {tabindex: -1}, title), job && !error && [
      badge(job.status, result), job.is_held && badge('Paused', 'held'), drawTime(job),
      el('div', {class: 'actions'}, drawActions(job))]),
    error ? muted(error.hint) : job && drawFacts(job));
  if (error) closeLog();
  else if (job?.attempt > 0 && (!log || log.isOver && isRunning)) openLog(id);
  if (log) describeLog();
}

function drawActions(job) {
  const {id} = job;
  if (isOver(job)) {
    return [button('Retry', () => retry({ids: [id]})), button('Change and retry', () => openForm(
      'retry', `Run job ${id} again`, 'Retry', job, (change, refuse) => retry({ids: [id]}, change, refuse)))];
  }
  const move = (position, words) => view?.is_owner && button(`Move ${words}`, () => edit(id, {position}));
  return [
    job.status === 'pending' && [holdButton(job), move(0, 'to the front'), move(-1, 'to the end')],
    button('Change', () => openForm(job.status, `Change job ${id}`, 'Change', job,
      (change, refuse) => edit(id, change, refuse))),
    button('Cancel', () => cancelJob(job), {disabled: Boolean(job.stopping)})];
}

function drawFacts(job) {
  const {id, user, why, idle_since: idle, unknown_since: unknown} = {...job, ...jobPage};
  const list = (lines, kind) => lines.map((line) => el('li', {class: kind}, line));
  const attempts = job.attempts.map((attempt) => listed(`attempt ${attempt.attempt}: ${attempt.outcome ?? 'running'}`,
    where(attempt), duration(attempt.runtime_seconds ?? 0), attempt.cause_line));
  const facts = {...job, place: where(job), retries: job.retries || null};
  const linesOf = (rows) => Object.entries(rows).filter(([name]) => known(facts[name]))
    .map(([name, [line, form]]) => [line, FORMS[form](facts[name])])
    .filter(([, text]) => text !== '' && text !== false).map(([line, text]) => line.replace('{}', text));
  const details = Object.entries(SHOWN).map(([title, rows]) => [title, linesOf(rows)])
    .filter(([, lines]) => lines.length);
  const use = Object.values(view?.gpus ?? {}).filter((gpu) => gpu.job_ids.includes(id)).map(({place}) => {
    const {utilization: load, memory_used_mib: used} = view.readings[place] ?? {};
    return `GPU ${place}: ${[known(load) && percent(load), known(used) && size(used)].filter(Boolean).join(', ')}`;
  });
  const links = (words, ids) => ids.length > 0 && [` \u00b7 ${words} `, ids.flatMap((each) => [jobLink(each), ' '])];
  return [
    el('p', {class: 'muted'}, listed(user, ...job.started_at && !use.length ? [where(job)] : use,
      job.started_at && `started ${clock(job.started_at)}`,
      job.finished_at && `ended ${clock(job.finished_at)}`,
      job.timeout_seconds && `time limit ${duration(job.timeout_seconds)}`),
    job.group && [' \u00b7 group ', el('a', {href: groupAddress(job.group)}, job.group)],
    links('after', [...job.after, ...job.after_any]), links('again as', [job.retried_as].filter(known))),
    banner('bad', unknown && `${job.node} has not been heard since ${clock(unknown)}: `
      + 'nothing is known of this job until it is back.'),
    banner('warn', idle && `Its GPUs have done nothing since ${clock(idle)}. `
      + `If it waits for an answer, on the machine: nexus attach ${id}`),
    banner('bad', job.cause_line), banner('bad', job.unrecorded && `${job.status}; ${job.unrecorded}`),
    banner('warn', job.notes.join('; ')),
    el('pre', {class: 'panel pad', key: 'command', 'aria-label': 'Command'}, commandOf(job)),
    why && section('why', 'Why it waits', '', el('ul', {class: 'panel pad'},
      list([why.why, ...why.facts]), list(why.verdicts, 'muted'))),
    attempts.length > (job.status === 'pending' ? 0 : 1)
      && section('attempts', 'Attempts', '', el('ul', {class: 'panel pad'}, list(attempts))),
    el('details', {class: 'panel pad'}, el('summary', {}, 'Details'),
      el('div', {class: 'facts'}, details.map(([title, lines]) =>
        el('div', {key: title}, el('h3', {}, title), el('ul', {}, list(lines))))))];
}

// ---- /docs: the content of /openapi.json, and a form to send each call

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const pretty = (text) => { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } };
const marked = (text) => text.split(/`([^`]+)`/).map((piece, index) => index % 2 ? el('code', {}, piece) : piece);
let shapes = {};

function typeOf(schema) {                       // the type in a word or two
  if (!schema) return '';
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.enum) return schema.enum.join(' | ');
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((name) => name !== 'null').join(' | ');
  if (schema.type === 'array') return `(${typeOf(schema.items) || 'any'})[]`.replace(/\((\w+)\)/, '$1');
  return schema.format ?? (schema.type === 'object' && schema.title || schema.type || 'any');
}

function fieldsOf(schema) {                     // [name, schema] of each
  const one = schema?.anyOf?.map((each) => shapes[typeOf(each)]).find(Boolean) ?? schema;
  return Object.entries(one?.properties ?? {});
}

const listFields = (title, fields) => fields.length > 0 && [el('h3', {}, title), el('dl', {},
  fields.map(([name, {description = '', ...type}]) => {
    const word = typeOf(type), shape = word.replace('[]', '');
    return [el('dt', {}, el('code', {}, name)), el('dd', {}, marked(description), ' ', el('span', {class: 'help'},
      shapes[shape] ? el('a', {href: `#shape-${shape}`}, word) : word))];
  }))];

function readReply([status, reply]) {           // [status, schema]
  const [[kind, {schema}] = ['no content', {}]] = Object.entries(reply.content ?? {});
  return status === 'default' ? ['otherwise', {$ref: 'Error'}]
    : [status, kind === 'application/json' ? schema : {type: kind}];
}

function drawCall(path, method, {operationId: id, summary, parameters, requestBody, responses}) {
  const [[kind, {schema} = {}] = []] = Object.entries(requestBody?.content ?? {}), isJson = kind === 'application/json';
  const shape = shapes[typeOf(schema)] ?? schema, files = kind && !isJson ? fieldsOf(shape) : [];
  const example = path.slice(1).replace(/{\w+}/g, (name) => name.slice(1, -1).toUpperCase()) || '.';
  const address = el('input', {'aria-label': 'Address', spellcheck: 'false', value: example});
  const body = isJson && el('textarea', {'aria-label': 'Body', rows: 6, spellcheck: 'false'},
    pretty(JSON.stringify(shape.examples?.[0] ?? {})));
  const curl = el('pre', {tabindex: 0, 'aria-label': 'the same with curl'});
  const answer = el('div', {'aria-live': 'polite'}), send = el('button', {class: 'primary'}, 'Send');
  const oninput = () => show(curl, ['curl', method !== 'GET' && `-X ${method}`,
    getToken() && '-H "Authorization: Bearer $NEXUS_TOKEN"',
    isJson && `-H 'Content-Type: ${kind}' -d ${quote(body.value)}`, ...files.map(([name]) => `-F ${name}=@${name}`),
    quote(new URL(address.value, document.baseURI).href)].filter(Boolean).join(' '));
  async function onsubmit(event) {
    event.preventDefault();
    send.disabled = true;
    show(answer, 'Asking \u2026');
    const [status, content] = await request(method, address.value,
      {...isJson && {headers: {'Content-Type': kind}, body: body.value}, timeout: TRIAL_MS}).then(
      (reply) => [`${reply.answer.status} OK`, reply.content],
      (error) => [error.status || error.message, error.content]);
    show(answer, el('p', {}, status), el('pre', {tabindex: 0, 'aria-label': 'the answer'},
      pretty(content)?.slice(0, ANSWER_LENGTH)));
    send.disabled = false;
  }
  oninput();
  return el('details', {class: 'panel pad', id},
    el('summary', {}, el('b', {}, method), el('code', {}, path), muted(marked(summary))),
    listFields('Parameters', parameters.map(({name, schema: type, description}) => [name, {...type, description}])),
    listFields('Body', fieldsOf(shape)), listFields('Answers', Object.entries(responses).map(readReply)),
    el('h3', {}, 'With curl'), curl, !files.length && el('form', {oninput, onsubmit},
      el('h3', {}, 'From here'), address, body, el('div', {class: 'buttons'}, send), answer));
}

async function openDocs() {
  document.body.className = 'docs';
  document.title = 'nexus: the API';
  byId('docs').hidden = false;
  const {info, paths, components} = await ask('GET', 'openapi.json');
  shapes = components.schemas;
  show(byId('about'), `${info.description}\n\nVersion ${info.version}`.split('\n\n')
    .map((text) => el('p', {}, marked(text))));
  byId('calls').append(el('h2', {}, 'Calls'),
    ...Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, facts]) => drawCall(path, method.toUpperCase(), facts))),
    el('h2', {}, 'Objects'), ...Object.entries(shapes).map(([name, schema]) => el('details',
      {class: 'panel pad', id: `shape-${name}`}, el('summary', {}, el('code', {}, name)),
      listFields('Fields', fieldsOf(schema)))));
}

// ---- Which page: the overview with its filter, or a job

let homeAddress = '#/', opened = null;          // where one came from: the filter, and the job whose row it was

function route() {
  const [path, query] = location.hash.slice(1).split('?'), id = /^\/jobs\/([^/]+)$/.exec(path)?.[1];
  if (!jobPage && id) opened = document.activeElement.closest('[data-job]')?.dataset.job;
  closeLog();
  jobPage = id ? {id: decodeURIComponent(id)} : null;
  byId('overview').hidden = Boolean(id);
  byId('job').hidden = !id;
  if (id) {
    show(byId('facts'));                        // nothing of the job before
    draw();
    loadJob();
    scrollTo(0, 0);
    return byId('job').querySelector('h1').focus();
  }
  const wanted = new URLSearchParams(query), names = ['text', 'status', 'group'];
  const chosen = Object.fromEntries(names.map((name) => [name, wanted.get(name)]).filter(([, text]) => text));
  const isNew = JSON.stringify(chosen) !== JSON.stringify(filter), isTyping = document.activeElement === byId('filter');
  homeAddress = listAddress(chosen);
  if (!isTyping) byId('filter').value = chosen.text ?? '';
  if (isNew) {
    filter = chosen;
    limit = PAGE;
    scrollTo(0, 0);
    restart();
  }
  draw();
  if (opened && !isTyping) byId('overview').querySelector(`[data-job="${opened}"] a`)?.focus();
  opened = null;
}

byId('skip').onclick = (event) => { event.preventDefault(); byId('main').focus(); };

keepToken(getToken());
const isDocs = location.pathname.endsWith('/docs');             // /docs is this page too
if (isDocs) {
  openDocs();
} else {
  addEventListener('hashchange', route);
  route();
  follow();
}
</script>
</body>
</html>
'''


if __name__ == "__main__":
    sys.exit(entry())

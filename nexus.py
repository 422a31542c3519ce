#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = ["psutil", "tomli; python_version < '3.11'"]
# ///
"""nexus: a job queue for the GPUs of one machine, in one file.

    python3 nexus.py add "python train.py"     queue a job; it runs on the next GPU that is truly free
    python3 nexus.py                           what runs where, what waits
    python3 nexus.py logs -f ID                what it prints
    python3 nexus.py install                   put `nexus` on PATH
    python3 nexus.py help                      everything else

The first command starts a service, which decides what runs; every job is kept alive, logged and judged by a script
of its own, so that the service may be killed at any moment.  All that must last is in ~/.nexus (NEXUS_HOME moves it).

The file reads from top to bottom: values, effects, the service, the command line.  `grep '^# ====' nexus.py` lists its
sections; each uses only those above it.  As a library: `import nexus; nexus.Client.find().add("python train.py")`.
"""

from __future__ import annotations

import bisect
import heapq
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__version__ = "0.1.0"

# Imports that `nexus add` does not need are local to where they are used: it may take four times as long as
# `python3 -c pass`, and typing, dataclasses, subprocess and http.client cost it 12, 12, 15 and 35 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    import http.server
    import logging
    import subprocess
    import threading
    from typing import Any, BinaryIO, NoReturn, TextIO, TypeVar

    from typing_extensions import dataclass_transform

    T = TypeVar("T")

    @dataclass_transform(frozen_default=True)
    def value(cls: type[T]) -> type[T]: ...
else:

    def value(cls):
        """Make `cls` what dataclasses.dataclass(frozen=True, slots=True) makes of it, on Python 3.9 too."""
        names = tuple(cls.__annotations__)
        defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}
        arguments = "".join(f", {name}=_d[{name!r}]" if name in defaults else f", {name}" for name in names)
        body = "".join(f"\n _set(self, {name!r}, {name})" for name in names) or "\n pass"
        space = {"_d": defaults, "_set": object.__setattr__}
        exec(f"def __init__(self{arguments}):{body}", space)

        def refuse(self, name, *_):
            raise AttributeError(f"{type(self).__name__} is a value: use replace() to make another {name}")

        kept = {name: member for name, member in vars(cls).items()
                if name not in defaults and name not in ("__dict__", "__weakref__")}
        return type(cls.__name__, cls.__bases__, {
            **kept, "__slots__": names, "__init__": space["__init__"], "__setattr__": refuse, "__delattr__": refuse,
            "__eq__": lambda a, b: type(a) is type(b) and all(getattr(a, n) == getattr(b, n) for n in names),
            "__hash__": lambda a: hash(tuple(getattr(a, n) for n in names)),
            "__repr__": lambda a: f"{cls.__name__}({', '.join(f'{n}={getattr(a, n)!r}' for n in names)})"})


def replace(old: T, **changes: Any) -> T:
    """Return a copy of a value with some of its fields changed."""
    fields = {name: getattr(old, name) for name in old.__slots__}  # type: ignore[attr-defined]
    unknown = changes.keys() - fields.keys()
    if unknown:
        raise TypeError(f"{type(old).__name__} has no field {', '.join(sorted(unknown))}")
    fields.update(changes)
    return type(old)(**fields)


# ==== 1. ERRORS ==== one exception, and a table of what it means outside
# Whoever finds a fault says what was tried, on what, and why it failed (message), and what to type or check next
# (hint).  MAIN prints the two and exits with the kind's code; SERVER sends them with its HTTP status; CLIENT raises
# them again.

KINDS = {                            # kind: (exit code, HTTP status)
    "internal": (1, 500),
    "usage": (2, 400),
    "not_found": (3, 404),
    "conflict": (4, 409),
    "unauthorized": (5, 401),
    "forbidden": (5, 403),
    "unavailable": (6, 503),
    "queue_full": (6, 429),
    "method_not_allowed": (2, 405),
    "length_required": (2, 411),
    "too_large": (2, 413),
    "unsupported_media_type": (2, 415),
}


class NexusError(Exception):
    """A fault that somebody can do something about.  `kind` is a key of KINDS."""

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint

    @property
    def exit_code(self) -> int:
        return KINDS[self.kind][0]

    @property
    def http_status(self) -> int:
        return KINDS[self.kind][1]


# ==== 2. TEXT ==== durations, sizes, times, ids, numbers: parse_ from text, format_ to text

ID_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"      # base58 without its digits
ID_PATTERN = re.compile(f"[{ID_LETTERS}]{{3,4}}")
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
MAX_ARGUMENT_BYTES = 128 * 1024 - 1        # Linux refuses to exec with a longer one (MAX_ARG_STRLEN)


def format_duration(seconds: float) -> str:
    """`45s`, `12m 5s`, `2h 15m`, `3d 4h`: the two largest units."""
    left = max(0, int(seconds))
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (parts and len(parts) < 2) or (unit == "s" and not parts):
            parts.append((count, unit))
    shown = [f"{count}{unit}" for count, unit in parts[:2] if count]
    return " ".join(shown) or "0s"


def format_time(at: float | None) -> str | None:
    """`2024-10-24T15:30:15Z`, or None."""
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def parse_time(text: str) -> float:
    """UTC epoch seconds of `2024-10-24T15:30:15Z`.  Raises: ValueError."""
    import calendar
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))


def format_gb(mib: float | None) -> str | None:
    """Memory in whole GB as the API shows it, `24GB`; None when it is not known."""
    return None if mib is None else f"{mib / 1024:.0f}GB"


def format_memory(mib: float) -> str:
    """`16GB` or, below one, `500MB`."""
    return f"{mib / 1024:.0f}GB" if mib >= 1024 else f"{mib:.0f}MB"


def format_count(count: int, noun: str) -> str:
    """`1 job`, `3 jobs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_line(text: str, width: int = 0) -> str:
    """Text as one harmless line for a terminal: control characters shown as blanks, cut at `width` if that is given."""
    line = CONTROL.sub(" ", text)
    return line if not width or len(line) <= width else line[: max(1, width - 1)] + "…"


def format_indices(indices: Iterable[int]) -> str:
    return ", ".join(str(index) for index in indices)


def parse_indices(text: str) -> tuple[int, ...]:
    """GPU indices of `0`, `0-3,5`: ascending, each once.  Raises: usage."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise NexusError("usage", f"'{format_line(text, 60)}' is not a list of GPU indices",
                             hint="write them like 0 or 0-3,5")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def is_job_id(text: str) -> bool:
    return ID_PATTERN.fullmatch(text) is not None


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'abc'?`, or nothing when no known word is near."""
    import difflib
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def encode_json(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))


def parse_json(text: str | bytes, what: str) -> Any:
    """Raises: usage, naming `what` and where it is not JSON."""
    try:
        return json.loads(text, parse_constant=lambda name: fail_json(what, f"{name} is not a JSON number"))
    except RecursionError:
        fail_json(what, "it is nested too deeply")
    except ValueError as error:
        fail_json(what, str(error))


def fail_json(what: str, why: str) -> NoReturn:
    raise NexusError("usage", f"{what} is not valid JSON: {why}", hint='send an object like {"command": "python train.py"}')


# ==== 3. CONFIG ==== every key of config.toml with its default, its check and its comment
# SETTINGS is the one list of keys: the defaults, the checks and the sample file (config.toml.example) come from it.
# A key is a field of the section's class, under the same name.


@value
class ServiceConfig:
    host: str
    port: int
    allowed_hosts: tuple[str, ...]
    refresh_rate_seconds: float
    log_level: str
    log_max_mb: float
    log_backups: int


@value
class StateConfig:
    state_file: str
    log_dir: str
    history_limit: int


@value
class GpuConfig:
    provider: str
    mock_gpus: int
    ids: tuple[int, ...]
    share_with_others: bool
    min_free_mem_mib: int
    mem_threshold: float
    lease_dir: str


@value
class JobsConfig:
    launcher: str
    default_gpus: int
    cpu_slots: int
    max_running: int
    queue_limit: int
    kill_grace_seconds: float
    on_reboot: str
    reserve_after_seconds: float


@value
class Config:
    service: ServiceConfig
    state: StateConfig
    gpu: GpuConfig
    jobs: JobsConfig


@value
class Setting:
    section: str
    key: str
    default: Any
    allowed: Any            # (least, most) for numbers, a tuple of words, or None for free text; a list's items
    comment: str


SETTINGS = (
    Setting("service", "host", "127.0.0.1", None, "any other address requires a token on every request"),
    Setting("service", "port", 6234, (1, 65535), "where the service listens"),
    Setting("service", "allowed_hosts", (), None,
            "further Host names by which it may be called (a proxy, a tunnel): with a token only"),
    Setting("service", "refresh_rate_seconds", 5, (0.1, 3600),
            "GPU polling interval; job exits are noticed at once, not polled"),
    Setting("service", "log_level", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"), "least level kept in service.log"),
    Setting("service", "log_max_mb", 100, (0.1, 100000), "service.log is rotated at this size"),
    Setting("service", "log_backups", 5, (0, 1000), "rotated logs kept"),
    Setting("state", "state_file", "~/.nexus/state.json", None, "the journal lies beside it; ~/.nexus is NEXUS_HOME"),
    Setting("state", "log_dir", "~/.nexus/logs", None, "one folder for each job"),
    Setting("state", "history_limit", 1000, (0, 1000000),
            "finished jobs kept; older ones go, with their log folders"),
    Setting("gpu", "provider", "nvidia-smi", ("nvidia-smi", "mock"),
            "or \"mock\": mock_gpus made-up GPUs, for a trial and for tests"),
    Setting("gpu", "mock_gpus", 0, (0, 1024), "NEXUS_MOCK_GPUS=2 in the service's environment sets both"),
    Setting("gpu", "ids", (), (0, 9999), "GPUs nexus may use, by index; [] = all"),
    Setting("gpu", "share_with_others", False, None,
            "true: a foreign compute process alone does not make a GPU unavailable"),
    Setting("gpu", "min_free_mem_mib", 0, (0, 100000000), "a GPU with less free memory gets no job"),
    Setting("gpu", "mem_threshold", 0.8, (0, 1),
            "neither does one with this fraction of its memory in use by others than nexus's jobs"),
    Setting("gpu", "lease_dir", "", None,
            "where users' services agree on GPUs; default: nexus-leases in the first of /run/lock, /tmp that all may write"),
    Setting("jobs", "launcher", "screen", ("screen", "direct"), "or \"direct\": no session, so no attach"),
    Setting("jobs", "default_gpus", 1, (0, 1024), "GPUs of a job that does not say"),
    Setting("jobs", "cpu_slots", 4, (0, 100000), "how many --gpus 0 jobs run at once"),
    Setting("jobs", "max_running", 0, (0, 100000), "0 = as many as fit"),
    Setting("jobs", "queue_limit", 100000, (1, 10000000), "more pending jobs are refused"),
    Setting("jobs", "kill_grace_seconds", 10, (0, 86400), "from SIGTERM to SIGKILL"),
    Setting("jobs", "on_reboot", "fail", ("fail", "requeue"),
            "or \"requeue\": what becomes of jobs that ran when the machine went down"),
    Setting("jobs", "reserve_after_seconds", 300, (0, 31536000),
            "a job passed over for so long gets the GPUs that become free"),
)
SECTION_CLASSES = {"service": ServiceConfig, "state": StateConfig, "gpu": GpuConfig, "jobs": JobsConfig}


def parse_config(data: Mapping[str, Any], path: str) -> Config:
    """The configuration of a parsed TOML file.  Raises: usage, with all faults at once, one a line."""
    faults = list(find_unknown_keys(data))
    chosen: dict[str, dict[str, Any]] = {section: {} for section in SECTION_CLASSES}
    for setting in SETTINGS:
        table = data.get(setting.section, {})
        given = table.get(setting.key, setting.default) if isinstance(table, dict) else setting.default
        fault = check_setting(setting, given)
        if fault:
            faults.append(f"{setting.section}.{setting.key} = {format_toml(given)}: {fault}")
        chosen[setting.section][setting.key] = tuple(given) if isinstance(given, list) else given
    if faults:
        raise NexusError("usage", f"{path}: " + "; ".join(faults), hint="all keys and what they mean: nexus config sample")
    return Config(**{section: made(**chosen[section]) for section, made in SECTION_CLASSES.items()})


def find_unknown_keys(data: Mapping[str, Any]) -> Iterator[str]:
    for section, table in data.items():
        if section not in SECTION_CLASSES:
            yield " ".join([f"[{section}] is not a section", suggest(section, SECTION_CLASSES)]).strip()
        elif not isinstance(table, dict):
            yield f"{section} must be a section, [{section}]"
        else:
            known = [setting.key for setting in SETTINGS if setting.section == section]
            for key in table.keys() - set(known):
                home = next((s.section for s in SETTINGS if s.key == key), None)
                near = f"it belongs to [{home}]" if home else suggest(key, known)
                yield " ".join([f"{section}.{key} is not a key", near]).strip()


def check_setting(setting: Setting, given: Any) -> str:
    """What is wrong with a value for this key; empty when nothing is."""
    default, allowed = setting.default, setting.allowed
    if isinstance(default, tuple):
        whole = bool(allowed)
        fits = isinstance(given, (list, tuple)) and all(
            isinstance(item, int) and not isinstance(item, bool) and allowed[0] <= item <= allowed[1] if whole
            else isinstance(item, str) for item in given)
        return "" if fits else f"must be a list of {'whole numbers of 0 or more' if whole else 'texts'}, like " + (
            "[0, 1]" if whole else '["gpu.example.org"]')
    if isinstance(default, bool):
        return "" if isinstance(given, bool) else "must be true or false"
    if isinstance(default, str):
        if not isinstance(given, str) or "\0" in given:
            return "must be a text in quotes"
        return "" if not allowed or given in allowed else " ".join(
            [f"must be one of {', '.join(map(format_toml, allowed))}", suggest(given, allowed)]).strip()
    takes_decimals = isinstance(default, float) or setting.key.endswith(("_seconds", "_mb"))
    fits = isinstance(given, (int, float) if takes_decimals else int) and not isinstance(given, bool)
    if not fits or not allowed[0] <= given <= allowed[1]:
        return f"must be a {'' if takes_decimals else 'whole '}number from {allowed[0]} to {allowed[1]}"
    return ""


def format_toml(given: Any) -> str:
    return json.dumps(list(given) if isinstance(given, tuple) else given, default=str, ensure_ascii=False)


def format_sample_config() -> str:
    """config.toml.example: every key at its default, with its comment."""
    lines = ["# nexus reads this file from ~/.nexus/config.toml (NEXUS_HOME moves it).",
             "# Every key may be left out; these are the defaults."]
    for section in SECTION_CLASSES:
        lines.append(f"\n[{section}]")
        lines += [f"{f'{s.key} = {format_toml(s.default)}':<36} # {s.comment}" for s in SETTINGS if s.section == section]
    return "\n".join(lines) + "\n"


# ==== 4. MODEL ==== Job, Gpu, State; what may become of a job; changes and what they do to State
# A Job is a value; whoever changes one makes another.  State is all that state.json holds, with the indexes that the
# scheduler and the listings read: `order` holds the pending jobs as they would start, `kinds` the same per kind of
# request.  STORE owns the one State and changes it only by apply(), under its lock.

PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = STATUSES = ("pending", "running", "completed", "failed", "cancelled")
FINAL = (COMPLETED, FAILED, CANCELLED)
TRANSITIONS = {                     # from: to.  A status absent on the left is final.
    PENDING: {RUNNING, CANCELLED},
    RUNNING: {COMPLETED, FAILED, CANCELLED, PENDING},      # PENDING: another attempt
}
PRIORITIES = {"high": 0, "normal": 1, "low": 2}
MAX_PRIORITY = 1000000


@value
class Job:
    id: str
    command: str
    cwd: str
    user: str
    created_at: float                           # UTC epoch seconds, like every _at
    order: tuple[int, ...]                      # its place in the queue: (rank, priority, sequence number, ...), lower first
    environment: str                            # digest of the environment it was submitted with
    content: str                                # digest of the whole submission: the same id may bring only the same
    gpus: int = 1                               # how many whole GPUs; 0 takes a CPU slot
    gpu_ids: tuple[int, ...] | None = None      # the only GPUs it may have, by index; None = any
    priority: int = 1
    name: str | None = None
    tty: bool = False                           # its stdout is a terminal
    umask: int | None = None                    # None = the service's
    limits: tuple[tuple[str, int, int], ...] = ()   # (name, soft, hard) of the submitter; -1 = unlimited
    status: str = PENDING
    status_history: tuple[tuple[str, float], ...] = ()
    passed_over_at: float | None = None         # since when later jobs have started before it
    attempt: int = 0                            # of the last start; 0 before the first
    gpu_indices: tuple[int, ...] = ()           # as the driver counts; empty unless it has started
    gpu_uuids: tuple[str, ...] = ()
    nonce: str | None = None                    # marks this attempt's processes, in their environment
    boot_id: str | None = None                  # the boot in which it was started
    log_dir: str | None = None
    session: str | None = None                  # screen's PID.NAME; None without screen
    pid: int | None = None                      # of its job.sh
    pid_started: int | None = None              # that process's start time, in clock ticks since boot
    started_at: float | None = None
    finished_at: float | None = None
    runtime_seconds: float | None = None        # of the last attempt, by a clock that does not jump
    exit_code: int | None = None
    signal: int | None = None
    cause: str | None = None                    # why it is not `completed`, in a word
    cause_line: str | None = None               # the line that says so
    stop_cause: str | None = None               # it is to be stopped, for this cause; wanted, not yet so
    stop_by: str | None = None                  # who wanted it
    notes: tuple[str, ...] = ()                 # what could not be given as asked
    peak_rss_mib: float | None = None           # host memory of its processes together
    cpu_seconds: float | None = None
    peak_gpu_mem_mib: float | None = None


@value
class GpuProcess:
    pid: int
    memory_mib: float | None
    job_id: str | None = None       # whose of ours it is; None = somebody else's
    user: str | None = None
    name: str | None = None         # of the program


@value
class Gpu:
    """One GPU as last observed.  Memory in MiB, None where the driver does not say."""
    index: int
    uuid: str
    name: str
    memory_total_mib: float | None = None
    memory_used_mib: float | None = None
    utilization: float | None = None            # percent
    temperature: float | None = None            # degrees Celsius
    power_watts: float | None = None
    is_mig: bool = False
    fault: str | None = None                    # why it cannot be used: what the driver says
    processes: tuple[GpuProcess, ...] = ()
    lease_holder: str | None = None             # the user whose nexus has it
    is_paused: bool = False


# What happened, as the journal keeps it.  apply() is the only reader.

@value
class JobAdded:
    job: Job


@value
class JobChanged:
    id: str
    facts: Mapping[str, Any]


@value
class JobsRemoved:
    ids: tuple[str, ...]


@value
class EnvironmentAdded:
    digest: str
    variables: Mapping[str, str]


@value
class StateChanged:
    facts: Mapping[str, Any]                    # paused, paused_gpus, inventory


if TYPE_CHECKING:
    from typing import Union
    Change = Union[JobAdded, JobChanged, JobsRemoved, EnvironmentAdded, StateChanged]
    Kind = tuple[int, Union[tuple[int, ...], None]]

STATE_FACTS = ("paused", "paused_gpus", "inventory")


class State:
    """All that state.json holds, and its indexes.  Owned by STORE; changed by apply() alone."""

    def __init__(self) -> None:
        self.seq = 0                                        # of the last change applied
        self.paused = False
        self.paused_gpus: tuple[str, ...] = ()              # uuids
        self.inventory: tuple[tuple[int, str, str, float | None], ...] = ()  # GPUs last seen: index, uuid, name, MiB
        self.jobs: dict[str, Job] = {}
        self.environments: dict[str, Mapping[str, str]] = {}
        self.order: list[tuple[tuple[int, ...], str]] = []  # pending jobs, (order, id), ascending
        self.kinds: dict[Kind, list[tuple[tuple[int, ...], str]]] = {}      # the same per kind of request
        self.running: dict[str, Job] = {}
        self.finished: dict[str, Job] = {}                  # in the order in which they ended
        self.next_number = 1                                # the next job's sequence number

    def index(self, job: Job) -> None:
        self.jobs[job.id] = job
        if len(job.order) > 2:
            self.next_number = max(self.next_number, job.order[2] + 1)
        if job.status == PENDING:
            insert_sorted(self.order, (job.order, job.id))
            insert_sorted(self.kinds.setdefault(kind_of(job), []), (job.order, job.id))
        else:
            (self.running if job.status == RUNNING else self.finished)[job.id] = job

    def unindex(self, job: Job) -> None:
        del self.jobs[job.id]
        if job.status == PENDING:
            remove_sorted(self.order, (job.order, job.id))
            line = self.kinds[kind_of(job)]
            remove_sorted(line, (job.order, job.id))
            if not line:
                del self.kinds[kind_of(job)]
        else:
            del (self.running if job.status == RUNNING else self.finished)[job.id]

    def reindex(self, old: Job, new: Job) -> None:
        if old.status == new.status and old.order == new.order:     # the usual note: no index moves
            self.jobs[new.id] = new
            if new.status != PENDING:
                (self.running if new.status == RUNNING else self.finished)[new.id] = new
        else:
            self.unindex(old)
            self.index(new)

    def position(self, job: Job) -> int:
        """How many pending jobs stand before a pending one."""
        return bisect.bisect_left(self.order, (job.order, job.id))


def insert_sorted(items: list[Any], item: Any) -> None:
    if not items or items[-1] < item:
        items.append(item)          # nearly always: new jobs come last
    else:
        bisect.insort(items, item)


def remove_sorted(items: list[Any], item: Any) -> None:
    del items[bisect.bisect_left(items, item)]


def kind_of(job: Job) -> Kind:
    """Jobs of one kind ask for the same; when the first of a kind cannot start, none can."""
    return job.gpus, job.gpu_ids


def apply(state: State, change: Change) -> Callable[[], None]:
    """Make one change in State; return what undoes it.  Raises: KeyError, when it does not fit (a damaged journal)."""
    if isinstance(change, JobAdded):
        job = change.job
        if job.id in state.jobs:
            raise KeyError(job.id)
        number = state.next_number
        state.index(job)

        def undo() -> None:
            state.unindex(job)
            state.next_number = number
    elif isinstance(change, JobChanged):
        old = state.jobs[change.id]
        new = replace(old, **change.facts)
        state.reindex(old, new)

        def undo() -> None:
            state.reindex(new, old)
    elif isinstance(change, JobsRemoved):
        gone = [state.jobs[job_id] for job_id in change.ids]
        finished = dict(state.finished)
        for job in gone:
            state.unindex(job)

        def undo() -> None:
            for job in gone:
                state.index(job)
            state.finished = finished
    elif isinstance(change, EnvironmentAdded):
        is_new = change.digest not in state.environments
        state.environments.setdefault(change.digest, change.variables)

        def undo() -> None:
            if is_new:
                del state.environments[change.digest]
    else:
        before = {name: getattr(state, name) for name in change.facts}
        set_facts(state, change.facts)

        def undo() -> None:
            set_facts(state, before)
    return undo


def set_facts(state: State, facts: Mapping[str, Any]) -> None:
    for name, fact in facts.items():
        if name not in STATE_FACTS:
            raise KeyError(name)
        setattr(state, name, fact)


def change_status(job: Job, status: str, now: float, **facts: Any) -> JobChanged:
    """The change that brings `job` into `status`, with the facts learned on the way.  Raises: conflict."""
    if status not in TRANSITIONS.get(job.status, ()):
        raise NexusError("conflict", f"job {job.id} is {job.status} and cannot become {status}",
                         hint=f"see what it did: nexus show {job.id}")
    return JobChanged(job.id, {"status": status, "status_history": (*job.status_history, (status, now)), **facts})


def order_between(before: tuple[int, ...] | None, after: tuple[int, ...]) -> tuple[int, ...]:
    """A place in the queue between two neighbours; always there is one, since a longer tuple sorts after its prefix."""
    if before is None:
        return (after[0] - 1, *after[1:])
    if after[: len(before)] == before:
        return (*before, after[len(before)] - 1)
    return (*before, 0)


def move_job(state: State, job: Job, position: int) -> JobChanged | None:
    """The change that puts a pending job where `position` others stand before it; None when it is there."""
    others = [item for item in state.order if item[1] != job.id] if position else state.order[:2]
    if not position:
        others = [item for item in others if item[1] != job.id]
        if not others or state.order[0][1] == job.id:
            return None
        return JobChanged(job.id, {"order": order_between(None, others[0][0])})
    position = min(position, len(others))
    if state.position(job) == position:
        return None
    before = others[position - 1][0]
    after = others[position][0] if position < len(others) else (before[0] + 1,)
    return JobChanged(job.id, {"order": order_between(before, after)})


def next_order(state: State, priority: int) -> tuple[int, ...]:
    return 0, priority, state.next_number


# What a submission may say.  The command line sends `environment` (the whole of it); others `env`, put on top of the
# service's own.

SUBMISSION_KEYS = ("id", "command", "name", "cwd", "env", "environment", "gpus", "gpu_ids", "priority", "tty", "umask",
                   "limits")


@value
class Submission:
    """A job as asked for, checked."""
    command: str
    id: str | None
    name: str | None
    cwd: str | None
    env: Mapping[str, str]
    environment: Mapping[str, str] | None
    gpus: int | None
    gpu_ids: tuple[int, ...] | None
    priority: int
    tty: bool
    umask: int | None
    limits: tuple[tuple[str, int, int], ...]


def parse_submission(data: Any) -> Submission:
    """Raises: usage, naming the first fault."""
    if not isinstance(data, dict):
        refuse("a job must be a JSON object")
    for key in data:
        if key not in SUBMISSION_KEYS:
            raise NexusError("usage", f"'{format_line(str(key), 40)}' is not a key of a job",
                             hint=suggest(key, SUBMISSION_KEYS) or f"the keys are {', '.join(SUBMISSION_KEYS)}")
    job_id = data.get("id")
    if job_id is not None and not (isinstance(job_id, str) and is_job_id(job_id)):
        refuse("id must be 3 or 4 letters of the base58 alphabet (no digits, no I, O, l)")
    if "command" not in data:
        refuse("command is missing")
    gpus = data.get("gpus")
    if gpus is not None and not is_whole(gpus, 0, 1024):
        refuse(f"gpus must be a whole number from 0 to 1024, not {format_json_fault(gpus)}")
    tty = data.get("tty", False)
    if not isinstance(tty, bool):
        refuse("tty must be true or false")
    umask = data.get("umask")
    if umask is not None and not is_whole(umask, 0, 0o777):
        refuse("umask must be a number from 0 to 511 (0o777)")
    environment = data.get("environment")
    return Submission(
        command=parse_command(data["command"]), id=job_id, name=parse_name(data.get("name")), cwd=parse_cwd(data.get("cwd")),
        env=parse_environment(data.get("env") or {}, "env"),
        environment=None if environment is None else parse_environment(environment, "environment"),
        gpus=gpus, gpu_ids=parse_gpu_ids(data.get("gpu_ids"), gpus), priority=parse_priority(data.get("priority", 1)),
        tty=tty, umask=umask, limits=parse_limits(data.get("limits") or {}))


def refuse(message: str, hint: str = "see nexus help add") -> NoReturn:
    raise NexusError("usage", message, hint)


def format_json_fault(given: object) -> str:
    return format_line(json.dumps(given), 60)


def is_whole(given: object, least: int, most: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and least <= given <= most


def is_text(given: object, limit: int) -> bool:
    """Whether it can be given to a process: a text without NUL, whose bytes are known and not too many."""
    if not isinstance(given, str) or "\0" in given or len(given) > limit:
        return False
    try:
        return len(given.encode("utf-8", "surrogateescape")) <= limit
    except UnicodeEncodeError:
        return False


def parse_command(given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        refuse('command must be a text that is not empty, like "python train.py"')
    if "\0" in given:
        refuse("command holds a NUL character, which no program can be given", hint="leave it out")
    if len(given) > MAX_ARGUMENT_BYTES:
        refuse(f"command has {len(given)} characters; Linux takes at most {MAX_ARGUMENT_BYTES} bytes",
               hint="put it into a script and queue that")
    if not is_text(given, MAX_ARGUMENT_BYTES):
        refuse(f"command has over {MAX_ARGUMENT_BYTES} bytes or is not valid Unicode", hint="put it into a script and queue that")
    return given


def parse_name(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not is_text(given, 200) or not given.strip() or CONTROL.search(given):
        refuse("name must be one line of at most 200 bytes")
    return given


def parse_cwd(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not is_text(given, 4095) or not given.startswith("/"):
        refuse(f"cwd must be an absolute path, not {format_json_fault(given)}")
    return given


def parse_environment(given: object, key: str) -> dict[str, str]:
    if not isinstance(given, dict):
        refuse(f'{key} must be an object of texts, like {{"WANDB_MODE": "disabled"}}')
    for name, text in given.items():
        if not is_text(name, 4096) or not name or "=" in name:
            refuse(f"{key}: {format_json_fault(name)} cannot be the name of a variable")
        if not is_text(text, MAX_ARGUMENT_BYTES - len(name) - 1):
            refuse(f"{key}: the value of {format_line(name, 60)} must be a text without NUL of at most {MAX_ARGUMENT_BYTES} bytes")
    return given


def parse_gpu_ids(given: object, gpus: int | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        ids = parse_indices(given)
    elif isinstance(given, list) and given and all(is_whole(item, 0, 9999) for item in given):
        ids = tuple(sorted(set(given)))
    else:
        refuse(f"gpu_ids must be a list of GPU indices like [0, 1], not {format_json_fault(given)}")
    if gpus == 0:
        refuse("gpu_ids is for jobs with GPUs, and this one has gpus 0", hint="leave one of the two out")
    if gpus is not None and gpus > len(ids):
        refuse(f"{format_count(gpus, 'GPU')} asked for, but only {len(ids)} named in gpu_ids", hint="name more, or ask for fewer")
    return ids


def parse_priority(given: object) -> int:
    """`high`, `normal`, `low`, or a number: lower runs first."""
    if isinstance(given, str) and given in PRIORITIES:
        return PRIORITIES[given]
    if isinstance(given, str) and re.fullmatch(r"-?\d{1,7}", given):
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or abs(given) > MAX_PRIORITY:
        refuse(f"priority must be high, normal, low or a whole number (lower runs first), not {format_json_fault(given)}")
    return given


LIMITS = ("as", "core", "cpu", "data", "fsize", "memlock", "nofile", "nproc", "rss", "stack")     # prlimit's own names


def parse_limits(given: object) -> tuple[tuple[str, int, int], ...]:
    """Resource limits, {name: [soft, hard]} with -1 for unlimited.  Source: getrlimit(2), prlimit(1)."""
    if not isinstance(given, dict):
        refuse('limits must be an object like {"nofile": [1024, 4096]}')
    for name, pair in given.items():
        if name not in LIMITS or not isinstance(pair, list) or len(pair) != 2 or not all(
                is_whole(number, -1, 2**63) for number in pair):
            refuse(f"limits: {format_json_fault({name: pair})} is not one of {', '.join(LIMITS)} with [soft, hard]")
    return tuple(sorted((name, soft, hard) for name, (soft, hard) in given.items()))


# ==== 5. FORMATS ==== what is read from and written for other programs and the disk, as values
# Journal and snapshot lines, nvidia-smi's CSV, `screen -ls`, /proc/PID/stat, result files, the FIFO's lines, command
# files.  Nothing here opens anything.

SNAPSHOT_VERSION = 1
JOB_DEFAULTS = {name: getattr(Job(*[""] * 4, 0.0, (), "", ""), name) for name in Job.__slots__}  # type: ignore[attr-defined]
JOB_ALWAYS = ("id", "command", "cwd", "user", "created_at", "order", "environment", "content", "status")


def encode_job(job: Job) -> dict[str, Any]:
    """What differs from the defaults: a pending job in state.json takes some 300 bytes."""
    fields = {}
    for name, default in JOB_DEFAULTS.items():
        fact = getattr(job, name)
        if fact != default or name in JOB_ALWAYS:
            fields[name] = fact
    return fields


def decode_job(fields: Mapping[str, Any]) -> Job:
    """Raises: KeyError, TypeError or ValueError when it is no job of encode_job."""
    job = Job(**{name: freeze(fact) for name, fact in fields.items()})
    if job.status not in STATUSES or not is_job_id(job.id) or not all(isinstance(n, int) for n in job.order):
        raise ValueError(job.id)
    return job


def freeze(fact: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(freeze(item) for item in fact) if isinstance(fact, list) else fact


def encode_change(seq: int, change: Change) -> str:
    """A line of the journal, with its newline."""
    body: dict[str, Any]
    if isinstance(change, JobAdded):
        body = {"job": encode_job(change.job)}
    elif isinstance(change, JobChanged):
        body = {"id": change.id, "set": change.facts}
    elif isinstance(change, JobsRemoved):
        body = {"removed": change.ids}
    elif isinstance(change, EnvironmentAdded):
        body = {"digest": change.digest, "variables": change.variables}
    else:
        body = {"state": change.facts}
    return encode_json({"seq": seq, **body}) + "\n"


def decode_change(line: str | bytes) -> tuple[int, Change]:
    """Raises: KeyError, TypeError or ValueError when it is no line of encode_change."""
    body = json.loads(line)
    seq = body["seq"]
    if not isinstance(seq, int):
        raise TypeError("seq")
    if "job" in body:
        return seq, JobAdded(decode_job(body["job"]))
    if "id" in body:
        return seq, JobChanged(body["id"], {name: freeze(fact) for name, fact in body["set"].items()})
    if "removed" in body:
        return seq, JobsRemoved(tuple(body["removed"]))
    if "digest" in body:
        return seq, EnvironmentAdded(body["digest"], dict(body["variables"]))
    return seq, StateChanged({name: freeze(fact) for name, fact in body["state"].items()})


@value
class Snapshot:
    """State at one moment, as immutable values that can be written while State goes on."""
    seq: int
    host: str
    machine_id: str
    service_id: str
    next_number: int
    facts: Mapping[str, Any]
    environments: Mapping[str, Mapping[str, str]]
    jobs: Sequence[Job]


def encode_snapshot(snapshot: Snapshot) -> Iterator[str]:
    """state.json, a piece for each job: encoding 100,000 at once would hold the interpreter for a second."""
    head = {"version": SNAPSHOT_VERSION, "seq": snapshot.seq, "host": snapshot.host, "machine_id": snapshot.machine_id,
            "service_id": snapshot.service_id, "next_number": snapshot.next_number, **snapshot.facts}
    yield "{" + ",\n".join(f"{json.dumps(key)}: {json.dumps(fact)}" for key, fact in head.items())
    yield ',\n"environments": {'
    for number, (digest, variables) in enumerate(snapshot.environments.items()):
        yield f"{',' if number else ''}\n{json.dumps(digest)}: {encode_json(variables)}"
    yield '},\n"jobs": ['
    for number, job in enumerate(snapshot.jobs):
        yield f"{',' if number else ''}\n{encode_json(encode_job(job))}"
    yield "\n]}\n"


def decode_snapshot(lines: Iterable[str]) -> Snapshot:
    """Raises: KeyError, TypeError or ValueError when it is no state.json.

    As encode_snapshot writes it, jobs are read line by line; a file that another program has laid out anew is read whole.
    """
    head: list[str] = []
    jobs: list[Job] = []
    rest = iter(lines)
    for line in rest:
        head.append(line)
        if line == '"jobs": [\n':
            break
    try:
        for line in rest:
            if line == "]}\n" and not next(rest, ""):
                head.append("]}")
                break
            jobs.append(decode_job(json.loads(line.rstrip(",\n"))))
        body = json.loads("".join(head))
    except (ValueError, TypeError):
        if not isinstance(lines, list):
            raise
        body, jobs = json.loads("".join(lines)), []
    jobs += [decode_job(fields) for fields in body["jobs"]]
    if body["version"] != SNAPSHOT_VERSION or not isinstance(body["seq"], int):
        raise ValueError(f"version {body['version']}")
    return Snapshot(body["seq"], body["host"], body["machine_id"], body["service_id"], body["next_number"],
                    {name: freeze(body[name]) for name in STATE_FACTS}, body["environments"], jobs)


# nvidia-smi.  Everything, errors too, is on its stdout; a row counts only if it has as many cells as were asked for.

GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu", "power.draw",
              "mig.mode.current")
BASIC_GPU_FIELDS = GPU_FIELDS[:5]               # what every driver knows; one unknown field voids the query
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
FIELD_ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "used_gpu_memory": "used_memory"}
FAULT_CELLS = {"[GPU is lost]": "GPU is lost", "[GPU requires reset]": "GPU requires reset",
               "[Unknown Error]": "Unknown Error"}


def parse_csv_rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a `--query-…=FIELDS` answer as {field: cell}, and the lines that are none (messages)."""
    names = [FIELD_ALIASES.get(field, field) for field in fields]
    rows, messages = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(", ")]
        if len(cells) != len(names):
            messages += [line.strip()] if line.strip() else []
            continue
        headings = [cell.partition(" [")[0] for cell in cells]
        if not rows and any(FIELD_ALIASES.get(heading, heading) == name for heading, name in zip(headings, names)):
            continue
        rows.append(dict(zip(names, cells)))
    return rows, messages


def parse_reading(cell: str | None) -> float | None:
    """A number with or without its unit; None for what is not known ([N/A], [Insufficient Permissions], a fault)."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?: (?:MiB|%|W|MHz))?", cell or "")
    return float(match[1]) if match else None


def parse_gpus(text: str, fields: Sequence[str], known: Mapping[str, int]) -> tuple[list[Gpu], list[str]]:
    """The GPUs of a --query-gpu answer, and its messages.  `known` is {uuid: index} of those seen before: a lost one
    may show its fault in place of its index, and is told by its uuid.
    """
    rows, messages = parse_csv_rows(text, fields)
    gpus = []
    for row in rows:
        fault = next((FAULT_CELLS[cell] for cell in row.values() if cell in FAULT_CELLS), None)
        uuid = row.get("uuid", "")
        index = int(row["index"]) if row.get("index", "").isdigit() else known.get(uuid)
        if index is None:
            messages.append(", ".join(row.values()))
            continue
        gpus.append(Gpu(
            index=index, uuid=uuid if re.fullmatch(r"[\w.-]+", uuid) else f"index-{index}", name=clean_gpu_name(row.get("name", "")),
            memory_total_mib=parse_reading(row.get("memory.total")), memory_used_mib=parse_reading(row.get("memory.used")),
            utilization=parse_reading(row.get("utilization.gpu")), temperature=parse_reading(row.get("temperature.gpu")),
            power_watts=parse_reading(row.get("power.draw")), is_mig=row.get("mig.mode.current") == "Enabled", fault=fault))
    return sorted(gpus, key=lambda gpu: gpu.index), messages


def clean_gpu_name(name: str) -> str:
    for brand in ("NVIDIA ", "GeForce "):
        if name.startswith(brand):
            name = name[len(brand):]
    return name or "GPU"


def parse_gpu_list(text: str) -> list[tuple[int, str, str]]:
    """(index, uuid, name) of the lines of `nvidia-smi -L`; slices and messages are left out."""
    found = re.finditer(r"^GPU (\d+): (.*) \(UUID: ([\w.-]+)\)\s*$", text, re.MULTILINE)
    return [(int(match[1]), match[3], clean_gpu_name(match[2])) for match in found]


def parse_compute_apps(text: str, fields: Sequence[str] = APP_FIELDS) -> dict[str, tuple[GpuProcess, ...]]:
    """{GPU uuid: its compute processes}."""
    found: dict[str, list[GpuProcess]] = {}
    for row in parse_csv_rows(text, fields)[0]:
        if row["pid"].isdigit():
            found.setdefault(row["uuid"], []).append(GpuProcess(int(row["pid"]), parse_reading(row["used_memory"])))
    return {uuid: tuple(processes) for uuid, processes in found.items()}


def describe_smi_failure(exit_code: int, text: str) -> str:
    """One sentence for a run of nvidia-smi that failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if exit_code < 0:
        return f"nvidia-smi was ended by signal {-exit_code}"
    return f"nvidia-smi: {lines[0] if lines else 'no output'} (exit code {exit_code})"


# /proc, screen, the runner's files

@value
class Process:
    """Who a process is and whose child.  pid and started together name one process of this boot, for ever."""
    pid: int
    started: int                # clock ticks since boot
    parent: int
    session: int
    state: str                  # R, S, D, Z, T ...
    env_start: int              # where its environment lies; another after each exec


def parse_proc_stat(text: str) -> Process:
    """Of /proc/PID/stat.  The name, in parentheses, may hold blanks and parentheses.  Source: proc(5)."""
    pid, _, rest = text.partition(" ")
    cells = rest[rest.rindex(")") + 2:].split()
    return Process(int(pid), int(cells[19]), int(cells[1]), int(cells[3]), cells[0], int(cells[47]))


def parse_screen_list(text: str) -> list[tuple[int, str, str]]:
    """(pid, name, `Detached` or the like) of `screen -ls`; its date column comes and goes with version and locale."""
    sessions = []
    for line in text.splitlines():
        cells = line.split("\t")
        match = re.fullmatch(r"(\d+)\.(.+)", cells[1]) if line.startswith("\t") and len(cells) > 2 else None
        if match:
            sessions.append((int(match[1]), match[2], cells[-1].strip("()")))
    return sessions


@value
class Result:
    """How an attempt ended, from its result file or its word to the service."""
    exit_code: int | None
    finished_at: float | None = None            # None: now
    runtime_seconds: float | None = None
    cause: str | None = None                    # `launch`, when the command could not be started
    cause_line: str | None = None


def parse_result(text: str) -> Result:
    """Raises: ValueError or TypeError when it is no result file."""
    body = json.loads(text)
    code = body["exit_code"]
    if code is not None and not is_whole(code, 0, 255):
        raise ValueError("exit_code")
    return Result(code, float(body["finished_at"]), float(body["runtime_seconds"]), body.get("cause"), body.get("cause_line"))


@value
class Saying:
    """A line that a runner said: `start ID ATTEMPT PID STARTED` or `end ID ATTEMPT CODE RUNTIME_CS`, or that it was refused."""
    verb: str
    job_id: str
    attempt: int
    words: tuple[str, ...]


def parse_saying(line: str) -> Saying | None:
    words = line.split()
    if len(words) < 3 or words[0] not in ("start", "end", "bounce") or not is_job_id(words[1]) or not words[2].isdigit():
        return None
    if words[0] in ("start", "end") and (len(words) != 5 or not all(word.isdigit() for word in words[3:])):
        return None
    return Saying(words[0], words[1], int(words[2]), tuple(words[3:]))


def parse_commands(text: str) -> list[str]:
    """The commands of a file that has one a line; empty lines and those that begin with # are left out."""
    lines = (line.strip() for line in text.lstrip("\ufeff").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


# ==== 6. SCHEDULER ==== what to do next, decided from values alone
# Jobs start in the queue's order; one that cannot start is passed over, so that later ones may.  Jobs of one kind ask
# for the same: when the first of a kind cannot start, none of it can, and plan() need not look at the others.  A job
# that was passed over for reserve_after_seconds keeps the GPUs that become free until it has enough.


@value
class Start:
    job_id: str
    gpu_indices: tuple[int, ...]
    gpu_uuids: tuple[str, ...]


@value
class Plan:
    starts: tuple[Start, ...]
    passed_over: tuple[str, ...]                # jobs before which others start, for the first time
    reasons: Mapping[Kind, str]                 # why the jobs of a kind wait


def find_obstacle(gpu: Gpu, config: GpuConfig) -> str | None:
    """Why no job may have this GPU, whatever nexus itself runs there; None when one may."""
    if gpu.fault:
        return f"is unusable ({gpu.fault})"
    if gpu.is_paused:
        return "is paused"
    if config.ids and gpu.index not in config.ids:
        return "is not among [gpu] ids"
    if gpu.is_mig:
        return "is cut into MIG slices"
    if gpu.lease_holder:
        return f"is held by the nexus of {gpu.lease_holder}"
    foreign = [process for process in gpu.processes if process.job_id is None]
    if foreign and not config.share_with_others:
        return f"is in use by {describe_processes(foreign)}"
    return find_memory_obstacle(gpu, config)


def find_memory_obstacle(gpu: Gpu, config: GpuConfig) -> str | None:
    """Memory that reads N/A matters only where a minimum is asked for."""
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return "does not tell its memory, and min_free_mem_mib is set" if config.min_free_mem_mib else None
    ours = sum(process.memory_mib or 0 for process in gpu.processes if process.job_id)
    others = max(0.0, gpu.memory_used_mib - ours)
    if gpu.memory_total_mib - others < config.min_free_mem_mib:
        return f"has {format_memory(gpu.memory_total_mib - others)} free, less than min_free_mem_mib"
    if gpu.memory_total_mib and others >= config.mem_threshold * gpu.memory_total_mib and others > 0:
        return f"has {format_memory(others)} of its memory in use by others"
    return None


def describe_processes(processes: Sequence[GpuProcess]) -> str:
    """`bob (pid 4242 python, 16GB)`, each."""
    return ", ".join(describe_process(process) for process in processes[:3]) + (
        f" and {len(processes) - 3} more" if len(processes) > 3 else "")


def describe_process(process: GpuProcess) -> str:
    program = f"pid {process.pid}" + (f" {format_line(process.name, 30)}" if process.name else "")
    memory = "" if process.memory_mib is None else f", {format_memory(process.memory_mib)}"
    return f"{process.user or 'somebody'} ({program}{memory})"


def plan(state: State, gpus: Sequence[Gpu], trouble: str | None, config: Config, now: float) -> Plan:
    """Decide which pending jobs start now and where, and why the others wait.

    `gpus` as last observed; `trouble` says why those readings cannot be relied upon (then no GPU is given out).  The
    same values give the same plan.  Its time grows with the number of kinds and of starts, not of jobs.
    """
    if state.paused:
        return Plan((), (), {kind: "the queue is paused (nexus resume)" for kind in state.kinds})
    holders = {uuid: job.id for job in state.running.values() for uuid in job.gpu_uuids}
    board = {gpu.index: f"runs job {holders[gpu.uuid]}" if gpu.uuid in holders else find_obstacle(gpu, config.gpu)
             for gpu in gpus}
    free = [] if trouble else [gpu for gpu in gpus if board[gpu.index] is None]
    cpu_slots = config.jobs.cpu_slots - sum(1 for job in state.running.values() if not job.gpus)
    places = config.jobs.max_running - len(state.running) if config.jobs.max_running else None

    starts: list[Start] = []
    passed_over: list[str] = []
    heads: list[str] = []                       # the first job of each kind that cannot start, in the queue's order
    reasons: dict[Kind, str] = {}
    heap = [(line[0], 0, kind) for kind, line in state.kinds.items()]
    heapq.heapify(heap)
    while heap:
        (_, job_id), place, kind = heapq.heappop(heap)
        count, allowed = kind
        chosen = [gpu for gpu in free if allowed is None or gpu.index in allowed][:count]
        if places is not None and places <= 0:
            reasons[kind] = f"{format_count(len(state.running) + len(starts), 'job')} run, as many as max_running allows"
        elif count == 0 and cpu_slots <= 0:
            reasons[kind] = f"all {config.jobs.cpu_slots} CPU slots are taken (cpu_slots)"
        elif len(chosen) < count:
            reasons[kind] = trouble or describe_shortage(count, allowed, len(chosen), board)
            job = state.jobs[job_id]
            if is_reserving(job, config.jobs, now) and can_ever_start(kind, gpus, board, holders):
                free = [gpu for gpu in free if gpu not in chosen]
                board.update({gpu.index: f"is kept for job {job_id}" for gpu in chosen})
            heads.append(job_id)
        else:
            starts.append(Start(job_id, tuple(gpu.index for gpu in chosen), tuple(gpu.uuid for gpu in chosen)))
            passed_over += heads
            heads = []
            free = [gpu for gpu in free if gpu not in chosen]
            board.update({gpu.index: f"runs job {job_id}" for gpu in chosen})
            cpu_slots -= count == 0
            places = places if places is None else places - 1
            if place + 1 < len(state.kinds[kind]):
                heapq.heappush(heap, (state.kinds[kind][place + 1], place + 1, kind))
    return Plan(tuple(starts), tuple(i for i in passed_over if state.jobs[i].passed_over_at is None), reasons)


def is_reserving(job: Job, config: JobsConfig, now: float) -> bool:
    return job.passed_over_at is not None and now - job.passed_over_at >= config.reserve_after_seconds


def can_ever_start(kind: Kind, gpus: Sequence[Gpu], board: Mapping[int, str | None], holders: Mapping[str, str]) -> bool:
    """Whether free GPUs and those of running jobs would do: to keep some for a job that also needs a lost one, or
    somebody else's, would leave them idle for nothing.
    """
    count, allowed = kind
    within_reach = [gpu for gpu in gpus if (allowed is None or gpu.index in allowed)
                    and (board[gpu.index] is None or gpu.uuid in holders)]
    return len(within_reach) >= count


def describe_shortage(count: int, allowed: tuple[int, ...] | None, found: int, board: Mapping[int, str | None]) -> str:
    """Why `count` GPUs cannot be had, in one sentence."""
    asked = {index: board.get(index, "is not there") for index in (board if allowed is None else allowed)}
    taken = [f"GPU {index} {why}" for index, why in asked.items() if why]
    shown = "; ".join(taken[:8]) + (f"; and {len(taken) - 8} more" if len(taken) > 8 else "")
    if len(asked) < count:
        return f"it needs {format_count(count, 'GPU')}, and there are {len(asked)}" + (f": {shown}" if shown else "")
    return shown if count == 1 else f"it needs {count} GPUs, and {found} of {len(asked)} can be had now: {shown}"


# ==== 7. VIEWS ==== values to what people and programs read: JSON of the API, tables, the coloured snapshot

# Keys of a job in the API, from the first day on; what they say stays as it is here until its option comes.
NOT_YET = {"group": None, "gpu_mem_mib": None, "retries": 0, "timeout_seconds": None, "expected_time": None, "after": (),
           "mean_gpu_util": None, "snapshot": None, "estimated_start": None}


def job_json(job: Job, now: float, node: str, position: int | None = None, waiting_for: str | None = None) -> dict[str, Any]:
    """A job as the API shows it.  Its environment is never in it."""
    runtime = job.runtime_seconds
    if job.status == RUNNING and job.started_at is not None:
        runtime = max(0.0, now - job.started_at)
    return {
        "id": job.id, "name": job.name, "user": job.user, "node": node, "command": job.command, "cwd": job.cwd,
        "status": job.status, "position": position, "waiting_for": waiting_for, "priority": job.priority, "gpus": job.gpus,
        "gpu_ids": job.gpu_ids, "gpu_index": job.gpu_indices[0] if job.gpu_indices else None,
        "gpu_indices": job.gpu_indices, "gpu_uuids": job.gpu_uuids, "created_at": format_time(job.created_at),
        "started_at": format_time(job.started_at), "finished_at": format_time(job.finished_at),
        "runtime_seconds": None if runtime is None else round(runtime, 3), "exit_code": job.exit_code,
        "signal": job.signal, "cause": job.cause, "cause_line": job.cause_line, "stopping": job.stop_cause,
        "attempt": job.attempt, "pid": job.pid, "session": job.session, "log_dir": job.log_dir, "tty": job.tty,
        "peak_rss_mib": job.peak_rss_mib, "cpu_seconds": job.cpu_seconds, "peak_gpu_mem_mib": job.peak_gpu_mem_mib,
        "notes": job.notes, "status_history": [[status, format_time(at)] for status, at in job.status_history], **NOT_YET}


def gpu_json(gpu: Gpu, state: State, config: GpuConfig, trouble: str | None) -> dict[str, Any]:
    """A GPU as GET /status shows it."""
    jobs = [job.id for job in state.running.values() if gpu.uuid in job.gpu_uuids]
    obstacle = find_obstacle(gpu, config)
    foreign = [process for process in gpu.processes if process.job_id is None]
    return {
        "index": gpu.index, "name": gpu.name, "memory_total": format_gb(gpu.memory_total_mib),
        "memory_used": format_gb(gpu.memory_used_mib), "job_id": jobs[0] if jobs else None, "job_ids": jobs,
        "uuid": gpu.uuid, "memory_total_mib": gpu.memory_total_mib, "memory_used_mib": gpu.memory_used_mib,
        "utilization": gpu.utilization, "temperature": gpu.temperature, "power_watts": gpu.power_watts,
        "is_paused": gpu.is_paused, "is_mig": gpu.is_mig, "is_available": not (jobs or obstacle or trouble),
        "fault": gpu.fault, "unavailable": obstacle or (None if jobs or not trouble else "cannot be read"),
        "used_by": None if gpu.fault or gpu.is_paused or not foreign else describe_processes(foreign),
        "processes": [{"pid": p.pid, "user": p.user, "name": p.name, "memory_mib": p.memory_mib, "job_id": p.job_id}
                      for p in gpu.processes]}


# Text.  The command line makes it of what the API answers.

COLOURS = {"white": "37", "green": "92", "bright": "97", "cyan": "36", "blue": "34", "yellow": "33", "red": "31",
           "magenta": "35"}


class Paint:
    """Colours text, or does not."""

    def __init__(self, is_colourful: bool) -> None:
        self.is_colourful = is_colourful

    def __call__(self, colour: str, text: str) -> str:
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if self.is_colourful and text else text


def local_time(stamp: str | None, pattern: str = "%H:%M") -> str:
    """A UTC time of the API on the reader's clock; `-` for none."""
    return "-" if stamp is None else time.strftime(pattern, time.localtime(parse_time(stamp)))


def format_snapshot(status: Mapping[str, Any], paint: Paint) -> str:
    """What `nexus` shows."""
    paused = "[PAUSED]" if status["is_paused"] else "[RUNNING]"
    queued = f"Queue: {format_count(status['queued_jobs'], 'job')} pending"
    lines = [f"{paint('blue', queued)} {paint('yellow', paused)}",
             paint("white", f"History: {format_count(status['completed_jobs'], 'job')} completed"), "", paint("white", "GPUs:")]
    if status["gpu_trouble"]:
        lines.append(paint("red", status["gpu_trouble"]))
    elif not status["gpu_status"]:
        lines.append("none")
    jobs = {job["id"]: job for job in status["running_jobs"]}
    for gpu in status["gpu_status"]:
        lines += format_gpu(gpu, jobs, paint)
    on_cpu = [job for job in jobs.values() if not job["gpus"]]
    if on_cpu:
        lines += ["", paint("white", "CPU:")]
        for job in on_cpu:
            lines += format_running(job, paint)
    lines += [""] * bool(status["hints"]) + [f"hint: {hint}" for hint in status["hints"]]
    return "\n".join(lines) + "\n"


def format_gpu(gpu: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]], paint: Paint) -> list[str]:
    what = ", ".join(part for part in (format_line(gpu["name"]), gpu["memory_total"]) if part)
    header = paint("white", f"GPU {gpu['index']} ({what}):")
    running = [line for job_id in gpu["job_ids"] if job_id in jobs for line in format_running(jobs[job_id], paint)]
    if running:
        return [f"{header} {paint('red', gpu['fault'])}" if gpu["fault"] else header, *running]
    if gpu["is_available"]:
        return [f"{header} {paint('green', 'Available')}"]
    if gpu["used_by"]:
        return [f"{header} In use by {gpu['used_by']}"]
    why = str(gpu["unavailable"] or "is not available")
    return [f"{header} {paint('red' if gpu['fault'] else 'yellow', why[3:4].upper() + why[4:] if why.startswith('is ') else why.capitalize())}"]


def format_running(job: Mapping[str, Any], paint: Paint) -> list[str]:
    runtime = format_duration(job["runtime_seconds"] or 0)
    stopping = f" (stopping: {job['stopping']})" if job["stopping"] else ""
    return [f"  Job ID: {paint('magenta', job['id'])}{stopping}", f"  Command: {paint('bright', format_line(job['command']))}",
            f"  Runtime: {paint('cyan', runtime)}", f"  Started: {paint('cyan', local_time(job['started_at']))}"]


def format_detailed(status: Mapping[str, Any], health: Mapping[str, Any], paint: Paint) -> str:
    """`nexus status --detailed`."""
    bands = status["queued_by_priority"]
    lines = [paint("white", "nexus status"), "=" * 50, f"Version: {status['version']}",
             f"Status: {'paused' if status['is_paused'] else 'running'}", f"Uptime: {status['uptime_seconds']:.0f} seconds",
             f"Jobs Processed: {status['completed_jobs']}", "", paint("white", "Queue Status:"),
             f"  Total Jobs: {status['queued_jobs']}", f"  High Priority: {bands['high']}",
             f"  Normal Priority: {bands['normal']}", f"  Low Priority: {bands['low']}", "", paint("white", "GPU Resources:")]
    if status["gpu_trouble"]:
        lines.append("  " + paint("red", status["gpu_trouble"]))
    for gpu in status["gpu_status"]:
        allocated = "100% allocated" if gpu["job_ids"] else "0% allocated"
        more = [f"memory {gpu['memory_used']} of {gpu['memory_total']}" if gpu["memory_used"] else "memory unknown",
                *([f"{gpu['utilization']:.0f}% busy"] if gpu["utilization"] is not None else []),
                *([f"{gpu['temperature']:.0f}°C"] if gpu["temperature"] is not None else []),
                *([f"{gpu['power_watts']:.0f} W"] if gpu["power_watts"] is not None else [])]
        why = "" if gpu["job_ids"] or gpu["is_paused"] or not gpu["unavailable"] else f"; {gpu['unavailable']}"
        lines.append(f"  GPU {gpu['index']}: {paint('yellow', 'PAUSED') if gpu['is_paused'] else allocated}"
                     f" ({', '.join(more)}){why}")
    host = status["host"]
    lines += ["", f"Host: {host['name']}, CPU {format_known(host['cpu_percent'], '%')}, memory "
              f"{format_known(host['memory_used_gb'], 'GB')} of {format_known(host['memory_total_gb'], 'GB')} in use", "",
              f"Active Jobs: {len(status['running_jobs'])}"]
    for job in status["running_jobs"]:
        memory = f", memory {format_known(job['rss_mib'] and job['rss_mib'] / 1024, 'GB')}, CPU {format_known(job['cpu_percent'], '%')}"
        lines.append(f"  {paint('magenta', job['id'])}: {paint('bright', format_line(job['command']))}"
                     f" (GPUs: [{format_indices(job['gpu_indices'])}]{memory})")
    lines += ["", f"Health: {paint('green', 'HEALTHY') if health['is_healthy'] else paint('red', 'UNHEALTHY')}"]
    lines += [f"hint: {hint}" for hint in status["hints"]]
    return "\n".join(lines) + "\n"


def format_known(number: float | None, unit: str) -> str:
    return "unknown" if number is None else f"{number:.1f}".rstrip("0").rstrip(".") + unit


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str], paint: Paint,
                 width: int) -> str:
    """Columns padded to their widest cell; the last takes what `width` leaves (0: all it needs)."""
    clean = [[format_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *clean)]
    used = sum(widths[:-1]) + 2 * (len(widths) - 1)
    last = max(20, width - used) if width else 0
    lines = []
    for number, row in enumerate([list(headings), *clean]):
        cells = [cell.ljust(size) for cell, size in zip(row[:-1], widths)] + [format_line(row[-1], last)]
        painted = [paint("white", cell) if not number else paint(colour, cell) if colour else cell
                   for cell, colour in zip(cells, colours)]
        lines.append("  ".join(painted).rstrip())
    return "\n".join(lines) + "\n"


def format_queue(jobs: Sequence[Mapping[str, Any]], paint: Paint, width: int) -> str:
    rows = [[job["id"], format_priority(job["priority"]), str(job["gpus"]), local_time(job["created_at"], "%m-%d %H:%M"),
             name_or_command(job), f"waiting: {job['waiting_for']}" if job["waiting_for"] else ""] for job in jobs]
    if width:                           # the reason gets a line of its own when the screen is too narrow for both
        table = format_table(("ID", "PRIORITY", "GPUS", "ADDED", "COMMAND"), [row[:5] for row in rows],
                             ("magenta", "", "", "cyan", "bright"), paint, width).splitlines()
        lines, last = table[:1], ""
        for line, row in zip(table[1:], rows):
            lines.append(line)
            if row[5] and row[5] != last:       # jobs of a kind wait for the same
                lines.append("     " + format_line(row[5], max(20, width - 5)))
            last = row[5]
        return "\n".join(lines) + "\n"
    return format_table(("ID", "PRIORITY", "GPUS", "ADDED", "COMMAND", "WAITING FOR"), rows,
                        ("magenta", "", "", "cyan", "bright", ""), paint, 0)


def name_or_command(job: Mapping[str, Any]) -> str:
    return f"{job['name']}: {job['command']}" if job["name"] else str(job["command"])


def format_priority(priority: int) -> str:
    return next((name for name, number in PRIORITIES.items() if number == priority), str(priority))


def format_jobs(jobs: Sequence[Mapping[str, Any]], paint: Paint, width: int) -> str:
    rows = [[job["id"], job["status"], format_indices(job["gpu_indices"]) or "-", format_outcome(job),
             "-" if job["runtime_seconds"] is None else format_duration(job["runtime_seconds"]),
             local_time(job["started_at"] or job["created_at"], "%m-%d %H:%M"), name_or_command(job)] for job in jobs]
    return format_table(("ID", "STATUS", "GPU", "RESULT", "RUNTIME", "STARTED", "COMMAND"), rows,
                        ("magenta", "", "", "", "cyan", "cyan", "bright"), paint, width)


def format_outcome(job: Mapping[str, Any]) -> str:
    """`exit 0`, `exit 3`, `signal 9`, `killed`, `launch` ... in a word or two."""
    if job["cause"] == "signal" and job["signal"]:
        return f"signal {job['signal']}"
    if job["cause"] not in (None, "exit"):
        return str(job["cause"])
    return "-" if job["exit_code"] is None else f"exit {job['exit_code']}"


def format_job(job: Mapping[str, Any], paint: Paint) -> str:
    """`nexus show ID`: every fact that is known, a line each."""
    lines = [f"{paint('white', 'Job ' + job['id'])}: {job['status']}"
             + (f" ({format_outcome(job)})" if job["status"] in FINAL else "")]
    for key, fact in job.items():
        if key in ("id", "status", "status_history") or fact in (None, [], (), "", False) or (key, fact) == ("retries", 0):
            continue
        if key.endswith("_at"):
            shown = paint("cyan", f"{local_time(fact, '%Y-%m-%d %H:%M:%S')}")
        elif key == "runtime_seconds":
            shown = paint("cyan", format_duration(fact))
        elif key == "command":
            shown = paint("bright", format_line(fact))
        elif isinstance(fact, (list, tuple)):
            shown = ", ".join(map(str, fact))
        else:
            shown = format_line(format_priority(fact) if key == "priority" else str(fact))
        lines.append(f"  {key}: {shown}")
    history = ", ".join(f"{status} {local_time(at, '%H:%M:%S')}" for status, at in job["status_history"])
    return "\n".join([*lines, f"  history: {history}"]) + "\n"


def format_health(health: Mapping[str, Any], paint: Paint) -> str:
    lines = [f"{'ok  ' if check['is_ok'] else paint('red', 'BAD ')} {check['name']}: {check['reading']}" for check in health["checks"]]
    return "\n".join([*lines, paint("green", "HEALTHY") if health["is_healthy"] else paint("red", "UNHEALTHY")]) + "\n"

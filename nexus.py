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
    import http.client
    import http.server
    import logging
    import ssl
    import subprocess
    from collections.abc import Generator
    from typing import IO, Any, NoReturn, TextIO, TypeVar, Union

    from typing_extensions import dataclass_transform

    T = TypeVar("T")

    @dataclass_transform(frozen_default=True)
    def value(cls: type[T]) -> type[T]: ...
else:

    def value(cls):
        """Make `cls` what dataclasses.dataclass(frozen=True, slots=True) makes of it, on Python 3.9 too."""
        names = tuple(cls.__annotations__)
        defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}

        def make_init(self, *given, **named):
            """Compiled when the first one is made: most commands make none of most kinds."""
            arguments = "".join(f", {name}=_d[{name!r}]" if name in defaults else f", {name}" for name in names)
            body = "".join(f"\n _set_{name}(self, {name})" for name in names) or "\n pass"
            space = {"_d": defaults, **{f"_set_{name}": vars(type(self))[name].__set__ for name in names}}
            exec(f"def __init__(self{arguments}):{body}", space)
            type(self).__init__ = space["__init__"]
            self.__init__(*given, **named)

        def refuse(self, name, *_):
            raise AttributeError(f"{type(self).__name__} is a value: use replace() to make another {name}")

        kept = {name: member for name, member in vars(cls).items()
                if name not in defaults and name not in ("__dict__", "__weakref__")}
        return type(cls.__name__, cls.__bases__, {
            **kept, "__slots__": names, "__init__": make_init, "__setattr__": refuse, "__delattr__": refuse,
            "DEFAULTS": defaults,
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
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")      # those that end lines or turn their direction too
MAX_ARGUMENT_BYTES = 128 * 1024 - 1        # Linux refuses to exec with a longer one (MAX_ARG_STRLEN)


def format_duration(seconds: float) -> str:
    """`45s`, `12m 5s`, `2h 15m`, `3d 4h`: the two largest units."""
    left = max(0, int(seconds))
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (parts and len(parts) < 2) or (unit == "s" and not parts):
            parts.append((count, unit))
    shown = [f"{count}{unit}" for count, unit in parts[:2] if count]
    return " ".join(shown) or "0s"


def format_limit(seconds: float) -> str:
    """A time limit, and what is held against it: below 10 s one decimal, where it is not whole."""
    return format_duration(seconds) if seconds >= 10 else f"{max(0.0, seconds):.2g}s"


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


def format_memories(mib: float, other_mib: float) -> tuple[str, str]:
    """Two that a sentence compares: in MB where they differ and would look the same."""
    shown = format_memory(mib), format_memory(other_mib)
    return shown if shown[0] != shown[1] or mib == other_mib else (f"{mib:.0f}MB", f"{other_mib:.0f}MB")


def format_count(count: int, noun: str) -> str:
    """`1 job`, `3 jobs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_line(text: str, width: int = 0) -> str:
    """Text as one harmless line for a terminal: control characters shown as blanks, cut at `width` columns if that is given."""
    line = CONTROL.sub(" ", text[: 4 * width] if width else text)        # a letter and three marks take one column
    if not width or (len(text) == len(line) and count_columns(line) <= width):
        return line
    line = line[: max(1, width - 1)]
    while count_columns(line) >= max(2, width):
        line = line[:-1]
    return line + "…"


def count_columns(text: str) -> int:
    """How many columns of a terminal a line takes."""
    if text.isascii():
        return len(text)
    import unicodedata
    return sum(0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
MEMORY_UNITS = {"M": 1, "G": 1024, "T": 1024 * 1024}        # in MiB


def parse_duration(text: str) -> float:
    """Seconds of `90`, `45s`, `1.5h`, `2h 30m`.  Raises: usage."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text):
        return float(text)
    parts = re.findall(r"([0-9]{1,9}(?:\.[0-9]+)?) ?([smhdw])", text)
    if not parts or not re.fullmatch(r"( *[0-9]{1,9}(\.[0-9]+)? ?[smhdw])+ *", text):
        raise NexusError("usage", f"'{format_line(text, 40)}' is not a time", hint="write it like 90s, 30m, 2h or 1h30m")
    return sum(float(number) * DURATION_UNITS[unit] for number, unit in parts)


def parse_memory(text: str) -> int:
    """MiB of `500M`, `10G`, `1.5GB`, `10GiB`.  Raises: usage."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?) ?([MGTmgt])(?:i?[Bb])?", text)
    if not match:
        raise NexusError("usage", f"'{format_line(text, 40)}' is not an amount of memory", hint="write it with its unit, like 10G or 500M")
    return round(float(match[1]) * MEMORY_UNITS[match[2].upper()])


def format_number(number: float) -> str:
    """`2`, `0.5`: two decimals at most, and none that say nothing."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def format_indices(indices: Iterable[int]) -> str:
    return ", ".join(str(index) for index in indices)


def format_ranges(indices: Iterable[int]) -> str:
    """Ascending ones as parse_indices() takes them: `0-3,5`."""
    import itertools
    runs = [[index for _, index in run] for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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


def quote(text: str) -> str:
    import shlex
    return shlex.quote(text)


def join_paths(first: str, second: str) -> str:
    """Two lists like PATH as one, each entry once."""
    return ":".join(dict.fromkeys([*first.split(":"), *second.split(":")]))


def is_job_id(text: str) -> bool:
    return ID_PATTERN.fullmatch(text) is not None


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'abc'?`, or nothing when no known word is near."""
    import difflib
    near = difflib.get_close_matches(word, list(known), n=1) if len(word) <= 100 else []     # of megabytes it would make gigabytes
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
    log_format: str
    log_level: str
    log_max_mb: float
    log_backups: int
    tls_cert: str
    tls_key: str
    max_body_mb: float
    max_connections: int
    max_connections_per_client: int
    request_timeout_seconds: float
    idle_timeout_seconds: float
    node_lost_after_seconds: float


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
    load_threshold: float
    lease_dir: str
    guard_failures: int
    guard_seconds: float


@value
class JobsConfig:
    launcher: str
    default_gpus: int
    cpu_slots: int
    max_running: int
    queue_limit: int
    timeout_seconds: float
    timeout_multiplier: float
    kill_grace_seconds: float
    retries: int
    retry_backoff_seconds: float
    launch_attempts: int
    on_reboot: str
    reserve_after_seconds: float
    jobs_file: str
    jobs_file_interval_seconds: float
    llm_config: str
    cuda_arg: str
    allowed_script_paths: tuple[str, ...]
    max_memory_gb: float
    max_running_per_user: int
    max_pending_per_user: int


@value
class HooksConfig:
    on_unhealthy: str
    on_finish: str


@value
class NodeConfig:
    """Another machine, as OpenSSH is told of it; "" and 0: what its own configuration says."""
    name: str
    host: str
    user: str = ""
    port: int = 0
    jump: str = ""                  # [user@]host[:port] through which it is reached
    identity_file: str = ""

    @property
    def destination(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


@value
class SlurmConfig:
    partition: str
    account: str
    qos: str
    extra_args: tuple[str, ...]
    max_submitted: int


@value
class Config:
    service: ServiceConfig
    state: StateConfig
    gpu: GpuConfig
    jobs: JobsConfig
    hooks: HooksConfig
    slurm: SlurmConfig
    nodes: tuple[NodeConfig, ...] = ()


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
    Setting("service", "log_format", "text", ("text", "json"), "or \"json\": one object a line"),
    Setting("service", "log_level", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"), "least level kept in service.log"),
    Setting("service", "log_max_mb", 100, (0.1, 100000), "service.log is rotated at this size"),
    Setting("service", "log_backups", 5, (0, 1000), "rotated logs kept"),
    Setting("service", "tls_cert", "", None, "a PEM file, and with tls_key another: https instead of http"),
    Setting("service", "tls_key", "", None, "the certificate's private key"),
    Setting("service", "max_body_mb", 64, (0.01, 1024), "a longer request is refused"),
    Setting("service", "max_connections", 0, (0, 1000000), "at once; 0 = a third of the descriptors that the service may open"),
    Setting("service", "max_connections_per_client", 256, (1, 1000000),
            "of one address, or of another user of this machine; a new one ends the longest idle"),
    Setting("service", "request_timeout_seconds", 30, (0.1, 3600), "within which a request must have come, and a second more per 64 KB"),
    Setting("service", "idle_timeout_seconds", 75, (0.1, 86400), "a connection without a request is closed; so is one that takes nothing"),
    Setting("service", "node_lost_after_seconds", 0, (0, 31536000),
            "a job on a machine that cannot be reached for so long is given up; 0 = never"),
    Setting("state", "state_file", "~/.nexus/state.json", None, "the journal lies beside it; ~/.nexus is NEXUS_HOME"),
    Setting("state", "log_dir", "~/.nexus/logs", None, "one folder for each job"),
    Setting("state", "history_limit", 1000, (1, 1000000),
            "finished jobs kept; beyond it the oldest of the user with the most go, with their log folders"),
    Setting("gpu", "provider", "nvidia-smi", ("nvidia-smi", "mock"),
            "or \"mock\": mock_gpus made-up GPUs, for a trial and for tests"),
    Setting("gpu", "mock_gpus", 0, (0, 1024), "NEXUS_MOCK_GPUS=2 in the service's environment sets both"),
    Setting("gpu", "ids", (), (0, 9999), "GPUs nexus may use, by index; [] = all"),
    Setting("gpu", "share_with_others", False, None,
            "true: a foreign compute process alone does not make a GPU unavailable"),
    Setting("gpu", "min_free_mem_mib", 0, (0, 100000000), "a GPU with less free memory gets no job"),
    Setting("gpu", "mem_threshold", 0.8, (0, 1),
            "neither does one with this fraction of its memory in use by others than nexus's jobs"),
    Setting("gpu", "load_threshold", 0.8, (0, 1), "nor, for a second job on it, one with this utilization"),
    Setting("gpu", "lease_dir", "", None,
            "where users' services agree on GPUs; default: nexus-leases in the first of /run/lock, /tmp that all may write"),
    Setting("gpu", "guard_failures", 3, (0, 1000),
            "so many failures in a row, each soon after its start, of jobs such as run elsewhere: the GPU is paused; 0 = off"),
    Setting("gpu", "guard_seconds", 10, (0, 86400), "what is soon"),
    Setting("jobs", "launcher", "screen", ("screen", "direct", "slurm"),
            "or \"direct\": no session, so no attach; or \"slurm\": a cluster runs them, see [slurm]"),
    Setting("jobs", "default_gpus", 1, (0, 1024), "GPUs of a job that does not say"),
    Setting("jobs", "cpu_slots", 4, (0, 100000), "how many --gpus 0 jobs run at once"),
    Setting("jobs", "max_running", 0, (0, 100000), "0 = as many as fit"),
    Setting("jobs", "queue_limit", 100000, (1, 10000000), "more pending jobs are refused"),
    Setting("jobs", "timeout_seconds", 0, (0, 31536000), "time limit of a job that has none of its own; 0 = none"),
    Setting("jobs", "timeout_multiplier", 2, (1, 1000), "a job with an expected time is stopped at this multiple of it"),
    Setting("jobs", "kill_grace_seconds", 10, (0, 86400), "from SIGTERM to SIGKILL"),
    Setting("jobs", "retries", 0, (0, 1000), "further attempts of a job that fails, if it does not say itself"),
    Setting("jobs", "retry_backoff_seconds", 5, (0, 86400), "before the first of them; doubles each time, up to an hour"),
    Setting("jobs", "launch_attempts", 5, (1, 100), "a job that the machine could not even launch is tried this often"),
    Setting("jobs", "on_reboot", "fail", ("fail", "requeue"),
            "or \"requeue\": what becomes of jobs that ran when the machine went down"),
    Setting("jobs", "reserve_after_seconds", 300, (0, 31536000),
            "a job passed over for so long gets the GPUs that become free"),
    Setting("jobs", "jobs_file", "", None, "watched: each new line `priority,script,conda_env,arguments,allowed_gpus` becomes a job"),
    Setting("jobs", "jobs_file_interval_seconds", 30, (0.1, 86400), "it is read anew at least so often"),
    Setting("jobs", "llm_config", "", None,
            "JSON: how much of a GPU a job with `--llm NAME` in its command gets, {\"models\": {\"qwen2.5-7b-inst\": 0.5}}"),
    Setting("jobs", "cuda_arg", "replace", ("replace", "add"),
            "--cuda in a row of jobs_file gets the GPU's number; or \"add\": it is added to rows without it"),
    Setting("jobs", "allowed_script_paths", (), None,
            "[] = any command; else only `[interpreter] SCRIPT ARGS`, with SCRIPT below one of these"),
    Setting("jobs", "max_memory_gb", 0, (0, 1000000),
            "host memory of a job's processes; above it the job is stopped (needs psutil); 0 = any"),
    Setting("jobs", "max_running_per_user", 0, (0, 100000), "how many jobs of one user run at once; 0 = no limit"),
    Setting("jobs", "max_pending_per_user", 0, (0, 10000000), "how many of one user may wait; 0 = no limit"),
    Setting("hooks", "on_unhealthy", "", None, "a command, run when `nexus health` turns bad, and again when it is well"),
    Setting("hooks", "on_finish", "", None,
            "a command, run for each finished job, with NEXUS_JOB_ID, _STATUS, _CAUSE, _EXIT_CODE, _COMMAND, _GPU"),
    Setting("slurm", "partition", "", None, "where sbatch puts the jobs; \"\" = the cluster's default, here and below"),
    Setting("slurm", "account", "", None, "who is charged for them"),
    Setting("slurm", "qos", "", None, "their quality of service"),
    Setting("slurm", "extra_args", (), None,
            "further options of sbatch, like [\"--cpus-per-task=8\", \"--constraint=a100\"]; what a job asks for counts more"),
    Setting("slurm", "max_submitted", 1000, (1, 1000000),
            "so many at once are Slurm's, waiting or running; among those Slurm's order holds, among the others nexus's"),
)
SECTION_CLASSES = {"service": ServiceConfig, "state": StateConfig, "gpu": GpuConfig, "jobs": JobsConfig, "hooks": HooksConfig,
                   "slurm": SlurmConfig}
OWN_SBATCH_OPTIONS = ("array", "chdir", "clusters", "comment", "error", "export", "job-name", "output", "parsable", "requeue", "no-requeue",
                      "test-only", "wait", "wrap", "D", "J", "M", "W", "a", "e", "o")      # what nexus itself says to sbatch


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
    nodes: list[NodeConfig] = []
    tables = data.get("nodes", [])
    for number, table in enumerate(tables if isinstance(tables, list) else [tables], 1):
        try:
            node = parse_node(table)
            if node.name in [other.name for other in nodes]:
                raise NexusError("usage", f"another one has the name {node.name}")
            nodes.append(node)
        except NexusError as error:
            faults.append(f"nodes, number {number}: {error.message}" + (f" ({error.hint})" if error.hint else ""))
    faults += [] if faults else find_sbatch_faults(chosen["slurm"]["extra_args"])
    if nodes and chosen["jobs"]["launcher"] == "slurm":
        faults.append("jobs.launcher = \"slurm\" and [[nodes]]: with Slurm, where jobs run is Slurm's to choose; take one of the two out")
    if faults:
        raise NexusError("usage", f"{path}: " + "; ".join(faults), hint="all keys and what they mean: nexus config sample")
    return Config(**{section: made(**chosen[section]) for section, made in SECTION_CLASSES.items()}, nodes=tuple(nodes))


# What a node's facts may look like: they become words of ssh's command line, where one that began with - would be an option.
NODE_PATTERNS = {"name": r"\w[\w.-]{0,62}", "host": r"\w[\w.:%-]{0,252}", "user": r"(\w[\w.@+-]{0,63})?",
                 "jump": r"(\w[\w.@+-]{0,63}@)?\w[\w.%-]{0,252}(:[0-9]{1,5})?|", "identity_file": r"([~/][^\x00-\x1f\x7f%]{0,4000})?"}


def parse_node(data: Any) -> NodeConfig:
    """Of a table [[nodes]], or the body of POST /nodes.  Raises: usage."""
    known: Sequence[str] = NodeConfig.__slots__  # type: ignore[attr-defined]
    if not isinstance(data, dict):
        raise NexusError("usage", "a node must be an object with a host", hint='{"name": "n1", "host": "10.0.0.5", "user": "gpuuser"}')
    for key in data:
        if key not in known:
            raise NexusError("usage", f"'{format_line(str(key), 40)}' is not a key of a node", hint=f"the keys are {', '.join(known)}")
    given = {"name": data.get("host"), **data}
    for key, pattern in NODE_PATTERNS.items():
        fact = given.get(key, "")
        if not isinstance(fact, str) or not re.fullmatch(pattern, fact, re.ASCII if key != "identity_file" else 0):
            raise NexusError("usage", f"{key} of a node cannot be {format_line(format_toml(fact), 60)}", hint=(
                "name it: --name n1" if key == "name" else "an absolute path, or one below ~" if key == "identity_file" else ""))
    port = given.get("port", 0)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise NexusError("usage", f"port of a node must be a whole number up to 65535, not {format_line(format_toml(port), 60)}")
    return NodeConfig(**given)


def find_unknown_keys(data: Mapping[str, Any]) -> Iterator[str]:
    for section, table in data.items():
        homes = [setting.section for setting in SETTINGS if setting.key == section]
        if section == "nodes":
            continue
        if homes and not isinstance(table, dict):
            yield f"{section} belongs below [{homes[0]}]"
        elif section not in SECTION_CLASSES:
            yield ", ".join(filter(None, [f"[{section}] is not a section", suggest(section, SECTION_CLASSES)]))
        elif not isinstance(table, dict):
            yield f"{section} must be a section, [{section}]"
        else:
            known = [setting.key for setting in SETTINGS if setting.section == section]
            for key in [key for key in table if key not in known]:
                home = next((s.section for s in SETTINGS if s.key == key), None)
                near = f"it belongs to [{home}]" if home else suggest(key, known)
                yield ", ".join(filter(None, [f"{section}.{key} is not a key", near]))


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
    takes_decimals = isinstance(default, float) or setting.key.endswith(("_seconds", "_mb", "_gb", "_multiplier"))
    fits = isinstance(given, (int, float) if takes_decimals else int) and not isinstance(given, bool)
    if not fits or not allowed[0] <= given <= allowed[1]:
        return f"must be a {'' if takes_decimals else 'whole '}number from {allowed[0]} to {allowed[1]}"
    return ""


def find_sbatch_faults(extra_args: Sequence[str]) -> list[str]:
    """What is wrong with [slurm] extra_args: each is an option, and none is one of nexus's own."""
    faults = []
    for option in extra_args:
        match = re.match(r"--([a-z][a-z-]*)(=|$)|-([A-Za-z])", option)
        if not match:
            faults.append(f"slurm.extra_args: {format_toml(option)} is not an option; write it with its value, like \"--cpus-per-task=8\"")
        elif (match[1] or match[3]) in OWN_SBATCH_OPTIONS:
            faults.append(f"slurm.extra_args: {format_toml(option)} cannot be given: nexus itself says it to sbatch")
    return faults


def format_toml(given: Any) -> str:
    return json.dumps(list(given) if isinstance(given, tuple) else given, default=str, ensure_ascii=False)


def format_config(config: Config) -> str:
    """The settings in force, as config.toml would have them."""
    lines = []
    for section in SECTION_CLASSES:
        table = getattr(config, section)
        lines += [f"[{section}]", *(f"{s.key} = {format_toml(getattr(table, s.key))}" for s in SETTINGS if s.section == section), ""]
    for node in config.nodes:
        keys: Sequence[str] = NodeConfig.__slots__  # type: ignore[attr-defined]
        lines += ["[[nodes]]", *(f"{key} = {format_toml(getattr(node, key))}" for key in keys if getattr(node, key)), ""]
    return "\n".join(lines)


def format_sample_config() -> str:
    """config.toml.example: every key at its default, with its comment."""
    lines = ["# nexus reads this file from ~/.nexus/config.toml (NEXUS_HOME moves it).",
             "# Every key may be left out; these are the defaults."]
    for section in SECTION_CLASSES:
        lines.append(f"\n[{section}]")
        lines += [f"{f'{s.key} = {format_toml(s.default)}':<36} # {s.comment}" for s in SETTINGS if s.section == section]
    lines += ["", "# Other machines with GPUs, by OpenSSH, whose own configuration, agent and known_hosts apply.  Those of",
              "# `nexus node add` need no lines here.", "# [[nodes]]",
              *(f"# {line:<34} # {comment}" for line, comment in (
                  ('name = "n1"', "what it is called here"), ('host = "10.0.0.5"', "or a Host of ~/.ssh/config"),
                  ('user = "gpuuser"', "whose nexus runs there"), ("port = 22", ""), ('jump = "me@gateway"', "through which it is reached"),
                  ('identity_file = "~/.ssh/id_ed25519"', "")))]
    return "\n".join(line.rstrip(" #") if line.endswith("# ") else line for line in lines) + "\n"


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
    number: int = 0                             # its sequence number: how many were submitted before it, ever
    gpus: float = 1                             # 0 takes a CPU slot; 0.5 shares one; 1.5 is one and half of another
    gpu_ids: tuple[int, ...] | None = None      # the only GPUs it may have, by index; None = any
    only_node: str | None = None                # the machine it is to run on, by name; "" = this one; None = any
    unfit: tuple[tuple[str, str], ...] = ()     # (node, why) of those that cannot run it
    gpu_mem_mib: int | None = None              # memory it needs on each of its GPUs; None = not said
    priority: int = 1
    name: str | None = None
    group: str | None = None
    after: tuple[str, ...] = ()                 # the jobs that must have completed before it starts
    unmet: tuple[str, ...] = ()                 # those of them that have not yet
    key: str | None = None                      # of the submission that brought it, should its sender ask twice
    key_content: str | None = None              # digest of all that came with this key: it may bring only the same; None = not known
    env_digest: str | None = None               # of the variables chosen for it: with command, directory and conda what it is
    conda: str | None = None                    # the environment to activate, by name or path
    snapshot: str | None = None                 # the commit in whose checkout it runs
    snapshot_repo: str | None = None            # the work tree that was taken of
    code: str | None = None                     # the script that came with it, a file of Layout.code_folder; its cwd is a folder of its own
    labels: tuple[tuple[str, str], ...] = ()    # what its submitter calls it by, for whoever asks: (name, text)
    cuda_arg: bool = False                      # its --cuda says the GPUs' numbers, and all GPUs are visible
    tty: bool = False                           # its stdout is a terminal
    retries: int = 0                            # how many further attempts it gets when one fails
    timeout_seconds: float | None = None        # its time limit; 0 = none, whatever the configuration says; None = not said
    expected_time: float | None = None          # seconds, as its submitter expects
    umask: int | None = None                    # None = the service's
    limits: tuple[tuple[str, int, int], ...] = ()   # (name, soft, hard) of the submitter; -1 = unlimited
    status: str = PENDING
    status_history: tuple[tuple[str, float], ...] = ()
    passed_over_at: float | None = None         # since when later jobs have started before it
    attempt: int = 0                            # of the last start; 0 before the first
    attempts: tuple[tuple[Any, ...], ...] = ()  # those before it that failed, as ATTEMPT_FIELDS
    launch_failures: int = 0                    # how often it could not even be launched, and might have been
    retried_as: str | None = None               # the job that was added to do it again
    is_told: bool = False                       # on_finish was run for it
    retry_at: float | None = None               # it does not start again before; None = it may
    is_alone: bool = False                      # it ran out of GPU memory: whole GPUs from now on, the emptiest
    log_offset: int = 0                         # where in stderr.log this attempt's part begins, in bytes
    node: str = ""                              # where it was started last; "" = on this machine
    remote_id: str | None = None                # its id on that node
    log_base: tuple[int, int] = (0, 0)          # bytes of stdout.log and stderr.log when its attempt there began
    head: str | None = None                     # the service_id of the nexus that has sent it here; None = nobody has
    head_attempt: int = 0                       # which attempt that is there, of all its jobs'
    is_collected: bool = False                  # that nexus has all of it
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
    stop_line: str | None = None                # what its cause_line will be
    notes: tuple[str, ...] = ()                 # what could not be given as asked
    peak_rss_mib: float | None = None           # host memory of its processes together
    cpu_seconds: float | None = None
    peak_gpu_mem_mib: float | None = None       # of its processes on all its GPUs together
    mean_gpu_util: float | None = None          # percent, of its GPUs while it ran
    slurm_key: str | None = None                # in the comment by which Slurm has it: TOKEN, or TOKEN_TASK of an array; None: it has not
    slurm_id: str | None = None                 # Slurm's own, 123 or 123_4; None while it is handed over
    slurm_node: str | None = None               # where Slurm runs it, as Slurm lists nodes: n[1-2]


ATTEMPT_FIELDS = ("attempt", "started_at", "finished_at", "runtime_seconds", "exit_code", "cause", "gpu_indices", "node")


def read_attempts(job: Job) -> list[dict[str, Any]]:
    """The attempts of a job before the present one, as {field: fact}; `node` is "" for this machine."""
    return [{"node": "", **dict(zip(ATTEMPT_FIELDS, attempt))} for attempt in job.attempts]     # which came later


@value
class Group:
    """What is known of jobs that were submitted under one name."""
    name: str
    limit: int = 0                  # how many of them run at once; 0 = as many as fit
    hold: str | None = None         # why none of them starts
    failures: int = 0               # how many of the first that ended failed soon, while all did; -1: one did not


@value
class Token:
    """What another user calls with.  The token itself is nowhere."""
    user: str
    sha256: str
    created_at: float
    expires_at: float | None = None     # None = never
    revoked_at: float | None = None
    used_at: float | None = None        # the last time, to the minute


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
    node: str = ""                              # the machine it is in; "" = this one
    taken: int = 0                              # hundredths that jobs of the node's own have
    taken_by: tuple[str, ...] = ()              # their ids there
    lease_holder: str | None = None             # the user whose nexus has it
    is_paused: bool = False
    pause_reason: str | None = None             # why nexus itself paused it
    settled: tuple[str, ...] = ()               # jobs there whose use of memory has not grown for a while
    utilization_mean: float | None = None       # percent, over the last hour
    utilization_peak: float | None = None

    @property
    def place(self) -> str:
        """What it is called in commands and paths: `0`, or on another machine `n1:0`."""
        return f"{self.node}:{self.index}" if self.node else str(self.index)


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
class GroupChanged:
    group: Group


@value
class LineSeen:
    """How often the jobs file now holds a row of this content."""
    digest: str
    count: int


@value
class StateChanged:
    facts: Mapping[str, Any]                    # those of STATE_FACTS


if TYPE_CHECKING:
    Change = Union[JobAdded, JobChanged, JobsRemoved, EnvironmentAdded, GroupChanged, LineSeen, StateChanged]
    Changes = Generator[Change, None, Any]      # what Store.update() performs: each change as it is yielded
    Lane = tuple[Union[str, None], str]     # (group, user)
    Kind = tuple[int, Union[tuple[int, ...], None], Union[int, None], bool, int, Union[str, None], tuple[str, ...]]

STATE_FACTS: Mapping[str, Any] = {"paused": False, "paused_gpus": (), "pause_reasons": (), "hooks_since": None, "inventory": (),
                                  "nodes": ()}
INDEXED = ("status", "order", "priority", "gpus", "gpu_ids", "gpu_mem_mib", "is_alone", "expected_time", "group", "user", "unmet",
           "retry_at", "key", "environment", "number", "only_node", "unfit", "slurm_key")    # the fields by which State finds jobs


class State:
    """All that state.json holds, and its indexes.  Owned by STORE; changed by apply() alone."""

    def __init__(self) -> None:
        self.seq = 0                                        # of the last change applied
        self.paused = False
        self.paused_gpus: tuple[str, ...] = ()              # uuids
        self.pause_reasons: tuple[tuple[str, str], ...] = ()    # (uuid, why nexus itself paused it)
        self.hooks_since: float | None = None               # since when on_finish is configured
        self.inventory: tuple[tuple[int, str, str, float | None], ...] = ()  # GPUs last seen: index, uuid, name, MiB
        self.nodes: tuple[tuple[Any, ...], ...] = ()        # those that were added: the fields of NodeConfig, and whether it is to go
        self.jobs: dict[str, Job] = {}
        self.environments: dict[str, Mapping[str, str]] = {}
        self.order: list[tuple[tuple[int, ...], str]] = []  # pending jobs, (order, id), ascending
        # of those that may start, per kind of request, and per group and user
        self.kinds: dict[Kind, dict[Lane, list[tuple[tuple[int, ...], str]]]] = {}
        self.dependents: dict[str, dict[str, None]] = {}    # job: the pending ones that come after it
        self.delayed: list[tuple[float, str]] = []          # (retry_at, id) of those that wait for their next attempt
        self.groups: dict[str, Group] = {}                  # those of which something is known
        self.seen: dict[str, int] = {}                      # rows of the jobs file: digest, how many of it
        self.running: dict[str, Job] = {}
        self.handed: dict[str, Job] = {}                    # pending ones that wait in Slurm's queue, and not in ours
        self.finished: dict[str, Job] = {}                  # in the order in which they ended
        self.finished_by_user: dict[str, int] = {}          # how many of them
        self.next_number = 1                                # the next job's sequence number
        self.keys: dict[str, dict[str, None]] = {}                # submission key: the ids it brought
        self.pending_by_priority: dict[int, int] = {}
        self.turns: dict[tuple[int, str], list[int]] = {}   # (priority, user): the turns of the pending ones, ascending
        self.started_turns: dict[tuple[int, str], int] = {}     # (priority, user): the last turn that started, if none was later
        self.environment_uses: dict[str, int] = {}          # digest: how many jobs have it

    def index(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.next_number = max(self.next_number, job.number + 1)
        self.environment_uses[job.environment] = self.environment_uses.get(job.environment, 0) + 1
        if job.key:
            self.keys.setdefault(job.key, {})[job.id] = None
        if job.status == PENDING:
            self.pending_by_priority[job.priority] = self.pending_by_priority.get(job.priority, 0) + 1
            insert_sorted(self.turns.setdefault((job.priority, job.user), []), job.order[2])
            insert_sorted(self.order, (job.order, job.id))
            for parent in job.unmet:
                self.dependents.setdefault(parent, {})[job.id] = None
            if job.slurm_key is not None:
                self.handed[job.id] = job
            elif job.retry_at is not None:
                insert_sorted(self.delayed, (job.retry_at, job.id))
            elif not job.unmet:
                insert_sorted(self.kinds.setdefault(kind_of(job), {}).setdefault((job.group, job.user), []), (job.order, job.id))
        else:
            if job.attempt and not was_moved(job):
                self.note_turn(job.priority, job.user, job.order[2])
            (self.running if job.status == RUNNING else self.finished)[job.id] = job
            if job.status in FINAL:
                set_count(self.finished_by_user, job.user, self.finished_by_user.get(job.user, 0) + 1)

    def note_turn(self, priority: int, user: str, turn: int) -> None:
        """Of the turns that have started only the last says something, and who has had it."""
        others = [place for place in self.started_turns if place[0] == priority]
        if all(turn >= self.started_turns[place] for place in others):
            for place in others:
                if self.started_turns[place] < turn:
                    del self.started_turns[place]
            self.started_turns[priority, user] = turn

    def unindex(self, job: Job) -> None:
        del self.jobs[job.id]
        self.environment_uses[job.environment] -= 1
        if not self.environment_uses[job.environment]:
            del self.environment_uses[job.environment]
        if job.key:
            del self.keys[job.key][job.id]
            if not self.keys[job.key]:
                del self.keys[job.key]
        if job.status == PENDING:
            self.pending_by_priority[job.priority] -= 1
            if not self.pending_by_priority[job.priority]:
                del self.pending_by_priority[job.priority]
            remove_sorted(self.turns[job.priority, job.user], job.order[2])
            if not self.turns[job.priority, job.user]:
                del self.turns[job.priority, job.user]
            remove_sorted(self.order, (job.order, job.id))
            for parent in job.unmet:
                del self.dependents[parent][job.id]
                if not self.dependents[parent]:
                    del self.dependents[parent]
            if job.slurm_key is not None:
                del self.handed[job.id]
            elif job.retry_at is not None:
                remove_sorted(self.delayed, (job.retry_at, job.id))
            elif not job.unmet:
                self.unindex_kind(job)
        else:
            del (self.running if job.status == RUNNING else self.finished)[job.id]
            if job.status in FINAL:
                set_count(self.finished_by_user, job.user, self.finished_by_user[job.user] - 1)

    def unindex_kind(self, job: Job) -> None:
        kind = kind_of(job)
        lines, lane = self.kinds[kind], (job.group, job.user)
        remove_sorted(lines[lane], (job.order, job.id))
        if not lines[lane]:
            del lines[lane]
            if not lines:
                del self.kinds[kind]

    def reindex(self, old: Job, new: Job) -> None:
        if all(getattr(old, name) == getattr(new, name) for name in INDEXED):       # the usual note: no index moves
            self.jobs[new.id] = new
            if new.status == PENDING and new.slurm_key is not None:
                self.handed[new.id] = new
            elif new.status != PENDING:
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
    """Jobs of one kind ask for the same; when the first of a kind cannot start, none can, but into a gap (Round.try_gap).

    (hundredths of a GPU, allowed indices, MiB, whether alone, expected time up to which power of two; -1: not said,
    the only node, those that cannot run it)
    """
    expected = -1 if job.expected_time is None else int(job.expected_time).bit_length()
    unfit = tuple(node for node, _ in job.unfit) if job.unfit else ()
    return round(job.gpus * 100), job.gpu_ids, job.gpu_mem_mib, job.is_alone, expected, job.only_node, unfit


def list_shares(job: Job) -> list[int]:
    """What a job takes of each of its GPUs, in hundredths and in the order of gpu_indices: `[100, 50]` for 1.5."""
    whole, part = divmod(round(job.gpus * 100), 100)
    return [100] * whole + ([100 if job.is_alone else part] if part else [])


def apply(state: State, change: Change) -> Callable[[], None]:
    """Make one change in State; return what undoes it.  The order of `running` may be another afterwards.

    Raises: KeyError, when it does not fit (a damaged journal); then nothing has changed.
    """
    make: Callable[[State, Any], Callable[[], None]] = MAKERS[type(change)]
    return make(state, change)


def make_job_added(state: State, change: JobAdded) -> Callable[[], None]:
    number, job = state.next_number, change.job
    if job.id in state.jobs:
        raise KeyError(job.id)
    state.index(job)

    def undo() -> None:
        state.unindex(job)
        state.next_number = number
    return undo


def make_job_changed(state: State, change: JobChanged) -> Callable[[], None]:
    number, old = state.next_number, state.jobs[change.id]
    refuse_unknown(change.facts, Job.__slots__)  # type: ignore[attr-defined]
    new = replace(old, **change.facts)
    state.reindex(old, new)

    def undo() -> None:
        state.reindex(new, old)
        state.next_number = number
    return undo


def make_jobs_removed(state: State, change: JobsRemoved) -> Callable[[], None]:
    gone = [state.jobs[job_id] for job_id in dict.fromkeys(change.ids)]
    finished = dict(state.finished)
    for job in gone:
        state.unindex(job)

    def undo() -> None:
        for job in gone:
            state.index(job)
        state.finished = finished
    return undo


def make_environment_added(state: State, change: EnvironmentAdded) -> Callable[[], None]:
    is_new = change.digest not in state.environments
    state.environments.setdefault(change.digest, change.variables)

    def undo() -> None:
        if is_new:
            del state.environments[change.digest]
    return undo


def make_group_changed(state: State, change: GroupChanged) -> Callable[[], None]:
    name = change.group.name
    former = state.groups.get(name)
    state.groups[name] = change.group

    def undo() -> None:
        if former:
            state.groups[name] = former
        else:
            del state.groups[name]
    return undo


def make_line_seen(state: State, change: LineSeen) -> Callable[[], None]:
    count = state.seen.get(change.digest, 0)
    set_count(state.seen, change.digest, change.count)
    return lambda: set_count(state.seen, change.digest, count)


def make_state_changed(state: State, change: StateChanged) -> Callable[[], None]:
    refuse_unknown(change.facts, STATE_FACTS)
    before = {name: getattr(state, name) for name in change.facts}
    set_facts(state, change.facts)
    return lambda: set_facts(state, before)


MAKERS: Mapping[type, Any] = {
    JobAdded: make_job_added, JobChanged: make_job_changed, JobsRemoved: make_jobs_removed, EnvironmentAdded: make_environment_added,
    GroupChanged: make_group_changed, LineSeen: make_line_seen, StateChanged: make_state_changed}


def set_count(counts: dict[str, int], key: str, count: int) -> None:
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)


def set_facts(state: State, facts: Mapping[str, Any]) -> None:
    for name, fact in facts.items():
        setattr(state, name, fact)


def refuse_unknown(facts: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in facts:
        if name not in known:
            raise KeyError(name)


def change_status(job: Job, status: str, now: float, **facts: Any) -> JobChanged:
    """The change that brings `job` into `status`, with the facts learned on the way.  Raises: conflict."""
    if status not in TRANSITIONS.get(job.status, ()):
        raise NexusError("conflict", f"job {job.id} is {job.status} and cannot become {status}",
                         hint=f"see what it did: nexus show {job.id}")
    return JobChanged(job.id, {"status": status, "status_history": (*job.status_history, (status, now)), **facts})


def end_job(state: State, job: Job, status: str, now: float, **facts: Any) -> Changes:
    """The changes that bring a job to its end, and with it those that come after it: one wait less, or their end too.

    Raises: conflict.
    """
    yield change_status(job, status, now, **facts)
    ended = [job.id]
    while ended:
        parent = state.jobs[ended.pop()]
        for child in [state.jobs[child_id] for child_id in state.dependents.get(parent.id, ())]:
            if parent.status == COMPLETED:
                yield JobChanged(child.id, {"unmet": tuple(other for other in child.unmet if other != parent.id)})
            else:
                yield change_status(child, CANCELLED, now, finished_at=now, cause="dependency", cause_line=describe_parent(parent))
                ended.append(child.id)


def choose_trimmed(state: State, limit: int) -> list[Job]:
    """The finished jobs that are no longer kept: the oldest of whoever has the most, so that one's thousand end nobody else's.

    One that another nexus has sent stays until that has all of it: sent once more, it would run a second time.
    """
    left, losses = dict(state.finished_by_user), dict.fromkeys(state.finished_by_user, 0)
    excess = len(state.finished) - limit
    for _ in range(excess):
        user = max(left, key=lambda name: left[name])
        left[user] -= 1
        losses[user] += 1
    gone: list[Job] = []
    for job in state.finished.values():
        if len(gone) >= excess:
            break
        if losses[job.user] and (job.head is None or job.is_collected):
            losses[job.user] -= 1
            gone.append(job)
    return gone


def describe_parent(parent: Job) -> str:
    cause = f" ({parent.cause}{f' {parent.exit_code}' if parent.cause == 'exit' else ''})" if parent.cause else ""
    return f"it was to come after job {parent.id}, which {'was ' if parent.status == CANCELLED else ''}{parent.status}{cause}"


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
    if position == len(others):                     # behind all: the last one's place and one more
        return JobChanged(job.id, {"order": (*before[:4], before[4] + 1 if len(before) > 4 else 0)})
    return JobChanged(job.id, {"order": order_between(before, others[position][0])})


def was_moved(job: Job) -> bool:
    """Whether its place in the queue is another than its turn gave it."""
    return job.order[0] != 0 or len(job.order) > 4


def next_place(state: State, priority: int, user: str) -> dict[str, Any]:
    """The fields that put a new job behind all others of its priority and user."""
    number = state.next_number
    return {"number": number, "order": (0, priority, next_turn(state, priority, user), number), "priority": priority}


def next_turn(state: State, priority: int, user: str) -> int:
    """Users of one priority take turns: each one's first jobs come before anybody's second ones.

    Who comes later begins at the turn that was started last, and neither makes up for when he had nothing to run, nor
    waits for what others have queued.
    """
    own = state.turns.get((priority, user))
    last = own[-1] if own else state.started_turns.get((priority, user), 0)
    return max(last + 1, current_turn(state, priority))


def current_turn(state: State, priority: int) -> int:
    """The last turn that has started; where that is no longer known, the one before the first that waits."""
    first = min((turns[0] for (at, _), turns in state.turns.items() if at == priority), default=1)
    return max([turn for (at, _), turn in state.started_turns.items() if at == priority] + [first - 1])


def place_in_priority(state: State, job: Job, priority: int) -> tuple[int, ...]:
    """The order of a pending job that gets another priority: among its user's jobs there it stands as it was submitted."""
    others = [(other.number, order[2]) for order, other_id in state.order if order[:2] == (0, priority)
              for other in (state.jobs[other_id],) if other.user == job.user and other.id != job.id]
    earlier = [turn for number, turn in others if number < job.number]
    later = [turn for number, turn in others if number > job.number]
    turn = min(max(earlier) + 1 if earlier else min(later) - 1, *later) if later else next_turn(state, priority, job.user)
    if turn in earlier or turn in later or turn < max(1, current_turn(state, priority)):        # no two of a user's jobs share one
        turn = next_turn(state, priority, job.user)
    return 0, priority, turn, job.number


# What a submission may say.  The command line sends `environment` (the whole of it); others only `env`, put on top of
# the service's own.


@value
class Submission:
    """A job as asked for, checked."""
    command: str
    id: str | None = None
    name: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = {}
    environment: Mapping[str, str] | None = None
    gpus: float | None = None
    gpu_ids: tuple[int, ...] | None = None
    gpu_mem_mib: int | None = None
    node: str | None = None                     # the only machine it may run on
    priority: int = 1
    group: str | None = None
    max_concurrent: int | None = None           # of its group
    after: tuple[str, ...] = ()
    retries: int | None = None
    timeout_seconds: float | None = None
    expected_time: float | None = None
    conda: str | None = None
    llm: str | None = None                      # the model whose share of a GPU llm_config.json tells
    cuda_arg: bool = False
    unique: bool = False
    snapshot: str | None = None
    snapshot_repo: str | None = None
    code: str | None = None                     # like labels, of POST /api/submit alone
    labels: tuple[tuple[str, str], ...] = ()
    tty: bool = False
    umask: int | None = None
    limits: tuple[tuple[str, int, int], ...] = ()


SUBMISSION_FIELDS: Sequence[str] = Submission.__slots__  # type: ignore[attr-defined]


def parse_submission(data: Any) -> Submission:
    """Raises: usage, naming the first fault."""
    if not isinstance(data, dict):
        refuse("a job must be a JSON object")
    if "command" not in data:
        refuse("command is missing")
    for key in data:
        if key not in SUBMISSION_PARSERS:
            raise NexusError("usage", f"'{format_line(str(key), 40)}' is not a key of a job",
                             hint=suggest(key, SUBMISSION_PARSERS) or f"the keys are {', '.join(SUBMISSION_PARSERS)}")
    given = {key: SUBMISSION_PARSERS[key](fact) for key, fact in data.items() if fact is not None or key == "command"}
    submission = Submission(**given)
    check_gpus(submission.gpus, submission)
    if submission.max_concurrent is not None and submission.group is None:
        refuse("max_concurrent is for a group, and this job has none", hint="name one: --group NAME")
    if (submission.snapshot is None) != (submission.snapshot_repo is None):
        refuse("snapshot and snapshot_repo come together")
    if submission.snapshot_repo and not ((submission.cwd or "") + "/").startswith(submission.snapshot_repo.rstrip("/") + "/"):
        refuse("snapshot_repo must be a folder that cwd is in")
    if submission.snapshot_repo and ".." in (submission.cwd or "").split("/") + submission.snapshot_repo.split("/"):
        refuse("cwd and snapshot_repo must be paths without ..")
    return submission


def check_gpus(gpus: float | None, submission: Submission) -> None:
    """What is asked for must go together.  `gpus` None: not known yet.  Raises: usage."""
    for key in ("gpu_ids", "gpu_mem_mib", "cuda_arg"):
        if gpus == 0 and getattr(submission, key):
            refuse(f"{key} is for jobs with GPUs, and this one has gpus 0", hint="leave one of the two out")
    if gpus is not None and submission.gpu_ids is not None and gpus > len(submission.gpu_ids):
        refuse(f"{format_gpus(gpus)} asked for, but only {len(submission.gpu_ids)} named in gpu_ids", hint="name more, or ask for fewer")


def format_gpus(gpus: float) -> str:
    """`1 GPU`, `0.5 GPU`, `2 GPUs`."""
    return f"{format_number(gpus)} GPU" + ("s" if gpus > 1 else "")


def refuse(message: str, hint: str = "see nexus help add") -> NoReturn:
    raise NexusError("usage", message, hint)


def format_json_fault(given: object) -> str:
    try:
        return format_line(json.dumps(given), 60)
    except RecursionError:              # it could just be read
        return "something so deep"


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


def parse_environment(given: object, key: str) -> dict[str, str]:
    if not isinstance(given, dict):
        refuse(f'{key} must be an object of texts, like {{"WANDB_MODE": "disabled"}}')
    for name, text in given.items():
        if not is_text(name, 4096) or not name or "=" in name:
            refuse(f"{key}: {format_json_fault(name)} cannot be the name of a variable")
        if not is_text(text, MAX_ARGUMENT_BYTES - len(name) - 1):
            refuse(f"{key}: the value of {format_line(name, 60)} must be a text without NUL of at most {MAX_ARGUMENT_BYTES} bytes")
    return given


def parse_job_id(given: object) -> str:
    if not isinstance(given, str) or not is_job_id(given):
        refuse("id must be 3 or 4 letters of the base58 alphabet (no digits, no I, O, l)", hint="leave it out, and one is chosen")
    return given


def parse_gpus_asked(given: object) -> float:
    """A whole number of GPUs, or one with two decimals."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 1024 or (
            abs(given * 100 - round(given * 100)) > 1e-6):
        refuse(f"gpus must be a number from 0 to 1024 with at most two decimals, not {format_json_fault(given)}",
               hint="1 is a whole GPU, 0.5 half of one, 0 none")
    return int(given) if given == int(given) else round(given, 2)


def parse_gpu_ids(given: object) -> tuple[int, ...]:
    if isinstance(given, str):
        return parse_indices(given)
    if isinstance(given, list) and given and all(is_whole(item, 0, 9999) for item in given):
        return tuple(sorted(set(given)))
    refuse(f"gpu_ids must be a list of GPU indices like [0, 1], not {format_json_fault(given)}")


def parse_after(given: object) -> tuple[str, ...]:
    ids = given.split(",") if isinstance(given, str) else given
    if not isinstance(ids, list) or not all(isinstance(item, str) and is_job_id(item) for item in ids):
        refuse(f"after must be a list of job ids like [\"abc\"], not {format_json_fault(given)}")
    return tuple(dict.fromkeys(ids))


def whole_parser(key: str, least: int, most: int) -> Callable[[object], int]:
    def parse(given: object) -> int:
        if not is_whole(given, least, most):
            refuse(f"{key} must be a whole number from {least} to {most}, not {format_json_fault(given)}")
        return given  # type: ignore[return-value]
    return parse


def seconds_parser(key: str, least: float) -> Callable[[object], float]:
    def parse(given: object) -> float:
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not least <= given <= 31536000:
            refuse(f"{key} must be a number of seconds from {least:g} to 31536000, not {format_json_fault(given)}")
        return given
    return parse


def flag_parser(key: str) -> Callable[[object], bool]:
    def parse(given: object) -> bool:
        if not isinstance(given, bool):
            refuse(f"{key} must be true or false, not {format_json_fault(given)}")
        return given
    return parse


def line_parser(key: str, pattern: str = "") -> Callable[[object], str]:
    """One line of text, of a form if `pattern` is given."""
    def parse(given: object) -> str:
        if not isinstance(given, str) or not is_text(given, 200) or not given.strip() or CONTROL.search(given):
            refuse(f"{key} must be one line of at most 200 bytes, not {format_json_fault(given)}")
        if pattern and not re.fullmatch(pattern, given):
            refuse(f"{key} cannot be {format_json_fault(given)}")
        return given
    return parse


def path_parser(key: str) -> Callable[[object], str]:
    def parse(given: object) -> str:
        if not isinstance(given, str) or not is_text(given, 4095) or not given.startswith("/"):
            refuse(f"{key} must be an absolute path, not {format_json_fault(given)}")
        return given
    return parse


def parse_priority(given: object) -> int:
    """`high`, `normal`, `low`, or a number: lower runs first."""
    if isinstance(given, str) and given.lower() in PRIORITIES:
        return PRIORITIES[given.lower()]
    if isinstance(given, str) and re.fullmatch(r"-?\d{1,7}", given):
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or abs(given) > MAX_PRIORITY:
        refuse(f"priority must be high, normal, low or a whole number (lower runs first), not {format_json_fault(given)}")
    return given


# What a nexus whose node this machine is asks of it

@value
class Order:
    """A job to be queued here for another nexus, once."""
    id: str
    attempt: int                                # which that is there
    user: str
    is_stopped: bool                            # it is not to begin any more: so that it never will
    path: str                                   # its submitter's PATH
    submission: Submission
    code: bytes | None                          # the script that came with it


@value
class Orders:
    head: str                                   # that nexus's service_id
    submit: tuple[Order, ...]
    stop: tuple[tuple[str, int], ...]           # (id here, attempt there)
    withdraw: tuple[tuple[str, int], ...]
    collected: tuple[tuple[str, int], ...]


@value
class SyncAsked:
    head: str
    since: int | None                           # the next event to be told of; None: everything
    logs: Mapping[str, tuple[int, int, int]]    # {id here: attempt there, bytes of stdout.log and stderr.log that it has}
    wait_seconds: float


def parse_orders(data: Any) -> Orders:
    """Raises: usage."""
    import base64

    def parse_keys(pairs: Any) -> tuple[tuple[str, int], ...]:
        return tuple((parse_job_id(job_id), whole_parser("attempt", 0, 2**53)(attempt)) for job_id, attempt in pairs)

    def parse_order(order: Any) -> Order:
        key, = parse_keys([(order["id"], order["attempt"])])
        code = order["code"]
        return Order(*key, line_parser("user")(order["user"]), flag_parser("is_stopped")(order["is_stopped"]),
                     parse_environment({"PATH": order["path"]}, "path")["PATH"], parse_submission({**order["job"], "id": order["id"]}),
                     None if code is None else base64.b64decode(code, validate=True))
    try:
        return Orders(line_parser("head")(data["head"]), tuple(map(parse_order, data["submit"])), parse_keys(data["stop"]),
                      parse_keys(data["withdraw"]), parse_keys(data["collected"]))
    except (KeyError, TypeError, ValueError) as error:
        refuse(f"these are no orders of a nexus: {error!r}", hint="")


def parse_sync(data: Any) -> SyncAsked:
    """Raises: usage."""
    parse_whole = whole_parser("a number", 0, 2**53)
    try:
        logs: dict[str, tuple[int, int, int]] = {}
        for job_id, (attempt, stdout, stderr) in data["logs"].items():
            logs[parse_job_id(job_id)] = parse_whole(attempt), parse_whole(stdout), parse_whole(stderr)
        return SyncAsked(line_parser("head")(data["head"]), None if data["since"] is None else parse_whole(data["since"]), logs,
                         min(60.0, seconds_parser("wait_seconds", 0)(data["wait_seconds"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        refuse(f"this is no question of a nexus: {error!r}", hint="")


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


SUBMISSION_PARSERS: Mapping[str, Callable[[Any], Any]] = {       # the keys of POST /queue
    "command": parse_command, "id": parse_job_id, "name": line_parser("name"), "cwd": path_parser("cwd"),
    "env": lambda given: parse_environment(given, "env"), "environment": lambda given: parse_environment(given, "environment"),
    "gpus": parse_gpus_asked, "gpu_ids": parse_gpu_ids, "gpu_mem_mib": whole_parser("gpu_mem_mib", 1, 100000000),
    "node": line_parser("node", NODE_PATTERNS["name"]),
    "priority": parse_priority, "group": line_parser("group"), "max_concurrent": whole_parser("max_concurrent", 1, 100000),
    "after": parse_after, "retries": whole_parser("retries", 0, 1000), "timeout_seconds": seconds_parser("timeout_seconds", 0),
    "expected_time": seconds_parser("expected_time", 0.001), "conda": line_parser("conda", "[^-].*"), "llm": line_parser("llm"),
    "cuda_arg": flag_parser("cuda_arg"), "unique": flag_parser("unique"), "snapshot": line_parser("snapshot", "[0-9a-f]{40,64}"),
    "snapshot_repo": path_parser("snapshot_repo"), "tty": flag_parser("tty"), "umask": whole_parser("umask", 0, 0o777),
    "limits": parse_limits}


# ==== 5. FORMATS ==== what is read from and written for other programs and the disk, as values
# Journal and snapshot lines, nvidia-smi's CSV, `screen -ls`, /proc/PID/stat, result files, the FIFO's lines, command
# files.  Nothing here opens anything.

SNAPSHOT_VERSION = 1
JOB_FIELDS: Mapping[str, Any] = {name: Job.DEFAULTS.get(name, ...) for name in Job.__slots__}  # type: ignore[attr-defined]


SHARED_TEXTS = ("status", "cwd", "user", "environment")         # alike in many jobs: kept once


def encode_job(job: Job) -> dict[str, Any]:
    """What differs from the defaults: a pending job in state.json takes some 300 bytes."""
    fields = {}
    for name, default in JOB_FIELDS.items():
        fact = getattr(job, name)
        if fact != default or name == "status":
            fields[name] = fact
    return fields


def decode_job(fields: Mapping[str, Any], texts: dict[str, str]) -> Job:
    """`texts` keeps what many jobs share once.  Raises: KeyError, TypeError or ValueError when it is no job of encode_job."""
    facts: dict[str, Any] = {name: freeze(fact) if isinstance(fact, list) else fact for name, fact in object_of(fields).items()}
    for name in SHARED_TEXTS:
        facts[name] = texts.setdefault(facts[name], facts[name])
    job = Job(**facts)
    if job.status not in STATUSES or not is_job_id(job.id) or not all(isinstance(n, int) for n in job.order):
        raise ValueError(job.id)
    return job


def load_json(text: str | bytes) -> Any:
    """Raises: ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def object_of(fact: Any) -> dict[str, Any]:
    if not isinstance(fact, dict):
        raise TypeError(f"{type(fact).__name__} where an object belongs")
    return fact


def whole_of(fact: Any) -> int:
    if not isinstance(fact, int):
        raise TypeError(f"{type(fact).__name__} where a whole number belongs")
    return fact


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
    elif isinstance(change, GroupChanged):
        body = {"group": encode_group(change.group)}
    elif isinstance(change, LineSeen):
        body = {"seen": change.digest, "count": change.count}
    else:
        body = {"state": change.facts}
    return encode_json({"seq": seq, **body}) + "\n"


def decode_change(line: str | bytes) -> tuple[int, Change]:
    """Raises: KeyError, TypeError or ValueError when it is no line of encode_change."""
    body = load_json(line)
    seq = body["seq"]
    if not isinstance(seq, int):
        raise TypeError("seq")
    if "job" in body:
        return seq, JobAdded(decode_job(body["job"], {}))
    if "id" in body:
        facts = {name: freeze(fact) for name, fact in object_of(body["set"]).items()}
        if facts.get("status", PENDING) not in STATUSES or not all(isinstance(n, int) for n in facts.get("order", ())):
            raise ValueError(body["id"])
        return seq, JobChanged(body["id"], facts)
    if "removed" in body:
        return seq, JobsRemoved(tuple(body["removed"]))
    if "digest" in body:
        return seq, EnvironmentAdded(body["digest"], dict(body["variables"]))
    if "group" in body:
        return seq, GroupChanged(decode_group(body["group"]))
    if "seen" in body:
        return seq, LineSeen(str(body["seen"]), whole_of(body["count"]))
    return seq, StateChanged({name: freeze(fact) for name, fact in object_of(body["state"]).items()})


def encode_group(group: Group) -> list[Any]:
    return [group.name, group.limit, group.hold, group.failures]


def decode_group(fields: Any) -> Group:
    """Raises: TypeError or ValueError when it is none of encode_group."""
    name, limit, hold, failures = fields
    return Group(str(name), whole_of(limit), None if hold is None else str(hold), whole_of(failures))


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
    groups: Sequence[Group] = ()
    seen: Mapping[str, int] = {}


def encode_snapshot(snapshot: Snapshot) -> Iterator[str]:
    """state.json, a piece for each job: encoding 100,000 at once would hold the interpreter for a second."""
    head = {"version": SNAPSHOT_VERSION, "seq": snapshot.seq, "host": snapshot.host, "machine_id": snapshot.machine_id,
            "service_id": snapshot.service_id, "next_number": snapshot.next_number, **snapshot.facts,
            "groups": [encode_group(group) for group in snapshot.groups], "seen": snapshot.seen}
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
    texts: dict[str, str] = {}
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
            jobs.append(decode_job(load_json(line.rstrip(",\n")), texts))
        body = load_json("".join(head))
    except (ValueError, TypeError):
        if not isinstance(lines, list):
            raise
        body, jobs = load_json("".join(lines)), []
    jobs += [decode_job(fields, texts) for fields in body["jobs"]]
    if body["version"] != SNAPSHOT_VERSION or not isinstance(body["seq"], int):
        raise ValueError(f"version {body['version']}")
    facts = {name: freeze(body.get(name, default) if name in ("pause_reasons", "hooks_since", "nodes") else body[name])   # which came later
             for name, default in STATE_FACTS.items()}
    if not isinstance(facts["paused"], bool) or not isinstance(facts["paused_gpus"], tuple):        # others may edit these
        raise ValueError("paused must be true or false, paused_gpus a list")
    return Snapshot(body["seq"], body["host"], body["machine_id"], body["service_id"], body["next_number"], facts, body["environments"],
                    jobs, [decode_group(fields) for fields in body.get("groups", ())], {**body.get("seen", {})})


# What a nexus tells another of its GPUs

def encode_value(item: Any) -> dict[str, Any]:
    """{field: fact} of a value."""
    return {name: getattr(item, name) for name in item.__slots__}


def encode_gpu(gpu: Gpu) -> dict[str, Any]:
    return {**encode_value(gpu), "processes": [[p.pid, p.memory_mib, p.job_id, p.user, p.name] for p in gpu.processes]}


def decode_gpu(fields: Mapping[str, Any]) -> Gpu:
    """Raises: TypeError, when it is none of encode_gpu."""
    processes = tuple(GpuProcess(*row) for row in fields["processes"])
    return Gpu(**{**{name: freeze(fact) for name, fact in fields.items()}, "processes": processes})


# nvidia-smi.  Everything, errors too, is on its stdout; a row counts only if it has as many cells as were asked for.

GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu", "power.draw",
              "mig.mode.current")
BASIC_GPU_FIELDS = GPU_FIELDS[:5]               # what every driver knows; one unknown field voids the query
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
FIELD_ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "used_gpu_memory": "used_memory"}
UNKNOWN_ERROR = "[Unknown Error]"
FAULT_CELLS = {"[GPU is lost]": "GPU is lost", "[GPU requires reset]": "GPU requires reset", UNKNOWN_ERROR: "Unknown Error"}
NEEDED_FIELDS = ("index", "uuid", "memory.total", "memory.used")       # in any other, an unknown error is but a sensor's


def parse_csv_rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a `--query-…=FIELDS` answer as {field: cell}, and the lines that are none (messages)."""
    names = [FIELD_ALIASES.get(field, field) for field in fields]
    rows: list[dict[str, str]] = []
    messages: list[str] = []
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


def is_number(text: str) -> bool:
    """Digits that int() takes: no `²`, and not thousands of them."""
    return text.isascii() and text.isdigit() and len(text) < 20


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
        fault = next((FAULT_CELLS[cell] for name, cell in row.items()
                      if cell in FAULT_CELLS and (cell != UNKNOWN_ERROR or name in NEEDED_FIELDS)), None)
        uuid = row.get("uuid", "")
        index = int(row["index"]) if is_number(row.get("index", "")) else known.get(uuid)
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
    found = re.finditer(r"^GPU (\d{1,4}): (.*) \(UUID: ([\w.-]+)\)\s*$", text, re.MULTILINE)
    return [(int(match[1]), match[3], clean_gpu_name(match[2])) for match in found]


def parse_compute_apps(text: str, fields: Sequence[str] = APP_FIELDS) -> dict[str, tuple[GpuProcess, ...]]:
    """{GPU uuid: its compute processes}."""
    found: dict[str, list[GpuProcess]] = {}
    for row in parse_csv_rows(text, fields)[0]:
        if is_number(row["pid"]):
            found.setdefault(row["uuid"], []).append(GpuProcess(int(row["pid"]), parse_reading(row["used_memory"])))
    return {uuid: tuple(processes) for uuid, processes in found.items()}


def describe_smi_failure(exit_code: int, text: str) -> str:
    """One sentence for a run of nvidia-smi that failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if exit_code < 0:
        return f"nvidia-smi was ended by signal {-exit_code}"
    return f"nvidia-smi: {lines[0] if lines else 'no output'} (exit code {exit_code})"


# Tokens, as tokens.json keeps them

MIN_TOKEN_LENGTH = 12
TOKENS_KEPT = 1000                      # of those that are over, so many are still told from unknown ones


def hash_text(text: str) -> str:
    import hashlib
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse_tokens(text: str) -> tuple[Token, ...]:
    """Raises: ValueError."""
    def read(row: Mapping[str, Any]) -> Token:
        ends = {name: parse_time(row[name]) if row.get(name) else None for name in ("expires_at", "revoked_at", "used_at")}
        return Token(str(row["user"]), str(row["sha256"]), parse_time(row["created_at"]), **ends)

    try:
        return tuple(read(row) for row in json.loads(text)["tokens"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{error!r}") from None


def format_tokens(tokens: Iterable[Token]) -> str:
    return json.dumps({"tokens": [token_json(token) for token in tokens]}, indent=1) + "\n"


def token_json(token: Token) -> dict[str, Any]:
    return {"user": token.user, "sha256": token.sha256, "created_at": format_time(token.created_at),
            "expires_at": format_time(token.expires_at), "revoked_at": format_time(token.revoked_at), "used_at": format_time(token.used_at)}


def describe_token_end(token: Token, now: float) -> str:
    """Why a token is no longer good; "" when it is."""
    if token.revoked_at is not None:
        return f"revoked {format_time(token.revoked_at)}"
    return f"expired {format_time(token.expires_at)}" if token.expires_at is not None and token.expires_at <= now else ""


def find_token(tokens: Iterable[Token], text: str) -> Token | None:
    """Takes as long whichever it is, and when it is none."""
    import hmac
    found, digest = None, hash_text(text)
    for token in tokens:
        if hmac.compare_digest(token.sha256, digest):
            found = token
    return found


def add_token(tokens: Sequence[Token], user: str, text: str, expires_at: float | None, now: float) -> tuple[Token, ...]:
    """Raises: usage; conflict, when the token is somebody's."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.@+-]{0,63}", user, re.ASCII):
        refuse(f"'{format_line(user, 80)}' cannot be a user's name", hint="up to 64 letters, digits and _ . @ + -, like bob or bob@lab.org")
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        refuse("a token must be of visible ASCII characters, without blanks", hint="leave it out, and one is made up")
    if not MIN_TOKEN_LENGTH <= len(text) <= 256:
        refuse(f"the token has {len(text)} characters; it must have {MIN_TOKEN_LENGTH} to 256", hint="leave it out, and one is made up")
    known = find_token(tokens, text)
    if known and not describe_token_end(known, now):
        raise NexusError("conflict", f"this token is {known.user}'s already", hint="leave it out, and one is made up")
    over = [token for token in tokens if token != known and describe_token_end(token, now)]
    good = [token for token in tokens if not describe_token_end(token, now)]
    return (*over[-TOKENS_KEPT:], *good, Token(user, hash_text(text), now, expires_at))


def revoke_tokens(tokens: Sequence[Token], given: str, now: float) -> tuple[Token, ...]:
    """All of a user's; or one, given as it is or by its hash's beginning.  Raises: not_found."""
    digest = hash_text(given)
    is_hash = re.fullmatch("[0-9a-f]{12,64}", given) is not None
    revoked = [token for token in tokens if given == token.user or digest == token.sha256 or (is_hash and token.sha256.startswith(given))]
    if not [token for token in revoked if token.revoked_at is None]:
        users = sorted({token.user for token in tokens if token.revoked_at is None})
        raise NexusError("not_found", "this is no token, and no user with one", hint=suggest(given, users) or "nexus token list")
    return tuple(replace(token, revoked_at=now) if token in revoked and token.revoked_at is None else token for token in tokens)


# POST /api/submit: a form with a script and flat YAML

MAX_FORM_PARTS = 16
MAX_PART_HEAD_BYTES = 4096
FORM_FIELDS = {"code": 5 * 2**20, "config_file": 64 * 2**10}        # name: how many bytes at most
FORM_HINT = 'curl -X POST http://HOST:PORT/api/submit -F "code=@my_script.py" -F "config_file=@config.yaml"'
HEADER_PARAMETER = r';[ \t]*([^\s;="]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))[ \t]*'


@value
class FormPart:
    """One field.  Under which name its file lay at the sender's is not kept: it is nobody's path here."""
    name: str
    content: bytes


def refuse_form(why: str) -> NoReturn:
    raise NexusError("usage", f"the form cannot be read: {why}", FORM_HINT)


def parse_form(body: bytes, content_type: str) -> list[FormPart]:
    """The fields of a multipart/form-data body, byte for byte as they were sent.  Source: RFC 2046 (5.1), RFC 7578.

    Raises: usage; unsupported_media_type.  The email package would also end a field at its boundary after a bare newline, and takes
    seconds for 5 MiB of short lines.
    """
    boundary = parse_boundary(content_type)
    delimiter = b"\r\n--" + boundary
    if not body.startswith(delimiter[2:]):
        refuse_form("it does not begin with the boundary that its Content-Type names")
    parts: list[FormPart] = []
    at = len(delimiter) - 2
    while not body.startswith(b"--", at):
        if len(parts) == MAX_FORM_PARTS:
            refuse_form(f"it has more than {MAX_FORM_PARTS} fields")
        padding = re.compile(rb"[ \t]*\r\n").match(body, at)
        if not padding:
            refuse_form(f"a line begins like the boundary after {format_count(len(parts), 'field')}")
        start, end = padding.end(), body.find(delimiter, padding.end())
        if end < 0:
            refuse_form(f"it ends within its field number {len(parts) + 1}: the boundary is missing there")
        head_end = body.find(b"\r\n\r\n", start, min(end, start + MAX_PART_HEAD_BYTES))
        if head_end < 0:
            refuse_form(f"its field number {len(parts) + 1} has no headers, or over {MAX_PART_HEAD_BYTES} bytes of them")
        name = parse_part_head(body[start:head_end].decode("latin-1"))
        if any(part.name == name for part in parts):
            refuse_form(f"it has two fields '{format_line(name, 40)}'")
        parts.append(FormPart(name, body[head_end + 4:end]))
        at = end + len(delimiter)
    if body[at + 2:].strip():
        refuse_form("something follows its last boundary")
    return parts


def parse_boundary(content_type: str) -> bytes:
    """Raises: usage; unsupported_media_type."""
    kind, semicolon, rest = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise NexusError("unsupported_media_type", f"the body must be multipart/form-data, not {format_line(kind, 60) or 'nothing'}",
                         FORM_HINT)
    boundary = parse_header_parameters(semicolon + rest).get("boundary", "")
    if not re.fullmatch(r"[\x20-\x7e]{0,69}[\x21-\x7e]", boundary):
        refuse_form("its Content-Type names no boundary of 1 to 70 characters")
    return boundary.encode()


def parse_header_parameters(text: str) -> dict[str, str]:
    """{name: text} of `; name="code"; filename="a.py"`.  Raises: usage."""
    found: dict[str, str] = {}
    at, text = 0, text.rstrip(" \t")
    while at < len(text):
        match = re.compile(HEADER_PARAMETER).match(text, at)
        if not match or match[1].lower() in found:
            refuse_form(f"'{format_line(text[at:], 60)}' in a header is not like ; name=\"code\", or is there twice")
        found[match[1].lower()] = match[3] if match[2] is None else re.sub(r"\\(.)", r"\1", match[2])
        at = match.end()
    return found


def parse_part_head(text: str) -> str:
    """The name of the field whose headers these are.  Raises: usage."""
    headers: dict[str, str] = {}
    for line in text.split("\r\n"):
        match = re.fullmatch(r"([A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)", line)
        if not match or match[1].lower() in headers:
            refuse_form(f"'{format_line(line, 60)}' is no header of a field, or is there twice")
        headers[match[1].lower()] = match[2].strip(" \t")
    kind, semicolon, rest = headers.get("content-disposition", "").partition(";")
    name = parse_header_parameters(semicolon + rest).get("name", "")
    if kind.strip().lower() != "form-data" or not name:
        refuse_form('a field must have Content-Disposition: form-data; name="..."')
    if headers.get("content-type", "").lower().startswith("multipart/"):
        refuse_form(f"its field '{format_line(name, 40)}' is a form within the form")
    if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        refuse_form(f"its field '{format_line(name, 40)}' is encoded; send it as it is")
    return name


def parse_submit_form(body: bytes, content_type: str) -> tuple[bytes, dict[str, Any]]:
    """The script, and what config_file says.  Raises: usage, too_large, unsupported_media_type."""
    fields = {part.name: part.content for part in parse_form(body, content_type)}
    for name, content in fields.items():
        if name not in FORM_FIELDS:
            raise NexusError("usage", f"'{format_line(name, 40)}' is not a field of this form",
                             suggest(name, FORM_FIELDS) or f"its fields are {' and '.join(FORM_FIELDS)}")
        if len(content) > FORM_FIELDS[name]:
            raise NexusError("too_large", f"{name} has {len(content)} bytes; at most {FORM_FIELDS[name]} are taken",
                             "let the script read what is large from a file" if name == "code" else "")
    for name in FORM_FIELDS:
        if not fields.get(name, b"").strip():
            raise NexusError("usage", f"{name} is {'empty' if name in fields else 'missing'}", FORM_HINT)
    try:
        text = fields["config_file"].decode("utf-8")
    except UnicodeDecodeError as error:
        raise NexusError("usage", f"config_file is not UTF-8: {error.reason} at byte {error.start}") from None
    return fields["code"], parse_submit_config(text)


def name_parser(key: str) -> Callable[[object], str]:
    """One line of text; digits may stand without quotes."""
    def parse(given: object) -> str:
        if isinstance(given, bool) or not isinstance(given, (str, int)):
            refuse(f"{key} must be a text, not {format_json_fault(given)}", hint=f'put it in quotes: {key}: "..."')
        return line_parser(key)(str(given))
    return parse


def parse_bearer(given: object) -> str:
    """A fault does not repeat it: it is a secret, of somebody."""
    if isinstance(given, bool) or not isinstance(given, (str, int)):
        refuse("token must be a text", hint='put it in quotes: token: "..."')
    return str(given)


SUBMIT_PARSERS: Mapping[str, Callable[[Any], Any]] = {           # the keys of config_file
    "competition_id": name_parser("competition_id"), "project_id": name_parser("project_id"), "user_id": name_parser("user_id"),
    "expected_time": SUBMISSION_PARSERS["expected_time"], "token": parse_bearer,
    "gpus": SUBMISSION_PARSERS["gpus"], "name": name_parser("name"), "priority": SUBMISSION_PARSERS["priority"]}


def parse_submit_config(text: str) -> dict[str, Any]:
    """What config_file says; what it leaves empty is not in it.  Raises: usage, naming the line."""
    made: dict[str, Any] = {}
    for key, (number, given) in parse_flat_yaml(text).items():
        try:
            if key not in SUBMIT_PARSERS:
                refuse(f"'{format_line(key, 40)}' is not a key",
                       hint=suggest(key, SUBMIT_PARSERS) or f"the keys are {', '.join(SUBMIT_PARSERS)}")
            if given is not None:
                made[key] = SUBMIT_PARSERS[key](given)
        except NexusError as error:
            hint = error.hint if not error.hint.startswith("see nexus") else YAML_HINT
            raise NexusError(error.kind, f"config_file, line {number}: {error.message}", hint) from None
    return made


YAML_HINT = 'config_file takes lines like expected_time: 10 or user_id: "bob", and # comments'
YAML_WORDS: Mapping[str, Any] = {"": None, "~": None, "null": None, "Null": None, "NULL": None, "true": True, "True": True, "TRUE": True,
                                 "false": False, "False": False, "FALSE": False}
YAML_ESCAPES = {"0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b", " ": " ",
                '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"}
YAML_NESTED = {"[": "a list", "{": "a mapping", "|": "a block of text", ">": "a block of text", "&": "an anchor", "*": "an alias",
               "!": "a tag"}
YAML_UNSEEN = "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"    # some take the end of a line for it


def parse_flat_yaml(text: str) -> dict[str, tuple[int, Any]]:
    """{key: (number of its line, text or number or truth or None)} of YAML that is `key: value` lines and no more.

    What it takes means the same to any reader of YAML 1.2; digits such as 007, which they read as numbers, come as floats, so that
    nobody takes them for the text they were.  Raises: usage, naming the line.
    """
    found: dict[str, tuple[int, Any]] = {}
    is_begun = is_over = False
    for number, line in enumerate(re.split(r"\r\n|[\r\n]", text[1:] if text.startswith("\ufeff") else text), 1):
        try:
            line = line.rstrip(" \t")
            if not line or line.lstrip(" \t").startswith("#"):
                continue
            is_mark = re.fullmatch(r"(---|\.\.\.)(?:[ \t]+#.*)?", line)
            if is_over or (is_mark and is_mark[1] == "---" and is_begun):
                refuse("there is one document only, and it is over here")
            is_begun, is_over = True, is_mark is not None and is_mark[1] == "..."
            if not is_mark:
                key, given = parse_yaml_line(line)
                if key in found:
                    refuse(f"{key} is there already, in line {found[key][0]}")
                found[key] = number, given
        except NexusError as error:
            raise NexusError(error.kind, f"config_file, line {number}: {error.message}", YAML_HINT) from None
    return found


def parse_yaml_line(line: str) -> tuple[str, Any]:
    """Raises: usage."""
    if re.search(YAML_UNSEEN, line):
        refuse("it holds a character that may not be there as it is")
    if line[0] in " \t":
        refuse("it is indented, and nothing may be nested")
    match = re.fullmatch(r"([A-Za-z_][\w.-]*)[ \t]*:(?:[ \t]+(.*))?", line)
    if not match:
        refuse(f"'{format_line(line, 40)}' is a list, and nothing may be nested" if re.match(r"-(\s|$)", line) else
               f"'{format_line(line, 40)}' is not like key: value")
    return match[1], parse_yaml_value(match[2] or "")


def parse_yaml_value(text: str) -> Any:
    """Raises: usage."""
    if text[:1] in ('"', "'"):
        return parse_yaml_quoted(text)
    text = re.split(r"(?:^|[ \t])#", text, maxsplit=1)[0].rstrip(" \t")
    if text[:1] in YAML_NESTED:
        refuse(f"{YAML_NESTED[text[0]]} is not taken; a text that begins with {text[0]} stands in quotes")
    if re.match(r"[],}%@`]|[-?:](\s|$)|0[xo]|[-+]?\.(inf|nan)", text, re.IGNORECASE) or re.search(r":(\s|$)", text):
        refuse("a text with what means something else in YAML stands in quotes")
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text):
        return float(text)
    return text


def parse_yaml_quoted(text: str) -> str:
    """Raises: usage."""
    match = re.fullmatch(r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^']|'')*)')(?:[ \t]+#.*)?""", text)
    if not match:
        refuse(f"its {text[0]} must end on the same line, with nothing but a comment behind it")
    if match[1] is None:
        return match[2].replace("''", "'")
    return re.sub(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", lambda escape: unescape_yaml(escape[1]), match[1])


def unescape_yaml(escape: str) -> str:
    """Raises: usage."""
    if len(escape) == 1 and escape in YAML_ESCAPES:
        return YAML_ESCAPES[escape]
    code = int(escape[1:], 16) if len(escape) > 1 else -1
    if code < 0 or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        refuse(f"there is no \\{format_line(escape, 10)} in YAML")
    return chr(code)


# /proc, screen, the runner's files

PF_KTHREAD = 0x00200000         # source: include/linux/sched.h


@value
class Process:
    """Who a process is and whose child.  pid and started together name one process of this boot, for ever."""
    pid: int
    started: int                # clock ticks since boot
    parent: int
    session: int
    state: str                  # R, S, D, Z, T ...
    env_start: int              # where its environment lies; another after each exec, 0 in the middle of one
    is_kernel: bool = False     # a thread of the kernel's own


def parse_proc_stat(text: str) -> Process:
    """Of /proc/PID/stat.  The name, in parentheses, may hold blanks and parentheses.  Source: proc(5)."""
    pid, _, rest = text.partition(" ")
    cells = rest[rest.rindex(")") + 2:].split()
    return Process(int(pid), int(cells[19]), int(cells[1]), int(cells[3]), cells[0], int(cells[47]), bool(int(cells[6]) & PF_KTHREAD))


def parse_screen_list(text: str) -> list[tuple[int, str, str]]:
    """(pid, name, `Detached` or the like) of `screen -ls`; its date column comes and goes with version and locale."""
    sessions = []
    for line in text.splitlines():
        cells = line.split("\t")
        match = re.fullmatch(r"(\d{1,10})\.(.+)", cells[1]) if line.startswith("\t") and len(cells) > 2 else None
        if match:
            sessions.append((int(match[1]), match[2], cells[-1].strip("()")))
    return sessions


@value
class Result:
    """How an attempt ended, from its result file or its word to the service."""
    exit_code: int | None
    finished_at: float | None = None            # None: now
    runtime_seconds: float | None = None
    cause: str | None = None                    # `launch`, when the command could not be started; `bounce`, when a GPU was taken
    cause_line: str | None = None
    may_pass: bool = False                      # of a launch: it was the machine that could not, and may be able to soon


def parse_result(text: str) -> Result:
    """Raises: ValueError or TypeError when it is no result file."""
    body = load_json(text)
    if not isinstance(body, dict) or not {"exit_code", "finished_at", "runtime_seconds"} <= body.keys():
        raise ValueError("no result")
    code = body["exit_code"]
    if code is not None and not is_whole(code, 0, 255):
        raise ValueError("exit_code")
    return Result(code, float(body["finished_at"]), float(body["runtime_seconds"]), body.get("cause"), body.get("cause_line"))


@value
class Saying:
    """A line that a runner said: `start ID ATTEMPT PID STARTED`, `end ID ATTEMPT CODE RUNTIME_CS`, `bounce ID ATTEMPT WHY`
    (somebody else has the GPU) or `fail ID ATTEMPT WHY`.
    """
    verb: str
    job_id: str
    attempt: int
    words: tuple[str, ...]


def parse_saying(line: str) -> Saying | None:
    words = line.split()
    if len(words) < 3 or words[0] not in ("start", "end", "bounce", "fail") or not is_job_id(words[1]) or not is_number(words[2]):
        return None
    if words[0] in ("start", "end") and (len(words) != 5 or not all(map(is_number, words[3:]))):
        return None
    return Saying(words[0], words[1], int(words[2]), tuple(words[3:]))


def parse_commands(text: str) -> list[str]:
    """The commands of a file that has one a line; empty lines and those that begin with # are left out."""
    lines = (line.strip() for line in text.lstrip("\ufeff").split("\n"))
    return [line for line in lines if line and not line.startswith("#")]


LLM_OPTION = r"(?<!\S)--llm(?:=|\s+)['\"]?([^\s'\";|&]+)"
CUDA_OPTION = (                     # with its value, if it has one; what ends the command or its quotes is none
    r"""(?<!\S)--cuda(?:(?:=|[ \t]+(?!-(?!\d)|[;|&<>)\s]|\d*[<>]))(?:"[^"]*"|'[^']*'|[^\s;|&<>)"']+)|=?(?=[\s;|&<>)"']|$))""")


def find_llm(command: str) -> str | None:
    """The model that a command names with `--llm NAME`."""
    match = re.search(LLM_OPTION, command)
    return match[1] if match else None


def has_cuda_option(command: str) -> bool:
    return re.search(CUDA_OPTION, command) is not None


def fill_cuda_option(command: str, indices: Iterable[int]) -> str:
    """The command with `--cuda` set to these GPUs; it is added to one that has none."""
    option = "--cuda " + ",".join(map(str, indices))
    return re.sub(CUDA_OPTION, option, command) if has_cuda_option(command) else f"{command} {option}"


def parse_llm_config(data: Any, path: str) -> dict[str | None, float]:
    """{model: GPUs}, and under None what one that is not named gets.  Raises: usage."""
    if not isinstance(data, dict) or data.keys() - {"default_requirement", "models"} or not isinstance(data.get("models", {}), dict):
        raise NexusError("usage", f"{path} must be an object with default_requirement and models",
                         hint='{"default_requirement": 1.0, "models": {"qwen2.5-7b-inst": 0.5}}')
    made: dict[str | None, float] = {}
    for model, given in [(None, data.get("default_requirement", 1)), *data.get("models", {}).items()]:
        try:
            made[model] = parse_gpus_asked(given)
        except NexusError as error:
            raise NexusError("usage", f"{path}: {model or 'default_requirement'}: {error.message}", error.hint) from None
    return made


@value
class JobsRow:
    """A line of the jobs file."""
    line: int                           # its number, from 1
    priority: int
    script: str
    conda: str | None
    arguments: str
    gpu_ids: tuple[int, ...] | None

    @property
    def content(self) -> str:
        """What tells it from others; priority and GPUs do not."""
        return "\0".join((self.script, self.conda or "", self.arguments))


def parse_jobs_file(text: str) -> tuple[list[JobsRow], list[str]]:
    """The rows `priority,script,conda_env,arguments,allowed_gpus` of a jobs file, and what is wrong with its other lines.

    The last field may hold commas; arguments that do stand in double quotes.  A last line without its newline is still being written.
    """
    rows, faults = [], []
    for number, line in enumerate(text.lstrip("\ufeff").split("\n")[:-1], 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                rows.append(parse_jobs_row(number, line.strip()))
            except NexusError as error:
                faults.append(f"line {number}, '{format_line(line.strip(), 100)}': {error.message}")
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
    priority, (script, conda, arguments, *allowed) = parse_priority(cells[0]), cells[1:]
    if not is_text(line, MAX_ARGUMENT_BYTES) or CONTROL.sub("", line.replace("\t", "")) != line.replace("\t", ""):
        refuse("it holds characters that no command can have")
    try:
        gpu_ids = parse_indices(",".join(allowed)) if any(allowed) else None
    except NexusError as error:
        refuse(f"{error.message}; arguments that hold commas stand in double quotes")
    return JobsRow(number, priority, script, SUBMISSION_PARSERS["conda"](conda) if conda else None, arguments, gpu_ids)


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """(name, values) of `lr=1e-3,1e-4`, `seed=0..4` (both ends in).  Raises: usage."""
    name, equals, values = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w{0,63}", name) or not equals or not all(values.split(",")):
        raise NexusError("usage", f"--sweep {format_line(text, 60)} is not like NAME=VALUE,VALUE",
                         hint="--sweep lr=1e-3,1e-4 --sweep seed=0..4")
    made: list[str] = []
    for part in values.split(","):
        span = re.fullmatch(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})", part)
        if not span and re.match(r"-?[0-9.]*[0-9]\.\.[^/]", part):
            raise NexusError("usage", f"--sweep {format_line(text, 60)}: only whole numbers are counted, like 0..4",
                             hint="list the others: lr=0.1,0.2")
        if span:
            first, last = int(span[1]), int(span[2])
            if abs(last - first) >= MAX_SWEEP:
                raise NexusError("usage", f"--sweep {format_line(text, 60)} counts more than {MAX_SWEEP} values", hint="sweep over fewer")
            made += map(str, range(first, last + 1) if first <= last else range(first, last - 1, -1))
        else:
            made.append(part)
    return name, tuple(made)


MAX_SWEEP = 100000                      # commands of one sweep


def expand_sweep(command: str, sweeps: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """The commands of every combination, the last name changing fastest.  `{name}` is replaced for the names given; all
    other braces, `${name}` too, stay what they are.  Raises: usage.
    """
    import itertools
    import math
    if not sweeps:
        return [command]
    names = [name for name, _ in sweeps]
    for name in names:
        if names.count(name) > 1:
            raise NexusError("usage", f"--sweep {name} is given twice", hint="put all its values into one")
        if not re.search(rf"(?<!\$)\{{{name}\}}", command):
            raise NexusError("usage", f"--sweep {name}: there is no {{{name}}} in the command {format_line(command, 100)}",
                             hint=f"put {{{name}}} where the value belongs")
    if math.prod(len(values) for _, values in sweeps) > MAX_SWEEP:
        raise NexusError("usage", f"the sweep has more than {MAX_SWEEP} combinations", hint="sweep over fewer values")
    pattern = re.compile(rf"(?<!\$)\{{({'|'.join(names)})\}}")
    made = []
    for values in itertools.product(*(values for _, values in sweeps)):
        chosen = dict(zip(names, values))
        made.append(pattern.sub(lambda match: chosen[match[1]], command))       # noqa: B023 (used at once)
    return made


INTERPRETERS = r"(?:python|pypy)[0-9.]*|bash|sh|zsh|Rscript|julia|perl|ruby|node|lua"
# Variables that decide what else is run beside a script
INTERFERING = r"PATH|LD_\w+|ENV|BASH_\w*|PYTHON\w*|PERL\w*|RUBY\w*|R_\w+|NODE_\w+|JULIA_\w+|LUA_\w+"
SHELL_CHARACTERS = r"[;&|<>()$`\\\"'*?\[\]{}~#!\n\r]"


def parse_script(command: str) -> str:
    """The script of `[interpreter] SCRIPT ARGS`.  Raises: forbidden."""
    found = re.search(SHELL_CHARACTERS, command) or re.search(r"[^\S \t]|[\x00-\x08\x0e-\x1f\x7f-\x9f]", command)  # bash knows two blanks
    words = command.split()
    is_named = len(words) > 1 and re.fullmatch(INTERPRETERS, words[0]) is not None
    script = words[1] if is_named else words[0]
    if found or script.startswith("-") or "=" in script or not (is_named or "/" in script):     # sh seeks `rm` in PATH
        why = f"it holds {json.dumps(found[0])}" if found else f"{format_line(script, 60)} is not a script's path"
        raise NexusError("forbidden", f"only `[interpreter] SCRIPT ARGUMENTS` may be run here (allowed_script_paths), and {why}",
                         hint="put the rest into the script")
    return script


OUT_OF_MEMORY = (         # PyTorch, the CUDA runtime and driver, cuBLAS, JAX and TensorFlow
    r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
    r"|cuda\.OutOfMemoryError|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor")


def find_oom_line(text: str) -> str | None:
    """The line that says that the GPU's memory was not enough."""
    found = next((line for line in text.splitlines() if re.search(OUT_OF_MEMORY, line)), None)
    return None if found is None else format_line(found.strip(), 300).strip()


def find_last_lines(text: str, count: int) -> list[str]:
    """The last lines that are not empty, as they would look on a terminal."""
    found: list[str] = []
    for line in reversed(text.split("\n")):
        if len(found) == count:
            break
        shown = format_line(line.rstrip("\r").rpartition("\r")[2].strip(), 300).strip()
        found += [shown] if shown else []
    return found[::-1]


# What Slurm says, and what is said to it.  Times are asked for in UTC; fields are parted by |, and what may hold one comes last.
# Source: squeue(1), sbatch(1), scontrol(1), sacct(1), src/common/slurm_errno.c and slurm_protocol_defs.c.

SQUEUE_FORMAT = "%i|%T|%S|%e|%N|%r|%j|%k"       # id, state, start, end, nodes, reason, name, comment
SACCT_FORMAT = "JobID,State,ExitCode,Start,End,NodeList"
SLURM_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
SLURM_ENDS: Mapping[str, str | None] = {        # the states in which a job is over: why it is no success; None: its exit code says it
    "COMPLETED": None, "FAILED": None, "CANCELLED": "killed", "TIMEOUT": "timeout", "DEADLINE": "timeout", "OUT_OF_MEMORY": "host-memory",
    "NODE_FAIL": "node-fail", "BOOT_FAIL": "node-fail", "PREEMPTED": "preempted", "REVOKED": "killed"}


@value
class SlurmJob:
    """A job of Slurm's, or a task of an array."""
    id: str                                     # 123, or 123_4
    state: str                                  # in Slurm's word; between those of SLURM_WAITING and SLURM_ENDS it runs
    reason: str = ""
    nodes: str = ""
    started_at: float | None = None             # of one that waits: when Slurm thinks it will
    ended_at: float | None = None
    key: str | None = None                      # Job.slurm_key; "" = this service has not handed it over; None = that is not known
    stopped_by: int | None = None               # uid of who cancelled it, if that is known
    exit_code: int | None = None                # if that is known; 128 and more: killed by that signal


def parse_slurm_jobs(text: str, service_id: str) -> list[SlurmJob]:
    """Of `squeue -h -r -o SQUEUE_FORMAT`."""
    found = []
    for line in text.splitlines():
        cells = line.split("|", 7)
        if len(cells) < 8 or not re.fullmatch(r"\d+(_\d+)?", cells[0]):
            continue                            # a warning among them
        owner, _, token = cells[7].partition(f"nexus:{service_id}:")
        task, key = cells[0].partition("_")[2], None if cells[6].startswith("nexus_") and "nexus:" not in cells[7] else ""
        if token and not owner:
            key = f"{token}_{task}" if task else token
        found.append(SlurmJob(cells[0], cells[1], cells[5], cells[4], parse_slurm_time(cells[2]), parse_slurm_time(cells[3]), key))
    return found


def parse_slurm_accounts(text: str) -> list[SlurmJob]:
    """Of `sacct -n -P -X -o SACCT_FORMAT`.  Its states may say more: `CANCELLED by 1000`.

    Tasks of an array that wait share a line; those that were cancelled before they began have none.
    """
    found = []
    for line in text.splitlines():
        cells = line.split("|", 5)
        if len(cells) == 6 and re.fullmatch(r"\d+(_\d+)?", cells[0]) and cells[1]:
            state, _, who = cells[1].partition(" by ")
            nodes = "" if cells[5] == "None assigned" else cells[5]
            found.append(SlurmJob(cells[0], state.rstrip("+"), "", nodes, parse_slurm_time(cells[3]), parse_slurm_time(cells[4]),
                                  stopped_by=int(who) if who.isdigit() else None, exit_code=parse_slurm_exit(cells[2])))
    return found


def parse_slurm_exit(text: str) -> int | None:
    """The exit code of `3:0`, or of `0:9`, which is one that signal 9 ended."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (128 + int(match[2]) if int(match[2]) else int(match[1])) if match else None


def parse_slurm_time(text: str) -> float | None:
    """UTC epoch seconds of `2024-10-24T15:30:15`; None of `N/A`, `Unknown`, `None`."""
    try:
        return parse_time(f"{text}Z")
    except ValueError:
        return None


@value
class SlurmNode:
    name: str
    state: str                  # in Slurm's words: idle, mixed, down+drain
    gpus: int
    gpus_used: int
    partitions: tuple[str, ...]
    reason: str                 # why it takes no jobs, if somebody said it


@value
class SlurmPartition:
    name: str
    state: str                  # up, down, drain, inactive
    is_default: bool
    time_limit: str             # in Slurm's words: 1-00:00:00, UNLIMITED
    nodes: str


def parse_scontrol(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show ... -o`; some hold blanks."""
    marks = list(re.finditer(r"(?:^|(?<=\s))([A-Z][A-Za-z:/&-]*)=", line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    return {mark[1]: line[mark.end():end].strip() for mark, end in zip(marks, ends)}


def parse_slurm_nodes(text: str) -> list[SlurmNode]:
    """Of `scontrol show node -d -o`."""
    found = []
    for facts in map(parse_scontrol, text.splitlines()):
        if "NodeName" in facts:
            partitions = tuple(filter(None, facts.get("Partitions", "").split(",")))
            found.append(SlurmNode(facts["NodeName"], facts.get("State", "unknown").lower(), count_gres(facts.get("Gres", "")),
                                   count_gres(facts.get("GresUsed", "")), partitions, re.sub(r" \[.*\]$", "", facts.get("Reason", ""))))
    return found


def count_gres(text: str) -> int:
    """GPUs of `gpu:a100:2(S:0-1),gpu:1,shard:8`, `gpu:a100:1(IDX:0,2)` or `gpu:(null):1(IDX:0)`."""
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,]*)?:(\d+)", re.sub(r"\([^)]*\)", "", text)))


def parse_slurm_partitions(text: str) -> list[SlurmPartition]:
    """Of `scontrol show partition -o`."""
    return [SlurmPartition(facts["PartitionName"], facts.get("State", "unknown").lower(), facts.get("Default") == "YES",
                           facts.get("MaxTime", ""), facts.get("Nodes", "")) for facts in map(parse_scontrol, text.splitlines())
            if "PartitionName" in facts]


def parse_slurm_settings(text: str) -> dict[str, str]:
    """Of `scontrol show config`."""
    return {name.strip(): setting.strip() for name, mark, setting in (line.partition("=") for line in text.splitlines()) if mark}


def parse_sbatch(text: str) -> str | None:
    """The id that `sbatch --parsable` tells, maybe among warnings; None when there is none."""
    match = re.search(r"^(\d+)(;\S*)?$", text, re.MULTILINE)
    return match[1] if match else None


def build_sbatch(job: Job, tasks: str, token: str, service_id: str, folder: str, minutes: int | None, config: Config) -> list[str]:
    """What hands a job over; or with `tasks`, 1-3,5, those that ask for the same, as an array whose tasks are links in `folder`."""
    own, task = config.slurm, "/$SLURM_ARRAY_TASK_ID" if tasks else ""
    memory_gb = config.jobs.max_memory_gb
    options = {"partition": own.partition, "account": own.account, "qos": own.qos, "gres": f"gpu:{job.gpus}" if job.gpus else "",
               "time": str(minutes) if minutes else "", "mem": f"{memory_gb * 1024:.0f}M" if memory_gb else "",
               "array": tasks}
    import shlex
    return ["sbatch", "--parsable", "--export=ALL", "--no-requeue", "--open-mode=append", "--chdir=/",
            f"--job-name=nexus_{'array' if tasks else job.id}", f"--comment=nexus:{service_id}:{token}",
            f"--output={escape_slurm_path(folder)}{'/%a' if tasks else ''}/slurm-{job.attempt}.log",
            *own.extra_args, *(f"--{name}={text}" for name, text in options.items() if text),       # of two the last counts
            "--wrap", f"exec /bin/sh {shlex.quote(folder)}{task}/job.sh {job.attempt}"]


def escape_slurm_path(path: str) -> str:
    """In the path of --output, % stands for something, and \\ switches that off for the whole of it."""
    return path.replace("%", "%%")


# Why sbatch refuses: (Slurm's words, what it is the fault of, what to do).  `cluster`: it cannot be asked now; `config`: nothing of ours
# would be taken; `limit`: not so many at once; `job`: what this one asks for.  What is none of these may pass.
SLURM_REFUSALS = (
    ("job queue full|temporarily unable to accept", "limit", "nexus tries it again as jobs end; see MaxJobCount: scontrol show config"),
    ("[Mm]unge|Protocol authentication error|authentication plugin", "cluster",
     "munged must run here, with the cluster's key: munge -n | unmunge"),
    ("Unable to contact slurm controller|Socket timed out|Connection (refused|timed out)|Zero Bytes|Communication (connection|shut)"
     "|not responding|Unable to establish|in standby mode", "cluster",
     "nexus goes on by itself when Slurm answers; see: scontrol ping"),
    (r"establish a configuration source|[Uu]nable to process configuration|slurm\.conf", "cluster",
     "this machine must be a client of the cluster: its slurm.conf in /etc/slurm, or SLURM_CONF"),
    ("[Ii]nvalid partition|partition not available", "config", "set [slurm] partition (nexus config edit), then nexus restart"),
    ("Invalid account", "config", "set [slurm] account (nexus config edit), then nexus restart; yours: sacctmgr show assoc user=$USER"),
    ("[Ii]nvalid qos", "config",
     "set [slurm] qos (nexus config edit), then nexus restart; yours: sacctmgr show assoc user=$USER format=qos"),
    ("group not permitted|Access/permission denied|not authorized|Invalid user id", "config",
     "ask the cluster's administrators, or choose another [slurm] partition or account"),
    ("unrecognized option|unknown option|invalid option|requires an argument|Invalid --|Invalid node name|Invalid feature"
     "|reservation is invalid", "config", "see [slurm] extra_args (nexus config edit), then nexus restart"),
    (r"\b(Assoc|QOS)(?!\w*Submit)\w*(GRES|TRES|C[Pp][Uu]|Node|Mem|Wall|Billing)", "job",      # by itself it is more than one job may have
     "ask for less, or choose another [slurm] qos or account: sacctmgr show qos"),
    ("job submit limit|violates accounting/QOS policy|Too many jobs|[Ll]imit on number of jobs|job limit", "limit",
     "nexus tries it again as jobs end; lower [slurm] max_submitted to hand over fewer at once"),
    ("node configuration is not available|Memory specification|time limit is invalid|Invalid generic resource|More processors requested"
     "|Node count specification|CPU count", "job", "ask for less, or choose another [slurm] partition: sinfo -o '%P %l %G %m'"),
)


def read_refusal(words: str) -> tuple[str, str]:
    """(what it is the fault of, what to do) of what sbatch or squeue said; empty when that is not known."""
    return next(((fault, hint) for pattern, fault, hint in SLURM_REFUSALS if re.search(pattern, words)), ("", ""))


def clean_slurm_words(text: str) -> str:
    """What a program of Slurm's said, as one line without its own name."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in text.splitlines()]
    lines = [re.sub(r"^(Batch job submission failed|slurm_load_jobs error): ", "", line) for line in lines if line]
    return format_line("; ".join(dict.fromkeys(line for line in lines if not line.startswith("Try "))), 400)


def find_slurm_line(text: str) -> str:
    """The line of a slurm.log that says the most: what slurmstepd has done to the job, or else the last."""
    lines = find_last_lines(text, 50)
    own = [match[1] for line in lines for match in [re.match(r"slurmstepd\S*: error: (.+)", line)] if match]
    told = [line for line in own if re.search(r"\*\*\*|oom|memory", line)]
    return format_line((told or own or lines or [""])[-1].strip("* "), 300)


SLURM_REASONS = {               # those that say little by themselves, or that somebody must do something about
    "None": "it is about to be looked at", "Resources": "what it asks for is in use", "Priority": "others come before it there",
    "JobHeldUser": "it is held; release it: scontrol release {id}", "JobHeldAdmin": "the cluster's administrators hold it; ask them",
    "BeginTime": "its begin time has not come", "Dependency": "it waits for another job of Slurm's",
    "JobArrayTaskLimit": "as many tasks of its array run as may", "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionTimeLimit": "it may run for longer than the partition allows: nexus remove it, and add it with a shorter --timeout",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows", "BadConstraints": "no node can ever give what it asks for",
    "AccountNotAllowed": "the partition does not take its account; see [slurm] account",
    "QOSNotAllowed": "the partition does not take its QOS; see [slurm] qos",
    "launch failed requeued held": "it could not be started and is held; scontrol release {id}"}


def describe_handed(job: Job, seen: SlurmJob | None, trouble: str = "") -> str:
    """Why a job waits that Slurm has.  `trouble`: why Slurm cannot be asked."""
    if job.slurm_id is None:
        return ("it is on its way to Slurm, and is taken out again there" if job.stop_cause else "it is being handed to Slurm") + (
            f"; {trouble}" if trouble else "")
    if seen is None or trouble:
        return f"Slurm has it as {job.slurm_id}" + (f"; {trouble}" if trouble else "")
    if seen.state not in SLURM_WAITING:
        return f"Slurm has it as {job.slurm_id}: {seen.state}"
    reason = seen.reason.strip("()") or "None"
    known = SLURM_REASONS.get(reason) or next(
        (words for start, words in (("Assoc", "a limit of the account is reached"), ("QOS", "a limit of the QOS is reached"),
                                    ("ReqNodeNotAvail", "nodes it asks for are down or kept")) if reason.startswith(start)), "")
    return f"Slurm has it as {job.slurm_id}: {reason}" + (f" ({known.format(id=job.slurm_id)})" if known else "")


# ==== 6. SCHEDULER ==== what to do next, decided from values alone
# Jobs start in the queue's order; one that cannot start is passed over, so that later ones may.  Jobs of one kind ask
# for the same: when the first of a kind cannot start, none of it can, and plan() need not look at the others.  A job
# that was passed over for reserve_after_seconds keeps GPUs until it has enough; others may use those only if they are
# expected to end before.  Shares of GPUs are counted in hundredths: that is accounting, nothing keeps a job to its share.


@value
class Start:
    job_id: str
    gpu_indices: tuple[int, ...]                # whole GPUs first, then the one that is shared
    gpu_uuids: tuple[str, ...]
    node: str = ""                              # "" = on this machine


@value
class Stop:
    job_id: str
    cause: str
    line: str


@value
class Usage:
    """What a running job has taken up to now."""
    runtime_s: float
    memory_mib: float | None = None             # of the host


@value
class Closed:
    """Of which groups and users nothing may start, and why."""
    groups: dict[str, str]
    users: dict[str, str]

    def find(self, group: str | None, user: str) -> str | None:
        """Why no job of a group and user may start; None when one may."""
        return self.groups.get(group or "") or self.users.get(user)


@value
class NodeView:
    """Another machine that may be given jobs, as plan() sees it."""
    name: str
    cpu_slots: int = 0                          # how many further jobs without a GPU it takes
    closed: str | None = None                   # why it gets no job now


@value
class Plan:
    starts: tuple[Start, ...] = ()
    stops: tuple[Stop, ...] = ()
    passed_over: tuple[str, ...] = ()           # jobs before which others start, for the first time
    blocked: Mapping[Kind, str] = {}            # why the jobs of a kind wait; empty: the board says it
    closed: Closed = Closed({}, {})
    board: tuple[Slot, ...] = ()                # the GPUs as they are when all this is done
    hold: str = ""                              # why nothing at all starts


PAUSED = "the queue is paused (nexus resume)"
PAUSED_THERE = "there"          # a node's GPU is paused by the nexus there, which alone can resume it
NO_USAGE: Mapping[str, Usage] = {}
UNLIMITED = 2**63
MPS_SERVER = "nvidia-cuda-mps"  # -server: the kernel keeps 15 characters of a name


def find_obstacle(gpu: Gpu, config: GpuConfig, jobs: Sequence[Job] = ()) -> str | None:
    """Why no further job may have this GPU, beside those of nexus that run there; None when one may."""
    lasting = find_lasting_obstacle(gpu, config)
    if lasting:
        return lasting
    if gpu.lease_holder:
        return f"is held by the nexus of {gpu.lease_holder}"
    foreign = find_foreign(gpu)
    if foreign and not config.share_with_others:
        return f"is in use by {describe_processes(foreign)}"
    return find_memory_obstacle(gpu, config, jobs)


def find_foreign(gpu: Gpu) -> list[GpuProcess]:
    """The processes there that are somebody else's.  That of MPS is nobody's: jobs compute through it, and it stays."""
    return [process for process in gpu.processes if process.job_id is None and not (process.name or "").startswith(MPS_SERVER)]


def find_lasting_obstacle(gpu: Gpu, config: GpuConfig) -> str | None:
    """What will still be in the way when the job that runs there has ended."""
    if gpu.fault:
        return f"is unusable ({gpu.fault})"
    if gpu.is_paused and gpu.pause_reason == PAUSED_THERE:
        return f"is paused by {gpu.node}'s own nexus (there: nexus resume {gpu.index})"
    if gpu.is_paused:
        return f"is paused ({gpu.pause_reason}; nexus resume {gpu.place})" if gpu.pause_reason else "is paused"
    if config.ids and not gpu.node and gpu.index not in config.ids:
        return "is not among [gpu] ids"
    return "is cut into MIG slices" if gpu.is_mig else None


def find_memory_obstacle(gpu: Gpu, config: GpuConfig, jobs: Sequence[Job]) -> str | None:
    """Memory that reads N/A matters only where a minimum is asked for."""
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return "does not tell its memory, and min_free_mem_mib is set" if config.min_free_mem_mib else None
    room = find_room(gpu, jobs)
    if room is not None and room < config.min_free_mem_mib:
        return describe_little_room(room, config)
    others = find_foreign_memory(gpu, jobs)
    if gpu.memory_total_mib and others >= config.mem_threshold * gpu.memory_total_mib and others > 0:
        return f"has {format_memory(others)} of its memory in use by others"
    return None


def describe_little_room(room_mib: float, config: GpuConfig) -> str:
    room, least = format_memories(max(0.0, room_mib), config.min_free_mem_mib)
    return f"has {room} free, less than min_free_mem_mib ({least})"


def find_foreign_memory(gpu: Gpu, jobs: Sequence[Job]) -> float:
    """MiB in use by others than nexus's jobs; 0 when whose it is cannot be told: in a container no process shows."""
    ours = [process.memory_mib for process in gpu.processes if process.job_id]
    if gpu.memory_used_mib is None or (jobs and (not ours or None in ours)):
        return 0.0
    return max(0.0, gpu.memory_used_mib - sum(memory or 0 for memory in ours))


def find_room(gpu: Gpu, jobs: Sequence[Job]) -> float | None:
    """Free memory in MiB, less what the jobs there have declared and not yet taken; None when it is not told.

    What a job uses counts as its need once that has settled; what ended jobs still hold is on its way back.
    """
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return None
    taken = dict.fromkeys((job.id for job in jobs), 0.0)
    returning = 0.0
    for process in gpu.processes:
        if process.job_id in taken:
            taken[process.job_id] += process.memory_mib or 0
        elif process.job_id:
            returning += process.memory_mib or 0
    if jobs and not gpu.processes:              # in a container none shows: what is used is theirs
        claimed = max(0.0, sum(job.gpu_mem_mib or 0 for job in jobs) - gpu.memory_used_mib)
    else:
        claimed = sum(max(0.0, job.gpu_mem_mib - taken[job.id]) for job in jobs if job.gpu_mem_mib and job.id not in gpu.settled)
    return gpu.memory_total_mib - max(0.0, gpu.memory_used_mib - returning) - claimed


def describe_processes(processes: Sequence[GpuProcess]) -> str:
    """`bob (pid 4242 python, 16GB)`, each."""
    return ", ".join(describe_process(process) for process in processes[:3]) + (
        f" and {len(processes) - 3} more" if len(processes) > 3 else "")


ASTRAY = " of job "             # between a program's name and the id of the job it is of, on a GPU that this was not given


def format_astray(name: str | None, job_id: str) -> str:
    return f"{name or 'a process'}{ASTRAY}{job_id}"


def describe_process(process: GpuProcess) -> str:
    program = f"pid {process.pid}" + (f" {format_line(process.name, 30)}" if process.name else "")
    memory = "" if process.memory_mib is None else f", {format_memory(process.memory_mib)}"
    return f"{process.user or 'somebody'} ({program}{memory})"


class Slot:
    """A GPU while plan() gives it out: what is left of it, and for whom it is kept."""

    __slots__ = ("closed", "ends_at", "free", "gpu", "is_reachable", "jobs", "kept_for", "kept_until", "most_mib", "obstacle", "room_mib")

    def __init__(self, gpu: Gpu, jobs: Sequence[tuple[Job, int]], config: GpuConfig, now: float, usage: Mapping[str, Usage],
                 closed: str | None = None) -> None:
        """`closed`: why its machine gets no job."""
        held = [job for job, _ in jobs]
        self.gpu, self.closed = gpu, closed
        self.jobs = [*(job.id for job in held), *(f"{job_id} of {gpu.node}'s own queue" for job_id in gpu.taken_by)]
        self.free = 100 - gpu.taken - sum(share for _, share in jobs)           # hundredths
        self.obstacle = closed or find_obstacle(gpu, config, held)
        self.is_reachable = self.obstacle is None or (bool(jobs) and not closed and not find_lasting_obstacle(gpu, config))
        self.room_mib = find_room(gpu, held)
        self.most_mib = (gpu.memory_total_mib or 0) - find_foreign_memory(gpu, held)        # room when all jobs there have ended
        self.ends_at = max([now, *(find_end(job, now, usage) for job in held)])     # when all of it may be free, at the earliest
        self.kept_for: str | None = None
        self.kept_until = 0.0

    def take(self, job: Job, share: int, now: float) -> None:
        self.free -= share
        self.jobs.append(job.id)
        self.is_reachable = True
        if self.room_mib is not None and job.gpu_mem_mib:
            self.room_mib -= job.gpu_mem_mib
        self.ends_at = max(self.ends_at, now + (job.expected_time or 0))


def find_age(job: Job, now: float) -> float:
    """For how long a job has run by the clock on the wall; 0 when it has not started."""
    return 0.0 if job.started_at is None else now - job.started_at


def find_end(job: Job, now: float, usage: Mapping[str, Usage]) -> float:
    """The earliest end of a running job that is to be reckoned with: any moment, unless its submitter expects a time."""
    runtime = usage[job.id].runtime_s if job.id in usage else find_age(job, now)
    return now + max(0.0, (job.expected_time or 0) - runtime)


NO_NODES: Mapping[str, str | None] = {}


def make_board(running: Iterable[Job], gpus: Sequence[Gpu], config: GpuConfig, now: float, usage: Mapping[str, Usage],
               closed: Mapping[str, str | None] = NO_NODES) -> list[Slot]:
    """`closed`: {machine: why it gets no job}."""
    held: dict[str, list[tuple[Job, int]]] = {}
    for job in running:
        for uuid, share in zip(job.gpu_uuids, list_shares(job)):
            held.setdefault(uuid, []).append((job, share))
    return [Slot(gpu, held.get(gpu.uuid, ()), config, now, usage, closed.get(gpu.node)) for gpu in gpus]


def may_run_on(job: Job, node: str) -> bool:
    return job.only_node in (None, node) and all(name != node for name, _ in job.unfit)


def find_verdict(slot: Slot, share: int, job: Job, config: GpuConfig, now: float) -> str | None:
    """Why a job cannot have so many hundredths of a GPU now; None when it can."""
    if slot.free < share:
        names = format_jobs_there(slot.jobs)
        load = f"runs {names}" if slot.free <= 0 else f"has {slot.free / 100:g} free beside {names}"
        return f"{load}, and {slot.obstacle}" if slot.obstacle else load
    if slot.obstacle:
        return slot.obstacle
    if slot.kept_for not in (None, job.id) and not (job.expected_time and now + job.expected_time <= slot.kept_until):
        return f"is kept for job {slot.kept_for}"
    if slot.room_mib is not None and slot.room_mib < config.min_free_mem_mib:
        return describe_little_room(slot.room_mib, config)      # after what starts now
    if slot.jobs and slot.gpu.utilization is not None and slot.gpu.utilization >= config.load_threshold * 100:
        return f"is {slot.gpu.utilization:.0f}% busy with {format_jobs_there(slot.jobs)} (load_threshold)"
    if job.gpu_mem_mib and slot.room_mib is None:
        return "does not tell its memory, and the job says how much it needs"
    if job.gpu_mem_mib and slot.room_mib is not None and slot.room_mib < job.gpu_mem_mib:
        room, asked = format_memories(max(0.0, slot.room_mib), job.gpu_mem_mib)
        return f"has {room} free, less than the {asked} asked for"
    return None


def format_jobs_there(ids: Sequence[str]) -> str:
    return f"job {ids[0]}" if len(ids) == 1 else f"jobs {', '.join(ids)}"


def choose_slots(job: Job, board: Sequence[Slot], config: GpuConfig, now: float) -> list[Slot] | None:
    """Where on one machine a job fits, in the order of its shares; None when it does not.

    A share goes where it fits tightest; whole GPUs by index, or where the memory fits tightest; after a CUDA out-of-memory
    the emptiest, and rather not where that was.
    """
    shares = list_shares(job)
    open_slots = [slot for slot in board if job.gpu_ids is None or slot.gpu.index in job.gpu_ids]
    chosen: list[Slot] = []
    if shares[-1] < 100:
        fitting = [slot for slot in open_slots if find_verdict(slot, shares[-1], job, config, now) is None]
        if not fitting:
            return None
        chosen = [min(fitting, key=lambda slot: (slot.free, slot.room_mib or 0, slot.gpu.index))]
    whole = [slot for slot in open_slots if slot not in chosen and find_verdict(slot, 100, job, config, now) is None]
    if len(whole) + len(chosen) < len(shares):
        return None
    if job.is_alone:
        before = read_attempts(job)[-1]["gpu_indices"] if job.attempts else ()
        whole.sort(key=lambda slot: (-(slot.room_mib or 0), slot.gpu.index in before))
    elif job.gpu_mem_mib:
        whole.sort(key=lambda slot: slot.room_mib or 0)
    return whole[: len(shares) - len(chosen)] + chosen


def keep_slots(job: Job, board: Sequence[Slot]) -> None:
    """Keep GPUs for a job that was passed over for long: those that are emptiest now, so that what is kept only gets
    emptier.  None for a job that also needs a GPU that is lost or somebody else's: they would be idle for nothing.
    All of them on one machine: the one that is expected to have them first.
    """
    count = len(list_shares(job))
    reachable: dict[str, list[Slot]] = {}
    for slot in board:
        if (job.gpu_ids is None or slot.gpu.index in job.gpu_ids) and slot.is_reachable and slot.kept_for is None and (
                not job.gpu_mem_mib or slot.most_mib >= job.gpu_mem_mib) and may_run_on(job, slot.gpu.node):
            reachable.setdefault(slot.gpu.node, []).append(slot)
    choices = [sorted(slots, key=lambda slot: (-slot.free, slot.ends_at, slot.gpu.index))[:count]
               for slots in reachable.values() if len(slots) >= count > 0]
    if choices:
        kept = min(choices, key=lambda slots: (max(slot.ends_at for slot in slots), -sum(slot.free for slot in slots)))
        for slot in kept:
            slot.kept_for, slot.kept_until = job.id, max(slot.ends_at for slot in kept)


def find_stops(running: Iterable[Job], usage: Mapping[str, Usage], config: JobsConfig) -> Iterator[Stop]:
    """The running jobs that have used up their time, or too much of the host's memory."""
    for job in running:
        used = usage.get(job.id)
        if used is None or job.stop_cause:
            continue
        limit_s = find_time_limit(job, config)
        if limit_s is not None and used.runtime_s >= limit_s:
            yield Stop(job.id, "timeout", f"stopped after {format_limit(used.runtime_s)}: {describe_time_limit(job, config)}")
        elif config.max_memory_gb and (used.memory_mib or 0) > config.max_memory_gb * 1024:
            taken, _ = format_memories(used.memory_mib or 0, config.max_memory_gb * 1024)
            yield Stop(job.id, "host-memory", f"its processes took {taken} of host memory; max_memory_gb is {config.max_memory_gb:g}")


def find_time_limit(job: Job, config: JobsConfig) -> float | None:
    """Seconds a job may run; None when there is no limit."""
    if job.timeout_seconds is not None:
        return job.timeout_seconds or None
    if job.expected_time is not None:
        return job.expected_time * config.timeout_multiplier
    return config.timeout_seconds or None


def describe_time_limit(job: Job, config: JobsConfig) -> str:
    limit = format_limit(find_time_limit(job, config) or 0)
    if job.timeout_seconds is not None:
        return f"its time limit is {limit}"
    if job.expected_time is not None:
        return f"it was expected to take {format_limit(job.expected_time)}, and its limit is {limit} (timeout_multiplier)"
    return f"timeout_seconds is {limit}"


def describe_hold(group: Group) -> str:
    return f"group {group.name} is held: {group.hold}"


class Limits:
    """How many of each group and user may run, and which of them have as many."""

    def __init__(self, state: State, config: JobsConfig) -> None:
        self.of_groups = {group.name: group.limit for group in state.groups.values() if group.limit}
        self.of_users = config.max_running_per_user
        self.closed = Closed({group.name: describe_hold(group) for group in state.groups.values() if group.hold}, {})
        self.groups: dict[str, int] = {}                # how many of it run
        self.users: dict[str, int] = {}
        if self.of_groups or self.of_users:
            for job in (*state.running.values(), *state.handed.values()):
                self.count(job)

    def count(self, job: Job) -> None:
        """It runs, or starts now."""
        limit = self.of_groups.get(job.group, 0) if job.group else 0
        if job.group and limit:
            self.groups[job.group] = self.groups.get(job.group, 0) + 1
            if self.groups[job.group] >= limit:
                self.closed.groups.setdefault(
                    job.group, f"{format_count(limit, 'job')} of group {job.group} run, as many as its --max-concurrent allows")
        if self.of_users:
            self.users[job.user] = self.users.get(job.user, 0) + 1
            if self.users[job.user] >= self.of_users:
                self.closed.users.setdefault(
                    job.user, f"{job.user} has {format_count(self.of_users, 'job')} running, as many as max_running_per_user allows")


class Line:
    """The jobs of the queue as plan() comes to them: the first of each kind, and the next once that one has started."""

    def __init__(self, state: State, closed: Closed) -> None:
        self.state, self.closed = state, closed
        self.places: dict[Kind, dict[Lane, int]] = {}               # how many of a kind, per group and user, were gone by
        self.heads: list[tuple[tuple[tuple[int, ...], str], Kind]] = []
        for kind in state.kinds:
            self.push(kind)

    def push(self, kind: Kind) -> None:
        """Put the first of a kind whose group and user may start one into the line."""
        first, groups, users, places = None, self.closed.groups, self.closed.users, self.places.get(kind)
        for lane, waiting in self.state.kinds[kind].items():
            if lane[0] in groups or lane[1] in users:
                continue
            place = places.get(lane, 0) if places else 0
            if place < len(waiting) and (first is None or waiting[place] < first):
                first = waiting[place]
        if first is not None:
            insert_sorted(self.heads, (first, kind))

    def pop(self) -> tuple[Job, Kind] | None:
        """The next job in the queue's order that is first of its kind; None when there is no more."""
        while self.heads:
            (_, job_id), kind = self.heads.pop(0)
            job = self.state.jobs[job_id]
            if self.closed.find(job.group, job.user) is None:
                return job, kind
            self.push(kind)                     # its group or user was closed by what has started
        return None

    def go_on(self, job: Job, kind: Kind) -> None:
        """It has started, or does not fit where the next of its kind may, which comes now."""
        places, lane = self.places.setdefault(kind, {}), (job.group, job.user)
        places[lane] = places.get(lane, 0) + 1
        self.push(kind)


MAX_GAP_TRIES = 20              # so many of a kind, and five times as many of all, are tried for GPUs that are kept for another


class Round:
    """One run of plan(): what is left to give out, and what was decided."""

    def __init__(self, state: State, gpus: Sequence[Gpu], trouble: str | None, config: Config, now: float,
                 usage: Mapping[str, Usage], nodes: Sequence[NodeView]) -> None:
        self.state, self.trouble, self.config, self.now = state, trouble, config, now
        self.closed = {"": trouble, **{node.name: node.closed for node in nodes}}
        self.board = make_board(state.running.values(), gpus, config.gpu, now, usage, self.closed)
        self.cpu_slots = {"": config.jobs.cpu_slots, **{node.name: 0 if node.closed else node.cpu_slots for node in nodes}}
        self.open_slots: dict[str, list[Slot]] = {name: [] for name in self.cpu_slots}
        for slot in self.board:
            if slot.free > 0 and slot.obstacle is None and slot.gpu.node in self.open_slots:
                self.open_slots[slot.gpu.node].append(slot)
        self.loads = dict.fromkeys(self.cpu_slots, (0.0, 0.0, 0))       # machine: expected seconds of what runs there, its GPUs, jobs
        for job in state.running.values():
            if not job.gpus and job.node in self.cpu_slots:
                self.cpu_slots[job.node] -= 1
            if nodes:
                self.load(job, job.node, find_end(job, now, usage) - now)
        self.limits = Limits(state, config.jobs)
        self.places = config.jobs.max_running - len(state.running) if config.jobs.max_running else UNLIMITED
        self.line = Line(state, self.limits.closed)
        self.starts: list[Start] = []
        self.passed_over: list[str] = []
        self.heads: list[str] = []              # the first job of each kind that cannot start, in the queue's order
        self.blocked: dict[Kind, str] = {}
        self.tries: dict[Kind, int] = {}        # how many of a kind did not fit into a gap

    def decide(self) -> None:
        found = self.line.pop()
        while found:
            self.consider(*found)
            found = self.line.pop()

    def load(self, job: Job, node: str, rest_s: float) -> None:
        """A job runs on a machine for so many seconds yet."""
        if node in self.loads:
            seconds, gpus, jobs = self.loads[node]
            self.loads[node] = seconds + rest_s, gpus + job.gpus, jobs + 1

    def consider(self, job: Job, kind: Kind) -> None:
        """Start the first job of a kind, or say why none of it can start."""
        if self.places <= 0:
            count = len(self.state.running) + len(self.starts)
            self.blocked[kind] = f"{format_count(count, 'job')} run, as many as max_running allows"
            return
        machines = self.list_machines(job)
        place = self.find_place(job, machines)
        if place:
            self.start(job, kind, *place)
        else:
            is_first = kind not in self.blocked
            self.blocked[kind] = self.explain_closed(job, machines)
            if not self.blocked[kind]:
                if is_first:
                    self.pass_over(job, kind)
                self.try_gap(job, kind)

    def list_machines(self, job: Job) -> list[str]:
        """Where a job may run, the machine with the least to do first."""
        if len(self.loads) == 1:
            return [""] if may_run_on(job, "") else []
        return sorted((name for name in self.loads if may_run_on(job, name)), key=lambda name: self.loads[name])

    def find_place(self, job: Job, machines: Sequence[str]) -> tuple[str, list[Slot]] | None:
        """The machine that a job can start on now, and the GPUs it gets there."""
        for name in machines:
            if job.gpus:
                chosen = choose_slots(job, self.open_slots[name], self.config.gpu, self.now)
                if chosen is not None:
                    return name, chosen
            elif self.cpu_slots[name] > 0:
                return name, []
        return None

    def explain_closed(self, job: Job, machines: Sequence[str]) -> str:
        """Why a job that could not start could not, whichever GPUs it asks for; "" when its GPUs are the reason."""
        if not machines:
            return "; ".join(f"{name or 'this machine'}: {why}" for name, why in job.unfit) or f"there is no node {job.only_node}"
        closed = [self.closed[name] for name in machines]
        if len(machines) == 1 and closed[0] and (job.gpus or machines[0]):
            return closed[0]
        elsewhere = [why for name, why in zip(machines, closed) if name and why]
        if job.gpus:
            is_told = any(slot.gpu.node in machines and not slot.closed for slot in self.board)     # GPU by GPU
            return "" if is_told else "; ".join(filter(None, closed))
        if machines == [""]:
            return f"all {self.config.jobs.cpu_slots} CPU slots are taken (cpu_slots)"
        return "; ".join(["all CPU slots are taken", *elsewhere])

    def pass_over(self, job: Job, kind: Kind) -> None:
        self.heads.append(job.id)
        if is_reserving(job, self.config.jobs, self.now):
            keep_slots(job, self.board)

    def try_gap(self, job: Job, kind: Kind) -> None:
        """The jobs of a kind are about as long, not equally: a shorter one behind may end before GPUs kept for another are needed."""
        if not job.expected_time:
            return
        gap_s = max((slot.kept_until - self.now for slots in self.open_slots.values() for slot in slots if slot.kept_for), default=0.0)
        tries = self.tries.get(kind, 0)
        may_try = tries < MAX_GAP_TRIES and sum(self.tries.values()) < 5 * MAX_GAP_TRIES
        if may_try and gap_s >= 2 ** (kind[4] - 1):             # long enough for the shortest of the kind
            self.tries[kind] = tries + 1
            self.line.go_on(job, kind)

    def start(self, job: Job, kind: Kind, node: str, chosen: Sequence[Slot]) -> None:
        self.starts.append(Start(job.id, tuple(slot.gpu.index for slot in chosen), tuple(slot.gpu.uuid for slot in chosen), node))
        self.passed_over += self.heads
        self.heads = []
        for slot, share in zip(chosen, list_shares(job)):
            slot.take(job, share, self.now)
        self.open_slots[node] = [slot for slot in self.open_slots[node] if slot.free > 0]
        self.cpu_slots[node] -= not job.gpus
        self.load(job, node, job.expected_time or 0.0)
        self.places -= 1
        self.limits.count(job)
        self.line.go_on(job, kind)


class SlurmRound(Round):
    """The same where Slurm places the jobs: each that may start is handed over, while Slurm has fewer than max_submitted."""

    def __init__(self, state: State, gpus: Sequence[Gpu], trouble: str | None, config: Config, now: float,
                 usage: Mapping[str, Usage], nodes: Sequence[NodeView]) -> None:
        super().__init__(state, gpus, trouble, config, now, usage, ())
        if config.jobs.max_running:
            self.places -= len(state.handed)
        self.submitted = len(state.handed) + sum(1 for job in state.running.values() if job.slurm_key)

    def consider(self, job: Job, kind: Kind) -> None:
        most, obstacle = self.config.slurm.max_submitted, find_slurm_obstacle(job)
        if self.places <= 0:
            count = len(self.state.running) + len(self.state.handed) + len(self.starts)
            self.blocked[kind] = f"{format_count(count, 'job')} run or are Slurm's, as many as max_running allows"
        elif self.trouble or obstacle:
            self.blocked[kind] = self.trouble or obstacle
        elif self.submitted >= most:
            self.blocked[kind] = f"Slurm has {format_count(most, 'job')} of nexus, as many as it takes or [slurm] max_submitted allows"
        else:
            self.submitted += 1
            self.start(job, kind, "", [])


def find_slurm_obstacle(job: Job | Submission) -> str:
    """What a job asks for that Slurm cannot be asked for; empty when there is nothing."""
    if (job.gpus or 0) % 1:
        return f"{format_number(job.gpus or 0)} GPUs asked for, and Slurm gives out whole ones"
    if (job.only_node if isinstance(job, Job) else job.node) is not None:
        return "a node asked for, and where a job runs is Slurm's to choose"
    asked = [key for key in ("gpu_ids", "gpu_mem_mib", "cuda_arg") if getattr(job, key)]
    return f"{asked[0]} asked for, and which GPUs a job gets is Slurm's to choose" if asked else ""


def plan(state: State, gpus: Sequence[Gpu], trouble: str | None, config: Config, now: float, usage: Mapping[str, Usage] = NO_USAGE,
         nodes: Sequence[NodeView] = ()) -> Plan:
    """Decide which running jobs are stopped, which pending ones start now and where, and why the others wait.

    `gpus` as last observed; `trouble` says why the readings of this machine cannot be relied upon (then none of its GPUs is
    given out); `usage` of the running jobs that have limits; `nodes` are the other machines.  A job starts on the machine
    that can take it now, among those on the one with the least to do.  The same values give the same plan.  Its time
    grows with the number of kinds and of starts, not of jobs.
    """
    stops = tuple(find_stops(state.running.values(), usage, config.jobs)) if usage else ()
    if state.paused:
        return Plan(stops=stops, hold=PAUSED, board=tuple(make_board(state.running.values(), gpus, config.gpu, now, usage)))
    made = (SlurmRound if config.jobs.launcher == "slurm" else Round)(state, gpus, trouble, config, now, usage, nodes)
    made.decide()
    since = {job_id: state.jobs[job_id].passed_over_at for job_id in made.passed_over}
    passed_over = tuple(job_id for job_id, at in since.items() if at is None or at > now)      # a clock that was set back
    return Plan(tuple(made.starts), stops, passed_over, made.blocked, made.limits.closed, tuple(made.board))


def is_reserving(job: Job, config: JobsConfig, now: float) -> bool:
    return job.passed_over_at is not None and now - job.passed_over_at >= config.reserve_after_seconds


# Why a job waits

def describe_wait(job: Job, state: State, made: Plan, config: Config, now: float) -> str:
    """Why a pending job does not run now, in one sentence."""
    if made.hold:
        return made.hold
    if job.slurm_key is not None:
        return describe_handed(job, None)
    if job.retry_at is not None:
        return describe_retry(job, now)
    if job.unmet:
        return describe_unmet(job, state)
    group = state.groups.get(job.group or "")
    closed = describe_hold(group) if group and group.hold else made.closed.find(job.group, job.user)
    if closed:
        return closed
    why = made.blocked.get(kind_of(job))
    return "it is about to start" if why is None else why or describe_shortage(job, made.board, config.gpu, now)


def describe_retry(job: Job, now: float) -> str:
    last = read_attempts(job)[-1:]
    failure = f"attempt {last[0]['attempt']} failed ({last[0]['cause']})" if last else "it failed"
    return f"{failure}; it is tried again in {format_duration(max(0.0, (job.retry_at or now) - now))}"


def describe_unmet(job: Job, state: State) -> str:
    parents = [state.jobs[parent] for parent in job.unmet if parent in state.jobs]
    return "it comes after " + ", ".join(f"job {parent.id} ({parent.status})" for parent in parents[:8]) + (
        f" and {len(parents) - 8} more" if len(parents) > 8 else "")


def describe_place(job: Job, position: int, estimate: float | None, board: Sequence[Slot], config: JobsConfig, now: float) -> list[str]:
    """What `nexus why` tells of a pending job, beside the GPUs."""
    asked = f"it asks for {format_gpus(job.gpus)}" + (f" with {format_memory(job.gpu_mem_mib)} free on each" if job.gpu_mem_mib else "")
    facts = [f"{format_count(position, 'job')} before it in the queue" if position else "it is first in the queue",
             asked + (f", of {format_indices(job.gpu_ids)} only" if job.gpu_ids is not None else "")]
    if job.passed_over_at is not None:
        limit = format_duration(config.reserve_after_seconds)
        kept = ": GPUs are kept for it" if any(slot.kept_for == job.id for slot in board) else ""   # none, where one it needs is lost
        facts.append(f"others have started before it for {format_duration(now - job.passed_over_at)}" + (
            kept if is_reserving(job, config, now) else f"; after {limit} of that, GPUs are kept for it"))
    if estimate is not None:
        facts.append(f"it will start in about {format_duration(max(0.0, estimate - now))}")
    return facts


def describe_shortage(job: Job, board: Sequence[Slot], config: GpuConfig, now: float) -> str:
    """Why a job's GPUs cannot be had, in one sentence."""
    verdicts = list_verdicts(job, board, config, now)
    closed = {slot.gpu.node: slot.closed for slot in board if slot.closed and slot.gpu.node}
    taken = [(node, f"GPU {f'{node}:' if node else ''}{index} {why}") for node, index, why in verdicts if why]
    told = [why for node, why in taken if node not in closed]
    shown = "; ".join(filter(None, [
        *told[:8], f"and {len(told) - 8} more" if len(told) > 8 else "", *(why for node, why in closed.items() if may_run_on(job, node)),
        *(f"{name or 'this machine'} cannot run it: {why}" for name, why in job.unfit)]))
    count = len(list_shares(job))
    sizes: dict[str, int] = {}
    for node, _, _ in verdicts:
        sizes[node] = sizes.get(node, 0) + 1
    most = max(sizes.values(), default=0)
    if most < count:
        there = f"there are {most}" if len(sizes) < 2 else f"no machine has more than {most}"
        return f"it needs {format_count(count, 'GPU')}, and {there}" + (f": {shown}" if shown else "")
    if not shown:                       # it could have them, but the first of its kind could not: that one is longer
        return "it comes after others that ask for the same"
    needed = f"it needs {format_gpus(job.gpus)}{' of one machine' if len(sizes) > 1 else ''}, and " if count > 1 else ""
    return f"{needed}{len(verdicts) - len(taken)} of {len(verdicts)} can be had now: {shown}" if needed else shown


def list_verdicts(job: Job, board: Sequence[Slot], config: GpuConfig, now: float) -> list[tuple[str, int, str | None]]:
    """(machine, index, why a job cannot have its share of it) of each GPU that it may have; None: it could."""
    slots = {(slot.gpu.node, slot.gpu.index): slot for slot in board if may_run_on(job, slot.gpu.node)}
    share = max(list_shares(job), default=0)
    if job.gpu_ids is None:
        places = list(slots)
    else:
        machines = dict.fromkeys(node for node, _ in slots) or {job.only_node or "": None}
        places = [(node, index) for node in machines for index in job.gpu_ids if (node, index) in slots or len(machines) == 1]
    return [(*place, find_verdict(slots[place], share, job, config, now) if place in slots else "is not there") for place in places]


# What becomes of a job whose attempt has ended

@value
class Evidence:
    """What is known of an attempt beside its exit code."""
    stderr: str = ""                            # the end of what it wrote there
    stderr_size: int = 0                        # of the whole file, in bytes
    trouble: str | None = None                  # what went wrong with its logs
    samples: Mapping[str, Any] = {}             # fields of Job: what it took


def judge(job: Job, result: Result, evidence: Evidence, runtime_s: float, config: JobsConfig, now: float) -> tuple[str, dict[str, Any]]:
    """What a running job becomes, and the facts: `completed`, `failed`, `cancelled`, or `pending` for another attempt."""
    code = result.exit_code
    number = code - 128 if code is not None and 128 < code < 160 else None
    cause, line = find_cause(job, result, evidence, number)
    facts = {"exit_code": code, "signal": number, "cause": cause, "cause_line": line,
             "finished_at": max(result.finished_at or now, job.started_at or 0), "runtime_seconds": runtime_s, **evidence.samples}
    if cause is None:
        return COMPLETED, facts
    if cause == "killed":
        return CANCELLED, facts
    is_launch = cause == "launch"
    failures = [attempt for attempt in read_attempts(job) if attempt["cause"] != "launch"]
    if is_launch and not (result.may_pass and job.head is None and job.launch_failures + 1 < config.launch_attempts):
        return FAILED, {**facts, "launch_failures": job.launch_failures + result.may_pass}
    if not is_launch and len(failures) >= job.retries:
        return FAILED, facts
    again = job.launch_failures if is_launch else len(failures)
    return PENDING, {
        **NOT_STARTED, "attempts": (*job.attempts, list_attempt(job, facts)), "launch_failures": job.launch_failures + is_launch,
        "retry_at": now + find_backoff(again, config), "is_alone": job.is_alone or cause == "cuda-oom",
        "log_offset": max(job.log_offset, evidence.stderr_size), "passed_over_at": None,
        "stop_cause": None, "stop_by": None, "stop_line": None}


NOT_STARTED: dict[str, Any] = {"gpu_indices": (), "gpu_uuids": (), "started_at": None, "pid": None, "pid_started": None,
                               "session": None, "nonce": None, "boot_id": None, "node": "", "slurm_key": None, "slurm_id": None,
                               "slurm_node": None}


def find_backoff(failures: int, config: JobsConfig) -> float:
    """Seconds before the attempt that comes after so many failures and one more: it doubles, up to an hour."""
    return min(config.retry_backoff_seconds * float(2 ** min(failures, 20)), max(MAX_BACKOFF_S, config.retry_backoff_seconds))


MAX_BACKOFF_S = 3600.0


def list_attempt(job: Job, facts: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(facts.get(name, getattr(job, name, None)) for name in ATTEMPT_FIELDS)


def find_cause(job: Job, result: Result, evidence: Evidence, signal: int | None) -> tuple[str | None, str | None]:
    """Why an attempt is not a success, in a word, and the line that says so."""
    if job.stop_cause:
        return job.stop_cause, job.stop_line
    if result.cause:
        return result.cause, result.cause_line
    if result.exit_code == 0:
        return None, None
    if evidence.trouble:
        return "signal" if signal else "exit", evidence.trouble
    out_of_memory = find_oom_line(evidence.stderr)
    if out_of_memory:
        return "cuda-oom", out_of_memory
    return "signal" if signal else "exit", next(iter(find_last_lines(evidence.stderr, 1)), None)


# What becomes of a job that Slurm has

@value
class SlurmEvidence:
    """What is known of an attempt that was Slurm's, beside its state."""
    result: Result | None                       # what its job.sh left
    is_claimed: bool                            # its job.sh began with it
    words: str = ""                             # the last of Slurm's own, from slurm.log
    stopped_by: str = ""                        # who cancelled it, if that is known


def judge_slurm(job: Job, seen: SlurmJob | None, evidence: SlurmEvidence, folder: str) -> Result:
    """How an attempt has ended that Slurm says is over, or no longer knows (None)."""
    result, node = evidence.result, f" on {seen.nodes}" if seen and seen.nodes else ""
    cause = SLURM_ENDS.get(seen.state) if seen else None
    ran_s = max(0.0, seen.ended_at - seen.started_at) if seen and seen.ended_at and seen.started_at else None
    code, took_s = (result.exit_code, result.runtime_seconds) if result else (None, ran_s)
    if result and (result.cause or not cause):
        return result
    ended_at = seen.ended_at if seen else None
    if seen and cause:
        who = f" by {evidence.stopped_by}" if evidence.stopped_by else ""
        reason = f" ({seen.reason})" if seen.reason not in ("", "None", "NonZeroExitCode") else ""
        line = f"Slurm: {evidence.words}" if evidence.words and not who else f"Slurm: job {seen.id} was {seen.state}{who}{reason}{node}"
        return Result(code, ended_at, took_s, cause, line)
    if evidence.is_claimed:
        code = seen.exit_code if seen else None
        line = f"Slurm: {evidence.words}" if evidence.words else (
            f"its job.sh was killed{node}" + (": the exit code is not known" if code is None else ""))
        is_memory = re.search("memory limit|oom.kill|out.of.memory", evidence.words, re.IGNORECASE)      # where no cgroup tells it apart
        return Result(code, ended_at, took_s, "host-memory" if is_memory else "session-lost", line)
    if seen and seen.reason == "BadConstraints":
        line = f"Slurm: job {seen.id} was {seen.state} (BadConstraints): no node can ever give what it asks for"
        return Result(None, ended_at, 0.0, "launch", line)
    said = f" ({evidence.words})" if evidence.words else ""
    advice = evidence.words if "[state] log_dir" in evidence.words else f"{folder} must be on a file system that the nodes share{said}"
    line = f"Slurm no longer has job {job.slurm_id}, which had not begun: somebody cancelled it there{said}" if seen is None else (
        f"Slurm ran job {seen.id}{node} ({seen.state}), and its job.sh did not begin: {advice}")
    return Result(None, ended_at, 0.0, "launch", line)


def find_slurm_minutes(job: Job, config: JobsConfig) -> int | None:
    """What sbatch is told of a job's time limit: Slurm counts in minutes."""
    limit_s = find_time_limit(job, config)
    return None if limit_s is None else max(1, int(-(-limit_s // 60)))


def group_for_slurm(jobs: Iterable[Job], most: int, config: JobsConfig) -> list[list[Job]]:
    """The jobs that can be handed over together, as arrays of at most so many; each list in the queue's order."""
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        alike.setdefault((job.gpus, find_slurm_minutes(job, config), job.attempt), []).append(job)
    return [group[at:at + max(1, most)] for group in alike.values() for at in range(0, len(group), max(1, most))]


GROUP_FAILURES = 3              # so many of a group's first jobs that fail soon hold it


def count_group_end(group: Group, status: str, cause: str | None, is_soon: bool, line: str, has_pending: bool) -> Group:
    """What a job's end says of its group: the first three that all fail soon hold what is left of it."""
    if group.failures < 0 or group.hold or cause in ("killed", "dependency"):
        return group
    if status != FAILED or not is_soon:
        return replace(group, failures=-1)
    failures = group.failures + 1
    if failures < GROUP_FAILURES:
        return replace(group, failures=failures)
    if not has_pending:
        return replace(group, failures=0)
    return replace(group, failures=0, hold=f"its first {failures} jobs failed soon after their start, the last with: {line} "
                                           f"(mend it, then: nexus resume --group {group.name})")


@value
class Ended:
    """An attempt that ended, as the guard of GPUs remembers it."""
    gpu_uuids: tuple[str, ...]
    command: str                # or what names the script that came with the job: their commands are all alike
    is_success: bool
    is_soon: bool               # it failed within guard_seconds of its start
    started_at: float


def find_program_name(command: str) -> str:
    """What a command runs, without its arguments: jobs of one sweep are one program."""
    words = [word for word in command.split() if not re.match(r"\w+=", word)]
    modules = [module for flag, module in zip(words, words[1:]) if flag == "-m"]
    scripts = [word for word in words[1:] if re.search(r"\.(py|sh|R|jl|pl)$", word)]
    return " ".join([*words[:1], *(modules + scripts)[:1]])


def find_bad_gpu(ended: Sequence[Ended], uuid: str, config: GpuConfig) -> str | None:
    """Why a GPU should get no more jobs: those there fail soon, one after the other, and such as they run elsewhere.

    A failure counts only if the program has run well elsewhere meanwhile, and has not failed there.
    """
    latest: list[Ended] = []                    # the failures there since something else ended there
    for end in reversed(ended):
        if uuid in end.gpu_uuids and (end.is_success or end.gpu_uuids == (uuid,)):
            if not end.is_soon:
                break
            latest.append(end)
    since = min((end.started_at for end in latest), default=0.0)
    elsewhere = [end for end in ended if uuid not in end.gpu_uuids and end.started_at >= since]
    faulty = {find_program_name(end.command) for end in elsewhere if end.is_soon}
    good = {find_program_name(end.command) for end in elsewhere if end.is_success}
    counted = [end for end in latest if find_program_name(end.command) in good - faulty]
    if not config.guard_failures or len(counted) < config.guard_failures or len({end.command for end in counted}) < 2:
        return None
    return f"{len(counted)} jobs in a row failed there within {config.guard_seconds:g} s of their start, and run elsewhere"


# The scheduler on made-up time: for estimates, for simulations, for tests of what uses it

class Replay:
    """Play the queue forward: plan() decides, and each job ends when its time is up.

    >>> replay = Replay([Gpu(0, "GPU-0", "H100")], parse_config({}, ""))
    >>> replay.add("aaa", 60.0), replay.add("bbb", 60.0)
    >>> replay.run()
    >>> replay.started_at
    {'aaa': 0.0, 'bbb': 60.0}
    """

    def __init__(self, gpus: Sequence[Gpu], config: Config, now: float = 0.0, nodes: Sequence[NodeView] = ()) -> None:
        self.gpus, self.config, self.now, self.nodes = gpus, config, now, nodes
        self.state = State()
        self.run_times: dict[str, float | None] = {}            # job id: seconds; None: nobody knows
        self.started_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        self.ends: list[tuple[float, str]] = []                 # ascending

    def add(self, job_id: str, run_time: float | None, **fields: Any) -> None:
        """Queue a job that will run for so many seconds.  `fields` as in Job."""
        user = fields.pop("user", "")
        self.insert(Job(id=job_id, command=fields.pop("command", job_id), cwd="/", user=user, created_at=self.now, environment="",
                        content="", **{**next_place(self.state, fields.pop("priority", 1), user), **fields}), run_time)

    def insert(self, job: Job, run_time: float | None) -> None:
        """The same with a job as it is, running or pending."""
        apply(self.state, JobAdded(job))
        self.run_times[job.id] = run_time
        if job.status == RUNNING and run_time is not None:
            insert_sorted(self.ends, (max(self.now, (self.now if job.started_at is None else job.started_at) + run_time), job.id))

    def decide(self) -> Plan:
        return plan(self.state, self.gpus, None, self.config, self.now, NO_USAGE, self.nodes)

    def start_jobs(self) -> Plan:
        """Start what plan() says; return the plan."""
        made = self.decide()
        for job_id in made.passed_over:
            apply(self.state, JobChanged(job_id, {"passed_over_at": self.now}))
        for start in made.starts:
            apply(self.state, JobChanged(start.job_id, {"status": RUNNING, "started_at": self.now, "gpu_indices": start.gpu_indices,
                                                        "gpu_uuids": start.gpu_uuids, "node": start.node}))
            self.started_at[start.job_id] = self.now
            run_time = self.run_times[start.job_id]
            if run_time is not None:
                insert_sorted(self.ends, (self.now + run_time, start.job_id))
        return made

    def next_event_at(self) -> float | None:
        """When a job ends or may be tried again; None when nothing more is known to happen."""
        times = [queue[0][0] for queue in (self.ends, self.state.delayed) if queue]
        return max(self.now, min(times)) if times else None

    def advance(self, until: float) -> None:
        """Let the time pass, and end what ends in it."""
        self.now = until
        while self.ends and self.ends[0][0] <= until:
            _, job_id = self.ends.pop(0)
            for change in end_job(self.state, self.state.jobs[job_id], COMPLETED, until):
                apply(self.state, change)
            apply(self.state, JobsRemoved((job_id,)))
            self.ended_at[job_id] = until
        while self.state.delayed and self.state.delayed[0][0] <= until:
            apply(self.state, JobChanged(self.state.delayed[0][1], {"retry_at": None}))

    def run(self, most_steps: int = UNLIMITED) -> None:
        """Until nothing more happens, or for so many steps."""
        for _ in range(most_steps):
            self.start_jobs()
            upcoming = self.next_event_at()
            if upcoming is None:
                return
            self.advance(upcoming)


MAX_REPLAY_STEPS = 500
MAX_REPLAY_JOBS = 1000
ESTIMATE_SPREAD = 0.2           # of the wait: estimates that depend more than that on jobs of unknown run time are not given
OVERDUE = 0.25                  # of the run time that was known: a job that is over it by more ends nobody knows when


def estimate_starts(jobs: Iterable[Job], groups: Iterable[Group], run_times: Mapping[str, float | None], gpus: Sequence[Gpu],
                    config: Config, now: float, nodes: Sequence[NodeView] = ()) -> dict[str, float]:
    """{pending job: when it will start, UTC epoch seconds}, for those of which that can be told.

    `jobs` are the running and the first pending ones, in order; `run_times` what each takes in all, None where nobody
    knows.  An estimate is given when it is much the same whether those of unknown run time never end or end at once.
    """
    jobs, groups = list(jobs), list(groups)
    known = {job.id: find_rest(job, run_times.get(job.id), now) for job in jobs}
    latest = replay_starts(jobs, groups, known, gpus, config, now, nodes)
    if None not in known.values():
        return latest
    ending = {job_id: 0.0 if run_time is None else run_time for job_id, run_time in known.items()}
    earliest = replay_starts(jobs, groups, ending, gpus, config, now, nodes)
    middles = {job_id: (at + earliest[job_id]) / 2 for job_id, at in latest.items() if job_id in earliest}
    return {job_id: at for job_id, at in middles.items() if abs(latest[job_id] - earliest[job_id]) <= ESTIMATE_SPREAD * (at - now)}


def find_rest(job: Job, run_time: float | None, now: float) -> float | None:
    """A job's run time in all; one that is a little over what was known is taken to need as much again as it is over."""
    over = find_age(job, now) - run_time if job.status == RUNNING and run_time is not None else 0.0
    if run_time is None or over <= 0:
        return run_time
    return run_time + 2 * over if over <= OVERDUE * run_time else None


def replay_starts(jobs: Iterable[Job], groups: Iterable[Group], run_times: Mapping[str, float | None], gpus: Sequence[Gpu],
                  config: Config, now: float, nodes: Sequence[NodeView]) -> dict[str, float]:
    replay = Replay(gpus, config, now, nodes)
    for group in groups:
        apply(replay.state, GroupChanged(group))
    for job in jobs:
        replay.insert(job, run_times[job.id])
    replay.run(MAX_REPLAY_STEPS)
    return replay.started_at


def know_run_times(jobs: Iterable[Job], finished: Iterable[Job]) -> dict[str, float | None]:
    """{job: how long it will take}: as its submitter expects, or the median of what the same command took, or its group."""
    import statistics
    past: dict[tuple[str, str], list[float]] = {}
    for job in finished:
        if job.status == COMPLETED and job.runtime_seconds is not None:
            past.setdefault(("command", job.command), []).append(job.runtime_seconds)
            if job.group:
                past.setdefault(("group", job.group), []).append(job.runtime_seconds)

    def know(job: Job) -> float | None:
        if job.expected_time is not None:
            return job.expected_time
        known = past.get(("command", job.command)) or past.get(("group", job.group or ""))
        return statistics.median(known[-100:]) if known else None
    return {job.id: know(job) for job in jobs}


# ==== 7. VIEWS ==== values to what people and programs read: JSON of the API, tables, the coloured snapshot

def job_json(job: Job, now: float, node: str | None, position: int | None = None, waiting_for: str | None = None,
             estimated_start: float | None = None) -> dict[str, Any]:
    """A job as the API shows it.  Its environment is never in it."""
    runtime = job.runtime_seconds
    if job.status == RUNNING and job.started_at is not None:
        runtime = max(0.0, now - job.started_at)
    return {
        "id": job.id, "name": job.name, "group": job.group, "user": job.user, "node": node, "command": job.command,
        "cwd": job.cwd,
        "status": job.status, "position": position, "waiting_for": waiting_for, "estimated_start": format_time(estimated_start),
        "priority": job.priority, "gpus": job.gpus, "gpu_ids": job.gpu_ids, "gpu_mem_mib": job.gpu_mem_mib,
        "gpu_index": job.gpu_indices[0] if job.gpu_indices else None, "gpu_indices": job.gpu_indices, "gpu_uuids": job.gpu_uuids,
        "created_at": format_time(job.created_at),
        "started_at": format_time(job.started_at), "finished_at": format_time(job.finished_at),
        "runtime_seconds": None if runtime is None else round(runtime, 3), "exit_code": job.exit_code,
        "signal": job.signal, "cause": job.cause, "cause_line": job.cause_line, "stopped_by": job.stop_by,
        "stopping": job.stop_cause if job.status not in FINAL else None,
        "attempt": job.attempt, "attempts": [attempt_json(attempt) for attempt in read_attempts(job)], "retries": job.retries,
        "retry_at": format_time(job.retry_at), "timeout_seconds": job.timeout_seconds, "expected_time": job.expected_time,
        "after": job.after, "conda": job.conda, "env_digest": job.env_digest,
        "retried_as": job.retried_as, "cuda_arg": job.cuda_arg, "snapshot": job.snapshot, "labels": dict(job.labels),
        "pid": job.pid, "session": job.session, "log_dir": job.log_dir, "tty": job.tty,
        "peak_rss_mib": round_known(job.peak_rss_mib), "cpu_seconds": round_known(job.cpu_seconds),
        "peak_gpu_mem_mib": job.peak_gpu_mem_mib, "mean_gpu_util": round_known(job.mean_gpu_util),
        "notes": job.notes, "status_history": [[status, format_time(at)] for status, at in job.status_history],
        "only_node": job.only_node or (None if job.only_node is None else node), "remote_id": job.remote_id, "slurm_id": job.slurm_id,
        "unknown_since": None}


# What of a job others than its user may see: that it is there, and what it takes.
PUBLIC_JOB_KEYS = ("id", "user", "node", "status", "position", "estimated_start", "priority", "gpus", "gpu_ids", "gpu_mem_mib", "gpu_index",
                   "gpu_indices", "gpu_uuids", "created_at", "started_at", "finished_at", "runtime_seconds", "expected_time",
                   "timeout_seconds")


def hide_private(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job as the API shows it to other users: the rest is null."""
    return {key: fact if key in PUBLIC_JOB_KEYS else None for key, fact in job.items()}


def hide_address(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node as the API shows it to others than the owner: how it is reached is null."""
    shown = ("name", "gpus", "gpu_names", "running_jobs", "is_reachable", "is_leaving", "unknown_since")
    return {key: fact if key in shown else None for key, fact in node.items()}


def submitted_json(job: Mapping[str, Any], nodes: Mapping[str | None, int]) -> dict[str, Any]:
    """A job, as the rest of the API shows it, in the words of /api.  `nodes`: {name: number}."""
    labels = job["labels"] or {}
    return {"job_id": job["id"], "status": job["status"], "node_id": nodes.get(job["node"]), "queue_position": job["position"],
            "created_at": job["created_at"], "started_at": job["started_at"], "finished_at": job["finished_at"],
            "exit_code": job["exit_code"], "cause": job["cause"], "waiting_for": job["waiting_for"], "user_id": job["user"],
            "competition_id": labels.get("competition_id"), "project_id": labels.get("project_id"), "expected_time": job["expected_time"]}


def attempt_json(attempt: Mapping[str, Any]) -> dict[str, Any]:
    return {**attempt, "started_at": format_time(attempt["started_at"]), "finished_at": format_time(attempt["finished_at"]),
            "runtime_seconds": round_known(attempt["runtime_seconds"]), "node": attempt["node"] or None}


def round_known(number: float | None) -> float | None:
    return None if number is None else round(number, 1)


def gpu_json(gpu: Gpu, state: State, config: GpuConfig, trouble: str | None, node: str = "", closed: str | None = None) -> dict[str, Any]:
    """A GPU as GET /status shows it.

    `trouble`: why its machine's readings cannot be relied upon; `closed`: why that gets no job, whatever its GPUs.
    """
    held = [(job, list_shares(job)[job.gpu_uuids.index(gpu.uuid)]) for job in state.running.values() if gpu.uuid in job.gpu_uuids]
    jobs = [job.id for job, _ in held]
    obstacle = find_obstacle(gpu, config, [job for job, _ in held])
    if gpu.taken and not obstacle:
        obstacle = f"runs {format_jobs_there(gpu.taken_by)} of {gpu.node}'s own queue"
    obstacle = obstacle or closed
    foreign = find_foreign(gpu)
    return {
        "index": gpu.index, "node": node, "place": gpu.place, "name": gpu.name, "memory_total": format_gb(gpu.memory_total_mib),
        "memory_used": format_gb(gpu.memory_used_mib), "job_id": jobs[0] if jobs else None, "job_ids": jobs,
        "allocated": (gpu.taken + sum(share for _, share in held)) / 100, "utilization_mean": round_known(gpu.utilization_mean),
        "utilization_peak": round_known(gpu.utilization_peak),
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


def format_snapshot(status: Mapping[str, Any], paint: Paint, width: int = 0) -> str:
    """What `nexus` shows; commands cut at `width` columns, if that is given."""
    paused = "[PAUSED]" if status["is_paused"] else "[RUNNING]"
    queued = f"Queue: {format_count(status['queued_jobs'], 'job')} pending"
    lines = [f"{paint('blue', queued)} {paint('yellow', paused)}",
             paint("white", f"History: {format_count(status['completed_jobs'], 'job')} completed"), ""]
    lines += format_slurm(status["slurm"], paint) if status.get("slurm") else [paint("white", "GPUs:")]
    jobs, gpus = {job["id"]: job for job in status["running_jobs"]}, status["gpu_status"]
    told = format_machines(status, jobs, paint, width) if status["nodes"] else [
        line for gpu in gpus for line in format_gpu(gpu, jobs, paint, width)]
    if status["gpu_trouble"]:
        lines.append(paint("red", status["gpu_trouble"]))
    lines += told or ([] if status["gpu_trouble"] or status.get("slurm") else ["none"])
    shown = {job_id for gpu in status["gpu_status"] for job_id in gpu["job_ids"]}
    unseen = [job for job in jobs.values() if job["id"] not in shown and not job.get("slurm_id")]
    ours = [line for job in jobs.values() if job.get("slurm_id") for line in format_running(job, paint, width)]
    lines += ["", paint("white", "Running there:"), *ours] if ours else []
    for heading, is_there in (("CPU:", True), ("On GPUs that cannot be seen now:", False)):
        running = [line for job in unseen if (not job["gpus"]) == is_there
                   for line in format_running(job, paint, width, bool(status["nodes"]))]
        lines += ["", paint("white", heading), *running] if running else []
    hints = list(status["hints"])
    if status["samples_hint"] and any(gpu["used_by"] for gpu in status["gpu_status"]):
        hints.append(status["samples_hint"])            # whose program it is could be told
    lines += [""] * bool(hints) + [f"hint: {hint}" for hint in hints]
    return "\n".join(lines) + "\n"


def format_machines(status: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]], paint: Paint, width: int) -> list[str]:
    """The GPUs of this machine and of nodes.  Those of one machine of which the same is to be said share a line; of a node that
    gets no jobs there is that, and what runs there.
    """
    import itertools
    lines = []
    for node in status["nodes"]:
        gpus, state = [gpu for gpu in status["gpu_status"] if gpu["node"] == node["name"]], describe_node_state(node)
        if node is not status["nodes"][0] and state != "ok":
            lines.append(paint("red" if node["unknown_since"] else "yellow", f"{node['name']}: {state}"))
            lines += [f"  {node['hint']}"] if node["hint"] else []
            gpus = [gpu for gpu in gpus if gpu["job_ids"]]
        for _, group in itertools.groupby(gpus, lambda gpu: gpu["uuid"] if gpu["job_ids"] else format_gpu(gpu, {}, paint, 0, "GPU")):
            alike = list(group)
            machine = alike[0]["place"].rpartition(":")
            label = f"GPUs {''.join(machine[:2])}{format_ranges([gpu['index'] for gpu in alike])}" if alike[1:] else ""
            lines += format_gpu(alike[0], jobs, paint, width, label)
    return lines


def describe_node_state(node: Mapping[str, Any]) -> str:
    why = format_line(node["trouble"] or "")
    if node["unknown_since"]:
        return f"unknown since {local_time(node['unknown_since'], '%m-%d %H:%M')}{why and f': {why}'}"
    return "is being removed: it gets no more jobs" if node["is_leaving"] else why or "ok"


def format_gpu(gpu: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]], paint: Paint, width: int = 0, label: str = "") -> list[str]:
    """`label`: for several of which the same is to be said."""
    what = ", ".join(part for part in (format_line(gpu["name"]), gpu["memory_total"]) if part)
    header = paint("white", f"{label or 'GPU ' + gpu['place']} ({what}):")
    running = [line for job_id in gpu["job_ids"] if job_id in jobs for line in format_running(jobs[job_id], paint, width)]
    if running:
        note = paint("red", gpu["fault"]) if gpu["fault"] else paint("yellow", "[PAUSED]") if gpu["is_paused"] else ""
        return [f"{header} {note}".rstrip(), *running]
    if gpu["is_available"]:
        return [f"{header} {paint('green', 'Available')}"]
    if gpu["used_by"]:
        return [f"{header} In use by {gpu['used_by']}"]
    why = str(gpu["unavailable"] or "is not available")
    why = why[3:] if why.startswith("is ") else why
    return [f"{header} {paint('red' if gpu['fault'] else 'yellow', why[:1].upper() + why[1:])}"]


def format_running(job: Mapping[str, Any], paint: Paint, width: int, has_node: bool = False) -> list[str]:
    """`has_node`: its machine is to be told."""
    runtime = format_duration(job["runtime_seconds"] or 0)
    stopping = f" (stopping: {job['stopping']})" if job["stopping"] else ""
    if job["unknown_since"]:
        stopping += paint("red", f" unknown since {local_time(job['unknown_since'], '%m-%d %H:%M')}")
    share = [f"  GPUs: {format_number(job['gpus'])}"] if job["gpus"] % 1 else []
    return [f"  Job ID: {paint('magenta', job['id'])}{stopping}", *([f"  Node: {job['node']}"] if has_node else []), *share,
            f"  Command: {paint('bright', format_line(name_or_command(job), width and max(20, width - 11)))}",
            *([f"  Slurm: {job['slurm_id']} on {job['node']}"] if job.get("slurm_id") else []),
            f"  Runtime: {paint('cyan', runtime)}", f"  Started: {paint('cyan', local_time(job['started_at']))}"]


MAX_NODES_SHOWN = 40


def format_slurm(slurm: Mapping[str, Any], paint: Paint) -> list[str]:
    """Of `nexus`: the cluster's partitions, and its nodes with GPUs."""
    submitted = slurm["handed_jobs"] + slurm["running_jobs"]
    lines = [paint("white", f"Slurm ({slurm['cluster']}):" if slurm["cluster"] else "Slurm:")
             + f" {format_count(submitted, 'job')} of nexus there, {slurm['running_jobs']} running"]
    if slurm["trouble"]:
        lines.append(paint("red", format_line(slurm["trouble"])))
    for partition in slurm["partitions"]:
        nodes = [node for node in slurm["nodes"] if partition["name"] in node["partitions"]]
        state, gpus = partition["state"], format_count(sum(node["gpus"] for node in nodes), "GPU")
        lines.append(f"Partition {partition['name']}{' (default)' if partition['is_default'] else ''}: "
                     + paint("green" if state == "up" else "red", state)
                     + f", {sum(node['gpus_used'] for node in nodes)} of {gpus} in use, time limit {partition['time_limit']}")
    shown = [node for node in slurm["nodes"] if node["gpus"]]
    for node in shown[:MAX_NODES_SHOWN]:
        reason = f" ({format_line(node['reason'])})" if node["reason"] not in ("", "none") else ""
        lines.append(f"  Node {node['name']}: {node['gpus_used']} of {format_count(node['gpus'], 'GPU')} in use, {node['state']}{reason}")
    return lines + ([f"  and {len(shown) - MAX_NODES_SHOWN} more: nexus status --json"] if shown[MAX_NODES_SHOWN:] else [])


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
        allocated = f"{gpu['allocated'] * 100:.0f}% allocated"
        more = [f"memory {gpu['memory_used']} of {gpu['memory_total']}" if gpu["memory_used"] else "memory unknown",
                *([f"{gpu['utilization']:.0f}% busy"] if gpu["utilization"] is not None else []),
                *([f"{gpu['temperature']:.0f}°C"] if gpu["temperature"] is not None else []),
                *([f"{gpu['power_watts']:.0f} W"] if gpu["power_watts"] is not None else [])]
        why = "" if gpu["job_ids"] or gpu["is_paused"] or not gpu["unavailable"] else f"; {gpu['unavailable']}"
        paused = paint("yellow", "PAUSED") + (f", {allocated}" if gpu["job_ids"] else "")
        lines.append(f"  GPU {gpu['place']}: {paused if gpu['is_paused'] else allocated}"
                     f" ({', '.join(more)}){why}")
    if status["nodes"]:
        lines += ["", paint("white", "Nodes:"), *(
            f"  {node['name']}: {format_count(node['gpus'], 'GPU')}, {format_count(node['running_jobs'], 'job')}, "
            + paint("red" if node["unknown_since"] else "bright", describe_node_state(node)) for node in status["nodes"])]
    host = status["host"]
    lines += ["", f"Host: {host['name']}, CPU {format_known(host['cpu_percent'], '%')}, memory "
              f"{format_known(host['memory_used_gb'], 'GB')} of {format_known(host['memory_total_gb'], 'GB')} in use", "",
              f"Active Jobs: {len(status['running_jobs'])}"]
    for job in status["running_jobs"]:
        memory = f", memory {format_known(job['rss_mib'] and job['rss_mib'] / 1024, 'GB')}, CPU {format_known(job['cpu_percent'], '%')}"
        lines.append(f"  {paint('magenta', job['id'])}: {paint('bright', format_line(name_or_command(job)))}"
                     f" ({job['node'] + ', ' if status['nodes'] else ''}GPUs: [{format_indices(job['gpu_indices'])}]{memory})")
    lines += ["", f"Health: {paint('green', 'HEALTHY') if health['is_healthy'] else paint('red', 'UNHEALTHY')}"]
    lines += [f"hint: {hint}" for hint in [*status["hints"], status["samples_hint"]] if hint]
    return "\n".join(lines) + "\n"


def format_known(number: float | None, unit: str) -> str:
    return "unknown" if number is None else f"{number:.1f}".rstrip("0").rstrip(".") + unit


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str], paint: Paint,
                 width: int) -> str:
    """Columns padded to their widest cell; the last takes what `width` leaves (0: all it needs)."""
    clean = [[format_line(cell) for cell in row] for row in rows]
    widths = [max(map(count_columns, column)) for column in zip(headings, *clean)]
    used = sum(widths[:-1]) + 2 * (len(widths) - 1)
    last = max(20, width - used) if width else 0
    lines = []
    for number, row in enumerate([list(headings), *clean]):
        cells = [cell + " " * (size - count_columns(cell)) for cell, size in zip(row[:-1], widths)] + [format_line(row[-1], last)]
        painted = [paint("white", cell) if not number else paint(colour, cell) if colour else cell
                   for cell, colour in zip(cells, colours)]
        lines.append("  ".join(painted).rstrip())
    return "\n".join(lines) + "\n"


def format_queue(jobs: Sequence[Mapping[str, Any]], paint: Paint, width: int) -> str:
    is_shared, is_bound = has_users(jobs), any(job["only_node"] for job in jobs)
    rows = [[job["id"], format_priority(job["priority"]), *([job["only_node"] or "any"] * is_bound), format_number(job["gpus"]),
             local_time(job["created_at"], "%m-%d %H:%M"), local_time(job["estimated_start"], "%m-%d %H:%M"), *([job["user"]] * is_shared),
             name_or_command(job), job["waiting_for"] or ""] for job in jobs]
    headings = ("ID", "PRIORITY", *(["NODE"] * is_bound), "GPUS", "ADDED", "STARTS", *(["USER"] * is_shared), "COMMAND")
    colours = ("magenta", "", *([""] * is_bound), "", "cyan", "cyan", *([""] * is_shared), "bright")
    if width:                           # on a terminal the reason stands below, once for those that wait for the same
        import textwrap
        table = format_table(headings, [row[:-1] for row in rows], colours, paint, width).splitlines()
        lines, last = table[:1], ""
        for line, row in zip(table[1:], rows):
            lines.append(line)
            if row[-1] and row[-1] != last:
                lines += textwrap.wrap(format_line(row[-1]), max(20, width), initial_indent="     ", subsequent_indent="     ")
            last = row[-1]
        return "\n".join(lines) + "\n"
    return format_table((*headings, "WAITING FOR"), rows, (*colours, ""), paint, 0)


def has_users(jobs: Iterable[Mapping[str, Any]]) -> bool:
    return len({job["user"] for job in jobs}) > 1


def has_nodes(jobs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether their machines need be told: some ran, or may run, on another than this."""
    return any(job["node"] is None or job["remote_id"] or job["only_node"] for job in jobs)


def name_or_command(job: Mapping[str, Any]) -> str:
    if job["command"] is None:                  # as users' tokens are told of others' jobs
        return f"({job['user']}'s)"
    return f"{job['name']}: {job['command']}" if job["name"] else str(job["command"])


def format_priority(priority: int) -> str:
    return next((name for name, number in PRIORITIES.items() if number == priority), str(priority))


def format_jobs(jobs: Sequence[Mapping[str, Any]], paint: Paint, width: int) -> str:
    is_shared, is_apart = has_users(jobs), has_nodes(jobs)
    rows = [[job["id"], job["status"], *([job["node"] or "-"] * is_apart), format_indices(job["gpu_indices"]) or "-",
             "unknown" if job["unknown_since"] else format_outcome(job),
             "-" if job["runtime_seconds"] is None else format_duration(job["runtime_seconds"]),
             local_time(job["started_at"], "%m-%d %H:%M"), *([job["user"]] * is_shared), name_or_command(job)] for job in jobs]
    table = format_table(
        ("ID", "STATUS", *(["NODE"] * is_apart), "GPU", "RESULT", "RUNTIME", "STARTED", *(["USER"] * is_shared), "COMMAND"), rows,
        ("magenta", "", *([""] * is_apart), "", "", "cyan", "cyan", *([""] * is_shared), "bright"), paint, width)
    if not width:
        return table
    lines = table.splitlines()                  # on a terminal, what a failed one said last stands below it
    return "\n".join([lines[0], *(line for row, job in zip(lines[1:], jobs) for line in [row, *(
        ["     " + format_line(job["cause_line"], max(20, width - 5))] if job["cause_line"] else [])])]) + "\n"


SIGNAL_NAMES = {1: "SIGHUP", 2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE",
                15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ"}


def format_outcome(job: Mapping[str, Any]) -> str:
    """`exit 0`, `exit 3`, `SIGSEGV`, `killed`, `launch` ... in a word or two."""
    if job["cause"] == "signal" and job["signal"]:
        return SIGNAL_NAMES.get(job["signal"], f"signal {job['signal']}")
    if job["status"] == CANCELLED and not job["started_at"] and job["cause"] == "killed":
        return "removed"
    if job["cause"] not in (None, "exit"):
        return str(job["cause"])
    return "-" if job["exit_code"] is None else f"exit {job['exit_code']}"


def format_job(job: Mapping[str, Any], paint: Paint) -> str:
    """`nexus show ID`: every fact that is known, a line each."""
    lines = [f"{paint('white', 'Job ' + job['id'])}: {job['status']}"
             + (f" ({format_outcome(job)})" if job["status"] in FINAL else "")]
    for key, fact in job.items():
        if key in ("id", "status", "status_history") or fact is None or fact is False or fact in ([], (), "", {}):
            continue                    # 0 is a fact
        if (key, fact) == ("retries", 0):
            continue
        if key == "attempts":
            shown = "; ".join(f"{attempt['attempt']} {attempt['cause']}" + (
                f" {attempt['exit_code']}" if attempt["cause"] == "exit" else "") + (
                f" on GPU {format_indices(attempt['gpu_indices'])}" if attempt["gpu_indices"] else "") + (
                f" of {attempt['node']}" if attempt["node"] else "") for attempt in fact)
            key = "failed attempts"
        elif key == "unknown_since":
            shown = paint("red", local_time(fact, "%Y-%m-%d %H:%M:%S"))
        elif key.endswith("_at") or key == "estimated_start":
            shown = paint("cyan", f"{local_time(fact, '%Y-%m-%d %H:%M:%S')}")
        elif key == "runtime_seconds":
            shown = paint("cyan", format_duration(fact))
        elif key == "command":
            shown = paint("bright", format_line(fact))
        elif isinstance(fact, (list, tuple)):
            shown = ", ".join(map(str, fact))
        elif isinstance(fact, dict):
            shown = ", ".join(f"{name} {format_line(str(text))}" for name, text in fact.items())
        else:
            shown = format_line(format_priority(fact) if key == "priority" else str(fact))
        lines.append(f"  {'runtime' if key == 'runtime_seconds' else key}: {shown}")
    history = ", ".join(f"{status} {local_time(at, '%H:%M:%S')}" for status, at in job["status_history"])
    return "\n".join([*lines, f"  history: {history}"]) + "\n"


def format_why(told: Mapping[str, Any], paint: Paint) -> str:
    """`nexus why ID`: the decision, and what stands behind it GPU by GPU."""
    import itertools
    lines = [f"{paint('white', 'Job ' + told['id'])} {'waits' if told['status'] == PENDING else 'is ' + told['status']}: "
             f"{format_line(told['why'])}"]
    lines += [f"  {format_line(fact)}" for fact in told["facts"]]
    for _, group in itertools.groupby(told["gpus"], lambda gpu: (gpu["node"], gpu["verdict"], ":" in gpu["place"] or gpu["index"])):
        alike = list(group)
        machine = "".join(alike[0]["place"].rpartition(":")[:2])
        lines.append(f"  GPU{'s' if alike[1:] else ''} {machine}{format_ranges([gpu['index'] for gpu in alike])}: "
                     + format_line(alike[0]["verdict"] or paint("green", f"it could have {'any of these' if alike[1:] else 'this one'}")))
    return "\n".join(lines) + "\n"


def make_metrics(status: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `nexus metrics` tells: run times in seconds of the finished jobs that ran, utilization in percent over the last hour."""
    import statistics
    run_times = [job["runtime_seconds"] for job in jobs if job["started_at"] and job["runtime_seconds"] is not None]
    return {
        "total_jobs": len(jobs), "mean_runtime_seconds": round(statistics.mean(run_times), 3) if run_times else None,
        "median_runtime_seconds": round(statistics.median(run_times), 3) if run_times else None,
        "by_status": {status: sum(job["status"] == status for job in jobs) for status in FINAL},
        "causes": {cause: sum(job["cause"] == cause for job in jobs) for cause in sorted({job["cause"] for job in jobs if job["cause"]})},
        "gpus": [{key: gpu[key] for key in ("index", "node", "place", "name", "utilization_mean", "utilization_peak", "allocated",
                                            "is_paused")} for gpu in status["gpu_status"]]}


def format_metrics(metrics: Mapping[str, Any], paint: Paint) -> str:
    def seconds(key: str) -> str:
        return "unknown" if metrics[key] is None else f"{metrics[key]:.1f}s"
    kept = ", ".join(f"{count} {word}" for word, count in metrics["by_status"].items() if count)
    lines = [paint("white", "Performance Metrics"), "=" * 30, f"Total Jobs: {metrics['total_jobs']}" + (f" ({kept})" if kept else ""),
             f"Avg Execution Time: {seconds('mean_runtime_seconds')}", f"Median Execution Time: {seconds('median_runtime_seconds')}"]
    if metrics["causes"]:
        lines.append(f"Failures: {', '.join(f'{count} {cause}' for cause, count in metrics['causes'].items())}")
    lines += ["", paint("white", "GPU Utilization (last hour):")]
    for gpu in metrics["gpus"]:
        mean, peak = (f"{gpu[key]:.1f}%" if gpu[key] is not None else "unknown" for key in ("utilization_mean", "utilization_peak"))
        lines.append(f"  GPU {gpu['place']}: {mean} avg, {peak} peak" + (f" ({paint('yellow', 'PAUSED')})" if gpu["is_paused"] else ""))
    return "\n".join(lines + ([] if metrics["gpus"] else ["  none"])) + "\n"


# The API described, as OpenAPI 3.1.  What is sent and answered is written as shapes: a type of TYPES or another shape's name,
# `[]` behind it for a list of such, `?` where null may stand; a key with `?` may be missing.

TYPES: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "string"}, "whole": {"type": "integer"}, "number": {"type": "number"}, "flag": {"type": "boolean"},
    "any": {}, "time": {"type": "string", "format": "date-time"}, "id": {"type": "string", "pattern": f"^{ID_PATTERN.pattern}$"},
    "status": {"type": "string", "enum": STATUSES}, "move": {"type": "array", "prefixItems": [{"enum": STATUSES}, {
        "type": ["string", "null"], "format": "date-time"}], "minItems": 2, "maxItems": 2},
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
}

JOB_SHAPE = {                               # what another user may not see of it is null
    "id": "id", "name": "text?", "group": "text?", "user": "text", "node": "text?", "command": "text", "cwd": "text", "status": "status",
    "position": "whole?", "waiting_for": "text?", "estimated_start": "time?", "priority": "whole", "gpus": "number", "gpu_ids": "whole[]?",
    "gpu_mem_mib": "whole?", "gpu_index": "whole?", "gpu_indices": "whole[]", "gpu_uuids": "text[]", "created_at": "time",
    "started_at": "time?", "finished_at": "time?", "runtime_seconds": "number?", "exit_code": "whole?", "signal": "whole?",
    "cause": "text?", "cause_line": "text?", "stopped_by": "text?", "stopping": "text?", "attempt": "whole", "attempts": "Attempt[]",
    "retries": "whole", "retry_at": "time?", "timeout_seconds": "number?", "expected_time": "number?", "after": "id[]", "conda": "text?",
    "env_digest": "text?", "retried_as": "id?", "cuda_arg": "flag", "snapshot": "text?", "labels": "labels", "pid": "whole?",
    "session": "text?", "log_dir": "text?", "tty": "flag", "peak_rss_mib": "number?", "cpu_seconds": "number?",
    "peak_gpu_mem_mib": "number?", "mean_gpu_util": "number?", "notes": "text[]", "status_history": "move[]", "only_node": "text?",
    "remote_id": "id?", "unknown_since": "time?", "slurm_id": "text?", "rss_mib?": "number?", "cpu_percent?": "number?"}
RUNNING_JOB_KEYS = ("id", "name", "group", "user", "node", "command", "status", "gpus", "gpu_indices", "started_at", "attempt",
                    "runtime_seconds", "stopping", "unknown_since", "slurm_id")

SHAPES: dict[str, Mapping[str, str]] = {
    "Error": {"error": "text", "message": "text", "hint": "text"},
    "Info": {"name": "text", "version": "text", "user": "text", "hash?": "text", "pid?": "whole", "home?": "text",
             "uptime_seconds?": "number", "calls?": "text[]"},
    "Status": {"gpu_status": "Gpu[]", "is_owner": "flag", "is_paused": "flag", "queued_jobs": "whole", "completed_jobs": "whole",
               "running_jobs": "RunningJob[]", "queued_by_priority": "Bands", "gpu_trouble": "text?", "slurm": "Slurm?", "hints": "text[]",
               "samples_hint": "text?", "version": "text", "hash": "text", "pid": "whole", "user": "text", "home": "text?",
               "uptime_seconds": "number", "host": "Host", "nodes": "NodeInfo[]"},
    "Slurm": {"cluster": "text?", "trouble": "text?", "handed_jobs": "whole", "running_jobs": "whole", "max_submitted": "whole",
              "partitions": "SlurmPartition[]", "nodes": "SlurmNode[]"},
    "SlurmPartition": {"name": "text", "state": "text", "is_default": "flag", "time_limit": "text", "nodes": "text"},
    "SlurmNode": {"name": "text", "state": "text", "gpus": "whole", "gpus_used": "whole", "partitions": "text[]", "reason": "text"},
    "Bands": {"high": "whole", "normal": "whole", "low": "whole"},
    "Host": {"name": "text", "cpu_percent": "number?", "memory_used_gb": "number?", "memory_total_gb": "number?"},
    "NodeInfo": {"name": "text", "gpus": "whole", "gpu_names": "text[]", "running_jobs": "whole", "host": "text?", "user": "text?",
                 "port": "whole?", "jump": "text?", "identity_file": "text?", "is_reachable": "flag", "is_leaving": "flag",
                 "trouble": "text?", "hint": "text?", "unknown_since": "time?", "python": "text?", "path": "text?", "home": "text?",
                 "control": "text?"},
    "Gpu": {"index": "whole", "node": "text", "place": "text", "name": "text", "memory_total": "text?", "memory_used": "text?",
            "job_id": "id?", "job_ids": "id[]", "allocated": "number", "utilization_mean": "number?", "utilization_peak": "number?",
            "uuid": "text", "memory_total_mib": "number?", "memory_used_mib": "number?", "utilization": "number?", "temperature": "number?",
            "power_watts": "number?", "is_paused": "flag", "is_mig": "flag", "is_available": "flag", "fault": "text?",
            "unavailable": "text?", "used_by": "text?", "processes": "Process[]"},
    "Process": {"pid": "whole", "user": "text?", "name": "text?", "memory_mib": "number?", "job_id": "id?"},
    "GpuHistory": {"index": "whole", "node": "text", "uuid": "text", "interval_seconds": "number", "memory_used_mib": "number?[]",
                   "utilization": "number?[]"},
    "Job": {key: shape if key in PUBLIC_JOB_KEYS else f"{shape.rstrip('?')}?" for key, shape in JOB_SHAPE.items()},
    "RunningJob": {key: f"{JOB_SHAPE[key].rstrip('?')}?" if key not in PUBLIC_JOB_KEYS else JOB_SHAPE[key] for key in RUNNING_JOB_KEYS} | {
        "rss_mib": "number?", "cpu_percent": "number?"},
    "Attempt": {"attempt": "whole", "started_at": "time?", "finished_at": "time?", "runtime_seconds": "number?", "exit_code": "whole?",
                "cause": "text?", "gpu_indices": "whole[]", "node": "text?"},
    "Added": {"id?": "id", "ids?": "id[]", "known?": "id[]", "warning?": "text", "dry_run?": "flag", "jobs?": "any[]"},
    "Retried": {"id": "id", "dependents?": "id[]"},
    "Why": {"id": "id", "status": "status", "why": "text", "facts": "text[]", "gpus": "Verdict[]"},
    "Verdict": {"node": "text", "place": "text", "index": "whole", "verdict": "text?"},
    "FormAdded": {"job_id": "id", "node_id": "whole?", "status": "status", "queue_position": "whole"},
    "Submitted": {"job_id": "id", "status": "status", "node_id": "whole?", "queue_position": "whole?", "created_at": "time",
                  "started_at": "time?", "finished_at": "time?", "exit_code": "whole?", "cause": "text?", "waiting_for": "text?",
                  "user_id": "text", "competition_id": "text?", "project_id": "text?", "expected_time": "number?"},
    "Results": {"job_id": "id", "status": "status", "stdout": "text", "stderr": "text", "exit_code": "whole?", "cause": "text?",
                "cause_line": "text?", "note?": "text"},
    "Cancelled": {"job_id": "id", "status": "status"},
    "Node": {"node_id": "whole", "name": "text", "gpus": "whole", "free_gpus": "whole", "running_jobs": "whole", "pending_jobs": "whole",
             "queue_seconds": "number?", "is_healthy": "flag"},
    "SyncAsked": {"head": "text", "since": "whole?", "logs": "any", "wait_seconds": "number"},
    "Orders": {"head": "text", "submit": "any[]", "stop": "any[]", "withdraw": "any[]", "collected": "any[]"},
    "Health": {"is_healthy": "flag", "checks": "Check[]"},
    "Check": {"name": "text", "is_ok": "flag", "reading": "text"},
}

LINE = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"\S"}
SECONDS = {"type": "number", "minimum": 0, "maximum": 31536000}
PRIORITY = {"anyOf": [{"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY}, {
    "type": "string", "pattern": r"^([Hh][Ii][Gg][Hh]|[Nn][Oo][Rr][Mm][Aa][Ll]|[Ll][Oo][Ww]|-?[0-9]{1,7})$"}]}
PATH = {"type": "string", "pattern": "^/", "maxLength": 4095}
VARIABLES = {"type": "object", "additionalProperties": {"type": "string"}}
COMMAND = {"type": "string", "minLength": 1, "maxLength": MAX_ARGUMENT_BYTES, "pattern": r"\S", "examples": ["python train.py"]}

# What each key of SUBMISSION_PARSERS takes, and what it means
SUBMISSION_SCHEMAS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "command": (COMMAND, "what bash runs"), "id": (TYPES["id"], "chosen by the caller: sent again with the same content, it adds nothing"),
    "name": (LINE, "for people"), "cwd": (PATH, "where it runs; the home directory if not said"),
    "env": (VARIABLES, "variables, put on top of the service's environment"),
    "environment": (VARIABLES, "the whole environment instead; for the owner alone"),
    "gpus": ({"type": "number", "minimum": 0, "maximum": 1024}, "how many GPUs, with two decimals: 0.5 is half of one, 0 none"),
    "gpu_ids": ({"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "minItems": 1}, {
        "type": "string", "pattern": r"^[\d\s,-]+$"}]}, "the only GPUs it may have, by index: [0, 1] or \"0-1\""),
    "gpu_mem_mib": ({"type": "integer", "minimum": 1, "maximum": 100000000}, "the memory it needs on each of its GPUs"),
    "node": ({"type": "string", "pattern": r"^\w[\w.-]{0,62}$"}, "the only machine it may run on, by name"),
    "priority": (PRIORITY, "high, normal, low or a number: lower runs first"),
    "group": (LINE, "jobs that are paused, listed, killed together"),
    "max_concurrent": ({"type": "integer", "minimum": 1, "maximum": 100000}, "how many of its group run at once"),
    "after": ({"anyOf": [{"type": "array", "items": TYPES["id"]}, {"type": "string"}]}, "it starts when these have completed"),
    "retries": ({"type": "integer", "minimum": 0, "maximum": 1000}, "further attempts when one fails"),
    "timeout_seconds": (SECONDS, "it is stopped after so long; 0 = never"), "expected_time": (SECONDS, "how long it will take"),
    "conda": ({**LINE, "pattern": "^[^-]"}, "the conda environment to activate, by name or path"),
    "llm": (LINE, "the model whose share of a GPU llm_config.json tells"),
    "cuda_arg": ({"type": "boolean"}, "--cuda in the command is set to the GPUs' numbers"),
    "unique": ({"type": "boolean"}, "add nothing when the same is pending, running or completed"),
    "snapshot": ({"type": "string", "pattern": "^[0-9a-f]{40,64}$"}, "the commit in whose checkout it runs"),
    "snapshot_repo": (PATH, "the work tree of snapshot"), "tty": ({"type": "boolean"}, "its stdout is a terminal"),
    "umask": ({"type": "integer", "minimum": 0, "maximum": 511}, "its umask"),
    "limits": ({"type": "object", "propertyNames": {"enum": LIMITS}, "additionalProperties": {
        "type": "array", "items": {"type": "integer", "minimum": -1, "maximum": 2**63}, "minItems": 2, "maxItems": 2}},
        "resource limits: {name: [soft, hard]}, -1 = unlimited"),
}

COUNT = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
FLAG = {"type": "string", "pattern": "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|[Yy][Ee][Ss]|[Nn][Oo]|0|1|)$", "examples": ["true"]}

# Those of paths, queries and headers
PARAMETERS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "id": ({**TYPES["id"], "examples": ["abc"]}, "the job's id"),
    "index": ({"type": "string", "pattern": r"^(\w[\w.-]{0,62}:)?[0-9]{1,4}$", "examples": ["0"]},
              "the GPU's index; of a node, with its name: n1:0"),
    "name": ({"type": "string", "examples": ["n1"]}, "the node's name"), "force": (FLAG, "forget it at once: its jobs are given up"),
    "status": (TYPES["status"], "jobs of this status alone"), "user": (TYPES["text"], "jobs of this user alone"),
    "user_id": (TYPES["text"], "jobs of this user alone"),
    "group": (TYPES["text"], "of this group alone"), "limit": (COUNT, "so many at most"),
    "follow": (FLAG, "go on as it grows, until the end"), "tail": (COUNT, "begin so many lines before the end"),
    "stream": ({"type": "string", "enum": ["stdout", "stderr", "both"]}, "which of the two files"),
    "offset": (COUNT, "nothing before this byte of a file, unless that is shorter: a new one; the header Log-Offset says where it begins"),
    "since": (COUNT, "events after this number"), "Last-Event-ID": (COUNT, "the same, as browsers send it; it wins"),
    "Idempotency-Key": ({"type": "string", "pattern": "^[\\x21-\\x7e]{8,128}$", "examples": ["0f0bd5a2-4d1e"]},
                        "a random one for each submission: the same again adds nothing twice, and another with it is refused"),
}

ERROR_MEANINGS = {
    "usage": "malformed, or more than there is", "unauthorized": "no token where one is needed, or a wrong one",
    "forbidden": "not yours, or a Host or Origin by which nexus may not be called", "not_found": "there is no such thing",
    "conflict": "not in its present state", "queue_full": "no room for further jobs",
    "unavailable": "not now: the disk refuses, or the service has just begun",
    "method_not_allowed": "not a method of this path", "length_required": "a body needs a Content-Length",
    "too_large": "the body is too large", "unsupported_media_type": "the body is of another type", "internal": "a fault of nexus itself",
}

API_DESCRIPTION = """A job queue for the GPUs of one machine, and of others that it reaches by ssh.

Whoever calls from this machine as the owner of the service needs no token; everybody else sends one as
`Authorization: Bearer TOKEN`.  The owner's may do all; a user's may submit, read, and cancel its own jobs, and sees of
others' jobs only that they are there: the rest is null.  Every refusal is the object Error.

GET /events is a stream of server-sent events: `job` (a Job that has changed), `removed` (`{ids}` that are kept no more), `gpus` (those
of all machines, as in /status), `queue` (what has changed of /status), `group` (`{name, limit, hold}`, for the owner), and `reset` when
some were missed: ask for all anew.

The machines under /api have numbers: 0 is this one, then come the nodes in the order of GET /nodes; null is none yet, or one that
is a node no more.  Jobs for any machine wait in the queue of number 0, those for a node alone in that node's."""


def make_schema(shape: str) -> dict[str, Any]:
    """The JSON Schema of a shape."""
    if shape.endswith("?"):
        made = make_schema(shape[:-1])
        return {**made, "type": [made["type"], "null"]} if isinstance(made.get("type"), str) and "enum" not in made else {
            "anyOf": [made, {"type": "null"}]}
    if shape.endswith("[]"):
        return {"type": "array", "items": make_schema(shape[:-2])}
    return dict(TYPES[shape]) if shape in TYPES else {"$ref": f"#/components/schemas/{shape}"}


def make_object_schema(keys: Mapping[str, str]) -> dict[str, Any]:
    return {"type": "object", "required": [key for key in keys if not key.endswith("?")],
            "properties": {key.rstrip("?"): make_schema(shape) for key, shape in keys.items()}}


def make_submission_schemas() -> dict[str, Any]:
    """What POST /queue and its like take."""
    keys = {key: {**(schema if key == "command" else {"anyOf": [schema, {"type": "null"}]}), "description": meaning}
            for key, (schema, meaning) in SUBMISSION_SCHEMAS.items()}
    dry_run = {"type": "boolean", "description": "check, and add nothing"}
    several = {key: schema for key, schema in keys.items() if key not in ("command", "id")}
    example = {"command": "python train.py", "gpus": 1}
    job = {"type": "object", "required": ["command"], "additionalProperties": False, "examples": [example]}
    return {
        "Submission": {**job, "properties": keys},
        "Submissions": {"anyOf": [
            {**job, "properties": {**keys, "dry_run": dry_run}},
            {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Submission"}},
            {"type": "object", "required": ["commands"], "additionalProperties": False, "properties": {
                "commands": {"type": "array", "minItems": 1, "items": COMMAND}, **several, "dry_run": dry_run}}],
            "examples": [example]},
        "Move": {"type": "object", "minProperties": 1, "additionalProperties": False, "examples": [{"position": 0}], "properties": {
            "priority": PRIORITY, "position": {"type": "integer", "minimum": 0, "maximum": 2**53, "description": "0 is the first"}}},
        "NodeAdded": {**job, "required": ["host"], "examples": [{"host": "10.0.0.5"}], "properties": {
            **{key: {"type": "string", "pattern": rf"^(?:{pattern})$"} for key, pattern in NODE_PATTERNS.items()},
            "port": {"type": "integer", "minimum": 0, "maximum": 65535}}},
        "Form": {"type": "object", "required": list(FORM_FIELDS), "additionalProperties": False, "properties": {
            "code": {"type": "string", "contentMediaType": "application/octet-stream", "minLength": 1, "description": "the script"},
            "config_file": {"type": "string", "contentMediaType": "application/yaml", "minLength": 1, "examples": ["expected_time: 10\n"],
                            "description": f"lines like expected_time: 10; its keys are {', '.join(SUBMIT_PARSERS)}"}}}}


def make_openapi(routes: Sequence[Any], version: str) -> dict[str, Any]:
    """The document of the calls in ROUTES."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.pattern, {})[route.method.lower()] = make_operation(route)
    schemas = {**{name: make_object_schema(keys) for name, keys in SHAPES.items()}, **make_submission_schemas()}
    schemas["Error"]["properties"]["error"] = {"type": "string", "enum": list(KINDS)}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "openapi": "3.1.0", "info": {"title": "nexus", "version": version, "description": API_DESCRIPTION, "license": {"name": "MIT"}},
        "servers": [{"url": "/"}], "paths": paths,
        "components": {
            "schemas": schemas, "responses": {kind: {"description": ERROR_MEANINGS.get(kind, kind), "content": error} for kind in KINDS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": "a token of nexus token create"}}}}


def make_operation(route: Any) -> dict[str, Any]:
    has_token = route.access != "anyone" or "unauthorized" in route.errors
    who = {"anyone": "", "user": "", "owner": "  For the owner alone."}[route.access]
    places = {"path": re.findall(r"\{(\w+)\}", route.pattern), "query": route.query, "header": route.headers}
    errors = {str(KINDS[kind][1]): {"$ref": f"#/components/responses/{kind}"} for kind in list_errors(route)}
    made: dict[str, Any] = {
        "operationId": route.handler, "summary": route.summary, "description": f"{route.summary[:1].upper()}{route.summary[1:]}.{who}",
        "tags": [route.pattern.split("/")[1] or "nexus"], "security": [{}, {"bearer": []}] if has_token else [],
        "parameters": [make_parameter(name, place) for place, names in places.items() for name in names],
        "responses": {**make_answers(route), **errors}}
    if route.body:
        kind, _, name = route.body.rpartition(" ")
        made["requestBody"] = {"required": True, "content": {kind or "application/json": {"schema": make_schema(name)}}}
    return made


def make_parameter(name: str, place: str) -> dict[str, Any]:
    schema, meaning = PARAMETERS[name]
    return {"name": name, "in": place, "required": place == "path", "description": meaning, "schema": dict(schema)}


def make_answers(route: Any) -> dict[str, Any]:
    """What it answers when all is well: {status: what}."""
    if not route.answer:
        return {"204": {"description": "done"}}
    kinds = {part if "/" in part else "application/json": {"type": "string"} if "/" in part else make_schema(part)
             for part in route.answer.split(" or ")}
    answer = {"description": route.summary, "content": {kind: {"schema": schema} for kind, schema in kinds.items()}}
    return {str(status): answer for status in route.statuses}


def list_errors(route: Any) -> list[str]:
    """The kinds of errors with which a call may be refused."""
    kinds = {"usage", "forbidden", *route.errors} | ({"unauthorized"} if route.access != "anyone" else set())
    kinds |= {"not_found"} if "{" in route.pattern else set()
    kinds |= {"unavailable"} if route.method != "GET" else set()
    kinds |= {"length_required", "too_large", "unsupported_media_type"} if route.body else set()
    return sorted((kind for kind in kinds if KINDS[kind][1] not in route.statuses or not route.answer), key=lambda kind: KINDS[kind][1])


# For Prometheus, version 0.0.4.  Source: https://prometheus.io/docs/instrumenting/exposition_formats/

DURATION_BUCKETS_S = (0.1, 1, 10, 60, 300, 1800, 3600, 14400, 43200, 86400, 259200, 604800)     # of waits and run times
TURN_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)                                 # of the loop's turns


class Histogram:
    """How often something took how long, in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total_s = bounds, [0] * (len(bounds) + 1), 0.0

    def note(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.total_s += max(0.0, seconds)


@value
class Metric:
    name: str
    kind: str                               # "gauge", "counter" or "histogram"
    help: str
    samples: Sequence[tuple[Mapping[str, str], Any]]        # (labels, a number or a Histogram); None is left out


def list_gpu_metrics(gpus: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """What GET /status knows of the GPUs."""
    labels = [{"node": gpu["node"], "gpu": str(gpu["index"]), "uuid": gpu["uuid"].rpartition("/")[2], "name": gpu["name"]} for gpu in gpus]

    def gauge(name: str, help: str, look: Callable[[Mapping[str, Any]], float | None]) -> Metric:
        return Metric(name, "gauge", help, [(label, look(gpu)) for label, gpu in zip(labels, gpus)])

    def scaled(key: str, factor: float) -> Callable[[Mapping[str, Any]], float | None]:
        return lambda gpu: None if gpu[key] is None else gpu[key] * factor

    return [
        gauge("nexus_gpu_memory_used_bytes", "GPU memory in use, by whomever.", scaled("memory_used_mib", 2**20)),
        gauge("nexus_gpu_memory_total_bytes", "GPU memory there is.", scaled("memory_total_mib", 2**20)),
        gauge("nexus_gpu_utilization_ratio", "Utilization of the GPU as the driver tells it, 0 to 1.", scaled("utilization", 0.01)),
        gauge("nexus_gpu_temperature_celsius", "Temperature of the GPU.", scaled("temperature", 1)),
        gauge("nexus_gpu_power_watts", "Power the GPU draws.", scaled("power_watts", 1)),
        gauge("nexus_gpu_allocated_ratio", "How much of the GPU nexus has given to jobs, 0 to 1.", scaled("allocated", 1)),
        gauge("nexus_gpu_jobs", "Jobs of nexus that have the GPU or a share of it.", lambda gpu: len(gpu["job_ids"])),
        gauge("nexus_gpu_available", "1 when the next job could have the whole GPU.", scaled("is_available", 1)),
        gauge("nexus_gpu_paused", "1 when the GPU gets no new job.", scaled("is_paused", 1)),
        gauge("nexus_gpu_faulty", "1 when the driver says that the GPU cannot be used.", lambda gpu: int(bool(gpu["fault"])))]


def list_slurm_metrics(slurm: Mapping[str, Any]) -> list[Metric]:
    """What GET /status knows of the cluster."""
    nodes = [(node, {"node": node["name"], "partitions": ",".join(node["partitions"])}) for node in slurm["nodes"]]
    return [
        Metric("nexus_slurm_up", "gauge", "1 when Slurm answers and takes jobs.", [({}, not slurm["trouble"])]),
        Metric("nexus_slurm_jobs", "gauge", "Jobs that Slurm has of nexus.", [
            ({"status": PENDING}, slurm["handed_jobs"]), ({"status": RUNNING}, slurm["running_jobs"])]),
        Metric("nexus_slurm_gpus", "gauge", "GPUs of the cluster's nodes.", [(labels, node["gpus"]) for node, labels in nodes]),
        Metric("nexus_slurm_gpus_used", "gauge", "Those that Slurm has given to jobs, anybody's.", [
            (labels, node["gpus_used"]) for node, labels in nodes])]


def format_prometheus(metrics: Sequence[Metric]) -> str:
    """The text that GET /metrics answers."""
    return "".join(f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
                   + "".join(line for labels, measured in metric.samples if measured is not None
                             for line in format_samples(metric.name, labels, measured)) for metric in metrics)


def format_samples(name: str, labels: Mapping[str, str], measured: Any) -> Iterator[str]:
    if not isinstance(measured, Histogram):
        yield format_sample(name, labels, measured)
        return
    counts, count = list(measured.counts), 0            # a copy: it may be growing
    for bound, more in zip((*map(str, measured.bounds), "+Inf"), counts):
        count += more
        yield format_sample(f"{name}_bucket", {**labels, "le": bound}, count)
    yield format_sample(f"{name}_sum", labels, measured.total_s)
    yield format_sample(f"{name}_count", labels, count)


def format_sample(name: str, labels: Mapping[str, str], number: float) -> str:
    told = ",".join(f'{key}="{escape_label(text)}"' for key, text in labels.items())
    return f"{name}{{{told}}} {number + 0}\n" if told else f"{name} {number + 0}\n"         # + 0: true is 1


def escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def format_health(health: Mapping[str, Any], paint: Paint) -> str:
    lines = [f"{'ok  ' if check['is_ok'] else paint('red', 'BAD ')} {check['name']}{check['reading'] and ': '}{check['reading']}"
             for check in health["checks"]]
    return "\n".join([*lines, paint("green", "HEALTHY") if health["is_healthy"] else paint("red", "UNHEALTHY")]) + "\n"


# ==== 8. CLOCK ==== the time, waiting, and what must never come twice


class Clock:
    """The real one; tests hand in another."""

    def now(self) -> float:
        """UTC epoch seconds.  They jump when somebody sets the clock: for stamps alone."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never jump: for waits and durations."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def new_token(self) -> str:
        return os.urandom(24).hex()

    def new_job_id(self, taken: Mapping[str, Any], length: int = 0) -> str:
        """An id that no kept job has: three letters while they are plenty, then four; or as many as are asked for."""
        length = length or (3 if len(taken) < 20000 else 4)
        while True:
            number = int.from_bytes(os.urandom(8), "big")
            letters = []
            for _ in range(length):
                number, place = divmod(number, len(ID_LETTERS))
                letters.append(ID_LETTERS[place])
            job_id = "".join(letters)
            if job_id not in taken:
                return job_id


# ==== 9. DISK ==== the layout of ~/.nexus; writing that survives a crash, reading what may be torn
# A file that must be whole is written aside, synced, and renamed.  Faults of the system become `unavailable` here.


@value
class Layout:
    """Where everything lies."""
    home: str
    state_file: str
    log_dir: str

    @property
    def config_file(self) -> str:
        return os.path.join(self.home, "config.toml")

    @property
    def service_file(self) -> str:
        return os.path.join(self.home, "service.json")

    @property
    def cache_dir(self) -> str:
        return os.path.join(self.home, "cache")

    @property
    def start_error_file(self) -> str:
        return os.path.join(self.home, "start_error.json")

    @property
    def token_file(self) -> str:
        return os.path.join(self.home, "token")

    @property
    def lock_file(self) -> str:
        return os.path.join(self.home, "lock")

    @property
    def stopped_file(self) -> str:
        return os.path.join(self.home, "stopped")       # there while nobody wants a service

    @property
    def events_file(self) -> str:
        return os.path.join(self.home, "events")

    @property
    def service_log(self) -> str:
        return os.path.join(self.home, "service.log")

    @property
    def screen_rc(self) -> str:
        return os.path.join(self.home, "screenrc")

    @property
    def ssh_folder(self) -> str:
        """For the sockets of connections to nodes; a path of one may have 108 bytes, and ssh adds to it."""
        folder = os.path.join(self.home, "ssh")
        return folder if len(os.fsencode(folder)) <= 50 else f"/tmp/nexus-ssh-{os.geteuid()}-{hash_text(self.home)[:12]}"

    @property
    def previous_state_file(self) -> str:
        return self.state_file + ".prev"

    @property
    def journal_dir(self) -> str:
        return os.path.dirname(self.state_file)

    @property
    def code_folder(self) -> str:
        return os.path.join(self.journal_dir, "submitted-code")     # beside the state that says which of it is needed

    def code_file(self, name: str) -> str:
        return os.path.join(self.code_folder, f"{name}.py")

    def job_folder(self, job_id: str) -> str:
        return os.path.join(self.log_dir, f"job_{job_id}")

    def work_folder(self, job_id: str) -> str:
        return os.path.join(self.job_folder(job_id), "work")        # where a job runs that brought its code

    def array_folder(self, token: str) -> str:
        return os.path.join(self.log_dir, f"slurm_{token}")         # of links: the tasks of an array that Slurm has


def find_home(environ: Mapping[str, str]) -> str:
    """~/.nexus, or what NEXUS_HOME names."""
    given = environ.get("NEXUS_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".nexus")
    return os.path.abspath(os.path.expanduser(given))


def make_layout(home: str, config: Config) -> Layout:
    """The default paths follow NEXUS_HOME."""
    def place(path: str) -> str:
        inside = path[len("~/.nexus/"):] if path.startswith("~/.nexus/") else None
        return os.path.join(home, inside) if inside else os.path.abspath(os.path.expanduser(path))
    return Layout(home, place(config.state.state_file), place(config.state.log_dir))


def describe_disk_error(error: OSError, action: str, path: str) -> NexusError:
    import errno
    hint = {errno.ENOSPC: "make room there; nexus goes on by itself", errno.EDQUOT: "your quota is used up: make room",
            errno.EACCES: "check who owns it: ls -ld", errno.EROFS: "the file system is mounted read-only"}.get(error.errno or 0, "")
    return NexusError("unavailable", f"cannot {action} {path}: {error.strerror or error}", hint)


def make_folder(path: str) -> None:
    """Make a private folder, with its parents.  Raises: unavailable."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise describe_disk_error(error, "make", path) from None


def check_private(path: str) -> None:
    """A folder that others may have made before must be this user's alone.  Raises: unavailable."""
    status = os.lstat(path)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NexusError("unavailable", f"{path} is not this user's alone", hint=f"whose is it?  ls -ld {path}")


def read_text(path: str) -> str | None:
    """The text of a file; None when there is none.  Raises: unavailable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise describe_disk_error(error, "read", path) from None


def load_config(path: str, environ: Mapping[str, str]) -> Config:
    """The configuration of a file; the defaults when there is none.  Raises: usage, unavailable."""
    text = read_text(path)
    data: dict[str, Any] = {}
    if text is not None:
        try:
            if sys.version_info >= (3, 11):
                import tomllib
            else:
                import tomli as tomllib
        except ImportError:
            raise NexusError("usage", f"{path} cannot be read: Python {sys.version_info[0]}.{sys.version_info[1]} has no TOML parser",
                             hint=f"{sys.executable} -m pip install tomli, or use Python 3.11 or newer") from None
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise NexusError("usage", f"{path} is not valid TOML: {error}",
                             hint="nexus config edit; an example: nexus config sample") from None
    mock = environ.get("NEXUS_MOCK_GPUS")
    if mock:
        if not re.fullmatch(r"\d{1,4}", mock) or int(mock) > 1024:
            raise NexusError("usage", f"NEXUS_MOCK_GPUS={mock} must be a whole number from 0 to 1024", hint="NEXUS_MOCK_GPUS=2")
        data = {**data, "gpu": {**(data["gpu"] if isinstance(data.get("gpu"), dict) else {}), "provider": "mock", "mock_gpus": int(mock)}}
    return parse_config(data, path)


def read_json(path: str) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is none or it is torn."""
    try:
        data = json.loads(read_text(path) or "")
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def stamp_of(path: str) -> tuple[int, ...] | None:
    """What tells a file from what others make of it."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


# Who writes little by little lets go of the interpreter so often, and for so short a time, that no other thread's wait for it is ever
# over: 100 ms and more of 0.5.
WRITE_STEP = 2**20              # bytes


def write_atomic(path: str, pieces: Iterable[str], mode: int = 0o600, is_synced: bool = True) -> None:
    """Replace a file by one that is whole, whatever happens on the way.  Raises: OSError, and nothing has changed."""
    aside = f"{path}.{os.getpid()}.tmp"
    try:
        if os.path.lexists(aside):
            os.unlink(aside)        # what a crash left; and in a folder that all may write nobody's link is followed
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(handle, "w", WRITE_STEP, encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(pieces)
            if is_synced:
                file.flush()
                os.fsync(handle)
        os.replace(aside, path)
    except BaseException:
        try:
            os.unlink(aside)
        except OSError:
            pass
        raise
    if is_synced:
        sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Make renames in a folder last."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def take_lock(path: str) -> int | None:
    """Lock a file for as long as this process lives; None when another has it.  Raises: OSError."""
    import fcntl
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


class TokenFile:
    """tokens.json: whom the owner lets in.  Read again whenever it has changed, so that the command line may write it too."""

    def __init__(self, layout: Layout) -> None:
        self.path = os.path.join(layout.home, "tokens.json")
        self.seen: tuple[tuple[int, ...] | None, tuple[Token, ...]] = None, ()      # of one moment: many threads read

    def read(self) -> tuple[Token, ...]:
        """Raises: unavailable."""
        stamp, seen = stamp_of(self.path), self.seen
        if stamp != seen[0]:
            text = read_text(self.path)
            try:
                seen = self.seen = stamp, parse_tokens(text) if text is not None else ()
            except ValueError as error:
                raise NexusError("unavailable", f"{self.path} is not as nexus writes it: {error}",
                                 hint="mend it, or move it away and make the tokens anew: nexus token create USER") from None
        return seen[1]

    def change(self, act: Callable[[tuple[Token, ...]], tuple[Token, ...]]) -> None:
        """Write what `act` makes of the tokens.  Raises: unavailable, and what `act` raises."""
        import fcntl
        try:
            handle = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                write_atomic(self.path, [format_tokens(act(self.read()))])
            finally:
                os.close(handle)
        except OSError as error:
            raise describe_disk_error(error, "write", self.path) from None

    def note_use(self, token: Token, now: float) -> None:
        """Remember when a token was used last, to the minute.  Raises: unavailable."""
        if now - (token.used_at or 0.0) >= 60:
            self.change(lambda tokens: tuple(replace(each, used_at=now) if each.sha256 == token.sha256 else each for each in tokens))


class AppendFile:
    """A file that grows by whole, synced records.  A failed one leaves nothing of itself behind."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0
        self.is_damaged = False     # a sync failed: what the disk holds is not known, and another file must be begun

    def append(self, record: bytes) -> None:
        """Raises: OSError; then nothing was appended."""
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(self.handle, record[written:], self.size + written)
        except OSError:
            self.cut()
            raise
        try:
            os.fdatasync(self.handle)
        except OSError:
            self.is_damaged = True
            self.cut()
            raise
        self.size += len(record)

    def cut(self) -> None:
        """Remove what a failed write left behind its end."""
        try:
            os.ftruncate(self.handle, self.size)
        except OSError:
            self.is_damaged = True

    def close(self) -> None:
        os.close(self.handle)


def find_tail(path: str, lines: int) -> int:
    """The offset at which the last `lines` lines of a file begin, sought from its end."""
    with open(path, "rb") as file:
        end = position = file.seek(0, os.SEEK_END)
        if lines <= 0:
            return end
        missing = lines + 1                     # newlines to find: the one before the first line wanted is the last
        while position > 0:
            step = min(65536, position)
            position -= step
            file.seek(position)
            block = file.read(step)
            if position + step == end and not block.endswith(b"\n"):
                missing -= 1                    # the last line has no newline yet
            cut = len(block)
            while missing and (cut := block.rfind(b"\n", 0, cut)) >= 0:
                missing -= 1
            if not missing:
                return position + cut + 1
    return 0


def remove_job_folder(log_dir: str, folder: str) -> bool:
    """Remove a job's log folder; only a real folder directly below log_dir, and never what a link points to."""
    import shutil
    import stat
    name = os.path.basename(folder)
    if os.path.join(log_dir, name) != folder or not name.startswith("job_"):
        return False
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return False
        shutil.rmtree(folder)           # it walks by descriptors and follows no link
    except OSError:
        return False
    return True


def write_code(path: str, code: bytes) -> None:
    """Keep a script, byte for byte, for as long as a job needs it.  Raises: unavailable."""
    make_folder(os.path.dirname(path))
    try:
        write_atomic(path, (code[at:at + 65536].decode("utf-8", "surrogateescape") for at in range(0, len(code), 65536)))
    except OSError as error:
        raise describe_disk_error(error, "write", path) from None


def read_code(path: str) -> bytes:
    """Raises: unavailable."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise describe_disk_error(error, "read", path) from None


def copy_code(path: str, folder: str) -> None:
    """Put a script as main.py where a job runs; one that an earlier attempt has changed is replaced.  Raises: OSError."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        write_atomic(os.path.join(folder, "main.py"), file, is_synced=False)


def measure_logs(folder: str | None) -> tuple[int, int]:
    """Bytes of a job's stdout.log and stderr.log; 0 of one that is not there."""
    def measure(name: str) -> int:
        try:
            return os.stat(os.path.join(folder or "", name)).st_size
        except OSError:
            return 0
    return measure("stdout.log"), measure("stderr.log")


def append_log(folder: str, name: str, piece: bytes) -> None:
    """Append to a job's log; all of it or nothing.  Raises: OSError."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    handle = os.open(os.path.join(folder, f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = os.lseek(handle, 0, os.SEEK_END)
        try:
            written = 0
            while written < len(piece):
                written += os.pwrite(handle, piece[written:], end + written)
        except OSError:
            os.ftruncate(handle, end)
            raise
    finally:
        os.close(handle)


def read_piece(folder: str | None, name: str, start: int, most: int) -> bytes:
    """At most so many bytes of a job's log, from byte `start` on."""
    try:
        with open(os.path.join(folder or "", f"{name}.log"), "rb") as file:
            file.seek(start)
            return file.read(most)
    except OSError:
        return b""


def remove_folder(path: str) -> None:
    """An empty one; any other stays."""
    try:
        os.rmdir(path)
    except OSError:
        pass


def remove_sockets(folder: str) -> None:
    """Those that processes before this one have left in a folder."""
    import stat
    try:
        for entry in list(os.scandir(folder)):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)
    except OSError:
        pass                                            # none was ever made


def remove_file(path: str) -> None:
    """Raises: OSError, but not for one that is not there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


# ==== 10. MACHINE ==== other programs, processes, GPUs, sessions, leases: each has one owner here
# nvidia-smi may hang in the kernel, where SIGKILL does not help: a run that outlives its time limit is left alone, and
# no second one is begun while it lives.  A process is named by pid and start time, never by its pid alone.

SMI_TIMEOUT_S = 60.0            # without persistence mode the driver loads each card at each run: 30 s for eight
SMI_PATIENCE_S = 10.0           # but for so long at most it is waited for, and what it said last is relied upon
SMI_SLOW_S = 2.0
EXEC_PATIENCE_S = 0.25          # a process is for so long at most without an environment
SMI_SLOW_HINT = "nvidia-smi is slow while the driver loads the cards at each run: start nvidia-persistenced, or nvidia-smi -pm 1"
PROC = "/proc"


@value
class Completed:
    exit_code: int
    output: str                 # stdout and stderr


class TookTooLong(TimeoutError):
    """A program had to be ended.  `output` is what it had said."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


class StillRunning(Exception):
    """A program, or what it began, outlived its time limit, SIGTERM and SIGKILL.  `process` is left behind."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self.process = process


def run(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> Completed:
    """Run a program to its end.

    Raises: FileNotFoundError, PermissionError; TookTooLong, when it had to be ended; StillRunning, when it would not end.
    """
    import signal
    import subprocess
    with open_scratch() as said:            # and no pipe, which whatever it leaves in the background would keep open
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environ,
                                   start_new_session=True)
        try:
            await_exit(process, timeout_s)
            return Completed(process.wait(0), read_scratch(said))
        except subprocess.TimeoutExpired:
            pass
        for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):       # SIGKILL at once may freeze a card
            if end_session(process, number, patience_s):
                raise TookTooLong(f"{argv[0]} did not answer within {timeout_s:g} s", read_scratch(said))
    raise StillRunning(process)


def await_exit(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Until it has ended: at once, where the kernel tells (Linux 5.3); wait() with a time limit looks every 50 ms.

    Raises: subprocess.TimeoutExpired.
    """
    import select
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        process.wait(timeout_s)
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(timeout_s * 1000)
    os.close(handle)


def open_scratch() -> IO[bytes]:
    """A file without a name; in memory where that can be had, so that a full disk cuts off no answer."""
    try:
        return os.fdopen(os.memfd_create("nexus"), "w+b")
    except (AttributeError, OSError):                   # a Python built for an older C library
        import tempfile
        return tempfile.TemporaryFile()


def read_scratch(file: IO[bytes]) -> str:
    """All that is in it.  It shares its position with whoever writes to it, and that stays."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")


def end_session(process: subprocess.Popen[bytes], number: int, patience_s: float) -> bool:
    """Signal a program and what it began, a wrapper's nvidia-smi; whether all of them have gone then."""
    try:
        os.killpg(process.pid, number)
    except OSError:                                     # they have gone, or are somebody else's
        pass
    give_up_at = time.monotonic() + patience_s
    while has_session(process):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True


def has_session(process: subprocess.Popen[bytes]) -> bool:
    """Whether a program that run() began, or anything that it began in turn, is still there."""
    if process.poll() is None:
        return True
    processes = Processes()
    found = [processes.find(int(name)) for name in os.listdir(PROC) if name.isdigit()]
    return any(one.session == process.pid and not processes.is_gone(one) for one in found if one)


class NvidiaSmi:
    """The GPUs as nvidia-smi tells them."""

    def __init__(self, timeout_s: float = SMI_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.fields: Sequence[str] = GPU_FIELDS
        self.stuck: subprocess.Popen[bytes] | None = None

    def query_gpus(self, known: Mapping[str, Gpu]) -> list[Gpu]:
        """The GPUs by index, with their processes; those of `known` (by uuid) that it does not show, with a fault.

        Raises: unavailable, when nothing is known now.  Source: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`.
        """
        only: tuple[str, ...] = ()
        answer = self.ask_gpus(only)
        indices = {uuid: gpu.index for uuid, gpu in known.items()}
        if answer.exit_code == 6 and not known:
            return []
        gpus, messages = parse_gpus(answer.output, self.fields, indices)
        if answer.exit_code not in (0, 14) and not gpus:
            # One card that cannot be opened hides the others, until they are asked for by their indexes.
            listed = parse_gpu_list(self.ask("-L").output) if "device handle" in answer.output else []
            if not listed:
                raise NexusError("unavailable", describe_smi_failure(answer.exit_code, answer.output),
                                 hint=smi_hint(answer.exit_code))
            only = ("-i", ",".join(str(index) for index, _, _ in listed))
            again = self.ask_gpus(only)
            if again.exit_code not in (0, 14):
                raise NexusError("unavailable", describe_smi_failure(again.exit_code, again.output))
            gpus, _ = parse_gpus(again.output, self.fields, indices)
        elif answer.exit_code not in (0, 14):           # newer drivers show the others beside the error
            only = ("-i", ",".join(str(gpu.index) for gpu in gpus if not gpu.fault))
        has_any = any(not gpu.fault for gpu in gpus)
        gpus = sorted([*gpus, *find_missing(gpus, known, messages)], key=lambda gpu: gpu.index)
        if not has_any:
            return gpus
        apps = self.ask(*only, f"--query-compute-apps={','.join(APP_FIELDS)}", "--format=csv,noheader,nounits")
        if apps.exit_code not in (0, 3, 14):            # 3: this device does not tell
            raise NexusError("unavailable", describe_smi_failure(apps.exit_code, apps.output))
        processes = parse_compute_apps(apps.output)
        return [replace(gpu, processes=processes.get(gpu.uuid, ())) for gpu in gpus]

    def ask_gpus(self, only: Sequence[str]) -> Completed:
        answer = self.ask(*only, f"--query-gpu={','.join(self.fields)}", "--format=csv,noheader,nounits")
        if answer.exit_code == 2 and self.fields is GPU_FIELDS:
            self.fields = BASIC_GPU_FIELDS          # an older driver
            return self.ask_gpus(only)
        return answer

    def ask(self, *arguments: str) -> Completed:
        if self.stuck and has_session(self.stuck):
            raise NexusError("unavailable", f"nvidia-smi (pid {self.stuck.pid}) hangs and cannot be ended",
                             hint="the driver is stuck: see dmesg; a reboot may be needed")
        self.stuck = None
        try:
            return run(["nvidia-smi", *arguments], self.timeout_s)
        except FileNotFoundError:
            raise NexusError("unavailable", "nvidia-smi was not found on PATH", hint="install the NVIDIA driver; without "
                             "a GPU, try NEXUS_MOCK_GPUS=2, or nexus add --gpus 0") from None
        except OSError as error:
            reason = str(error) if isinstance(error, TimeoutError) else f"nvidia-smi cannot be run: {error.strerror}"
            raise NexusError("unavailable", reason, hint="try it by hand: nvidia-smi" + (
                f"; {SMI_SLOW_HINT}" if isinstance(error, TimeoutError) else "")) from None
        except StillRunning as stuck:
            self.stuck = stuck.process
            raise NexusError("unavailable", f"nvidia-smi did not answer within {self.timeout_s:g} s and cannot be ended",
                             hint="the driver is stuck: see dmesg; a reboot may be needed") from None


def smi_hint(exit_code: int) -> str:
    return {9: "is the NVIDIA driver loaded?  lsmod | grep nvidia", 18: "the driver was upgraded under a running kernel: reboot",
            12: "reinstall the NVIDIA driver: libnvidia-ml.so is missing", 4: "check the rights of /dev/nvidia*",
            255: "in a container, restart it: it lost its devices"}.get(exit_code, "try it by hand: nvidia-smi")


def find_missing(gpus: Sequence[Gpu], known: Mapping[str, Gpu], messages: Sequence[str]) -> list[Gpu]:
    """The GPUs that a message names or that were seen before, and that have no row now: unusable, but not forgotten."""
    shown, indices = {gpu.uuid for gpu in gpus}, {gpu.index for gpu in gpus}
    text = " ".join(messages)
    faults = {"GPU is lost": "GPU is lost", "Unknown Error": "Unknown Error", "reset must occur": "GPU requires reset"}
    fault = next((fault for words, fault in faults.items() if words in text), "nvidia-smi does not show it")
    missing = [replace(gpu, fault=fault, processes=(), memory_used_mib=None, utilization=None, temperature=None, power_watts=None)
               for uuid, gpu in known.items() if uuid not in shown and gpu.index not in indices]     # a new index is a new count
    taken = {gpu.index for gpu in [*gpus, *missing]}
    named = re.findall(r"device handle for (?:GPU|gpu) ?(\d{1,4}):(?!\w)", text)
    return missing + [Gpu(int(index), f"index-{index}", "GPU", fault=fault) for index in named if int(index) not in taken]


class MockGpus:
    """Made-up idle GPUs, for a trial and for tests."""

    def __init__(self, count: int) -> None:
        self.count = count

    def query_gpus(self, known: Mapping[str, Gpu]) -> list[Gpu]:
        return [Gpu(index, f"MOCK-{index}", "Mock GPU", 24576.0, 0.0, 0.0) for index in range(self.count)]


class Processes:
    """Whose is each process?  Asked of /proc alone.

    A job's are those that carry its id and nonce in their environment, descend from its job.sh, or share that one's
    session: torchrun's workers leave the process group.  Once seen to be a job's, a process stays the job's, also when
    its parents have gone and it has cleared its environment.
    """

    def __init__(self) -> None:
        self.uid = os.geteuid()
        self.boot_id = read_boot_id()
        self.marks: dict[tuple[int, int, int], str | None] = {}         # (pid, started, env_start): mark
        self.owners: dict[tuple[int, int], tuple[str, str]] = {}        # (pid, started): (job id, nonce)
        self.former: dict[int, str] = {}                                # pid: job id, of those that have gone lately

    def find(self, pid: int) -> Process | None:
        try:
            handle = os.open(f"{PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)     # open() would double a scan's time
        except OSError:
            return None
        try:
            return parse_proc_stat(os.read(handle, 4096).decode("utf-8", "replace"))
        except (OSError, ValueError, IndexError):
            return None
        finally:
            os.close(handle)

    def is_alive(self, pid: int | None, started: int | None) -> bool:
        process = self.find(pid) if pid else None
        return process is not None and process.started == started and not self.is_gone(process)

    def is_gone(self, process: Process) -> bool:
        """Whether it has ended and only waits to be reaped.  When its first thread alone has ended, it reads the same."""
        if process.state not in "ZX":
            return False
        try:
            return len(os.listdir(f"{PROC}/{process.pid}/task")) < 2
        except OSError:
            return True

    def find_age_s(self, started: int) -> float:
        """For how long a process that began then has run, whatever the wall clock was set to."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")

    def scan(self) -> list[Process]:
        """The processes that may be ours: this user's, and for root everybody's."""
        found = []
        with os.scandir(PROC) as entries:
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                try:
                    if self.uid and entry.stat(follow_symlinks=False).st_uid != self.uid:
                        continue
                except OSError:
                    continue
                process = self.find(int(entry.name))
                if process and not process.is_kernel and not self.is_gone(process):
                    found.append(process)
        return found

    def read_environment(self, process: Process) -> bytes | None:
        """As of its last exec.  In the middle of one a process has none, and would seem to be nobody's: that is waited out."""
        give_up_at = time.monotonic() + EXEC_PATIENCE_S
        while True:
            try:
                with open(f"{PROC}/{process.pid}/environ", "rb") as file:
                    content = file.read()
            except OSError:
                return None
            now = self.find(process.pid)
            if now is None or now.started != process.started:
                return None
            if now.env_start == process.env_start and (content or now.env_start or now.state in "ZX"):
                return content                          # the same before and after, so that it is whole
            if time.monotonic() > give_up_at:
                return None
            if not now.env_start:
                time.sleep(0.0005)
            process = now

    def read_mark(self, process: Process) -> str | None:
        """`service`, `viewer`, or `JOB NONCE`, of a process's environment as it was at its last exec."""
        key = process.pid, process.started, process.env_start
        if key not in self.marks:
            content = self.read_environment(process)
            if content is None:
                return None
            marks = dict(entry.partition(b"=")[::2] for entry in content.split(b"\0") if entry.startswith(b"NEXUS_"))
            role, job_id = marks.get(b"NEXUS_ROLE", b"").decode("ascii", "replace"), marks.get(b"NEXUS_JOB_ID", b"")
            nonce = marks.get(b"NEXUS_JOB_NONCE", b"")
            self.marks[key] = role or (f"{job_id.decode('ascii', 'replace')} {nonce.decode('ascii', 'replace')}"
                                       if job_id and nonce else None)
        return self.marks[key]

    def find_members(self, jobs: Iterable[Job], over: Iterable[str] = ()) -> dict[str, list[Process]]:
        """{job id: its processes}, less its job.sh, what only shows its logs, and, of jobs that are over, what job.sh
        itself still does.
        """
        by_nonce = {f"{job.id} {job.nonce}": job for job in jobs}
        processes = {process.pid: process for process in self.scan()}
        launched = [job for job in by_nonce.values() if job.pid and job.boot_id == self.boot_id]    # pids of before mean nothing
        runners = {(job.pid, job.pid_started): job for job in launched}
        sessions = {job.pid: job for job in launched}
        tidying = {job.pid for job in launched if job.id in over}
        members: dict[str, list[Process]] = {job.id: [] for job in by_nonce.values()}
        decided: dict[int, Job | None] = {}

        def find_owner(process: Process, depth: int = 0) -> Job | None:
            if process.pid in decided:
                return decided[process.pid]
            decided[process.pid] = None                     # a ring of parents cannot be, but pids are reused
            mark = self.read_mark(process)
            owner: Job | None = None
            if mark in ("service", "viewer"):
                return None
            known = self.owners.get((process.pid, process.started))
            if (process.pid, process.started) in runners:
                owner = runners[process.pid, process.started]
            elif known and f"{known[0]} {known[1]}" in by_nonce:
                owner = by_nonce[f"{known[0]} {known[1]}"]
            elif mark in by_nonce:
                owner = by_nonce[mark]
            elif process.session in sessions and has_its_leader(process, sessions[process.session]):
                owner = sessions[process.session]
            elif process.parent in processes and depth < 200:
                owner = find_owner(processes[process.parent], depth + 1)
            decided[process.pid] = owner
            return owner

        def has_its_leader(process: Process, job: Job) -> bool:
            """Whether the session is still the job's: a pid that is free may become another session's."""
            leader = processes.get(process.session)
            return process.started >= (job.pid_started or 0) and (leader is None or leader.started == job.pid_started)

        def is_tidying(process: Process) -> bool:
            """Whether job.sh itself does it, once the job is over: all that it began and that is not the job's by its environment."""
            while process.parent not in tidying:
                if self.read_mark(process) in by_nonce or process.parent not in processes:
                    return False
                process = processes[process.parent]
            return True

        first = min((job.pid_started or 0 if job.pid else 0 for job in by_nonce.values()), default=0)
        for process in processes.values():
            owner = find_owner(process) if process.started >= first else None      # nobody is older than the job.sh that began it
            if owner:
                self.owners[process.pid, process.started] = owner.id, owner.nonce or ""
                if (process.pid, process.started) not in runners and not (tidying and is_tidying(process)):
                    members[owner.id].append(process)
        self.forget(processes)
        return members

    def forget(self, alive: Mapping[int, Process]) -> None:
        """Keep of those that have gone only whose they were: nvidia-smi may still name them."""
        for pid, started in [key for key in self.owners if key[0] not in alive or alive[key[0]].started != key[1]]:
            self.former[pid] = self.owners.pop((pid, started))[0]
        for key in [key for key in self.marks if key[0] not in alive or alive[key[0]].started != key[1]]:
            del self.marks[key]
        while len(self.former) > 10000:
            del self.former[next(iter(self.former))]

    def owner_of(self, pid: int) -> str | None:
        """The job that a pid of nvidia-smi's list belongs to, as of the last look; None when it is somebody else's."""
        process = self.find(pid)
        if process is None or self.is_gone(process):
            return self.former.get(pid)
        owner = self.owners.get((pid, process.started))
        return owner[0] if owner else None

    def send(self, process: Process, number: int) -> None:
        """Signal exactly this process, or nobody."""
        import errno
        import signal
        try:
            handle = os.pidfd_open(process.pid)
        except (AttributeError, OSError) as error:      # Linux before 5.3, or a Python built on one
            if isinstance(error, AttributeError) or error.errno == errno.ENOSYS:
                self.send_by_pid(process, number)
            return
        try:
            if self.is_alive(process.pid, process.started):
                signal.pidfd_send_signal(handle, number)
        except OSError:
            pass
        finally:
            os.close(handle)

    def send_by_pid(self, process: Process, number: int) -> None:
        """The next best: its pid would have to be given to another between two system calls."""
        try:
            if self.is_alive(process.pid, process.started):
                os.kill(process.pid, number)
        except OSError:
            pass


def find_user(uid: int) -> str:
    import pwd
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def find_process_user(pid: int) -> str | None:
    try:
        return find_user(os.stat(f"{PROC}/{pid}").st_uid)
    except OSError:
        return None


@value
class HostSample:
    cpu_percent: float | None = None
    memory_used_gb: float | None = None
    memory_total_gb: float | None = None


@value
class JobSample:
    """What a job's processes take, together."""
    rss_mib: float              # a page that n of them share counts n times
    cpu_seconds: float
    cpu_percent: float
    largest_mib: float          # of rss_mib, the largest process's


HOST_FIELDS: Sequence[str] = HostSample.__slots__  # type: ignore[attr-defined]


class Samples:
    """What psutil adds: memory and CPU of jobs and of the host; without it these are unknown.  And names of programs."""

    def __init__(self) -> None:
        self.psutil: Any = None
        try:
            import psutil
            self.psutil = psutil
        except ImportError:
            pass
        self.processes: dict[tuple[int, int], Any] = {}         # psutil counts CPU since its last look at a process
        self.seconds: dict[str, dict[tuple[int, int], float]] = {}      # job: process, or all THE_DEAD: CPU seconds

    @property
    def is_available(self) -> bool:
        return self.psutil is not None

    def sample_host(self) -> HostSample:
        if not self.psutil:
            return HostSample()
        memory = self.psutil.virtual_memory()
        return HostSample(self.psutil.cpu_percent(None), (memory.total - memory.available) / 2**30, memory.total / 2**30)

    def find_name(self, pid: int) -> str | None:
        """A program's name.  Of /proc/PID/comm alone: psutil's name() may read a command line, which hangs with a stuck driver."""
        try:
            return (read_text(f"{PROC}/{pid}/comm") or "").strip() or None
        except NexusError:                      # it has just ended, or /proc hides what is others' (hidepid)
            return None

    def sample_jobs(self, members: Mapping[str, Sequence[Process]]) -> dict[str, JobSample]:
        if not self.psutil:
            return {}
        seen = {(process.pid, process.started) for processes in members.values() for process in processes}
        self.processes = {key: process for key, process in self.processes.items() if key in seen}
        self.seconds = {job_id: seconds for job_id, seconds in self.seconds.items() if job_id in members}
        return {job_id: self.sample_job(job_id, processes) for job_id, processes in members.items()}

    def sample_job(self, job_id: str, processes: Sequence[Process]) -> JobSample:
        sizes, percent = [0.0], 0.0
        seconds = self.seconds.setdefault(job_id, {})
        for process in processes:
            key = process.pid, process.started
            try:
                known = self.processes.setdefault(key, self.psutil.Process(process.pid))
                with known.oneshot():
                    sizes.append(known.memory_info().rss / 2**20)
                    percent += known.cpu_percent(None)
                    times = known.cpu_times()
                    seconds[key] = times.user + times.system
            except self.psutil.Error:
                continue
        for key in [key for key in seconds if key != THE_DEAD and not self.psutil.pid_exists(key[0])]:
            seconds[THE_DEAD] = seconds.get(THE_DEAD, 0.0) + seconds.pop(key)
        return JobSample(sum(sizes), sum(seconds.values()), percent, max(sizes))

    def weigh(self, processes: Sequence[Process]) -> float:
        """MiB of the host's memory that processes take together, what they share counted once.  With 100 GB it takes seconds."""
        total = 0.0
        for process in processes:
            try:
                known = self.psutil.Process(process.pid)
                try:
                    total += known.memory_full_info().pss / 2**20
                except self.psutil.AccessDenied:        # another user's: root in a container may not look
                    total += known.memory_info().rss / 2**20
            except self.psutil.Error:
                continue
        return total


THE_DEAD = (0, 0)


def sample_own() -> dict[str, float]:
    """What this process takes, by the names that Prometheus gives it."""
    told: dict[str, float] = {"process_cpu_seconds_total": sum(os.times()[:2])}
    try:
        told["process_resident_memory_bytes"] = int((read_text(f"{PROC}/self/statm") or "0 0").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        told["process_threads"] = len(os.listdir(f"{PROC}/self/task"))
        told["process_open_fds"] = len(os.listdir(f"{PROC}/self/fd")) - 1       # that of listdir() itself
    except OSError:                         # no descriptor is left
        pass
    return told


def read_boot_id() -> str:
    return (read_text(f"{PROC}/sys/kernel/random/boot_id") or "unknown").strip()


def read_machine_id() -> str:
    """What tells this machine from another that shares its home.  Source: machine-id(5)."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = (read_text(path) or "").strip()
        except NexusError:
            continue
        if text and text != "uninitialized":
            return text
    return f"host {socket.gethostname()}"


def current_limits() -> dict[str, tuple[int, int]]:
    """This process's resource limits by prlimit's names, -1 for unlimited."""
    import resource
    return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in LIMITS}


def may_raise_limits() -> bool:
    """Whether this process has CAP_SYS_RESOURCE where it counts: outside of every user namespace.

    Root in a container often has it not, or only there.  Source: capabilities(7), user_namespaces(7).
    """
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text(f"{PROC}/self/status") or "", re.MULTILINE)
    mapped = (read_text(f"{PROC}/self/uid_map") or EVERY_UID).split()[:3]               # none: a kernel without namespaces
    return bool(match and int(match[1], 16) >> 24 & 1 and mapped == EVERY_UID.split())


EVERY_UID = "0 0 4294967295"            # a uid_map of whoever is in no user namespace


# Whose socket is it?  Of the kernel's socket table, as `ss` reads it.  Source: sock_diag(7), linux/inet_diag.h.

TCP_ESTABLISHED, TCP_LISTEN = 1, 10


def find_socket_uid(source: tuple[str, int], destination: tuple[str, int] | None) -> int | None:
    """The uid of the TCP socket at `source` that is connected to `destination`, or with None listens; None when there
    is no such socket, or its owner cannot be known (it was closed, or is not accepted yet).
    """
    state = TCP_LISTEN if destination is None else TCP_ESTABLISHED
    peer = destination or (("::" if ":" in source[0] else "0.0.0.0"), 0)
    for look in (ask_sock_diag, read_socket_table):
        try:
            return look(source, peer, state)
        except (OSError, NexusError):   # not offered, no descriptor left, or no numeric address: a name, or fe80::1%eth0
            continue
    return None


def ask_sock_diag(source: tuple[str, int], peer: tuple[str, int], state: int) -> int | None:
    """Raises: OSError, where the kernel does not offer it."""
    import struct
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET

    def pack(address: str) -> bytes:
        return socket.inet_pton(family, address).ljust(16, b"\0")

    identity = struct.pack("!HH", source[1], peer[1]) + pack(source[0]) + pack(peer[0]) + struct.pack("=III", 0, 2**32 - 1, 2**32 - 1)
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << state) + identity
    header = struct.pack("=IHHII", 16 + len(request), 20, 1, 1, 0)         # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as netlink:      # NETLINK_SOCK_DIAG
        netlink.settimeout(2.0)
        netlink.send(header + request)
        answer = netlink.recv(8192)
    kind = struct.unpack_from("=H", answer, 4)[0]
    if kind == 2:                                                           # NLMSG_ERROR
        code = -struct.unpack_from("=i", answer, 16)[0]
        if code == 2:                                                       # ENOENT: no such socket
            return None
        raise OSError(code, "sock_diag")
    found_state, uid, inode = answer[17], *struct.unpack_from("=II", answer, 16 + 4 + 48 + 12)
    return uid if found_state == state and (inode or state == TCP_LISTEN) else None


def read_socket_table(source: tuple[str, int], peer: tuple[str, int], state: int) -> int | None:
    """The same from /proc/net/tcp, which is slow where there are thousands of connections."""
    def encode(address: tuple[str, int], table: str) -> str:
        if table == "tcp":
            packed = socket.inet_pton(socket.AF_INET, address[0])
        else:                       # an IPv6 socket that speaks to an IPv4 address stands here
            packed = socket.inet_pton(socket.AF_INET6, address[0] if ":" in address[0] else f"::ffff:{address[0]}")
        words = [packed[at:at + 4] for at in range(0, len(packed), 4)]
        return "".join((word[::-1] if sys.byteorder == "little" else word).hex() for word in words).upper() + f":{address[1]:04X}"

    for table in ("tcp6",) if ":" in source[0] else ("tcp", "tcp6"):
        wanted = [encode(source, table), encode(peer, table), f"{state:02X}"]
        for line in (read_text(f"{PROC}/net/{table}") or "").splitlines()[1:]:
            cells = line.split()
            if cells[1:4] == wanted:
                return int(cells[7]) if cells[9] != "0" else None
    return None


class Leases:
    """Which user's nexus has which GPU, without root and without a common service.

    Each running job with GPUs has a file in a folder that all may write, `SERVICE.JOB`, with their uuids; it counts for
    as long as somebody holds `flock -s` on it: the service until its runner has it, then the runner and what inherits it.
    Taking one happens under a short lock on `lock`; files are opened read-only, since O_CREAT on another user's file in
    a sticky folder is refused by fs.protected_regular.
    """

    def __init__(self, folder: str, service_id: str) -> None:
        self.folder, self.service_id = folder, service_id
        self.held: dict[str, int] = {}              # job id: descriptor, until its runner has the lock

    def prepare(self) -> None:
        """Make the folder.  Raises: unavailable, when it cannot be trusted."""
        import stat
        try:
            try:
                os.mkdir(self.folder)
                os.chmod(self.folder, 0o1777)
            except FileExistsError:
                pass
            mode = os.lstat(self.folder).st_mode
        except OSError as error:
            raise describe_disk_error(error, "make", self.folder) from None
        if not stat.S_ISDIR(mode) or mode & 0o1002 != 0o1002:
            raise NexusError("unavailable", f"{self.folder}, where users' services agree on GPUs, is not a folder that all may "
                             "write with the sticky bit", hint=f"chmod 1777 {self.folder}, or set [gpu] lease_dir in config.toml")

    def path(self, job_id: str) -> str:
        return os.path.join(self.folder, f"{self.service_id}.{job_id}")

    def find_holders(self) -> dict[str, str]:
        """{GPU uuid: user} of what other services hold now."""
        holders: dict[str, str] = {}
        for path in self.list_files(is_ours=False):
            handle, uuids = self.open(path)
            if handle is None:
                continue
            try:
                if not self.is_free(handle):
                    holders.update(dict.fromkeys(uuids, find_user(os.fstat(handle).st_uid)))
            finally:
                os.close(handle)
        return holders

    def list_files(self, is_ours: bool) -> list[str]:
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        return [os.path.join(self.folder, name) for name in names
                if name != "lock" and name.startswith(self.service_id + ".") == is_ours]

    def open(self, path: str) -> tuple[int | None, list[str]]:
        """A descriptor of a lease, and the GPUs it is for."""
        import stat
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return None, []
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            return None, []
        return handle, os.pread(handle, 65536, 0).decode("ascii", "replace").split()

    def is_free(self, handle: int) -> bool:
        import fcntl
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(handle, fcntl.LOCK_UN)
        return True

    def take(self, job_id: str, uuids: Sequence[str]) -> None:
        """Take GPUs for a job, all or none.  Raises: conflict, naming who has one; unavailable."""
        import fcntl
        guard = self.lock_folder()
        try:
            holders = self.find_holders()
            taken = [uuid for uuid in uuids if uuid in holders]
            if taken:
                raise NexusError("conflict", f"the nexus of {holders[taken[0]]} took {taken[0]} first")
            try:
                write_atomic(self.path(job_id), [uuid + "\n" for uuid in uuids], 0o644, is_synced=False)
                os.chmod(self.path(job_id), 0o644)          # whatever the umask: the others must read it
                handle = os.open(self.path(job_id), os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise describe_disk_error(error, "write", self.path(job_id)) from None
            self.held[job_id] = handle
            if not lock_patiently(handle, fcntl.LOCK_SH):
                self.drop(job_id)
                raise NexusError("unavailable", f"somebody keeps {self.path(job_id)} locked", hint=f"who: fuser -v {self.folder}/*")
        finally:
            os.close(guard)

    def lock_folder(self) -> int:
        import fcntl
        self.prepare()                  # somebody may have cleaned /tmp of it
        path = os.path.join(self.folder, "lock")
        try:
            try:
                handle = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                os.fchmod(handle, 0o644)
            except FileExistsError:
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise describe_disk_error(error, "lock", path) from None
        if lock_patiently(handle, fcntl.LOCK_EX):
            return handle
        os.close(handle)
        raise NexusError("unavailable", f"somebody keeps {path} locked", hint=f"who: fuser -v {path}")

    def hand_over(self, job_id: str) -> None:
        """The runner has the lock now."""
        handle = self.held.pop(job_id, None)
        if handle is not None:
            os.close(handle)

    def drop(self, job_id: str) -> None:
        """A job is over; what of it lives on unseen keeps its GPUs from the others."""
        self.hand_over(job_id)
        handle, _ = self.open(self.path(job_id))
        if handle is None:
            return
        try:
            if self.is_free(handle):
                os.unlink(self.path(job_id))
        except OSError:
            pass
        finally:
            os.close(handle)

    def touch(self, job_ids: Iterable[str]) -> None:
        """Against those who clean /tmp of old files; and drop what was left of jobs that are over."""
        used = {self.path(job_id) for job_id in job_ids}
        for path in [os.path.join(self.folder, "lock"), *used]:
            try:
                os.utime(path)
            except OSError:
                pass
        for path in self.list_files(is_ours=True):
            if path not in used:
                self.drop(path.rpartition(".")[2])


def lock_patiently(handle: int, kind: int) -> bool:
    """Lock an open file; False when another has kept it for a second: nobody may hold up the service for longer."""
    import fcntl
    for _ in range(200):
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.005)
    return False


def find_lease_folder(config: GpuConfig) -> str:
    if config.lease_dir:
        return os.path.abspath(os.path.expanduser(config.lease_dir))
    for parent in ("/run/lock", "/tmp"):
        try:
            if os.stat(parent).st_mode & 0o002:
                return os.path.join(parent, "nexus-leases")
        except OSError:
            continue
    return "/tmp/nexus-leases"


MAX_SCREENDIR = 70          # bytes: with a longer socket path screen fails without a word
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
    """GNU screen.  Its sessions are told by PID.NAME: screen matches names by their beginnings."""

    def __init__(self, layout: Layout) -> None:
        self.rc = layout.screen_rc
        self.own_folder = os.path.join(layout.home, "screen")
        self.folder: str | None = None          # SCREENDIR, where the usual place does not work

    def prepare(self) -> str | None:
        """Find out how sessions can be started; say why they cannot, or None."""
        if not find_program("screen"):
            return "screen is not installed"
        try:
            reason = self.find_folder()
            if reason is None:
                self.wipe_dead()
            return reason
        except (OSError, StillRunning) as error:
            return f"screen: {format_line(str(error) or 'it hangs', 200)}"

    def find_folder(self) -> str | None:
        answer = run(["screen", "-ls"], 10, self.environ())
        works = re.search(r"No Sockets found|\((Detached|Attached|Dead)|There (is|are)", answer.output)
        if works and len(os.environ.get("SCREENDIR", "")) <= MAX_SCREENDIR:
            self.write_rc()
            return None
        self.folder = self.own_folder
        if len(self.folder) > MAX_SCREENDIR:
            return f"screen: {format_line(answer.output.strip(), 200)}; and {self.folder} is too long a path for its sockets"
        make_folder(self.folder)
        answer = run(["screen", "-ls"], 10, self.environ())
        if "No Sockets" not in answer.output and "\t" not in answer.output:
            return f"screen: {format_line(answer.output.strip(), 200)}"
        self.write_rc()
        return None

    def write_rc(self) -> None:
        if read_text(self.rc) != SCREEN_RC:
            write_atomic(self.rc, [SCREEN_RC], is_synced=False)

    def environ(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "USER", "LOGNAME", "SHELL",
                                                    "SCREENDIR") if name in os.environ}
        kept.setdefault("PATH", os.defpath)
        kept["TERM"] = "xterm-256color"
        kept["SYSSCREENRC"] = "/dev/null"
        if self.folder:
            kept["SCREENDIR"] = self.folder
        return kept

    def argv(self, name: str, command: Sequence[str], *, is_daemon: bool) -> list[str]:
        return ["screen", "-c", self.rc, *(["-d", "-m"] if is_daemon else ["-D", "-m"]), "-S", name, *command]

    def list_sessions(self) -> list[tuple[int, str, str]]:
        return parse_screen_list(run(["screen", "-ls"], 10, self.environ()).output)

    def wipe(self, session: str) -> None:
        """Remove the socket of a session that was killed."""
        try:
            run(["screen", "-wipe", session], 10, self.environ())
        except (OSError, StillRunning):
            pass

    def wipe_dead(self) -> None:
        """The same for all of nexus's.  Raises: OSError, StillRunning."""
        for pid, name, state in self.list_sessions():
            if state.startswith("Dead") and re.fullmatch("nexus|nexus_job_.*", name):
                self.wipe(f"{pid}.{name}")


SLURM_TIMEOUT_S = 60.0          # with slurmctld or munged gone, Slurm's programs try for up to 50 s
SLURM_VARIABLES = r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|KRB5\w+|SLURM_CONF|SBATCH_(?!CLUSTERS$|ARRAY_INX$|WAIT$)\w+"


class Slurm:
    """The programs of Slurm, each run to its end."""

    def __init__(self, service_id: str, environ: Mapping[str, str]) -> None:
        """Jobs get the environment of sbatch, which has nothing secret: --export=NONE would have the nodes run each user's login shell."""
        self.service_id = service_id
        self.environ = {**{name: text for name, text in environ.items() if re.fullmatch(SLURM_VARIABLES, name)}, "TZ": "UTC"}
        self.has_accounts = True

    def ask(self, *argv: str) -> Completed:
        """Raises: unavailable, in Slurm's words or because there is none."""
        import shutil
        program = shutil.which(argv[0], path=self.environ.get("PATH") or os.defpath)
        if program is None:
            raise NexusError("unavailable", f"{argv[0]} was not found on PATH: Slurm's programs are not here",
                             hint="run nexus where sbatch works (apt install slurm-client), or set [jobs] launcher (nexus config edit)")
        try:
            return run([program, *argv[1:]], SLURM_TIMEOUT_S, self.environ)
        except (TimeoutError, StillRunning) as error:
            words = clean_slurm_words(error.output) if isinstance(error, TookTooLong) else ""
            raise NexusError("unavailable", f"Slurm does not answer: {argv[0]} ran for {SLURM_TIMEOUT_S:g} s{words and ': '}{words}",
                             hint="nexus goes on by itself when it does; see: scontrol ping") from None
        except OSError as error:
            raise NexusError("unavailable", f"{program} cannot be run: {error.strerror or error}") from None

    def read(self, *argv: str) -> str:
        """What a program says that must succeed.  Raises: unavailable."""
        done = self.ask(*argv)
        if done.exit_code:
            words = clean_slurm_words(done.output) or f"{argv[0]} ended with exit code {done.exit_code}"
            raise NexusError("unavailable", f"Slurm does not answer: {words}", hint=read_refusal(words)[1])
        return done.output

    def submit(self, argv: Sequence[str]) -> tuple[str | None, str]:
        """The id of what was handed over, or None and Slurm's words.  Raises: unavailable, and then it may be there all the same."""
        done = self.ask(*argv)
        slurm_id = None if done.exit_code else parse_sbatch(done.output)
        words = clean_slurm_words(done.output) or f"sbatch ended with exit code {done.exit_code}"
        if slurm_id is None and (done.exit_code <= 0 or read_refusal(words)[0] == "cluster"):
            raise NexusError("unavailable", f"Slurm does not answer: {words}", hint=read_refusal(words)[1])
        return slurm_id, "" if slurm_id else words

    def query_jobs(self) -> list[SlurmJob]:
        """All of this user's that slurmctld knows: those that have ended too, for its MinJobAge.  Raises: unavailable."""
        text = self.read("squeue", "-h", "-a", "-r", "-t", "all", "-u", str(os.geteuid()), "-o", SQUEUE_FORMAT)
        return parse_slurm_jobs(text, self.service_id)

    def query_accounts(self, ids: Sequence[str]) -> list[SlurmJob]:
        """What the accounting knows of jobs; nothing where there is none.  Raises: unavailable, while it does not answer."""
        if not self.has_accounts:
            return []
        try:
            return parse_slurm_accounts(self.read("sacct", "-n", "-P", "-X", "-j", ",".join(ids), "-o", SACCT_FORMAT))
        except NexusError as error:
            self.has_accounts = not re.search("not found|accounting storage is disabled", error.message)
            if self.has_accounts:
                raise
            return []

    def cancel(self, ids: Sequence[str]) -> str:
        """Slurm's words, if it refuses.  Raises: unavailable."""
        done = self.ask("scancel", *ids)
        return clean_slurm_words(done.output) if done.exit_code else ""

    def query_settings(self) -> dict[str, str]:
        return parse_slurm_settings(self.read("scontrol", "show", "config"))

    def query_nodes(self) -> tuple[list[SlurmPartition], list[SlurmNode]]:
        return (parse_slurm_partitions(self.read("scontrol", "show", "partition", "-o")),
                parse_slurm_nodes(self.read("scontrol", "show", "node", "-d", "-o")))


class NoGpus:
    """Of this machine nothing is used: Slurm has the GPUs."""

    def query_gpus(self, known: Mapping[str, Gpu]) -> list[Gpu]:
        return []


def find_program(name: str) -> str | None:
    import shutil
    return shutil.which(name)


class Machine:
    """This machine as the service uses it: GPUs, processes, sessions, leases and launching in one hand."""

    def __init__(self, config: Config, layout: Layout, service_id: str) -> None:
        self.layout = layout
        is_slurm = config.jobs.launcher == "slurm"
        self.is_mock = config.gpu.provider == "mock" and not is_slurm
        self.gpus: NvidiaSmi | MockGpus | NoGpus = (
            NoGpus() if is_slurm else MockGpus(config.gpu.mock_gpus) if self.is_mock else NvidiaSmi())
        self.processes = Processes()
        self.samples = Samples()
        self.leases = None if self.is_mock or is_slurm else Leases(find_lease_folder(config.gpu), service_id)
        self.screen = Screen(layout)
        self.no_screen_reason: str | None = f'launcher is "{config.jobs.launcher}"'
        if config.jobs.launcher == "screen":
            self.no_screen_reason = self.screen.prepare()
        self.children: dict[str, subprocess.Popen[bytes]] = {}          # job id: screen or job.sh, to be reaped
        self.boot_id = read_boot_id()

    def launch(self, job: Job, script: str) -> None:
        """Start a job's script, detached from this process.  Raises: OSError."""
        import subprocess
        command, stdin = ["/bin/sh", script, str(job.attempt)], subprocess.DEVNULL
        if not self.no_screen_reason:
            command = self.screen.argv(f"nexus_job_{job.id}", command, is_daemon=False)
        elif self.leases:
            stdin = self.leases.held.get(job.id, stdin)             # job.sh makes it its own; screen would keep it
        self.children[job.id] = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            env=self.screen.environ(), start_new_session=True)

    def session_of(self, job: Job) -> str | None:
        """The PID.NAME of a job that this service has launched under screen."""
        child = self.children.get(job.id)
        return None if self.no_screen_reason or not child else f"{child.pid}.nexus_job_{job.id}"

    def reap(self) -> list[str]:
        """The jobs whose screen or job.sh has ended since the last call."""
        gone = [job_id for job_id, child in self.children.items() if child.poll() is not None]
        for job_id in gone:
            del self.children[job_id]
        return gone


# A work tree is kept through an index of its own: git's objects and one ref, refs/nexus/COMMIT, are all that is written
# into the user's repository.

GIT_TIMEOUT_S = 600.0
MAX_UNTRACKED_MIB = 500
GIT_OPTIONS = [word for setting in (            # no hook, no daemon, nothing written beside; the whole tree
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.splitIndex=false", "core.sparseCheckout=false",
    "core.safecrlf=false", "core.logAllRefUpdates=false", "core.filesRefLockTimeout=10000", "submodule.recurse=false", "gc.auto=0",
    "i18n.commitEncoding=UTF-8") for word in ("-c", setting)]


@value
class TreeSnapshot:
    """A git work tree as it was, kept as a commit."""
    commit: str
    repository: str                     # the top of the work tree, without symbolic links
    subfolder: str                      # where in it the job runs; "." = at its top
    empty: tuple[str, ...] = ()         # folders that are repositories of their own, and empty in a checkout


class Git:
    """git in one folder, with nothing of the caller's GIT_ variables: those of a hook would name another index."""

    def __init__(self, folder: str, environ: Mapping[str, str], index: str | None = None) -> None:
        self.folder = folder
        self.environ = {**{name: text for name, text in environ.items() if not name.startswith("GIT_")},
                        "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0",
                        **({"GIT_INDEX_FILE": index} if index else {})}

    def call(self, *arguments: str, given: Iterable[str] = (), **variables: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr).  Raises: unavailable."""
        import subprocess
        text = "".join(f"{path}\0" for path in given)
        try:
            done = subprocess.run(["git", *GIT_OPTIONS, "-C", self.folder, *arguments], input=os.fsencode(text), capture_output=True,
                                  timeout=GIT_TIMEOUT_S, env={**self.environ, **variables}, start_new_session=True, check=False)
        except subprocess.TimeoutExpired:
            raise NexusError("unavailable", f"git {arguments[0]} in {self.folder} was not done after {GIT_TIMEOUT_S:g} s",
                             hint="are there large files? add them to .gitignore") from None
        except OSError as error:
            why = "was not found on PATH" if isinstance(error, FileNotFoundError) else f"cannot be run: {error.strerror}"
            raise NexusError("unavailable", f"--snapshot needs git, which {why}",
                             hint="install git, or add the job without --snapshot") from None
        return done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr)

    def run(self, *arguments: str, given: Iterable[str] = (), **variables: str) -> str:
        """Its stdout.  Raises: unavailable, with what git said."""
        code, output, said = self.call(*arguments, given=given, **variables)
        if code:
            raise NexusError("unavailable", f"{self.folder} cannot be kept as it is: git {arguments[0]} says: {format_git_words(said)}",
                             hint=f"try it by hand: git -C {self.folder} add --all --dry-run; or add the job without --snapshot")
        return output

    def names(self, *arguments: str) -> list[str]:
        return self.run("ls-files", "-z", *arguments).split("\0")[:-1]


def format_git_words(said: str) -> str:
    """What git said of a failure, in one line: its faults, without its warnings and advice."""
    faults = [line for line in said.splitlines() if line.startswith(("fatal: ", "error: "))]
    return format_line(" ".join(faults or said.split()) or "nothing", 300)


def take_snapshot(cwd: str, environ: Mapping[str, str]) -> TreeSnapshot:
    """Keep the work tree that `cwd` is in as it is: its tracked files, and the others that git does not ignore.

    A commit of that on top of HEAD, which no branch has; HEAD itself when nothing differs.  The same tree gives the same commit.
    The user's index, HEAD, branches, stash, reflogs and files stay as they are.
    Raises: usage, when there is no work tree or too much in it; unavailable.
    """
    import tempfile
    top = find_work_tree(cwd, environ)
    with tempfile.TemporaryDirectory(prefix="nexus-") as aside:
        git = Git(top, environ, copy_index(Git(top, environ), aside))
        modules = show_hidden(git)
        git.run("add", "--update")
        nested = add_untracked(git)
        commit = write_commit(git)
        git.run("update-ref", f"refs/nexus/{commit}", commit)
    empty = [path for path in (*modules, *nested) if os.path.lexists(os.path.join(top, path, ".git"))]
    return TreeSnapshot(commit, top, os.path.relpath(os.path.realpath(cwd), top), tuple(empty))


def find_work_tree(cwd: str, environ: Mapping[str, str]) -> str:
    """The top of the work tree that a folder is in.  Raises: usage, unavailable."""
    code, output, said = Git(cwd, environ).call("rev-parse", "--show-toplevel")
    if not code:
        return output[:-1]
    if "not a git repository" in said:
        raise NexusError("usage", f"{cwd} is not in a git work tree, and --snapshot keeps one",
                         hint=f"make it one: git -C {cwd} init; or add the job without --snapshot")
    if "must be run in a work tree" in said:
        raise NexusError("usage", f"{cwd} is inside a git repository, but not in its work tree, and --snapshot keeps one",
                         hint="cd to a checkout (git worktree list shows them), or add the job without --snapshot")
    raise NexusError("unavailable", f"git cannot use the repository of {cwd}: {format_git_words(said)}", hint=f"try: git -C {cwd} status")


def copy_index(git: Git, aside: str) -> str:
    """Copy the index, for what it knows of unchanged files; with its time, by which git tells what may have changed since."""
    import shutil
    copy = os.path.join(aside, "index")
    try:
        shutil.copy2(os.path.join(git.folder, git.run("rev-parse", "--git-path", "index")[:-1]), copy)
    except FileNotFoundError:
        pass                            # nothing was ever added
    except OSError as error:
        raise describe_disk_error(error, "copy git's index to", aside) from None
    return copy


def show_hidden(git: Git) -> list[str]:
    """Make git look at files that are marked as assume-unchanged or skip-worktree, if they are there; return the submodules."""
    assumed, skipped, modules = [], [], []
    for entry in git.names("--stage", "-v"):
        facts, _, path = entry.partition("\t")
        if facts[0].islower():
            assumed.append(path)
        if facts[0] in "Ss" and os.path.lexists(os.path.join(git.folder, path)):
            skipped.append(path)
        if facts[2:8] == "160000":
            modules.append(path)
    for mark, paths in (("assume-unchanged", assumed), ("skip-worktree", skipped)):
        if paths:
            git.run("update-index", f"--no-{mark}", "-z", "--stdin", given=paths)
    return modules


def add_untracked(git: Git) -> list[str]:
    """Add the files that are neither tracked nor ignored; return the repositories among them, which are left out.  Raises: usage."""
    found = git.names("--others", "--exclude-standard")
    files = [path for path in found if not path.endswith("/")]
    sizes = [(find_size(os.path.join(git.folder, path)), path) for path in files]
    total_mib = sum(size for size, _ in sizes) / 2**20
    if total_mib > MAX_UNTRACKED_MIB:
        size, path = max(sizes)
        raise NexusError("usage", f"{git.folder} has {format_count(len(files), 'file')} that git neither tracks nor ignores, "
                         f"{format_memory(total_mib)} together; a snapshot takes {MAX_UNTRACKED_MIB}MB of them",
                         hint=f"the largest is {format_line(path)} ({format_memory(size / 2**20)}): add it to .gitignore")
    if files:
        git.run("update-index", "--add", "--remove", "-z", "--stdin", given=files)      # --remove: one may be gone by now
    return [path[:-1] for path in found if path.endswith("/")]


def find_size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def write_commit(git: Git) -> str:
    """A commit of what the index holds: HEAD, or a child of it that depends on nothing but the two."""
    tree = git.run("write-tree").strip()
    code, output, _ = git.call("log", "-1", "--no-show-signature", "--no-color", "--format=%H %T %ct", "HEAD")
    head, head_tree, date = output.split() if not code else ("", "", "0")      # there is no commit yet
    if tree == head_tree:
        return head
    who = {f"GIT_{role}_{fact}": text for role in ("AUTHOR", "COMMITTER")
           for fact, text in (("NAME", "nexus"), ("EMAIL", "nexus@localhost"), ("DATE", f"@{date} +0000"))}
    return git.run("commit-tree", tree, *(["-p", head] if head else []), "-m", "nexus: the work tree as it was at submit", **who).strip()


def release_snapshot(repository: str, commit: str, environ: Mapping[str, str]) -> None:
    """Let git's gc have a snapshot that no job needs any more; nothing, when the repository has gone.  Raises: unavailable."""
    if re.fullmatch(r"[0-9a-f]{40,64}", commit):
        Git(repository, environ).call("update-ref", "-d", f"refs/nexus/{commit}")


# Another machine, by OpenSSH, which knows keys, agents, jump hosts and host keys.  One connection for each: what is run
# there and what is forwarded goes through it.  It ends with this process, since its remote end reads from us until then.

SSH_PATIENCE_S = 40.0           # for a connection to be made, also through a jump host
SSH_CALL_TIMEOUT_S = 120.0      # for what is run there
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ForwardAgent=no", "ForwardX11=no",
               "PermitLocalCommand=no", "ControlPersist=no", "RemoteCommand=none", "StreamLocalBindUnlink=yes")
SSH_NOISE = ("@", "Warning: Permanently added", "mux_client", "kex_exchange_identification", "Connection closed by UNKNOWN",
             "Connection to UNKNOWN")
SSH_HINTS = (                   # words of ssh, and what to do
    ("IDENTIFICATION HAS CHANGED", "its host key is another than before: find out why; then ssh-keygen -R {host} forgets the old one"),
    ("Host key verification failed", "accept its host key once, after you have checked it: {ssh} true"),
    ("Permission denied", "log in by key, without a password: {copy}"),
    ("Too many authentication failures", "name the key that is right: --identity FILE"),
    ("administratively prohibited", "its sshd must allow it: AllowTcpForwarding yes in sshd_config"))


def call_through(control: str) -> list[str]:
    """ssh by way of an open connection, and no other."""
    return ["ssh", "-F", "none", "-S", control, "-o", "ControlMaster=no", "-o", "ProxyCommand=false"]


def find_address(host: str) -> str:
    """By which a service that listens on `host` is reached on its own machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(host, host)


class Ssh:
    """The OpenSSH connection to a node."""

    def __init__(self, node: NodeConfig, folder: str, environ: Mapping[str, str]) -> None:
        self.node = node
        stem = os.path.join(folder, hash_text(node.name)[:12])
        stem += f".{os.getpid()}"                       # an ssh of a former service that ends late removes its own sockets
        self.control, self.socket = f"{stem}.control", f"{stem}.api"
        self.environ = {**environ, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
        self.process: subprocess.Popen[bytes] | None = None
        self.forwarded = ""                             # what the API's socket leads to

    def list_options(self) -> list[str]:
        node, options = self.node, [word for option in SSH_OPTIONS for word in ("-o", option)]
        identity = ["-i", os.path.expanduser(node.identity_file)] if node.identity_file else []
        if node.jump:                                   # -J would ask questions, and knows no -i
            user, _, place = node.jump.rpartition("@")
            host, _, port = place.partition(":")
            jump = ["ssh", *options, *identity, *(["-p", port] if port else []), *(["-l", user] if user else []), "-W", "[%h]:%p", host]
            options += ["-o", "ProxyCommand=" + " ".join(word if word == "[%h]:%p" else quote(word) for word in jump)]
        return [*options, *identity, *(["-p", str(node.port)] if node.port else [])]

    @property
    def by_hand(self) -> str:
        """How a person reaches the node."""
        node = self.node
        words = ["ssh", *(["-J", node.jump] if node.jump else []), *(["-p", str(node.port)] if node.port else []),
                 *(["-i", node.identity_file] if node.identity_file else []), node.destination]
        return " ".join(map(quote, words))

    def fault(self, what: str, said: str) -> NexusError:
        """With ssh's own words."""
        lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(SSH_NOISE)]
        why = "the line was cut" if said.strip() else "ssh said nothing"
        hint = next((hint for words, hint in SSH_HINTS if words in said), "try it by hand: {ssh}").format(
            host=self.node.host, ssh=self.by_hand, copy=self.by_hand.replace("ssh ", "ssh-copy-id ", 1).replace(" -J ", " -o ProxyJump="))
        return NexusError("unavailable", f"{what} {self.node.name}: {format_line('; '.join(lines[-3:]), 300) or why}", hint)

    @property
    def is_open(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def open(self) -> None:
        """Raises: unavailable, with ssh's words."""
        import subprocess
        import tempfile
        self.close()
        make_folder(os.path.dirname(self.control))
        check_private(os.path.dirname(self.control))
        remove_file(self.control)
        with tempfile.TemporaryFile() as said:
            try:
                process = self.process = subprocess.Popen(
                    ["ssh", *self.list_options(), "-o", "ClearAllForwardings=yes", "-M", "-S", self.control, "-T", self.node.destination,
                     "exec cat >/dev/null"],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, env=self.environ, start_new_session=True)
            except OSError as error:
                raise NexusError("unavailable", f"ssh cannot be run: {error.strerror}", hint="install OpenSSH's client: "
                                 "apt install openssh-client") from None
            give_up_at = time.monotonic() + SSH_PATIENCE_S
            while not os.path.exists(self.control):
                if process.poll() is not None or time.monotonic() > give_up_at:
                    is_late = process.poll() is None
                    self.close()
                    said.seek(0)
                    words = said.read().decode("utf-8", "replace")
                    raise self.fault("cannot reach", words or (f"no answer within {SSH_PATIENCE_S:g} s" if is_late else ""))
                time.sleep(0.01)

    def call(self, command: str, given: bytes = b"", timeout_s: float = SSH_CALL_TIMEOUT_S) -> tuple[int, str, str]:
        """Run a command there: (exit code, stdout, stderr).  Raises: unavailable."""
        import subprocess
        try:
            done = subprocess.run([*self.through(), self.node.destination, command], input=given, capture_output=True, timeout=timeout_s,
                                  env=self.environ, start_new_session=True, check=False)
        except subprocess.TimeoutExpired:
            raise NexusError("unavailable", f"{self.node.name} was not done with {format_line(command, 60)} within {timeout_s:g} s",
                             hint=f"try it by hand: {self.by_hand}") from None
        output, said = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
        if done.returncode == 255:
            raise self.fault("lost the connection to", said)
        return done.returncode, output, said

    def through(self) -> list[str]:
        return [*call_through(self.control), "-T", "-o", "BatchMode=yes"]

    def forward(self, host: str, port: int) -> None:
        """Let self.socket lead to where a service listens there.  Raises: unavailable."""
        import subprocess
        host = find_address(host)
        place = f"{self.socket}:{f'[{host}]' if ':' in host else host}:{port}"
        if place == self.forwarded and os.path.exists(self.socket):
            return
        asked = [("cancel", self.forwarded)] if self.forwarded else []
        for act, where in [*asked, ("forward", place)]:
            remove_file(self.socket)
            done = subprocess.run([*self.through(), "-O", act, "-o", "StreamLocalBindUnlink=yes", "-L", where, self.node.destination],
                                  stdin=subprocess.DEVNULL, capture_output=True, timeout=SSH_CALL_TIMEOUT_S, env=self.environ, check=False)
        if done.returncode:
            raise self.fault("cannot forward to", done.stderr.decode("utf-8", "replace"))
        self.forwarded = place

    def close(self) -> None:
        process, self.process, self.forwarded = self.process, None, ""
        if process:
            import subprocess
            assert process.stdin
            process.kill()
            process.wait()
            try:
                process.stdin.close()
            except (OSError, subprocess.SubprocessError):
                pass
        for path in (self.control, self.socket):
            remove_file(path)


# What is run on a node: find a Python, tell which nexus is there, and start its service if that is the one wanted.
PROBE_SCRIPT = r'''
home=${NEXUS_HOME:-$HOME/.nexus} found='' seen=''
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 /opt/conda/bin/python3 ~/miniconda3/bin/python3; do
  path=$(command -v "$name") || continue
  version=$("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  seen="$seen $version"
  case $version in 3.9|3.1[0-9]|3.[2-9][0-9]) found=$path; break;; esac
done
[ "$found" ] || { printf 'nexus-probe {"seen": "%s"}\n' "$seen"; exit; }
exec "$found" - "$home" @wanted@ <<'END'
import hashlib, json, os, socket, subprocess, sys
home, wanted = sys.argv[1:]
path = os.path.join(home, "nexus.py")
told = {"python": sys.executable, "path": path, "hash": None, "version": "%d.%d.%d" % sys.version_info[:3]}
def read(name):
    try:
        with open(os.path.join(home, name), "rb") as file:
            return file.read()
    except OSError:
        return b""
def call(verb):
    done = subprocess.run([sys.executable, path, verb], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=dict(os.environ, NEXUS_HOME=home))
    told["fault"] = done.stderr.decode("utf-8", "replace") if done.returncode else ""
    return json.loads(read("service.json") or b"{}")
told["hash"] = hashlib.sha256(read("nexus.py")).hexdigest()[:8] if read("nexus.py") else None
if told["hash"] == wanted:
    service = call("start")
    if "NEXUS_HOME=" in told["fault"]:          # a home directory that machines share, and another one's nexus is there
        home += "-" + socket.gethostname()
        service = call("start")
    if not told["fault"] and service.get("hash") != wanted:
        service = call("restart")
    told["service"], told["token"], told["home"] = service, read("token").decode("utf-8", "replace").strip(), home
print("nexus-probe " + json.dumps(told))
END
'''


def probe_node(ssh: Ssh, wanted: str) -> dict[str, Any]:
    """{python, path, hash} of the nexus on a node; and if its hash is the one wanted its {service, token}, running.

    Raises: unavailable.
    """
    code, output, said = ssh.call("sh -s", PROBE_SCRIPT.replace("@wanted@", quote(wanted)).encode())
    line = next((line for line in output.splitlines() if line.startswith("nexus-probe {")), "")
    try:
        told: dict[str, Any] = json.loads(line.partition(" ")[2])
    except ValueError:
        raise ssh.fault("cannot look at", said or output or f"exit code {code}") from None
    if "python" not in told:
        seen = told.get("seen", "").strip()
        raise NexusError("unavailable", f"{ssh.node.name} has {f'Python {seen}' if seen else 'no python3'}; nexus needs 3.9 or newer there",
                         hint=f"install one and put it on PATH as python3.9, python3.10 ...: {ssh.by_hand}")
    if told.get("fault"):
        said, _, hint = told["fault"].strip().rpartition("hint: ") if "hint: " in told["fault"] else (told["fault"], "", "")
        lines = [line for line in said.strip().splitlines() if line] or [""]
        raise NexusError("unavailable", f"the service on {ssh.node.name} cannot be started: {format_line(lines[-1], 300)}", hint="; ".join(
            filter(None, (format_line(hint, 300), f"by hand: {ssh.by_hand} {told['python']} {told['path']} start"))))
    return told


def install_on_node(ssh: Ssh, content: bytes) -> None:
    """Put a nexus.py there.  Raises: unavailable."""
    script = ('umask 077; home=${NEXUS_HOME:-$HOME/.nexus}; new=$home/nexus.py.new; mkdir -p "$home" && '
              '{ cat > "$new" && mv "$new" "$home/nexus.py" || { rm -f "$new"; exit 1; }; }')
    code, output, said = ssh.call(f"sh -c {quote(script)}", content)
    if code:
        raise ssh.fault("cannot write nexus.py on", said or output)


class NodeApi:
    """A node's API, by the forwarded socket; one connection, kept."""

    def __init__(self, path: str, token: str, is_tls: bool) -> None:
        self.path, self.token, self.is_tls = path, token, is_tls
        self.line: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        """The answer's JSON.  What is asked may be asked twice.

        Raises: OSError, when the line is cut (TimeoutError: when it is silent); what the node answers.
        """
        content, was_kept = encode_json(body).encode("ascii"), self.line is not None
        try:
            status, data = self.exchange(method, path, content, timeout_s)
        except ConnectionError:
            if not was_kept:
                raise
            status, data = self.exchange(method, path, content, timeout_s)      # there it had been idle for too long
        if status >= 400:
            told = data if isinstance(data, dict) else {}
            kind = told["error"] if told.get("error") in KINDS else "internal"
            raise NexusError(kind, str(told.get("message")), str(told.get("hint", "")))
        return data

    def exchange(self, method: str, path: str, content: bytes, timeout_s: float) -> tuple[int, Any]:
        """(HTTP status, JSON).  Raises: TimeoutError; ConnectionError."""
        import http.client
        try:
            self.line = self.line or self.connect(timeout_s)
            if self.line.sock:
                self.line.sock.settimeout(timeout_s)
            self.line.request(method, path, content, {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"})
            answer = self.line.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        except socket.timeout:
            self.close()
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            raise ConnectionError(str(error) or "the line was cut") from None

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Raises: OSError."""
        import http.client
        import ssl
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(timeout_s)
            made.connect(self.path)
            if self.is_tls:                             # whose it is ssh has seen to
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                made = context.wrap_socket(made)
        except BaseException:
            made.close()
            raise
        line = http.client.HTTPConnection("localhost")
        line.sock, line.auto_open = made, 0
        return line

    def close(self) -> None:
        line, self.line = self.line, None
        if line:
            line.close()


def push_snapshot(ssh: Ssh, repository: str, commit: str, name: str, environ: Mapping[str, str]) -> str:
    """Bring a snapshot to a node, into a repository of its own called `name`; its path there.

    Raises: unavailable, when the line is cut; not_found, when that is not what it fails at.
    """
    script = (f'd=${{NEXUS_HOME:-$HOME/.nexus}}/snapshots/{name}.git; umask 077; mkdir -p "$d" && cd "$d" && '
              "{ [ -e HEAD ] || git init -q --bare .; } && pwd -P")
    code, output, said = ssh.call(f"sh -c {quote(script)}")
    path = output.strip().rpartition("\n")[2]
    if code or not path.startswith("/"):
        fault = ssh.fault("cannot keep the snapshot on", said or output)
        raise NexusError("not_found", fault.message, fault.hint) if ssh.is_open else fault
    code, _, said = Git(repository, environ).call(
        "push", "-q", f"ssh://{ssh.node.destination}{path}", f"{commit}:refs/nexus/{commit}",
        GIT_SSH_COMMAND=" ".join(map(quote, ssh.through())), GIT_SSH_VARIANT="ssh")
    if code:
        raise NexusError("not_found" if ssh.is_open else "unavailable",
                         f"the snapshot of {repository} cannot be brought to {ssh.node.name}: {format_git_words(said)}",
                         hint=f"is git there?  {ssh.by_hand} git --version")
    return path


# ==== 11. RUNNER ==== job.sh: what runs around each job; and what keeps the service running
# job.sh is sh and a few coreutils: it costs little for as long as the job lives, can be read, and can be run by hand.
# It claims its attempt, takes the GPU lease, says `start`, runs the command with its output straight into the log
# files, says `end`, and leaves a result file.  What it says is a hint; its files are the truth.

JOB_SCRIPT = r'''#!/bin/sh
# Job @id@ of nexus, user @user@.  Run by hand (sh job.sh) it just runs the command; nexus calls it with the attempt's number.
attempt=${1:-}
id=@id@ dir=@dir@ events=@events@ lease=@lease@ gpus=@gpus@ job_path=@job_path@
commit=@commit@ repo=@repo@ tree=$dir/tree-${attempt:-by-hand-$$}
cwd=@cwd@

command_of_the_job() {
@slurm@  umask @umask@
  exec @limits@/usr/bin/env -i -- \
@environment@
    "$@" @launch@
}

say() { [ -p "$events" ] && printf '%s\n' "$*" 1<>"$events"; } 2>/dev/null
uptime_cs() { read -r up rest < /proc/uptime; up=${up%.*}${up#*.}; }
fail() { rm -f "$dir/claim-$$"; say fail "$id" "$attempt" "$@"; printf '%s\n' "$*" >&2; exit 0; }
bounce() {
  command exec 9>&-
  say bounce "$id" "$attempt" "$@"
  took=0
  finish null ", \"cause\": \"bounce\", \"cause_line\": \"$*\""
  exit 0
}
# Nothing is lost when the disk is full: it is tried until there is room.  A checkout goes only where the command never ran.
finish() {
  until printf '{"exit_code": %s, "finished_at": %s, "runtime_seconds": %s.%02d%s}\n' "$1" "$(date +%s)" \
      $((took / 100)) $((took % 100)) "$2" > "$dir/result-$attempt.tmp" && sync "$dir/result-$attempt.tmp" &&
      mv "$dir/result-$attempt.tmp" "$dir/result-$attempt.json"
  do sleep 2; [ "$1" != null ] || drop_tree; [ -d "$dir" ] || break; say end "$id" "$attempt" "$1" "$took"; done 2>/dev/null
  rm -f "$dir/claim-$$"
}
not_launched() {
  took=0
  printf 'nexus: %s\n' "$1" >> "$dir/stderr.log"
  finish null ", \"cause\": \"launch\", \"cause_line\": \"$2\""
  drop_tree
  exit 0
}
# A checkout of the snapshot has a .git of its own that borrows all but HEAD and index, as a linked work tree does; but
# nothing is written into the user's repository, where `git worktree add` breaks what else runs git at that moment.
git_there() {
  /usr/bin/env -i PATH="$job_path" HOME="${HOME:-/}" LC_ALL=C GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 git @git_options@ \
    -C "$@" 9>&-
}
make_tree() {
  umask @umask@
  drop_tree
  common=$(git_there "$repo" rev-parse --git-common-dir </dev/null) || return
  case $common in /*) ;; *) common=$repo/$common;; esac
  mkdir -p "$tree/.git/objects" "$tree/.git/refs" && printf '%s\n' "$common" > "$tree/.git/commondir" &&
    printf '%s\n' "$commit" > "$tree/.git/HEAD" && git_there "$tree" read-tree -u --reset HEAD </dev/null && mkdir -p "$cwd"
}
# What the job itself wrote into its checkout is kept beside its logs; what came out of git, and compiled Python, goes.
# What the job has done to HEAD and index does not count.  Where git cannot tell the two apart, all of it is kept.
git_here() { git_there . --git-dir=.git --work-tree=. "$@"; }
keep_made() {
  [ "$commit" ] && [ -d "$tree" ] || return 0
  ( cd "$tree" || exit
    rm -f .git/index.lock
    git_here read-tree --reset "$commit" && {
      git_here update-index -q --refresh
      git_here diff-files -z --name-only --diff-filter=d | git_here update-index -z --force-remove --stdin
    } && git_here ls-files -z | xargs -0 rm -f -- && rm -rf .git
    find . -name __pycache__ -type d -prune -exec rm -rf {} +
    find . -depth -mindepth 1 -type d -empty -delete ) 2>/dev/null
  rmdir "$tree" 2>/dev/null || mv "$tree" "$dir/files-$attempt"
}
drop_tree() {
  [ -z "$commit" ] || rm -rf --one-file-system "$tree" || {
    find "$tree" -xdev -type d ! -perm -700 -exec chmod u+rwx {} \; ; rm -rf --one-file-system "$tree"; }
} 2>/dev/null

if [ -z "$attempt" ]; then
  [ "$commit" ] || { cd "$cwd" && command_of_the_job; exit; }
  trap : HUP INT QUIT TERM
  ( make_tree && trap - HUP INT QUIT TERM && cd "$cwd" && command_of_the_job )
  code=$?
  drop_tree
  exit $code
fi

trap : HUP                                # it outlives screen; the command does not inherit this
trap : INT QUIT TERM                      # Ctrl-C, or `kill 0`, ends the command, not this script
read -r stat < /proc/$$/stat
set -- ${stat##*) }
started=${20}
# Whoever links this name first has the attempt: this script, or a service that found nobody running it.
printf '%s %s\n' "$$" "$started" > "$dir/claim-$$" || fail "the log folder $dir cannot be written"
ln "$dir/claim-$$" "$dir/attempt-$attempt" 2>/dev/null || {
  [ -e "$dir/attempt-$attempt" ] || fail "$dir takes no hard links: set [state] log_dir to another file system"
  rm -f "$dir/claim-$$"
  exit 0
}
if [ -n "$lease" ]; then
  # Without screen in between, the service's own lock comes along as stdin, which saves the fork of flock.
  if [ "$lease" -ef /proc/$$/fd/0 ]; then command exec 9<&0 </dev/null
  else command exec 9<"$lease" && flock -s -w 5 9; fi && [ "$lease" -ef /proc/$$/fd/9 ] || bounce the GPU lease is gone
  for other in "${lease%/*}"/*; do
    case $other in "${lease%.*}".*|*/lock) continue;; esac
    [ -f "$other" ] && [ ! -h "$other" ] || continue        # a FIFO would hold it up
    set -f
    for gpu in $(head -c 65536 "$other"); do                # however large somebody has made it
      case $gpus in *" $gpu "*) flock -n -x 8 || bounce "$gpu is held by another nexus";; esac
    done 8<"$other"
    set +f
  done 2>/dev/null
fi
say start "$id" "$attempt" "$$" "$started"
if [ "$commit" ]; then
  said=$(make_tree 2>&1) || not_launched "the snapshot of $repo cannot be checked out: $said" \
    @no_tree@"$(printf %s "$said" | tr '"\\' "'/" | tr '\001-\037\177' ' ' | tail -c 300)"
fi
cd "$cwd" 2>/dev/null || not_launched "the directory $cwd cannot be entered; make it again, or add the job with --cwd" @no_cwd@
own_path=$PATH PATH=$job_path
command -v bash > /dev/null || { PATH=$own_path; not_launched "bash was not found on PATH ($job_path)" @no_bash@; }
PATH=$own_path
command : >> "$dir/stdout.log" && command : >> "$dir/stderr.log" || not_launched "the log files cannot be written" @no_logs@
if [ -t 1 ]; then                         # under screen, its window shows the logs
  NEXUS_ROLE=viewer tail -qn 100 -s 0.2 -f --pid=$$ "$dir/stdout.log" "$dir/stderr.log" </dev/null 2>/dev/null 9>&- &
fi
uptime_cs; begin=$up
( trap - HUP INT QUIT TERM; command_of_the_job ) >> "$dir/stdout.log" 2>> "$dir/stderr.log"
code=$?
if [ -e "$dir/fault-$attempt" ]; then      # only CONDA_SCRIPT leaves one; ended by a signal, it is no fault of the environment
  { read -r words; read -r line; } < "$dir/fault-$attempt"
  rm -f "$dir/fault-$attempt"
  [ "$code" -gt 128 ] || not_launched "$words" "$line"
fi
uptime_cs; took=$((up - begin))
command exec 9>&-
say end "$id" "$attempt" "$code" "$took"
finish "$code" ""
keep_made
'''


CONDA_SCRIPT = r'''
# Activate the conda environment $1, a name or a path, and become the command that the other words are.
# Each of conda's kin prints what a shell has to do for it; its own shell function evaluates the same.  `conda run` would
# hold the output back.  All names begin with nexus_, so that neither the job's environment nor an activation script has them.
nexus_name=$1 nexus_fault=$NEXUS_JOB_FAULT nexus_tried=()
unset NEXUS_JOB_FAULT
nexus_known=(~/{miniconda3,miniforge3,mambaforge,anaconda3}/bin/conda ~/.local/bin/micromamba ~/bin/micromamba
             /opt/{conda,miniconda3,miniforge3,anaconda3}/bin/conda)

# Tell job.sh why the command does not run, as text and as the inside of a JSON string; or whoever runs it by hand.
nexus_fail() {
  trap - EXIT
  nexus_words=${1//[[:cntrl:]]/?}         # not `local`: the trap finds no function's context after `set -e` has ended one
  nexus_line=${nexus_words//\\/\\\\}
  nexus_line=${nexus_line//\"/\\\"}
  { [ "$nexus_fault" ] && printf '%s\n' "$nexus_words" "$nexus_line" > "$nexus_fault"; } || printf 'nexus: %s\n' "$nexus_words" >&2
  exit 1
}

nexus_explain() {
  local exe first rest names=", "
  [ "${#nexus_tried[@]}" -gt 0 ] || nexus_fail "no conda was found for the environment '$nexus_name': not by CONDA_EXE or\
 MAMBA_EXE, not as conda, mamba or micromamba on PATH, and none of ${nexus_known[*]%/bin/conda} is there"
  for exe in "${nexus_tried[@]}"; do
    while read -r first rest; do
      case $first in ''|'#'*|Name|─*) continue;; '*') first=$rest;; esac          # '*': it is active, and has only a path
      [[ $names == *", $first, "* ]] || names+="$first, "
    done < <("$exe" env list </dev/null)
  done
  if [ "$names" = ", " ] || [[ $names == *", $nexus_name, "* ]] || [ -d "$nexus_name/conda-meta" ]; then
    nexus_fail "the conda environment '$nexus_name' could not be activated by ${nexus_tried[*]}: stderr.log says why"
  fi
  names=${names#, }
  nexus_fail "the conda environment '$nexus_name' was not found; there are: ${names%, }"
}

if [ "$VIRTUAL_ENV" ]; then               # it was active where the job was added, and its python would come first
  PATH=:$PATH:
  PATH=${PATH//":$VIRTUAL_ENV/bin:"/:}
  PATH=${PATH#:} PATH=${PATH%:}
  unset VIRTUAL_ENV VIRTUAL_ENV_PROMPT
fi

mapfile -t nexus_path < <(type -P conda mamba micromamba)
for nexus_exe in "$CONDA_EXE" "$MAMBA_EXE" "${nexus_path[@]}" "${nexus_known[@]}"; do
  [ -f "$nexus_exe" ] && [ -x "$nexus_exe" ] && [[ " ${nexus_tried[*]} " != *" $nexus_exe "* ]] || continue
  nexus_tried+=("$nexus_exe")
  case ${nexus_exe##*/} in
    *mamba*) nexus_text=$("$nexus_exe" shell activate "$nexus_name" --shell bash </dev/null);;
    *) nexus_text=$("$nexus_exe" shell.posix activate "$nexus_name" </dev/null);;
  esac && eval "nexus_activate() { $nexus_text
}" && break
done
declare -F nexus_activate > /dev/null || nexus_explain
trap "nexus_fail \"a script of the conda environment '\$nexus_name' ended the activation with exit code \$?\"" EXIT
nexus_activate </dev/null >&2
trap - EXIT
[ -d "$CONDA_PREFIX" ] || nexus_explain   # old micromambas activate whatever they are told
exec "${@:2}"
'''


# What Slurm gives a job goes on to its command: its GPUs, and which job and node it is.
SLURM_SCRIPT = r'''  slurms='SLURM[A-Z0-9_]*|[A-Z]+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK'
  for name in $(/usr/bin/env | sed -En "s/^($slurms)=.*/\1/p"); do
    eval "set -- \"\$@\" \"$name=\$$name\""
  done
'''


def build_script(job: Job, environment: Mapping[str, str], layout: Layout, lease: str | None, limits: Sequence[str]) -> str:
    """job.sh of a job that is about to start.  `limits` are prlimit's options."""
    def line(text: str) -> str:                 # as a word of sh that is a JSON string's inside
        return quote(json.dumps(text)[1:-1])
    pairs = [f"    {quote(f'{name}={text}')} \\" if name != "NEXUS_JOB_NONCE" else
             f'    "{name}=${{attempt:+{text}}}" \\' for name, text in environment.items()]     # run by hand, it is nobody's to end
    if job.slurm_key is not None:
        pairs += ['    "CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}" \\',
                  '    "NEXUS_GPU_ID=${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES-}}" \\']
    launch = ["bash", "-c", *(["--"] if job.command.startswith(("-", "+")) else []), job.command]
    if job.tty:                                 # script runs $SHELL, which may be fish, or /bin/false
        shell = [f"SHELL={environment['SHELL']}"] if "SHELL" in environment else ["-u", "SHELL"]
        inner = " ".join(map(quote, ["exec", "/usr/bin/env", *shell, *launch]))
        launch = ["/usr/bin/env", "SHELL=/bin/sh", "script", "-q", "-e", "-f", "-c", inner, "/dev/null"]
    if job.conda:                               # around the terminal; -p: no BASH_ENV, which the command's own bash will read
        pairs.append('    "NEXUS_JOB_FAULT=${attempt:+$dir/fault-$attempt}" \\')
        kept = [f"{name}={environment[name]}" for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES") if name in environment]
        launch = ["bash", "-p", "-c", CONDA_SCRIPT, "nexus", job.conda, "/usr/bin/env", *kept, *launch]
    holes = {
        "id": job.id, "user": re.sub(r"[^\w.-]", "?", job.user), "dir": quote(layout.job_folder(job.id)),
        "events": quote(layout.events_file), "lease": quote(lease or ""), "gpus": quote(f" {' '.join(job.gpu_uuids)} "),
        "cwd": f'"$tree"/{quote(os.path.relpath(job.cwd, job.snapshot_repo))}' if job.snapshot_repo else quote(job.cwd),
        "commit": job.snapshot or "", "repo": quote(job.snapshot_repo or ""), "git_options": " ".join(GIT_OPTIONS),
        "job_path": quote(environment.get("PATH") or os.defpath),
        "umask": "$(umask)" if job.umask is None else f"{job.umask:04o}",
        "limits": f"prlimit {' '.join(limits)} -- " if limits else "",
        "slurm": SLURM_SCRIPT if job.slurm_key is not None else "", "environment": "\n".join(pairs), "launch": " ".join(map(quote, launch)),
        "no_tree": line(f"the snapshot of {job.snapshot_repo} cannot be checked out: "),
        "no_cwd": line(f"the directory {job.cwd} cannot be entered"), "no_bash": line("bash was not found on PATH"),
        "no_logs": line(f"the log files in {layout.job_folder(job.id)} cannot be written")}
    return re.sub("@([a-z_]+)@", lambda match: holes[match[1]], JOB_SCRIPT)


def build_environment(job: Job, submitted: Mapping[str, str], gpus: Sequence[Gpu]) -> dict[str, str]:
    """The submitter's environment, then what nexus sets, last.

    The indices are the driver's, which CUDA shares under PCI_BUS_ID; where they have gaps (a card that may not be opened),
    CUDA counts only what it may open, and uuids are right.  A job whose --cuda says its GPUs sees all of them.
    """
    usable = sorted(gpu.index for gpu in gpus if not gpu.fault)
    has_gaps = usable != list(range(len(usable)))
    kept = {name: text for name, text in submitted.items() if not is_job_variable(name)}
    kept.setdefault("PYTHONUNBUFFERED", "1")
    own = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID",
           "CUDA_VISIBLE_DEVICES": ",".join(job.gpu_uuids if has_gaps else map(str, job.gpu_indices)),
           "NEXUS_JOB_ID": job.id, "NEXUS_JOB_NONCE": job.nonce or "", "NEXUS_GPU_ID": ",".join(map(str, job.gpu_indices))}
    made = {**{name: text for name, text in kept.items() if name not in own}, **own}
    if job.cuda_arg:
        del made["CUDA_VISIBLE_DEVICES"]
    if job.slurm_key is not None:               # which GPUs it has is known only where it runs; job.sh says it
        made = {name: text for name, text in made.items()
                if name not in ("CUDA_VISIBLE_DEVICES", "NEXUS_GPU_ID") and not name.startswith("SLURM_")}
    return made


def list_cuda_numbers(job: Job, gpus: Sequence[Gpu]) -> list[int]:
    """A job's GPUs as CUDA counts them when it sees all: only those that may be opened."""
    usable = sorted(gpu.index for gpu in gpus if not gpu.fault)
    return [usable.index(index) if index in usable else index for index in job.gpu_indices]


def is_job_variable(name: str) -> bool:
    """What marks a job's own processes: neither a job submitted from inside another nor a service begun there has it."""
    return name.startswith("NEXUS_JOB_") or name in ("NEXUS_GPU_ID", "NEXUS_ROLE", "STY", "WINDOW")


def choose_limits(job: Job) -> tuple[list[str], list[str]]:
    """prlimit's options for a job, and what of its submitter's limits could not be given."""
    options, notes = [], []
    current, may_raise = current_limits(), may_raise_limits()
    top = float("inf")
    for name, soft, hard in job.limits:
        own_soft, own_hard = current[name]
        if (soft, hard) == (own_soft, own_hard):
            continue
        most = own_hard if own_hard >= 0 else top
        given_hard = hard if hard >= 0 else top
        if not may_raise:
            given_hard = min(given_hard, most)
        given_soft = min(soft if soft >= 0 else top, given_hard)
        if given_soft < (soft if soft >= 0 else top):
            notes.append(f"limit {name}: {soft if soft >= 0 else 'unlimited'} wanted, {given_soft:.0f} given (the service's hard limit)")
        words = ["unlimited" if number == top else str(int(number)) for number in (given_soft, given_hard)]
        options.append(f"--{name}={':'.join(words)}")
    if options and not find_program("prlimit"):
        return [], ["the submitter's limits were not set: prlimit (util-linux) is not installed"]
    return options, notes


def read_claim(folder: str, attempt: int) -> tuple[int, int] | None:
    """(pid, started) of the runner that has an attempt; None when it is nobody's; (0, 0) when a service claimed it."""
    text = read_text(os.path.join(folder, f"attempt-{attempt}"))
    if text is None:
        return None
    words = text.split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and all(map(is_number, words)) else (0, 0)


def take_claim(folder: str, attempt: int) -> bool:
    """Claim an attempt that no process runs, so that a late runner finds it taken.  Raises: OSError."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    try:
        os.close(os.open(os.path.join(folder, f"attempt-{attempt}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def read_result(folder: str, attempt: int) -> Result | None:
    try:
        return parse_result(read_text(os.path.join(folder, f"result-{attempt}.json")) or "")
    except (ValueError, TypeError, KeyError):
        return None


def read_tail(path: str, start: int, most: int) -> tuple[str, int]:
    """The end of a log from byte `start` on, at most `most` bytes of it, and the size of the whole file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, min(start, size), size - most))
            return file.read(most).decode("utf-8", "replace"), size
    except OSError:
        return "", 0


SUPERVISOR_SCRIPT = r'''
trap : HUP; trap '' INT QUIT
home=$1; shift
if [ -t 1 ]; then tail -n 100 -F --pid=$$ "$home/service.log" 2>/dev/null & fi
delay=1 has_run=
while :; do
  rm -f "$home/start_error.json"
  read -r began rest < /proc/uptime
  if command : 2>>"$home/service.log"; then "$@" </dev/null >/dev/null 2>>"$home/service.log"; else "$@" </dev/null >/dev/null 2>&1; fi
  code=$?
  read -r ended rest < /proc/uptime
  if [ $((${ended%.*} - ${began%.*})) -gt 10 ]; then delay=1 has_run=yes; fi
  [ $code -ne 0 ] || exit                 # it was stopped
  if [ -e "$home/start_error.json" ]; then
    [ "$has_run" ] || exit                # a fault that whoever started it has been told; later it may pass
  elif [ $code -eq 4 ]; then exit; fi     # another service has it
  sleep $delay
  [ ! -e "$home/stopped" ] || exit        # by somebody, meanwhile
  [ $delay -ge 16 ] || delay=$((delay * 2))
done
'''


# The service runs the compiled form, kept in its own folder: to compile the file takes 28 MB, which would stay with the
# process, so that a child does it.
SERVICE_STARTER = """\
import os, sys
from importlib import util
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv.pop(1), False
spec = util.spec_from_file_location("nexus", sys.argv.pop(1))
child = os.fork()
if not child:
    spec.loader.get_code("nexus")
    os._exit(0)
os.waitpid(child, 0)
sys.modules["nexus"] = nexus = util.module_from_spec(spec)
spec.loader.exec_module(nexus)
sys.pycache_prefix = None
sys.exit(nexus.entry())
"""


def build_service_environ(environ: Mapping[str, str], home: str) -> dict[str, str]:
    """What the service is started with: nothing of a job that it may be started from."""
    kept = {name: text for name, text in environ.items() if not is_job_variable(name) and name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "NEXUS_HOME": home, "NEXUS_ROLE": "service"}


def start_supervisor(layout: Layout, screen: Screen | None, environ: Mapping[str, str], options: Sequence[str]) -> None:
    """Start what starts the service, and starts it again when it dies: in the screen session `nexus`, or detached."""
    import subprocess
    service = [sys.executable, "-c", SERVICE_STARTER, layout.cache_dir, os.path.abspath(__file__), "serve", *options]
    command = ["/bin/sh", "-c", SUPERVISOR_SCRIPT, "nexus", layout.home, *service]
    started = build_service_environ(environ, layout.home)
    if screen:
        own = screen.environ()
        started.update({name: own[name] for name in ("SYSSCREENRC", "TERM")},
                       **({"SCREENDIR": own["SCREENDIR"]} if "SCREENDIR" in own else {}))
        command = screen.argv("nexus", command, is_daemon=True)
    else:                                       # the shell between leaves at once: the service is nobody's child
        command = ["/bin/sh", "-c", '"$@" &', "nexus", *command]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                     env=started, start_new_session=True).wait()


# ==== 12. STORE ==== the one owner of State: journal, snapshots, recovery, events
# A change is in the journal, synced, before anyone hears of it; those who wait together share one sync.  When the disk
# refuses, everything that was not synced is undone.  state.json is the state as of a journal number, made in the
# background; state.json.prev the one before, and the journal goes back to it.

MIN_SNAPSHOT_BYTES = 256 * 1024
SAVED_FACTS_KEPT = 20


class Write:
    """A change that somebody waits for."""

    def __init__(self, decide: Callable[[State], Changes]) -> None:
        self.decide = decide
        self.is_done = False
        self.answer: Any = None
        self.error: BaseException | None = None


class EventLog:
    """The latest events, numbered; whoever follows them is woken.  An event is (number, type, value)."""

    def __init__(self, first: int, kept: int = 5000) -> None:
        import collections
        import threading
        self.next_number = first
        self.items: collections.deque[tuple[int, str, Any]] = collections.deque(maxlen=kept)
        self.changed = threading.Condition()

    def publish(self, events: Sequence[tuple[str, Any]]) -> None:
        if events:
            with self.changed:
                for kind, what in events:
                    self.items.append((self.next_number, kind, what))
                    self.next_number += 1
                self.changed.notify_all()

    def read(self, since: int, timeout_s: float) -> tuple[list[tuple[int, str, Any]], bool]:
        """The events from number `since` on, at most 1,000, and whether it is unknown what came before them: no longer
        kept, or numbered by a service whose clock was ahead.
        """
        with self.changed:
            if since == self.next_number:
                self.changed.wait(timeout_s)
            oldest = self.next_number - len(self.items)
            if since > self.next_number:
                return [], True
            start = max(since, oldest) - oldest
            found = [self.items[at] for at in range(start, min(start + 1000, len(self.items)))]
            return found, since < oldest


class Store:
    """Keeps State and the disk in step.  Thread-safe."""

    def __init__(self, layout: Layout, clock: Clock, log: logging.Logger) -> None:
        import threading
        self.layout, self.clock, self.log = layout, clock, log
        self.host, self.machine_id = socket.gethostname(), read_machine_id()
        self.state = State()
        self.service_id = ""
        self.is_taking_over = False                         # of another machine, which is gone
        self.other_host = ""                                # of that machine, if State came from it
        self.events = EventLog(int(clock.now() * 1e6))      # numbers go on growing over restarts
        self.moves: list[Job] = []                          # jobs whose status is just being changed
        self.note_moves: Callable[[Sequence[Job]], None] = lambda jobs: None        # called with those that are on disk
        self.last_error: NexusError | None = None           # why the last write failed
        self.lock = threading.Lock()
        self.waiting: list[Write] = []
        self.waiting_lock = threading.Lock()
        self.snapshot_lock = threading.Lock()
        self.snapshot_wanted = threading.Event()
        self.journal: AppendFile | None = None
        self.journal_bytes = 0                              # since the last snapshot
        self.snapshot_bytes = 0
        self.snapshot_seq = -1                              # of state.json, if it is good
        self.snapshot_stamp: tuple[int, ...] | None = None  # how it was left: others may edit it, or delete it
        self.edit_stamp: tuple[int, ...] | None = None      # how the last edit of others left it
        self.edit_seq = -1                                  # and from which state.json it was made
        self.saved_facts: dict[int, Mapping[str, Any]] = {}     # {seq: what state.json said then} of the latest
        self.previous_seq = -1                              # of state.json.prev

    # Changing and reading

    def update(self, decide: Callable[[State], Changes]) -> Any:
        """Make the changes that `decide`, a generator, yields; each is in State before it goes on.  Returns what it returns.

        Raises: what `decide` raises; unavailable, when the disk refuses.  Then nothing has changed.
        """
        write = Write(decide)
        with self.waiting_lock:
            self.waiting.append(write)
        with self.lock:                     # whoever gets it first commits for all who wait
            if not write.is_done:
                self.commit()
        if write.error is not None:
            raise write.error
        return write.answer

    def read(self, look: Callable[[State], T]) -> T:
        """What `look` takes from State; it must take values, and not keep the State."""
        with self.lock:
            return look(self.state)

    def commit(self) -> None:
        with self.waiting_lock:
            batch, self.waiting = self.waiting, []
        first_seq = self.state.seq
        undos: list[Callable[[], None]] = []
        lines: list[str] = []
        events: list[tuple[str, Any]] = []
        for write in batch:
            self.perform(write, undos, lines, events)
        if not lines:
            return
        try:
            self.append("".join(lines).encode("ascii"))
        except OSError as error:
            refusal = describe_disk_error(error, "write the journal in", self.layout.journal_dir)
            undo_all(undos, 0)
            self.state.seq, self.moves = first_seq, []
            for write in batch:                 # also those who only looked: they saw what is undone now
                write.error = write.error or refusal
            if self.last_error is None:
                self.log.error("%s: nothing new is accepted or started until it can be written", refusal.message)
            self.last_error = refusal
            return
        if self.last_error is not None:
            self.log.info("The journal can be written again")
        self.last_error = None
        self.note_moves(self.moves)
        self.moves = []
        self.events.publish(events)

    def perform(self, write: Write, undos: list[Callable[[], None]], lines: list[str], events: list[tuple[str, Any]]) -> None:
        """Make one request's changes in State, or none of them."""
        marks = len(undos), len(lines), len(events), len(self.moves)
        try:
            steps = write.decide(self.state)
            while True:
                change = next(steps)
                undos.append(apply(self.state, change))
                lines.append(encode_change(self.state.seq + len(lines) - marks[1] + 1, change))
                events.extend(make_events(self.state, change))
                if isinstance(change, JobChanged) and "status" in change.facts:
                    self.moves.append(self.state.jobs[change.id])
        except StopIteration as end:
            write.answer = end.value
            self.state.seq += len(lines) - marks[1]
        except BaseException as error:
            write.error = error
            undo_all(undos, marks[0])
            del lines[marks[1]:], events[marks[2]:], self.moves[marks[3]:]
        write.is_done = True

    def append(self, record: bytes) -> None:
        """Raises: OSError."""
        if self.journal is None or self.journal.is_damaged:
            self.begin_segment(self.state.seq - record.count(b"\n") + 1)
        assert self.journal is not None
        self.journal.append(record)
        self.journal_bytes += len(record)
        if self.journal_bytes > max(MIN_SNAPSHOT_BYTES, self.snapshot_bytes):
            self.snapshot_wanted.set()

    # The journal's segments are named by their first number.  Where two hold a number, the later segment is right: the
    # earlier one's end is what a failed write left.

    def begin_segment(self, first: int) -> None:
        """Raises: OSError."""
        if self.journal is not None:
            self.journal.close()
            self.journal = None
        journal = AppendFile(os.path.join(self.layout.journal_dir, f"journal-{first}.jsonl"))
        try:
            sync_folder(self.layout.journal_dir)        # a segment whose name may get lost must hold nothing
        except OSError:
            journal.close()
            raise
        self.journal = journal

    def list_segments(self) -> list[tuple[int, str]]:
        folder = self.layout.journal_dir
        found = [(int(match[1]), os.path.join(folder, name)) for name in os.listdir(folder)
                 for match in [re.fullmatch(r"journal-(\d+)\.jsonl", name)] if match]
        return sorted(found)

    # Snapshots

    def freeze(self) -> Snapshot:
        """Immutable values of the whole State; the caller holds the lock."""
        state = self.state
        jobs = [*state.finished.values(), *state.running.values(), *(job for job in state.jobs.values() if job.status == PENDING)]
        for digest in [digest for digest in state.environments if digest not in state.environment_uses]:
            del state.environments[digest]
        if state.groups:
            used = {job.group for job in jobs}
            state.groups = {name: group for name, group in state.groups.items() if name in used}
        return Snapshot(state.seq, self.host, self.machine_id, self.service_id, state.next_number,
                        {name: getattr(state, name) for name in STATE_FACTS}, dict(state.environments), jobs,
                        tuple(state.groups.values()), dict(state.seen))

    def read_edit(self) -> dict[str, Any] | None:
        """What another program has changed of `paused` and `paused_gpus` in state.json; None when the file is as it was left.

        Changed is what differs from the state.json that it has read, which need not be the latest.
        Raises: ValueError, when it is not JSON (it may be half written); OSError.
        """
        with self.snapshot_lock:
            stamp = stamp_of(self.layout.state_file)
            if self.snapshot_seq < 0 or stamp == self.snapshot_stamp:
                return None
            text = read_text(self.layout.state_file)
            body = {} if text is None else load_json(text)          # deleted: that resets nothing
            if not isinstance(body, dict):
                raise ValueError("no object")
            seq = body.get("seq")
            self.edit_stamp, self.edit_seq = stamp, seq if isinstance(seq, int) and seq in self.saved_facts else self.snapshot_seq
            return {name: freeze(body[name]) for name in ("paused", "paused_gpus")
                    if name in body and freeze(body[name]) != self.saved_facts[self.edit_seq][name]}

    def note_edit(self, edit: Mapping[str, Any]) -> None:
        """What read_edit gave is taken over: should the next edit come before the file is written anew, it is of this."""
        with self.snapshot_lock:
            self.saved_facts[self.edit_seq] = {**self.saved_facts[self.edit_seq], **edit}

    def give_up_edit(self) -> None:
        """Write state.json anew, though it is broken."""
        with self.snapshot_lock:
            self.edit_stamp = stamp_of(self.layout.state_file)

    def note_saved(self, seq: int, facts: Mapping[str, Any], stamp: tuple[int, ...] | None) -> None:
        """state.json is this now."""
        self.saved_facts[seq] = facts
        for old in sorted(self.saved_facts)[:-SAVED_FACTS_KEPT]:
            del self.saved_facts[old]
        self.snapshot_seq, self.snapshot_stamp = seq, stamp

    def save_snapshot(self, is_forced: bool = False) -> None:
        """Write state.json, and drop what state.json.prev makes needless.  Raises: OSError; then all is as it was."""
        with self.snapshot_lock:
            with self.lock:
                if self.snapshot_seq == self.state.seq and not is_forced:
                    return
                self.begin_segment(self.state.seq + 1)
                frozen = self.freeze()
                before, self.journal_bytes = self.journal_bytes, 0
            aside = self.layout.state_file + ".new"
            try:
                write_atomic(aside, encode_snapshot(frozen))
            except OSError:
                self.journal_bytes += before
                raise
            if self.snapshot_seq >= 0 and stamp_of(self.layout.state_file) not in (self.snapshot_stamp, self.edit_stamp):
                self.snapshot_wanted.set()              # edited again: that is taken over first
                return
            if self.snapshot_seq >= 0 and stamp_of(self.layout.state_file) == self.snapshot_stamp:  # a broken one never becomes .prev
                keep_previous(self.layout.state_file, self.layout.previous_state_file)
                self.previous_seq = self.snapshot_seq
            stamp = stamp_of(aside)                     # it keeps that, and may be edited at once
            os.replace(aside, self.layout.state_file)
            self.note_saved(frozen.seq, frozen.facts, stamp)
            sync_folder(self.layout.journal_dir)
            self.snapshot_bytes = stamp[1] if stamp else 0
            self.drop_segments()

    def drop_segments(self) -> None:
        segments = self.list_segments()
        for (_, path), (following, _) in zip(segments, segments[1:]):
            if following <= self.previous_seq + 1:
                os.unlink(path)

    # Recovery

    def recover(self) -> None:
        """Bring State back from the disk.  Raises: conflict, when it is another machine's; unavailable."""
        try:
            os.makedirs(self.layout.journal_dir, mode=0o700, exist_ok=True)
            self.sweep()
            segments = self.list_segments()
            damage = self.rebuild(segments)
        except OSError as error:
            raise describe_disk_error(error, "read", self.layout.journal_dir) from None
        if self.other_host and self.state.running and not self.is_taking_over:
            raise describe_other_machine(self.other_host, f"jobs of {self.layout.state_file} run there")
        self.service_id = self.service_id or f"{os.geteuid()}-{self.clock.new_token()[:8]}"
        for problem in damage:
            self.log.error("Recovery: %s", problem)
        try:
            for first, path in segments:
                is_ahead = first > self.state.seq + 1           # it would hide what comes now
                if damage or is_ahead:
                    keep_aside(path, is_copy=not is_ahead)
            self.begin_segment(self.state.seq + 1)
            if damage or self.snapshot_seq < 0:
                self.snapshot_seq = -1
                self.save_snapshot()
        except OSError as error:
            raise describe_disk_error(error, "write", self.layout.journal_dir) from None

    def sweep(self) -> None:
        """Remove the halves of state.json that services left which were killed as they wrote it.  Raises: OSError."""
        folder, name = os.path.split(self.layout.state_file)
        for left in os.listdir(folder):
            if re.fullmatch(re.escape(name) + r"\.new\.\d+\.tmp", left):
                os.unlink(os.path.join(folder, left))

    def rebuild(self, segments: Sequence[tuple[int, str]]) -> list[str]:
        """Set State from the newest base whose journal has no gap, or else from the newest; return what was wrong.  Raises: OSError."""
        seqs: dict[str, int] = {}
        best: list[str] | None = None
        stamp = stamp_of(self.layout.state_file)        # who edits it from now on, is heard when this is done
        for path in (self.layout.state_file, self.layout.previous_state_file, ""):
            base = self.load_base(path) if path else (State(), "", "")
            if base is None:
                continue
            state, service_id, other_host = base
            seqs[path] = state.seq
            damage = self.replay(state, segments)
            if best is None or (best and not damage):
                self.state, self.service_id, self.other_host, best = state, service_id, other_host, damage
            if not damage:
                break
        self.snapshot_seq, self.snapshot_stamp = seqs.get(self.layout.state_file, -1), stamp
        self.previous_seq = seqs.get(self.layout.previous_state_file, read_seq(self.layout.previous_state_file))
        return best or []

    def load_base(self, path: str) -> tuple[State, str, str] | None:
        """The State of a state file, the service's id, and the host if that is another machine; None when there is none, or it
        is broken and was put aside.  Raises: OSError.
        """
        state = State()
        try:
            with open(path, encoding="utf-8") as file:
                try:
                    snapshot = decode_snapshot(file)
                except (ValueError, TypeError, KeyError, AttributeError):
                    file.seek(0)
                    snapshot = decode_snapshot(list(file))
            load_snapshot(state, snapshot)
            if path == self.layout.state_file:
                self.saved_facts = {snapshot.seq: snapshot.facts}
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            aside = keep_aside(path)
            self.log.error("Recovery: %s is broken (%s); it is kept as %s", path, format_line(repr(error), 200), aside)
            return None
        return state, snapshot.service_id, "" if snapshot.machine_id == self.machine_id else snapshot.host

    def replay(self, state: State, segments: Sequence[tuple[int, str]]) -> list[str]:
        """Apply the journal's lines after state.seq; return what was wrong with them, beside a torn end."""
        damage = []
        for number, (_, path) in enumerate(segments):
            limit = segments[number + 1][0] if number + 1 < len(segments) else None
            if limit is not None and limit <= state.seq + 1:
                continue
            unreadable = 0
            with open(path, "rb") as file:
                for line in file:
                    try:
                        seq, change = decode_change(line if line.endswith(b"\n") else b"")
                    except (ValueError, TypeError, KeyError, AttributeError):
                        unreadable += 1
                        continue
                    if limit is not None and seq >= limit:
                        break
                    if seq <= state.seq:
                        continue
                    if unreadable or seq != state.seq + 1:
                        damage.append(f"{path}: changes {state.seq + 1} to {seq - 1} are missing")
                        unreadable = 0
                    try:
                        apply(state, change)
                    except (KeyError, TypeError, ValueError, AttributeError):
                        damage.append(f"{path}: change {seq} fits nothing that is known")
                    state.seq = seq
            if unreadable > 1:                                  # one is what a write that was cut short leaves
                damage.append(f"{path}: its last {unreadable} lines cannot be read")
        return damage


def undo_all(undos: list[Callable[[], None]], mark: int) -> None:
    while len(undos) > mark:
        undos.pop()()


def make_events(state: State, change: Change) -> list[tuple[str, Any]]:
    """What followers are told of a change: ("job", the job), ("removed", ids), ("queue", facts)."""
    if isinstance(change, JobAdded):
        return [("job", change.job)]
    if isinstance(change, JobChanged):
        return [("job", state.jobs[change.id])]
    if isinstance(change, JobsRemoved):
        return [("removed", change.ids)]
    if isinstance(change, StateChanged) and "paused" in change.facts:
        return [("queue", {"is_paused": change.facts["paused"]})]
    if isinstance(change, GroupChanged):
        return [("group", {"name": change.group.name, "limit": change.group.limit, "hold": change.group.hold})]
    return []


def read_seq(path: str) -> int:
    """The change up to which a state file goes; -1 when there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            match = re.search(r'"seq": (\d{1,18}),', file.read(4096))
    except FileNotFoundError:
        match = None
    return int(match[1]) if match else -1


def load_snapshot(state: State, snapshot: Snapshot) -> None:
    for job in snapshot.jobs:
        apply(state, JobAdded(job))
    set_facts(state, snapshot.facts)
    state.environments = dict(snapshot.environments)
    state.groups, state.seen = {group.name: group for group in snapshot.groups}, dict(snapshot.seen)
    state.seq, state.next_number = snapshot.seq, max(state.next_number, snapshot.next_number)


def keep_previous(path: str, previous: str) -> None:
    """Let `previous` be what `path` is, so that `path` is there all the time.  Raises: OSError."""
    aside = previous + ".tmp"
    try:
        if os.path.lexists(aside):
            os.unlink(aside)
        os.link(path, aside)
    except OSError:                         # a file system without hard links
        os.replace(path, previous)
    else:
        os.replace(aside, previous)


def keep_aside(path: str, is_copy: bool = False) -> str:
    """Keep a broken file for a person to look at.  Raises: OSError."""
    import shutil
    aside = f"{path}.broken-{time.strftime('%Y%m%d-%H%M%S')}"
    if is_copy:
        shutil.copyfile(path, aside)
    else:
        os.replace(path, aside)
    return aside


def describe_other_machine(host: str, why: str) -> NexusError:
    return NexusError("conflict", f"the service runs on {host} ({why})",
                      hint=f"use it there, or set NEXUS_HOME=~/.nexus-$(hostname) or NEXUS_URL; if {host} is gone for good: "
                      "nexus start --take-over")


# ==== 13. SERVICE ==== observe, plan, carry out; adopt what ran before
# One loop, woken by the FIFO (a job started or ended), by requests, and by time.  Each turn: hear what was said, look
# after the jobs that end or are to be stopped, record what ended and what starts next in one change, then start it.
# nvidia-smi is asked by a thread of its own, which hands over what it saw.

PROBE_REST = 10                 # nvidia-smi rests for so many times as long as it ran
TROUBLE_INTERVAL_S = 30.0       # but one that fails is asked again within this
WATCH_INTERVAL_S = 1.0          # runners' pids are looked at so often; their words come at once
CLEARING_INTERVAL_S = 0.02      # and the processes of jobs that are being ended
LAUNCH_PATIENCE_S = 30.0        # a screen that ran for so long without a claim will not start its job
HOLD_S = (5.0, 300.0)           # for how long nothing is started after the machine could not: at first, at most
LEASE_PATIENCE_S = 5.0          # until leases that could not be taken, for a reason other than their holder, are tried again
RUNNER_PATIENCE_S = 2.0         # for job.sh to write the result of a job that was killed
SETTLED_S = 30.0                # a job's use of GPU memory that has not grown for so long is what it needs
WINDOW_S = 3600.0               # over which a GPU's utilization is told
ESTIMATE_PATIENCE_S = 0.05      # so long a request waits for estimates that are being made
ESTIMATE_REST = 10              # estimates are as old as this many times what they took, and at least 2 s
HEALTH_INTERVAL_S = 5.0         # so often on_unhealthy looks
HOOK_TIMEOUT_S = 60.0           # for a command of [hooks]
NO_ESTIMATES: Mapping[str, float] = {}
MAX_FAULTS_LOGGED = 20          # of one reading of the jobs file
TAIL_BYTES = 65536              # of stderr, in which the cause of a failure is looked for


@value
class Observation:
    """What nvidia-smi said, or why it could not."""
    gpus: tuple[Gpu, ...]
    trouble: str | None
    hint: str
    began_at: float                 # monotonic
    took_s: float


class Clearing:
    """A job whose processes are being ended: it was to be stopped, or it is over and something is left."""

    def __init__(self, now: float) -> None:
        self.began_at = now         # monotonic
        self.told: set[int] = set()     # pids that were sent SIGTERM, or came after it
        self.next_look_at = now


class Counters:
    """What has happened since this service began, for GET /metrics."""

    def __init__(self) -> None:
        self.starts = self.bounces = self.probe_failures = 0
        self.ends: dict[tuple[str, str], int] = {(COMPLETED, ""): 0, (FAILED, "exit"): 0, (CANCELLED, "killed"): 0}    # (status, cause)
        self.retries: dict[str, int] = {"exit": 0}              # cause: failed attempts of jobs that get another
        self.waits, self.run_times = Histogram(DURATION_BUCKETS_S), Histogram(DURATION_BUCKETS_S)
        self.turns = Histogram(TURN_BUCKETS_S)

    def note_start(self, job: Job) -> None:
        """It was launched; its history ends with since when it waited, and when it began to run."""
        self.starts += 1
        (_, waited_since), (_, began_at) = job.status_history[-2:]
        self.waits.note(began_at - waited_since)

    def note_moves(self, jobs: Iterable[Job]) -> None:
        """Their status has changed."""
        for job in jobs:
            if job.status in FINAL:
                self.ends[job.status, job.cause or ""] = self.ends.get((job.status, job.cause or ""), 0) + 1
                self.note_run_time(job.runtime_seconds if job.started_at is not None else None)
            elif job.status == PENDING and job.attempts and job.attempts[-1][0] == job.attempt:
                failed = read_attempts(job)[-1]
                self.retries[failed["cause"]] = self.retries.get(failed["cause"], 0) + 1
                self.note_run_time(failed["runtime_seconds"])
            elif job.status == PENDING:
                self.bounces += 1

    def note_run_time(self, seconds: float | None) -> None:
        if seconds is not None:
            self.run_times.note(seconds)


class Prober:
    """Asks for the GPUs at intervals, in a thread of its own."""

    def __init__(self, service: Service) -> None:
        import threading
        self.service = service
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, name="gpus", daemon=True)

    def run(self) -> None:
        known: dict[str, Gpu] = {uuid: Gpu(index, uuid, name, memory) for index, uuid, name, memory in
                                 self.service.store.read(lambda state: state.inventory)
                                 if uuid.startswith("MOCK-") == self.service.machine.is_mock}
        while not self.stop.is_set():
            seen = self.probe(known)
            known = {gpu.uuid: replace(gpu, fault=None) for gpu in seen.gpus} if not seen.trouble else known
            self.service.observed(seen)
            pause = max(self.service.config.service.refresh_rate_seconds, PROBE_REST * seen.took_s)
            self.stop.wait(min(pause, max(TROUBLE_INTERVAL_S / 3, TROUBLE_INTERVAL_S - seen.took_s)) if seen.trouble else pause)

    def probe(self, known: Mapping[str, Gpu]) -> Observation:
        clock = self.service.clock
        began = clock.monotonic()
        gpus: tuple[Gpu, ...] = tuple(replace(gpu, fault=None) for gpu in known.values())
        trouble, hint = None, ""
        try:
            gpus = tuple(self.service.machine.gpus.query_gpus(known))
        except NexusError as error:
            if not self.service.nodes or find_program("nvidia-smi"):        # a head need not have a GPU
                trouble, hint = error.message, error.hint
        except Exception as error:                  # one failure stays one failure
            self.service.fail("asking for the GPUs", error)
            trouble = f"asking for the GPUs failed: {error!r}"
        return Observation(gpus, trouble, hint, began, clock.monotonic() - began)


CURVE_INTERVAL_S, CURVE_POINTS = 30, 120        # of what a GPU's curve is made: an hour


class Curve:
    """A GPU's memory and utilization over the last hour: a point for each CURVE_INTERVAL_S in which it was read."""

    def __init__(self) -> None:
        import collections
        # (number of the interval, most memory in use in it, its readings of utilization, how many these are)
        self.points: collections.deque[tuple[int, float | None, float, int]] = collections.deque(maxlen=CURVE_POINTS)

    def note(self, memory_used_mib: float | None, utilization: float | None, now: float) -> None:
        interval, memory, total, count = int(now // CURVE_INTERVAL_S), memory_used_mib, utilization or 0.0, int(utilization is not None)
        if self.points and self.points[-1][0] == interval:
            _, most, former_total, former_count = self.points.pop()
            memory, total, count = most if memory is None else max(memory, most or 0.0), total + former_total, count + former_count
        self.points.append((interval, memory, total, count))

    def describe(self, now: float) -> dict[str, Any]:
        """Oldest first, ending now; None where nothing could be read."""
        known = {interval: (memory, round(total / count, 1) if count else None) for interval, memory, total, count in self.points}
        last = int(now // CURVE_INTERVAL_S)
        points = [known.get(interval, (None, None)) for interval in range(last - CURVE_POINTS + 1, last + 1)]
        return {"interval_seconds": CURVE_INTERVAL_S, "memory_used_mib": [memory for memory, _ in points],
                "utilization": [utilization for _, utilization in points]}


class Readings:
    """What jobs, GPUs and the host take, as measured at each look at the GPUs."""

    def __init__(self, samples: Samples) -> None:
        import collections
        self.samples = samples
        self.host = HostSample()
        self.jobs: dict[str, JobSample] = {}                # of the running ones, at the last look
        self.peak_rss: dict[str, float] = {}
        self.peak_gpu_mem: dict[str, float] = {}
        self.grown_at: dict[str, tuple[float, float]] = {}  # job: its GPU memory when that last grew, and when (monotonic)
        self.utilization: dict[str, tuple[float, int]] = {}     # job: sum and number of its GPUs' readings
        # GPU uuid: (monotonic, utilization) over the last hour
        self.windows: dict[str, collections.deque[tuple[float, float]]] = collections.defaultdict(collections.deque)
        self.curves: dict[str, Curve] = collections.defaultdict(Curve)      # GPU uuid: its last hour

    def note_gpus(self, gpus: Sequence[Gpu], running: Iterable[Job], now: float) -> None:
        """Take in a fresh look at the GPUs."""
        used: dict[str, float] = {}
        for gpu in gpus:
            self.curves[gpu.uuid].note(gpu.memory_used_mib, gpu.utilization, now)
            if gpu.utilization is not None:
                self.windows[gpu.uuid].append((now, gpu.utilization))
                while self.windows[gpu.uuid][0][0] < now - WINDOW_S:
                    self.windows[gpu.uuid].popleft()
            for process in gpu.processes:
                if process.job_id:
                    used[process.job_id] = used.get(process.job_id, 0.0) + (process.memory_mib or 0)
        readings = {gpu.uuid: gpu.utilization for gpu in gpus}
        for job in running:
            self.note_job(job, used.get(job.id, 0.0), [reading for uuid in job.gpu_uuids for reading in [readings.get(uuid)]
                                                       if reading is not None], now)

    def note_job(self, job: Job, mib: float, readings: Sequence[float], now: float) -> None:
        if mib:
            self.peak_gpu_mem[job.id] = max(mib, self.peak_gpu_mem.get(job.id, 0.0))
            if mib > 1.02 * self.grown_at.get(job.id, (0.0, 0.0))[0]:
                self.grown_at[job.id] = mib, now
        if readings:
            total, count = self.utilization.get(job.id, (0.0, 0))
            self.utilization[job.id] = total + sum(readings) / len(readings), count + 1

    def sample(self, members: Mapping[str, Sequence[Process]]) -> None:
        """Memory and CPU of jobs' processes and of the host."""
        self.jobs, self.host = self.samples.sample_jobs(members), self.samples.sample_host()
        for job_id, sample in self.jobs.items():
            self.peak_rss[job_id] = max(sample.rss_mib, self.peak_rss.get(job_id, 0.0))

    def find_settled(self, processes: Iterable[GpuProcess], now: float) -> tuple[str, ...]:
        """The jobs among a GPU's processes whose use of memory has not grown for a while."""
        return tuple({process.job_id for process in processes if process.job_id and process.job_id in self.grown_at
                      and now - self.grown_at[process.job_id][1] >= SETTLED_S})

    def describe_window(self, uuid: str) -> tuple[float | None, float | None]:
        """Mean and peak of a GPU's utilization."""
        window = [reading for _, reading in self.windows.get(uuid, ())]
        return (sum(window) / len(window), max(window)) if window else (None, None)

    def list_facts(self, job_id: str) -> dict[str, float | None]:
        """What a job has taken, as fields of Job."""
        total, count = self.utilization.get(job_id, (0.0, 0))
        return {"peak_rss_mib": self.peak_rss.get(job_id), "peak_gpu_mem_mib": self.peak_gpu_mem.get(job_id),
                "cpu_seconds": self.jobs[job_id].cpu_seconds if job_id in self.jobs else None,
                "mean_gpu_util": total / count if count else None}

    def restore(self, job: Job) -> None:
        """Go on from what a former service has kept."""
        for peaks, peak in ((self.peak_rss, job.peak_rss_mib), (self.peak_gpu_mem, job.peak_gpu_mem_mib)):
            if peak is not None:
                peaks[job.id] = peak

    def forget(self, job_id: str) -> None:
        for kept in (self.jobs, self.peak_rss, self.peak_gpu_mem, self.grown_at, self.utilization):
            kept.pop(job_id, None)


class Scales:
    """How much of the host's memory the jobs take that may be above their limit, in a thread of its own.

    The workers of a data loader are forked and share what was loaded before.  Their sizes added up say too much, and what
    they share is known only by asking the kernel for each page: that is done where it decides about a job, and only there.
    """

    def __init__(self, service: Service, limit_mib: float) -> None:
        import threading
        self.service, self.limit_mib = service, limit_mib
        self.doubtful: Mapping[tuple[str, str | None], Sequence[Process]] = {}     # by job and nonce
        self.weights: dict[tuple[str, str | None], float] = {}                     # MiB, likewise, as last weighed
        self.wanted = threading.Event()

    def run(self) -> None:
        while not self.service.is_stopping:
            if self.wanted.wait(WATCH_INTERVAL_S):
                self.wanted.clear()
                self.weigh()

    def weigh(self) -> None:
        for start, members in self.doubtful.items():
            try:
                self.weights[start] = self.service.machine.samples.weigh(members)
            except Exception as error:
                self.service.fail("measuring a job's memory", error)

    def look(self, jobs: Iterable[Job], samples: Mapping[str, JobSample], members: Mapping[str, Sequence[Process]]) -> None:
        """There are new samples: some of them are to be looked at more closely."""
        self.doubtful = {(job.id, job.nonce): members.get(job.id, ()) for job in jobs
                         if job.id in samples and self.is_doubtful(samples[job.id])}
        for start in [start for start in list(self.weights) if start not in self.doubtful]:
            del self.weights[start]
        if self.doubtful:
            self.wanted.set()

    def is_doubtful(self, sample: JobSample) -> bool:
        """Whether its processes are above the limit together, and none of them is so alone."""
        return sample.rss_mib > self.limit_mib >= sample.largest_mib

    def find_memory_mib(self, job: Job, sample: JobSample | None) -> float | None:
        if sample and self.is_doubtful(sample):
            return self.weights.get((job.id, job.nonce))
        return sample.rss_mib if sample else None


class JobsFile:
    """Watches the jobs file, in a thread of its own."""

    def __init__(self, service: Service, path: str) -> None:
        self.service, self.path = service, os.path.abspath(os.path.expanduser(path))
        self.faults: list[str] = []

    def run(self) -> None:
        stamp, changed_at, read_at = None, float("-inf"), float("-inf")
        interval_s = self.service.config.jobs.jobs_file_interval_seconds
        while not self.service.is_stopping:
            now = self.service.clock.monotonic()
            stamp, before = stamp_of(self.path), stamp
            if stamp != before:
                changed_at = now
            if stamp != before or now - read_at >= interval_s:
                read_at = now
                try:
                    self.load(now - changed_at >= interval_s)
                except NexusError as error:
                    self.report([error.message])
                except Exception as error:
                    self.service.fail("reading the jobs file", error)
            self.service.clock.sleep(min(WATCH_INTERVAL_S, interval_s))

    def load(self, is_whole: bool) -> None:
        """`is_whole`: nobody is just writing it."""
        text = read_text(self.path)
        if text is None:
            self.report([f"there is no file {self.path}"])
            return
        rows, faults = parse_jobs_file(text)
        self.report(faults + self.take(rows, is_whole and bool(text)))        # one that a program has opened to write is empty for a while

    def take(self, rows: Sequence[JobsRow], is_whole: bool) -> list[str]:
        """Queue what is new in the file, each content once, and if it `is_whole`, see what is gone; return what was wrong with rows."""
        service = self.service
        latest = {digest_of(row.content)[:16]: row for row in rows}
        counts = dict.fromkeys(latest, 0)
        for row in rows:
            counts[digest_of(row.content)[:16]] += 1
        seen: dict[str, int] = service.store.read(lambda state: dict(state.seen))
        new = {digest: row for digest, row in latest.items() if counts[digest] > seen.get(digest, 0)}
        prepared, faults = self.prepare(new)
        gone = {digest: counts.get(digest, 0) for digest, count in seen.items() if counts.get(digest, 0) < count and is_whole}
        if not prepared and not gone:
            return faults
        environments = dict(zip(prepared, service.make_environments(list(prepared.values()))))
        now = service.clock.now()

        def add(state: State) -> Changes:
            ids = []
            contents = map_contents(state)
            for digest, submission in prepared.items():
                try:
                    check_queue(state, service.user, service.config.jobs)
                except NexusError as error:
                    faults.append(f"line {latest[digest].line}: {error.message}")
                    continue
                if service.content_of(submission, service.user) not in contents:
                    job = yield from service.add_job(state, submission, service.owner, *environments[digest], now)
                    ids.append(job.id)
                yield LineSeen(digest, counts[digest])
            for digest, count in gone.items():              # taken out of the file: there again, it is new
                yield LineSeen(digest, count)
            return ids

        ids = service.store.update(add)
        if ids:
            service.log.info("%s added from the jobs file: %s", format_count(len(ids), "job"),
                             ", ".join(ids[:20]) + (" ..." if ids[20:] else ""))
            service.wake()
        return faults

    def prepare(self, rows: Mapping[str, JobsRow]) -> tuple[dict[str, Submission], list[str]]:
        """What new rows ask for, by their digests, and what is wrong with the others."""
        prepared, faults = {}, []
        for digest, row in rows.items():
            try:
                prepared[digest] = self.service.prepare(self.make_submission(row))
            except NexusError as error:
                faults.append(f"line {row.line}, '{format_line(row.script, 100)}': {error.message}")
        return prepared, faults

    def make_submission(self, row: JobsRow) -> Submission:
        script = os.path.expanduser(row.script)
        has_python = row.conda or find_program("python")
        program = "bash" if script.endswith(".sh") else "python" if has_python else "python3"
        is_adding = self.service.config.jobs.cuda_arg == "add"
        command = " ".join(filter(None, [program, quote(script), row.arguments]))
        return Submission(
            command=parse_command(command), cwd=os.path.dirname(self.path), priority=row.priority, conda=row.conda, gpu_ids=row.gpu_ids,
            cuda_arg=is_adding or has_cuda_option(command))

    def report(self, faults: list[str]) -> None:
        before = set(self.faults)
        new = [fault for fault in faults if fault not in before]
        for fault in new[:MAX_FAULTS_LOGGED]:
            self.service.log.warning("%s: %s", self.path, fault)
        if new[MAX_FAULTS_LOGGED:]:
            self.service.log.warning("%s: and %d more", self.path, len(new) - MAX_FAULTS_LOGGED)
        self.faults = faults


class LlmShares:
    """llm_config.json: how much of a GPU the jobs of a model get.  Read anew when it has changed."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.stamp: tuple[int, ...] | None = None
        self.shares: dict[str | None, float] = {}

    def find(self, model: str) -> float:
        """Raises: usage, when the file is wrong; unavailable."""
        stamp = stamp_of(self.path)
        if stamp is None:
            refuse(f"llm_config {self.path} is not there", hint="nexus config edit")
        if stamp != self.stamp:
            self.shares = parse_llm_config(parse_json(read_text(self.path) or "", self.path), self.path)
            self.stamp = stamp
        return self.shares.get(model, self.shares[None])


class Hooks:
    """Runs the commands of [hooks], in a thread of its own: what they do, and for how long, changes nothing else.

    on_finish is run for every job that has finished since it was first configured, also when the service ended in between.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.config = service, service.config.hooks
        self.is_healthy = True
        self.looked_at = float("-inf")
        self.following = service.store.events.next_number

    def run(self) -> None:
        while not self.service.is_stopping:
            try:
                self.begin()
                while not self.service.is_stopping:
                    self.look()
            except Exception as error:
                self.service.fail("running hooks", error)
                self.service.clock.sleep(HEALTH_INTERVAL_S)

    def begin(self) -> None:
        """Note since when on_finish is configured, and run it for what ended unheard."""
        since = self.service.clock.now() if self.config.on_finish else None

        def note(state: State) -> Changes:
            if (state.hooks_since is None) != (since is None):
                yield StateChanged({"hooks_since": since})
            began = state.hooks_since
            return [job for job in state.finished.values() if began is not None and not job.is_told and (job.finished_at or 0.0) >= began]

        for job in self.service.store.update(note):
            self.finish(job)

    def look(self) -> None:
        """Run what is due by now, or wait a moment."""
        found, is_gap = self.service.store.events.read(self.following, WATCH_INTERVAL_S)
        self.following = found[-1][0] + 1 if found else self.service.store.events.next_number if is_gap else self.following
        for ended in [what for _, kind, what in found if kind == "job" and what.status in FINAL]:
            job = self.service.store.read(lambda state, ended=ended: state.jobs.get(ended.id, ended))  # type: ignore[misc]
            if not job.is_told and self.config.on_finish:       # also of one that is no longer kept
                self.finish(job)
            self.look_at_health_at_times()
        if is_gap:
            self.begin()
        self.look_at_health_at_times()

    def finish(self, job: Job) -> None:
        self.call("on_finish", self.config.on_finish, {
            "NEXUS_JOB_ID": job.id, "NEXUS_JOB_STATUS": job.status, "NEXUS_JOB_CAUSE": job.cause or "",
            "NEXUS_JOB_EXIT_CODE": "" if job.exit_code is None else str(job.exit_code), "NEXUS_JOB_COMMAND": job.command,
            "NEXUS_JOB_GPU": format_indices(job.gpu_indices).replace(" ", "")})

        def note(state: State) -> Changes:
            if job.id in state.jobs:
                yield JobChanged(job.id, {"is_told": True})

        self.service.store.update(note)

    def look_at_health_at_times(self) -> None:
        now = self.service.clock.monotonic()
        if self.config.on_unhealthy and now - self.looked_at >= HEALTH_INTERVAL_S and self.service.first_probe.is_set():
            self.looked_at = now
            self.look_at_health()

    def look_at_health(self) -> None:
        health = self.service.health()
        if health["is_healthy"] != self.is_healthy:
            self.is_healthy = health["is_healthy"]
            bad = [f"{check['name']}: {check['reading']}" for check in health["checks"] if not check["is_ok"]]
            self.call("on_unhealthy", self.config.on_unhealthy, {
                "NEXUS_HEALTH": "HEALTHY" if self.is_healthy else "UNHEALTHY", "NEXUS_HEALTH_REASON": "; ".join(bad)})

    def call(self, name: str, command: str, facts: Mapping[str, str]) -> None:
        try:
            done = run(["/bin/sh", "-c", command], HOOK_TIMEOUT_S, {**self.service.environ, **facts})
            why = f"exit code {done.exit_code}: {format_line(done.output.strip()[-200:])}" if done.exit_code else ""
        except (OSError, ValueError, StillRunning) as error:
            why = str(error) or "it cannot be ended"
        if why:
            self.service.log.warning("%s: %s", name, why)


RECONNECT_S = (1.0, 10.0)       # between two attempts to reach a node: at first, at most
SYNC_WAIT_S = 10.0              # a node answers when there is news, and after so long in any case
SYNC_PATIENCE_S = 15.0          # beyond that, the line is taken to be cut
FOLLOW_INTERVAL_S = (0.05, 0.5)      # how often a followed log is looked at: soon after a line, rarely when silent
LOG_BYTES = 2**20               # of all logs together, in one answer: a slow line has it within SYNC_PATIENCE_S
ORDER_PATIENCE_S = 60.0         # for what it is told, to be done
ORDER_BYTES = 2**20             # about so much is told at once
WITHDRAW_PATIENCE_S = 3.0       # a node that has not begun a job within this gives it back
REFUSAL_REST_S = 5.0            # and gets no other one for a while
NODE_ALARM_S = 30.0             # a node that is not heard for so long is bad for health
NODE_PAUSED = "its queue is paused"
SENT_AS_ASKED = ("command", "name", "gpu_mem_mib", "conda", "cuda_arg", "expected_time", "tty", "umask")
# What a job on another machine has from there, and not from its submitter's
OWN_VARIABLES = (
    r"HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TMPDIR|TMP|TEMP|MAIL|HOSTNAME|DISPLAY|XAUTHORITY|WAYLAND_DISPLAY|"
    r"PATH|(XDG|SSH|DBUS|SYSTEMD|NEXUS|SLURM|TMUX|SCREEN)_?\w*|INVOCATION_ID|JOURNAL_STREAM|CUDA_VISIBLE_DEVICES")


@value
class Remote:
    """A job that another nexus has sent here, as that hears of it."""
    id: str                             # here
    attempt: int                        # there, as find_order_key() counts
    status: str
    pid: int | None
    session: str | None
    log_dir: str | None
    started_at: float | None            # by the clock here
    finished_at: float | None
    runtime_seconds: float | None
    exit_code: int | None
    cause: str | None
    cause_line: str | None
    may_pass: bool                      # a launch that failed, because the machine could not just then
    waiting_for: str | None
    notes: tuple[str, ...]
    gpu_indices: tuple[int, ...]
    log_sizes: tuple[int, int]
    samples: Mapping[str, Any]


def read_node_row(row: Sequence[Any]) -> tuple[NodeConfig, bool, bool]:
    """What State keeps of a node: its address, whether it is being removed, and whether it stood in config.toml."""
    fields: Sequence[str] = NodeConfig.__slots__  # type: ignore[attr-defined]
    return NodeConfig(**dict(zip(fields, row))), bool(row[len(fields)]), bool(row[len(fields) + 1])


def find_order_key(job: Job) -> tuple[str, int]:
    """By what a job's attempt is known on its node: the id there, and a number that grows with jobs and attempts.

    The node keeps what is over for longer than this nexus may: the id can have come again, and its attempt 1.
    """
    return str(job.remote_id), job.number * ORDERS_OF_A_JOB + job.attempt


ORDERS_OF_A_JOB = 10**6


class Node:
    """Another machine's nexus, to which this one's service gives jobs.

    One thread follows what happens there and writes the jobs' output into their log files here; another tells it what to
    do.  Both only note what they hear: the service's loop decides.  An order may be given twice: the node does it once.
    """

    def __init__(self, service: Service, config: NodeConfig, is_leaving: bool) -> None:
        import collections
        import threading
        self.service, self.config, self.name, self.is_leaving = service, config, config.name, is_leaving
        self.ssh = Ssh(config, service.layout.ssh_folder, service.environ)
        self.told: Mapping[str, Any] = {}                   # what the probe found
        self.service_id = ""                                # of the nexus there; "" = not known
        self.api: NodeApi | None = None                     # to follow
        self.orders_api: NodeApi | None = None
        self.trouble: NexusError | None = NexusError("unavailable", f"{self.name} has not been reached yet")
        self.silent_since = service.clock.now()             # when it was heard last
        self.silent_at = service.clock.monotonic()          # the same, monotonic
        self.clock_offset_s = 0.0                           # its clock less ours
        self.number: int | None = None                      # of the next event there; None: all is to be told anew
        self.gpus: tuple[Gpu, ...] = ()
        self.cpu_slots, self.hold = 0, ""
        self.has_news = False
        self.shown: object = None                           # what the last event of its GPUs was made of
        self.news: collections.deque[Remote | Refusal] = collections.deque()    # for the loop
        self.is_listed = False                              # all that it has is in `known`
        self.prepared = {(job.id, job.attempt) for job in service.running_jobs()}     # that may be sent: they have a folder here
        self.offsets: dict[tuple[str, int], list[int]] = {}     # (id here, attempt): bytes of its logs that have come
        self.ended: dict[tuple[str, int], Remote] = {}      # whose logs have not come whole
        self.known: set[tuple[str, int]] = set()            # (id there, attempt) that it has
        self.stopped: set[tuple[str, int]] = set()          # that it was told to end
        self.withdrawn: set[tuple[str, int]] = set()
        self.strays: set[tuple[str, int]] = set()           # that run there, and are not wanted any more
        self.collected: set[tuple[str, int]] = set()        # that are over and recorded here, and it does not know so
        self.pending_at: dict[tuple[str, int], float] = {}  # monotonic: since when they wait there
        self.trees: dict[str, str] = {}                     # commit: where on the node it is; "" = on its way
        self.refused_at, self.refusal = float("-inf"), ""
        self.is_ended = False
        self.wanted, self.retry = threading.Event(), threading.Event()
        for target in (self.follow, self.command):
            threading.Thread(target=target, name=f"node {self.name}", daemon=True).start()

    # Following

    def follow(self) -> None:
        pause_s = RECONNECT_S[0]
        while not self.is_ended:
            try:
                self.connect()
                while not self.is_ended:
                    self.sync()
                    pause_s = RECONNECT_S[0]
            except (NexusError, OSError) as error:
                if not self.is_ended:
                    self.lose(error)
            except Exception as error:
                if not self.is_ended:
                    self.service.fail(f"following node {self.name}", error)
                    self.lose(ConnectionError(repr(error)))
            if not self.is_ended:
                self.retry.wait(pause_s)
                self.retry.clear()
                pause_s = min(2 * pause_s, RECONNECT_S[1])
        self.ssh.close()

    def connect(self) -> None:
        """Raises: unavailable; conflict, when another nexus is there."""
        if not self.ssh.is_open:
            self.ssh.open()
        try:
            self.find_service()
        except NexusError:
            self.ssh.close()                                # it may be the connection: the next attempt has a new one
            raise

    def find_service(self) -> None:
        """Raises: unavailable, conflict."""
        told = probe_node(self.ssh, self.service.hash)
        self.silent_at = self.service.clock.monotonic()     # the machine is there, whatever is the matter with its nexus
        if told["hash"] is None:
            raise NexusError("conflict", f"there is no nexus on {self.name}", hint=f"nexus node add {self.name} puts it there")
        if told["hash"] != self.service.hash:
            raise NexusError("conflict", f"{self.name} has another nexus ({told['hash']}; this one is {self.service.hash})",
                             hint=f"nexus node add {self.name} brings it up to date; if this one is older: nexus restart")
        there = told["service"]
        self.ssh.forward(there["host"], there["port"])
        self.told, self.number = told, None
        self.api, self.orders_api = (NodeApi(self.ssh.socket, told["token"], bool(there.get("tls_cert"))) for _ in range(2))

    def lose(self, error: NexusError | OSError) -> None:
        """It cannot be reached, or not be used."""
        if isinstance(error, TimeoutError):
            self.ssh.close()                                # the line is silent: a new one may not be
        fault = error if isinstance(error, NexusError) else NexusError(
            "unavailable", f"the connection to {self.name} was lost ({error})", hint=f"try it by hand: {self.ssh.by_hand}")
        if self.trouble is None or self.trouble.message != fault.message:
            self.service.log.warning("Node %s: %s", self.name, fault.message)
        is_news = self.trouble is None or self.trouble.message != fault.message
        self.trouble, self.is_listed = fault, False
        if is_news:
            self.has_news = True
            self.service.wake()

    def sync(self) -> None:
        """Hear what is new there, or that nothing is.  Raises: OSError, when the line is cut; what the node answers."""
        assert self.api
        clock, is_full = self.service.clock, self.number is None
        began = clock.now()
        told = self.api.ask("POST", "/node/sync", {
            "head": self.service.store.service_id, "since": self.number, "logs": self.list_offsets(),
            "wait_seconds": 0 if is_full else SYNC_WAIT_S}, SYNC_WAIT_S + SYNC_PATIENCE_S)
        if is_full:
            self.check_identity(told["service_id"])
            self.clock_offset_s = told["now"] - (began + clock.now()) / 2
            self.stopped.clear()
        self.number = told["number"]
        self.take_logs(told["logs"])
        if "gpus" in told:
            ours = {job.remote_id: job.id for job in self.list_jobs()}
            self.gpus = tuple(self.adopt_gpu(decode_gpu(fields), ours) for fields in told["gpus"])
            self.cpu_slots, self.hold = told["cpu_slots"], told["hold"]
            self.has_news = True
        self.take_jobs([Remote(**{name: freeze(fact) for name, fact in fields.items()}) for fields in told["jobs"]], is_full)
        self.silent_since, self.silent_at = clock.now(), clock.monotonic()
        if self.trouble is not None:
            self.trouble, self.has_news = None, True
            self.service.log.info("Node %s: connected, %s", self.name, format_count(len(self.gpus), "GPU"))
        if self.has_news or self.news:
            self.service.wake()
        if is_full:
            self.wanted.set()

    def check_identity(self, service_id: str) -> None:
        """One machine under two names would be given each GPU twice.  Raises: conflict."""
        self.service_id = service_id
        if service_id == self.service.store.service_id:
            raise NexusError("conflict", f"{self.name} is this very nexus", hint=f"nexus node remove {self.name} --force")
        twin = next((node.name for node in list(self.service.nodes.values()) if node is not self and node.service_id == service_id), None)
        if twin:
            self.service_id = ""
            raise NexusError("conflict", f"{self.name} is {twin}: the same nexus is there", hint=f"nexus node remove {self.name} --force")

    def adopt_gpu(self, gpu: Gpu, ours: Mapping[str | None, str]) -> Gpu:
        """A GPU there as it is seen here: under a name that no other machine's has, with the jobs' ids here."""
        def adopt(process: GpuProcess) -> GpuProcess:
            name, _, there = (process.name or "").rpartition(ASTRAY)
            return replace(process, job_id=ours.get(process.job_id, process.job_id),
                           name=format_astray(name, ours[there]) if name and there in ours else process.name)

        processes = tuple(map(adopt, gpu.processes))
        return replace(gpu, node=self.name, uuid=f"{self.name}/{gpu.uuid}", processes=processes, pause_reason=PAUSED_THERE,
                       settled=tuple(ours.get(job_id, job_id) for job_id in gpu.settled))

    def list_jobs(self) -> list[Job]:
        """Those that run there, as recorded here, or may be sent there now."""
        return [job for job in self.service.running_jobs() if job.node == self.name and (job.id, job.attempt) in self.prepared]

    def list_offsets(self) -> dict[str, list[int]]:
        """{id there: attempt, bytes of stdout.log and stderr.log that have come}."""
        wanted = {(job.id, job.attempt): job for job in self.list_jobs()}
        for key, job in wanted.items():
            if key not in self.offsets:
                sizes = measure_logs(job.log_dir)
                self.offsets[key] = [max(0, size - base) for size, base in zip(sizes, job.log_base)]
        self.offsets = {key: offsets for key, offsets in self.offsets.items() if key in wanted}
        return {str(job.remote_id): [find_order_key(job)[1], *self.offsets[key]] for key, job in wanted.items()}

    def take_logs(self, logs: Mapping[str, Mapping[str, str]]) -> None:
        """Append what has come of jobs' output to their log files here."""
        import base64
        if not logs:
            return
        jobs = {job.remote_id: job for job in self.list_jobs()}
        for remote_id, pieces in logs.items():
            job = jobs.get(remote_id)
            offsets = self.offsets.get((job.id, job.attempt)) if job else None
            for number, name in enumerate(("stdout", "stderr")):
                piece = base64.b64decode(pieces.get(name, ""))
                if job and job.log_dir and offsets and piece:
                    try:
                        append_log(job.log_dir, name, piece)
                        offsets[number] += len(piece)
                    except OSError as error:
                        self.service.log.warning("Job %s: its output cannot be kept (%s); it is tried again", job.id, error)
                        self.service.clock.sleep(1.0)

    def take_jobs(self, jobs: Sequence[Remote], is_full: bool) -> None:
        """Hand on what has become of jobs there; of one that is over once its whole output is here."""
        for remote in jobs:
            if remote.status in FINAL:
                self.ended[remote.id, remote.attempt] = remote
            else:
                self.news.append(remote)
            self.known.add((remote.id, remote.attempt))
        if is_full:
            self.known &= {(remote.id, remote.attempt) for remote in jobs}
            self.is_listed = True
        offsets = {find_order_key(job): self.offsets.get((job.id, job.attempt), (0, 0)) for job in self.list_jobs()}
        for key, remote in list(self.ended.items()):
            came = offsets.get(key)                         # None: it is not ours any more
            if came is None or all(have >= size for have, size in zip(came, remote.log_sizes)):
                del self.ended[key]
                self.news.append(remote)

    # Telling it what to do

    def command(self) -> None:
        while not self.is_ended:
            self.wanted.wait(WATCH_INTERVAL_S)
            self.wanted.clear()
            if self.trouble is not None or self.orders_api is None or self.is_ended:
                continue
            try:
                self.send_orders(self.orders_api)
            except (OSError, NexusError) as error:          # the other thread finds out what is wrong, and all is sent again
                self.service.log.warning("Node %s: orders: %s", self.name, error)
                self.service.clock.sleep(WATCH_INTERVAL_S)
            except Exception as error:
                self.service.fail(f"giving orders to node {self.name}", error)
                self.service.clock.sleep(WATCH_INTERVAL_S)

    def send_orders(self, api: NodeApi) -> None:
        """Raises: OSError, when the line is cut; what the node answers."""
        stops = {find_order_key(job) for job in self.list_jobs() if job.stop_cause} & self.known - self.stopped
        strays, withdrawn, collected = set(self.strays), set(self.withdrawn), set(self.collected)
        if stops or strays or withdrawn or collected:
            self.order(api, stop=sorted(stops | strays), withdraw=sorted(withdrawn), collected=sorted(collected))
            self.stopped |= stops
            self.strays -= strays
            self.withdrawn -= withdrawn
            self.collected -= collected
            self.known -= collected
            if self.is_leaving:
                self.service.wake()
        if self.is_listed:
            for batch in self.make_batches([job for job in self.list_jobs() if find_order_key(job) not in self.known]):
                self.submit(api, batch)
        if self.news:
            self.service.wake()

    def order(self, api: NodeApi, submit: Sequence[Any] = (), **keys: Any) -> dict[str, Any]:
        """{id: fault or None} of what was submitted.  Raises: OSError, when the line is cut; what the node answers."""
        asked = {"head": self.service.store.service_id, "stop": (), "withdraw": (), "collected": (), **keys, "submit": submit}
        return dict(api.ask("POST", "/node/orders", asked, ORDER_PATIENCE_S)["submitted"])

    def submit(self, api: NodeApi, orders: Sequence[Mapping[str, Any]]) -> None:
        """Raises: OSError, when the line is cut; what the node answers."""
        try:
            faults = self.order(api, orders)
        except NexusError as error:
            if error.kind not in ("usage", "too_large"):
                raise
            if len(orders) > 1:                             # which of them is it?
                for order in orders:
                    self.submit(api, [order])
                return
            faults = {orders[0]["id"]: {"kind": error.kind, "message": error.message, "hint": error.hint}}
        for order in orders:
            key, fault = (order["id"], order["attempt"]), faults.get(order["id"])
            if fault is None:
                self.known.add(key)
            else:
                self.news.append(Refusal(*key, fault["kind"], fault["message"], fault["hint"]))

    def make_batches(self, jobs: Sequence[Job]) -> Iterator[list[dict[str, Any]]]:
        """The orders to start them, as many at once as a request may hold."""
        batch: list[dict[str, Any]] = []
        size = 0
        for job in jobs:
            try:
                order = self.make_order(job)
                if order:
                    batch.append(order)
                    size += len(order["code"] or "") + sum(len(text) for text in order["job"]["env"].values())
            except NexusError as error:                     # what it needs is not here any more
                self.news.append(Refusal(*find_order_key(job), "not_found", error.message, error.hint))
            if batch and (size > ORDER_BYTES or job is jobs[-1]):
                yield batch
                batch, size = [], 0

    def make_order(self, job: Job) -> dict[str, Any] | None:
        """What a node is sent of a job; None while its snapshot is on its way there."""
        import base64
        service = self.service
        tree = self.find_tree(job) if job.snapshot and job.snapshot_repo else None
        submitted = service.store.read(lambda state: state.environments.get(job.environment)) or {}
        if tree == "":
            return None
        asked: dict[str, Any] = {name: getattr(job, name) for name in SENT_AS_ASKED if getattr(job, name) is not None}
        if job.gpus:
            asked["gpu_ids"] = list(job.gpu_indices)
        if tree:
            asked.update(snapshot=job.snapshot, snapshot_repo=tree, cwd=os.path.normpath(os.path.join(
                tree, os.path.relpath(job.cwd, job.snapshot_repo))))
        elif not job.code and job.cwd != service.find_home_folder():
            asked["cwd"] = job.cwd
        if job.code:
            submitted = {}                                  # of this service alone: who sent the script said nothing of it
        return {"id": job.remote_id, "attempt": find_order_key(job)[1], "user": job.user, "is_stopped": bool(job.stop_cause),
                "path": submitted.get("PATH", ""), "job": {
                    **asked, "gpus": len(list_shares(job)) if job.is_alone else job.gpus, "retries": 0,
                    "timeout_seconds": find_time_limit(job, service.config.jobs) or 0,
                    "env": {name: text for name, text in submitted.items() if not re.fullmatch(OWN_VARIABLES, name)}},
                "code": base64.b64encode(read_code(service.layout.code_file(job.code))).decode() if job.code else None}

    def find_tree(self, job: Job) -> str:
        """Where on the node a job's snapshot is; "" while it is brought there."""
        import threading
        assert job.snapshot and job.snapshot_repo
        commit, repository = job.snapshot, job.snapshot_repo
        if commit not in self.trees:
            self.trees[commit] = ""

            def push() -> None:
                try:
                    name = hash_text(f"{self.service.store.service_id} {repository}")[:16]
                    self.trees[commit] = push_snapshot(self.ssh, repository, commit, name, self.service.environ)
                except Exception as error:                  # whatever it is, the job does not wait for ever
                    fault = error if isinstance(error, NexusError) else NexusError("unavailable", f"its snapshot: {error!r}")
                    del self.trees[commit]
                    self.news.append(Refusal(*find_order_key(job), fault.kind, fault.message, fault.hint))
                    self.service.wake()
                self.wanted.set()
            threading.Thread(target=push, name="snapshot", daemon=True).start()
        return self.trees.get(commit, "")                   # it may have failed by now

    def end(self) -> None:
        self.is_ended = True
        self.wanted.set()
        self.retry.set()
        self.ssh.close()                                    # whoever waits for an answer is told

    @property
    def since(self) -> str:
        return format_time(self.silent_since) or ""

    def find_fault(self) -> str | None:
        """Why it is not well."""
        return self.trouble.message if self.trouble else self.hold or None

    def find_closed(self, now: float) -> str | None:
        """Why it gets no job now."""
        if self.is_leaving:
            return f"{self.name} is being removed"
        if self.trouble is not None:
            return self.trouble.message                     # which names it
        if self.hold:
            return f"{self.name}: {self.hold}"
        return f"{self.name}: {self.refusal}" if now - self.refused_at < REFUSAL_REST_S else None


@value
class Refusal:
    """A job that a node did not take."""
    id: str                             # there
    attempt: int
    kind: str                           # of KINDS
    message: str
    hint: str


@value
class Handing:
    """Jobs on their way to Slurm: one, or the tasks 1, 2, 3 ... of an array.  Their slurm_key is in the journal."""
    token: str
    jobs: tuple[Job, ...]
    is_array: bool


@value
class Handed:
    """What became of some of them."""
    jobs: tuple[Job, ...]
    slurm_id: str | None = None
    fault: str = ""             # of read_refusal()
    words: str = ""             # why not
    is_unsure: bool = False     # Slurm may have them all the same
    error: OSError | NexusError | None = None       # why the job.sh could not be made


@value
class SlurmView:
    """What Slurm has said."""
    jobs: Mapping[str, SlurmJob]                        # by its id
    accounts: Mapping[str, SlurmJob | None]             # of those that sacct was asked for: what it knew
    asked_at: float                                     # monotonic
    next_id: int = 0                                    # of the next job; less than that of one it had: it has lost its state
    began_at: float = 0.0                               # when slurmctld began; after a crash it may have lost the latest jobs


class Cluster:
    """The Slurm of `launcher = "slurm"`: jobs are handed over, asked for and cancelled in a thread of its own.

    The loop says what it wants by intend(), hand() and hear(), and in follow() takes in what the thread has learned; it alone
    decides and records.  A job is handed over at most once at a time: its key is in the journal before, Slurm's id after.  What
    Slurm does not have although its key is there was never handed over, or is too late: its attempt is claimed before it goes back.
    """

    def __init__(self, service: Service) -> None:
        import collections
        import threading
        self.service = service
        self.slurm = Slurm(service.store.service_id, service.environ)
        self.changed = threading.Condition()                # guards what the thread takes from the loop
        self.handings: collections.deque[Handing] = collections.deque()
        self.cancels: dict[str, None] = {}                  # Slurm's ids
        self.lookups: dict[str, None] = {}                  # those that squeue no longer shows
        self.look_at = 0.0                                  # monotonic; when squeue is asked next
        self.outcomes: collections.deque[Handed] = collections.deque()
        self.in_hand: set[str] = set()                      # jobs whose outcome has not been taken in
        self.handed_at: dict[str, float] = {}               # job: monotonic, when sbatch was done; what was seen before says nothing
        self.view = SlurmView({}, {}, float("-inf"))        # as last seen
        self.taken_at = float("-inf")                       # asked_at of the view that was taken in
        self.took_s = 0.0
        self.trouble, self.hint = "Slurm has not been asked yet", ""
        self.refusal, self.refusal_hint, self.refused_until, self.rest_s = "", "", float("-inf"), 0.0   # why it takes no jobs
        self.most: int | None = None                        # so many jobs Slurm has taken at once, and not one more; None: not known
        self.most_at, self.limit_words = float("-inf"), ""  # when that was found (monotonic), and its words
        self.settings: Mapping[str, str] = {}
        self.partitions: Sequence[SlurmPartition] = ()
        self.nodes: Sequence[SlurmNode] = ()
        self.nodes_at = float("-inf")                       # monotonic; when those were asked for
        self.accounts_at = float("-inf")                    # monotonic; when sacct may be asked again
        self.hasty_until = float("-inf")                    # monotonic; something is about to change
        self.cancelled_at: dict[str, float] = {}            # Slurm's id: monotonic
        self.over_at: dict[str, float] = {}                 # job id: monotonic, when Slurm first said that it is over
        self.arrays: set[str] = set()                       # tokens of arrays that have a folder
        self.thread = threading.Thread(target=self.run, name="slurm", daemon=True)

    # The thread

    def run(self) -> None:
        self.list_arrays()
        while not self.service.is_stopping:
            try:
                self.step()
            except Exception as error:                      # one failure stays one failure
                self.service.fail("talking to Slurm", error)
                self.service.clock.sleep(WATCH_INTERVAL_S)
            with self.changed:
                if not (self.handings or self.cancels):
                    self.changed.wait(min(WATCH_INTERVAL_S, max(0.0, self.look_at - self.service.clock.monotonic())))

    def step(self) -> None:
        """Do what is wanted by now: cancel, hand over once, which may take long, and look."""
        with self.changed:
            cancels, self.cancels = list(self.cancels), {}
            handing = self.handings.popleft() if self.handings else None
        try:
            for at in range(0, len(cancels), SLURM_IDS_AT_ONCE):
                self.cancel(cancels[at:at + SLURM_IDS_AT_ONCE])
        except NexusError as error:
            self.take_trouble(error)
        if handing:
            done = [Handed(handing.jobs, None, "cluster", is_unsure=True)]      # should that end with an exception
            try:
                done = self.hand_over(handing)
            finally:
                self.outcomes += done + self.give_up_handings(done)
                self.service.wake()
        if self.service.clock.monotonic() >= self.look_at or ((handing or cancels) and not self.handings):
            self.look()
            self.service.wake()

    def give_up_handings(self, done: Sequence[Handed]) -> list[Handed]:
        """What would be refused for the same reason is not even tried."""
        refusal = next((one for one in done if one.fault in ("cluster", "config", "limit")), None)
        if refusal is None:
            return []
        with self.changed:
            rest = list(self.handings)
            self.handings.clear()
        return [replace(refusal, jobs=handing.jobs, is_unsure=False) for handing in rest]

    def look(self) -> None:
        clock, refresh_s = self.service.clock, self.service.config.service.refresh_rate_seconds
        began_at = clock.monotonic()
        with self.changed:
            lookups = list(self.lookups) if began_at >= self.accounts_at else []
            self.lookups = {} if lookups else self.lookups
        try:
            if lookups or not self.settings:
                self.settings = self.slurm.query_settings()
            if began_at - self.nodes_at >= NODES_INTERVAL_S:
                self.look_at_nodes()
                self.nodes_at = began_at
            asked_at = clock.monotonic()
            jobs = {job.id: job for job in self.slurm.query_jobs()}
            accounts = self.look_at_accounts(lookups)
            next_id = self.settings.get("NEXT_JOB_ID", "0")
            self.view = SlurmView(jobs, accounts, asked_at, int(next_id) if next_id.isdigit() else 0,
                                  parse_slurm_time(self.settings.get("BOOT_TIME", "")) or 0.0)
            if self.trouble:
                self.service.log.info("Slurm answers: %s", self.describe_size())
            self.trouble, self.hint = "", ""
        except NexusError as error:
            self.take_trouble(error)
        now = clock.monotonic()
        self.took_s = now - began_at
        pause_s = refresh_s if self.trouble else max(HASTE_S if now < self.hasty_until else refresh_s, SLURM_REST * self.took_s)
        with self.changed:
            self.look_at = now + min(pause_s, max(TROUBLE_INTERVAL_S, refresh_s))

    def look_at_nodes(self) -> None:
        """Some clusters show them to operators alone: jobs can go there all the same.  Raises: unavailable."""
        try:
            self.partitions, self.nodes = self.slurm.query_nodes()
        except NexusError as error:
            if not re.search("denied", error.message):
                raise
            if self.nodes_at == float("-inf"):
                self.service.log.warning("Slurm does not show its nodes: %s", error.message)

    def look_at_accounts(self, ids: Sequence[str]) -> dict[str, SlurmJob | None]:
        """What the accounting knows of each; less while it does not answer, and then it is left alone for a while."""
        found: dict[str, SlurmJob | None] = {}
        began_at = self.service.clock.monotonic()
        try:
            for at in range(0, len(ids), SLURM_IDS_AT_ONCE):
                some = ids[at:at + SLURM_IDS_AT_ONCE]
                found.update({**dict.fromkeys(some), **{job.id: job for job in self.slurm.query_accounts(some)}})
        except NexusError as error:
            now = self.service.clock.monotonic()
            self.accounts_at = now + max(TROUBLE_INTERVAL_S, SLURM_REST * (now - began_at))
            self.service.log.warning("Slurm's accounting: %s", error.message)
        return found

    def take_trouble(self, error: NexusError) -> None:
        if error.message != self.trouble:
            self.service.log.error("Slurm: %s", error.message)
        self.trouble, self.hint = error.message, error.hint

    def describe_size(self) -> str:
        gpus = sum(node.gpus for node in self.nodes)
        version = self.settings.get("SLURM_VERSION", "?")
        return f"{format_count(len(self.nodes), 'node')} with {format_count(gpus, 'GPU')}, version {version}"

    def cancel(self, ids: Sequence[str]) -> None:
        words = self.slurm.cancel(ids)
        if words and not re.search("Invalid job id|already completing|already finished", words):
            self.service.log.warning("scancel %s: %s", " ".join(ids), words)

    def hand_over(self, handing: Handing) -> list[Handed]:
        """Write the scripts of the jobs that are still wanted, and call sbatch."""
        service, faults = self.service, {}
        wanted = service.store.read(lambda state: {job.id for job in map(state.jobs.get, [job.id for job in handing.jobs])
                                                   if job and not job.stop_cause})
        withdrawn = tuple(job for job in handing.jobs if job.id not in wanted)
        for job in [job for job in handing.jobs if job.id in wanted]:
            try:
                service.check_script(job.command, job.cwd)          # a link may lead elsewhere by now
                service.write_script(job, None)
            except (OSError, NexusError) as error:
                faults[job.id] = error
        done = [Handed(withdrawn, None, WITHDRAWN)] if withdrawn else []
        done += [Handed((job,), error=faults[job.id]) for job in handing.jobs if job.id in faults]
        jobs = tuple(job for job in handing.jobs if job.id in wanted and job.id not in faults)
        try:
            if handing.is_array and jobs:
                self.make_array_folder(handing.token, jobs)
        except OSError as error:
            return [*done, *(Handed((job,), error=error) for job in jobs)]
        return done + (self.submit(handing, jobs) if jobs else [])

    def submit(self, handing: Handing, jobs: tuple[Job, ...]) -> list[Handed]:
        """In one call of sbatch; in halves, where Slurm does not take so many."""
        layout, config = self.service.layout, self.service.config
        tasks = format_ranges(int(find_task(job)) for job in jobs) if handing.is_array else ""
        folder = layout.array_folder(handing.token) if handing.is_array else layout.job_folder(jobs[0].id)
        argv = build_sbatch(jobs[0], tasks, handing.token, self.slurm.service_id, folder, find_slurm_minutes(jobs[0], config.jobs), config)
        try:
            slurm_id, words = self.slurm.submit(argv)
        except NexusError as error:
            fault = read_refusal(error.message)[0]
            if fault != "limit":                            # sbatch was told to wait, and tried for as long as it may
                self.take_trouble(error)
            return [Handed(jobs, None, "limit" if fault == "limit" else "cluster", error.message, is_unsure=True)]
        if slurm_id:
            return [Handed(jobs, slurm_id)]
        fault, half = read_refusal(words)[0], len(jobs) // 2
        if not half or (fault != "limit" and "Invalid job array" not in words):
            return [Handed(jobs, None, fault, words)]
        first = self.submit(handing, jobs[:half])
        if first[-1].words:
            return [*first, replace(first[-1], jobs=jobs[half:], is_unsure=False)]
        return first + self.submit(handing, jobs[half:])

    def make_array_folder(self, token: str, jobs: Iterable[Job]) -> None:
        """A folder of links, by which each task of an array finds its job's.  Raises: OSError."""
        layout = self.service.layout
        os.makedirs(layout.array_folder(token), mode=0o700, exist_ok=True)
        self.arrays.add(token)
        for job in jobs:
            os.symlink(f"../{os.path.basename(layout.job_folder(job.id))}", os.path.join(layout.array_folder(token), find_task(job)))

    def list_arrays(self) -> None:
        """The folders of arrays that a former service has left."""
        try:
            names = os.listdir(self.service.layout.log_dir)
        except OSError:
            names = []
        self.arrays |= {name[len("slurm_"):] for name in names if re.fullmatch("slurm_[0-9a-f]{12}", name)}

    # What the loop wants

    def find_trouble(self) -> str | None:
        """Why no job can be handed over now."""
        if self.trouble:
            return self.trouble
        if self.service.clock.monotonic() < self.refused_until:
            return f"{self.refusal}; it is tried again"
        if self.in_hand:
            return "the jobs before it are being handed to Slurm"
        if self.most is not None and self.count_submitted() >= self.most:
            return f"Slurm has {format_count(self.most, 'job')} of nexus and takes no more now: {self.limit_words}"
        return None

    def count_submitted(self) -> int:
        handed, running = self.service.store.read(lambda state: (len(state.handed), [job.slurm_key for job in state.running.values()]))
        return int(handed) + sum(key is not None for key in running)

    def find_config(self) -> Config:
        """The configuration, less what Slurm has lately not taken."""
        config, now = self.service.config, self.service.clock.monotonic()
        if self.most is not None and now - self.most_at >= LIMIT_PATIENCE_S:        # it may be more by now: try
            self.most, self.most_at = 2 * self.most + 1, now
        if self.most is None or self.most >= config.slurm.max_submitted:
            self.most = None
            return config
        return replace(config, slurm=replace(config.slurm, max_submitted=self.most))

    def intend(self, state: State, starts: Iterable[Start], now: float) -> Iterator[Change]:
        """The changes that must be on disk before jobs are handed over."""
        service = self.service
        jobs = [state.jobs[start.job_id] for start in starts]
        for group in group_for_slurm(jobs, self.find_most_tasks(), service.config.jobs):
            token = service.clock.new_token()[-12:]
            for task, job in enumerate(group, 1):
                yield JobChanged(job.id, {
                    "slurm_key": f"{token}_{task}" if len(group) > 1 else token, "attempt": job.attempt + 1,
                    "nonce": service.clock.new_token()[:16], "log_dir": service.layout.job_folder(job.id),
                    **({"cwd": service.layout.work_folder(job.id)} if job.code else {})})

    def find_most_tasks(self) -> int:
        """Of one array: its highest index is one less than MaxArraySize; 0 of those means that there are none."""
        most = self.settings.get("MaxArraySize", "0")
        own = re.search(r"max_array_tasks=(\d+)", self.settings.get("SchedulerParameters", ""))
        return max(1, min(int(most) - 1, int(own[1]) if own else UNLIMITED)) if most.isdigit() else 1

    def hand(self, jobs: Sequence[Job]) -> None:
        """Hand over jobs whose intent is recorded."""
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            groups.setdefault(str(job.slurm_key).partition("_")[0], []).append(job)
        self.in_hand |= {job.id for job in jobs}
        with self.changed:
            self.handings += [Handing(token, tuple(group), "_" in str(group[0].slurm_key)) for token, group in groups.items()]
            self.changed.notify()

    def look_soon(self, delay_s: float = 0.0) -> None:
        """Ask squeue before its time, but not all the time."""
        with self.changed:
            earliest = self.view.asked_at + max(HASTE_S, SLURM_REST * self.took_s)
            self.look_at = min(self.look_at, max(earliest, self.service.clock.monotonic() + delay_s))
            self.changed.notify()

    def hurry(self) -> None:
        """Ask often for a while."""
        self.hasty_until = self.service.clock.monotonic() + HURRY_S

    def hears(self, saying: Saying) -> bool:
        """Whether a runner that Slurm began said it: then Slurm is asked."""
        job = self.service.store.read(lambda state: state.jobs.get(saying.job_id))
        if job is None or job.slurm_key is None:
            return False
        if job.status not in FINAL and job.attempt == saying.attempt:
            self.hurry()
            self.look_soon(HEARD_DELAY_S if saying.verb == "end" else 0.0)
        return True

    def find(self, job: Job) -> SlurmJob | None:
        return self.view.jobs.get(job.slurm_id or "")

    def list_estimates(self) -> dict[str, float]:
        """{waiting job: when Slurm thinks that it will start}"""
        handed = self.service.store.read(lambda state: list(state.handed.values()))
        found, latest = ((job.id, self.find(job)) for job in handed), self.service.clock.now() + FAR_S
        return {job_id: seen.started_at for job_id, seen in found
                if seen and seen.state in SLURM_WAITING and seen.started_at and seen.started_at < latest}

    # The loop takes in what was learned

    def follow(self) -> None:
        """One turn's part: what became of what was handed over, and of what Slurm has."""
        while self.outcomes:
            outcome = self.outcomes.popleft()
            ids = [job.id for job in outcome.jobs]
            self.handed_at.update(dict.fromkeys(ids, self.service.clock.monotonic()))
            try:
                self.take_outcome(outcome)
            finally:
                self.in_hand.difference_update(ids)
        live = self.service.store.read(lambda state: [*state.handed.values(), *(job for job in state.running.values() if job.slurm_key)])
        view = self.view
        if view.asked_at > self.taken_at:
            self.take_view(live, view)
            self.taken_at = view.asked_at
            self.drop_arrays({str(job.slurm_key).partition("_")[0] for job in live})
        self.stop_jobs(live)

    def take_outcome(self, done: Handed) -> None:
        service, jobs = self.service, done.jobs
        if done.error:
            for job in self.record([(job, BEGUN) for job in jobs]):
                if isinstance(done.error, OSError):
                    service.take_launch_error(job, done.error)
                else:
                    service.fail_launch(job, done.error.message)
        elif done.slurm_id:
            self.record([(job, {"slurm_id": join_task(done.slurm_id, job)}) for job in jobs])
            self.rest_s = 0.0
            self.hurry()
            service.log.info("Handed to Slurm as %s: %s", done.slurm_id, f"job {jobs[0].id}: {format_line(jobs[0].command, 500)}"
                             if len(jobs) == 1 else f"{format_count(len(jobs), 'job')}, {jobs[0].id} to {jobs[-1].id}")
        elif done.fault in ("job", ""):
            self.take_own_fault(done)
        else:
            if not done.is_unsure:
                self.put_back(jobs)
            self.rest(done)

    def take_own_fault(self, done: Handed) -> None:
        """Slurm does not take them for what they ask for."""
        hint = read_refusal(done.words)[1]
        line = f"Slurm refuses it: {done.words}" + (f" ({hint})" if hint else "")
        for job in self.record([(job, BEGUN) for job in done.jobs if self.claim(job)]):
            self.service.results[job.id] = Result(None, None, 0.0, "launch", format_line(line, 400), may_pass=not done.fault)
        self.service.wake()

    def rest(self, done: Handed) -> None:
        """Slurm would take no other either: until jobs have ended there, or for a while.  When it does not answer, look() finds out."""
        service, hint, now = self.service, read_refusal(done.words)[1], self.service.clock.monotonic()
        there = self.count_submitted() - (len(done.jobs) if done.is_unsure else 0)
        if done.fault == "limit" and there:
            if self.limit_words != done.words:
                service.log.warning("Slurm has %s and takes no more: %s", format_count(there, "job"), done.words)
            self.most, self.most_at, self.limit_words = there, now, done.words
        elif done.fault in ("config", "limit"):
            self.rest_s = min(HOLD_S[1], max(HOLD_S[0], 2 * self.rest_s))
            self.refusal, self.refusal_hint, self.refused_until = f"Slurm takes no jobs: {done.words}", hint, now + self.rest_s
            service.log.error("%s%s", self.refusal, f" ({hint})" if hint else "")

    def claim(self, job: Job) -> bool:
        """Whether nobody has begun an attempt, and nobody will any more.  Raises: unavailable."""
        folder = self.service.layout.job_folder(job.id)
        try:
            return take_claim(folder, job.attempt) or read_claim(folder, job.attempt) == (0, 0)
        except OSError as error:
            raise describe_disk_error(error, "write", folder) from None

    def put_back(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs that Slurm has not begun, and if it came to them would not begin, wait in nexus's queue again; return these."""
        return self.record([(job, NOT_STARTED) for job in jobs if self.claim(job)])

    def record(self, moves: Sequence[tuple[Job, Mapping[str, Any]]]) -> list[Job]:
        """Record facts of jobs that are still what they were when they were handed over; return these as they are then."""
        now = self.service.clock.now()

        def change(state: State) -> Changes:
            done = []
            for job, facts in moves:
                current = state.jobs.get(job.id)
                if current is None or current.slurm_key != job.slurm_key or current.status in FINAL:
                    continue
                status = facts.get("status", current.status) if "slurm_key" not in facts else PENDING
                others = {name: fact for name, fact in facts.items() if name != "status"}
                if status == PENDING and "slurm_key" in facts and current.stop_cause:       # it need not go there only to be cancelled
                    yield from end_job(state, current, CANCELLED, now, finished_at=now, cause=current.stop_cause)
                elif status != current.status:
                    yield change_status(current, status, now, **{"started_at": now, **others})
                elif others:
                    yield JobChanged(current.id, others)
                done.append((current, state.jobs[job.id]))
            return done

        recorded: list[tuple[Job, Job]] = self.service.store.update(change) if moves else []
        for before, job in recorded:
            if job.status == RUNNING and before.status == PENDING and job.slurm_node:
                self.service.counters.note_start(job)
                self.service.tell(job, "Started job %s as Slurm's %s on %s: %s", job.id, job.slurm_id, job.slurm_node,
                                  format_line(job.command, 500))
        return [job for _, job in recorded]

    def take_view(self, live: Sequence[Job], view: SlurmView) -> None:
        """Bring what is recorded in step with what Slurm has said."""
        by_key = {one.key: one for one in view.jobs.values() if one.key}
        moves: list[tuple[Job, dict[str, Any]]] = []
        ended: list[tuple[Job, SlurmJob]] = []
        followed = [job for job in live if job.id not in self.in_hand and job.id not in self.service.results
                    and self.handed_at.get(job.id, float("-inf")) < view.asked_at]
        for job in followed:
            facts: dict[str, Any] = {}
            one = view.jobs.get(job.slurm_id) if job.slurm_id else by_key.get(str(job.slurm_key))
            if one is None:
                one = self.look_up(job, view)
            elif one.key not in (None, job.slurm_key):      # slurmctld crashed and forgot it, and gave its id to another
                one = SlurmJob("", GONE)
            elif not job.slurm_id:
                facts["slurm_id"] = one.id
                self.service.log.info("Job %s is Slurm's %s", job.id, one.id)
            if one is None:
                continue
            if one.state in SLURM_ENDS or one.state == GONE:
                ended.append((job, one))
            elif one.state not in SLURM_WAITING:
                if one.state == "COMPLETING":
                    self.hurry()
                if job.status == PENDING:
                    facts.update(status=RUNNING, started_at=self.find_start(one), slurm_node=one.nodes or "a node")
            elif job.status == RUNNING:                     # taken from its node, and queued again
                ended.append((job, replace(one, state="NODE_FAIL", reason=f"queued again: {one.reason}", started_at=None)))
            if facts:
                moves.append((job, facts))
        recorded = {job.id: job for job in self.record(moves)}
        for job, one in ended:
            try:
                self.take_end(recorded.get(job.id, job), one, view)
            except NexusError as error:                     # the others are looked at all the same
                self.service.log.warning("Job %s: %s", job.id, error.message)
        ids = {job.id for job in live}
        self.over_at = {job_id: at for job_id, at in self.over_at.items() if job_id in ids}
        self.handed_at = {job_id: at for job_id, at in self.handed_at.items() if job_id in ids}
        self.cancel_orphans({job.slurm_key for job in live}, view)

    def find_start(self, one: SlurmJob) -> float:
        """Slurm tells whole seconds: the end of that one, so that no time limit is up too early."""
        now = self.service.clock.now()
        return now if one.started_at is None else min(now, one.started_at + 1)

    def look_up(self, job: Job, view: SlurmView) -> SlurmJob | None:
        """What the accounting tells of a job: GONE when there is nothing, None when that is not known yet."""
        if job.slurm_id is None:
            return SlurmJob("", GONE)
        if job.slurm_id not in view.accounts:
            now, folder = self.service.clock.monotonic(), self.service.layout.job_folder(job.id)
            if now - self.over_at.setdefault(job.id, now) >= RESULT_PATIENCE_S and read_result(folder, job.attempt):
                return SlurmJob(job.slurm_id, GONE)         # the accounting does not answer; its own result will do
            with self.changed:
                self.lookups[job.slurm_id] = None
            self.look_soon()
            return None
        known = view.accounts[job.slurm_id]
        return known if known and known.state in SLURM_ENDS else SlurmJob(job.slurm_id, GONE)

    def take_end(self, job: Job, one: SlurmJob, view: SlurmView) -> None:
        """Slurm says that a job is over, or does not know it: judge by what it has left.  Raises: unavailable."""
        service, is_gone = self.service, one.state == GONE
        folder, now = service.layout.job_folder(job.id), service.clock.monotonic()
        claim, result = read_claim(folder, job.attempt), read_result(folder, job.attempt)
        if self.slurm.has_accounts and not job.stop_cause and (one.state == "CANCELLED" or (claim and not result and not is_gone)):
            if one.id not in view.accounts and now - self.over_at.setdefault(job.id, now) < CLAIM_PATIENCE_S:
                self.look_up(job, view)                     # sacct knows by whom, and the exit code
                return
            known = view.accounts.get(one.id)
            one = known if known and known.state in SLURM_ENDS else one
        is_lost = not one.id or int(one.id.partition("_")[0]) >= view.next_id or self.may_be_lost(job, view)
        is_unbegun = not result and (is_gone and is_lost if not claim else one.state in ("COMPLETED", GONE) and claim == (0, 0))
        if is_unbegun and self.put_back([job]):
            service.log.warning("Job %s has not begun as Slurm's %s, which is %s: it is handed over again", job.id, job.slurm_id or "job",
                                "not there" if is_gone else one.state)
            return
        patience_s = RESULT_PATIENCE_S if one.state == "COMPLETED" and claim else CLAIM_PATIENCE_S
        may_come = not result and one.state != "NODE_FAIL" and (claim or one.nodes)
        if may_come and now - self.over_at.setdefault(job.id, now) < patience_s:
            self.hurry()                                    # it may be on its way from another machine
            return
        stopped_by = find_user(one.stopped_by) if one.stopped_by is not None else ""
        evidence = SlurmEvidence(result, claim is not None and claim != (0, 0), self.read_words(job), stopped_by)
        ended = judge_slurm(job, None if is_gone else one, evidence, folder)
        if job.status == PENDING:
            if one.state in ("CANCELLED", GONE) and not one.nodes and not claim:        # tasks of arrays just vanish
                if self.claim(job):
                    self.end_unrun(job, ended)
                return
            self.record([(job, {**BEGUN, "started_at": self.find_start(one), "slurm_node": one.nodes or None})])
        service.results[job.id] = ended
        service.wake()

    def may_be_lost(self, job: Job, view: SlurmView) -> bool:
        """Of a job that Slurm no longer knows, and that has not begun.

        If not, somebody has cancelled it there: squeue shows such a job for a while, and sacct for ever, but a task of an array vanishes.
        """
        try:
            handed_at = os.path.getmtime(os.path.join(self.service.layout.job_folder(job.id), "job.sh"))
        except OSError:
            return True
        return not find_task(job) or handed_at < view.began_at

    def end_unrun(self, job: Job, ended: Result) -> None:
        """Somebody took it out of Slurm's queue."""
        now = self.service.clock.now()

        def end(state: State) -> Changes:
            current = state.jobs.get(job.id)
            if current and current.status == PENDING and current.slurm_key == job.slurm_key:
                line = None if current.stop_cause else ended.cause_line
                yield from end_job(state, current, CANCELLED, now, finished_at=now, cause="killed", cause_line=line)

        self.service.store.update(end)
        self.service.log.info("Job %s cancelled: %s", job.id, ended.cause_line)

    def read_words(self, job: Job) -> str:
        """The last of what Slurm itself wrote about an attempt."""
        text, _ = read_tail(os.path.join(self.service.layout.job_folder(job.id), f"slurm-{job.attempt}.log"), 0, TAIL_BYTES)
        return find_slurm_line(text)

    def stop_jobs(self, live: Sequence[Job]) -> None:
        """Have those cancelled that are to end; again after a while, should Slurm not have heard."""
        now = self.service.clock.monotonic()
        wanted = [job.slurm_id for job in live if job.stop_cause and job.slurm_id and job.id not in self.service.results
                  and now - self.cancelled_at.get(job.slurm_id, float("-inf")) >= CANCEL_AGAIN_S]
        self.ask_to_cancel(wanted)

    def cancel_orphans(self, keys: set[str | None], view: SlurmView) -> None:
        """Of what this service has handed over, Slurm shall have nothing that no job of ours stands for."""
        now = self.service.clock.monotonic()
        self.ask_to_cancel([one.id for one in view.jobs.values() if one.key and one.key not in keys and one.state not in SLURM_ENDS
                            and one.state != "COMPLETING" and now - self.cancelled_at.get(one.id, float("-inf")) >= CANCEL_AGAIN_S])

    def ask_to_cancel(self, ids: Sequence[str]) -> None:
        if ids:
            now = self.service.clock.monotonic()
            self.cancelled_at = {slurm_id: at for slurm_id, at in self.cancelled_at.items() if now - at < CANCEL_AGAIN_S}
            self.cancelled_at.update(dict.fromkeys(ids, now))
            self.hurry()
            with self.changed:
                self.cancels.update(dict.fromkeys(ids))
                self.changed.notify()

    def drop_arrays(self, tokens: set[str]) -> None:
        """Remove the links of arrays of which nothing is left."""
        for token in [token for token in list(self.arrays) if token not in tokens]:        # the thread adds to them
            folder = self.service.layout.array_folder(token)
            try:
                with os.scandir(folder) as entries:
                    for path in [entry.path for entry in entries if entry.is_symlink()]:
                        os.unlink(path)
                os.rmdir(folder)
            except OSError as error:
                self.service.log.warning("%s was left: %s", folder, error)
            self.arrays.discard(token)

    # What is told

    def describe(self) -> dict[str, Any]:
        """Of GET /status: what Slurm has, by partition and node."""
        handed, running = self.service.store.read(lambda state: (
            len(state.handed), sum(1 for job in state.running.values() if job.slurm_key)))
        def fields(one: Any) -> dict[str, Any]:
            return {name: getattr(one, name) for name in one.__slots__}

        return {"cluster": self.settings.get("ClusterName"), "trouble": self.find_lasting_trouble(), "handed_jobs": handed,
                "running_jobs": running, "max_submitted": self.service.config.slurm.max_submitted,
                "partitions": list(map(fields, self.partitions)), "nodes": list(map(fields, self.nodes))}

    def find_lasting_trouble(self) -> str | None:
        return self.trouble or (self.refusal if self.service.clock.monotonic() < self.refused_until else None)

    def find_hint(self) -> str:
        return self.hint if self.trouble else self.refusal_hint if self.find_lasting_trouble() else ""


GONE = "GONE"                   # the state of what Slurm does not know
WITHDRAWN = "withdrawn"         # the fault of a handing: it is not wanted any more
BEGUN: Mapping[str, Any] = {"status": RUNNING}
FAR_S = 30 * 86400.0            # a start that Slurm thinks is further away is none: jobs without a time limit count as a year
HASTE_S = 0.2                   # between two calls of squeue when something is about to change
HURRY_S = 3.0                   # for so long
HEARD_DELAY_S = 0.05            # from a job's word that it has ended until Slurm knows
SLURM_REST = 10                 # squeue rests for so many times as long as it ran
NODES_INTERVAL_S = 10.0         # between two looks at partitions and nodes
SLURM_IDS_AT_ONCE = 500         # in one call of scancel or sacct
CANCEL_AGAIN_S = 30.0           # a cancelled job that has not ended is cancelled again after so long
LIMIT_PATIENCE_S = 60.0         # until more jobs are handed over than Slurm has lately taken at once
RESULT_PATIENCE_S = 60.0        # for a result to come through a shared file system, from a job.sh that Slurm says has ended well
CLAIM_PATIENCE_S = 3.0          # and of one that was killed, or did not begin


def find_task(job: Job) -> str:
    """Which task of an array a job is; empty when it is none."""
    return str(job.slurm_key).partition("_")[2]


def join_task(slurm_id: str, job: Job) -> str:
    """Slurm's id of a job that was handed over, maybe as a task of an array."""
    return f"{slurm_id}_{find_task(job)}" if find_task(job) else slurm_id


@value
class Caller:
    """Who asks for something."""
    user: str                   # whose jobs are its own
    name: str                   # for the log: how it was told who this is
    is_owner: bool = True       # of the service: all is allowed
    sha256: str | None = None   # of the user's token

    def may_see(self, user: str) -> bool:
        return self.is_owner or user == self.user


@value
class Added:
    """What became of a submission: the ids it stands for, and which of them were there before."""
    ids: tuple[str, ...]
    known: tuple[str, ...] = ()


class DryRun(Exception):
    """Ends a submission that is only tried: as all that ends with an exception, it has changed nothing.

    `fresh`: what would be queued; `known`: the jobs that are the same as what would not be; `lost`: why one would be cancelled at once.
    """

    def __init__(self, made: Sequence[tuple[Submission, Job]], known: Iterable[str]) -> None:
        super().__init__()
        self.fresh = [submission for submission, job in made if job.status == PENDING]
        self.lost = next((job.cause_line for _, job in made if job.status != PENDING), None)
        self.known = [job_id for job_id in known if job_id not in [job.id for _, job in made]]


class Service:
    """The scheduler of one machine."""

    def __init__(self, config: Config, layout: Layout, store: Store, machine: Machine, clock: Clock, log: logging.Logger,
                 environ: Mapping[str, str]) -> None:
        import collections
        import queue
        import threading
        self.config, self.layout, self.store, self.machine = config, layout, store, machine
        self.clock, self.log = clock, log
        self.environ = {name: text for name, text in environ.items() if not is_job_variable(name)}
        self.user = find_user(os.geteuid())
        self.owner = Caller(self.user, self.user)
        self.hash = file_hash()                             # of what runs: the file may be another by and by
        self.node = store.host
        self.started_at, self.started_monotonic = clock.now(), clock.monotonic()
        self.is_stopping = False
        self.first_probe = threading.Event()
        self.observation = Observation((), "nvidia-smi has not answered yet", SMI_SLOW_HINT, 0.0, 0.0)
        self.fresh: Observation | None = None               # not yet taken in by the loop
        self.gpus: tuple[Gpu, ...] = ()                     # as the scheduler sees them
        self.plan = Plan(hold="the service is about to look at the GPUs")
        self.results: dict[str, Result] = {}                # jobs that are over, but not yet recorded so
        self.clearings: dict[str, Clearing] = {}
        self.launched_at: dict[str, float] = {}             # monotonic; started, no word yet
        self.released_at: dict[str, float] = {}             # GPU uuid: monotonic, when a job of ours last left it
        self.readings = Readings(machine.samples)
        self.scales = Scales(self, config.jobs.max_memory_gb * 1024)
        self.usage: dict[str, Usage] = {}                   # of running jobs with limits
        self.remote_samples: dict[str, Mapping[str, Any]] = {}      # job: what it takes on another machine
        self.ended: collections.deque[Ended] = collections.deque(maxlen=500)    # attempts, the latest last
        self.estimates: Mapping[str, float] = {}            # pending job: when it will start
        self.estimated_at, self.estimate_took_s = float("-inf"), 0.0        # monotonic
        self.estimate_lock = threading.Lock()
        self.estimates_wanted, self.estimates_made = threading.Event(), threading.Event()
        self.is_estimating = False                          # there is a thread that does
        self.last_watch_at = self.last_touch_at = 0.0
        self.retry_at = 0.0                                 # no write before: the disk refused
        self.start_trouble, self.hold_s, self.hold_until = "", 0.0, float("-inf")       # why nothing is started, until when (monotonic)
        self.wants_sample = False                           # there was a look at the GPUs
        self.wants_annotation = False                       # somebody paused or resumed a GPU
        self.members: Mapping[str, Sequence[Process]] = {}  # of running jobs, as last looked for
        self.lease_trouble, self.lease_trouble_at = "", float("-inf")       # why no GPU could be leased, and when (monotonic)
        self.lease_rest_s = 0.0                             # for how long none is tried after that
        self.turned_at = clock.monotonic()                  # the loop's last turn
        self.due_at = self.turned_at                        # monotonic; when its next one is to begin, or the present one has begun
        self.counters = Counters()
        store.note_moves = self.counters.note_moves
        self.failure_count = 0
        self.failed_at = float("-inf")                      # monotonic
        self.last_failure = ""
        self.rubbish: queue.Queue[Job] = queue.Queue()      # jobs no longer kept, whose folders are to go
        self.bad_edits = 0                                  # how often in a row state.json was no JSON
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.fifo: int | None = None
        self.heard = b""
        self.prober = Prober(self)
        self.nodes: Mapping[str, Node] = {}                 # other machines, by name, in the order in which they came
        self.told_at: dict[str, float] = {}                 # another nexus: when it was told last of the GPUs here, monotonic
        self.hooks = Hooks(self)
        self.is_slurm = config.jobs.launcher == "slurm"
        has_jobs = store.read(lambda state: bool(state.handed) or any(job.slurm_key for job in state.running.values()))
        self.cluster = Cluster(self) if self.is_slurm or has_jobs else None
        self.jobs_file = JobsFile(self, config.jobs.jobs_file) if config.jobs.jobs_file else None
        self.llm_shares = LlmShares(config.jobs.llm_config) if config.jobs.llm_config else None

    # What requests ask for.  `who` asked, for the log; a `caller` has its own jobs alone.

    def wake(self) -> None:
        try:
            os.write(self.wake_write, b"w")
        except BlockingIOError:
            pass                                            # it has been woken already

    def submit(self, submissions: Sequence[Submission], caller: Caller, key: str | None = None, key_content: str | None = None,
               is_dry: bool = False) -> Added:
        """Queue jobs, all or none; return their ids.  With the `key` of an earlier submission, that one's, if its content was the same.

        Raises: usage, not_found, conflict, queue_full, forbidden, unavailable; and DryRun, when all of these were not, and it `is_dry`.
        """
        if key and caller.user != self.user:
            key = f"{caller.user} {key}"
        for submission in submissions:
            check_priority(submission.priority, caller)
        prepared = [self.prepare(submission) for submission in submissions]
        environments = self.make_environments(submissions)
        now = self.clock.now()

        def add(state: State) -> Changes:
            if key and key in state.keys:
                return Added(find_keyed(state, key, key_content))
            ids, known, made = [], [], []
            check_groups(state, prepared, caller)
            has_unique = any(submission.unique for submission in prepared)
            contents = map_contents(state) if has_unique else {}
            for submission, (digest, variables), original in zip(prepared, environments, submissions):
                asked = {name: getattr(original, name) for name in SUBMISSION_FIELDS if name not in ("code", "labels")}
                content = digest_of(json.dumps(asked, sort_keys=True)) if submission.id else ""
                same = find_same(state, submission, caller.user, content) or (
                    contents.get(self.content_of(submission, caller.user)) if submission.unique else None)
                if same:
                    ids.append(same)
                    known.append(same)
                    continue
                job = yield from self.add_job(state, submission, caller, digest, variables, now, content=content, key=key,
                                              key_content=key_content)
                if has_unique:
                    contents[content_of(job)] = job.id
                    for failed in find_forerunners(state, job):
                        yield JobChanged(failed, {"retried_as": job.id})
                ids.append(job.id)
                made.append((submission, state.jobs[job.id]))
            if is_dry:
                raise DryRun(made, known)
            return Added(tuple(ids), tuple(known))

        added: Added = self.store.update(add)
        count = len(added.ids) - len(added.known)
        if count:
            self.log.info("%s added by %s: %s", f"Job {added.ids[0]}" if len(added.ids) == 1 else format_count(count, "job"),
                          caller.name, format_line(submissions[0].command, 300) + (" ..." if len(submissions) > 1 else ""))
            self.wake()
        return added

    def submit_code(self, submission: Submission, code: bytes, caller: Caller, key: str | None, key_content: str | None) -> str:
        """Queue a script; return its job's id.  It is on disk before, and goes again when no job came to need it.

        Raises: what submit() raises.
        """
        name = self.clock.new_token()
        submission = replace(submission, command=f"{self.find_python()} main.py", code=name)
        self.prepare(submission)                            # before anything is written
        path, is_needed = self.layout.code_file(name), False
        try:
            write_code(path, code)
            job_id = self.submit([submission], caller, key, key_content).ids[0]
            is_needed = self.store.read(lambda state: job_id in state.jobs and state.jobs[job_id].code == name)
        finally:
            if not is_needed:
                remove_file(path)
        return job_id

    def find_python(self) -> str:
        """Some systems have only python3."""
        import shutil
        return "python" if shutil.which("python", path=self.environ.get("PATH") or os.defpath) else "python3"

    def add_job(self, state: State, submission: Submission, caller: Caller, digest: str, variables: Mapping[str, str], now: float,
                **facts: Any) -> Changes:
        """The changes that put a job into the queue; returns it.  Raises: queue_full, not_found, forbidden."""
        check_queue(state, caller.user, self.config.jobs)
        parents = [find_own_job(state, parent, caller) for parent in submission.after]
        if digest not in state.environments:
            yield EnvironmentAdded(digest, variables)
        limit = submission.max_concurrent
        group = state.groups.get(submission.group or "")
        if submission.group and limit and (group is None or group.limit != limit):
            yield GroupChanged(replace(group or Group(submission.group), limit=limit))
        unmet = tuple(parent.id for parent in parents if parent.status != COMPLETED)
        job = self.make_job(submission, state, caller.user, digest, now, unmet=unmet, **facts)
        yield JobAdded(job)
        lost = [parent for parent in parents if parent.status in FINAL and parent.status != COMPLETED]
        if lost:
            yield from end_job(state, job, CANCELLED, now, finished_at=now, cause="dependency", cause_line=describe_parent(lost[0]))
        return job

    def prepare(self, submission: Submission) -> Submission:
        """A submission with what the configuration says of it.  Raises: usage, forbidden, what no machine can ever run."""
        if submission.node is not None and submission.node != self.node and submission.node not in self.nodes:
            refuse(f"there is no node {submission.node}", hint=suggest(submission.node, [self.node, *self.nodes]) or "nexus node list")
        if submission.gpus is None:
            submission = replace(submission, gpus=self.find_share(submission))
        check_gpus(submission.gpus, submission)
        if submission.llm and not self.llm_shares:
            refuse(f"llm {format_line(submission.llm, 40)}: there is no table of models", hint="set [jobs] llm_config in config.toml")
        if submission.cuda_arg and not has_cuda_option(submission.command) and re.search(SHELL_CHARACTERS, submission.command):
            refuse("cuda_arg: where --cuda belongs in this command cannot be told",
                   hint="write it there: python train.py --cuda 0 | tee log")
        self.check_script(submission.command, self.layout.work_folder("ID") if submission.code else
                          submission.cwd or self.find_home_folder())
        self.check_beside_script(submission)
        self.check_machine(submission)
        return submission

    def find_share(self, submission: Submission) -> float:
        """The GPUs of a job that does not say: those of its model, or the default.  Raises: usage."""
        model = submission.llm or (find_llm(submission.command) if self.llm_shares else None)
        return self.llm_shares.find(model) if model and self.llm_shares else self.config.jobs.default_gpus

    def check_script(self, command: str, cwd: str) -> None:
        """With allowed_script_paths, only scripts below them, wherever links lead.  Raises: forbidden."""
        if self.config.jobs.allowed_script_paths:
            path = os.path.realpath(os.path.join(cwd, parse_script(command)))
            allowed = [os.path.realpath(os.path.expanduser(folder)) for folder in self.config.jobs.allowed_script_paths]
            if not any(path.startswith(folder.rstrip("/") + "/") for folder in allowed):
                raise NexusError("forbidden", f"{format_line(path, 200)} may not be run here: it is not below {' or '.join(allowed)}",
                                 hint="[jobs] allowed_script_paths says what may")

    def check_beside_script(self, submission: Submission) -> None:
        """With allowed_script_paths, nothing else may decide what is run.  Raises: forbidden."""
        if self.config.jobs.allowed_script_paths:
            given = [key for key in ("conda", "snapshot") if getattr(submission, key)]
            given += [f"env {name}" for name in submission.env if re.fullmatch(INTERFERING, name)]
            if given:
                raise NexusError("forbidden", f"{', '.join(given)} may not be given here, where only some scripts may be run",
                                 hint="[jobs] allowed_script_paths says which")

    def check_cluster(self, submission: Submission, nodes: Sequence[SlurmNode]) -> None:
        """Refuse what Slurm cannot be asked for, or has nowhere.  Raises: usage."""
        obstacle, gpus = find_slurm_obstacle(submission), submission.gpus or 0
        if obstacle:
            refuse(obstacle, hint="[jobs] launcher is \"slurm\"; the kind of GPU is chosen by [slurm] partition, or by extra_args = "
                   "[\"--constraint=a100\"]")
        most = max((node.gpus for node in nodes), default=0)
        if nodes and gpus > most:
            refuse(f"{format_gpus(gpus)} asked for, and no node of the cluster has more than {most}",
                   hint="ask for fewer; nexus status shows them")

    def check_machine(self, submission: Submission) -> None:
        """Refuse what no machine can ever run.  What the GPUs are is known only after the first good look."""
        if self.cluster and self.is_slurm:
            self.check_cluster(submission, self.cluster.nodes)
            return
        gpus = submission.gpus or 0
        if gpus and not self.first_probe.is_set():
            self.first_probe.wait(2.0)
        machines = [name for name in ("", *self.nodes) if submission.node in (None, name or self.node)]
        if not gpus or any(self.observation.trouble if not name else not self.nodes[name].gpus for name in machines):
            return                              # what that one has is not known now
        allowed = self.config.gpu.ids
        usable = {name: self.nodes[name].gpus if name else [
            gpu for gpu in self.observation.gpus if not allowed or gpu.index in allowed] for name in machines}
        most, refusals = max(map(len, usable.values())), [find_refusal(submission, gpus, name) for name, gpus in usable.items()]
        if len(machines) > 1 and gpus > most:
            refuse(f"{format_gpus(gpus)} asked for, and no machine has more than {most}",
                   hint="ask for fewer; nexus node list has the machines")
        if None not in refusals:
            refuse(*max(filter(None, refusals), key=lambda refusal: refusals.count(refusal)))

    def content_of(self, submission: Submission, user: str) -> tuple[object, ...]:
        return user, submission.command, submission.cwd or self.find_home_folder(), submission.conda, digest_env(submission.env)

    def find_home_folder(self) -> str:
        return os.path.expanduser("~")

    def make_environments(self, submissions: Sequence[Submission]) -> list[tuple[str, Mapping[str, str]]]:
        """(digest, variables) of each: the submitter's whole environment, or the service's with `env` on top."""
        made: dict[tuple[int, int], tuple[str, Mapping[str, str]]] = {}
        by_text: dict[str, tuple[str, Mapping[str, str]]] = {}
        for submission in submissions:
            place = id(submission.environment), id(submission.env) if submission.env else 0
            if place not in made:
                base = self.environ if submission.environment is None else submission.environment
                variables = {name: text for name, text in {**base, **submission.env}.items() if not is_job_variable(name)}
                text = json.dumps(variables, sort_keys=True)
                if len(text) > 1024 * 1024:
                    refuse("the environment is larger than 1 MiB", hint="unset what the job does not need")
                made[place] = by_text.setdefault(text, (digest_of(text), variables))
        return [made[id(submission.environment), id(submission.env) if submission.env else 0] for submission in submissions]

    def make_job(self, submission: Submission, state: State, user: str, digest: str, now: float, **facts: Any) -> Job:
        config = self.config.jobs
        assert submission.gpus is not None
        job_id = submission.id or self.clock.new_job_id(state.jobs)
        return Job(
            id=job_id, cwd=self.layout.work_folder(job_id) if submission.code else submission.cwd or self.find_home_folder(),
            created_at=now, **next_place(state, submission.priority, user), environment=digest, user=user,
            **{"content": "", **facts}, only_node="" if submission.node == self.node else submission.node,
            env_digest=digest_env(submission.env), retries=config.retries if submission.retries is None else submission.retries,
            status_history=((PENDING, now),), **{name: getattr(submission, name) for name in KEPT_AS_ASKED})

    def cancel(self, job_id: str, caller: Caller, statuses: Sequence[str]) -> None:
        """Take a pending job out of the queue, or have a running one stopped.  Raises: not_found, forbidden, conflict."""
        now = self.clock.now()

        def stop(state: State) -> Changes:
            job = find_own_job(state, job_id, caller)
            if job.status not in statuses:
                hint = {PENDING: f"take it out of the queue: nexus remove {job.id}", RUNNING: f"stop it: nexus kill {job.id}"}
                raise NexusError("conflict", f"job {job.id} is {job.status}", hint=hint.get(job.status, f"nexus show {job.id}"))
            is_in_queue = job.slurm_key is None or (job.slurm_id and is_withdrawn(job, self.layout.job_folder(job.id)))
            if job.status == PENDING and is_in_queue:       # one on its way to Slurm is stopped when it is there
                yield from end_job(state, job, CANCELLED, now, finished_at=now, cause="killed", stop_by=caller.name)
            elif job.stop_cause != "killed":            # also when its time is up: it shall not be tried again
                yield JobChanged(job.id, {"stop_cause": "killed", "stop_by": caller.name, "stop_line": None})

        self.store.update(stop)
        self.log.info("Job %s: %s asked for its end", job_id, caller.name)
        self.wake()

    def retry(self, job_id: str, caller: Caller) -> list[str]:
        """Queue a finished job again, as a new one, and those that its end took with it; return their ids.

        Raises: not_found, forbidden, conflict, queue_full.
        """
        now = self.clock.now()

        def add(state: State) -> Changes:
            old = find_own_job(state, job_id, caller)
            if old.status not in FINAL:
                raise NexusError("conflict", f"job {old.id} is {old.status}; only a finished one can be run again",
                                 hint=f"nexus show {old.id}")
            again: dict[str, str] = {}                      # old id: new id
            for job in [old, *(child for child in list_dependents(state, old.id) if caller.may_see(child.user))]:
                check_queue(state, job.user, self.config.jobs)
                after = tuple(again.get(parent) or find_retried(state, parent) for parent in job.after
                              if parent in again or is_hopeful(state, parent))
                kept = {name: getattr(job, name) for name in (*KEPT_AS_ASKED, "user", "cwd", "environment", "env_digest", "retries",
                                                              "only_node")}
                priority = job.priority if caller.is_owner else max(job.priority, PRIORITIES["normal"])     # see check_priority()
                new_id = self.clock.new_job_id(state.jobs)
                kept["cwd"] = self.layout.work_folder(new_id) if job.code else job.cwd
                new = Job(**{**kept, "after": after}, id=new_id, created_at=now, content="",
                          **next_place(state, priority, job.user), status_history=((PENDING, now),),
                          unmet=tuple(parent for parent in after if state.jobs[parent].status != COMPLETED))
                yield JobAdded(new)
                yield JobChanged(job.id, {"retried_as": new.id})
                again[job.id] = new.id
            return list(again.values())

        ids: list[str] = self.store.update(add)
        self.log.info("Job %s added by %s, again as %s was%s", ids[0], caller.name, job_id,
                      f", with {format_count(len(ids) - 1, 'job')} that came after it" if len(ids) > 1 else "")
        self.wake()
        return ids

    def move(self, job_id: str, caller: Caller, priority: int | None, position: int | None) -> None:
        """Give a pending job another priority, or another place in the queue.  Raises: not_found, forbidden, conflict."""
        check_priority(priority, caller)
        if position is not None and not caller.is_owner:
            raise NexusError("forbidden", f"only {self.user} may give a job a place before others' ones", hint="a priority may be given")

        def move(state: State) -> Changes:
            job = find_own_job(state, job_id, caller)
            if job.status != PENDING:
                raise NexusError("conflict", f"job {job.id} is {job.status}; only a pending one can be moved", hint=f"nexus show {job.id}")
            if job.slurm_key is not None:
                there = job.slurm_id or "one that is just being handed over"
                raise NexusError("conflict", f"Slurm has job {job.id} as {there}, and orders it among its own",
                                 hint=f"there: scontrol top {job.slurm_id or 'ID'}; [slurm] max_submitted says how many are handed over")
            if priority is not None and (priority != job.priority or was_moved(job)):
                yield JobChanged(job.id, {"priority": priority, "order": place_in_priority(state, job, priority)})
            if position is not None:
                change = move_job(state, state.jobs[job.id], position)
                if change:
                    yield change

        self.store.update(move)
        self.log.info("Job %s moved by %s", job_id, caller.name)
        self.wake()

    def set_paused(self, is_paused: bool, who: str) -> None:
        def change(state: State) -> Changes:
            if state.paused != is_paused:
                yield StateChanged({"paused": is_paused})

        self.store.update(change)
        self.store.snapshot_wanted.set()                    # others read it there, and edit it
        self.log.info("Queue %s by %s", "paused" if is_paused else "resumed", who)
        self.wake()

    def set_group_held(self, name: str, is_held: bool, who: str) -> None:
        """Start none of a group, or again as many as fit.  Raises: not_found."""
        def change(state: State) -> Changes:
            if not any(job.group == name for job in state.jobs.values()):
                raise NexusError("not_found", f"there is no job of group '{format_line(name, 60)}'", hint=suggest(name, list_groups(state)))
            group = state.groups.get(name) or Group(name)
            hold = f"paused by {who} (nexus resume --group {name})" if is_held else None
            yield GroupChanged(replace(group, hold=hold, failures=0 if group.hold and not is_held else group.failures))

        self.store.update(change)
        self.log.info("Group %s %s by %s", name, "paused" if is_held else "resumed", who)
        self.wake()

    def set_gpu_paused(self, index: int, is_paused: bool, who: str, node: str = "") -> None:
        """Raises: not_found."""
        gpus = self.find_node(node).gpus if node and node != self.node else self.observation.gpus
        gpu = next((gpu for gpu in gpus if gpu.index == index), None)
        if gpu is None:
            raise NexusError("not_found", f"there is no GPU {index}{f' on {node}' if node else ''}", hint="nexus shows them")
        uuid = gpu.uuid
        if gpu.node and gpu.is_paused and not is_paused and uuid not in self.store.read(lambda state: state.paused_gpus):
            raise NexusError("conflict", f"GPU {gpu.place} is paused by {node}'s own nexus", hint=f"there: nexus resume {index}")

        def change(state: State) -> Changes:
            others = tuple(other for other in state.paused_gpus if other != uuid)
            yield StateChanged({"paused_gpus": (*others, uuid) if is_paused else others,
                                "pause_reasons": tuple(pair for pair in state.pause_reasons if pair[0] != uuid)})

        self.store.update(change)
        if not is_paused:
            self.ended.append(Ended((uuid,), "", False, False, self.clock.now()))     # the guard counts anew
        self.wants_annotation = True
        self.store.snapshot_wanted.set()
        self.log.info("GPU %s %s by %s", gpu.place, "paused" if is_paused else "resumed", who)
        self.wake()

    # Observing

    def observed(self, seen: Observation) -> None:
        """Called by the prober's thread."""
        self.counters.probe_failures += bool(seen.trouble)
        self.fresh = seen
        self.wake()

    def stop(self) -> None:
        """End the loop; from a signal handler too."""
        self.is_stopping = True
        self.wake()

    def take_in_observation(self) -> None:
        """Tell whose the processes on the GPUs are, and let the scheduler see them."""
        seen, self.fresh = self.fresh, None
        if seen is None:
            if self.wants_annotation:
                self.annotate_gpus()
            return
        before, self.observation = self.observation, seen
        self.members = self.machine.processes.find_members(job for job in self.running_jobs() if job.boot_id == self.machine.boot_id)
        self.wants_sample = True
        self.annotate_gpus()
        self.readings.note_gpus(self.gpus, self.running_jobs(), self.clock.monotonic())
        if (seen.trouble != before.trouble or len(seen.gpus) != len(before.gpus)) and not self.is_slurm:
            if seen.trouble:
                self.log.error("GPUs: %s", seen.trouble)
            else:
                self.log.info("Found %s", format_count(len(seen.gpus), "GPU"))
        for gpu in seen.gpus:
            if gpu.fault and gpu.fault not in [old.fault for old in before.gpus if old.uuid == gpu.uuid]:
                self.log.error("GPU %d: %s", gpu.index, gpu.fault)
        self.first_probe.set()
        self.remember_inventory(seen)

    def annotate_gpus(self) -> None:
        seen, self.wants_annotation = self.observation, False
        running = {job.id: job for job in self.running_jobs()}
        held = {uuid for job in running.values() for uuid in job.gpu_uuids}
        holders: Mapping[str, str] = {}
        if self.machine.leases and seen.gpus:
            holders = self.machine.leases.find_holders()
        left = {uuid for uuid, at in self.released_at.items() if at >= seen.began_at}      # its memory was a job's that has ended
        gpus = tuple(self.annotate_gpu(gpu, tuple(self.annotate_processes(gpu, running, gpu.uuid in held)), gpu.uuid in left,
                                       holders.get(gpu.uuid)) for gpu in seen.gpus)
        if [describe_for_event(gpu) for gpu in gpus] != [describe_for_event(gpu) for gpu in self.gpus]:
            self.store.events.publish([("gpus", None)])
        self.gpus = gpus

    def annotate_gpu(self, gpu: Gpu, processes: tuple[GpuProcess, ...], was_left: bool, lease_holder: str | None) -> Gpu:
        """`was_left`: since the reading a job of ours has ended there; what it used is free, if that is not told apart it is not known."""
        is_told = bool(processes) and all(process.memory_mib is not None for process in processes)
        mean, peak = self.readings.describe_window(gpu.uuid)
        return replace(
            gpu, memory_used_mib=None if was_left and not is_told and not self.config.gpu.min_free_mem_mib else gpu.memory_used_mib,
            processes=processes, lease_holder=lease_holder, settled=self.readings.find_settled(processes, self.clock.monotonic()),
            utilization_mean=mean, utilization_peak=peak)

    def annotate_processes(self, gpu: Gpu, running: Mapping[str, Job], is_held: bool) -> Iterator[GpuProcess]:
        for process in gpu.processes:
            owner, is_there = self.machine.processes.owner_of(process.pid), self.machine.processes.find(process.pid) is not None
            if owner is None and not is_there and (is_held or self.released_at.get(gpu.uuid, -1.0) >= self.observation.began_at):
                continue            # a process of our job that came and went between two looks
            # A running job that uses a GPU which it was not given, whatever CUDA_VISIBLE_DEVICES said, is there as anybody else is.
            job = running.get(owner or "") if is_there else None
            if owner and (job is None or gpu.uuid in job.gpu_uuids):
                yield replace(process, job_id=owner)
                continue
            name = self.machine.samples.find_name(process.pid)
            yield replace(process, user=find_process_user(process.pid), name=format_astray(name, owner) if owner else name)

    def sample(self) -> None:
        """Memory and CPU of jobs and host, once for each look at the GPUs, when all else is done."""
        if not self.wants_sample:
            return
        self.wants_sample = False
        running = self.running_jobs()
        self.readings.sample({job.id: self.members[job.id] for job in running if job.id in self.members})
        self.scales.look(running, self.readings.jobs, self.members)

    def remember_inventory(self, seen: Observation) -> None:
        """So that a restarted service knows which GPUs to look for when the driver shows none."""
        inventory = tuple((gpu.index, gpu.uuid, gpu.name, gpu.memory_total_mib) for gpu in seen.gpus)

        def change(state: State) -> Changes:
            if not seen.trouble and state.inventory != inventory:
                yield StateChanged({"inventory": inventory})

        self.store.update(change)

    def running_jobs(self) -> list[Job]:
        return self.store.read(lambda state: list(state.running.values()))

    # The loop

    def run(self) -> None:
        """Serve until stopped."""
        import threading
        self.open_fifo()
        self.adopt()
        self.prober.thread.start()
        if self.cluster:
            self.cluster.thread.start()
        workers = [(self.keep_snapshots, "snapshots"), (self.remove_rubbish, "rubbish"), (self.keep_estimates, "estimates")]
        if self.config.hooks.on_finish or self.config.hooks.on_unhealthy:       # it wakes at each event, on the way to the next start
            workers.append((self.hooks.run, "hooks"))
        else:
            self.hooks.begin()
        if self.config.jobs.max_memory_gb:
            workers.append((self.scales.run, "memory"))
        for target, name in workers + ([(self.jobs_file.run, "jobs file")] if self.jobs_file else []):
            threading.Thread(target=target, name=name, daemon=True).start()
        while not self.is_stopping:
            wait_s = self.next_wait_s()
            self.due_at = self.clock.monotonic() + wait_s
            sayings = self.listen(wait_s)
            self.due_at = min(self.due_at, self.clock.monotonic())
            self.turn(sayings)
        self.prober.stop.set()
        for node in self.nodes.values():
            node.end()
        try:
            self.look_for_edit()
            self.keep_samples()
        except (OSError, NexusError) as error:
            self.log.warning("At the end: %s", error)

    def turn(self, sayings: Sequence[Saying]) -> None:
        """One step of the loop.  A phase that fails is logged and counted; the others go on."""
        began_at = self.clock.monotonic()
        phases: tuple[tuple[str, Callable[[], None]], ...] = (
            ("hearing runners", lambda: self.hear(sayings)), ("watching runners", self.watch), ("hearing nodes", self.hear_nodes),
            ("following Slurm", self.cluster.follow if self.cluster else lambda: None),
            ("reading GPUs", self.take_in_observation), ("ending jobs", self.clear), ("scheduling", self.schedule),
            ("trimming the history", self.trim_history), ("sampling", self.sample))
        for phase, act in phases:
            try:
                act()
            except NexusError as error:
                if self.store.last_error is None:
                    self.log.warning("%s: %s", phase, error.message)
                self.retry_at = self.clock.monotonic() + 1
            except Exception as error:
                self.fail(phase, error)
        self.turned_at = self.clock.monotonic()
        self.counters.turns.note(self.turned_at - began_at)

    def fail(self, phase: str, error: BaseException) -> None:
        self.failure_count += 1
        failure, before, self.failed_at = f"{phase}: {error!r}", self.failed_at, self.clock.monotonic()
        if failure != self.last_failure or self.failed_at - before > 60:        # the same again and again fills no disk
            self.log.error("Internal error while %s", phase, exc_info=error)
        self.last_failure = failure

    def next_wait_s(self) -> float:
        if self.clock.monotonic() - self.failed_at < WATCH_INTERVAL_S or (self.store.last_error and not self.clearings):
            return WATCH_INTERVAL_S             # what has just failed is not tried at full speed
        if self.results or self.clearings:
            return CLEARING_INTERVAL_S
        is_running, delayed = self.store.read(lambda state: (bool(state.running), state.delayed[:1]))
        longest = WATCH_INTERVAL_S if is_running or self.store.last_error else 5.0
        return min([longest, *(max(0.01, at - self.clock.now()) for at, _ in delayed)])

    def open_fifo(self) -> None:
        """Read-write, so that a runner's word never meets a FIFO that nobody has open.  Without one, pids are watched."""
        import stat
        path = self.layout.events_file
        try:
            if not os.path.lexists(path) or not stat.S_ISFIFO(os.lstat(path).st_mode):
                if os.path.lexists(path):
                    os.unlink(path)
                os.mkfifo(path, 0o600)
            self.fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.log.warning("%s: %s; ends of jobs are noticed within %g s", path, error, WATCH_INTERVAL_S)

    def listen(self, timeout_s: float) -> list[Saying]:
        """Wait for a word from a runner, a request, or the time."""
        import select
        ready, _, _ = select.select([self.wake_read] + ([self.fifo] if self.fifo is not None else []), [], [], timeout_s)
        if self.wake_read in ready:
            os.read(self.wake_read, 65536)
        if self.fifo not in ready or self.fifo is None:
            return []
        *lines, self.heard = (self.heard + os.read(self.fifo, 65536)).split(b"\n")
        self.heard = self.heard[-4096:]
        sayings = [parse_saying(line.decode("utf-8", "replace")) for line in lines]
        return [saying for saying in sayings if saying]

    def hear(self, sayings: Sequence[Saying]) -> None:
        jobs = {job.id: job for job in self.running_jobs()} if sayings else {}
        for saying in sayings:
            if self.cluster and self.cluster.hears(saying):
                continue
            job = jobs.get(saying.job_id)
            if job is None or job.attempt != saying.attempt:
                continue
            try:
                self.hear_one(job, saying)
            except NexusError as error:                 # the others are heard all the same, and this one is looked at again
                self.log.warning("Job %s said '%s': %s", job.id, saying.verb, error.message)

    def hear_one(self, job: Job, saying: Saying) -> None:
        if saying.verb == "start":
            self.note_start(job, int(saying.words[0]), int(saying.words[1]))
        elif saying.verb == "end":
            code, runtime_s = int(saying.words[0]), int(saying.words[1]) / 100
            self.results.setdefault(job.id, Result(min(code, 255), None, runtime_s))
            if job.id in self.clearings:
                self.clearings[job.id].next_look_at = 0.0
        elif saying.verb == "fail":
            self.fail_launch(job, " ".join(saying.words))
        else:
            self.bounce_back(job, " ".join(saying.words))

    def bounce_back(self, job: Job, why: str) -> None:
        """A runner found its GPU taken: somebody has it whom the plan does not see, so that not all is tried again at once."""
        self.rest_leases(why)
        self.bounce(job, why)

    def rest_leases(self, why: str) -> None:
        """For longer from time to time: what is in the way may be there for days."""
        self.lease_rest_s = min(HOLD_S[1], max(LEASE_PATIENCE_S, 2 * self.lease_rest_s))
        self.lease_trouble, self.lease_trouble_at = why, self.clock.monotonic()

    def note_start(self, job: Job, pid: int, started: int) -> None:
        """A runner has claimed its attempt."""
        self.launched_at.pop(job.id, None)
        if job.pid == pid:
            return
        session = self.machine.session_of(job)

        def note(state: State) -> Changes:
            yield JobChanged(job.id, {"pid": pid, "pid_started": started, "session": session})

        self.store.update(note)
        if self.machine.leases:
            self.machine.leases.hand_over(job.id)

    def bounce(self, job: Job, why: str) -> None:
        """A start that came to nothing, without a fault of the job's: it goes back to its place in the queue."""
        now = self.clock.now()

        def put_back(state: State) -> Changes:
            stop_cause = state.jobs[job.id].stop_cause
            if stop_cause:                              # it need not start only to be stopped
                yield from end_job(state, state.jobs[job.id], CANCELLED, now, **{**NOT_STARTED, "cause": stop_cause, "finished_at": now})
            else:
                yield change_status(state.jobs[job.id], PENDING, now, **NOT_STARTED, status_history=state.jobs[job.id].status_history[:-1])

        self.store.update(put_back)
        self.forget(job)
        self.annotate_gpus()                            # who has the GPU is known now
        self.log.warning("Job %s could not start and goes back to the queue: %s", job.id, why)

    def watch(self) -> None:
        """Look at the runners themselves: the second way to learn that one started or ended."""
        now = self.clock.monotonic()
        gone = self.machine.reap()
        if now - self.last_watch_at < WATCH_INTERVAL_S and not gone:
            return
        self.last_watch_at = now
        self.usage = self.measure_usage()
        for job in self.running_jobs():
            if job.id not in self.results and not job.node:
                try:
                    self.look_at(job, job.id in gone)
                except (NexusError, OSError) as error:  # the others are looked at all the same
                    self.log.error("Job %s could not be looked at: %s", job.id, error)
        if self.machine.leases and now - self.last_touch_at > 3600:
            self.last_touch_at = now
            self.machine.leases.touch(job.id for job in self.running_jobs() if job.gpu_uuids and not job.node)

    def measure_usage(self) -> dict[str, Usage]:
        """Of the jobs that have limits."""
        now, config = self.clock.now(), self.config.jobs
        return {job.id: Usage(self.find_runtime_s(job, now), self.scales.find_memory_mib(job, self.readings.jobs.get(job.id)))
                for job in self.running_jobs() if not job.node and (config.max_memory_gb or find_time_limit(job, config) is not None)
                and not (job.slurm_key and (find_time_limit(job, config) or 0) % 60 == 0)}      # whole minutes are Slurm's to count

    def look_at(self, job: Job, is_child_gone: bool) -> None:
        folder = self.layout.job_folder(job.id) if job.log_dir is None else job.log_dir
        if job.slurm_key is not None:
            return                                      # the cluster looks after it
        if job.boot_id != self.machine.boot_id:
            self.settle_after_reboot(job)
        elif job.pid is None:
            claim = read_claim(folder, job.attempt)
            patience_is_over = self.clock.monotonic() - self.launched_at.get(job.id, self.clock.monotonic()) > LAUNCH_PATIENCE_S
            if claim and claim[0]:
                self.note_start(job, *claim)
            elif is_child_gone or patience_is_over or job.id not in self.launched_at:
                try:
                    is_mine = bool(claim) or take_claim(folder, job.attempt)    # (0, 0): a service claimed it and then was killed
                except OSError as error:
                    self.results[job.id] = Result(None, None, 0.0, "launch", describe_disk_error(error, "write", folder).message)
                    return
                if is_mine:
                    why = "screen or sh did not begin with it" if job.id in self.launched_at else "the service ended before it began"
                    self.give_up_launch(job, why)
        elif not self.machine.processes.is_alive(job.pid, job.pid_started):
            self.settle(job, read_result(folder, job.attempt) or Result(
                None, None, None, "session-lost", "its job.sh was killed: the exit code is not known"))

    def settle(self, job: Job, result: Result) -> None:
        """A job's runner has gone, and this is what it left."""
        if result.cause == "bounce":
            self.bounce_back(job, result.cause_line or "")
        else:
            self.results[job.id] = result

    def give_up_launch(self, job: Job, why: str) -> None:
        if job.id in self.launched_at:
            self.results[job.id] = Result(None, None, 0.0, "launch", why, may_pass=True)
        else:
            self.bounce(job, why)

    # Ending jobs

    def clear(self) -> None:
        """Stop what is to be stopped, and what jobs that are over have left behind; SIGTERM, grace, SIGKILL."""
        running = [job for job in self.running_jobs() if job.slurm_key is None]
        wanted = [job for job in running if (job.stop_cause or job.id in self.results) and not job.node]
        running = [job for job in running if job.boot_id == self.machine.boot_id]       # of another boot nothing is left
        now = self.clock.monotonic()
        due = [job for job in wanted if now >= self.clearings.setdefault(job.id, Clearing(now)).next_look_at]
        if not due:
            return
        members = self.machine.processes.find_members(running, self.results)
        for job in due:
            self.clear_job(job, members.get(job.id, ()), self.clearings[job.id], now)

    def clear_job(self, job: Job, members: Sequence[Process], clearing: Clearing, now: float) -> None:
        import signal
        if not members and job.id in self.results:
            del self.clearings[job.id]
            return
        clearing.next_look_at = now + min(0.5, max(CLEARING_INTERVAL_S, (now - clearing.began_at) / 10))
        is_over = now - clearing.began_at >= self.config.jobs.kill_grace_seconds
        runner = self.machine.processes.find(job.pid) if job.pid and job.boot_id == self.machine.boot_id else None
        if runner and runner.started != job.pid_started:
            runner = None                               # another process has its pid by now
        is_stuck = now - clearing.began_at >= self.config.jobs.kill_grace_seconds + RUNNER_PATIENCE_S
        if not members and is_stuck and runner:
            members = [runner]                          # stopped, or stuck: nothing of the job is left but its job.sh
        pids = {process.pid for process in members}
        for process in members:
            # Each is told once; what one of them runs to tidy up is left alone until the grace is over.
            if is_over or not clearing.told or not (process.pid in clearing.told or process.parent in pids):
                self.machine.processes.send(process, signal.SIGKILL if is_over else signal.SIGTERM)
                self.machine.processes.send(process, signal.SIGCONT)       # a stopped one takes SIGTERM only now
        if runner and runner.state == "T":
            self.machine.processes.send(runner, signal.SIGCONT)
        if members and not clearing.told and not job.stop_cause:
            self.log.info("Job %s is over; ending what it left: pid %s", job.id, format_indices(sorted(pids)))
        clearing.told |= pids

    # Recording what ended, and starting what is next

    def schedule(self) -> None:
        """Record the ends, decide the starts, all in one change; then start."""
        if self.store.last_error:
            if self.clock.monotonic() < self.retry_at:
                return
            self.store.update(touch)                    # is there room again?
        now = self.clock.now()
        over = {job_id: result for job_id, result in self.results.items() if job_id not in self.clearings}
        evidence = {job.id: self.gather_evidence(job, over[job.id]) for job in self.running_jobs() if job.id in over}
        trouble, hold, nodes = self.find_gpu_trouble(), self.find_hold(), self.view_nodes()
        config = self.cluster.find_config() if self.cluster and self.is_slurm else self.config

        def decide(state: State) -> Changes:
            ended = []
            for job_id, result in over.items():
                job = state.jobs.get(job_id)
                if job and job.status == RUNNING and job_id in evidence:
                    yield from self.end_attempt(state, job, result, evidence[job_id], now)
                    ended.append((job, state.jobs[job_id]))
            for job_id in [job_id for at, job_id in state.delayed if self.is_due(state.jobs[job_id], at, now)]:
                yield JobChanged(job_id, {"retry_at": None})
            usage = {job_id: used for job_id, used in self.usage.items() if job_id not in self.results}     # what is over is not late
            seen = self.see_gpus(state)
            board = tuple(make_board(state.running.values(), seen, self.config.gpu, now, usage)) if hold else ()
            made = Plan(hold=hold, board=board) if hold else plan(state, seen, trouble, config, now, usage, nodes)
            for stop in made.stops:
                yield JobChanged(stop.job_id, {"stop_cause": stop.cause, "stop_line": stop.line})
            for job_id in made.passed_over:
                yield JobChanged(job_id, {"passed_over_at": now})
            if self.cluster and self.is_slurm:
                yield from self.cluster.intend(state, made.starts, now)
            else:
                for start in made.starts:
                    yield self.intend(state.jobs[start.job_id], start, now)
            return made, ended, [state.jobs[start.job_id] for start in made.starts]

        self.plan, ended, started = self.store.update(decide)
        for job_id in over:
            self.results.pop(job_id, None)
        for before, after in ended:
            self.report_end(before, after)
        for stop in self.plan.stops:
            self.log.info("Job %s is stopped: %s", stop.job_id, stop.line)
            self.wake()
        if self.cluster and self.is_slurm and started:
            self.cluster.hand(started)
            started = []
        for job in started:
            try:
                self.start(job)
            except NexusError as error:                 # it could not be written; the job is looked at again, running or not
                self.log.warning("Job %s: %s", job.id, error.message)
            except Exception as error:                  # the others start all the same
                self.fail(f"starting job {job.id}", error)
                if job.id not in self.launched_at:
                    self.fail_launch(job, repr(error))
        self.guard_gpus([before for before, _ in ended])

    def find_gpu_trouble(self) -> str | None:
        """Why no GPU can be given out now."""
        if self.cluster and self.is_slurm:
            return self.cluster.find_trouble()
        if self.observation.trouble:
            return self.observation.trouble
        if self.clock.monotonic() - self.lease_trouble_at < self.lease_rest_s:
            return self.lease_trouble
        return self.find_smi_silence()

    def find_smi_silence(self) -> str | None:
        """That nvidia-smi takes much longer than it did."""
        seen = self.observation
        pause_s = max(self.config.service.refresh_rate_seconds, PROBE_REST * seen.took_s)
        silent_s = self.clock.monotonic() - seen.began_at - seen.took_s
        return f"nvidia-smi has not answered for {silent_s:.0f} s" if silent_s > pause_s + max(SMI_PATIENCE_S, 2 * seen.took_s) else None

    def find_hold(self) -> str | None:
        """Why nothing at all can be started now."""
        return self.start_trouble if self.clock.monotonic() < self.hold_until else None

    def hold_starts(self, why: str) -> None:
        """The machine cannot start anything just now: not each job of the queue shall find that out.  Held for longer each time."""
        self.start_trouble = f"{why}; it is tried again"
        self.hold_s = min(HOLD_S[1], max(HOLD_S[0], 2 * self.hold_s))
        self.hold_until = self.clock.monotonic() + self.hold_s
        self.log.error("Nothing is started for %.0f s: %s", self.hold_s, why)

    def see_gpus(self, state: State) -> list[Gpu]:
        """The GPUs of all machines as last observed, paused or not as of now."""
        reasons, paused = dict(state.pause_reasons), state.paused_gpus
        return [replace(gpu, is_paused=True, pause_reason=reasons.get(gpu.uuid)) if gpu.uuid in paused else gpu for gpu in self.all_gpus()]

    def all_gpus(self) -> tuple[Gpu, ...]:
        """Of this machine, then of the nodes."""
        return (*self.gpus, *(gpu for node in self.nodes.values() for gpu in node.gpus))

    def is_due(self, job: Job, retry_at: float, now: float) -> bool:
        """Whether a job may be tried again; also when the clock was set back, and it would wait for longer than ever meant."""
        longest = find_backoff(len(job.attempts), self.config.jobs)
        return retry_at <= now or retry_at - now > longest

    def end_attempt(self, state: State, job: Job, result: Result, evidence: Evidence, now: float) -> Changes:
        """The changes that a running job's end makes: to itself, to those after it, to its group."""
        runtime_s = self.find_runtime_s(job, now) if result.runtime_seconds is None else result.runtime_seconds
        status, facts = judge(job, result, evidence, runtime_s, self.config.jobs, now)
        if status == PENDING:
            yield change_status(job, PENDING, now, **facts)
            return
        yield from end_job(state, job, status, now, **facts)
        if job.group:
            group = state.groups.get(job.group) or Group(job.group)
            is_soon = runtime_s <= self.config.gpu.guard_seconds and facts["cause"] not in ("timeout", "reboot")
            has_pending = any(job.group == group for lines in state.kinds.values() for group, _ in lines)
            said = " / ".join(find_last_lines(evidence.stderr, 3)) or facts["cause_line"] or f"{facts['cause']} {facts['exit_code']}"
            counted = count_group_end(group, status, facts["cause"], is_soon, said, has_pending)
            if counted != group:
                yield GroupChanged(counted)

    def gather_evidence(self, job: Job, result: Result) -> Evidence:
        """What a failed attempt left; and what its processes took."""
        text, size = read_tail(os.path.join(job.log_dir or "", "stderr.log"), job.log_offset, TAIL_BYTES if result.exit_code else 0)
        samples = self.remote_samples.get(job.id, {}) if job.node else self.readings.list_facts(job.id)
        return Evidence(text, size, self.find_log_trouble(job) if result.exit_code and not job.node else None, samples)

    def keep_samples(self) -> None:
        """Before a restart: what running jobs took up to now.  Raises: unavailable."""
        def keep(state: State) -> Changes:
            for job in [job for job in state.running.values() if not job.node]:
                samples = self.readings.list_facts(job.id)
                yield JobChanged(job.id, {name: sample for name, sample in samples.items() if sample is not None})
        self.store.update(keep)

    def guard_gpus(self, ended: Sequence[Job]) -> None:
        """Pause a GPU on which jobs fail that run elsewhere; never the last one that is usable."""
        for uuid in dict.fromkeys(uuid for job in ended for uuid in job.gpu_uuids):
            reason = find_bad_gpu(tuple(self.ended), uuid, self.config.gpu)

            def pause(state: State, uuid: str = uuid, reason: str = reason or "") -> Changes:
                others = [gpu for gpu in self.see_gpus(state) if gpu.uuid != uuid and not find_lasting_obstacle(gpu, self.config.gpu)]
                if others and uuid not in state.paused_gpus:
                    yield StateChanged({"paused_gpus": (*state.paused_gpus, uuid), "pause_reasons": (*state.pause_reasons, (uuid, reason))})
                    return True
                return False

            if reason and self.store.update(pause):
                self.wants_annotation = True
                place = next((gpu.place for gpu in self.all_gpus() if gpu.uuid == uuid), uuid)
                self.log.error("GPU %s is paused: %s; nexus resume %s clears it", place, reason, place)
                self.wake()

    def find_runtime_s(self, job: Job, now: float) -> float:
        """For how long a job has run; by the wall clock, which may have been set, only where nothing else is known."""
        if job.pid_started is not None and job.boot_id == self.machine.boot_id:
            return max(0.0, self.machine.processes.find_age_s(job.pid_started))
        return max(0.0, find_age(job, now))

    def find_log_trouble(self, job: Job) -> str | None:
        """That the disk of a failed job's logs was full, or that they are gone."""
        folder = job.log_dir or ""
        try:
            if os.statvfs(folder).f_bavail == 0:
                return f"No space left on device: {folder} (the job's logs may be cut)"
        except OSError:
            return f"its log folder is gone: {folder}"
        return None

    def intend(self, job: Job, start: Start, now: float) -> Change:
        folder = self.layout.job_folder(job.id)
        where: dict[str, Any] = {"nonce": self.clock.new_token()[:16], "boot_id": self.machine.boot_id}
        if start.node:
            where = {"remote_id": job.remote_id or job.id, "log_base": measure_logs(folder) if job.attempt else (0, 0)}
        return change_status(
            job, RUNNING, now, attempt=job.attempt + 1, gpu_indices=start.gpu_indices, gpu_uuids=start.gpu_uuids, started_at=now,
            log_dir=folder, pid=None, pid_started=None, session=None, node=start.node, **where,
            **({"cwd": self.layout.work_folder(job.id)} if job.code else {}))

    def start(self, job: Job) -> None:
        """Launch a job whose start is recorded.  After a crash before its claim, the next service puts it back."""
        if job.node:
            self.send(job)
            return
        leases = self.machine.leases if job.gpu_uuids else None
        hold = self.find_hold() or (self.find_gpu_trouble() if leases else None)
        if hold:                                        # since it was planned
            self.bounce(job, hold)
            return
        try:
            self.check_script(job.command, job.cwd)     # a link may lead elsewhere by now
        except NexusError as error:
            self.fail_launch(job, error.message)
            return
        try:
            if leases:
                leases.take(job.id, job.gpu_uuids)
            script, notes = self.write_script(job, leases.path(job.id) if leases else None)
            self.launched_at[job.id] = self.clock.monotonic()
            self.machine.launch(job, script)
        except NexusError as error:                     # of the leases: no fault of the job's
            if error.kind != "conflict":
                self.rest_leases(error.message)
            self.bounce(job, error.message)
            return
        except OSError as error:
            self.take_launch_error(job, error)
            return
        self.hold_s = 0.0
        self.counters.note_start(job)
        place = f"GPU {format_indices(job.gpu_indices)}" if job.gpu_indices else "the CPU"
        self.tell(job, "Started job %s on %s: %s", job.id, place, format_line(job.command, 500))
        if notes:
            def note(state: State) -> Changes:
                yield JobChanged(job.id, {"notes": tuple(notes)})
            self.store.update(note)

    def take_launch_error(self, job: Job, error: OSError) -> None:
        """It is the job's end when its disk is full or something of its own is wrong; not when the machine is short of something."""
        import errno
        why = describe_disk_error(error, "start it with", error.filename or job.log_dir or "").message
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EROFS, errno.ESTALE, errno.EIO):
            self.hold_starts(why)
            self.bounce(job, why)
        else:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_full:
                self.hold_starts(why)
            self.fail_launch(job, why, may_pass=not is_full and error.errno != errno.ENOENT)

    def make_job_folder(self, job: Job) -> str:
        """Make a job's log folder.  Raises: OSError."""
        folder = self.layout.job_folder(job.id)
        if job.attempt == 1 and os.path.lexists(folder):        # of a job long gone, whose id came again
            os.rename(folder, f"{folder}.old-{self.clock.new_token()[:8]}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

    def write_script(self, job: Job, lease: str | None) -> tuple[str, list[str]]:
        """Make a job's log folder and its job.sh.  Raises: OSError."""
        folder = self.make_job_folder(job)
        if job.code:
            copy_code(self.layout.code_file(job.code), job.cwd)
        submitted = self.store.read(lambda state: state.environments.get(job.environment))
        if submitted is None:
            raise FileNotFoundError(2, "its environment was lost with a damaged state file; add the job again", "its environment")
        options, notes = choose_limits(job) if job.slurm_key is None else ([], [])
        gpus = self.observation.gpus
        command = fill_cuda_option(job.command, list_cuda_numbers(job, gpus)) if job.cuda_arg else job.command
        text = build_script(replace(job, command=command), build_environment(job, submitted, gpus), self.layout, lease, options)
        script = os.path.join(folder, "job.sh")
        write_atomic(script, [text], 0o700, is_synced=False)
        return script, notes

    def fail_launch(self, job: Job, why: str, may_pass: bool = False) -> None:
        """It could not be started: nobody runs it, and a late runner must find that its attempt is taken."""
        try:
            take_claim(self.layout.job_folder(job.id), job.attempt)
        except OSError:
            pass                                        # then there is no job.sh to claim it either
        self.results[job.id] = Result(None, None, 0.0, "launch", format_line(why, 300), may_pass)
        self.wake()

    def forget(self, job: Job) -> None:
        """Let go of what was kept for a running job."""
        now = self.clock.monotonic()
        if job.node:
            self.remote_samples.pop(job.id, None)
            self.results.pop(job.id, None)
            self.collect(job)
            return
        self.released_at.update(dict.fromkeys(job.gpu_uuids, now))
        for kept in (self.results, self.clearings, self.launched_at, self.usage):
            kept.pop(job.id, None)
        self.readings.forget(job.id)
        if self.machine.leases:
            self.machine.leases.drop(job.id)

    def report_end(self, before: Job, job: Job) -> None:
        """`before`: as it ran."""
        self.forget(before)
        facts = read_attempts(job)[-1] if job.status == PENDING else {name: getattr(job, name) for name in ATTEMPT_FIELDS}
        is_soon = facts["cause"] in ("exit", "signal", "cuda-oom") and (facts["runtime_seconds"] or 0) <= self.config.gpu.guard_seconds
        if before.head is None:                         # another nexus looks after its jobs' GPUs itself
            self.ended.append(Ended(before.gpu_uuids, job.code or job.command, job.status == COMPLETED, is_soon,
                                    before.started_at or 0.0))
        places = [before.node, f"GPU {format_indices(before.gpu_indices)}" if before.gpu_indices else ""]
        place = f" on {', '.join(filter(None, places))}" if any(places) else ""
        if job.status == COMPLETED:
            self.tell(before, "Job %s completed successfully%s", job.id, place)
            return
        known = f", exit code {facts['exit_code']}" if facts["exit_code"] is not None else ""
        line = f" ({format_line(job.cause_line, 300)})" if job.cause_line else ""
        again = f"; {describe_retry(job, self.clock.now()).partition('; ')[2]}" if job.status == PENDING else ""
        self.tell(before, "Job %s %s%s: %s%s%s%s", job.id, "failed" if again else job.status, place, facts["cause"], known, line, again)

    def tell(self, job: Job, message: str, *details: object) -> None:
        """Log something of a running job; as JSON with its facts."""
        self.log.info(message, *details, extra={"job_id": job.id, "gpu_ids": list(job.gpu_indices), "required_gpus": job.gpus,
                                                "attempt": job.attempt})

    # Adopting what ran before

    def adopt(self) -> None:
        """After a start of the service: learn what became of the jobs that are recorded as running."""
        self.take_edit(self.store.read(lambda state: {"paused_gpus": state.paused_gpus}))       # it may have been edited meanwhile
        for job in [job for job in self.running_jobs() if not job.node]:
            self.readings.restore(job)
            try:
                self.look_at(job, False)
                if job.id not in self.results and self.store.read(lambda state, job=job: job.id in state.running):  # type: ignore[misc]
                    self.log.info("Job %s goes on", job.id)
            except (NexusError, OSError) as error:
                self.log.error("Job %s could not be looked at: %s", job.id, error)

    def settle_after_reboot(self, job: Job) -> None:
        result = read_result(job.log_dir or self.layout.job_folder(job.id), job.attempt)
        if result:
            self.settle(job, result)
        elif job.stop_cause or job.head or self.config.jobs.on_reboot == "fail":     # another nexus's jobs it queues again itself
            self.results[job.id] = Result(None, None, None, "reboot", "the machine went down while it ran")
        else:
            self.bounce(job, "the machine went down while it ran")

    # Other machines

    def begin_nodes(self) -> None:
        """Those of config.toml, and those added; and where jobs run, also those that config.toml has lost, or has elsewhere now."""
        remove_sockets(self.layout.ssh_folder)
        busy = {job.node for job in self.running_jobs() if job.node}
        configured = {node.name: node for node in self.config.nodes}
        kept = {row[0]: read_node_row(row) for row in self.store.read(lambda state: state.nodes)}
        for name, (config, _, was_configured) in kept.items():
            if name in configured and name in busy and (config.destination, config.port) != (
                    configured[name].destination, configured[name].port):
                self.log.error("Node %s is %s in config.toml, and jobs run on %s: that is left first; then nexus restart", name,
                               configured.pop(name).destination, config.destination)
            if name not in configured and was_configured and name not in busy:
                self.record_node(name, None)                # it was taken out there
        for name, config in configured.items():
            self.record_node(name, (*encode_value(config).values(), False, True))
            self.nodes = {**self.nodes, name: Node(self, config, False)}
        for name, (config, is_leaving, was_configured) in kept.items():
            if name not in configured and (name in busy or not was_configured):
                self.nodes = {**self.nodes, name: Node(self, config, is_leaving or was_configured)}

    def add_node(self, config: NodeConfig, who: str) -> None:
        """Give jobs to another machine too; one that is there already is reached anew.  Raises: conflict, unavailable."""
        if self.is_slurm:
            raise NexusError("conflict", "Slurm has the machines here (launcher = \"slurm\")", hint="[jobs] launcher: nexus config edit")
        if config.name == self.node:
            raise NexusError("conflict", f"{config.name} is this machine's name", hint="name it otherwise: --name n1")
        former = self.nodes.get(config.name)
        if former and any(node.name == config.name for node in self.config.nodes) and former.config != config:
            raise NexusError("conflict", f"{config.name} stands in config.toml, otherwise", hint="nexus config edit, then nexus restart")
        if former and (former.config.destination, former.config.port) != (config.destination, config.port) and any(
                job.node == config.name for job in self.running_jobs()):
            raise NexusError("conflict", f"{config.name} is another machine, {former.config.destination}, and jobs run there",
                             hint="name it otherwise: --name n1")
        if not former or not any(node.name == config.name for node in self.config.nodes):
            self.record_node(config.name, (*encode_value(config).values(), False, False))
        if former and former.config == config and not former.is_ended:
            former.is_leaving = False
            former.retry.set()
        else:
            if former:
                former.end()
            self.nodes = {**self.nodes, config.name: Node(self, config, False)}
        self.log.info("Node %s (%s) added by %s", config.name, config.destination, who)
        self.wake()

    def remove_node(self, name: str, is_forced: bool, who: str) -> None:
        """Give a node no more jobs, and forget it when its last one is over.  `is_forced`: now, and its jobs are given up.

        Raises: not_found, conflict.
        """
        node = self.find_node(name)
        if any(other.name == name for other in self.config.nodes):
            raise NexusError("conflict", f"{name} stands in config.toml", hint="take it out there, then nexus restart")
        node.is_leaving = True
        self.record_node(name, (*encode_value(node.config).values(), True, False))
        self.log.info("Node %s is being removed by %s", name, who)
        if is_forced:
            for job in node.list_jobs():
                self.results[job.id] = Result(None, None, None, "node-lost", f"its node {name} was removed by {who}")
                node.strays.add(find_order_key(job))        # what can still be told to end shall
        self.wake()

    def find_node(self, name: str) -> Node:
        """Raises: not_found."""
        if name not in self.nodes:
            raise NexusError("not_found", f"there is no node '{format_line(name, 60)}'",
                             hint=suggest(name, self.nodes) or "nexus node list")
        return self.nodes[name]

    def record_node(self, name: str, row: tuple[Any, ...] | None) -> None:
        """Keep what is known of an added node, in its place: /api tells them by their number.  None: forget it."""
        def change(state: State) -> Changes:
            rows = {kept[0]: kept for kept in state.nodes}
            rows[name] = row or ()
            nodes = tuple(filter(None, rows.values()))
            if nodes != state.nodes:
                yield StateChanged({"nodes": nodes})
        self.store.update(change)

    def view_nodes(self) -> list[NodeView]:
        """The other machines as plan() sees them."""
        now = self.clock.monotonic()
        return [NodeView(node.name, node.cpu_slots, node.find_closed(now)) for node in self.nodes.values()]

    def list_nodes(self) -> list[dict[str, Any]]:
        """GET /nodes: this machine, then the others."""
        running = self.running_jobs()

        def describe(name: str, gpus: Sequence[Gpu], **facts: Any) -> dict[str, Any]:
            return {"name": name, "gpus": len(gpus), "gpu_names": sorted({gpu.name for gpu in gpus}),
                    "running_jobs": sum(job.node == ("" if name == self.node else name) for job in running), **facts}

        def address(config: NodeConfig) -> dict[str, Any]:
            return {"host": config.host, "user": config.user or None, "port": config.port or None, "jump": config.jump or None,
                    "identity_file": config.identity_file or None}

        local = describe(self.node, self.gpus, host=None, user=self.user, port=None, jump=None, identity_file=None, is_reachable=True,
                         is_leaving=False,
                         trouble=self.observation.trouble, hint=None, unknown_since=None, python=None, path=None, home=None, control=None)
        return [local, *(describe(
            node.name, node.gpus, **address(node.config), is_reachable=node.trouble is None, is_leaving=node.is_leaving,
            trouble=node.find_fault(), hint=node.trouble.hint if node.trouble else None,
            unknown_since=node.since if node.trouble else None, **{key: node.told.get(key) for key in ("python", "path", "home")},
            control=node.ssh.control) for node in self.nodes.values())]

    def send(self, job: Job) -> None:
        """Have a job started on another machine, as is recorded.  What becomes of it hear_nodes() hears."""
        try:
            self.make_job_folder(job)
        except OSError as error:
            self.results[job.id] = Result(None, None, 0.0, "launch", describe_disk_error(error, "write", job.log_dir or "").message)
            return
        node = self.nodes.get(job.node)
        if node is None:
            self.bounce(job, f"there is no node {job.node} any more")
            return
        if node.trouble is not None:                    # since it was planned; nobody has sent it
            try:
                self.bounce(job, f"{job.node} cannot be reached")
            except NexusError:                          # the disk is full; then it goes there when that can be reached
                node.prepared.add((job.id, job.attempt))
                raise
            return
        node.prepared.add((job.id, job.attempt))
        self.counters.note_start(job)
        place = f"GPU {format_indices(job.gpu_indices)}" if job.gpu_indices else "the CPU"
        self.tell(job, "Started job %s on %s, %s: %s", job.id, job.node, place, format_line(job.command, 500))
        node.wanted.set()

    def collect(self, job: Job) -> None:
        """All of an attempt on another machine is recorded here: that one need not keep it."""
        node = self.nodes.get(job.node)
        if node:
            node.prepared.discard((job.id, job.attempt))
            node.collected.add(find_order_key(job))
            node.wanted.set()

    def hear_nodes(self) -> None:
        """Take in what nodes have told, and look after the jobs there."""
        now = self.clock.monotonic()
        for node in list(self.nodes.values()):
            if node.has_news:
                node.has_news = False
                self.take_report(node)
            while node.news:
                told = node.news.popleft()
                try:
                    self.take_news(node, told)
                except NexusError:                          # the disk is full: it comes again
                    node.news.appendleft(told)
                    raise
            self.watch_node(node, now)

    def take_news(self, node: Node, told: Remote | Refusal) -> None:
        """Raises: unavailable."""
        job = next((job for job in node.list_jobs() if find_order_key(job) == (told.id, told.attempt)), None)
        if isinstance(told, Refusal):
            if job:
                self.take_refusal(node, job, told)
        elif job and job.id not in self.results:
            self.take_remote(node, job, told)
        elif not job:                                       # it was given up, and is there all the same
            (node.collected if told.status in FINAL else node.strays).add((told.id, told.attempt))
            node.wanted.set()

    def take_report(self, node: Node) -> None:
        """It has told of its GPUs, or is not heard any more."""
        if node.trouble is None:
            for gpu in node.gpus:
                self.readings.curves[gpu.uuid].note(gpu.memory_used_mib, gpu.utilization, self.clock.monotonic())
        shown = node.is_leaving, node.hold, node.trouble and node.trouble.message, [describe_for_event(gpu) for gpu in node.gpus]
        if shown != node.shown:
            node.shown = shown
            self.store.events.publish([("gpus", None)])

    def watch_node(self, node: Node, now: float) -> None:
        """What nobody tells: that a node is silent for too long, or does nothing with a job, or knows nothing of one."""
        jobs = [job for job in node.list_jobs() if job.id not in self.results]
        limit_s = self.config.service.node_lost_after_seconds
        for job in jobs:
            key = find_order_key(job)
            if node.trouble is not None and limit_s and now - node.silent_at >= limit_s:
                self.results[job.id] = Result(None, None, None, "node-lost", f"{node.name} could not be reached for "
                                              f"{format_duration(now - node.silent_at)}: {node.trouble.message}")
            elif node.is_listed and key not in node.known and job.pid is not None:
                self.results[job.id] = Result(None, None, None, "session-lost", f"{node.name} knows nothing of it any more")
            elif now - node.pending_at.get(key, now) > WITHDRAW_PATIENCE_S:
                node.withdrawn.add(key)
                node.pending_at[key] = now
                node.wanted.set()
            elif job.stop_cause and key not in node.stopped:
                node.wanted.set()
        is_told = node.trouble is not None or not (node.collected or node.strays)
        if node.is_leaving and is_told and not any(job.node == node.name for job in self.running_jobs()):
            self.record_node(node.name, None)
            node.end()
            self.nodes = {name: other for name, other in self.nodes.items() if name != node.name}
            self.log.info("Node %s is removed", node.name)
            self.store.events.publish([("gpus", None)])

    def take_refusal(self, node: Node, job: Job, refusal: Refusal) -> None:
        """A node did not take a job: it never can, or not now."""
        if refusal.kind == "conflict":                      # it has another job of that id
            def rename(state: State) -> Changes:
                yield JobChanged(job.id, {"remote_id": self.clock.new_job_id(state.jobs, 4)})
            self.store.update(rename)
            node.wanted.set()
            return
        why = refusal.message + (f" ({refusal.hint})" if refusal.hint else "")
        if refusal.kind not in ("usage", "too_large", "forbidden", "not_found"):
            node.refused_at, node.refusal = self.clock.monotonic(), refusal.message
            self.bounce(job, f"{node.name}: {why}")
            return
        unfit = (*job.unfit, (node.name, why))
        gpus: list[Gpu] = self.store.read(self.see_gpus)
        others = [name for name in ("", *self.nodes) if may_run_on(replace(job, unfit=unfit), name)
                  and sum(gpu.node == name for gpu in gpus) >= len(list_shares(job))]
        if not others:
            self.results[job.id] = Result(None, None, 0.0, "launch", f"{node.name}: {why}")
            return

        def note(state: State) -> Changes:
            yield JobChanged(job.id, {"unfit": unfit})
        self.store.update(note)
        self.bounce(job, f"{node.name}: {why}")

    def take_remote(self, node: Node, job: Job, told: Remote) -> None:
        """What has become of a job on another machine."""
        key = told.id, told.attempt
        self.remote_samples[job.id] = told.samples
        if told.status == PENDING:
            node.pending_at.setdefault(key, self.clock.monotonic())
            return
        node.pending_at.pop(key, None)
        started_at = None if told.started_at is None else told.started_at - node.clock_offset_s
        if told.status == RUNNING:
            facts = {"pid": told.pid, "session": told.session, "notes": told.notes}
            if any(getattr(job, name) != fact for name, fact in facts.items()):
                def note(state: State) -> Changes:
                    yield JobChanged(job.id, {**facts, "started_at": job.started_at if started_at is None else started_at})
                self.store.update(note)
        elif told.cause == "bounce":
            self.bounce(job, f"{node.name}: {told.cause_line}")
            node.refused_at, node.refusal = self.clock.monotonic(), told.cause_line or ""
        elif told.cause == "reboot" and not job.stop_cause and self.config.jobs.on_reboot == "requeue":
            self.bounce(job, f"{node.name} went down while it ran")
        elif told.cause == "launch" and not told.may_pass:      # another may have what is missing there
            self.take_refusal(node, job, Refusal(told.id, told.attempt, "not_found", told.cause_line or "it could not be started", ""))
        else:
            cause = None if told.status == COMPLETED else told.cause
            finished_at = None if told.finished_at is None else told.finished_at - node.clock_offset_s
            self.results[job.id] = Result(told.exit_code, finished_at, told.runtime_seconds, cause, told.cause_line,
                                          may_pass=told.may_pass)           # there it is not tried again

    # What another machine's nexus asks for, whose node this one is

    def take_orders(self, orders: Orders, caller: Caller) -> dict[str, Any]:
        """POST /node/orders: what was done is done once, however often it is asked for."""
        answers: dict[str, dict[str, str] | None] = {}
        for order in orders.submit:
            try:
                self.take_job(orders.head, order, caller)
                answers[order.id] = None
            except NexusError as error:
                answers[order.id] = {"kind": error.kind, "message": error.message, "hint": error.hint}
        now = self.clock.now()

        def obey(state: State) -> Changes:
            def find(keys: Iterable[tuple[str, int]], *statuses: str) -> list[Job]:
                jobs = [(state.jobs.get(job_id), attempt) for job_id, attempt in keys]
                return [job for job, attempt in jobs
                        if job and (job.head, job.head_attempt) == (orders.head, attempt) and job.status in statuses]
            for job in find(orders.stop, PENDING):
                yield from end_job(state, job, CANCELLED, now, finished_at=now, cause="killed", stop_by=caller.name)
            for job in find(orders.stop, RUNNING):
                if job.stop_cause != "killed":
                    yield JobChanged(job.id, {"stop_cause": "killed", "stop_by": caller.name, "stop_line": None})
            for job in find(orders.withdraw, PENDING):
                yield from end_job(state, job, CANCELLED, now, finished_at=now, cause="bounce", cause_line=self.why(job, state))
            for job in find(orders.collected, *FINAL):
                if not job.is_collected:
                    yield JobChanged(job.id, {"is_collected": True})

        self.store.update(obey)
        self.wake()
        return {"submitted": answers}

    def take_job(self, head: str, order: Order, caller: Caller) -> None:
        """Queue a job for another nexus; an attempt that is here already, or was, is not begun again.

        Raises: usage, not_found, forbidden, when it can never run here; conflict, when another job has its id; queue_full; unavailable.
        """
        path = join_paths(order.path, self.environ.get("PATH") or os.defpath)
        submission = replace(order.submission, env={**order.submission.env, **({"PATH": path} if order.path else {})})
        name = self.clock.new_token() if order.code is not None else None
        if name:
            submission = replace(submission, command=f"{self.find_python()} main.py", code=name)
        elif submission.cwd and not submission.snapshot and not os.path.isdir(submission.cwd):
            # said now, the job may still go to another machine
            refuse(f"the directory {submission.cwd} does not exist on {self.node}",
                   hint="make it there, share it (NFS), or send the work tree along: nexus add --snapshot")
        prepared = self.prepare(submission)
        environments = self.make_environments([submission])
        now, user, key = self.clock.now(), Caller(order.user, caller.name), (head, order.attempt)

        def add(state: State) -> Changes:
            known = state.jobs.get(order.id)
            if known and (known.head, known.head_attempt) == key:
                return False
            if known and known.head != head:
                raise NexusError("conflict", f"there is another job {known.id} on {self.node}")
            if known and (known.head_attempt > order.attempt or known.status not in FINAL):
                raise NexusError("unavailable", f"job {known.id} is on {self.node} already, and is {known.status}")
            if known:
                yield JobsRemoved((known.id,))
            job = yield from self.add_job(state, prepared, user, *environments[0], now, head=head, head_attempt=order.attempt)
            if order.is_stopped:
                yield from end_job(state, state.jobs[job.id], CANCELLED, now, finished_at=now, cause="killed", stop_by=caller.name)
            return True

        self.put_away(head, order)
        if name and order.code is not None:
            write_code(self.layout.code_file(name), order.code)
        is_new = self.store.update(add)
        if is_new:
            self.log.info("Job %s added by %s for another machine's nexus: %s", order.id, caller.name, format_line(submission.command, 300))
        elif name:
            remove_file(self.layout.code_file(name))

    def put_away(self, head: str, order: Order) -> None:
        """The logs of the attempt before, of which the other nexus has all: they must not be taken for this one's.

        Raises: unavailable.
        """
        former: Job | None = self.store.read(lambda state: state.jobs.get(order.id))
        if former and former.head == head and former.head_attempt < order.attempt and former.status in FINAL and former.log_dir:
            try:
                aside = f"{former.log_dir}.old-{self.clock.new_token()[:8]}"
                os.rename(former.log_dir, aside)
                remove_job_folder(self.layout.log_dir, aside)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise describe_disk_error(error, "put away", former.log_dir) from None

    def sync(self, head: str, since: int | None, offsets: Mapping[str, Sequence[int]], wait_s: float) -> dict[str, Any]:
        """POST /node/sync: what is new for another nexus since event `since`, as soon as something is.

        `offsets`: {id: attempt, bytes of its stdout.log and stderr.log that are known there}.
        """
        began = self.clock.monotonic()
        number = self.store.events.next_number if since is None else since
        pause_s, changed, is_gap, is_news = FOLLOW_INTERVAL_S[0], set[str](), since is None, False
        while True:
            found, is_missing = ([], True) if is_gap else self.store.events.read(number, pause_s)
            if is_missing:
                is_gap, number = True, self.store.events.next_number
            number = found[-1][0] + 1 if found else number
            changed |= {what.id for _, kind, what in found if kind == "job" and what.head == head}
            is_news = is_news or bool(changed) or any(
                kind in ("gpus", "queue") or (kind == "job" and what.status != PENDING) for _, kind, what in found)   # own ones take GPUs
            logs = self.read_new_logs(head, offsets)
            if is_gap or is_news or logs or self.clock.monotonic() - began >= wait_s or self.is_stopping:
                break
            pause_s = min(2 * pause_s, FOLLOW_INTERVAL_S[1])
        now = self.clock.now()
        jobs = self.store.read(lambda state: [job for job in (
            state.jobs.values() if is_gap else [state.jobs[job_id] for job_id in changed if job_id in state.jobs])
            if job.head == head and not job.is_collected])
        told = {"service_id": self.store.service_id, "number": number, "now": now, "logs": logs,
                "jobs": [encode_value(self.describe_remote(job)) for job in jobs]}
        is_due = self.clock.monotonic() - self.told_at.get(head, float("-inf")) >= self.config.service.refresh_rate_seconds
        if not (is_gap or is_news or is_due or not logs):       # of logs alone there may be much
            return told
        self.told_at[head] = self.clock.monotonic()
        return {**told, **self.describe_place(head)}

    def read_new_logs(self, head: str, offsets: Mapping[str, Sequence[int]]) -> dict[str, dict[str, str]]:
        """{id: {stream: what has come to it, in base64}}; each has its share of what one answer takes."""
        import base64
        jobs = self.store.read(lambda state: [state.jobs[job_id] for job_id in offsets if job_id in state.jobs])
        grown = [(job, name, start) for job in jobs if job.log_dir and (job.head, job.head_attempt) == (head, offsets[job.id][0])
                 for name, start, size in zip(("stdout", "stderr"), offsets[job.id][1:], measure_logs(job.log_dir)) if size > start]
        found: dict[str, dict[str, str]] = {}
        for job, name, start in grown:
            piece = read_piece(job.log_dir, name, start, LOG_BYTES // len(grown))
            found.setdefault(job.id, {})[name] = base64.b64encode(piece).decode()
        return found

    def describe_remote(self, job: Job) -> Remote:
        samples = {name: getattr(job, name) for name in ("peak_rss_mib", "cpu_seconds", "peak_gpu_mem_mib", "mean_gpu_util")}
        if job.status == RUNNING:
            samples = {**samples, **self.readings.list_facts(job.id)}
        is_waiting = job.status == PENDING
        return Remote(
            job.id, job.head_attempt, job.status, job.pid, job.session, job.log_dir, job.started_at, job.finished_at,
            self.find_runtime_s(job, self.clock.now()) if job.status == RUNNING else job.runtime_seconds, job.exit_code, job.cause,
            job.cause_line, job.launch_failures > 0, self.store.read(lambda state: self.why(job, state)) if is_waiting else None,
            job.notes, job.gpu_indices, measure_logs(job.log_dir), samples)

    def describe_place(self, head: str) -> dict[str, Any]:
        """What another nexus need know to give jobs to this machine."""
        def look(state: State) -> tuple[list[Gpu], list[Job], bool]:
            return self.see_gpus(state), [job for job in state.running.values() if job.head != head], state.paused
        gpus, own, is_paused = self.store.read(look)
        trouble, config = self.find_gpu_trouble(), self.config
        taken: dict[str, list[tuple[str, int]]] = {}
        for job in own:
            for uuid, share in zip(job.gpu_uuids, list_shares(job)):
                taken.setdefault(uuid, []).append((job.id, share))
        hold = NODE_PAUSED if is_paused else self.find_hold() or (self.store.last_error.message if self.store.last_error else "")
        return {"hold": hold, "cpu_slots": config.jobs.cpu_slots - sum(not job.gpus for job in own), "gpus": [encode_gpu(replace(
            gpu, fault=gpu.fault or trouble,
            taken=sum(share for _, share in taken.get(gpu.uuid, ())), taken_by=tuple(job_id for job_id, _ in taken.get(gpu.uuid, ()))))
            for gpu in gpus if not gpu.node and (not config.gpu.ids or gpu.index in config.gpu.ids)]}

    # Beside the loop

    def trim_history(self) -> None:
        """Drop finished jobs beyond history_limit; their folders once that is on disk."""
        limit = self.config.state.history_limit
        if self.store.read(lambda state: len(state.finished)) <= limit:
            return

        def trim(state: State) -> Changes:
            gone = choose_trimmed(state, limit)
            if gone:
                yield JobsRemoved(tuple(job.id for job in gone))
            return gone

        for job in self.store.update(trim):
            self.rubbish.put(job)

    def remove_rubbish(self) -> None:
        while True:
            job = self.rubbish.get()
            try:
                if job.log_dir and not remove_job_folder(self.layout.log_dir, job.log_dir) and os.path.lexists(job.log_dir):
                    self.log.warning("%s was left: it is not a plain folder below %s, or cannot be removed", job.log_dir,
                                     self.layout.log_dir)
                if job.snapshot and job.snapshot_repo and not self.needs_snapshot(job.snapshot):
                    release_snapshot(job.snapshot_repo, job.snapshot, self.environ)
                if job.code and not self.needs_code(job.code):
                    remove_file(self.layout.code_file(job.code))
            except NexusError as error:
                self.log.warning("After job %s: %s", job.id, error.message)
            except Exception as error:
                self.fail("removing what is left of a job", error)

    def needs_snapshot(self, commit: str) -> bool:
        return self.store.read(lambda state: any(job.snapshot == commit for job in state.jobs.values()))

    def needs_code(self, name: str) -> bool:
        """Whether a job has it; what once has no more never will, since only a retry of a kept job takes it on."""
        return self.store.read(lambda state: any(job.code == name for job in state.jobs.values()))

    def sweep_code(self) -> None:
        """Remove the scripts that a crash left without a job.  Not while somebody may be about to submit one."""
        try:
            names = os.listdir(self.layout.code_folder)
            needed = self.store.read(lambda state: {job.code for job in state.jobs.values()})
            for name in names:
                if re.fullmatch(r"[0-9a-f]{48}\.py(\.\d+\.tmp)?", name) and name[:48] not in needed:
                    remove_file(os.path.join(self.layout.code_folder, name))
        except FileNotFoundError:
            pass                                            # nobody has submitted any
        except OSError as error:
            self.log.warning("Submitted scripts that no job has: %s", error)

    def keep_snapshots(self) -> None:
        """Write state.json when the journal has grown; and take over what other programs write into it."""
        while True:
            is_wanted = self.store.snapshot_wanted.wait(WATCH_INTERVAL_S)
            if is_wanted:
                self.store.snapshot_wanted.clear()
            try:
                is_edited = self.look_for_edit()
                if self.bad_edits:                          # it may be half written: what comes is not to be lost
                    self.clock.sleep(WATCH_INTERVAL_S)
                    self.store.snapshot_wanted.set()
                elif is_wanted or is_edited:
                    self.store.save_snapshot(is_forced=is_edited)
            except (OSError, NexusError) as error:
                self.log.warning("state.json could not be written (%s); the journal goes on", error)
                self.clock.sleep(10)
                self.store.snapshot_wanted.set()
            except Exception as error:
                self.fail("writing state.json", error)

    def look_for_edit(self) -> bool:
        """Take over `paused` and `paused_gpus` if another program has written state.json; whether it is to be written anew."""
        try:
            edit = self.store.read_edit()
            if edit is None:
                return False
            self.take_edit(edit)
            self.store.note_edit(edit)
        except ValueError as error:
            self.bad_edits += 1
            if self.bad_edits < 3:
                return False
            self.log.warning("state.json was edited and is no JSON (%s): it is written anew", error)
            self.store.give_up_edit()
        self.bad_edits = 0
        return True

    def take_edit(self, edit: Mapping[str, Any]) -> None:
        """`paused`: true or false; `paused_gpus`: indices or uuids.  What is neither is left."""
        def change(state: State) -> Changes:
            uuids = {str(index): uuid for index, uuid, _, _ in state.inventory}
            given = edit.get("paused_gpus")
            facts: dict[str, Any] = {"paused": edit["paused"]} if isinstance(edit.get("paused"), bool) else {}
            if isinstance(given, tuple):
                names = [str(item) for item in given if isinstance(item, (int, str))]
                known = [name for name in names if not uuids or name in uuids or name in uuids.values()]
                facts["paused_gpus"] = tuple(dict.fromkeys(uuids.get(name, name) for name in known))
                facts["pause_reasons"] = tuple(pair for pair in state.pause_reasons if pair[0] in facts["paused_gpus"])
            changed = {name: fact for name, fact in facts.items() if fact != getattr(state, name)}
            if changed:
                yield StateChanged(changed)
            return changed

        changed = self.store.update(change)
        if changed:
            self.wants_annotation = True
            self.log.info("Taken over from state.json: %s", ", ".join(f"{name} = {fact}" for name, fact in changed.items()))
            self.wake()

    # What is told

    def status(self) -> dict[str, Any]:
        """GET /status."""
        trouble = self.observation.trouble or self.find_smi_silence()
        now = self.clock.now()

        def look(state: State) -> dict[str, Any]:
            bands = {"high": 0, "normal": 0, "low": 0}
            for priority, count in state.pending_by_priority.items():
                bands["high" if priority < 1 else "normal" if priority == 1 else "low"] += count
            return {
                "gpu_status": self.list_gpus(state),
                "is_paused": state.paused, "queued_jobs": len(state.order), "completed_jobs": len(state.finished),
                "running_jobs": list(state.running.values()), "queued_by_priority": bands}

        unknown = None if self.machine.samples.is_available else (
            "psutil is not installed: memory and CPU of jobs are unknown (pip install psutil)")
        told = self.store.read(look)
        told["running_jobs"] = [self.brief_json(job, now) for job in told["running_jobs"]]      # of a thousand: outside the lock
        return {**told, "gpu_trouble": trouble, "slurm": self.cluster.describe() if self.cluster else None, "hints": self.make_hints(),
                "samples_hint": unknown, **self.info(),
                "host": {"name": self.node, **{name: getattr(self.readings.host, name) for name in HOST_FIELDS}},
                "nodes": self.list_nodes() if self.nodes else []}

    def list_gpus(self, state: State) -> list[dict[str, Any]]:
        """The GPUs of all machines, for the API."""
        now, told = self.clock.monotonic(), []
        nodes = self.nodes
        closed = {node.name: node.find_closed(now) for node in nodes.values()}
        for gpu in self.see_gpus(state):
            why = self.observation.trouble if not gpu.node else closed.get(gpu.node)
            is_unread = bool(why) and (not gpu.node or gpu.node not in nodes or nodes[gpu.node].trouble is not None)
            if gpu.node and is_unread:                  # what it had to do last says nothing of now
                gpu = replace(gpu, memory_used_mib=None, utilization=None, temperature=None, power_watts=None, processes=())
            trouble, hold = (why, None) if is_unread else (None, why)
            told.append(gpu_json(gpu, state, self.config.gpu, trouble, gpu.node or self.node, hold))
        return told

    def number_nodes(self) -> dict[str | None, int]:
        """{machine: its number for /api}; this one is 0."""
        return {name: number for number, name in enumerate((self.node, *self.nodes))}

    def find_place(self, job: Job) -> str | None:
        """The machine that a job ran or runs on, or is to; None where it might have been any."""
        if job.slurm_node:
            return job.slurm_node
        has_begun = job.status == RUNNING or (job.status in FINAL and job.started_at is not None)
        name = job.node if has_begun or not self.nodes else job.only_node
        return None if name is None else name or self.node

    def find_silence(self, job: Job) -> str | None:
        """Since when nothing is known of a running job."""
        node = self.nodes.get(job.node) if job.status == RUNNING else None
        return node.since if node and node.trouble else None

    def running_json(self, job: Job, now: float) -> dict[str, Any]:
        sample = self.readings.jobs.get(job.id)
        samples = self.remote_samples.get(job.id, {}) if job.node else self.readings.list_facts(job.id)
        return {**job_json(job, now, self.find_place(job)), "runtime_seconds": round(self.find_runtime_s(job, now), 3),
                **{name: round_known(sample) for name, sample in samples.items()}, "unknown_since": self.find_silence(job),
                "rss_mib": round_known(sample.rss_mib) if sample else None,
                "cpu_percent": round_known(sample.cpu_percent) if sample else None}

    def brief_json(self, job: Job, now: float) -> dict[str, Any]:
        """What /status tells of a running job."""
        sample = self.readings.jobs.get(job.id)
        return {"id": job.id, "name": job.name, "group": job.group, "user": job.user, "node": self.find_place(job), "command": job.command,
                "status": job.status, "unknown_since": self.find_silence(job),
                "gpus": job.gpus, "gpu_indices": job.gpu_indices, "started_at": format_time(job.started_at), "attempt": job.attempt,
                "slurm_id": job.slurm_id,
                "runtime_seconds": round(self.find_runtime_s(job, now), 3), "stopping": job.stop_cause,
                "rss_mib": round_known(sample.rss_mib) if sample else None,
                "cpu_percent": round_known(sample.cpu_percent) if sample else None}

    def info(self) -> dict[str, Any]:
        return {"version": __version__, "hash": self.hash, "pid": os.getpid(), "user": self.user, "home": self.layout.home,
                "uptime_seconds": round(self.clock.monotonic() - self.started_monotonic, 3)}

    def list_curves(self) -> list[dict[str, Any]]:
        """GET /gpus/history: for each GPU that is seen, what it had to do in the last hour.

        [{index, node, uuid, interval_seconds: 30, memory_used_mib: [...], utilization: [...]}]: a point for each 30 seconds, oldest
        first, the last one of now; the most memory in use in MiB and the mean utilization in percent, null where nothing was read.
        """
        now = self.clock.monotonic()
        return [{"index": gpu.index, "node": gpu.node or self.node, "uuid": gpu.uuid, **self.readings.curves[gpu.uuid].describe(now)}
                for gpu in self.all_gpus()]

    def make_hints(self) -> list[str]:
        seen = self.observation
        hints = [seen.hint] if seen.trouble and seen.hint else [SMI_SLOW_HINT] if seen.took_s > SMI_SLOW_S and not seen.trouble else []
        hints += [self.cluster.find_hint()] if self.cluster and self.cluster.find_hint() else []
        if self.machine.is_mock:
            hints.append("these GPUs are made up; for the real ones: nexus restart, without NEXUS_MOCK_GPUS")
        if self.machine.no_screen_reason and self.config.jobs.launcher == "screen":
            hints.append(f"{self.machine.no_screen_reason}: jobs run directly, without attach (install it: apt install screen)")
        held = self.store.read(lambda state: [group for group in state.groups.values() if group.hold])
        hints += [f"group {group.name} is held: {group.hold}" for group in held[:3]]
        if self.jobs_file and self.jobs_file.faults:
            hints.append(f"{self.jobs_file.path}: {self.jobs_file.faults[0]}" + (
                f"; and {len(self.jobs_file.faults) - 1} more" if self.jobs_file.faults[1:] else ""))
        if self.config.jobs.max_memory_gb and not self.machine.samples.is_available:
            hints.append("max_memory_gb has no effect: psutil is not installed (pip install psutil)")
        if self.store.last_error:
            hints.append(f"{self.store.last_error.message}: nothing new is accepted or started until there is room")
        return hints

    def describe(self, job: Job, state: State, estimates: Mapping[str, float] = NO_ESTIMATES) -> dict[str, Any]:
        """A job for the API, with its place in the queue, why it waits and when it will start."""
        now = self.clock.now()
        if job.status != PENDING:
            return self.running_json(job, now) if job.status == RUNNING else job_json(job, now, self.find_place(job))
        return job_json(job, now, self.find_place(job), state.position(job), self.why(job, state), estimates.get(job.id))

    def describe_now(self, job: Job, estimates: Mapping[str, float] = NO_ESTIMATES) -> dict[str, Any]:
        """A job as it is by now."""
        return self.store.read(lambda state: self.describe(state.jobs.get(job.id, job), state, estimates))

    def why(self, job: Job, state: State) -> str:
        """Why a pending job does not run now."""
        if self.store.last_error:
            return self.store.last_error.message
        if self.cluster and job.slurm_key is not None:
            return describe_handed(job, self.cluster.find(job), self.cluster.trouble)
        if state.paused:
            return PAUSED
        made = replace(self.plan, hold="") if self.plan.hold == PAUSED else self.plan      # it was resumed since
        return describe_wait(job, state, made, self.config, self.clock.now())

    def explain(self, job_id: str, caller: Caller) -> dict[str, Any]:
        """GET /jobs/{id}/why: the decision, and what stands behind it GPU by GPU.  Raises: not_found, forbidden."""
        now = self.clock.now()
        estimates = self.find_estimates()

        def look(state: State) -> dict[str, Any]:
            job = find_own_job(state, job_id, caller)
            told = {"id": job.id, "status": job.status, "facts": [], "gpus": []}
            if job.status != PENDING:
                ran = f"on GPU {format_indices(job.gpu_indices)}" if job.gpu_indices else "without a GPU"
                ran += f" of {job.node}" if job.node and job.gpu_indices else f" on {job.node}" if job.node else ""
                ran = f"as Slurm's {job.slurm_id} on {job.slurm_node or 'a node'}" if job.slurm_id else ran
                return {**told, "why": job.cause_line or job.cause or (f"it runs {ran}" if job.status == RUNNING else f"it ran {ran}")}
            facts = describe_place(job, state.position(job), estimates.get(job.id), self.plan.board, self.config.jobs, now)
            gpus = list_verdicts(job, self.plan.board, self.config.gpu, now) if job.gpus and not self.is_slurm else []
            return {**told, "why": self.why(job, state), "facts": facts,
                    "gpus": [{"node": node or self.node, "place": f"{node and node + ':'}{index}", "index": index, "verdict": why}
                             for node, index, why in gpus]}
        return dict(self.store.read(look))

    def keep_estimates(self) -> None:
        """Make estimates when somebody asks for them: they may take a second, and nobody shall wait so long."""
        self.is_estimating = True
        while not self.is_stopping:
            if self.estimates_wanted.wait(WATCH_INTERVAL_S):
                self.estimates_wanted.clear()
                try:
                    self.estimate()
                except Exception as error:
                    self.fail("estimating", error)
                self.estimates_made.set()

    def find_estimates(self) -> Mapping[str, float]:
        """{pending job: when it will start} as last made; it is made anew, and waited for a moment."""
        if self.cluster and self.is_slurm:
            return self.cluster.list_estimates()
        if not self.is_estimating:
            return self.estimate()
        self.estimates_made.clear()
        self.estimates_wanted.set()
        self.estimates_made.wait(ESTIMATE_PATIENCE_S)
        return self.estimates

    def estimate(self) -> Mapping[str, float]:
        """{pending job: when it will start}, as far as that is known, and a few seconds old at most."""
        with self.estimate_lock:
            began = self.clock.monotonic()
            if began - self.estimated_at < max(2.0, ESTIMATE_REST * self.estimate_took_s):
                return self.estimates
            now = self.clock.now()
            jobs, groups, finished, gpus, is_paused = self.store.read(lambda state: (
                [*state.running.values(), *(state.jobs[job_id] for _, job_id in state.order[:MAX_REPLAY_JOBS])],
                list(state.groups.values()), list(state.finished.values()), self.see_gpus(state), state.paused))
            is_known = jobs and not is_paused and not self.find_gpu_trouble() and not self.find_hold()
            self.estimates = estimate_starts(jobs, groups, know_run_times(jobs, finished), gpus, self.config, now,
                                             self.view_nodes()) if is_known else {}
            self.estimated_at = self.clock.monotonic()
            self.estimate_took_s = self.estimated_at - began
            return self.estimates

    def health(self) -> dict[str, Any]:
        """GET /health."""
        import shutil
        lag = self.clock.monotonic() - self.turned_at
        trouble, took_s = self.observation.trouble or self.find_smi_silence(), self.observation.took_s
        checks = [
            ("scheduler", lag < 30, f"last turn {lag:.1f} s ago"),
            ("failures", not self.failure_count or self.clock.monotonic() - self.failed_at > 300,
             f"{self.failure_count} internal errors" + (
                f", the last: {self.last_failure}" if self.last_failure else "")),
            ("GPUs", not trouble and not any(gpu.fault for gpu in self.gpus), trouble or
             "; ".join(f"GPU {gpu.index}: {gpu.fault}" for gpu in self.gpus if gpu.fault) or
             f"{format_count(len(self.gpus), 'GPU')}, asked in {took_s:.2f} s"),
            ("state", self.store.last_error is None, self.store.last_error.message if self.store.last_error else "written"),
        ]
        if self.cluster:
            trouble = self.cluster.find_lasting_trouble()
            checks = [check for check in checks if check[0] != "GPUs" or not self.is_slurm]
            checks.append(("Slurm", not trouble, trouble or f"{self.cluster.describe_size()}, asked in {self.cluster.took_s:.2f} s"))
        checks += [(f"node {node.name}", *self.check_node(node)) for node in self.nodes.values() if not node.is_leaving]
        if self.jobs_file:
            faults = self.jobs_file.faults
            more = f"; and {len(faults) - 3} more" if faults[3:] else ""
            is_there = os.path.exists(self.jobs_file.path)
            checks.append(("jobs file", is_there, "; ".join(faults[:3]) + more or f"{self.jobs_file.path} is watched"))
        for name, folder in (("state disk", self.layout.journal_dir), ("log disk", self.layout.log_dir)):
            try:
                free_mib = shutil.disk_usage(folder if os.path.isdir(folder) else self.layout.home).free / 2**20
                checks.append((name, free_mib > 1, f"{format_memory(free_mib)} free"))
            except OSError as error:
                checks.append((name, False, str(error)))
        return {"is_healthy": all(is_ok for _, is_ok, _ in checks),
                "checks": [{"name": name, "is_ok": is_ok, "reading": reading} for name, is_ok, reading in checks]}

    def check_node(self, node: Node) -> tuple[bool, str]:
        """Whether a node is well, and what is to be said of it.  One that is silent for a moment is."""
        silence_s, trouble = self.clock.monotonic() - node.silent_at, node.trouble
        if trouble:
            return silence_s < NODE_ALARM_S, f"not heard for {format_duration(silence_s)}: {trouble.message}"
        faults = [f"GPU {gpu.index}: {gpu.fault}" for gpu in node.gpus if gpu.fault]
        if node.hold and node.hold != NODE_PAUSED:
            faults.append(node.hold)
        return not faults, "; ".join(faults) or node.hold or format_count(len(node.gpus), "GPU")

    def list_metrics(self) -> list[Metric]:
        """GET /metrics.  Counters and histograms begin at 0 with each start of the service."""
        now, status, seen, counters = self.clock.monotonic(), self.status(), self.observation, self.counters
        checks, nodes = self.health()["checks"], self.list_nodes()
        silences = {node.name: max(0.0, now - node.silent_at) for node in self.nodes.values()}

        def gauge(name: str, help: str, number: float | None) -> Metric:
            return Metric(name, "gauge", help, [({}, number)])

        def counter(name: str, help: str, number: float | None) -> Metric:
            return Metric(name, "counter", help, [({}, number)])

        def histogram(name: str, help: str, measured: Histogram) -> Metric:
            return Metric(name, "histogram", help, [({}, measured)])

        own = sample_own()
        return [
            Metric("nexus_build_info", "gauge", "1; its labels say which nexus this is.",
                   [({"version": __version__, "hash": self.hash}, 1)]),
            *list_gpu_metrics(status["gpu_status"]), *(list_slurm_metrics(status["slurm"]) if status["slurm"] else []),
            Metric("nexus_node_up", "gauge", "1 when the machine can be reached: this one, and each node.", [
                ({"node": node["name"]}, node["is_reachable"]) for node in nodes]),
            Metric("nexus_node_jobs", "gauge", "Jobs that run on the machine, as far as is known.", [
                ({"node": node["name"]}, node["running_jobs"]) for node in nodes]),
            Metric("nexus_node_silence_seconds", "gauge", "For how long the machine has not been heard.", [
                ({"node": node["name"]}, silences.get(node["name"], 0.0)) for node in nodes]),
            Metric("nexus_jobs", "gauge", "Jobs that wait or run.", [
                ({"status": PENDING}, status["queued_jobs"]), ({"status": RUNNING}, len(status["running_jobs"]))]),
            Metric("nexus_jobs_pending", "gauge", "Jobs that wait, by the band of their priority.", [
                ({"priority": band}, count) for band, count in status["queued_by_priority"].items()]),
            gauge("nexus_jobs_kept", "Finished jobs in the history, which is trimmed.", status["completed_jobs"]),
            gauge("nexus_queue_paused", "1 when the whole queue is paused.", status["is_paused"]),
            counter("nexus_job_starts_total", "Attempts of jobs that were launched.", counters.starts),
            counter("nexus_job_bounces_total", "Starts that came to nothing without a fault of the job's; it waits again.",
                    counters.bounces),
            Metric("nexus_jobs_finished_total", "counter", "Jobs that are over, by how; cause is empty for completed ones.", [
                ({"status": end, "cause": cause}, count) for (end, cause), count in sorted(counters.ends.items())]),
            Metric("nexus_job_retries_total", "counter", "Attempts that failed and are followed by another, by cause.", [
                ({"cause": cause}, count) for cause, count in sorted(counters.retries.items())]),
            histogram("nexus_job_wait_seconds", "How long jobs waited before they were launched.", counters.waits),
            histogram("nexus_job_run_seconds", "How long attempts of jobs ran.", counters.run_times),
            gauge("nexus_loop_lag_seconds", "By how much the loop's next turn is late, or for how long the present one has lasted.",
                  max(0.0, now - self.due_at)),
            histogram("nexus_loop_turn_seconds", "How long turns of the loop took.", counters.turns),
            counter("nexus_loop_errors_total", "Internal errors of the service.", self.failure_count),
            gauge("nexus_nvidia_smi_duration_seconds", "How long asking for the GPUs took the last time.", seen.took_s),
            gauge("nexus_nvidia_smi_age_seconds", "How long ago the GPUs were asked for.", max(0.0, now - seen.began_at - seen.took_s)),
            gauge("nexus_nvidia_smi_up", "1 when the GPUs could be read the last time.", not seen.trouble),
            counter("nexus_nvidia_smi_failures_total", "How often the GPUs could not be read.", counters.probe_failures),
            Metric("nexus_check_ok", "gauge", "The checks of GET /health: 1 when well.", [
                ({"check": check["name"]}, check["is_ok"]) for check in checks]),
            gauge("process_start_time_seconds", "When the service began, in UTC epoch seconds.", self.started_at),
            counter("process_cpu_seconds_total", "CPU time the service has used.", own.get("process_cpu_seconds_total")),
            gauge("process_resident_memory_bytes", "Memory of the service.", own.get("process_resident_memory_bytes")),
            gauge("process_open_fds", "Open descriptors of the service.", own.get("process_open_fds")),
            gauge("process_threads", "Threads of the service.", own.get("process_threads"))]


def find_refusal(submission: Submission, usable: Sequence[Gpu], node: str) -> tuple[str, str] | None:
    """Why a machine with these GPUs can never run a job, and what to do; None when it may."""
    gpus, where = submission.gpus or 0, f"on {node}" if node else "here"
    indices = {gpu.index for gpu in usable}
    missing = sorted(set(submission.gpu_ids or ()) - indices)
    if missing:
        return (f"there is no GPU {format_indices(missing)} {where}; there {'are' if indices else 'is'} "
                f"{format_indices(sorted(indices)) or 'none'}", "nexus shows them")
    if gpus > len(usable):
        return (f"{format_gpus(gpus)} asked for, and {node or 'this machine'} has {len(usable)}",
                "ask for fewer; --gpus 0 runs a job without one")
    sizes = [gpu.memory_total_mib for gpu in usable if submission.gpu_ids is None or gpu.index in submission.gpu_ids]
    large = [size for size in sizes if size is None or size >= (submission.gpu_mem_mib or 0)]
    if len(large) < gpus and submission.gpu_mem_mib:
        asked, most = format_memories(submission.gpu_mem_mib, max(size or 0 for size in sizes))
        return (f"{asked} of GPU memory asked for, and the largest GPU {where + ' ' if node else ''}has {most}",
                "ask for less; more GPUs share it: --gpus 2")
    return None


KEPT_AS_ASKED = ("command", "name", "group", "gpus", "gpu_ids", "gpu_mem_mib", "after", "conda", "snapshot", "snapshot_repo", "code",
                 "labels", "cuda_arg", "timeout_seconds", "expected_time", "tty", "umask",
                 "limits")                                  # the fields of Job that are a submission's own


def find_same(state: State, submission: Submission, user: str, content: str) -> str | None:
    """The job that a submission with an id of its own has brought already.  Raises: conflict, when that is another one."""
    known = state.jobs.get(submission.id or "")
    if known and (known.content != content or known.user != user):
        raise NexusError("conflict", f"job {known.id} exists and is another one", hint="leave the id out, or take another")
    return known.id if known else None


def find_keyed(state: State, key: str, content: str | None) -> tuple[str, ...]:
    """The jobs that a submission with this key has brought.  Raises: conflict, when that was another one."""
    jobs = sorted((state.jobs[job_id] for job_id in state.keys[key]), key=lambda job: job.number)
    if jobs[0].key_content not in (None, content):
        raise NexusError("conflict", f"this Idempotency-Key came with another submission before, which brought job {jobs[0].id}",
                         hint="a new one for each: uuidgen makes them")
    return tuple(job.id for job in jobs)


def is_withdrawn(job: Job, folder: str) -> bool:
    """Whether a job that Slurm has will not run any more, whatever Slurm does: its attempt was not begun, and is claimed now."""
    try:
        return take_claim(folder, job.attempt) or read_claim(folder, job.attempt) == (0, 0)
    except OSError:
        return False                        # then Slurm ends it


def content_of(job: Job) -> tuple[object, ...]:
    """What tells a job from others for --unique."""
    return job.user, job.command, job.cwd, job.conda, job.env_digest


def map_contents(state: State) -> dict[tuple[object, ...], str]:
    """{content: job} of the jobs that wait, run or have completed."""
    return {content_of(job): job.id for job in state.jobs.values() if job.status in (PENDING, RUNNING, COMPLETED)}


def find_forerunners(state: State, job: Job) -> list[str]:
    """The failed jobs that one added with --unique does again, in the same environment."""
    return [old.id for old in state.finished.values() if old.status == FAILED and old.retried_as not in state.jobs
            and content_of(old) == content_of(job) and old.environment == job.environment]


def digest_env(env: Mapping[str, str]) -> str | None:
    return digest_of(json.dumps(env, sort_keys=True))[:16] if env else None


def list_dependents(state: State, job_id: str) -> list[Job]:
    """The jobs that were cancelled because this one did not complete, and those because of them; parents first."""
    lost = sorted((job for job in state.finished.values() if job.cause == "dependency"), key=lambda job: job.number)
    found = {job_id}
    listed = []
    for job in lost:
        others = [parent for parent in job.after if parent not in found]
        is_again = job.retried_as in state.jobs
        if len(others) < len(job.after) and not is_again and all(is_hopeful(state, parent) for parent in others):
            found.add(job.id)
            listed.append(job)
    return listed


def find_retried(state: State, job_id: str) -> str:
    """The job that now stands for one: itself, or its latest retry."""
    while state.jobs[job_id].retried_as in state.jobs:
        job_id = str(state.jobs[job_id].retried_as)
    return job_id


def is_hopeful(state: State, job_id: str) -> bool:
    """Whether a job, or what it was retried as, has completed or still may."""
    return job_id in state.jobs and state.jobs[find_retried(state, job_id)].status in (PENDING, RUNNING, COMPLETED)


def list_groups(state: State) -> set[str]:
    return {job.group for job in state.jobs.values() if job.group}


def touch(state: State) -> Changes:
    """A change that changes nothing, to see whether it can be written."""
    yield StateChanged({"paused_gpus": state.paused_gpus})


def find_job(state: State, job_id: str) -> Job:
    """Raises: not_found."""
    job = state.jobs.get(job_id)
    if job is None:
        raise NexusError("not_found", f"no job '{format_line(job_id, 40)}'", hint=(
            suggest(job_id, state.jobs) if len(state.jobs) < 500 else "") or "nexus jobs lists them")
    return job


def find_own_job(state: State, job_id: str, caller: Caller) -> Job:
    """Raises: not_found; forbidden, when it is another user's."""
    job = find_job(state, job_id)
    if not caller.may_see(job.user):
        raise NexusError("forbidden", f"job {job.id} is {job.user}'s", hint=f"{caller.user}'s own: nexus jobs --user {caller.user}")
    return job


def check_priority(priority: int | None, caller: Caller) -> None:
    """Users of one priority take turns; the owner alone says who goes before them.  Raises: forbidden."""
    if priority is not None and priority < PRIORITIES["normal"] and not caller.is_owner:
        raise NexusError("forbidden", "a priority before normal is for the owner of the service to give",
                         hint="normal, low, or a number above 1")


def check_queue(state: State, user: str, config: JobsConfig, count: int = 1) -> None:
    """Raises: queue_full, when a user may not queue so many further jobs."""
    if len(state.order) + count > config.queue_limit:
        raise NexusError("queue_full", f"the queue is full: {len(state.order)} jobs are pending, and queue_limit is {config.queue_limit}",
                         hint="wait for some to end, or raise [jobs] queue_limit")
    most = config.max_pending_per_user
    pending = sum(len(turns) for (_, name), turns in state.turns.items() if name == user) if most else 0
    if most and pending + count > most:
        raise NexusError("queue_full", f"{format_count(pending, 'job')} of {user} are pending, and max_pending_per_user is {most}",
                         hint="wait for some to end, or raise [jobs] max_pending_per_user")


def check_groups(state: State, submissions: Sequence[Submission], caller: Caller) -> None:
    """A group's limit and fate are shared by its jobs, which are one user's.  Raises: forbidden."""
    groups = {submission.group for submission in submissions if submission.group}
    if groups and not caller.is_owner:
        for job in state.jobs.values():
            if job.group in groups and job.user != caller.user:
                raise NexusError("forbidden", f"the group {job.group} is {job.user}'s", hint="take another name")


def digest_of(text: str) -> str:
    return hash_text(text)[:32]


def file_hash() -> str:
    """A short hash of this file, which tells one copy from another."""
    import hashlib
    with open(os.path.abspath(__file__), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:8]


def describe_for_event(gpu: Gpu) -> tuple[object, ...]:
    """What of a GPU is worth an event: not each reading of its temperature."""
    return (gpu.index, gpu.uuid, gpu.fault, gpu.is_paused, gpu.lease_holder, gpu.memory_used_mib,
            tuple((process.pid, process.job_id) for process in gpu.processes))


# ==== 14. SERVER ==== ROUTES, who may call, handle(request) -> Response without a socket; the http.server adapter
# Everything is decided in Api.handle(), which sees a request as a value.  localhost is not a boundary: a caller is the
# owner when the kernel says that the socket at the other end is the owner's, or when it brings the owner's token.

BODY_BYTES_PER_S = 65536                # at least; a slower body is not waited for
HEARTBEAT_S = 15.0
CROWD_SIZE, CROWD_PAUSE_S, CROWD_LOOKS_PER_S = 10, 1.0, 400.0       # more followers than that share so many looks
ACCEPT_PAUSE_S = 0.1                    # when no connection can be taken, as without a free descriptor
SWEEP_INTERVAL_S = 2.0                  # how often connections are looked at that have not sent their request in time
PENALTY_S = (0.05, 5.0)                 # for a wrong token: doubled at each, at most
PENALTY_MEMORY_S = 900.0
LINGER_S = 5.0                          # so long the rest of a refused body is taken in
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
STREAMS = ("stdout", "stderr", "both")
FORWARDING = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip")      # headers that proxies add
MAX_FORM_BYTES = 10 * 2**20
MAX_UNKNOWN_FORMS = 8                   # so many are read at once of senders who are known only by what is in them
MAX_RESULT_BYTES = 2**20
CANCEL_PATIENCE_S = 2.0                 # /api/cancel waits so long for a job to be gone


@value
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]                  # names in lower case
    read_body: Callable[[], bytes]
    peer: str = "127.0.0.1"                     # its address
    uid: int | None = None                      # whose socket it is, if that is on this machine and known
    body_length: int = 0


@value
class Response:
    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}
    stream: Iterator[bytes] | None = None       # instead of a body; an empty piece only looks whether the caller is there
    after: Callable[[], None] | None = None     # done when the answer is sent


@value
class Route:
    method: str
    pattern: str
    handler: str                                # a method of Api
    access: str = "owner"                       # who may: "owner"; "user", with a token for its own jobs; "anyone", without one
    query: tuple[str, ...] = ()                 # the parameters it takes
    summary: str = ""
    # For OpenAPI.  A body or an answer is a shape of section 7, or a media type
    headers: tuple[str, ...] = ()               # those it looks at
    body: str = ""                              # what is sent, as JSON; "" = nothing
    answer: str = ""                            # what it answers, one `or` another; "" = nothing, with 204
    statuses: tuple[int, ...] = (200,)          # with which it answers so
    errors: tuple[str, ...] = ()                # KINDS that it may refuse with, beside those that list_errors() knows


ROUTES = (
    Route("GET", "/", "get_info", "user", (), "what answers here; the dashboard for a browser, whoever asks", answer="Info or text/html"),
    Route("GET", "/status", "get_status", "user", (), "GPUs, running jobs, and how many wait", answer="Status"),
    Route("GET", "/gpus/history", "get_gpu_history", "user", (), "each GPU's memory and utilization over the last hour",
          answer="GpuHistory[]"),
    Route("GET", "/queue", "get_queue", "user", ("group", "limit"), "pending jobs in the order they would start", answer="Job[]"),
    Route("POST", "/queue", "post_queue", "user", (), "add a job, or a list of jobs, all or none",
          headers=("Idempotency-Key",), body="Submissions", answer="Added", errors=("not_found", "conflict", "queue_full")),
    Route("PATCH", "/queue/{id}", "patch_queue", "user", (), "give a pending job another priority or position",
          body="Move", answer="Job", errors=("conflict",)),
    Route("DELETE", "/queue/{id}", "delete_queue", "user", (), "take a pending job out of the queue", errors=("conflict",)),
    Route("GET", "/jobs", "get_jobs", "user", ("status", "user", "group", "limit"), "all jobs kept: finished, running, pending",
          answer="Job[]"),
    Route("GET", "/jobs/{id}", "get_job", "user", (), "one job", answer="Job"),
    Route("DELETE", "/jobs/{id}", "delete_job", "user", (), "kill a running job", errors=("conflict",)),
    Route("POST", "/jobs/{id}/retry", "post_retry", "user", (), "run a finished job again, as a new one, and those cancelled for it",
          answer="Retried", errors=("conflict", "queue_full")),
    Route("GET", "/jobs/{id}/why", "get_why", "user", (), "why a job waits, GPU by GPU", answer="Why"),
    Route("GET", "/jobs/{id}/logs", "get_logs", "user", ("follow", "stream", "tail", "offset"), "what a job printed, or prints",
          answer="text/plain"),
    Route("GET", "/nodes", "get_nodes", "owner", (), "this machine and the others that jobs are given to", answer="NodeInfo[]"),
    Route("POST", "/nodes", "post_nodes", "owner", (), "give jobs to another machine too, on which nexus is (nexus node add puts it there)",
          body="NodeAdded", errors=("conflict",)),
    Route("DELETE", "/nodes/{name}", "delete_node", "owner", ("force",), "give a machine no more jobs; it is forgotten after its last one",
          errors=("conflict",)),
    Route("POST", "/node/sync", "post_node_sync", "owner", (), "between nexuses: what is new here for the one that gives this machine jobs",
          body="SyncAsked", answer="any"),
    Route("POST", "/node/orders", "post_node_orders", "owner", (), "between nexuses: jobs to run, and to end",
          body="Orders", answer="any"),
    Route("POST", "/service/pause", "post_pause", "owner", ("group",), "start nothing new, or nothing of a group", errors=("not_found",)),
    Route("POST", "/service/resume", "post_resume", "owner", ("group",), "start jobs again", errors=("not_found",)),
    Route("POST", "/service/stop", "post_stop", "owner", (), "end the service; jobs go on"),
    Route("GET", "/service/logs", "get_service_logs", "owner", ("follow", "tail"), "the service's log", answer="text/plain"),
    Route("POST", "/gpus/{index}/pause", "post_gpu_pause", "owner", (), "give a GPU no new job"),
    Route("POST", "/gpus/{index}/resume", "post_gpu_resume", "owner", (), "give it jobs again", errors=("conflict",)),
    Route("GET", "/events", "get_events", "user", ("since",), "every change of a job, GPU or the queue, as it happens",
          headers=("Last-Event-ID",), answer="text/event-stream"),
    Route("POST", "/api/submit", "post_api_submit", "anyone", (), "queue a script: a form of code and config_file, with a token in that",
          headers=("Idempotency-Key",), body="multipart/form-data Form", answer="FormAdded",
          errors=("unauthorized", "conflict", "queue_full")),
    Route("GET", "/api/status/{id}", "get_api_status", "user", (), "where a submitted script stands", answer="Submitted"),
    Route("GET", "/api/results/{id}", "get_api_results", "user", (), "what it printed, and its exit code", answer="Results"),
    Route("POST", "/api/cancel/{id}", "post_api_cancel", "user", (), "take it out of the queue, or stop it",
          answer="Cancelled", errors=("conflict",)),
    Route("GET", "/api/nodes", "get_api_nodes", "user", (), "machines: their GPUs, what runs there, and what waits", answer="Node[]"),
    Route("GET", "/api/jobs", "get_api_jobs", "user", ("user_id", "status", "limit"), "all jobs kept: finished, running, pending",
          answer="Submitted[]"),
    Route("GET", "/health", "get_health", "user", (), "each check with its reading; 503 when one is bad",
          answer="Health", statuses=(200, 503)),
    Route("GET", "/openapi.json", "get_openapi", "anyone", (), "this description", answer="any"),
    Route("GET", "/docs", "get_docs", "anyone", (), "the same to read, and to try", answer="text/html"),
    Route("GET", "/metrics", "get_metrics", "user", (), "GPUs, queue, waits, run times and the service itself, for Prometheus",
          answer="text/plain"),
)


def match_route(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """The route of a request, and what its pattern's holes hold.  Raises: not_found, method_not_allowed."""
    allowed = []
    for route in ROUTES:
        match = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.pattern), path)
        if match and route.method in (method, "GET" if method == "HEAD" else method):
            return route, match.groupdict()
        allowed += [route.method] if match else []
    if allowed:
        raise NexusError("method_not_allowed", f"{method} is not for {path}", hint=f"it takes {', '.join(allowed)}")
    raise NexusError("not_found", f"there is nothing at {format_line(path, 100)}", hint="GET / says what is")


def error_response(error: NexusError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.http_status == 401 else {}
    if error.kind == "method_not_allowed":
        headers["Allow"] = error.hint.replace("it takes ", "")
    return Response(error.http_status, (encode_json({"error": error.kind, "message": error.message, "hint": error.hint}) + "\n").encode(),
                    headers=headers)


def json_response(data: object, status: int = 200) -> Response:
    return Response(status, (encode_json(data) + "\n").encode())


PAGE_POLICIES: dict[str, str] = {}              # a page, which anyone may ask for: its Content-Security-Policy


def page_response(page: str) -> Response:
    if page not in PAGE_POLICIES:
        PAGE_POLICIES[page] = make_policy(page)
    return Response(200, page.encode(), "text/html; charset=utf-8", {
        "Content-Security-Policy": PAGE_POLICIES[page], "Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "Vary": "Accept"})


def make_policy(page: str) -> str:
    """A page runs and shows only what stands in it: by their hashes, its own <script> and <style>."""
    import base64
    import hashlib

    def hashes(tag: str) -> str:
        digests = [hashlib.sha256(text.encode()).digest() for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def prefers_html(request: Request) -> bool:
    """Whether a page says more to the caller than JSON: it names text/html, and nothing that it would rather have."""
    weights: dict[str, float] = {}
    for part in request.headers.get("accept", "").lower().split(","):
        kind, _, rest = part.partition(";")
        match = re.search(r"(?:^|;)\s*q=([0-9.]{1,5})\s*(?:;|$)", rest)
        weights[kind.strip()] = float(match[1]) if match and re.fullmatch(r"\d(\.\d*)?", match[1]) else 1.0
    return weights.get("text/html", 0.0) > weights.get("application/json", 0.0)


def parse_flag(query: Mapping[str, str], key: str) -> bool:
    given = query.get(key, "false").lower()
    if given not in ("", "true", "false", "1", "0", "yes", "no"):
        refuse(f"{key} must be true or false, not '{format_line(given, 40)}'", hint="")
    return given in ("", "true", "1", "yes")


def parse_number(query: Mapping[str, str], key: str) -> int | None:
    given = query.get(key)
    if given is None:
        return None
    if not re.fullmatch(r"\d{1,18}", given):
        refuse(f"{key} must be a whole number of 0 or more, not '{format_line(given, 40)}'", hint="")
    return int(given)


class Crowd:
    """How many follow logs and events now.

    Many are told at intervals: a hundred threads that each line wakes would hold up the starts of jobs.
    """

    def __init__(self) -> None:
        import threading
        self.count, self.guard = 0, threading.Lock()

    def __enter__(self) -> None:
        with self.guard:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self.guard:
            self.count -= 1

    def find_pause_s(self) -> float:
        """Between two looks of each."""
        return 0.0 if self.count <= CROWD_SIZE else min(CROWD_PAUSE_S, self.count / CROWD_LOOKS_PER_S)


class Places:
    """How many may do something at once, and how many of one client."""

    def __init__(self, most: int, most_each: int) -> None:
        import threading
        self.most, self.most_each, self.guard = most, most_each, threading.Lock()
        self.taken: list[str] = []

    def take(self, client: str) -> None:
        """Raises: unavailable, when all are taken."""
        with self.guard:
            if len(self.taken) >= self.most or self.taken.count(client) >= self.most_each:
                raise NexusError("unavailable", "too many forms are just being read of senders not known before",
                                 hint="try again, or send the token also as Authorization: Bearer TOKEN")
            self.taken.append(client)

    def leave(self, client: str) -> None:
        with self.guard:
            self.taken.remove(client)


class Penalties:
    """How long callers who bring wrong tokens wait for the answer: by address, longer each time."""

    def __init__(self) -> None:
        import collections
        self.counts: collections.OrderedDict[str, tuple[int, float]] = collections.OrderedDict()   # address: how many, the last (monotonic)

    def add(self, address: str, now: float) -> float:
        """Count one more; seconds to wait."""
        count, at = self.counts.pop(address, (0, now))
        count = 1 if now - at > PENALTY_MEMORY_S else count + 1
        self.counts[address] = count, now
        while len(self.counts) > 10000:
            self.counts.popitem(last=False)
        return float(min(PENALTY_S[1], PENALTY_S[0] * 2 ** min(count, 20)))


# GET /docs: it shows what /openapi.json says, and sends what one fills in.  As on the dashboard, text reaches the document as text nodes.
DOCS_PAGE = r'''<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>nexus: the API</title>
<link rel="icon" href="data:,">
<style>
:root { --bg: #f3f5f7; --panel: #fff; --ink: #161a1f; --muted: #57606b; --line: #dce1e6; --edge: #868f9a; --accent: #2159c9; --on-accent: #fff; --bad: #a81e18;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0e1114; --panel: #171b20; --ink: #e5e9ee; --muted: #9ba5b0; --line: #2a3037; --edge: #6c7682; --accent: #8db4ff; --on-accent: #0b1526; --bad: #ff9990; }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; max-width: 1000px; padding: 1rem; background: var(--bg); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0 0 .5rem; font-size: 1.4rem; }
h2 { margin: 1.5rem 0 .5rem; font-size: 1.1rem; }
h3 { margin: 1rem 0 .3rem; font-size: 1rem; }
a { color: var(--accent); }
.text { white-space: pre-line; }
.muted { color: var(--muted); }
.bad { color: var(--bad); }
code, pre, textarea, .path { font-family: var(--mono); font-size: .93em; }
pre { margin: .3rem 0; padding: .6rem; max-height: 28rem; overflow: auto; white-space: pre-wrap; background: var(--bg); border: 1px solid var(--line); border-radius: 6px; }
.bar { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); margin: 1rem 0; }
label { display: block; font-weight: 600; }
label small { font-weight: 400; color: var(--muted); }
input, select, textarea, button { width: 100%; min-height: 40px; padding: .3rem .6rem; font: inherit; color: inherit; background: var(--panel);
  border: 1px solid var(--edge); border-radius: 6px; }
textarea { min-height: 8rem; font-family: var(--mono); font-size: .93em; resize: vertical; }
button { width: auto; min-width: 6rem; cursor: pointer; }
button.primary { border-color: var(--accent); background: var(--accent); color: var(--on-accent); font-weight: 600; }
button:disabled { opacity: .55; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.call { margin: .5rem 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
.call > summary { display: flex; flex-wrap: wrap; gap: .2rem .7rem; padding: .6rem .8rem; cursor: pointer; }
.method { min-width: 4.2rem; font-weight: 700; color: var(--accent); }
.inside { padding: 0 .8rem .8rem; }
.fields { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); }
.actions { display: flex; gap: .6rem; margin: .8rem 0; }
</style>
</head>
<body>
<main>
<h1>nexus: the API</h1>
<p id="about" class="text">Loading openapi.json ...</p>
<p><a href="openapi.json">openapi.json</a> · <a href=".">dashboard</a></p>
<div class="bar">
<label>Token <small>for this tab alone; none is needed on the owner's machine</small><input id="token" type="password" autocomplete="off" spellcheck="false"></label>
<label>Find <small>in paths and what they do</small><input id="find" type="search" autocomplete="off"></label>
</div>
<div id="calls"></div>
</main>
<script>
'use strict';
const LIMIT = 200000;                           // of what is shown of an answer, in characters
const token = document.getElementById('token');
token.value = sessionStorage.getItem('nexus-token') ?? '';
token.addEventListener('input', () => {
  if (token.value) sessionStorage.setItem('nexus-token', token.value.trim());
  else sessionStorage.removeItem('nexus-token');
});

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, text] of Object.entries(attributes)) made.setAttribute(name, text);
  made.append(...children);
  return made;
}

const bearer = () => token.value.trim() ? {Authorization: `Bearer ${token.value.trim()}`} : {};
const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function typeOf(schema) {                       // a schema in a word or two
  if (!schema) return '';
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.enum) return schema.enum.join(' | ');
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(' or ');
  if (schema.type === 'array') return `${typeOf(schema.items) || 'any'}[]`;
  return [schema.format ?? schema.type ?? 'any'].flat().join(' or ');
}

function describeSchema(name, schema) {
  const needed = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).map(([key, fact]) =>
    `${key}${needed.includes(key) ? '' : '?'}: ${typeOf(fact)}${fact.description ? `   (${fact.description})` : ''}`);
  const text = rows.length ? rows.join('\n') : JSON.stringify(schema, null, 2);
  return el('details', {class: 'call', id: `shape-${name}`}, el('summary', {}, el('span', {class: 'path'}, name)), el('div', {class: 'inside'}, el('pre', {tabindex: '0'}, text)));
}

class Call {
  constructor(path, method, facts) {
    Object.assign(this, {path, method, facts, inputs: new Map()});
    this.kind = Object.keys(facts.requestBody?.content ?? {})[0];
    this.schema = facts.requestBody?.content[this.kind].schema;
    this.node = el('details', {class: 'call', id: facts.operationId}, el('summary', {}, el('span', {class: 'method'}, method),
      el('span', {class: 'path'}, path), el('span', {class: 'muted'}, facts.summary)));
    this.node.addEventListener('toggle', () => { if (this.node.open && !this.form) this.build(); });
  }

  build() {
    const fields = el('div', {class: 'fields'});
    for (const parameter of this.facts.parameters) fields.append(this.makeField(parameter));
    this.send = el('button', {type: 'submit', class: 'primary'}, 'Send');
    this.stop = el('button', {type: 'button', hidden: ''}, 'Stop');
    this.curl = el('pre', {tabindex: '0', 'aria-label': 'the same with curl'});
    this.answer = el('div', {'aria-live': 'polite'});
    this.form = el('form', {}, fields, ...this.makeBody(), el('h3', {}, 'With curl'), this.curl, el('div', {class: 'actions'}, this.send, this.stop), this.answer);
    this.form.addEventListener('input', () => this.tellCurl());
    this.form.addEventListener('submit', (event) => { event.preventDefault(); this.ask(); });
    this.stop.addEventListener('click', () => this.control?.abort());
    const answers = Object.entries(this.facts.responses).map(([status, answer]) =>
      el('li', {}, `${status}: ${answer.description ?? answer.$ref.split('/').pop()}`, ...Object.entries(answer.content ?? {}).map(
        ([kind, {schema}]) => ` — ${kind}${kind === 'application/json' ? ` ${typeOf(schema)}` : ''}`)));
    this.node.append(el('div', {class: 'inside'}, el('p', {class: 'text'}, this.facts.description), this.form, el('h3', {}, 'Answers'), el('ul', {}, ...answers)));
    this.tellCurl();
  }

  makeField({name, in: place, schema, description, required}) {
    const choices = schema.enum;
    const input = choices ? el('select', {}, el('option', {value: ''}, ''), ...choices.map((choice) => el('option', {}, choice)))
      : el('input', {autocomplete: 'off', spellcheck: 'false', placeholder: String(schema.examples?.[0] ?? '')});
    if (required) input.required = true;
    this.inputs.set(input, {name, place});
    return el('label', {}, `${name} `, el('small', {}, `${description}${required ? '' : ' (optional)'}`), input);
  }

  makeBody() {
    if (!this.kind) return [];
    const schema = this.schema.$ref ? shapes[this.schema.$ref.split('/').pop()] : this.schema;
    const area = (name, text, place, why) => {
      const input = el('textarea', {spellcheck: 'false'});
      input.value = text;
      this.inputs.set(input, {name, place});
      return el('label', {}, `${name} `, el('small', {}, why), input);
    };
    if (this.kind === 'application/json') return [area('Body', JSON.stringify(schema.examples?.[0] ?? {}, null, 2), 'body', `${this.kind}: ${typeOf(this.schema)}`)];
    return Object.entries(schema.properties).map(([name, fact]) => area(name, fact.examples?.[0] ?? '', 'form', fact.description ?? ''));
  }

  request() {                                   // {url, headers, body, fields}
    let url = this.path.slice(1);
    const query = new URLSearchParams(), headers = bearer(), fields = [];
    let body;
    for (const [input, {name, place}] of this.inputs) {
      if (place === 'path') url = url.replace(`{${name}}`, encodeURIComponent(input.value.trim()));
      else if (place === 'body') { body = input.value; headers['Content-Type'] = this.kind; }
      else if (place === 'form') fields.push([name, input.value]);
      else if (input.value && place === 'query') query.set(name, input.value);
      else if (input.value) headers[name] = input.value;
    }
    return {url: (url || '.') + (`${query}` && `?${query}`), headers, body, fields};
  }

  tellCurl() {
    const {url, headers, body, fields} = this.request();
    const parts = ['curl', ...(this.method === 'GET' ? [] : ['-X', this.method]), ...Object.entries(headers).flatMap(([name, text]) =>
      ['-H', name === 'Authorization' ? '"Authorization: Bearer $NEXUS_TOKEN"' : quote(`${name}: ${text}`)])];
    if (body !== undefined) parts.push('-d', quote(body));
    for (const [name] of fields) parts.push('-F', quote(`${name}=@${name}`));
    parts.push(quote(new URL(url, location.href).href));
    this.curl.textContent = parts.join(' ');
  }

  async ask() {
    if (this.facts.operationId === 'post_stop' && !confirm('End the service? Running jobs go on.')) return;
    const {url, headers, body, fields} = this.request();
    const control = this.control = new AbortController();
    const form = new FormData();
    for (const [name, text] of fields) form.append(name, new Blob([text]), name);
    const status = el('p', {}, 'Asking ...'), shown = el('pre', {tabindex: '0', 'aria-label': 'the answer'});
    this.answer.replaceChildren(status);
    this.send.disabled = true;
    this.stop.hidden = false;
    const began = performance.now();
    const tell = (response, how) => { status.textContent = `${response.status} ${response.statusText}, ${how} ${Math.round(performance.now() - began)} ms`; };
    let response;
    try {
      response = await fetch(url, {method: this.method, headers, body: fields.length ? form : body, signal: control.signal, cache: 'no-store', credentials: 'omit'});
      status.className = response.ok ? '' : 'bad';
      tell(response, 'begun after');
      const names = [...response.headers].map(([name, text]) => `${name}: ${text}`).join('\n');
      this.answer.append(el('details', {}, el('summary', {}, 'Headers'), el('pre', {tabindex: '0'}, names)), shown);
      await this.show(response, shown);
      tell(response, 'whole after');
      if (response.status === 401) token.focus();
    } catch (error) {
      const why = error.name === 'AbortError' ? 'stopped' : String(error.message ?? error);
      status.textContent = response ? `${response.status} ${response.statusText}, ${why}` : why;
      if (error.name !== 'AbortError') status.className = 'bad';
    }
    this.send.disabled = false;
    this.stop.hidden = true;
  }

  async show(response, place) {
    const isJson = (response.headers.get('Content-Type') ?? '').startsWith('application/json');
    if (!response.body) return;
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let text = '', isCut = false;
    for (;;) {
      const {done, value} = await reader.read();
      text += done ? decoder.decode() : decoder.decode(value, {stream: true});
      if (text.length > LIMIT && !isJson) { text = text.slice(-LIMIT); isCut = true; }
      if (!isJson) { place.textContent = (isCut ? '...' : '') + text; place.scrollTop = place.scrollHeight; }
      if (done) break;
    }
    if (!isJson || !text) return;
    try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* shown as it came */ }
    place.textContent = text.length > LIMIT ? `${text.slice(0, LIMIT)}\n...` : text;
  }
}

let shapes = {};

async function begin() {
  const answer = await fetch('openapi.json');
  const api = await answer.json();
  shapes = api.components.schemas;
  document.getElementById('about').textContent = `${api.info.description}\n\nVersion ${api.info.version}`;
  const calls = [], place = document.getElementById('calls');
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, facts] of Object.entries(methods)) calls.push(new Call(path, method.toUpperCase(), facts));
  }
  place.append(el('h2', {}, 'Calls'), ...calls.map((call) => call.node), el('h2', {}, 'Shapes'), ...Object.entries(shapes).map(([name, schema]) => describeSchema(name, schema)));
  const find = document.getElementById('find');
  find.addEventListener('input', () => {
    const words = find.value.toLowerCase().split(/\s+/);
    for (const call of calls) {
      const text = `${call.method} ${call.path} ${call.facts.summary}`.toLowerCase();
      call.node.hidden = !words.every((word) => text.includes(word));
    }
  });
  token.addEventListener('input', () => calls.forEach((call) => call.form && call.tellCurl()));
  const wanted = document.getElementById(location.hash.slice(1));
  if (wanted?.tagName === 'DETAILS') { wanted.open = true; wanted.scrollIntoView(); }
}

begin().catch((error) => {
  const about = document.getElementById('about');
  about.textContent = `openapi.json could not be read: ${error.message}`;
  about.className = 'bad';
});
</script>
</body>
</html>
'''  # noqa: E501


class Api:
    """The REST interface, as a function from Request to Response."""

    def __init__(self, service: Service, token: str, page: str = "") -> None:
        """`page`: what a browser gets at /; a browser is told as all others when there is none."""
        self.service, self.token, self.page = service, token, page
        self.config = service.config.service
        self.tokens = TokenFile(service.layout)
        self.penalties = Penalties()
        self.crowd = Crowd()
        self.encoded: dict[tuple[int, str | None], str] = {}        # (event's number, for which user): as it is sent
        self.unknown_forms = Places(MAX_UNKNOWN_FORMS, 2)
        self.openapi: Response | None = None                        # made when somebody first asks for it

    def handle(self, request: Request) -> Response:
        try:
            self.check_site(request)
            if self.page and request.path == "/" and request.method in ("GET", "HEAD") and prefers_html(request):
                return page_response(self.page)         # to anyone: it holds nothing, and asks for a token itself
            try:
                route, holes = match_route(request.method, request.path)
            except NexusError:                          # what there is and what not is not for everybody
                self.identify(request)
                raise
            caller = self.authorize(request, route)
            for key in request.query:
                if key not in route.query:
                    raise NexusError("usage", f"'{format_line(key, 40)}' is not a parameter of {route.pattern}",
                                     hint=suggest(key, route.query))
            response: Response = getattr(self, route.handler)(request, caller, **holes)
            if response.stream and caller.sha256:
                response = replace(response, stream=self.while_good(caller.sha256, response.stream))
            return response
        except NexusError as error:
            if error.http_status in (401, 403):
                self.service.log.warning("Refused %s %s from %s: %s", format_line(request.method, 20), format_line(request.path, 100),
                                         describe_peer(request), error.message)
            return error_response(error)
        except Exception as error:
            self.service.fail(f"answering {format_line(request.method, 20)} {format_line(request.path, 100)}", error)
            return error_response(NexusError("internal", "nexus failed to answer this", hint="nexus logs service"))

    def check_site(self, request: Request) -> None:
        """Another site's page in the owner's browser is not the owner.  Raises: forbidden."""
        host = request.headers.get("host", "")
        name = find_host_name(request)
        is_ip = re.fullmatch(r"[\d.]+|\[[0-9a-f:.]+\]", name) is not None
        names = [known.lower() for known in (*LOCAL_HOSTS, *self.config.allowed_hosts, self.config.host)]
        own = self.service.node.lower().partition(".")[0]
        is_own = not is_loopback(self.config.host) and (is_ip or name.partition(".")[0] == own)
        if name not in names and not is_own:
            raise NexusError("forbidden", f"the Host '{format_line(host, 60)}' is not one by which nexus may be called",
                             hint=f"its owner can allow it: [service] allowed_hosts = [{format_toml(format_line(name, 60))}]; "
                                  "on this machine call it localhost")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise NexusError("forbidden", f"the Origin '{format_line(origin, 60)}' is another site's", hint="")
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and request.method not in ("GET", "HEAD"):
            raise NexusError("forbidden", "another site's page sent this", hint="")

    def authorize(self, request: Request, route: Route) -> Caller:
        """Who asks, when he may.  Raises: unauthorized, forbidden."""
        if route.access == "anyone":
            return Caller("", request.peer, is_owner=False)
        caller = self.identify(request)
        if route.access == "owner" and not caller.is_owner:
            raise NexusError("forbidden", f"{route.method} {route.pattern} is for {self.service.user}, whose service this is", hint="")
        return caller

    def identify(self, request: Request) -> Caller:
        """Whose request it is: by its token, or else by the kernel.  Raises: unauthorized."""
        given = request.headers.get("authorization")
        if given is not None:
            bearer = re.fullmatch(r"[Bb]earer +(\S+)", given)
            return self.find_bearer(bearer[1] if bearer else "", request)
        is_here = is_loopback(request.peer)
        where = f"the owner's is in {self.service.layout.token_file}, others'" if is_here else f"{self.service.user} makes it"
        hint = f"send Authorization: Bearer TOKEN; {where}: nexus token create USER"
        forwarded = [name for name in request.headers if name in FORWARDING or name.startswith("x-forwarded-")]
        if forwarded:
            raise NexusError("unauthorized", f"a forwarded request ({forwarded[0]}) needs a token", hint)
        if find_host_name(request) not in LOCAL_HOSTS:
            raise NexusError("unauthorized", f"a request to {format_line(request.headers.get('host', ''), 60)} needs a token", hint)
        if not is_loopback(self.config.host):
            raise NexusError("unauthorized", f"nexus listens on {self.config.host}, so that every request needs a token", hint)
        if request.uid != os.geteuid() or not is_loopback(request.peer):
            raise NexusError("unauthorized", f"only {self.service.user}, on this machine, may call without a token", hint)
        return self.service.owner

    def while_good(self, sha256: str, stream: Iterator[bytes]) -> Iterator[bytes]:
        """A stream for a user, cut off when the token is revoked."""
        for piece in stream:
            if not any(token.sha256 == sha256 and not describe_token_end(token, self.service.clock.now()) for token in self.tokens.read()):
                return
            yield piece

    def find_bearer(self, text: str, request: Request) -> Caller:
        """Who has a token.  A wrong one takes as long whatever it is, and longer each time.  Raises: unauthorized."""
        import hmac
        if hmac.compare_digest(text.encode(), self.token.encode()):
            return Caller(self.service.user, f"{self.service.user} (token, {request.peer})")
        token, now = find_token(self.tokens.read(), text), self.service.clock.now()
        if token and not describe_token_end(token, now):
            try:
                self.tokens.note_use(token, now)
            except NexusError as error:                 # a full disk keeps nobody out
                self.service.log.warning("The use of %s's token: %s", token.user, error.message)
            return Caller(token.user, f"{token.user} (token, {request.peer})", False, token.sha256)
        if token:
            self.service.log.warning("A token of %s came from %s: %s", token.user, request.peer, describe_token_end(token, now))
        self.service.clock.sleep(self.penalties.add(request.peer, self.service.clock.monotonic()))
        raise NexusError("unauthorized", "the token is not right", hint=f"{self.service.user} makes them: nexus token create USER")

    def read_json(self, request: Request) -> Any:
        """The body.  Raises: unsupported_media_type, usage, too_large."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise NexusError("unsupported_media_type", f"the body must be application/json, not {format_line(kind, 60) or 'nothing'}",
                             hint="curl: -H 'Content-Type: application/json' -d '{\"command\": \"python train.py\"}'")
        try:
            return parse_json(request.read_body().decode("utf-8"), "the body")
        except UnicodeDecodeError as error:
            raise NexusError("usage", f"the body is not UTF-8: {error.reason} at byte {error.start}") from None

    def read_key(self, request: Request) -> str | None:
        """What tells a submission that is sent again from a new one.  Raises: usage."""
        key = request.headers.get("idempotency-key")
        if key is not None and not re.fullmatch(r"[\x21-\x7e]{8,128}", key):
            refuse("Idempotency-Key must be 8 to 128 visible characters", hint="a random one each time: uuidgen makes them")
        return key

    # One method for each route: (request, caller, holes of the pattern) -> Response

    def get_info(self, request: Request, caller: Caller) -> Response:
        if not caller.is_owner:
            return json_response({"name": "nexus", "version": __version__, "user": caller.user})
        calls = [f"{route.method} {route.pattern}: {route.summary}" for route in ROUTES]
        return json_response({"name": "nexus", **self.service.info(), "calls": calls})

    def get_status(self, request: Request, caller: Caller) -> Response:
        self.service.first_probe.wait(SMI_PATIENCE_S + 5)
        status = {**self.service.status(), "is_owner": caller.is_owner}
        if not caller.is_owner:
            status = {**status, "home": None, "hints": [], "nodes": list(map(hide_address, status["nodes"])),
                      "running_jobs": [job if caller.may_see(job["user"]) else hide_private(job) for job in status["running_jobs"]]}
        return json_response(status)

    def get_gpu_history(self, request: Request, caller: Caller) -> Response:
        return json_response(self.service.list_curves())

    def get_queue(self, request: Request, caller: Caller) -> Response:
        import itertools
        service, group = self.service, request.query.get("group")
        jobs = service.store.read(lambda state: [state.jobs[job_id] for _, job_id in state.order])
        estimates = service.find_estimates() if jobs else {}
        limit = parse_number(request.query, "limit")
        return stream_list(itertools.islice(show_to(caller, self.describe_queue(jobs, group, estimates, caller)), limit))

    def describe_queue(self, jobs: Sequence[Job], group: str | None, estimates: Mapping[str, float],
                       caller: Caller) -> Iterator[dict[str, Any]]:
        """Pending jobs; those that ask for the same wait for the same, so that it is looked for once, and a long list delays nobody."""
        service, now = self.service, self.service.clock.now()
        kept = {slot.kept_for for slot in service.plan.board}
        reasons: dict[object, str] = {}
        for place, job in enumerate(jobs):
            if group is not None and (group != job.group or not caller.may_see(job.user)):
                continue
            is_apart = job.unmet or job.retry_at is not None or job.slurm_key is not None or job.id in kept
            alike = job.id if is_apart else (kind_of(job), job.group, job.user)
            if alike not in reasons:
                reasons[alike] = service.store.read(lambda state, job=job: service.why(job, state))  # type: ignore[misc]
            yield job_json(job, now, service.find_place(job), place, reasons[alike], estimates.get(job.id))

    def post_queue(self, request: Request, caller: Caller) -> Response:
        data = self.read_json(request)
        key = self.read_key(request)
        if data == []:
            refuse("the list of jobs is empty")
        commands = data.pop("commands", None) if isinstance(data, dict) else None
        is_dry = flag_parser("dry_run")(data.pop("dry_run", False)) if isinstance(data, dict) else False
        if commands is not None:                        # many commands that share everything else
            if not isinstance(commands, list) or not commands or "command" in data or "id" in data:
                refuse("commands must be a list of texts that is not empty, without command or id beside it")
            submissions = parse_list([{**data, "command": command} for command in commands])
        else:
            submissions = parse_list(data) if isinstance(data, list) else [parse_submission(data)]
        if not caller.is_owner and any(submission.environment is not None for submission in submissions):
            raise NexusError("forbidden", f"the whole environment is for {self.service.user} to send",
                             hint='send what is to be set as "env"')
        content = digest_of(json.dumps([data, commands], sort_keys=True)) if key else None
        try:
            added = self.service.submit(submissions, caller, None if is_dry else key, content, is_dry)
        except DryRun as tried:
            shown = [name for name in SUBMISSION_FIELDS if name not in ("environment", "env", "limits", "umask", "code", "labels")]
            return json_response({"dry_run": True, "jobs": [{name: getattr(one, name) for name in shown} for one in tried.fresh],
                                  **({"known": tried.known} if tried.known else {}),
                                  **({"warning": f"it would be cancelled at once: {tried.lost}"} if tried.lost else {})})
        answer: dict[str, Any] = {"id": added.ids[0]} if isinstance(data, dict) and commands is None else {"ids": added.ids}
        known = [job_id for job_id in added.known if job_id not in [submission.id for submission in submissions]]
        if known:                                       # by `unique`: what is asked for twice under its id is answered as the first time
            answer["known"] = known
        warning = self.find_warning(added.ids, any(submission.gpus != 0 for submission in submissions))
        return json_response({**answer, "warning": warning} if warning else answer)

    def find_warning(self, ids: Sequence[str], needs_gpus: bool) -> str | None:
        """What whoever has added jobs should know: that they will not start soon, or never."""
        if self.service.observation.trouble and needs_gpus:
            return f"it waits: {self.service.observation.trouble}"
        lost: list[Job] = self.service.store.read(lambda state: [state.jobs[job_id] for job_id in ids if job_id in state.jobs
                                                                 and state.jobs[job_id].cause == "dependency"])
        return f"job {lost[0].id} was cancelled at once: {lost[0].cause_line}" if lost else None

    def patch_queue(self, request: Request, caller: Caller, id: str) -> Response:
        data = self.read_json(request)
        if not isinstance(data, dict) or not data or data.keys() - {"priority", "position"}:
            refuse('send {"priority": 0} or {"position": 0}', hint="")
        position = data.get("position")
        if "position" in data and not is_whole(position, 0, 2**53):
            refuse(f"position must be a whole number of 0 or more, not {format_json_fault(position)}", hint="")
        self.service.move(id, caller, parse_priority(data["priority"]) if "priority" in data else None, position)
        return self.get_job(request, caller, id)

    def delete_queue(self, request: Request, caller: Caller, id: str) -> Response:
        self.service.cancel(id, caller, (PENDING,))
        return Response(204)

    def get_jobs(self, request: Request, caller: Caller) -> Response:
        status, user, limit = request.query.get("status"), request.query.get("user"), parse_number(request.query, "limit")
        return stream_list(show_to(caller, self.describe_jobs(self.select_jobs(caller, status, user, request.query.get("group"), limit))))

    def select_jobs(self, caller: Caller, status: str | None, user: str | None, group: str | None, limit: int | None) -> list[Job]:
        """Finished, running, pending, in this order; the last `limit` of them.  Raises: usage."""
        if status is not None and status not in STATUSES:
            refuse(f"'{format_line(status, 40)}' is not a status", hint=f"they are {', '.join(STATUSES)}")

        def look(state: State) -> list[Job]:
            pending = [state.jobs[job_id] for _, job_id in state.order] if status in (None, PENDING) else []
            jobs = [*state.finished.values(), *state.running.values(), *pending]
            return [job for job in jobs if status in (None, job.status) and user in (None, job.user)
                    and (group is None or (group == job.group and caller.may_see(job.user)))]

        jobs: list[Job] = self.service.store.read(look)
        return jobs[len(jobs) - limit:] if limit is not None and limit < len(jobs) else jobs

    def describe_jobs(self, jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
        """Each looked up by itself, so that a long list delays nobody else."""
        now = self.service.clock.now()
        estimates = self.service.find_estimates() if any(job.status == PENDING for job in jobs) else {}
        for job in jobs:
            if job.status in FINAL:
                yield job_json(job, now, self.service.find_place(job))
            else:
                yield self.service.describe_now(job, estimates)

    def get_job(self, request: Request, caller: Caller, id: str) -> Response:
        job: Job = self.service.store.read(lambda state: find_own_job(state, id, caller))
        return json_response(self.service.describe_now(job, self.service.find_estimates() if job.status == PENDING else {}))

    def get_why(self, request: Request, caller: Caller, id: str) -> Response:
        return json_response(self.service.explain(id, caller))

    def delete_job(self, request: Request, caller: Caller, id: str) -> Response:
        self.service.cancel(id, caller, (RUNNING,))
        return Response(204)

    def post_retry(self, request: Request, caller: Caller, id: str) -> Response:
        new_id, *dependents = self.service.retry(id, caller)
        return json_response({"id": new_id, **({"dependents": dependents} if dependents else {})})

    def get_logs(self, request: Request, caller: Caller, id: str) -> Response:
        service = self.service
        stream = request.query.get("stream", "both")
        if stream not in STREAMS:
            refuse(f"stream must be {', '.join(STREAMS)}, not '{format_line(stream, 40)}'", hint="")
        job: Job = service.store.read(lambda state: find_own_job(state, id, caller))
        names = [name for name in STREAMS[:2] if stream in (name, "both")]

        def look() -> tuple[list[str], bool]:
            """The files, none before it has started (there may be a former job's), and whether it is over."""
            now: Job | None = service.store.read(lambda state: state.jobs.get(id))
            if now and now.number != job.number:        # another one that was given its id
                now = None
            folder = now.log_dir if now else job.log_dir
            return [os.path.join(folder, f"{name}.log") for name in names] if folder else [], now is None or now.status in FINAL
        return self.send_logs(request, look)

    def send_logs(self, request: Request, look: Callable[[], tuple[list[str], bool]]) -> Response:
        """What files hold, and what is appended if that is asked for.  `look` says which files, and whether it is over."""
        tail, offset = parse_number(request.query, "tail"), parse_number(request.query, "offset") or 0
        offsets = {path: find_log_start(path, tail, offset) for path in look()[0]}
        is_followed = parse_flag(request.query, "follow")
        return Response(200, content_type="text/plain; charset=utf-8", headers={"Log-Offset": ", ".join(map(str, offsets.values())) or "0"},
                        stream=self.follow(look, offsets) if is_followed else read_files(offsets))

    def follow(self, look: Callable[[], tuple[list[str], bool]], offsets: dict[str, int]) -> Iterator[bytes]:
        """What files hold beyond their offsets, and what is appended, until it is over and all was sent."""
        idle_s = FOLLOW_INTERVAL_S[0]
        with self.crowd:
            while True:
                paths, was_over = look()
                found = False
                for path in paths:
                    for piece in read_new(path, offsets):
                        found = True
                        yield piece
                if was_over and not found:
                    return
                if not found:
                    yield b""
                self.service.clock.sleep(max(0.0 if found else idle_s, self.crowd.find_pause_s()))
                idle_s = FOLLOW_INTERVAL_S[0] if found else min(FOLLOW_INTERVAL_S[1], idle_s * 1.2)

    def get_service_logs(self, request: Request, caller: Caller) -> Response:
        return self.send_logs(request, lambda: ([self.service.layout.service_log], self.service.is_stopping))

    def get_nodes(self, request: Request, caller: Caller) -> Response:
        return json_response(self.service.list_nodes())

    def post_nodes(self, request: Request, caller: Caller) -> Response:
        self.service.add_node(parse_node(self.read_json(request)), caller.name)
        return Response(204)

    def delete_node(self, request: Request, caller: Caller, name: str) -> Response:
        self.service.remove_node(name, parse_flag(request.query, "force"), caller.name)
        return Response(204)

    def post_node_sync(self, request: Request, caller: Caller) -> Response:
        asked = parse_sync(self.read_json(request))
        return json_response(self.service.sync(asked.head, asked.since, asked.logs, asked.wait_seconds))

    def post_node_orders(self, request: Request, caller: Caller) -> Response:
        return json_response(self.service.take_orders(parse_orders(self.read_json(request)), caller))

    def post_pause(self, request: Request, caller: Caller) -> Response:
        return self.set_paused(request, caller, True)

    def post_resume(self, request: Request, caller: Caller) -> Response:
        return self.set_paused(request, caller, False)

    def set_paused(self, request: Request, caller: Caller, is_paused: bool) -> Response:
        group = request.query.get("group")
        if group is None:
            self.service.set_paused(is_paused, caller.name)
        else:
            self.service.set_group_held(group, is_paused, caller.name)
        return Response(204)

    def post_stop(self, request: Request, caller: Caller) -> Response:
        self.service.log.info("Service stopped by %s", caller.name)
        return Response(204, after=self.service.stop)

    def post_gpu_pause(self, request: Request, caller: Caller, index: str) -> Response:
        node, number = parse_gpu_place(index)
        self.service.set_gpu_paused(number, True, caller.name, node)
        return Response(204)

    def post_gpu_resume(self, request: Request, caller: Caller, index: str) -> Response:
        node, number = parse_gpu_place(index)
        self.service.set_gpu_paused(number, False, caller.name, node)
        return Response(204)

    def get_events(self, request: Request, caller: Caller) -> Response:
        since = parse_number({**request.query, **({"since": request.headers["last-event-id"]} if "last-event-id" in request.headers
                                                  else {})}, "since")
        return Response(200, content_type="text/event-stream", headers={"Cache-Control": "no-store"}, stream=self.follow_events(
            self.service.store.events.next_number if since is None else since + 1, caller))

    def follow_events(self, following: int, caller: Caller) -> Iterator[bytes]:
        """Server-sent events.  `reset` says that some in between are no longer kept: look at everything anew.

        The opening has a number too, so that who is cut off before the first event goes on from there.
        """
        events, service = self.service.store.events, self.service
        yield f": events from number {following}\nid: {following - 1}\n\n".encode()
        beat_at = service.clock.monotonic() + HEARTBEAT_S
        with self.crowd:
            while not service.is_stopping:
                pause_s = self.crowd.find_pause_s()
                service.clock.sleep(pause_s)
                upcoming = events.next_number
                found, is_gap = events.read(following, 0.0 if pause_s else 1.0)
                pieces = []
                if is_gap:
                    after = (found[0][0] if found else upcoming) - 1
                    pieces.append(f"event: reset\nid: {after}\ndata: {encode_json({'since': following})}\n\n")
                pieces += [self.encode_event(*event, caller) for event in found if event[1] != "group" or caller.is_owner]
                following = found[-1][0] + 1 if found else upcoming if is_gap else following
                if service.clock.monotonic() > beat_at:
                    pieces.append(": still here\n\n")
                if pieces:
                    beat_at = service.clock.monotonic() + HEARTBEAT_S
                yield "".join(pieces).encode()

    def encode_event(self, number: int, kind: str, what: Any, caller: Caller) -> str:
        """Made once for all who follow."""
        key = number, None if caller.is_owner else caller.user
        text = self.encoded.get(key)
        if text is None:
            text = f"id: {number}\nevent: {kind}\ndata: {encode_json(self.describe_event(kind, what, caller))}\n\n"
            if len(self.encoded) >= 1000:
                self.encoded.clear()
            self.encoded[key] = text
        return text

    def describe_event(self, kind: str, what: Any, caller: Caller) -> object:
        if kind == "job":
            told = job_json(what, self.service.clock.now(), self.service.find_place(what))
            return told if caller.may_see(what.user) else hide_private(told)
        if kind == "removed":
            return {"ids": what}
        if kind == "gpus":
            return self.service.store.read(self.service.list_gpus)
        return what

    def get_openapi(self, request: Request, caller: Caller) -> Response:
        if self.openapi is None:                        # anyone may ask, as often as he likes
            self.openapi = json_response(make_openapi(ROUTES, __version__))
        return self.openapi

    def get_docs(self, request: Request, caller: Caller) -> Response:
        return page_response(DOCS_PAGE)

    def get_metrics(self, request: Request, caller: Caller) -> Response:
        return Response(200, format_prometheus(self.service.list_metrics()).encode("utf-8", "replace"),
                        "text/plain; version=0.0.4; charset=utf-8")

    def get_health(self, request: Request, caller: Caller) -> Response:
        self.service.first_probe.wait(SMI_PATIENCE_S + 5)
        health = self.service.health()
        if not caller.is_owner:
            health["checks"] = [{**check, "reading": ""} for check in health["checks"]]
        return json_response(health, 200 if health["is_healthy"] else 503)

    # /api: whole scripts by form, in the words of an earlier server

    def post_api_submit(self, request: Request, caller: Caller) -> Response:
        """`caller` is nobody yet: the token in config_file says who it is, and is right even where none was needed."""
        given = request.headers.get("content-type", "")
        parse_boundary(given)
        if request.body_length > MAX_FORM_BYTES:
            raise NexusError("too_large", f"the form has {request.body_length} bytes; at most {MAX_FORM_BYTES} are taken",
                             hint="let the script read what is large from a file")
        try:
            known: Caller | None = self.identify(request)
            refusal = None
        except NexusError as error:
            if "authorization" in request.headers:
                raise
            known, refusal = None, error
        client = f"{request.peer} {request.uid}"
        if known is None:
            self.unknown_forms.take(client)
        try:
            code, config = parse_submit_form(request.read_body(), given)
        finally:
            if known is None:
                self.unknown_forms.leave(client)
        found = self.find_bearer(config["token"], request) if "token" in config else known
        if found is None:
            assert refusal
            raise NexusError(refusal.kind, refusal.message, hint="put it into config_file: token: \"...\"")
        return self.submit_form(code, config, found, self.read_key(request))

    def submit_form(self, code: bytes, config: Mapping[str, Any], caller: Caller, key: str | None) -> Response:
        user = config.get("user_id", caller.user)
        if not caller.may_see(user):
            raise NexusError("forbidden", f"the token is {caller.user}'s, and user_id is {format_line(user, 60)}",
                             hint=f"user_id: \"{caller.user}\"")
        if user != caller.user:
            caller = Caller(user, f"{caller.name} for {format_line(user, 60)}")
        labels = tuple((name, config[name]) for name in ("competition_id", "project_id") if name in config)
        asked = {name: config[name] for name in ("expected_time", "gpus", "name", "priority") if name in config}
        content = digest_of(json.dumps({**config, "token": None}, sort_keys=True) + code.decode("latin-1")) if key else None
        job_id = self.service.submit_code(Submission("", labels=labels, **asked), code, caller, key, content)

        def find_place(state: State) -> tuple[str | None, int]:
            """0 for one that has started already: it was the first then."""
            job = state.jobs.get(job_id)
            return self.service.find_place(job) if job else None, state.position(job) if job and job.status == PENDING else 0
        node, place = self.service.store.read(find_place)
        return json_response({"job_id": job_id, "node_id": self.service.number_nodes().get(node), "status": PENDING,
                              "queue_position": place})

    def get_api_status(self, request: Request, caller: Caller, id: str) -> Response:
        job: Job = self.service.store.read(lambda state: find_own_job(state, id, caller))
        return json_response(submitted_json(self.service.describe_now(job), self.service.number_nodes()))

    def get_api_results(self, request: Request, caller: Caller, id: str) -> Response:
        job: Job = self.service.store.read(lambda state: find_own_job(state, id, caller))
        told: dict[str, Any] = {"job_id": job.id, "status": job.status}
        notes = []
        for name in STREAMS[:2]:
            told[name], size = read_tail(os.path.join(job.log_dir, f"{name}.log"), 0, MAX_RESULT_BYTES) if job.log_dir else ("", 0)
            if size > MAX_RESULT_BYTES:
                notes.append(f"{name} was cut to the last {MAX_RESULT_BYTES} of its {size} bytes; all: "
                             f"GET /jobs/{job.id}/logs?stream={name}")
        told.update(exit_code=job.exit_code, cause=job.cause, cause_line=job.cause_line)
        return json_response({**told, "note": "; ".join(notes)} if notes else told)

    def post_api_cancel(self, request: Request, caller: Caller, id: str) -> Response:
        self.service.cancel(id, caller, (PENDING, RUNNING))
        clock = self.service.clock
        give_up_at = clock.monotonic() + CANCEL_PATIENCE_S
        while True:                                     # most are gone at once, and nobody need ask again
            job: Job | None = self.service.store.read(lambda state: state.jobs.get(id))
            if job is None or job.status in FINAL or clock.monotonic() > give_up_at:
                return json_response({"job_id": id, "status": job.status if job else CANCELLED})
            clock.sleep(FOLLOW_INTERVAL_S[0])

    def get_api_nodes(self, request: Request, caller: Caller) -> Response:
        """A job that may run on any machine waits in the queue of this one, number 0; one for a node alone in that node's."""
        service = self.service
        service.first_probe.wait(SMI_PATIENCE_S + 5)
        now = service.clock.now()
        gpus: list[dict[str, Any]] = service.store.read(service.list_gpus)
        running = service.running_jobs()
        waiting: list[Job] = service.store.read(lambda state: [state.jobs[job_id] for _, job_id in state.order])
        bad = {check["name"] for check in service.health()["checks"] if not check["is_ok"]}
        heard = [node.name for node in service.nodes.values() if node.trouble is None]

        def describe(number: int, name: str) -> dict[str, Any]:
            own = [gpu for gpu in gpus if gpu["node"] == name]
            run = [job for job in running if (job.node or service.node) == name]
            wait = [job for job in waiting if (job.only_node if job.only_node in service.nodes else service.node) == name]
            times = [None if job.expected_time is None else max(0.0, job.expected_time - service.find_runtime_s(job, now)) for job in run]
            times += [job.expected_time for job in wait]
            is_well = name in heard and f"node {name}" not in bad if number else all(check.startswith("node ") for check in bad)
            gpus_there, free = len(own), sum(gpu["is_available"] for gpu in own)
            for node in service.cluster.nodes if service.cluster and not number else ():
                gpus_there, free = gpus_there + node.gpus, free + node.gpus - node.gpus_used
            return {"node_id": number, "name": name, "gpus": gpus_there, "free_gpus": free,
                    "running_jobs": len(run), "pending_jobs": len(wait),
                    "queue_seconds": None if None in times else round(sum(filter(None, times)), 3),
                    "is_healthy": is_well}
        return json_response([describe(number, name) for number, name in enumerate([service.node, *service.nodes])])

    def get_api_jobs(self, request: Request, caller: Caller) -> Response:
        status, user, limit = request.query.get("status"), request.query.get("user_id"), parse_number(request.query, "limit")
        jobs = self.select_jobs(caller, status, user, None, limit)
        nodes = self.service.number_nodes()
        return stream_list(submitted_json(job, nodes) for job in show_to(caller, self.describe_jobs(jobs)))


def parse_list(items: Sequence[Any]) -> list[Submission]:
    """Raises: usage, naming which of the list is wrong."""
    submissions = []
    for number, item in enumerate(items):
        try:
            submissions.append(parse_submission(item))
        except NexusError as error:
            raise NexusError(error.kind, f"job {number + 1} of {len(items)}: {error.message}; none was added", error.hint) from None
    ids = [submission.id for submission in submissions if submission.id]
    if len(ids) != len(set(ids)):
        refuse("the list names an id twice; none was added", hint="")
    return submissions


def parse_gpu_place(text: str) -> tuple[str, int]:
    """(machine, index) of `0`, `n1:0`; "" is this machine.  Raises: not_found."""
    node, _, index = text.rpartition(":")
    if not re.fullmatch(r"\d{1,4}", index):
        raise NexusError("not_found", f"there is no GPU '{format_line(text, 40)}'", hint="GPUs are told by their index, like 0 or n1:0")
    return node, int(index)


def show_to(caller: Caller, jobs: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (job if caller.may_see(job["user"]) else hide_private(job) for job in jobs)


def stream_list(items: Iterable[dict[str, Any]]) -> Response:
    """A JSON list, made while it is sent: one json.dumps of 100,000 jobs would hold the interpreter for a second."""
    def pieces() -> Iterator[bytes]:
        batch, opening = [], "["
        for item in items:
            batch.append(opening + encode_json(item))
            opening = ",\n"
            if len(batch) >= 100:
                yield "".join(batch).encode()
                batch = []
        yield ("".join(batch) + ("]\n" if opening != "[" else "[]\n")).encode()
    return Response(200, stream=pieces())


def find_host_name(request: Request) -> str:
    """By which name nexus is called, without the port."""
    return re.sub(r":\d*$", "", request.headers.get("host", "")).lower()


def is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def describe_peer(request: Request) -> str:
    return f"{request.peer}" + (f" ({find_user(request.uid)})" if request.uid is not None else "")


def read_files(offsets: dict[str, int]) -> Iterator[bytes]:
    for path in offsets:
        yield from read_new(path, offsets)


def find_log_start(path: str, tail: int | None, offset: int) -> int:
    """Where in a log begins what is asked for: its last `tail` lines, but nothing before `offset`.  A shorter file is a new one."""
    try:
        start = 0 if tail is None else find_tail(path, tail)
        return max(start, offset) if offset <= os.stat(path).st_size else start
    except OSError:
        return 0                        # not there yet, or no more


def read_new(path: str, offsets: dict[str, int]) -> Iterator[bytes]:
    """What a file has beyond offsets[path], which is moved on.  A shorter file is a new one."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < offsets.setdefault(path, 0):
                offsets[path] = 0
            file.seek(offsets[path])
            while True:
                piece = file.read(65536)
                if not piece:
                    return
                offsets[path] += len(piece)
                yield piece
    except OSError:
        return                          # not there yet, or no more


def make_handler(api: Api) -> type[http.server.BaseHTTPRequestHandler]:
    """What speaks HTTP on one connection: bytes to Request, Response to bytes."""
    import http.server
    import io
    import select
    import urllib.parse

    class Reader(io.BufferedReader):
        """Of a connection.  It sees whether each line of a head is one for whoever reads it: the parser ends lines at a \r alone too."""
        is_torn = False

        def readline(self, size: int | None = -1) -> bytes:
            line = super().readline(size)
            self.is_torn = self.is_torn or b"\r" in line[:-2] or not line.endswith(b"\n")
            return line

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        timeout = api.config.idle_timeout_seconds
        uid: int | None = None
        unread = 0

        def setup(self) -> None:
            super().setup()
            self.rfile: Reader = Reader(self.rfile.detach())
            self.has_uid = False
            self.place: Connection = self.server.open[self.request]  # type: ignore[attr-defined]
            if hasattr(self.connection, "do_handshake"):
                self.expect(0)
                self.connection.do_handshake()
            # What is sent and not taken for so long has no reader: its machine is off, asleep or cut off
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.timeout * 1000))
            # and whether there still is one is asked for while there is nothing to send: of a job that is silent for days
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(self.timeout)))

        def expect(self, length: int) -> None:
            """So many bytes, a request's head or body, must come within their time: the server ends the connection otherwise."""
            self.place.deadline = api.service.clock.monotonic() + api.config.request_timeout_seconds + length / BODY_BYTES_PER_S

        def handle_one_request(self) -> None:
            self.place.deadline, self.place.idle_since = None, api.service.clock.monotonic()
            try:
                if not self.rfile.peek(1):
                    self.close_connection = True
                    return
            except OSError:                     # it was silent for too long, or has gone
                self.close_connection = True
                return
            self.expect(0)
            super().handle_one_request()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):          # whatever the method: Api says whether it takes it
                return self.respond
            raise AttributeError(name)

        def find_uid(self) -> int | None:
            if not self.has_uid:                # once per connection, while its other end is waiting for the answer
                peer, own = self.client_address[:2], self.connection.getsockname()[:2]
                self.uid, self.has_uid = find_socket_uid(unmap(peer), unmap(own)), True
            return self.uid

        def respond(self) -> None:
            try:
                request = self.make_request()
                self.place.deadline = self.place.idle_since = None      # its head is there
                response = api.handle(request)
            except NexusError as error:
                self.close_connection = True
                response = error_response(error)
            try:
                self.send(response)
            except (OSError, ValueError, NexusError):
                self.close_connection = True    # the caller has gone
            finally:
                if response.stream is not None:
                    getattr(response.stream, "close", bool)()
                if response.after:
                    response.after()

        def make_request(self) -> Request:
            self.unread = 0
            try:
                split = urllib.parse.urlsplit(self.path)
            except ValueError:
                raise NexusError("usage", f"{format_line(self.path, 100)} is not an address") from None
            lengths = set(self.headers.get_all("Content-Length") or ["0"])
            if "Transfer-Encoding" in self.headers:
                raise NexusError("length_required", "a body needs a Content-Length", hint="do not send it in chunks")
            if len(lengths) != 1 or not re.fullmatch(r"\d{1,18}", min(lengths)):
                raise NexusError("usage", "Content-Length must be one number")
            for name in ("Host", "Origin", "Authorization", "Content-Type"):
                if len(self.headers.get_all(name) or []) > 1:
                    raise NexusError("usage", f"a request has one {name}")
            if self.rfile.is_torn or self.headers.get_payload():    # the parser has taken the rest of the head for a body
                raise NexusError("usage", "a line of the request's head is not like Name: text")
            self.unread = int(min(lengths))
            return Request(self.command, urllib.parse.unquote(split.path),
                           dict(urllib.parse.parse_qsl(split.query, keep_blank_values=True)),
                           {name.lower(): text for name, text in self.headers.items()}, self.read_body,
                           unmap(self.client_address[:2])[0], self.find_uid(), self.unread)

        def read_body(self) -> bytes:
            if self.unread > api.config.max_body_mb * 2**20:
                raise NexusError("too_large", f"the body has {self.unread} bytes; at most {api.config.max_body_mb:g} MB are taken",
                                 hint="send fewer jobs at once")
            expected, self.unread = self.unread, 0
            self.expect(expected)
            try:
                body = self.rfile.read(expected)
            except OSError as error:
                self.close_connection = True
                raise NexusError("usage", f"the body of {expected} bytes did not come: {error.strerror or error}") from None
            if len(body) < expected:
                self.close_connection = True
                raise NexusError("usage", f"the body ended after {len(body)} of {expected} bytes")
            self.place.deadline = None
            return body

        def send(self, response: Response) -> None:
            if self.request_version == "HTTP/0.9":
                self.request_version = "HTTP/1.0"
            if self.unread > 65536:
                self.close_connection = True
            elif self.unread:                   # a small body that nobody read is not the next request
                self.expect(self.unread)
                self.rfile.read(self.unread)
                self.unread, self.place.deadline = 0, None
            is_chunked = response.stream is not None and self.request_version != "HTTP/1.0"
            if response.stream is not None and not is_chunked:
                self.close_connection = True
            self.send_response(response.status)
            self.send_header("X-Content-Type-Options", "nosniff")
            for name, text in response.headers.items():
                self.send_header(name, text)
            if response.status != 204:
                self.send_header("Content-Type", response.content_type)
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            elif response.stream is None and response.status != 204:
                self.send_header("Content-Length", str(len(response.body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            head = b"".join(self._headers_buffer) + b"\r\n"
            self._headers_buffer: list[bytes] = []
            if response.stream is None or self.command == "HEAD":
                self.wfile.write(head if self.command == "HEAD" else head + response.body)
                if self.unread:
                    self.linger()
                return
            self.wfile.write(head)
            self.send_stream(response.stream, is_chunked)

        def linger(self) -> None:
            """Let the caller finish a body that nobody wants: a reset would take the answer from it."""
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            give_up_at = api.service.clock.monotonic() + LINGER_S
            while self.connection.recv(1 << 20) and api.service.clock.monotonic() < give_up_at:
                pass

        def send_stream(self, stream: Iterator[bytes], is_chunked: bool) -> None:
            for piece in stream:
                if piece:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
                elif self.has_gone():
                    raise ConnectionResetError
            if is_chunked:
                self.wfile.write(b"0\r\n\r\n")

        def has_gone(self) -> bool:
            """Whether the caller has closed its end."""
            poll = select.poll()                # select() cannot look at descriptors above 1023
            poll.register(self.connection, select.POLLRDHUP)
            return bool(poll.poll(0))

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """What http.server itself finds wrong with a request."""
            self.close_connection, self.unread = True, 0
            kind = next((kind for kind, (_, status) in KINDS.items() if status == code), "usage")
            body = encode_json({"error": kind, "message": message or "not a request", "hint": explain or ""}).encode()
            self.send(Response(code, body))

        def log_message(self, format: str, *args: Any) -> None:
            api.service.log.debug("%s " + format, self.client_address[0], *args)

    return Handler


class Connection:
    """What the server knows of one that is open.  All times are monotonic."""

    def __init__(self, client: str | None, now: float) -> None:
        self.client = client                        # whose it is, where the number of his is limited
        self.idle_since: float | None = now         # None while there is a request, whose head is there
        self.deadline: float | None = None          # until when it must have sent what is expected of it


def make_server(api: Api, host: str, port: int, tls: ssl.SSLContext | None = None) -> http.server.ThreadingHTTPServer:
    """The socket before Api.  Raises: conflict, when the port is taken; usage, when there is no such address."""
    import errno
    import http.server
    import socketserver
    import threading

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 1024
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            descriptors = current_limits()["nofile"][0]
            self.most = api.config.max_connections or (descriptors // 3 if descriptors > 0 else 4096)      # who reads a file takes two
            self.open: dict[Any, Connection] = {}           # by socket
            self.guard = threading.Lock()
            self.closed = threading.Event()
            socketserver.TCPServer.server_bind(self)        # HTTPServer's own looks its name up, which may hang
            self.server_name, self.server_port = host, self.server_address[1]

        def get_request(self) -> tuple[Any, Any]:
            try:
                request, address = super().get_request()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    api.service.fail("taking a connection", error)
                api.service.clock.sleep(ACCEPT_PAUSE_S)     # at once it would only fail again
                raise
            if tls:                                         # the handshake comes later, in the connection's own thread
                request = tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            return request, address

        def verify_request(self, request: Any, client_address: Any) -> bool:
            try:
                return self.admit(request, client_address)
            except Exception as error:                      # the next one may fare better
                api.service.fail("taking a connection", error)
                return False

        def admit(self, request: Any, client_address: Any) -> bool:
            """Whether to talk to a caller: descriptors must be left for the jobs, and nobody may take all connections."""
            made = Connection(find_client(request, client_address), api.service.clock.monotonic())
            with self.guard:
                others = [key for key, known in self.open.items() if known.client] if made.client else []
                alike = [key for key in others if self.open[key].client == made.client]
                fits = (self.has_room(alike, api.config.max_connections_per_client) and
                        self.has_room(others, self.most - self.most // 4) and          # the rest is left for the owner
                        self.has_room(list(self.open) if len(self.open) >= self.most else [], self.most))
                if fits:
                    self.open[request] = made
            return fits

        def has_room(self, there: list[Any], most: int) -> bool:
            """Whether one more fits; the one that is idle for the longest gives way."""
            if len(there) < most:
                return True
            idle = [(since, place) for place, key in enumerate(there) if (since := self.open[key].idle_since) is not None]
            if idle:
                self.end(there[min(idle)[1]])
            return bool(idle)

        def end(self, request: Any) -> None:
            """Let a connection's thread find it closed."""
            self.open[request].idle_since = self.open[request].deadline = None
            try:
                socket.socket.shutdown(request, socket.SHUT_RDWR)
            except OSError:
                pass

        def sweep(self) -> None:
            """End, again and again, the connections that have not sent in time what was expected of them."""
            most = 0
            while not self.closed.wait(SWEEP_INTERVAL_S):
                most = max(most, len(self.open))
                if most > 50 and len(self.open) < most // 4:        # a crowd has gone
                    most = len(self.open)
                    tell_malloc("malloc_trim", 0)
                now = api.service.clock.monotonic()
                with self.guard:
                    for request in [key for key, known in self.open.items() if (until := known.deadline) is not None and now > until]:
                        self.end(request)

        def serve_forever(self, poll_interval: float = 3600) -> None:
            threading.Thread(target=self.sweep, name="connections", daemon=True).start()
            while not self.closed.is_set():
                try:
                    return super().serve_forever(poll_interval)
                except Exception as error:                  # without it the service would be deaf until its end
                    api.service.fail("serving", error)
                    api.service.clock.sleep(ACCEPT_PAUSE_S)

        def server_close(self) -> None:
            self.closed.set()
            super().server_close()

        def shutdown_request(self, request: Any) -> None:
            with self.guard:
                self.open.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            error = sys.exc_info()[1]
            if not isinstance(error, (OSError, ValueError)):
                api.service.fail("a connection", error or Exception("unknown"))

    try:
        return Server((host, port), make_handler(api))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            uid = find_socket_uid((host, port), None)
            owner = f" by {find_user(uid)}" if uid is not None else ""
            raise NexusError("conflict", f"port {port} on {host} is in use{owner}",
                             hint="set another one: nexus config edit, [service] port") from None
        raise NexusError("usage", f"cannot listen on {host}, port {port}: {error.strerror or error}",
                         hint="nexus config edit, [service] host and port") from None
    except (OverflowError, TypeError, ValueError):          # a name that cannot be looked up
        raise NexusError("usage", f"cannot listen on {host}, port {port}", hint="nexus config edit, [service] host and port") from None


def find_client(request: Any, address: Any) -> str | None:
    """For whom a connection counts: another user of this machine, or another address.  None: the owner's do not."""
    peer = unmap(address[:2])
    uid = find_socket_uid(peer, unmap(request.getsockname()[:2]))
    return None if uid == os.geteuid() else f"uid {uid}" if uid is not None else peer[0]


M_ARENA_MAX = -8                        # Source: mallopt(3)


def tell_malloc(call: str, *arguments: int) -> None:
    """Where the C library is glibc: its malloc gives back memory only when told to."""
    import ctypes
    try:
        getattr(ctypes.CDLL(None), call)(*arguments)
    except (AttributeError, OSError):
        pass


def find_file(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def load_tls(config: ServiceConfig) -> ssl.SSLContext | None:
    """What https needs; None for http.  Raises: usage."""
    if not config.tls_cert and not config.tls_key:
        return None
    import ssl
    if not config.tls_cert or not config.tls_key:
        raise NexusError("usage", "[service] tls_cert and tls_key belong together", hint="set both, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in (config.tls_cert, config.tls_key):
        if not os.access(find_file(path), os.R_OK):
            raise NexusError("usage", f"[service] tls_cert or tls_key: {find_file(path)} is not there, or cannot be read",
                             hint="both name PEM files")
    try:
        context.load_cert_chain(find_file(config.tls_cert), find_file(config.tls_key), lambda: "")
    except (OSError, ValueError) as error:              # an SSLError is an OSError
        why = getattr(error, "strerror", None) or str(error)
        raise NexusError("usage", f"[service] tls_cert {config.tls_cert} and tls_key {config.tls_key} cannot be used: {why}",
                         hint="both must be PEM files that can be read, of one key, without a passphrase") from None
    return context


def check_exposure(config: ServiceConfig, tokens: Sequence[Token], now: float) -> None:
    """Nobody listens to other machines by mistake.  Raises: usage."""
    if not is_loopback(config.host) and all(describe_token_end(token, now) for token in tokens):
        raise NexusError("usage", f"[service] host = {config.host} lets other machines call, and no token was made for anybody yet",
                         hint="make one for each who may: nexus token create USER; or set host = \"127.0.0.1\"")


def unmap(address: tuple[str, int]) -> tuple[str, int]:
    """An IPv4 address that came in on an IPv6 socket as what it is."""
    return (address[0][7:] if address[0].startswith("::ffff:") and "." in address[0] else address[0]), address[1]


def load_token(layout: Layout, clock: Clock) -> str:
    """The owner's token; made the first time."""
    token = (read_text(layout.token_file) or "").strip()
    if len(token) < 16:
        token = clock.new_token()
        try:
            write_atomic(layout.token_file, [token + "\n"])
        except OSError as error:
            raise describe_disk_error(error, "write", layout.token_file) from None
    return token


def make_log(layout: Layout, config: ServiceConfig) -> logging.Logger:
    """service.log, rotated.  A full disk costs lines of it, and nothing else."""
    import logging
    import logging.handlers
    logging.raiseExceptions = False
    log = logging.getLogger("nexus")
    os.close(os.open(layout.service_log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))       # commands are in it
    handler = logging.handlers.RotatingFileHandler(
        layout.service_log, maxBytes=int(config.log_max_mb * 2**20), backupCount=config.log_backups, encoding="utf-8",
        errors="backslashreplace")
    handler.setFormatter(make_json_formatter() if config.log_format == "json" else
                         logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(config.log_level)
    log.propagate = False
    return log


def make_json_formatter() -> logging.Formatter:
    """One object a line."""
    import logging

    class JsonFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            facts = {name: getattr(record, name) for name in ("job_id", "gpu_ids", "required_gpus", "attempt") if hasattr(record, name)}
            if record.exc_info:
                facts["traceback"] = self.formatException(record.exc_info)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            return encode_json({"timestamp": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname, "logger": record.name,
                                "thread": record.threadName, "message": record.getMessage(), **facts})

    return JsonFormatter()


LOCK_PATIENCE_S = 10.0          # for a service that ends, or is just starting


class RunsAlready(NexusError):
    """Another service has this home."""


def serve(layout: Layout, config: Config, environ: Mapping[str, str], is_taking_over: bool, page: str, config_file: str | None) -> None:
    """Be the service until stopped; browsers get `page`.  `config_file`: if it is not the usual one.

    Raises: conflict, when one runs; unavailable; usage.
    """
    import gc
    import signal
    import threading
    gc.disable()                                # until all is recovered: it would look at 100,000 jobs over and over
    clock = Clock()
    for folder in (layout.home, layout.log_dir):
        make_folder(folder)
    check_machine(layout, is_taking_over)
    tls = load_tls(config.service)
    check_exposure(config.service, TokenFile(layout).read(), clock.now())
    if environ.get("NEXUS_ROLE") != "service":      # somebody wants it; a supervisor only knows that somebody did
        mark_stopped(layout, False)
    take_service_lock(layout, clock)            # for as long as this process lives
    log = make_log(layout, config.service)
    store = Store(layout, clock, log)
    if is_taking_over:
        store.is_taking_over = True
    store.recover()
    token = load_token(layout, clock)
    machine = Machine(config, layout, store.service_id)
    service = Service(config, layout, store, machine, clock, log, environ)
    service.sweep_code()                        # nobody can submit any yet
    tell_malloc("mallopt", M_ARENA_MAX, 1)      # one for each thread would keep what a crowd of them took
    server = make_server(Api(service, token, page), config.service.host, config.service.port, tls)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, lambda *_: None)       # what is ignored or blocked here would be so in jobs, for ever
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    sys.setswitchinterval(0.0005)               # a thread that makes a long list lets the others in sooner
    gc.collect()
    gc.freeze()                                 # what was recovered stays: the collector need not look at it again
    gc.enable()
    own = machine.processes.find(os.getpid())
    try:
        write_atomic(layout.service_file, [json.dumps({
            "pid": os.getpid(), "started": own.started if own else 0, "boot_id": machine.boot_id, "host": config.service.host,
            "port": server.server_address[1], "config": config_file, "tls_cert": find_file(config.service.tls_cert),
            "instance": clock.new_token(), "version": __version__, "hash": file_hash(),
            "machine": store.host, "machine_id": store.machine_id}) + "\n"])
    except OSError as error:
        raise describe_disk_error(error, "write", layout.service_file) from None
    if os.path.exists(layout.stopped_file):         # looked at now that others see the service; who stops it looks the other way round
        os.unlink(layout.service_file)
        return
    log.info("Service started: nexus %s (%s), pid %d, %s://%s:%d", __version__, file_hash(), os.getpid(), "https" if tls else "http",
             config.service.host, server.server_address[1])
    service.begin_nodes()                       # whoever asks from now on may name them
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    service.run()
    server.server_close()
    mark_stopped(layout, True)
    try:
        store.save_snapshot()
        os.unlink(layout.service_file)
    except OSError as error:
        log.warning("At the end: %s", error)
    log.info("Service ended; running jobs go on")


def take_service_lock(layout: Layout, clock: Clock) -> None:
    """Raises: conflict, when another service has it.  One that has taken its service.json away is about to let go."""
    give_up_at = clock.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            if take_lock(layout.lock_file) is not None:
                return
        except OSError as error:
            raise describe_disk_error(error, "lock", layout.lock_file) from None
        running = read_json(layout.service_file)
        if running or clock.monotonic() > give_up_at:
            raise RunsAlready("conflict", f"a nexus service for {layout.home} runs already (pid {(running or {}).get('pid', 'unknown')})",
                              hint="nexus stop ends it; nexus restart starts it anew")
        clock.sleep(0.02)


def mark_stopped(layout: Layout, is_stopped: bool) -> None:
    """Let supervisors that are waiting to start the service again know that nobody wants it."""
    try:
        if is_stopped:
            os.close(os.open(layout.stopped_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        else:
            os.unlink(layout.stopped_file)
    except OSError:
        pass


def check_machine(layout: Layout, is_taking_over: bool) -> None:
    """A home that machines share is one machine's at a time.  Raises: conflict."""
    running = read_json(layout.service_file)
    if running and running.get("machine_id") != read_machine_id() and not is_taking_over:
        raise describe_other_machine(str(running.get("machine")), f"{layout.service_file} says so")


# ==== 15. DASHBOARD ==== the page at GET /, one string of HTML, CSS and JavaScript
# It is a client of the API as any other: it has no data of its own, and asks for a token where the API does.  Every
# text reaches the document as a text node, and the answer's Content-Security-Policy lets nothing run but this script.

DASHBOARD_PAGE = r'''<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>nexus</title>
<link rel="icon"
  href="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E
  %3Crect width='16' height='16' rx='4' fill='%232159c9'/%3E
  %3Cpath d='M4.5 12V4l7 8V4' fill='none' stroke='%23fff' stroke-width='2'/%3E%3C/svg%3E">
<style>
:root {
  color-scheme: light dark;
  --bg: #f3f5f7; --panel: #fff; --sunk: #f0f2f5; --ink: #161a1f; --muted: #57606b; --line: #dce1e6; --edge: #868f9a;
  --accent: #2159c9; --on-accent: #fff; --accent-soft: #e4edfc; --fill: #3f78e6; --memory: #9a5fd0;
  --ok: #0c6636; --ok-soft: #dff3e7; --warn: #754a00; --warn-soft: #fcefd2; --bad: #a81e18; --bad-soft: #fde7e5;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  --paper: #10141a; --print: #d5dbe3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #0e1114; --panel: #171b20; --sunk: #1e2329; --ink: #e5e9ee; --muted: #9ba5b0; --line: #2a3037; --edge: #6c7682;
    --accent: #8db4ff; --on-accent: #0b1526; --accent-soft: #1b2a45; --fill: #5a8ff0; --memory: #b98ae6;
    --ok: #6fd19a; --ok-soft: #12301f; --warn: #e8b75a; --warn-soft: #352811; --bad: #ff9990; --bad-soft: #3b1a18;
    --paper: #090c0f;
  }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { scroll-padding-top: 4.5rem; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
h1, h2, h3, h4, p, dl, dd, ul, ol { margin: 0; padding: 0; }
ul, ol { list-style: none; }
h1 { font-size: 1.3rem; line-height: 1.3; }
h2 { font-size: 1rem; line-height: 1.3; }
h4 { font-size: 1.1em; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
code, pre, .mono { font-family: var(--mono); font-size: .93em; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
main:focus, h1:focus, h2:focus { outline: none; }
.muted { color: var(--muted); }
.small { font-size: .88em; }
.skip { position: absolute; left: -999px; top: .5rem; z-index: 9; padding: .6rem 1rem; background: var(--panel); border-radius: 6px; }
.skip:focus { left: .5rem; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }

button, input, select, textarea { font: inherit; color: inherit; border-radius: 6px; }
button { min-height: 30px; padding: .15rem .7rem; border: 1px solid var(--line); background: var(--panel); cursor: pointer;
  white-space: nowrap; }
button:hover { border-color: var(--edge); background: var(--sunk); }
button:disabled { opacity: .55; cursor: default; }
button.primary { background: var(--accent); border-color: var(--accent); color: var(--on-accent); font-weight: 600; }
button.primary:hover { filter: brightness(1.08); }
button.danger { color: var(--bad); }
button.danger.primary { background: var(--bad); border-color: var(--bad); color: var(--panel); }
button.link { border: 0; background: none; color: var(--accent); padding: 0 .2rem; }
input, select, textarea { min-height: 34px; width: 100%; padding: .3rem .6rem; border: 1px solid var(--edge); background: var(--panel); }
textarea { resize: vertical; font-family: var(--mono); font-size: .93em; }
input[type=checkbox] { flex: none; width: 18px; min-height: 18px; height: 18px; margin: 0; accent-color: var(--accent); }
label { font-weight: 600; font-size: .9em; }
label.check { display: flex; gap: .5rem; align-items: center; font-weight: 400; }

header { position: sticky; top: 0; z-index: 5; background: var(--panel); border-bottom: 1px solid var(--line); }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem 1rem; max-width: 1240px; margin: 0 auto; padding: .5rem 1.25rem; }
.brand { display: flex; align-items: center; gap: .5rem; font-size: 1.1rem; font-weight: 700; color: var(--ink); letter-spacing: -.01em; }
.brand svg { width: 22px; height: 22px; }
.brand:hover { text-decoration: none; }
nav { display: flex; gap: .15rem; margin-right: auto; }
nav a { display: flex; align-items: center; gap: .4rem; min-height: 32px; padding: 0 .6rem; border-radius: 6px; color: var(--ink); }
nav a:hover { background: var(--sunk); text-decoration: none; }
.count { min-width: 1.5em; padding: 0 .4em; border-radius: 1em; background: var(--sunk); color: var(--muted); text-align: center;
  font-size: .86em; font-weight: 600; }
.tools { display: flex; align-items: center; gap: .5rem; }
.state { display: inline-flex; align-items: center; gap: .4rem; color: var(--muted); white-space: nowrap; }
.state::before { content: ""; width: 8px; height: 8px; border-radius: 50%; background: var(--edge); }
.state.live::before { background: #2da160; }
.state.lost { color: var(--bad); font-weight: 600; }
.state.lost::before { background: currentColor; animation: pulse 1.2s infinite; }
@keyframes pulse { 50% { opacity: .25; } }

main, footer { display: block; max-width: 1240px; margin: 0 auto; padding: 1.1rem 1.25rem; }
footer { padding-top: 0; color: var(--muted); font-size: .88em; display: flex; flex-wrap: wrap; gap: .3rem 1.5rem;
  justify-content: space-between; }
kbd { padding: 0 .35em; border: 1px solid var(--line); border-bottom-width: 2px; border-radius: 4px; background: var(--panel);
  font: inherit; font-family: var(--mono); font-size: .92em; color: var(--ink); }
section { margin-bottom: 1.5rem; }
.head { display: flex; flex-wrap: wrap; align-items: center; gap: .3rem .6rem; margin-bottom: .6rem; min-height: 30px; }
.head .grow, .grow { flex: 1; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; }
.empty { padding: 1.1rem; color: var(--muted); text-align: center; }
.banner { display: block; margin-bottom: .8rem; padding: .6rem .9rem; border-radius: 8px; background: var(--warn-soft);
  color: var(--warn); }
.banner.bad { background: var(--bad-soft); color: var(--bad); }
.banner.note { background: var(--accent-soft); color: var(--ink); }
.badge { display: inline-block; padding: .02rem .5rem; border-radius: 1em; background: var(--sunk); color: var(--muted);
  font-size: .86em; font-weight: 600; white-space: nowrap; }
.badge.ok { background: var(--ok-soft); color: var(--ok); }
.badge.warn { background: var(--warn-soft); color: var(--warn); }
.badge.bad { background: var(--bad-soft); color: var(--bad); }
.badge.busy { background: var(--accent-soft); color: var(--accent); }
.id { font-family: var(--mono); font-weight: 600; }
.command { font-family: var(--mono); font-size: .93em; }
.command, .what, .cause, td strong, td .small, td.whole, #job, .banner { overflow-wrap: anywhere; }
.clip { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; overflow: hidden; }

#notices { position: fixed; z-index: 8; right: 1rem; bottom: 1rem; width: min(26rem, calc(100vw - 2rem)); display: grid; gap: .5rem; }
.notice { display: flex; gap: .6rem; align-items: start; padding: .6rem .5rem .6rem .9rem; border: 1px solid var(--line);
  border-left: 4px solid var(--ok);
  border-radius: 8px; background: var(--panel); box-shadow: 0 6px 24px rgb(0 0 0 / .18); overflow-wrap: anywhere; }
.notice.bad { border-left-color: var(--bad); }
.notice div { flex: 1; min-width: 0; }

.gpus { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(min(280px, 100%), 1fr)); }
.machine + .machine { margin-top: 1.1rem; }
.machine .head { margin-bottom: .45rem; }
.machine .head .muted { flex: 1 1 10rem; overflow-wrap: anywhere; }
.machine .fold { padding: 0 .3rem 0 0; border-color: transparent; background: none; font-size: 1rem; font-weight: 600; }
.machine .fold::before { content: "\25b8"; content: "\25b8" / ""; display: inline-block; width: 1.1em; color: var(--muted);
  font-weight: 400; }
.machine .fold[aria-expanded=true]::before { content: "\25be"; content: "\25be" / ""; }
.machine .banner { margin-bottom: .5rem; }
.tiles { display: grid; gap: .4rem; grid-template-columns: repeat(auto-fill, minmax(min(8.2rem, 100%), 1fr)); }
.tile { display: grid; grid-template-columns: auto minmax(0, 1fr) auto; gap: .2rem .45rem; align-items: baseline;
  padding: .35rem .6rem .5rem; border-left: 3px solid var(--edge); border-radius: 8px; }
.tile .state-of { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.tile .track { height: 4px; }
.tile .tracks { grid-column: 1 / -1; display: grid; gap: 3px; }
.tile.ok { border-left-color: #2da160; } .tile.ok .state-of { color: var(--ok); }
.tile.busy { border-left-color: var(--fill); }
.tile.warn { border-left-color: #c08a1e; } .tile.warn .state-of { color: var(--warn); }
.tile.bad { border-left-color: var(--bad); } .tile.bad .state-of { color: var(--bad); }
.gpu { display: flex; flex-direction: column; gap: .5rem; padding: .8rem .9rem .7rem; }
.gpu .top { display: flex; align-items: baseline; gap: .5rem; }
.gpu .top .name { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.gauge { display: grid; grid-template-columns: 1fr auto; gap: .15rem .6rem; }
.track { grid-column: 1 / -1; height: 7px; border-radius: 4px; background: var(--sunk); box-shadow: inset 0 0 0 1px var(--line);
  overflow: hidden; }
.track i { display: block; width: 0; height: 100%; background: var(--fill); transition: width .4s; }
.track.memory i { background: var(--memory); }
.curve { display: block; width: 100%; height: 46px; border-bottom: 1px solid var(--line); }
.curve .area { fill: var(--fill); opacity: .18; }
.curve path { fill: none; stroke: var(--fill); stroke-width: 1.4; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.curve path.area { stroke: none; fill: var(--fill); }
.curve path.memory { stroke: var(--memory); }
.curve line { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; stroke-dasharray: 2 3; }
.axis { display: flex; justify-content: space-between; margin-top: .15rem; font-size: .8em; color: var(--muted); }
.axis b { font-weight: 400; }
.axis b::before { content: ""; display: inline-block; width: .8em; height: 3px; margin-right: .35em; vertical-align: middle;
  background: var(--fill); border-radius: 2px; }
.axis b + b { margin-left: .9em; } .axis b + b::before { background: var(--memory); }
.users { flex: 1; display: grid; gap: .15rem; align-content: start; }
.users li { display: flex; gap: .5rem; align-items: baseline; min-width: 0; }
.users .command { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.gpu .bottom { display: flex; align-items: center; gap: .6rem; }

.filters { display: grid; grid-template-columns: minmax(10rem, 1fr) repeat(3, minmax(0, 10rem)) auto; gap: .5rem; margin-bottom: 1.2rem;
  align-items: center; }
#running-list { display: grid; gap: .6rem; grid-template-columns: minmax(0, 1fr); }
.run { padding: .65rem .9rem; }
.run .line { display: grid; grid-template-columns: 3.2rem minmax(0, 1fr) auto auto; gap: .3rem .9rem; align-items: center; }
.run .facts { display: flex; flex-wrap: wrap; gap: 0 .9rem; }
.run .clock { font-size: 1.05rem; font-weight: 600; text-align: right; min-width: 5rem; }
.run .actions, td .actions { display: flex; gap: .35rem; justify-content: flex-end; align-items: center; }
.run .log { margin-top: .6rem; }

.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th { padding: .45rem .7rem; text-align: left; font-size: .82em; font-weight: 600; color: var(--muted);
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { padding: .45rem .7rem; vertical-align: top; border-bottom: 1px solid var(--line); }
tbody tr:last-child td { border-bottom: 0; }
tbody tr:hover { background: var(--sunk); }
td.number, th.number { text-align: right; }
td.fit { white-space: nowrap; }
td.command { width: 34%; min-width: 14rem; font: inherit; }
.starts { display: block; }
td select { width: auto; min-height: 30px; padding: 0 .3rem; border-color: var(--line); }
.cause { display: block; margin-top: .1rem; color: var(--bad); font-family: var(--mono); font-size: .86em; overflow-wrap: anywhere; }
.more { display: flex; justify-content: center; padding: .5rem; border-top: 1px solid var(--line); }

.log { border-radius: 8px; overflow: hidden; background: var(--paper); color: var(--print); border: 1px solid var(--line); }
.log .head { margin: 0; padding: .35rem .5rem .35rem .8rem; background: var(--panel); color: var(--ink);
  border-bottom: 1px solid var(--line); }
.log .head select { width: auto; }
.log label { white-space: nowrap; }
.log .told { flex: 1 1 8rem; color: var(--muted); font-size: .88em; }
.lines { height: 22rem; overflow: auto; padding: .5rem .8rem; font: 12.5px/1.5 var(--mono); white-space: pre-wrap;
  overflow-wrap: anywhere; tab-size: 8; overflow-anchor: none; contain: strict; }
#job .lines { height: min(65vh, 44rem); }
#job .lines.over { height: auto; min-height: 5rem; max-height: min(65vh, 44rem); contain: content; }
.lines.long { white-space: pre; overflow-wrap: normal; }
.lines:focus-visible { outline-offset: -3px; }
.lines div { min-height: 1.5em; }
.lines .err { margin-left: -.8rem; padding-left: calc(.8rem - 3px); border-left: 3px solid #8e3b36; }
.bold { font-weight: 700; } .dim { opacity: .72; } .italic { font-style: italic; } .under { text-decoration: underline; }
.strike { text-decoration: line-through; }
.fg0 { color: #7f8a97; } .fg1 { color: #ff7b72; } .fg2 { color: #5fcf80; } .fg3 { color: #e3b341; } .fg4 { color: #79b0ff; }
.fg5 { color: #d79bff; } .fg6 { color: #4fd0d8; } .fg7 { color: #d5dbe3; }
.fg8 { color: #98a3b0; } .fg9 { color: #ffa198; } .fg10 { color: #7ee79b; } .fg11 { color: #f5d067; } .fg12 { color: #a5ccff; }
.fg13 { color: #e8c0ff; } .fg14 { color: #7fe5ec; } .fg15 { color: #fff; }
.bg0 { background: #30363d; } .bg1 { background: #8e1519; } .bg2 { background: #0f5a28; } .bg3 { background: #6b4a00; }
.bg4 { background: #0d4a99; } .bg5 { background: #6a2fa0; } .bg6 { background: #0b5a63; } .bg7 { background: #b6bec8; }
.bg8 { background: #4a525b; } .bg9 { background: #b52a2a; } .bg10 { background: #1a7a3a; } .bg11 { background: #8a6100; }
.bg12 { background: #1f63c4; } .bg13 { background: #8a4bc4; } .bg14 { background: #12767f; } .bg15 { background: #fff; }
.fgp { color: var(--paper); } .bgp { background: var(--print); }

.facts-list { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: 0 1.6rem;
  padding: .5rem .95rem; }
.facts-list div { display: grid; grid-template-columns: 8.5rem minmax(0, 1fr); gap: .6rem; padding: .3rem 0;
  border-bottom: 1px solid var(--line); }
.facts-list .wide { grid-column: 1 / -1; }
.facts-list dt { color: var(--muted); }
.facts-list dd { overflow-wrap: anywhere; }
.pad { padding: .7rem .95rem; }
.steps { display: flex; flex-wrap: wrap; gap: .4rem .5rem; align-items: center; }
.steps li + li::before { content: "\2192"; margin-right: .5rem; color: var(--muted); }
.reasons li { padding: .15rem 0; }

dialog { width: min(38rem, calc(100vw - 1.5rem)); max-height: calc(100dvh - 2rem); overflow: auto; padding: 1.2rem 1.3rem;
  border: 1px solid var(--line); border-radius: 12px;
  background: var(--panel); color: var(--ink); box-shadow: 0 20px 60px rgb(0 0 0 / .35); }
dialog::backdrop { background: rgb(8 12 18 / .5); }
dialog h2 { margin-bottom: .5rem; font-size: 1.15rem; }
dialog pre { margin: .7rem 0; padding: .5rem .7rem; max-height: 9rem; overflow: auto; border-radius: 6px; background: var(--sunk); }
.form { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: .7rem; margin-top: .6rem; }
.form > * { grid-column: span 3; display: grid; gap: .2rem; align-content: start; }
.form > .third { grid-column: span 2; } .form > .all { grid-column: 1 / -1; }
.form .help { font-size: .85em; color: var(--muted); font-weight: 400; }
summary { cursor: pointer; padding: .3rem 0; color: var(--accent); }
.buttons { display: flex; justify-content: flex-end; gap: .5rem; margin-top: 1.1rem; }
dialog .check, .lost { margin-top: .7rem; }
.fault { color: var(--bad); overflow-wrap: anywhere; }
.locked nav, .locked .tools button, .locked .keys { display: none; }
.steps select { width: auto; min-height: 30px; }
#job > p { margin-bottom: .5rem; }
#login { max-width: 26rem; margin: 8vh auto 0; padding: 1.4rem; }
#login form { display: grid; gap: .6rem; margin-top: .8rem; }

@media (max-width: 900px) { .filters { grid-template-columns: repeat(3, minmax(0, 1fr)) auto; } .filters .text { grid-column: 1 / -1; } }
@media (max-width: 640px) {
  .bar { gap: .3rem .6rem; padding: .4rem .8rem; }
  .brand { margin-right: auto; } #host { display: none; }
  nav { order: 3; width: 100%; justify-content: space-between; } nav a { padding: 0 .35rem; min-height: 40px; }
  main, footer { padding: .8rem; }
  button, input, select, textarea, td select { min-height: 40px; }
  button.link { padding: 0 .5rem; }
  .count { font-size: .82em; }
  .run .line { grid-template-columns: minmax(0, 1fr) auto; } .run .line .what { grid-column: 1 / -1; grid-row: 2; }
  .run .actions { grid-column: 1 / -1; justify-content: stretch; }
  .run .actions button { flex: 1; }
  .scroll { overflow: visible; }
  table.cards, .cards tbody, .cards tr, .cards td { display: block; }
  .cards thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .cards tr { display: flex; flex-wrap: wrap; align-items: baseline; gap: .15rem 1rem; padding: .7rem .9rem;
    border-bottom: 1px solid var(--line); }
  .cards tr:last-child { border-bottom: 0; }
  .cards td { padding: 0; border: 0; white-space: normal; }
  .cards td::before { content: attr(data-label) "\00a0"; color: var(--muted); font-size: .88em; }
  .cards td.bare, .cards td.whole { flex: 0 0 100%; width: auto; min-width: 0; }
  .cards td.bare::before, .cards td.bare-label::before { content: none; }
  .cards td:empty { display: none; }
  .cards td .actions { justify-content: stretch; margin-top: .3rem; } .cards td .actions > * { flex: 0 1 8rem; }
  .facts-list div { grid-template-columns: 7rem minmax(0, 1fr); }
  .lines { height: 18rem; padding: .5rem .8rem; font-size: 11.5px; } .log .head .told { flex-basis: 100%; }
  .gpu { gap: .4rem; } .curve { height: 38px; }
  .tiles { grid-template-columns: repeat(auto-fill, minmax(min(5rem, 100%), 1fr)); gap: .35rem; }
  .tile { grid-template-columns: auto minmax(0, 1fr); padding: .3rem .45rem .45rem; } .tile .load-of { display: none; }
  .form { grid-template-columns: 1fr 1fr; } .form > *, .form > .third { grid-column: span 1; } .form > .wide { grid-column: 1 / -1; }
  footer .keys, #filter-clear:disabled { display: none; }
}
@media (pointer: coarse) { button, input, select, textarea, td select, nav a { min-height: 40px; } }
@media (prefers-reduced-motion: reduce) { * { transition: none !important; animation: none !important; scroll-behavior: auto !important; } }
</style>
</head>
<body>
<a class="skip" href="#/main">Skip to the content</a>
<header>
  <div class="bar">
    <a class="brand" href="#/"><svg viewBox="0 0 16 16" aria-hidden="true"><rect width="16" height="16" rx="4" fill="#2159c9"/><path
      d="M4.5 12V4l7 8V4" fill="none" stroke="#fff" stroke-width="2"/></svg>nexus</a>
    <span id="host" class="muted"></span>
    <nav aria-label="Parts of the page">
      <a href="#/gpus">GPUs</a>
      <a href="#/running">Running <span class="count" id="running-count">-</span></a>
      <a href="#/queue">Queue <span class="count" id="queue-count">-</span></a>
      <a href="#/history">History <span class="count" id="history-count">-</span></a>
    </nav>
    <div class="tools">
      <span id="paused" class="badge warn" hidden>PAUSED</span>
      <span id="connection" class="state" role="status">connecting</span>
      <button id="pause" type="button">Pause</button>
      <button id="add" type="button" class="primary" aria-keyshortcuts="a">Add job</button>
    </div>
  </div>
</header>
<main id="main" tabindex="-1">
  <section id="login" class="panel" hidden>
    <h1>This service asks for a token</h1>
    <p id="login-why" class="muted" role="alert"></p>
    <form autocomplete="off">
      <label for="token">Token</label>
      <input id="token" type="password" autocomplete="off" spellcheck="false" required>
      <p class="small muted">It is kept for this tab alone, until the tab is closed.</p>
      <button class="primary">Continue</button>
    </form>
  </section>
  <div id="overview" hidden>
    <h1 class="unseen">nexus: GPUs and jobs</h1>
    <div id="banners"></div>
    <section aria-labelledby="gpus"><div class="head"><h2 id="gpus" tabindex="-1">GPUs</h2><span id="gpus-told" class="muted"></span>
      </div><div id="gpu-list"></div></section>
    <search class="filters" aria-label="Filter jobs">
      <input class="text" id="filter" type="search" placeholder="Filter by id, name, command, cause&hellip;"
        aria-label="Filter by text" aria-keyshortcuts="/">
      <select id="filter-status" aria-label="Filter by status"></select>
      <select id="filter-user" aria-label="Filter by user"></select>
      <select id="filter-group" aria-label="Filter by group"></select>
      <button id="filter-clear" type="button" disabled>Clear</button>
    </search>
    <section id="running-part" aria-labelledby="running"><div class="head"><h2 id="running" tabindex="-1">Running</h2><span
      id="running-told" class="muted"></span></div><ul id="running-list"></ul></section>
    <section id="queue-part" aria-labelledby="queue"><div class="head"><h2 id="queue" tabindex="-1">Queue</h2><span
      id="queue-told" class="muted"></span></div></section>
    <section id="history-part" aria-labelledby="history"><div class="head"><h2 id="history" tabindex="-1">History</h2><span
      id="history-told" class="muted"></span></div></section>
  </div>
  <article id="job" hidden></article>
</main>
<footer>
  <span class="keys">Keys: <kbd>/</kbd> filter &nbsp; <kbd>a</kbd> add a job &nbsp; <kbd>h</kbd> home &nbsp; <kbd>g</kbd> <kbd>r</kbd>
    <kbd>q</kbd> <kbd>y</kbd> GPUs, running, queue, history &nbsp; <kbd>Esc</kbd> closes</span>
  <span><span id="version"></span> <button id="forget" type="button" class="link" hidden>Forget the token</button></span>
</footer>
<div id="notices" aria-live="polite"></div>
<dialog id="confirm" aria-labelledby="confirm-title"></dialog>
<dialog id="add-dialog" aria-labelledby="add-title"></dialog>
<noscript><p class="banner">This page needs JavaScript. Without it: nexus on the command line, or GET /status.</p></noscript>
<script>
'use strict';
const QUEUE_LIMIT = 1000, HISTORY_LIMIT = 1000, PAGE = 100;      // rows asked for; rows shown at once
const LOG_TAIL = 2000, LOG_LINES = 5000, LINE_LENGTH = 20000;    // lines at first; lines kept; characters kept of a line
const FRAME_MS = 12, FRAME_LINES = 500;                          // of a log, spent and drawn in one frame
const LOG_PAUSES_MS = [200, 1000, 5000];                         // before it is read again: after news, without any, after a failure
const ANSWER_MS = 20000, SILENCE_MS = 45000;                     // waited for an answer; for the next sign of life of the events
const HIDDEN_MS = 10000;                                         // so long a tab that is not seen keeps its connection
const FINAL = ['completed', 'failed', 'cancelled'], STATUSES = ['running', 'pending', ...FINAL];
const SIGNALS = {1: 'SIGHUP', 2: 'SIGINT', 6: 'SIGABRT', 7: 'SIGBUS', 8: 'SIGFPE', 9: 'SIGKILL', 11: 'SIGSEGV', 13: 'SIGPIPE',
  15: 'SIGTERM'};
const PRIORITIES = ['high', 'normal', 'low'];

// ---- The document.  Every text goes in as a text node; there is no innerHTML here.

const at = (id) => document.getElementById(id);

function el(tag, facts = {}, ...children) {
  return dress(document.createElement(tag), facts, children);
}

function svg(tag, facts = {}, ...children) {
  return dress(document.createElementNS('http://www.w3.org/2000/svg', tag), facts, children);
}

function dress(node, facts, children) {
  for (const [name, fact] of Object.entries(facts)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), fact);
    else if (fact === true) node.setAttribute(name, '');
    else if (fact !== false && fact !== null && fact !== undefined) node.setAttribute(name, fact);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const button = (text, act, kind = '', label = null) => el('button', {type: 'button', class: kind, 'aria-label': label, onclick: act}, text);

function write(node, text) {                    // touched only when it changes: a selection in it survives
  text = text ?? '';
  if (node.textContent !== String(text)) node.textContent = text;
}

function mark(node, name, text) {
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

// Makes the children of `parent` be one row for each item, in order.  Rows are kept, moved and updated, never made anew.
function sync(parent, items, keyOf, make, update) {
  const rows = parent.keptRows ??= new Map(), focused = document.activeElement, keys = new Set(items.map(keyOf));
  const hadFocus = parent.contains(focused);
  for (const [key, row] of rows) {
    if (!keys.has(key)) { row.close?.(); row.node.remove(); rows.delete(key); }
  }
  let next = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (!rows.has(key)) rows.set(key, make(item));
    const row = rows.get(key);
    update(row, item);
    if (row.node === next) next = next.nextSibling;
    else parent.insertBefore(row.node, next);
  }
  if (hadFocus && document.activeElement !== focused) {
    if (focused.isConnected) focused.focus({preventScroll: true});
    else parent.closest('section')?.querySelector('h2')?.focus({preventScroll: true});
  }
}

// ---- Words

function duration(seconds) {
  let left = Math.max(0, Math.floor(seconds));
  const parts = [];
  for (const [unit, size] of [['d', 86400], ['h', 3600], ['m', 60], ['s', 1]]) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count || (parts.length === 1)) parts.push(count + unit);
    if (parts.length === 2) break;
  }
  return parts.filter((part) => !/^0/.test(part)).join(' ') || '0s';
}

const PLURALS = {job: 'jobs', line: 'lines', GPU: 'GPUs'};
const number = (count) => count.toLocaleString('en-US');
const counted = (count, word) => `${number(count)} ${count === 1 ? word : PLURALS[word]}`;
const gib = (mib) => (mib / 1024).toFixed(1);
const size = (mib) => mib >= 1024 ? `${gib(mib)} GiB` : `${Math.round(mib)} MiB`;
const known = (fact) => fact !== null && fact !== undefined;
const serverNow = () => Date.now() + clockOffset;
const clock = (stamp) => new Date(stamp).toLocaleString([],
  {month: 'short', day: 'numeric', hour: '2-digit', minute: '2-digit', second: '2-digit'});
const gpuList = (job) => job.gpu_indices && job.gpu_indices.length ? `GPU ${job.gpu_indices.join(', ')}` : 'CPU';
const hasNodes = () => service.nodes.length > 0;
const where = (job) => (hasNodes() || job.remote_id) && job.node ? `${job.node} \u00b7 ${gpuList(job)}` : gpuList(job);
const isOthers = (job) => job.command === null;         // as users' tokens are told of it
const commandOf = (job) => job.command ?? `(${job.user}'s)`;
const priorityOf = (job) => PRIORITIES[job.priority] ?? String(job.priority);

function ago(stamp) {
  const seconds = (serverNow() - Date.parse(stamp)) / 1000;
  return seconds < 10 ? 'just now' : `${duration(seconds).split(' ')[0]} ago`;
}

function starts(job) {
  if (!job.estimated_start) return 'Its start is not known yet.';
  const seconds = (Date.parse(job.estimated_start) - serverNow()) / 1000;
  return seconds < 5 ? 'Starts any moment.' : `Starts in about ${duration(seconds)}.`;
}

function outcome(job) {
  if (job.cause === 'signal' && job.signal) return SIGNALS[job.signal] ?? `signal ${job.signal}`;
  if (job.status === 'cancelled' && !job.started_at && job.cause === 'killed') return 'removed';
  if (job.cause && job.cause !== 'exit') return job.cause;
  return known(job.exit_code) ? `exit ${job.exit_code}` : '-';
}

const KINDS = {completed: 'ok', failed: 'bad', cancelled: 'warn', running: 'busy', pending: ''};

function wear(badge, status, text = status) {
  write(badge, text);
  badge.className = `badge ${KINDS[status] ?? ''}`;
}

function runtimeOf(job) {
  if (job.status !== 'running' || !known(job.seenAt)) return job.runtime_seconds;
  return (job.runtime_seconds ?? 0) + (performance.now() - job.seenAt) / 1000;
}

// ---- Asking the service

let token = sessionStorage.getItem('nexus-token'), clockOffset = 0;

class Trouble extends Error {
  constructor(message, hint, status) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

async function request(method, path, {body, signal, headers = {}} = {}) {
  const given = token;
  if (given) headers.Authorization = `Bearer ${given}`;
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  let answer;
  try {
    answer = await fetch(path, {method, headers, signal, cache: 'no-store', body: body === undefined ? undefined : JSON.stringify(body)});
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Trouble('The service cannot be reached.', 'Is it running? On its machine: nexus start', 0);
  }
  const date = Date.parse(answer.headers.get('Date') ?? '');
  if (date && Math.abs(date - Date.now() - clockOffset) > 2000) clockOffset = date - Date.now();
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  const trouble = new Trouble(told.message ?? `The service answered ${answer.status}.`, told.hint ?? '', answer.status);
  if (answer.status === 401 && given === token) askForToken(trouble);
  throw trouble;
}

// What `control` is of ends when this is not called again in time.
function patience(control, time) {
  let timer = null;
  return (isOver = false) => { clearTimeout(timer); if (!isOver) timer = setTimeout(() => control.abort(), time); };
}

async function ask(method, path, body, headers) {
  const control = new AbortController(), wait = patience(control, ANSWER_MS);
  wait();
  try {
    const answer = await request(method, path, {body, headers, signal: control.signal});
    return answer.status === 204 ? null : await answer.json();
  } catch (error) {
    if (error.name !== 'AbortError') throw error;
    throw new Trouble(`The service has not answered for ${ANSWER_MS / 1000} seconds.`, 'What was asked of it may be done all the same.', 0);
  } finally {
    wait(true);
  }
}

// Does what a button is for; says when it is done, and why when it cannot be.
async function act(method, path, body, done) {
  try {
    const answer = await ask(method, path, body);
    if (done) tell(typeof done === 'function' ? done(answer) : done);
    refreshSoon();
    return answer ?? true;
  } catch (error) {
    complain(error);
    return null;
  }
}

function tell(text) {
  const notice = el('div', {class: 'notice'}, el('div', {}, text));
  at('notices').append(notice);
  setTimeout(() => notice.remove(), 6000);
}

function complain(error) {
  if (error.name === 'AbortError') return;
  const notice = el('div', {class: 'notice bad'}, el('div', {}, el('strong', {}, error.message), error.hint
    ? el('div', {class: 'muted'}, error.hint) : null));
  notice.append(button('Close', () => notice.remove(), 'link'));
  while (at('notices').children.length > 3) at('notices').firstChild.remove();
  at('notices').append(notice);
}

function askForToken(trouble) {
  stopFollowing();
  const wasWrong = token !== null;
  token = null;
  sessionStorage.removeItem('nexus-token');
  for (const id of ['overview', 'job']) at(id).hidden = true;
  closeLogs();
  const hint = wasWrong && trouble.hint ? trouble.hint : 'nexus token create makes one; the owner\u2019s is in ~/.nexus/token.';
  write(at('login-why'), `${trouble.message}. ${hint}`);
  at('login').hidden = false;
  document.body.className = 'locked';
  connectionIs('', 'token needed');
  at('token').focus();
}

at('login').querySelector('form').addEventListener('submit', (event) => {
  event.preventDefault();
  token = at('token').value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) {
    token = null;
    return write(at('login-why'), 'A token has no spaces and no other letters than ASCII.');
  }
  sessionStorage.setItem('nexus-token', token);
  at('token').value = '';
  at('login').hidden = true;
  document.body.className = '';
  follow();
  route();
});

at('forget').addEventListener('click', () => {
  sessionStorage.removeItem('nexus-token');
  location.reload();
});

// ---- What is known of the service

const jobs = new Map();                         // id: job, of all that were loaded or told of by an event
let service = null, queue = [], curves = new Map(), finished = null, isLoaded = false, openLog = null;

function take(job) {
  const before = jobs.get(job.id);
  if (job.status === 'pending' && before && !known(job.position)) {
    for (const name of ['position', 'waiting_for', 'estimated_start']) job[name] = before[name];
  }
  job.seenAt = performance.now();
  if (FINAL.includes(job.status) || FINAL.includes(before?.status)) finished = null;
  jobs.set(job.id, {...before, ...job});
}

// Of an answer asked for at `began`.  A job of which an event has told since then may stand in it as it was before.

const isAsHeard = (job, began) => jobs.get(job.id)?.heardAt > began;

function takeStatus(status, began) {
  service = status;
  for (const job of status.running_jobs) if (!isAsHeard(job, began)) take({...jobs.get(job.id), ...job});
}

function takeQueue(list, began) {
  for (const job of list) if (!isAsHeard(job, began)) take(job);
  queue = list.map((job) => job.id).filter((id) => jobs.get(id).status === 'pending');
}

function history() {
  return finished ??= [...jobs.values()].filter((job) => FINAL.includes(job.status))
    .sort((a, b) => a.finished_at < b.finished_at ? 1 : a.finished_at > b.finished_at ? -1 : 0);
}

async function load() {
  const lists = await Promise.all([ask('GET', 'status'), ask('GET', `queue?limit=${QUEUE_LIMIT}`),
    ...['running', ...FINAL].map((status) => ask('GET', `jobs?status=${status}&limit=${HISTORY_LIMIT}`))]);
  jobs.clear();
  finished = null;
  takeQueue(lists[1]);
  takeStatus(lists[0]);
  for (const list of lists.slice(2)) list.forEach(take);          // a job may stand in several: what it is later counts
  isLoaded = true;
  loadCurves();
}

async function loadCurves() {
  try {
    curves = new Map((await ask('GET', 'gpus/history')).map((curve) => [curve.uuid, curve]));
    draw();
  } catch { /* the page does without */ }
}

// GPUs, the order of the queue, reasons and estimates are asked for after events, not more often than the service can take.
let refreshTimer = null, refreshNotBefore = 0;

function refreshSoon(delay = 120) {
  if (refreshTimer === null) refreshTimer = setTimeout(refresh, Math.max(delay, refreshNotBefore - performance.now()));
}

async function refresh() {
  const began = performance.now();
  try {
    const [status, list] = await Promise.all([ask('GET', 'status'), ask('GET', `queue?limit=${QUEUE_LIMIT}`)]);
    takeQueue(list, began);
    takeStatus(status, began);
    draw();
    jobPage?.refresh();
  } catch (error) {
    if (!error.status) following?.abort();        // it connects anew, and tells until it has
  }
  refreshTimer = null;
  refreshNotBefore = performance.now() + Math.max(400, 4 * (performance.now() - began));
}

// ---- Events: one stream, read with fetch so that the token can be sent; resumed where it broke.

let following = null, lastEvent = null, retryDelay = 500;

function connectionIs(kind, text) {
  at('connection').className = `state ${kind}`;
  write(at('connection'), text);
}

function stopFollowing() {
  following?.abort();
  following = null;
}

async function follow() {
  stopFollowing();
  const control = following = new AbortController();
  const wait = patience(control, SILENCE_MS);
  let held = [], isLoading = true;
  const settle = (events) => { for (const event of events) takeEvent(event); draw(); };
  try {
    wait();
    const answer = await request('GET', lastEvent === null ? 'events' : `events?since=${lastEvent}`, {signal: control.signal});
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = '';
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      wait();
      text += value;
      const pieces = text.split('\n\n');
      text = pieces.pop();
      const events = pieces.map(parseEvent).filter(Boolean);
      if (isLoading && held !== null && !held.begun) {        // loaded once events are being told, so that nothing is missed in between
        held.begun = true;
        load().then(() => {
          const late = held;
          held = null;
          isLoading = false;
          retryDelay = 500;
          connectionIs('live', 'live');
          settle(late);
          jobPage?.refresh();
        }).catch((error) => { if (following === control) control.abort(error); });
      }
      if (isLoading) held.push(...events);
      else if (events.some((event) => event.kind === 'reset')) { lastEvent = null; await load(); draw(); }
      else if (events.length) settle(events);
    }
  } catch { /* said below */ }
  wait(true);
  if (following !== control) return;              // stopped on purpose
  connectionIs('lost', 'reconnecting');
  draw();
  await new Promise((resolve) => setTimeout(resolve, retryDelay * (0.75 + Math.random() / 2)));
  retryDelay = Math.min(15000, retryDelay * 1.7);
  if (following === control) follow();
}

function parseEvent(piece) {
  const event = {kind: 'message', data: ''};
  for (const line of piece.split('\n')) {
    const match = /^(id|event|data): ?(.*)$/.exec(line);
    if (match) event[{id: 'id', event: 'kind', data: 'data'}[match[1]]] = match[2];
  }
  if (!event.data) return null;
  event.data = JSON.parse(event.data);
  return event;
}

function takeEvent({id, kind, data}) {
  if (id) lastEvent = Number(id);
  if (kind === 'job') {
    take({...data, heardAt: performance.now()});
    if (data.status !== 'pending') queue = queue.filter((each) => each !== data.id);
    else if (!queue.includes(data.id) && queue.length < QUEUE_LIMIT) queue.push(data.id);
    jobPage?.hear(data);
  } else if (kind === 'removed') {
    for (const each of data.ids) jobs.delete(each);
    finished = null;
  } else if (kind === 'queue' && service) {
    Object.assign(service, data);
  } else if (kind === 'gpus' && service) {
    service.gpu_status = data.map((gpu) => ({...service.gpu_status.find((old) => old.uuid === gpu.uuid), ...gpu}));
  }
  if (kind !== 'removed') refreshSoon();
}

let hideTimer = null;

function rest() {                               // a browser has six connections to a host, for all tabs
  stopFollowing();
  clearTimeout(refreshTimer);
  refreshTimer = null;
  if (at('login').hidden) connectionIs('', 'resting');
}

document.addEventListener('visibilitychange', () => {
  clearTimeout(hideTimer);
  if (document.hidden) hideTimer = setTimeout(rest, HIDDEN_MS);
  else if (!following && at('login').hidden) follow();
});
setInterval(() => { if (following && isLoaded && !document.hidden && at('connection').className.includes('live')) refreshSoon(); }, 5000);
setInterval(() => { if (following && isLoaded && !document.hidden) loadCurves(); }, 30000);
setInterval(tick, 1000);

function tick() {
  for (const node of document.querySelectorAll('[data-runs]')) write(node, duration(runtimeOf(jobs.get(node.dataset.runs)) ?? 0));
}

// ---- The overview

let drawing = false;

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; drawNow(); });
}

function drawNow() {
  if (!isLoaded || !at('login').hidden) return;
  const running = [...jobs.values()].filter((job) => job.status === 'running').sort((a, b) => a.started_at < b.started_at ? 1 : -1);
  const pendingCount = Math.max(service.queued_jobs, queue.length);
  write(at('host'), service.host.name);
  write(at('version'), `nexus ${service.version}, ${service.user} on ${service.host.name}, up ${duration(service.uptime_seconds)}`);
  write(at('running-count'), number(running.length));
  write(at('queue-count'), number(pendingCount));
  write(at('history-count'), number(service.completed_jobs));
  at('paused').hidden = !service.is_paused;
  at('pause').hidden = !service.is_owner;
  write(at('pause'), service.is_paused ? 'Resume' : 'Pause');
  mark(at('pause'), 'aria-label', service.is_paused ? 'Resume starting jobs' : 'Pause: start no more jobs');
  at('forget').hidden = !token;
  document.title = jobPage ? `${jobPage.id} \u00b7 nexus` : `${running.length} running, ${pendingCount} pending \u00b7 nexus`;
  drawBanners();
  drawGpus();
  drawFilters();
  const picked = [running, queue.map((id) => jobs.get(id)).filter((job) => job?.status === 'pending'),
    history()].map((list) => list.filter(matches));
  drawRunning(picked[0], running.length);
  drawTable(queueTable, picked[1], pendingCount);
  drawTable(historyTable, picked[2], service.completed_jobs);
  tick();
}

function drawBanners() {
  const told = [];
  if (service.is_paused) told.push(['warn', 'The queue is paused: running jobs go on, nothing new starts.']);
  if (service.gpu_trouble) told.push(['bad', service.gpu_trouble]);
  if (service.slurm?.trouble) told.push(['bad', service.slurm.trouble]);
  for (const hint of service.hints) told.push(['note', hint]);
  sync(at('banners'), told, ([, text]) => text, () => ({node: el('p', {class: 'banner'})}), (row, [kind, text]) => {
    row.node.className = `banner ${kind}`;
    write(row.node, text);
  });
}

// GPUs stand together by machine.  Of many there are tiles, until one wants to see more of a machine's.

const TILES_BEYOND = 16, folds = new Map();     // so many GPUs are cards at first; machine: whether it is unfolded, as one has chosen

function drawGpus() {
  const gpus = service.gpu_status, free = gpus.filter((gpu) => gpu.is_available).length;
  const machines = hasNodes() ? service.nodes.filter((node, i) => i || node.gpus) : [{name: service.host.name}];
  const away = machines.filter((machine) => machine.unknown_since).length;
  const nodes = service.slurm?.nodes ?? [], sum = (key) => nodes.reduce((total, node) => total + node[key], 0);
  write(at('gpus-told'), service.slurm ? `${sum('gpus_used')} of ${sum('gpus')} of the Slurm cluster in use` : gpus.length ? [
    `${free} of ${gpus.length} available`, machines.length > 1 ? `${machines.length} machines` : null, away ? `${away} not heard` : null,
  ].filter(Boolean).join(' \u00b7 ') : service.gpu_trouble ? '' : 'none');
  sync(at('gpu-list'), machines, (machine) => machine.name, makeMachine, updateMachine);
}

function makeMachine(machine) {
  const row = {badge: el('span'), told: el('span', {class: 'muted'}), why: el('p', {class: 'banner bad'}),
    cards: el('ul', {class: 'gpus'}), tiles: el('ul', {class: 'tiles'})};
  row.fold = button(machine.name, () => { folds.set(machine.name, !row.isOpen); draw(); }, 'fold');
  row.head = el('div', {class: 'head'}, el('h3', {class: 'fold-head'}, row.fold), row.badge, row.told);
  row.node = el('div', {class: 'machine', 'data-machine': machine.name}, row.head, row.why, row.tiles, row.cards);
  return row;
}

function updateMachine(row, machine) {
  const gpus = service.gpu_status.filter((gpu) => gpu.node === machine.name), free = gpus.filter((gpu) => gpu.is_available).length;
  row.isOpen = !hasNodes() || (folds.get(machine.name) ?? (service.gpu_status.length <= TILES_BEYOND && !machine.unknown_since));
  row.head.hidden = !hasNodes();
  row.why.hidden = !machine.unknown_since;
  if (hasNodes()) {
    mark(row.fold, 'aria-expanded', String(row.isOpen));
    const [kind, state] = machine.unknown_since ? ['bad', 'Unknown'] : machine.is_leaving ? ['warn', 'Being removed']
      : machine.trouble ? ['warn', 'Closed'] : ['', ''];
    row.badge.className = `badge ${kind}`;
    row.badge.hidden = !state;
    write(row.badge, state);
    const count = machine.unknown_since ? gpus.length && counted(gpus.length, 'GPU')
      : gpus.length ? `${free} of ${gpus.length} available` : 'no GPU';
    write(row.told, [count,
      machine.running_jobs ? counted(machine.running_jobs, 'job') : null, machine.gpu_names.join(', '),
      machine.unknown_since ? null : machine.trouble].filter(Boolean).join(' \u00b7 '));
    if (machine.unknown_since) {
      write(row.why, `Not heard since ${clock(machine.unknown_since)} (${ago(machine.unknown_since)})${machine.trouble
        ? `: ${machine.trouble}` : ''}.${machine.hint ? ` To do: ${machine.hint}.` : ''}`);
    }
  }
  row.cards.hidden = !row.isOpen || !gpus.length;
  row.tiles.hidden = row.isOpen || !gpus.length;
  sync(row.cards, row.isOpen ? gpus : [], (gpu) => gpu.uuid, makeGpu, updateGpu);
  sync(row.tiles, row.isOpen ? [] : gpus, (gpu) => gpu.uuid, makeTile, updateTile);
}

const isAway = (gpu) => service.nodes.some((node) => node.name === gpu.node && node.unknown_since);
const foreignOf = (gpu) => gpu.processes.filter((process) => !process.job_id);

function stateOf(gpu) {
  return isAway(gpu) ? ['bad', 'Unknown'] : gpu.fault ? ['bad', 'Fault'] : gpu.is_paused ? ['warn', 'Paused']
    : gpu.job_ids.length ? ['busy', 'Busy'] : gpu.is_available ? ['ok', 'Available']
    : foreignOf(gpu).length || gpu.allocated ? ['warn', 'In use'] : ['warn', 'Unavailable'];
}

function makeTile() {
  const row = {index: el('strong'), state: el('span', {class: 'state-of small'}), load: el('span', {class: 'load-of small muted'}),
    bars: [el('i'), el('i')], job: el('a', {class: 'id'}), word: el('span')};
  row.state.append(row.job, row.word);
  row.node = el('li', {class: 'tile panel'}, row.index, row.state, row.load, el('span', {class: 'tracks', 'aria-hidden': 'true'},
    el('span', {class: 'track'}, row.bars[0]), el('span', {class: 'track memory'}, row.bars[1])));
  return row;
}

function updateTile(row, gpu) {
  const [kind, state] = stateOf(gpu), [id, ...others] = gpu.job_ids, total = gpu.memory_total_mib, used = gpu.memory_used_mib;
  row.node.className = `tile panel ${kind}`;
  mark(row.node, 'data-gpu', gpu.place);
  write(row.index, gpu.index);
  row.job.hidden = !id;
  if (id) mark(row.job, 'href', `#/jobs/${encodeURIComponent(id)}`);
  write(row.job, id);
  write(row.word, !id ? state.replace('Available', 'Free') : (others.length ? ` +${others.length}` : '')
    + (['Busy', 'Unknown'].includes(state) ? '' : ` ${state}`));
  write(row.load, known(gpu.utilization) ? `${Math.round(gpu.utilization)} %` : '');
  row.bars[0].style.setProperty('width', `${Math.min(100, gpu.utilization ?? 0)}%`);
  row.bars[1].style.setProperty('width', `${total && known(used) ? Math.min(100, 100 * used / total) : 0}%`);
  mark(row.node, 'title', [`GPU ${gpu.place}: ${state}`, gpu.name, known(gpu.utilization) ? `load ${Math.round(gpu.utilization)} %` : null,
    known(used) ? `memory ${total ? `${gib(used)} / ${gib(total)} GiB` : size(used)}` : null, ...gpu.job_ids.map((each) => `job ${each}`),
    gpu.job_ids.length ? null : gpu.unavailable].filter(Boolean).join('\n'));
}

function makeGauge(name, kind) {
  const fill = el('i'), track = el('div', {class: `track ${kind}`, role: 'meter', 'aria-valuemin': 0, 'aria-valuemax': 100}, fill),
    told = el('output', {'aria-hidden': 'true'});
  return {node: el('div', {class: 'gauge'}, el('span', {class: 'muted', 'aria-hidden': 'true'}, name), told, track),
    show(label, share, text) {
    mark(track, 'aria-label', label);
    mark(track, 'aria-valuenow', String(Math.round(100 * (share ?? 0))));
    mark(track, 'aria-valuetext', text);
    fill.style.setProperty('width', `${Math.min(100, 100 * (share ?? 0))}%`);
    write(told, text);
  }};
}

function makeGpu(gpu) {
  const row = {title: el(hasNodes() ? 'h4' : 'h3'), name: el('span', {class: 'name muted'}), badge: el('span'),
    memory: makeGauge('Memory', 'memory'), load: makeGauge('Load', ''),
    paths: ['area', 'load', 'memory'].map((kind) => svg('path', {class: kind})), users: el('ul', {class: 'users'}),
      told: el('span', {class: 'muted grow small'})};
  row.curve = svg('svg', {class: 'curve', viewBox: '0 0 119 100', preserveAspectRatio: 'none', role: 'img'},
    svg('line', {x1: 0, y1: 50, x2: 119, y2: 50}), ...row.paths);
  row.toggle = button('Pause', () => act('POST', `gpus/${encodeURIComponent(row.gpu.place)}/${row.gpu.is_paused ? 'resume' : 'pause'}`,
    undefined, row.gpu.is_paused ? `GPU ${row.gpu.place} takes jobs again.` : `GPU ${row.gpu.place} gets no new job.`));
  row.node = el('li', {class: 'gpu panel', 'data-gpu': gpu.place}, el('div', {class: 'top'}, row.title, row.name, row.badge),
    row.memory.node, row.load.node,
    el('div', {}, row.curve, el('div', {class: 'axis', 'aria-hidden': 'true'}, el('span', {}, 'last hour'),
      el('span', {}, el('b', {}, 'load'), el('b', {}, 'memory')))),
    row.users, el('div', {class: 'bottom'}, row.told, row.toggle));
  return row;
}

function updateGpu(row, gpu) {
  row.gpu = gpu;
  const total = gpu.memory_total_mib, used = gpu.memory_used_mib, name = `GPU ${gpu.place}`;
  const foreign = foreignOf(gpu);
  write(row.title, name);
  write(row.name, gpu.name);
  const [kind, state] = stateOf(gpu);
  row.badge.className = `badge ${kind}`;
  write(row.badge, state);
  row.memory.show(`${name} memory`, total && known(used) ? used / total : null,
    !known(used) ? 'unknown' : total ? `${gib(used)} / ${gib(total)} GiB` : size(used));
  row.load.show(`${name} load`, known(gpu.utilization) ? gpu.utilization / 100 : null,
    known(gpu.utilization) ? `${Math.round(gpu.utilization)} %` : 'unknown');
  drawCurve(row, curves.get(gpu.uuid), total, name);
  const users = gpu.job_ids.map((id) => ({id, text: jobs.get(id)?.name || (jobs.has(id) ? commandOf(jobs.get(id)) : '')}));
  for (const process of foreign) {
    const memory = known(process.memory_mib) ? `, ${size(process.memory_mib)}` : '';
    users.push({id: null, key: `pid ${process.pid}`,
      text: `${process.user ?? 'somebody'}: ${process.name ?? 'a program'} (pid ${process.pid}${memory})`});
  }
  const why = gpu.fault ?? (users.length || gpu.is_available || gpu.is_paused ? null : gpu.unavailable);
  if (why) users.unshift({id: null, key: 'why', text: why, kind: gpu.fault ? 'fault' : 'muted'});
  sync(row.users, users, (user) => user.id ?? user.key, (user) => {
    const text = el('span', {class: user.id ? 'command' : ''});
    return {node: el('li', {}, user.id ? el('a', {class: 'id', href: `#/jobs/${encodeURIComponent(user.id)}`}, user.id) : null, text),
      text};
  }, (line, user) => {
    write(line.text, user.text);
    mark(line.text, 'title', user.text);
    if (user.kind) line.text.className = user.kind;
  });
  write(row.told, [known(gpu.temperature) ? `${Math.round(gpu.temperature)} \u00b0C` : null, known(gpu.power_watts)
    ? `${Math.round(gpu.power_watts)} W` : null,
    gpu.allocated % 1 ? `${Math.round(gpu.allocated * 100)} % given out` : null].filter(Boolean).join(' \u00b7 '));
  row.toggle.hidden = !service.is_owner;
  write(row.toggle, gpu.is_paused ? 'Resume' : 'Pause');
  mark(row.toggle, 'aria-label', `${gpu.is_paused ? 'Resume' : 'Pause'} ${name}`);
}

function drawCurve(row, curve, total, name) {
  const load = curve?.utilization ?? [];
  const memory = total ? (curve?.memory_used_mib ?? []).map((mib) => known(mib) ? 100 * mib / total : null) : [];
  const line = (points, isArea) => {              // a gap where nothing was read
    let path = '', start = null;
    for (let i = 0; i <= points.length; i++) {
      const x = i + 119 - (points.length - 1);
      if (known(points[i])) {
        path += start === null ? `M${x} ${isArea ? 100 : (98 - .96 * points[i]).toFixed(1)}` : '';
        start ??= x;
        path += `L${x} ${(98 - .96 * points[i]).toFixed(1)}`;
      } else if (start !== null) {
        path += isArea ? `V100Z` : x - start === 1 ? 'h-.8' : '';
        start = null;
      }
    }
    return path;
  };
  mark(row.paths[0], 'd', line(load, true));
  mark(row.paths[1], 'd', line(load, false));
  mark(row.paths[2], 'd', line(memory, false));
  const told = (points) => {
    const seen = points.filter(known);
    const mean = seen.reduce((a, b) => a + b, 0) / seen.length;
    return seen.length ? `${Math.round(mean)} % on average, ${Math.round(Math.max(...seen))} % at most` : 'unknown';
  };
  mark(row.curve, 'aria-label', `${name} over the last hour: load ${told(load)}; memory ${told(memory)}`);
}

// ---- Filters

const filter = {text: '', status: '', user: '', group: ''};

function matches(job) {
  return (!filter.status || job.status === filter.status) && (!filter.user || job.user === filter.user)
    && (!filter.group || job.group === filter.group)
    && (!filter.text || [job.id, job.name, job.command, job.user, job.group, job.node, job.cause, job.cause_line, job.waiting_for,
      job.cwd].join('\n').toLowerCase().includes(filter.text));
}

function drawFilters() {
  const options = {status: STATUSES, user: [...new Set([...jobs.values()].map((job) => job.user))].filter(Boolean).sort(),
    group: [...new Set([...jobs.values()].map((job) => job.group))].filter(Boolean).sort()};
  for (const [name, list] of Object.entries(options)) {
    const select = at(`filter-${name}`), words = ['', ...(list.includes(filter[name]) || !filter[name] ? list : [filter[name], ...list])];
    sync(select, words, (word) => word, (word) => ({node: el('option', {value: word}, word || `any ${name}`)}), () => {});
    if (select.value !== filter[name]) select.value = filter[name];
  }
  for (const [part, statuses] of [['running', ['running']], ['queue', ['pending']], ['history', FINAL]]) {
    at(`${part}-part`).hidden = Boolean(filter.status) && !statuses.includes(filter.status);
  }
  at('filter-clear').disabled = !Object.values(filter).some(Boolean);
}

function setFilter(name, text) {
  filter[name] = text;
  queueTable.shown = historyTable.shown = PAGE;
  draw();
}

at('filter').addEventListener('input', (event) => setFilter('text', event.target.value.trim().toLowerCase()));
for (const name of ['status', 'user', 'group']) at(`filter-${name}`).addEventListener('change',
  (event) => setFilter(name, event.target.value));
at('filter-clear').addEventListener('click', () => {
  Object.assign(filter, {text: '', status: '', user: '', group: ''});
  at('filter').value = '';
  at('filter').focus();
  draw();
});

const isFiltered = () => Object.values(filter).some(Boolean);
const toldOf = (shown, all) => isFiltered() ? `${number(shown)} of ${number(all)}` : '';

// ---- Running jobs

function drawRunning(list, all) {
  write(at('running-told'), toldOf(list.length, all));
  const shown = list.slice(0, 200);
  sync(at('running-list'), shown.length ? shown : [null], (job) => job?.id ?? '', makeRun, updateRun);
}

function jobLink(job, row) {
  return row.link = el('a', {class: 'id', href: `#/jobs/${encodeURIComponent(job.id)}`, 'aria-label': `Job ${job.id}`}, job.id);
}

function makeRun(job) {
  if (!job) return {node: el('li', {class: 'panel empty'}), isEmpty: true};
  const row = {what: el('div', {class: 'command clip'}), facts: el('div', {class: 'facts muted small'}), name: el('strong'),
    away: el('span', {class: 'badge bad'}), clock: el('div', {class: 'clock', 'data-runs': job.id, title: 'runs for'}), log: null};
  row.opener = button('Log', () => row.toggle(), '', `Log of job ${job.id}`);
  mark(row.opener, 'aria-expanded', 'false');
  row.kill = button('Kill', () => killJob(jobs.get(job.id)), 'danger', `Kill job ${job.id}`);
  row.toggle = () => {
    if (row.log) return row.close();
    openLog?.();
    row.log = new LogView(job.id, LOG_TAIL);
    row.node.append(row.log.node);
    row.node.scrollIntoView({block: 'nearest'});
    mark(row.opener, 'aria-expanded', 'true');
    openLog = row.close;
  };
  row.close = () => {
    if (!row.log) return;
    row.log.close();
    row.log.node.remove();
    row.log = null;
    mark(row.opener, 'aria-expanded', 'false');
    openLog = null;
  };
  row.node = el('li', {class: 'run panel', 'data-job': job.id},
    el('div', {class: 'line'}, jobLink(job, row), el('div', {class: 'what'}, row.name, row.what, row.facts, row.away),
    row.clock, el('div', {class: 'actions'}, row.opener, row.kill)));
  return row;
}

function updateRun(row, job) {
  if (!job) return write(row.node, isFiltered() ? 'No running job matches the filter.' : 'No job is running.');
  write(row.name, job.name);
  row.name.hidden = !job.name;
  write(row.what, commandOf(job));
  row.away.hidden = !job.unknown_since;
  write(row.away, job.unknown_since ? `unknown since ${clock(job.unknown_since)}` : '');
  write(row.facts, [where(job) + (job.gpus % 1 ? ` (${job.gpus})` : ''), job.user, job.group ? `group ${job.group}` : null,
    job.attempt > 1 ? `attempt ${job.attempt}` : null,
    known(job.rss_mib) ? `${size(job.rss_mib)} of memory` : null, known(job.cpu_percent) ? `CPU ${Math.round(job.cpu_percent)} %` : null,
    job.started_at ? `since ${clock(job.started_at)}` : null].filter(Boolean).join('  \u00b7  '));
  row.opener.hidden = row.kill.hidden = isOthers(job);
  write(row.kill, job.stopping ? 'Stopping\u2026' : 'Kill');
  row.kill.disabled = Boolean(job.stopping);
}

// ---- Tables of the queue and of the history

const COLUMNS = {
  queue: [['#', 'fit'], ['Job', 'fit bare-label'], ['Command', 'bare command'], ['GPUs', 'fit'], ['Waits because', 'whole'],
    ['Priority', 'fit'], ['', 'bare fit']],
  history: [['Job', 'fit bare-label'], ['Result', 'fit bare-label'], ['Command', 'bare'], ['Where', 'fit bare-label'], ['Runtime', 'fit'],
    ['Finished', 'fit'], ['', 'bare fit']]};

function makeTable(part, makeCells, updateCells) {
  const body = el('tbody', {role: 'rowgroup'}), more = button('', () => { table.shown += PAGE; draw(); });
  const heads = COLUMNS[part].map(([name]) => el('th', {scope: 'col', role: 'columnheader'}, name
    || el('span', {class: 'unseen'}, 'Actions')));
  const grid = el('table', {class: 'cards', role: 'table', 'aria-labelledby': part},
    el('thead', {role: 'rowgroup'}, el('tr', {role: 'row'}, ...heads)), body);
  const table = {part, body, more, shown: PAGE, empty: el('p', {class: 'empty'}), scroll: el('div', {class: 'scroll'}, grid),
    foot: el('div', {class: 'more'}, more)};
  table.make = (job) => {
    const row = makeCells(job);
    row.node = el('tr', {role: 'row', 'data-job': job.id},
      ...row.cells.map((cell, i) => el('td', {role: 'cell', class: COLUMNS[part][i][1], 'data-label': COLUMNS[part][i][0]}, cell)));
    return row;
  };
  table.update = updateCells;
  at(`${part}-part`).append(el('div', {class: 'panel'}, table.empty, table.scroll, table.foot));
  return table;
}

function drawTable(table, list, all) {
  const shown = list.slice(0, table.shown), left = list.length - shown.length;
  sync(table.body, shown, (job) => job.id, table.make, table.update);
  table.empty.hidden = shown.length > 0;
  table.scroll.hidden = !shown.length;
  write(table.empty, isFiltered() ? 'No job matches the filter.' : table.part === 'queue' ? 'Nothing waits.' : 'No job has finished yet.');
  table.foot.hidden = left <= 0;
  write(table.more, `Show ${Math.min(PAGE, left)} more of ${number(left)}`);
  const kept = table.part === 'queue' ? queue.length : history().length;
  write(at(`${table.part}-told`), [toldOf(list.length, all), kept < all
    ? `the ${table.part === 'queue' ? 'first' : 'latest'} ${number(kept)} of ${number(all)} are here` : ''].filter(Boolean).join('; '));
}

const what = (row) => el('div', {}, row.name = el('strong'), row.command = el('div', {class: 'command clip'}),
  row.cause = el('span', {class: 'cause'}), row.facts = el('span', {class: 'muted small'}));

function updateWhat(row, job) {
  write(row.name, job.name);
  write(row.command, commandOf(job));
  write(row.facts, [job.user === service.user ? null : job.user, job.group ? `group ${job.group}` : null, job.attempt > 1
    ? `attempt ${job.attempt}` : null].filter(Boolean).join('  \u00b7  '));
}

const queueTable = makeTable('queue', (job) => {
  const row = {place: el('span', {class: 'muted'}), gpus: el('span'), reason: el('span'), starts: el('span', {class: 'muted starts'}),
    priority: prioritySelect(job.id)};
  row.first = button('First', () => moveJob(job.id, 0), '', `Move job ${job.id} to the front`);
  row.last = button('Last', () => moveJob(job.id, Math.max(0, service.queued_jobs - 1)), '', `Move job ${job.id} to the end`);
  row.cancel = button('Cancel', () => cancelJob(jobs.get(job.id)), 'danger', `Cancel job ${job.id}`);
  row.cells = [row.place, jobLink(job, row), what(row), row.gpus, el('div', {}, row.reason, ' ', row.starts), row.priority,
    el('div', {class: 'actions'}, row.first, row.last, row.cancel)];
  return row;
}, (row, job) => {
  updateWhat(row, job);
  write(row.place, known(job.position) ? job.position + 1 : '');
  write(row.gpus, job.only_node && hasNodes() ? `${job.gpus} on ${job.only_node}` : job.gpus);
  write(row.reason, job.waiting_for);
  write(row.starts, starts(job));
  setPriority(row.priority, job.priority);
  row.first.hidden = row.last.hidden = !service.is_owner;
  row.priority.hidden = row.cancel.hidden = isOthers(job);
  row.first.disabled = job.position === 0;
  row.last.disabled = job.position === service.queued_jobs - 1;
});

const historyTable = makeTable('history', (job) => {
  const row = {badge: el('span'), gpus: el('span'), runtime: el('span'), finished: el('time')};
  row.again = button('Retry', () => retryJob(job.id), '', `Retry job ${job.id}`);
  row.cells = [jobLink(job, row), row.badge, what(row), row.gpus, row.runtime, row.finished, el('div', {class: 'actions'}, row.again)];
  return row;
}, (row, job) => {
  updateWhat(row, job);
  row.again.hidden = isOthers(job);
  wear(row.badge, job.status, job.status === 'completed' || isOthers(job) ? job.status : outcome(job));
  mark(row.badge, 'title', job.status);
  write(row.cause, job.cause_line);
  write(row.gpus, job.started_at ? where(job) : '-');
  write(row.runtime, known(job.runtime_seconds) ? duration(job.runtime_seconds) : '-');
  write(row.finished, ago(job.finished_at));
  mark(row.finished, 'datetime', job.finished_at);
  mark(row.finished, 'title', clock(job.finished_at));
});

function prioritySelect(id) {
  return el('select', {'aria-label': `Priority of job ${id}`,
    onchange: (event) => act('PATCH', `queue/${id}`, {priority: Number(event.target.value)}, `Job ${id} has another priority.`)},
    ...PRIORITIES.map((word, i) => el('option', {value: i}, word)));
}

function setPriority(select, priority) {
  if (select === document.activeElement && select.matches(':open')) return;
  if (![...select.options].some((option) => option.value === String(priority))) select.append(el('option', {value: priority},
    String(priority)));
  if (select.value !== String(priority)) select.value = String(priority);
}

// ---- What may be done with a job

const moveJob = (id, position) => act('PATCH', `queue/${id}`, {position},
  `Job ${id} was moved ${position ? 'to the end' : 'to the front'}.`);
const retryJob = (id) => act('POST', `jobs/${id}/retry`, undefined, (answer) => `Job ${id} runs again as ${answer.id}.`);

async function killJob(job) {
  if (await confirmed(`Kill job ${job.id}?`,
    'All its processes are stopped: first asked to end, then killed. What it has not saved is lost.', commandOf(job), 'Kill job',
    'Let it run')) {
    await act('DELETE', `jobs/${job.id}`, undefined, `Job ${job.id} is being stopped.`);
  }
}

async function cancelJob(job) {
  if (await confirmed(`Cancel job ${job.id}?`, 'It is taken out of the queue, and so are jobs that run after it.', commandOf(job),
    'Cancel job', 'Keep it')) {
    await act('DELETE', `queue/${job.id}`, undefined, `Job ${job.id} was taken out of the queue.`);
  }
}

function confirmed(title, text, detail, verb, refusal) {
  const dialog = at('confirm'), from = document.activeElement;
  return new Promise((resolve) => {
    const keep = button(refusal, () => dialog.close('no')), go = button(verb, () => dialog.close('yes'), 'primary danger');
    dialog.replaceChildren(el('h2', {id: 'confirm-title'}, title), el('p', {}, text), el('pre', {tabindex: 0}, detail),
      el('div', {class: 'buttons'}, keep, go));
    dialog.returnValue = 'no';
    dialog.addEventListener('close', () => { giveFocusBack(from); resolve(dialog.returnValue === 'yes'); }, {once: true});
    dialog.showModal();
    keep.focus();
  });
}

const giveFocusBack = (from) => (from?.isConnected ? from : at('main')).focus({preventScroll: true});

at('pause').addEventListener('click', () => service && act('POST', `service/${service.is_paused ? 'resume' : 'pause'}`, undefined,
  service.is_paused ? 'Jobs are started again.' : 'Paused: running jobs go on, nothing new starts.'));

// ---- Adding a job

function parseSeconds(text) {                   // 90, 90s, 30m, 2h, 1h30m, 1d
  if (!text) return undefined;
  const parts = [...text.matchAll(/(\d+(?:\.\d+)?)\s*([dhms]?)\s*/g)];
  if (!parts.length || parts.map((part) => part[0]).join('') !== text) throw new Trouble(`'${text}' is not a time.`,
    'Write it like 90, 30m, 2h or 1h30m.');
  return parts.reduce((sum, [, count, unit]) => sum + count * {d: 86400, h: 3600, m: 60, s: 1, '': 1}[unit], 0);
}

function parseVariables(text) {
  const lines = text.split('\n').filter((line) => line.trim());
  const bad = lines.find((line) => !/^[^=]+=/.test(line));
  if (bad) throw new Trouble(`'${bad}' is not NAME=VALUE.`, 'One variable a line.');
  return lines.length ? Object.fromEntries(lines.map((line) => [line.slice(0, line.indexOf('=')).trim(),
    line.slice(line.indexOf('=') + 1)])) : undefined;
}

const FIELDS = [                                // name, label, class, facts, help
  ['command', 'Command', 'all', {rows: 3, required: true, spellcheck: 'false', autocapitalize: 'off',
    placeholder: 'python train.py --lr 3e-4'}, 'A shell command, as you would type it.'],
  ['gpus', 'GPUs', 'third', {type: 'number', min: 0, step: 'any', placeholder: 'default'}, '0, a share like 0.5, or more'],
  ['priority', 'Priority', 'third', {}, null],
  ['timeout', 'Time limit', 'third', {placeholder: 'none'}, 'like 30m or 2h'],
  ['name', 'Name', '', {}, null],
  ['group', 'Group', '', {}, null],
  ['node', 'Machine', 'all', {}, null],
  ['cwd', 'Directory', 'all', {placeholder: '~', spellcheck: 'false'}, null],
  ['after', 'After jobs', '', {placeholder: 'abc, xyz', spellcheck: 'false'}, 'starts when these completed'],
  ['retries', 'Retries', '', {type: 'number', min: 0, step: 1, placeholder: 'default'}, null],
  ['env', 'Environment', 'all', {rows: 2, spellcheck: 'false', placeholder: 'WANDB_MODE=offline'}, 'NAME=VALUE, one a line'],
];

// `given`: what its fields hold at first; `kept`: what has no field, and is sent too; `lost`: what is not sent
function openAddForm(given = {}, kept = {}, lost = []) {
  const dialog = at('add-dialog'), from = document.activeElement, inputs = {};
  let key = null, sent = null;                  // the same is sent again with the same key, so that it is added once
  if (dialog.open) return;
  const fields = FIELDS.filter(([name]) => name !== 'node' || hasNodes()).map(([name, label, kind, facts, help]) => {
    const id = `add-${name}`, more = {id, name, autocomplete: 'off', 'aria-describedby': help ? `${id}-help` : null, ...facts};
    inputs[name] = name === 'priority' ? el('select', more, ...PRIORITIES.map((word, i) => el('option', {value: i}, word)))
      : name === 'node' ? el('select', more, el('option', {value: ''}, 'any, wherever it can start first'),
        ...service.nodes.map((node) => el('option', {value: node.name}, node.name)))
      : facts.rows ? el('textarea', more) : el('input', {type: 'text', ...more});
    if (name === 'priority') setPriority(inputs.priority, given.priority ?? 1);
    else if (known(given[name])) inputs[name].value = given[name];
    return el('div', {class: `${kind} ${['all', ''].includes(kind) ? 'wide' : ''}`}, el('label', {for: id}, label), inputs[name], help
      ? el('span', {class: 'help', id: `${id}-help`}, help) : null);
  });
  const shown = hasNodes() ? 7 : 6;
  const fault = el('p', {class: 'fault', role: 'alert'}), send = el('button', {class: 'primary'}, 'Add job');
  const keep = el('input', {type: 'checkbox', checked: true}), also = Object.entries(kept).map(
    ([name, fact]) => `${labelOf(name)} ${describeFact(name, fact)}`);
  const form = el('form', {onsubmit: submit}, el('div', {class: 'form'}, ...fields.slice(0, shown)),
    el('details', {open: Boolean(given.command)}, el('summary', {}, 'More: directory, order, retries, environment'),
      el('div', {class: 'form'}, ...fields.slice(shown))),
    also.length ? el('label', {class: 'check'}, keep, `As before: ${also.join(' \u00b7 ')}`) : null,
    lost.length ? el('p', {class: 'small muted lost'}, `Left out: ${lost.join('; ')}.`) : null,
    fault, el('div', {class: 'buttons'}, button('Cancel', () => dialog.close()), send));
  async function submit(event) {
    event.preventDefault();
    send.disabled = true;
    write(fault, '');
    try {
      const text = (name) => inputs[name].value.trim() || undefined, count = (name) => text(name) && Number(text(name));
      const after = text('after')?.split(/[\s,]+/).filter(Boolean);
      const job = {...(keep.checked ? kept : {}), command: inputs.command.value, gpus: count('gpus'),
        priority: Number(inputs.priority.value), timeout_seconds: parseSeconds(text('timeout')), name: text('name'), group: text('group'),
        node: inputs.node && text('node'), cwd: text('cwd'), after, retries: count('retries'), env: parseVariables(inputs.env.value)};
      if (sent !== JSON.stringify(job)) [sent, key] = [JSON.stringify(job), randomKey()];
      const answer = await ask('POST', 'queue', job, {'Idempotency-Key': key});
      dialog.close();
      tell(`Job ${answer.id} was added.${answer.warning ? ` ${answer.warning}` : ''}`);
      refreshSoon();
    } catch (error) {
      write(fault, [error.message, error.hint].filter(Boolean).join(' '));
    }
    send.disabled = false;
  }
  inputs.command.addEventListener('keydown',
    (event) => { if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
  dialog.replaceChildren(el('h2', {id: 'add-title'}, 'Add a job'), form);
  dialog.addEventListener('close', () => giveFocusBack(from), {once: true});
  dialog.showModal();
  inputs.command.focus();
}

const KEPT = ['gpu_ids', 'gpu_mem_mib', 'conda', 'expected_time', 'cuda_arg', 'tty'];

function changeAndAdd(job) {
  const timeout = duration(job.timeout_seconds ?? 0);
  openAddForm({...job, node: job.only_node, after: job.after.join(', '),
    timeout: parseSeconds(timeout) === job.timeout_seconds ? timeout : job.timeout_seconds},
    Object.fromEntries(KEPT.filter((name) => job[name]).map((name) => [name, job[name]])),
    [job.env_digest ? 'its environment variables, which the service does not tell' : null,
      job.snapshot ? 'its snapshot: it runs in the directory as that is now' : null].filter(Boolean));
}

const randomKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, '0')).join('');
at('add').addEventListener('click', () => openAddForm());

// ---- Logs.  A small terminal: colours, \r, \b and "erase the line"; all other escapes are dropped.

// CSI, of which two are obeyed; OSC; DCS and the like; other escapes; control characters; text
const TOKENS = new RegExp([/\x1b\[([0-?]*)[ -/]*([@-~])/, /\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)/, /\x1b[PX^_][^\x1b]*\x1b\\/,
  /\x1b[ -/]*[0-OQ-WYZ`-~]/, /[\x00-\x08\x0a-\x1f\x7f]/, /[^\x00-\x08\x0a-\x1f\x7f]+/].map((part) => part.source).join('|'), 'g');
const TORN = /\x1b(?:[ -\/]*|\[[0-?]*[ -\/]*|\][^\x07\x1b]{0,4000}\x1b?|[PX^_][^\x1b]{0,4000}\x1b?)$/;
const PLAIN = {classes: '', fg: null, bg: null, fgText: null, bgText: null, isInverse: false, flags: 0};
const FLAGS = {1: ['bold', 1], 2: ['dim', 2], 3: ['italic', 4], 4: ['under', 8], 9: ['strike', 16]},
  UNFLAGS = {22: 3, 23: 4, 24: 8, 29: 16};

function colourOf(index) {                      // of the 256: a class for the first 16, else a colour
  if (index < 16) return index;
  if (index > 231) return `rgb(${Array(3).fill(8 + 10 * (index - 232)).join(' ')})`;
  const steps = [0, 95, 135, 175, 215, 255], cube = index - 16;
  return `rgb(${steps[Math.floor(cube / 36)]} ${steps[Math.floor(cube / 6) % 6]} ${steps[cube % 6]})`;
}

function restyle(style, parameters) {
  const next = {...style}, codes = parameters.split(';');
  for (let i = 0; i < codes.length; i++) {
    let code = codes[i], rest = null;
    if (code.includes(':')) [code, ...rest] = code.split(':');
    code = Number(code);
    if (code === 0) Object.assign(next, PLAIN);
    else if (FLAGS[code]) next.flags = code === 4 && rest && rest[0] === '0' ? next.flags & ~8 : next.flags | FLAGS[code][1];
    else if (UNFLAGS[code]) next.flags &= ~UNFLAGS[code];
    else if (code === 7 || code === 27) next.isInverse = code === 7;
    else if (code === 39) next.fg = null;
    else if (code === 49) next.bg = null;
    else if (code === 38 || code === 48) {
      const given = rest ?? codes.slice(i + 1), kind = Number(given[0]),
        values = (rest && kind === 2 ? given.slice(-3) : given.slice(1, kind === 2 ? 4 : 2)).map((part) => Number(part) & 255);
      if (!rest) i += kind === 2 ? 4 : 2;
      const colour = kind === 5 && values.length ? colourOf(values[0]) : kind === 2 && values.length === 3 ? `rgb(${values.join(' ')})`
        : null;
      if (colour !== null) next[code === 38 ? 'fg' : 'bg'] = colour;
    } else if (code >= 30 && code < 38) next.fg = code - 30;
    else if (code >= 40 && code < 48) next.bg = code - 40;
    else if (code >= 90 && code < 98) next.fg = code - 82;
    else if (code >= 100 && code < 108) next.bg = code - 92;
  }
  const [fg, bg] = next.isInverse ? [next.bg ?? 'p', next.fg ?? 'p'] : [next.fg, next.bg];
  next.fgText = typeof fg === 'string' && fg !== 'p' ? fg : null;
  next.bgText = typeof bg === 'string' && bg !== 'p' ? bg : null;
  next.classes = [...Object.values(FLAGS).filter(([, bit]) => next.flags & bit).map(([name]) => name),
    fg !== null && next.fgText === null ? `fg${fg}` : '', bg !== null && next.bgText === null ? `bg${bg}` : ''].filter(Boolean).join(' ');
  return next;
}

class Terminal {
  constructor(lines, kind) {
    this.lines = lines;                         // where finished ones go: [runs, kind], runs being [text, style] one after the other
    this.kind = kind;
    this.carry = '';                            // an escape of which the end has not come
    this.style = PLAIN;
    this.clear();
  }

  clear() {
    this.runs = [];
    this.length = this.cursor = 0;
  }

  feed(text) {
    text = this.carry + text;
    const torn = TORN.exec(text.slice(-4100));
    this.carry = torn ? torn[0] : '';
    if (torn) text = text.slice(0, text.length - torn[0].length);
    for (const [whole, parameters, final] of text.matchAll(TOKENS)) {
      const code = whole.charCodeAt(0);
      if (code === 10) {
        this.lines.push([this.runs, this.kind]);
        this.clear();
      } else if (code === 13) this.cursor = 0;
      else if (code === 8) this.cursor = Math.max(0, this.cursor - 1);
      else if (final === 'm') this.style = restyle(this.style, parameters);
      else if (final === 'K') this.erase(parameters);
      else if (code > 31 && code !== 127 || code === 9) this.put(whole);
    }
  }

  put(text) {
    text = text.slice(0, Math.max(0, LINE_LENGTH - this.cursor));
    const end = this.cursor + text.length;
    if (!text) return;
    if (this.cursor === 0 && end >= this.length) this.runs = [[text, this.style]];
    else this.runs = [...this.cut(0, this.cursor), [text, this.style], ...this.cut(end, this.length)];
    this.cursor = end;
    this.length = Math.max(this.length, end);
  }

  cut(from, to) {
    if (from === 0 && to === this.length) return this.runs;
    const kept = [];
    let place = 0;
    for (const [text, style] of this.runs) {
      const part = text.slice(Math.max(0, from - place), Math.max(0, to - place));
      if (part) kept.push([part, style]);
      place += text.length;
    }
    return kept;
  }

  erase(parameters) {
    if (parameters === '1') return;
    this.runs = parameters === '2' ? [] : this.cut(0, this.cursor);
    this.length = parameters === '2' ? 0 : Math.min(this.length, this.cursor);
    if (parameters === '2') this.cursor = 0;
  }
}

function lineNode(runs, kind) {
  return el('div', {class: kind}, ...runs.map(([text, style]) => {
    if (!style.classes && !style.fgText && !style.bgText) return text;
    const span = el('span', {class: style.classes || null}, text);
    if (style.fgText) span.style.setProperty('color', style.fgText);
    if (style.bgText) span.style.setProperty('background-color', style.bgText);
    return span;
  }));
}

// stdout and stderr are read each by itself, so that a progress bar on one and lines on the other do not run into each other.
// What is new is asked for again and again: a log that is open holds no connection, and one that fails harms nothing.

class LogView {
  constructor(id, tail) {
    this.id = id;
    this.tail = tail;
    this.told = el('span', {class: 'told'});
    this.stream = el('select', {'aria-label': 'Which output', onchange: () => this.open()},
      ...['both', 'stdout', 'stderr'].map((name) => el('option', {value: name}, name)));
    this.sticky = el('input', {type: 'checkbox', checked: true, onchange: () => this.stick(this.sticky.checked)});
    this.box = el('div', {class: 'lines', role: 'log', 'aria-live': 'off', 'aria-label': `Log of job ${id}`, tabindex: 0});
    const wrap = el('input', {type: 'checkbox', checked: true, onchange: () => this.box.classList.toggle('long', !wrap.checked)});
    this.node = el('div', {class: 'log'}, el('div', {class: 'head'}, this.told, el('label', {class: 'check'}, this.sticky, 'Follow'),
      el('label', {class: 'check'}, wrap, 'Wrap'),
      this.stream, button('Download', () => this.download(), '', `Download the log of job ${id}`)), this.box);
    this.box.addEventListener('scroll', () => this.scrolled(), {passive: true});
    this.open();
  }

  async open() {
    this.close();
    const isBoth = this.stream.value === 'both', names = isBoth ? ['stdout', 'stderr'] : [this.stream.value];
    let control = this.control = new AbortController(), [pause, longest, longestOfTrouble] = LOG_PAUSES_MS;
    this.ready = [];
    this.sources = names.map((name) => ({name, offset: null, decoder: new TextDecoder(),
      terminal: new Terminal(this.ready, isBoth && name === 'stderr' ? 'err' : null)}));
    this.box.replaceChildren();
    this.partials = [];
    this.dropped = 0;
    this.isOver = false;
    this.trouble = null;
    this.isSticky = this.sticky.checked = true;
    this.tell('opening');
    while (!this.isOver) {
      while (document.hidden) await new Promise((resolve) => document.addEventListener('visibilitychange', resolve, {once: true}));
      if (this.control !== control) return;
      control = this.control = new AbortController();
      const isFinal = FINAL.includes(jobs.get(this.id)?.status);
      let isNews = false;
      try {
        for (const source of this.sources) isNews = await this.read(source, control) || isNews;
        if (this.control !== control) return;
        this.trouble = null;
        this.isOver = isFinal;
        pause = isNews ? LOG_PAUSES_MS[0] : Math.min(longest, 1.5 * pause);
      } catch (error) {
        if (this.control !== control) return;
        this.trouble = error.status ? error.message : 'the connection is lost';
        this.isOver = error.status >= 400 && error.status < 500;
        pause = Math.min(longestOfTrouble, 2 * pause);
      }
      this.tell();
      this.draw();
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  async read(source, control) {
    const {name, terminal, decoder} = source, wait = patience(control, ANSWER_MS);
    const path = `jobs/${encodeURIComponent(this.id)}/logs?stream=${name}&`;
    let isNews = false;
    wait();
    try {
      const answer = await request('GET', path + (source.offset === null ? `tail=${this.tail}` : `offset=${source.offset}`),
        {signal: control.signal});
      const start = Number(answer.headers.get('Log-Offset')), reader = answer.body.getReader();
      if (source.offset !== null && source.offset !== start) this.open();       // another file
      source.offset = start;
      while (this.control === control) {
        wait();
        const {done, value} = await reader.read();
        if (done) break;
        isNews = true;
        source.offset += value.length;
        terminal.feed(decoder.decode(value, {stream: true}));
        this.draw();
        if (this.ready.length > 4 * LOG_LINES) await this.drawn;          // the page comes first: the service waits
      }
    } finally {
      wait(true);
    }
    return isNews;
  }

  close() {
    this.control?.abort();
    this.control = null;
  }

  draw() {
    this.drawn ??= new Promise((resolve) => requestAnimationFrame(() => { this.drawn = null; this.drawNow(); resolve(); }));
  }

  drawNow() {
    const {box, ready} = this, isAtEnd = this.isSticky, patience = performance.now() + FRAME_MS;
    for (const node of this.partials) node.remove();
    const surplus = box.children.length + ready.length - LOG_LINES;
    if (surplus > 0) {
      const fromBox = Math.min(surplus, box.children.length);
      const height = isAtEnd ? 0 : box.scrollHeight;
      if (fromBox === box.children.length) box.replaceChildren();
      else for (let i = 0; i < fromBox; i++) box.firstChild.remove();
      if (!isAtEnd) box.scrollTop -= height - box.scrollHeight;       // what is read stays where it is
      ready.splice(0, surplus - fromBox);
      this.dropped += surplus;
    }
    const fresh = document.createDocumentFragment();
    let drawn = 0;
    for (; drawn < ready.length && drawn < FRAME_LINES && performance.now() < patience; drawn++) fresh.append(lineNode(...ready[drawn]));
    ready.splice(0, drawn);
    const open = ready.length ? [] : this.sources.map((source) => source.terminal).filter((terminal) => terminal.runs.length);
    this.partials = open.map((terminal) => lineNode(terminal.runs, terminal.kind));
    fresh.append(...this.partials);
    box.append(fresh);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
    if (ready.length) setTimeout(() => this.draw());         // the rest in the next frame
    this.tell();
  }

  tell(text) {
    const count = this.box.children.length, job = jobs.get(this.id);
    const state = this.trouble ?? (this.isOver ? (count ? 'complete' : 'it has printed nothing') : count ? 'live' : 'nothing printed yet');
    const parts = [text ?? state];
    if (count) parts.push(counted(count, 'line'));
    if (this.dropped) parts.push(`${number(this.dropped)} before are left out`);
    else if (count >= this.tail) parts.push('earlier ones are left out');
    if (job?.status === 'pending') parts[0] = 'the next attempt has not started';
    this.box.classList.toggle('over', this.isOver);
    write(this.told, parts.join(' \u00b7 '));
  }

  scrolled() {
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 24;
    if (isAtEnd !== this.isSticky) { this.isSticky = isAtEnd; this.sticky.checked = isAtEnd; }
  }

  stick(isSticky) {
    this.isSticky = isSticky;
    if (isSticky) this.box.scrollTop = this.box.scrollHeight;
  }

  async download() {
    try {
      const answer = await request('GET', `jobs/${encodeURIComponent(this.id)}/logs?stream=${this.stream.value}`);
      const address = URL.createObjectURL(await answer.blob());
      el('a', {href: address, download: `nexus-${this.id}.log`}).click();
      setTimeout(() => URL.revokeObjectURL(address), 60000);
    } catch (error) {
      complain(error);
    }
  }
}

function closeLogs() {
  openLog?.();
  jobPage?.log?.close();
}

// ---- A job's page

const SHOWN_ELSEWHERE = ['id', 'status', 'command', 'name', 'status_history', 'seenAt', 'position', 'waiting_for', 'attempts',
  'cause_line', 'stopping', 'unknown_since'];
const LABELS = {cpu_seconds: 'CPU time', cpu_percent: 'CPU', peak_rss_mib: 'peak memory', rss_mib: 'memory', cwd: 'directory',
  node: 'machine', only_node: 'only on', remote_id: 'id there'};
const WIDE = ['cwd', 'log_dir', 'gpu_uuids', 'notes', 'snapshot', 'session', 'env_digest'];

const labelOf = (name) => LABELS[name] ?? name.replace(/_(seconds|mib)$/, '').replaceAll('_', ' ');

function describeFact(name, fact) {
  if (/_at$|^estimated_start$/.test(name)) return `${clock(fact)}${name === 'estimated_start' ? '' : ` (${ago(fact)})`}`;
  if (/_seconds$|^expected_time$/.test(name)) return duration(fact);
  if (/_mib$/.test(name)) return size(fact);
  if (name === 'mean_gpu_util' || name === 'cpu_percent') return `${Math.round(fact)} %`;
  if (name === 'priority') return PRIORITIES[fact] ?? String(fact);
  if (Array.isArray(fact)) return fact.join(', ');
  return fact === true ? 'yes' : typeof fact === 'object' ? Object.entries(fact).map((pair) => pair.join('=')).join(', ') : String(fact);
}

function takeTogether(verdicts) {               // [first, last, verdict] of GPUs of a node, next to each other, of which the same is said
  const rows = [];
  for (const gpu of verdicts) {
    const last = rows[rows.length - 1];
    if (last && last.node === gpu.node && last[2] === gpu.verdict && gpu.place.includes(':')) last[1] = gpu.place;
    else rows.push(Object.assign([gpu.place, gpu.place, gpu.verdict], {node: gpu.node}));
  }
  return rows;
}

class JobPage {
  constructor(id) {
    this.id = id;
    this.title = el('h1', {tabindex: -1}, `Job ${id}`);
    this.badge = el('span');
    this.name = el('p', {class: 'muted'});
    this.command = el('pre', {class: 'pad'});
    this.actions = el('div', {class: 'steps'});
    this.cause = el('p', {class: 'banner bad', hidden: true});
    this.away = el('p', {class: 'banner bad', hidden: true});
    this.facts = el('dl', {class: 'facts-list'});
    this.steps = el('ol', {class: 'steps pad'});
    this.attempts = el('ol', {class: 'reasons pad'});
    this.why = el('div', {class: 'pad'});
    this.whyPart = el('section', {'aria-label': 'Why it waits', hidden: true}, el('div', {class: 'head'}, el('h2', {}, 'Why it waits')),
      el('div', {class: 'panel'}, this.why));
    this.attemptsPart = el('section', {'aria-label': 'Failed attempts', hidden: true},
      el('div', {class: 'head'}, el('h2', {}, 'Failed attempts')), el('div', {class: 'panel'}, this.attempts));
    this.runtime = el('span', {class: 'muted'});
    this.log = null;
    this.logPart = el('section', {'aria-label': 'Log'}, el('div', {class: 'head'}, el('h2', {}, 'Log')));
    at('job').replaceChildren(
      el('p', {}, el('a', {href: '#/'}, '\u2190 All jobs')),
      el('div', {class: 'head'}, this.title, this.badge, this.runtime, el('span', {class: 'grow'}), this.actions), this.name,
      el('section', {class: 'panel', 'aria-label': 'Command'}, this.command), this.away, this.cause, this.whyPart, this.logPart,
      this.attemptsPart,
      el('section', {'aria-label': 'Facts'}, el('div', {class: 'head'}, el('h2', {}, 'Facts')),
        el('div', {class: 'panel'}, this.steps, this.facts)));
    this.refresh();
  }

  hear(job) {
    if (job.id === this.id) this.refresh();
  }

  async refresh() {
    if (this.isGone) return;
    if (this.isAsking) { this.isStale = true; return; }
    this.isAsking = true;
    try {
      const job = await ask('GET', `jobs/${encodeURIComponent(this.id)}`);
      const why = job.status === 'pending' ? await ask('GET', `jobs/${encodeURIComponent(this.id)}/why`) : null;
      if (jobPage === this) { take(job); this.draw(job, why); }
    } catch (error) {
      if (jobPage === this && [403, 404].includes(error.status)) {
        at('job').replaceChildren(el('p', {}, el('a', {href: '#/'}, '\u2190 All jobs')), el('h1', {tabindex: -1}, error.message),
          el('p', {class: 'muted'}, error.hint));
        this.isGone = true;
      } else if (error.status) complain(error);
    }
    this.isAsking = false;
    if (this.isStale) { this.isStale = false; this.refresh(); }
  }

  draw(job, why) {
    const isFinal = FINAL.includes(job.status);
    wear(this.badge, job.status, job.stopping ? 'stopping'
      : isFinal && job.status !== 'completed' ? `${job.status}: ${outcome(job)}` : job.status);
    const asked = job.gpus === 0 ? 'no GPU' : `${job.gpus} GPU${job.gpus > 1 ? 's' : ''}`;
    write(this.name, [job.name, job.user, job.started_at ? where(job) : `asks for ${asked}`].filter(Boolean).join(' \u00b7 '));
    write(this.command, commandOf(job));
    if (job.status === 'running') this.runtime.dataset.runs = job.id;
    else delete this.runtime.dataset.runs;
    write(this.runtime, known(job.runtime_seconds) && job.started_at ? duration(runtimeOf(jobs.get(job.id))) : '');
    const wanted = [job.status === 'running' && !job.stopping ? 'kill' : null,
      ...(job.status === 'pending' ? [...(service.is_owner ? ['first', 'last'] : []), 'priority', 'cancel'] : []),
      isFinal ? 'retry' : null, isFinal ? 'again' : null].filter(Boolean);
    const makers = {
      kill: () => button('Kill', () => killJob(jobs.get(job.id)), 'danger'),
        cancel: () => button('Cancel', () => cancelJob(jobs.get(job.id)), 'danger'),
      first: () => button('Move first', () => moveJob(job.id, 0)),
        last: () => button('Move last', () => moveJob(job.id, Math.max(0, service.queued_jobs - 1))),
      priority: () => prioritySelect(job.id),
      retry: () => button('Retry', () => this.retry()),
      again: () => button('Change and add', () => changeAndAdd(job))};
    sync(this.actions, wanted, (name) => name, (name) => ({node: makers[name]()}),
      (row, name) => { if (name === 'priority') setPriority(row.node, job.priority); });
    this.away.hidden = !job.unknown_since;
    write(this.away, job.unknown_since ? `${job.node} has not been heard since ${clock(job.unknown_since)}: nothing is known of this job `
      + 'until it is back.' : '');
    this.cause.hidden = !job.cause_line;
    write(this.cause, job.cause_line);
    this.drawWhy(why);
    this.drawFacts(job);
    if (job.started_at || isFinal || job.attempt > 0) {
      if (!this.log) { this.log = new LogView(job.id, LOG_TAIL); this.logPart.append(this.log.node); }
      else if (this.log.isOver && job.status === 'running') this.log.open();
    }
    this.logPart.hidden = !this.log;
    this.log?.tell();
  }

  async retry() {
    const answer = await act('POST', `jobs/${this.id}/retry`, undefined, (told) => `Job ${this.id} runs again as ${told.id}.`);
    if (answer) location.hash = `#/jobs/${answer.id}`;
  }

  drawWhy(why) {
    this.whyPart.hidden = !why;
    if (!why) return;
    this.why.replaceChildren(el('p', {}, why.why), el('ul', {class: 'reasons'}, ...why.facts.map((fact) => el('li', {}, fact)),
      ...takeTogether(why.gpus).map(([first, last, verdict]) => el('li', {class: 'muted'}, first === last ? `GPU ${first}: ${verdict
        ?? 'it could have this one'}` : `GPUs ${first} to ${last}: ${verdict ?? 'it could have any of these'}`))));
  }

  drawFacts(job) {
    const facts = Object.entries(job).filter(([name, fact]) => !SHOWN_ELSEWHERE.includes(name) && known(fact) && fact !== false
      && fact !== '' && !(typeof fact === 'object' && !Object.keys(fact).length))
      .sort(([a], [b]) => WIDE.includes(a) - WIDE.includes(b));
    sync(this.facts, facts, ([name]) => name, ([name]) => {
      const told = el('dd', {class: WIDE.includes(name) ? 'mono' : ''});
      return {node: el('div', {class: WIDE.includes(name) ? 'wide' : ''},
        el('dt', {}, labelOf(name)), told), told};
    }, (row, [name, fact]) => {
      if (name === 'after' || name === 'retried_as') {
        row.told.replaceChildren(...[fact].flat().flatMap((id) => [el('a', {class: 'id', href: `#/jobs/${encodeURIComponent(id)}`}, id),
          ' ']));
      } else write(row.told, describeFact(name, fact));
    });
    sync(this.steps, job.status_history, (step) => step.join(),
      () => ({node: el('li'), badge: el('span'), when: el('span', {class: 'muted small'})}), (row, [status, when]) => {
      if (!row.node.firstChild) row.node.append(row.badge, ' ', row.when);
      wear(row.badge, status);
      write(row.when, clock(when));
    });
    this.attemptsPart.hidden = !job.attempts?.length;
    sync(this.attempts, job.attempts ?? [], (attempt) => attempt.attempt, () => ({node: el('li')}), (row, attempt) => {
      const ended = attempt.cause === 'exit' ? `exit ${attempt.exit_code}` : attempt.cause;
      write(row.node, [`${attempt.attempt}: ${ended}`, attempt.gpu_indices?.length ? `on GPU ${attempt.gpu_indices.join(', ')}` : null,
        attempt.node ? `of ${attempt.node}` : null,
        known(attempt.runtime_seconds) ? `after ${duration(attempt.runtime_seconds)}` : null].filter(Boolean).join(' '));
    });
  }
}

// ---- Which view; keys

let jobPage = null;

function route() {
  const match = /^#\/jobs\/([^/]+)$/.exec(location.hash), part = /^#\/(gpus|running|queue|history)$/.exec(location.hash);
  if (!at('login').hidden) return;
  closeLogs();
  jobPage = null;
  at('overview').hidden = Boolean(match);
  at('job').hidden = !match;
  if (match) {
    jobPage = new JobPage(decodeURIComponent(match[1]));
    jobPage.title.focus();
    scrollTo(0, 0);
  } else if (part) {
    const head = at(part[1]);
    head.scrollIntoView({block: 'start'});
    head.focus({preventScroll: true});
  }
  draw();
}

function go(place) {
  if (location.hash === place) route();
  else location.hash = place;
}

addEventListener('hashchange', route);
document.querySelector('.skip').addEventListener('click', (event) => { event.preventDefault(); at('main').focus(); });

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]') || !at('login').hidden) return;
  if (event.target.closest('input, select, textarea')) {
    if (event.key === 'Escape') {
      if (event.target === at('filter')) { at('filter').value = ''; setFilter('text', ''); }
      event.target.blur();
      event.preventDefault();
    }
    return;
  }
  const keys = {'/': () => { if (jobPage) go('#/'); at('overview').hidden = false; at('filter').focus(); at('filter').select(); },
    a: () => openAddForm(), h: () => go('#/'),
    g: () => go('#/gpus'), r: () => go('#/running'), q: () => go('#/queue'), y: () => go('#/history')};
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});

route();
if (document.hidden) rest();                    // of many that are opened beside this one
else follow();
</script>
</body>
</html>
'''


# ==== 16. CLIENT ==== one method for each thing that can be asked; finds, checks and starts the service
# Before anything is sent, the kernel is asked whose socket listens on the port: another user's service on it gets
# nothing.  A request that is safe to repeat is repeated while the service is being started again.

START_PATIENCE_S = 30.0
SUPERVISOR_PATIENCE_S = 2.5
OWNER_PATIENCE_S = 5.0
RETRY_PATIENCE_S = 30.0         # a restart may take as long as a start


class Client:
    """The service's API for Python and for the command line.  Raises NexusError as the service does."""

    def __init__(self, host: str, port: int, token: str = "", layout: Layout | None = None,
                 environ: Mapping[str, str] | None = None, tls_cert: str | None = None) -> None:
        """`tls_cert`: None speaks http; "" trusts whom this machine trusts; else the one certificate in that file."""
        self.host, self.port, self.token, self.tls_cert = host, port, token, tls_cert
        self.layout, self.environ = layout, environ or {}       # of the service on this machine; None: another machine's

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None, is_starting: bool = True, options: Sequence[str] = ()) -> Client:
        """The client of NEXUS_URL, or of this user's service, which is started unless it runs.

        Raises: unavailable, when it does not run and is not to be started; conflict, when it is another machine's.
        """
        environ = os.environ if environ is None else environ
        if environ.get("NEXUS_URL"):
            host, port, is_secure = parse_url(environ["NEXUS_URL"])
            return cls(host, port, environ.get("NEXUS_TOKEN", ""), tls_cert="" if is_secure else None)
        home = find_home(environ)
        layout = Layout(home, "", "")
        running = find_service(layout)
        if running is None:
            if not is_starting:
                raise NexusError("unavailable", f"the nexus service for {home} does not run", hint="nexus start")
            running = await_supervisor(layout) or start_service(layout, environ, options)
        token = "" if is_loopback(running["host"]) else (read_text(layout.token_file) or "").strip()
        return cls(running["host"], running["port"], token, layout, environ, running.get("tls_cert") or None)

    @property
    def url(self) -> str:
        return f"{'http' if self.tls_cert is None else 'https'}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    # What can be asked

    def add(self, command: str, **options: Any) -> str:
        """Queue a command; return the job's id.  Options are the keys of POST /queue."""
        return str(self.submit({"command": command, **options})["id"])

    def add_all(self, commands: Sequence[str], **options: Any) -> list[str]:
        """Queue many commands that share their options, all or none; return their ids."""
        return list(self.submit({"commands": list(commands), **options})["ids"])

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /queue: `{"id"}` or `{"ids"}`, `known` ones of these that `unique` found, and a `warning` when they will not
        start soon.  Repeated until it is done once.
        """
        return dict(self.ask("POST", "/queue", body, key=os.urandom(16).hex()))

    def status(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/status"))

    def queue(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/queue" + encode_query(query)))

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/jobs" + encode_query(query)))

    def job(self, job_id: str) -> dict[str, Any]:
        if not re.fullmatch(r"\w+", job_id):
            raise NexusError("not_found", f"no job '{format_line(job_id, 40)}'", hint="nexus jobs lists them")
        return dict(self.ask("GET", f"/jobs/{quote_path(job_id)}"))

    def kill(self, job_id: str) -> None:
        self.ask("DELETE", f"/jobs/{quote_path(job_id)}")

    def remove(self, job_id: str) -> None:
        self.ask("DELETE", f"/queue/{quote_path(job_id)}")

    def move(self, job_id: str, **change: int) -> None:
        self.ask("PATCH", f"/queue/{quote_path(job_id)}", change)

    def why(self, job_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/jobs/{quote_path(job_id)}/why"))

    def retry(self, job_id: str) -> list[str]:
        """The ids of the new job, and of those that were cancelled because the old one had failed."""
        answer = self.ask("POST", f"/jobs/{quote_path(job_id)}/retry")
        return [answer["id"], *answer.get("dependents", ())]

    def pause(self, gpu: int | str | None = None, group: str | None = None) -> None:
        """The queue, or a GPU: 0, or of another machine "n1:0"."""
        self.ask("POST", ("/service/pause" if gpu is None else f"/gpus/{quote_path(str(gpu))}/pause") + encode_query({"group": group}))

    def resume(self, gpu: int | str | None = None, group: str | None = None) -> None:
        self.ask("POST", ("/service/resume" if gpu is None else f"/gpus/{quote_path(str(gpu))}/resume") + encode_query({"group": group}))

    def nodes(self) -> list[dict[str, Any]]:
        """This machine, and the others that jobs are given to."""
        return list(self.ask("GET", "/nodes"))

    def add_node(self, **facts: Any) -> None:
        """`facts` as in [[nodes]]: nexus is there already."""
        self.ask("POST", "/nodes", facts)

    def remove_node(self, name: str, force: bool = False) -> None:
        self.ask("DELETE", f"/nodes/{quote_path(name)}" + encode_query({"force": "true" if force else None}))

    def stop(self) -> None:
        self.ask("POST", "/service/stop")

    def metrics(self) -> str:
        """For Prometheus."""
        return b"".join(self.open_stream("/metrics")).decode()

    def health(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/health"))

    def logs(self, job_id: str, follow: bool = False, stream: str = "both", tail: int | None = None) -> Iterator[bytes]:
        """A job's output, or with "service" the service's log, in pieces as they come."""
        query = encode_query({"follow": "true" if follow else None, "tail": tail, **({} if job_id == "service" else {"stream": stream})})
        path = "/service/logs" if job_id == "service" else f"/jobs/{quote_path(job_id)}/logs"
        return self.open_stream(path + query)

    def follow(self, job_id: str, stream: str, tail: int | None = None) -> Iterator[bytes]:
        """A job's stdout or stderr until it ends; a restart of the service in between loses and repeats nothing of it."""
        begin, received = None, 0                       # of the file: where that begins what was asked for, and how much of it has come
        while True:
            where = {"tail": tail} if begin is None else {"offset": begin + received}
            told: dict[str, str] = {}
            try:
                for piece in self.open_stream(f"/jobs/{quote_path(job_id)}/logs" + encode_query(
                        {"follow": "true", "stream": stream, **where}), told):
                    received += len(piece)
                    yield piece
                return
            except NexusError as error:
                if error.kind != "unavailable":
                    raise
                if begin is None and "Log-Offset" in told:
                    begin = int(told["Log-Offset"])
                self.ask("GET", "/")

    def wait(self, job_ids: Sequence[str], on_end: Callable[[dict[str, Any]], None] = lambda job: None,
             on_wait: Callable[[dict[str, Any]], None] = lambda job: None) -> list[dict[str, Any]]:
        """Wait until jobs have finished; return them.  A restart of the service in between is waited for.

        `on_wait` gets those that are pending: at first, and when the queue or a group was paused or resumed.
        """
        finished: dict[str, dict[str, Any]] = {}
        while len(finished) < len(set(job_ids)):
            try:
                self.wait_once(job_ids, finished, on_end, on_wait)
            except NexusError as error:
                if error.kind != "unavailable":
                    raise
                self.ask("GET", "/")                    # it is back, or this says that it is not
        return [finished[job_id] for job_id in job_ids]

    def wait_once(self, job_ids: Sequence[str], finished: dict[str, dict[str, Any]], on_end: Callable[[dict[str, Any]], None],
                  on_wait: Callable[[dict[str, Any]], None]) -> None:
        """Raises: unavailable, when the service ends; what has `finished` by then need not be there any more."""
        events = self.open_stream("/events")
        next(events)                                    # from here on nothing is missed
        for job_id in [job_id for job_id in dict.fromkeys(job_ids) if job_id not in finished]:
            job = self.job(job_id)
            if job["status"] in FINAL:
                finished[job_id] = job
                on_end(job)
            elif job["status"] == PENDING:
                on_wait(job)
        rest = b""
        while len(finished) < len(set(job_ids)):
            piece = next(events, None)
            if piece is None:
                raise NexusError("unavailable", "the service ended", hint="nexus start")
            *blocks, rest = (rest + piece).split(b"\n\n")
            if any(block.startswith(b"event: reset") for block in blocks):
                raise NexusError("unavailable", "events were missed", hint="look again")
            for event in filter(None, map(parse_job_event, blocks)):
                if event["id"] in job_ids and event["id"] not in finished and event["status"] in FINAL:
                    finished[event["id"]] = event
                    on_end(event)
            if any(block.partition(b"event: ")[2].startswith((b"queue", b"group")) for block in blocks):
                for job in self.queue():
                    if job["id"] in job_ids:
                        on_wait(job)

    # The wire

    def ask(self, method: str, path: str, body: object = None, key: str = "") -> Any:
        """One call; its answer's JSON, or None.  Raises: what the service answers; unavailable."""
        content = None if body is None else encode_json(body).encode("ascii")
        is_repeatable = method == "GET" or bool(key)
        give_up_at = time.monotonic() + RETRY_PATIENCE_S
        while True:
            try:
                status, answer = self.exchange(method, path, content, key)
                break
            except OSError as error:
                is_safe = is_repeatable or isinstance(error, ConnectionRefusedError) or "CERTIFICATE" in str(error)    # nothing was sent
                if not is_safe or time.monotonic() > give_up_at or self.layout is None or "CERTIFICATE" in str(error):
                    hint = "nexus start" if self.layout else "check NEXUS_URL, and whether nexus runs there"
                    if "CERTIFICATE" in str(error) and self.layout is None:
                        hint = "SSL_CERT_FILE=cert.pem trusts a certificate of your own"
                    raise NexusError("unavailable", f"{method} {path}: the connection to the service at {self.url} "
                                     f"failed ({error.strerror or error or 'it was closed'})",
                                     hint=hint if is_safe else "it may have been done or not: look before you repeat it") from None
                self.find_again()
        return parse_answer(status, answer, path)

    def find_again(self) -> None:
        """After a lost connection: the service's supervisor starts it again, or it is somewhere else now."""
        assert self.layout
        time.sleep(0.1)
        running = find_service(self.layout)
        if running:
            self.host, self.port, self.tls_cert = running["host"], running["port"], running.get("tls_cert") or None

    def connect(self) -> socket.socket:
        """Raises: OSError; forbidden, when somebody else's service listens there."""
        host = find_address(self.host)
        if self.layout is not None:
            self.check_owner((host, self.port), None)   # before they even see a connection
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        connection.settimeout(120)
        try:
            connection.connect((host, self.port))
            if self.layout is not None:
                self.check_owner((host, self.port), connection.getsockname()[:2])
            return connection if self.tls_cert is None else self.secure(connection)
        except BaseException:
            connection.close()
            raise

    def secure(self, connection: socket.socket) -> ssl.SSLSocket:
        """Speak TLS.  Raises: OSError, when the other end is not whom its name says."""
        import ssl
        context = ssl.create_default_context(cafile=self.tls_cert or None)
        context.check_hostname = self.layout is None        # of the service on this machine it is known whose it is
        if self.tls_cert:
            context.verify_flags |= 0x80000                 # VERIFY_X509_PARTIAL_CHAIN: that very one, whoever signed it
        return context.wrap_socket(connection, server_hostname=self.host)

    def check_owner(self, there: tuple[str, int], here: tuple[str, int] | None) -> None:
        """Whose listens there and, once connected from `here`, whose is the other end?

        Raises: forbidden, when it is not this user's; ConnectionError, when it cannot be known.
        """
        uid = find_socket_uid(there, here)
        give_up_at = time.monotonic() + OWNER_PATIENCE_S
        while here and uid is None:                     # not accepted yet
            if time.monotonic() > give_up_at or find_socket_uid(there, None) is None:
                raise ConnectionError("it did not accept the connection")
            time.sleep(0.001)
            uid = find_socket_uid(there, here)
        if uid is not None and uid != os.geteuid():
            raise NexusError("forbidden", f"port {there[1]} on {there[0]} belongs to a program of {find_user(uid)}: nothing was sent to it",
                             hint="set another port: nexus config edit, [service] port")

    def exchange(self, method: str, path: str, content: bytes | None, key: str) -> tuple[int, bytes]:
        """One request on a connection of its own.  http.client would cost `nexus add` 35 ms."""
        head = [f"{method} {path} HTTP/1.0", f"Host: {self.host if ':' not in self.host else f'[{self.host}]'}:{self.port}"]
        if self.token:
            head.append(f"Authorization: Bearer {self.token}")
        if key:
            head.append(f"Idempotency-Key: {key}")
        if content is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        with self.connect() as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode("latin-1", "replace") + (content or b""))
            pieces = []
            while True:
                piece = connection.recv(1 << 20)
                if not piece:
                    break
                pieces.append(piece)
        head_text, found, body = b"".join(pieces).partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head_text)
        if not found or (length and len(body) < int(length[1])):
            raise ConnectionError("it closed the connection before its answer was complete")
        return int(head_text.split(None, 2)[1]), body

    def open_stream(self, path: str, told: dict[str, str] | None = None) -> Iterator[bytes]:
        """The pieces of an answer as they come, and before the first its headers in `told`.

        Raises: what the service answers; unavailable, when the line is cut.
        """
        import http.client
        try:
            line = http.client.HTTPConnection(self.host, self.port, timeout=120)
            line.sock = self.connect()
            line.request("GET", path, headers={"Authorization": f"Bearer {self.token}"} if self.token else {})
            response = line.getresponse()
            if response.status >= 400:
                parse_answer(response.status, response.read(), path)
            if told is not None:
                told.update(response.getheaders())
            while True:
                piece = response.read1(65536)
                if not piece:
                    return
                yield piece
        except (OSError, http.client.HTTPException) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else "it was cut"
            raise NexusError("unavailable", f"GET {path}: the connection to the service was lost ({why})", hint="nexus start") from None


def parse_answer(status: int, answer: bytes, path: str) -> Any:
    try:
        data = json.loads(answer) if answer.strip() else None
    except ValueError:
        raise NexusError("unavailable", f"{path}: what answers there is not nexus", hint="check NEXUS_URL and the port") from None
    if status == 503 and isinstance(data, dict) and "checks" in data:
        return data
    if status >= 400:
        data = data if isinstance(data, dict) else {}
        kind = data.get("error") if data.get("error") in KINDS else "internal"
        raise NexusError(str(kind), str(data.get("message", f"HTTP status {status}")), str(data.get("hint", "")))
    return data


def parse_job_event(block: bytes) -> dict[str, Any] | None:
    """The job of a `job` event; None of any other block of an event stream."""
    lines = dict(line.partition(b": ")[::2] for line in block.split(b"\n"))
    job = json.loads(lines[b"data"]) if lines.get(b"event") == b"job" else None
    return job if isinstance(job, dict) else None


def parse_url(url: str) -> tuple[str, int, bool]:
    """(host, port, whether it is https) of NEXUS_URL.  Raises: usage."""
    match = re.fullmatch(r"(https?)://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?/?", url)
    if not match:
        raise NexusError("usage", f"NEXUS_URL={url} is not an address like http://gpu1:6234 or https://gpu1.example.org",
                         hint="unset NEXUS_URL to use this machine's service")
    return match[2].strip("[]"), int(match[3] or (443 if match[1] == "https" else 80)), match[1] == "https"


def quote_path(text: str) -> str:
    """A word as part of a path."""
    return "".join(c if c.isalnum() and c.isascii() else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogateescape"))
                   for c in text) or "%20"


def encode_query(query: Mapping[str, Any]) -> str:
    given = [f"{key}={quote_path(str(fact))}" for key, fact in query.items() if fact is not None]
    return "?" + "&".join(given) if given else ""


def find_service(layout: Layout) -> dict[str, Any] | None:
    """What service.json says of a service that runs now; None when none does.  Raises: conflict, when it is another machine's."""
    running = read_json(layout.service_file)
    if not running or not isinstance(running.get("pid"), int) or not isinstance(running.get("port"), int):
        return None
    if running.get("machine_id") != read_machine_id():
        raise describe_other_machine(str(running.get("machine")), f"{layout.service_file} says so")
    return running if is_alive(running) else None


def is_alive(running: Mapping[str, Any]) -> bool:
    """Whether the process of which a service.json tells still is."""
    try:
        with open(f"{PROC}/{running['pid']}/stat", encoding="utf-8", errors="replace") as file:
            process = parse_proc_stat(file.read())
    except (OSError, ValueError, IndexError):
        return False
    return running.get("boot_id") == read_boot_id() and process.started == running.get("started") and process.state not in "ZX"


def await_supervisor(layout: Layout) -> dict[str, Any] | None:
    """A service that was killed is about to be started again, as it was; None when it has not come back in a while."""
    left = read_json(layout.service_file)
    if not left or left.get("boot_id") != read_boot_id() or os.path.exists(layout.stopped_file):
        return None
    give_up_at = time.monotonic() + SUPERVISOR_PATIENCE_S
    while time.monotonic() < give_up_at:
        running = find_service(layout)
        if running:
            return running
        time.sleep(0.02)
    return None


def start_service(layout: Layout, environ: Mapping[str, str], options: Sequence[str] = ()) -> dict[str, Any]:
    """Start the service and wait until it answers.  Raises: why it could not be started."""
    path = options[list(options).index("--config") + 1] if "--config" in options else layout.config_file
    config = load_config(path, environ)
    check_machine(layout, "--take-over" in options)
    make_folder(layout.home)
    try:
        os.unlink(layout.start_error_file)
    except OSError:
        pass
    screen = Screen(layout) if config.jobs.launcher == "screen" else None
    if screen and screen.prepare():             # there is a reason against it
        screen = None
    mark_stopped(layout, False)
    start_supervisor(layout, screen, environ, options)
    give_up_at = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < give_up_at:
        running = find_service(layout)
        if running:
            return running
        refusal = read_json(layout.start_error_file)
        if refusal:
            raise NexusError(str(refusal.get("kind")) if refusal.get("kind") in KINDS else "unavailable", str(refusal.get("message")),
                             str(refusal.get("hint", "")))
        time.sleep(0.01)
    raise NexusError("unavailable", f"the service did not start within {START_PATIENCE_S:g} s",
                     hint=f"see {layout.service_log}, or try it in the foreground: nexus serve")


# ==== 17. COMMANDS ==== one function for each subcommand: (call) -> exit code
# Data goes to stdout, words about it to stderr.  What a command takes is said in COMMANDS, in the next section.


class Call:
    """One run of the command line: its options, streams and environment."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str], out: TextIO, err: TextIO,
                 commands: Sequence[Command]) -> None:
        self.options, self.environ, self.out, self.err, self.commands = options, environ, out, err, commands
        self.paint = Paint(is_colourful(out, environ))
        self.width = terminal_width(out)

    def client(self, is_starting: bool = True) -> Client:
        return Client.find(self.environ, is_starting)

    def print(self, text: str) -> None:
        """Raises: unavailable; BrokenPipeError, when nobody reads on."""
        try:
            self.out.write(text)
            self.out.flush()
        except OSError as error:
            raise describe_output_error(error) from None

    def print_json(self, data: object) -> None:
        self.print(json.dumps(data, indent=2) + "\n")

    def say(self, text: str) -> None:
        self.err.write(f"nexus: {text}\n")
        self.err.flush()

    @property
    def home(self) -> str:
        return find_home(self.environ)


def argument(*flags: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What add_argument is called with."""
    return flags, settings


def parse_line_count(text: str) -> int:
    """What -n takes.  Raises: usage."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        refuse(f"-n must be a whole number of 0 or more, not '{format_line(text, 40)}'", hint="-n 20 shows the last 20")
    return int(text)


@value
class Command:
    name: str
    summary: str                # empty: not listed
    run: Callable[[Call], int]
    arguments: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = ()
    description: str = ""


# What people type who come from elsewhere
FOREIGN_WORDS = {"ps": "jobs", "ls": "jobs", "list": "jobs", "list-jobs": "jobs", "rm": "remove", "info": "show ID", "submit": "add",
                 "watch": "status --watch", "top": "status --watch", "stat": "status", "gpus": "status", "tail": "logs -f ID",
                 "config-sample": "config sample", "pause-gpu": "pause GPU", "resume-gpu": "resume GPU", "cancel-job": "cancel ID"}


def find_command(name: str, commands: Sequence[Command]) -> Command:
    """Raises: usage, with the nearest name."""
    for command in commands:
        if command.name == name:
            return command
    listed = [command.name for command in commands if command.summary]
    hint = f"nexus {FOREIGN_WORDS[name]}" if name in FOREIGN_WORDS else suggest(name, listed) or "nexus help lists them"
    raise NexusError("usage", f"'{format_line(name, 40)}' is not a command", hint)


def make_parser(command: Command, out: TextIO | None = None) -> argparse.ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        def print_help(self, file: Any = None) -> None:
            super().print_help(out or file)

        def error(self, message: str) -> NoReturn:
            hint = f"nexus help {command.name}"
            if message.startswith("unrecognized arguments"):
                unknown = next((word.partition("=")[0] for word in message.split()[2:] if word.startswith("--")), "")
                near = suggest(unknown, [flag for flags, _ in command.arguments for flag in flags]) if unknown else ""
                if command.name in ("add", "run"):
                    hint = f'put the command in quotes: nexus {command.name} "python train.py --lr 0.1"; options of nexus: {hint}'
                hint = "; ".join(filter(None, [near, hint]))
            raise NexusError("usage", f"{command.name}: {message}", hint)

    parser = Parser(prog=f"nexus {command.name}", description=" ".join([command.summary[:1].upper() + command.summary[1:] + ".",
                                                                        command.description]),
                    allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80))
    is_one_of = command.name in ("status", "metrics", "kill", "move")
    exclusive = parser.add_mutually_exclusive_group(required=command.name == "move") if is_one_of else parser
    for flags, settings in command.arguments:
        (exclusive if flags[0].startswith("--") else parser).add_argument(*flags, **settings)
    parser.formatter_class = argparse.HelpFormatter     # it asks for the terminal's width, at each add_argument too, by a slow import
    return parser


def format_help(commands: Sequence[Command]) -> str:
    rows = [f"  {command.name:<9} {command.summary}" for command in commands if command.summary]
    return ("nexus: a queue for the GPUs of this machine\n\nnexus [command] [options]\n\n" + "\n".join(rows) +
            "\n\nnexus help COMMAND says what it takes; nexus --version tells this copy from others.\n"
            "Exit codes: 0; 1 internal, unhealthy; 2 usage; 3 not found; 4 conflict; 5 forbidden; 6 unavailable.\n"
            "NEXUS_HOME moves ~/.nexus; NEXUS_MOCK_GPUS=2 tries it without a GPU; NO_COLOR=1 takes the colours away.\n")


def describe_output_error(error: OSError) -> Exception:
    return error if isinstance(error, BrokenPipeError) else NexusError(
        "unavailable", f"the output cannot be written: {error.strerror}", hint="check where stdout goes")


def is_colourful(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def terminal_width(stream: TextIO) -> int:
    """Columns of a terminal; 0 for a file or a pipe, where nothing is cut."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def cmd_status(call: Call) -> int:
    if call.options.watch:
        return watch_status(call)
    client = call.client()
    status = client.status()
    if call.options.json:
        call.print_json(status)
    elif call.options.detailed:
        call.print(format_detailed(status, client.health(), call.paint))
    else:
        call.print(format_snapshot(status, call.paint, call.width))
        if status["hash"] != file_hash() and client.layout:
            call.say(f"the service is nexus {status['version']} ({status['hash']}), this is {__version__} ({file_hash()}); "
                     "nexus restart brings them together")
    return 0


def watch_status(call: Call) -> int:
    """Redraw until Ctrl-C; on a terminal in its second screen, so that the first is as it was afterwards."""
    is_terminal = call.out.isatty()
    call.print("\x1b[?1049h\x1b[?25l\x1b[?7l" if is_terminal else "")
    try:
        while True:
            text = format_snapshot(call.client().status(), call.paint, call.width)
            if is_terminal:
                rows = os.get_terminal_size(call.out.fileno()).lines
                lines = text.splitlines()[: rows - 2]
                lines += ["", time.strftime("%H:%M:%S") + "  Ctrl-C ends"]
                text = "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines[:-1]) + lines[-1] + "\x1b[J"
            call.print(text if is_terminal else text + "\n")
            time.sleep(1)
    except KeyboardInterrupt:
        return 0
    finally:
        call.print("\x1b[?7h\x1b[?25h\x1b[?1049l" if is_terminal else "")


# Options of add and run: their keys in POST /queue, and what makes them of the text given.

OPTION_PARSERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "gpus": ("gpus", lambda text: parse_option_number("--gpus", text)), "gpu_ids": ("gpu_ids", str),
    "gpu_mem": ("gpu_mem_mib", parse_memory), "name": ("name", str), "priority": ("priority", str), "group": ("group", str),
    "max_concurrent": ("max_concurrent", lambda text: parse_option_number("--max-concurrent", text)), "after": ("after", str),
    "retries": ("retries", lambda text: parse_option_number("--retries", text)), "timeout": ("timeout_seconds", parse_duration),
    "expect": ("expected_time", parse_duration), "conda": ("conda", str), "llm": ("llm", str), "node": ("node", str)}


def make_options(call: Call) -> dict[str, Any]:
    """The keys of POST /queue that the options of add and run, and where it is called from, stand for.  Raises: usage."""
    given = call.options
    misleading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE") if given.snapshot else ()        # of a hook that adds a job
    environ = {name: text for name, text in call.environ.items()
               if not is_job_variable(name) and name not in ("CUDA_VISIBLE_DEVICES", *misleading)}
    made: dict[str, Any] = {"env": dict(parse_assignments(given.env))}
    if not call.environ.get("NEXUS_URL"):
        is_there = given.node and (given.cwd or "").startswith("/")         # on that machine
        made.update(environment=environ, cwd=given.cwd if is_there else find_cwd(given.cwd), umask=read_umask(),
                    limits={name: list(pair) for name, pair in current_limits().items()})
    elif given.cwd:                             # what this machine is like says nothing of that one
        made["cwd"] = given.cwd
    for option, (key, parse) in OPTION_PARSERS.items():
        text = getattr(given, option)
        if text is not None:
            made[key] = parse_option(option, text, lambda text, key=key, parse=parse: SUBMISSION_PARSERS[key](parse(text)))  # type: ignore[misc]
    return {**made, **{key: True for key in ("tty", "cuda_arg", "unique") if getattr(given, key)}}


def parse_option(option: str, text: str, parse: Callable[[str], Any]) -> Any:
    """Raises: usage, naming the option."""
    try:
        return parse(text)
    except NexusError as error:
        flag = "--" + option.replace("_", "-")
        raise NexusError(error.kind, error.message if flag in error.message else f"{flag}: {error.message}", error.hint) from None


def parse_option_number(option: str, text: str) -> float:
    if not re.fullmatch(r"-?([0-9]{1,12}(\.[0-9]{0,9})?|\.[0-9]{1,9})", text):
        hint = "--gpus 1; --gpus 0.5 shares one; --gpus 0 runs a job without a GPU" if option == "--gpus" else f"{option} 2"
        if option == "--gpus" and re.fullmatch(r"[0-9]+([,-][0-9]+)+", text):
            hint = f"certain ones: --gpu-ids {text}; how many of them: --gpus N"
        refuse(f"{option} must be a number, not '{format_line(text, 40)}'", hint)
    return float(text) if "." in text else int(text)


def parse_assignments(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, fact = text.partition("=")
        if not name or not equals:
            refuse(f"--env {format_line(text, 60)} is not like NAME=VALUE", hint="--env WANDB_MODE=disabled")
        yield name, fact


def find_cwd(given: str | None) -> str:
    try:
        path = os.path.abspath(given) if given else os.getcwd()
    except FileNotFoundError:
        raise NexusError("usage", "the current directory has been deleted", hint="cd somewhere else, or use --cwd DIR") from None
    if not os.path.isdir(path):
        raise NexusError("usage", f"--cwd {path} is not a directory", hint="make it first: the job runs in it")
    return path


def read_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def read_commands(call: Call) -> list[str]:
    """What add and run are to queue: the words given, or the lines of --file, for each combination of --sweep.  Raises: usage."""
    commands = read_plain_commands(call)
    sweeps = [parse_sweep(text) for text in call.options.sweep]
    return [made for command in commands for made in expand_sweep(command, sweeps)] if sweeps else commands


def read_plain_commands(call: Call) -> list[str]:
    words, path = call.options.command, call.options.file
    if path is None:
        if not words:
            refuse("there is no command", hint='nexus add "python train.py", or nexus add --file commands.txt')
        return [words[0] if len(words) == 1 else " ".join(map(quote, words))]
    if words:
        refuse("give a command or --file, not both")
    try:
        if path == "-":
            text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        else:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
    except OSError as error:
        raise NexusError("usage", f"cannot read {path}: {error.strerror}",
                         hint="--file takes a file with one command a line, or - for standard input") from None
    commands = parse_commands(text)
    if commands and all(re.match(r"-?[0-9]+ *,[^,]+,", command) for command in commands):
        refuse(f"{path} holds rows like priority,script,conda_env,arguments,allowed_gpus, and --file takes commands",
               hint="name it in config.toml: [jobs] jobs_file (nexus config edit, nexus restart)")
    if not commands:
        refuse(f"{path} holds no command", hint="one a line; empty lines and those that begin with # are left out")
    return commands


def cmd_add(call: Call) -> int:
    commands = read_commands(call)
    options = make_options(call)
    client = call.client()
    if call.options.dry_run:
        return show_dry_run(call, client, commands, options)
    is_one = call.options.file is None and not call.options.sweep
    code = take_code(call, client)
    answer = submit_with_code(client, {**options, **code, **({"command": commands[0]} if is_one else {"commands": commands})}, code)
    if call.options.json:
        call.print_json(answer)
    else:
        call.print("".join(f"{job_id}\n" for job_id in answer.get("ids") or [answer["id"]]))
        say_not_added(call, answer)
        say_where(call, client)
    return 0


def say_where(call: Call, client: Client) -> None:
    if client.layout is None and not call.options.cwd:
        call.say(f"it runs in the home directory at {client.host}, with the environment there; --cwd DIR names another")


def show_dry_run(call: Call, client: Client, commands: Sequence[str], options: Mapping[str, Any]) -> int:
    """Print what would be queued, once the service has found nothing wrong with it."""
    if call.options.snapshot:
        find_work_tree(options["cwd"], call.environ)
    answer = client.submit({**options, "commands": commands, "dry_run": True})
    if call.options.json:
        call.print_json(answer["jobs"])
    else:
        call.print("".join(f"{job['command']}\n" for job in answer["jobs"]))
        say_not_added(call, answer)
        call.say(f"{format_count(len(answer['jobs']), 'job')} would be added; this was a dry run")
    return 0


def say_not_added(call: Call, answer: Mapping[str, Any]) -> None:
    for job_id in answer.get("known", ()):
        call.say(f"job {job_id} is the same and is there already: nothing was added for it")
    if "warning" in answer:
        call.say(answer["warning"])


def submit_with_code(client: Client, body: Mapping[str, Any], code: Mapping[str, Any]) -> dict[str, Any]:
    """Queue it; a snapshot that no job came to need goes again."""
    is_needed = False
    try:
        answer = client.submit(body)
        is_needed = not answer.get("known")
        return answer
    finally:
        if code and not is_needed and not any(job["snapshot"] == code["snapshot"] for job in client.jobs()):
            release_snapshot(code["snapshot_repo"], code["snapshot"], os.environ)


def take_code(call: Call, client: Client) -> dict[str, Any]:
    """The keys that keep the code as it is now, if --snapshot asks for that.  Raises: usage, unavailable."""
    if not call.options.snapshot:
        return {}
    if client.layout is None:
        raise NexusError("usage", "--snapshot keeps a work tree of the machine that runs the job",
                         hint="add it there, or without --snapshot")
    cwd = os.path.realpath(find_cwd(call.options.cwd))
    kept = take_snapshot(cwd, call.environ)
    if kept.empty:
        call.say(f"a snapshot leaves these empty, they are repositories of their own: {', '.join(map(format_line, kept.empty))}")
    return {"snapshot": kept.commit, "snapshot_repo": kept.repository, "cwd": cwd}


def cmd_run(call: Call) -> int:
    if call.options.json and not call.options.dry_run:
        refuse("run shows what the job prints, which is not JSON: --json goes with --dry-run",
               hint='nexus add --json tells the id; a --json of the command belongs in its quotes: nexus run "python train.py --json"')
    commands = read_commands(call)
    if len(commands) != 1:
        refuse(f"run takes one command, and these are {len(commands)}", hint="nexus add queues them all")
    options = make_options(call)
    client = call.client()
    if call.options.dry_run:
        return show_dry_run(call, client, commands, options)
    code = take_code(call, client)
    job_id = submit_with_code(client, {**options, **code, "command": commands[0]}, code)["id"]
    try:
        call.say(f"job {job_id}")
        say_where(call, client)
        if has_input():
            call.say(f"it does not get this input: put < FILE into the command, or type at its terminal, if any (nexus attach {job_id})")
        announce_wait(call, client, job_id)
        follow_job(call, client, job_id)
        job = client.wait([job_id])[0]
        if job["cause"] not in (None, "exit"):          # the exit code alone does not say it
            call.say(describe_end(job))
        return exit_code_of(job)
    except KeyboardInterrupt:
        call.err.write("\n" if call.err.isatty() else "")
        call.say(describe_going_on(client.job(job_id)))
        return 130
    except BrokenPipeError:                             # `nexus run ... | head`
        try:
            call.say(describe_going_on(client.job(job_id)))
        except BrokenPipeError:                         # stderr goes there too
            pass
        return 141                                      # 128 + SIGPIPE


def describe_going_on(job: Mapping[str, Any]) -> str:
    """What becomes of a job that is no longer looked at."""
    return describe_end(job) if job["status"] in FINAL else (
        f"job {job['id']} goes on; follow it: nexus logs -f {job['id']}; stop it: nexus cancel {job['id']}")


def has_input() -> bool:
    """Whether somebody pipes something into this command, or gives it a file."""
    import fcntl
    import stat
    import struct
    import termios
    try:
        status = os.fstat(0)
        if stat.S_ISFIFO(status.st_mode):
            return bool(struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, bytes(4)))[0])
        return stat.S_ISREG(status.st_mode) and status.st_size > 0
    except (OSError, ValueError):
        return False


def announce_wait(call: Call, client: Client, job_id: str) -> None:
    """Say why a job waits until it has started: at first, and when the reason is another after a minute."""
    said, said_at, began = "", float("-inf"), time.monotonic()
    while True:
        job = client.job(job_id)
        now = time.monotonic()
        if job["status"] != PENDING:
            return
        if job["waiting_for"] != said and now - began > 0.5 and now - said_at > 60:
            said, said_at = job["waiting_for"], now
            before = f" ({format_count(job['position'], 'job')} before it)" if job["position"] else ""
            call.say(f"it waits: {said}{before}")
        time.sleep(0.05 if now - began < 2 else 0.5)


def follow_job(call: Call, client: Client, job_id: str, tail: int | None = None, stream: str = "both") -> None:
    """Pass on a job's stdout to stdout and its stderr to stderr until it ends."""
    import threading
    faults: list[BaseException] = []

    def pass_on(name: str, target: TextIO) -> None:
        try:
            for piece in client.follow(job_id, name, tail):
                write_bytes(target, piece)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=pass_on, args=(name, target), daemon=True)
               for name, target in (("stdout", call.out), ("stderr", call.err)) if stream in (name, "both")]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not faults:     # when nobody reads the one, the other may go on for days
            thread.join(0.5)                # with a time limit, so that Ctrl-C is heard
    if faults:
        raise faults[0]


def write_bytes(stream: TextIO, piece: bytes) -> None:
    try:
        if hasattr(stream, "buffer"):
            stream.flush()
            stream.buffer.write(piece)
            stream.buffer.flush()
        else:
            stream.write(piece.decode("utf-8", "replace"))
    except OSError as error:
        raise describe_output_error(error) from None


def exit_code_of(job: Mapping[str, Any]) -> int:
    """What `run` and `wait` end with: the job's own exit code; 1 when it has none, or ended well only because it was stopped."""
    return int(job["exit_code"] or job["status"] != COMPLETED)


def describe_end(job: Mapping[str, Any]) -> str:
    why = f" ({format_outcome(job)})" if job["status"] != COMPLETED else ""
    return f"job {job['id']} {job['status']}{why}" + (f": {job['cause_line']}" if job["cause_line"] else "")


def cmd_wait(call: Call) -> int:
    ids = call.options.ids
    if call.options.group is None and not ids:
        refuse("there is nothing to wait for", hint="nexus wait ID, or nexus wait --group NAME")
    client = call.client()
    if call.options.group is not None:
        jobs = list_group(client, call.options.group)
        is_elsewhere = not {job["retried_as"] for job in jobs} <= {None, *(job["id"] for job in jobs)}      # in no group, or another
        kept = {job["id"] for job in (client.jobs() if is_elsewhere else jobs)}
        ids = [*ids, *(job["id"] for job in jobs if job["status"] != COMPLETED and job["retried_as"] not in kept)]
    said: set[str] = set()

    def say_hold(job: Mapping[str, Any]) -> None:
        """Once, that it waits for somebody to resume."""
        why = job["waiting_for"]
        if why not in said and (why == PAUSED or str(why).startswith(f"group {job['group']} is held: ")):
            said.add(why)
            call.say(f"job {job['id']} waits: {why}")

    jobs = client.wait(ids, lambda job: call.say(describe_end(job)), say_hold)
    codes = [exit_code_of(job) for job in jobs]
    return next((code for code in codes if code), 0)


def list_group(client: Client, group: str) -> list[dict[str, Any]]:
    """The jobs of a group.  Raises: not_found."""
    jobs = client.jobs(group=group)
    if not jobs:
        known = {job["group"] for job in client.jobs() if job["group"]}
        raise NexusError("not_found", f"there is no job of group '{format_line(group, 60)}'",
                         hint=suggest(group, known) or "nexus jobs lists all")
    return jobs


def find_failed(jobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The failed jobs that were not added again since."""
    known = {job["id"] for job in jobs}
    return [job for job in jobs if job["status"] == FAILED and job["retried_as"] not in known]


def cmd_queue(call: Call) -> int:
    jobs = call.client().queue(group=call.options.group)
    if call.options.json:
        call.print_json(jobs)
    elif jobs:
        call.print(format_queue(jobs, call.paint, call.width))
    else:
        group = call.options.group
        call.say("no job is pending" + ("" if group is None else f" in group {group or quote(group)}"))
    return 0


def cmd_history(call: Call) -> int:
    jobs = [job for job in call.client().jobs() if job["status"] in FINAL]
    jobs.sort(key=lambda job: job["finished_at"] or "")         # within a second in the service's order: as they ended
    shown = jobs[-call.options.number:] if call.options.number else jobs
    if call.options.json:
        call.print_json(shown)
    elif shown:
        call.print(format_jobs(shown, call.paint, call.width))
        if len(shown) < len(jobs):
            call.say(f"the last {len(shown)} of {len(jobs)}; nexus history -n 0 shows all")
    else:
        call.say("no job has finished yet")
    return 0


def cmd_jobs(call: Call) -> int:
    given = call.options
    jobs = call.client().jobs(status=given.status, user=given.user, group=given.group)
    if call.options.json:
        call.print_json(jobs)
    elif jobs:
        call.print(format_jobs(jobs, call.paint, call.width))
    else:
        is_choice = (given.status, given.user, given.group) != (None, None, None)
        call.say("there is no such job" if is_choice else 'no job yet: nexus add "python train.py"')
    return 0


def cmd_show(call: Call) -> int:
    client = call.client()
    job = client.job(find_targets(client, call.options.id, False)[0])
    if call.options.json:
        call.print_json(job)
    else:
        call.print(format_job(job, call.paint))
    return 0


def cmd_kill(call: Call) -> int:
    """Jobs by id, or whatever runs on a GPU by its index; returns when they are gone."""
    if bool(call.options.targets) == (call.options.group is not None):
        refuse("kill takes ID|GPU, or --group", hint="nexus kill ID, nexus kill 0 for what runs on GPU 0, or nexus kill --group NAME")
    if call.options.all and not any(target.isdigit() or ":" in target for target in call.options.targets):
        refuse("--all is for GPUs: all jobs that share one", hint="nexus kill 0 --all, or nexus kill --group NAME")
    client = call.client()
    if call.options.group is not None:
        return kill_group(call, client, call.options.group)
    named = [job_id for target in call.options.targets for job_id in find_targets(client, target, call.options.all)]
    named = leave_ended(call, client, named)
    return report_ends(call, client, act_on_all(client, named, (RUNNING,), client.kill))


def kill_group(call: Call, client: Client, group: str) -> int:
    """All of a group, those that wait first, so that none of them takes a killed one's place."""
    jobs = [job for job in list_group(client, group) if job["status"] not in FINAL]
    jobs.sort(key=lambda job: job["status"] == RUNNING)
    for job in jobs:
        try:
            cancel_job(client, job["id"])
        except NexusError as error:             # it has ended by itself
            if error.kind != "conflict":
                raise
    if not jobs:
        call.say(f"no job of group {group} is pending or running")
    return report_ends(call, client, [job["id"] for job in jobs])


def act_on_all(client: Client, ids: Sequence[str], statuses: Sequence[str], act: Callable[[str], object]) -> list[str]:
    """Do something to jobs, or to none of them when one has another status: that one comes first, and is refused.

    Raises: not_found, conflict.
    """
    jobs = sorted([client.job(job_id) for job_id in dict.fromkeys(ids)], key=lambda job: job["status"] in statuses)
    for number, job in enumerate(jobs):
        try:
            act(job["id"])
        except NexusError as error:
            if number and error.kind == "conflict" and client.job(job["id"])["cause"] == "dependency":
                continue                        # one of those before has taken it along
            others = "; nothing was done to the others" if not number and len(jobs) > 1 else ""
            raise NexusError(error.kind, error.message + others, error.hint) from None
    return [job["id"] for job in jobs]


def find_targets(client: Client, target: str, takes_all: bool) -> list[str]:
    """The running jobs that an id or a GPU names, `0` or `n1:0`.  Raises: not_found; conflict, when several share the GPU."""
    node, _, index = target.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,9}", index):
        return [target]
    status = client.status()
    gpu = next((gpu for gpu in status["gpu_status"] if (gpu["node"], gpu["index"]) == (node or status["host"]["name"], int(index))), None)
    if gpu is None:
        raise NexusError("not_found", f"there is no GPU {target}", hint="nexus shows them")
    if not gpu["job_ids"]:
        raise NexusError("not_found", f"no job of nexus runs on GPU {target}", hint="nexus shows what runs where")
    if len(gpu["job_ids"]) > 1 and not takes_all:
        raise NexusError("conflict", f"jobs {', '.join(gpu['job_ids'])} share GPU {target}", hint=f"name one, or nexus kill {target} --all")
    return list(gpu["job_ids"])


def report_ends(call: Call, client: Client, ids: Sequence[str]) -> int:
    for job in map(client.job, ids):
        if job["unknown_since"]:
            call.say(f"job {job['id']} is on {job['node']}, not heard since {local_time(job['unknown_since'], '%m-%d %H:%M')}: it is ended "
                     f"once that is back (Ctrl-C leaves it so; nexus node remove {job['node']} --force gives it up)")
    client.wait(ids, lambda job: call.say(describe_end(job)))
    return 0


def leave_ended(call: Call, client: Client, ids: Sequence[str]) -> list[str]:
    """Of several jobs those that have not ended while the command was typed."""
    jobs = [client.job(job_id) for job_id in dict.fromkeys(ids)]
    left = [job["id"] for job in jobs if job["status"] not in FINAL or len(jobs) == 1]
    for job in jobs:
        if job["id"] not in left:
            call.say(f"{describe_end(job)} before")
    return left


def cmd_cancel(call: Call) -> int:
    client = call.client()
    left = leave_ended(call, client, call.options.ids)
    return report_ends(call, client, act_on_all(client, left, (PENDING, RUNNING), lambda job_id: cancel_job(client, job_id)))


def cancel_job(client: Client, job_id: str) -> None:
    """Whether it is pending or running, also when it starts in between."""
    for act in (client.remove, client.kill):
        try:
            return act(job_id)
        except NexusError as error:
            if error.kind != "conflict" or act == client.kill:
                raise


def cmd_remove(call: Call) -> int:
    client = call.client()
    for job_id in act_on_all(client, call.options.ids, (PENDING,), client.remove):
        call.say(f"job {job_id} removed from the queue")
    return 0


def cmd_move(call: Call) -> int:
    given = call.options
    place = {"position": 0 if given.first else 2**31}
    change = place if given.priority is None else {"priority": parse_priority(given.priority)}
    client = call.client()
    client.move(given.id, **change)
    before = client.job(given.id)["position"]
    call.say(f"job {given.id} is now first" if before == 0 else f"job {given.id} now has {format_count(before or 0, 'job')} before it")
    return 0


def cmd_retry(call: Call) -> int:
    given, ids = call.options, call.options.ids
    if not ids and not given.failed and given.group is None:
        refuse("there is nothing to run again", hint="nexus retry ID, nexus retry --failed, or nexus retry --group NAME")
    client = call.client()
    if given.failed or given.group is not None:
        jobs = client.jobs() if given.group is None else list_group(client, given.group)
        named = [client.job(job_id)["id"] for job_id in given.ids]
        ids = [job["id"] for job in find_failed(jobs) if not named or job["id"] in named]
        if not ids:
            call.say("no failed job is left to run again")

    added: set[str] = set()

    def retry(job_id: str) -> None:
        again = client.job(job_id)["retried_as"]
        if again in added:                      # it was cancelled because of one before it, and came along
            return
        new_id, *dependents = client.retry(job_id)
        added.update((new_id, *dependents))
        call.print(new_id + "\n")
        if dependents:
            call.say(f"with it what came after it: {', '.join(dependents)}")

    act_on_all(client, ids, FINAL, retry)
    return 0


def cmd_why(call: Call) -> int:
    told = call.client().why(call.options.id)
    if call.options.json:
        call.print_json(told)
    else:
        call.print(format_why(told, call.paint))
    return 0


def cmd_metrics(call: Call) -> int:
    client = call.client()
    if call.options.prometheus:
        call.print(client.metrics())
        return 0
    metrics = make_metrics(client.status(), [job for status in FINAL for job in client.jobs(status=status)])
    if call.options.json:
        call.print_json(metrics)
    else:
        call.print(format_metrics(metrics, call.paint))
    return 0


def cmd_logs(call: Call) -> int:
    given = call.options
    client = call.client(is_starting=given.id != "service")
    if given.id == "service":
        if given.stream != "both":
            refuse("the service's log is one stream: --stream is for jobs", hint="nexus logs service")
        for piece in client.logs("service", given.follow, tail=given.number):
            write_bytes(call.out, piece)
    else:
        job = client.job(find_targets(client, given.id, False)[0])
        if job["status"] == PENDING:
            call.say(f"job {job['id']} is pending: {job['waiting_for']}")
        if job["unknown_since"]:
            call.say(f"{job['node']} has not been heard since {local_time(job['unknown_since'], '%m-%d %H:%M')}: what job {job['id']} "
                     "has printed since then comes when it is back")
        if given.follow:
            follow_job(call, client, job["id"], given.number, given.stream)
        else:
            print_logs(call, client, job["id"])
    return 0


def print_logs(call: Call, client: Client, job_id: str) -> None:
    for name, target in (("stdout", call.out), ("stderr", call.err)):
        if call.options.stream in (name, "both"):
            for piece in client.logs(job_id, stream=name, tail=call.options.number):
                write_bytes(target, piece)


def cmd_attach(call: Call) -> int:
    """Replace this process by screen, attached to a job's session."""
    client = call.client()
    if client.layout is None:
        raise NexusError("usage", "attach works on the machine itself", hint="ssh -t there, and nexus attach")
    ids = find_targets(client, call.options.target, False)
    job = client.job(ids[0])
    if job["status"] != RUNNING:
        raise NexusError("conflict", f"job {job['id']} is {job['status']}: there is nothing to attach to",
                         hint="why it waits: nexus queue" if job["status"] == PENDING else f"nexus logs {job['id']}")
    if job.get("slurm_id"):
        raise NexusError("conflict", f"job {job['id']} runs as Slurm's {job['slurm_id']} on {job['node']}, without a terminal",
                         hint=f"nexus logs -f {job['id']}, or a shell beside it: srun --jobid={job['slurm_id']} --overlap --pty bash")
    if not job["session"]:
        raise NexusError("conflict", f"job {job['id']} has no screen session",
                         hint=f"nexus logs -f {job['id']}; with screen installed, later jobs have one")
    if job["remote_id"]:
        attach_remote(call, client, job)
    screen = prepare_screen(client.layout)
    if job["session"] not in [f"{pid}.{name}" for pid, name, _ in screen.list_sessions()]:
        raise NexusError("not_found", f"the screen session of job {job['id']} is gone; the job goes on", hint=f"nexus logs -f {job['id']}")
    if not sys.stdin.isatty():
        raise NexusError("usage", "attach needs a terminal", hint=f"nexus logs -f {job['id']}")
    environ = {**call.environ, **screen.environ(), "TERM": find_terminal(call.environ.get("TERM", ""))}
    call.say("Ctrl-A D leaves; Ctrl-C ends the job")
    os.execvpe("screen", ["screen", "-x", job["session"]], environ)


def attach_remote(call: Call, client: Client, job: Mapping[str, Any]) -> NoReturn:
    """Replace this process by ssh, and the nexus of the job's node in it.  Raises: usage, unavailable."""
    node = next(node for node in client.nodes() if node["name"] == job["node"])
    if not node["is_reachable"]:
        raise NexusError("unavailable", f"{node['name']} cannot be reached now: {node['trouble']}", hint=node["hint"] or "nexus node list")
    if not sys.stdin.isatty():
        raise NexusError("usage", "attach needs a terminal", hint=f"nexus logs -f {job['id']}")
    there = " ".join(map(quote, ["env", f"NEXUS_HOME={node['home']}", node["python"], node["path"], "attach", job["remote_id"]]))
    call.say(f"on {node['name']}: Ctrl-A D leaves; Ctrl-C ends the job")
    os.execvpe("ssh", [*call_through(node["control"]), "-t", node["host"], there], dict(call.environ))


def prepare_screen(layout: Layout) -> Screen:
    """Raises: unavailable, when there is no usable screen."""
    screen = Screen(layout)
    reason = screen.prepare()
    if reason:
        raise NexusError("unavailable", reason, hint="apt install screen")
    return screen


def find_terminal(name: str) -> str:
    """A TERM that screen knows: with another it says so and ends, with exit code 0."""
    try:
        import curses
        curses.setupterm(name, 1)
        return name if name != "dumb" else "xterm-256color"
    except Exception:               # no terminfo entry, or no curses
        return "xterm-256color"


def cmd_screens(call: Call) -> int:
    client = call.client()
    if client.layout is None:
        raise NexusError("usage", "screens are listed on the machine itself", hint="ssh there")
    jobs = {job["session"]: job for job in client.jobs(status=RUNNING)}
    rows = []
    for pid, name, state in prepare_screen(client.layout).list_sessions():
        if name == "nexus" or name.startswith("nexus_job_"):
            job = jobs.get(f"{pid}.{name}")
            rows.append([f"{pid}.{name}", state, "the service's log" if name == "nexus" else job["command"] if job
                         else "over, or of another NEXUS_HOME"])
    if rows:
        call.print(format_table(("SESSION", "STATE", "WHAT"), rows, ("magenta", "", "bright"), call.paint, call.width))
        call.say("attach to a job: nexus attach ID; to any: screen -x SESSION")
    else:
        call.say("there is no screen session of nexus")
    return 0


def cmd_pause(call: Call) -> int:
    return set_paused(call, True)


def cmd_resume(call: Call) -> int:
    return set_paused(call, False)


def set_paused(call: Call, is_paused: bool) -> int:
    if call.options.gpus and call.options.group is not None:
        refuse(f"{call.options.subcommand} takes GPUs or --group, not both", hint=f"nexus help {call.options.subcommand}")
    for index in call.options.gpus:
        if not re.fullmatch(r"([\w.-]+:)?[0-9]{1,4}", index):
            raise NexusError("usage", f"'{format_line(index, 40)}' is not a GPU index",
                             hint=f"nexus {call.options.subcommand} 0, or n1:0; without one, the queue")
    client = call.client()
    act, done = (client.pause, "paused") if is_paused else (client.resume, "resumed")
    if call.options.group is not None:
        act(group=call.options.group)
        call.say(f"group {call.options.group} is {done}")
        return 0
    for index in call.options.gpus:
        act(index)
        call.say(f"GPU {index} {done}: it gets {'no new job' if is_paused else 'jobs again'}")
    if not call.options.gpus:
        act()
        call.say(f"the queue is {done}: " + ("nothing new starts, running jobs go on" if is_paused else "jobs start again"))
    return 0


def find_config(call: Call) -> str:
    """The config file of --config, or the usual one, which need not exist.  Raises: usage."""
    given = call.options.config
    if given and not os.path.isfile(given):
        raise NexusError("usage", f"there is no file {given}", hint="nexus config sample prints one")
    return os.path.abspath(given) if given else Layout(call.home, "", "").config_file


def service_options(call: Call) -> list[str]:
    given = call.options
    find_config(call)
    return [*(["--config", os.path.abspath(given.config)] if given.config else []),
            *(["--log-level", given.log_level] if given.log_level else []), *(["--take-over"] if given.take_over else [])]


def refuse_remote(call: Call) -> None:
    """Raises: usage."""
    if call.environ.get("NEXUS_URL"):
        refuse("NEXUS_URL is set, and a service is started on its own machine", hint="ssh there; or unset NEXUS_URL")


def cmd_start(call: Call) -> int:
    refuse_remote(call)
    try:
        client = Client.find(call.environ, is_starting=False)
        if service_options(call):
            raise NexusError("usage", "the service runs already, and these options take effect when it starts",
                             hint=f"nexus restart {' '.join(service_options(call))}; jobs go on")
        call.say(f"the service runs already, at {client.url}")
    except NexusError as error:
        if error.kind != "unavailable" and not (call.options.take_over and error.kind == "conflict"):
            raise
        if call.options.take_over:
            forget_service(Layout(call.home, "", ""))
        client = Client.find(call.environ, options=service_options(call))
        call.say(f"the service runs at {client.url}")
    return 0


def forget_service(layout: Layout) -> None:
    try:
        os.unlink(layout.service_file)
    except OSError:
        pass


def cmd_stop(call: Call) -> int:
    has_run = stop_service(call)
    call.say("the service has ended; running jobs go on, and the next nexus command starts it again" if has_run
             else "the service does not run")
    return 0


def stop_service(call: Call) -> bool:
    """End the service; return whether there was one."""
    try:
        client = Client.find(call.environ, is_starting=False)
    except NexusError as error:
        if error.kind != "unavailable":
            raise
        mark_stopped(Layout(call.home, "", ""), True)       # its supervisor may be about to start it again, or has done so
        try:
            client = Client.find(call.environ, is_starting=False)
        except NexusError:
            return False
    running = find_service(client.layout) if client.layout else None
    client.stop()
    give_up_at = time.monotonic() + 60
    while client.layout and running and is_alive(running):
        if time.monotonic() > give_up_at:
            raise NexusError("unavailable", f"the service (pid {running['pid']}) does not end",
                             hint="see nexus logs service; kill -9 it: jobs go on")
        time.sleep(0.01)
    return True


def cmd_restart(call: Call) -> int:
    refuse_remote(call)
    running = find_service(Layout(call.home, "", "")) or {}
    call.options.config = call.options.config or running.get("config")      # its jobs are where that says
    config = load_config(find_config(call), call.environ).service       # with a bad one the service that runs is not ended
    load_tls(config)
    check_exposure(config, TokenFile(Layout(call.home, "", "")).read(), time.time())
    stop_service(call)
    return cmd_start(call)


def cmd_serve(call: Call) -> int:
    """The service, in the foreground.  What keeps it from starting is also left for the command that waits for it."""
    home, given = call.home, call.options
    layout = Layout(home, "", "")
    try:
        config = load_config(find_config(call), call.environ)
        if given.log_level:
            config = replace(config, service=replace(config.service, log_level=given.log_level))
        layout = make_layout(home, config)
        if call.out.isatty():
            call.say(f"serving; the log is in {layout.service_log}; Ctrl-C ends the service, jobs go on")
        serve(layout, config, call.environ, given.take_over, DASHBOARD_PAGE, os.path.abspath(given.config) if given.config else None)
    except RunsAlready:
        raise
    except NexusError as error:
        try:
            write_atomic(layout.start_error_file, [encode_json({"kind": error.kind, "message": error.message, "hint": error.hint})],
                         is_synced=False)
        except OSError:
            pass
        raise
    return 0


def cmd_config(call: Call) -> int:
    path = Layout(call.home, "", "").config_file
    action = call.options.action
    if action == "path":
        call.print(path + "\n")
    elif action == "sample":
        call.print(format_sample_config())
    elif action == "edit":
        return edit_config(call, path)
    else:
        config = load_config(path, call.environ)
        call.print(f"# {path}" + ("" if os.path.exists(path) else ": there is none; these are the defaults") + "\n" + format_config(config))
    return 0


def edit_config(call: Call, path: str) -> int:
    import shlex
    import subprocess
    make_folder(os.path.dirname(path))
    if not os.path.exists(path):
        write_atomic(path, [format_sample_config()])
    editor = call.environ.get("VISUAL") or call.environ.get("EDITOR") or "vi"
    try:
        code = subprocess.call([*shlex.split(editor), path])
    except (OSError, ValueError) as error:
        raise NexusError("usage", f"the editor '{editor}' cannot be run: {error}",
                         hint="set EDITOR, like EDITOR=nano nexus config edit") from None
    load_config(path, call.environ)
    if code == 0 and find_service(Layout(call.home, "", "")):
        call.say("the running service takes it over at its next start: nexus restart (jobs go on)")
    return code


def cmd_health(call: Call) -> int:
    health = call.client().health()
    if call.options.json:
        call.print_json(health)
    else:
        call.print(format_health(health, call.paint))
    return 0 if health["is_healthy"] else 1


def cmd_token(call: Call) -> int:
    """Tokens are a file's rows, so that the first can be made before a service runs that needs them."""
    if call.environ.get("NEXUS_URL"):
        raise NexusError("usage", "tokens are made on the service's own machine", hint="ssh there; or unset NEXUS_URL")
    make_folder(call.home)
    file, given = TokenFile(Layout(call.home, "", "")), call.options
    act = {"create": create_token, "list": list_tokens, "revoke": revoke_token}[given.action]
    refuse_others(call, {"create": ("days",), "list": ("json",), "revoke": ()})
    return act(call, file)


def create_token(call: Call, file: TokenFile) -> int:
    given, now = call.options, time.time()
    if not 1 <= len(given.words) <= 2:
        raise NexusError("usage", "token create takes a user, and the token if it is not to be made up", hint="nexus token create bob")
    user, text = given.words[0], given.words[1] if given.words[1:] else Clock().new_token()
    expires_at = now + given.days * 86400 if given.days is not None else None
    file.change(lambda tokens: add_token(tokens, user, text, expires_at, now))
    call.print(text + "\n")
    call.say(f"{user} calls with it until {format_time(expires_at) if expires_at else 'it is revoked'}: it is shown only now\n"
             f"NEXUS_TOKEN=..., or curl -H 'Authorization: Bearer ...'; an end: nexus token revoke {user}")
    return 0


def list_tokens(call: Call, file: TokenFile) -> int:
    if call.options.words:
        raise NexusError("usage", "token list takes nothing more", hint="nexus token list")
    tokens, now = file.read(), time.time()
    if call.options.json:
        call.print_json([token_json(token) for token in tokens])
        return 0
    rows = [[token.user, token.sha256[:12], local_time(format_time(token.created_at), "%Y-%m-%d %H:%M"),
             local_time(format_time(token.used_at), "%Y-%m-%d %H:%M") if token.used_at else "never",
             describe_token_end(token, now) or (f"good until {format_time(token.expires_at)}" if token.expires_at else "good")]
            for token in tokens]
    if rows:
        headings, colours = ("USER", "SHA-256", "MADE", "USED", "STATE"), ("bright", "", "cyan", "cyan", "")
        call.print(format_table(headings, rows, colours, call.paint, call.width))
    else:
        call.say("nobody has a token; nexus token create USER makes one")
    return 0


def cmd_node(call: Call) -> int:
    """Whoever may type here may log in there: what is done on the other machine is done by ssh, from here."""
    client = call.client()
    if client.layout is None:
        raise NexusError("usage", "nodes are added on the service's own machine", hint="ssh there; or unset NEXUS_URL")
    act = {"add": add_node, "list": list_nodes, "remove": remove_node}[call.options.action]
    refuse_others(call, {"add": ("name", "jump", "port", "identity"), "list": ("json",), "remove": ("force",)})
    return act(call, client)


def refuse_others(call: Call, taken: Mapping[str, Sequence[str]]) -> None:
    """Options that are for another of a command's actions are not for this one.  `taken`: {action: its options}.  Raises: usage."""
    command, action = call.options.subcommand, call.options.action
    for option in [option for options in taken.values() for option in options]:
        if option not in taken[action] and getattr(call.options, option) not in (None, False):
            home = next(other for other, options in taken.items() if option in options)
            raise NexusError("usage", f"{command} {action} takes no --{option}", hint=f"it is for: nexus {command} {home}")


def add_node(call: Call, client: Client) -> int:
    """Bring this nexus to another machine, start it there, and let the service give it jobs."""
    config = choose_node(call, client)
    assert client.layout
    call.say(f"reaching {config.destination}")
    with open(os.path.abspath(__file__), "rb") as file:
        content = file.read()
    make_folder(client.layout.ssh_folder)
    ssh = Ssh(config, f"{client.layout.ssh_folder}/{os.getpid()}", call.environ)
    try:
        ssh.open()
        wanted = file_hash()
        told = probe_node(ssh, wanted)
        if told["hash"] != wanted:
            install_on_node(ssh, content)
            call.say(f"copied nexus {__version__} ({wanted}) to {told['path']}" + (f", which was {told['hash']}" if told["hash"] else ""))
            told = probe_node(ssh, wanted)
            if told["hash"] != wanted:
                raise NexusError("unavailable", f"{told['path']} on {config.name} is not what was copied there", hint=ssh.by_hand)
        ssh.forward(told["service"]["host"], told["service"]["port"])
        api = NodeApi(ssh.socket, told["token"], bool(told["service"].get("tls_cert")))
        status = api.ask("GET", "/status", None, 60.0)
    except OSError as error:
        raise NexusError("unavailable", f"the nexus on {config.name} does not answer: {error}",
                         hint="its sshd must allow it: AllowTcpForwarding yes in sshd_config; what nexus says there: "
                         "~/.nexus/service.log") from None
    finally:
        ssh.close()
        remove_folder(os.path.dirname(ssh.control))
    client.add_node(**{key: fact for key, fact in encode_value(config).items() if fact})
    await_node(client, config.name)
    gpus = [gpu for gpu in status["gpu_status"] if gpu["node"] == status["host"]["name"]]
    names = "; ".join(sorted({f"{format_line(gpu['name'])}, {gpu['memory_total']}" for gpu in gpus}))
    call.print(f"{config.name}: {format_count(len(gpus), 'GPU')}{f' ({names})' if names else ''}, Python {told['version']}\n")
    for hint in [status["gpu_trouble"], *status["hints"], status["samples_hint"]]:
        if hint:
            call.say(f"{config.name}: {hint}")
    return 0


AGAIN_S = 5.0


def await_node(client: Client, name: str) -> None:
    """Until the service has reached it too.  Raises: unavailable."""
    give_up_at, first = time.monotonic() + SSH_PATIENCE_S, None
    while True:
        node = next(node for node in client.nodes() if node["name"] == name)
        if node["is_reachable"]:
            return
        first = first or node["trouble"]
        if node["trouble"] != first:                        # it has tried since, in vain; it tries once more
            first, give_up_at = node["trouble"], min(give_up_at, time.monotonic() + AGAIN_S)
        if time.monotonic() > give_up_at:
            hint = "the service has another ssh agent than this shell: nexus restart from here, or --identity FILE without a passphrase"
            raise NexusError("unavailable", f"{name} was added, but the service cannot use it: {node['trouble']}",
                             hint=hint if "Permission denied" in node["trouble"] else node["hint"] or "nexus node list")
        time.sleep(0.05)


def choose_node(call: Call, client: Client) -> NodeConfig:
    """The node that is meant: one that is known by its name, or a new one.  Raises: usage."""
    given = call.options
    if len(given.words) != 1:
        raise NexusError("usage", "node add takes one machine", hint="nexus node add gpuuser@10.0.0.5 --name n1")
    known = next((node for node in client.nodes()[1:] if node["name"] == given.words[0]), None)
    options = {"name": given.name, "jump": given.jump, "port": given.port, "identity_file": given.identity}
    if known and not any(options.values()):
        row = {key: known[key] for key in ("name", "host", "user", "port", "jump", "identity_file")}
        return parse_node({key: fact for key, fact in row.items() if fact})
    user, _, host = given.words[0].rpartition("@")
    if options["port"]:
        options["port"] = parse_option("port", options["port"], lambda text: int(text) if is_number(text) else refuse(
            f"'{format_line(text, 40)}' is not a port"))
    if options["identity_file"]:
        options["identity_file"] = os.path.abspath(os.path.expanduser(options["identity_file"]))
        if not os.path.isfile(options["identity_file"]):
            refuse(f"--identity {options['identity_file']} is not there", hint="the private key's file, like ~/.ssh/id_ed25519")
    return parse_node({"host": host, **({"user": user} if user else {}), **{key: fact for key, fact in options.items() if fact}})


def list_nodes(call: Call, client: Client) -> int:
    nodes = client.nodes()
    if call.options.json:
        call.print_json(nodes)
        return 0
    rows = [[node["name"], f"{node['user']}@{node['host']}" if node["host"] and node["user"] else node["host"] or "here", str(node["gpus"]),
             ", ".join(map(format_line, node["gpu_names"])), str(node["running_jobs"]), describe_node_state(node)] for node in nodes]
    call.print(format_table(("NODE", "ADDRESS", "GPUS", "MODEL", "JOBS", "STATE"), rows, ("bright", "", "", "", "", "yellow"), call.paint,
                            call.width))
    for node in nodes:
        if node["hint"]:
            call.say(f"{node['name']}: {node['hint']}")
    return 0


def remove_node(call: Call, client: Client) -> int:
    """Returns when it is gone: its last job is over."""
    if len(call.options.words) != 1:
        raise NexusError("usage", "node remove takes a node's name", hint="nexus node list")
    name = call.options.words[0]
    client.remove_node(name, call.options.force)
    told = -1
    while True:
        node = next((node for node in client.nodes()[1:] if node["name"] == name), None)
        if node is None:
            call.say(f"{name} is removed; its nexus and what it kept are still there")
            return 0
        if node["running_jobs"] and node["running_jobs"] != told:
            told = node["running_jobs"]
            call.say(f"{name} gets no more jobs; {format_count(told, 'job')} there still "
                     f"{'runs' if told == 1 else 'run'} (Ctrl-C leaves it to end by itself; --force gives them up)")
        time.sleep(0.1)


def revoke_token(call: Call, file: TokenFile) -> int:
    if len(call.options.words) != 1:
        raise NexusError("usage", "token revoke takes a user or a token", hint="nexus token list")
    given, now = call.options.words[0], time.time()
    before = file.read()
    file.change(lambda tokens: revoke_tokens(tokens, given, now))
    gone = [token for token in file.read() if token.revoked_at is not None and replace(token, revoked_at=None) in before]
    call.say(f"{format_count(len(gone), 'token')} of {gone[0].user if gone else given} revoked: refused from now on; jobs go on")
    return 0


def parse_days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 36500:
        import argparse
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of days above 0, like 30")
    return days


def cmd_help(call: Call) -> int:
    if call.options.topic is None:
        call.print(format_help(call.commands))
    else:
        command = find_command(call.options.topic, call.commands)
        call.print(make_parser(command).format_help())
    return 0


def cmd_ids(call: Call) -> int:
    """For the shells' completion: ids, or the nodes' names, without starting anything or complaining."""
    try:
        client = Client.find(call.environ, is_starting=False)
        if call.options.status == "nodes":
            call.print("".join(f"{node['name']}\n" for node in client.status()["nodes"][1:]))
            return 0
        jobs = client.jobs(limit=1000)
        call.print("".join(f"{job['id']}\n" for job in jobs if call.options.status in (None, *(
            [job["status"]] if job["status"] not in FINAL else [job["status"], "finished"]))))
    except (NexusError, OSError):
        pass
    return 0


# nexus install

LAUNCHER = """\
{shebang}
# Made by nexus install.  It imports nexus.py rather than running it, so that its compiled form is kept.
import gc
import sys
gc.disable()                    # until there is something to collect
sys.path.insert(0, {folder!r})
import nexus
gc.enable()
sys.exit(nexus.entry())
"""
UNIT = """\
[Unit]
Description=nexus, the GPU job queue

[Service]
ExecStart="{python}" "{script}" serve
Environment="NEXUS_HOME={home}"
# Only the service is ended with the unit: jobs go on, and the next start adopts them.
KillMode=process
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2 4

[Install]
WantedBy=default.target
"""
BASH_COMPLETION_PLACES = ("/usr/share/bash-completion/bash_completion", "/etc/bash_completion", "/usr/local/share/bash-completion")
BASH_COMPLETION = """\
_nexus() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
}}
complete -o default -F _nexus nexus
"""
ZSH_COMPLETION = """\
#compdef nexus
_nexus() {{
    if (( CURRENT == 2 )); then
        local -a commands=({commands})
        _describe command commands
        return
    fi
    case $words[2] in
{cases}
    esac
    _files
}}
_nexus "$@"
"""


def cmd_install(call: Call) -> int:
    """Put `nexus` on PATH with its completion; with --boot, have the service started at boot."""
    base = call.environ.get("XDG_DATA_HOME") or os.path.join(call.environ.get("HOME") or os.path.expanduser("~"), ".local", "share")
    binaries = os.path.join(call.environ.get("HOME") or os.path.expanduser("~"), ".local", "bin")
    script = os.path.join(base, "nexus", "nexus.py")
    with open(os.path.abspath(__file__), encoding="utf-8") as file:
        source = file.read()
    files = {script: (source, 0o755),
             os.path.join(binaries, "nexus"): (LAUNCHER.format(shebang=format_shebang(sys.executable), folder=os.path.dirname(script)),
                                               0o755),
             os.path.join(base, "bash-completion", "completions", "nexus"): (format_completion(BASH_COMPLETION, bash_case, call.commands),
                                                                             0o644),
             os.path.join(base, "zsh", "site-functions", "_nexus"): (format_completion(ZSH_COMPLETION, zsh_case, call.commands), 0o644)}
    for path, (text, mode) in files.items():
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomic(path, [text], mode)
            os.chmod(path, mode)
        except OSError as error:
            raise describe_disk_error(error, "write", path) from None
    import py_compile
    py_compile.compile(script, doraise=True)
    call.say(f"installed {os.path.join(binaries, 'nexus')}; its completion for bash, and for zsh in {base}/zsh/site-functions")
    if not any(map(os.path.exists, BASH_COMPLETION_PLACES)):
        call.say("bash completes it once its own completion is there: apt install bash-completion, and log in again")
    if binaries not in call.environ.get("PATH", "").split(":"):
        call.say(f"{binaries} is not on PATH yet: add  export PATH=\"{binaries}:$PATH\"  to ~/.profile and log in again")
    return install_boot(call, script) if call.options.boot else 0


def format_shebang(python: str) -> str:
    """Linux knows no blanks in a first line, and cuts a long one; sh and Python both understand the other form."""
    return f"#!{python}" if re.fullmatch(r"\S{1,120}", python) else f"#!/bin/sh\n'''exec' {quote(python)} \"$0\" \"$@\"\n' '''"


def install_boot(call: Call, script: str) -> int:
    """Start the service at boot: by a systemd user unit where there is a user manager, by cron elsewhere."""
    unit = os.path.join(call.environ.get("XDG_CONFIG_HOME") or os.path.join(call.environ.get("HOME") or os.path.expanduser("~"), ".config"),
                        "systemd", "user", "nexus.service")
    if try_program("systemctl", "--user", "show-environment") is not None:
        os.makedirs(os.path.dirname(unit), exist_ok=True)
        python, script, home = (path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
                                for path in (sys.executable, script, call.home))
        write_atomic(unit, [UNIT.format(python=python.replace("$", "$$"), script=script.replace("$", "$$"), home=home)], 0o644)
        try_program("systemctl", "--user", "daemon-reload")
        if try_program("systemctl", "--user", "enable", "nexus.service") is None:
            raise NexusError("unavailable", "systemctl --user enable nexus.service failed", hint="try it by hand")
        call.say(f"the service starts with your user manager: {unit}")
        if "Linger=yes" not in (try_program("loginctl", "show-user", find_user(os.geteuid()), "--property=Linger") or ""):
            call.say("that is at your first login, not at boot: loginctl enable-linger makes it start at boot")
    elif find_program("crontab"):
        install_cron(call, script)
    else:
        raise NexusError("unavailable", "there is neither a systemd user manager nor cron here",
                         hint=f"have this run at boot: {sys.executable} {script} start")
    warn_of_logout(call)
    return 0


def install_cron(call: Call, script: str) -> None:
    import subprocess
    line = f"@reboot NEXUS_HOME={quote(call.home)} {quote(sys.executable)} {quote(script)} start".replace("%", "\\%")
    try:
        table = run(["crontab", "-l"], 15)
    except (OSError, StillRunning) as error:
        table = Completed(1, str(error))
    if table.exit_code and not re.search("no crontab for|No such file", table.output):     # it may hold what is not ours
        raise NexusError("unavailable", f"crontab -l failed: {format_line(table.output.strip(), 200)}", hint=f"add it by hand: {line}")
    kept = [old for old in table.output.splitlines() if not table.exit_code
            and not (old.startswith("@reboot NEXUS_HOME=") and old.endswith(" start"))]
    done = subprocess.run(["crontab", "-"], input="\n".join([*kept, line, ""]), text=True, capture_output=True)
    if done.returncode:
        raise NexusError("unavailable", f"crontab refused: {done.stderr.strip()}", hint=f"have this run at boot: {line[8:]}")
    call.say(f"cron starts the service at boot: {line}")


def warn_of_logout(call: Call) -> None:
    """logind may end everything of a user who has logged out, screen and jobs too."""
    answer = try_program("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager",
                         "KillUserProcesses") or ""
    lingers = "Linger=yes" in (try_program("loginctl", "show-user", find_user(os.geteuid()), "--property=Linger") or "")
    if answer.strip() == "b true" and not lingers:
        call.say("this system ends all processes of a user at logout (KillUserProcesses=yes), jobs too: loginctl enable-linger, "
                 "then start the service by its unit: systemctl --user start nexus")


def try_program(*argv: str) -> str | None:
    """What a program prints; None when it is not there or fails."""
    try:
        answer = run(argv, 15)
    except (OSError, StillRunning):
        return None
    return answer.output if answer.exit_code == 0 else None


def format_completion(frame: str, case: Callable[[Command], str], commands: Sequence[Command]) -> str:
    shown = [command for command in commands if command.summary]
    if case is bash_case:
        names = " ".join(command.name for command in shown)
    else:
        names = " ".join(quote(f"{command.name}:{command.summary}") for command in shown)
    return frame.format(commands=names, cases="\n".join(case(command) for command in shown))


def bash_case(command: Command) -> str:
    ids = f' $(nexus ids {wanted_status(command)} 2>/dev/null)' if takes_ids(command) else ""
    return f'        {command.name}) COMPREPLY=($(compgen -W "{" ".join(list_options(command))}{ids}" -- "$word")) ;;'


def zsh_case(command: Command) -> str:
    ids = f" $(nexus ids {wanted_status(command)} 2>/dev/null)" if takes_ids(command) else ""
    return f"        {command.name}) compadd -- {' '.join(list_options(command))}{ids} ;;"


def list_options(command: Command) -> list[str]:
    return [flag for argument in command.arguments for flag in argument[0] if flag.startswith("--")] + [
        str(choice) for argument in command.arguments for choice in argument[1].get("choices", ()) if not argument[0][0].startswith("-")]


def wanted_status(command: Command) -> str:
    """Of the jobs that a command is for; `nodes` for the names of these."""
    wanted = {"kill": RUNNING, "attach": RUNNING, "remove": PENDING, "move": PENDING, "retry": "finished", "node": "nodes"}
    return wanted.get(command.name, "")


def takes_ids(command: Command) -> bool:
    return command.name == "node" or any(argument[0][0] in ("id", "ids", "target", "targets") for argument in command.arguments)


# ==== 18. ARGUMENTS, MAIN ==== argparse from the COMMANDS table; main(argv, environ, out, err) -> exit code


JSON_OPTION = argument("--json", action="store_true", help="print JSON")
SERVICE_OPTIONS = (
    argument("--config", metavar="FILE", help="another config.toml"),
    argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="least level kept in service.log"),
    argument("--take-over", action="store_true", help="use a NEXUS_HOME that another machine used, which is gone for good"),
)
JOB_OPTIONS = (
    argument("command", nargs="*", metavar="COMMAND", help="a shell command, in quotes; several words are taken as they are"),
    argument("--gpus", metavar="N", help="how many GPUs; 0.5 shares one, 0 takes a CPU slot (default: [jobs] default_gpus)"),
    argument("--gpu-ids", metavar="LIST", help="only these, like 0-3,5"),
    argument("--gpu-mem", metavar="SIZE", help="memory that must be free on each of its GPUs, like 10G"),
    argument("--priority", metavar="P", help="high, normal, low or a number; lower runs first (default: normal = 1)"),
    argument("--name", help="a name, shown before its command"),
    argument("--group", metavar="G", help="jobs to be waited for, killed or retried together"),
    argument("--max-concurrent", metavar="N", help="how many of the group run at once, from now on"),
    argument("--after", metavar="ID,...", help="start when these have completed; cancelled when one has not"),
    argument("--retries", metavar="N", help="further attempts when it fails, at growing intervals"),
    argument("--timeout", metavar="TIME", help="stop it after 90s, 30m, 2h ...; 0 = no time limit"),
    argument("--expect", metavar="TIME", help="how long it should take: for estimates and gaps; stopped at twice that"),
    argument("--conda", metavar="ENV", help="activate this conda environment"),
    argument("--llm", metavar="MODEL", help="the GPUs that llm_config says this model needs"),
    argument("--cuda-arg", action="store_true", help="set --cuda in the command to the GPUs' numbers, which are physical then"),
    argument("--unique", action="store_true", help="add nothing if the same waits, runs or has completed"),
    argument("--snapshot", action="store_true", help="run the git work tree as it is now, whatever is edited later"),
    argument("--sweep", metavar="NAME=A,B", action="append", default=[],
             help="one job for each value, put where the command says {NAME}; seed=0..4 counts; repeatable: all combinations"),
    argument("--env", metavar="NAME=VALUE", action="append", default=[], help="a variable on top of the environment; repeatable"),
    argument("--cwd", metavar="DIR", help="where it runs (default: here)"),
    argument("--node", metavar="NAME", help="only on this machine (nexus node list; default: wherever it can start first)"),
    argument("--tty", action="store_true", help="its stdout is a terminal: progress bars and colours as when run by hand"),
    argument("--file", metavar="FILE", help="one command a line, # comments; - is standard input"),
    argument("--dry-run", action="store_true", help="check it, show the commands, add nothing"),
)
GROUP = argument("--group", metavar="G", help="the jobs of this group")
IDS = argument("ids", nargs="+", metavar="ID")
ANY_IDS = argument("ids", nargs="*", metavar="ID")
ID = argument("id", metavar="ID")
GPUS = argument("gpus", nargs="*", metavar="GPU", help="a GPU's index; none: the queue")

COMMANDS = (
    Command("status", "what runs where, and what waits (nexus alone does the same)", cmd_status, (
        argument("--watch", action="store_true", help="redraw every second"), JSON_OPTION,
        argument("--detailed", action="store_true", help="queue by priority, readings of GPUs and host, health"))),
    Command("add", "queue a job; prints its id", cmd_add, (*JOB_OPTIONS, JSON_OPTION),
            "The job runs on the next GPU that is truly free, here, with this environment, umask and these resource limits."),
    Command("run", "queue a job, show its output, exit with its exit code", cmd_run, (
        *JOB_OPTIONS, argument("--json", action="store_true", help="with --dry-run: print JSON")),
            "Ctrl-C stops the showing; the job goes on."),
    Command("queue", "pending jobs in the order they would start, and why they wait", cmd_queue, (GROUP, JSON_OPTION)),
    Command("history", "finished jobs", cmd_history, (
        argument("-n", "--number", type=parse_line_count, default=50, metavar="N", help="the last N (default: 50; 0 = all)"), JSON_OPTION)),
    Command("jobs", "all jobs kept", cmd_jobs, (
        argument("--status", choices=STATUSES), argument("--user"), GROUP, JSON_OPTION)),
    Command("show", "all that is known of a job", cmd_show, (ID, JSON_OPTION)),
    Command("why", "why a job waits, GPU by GPU", cmd_why, (ID, JSON_OPTION)),
    Command("wait", "wait for jobs to finish; exit with the first exit code that is not 0", cmd_wait, (ANY_IDS, GROUP)),
    Command("logs", "what a job printed, or the service's log", cmd_logs, (
        argument("id", metavar="ID|service"), argument("-f", "--follow", action="store_true", help="as it comes, until the job ends"),
        argument("-n", "--number", type=parse_line_count, metavar="N", help="the last N lines"),
        argument("--stream", choices=STREAMS, default="both", help="stdout goes to stdout, stderr to stderr"))),
    Command("kill", "stop running jobs and all they started; returns when they are gone", cmd_kill, (
        argument("targets", nargs="*", metavar="ID|GPU"), argument("--all", action="store_true", help="with a GPU: all jobs that share it"),
        argument("--group", metavar="G", help="all of this group, pending ones too"))),
    Command("cancel", "stop jobs, pending or running", cmd_cancel, (IDS,)),
    Command("remove", "take pending jobs out of the queue", cmd_remove, (IDS,)),
    Command("retry", "run finished jobs again, as new ones; prints their ids", cmd_retry, (
        ANY_IDS, argument("--failed", action="store_true", help="those that failed and were not added again"),
        argument("--group", metavar="G", help="those of this group that failed"))),
    Command("move", "change a pending job's place", cmd_move, (
        ID, argument("--first", action="store_true", help="before all others, whatever their priority"),
        argument("--last", action="store_true", help="behind all that wait now"), argument("--priority", metavar="P"))),
    Command("attach", "attach to a running job's screen session (Ctrl-A D leaves)", cmd_attach, (argument("target", metavar="ID|GPU"),)),
    Command("screens", "the screen sessions of nexus", cmd_screens),
    Command("pause", "start nothing new, on all GPUs or some, or of a group", cmd_pause, (GPUS, GROUP)),
    Command("resume", "start jobs again", cmd_resume, (GPUS, GROUP)),
    Command("start", "start the service (any command that needs it does)", cmd_start, SERVICE_OPTIONS),
    Command("stop", "end the service; running jobs go on", cmd_stop),
    Command("restart", "end it and start it again; running jobs go on", cmd_restart, SERVICE_OPTIONS),
    Command("serve", "be the service, in the foreground", cmd_serve, SERVICE_OPTIONS),
    Command("metrics", "run times of finished jobs, utilization of the GPUs", cmd_metrics, (
        JSON_OPTION, argument("--prometheus", action="store_true", help="print GET /metrics, for Prometheus"))),
    Command("health", "each check with its reading; exit code 1 when one is bad", cmd_health, (JSON_OPTION,)),
    Command("token", "let others in: make a token for a user, list, revoke", cmd_token, (
        argument("action", choices=("create", "list", "revoke")), argument("words", nargs="*", metavar="USER|TOKEN"),
        argument("--days", type=parse_days, metavar="N", help="until when it is good; without: until it is revoked"),
        argument("--json", action="store_true", help="as JSON"))),
    Command("node", "give jobs to other machines too, over ssh: add, list, remove one", cmd_node, (
        argument("action", choices=("add", "list", "remove")), argument("words", nargs="*", metavar="[USER@]HOST|NAME"),
        argument("--name", help="what it is called here (default: its host)"),
        argument("--jump", metavar="[USER@]HOST", help="the machine through which it is reached"),
        argument("--port", help="its sshd's port"), argument("--identity", metavar="FILE", help="the private key to log in with"),
        argument("--force", action="store_true", help="remove: at once; the jobs there are given up"), JSON_OPTION),
            "Its nexus is this one, copied there; its GPUs and this machine's are one pool."),
    Command("config", "show the configuration; edit it; its path; a sample", cmd_config, (
        argument("action", nargs="?", choices=("edit", "path", "sample")),)),
    Command("install", "put `nexus` on PATH, with completion", cmd_install, (
        argument("--boot", action="store_true", help="also start the service at boot"),)),
    Command("help", "this, or what a command takes", cmd_help, (argument("topic", nargs="?", metavar="COMMAND"),)),
    Command("ids", "", cmd_ids, (argument("status", nargs="?"),)),
)


def main(argv: Sequence[str], environ: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    """The command line; returns its exit code."""
    try:
        if argv and argv[0] in ("--version", "-V"):
            out.write(f"nexus {__version__} ({file_hash()})\n")
            return 0
        words = ["help", *argv[1:2]] if argv and argv[0] in ("--help", "-h") else list(argv)
        if not words or words[0].startswith("-"):
            words = ["status", *words]
        command = find_command(words[0], COMMANDS)
        parser = make_parser(command, out)
        has_verb = command.name in ("node", "token")        # whose words may come after options: node add --name n1 HOST
        options = (parser.parse_intermixed_args if has_verb else parser.parse_args)(words[1:])
        options.subcommand = command.name
        return command.run(Call(options, environ, out, err, COMMANDS))
    except NexusError as error:
        red = Paint(is_colourful(err, environ))
        err.write(f"nexus: {red('red', error.message)}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    except SystemExit as end:               # argparse's --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:                 # `nexus jobs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception:
        import traceback
        err.write("nexus: this is a fault of nexus itself; please report it with what follows\n" + traceback.format_exc())
        return 1


def entry() -> int:
    """What the `nexus` command calls."""
    import gc
    gc.freeze()                                 # what was imported stays: to look through it, also at the end, takes a tenth of `nexus add`
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:          # closed: nothing that is opened from here on may take its number
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = main(sys.argv[1:], os.environ, sys.stdout, sys.stderr)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:                         # said already; the interpreter would say it again
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return code


if __name__ == "__main__":
    sys.exit(entry())

"""Jobs and GPUs in JSON.

These tables have every key with its meaning, and are shown in openapi.json: the fields of the value class that are
not hidden, and what is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from ..formats.codec import encode_json
from ..opening import TYPE_CHECKING
from ..schedule.capacity import describe_users, find_foreign, find_gpu_reason, find_unseen
from ..schedule.reasons import Reason
from ..schedule.turns import BoxUser
from ..values.causes import CAUSES, EXIT, KILLED, PREEMPTED, SIGNAL, find_remedy
from ..values.config import GpuConfig
from ..values.gpu import Gpu, GpuProcess
from ..values.job import COMPLETED, FAILED, FINAL, NO_ATTEMPT, STATUS, Attempt, Job, list_shares
from ..values.schema import FLAG, FLOAT, INTEGER, JOB_ID, STRING, TIME, list_of, one_of, or_null
from ..values.state import State
from ..values.text import format_duration, format_gb, format_line, format_time, list_some, parse_time
from ..values.value import Field

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json, Schema

REASON_CODES = ("resources", "dependency", "held", "paused", "quota", "begin-time", "node-down", "never")


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
FORMATTED_FIELDS: Mapping[Any, Mapping[str, Callable[[Any], Any]]] = {
    cls: {name: format_time if row.schema is TIME else row.show or round_known for name, row in rows.items()
          if row.schema is TIME or row.schema is FLOAT or row.show} for cls, rows in SHOWN_FIELDS.items()}


def fields_json(shown: Job | Attempt | Gpu | GpuProcess) -> dict[str, Any]:
    """The fields of a value that its JSON has: times as text, measurements rounded."""
    defaults, formats, given = DEFAULT_FIELDS[type(shown)], FORMATTED_FIELDS[type(shown)], vars(shown)
    found = {**defaults, **{name: given[name] for name in given if name in defaults}}
    for name in formats:
        if found[name] is not None:
            found[name] = formats[name](found[name])
    return found


def field_json(job: Job, name: str) -> Any:
    """One field of a job, as fields_json() has it."""
    fact, make = getattr(job, name), FORMATTED_FIELDS[Job].get(name)
    return make(fact) if make and fact is not None else fact


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
    "kept_for": Field(or_null(JOB_ID), "the pending job that has waited for so long that this GPU stays idle for it"),
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
PROGRESS_WORDS = ("output", "expected", "group")
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
    "stopping": Field(or_null(STRING), "it is to be stopped, for this cause: " + ", ".join(
        word for word, row in CAUSES.items() if row.is_stop)),
    "attempts": Field(list_of(object_ref("Attempt")), "all that began"),
    "preemptions": Field(INTEGER, "how many of them ended to make room for another job"),
    "preempted_seconds": Field(FLOAT, "how long those had run"),
    "status_history": Field(
        list_of({"type": "array", "prefixItems": [STATUS, or_null(TIME)], "minItems": 2, "maxItems": 2}),
        "[[status, since when], ...]"),
    "unknown_since": Field(or_null(TIME), "since when nothing is known of it: its node cannot be reached"),
    "idle_since": Field(or_null(TIME), "since when its GPUs do nothing, if that is for [jobs] idle_minutes"),
    "rss_mib": Field(or_null(FLOAT), "memory of its processes now, as in peak_rss_mib"),
    "cpu_percent": Field(or_null(FLOAT), "CPU in use now"),
    "python": Field(or_null(STRING), "the Python that its PATH has; null: none, or it is not known, as on a node"),
    "python_env": Field(or_null(STRING), "what is active in it: `venv /home/ann/.venv`, `conda ml`"),
    "remedy": Field(or_null(STRING), "what may help a failed job, with a command to type"),
    "unrecorded": Field(or_null(STRING), "how it has ended, while it counts as running: the disk takes no record"),
    "fraction": Field(or_null(FLOAT), "how far it is, 0 to 1"),
    "estimated_end": Field(or_null(TIME), "when it will have ended, as far as is known"),
    "progress_by": Field(or_null(one_of(*PROGRESS_WORDS)), "what tells both: a bar or a counter in its output, its "
                         "expected time, or the median of its group"),
}
PUBLIC_JOB_KEYS = frozenset(name for name, row in JOB.items() if row.public)
# Of a job that does not run, these depend on the queue, the plan and the machines; all else on the job alone.
QUEUE_KEYS = ("position", "waiting_for", "reason", "estimated_start")
PLANNED_JOB_KEYS = (*QUEUE_KEYS, "only_node", "node")
PLAIN_JOB_KEYS = {"status", *PLANNED_JOB_KEYS, *SHOWN_FIELDS[Job]} - ATTEMPT.keys() | {"node"}
OVERVIEW_JOB_KEYS = (                           # what GET /status?after= has of a job
    "status", "id", "command", "user", "gpus", "name", "group", "only_node", "node", "gpu_places", "started_at",
    "finished_at", "runtime_seconds", "processes_left", "stopping", "unknown_since", "idle_since", "outcome",
    "cause_line", "waiting_for", "is_held", "estimated_start", "last_line", "metric_line", "unrecorded", "fraction",
    "estimated_end", "progress_by", "preemptions", "preempted_seconds", "sweep_values", "retried_as")
OVERVIEW_GPU_KEYS = ("uuid", "name", "profile", "node", "place", "state", "job_ids", "memory_total_mib", "is_paused",
                     "is_available", "unavailable", "kept_for", "used_by", "fault")
GPU_READINGS = ("memory_used_mib", "utilization", "utilization_mean", "temperature", "power_watts")
OTHER_USER = {
    "user": Field(STRING, "who it is"),
    "running": Field(INTEGER, "how many of that user's jobs have GPUs of this machine"),
    "waiting": Field(INTEGER, "how many wait for them"),
    "gpus": Field(FLOAT, "how many GPUs the running ones have"),
    "since": Field(or_null(TIME), "since when the first of them waits"),
    "collects": Field(or_null(INTEGER), "of the job that collects GPUs as they become free: how many it needs"),
}
NEXT_TURN = {
    "user": Field(STRING, "who gets the next GPU, as far as is known"),
    "seconds": Field(or_null(FLOAT), "in about how many seconds; null: nobody knows how long jobs run there"),
}
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
    if attempt.cause == SIGNAL and attempt.signal:
        return SIGNAL_NAMES.get(attempt.signal, f"signal {attempt.signal}")
    if attempt.cause == KILLED and not attempt.started_at:
        return "removed"
    if attempt.cause not in (None, EXIT):
        return attempt.cause
    return None if attempt.exit_code is None else f"exit {attempt.exit_code}"


# Messages of hooks, for people who read them elsewhere

def describe_notice(job: Job, word: str, public_url: str) -> list[str]:
    """The lines of a message about a job: what it is and what has become of it, the line with the cause, more."""
    last, name = job.current, f" ({job.name})" if job.name else f" ({format_line(job.command, 60)})"
    outcome = get_outcome(last) if job.status != COMPLETED else None
    return list(filter(None, [
        f"job {job.id}{name} {word}{f' ({outcome})' if outcome else ''}", format_line(last.cause_line or "", 500),
        "" if last.runtime_seconds is None else f"runtime {format_duration(last.runtime_seconds)}",
        f"{public_url.rstrip('/')}/#/jobs/{job.id}" if public_url else ""]))


def describe_group_notice(group: str, jobs: Sequence[Job], public_url: str) -> list[str]:
    """The lines of a message about a group that has ended: how many of these jobs ended how, some that failed, more."""
    quoted = re.sub(rb"[^\w.~-]", lambda match: b"%%%02X" % match[0][0], group.encode()).decode()
    counts = [(sum(job.status == word for job in jobs), word) for word in FINAL]
    bad = [" ".join(describe_notice(job, job.status, "")[:2]) for job in jobs if job.status != COMPLETED]
    starts = [attempt.started_at for job in jobs for attempt in job.attempts if attempt.started_at is not None]
    ends = [job.current.finished_at or 0.0 for job in jobs]
    return list(filter(None, [
        f"group {group} has ended: {', '.join(f'{count} {word}' for count, word in counts if count)}",
        *[format_line(line, 200) for line in list_some(bad, 5)],
        f"runtime {format_duration(max(ends) - min(starts))}" if starts else "",
        f"{public_url.rstrip('/')}/#/?group={quoted}" if public_url else ""]))


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


def job_json(job: Job, now: float, node: str | None, **computed: Any) -> dict[str, Any]:
    """A job as the API shows it, never with its environment.  `computed`: keys that the job does not hold itself."""
    last = job.current
    current = {**(NO_ATTEMPT_JSON if last is NO_ATTEMPT else attempt_json(last, now)),
               **{key: computed[key] for key in computed if key in ATTEMPT}}
    return {
        "status": job.shown_status, "position": None, "waiting_for": None, "reason": None, "estimated_start": None,
        **fields_json(job), **current, "attempt": job.attempt, **place_json(job, node),
        "gpu_index": last.gpu_indices[0] if last.gpu_indices else None,
        "stopping": None if job.status in FINAL else last.stop_cause,
        "attempts": [current if attempt is last else attempt_json(attempt, now)
                     for attempt in job.attempts if attempt.started_at is not None],
        **preemptions_json(job.attempts),
        "status_history": [[status, format_time(at)] for status, at in job.status_history],
        "unknown_since": None, "idle_since": None, "rss_mib": None, "cpu_percent": None, "unrecorded": None,
        "python": None, "python_env": None,
        "remedy": find_remedy(last.cause, last.cause_line, job.id) or None if job.status == FAILED else None,
        "fraction": None, "estimated_end": None, "progress_by": None, **computed}


def preemptions_json(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """How often a job had to make room for another, and what it had computed by then."""
    lost = [attempt.runtime_seconds or 0.0 for attempt in attempts if attempt.cause == PREEMPTED]
    return {"preemptions": len(lost), "preempted_seconds": round(sum(lost), 3)}


def progress_json(fraction: float | None, end: float | None, by: str) -> dict[str, Any]:
    """How far a running job is; `end`: when it will have ended, by the clock; told to ten seconds, not too soon."""
    if fraction is None:
        return {}
    shown_end = None if end is None else math.ceil(end / 10) * 10
    return {"fraction": round(fraction, 3), "estimated_end": format_time(shown_end), "progress_by": by}


def format_progress(job: Json) -> str:
    """`41% · 12m left`; "" where nothing is known."""
    if job.get("fraction") is None:             # an older service has none
        return ""
    words = f"{job['fraction'] * 100:.0f}%"
    if job["estimated_end"] and job["started_at"]:
        now = parse_time(job["started_at"]) + (job["runtime_seconds"] or 0.0)
        words += f" · {format_duration(max(0.0, parse_time(job['estimated_end']) - now))} left"
    return words if job["progress_by"] == "output" else f"about {words}"


def pick_json(job: Job, now: float, node: str | None, fields: Sequence[str], **computed: Any) -> dict[str, Any]:
    """These fields of job_json().  The others are not made, unless one of these is computed from more than the job."""
    if not PLAIN_JOB_KEYS.issuperset(fields):
        return pick(job_json(job, now, node, **computed), fields)
    found = {"status": job.shown_status, **place_json(job, node), **dict.fromkeys(QUEUE_KEYS), **computed}
    for name in fields:
        if name not in found:
            found[name] = field_json(job, name)
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

    def format(self, job: Job, planned: Mapping[str, Any], most: int, describe: Callable[[Job], Json]) -> str:
        """`planned`: its PLANNED_JOB_KEYS.  `most`: how many texts are kept.  `describe`: what else its JSON has."""
        kept = self.kept.get(job.id)
        if kept is None or kept[0] is not job:
            if len(self.kept) >= most:                      # also of jobs that are forgotten
                self.forget()
            kept = self.kept[job.id] = job, *self.format_lasting(job, describe(job))
        _, own, others = kept
        shown = hide_private(planned, PUBLIC_JOB_KEYS) if self.is_public else planned
        return f"{{{encode_json(shown)[1:-1]},{own}{others}}}"

    def format_lasting(self, job: Job, facts: Json) -> tuple[str, str]:
        whole = job_json(job, 0.0, None, **facts)
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


def drop_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: content for key, content in row.items() if content is not None}


SUBMITTED_KEYS = ("status", "created_at", "started_at", "finished_at", "exit_code", "cause", "waiting_for",
                  "expected_time")
SUBMITTED_FROM = ("id", "user", "node", "labels", "position", *SUBMITTED_KEYS)      # what submitted_json() reads


def submitted_json(job: Mapping[str, Any], node_numbers: Mapping[str | None, int]) -> dict[str, Any]:
    """A job's JSON in the words of /api."""
    labels = job["labels"] or {}
    return {"job_id": job["id"], "node_id": node_numbers.get(job["node"]), "queue_position": job["position"],
            "user_id": job["user"], "competition_id": labels.get("competition_id"),
            "project_id": labels.get("project_id"), **pick(job, SUBMITTED_KEYS)}


def other_user_json(user: BoxUser) -> dict[str, Any]:
    """Another user of this machine, as that one's service tells."""
    return {"user": user.name, "running": user.running, "waiting": user.waiting,
            "gpus": sum(holding.share for holding in user.holdings) / 100,
            "since": format_time(user.since) if user.wants else None,
            "collects": next((want.gpus for want in user.wants if want.collects and want.gpus > 1), None)}


def gpu_json(gpu: Gpu, state: State, config: GpuConfig, error: str | None, node: str = "",
             unavailable: str | None = None) -> dict[str, Any]:
    """A GPU as GET /status shows it.

    `error`: why its machine's readings are unreliable; `unavailable`: why that machine gets no job.
    """
    held = [(job, share) for job in state.running.values()
            for uuid, share in zip(job.current.gpu_uuids, list_shares(job)) if uuid == gpu.uuid]
    jobs, job_ids = [job for job, _ in held], [job.id for job, _ in held]
    foreign, unseen = find_foreign(gpu, config), find_unseen(gpu, jobs, config)
    reason = find_gpu_reason(gpu, config, jobs)
    users = describe_users(foreign, unseen) if foreign or unseen else None
    not_now = reason.detail if reason else unavailable
    states = (("Unknown", error), ("Fault", gpu.fault), ("Paused", gpu.is_paused), ("Busy", jobs),
              ("Available", not not_now), ("In use", users), ("Unavailable", True))
    return {
        **fields_json(gpu), "node": node, "place": gpu.place,
        "memory_total": format_gb(gpu.memory_total_mib), "memory_used": format_gb(gpu.memory_used_mib),
        "job_id": job_ids[0] if job_ids else None, "job_ids": job_ids,
        "allocated": sum(share for _, share in held) / 100, "state": next(word for word, holds in states if holds),
        "is_available": not (jobs or not_now or error),
        "unavailable": not_now or (None if jobs or not error else "cannot be read"),
        "used_by": None if gpu.fault or (gpu.is_paused and not jobs) else users,
        "processes": [fields_json(process) for process in gpu.processes]}

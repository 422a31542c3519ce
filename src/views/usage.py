"""Usage and the history of the GPUs, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ..formats.gpu_history import MINUTES, TENS, Ring
from ..opening import TYPE_CHECKING
from ..values.causes import get_cause
from ..values.gpu import SERIES, GpuMeans, GpuRun
from ..values.job import FAILED, FINAL, NO_ATTEMPT, RUNNING, Attempt, Job
from ..values.schema import FLAG, FLOAT, INTEGER, STRING, TIME, list_of, or_null
from ..values.state import State, UsageSums
from ..values.text import format_duration, format_line, format_time
from ..values.usage import USAGE_DAYS, list_usage
from ..values.value import Field, replace
from .api_json import get_outcome, object_ref

if TYPE_CHECKING:
    from typing import Any

USAGE_SINCE = "7d"              # where nobody says since when
MIN_OTHERS_S = 180.0            # what is less is shown as 0.0 GPU-hours
OTHER_PEOPLE = "(others)"             # whoever used GPUs without jobs of this service
USAGE = {
    "user": Field(STRING, f"by user: whose jobs; `{OTHER_PEOPLE}`, where there are any: those who used GPUs of this "
                  "machine without these jobs, as far as its history tells"),
    "group": Field(STRING, "by group: of which group; `-`: of none; `(other)`: forgotten jobs of further groups"),
    "jobs": Field(INTEGER, "how many jobs ran"),
    "ended": Field(INTEGER, "how many of them are over"),
    "failed": Field(INTEGER, "how many of these failed"),
    "gpu_hours": Field(FLOAT, "GPUs, times the hours for which jobs had them"),
    "cpu_job_hours": Field(FLOAT, "how long jobs without a GPU ran, together"),
    "forgotten_since": Field(or_null(TIME), "since when its forgotten jobs count, where that is earlier than asked: "
                             f"of them days are whole, and after {USAGE_DAYS} days months; null: nothing is earlier"),
}


# The history of the GPUs

HISTORY_SINCE = "24h"           # where nobody says since when
MAX_MERGED = 15                 # a row of attempts that are one spans so many times `merge`
FINE_S = 6 * 3600.0             # what is longer is told in means of ten minutes
STEPS = {"1m": MINUTES, "10m": TENS}
SERIES_NAMES = {
    "utilization": "percent", "memory_used_mib": "memory in use, by whomever", "temperature": "degrees Celsius",
    "power_watts": "the power it drew", "others": "percent of the time in which others than these jobs used it"}
SERIES_FIELDS = {name: Field(list_of(or_null(INTEGER)), f"{meaning}; null: no reading has told it")
                 for name, meaning in SERIES_NAMES.items()}
GPU_HISTORY = {
    "uuid": Field(STRING, "its UUID"), "place": Field(STRING, "what commands call it, or called it"),
    "name": Field(STRING, "its model"), "node": Field(STRING, "the machine it is in"),
    "is_gone": Field(FLAG, "it is not there now"), **SERIES_FIELDS}
RUN_ROW = {
    **GpuRun.FIELDS,
    "counts": Field(or_null({"type": "object"}), "with `merge`: how many attempts of each status it stands for")}
HISTORY = {
    "begin": Field(TIME, "when the first step begins"), "end": Field(TIME, "now"),
    "step_seconds": Field(INTEGER, "of the means"), "gpus": Field(list_of(object_ref("GpuHistory")), "all GPUs"),
    "used": Field(FLOAT, "in how much of this time, from the first record on, jobs had the GPUs, 0 to 1"),
    "used_by_others": Field(FLOAT, "in how much of it others than these jobs used them, 0 to 1"),
    "counts": Field({"type": "object"}, "how many attempts of each status there are"),
    "rows": Field(list_of(object_ref("GpuRun")), "what ran on them, of the last 7 days, by its beginning")}
JOB_USAGE = {
    "attempt": Field(or_null(INTEGER), "its last one that began"),
    "begin": Field(or_null(TIME), "when the first step begins"),
    "step_seconds": Field(INTEGER, "of the means"), "note": Field(or_null(STRING), "what to know of these means"),
    "gpus": Field(list_of({"type": "object", "properties": {
        "uuid": STRING, "place": STRING, **{name: row.schema for name, row in SERIES_FIELDS.items()},
        "mean": {"type": "object"}, "max": {"type": "object"}}}), "its GPUs: series, with the mean and the most")}


def series_json(means: Iterable[GpuMeans], ring: Ring, begin: float, end: float,
                series: Collection[str]) -> dict[str, list[int | None]]:
    """{name: a number for each step from that of `begin` to that of `end`}."""
    first = int(begin) // ring.step_s
    there = {int(each.at) // ring.step_s - first: each for each in means}
    steps = [there.get(number) for number in range(int(end) // ring.step_s + 1 - first)]
    return {name: [None if step is None or getattr(step, name) is None else round(getattr(step, name))
                   for step in steps] for name in SERIES if name in series}


def list_gpu_runs(job: Job) -> Iterator[GpuRun]:
    """The attempts of a job that had GPUs, the one that runs too."""
    name = job.name or format_line(job.command, 60)
    for attempt in job.attempts:
        if attempt.gpu_uuids and attempt.started_at is not None:
            if attempt.finished_at is None:
                status = RUNNING
            elif attempt is job.attempts[-1] and job.status in FINAL:
                status = job.status
            else:
                status = str(attempt.cause) if get_cause(attempt.cause).requeues else FAILED
            yield GpuRun(job.id, attempt.number, job.user, attempt.gpu_uuids, attempt.started_at, status, name,
                         attempt.finished_at, get_outcome(attempt))


def find_used(runs: Iterable[GpuRun], uuids: Collection[str], begin: float, end: float) -> float:
    """In how much of the time from `begin` to `end` attempts had these GPUs, 0 to 1."""
    free_at, used_s = dict.fromkeys(uuids, begin), 0.0
    for ran in sorted(runs, key=lambda ran: ran.started_at):
        until = min(end, end if ran.finished_at is None else ran.finished_at)
        for uuid in ran.gpu_uuids:
            if uuid in free_at and until > free_at[uuid]:
                used_s += until - max(ran.started_at, free_at[uuid])
                free_at[uuid] = until
    return used_s / ((end - begin) * len(free_at)) if free_at and end > begin else 0.0


def sum_others_s(means: Iterable[GpuMeans], step_s: float, begin: float, end: float) -> float:
    """For how many seconds from `begin` to `end` others used a GPU."""
    return sum((each.others or 0.0) / 100 * max(0.0, min(end, each.at + step_s) - max(begin, each.at))
               for each in means)


def merge_runs(runs: Sequence[GpuRun], merge_s: float) -> list[tuple[GpuRun, Mapping[str, int] | None]]:
    """The rows by their beginnings; short ones that follow each other are one, with how many of each status.

    Such a row does not span more than MAX_MERGED times `merge_s`: what failed is still where it was.
    """
    from collections import Counter
    merged: list[list[GpuRun]] = []
    latest: dict[tuple[str, tuple[str, ...]], list[GpuRun]] = {}       # {(user, GPUs): the row that may go on}
    for ran in sorted(runs, key=lambda ran: ran.started_at):
        key, end = (ran.user, ran.gpu_uuids), ran.finished_at
        is_short = end is not None and end - ran.started_at < merge_s
        former = latest.get(key, [])
        if (is_short and former and ran.started_at - (former[-1].finished_at or 0.0) <= merge_s
                and (end or 0.0) - former[0].started_at <= MAX_MERGED * merge_s):
            former.append(ran)
            continue
        merged.append([ran])
        latest[key] = merged[-1] if is_short else []
    rows: list[tuple[GpuRun, Mapping[str, int] | None]] = []
    for former in merged:
        shown = next((ran for ran in reversed(former) if ran.status == FAILED), former[-1])
        if len(former) > 1:
            ends = [ran.finished_at or 0.0 for ran in former]
            shown = replace(shown, started_at=former[0].started_at, finished_at=max(ends), name=None, outcome=None)
        rows.append((shown, Counter(ran.status for ran in former) if len(former) > 1 else None))
    return rows


def run_json(ran: GpuRun, counts: Mapping[str, int] | None, is_visible: bool) -> dict[str, Any]:
    return {
        "id": ran.id, "attempt": ran.attempt, "user": ran.user, "gpu_uuids": list(ran.gpu_uuids),
        "started_at": format_time(ran.started_at), "finished_at": format_time(ran.finished_at), "status": ran.status,
        "name": ran.name if is_visible else None, "outcome": ran.outcome if is_visible else None, "counts": counts}


def job_usage_json(job: Job, attempt: Attempt, found: Mapping[str, Sequence[GpuMeans]], ring: Ring, begin: float,
                   end: float, ran_s: float) -> dict[str, Any]:
    """GET /jobs/{id}/usage.  `found`: {GPU uuid: its means from `begin` to `end`}."""
    gpus = []
    for uuid, place in zip(attempt.gpu_uuids, attempt.gpu_places):
        told = {name: [number for each in found[uuid] if (number := getattr(each, name)) is not None]
                for name in SERIES}
        gpus.append({
            "uuid": uuid, "place": f"{attempt.node}:{place}" if attempt.node else place,
            **series_json(found[uuid], ring, begin, end, SERIES),
            "mean": {name: round(sum(numbers) / len(numbers)) for name, numbers in told.items() if numbers},
            "max": {name: round(max(numbers)) for name, numbers in told.items() if numbers}})
    note = "of the whole GPU, which it shared" if job.gpus % 1 > 0 else None
    if attempt is NO_ATTEMPT:
        note = "it has not started"
    elif not gpus:
        note = "it has no GPU that is read"
    elif not any(gpu["max"] for gpu in gpus):
        is_short = ran_s < ring.step_s
        note = (f"it ran for less than {format_duration(ring.step_s)}: that is too short for curves" if is_short
                else "nothing of its GPUs was recorded while it ran")
    return {"attempt": attempt.number or None, "begin": format_time(begin) if gpus else None,
            "step_seconds": ring.step_s, "note": note, "gpus": gpus}


def usage_json(state: State, by: str, since: float, now: float, may_see: Callable[[str], bool],
               others_s: float = 0.0) -> list[dict[str, Any]]:
    """GET /usage: a row for each user, or for each group whose name the caller may see.

    `others_s`: for how long others used GPUs, all of these together.
    """
    totals: dict[str, tuple[int, UsageSums, float]] = {}
    for user, group, jobs, sums, begin in list_usage(state, since, now):
        if by == "user" or may_see(user):
            name = user if by == "user" else group or "-"
            count, total, first = totals.get(name, (0, UsageSums(), since))
            totals[name] = count + jobs, total + sums, min(first, begin)
    rows = sorted(totals.items(), key=lambda item: -item[1][1].gpu_seconds)
    if by == "user" and others_s >= MIN_OTHERS_S:
        rows.append((OTHER_PEOPLE, (0, UsageSums(others_s), since)))
    return [{by: name, "jobs": count, "ended": total.completed + total.failed + total.cancelled,
             "failed": total.failed, "gpu_hours": total.gpu_seconds / 3600,
             "cpu_job_hours": total.cpu_job_seconds / 3600,
             "forgotten_since": format_time(begin) if begin < since else None}
            for name, (count, total, begin) in rows]

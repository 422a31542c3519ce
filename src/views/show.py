"""What `nexus show` and `nexus why` print of a job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.causes import EXIT
from ..values.choice import CHANGES, LIVE_CHANGES
from ..values.job import CANCELLED, COMPLETED, FAILED, FINAL, PENDING, RUNNING, STATUSES
from ..values.submission import ASKED, JOB_FIELDS
from ..values.text import format_count, format_duration, format_indices, format_known, format_line, format_memory
from .api_json import SIGNAL_NAMES, format_progress
from .status_text import Paint, describe_idle_gpu, format_priority, list_states, local_time, name_or_command

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


def describe_group(group: Json) -> str:
    """`40 jobs: 3 running, 12 completed, 1 failed, 24 pending; paused by ann`."""
    total = sum(group[status] for status in STATUSES)
    statuses = (RUNNING, COMPLETED, FAILED, CANCELLED, PENDING)
    counts = [f"{group[status]} {status}" for status in statuses if group[status]]
    fraction = group.get("fraction")                        # an older service has none
    far = "" if fraction is None else f"{fraction * 100:.0f}% of the whole"
    return "; ".join(filter(None, [f"{format_count(total, 'job')}: {', '.join(counts)}", far, group["hold"]]))


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


def show_fact(fact: Any) -> str:
    if isinstance(fact, (list, tuple)):
        return ", ".join(map(str, fact))
    if isinstance(fact, dict):
        return ", ".join(f"{name}={text}" for name, text in fact.items())
    return "yes" if fact is True else str(fact)


# {the unit of a field: what makes a text of its JSON}.  Where the page has no unit of that name, it shows the JSON.
UNIT_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "text": show_fact, "clock": show_time, "duration": format_duration, "size": format_memory,
    "percent": "{:.0f}%".format, "priority": format_priority, "count": lambda count: format_known(count, "", 2),
    "signal": lambda number: SIGNAL_NAMES.get(number, str(number)), "lines": "; ".join}
# {heading: {key of a job: (its line, the unit of what stands in it)}}.  All that may be asked for has a line.
SHOW_LINES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Asked for": {
        **{name: (row.line or name.replace("_", " ") + ": {}", row.unit)
           for name, row in JOB_FIELDS.items() if row.asked},
        "only_node": ("only on: {}", "text"), "begin_at": ("not before: {}", "clock"), "labels": ("labels: {}", "text"),
        "python": ("Python: {}", "text"), "python_env": ("environment: {}", "text"), "user": ("user: {}", "text")},
    "Where and when": {
        "waiting_for": ("waits: {}", "text"), "position": ("jobs before it: {}", "text"),
        "estimated_start": ("starts about: {}", "clock"), "retry_at": ("next attempt: {}", "clock"),
        "created_at": ("submitted: {}", "clock"), "started_at": ("started: {}", "clock"),
        "commit": ("commit of its directory: {}", "text"),
        "place": ("where: {}", "text"), "others": ("also on {}", "text"), "finished_at": ("ended: {}", "clock"),
        "runtime_seconds": ("runtime: {}", "duration"), "progress": ("progress: {}", "text"),
        "unknown_since": ("nothing known since: {}", "clock"),
        "slurm_id": ("Slurm's job: {}", "text"), "session": ("screen session: {}", "text"),
        "pid": ("process: {}", "text"), "log_dir": ("logs: {}", "text"), "history": ("history: {}", "text")},
    "How it ended": {
        "exit_code": ("exit code: {}", "text"), "signal": ("signal: {}", "signal"), "cause": ("cause: {}", "text"),
        "cause_line": ("message: {}", "text"), "stopped_by": ("stopped by: {}", "text"),
        "notes": ("notes: {}", "lines"), "retried_as": ("run again as: {}", "text")},
    "What it used": {
        "peak_rss_mib": ("peak memory {}", "size"), "rss_mib": ("memory {} now", "size"),
        "cpu_seconds": ("CPU time {}", "duration"), "cpu_percent": ("CPU {} now", "percent"),
        "peak_gpu_mem_mib": ("GPU memory up to {}", "size"), "mean_gpu_util": ("GPUs {} busy on average", "percent")}}


def form_rows() -> list[dict[str, Any]]:
    """The fields of the page's forms: `first` are shown at once, the others on demand."""
    forms = {"add": ASKED, "pending": CHANGES, "running": LIVE_CHANGES, "retry": CHANGES}
    return [{"name": name, "help": re.sub(r" \(default: [^)]*\)|[;,] default: [^)]*", "", row.help),
             "like": row.like, "first": row.form,
             "forms": [form for form, names in forms.items() if name in names],
             "label": row.label or name.replace("_", " ").capitalize(),
             "type": "string" if row.text else row.schema["type"], "unit": row.unit}
            for name, row in ASKED.items() if row.flag or row.form]


def format_job(job: Json, paint: Paint, last_lines: Sequence[str] = (), gpus: Iterable[Json] = (),
               chain: Sequence[Json] = ()) -> str:
    """The output of `nexus show ID`: what SHOW_LINES has words for, and the last lines that it printed.

    `gpus`: all that there are now; `chain`: the job with those before and after it.
    """
    lines = [f"{paint('white', 'Job ' + job['id'])}: {job['status']}"
             + (f" ({job['outcome'] or '-'})" if job["status"] in FINAL else "")
             + "".join(f"; {state}" for state in list_states(job))]
    # One attempt alone is told by the other lines.
    attempts = job["attempts"] if len(job["attempts"]) > 1 or job["status"] == PENDING else []
    facts: dict[str, Any] = {
        **job, "progress": format_progress(job),
        "place": format_place(job["gpu_places"], job["node"])[4:] if job["started_at"] else "",
        "others": "; ".join(f"GPU {gpu['place']}: {gpu['used_by']}" for gpu in gpus
                            if job["id"] in gpu["job_ids"] and gpu["used_by"]),
        "history": ", ".join(f"{status} {local_time(at, '%H:%M:%S')}" for status, at in job["status_history"])}
    if job["status"] in FINAL:
        facts.update(session=None, pid=None, retry_at=None)
    for heading, rows in SHOW_LINES.items():
        found = []
        for key, (text, unit) in rows.items():
            fact = facts.get(key)
            if fact or (fact == 0 and fact is not False and key != "retries"):      # other zeros are facts
                colour = {"command": "bright", "unknown_since": "red"}.get(key, "cyan" if unit == "clock" else "")
                found.append(f"  {paint(colour, text.format(UNIT_TEXTS[unit](fact)))}")
        found += [f"  attempt {attempt['attempt']}: {format_attempt(attempt)}"
                  for attempt in attempts if heading == "How it ended"]
        lines += [paint("white", heading), *found] if found else []
    lines += format_chain(chain, job["id"], paint)
    lines += [paint("white", "Last lines"), *(f"  {line}" for line in last_lines)] if last_lines else []
    if job["idle_since"]:
        lines.append(f"Its GPUs do nothing.  If it waits for an answer: nexus attach {job['id']}")
    if remedy := describe_remedy(job):
        lines.append(f"hint: {remedy}")
    return paint.join(lines)


def format_python(python: str | None, env: str | None) -> str:
    """`/usr/bin/python3`, `/opt/ml/bin/python (conda ml)`."""
    return f"{python or 'no Python'}{f' ({env})' if env else ''}"


MAX_CHAIN = 20                  # jobs of a chain that are shown: some before the job, and more after it


def format_chain(rows: Sequence[Json], job_id: str, paint: Paint) -> list[str]:
    """The jobs that this one comes after, and those after it, each deeper than those before it; none: it is alone."""
    if len(rows) < 2:
        return []
    at = next((number for number, row in enumerate(rows) if row["id"] == job_id), 0)
    begin = max(0, min(at - MAX_CHAIN // 4, len(rows) - MAX_CHAIN))
    shown = rows[begin:begin + MAX_CHAIN]
    lines = [paint("white", "Chain"), *([f"  … {begin} before them"] if begin else [])]
    for row in shown:
        outcome = f" ({row['outcome']})" if row["status"] in (FAILED, CANCELLED) and row["outcome"] else ""
        groups = [f"after group {group}" for group in (*row["after_group"], *row["after_any_group"])]
        parents = [*row["after"], *row["after_any"]]
        after = [f"after {', '.join(parents[:5])}"] if len(parents) > 1 else []
        words = [f"{row['status']}{outcome}", *after, *groups,
                 *([f"again as {row['retried_as']}"] if row["retried_as"] else [])]
        mark, what = "> " if row["id"] == job_id else "  ", format_line(row["name"] or row["command"], 40)
        lines.append(f"{mark}{'  ' * min(row['depth'], 10)}{row['id']} {what}: {', '.join(words)}")
    left = len(rows) - begin - len(shown)
    return [*lines, *([f"  … {left} more after them"] if left else [])]


def describe_end(job: Json) -> str:
    outcome = f" ({job['outcome'] or '-'})" if job["status"] != COMPLETED else ""
    return f"job {job['id']} {job['status']}{outcome}" + (f": {job['cause_line']}" if job["cause_line"] else "")


def describe_seen_end(job: Json) -> str:
    """Of a job whose output was seen: the cause of a non-zero exit code is its last line, which stands there."""
    return describe_end({**job, "cause_line": None} if job["cause"] == EXIT else job)


def describe_remedy(job: Json) -> str:
    """What to type when a job failed for a cause that an option may take away; "" for any other."""
    return job.get("remedy") or ""              # an older service has none


def format_why(reply: Json, paint: Paint) -> str:
    """The output of `nexus why ID`: the decision, and its reasons GPU by GPU."""
    verb = "waits" if reply["status"] == PENDING else f"is {reply['status']}"
    lines = [f"{paint('white', 'Job ' + reply['id'])} {verb}: {reply['why']}",
             *(f"  {fact}" for fact in reply["facts"])]
    return paint.join(lines + [f"  {line}" for line in format_verdicts(reply["gpus"], paint)])


def format_verdicts(gpus: Iterable[Json], paint: Paint) -> list[str]:
    free = paint("green", "it could have this one")
    return [f"GPU {gpu['place']}: {gpu['verdict'] or free}" for gpu in gpus]

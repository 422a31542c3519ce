"""The commands that print lists of jobs and what is known of them: queue, jobs, show, why, usage, results."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from shlex import quote

from ..formats.cause_lines import find_last_lines
from ..opening import TYPE_CHECKING, __version__
from ..server.routes import NDJSON
from ..service.service import file_hash
from ..values.errors import NexusError
from ..values.job import FINAL, PENDING, RUNNING, STATUSES
from ..values.text import format_time, load_json, parse_duration, refuse
from ..values.value import Field
from ..views.api_json import JOB
from ..views.chosen_columns import JOB_CSV, QUEUE_CSV, format_columns, format_csv
from ..views.job_tables import QUEUE_FIELDS, Column, format_fitting_snapshot, format_jobs, format_queue, format_table
from ..views.results import format_results, format_results_csv
from ..views.row_labels import list_common_values
from ..views.show import format_job, format_why
from ..views.status_text import Paint, format_detailed, local_time
from ..views.usage import OTHER_PEOPLE, USAGE, USAGE_SINCE
from .chosen import check_choice, check_named, describe_choice, find_all, list_part, read_choice
from .context import Context
from .top import cmd_top
from .transport import DISK, encode_query, quote_path, split_lines

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


def cmd_status(context: Context) -> None:
    if context.options.watch:
        return cmd_top(context)
    status = context.client.status()
    if context.options.detailed:
        return context.write(format_detailed(status, context.client.health(), context.paint))
    context.show(status, format_fitting_snapshot)
    if status["hash"] != (own := file_hash(DISK)) and not context.is_remote:
        context.say(f"the service is nexus {status['version']} ({status['hash']}), this is {__version__} ({own}); "
                  "nexus restart brings them together")


def cmd_queue(context: Context) -> None:
    jobs, total = list_part(context, "/queue", fields=name_fields(context, QUEUE_CSV) or (
        None if context.options.json else ",".join(QUEUE_FIELDS)))
    show_table(context, jobs, JOB, QUEUE_CSV, format_queue, f"no job{describe_choice(context)} is pending")
    if len(jobs) < total:
        context.say(f"… {total - len(jobs)} more wait behind them; nexus queue -n 0 shows all")


def cmd_history(context: Context) -> None:
    show_latest(context, list(FINAL), "finished_at", f"no job{describe_choice(context)} has finished yet")


def cmd_jobs(context: Context) -> None:
    chosen = describe_choice(context)
    show_latest(context, list(STATUSES), "created_at",
                f"there is no job{chosen}" if chosen else 'no job yet: nexus add "python train.py"')


def show_latest(context: Context, statuses: Sequence[str], order: str, when_empty: str) -> None:
    """Show the newest jobs, the newest last, next to the prompt."""
    chosen, named = read_choice(context), getattr(context.options, "ids", ())
    if named:
        check_choice(context, named)
        jobs = [context.client.job(job_id) for job_id in named]
        for job in jobs:
            check_named(context, job, statuses)
        return show_table(context, jobs, JOB, JOB_CSV, format_jobs)
    if "status" in chosen:
        statuses = chosen["status"]
        when_empty = f"no job{describe_choice(context)} is {' or '.join(statuses)}"
    jobs, total = list_part(context, "/jobs", status=statuses, sort=f"-{order}", fields=name_fields(context, JOB_CSV))
    show_table(context, jobs[::-1], JOB, JOB_CSV, format_jobs, when_empty)
    if context.paint.width and not (context.options.json or context.options.csv or context.options.columns):
        for line in list_common_values(jobs):
            context.say(line)
    if len(jobs) < total:
        context.say(f"the last {len(jobs)} of {total}; nexus {context.options.subcommand} -n 0 shows all")


def name_fields(context: Context, usual: Sequence[str]) -> str | None:
    """The fields that --columns or --csv ask for; None: those of the usual table, or all."""
    options = context.options
    return ",".join(options.columns or usual) if options.columns or options.csv else None


def show_table(context: Context, rows: Sequence[Json], fields: Mapping[str, Field], usual: Sequence[str],
               make_text: Callable[[Any, Paint], str], when_empty: str = "") -> None:
    """Show rows as --csv, --columns and --json say, or else by `make_text`.  `usual`: what --csv has by itself."""
    columns = context.options.columns
    if columns or context.options.csv:
        rows = [{name: row.get(name) for name in columns or usual} for row in rows]
    if context.options.csv:
        return context.write(format_csv(columns or usual, rows))
    if columns:
        make_text = functools.partial(format_columns, fields, columns)
    context.show(rows, make_text, when_empty)


def cmd_show(context: Context) -> None:
    show_each(context, find_all(context), lambda job: make_job_text(context, job))


def cmd_why(context: Context) -> None:
    reasons = [context.client.why(job["id"]) for job in find_all(context)]
    show_each(context, reasons, lambda reason: format_why(reason, context.paint))


def show_each(context: Context, items: Sequence[Json], make_text: Callable[[Json], str]) -> None:
    """Show each; as JSON a list, or the item that was named alone."""
    is_one = len(items) == len(context.options.ids) == 1
    context.show(items[0] if is_one else items, lambda data, paint: "\n".join(map(make_text, items)),
                 "there is no such job")


def make_job_text(context: Context, job: Json) -> str:
    lines = list[str]()
    is_on_gpus = job["status"] == RUNNING and job["gpus"]
    gpus = context.client.status()["gpu_status"] if is_on_gpus else []
    if job["started_at"]:
        try:
            lines = read_last_lines(context, job["id"]) or list(filter(None, [job["last_line"]]))
        except NexusError as error:
            if error.kind != "not_found":
                raise
            lines = [error.message]
    chain = context.client.ask("GET", f"/jobs/{quote_path(job['id'])}/chain")
    return format_job(job, context.paint, last_lines=lines, gpus=gpus, chain=chain)


def read_last_lines(context: Context, job_id: str) -> list[str]:
    query = encode_query({"tail": LAST_LINES, "offset": -LAST_BYTES})
    _, pieces = context.client.open_stream(f"/jobs/{quote_path(job_id)}/logs{query}", NDJSON)
    texts = dict[int, str]()                        # {attempt: what it printed}
    for piece in map(load_json, split_lines(pieces)):
        texts[piece["attempt"]] = texts.get(piece["attempt"], "") + piece["text"]
    text = "\n".join(texts.values()).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return find_last_lines(text, LAST_LINES)


LAST_LINES = 5                  # that `show` prints
LAST_BYTES = 2**22              # of each log, where it looks for them


def cmd_usage(context: Context) -> None:
    """Print jobs, GPU-hours and the share that failed, for each user or group."""
    by, duration = context.options.by, context.options.since or USAGE_SINCE
    other = "group" if by == "user" else "user"
    if other in (context.options.columns or ()):
        refuse(f"these are sums by {by}, and tell no {other}", f"--by {other}")
    since = format_time(time.time() - parse_duration(duration))
    rows = context.client.usage(since=duration, by=by)
    usual = [name for name in USAGE if name == by or name not in ("user", "group")]
    show_table(context, rows, USAGE, usual, functools.partial(format_table, (
        Column(by.upper(), cell=lambda row: row[by], is_free=True),
        Column("JOBS", cell=lambda row: "-" if row[by] == OTHER_PEOPLE else str(row["jobs"])),
        Column("GPU-HOURS", cell=lambda row: f"{row['gpu_hours']:.1f}"),
        Column("CPU-JOB HOURS", cell=lambda row: f"{row['cpu_job_hours']:.1f}",
               shown_if=lambda rows: any(row["cpu_job_hours"] >= 0.05 for row in rows), spare=1),
        Column("FAILED", cell=lambda row: "-" if row[by] == OTHER_PEOPLE else
               f"{row['failed']} of {row['ended']} ended"),
    )), "no job ran in that time")
    whole = min((row["forgotten_since"] for row in rows if row["forgotten_since"]), default=None)
    note = f"; of jobs that are forgotten, whole days since {local_time(whole, '%Y-%m-%d')}" if whole else ""
    if any(row[by] == OTHER_PEOPLE for row in rows):
        note += f"; {OTHER_PEOPLE}: as far as the history of the GPUs tells"
    context.say(f"since {local_time(since, '%Y-%m-%d %H:%M')}; --since 24h: the last 24 hours{note}")


def cmd_results(context: Context) -> None:
    """Print a group's jobs as a table; what waits is only counted, unless the table is for a program."""
    options = context.options
    query = {"mean": options.mean or None, "over": options.over, "order": options.order}
    results = context.client.results(options.group, **{name: word for name, word in query.items() if word is not None})
    waiting = sum(len(row.get("ids", [1])) for row in results["rows"] if row["status"] == PENDING)
    if options.csv:
        return context.write(format_results_csv(results))
    if not options.json:
        results["rows"] = [row for row in results["rows"] if row["status"] != PENDING]
    context.show(results, format_results)
    if waiting and not options.json:
        context.say(f"{waiting} more {'wait' if waiting > 1 else 'waits'}: "
                    f"nexus queue --group {quote(options.group)}")
    best, column = results["best_id"], next((column for column in results["columns"] if column["direction"]), None)
    if best and column and not options.json:
        ids = next((row.get("ids", [best]) for row in results["rows"] if row["id"] == best), [best])
        jobs = f"job {best}" if len(ids) == 1 else f"jobs {' '.join(ids)}"
        context.say(f"best by {column['title']} ({column['direction']}est): {jobs}")

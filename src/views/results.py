"""The results of a group: a table with the values of its sweep and the numbers that its jobs print."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from ..formats.metrics import METRIC_NUMBER, find_direction, read_metrics
from ..formats.progress import drop_bar
from ..opening import TYPE_CHECKING
from ..values.causes import TIMEOUT
from ..values.job import CANCELLED, COMPLETED, FAILED, FINAL, PENDING, RUNNING, STATUS, Job
from ..values.schema import INTEGER, JOB_ID, STRING, list_of, one_of
from ..values.text import format_duration, format_known, format_line, format_memory, join_some, refuse, suggest
from ..values.value import Field, Value
from .api_json import object_ref, round_known
from .job_tables import Column, format_table
from .status_text import Paint

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json

TABLE_COLUMN = {
    "key": Field(STRING, "its name for `order`: sweep.lr, metric.loss, or that of the key of Job"),
    "title": Field(STRING, "its name for people"),
    "kind": Field(one_of("fixed", "sweep", "metric"), "sweep: a value that the job has of its sweep; metric: a number "
                  "with this name in the last line with numbers that the job printed; fixed: what all jobs have"),
    "form": Field(one_of("text", "number", "duration", "size"), "what its cells are; in seconds, in MiB"),
    "direction": Field(one_of("low", "high"), "which of its numbers are better; null: unknown", default=None),
}
TABLE_ROW = {
    "id": Field(JOB_ID, "the job"),
    "status": Field(STATUS, "its status"),
    "cells": Field(list_of({"type": ["string", "number", "null"]}),
                   "one for each column; nan, inf and -inf are texts, and null is what there is not"),
    "ids": Field(list_of(JOB_ID), "the jobs whose mean it is; only it: without `mean` and `over`"),
    "deviations": Field(list_of({"type": ["number", "null"]}), "of means, one for each column: the standard deviation "
                        "of these jobs' numbers (n - 1); null where there are not two", default=None),
}
RESULTS = {
    "group": Field(STRING, "its name"),
    "columns": Field(list_of(object_ref("ResultColumn")), "what the table has"),
    "rows": Field(list_of(object_ref("ResultRow")), "completed jobs, then others that have ended, then what runs, then "
                  "what waits; a job that was run again stands for its former runs"),
    "order": Field(STRING, "the column that the rows are sorted by, after - in reverse; numbers that are none, and "
                   "what there is not, come last", default=None),
    "best_id": Field(JOB_ID, "the completed job with the best number in the first column of which one is better",
                     default=None),
    "over": Field(STRING, "the value of the sweep that the rows are means over; null: each row is a job", default=None),
    "total": Field(INTEGER, "how many rows there are, of jobs of any status"),
}
FIXED_COLUMNS = {                               # {key: (title, form)}
    "id": ("Job", "text"), "name": ("Name", "text"), "status": ("Status", "text"),
    "runtime_seconds": ("Runtime", "duration"), "peak_gpu_mem_mib": ("GPU memory", "size"),
    "jobs": ("Jobs", "number"), "commit": ("Commit", "text"), "last_line": ("Last line", "text")}
MAX_METRIC_COLUMNS, MAX_SWEEP_COLUMNS = 20, 50          # those that most jobs have
STATUS_ORDER = {COMPLETED: 0, FAILED: 1, CANCELLED: 1, RUNNING: 2, PENDING: 3}


class ResultRow(Value):
    """What a job, or several together, have in the table."""
    id: str                                     # of several, that of the first
    status: str
    cells: Mapping[str, Any]                    # by the keys of the columns
    metrics: tuple[str, ...]                    # the names of those that make columns
    command: str
    ids: tuple[str, ...] = ()                   # all its jobs
    deviations: Mapping[str, float] = {}        # by the keys of the columns


def make_results(group: str, jobs: Sequence[Job], live: Mapping[str, Mapping[str, Any]],
                 order: str | None = None, mean: bool = False, over: str | None = None) -> dict[str, Any]:
    """GET /groups/{group}/results, of all these jobs.

    `live`: of running jobs, what their last attempt does not hold yet.  Raises: usage, when there is no such column.
    """
    rows = [make_result_row(job, live.get(job.id, {})) for job in jobs]
    if mean or over is not None:
        over = find_seed(rows, over)
        rows = fold_rows(rows, over)
    columns = list_result_columns(rows)
    first = next((column for column in columns if column["direction"]), None)
    order = order_best(first) if order is None and first else order and find_order(columns, order)
    ended = [row for row in rows if row.status == COMPLETED
             and isinstance(row.cells.get(first["key"]), (int, float))] if first else []
    best = sort_results(ended, order_best(first)) if first and len(ended) > 1 else []
    shown = [make_row_json(row, columns) for row in sort_results(rows, order)]
    return {"group": group, "columns": columns, "rows": shown, "order": order, "over": over,
            "best_id": best[0].id if best else None, "total": len(rows)}


def make_row_json(row: ResultRow, columns: Sequence[Json]) -> dict[str, Any]:
    keys = [column["key"] for column in columns]
    return {"id": row.id, "status": row.status, "cells": [row.cells.get(key) for key in keys], "ids": list(row.ids),
            "deviations": [row.deviations.get(key) for key in keys] if len(row.ids) > 1 else None}


def find_order(columns: Sequence[Json], order: str) -> str:
    """The order by the key of a column, or by its name for people.  Raises: usage, when there is no such column."""
    sign, name = ("-", order[1:]) if order.startswith("-") else ("", order)
    keys = [column["key"] for column in columns]
    found = next((column["key"] for column in columns if column["title"] == name), name)
    if name in keys or found in keys:
        return sign + (name if name in keys else str(found))
    refuse(f"there is no column {format_line(order, 60)}", suggest(order, keys) or f"there are {join_some(keys)}")


def find_seed(rows: Sequence[ResultRow], name: str | None) -> str:
    """The value of a sweep to make means over; without a name, the seed.  Raises: usage, when there is none."""
    names = list(dict.fromkeys(key[6:] for row in rows for key in row.cells if key.startswith("sweep.")))
    seeds = [each for each in names if "seed" in each.lower()]
    found = name if name is not None else "seed" if "seed" in names or len(seeds) != 1 else seeds[0]
    if found in names:
        return found
    refuse(f"no job of the group has a value {format_line(found, 60)} of a sweep",
           f"there are {join_some(names)}: nexus results GROUP --over NAME" if names else
           "means are over a value of --sweep, like --sweep seed=0..4")


def fold_rows(rows: Sequence[ResultRow], over: str) -> list[ResultRow]:
    """Rows for jobs of one status which differ in this value of their sweep alone, in the order of the first ones."""
    key = f"sweep.{over}"
    folded: dict[Any, list[list[ResultRow]]] = {}
    for row in rows:
        others = tuple((name, cell) for name, cell in row.cells.items() if name.startswith("sweep.") and name != key)
        alike = folded.setdefault((row.status, others) if key in row.cells else row.id, [])
        same = next((group for group in alike if is_same_but(
            group[0].command, row.command, group[0].cells[key], row.cells[key])), None)
        if same:
            same.append(row)
        else:
            alike.append([row])
    return [fold_row(group, key) for alike in folded.values() for group in alike]


def is_same_but(first: str, second: str, value: str, other: str) -> bool:
    """Whether the second text is the first one, with another value in some of the places where that has its own."""
    start, *parts = first.split(value, MAX_PLACES) if value else [first]
    ends = {len(start)} if second.startswith(start) else set()
    for part in parts:
        ends = {end + len(word) + len(part) for end in ends for word in (value, other)
                if second.startswith(word + part, end)}
    return len(second) in ends


MAX_PLACES = 100                # of a value in a command


def fold_row(rows: Sequence[ResultRow], over: str) -> ResultRow:
    """The means of these rows' numbers, how they deviate, and their values, which are the same; of memory the peak."""
    first, deviations = rows[0], dict[str, float]()
    cells: dict[str, Any] = {}
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    for key in dict.fromkeys(key for row in rows for key in row.cells):
        found = [row.cells[key] for row in rows if row.cells.get(key) is not None]
        if key.startswith("metric.") or key == "runtime_seconds":
            numbers = list(map(float, found))
            cells[key] = make_cell(compute_mean(numbers)) if numbers else None
            if key != "runtime_seconds" and (deviation := compute_deviation(numbers)) is not None:
                deviations[key] = deviation
        elif key == "peak_gpu_mem_mib":
            cells[key] = max(found, default=None)
        elif key == "commit":
            cells[key] = first.cells[key] if len({row.cells[key] for row in rows}) == 1 else None
        elif key not in (over, "last_line"):
            cells[key] = first.cells.get(key)
    return ResultRow(first.id, first.status, {**cells, "jobs": len(rows)}, tuple(names), first.command,
                     tuple(row.id for row in rows), deviations)


def compute_mean(numbers: Sequence[float]) -> float:
    """To twelve digits: no more of a sum of floats says anything."""
    mean = math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
    return float(f"{mean:.12g}")


def compute_deviation(numbers: Sequence[float]) -> float | None:
    """The standard deviation of a sample; None of fewer than two numbers, or where one is not finite."""
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)):
        return None
    mean = math.fsum(numbers) / len(numbers)
    return float(f"{math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)):.4g}")


def make_result_row(job: Job, live: Mapping[str, Any]) -> ResultRow:
    """The values of a job that was added before they were kept are those that its script gets."""
    last, prefix = job.current, "NEXUS_SWEEP_"
    line, metric_line = [live.get(name, getattr(last, name)) for name in ("last_line", "metric_line")]
    values = job.sweep_values or [(name[len(prefix):], text) for name, text in job.variables if name.startswith(prefix)]
    metrics = read_metrics(metric_line or line or "")
    is_error = job.status == FAILED and last.cause != TIMEOUT         # its last numbers may be those of an error
    return ResultRow(job.id, job.shown_status, {
        "id": job.id, "name": None if values else format_line(job.name or job.command, 200),
        **{f"sweep.{name}": text for name, text in values},
        **{f"metric.{name}": make_cell(number) for name, number in metrics.items()}, "status": job.shown_status,
        "runtime_seconds": live.get("runtime_seconds", last.runtime_seconds),
        "peak_gpu_mem_mib": live.get("peak_gpu_mem_mib", round_known(last.peak_gpu_mem_mib)),
        "commit": last.commit or job.snapshot,
        "last_line": line and drop_bar(line).strip()}, () if is_error else tuple(metrics), job.command, (job.id,))


def make_cell(number: float) -> float | str:
    """A number as JSON can have it."""
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def list_result_columns(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """The columns: first which job it is, then its results, those that tell which is better first."""
    from collections import Counter
    swept = Counter(key[6:] for row in rows for key in row.cells if key.startswith("sweep."))
    most = {name for name, _ in swept.most_common(MAX_SWEEP_COLUMNS)}
    values = [name for name in swept if name in most]
    counts = Counter(name for row in rows for name in row.metrics if name not in most)
    often = {name for name, _ in counts.most_common(MAX_METRIC_COLUMNS)}
    names = sorted((name for name in counts if name in often), key=lambda name: find_direction(name) is None)

    def describe(kind: str, form: str, name: str, direction: str | None = None) -> dict[str, Any]:
        is_taken = name in (*FIXED_COLUMNS, *[title for title, _ in FIXED_COLUMNS.values()])
        return {"key": f"{kind}.{name}", "title": f"{kind}.{name}" if is_taken else name, "kind": kind, "form": form,
                "direction": direction}

    fixed = [{"key": key, "title": title, "kind": "fixed", "form": form, "direction": None}
             for key, (title, form) in FIXED_COLUMNS.items()
             if (any(key in row.cells for row in rows) if key not in ("name", "peak_gpu_mem_mib", "commit")
                 else any(row.cells[key] is not None for row in rows))]
    return [*[column for column in fixed if column["key"] in ("id", "name")],
            *[describe("sweep", "text", name) for name in values],
            *[describe("metric", "number", name, find_direction(name)) for name in names],
            *[column for column in fixed if column["key"] not in ("id", "name")]]


def order_best(column: Json) -> str:
    """The order in which the best of a column comes first."""
    return ("-" if column["direction"] == "high" else "") + str(column["key"])


def sort_results(rows: Sequence[ResultRow], order: str | None) -> list[ResultRow]:
    """Rows by STATUS_ORDER, and then by a column; what is no number, and what there is not, comes last."""
    key = (order or "").removeprefix("-")
    ranks = {row.id: rank_cell(row.cells.get(key)) for row in rows}
    ranked = sorted((row for row in rows if ranks[row.id]), key=lambda row: ranks[row.id] or (),
                    reverse=(order or "").startswith("-"))
    return sorted([*ranked, *(row for row in rows if not ranks[row.id])], key=lambda row: STATUS_ORDER[row.status])


def rank_cell(cell: Any) -> tuple[Any, ...] | None:
    """By what a cell is sorted: numbers as numbers, before texts.  None: it comes last."""
    if isinstance(cell, str) and re.fullmatch(METRIC_NUMBER, cell):
        cell = float(cell)
    if cell is None or cell != cell:            # nan
        return None
    return (1, cell) if isinstance(cell, str) else (0, cell)


def format_results(results: Json, paint: Paint) -> str:
    """The output of `nexus results`."""
    forms: Mapping[str, Callable[[Any], str]] = {"duration": format_duration, "size": format_memory}
    colours = {"id": "magenta", "runtime_seconds": "cyan"}

    def make_column(index: int, column: Json) -> Column:
        make = forms.get(column["form"], str)
        spare = {"peak_gpu_mem_mib": 3, "runtime_seconds": 2, "last_line": 1}.get(column["key"], 0)

        def format_cell(row: Json) -> str:
            cell, deviation = row["cells"][index], (row.get("deviations") or {index: None})[index]
            if column["key"] == "id" and len(row.get("ids", ())) > 1:
                return f"{cell} +{len(row['ids']) - 1}"
            return "-" if cell is None else make(cell) if deviation is None else format_mean(cell, deviation)

        return Column(column["title"].upper() if column["kind"] == "fixed" else column["title"], cell=format_cell,
                      colour=colours.get(column["key"], ""), spare=spare,
                      is_free=column["kind"] == "fixed")

    return format_table([make_column(index, column) for index, column in enumerate(results["columns"])
                         if column["key"] != "commit"], results["rows"], paint)


def format_mean(mean: float, deviation: float) -> str:
    """With as many decimals as two digits of the deviation take."""
    decimals = min(12, max(0, 1 - math.floor(math.log10(deviation)))) if deviation else 0
    return f"{mean:.{decimals}f} ± {deviation:.{decimals}f}" if deviation else f"{mean} ± 0"


def format_results_csv(results: Json) -> str:
    """The table as a spreadsheet or a program reads it: times in seconds, memory in MiB.  Source: RFC 4180."""
    titles = [column["key"] if column["kind"] == "fixed" else column["title"] for column in results["columns"]]
    rows = [titles, *(row["cells"] for row in results["rows"])]
    if results.get("over") is not None:
        rows = spread_deviations(results, titles)
    return "".join(",".join(map(format_csv_cell, row)) + "\n" for row in rows)


def spread_deviations(results: Json, titles: Sequence[str]) -> list[list[Any]]:
    """The rows of a table of means, its titles first: the ids of each, and after each mean its deviation."""
    means = [column["kind"] == "metric" for column in results["columns"]]
    rows = [[part for title, is_mean in zip(titles, means) for part in (title, f"{title} sd")[:1 + is_mean]]]
    for row in results["rows"]:
        deviations = row["deviations"] or [None] * len(means)
        cells = [" ".join(row["ids"]) if title == "id" else cell for title, cell in zip(titles, row["cells"])]
        rows.append([part for cell, deviation, is_mean in zip(cells, deviations, means)
                     for part in (cell, deviation)[:1 + is_mean]])
    return rows


def format_csv_cell(cell: Any) -> str:
    """A cell that no spreadsheet takes for a formula."""
    text = "" if cell is None else format_line(str(cell))
    if re.match(r"\s*[-=+@\uff1d\uff0b\uff0d\uff20]", text) and not re.fullmatch(METRIC_NUMBER, text):
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if re.search('[",;]', text) else text


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

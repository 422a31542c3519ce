"""The tables of jobs: `nexus jobs`, `queue`, `history` and `top`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence

from ..opening import TYPE_CHECKING
from ..values.job import PENDING, RUNNING
from ..values.text import count_columns, format_count, format_duration, format_indices, format_known, format_line
from ..values.value import Value, replace
from .api_json import format_progress
from .show import describe_group, describe_run
from .status_text import (
    Paint,
    cut_end,
    describe_machine,
    format_bad_node,
    format_history,
    format_others,
    format_priority,
    format_snapshot,
    label_for_terminal,
    local_time,
    name_or_command,
)

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


class Column(Value):
    heading: str
    cell: Callable[[Any], str]                              # row -> what stands in its cell
    colour: str = ""
    shown_if: Callable[[Sequence[Any]], bool] | None = None     # whether these rows need the column; None: always
    spare: int = 0              # on a narrow terminal, the columns with the highest are left out first; 0: never
    is_free: bool = False       # its cells have words of any length: on a terminal they are cut
    end: Callable[[Any], str | None] | None = None      # row -> what its cell ends with, which is cut first


LAST_WIDTH, MOST_WIDTH = 24, 24         # on a terminal: least width of the last column, most width of the others


def format_table(columns: Iterable[Column], rows: Sequence[Any], paint: Paint, below: Sequence[str] = ()) -> str:
    """Columns padded to their widest cell; the last one takes the rest of the line.

    `below`: on a terminal, a line under each row.
    """
    return paint.join(line for line, _ in list_table_lines(columns, rows, paint, below))


def list_table_lines(columns: Iterable[Column], rows: Sequence[Any], paint: Paint,
                     below: Sequence[str] = ()) -> list[tuple[str, int]]:
    """[(line, the number of its row from 1)], 0 for what is no row."""
    import textwrap
    width = paint.width
    shown = [column for column in columns if column.shown_if is None or column.shown_if(rows)]
    *padded, last = range(len(shown))           # places in `shown`: two columns may have one heading
    cells: list[list[str]] = []                 # of each column, its heading first
    for column in shown:
        is_cut = width and column is not shown[last] and column.is_free
        most = min(MOST_WIDTH, max(16, width // 5)) if is_cut else 0
        cells.append([column.heading, *(format_line(column.cell(row), most) for row in rows)])
    sizes = [max(map(count_columns, texts)) for texts in cells]
    least = min(LAST_WIDTH, sizes[last])
    for place in sorted([*padded, last], key=lambda place: -shown[place].spare):
        if shown[place].spare and width and width - sum(sizes[other] + 2 for other in padded) < least:
            if place == last:
                last = padded.pop()
                least = sizes[last]         # it stands whole
            else:
                padded.remove(place)
    rest = max(20, width - sum(sizes[place] + 2 for place in padded)) if width else 0
    lines = []
    for number in range(len(rows) + 1):
        texts = {place: cells[place][number] + " " * (sizes[place] - count_columns(cells[place][number]))
                 for place in padded}
        end = shown[last].end
        texts[last] = cut_end(cells[last][number], end(rows[number - 1]) if end and number else None, rest)
        lines.append(("  ".join(paint(shown[place].colour if number else "white", text)
                                for place, text in texts.items()).rstrip(), number))
        if number and width and below:
            lines += [(line, 0) for line in textwrap.wrap(below[number - 1], max(20, width), initial_indent="     ",
                                                          subsequent_indent="     ")]
    return lines


def field_column(heading: str, key: str, *, show: Callable[[Any], str] = str, colour: str = "",
                 spare: int = 0, is_free: bool = False) -> Column:
    """A column of a key of jobs, which is shown when a job has a value for it."""
    return Column(heading, cell=lambda job: "-" if job[key] is None else show(job[key]), colour=colour,
                  shown_if=lambda jobs: any(job[key] is not None for job in jobs), spare=spare, is_free=is_free)


def time_column(heading: str, key: str, *, spare: int) -> Column:
    return field_column(heading, key, show=lambda stamp: local_time(stamp, "%m-%d %H:%M"), colour="cyan", spare=spare)


def format_result(job: Json) -> str:
    return "unknown" if job["unknown_since"] else job["outcome"] or "-"


def format_gpu_count(job: Json) -> str:
    return "-" if job["gpus"] is None else format_known(job["gpus"], "", 2)


def format_command(job: Json) -> str:
    """A job's command, or whose it is, where the caller may not see it."""
    return f"({job['user']}'s)" if job["command"] is None else job["command"]


def have_several_nodes(jobs: Sequence[Json]) -> bool:
    """Whether several machines are involved."""
    return len({job["node"] for job in jobs}) > 1 or any(job["only_node"] for job in jobs)


# A further column of `nexus jobs` is a row of JOB_COLUMNS: nothing else names it.
ID_COLUMN = Column("ID", cell=lambda job: job["id"], colour="magenta")
RESULT_COLUMN = Column("RESULT", cell=format_result)
RUNTIME_COLUMN = field_column("RUNTIME", "runtime_seconds", show=format_duration, colour="cyan", spare=1)
LAST_COLUMNS = (
    Column("USER", cell=lambda job: job["user"], shown_if=lambda jobs: len({job["user"] for job in jobs}) > 1, spare=2,
           is_free=True),
    field_column("GROUP", "group", spare=4, is_free=True),
    field_column("NAME", "name", colour="bright", is_free=True),
    Column("COMMAND", cell=format_command, colour="bright"))
QUEUE_COLUMNS = (
    ID_COLUMN,
    Column("PRIORITY", cell=lambda job: format_priority(job["priority"]),
           shown_if=lambda jobs: any(job["priority"] != 1 for job in jobs)),
    Column("NODE", cell=lambda job: job["only_node"] or "any",
           shown_if=lambda jobs: any(job["only_node"] for job in jobs), is_free=True),
    Column("GPUS", cell=format_gpu_count),
    time_column("ADDED", "created_at", spare=5),
    time_column("STARTS", "estimated_start", spare=1),
    *LAST_COLUMNS)
QUEUE_FIELDS = ("id", "priority", "only_node", "gpus", "created_at", "estimated_start", "user", "group", "name",
                "command", "waiting_for", "sweep_values")       # what format_queue() shows
PROGRESS_COLUMN = Column("PROGRESS", cell=lambda job: format_progress(job) or "-", colour="cyan",
                         shown_if=lambda jobs: any(map(format_progress, jobs)))
PROGRESS_PARTS = (                              # the same on a terminal, where one of both may be left out
    Column("PROGRESS", cell=lambda job: format_progress(job).partition(" · ")[0] or "-", colour="cyan",
           shown_if=PROGRESS_COLUMN.shown_if, spare=2),
    Column("LEFT", cell=lambda job: format_progress(job).partition(" · ")[2].removesuffix(" left") or "-",
           colour="cyan", shown_if=lambda jobs: any(" left" in format_progress(job) for job in jobs), spare=4))
JOB_COLUMNS = (
    ID_COLUMN,
    Column("STATUS", cell=lambda job: job["status"]),
    Column("NODE", cell=lambda job: job["node"] or "-", shown_if=have_several_nodes, is_free=True),
    Column("GPU", cell=lambda job: format_indices(job["gpu_places"]) or "-", is_free=True),
    RESULT_COLUMN,
    RUNTIME_COLUMN,
    PROGRESS_COLUMN,
    time_column("STARTED", "started_at", spare=5),
    time_column("FINISHED", "finished_at", spare=6),
    *LAST_COLUMNS)

MESSAGE_COLUMN = Column("MESSAGE", cell=lambda job: job["cause_line"] or "",
                        shown_if=lambda jobs: any(job["cause_line"] for job in jobs))


def choose_columns(columns: Sequence[Column], jobs: Sequence[Json], paint: Paint) -> list[Column]:
    """The columns for these jobs on a terminal, or in a file.

    Labels stand whole, and a narrow terminal may do without the commands beside them.
    """
    if not paint.width:
        return [*columns]
    columns = [part for column in columns for part in (PROGRESS_PARTS if column is PROGRESS_COLUMN else [column])]
    if not any(job["label"] for job in jobs):
        return columns
    name = Column("NAME", cell=lambda job: job["label"] or format_line(job["name"] or "-", MOST_WIDTH), colour="bright")
    is_named = all(job["label"] or job["name"] for job in jobs)
    return [*columns[:-2], name, replace(columns[-1], spare=5 if is_named else 0)]


def format_queue(jobs: Sequence[Json], paint: Paint) -> str:
    """On a terminal, a reason stands below the jobs that share it; in a file it is the last column."""
    last = [] if paint.width else [Column("WAITING FOR", cell=lambda job: job["waiting_for"] or "")]
    jobs = label_for_terminal(jobs, paint)
    return format_table([*choose_columns(QUEUE_COLUMNS, jobs, paint), *last], jobs, paint, list_new_reasons(jobs))


def list_new_reasons(jobs: Sequence[Json]) -> list[str]:
    """Why each waits, where that is not what stands above it."""
    reasons = [job["waiting_for"] or "" for job in jobs]
    return [reason if reason != former else "" for reason, former in zip(reasons, ["", *reasons])]


def format_jobs(jobs: Sequence[Json], paint: Paint) -> str:
    """On a terminal, a failed job's message stands below it, and how one ended that is not recorded yet.

    In a file the message is the last column.
    """
    below = [format_line(job["cause_line"] or job["unrecorded"] or "", max(20, paint.width - 5)) for job in jobs]
    if not paint.width:
        jobs = [{**job, "status": "; ".join(filter(None, [job["status"], job["unrecorded"]]))} for job in jobs]
    last = [] if paint.width else [MESSAGE_COLUMN]
    jobs = label_for_terminal(jobs, paint)
    return format_table([*choose_columns(JOB_COLUMNS, jobs, paint), *last], jobs, paint, below)


# `nexus top`: a row for each GPU; below them what waits, with one row for a group

class TopRow(Value):
    gpu: Json                                   # {}: the job has none
    job: Json                                   # {}: the GPU has none


def format_reading(number: float | None, unit: str) -> str:
    return "-" if number is None else f"{number:.0f}{unit}"


def format_gpu_memory(row: TopRow) -> str:
    return f"{row.gpu['memory_used'] or '-'}/{row.gpu['memory_total'] or '-'}" if row.gpu else "-"


def format_runtime(row: TopRow) -> str:
    return format_duration(row.job["runtime_seconds"] or 0) if row.job else "-"


def format_job_cell(column: Column, row: TopRow) -> str:
    return column.cell(row.job) if row.job else "-"


def has_shown_job(column: Column, rows: Sequence[TopRow]) -> bool:
    return bool(column.shown_if and column.shown_if([row.job for row in rows if row.job]))


TOP_COLUMNS = (
    Column("GPU", cell=lambda row: row.gpu.get("place", "-")),
    Column("TYPE", cell=lambda row: row.gpu.get("profile") or row.gpu.get("name", "-"),
           shown_if=lambda rows: len({row.gpu["name"] for row in rows if row.gpu}) > 1, spare=4, is_free=True),
    Column("UTIL", cell=lambda row: format_reading(row.gpu.get("utilization"), "%"), spare=1),
    Column("MEMORY", cell=format_gpu_memory, spare=1),
    Column("TEMP", cell=lambda row: format_reading(row.gpu.get("temperature"), "C"), spare=2),
    Column("POWER", cell=lambda row: format_reading(row.gpu.get("power_watts"), "W"), spare=3),
    Column("JOB", cell=lambda row: row.job.get("id", "-"), colour="magenta"),
    Column("RUNTIME", cell=format_runtime, colour="cyan"),
    *(replace(column, cell=functools.partial(format_job_cell, column),
              shown_if=functools.partial(has_shown_job, column)) for column in PROGRESS_PARTS),
    Column("COMMAND", cell=lambda row: describe_run(row.gpu, row.job), colour="bright",
           end=lambda row: row.job.get("command")))
COMMAND_COLUMN = Column("COMMAND", cell=name_or_command, colour="bright", end=lambda job: job["command"])
WAITING_COLUMNS = (
    replace(ID_COLUMN, heading="WAITING"),
    Column("GPUS", cell=format_gpu_count, spare=1),
    Column("STARTS", cell=lambda job: local_time(job["estimated_start"]), colour="cyan", spare=2),
    COMMAND_COLUMN)
FINISHED_COLUMNS = (
    replace(ID_COLUMN, heading="FINISHED"),
    RESULT_COLUMN,
    RUNTIME_COLUMN,
    COMMAND_COLUMN)


def make_top_rows(status: Json) -> list[TopRow]:
    """The jobs of each GPU, or the GPU alone; then the running jobs that are on none of them."""
    jobs = {job["id"]: job for job in status["running_jobs"]}
    rows = list[TopRow]()
    for gpu in status["gpu_status"]:
        there = [jobs[job_id] for job_id in gpu["job_ids"] if job_id in jobs]
        rows += [TopRow(gpu, job) for job in there or [{}]]
    on_gpus = {row.job["id"] for row in rows if row.job}
    return rows + [TopRow({}, job) for job in status["running_jobs"] if job["id"] not in on_gpus]


def format_fitting_snapshot(status: Json, paint: Paint) -> str:
    """The output of `nexus`: where that is higher than the window, GPUs and jobs have a row each, as in `nexus top`."""
    text = format_snapshot(status, paint)
    rows = make_top_rows({**status, "running_jobs": label_for_terminal(status["running_jobs"], paint)})
    if not paint.height or not rows or text.count("\n") < paint.height:
        return text
    bad_nodes = [line for node in status["nodes"][1:] for line in format_bad_node(node, paint)]
    lines = [line for line, _ in list_table_lines(TOP_COLUMNS, rows, paint)]
    return format_snapshot(status, paint, lines + bad_nodes)


GROUP_WIDTH = 16                # columns before a group's name in `nexus top`, less those of the total left out


def make_group_row(group: Json, paint: Paint) -> dict[str, Any]:
    """A group among what waits; on a terminal its counts stand where jobs have their commands, if there is room."""
    counts = describe_group(group)
    row = {"id": "group", "position": group["position"] or 0, "gpus": None, "estimated_start": None}
    if len(counts) + count_columns(group["name"]) < paint.width - GROUP_WIDTH:
        return {**row, "name": group["name"], "command": counts.partition(": ")[2], "waiting_for": None}
    return {**row, "name": None, "command": group["name"], "waiting_for": counts}


def list_top(status: Json, waiting: Sequence[Json], more: int, groups: Sequence[Json], finished: Sequence[Json],
             paint: Paint) -> list[tuple[str, str]]:
    """[(line, the id of its job, or empty)].

    `waiting`: the first pending jobs that are in none of `groups`, the reply of GET /groups; `more`: how many follow.
    """
    def add_table(columns: Iterable[Column], rows: Sequence[Any], ids: Sequence[str],
                  below: Sequence[str] = ()) -> None:
        for line, number in list_table_lines(columns, rows, paint, below):
            shown.append((paint.join([line])[:-1], ids[number - 1] if number else ""))

    seen = [*status["running_jobs"], *waiting, *finished]
    waiting, finished = label_for_terminal(waiting, paint, seen), label_for_terminal(finished, paint, seen)
    rows = make_top_rows({**status, "running_jobs": label_for_terminal(status["running_jobs"], paint, seen)})
    machine = status["host"]
    lines = [paint("white", f"{machine['name']}  {describe_machine(machine)}"),
             paint("blue", f"Queue: {format_count(status['queued_jobs'], 'job')} pending ")
             + paint("yellow", "[PAUSED]" if status["is_paused"] else "[RUNNING]")
             + f"  {format_history(status)}",
             *(["Others: " + "; ".join(others)] if (others := format_others(status, paint)) else []),
             *(paint("red", f"{name}: see nexus health") for name in status["bad_checks"][:1]), ""]
    shown = [(line, "") for line in paint.join(lines).split("\n")[:-1]]
    if rows:
        add_table(TOP_COLUMNS, rows, [row.job.get("id", "") for row in rows])
    else:
        shown.append(("no job runs", ""))
    waiting_groups = [make_group_row(group, paint) for group in groups if group[PENDING] or group[RUNNING]]
    if waiting_groups or waiting:
        waiting = sorted([*waiting_groups, *waiting], key=operator.itemgetter("position"))
        shown.append(("", ""))
        last = [] if paint.width else [Column("WHY", cell=lambda job: job["waiting_for"] or "")]
        add_table([*WAITING_COLUMNS, *last], waiting, [row["id"] if row["id"] != "group" else "" for row in waiting],
                  list_new_reasons(waiting))
        shown += [(f"… {format_count(more, 'more job')}", "")] if more > 0 else []
    if finished:
        shown.append(("", ""))
        add_table(FINISHED_COLUMNS, finished, [job["id"] for job in finished])
    return shown

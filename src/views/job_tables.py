"""The tables of jobs: `nexus jobs`, `queue`, `history` and `top`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from ..opening import TYPE_CHECKING
from ..values.job import PENDING, RUNNING
from ..values.text import count_columns, format_count, format_duration, format_indices, format_known, format_line
from ..values.value import Value, replace
from .api_json import format_progress
from .show import describe_group, describe_run
from .status_text import Paint, describe_machine, format_history, format_priority, local_time, name_or_command

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


class Column(Value):
    heading: str
    cell: Callable[[Any], str]                              # row -> what stands in its cell
    colour: str = ""
    shown_if: Callable[[Sequence[Any]], bool] | None = None     # whether these rows need the column; None: always
    spare: int = 0              # on a narrow terminal, the columns with the highest are left out first; 0: never
    is_whole: bool = False      # its cells are not cut


LAST_WIDTH, MOST_WIDTH = 24, 24         # on a terminal: least width of the last column, most width of the others


def format_table(columns: Iterable[Column], rows: Sequence[Any], paint: Paint, below: Sequence[str] = ()) -> str:
    """Columns padded to their widest cell; the last one takes the rest of the line.

    `below`: on a terminal, a line under each row.
    """
    import textwrap
    width = paint.width
    shown = [column for column in columns if column.shown_if is None or column.shown_if(rows)]
    *padded, last = range(len(shown))           # places in `shown`: two columns may have one heading
    cells: list[list[str]] = []                 # of each column, its heading first
    for column in shown:
        is_cut = width and column is not shown[last] and not column.is_whole
        most = min(MOST_WIDTH, max(16, width // 5)) if is_cut else 0
        cells.append([column.heading, *(format_line(column.cell(row), most) for row in rows)])
    sizes = [max(map(count_columns, texts)) for texts in cells]
    least = min(LAST_WIDTH, sizes[last])
    for place in sorted(padded, key=lambda place: -shown[place].spare):
        if shown[place].spare and width and width - sum(sizes[other] + 2 for other in padded) < least:
            padded.remove(place)
    rest = max(20, width - sum(sizes[place] + 2 for place in padded)) if width else 0
    lines = []
    for number in range(len(rows) + 1):
        texts = {place: cells[place][number] + " " * (sizes[place] - count_columns(cells[place][number]))
                 for place in padded}
        texts[last] = format_line(cells[last][number], rest)
        lines.append("  ".join(paint(shown[place].colour if number else "white", text)
                               for place, text in texts.items()).rstrip())
        if number and width and below:
            lines += textwrap.wrap(below[number - 1], max(20, width), initial_indent="     ", subsequent_indent="     ")
    return paint.join(lines)


def field_column(heading: str, key: str, *, show: Callable[[Any], str] = str, colour: str = "",
                 spare: int = 0) -> Column:
    """A column of a key of jobs, which is shown when a job has a value for it."""
    return Column(heading, cell=lambda job: "-" if job[key] is None else show(job[key]), colour=colour,
                  shown_if=lambda jobs: any(job[key] is not None for job in jobs), spare=spare)


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
    Column("USER", cell=lambda job: job["user"], shown_if=lambda jobs: len({job["user"] for job in jobs}) > 1, spare=2),
    field_column("GROUP", "group", spare=4),
    field_column("NAME", "name", colour="bright"),
    Column("COMMAND", cell=format_command, colour="bright"))
QUEUE_COLUMNS = (
    ID_COLUMN,
    Column("PRIORITY", cell=lambda job: format_priority(job["priority"]),
           shown_if=lambda jobs: any(job["priority"] != 1 for job in jobs)),
    Column("NODE", cell=lambda job: job["only_node"] or "any",
           shown_if=lambda jobs: any(job["only_node"] for job in jobs)),
    Column("GPUS", cell=format_gpu_count),
    time_column("ADDED", "created_at", spare=5),
    time_column("STARTS", "estimated_start", spare=1),
    *LAST_COLUMNS)
QUEUE_FIELDS = ("id", "priority", "only_node", "gpus", "created_at", "estimated_start", "user", "group", "name",
                "command", "waiting_for")               # what the columns of format_queue() show
JOB_COLUMNS = (
    ID_COLUMN,
    Column("STATUS", cell=lambda job: job["status"]),
    Column("NODE", cell=lambda job: job["node"] or "-", shown_if=have_several_nodes),
    Column("GPU", cell=lambda job: format_indices(job["gpu_places"]) or "-"),
    RESULT_COLUMN,
    RUNTIME_COLUMN,
    Column("PROGRESS", cell=lambda job: format_progress(job) or "-", colour="cyan",
           shown_if=lambda jobs: any(map(format_progress, jobs)), spare=3),
    time_column("STARTED", "started_at", spare=5),
    time_column("FINISHED", "finished_at", spare=6),
    *LAST_COLUMNS)


def format_queue(jobs: Sequence[Json], paint: Paint) -> str:
    """On a terminal, a reason stands below the jobs that share it; in a file it is the last column."""
    reasons = [job["waiting_for"] or "" for job in jobs]
    below = [reason if reason != former else "" for reason, former in zip(reasons, ["", *reasons])]
    last = [] if paint.width else [Column("WAITING FOR", cell=lambda job: job["waiting_for"] or "")]
    return format_table([*QUEUE_COLUMNS, *last], jobs, paint, below)


def format_jobs(jobs: Sequence[Json], paint: Paint) -> str:
    """On a terminal, a failed job's last line stands below it, and how one ended that is not recorded yet."""
    below = [format_line(job["cause_line"] or job["unrecorded"] or "", max(20, paint.width - 5)) for job in jobs]
    if not paint.width:
        jobs = [{**job, "status": "; ".join(filter(None, [job["status"], job["unrecorded"]]))} for job in jobs]
    return format_table(JOB_COLUMNS, jobs, paint, below)


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


def format_row_progress(row: TopRow) -> str:
    return (row.job and format_progress(row.job)) or "-"


TOP_COLUMNS = (
    Column("GPU", cell=lambda row: row.gpu.get("place", "-")),
    Column("TYPE", cell=lambda row: row.gpu.get("profile") or row.gpu.get("name", "-"),
           shown_if=lambda rows: len({row.gpu["name"] for row in rows if row.gpu}) > 1, spare=4),
    Column("UTIL", cell=lambda row: format_reading(row.gpu.get("utilization"), "%"), spare=1),
    Column("MEMORY", cell=format_gpu_memory, spare=1),
    Column("TEMP", cell=lambda row: format_reading(row.gpu.get("temperature"), "C"), spare=2),
    Column("POWER", cell=lambda row: format_reading(row.gpu.get("power_watts"), "W"), spare=3),
    Column("JOB", cell=lambda row: row.job.get("id", "-"), colour="magenta"),
    Column("RUNTIME", cell=format_runtime, colour="cyan"),
    Column("PROGRESS", cell=format_row_progress, colour="cyan",
           shown_if=lambda rows: any(format_row_progress(row) != "-" for row in rows), spare=1),
    Column("COMMAND", cell=lambda row: describe_run(row.gpu, row.job), colour="bright"))
WAITING_COLUMNS = (
    replace(ID_COLUMN, heading="WAITING"),
    Column("GPUS", cell=format_gpu_count, spare=1),
    Column("STARTS", cell=lambda job: local_time(job["estimated_start"]), colour="cyan", spare=2),
    Column("COMMAND", cell=name_or_command, colour="bright"),
    Column("WHY", cell=lambda job: job["waiting_for"] or ""))
FINISHED_COLUMNS = (
    replace(ID_COLUMN, heading="FINISHED"),
    RESULT_COLUMN,
    RUNTIME_COLUMN,
    Column("COMMAND", cell=name_or_command, colour="bright"))


def list_top(status: Json, waiting: Sequence[Json], more: int, groups: Sequence[Json], finished: Sequence[Json],
             paint: Paint) -> list[tuple[str, str]]:
    """[(line, the id of its job, or empty)].

    `waiting`: the first pending jobs that are in none of `groups`, the reply of GET /groups; `more`: how many follow.
    """
    def add_table(columns: Iterable[Column], rows: Sequence[Any], ids: Iterable[str]) -> None:
        shown.extend(zip(format_table(columns, rows, paint).split("\n"), ["", *ids]))

    machine = status["host"]
    lines = [paint("white", f"{machine['name']}  {describe_machine(machine)}"),
             paint("blue", f"Queue: {format_count(status['queued_jobs'], 'job')} pending ")
             + paint("yellow", "[PAUSED]" if status["is_paused"] else "[RUNNING]")
             + f"  {format_history(status)}",
             *(paint("red", f"{name}: see nexus health") for name in status["bad_checks"][:1]), ""]
    jobs = {job["id"]: job for job in status["running_jobs"]}
    rows = list[TopRow]()
    for gpu in status["gpu_status"]:
        there = [jobs[job_id] for job_id in gpu["job_ids"] if job_id in jobs]
        rows += [TopRow(gpu, job) for job in there or [{}]]
    on_gpus = {row.job["id"] for row in rows if row.job}
    rows += [TopRow({}, job) for job in status["running_jobs"] if job["id"] not in on_gpus]
    shown = [(line, "") for line in paint.join(lines).split("\n")[:-1]]
    if rows:
        add_table(TOP_COLUMNS, rows, [row.job.get("id", "") for row in rows])
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

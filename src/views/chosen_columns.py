"""Tables of which somebody chose the columns, or that a spreadsheet reads: `--columns` and `--csv`.

A column is a key of the JSON of a row, or the heading by which the usual table has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.schema import TIME
from ..values.text import format_duration, format_memory, refuse, suggest
from ..values.value import Field
from .job_tables import Column, format_table
from .results import format_csv_cell
from .status_text import Paint, format_priority, local_time

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json

HEADINGS = {                                    # of the usual tables: the key
    "gpu": "gpu_places", "result": "outcome", "runtime": "runtime_seconds", "added": "created_at",
    "started": "started_at", "finished": "finished_at", "starts": "estimated_start", "progress": "fraction",
    "why": "waiting_for", "message": "cause_line"}
TITLES = {name: heading.upper() for heading, name in HEADINGS.items() if heading != "why"}
# What --csv has where nobody says which columns
JOB_CSV = ("id", "name", "group", "user", "status", "outcome", "exit_code", "cause", "cause_line", "node", "gpus",
           "gpu_places", "created_at", "started_at", "finished_at", "runtime_seconds", "peak_gpu_mem_mib", "cwd",
           "command")
QUEUE_CSV = ("id", "name", "group", "user", "priority", "gpus", "only_node", "created_at", "estimated_start",
             "waiting_for", "cwd", "command")


def parse_columns(fields: Mapping[str, Field], text: str) -> list[str]:
    """The keys of `id,runtime,command`.  Raises: usage."""
    names = list[str]()
    for part in text.split(","):
        word = part.strip().lower().replace("-", "_").replace(" ", "_")
        name = HEADINGS.get(word, word)
        if name not in fields:
            refuse(f"--columns: there is no column '{part.strip()}'", suggest(word, [*fields, *HEADINGS]) or (
                f"they are {', '.join(fields)}" if len(fields) < 20 else
                "like --columns id,status,runtime,command; others are the keys that nexus jobs --json shows"))
        names.append(name)
    return list(dict.fromkeys(names))


def format_columns(fields: Mapping[str, Field], names: Sequence[str], rows: Sequence[Json], paint: Paint) -> str:
    def make_column(name: str) -> Column:
        title = TITLES.get(name) or name.removesuffix("_seconds").removesuffix("_mib").replace("_", " ").upper()
        return Column(title, cell=lambda row: format_fact(name, fields[name], row[name]),
                      colour="magenta" if name == "id" else "")

    return format_table(map(make_column, names), rows, paint)


def format_fact(name: str, row: Field, fact: Any) -> str:
    """A fact as people read it: the end of its name tells the unit."""
    if fact is None or fact == []:
        return "-"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, str):
        is_time = TIME in (row.schema, *row.schema.get("anyOf", ()))
        return local_time(fact, "%m-%d %H:%M") if is_time else fact
    if name == "priority":
        return format_priority(fact)
    if isinstance(fact, (int, float)):
        unit = name.rpartition("_")[2]
        forms: Mapping[str, Callable[[float], str]] = {
            "seconds": format_duration, "mib": format_memory, "fraction": lambda share: f"{100 * share:.0f}%"}
        return forms[unit](fact) if unit in forms else f"{fact:.12g}"
    return fact["detail"] if name == "reason" else format_plain(fact)


def format_plain(fact: Any) -> str:
    """A fact for a program: lists of words with commas, and all else as in JSON."""
    if isinstance(fact, (list, tuple)) and all(isinstance(each, (str, int)) for each in fact):
        return ",".join(map(str, fact))
    return fact if isinstance(fact, str) else json.dumps(fact)


def format_csv(names: Sequence[str], rows: Sequence[Json]) -> str:
    """A line of these columns for each row, below one with their names; times are UTC's.  Source: RFC 4180."""
    lines = [names, *([None if row[name] is None else format_plain(row[name]) for name in names] for row in rows)]
    return "".join(",".join(map(format_csv_cell, cells)) + "\n" for cells in lines)

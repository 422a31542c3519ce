"""The options of the commands, made from the tables of fields.

An option of a job is a row of Job or Asked, and one that chooses jobs a row of Choice: nothing is to do here.  What one
command alone takes stands in its row of COMMANDS.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping

from ..opening import TYPE_CHECKING
from ..values.choice import CHANGES, CLEARED, FILTERS
from ..values.job import AGE_TEXT, DURATION_TEXT
from ..values.schema import FLAG, integer_in
from ..values.submission import ASKED
from ..values.text import parse_age
from ..values.value import Field
from ..views.chosen_columns import parse_columns
from .chosen import TWOFOLD, set_flag
from .context import argument
from .submit import read_sweep

if TYPE_CHECKING:
    from typing import Any

JSON_OPTION = argument("--json", action="store_true", help="print JSON")
COLUMN_HELP = "these columns, in this order: id,status,runtime,command, or any keys of --json"


def table_options(fields: Mapping[str, Field], help: str = COLUMN_HELP) -> tuple[Any, ...]:
    """How a list is printed; `fields` are its columns."""
    return (argument("--columns", metavar="A,B", type=functools.partial(parse_columns, fields), help=help),
            argument("--csv", action="store_true", help="for a spreadsheet: all rows, seconds, MiB, UTC"), JSON_OPTION)


SERVICE_OPTIONS = (
    argument("--config", metavar="FILE", help="another config.toml"),
    argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="lowest level kept in service.log"),
)


def job_option(name: str, row: Field) -> Any:
    """The option of `add` and `run` for a field of a job."""
    if row.schema is FLAG:
        return argument(row.flag, dest=name, action="store_const", const=True, help=row.help)
    # --cwd may be relative here; its row in the API takes absolute paths alone
    return argument(row.flag, *row.also, dest=name, metavar=row.metavar or None,
                    row=row if name != "cwd" else None,
                    help=row.option or row.help + (f" (like {row.like})" if row.like else ""))


def job_options(takes_pairs: bool) -> list[Any]:
    """The options of all fields that have a flag: those that are given as NAME=VALUE, or the others."""
    return [job_option(name, row) for name, row in ASKED.items() if row.flag and row.takes_pairs == takes_pairs]


JOB_OPTIONS = (
    argument("command", nargs="*", metavar="COMMAND",
             help="a shell command, in quotes; several words are taken as they are"),
    *job_options(False),
    argument("--snapshot", action="store_true", help="run the git work tree as it is now, whatever is edited later"),
    argument("--sweep", metavar="NAME=A,B", action="append", default=[], type=read_sweep,
             help="one job for each value, which replaces {NAME} in the command, name, group, env and cwd; seed=0..4 "
             "and lr=0.1..0.5..0.2 count, @FILE has a value a line; a script gets NEXUS_SWEEP_NAME; repeatable: all "
             "combinations"),
    *job_options(True),
    argument("--file", metavar="FILE", help="one command a line (\\ joins the next), # comments; - is standard input"),
    argument("--dry-run", action="store_true", help="check it, show the commands, add nothing"),
)


# A day is one of the reader's time zone: the service gets a duration
AGE = Field(DURATION_TEXT, like="24h", text=AGE_TEXT, parse=lambda text: parse_age(text, time.time()))


def filter_option(name: str, help: str = "") -> Any:
    """The option of a filter.  `edit` and `retry` have options of the same names, for what jobs are to be."""
    row = FILTERS[name]
    return argument(row.flag, dest=f"by_{name}", metavar=row.metavar or name.upper(),
                    row=AGE if row.schema is DURATION_TEXT else row, help=help or row.option)


def filter_options(*without: str) -> list[Any]:
    """The options of all filters but these."""
    return [filter_option(name) for name, row in FILTERS.items() if row.flag and name not in without]


def change_option(name: str, row: Field) -> Any:
    """The option of `edit` and `retry` for a field of a job."""
    flag, help = row.flag or "--command", row.option or row.help.partition(" (default")[0]
    if name in TWOFOLD.values():
        return argument(set_flag(flag), dest=name, metavar=row.metavar or None, row=row, takes_none=name in CLEARED,
                        help=f"{help}; beside ids, {flag} says it, too")
    # --cwd may be relative here; its row in the API takes absolute paths alone
    return argument(flag, *row.also, dest=name, metavar=row.metavar or "CMD",
                    row=row if name != "cwd" else None, takes_none=name in CLEARED,
                    help=help + (f" (like {row.like})" if row.like else ""))


def twofold_option(name: str) -> Any:
    """The option that chooses jobs, or is a new value of those that ids name; settle_twofold() reads its texts."""
    row = FILTERS[name]
    return argument(row.flag, *CHANGES[TWOFOLD[name]].also, dest=f"by_{name}",
                    metavar=row.metavar or name.upper(), action="append",
                    help=f"{row.option}; beside ids, {set_flag(row.flag)}")


def switch_options(name: str, flag: str, help: str) -> list[Any]:
    """The options of `edit` and `retry` for a field that is set or not."""
    return [argument(word, dest=name, action="store_const", const=fact, help=words)
            for word, fact, words in ((flag, True, help), (flag.replace("--", "--no-", 1), False, f"take {flag} away"))]


CHANGE_OPTIONS = (
    argument("--this-env", action="store_true", help="this shell's variables, directory and umask, with the venv or "
             "conda environment that is active now; what --env has set stays"),
    *(change_option(name, row) for name, row in CHANGES.items()
      if row.schema is not FLAG and (row.flag or name == "command")),
    *(each for name, row in CHANGES.items() if row.schema is FLAG for each in switch_options(name, row.flag, row.help)),
    *switch_options("snapshot", "--snapshot", "run the git work tree as it is now, whatever is edited later"))
LINES = Field(integer_in(0, 10**9), like="20")
NUMBER_OPTION = argument("-n", "--number", row=LINES, metavar="N",
                         help="show N rows; 0: all (default: what fits on the terminal; all if it is none)")
SINCE = argument("--since", metavar="TIME", row=AGE, help="at most so old, like 24h, 7d, yesterday or 2024-10-24")
IDS = argument("ids", nargs="*", metavar="ID", help="ids or names")
DRY_RUN = argument("--dry-run", action="store_true", help="show the jobs, do nothing")
# What a command that is for jobs takes, to be read or to be changed; and one whose --name is also a new value
READ = (IDS, *filter_options())
CHOSEN = (*READ, DRY_RUN)
CHANGED = (IDS, *(twofold_option(name) if name in TWOFOLD else filter_option(name)
                  for name, row in FILTERS.items() if row.flag), DRY_RUN)
HELD = (argument("targets", nargs="*", metavar="GPU|ID", help="GPUs by index, pending jobs; none: the queue"),
        filter_option("group", "the group, with what joins it later; beside other filters, its pending jobs"),
        *filter_options("group"), DRY_RUN)

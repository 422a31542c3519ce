"""Which jobs a command is for: ids, names, filters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..opening import TYPE_CHECKING
from ..values.choice import CHANGES, FILTERS, describe_filters
from ..values.errors import NexusError
from ..values.gpu import find_places
from ..values.job import FINAL, PENDING, STATUSES
from ..values.schema import GPU_PLACE
from ..values.text import format_count, format_line, join_some, refuse, suggest
from ..views.api_json import drop_nulls
from ..views.status_text import name_or_command
from .context import Context, parse_change, parse_option
from .top import find_kept
from .transport import encode_query

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


def choose_ids(context: Context, named: Sequence[str], statuses: Sequence[str],
               is_meant: Callable[[Json], bool] = lambda job: True, when_empty: str = "",
               takes_both: bool = False, takes_all: bool = False,
               tell_more: Callable[[Sequence[str]], str] = lambda ids: "", tries: bool = False) -> list[str]:
    """The jobs that a command is for: the `named` ones, as they are named, or the ids of those that filters choose.

    The latter are in `statuses`, and `is_meant` is true of them.  They are said: what joins them later is left alone.
    []: no job is so, or --dry-run ends the command here, unless it `tries` what it would do; `tell_more` makes of the
    ids what is said besides.
    Raises: usage, when nothing chooses and not `takes_all`, or both do and not `takes_both`; not_found.
    """
    check_choice(context, named, takes_both, takes_all)
    is_dry = context.options.dry_run and not tries
    jobs: Sequence[Json] = ()
    if takes_all or read_choice(context):
        more = ("python", "python_env", "finished_at") if context.options.subcommand == "retry" else ()
        jobs = [job for job in find_chosen(context, statuses, (*CHOSEN_FIELDS, *more)) if is_meant(job)]
        if not jobs:
            context.say(when_empty or f"no such job is {name_statuses(statuses)}")
        else:
            context.say(f"{format_count(len(jobs), 'job')}: {join_some([*map(describe_chosen, jobs)], SAID_JOBS)}")
    ids = [*named, *(job["id"] for job in jobs)]
    if is_dry and ids:
        named_jobs = [context.client.job(job_id) for job_id in named]
        for job in named_jobs:
            check_named(context, job, statuses)
        context.print(*(f"{job['id']}: {name_or_command(job)}" for job in (*named_jobs, *jobs)))
        told = "; ".join(filter(None, (format_count(len(ids), "job"), tell_more(ids))))
        context.say(f"{told}; this was a dry run: nothing was done")
    return [] if is_dry else ids


SAID_JOBS = 5                   # of those chosen, by their ids and names
CHOOSING_FLAGS = {"retry": "--failed", "clear": "--all", "dismiss": "--all"}    # {command: its own option that chooses}
USUAL_FLAGS = {                                 # {command: what often chooses its jobs}; others: those that wait
    **CHOOSING_FLAGS, **dict.fromkeys(("kill", "wait", "show", "attach"), "--status running"), "clear": "--older 30d"}


def check_choice(context: Context, named: Sequence[str], takes_both: bool = False, takes_all: bool = False) -> None:
    """Raises: usage, when nothing chooses, or both ids and filters do, or a filter is empty."""
    command, choice = context.options.subcommand, read_choice(context)
    for name, fact in choice.items():
        if not fact:                            # perhaps a variable that is not set
            refuse(f"{FILTERS[name].flag} needs a value", hint="nexus jobs lists all")
    own = CHOOSING_FLAGS.get(command, "")
    if not (named or choice or takes_all):
        refuse(f"{command} takes jobs: their ids or names, or what chooses them", hint=(
            f"nexus {command} ID, or nexus {command} {USUAL_FLAGS.get(command, '--status pending')}, --group NAME or "
            f"--name PATTERN{' (these two take pending jobs too)' * (command == 'kill')}; "
            f"nexus help {command} lists all"))
    if named and (choice or takes_all) and not takes_both:
        flags = ", ".join([FILTERS[name].flag for name in choice] or [own])
        refuse(f"{command} takes ids, or what chooses jobs ({flags}), not both", hint=f"nexus help {command}")


def find_chosen(context: Context, statuses: Sequence[str], fields: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The jobs in these statuses that the options choose, of those that the caller may change.

    Raises: usage, for --status with none of `statuses`; not_found, when there is no such job in any status.
    """
    choice = read_choice(context)
    wanted = [status for status in choice.pop("status", statuses) if status in statuses]
    if not wanted:
        refuse(f"{context.options.subcommand} is for jobs that are {name_statuses(statuses)}",
               hint="nexus jobs lists all")
    order = None if wanted == [PENDING] else "created_at"       # what waits comes in the queue's order
    jobs = context.client.jobs(**choice, status=wanted, fields=",".join(fields) or None, sort=order)
    # That nothing is so old, or so young, is no mistake: a script may ask each night
    if not jobs and choice.keys() - {"since", "older"} and not context.client.jobs(**choice, fields="id", limit=1):
        groups = {job["group"] for job in context.client.jobs() if job["group"]} if "group" in choice else ()
        raise NexusError("not_found", f"there is no job{describe_filters(choice, repr)}",
                         hint=suggest(choice.get("group", ""), groups) or "nexus jobs lists all")
    return [job for job in jobs if job["command"] is not None]          # None: another user's, seen with a token


def name_statuses(statuses: Sequence[str]) -> str:
    return "finished" if {*statuses} == {*FINAL} else " or ".join(statuses)


CHOSEN_FIELDS = ("id", "name", "command", "user", "status", "cause", "retried_as", "is_held")


def describe_chosen(job: Json) -> str:
    return f"{job['id']} {format_line(job['name'] or job['command'], 40)}"


def check_named(context: Context, job: Json, statuses: Sequence[str]) -> None:
    """For a dry run.  Raises: conflict, when the command is not for a job in this status."""
    if job["status"] not in statuses:
        raise NexusError("conflict", f"job {job['id']} is {job['status']}; {context.options.subcommand} is for jobs "
                         f"that are {name_statuses(statuses)}", hint=f"nexus show {job['id']}")


def find_one(context: Context, statuses: Sequence[str]) -> dict[str, Any]:
    """The only job that the options name or choose.  Raises: usage, not_found; conflict, when there are several."""
    jobs = find_all(context, statuses)
    if len(jobs) > 1:
        raise NexusError("conflict", f"{context.options.subcommand} takes one job, and these are {len(jobs)}: "
                         f"{join_some([*map(describe_chosen, jobs)])}", hint="name one by its id")
    if not jobs:
        raise NexusError("not_found", f"no such job is {name_statuses(statuses)}", hint="nexus jobs lists all")
    return jobs[0]


def find_all(context: Context, statuses: Sequence[str] = STATUSES) -> list[dict[str, Any]]:
    """The jobs that the options name by ids or GPUs, or choose.  Raises: usage, not_found."""
    check_choice(context, context.options.ids)
    if not context.options.ids:
        return find_chosen(context, statuses)
    return [context.client.job(job_id) for target in context.options.ids for job_id in find_targets(context, target)]


# Of `edit` and `retry`: {filter: the field of a job that has the same option}
TWOFOLD = {name: field for name, row in FILTERS.items() for field, changed in CHANGES.items()
           if row.flag and row.flag == changed.flag}


def settle_twofold(context: Context) -> None:
    """Decide what --name and --group of `edit` and `retry` mean: with ids a new value, or else which jobs.

    Raises: usage.
    """
    options = vars(context.options)
    for name, changed in TWOFOLD.items():
        flag, texts = FILTERS[name].flag, options[f"by_{name}"] or ()
        row, parse = (CHANGES[changed], parse_change) if options["ids"] else (FILTERS[name], parse_option)
        if not texts:
            continue
        if options["ids"] and options[changed]:
            refuse(f"{flag} and {set_flag(flag)} mean the same beside ids", hint="leave one of the two out")
        values = [parse(row, [flag], text) for text in texts]
        options[f"by_{name}"] = None
        options[changed if options["ids"] else f"by_{name}"] = [
            each for value in values for each in value] if row.repeats else values[-1]


def set_flag(flag: str) -> str:
    """`--set-name` for `--name`."""
    return flag.replace("--", "--set-")


def list_part(context: Context, path: str, **query: Any) -> tuple[list[dict[str, Any]], int]:
    """(the jobs that the options choose, how many there are).  -n is the limit; default: the terminal's height."""
    options = context.options
    most = options.number
    if most is None and context.paint.height and not (options.json or options.csv or options.by_since):
        most = max(10, context.paint.height - 6)
    return context.client.ask_list(path + encode_query({**query, "limit": most or None, **read_choice(context)}))


def read_choice(context: Context) -> dict[str, Any]:
    """{filter: what an option chooses by}"""
    return drop_nulls({name: getattr(context.options, f"by_{name}", None) for name in FILTERS})


def describe_choice(context: Context) -> str:
    """Which jobs the options choose, beside their status, for a message: ` of group g`, or "" for all."""
    return describe_filters(read_choice(context))


def split_ids(context: Context, word: str) -> list[str]:
    """The ids, names and GPUs of `a,b`; [word] when that is a name itself, or none of its parts is there."""
    parts = [part for part in word.split(",") if part]
    if "," not in word or find_kept(context.client, word, ""):
        return [word]
    are_there = any(re.fullmatch(GPU_PLACE, part) or find_kept(context.client, part, "") for part in parts)
    return parts if are_there else [word]


def find_targets(context: Context, target: str, takes_all: bool = False) -> list[str]:
    """[job id] for an id, or for a GPU like `0` or `n1:0.1`.  Raises: not_found; conflict, when jobs share the GPU."""
    if not re.fullmatch(GPU_PLACE, target):
        return [target]
    status = context.client.status()
    jobs_at = {gpu["place"]: gpu["job_ids"] for gpu in status["gpu_status"]}
    places = find_places(target, jobs_at, status["host"]["name"])
    job_ids = list(dict.fromkeys(job_id for place in places for job_id in jobs_at[place]))
    if not job_ids:
        raise NexusError("not_found", f"no job of nexus runs on GPU {target}", hint="nexus shows what runs where")
    if len(job_ids) > 1 and not takes_all:
        raise NexusError("conflict", f"jobs {', '.join(job_ids)} share GPU {target}",
                         hint=f"name one, or nexus kill {target} --all")
    return job_ids

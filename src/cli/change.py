"""The commands that change jobs: kill, cancel, move, edit, retry, clear, pause and resume."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from ..machine.search_path import find_job_python
from ..opening import TYPE_CHECKING
from ..runner.environment import find_python_env
from ..values.causes import DEPENDENCY
from ..values.changes import is_left_to_retry
from ..values.choice import CHANGES, describe_filters
from ..values.job import CANCELLED, FAILED, FINAL, PENDING, RUNNING
from ..values.schema import GPU_PLACE
from ..values.text import format_bytes, format_count, format_indices, join_some, refuse
from ..views.show import describe_end, format_python
from ..views.status_text import local_time
from .chosen import check_choice, choose_ids, find_targets, read_choice, settle_twofold
from .context import Context
from .submit import (
    describe_changes,
    find_cwd,
    keep_work_tree,
    list_variables,
    read_fields,
    read_umask,
    show_added,
    show_tried,
)

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json

ENDED_STATUSES = {"kill": [RUNNING], "remove": [PENDING], "cancel": [PENDING, RUNNING]}     # of jobs given by their ids


def cmd_end(context: Context) -> None:
    """kill, cancel and remove: end jobs, all or none; return when they have ended."""
    options, command = vars(context.options), context.options.subcommand
    named, takes_all = options["ids"], options.get("all", False)
    check_choice(context, named)
    if command == "kill":
        named = [job_id for target in named for job_id in find_targets(context, target, takes_all)]
    # What is chosen for `kill` may wait: a group is ended as a whole
    statuses = ENDED_STATUSES["cancel" if command == "kill" and not named else command]
    ids = choose_ids(context, named, statuses)
    if not ids:
        return
    signal = options.get("signal")
    answer = context.client.ask("POST", "/jobs/cancel", {
        "ids": ids, "status": statuses, **({"signal": signal} if signal else {})})
    jobs = answer["jobs"]
    if not jobs:
        return context.say("no such job is pending or running")
    if len(jobs) < len(set(ids)):
        context.say(f"{len(set(ids)) - len(jobs)} of these jobs had ended before")
    unheard = set[str]()

    def say_late(job: Json) -> None:
        if job["unknown_since"] and job["id"] not in unheard:
            unheard.add(job["id"])
            say_unheard(context, job, f"job {job['id']} is ended when it is back (Ctrl-C leaves it so; nexus node "
                        f"remove {job['node']} --force gives it up)")

    for job in jobs:
        say_late(job)
    ended = [job for job in jobs if job["status"] in FINAL]
    if len(ended) > 1 and not named:
        context.say(f"{len(ended)} pending jobs{describe_filters(read_choice(context), str)} cancelled")
    else:
        for job in ended:
            context.say(describe_end(job))
    context.client.wait([job["id"] for job in jobs if job["status"] not in FINAL],
                        lambda job: context.say(describe_end(job)), on_look=say_late)
    say_dragged(context, answer["ids"], answer["dependents"])


def say_unheard(context: Context, job: Json, what: str) -> None:
    context.say(f"{job['node']} has not been heard since {local_time(job['unknown_since'], '%m-%d %H:%M')}: {what}")


def say_dragged(context: Context, ended: Sequence[str], dependents: Sequence[str]) -> None:
    """Name the dependents that were cancelled: a job that was to be stopped may have completed before."""
    if not dependents:
        return
    cancelled = context.client.jobs(status=CANCELLED, fields="id,cause")
    lost = {job["id"] for job in cancelled if job["cause"] == DEPENDENCY}
    dragged = [job_id for job_id in dependents if job_id in lost]
    if dragged:
        gone = [*ended, *dragged]
        context.say(f"with it {format_count(len(dragged), 'job')} that came after: {join_some(dragged, 10)}; to run "
                    f"all again: nexus retry {' '.join(gone) if len(gone) <= 10 else 'ID...'}")


def cmd_move(context: Context) -> None:
    """Change the places of pending jobs, all or none; those that move together keep their order."""
    options = context.options
    change: dict[str, Any] = {"position": 0 if options.first else -1}
    if options.priority is not None:
        change = {"priority": options.priority}
    elif options.before is not None:
        change = {"before": options.before}
    ids = choose_ids(context, options.ids, [PENDING])
    if ids:
        ids = context.client.edit_all(ids, **change)
        before = context.client.job(ids[0])["position"]
        what = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} jobs are moved; the first of them, {ids[0]},"
        context.say(f"{what} " + (f"now has {format_count(before, 'job')} before it" if before else "is now first"))


def cmd_edit(context: Context) -> None:
    settle_twofold(context)
    change = read_change(context)
    if not change and not context.options.snapshot:
        refuse("there is nothing to change", hint="name what, like --gpus 2; nexus help edit lists the options")
    ids = choose_ids(context, context.options.ids, [PENDING, RUNNING])
    if ids:
        change.update(take_work_tree(context, ids, change))
        ids = context.client.edit_all(ids, **change)
        what = f"job {ids[0]} is" if len(ids) == 1 else f"{len(ids)} jobs are"
        context.say(f"{what} changed: {describe_changes(change)}")


def read_change(context: Context) -> dict[str, Any]:
    """The JSON of what the options of `edit` and `retry` change, but for --snapshot.  Raises: usage."""
    change = read_fields(context, [name for name, row in CHANGES.items() if row.flag or name == "command"])
    if "cwd" in change and not context.is_remote:
        change["cwd"] = os.path.abspath(change["cwd"])
    if context.options.this_env:
        context.need_local("--this-env takes a shell's variables")
        change = {"environment": list_variables(context), "umask": read_umask(), "cwd": find_cwd(None), **change}
    return {**change, **({"snapshot": None} if context.options.snapshot is False else {})}


def take_work_tree(context: Context, ids: Sequence[str], change: Json) -> dict[str, str]:
    """What --snapshot changes of these jobs; {} without it.  Raises: usage."""
    if not context.options.snapshot:
        return {}
    context.need_local("--snapshot keeps a work tree")
    jobs = list(map(context.client.job, ids))
    folders = {change["cwd"]} if "cwd" in change else {job["cwd"] for job in jobs}
    commands = [change["command"]] if "command" in change else [job["command"] for job in jobs]
    if len(folders) > 1:
        refuse(f"--snapshot keeps one work tree, and these jobs run in {len(folders)} directories", "add --cwd DIR")
    return keep_work_tree(context, next(iter(folders)), commands)


def cmd_retry(context: Context) -> None:
    settle_twofold(context)
    options, ids = context.options, context.options.ids

    chosen: list[Json] = []

    def is_meant(job: Json) -> bool:
        chosen.append(job)
        if options.by_status and not options.failed:
            return not job["retried_as"]
        return is_left_to_retry(job["status"], job["cause"], job["retried_as"])

    what = "such" if options.by_status else "failed"
    ids = choose_ids(context, ids, FINAL, is_meant, f"no {what} job is left to run again", takes_all=options.failed,
                     tries=True)
    wanted = set(ids)
    chosen = [job for job in chosen if job["id"] in wanted]
    if ids and confirm_retry(context, chosen):
        change = read_change(context)
        change.update(take_work_tree(context, ids, change))
        values = read_values(options.set)
        body = {"ids": ids, **({"change": change} if change else {}), **({"set": values} if values else {}),
                **({"downstream": True} if options.downstream else {}),
                **({"dry_run": True} if options.dry_run else {})}
        others = list_other_pythons(context, chosen, change)
        answer = context.client.ask("POST", "/jobs/retry", body)
        if options.dry_run:
            return show_tried(context, answer["jobs"], describe_changes(change))
        show_added(context, answer)
        if left := answer.get("downstream"):
            typed = " ".join(left) if len(left) <= MAX_TYPED else "ID..."
            context.say(f"{format_count(len(left), 'job')} that came after stay cancelled: {join_some(left, 10)}; "
                        f"--downstream runs these again, too; now: nexus retry {typed}")
        if others:
            new = " ".join(answer["ids"]) if len(answer["ids"]) <= MAX_TYPED else "ID..."
            context.say(f"{'; '.join(others)}; if it is to be this shell's: nexus cancel {new}; "
                        f"nexus retry {new} --this-env")


MAX_UNASKED = 10                # failed jobs that are run again without a question


def confirm_retry(context: Context, chosen: Sequence[Json]) -> bool:
    """Whether `retry --failed` is meant, which takes all of the history: at a terminal that is asked of many jobs."""
    if not context.options.failed or context.options.dry_run or read_choice(context) or len(chosen) <= MAX_UNASKED:
        return True
    oldest = local_time(min(job["finished_at"] for job in chosen), "%a %Y-%m-%d")
    return confirm(context, f"run all {len(chosen)} jobs again, the oldest of {oldest}?",
                   "nothing was run again; --since 1d takes those of the last day")


def confirm(context: Context, question: str, when_not: str) -> bool:
    """Ask at a terminal; elsewhere it is so."""
    if not (sys.stdin.isatty() and context.err.isatty()):
        return True
    context.say(f"{question} (y: yes)")
    is_meant = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not is_meant:
        context.say(when_not)
    return is_meant


def read_values(given: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Sequence[str]]:
    """{name: values} of --set.  Raises: usage."""
    names = [name for name, _ in given]
    for name in names:
        if names.count(name) > 1:
            refuse(f"--set {name} is given twice", hint=f"put all values of {name} into one: --set {name}=A,B")
    return dict(given)


MAX_TYPED = 40                  # ids in a line that is to be typed


def list_other_pythons(context: Context, chosen: Sequence[Json], change: Json) -> list[str]:
    """What to say of a retry whose jobs have another Python than this shell, or another environment.

    `chosen`: by filters; of jobs that were named the first ones are looked at.
    """
    if context.is_remote or not change.keys().isdisjoint(("environment", "conda", "env", "node")):
        return []
    jobs = [*chosen, *map(context.client.job, context.options.ids[:MAX_TYPED])]
    variables = list_variables(context)
    here = find_job_python(variables.get("PATH") or os.defpath, 0), find_python_env(variables)
    others: dict[tuple[str, str | None], list[str]] = {}
    for job in jobs:
        if job["python"] and (there := (job["python"], job["python_env"])) != here:
            others.setdefault(there, []).append(job["id"])
    return [f"{join_some(ids, 5)} {'has' if len(ids) == 1 else 'have'} {format_python(*there)}, and this shell has "
            f"{format_python(*here)}" for there, ids in others.items()]


def cmd_clear(context: Context) -> None:
    options, choice = context.options, read_choice(context)
    if options.all and not (options.dry_run or options.ids or choice):
        jobs = context.client.jobs(status=list(FINAL), fields="id")
        if not confirm(context, f"forget {format_count(len(jobs), 'finished job')}, with all logs?",
                       "nothing was forgotten"):
            return

    def tell_freed(ids: Sequence[str]) -> str:
        return f"{format_bytes(ask_clear(context, ids, dry_run=True)['freed_bytes'])} of logs would be freed"

    ids = choose_ids(context, options.ids, FINAL, takes_all=options.all, tell_more=tell_freed)
    if ids:
        answer = ask_clear(context, ids)
        whose = "its" if len(answer["ids"]) == 1 else "their"
        size = answer["freed_bytes"] and f" ({format_bytes(answer['freed_bytes'])})"
        context.say(f"{format_count(len(answer['ids']), 'finished job')} forgotten, with {whose} logs{size or ''}")


def cmd_dismiss(context: Context) -> None:
    """Take failures off one's list, as the page's button does, or put them back."""
    is_undone = context.options.undo
    ids = choose_ids(context, context.options.ids, [FAILED], lambda job: not job["retried_as"],
                     "no failure is left to be dismissed", takes_all=context.options.all)
    if ids:
        changed = context.client.dismiss(ids=ids, undo=is_undone)
        context.say(f"{format_count(len(changed), 'failure')} {'shown again' if is_undone else 'dismissed'}")


def ask_clear(context: Context, ids: Sequence[str], dry_run: bool = False) -> Json:
    """The reply of the call that forgets jobs: their ids, and how large their logs were."""
    answer: Json = context.client.ask("POST", "/jobs/clear", {"ids": ids, "dry_run": dry_run})
    return answer


def cmd_pause(context: Context) -> None:
    """Pause or resume the queue, a group, GPUs, or pending jobs."""
    verb, targets, choice = context.options.subcommand, context.options.targets, read_choice(context)
    goes_on = "; running jobs go on" if verb == "pause" else ""
    if targets or choice:
        check_choice(context, targets)
    places = [target for target in targets if re.fullmatch(GPU_PLACE, target)]
    if choice.keys() <= {"group"} and len(places) == len(targets) and context.options.dry_run:
        refuse(f"--dry-run shows jobs, and this is for {'GPUs' if targets else 'a group' if choice else 'the queue'}",
               hint=f"nexus help {verb}")
    for place in places:
        context.client.pause(place, verb=verb)
        context.say(f"GPU {place} is {verb}d{goes_on}")
    if choice.keys() - {"group"} or len(places) < len(targets):
        hold_jobs(context, [target for target in targets if target not in places], verb == "pause")
    elif not targets:
        group = choice.get("group")
        context.client.pause(None, group, verb)
        what = f"group {group}" if group is not None else "the queue"
        context.say(f"{what} is {verb}d{goes_on}")
        paused = [gpu["place"] for gpu in context.client.status()["gpu_status"] if gpu["is_paused"]]
        if paused and verb == "resume":
            context.say(f"still paused: GPU {format_indices(paused)}; nexus resume {' '.join(paused)}")


def hold_jobs(context: Context, named: Sequence[str], is_held: bool) -> None:
    """Hold pending jobs, or release them, all or none."""
    ids = choose_ids(context, named, [PENDING], lambda job: job["is_held"] != is_held,
                     "" if is_held else "no such job is held")
    ids = context.client.edit_all(ids, is_held=is_held) if ids else []
    if len(ids) > 1 and not named:
        context.say(f"{len(ids)} jobs {'are held' if is_held else 'may start'}")
    else:
        for job_id in ids:
            context.say(f"job {job_id} {'is held: nexus resume ' + job_id if is_held else 'may start'}")

"""After which jobs and groups a job is to start: found by their names, and what follows for those who wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from ..opening import TYPE_CHECKING
from ..values.causes import DEPENDENCY
from ..values.changes import end_job, find_retried
from ..values.dependencies import check_rings, describe_loss, find_lost, update_followers
from ..values.errors import NexusError
from ..values.job import CANCELLED, COMPLETED, FINAL, PENDING, Job
from ..values.state import State, find_groups
from ..values.text import format_duration, format_line
from ..views.api_json import pick
from .access import Identity, check_group, find_own_job, may_see_group

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes


def find_links(state: State, job: Job, caller: Identity, now: float) -> dict[str, tuple[str, ...]]:
    """The fields of a job that is to start after others, by their ids or names, and after groups.

    Raises: not_found; forbidden; conflict.
    """
    parents, others = ([find_parent(state, told, caller, flag, now) for told in named]
                       for flag, named in (("--after", job.after), ("--after-any", job.after_any)))
    pending = [parent.id for parent in parents if parent.status != COMPLETED]
    pending += [parent.id for parent in others if parent.status not in FINAL]
    groups = dict.fromkeys((*job.after_group, *job.after_any_group))
    for group in groups:
        check_group(state, group, caller)
    return {"after": tuple(parent.id for parent in parents), "after_any": tuple(parent.id for parent in others),
            "after_group": job.after_group, "after_any_group": job.after_any_group,
            "pending_dependencies": tuple(dict.fromkeys(pending)),
            "pending_groups": tuple(group for group in groups if group in state.awaited)}


LINKS = {"after", "after_any", "after_group", "after_any_group"}


MAX_NAME_AGE_S = 3600           # the short job that a script has just added may have ended before its next line


def find_parent(state: State, told: str, caller: Identity, flag: str, now: float) -> Job:
    """The job of an id, or the latest of a name, after which another is to start: never those of a group.

    Of a name the latest counts that waits or runs, or else the latest, if it was just added: an older one is hardly
    meant.  A retried job is not meant by its name: its retry is.  Raises: not_found; forbidden; conflict.
    """
    if told in state.jobs:
        return find_own_job(state, told, caller)
    name = None if caller.is_owner else caller.user, told
    if name in state.awaited_names:
        return state.jobs[state.awaited_names[name][-1][1]]
    if name not in state.named:
        if may_see_group(state, told, caller):
            raise NexusError("not_found", f"no job '{format_line(told, 40)}'",
                             f"it is a group; after all of it: {flag}-group {quote(told)}")
        return find_own_job(state, told, caller)
    job = state.jobs[find_retried(state, state.named[name][-1][1], {})]
    if job.status in FINAL and now - job.created_at > MAX_NAME_AGE_S:
        raise NexusError("conflict", f"no job '{format_line(told, 40)}' waits or runs; the latest, {job.id}, was added "
                         f"{format_duration(now - job.created_at)} ago and {describe_loss(job)}",
                         f"if you mean that one: {flag} {job.id}")
    return job


def describe_old_groups(state: State, groups: Iterable[str], now: float) -> str:
    """A warning of a group whose last job ended long ago: the one that is meant may have failed to be added."""
    for group in groups:
        members = state.members.get(group, ())
        users = {user for user, _ in (*members[:1], *members[-1:])}         # ascending
        ends = [state.ended_in[user, group][-1][0] for user in users if (user, group) in state.ended_in]
        if group not in state.awaited and ends and now - max(ends) > MAX_NAME_AGE_S:
            return (f"nothing of group {group} waits or runs: its last job ended "
                    f"{format_duration(now - max(ends))} ago")
    return ""


def find_left_groups(state: State, job: Job) -> dict[str, tuple[str, ...]]:
    """The groups after which a job was to start, as far as there are jobs of them."""
    return {name: tuple(group for group in getattr(job, name) if group in state.members)
            for name in ("after_group", "after_any_group")}


def settle_groups(state: State, jobs: Sequence[Job], is_new: bool = False) -> Changes:
    """The changes that follow when groups have got or lost these jobs, as they are or were.  Raises: conflict."""
    yield from update_followers(state, dict.fromkeys(group for job in jobs for group in find_groups(job)))
    check_rings(state, list(dict.fromkeys(job.id for job in jobs)), is_new)


def settle_added(state: State, added: Sequence[Job], now: float, groups: Iterable[str] | None = None) -> Changes:
    """The changes that follow when these jobs are queued: who comes after their groups waits for them, and those that
    can never start end at once.

    `groups`: those whose jobs so far count for them; None: all after which they start.  Raises: conflict.
    """
    yield from settle_groups(state, [state.jobs[job.id] for job in added], is_new=True)
    for job_id in [job.id for job in added]:
        job = state.jobs[job_id]
        if job.status == PENDING and (lost := find_lost(state, job, job.after_group if groups is None else groups)):
            yield from end_job(state, job, CANCELLED, now, cause=DEPENDENCY, cause_line=lost)


def list_links(state: State, job: Job, change: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Those after which a job is to start with a change; a former one may be forgotten by now."""
    left = {name: [parent for parent in getattr(job, name) if parent in state.jobs] for name in ("after", "after_any")}
    return {**left, **find_left_groups(state, job), **pick(change, LINKS & change.keys())}

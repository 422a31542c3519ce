"""After which jobs and groups a job is to start: found by their names, and what follows for those who wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from ..opening import TYPE_CHECKING
from ..values.causes import DEPENDENCY
from ..values.changes import end_job
from ..values.dependencies import check_rings, find_lost, update_followers
from ..values.errors import NexusError
from ..values.job import CANCELLED, COMPLETED, FINAL, PENDING, Job
from ..values.state import State, find_groups
from ..values.text import format_line, join_some
from ..views.api_json import pick
from .access import Identity, check_group, find_own_job, may_see_group

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes


def find_links(state: State, job: Job, caller: Identity) -> dict[str, tuple[str, ...]]:
    """The fields of a job that is to start after others, by their ids or names, and after groups.

    Raises: not_found; forbidden; conflict.
    """
    parents, others = ([find_parent(state, told, caller, flag) for told in named]
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


def find_parent(state: State, told: str, caller: Identity, flag: str) -> Job:
    """The job of an id, or the only one of a name, after which another is to start: never those of a group.

    A retried job is not meant by its name: its retry is.  Raises: not_found; forbidden; conflict.
    """
    if told in state.jobs:
        return find_own_job(state, told, caller)
    name = None if caller.is_owner else caller.user, told
    left = [job_id for _, job_id in state.unretried.get(name, ())]
    if len(left) > 1:
        groups = {state.jobs[job_id].group for job_id in left}
        group = groups.pop() if len(groups) == 1 else None
        raise NexusError("conflict", f"{len(left)} jobs have the name '{told}': {join_some(left)}",
                         f"name the right ones: {flag} {','.join(left[:10])}; or all of "
                         f"{'their' if group else 'a'} group: {flag}-group {quote(group or 'G')}")
    if name not in state.named and may_see_group(state, told, caller):
        raise NexusError("not_found", f"no job '{format_line(told, 40)}'",
                         f"it is a group; after all of it: {flag}-group {quote(told)}")
    return find_own_job(state, left[0] if left else told, caller)


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

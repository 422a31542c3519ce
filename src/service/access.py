"""Who sent a request, and which jobs and groups they may see and change."""

from __future__ import annotations

import bisect
from collections.abc import Container
from shlex import quote

from ..opening import TYPE_CHECKING
from ..values.choice import is_pattern
from ..values.errors import NexusError
from ..values.job import PRIORITIES, Job
from ..values.state import State
from ..values.text import format_line, suggest
from ..values.value import Value
from ..views.api_json import PUBLIC_JOB_KEYS, hide_private

if TYPE_CHECKING:
    from typing import Any


class Identity(Value):
    """The user or program that sent a request."""
    user: str                   # may see and change this user's jobs
    name: str                   # for the log: also says how the caller was identified
    is_owner: bool = True       # owns the service: may do everything
    sha256: str | None = None   # of the user's token

    def may_see(self, user: str) -> bool:
        return self.is_owner or user == self.user

    def show(self, user: str, job: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a user's job, as the caller may see it."""
        return job if self.may_see(user) else hide_private(job, PUBLIC_JOB_KEYS)


def list_visible_groups(state: State, caller: Identity) -> dict[str, list[str]]:
    """{group: the users of its jobs that the caller may see}; the groups with ended jobs come first."""
    found: dict[str, list[str]] = {}
    ended = sorted(state.ended_in, key=lambda key: state.ended_in[key][0])
    running = [(job.user, job.group or "") for job in state.running.values()]
    for user, group in (*ended, *running, *state.queued_in):
        if group and caller.may_see(user) and user not in found.setdefault(group, []):
            found[group].append(user)
    return found


def may_see_group(state: State, group: str, caller: Identity | None) -> bool:
    """Whether there is a job of a group that the caller may see; None: any."""
    return group in state.members and (caller is None or caller.is_owner or has_member(state, group, caller.user))


def has_member(state: State, group: str, user: str) -> bool:
    """Whether a job of this user is in the group."""
    members = state.members.get(group, [])
    return user in [first for first, _ in members[bisect.bisect_left(members, (user, "")):][:1]]


def check_group(state: State, name: str, caller: Identity | None = None) -> None:
    """Raises: not_found, when the caller may see no job of the group."""
    if not may_see_group(state, name, caller):
        groups = [group for group in state.members if may_see_group(state, group, caller)]
        raise NexusError("not_found", f"there is no job of group '{format_line(name, 60)}'",
                         hint=suggest(name, groups) or "nexus jobs lists all")


def check_own_group(state: State, group: str | None, caller: Identity) -> None:
    """Its jobs share its limit and its hold.  Raises: forbidden, when another user has a job of it."""
    members = state.members.get(group or "", [])
    for user, _ in (*members[:1], *members[-1:]):           # ascending: if these are the caller's, all are
        if not caller.may_see(user):
            raise NexusError("forbidden", f"the group {group} is {user}'s", "take another name")


def find_own_job(state: State, told: str, caller: Identity, statuses: Container[str] = ()) -> Job:
    """The job of an id, or else the latest of a name; to change it, the only one of that name in these statuses.

    Of several that fit, one that was run again is not meant.
    Raises: not_found; forbidden, when it is another user's; conflict, when several have the name.
    """
    job = state.jobs.get(told)
    if job is None:
        named = state.named.get((None if caller.is_owner else caller.user, told))
        if not named:
            seen = [each for each in state.jobs.values() if caller.may_see(each.user)]
            if any(each.group == told for each in seen):
                hint = f"it is a group, see nexus jobs --group {quote(told)}"
            elif is_pattern(told):
                hint = f"a pattern of names is given with --name: nexus jobs --name {quote(told)}"
            else:
                names = [*state.jobs, *(each.name or "" for each in seen)]
                hint = suggest(told, names) or "nexus jobs lists them"
            raise NexusError("not_found", f"no job '{format_line(told, 40)}'", hint)
        fitting = [job_id for _, job_id in named if state.jobs[job_id].shown_status in statuses] if statuses else []
        fitting = [job_id for job_id in fitting if not state.jobs[job_id].retried_as] or fitting[-1:]
        if len(fitting) > 1:
            raise NexusError("conflict", f"{len(fitting)} jobs have the name '{told}': {', '.join(fitting[:10])}",
                             hint="name them by their ids")
        job = state.jobs[fitting[0] if fitting else named[-1][1]]
    if not caller.may_see(job.user):
        raise NexusError("forbidden", f"job {job.id} is {job.user}'s",
                         f"{caller.user}'s own: nexus jobs --user {caller.user}")
    return job


def check_environment(environment: object, caller: Identity, owner: str) -> None:
    """Raises: forbidden."""
    if environment is not None and not caller.is_owner:
        raise NexusError("forbidden", f"the whole environment is for {owner} to send",
                         hint='send what is to be set as "env"')


def check_priority(priority: int | None, caller: Identity) -> None:
    """Users of one priority share the GPUs; only the owner may give a higher priority.  Raises: forbidden."""
    if priority is not None and priority < PRIORITIES["normal"] and not caller.is_owner:
        raise NexusError("forbidden", "only the owner of the service may give a priority above normal",
                         hint="normal, low, or a number above 1")

"""How many jobs of a user may be in the queue, and after how many others; how many of a group run at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import Job
from ..values.state import Group, Put, State, list_parents
from ..values.submission import GROUP_LIMITS
from ..values.value import replace

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes

MAX_LINKS = 100000              # from a user's pending jobs to the jobs and groups after which they start
USERS_SHARE = 5                 # all users but the owner together may have so many times what one may have


def check_queue_limit(state: State, user: str, limit: int, owner: str) -> None:
    """Raises: queue_full, when a user's pending jobs would be too many with one more."""
    check_share(state, owner, {user: 1}, lambda each: len(state.queued.get(each, ())), limit,
                "the queue is full: {} jobs of {} would be pending; queue_limit allows {}",
                "wait for some to end, or raise [jobs] queue_limit")


def check_link_count(state: State, jobs: Sequence[Job], owner: str) -> None:
    """Raises: queue_full, when a user's pending jobs and these would come after too many."""
    asked, ids = dict[str, int](), {job.id for job in jobs}
    for job in jobs:
        asked[job.user] = asked.get(job.user, 0) + count_links(job)

    def count(user: str) -> int:
        return sum(count_links(state.jobs[place[4]]) for place in state.queued.get(user, ()) if place[4] not in ids)

    check_share(state, owner, {user: links for user, links in asked.items() if links}, count, MAX_LINKS,
                "the jobs that wait would come after {} others, those of {}; at most {} are taken",
                "let the next stage come after the group of one: --after-group G")


def count_links(job: Job) -> int:
    return sum(map(len, list_parents(job)))


def check_share(state: State, owner: str, asked: Mapping[str, int], count: Callable[[str], int], limit: int,
                words: str, hint: str) -> None:
    """Check what users ask for, and have, of what is limited.  The owner's place cannot be taken by others.

    Raises: queue_full.
    """
    for user, more in asked.items():
        total, whose, most = more + count(user), user, limit
        if total <= limit and user != owner and len(state.queued) >= USERS_SHARE:
            total, most = more + sum(count(other) for other in state.queued if other != owner), USERS_SHARE * limit
            whose = f"all users but {owner}"
        if total > most:
            raise NexusError("queue_full", words.format(total, whose, most), hint)


def find_group_limits(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job's Group that are asked for; 0: there is to be no such limit."""
    return {limit: asked[name] or 0 for name, limit in GROUP_LIMITS.items() if name in asked}


def limit_group(state: State, name: str | None, limits: Mapping[str, Any]) -> Changes:
    """The change of these fields of a group."""
    group = state.groups.get(name or "") or Group(name or "")
    limited = replace(group, **limits)
    if name and limited != group:
        yield Put("groups", name, limited)

"""Which jobs wait for which: parents, followers, groups, rings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..opening import TYPE_CHECKING
from .causes import EXIT
from .errors import NexusError
from .job import CANCELLED, FAILED, Job
from .queue_order import has_pending
from .state import Put, State, change_job, find_followed, find_groups
from .value import replace

if TYPE_CHECKING:
    from .state import Changes


def find_branch(state: State, job_ids: Sequence[str]) -> dict[str, str]:
    """{pending job that can never start unless these complete: the one that it comes after}, parents first.

    A job that comes after a group comes after each job of it.
    """
    found, parents, groups = dict.fromkeys(job_ids, ""), [*job_ids], set[str]()
    for parent_id in parents:                   # it grows: those that come after them, and so on
        children = [child.id for child in state.list_dependents(parent_id) if parent_id in child.after]
        for group in find_groups(state.jobs[parent_id]):
            if group not in groups:
                children += [child_id for child_id in state.followers.get(group, ())
                             if group in state.jobs[child_id].after_group]
                groups.add(group)
        children = [child_id for child_id in dict.fromkeys(children) if child_id not in found]
        found.update(dict.fromkeys(children, parent_id))
        parents += children
    return {child_id: parent_id for child_id, parent_id in found.items() if parent_id}


def release_dependents(state: State, ended: Sequence[str]) -> Changes:
    """The changes of what waited for jobs that have ended: of jobs that depend on them, and of groups held so long."""
    released: dict[str, set[str]] = {}
    for job_id in ended:
        for child in state.list_dependents(job_id):
            released.setdefault(child.id, set()).add(job_id)
    for child_id, gone in released.items():     # one change for all: a job may come after thousands
        child = state.jobs[child_id]
        others = tuple(other for other in child.pending_dependencies if other not in gone)
        yield change_job(child, pending_dependencies=others)
    groups = dict.fromkeys(group for job_id in ended for group in find_groups(state.jobs[job_id]))
    yield from update_followers(state, [group for group in groups if group not in state.awaited])
    for name in dict.fromkeys(state.jobs[job_id].group or "" for job_id in ended):
        group = state.groups.get(name)
        if group and group.hold and not group.is_paused and not has_pending(state, name):
            yield Put("groups", name, replace(group, hold=None))


def update_followers(state: State, groups: Iterable[str]) -> Changes:
    """The changes of the jobs that come after these groups, where jobs have joined, left, or ended."""
    for child_id in dict.fromkeys(child_id for group in groups for child_id in state.followers.get(group, ())):
        child = state.jobs[child_id]
        pending = tuple(group for group in find_followed(child) if group in state.awaited)
        if pending != child.pending_groups:
            yield change_job(child, pending_groups=pending)


def list_chain(state: State, job: Job) -> list[tuple[int, Job]]:
    """A job with all that it comes after and that comes after it, directly or through others: (depth, job), as added.

    Of a group that it comes after, the jobs are not told.
    """
    children: dict[tuple[bool, str], list[Job]] = {}            # {(is it a group, its name or id): jobs after it}
    for each in state.jobs.values():
        for key in (*((False, parent) for parent in (*each.after, *each.after_any)),
                    *((True, group) for group in (*each.after_group, *each.after_any_group))):
            children.setdefault(key, []).append(each)
    found, above, below = {job.id: job}, [job], [job]
    for each in above:                          # they grow
        parents = [state.jobs[parent] for parent in (*each.after, *each.after_any)
                   if parent in state.jobs and parent not in found]
        found.update((parent.id, parent) for parent in parents)
        above += parents
    for each in below:
        for key in ((False, each.id), *((True, group) for group in find_groups(each))):
            new = [child for child in children.get(key, ()) if child.id not in found]
            found.update((child.id, child) for child in new)
            below += new
    depths: dict[tuple[bool, str], int] = {}
    rows = []
    for each in sorted(found.values(), key=lambda each: each.number):
        keys = (*((False, parent) for parent in (*each.after, *each.after_any)),
                *((True, group) for group in (*each.after_group, *each.after_any_group)))
        depth = max((depths[key] + 1 for key in keys if key in depths), default=0)
        for key in ((False, each.id), *((True, group) for group in find_groups(each))):
            depths[key] = max(depth, depths.get(key, 0))
        rows.append((depth, each))
    return rows


def find_lost(state: State, job: Job, groups: Iterable[str]) -> str:
    """Why a pending job can never start, in words; "" if it may.  `groups`: those whose jobs so far count for it."""
    parents = [state.jobs[parent] for parent in job.after]
    for parent in parents:
        if parent.status in (FAILED, CANCELLED):
            return describe_parent(job, parent)
    for group in groups:
        row = state.groups.get(group)
        if group in state.lost:
            return describe_parent(job, state.jobs[state.lost[group][0]])
        if row and row.lost:
            return f"it was to come after group {group}, whose {row.lost}"
    return ""


def find_ring(state: State, job_ids: Iterable[str]) -> list[tuple[bool, str]]:
    """Where one of these jobs waits for itself: (is it a group, its name or id), each waiting for the next one.

    [] if none does.
    """
    over = set[tuple[bool, str]]()

    def list_next(is_group: bool, name: str) -> list[tuple[bool, str]]:
        if is_group:
            return [(False, job_id) for _, job_id in state.awaited.get(name, ())]
        job = state.jobs[name]
        return [*((False, parent) for parent in job.pending_dependencies),
                *((True, group) for group in find_followed(job))]

    for job_id in job_ids:
        if job_id not in state.dependents and state.followers.keys().isdisjoint(find_groups(state.jobs[job_id])):
            continue                            # nobody waits for it
        path = {} if (False, job_id) in over else {(False, job_id): iter(list_next(False, job_id))}
        while path:
            at, others = next(reversed(path.items()))
            other = next(others, None)
            if other is None:
                over.add(at)
                del path[at]
            elif other in path:
                nodes = list(path)
                return nodes[nodes.index(other):]
            elif other not in over:
                path[other] = iter(list_next(*other))
    return []


def check_rings(state: State, job_ids: Sequence[str], is_new: bool = False) -> None:
    """Raises: conflict, when one of these jobs would wait for itself.  `is_new`: nobody knows their ids yet."""
    ring = find_ring(state, job_ids)
    if not ring:
        return
    first = next((place for place, (is_group, name) in enumerate(ring) if not is_group and name in job_ids), 0)
    ring = ring[first:] + ring[:first]
    words = []
    for (is_group, _), other in zip(ring, [*ring[1:], ring[0]]):
        verb, kind = "has" if is_group else "comes after", "group" if other[0] else "job"
        words.append(f"{verb} it" if other == ring[0] else f"{verb} {kind} {other[1]}")
    job_id, has_group = ring[0][1], any(is_group for is_group, _ in ring)
    subject = "the job" if is_new else f"job {job_id}"
    raise NexusError("conflict", f"{subject} would wait for itself: it "
                     + ", which ".join(words), "a job of a group, or one that it waits for, cannot come after it: "
                     "take another group" if has_group else f"nexus show {job_id}")


def describe_parent(child: Job, parent: Job) -> str:
    if parent.id in child.after:
        return f"it was to come after job {parent.id}, which {describe_loss(parent)}"
    group = next(group for group in child.after_group if group in find_groups(parent))
    return f"it was to come after group {group}, whose job {parent.id} {describe_loss(parent)}"


def describe_loss(job: Job) -> str:
    """How a job ended that did not complete: `failed (exit 3)`."""
    last, words = job.current, f"was {job.status}" if job.status == CANCELLED else job.status
    cause = f"{EXIT} {last.exit_code}" if last.cause == EXIT else last.cause
    return f"{words} ({cause})" if cause else words

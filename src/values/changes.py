"""What may become of a job: its status, its end, another attempt, and when it is forgotten."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from ..opening import TYPE_CHECKING
from .causes import DEPENDENCY, REQUEUED, get_cause
from .dependencies import describe_loss, describe_parent, find_branch, release_dependents
from .errors import NexusError
from .job import CANCELLED, COMPLETED, FAILED, FINAL, PENDING, RUNNING, SUBMITTED, TRANSITIONS, Job, begin_attempt
from .queue_order import list_pending
from .state import Group, Put, State, UsageSums, change_job, find_groups, was_lost
from .text import cut_words
from .usage import add_usage, find_day, find_period, split_usage
from .value import replace

if TYPE_CHECKING:
    from typing import Any

    from .state import Changes

MAX_NOTES = 20                  # of an attempt: the last ones


def add_notes(before: tuple[str, ...], told: Sequence[str]) -> tuple[str, ...]:
    """The notes of an attempt, with those that are new; `before` itself when none is, however often they are told."""
    latest = list(dict.fromkeys(map(cut_words, told[-MAX_NOTES:])))
    new = [note for note in latest if note not in before]
    if len(before) + len(new) <= MAX_NOTES or not new:
        return (*before, *new)
    return (*(note for note in before if note not in latest), *latest)[-MAX_NOTES:]


def change_status(job: Job, status: str, now: float, **facts: Any) -> Put:
    """The change of a job to `status`, with further fields.  Raises: conflict."""
    if status not in TRANSITIONS.get(job.status, ()):
        raise NexusError("conflict", f"job {job.id} is {job.shown_status} and cannot become {status}",
                         hint=f"see what it did: nexus show {job.id}")
    history = job.status_history if status == SUBMITTED else (*job.status_history, (status, now))
    return change_job(job, status=status, status_history=history, **facts)


def end_job(state: State, job: Job, status: str, now: float, **facts: Any) -> Changes:
    """The changes that end a job, and that release or cancel the jobs that depend on it.  Raises: conflict."""
    ended = yield from end_branch(state, job, status, now, **facts)
    yield from release_dependents(state, ended)


def end_branch(state: State, job: Job, status: str, now: float, **facts: Any) -> Changes:
    """The changes that end a job, and that cancel the jobs that can never start now; it returns the ids of all those.

    release_dependents() follows, once for all jobs that end together.  Raises: conflict.
    """
    yield end_one(job, status, now, **find_due_hooks(state, job), **facts)
    branch = find_branch(state, [job.id]) if status != COMPLETED else {}
    for child_id, parent_id in branch.items():
        child = state.jobs[child_id]
        yield end_one(child, CANCELLED, now, cause=DEPENDENCY, **find_due_hooks(state, child),
                      cause_line=describe_parent(child, state.jobs[parent_id]))
    return [job.id, *branch]


def is_left_to_retry(status: str, cause: str | None, retried_as: str | None) -> bool:
    """Whether `retry` takes a job that is not named: it failed or lost one that it came after, and was not retried."""
    return not retried_as and (status == FAILED or cause == DEPENDENCY)


def check_can_retry(job_id: str, status: str) -> None:
    """Raises: conflict."""
    if status not in FINAL:
        raise NexusError("conflict", f"job {job_id} is {status}; only a finished one can be run again",
                         hint=f"nexus show {job_id}")


def find_retried(state: State, job_id: str, latest: dict[str, str]) -> str:
    """Return the id of the latest retry of a job, or its own id.  `latest`: {id: one of its retries}, which grows."""
    former = []
    while (later := latest.get(job_id) or state.jobs[job_id].retried_as) in state.jobs:
        former.append(job_id)
        job_id = str(later)
    latest.update(dict.fromkeys(former, job_id))
    return job_id


def find_cancelled(state: State, job_ids: Iterable[str]) -> list[Job]:
    """The jobs that were cancelled as these did not complete, and those after them, unless they were run again.

    Parents first.  One is left out where another parent of it did not complete either.
    """
    chosen, latest, found = set(job_ids), dict[str, str](), list[Job]()
    groups = {group for job_id in chosen for group in find_groups(state.jobs[job_id])}
    ended = [state.jobs[job_id] for *_, job_id in state.ended.get(CANCELLED, ())]
    left, count = sorted((job for job in ended if job.current.cause == DEPENDENCY and not job.retried_as),
                         key=lambda job: job.number), -1
    while count < len(found):                   # a job may have been changed to come after one that was added later
        count = len(found)
        for job in left:
            parents = [(parent, find_retried(state, parent, latest)) for parent in job.after if parent in state.jobs]
            is_hit = not (chosen.isdisjoint(each for pair in parents for each in pair)
                          and groups.isdisjoint(job.after_group))
            if job.id not in chosen and is_hit and not any(
                    was_lost(state.jobs[last]) and chosen.isdisjoint((parent, last)) for parent, last in parents):
                found.append(job)
                chosen.add(job.id)
                groups.update(find_groups(job))
    return found


def renew_group(state: State, name: str | None) -> Changes:
    """The change of a group that a job is about to join: with no job in it, what its former ones did is over."""
    group = state.groups.get(name or "")
    if group and group.lost and group.name not in state.members:
        yield Put("groups", group.name, replace(group, lost=None))


def find_due_hooks(state: State, job: Job) -> dict[str, bool]:
    """The fields of a job that ends now which say what hooks are due."""
    return {"is_hook_due": state.has_hook, "is_group_due": state.has_group_hook and bool(job.group)}


def end_one(job: Job, status: str, now: float, **facts: Any) -> Put:
    """The change that ends a job.  A pending job gets an attempt that never ran.  Raises: conflict."""
    waiting = job if job.current.number else begin_attempt(job, number=job.attempt)
    return change_status(waiting, status, now, **{"finished_at": now, **facts})


def requeue(state: State, job: Job, cause_line: str, now: float, has_run: bool = False, **facts: Any) -> Changes:
    """The changes that requeue a job whose attempt ended without its fault, at its former place."""
    facts["processes_left"] = None
    if not has_run:
        facts["started_at"] = None
    if get_cause(job.current.stop_cause).cancels:   # what an attempt reached before it began is no end of its job
        yield from end_job(state, job, CANCELLED, now, cause=job.current.stop_cause, **facts)
        return
    history = job.status_history
    if job.status == RUNNING:                   # what has not run goes on waiting since it first did
        history = (*history, (PENDING, now)) if has_run else history[:-1]
    yield change_job(job, **facts, status=PENDING, status_history=history, finished_at=now, cause=REQUEUED,
                     cause_line=cause_line)


def list_finished(state: State) -> list[Job]:
    """All finished jobs, in the order of their ends."""
    return [state.jobs[job_id] for _, _, job_id in sorted(item for items in state.ended.values() for item in items)]


def list_jobs(state: State, statuses: Container[str]) -> list[Job]:
    """The jobs of these statuses: finished by end, running by start, pending in the order of their expected start."""
    return [*(job for job in list_finished(state) if job.status in statuses),
            *(state.running.values() if RUNNING in statuses else ()),
            *(list_pending(state) if PENDING in statuses else ())]


def choose_trimmed(state: State, limit: int) -> list[Job]:
    """Finished jobs to forget now.  Of each user, the last `limit` that ran stay, and as many that never ran.

    So does a job for which on_finish has yet to run.
    """
    if len(state.jobs) - len(state.running) - len(state.pending) <= limit:
        return []                               # as it is nearly always: this is asked each second
    kept: dict[tuple[str, bool], int] = {}
    trimmed = []
    for job in reversed(list_finished(state)):
        key = job.user, any(attempt.started_at is not None for attempt in job.attempts)
        kept[key] = kept.get(key, 0) + 1
        if kept[key] > limit and not (state.has_hook and job.is_hook_due):
            trimmed.append(job)
    return trimmed[::-1]            # the oldest first


def forget_jobs(state: State, jobs: Iterable[Job], now: float) -> Changes:
    """The changes that remove finished jobs, and keep what they used, and what their groups lost."""
    today, used = find_day(now), dict[tuple[str, str, str], UsageSums]()
    lost: dict[str, str] = {}
    for job in jobs:
        for day, sums in split_usage(job, now).items():
            key = day, job.user, job.group or ""
            used[key] = used[key] + sums if key in used else sums
        if was_lost(job):                        # it counts as it ended for whoever comes after its group
            lost.update(dict.fromkeys(find_groups(job), f"job {job.id} {describe_loss(job)}, and is forgotten"))
        yield Put("jobs", job.id, None)
    for name in lost.keys() & state.members.keys():
        yield Put("groups", name, replace(state.groups.get(name) or Group(name), lost=lost[name]))
    for (day, user, group), sums in used.items():
        if period := find_period(day, today):
            yield add_usage(state, period, user, group, sums)

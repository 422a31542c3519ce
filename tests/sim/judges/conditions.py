"""What a job waits for by itself: dependencies, holds, its begin."""
from __future__ import annotations

from typing import TYPE_CHECKING

import nexus
from judges.ledger import FINAL, Job, Ledger, Move

if TYPE_CHECKING:
    from judges.starts import Starts


def check_start(starts: Starts, ledger: Ledger, move: Move, job: Job) -> None:
    """A job starts when nothing of what was asked for holds it."""
    was = move.before.jobs.get(job.id, job)
    for words in list_holds(ledger, move.after, was, move.now):
        starts.fail(f"job {job.id} starts, and {words}")
    wish = ledger.wishes.get(job.id)
    if wish and wish.is_sure:
        for words in ledger.list_differences(move.after.jobs, [job.id]):
            starts.fail(words)
        if wish.begin_at > move.now + 0.01:
            starts.fail(f"job {job.id} starts {wish.begin_at - move.now:.1f} s before its begin")


def list_holds(ledger: Ledger, state: nexus.State, job: Job, now: float) -> list[str]:
    """What keeps a pending job from starting, whatever is free."""
    words = []
    group = state.groups.get(job.group or "")
    if job.is_held:
        words.append("it is held")
    if state.paused or (ledger.is_calm and ledger.is_paused):
        words.append("the queue is paused")
    if (group and group.hold) or (ledger.is_calm and job.group in ledger.paused_groups):
        words.append(f"its group {job.group} is held")
    if max(job.begin_at or 0.0, job.retry_at or 0.0) > now + 0.01:
        words.append("its time has not come")
    if job.after_process:
        words.append("the process after which it comes has not ended")
    for parent_id in job.after:
        if (end := find_end(ledger, state, parent_id)) not in ("completed", "gone"):
            words.append(f"job {parent_id}, which is to complete first, is {end}")
    for parent_id in job.after_any:
        if (end := find_end(ledger, state, parent_id)) not in (*FINAL, "gone"):
            words.append(f"job {parent_id}, which is to end first, is {end}")
    # Who joins a group later counts until the waiting job starts for the first time; then, what it was told since
    groups = {*job.after_group, *job.after_any_group} if not job.attempts else {*job.pending_groups}
    for name in groups:
        left = [other.id for other in state.jobs.values() if is_of(state, other, name) and other.id != job.id]
        words += [f"of group {name}, which is to end first, {left} have not"] if left else []
    return words


def find_end(ledger: Ledger, state: nexus.State, job_id: str) -> str:
    job = state.jobs.get(job_id)
    return str(job.status) if job else ledger.ends.get(job_id, "gone")


def is_of(state: nexus.State, job: Job, group: str) -> bool:
    """Whether a job counts for a group and has not ended: it is in it, or does again what failed there."""
    if job.status in FINAL:
        return False
    return job.group == group or any(
        other.group == group and other.status in ("failed", "cancelled") and find_last(state, other) is job
        for other in state.jobs.values() if other.retried_as)


def find_last(state: nexus.State, job: Job) -> Job:
    """The last retry of a job."""
    while job.retried_as in state.jobs:
        job = state.jobs[job.retried_as]
    return job


def check_followers(starts: Starts, ledger: Ledger, move: Move) -> None:
    """Who can never start now is cancelled at once, and nobody else is for that cause."""
    lost = [job for job in move.ended if job.status != "completed"]
    ids, groups = {job.id for job in lost}, {job.group for job in lost if job.group and not job.retried_as}
    for job in move.before.pending.values():
        after = move.after.jobs.get(job.id)
        if after is None or after.status in FINAL:
            continue
        parents = ids.intersection(job.after)
        others = groups.intersection(job.after_group) if not job.attempts else ()
        if parents or others:
            starts.fail(f"{[*parents, *others]} did not complete, and job {job.id}, which comes after, is {after.status}")
    for job in lost:
        if job.attempts[-1].cause != "dependency":
            continue
        is_right = any(find_end(ledger, move.after, parent) in ("failed", "cancelled") for parent in job.after)
        is_right |= any(has_lost(ledger, move.after, group) for group in job.after_group)
        if not is_right:
            starts.fail(f"job {job.id} is cancelled, as if one had not completed of {job.after} and {job.after_group}")


def has_lost(ledger: Ledger, state: nexus.State, group: str) -> bool:
    """Whether a job of a group did not complete; one that was cleared counts as it ended."""
    row = state.groups.get(group)
    return bool(row and row.lost) or any(
        job.status in ("failed", "cancelled") and not job.retried_as and group in (job.group, *job.retried_groups)
        for job in state.jobs.values())

"""The lists of jobs that users look at: which are in each, and in which order."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.changes import list_finished
from ..values.choice import Choice
from ..values.job import FAILED, PENDING, RUNNING, STATUSES, Job
from ..values.queue_order import PendingQueue
from ..values.state import State
from .access import Identity

if TYPE_CHECKING:
    from ..values.state import EndedItem, QueuePlace


def choose_pending(queue: PendingQueue, caller: Identity, choice: Choice, now: float) -> tuple[Iterable[Job], int]:
    """(the pending jobs that match, in the queue's order; how many).  There are indexes by user and by group."""
    state = queue.state
    if not {*choice.given} <= {"status", "user", "group"}:
        jobs = choice.select(queue.walk(state.queued), caller.may_see, now)
        return jobs, len(jobs)
    if choice.group is None:
        places = state.queued
    else:
        places = {user: here for (user, group), here in state.queued_in.items()
                  if group == choice.group and caller.may_see(user)}
    places = {user: here for user, here in places.items() if choice.user in (None, user)}
    return queue.walk(places), sum(map(len, places.values()))


def find_group_user(queue: PendingQueue, group: str, users: Sequence[str]) -> str:
    """Whose a group is for those who may see these users' jobs in it: of its first job to end, to run, or to start."""
    state = queue.state
    if len(users) == 1:
        return users[0]
    ended = [state.ended_in[user, group][0] for user in users if (user, group) in state.ended_in]
    running = (job for job in state.running.values() if job.group == group and job.user in users)
    waiting = {user: state.queued_in[user, group] for user in users if (user, group) in state.queued_in}
    if ended:
        return state.jobs[min(ended)[2]].user
    first = next(running, None) or next(queue.walk(waiting))
    return first.user


class JobLists:
    """The lists of jobs that a document has the first of: what waits in the queue's order, what has ended last first.

    A group stands in them as its first job that the list has; one that is not over, in the waiting list alone.  A job
    that stands among the failures is not in the list of all that have ended.
    """

    def __init__(self, state: State, caller: Identity, choice: Choice, groups: Mapping[str, Sequence[str]],
                 now: float) -> None:
        """`groups`: those that stand for their jobs, as list_visible_groups() has them."""
        self.state, self.caller = state, caller
        self.queue = PendingQueue(state)
        self.user_of = {group: find_group_user(self.queue, group, users) for group, users in groups.items()}
        statuses = choice.status or STATUSES
        self.failures = self.list_failures()
        self.running = choice.select(state.running.values() if RUNNING in statuses else (), caller.may_see, now)
        self.waiting: Iterable[Job] = ()
        self.ended: Iterable[Job] = ()
        self.waiting_count = self.ended_count = 0
        if choice.given:
            if PENDING in statuses:
                self.waiting, self.waiting_count = choose_pending(self.queue, caller, choice, now)
            self.ended = choice.select(
                [job for job in reversed(list_finished(state)) if job.status in statuses], caller.may_see, now)
            self.ended_count = len(self.ended)
        else:
            self.fold_waiting()
            self.fold_ended({*groups}.difference(job.group or "" for job in self.running if caller.may_see(job.user)))

    def is_folded(self, job: Job) -> bool:
        return self.user_of.get(job.group or "") == job.user

    def name_entry(self, job: Job) -> str:
        return f"group:{job.group}" if self.is_folded(job) else job.id

    def fold_waiting(self) -> None:
        import heapq
        heads: dict[str, list[QueuePlace]] = {}             # {user: of the first jobs of their groups}
        others: dict[str, list[list[QueuePlace]]] = {}
        for (user, group), places in self.state.queued_in.items():
            if self.user_of.get(group) == user:
                heads.setdefault(user, []).append(places[0])
            else:
                others.setdefault(user, []).append(places)
        self.waiting = self.queue.walk({user: heapq.merge(sorted(heads.get(user, ())), *others.get(user, ()))
                                        for user in self.state.queued})
        self.waiting_count = sum(map(len, (*heads.values(), *(each for here in others.values() for each in here))))

    def fold_ended(self, quiet: Container[str]) -> None:
        """`quiet`: the groups of which nothing runs."""
        import heapq
        shown = {job.id for job in self.failures if not self.is_folded(job)}
        heads: list[EndedItem] = []
        others: list[list[EndedItem]] = []
        waiting = {group for user, group in self.state.queued_in if self.caller.may_see(user)}
        for (user, group), items in self.state.ended_in.items():
            if self.user_of.get(group) != user:
                others.append(items)
            elif group in quiet and group not in waiting:
                heads.append(items[-1])
        lists = [sorted(heads, reverse=True), *map(reversed, others)]
        self.ended = (
            self.state.jobs[job_id] for *_, job_id in heapq.merge(*lists, reverse=True) if job_id not in shown)
        self.ended_count = sum(map(len, (heads, *others))) - len(shown)

    def list_failures(self) -> list[Job]:
        """The failed jobs that were not queued again, and not dismissed by the caller, the last first."""
        jobs = [self.state.jobs[job_id] for *_, job_id in reversed(self.state.ended.get(FAILED, ()))]
        return [job for job in jobs if not job.retried_as and self.caller.user not in job.dismissed_by
                and self.caller.may_see(job.user)]

    def fold_failures(self) -> list[tuple[Job, int, int]]:
        """The last failure of each group, and those of no group, with how many there are of it, and of how many kinds.

        Of one kind are those whose messages differ in their numbers alone.
        """
        from collections import Counter
        names = [(job.user, job.group) if job.group else job.id for job in self.failures]
        counts, first = Counter(names), dict(zip(reversed(names), reversed(self.failures)))
        kinds: dict[object, set[tuple[str | None, str]]] = {}
        for name, job in zip(names, self.failures):
            last = job.current
            kinds.setdefault(name, set()).add((last.cause, re.sub("[0-9]+", "", last.cause_line or "")))
        return [(first[name], count, len(kinds[name])) for name, count in counts.items()]

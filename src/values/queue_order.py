"""The pending queue: who is next, and what moving a job does to it.

Ranks and priorities are strict.  Within a priority, the user with the fewest GPUs in use goes first, and among
equals the user whose last start is longest ago: a thousand jobs of one do not hold up another's one.  Of one user,
the lowest queue_key goes first, which is the order of submission until a job is moved.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..opening import TYPE_CHECKING
from .job import Job, count_use
from .state import Group, Put, State, change_job, find_queue_place

if TYPE_CHECKING:
    from typing import Any

    from .state import Changes, QueueItem, QueuePlace


def has_pending(state: State, group: str) -> bool:
    return any(job_id in state.pending for _, job_id in state.members.get(group, ()))


def describe_hold(group: Group) -> str:
    return f"group {group.name} is held: {group.hold}"


def list_holds(state: State) -> dict[str, str]:
    """{group: why none of its jobs starts} of the groups that are held."""
    return {group.name: describe_hold(group) for group in state.groups.values() if group.hold}


def walk_queue(state: State, classes: dict[Any, list[QueueItem]],
               used: Mapping[str, float]) -> Iterator[tuple[Any, Job]]:
    """The jobs of the classes, each of one user, in the queue's order: (class, job).  Preemptible ones come last.

    Before the caller takes the next it adds a job that starts to `used`, and takes out a class that it is done with.
    """
    import heapq
    # {user: a heap of (is it preemptible, *queue_key, id, place in its class, class)}
    heads: dict[str, list[tuple[Any, ...]]] = {}
    for queue_class, ((key, job_id), *_) in classes.items():
        job = state.jobs[job_id]
        heads.setdefault(job.user, []).append((job.preemptible, *key, job_id, 0, queue_class))
    for heap in heads.values():
        heapq.heapify(heap)

    def find_turn(user: str) -> tuple[Any, ...]:
        head = heads[user][0]
        return head[:3], used.get(user, 0.0), state.last_starts.get(user, 0.0), head

    while heads:
        user = next(iter(heads)) if len(heads) == 1 else min(heads, key=find_turn)
        preemptible, *_, job_id, at, queue_class = heads[user][0]
        yield queue_class, state.jobs[job_id]
        items = classes.get(queue_class, [])
        if at + 1 < len(items):
            key, job_id = items[at + 1]
            heapq.heapreplace(heads[user], (preemptible, *key, job_id, at + 1, queue_class))
        else:
            heapq.heappop(heads[user])
            if not heads[user]:
                del heads[user]


def list_pending(state: State) -> list[Job]:
    """All pending jobs in the order of PendingQueue."""
    return list(PendingQueue(state).walk(state.queued))


class PendingQueue:
    """The order in which the pending jobs would start if all of them fit: a part of it is had without the rest.

    It is that of walk_queue().  The places of each user are an index.  Between users a place's turn decides: its band
    (preemptible, rank, priority), the GPUs that its user will have in use before it, and the user's last start.  The
    turns of one user ascend, so that the queue is the users' places merged.
    """

    def __init__(self, state: State) -> None:
        import itertools
        self.state, in_use = state, count_use(state)
        self.used: dict[str, list[float]] = {}              # {user: GPUs in use before each place of theirs}
        for user, places in state.queued.items() if len(state.queued) > 1 else ():
            self.used[user] = list(itertools.accumulate([place[-1] for place in places],
                                                        initial=in_use.get(user, 0.0)))

    def find_turn(self, user: str, place: QueuePlace) -> tuple[Any, ...]:
        at = bisect.bisect_left(self.state.queued[user], place)
        return place[:3], self.used[user][at], self.state.last_starts.get(user, 0.0), place

    def walk(self, places_of: Mapping[str, Iterable[QueuePlace]]) -> Iterator[Job]:
        """The jobs at these places, {user: ascending}, in the queue's order."""
        import heapq
        jobs = self.state.jobs
        if len(self.state.queued) <= 1:                     # there are no turns to take
            return (jobs[place[4]] for places in places_of.values() for place in places)

        def list_turns(user: str, places: Iterable[QueuePlace]) -> Iterator[tuple[Any, ...]]:
            return (self.find_turn(user, place) for place in places)

        return (jobs[place[4]] for *_, place in heapq.merge(*(list_turns(*pair) for pair in places_of.items())))

    def find_position(self, job: Job) -> int:
        """How many pending jobs are before a pending job."""
        place, position = find_queue_place(job), 0
        for user, places in self.state.queued.items():
            at = bisect.bisect_left(places, place)
            if user != job.user:
                band, in_use, *rest = self.find_turn(job.user, place)
                first, end = bisect.bisect_left(places, band), bisect.bisect_left(places, (*band, float("inf")))
                used = self.used[user]
                at = bisect.bisect_left(used, in_use, first, end)
                is_tie = at < end and used[at] == in_use
                at += is_tie and [self.state.last_starts.get(user, 0.0), places[at]] < rest
            position += at
        return position


def move_jobs(state: State, moved: Sequence[Job], is_first: bool) -> Changes:
    """The changes that put pending jobs, in this order, before all others, whatever their priority, or behind them.

    They get the priority of the others there.  Between users the GPUs in use decide who of the last ones is first.
    """
    ids = {job.id for job in moved}
    others = [job.queue_key for job in state.pending.values() if job.id not in ids] or [moved[0].queue_key]
    if is_first:
        rank, priority, _ = min(others)
        keys = [(rank - len(moved) + number, min(priority, job.priority), float(job.number))
                for number, job in enumerate(moved)]
    else:
        rank, priority, _ = max(others)
        keys = [(rank, priority, state.next_number + number) for number in range(len(moved))]
        yield Put("facts", "next_number", state.next_number + len(moved))       # whoever comes next is behind them
    for job, key in zip(moved, keys):
        yield change_job(job, queue_key=key, priority=int(key[1]))


def move_before(state: State, moved: Sequence[Job], other: Job) -> Changes:
    """The changes that put pending jobs, in this order, right before another one, with its priority.

    Between jobs of several users the GPUs in use decide all the same.
    """
    ids, (*band, end) = {job.id for job in moved}, other.queue_key
    earlier = sorted((job.queue_key[-1], job.id) for job in state.pending.values()
                     if job.id not in ids and [*job.queue_key[:-1]] == band and job.queue_key < other.queue_key)
    begin = earlier[-1][0] if earlier else end - len(moved) - 1
    places = [begin + (end - begin) * number / (len(moved) + 1) for number in range(1, len(moved) + 1)]
    if not all(low < high for low, high in zip([begin, *places], [*places, end])):
        # No number is left between these two: those before it get others too
        moved = [*(state.jobs[job_id] for _, job_id in earlier), *moved]
        places = [end - number for number in range(len(moved), 0, -1)]
    for job, place in zip(moved, places):
        yield change_job(job, queue_key=(*band, place), priority=int(band[1]))


def next_place(state: State, priority: int) -> dict[str, Any]:
    """The fields that put a new job behind all jobs of its priority."""
    number = state.next_number
    return {"number": number, "queue_key": (0, priority, number), "priority": priority}

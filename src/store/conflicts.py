"""What a change has looked at and changed: two changes made beside each other conflict, or have an order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..values.job import FINAL, Job
from ..values.state import Put, State, find_groups, list_parents


class Touched:
    """What a transaction changes, and what its changes rely on.

    Two transactions that were made from one State, each without the other, may both be made if they do not conflict.
    A rule that looks only at the rows that it changes needs nothing here.  A rule that looks at other jobs does.
    """

    def __init__(self, base: State, changes: Sequence[Put]) -> None:
        self.rows, self.removed, self.environments = set[tuple[str, str]](), set[str](), set[str]()
        self.ids, self.parents, self.adders, self.new_ids = set[str](), set[str](), set[str](), set[str]()
        self.groups, self.followed, self.joined = set[str](), set[str](), set[str]()
        self.next_number = 0                                            # that it leaves; 0: it adds none
        for change in changes:
            job, former = change.value, base.jobs.get(change.key)
            if change.table == "jobs":
                self.ids.add(change.key)
                for each in filter(None, (former, job)):
                    self.parents.update(each.after, each.after_any)
                    self.groups.update(find_groups(each))
                    self.followed.update(each.after_group, each.after_any_group)
                if job:
                    self.environments.add(job.environment)
                    self.joined.update(find_groups(job).keys() - (find_groups(former) if former else {}))
                    self.note_job(job, former)
            elif change.table == "environments":                        # their keys are digests
                self.removed.update((change.key,) if job is None else ())
            elif is_next_number(change):
                self.next_number = change.value
            else:
                self.rows.add((change.table, change.key))
                self.groups.update((change.key,) if change.table == "groups" else ())
        if any(group in base.followers or group in self.followed for group in self.joined):
            self.rows.add(RING_RULE)

    def note_job(self, job: Job, former: Job | None) -> None:
        """Note the rules that a job falls under which is there now; `former`: as it was."""
        is_new = former is None or former.number != job.number
        if is_new:
            self.new_ids.add(job.id.lower())                            # these differ by more than case
        if former is None or is_new or list_parents(job) != list_parents(former):
            self.adders.add(job.user)                                   # of jobs, or of links
            self.rows.update(() if is_new else (RING_RULE,))            # nobody comes after a new job
        if former and job.queue_key != former.queue_key:
            self.rows.add(ORDER_RULE)

    def conflicts_with(self, other: Touched, base: State) -> bool:
        """Whether one of the two might be different if it was made after the other.

        A user who adds in both may have asked for the same twice (`unique`, Idempotency-Key), or exceed a limit.
        """
        def is_watched(group: str) -> bool:
            row, key = base.groups.get(group), ("groups", group)
            return group in base.followers or key in self.rows or key in other.rows or bool(
                row and (row.hold or row.lost))

        return not (self.rows.isdisjoint(other.rows) and self.ids.isdisjoint(other.ids)
                    and self.new_ids.isdisjoint(other.new_ids) and self.adders.isdisjoint(other.adders)
                    and self.parents.isdisjoint(other.ids) and self.ids.isdisjoint(other.parents)
                    and self.followed.isdisjoint(other.groups) and self.groups.isdisjoint(other.followed)
                    and not any(map(is_watched, self.groups & other.groups))
                    and self.joined.isdisjoint(other.joined) and not 0 < self.next_number < other.next_number
                    and self.environments.isdisjoint(other.removed))


def is_next_number(change: Put) -> bool:
    return (change.table, change.key) == ("facts", "next_number")


# Rows of no table, for rules that are of all jobs: that none waits for itself, and who is before whom.
RING_RULE, ORDER_RULE = ("", "rings"), ("", "order")


def list_status_changes(state: State, changes: Iterable[Put]) -> list[Job]:
    """The jobs whose status these changes of `state` alter, and the new ones that are over at once."""
    moves = []
    for job in (change.value for change in changes if change.table == "jobs" and change.value):
        former = state.jobs.get(job.id)
        is_new = former is None or former.number != job.number          # it may have an old job's id
        if job.status in FINAL if is_new else former is not None and job.status != former.status:
            moves.append(job)
    return moves


def forget_unused(state: State) -> list[Put]:
    """The changes that remove the environments and groups that no job uses."""
    return [Put(table, key, None) for table, name in (("environments", "environment"), ("groups", "group"))
            for key in getattr(state, table).keys() - {getattr(job, name) for job in state.jobs.values()}]

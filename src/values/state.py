"""All that state.json holds, with indexes of the jobs, and the change of one entry.

The indexes keep the cost of a start from growing with the jobs that wait.  Everything else is found by a loop over
the jobs, which are 10,000 at most.  The store owns the one State: it changes a copy by put(), which then takes its
place.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping

from ..opening import TYPE_CHECKING
from .config import NodeConfig
from .job import ATTEMPT_FIELDS, CANCELLED, FAILED, FINAL, LIVE, PENDING, RUNNING, Job, find_use, name_priority, needs_folder
from .value import Value, replace

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from .job import Amount, Count, Words


class Group(Value):
    name: str
    limit: int = 0                  # how many of them run at once; 0 = as many as fit
    hold: str | None = None         # why none of them starts; None: they may
    failures: int = 0               # how many jobs failed soon, as long as all did; -1: one did not
    is_paused: bool = False         # a user holds it, until it is resumed; else the hold ends with its pending jobs
    lost: Words | None = None       # the last job that did not complete and is forgotten, and why; None: there is none


class UsageSums(Value):
    """What jobs used in some time, and how many of them ended in it."""
    gpu_seconds: Amount = 0.0
    cpu_job_seconds: Amount = 0.0               # how long jobs without a GPU ran
    completed: Count = 0
    failed: Count = 0
    cancelled: Count = 0

    def __add__(self, other: UsageSums) -> UsageSums:
        return UsageSums(*(round(getattr(self, name) + getattr(other, name), 3) for name in self.NAMES))


class PastUsage(Value):
    """What those jobs of a user that are forgotten used in a local day, or in a month."""
    period: str                                 # 2024-10-24, or 2024-10
    user: str
    groups: Mapping[str, UsageSums] = {}        # by group; "": of no group

    @property
    def key(self) -> str:
        return f"{self.period} {self.user}"


class Token(Value):
    """Another user's access.  Only a digest of the token is stored."""
    user: str
    sha256: str
    created_at: float
    expires_at: float | None = None     # None = never

    def is_good(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at


class KnownNode(Value):
    """Another machine that was added."""
    config: NodeConfig
    is_leaving: bool = False        # it gets no more jobs, and is forgotten after its last job
    was_configured: bool = False    # it was in config.toml


class Put(Value):
    """A change: the new row of a table of State under a key; None removes it."""
    table: str
    key: str
    value: Any


if TYPE_CHECKING:
    Changes = Generator[Put, None, Any]         # Store.update() makes each change as it is yielded
    QueuePlace = tuple[Any, ...]                # (preemptible, *queue_key, id, GPUs it will use) of a pending job
    QueueItem = tuple[tuple[float, ...], str]   # (queue_key, id) of a pending job
    EndedItem = tuple[float, int, str]          # (when it ended, number, id) of a finished job
    JobClass = tuple[object, ...]               # of find_class()


class State:
    """All that state.json holds, tables and facts, plus indexes of the jobs.  Only a copy is changed, by put()."""

    # The facts with their defaults; they are a table too
    host: str = ""                                          # whose service wrote state.json last
    pid_namespace: str = ""                                 # in which it was
    service_id: str = ""
    paused: bool = False
    paused_gpus: tuple[Any, ...] = ()                       # uuids; what another program wrote, until the next start
    damage: str = ""                                        # what a start did not find whole, and so paused the queue
    pause_reasons: tuple[tuple[str, str], ...] = ()         # (uuid, why nexus itself paused it)
    has_hook: bool = False                                  # on_finish is configured
    has_group_hook: bool = False                            # on_group_finish is
    next_number: int = 1                                    # the next job's sequence number

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.environments: dict[str, Mapping[str, str]] = {}
        self.groups: dict[str, Group] = {}                  # groups with a limit, a hold or failures
        self.seen: dict[str, int] = {}                      # rows of the jobs file: {digest: how many times}
        self.nodes: dict[str, KnownNode] = {}
        self.usage: dict[str, PastUsage] = {}               # of jobs that are forgotten, by PastUsage.key
        self.seq = 0                                        # of the last transaction that changed it
        self.running: dict[str, Job] = {}
        self.pending: dict[str, Job] = {}                   # those that are shown so
        self.live: dict[str, Job] = {}
        # INDEXES, each {key: its items, ascending}
        self.ready: dict[JobClass, list[QueueItem]] = {}    # pending jobs by find_class()
        self.dependents: dict[str, list[str]] = {}          # {id: the pending jobs that depend on that job}
        self.followers: dict[str, list[str]] = {}           # {group: the pending jobs that come after it}
        self.awaited: dict[str, list[tuple[int, str]]] = {}     # {group: (number, id) of its jobs that have not ended}
        self.lost: dict[str, list[str]] = {}                # {group: its jobs that did not complete, nor were retried}
        self.named: dict[tuple[str | None, str], list[tuple[int, str]]] = {}    # {(user or None for all, name): jobs}
        self.awaited_names: dict[tuple[str | None, str], list[tuple[int, str]]] = {}    # of these, those not ended yet
        self.members: dict[str, list[tuple[str, str]]] = {}                     # {group: (user, id) of its jobs}
        self.queued: dict[str, list[QueuePlace]] = {}       # {user: their pending jobs}
        self.queued_in: dict[tuple[str, str], list[QueuePlace]] = {}            # {(user, group or ""): pending jobs}
        self.prioritized: dict[str, list[str]] = {}         # {name of a priority: pending jobs}
        self.ended: dict[str, list[EndedItem]] = {}         # {status: finished jobs}
        self.ended_in: dict[tuple[str, str], list[EndedItem]] = {}              # {(user, group or ""): finished jobs}
        self.unshared: set[tuple[str, Any]] = set()         # (index, key) of the lists that no other State has
        self.last_starts: dict[str, float] = {}             # {user: when a job of theirs was last started}

    def copy(self) -> State:
        """Another State, whose changes do not show in this one."""
        other = State()
        for name, fact in vars(self).items():
            setattr(other, name, fact.copy() if isinstance(fact, dict) else fact)
        self.unshared, other.unshared = set(), set()        # a list is copied when one of them changes it
        return other

    def put(self, change: Put) -> None:
        """Raises: KeyError, for a table that there is not."""
        table = vars(self) if change.table == "facts" else vars(self)[change.table]
        old = table.get(change.key)
        if change.value is None:
            table.pop(change.key, None)
        else:
            table[change.key] = change.value
        if table is self.jobs:
            self.update_indexes(old, change.value)

    def update_indexes(self, old: Job | None, new: Job | None) -> None:
        for index, belongs in ((self.running, new and new.status == RUNNING), (self.live, new and new.status in LIVE),
                               (self.pending, new and new.shown_status == PENDING)):
            if new and belongs:
                index[new.id] = new
            elif old:
                index.pop(old.id, None)
        for name, list_entries in INDEXES.items():
            before, after = list_entries(old) if old else [], list_entries(new) if new else []
            if before != after:
                both = {*before}.intersection(after) if before and after else ()
                for key, item in before:
                    if (key, item) not in both:
                        items = self.own_items(name, key)
                        del items[bisect.bisect_left(items, item)]
                        if not items:
                            del vars(self)[name][key]
                for key, item in after:
                    if (key, item) not in both:
                        bisect.insort(self.own_items(name, key), item)
        if new and new.attempts:
            self.last_starts[new.user] = max(self.last_starts.get(new.user, 0.0), new.current.started_at or 0.0)

    def own_items(self, name: str, key: Any) -> list[Any]:
        """The items of an index, to be changed."""
        index: dict[Any, list[Any]] = vars(self)[name]
        if key not in index or (name, key) not in self.unshared:
            index[key] = index.get(key, []).copy()
            self.unshared.add((name, key))
        return index[key]

    def list_dependents(self, job_id: str) -> list[Job]:
        """The pending jobs that depend on a job."""
        return [self.jobs[child_id] for child_id in self.dependents.get(job_id, ())]


FACTS: Mapping[str, Any] = {name: getattr(State, name) for name in State.__annotations__}       # and their defaults
EDITABLE = ("paused", "paused_gpus")        # the facts that other programs may change in state.json
INDEXES: Mapping[str, Callable[[Job], list[tuple[Any, Any]]]] = {       # {field of State: (key, item)s of a job in it}
    "ready": lambda job: [(job_class, (job.queue_key, job.id))] if (job_class := find_class(job)) else [],
    "dependents": lambda job: [(other, job.id) for other in job.pending_dependencies] if job.status == PENDING else [],
    "followers": lambda job: [(group, job.id) for group in find_followed(job)],
    "awaited": lambda job: (
        [(group, (job.number, job.id)) for group in find_groups(job)] if job.status not in FINAL else []),
    "lost": lambda job: [(group, job.id) for group in find_groups(job)] if was_lost(job) else [],
    "named": lambda job: list_names(job) if job.name else [],
    "awaited_names": lambda job: list_names(job) if job.name and job.status not in FINAL else [],
    "members": lambda job: [(job.group, (job.user, job.id))] if job.group else [],
    "queued": lambda job: [(job.user, find_queue_place(job))] if job.shown_status == PENDING else [],
    "queued_in": lambda job: (
        [((job.user, job.group or ""), find_queue_place(job))] if job.shown_status == PENDING else []),
    "prioritized": lambda job: [(name_priority(job.priority), job.id)] if job.shown_status == PENDING else [],
    "ended": lambda job: [(job.status, find_end_item(job))] if job.status in FINAL else [],
    "ended_in": lambda job: [((job.user, job.group or ""), find_end_item(job))] if job.status in FINAL else [],
}


def list_names(job: Job) -> list[tuple[Any, Any]]:
    return [((user, job.name), (job.number, job.id)) for user in (None, job.user)]


def pause_queue(is_paused: bool) -> tuple[Put, ...]:
    """The changes that pause or resume the whole queue: whoever resumes it knows what was damaged."""
    return Put("facts", "paused", is_paused), *(() if is_paused else [Put("facts", "damage", "")])


def request_class(job: Job) -> tuple[Any, ...]:
    """All of a job that decides which GPUs it can have: where one job does not fit, others of its class do not."""
    expected = -1 if job.expected_time is None else int(job.expected_time).bit_length()     # up to which power of two
    return (job.gpus, job.gpu_ids, job.gpu_mem_mib, job.gpu_type, job.exclusive, job.cuda_arg, expected, job.only_node,
            job.excluded_nodes, job.cwd if needs_folder(job) else None)


def find_class(job: Job) -> JobClass | None:
    """Where one job of a class cannot start, those behind it cannot.  None: it waits for something else."""
    if (job.status != PENDING or job.is_held or job.pending_dependencies or job.pending_groups
            or job.after_process):
        return None
    return job.user, job.group, job.preemptible, request_class(job)


def find_queue_place(job: Job) -> QueuePlace:
    return job.preemptible, *job.queue_key, job.id, find_use(job)


def find_end_item(job: Job) -> EndedItem:
    return job.status_history[-1][1] if job.status_history else 0.0, job.number, job.id


def add_job(job: Job) -> tuple[Put, ...]:
    """The changes that add a new job."""
    return Put("jobs", job.id, job), Put("facts", "next_number", job.number + 1)


def with_facts(job: Job, **facts: Any) -> Job:
    """The job with these fields of it, or of its last attempt."""
    learned = {name: facts.pop(name) for name in [name for name in facts if name in ATTEMPT_FIELDS]}
    if learned:
        facts["attempts"] = (*job.attempts[:-1], replace(job.attempts[-1], **learned))
    return replace(job, **facts)


def change_job(job: Job, **facts: Any) -> Put:
    """The change of these fields of a job, or of its last attempt."""
    return Put("jobs", job.id, with_facts(job, **facts))


def change_attempt(job: Job, **facts: Any) -> Put:
    """The change of these fields of a job's last attempt, and of nothing else.  Raises: TypeError, for another name."""
    return change_job(job, attempts=(*job.attempts[:-1], replace(job.attempts[-1], **facts)))


# A job that comes after a group waits while a job of that group has not ended, also one that joins it later, until it
# starts itself.  A job counts for its own group, and for those of the failures that it does again.

def find_groups(job: Job) -> dict[str, None]:
    """The groups for which a job counts, where others come after them."""
    return dict.fromkeys(filter(None, (job.group, *job.retried_groups)))


def list_parents(job: Job) -> tuple[tuple[str, ...], ...]:
    """All after which it starts: jobs that are to complete, or only to end; such groups."""
    return job.after, job.after_any, job.after_group, job.after_any_group


def find_followed(job: Job) -> dict[str, None]:
    """The groups whose jobs count for a pending job.  Once it has started, those that join do not."""
    groups = dict.fromkeys((*job.after_group, *job.after_any_group))
    if not groups or job.status != PENDING:
        return {}
    return dict.fromkeys(job.pending_groups) if job.attempts else groups


def was_lost(job: Job) -> bool:
    """Whether it did not complete, and no retry counts in its place."""
    return job.status in (FAILED, CANCELLED) and not job.retried_as

"""What people have asked of a service, and what it has recorded since: the facts of the judges of starts."""
from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from homes import Home

import nexus

Job = Any                           # as a service records it: facts, as the API shows them
LIVE, FINAL = ("running", "submitted"), ("completed", "failed", "cancelled")
# What is asked for of a job, by the names of the API: it is so until somebody changes it.
KEPT = ("gpus", "gpu_ids", "gpu_mem_mib", "gpu_type", "group", "preemptible", "expected_time", "retries", "timeout_seconds")
ASKED = (*KEPT, "priority", "is_held", "after", "after_any", "after_group", "after_any_group")
DEFAULTS = {"gpus": 1, "retries": 0, "priority": 1, "is_held": False, "preemptible": False,
            **dict.fromkeys(("after", "after_any", "after_group", "after_any_group"), ())}
SECONDS = {"s": 1, "m": 60}


@dataclass
class Move:
    """One change that a service has recorded."""
    home: Home
    before: nexus.State
    after: nexus.State
    now: float                          # by the clock of the service's machine
    started: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    stopped: list[Job] = field(default_factory=list)        # that are to be stopped from now on


@dataclass
class Wish:
    """What was asked for of a job."""
    number: int
    fields: dict[str, Any]
    key: tuple[int, int, float]         # (rank, priority, place): the lower, the sooner
    begin_at: float = 0.0
    is_sure: bool = True                # False: it was asked for in a way that is not followed here


class Ledger:
    """Of one service.  What was asked for is known only in calm histories: elsewhere a request may be cut off."""

    def __init__(self, home: Home, is_calm: bool) -> None:
        self.home, self.is_calm = home, is_calm
        self.store: Any = None
        self.state: nexus.State | None = None       # as it was seen last
        self.numbers = itertools.count(1)
        self.wishes: dict[str, Wish] = {}
        self.ends: dict[str, str] = {}              # {id: how it ended}, also of those that are cleared
        self.limits: dict[str, int] = {}            # {group: its max_concurrent; 0: none}
        self.is_paused, self.paused_groups, self.paused_places = False, set[str](), set[str]()
        self.stepped_at = home.host.wall()          # before the request that is noted: it may wait for a reading

    # What is recorded

    def list_moves(self) -> Iterator[Move]:
        """What was recorded since the last call."""
        store = getattr(self.home.process, "store", None)
        if store is None or not store.states:
            return
        if store is not self.store:
            self.store, self.state = store, store.states[0]
            self.ends.update((job.id, job.status) for job in store.states[0].jobs.values() if job.status in FINAL)
        if store.states[-1] is self.state:
            return
        later = list(itertools.takewhile(lambda state: state is not self.state, reversed(store.states)))
        for state in reversed(later):
            before, self.state = self.state, state
            yield self.compare(before, state)

    def compare(self, before: nexus.State, after: nexus.State) -> Move:
        move = Move(self.home, before, after, self.home.host.wall())
        former = before.jobs
        for job_id, job in after.jobs.items():
            old = former.get(job_id)
            if old is job:
                continue
            was = old.status if old else "pending"
            if job.status in LIVE and was == "pending":
                move.started.append(job)
            elif job.status in FINAL and was not in FINAL:
                move.ended.append(job)
                self.ends[job_id] = job.status
            elif job.status == "running" and was == "running" and job.current.stop_cause and not old.current.stop_cause:
                move.stopped.append(job)
        times = [job.current.started_at for job in move.started if job.current.started_at]
        move.now = min([move.now, *times])
        is_left = any(job_id in former and former[job_id].group != job.group for job_id, job in after.jobs.items())
        if is_left or former.keys() - after.jobs.keys():    # a group without jobs is forgotten, sooner or later
            groups = {job.group for job in after.jobs.values()}
            self.paused_groups &= groups
            self.limits = {group: limit for group, limit in self.limits.items() if group in groups}
        return move

    # What is asked for

    def note(self, method: str, path: str, body: Any, user: str, reply: Any) -> list[str]:
        """Write down a request that was granted; return what the service made of it that it should not have."""
        path, _, query = path.partition("?")
        jobs = self.home.service.store.state.jobs
        if (method, path) == ("POST", "/queue") and isinstance(body, dict):
            return self.note_added(jobs, body, [reply["id"]] if "id" in reply else reply["ids"])
        if (method, path) == ("POST", "/jobs/retry"):
            return self.note_retried(jobs, body, reply["ids"])
        if method == "PATCH" and path.startswith("/queue"):
            ids, change = ([path[7:]], body) if path != "/queue" else (body.get("ids"), body["change"])
            return self.note_change(jobs, ids, change)
        if path in ("/service/pause", "/service/resume"):
            self.note_pause(path.endswith("pause"), query.partition("=")[2])
        if path.startswith("/gpus/"):
            _, _, place, verb = path.split("/")
            act = self.paused_places.add if verb == "pause" else self.paused_places.discard
            for uuid, name, index in list_places(self.home):
                if place in (name, index):
                    act(uuid)
        return []

    def note_pause(self, is_paused: bool, group: str) -> None:
        if not group:
            self.is_paused = is_paused
        elif is_paused:
            self.paused_groups.add(group)
        else:
            self.paused_groups.discard(group)

    def note_added(self, jobs: Any, body: dict[str, Any], ids: Sequence[str]) -> list[str]:
        new = [job_id for job_id in ids if job_id not in self.wishes and job_id in jobs]
        fields = {name: body.get(name, DEFAULTS.get(name)) for name in ASKED}
        if "retries" not in body:           # a setting counts
            del fields["retries"]
        fields.update((name, fields[name].replace(",", " ").split()) for name in ("after", "after_any")
                      if isinstance(fields[name], str))
        begin = re.fullmatch(r"\+(\d+)([sm])", body.get("begin") or "")
        begin_at = self.stepped_at + int(begin[1]) * SECONDS[begin[2]] if begin else 0.0
        is_sure = not body.keys() & {"each", "sweep", "llm", "code"} and (begin is not None or "begin" not in body)
        for job_id in new:
            number = next(self.numbers)
            self.wishes[job_id] = Wish(number, dict(fields), (0, fields["priority"], number), begin_at, is_sure)
        if "max_concurrent" in body and "group" in body:
            self.limits[body["group"]] = body["max_concurrent"] or 0
        return self.list_differences(jobs, new)

    def note_retried(self, jobs: Any, body: Any, ids: Sequence[str]) -> list[str]:
        """A retry has what was asked for of the first job, and the change."""
        change, words = body.get("change") or {}, []
        firsts = {job.retried_as: job for job in jobs.values() if job.retried_as}
        for job_id in ids:
            job, first, number = jobs[job_id], firsts.get(job_id), next(self.numbers)
            fields = {name: getattr(job, name) for name in ASKED}
            former = self.wishes.get(first.id) if first else None
            if former:
                fields.update((name, former.fields[name]) for name in KEPT if name in former.fields)
                words += self.check_parents(jobs, first, job, change)
            fields.update((name, change[name]) for name in ASKED if name in change)
            fields["is_held"] = change.get("is_held", False)
            is_sure = former is not None and former.is_sure and "begin" not in change
            self.wishes[job_id] = Wish(number, fields, (0, job.priority, number), 0.0, is_sure)
            if "max_concurrent" in change and job.group:
                self.limits[job.group] = change["max_concurrent"] or 0
        return words + self.list_differences(jobs, ids)

    def check_parents(self, jobs: Any, first: Job, job: Job, change: Any) -> Iterator[str]:
        """A retry comes after the last retries of those after which the first job came."""
        for name in ("after", "after_any"):
            for parent_id in getattr(first, name) if name not in change else ():
                last = jobs.get(parent_id)
                while last and last.retried_as in jobs:
                    last = jobs[last.retried_as]
                is_left_out = name == "after" and last and last.status in ("failed", "cancelled")
                if last and not is_left_out and last.id not in getattr(job, name):
                    yield f"job {job.id}, a retry of {first.id}, comes {name} {getattr(job, name)}, and not {last.id}"

    def note_change(self, jobs: Any, ids: Sequence[str] | None, change: Any) -> list[str]:
        if ids is None:                     # chosen by something else
            for wish in self.wishes.values():
                wish.is_sure = False
            return []
        for job_id in ids:
            wish = self.wishes.get(job_id)
            if wish is None:
                continue
            wish.fields.update((name, DEFAULTS.get(name) if change[name] is None else change[name])
                               for name in ASKED if name in change)
            wish.is_sure &= "begin" not in change and "node" not in change
            if "priority" in change:
                wish.key = (0, wish.fields["priority"], wish.number)
            group = wish.fields["group"]
            if "max_concurrent" in change and group:
                self.limits[group] = change["max_concurrent"] or 0
        self.move(jobs, [job_id for job_id in ids if job_id in self.wishes], change)
        return self.list_differences(jobs, ids)

    def move(self, jobs: Any, ids: Sequence[str], change: Any) -> None:
        """Put jobs before all others, behind them, or right before another."""
        moved = [self.wishes[job_id] for job_id in ids]
        others = [wish.key for job_id, wish in self.wishes.items()
                  if job_id in jobs and jobs[job_id].status in ("pending", "submitted") and job_id not in ids]
        if change.get("position") == 0:
            rank = min(others or [wish.key for wish in moved])[0]
            for place, wish in enumerate(moved):
                wish.key = (rank - len(moved) + place, 0, 0.0)
        elif change.get("position") == -1:
            rank, priority, _ = max(others or [moved[0].key])
            for wish in moved:
                wish.key = (rank, priority, next(self.numbers))
        elif "before" in change:
            other = self.wishes.get(change["before"])
            if other is None:               # by its name
                for wish in moved:
                    wish.is_sure = False
                return
            rank, priority, end = other.key
            if any(self.wishes[job_id].key[:2] == (rank, priority) for job_id, job in jobs.items()
                   if job_id in self.wishes and job.status in LIVE):
                for wish in moved:          # where one that runs will be, if it waits again, is not said
                    wish.is_sure = False
            begin = max((key[2] for key in others if key[:2] == (rank, priority) and key[2] < end), default=end - 1)
            for place, wish in enumerate(moved, 1):
                wish.key = (rank, priority, begin + (end - begin) * place / (len(moved) + 1))
        else:
            return
        for job_id, wish in zip(ids, moved):
            wish.fields["priority"] = jobs[job_id].priority if job_id in jobs else wish.fields["priority"]

    def list_differences(self, jobs: Any, ids: Sequence[str]) -> list[str]:
        """Where jobs are not as they were asked for."""
        words = []
        groups = {group for job in jobs.values() for group in (job.group, *job.retried_groups)}
        for job_id in ids:
            wish, job = self.wishes.get(job_id), jobs.get(job_id)
            for name, fact in wish.fields.items() if wish and job and wish.is_sure else ():
                shown = getattr(job, name)
                if name in ("after", "after_any"):              # one that was cleared may be left out
                    fact = [parent for parent in fact if parent in jobs or parent in shown]
                elif name in ("after_group", "after_any_group"):        # one without jobs, too, for ever
                    wish.fields[name] = fact = [group for group in fact if group in groups or group in shown]
                if as_value(shown) != as_value(fact):
                    words.append(f"job {job_id} has {name} {shown!r}, and {fact!r} was asked for")
        return words


def list_places(home: Home) -> Iterator[tuple[str, str, str]]:
    """(uuid, what commands call a card, and the card of which it is a slice)"""
    for host in home.world.hosts.values():
        here = "" if host is home.host else f"{host.name}:"
        for card in host.cards:
            yield here.replace(":", "/") + card.uuid, here + card.place, here + str(card.index)


def as_value(fact: Any) -> Any:
    """A list in any order."""
    return sorted({*map(str, fact)}) if isinstance(fact, (list, tuple)) else fact

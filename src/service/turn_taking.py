"""How this service takes turns on the GPUs of this box with the services of other users."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from ..formats.codec import decode_value, encode_json
from ..hosting.events import WATCH_INTERVAL_S
from ..hosting.loop import Component
from ..machine.bids import Bids, FoundBid
from ..machine.disk import find_user, read_json, write_atomic
from ..opening import TYPE_CHECKING
from ..schedule.reasons import Plan
from ..schedule.turns import (
    END_LAG_S,
    Box,
    BoxUser,
    Ledger,
    Patience,
    Turns,
    credit,
    forget_gap,
    merge_bids,
    wait_for_turns,
)
from ..values.bid import Bid, Holding
from ..values.errors import NexusError
from ..values.gpu import Gpu
from ..values.job import Attempt, Job, list_shares
from ..values.text import format_duration, join_some
from ..values.value import Value, replace

if TYPE_CHECKING:
    from ..values.job import Amount, Epoch
    from .service import Service

HEAR_S = 0.05                   # others are not heard more often: several ticks belong to one start
LOOK_S = 0.25                   # how often it is looked for a GPU to end that others have, while jobs wait for it
KEEP_S = 10.0                   # how often the past is written to the disk, at most
LAST_RUNS = 20                   # so many of the last jobs tell how long the next ones will run


class Past(Value):
    """What is kept on the disk of a Ledger."""
    had: Mapping[str, Amount] = {}                      # {uid: GPU seconds}
    contested_at: Epoch = 0.0


class TurnTaking(Component):
    """Tells other users' services what this one wants, hears what they want, and counts what each has had."""

    def __init__(self, service: Service) -> None:
        import collections
        super().__init__(service)
        self.uid, leases = self.machine.uid, self.machine.leases
        self.user = find_user(self.uid)
        self.bids = Bids(self.disk, leases.folder, self.uid, self.clock) if leases else None
        self.box: Box | None = None                     # None: nobody else has a service here now
        self.ledger, self.patience = self.load(), Patience()
        self.own, self.told_at = Bid(), float("-inf")   # the bid as it was told last, and when, monotonic
        # Monotonic: when others were heard, the leases looked at, the past written
        self.heard_at = self.looked_at = self.kept_at = float("-inf")
        self.ended_s = 0.0                              # GPU seconds of the jobs that have ended
        self.runs: collections.deque[float] = collections.deque(maxlen=LAST_RUNS)        # their run times
        self.unnamed: dict[str, float] = {}             # {GPU uuid: since when somebody has it who tells nothing}

    def load(self) -> Ledger:
        """What each user had, as the last service kept it."""
        with contextlib.suppress(TypeError, ValueError, NexusError):
            kept = read_json(self.disk, self.layout.turns_file) or {}
            past = decode_value(Past, kept)
            return Ledger({int(uid): had for uid, had in past.had.items()}, contested_at=past.contested_at)
        return Ledger()

    @property
    def others(self) -> Sequence[BoxUser]:
        """The other users who have services here now: those who have GPUs or wait for them."""
        return [user for user in self.box.users if user.uid != self.uid] if self.box else []

    def find_due_s(self) -> float:
        """Seconds until the leases must be looked at; infinite: nobody waits for what others have."""
        is_waiting = self.service.plan.wants and (self.box or self.service.observer.lease_holders)
        return LOOK_S if is_waiting else float("inf")

    def look(self) -> None:
        """Hear what other users' services want, and see whether they have given GPUs back."""
        if not self.bids:
            return
        now, at = self.clock.now(), self.clock.monotonic()
        if at - self.heard_at < HEAR_S:
            if self.box:
                self.box = replace(self.box, users=(*self.list_users((), now), *self.others), had=self.ledger.had,
                                   resting=frozenset(self.patience.resting))
            return
        self.heard_at, found, former = at, self.bids.look(now), self.others
        if not found and not self.box and not (self.service.plan.wants and self.service.observer.lease_holders):
            self.ledger = replace(self.ledger, users={})    # what is had now counts nowhere
            return
        waiting = {each.uid for each in found if each.bid.wants}
        if any(user.wants and user.uid not in waiting for user in former):
            self.looked_at = float("-inf")      # he may have taken a GPU, which only the leases show
        self.look_at_leases()
        users = self.name_holders(self.list_users(found, now), self.service.gpu_watch.gpus, now)
        names = {self.user, *self.service.observer.lease_holders.values()}
        holders = {user.uid for user in users if user.name in names}
        self.ledger = credit(forget_gap(self.ledger, now), users, now, holders)
        if not self.bids.own:                   # the others do not see what this service has
            self.ledger = replace(self.ledger, users={user.uid: user for user in users if user.uid != self.uid})
        self.box = Box(self.uid, tuple(users), self.ledger.had, frozenset(self.patience.resting)) if found else None
        if not found:                           # who was there has ended, or wants nothing any more
            free = self.patience.left.keys() - self.service.observer.lease_holders.keys()
            self.settle(Turns(), free, [replace(user, wants=()) for user in former])

    def list_users(self, found: Iterable[FoundBid], now: float) -> list[BoxUser]:
        """This service's user, and those of the bids of others."""
        bids = [(self.uid, self.user, self.make_bid(now)), *((each.uid, each.user, each.bid) for each in found)]
        return merge_bids(bids, {gpu.uuid for gpu in self.service.gpu_watch.gpus})

    def look_at_leases(self) -> None:
        """See which GPUs others have now; a reading of what is free there is due at once."""
        at, observer = self.clock.monotonic(), self.service.observer
        if at - self.looked_at < LOOK_S * 0.8 or not observer.observation.gpus:
            return
        self.looked_at = at
        former = observer.lease_holders
        if observer.see_leases(self.service.local.list_own()):
            self.service.gpu_watch.show_gpus()
            if self.service.gpu_worker and former.keys() - observer.lease_holders.keys():
                self.service.gpu_worker.wanted.set()

    def name_holders(self, users: Sequence[BoxUser], gpus: Sequence[Gpu], now: float) -> list[BoxUser]:
        """Count a GPU whose holder tells nothing for the user whose processes are there."""
        told = {holding.uuid for user in users for holding in user.holdings}
        unnamed = {gpu.uuid: gpu for gpu in gpus if gpu.lease_holder and gpu.uuid not in told}
        self.unnamed = {uuid: self.unnamed.get(uuid, now) for uuid in unnamed}
        return [replace(user, holdings=(*user.holdings, *(
            Holding(uuid, 100, self.unnamed[uuid]) for uuid, gpu in unnamed.items()
            if any(process.job_id is None and process.user == user.name for process in gpu.processes))))
            for user in users]

    def make_bid(self, now: float) -> Bid:
        """What this service wants and has."""
        here = [job for job in self.service.local.list_own() if job.gpus]
        ages = [now - (job.current.started_at or now) for job in here]
        holdings = tuple(Holding(uuid, share, job.current.started_at or now) for job in here
                         for uuid, share in zip(job.current.gpu_uuids, list_shares(job)))
        wants = self.service.plan.wants
        run_s = sum(self.runs) / len(self.runs) if self.runs else max([Bid.run_s, *ages])
        leaves = {uuid: uid for uuid, (uid, _) in self.patience.left.items()}
        return Bid(wants, holdings, self.ended_s, run_s, len(here), sum(want.jobs for want in wants), leaves)

    def note_end(self, job: Job, ended: Attempt) -> None:
        """Count what an attempt had.  `job`: as it ran."""
        if job.gpus and not job.current.node and job.current.started_at is not None:
            run_s = max(0.0, self.clock.now() - job.current.started_at)
            if job.current.processes_left is None:      # it may have ended long ago, while no service was here
                run_s = min(run_s, (ended.runtime_seconds or 0.0) + END_LAG_S)
            self.ended_s += sum(list_shares(job)) / 100 * run_s
            self.runs.append(run_s)

    def note_plan(self, planned: Plan) -> None:
        """After a plan: tell others what is still wanted, and see how long GPUs have been left to them."""
        if not self.bids:
            return
        if self.box:
            former = self.patience
            own = {uuid for start in planned.starts for uuid in start.gpu_uuids}        # free until now
            self.settle(planned.turns, own.union(planned.find_free()), self.others)
            self.report(former)
        self.tell(self.clock.now())
        self.keep()

    def settle(self, turns: Turns, free: Container[str], others: Collection[BoxUser]) -> None:
        """Count what was left to others in vain; who vanishes and comes back has not made it undone."""
        if not (self.own.wants or self.service.plan.wants):     # two looks are far apart, and jobs may run in between
            turns, self.patience = Turns(), replace(self.patience, left={}, due={})
        self.patience = wait_for_turns(self.patience, turns, free, self.uid, self.clock.monotonic(), others,
                                       self.service.observer.lease_holders)
        had = {uid: had + self.patience.wasted.get(uid, 0.0) for uid, had in self.ledger.had.items()}
        self.ledger = replace(self.ledger, had=had)

    def tell(self, now: float) -> None:
        """Write the own bid while it concerns somebody: others wait, or jobs of this service do."""
        assert self.bids
        wants, at = self.service.plan.wants, self.clock.monotonic()
        if not wants and not any(user.wants for user in self.others):
            self.bids.withdraw()
            self.own = Bid()
            return
        is_time = at - self.told_at >= WATCH_INTERVAL_S
        if not self.box and (self.own.wants == wants or not is_time):
            return
        bid = self.make_bid(now)
        told = (self.own.wants, self.own.holdings, self.own.leaves)
        if is_time or (bid.wants, bid.holdings, bid.leaves) != told:
            self.own, self.told_at = bid, at
            with contextlib.suppress(OSError, NexusError):          # health tells of a folder that cannot be used
                self.bids.tell(bid)

    def report(self, former: Patience) -> None:
        """Log the turns that are left to others, and those that they have let lapse."""
        assert self.box
        names, places = self.box.names, {gpu.uuid: gpu.place for gpu in self.service.gpu_watch.gpus}
        for uid in dict.fromkeys(uid for uid, _ in self.patience.left.values()):
            new = [places.get(uuid, uuid) for uuid, turn in self.patience.left.items()
                   if turn[0] == uid and former.left.get(uuid) != turn]
            if new:
                gpus = f"GPU {new[0]} is" if len(new) == 1 else f"GPUs {join_some(new)} are"
                self.log.info("%s left to %s, whose turn it is", gpus, names.get(uid, uid))
        for uid, until in self.patience.resting.items():
            if uid not in former.resting:
                self.log.info("%s did not take the turn: none is left to that user for %s", names.get(uid, uid),
                              format_duration(until - self.clock.monotonic()))

    def keep(self, is_end: bool = False) -> None:
        """Write the past, so that the next service knows it."""
        at = self.clock.monotonic()
        if self.ledger.had and (is_end or (self.box and at - self.kept_at >= KEEP_S)):
            self.kept_at = at
            past = Past({str(uid): had for uid, had in self.ledger.had.items()}, self.ledger.contested_at)
            with contextlib.suppress(NexusError):       # of little worth on a full disk
                write_atomic(self.disk, self.layout.turns_file, [encode_json(past)], is_synced=False)

    def end(self) -> None:
        """The service ends: what it wants counts no more."""
        if self.bids:
            self.keep(is_end=True)
            self.bids.withdraw()


"""Whose turn a GPU is, where services of several users share a box without a common one.

Each service computes it for itself, from what all can see: who has which GPU, who waits, and how much each had while
others waited.  As in start-time fair queueing, who has had least comes first, a job counts from its start with the
time that it will take, and who comes late begins where the others are: he is owed nothing, and owes nothing.  Views
may differ for a moment.  That costs a turn that nobody takes, and which lapses.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from ..values.bid import Bid, Holding, Want
from ..values.value import Value, replace

TURN_S = 1.8                    # a GPU is left for so long to whose turn it is; this is looked at each second
SET_S = 30.0                    # a set of several that is complete, likewise
REST_FACTOR = 35                # whoever let a turn lapse gets none for so many times as long as GPUs were left to him
PAUSE_S = 10.0                  # a service that hung for so long wanted nothing meanwhile
FORGET_S = 600.0                # what was had counts no more when nobody has competed for so long
MAX_OWED_RUNS = 20              # nobody is owed more than the time of so many jobs
END_LAG_S = 2.0                 # so late the end of a job may be told
MAX_WANTS = 8                   # of one user, that are looked at
NEWCOMER_S = 0.001                  # among equals the newcomer is first
NEVER = float("-inf")


class BoxUser(Value):
    """A user of this box, with what all services of his tell together."""
    uid: int
    name: str
    wants: tuple[Want, ...] = ()
    holdings: tuple[Holding, ...] = ()
    ended_s: float = 0.0
    run_s: float = 0.0
    running: int = 0
    waiting: int = 0
    leaves: Mapping[str, int] = {}

    @property
    def since(self) -> float:
        return min((want.since for want in self.wants), default=float("inf"))


def merge_bids(bids: Iterable[tuple[int, str, Bid]], here: Container[str]) -> list[BoxUser]:
    """The users of bids, each (uid, user name, bid).  `here`: the GPUs of this box; of others nothing counts."""
    users: dict[int, BoxUser] = {}
    for uid, name, bid in bids:
        user = users.get(uid) or BoxUser(uid, name)
        wants = [want if all(uuid in here for uuid in want.uuids)
                 else replace(want, uuids=tuple(uuid for uuid in want.uuids if uuid in here))
                 for want in bid.wants[:MAX_WANTS]]
        wants = [want for want in wants if want.jobs and 0 < want.gpus <= len(set(want.uuids))]
        holdings = [holding if holding.share <= 100 else replace(holding, share=100)
                    for holding in bid.holdings if holding.uuid in here]
        users[uid] = replace(
            user, wants=(*user.wants, *wants)[:MAX_WANTS], holdings=(*user.holdings, *holdings),
            ended_s=user.ended_s + bid.ended_s, run_s=max(user.run_s, bid.run_s), running=user.running + bid.running,
            waiting=user.waiting + bid.waiting,
            leaves={**user.leaves, **{uuid: owner for uuid, owner in bid.leaves.items() if uuid in here}})
    return list(users.values())


class Ledger(Value):
    """What each user, by uid, had while others waited.  Times are UTC epoch seconds."""
    had: Mapping[int, float] = {}               # GPU seconds, with what newcomers begin with
    users: Mapping[int, BoxUser] = {}           # as they were at the last look
    looked_at: float = 0.0
    contested_at: float = 0.0                   # when several wanted GPUs last
    begin: float = float("-inf")                # with what who comes now begins


def list_competing(users: Iterable[BoxUser]) -> list[BoxUser]:
    return [user for user in users if user.wants]


def credit(ledger: Ledger, users: Sequence[BoxUser], now: float, holders: Container[int] | None = None) -> Ledger:
    """The ledger after another look at the bids.  `holders`: who has GPUs by the leases, whatever they tell; None: all.

    What a user has counts also while none of his jobs waits: else who adds one after the other would have had nothing.
    """
    competing, had = list_competing(users), dict(ledger.had)
    if now - ledger.contested_at > FORGET_S:
        had = {}
    former = ledger.users
    # A service that has just started knows them from the one before.
    before = {user.uid for user in list_competing(former.values()) if user.uid in had} if former else set(had)
    gpus = {holding.uuid for user in users for holding in user.holdings}
    gpus.update(uuid for user in users for want in user.wants for uuid in want.uuids)
    most_s = len(gpus) * (now - ledger.looked_at + END_LAG_S)       # a lie that is not possible counts for no more
    for user in users:
        if user.uid in former and user.uid in had:
            had[user.uid] += min(most_s, find_had_s(former[user.uid], ledger.looked_at, user, now))
    there = [user for user in competing if user.uid in before]
    # Who only waits, for a set or for nothing, is behind: those are where the others are whom jobs run for.
    begins = [had[user.uid] - find_had_since_start_s(user, now) for user in there
              if user.holdings and (holders is None or user.uid in holders)]
    begin = max(ledger.begin, min(begins)) if begins else ledger.begin
    if not had or begin == float("-inf"):
        begin = max((had[user.uid] for user in there), default=max(had.values(), default=0.0))
    first = begin - NEWCOMER_S if there else begin
    for user in competing:
        if user.uid not in before:
            had[user.uid] = max(had.get(user.uid, first), first)
    if competing:
        least = max(had[user.uid] for user in competing) - MAX_OWED_RUNS * max(user.run_s for user in competing)
        had.update({user.uid: max(had[user.uid], least) for user in competing})
    active = [user for user in users if user.wants or user.holdings]
    contested_at = now if competing and len(active) > 1 else ledger.contested_at
    return Ledger(had, {user.uid: user for user in users}, now, contested_at, begin)


def forget_gap(ledger: Ledger, now: float) -> Ledger:
    """The ledger for the next look: after a long pause, as when this service was stopped, nothing is known of that."""
    return ledger if now - ledger.looked_at <= PAUSE_S else replace(ledger, users={})


def find_used_s(user: BoxUser, now: float) -> float:
    """GPU seconds that the jobs of a user have had since his services began to count."""
    return user.ended_s + sum(holding.share / 100 * max(0.0, now - holding.since) for holding in user.holdings)


def find_had_since_start_s(user: BoxUser, now: float) -> float:
    """GPU seconds that a user who has GPUs has had since the last of his jobs began."""
    latest = max(holding.since for holding in user.holdings)
    return sum(holding.share / 100 for holding in user.holdings) * max(0.0, now - latest)


def find_had_s(before: BoxUser, then: float, user: BoxUser, now: float) -> float:
    """GPU seconds that a user had between two looks, by what he tells.

    The end of a job is told a moment later, and corrects what was counted meanwhile, but no more than that.
    """
    gone = {holding.uuid for holding in set(before.holdings).difference(user.holdings)}
    return max(find_used_s(user, now) - find_used_s(before, then), -END_LAG_S * len(gone))


class Turns(Value):
    """Whose turn the GPUs are that are free."""
    owners: Mapping[str, int] = {}              # {GPU uuid: uid}; of others anybody may have it
    sets: frozenset[str] = frozenset()          # those of them that are for a job of several GPUs
    collector: int | None = None                # the uid that collects GPUs for such a job
    wanted: int = 0                             # how many GPUs that job needs
    passed_on: frozenset[str] = frozenset()     # those whose owner leaves them to who rests: he does not know it yet


def find_charge(user: BoxUser, now: float) -> float:
    """GPU seconds that the jobs of a user will have until they end, beyond what they had."""
    return sum(holding.share / 100 * max(0.0, user.run_s - max(0.0, now - holding.since)) for holding in user.holdings)


def may_collect(user: BoxUser, want: Want) -> bool:
    """Whether GPUs are left idle until there are enough for a job: not if it needs one that its user keeps himself."""
    own = {holding.uuid for holding in user.holdings}
    return want.collects and sum(uuid not in own for uuid in want.uuids) >= want.gpus


def whose_turn(users: Sequence[BoxUser], had: Mapping[int, float], free: Iterable[str], now: float,
               resting: Container[int] = ()) -> Turns:
    """Whose turn each of the free GPUs is: one after the other goes to who will have had least.

    A job that needs more GPUs than are free takes none, and its user's next want is looked at; but one that collects
    has those that are there.  `resting`: the uids that have let a turn lapse.
    """
    competing = {user.uid: user for user in list_competing(users) if user.uid not in resting}
    queues = {uid: list(user.wants) for uid, user in competing.items()}
    charges = {uid: had.get(uid, 0.0) + find_charge(user, now) for uid, user in competing.items()}
    # A GPU that few can use goes first, so that the others are left for who can use only those.
    takers = {uuid: sum(any(uuid in want.uuids for want in user.wants) for user in competing.values()) for uuid in free}
    left = sorted(takers, key=lambda uuid: takers[uuid])
    owners, sets, collector, wanted = dict[str, int](), set[str](), None, 0
    while left and any(queues.values()):
        uid = min((uid for uid in queues if queues[uid]), key=lambda uid: (charges[uid], competing[uid].since, uid))
        want = queues[uid].pop(0)
        fitting = [uuid for uuid in left if uuid in want.uuids][:want.gpus]
        if len(fitting) == want.gpus:
            charges[uid] += want.gpus * max(1.0, competing[uid].run_s)
            if want.jobs > 1:
                queues[uid].insert(0, replace(want, jobs=want.jobs - 1))
        elif collector is None and may_collect(competing[uid], want):
            collector, wanted = uid, want.gpus
            queues[uid] = []
        else:
            continue
        owners.update(dict.fromkeys(fitting, uid))
        sets.update(fitting if want.gpus > 1 else ())
        left = [uuid for uuid in left if uuid not in fitting]
    return Turns(owners, frozenset(sets), collector, wanted)


class Patience(Value):
    """Since when GPUs are left to others, and who has let that lapse.  Times are monotonic: the clock may be set."""
    left: Mapping[str, tuple[int, float]] = {}  # {GPU uuid: (whose turn it is, since when)}
    due: Mapping[str, float] = {}               # {a GPU of those that can be taken at once: since when}
    sets: frozenset[str] = frozenset()          # those of them that are for a job of several GPUs
    passed_on: frozenset[str] = frozenset()     # those of them in Turns.passed_on
    resting: Mapping[int, float] = {}           # {uid: until when it gets no turn}
    wasted: Mapping[int, float] = {}            # {uid: GPU seconds that were left to it in vain, now}
    spent: Mapping[int, float] = {}             # {uid: seconds of its turns that ended before it took a GPU}
    looked_at: float = 0.0
    holders: Mapping[str, str] = {}             # {GPU uuid: the user whose nexus has it}, as the leases told then
    took_at: Mapping[int, float] = {}           # {uid: when it was seen to have taken a GPU}


def wait_for_turns(patience: Patience, turns: Turns, free: Container[str], own_uid: int, now: float,
                   users: Collection[BoxUser] = (), holders: Mapping[str, str] = {}) -> Patience:
    """What becomes of the turns that others have.  `free`: the GPUs that nobody has taken yet; `holders`: by leases.

    Whose turns are over again and again before he takes a GPU has let them lapse, too: he withdraws what he wants, or
    tells now this and now that.  But not who has just taken one: of those left to his job of several he needs no more.
    """
    left = dict[str, tuple[int, float]]()
    resting = {uid: until for uid, until in patience.resting.items() if until > now}
    for uuid, uid in turns.owners.items():
        former, since = patience.left.get(uuid, (uid, now))
        if uid != own_uid and uuid in free:
            left[uuid] = (uid, since if former == uid else now)
    due = {uuid: patience.due.get(uuid, now) if since < now else now for uuid, (uid, since) in left.items()
           if uid != turns.collector}
    started = {name for uuid, name in holders.items() if patience.holders.get(uuid) != name}
    took_at = {**patience.took_at, **{user.uid: now for user in users if user.name in started}}
    forgiven_s = (now - patience.looked_at) / REST_FACTOR
    spent = {uid: spent_s - forgiven_s for uid, spent_s in patience.spent.items()
             if spent_s > forgiven_s and took_at.get(uid, NEVER) < now}
    lapsed = find_lapsed(turns, left, due, now)
    vain = find_vain(patience, left, free, {user.uid for user in users if user.wants})
    wasted = {uid: sum(now - since for since in sinces) for uid, sinces in vain.items()}
    for uid, sinces in vain.items():
        if took_at.get(uid, NEVER) < min(sinces):
            spent[uid] = spent.get(uid, 0.0) + min(now - min(sinces), SET_S)
        if spent.get(uid, 0.0) > TURN_S:
            lapsed[uid] = max(lapsed.get(uid, 0.0), spent.pop(uid))
    names = {user.uid: user.name for user in users}
    for uuid in patience.due.keys() - due.keys():           # another has lost patience just before
        uid, at, is_set = patience.left[uuid][0], patience.due[uuid], uuid in patience.sets
        is_lost = is_set or holders.get(uuid, names.get(uid)) != names.get(uid)
        is_lost &= uuid not in patience.passed_on
        if is_lost and took_at.get(uid, NEVER) < at and now - at > (SET_S if is_set else TURN_S) / 2:
            lapsed[uid] = max(lapsed.get(uid, 0.0), now - at)
    for uid, spent_s in lapsed.items():
        resting[uid] = max(resting.get(uid, 0.0), now + REST_FACTOR * spent_s)
    return Patience(left, due, turns.sets & due.keys(), turns.passed_on & due.keys(), resting, wasted, spent, now,
                    holders, took_at)


def find_vain(patience: Patience, left: Mapping[str, tuple[int, float]], free: Container[str],
              wanting: Container[int]) -> dict[int, list[float]]:
    """{uid: since when each GPU was left to it that it did not take: it is free, and no more its turn}

    Of a user who still waits, the time counts from when he could take it: what was only collected was not in vain.
    """
    vain = dict[int, list[float]]()
    for uuid, (uid, since) in patience.left.items():
        at = patience.due.get(uuid) if uid in wanting else since
        is_unused = uuid in free and uuid not in patience.passed_on
        if at is not None and is_unused and left.get(uuid) != (uid, since):
            vain.setdefault(uid, []).append(at)
    return vain


def find_lapsed(turns: Turns, left: Mapping[str, tuple[int, float]], due: Mapping[str, float],
                now: float) -> dict[int, float]:
    """{uid: for how long it has left a turn unused that has lapsed}"""
    lapsed = dict[int, float]()
    for uuid, at in due.items():
        uid, longest_s = left[uuid][0], SET_S if uuid in turns.sets else TURN_S
        if uuid in turns.passed_on:         # who leaves it to another must see that turn lapse first
            longest_s = SET_S + TURN_S
        if now - at > longest_s:
            lapsed[uid] = max(lapsed.get(uid, 0.0), now - at)
    return lapsed


class Box(Value):
    """What plan() knows of the other users of this box."""
    own_uid: int
    users: tuple[BoxUser, ...]                  # with this one
    had: Mapping[int, float] = {}
    resting: frozenset[int] = frozenset()

    @property
    def names(self) -> Mapping[int, str]:
        return {user.uid: user.name for user in self.users}

    def find_turns(self, free: Iterable[str], now: float) -> Turns:
        """Whose turn the free GPUs is.

        Views may differ, and bids tell to whom each leaves a GPU.  Who leaves it does not take it.  This user may take
        what others leave to it: else, while it does not know yet that somebody takes none, it would wait for him alone.
        """
        leaves = self.list_leaves()
        users = [self.drop_left(user, leaves[user.uid]) for user in self.users]
        turns = whose_turn(users, self.had, free, now, self.resting)
        owners = {uuid: uid for uuid, uid in turns.owners.items() if not self.is_given(leaves, uuid, uid)}
        return replace(turns, owners=owners, passed_on=frozenset(
            uuid for uuid, uid in owners.items() if uuid in leaves[uid]))

    def drop_left(self, user: BoxUser, left: Mapping[str, int]) -> BoxUser:
        """Another user without the GPUs that he leaves to those who may take them."""
        gone = {uuid for uuid, other in left.items() if other not in self.resting}
        if user.uid == self.own_uid or not gone:
            return user
        return replace(user, wants=tuple(replace(want, uuids=tuple(uuid for uuid in want.uuids if uuid not in gone))
                                         for want in user.wants))

    def is_given(self, leaves: Mapping[int, Mapping[str, int]], uuid: str, owner: int) -> bool:
        """Whether others leave a GPU to this user, and none to a third, but for whose turn it seems to be.

        For a job of several GPUs it must have all: then one alone is no use.
        """
        wants = {user.uid: [want for want in user.wants if uuid in want.uuids] for user in self.users}
        if owner == self.own_uid or not any(want.gpus == 1 for want in wants[self.own_uid]):
            return False
        others = [uid for uid, fitting in wants.items() if fitting and uid not in (self.own_uid, owner, *self.resting)]
        told = {leaves[uid].get(uuid) for uid in others}
        return self.own_uid in told and told <= {self.own_uid, owner}

    def list_leaves(self) -> dict[int, dict[str, int]]:
        """{uid: {GPU uuid: to whom it is left, who wants it}}, without what two leave to each other.

        There only the one who waits less leaves: else each of two who need several GPUs would have some of them.
        """
        since = {user.uid: (user.since, user.uid) for user in self.users}
        wanted = {(user.uid, uuid) for user in self.users for want in user.wants for uuid in want.uuids}
        leaves = {user.uid: {uuid: other for uuid, other in user.leaves.items() if (other, uuid) in wanted}
                  for user in self.users}
        pairs = {(uid, other) for uid, left in leaves.items() for other in left.values()}
        return {uid: {uuid: other for uuid, other in left.items()
                      if (other, uid) not in pairs or since[uid] > since[other]} for uid, left in leaves.items()}

    def list_waiting(self, now: float) -> list[BoxUser]:
        """The other users who wait, first who will have had least."""
        waiting = [user for user in list_competing(self.users) if user.uid not in (self.own_uid, *self.resting)]
        return sorted(waiting, key=lambda user: self.had.get(user.uid, 0.0) + find_charge(user, now))


# What is told of turns

MAX_ENDS = 50                   # so many are looked ahead


def predict_end(holding: Holding, run_s: float, now: float) -> float:
    """When a GPU may become free; infinite: that is not known.  A job that is over the usual time needs a quarter more.

    A service none of whose jobs has ended yet tells Bid.run_s, or how long the oldest has run.
    """
    age_s = max(0.0, now - holding.since)
    if age_s < run_s != Bid.run_s:
        return now + run_s - age_s
    return now + age_s / 4 if run_s < Bid.run_s else float("inf")


def find_next_turn(box: Box, free: Iterable[str], usable: Container[str] | None,
                   now: float) -> tuple[int, float] | None:
    """(uid, when) of who gets the next GPU, as in predict_end(); None: that cannot be told.

    `free`: those that are free now.  `usable`: which of all GPUs count; None: all.
    """
    ends = sorted((predict_end(holding, user.run_s, now), holding.uuid)
                  for user in box.users for holding in user.holdings)
    there, at, collector = list(free), now, None
    for number in range(min(len(ends), MAX_ENDS) + 1):
        if number:
            at, uuid = ends[number - 1]
            there.append(uuid)
        turns = box.find_turns(there, now)                  # by what all will have had when what runs has ended
        uid = next((owner for uuid, owner in turns.owners.items() if usable is None or uuid in usable), None)
        if uid is not None and uid != turns.collector:      # who collects starts when there are enough
            return uid, at
        collector = collector or uid
    return None if collector is None else (collector, float("inf"))


def suppose_want(box: Box, now: float) -> Box:
    """The box as it would be if this service, which wants nothing, had a job for any one GPU."""
    uuids = {uuid for user in box.users for want in user.wants for uuid in want.uuids}
    want = Want(1, tuple(uuids), 1, now)
    users = [replace(user, wants=(want,)) if user.uid == box.own_uid else user for user in box.users]
    there = [box.had.get(user.uid, 0.0) for user in list_competing(box.users)]
    begin = min(there, default=0.0) - NEWCOMER_S
    return replace(box, users=tuple(users), had={**box.had, box.own_uid: max(box.had.get(box.own_uid, begin), begin)})

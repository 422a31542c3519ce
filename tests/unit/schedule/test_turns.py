"""Whose turn a GPU is: a table of plain cases, and what must hold for any users, jobs, deaths and lies."""

import math
import random

import hypothesis.strategies as st
import pytest
import samples
from hypothesis import given, settings

import nexus

BEGIN = 1000.0
TICK_S = 0.25                       # how often each service looks
NOTICED_S = 3 * TICK_S              # in which what has changed is known to all, and a job starts
CARDS = tuple(f"GPU-{number}" for number in range(4))
ANN, BOB, EVE = 1, 2, 3


def want(gpus=1, jobs=1, since=0.0, collects=False, uuids=CARDS):
    return nexus.Want(gpus, tuple(uuids), jobs, since, collects)


def user(uid, *wants, has=(), since=0.0, run_s=10.0):
    return nexus.BoxUser(uid, f"user {uid}", wants, tuple(nexus.Holding(uuid, 100, since) for uuid in has), run_s=run_s)


CASES = [  # what it is about, users, what each has had, the free GPUs, who rests: whose they are, who collects
    ("nobody wants", [user(ANN), user(BOB)], {}, CARDS, (), {}, None),
    ("who alone wants has them", [user(ANN, want(jobs=2)), user(BOB)], {BOB: 1.0}, CARDS, (), {CARDS[0]: ANN, CARDS[1]: ANN}, None),
    ("who has had least is first", [user(ANN, want(jobs=9)), user(BOB, want())], {ANN: 5.0, BOB: 9.0}, CARDS[:1], (),
     {CARDS[0]: ANN}, None),
    ("who has had nothing yet is before who has had little", [user(ANN, want()), user(BOB, want(since=1.0))], {ANN: 0.5}, CARDS[:1], (),
     {CARDS[0]: BOB}, None),
    ("his jobs that ask for the same are before what he wants next", [user(ANN, want(jobs=2), want(3, collects=True))], {}, CARDS[:2],
     (), {CARDS[0]: ANN, CARDS[1]: ANN}, None),
    ("who is equal and waits longest is first", [user(ANN, want(since=2.0)), user(BOB, want(since=1.0))], {}, CARDS[:1], (),
     {CARDS[0]: BOB}, None),
    ("what runs counts until its end", [user(ANN, want(), has=CARDS[1:2]), user(BOB, want(since=1.0))], {}, CARDS[:1], (),
     {CARDS[0]: BOB}, None),
    ("all that wait may have theirs", [user(ANN, want(jobs=3))], {}, CARDS, (), dict.fromkeys(CARDS[:3], ANN), None),
    ("a job counts for a second at least", [user(ANN, want(jobs=9), run_s=0.1), user(BOB, want())], {BOB: 1.5}, CARDS[:2], (),
     {CARDS[0]: ANN, CARDS[1]: ANN}, None),
    ("each turn counts", [user(ANN, want(jobs=9)), user(BOB, want(jobs=9))], {ANN: 15.0}, CARDS, (),
     {CARDS[0]: BOB, CARDS[1]: BOB, CARDS[2]: ANN, CARDS[3]: BOB}, None),
    ("who let a turn lapse has none", [user(ANN, want()), user(BOB, want())], {BOB: 9.0}, CARDS[:1], (ANN,), {CARDS[0]: BOB}, None),
    ("a GPU that only one can use is for him", [user(ANN, want(jobs=9)), user(BOB, want(uuids=CARDS[:1]))], {BOB: 1.0}, CARDS[:2], (),
     {CARDS[0]: BOB, CARDS[1]: ANN}, None),
    ("what nobody can use is nobody's", [user(ANN, want(uuids=CARDS[1:2]))], {}, CARDS[:1], (), {}, None),
    ("several are a set", [user(ANN, want(2)), user(BOB, want())], {BOB: 1.0}, CARDS[:2], (), {CARDS[0]: ANN, CARDS[1]: ANN}, None),
    ("too few are not kept before reserve_after_seconds", [user(ANN, want(3)), user(BOB, want())], {BOB: 1.0}, CARDS[:2], (),
     {CARDS[0]: BOB}, None),
    ("then they are collected", [user(ANN, want(3, collects=True)), user(BOB, want())], {BOB: 1.0}, CARDS[:2], (),
     {CARDS[0]: ANN, CARDS[1]: ANN}, ANN),
    ("one collects at a time", [user(ANN, want(3, collects=True), has=CARDS[3:]), user(BOB, want(3, collects=True))], {BOB: 1.0},
     CARDS[:2], (), {CARDS[0]: BOB, CARDS[1]: BOB}, BOB),
    ("who has them himself collects none", [user(ANN, want(3, collects=True), has=CARDS[2:]), user(BOB, want(jobs=9))], {BOB: 99.0},
     CARDS[:2], (), {CARDS[0]: BOB, CARDS[1]: BOB}, None),
]


@pytest.mark.parametrize("users, had, free, resting, owners, collector", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_whose_turn(users, had, free, resting, owners, collector):
    turns = nexus.whose_turn(users, had, free, 0.0, resting)
    assert (turns.owners, turns.collector, turns.wanted) == (owners, collector, 3 if collector else 0)


@pytest.mark.parametrize("rows, users", [
    ([(ANN, nexus.Bid((want(jobs=0), want(0), want(5), want(1, uuids=["GPU-x"])), (nexus.Holding("GPU-x", 100, 0.0),)))], [((), ())]),
    ([(ANN, nexus.Bid((want(1, uuids=["GPU-0", "GPU-x"]),)))], [((want(1, uuids=CARDS[:1]),), ())]),
    ([(ANN, nexus.Bid((want(),) * 9)), (ANN, nexus.Bid((), (nexus.Holding("GPU-0", 900, 1.0),))), (BOB, nexus.Bid())],
     [((want(),) * nexus.MAX_WANTS, (nexus.Holding("GPU-0", 100, 1.0),)), ((), ())]),
    ([(ANN, nexus.Bid((), tuple(nexus.Holding("GPU-0", share, 1.0) for share in (50, 100, 101))))],
     [((), tuple(nexus.Holding("GPU-0", share, 1.0) for share in (50, 100, 100)))])],
    ids=["what this box does not have", "what it has of it", "all services of one user are one", "shares, of a GPU at most"])
def test_what_services_tell_is_taken_together(rows, users):
    merged = nexus.merge_bids([(uid, "", bid) for uid, bid in rows], set(CARDS))
    assert [(one.wants, one.holdings) for one in merged] == users


def test_all_services_of_one_user_together_have_what_each_has():
    bids = [nexus.Bid((), (), 5.0, 20.0, 1, 2, {"GPU-0": BOB, "GPU-x": BOB}), nexus.Bid((), (), 7.0, 10.0, 3, 4, {"GPU-1": EVE})]
    assert nexus.merge_bids([(ANN, "ann", bid) for bid in bids], set(CARDS)) == [
        nexus.BoxUser(ANN, "ann", (), (), 12.0, 20.0, 4, 6, {"GPU-0": BOB, "GPU-1": EVE})]
    assert nexus.merge_bids([(ANN, "ann", nexus.Bid(run_s=0.0))], ()) == [nexus.BoxUser(ANN, "ann", (), (), 0.0, 0.0, 0, 0, {})]


HAD = [  # what it is about, the past, users at the last look, users 5 s later, what each has had then
    ("who waits has had what runs", {ANN: 1.0, BOB: 2.0}, [user(ANN, want(), has=CARDS[:2]), user(BOB, want())],
     [user(ANN, want(), has=CARDS[:2]), user(BOB, want())], {ANN: 11.0, BOB: 2.0}),
    ("who adds one after the other has had them", {ANN: 1.0, BOB: 2.0}, [user(ANN, has=CARDS[:1]), user(BOB, want())],
     [user(ANN, has=CARDS[:1]), user(BOB, want())], {ANN: 6.0, BOB: 2.0}),
    ("who comes begins where the others are", {ANN: 8.0}, [user(ANN, want())], [user(ANN, want()), user(BOB, want())],
     {ANN: 8.0, BOB: 8.0 - nexus.NEWCOMER_S}),
    ("who comes back is owed nothing", {ANN: 8.0, BOB: 3.0}, [user(ANN, want()), user(BOB)], [user(ANN, want()), user(BOB, want())],
     {ANN: 8.0, BOB: 8.0 - nexus.NEWCOMER_S}),
    ("who comes back soon has had what he had", {ANN: 3.0, BOB: 8.0}, [user(ANN, want()), user(BOB)],
     [user(ANN, want()), user(BOB, want())], {ANN: 3.0, BOB: 8.0}),
    ("nobody is owed more than some jobs", {ANN: 0.0, BOB: 1000.0}, [user(ANN, want()), user(BOB, want())],
     [user(ANN, want()), user(BOB, want())], {ANN: 1000.0 - 10.0 * nexus.MAX_OWED_RUNS, BOB: 1000.0}),
]


@pytest.mark.parametrize("had, former, users, then", [case[1:] for case in HAD], ids=[case[0] for case in HAD])
def test_what_each_has_had(had, former, users, then):
    ledger = nexus.Ledger(had, {one.uid: one for one in former}, BEGIN, BEGIN)
    assert nexus.credit(ledger, users, BEGIN + 5).had == then


def test_the_first_of_all_have_had_nothing():
    assert nexus.credit(nexus.Ledger(), [user(ANN, want()), user(BOB, want()), user(EVE)], BEGIN).had == {ANN: 0.0, BOB: 0.0}


def test_who_only_says_that_he_has_gpus_sets_no_begin():
    """Else a newcomer would come before all who are there."""
    there = [nexus.replace(user(uid, want()), holdings=(nexus.Holding(card, 100, since),))
             for uid, card, since in ((ANN, CARDS[0], BEGIN), (EVE, CARDS[1], 0.0))]
    ledger = nexus.Ledger({ANN: 50.0, EVE: 40.0}, {one.uid: one for one in there}, BEGIN, BEGIN)
    had = [nexus.credit(ledger, [*there, user(BOB, want())], BEGIN + 1, holders).had[BOB] for holders in (None, {ANN})]
    assert had[0] < 0 and had[1] == 50.0 - nexus.NEWCOMER_S


def test_who_comes_when_a_job_has_just_begun_begins_before_it():
    """What it will take is the other's turn already."""
    there = user(ANN, want(), has=CARDS[:1], since=BEGIN + 1)
    ledger = nexus.Ledger({ANN: 50.0}, {ANN: user(ANN, want())}, BEGIN, BEGIN)
    assert nexus.credit(ledger, [there, user(BOB, want())], BEGIN + 1).had == {ANN: 50.0, BOB: 50.0 - 0.001}


def test_who_comes_while_nothing_runs_begins_where_who_came_before_did():
    there = [user(ANN, want(), has=CARDS[:1], since=BEGIN - 2), user(BOB, want(), has=CARDS[1:2], since=BEGIN - 2)]
    ledger = nexus.Ledger({ANN: 50.0, BOB: 70.0}, {one.uid: one for one in there}, BEGIN, BEGIN)
    ledger = nexus.credit(ledger, there, BEGIN + 1)
    assert ledger.begin == 51.0 - 3.0
    between = [user(ANN, want()), user(BOB, want())]            # their jobs have just ended
    for now in (BEGIN + 1, BEGIN + 2):
        ledger = nexus.credit(nexus.replace(ledger, users={one.uid: one for one in between}), [*between, user(EVE, want())], now)
        assert ledger.begin == 48.0 and ledger.had[EVE] == 48.0 - nexus.NEWCOMER_S
    assert nexus.credit(ledger, [user(ANN), user(BOB)], BEGIN + 3).begin == 48.0


def test_of_the_time_when_this_service_was_stopped_nothing_is_known():
    users = [user(ANN, want(), has=CARDS[:2]), user(BOB, want())]
    ledger = nexus.Ledger({ANN: 1.0, BOB: 2.0}, {one.uid: one for one in users}, BEGIN, BEGIN)
    at = BEGIN + nexus.PAUSE_S + 1
    assert nexus.credit(nexus.forget_gap(ledger, at), users, at).had == {ANN: 1.0, BOB: 2.0}


@pytest.mark.parametrize("leaves, turn", [          # of uid 77 there is no user
    ({}, BOB), ({BOB: EVE}, ANN), ({BOB: ANN}, ANN), ({BOB: EVE, EVE: ANN}, ANN), ({BOB: EVE, EVE: BOB}, BOB),
    ({BOB: 77}, BOB), ({BOB: BOB}, BOB),
    ({EVE: BOB}, BOB), ({EVE: ANN}, None), ({EVE: ANN, 4: BOB}, None), ({EVE: ANN, 4: EVE}, BOB), ({EVE: ANN, 4: 77}, BOB)])
def test_who_leaves_a_gpu_to_somebody_does_not_take_it(leaves, turn):
    """Views differ.  To whom others leave it, but for who seems to have the turn, may take it."""
    users = [nexus.replace(user(uid, want()), leaves={CARDS[0]: leaves[uid]} if uid in leaves else {})
             for uid in dict.fromkeys((ANN, BOB, EVE, *leaves))]
    box = nexus.Box(ANN, tuple(users), {ANN: 2.0, BOB: 1.0, EVE: 3.0, 4: 4.0})
    assert box.find_turns(CARDS[:1], 0.0).owners.get(CARDS[0]) == turn


def test_who_leaves_a_gpu_to_who_rests_does_not_know_it_yet():
    """It is his turn nevertheless, but if he does not take it, he has not let it lapse."""
    users = [nexus.replace(user(uid, want()), leaves={CARDS[0]: EVE} if uid == BOB else {}) for uid in (ANN, BOB, EVE)]
    turns = nexus.Box(ANN, tuple(users), {ANN: 2.0, BOB: 1.0, EVE: 0.0}, frozenset({EVE})).find_turns(CARDS[:1], 0.0)
    assert (turns.owners, turns.passed_on) == ({CARDS[0]: BOB}, {CARDS[0]})


def test_who_wants_other_gpus_has_no_say_in_who_gets_this_one():
    users = [user(ANN, want()), user(BOB, want()), nexus.replace(user(EVE, want()), leaves={CARDS[0]: ANN}),
             user(4, want(uuids=CARDS[1:2]))]
    assert nexus.Box(ANN, tuple(users), {ANN: 2.0, BOB: 1.0}).find_turns(CARDS[:1], 0.0).owners == {}


def test_who_leaves_one_gpu_to_somebody_may_have_the_others():
    users = [nexus.replace(user(BOB, want(jobs=9)), leaves={CARDS[0]: EVE}), user(ANN), user(EVE, want())]
    turns = nexus.Box(ANN, tuple(users), {BOB: 1.0, EVE: 9.0}).find_turns(CARDS[:2], 0.0)
    assert turns.owners == {CARDS[0]: EVE, CARDS[1]: BOB}


def test_who_waits_is_told_in_the_order_of_what_each_will_have_had():
    users = [user(ANN, want()), user(BOB, want(), has=CARDS[:1], since=0.0), user(EVE, want()), user(4, want()), user(5)]
    box = nexus.Box(ANN, tuple(users), {BOB: 1.0, EVE: 9.0}, frozenset({4}))
    assert [one.uid for one in box.list_waiting(0.0)] == [EVE, BOB] and [one.uid for one in box.list_waiting(9.0)] == [BOB, EVE]
    assert [one.uid for one in nexus.replace(box, had={BOB: 0.5}).list_waiting(99.0)] == [EVE, BOB]


def test_what_runs_is_charged_until_it_ends_as_such_jobs_do():
    one = nexus.replace(user(BOB), holdings=(nexus.Holding(CARDS[0], 100, 0.0), nexus.Holding(CARDS[1], 50, 2.0)))
    assert [nexus.find_charge(one, now) for now in (-99.0, 0.0, 0.5, 4.0, 9.5, 11.0, 99.0)] == [15.0, 15.0, 14.5, 10.0, 1.75, 0.5, 0.0]


def test_whoever_would_come_now_would_be_the_first_of_equals():
    """For a GPU of those that others want; who has had more is later than they."""
    users = (user(ANN), user(BOB, want(uuids=CARDS[:2])), user(EVE, want(uuids=CARDS[1:3])), user(4))
    for had, then in (({BOB: 9.0, EVE: 8.0, 4: 1.0}, 8.0 - 0.001), ({ANN: 3.0, EVE: 8.0}, 3.0), ({ANN: -9.0}, -0.001)):
        box = nexus.suppose_want(nexus.Box(ANN, users, had), BEGIN)
        own, *others = box.users
        assert [(one.gpus, {*one.uuids}, one.jobs, one.since) for one in own.wants] == [(1, {*CARDS[:3]}, 1, BEGIN)]
        assert tuple(others) == users[1:] and box.had == {**had, ANN: then}
    alone = nexus.suppose_want(nexus.Box(ANN, (user(ANN), user(BOB, has=CARDS[:1])), {BOB: 9.0}), BEGIN)
    assert nexus.find_next_turn(alone, CARDS[1:], None, BEGIN) is None and alone.had[ANN] == -nexus.NEWCOMER_S


def test_two_who_need_several_gpus_never_block_each_other():
    """Each thinks that it is the other's turn, and has noticed of some GPUs that the other leaves them: who waits longer has all."""
    four, had = CARDS[:4], {ANN: 1.0, BOB: 2.0}
    ann = nexus.replace(user(ANN, want(4, since=1.0)), leaves={four[0]: BOB})
    bob = nexus.replace(user(BOB, want(4, since=2.0)), leaves=dict.fromkeys(four[1:], ANN))
    for own in (BOB, EVE):
        assert nexus.Box(own, (ann, bob, user(EVE)), had).find_turns(four, 0.0).owners == dict.fromkeys(four, ANN)
    bob = nexus.replace(bob, leaves=dict.fromkeys(four, ANN))           # as he has seen
    assert nexus.Box(ANN, (ann, bob), {ANN: 2.0, BOB: 1.0}).find_turns(four, 0.0).owners == dict.fromkeys(four, ANN)


class Player:
    """A user whose service sees the others' bids as they were told last."""

    def __init__(self, uid, lengths, gpus=1, comes_at=0.0, jobs=10**6, pause_s=0.0, lie=None):
        self.uid, self.lengths, self.gpus, self.jobs, self.pause_s, self.lie = uid, lengths, gpus, jobs, pause_s, lie
        self.comes_at = comes_at
        # running: {GPUs: (since, until)}
        self.rnd, self.ledger, self.patience = random.Random(uid), nexus.Ledger(), nexus.Patience()
        self.running, self.since, self.had_s, self.ended_s, self.runs = {}, None, 0.0, 0.0, []
        self.bid, self.is_dead, self.starts, self.next_at = nexus.Bid(), False, [], BEGIN + comes_at

    def make_bid(self, now, reserve_s):
        if self.lie:
            return self.lie(now)
        if self.since is None and self.jobs and now >= self.next_at:
            self.since = now
        wants = (want(self.gpus, self.jobs, self.since, now - self.since >= reserve_s, self.box.cards),) if self.since is not None else ()
        held = tuple(nexus.Holding(uuid, 100, since) for uuids, (since, _) in self.running.items() for uuid in uuids)
        return nexus.Bid(wants, held, self.ended_s, sum(self.runs[-20:]) / len(self.runs[-20:]) if self.runs else 60.0, 0, self.jobs,
                         {uuid: uid for uuid, (uid, _) in self.patience.left.items()})

    def end_jobs(self, now):
        for uuids, (since, until) in list(self.running.items()):
            if now >= until:
                del self.running[uuids]
                self.ended_s += (now - since) * len(uuids)
                self.runs.append(now - since)
                self.box.ends.append((now, self.uid))

    def look(self, now, free):
        """What TurnTaking and plan() do; return the GPUs on which a job starts."""
        bids = [(one.uid, str(one.uid), one.bid if one is not self else self.make_bid(now, self.box.reserve_s)) for one in self.box.players
                if one.bid != nexus.Bid() or one is self]
        users = nexus.merge_bids(bids, set(self.box.cards))
        self.ledger = nexus.credit(nexus.forget_gap(self.ledger, now), users, now, {one.uid for one in self.box.players if one.running})
        turns = nexus.Box(self.uid, tuple(users), self.ledger.had, frozenset(self.patience.resting)).find_turns(free, now)
        holders = {uuid: str(one.uid) for one in self.box.players for uuids in one.running for uuid in uuids}
        self.patience = nexus.wait_for_turns(self.patience, turns, free, self.uid, now, [user for user in users if user.uid != self.uid],
                                             holders)
        wasted = self.patience.wasted
        self.ledger = nexus.replace(self.ledger, had={uid: had + wasted.get(uid, 0.0) for uid, had in self.ledger.had.items()})
        open_to_me = [uuid for uuid in free if turns.owners.get(uuid, self.uid) == self.uid]
        while self.since is not None and len(open_to_me) >= self.gpus:
            chosen, open_to_me = tuple(open_to_me[:self.gpus]), open_to_me[self.gpus:]
            self.running[chosen] = (now, now + self.rnd.uniform(*self.lengths))
            self.starts.append((self.since, now))
            self.jobs -= 1
            self.next_at = now + self.pause_s
            self.since = now if self.jobs and not self.pause_s else None
            free = [uuid for uuid in free if uuid not in chosen]
        return free


class Box:
    """Some GPUs, and players who take turns on them."""

    def __init__(self, count, players, reserve_s=1.0, deaths=()):
        self.cards, self.players, self.reserve_s, self.deaths = CARDS[:count], players, reserve_s, dict(deaths)
        self.ends, self.unused_s, self.worst_s, self.wanted_s = [], dict.fromkeys(self.cards, 0.0), 0.0, 0.0
        self.lost = []              # (when, which GPU, for how long) somebody wanted it and nobody had it
        for player in players:
            player.box = self

    def run(self, seconds, each_tick=lambda now: None):
        rnd = random.Random(0)
        for number in range(int(seconds / TICK_S)):
            now = BEGIN + number * TICK_S
            for player in self.players:
                player.had_s += TICK_S * sum(map(len, player.running))
                player.end_jobs(now)
                begin, end, is_stopped = self.deaths.get(player.uid, (0.0, 0.0, False))
                player.is_dead = begin <= now - BEGIN < end
                if player.is_dead and not is_stopped:           # the next service knows what each had
                    player.ledger = nexus.Ledger(player.ledger.had, contested_at=player.ledger.contested_at)
                    player.patience = nexus.Patience()
                player.bid = nexus.Bid() if player.is_dead else player.make_bid(now, self.reserve_s)
            held = {uuid for player in self.players for uuids in player.running for uuid in uuids}
            free = [uuid for uuid in self.cards if uuid not in held]
            for player in rnd.sample(self.players, len(self.players)):
                if not player.is_dead and not player.lie:
                    free = player.look(now, free)
            wanted = [player for player in self.players if player.since is not None and not player.is_dead and player.gpus == 1]
            for uuid in self.cards:
                self.unused_s[uuid] = self.unused_s[uuid] + TICK_S if uuid in free and wanted else 0.0
                if self.unused_s[uuid] > NOTICED_S:
                    self.lost.append((now, uuid, TICK_S))
            self.worst_s = max(self.worst_s, *self.unused_s.values())
            each_tick(now - BEGIN)
        return self

    def find_most_lost_s(self):
        """Of one GPU, in one minute."""
        return max((sum(lost for at, one, lost in self.lost if one == uuid and end - 60 < at <= end) for end, uuid, _ in self.lost),
                   default=0.0)


lengths = st.sampled_from([(1.0, 1.0), (2.0, 4.0), (5.0, 5.0), (1.0, 8.0)])
few = settings(max_examples=samples.count(4, 200), deadline=None)


def find_excess(players, count, begin, longest_s, **facts):
    """By how much two users differ by more than a tenth, or one longest job, at a moment after twenty such times since `begin`."""
    before, most = {}, [-math.inf]

    def see(at):
        if at <= begin:
            before.update({player: player.had_s for player in players})
        elif at >= begin + 20 * longest_s:
            had = [player.had_s - before[player] for player in players]
            most.append(max(had) - min(had) - max(0.1 * max(had), longest_s))

    box = Box(count, players, **facts).run(begin + 24 * longest_s + 5, see)
    assert box.worst_s <= NOTICED_S
    return max(most)


@few
@given(st.integers(1, 4), st.lists(lengths, min_size=2, max_size=4))
def test_who_compete_have_equal_shares(count, rows):
    """How long a job will take is not known: where somebody has several at once, that may make a job more."""
    longest_s = max(row[1] for row in rows)
    excess_s = find_excess([Player(uid, row) for uid, row in enumerate(rows, 1)], count, 0.0, longest_s)
    assert excess_s <= 4 * TICK_S + (longest_s if count > 1 else 0.0)


@few
@given(st.integers(1, 4), st.lists(lengths, min_size=2, max_size=3), lengths, st.sampled_from([7.0, 31.0]))
def test_who_comes_late_has_an_equal_share_from_then_on(count, rows, own, comes_at):
    """As in start-time fair queueing: who was there is ahead or behind by a job when he comes, and again at any later moment."""
    longest_s = max(row[1] for row in [*rows, own])
    players = [Player(9, own, comes_at=comes_at), *(Player(uid, row) for uid, row in enumerate(rows, 1))]
    assert find_excess(players, count, comes_at + 1, longest_s) <= 4 * TICK_S + longest_s * (2 if count > 1 else 1)


@few
@given(st.integers(1, 4), lengths, lengths, st.floats(2.0, 40.0))
def test_who_comes_for_one_gpu_starts_after_the_next_end(count, own, others, comes_at):
    late = Player(ANN, own, comes_at=comes_at, jobs=1)
    box = Box(count, [late, Player(BOB, others)]).run(comes_at + 20)
    (since, began), = late.starts
    end = next(at for at, uid in box.ends if at > since + NOTICED_S)
    assert began - end <= NOTICED_S


@few
@given(lengths, st.floats(1.2, 3.0), st.integers(1, 3))
def test_who_wants_less_has_what_he_wants(own, factor, others):
    """A job at a time, and pauses: at most so much as his share.  He waits for the next end, or one more of each other."""
    light = Player(9, own, pause_s=factor * (others + 1) * own[1])
    box = Box(1, [light, *(Player(uid, (2.0, 4.0)) for uid in range(1, others + 1))]).run(400)
    assert len(light.starts) > 3
    for since, began in light.starts:
        assert sum(since < at < began - NOTICED_S for at, uid in box.ends if uid != 9) <= others


@few
@given(st.integers(2, 4), st.lists(lengths, min_size=1, max_size=3), st.data())
def test_large_jobs_come(count, rows, data):
    """One of several GPUs at a time, beside others who always have jobs of one."""
    gpus = data.draw(st.integers(2, count))
    large = [Player(9, (2.0, 3.0), gpus, pause_s=20.0), Player(8, (2.0, 3.0), gpus, pause_s=20.0)][:data.draw(st.integers(1, 2))]
    longest_s = max(row[1] for row in rows)
    Box(count, [*large, *(Player(uid, row) for uid, row in enumerate(rows, 1))]).run(150)
    for player in large:
        assert len(player.starts) >= 3
        assert max(began - since for since, began in player.starts) <= 1.0 + len(large) * (longest_s + 3.0 + 2 * NOTICED_S)


@pytest.mark.parametrize("name", ["it wants without end", "it collects", "it has it all", "it comes and goes", "it leaves them to others"])
@few
@given(st.integers(1, 4), st.lists(lengths, min_size=1, max_size=3), st.floats(0.0, 1e9))
def test_who_lies_costs_others_little(name, count, rows, run_s):
    cards = CARDS[:count]

    def lie(now):
        holdings = tuple(nexus.Holding(uuid, 100, now - now % 1) for uuid in cards) if name == "it has it all" else ()
        if name == "it comes and goes" and now % 4 < 1:
            return nexus.Bid()
        wants = want(count, 9, 0.0, True, cards) if name == "it collects" else want(1, 10**6, 0.0, True, cards)
        leaves = dict.fromkeys(cards, int(now) % 5) if name == "it leaves them to others" else {}        # whether there are such
        return nexus.Bid((wants,), holdings, 0.0, run_s, 0, 10**6, leaves)

    players = [Player(uid, row) for uid, row in enumerate(rows, 1)]
    box = Box(count, [*players, Player(99, (1, 1), lie=lie)]).run(200)
    had = [player.had_s for player in players]
    assert max(had) - min(had) <= max(0.1 * max(had), 8.0) + 8.0, had
    lost = sum(lost for *_, lost in box.lost)
    if name == "it collects":       # what is left to him is his share
        assert lost <= 200 * count / (len(players) + 1) + 60
    else:
        assert box.find_most_lost_s() <= 3.0 + NOTICED_S


@few
@given(st.integers(1, 4), st.lists(lengths, min_size=2, max_size=3), st.floats(5.0, 50.0), st.floats(1.0, 60.0), st.booleans())
def test_who_dies_or_is_stopped_costs_nothing_and_has_his_share_again(count, rows, dies_at, for_s, is_stopped):
    players, for_s = [Player(uid, row) for uid, row in enumerate(rows, 1)], for_s + 10 * is_stopped
    longest_s, back_at = max(row[1] for row in rows), dies_at + for_s
    rests_s = nexus.REST_FACTOR * 2 * nexus.TURN_S if is_stopped else 0.0           # it has let a turn lapse
    excess_s = find_excess(players, count, back_at + rests_s + 1, longest_s, deaths={1: (dies_at, back_at, is_stopped)})
    assert excess_s <= 4 * TICK_S + longest_s * (2 if count > 1 else 1)

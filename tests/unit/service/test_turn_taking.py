"""How a service takes turns with those of other users: what it keeps, what it leaves, what it says."""

import json
import os
import pathlib
import threading
import types

import pytest
from makers import NOW, foreign, gpu, running
from turns import ANN as CALLER

import nexus

ANN, BOB, EVE = 1001, 1002, 1003
WANTS_ONE = (nexus.Want(1, ("GPU-0",), 3, NOW - 9),)
BOB_WAITS = [nexus.BoxUser(BOB, "bob", WANTS_ONE)]


def make_box(had, *bids, own=ANN):
    return nexus.Box(own, tuple(nexus.merge_bids(bids, {"GPU-0", "GPU-1"})), had)


VIEWS = [  # reason, what bob says that he leaves, whose turn GPU 0 is as ann's service sees it
    ("it is bob's turn", {}, BOB),
    ("each would wait for the other", {"GPU-0": ANN}, ANN),
    ("he leaves another one", {"GPU-1": ANN}, BOB),
    ("he leaves it to somebody else", {"GPU-0": 1003}, BOB),
]


@pytest.mark.parametrize("reason, leaves, turn", VIEWS, ids=[case[0] for case in VIEWS])
def test_two_who_leave_a_gpu_to_each_other_may_both_take_it(reason, leaves, turn):
    box = make_box({ANN: 2.0, BOB: 1.0}, (ANN, "ann", nexus.Bid(WANTS_ONE)), (BOB, "bob", nexus.Bid(WANTS_ONE, leaves=leaves)))
    assert box.find_turns(["GPU-0"], NOW).owners.get("GPU-0") == turn, reason


def test_what_this_service_says_that_it_leaves_changes_nothing_here():
    box = make_box({ANN: 2.0, BOB: 1.0}, (ANN, "ann", nexus.Bid(WANTS_ONE, leaves={"GPU-0": BOB})), (BOB, "bob", nexus.Bid(WANTS_ONE)))
    assert box.find_turns(["GPU-0"], NOW).owners == {"GPU-0": BOB}


LIES = [  # reason, the bids of bob, a second apart; what he has had by then, from and to
    ("much", [nexus.Bid(WANTS_ONE, ended_s=end_s) for end_s in (0.0, 1e15, -1e9, 1e15)], 3.0, 10.0),
    ("jobs that began long ago", [nexus.Bid(WANTS_ONE), nexus.Bid(WANTS_ONE, (nexus.Holding("GPU-0", 100, 0.0),))], 0.0, 10.0),
    ("less, as often as he has claimed jobs", [
        nexus.Bid(WANTS_ONE, tuple(nexus.Holding("GPU-0", 1, NOW + number) for number in range(count)), ended_s=-500.0 * step)
        for step, count in enumerate((100, 0, 100, 0))], -5.0, 0.0),
]


@pytest.mark.parametrize("reason, bids, least, most", LIES, ids=[case[0] for case in LIES])
def test_what_cannot_be_counts_for_little(reason, bids, least, most):
    """Else it would count for long, and nothing that is true would be seen beside it."""
    ledger = nexus.Ledger()
    for step, bid in enumerate(bids):
        users = nexus.merge_bids([(ANN, "ann", nexus.Bid(WANTS_ONE)), (BOB, "bob", bid)], {"GPU-0"})
        ledger = nexus.credit(ledger, users, NOW + step)
    assert least <= ledger.had[BOB] <= most, reason


def play(steps, wants_after=(), free_after=("GPU-0",), holders_after=None):
    """Who rests after a GPU was left to bob, each time for so many seconds, and then no more, when he wants `wants_after`."""
    patience, now, rests = nexus.Patience(), 1000.0, []
    for left_s, pause_s in steps:
        for turns, wants, free, holders, passed_s in (
                (nexus.Turns({"GPU-0": BOB}), WANTS_ONE, ("GPU-0",), {}, left_s),
                (nexus.Turns(), wants_after, free_after, holders_after or {}, pause_s)):
            patience = nexus.wait_for_turns(patience, turns, free, ANN, now, [nexus.BoxUser(BOB, "bob", wants)], holders)
            rests.append(BOB in patience.resting)
            now += passed_s
    return rests


LAPSES = [  # reason, what is left to bob, the GPUs of his leases after it, what he wants at last, whether he rests then
    ("he takes none, and wants no more", {}, {}, (), True),
    ("he took the others that his job needed", {}, {"GPU-1": "bob"}, (), False),
    ("somebody else took one", {}, {"GPU-1": "eve"}, (), True),
    ("he wants it, and does not take it", {}, {}, WANTS_ONE, True),
    ("he leaves it to another: that turn must lapse first", {"passed_on": frozenset({"GPU-0"})}, {}, WANTS_ONE, False),
    ("he left it to another, and wants no more", {"passed_on": frozenset({"GPU-0"})}, {}, (), False),
    ("of a whole set he has more time", {"sets": frozenset({"GPU-0"})}, {}, WANTS_ONE, False),
    ("he collects", {"collector": BOB}, {}, WANTS_ONE, False)]


@pytest.mark.parametrize("reason, facts, holders, wants, rests", LAPSES, ids=[case[0] for case in LAPSES])
def test_when_a_turn_has_lapsed(reason, facts, holders, wants, rests):
    patience, turns = nexus.Patience(), nexus.Turns({"GPU-0": BOB}, **facts)
    for at, leases, then, now_wants in ((0.0, {}, turns, WANTS_ONE), (2.0, holders, turns if wants else nexus.Turns(), wants)):
        patience = nexus.wait_for_turns(patience, then, {"GPU-0"}, ANN, 1000.0 + at, [nexus.BoxUser(BOB, "bob", now_wants)], leases)
    assert patience.resting == ({BOB: 1002.0 + 35 * 2.0} if rests else {}), "so that he costs others at most 3 s a minute"


def test_a_turn_may_take_its_time_and_begins_when_another_has_had_his():
    bob, eve = (nexus.BoxUser(uid, name, WANTS_ONE) for uid, name in ((BOB, "bob"), (EVE, "eve")))
    for looks in ([(0.0, BOB), (nexus.TURN_S, BOB)], [(0.0, BOB), (nexus.TURN_S, ANN)], [(0.0, BOB), (1.0, EVE), (2.5, EVE)]):
        patience = nexus.Patience()
        for now, uid in looks:
            patience = nexus.wait_for_turns(patience, nexus.Turns({"GPU-0": uid}), {"GPU-0"}, ANN, now, [bob, eve])
        assert not patience.resting


def test_who_rests_has_turns_again_after_that_time():
    patience = nexus.Patience(resting={BOB: 70.0, EVE: 80.0})
    for now, resting in ((69.9, {BOB: 70.0, EVE: 80.0}), (70.0, {EVE: 80.0}), (99.0, {})):
        patience = nexus.wait_for_turns(patience, nexus.Turns(), (), ANN, now)
        assert patience.resting == resting


@pytest.mark.parametrize("before, then, spent", [((), ("GPU-1",), {}), (("GPU-1",), ("GPU-1",), {BOB: 1.0}), ((), (), {BOB: 1.0})],
                         ids=["he takes another just then", "he has had another for long", "he has none"])
def test_who_took_a_gpu_when_another_became_his_turn_did_not_waste_that(before, then, spent):
    """His job of several GPUs may need no more."""
    patience = nexus.Patience(holders=dict.fromkeys(before, "bob"))
    for now, turns in ((64.0, nexus.Turns({"GPU-0": BOB})), (65.0, nexus.Turns())):
        patience = nexus.wait_for_turns(patience, turns, {"GPU-0"}, ANN, now, BOB_WAITS, dict.fromkeys(then, "bob"))
    assert patience.spent == spent


def test_who_has_just_taken_one_of_a_set_may_lose_the_others():
    turns = nexus.Turns(dict.fromkeys(("GPU-0", "GPU-1"), BOB), BOTH)
    for taken, resting in (({"GPU-2": "bob"}, []), ({}, [BOB])):
        patience = nexus.wait_for_turns(nexus.Patience(), turns, BOTH, ANN, 64.0, BOB_WAITS, taken)
        patience = nexus.wait_for_turns(patience, nexus.Turns(), (), ANN, 64.0 + 16.0, BOB_WAITS, {**taken, "GPU-0": "eve", "GPU-1": "eve"})
        assert [*patience.resting] == resting


def test_whoever_takes_a_gpu_has_made_good_what_he_let_pass():
    patience = nexus.Patience(spent={BOB: 1.5, EVE: 1.5}, looked_at=64.0)
    patience = nexus.wait_for_turns(patience, nexus.Turns(), (), ANN, 64.0, BOB_WAITS, {"GPU-0": "bob"})
    assert patience.spent == {EVE: 1.5}


def test_left_are_the_gpus_that_nobody_has_taken_to_others():
    turns = nexus.Turns({"GPU-0": BOB, "GPU-1": ANN, "GPU-2": BOB})
    assert nexus.wait_for_turns(nexus.Patience(), turns, {"GPU-1", "GPU-2"}, ANN, 64.0).left == {"GPU-2": (BOB, 64.0)}


def test_whose_turn_another_took_who_lost_patience_just_before_rests_for_as_long():
    """In half the time nobody has lost patience."""
    for taken_at, resting in ((64.9375, {BOB: 64.9375 + 35 * 0.9375}), (64.7, {})):
        patience = nexus.wait_for_turns(nexus.Patience(), nexus.Turns({"GPU-0": BOB}), {"GPU-0"}, ANN, 64.0, BOB_WAITS)
        patience = nexus.wait_for_turns(patience, nexus.Turns(), (), ANN, taken_at, BOB_WAITS, {"GPU-0": "eve"})
        assert patience.resting == resting


BOTH, ONE = frozenset({"GPU-0", "GPU-1"}), frozenset({"GPU-1"})
COLLECTS = nexus.Turns({"GPU-0": BOB}, collector=BOB)
COMPLETE = nexus.Turns(dict.fromkeys(BOTH, BOB), BOTH)
LEFT = nexus.Turns({"GPU-1": BOB}, collector=BOB)
SETS = [  # reason, (when, the turns, what is free, the leases) of each look, whether bob rests then
    ("it is complete for a moment, after long", [(0, COLLECTS, BOTH, {}), (40, COMPLETE, BOTH, {}), (41, COMPLETE, BOTH, {})], False),
    ("it is complete for long", [(0, COLLECTS, BOTH, {}), (40, COMPLETE, BOTH, {}), (71, COMPLETE, BOTH, {})], True),
    ("another has lost patience", [(0, COMPLETE, BOTH, {}), (29, LEFT, ONE, {"GPU-0": "eve"})], True),
    ("another takes some at once, as one who knows no turns", [(0, COMPLETE, BOTH, {}), (1, LEFT, ONE, {"GPU-0": "eve"})], False),
    ("he left it to another, and a third takes some", [
        (0, nexus.replace(COMPLETE, passed_on=BOTH), BOTH, {}), (29, LEFT, ONE, {"GPU-0": "eve"})], False),
    ("he leaves it to another for longer than a set may take", [
        (0, nexus.replace(COMPLETE, passed_on=BOTH), BOTH, {}), (33, nexus.replace(COMPLETE, passed_on=BOTH), BOTH, {})], True),
    ("he has taken it", [(0, COMPLETE, BOTH, {}), (29, nexus.Turns(), frozenset(), dict.fromkeys(BOTH, "bob"))], False)]


@pytest.mark.parametrize("reason, looks, rests", SETS, ids=[case[0] for case in SETS])
def test_when_a_set_has_lapsed(reason, looks, rests):
    patience, seen, passed_s = nexus.Patience(), looks[0][1:], 0.0
    for at, *now in looks:
        while passed_s <= at:           # several times a second, as a service that waits
            turns, free, leases = now if passed_s == at else seen
            patience = nexus.wait_for_turns(patience, turns, free, ANN, 1000.0 + passed_s, [nexus.BoxUser(BOB, "bob", WANTS_ONE)], leases)
            passed_s += 0.25
        seen = now
    assert (BOB in patience.resting) == rests


WITHDRAWALS = [  # reason, (for how long a GPU was left to him, until the next time), whether bob rests then
    ("a job was cancelled just then", [(1.7, 60.0)] * 5, False),
    ("his last job began elsewhere, each time", [(0.2, 10.0)] * 20, False),
    ("what was long ago counts for less", [(1.1, 30.0)] * 3, False),
    ("he does it to keep others from it", [(1.7, 0.3)] * 2, True),
    ("he did not for an hour", [(1.0, 3600.0), (1.0, 0.3), (1.0, 0.3)], True),
    ("in small pieces", [(0.25, 0.25)] * 10, True),
]


@pytest.mark.parametrize("reason, steps, is_resting", WITHDRAWALS, ids=[case[0] for case in WITHDRAWALS])
def test_who_withdraws_what_he_wants_again_and_again_has_let_his_turn_lapse(reason, steps, is_resting):
    assert any(play(steps)) == is_resting, reason
    assert any(play(steps, WANTS_ONE)) == is_resting, "he waits on, and tells now this and now that, so that it is another's turn"
    has_lapsed = max(left_s for left_s, _ in steps) > nexus.TURN_S / 2
    assert any(play(steps, WANTS_ONE, (), {"GPU-0": "eve"})) == has_lapsed, "another has taken it, who lost patience just before"
    assert not any(play(steps, WANTS_ONE, (), {"GPU-0": "bob"})), "he has taken it"


VAIN = [  # reason, the turns until then, the leases then, what bob wants then, the GPU seconds that count as had
    ("he could have taken it", nexus.Turns({"GPU-0": BOB}), {}, WANTS_ONE, {BOB: 1.0}),
    ("it was collected for him", COLLECTS, {}, WANTS_ONE, {}),
    ("it was collected for who wants none", COLLECTS, {}, (), {BOB: 1.0}),
    ("he has taken it", nexus.Turns({"GPU-0": BOB}), {"GPU-0": "bob"}, WANTS_ONE, {})]


@pytest.mark.parametrize("reason, turns, leases, wants, wasted", VAIN, ids=[case[0] for case in VAIN])
def test_what_was_left_in_vain_counts_as_had(reason, turns, leases, wants, wasted):
    """Else who waits for many GPUs that others have would never have had least."""
    patience = nexus.wait_for_turns(nexus.Patience(), turns, BOTH, ANN, 1000.0, [nexus.BoxUser(BOB, "bob", WANTS_ONE)])
    patience = nexus.wait_for_turns(patience, nexus.Turns(), BOTH - leases.keys(), ANN, 1001.0, [nexus.BoxUser(BOB, "bob", wants)], leases)
    assert patience.wasted == wasted


def hear(w, *wants):
    """A service that hears bob each time that it looks, with what he wants."""
    bids = [nexus.FoundBid(0, (0, 0), BOB, "bob", bid=nexus.Bid(want)) for want in wants]
    w.service.turn_taking.bids = types.SimpleNamespace(look=lambda now: [bids.pop(0) if bids[1:] else bids[0]], tell=lambda bid: None,
                                                       withdraw=lambda: None, own=nexus.Bid())
    return w.service.turn_taking


def test_what_this_service_takes_at_last_was_left_in_vain(world):
    """Bob tells now this and now that, so that each GPU is his turn for a while."""
    w = world(gpus=1)
    w.turn(seconds=1)
    uuids = tuple(each.uuid for each in w.service.gpu_watch.gpus)
    taking = hear(w, (nexus.Want(1, uuids, 99, NOW - 9),))
    taking.ledger = nexus.Ledger({taking.uid: 50.0, BOB: 0.0}, contested_at=w.clock.now())
    job_id = w.add()
    for _ in range(4):
        w.turn(seconds=0.3)
    assert w.job(job_id).status == "pending"
    taking.ledger = nexus.replace(taking.ledger, had={taking.uid: 0.0, BOB: 50.0})
    w.turn(seconds=0.3)
    assert w.job(job_id).status == "running" and taking.patience.spent[BOB] > 0.5


def test_who_wants_nothing_leaves_nothing(world):
    """It looks seldom: of two looks at a free GPU it does not know who had it in between."""
    w = world(gpus=1)
    w.turn(seconds=1)
    taking = hear(w, (nexus.Want(1, tuple(each.uuid for each in w.service.gpu_watch.gpus), 99, NOW - 9),))
    for _ in range(4):
        w.turn(seconds=1.0)
    assert taking.box and not taking.patience.left and not taking.patience.resting
    w.add()
    for _ in range(4):
        w.turn(seconds=1.0)
    assert BOB in taking.patience.resting


def test_who_wants_no_more_may_have_taken_a_gpu(world, monkeypatch):
    """So the leases are looked at before that counts as withdrawn."""
    w = world()
    w.turn(seconds=1)
    want = nexus.Want(1, tuple(each.uuid for each in w.service.gpu_watch.gpus), 1, NOW - 9)
    w.machine.leases = types.SimpleNamespace(find_holders=lambda uuids, used=(): {})
    taking, looks = hear(w, (want,), (want,), ()), []
    monkeypatch.setattr(w.service.observer, "see_leases", lambda running: looks.append(w.clock.monotonic()))
    for _ in range(3):
        taking.look()
        w.clock.pass_(0.06)
    assert len(looks) == 2 and looks[1] - looks[0] < nexus.LOOK_S


def keep(w, had):
    taking = w.service.turn_taking
    taking.ledger = nexus.Ledger(had, contested_at=NOW)
    taking.keep(is_end=True)


def test_what_each_had_survives_a_restart(world):
    w = world()
    keep(w, {ANN: 12.5, BOB: 3.0})
    w.crash()
    assert w.service.turn_taking.ledger == nexus.Ledger({ANN: 12.5, BOB: 3.0}, contested_at=NOW)


DAMAGED = ["", "{", "[]", "null", '{"had":[]}', '{"had":{"ann":1}}', '{"had":{"1001":"much"}}', '{"had":{"1001":NaN}}',
           '{"contested_at":-1}', "[" * 100000, "\0" * 4096, '{"had":{"1001":1e999}}', '{"had":{"1.5":1}}']


@pytest.mark.parametrize("text", DAMAGED, ids=[text[:30] for text in DAMAGED])
def test_a_damaged_past_is_ignored(world, text):
    w = world()
    pathlib.Path(w.layout.turns_file).write_text(text)
    w.crash()
    assert w.service.turn_taking.ledger == nexus.Ledger()


def test_a_past_that_is_no_file_is_ignored(world):
    w = world()
    pathlib.Path(w.layout.turns_file).mkdir()
    w.crash()
    assert w.service.turn_taking.ledger == nexus.Ledger()
    keep(w, {ANN: 1.0})
    assert not [line for line in w.lines if "Internal error" in line]


def test_a_turn_that_is_left_is_in_the_log_once(world):
    """And that it lapsed."""
    w = world()
    taking = w.service.turn_taking
    w.service.gpu_watch.gpus = (gpu(0), gpu(1))
    uuids = [each.uuid for each in w.service.gpu_watch.gpus]
    taking.box = make_box({}, (BOB, "bob", nexus.Bid(WANTS_ONE)))
    for left, resting in (({uuids[0]: (BOB, 1.0)}, {}), ({uuids[0]: (BOB, 1.0)}, {}), (dict.fromkeys(uuids, (BOB, 2.0)), {}),
                          ({}, {BOB: w.clock.monotonic() + 60})):
        former, taking.patience = taking.patience, nexus.Patience(left, resting=resting)
        taking.report(former)
    assert w.lines[-3:] == ["GPU 0 is left to bob, whose turn it is", "GPUs 0, 1 are left to bob, whose turn it is",
                            "bob did not take the turn: none is left to that user for 1m"]


def test_others_are_heard_once_for_the_ticks_of_a_start(world):
    """What this service itself has is always known."""
    w = world()
    taking, heard = w.service.turn_taking, []
    bob = nexus.FoundBid(0, (0, 0), BOB, "bob", bid=nexus.Bid(WANTS_ONE))
    taking.bids = types.SimpleNamespace(look=lambda now: heard.append(now) or [bob], tell=lambda bid: None, withdraw=lambda: None,
                                        own=None)
    w.turn(seconds=1)
    job_id = w.add()
    for _ in range(3):
        w.turn(seconds=0.01)
    assert len(heard) == 1
    ann, others = taking.box.users[0], taking.box.users[1:]
    assert [user.name for user in others] == ["bob"] and [holding.uuid for holding in ann.holdings] == list(w.job(job_id).current.gpu_uuids)
    w.turn(seconds=0.05)
    assert len(heard) == 2


# What it tells, and when


class OtherBids:
    """In the place of Bids: those of others are what the test says, and what this service tells is kept."""

    def __init__(self, *others):
        self.others, self.told, self.own = others, [], None         # own: None while nothing of it is there

    def look(self, now):
        return self.others

    def tell(self, bid):
        self.told.append(bid)
        self.own = bid

    def withdraw(self):
        self.own = None


TWO = ("GPU-0", "GPU-1")


def bid_of(uid, *wants, **facts):
    return nexus.FoundBid(0, (0, 0), uid, {BOB: "bob", EVE: "eve"}[uid], bid=nexus.Bid(wants, **facts))


BOB_WANTS = bid_of(BOB, *WANTS_ONE)
BOB_HAS = bid_of(BOB, holdings=(nexus.Holding("GPU-1", 100, NOW),), running=1)


def share_box(w, *others):
    """Have the service hear these bids; its part that takes turns."""
    w.service.turn_taking.bids = OtherBids(*others)
    return w.service.turn_taking


def tick(w, seconds=0.0, wants=()):
    """What a tick does of it, for a service whose jobs want this."""
    w.clock.pass_(seconds)
    w.service.plan = nexus.Plan(wants=wants)
    w.service.turn_taking.look()
    w.service.turn_taking.note_plan(w.service.plan)


def test_others_are_told_what_jobs_have_and_wait_for(world):
    """At once when one starts; of jobs without GPUs nothing."""
    w = world(gpus=4)
    taking = share_box(w, BOB_WANTS)
    w.run(w.add(gpus=0), 99)
    w.turn(seconds=50)
    w.probe()
    first, began = w.run(w.add(gpus=1.5), 100), w.clock.now()
    holdings = tuple(nexus.Holding(uuid, share, began) for uuid, share in zip(w.job(first).current.gpu_uuids, (100, 50)))
    assert len(holdings) == 2
    assert taking.bids.told[-1] == nexus.Bid((), holdings, running=1)
    w.clock.pass_(0.5)
    second = w.run(w.add(), 101)
    holdings = *holdings, nexus.Holding(*w.job(second).current.gpu_uuids, 100, w.clock.now())
    assert taking.bids.told[-1] == nexus.Bid((), holdings, running=2)
    for gpus in (2, 2, 3):
        w.add(gpus=gpus)
    w.turn(seconds=0.25)
    wants = [nexus.Want(gpus, tuple(f"GPU-{index}" for index in range(4)), count, w.clock.now() - 0.25) for gpus, count in ((2, 2), (3, 1))]
    assert taking.bids.told[-1] == nexus.Bid((*wants,), holdings, running=2, waiting=3, leaves={"GPU-0": BOB})
    w.turn(seconds=80)
    assert taking.bids.told[-1].run_s == 80.75, "no job has ended, and the oldest has run for so long"
    w.end(first, runtime_seconds=80.75)
    assert (taking.bids.told[-1].ended_s, taking.bids.told[-1].run_s, taking.bids.told[-1].running) == (1.5 * 80.75, 80.75, 1)


ENDS = [  # reason, the job, for how many GPU seconds it counts; None: not at all
    ("a GPU", running(started_at=NOW - 10), 10.0),
    ("a share", running(gpus=0.25, started_at=NOW - 10), 2.5),
    ("more than one", running(indices=(0, 1), gpus=1.5, started_at=NOW - 10), 15.0),
    ("the clock was set back", running(started_at=NOW + 5), 0.0),
    ("it ended while no service was there, or the clock was set forward", running(started_at=NOW - 36000, runtime_seconds=8), 10.0),
    ("its command never began", running(started_at=NOW - 36000, runtime_seconds=0.0), 2.0),
    ("its processes went on", running(started_at=NOW - 36000, runtime_seconds=8, processes_left=1), 36000.0),
    ("no GPU", running(indices=(), started_at=NOW - 10), None),
    ("those of a node", running(node="n1", started_at=NOW - 10), None),
    ("it never began", running(started_at=None), None)]


@pytest.mark.parametrize("reason, ended, counts_s", ENDS, ids=[case[0] for case in ENDS])
def test_what_a_job_that_ended_counts_for(world, reason, ended, counts_s):
    taking = world().service.turn_taking
    for count in (1, 2):
        taking.note_end(ended, ended.current if ended.current.runtime_seconds is not None else nexus.Attempt(runtime_seconds=36000.0))
        bid = taking.make_bid(NOW)
        assert bid.ended_s == (counts_s or 0.0) * count
        assert bid.run_s == (60.0 if counts_s is None else counts_s * 100 / sum(nexus.list_shares(ended)))


def test_how_long_jobs_run_is_told_by_the_latest(world):
    taking = world().service.turn_taking
    for run_s in [1000.0] * 9 + [4.0] * 40:
        taking.note_end(running(started_at=NOW - run_s), nexus.Attempt(runtime_seconds=run_s))
    assert taking.make_bid(NOW).run_s == 4.0


OTHER_WANT = (nexus.Want(2, TWO, 1, NOW),)
TELLS = [  # reason, (seconds later, what its jobs want, the others' bids, how often it was told by then; 0: it tells nothing) of each tick
    ("others wait: each second", [
        (1, (), [BOB_WANTS], 1), (0.25, (), [BOB_WANTS], 1), (0.5, (), [BOB_WANTS], 1), (0.25, (), [BOB_WANTS], 2),
        (1, (), [BOB_WANTS], 3), (0.75, (), [BOB_WANTS], 3)]),
    ("it wants something else: at once", [
        (1, (), [BOB_WANTS], 1), (0.25, WANTS_ONE, [BOB_WANTS], 2), (0.25, WANTS_ONE, [BOB_WANTS], 2), (0.25, OTHER_WANT, [BOB_WANTS], 3)]),
    ("it waits, and others only have some", [
        (1, WANTS_ONE, [BOB_HAS], 1), (0.25, WANTS_ONE, [BOB_HAS], 1), (1, WANTS_ONE, [BOB_HAS], 2)]),
    ("alone: once", [(1, WANTS_ONE, [], 1), (1, WANTS_ONE, [], 1), (60, WANTS_ONE, [], 1), (1, OTHER_WANT, [], 2)]),
    ("alone: not more often than each second", [(1, WANTS_ONE, [], 1), (0.5, OTHER_WANT, [], 1), (0.5, OTHER_WANT, [], 2)]),
    ("alone, with nothing to tell", [(1, (), [], 0), (0.01, (), [], 0), (60, (), [], 0)]),
    ("others come", [(1, WANTS_ONE, [], 1), (60, WANTS_ONE, [], 1), (1, WANTS_ONE, [BOB_WANTS], 2)]),
    ("nobody waits any more, and then somebody does", [
        (1, WANTS_ONE, [BOB_WANTS], 1), (0.25, (), [BOB_WANTS], 2), (0.25, (), [BOB_HAS], 0), (0.25, (), [BOB_HAS], 0),
        (0.25, WANTS_ONE, [BOB_HAS], 3), (0.25, (), [BOB_HAS], 0), (0.25, WANTS_ONE, [BOB_HAS], 4)])]


@pytest.mark.parametrize("reason, ticks", TELLS, ids=[case[0] for case in TELLS])
def test_when_others_are_told(world, reason, ticks):
    w = world()
    taking = share_box(w)
    for seconds, wants, others, count in ticks:
        before, taking.bids.others = len(taking.bids.told), others
        tick(w, seconds, wants)
        assert bool(taking.bids.own) == bool(count)
        assert len(taking.bids.told) == count or not count, reason
        assert len(taking.bids.told) == before or taking.bids.own.wants == wants


def test_bids_are_told_in_the_folder_of_the_leases(world, leases):
    """Until the service ends; without leases there are none."""
    w = world(gpus=1)
    assert w.service.turn_taking.bids is None
    w.machine.leases = leases()
    w.crash()
    w.run(w.add(), 100)
    w.add()
    w.turn(seconds=1)
    assert len([name for name in os.listdir(leases.folder) if name.startswith(nexus.PREFIX)]) == 1
    w.service.turn_taking.end()
    assert not [name for name in os.listdir(leases.folder) if name.startswith(nexus.PREFIX)]


# What it keeps


def read_past(w):
    path = pathlib.Path(w.layout.turns_file)
    return json.loads(path.read_text()) if path.exists() else None


def test_the_past_is_written_seldom_and_at_the_end(world, monkeypatch):
    """And not synced: it is worth little."""
    w, kept, synced = world(), [], []
    taking = share_box(w, BOB_HAS)
    monkeypatch.setattr(w.disk, "fsync", synced.append)
    for second in range(35):
        tick(w, 1.0)
        taking.ledger = nexus.replace(taking.ledger, had={BOB: float(second)}, contested_at=w.clock.now())
        past = read_past(w)
        if past and past["had"] not in kept:
            kept.append(past["had"])
    assert 3 <= len(kept) <= 4 and kept[-1][str(BOB)] > 20.0
    taking.end()
    assert read_past(w) == {"had": {str(BOB): 34.0}, "contested_at": taking.ledger.contested_at} and taking.bids.own is None and not synced


NO_PASTS = [  # reason, whether the machine has leases, what was had, whether the service ends
    ("nobody had anything", True, {}, True),
    ("nobody else is there, and it goes on", True, {BOB: 1.0}, False),
    ("there are no leases", False, {BOB: 1.0}, True)]


@pytest.mark.parametrize("reason, has_leases, had, is_end", NO_PASTS, ids=[case[0] for case in NO_PASTS])
def test_when_no_past_is_written(world, reason, has_leases, had, is_end):
    w = world()
    taking = share_box(w) if has_leases else w.service.turn_taking
    taking.ledger = nexus.Ledger(had, contested_at=w.clock.now())
    tick(w, 60)
    if is_end:
        taking.end()
    assert read_past(w) is None, reason


# Whom it hears


def leave_to_bob(w):
    """A service with a job that leaves its only GPU to bob, who waits and had less."""
    taking = share_box(w, BOB_WANTS)
    w.turn(seconds=1)
    taking.ledger = nexus.Ledger({taking.uid: 50.0, BOB: 10.0}, contested_at=w.clock.now())
    return taking, w.add()


VANISHES = [  # reason, what he wants, the leases when he has gone, the seconds that count as had
    ("his service has ended", WANTS_ONE, {}, 1.5),
    ("it was collected for him, and his service has ended", (nexus.Want(2, TWO, 1, NOW - 9, True),), {}, 1.5),
    ("he has taken it, and wants no more", WANTS_ONE, {"GPU-0": "bob"}, 0.0)]


@pytest.mark.parametrize("reason, wants, holders, counts_s", VANISHES, ids=[case[0] for case in VANISHES])
def test_what_was_left_to_who_has_gone_counts_as_had(world, reason, wants, holders, counts_s):
    """It does not while he waits."""
    w = world()
    w.run(w.add(gpu_ids="1"), 100)
    taking, job_id = leave_to_bob(w)
    taking.bids.others = (bid_of(BOB, *wants),)
    for number in range(6):
        w.turn(seconds=0.25)
        assert taking.ledger.had == pytest.approx({taking.uid: 50.0 + number / 4, BOB: 10.0}) and taking.bids.own.leaves == {"GPU-0": BOB}
    assert w.job(job_id).status == "pending" and [user.name for user in taking.others] == ["bob"]
    taking.bids.others, w.service.observer.lease_holders = (), holders
    w.clock.pass_(0.25)
    taking.look()
    assert taking.ledger.had == pytest.approx({taking.uid: 51.5, BOB: 10.0 + counts_s}), reason
    assert taking.box is None and not taking.others and not taking.patience.left
    w.turn()
    assert w.job(job_id).status == "running", "nobody is there whose turn it could be"


@pytest.mark.parametrize("has_gone", [False, True])
def test_who_wants_nothing_any_more_leaves_nothing(world, has_gone):
    """And counts nothing as left in vain."""
    w = world(gpus=1)
    taking, job_id = leave_to_bob(w)
    for _ in range(3):
        w.turn(seconds=0.25)
    assert taking.patience.left == {"GPU-0": (BOB, w.clock.monotonic() - 0.5)}
    w.service.cancellation.cancel(nexus.Choice([job_id], ("pending",)), CALLER)
    w.turn(seconds=0.25)
    taking.bids.others = () if has_gone else (BOB_WANTS,)
    for _ in range(20):
        w.turn(seconds=0.25)
        assert not taking.patience.resting and not taking.patience.left and taking.ledger.had[BOB] == 10.0
    assert has_gone or taking.bids.own.leaves == {}
    assert not [line for line in w.lines if "Internal error" in line]


def test_a_turn_and_that_it_lapsed_are_in_the_log(world):
    w = world(gpus=1)
    _, job_id = leave_to_bob(w)
    for _ in range(12):
        w.turn(seconds=0.25)
    assert [line for line in w.lines if "turn" in line] == [
        "GPU 0 is left to bob, whose turn it is", "bob did not take the turn: none is left to that user for 1m 10s"]
    assert w.job(job_id).status == "running"


def test_the_log_names_for_each_user_what_is_left_to_that_one(world):
    w = world()
    taking = w.service.turn_taking
    w.service.gpu_watch.gpus = (gpu(0), gpu(1))
    taking.box = make_box({}, (BOB, "bob", nexus.Bid(WANTS_ONE)), (EVE, "eve", nexus.Bid(WANTS_ONE)))
    before = len(w.lines)
    first, then = {"GPU-0": (BOB, 1.0), "GPU-1": (EVE, 1.0)}, {"GPU-0": (EVE, 2.0), "GPU-1": (EVE, 1.0)}
    for left in (first, first, then):
        former, taking.patience = taking.patience, nexus.Patience(left)
        taking.report(former)
    assert w.lines[before:] == [f"GPU {place} is left to {name}, whose turn it is" for place, name in ((0, "bob"), (1, "eve"), (0, "eve"))]


def test_between_two_hearings_it_is_known_who_rests_and_what_each_had(world):
    w = world()
    taking = share_box(w, BOB_WANTS)
    w.turn(seconds=1)
    assert not taking.box.resting
    taking.ledger, taking.patience = nexus.Ledger({BOB: 7.0}), nexus.Patience(resting={BOB: w.clock.monotonic() + 60})
    w.turn(seconds=0.01)
    assert taking.box.had == {BOB: 7.0} and taking.box.resting == {BOB}
    assert [user.name for user in taking.box.users] == [nexus.find_user(w.machine.uid), "bob"]


@pytest.mark.parametrize("is_told", [True, False])
def test_what_others_cannot_know_of_counts_nowhere(world, is_told):
    """They count what a service tells: what it has had without that is nothing to them."""
    w = world()
    taking = share_box(w, BOB_HAS)
    w.run(w.add(), 100)
    w.clock.pass_(1.0)
    taking.ledger = nexus.Ledger({taking.uid: 50.0, BOB: 10.0}, contested_at=w.clock.now())
    for passed_s in (0, 1, 2):
        taking.bids.own = nexus.Bid() if is_told else None
        taking.look()
        assert taking.ledger.had == pytest.approx({taking.uid: 50.0 + passed_s * is_told, BOB: 10.0 + passed_s})
        w.clock.pass_(1.0)


ALONE = [("nothing waits", (), {}), ("jobs wait", WANTS_ONE, {}), ("others have GPUs, and tell nothing", (), {"GPU-0": "dan"})]


@pytest.mark.parametrize("reason, wants, holders", ALONE, ids=[case[0] for case in ALONE])
def test_what_is_had_while_nobody_else_is_there_counts_nowhere(world, reason, wants, holders):
    w = world()
    taking = share_box(w, BOB_WANTS)
    w.run(w.add(gpu_ids="1"), 100)
    w.clock.pass_(1.0)
    taking.ledger = nexus.Ledger({taking.uid: 50.0, BOB: 50.0}, contested_at=w.clock.now())
    w.service.observer.lease_holders, w.service.plan = holders, nexus.Plan(wants=wants)
    had = []
    for others in ((BOB_WANTS,), (BOB_WANTS,), (), (), (), (BOB_WANTS,), (BOB_WANTS,)):
        taking.bids.others, taking.bids.own = others, nexus.Bid()
        taking.look()
        had.append(round(taking.ledger.had[taking.uid], 6))
        w.clock.pass_(1.0)
    assert had == [50.0, 51.0, 52.0, 52.0, 52.0, 52.0, 53.0], reason


HOLDERS = [  # reason, the leases of others, with what a newcomer begins
    ("he has it", {"GPU-1": "bob"}, 40.0),
    ("he only tells that he has it", {}, 95.0),
    ("he tells it, and another has it", {"GPU-1": "dan"}, 95.0)]


@pytest.mark.parametrize("reason, holders, begin", HOLDERS, ids=[case[0] for case in HOLDERS])
def test_a_newcomer_begins_where_those_are_who_have_gpus(world, reason, holders, begin):
    """Whoever tells it: the leases show who has one."""
    w = world()
    w.run(w.add(gpu_ids="0"), 100)
    w.clock.pass_(5.0)
    now = w.clock.now()
    taking = share_box(w, bid_of(BOB, *WANTS_ONE, holdings=(nexus.Holding("GPU-1", 100, now - 10.0),)), bid_of(EVE, *WANTS_ONE))
    taking.ledger = nexus.Ledger({taking.uid: 100.0, BOB: 50.0}, contested_at=now, looked_at=now)
    w.service.observer.lease_holders = holders
    tick(w, 0.0, WANTS_ONE)
    assert taking.ledger.had == pytest.approx({taking.uid: 100.0, BOB: 50.0, EVE: begin}, abs=0.01), reason


# What the leases show


class OtherLeases:
    """In the place of Leases: who has which GPU is what the test says."""
    folder, lost = "/tmp/none", ()

    def __init__(self, holders):
        self.holders, self.looks = holders, 0

    def find_holders(self, uuids, used=()):
        self.looks += 1
        return {uuid: name for uuid, name in self.holders.items() if uuid in uuids}


LEASES = [  # reason, what others have at first, and then; whether a reading of the GPUs is due at once
    ("he gives one back", {"GPU-0": "bob", "GPU-1": "bob"}, {"GPU-1": "bob"}, True),
    ("he takes one", {"GPU-0": "bob"}, {"GPU-0": "bob", "GPU-1": "bob"}, False),
    ("another takes it", {"GPU-0": "bob"}, {"GPU-0": "eve"}, False),
    ("he gives one back, and takes another", {"GPU-0": "bob"}, {"GPU-1": "bob"}, True),
    ("nothing changes", {"GPU-0": "bob"}, {"GPU-0": "bob"}, False)]


@pytest.mark.parametrize("reason, before, after, is_due", LEASES, ids=[case[0] for case in LEASES])
def test_a_gpu_that_others_took_or_gave_back_is_shown_at_once(world, reason, before, after, is_due):
    w = world()
    taking, w.machine.leases = share_box(w, BOB_WANTS), OtherLeases(before)
    w.probe()
    assert {each.uuid: each.lease_holder for each in w.service.gpu_watch.gpus if each.lease_holder} == before
    w.service.gpu_worker = types.SimpleNamespace(wanted=threading.Event())
    w.machine.leases.holders = after
    taking.look()
    assert {each.uuid: each.lease_holder for each in w.service.gpu_watch.gpus if each.lease_holder} == after
    assert w.service.gpu_worker.wanted.is_set() == is_due, reason


@pytest.mark.parametrize("gpus, least, most", [(2, 4, 5), (0, 0, 0)])
def test_the_leases_are_looked_at_four_times_a_second(world, gpus, least, most):
    """Where there are GPUs, however often others are heard."""
    w = world(gpus=gpus)
    taking, w.machine.leases = share_box(w, BOB_WANTS), OtherLeases({})
    taking.look()
    w.machine.leases.looks = 0
    for _ in range(16):
        w.clock.pass_(1 / 16)
        taking.look()
    assert least <= w.machine.leases.looks <= most


DUES = [  # reason, what its jobs want, the others' bids, their leases, whether it is looked again soon
    ("others are there", WANTS_ONE, [BOB_WANTS], {}, True),
    ("others have GPUs, and tell nothing", WANTS_ONE, [], {"GPU-0": "bob"}, True),
    ("nobody is there", WANTS_ONE, [], {}, False),
    ("it wants nothing", (), [BOB_WANTS], {"GPU-0": "bob"}, False)]


@pytest.mark.parametrize("reason, wants, others, holders, is_soon", DUES, ids=[case[0] for case in DUES])
def test_how_soon_it_is_looked_again(world, reason, wants, others, holders, is_soon):
    w = world()
    taking = share_box(w, *others)
    w.service.observer.lease_holders = holders
    tick(w, 1.0, wants)
    assert taking.find_due_s() == (0.25 if is_soon else float("inf")), reason


THEIRS = (foreign(user="bob"),)
UNTOLD = [  # reason, the GPU, what bob tells of it, the share of it that counts for him, and since how many seconds
    ("his processes are there", gpu(0, lease_holder="bob", processes=THEIRS), (), [(100, 2.0)]),
    ("he tells it", gpu(0, lease_holder="bob", processes=THEIRS), (nexus.Holding("GPU-0", 50, NOW - 5),), [(50, 7.0)]),
    ("nobody has its lease", gpu(0, processes=THEIRS), (), []),
    ("somebody else's are there", gpu(0, lease_holder="bob", processes=(foreign(user="eve"),)), (), []),
    ("none are there", gpu(0, lease_holder="bob"), (), []),
    ("it is a job's of this service", gpu(0, lease_holder="bob", processes=(nexus.GpuProcess(77, 1.0, "abc", "bob"),)), (), [])]


@pytest.mark.parametrize("reason, seen, holdings, counts", UNTOLD, ids=[case[0] for case in UNTOLD])
def test_a_gpu_of_who_tells_nothing_counts_for_whose_processes_are_there(world, reason, seen, holdings, counts):
    """Since it was seen first."""
    w = world()
    taking = share_box(w, bid_of(BOB, *WANTS_ONE, holdings=holdings))
    w.service.gpu_watch.gpus = (seen, gpu(1))
    for _ in range(3):
        taking.look()
        found = [(holding.share, w.clock.now() - holding.since) for user in taking.others for holding in user.holdings]
        w.clock.pass_(1.0)
    assert found == counts and not taking.box.users[0].holdings, reason
    w.service.gpu_watch.gpus = (gpu(0), gpu(1))
    taking.look()
    w.service.gpu_watch.gpus = (seen, gpu(1))
    w.clock.pass_(1.0)
    taking.look()
    if not holdings:
        assert [holding.since for holding in taking.others[0].holdings] == [w.clock.now()] * len(counts), "it was free in between"

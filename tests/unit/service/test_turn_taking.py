"""How a service takes turns with those of other users: what it keeps, what it leaves, what it says."""

import pathlib
import types

import pytest
from makers import NOW, gpu

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

"""Section 4: jobs, what may become of them, and State with its indexes."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import NOW, finished, job, json_values, running, state, texts

import nexus

# What may become of a job

CHANGES = [  # from, to, allowed
    ("pending", "running", True), ("pending", "cancelled", True), ("pending", "completed", False),
    ("pending", "failed", False),
    ("pending", "pending", False),
    ("running", "completed", True), ("running", "failed", True), ("running", "cancelled", True),
    ("running", "pending", True),
    ("running", "running", False),
    *[(final, status, False) for final in ("completed", "failed", "cancelled")
      for status in ("pending", "running", "completed", "failed", "cancelled")],
]


@pytest.mark.parametrize("old, new, allowed", CHANGES, ids=[f"{old}-{new}" for old, new, _ in CHANGES])
def test_change_status(old, new, allowed):
    before = job(status=old, status_history=((old, NOW - 5),))
    if not allowed:
        with pytest.raises(nexus.NexusError) as caught:
            nexus.change_status(before, new, NOW)
        assert caught.value.kind == "conflict" and "abc" in caught.value.message and old in caught.value.message
        return
    change = nexus.change_status(before, new, NOW, exit_code=3)
    after = nexus.replace(before, **change.facts)
    assert (change.id, after.status, after.exit_code) == ("abc", new, 3)
    assert after.status_history == ((old, NOW - 5), (new, NOW))


def test_the_table_of_changes_is_complete():
    assert len(CHANGES) == len(nexus.STATUSES) ** 2
    assert set(nexus.FINAL) == set(nexus.STATUSES) - set(nexus.TRANSITIONS)


def test_replace_refuses_what_is_no_field():
    with pytest.raises(TypeError, match="Job has no field colour"):
        nexus.replace(job(), colour="red")


# State and its indexes


def check_indexes(made):
    """That every index of State says what its jobs say."""
    pending = {one.id: one for one in made.jobs.values() if one.status == nexus.PENDING}
    assert made.order == sorted((one.order, one.id) for one in pending.values())
    assert [made.position(pending[id]) for _, id in made.order] == list(range(len(made.order)))
    kinds, dependents, delayed = {}, {}, []
    for item in made.order:
        one = pending[item[1]]
        for parent in one.unmet:
            dependents.setdefault(parent, set()).add(one.id)
        if one.retry_at is not None:
            delayed.append((one.retry_at, one.id))
        elif not one.unmet:                     # what must wait is not looked at
            kinds.setdefault(nexus.kind_of(one), {}).setdefault((one.group, one.user), []).append(item)
    assert made.kinds == kinds
    assert made.delayed == sorted(delayed)
    assert {parent: set(line) for parent, line in made.dependents.items()} == dependents
    assert made.running == {id: one for id, one in made.jobs.items() if one.status == nexus.RUNNING}
    assert made.finished == {id: one for id, one in made.jobs.items() if one.status in nexus.FINAL}
    assert all(id == one.id for id, one in made.jobs.items())
    assert all(one.number < made.next_number for one in made.jobs.values())
    brought = {}
    for one in made.jobs.values():
        if one.key:
            brought.setdefault(one.key, []).append(one.id)
    assert {key: sorted(line) for key, line in made.keys.items()} == {
        key: sorted(line) for key, line in brought.items()}
    counts = {}
    for one in pending.values():
        counts[one.priority] = counts.get(one.priority, 0) + 1
    assert made.pending_by_priority == counts
    kept = {}
    for one in made.finished.values():
        kept[one.user] = kept.get(one.user, 0) + 1
    assert made.finished_by_user == kept
    turns = {}
    for one in pending.values():
        turns.setdefault((one.priority, one.user), []).append(one.order[2])
    assert made.turns == {place: sorted(line) for place, line in turns.items()}


def dump(made):
    """Every attribute of State, copied.  The order counts where it says something."""
    return {
        **{name: fact for name, fact in vars(made).items() if not isinstance(fact, (dict, list))},
        "jobs": dict(made.jobs), "environments": dict(made.environments), "order": list(made.order),
        "kinds": {kind: {group: list(line) for group, line in lines.items()} for kind, lines in made.kinds.items()},
        "dependents": {parent: sorted(line) for parent, line in made.dependents.items()}, "delayed": list(made.delayed),
        "groups": dict(made.groups), "seen": dict(made.seen), "running": dict(made.running),
        "keys": {key: sorted(line) for key, line in made.keys.items()},
        "pending_by_priority": dict(made.pending_by_priority), "turns": {place: list(line) for place, line in made.turns.items()},
        "finished": list(made.finished.items())}


def letters(number):
    """An id for a number."""
    base = nexus.ID_LETTERS
    return base[number // len(base) ** 2 % len(base)] + base[number // len(base) % len(base)] + base[number % len(base)]


def random_change(made, dice, number):
    """One that fits, as the service makes them."""
    jobs = list(made.jobs.values())
    pending = [one for one in jobs if one.status == nexus.PENDING]
    deeds = ["add"] * 4 + ["status"] * 3 + ["note", "move", "priority", "remove", "environment", "pause", "paused_gpus",
                                            "group", "seen", "delay", "met"]
    deed, user = dice.choice(deeds), dice.choice(["ann", "ann", "bob"])
    if deed == "add" or not jobs:
        priority = dice.choice([0, 1, 1, 2])
        count = dice.choice([0, 1, 1, 0.5, 2])
        parents = tuple(dice.sample(sorted(made.jobs), min(len(jobs), dice.choice([0, 0, 1, 2]))))
        return nexus.JobAdded(job(
            letters(number), user=user, **nexus.next_place(made, priority, user), gpus=count,
            group=dice.choice([None, "g", "h"]), after=parents,
            unmet=parents, gpu_mem_mib=dice.choice([None, 1024]), expected_time=dice.choice([None, 60.0, 600.0]),
            gpu_ids=dice.choice([None, (0, 1)]) if count else None, key=dice.choice([None, None, "k1", "k2"])))
    one = dice.choice(jobs)
    if deed == "group":
        return nexus.GroupChanged(nexus.Group(dice.choice("gh"), dice.randrange(3), dice.choice([None, "held"])))
    if deed == "seen":
        return nexus.LineSeen(dice.choice("abc"), dice.randrange(3))
    if deed == "delay" and pending:
        return nexus.JobChanged(dice.choice(pending).id, {"retry_at": dice.choice([None, NOW, NOW + 5])})
    if deed == "met" and pending:
        return nexus.JobChanged(dice.choice(pending).id, {"unmet": ()})
    if deed == "status" and one.status in nexus.TRANSITIONS:
        return nexus.change_status(one, dice.choice(sorted(nexus.TRANSITIONS[one.status])), NOW + number)
    if deed == "move" and pending:
        one = dice.choice(pending)
        change = nexus.move_job(made, one, dice.randrange(len(pending) + 2))
        return change or nexus.JobChanged(one.id, {"name": "unmoved"})
    if deed == "priority" and pending:
        one = dice.choice(pending)
        priority = dice.choice([0, 1, 2])
        order = dice.choice([(0, priority, one.number), one.order])
        return nexus.JobChanged(one.id, {"priority": priority, "order": order})
    if deed == "remove":
        return nexus.JobsRemoved(tuple(dice.sample(sorted(made.jobs), min(len(jobs), dice.randrange(4)))))
    if deed == "environment":
        return nexus.EnvironmentAdded(dice.choice("abc"), {"A": str(number)})
    if deed == "pause":
        return nexus.StateChanged({"paused": dice.random() < 0.5})
    if deed == "paused_gpus":
        return nexus.StateChanged({"paused_gpus": ("GPU-0",), "inventory": ((0, "GPU-0", "RTX 3090", 24576.0),)})
    return nexus.JobChanged(one.id, {"pid": number, "peak_rss_mib": 1.5})


@pytest.mark.parametrize("seed", range(25))
def test_changes_keep_the_indexes_and_can_be_undone(seed):
    dice, made = random.Random(seed), nexus.State()
    for number in range(120):
        change = random_change(made, dice, number)
        before = dump(made)
        undo = nexus.apply(made, change)
        check_indexes(made)
        after = dump(made)
        undo()
        assert dump(made) == before, f"step {number}: {change}"
        check_indexes(made)
        nexus.apply(made, change)
        assert dump(made) == after, f"step {number}: {change} again"


@pytest.mark.parametrize("seed", range(5))
def test_many_changes_are_undone_in_reverse_order(seed):
    dice, made = random.Random(seed), nexus.State()
    for number in range(60):
        nexus.apply(made, random_change(made, dice, number))
    before, undos = dump(made), []
    for number in range(60, 140):
        undos.append(nexus.apply(made, random_change(made, dice, number)))
    for undo in reversed(undos):
        undo()
    assert dump(made) == before
    check_indexes(made)


def test_finished_jobs_stand_in_the_order_in_which_they_ended():
    made = state(job("aaa"), job("bbb", 2), job("ccc", 3))
    for id in ("bbb", "ccc", "aaa"):
        nexus.apply(made, nexus.change_status(made.jobs[id], nexus.RUNNING, NOW))
    for id in ("ccc", "aaa", "bbb"):
        nexus.apply(made, nexus.change_status(made.jobs[id], nexus.COMPLETED, NOW))
    assert list(made.finished) == ["ccc", "aaa", "bbb"]


def test_a_job_named_twice_is_removed_once():
    made = state(finished("aaa"), finished("bbb", number=2))
    before = dump(made)
    undo = nexus.apply(made, nexus.JobsRemoved(("aaa", "aaa")))
    assert list(made.jobs) == ["bbb"]
    check_indexes(made)
    undo()
    assert dump(made) == before


KINDS = [  # reason, fields of two jobs, whether they are of one kind
    ("the same", {}, {}, True),
    ("who wants it, and in which place, is nothing to it", {"group": "g", "priority": 0}, {"name": "x", "retries": 2}, True),
    ("a share", {"gpus": 0.5}, {"gpus": 0.51}, False), ("a hundredth more", {"gpus": 0.28}, {"gpus": 0.29}, False),
    ("the same share", {"gpus": 0.3}, {"gpus": 0.1 + 0.2}, True),
    ("other GPUs", {"gpu_ids": (0,)}, {}, False), ("memory", {"gpu_mem_mib": 1024}, {"gpu_mem_mib": 2048}, False),
    ("after a CUDA out-of-memory", {"is_alone": True}, {}, False),
    ("it says how long it takes", {"expected_time": 60}, {}, False),
    ("about as long", {"expected_time": 40}, {"expected_time": 60}, True),
    ("much longer", {"expected_time": 60}, {"expected_time": 600}, False),
    ("less than a second is said, too", {"expected_time": 0.5}, {}, False),
]


@pytest.mark.parametrize("reason, fields, others, expected", KINDS, ids=[case[0] for case in KINDS])
def test_kind_of(reason, fields, others, expected):
    assert (nexus.kind_of(job(**fields)) == nexus.kind_of(job(**others))) is expected, reason


SHARES = [  # GPUs, whether alone, hundredths of each
    (0, False, []), (1, False, [100]), (3, False, [100, 100, 100]), (0.5, False, [50]), (0.01, False, [1]),
    (1.5, False, [100, 50]), (2.25, False, [100, 100, 25]), (0.29, False, [29]), (1.15, False, [100, 15]),
    (0.5, True, [100]), (1.5, True, [100, 100]), (2, True, [100, 100]), (0, True, []),
]


@pytest.mark.parametrize("gpus, is_alone, shares", SHARES)
def test_list_shares(gpus, is_alone, shares):
    assert nexus.list_shares(job(gpus=gpus, is_alone=is_alone)) == shares


@pytest.mark.parametrize("cents", range(0, 400, 7))
def test_shares_add_up_to_what_was_asked_for(cents):
    assert sum(nexus.list_shares(job(gpus=cents / 100))) == cents


# The end of a job, and of those that come after it


def end(made, id, status, **facts):
    """{id: status} of the jobs that are changed; each change is made as it comes."""
    before = dict(made.jobs)
    for change in nexus.end_job(made, made.jobs[id], status, NOW, **facts):
        nexus.apply(made, change)
        check_indexes(made)
    return {one.id: one.status for one in made.jobs.values() if one != before[one.id]}


def child(id, number, *parents, **fields):
    return job(id, number, after=parents, unmet=parents, **fields)


ENDS = [  # reason, jobs, status and facts of the first one's end, who is changed and what it is then, who may start then
    ("nobody comes after it", [running("aaa"), job("bbb", 2)], "completed", {}, {"aaa": "completed"}, ["bbb"]),
    ("it completed: the next may start", [running("aaa"), child("bbb", 2, "aaa")], "completed", {},
     {"aaa": "completed", "bbb": "pending"}, ["bbb"]),
    ("but not while it comes after another", [running("aaa"), running("xxx", (1,), number=9), child("bbb", 2, "aaa", "xxx")],
     "completed", {}, {"aaa": "completed", "bbb": "pending"}, []),
    ("it failed", [running("aaa"), child("bbb", 2, "aaa")], "failed", {"cause": "exit", "exit_code": 3},
     {"aaa": "failed", "bbb": "cancelled"}, []),
    ("and those after that, too", [running("aaa"), child("bbb", 2, "aaa"), child("ccc", 3, "bbb"), job("ddd", 4)],
     "failed", {"cause": "exit", "exit_code": 3}, {"aaa": "failed", "bbb": "cancelled", "ccc": "cancelled"}, ["ddd"]),
    ("one that comes after two of them ends once",
     [running("aaa"), child("bbb", 2, "aaa"), child("ccc", 3, "aaa"), child("ddd", 4, "bbb", "ccc")], "failed", {},
     {"aaa": "failed", "bbb": "cancelled", "ccc": "cancelled", "ddd": "cancelled"}, []),
    ("it was taken out of the queue", [job("aaa"), child("bbb", 2, "aaa")], "cancelled", {"cause": "killed"},
     {"aaa": "cancelled", "bbb": "cancelled"}, []),
    ("of several children each", [running("aaa"), *[child(id, 2, "aaa") for id in ("bbb", "ccc")]], "completed", {},
     {"aaa": "completed", "bbb": "pending", "ccc": "pending"}, ["bbb", "ccc"]),
]


@pytest.mark.parametrize("reason, jobs, status, facts, changed, free", ENDS, ids=[case[0] for case in ENDS])
def test_end_job(reason, jobs, status, facts, changed, free):
    made = state(*jobs)
    assert end(made, "aaa", status, **facts) == changed, reason
    assert sorted(id for lines in made.kinds.values() for line in lines.values() for _, id in line) == free


PARENTS = [  # reason, what became of the parent, what its child's cause_line says
    ("its exit code", {"status": "failed", "cause": "exit", "exit_code": 3}, "job aaa, which failed (exit 3)"),
    ("its cause", {"status": "failed", "cause": "timeout", "exit_code": 143}, "job aaa, which failed (timeout)"),
    ("cancelled", {"status": "cancelled", "cause": "killed"}, "job aaa, which was cancelled (killed)"),
]


@pytest.mark.parametrize("reason, facts, part", PARENTS)
def test_a_cancelled_child_names_its_parent(reason, facts, part):
    made = state(running("aaa"), child("bbb", 2, "aaa"), child("ccc", 3, "bbb"))
    end(made, "aaa", **facts)
    assert made.jobs["bbb"].cause == made.jobs["ccc"].cause == "dependency" and part in made.jobs["bbb"].cause_line, reason
    assert "job bbb, which was cancelled (dependency)" in made.jobs["ccc"].cause_line, "the next one up, not the first"
    assert made.jobs["bbb"].finished_at == NOW and made.jobs["bbb"].status_history[-1] == ("cancelled", NOW)
    assert made.dependents == {}


def test_a_chain_of_thousands_ends_at_once():
    names = [letters(number) for number in range(3000)]
    made = state(running(names[0]), *[child(id, number, names[number - 1]) for number, id in enumerate(names) if number])
    for change in nexus.end_job(made, made.jobs[names[0]], "failed", NOW, cause="exit", exit_code=1):
        nexus.apply(made, change)
    assert made.order == [] and made.dependents == {} and {one.cause for one in made.finished.values()} == {"exit", "dependency"}


def test_what_has_ended_does_not_end_again():
    made = state(finished("aaa"))
    with pytest.raises(nexus.NexusError) as caught:
        list(nexus.end_job(made, made.jobs["aaa"], "failed", NOW))
    assert caught.value.kind == "conflict"


def test_a_job_that_asks_for_other_gpus_is_of_another_kind():
    made = state(job("aaa"), job("bbb", 2))
    undo = nexus.apply(made, nexus.JobChanged("aaa", {"gpus": 2}))
    check_indexes(made)
    undo()
    check_indexes(made)


MISFITS = [  # reason, change.  The journal is damaged, or another version's.
    ("added twice", nexus.JobAdded(job("aaa"))),
    ("an unknown job", nexus.JobChanged("zzz", {"pid": 1})),
    ("an unknown job is removed", nexus.JobsRemoved(("aaa", "zzz"))),
    ("a field that no job has", nexus.JobChanged("aaa", {"colour": "red"})),
    ("a field that is no fact of the queue", nexus.StateChanged({"colour": "red"})),
    ("one that is changed by jobs alone", nexus.StateChanged({"paused": True, "jobs": ()})),
]


@pytest.mark.parametrize("reason, change", MISFITS, ids=[case[0] for case in MISFITS])
def test_a_change_that_does_not_fit_changes_nothing(reason, change):
    made = state(job("aaa"), running("bbb", number=2))
    before = dump(made)
    with pytest.raises(KeyError):
        nexus.apply(made, change)
    assert dump(made) == before, reason


def test_an_environment_is_stored_once():
    made = nexus.State()
    undo_first = nexus.apply(made, nexus.EnvironmentAdded("d", {"A": "1"}))
    undo_second = nexus.apply(made, nexus.EnvironmentAdded("d", {"A": "1"}))
    undo_second()
    assert made.environments == {"d": {"A": "1"}}, "the first is still there: a job needs it"
    undo_first()
    assert made.environments == {}


# The order of the queue

orders = st.lists(st.integers(-3, 3), min_size=3, max_size=6).map(tuple)


@given(orders, orders)
def test_order_between_is_between(one, other):
    first, second = sorted([one, other])
    if first != second:
        assert first < nexus.order_between(first, second) < second


@given(orders)
def test_order_between_nothing_and_the_first_is_before_it(first):
    made = nexus.order_between(None, first)
    assert made < first and made[2] == first[2], "the sequence number stays one that was given out"


@pytest.mark.parametrize("seed", range(15))
def test_move_job_puts_it_where_it_was_asked_to(seed):
    dice = random.Random(seed)
    names = [letters(number) for number in range(dice.randrange(1, 14))]
    made = state(*[job(id, number) for number, id in enumerate(names, 1)])
    for _ in range(300):
        if dice.random() < 0.03 and len(names) < 20:
            id = letters(len(names))
            nexus.apply(made, nexus.JobAdded(job(id, **nexus.next_place(made, 1, "ann"))))
            names.append(id)
            assert [id for _, id in made.order] == names, "a new job comes last, whatever was moved"
        id, count = dice.choice(names), len(names)
        position = dice.choice([0, 1, dice.randrange(count), count - 1, count + 5])
        change = nexus.move_job(made, made.jobs[id], position)
        was = names.index(id)
        names.remove(id)
        names.insert(position, id)
        assert (change is None) == (names.index(id) == was), "no change, nothing to journal"
        if change:
            assert list(change.facts) == ["order"]
            nexus.apply(made, change)
        assert [id for _, id in made.order] == names
    check_indexes(made)


def test_the_first_passes_priorities():
    made = state(job("low", priority=2), job("top", 2, priority=0))
    nexus.apply(made, nexus.move_job(made, made.jobs["low"], 0))
    nexus.apply(made, nexus.JobAdded(job("new", **nexus.next_place(made, 0, "ann"))))
    assert [id for _, id in made.order] == ["low", "top", "new"]


def test_lower_priority_numbers_run_first_and_equal_ones_in_the_order_of_their_coming():
    made = nexus.State()
    for id, priority in (("aaa", 1), ("bbb", 2), ("ccc", 0), ("ddd", 1), ("eee", -5)):
        nexus.apply(made, nexus.JobAdded(job(id, **nexus.next_place(made, priority, "ann"))))
    assert [id for _, id in made.order] == ["eee", "ccc", "aaa", "ddd", "bbb"]


def queue_of(*deeds):
    """The queue after `ann a` (she adds job a), `start a`, `cancel a`, `low a` (it gets priority 2), `front a`."""
    made = nexus.State()
    for deed in deeds:
        verb, id = deed.split()
        if verb == "start":
            nexus.apply(made, nexus.change_status(made.jobs[id], nexus.RUNNING, NOW, attempt=1))
        elif verb == "cancel":
            nexus.apply(made, nexus.change_status(made.jobs[id], nexus.CANCELLED, NOW))
        elif verb in ("low", "normal"):
            priority = {"low": 2, "normal": 1}[verb]
            nexus.apply(made, nexus.JobChanged(id, {"priority": priority, "order": nexus.place_in_priority(made, made.jobs[id], priority)}))
        elif verb == "forget":
            nexus.apply(made, nexus.change_status(made.jobs[id], nexus.COMPLETED, NOW))
            nexus.apply(made, nexus.JobsRemoved((id,)))
            made.started_turns.clear()          # as after a restart
        elif verb == "front":
            nexus.apply(made, nexus.move_job(made, made.jobs[id], 0))
        else:
            nexus.apply(made, nexus.JobAdded(job(id, user=verb, **nexus.next_place(made, 1, verb))))
    check_indexes(made)
    return " ".join(id for _, id in made.order)


TURNS = [  # reason, what happens, the queue then
    ("one user: in the order of their coming", ["ann a", "ann b", "ann c"], "a b c"),
    ("users take turns", ["ann a", "ann b", "ann c", "bob d", "bob e"], "a d b e c"),
    ("a third one too", ["ann a", "ann b", "bob c", "cyd d"], "a c d b"),
    ("who comes later begins where the others are", ["ann a", "ann b", "ann c", "ann d", "start a", "start b", "bob e"], "e c d"),
    ("and makes up for nothing", ["ann a", "ann b", "ann c", "ann d", "start a", "start b", "bob e", "bob f", "bob g"], "e c f d g"),
    ("nor does one whose queue was empty", ["ann a", "start a", "bob b", "bob c", "bob d", "start b", "start c", "ann e", "ann f"],
     "e d f"),
    ("whose last one runs is not before those who have none", ["ann a", "start a", "ann b", "bob c"], "c b"),
    ("what was cancelled counts for nothing", ["ann a", "ann b", "ann c", "ann d", "cancel b", "cancel c", "cancel d", "bob e", "ann f"],
     "a e f"),
    ("all cancelled", ["ann a", "ann b", "ann c", "cancel a", "cancel b", "cancel c", "bob d", "bob e", "ann f"], "d f e"),
    ("a passed-over job makes none slow", ["ann x", "ann a", "ann b", "start a", "start b", "bob c", "bob d"], "x c d"),
    ("each priority has its turns", ["ann a", "ann b", "bob c", "low a"], "c b a"),
    ("back in the priority, back in the place", ["ann a", "ann b", "ann c", "low b", "normal b"], "a b c"),
    ("back as the first one", ["ann a", "ann b", "ann c", "low a", "normal a"], "a b c"),
    ("another's place is not taken", ["ann a", "ann b", "bob c", "bob d", "low b", "normal b"], "a c b d"),
    ("changes of priority win no turn", ["ann a", "ann b", "bob c", "bob d", "low c", "low d", "normal d", "normal c"], "a d b c"),
    ("who comes where only others wait begins with them", ["ann a", "ann b", "ann c", "start a", "start b", "forget a", "forget b", "bob d",
     "bob e"], "d c e"),
    ("what was moved to the front takes no turn from the others", ["ann a", "ann b", "ann c", "front c", "start c", "bob d"], "a d b"),
]


@pytest.mark.parametrize("reason, deeds, queue", TURNS, ids=[case[0] for case in TURNS])
def test_turns_of_users(reason, deeds, queue):
    assert queue_of(*deeds) == queue, reason


@given(st.lists(st.tuples(st.sampled_from(["ann", "bob", "cyd"]), st.booleans()), max_size=40))
def test_whoever_waits_is_never_more_than_one_turn_behind(deeds):
    """Between two starts of a user who has jobs waiting all along, nobody else starts more than two."""
    made, starts = nexus.State(), []
    for number, (user, is_start) in enumerate([*deeds, *[("ann", True)] * 40]):
        if is_start and made.order:
            waiting = {made.jobs[id].user for _, id in made.order}
            first = made.jobs[made.order[0][1]]
            nexus.apply(made, nexus.change_status(first, nexus.RUNNING, NOW, attempt=1))
            starts.append((first.user, waiting))
        elif not is_start:
            nexus.apply(made, nexus.JobAdded(job(letters(number), user=user, **nexus.next_place(made, 1, user))))
    for user in ("ann", "bob", "cyd"):
        others = {}
        for starter, waiting in starts:
            if starter == user or user not in waiting:
                others = {}
            else:
                others[starter] = others.get(starter, 0) + 1
                assert others[starter] <= 2, starts


# What a submission may say

ACCEPTED = [  # reason, keys beside the command, field, value
    ("the least", {}, "gpus", None),
    ("a CPU job", {"gpus": 0}, "gpus", 0),
    ("GPUs by index", {"gpu_ids": [5, 0, 5]}, "gpu_ids", (0, 5)),
    ("as the command line writes them", {"gpu_ids": "0-3,5"}, "gpu_ids", (0, 1, 2, 3, 5)),
    ("null is as if it were not there", {"gpus": None, "gpu_ids": None, "name": None, "cwd": None, "env": None},
     "name", None),
    ("priority by name", {"priority": "high"}, "priority", 0),
    ("by number", {"priority": 7}, "priority", 7),
    ("by number as a text", {"priority": "-3"}, "priority", -3),
    ("normal if not said", {}, "priority", 1),
    ("a directory", {"cwd": "/home/ann/a b"}, "cwd", "/home/ann/a b"),
    ("bytes that are no UTF-8, as Python reads them", {"cwd": "/home/\udcff"}, "cwd", "/home/\udcff"),
    ("variables on top of the service's", {"env": {"A": "", "B": "ü=\n"}}, "env", {"A": "", "B": "ü=\n"}),
    ("all of the environment", {"environment": {}}, "environment", {}),
    ("an id of the caller's", {"id": "abc"}, "id", "abc"),
    ("limits", {"limits": {"nofile": [1024, 4096], "core": [0, -1]}}, "limits",
     (("core", 0, -1), ("nofile", 1024, 4096))),
    ("a umask", {"umask": 0o027}, "umask", 0o027),
    ("the longest command that Linux takes", {"command": "x" * nexus.MAX_ARGUMENT_BYTES}, "command", "x" * 131071),
    ("several lines", {"command": "cd /tmp\nls"}, "command", "cd /tmp\nls"),
    ("half a GPU", {"gpus": 0.5}, "gpus", 0.5), ("one and a share", {"gpus": 1.25}, "gpus", 1.25),
    ("a hundredth, whatever its binary form", {"gpus": 0.29}, "gpus", 0.29),
    ("2.0 is 2", {"gpus": 2.0}, "gpus", 2), ("a share of one that is named", {"gpus": 0.5, "gpu_ids": [3]}, "gpus", 0.5),
    ("1.5 of two", {"gpus": 1.5, "gpu_ids": [0, 1]}, "gpu_ids", (0, 1)),
    ("memory", {"gpu_mem_mib": 10240}, "gpu_mem_mib", 10240),
    ("a group, and how many of it at once", {"group": "g", "max_concurrent": 2}, "max_concurrent", 2),
    ("after others", {"after": ["abc", "abd", "abc"]}, "after", ("abc", "abd")),
    ("after others, in a text", {"after": "abc,abd"}, "after", ("abc", "abd")), ("after nobody", {"after": []}, "after", ()),
    ("no retries, whatever the configuration says", {"retries": 0}, "retries", 0),
    ("no time limit, whatever the configuration says", {"timeout_seconds": 0}, "timeout_seconds", 0),
    ("half a second", {"timeout_seconds": 0.5}, "timeout_seconds", 0.5), ("as it expects", {"expected_time": 60}, "expected_time", 60),
    ("a conda environment by path", {"conda": "/opt/envs/a b"}, "conda", "/opt/envs/a b"),
    ("a model", {"llm": "qwen2.5-7b-inst"}, "llm", "qwen2.5-7b-inst"), ("--cuda", {"cuda_arg": True}, "cuda_arg", True),
    ("once", {"unique": True}, "unique", True),
    ("a snapshot", {"snapshot": "a" * 40, "snapshot_repo": "/home/ann/x", "cwd": "/home/ann/x/y"}, "snapshot", "a" * 40),
    ("of the folder itself", {"snapshot": "a" * 40, "snapshot_repo": "/home/ann/x", "cwd": "/home/ann/x"}, "snapshot_repo", "/home/ann/x"),
]


@pytest.mark.parametrize("reason, keys, field, value", ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_parse_submission(reason, keys, field, value):
    assert getattr(nexus.parse_submission({"command": "ls", **keys}), field) == value, reason


REFUSED = [  # reason, submission, what the message names
    ("a list", [], "JSON object"),
    ("a text", "ls", "JSON object"),
    ("no command", {}, "command"),
    ("an empty command", {"command": " \n"}, "command"),
    ("a command that is a list", {"command": ["ls"]}, "command"),
    ("NUL in a command", {"command": "a\0b"}, "NUL"),
    ("a command Linux would not take", {"command": "x" * 131072}, "131071"),
    ("nor one with as many bytes", {"command": "ü" * 70000}, "131071"),
    ("half a character", {"command": "echo \ud800"}, "Unicode"),
    ("an unknown key", {"command": "ls", "gpu": 1}, "'gpu'"),
    ("an id with digits", {"command": "ls", "id": "a1c"}, "id"),
    ("an id that is none", {"command": "ls", "id": 5}, "id"),
    ("negative GPUs", {"command": "ls", "gpus": -1}, "gpus"),
    ("true GPUs", {"command": "ls", "gpus": True}, "gpus"),
    ("GPUs as a text", {"command": "ls", "gpus": "1"}, "gpus"),
    ("too many GPUs for any box", {"command": "ls", "gpus": 1025}, "gpus"),
    ("no GPU named", {"command": "ls", "gpu_ids": []}, "gpu_ids"),
    ("one GPU, not a list", {"command": "ls", "gpu_ids": 0}, "gpu_ids"),
    ("a negative index", {"command": "ls", "gpu_ids": [-1]}, "gpu_ids"),
    ("more GPUs than named", {"command": "ls", "gpus": 3, "gpu_ids": [0, 1, 1]}, "3 GPUs"),
    ("GPUs named for a CPU job", {"command": "ls", "gpus": 0, "gpu_ids": [0]}, "gpu_ids"),
    ("a priority that is none", {"command": "ls", "priority": "urgent"}, "urgent"),
    ("a priority with decimals", {"command": "ls", "priority": 1.5}, "priority"),
    ("a priority without bounds", {"command": "ls", "priority": 10**9}, "priority"),
    ("a relative directory", {"command": "ls", "cwd": "src"}, "cwd"),
    ("a name of two lines", {"command": "ls", "name": "a\nb"}, "name"),
    ("an empty name", {"command": "ls", "name": ""}, "name"),
    ("a long name", {"command": "ls", "name": "ü" * 101}, "name"),
    ("variables as a list", {"command": "ls", "env": ["A=1"]}, "env"),
    ("an empty list is a list too", {"command": "ls", "env": []}, "env"),
    ("and an empty text no object", {"command": "ls", "env": ""}, "env"),
    ("limits as an empty list", {"command": "ls", "limits": []}, "limits"),
    ("a variable that is a number", {"command": "ls", "env": {"A": 1}}, "env"),
    ("a name no variable can have", {"command": "ls", "env": {"A=B": "1"}}, "A=B"),
    ("a variable without a name", {"command": "ls", "env": {"": "1"}}, "env"),
    ("NUL in a variable", {"command": "ls", "env": {"A": "a\0"}}, "A"),
    ("a variable longer than Linux takes", {"command": "ls", "env": {"A": "x" * 131070}}, "A"),
    ("an environment that is a list", {"command": "ls", "environment": []}, "environment"),
    ("a umask beyond the bits it has", {"command": "ls", "umask": 0o1000}, "umask"),
    ("tty as a number", {"command": "ls", "tty": 1}, "tty"),
    ("a limit that is none", {"command": "ls", "limits": {"files": [1, 1]}}, "limits"),
    ("half a limit", {"command": "ls", "limits": {"nofile": [1]}}, "limits"),
    ("a third decimal", {"command": "ls", "gpus": 0.125}, "two decimals"),
    ("no number of GPUs", {"command": "ls", "gpus": float("nan")}, "gpus"),
    ("no end of GPUs", {"command": "ls", "gpus": float("inf")}, "gpus"),
    ("a number too long to count", {"command": "ls", "gpus": 10**400}, "gpus"),
    ("a share more than named", {"command": "ls", "gpus": 1.5, "gpu_ids": [0]}, "1.5 GPUs"),
    ("memory for a CPU job", {"command": "ls", "gpus": 0, "gpu_mem_mib": 5}, "gpu_mem_mib"),
    ("--cuda for a CPU job", {"command": "ls", "gpus": 0, "cuda_arg": True}, "cuda_arg"),
    ("memory with its unit", {"command": "ls", "gpu_mem_mib": "10G"}, "gpu_mem_mib"),
    ("no memory", {"command": "ls", "gpu_mem_mib": 0}, "gpu_mem_mib must be a whole number from 1"),
    ("a limit without a group", {"command": "ls", "max_concurrent": 2}, "max_concurrent"),
    ("a limit of none", {"command": "ls", "group": "g", "max_concurrent": 0}, "max_concurrent"),
    ("a group of two lines", {"command": "ls", "group": "a\nb"}, "group"),
    ("an empty group", {"command": "ls", "group": " "}, "group"),
    ("after one that is no id", {"command": "ls", "after": ["1"]}, "after"),
    ("after an empty text", {"command": "ls", "after": ""}, "after"),
    ("after a hole", {"command": "ls", "after": "abc,,abd"}, "after"),
    ("after a number", {"command": "ls", "after": 5}, "after"),
    ("less than no retries", {"command": "ls", "retries": -1}, "retries"),
    ("half a retry", {"command": "ls", "retries": 0.5}, "retries"),
    ("true retries", {"command": "ls", "retries": True}, "retries"),
    ("a limit below zero", {"command": "ls", "timeout_seconds": -1}, "timeout_seconds"),
    ("a limit in words", {"command": "ls", "timeout_seconds": "2h"}, "timeout_seconds"),
    ("no limit at all", {"command": "ls", "timeout_seconds": float("inf")}, "timeout_seconds"),
    ("a limit that is none", {"command": "ls", "timeout_seconds": float("nan")}, "timeout_seconds"),
    ("no time expected", {"command": "ls", "expected_time": 0}, "expected_time"),
    ("an option for conda", {"command": "ls", "conda": "--help"}, "conda"),
    ("a model that is a list", {"command": "ls", "llm": ["q"]}, "llm"),
    ("unique as a word", {"command": "ls", "unique": "yes"}, "unique must be true or false"),
    ("a snapshot that is no commit", {"command": "ls", "snapshot": "HEAD", "snapshot_repo": "/x", "cwd": "/x"}, "snapshot"),
    ("a snapshot of nothing", {"command": "ls", "snapshot": "a" * 40}, "snapshot_repo"),
    ("a work tree without a snapshot", {"command": "ls", "snapshot_repo": "/x", "cwd": "/x"}, "snapshot"),
    ("a work tree elsewhere", {"command": "ls", "snapshot": "a" * 40, "snapshot_repo": "/x", "cwd": "/xy"}, "cwd"),
]


@pytest.mark.parametrize("reason, data, part", REFUSED, ids=[case[0] for case in REFUSED])
def test_parse_submission_refuses(reason, data, part):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submission(data)
    assert caught.value.kind == "usage" and part in caught.value.message, reason
    assert caught.value.hint and len(caught.value.message) < 300


def test_an_unknown_key_is_told_the_nearest():
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submission({"command": "ls", "prioritiy": 1})
    assert caught.value.hint == "did you mean 'priority'?"


submissions = json_values | st.fixed_dictionaries({"command": texts | json_values}, optional={
    **{key: json_values for key in nexus.SUBMISSION_PARSERS if key != "command"},
    "gpus": st.integers(-1, 4) | st.floats(-1, 4) | json_values,
    "gpu_ids": st.lists(st.integers(-1, 4)) | texts | json_values,
    "priority": st.sampled_from(["low", "9", "٣"]) | json_values,
    "env": st.dictionaries(texts, texts | json_values), "cwd": texts.map(lambda text: "/" + text),
    "limits": st.dictionaries(st.sampled_from(["nofile", "core", "x"]), st.lists(st.integers(-2, 9), max_size=3))})


@given(submissions)
def test_parse_submission_raises_nothing_else(data):
    try:
        asked = nexus.parse_submission(data)
    except nexus.NexusError as error:
        assert error.kind == "usage" and error.message
    else:
        assert asked.command.strip() and "\0" not in asked.command
        assert asked.gpu_ids is None or (asked.gpu_ids and list(asked.gpu_ids) == sorted(set(asked.gpu_ids)))
        assert asked.cwd is None or asked.cwd.startswith("/")
        assert asked.gpus is None or abs(asked.gpus * 100 - round(asked.gpus * 100)) < 1e-6
        assert set(data) <= set(nexus.SUBMISSION_FIELDS)
        assert all(isinstance(text, str) for text in (*asked.env, *asked.env.values()))


@pytest.mark.parametrize("key", ["gpus", "gpu_ids", "cwd", "priority", "limits"])
def test_what_can_be_read_can_be_refused_however_deep_it_is(key):
    def text(depth):
        inner = "[" * depth + "]" * depth
        return f'{{"command": "ls", "{key}": {f"""{{"nofile": {inner}}}""" if key == "limits" else inner}}}'

    def is_read(depth):
        try:
            return bool(nexus.parse_json(text(depth), "the body"))
        except nexus.NexusError:
            return False

    most, least_refused = 1, 2
    while is_read(least_refused) and least_refused < 2**16:
        most, least_refused = least_refused, least_refused * 2
    while least_refused - most > 1:
        middle = (most + least_refused) // 2
        most, least_refused = (middle, least_refused) if is_read(middle) else (most, middle)
    for depth in range(max(2, most - 40), most + 1):
        with pytest.raises(nexus.NexusError):
            nexus.parse_submission(nexus.parse_json(text(depth), "the body"))


def test_of_whom_the_history_is_shortened():
    """One user's thousand end nobody else's."""
    made = nexus.State()
    for number in range(30):
        user = "bob" if number in (0, 7, 20) else "ann" if number < 12 else "cyd"
        nexus.apply(made, nexus.JobAdded(job(letters(number), number, user=user, status="completed")))
    gone = nexus.choose_trimmed(made, 12)
    assert [one.user for one in gone].count("bob") == 0 and len(gone) == 18
    left = [one.user for one in made.finished.values() if one not in gone]
    assert (left.count("ann"), left.count("bob"), left.count("cyd")) in ((4, 3, 5), (5, 3, 4))
    assert [one.number for one in gone if one.user == "cyd"] == sorted(one.number for one in made.finished.values() if one.user == "cyd")[
        :len([one for one in gone if one.user == "cyd"])], "the oldest of each"


# What another nexus asks for

ORDER = {"id": "abc", "attempt": 1, "user": "ann", "is_stopped": False, "path": "/usr/bin", "job": {"command": "true"}, "code": None}
ORDERS = {"head": "0-1234", "submit": [ORDER], "stop": [["abd", 1]], "withdraw": [["abe", 2]], "collected": []}
SYNC = {"head": "0-1234", "since": None, "logs": {"abc": [1, 0, 5]}, "wait_seconds": 10}


def test_parse_orders():
    orders = nexus.parse_orders(ORDERS)
    assert (orders.head, orders.stop, orders.withdraw, orders.collected) == ("0-1234", (("abd", 1),), (("abe", 2),), ())
    order, = orders.submit
    assert (order.id, order.attempt, order.user, order.is_stopped, order.path, order.code) == ("abc", 1, "ann", False, "/usr/bin", None)
    assert order.submission.id == "abc" and order.submission.command == "true"
    assert nexus.parse_orders({**ORDERS, "submit": [{**ORDER, "code": "cHJpbnQ="}]}).submit[0].code == b"print"


def test_parse_sync():
    asked = nexus.parse_sync(SYNC)
    assert (asked.head, asked.since, asked.logs, asked.wait_seconds) == ("0-1234", None, {"abc": (1, 0, 5)}, 10)
    assert nexus.parse_sync({**SYNC, "since": 7, "wait_seconds": 1e6}) == nexus.SyncAsked("0-1234", 7, asked.logs, 60.0)


WRONG_ORDERS = [  # reason, what is otherwise
    ("no head", {"head": None}), ("jobs that are none", {"submit": 5}), ("a job without an attempt", {"submit": [{"id": "abc"}]}),
    ("an id that is none", {"submit": [{**ORDER, "id": "0"}]}), ("an attempt below 0", {"submit": [{**ORDER, "attempt": -1}]}),
    ("a command that is none", {"submit": [{**ORDER, "job": {"command": 5}}]}), ("no job", {"submit": [{**ORDER, "job": []}]}),
    ("code that is no base64", {"submit": [{**ORDER, "code": "%"}]}), ("half a pair", {"stop": [["abc"]]}),
    ("no pairs", {"withdraw": ["abc"]}), ("an unknown key of a job", {"submit": [{**ORDER, "job": {"command": "x", "host": "y"}}]}),
]


@pytest.mark.parametrize("reason, keys", WRONG_ORDERS, ids=[case[0] for case in WRONG_ORDERS])
def test_parse_orders_refuses(reason, keys):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_orders({**ORDERS, **keys})
    assert caught.value.kind == "usage"


def changed(known):
    """A good value of JSON with something else at one place or more."""
    return st.fixed_dictionaries({key: st.just(good) | json_values for key, good in known.items()})


@given(json_values | changed(ORDERS) | changed(ORDER).map(lambda order: {**ORDERS, "submit": [order]}))
def test_whatever_comes_is_orders_or_refused(data):
    with contextlib.suppress(nexus.NexusError):
        assert isinstance(nexus.parse_orders(data), nexus.Orders)


@given(json_values | changed(SYNC) | json_values.map(lambda logs: {**SYNC, "logs": logs})
       | json_values.map(lambda offsets: {**SYNC, "logs": {"abc": offsets}}))
def test_whatever_comes_is_a_question_or_refused(data):
    with contextlib.suppress(nexus.NexusError):
        assert isinstance(nexus.parse_sync(data), nexus.SyncAsked)


def test_what_another_nexus_has_not_collected_stays():
    jobs = [finished("aaa", head="0-1234"), finished("aab", head="0-1234", is_collected=True), finished("aac"), finished("aad")]
    assert [job.id for job in nexus.choose_trimmed(state(*jobs), 2)] == ["aab", "aac"]
    assert [job.id for job in nexus.choose_trimmed(state(*jobs), 0)] == ["aab", "aac", "aad"]

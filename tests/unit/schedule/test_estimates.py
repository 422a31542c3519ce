"""When jobs will start, as far as that can be told."""

import pytest
from makers import NOW, config, finished, gpu, job, running
from plans import TWO, WAITED, box, box_user, held_by, running_there, there, want

import nexus

ESTIMATES = [  # reason, jobs, run times, keys, {pending job: seconds from now}
    ("one after the other", [running("rrr"), job("aaa", 2), job("bbb", 3)], {"rrr": 100, "aaa": 7, "bbb": 1}, {}, {"aaa": 40, "bbb": 47}),
    ("nobody knows the running one's", [running("rrr"), job("aaa", 2)], {"aaa": 5}, {}, {}),
    ("the running one takes longer than was known", [running("rrr"), job("aaa", 2)], {"rrr": 30, "aaa": 5}, {}, {}),
    ("a little longer: as much again", [running("rrr"), job("aaa", 2)], {"rrr": 55, "aaa": 5}, {}, {"aaa": 5}),
    ("what comes after one that nobody knows anything of", [running("rrr"), job("aaa", 2), job("bbb", 3), job("ccc", 4)],
     {"rrr": 100, "aaa": 5, "ccc": 5}, {}, {"aaa": 40, "bbb": 45}),
    ("its next attempt", [job("aaa", 2, retry_at=NOW + 3)], {"aaa": 5}, {}, {"aaa": 3}),
    ("a job that started at time 0", [running("rrr", started_at=0.0), job("aaa", 2)], {"rrr": NOW + 40, "aaa": 5}, {}, {"aaa": 40}),
]


@pytest.mark.parametrize("reason, jobs, run_times, keys, expected", ESTIMATES, ids=[case[0] for case in ESTIMATES])
def test_estimate_starts(reason, jobs, run_times, keys, expected):
    made = nexus.estimate_starts(jobs, [], run_times, [gpu(0)], config(**keys), NOW)
    assert made == {id: NOW + seconds for id, seconds in expected.items()}, reason


def test_the_limit_of_a_group_counts():
    jobs, groups = [running("rrr", group="g"), job("aaa", 2, group="g"), job("bbb", 3)], [nexus.Group("g", limit=1)]
    made = nexus.estimate_starts(jobs, groups, {"rrr": 100, "aaa": 5, "bbb": 5}, [gpu(0), gpu(1)], config(), NOW)
    assert made == {"aaa": NOW + 40, "bbb": NOW}


def test_memory_that_cannot_be_seen_is_taken_to_end_with_the_jobs_there():
    jobs, busy = [running("rrr"), job("aaa", 2)], gpu(0, memory_used_mib=9000)
    assert nexus.estimate_starts(jobs, [], {"rrr": 100, "aaa": 5}, [busy], config(), NOW) == {"aaa": NOW + 40}


RUN_TIMES = [  # reason, fields of the job, what has finished, seconds
    ("as it expects", {"expected_time": 5}, [finished("fff", runtime_seconds=60.0)], 5),
    ("as the same command took", {}, [finished("fff", runtime_seconds=60.0)], 60),
    ("as others of its group took", {"command": "x", "group": "g"}, [finished("fff", command="y", group="g", runtime_seconds=7.0)], 7),
    ("the command before the group", {"command": "x", "group": "g"}, [finished("eee", command="x", runtime_seconds=3.0),
                                                                     finished("fff", command="y", group="g", runtime_seconds=7.0)], 3),
    ("the last hundred count", {}, [finished("fff", runtime_seconds=seconds) for seconds in (60.0, *[1.0] * 50, *[3.0] * 50)], 2),
    ("others of no group are no group", {"command": "x"}, [finished("fff", command="y", runtime_seconds=7.0)], None),
    ("failures say nothing", {}, [finished("fff", status="failed", runtime_seconds=60.0)], None),
]


@pytest.mark.parametrize("reason, fields, done, seconds", RUN_TIMES, ids=[case[0] for case in RUN_TIMES])
def test_know_run_times(reason, fields, done, seconds):
    assert nexus.know_run_times([job("aaa", **fields)], done) == {"aaa": seconds}, reason


def test_estimates_know_other_machines():
    jobs = [running_there("rrr", "n1"), job("aaa", 2, only_node="n1"), job("bbb", 3)]
    made = nexus.estimate_starts(jobs, [], {"rrr": 100, "aaa": 5, "bbb": 5}, [*there("n1", 0), *there("n2", 0)], config(), NOW, TWO)
    assert made == {"aaa": NOW + 40, "bbb": NOW}


def test_what_will_run_is_as_old_then_as_it_will_be():
    """`ddd` may use what is kept for `ccc` only if it ends before `aaa` does."""
    waiting = [job("aaa", 1, expected_time=100), job("bbb", 2, expected_time=50), job("ccc", 3, gpus=2, **WAITED),
               job("ddd", 4, expected_time=60)]
    run_times = {"aaa": 100, "bbb": 50, "ccc": 10, "ddd": 60}
    made = nexus.estimate_starts(waiting, [], run_times, [gpu(0), gpu(1)], config(), NOW)
    assert made == {"aaa": NOW, "bbb": NOW, "ccc": NOW + 100, "ddd": NOW + 110}


ENDS = [  # reason, how long it has run, how long such ones run, seconds until it ends
    ("in the middle", 10, 30, 20), ("just begun", 0, 30, 30), ("over its time by a little", 32, 30, 8), ("a long one", 3600, 7200, 3600),
    ("just over its time", 30, 30, 7.5),
    ("begun in the future, by another clock", -500, 30, 30), ("none has ended yet", 10, 60.0, float("inf")),
    ("none has ended yet, and it has run for long: that is what is told", 3600.5, 3600, float("inf"))]


@pytest.mark.parametrize("reason, age_s, run_s, left_s", ENDS, ids=[case[0] for case in ENDS])
def test_predict_end(reason, age_s, run_s, left_s):
    assert nexus.predict_end(nexus.Holding("GPU-0", 100, NOW - age_s), run_s, NOW) == NOW + left_s, reason


ONE = (want(),)
MANY = (want(jobs=60),)
NEXT_TURNS = [  # reason, the box, GPUs that are free, those that are asked about, (uid, seconds until then)
    ("who has nothing, when the other's job ends", box(box_user("bob", [0], MANY), wants=ONE), [], None, (0, 20)),
    ("who waits, if the other does not", box(box_user("bob", [0], MANY)), [], None, (1, 20)),
    ("who has had less", box(box_user("bob", [], MANY), wants=ONE, held=[0], had={0: 500.0, 1: 100.0}), [], None, (1, 20)),
    ("now", box(box_user("bob", [1], MANY), wants=ONE), ["GPU-0"], None, (0, 0)),
    ("of two, who has waited longer", box(box_user("bob", [], ONE), box_user("carl", [], [want(since=NOW - 700)])), ["GPU-0"], None,
     (2, 0)),
    ("after the first end of several", box(box_user("bob", [0], MANY, run_s=90.0), box_user("carl", [1]), wants=ONE), [], None, (0, 20)),
    ("the first that would do", box(box_user("bob", [0, 1], MANY), wants=[want(indices=(1,))]), ["GPU-2"], ["GPU-1"], (0, 20)),
    ("who collects gets it", box(box_user("bob", [], [want(4, collects=True)]), box_user("carl", [1], run_s=12.0), had={0: 9.0},
                                wants=ONE), [], None, (1, float("inf"))),
    ("none of his jobs has ended yet", box(box_user("bob", [0], MANY, run_s=60.0), wants=ONE), [], None, (0, float("inf"))),
    ("nobody waits", box(box_user("bob", [0])), ["GPU-1"], None, None),
    ("nobody knows when", box(box_user("bob", [], MANY)), [], None, None),
]


@pytest.mark.parametrize("reason, shared, free, usable, expected", NEXT_TURNS, ids=[case[0] for case in NEXT_TURNS])
def test_find_next_turn(reason, shared, free, usable, expected):
    found = nexus.find_next_turn(shared, free, usable, NOW)
    assert (found and (found[0], found[1] - NOW)) == expected, reason


FOUR = [0, 1, 2, 3]
BOBS, HIS = box_user("bob", [0], MANY), held_by("bob", 0)
SHARED = [  # reason, jobs, their run time, the box, GPUs, {pending job: seconds from now}
    ("by turns", [job("aaa", 2), job("bbb", 3)], 5, box(BOBS, wants=ONE), HIS, {"aaa": 20, "bbb": 25}),
    ("two turns after one that is twice as long", [job("aaa", 2), job("bbb", 3), job("ccc", 4)], 15, box(BOBS, wants=ONE), HIS,
     {"aaa": 20, "bbb": 35, "ccc": 80}),
    ("after who has had less", [job("aaa", 2)], 5, box(BOBS, wants=ONE, had={0: 100.0, 1: 30.0}), HIS, {"aaa": 80}),
    ("who waits for nothing takes nothing", [job("aaa", 2), job("bbb", 3)], 5, box(box_user("bob", [0]), wants=ONE), HIS,
     {"aaa": 20, "bbb": 25}),
    ("none of his has ended yet", [job("aaa", 2)], 5, box(box_user("bob", [0], MANY, run_s=60.0), wants=ONE), HIS, {}),
    ("nor when the next one will have", [job("aaa", 2)], 5, box(box_user("bob", [], MANY, run_s=60.0), had={0: 9.0}, wants=ONE),
     [gpu(0)], {}),
    ("one that is over his time", [job("aaa", 2)], 5, box(box_user("bob", [0], MANY, began=NOW - 40), wants=ONE), HIS, {"aaa": 10}),
    ("all four, when the last of them ends", [job("aaa", 2, gpus=4, **WAITED)], 5, box(
        box_user("bob", [0, 1], MANY), box_user("carl", [2, 3], MANY, run_s=50.0), wants=[want(4, collects=True)]),
     [*held_by("bob", 0, 1), *held_by("carl", 2, 3)], {"aaa": 40}),
    ("not before who collects", [job("aaa", 2)], 5, box(
        box_user("bob", [], [want(2, indices=(0, 1), collects=True)], run_s=40.0), box_user("carl", [0]), had={0: 100.0, 1: 0.0},
        wants=ONE), [*held_by("carl", 0), gpu(1)], {"aaa": 20 + 40}),
    ("what he takes is his until his job ends", [running("rrr", (1,), started_at=NOW), job("aaa", 2), job("bbb", 3)], 5,
     box(box_user("bob", [], MANY, run_s=100.0), wants=ONE, held=[1], had={0: 10.0, 1: 0.0}), [gpu(0), gpu(1)], {"aaa": 5, "bbb": 10}),
    ("a GPU that is free, and nobody's turn", [job("aaa", 2)], 5, box(box_user("bob", [0], [want(indices=(0,))])),
     [*HIS, gpu(1)], {"aaa": 0}),
    ("its holder tells nothing", [job("aaa", 2)], 5, box(box_user("bob", [], MANY), wants=ONE), held_by("carl", 0), {}),
    ("what he used is free then", [job("aaa", 2, gpu_mem_mib=9000)], 5, box(BOBS, wants=ONE),
     [nexus.replace(HIS[0], memory_used_mib=20000.0, processes=(nexus.GpuProcess(7, 20000.0, user="bob"),))], {"aaa": 20}),
    ("a third one's process stays", [job("aaa", 2)], 5, box(BOBS, wants=ONE),
     [nexus.replace(HIS[0], memory_used_mib=20000.0, processes=(nexus.GpuProcess(7, 20000.0, user="dora"),))], {}),
]


@pytest.mark.parametrize("reason, jobs, run_s, shared, gpus, expected", SHARED, ids=[case[0] for case in SHARED])
def test_starts_beside_other_users_come_by_turns(reason, jobs, run_s, shared, gpus, expected):
    run_times = {one.id: run_s for one in jobs}
    made = nexus.estimate_starts(jobs, [], run_times, gpus, config(), NOW, box=shared)
    assert {id: at - NOW for id, at in made.items()} == expected, reason


@pytest.mark.parametrize("run_s", [0.0, 1e-9, 1e18])
def test_whatever_others_tell_an_estimate_ends(run_s):
    liar = box_user("bob", [0, 0, 1], [want(jobs=2**31), want(4, jobs=2**31, collects=True)], run_s=run_s, began=NOW + 1e6)
    jobs = [job(f"a{number:02d}", number) for number in range(40)]
    made = nexus.estimate_starts(jobs, [], dict.fromkeys([one.id for one in jobs], 1.0), [*held_by("bob", 0, 1), gpu(2)], config(), NOW,
                                 box=box(liar, wants=[want(jobs=40)]))
    assert made and all(at >= NOW for at in made.values())

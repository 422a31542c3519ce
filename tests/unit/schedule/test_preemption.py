"""Whom an urgent job preempts."""

import pytest
from makers import GB, NOW, config, foreign, gpu, job, ours, running, state
from plans import TWO, box, box_user, running_there, there, want, words

import nexus

PREEMPTIONS = [  # reason, the preemptible jobs that run (GPUs, since how many seconds, other fields), who waits, who ends
    ("the youngest", {"old": ((0,), 900), "new": ((1,), 90)}, job("aaa"), "new"),
    ("not in its first minute", {"old": ((0,), 900), "new": ((1,), 50)}, job("aaa"), "old"),
    ("none is old enough", {"new": ((0,), 50)}, job("aaa"), None),
    ("two for two", {"old": ((0,), 900), "new": ((1,), 90), "mid": ((2,), 300)}, job("aaa", gpus=2), "new mid"),
    ("the youngest of four quarters", {id: ((0,), ago, {"gpus": 0.25}) for id, ago in (("aa", 900), ("bb", 800), ("cc", 700), ("dd", 600))},
     job("aaa", gpus=0.5), "dd cc"),
    ("when its first minute is over", {"new": ((0,), 60)}, job("aaa"), "new"),
    ("one of two GPUs", {"two": ((0, 1), 90), "new": ((2,), 300), "mid": ((3,), 900)}, job("aaa", gpus=2), "two"),
    ("not more than needed", {"two": ((0, 1), 900), "new": ((2,), 90)}, job("aaa"), "new"),
    ("the halves of one GPU", {"aa": ((0,), 900, {"gpus": 0.5}), "bb": ((0,), 900, {"gpus": 0.5}), "cc": ((1,), 100, {"gpus": 0.5}),
                               "firm": ((1,), 900, {"gpus": 0.5, "preemptible": False})}, job("aaa"), "aa bb"),
    ("half of a GPU", {"aa": ((0,), 900, {"gpus": 0.5}), "bb": ((0,), 800, {"gpus": 0.5})}, job("aaa", gpus=0.5), "bb"),
    ("it would not help", {"aa": ((0,), 900)}, job("aaa", gpus=2), None),
    ("who ends already is enough", {"aa": ((0,), 900, {"stop_cause": nexus.PREEMPTED}), "bb": ((1,), 900)}, job("aaa"), ""),
    ("who waits is preemptible, too", {"aa": ((0,), 900)}, job("aaa", preemptible=True), None),
    ("it wants no GPU", {"aa": ((0,), 900)}, job("aaa", gpus=0), None),
    ("it may have only that one", {"aa": ((0,), 900), "bb": ((1,), 90)}, job("aaa", gpu_ids=(0,)), "aa"),
    ("memory that only an empty GPU has", {"aa": ((0,), 900, {"gpus": 0.5, "gpu_mem_mib": 15 * GB})},
     job("aaa", gpus=0.5, gpu_mem_mib=12 * GB), "aa"),
    ("a GPU becomes free anyway", {"aa": ((0,), 900, {"preemptible": False, "stop_cause": "killed"}), "bb": ((1,), 90)}, job("aaa"), ""),
]


@pytest.mark.parametrize("reason, busy, waiting, ended", PREEMPTIONS, ids=[case[0] for case in PREEMPTIONS])
def test_preempt(reason, busy, waiting, ended):
    there = [running(id, indices, **{"started_at": NOW - ago, "gpus": len(indices), "preemptible": True, **dict(*others)})
             for id, (indices, ago, *others) in busy.items()]
    count = 1 + max(index for indices, *_ in busy.values() for index in indices)
    made = state(*there, waiting)
    planned = nexus.plan(made, [gpu(index) for index in range(count)], None, config(cpu_slots=0), NOW)
    assert planned.starts == () and " ".join(id for id, _ in planned.preempted) == (ended or ""), reason
    assert {for_id for _, for_id in planned.preempted} == ({"aaa"} if ended else set())
    kept = [one for one in planned.gpus if one.reserved_for == "aaa"]
    assert bool(kept) == (ended is not None), "what becomes free is for nobody else"


YOUNG = {"preemptible": True, "started_at": NOW - 20}
NEXT = "job {} is preemptible and may be stopped for it in {}".format
WAITS = [  # reason, who runs, who waits, the GPUs, what the wait is told as
    ("in its first minute, beside others", [running("r0", (0,)), running("r1", (1,)), running("new", (2,), **YOUNG)], {},
     [*map(gpu, range(3)), gpu(3, processes=(foreign(user="nobody"),))],
     f"needs 1 GPU; 0 of 4 are free: 3 taken by your own jobs, 1 by nobody; {NEXT('new', '40s')}; "
     "GPU 3 is in use by nobody (pid 4242 python, 16GB)"),
    ("the only GPU", [running("new", **YOUNG)], {}, [gpu()], f"GPU 0 runs job new; {NEXT('new', '40s')}"),
    ("the older one is first", [running("new", (0,), **YOUNG), running("old", (1,), preemptible=True, started_at=NOW - 50)], {},
     [gpu(0), gpu(1)], f"needs 1 GPU; 0 of 2 are free: 2 taken by your own jobs; {NEXT('old', '10s')}"),
    ("two for two", [running("new", (0,), **YOUNG), running("old", (1,), preemptible=True, started_at=NOW - 500)], {"gpus": 2},
     [gpu(0), gpu(1)], "needs 2 GPUs; 0 of 2 are free: 2 taken by your own jobs; "
     "jobs new, old are preemptible and may be stopped for it in 40s"),
    ("it is being stopped", [running("new", stop_cause="preempted", **YOUNG)], {}, [gpu()],
     "GPU 0 runs job new; job new is being stopped for it"),
    ("its end is of no use", [running("new", (0,), **YOUNG), running("r1", (1,))], {"gpus": 2}, [gpu(0), gpu(1)],
     "needs 2 GPUs; 0 of 2 are free: 2 taken by your own jobs"),
    ("one that ends anyway is enough", [running("r0", (0,), stop_cause="killed"), running("new", (1,), **YOUNG)], {}, [gpu(0), gpu(1)],
     "needs 1 GPU; 0 of 2 are free: 2 taken by your own jobs"),
    ("who waits is preemptible, too", [running("new", **YOUNG)], {"preemptible": True}, [gpu()], "GPU 0 runs job new"),
    ("another user's", [running("new", user="bob", **YOUNG), running("r1", (1,))], {}, [gpu(0), gpu(1)],
     f"needs 1 GPU; 0 of 2 are free: 1 taken by bob, 1 by your own jobs; {NEXT('new', '40s')}"),
    ("another user waits: who reads this is not bob alone", [running("r0", (0,)), running("r1", (1,), user="bob")], {"user": "bob"},
     [gpu(0), gpu(1)], "needs 1 GPU; 0 of 2 are free: 1 taken by ann, 1 by bob"),
    ("no job is in the way", [], {}, [gpu(0, is_paused=True), gpu(1, is_paused=True)],
     "needs 1 GPU; 0 of 2 are free; GPU 0 is paused; GPU 1 is paused"),
]


@pytest.mark.parametrize("reason, busy, fields, gpus, expected", WAITS, ids=[case[0] for case in WAITS])
def test_who_has_the_gpus_and_what_the_plan_waits_for(reason, busy, fields, gpus, expected):
    waiting = job("aaa", 9, **fields)
    planned = nexus.plan(state(*busy, waiting), gpus, None, config(), NOW)
    assert nexus.format_reasons(nexus.list_reasons(waiting, None, planned, config(), NOW, "ann")) == expected, reason


def test_the_machine_where_a_job_may_be_stopped_first_is_told():
    young = [running_there(f"r{name}", name, preemptible=True, started_at=NOW - ago) for name, ago in (("n1", 20), ("n2", 50))]
    made = state(*young, job("aaa", 3))
    planned = nexus.plan(made, [*there("n1", 0), *there("n2", 0)], None, config(), NOW, TWO)
    assert "job rn2 is preemptible and may be stopped for it in 10s" in words(made.jobs["aaa"], planned)


def test_a_sweep_preempts_as_many_as_it_has_jobs():
    made = state(*[running(f"r{n}", (n,), preemptible=True, started_at=NOW - 100 - n) for n in range(4)],
                 *[job(f"w{n}", n) for n in range(3)])
    planned = nexus.plan(made, [gpu(index) for index in range(4)], None, config(), NOW)
    assert planned.preempted == (("r0", "w0"), ("r1", "w1"), ("r2", "w2"))


@pytest.mark.parametrize("waiting, ends", [
    ([job("w0", gpus=0.5), job("w1", 1, gpus=0.5)], "r0"), ([job("w0", gpus=0.5), job("w1", 1, gpus=0.6)], "r0 two"),
    ([job("w0", gpus=0.5), job("w1", 1, gpus=0.5), job("w2", 2, gpus=0.5)], "r0 two"),
    ([job("w0", gpus=0.5, gpu_ids=(0,)), job("w1", 1, gpus=0.5, gpu_ids=(1,))], "r0 two"),
    ([job("w0", gpus=0.5), job("w1", 1, gpus=1.5)], "r0 two"), ([job(f"w{n}", n, gpus=0.3) for n in range(3)], "r0"),
    ([job("w0", gpu_ids=(1,)), job("w1", 1)], "two"), ([job("w0", gpus=3), job("w1", 1)], "r0 two r3")])
def test_what_becomes_free_for_one_serves_the_next(waiting, ends):
    made = state(running("r0", (0,), preemptible=True, started_at=NOW - 100), running("r3", (3,), preemptible=True, started_at=NOW - 300),
                 running("two", (1, 2), gpus=2, preemptible=True, started_at=NOW - 200), *waiting)
    planned = nexus.plan(made, [gpu(index) for index in range(4)], None, config(), NOW)
    assert " ".join(id for id, _ in planned.preempted) == ends


def test_users_take_turns_also_where_they_preempt():
    made = state(*[running(f"r{n}", (n,), user="cam", preemptible=True, started_at=NOW - 100 - n) for n in range(2)],
                 job("a1", 1), job("a2", 2), job("b1", 3, user="bob"))
    planned = nexus.plan(made, [gpu(0), gpu(1)], None, config(), NOW)
    assert planned.preempted == (("r0", "a1"), ("r1", "b1"))


def test_no_more_are_preempted_than_a_quota_lets_start():
    there = [running(f"r{n}", (n,), preemptible=True, started_at=NOW - 100 - n) for n in range(3)]
    waiting = [job(f"w{n}", n, group="few") for n in range(3)]
    made = state(*there, *waiting, groups=[nexus.Group("few", limit=1)])
    planned = nexus.plan(made, [gpu(index) for index in range(3)], None, config(), NOW)
    assert planned.preempted == (("r0", "w0"),)
    assert words(made.jobs["w0"], planned) == "needs 1 GPU; 0 of 3 are free: 3 taken by ann; job r0 is being stopped for it"
    planned = nexus.plan(state(*there, job("www")), [gpu(index) for index in range(3)], None, config(max_running=3), NOW)
    assert planned.preempted == (), "it could not start in its place"


def test_the_memory_of_who_is_preempted_is_free_then():
    """In a container nothing lists its processes."""
    made = state(running("aa", preemptible=True, started_at=NOW - 100), job("aaa", gpu_mem_mib=12 * GB))
    for processes, ended in (((), "aa"), ((ours("aa", 15),), "aa"), ((foreign(),), "")):
        planned = nexus.plan(made, [gpu(0, memory_used_mib=15 * GB, processes=processes)], None, config(), NOW)
        assert "".join(id for id, _ in planned.preempted) == ended
    shared = gpu(0, memory_used_mib=24 * GB, processes=(ours("aa", 11), foreign(memory_mib=13 * GB)))
    for asked_mib, ended in ((11 * GB, "aa"), (12 * GB, "")):          # what others use stays
        made = state(running("aa", preemptible=True, started_at=NOW - 100), job("aaa", gpu_mem_mib=asked_mib))
        planned = nexus.plan(made, [shared], None, config(share_with_others=True, mem_threshold=1), NOW)
        assert "".join(id for id, _ in planned.preempted) == ended


def test_what_was_preempted_comes_after_all_that_is_not():
    """Else it would take its GPU back, and be stopped again a minute later."""
    made = state(job("old", 1, preemptible=True), job("new", 2))
    planned = nexus.plan(made, [gpu(0), gpu(1)], None, config(), NOW)
    assert [one.job_id for one in planned.starts] == [one.id for one in nexus.list_pending(made)] == ["new", "old"]


YIELDS = [  # reason, those that run (GPUs, since how many seconds, other fields), the others who wait, whose turn free GPUs are, who ends
    ("the youngest", {"old": ((0,), 900), "new": ((1,), 90)}, {"bob": [want()]}, {}, {"new": "bob"}),
    ("when its first minute is over", {"new": ((0,), 60)}, {"bob": [want()]}, {}, {"new": "bob"}),
    ("not in its first minute", {"new": ((0,), 59)}, {"bob": [want()]}, {}, {}),
    ("not those that are not preemptible", {"firm": ((0,), 900, {"preemptible": False})}, {"bob": [want()]}, {}, {}),
    ("a GPU that would do", {"old": ((0,), 900), "new": ((1,), 90)}, {"bob": [want(indices=(0,))]}, {}, {"old": "bob"}),
    ("none would do", {"old": ((0,), 900)}, {"bob": [want(indices=(1,))]}, {}, {}),
    ("one is free for him", {"old": ((0,), 900)}, {"bob": [want()]}, {"GPU-3": 1}, {}),
    ("what is free is another's turn", {"old": ((0,), 900)}, {"bob": [want()]}, {"GPU-3": 2}, {"old": "bob"}),
    ("one becomes free already", {"old": ((0,), 900), "end": ((1,), 90, {"stop_cause": nexus.PREEMPTED})}, {"bob": [want()]}, {}, {}),
    ("two for a job of two", {"old": ((0,), 900), "mid": ((1,), 300), "new": ((2,), 90)}, {"bob": [want(2)]}, {},
     {"new": "bob", "mid": "bob"}),
    ("one, where another is free", {"old": ((0,), 900), "new": ((1,), 90)}, {"bob": [want(2)]}, {"GPU-3": 1}, {"new": "bob"}),
    ("a job of two makes room for a job of two", {"two": ((0, 1), 90), "old": ((2,), 900)}, {"bob": [want(2)]}, {}, {"two": "bob"}),
    ("it would not be enough", {"old": ((0,), 900), "new": ((1,), 90)}, {"bob": [want(3)]}, {}, {}),
    ("one for each who waits, first who has had least", {"old": ((0,), 900), "new": ((1,), 90)},
     {"bob": [want(jobs=9)], "carl": [want()]}, {}, {"old": "bob", "new": "carl"}),
    ("what becomes free for one is not there for the other", {"end": ((0,), 90, {"stop_cause": nexus.PREEMPTED}), "old": ((1,), 900)},
     {"bob": [want()], "carl": [want()]}, {}, {"old": "bob"}),
    ("nor is any, where the first who waits needs too many", {"old": ((0,), 900)}, {"bob": [want(2)], "carl": [want(3)]}, {}, {}),
    ("another one, where the first who waits needs too many", {"old": ((0,), 900)}, {"bob": [want()], "carl": [want(3)]}, {},
     {"old": "bob"}),
    ("not those of other machines, or without GPUs", {"far": ((0,), 900, {"node": "n1"}), "cpu": ((), 900)}, {"bob": [want()]}, {}, {}),
]


@pytest.mark.parametrize("reason, busy, waiting, owners, ended", YIELDS, ids=[case[0] for case in YIELDS])
def test_who_gives_way_to_other_users(reason, busy, waiting, owners, ended):
    jobs = [running(id, where, **{"preemptible": True, "started_at": NOW - ago, **dict(*more)}) for id, (where, ago, *more) in busy.items()]
    shared = box(*(box_user(name, (), wants) for name, wants in waiting.items()), had={0: 0.0, 1: 9.0, 2: 5.0})
    assert dict(nexus.yield_to_others(shared, nexus.Turns(owners), jobs, NOW)) == ended, reason

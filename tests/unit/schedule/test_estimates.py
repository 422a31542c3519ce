"""When jobs will start, as far as that can be told."""

import pytest
from makers import NOW, config, finished, gpu, job, running
from plans import TWO, WAITED, running_there, there

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

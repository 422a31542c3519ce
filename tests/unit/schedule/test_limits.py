"""Which limit stops a job, and what it is warned of."""

import pytest
from makers import GB, config, running
from plans import handed

import nexus

STOPS = [  # reason, fields of a job that has run for 100 s, 65 of them idle, and takes 3 GB, keys, (cause, part of the line)
    ("no limit", {}, {}, None), ("not yet", {"timeout_seconds": 100.5}, {}, None),
    ("its own", {"timeout_seconds": 100}, {}, ("timeout", "stopped after 1m 40s: its time limit is 1m 40s")),
    ("the configuration's", {}, {"timeout_seconds": 90}, ("timeout", "timeout_seconds is 1m 30s")),
    ("its own before the configuration's", {"timeout_seconds": 500}, {"timeout_seconds": 90}, None),
    ("0 is none, whatever the configuration says", {"timeout_seconds": 0}, {"timeout_seconds": 90}, None),
    ("twice what was expected", {"expected_time": 50}, {}, ("timeout", "2 times its expected time (timeout_multiplier) is 1m 40s")),
    ("not yet twice", {"expected_time": 51}, {}, None), ("another multiple", {"expected_time": 51}, {"timeout_multiplier": 1.5},
                                                         ("timeout", "1.5 times its expected time (timeout_multiplier) is 1m 16s")),
    ("what is expected is before the configuration's", {"expected_time": 600}, {"timeout_seconds": 90}, None),
    ("host memory", {}, {"max_memory_gb": 2.5}, ("host-memory", "took 3GB of host memory; max_memory_gb is 2.5")),
    ("a little more than allowed", {}, {"max_memory_gb": 2.99}, ("host-memory", "took 3GB of host memory; max_memory_gb is 2.99")),
    ("its GPUs do nothing", {}, {"idle_kill_minutes": 1}, ("idle", "its GPUs did nothing for 1m 5s; idle_kill_minutes is 1")),
    ("not for so long", {}, {"idle_kill_minutes": 1.1}, None),
]


@pytest.mark.parametrize("reason, fields, keys, expected", STOPS, ids=[case[0] for case in STOPS])
def test_find_stop(reason, fields, keys, expected):
    limits = nexus.find_limits(running("rrr", **fields), config(**keys).jobs)
    cause, line = nexus.find_stop(limits, nexus.Use(100.0, 3 * GB, 65.0)) or ("", "")
    assert (cause, expected and expected[1] in line) == (expected[0] if expected else "", expected and True), reason


def test_each_limit_stops():
    assert {expected[0] for *_, expected in STOPS if expected} == set(nexus.LIMITS.values())


WARNINGS = [  # reason, fields of a job, how long it has run, keys, the signal
    ("not asked for", {"timeout_seconds": 100}, 99, {}, None), ("no time limit", {"warn": "USR1@10s"}, 99, {}, None),
    ("not yet", {"warn": "USR1@10s", "timeout_seconds": 100}, 89, {}, None),
    ("now", {"warn": "USR1@10s", "timeout_seconds": 100}, 90, {}, "USR1"),
    ("the configuration's limit", {"warn": "INT@1m"}, 60, {"timeout_seconds": 90}, "INT"),
    ("nothing is known of it yet", {"warn": "USR1@10s", "timeout_seconds": 100}, None, {}, None),
]


@pytest.mark.parametrize("reason, fields, runtime_s, keys, expected", WARNINGS, ids=[case[0] for case in WARNINGS])
def test_find_warning(reason, fields, runtime_s, keys, expected):
    assert nexus.find_warning(nexus.find_limits(running("rrr", **fields), config(**keys).jobs), runtime_s) == expected


def test_a_job_of_which_nothing_is_known_yet_is_not_stopped():
    assert nexus.find_stop(nexus.Limits(timeout_seconds=1, max_memory_gb=0.0001, idle_kill_minutes=1), nexus.Use()) is None


@pytest.mark.parametrize("fields, minutes", [
    ({}, None), ({"timeout_seconds": 0}, None), ({"timeout_seconds": 0.5}, 1), ({"timeout_seconds": 60}, 1), ({"timeout_seconds": 60.1}, 2),
    ({"expected_time": 60}, 2)])
def test_slurm_is_told_of_minutes(fields, minutes):
    asked, settings = handed("abc", **fields), config()
    command = nexus.build_sbatch(asked, "0-0", "/h", nexus.find_limits(asked, settings.jobs), settings.slurm)
    assert [word for word in command if word.startswith("--time=")] == ([f"--time={minutes}"] if minutes else [])

"""Services of two users, each its own, take turns on the GPUs of their machine."""

import datetime
import json
import signal
import time

import live
import pytest
import shared
from test_users import lease_folder, python_of

import nexus

GPUS = 2
LAPSE_S = 1.8                   # a GPU is left for so long to whose turn it is
SLACK_S = 8.0                   # besides the jobs' own time: a busy machine may need that for some starts


@pytest.fixture(scope="module")
def services():
    with shared.services_of_two_users(gpus=[{}] * GPUS, reserve_after_seconds=1) as made:
        yield made


@pytest.fixture
def two(services):
    with services[0].lend() as ann, services[1].lend() as bob:
        for box in (ann, bob):
            box.status()
            box.log_begin = len(box.log())
        yield ann, bob
        assert "Internal error" not in read_log(ann) + read_log(bob)


def read_log(box):
    """Of this test."""
    return box.log()[box.log_begin:]


def add_many(box, command, count, **options):
    """Their ids."""
    jobs = [{"command": f"{command} # {number}", **options} for number in range(count)]
    return box.ask("POST", "/queue", jobs, key=f"many-{time.monotonic_ns()}")["ids"]


def await_busy(box):
    live.until(lambda: len(box.ask("GET", "/jobs?status=running")) == GPUS, "jobs on all GPUs")


def find_longest_s(box):
    return max(job["runtime_seconds"] for job in box.ask("GET", "/jobs?status=completed"))


def find_wait_s(job):
    return parse_time(job["started_at"]) - parse_time(job["created_at"])


def parse_time(text):
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def test_who_has_one_job_waits_for_the_next_end_and_not_for_a_queue(two):
    ann, bob = two
    add_many(bob, "sleep 0.5", 60)
    await_busy(bob)
    single = ann.wait(ann.add("true"), "completed")
    assert find_wait_s(single) < 2 * find_longest_s(bob) + SLACK_S, "his queue lasts for 15 s at least"
    # All GPUs at once: they are collected as they end
    large = ann.wait(ann.add("true", gpus=GPUS), "completed")
    assert find_wait_s(large) < 1 + find_longest_s(bob) + SLACK_S
    assert f"left to {ann.user.name}, whose turn it is" in read_log(bob)
    assert bob.ask("GET", "/jobs?status=pending"), "and he has more"


def test_two_who_want_all_gpus_and_one_do_not_wait_for_each_other(two):
    ann, bob = two
    for _ in range(4):
        add_many(bob, "sleep 0.2", 3)
        add_many(bob, "sleep 0.2", 1, gpus=GPUS)
        add_many(ann, "sleep 0.2", 2, gpus=GPUS)
    for box in two:
        live.until(lambda box=box: not box.ask("GET", "/jobs?status=pending,running"), "the end of all jobs")
        assert len(box.ask("GET", "/jobs?status=completed")) == (16 if box is bob else 8)


def forgive(box):
    """Only a new service leaves GPUs to who has just let a turn lapse."""
    box.nexus("restart")
    box.await_service()


LIAR = """
import fcntl, json, os, sys, threading, time
folder, uuids = sys.argv[1], sys.argv[2].split()
def tell():
    while True:
        wants = [{"gpus": 1, "uuids": uuids, "jobs": 64, "since": 1.0}]
        os.pwrite(handle, json.dumps({"wants": wants, "waiting": 64}).encode(), 0)
        time.sleep(0.2)
handle = os.open(folder + "/bid-00000000000000aa", os.O_RDWR | os.O_CREAT, 0o644)
fcntl.lockf(handle, fcntl.LOCK_EX)
threading.Thread(target=tell, daemon=True).start()
"""


def test_a_liar_costs_one_turn(two):
    """He says that he waits, for long and for more than anybody, and takes nothing."""
    ann, bob = two
    uuids = [gpu["uuid"] for gpu in ann.status()["gpu_status"]]
    ann.wait(ann.add("true"), "completed")
    liar = python_of(bob.user, LIAR, lease_folder(ann), " ".join(uuids))
    try:
        add_many(ann, "sleep 0.3", 30)          # more than he may have had before
        live.until(lambda: f"{bob.user.name} did not take the turn: none is left to that user for" in read_log(ann), "a lapse")
        live.until(lambda: len(ann.ask("GET", "/jobs?status=completed")) == 31, "all of ann's jobs")
    finally:
        liar.communicate("\n")
        forgive(ann)
    starts = sorted(parse_time(job["started_at"]) for job in ann.ask("GET", "/jobs?status=completed"))
    assert starts[-1] - starts[0] < LAPSE_S + SLACK_S + 15 * find_longest_s(ann)
    assert read_log(ann).count("did not take the turn") == 1


def test_a_service_that_hangs_loses_its_turn(two):
    ann, bob = two
    add_many(bob, "sleep 0.8", 30)
    await_busy(bob)
    live.until(lambda: all(job["pid"] for job in bob.ask("GET", "/jobs?status=running")), "the runners to have the GPUs")
    pid = bob.pid()
    live.kill(pid, number=signal.SIGSTOP)
    try:
        jobs = add_many(ann, "sleep 0.3", 12)
        began = time.monotonic()
        for job_id in jobs:
            ann.wait(job_id, "completed")
        longest_s = max(job["runtime_seconds"] for job in ann.ask("GET", "/jobs?status=completed"))
        assert time.monotonic() - began < 12 * longest_s + LAPSE_S + 6, "a turn each time would take 13 s at least"
    finally:
        live.kill(pid, number=signal.SIGCONT)
        bob.ask("POST", "/jobs/cancel", {"status": "pending"})
        forgive(ann)


def test_one_that_is_killed_while_it_collects_leaves_nothing_waiting(two):
    ann, bob = two
    go = ann.path("go")
    ann.wait_started(ann.add(f"while [ ! -e {go} ]; do sleep 0.05; done"))
    all_gpus = bob.add("true", gpus=GPUS)
    waits = None

    def is_left():
        nonlocal waits
        waits = waits or ann.add("sleep 0.1")
        if ann.job(waits)["status"] == "completed":
            waits = None
        shown = [gpu["unavailable"] or "" for gpu in ann.status()["gpu_status"]]
        is_waiting = waits and bob.user.name in (ann.job(waits)["waiting_for"] or "")
        return is_waiting and any(f"left to {bob.user.name}" in words for words in shown)
    live.until(is_left, "a GPU to be left to bob")
    assert ann.job(waits)["status"] == "pending" and bob.job(all_gpus)["status"] == "pending"
    began = time.monotonic()
    bob.kill_all_of_service()
    ann.wait(waits, "completed")
    assert time.monotonic() - began < nexus.SET_S / 2, "a set would be left to who lives for twice as long"
    bob.start()
    go.touch()
    bob.wait(all_gpus, "completed")


def test_one_that_never_yields_takes_what_it_can_get_and_breaks_nothing(two):
    """As an older nexus does."""
    ann, bob = two
    bob.kill_all_of_service()
    bob.serve("nexus.TurnTaking.look = nexus.TurnTaking.note_plan = lambda *given: None")
    try:
        bobs = add_many(bob, "sleep 0.2", 12)
        await_busy(bob)
        jobs = [*add_many(ann, "sleep 0.2", 3), *add_many(ann, "sleep 0.2", 1, gpus=GPUS)]
        for box, found in ((ann, jobs), (bob, bobs)):
            for job_id in found:
                box.wait(job_id, "completed")
    finally:
        bob.kill_service()
        bob.start()


def test_a_preemptible_job_gives_way_to_another_user_if_its_owner_says_so(two):
    ann, bob = two
    ann.kill_all_of_service()
    ann.write_config(preemptible_for_others=True)
    ann.serve("nexus.PREEMPT_AFTER_S = 0.5")
    jobs = [ann.wait_started(ann.add("sleep 600", preemptible=True))["id"] for _ in range(GPUS)]
    bob.wait(bob.add("true"), "completed")
    stopped, = [line for line in read_log(ann).splitlines() if f"is stopped and queued again: {bob.user.name} waits for its GPUs" in line]
    job, = [job for job in map(ann.job, jobs) if job["id"] in stopped]
    live.until(lambda: ann.job(job["id"])["status"] == "running" and ann.job(job["id"])["attempt"] > 1, "it to go on")


def test_what_each_had_survives_a_restart(two):
    ann, bob = two
    add_many(bob, "sleep 0.3", 8)
    add_many(ann, "sleep 0.3", 8)
    live.until(lambda: not ann.ask("GET", "/jobs?status=pending,running"), "the end of ann's jobs")
    ann.nexus("restart")
    ann.await_service()
    had = json.loads((ann.home / "turns.json").read_text())["had"]
    assert set(had) >= {str(ann.user.uid), str(bob.user.uid)} and min(had.values()) >= 0.0

"""What becomes of a job when its attempt ends: limits, kills, preemption, held groups."""

import errno
import shutil
import types

import pytest
from turns import ANN, fail

import nexus


def test_a_time_limit_holds_while_the_disk_is_full(world, monkeypatch):
    """The job is ended all the same; why, is recorded when there is room again."""
    w = world()
    job_id = w.run(w.add(timeout_seconds=20), int(w.clock.ticks * 10))     # which is when its process began
    w.machine.processes.start(200, job_id)

    def refuse_to_write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.store.journal, "append", refuse_to_write)
    w.turn(seconds=21)
    w.turn(seconds=1)
    assert w.machine.processes.signals[:1] == [(200, 15)] and w.job(job_id).current.stop_cause is None
    w.end(job_id, 143)
    assert w.job(job_id).status == "running"
    monkeypatch.undo()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).current.cause) == ("failed", "timeout")


@pytest.mark.parametrize("code", [0, 1])
def test_whose_logs_are_gone_says_so_where_it_failed(world, code):
    w = world(gpus=0)
    job_id = w.run(w.add(gpus=0), 100)
    shutil.rmtree(w.folder_of(job_id))
    w.end(job_id, code, has_result=False)
    assert w.job(job_id).current.cause_line == (f"its log folder is gone: {w.folder_of(job_id)}" if code else None)


def test_a_failure_says_what_its_job_printed_last_to_stderr(world):
    w = world(gpus=0)
    job_id = w.add(gpus=0)
    w.turn()
    fail(w, job_id, 100, 1, "Loading\nValueError: no such file\n")
    assert w.job(job_id).current.cause_line == "ValueError: no such file"


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_ends_while_its_disk_is_full_says_so(world, monkeypatch, code):
    """Where it failed, as its cause; else it is noted, since its logs may lack something all the same."""
    w = world(gpus=0)
    job_id = w.run(w.add(gpus=0), 100)
    monkeypatch.setattr(w.disk, "statvfs", lambda path: types.SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=10**8))
    w.end(job_id, code)
    words = f"No space left on device: {w.folder_of(job_id)} (the job's logs may be cut)"
    ended = w.job(job_id).current
    assert (ended.cause_line, ended.notes) == ((words, ()) if code else (None, (words,)))


def test_the_log_says_which_jobs_go_on_after_a_restart(world):
    w = world()
    over, goes_on = (w.run(w.add(), pid) for pid in (100, 101))
    w.end(over, is_said=False)
    w.crash()
    assert [line for line in w.lines if "goes on" in line] == [f"Job {goes_on} goes on"]


# Kills


def test_who_stopped_a_job_first_is_who_stopped_it(world):
    """A second kill changes nothing, by whomever."""
    w, bob = world(), nexus.Identity("bob", "bob")
    job_id = w.run(w.add(), 100)
    w.machine.processes.start(200, job_id)
    for caller in (ANN, bob):
        w.service.cancellation.cancel(nexus.Choice([job_id]), caller)
        assert (w.job(job_id).current.stop_cause, w.job(job_id).current.stop_by) == ("killed", "ann")


def test_a_job_that_ends_since_one_before_it_is_cancelled_says_so(world):
    """Also where both are cancelled together."""
    w = world()
    parent = w.add(is_held=True)
    child = w.add(after=[parent])
    w.service.cancellation.cancel(nexus.Choice([parent, child]), ANN)
    ended = [w.job(job_id) for job_id in (parent, child)]
    assert [(job.status, job.current.cause, job.current.stop_cause, job.current.stop_by) for job in ended] == [
        ("cancelled", "killed", None, "ann"), ("cancelled", "dependency", None, None)]


# Groups


def test_jobs_of_no_group_are_never_held(world):
    w = world(gpus=0, cpu_slots=1, guard_seconds=10)
    ids = [w.add("a", gpus=0) for _ in range(4)]
    for number, job_id in enumerate(ids[:3]):
        w.turn()
        fail(w, job_id, 100 + number, 1, "no module\n", 1)
    w.turn()
    assert not w.store.state.groups and w.job(ids[3]).status == "running"


def test_a_group_is_held_for_one_that_waits_for_its_next_attempt(world):
    w = world(gpus=0, cpu_slots=1, guard_seconds=10, retry_backoff_seconds=1000)
    ids = [w.add("a", gpus=0, group="g", retries=int(not number)) for number in range(4)]
    w.turn()
    for number, job_id in enumerate(ids):
        fail(w, job_id, 100 + number, 1, "no module\n", 1)
    assert w.job(ids[0]).status == "pending" and w.store.state.groups["g"].hold


QUICK = [  # how long the first three of a group ran before they failed, in seconds; whether the rest is held
    ((1, 9, 9.9), True), ((1, 11, 1), False), ((60, 60, 60), False)]


@pytest.mark.parametrize("seconds, is_held", QUICK)
def test_a_group_is_held_by_failures_within_seconds_alone(world, seconds, is_held):
    w = world(gpus=0, cpu_slots=1, guard_seconds=10)
    ids = [w.add("a", gpus=0, group="g") for _ in range(4)]
    for number, took_s in enumerate(seconds):
        w.turn()
        fail(w, ids[number], 100 + number, 1, "no module\n", took_s)
    w.turn()
    group = w.store.state.groups.get("g")
    assert bool(group and group.hold) == is_held and w.job(ids[3]).status == ("pending" if is_held else "running")


def test_a_group_that_was_resumed_begins_anew(world):
    """To resume one that nothing holds changes nothing."""
    w = world(gpus=0, cpu_slots=1, guard_seconds=10)
    ids, held = [w.add("a", gpus=0, group="g") for _ in range(9)], []
    for number, job_id in enumerate(ids[:7]):
        w.turn()
        fail(w, job_id, 100 + number, 1, "no module\n", 1)
        held.append(bool(w.store.state.groups["g"].hold))
        if number != 1:
            w.service.editor.set_paused(False, "ann", "g") if held[-1] or number == 0 else None
    assert held == [False, False, True, False, False, True, False]


# Limits


def time_out(w, job_id, pid):
    """A running job is told to end, since its time is up."""
    w.claim(job_id, pid)
    w.machine.processes.start(7, job_id)
    for _ in range(4):
        w.turn(seconds=1.1)
    assert w.job(job_id).current.stop_cause == "timeout"


def test_a_kill_counts_while_the_time_limit_ends_it(world):
    w = world()
    job_id = w.add(retries=2, timeout_seconds=2)
    w.turn()
    time_out(w, job_id, int(w.clock.ticks * 10))
    w.service.cancellation.cancel(nexus.Choice([job_id], ("running",)), ANN)
    w.machine.processes.alive.clear()
    w.write_result(job_id, 143)
    w.turn(f"end {job_id} 1 143 400")
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.current.cause, job.current.stop_by, job.current.cause_line) == ("cancelled", "killed", "ann", None)


def test_what_an_attempt_took_is_not_the_next_ones(world):
    w = world(retry_backoff_seconds=0)
    job_id = w.add(retries=2, timeout_seconds=2)
    w.turn()
    time_out(w, job_id, int(w.clock.ticks * 10))
    w.machine.processes.alive.clear()
    w.write_result(job_id, 143)
    w.turn(f"end {job_id} 1 143 400")
    w.turn()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).attempt, w.job(job_id).current.stop_cause) == ("running", 2, None)


def test_limits_hold_while_nothing_can_be_started(world):
    w = world(gpus=2)
    on, refused = w.run(w.add(timeout_seconds=20), int(w.clock.ticks * 10)), w.add()     # which is when its process began
    w.machine.processes.start(200, on)
    w.machine.refusal = OSError(errno.EAGAIN, "fork")
    w.clock.pass_(18)
    w.probe()
    w.turn()
    w.turn()
    assert "it is tried again" in w.api(refused)["waiting_for"], "starts are held now"
    w.turn(seconds=2.1)
    w.turn(seconds=0.1)
    assert w.job(on).current.stop_cause == "timeout" and (200, 15) in w.machine.processes.signals
    assert [line for line in w.lines if "is stopped" in line] == [f"Job {on} is stopped: {w.job(on).current.stop_line}"]


def test_a_preemptible_job_makes_room_and_goes_on_later(world):
    w = world(gpus=1)
    first = w.add(gpus=1, preemptible=True)
    w.turn()
    w.claim(first, 100)
    second = w.add(gpus=1)
    assert f"job {first} is preemptible: it may have to end in 1m or later" in w.service.explainer.explain(second, w.service.owner)["facts"]
    for seconds in (30, 40):
        assert w.job(first).current.stop_cause is None, "not in its first minute"
        w.turn(seconds=seconds)
        w.probe()
        w.turn()
    assert w.api(first)["stopping"] == "preempted"
    w.end(first, 143)
    assert (w.job(first).status, w.job(second).status) == ("pending", "running")
    assert f"Job {first} ended on GPU 0: job {second}, which is not preemptible, needs its GPUs; it goes back to the queue" in w.lines
    w.claim(second, 101)
    w.end(second, 0)
    assert w.job(first).status == "running" and w.job(first).retries == 0
    w.claim(first, 102)
    w.end(first, 0)
    assert [(one.number, one.cause) for one in w.job(first).attempts] == [(1, "preempted"), (2, None)]

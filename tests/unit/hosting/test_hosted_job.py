"""What a machine makes of an attempt there: the signal before its time limit, claims without a runner, bounces, what is told of it."""

import pytest
from turns import ANN, BrokenLeases

import nexus

WARNED = [  # reason, which of its processes handle the signal, which get it, what is told
    ("the trainer handles it", {200}, [200], "sent to python (pid 200)"), ("nothing does", set(), [], "nothing of it handles that"),
]


@pytest.mark.parametrize("reason, catchers, pids, words", WARNED, ids=[case[0] for case in WARNED])
def test_the_signal_before_a_time_limit_comes_once(world, reason, catchers, pids, words):
    """Also beside a restart; and again, when the limit has changed."""
    w = world(gpus=0)
    job_id = w.run(w.add(gpus=0, timeout_seconds=100, warn="USR1@30s"), int(w.clock.ticks * 10))
    w.machine.processes.start(200, job_id)
    w.machine.processes.find_catchers = lambda processes, number: {process.pid for process in processes} & catchers

    def look(seconds):
        for part in (seconds / 2, seconds / 2, 0.01):
            w.turn(seconds=part)
        found = w.machine.processes.signals[:]
        w.machine.processes.signals.clear()
        return found

    assert look(69) == []
    assert look(4) == [(pid, 10) for pid in pids]
    assert w.job(job_id).current.notes == (f"USR1 before its time limit: {words}",)
    w.crash()
    assert look(10) == []
    w.service.editor.edit(nexus.Choice([job_id]), ANN, {"timeout_seconds": 200})
    assert look(20) == [] and look(70) == [(pid, 10) for pid in pids]
    assert look(26) == [] and look(3)[:1] == [(200, 15)] and w.job(job_id).current.stop_cause == "timeout"
    assert w.machine.processes.alive.keys() == {w.job(job_id).current.pid}


def test_a_job_that_is_being_ended_is_not_warned(world):
    w = world(gpus=0)
    job_id = w.run(w.add(gpus=0, timeout_seconds=100, warn="USR1@30s"), int(w.clock.ticks * 10))
    w.machine.processes.start(200, job_id)
    w.machine.processes.deaf = {200}
    w.machine.processes.find_catchers = lambda processes, number: {200}
    w.clock.pass_(68)
    w.turn()
    w.service.cancellation.cancel(nexus.Choice([job_id]), ANN)
    w.turn(seconds=1)
    w.turn(seconds=3)
    assert [number for pid, number in w.machine.processes.signals if pid == 200 and number != 18] == [15]


def test_a_time_limit_holds_for_what_goes_on_after_a_command(on):
    on.service.editor.edit(nexus.Choice([on.job_id]), ANN, {"timeout_seconds": 60})
    on.machine.processes.find_age_s = lambda started: on.clock.ticks - 1000.0
    on.put(200, session=100)
    on.machine.processes.deaf = {200}
    on.turn(f"end {on.job_id} 1 0 250")
    for second in range(75):
        if 200 in on.machine.processes.alive:
            on.machine.processes.take(200, 1.0, cpu_s=second)
        on.turn(seconds=1)
    assert (on.job(on.job_id).status, on.job(on.job_id).current.cause) == ("failed", "timeout")


def test_a_time_limit_does_not_hold_while_what_a_command_has_left_is_ended(on):
    """The job has ended in time, however long that takes."""
    on.service.editor.edit(nexus.Choice([on.job_id]), ANN, {"timeout_seconds": 60})
    on.machine.processes.find_age_s = lambda started: on.clock.ticks - 1000.0
    on.put(200, session=200)
    on.machine.processes.deaf = {200}
    on.turn(f"end {on.job_id} 1 0 5900", seconds=59)
    for seconds in (3, 1, 8):
        on.turn(seconds=seconds)
    assert 200 not in on.machine.processes.alive
    on.turn(seconds=1)
    assert (on.job(on.job_id).status, on.job(on.job_id).current.stop_cause) == ("completed", None)


def test_what_goes_on_needs_its_job_sh(on):
    on.put(200, session=100)
    on.write_result(on.job_id, 0, goes_on=True)
    on.turn(seconds=1.1)
    assert (on.job(on.job_id).status, on.job(on.job_id).current.processes_left) == ("running", 1)
    on.machine.processes.alive.clear()
    on.crash()
    on.turn(seconds=1.1), on.turn()
    ended = on.job(on.job_id).current
    assert (ended.cause, ended.cause_line) == ("session-lost", "its job.sh was killed while processes went on after its command")


def test_a_kill_ends_a_job_sh_that_has_not_written_its_claim(world):
    w = world(gpus=0)
    job_id = w.add(gpus=0)
    w.turn()
    (w.folder_of(job_id) / "attempt-1").write_text("")
    w.machine.processes.start(100, None)
    w.machine.processes.runners = [w.machine.processes.find(100)]
    w.turn(seconds=31)
    assert not w.machine.processes.signals and w.job(job_id).status == "running", "however slow it is"
    w.service.cancellation.cancel(nexus.Choice([job_id]), ANN)
    w.turn(seconds=1.1)
    assert w.machine.processes.signals == [(100, 9)]
    w.turn(seconds=1.1), w.turn()
    assert (w.job(job_id).status, w.job(job_id).current.cause) == ("cancelled", "killed")


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("code, is_stopped, cause", [(0, True, "timeout"), (3, True, "timeout"), (0, False, None), (3, False, "exit")])
def test_what_a_stop_has_ended_did_not_end_itself(world, code, is_stopped, cause, is_restarted):
    """However late it ends, and also where the service is another one by then."""
    w = world(gpus=0)
    job_id = w.run(w.add(gpus=0, timeout_seconds=60 if is_stopped else None), int(w.clock.ticks * 10))
    w.machine.processes.start(200, job_id)
    w.machine.processes.deaf = {200}
    for seconds in (61, 0, 1, 1):
        w.turn(seconds=seconds)
    assert bool(w.machine.processes.signals) == is_stopped
    w.machine.processes.alive.clear()
    w.write_result(job_id, code)
    if is_restarted:
        w.crash()
    w.turn(seconds=1.1), w.turn()
    assert w.job(job_id).current.cause == cause


def test_a_job_has_run_since_it_had_its_gpus(world):
    """Not since its job.sh began to wait for them, whether that was heard or is read."""
    w = world(gpus=0)
    for is_heard in (True, False):
        job_id = w.add(gpus=0)
        w.turn()
        w.machine.processes.start(100, job_id)
        (w.folder_of(job_id) / "attempt-1").write_text("100 1000\n50000\n")
        w.turn(*[f"start {job_id} 1 100 1000 50000"] * is_heard, seconds=1.1)
        assert w.api(job_id)["runtime_seconds"] == pytest.approx(w.clock.ticks - 500)


def test_what_has_run_is_never_less_than_nothing(on):
    """Beside lxcfs a process may have begun in the future."""
    on.machine.processes.find_age_s = lambda started: -5.0
    on.clock.pass_(60)
    assert on.api(on.job_id)["runtime_seconds"] == 0.0


def test_a_job_has_run_no_longer_than_since_its_begin(world):
    """The clock of its job.sh may jump: an uptime of lxcfs does."""
    w = world(gpus=0)
    job_id = w.run(w.add(gpus=0), int(w.clock.ticks * 10))
    w.clock.pass_(60)
    w.end(job_id, runtime_seconds=1e8)
    assert w.job(job_id).current.runtime_seconds == 60.0


def test_a_job_has_run_until_its_end_was_seen(world, monkeypatch):
    """However much later the disk lets that be recorded."""
    w = world(gpus=0)
    job_id = w.run(w.add(gpus=0), int(w.clock.ticks * 10))
    monkeypatch.setattr(w.store.journal, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    w.machine.processes.alive.clear()
    w.turn(seconds=60), w.turn(seconds=100)
    assert w.job(job_id).status == "running"
    monkeypatch.undo()
    w.turn(), w.turn()
    assert (w.job(job_id).current.cause, w.job(job_id).current.runtime_seconds) == ("session-lost", 60.0)


def test_the_first_end_of_a_job_counts(on):
    """Its job.sh says it again while it cannot write the result; and the job itself may write into the FIFO."""
    on.turn(f"end {on.job_id} 1 3 250", f"end {on.job_id} 1 0 990"), on.turn()
    ended = on.job(on.job_id)
    assert (ended.status, ended.current.exit_code, ended.current.runtime_seconds) == ("failed", 3, 2.5)


def test_that_there_was_no_room_for_the_result_of_a_job_is_said_after_its_end(on):
    on.turn(f"end {on.job_id} 1 0 250", f"end {on.job_id} 1 0 250 1"), on.turn()
    assert on.job(on.job_id).current.notes[-1].startswith("No space left on device")


@pytest.mark.parametrize("limit, has_psutil, notes", [(None, False, ()), (1, True, ()), (1, False, (nexus.NO_PSUTIL,))])
def test_a_limit_that_cannot_be_measured_is_told(world, limit, has_psutil, notes):
    w = world(gpus=0, **({"max_memory_gb": limit} if limit else {}))
    w.machine.psutil = w.machine.psutil if has_psutil else None
    job_id = w.run(w.add(gpus=0), 100)
    w.turn()
    assert w.job(job_id).current.notes == notes


BOUNCES = [  # reason, whether its lease is still held here, the words, the reason that is told, whether GPUs are given out at once
    ("somebody else has it", False, "taken by bob", "taken by bob", True), ("nothing is said", False, "", "a GPU was taken", True),
    ("who can that be?", True, "GPU-0 is held", "GPU-0 is held", False),
]


@pytest.mark.parametrize("reason, is_held, words, told, goes_on", BOUNCES, ids=[case[0] for case in BOUNCES])
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_runner_without_its_gpu(world, reason, is_held, words, told, goes_on, is_heard):
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    w.machine.leases.error = None
    job_id = w.add()
    w.turn()
    w.machine.leases.held = {job_id: []} if is_held else {}
    if is_heard:
        w.turn(f"bounce {job_id} 1 {words}".rstrip())
    else:
        w.claim(job_id, 100, is_said=False)
        w.write_result(job_id, None, cause="bounce", **({"cause_line": words} if words else {}))
        w.machine.processes.alive.clear()
        w.turn(seconds=1.1), w.turn(seconds=1.1)
    assert [line.partition("queue: ")[2] for line in w.lines if "could not start and goes back to the queue" in line] == [told]
    error = w.service.observer.find_lease_error()
    assert (error is None) == goes_on and (goes_on or error.hint == "does somebody remove files from /tmp/none?")


def test_what_is_known_of_a_runner_counts_before_it_is_recorded(world, monkeypatch):
    """Else its processes would not be found while the disk is full."""
    w = world(gpus=0)
    job_id = w.add(gpus=0)
    w.turn()
    monkeypatch.setattr(w.store.journal, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    w.claim(job_id, 100)
    assert w.job(job_id).current.pid is None
    asked, find = [], w.machine.processes.find_members
    monkeypatch.setattr(w.machine.processes, "find_members", lambda jobs, *rest, **others: asked.extend(jobs) or find(jobs))
    w.machine.processes.alive.clear()
    w.turn(f"end {job_id} 1 0 250")
    assert {(job.current.pid, job.current.pid_started) for job in asked} == {(100, 1000)}

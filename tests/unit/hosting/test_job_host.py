"""Attempts of this machine: claims, crashes, reboots, results, other clocks."""

import os
import pathlib
import socket

import makers
import pytest
from turns import ANN, BrokenLeases

import nexus


@pytest.mark.parametrize("is_said", [True, False])
@pytest.mark.parametrize("rises_at, is_cause", [("before", False), ("last reading", True), ("end", True)])
def test_the_kernel_ends_a_job_for_lack_of_memory(world, is_said, rises_at, is_cause):
    """Its count may have risen just before the last reading; what it did long ago is no cause."""
    w = world()
    job_id = w.add(gpus=0)
    w.run(job_id, 101)
    w.machine.oom_kills += rises_at == "before"
    w.probe()
    w.probe()
    w.machine.oom_kills += rises_at == "last reading"
    w.probe()
    w.machine.oom_kills += rises_at == "end"
    w.end(job_id, 137, is_said)
    w.turn(seconds=2.0)
    w.turn()
    ended = w.api(job_id)
    assert (ended["cause"], ended["signal"]) == ("signal", 9)
    assert ended["cause_line"] == (nexus.LACK_OF_MEMORY if is_cause else None)


def test_bounce_that_nobody_heard(world):
    """Its runner said so while no service was there: its result file says it too."""
    w = world()
    job_id = w.add()
    w.turn()
    w.claim(job_id, 100, is_said=False)
    w.write_result(job_id, None, cause="bounce", cause_line="GPU-0 is held by another nexus")
    del w.machine.processes.alive[100]
    w.crash()
    w.turn(seconds=2)
    assert any("held by another nexus" in line for line in w.lines)
    assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", 2)
    w.turn(seconds=6)                                   # somebody has it whom the plan does not see: not at once
    assert w.job(job_id).attempt == 2 and w.job(job_id).status == "running"


def test_what_is_said_of_no_attempt_here_changes_nothing(on):
    """A runner of an earlier attempt, or of another service, may say it; what comes after it is heard."""
    before = on.job(on.job_id)
    on.turn("end xyz 1 0 250", f"end {on.job_id} 2 0 250", f"fail {on.job_id} 0 it cannot be written")
    assert on.job(on.job_id) == before and on.service.failure_count == 0
    on.turn("end xyz 1 0 250", f"end {on.job_id} 1 3 250"), on.turn()
    assert on.job(on.job_id).current.exit_code == 3


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_runner_that_cannot_write_its_claim(world, is_heard):
    """It says so; who does not hear it finds a claim without a begin.  Either way it is tried again, for a while."""
    w = world(launch_attempts=2)
    job_id = w.add()
    for attempt in (1, 2):
        w.turn()
        assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", attempt)
        if is_heard:
            w.turn(f"fail {job_id} {attempt} the log folder /x cannot be written")
        else:
            (w.folder_of(job_id) / f"attempt-{attempt}").write_text("100 1000\n")
            w.turn(seconds=1.1)
            w.turn(seconds=1.1)
        w.turn()
        assert w.job(job_id).status == ("pending" if attempt == 1 else "failed")
        w.turn(seconds=10)
    why = "the log folder /x cannot be written" if is_heard else "its job.sh ended before it began"
    assert [(one.cause, one.cause_line) for one in w.job(job_id).attempts] == [("launch", why)] * 2


@pytest.mark.parametrize("is_over, seconds", [(True, 1), (False, 31)], ids=["screen ends", "screen hangs"])
def test_no_runner_begins(world, is_over, seconds):
    w = world(launch_attempts=1)
    job_id = w.add()
    w.turn()
    w.machine.gone = [job_id] * is_over
    for _ in range(seconds):
        assert w.job(job_id).status == "running"
        w.turn(seconds=1)
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).current.cause) == ("failed", "launch") and not w.claim(job_id, 100)

# Histories: what the next service makes of a job that is recorded as running
CRASHES = [  # reason, the claim of attempt 1, whether its runner lives, the exit code of its result, (status, attempt, exit code) then
    ("no runner has come yet", None, False, None, ("running", 2, None)),
    ("its runner came first", "100 1000\n1000\n", True, None, ("running", 1, None)),
    ("its runner was killed before it began: it is tried again in a moment", "100 1000\n", False, None, ("pending", 1, None)),
    ("its runner was killed after that", "100 1000\n1000\n", False, None, ("failed", 1, None)),
    ("it has ended", "100 1000\n1000\n", False, 9, ("failed", 1, 9)),
    ("a service claimed it, and was killed before it requeued the job", "0 0\n", False, None, ("running", 2, None)),
    ("so did a service of version 1.0, whose claim is empty", "", False, None, ("running", 2, None)),
    ("its runner was killed before it wrote its claim", "", False, None, ("running", 2, None)),
    ("its runner is slow to write its claim", "", True, None, ("running", 1, None)),
]


@pytest.mark.parametrize("reason, claim, is_alive, code, wanted", CRASHES, ids=[case[0] for case in CRASHES])
def test_crash_after_the_spawn(world, reason, claim, is_alive, code, wanted):
    w = world()
    job_id = w.add()
    w.turn()
    path = w.folder_of(job_id) / "attempt-1"
    if claim is not None:
        path.write_text(claim)
    if is_alive:
        w.machine.processes.start(100, job_id)
        w.machine.processes.runners = [w.machine.processes.find(100)]
    if code is not None:
        w.write_result(job_id, code)
    w.crash()
    for _ in range(3):
        w.turn(seconds=1.1)
    job = w.job(job_id)
    assert (job.status, job.attempt, job.current.exit_code) == wanted and path.exists(), "a late runner finds it claimed"
    assert w.machine.launched == [(job_id, number) for number in range(1, wanted[1] + 1)]


@pytest.mark.parametrize("text", ["", '{"exit_code": 0, "fini', "[]", "{}", "0", *(
    f'{{"exit_code": {code}, "finished_at": 1, "runtime_seconds": 1}}' for code in ('"0"', "256"))])
def test_torn_result(world, text):
    w = world()
    job_id = w.run(w.add(), 100)
    (w.folder_of(job_id) / "result-1.json").write_text(text)
    w.end(job_id, is_said=False, has_result=False)
    w.crash()
    w.turn()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).current.cause) == ("failed", "session-lost") and w.service.failure_count == 0


def test_pid_that_is_another_process_now(world):
    w = world()
    job_id = w.run(w.add(), 100)
    w.end(job_id, 0, is_said=False)
    w.machine.processes.start(100, None, started=999999)
    w.crash()
    w.turn()
    w.turn()
    assert w.job(job_id).status == "completed" and 100 in w.machine.processes.alive and not w.machine.processes.signals

REBOOTS = [  # reason, on_reboot, result there, to be stopped, (status, cause, attempt)
    ("it had ended, requeue", "requeue", True, False, ("failed", "exit", 1)),
    ("to be stopped, not queued again", "requeue", False, True, ("cancelled", "killed", 1)),
]


@pytest.mark.parametrize("reason, on_reboot, has_result, is_stopped, wanted", REBOOTS, ids=[case[0] for case in REBOOTS])
def test_other_boot(world, reason, on_reboot, has_result, is_stopped, wanted):
    w = world(on_reboot=on_reboot)
    job_id = w.run(w.add(), 100)
    if is_stopped:
        w.service.cancellation.cancel(nexus.Choice([job_id], (nexus.RUNNING,)), ANN)
    if has_result:
        w.write_result(job_id, 3)
    w.crash(is_reboot=True)
    w.machine.processes.start(100, job_id, started=1000)    # after a reboot pids begin anew, and even its start time may be met
    w.machine.processes.start(101, job_id)
    w.turn()
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.current.cause, job.attempt) == wanted
    assert not w.machine.processes.signals              # nothing of this boot is the job's


@pytest.mark.parametrize("pid, statuses, earlier, words", [
    (100, ["pending", "running", "pending", "running"], [60],
     "ended on GPU 0: the machine went down while it ran; it goes back to the queue"),
    (None, ["pending", "running"], [], "ended on GPU 0: the machine went down before it began; it goes back to the queue")])
def test_what_is_known_of_an_attempt_that_a_reboot_ended(world, pid, statuses, earlier, words):
    w = world(on_reboot="requeue")
    job_id = w.add()
    w.turn()
    if pid:
        w.claim(job_id, pid)
        w.turn()
    w.clock.pass_(60)
    w.crash(is_reboot=True)
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.attempt) == ("running", 2) and [status for status, _ in job.status_history] == statuses
    assert [attempt.runtime_seconds for attempt in job.attempts[:-1]] == earlier and f"Job {job_id} {words}" in w.lines


def test_a_job_whose_machine_goes_down_again_and_again_begins_ever_more_seldom(world):
    """Each of its attempts is kept."""
    w = world(on_reboot="requeue")
    job_id, waits = w.add(gpus=0), []
    for pid in range(100, 105):
        w.turn()
        w.claim(job_id, pid)
        w.turn()
        w.crash(is_reboot=True)
        w.turn()
        waits.append(w.job(job_id).retry_at - w.clock.now())
        assert not waits[-1] or "went down while it ran); it is tried again in" in w.api(job_id)["waiting_for"]
        w.clock.pass_(waits[-1])
    assert waits == [0, 60, 120, 240, 480]
    w.turn()
    w.crash(is_reboot=True)
    w.turn()
    assert w.job(job_id).status == "running" and w.machine.launched[-2:] == [(job_id, 6), (job_id, 7)], "it had not begun: no wait"


# The clock jumps


@pytest.mark.parametrize("jump", [-10 * 365 * 86400, -3600, 3600, 10 * 365 * 86400])
def test_wall_clock_jumps(world, jump):
    w = world(gpus=2)
    job_id = w.add()
    w.turn()
    w.claim(job_id, int(w.clock.ticks * 10))            # FakeProcesses: it began now, in ticks
    w.clock.pass_(60)
    w.clock.wall += jump
    assert w.api(job_id)["runtime_seconds"] == pytest.approx(60, abs=0.1)
    for _ in range(50):
        w.turn(seconds=1)
    assert w.job(job_id).status == "running" and not w.machine.processes.signals
    w.probe()
    other = w.add()
    w.turn()
    assert w.job(other).status == "running"
    w.crash()
    w.turn()
    assert w.api(job_id)["runtime_seconds"] == pytest.approx(110, abs=0.1)
    w.end(job_id, has_result=False, is_said=False)      # what is not known from the runner is reckoned
    w.turn(seconds=1.1)
    w.turn()
    job = w.job(job_id)
    assert job.status == "failed" and job.current.runtime_seconds == pytest.approx(111.1, abs=0.1)
    assert w.service.health.check()["is_healthy"] and w.service.status.describe_service()["uptime_seconds"] < 200


# What a job gets at its start


def test_jobs_that_run_at_once_have_ports_of_their_own():
    ports = {nexus.find_free_port(number) for number in range(20)}
    assert len(ports) == 20 and all(20000 <= port < 30000 for port in ports)
    with socket.socket() as line:
        line.bind(("", min(ports)))
        assert min(ports) not in {nexus.find_free_port(number) for number in range(20)}, "somebody has it"


UMASKS = [(None, "umask=0022\n"), (0o002, "umask=0002\n")]


@pytest.mark.parametrize("umask, line", UMASKS)
def test_a_job_has_its_own_umask_or_the_services(world, umask, line):
    w = world(gpus=0)
    job_id = w.add(gpus=0, umask=umask)
    w.turn()
    assert line in (w.folder_of(job_id) / "job.sh").read_text()


def test_a_script_that_was_sent_is_written_anew_whatever_an_earlier_attempt_has_made_of_it(world):
    w = world(gpus=0)
    cwd, victim = pathlib.Path(w.folder) / "work", pathlib.Path(w.folder) / "victim"
    victim.write_text("mine")
    for before in (lambda path: None, lambda path: path.write_text("print(1)"), lambda path: path.unlink() or path.symlink_to(victim)):
        before(cwd / "main.py")
        w.service.job_host.write_script(nexus.Order(makers.running(cwd=str(cwd)), {}, "print()"))
        assert (cwd / "main.py").read_text() == "print()" and victim.read_text() == "mine"


@pytest.mark.parametrize("passes_handles, gpus, handles, paths", [
    (True, 1, [7], ()), (False, 1, (), [("/l/a", "/p/7", "0-a")]), (True, 0, (), ())])
def test_a_runner_gets_the_locks_or_where_they_are(world, monkeypatch, passes_handles, gpus, handles, paths):
    w, given, build = world(gpus=1), [], nexus.build_script
    leases = w.machine.leases = BrokenLeases()
    leases.error, leases.handles, leases.paths = None, lambda job_id: [7], lambda job_id: [("/l/a", "/p/7", "0-a")]
    monkeypatch.setattr(type(w.machine.launcher), "passes_handles", passes_handles)
    monkeypatch.setattr(w.machine, "launch", lambda job, script, handles: given.append(handles))
    monkeypatch.setattr(nexus, "build_script", lambda job, environ, layout, *rest: given.extend(rest) or build(job, environ, layout))
    job_id = w.add(gpus=gpus)
    w.turn()
    assert given == [paths, handles, os.getpid(), handles] and list(leases.held) == [job_id] * gpus


def test_a_lock_that_was_kept_is_dropped_with_the_last_job_of_its_gpu(world):
    w = world(gpus=1)
    leases = w.machine.leases = BrokenLeases()
    leases.error, leases.drop = None, lambda uuid: leases.kept.pop(uuid)
    ids = [w.add(gpus=0.5) for _ in range(2)]
    w.turn()
    for pid, job_id in enumerate(ids, 100):
        w.claim(job_id, pid)
    leases.kept = {"GPU-0": 5}
    w.end(ids[0])
    assert leases.kept == {"GPU-0": 5}
    w.end(ids[1])
    assert leases.kept == {} and leases.held == {}


def test_while_nothing_can_be_started_an_order_is_sent_back(world):
    """As one that a node's agent gets, whose head does not know it yet."""
    w = world(gpus=0)
    w.service.job_host.start_backoff.fail(w.clock.monotonic(), "the disk is full")
    job = makers.running(indices=())
    assert w.service.job_host.start(nexus.Order(job, {})) is False and not w.machine.launched
    assert w.service.job_host.find(job).progress.requeue == "the disk is full"


@pytest.mark.parametrize("kind, is_trouble", [("conflict", False), ("unavailable", True)])
def test_a_gpu_whose_lock_cannot_be_taken_is_no_fault_of_the_job(world, kind, is_trouble):
    """Somebody was faster; or there are no locks at all, and no GPU is given out for a while."""
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    w.machine.leases.error = nexus.NexusError(kind, "the nexus of bob took GPU-0 first")
    w.add()
    w.turn(), w.turn()
    assert any(line.endswith("goes back to the queue: the nexus of bob took GPU-0 first") for line in w.lines) and not w.machine.launched
    assert (w.service.observer.find_lease_error() is not None) == is_trouble


def test_the_commit_of_its_directory_is_read_when_it_has_begun(world, tmp_path):
    """Beside the loop, once, from git's files; a retry of the service does not read it again."""
    (tmp_path / "exp/.git").mkdir(parents=True)
    (tmp_path / "exp/.git/HEAD").write_text("a" * 40)
    w = world(gpus=2)
    job_id, other = w.add(gpus=0, cwd=str(tmp_path / "exp")), w.add(gpus=0)
    w.turn()
    assert w.job(job_id).current.commit is None and len(w.service.job_host.begun) == 2
    w.service.job_host.read_commits()
    for number, each in enumerate((job_id, other)):
        w.claim(each, 100 + number)
    w.turn()
    assert (w.job(job_id).current.commit, w.job(other).current.commit) == ("a" * 40, None)
    assert w.api(job_id)["commit"] == w.api(job_id)["attempts"][0]["commit"] == "a" * 40
    (tmp_path / "exp/.git/HEAD").write_text("b" * 40)
    w.crash()
    w.turn()
    assert w.job(job_id).current.commit == "a" * 40

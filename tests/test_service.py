"""SERVICE, driven turn by turn on a machine and a clock that the test moves, with crashes in between."""

import json
import logging
import os
import pathlib
import queue
import threading
import time
import types

import live
import makers
import pytest

import nexus

BOOT = "boot-1"


class FakeClock(nexus.Clock):
    def __init__(self):
        self.wall, self.ticks, self.numbers = makers.NOW, 1000.0, 0

    def now(self):
        return self.wall

    def monotonic(self):
        return self.ticks

    def sleep(self, seconds):
        self.pass_(seconds)

    def pass_(self, seconds):
        self.wall += seconds
        self.ticks += seconds

    def new_token(self):
        self.numbers += 1
        return f"{self.numbers:048x}"

    def new_job_id(self, taken):
        return next(a + b + c for a in "abcdef" for b in "abcdefgh" for c in "abcdefgh" if a + b + c not in taken)


ANN = nexus.Caller("ann", "ann")


class FakeProcesses:
    """Processes as the test says: {pid: (started, job id)}; a job.sh is one of them, and no member."""

    def __init__(self, machine):
        self.machine, self.alive, self.signals, self.deaf = machine, {}, [], set()

    def start(self, pid, owner=None, started=None, state="S", parent=1):
        self.alive[pid] = nexus.Process(pid, pid * 10 if started is None else started, parent, pid, state, 0), owner

    def find(self, pid):
        return self.alive[pid][0] if pid in self.alive else None

    def is_alive(self, pid, started):
        return pid in self.alive and self.alive[pid][0].started == started

    def find_age_s(self, started):
        return self.machine.clock.ticks - started / 100

    def find_members(self, jobs, over=()):
        jobs = list(jobs)
        return {job.id: [process for process, owner in self.alive.values() if owner == job.id and process.pid != job.pid] for job in jobs}

    def owner_of(self, pid):
        return self.alive[pid][1] if pid in self.alive else None

    def send(self, process, number):
        self.signals.append((process.pid, int(number)))
        if number == 9 or (number == 15 and process.pid not in self.deaf):
            self.alive.pop(process.pid, None)


class FakeSamples:
    is_available = True

    def sample_host(self):
        return nexus.HostSample()

    def __init__(self):
        self.taken = {}                                 # {job id: JobSample}

    def sample_jobs(self, members):
        return {job_id: sample for job_id, sample in self.taken.items() if job_id in members}

    def weigh(self, processes):
        return sum(self.weights[process.pid] for process in processes)

    def find_name(self, pid):
        return "python"


class FakeMachine:
    is_mock, no_screen_reason, leases = True, "launcher is \"direct\"", None

    def __init__(self, clock, gpus):
        self.clock, self.boot_id, self.gpus = clock, BOOT, self
        self.shown = gpus
        self.processes, self.samples = FakeProcesses(self), FakeSamples()
        self.children, self.gone, self.launched, self.refusal = {}, [], [], None
        self.next_pid = 100

    def query_gpus(self, known):
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown

    def launch(self, job, script):
        if self.refusal:
            raise self.refusal
        self.launched.append((job.id, job.attempt))
        self.children[job.id] = object()

    def session_of(self, job):
        return None

    def reap(self):
        gone, self.gone = self.gone, []
        for job_id in gone:
            self.children.pop(job_id, None)
        return gone


class World:
    """A service that can be crashed and started anew; what runs and what is on disk stays."""

    def __init__(self, folder, gpus=2, **config):
        self.folder = folder
        self.clock = FakeClock()
        self.machine = FakeMachine(self.clock, [makers.gpu(index) for index in range(gpus)])
        self.config = makers.config(**{"history_limit": 100, "launcher": "direct", "kill_grace_seconds": 10, **config})
        self.layout = nexus.Layout(str(folder), str(folder / "state.json"), str(folder / "logs"))
        self.log = logging.getLogger(f"test-{id(self)}")
        self.log.propagate = False
        self.lines = []
        self.log.addHandler(handler := logging.Handler())
        handler.emit = lambda record: self.lines.append(record.getMessage())
        self.log.setLevel("INFO")
        os.makedirs(self.layout.log_dir, exist_ok=True)
        self.service = None
        self.threads = set(threading.enumerate())
        self.boot()

    def boot(self):
        """Start a service: recover, adopt, look at the GPUs once."""
        self.store = nexus.Store(self.layout, self.clock, self.log)
        self.store.recover()
        self.service = nexus.Service(self.config, self.layout, self.store, self.machine, self.clock, self.log, {"PATH": "/usr/bin"})
        self.service.adopt()
        self.probe()

    def crash(self, is_reboot=False):
        self.close()
        self.machine.children.clear()                   # another process's
        if is_reboot:
            self.machine.processes.alive.clear()
            self.machine.boot_id = "boot-2"
        self.boot()

    def close(self):
        self.store.journal.close()
        for thread in set(threading.enumerate()) - self.threads:        # they wake it when they are through
            thread.join(live.PATIENCE_S)
        os.close(self.service.wake_read)
        os.close(self.service.wake_write)

    def probe(self):
        self.service.observed(nexus.Prober(self.service).probe({}))
        self.service.take_in_observation()

    def turn(self, *sayings, seconds=0.0):
        self.clock.pass_(seconds)
        self.service.turn([nexus.parse_saying(saying) for saying in sayings])

    def add(self, command="python train.py", **options):
        return self.service.submit([nexus.parse_submission({"command": command, "cwd": "/", **options})], ANN).ids[0]

    def job(self, job_id):
        return self.store.read(lambda state: state.jobs.get(job_id))

    def api(self, job_id):
        return self.service.describe_now(self.job(job_id))

    def folder_of(self, job_id):
        return pathlib.Path(self.layout.job_folder(job_id))

    # What job.sh does

    def claim(self, job_id, pid, is_said=True):
        folder, attempt = self.folder_of(job_id), self.job(job_id).attempt
        self.machine.processes.start(pid, job_id)
        try:
            os.close(os.open(folder / f"attempt-{attempt}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            del self.machine.processes.alive[pid]
            return False
        (folder / f"attempt-{attempt}").write_text(f"{pid} {pid * 10}\n")
        if is_said:
            self.turn(f"start {job_id} {attempt} {pid} {pid * 10}")
        return True

    def end(self, job_id, code=0, is_said=True, has_result=True, **more):
        job = self.job(job_id)
        if has_result:
            self.write_result(job_id, code, **more)
        self.machine.processes.alive.pop(job.pid, None)
        if is_said:
            self.turn(f"end {job_id} {job.attempt} {code} 250")
            self.turn()

    def write_result(self, job_id, code, **more):
        (self.folder_of(job_id) / f"result-{self.job(job_id).attempt}.json").write_text(json.dumps(
            {"exit_code": code, "finished_at": int(self.clock.wall), "runtime_seconds": 2.5, **more}))

    def run(self, job_id, pid):
        """A job that is on: launched, claimed, known."""
        self.turn()
        assert self.claim(job_id, pid)
        assert self.job(job_id).pid == pid
        return job_id


@pytest.fixture
def world(tmp_path):
    worlds = []

    def make(**config):
        worlds.append(World(tmp_path, **config))
        return worlds[-1]

    yield make
    for made in worlds:
        made.close()


# How an attempt ended, and what the job becomes

ENDS = [  # reason, result, wanted to be stopped, (status, exit code, signal, cause, line)
    ("completed", {"exit_code": 0}, None, ("completed", 0, None, None, None)),
    ("exit code", {"exit_code": 3}, None, ("failed", 3, None, "exit", "it broke")),
    ("the largest", {"exit_code": 255}, None, ("failed", 255, None, "exit", "it broke")),
    ("a signal", {"exit_code": 137}, None, ("failed", 137, 9, "signal", "it broke")),
    ("128 is no signal", {"exit_code": 128}, None, ("failed", 128, None, "exit", "it broke")),
    ("killed", {"exit_code": 143}, "killed", ("cancelled", 143, 15, "killed", None)),
    ("killed, but it ended well", {"exit_code": 0}, "killed", ("cancelled", 0, None, "killed", None)),
    ("never began", {"exit_code": None, "cause": "launch", "cause_line": "no bash"}, None, ("failed", None, None, "launch", "no bash")),
]


@pytest.mark.parametrize("reason, result, stop, wanted", ENDS, ids=[case[0] for case in ENDS])
def test_ends(world, reason, result, stop, wanted):
    w = world()
    job_id = w.run(w.add(), 100)
    (w.folder_of(job_id) / "stderr.log").write_text("Traceback\nit broke\n")
    if stop:
        w.service.cancel(job_id, ANN, (nexus.RUNNING,))
    w.clock.pass_(2.5)
    w.end(job_id, result["exit_code"], is_said=False, **{key: result[key] for key in result if key != "exit_code"})
    w.turn(seconds=1.1)
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.exit_code, job.signal, job.cause, job.cause_line) == wanted
    assert job.runtime_seconds == 2.5 and [status for status, _ in job.status_history] == ["pending", "running", wanted[0]]


def test_end_is_heard_at_once(world):
    w = world(gpus=1)
    first, then = w.add(), w.add()
    w.run(first, 100)
    assert w.api(then)["waiting_for"] == f"GPU 0 runs job {first}"
    w.turn(f"end {first} 1 0 250")
    assert w.job(first).status == "completed" and w.job(then).status == "running" and w.job(first).runtime_seconds == 2.5


def test_sayings_of_nobody_change_nothing(world):
    w = world()
    job_id = w.run(w.add(), 100)
    before = w.job(job_id)
    w.turn(f"end {job_id} 7 0 250", "end zzz 1 0 250", f"start {job_id} 2 5 5", f"bounce {job_id} 9 why")
    assert w.job(job_id) == before


# Stopping

def test_stop_pending(world):
    w = world()
    job_id = w.add()
    w.service.cancel(job_id, ANN, (nexus.PENDING,))
    job = w.job(job_id)
    assert (job.status, job.cause, job.stop_by, job.finished_at) == ("cancelled", "killed", "ann", w.clock.wall)
    with pytest.raises(nexus.NexusError, match="is cancelled"):
        w.service.cancel(job_id, ANN, (nexus.PENDING, nexus.RUNNING))


def test_stop_asks_for_the_right_status(world):
    w = world(gpus=1)
    on, waits = w.add(), w.add()
    w.run(on, 100)
    with pytest.raises(nexus.NexusError, match="is running") as caught:
        w.service.cancel(on, ANN, (nexus.PENDING,))
    assert caught.value.kind == "conflict" and "nexus kill" in caught.value.hint
    with pytest.raises(nexus.NexusError, match="is pending") as caught:
        w.service.cancel(waits, ANN, (nexus.RUNNING,))
    assert "nexus remove" in caught.value.hint
    with pytest.raises(nexus.NexusError, match="no job 'xyz'") as caught:
        w.service.cancel("xyz", ANN, (nexus.RUNNING,))
    assert caught.value.kind == "not_found"


def test_stop_running_terminates_then_kills(world):
    w = world(gpus=1)
    job_id, then = w.add(), w.add()
    w.run(job_id, 100)
    processes = w.machine.processes
    processes.start(200, job_id)
    processes.start(201, job_id)
    processes.start(300, None)                          # somebody else's
    processes.deaf = {200}
    w.service.cancel(job_id, ANN, (nexus.RUNNING,))
    w.turn()
    assert processes.signals == [(200, 15), (200, 18), (201, 15), (201, 18)]
    w.turn(seconds=9)
    assert processes.signals.count((200, 15)) == 1 and w.job(job_id).status == "running"
    w.turn(seconds=1.1)
    assert 200 not in processes.alive and 300 in processes.alive
    w.end(job_id, 137)
    assert (w.job(job_id).status, w.job(job_id).cause) == ("cancelled", "killed")
    assert w.job(then).status == "running"


def test_what_a_job_runs_to_tidy_up_is_left_alone(world):
    w = world()
    job_id = w.run(w.add(), 100)
    processes = w.machine.processes
    processes.start(200, job_id)
    processes.deaf = {200}
    w.service.cancel(job_id, ANN, (nexus.RUNNING,))
    w.turn()
    processes.start(201, job_id, parent=200)            # cp checkpoint.pt ...
    w.turn(seconds=1)
    assert 201 in processes.alive and (201, 15) not in processes.signals
    processes.start(202, job_id, parent=1)              # but what nobody waits for is told
    w.turn(seconds=1)
    assert (202, 15) in processes.signals
    w.turn(seconds=9)
    assert not {200, 201, 202} & set(processes.alive)


def test_leftovers_are_ended_before_the_job_is(world):
    w = world(gpus=1)
    job_id, then = w.add(), w.add()
    w.run(job_id, 100)
    w.machine.processes.start(200, job_id)
    w.machine.processes.deaf = {200}
    w.end(job_id, 0)
    assert w.job(job_id).status == "running" and w.job(then).status == "pending"
    w.turn(seconds=10.1)
    w.turn(seconds=1)
    assert w.job(job_id).status == "completed" and w.job(job_id).runtime_seconds == 2.5 and w.job(then).status == "running"


def test_stopped_runner_is_killed_at_last(world):
    w = world()
    job_id = w.run(w.add(), 100)
    w.machine.processes.start(100, job_id, state="T")
    w.machine.processes.deaf = {100}
    w.service.cancel(job_id, ANN, (nexus.RUNNING,))
    w.turn()
    assert w.machine.processes.signals == [(100, 18)]   # it may go on and say what became of the job
    w.turn(seconds=13)
    w.turn(seconds=1.1)
    w.turn(seconds=1.1)
    assert w.job(job_id).status == "cancelled" and 100 not in w.machine.processes.alive


def test_stop_before_the_runner_is_known(world):
    w = world()
    job_id = w.add()
    w.turn()
    w.service.cancel(job_id, ANN, (nexus.RUNNING,))
    w.turn()
    assert w.job(job_id).status == "running"
    w.claim(job_id, 100)
    w.machine.processes.start(200, job_id)
    w.turn(seconds=1)
    assert (200, 15) in w.machine.processes.signals
    w.end(job_id, 143)
    assert w.job(job_id).status == "cancelled"


# Starts that come to nothing

def test_bounce(world):
    w = world(gpus=1)
    job_id, then = w.add(), w.add()
    w.turn()
    w.turn(f"bounce {job_id} 1 GPU-0 is held by another nexus")
    job = w.job(job_id)
    assert (job.status, job.attempt, job.gpu_indices) in [("running", 2, (0,)), ("pending", 1, ())]     # at once again, in its place
    assert w.job(then).status == "pending" and w.api(then)["position"] == (1 if job.status == "pending" else 0)
    assert any("goes back to the queue" in line for line in w.lines)


def test_bounce_of_a_job_that_is_to_be_stopped_ends_it(world):
    w = world()
    job_id = w.add()
    w.turn()
    w.service.cancel(job_id, ANN, (nexus.RUNNING,))
    w.turn(f"bounce {job_id} 1 taken")
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause, w.job(job_id).stop_by) == ("cancelled", "killed", "ann")
    assert w.machine.launched == [(job_id, 1)] and not w.service.results and not w.service.clearings


def test_starts_that_come_to_nothing_leave_no_trail(world):
    """Whatever is in their way may be there for days: neither the job grows, nor is it tried all the time."""
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    job_id = w.add()
    for _ in range(600):
        w.probe()
        w.turn(seconds=1)
    assert len(w.job(job_id).status_history) == 1 and 5 <= w.job(job_id).attempt <= 10
    w.machine.leases.error = None
    while w.job(job_id).status == "pending":
        w.probe()
        w.turn(seconds=1)
    assert [status for status, _ in w.job(job_id).status_history] == ["pending", "running"]


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
    assert w.job(job_id).status == "pending" and "held by another nexus" in w.api(job_id)["waiting_for"]
    w.turn(seconds=6)                                   # somebody has it whom the plan does not see: not at once
    assert w.job(job_id).attempt == 2 and w.job(job_id).status == "running"


LAUNCH_FAILURES = [
    ("no such program", FileNotFoundError(2, "No such file or directory", "screen"), "start it with screen"),
    ("a full disk", OSError(28, "No space left on device", "/logs"), "No space left on device"),
]


@pytest.mark.parametrize("reason, error, words", LAUNCH_FAILURES, ids=[case[0] for case in LAUNCH_FAILURES])
def test_launch_failures(world, reason, error, words):
    w = world()
    w.machine.refusal = error
    job_id = w.add()
    w.turn()
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.cause, job.exit_code) == ("failed", "launch", None) and words in job.cause_line
    assert not w.claim(job_id, 100)                     # a late runner finds that its attempt is taken


def test_log_folder_cannot_be_made(world):
    w = world(launch_attempts=1)
    os.rmdir(w.layout.log_dir)
    pathlib.Path(w.layout.log_dir).write_text("a file")
    first, then = w.add(), w.add("true", gpus=0)
    w.turn()
    w.turn()
    for job_id in (first, then):
        assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "launch") and "logs" in w.job(job_id).cause_line
    assert w.service.failure_count == 0


def test_runner_says_that_it_failed(world):
    w = world()
    job_id = w.add()
    w.turn()
    w.turn(f"fail {job_id} 1 the log folder /x cannot be written")
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause_line) == ("failed", "the log folder /x cannot be written")


def test_screen_ends_before_it_begins(world):
    w = world(launch_attempts=1)
    job_id = w.add()
    w.turn()
    w.machine.gone = [job_id]
    w.turn(seconds=1)
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "launch") and not w.claim(job_id, 100)


def test_screen_that_hangs(world):
    """Its process lives, and no job.sh comes of it."""
    w = world(launch_attempts=1)
    job_id = w.add()
    w.turn()
    for _ in range(28):
        w.turn(seconds=1)
    assert w.job(job_id).status == "running"
    for _ in range(4):
        w.turn(seconds=1)
    assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "launch") and not w.claim(job_id, 100)


def test_one_folder_that_cannot_be_read_hides_no_other(world, monkeypatch):
    w = world()
    bad, good = w.add(), w.add()
    w.turn()
    w.claim(good, 101, is_said=False)
    real = nexus.read_claim
    monkeypatch.setattr(nexus, "read_claim", lambda folder, attempt: (_ for _ in ()).throw(
        nexus.NexusError("unavailable", f"cannot read {folder}")) if folder.endswith(bad) else real(folder, attempt))
    w.turn(seconds=1.1)
    assert w.job(good).pid == 101
    w.end(good, 5, is_said=False)
    w.turn(seconds=1.1)
    w.turn()
    assert w.job(good).exit_code == 5 and w.service.failure_count == 0


# Histories: what the next service makes of a job that is recorded as running

def test_crash_between_intent_and_spawn(world):
    w = world()
    w.machine.launch = lambda *_: (_ for _ in ()).throw(SystemExit)     # killed right there
    job_id = w.add()
    with pytest.raises(SystemExit):
        w.turn()
    del w.machine.launch
    w.crash()
    w.turn()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", 2) and w.machine.launched == [(job_id, 2)]
    assert (w.folder_of(job_id) / "attempt-1").exists()


def test_crash_between_spawn_and_claim(world):
    """The next service comes first: it claims the attempt, and the late runner leaves."""
    w = world()
    job_id = w.add()
    w.turn()
    w.crash()
    w.turn()
    assert w.job(job_id).attempt == 2
    folder = w.folder_of(job_id)
    assert (folder / "attempt-1").read_text() == ""
    assert w.claim(job_id, 101) and w.job(job_id).pid == 101


def test_crash_between_spawn_and_claim_and_the_runner_comes_first(world):
    w = world()
    job_id = w.add()
    w.turn()
    w.claim(job_id, 100, is_said=False)
    w.crash()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).attempt, w.job(job_id).pid) == ("running", 1, 100)
    assert w.machine.launched == [(job_id, 1)]


def test_crash_after_the_service_claimed(world):
    """Killed after it claimed an attempt, before it put the job back: the third service does."""
    w = world()
    job_id = w.add()
    w.turn()
    nexus.take_claim(str(w.folder_of(job_id)), 1)
    w.crash()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", 2)


def test_runner_alive(world):
    w = world()
    job_id = w.run(w.add(), 100)
    w.crash()
    w.turn(seconds=2)
    assert w.job(job_id).pid == 100 and w.job(job_id).status == "running" and w.machine.launched == [(job_id, 1)]
    assert any("goes on" in line for line in w.lines)
    w.end(job_id, 4)
    assert (w.job(job_id).status, w.job(job_id).exit_code) == ("failed", 4)


def test_ended_meanwhile(world):
    w = world()
    job_id = w.run(w.add(), 100)
    w.end(job_id, 4, is_said=False)
    ended_at = int(w.clock.wall)
    w.clock.pass_(3600)
    w.crash()
    w.turn()
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.exit_code, job.finished_at, job.runtime_seconds) == ("failed", 4, ended_at, 2.5)


def test_ended_meanwhile_before_its_claim_was_heard(world):
    w = world()
    job_id = w.add()
    w.turn()
    w.claim(job_id, 100, is_said=False)
    w.write_result(job_id, 9)
    del w.machine.processes.alive[100]
    w.crash()
    for _ in range(3):
        w.turn(seconds=1.1)
    assert (w.job(job_id).status, w.job(job_id).exit_code, w.job(job_id).attempt) == ("failed", 9, 1)


def test_runner_killed_without_a_result(world):
    w = world()
    job_id = w.run(w.add(), 100)
    w.machine.processes.start(200, job_id)              # its command lives on, unwatched
    w.end(job_id, is_said=False, has_result=False)
    w.crash()
    w.turn()
    assert (200, 15) in w.machine.processes.signals
    w.turn(seconds=1)
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause, w.job(job_id).exit_code) == ("failed", "session-lost", None)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", "null", '{"exit_code": "0"}', '{"exit_code": 999, "finished_at": 1, "runtime_seconds": 1}'])
def test_torn_result(world, text):
    w = world()
    job_id = w.run(w.add(), 100)
    (w.folder_of(job_id) / "result-1.json").write_text(text)
    w.end(job_id, is_said=False, has_result=False)
    w.crash()
    w.turn()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "session-lost") and w.service.failure_count == 0


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
    ("fails", "fail", False, False, ("failed", "reboot", 1)),
    ("queued again", "requeue", False, False, ("running", None, 2)),
    ("it had ended", "fail", True, False, ("failed", "exit", 1)),
    ("it had ended, requeue", "requeue", True, False, ("failed", "exit", 1)),
    ("to be stopped, not queued again", "requeue", False, True, ("cancelled", "killed", 1)),
]


@pytest.mark.parametrize("reason, on_reboot, has_result, is_stopped, wanted", REBOOTS, ids=[case[0] for case in REBOOTS])
def test_other_boot(world, reason, on_reboot, has_result, is_stopped, wanted):
    w = world(on_reboot=on_reboot)
    job_id = w.run(w.add(), 100)
    if is_stopped:
        w.service.cancel(job_id, ANN, (nexus.RUNNING,))
    if has_result:
        w.write_result(job_id, 3)
    w.crash(is_reboot=True)
    w.machine.processes.start(100, job_id, started=1000)    # after a reboot pids begin anew, and even its start time may be met
    w.machine.processes.start(101, job_id)
    w.turn()
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.cause, job.attempt) == wanted
    assert not w.machine.processes.signals              # nothing of this boot is the job's


def test_reboot_between_spawn_and_claim(world):
    w = world(on_reboot="requeue")
    job_id = w.add()
    w.turn()
    w.crash(is_reboot=True)
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", 2)


def test_a_session_of_another_boot_is_not_the_jobs():
    """The pid that job.sh had is a new session's leader: none of it is the job's."""
    processes = nexus.Processes()
    own = processes.find(os.getsid(0)) or processes.find(os.getpid())
    job = makers.running(pid=own.pid, pid_started=own.started - 1, nonce="n" * 16)
    assert processes.find_members([job]) == {job.id: []}


# History

def test_history_is_trimmed(world, tmp_path):
    w = world(gpus=0, history_limit=3, cpu_slots=10)
    jobs = [w.add("true", gpus=0) for _ in range(6)]
    w.turn()
    for number, job_id in enumerate(jobs):
        w.claim(job_id, 100 + number)
    for job_id in (jobs[4], jobs[1], jobs[0], jobs[5], jobs[2], jobs[3]):
        w.end(job_id)
        w.clock.pass_(1)
    w.turn()
    kept = w.store.read(lambda state: list(state.finished))
    assert kept == [jobs[5], jobs[2], jobs[3]]          # those that ended last
    removed = [w.service.rubbish.get_nowait() for _ in range(3)]
    assert [job.id for job in removed] == [jobs[4], jobs[1], jobs[0]] and removed[0].log_dir == str(w.folder_of(jobs[4]))


def remove_rubbish(w, *jobs):
    """What the thread of that name does with these."""
    for job in jobs:
        w.service.rubbish.put(job)
    w.service.rubbish.put(None)                         # it ends there: nobody has anything of nobody
    with pytest.raises(AttributeError):
        real, w.service.fail = w.service.fail, lambda phase, error: (_ for _ in ()).throw(error)
        w.service.remove_rubbish()
    w.service.fail = real


def test_a_snapshot_goes_with_the_last_job_that_has_it(world, monkeypatch):
    w = world(gpus=0)
    released = []
    monkeypatch.setattr(nexus, "release_snapshot", lambda repository, commit, environ: released.append((repository, commit)))
    of = {"snapshot": "a" * 40, "snapshot_repo": "/repo", "cwd": "/repo/sub", "gpus": 0}
    first, second = w.add("true", **of), w.add("true", **of)
    gone = [w.job(job_id) for job_id in (first, second)]
    w.service.cancel(first, ANN, ("pending",))
    w.store.update(lambda state: iter([nexus.JobsRemoved((first,))]))
    remove_rubbish(w, gone[0])
    assert not released
    w.service.cancel(second, ANN, ("pending",))
    w.store.update(lambda state: iter([nexus.JobsRemoved((second,))]))
    remove_rubbish(w, gone[1])
    assert released == [("/repo", "a" * 40)]


def test_removing_follows_no_link(world, tmp_path):
    w = world()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    folder = w.folder_of("abc")
    folder.symlink_to(precious)
    inside = w.folder_of("abd")
    inside.mkdir()
    (inside / "stdout.log").symlink_to(precious / "thesis.tex")
    (inside / "data").symlink_to(precious)
    outside = tmp_path / "job_abe"
    outside.mkdir()
    remove_rubbish(w, *(makers.finished(log_dir=str(path)) for path in (folder, inside, outside, tmp_path / "logs" / "job_no")),
                   makers.finished(log_dir=None))
    assert (precious / "thesis.tex").read_text() == "x" and outside.exists() and os.path.islink(folder) and not inside.exists()
    assert sum("was left" in line for line in w.lines) == 2


# GPUs and reasons

def test_paused_gpu_gets_no_new_job(world):
    w = world(gpus=2)
    on = w.run(w.add(), 100)
    w.service.set_gpu_paused(0, True, "ann")
    w.service.set_gpu_paused(1, True, "ann")
    waits = w.add()
    w.turn()
    assert w.job(on).status == "running"                # it is left alone
    assert w.api(waits)["waiting_for"] == "GPU 0 runs job aaa, and is paused; GPU 1 is paused"
    w.crash()
    w.turn()
    assert w.job(waits).status == "pending"             # pauses last
    w.service.set_gpu_paused(1, False, "ann")
    w.turn()
    assert w.job(waits).gpu_indices == (1,)
    with pytest.raises(nexus.NexusError, match="no GPU 7"):
        w.service.set_gpu_paused(7, True, "ann")


def test_paused_queue(world):
    w = world()
    w.service.set_paused(True, "ann")
    job_id = w.add()
    w.turn()
    assert w.api(job_id)["waiting_for"] == "the queue is paused (nexus resume)"
    w.crash()
    w.turn()
    assert w.job(job_id).status == "pending" and w.service.status()["is_paused"]
    w.service.set_paused(False, "ann")
    w.turn()
    assert w.job(job_id).status == "running"


def test_a_job_on_a_gpu_that_it_was_not_given(world, monkeypatch):
    """Its script sets CUDA_VISIBLE_DEVICES itself: there it is as anybody else is, until it ends."""
    w = world(gpus=2)
    monkeypatch.setattr(nexus, "find_process_user", lambda pid: "ann")
    astray = w.run(w.add(), 100)
    w.machine.processes.start(101, astray)
    used = (nexus.GpuProcess(101, 8192.0),)
    w.machine.shown = [makers.gpu(index, processes=used, memory_used_mib=8192.0) for index in range(2)]
    w.probe()
    assert [gpu.processes[0].job_id for gpu in w.service.gpus] == [astray, None]
    then = w.add()
    w.turn()
    assert w.job(then).status == "pending"
    assert f"GPU 1 is in use by ann (pid 101 python of job {astray}, 8GB)" in w.api(then)["waiting_for"]
    del w.machine.processes.alive[101]
    w.machine.processes.owner_of = lambda pid: astray           # it has gone, and nvidia-smi still shows it
    w.probe()
    w.turn()
    assert w.job(then).gpu_indices == (1,)


def test_a_job_astray_on_a_node_is_named_by_its_id_here():
    processes = [nexus.GpuProcess(7, 1.0, job_id, "ann", name) for job_id, name in (
        ("aaa", None), (None, "python of job aaa"), (None, "python of job zzz"), (None, "python"), (None, None))]
    node = types.SimpleNamespace(name="n1")
    seen = nexus.Node.adopt_gpu(node, makers.gpu(0, processes=processes), {"aaa": "bbb"})
    assert [process.job_id for process in seen.processes] == ["bbb", None, None, None, None]
    assert [process.name for process in seen.processes] == [None, "python of job bbb", "python of job zzz", "python", None]


def test_until_nvidia_smi_answers(world):
    """What it said last is not relied upon for as long as a slow driver may take."""
    w = world(gpus=1, refresh_rate_seconds=5)
    w.turn(seconds=14)
    assert w.service.status()["gpu_trouble"] is None and w.service.health()["is_healthy"]
    w.turn(seconds=2)
    job_id = w.add()
    w.turn()
    words = "nvidia-smi has not answered for 16 s"
    assert w.service.status()["gpu_trouble"] == words and words in w.api(job_id)["waiting_for"] and not w.service.health()["is_healthy"]
    w.probe()
    w.turn()
    assert w.job(job_id).status == "running" and w.service.status()["gpu_trouble"] is None


def test_a_slow_nvidia_smi_is_waited_for_and_said(world):
    w = world(gpus=1, refresh_rate_seconds=5)
    w.service.observation = nexus.replace(w.service.observation, took_s=24.0, began_at=w.clock.monotonic() - 24.0)
    w.turn(seconds=240 + 30)
    assert w.service.status()["gpu_trouble"] is None and "nvidia-persistenced" in " ".join(w.service.status()["hints"])


REASONS = [  # reason, GPUs, config, job, the words
    ("somebody else's process", [makers.gpu(0, processes=(makers.foreign(),), memory_used_mib=16384.0)], {}, {},
     "GPU 0 is in use by bob (pid 4242 python, 16GB)"),
    ("a lost one", [makers.gpu(0, fault="GPU is lost")], {}, {}, "GPU 0 is unusable (GPU is lost)"),
    ("MIG", [makers.gpu(0, is_mig=True)], {}, {}, "GPU 0 is cut into MIG slices"),
    ("not ours to use", [makers.gpu(0), makers.gpu(1, fault="GPU is lost")], {"ids": [1]}, {},
     "GPU 0 is not among [gpu] ids; GPU 1 is unusable (GPU is lost)"),
    ("memory", [makers.gpu(0, memory_used_mib=23000.0)], {}, {}, "GPU 0 has 22GB of its memory in use by others"),
    ("not enough free", [makers.gpu(0, memory_used_mib=4096.0)], {"min_free_mem_mib": 22000}, {},
     "GPU 0 has 20GB free, less than min_free_mem_mib (21GB)"),
    ("two of two", [makers.gpu(0), makers.gpu(1, fault="GPU is lost")], {}, {"gpus": 2},
     "it needs 2 GPUs, and 1 of 2 can be had now: GPU 1 is unusable (GPU is lost)"),
    ("CPU slots", [], {"cpu_slots": 0}, {"gpus": 0}, "all 0 CPU slots are taken (cpu_slots)"),
]


@pytest.mark.parametrize("reason, gpus, config, options, words", REASONS, ids=[case[0] for case in REASONS])
def test_waiting_for(world, monkeypatch, reason, gpus, config, options, words):
    w = world(gpus=0, **config)
    w.machine.shown = gpus
    monkeypatch.setattr(nexus, "find_process_user", lambda pid: "bob")
    w.machine.processes.alive[4242] = (nexus.Process(4242, 1, 1, 1, "S", 0), None)
    w.probe()
    w.turn()
    job_id = w.add(**options)
    w.turn()
    assert w.job(job_id).status == "pending" and w.api(job_id)["waiting_for"] == words


def test_unreadable_gpus_give_no_start_and_recover(world):
    w = world(gpus=1)
    w.machine.shown = nexus.NexusError("unavailable", "nvidia-smi: it is broken (exit code 9)", hint="try it")
    w.probe()
    gpu_job, cpu_job = w.add(), w.add("true", gpus=0)
    w.turn()
    assert w.api(gpu_job)["waiting_for"] == "nvidia-smi: it is broken (exit code 9)" and w.job(cpu_job).status == "running"
    assert not w.service.health()["is_healthy"] and "try it" in w.service.status()["hints"]
    w.machine.shown = [makers.gpu(0)]
    w.probe()
    w.turn()
    assert w.job(gpu_job).status == "running" and w.service.health()["is_healthy"]


def test_failing_nvidia_smi_is_asked_at_least_every_30_seconds(world, monkeypatch):
    """However slow it answers, and however seldom it is asked when all is well."""
    w = world(refresh_rate_seconds=600)
    waits = []
    prober = nexus.Prober(w.service)
    monkeypatch.setattr(prober.stop, "wait", lambda seconds: (waits.append(seconds), len(waits) > 5 and prober.stop.set()))
    w.machine.query_gpus = lambda known: (w.clock.pass_(8), (_ for _ in ()).throw(nexus.NexusError("unavailable", "no")))[1]
    began = w.clock.monotonic()
    prober.run()
    assert len(waits) == 6 and all(wait + 8 <= 30 for wait in waits) and w.clock.monotonic() - began == 48


def test_polling_slows_down_with_slow_answers(world, monkeypatch):
    w = world(refresh_rate_seconds=1)
    waits = []
    prober = nexus.Prober(w.service)
    monkeypatch.setattr(prober.stop, "wait", lambda seconds: (waits.append(seconds), prober.stop.set()))
    w.machine.query_gpus = lambda known: (w.clock.pass_(3), [makers.gpu(0)])[1]
    prober.run()
    assert waits == [30]


def test_the_prober_survives_a_surprise(world, monkeypatch):
    w = world()
    prober = nexus.Prober(w.service)
    monkeypatch.setattr(prober.stop, "wait", lambda seconds: prober.stop.set())
    w.machine.shown = ZeroDivisionError("oh")
    prober.run()
    w.turn()
    assert "oh" in w.service.observation.trouble and w.service.failure_count == 1 and not w.service.health()["is_healthy"]


# Leases that cannot be taken are no fault of the job's

class BrokenLeases:
    def __init__(self):
        self.error = nexus.NexusError("unavailable", "somebody keeps /tmp/nexus-leases/lock locked")

    def take(self, job_id, uuids):
        if self.error:
            raise self.error

    def find_holders(self):
        return {}

    def path(self, job_id):
        return f"/tmp/none.{job_id}"

    def drop(self, job_id):
        pass

    hand_over = touch = drop


def test_leases_that_cannot_be_taken(world):
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    job_id = w.add()
    w.turn()
    assert w.job(job_id).status == "pending"
    seq = w.store.state.seq
    for _ in range(20):
        w.turn(seconds=0.1)
    assert "lock locked" in w.api(job_id)["waiting_for"]
    assert w.store.state.seq == seq                     # it is not tried all the time
    w.machine.leases.error = None
    w.turn(seconds=5)
    w.turn()
    assert w.job(job_id).status == "running"


SHORTAGES = [
    ("memory", OSError(12, "Cannot allocate memory")), ("processes", BlockingIOError(11, "Resource temporarily unavailable")),
    ("descriptors", OSError(24, "Too many open files")), ("a disk that is read-only", OSError(30, "Read-only file system", "/logs")),
]


@pytest.mark.parametrize("reason, error", SHORTAGES, ids=[case[0] for case in SHORTAGES])
def test_a_machine_that_is_short_of_something_fails_no_job(world, reason, error):
    w = world(gpus=2)
    w.machine.refusal = error
    ids = [w.add(), w.add(gpus=0)]
    w.turn()
    w.turn()
    assert {w.job(id).status for id in ids} == {"pending"}
    assert all(error.strerror in w.api(id)["waiting_for"] for id in ids)
    w.machine.refusal = None
    w.turn(seconds=6)
    assert {w.job(id).status for id in ids} == {"running"}


def test_a_full_disk_fails_one_job_and_not_the_queue(world):
    w = world(gpus=2)
    w.machine.refusal = OSError(28, "No space left on device", "/logs")
    ids = [w.add() for _ in range(10)]
    for _ in range(5):
        w.turn(seconds=0.5)
    assert [w.job(id).status for id in ids].count("failed") == 1
    w.machine.refusal = None
    w.turn(seconds=6)
    assert [w.job(id).status for id in ids].count("running") == 2


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
    assert job.status == "failed" and job.runtime_seconds == pytest.approx(111.1, abs=0.1)
    assert w.service.health()["is_healthy"] and w.service.info()["uptime_seconds"] < 200


# One failure stays one failure

PHASES = [("hear", "hearing runners"), ("watch", "watching runners"), ("take_in_observation", "reading GPUs"), ("clear", "ending jobs"),
          ("schedule", "scheduling"), ("trim_history", "trimming the history")]


@pytest.mark.parametrize("method, phase", PHASES, ids=[case[0] for case in PHASES])
def test_a_phase_that_fails_stops_no_other(world, monkeypatch, method, phase):
    w = world()
    done = []
    for name, _ in PHASES:
        monkeypatch.setattr(w.service, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(w.service, method, lambda *_: (_ for _ in ()).throw(ZeroDivisionError("oh")))
    w.turn()
    assert done == [name for name, _ in PHASES if name != method]
    health = w.service.health()
    reading = next(check for check in health["checks"] if check["name"] == "failures")
    assert not health["is_healthy"] and not reading["is_ok"] and phase in reading["reading"] and "oh" in reading["reading"]
    w.clock.pass_(301)
    w.turn()
    assert w.service.failure_count == 2


def test_disk_that_refuses(world, monkeypatch):
    """Nothing is acknowledged, nothing started, nothing lost; and it goes on by itself."""
    w = world(gpus=2)
    on = w.run(w.add(), 100)
    append = nexus.AppendFile.append
    monkeypatch.setattr(nexus.AppendFile, "append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(nexus.NexusError, match="No space left") as caught:
        w.add()
    assert caught.value.http_status == 503
    w.end(on, 6)
    for _ in range(5):
        w.turn(seconds=0.3)
    assert w.job(on).status == "running" and w.service.failure_count == 0
    assert not w.service.health()["is_healthy"] and any("No space left" in hint for hint in w.service.status()["hints"])
    monkeypatch.setattr(nexus.AppendFile, "append", append)
    w.turn(seconds=1.1)
    w.turn(seconds=1.1)
    assert (w.job(on).status, w.job(on).exit_code) == ("failed", 6)
    assert w.service.store.last_error is None and w.service.health()["is_healthy"]
    then = w.add()
    w.turn()
    assert w.job(then).status == "running"


def test_a_disk_that_fills_after_a_launch_ends_no_job(world, monkeypatch):
    """What could not be noted of a job that runs is no fault of the job's."""
    w = world()
    job_id = w.add()
    monkeypatch.setattr(nexus, "choose_limits", lambda job: ([], ["limit nofile: less was given"]))
    launch = w.machine.launch

    def launch_and_fill(*given):
        launch(*given)
        monkeypatch.setattr(w.store.journal, "append", refuse_to_write)

    def refuse_to_write(record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.machine, "launch", launch_and_fill)
    w.turn()
    assert w.machine.launched == [(job_id, 1)] and job_id not in w.service.results
    assert w.job(job_id).status == "running" and not w.service.failure_count


# What is submitted

def submit(w, *jobs, key=None, **shared):
    return w.service.submit([nexus.parse_submission({"command": "python train.py", "cwd": "/", **shared, **one}) for one in jobs or ({},)],
                            ANN, key)


REFUSED = [  # reason, configuration, the job, kind, what it says
    ("a job it comes after is not there", {}, {"after": ["zzz"]}, "not_found", "zzz"),
    ("more than the queue takes", {"queue_limit": 0 + 1}, {}, "queue_full", "queue_limit is 1"),
    ("more GPUs than there are", {}, {"gpus": 3}, "usage", "3 GPUs asked for, and this machine has 2"),
    ("a fraction more", {}, {"gpus": 2.5}, "usage", "2.5 GPUs"),
    ("a GPU that is not there", {}, {"gpu_ids": [0, 5, 7]}, "usage", "no GPU 5, 7"),
    ("a GPU that may not be used", {"ids": [1]}, {"gpu_ids": [0]}, "usage", "no GPU 0 here; there are 1"),
    ("more memory than any has", {}, {"gpu_mem_mib": 25 * 1024}, "usage", "25GB of GPU memory asked for, and the largest GPU has 24GB"),
    ("a little more memory than any has", {}, {"gpu_mem_mib": 24 * 1024 + 12}, "usage",
     "24588MB of GPU memory asked for, and the largest GPU has 24576MB"),
    ("a model without a table", {}, {"llm": "qwen"}, "usage", "llm qwen"),
    ("no script", {"allowed_script_paths": ["/jobs"]}, {"command": "python -c pass"}, "forbidden", "-c is not a script"),
    ("a shell's work", {"allowed_script_paths": ["/jobs"]}, {"command": "python /jobs/a.py; rm x"}, "forbidden", "it holds \";\""),
    ("a script of another place", {"allowed_script_paths": ["/jobs"]}, {"command": "python /other/a.py"}, "forbidden", "not below /jobs"),
]


@pytest.mark.parametrize("reason, config, job, kind, says", REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_refused_adds_nothing(world, reason, config, job, kind, says):
    w = world(**config)
    good = {"gpus": 0} if kind != "forbidden" else {"gpus": 0, "command": "/jobs/a.sh"}
    with pytest.raises(nexus.NexusError) as refused:
        submit(w, good, job)
    assert refused.value.kind == kind and says in refused.value.message and refused.value.hint
    assert w.store.read(lambda state: (list(state.jobs), state.groups, dict(state.seen))) == ([], {}, {})


SCRIPTS = [  # reason, command (TOP: where scripts may be), directory, whether it may run
    ("there", "python TOP/a.py --lr 1", "/", True), ("without an interpreter", "TOP/sub/run.sh", "/", True),
    ("by its name from there", "python3.11 a.py", "TOP", True), ("from beside", "python ../scripts/a.py", "TOP/../other", True),
    ("one that is yet to be written", "python TOP/later.py", "/", True), ("a link inside", "python TOP/inner", "/", True),
    (".. around it", "python TOP/../other/evil.py", "/", False), ("a link around it", "python TOP/out", "/", False),
    ("a folder's link around it", "python TOP/away/evil.py", "/", False), ("a name that begins alike", "python TOP-2/a.py", "/", False),
    ("the folder itself", "python TOP", "/", False), ("another directory", "python a.py", "TOP/../other", False),
    ("a variable before it", "A=1 python TOP/a.py", "/", False), ("an option of the interpreter", "python -m a", "TOP", False),
    ("a substitution", "python $(echo x) TOP/a.py", "/", False), ("in the arguments", "python TOP/a.py `id`", "/", False),
    ("two lines", "python TOP/a.py\nid", "/", False), ("of the home", "python ~/a.py", "/", False),
    ("the interpreter alone", "python", "TOP", False), ("another program", "rm TOP/a.py", "/", False),
]


@pytest.mark.parametrize("reason, command, cwd, is_allowed", SCRIPTS, ids=[case[0] for case in SCRIPTS])
def test_allowed_script_paths(world, tmp_path, reason, command, cwd, is_allowed):
    top = tmp_path / "scripts"
    (top / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "scripts-2").mkdir()
    for path in (top / "a.py", top / "sub/run.sh", tmp_path / "other/evil.py", tmp_path / "scripts-2/a.py"):
        path.touch()
    (top / "inner").symlink_to("a.py")
    (top / "out").symlink_to("../other/evil.py")
    (top / "away").symlink_to("../other")
    (tmp_path / "link").symlink_to(top)
    w = world(allowed_script_paths=["/no/such", str(tmp_path / "link")])       # one may be told by a link
    job = {"command": command.replace("TOP", str(top)), "cwd": cwd.replace("TOP", str(top))}
    if is_allowed:
        job_id = submit(w, job).ids[0]
        w.turn()
        assert w.job(job_id).status == "running"
    else:
        with pytest.raises(nexus.NexusError) as refused:
            submit(w, job)
        assert refused.value.kind == "forbidden" and not w.store.read(lambda state: state.jobs)


def test_a_script_that_becomes_a_link_elsewhere_is_not_started(world, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/a.py").touch()
    w = world(allowed_script_paths=[str(tmp_path / "scripts")])
    job_id = w.add(f"python {tmp_path}/scripts/a.py")
    (tmp_path / "scripts/a.py").unlink()
    (tmp_path / "scripts/a.py").symlink_to("/etc/passwd")
    w.turn()
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "launch") and not w.machine.launched
    assert "/etc/passwd may not be run here" in w.job(job_id).cause_line


SAME = [  # reason, what differs from the job that is there, whether it is the same
    ("nothing", {}, True), ("its priority, name and group", {"priority": 0, "name": "x", "group": "g"}, True),
    ("its GPUs and time limit", {"gpus": 0, "timeout_seconds": 5}, True), ("its environment at large", {"environment": {"X": "1"}}, True),
    ("its command", {"command": "python train.py -v"}, False), ("its directory", {"cwd": "/tmp"}, False),
    ("its conda environment", {"conda": "base"}, False), ("its variables", {"env": {"SEED": "1"}}, False),
]


@pytest.mark.parametrize("reason, other, is_same", SAME, ids=[case[0] for case in SAME])
def test_unique(world, reason, other, is_same):
    w = world()
    first = w.add()
    added = submit(w, {"unique": True, **other})
    assert added.known == ((first,) if is_same else ()) and (added.ids == (first,)) == is_same
    assert len(w.store.read(lambda state: state.jobs)) == (1 if is_same else 2)


@pytest.mark.parametrize("status, is_known", [("pending", True), ("running", True), ("completed", True), ("failed", False), ("cancelled",
    False)])
def test_unique_knows_what_waits_runs_or_has_completed(world, status, is_known):
    w = world()
    first = w.add()
    if status == "cancelled":
        w.service.cancel(first, ANN, ("pending",))
    elif status != "pending":
        w.run(first, 100)
        if status != "running":
            w.end(first, 0 if status == "completed" else 1)
    assert w.job(first).status == status
    assert submit(w, {"unique": True}).known == ((first,) if is_known else ())


def test_unique_within_a_list_and_by_key(world):
    w = world()
    added = submit(w, {}, {"command": "b"}, {}, unique=True, key="k" * 8)
    assert len(set(added.ids)) == 2 and added.ids[0] == added.ids[2] and added.known == (added.ids[0],)
    assert set(submit(w, {}, {"command": "b"}, {}, unique=True, key="k" * 8).ids) == set(added.ids), "asked twice"
    without = submit(w, {}, {})
    assert len(set(without.ids) - set(added.ids)) == 2, "only where it is asked for"


def test_after(world):
    w = world()
    first = w.add("a", gpus=0)
    second = w.add("b", gpus=0, after=[first])
    third = w.add("c", gpus=0, after=f"{first},{second}")
    w.run(first, 100)
    assert w.api(second)["waiting_for"] == f"it comes after job {first} (running)"
    assert w.api(third)["waiting_for"] == f"it comes after job {first} (running), job {second} (pending)"
    w.end(first)
    assert (w.job(second).status, w.job(third).status) == ("running", "pending")
    w.claim(second, 101)
    w.end(second, 7)
    job = w.job(third)
    assert (job.status, job.cause, job.finished_at) == ("cancelled", "dependency", w.clock.wall)
    assert job.cause_line == f"it was to come after job {second}, which failed (exit 7)"
    late, fine = w.add("d", gpus=0, after=[third]), w.add("e", gpus=0, after=[first])
    assert (w.job(late).status, w.job(late).cause) == ("cancelled", "dependency") and third in w.job(late).cause_line
    assert w.job(fine).unmet == ()


def test_shares(world):
    w = world(gpus=2)
    ids = [w.add(gpus=gpus) for gpus in (0.5, 0.25, 0.25, 1.5)]
    w.turn()
    assert [w.job(job_id).gpu_indices for job_id in ids[:3]] == [(0,), (0,), (0,)] and w.job(ids[3]).status == "pending"
    assert w.api(ids[3])["waiting_for"].startswith("it needs 1.5 GPUs, and 1 of 2 can be had now: GPU 0 runs jobs")
    for number, job_id in enumerate(ids[:3]):
        w.claim(job_id, 100 + number)
    w.end(ids[0])
    assert w.job(ids[3]).gpu_indices == (1, 0) or w.job(ids[3]).gpu_indices == (0, 1)


def test_gpu_mem_of_all_gpus_is_what_counts(world):
    w = world()
    w.machine.shown = [makers.gpu(0), makers.gpu(1, memory_total_mib=80 * makers.GB)]
    w.probe()
    job_id = w.add(gpu_mem_mib=40 * 1024)
    w.turn()
    assert w.job(job_id).gpu_indices == (1,)
    for wrong in ({"gpu_ids": [0]}, {"gpus": 2}):
        with pytest.raises(nexus.NexusError, match="40GB of GPU memory asked for"):
            w.add(gpu_mem_mib=40 * 1024, **wrong)


# Models

LLM_CONFIG = {"default_requirement": 1.0, "models": {"qwen": 0.5, "large": 2}}
LLMS = [  # reason, what is asked, the GPUs it gets
    ("by --llm", {"llm": "qwen"}, 0.5), ("in the command", {"command": "python a.py --llm qwen"}, 0.5),
    ("with =", {"command": "python a.py --llm=large -v"}, 2), ("one that is not named", {"llm": "other"}, 1),
    ("GPUs are said", {"llm": "qwen", "gpus": 1}, 1), ("--llm goes before the command", {"llm": "large", "command": "a --llm qwen"}, 2),
    ("no model", {}, 1),
]


@pytest.mark.parametrize("reason, job, gpus", LLMS, ids=[case[0] for case in LLMS])
def test_llm_shares(world, tmp_path, reason, job, gpus):
    (tmp_path / "llm.json").write_text(json.dumps(LLM_CONFIG))
    w = world(llm_config=str(tmp_path / "llm.json"))
    assert w.job(submit(w, job).ids[0]).gpus == gpus


def test_llm_shares_are_read_anew_and_faults_are_told(world, tmp_path):
    path = tmp_path / "llm.json"
    w = world(llm_config=str(path))
    for text, says in ((None, "is not there"), ("{", "llm.json"), ("[]", "default_requirement"), ('{"models": {"qwen": 0.333}}',
        "qwen: gpus must be"),
                       ('{"modles": {}}', "models"), ('{"default_requirement": "x"}', "default_requirement: gpus must be")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(nexus.NexusError, match=says) as refused:
            submit(w, {"llm": "qwen"})
        assert refused.value.kind == "usage"
    path.write_text(json.dumps(LLM_CONFIG))
    assert w.job(submit(w, {"llm": "qwen"}).ids[0]).gpus == 0.5
    path.write_text('{"models": {"qwen": 0.25}}')
    assert w.job(submit(w, {"llm": "qwen"}).ids[0]).gpus == 0.25


# Attempts

def fail(w, job_id, pid, code=1, stderr="", seconds=60.0):
    """Let a job that is about to start fail after so long."""
    w.claim(job_id, pid)
    with open(w.folder_of(job_id) / "stderr.log", "a") as file:
        file.write(stderr)
    w.clock.pass_(seconds)
    w.probe()
    w.write_result(job_id, code)
    w.machine.processes.alive.pop(pid)
    w.turn(f"end {job_id} {w.job(job_id).attempt} {code} {int(seconds * 100)}")
    w.turn()


def test_retries_with_backoff(world):
    w = world(retry_backoff_seconds=5)
    job_id = w.add(retries=2)
    w.turn()
    fail(w, job_id, 100, 1, "first\n")
    job = w.job(job_id)
    assert (job.status, job.retry_at, job.gpu_indices, job.pid) == ("pending", w.clock.wall + 5, (), None)
    assert w.api(job_id)["waiting_for"] == "attempt 1 failed (exit); it is tried again in 5s"
    assert any(f"Job {job_id} failed on GPU 0: exit, exit code 1; it is tried again in 5s" in line for line in w.lines), w.lines
    w.turn(seconds=4.9)
    assert w.job(job_id).status == "pending"
    w.turn(seconds=0.2)
    assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", 2)
    fail(w, job_id, 101, 2, "second\n")
    assert w.job(job_id).retry_at == w.clock.wall + 10
    w.turn(seconds=10.1)
    fail(w, job_id, 102, 3, "third\n")
    job = w.job(job_id)
    assert (job.status, job.exit_code, job.cause_line, job.attempt) == ("failed", 3, "third", 3)
    assert [(attempt["attempt"], attempt["exit_code"], attempt["cause"]) for attempt in w.api(job_id)["attempts"]][:2] == [(1, 1,
        "exit"), (2, 2, "exit")]


def test_retry_survives_a_crash_and_a_clock_set_back(world):
    w = world()
    job_id = w.add(retries=1)
    w.turn()
    fail(w, job_id, 100)
    w.crash()
    w.turn()
    assert w.job(job_id).status == "pending"
    w.clock.wall -= 86400                               # or else it would wait for a day
    w.turn()
    assert w.job(job_id).attempt == 2


@pytest.mark.parametrize("status", ["completed", "killed"])
def test_no_retry_of_what_did_not_fail(world, status):
    w = world()
    job_id = w.run(w.add(retries=3), 100)
    if status == "killed":
        w.service.cancel(job_id, ANN, ("running",))
    w.end(job_id, 0 if status == "completed" else 143)
    assert w.job(job_id).status == ("completed" if status == "completed" else "cancelled")


def test_out_of_gpu_memory_is_tried_alone_on_the_emptiest(world):
    w = world(gpus=3)
    w.machine.shown = [makers.gpu(0, memory_used_mib=3000.0), makers.gpu(1, memory_used_mib=100.0), makers.gpu(2, memory_used_mib=2000.0)]
    w.probe()
    job_id = w.add(gpus=0.5, retries=1, gpu_ids=[0, 1, 2])
    w.turn()
    fail(w, job_id, 100, 1, "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nbye\n")
    job = w.job(job_id)
    assert job.status == "pending" and job.is_alone and nexus.read_attempts(job)[0]["cause"] == "cuda-oom"
    w.probe()
    w.turn(seconds=6)
    assert w.job(job_id).gpu_indices == (1,)
    other = w.add(gpus=0.5, gpu_ids=[1])
    w.turn()
    assert w.job(other).status == "pending", "it is alone there"
    fail(w, job_id, 101, 1, "something else\n")
    assert (w.job(job_id).cause, w.job(job_id).cause_line) == ("exit", "something else"), "what the first attempt wrote is not this one's"


LAUNCHES = [  # reason, what the machine answers, attempts it gets of 3
    ("a program that is not there", FileNotFoundError(2, "No such file or directory", "screen"), 1),
    ("a full disk", OSError(28, "No space left on device", "/logs"), 1),
    ("something odd", OSError(71, "Protocol error", "/logs"), 3), ("no permission", PermissionError(13, "Permission denied", "/logs"), 3),
    ("screen ends before it begins", None, 3),
]


@pytest.mark.parametrize("reason, error, attempts", LAUNCHES, ids=[case[0] for case in LAUNCHES])
def test_launch_attempts(world, reason, error, attempts):
    w = world(launch_attempts=3, retry_backoff_seconds=5)
    w.machine.refusal = error
    job_id = w.add()
    waits = []
    for _ in range(3):
        w.turn()
        if error is None and w.job(job_id).status == "running":
            w.machine.gone = [job_id]
            w.turn(seconds=1)
        w.turn()
        if w.job(job_id).status == "pending":
            waits.append(w.job(job_id).retry_at - w.clock.wall)
            w.clock.pass_(waits[-1] + 0.1)
            w.probe()
            w.turn()
            if error is None:
                continue
    if w.job(job_id).status == "running":
        w.machine.gone = [job_id]
        w.turn(seconds=1)
        w.turn()
    job = w.job(job_id)
    assert (job.status, job.cause, job.attempt) == ("failed", "launch", attempts) and waits == [5, 10][:attempts - 1]
    assert not w.claim(job_id, 100) and [attempt["cause"] for attempt in nexus.read_attempts(job)] == ["launch"] * (attempts - 1)


def test_a_launch_that_comes_to_something_later_and_costs_no_retry(world):
    w = world(launch_attempts=2)
    w.machine.refusal = OSError(71, "Protocol error", "/logs")
    job_id = w.add(retries=1)
    w.turn()
    w.turn()
    assert "attempt 1 failed (launch)" in w.api(job_id)["waiting_for"]
    w.machine.refusal = None
    w.turn(seconds=6)
    fail(w, job_id, 100, 1)
    assert w.job(job_id).status == "pending", "its own retry is left"
    w.turn(seconds=6)
    fail(w, job_id, 101, 2)
    assert (w.job(job_id).status, w.job(job_id).exit_code, w.job(job_id).attempt) == ("failed", 2, 3)


# Run again

def test_retry_brings_along_what_was_cancelled_for_it(world):
    w = world(gpus=0, cpu_slots=9)
    good, bad = w.add("good", gpus=0), w.add("bad", gpus=0, name="b", retries=0, group="g", env={"A": "1"})
    child = w.add("child", gpus=0, after=[bad, good])
    grandchild = w.add("grandchild", gpus=0, after=[child])
    other = w.add("other", gpus=0, after=[good])
    w.turn()
    w.claim(good, 100)
    w.end(good)
    fail(w, bad, 101, 1, seconds=60)
    assert [w.job(job_id).cause for job_id in (child, grandchild)] == ["dependency"] * 2
    ids = w.service.retry(bad, ANN)
    new = [w.job(job_id) for job_id in ids]
    assert [job.command for job in new] == ["bad", "child", "grandchild"] and other not in ids
    assert [job.after for job in new] == [(), (ids[0], good), (ids[1],)] and [job.unmet for job in new] == [(), (ids[0],), (ids[1],)]
    assert (new[0].name, new[0].group, new[0].env_digest, new[0].environment) == ("b", "g", w.job(bad).env_digest, w.job(bad).environment)
    assert any(f"again as {bad} was, with 2 jobs that came after it" in line for line in w.lines)
    w.turn()
    w.claim(ids[0], 102)
    w.end(ids[0])
    assert w.job(ids[1]).status == "running" and w.job(bad).status == "failed"


def test_retry_leaves_what_waits_for_another_that_failed(world):
    w = world(gpus=0, cpu_slots=9)
    one, two = w.add("one", gpus=0), w.add("two", gpus=0)
    w.add("both", gpus=0, after=[one, two])
    w.turn()
    fail(w, one, 100, seconds=1)
    fail(w, two, 101, seconds=1)
    assert len(w.service.retry(one, ANN)) == 1


def test_retries_of_all_that_failed_bring_along_what_waits_for_them_together(world):
    w = world(gpus=0, cpu_slots=9)
    one, two = w.add("one", gpus=0), w.add("two", gpus=0)
    w.add("both", gpus=0, after=[one, two])
    w.turn()
    fail(w, one, 100, seconds=1)
    fail(w, two, 101, seconds=1)
    [again] = w.service.retry(one, ANN)
    second, both = w.service.retry(two, ANN)
    assert w.job(both).after == (again, second) and w.job(one).retried_as == again
    assert len(w.service.retry(two, ANN)) == 1, "what was brought along once is not again"


def test_a_retry_still_comes_after_what_may_complete(world):
    w = world(gpus=0, cpu_slots=1)
    lives, dies = w.add("lives", gpus=0), w.add("dies", gpus=0)
    child = w.add("child", gpus=0, after=[dies, lives])
    w.service.cancel(dies, ANN, ("pending",))
    [again] = w.service.retry(child, ANN)
    assert (w.job(again).after, w.job(again).unmet) == ((lives,), (lives,))


def test_what_is_added_anew_with_unique_stands_for_what_failed(world):
    w = world()
    job_id = w.add("python a.py")
    w.turn()
    fail(w, job_id, 100)
    [again] = submit(w, {"command": "python a.py", "cwd": "/", "unique": True}).ids
    assert again != job_id and w.job(job_id).retried_as == again


def test_retry_of_too_many_for_the_queue_adds_none(world):
    w = world(gpus=0, queue_limit=2, cpu_slots=1)
    bad = w.add("bad", gpus=0)
    w.turn()
    child = w.add("child", gpus=0, after=[bad])
    fail(w, bad, 100)
    assert w.job(child).cause == "dependency"
    w.service.set_paused(True, "ann")
    w.add("waits", gpus=0)
    with pytest.raises(nexus.NexusError, match="queue is full"):
        w.service.retry(bad, ANN)
    assert len(w.store.read(lambda state: state.jobs)) == 3
    with pytest.raises(nexus.NexusError, match="only a finished one"):
        w.service.retry(w.store.read(lambda state: state.order[0][1]), ANN)


# Groups

def test_a_group_is_held_and_resumed(world):
    w = world(gpus=0, cpu_slots=9)
    with pytest.raises(nexus.NexusError, match="no job of group 'sweeep'"):
        w.service.set_group_held("sweeep", True, "ann")
    inside, outside = w.add("a", gpus=0, group="sweep"), w.add("a", gpus=0, group="other")
    w.service.set_group_held("sweep", True, "ann")
    w.turn()
    assert (w.job(inside).status, w.job(outside).status) == ("pending", "running")
    assert w.api(inside)["waiting_for"] == "group sweep is held: paused by ann (nexus resume --group sweep)"
    assert any("group sweep is held" in hint for hint in w.service.status()["hints"])
    w.crash()
    w.turn()
    assert w.job(inside).status == "pending"
    w.service.set_group_held("sweep", False, "ann")
    w.turn()
    assert w.job(inside).status == "running" and not any("held" in hint for hint in w.service.status()["hints"])


def test_max_concurrent(world):
    w = world(gpus=0, cpu_slots=9)
    ids = [w.add("a", gpus=0, group="g", max_concurrent=2) for _ in range(4)]
    w.turn()
    assert [w.job(job_id).status for job_id in ids] == ["running"] * 2 + ["pending"] * 2
    assert w.api(ids[2])["waiting_for"] == "2 jobs of group g run, as many as its --max-concurrent allows"
    w.add("a", gpus=0, group="g", max_concurrent=3)     # from now on
    w.turn()
    assert [w.job(job_id).status for job_id in ids] == ["running"] * 3 + ["pending"]


GROUP_ENDS = [  # reason, (exit code, seconds) of the first jobs, whether the group is held then
    ("three that fail soon", [(1, 1), (2, 9), (1, 1)], True), ("two", [(1, 1), (1, 1)], False),
    ("one of the first was well", [(1, 1), (0, 1), (1, 1), (1, 1), (1, 1)], False),
    ("one of the first ran long", [(1, 1), (1, 11), (1, 1), (1, 1)], False),
    ("the later ones", [(0, 60), (1, 1), (1, 1), (1, 1)], False),
]


@pytest.mark.parametrize("reason, ends, is_held", GROUP_ENDS, ids=[case[0] for case in GROUP_ENDS])
def test_a_group_whose_first_jobs_fail_soon_is_held(world, reason, ends, is_held):
    w = world(gpus=0, cpu_slots=1, guard_seconds=10)
    ids = [w.add(f"a {number}", gpus=0, group="g") for number in range(len(ends) + 2)]
    w.turn()
    for number, ((code, seconds), job_id) in enumerate(zip(ends, ids)):
        fail(w, job_id, 100 + number, code, f"no module {number}\n", seconds)
    group = w.store.read(lambda state: state.groups["g"])
    assert bool(group.hold) == is_held and w.job(ids[-1]).status == "pending" and (w.job(ids[-2]).status == "running") != is_held
    if is_held:
        assert "no module 2" in group.hold and "nexus resume --group g" in group.hold and group.hold in w.api(ids[-1])["waiting_for"]
        w.service.set_group_held("g", False, "ann")
        w.turn()
        assert w.job(ids[-2]).status == "running"


# GPUs that are bad

def on_gpu(w, index, command, code, pid, seconds=1):
    job_id = w.add(f"./program --letter {command}", gpu_ids=[index])
    w.turn()
    assert w.job(job_id).gpu_indices == (index,), w.api(job_id)
    fail(w, job_id, pid, code, "CUDA error\n", seconds)


GUARDS = [  # reason, GPUs, (GPU, command, exit code, seconds) one after the other, the GPUs paused
    ("others run elsewhere", 2, [(0, "a", 1, 1), (1, "a", 0, 60), (0, "b", 1, 1), (0, "c", 1, 1)], [0]),
    ("nothing runs elsewhere", 2, [(0, "a", 1, 1), (0, "b", 1, 1), (0, "c", 1, 1)], []),
    ("one command, with a fault of its own", 2, [(0, "a", 1, 1), (1, "b", 0, 60), (0, "a", 1, 1), (0, "a", 1, 1)], []),
    ("one was well", 2, [(0, "a", 1, 1), (1, "a", 0, 60), (0, "b", 1, 1), (0, "d", 0, 1), (0, "c", 1, 1)], []),
    ("they ran for long", 2, [(0, "a", 1, 11), (1, "a", 0, 60), (0, "b", 1, 11), (0, "c", 1, 11)], []),
    ("the last one", 1, [(0, "a", 1, 1), (0, "b", 1, 1), (0, "c", 1, 1)], []),
    ("it fails elsewhere too", 2, [(0, "a", 1, 1), (1, "a", 1, 1), (1, "d", 0, 9), (0, "b", 1, 1), (0, "b", 1, 1)], []),
]


@pytest.mark.parametrize("reason, gpus, ends, paused", GUARDS, ids=[case[0] for case in GUARDS])
def test_a_gpu_on_which_jobs_fail_is_paused(world, reason, gpus, ends, paused):
    w = world(gpus=gpus, guard_failures=3, guard_seconds=10)
    for number, (index, command, code, seconds) in enumerate(ends):
        on_gpu(w, index, command, code, 100 + number, seconds)
    assert [gpu["index"] for gpu in w.service.status()["gpu_status"] if gpu["is_paused"]] == paused
    if paused:
        assert any("GPU 0 is paused: 3 jobs" in line and "nexus resume 0" in line for line in w.lines)
        w.crash()
        waits = w.add(gpu_ids=[0])
        w.turn()
        assert "GPU 0 is paused" in w.api(waits)["waiting_for"] and "3 jobs" in w.api(waits)["waiting_for"]
        w.service.set_gpu_paused(0, False, "ann")
        w.turn()
        assert w.job(waits).gpu_indices == (0,) and w.store.read(lambda state: state.pause_reasons) == ()


def test_the_last_usable_gpu_is_never_paused(world):
    w = world(gpus=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    w.service.set_gpu_paused(1, True, "ann")
    on_gpu(w, 0, "b", 1, 102)
    on_gpu(w, 0, "c", 1, 103)
    assert [gpu["is_paused"] for gpu in w.service.status()["gpu_status"]] == [False, True]


def test_a_resumed_gpu_begins_anew(world):
    w = world(gpus=2, guard_failures=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    on_gpu(w, 0, "b", 1, 102)
    assert w.service.status()["gpu_status"][0]["is_paused"]
    w.service.set_gpu_paused(0, False, "ann")
    on_gpu(w, 1, "b", 0, 103, 60)
    on_gpu(w, 0, "c", 1, 104)
    assert not w.service.status()["gpu_status"][0]["is_paused"]


def test_many_jobs_with_one_typo_pause_no_gpu(world):
    w = world(gpus=2)
    for number in range(24):
        on_gpu(w, number % 2, f"python train.py --sede {number}", 2, 100 + number)
    on_gpu(w, 1, "python other.py", 0, 200, 60)
    on_gpu(w, 0, "python train.py --sede 99", 2, 201)
    assert not any(gpu["is_paused"] for gpu in w.service.status()["gpu_status"])


# Limits

TIMES = [  # reason, configuration, the job, seconds it may run, words of the cause line
    ("its own", {}, {"timeout_seconds": 20}, 20, "its time limit is 20s"),
    ("the configured", {"timeout_seconds": 30}, {}, 30, "timeout_seconds is 30s"),
    ("twice what was expected", {}, {"expected_time": 10}, 20, "timeout_multiplier"),
    ("its own before what was expected", {}, {"expected_time": 10, "timeout_seconds": 40}, 40, "its time limit is 40s"),
    ("none of its own", {"timeout_seconds": 30}, {"timeout_seconds": 0}, None, ""),
]


@pytest.mark.parametrize("reason, config, job, limit_s, words", TIMES, ids=[case[0] for case in TIMES])
def test_time_limits(world, reason, config, job, limit_s, words):
    w = world(**config)
    job_id = w.add(**job)
    w.turn()
    w.claim(job_id, int(w.clock.ticks * 10))            # FakeProcesses: it began now
    pid = w.job(job_id).pid
    w.machine.processes.start(7, job_id)
    for _ in range((limit_s or 100) - 1):
        w.turn(seconds=1)
    assert not w.machine.processes.signals
    w.turn(seconds=1.5)
    w.turn()
    if limit_s is None:
        assert not w.machine.processes.signals
        return
    assert (7, 15) in w.machine.processes.signals
    w.machine.processes.alive.pop(pid)
    w.write_result(job_id, 143)
    w.turn(f"end {job_id} 1 143 2000")
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.cause) == ("failed", "timeout") and words in job.cause_line


def time_out(w, job_id, pid):
    """A running job is told to end, since its time is up."""
    w.claim(job_id, pid)
    w.machine.processes.start(7, job_id)
    for _ in range(4):
        w.turn(seconds=1.1)
    assert w.job(job_id).stop_cause == "timeout"


def test_a_kill_counts_while_the_time_limit_ends_it(world):
    w = world()
    job_id = w.add(retries=2, timeout_seconds=2)
    w.turn()
    time_out(w, job_id, int(w.clock.ticks * 10))
    w.service.cancel(job_id, ANN, ("running",))
    w.machine.processes.alive.clear()
    w.write_result(job_id, 143)
    w.turn(f"end {job_id} 1 143 400")
    w.turn()
    job = w.job(job_id)
    assert (job.status, job.cause, job.stop_by, job.cause_line) == ("cancelled", "killed", "ann", None)


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
    assert (w.job(job_id).status, w.job(job_id).attempt, w.job(job_id).stop_cause) == ("running", 2, None)


def run_two(world, *names):
    """A world where jobs may take 2 GB, and two that run: processes 200 and 201."""
    w = world(gpus=0, max_memory_gb=2, cpu_slots=2)
    jobs = [w.add(name, gpus=0) for name in names]
    w.turn()
    for number, job_id in enumerate(jobs):
        w.claim(job_id, 100 + number)
        w.machine.processes.start(200 + number, job_id)
    return w, *jobs


def test_host_memory(world):
    w, large, small = run_two(world, "large", "small")
    w.machine.samples.taken = {large: nexus.JobSample(2049.0, 5.0, 100.0, 2049.0), small: nexus.JobSample(2048.0, 5.0, 100.0, 2048.0)}
    w.probe()
    w.turn(seconds=1.1)
    w.turn(seconds=1.1)
    w.turn(seconds=0.1)
    assert (200, 15) in w.machine.processes.signals and (201, 15) not in w.machine.processes.signals
    w.end(large, 143)
    job = w.job(large)
    assert (job.status, job.cause, job.peak_rss_mib, job.cpu_seconds) == ("failed", "host-memory", 2049.0,
        5.0) and "max_memory_gb is 2" in job.cause_line


def test_host_memory_that_processes_share_counts_once(world):
    """16 workers of a data loader, forked, with what was loaded before: no reason to stop the job."""
    w, sharing, large = run_two(world, "sharing", "large")
    w.machine.samples.taken = {job_id: nexus.JobSample(17000.0, 5.0, 100.0, 1000.0) for job_id in (sharing, large)}
    w.machine.samples.weights = {200: 1100.0, 201: 2100.0}
    w.probe()
    w.turn(seconds=1.1)
    w.turn(seconds=1.1)
    assert not w.machine.processes.signals and w.service.scales.wanted.is_set(), "nothing is done before it is known"
    w.service.scales.weigh()
    w.turn(seconds=1.1)
    w.turn(seconds=0.1)
    assert {pid for pid, _ in w.machine.processes.signals} == {201}
    w.end(large, 143)
    assert w.job(large).cause == "host-memory" and "took 2100MB of host memory" in w.job(large).cause_line
    w.machine.samples.taken[sharing] = nexus.JobSample(2000.0, 5.0, 100.0, 1000.0)
    w.probe()
    w.turn(seconds=1.1)
    assert not w.service.scales.weights and not w.service.scales.doubtful


# What is known

def test_samples_of_a_job_are_kept_over_a_restart_and_a_retry_begins_anew(world):
    w = world()
    job_id = w.add(retries=1)
    w.turn()
    w.claim(job_id, 100)
    w.machine.processes.start(200, job_id)
    w.machine.samples.taken = {job_id: nexus.JobSample(500.0, 3.0, 50.0, 500.0)}
    for used, busy in ((4000.0, 50.0), (9000.0, 100.0), (2000.0, 30.0)):
        w.machine.shown = [makers.gpu(0, utilization=busy, memory_used_mib=used, processes=(nexus.GpuProcess(200, used),)), makers.gpu(1)]
        w.probe()
        w.turn(seconds=1)
    told = w.api(job_id)
    assert (told["peak_gpu_mem_mib"], told["mean_gpu_util"], told["peak_rss_mib"], told["cpu_seconds"]) == (9000, 60, 500, 3)
    status = w.service.status()["gpu_status"][0]
    assert status["utilization_peak"] == 100 and status["utilization_mean"] == 50      # of 0, 50, 100: up to the look before
    w.service.keep_samples()
    w.crash()
    w.machine.shown = [makers.gpu(0), makers.gpu(1)]
    w.machine.processes.alive.pop(200)
    w.end(job_id, 1)
    kept = w.job(job_id)
    assert kept.status == "pending" and (kept.peak_gpu_mem_mib or 0) in (0, 9000)


def test_estimates(world):
    w = world(gpus=1)
    first = w.add(expected_time=100)
    second, third = w.add(expected_time=50), w.add()
    fourth = w.add()
    w.turn()
    w.claim(first, 100)
    began = w.clock.wall
    w.clock.pass_(10)
    estimates = w.service.estimate()
    assert estimates == {second: began + 100, third: began + 150}, "nothing is known of what comes after one of unknown length"
    assert w.api(second)["estimated_start"] is None and w.service.describe_now(w.job(second), estimates)["estimated_start"]
    added = w.add(expected_time=1, priority=0)
    assert added not in w.service.estimate(), "a few seconds old"
    w.clock.pass_(3)
    assert w.service.estimate()[added] == began + 100 and fourth not in w.service.estimate()
    w.service.set_paused(True, "ann")
    w.clock.pass_(3)
    assert w.service.estimate() == {}, "nobody knows until when"


def test_explain(world):
    w = world(gpus=2)
    on, waits = w.add(gpus=1), w.add(gpus=2, gpu_mem_mib=1024)
    w.turn()
    small = w.add(gpus=1)
    w.turn()
    told = w.service.explain(waits, ANN)
    assert (told["id"], told["status"]) == (waits, "pending") and told["why"] == w.api(waits)["waiting_for"]
    assert told["facts"][0] == "it is first in the queue" and "it asks for 2 GPUs with 1GB free" in told["facts"][1]
    assert any("others have started before it for 0s" in fact for fact in told["facts"])
    assert [(gpu["index"], gpu["verdict"]) for gpu in told["gpus"]] == [(0, f"runs job {on}"), (1, f"runs job {small}")]
    assert w.service.explain(on, ANN)["why"] == "it runs on GPU 0" and w.service.explain(on, ANN)["gpus"] == []
    last = w.add(gpu_ids=[1])
    w.turn()
    told = w.service.explain(last, ANN)
    assert [slot["index"] for slot in told["gpus"]] == [1] and told["facts"][0] == "1 job before it in the queue"
    with pytest.raises(nexus.NexusError, match="no job 'zzz'"):
        w.service.explain("zzz", ANN)
    w.claim(on, 100)
    w.end(on, 3)
    assert w.service.explain(on, ANN)["why"] in ("exit", "it broke")


# state.json, edited by others

def edit(w, act):
    """What another program makes of state.json, and what the service makes of that; the state before it."""
    w.store.save_snapshot(is_forced=True)
    path = pathlib.Path(w.layout.state_file)
    body = json.loads(path.read_text())
    made = act(body)
    if made is None:
        path.unlink()
    else:
        path.write_text(made if isinstance(made, str) else json.dumps(made, indent=1))
    is_edited = w.service.look_for_edit()
    if is_edited:
        w.store.save_snapshot(is_forced=True)
    return is_edited


EDITS = [  # reason, what is written, (paused, paused GPUs) then
    ("paused", lambda body: {**body, "paused": True}, (True, [])),
    ("a GPU by index", lambda body: {**body, "paused_gpus": [1]}, (False, [1])),
    ("by uuid", lambda body: {**body, "paused_gpus": ["GPU-1"]}, (False, [1])), ("by index as text, and twice", lambda body: {
        **body, "paused_gpus": ["1", 1, "GPU-1"]}, (False, [1])),
    ("both", lambda body: {**body, "paused": True, "paused_gpus": [0, 1]}, (True, [0, 1])),
    ("laid out anew", lambda body: json.dumps(body, indent=4), (False, [])), ("deleted", lambda body: None, (False, [])),
    ("neither", lambda body: {**body, "paused": "yes", "paused_gpus": "0"}, (False, [])),
    ("odd items", lambda body: {**body, "paused_gpus": [None, {}, 1]}, (False, [1])),
    ("without them", lambda body: {name: body[name] for name in body if not name.startswith("paused")}, (False, [])),
    ("nothing else is taken over", lambda body: {**body, "paused": True, "jobs": [], "seq": 9999, "next_number": 0, "inventory": [],
                                                 "environments": {}, "groups": []}, (True, [])),
    ("an empty object", lambda body: {}, (False, [])),
]


@pytest.mark.parametrize("reason, act, wanted", EDITS, ids=[case[0] for case in EDITS])
def test_paused_may_be_edited(world, reason, act, wanted):
    w = world(gpus=2)
    job_id = w.run(w.add(), 100)
    waits = w.add(gpus=2)
    before = w.store.read(lambda state: (state.inventory, dict(state.environments), state.next_number))
    assert edit(w, act)
    w.turn()
    status = w.service.status()
    assert (status["is_paused"], [gpu["index"] for gpu in status["gpu_status"] if gpu["is_paused"]]) == wanted
    assert w.store.read(lambda state: (state.inventory, dict(state.environments), state.next_number)) == before
    assert w.job(job_id).pid == 100 and w.job(waits).status == "pending"
    body = json.loads(pathlib.Path(w.layout.state_file).read_text())
    assert len(body["jobs"]) == 2 and body["paused"] is wanted[0] and body["paused_gpus"] == [f"GPU-{index}" for index in wanted[1]]
    assert not w.service.look_for_edit(), "what the service wrote itself is no edit"
    w.crash()
    assert w.service.status()["is_paused"] is wanted[0] and w.job(job_id).pid == 100


def test_an_edit_unpauses_and_forgets_the_guards_reason(world):
    w = world(gpus=2, guard_failures=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    on_gpu(w, 0, "b", 1, 102)
    w.service.set_paused(True, "ann")
    assert w.store.read(lambda state: state.paused_gpus) == ("GPU-0",)
    edit(w, lambda body: {**body, "paused": False, "paused_gpus": []})
    assert w.store.read(lambda state: (state.paused, state.paused_gpus, state.pause_reasons)) == (False, (), ())


def test_only_what_was_edited_is_taken_over(world):
    """The file is older than the state: what it says of the rest was true then."""
    w = world(gpus=2)
    w.store.save_snapshot(is_forced=True)
    w.service.set_paused(True, "ann")
    path = pathlib.Path(w.layout.state_file)
    path.write_text(json.dumps({**json.loads(path.read_text()), "paused_gpus": [0]}))
    assert w.service.look_for_edit()
    assert w.store.read(lambda state: (state.paused, state.paused_gpus)) == (True, ("GPU-0",))


def test_a_half_written_edit_is_waited_for(world):
    w = world(gpus=2)
    assert not edit(w, lambda body: json.dumps({**body, "paused": True})[:40]) and not w.service.look_for_edit()
    path = pathlib.Path(w.layout.state_file)
    path.write_text('{"paused": true}')                 # now it is whole
    assert w.service.look_for_edit() and w.store.read(lambda state: state.paused)


def test_an_edit_that_stays_broken_is_written_anew(world):
    w = world(gpus=2)
    job_id = w.add()
    assert not edit(w, lambda body: "{") and not w.service.look_for_edit()
    assert w.service.look_for_edit() and any("is no JSON" in line for line in w.lines)
    w.store.save_snapshot(is_forced=True)
    assert json.loads(pathlib.Path(w.layout.state_file).read_text())["jobs"][0]["id"] == job_id
    w.crash()
    assert w.job(job_id)


DOWN = [  # reason, what is written while no service runs, (paused, paused GPUs)
    ("paused", {"paused": True}, (True, [])), ("a GPU by index", {"paused_gpus": [1]}, (False, [1])),
    ("neither", {"paused": "yes", "paused_gpus": "01"}, (False, [])),
]


@pytest.mark.parametrize("reason, facts, wanted", DOWN, ids=[case[0] for case in DOWN])
def test_an_edit_while_no_service_runs(world, reason, facts, wanted):
    w = world(gpus=2)
    job_id = w.add()
    w.store.save_snapshot(is_forced=True)
    path = pathlib.Path(w.layout.state_file)
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    w.crash()
    status = w.service.status()
    assert (status["is_paused"], [gpu["index"] for gpu in status["gpu_status"] if gpu["is_paused"]]) == wanted
    assert w.job(job_id).status == "pending"
    w.service.set_gpu_paused(0, True, "ann")
    assert w.store.read(lambda state: set(state.paused_gpus)) == {"GPU-0", *(f"GPU-{index}" for index in wanted[1])}


# The jobs file

class File:
    """A jobs file of a service."""

    def __init__(self, world, tmp_path, **config):
        self.path = tmp_path / "jobs.csv"
        self.w = world(jobs_file=str(self.path), **config)

    def write(self, *lines, end="\n", is_whole=True):
        """Write it, and have it read; return what was wrong with it."""
        self.path.write_text("\n".join(lines) + end)
        self.w.service.jobs_file.load(True)
        return self.w.service.jobs_file.faults

    @property
    def jobs(self):
        return self.w.store.read(lambda state: list(state.jobs.values()))

    def end(self, code):
        """Let what waits run and end so."""
        self.w.turn()
        for job in self.jobs:
            if job.status == "running":
                fail(self.w, job.id, 100 + job.number, code)


@pytest.fixture
def rows(world, tmp_path):
    return lambda **config: File(world, tmp_path, **config)


def test_rows_become_jobs(rows, tmp_path):
    f = rows(gpus=8)
    assert f.write("# priority,script,conda_env,arguments,allowed_gpus", "", "0,a.py,llm,--lr 1,4,5,6,7", "2,b.sh,,x,0-3",
        "low,c d.py") == []
    assert [(job.command, job.cwd, job.priority, job.conda, job.gpu_ids) for job in f.jobs] == [
        ("python a.py --lr 1", str(tmp_path), 0, "llm", (4, 5, 6, 7)), ("bash b.sh x", str(tmp_path), 2, None, (0, 1, 2, 3)),
        (f"{'python' if nexus.find_program('python') else 'python3'} 'c d.py'", str(tmp_path), 2, None, None)]
    assert any("3 jobs added from the jobs file" in line for line in f.w.lines)


def test_each_content_becomes_a_job_once(rows):
    f = rows(gpus=1)
    f.write("1,a.py,,x")
    for lines in (["1,a.py,,x"], ["# new", "0,a.py,,x,0"], ["1,a.py,,x", "1,a.py,,x"]):
        f.write(*lines)
        assert len(f.jobs) == 1
    f.write("1,a.py,,x", "1,a.py,,y")
    assert len(f.jobs) == 2
    f.w.crash()
    f.w.service.jobs_file.load(True)
    assert len(f.jobs) == 2


AGAIN = [  # reason, exit code, what the file becomes, one after the other, how many jobs there are after each
    ("a failed one stays failed", 1, [["1,a.py"], ["# x", "1,a.py"]], [1, 1]),
    ("a failed one whose line is added again", 1, [["1,a.py", "1,a.py"]], [2]),
    ("a failed one whose line is taken out and put back", 1, [[], ["1,a.py"]], [1, 2]),
    ("a completed one whose line is added again", 0, [["1,a.py", "1,a.py"]], [1]),
    ("a completed one whose line is taken out and put back", 0, [["# none"], ["1,a.py"]], [1, 1]),
]


@pytest.mark.parametrize("reason, code, files, counts", AGAIN, ids=[case[0] for case in AGAIN])
def test_a_line_that_is_added_again(rows, reason, code, files, counts):
    f = rows(gpus=1)
    f.write("1,a.py")
    f.end(code)
    made = []
    for lines in files:
        f.write(*lines)
        made.append(len(f.jobs))
    assert made == counts


@pytest.mark.parametrize("left, is_whole", [("", True), ("1,a.py\n", False)], ids=["nothing is written yet", "not all of it"])
def test_a_jobs_file_that_is_written_anew_has_lost_no_line(rows, left, is_whole):
    f = rows(gpus=1)
    f.write("1,a.py", "1,b.py")
    f.end(1)
    f.end(1)
    f.path.write_text(left)
    f.w.service.jobs_file.load(is_whole)
    f.write("1,a.py", "1,b.py")
    assert len(f.jobs) == 2


BAD_ROWS = [  # reason, configuration, the line, what is said of it
    ("no such GPU", {}, "1,bad.py,,x,7", "there is no GPU 7"), ("no priority", {}, "urgent,bad.py", "priority"),
    ("no script", {}, "1,", "not like"),
    ("an odd list of GPUs", {}, "1,bad.py,,x,a-b", "double quotes"),
    ("not allowed", {"allowed_script_paths": ["/jobs"]}, "1,bad.py", "not below /jobs"),
    ("an option for an environment", {}, "1,bad.py,-n", "conda"), ("a quote", {}, '1,"bad.py', "quotes"),
]


@pytest.mark.parametrize("reason, config, line, says", BAD_ROWS, ids=[case[0] for case in BAD_ROWS])
def test_a_bad_row_is_told_and_the_others_load(rows, reason, config, line, says):
    f = rows(**config)
    faults = f.write("1,/jobs/a.py", line, "1,/jobs/b.py")
    assert len(faults) == 1 and faults[0].startswith("line 2") and says in faults[0] and ("bad.py" in faults[0] or "1," in faults[0])
    assert [job.command.split("/")[-1] for job in f.jobs] == ["a.py", "b.py"]
    said = len([one for one in f.w.lines if says in one])
    assert said == 1 and f.write("1,/jobs/a.py", line, "1,/jobs/b.py") == faults
    assert len([one for one in f.w.lines if says in one]) == said, "told once"
    check = next(check for check in f.w.service.health()["checks"] if check["name"] == "jobs file")
    assert check["is_ok"] and says in check["reading"] and any(says in hint for hint in f.w.service.status()["hints"])
    assert f.write("1,/jobs/a.py", "1,/jobs/b.py") == [] and f.w.service.health()["is_healthy"] and len(f.jobs) == 2


def test_a_half_written_last_line_waits_for_its_newline(rows):
    f = rows()
    assert f.write("1,a.py,,--lr 0.1", "1,b.py,,--lr 0.", end="") == [] and len(f.jobs) == 1
    f.write("1,a.py,,--lr 0.1", "1,b.py,,--lr 0.25")
    assert [job.command.split()[-1] for job in f.jobs] == ["0.1", "0.25"]


def test_rows_wait_for_room_in_the_queue(rows):
    f = rows(gpus=1, queue_limit=2)
    f.w.service.set_paused(True, "ann")
    faults = f.write(*(f"1,{name}.py" for name in "abcd"))
    assert len(f.jobs) == 2 and [fault.startswith(f"line {line}: the queue is full") for line, fault in zip((3, 4), faults)] == [True, True]
    f.w.service.cancel(f.jobs[0].id, ANN, ("pending",))
    assert len(f.write(*(f"1,{name}.py" for name in "abcd"))) == 1
    assert [job.command.split()[-1] for job in f.jobs if job.status == "pending"] == ["b.py", "c.py"]


def test_a_jobs_file_that_is_not_there_is_told_and_takes_nothing_back(rows):
    f = rows(gpus=1)
    f.write("1,a.py")
    f.end(1)
    f.path.unlink()
    f.w.service.jobs_file.load(True)
    assert "there is no file" in f.w.service.jobs_file.faults[0] and not f.w.service.health()["is_healthy"]
    f.write("1,a.py")
    assert len(f.jobs) == 1 and f.w.service.jobs_file.faults == []


def test_the_jobs_file_is_read_when_it_changes_and_at_intervals(rows, monkeypatch):
    f = rows(gpus=1, jobs_file_interval_seconds=30)
    looks = []
    monkeypatch.setattr(f.w.service.jobs_file, "load", lambda is_whole: looks.append((f.w.clock.ticks, is_whole)))

    def sleep(seconds):
        f.w.clock.pass_(seconds)
        if f.w.clock.ticks == 1010:
            f.path.write_text("1,a.py\n")
        f.w.service.is_stopping = f.w.clock.ticks >= 1045
    monkeypatch.setattr(f.w.clock, "sleep", sleep)
    f.w.service.jobs_file.run()
    assert looks == [(1000, True), (1010, False), (1040, True)]


CUDA = [  # reason, cuda_arg, arguments, what runs, whether its GPUs are narrowed
    ("replaced where it stands", "replace", "--cuda 9 -v", "--cuda 1 -v", False), ("a row without", "replace", "-v", "-v", True),
    ("added to every row", "add", "-v", "-v --cuda 1", False), ("added: it stands there", "add", "--cuda 9 -v", "--cuda 1 -v", False),
]


@pytest.mark.parametrize("reason, cuda_arg, arguments, ran, is_narrowed", CUDA, ids=[case[0] for case in CUDA])
def test_cuda_arg_of_rows(rows, reason, cuda_arg, arguments, ran, is_narrowed):
    f = rows(gpus=2, cuda_arg=cuda_arg)
    f.write(f"1,a.py,,{arguments},1")
    f.w.turn()
    script = (f.w.folder_of(f.jobs[0].id) / "job.sh").read_text()
    assert f"a.py {ran}'" in script and ("CUDA_VISIBLE_DEVICES=1" in script) == is_narrowed


# Hooks

class Hooked:
    """The hooks of a service in their thread; what they would run comes to `calls`."""

    def __init__(self, w, monkeypatch):
        self.w, self.calls, self.answer = w, queue.Queue(), nexus.Completed(0, "")
        is_on, read = threading.Event(), w.store.events.read

        def run(argv, timeout_s, environ=None):
            self.calls.put((argv, timeout_s, environ))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        def read_events(since, timeout_s):
            is_on.set()
            return read(since, timeout_s)
        monkeypatch.setattr(nexus, "run", run)
        monkeypatch.setattr(w.store.events, "read", read_events)
        self.thread = threading.Thread(target=nexus.Hooks(w.service).run, daemon=True)
        self.thread.start()
        assert is_on.wait(60)

    def next(self):
        """The next command, and its variables."""
        argv, timeout_s, environ = self.calls.get(timeout=60)
        assert argv[:2] == ["/bin/sh", "-c"] and timeout_s == nexus.HOOK_TIMEOUT_S and environ["PATH"] == "/usr/bin"
        return argv[2], {name: text for name, text in environ.items() if name.startswith("NEXUS_")}

    def end(self):
        self.w.service.is_stopping = True
        self.w.store.events.publish([("queue", {})])
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def hooked(monkeypatch):
    made = []

    def start(w):
        made.append(Hooked(w, monkeypatch))
        return made[-1]

    yield start
    for one in made:
        one.end()


def test_on_finish(world, hooked):
    w = world(gpus=2, on_finish="notify me")
    hooks = hooked(w)
    job_id, removed = w.add("python a.py; exit 3", gpus=2), w.add()
    w.turn()
    w.claim(job_id, 100)
    w.service.cancel(removed, ANN, ("pending",))
    assert hooks.next() == ("notify me", {"NEXUS_JOB_ID": removed, "NEXUS_JOB_STATUS": "cancelled", "NEXUS_JOB_CAUSE": "killed",
                                          "NEXUS_JOB_EXIT_CODE": "", "NEXUS_JOB_COMMAND": "python train.py", "NEXUS_JOB_GPU": ""})
    w.end(job_id, 3)
    assert hooks.next()[1] == {"NEXUS_JOB_ID": job_id, "NEXUS_JOB_STATUS": "failed", "NEXUS_JOB_CAUSE": "exit", "NEXUS_JOB_EXIT_CODE": "3",
                               "NEXUS_JOB_COMMAND": "python a.py; exit 3", "NEXUS_JOB_GPU": "0,1"}
    assert hooks.calls.empty(), "each once, and not for starts"


def test_on_finish_of_a_job_that_is_no_longer_kept(world, hooked):
    w = world(gpus=2, on_finish="notify me", history_limit=1)
    ids = [w.add() for _ in range(3)]
    hooks = hooked(w)
    for job_id in ids:
        w.service.cancel(job_id, ANN, ("pending",))
    w.turn()
    assert [hooks.next()[1]["NEXUS_JOB_ID"] for _ in ids] == ids


def test_on_finish_for_what_ended_unheard(world, hooked):
    """Before its thread looked, or while the service was down; not for what ended before it was configured."""
    w = world(gpus=2)
    early = w.add(gpus=2)
    w.turn()
    w.claim(early, 100)
    w.end(early)
    w.service.config = nexus.replace(w.service.config, hooks=nexus.HooksConfig("", "notify me"))
    w.clock.pass_(1)
    hooks = hooked(w)
    one, two = w.add(), w.add()
    w.service.cancel(one, ANN, ("pending",))
    assert hooks.next()[1]["NEXUS_JOB_ID"] == one
    live.until(lambda: w.job(one).is_told)
    hooks.end()
    w.service.is_stopping = False
    w.service.cancel(two, ANN, ("pending",))
    hooks = hooked(w)
    assert hooks.next()[1]["NEXUS_JOB_ID"] == two
    live.until(lambda: w.job(two).is_told)
    assert hooks.calls.empty() and not w.job(early).is_told


HOOK_FAULTS = [  # reason, what becomes of the command, what the log says
    ("an exit code", nexus.Completed(7, "no route\nto host\n"), "on_finish: exit code 7: no route"),
    ("too long", TimeoutError("/bin/sh had to be ended after 60 s"), "on_finish: /bin/sh had to be ended"),
    ("not to be ended", nexus.StillRunning(None), "on_finish: it cannot be ended"),
    ("no sh", FileNotFoundError(2, "No such file"), "No such file"),
]


@pytest.mark.parametrize("reason, answer, says", HOOK_FAULTS, ids=[case[0] for case in HOOK_FAULTS])
def test_a_hook_that_fails_is_logged_and_changes_nothing(world, hooked, reason, answer, says):
    w = world(gpus=0, on_finish="notify", cpu_slots=2)
    hooks = hooked(w)
    hooks.answer = answer
    for _ in range(2):
        job_id = w.add("true", gpus=0)
        w.service.cancel(job_id, ANN, ("pending",))
        assert hooks.next()[1]["NEXUS_JOB_ID"] == job_id
    hooks.end()
    assert len([line for line in w.lines if says in line]) == 2 and w.service.failure_count == 0


def test_no_hook_for_each_job_without_on_finish(world, hooked):
    w = world(gpus=0)
    hooks = hooked(w)
    w.service.cancel(w.add("true", gpus=0), ANN, ("pending",))
    hooks.end()
    assert hooks.calls.empty()


def test_on_unhealthy_when_health_turns(world, monkeypatch):
    w = world(gpus=1, on_unhealthy="page me")
    calls = []
    monkeypatch.setattr(nexus, "run", lambda argv, timeout_s, environ=None: (calls.append(environ), nexus.Completed(0, ""))[1])
    hooks = nexus.Hooks(w.service)
    w.turn()
    hooks.look_at_health()
    assert calls == [], "well from the start"
    w.machine.shown = nexus.NexusError("unavailable", "nvidia-smi is broken")
    w.probe()
    for _ in range(3):
        hooks.look_at_health()
    assert [(call["NEXUS_HEALTH"], call["NEXUS_HEALTH_REASON"]) for call in calls] == [("UNHEALTHY", "GPUs: nvidia-smi is broken")]
    w.machine.shown = [makers.gpu(0)]
    w.probe()
    hooks.look_at_health()
    hooks.look_at_health()
    assert [(call["NEXUS_HEALTH"], call["NEXUS_HEALTH_REASON"]) for call in calls[1:]] == [("HEALTHY", "")]


# With Slurm.  tests/test_slurm.py has a real one; here it does what a real one does seldom.

class FakeSlurm:
    """What Slurm has: {id: SlurmJob}.  `answer` is called at each sbatch, and raises, or returns words of refusal."""

    def __init__(self, world):
        self.world, self.service_id, self.jobs, self.next_id = world, world.store.service_id, {}, 1
        self.has_accounts, self.accounts, self.cancelled, self.submitted, self.is_down = False, {}, [], [], False
        self.began_at = 0.0
        self.answer = lambda tasks: ""

    def submit(self, argv):
        options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
        tasks = nexus.parse_indices(options["array"]) if "array" in options else ()
        words = self.answer(tasks)
        self.submitted.append(options.get("array", options["job-name"]))
        if words:
            return None, words
        slurm_id, token = str(self.next_id), options["comment"].rpartition(":")[2]
        self.next_id += 1
        for task in tasks or ("",):
            tail = f"_{task}" if task else ""
            one = nexus.SlurmJob(slurm_id + tail, "PENDING", "Resources", key=token + tail)
            self.jobs[one.id] = one
        return slurm_id, ""

    def query_jobs(self):
        if self.is_down:
            raise nexus.NexusError("unavailable", "Slurm does not answer: down")
        return list(self.jobs.values())

    def query_accounts(self, ids):
        return [self.accounts[slurm_id] for slurm_id in ids if slurm_id in self.accounts]

    def query_settings(self):
        began_at = nexus.format_time(self.began_at)[:-1]
        return {"MaxArraySize": "1001", "NEXT_JOB_ID": str(self.next_id), "ClusterName": "nx", "BOOT_TIME": began_at}

    def query_nodes(self):
        return [], [nexus.SlurmNode("n1", "idle", 8, 0, ("main",), "")]

    def cancel(self, ids):
        self.cancelled += ids
        return ""

    def set(self, slurm_id, state, **fields):
        fields = {"nodes": "n1", "started_at": self.world.clock.wall, "ended_at": self.world.clock.wall, **fields}
        self.jobs[slurm_id] = nexus.replace(self.jobs[slurm_id], state=state, **fields)


@pytest.fixture
def cluster(world):
    """A world with a Slurm; go(): a while passes, in which everything is asked and told that is to be."""
    w = world(launcher="slurm")
    w.slurm = FakeSlurm(w)

    def take_slurm():
        w.slurm.service_id, w.service.cluster.slurm = w.store.service_id, w.slurm

    def go(turns=6, seconds=6.0):
        for _ in range(turns):
            w.clock.pass_(seconds / turns)
            w.service.cluster.look_at = 0.0
            w.service.cluster.step()
            while w.service.cluster.handings:
                w.service.cluster.step()
            w.turn()

    def crash():
        World.crash(w)
        take_slurm()

    w.go, w.crash = go, crash
    take_slurm()
    go(1)
    return w


def result_of(w, job_id, code):
    w.folder_of(job_id).mkdir(exist_ok=True)
    (w.folder_of(job_id) / f"attempt-{w.job(job_id).attempt}").write_text("77 770\n")
    w.write_result(job_id, code)


def test_slurm_jobs_are_handed_over_run_and_end(cluster):
    w, job_id = cluster, cluster.add()
    w.go()
    assert w.slurm.submitted == [f"nexus_{job_id}"] and w.job(job_id).slurm_id == "1" and w.job(job_id).status == "pending"
    assert w.api(job_id)["waiting_for"] == "Slurm has it as 1: Resources (what it asks for is in use)"
    w.slurm.set("1", "RUNNING")
    w.go()
    assert (w.job(job_id).status, w.api(job_id)["node"]) == ("running", "n1")
    result_of(w, job_id, 3)
    w.slurm.set("1", "COMPLETED")
    w.go()
    assert (w.job(job_id).status, w.job(job_id).exit_code, w.slurm.cancelled) == ("failed", 3, [])


@pytest.mark.parametrize("reason, has_come, attempts", [("the answer alone was lost", True, 1), ("it never came there", False, 2)])
def test_slurm_answers_nothing_to_sbatch(cluster, reason, has_come, attempts):
    w = cluster

    def fail(tasks):
        w.slurm.answer = lambda tasks: ""
        if has_come:
            w.slurm.jobs["9"] = nexus.SlurmJob("9", "PENDING", key=w.job(job_id).slurm_key)
        raise nexus.NexusError("unavailable", "Slurm does not answer: Socket timed out on send/recv operation")

    w.slurm.answer = fail
    job_id = w.add()
    w.go(12)
    assert (w.job(job_id).attempt, w.job(job_id).slurm_id) == (attempts, "9" if has_come else "1"), reason
    assert w.folder_of(job_id).joinpath("attempt-1").exists() == (not has_come), "what comes late finds its attempt taken"


def test_slurm_is_handed_what_was_intended_once(cluster):
    """The service dies after the intent, before anything is handed over; and again after."""
    w = cluster
    job_id = w.add()
    w.turn()                                                # intended, and with the thread
    assert w.job(job_id).slurm_key and not w.slurm.submitted
    w.crash()
    w.go(12)
    assert w.slurm.submitted == [f"nexus_{job_id}"] and w.job(job_id).attempt == 2
    w.crash()
    w.go(12)
    assert w.slurm.submitted == [f"nexus_{job_id}"] and w.job(job_id).slurm_id == "1"


def test_slurm_is_not_judged_by_what_it_said_before(cluster):
    w = cluster
    job_id = w.add()
    w.turn()
    w.service.cluster.look()                                # before sbatch: there is nothing
    w.service.cluster.outcomes += w.service.cluster.hand_over(w.service.cluster.handings.popleft())
    w.clock.pass_(1)
    w.turn()
    assert w.job(job_id).slurm_id == "1" and w.job(job_id).attempt == 1
    w.go()
    assert w.slurm.submitted == [f"nexus_{job_id}"]


def test_slurm_queues_a_running_job_again(cluster):
    w = cluster
    job_id = w.add(retries=1)
    w.go()
    w.slurm.set("1", "RUNNING")
    w.go()
    w.slurm.set("1", "PENDING", reason="BeginTime")
    w.go(12, seconds=4)
    assert w.job(job_id).attempts[-1][5] == "node-fail" and w.slurm.cancelled == ["1"]
    w.go(12)
    assert w.job(job_id).slurm_id == "2"


@pytest.mark.parametrize("state, patience_s", [("COMPLETED", 30), ("TIMEOUT", 1)])
def test_slurm_is_ahead_of_the_file_system(cluster, state, patience_s):
    w = cluster
    job_id = w.add()
    w.go()
    w.slurm.set("1", "RUNNING")
    w.go()
    (w.folder_of(job_id) / "attempt-1").write_text("77 770\n")
    w.slurm.set("1", state)
    w.go(seconds=patience_s)
    assert w.job(job_id).status == "running"
    result_of(w, job_id, 5)
    w.go()
    assert w.job(job_id).exit_code == 5 and w.job(job_id).cause == ("timeout" if state == "TIMEOUT" else "exit")


def test_slurm_has_what_nobody_wants_any_more(cluster):
    w = cluster
    ids = [w.add() for _ in range(3)]
    w.go()
    w.service.cancel(ids[1], ANN, (nexus.PENDING,))
    assert w.job(ids[1]).status == "cancelled" and (w.folder_of(ids[1]) / "attempt-1").read_text() == ""
    w.go()
    assert w.slurm.cancelled == ["1_2"], "once, and no other"
    w.slurm.set("1_1", "RUNNING")
    (w.folder_of(ids[0]) / "attempt-1").write_text("77 770\n")
    w.service.cancel(ids[0], ANN, (nexus.PENDING,))         # it has begun, which is not seen yet
    assert w.job(ids[0]).status == "pending" and w.job(ids[0]).stop_cause == "killed"
    w.go()
    assert w.slurm.cancelled == ["1_2", "1_1"]
    w.slurm.set("1_1", "CANCELLED")
    w.go(12, seconds=8)
    assert (w.job(ids[0]).status, w.job(ids[0]).cause) == ("cancelled", "killed")


def test_slurm_takes_only_so_many(cluster):
    w = cluster

    def limit(tasks):
        there = sum(one.state in ("PENDING", "RUNNING") for one in w.slurm.jobs.values())
        return "AssocMaxSubmitJobLimit; Job violates accounting/QOS policy" if there + max(1, len(tasks)) > 3 else ""

    w.slurm.answer = limit
    ids = [w.add() for _ in range(10)]
    w.go()
    assert len(w.slurm.jobs) == 3 and w.job(ids[2]).slurm_id and not w.job(ids[3]).slurm_key
    assert w.api(ids[9])["waiting_for"] == (
        "Slurm has 3 jobs of nexus and takes no more now: AssocMaxSubmitJobLimit; Job violates accounting/QOS policy")
    asked = len(w.slurm.submitted)
    w.go(30, seconds=30)
    assert len(w.slurm.submitted) == asked, "it is not asked again and again"
    result_of(w, ids[0], 0)
    w.slurm.set(w.job(ids[0]).slurm_id, "COMPLETED")
    w.go(12)
    assert w.job(ids[0]).status == "completed" and w.job(ids[3]).slurm_id and len(w.slurm.submitted) == asked + 1
    w.slurm.answer = lambda tasks: ""
    w.go(60, seconds=200)
    assert all(w.job(job_id).slurm_id for job_id in ids), "when it takes more, that is found out"


def test_slurm_is_down(cluster):
    w = cluster
    job_id = w.add()
    w.go()
    w.slurm.is_down = True
    w.go()
    late = w.add()
    w.go()
    assert w.api(job_id)["waiting_for"] == "Slurm has it as 1; Slurm does not answer: down"
    assert w.api(late)["waiting_for"] == "Slurm does not answer: down" and not w.job(late).slurm_key
    w.slurm.is_down = False
    w.go()
    assert w.job(late).slurm_id == "2" and w.job(late).attempt == 1


def test_slurm_has_forgotten_a_job(cluster):
    w = cluster
    waits, ran, known = (w.add(timeout_seconds=60 * number) for number in (1, 2, 3))
    tasks = [w.add(timeout_seconds=240) for _ in range(2)]
    w.go()
    for slurm_id in ("2", "3"):
        w.slurm.set(slurm_id, "RUNNING")
    w.go()
    for job_id in (ran, known):
        (w.folder_of(job_id) / "attempt-1").write_text("77 770\n")
    w.slurm.jobs.clear()
    w.slurm.accounts["3"] = nexus.SlurmJob("3", "NODE_FAIL", nodes="n1")
    w.go(12)
    assert [(w.job(job_id).status, w.job(job_id).cause) for job_id in tasks] == [("cancelled", "killed")] * 2, "such vanish when cancelled"
    assert "no longer has job 4_1" in w.job(tasks[0]).cause_line and (w.folder_of(tasks[0]) / "attempt-1").read_text() == ""
    assert (w.job(ran).cause, w.job(known).cause) == ("session-lost", "node-fail")
    assert (w.job(waits).status, w.job(waits).slurm_id) == ("pending", "5"), "when it is cancelled, squeue tells it for a while"


@pytest.mark.parametrize("count, others", [(1, 0), (1, 5), (3, 0), (3, 5)])
def test_slurmctld_crashed_and_forgot_the_latest_jobs(cluster, count, others):
    """Others have submitted since, or the forgotten ids are given to jobs of nexus's own."""
    w = cluster
    ids = [w.add() for _ in range(count)]
    w.go()
    w.slurm.jobs.clear()
    w.slurm.next_id, w.slurm.began_at = 1 + others, time.time() + 60            # job.sh is of now
    later = w.add(timeout_seconds=60)
    w.go(12)
    assert all(w.job(job_id).status == "pending" and w.job(job_id).attempt == 2 for job_id in ids)
    assert sorted(w.slurm.jobs) == sorted(w.job(job_id).slurm_id for job_id in [*ids, later]), "each is there once"
    assert w.slurm.cancelled == []


def test_slurm_has_given_the_id_of_a_forgotten_job_to_another(cluster):
    w = cluster
    lost, other = w.add(), w.add(timeout_seconds=60)
    w.go()
    w.slurm.jobs = {"1": nexus.replace(w.slurm.jobs[w.job(other).slurm_id], id="1")}
    w.service.store.update(lambda state: (yield nexus.JobChanged(other, {"slurm_id": "1"})))
    w.go()
    assert w.job(other).slurm_id == "1" and w.job(lost).attempt == 2 and w.job(lost).slurm_id == "3"


def test_slurm_job_is_killed_on_its_way(cluster):
    """Before its sbatch, and while that runs."""
    w = cluster
    ids = [w.add() for _ in range(3)]
    w.turn()                                                # intended, and with the thread
    w.service.cancel(ids[1], ANN, (nexus.PENDING,))
    assert w.job(ids[1]).status == "pending" and w.api(ids[1])["stopping"] == "killed"
    w.slurm.answer = lambda tasks: w.service.cancel(ids[2], ANN, (nexus.PENDING,)) or ""
    w.go()
    assert w.slurm.submitted == ["1,3"] and w.slurm.cancelled == ["1_3"]
    assert (w.job(ids[1]).status, w.job(ids[1]).cause) == ("cancelled", "killed")
    assert (w.folder_of(ids[1]) / "attempt-1").read_text() == "", "should it come there all the same"
    w.slurm.set("1_3", "CANCELLED", nodes="")
    w.go()
    assert w.job(ids[2]).status == "cancelled" and w.job(ids[0]).slurm_id == "1_1"


def test_slurm_is_handed_the_next_jobs_after_an_exception(cluster, monkeypatch):
    w = cluster
    job_id = w.add()
    monkeypatch.setattr(w.service.cluster, "hand_over", lambda handing: 1 / 0)
    w.turn()
    with pytest.raises(ZeroDivisionError):
        w.service.cluster.step()
    monkeypatch.undo()
    w.go(12)
    assert w.job(job_id).slurm_id == "1" and w.job(job_id).attempt == 2


def test_slurm_does_not_show_its_nodes(cluster, monkeypatch):
    """PrivateData=nodes: that is no reason not to go there."""
    w = cluster
    fail = nexus.NexusError("unavailable", "Slurm does not answer: Access/permission denied")
    monkeypatch.setattr(w.slurm, "query_nodes", lambda: (_ for _ in ()).throw(fail))
    w.service.cluster.nodes_at = float("-inf")
    job_id = w.add()
    w.go()
    assert w.job(job_id).slurm_id == "1" and not w.service.cluster.trouble
    assert sum("does not show its nodes" in line for line in w.lines) == 1


def test_slurm_accounting_does_not_answer(cluster, monkeypatch):
    w = cluster
    job_id = w.add()
    w.go()
    result_of(w, job_id, 3)
    w.slurm.jobs.clear()
    asked = []

    def fail(ids):
        asked.append(ids)
        raise nexus.NexusError("unavailable", "Slurm does not answer: Connection refused")

    monkeypatch.setattr(w.slurm, "query_accounts", fail)
    w.go(30, seconds=30)
    assert w.job(job_id).status == "pending" and 1 <= len(asked) <= 3, "it is let rest in between"
    w.go(30, seconds=60)
    assert (w.job(job_id).status, w.job(job_id).exit_code) == ("failed", 3), "its own result will do"


def test_slurm_queue_is_full(cluster):
    """sbatch waits and tries again by itself, until it is ended."""
    w = cluster
    first = w.add()
    w.go()

    def full(tasks):
        raise nexus.NexusError("unavailable", "Slurm does not answer: sbatch ran for 60 s: Slurm job queue full, sleeping and retrying")

    w.slurm.answer = full
    late = w.add(timeout_seconds=60)
    w.go(30, seconds=30)
    assert len(w.slurm.submitted) == 1 and w.job(late).attempt == 1 and w.job(first).slurm_id == "1" and not w.service.cluster.trouble
    assert "Slurm has 1 job of nexus and takes no more now" in w.api(late)["waiting_for"] and "queue full" in w.api(late)["waiting_for"]


def test_slurm_takes_arrays_of_few_tasks(cluster):
    w = cluster
    w.slurm.answer = lambda tasks: "Invalid job array specification" if len(tasks) > 2 else ""
    ids = [w.add() for _ in range(5)]
    w.go()
    assert all(w.job(job_id).slurm_id for job_id in ids)
    w.service.cluster.settings = {"MaxArraySize": "1001", "SchedulerParameters": "bf_window=1,max_array_tasks=100"}
    assert w.service.cluster.find_most_tasks() == 100


def test_slurm_has_lost_its_state(cluster):
    w = cluster
    job_id = w.add()
    w.go()
    w.slurm.jobs.clear()
    w.slurm.next_id = 1
    w.go(12)
    assert w.job(job_id).attempt == 2 and w.job(job_id).slurm_id == "1" and w.slurm.submitted == [f"nexus_{job_id}"] * 2


def test_slurm_refuses_what_this_one_asks_for(cluster):
    w = cluster
    w.slurm.answer = lambda tasks: "Requested time limit is invalid (missing or exceeds some limit)"
    job_id = w.add()
    w.go()
    job = w.job(job_id)
    assert (job.status, job.cause) == ("failed", "launch") and "Slurm refuses it: Requested time limit" in job.cause_line
    w.slurm.answer = lambda tasks: "something that nobody has heard of"
    job_id = w.add()
    w.go(40, seconds=200)
    assert w.job(job_id).status == "failed" and w.job(job_id).launch_failures == 5, "that may pass, and is tried again for a while"


def test_slurm_cannot_be_given_a_script(cluster):
    w = cluster
    job_id = w.add()
    w.folder_of(job_id).mkdir()
    os.rename(w.folder_of(job_id), w.folder / "aside")
    pathlib.Path(w.layout.log_dir).rmdir()
    pathlib.Path(w.layout.log_dir).write_text("")
    w.go()
    assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "launch") or w.job(job_id).launch_failures, w.lines
    assert not w.slurm.submitted


# Another nexus, whose node this is

HEAD = "0-12345678"


def order(job_id="abc", attempt=1, is_stopped=False, **job):
    return {"id": job_id, "attempt": attempt, "user": "ann", "is_stopped": is_stopped, "path": "/usr/bin", "code": None,
            "job": {"command": "python train.py", "cwd": "/", **job}}


def give(w, *orders, head=HEAD, **keys):
    """What the other nexus is told of its orders, by job: None, or the kind of fault."""
    asked = {"head": head, "submit": orders, "stop": [], "withdraw": [], "collected": [], **keys}
    told = w.service.take_orders(nexus.parse_orders(asked), ANN)["submitted"]
    return {job_id: fault and fault["kind"] for job_id, fault in told.items()}


def hear(w, since=None, head=HEAD, wait_s=0.0, **offsets):
    return w.service.sync(head, since, offsets, wait_s)


def test_an_order_that_is_given_twice_is_done_once(world):
    w = world()
    assert give(w, order()) == give(w, order()) == {"abc": None}
    w.run("abc", 100)
    assert give(w, order()) == {"abc": None} and w.machine.launched == [("abc", 1)]
    w.end("abc", 3)
    w.crash()
    assert give(w, order()) == {"abc": None}
    w.turn()
    assert w.machine.launched == [("abc", 1)] and w.job("abc").exit_code == 3


def test_the_next_attempt_is_another_job(world):
    w = world()
    give(w, order())
    w.run("abc", 100)
    assert give(w, order(attempt=2)) == {"abc": "unavailable"}, "the first is not over"
    (w.folder_of("abc") / "stdout.log").write_text("first\n")
    w.end("abc", 1)
    assert hear(w, abc=(1, 0, 0))["logs"] == {"abc": {"stdout": "Zmlyc3QK"}}
    assert give(w, order(attempt=2)) == {"abc": None}
    assert hear(w, abc=(2, 0, 0))["logs"] == {}, "not the first one's"
    assert w.job("abc").attempt == 0 and give(w, order(attempt=1)) == {"abc": "unavailable"}
    w.turn()
    assert w.machine.launched == [("abc", 1), ("abc", 1)] and hear(w, abc=(2, 0, 0))["logs"] == {}
    assert not list(w.folder_of("abc").parent.glob("*.old-*"))


def test_an_id_of_somebody_else(world):
    w = world()
    own = w.add()
    assert give(w, order(own)) == {own: "conflict"} and give(w, order("zzz"), head="0-87654321") == {"zzz": None}
    assert give(w, order("zzz")) == {"zzz": "conflict"} and w.job(own).head is None
    give(w, stop=[["zzz", 1], [own, 1]], withdraw=[["zzz", 1], [own, 1]])
    assert w.job("zzz").status == w.job(own).status == "pending", "they are not this one's to end"


def test_what_can_never_run_here_is_refused(world):
    w = world(gpus=1)
    told = give(w, order("aaa", cwd="/nowhere"), order("bbb", gpus=2), order("ccc", gpu_ids=[7]), order("ddd"))
    assert told == {"aaa": "usage", "bbb": "usage", "ccc": "usage", "ddd": None}
    assert w.job("aaa") is None and w.job("ddd")


def test_stop_and_withdraw(world):
    w = world(gpus=1)
    give(w, order("aaa"), order("bbb"), order("ccc"), order("ddd", is_stopped=True))
    assert (w.job("ddd").status, w.job("ddd").cause) == ("cancelled", "killed")
    w.run("aaa", 100)
    give(w, stop=[["aaa", 2], ["bbb", 1]], withdraw=[["aaa", 1], ["ccc", 1]])
    assert w.job("aaa").status == "running" and w.job("aaa").stop_cause is None, "another attempt is meant, or it runs already"
    assert (w.job("bbb").status, w.job("bbb").cause) == ("cancelled", "killed")
    assert (w.job("ccc").status, w.job("ccc").cause, w.job("ccc").cause_line) == ("cancelled", "bounce", "GPU 0 runs job aaa")
    give(w, stop=[["aaa", 1]])
    w.end("aaa", 143, is_said=False)
    w.turn(seconds=1.1)
    w.turn()
    assert (w.job("aaa").status, w.job("aaa").cause) == ("cancelled", "killed") and give(w, order("bbb")) == {"bbb": None}
    w.turn()
    assert w.machine.launched == [("aaa", 1)], "what was ended never begins"


def test_what_another_nexus_hears(world):
    w = world()
    told = hear(w)
    assert (told["jobs"], told["hold"], told["service_id"], len(told["gpus"])) == ([], "", w.store.service_id, 2)
    give(w, order())
    own = w.add(gpus=0.5)
    w.run("abc", 100)
    told = hear(w, since=told["number"])
    assert [(job["id"], job["attempt"], job["status"], job["pid"]) for job in told["jobs"]] == [("abc", 1, "running", 100)]
    assert sorted((gpu["taken"], tuple(gpu["taken_by"])) for gpu in told["gpus"]) == [(0, ()), (50, (own,))]
    assert hear(w, since=told["number"])["jobs"] == [] and hear(w, head="0-87654321")["jobs"] == []
    before = w.clock.ticks
    w.end(own)
    told = hear(w, since=told["number"], wait_s=60)
    assert [gpu["taken"] for gpu in told["gpus"]] == [0, 0] and w.clock.ticks == before, "told at once"
    (w.folder_of("abc") / "stderr.log").write_bytes(b"\xff\n")
    told = hear(w, since=told["number"], abc=(1, 0, 1))
    assert told["logs"] == {"abc": {"stderr": "Cg=="}} and "gpus" not in told
    w.end("abc", 5)
    job, = hear(w, since=told["number"])["jobs"]
    assert (job["status"], job["exit_code"], job["runtime_seconds"], job["log_sizes"]) == ("failed", 5, 2.5, (0, 2))
    give(w, collected=[["abc", 1]])
    assert hear(w)["jobs"] == [] and w.job("abc").is_collected
    w.service.set_paused(True, "ann")
    assert hear(w)["hold"] == "its queue is paused"


def test_each_log_has_its_share_of_an_answer(world):
    w = world(gpus=2)
    give(w, order("aaa"), order("bbb"))
    w.turn()
    for job_id in ("aaa", "bbb"):
        w.folder_of(job_id).mkdir(exist_ok=True)
        (w.folder_of(job_id) / "stdout.log").write_bytes(b"x" * 2 * nexus.LOG_BYTES)
    logs = hear(w, aaa=(1, 0, 0), bbb=(1, 5, 0))["logs"]
    assert [len(logs[job_id]["stdout"]) * 3 // 4 // 1000 for job_id in ("aaa", "bbb")] == [nexus.LOG_BYTES // 2000] * 2


def test_a_reboot_ends_another_nexus_job_whatever_the_setting_here(world):
    w = world(on_reboot="requeue")
    give(w, order())
    own = w.add()
    w.turn()
    w.claim("abc", 100), w.claim(own, 101)
    w.crash(is_reboot=True)
    w.turn()
    assert (w.job("abc").status, w.job("abc").cause) == ("failed", "reboot") and w.job(own).status in ("pending", "running")


# This nexus, and a node whose line the test itself is

@pytest.fixture
def head(world, monkeypatch):
    """A world whose node n1 has one GPU, and is well; remote(): what it tells of a job."""
    monkeypatch.setattr(nexus.Node, "follow", lambda node: None)
    monkeypatch.setattr(nexus.Node, "command", lambda node: None)

    def make(nodes=("n1",), **config):
        w = world(gpus=config.pop("gpus", 0), **config)
        for name in nodes:
            w.service.add_node(nexus.NodeConfig(name, "10.0.0.5"), "ann")
            connect(w, name)
        return w

    def connect(w, name="n1"):
        node = w.service.nodes[name]
        node.trouble, node.is_listed, node.number, node.cpu_slots = None, True, 1, 4
        node.gpus = (nexus.replace(makers.gpu(0), node=name, uuid=f"{name}/G0", pause_reason=nexus.PAUSED_THERE),)
        return node

    make.connect = connect
    return make


def remote(job, status, **facts):
    key = nexus.find_order_key(job)
    return nexus.Remote(*key, **{
        "status": status, "pid": None, "session": None, "log_dir": None, "started_at": None, "finished_at": None, "runtime_seconds": 1.0,
        "exit_code": None, "cause": None, "cause_line": None, "may_pass": False, "waiting_for": None, "notes": (), "gpu_indices": (0,),
        "log_sizes": (0, 0), "samples": {}, **facts})


def test_an_id_that_comes_again_is_another_order(head):
    """The node still has the first job, of which this nexus has forgotten all."""
    w = head()
    first = w.add()
    w.turn()
    key = nexus.find_order_key(w.job(first))
    w.service.nodes["n1"].news.append(remote(w.job(first), "completed", exit_code=0))
    w.turn()
    w.turn()
    w.store.update(lambda state: (yield nexus.JobsRemoved((first,))))
    again = w.service.submit([nexus.parse_submission({"command": "true", "id": first})], ANN).ids[0]
    w.turn()
    order_key = nexus.find_order_key(w.job(again))
    assert again == first and w.job(again).attempt == 1 and order_key[0] == key[0] and order_key[1] > key[1]


def test_the_end_comes_before_the_first_question_for_the_log(head):
    w = head()
    job_id = w.add()
    node = w.service.nodes["n1"]
    node.list_offsets()                                     # asked before the job is there
    w.turn()
    node.take_jobs([remote(w.job(job_id), "failed", exit_code=1, log_sizes=(0, 6), cause="exit")], False)
    w.turn()
    assert w.job(job_id).status == "running", "its output has not come"
    node.list_offsets()
    node.take_logs({job_id: {"stderr": "d3Jvbmc="}})
    node.take_jobs([], False)
    assert not node.news
    node.take_logs({job_id: {"stderr": "Cg=="}})
    node.take_jobs([], False)
    w.turn()
    w.turn()
    assert w.job(job_id).status == "failed" and (w.folder_of(job_id) / "stderr.log").read_text() == "wrong\n"


def test_news_that_comes_while_the_disk_is_full_is_not_lost(head, monkeypatch):
    w = head()
    job_id = w.add()
    w.turn()

    def full(record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.store, "append", full)
    w.service.nodes["n1"].news.append(remote(w.job(job_id), "cancelled", cause="bounce", cause_line="GPU 0 runs job zzz"))
    w.turn()
    w.turn()
    monkeypatch.undo()
    assert w.job(job_id).status == "running"
    w.turn()
    assert w.job(job_id).status == "pending" and w.job(job_id).attempt == 1


def test_a_job_cannot_be_begun_there(head):
    """It is tried as often as one here, and there only once each time."""
    w = head(launch_attempts=2)
    job_id = w.add()
    for failures in (1, 2):
        w.turn()
        assert w.job(job_id).status == "running"
        w.service.nodes["n1"].news.append(remote(
            w.job(job_id), "failed", cause="launch", cause_line="/logs: Permission denied", may_pass=True))
        w.turn()
        w.turn()
        assert w.job(job_id).status == ("pending" if failures == 1 else "failed")
        w.turn(seconds=60)
    job, result = makers.job("abc", status="running", head="0-1", attempt=1), nexus.Result(None, None, 0.0, "launch", "", may_pass=True)
    status, facts = nexus.judge(job, result, nexus.Evidence(), 0.0, makers.config().jobs, 0.0)
    assert status == "failed" and facts["launch_failures"] == 1, "which the other one is told"


def test_a_job_that_lacks_something_there_goes_to_another_machine(head):
    w = head(nodes=("n1", "n2"))
    job_id, pinned = w.add(), w.add(node="n1")
    words = "the conda environment 'ml' was not found"

    def fail():
        for _ in range(2):
            w.turn()
            for each in (job_id, pinned):
                if w.job(each).status == "running" and w.job(each).node == "n1":
                    w.service.nodes["n1"].news.append(remote(w.job(each), "failed", cause="launch", cause_line=words))
                    w.turn()

    fail()
    fail()
    assert (w.job(job_id).status, w.job(job_id).node, w.job(job_id).unfit) == ("running", "n2", (("n1", words),))
    assert (w.job(pinned).status, w.job(pinned).cause, w.job(pinned).cause_line) == ("failed", "launch", f"n1: {words}")


def test_another_nexus_there_is_no_machine_that_cannot_be_reached(head, monkeypatch):
    w = head(node_lost_after_seconds=60)
    job_id, node = w.add(), w.service.nodes["n1"]
    w.turn()
    node.take_jobs([remote(w.job(job_id), "running", pid=5)], False)
    w.turn()
    monkeypatch.setattr(nexus, "probe_node", lambda ssh, wanted: {"hash": "another"})
    for _ in range(10):
        w.clock.pass_(20)
        with pytest.raises(nexus.NexusError, match="has another nexus") as caught:
            node.find_service()
        node.lose(caught.value)
        w.turn()
    assert w.job(job_id).status == "running"
    monkeypatch.setattr(nexus, "probe_node", lambda ssh, wanted: 1 / 0)
    w.turn(seconds=120)
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "node-lost")


def test_what_a_node_could_not_take_runs_here_when_that_is_gone(head):
    w = head(gpus=1)
    job_id = w.add()
    w.service.set_paused(True, "ann")
    w.store.update(lambda state: (yield nexus.JobChanged(job_id, {"unfit": (("n1", "there is no /data"),)})))
    w.service.remove_node("n1", True, "ann")
    w.turn()
    w.service.set_paused(False, "ann")
    w.turn()
    assert not w.service.nodes and w.job(job_id).status == "running"


@pytest.mark.parametrize("now", [(), (nexus.NodeConfig("n1", "10.0.0.77"),)], ids=["gone", "elsewhere"])
def test_a_node_that_config_toml_has_lost_is_seen_to_until_its_jobs_are_over(head, now):
    w = head(nodes=())

    def begin(*nodes):
        w.service.config = nexus.replace(w.service.config, nodes=nodes)
        w.service.nodes = {}
        w.service.begin_nodes()

    begin(nexus.NodeConfig("n1", "10.0.0.5"))
    head.connect(w)
    job_id = w.add()
    w.turn()
    begin(*now)
    node = head.connect(w)
    assert (node.config.host, node.is_leaving) == ("10.0.0.5", True)
    node.news.append(remote(w.job(job_id), "completed", exit_code=0))
    w.turn()
    w.turn()
    assert w.job(job_id).status == "completed"
    node.collected.clear()
    w.turn()
    assert not w.service.nodes and w.store.read(lambda state: state.nodes) == ()
    begin(*now)
    assert [node.config.host for node in w.service.nodes.values()] == [config.host for config in now]


def test_a_snapshot_that_cannot_be_brought_there(head, monkeypatch):
    """Whatever it fails at, the job does not wait for ever, nor others for it."""
    w = head(gpus=1)
    brought = []

    def push(ssh, repository, commit, name, environ):
        brought.append(commit)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(nexus, "push_snapshot", push)
    job = makers.job("abc", node="n1", remote_id="abc", snapshot="a" * 40, snapshot_repo="/repo")
    node = w.service.nodes["n1"]
    for count in (1, 2):
        assert node.find_tree(job) == ""
        live.until(lambda count=count: len(node.news) == count, "the refusal")
    assert len(brought) == 2 and "temporarily unavailable" in node.news[0].message

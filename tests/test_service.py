"""SERVICE, driven turn by turn on a machine and a clock that the test moves, with crashes in between."""

import json
import logging
import os
import pathlib
import threading

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

    def sample_jobs(self, members):
        return {}

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
        os.close(self.service.wake_read)
        os.close(self.service.wake_write)

    def probe(self):
        self.service.observed(nexus.Prober(self.service).probe({}))
        self.service.take_in_observation()

    def turn(self, *sayings, seconds=0.0):
        self.clock.pass_(seconds)
        self.service.turn([nexus.parse_saying(saying) for saying in sayings])

    def add(self, command="python train.py", **options):
        return self.service.submit([nexus.parse_submission({"command": command, "cwd": "/", **options})], "ann")[0]

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
        w.service.cancel(job_id, "ann", (nexus.RUNNING,))
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
    w.service.cancel(job_id, "ann", (nexus.PENDING,))
    job = w.job(job_id)
    assert (job.status, job.cause, job.stop_by, job.finished_at) == ("cancelled", "killed", "ann", w.clock.wall)
    with pytest.raises(nexus.NexusError, match="is cancelled"):
        w.service.cancel(job_id, "ann", (nexus.PENDING, nexus.RUNNING))


def test_stop_asks_for_the_right_status(world):
    w = world(gpus=1)
    on, waits = w.add(), w.add()
    w.run(on, 100)
    with pytest.raises(nexus.NexusError, match="is running") as caught:
        w.service.cancel(on, "ann", (nexus.PENDING,))
    assert caught.value.kind == "conflict" and "nexus kill" in caught.value.hint
    with pytest.raises(nexus.NexusError, match="is pending") as caught:
        w.service.cancel(waits, "ann", (nexus.RUNNING,))
    assert "nexus remove" in caught.value.hint
    with pytest.raises(nexus.NexusError, match="no job 'xyz'") as caught:
        w.service.cancel("xyz", "ann", (nexus.RUNNING,))
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
    w.service.cancel(job_id, "ann", (nexus.RUNNING,))
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
    w.service.cancel(job_id, "ann", (nexus.RUNNING,))
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
    w.service.cancel(job_id, "ann", (nexus.RUNNING,))
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
    w.service.cancel(job_id, "ann", (nexus.RUNNING,))
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
    w.service.cancel(job_id, "ann", (nexus.RUNNING,))
    w.turn(f"bounce {job_id} 1 taken")
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause, w.job(job_id).stop_by) == ("cancelled", "killed", "ann")
    assert w.machine.launched == [(job_id, 1)] and not w.service.results and not w.service.clearings


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
    w = world()
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
    w = world()
    job_id = w.add()
    w.turn()
    w.machine.gone = [job_id]
    w.turn(seconds=1)
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).cause) == ("failed", "launch") and not w.claim(job_id, 100)


def test_screen_that_hangs(world):
    """Its process lives, and no job.sh comes of it."""
    w = world()
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
        w.service.cancel(job_id, "ann", (nexus.RUNNING,))
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
    removed = sorted(w.service.rubbish.get_nowait() for _ in range(3))
    assert removed == sorted(str(w.folder_of(jobs[number])) for number in (4, 1, 0))


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
    for path in (folder, inside, outside, tmp_path / "logs" / "job_no"):
        w.service.rubbish.put(str(path))
    w.service.rubbish.put("end")
    thread = threading.Thread(target=w.service.remove_rubbish, daemon=True)
    thread.start()
    deadline = threading.Event()
    while not w.service.rubbish.empty():
        deadline.wait(0.01)
    deadline.wait(0.1)
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
    assert w.api(waits)["waiting_for"] == f"GPU 0 runs job {on}; GPU 1 is paused"
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


REASONS = [  # reason, GPUs, config, job, the words
    ("somebody else's process", [makers.gpu(0, processes=(makers.foreign(),), memory_used_mib=16384.0)], {}, {},
     "GPU 0 is in use by bob (pid 4242 python, 16GB)"),
    ("a lost one", [makers.gpu(0, fault="GPU is lost")], {}, {}, "GPU 0 is unusable (GPU is lost)"),
    ("MIG", [makers.gpu(0, is_mig=True)], {}, {}, "GPU 0 is cut into MIG slices"),
    ("not ours to use", [makers.gpu(0), makers.gpu(1, fault="GPU is lost")], {"ids": [1]}, {},
     "GPU 0 is not among [gpu] ids; GPU 1 is unusable (GPU is lost)"),
    ("memory", [makers.gpu(0, memory_used_mib=23000.0)], {}, {}, "GPU 0 has 22GB of its memory in use by others"),
    ("not enough free", [makers.gpu(0, memory_used_mib=4096.0)], {"min_free_mem_mib": 22000}, {},
     "GPU 0 has 20GB free, less than min_free_mem_mib"),
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

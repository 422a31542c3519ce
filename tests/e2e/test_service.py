"""SERVICE, driven turn by turn on a machine and a clock that the test moves, with crashes in between."""

import errno
import json
import logging
import os
import pathlib
import threading
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
        self.machine, self.alive, self.signals, self.deaf, self.runners = machine, {}, [], set(), []

    def start(self, pid, owner=None, started=None, state="S", parent=1):
        self.alive[pid] = nexus.Process(pid, pid * 10 if started is None else started, parent, pid, state, 0, name="python"), owner

    def take(self, pid, memory_mib, cpu_s=5.0):
        process, owner = self.alive[pid]
        self.alive[pid] = nexus.replace(process, cpu_ticks=round(cpu_s / nexus.TICK_S)), owner
        self.machine.psutil.memory_mib[pid] = memory_mib

    def find(self, pid):
        return self.alive[pid][0] if pid in self.alive else None

    def is_alive(self, pid, started):
        return pid in self.alive and self.alive[pid][0].started == started

    def find_age_s(self, started):
        return self.machine.clock.ticks - started / 100

    def find_members(self, jobs, over=(), *, others=(), is_refresh=False):
        jobs = list(jobs)
        return {job.id: [process for process, owner in self.alive.values() if owner == job.id and process.pid != job.current.pid]
                for job in jobs}

    def owner_of(self, pid):
        return self.alive[pid][1] if pid in self.alive else None

    def find_readers(self, processes):
        return set()

    def find_runners(self, script, attempt):
        return [process for process in self.runners if process.pid in self.alive]

    def send(self, process, number):
        self.signals.append((process.pid, int(number)))
        if number == 9 or (number == 15 and process.pid not in self.deaf):
            self.alive.pop(process.pid, None)


class FakePsutil:
    """The part of psutil that nexus uses; what `memory_mib` lacks has ended."""
    NoSuchProcess, AccessDenied = KeyError, PermissionError

    def __init__(self):
        self.memory_mib = {}

    def Process(self, pid):
        return types.SimpleNamespace(memory_full_info=lambda: types.SimpleNamespace(pss=self.memory_mib[pid] * 2**20))

    def cpu_percent(self):
        return 50.0

    def virtual_memory(self):
        return types.SimpleNamespace(total=4 * 2**30, available=2**30)


class FakeMachine(nexus.Machine, nexus.NvidiaSmi):
    """A Machine whose GPUs and processes are what the test says."""

    def __init__(self, clock, gpus, config, layout, disk):
        super().__init__(nexus.replace(config, mock_gpus=0), layout, disk, "0-aaaaaaaa")
        self.is_mock, self.leases = True, None
        self.clock, self.boot_id, self.gpu_source = clock, BOOT, self
        self.shown = gpus
        self.processes, self.psutil = FakeProcesses(self), FakePsutil()
        self.gone, self.launched, self.refusal = [], [], None
        self.oom_kills = 0

    def count_oom_kills(self):
        return self.oom_kills

    def query_gpus(self, known):
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown

    def launch(self, job, script, handles=()):
        if self.refusal:
            raise self.refusal
        self.launched.append((job.id, job.attempt))
        self.children[job.id] = object()

    def reap(self):
        gone, self.gone = self.gone, []
        for job_id in gone:
            self.children.pop(job_id, None)
        return gone


def is_over(thread):
    try:
        thread.join(live.PATIENCE_S)
    except RuntimeError:                # it is only just being started
        return False
    return True


class World:
    """A service that can be crashed and started anew; what runs and what is on disk stays."""

    def __init__(self, folder, gpus=2, **config):
        self.folder = folder
        self.clock, self.disk = FakeClock(), nexus.Disk()
        self.config = makers.config(**{"history_limit": 100, "launcher": "direct", "kill_grace_seconds": 10, **config})
        self.layout = nexus.Layout(str(folder), str(folder / "state.json"), str(folder / "logs"))
        self.machine = FakeMachine(self.clock, [makers.gpu(index) for index in range(gpus)], self.config, self.layout, self.disk)
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
        self.store = nexus.Store(self.layout, self.clock, self.disk, self.log)
        self.store.recover()
        self.service = nexus.Service(self.config, self.layout, self.store, self.machine, self.clock, self.disk, self.log,
                                     {"PATH": "/usr/bin"})
        self.service.outcomes.adopt()
        self.probe()

    def crash(self, is_reboot=False):
        self.close()
        self.machine.children.clear()                   # another process's
        if is_reboot:
            self.machine.processes.alive.clear()
            self.machine.boot_id += "-2"
        self.boot()

    def close(self):
        self.store.journal.close()
        for node in self.service.pool.nodes.values():
            node.unpushed.worker.end()
        for thread in set(threading.enumerate()) - self.threads:        # they wake it when they are through
            live.until(lambda: is_over(thread), str(thread))      # noqa: B023
        os.close(self.service.events.source)

    def probe(self):
        self.service.probe()
        self.service.gpu_watch.take_in_observation()
        self.service.observer.measure_memory()

    def turn(self, *sayings, seconds=0.0):
        self.clock.pass_(seconds)
        self.service.health.look_at_disks()              # as its thread does
        self.service.tick([nexus.parse_runner_event(saying) for saying in sayings])

    def add(self, command="python train.py", **options):
        return self.service.admission.admit(nexus.parse_submission({"command": command, "cwd": "/", **options}), ANN).ids[0]

    def job(self, job_id):
        return self.store.state.jobs.get(job_id)

    def api(self, job_id):
        return self.service.answers.describe_jobs([self.job(job_id)])[0]

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
        (folder / f"attempt-{attempt}").write_text(f"{pid} {pid * 10}\n{pid * 10}\n")
        if is_said:
            self.turn(f"start {job_id} {attempt} {pid} {pid * 10} {pid * 10}")
        return True

    def end(self, job_id, code=0, is_said=True, has_result=True, **more):
        job = self.job(job_id)
        if has_result:
            self.write_result(job_id, code, **more)
        self.machine.processes.alive.pop(job.current.pid, None)
        if is_said:
            self.turn(f"end {job_id} {job.attempt} {code} 250")
            self.turn()

    def write_result(self, job_id, code, **more):
        path = self.folder_of(job_id) / f"result-{self.job(job_id).attempt}.json"
        path.write_text(json.dumps({"exit_code": code, "runtime_seconds": 2.5, **more}))
        os.utime(path, (0, int(self.clock.wall)))

    def run(self, job_id, pid):
        """A job that is on: launched, claimed, known."""
        self.turn()
        assert self.claim(job_id, pid)
        assert self.job(job_id).current.pid == pid
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


def test_end_is_heard_at_once(world):
    w = world(gpus=1)
    first, then = w.add(), w.add()
    w.run(first, 100)
    assert w.api(then)["waiting_for"] == f"GPU 0 runs job {first}"
    w.turn(f"end {first} 1 0 250")
    assert w.job(first).status == "completed" and w.job(then).status == "running" and w.job(first).current.runtime_seconds == 2.5
    assert w.lines[-2:] == [f"Job {first} completed successfully on GPU 0", f"Started job {then} on GPU 0: python train.py"]


def test_a_start_that_was_asked_for_is_known_of_the_last_in_the_queue_too(world, monkeypatch):
    monkeypatch.setattr(nexus, "MAX_ESTIMATED_JOBS", 2)
    w = world()
    ids = [w.add(begin="+1h", gpus=0) for _ in range(3)]
    w.turn()
    assert w.api(ids[-1])["estimated_start"] == w.api(ids[0])["estimated_start"] == nexus.format_time(w.clock.now() + 3600)


def test_sayings_of_nobody_change_nothing(world):
    w = world()
    job_id = w.run(w.add(), 100)
    before = w.job(job_id)
    w.turn(f"end {job_id} 7 0 250", "end zzz 1 0 250", f"start {job_id} 2 5 5 5", f"bounce {job_id} 9 why")
    assert w.job(job_id) == before


# Starts that come to nothing

def test_bounce_of_a_job_that_is_to_be_stopped_ends_it(world):
    w = world()
    job_id = w.add()
    w.turn()
    w.service.admission.cancel(nexus.Choice([job_id], (nexus.RUNNING,)), ANN)
    w.turn(f"bounce {job_id} 1 taken")
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).current.cause, w.job(job_id).current.stop_by) == ("cancelled", "killed", "ann")
    assert w.machine.launched == [(job_id, 1)] and not w.service.outcomes.unrecorded and not w.service.job_host.hosted


def test_starts_that_come_to_nothing_leave_no_trail(world):
    """Whatever is in their way may be there for days: neither the job grows, nor is it tried all the time."""
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    job_id = w.add()
    for _ in range(600):
        w.probe()
        w.turn(seconds=1)
    assert len(w.job(job_id).status_history) == 1 and 5 <= w.job(job_id).attempt <= 15
    w.machine.leases.error = None
    while w.job(job_id).status == "pending":
        w.probe()
        w.turn(seconds=1)
    assert [status for status, _ in w.job(job_id).status_history] == ["pending", "running"]


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


LAUNCH_FAULTS = [  # error, how often the job is tried before it fails (0: until it starts), part of the words
    (OSError(errno.EMFILE, "Too many open files"), 0, "Too many open files"),
    (OSError(errno.EROFS, "Read-only file system", "/logs"), 0, "cannot start it with /logs: Read-only file system"),
    (OSError(errno.ENOSPC, "No space left on device"), 0, "cannot start it with "),
    (OSError(errno.ENOENT, "No such file or directory", "sh"), 3, "cannot start it with sh"),
    (OSError(errno.EACCES, "Permission denied"), 3, "Permission denied"),
    (nexus.NexusError("forbidden", "/x.py is not a file"), 1, "/x.py is not a file"),
]


@pytest.mark.parametrize("error, count, words", LAUNCH_FAULTS, ids=[words for _, _, words in LAUNCH_FAULTS])
@pytest.mark.parametrize("is_translated", [False, True])
def test_a_job_that_cannot_be_started(world, error, count, words, is_translated):
    if is_translated and isinstance(error, OSError):    # as by `with disk(...)`
        error, fault = nexus.NexusError("unavailable", "cannot write it"), error
        error.__cause__ = fault
    w = world(launch_attempts=3)
    w.machine.refusal = error
    job_id = w.add()
    for _ in range(40):
        w.probe()
        w.turn(seconds=10)
    job = w.job(job_id)
    if count:
        assert (job.status, job.current.cause, job.current.exit_code) == ("failed", "launch", None) and words in job.current.cause_line
        assert len(job.attempts) == count
        assert not w.claim(job_id, 100)                 # a late runner finds that its attempt is taken
    else:
        assert job.status == "pending" and words in w.api(job_id)["waiting_for"]
        w.machine.refusal = None
        for _ in range(40):
            w.probe()
            w.turn(seconds=10)
        assert [status for status, _ in w.job(job_id).status_history[:2]] == ["pending", "running"]


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
        w.service.admission.cancel(nexus.Choice([job_id], (nexus.RUNNING,)), ANN)
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


# History

def end_all(w, ids, first_pid=100):
    """Let jobs end, in this order."""
    w.turn()
    for number, job_id in enumerate(sorted(ids)):
        w.claim(job_id, first_pid + number)
    for job_id in ids:
        (w.folder_of(job_id) / "stdout.log").write_text("said\n")
        w.end(job_id)
        w.clock.pass_(1)
    w.turn()


def test_history_is_trimmed(world):
    """With its logs; what the jobs themselves made stays."""
    w = world(gpus=0, history_limit=3, cpu_slots=10)
    jobs = [w.add("true", gpus=0) for _ in range(6)]
    made = w.folder_of(jobs[1]) / "files/out/model.pt"
    made.parent.mkdir(parents=True)
    made.write_text("a week of work")
    end_all(w, [jobs[number] for number in (4, 1, 0, 5, 2, 3)])
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text("a week of work")
    w.service.housekeeping.trim_history()
    kept = nexus.list_finished(w.store.state)
    assert [job.id for job in kept] == [jobs[5], jobs[2], jobs[3]], "those that ended last"
    assert sorted(path.name for path in w.folder_of("x").parent.iterdir() if ".old-" not in path.name) == sorted(
        f"job_{job_id}" for job_id in (jobs[1], jobs[2], jobs[3], jobs[5]))
    assert os.listdir(w.folder_of(jobs[1])) == ["files"] and made.read_text() == "a week of work"
    assert w.lines[-1] == f"Trimmed 3 jobs beyond history_limit = 3, with their logs: {jobs[4]}, {jobs[1]}, {jobs[0]}"
    w.service.housekeeping.trim_history()
    assert sum("Trimmed" in line for line in w.lines) == 1


def test_usage_of_what_was_trimmed_ages(world):
    """Also when nothing else happens, and after a crash."""
    w = world(gpus=0, history_limit=1, cpu_slots=10)
    end_all(w, [w.add("true", gpus=0) for _ in range(3)])
    w.service.housekeeping.trim_history()
    seq, periods = w.store.state.seq, []
    for days in (0, 59, 3, 300, 100):
        w.clock.pass_(days * 86400)
        w.service.housekeeping.trim_history()
        periods += sorted({len(row.period) for row in w.store.state.usage.values()})
        w.crash()
    assert periods == [10, 10, 7, 7] and not w.store.state.usage
    assert w.store.state.seq == seq + 2, "it is written when something changes"


def test_what_a_job_made_stays_when_its_id_comes_again(world):
    w = world(gpus=0, history_limit=1, cpu_slots=10)
    first, second = (w.add("true", gpus=0) for _ in range(2))
    end_all(w, [first, second])
    fill(w.folder_of(first) / "work/model.pt")
    w.service.housekeeping.trim_history()
    again = w.add("true", gpus=0)
    assert again == first
    w.turn()
    kept, = w.folder_of(first).parent.glob(f"job_{first}.old-*")
    assert (kept / "work/model.pt").exists() and not (w.folder_of(first) / "work").exists()
    assert any(str(kept) in line for line in w.lines)


def fill(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


def test_a_snapshot_goes_with_the_last_job_that_has_it(world, monkeypatch):
    w = world(gpus=0, history_limit=1)
    released = []
    monkeypatch.setattr(nexus, "release_snapshot", lambda repository, commit, environ: released.append((repository, commit)))
    of = {"snapshot": "a" * 40, "snapshot_repo": "/repo", "cwd": "/repo/sub", "gpus": 0}
    for job_id in [w.add("true", **of), w.add("true", **of), w.add("true", gpus=0)]:
        w.service.admission.cancel(nexus.Choice([job_id], ("pending",)), ANN)
        w.service.housekeeping.trim_history()
        assert released == [] or len(w.store.state.jobs) == 1
    assert released == [("/repo", "a" * 40)]


# GPUs and reasons

def test_a_job_on_a_gpu_that_it_was_not_given(world, monkeypatch):
    """Its script sets CUDA_VISIBLE_DEVICES itself: there it is as anybody else is, until it ends."""
    w = world(gpus=2)
    monkeypatch.setattr(nexus, "find_process_user", lambda pid: "ann")
    astray = w.run(w.add(), 100)
    w.machine.processes.start(101, astray)
    used = (nexus.GpuProcess(101, 8192.0),)
    w.machine.shown = [makers.gpu(index, processes=used, memory_used_mib=8192.0) for index in range(2)]
    w.probe()
    assert [gpu.processes[0].job_id for gpu in w.service.gpu_watch.gpus] == [astray, None]
    then = w.add()
    w.turn()
    assert w.job(then).status == "pending"
    assert "GPU 1 is in use by ann (pid 101 python, 8GB)" in w.api(then)["waiting_for"]
    del w.machine.processes.alive[101]
    w.machine.processes.owner_of = lambda pid: astray           # it has gone, and nvidia-smi still shows it
    w.probe()
    w.turn()
    assert w.job(then).current.gpu_indices == (1,)


def test_until_nvidia_smi_answers(world):
    """What it said last is not relied upon for as long as a slow driver may take."""
    w = world(gpus=1, refresh_rate_seconds=5)
    w.turn(seconds=14)
    assert w.service.answers.status()["gpu_trouble"] is None and w.service.health.check()["is_healthy"]
    w.turn(seconds=2)
    job_id = w.add()
    w.turn()
    words = "nvidia-smi has not answered for 16 s"
    assert w.service.answers.status()["gpu_trouble"] == words and words in w.api(job_id)["waiting_for"]
    assert not w.service.health.check()["is_healthy"]
    w.probe()
    w.turn()
    assert w.job(job_id).status == "running" and w.service.answers.status()["gpu_trouble"] is None


def test_a_disk_that_hangs_is_told(world):
    w = world()
    w.clock.pass_(31)
    assert ("disks", False, "they have not answered for 31s", "") in w.service.health.list_checks()
    w.service.health.look_at_disks()
    assert "disks" not in [name for name, *_ in w.service.health.list_checks()]


def test_a_slow_nvidia_smi_is_waited_for_and_said(world):
    w = world(gpus=1, refresh_rate_seconds=5)
    w.service.observer.latest = nexus.replace(w.service.observer.observation, took_s=24.0, began_at=w.clock.monotonic() - 24.0)
    w.turn(seconds=240 + 30)
    assert w.service.answers.status()["gpu_trouble"] is None and "nvidia-persistenced" in " ".join(w.service.answers.status()["hints"])


def test_how_often_nvidia_smi_is_asked(world):
    w = world(refresh_rate_seconds=600)
    w.machine.query_gpus = lambda known: (w.clock.pass_(8), (_ for _ in ()).throw(nexus.NexusError("unavailable", "no")))[1]
    assert w.service.probe() == nexus.TROUBLE_INTERVAL_S, "soon again, when it fails"
    w.service.observer.config = makers.config(refresh_rate_seconds=1)
    w.machine.query_gpus = lambda known: (w.clock.pass_(3), [makers.gpu(0)])[1]
    assert w.service.probe() == 30, "seldom, when it is slow"


def test_a_worker_goes_on_after_a_step_that_failed(world, monkeypatch):
    w, taken = world(), []

    def step():
        taken.append(len(taken))
        if len(taken) == 2:
            raise ZeroDivisionError("oh")
        if len(taken) == 3:
            worker.wanted.set()
            return None                             # no further step before it is wanted
        w.service.is_stopping = len(taken) == 4
        return 0.0

    monkeypatch.setattr(nexus, "WATCH_INTERVAL_S", 0.01)
    worker = nexus.Worker(w.service, "counting", step)
    worker.thread.start()
    worker.thread.join(60)
    assert taken == [0, 1, 2, 3] and w.service.failure_count == 1 and any("counting" in line for line in w.lines)


# Leases that cannot be taken are no fault of the job's

class BrokenLeases(nexus.Leases):
    def __init__(self):
        super().__init__(nexus.DISK, "/tmp/none", "0-a")
        self.error = nexus.NexusError("unavailable", "/tmp/nexus-leases is not a folder", hint="who: fuser")

    def take(self, job_id, uuids):
        if self.error:
            raise self.error
        self.held[job_id] = []

    def find_holders(self, uuids):
        return {}


def test_a_lease_is_given_up_when_its_runner_says_that_it_has_it(world):
    """Its claim, which comes before, does not say so."""
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    w.machine.leases.error = None
    job_id = w.add()
    w.turn()
    w.claim(job_id, 100, is_said=False)
    w.turn(seconds=10)
    assert w.job(job_id).current.pid == 100 and list(w.machine.leases.held) == [job_id]
    w.turn(f"start {job_id} 1 100 1000 1000")
    assert not w.machine.leases.held


def test_leases_that_cannot_be_looked_at(world):
    """No GPU is given out before they could be, at the next look and not later; who had which stays known."""
    w = world(gpus=2)
    leases = w.machine.leases = BrokenLeases()
    leases.find_holders = lambda uuids: {"GPU-1": "bob"}
    w.probe()

    def refuse(uuids):
        raise leases.error

    leases.find_holders = refuse
    job_id = w.add(gpus=2)
    for _ in range(100):
        w.probe()
        w.turn(seconds=5)
    assert w.job(job_id).attempt == 0 and "not a folder" in w.api(job_id)["waiting_for"]
    assert w.service.gpu_watch.gpus[1].lease_holder == "bob"
    assert [check["reading"] for check in w.service.health.check()["checks"] if not check["is_ok"]] == [
        "/tmp/nexus-leases is not a folder; who: fuser"]
    assert len([line for line in w.lines if "not a folder" in line]) == 1
    leases.error, leases.find_holders = None, lambda uuids: {}
    w.probe()
    w.turn()
    assert w.job(job_id).status == "running" and w.service.health.check()["is_healthy"]


def test_a_start_that_the_disk_refuses_never_began(world, monkeypatch):
    w = world(gpus=1)
    job_id = w.add()

    def refuse(handle):
        raise OSError(5, "Input/output error")
    monkeypatch.setattr(w.disk, "fdatasync", refuse)
    w.turn()
    assert w.job(job_id).status == "pending" and not w.machine.children and not os.path.exists(w.layout.job_folder(job_id))
    monkeypatch.undo()
    w.turn(seconds=2)
    assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", 1)


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
    assert w.service.health.check()["is_healthy"] and w.service.answers.info()["uptime_seconds"] < 200


# One failure stays one failure

PHASES = [  # where, what, as it is told
    ("local", "poll", "hearing of jobs here"), ("gpu_watch", "take_in_observation", "reading GPUs"),
    ("pool", "take_stock", "looking at nodes"), ("", "record_ends_and_start", "scheduling")]


@pytest.mark.parametrize("part, method, phase", PHASES, ids=[f"{case[0]}.{case[1]}" for case in PHASES])
def test_a_phase_that_fails_stops_no_other(world, monkeypatch, part, method, phase):
    w = world()
    done = []
    for where, name, told in PHASES:
        monkeypatch.setattr(getattr(w.service, where, w.service), name, lambda *_, told=told: done.append(told) or ())
    monkeypatch.setattr(getattr(w.service, part, w.service), method, lambda *_: (_ for _ in ()).throw(ZeroDivisionError("oh")))
    w.turn()
    assert done == [told for _, _, told in PHASES if told != phase]
    health = w.service.health.check()
    reading = next(check for check in health["checks"] if check["name"] == "failures")
    assert not health["is_healthy"] and not reading["is_ok"] and phase in reading["reading"] and "oh" in reading["reading"]
    w.clock.pass_(301)
    w.turn()
    assert w.service.failure_count == 2


def test_a_disk_that_fills_after_a_launch_ends_no_job(world, monkeypatch):
    """What could not be noted of a job that runs is no fault of the job's."""
    w = world()
    job_id = w.add()
    launch = w.machine.launch

    def launch_and_fill(*given):
        launch(*given)
        monkeypatch.setattr(w.store.journal, "append", refuse_to_write)

    def refuse_to_write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.machine, "launch", launch_and_fill)
    w.turn()
    assert w.machine.launched == [(job_id, 1)] and job_id not in w.service.outcomes.unrecorded
    assert w.job(job_id).status == "running" and not w.service.failure_count


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


# What is submitted

def submit(w, *jobs, key=None, **shared):
    bodies = [{"command": "python train.py", "cwd": "/", **shared, **one} for one in jobs or ({},)]
    return w.service.admission.admit(nexus.parse_submissions(bodies), ANN, key)


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
    assert added.existing == ((first,) if is_same else ()) and (added.ids == (first,)) == is_same
    assert len(w.store.state.jobs) == (1 if is_same else 2)


@pytest.mark.parametrize("status, is_known", [("running", True), ("completed", True), ("failed", False)])
def test_unique_knows_what_runs_or_has_completed(world, status, is_known):
    w = world()
    first = w.run(w.add(), 100)
    if status != "running":
        w.end(first, 0 if status == "completed" else 1)
    assert w.job(first).status == status and submit(w, {"unique": True}).existing == ((first,) if is_known else ())


# Models

LLM_CONFIG = {"default_requirement": 1.0, "models": {"qwen": 0.5, "large": 2}}
LLMS = [  # reason, what is asked, the GPUs it gets
    ("by --llm", {"llm": "qwen"}, 0.5), ("in the command", {"command": "python a.py --llm qwen"}, 0.5),
    ("with =", {"command": "python a.py --llm=large -v"}, 2), ("within quotes", {"command": "bash -c 'a.py --llm qwen'"}, 0.5),
    ("before a separator", {"command": "python a.py --llm qwen; ls"}, 0.5), ("another option", {"command": "a --llmx qwen"}, 1),
    ("one that is not named", {"llm": "other"}, 1),
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
    for text, says in ((None, "is not there"), ("{", "llm.json"), ('{"modles": {}}', "modles"), ("[]", "object"),
                       ('{"models": {"qwen": 0.333}}', "models.qwen must be")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(nexus.NexusError, match=says) as refused:
            submit(w, {"llm": "qwen"})
        assert refused.value.kind == "usage" and ("default_requirement" in refused.value.hint) is (text is not None)
    for share in (0.5, 0.25):
        path.write_text(json.dumps({"models": {"qwen": share}}))
        assert w.job(submit(w, {"llm": "qwen"}).ids[0]).gpus == share


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


def test_a_job_begins_when_it_is_to(world):
    w = world()
    later, now = w.add(gpus=0, begin="+2h"), w.add(gpus=0)
    w.turn()
    assert (w.job(later).status, w.job(now).status) == ("pending", "running")
    assert w.job(later).begin_at == w.clock.wall + 7200 and w.service.find_wait_s() <= 7200
    w.turn(seconds=7199)
    assert w.job(later).status == "pending" and w.api(later)["waiting_for"] == "begins in 1s, as asked"
    w.turn(seconds=1.5)
    assert w.job(later).status == "running"


def test_a_launch_that_comes_to_something_later_and_costs_no_retry(world):
    w = world(launch_attempts=2)
    w.machine.refusal = OSError(71, "Protocol error", "/logs")
    job_id = w.add(retries=1)
    w.turn()
    w.turn()
    assert "attempt 1 failed (launch: cannot start it with /logs" in w.api(job_id)["waiting_for"]
    w.machine.refusal = None
    w.turn(seconds=6)
    fail(w, job_id, 100, 1)
    assert w.job(job_id).status == "pending", "its own retry is left"
    w.turn(seconds=6)
    fail(w, job_id, 101, 2)
    assert (w.job(job_id).status, w.job(job_id).current.exit_code, w.job(job_id).attempt) == ("failed", 2, 3)


# Run again

def test_a_retry_is_a_new_job_that_asks_for_the_same(world):
    w = world(gpus=0, cpu_slots=9)
    good, bad = w.add("good", gpus=0), w.add("bad", gpus=0, name="b", retries=0, group="g", env={"A": "1"})
    child = w.add("child", gpus=0, after=[bad, good])
    w.turn()
    w.claim(good, 100)
    w.end(good)
    fail(w, bad, 101, 1, seconds=60)
    assert w.job(child).current.cause == "dependency"
    again = w.job(w.service.admission.retry(nexus.Choice([bad]), ANN)[0])
    second = w.job(w.service.admission.retry(nexus.Choice([child]), ANN)[0])
    assert (again.command, again.after, again.attempts, w.job(bad).retried_as) == ("bad", (), (), again.id)
    assert (again.name, again.group, again.env_digest, again.environment) == ("b", "g", w.job(bad).env_digest, w.job(bad).environment)
    assert (second.after, second.pending_dependencies) == ((again.id, good), (again.id,))
    w.turn()
    w.claim(again.id, 102)
    w.end(again.id)
    assert w.job(second.id).status == "running" and w.job(bad).status == "failed"


def test_a_retry_still_comes_after_what_may_complete(world):
    w = world(gpus=0, cpu_slots=1)
    lives, dies = w.add("lives", gpus=0), w.add("dies", gpus=0)
    child = w.add("child", gpus=0, after=[dies, lives])
    w.service.admission.cancel(nexus.Choice([dies], ("pending",)), ANN)
    again = w.service.admission.retry(nexus.Choice([child]), ANN)[0]
    assert (w.job(again).after, w.job(again).pending_dependencies) == ((lives,), (lives,))


def test_retry_of_too_many_for_the_queue_adds_none(world):
    w = world(gpus=0, queue_limit=2, cpu_slots=1)
    bad = w.add("bad", gpus=0)
    w.turn()
    fail(w, bad, 100)
    w.service.admission.set_paused(True, "ann")
    w.add("waits", gpus=0), w.add("waits", gpus=0)
    with pytest.raises(nexus.NexusError, match="queue is full"):
        w.service.admission.retry(nexus.Choice([bad]), ANN)[0]
    assert len(w.store.state.jobs) == 3
    with pytest.raises(nexus.NexusError, match="only a finished one"):
        w.service.admission.retry(nexus.Choice([nexus.list_pending(w.store.state)[0].id]), ANN)


# Groups


def test_a_group_is_held_for_one_that_waits_for_its_next_attempt(world):
    w = world(gpus=0, cpu_slots=1, guard_seconds=10, retry_backoff_seconds=1000)
    ids = [w.add("a", gpus=0, group="g", retries=int(not number)) for number in range(4)]
    w.turn()
    for number, job_id in enumerate(ids):
        fail(w, job_id, 100 + number, 1, "no module\n", 1)
    assert w.job(ids[0]).status == "pending" and w.store.state.groups["g"].hold


# GPUs that are bad

def on_gpu(w, index, command, code, pid, seconds=1):
    job_id = w.add(f"./program --letter {command}", gpu_ids=[index])
    w.turn()
    assert w.job(job_id).current.gpu_indices == (index,), w.api(job_id)
    fail(w, job_id, pid, code, "CUDA error\n", seconds)


def test_the_last_usable_gpu_is_never_paused(world):
    w = world(gpus=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    w.service.gpu_watch.set_gpu_paused("1", True, "ann")
    on_gpu(w, 0, "b", 1, 102)
    on_gpu(w, 0, "c", 1, 103)
    assert [gpu["is_paused"] for gpu in w.service.answers.status()["gpu_status"]] == [False, True]


def test_a_resumed_gpu_begins_anew(world):
    w = world(gpus=2, guard_failures=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    on_gpu(w, 0, "b", 1, 102)
    assert w.service.answers.status()["gpu_status"][0]["is_paused"]
    w.service.gpu_watch.set_gpu_paused("0", False, "ann")
    on_gpu(w, 1, "b", 0, 103, 60)
    on_gpu(w, 0, "c", 1, 104)
    assert not w.service.answers.status()["gpu_status"][0]["is_paused"]


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
    w.service.admission.cancel(nexus.Choice([job_id], ("running",)), ANN)
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


# What is known

def test_samples_of_a_job_are_kept_over_a_restart_and_a_retry_begins_anew(world):
    w = world()
    job_id = w.add(retries=1)
    w.turn()
    w.claim(job_id, 100)
    w.machine.processes.start(200, job_id)
    for used, busy, cpu_s in ((4000.0, 50.0, 1.0), (9000.0, 100.0, 2.5), (2000.0, 30.0, 3.0)):
        w.machine.processes.take(200, 500.0, cpu_s)
        w.machine.shown = [makers.gpu(0, utilization=busy, memory_used_mib=used, processes=(nexus.GpuProcess(200, used),)), makers.gpu(1)]
        w.probe()
        w.turn(seconds=1)
    told = w.api(job_id)
    assert (told["peak_gpu_mem_mib"], told["mean_gpu_util"], told["peak_rss_mib"], told["cpu_seconds"]) == (9000, 60, 500, 3)
    assert (told["rss_mib"], told["cpu_percent"]) == (500, 50)
    status = w.service.answers.status()["gpu_status"][0]
    assert status["utilization_peak"] == 100 and status["utilization_mean"] == 50      # of 0, 50, 100: up to the look before
    w.service.outcomes.keep_samples()
    w.crash()
    w.machine.shown = [makers.gpu(0), makers.gpu(1)]
    w.machine.processes.alive.pop(200)
    w.end(job_id, 1)
    kept = w.job(job_id)
    assert kept.status == "pending" and (kept.current.peak_gpu_mem_mib or 0) in (0, 9000)


PROGRESS = [  # reason, what the job is, what it prints, seconds, (fraction, seconds left, by) then; None: nothing
    ("of a bar", {}, " 25%|##   | 5/20 [00:10<00:30]\r 50%|#####| 10/20 [00:20<00:20]\r", 40, (0.5, 20, "output")),
    ("not yet", {}, " 50%|#####| 10/20 [00:20<00:20]\r", 20, None),
    ("a line that is not whole", {}, "step 4/10", 40, None),
    ("of its expected time", {"expected_time": 100}, "hello\n", 40, (0.4, 60, "expected")),
    ("it takes longer than expected", {"expected_time": 100}, "hello\n", 120, None),
    ("a bar wins", {"expected_time": 100}, " 50%|#####| 10/20 [00:20<00:20]\r", 40, (0.5, 20, "output")),
    ("an inner bar, and an expected time", {"expected_time": 100}, "100%|#| 5/5 [0:10<0:00]\r 20%|#| 1/5 [0:10<0:20]\r", 40,
     (0.4, 60, "expected")),
    ("of its group", {"group": "done"}, "hello\n", 40, (0.5, 40, "group")),
    ("of a group of which none has ended", {"group": "new"}, "hello\n", 40, None),
]


@pytest.mark.parametrize("reason, fields, printed, seconds, told", PROGRESS, ids=[case[0] for case in PROGRESS])
def test_how_far_a_job_is(world, reason, fields, printed, seconds, told):
    w = world(gpus=3)
    for runtime in (60, 80, 300):
        done = w.add(group="done", gpus=0)
        w.turn()
        w.claim(done, 100)
        w.write_result(done, 0, runtime_seconds=runtime)
        w.end(done, 0, has_result=False, is_said=False)
        w.turn(seconds=60)
    w.machine.processes.find_age_s = lambda started: w.clock.ticks - began
    job_id = w.add(gpus=0, **fields)
    w.turn()
    began = w.clock.ticks
    w.claim(job_id, 101)
    watch, folder = w.service.log_watch, pathlib.Path(w.job(job_id).log_dir)
    (folder / "stderr.log").write_text(printed)
    w.turn(seconds=seconds)
    watch.look()
    job = w.api(job_id)
    assert (job["fraction"], job["progress_by"]) == ((told[0], told[2]) if told else (None, None))
    if told:
        assert abs(nexus.parse_time(job["estimated_end"]) - w.clock.now() - told[1]) <= 12, "to ten seconds"
    groups = {group["name"]: group["fraction"] for group in w.service.answers.list_groups(w.service.owner)}
    assert groups["done"] == ((3 + told[0]) / 4 if fields.get("group") == "done" else None)


def test_a_job_whose_gpus_do_nothing_is_idle(world):
    w = world(idle_kill_minutes=40, on_idle="true")
    called = []
    w.service.hooks.queue = lambda name, jobs: called.extend(job.id for job in jobs)
    job_id = w.add(gpus=2)
    w.turn()
    w.claim(job_id, 100)

    def look(seconds, *busy):
        w.machine.shown = [makers.gpu(index, utilization=percent) for index, percent in enumerate(busy)]
        w.turn(seconds=seconds)
        w.probe()
        w.turn(seconds=1)
        return w.api(job_id)["idle_since"] is not None, len(called)

    assert look(10, 0.0, 0.0) == (False, 0), "it may still be loading"
    assert look(1700, 0.0, 4.9) == (False, 0)
    w.clock.wall += 86400
    assert look(10, 0.0, 4.9) == (False, 0), "the clock was set, or the machine slept"
    w.clock.wall -= 86400
    assert look(100, 0.0, 4.9) == (True, 1) and w.api(job_id)["stopping"] is None
    w.crash()
    w.service.hooks.queue = lambda name, jobs: called.extend(job.id for job in jobs)
    assert look(10, 0.0, 70.0) == (False, 1), "one of them works"
    assert look(10, 0.0, 0.0) == (False, 1)
    assert look(1900, 0.0, None) == (False, 1), "what is unknown is not idle"
    assert look(10, 0.0, 0.0) == (False, 1)
    assert look(1900, 0.0, 0.0) == (True, 1), "each job is told of once"
    assert look(600, 0.0, 0.0) == (True, 1) and w.api(job_id)["stopping"] == "idle"
    w.end(job_id, 143)
    ended = w.job(job_id).current
    assert ended.cause == "idle" and "its GPUs did nothing for 41m" in ended.cause_line and "idle_kill_minutes is 40" in ended.cause_line


# state.json, edited by others

def look_for_edit(w):
    return w.store.look_for_edit(w.service.housekeeping.apply_edit)


def edit(w, act):
    """What another program makes of state.json, and what the service makes of that; the state before it."""
    w.store.save_checkpoint()
    path = pathlib.Path(w.layout.state_file)
    body = json.loads(path.read_text())
    made = act(body)
    if made is None:
        path.unlink()
    else:
        path.write_text(made if isinstance(made, str) else json.dumps(made, indent=1))
    is_edited = look_for_edit(w)
    if is_edited:
        w.store.save_checkpoint()
    return is_edited


EDITS = [  # reason, what is written, (paused, paused GPUs) then
    ("paused, and nothing else is taken over", lambda body: {**body, "paused": True, "jobs": [], "seq": 9999, "next_number": 0,
                                                             "environments": {}, "groups": []}, (True, [])),
    ("by uuid and index, and twice", lambda body: {**body, "paused": True, "paused_gpus": ["1", 1, "GPU-1", 0]}, (True, [1, 0])),
    ("laid out anew", lambda body: json.dumps(body, indent=4), (False, [])), ("deleted", lambda body: None, (False, [])),
    ("neither", lambda body: {**body, "paused": "yes", "paused_gpus": "0"}, (False, [])),
    ("odd items", lambda body: {**body, "paused_gpus": [None, {}, 1]}, (False, [1])), ("an empty object", lambda body: {}, (False, [])),
]


@pytest.mark.parametrize("reason, act, wanted", EDITS, ids=[case[0] for case in EDITS])
def test_paused_may_be_edited(world, reason, act, wanted):
    w = world(gpus=2)
    job_id = w.run(w.add(), 100)
    waits = w.add(gpus=2)
    before = (dict(w.store.state.environments), w.store.state.next_number)
    assert edit(w, act)
    w.turn()
    status = w.service.answers.status()
    assert (status["is_paused"], [gpu["index"] for gpu in status["gpu_status"] if gpu["is_paused"]]) == (wanted[0], sorted(wanted[1]))
    assert (dict(w.store.state.environments), w.store.state.next_number) == before
    assert w.job(job_id).current.pid == 100 and w.job(waits).status == "pending"
    body = json.loads(pathlib.Path(w.layout.state_file).read_text())
    assert len(body["jobs"]) == 2 and body["paused"] is wanted[0] and body["paused_gpus"] == [f"GPU-{index}" for index in wanted[1]]
    assert not look_for_edit(w), "what the service wrote itself is no edit"
    w.crash()
    assert w.service.answers.status()["is_paused"] is wanted[0] and w.job(job_id).current.pid == 100


def test_only_what_was_edited_is_taken_over(world):
    """The file is older than the state: what it says of the rest was true then."""
    w = world(gpus=2)
    w.store.save_checkpoint()
    w.service.admission.set_paused(True, "ann")
    path = pathlib.Path(w.layout.state_file)
    path.write_text(json.dumps({**json.loads(path.read_text()), "paused_gpus": [0]}))
    assert look_for_edit(w)
    assert (w.store.state.paused, w.store.state.paused_gpus) == (True, ("GPU-0",))


def test_an_edit_that_stays_broken_is_written_anew(world):
    w = world(gpus=2)
    job_id = w.add()
    assert not edit(w, lambda body: "{") and not look_for_edit(w)
    assert look_for_edit(w) and any("is no JSON" in line for line in w.lines)
    w.store.save_checkpoint()
    assert json.loads(pathlib.Path(w.layout.state_file).read_text())["jobs"].keys() == {job_id}
    w.crash()
    assert w.job(job_id)


def test_an_edit_while_no_service_runs(world):
    w = world(gpus=2)
    w.store.save_checkpoint()
    path = pathlib.Path(w.layout.state_file)
    path.write_text(json.dumps({**json.loads(path.read_text()), "paused": True, "paused_gpus": [1]}))
    w.crash()
    assert (w.store.state.paused, w.store.state.paused_gpus) == (True, ("GPU-1",))


# The jobs file

class File:
    """A jobs file of a service."""

    def __init__(self, world, tmp_path, **config):
        self.path = tmp_path / "jobs.csv"
        self.w = world(jobs_file=str(self.path), **config)

    def write(self, *lines, end="\n", is_whole=True):
        """Write it, and have it read; return what was wrong with it."""
        self.path.write_text("\n".join(lines) + end)
        self.w.service.jobs_file.load(is_whole)
        return self.w.service.jobs_file.faults

    @property
    def jobs(self):
        return list(self.w.store.state.jobs.values())

    def end(self, code):
        """Let what waits run and end so."""
        self.w.turn()
        for job in self.jobs:
            if job.status == "running":
                fail(self.w, job.id, 100 + job.number, code)


@pytest.fixture
def rows(world, tmp_path):
    return lambda **config: File(world, tmp_path, **config)


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
    ("no such GPU", {}, "1,bad.py,,x,7", "of index 7"), ("no priority", {}, "urgent,bad.py", "priority"),
    ("not allowed", {"allowed_script_paths": ["/jobs"]}, "1,bad.py", "not below /jobs"),
]


@pytest.mark.parametrize("reason, config, line, says", BAD_ROWS, ids=[case[0] for case in BAD_ROWS])
def test_a_bad_row_is_told_once_and_the_others_load(rows, reason, config, line, says):
    f = rows(**config)
    for _ in range(2):
        fault, = f.write("1,/jobs/a.py", line, "1,/jobs/b.py")
        assert fault.startswith("line 2, ") and "bad.py" in fault and says in fault
        assert [job.command.split("/")[-1] for job in f.jobs] == ["a.py", "b.py"]
    assert len([one for one in f.w.lines if says in one]) == 1
    assert any(says in hint for hint in f.w.service.answers.status()["hints"])
    assert f.write("1,/jobs/a.py", "1,/jobs/b.py") == []


def test_a_last_line_without_a_newline_is_half_written_while_the_file_changes(rows):
    f = rows()
    assert f.write("1,a.py,,--lr 0.1", "1,b.py,,--lr 0.", end="", is_whole=False) == [] and len(f.jobs) == 1
    assert f.write("1,a.py,,--lr 0.1", "1,b.py,,--lr 0.25", end="") == []
    assert [job.command.split()[-1] for job in f.jobs] == ["0.1", "0.25"]


def test_rows_wait_for_room_in_the_queue(rows):
    f = rows(gpus=1, queue_limit=2)
    f.w.service.admission.set_paused(True, "ann")
    faults = f.write(*(f"1,{name}.py" for name in "abcd"))
    assert len(f.jobs) == 2
    assert [fault.partition(" is full")[0] for fault in faults] == ["line 3, 'c.py': the queue", "line 4, 'd.py': the queue"]
    f.w.service.admission.cancel(nexus.Choice([f.jobs[0].id], ("pending",)), ANN)
    assert len(f.write(*(f"1,{name}.py" for name in "abcd"))) == 1
    assert [job.command.split()[-1] for job in f.jobs if job.status == "pending"] == ["b.py", "c.py"]


def test_a_jobs_file_that_is_not_there_is_told_and_takes_nothing_back(rows):
    f = rows(gpus=1)
    f.write("1,a.py")
    f.end(1)
    f.path.unlink()
    f.w.service.jobs_file.load(True)
    assert "there is no file" in f.w.service.jobs_file.faults[0] and not f.w.service.health.check()["is_healthy"]
    f.write("1,a.py")
    assert len(f.jobs) == 1 and f.w.service.jobs_file.faults == []


def test_the_jobs_file_is_whole_when_it_has_not_changed_for_an_interval(rows):
    f = rows(jobs_file_interval_seconds=30)
    f.path.write_text("1,a.py")
    counts = []
    for _ in range(2):
        assert f.w.service.jobs_file.watch() == 30
        counts.append(len(f.jobs))
    assert counts == [0, 1]


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

def test_on_finish_runs_for_each_job_that_ended_while_it_was_configured(world, monkeypatch):
    """Also when the service died before it ran, and when the job is no longer kept."""
    calls = []
    monkeypatch.setattr(nexus, "run", lambda argv, timeout_s, environ=None: calls.append(environ["NEXUS_JOB_ID"]) or nexus.Completed(0, ""))
    w = world(history_limit=1)

    def end():
        job_id = w.add()
        w.service.admission.cancel(nexus.Choice([job_id], ("pending",)), ANN)
        w.turn(seconds=1)
        return job_id

    end()
    w.config = makers.config(history_limit=1, on_finish="notify me")
    w.crash()
    w.service.hooks.begin()
    ended = [end() for _ in range(3)]
    w.service.housekeeping.trim_history()
    assert w.service.hooks.look() == 0 and calls == ended[:1]
    w.crash()
    w.service.hooks.begin()
    while w.service.hooks.look() == 0:
        pass
    assert calls == [ended[0], ended[2]], "of what is no longer kept only by the service that heard of its end"
    w.crash()
    w.service.hooks.begin()
    assert w.service.hooks.look() is None and len(calls) == 2


# With Slurm.  tests/e2e/test_slurm.py has a real one; here it does what a real one does seldom.

class FakeSlurm(nexus.Slurm):
    """What Slurm has: {id: SlurmJob}.  `answer` is called at each sbatch, and raises, or returns words of refusal."""

    def __init__(self, world):
        self.world, self.service_id, self.jobs, self.next_id = world, world.store.service_id, {}, 1
        self.cancelled, self.submitted, self.is_down = [], [], False
        self.answer = lambda: ""
        self.query_partitions = lambda: ()

    def run_sbatch(self, argv):
        options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
        words = self.answer()
        self.submitted.append(options["job-name"])
        if words:
            return None, words
        one = nexus.SlurmJob(str(self.next_id), "PENDING", "Resources", key=options["comment"].rpartition(":")[2])
        self.jobs[one.id] = one
        self.next_id += 1
        return one.id, ""

    def query_jobs(self):
        if self.is_down:
            raise nexus.NexusError("unavailable", "Slurm does not answer: down")
        return list(self.jobs.values())

    def query_name(self):
        return "nx"

    def cancel(self, ids):
        self.cancelled += ids
        return ""

    def set(self, slurm_id, state, **fields):
        fields = {"nodes": "n1", "started_at": self.world.clock.wall, "ended_at": self.world.clock.wall, **fields}
        self.jobs[slurm_id] = nexus.replace(self.jobs[slurm_id], state=state, **fields)


@pytest.fixture
def cluster(world):
    """A world with a Slurm; go(): a while passes, in which all is asked and submitted that is to be."""
    w = world(launcher="slurm")
    w.slurm = FakeSlurm(w)

    def take_slurm():
        w.slurm.service_id, w.service.cluster.slurm = w.store.service_id, w.slurm
        w.service.take_in(w.service.cluster, ())

    def go(turns=6, seconds=6.0):
        for _ in range(turns):
            w.clock.pass_(seconds / turns)
            w.service.cluster.looked_at = float("-inf")
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


OURS = "0 0\n"                   # the text of a claim that keeps a late runner from beginning


def claim_of(w, job_id):
    """What is in the claim of a job's first attempt; None when there is none."""
    path = w.folder_of(job_id) / "attempt-1"
    return path.read_text() if path.exists() else None


def test_slurm_keeps_the_order_of_the_queue(cluster):
    """Jobs are submitted one by one: what comes late and is more urgent is the next."""
    w = cluster
    first, second = w.add(), w.add()
    w.turn()
    urgent = w.add(priority=0)
    assert w.api(second)["waiting_for"] == "the job before it is being submitted to Slurm"
    w.go()
    assert w.slurm.submitted == [f"nexus_{job_id}" for job_id in (first, urgent, second)]


def find_id(w, job_id):
    """sbatch's answer, which is lost."""
    w.slurm.answer = lambda: ""
    w.go()


def begin(w, job_id):
    w.slurm.set("1", "RUNNING")


def begin_and_end(w, job_id):
    result_of(w, job_id, 3)
    w.slurm.set("1", "COMPLETED")


def be_cancelled(w, job_id):
    w.slurm.set("1", "CANCELLED", nodes="")


def be_forgotten(w, job_id):
    del w.slurm.jobs["1"]


UNRECORDED = [  # reason, what Slurm does while the disk refuses, (status, its history, attempt, Slurm's id) once there is room
    ("it has it", find_id, ("pending", ["pending"], 1, "1")),
    ("it began", begin, ("running", ["pending", "running"], 1, "1")),
    ("it began and ended", begin_and_end, ("failed", ["pending", "running", "failed"], 1, "1")),
    ("it was cancelled there", be_cancelled, ("cancelled", ["pending", "cancelled"], 1, "1")),
    ("it was forgotten there", be_forgotten, ("pending", ["pending"], 2, "2")),
]


@pytest.mark.parametrize("reason, act, wanted", UNRECORDED, ids=[case[0] for case in UNRECORDED])
def test_what_the_disk_refuses_slurm_shows_again(cluster, monkeypatch, reason, act, wanted):
    """Meanwhile Slurm is asked on, but not in haste."""
    w, asked = cluster, []
    job_id = w.add()
    if act is find_id:
        w.slurm.answer = lambda: w.service.cluster.rest("later", "", True) or "job queue full"
    w.go()
    query, size = w.slurm.query_jobs, w.store.journal.size

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.store.journal, "append", full)
    monkeypatch.setattr(w.slurm, "query_jobs", lambda: asked.append(w.service.cluster.find_pause_s()) or query())
    act(w, job_id)
    w.go()
    assert w.api(job_id)["status"] == "pending" and w.store.journal.size == size
    assert len(asked) >= 6 and min(asked[2:]) > nexus.FAST_POLL_S
    w.slurm.is_down = True
    w.go(2)
    assert "Slurm does not answer: down" in [check["reading"] for check in w.service.health.check()["checks"] if check["name"] == "Slurm"]
    w.slurm.is_down = False
    monkeypatch.undo()
    w.go(10)
    job = w.api(job_id)
    assert (job["status"], [status for status, _ in job["status_history"]], job["attempt"], job["slurm_id"]) == wanted
    assert job["status"] != "failed" or (job["node"], job["exit_code"], job["started_at"] is not None) == ("n1", 3, True)


@pytest.mark.parametrize("reason, has_come, attempts", [("the answer alone was lost", True, 1), ("it never came there", False, 2)])
def test_slurm_answers_nothing_to_sbatch(cluster, reason, has_come, attempts):
    w = cluster

    def fail():
        w.slurm.answer = lambda: ""
        if has_come:
            w.slurm.jobs["9"] = nexus.SlurmJob("9", "PENDING", key=w.job(job_id).current.slurm_key)
        raise nexus.NexusError("unavailable", "Slurm does not answer: Socket timed out on send/recv operation")

    w.slurm.answer = fail
    job_id = w.add()
    w.go(12)
    assert (w.job(job_id).attempt, w.job(job_id).current.slurm_id) == (attempts, "9" if has_come else "1"), reason
    assert claim_of(w, job_id) == (None if has_come else OURS), "what comes late finds its attempt taken"
    assert w.slurm.cancelled == []


def test_slurm_has_what_nobody_wants_any_more(cluster):
    w = cluster
    ids = [w.add() for _ in range(3)]
    w.go()
    w.service.admission.cancel(nexus.Choice([ids[1]], (nexus.PENDING,)), ANN)
    assert w.job(ids[1]).status == "cancelled" and claim_of(w, ids[1]) == OURS
    w.go()
    assert set(w.slurm.cancelled) == {"2"}, "no other"
    w.slurm.set("1", "RUNNING")
    (w.folder_of(ids[0]) / "attempt-1").write_text("77 770\n")
    w.service.admission.cancel(nexus.Choice([ids[0]], (nexus.PENDING,)), ANN)         # it has begun, which is not seen yet
    assert w.api(ids[0])["status"] == "pending" and w.api(ids[0])["stopping"] == "killed"
    w.go()
    assert set(w.slurm.cancelled) == {"2", "1"}
    w.slurm.set("1", "CANCELLED")
    w.go(12, seconds=8)
    assert (w.job(ids[0]).status, w.job(ids[0]).current.cause) == ("cancelled", "killed")


def test_health_is_good_again_when_slurm_takes_jobs_again(cluster):
    w = cluster
    first = w.add()
    w.go()
    w.slurm.answer = lambda: "invalid partition specified: nope"
    second = w.add()
    w.go()
    assert not w.service.health.check()["is_healthy"]
    w.service.admission.cancel(nexus.Choice([second], (nexus.PENDING,)), ANN)
    result_of(w, first, 0)
    w.slurm.set(w.job(first).current.slurm_id, "COMPLETED")
    w.go(3)
    assert w.service.health.check()["is_healthy"] and w.service.answers.status()["slurm"]["trouble"] is None


def test_slurm_takes_only_so_many(cluster):
    w = cluster

    def limit():
        there = sum(one.state in ("PENDING", "RUNNING") for one in w.slurm.jobs.values())
        return "AssocMaxSubmitJobLimit; Job violates accounting/QOS policy" if there >= 3 else ""

    w.slurm.answer = limit
    ids = [w.add() for _ in range(10)]
    w.go()
    assert len(w.slurm.jobs) == 3 and w.job(ids[2]).current.slurm_id and not w.job(ids[4]).current.slurm_key
    words = "Slurm takes no more jobs now: AssocMaxSubmitJobLimit; Job violates accounting/QOS policy"
    assert w.api(ids[9])["waiting_for"] == words and w.api(ids[3])["waiting_for"] == f"it is being submitted to Slurm; {words}"
    assert w.service.answers.status()["slurm"]["trouble"] is None, "there is nothing to mend"
    w.go(40, seconds=600)
    asked = len(w.slurm.submitted)
    assert asked < 15 and w.job(ids[3]).attempt == 1, "it is asked less and less often"
    result_of(w, ids[0], 0)
    w.slurm.set(w.job(ids[0]).current.slurm_id, "COMPLETED")
    w.go(4)
    assert w.job(ids[0]).status == "completed" and w.job(ids[3]).current.slurm_id, "as soon as one has ended"
    w.service.admission.cancel(nexus.Choice([ids[4]], (nexus.PENDING,)), ANN)
    w.go(2)
    assert w.job(ids[4]).status == "cancelled", "the one that is refused"
    w.service.admission.set_paused(True, "ann")
    w.slurm.answer = lambda: ""
    w.go(60, seconds=600)
    assert not w.job(ids[5]).current.slurm_id
    w.service.admission.set_paused(False, "ann")
    w.go(60, seconds=600)
    assert all(w.job(job_id).current.slurm_id for job_id in ids[5:])


def test_slurm_job_is_killed_on_its_way(cluster):
    """Before its sbatch, and while that runs."""
    w = cluster
    job_id = w.add()
    w.turn()                                                # intended, and with the thread
    w.service.admission.cancel(nexus.Choice([job_id], (nexus.PENDING,)), ANN)
    assert w.api(job_id)["status"] == "pending" and w.api(job_id)["stopping"] == "killed"
    w.go()
    assert (w.job(job_id).status, w.job(job_id).current.cause, w.slurm.submitted) == ("cancelled", "killed", [])
    job_id = w.add()
    w.slurm.answer = lambda: (w.service.admission.cancel(nexus.Choice([job_id], (nexus.PENDING,)), ANN), "")[1]
    w.go()
    assert set(w.slurm.cancelled) == {"1"}
    w.slurm.set("1", "CANCELLED", nodes="")
    w.go()
    assert w.job(job_id).status == "cancelled"


def test_slurm_is_given_the_next_jobs_after_an_exception(cluster, monkeypatch):
    w = cluster
    job_id = w.add()
    monkeypatch.setattr(nexus, "build_sbatch", lambda *_: 1 / 0)
    w.turn()
    with pytest.raises(ZeroDivisionError):
        w.service.cluster.step()
    monkeypatch.undo()
    w.go(12)
    assert w.job(job_id).current.slurm_id == "1" and w.job(job_id).attempt == 2


def test_slurm_refuses_what_this_one_asks_for(cluster):
    w = cluster
    w.slurm.answer = lambda: "something that nobody has heard of"
    job_id = w.add()
    w.go(40, seconds=200)
    assert w.job(job_id).status == "failed" and len(w.job(job_id).attempts) == 5, "that may pass, and is tried again for a while"


# A node whose line the test itself is

class FakeLine:
    """A connection to a node's agent, which keeps what it is asked."""

    def __init__(self):
        self.orders = []                # of all questions, each once

    def ask(self, question):
        self.orders += [one.order for one in question["jobs"] if one.order and one.order not in self.orders]

    def close(self):
        pass


@pytest.fixture
def head(world, monkeypatch):
    """A world whose node n1 has one GPU, and is well."""
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())

    def make(nodes=("n1",), **config):
        w = world(gpus=config.pop("gpus", 0), **config)
        for name in nodes:
            w.service.pool.add_node(nexus.NodeConfig(name, "10.0.0.5"), "ann")
            connect(w, name)
        return w

    def connect(w, name="n1"):
        node = w.service.pool.nodes[name]
        node.line, node.error, node.folders = FakeLine(), None, {"/": True}
        node.latest = nexus.Question(0, (), ())
        node.hello = nexus.Hello(f"boot {name}", f"boot-{name}", "3.11.7", (), "/nexus.py", 4)
        node.gpus = (nexus.replace(makers.gpu(0), node=name, uuid=f"{name}/G0"),)
        return node

    make.connect = connect
    return make


def report(job, result=None, log_sizes=(0, 0), logs=(b"", b""), **look):
    """What a node tells of a job."""
    seen = nexus.Progress(**({"result": nexus.Result(runtime_seconds=1.0, **result), "is_over": True} if result else {}), **look)
    return nexus.JobReport(job.attempt_key, seen, log_sizes, logs=logs)


def news(w, *reports, name="n1"):
    """Have a node reply to its latest question."""
    node = w.service.pool.nodes[name]
    node.latest = nexus.Question(node.latest.number, node.list_wanted(), ("/",))
    node.take(node.latest, nexus.Report(node.latest.number, 0.0, reports, {"/": True}, "", None), {})


def test_news_that_comes_while_the_disk_is_full_is_not_lost(head, monkeypatch):
    w = head()
    job_id = w.add()
    w.turn()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.store.journal, "append", full)
    news(w, report(w.job(job_id), requeue="bob took GPU 0 first"))
    w.turn()
    w.turn()
    monkeypatch.undo()
    assert w.job(job_id).status == "running"
    w.turn()
    assert w.job(job_id).status == "pending" and w.job(job_id).attempts[-1].cause_line == "n1: bob took GPU 0 first"


def test_a_node_is_lost_between_the_plan_and_the_order(head, monkeypatch):
    """The job goes back to the queue, and there again when it can."""
    w = head()
    job_id, node = w.add(), w.service.pool.nodes["n1"]
    start = node.start

    def lose(job, submitted):
        node.line = None
        return start(job, submitted)

    monkeypatch.setattr(node, "start", lose)
    w.turn()
    w.turn()
    assert w.job(job_id).status == "pending" and w.job(job_id).attempts[-1].cause_line == "n1: it cannot be reached"
    assert not node.list_wanted()
    monkeypatch.undo()
    line = head.connect(w).line
    w.turn(seconds=10)
    w.turn()
    assert w.job(job_id).status == "running" and len(line.orders) == 1


@pytest.mark.parametrize("error, status", [
    (FileNotFoundError(2, "No such file or directory"), "failed"), (nexus.NexusError("forbidden", "it may not be run here"), "failed"),
    (BlockingIOError(11, "Resource temporarily unavailable"), "failed"), (nexus.NexusError("unavailable", "no route"), "pending")], ids=str)
def test_what_keeps_an_order_from_being_made(head, monkeypatch, error, status):
    """Whatever it fails at, the job does not wait for ever."""
    w = head()
    job_id = w.add()
    monkeypatch.setattr(w.service.starter, "make_node_order", lambda *_: (_ for _ in ()).throw(error))
    for _ in range(3):
        w.turn()
    assert w.job(job_id).status == status and str(error) in w.job(job_id).attempts[-1].cause_line


def test_a_job_cannot_be_begun_there(head):
    """It is tried as often as one here."""
    w = head(launch_attempts=2)
    job_id = w.add()
    for failures in (1, 2):
        w.turn()
        assert w.job(job_id).status == "running"
        news(w, report(w.job(job_id), {"exit_code": None, "cause": "launch", "cause_line": "/logs: full", "may_pass": True}))
        w.turn()
        w.turn()
        assert w.job(job_id).status == ("pending" if failures == 1 else "failed")
        w.turn(seconds=60)


def test_a_node_that_is_added_again_as_it_goes_stays(head, monkeypatch):
    w = head()
    record = w.service.pool.set_node

    def add_meanwhile(name, known):
        monkeypatch.setattr(w.service.pool, "set_node", record)
        adding.start()
        adding.join(0.2)
        record(name, known)

    adding = threading.Thread(target=lambda: w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann"))
    w.service.pool.remove_node("n1", False, "ann")
    news(w)
    monkeypatch.setattr(w.service.pool, "set_node", add_meanwhile)
    w.turn()
    adding.join(live.PATIENCE_S)
    assert not w.service.pool.nodes["n1"].is_ended and list(w.store.state.nodes) == ["n1"]


def test_what_a_node_could_not_take_runs_here_when_that_is_gone(head):
    w = head(gpus=1)
    job_id = w.add()
    w.service.admission.set_paused(True, "ann")
    w.store.update(lambda state: (yield nexus.change_job(state.jobs[job_id], excluded_nodes=(("n1", "there is no /data"),))))
    w.service.pool.remove_node("n1", True, "ann")
    news(w)
    w.turn()
    w.service.admission.set_paused(False, "ann")
    w.turn()
    assert not w.service.pool.nodes and w.job(job_id).status == "running"


@pytest.mark.parametrize("now", [(), (nexus.NodeConfig("n1", "10.0.0.77"),)], ids=["gone", "elsewhere"])
def test_a_node_that_config_toml_has_lost_is_seen_to_until_its_jobs_are_over(head, now):
    w = head(nodes=())

    def begin(*nodes):
        w.service.pool.config = nexus.replace(w.service.config, nodes=nodes)
        w.service.pool.nodes = {}
        w.service.pool.begin_nodes()

    begin(nexus.NodeConfig("n1", "10.0.0.5"))
    head.connect(w)
    job_id = w.add()
    w.turn()
    begin(*now)
    node = head.connect(w)
    assert (node.address.host, node.is_leaving) == ("10.0.0.5", True)
    news(w, report(w.job(job_id), {"exit_code": 0}))
    w.turn()
    w.turn()
    assert w.job(job_id).status == "completed" and "n1" in w.service.pool.nodes, "it does not know"
    news(w)
    w.turn()
    assert not w.service.pool.nodes and w.store.state.nodes == {}
    begin(*now)
    assert [node.address.host for node in w.service.pool.nodes.values()] == [config.host for config in now]


def test_pauses_of_node_gpus_last(head):
    """The head restarts, and somebody else edits the list, before the node is reached again; by then `n1:0` is a name, too."""
    w = head(gpus=2)
    w.service.gpu_watch.set_gpu_paused("n1:0", True, "ann")
    w.crash()
    w.service.pool.begin_nodes()
    edit(w, lambda body: {**body, "paused_gpus": [*body["paused_gpus"], 1]})
    assert w.store.state.paused_gpus == ("n1/G0", "GPU-1")
    head.connect(w)
    edit(w, lambda body: {**body, "paused_gpus": [0, "n1:0", "n2:0", "n2/G0"]})
    assert w.store.state.paused_gpus == ("GPU-0", "n1/G0")
    assert [gpu.place for gpu in w.service.gpu_watch.see_gpus(w.store.state) if gpu.is_paused] == ["0", "n1:0"]


def test_who_else_reads_the_fifo_does_not_stop_the_loop(world, monkeypatch):
    events = world(gpus=0).service.events
    os.write(events.source, b"start abc 1 2 3 4\n")
    read = os.read
    monkeypatch.setattr(os, "read", lambda handle, size: (read(handle, size), read(handle, size))[1])
    assert events.wait(60) == [], "a read by the other one comes first: then there is nothing left"


PARENTS = [  # reason, what the job has that submits, --env, what the new one gets
    ("nexus's own", {"NEXUS_JOB_PORT": "7"}, {}, {}),
    ("an older nexus's", {}, {}, {}),
    ("one that was set", {"NEXUS_JOB_PORT": "7"}, {"MASTER_PORT": "7"}, {"MASTER_PORT": "7"}),
    ("another", {"NEXUS_JOB_PORT": "9"}, {}, {"MASTER_PORT": "7", "PET_MASTER_PORT": "7"}),
    ("another of the two", {"NEXUS_JOB_PORT": "7", "MASTER_PORT": "8"}, {}, {"MASTER_PORT": "8"}),
]


@pytest.mark.parametrize("reason, parents, added, expected", PARENTS, ids=[case[0] for case in PARENTS])
def test_a_job_that_a_job_submits_does_not_get_its_port(world, reason, parents, added, expected):
    base = {"NEXUS_JOB_ID": "abc", "MASTER_PORT": "7", "PET_MASTER_PORT": "7", "A": "1", **parents}
    assert world(gpus=0).service.drafts.make_environment(base, added)[1] == {"A": "1", **expected}


def test_a_preemptible_job_makes_room_and_goes_on_later(world):
    w = world(gpus=1)
    first = w.add(gpus=1, preemptible=True)
    w.turn()
    w.claim(first, 100)
    second = w.add(gpus=1)
    assert f"job {first} is preemptible: it may have to end in 1m or later" in w.service.answers.explain(second, w.service.owner)["facts"]
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

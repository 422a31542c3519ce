"""A service that is driven turn by turn, on a machine and a clock that the test moves, with crashes in between.

    def test_it(world):                             # the fixture makes worlds in the folder of the test
        w = world(gpus=1)
        job_id = w.run(w.add("python train.py"), 100)       # it runs with the pid 100, as a job.sh has said
        w.end(job_id, 1)
        assert w.job(job_id).current.cause == "exit"
        w.crash()                                   # another service, which finds what is on disk
"""

import json
import logging
import os
import pathlib
import threading
import types

import live
import makers

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

    def new_job_id(self, taken, is_one_of_many=False):
        return next(a + b + c for a in "abcdef" for b in "abcdefgh" for c in "abcdefgh" if a + b + c not in taken)

ANN = nexus.Identity("ann", "ann")


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

    def find_catchers(self, processes, number):
        return set()

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

    cpu_count = 4

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


class BrokenLeases(nexus.Leases):
    """Leases that nobody else has; while `error` is set, none can be taken."""

    def __init__(self):
        super().__init__(nexus.DISK, "/tmp/none", "0-a")
        self.error = nexus.NexusError("unavailable", "/tmp/nexus-leases is not a folder", hint="who: fuser")

    def take(self, job_id, uuids):
        if self.error:
            raise self.error
        self.held[job_id] = []

    def find_holders(self, uuids, used=()):
        return {}


def is_over(thread):
    try:
        thread.join(live.PATIENCE_S)
    except RuntimeError:                # it is only just being started
        return False
    return not thread.is_alive()


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
        return self.service.job_serializer.describe_jobs([self.job(job_id)])[0]

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
            self.turn(f"end {job_id} {job.attempt} {code} {round(more.get('runtime_seconds', 2.5) * 100)}")
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


def submit(w, *jobs, key=None, **shared):
    bodies = [{"command": "python train.py", "cwd": "/", **shared, **one} for one in jobs or ({},)]
    return w.service.admission.admit(nexus.parse_submissions(bodies), ANN, key)


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


class FakeLine:
    """A connection to a node's agent, which keeps what it is asked."""

    def __init__(self):
        self.orders = []                # of all questions, each once

    def ask(self, question):
        self.orders += [one.order for one in question["jobs"] if one.order and one.order not in self.orders]

    def close(self):
        pass


def report(job, result=None, log_sizes=(0, 0), logs=(b"", b""), **look):
    """What a node tells of a job."""
    seen = nexus.Progress(**({"result": nexus.Result(runtime_seconds=1.0, **result), "is_over": True} if result else {}), **look)
    return nexus.JobReport(job.attempt_key, seen, log_sizes, logs=logs)


def news(w, *reports, name="n1"):
    """Have a node reply to its latest question."""
    node = w.service.pool.nodes[name]
    node.questions.latest = nexus.Question(node.questions.latest.number, node.questions.list_wanted(), ("/",))
    node.take(node.questions.latest, nexus.Report(node.questions.latest.number, 0.0, reports, {"/": True}, "", None), {})

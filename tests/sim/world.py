"""Machines as values: their clocks, processes, GPUs and disks, on which nexus runs without a thread, a fork or a sleep.

What nexus would leave to a thread is a greenlet here (Task): it runs until it waits, and the history says when it goes
on.  The classes stand in for those of nexus of the same names, and are made from them.
"""
from __future__ import annotations

import logging
import os
import random
import signal
import time
import traceback
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

import greenlet
import versions
from command import BUSY_PERCENT, Command
from disk import FileSystem, OpenFile, SimDisk
from runner import Settings, run_job

import nexus

if TYPE_CHECKING:
    from judges.judge import Judge

real_run, find_user = nexus.run, nexus.find_user
HOME_FOLDER = "/home/ann"
WORK_FOLDER = f"{HOME_FOLDER}/work"
LEASE_FOLDER = "/run/lock/nexus-leases"
REAL_UID = os.geteuid()
BEGIN = 1_700_000_000.0             # the wall clock at the begin of each history
SIGKILL, SIGSTOP, SIGCONT = 9, 19, 18


class Crash(BaseException):
    """A process was killed: nothing of it goes on."""


class Violation(Exception):
    """What nexus promises does not hold."""


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Task:
    """Code of a process that waits now and then: its loop, or one of its workers."""

    def __init__(self, process: SimProcess, doing: str, run: Callable[[], object]) -> None:
        self.process, self.doing = process, doing
        self.is_ready: Callable[[], bool] = lambda: True
        self.until = 0.0                        # it goes on then in any case
        self.is_over = False
        self.greenlet = greenlet.greenlet(lambda: self.run(run), process.world.hub)
        process.tasks.append(self)

    def run(self, run: Callable[[], object]) -> None:
        try:
            run()
        except Crash:
            pass
        except Exception as error:
            self.process.world.violations.append(f"{self.doing} of {self.process.name} ends: {describe_error(error)}")
            self.process.world.tracebacks.append(traceback.format_exc())
        finally:
            self.is_over = True

    def is_due(self) -> bool:
        return not self.is_over and (self.process.world.now >= self.until or self.is_ready())

    def go_on(self) -> None:
        """Run until it waits again, or is over."""
        if not self.is_over:
            with self.process.being_run():
                self.greenlet.switch()
        if self.is_over and self in self.process.tasks:
            self.process.tasks.remove(self)
            if self.doing == "main":
                self.process.end(0)

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            if not self.greenlet:               # it has not begun
                return
            with self.process.being_run():
                self.greenlet.parent = greenlet.getcurrent()        # where it goes on when that is done
                self.greenlet.throw(Crash())


class SimProcess:
    """A process: its place in the process table, and what it has open."""

    def __init__(self, host: Host, name: str, parent: int = 1, session: int = 0, mark: str = "", role: str = "",
                 user: str = "") -> None:
        self.world, self.host, self.name, self.parent, self.mark, self.role = host.world, host, name, parent, mark, role
        self.user = user                        # of somebody else's
        self.uid = self.world.current.uid if self.world.current else REAL_UID
        self.pid, self.started = host.next_pid(), host.uptime_cs()
        self.session = session or self.pid
        self.state, self.is_alive, self.exit_code = "S", True, 0
        self.version = "this"                   # of its nexus.py: see versions.py
        self.looked_at = self.ended_at = 0.0    # when its loop began to look last
        self.handles: dict[int, OpenFile] = {}
        self.is_forgotten = False               # a job.sh whose launch a damaged disk has lost
        self.slow_until = 0.0                   # it gets no time before that
        self.crash_in = 0                       # after so many effects it is killed; 0: it is not
        self.tasks: list[Task] = []
        self.disk = SimDisk(self)
        self.clock = SimClock(self)
        self.events: list[SimEvents] = []
        self.command: Command | None = None
        self.on_end: list[Callable[[], None]] = []
        host.processes[self.pid] = self

    def check_alive(self) -> None:
        if not self.is_alive:
            raise Crash

    def count_effect(self) -> None:
        """Something is changed outside this process: where it is to be killed, it is not."""
        self.check_alive()
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                self.end(128 + SIGKILL)
                raise Crash

    def being_run(self) -> Any:
        return _Running(self)

    def add_handle(self, opened: OpenFile, least: int = 3) -> int:
        handle = least
        while handle in self.handles:
            handle += 1
        self.handles[handle] = opened
        opened.handles += 1
        return handle

    def end(self, code: int) -> None:
        """It is gone, with what it had open."""
        if not self.is_alive:
            return
        self.is_alive, self.exit_code, self.ended_at = False, code, self.world.now
        for handle in list(self.handles):
            self.disk.close(handle)
        self.host.processes.pop(self.pid, None)
        if self.mark or self.role:
            self.host.former[self.pid] = self
        for act in self.on_end:
            act()
        current = greenlet.getcurrent()
        for task in list(self.tasks):
            if task.greenlet is not current:
                task.end()
        self.tasks = [task for task in self.tasks if task.greenlet is current]

    def hear(self, number: int) -> None:
        """A signal."""
        if number == SIGKILL and not self.command:
            self.end(128 + SIGKILL)
        elif number in (SIGSTOP, SIGCONT):
            self.state = "T" if number == SIGSTOP else "S"
        elif self.command:
            self.command.hear(self, number)
        elif self.role == "service":
            self.end(128 + number)

    def show(self) -> nexus.Process:
        return nexus.Process(self.pid, self.started, self.parent, self.session, self.state, 1, name=self.name)


class _Running:
    """`with`: this process is the one that runs; what it asks the operating system is about its machine."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process

    def __enter__(self) -> None:
        self.former, self.process.world.current = self.process.world.current, self.process

    def __exit__(self, *_: object) -> None:
        self.process.world.current = self.former


class Run:
    """One time that a job's command was begun: the truth, which nexus must tell."""

    def __init__(self, job: nexus.Job, folder: str, process: SimProcess, runner: SimProcess, home: str) -> None:
        self.job, self.folder, self.process, self.runner, self.home = job, folder, process, runner, home
        self.key = f"{process.host.name}:{folder}/{job.attempt}"
        self.shares = dict(zip(job.current.gpu_uuids, nexus.list_shares(job)))
        self.launched_at = runner.host.booted_at + runner.started / 100       # from then on its time counts
        self.began_at = process.world.now
        self.ended_at: float | None = None      # of its command; what it has left may live on
        self.code: int | None = None            # None: nobody has waited for it
        self.was_cut = False                    # by a power cut, or as its job.sh was killed from outside
        self.is_lost = False                    # a power cut took what its runner left, and a flipped bit may have taken its start

    @property
    def left(self) -> list[SimProcess]:
        """Its processes that live."""
        return [one for one in self.process.host.processes.values() if one.mark == self.process.mark]


class Notice:
    """A hook that was run."""

    def __init__(self, process: SimProcess, hook: str, facts: Mapping[str, str]) -> None:
        self.process, self.hook, self.facts = process, hook, facts
        self.home, self.at = process.home.path, process.world.now       # type: ignore[attr-defined]


MODELS = (("NVIDIA H100", 81559.0), ("NVIDIA A100-SXM4-40GB", 40960.0), ("NVIDIA GeForce RTX 3090", 24576.0))
SLICES = (("1g.10gb", 9728.0), ("2g.20gb", 19968.0), ("1g.10gb", 9728.0))       # of a card that is cut


class Card:
    def __init__(self, host: str, number: int) -> None:
        self.uuid, self.index = f"GPU-{host}-{number}", number
        self.is_gone = False
        self.is_bad = False                             # commands that use CUDA fail on it
        self.foreign: SimProcess | None = None          # somebody else's process on it
        self.name, self.memory_mib = MODELS[0]
        self.slice: int | None = None
        self.profile: str | None = None
        self.mode: str | None = None                    # its compute mode; None: Default
        self.load = BUSY_PERCENT                        # when something computes there

    @property
    def is_used(self) -> bool:
        """Whether somebody else computes there."""
        return self.foreign is not None and self.foreign.is_alive

    @property
    def place(self) -> str:
        return str(self.index) if self.slice is None else f"{self.index}.{self.slice}"

    def cut(self) -> list[Card]:
        """The slices of it that are there in its place."""
        slices = []
        for number, (profile, memory_mib) in enumerate(SLICES):
            part = Card("", self.index)
            part.uuid, part.slice, part.profile, part.memory_mib = f"MIG{self.uuid[3:]}-{number}", number, profile, memory_mib
            part.name = f"{self.name} MIG {profile}"
            slices.append(part)
        return slices


class Host:
    """A machine."""

    def __init__(self, world: World, name: str, card_count: int, version: str = "this") -> None:
        self.world, self.name, self.boots, self.booted_at, self.wall_offset = world, name, 0, world.now - 1000.0, 0.0
        self.files = FileSystem(self.wall)
        self.cards = [Card(name, number) for number in range(card_count)]
        self.last_pid = 100
        self.smi_error, self.smi_s = "", 0.0        # what nvidia-smi says, and how long it takes
        self.busy_at: dict[str, list[float]] = {}   # {uuid of a card: when its driver said that it is used}
        self.fifos: dict[str, SimEvents] = {}
        self.processes: dict[int, SimProcess] = {}
        self.former: dict[int, SimProcess] = {}
        self.lines: list[SimLine] = []
        self.is_reachable = True
        self.launch_error = 0
        init = SimProcess(self, "init")
        for folder in (WORK_FOLDER, f"{HOME_FOLDER}/.nexus", f"{HOME_FOLDER}/.nexus-b", "/run/lock", "/tmp",
                       f"{HOME_FOLDER}/.nexus/agent"):
            init.disk.makedirs(folder)
        init.disk.chmod("/run/lock", 0o1777)
        init.disk.makedirs(os.path.dirname(versions.CODE))
        with init.being_run():
            versions.copy_code(init, version)
        for _, file in self.files.walk():
            file.sync()

    @property
    def boot_id(self) -> str:
        return f"{self.boots:08x}-0000-4000-8000-{nexus.hash_text(self.name)[:12]}"

    def wall(self) -> float:
        return BEGIN + self.world.now + self.wall_offset

    def uptime_cs(self) -> int:
        return int((self.world.now - self.booted_at) * 100)

    def next_pid(self) -> int:
        """Pids come again, soon."""
        while True:
            self.last_pid = self.last_pid + 1 if self.last_pid < 400 else 100
            if self.last_pid not in self.processes:
                return self.last_pid

    def cut_power(self) -> None:
        """Everything stops at once; the machine boots again."""
        for process in list(self.processes.values()):
            process.end(128 + SIGKILL)
        for run in self.world.runs:
            if run.process.host is self:
                run.was_cut = True
        self.files.cut_power(self.world.rnd)
        self.files.is_full = self.files.is_read_only = False
        self.fifos, self.former, self.boots, self.booted_at = {}, {}, self.boots + 1, self.world.now
        self.last_pid, self.lines = 100, []
        SimProcess(self, "init")

    def list_gpus(self) -> list[nexus.Gpu]:
        gpus, now = [], self.world.now
        for card in self.cards:
            ours = [one for run in self.world.runs if card.uuid in run.shares and run.process.host is self for one in run.left]
            processes = [nexus.GpuProcess(one.pid, 1000.0) for one in ours]
            is_busy = any(not one.command or one.command.is_busy(now) for one in ours)
            if card.is_used and card.foreign:
                processes.append(nexus.GpuProcess(card.foreign.pid, 5000.0))
                is_busy = True
            if is_busy or card.slice is not None:           # of a slice it is not known
                self.busy_at.setdefault(card.uuid, []).append(now)
            used = 10.0 + sum(one.memory_mib or 0.0 for one in processes)
            load = None if card.slice is not None else card.load if is_busy else 0.0
            gpus.append(nexus.Gpu(card.index, card.uuid, card.name, card.memory_mib, used, load,
                                  is_mig=card.slice is not None, slice=card.slice, profile=card.profile,
                                  fault="the driver does not show it" if card.is_gone else None,
                                  compute_mode=card.mode, processes=tuple(processes)))
        return gpus


class SimClock(nexus.Clock):
    """A clock that is only moved."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process

    def now(self) -> float:             # type: ignore[override]
        return self.process.host.wall()

    def monotonic(self) -> float:       # type: ignore[override]
        return self.process.world.now

    def sleep(self, seconds: float) -> None:            # type: ignore[override]
        self.process.world.park(lambda: False, seconds)

    def new_token(self) -> str:
        return f"{self.process.world.names.getrandbits(192):048x}"

    def new_job_id(self, taken: Mapping[str, Any], is_one_of_many: bool = False) -> str:
        world = self.process.world
        while True:
            job_id = "".join(world.names.choices(nexus.ID_LETTERS, k=3))
            if not world.job_ids & {*nexus.list_case_variants(job_id)}:
                world.job_ids.add(job_id)
                return job_id


class Flag:
    """A threading.Event, for which a Task waits."""

    def __init__(self, world: World) -> None:
        self.world, self.value = world, False

    def set(self) -> None:
        self.value = True

    def clear(self) -> None:
        self.value = False

    def is_set(self) -> bool:
        return self.value

    def wait(self, timeout: float | None = None) -> bool:
        if not self.value:
            self.world.park(self.is_set, float("inf") if timeout is None else timeout)
        return self.value


class SimWorker(nexus.Worker):
    """A worker whose thread is a Task."""

    def __init__(self, loop: nexus.HostLoop, doing: str, step: Callable[[], float | None]) -> None:
        process = current().process_of(loop)
        self.loop, self.doing, self.step, self.is_ended = loop, doing, step, False
        self.wanted: Any = Flag(process.world)
        self.thread: Any = types.SimpleNamespace(start=lambda: Task(process, doing, self.run))


class SimEvents(nexus.RunnerEvents):
    """The FIFO of a service or an agent."""

    def __init__(self, path: str, log: logging.Logger) -> None:
        self.received, self.process, self.queue = b"", current().running, deque[bytes]()
        self.process.host.fifos[path] = self
        self.process.events.append(self)

    def wake(self) -> None:
        self.queue.append(b"")

    def read(self, timeout_s: float) -> list[bytes]:
        self.process.looked_at = self.process.world.now
        self.process.world.park(lambda: bool(self.queue), timeout_s)
        lines = list(self.queue)
        self.queue.clear()
        return lines


class SimProcesses(nexus.Processes):
    """The process table of a machine."""

    def __init__(self) -> None:
        self.process = current().running
        self.host = self.process.host
        self.uid, self.boot_id = os.geteuid(), self.host.boot_id

    def find(self, pid: int) -> nexus.Process | None:
        found = self.host.processes.get(pid)
        return found.show() if found else None

    def is_alive(self, pid: int | None, started: int | None) -> bool:
        found = self.host.processes.get(pid or 0)
        return found is not None and found.started == started

    def is_gone(self, process: nexus.Process) -> bool:
        return False

    def describe_stuck(self, process: nexus.Process) -> str | None:
        return None

    def find_age_s(self, started: int) -> float:
        return (self.host.uptime_cs() - started) / 100

    def list_pids(self) -> set[int]:
        return set(self.host.processes)

    def read(self, pids: Any) -> list[nexus.Process]:
        found = [self.host.processes[pid].show() for pid in pids if pid in self.host.processes]
        return sorted(found, key=lambda process: (process.started, process.pid))

    def read_mark(self, process: nexus.Process) -> str | None:
        found = self.host.processes.get(process.pid)
        return (found.role or found.mark or None) if found else None

    def find_members(self, jobs: Sequence[nexus.Job], over: Any = (), *, others: Sequence[nexus.Job] = (),
                     is_refresh: bool = False) -> dict[str, list[nexus.Process]]:
        return {job.id: self.read([process.pid for process in self.host.processes.values()
                                   if process.mark == f"{job.id} {job.current.nonce}"]) for job in jobs}

    def find_runners(self, script: str, attempt: int) -> list[nexus.Process]:
        return self.read([process.pid for process in self.host.processes.values()
                          if process.role == f"runner {script} {attempt}"])

    def set_aside(self, pid: int) -> None:
        pass

    def locate_runners(self, jobs: Any) -> Any:
        raise NotImplementedError           # only find_members() asks

    def find_catchers(self, processes: Any, number: int) -> set[int]:
        found = [self.host.processes.get(process.pid) for process in processes]
        return {one.pid for one in found if one and one.command and one.command.handles(number)}

    def find_readers(self, processes: Any) -> set[int]:
        return set()

    def forget(self, alive: Any) -> None:
        pass

    def owner_of(self, pid: int) -> str | None:
        found = self.host.processes.get(pid) or self.host.former.get(pid)
        return found.mark.partition(" ")[0] or None if found else None

    def send(self, process: nexus.Process, number: int) -> None:
        self.process.count_effect()
        if self.is_alive(process.pid, process.started):
            self.host.processes[process.pid].hear(number)


class SimGpus(nexus.GpuSource):
    """The driver of a machine."""
    program, slow_hint = "nvidia-smi", "see dmesg"

    def query_gpus(self, earlier: Mapping[str, nexus.Gpu]) -> list[nexus.Gpu]:
        host = current().running.host
        if host.smi_s:
            current().park(lambda: False, host.smi_s)
        if host.smi_error:
            raise nexus.NexusError("unavailable", host.smi_error, "see dmesg")
        return host.list_gpus()


class SimScreen(nexus.Screen):
    """GNU screen: it keeps a session for each job, and dies now and then."""

    def prepare(self) -> None:
        pass

    def list_sessions(self) -> dict[str, str]:
        return {}


def measure_memory(psutil: Any, processes: Sequence[nexus.Process]) -> float:
    """MiB of host memory that processes use."""
    found = [current().running.host.processes.get(process.pid) for process in processes]
    return sum(one.command.memory_mib for one in found if one and one.command)


def find_process_user(pid: int) -> str:
    """Who computes on a GPU: one of the world's users, or bob."""
    found = current().running.host.processes.get(pid)
    return current().users.get(found.uid, "bob") if found else "bob"


PSUTIL = types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(total=2**36, available=2**35), cpu_percent=lambda: 1.0)


class SimMachine(nexus.Machine):
    """A machine as the service or an agent uses it."""

    cpu_count = 4

    def __init__(self, config: nexus.Config, layout: nexus.Layout, disk: nexus.Disk, service_id: str) -> None:
        self.process = current().running
        self.process.world.machines_begun_at.append(self.process.world.now)
        is_slurm = config.jobs.launcher == "slurm"
        self.is_mock, self.uid, self.processes, self.psutil = False, self.process.uid, SimProcesses(), PSUTIL
        self.gpu_source = nexus.MockGpus(0) if is_slurm else SimGpus()
        folder = nexus.find_lease_folder(disk, config.gpu)
        self.leases = None if is_slurm else nexus.Leases(disk, folder, service_id)
        kind = SimScreen if config.jobs.launcher == "screen" else nexus.Direct
        self.launcher, self.launcher_error = kind(disk, layout), None
        self.terminal_error = None if config.jobs.launcher == "screen" else 'launcher is "direct"'
        self.children: dict[str, Any] = {}
        self.boot_id, self.environ, self.home = self.process.host.boot_id, {}, layout.home
        self.look_for_programs()

    def launch(self, job: nexus.Job, script: str, handles: Sequence[int] = ()) -> str | None:
        self.process.count_effect()
        host = self.process.host
        if host.launch_error:
            raise OSError(host.launch_error, os.strerror(host.launch_error), "bash")
        mark, parent = f"{job.id} {job.current.nonce}", self.process.pid
        screen = None
        if self.launcher.session_prefix:
            screen = SimProcess(host, "screen", parent)
        runner = SimProcess(host, "bash", screen.pid if screen else parent, role=f"runner {script} {job.attempt}")
        for handle in handles:
            runner.add_handle(self.process.handles[handle], handle)
        if screen:
            runner.on_end.append(lambda: screen.end(0))
        self.children[job.id] = child = screen or runner
        settings = Settings.read(self.process.disk, script)
        steps = run_job(runner, settings, job, mark, self.home)
        host.world.runners.append((runner, steps))
        return f"{child.pid}.{self.launcher.session_prefix}{job.id}" if screen else None

    def look_for_programs(self) -> None:
        self.places = {"bash": "/usr/bin/bash"}

    def find_job_python(self, path: str, now: float) -> str | None:
        return None

    def count_oom_kills(self) -> int | None:
        return 0

    def is_going_down(self) -> bool:
        return False

    def reap(self) -> list[str]:
        ended = [job_id for job_id, child in self.children.items() if not child.is_alive]
        self.children = {job_id: child for job_id, child in self.children.items() if child.is_alive}
        return ended


class SimStore(nexus.Store):
    """A store that keeps what it was, for the comparison with the disk."""

    def __init__(self, layout: nexus.Layout, clock: nexus.Clock, disk: nexus.Disk, log: logging.Logger) -> None:
        self.states: deque[nexus.State] = deque(maxlen=200)
        super().__init__(layout, clock, disk, log)
        self.process = current().running
        self.synced_seq = 0

    def recover(self) -> None:
        super().recover()
        self.states.popleft()               # the empty one with which it began
        former = self.process.home.store                        # type: ignore[attr-defined]
        self.synced_seq = former.synced_seq if former else 0    # what it has read may still be in the cache alone
        self.process.store = self           # type: ignore[attr-defined]

    @property
    def state(self) -> nexus.State:         # type: ignore[override]
        return self.states[-1]

    @state.setter
    def state(self, state: nexus.State) -> None:
        self.states.append(state)

    def update(self, yield_changes: Any, is_synced: bool = True) -> Any:
        before = self.state.seq
        answer = super().update(yield_changes, is_synced)
        if is_synced and self.state.seq > before:
            self.synced_seq = self.state.seq
        return answer

    def update_large(self, yield_changes: Any) -> Any:
        answer = super().update_large(yield_changes)
        self.synced_seq = self.state.seq
        return answer


def find_recovery(disk: nexus.Disk, layout: nexus.Layout) -> nexus.Recovery:
    """As a service reads the state when it begins: that is what the one before had."""
    process = current().running
    try:
        found = versions.find_recovery(disk, layout)
    except nexus.NexusError as error:
        if error.kind != "conflict":            # an older nexus does not read a newer one's file
            current().violations.append(f"the state cannot be read: {error}")
        raise
    try:
        process.home.check_recovery(found)      # type: ignore[attr-defined]
    except Violation as violation:
        current().violations.append(str(violation))
    return found


class SimServer:
    """The sockets of a service: requests are handed to its Api."""
    port, socket_path = 7000, "/home/ann/.nexus/api.sock"

    def __init__(self, api: nexus.Api, host: str, port: int, tls: Any = None, is_needed: bool = True) -> None:
        self.api, self.process, self.host = api, current().running, host

    def serve(self) -> None:
        service = self.api.service
        service.gpu_watch.first_probe = Flag(self.process.world)        # type: ignore[assignment]
        self.process.api, self.process.service = self.api, service      # type: ignore[attr-defined]


class SimLine:
    """A line to an agent."""

    def __init__(self, disk: nexus.Disk, layout: nexus.Layout, ssh: nexus.Ssh, head: str, digest: str) -> None:
        self.head, self.world = current().running, current()
        self.node, self.name = self.world.hosts[ssh.node.host], ssh.node.name
        self.to_agent: deque[bytes] = deque(maxlen=1)
        self.to_head: deque[bytes] = deque()
        self.is_cut, self.agent = False, None
        if not self.node.is_reachable:
            raise nexus.NexusError("unavailable", f"cannot reach {self.name}: No route to host", "")
        self.bring_code(disk, layout, digest)
        self.node.lines = [*(line for line in self.node.lines if not line.is_cut), self]
        process = SimProcess(self.node, "nexus agent", role="service")
        self.process = process
        process.line = self                 # type: ignore[attr-defined]
        process.on_end.append(self.cut)
        home = f"{HOME_FOLDER}/.nexus"

        def run() -> None:
            try:
                nexus.run_agent(home, self.world.agent_config, head, {"HOME": HOME_FOLDER, "PATH": "/usr/bin:/bin"})
            except nexus.NexusError:
                pass

        Task(process, "main", run)
        first = self.read_line(nexus.SSH_TIMEOUT_S)
        self.hello = nexus.decode_value(nexus.Hello, nexus.load_json(first), "its first line", True)

    def bring_code(self, disk: nexus.Disk, layout: nexus.Layout, digest: str) -> None:
        """Have this service's nexus.py on the node.  Raises: unavailable."""
        shell, path = SimProcess(self.node, "sh"), f"{HOME_FOLDER}/.nexus/agent/nexus-{digest}.py"
        try:
            if nexus.find_status(shell.disk, path) and nexus.hash_code(nexus.read_bytes(shell.disk, path)) == digest:
                return
            content = nexus.read_own_code(disk, layout, digest)
            with shell.being_run():
                nexus.write_atomic(shell.disk, path, [content.decode()], is_synced=False)
        finally:
            shell.end(0)

    def cut(self) -> None:
        self.is_cut = True

    def ask(self, question: Mapping[str, Any]) -> None:
        if not self.is_cut:
            self.to_agent.append(nexus.encode_json(question).encode("ascii") + b"\n")

    def deliver(self) -> None:
        """What was asked arrives at the agent."""
        if self.agent and self.to_agent and self.process.is_alive and not self.is_cut:
            with self.process.being_run():
                self.agent.unread.append(self.to_agent.pop())
                self.agent.wake()

    def read_line(self, silence_s: float, most_bytes: int = 0) -> bytes:
        self.world.park(lambda: bool(self.to_head) or self.is_cut, silence_s)
        if self.to_head:
            return self.to_head.popleft()
        self.close()
        raise nexus.NexusError("unavailable", f"cannot reach {self.name}: the line was cut", "")

    def close(self) -> None:
        self.is_cut = True
        if self.agent:
            self.agent.is_connected = False
            self.agent.wake()


class SimAgent(nexus.Agent):
    """An agent whose line is a SimLine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.process = current().running
        self.process.line.agent = self      # type: ignore[attr-defined]
        self.process.agent = self           # type: ignore[attr-defined]

    def read(self) -> None:
        pass                                # SimLine.deliver() does


class Outbox:
    """start_writer() of an agent."""

    def __init__(self) -> None:
        self.line = current().running.line          # type: ignore[attr-defined]

    def put(self, content: bytes) -> None:
        if not self.line.is_cut:
            self.line.to_head.append(content.rstrip(b"\n"))


_world: list[World] = []


def current() -> World:
    return _world[-1]


class LoggedErrors(logging.Handler):
    """What a service or an agent says of a fault of its own is a violation."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OSError):
            self.world.violations.append(f"{record.getMessage()}: {describe_error(error)}")
            self.world.tracebacks.append(logging.Formatter().formatException(record.exc_info))      # type: ignore


class World:
    """Everything there is in one history."""

    def __init__(self, seed: int) -> None:
        self.hub = greenlet.getcurrent()        # which lets the others go on
        self.rnd, self.names = random.Random(seed), random.Random(seed + 1)
        self.now = 1000.0                       # monotonic, of all machines
        self.machines_begun_at: list[float] = []        # services and agents
        self.jumped_at = 0.0                    # a reading of the GPUs may have begun before the last jump of the time
        self.is_hasty = False                   # each command ends soon
        self.has_moved = False                  # somebody has set a clock
        self.rounds = 0                         # how often everything went on a little: go_round()
        self.printed: dict[str, tuple[bytearray, bytearray]] = {}      # {job id: what it has printed, as the disk took it}
        self.job_ids: set[str] = set()
        self.runs: list[Run] = []
        self.runners: list[tuple[SimProcess, Iterator[str]]] = []
        self.judges: list[Judge] = []
        self.notices: list[Notice] = []
        self.violations: list[str] = []
        self.tracebacks: list[str] = []
        self.hosts: dict[str, Host] = {}
        self.cluster: Any = None                # cluster.Cluster, where jobs run under Slurm
        self.users: dict[int, str] = {}         # {uid: name} of those that the histories made up
        self.current: SimProcess | None = None
        self.agent_config = nexus.parse_config({"gpu": {"lease_dir": LEASE_FOLDER}, "jobs": {"launcher": "direct"}}, "")
        self.log = logging.Logger("nexus", logging.ERROR)
        self.log.addHandler(LoggedErrors(self))
        _world.append(self)

    def tell_log(self, tell: Callable[[str], None]) -> None:
        handler = logging.Handler()
        handler.emit = lambda record: tell(f"{'':15}pid {self.running.pid}: {record.getMessage()}")     # type: ignore
        self.log.addHandler(handler)
        self.log.setLevel(logging.INFO)

    @property
    def running(self) -> SimProcess:
        assert self.current
        return self.current

    def process_of(self, loop: nexus.HostLoop) -> SimProcess:
        return loop.events.process          # type: ignore[attr-defined, no-any-return]

    def park(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait, in a Task, until the history lets it go on.  Elsewhere time passes at once."""
        process, here = self.running, greenlet.getcurrent()
        process.check_alive()
        task = next((one for one in process.tasks if one.greenlet is here), None)
        if task is None:
            self.now += 0.0 if timeout_s == float("inf") else timeout_s
            return
        task.is_ready, task.until = is_ready, self.now + timeout_s
        self.hub.switch()
        process.check_alive()

    def end_commands(self) -> None:
        """Those end whose time has come."""
        if self.cluster:
            self.cluster.advance()
        for host in self.hosts.values():
            for process in list(host.processes.values()):
                if process.command:
                    process.command.go_on(process)

    def has_other_host(self, run: Run) -> bool:
        """Whether a service or an agent has begun since the job was launched: it cannot tell what those before have done."""
        return any(at >= run.launched_at for at in self.machines_begun_at)

    def begin_run(self, run: Run) -> None:
        """A command begins: all that nexus promises of that must hold now."""
        for other in self.runs:
            if other.key == run.key and not other.is_lost:
                self.violations.append(f"attempt {run.key} runs twice")
            is_same_job = other.job.id == run.job.id            # no id comes again in a history
            if is_same_job and other.left:
                self.violations.append(f"job {run.job.id} runs as attempt {other.job.attempt} and {run.job.attempt}")
        self.runs.append(run)
        for uuid in run.shares:
            holders = [one for one in self.runs if uuid in one.shares and (one is run or one.left)
                       and not one.runner.is_forgotten]
            if sum(one.shares[uuid] for one in holders) > 100 or len({one.home for one in holders}) > 1:
                names = ", ".join(f"{one.job.id} of {one.home} ({one.shares[uuid]} %)" for one in holders)
                self.violations.append(f"{uuid} is given to {names}")

        assert run.process.command
        run.process.command.start(run.process, run)
        run.process.on_end.append(lambda: self.end_run(run))
        self.judge("on_begin", run)

    def note_printed(self, job_id: str, stream: int, content: bytes) -> None:
        self.printed.setdefault(job_id, (bytearray(), bytearray()))[stream].extend(content)

    def end_run(self, run: Run) -> None:
        run.ended_at = self.now
        self.judge("on_end", run)

    def judge(self, hook: str, *what: Any) -> None:
        """Call this hook of each judge."""
        for judge in self.judges:
            getattr(judge, hook)(*what)

    def run_program(self, argv: Sequence[str], *rest: Any, **options: Any) -> Any:
        """Stands in for run(): the commands of [hooks] are their names."""
        hook = argv[-1].rpartition("\n")[2]
        if not hook.startswith("on_"):
            return real_run(argv, *rest, **options)
        notice = Notice(self.running, hook, rest[1])
        self.notices.append(notice)
        self.judge("on_notice", notice)
        return nexus.Completed(0, "")

    def close(self) -> None:
        self.judges = []
        for host in self.hosts.values():
            for process in list(host.processes.values()):
                process.end(0)
        _world.remove(self)


class Patches:
    """`with Patches():` nexus runs on the world that is current."""

    def __enter__(self) -> None:
        import cluster
        clock = types.SimpleNamespace(**vars(time))
        clock.time, clock.monotonic = (lambda: current().running.host.wall()), lambda: current().now
        clock.sleep = lambda seconds: current().park(lambda: False, seconds)
        clock.thread_time = lambda: 0.0
        files = versions.Files(lambda: current().running)
        replaced: dict[str, Any] = {
            "time": clock, "Disk": lambda: current().running.disk, "Clock": lambda: current().running.clock,
            "Machine": SimMachine, "Processes": SimProcesses, "RunnerEvents": SimEvents, "Worker": SimWorker,
            "Store": SimStore, "Server": SimServer, "AgentLine": SimLine, "Agent": SimAgent,
            "Slurm": cluster.SimSlurm, "find_recovery": find_recovery, "read_state": files.read_state,
            "encode_state": files.encode_state, "encode_transaction": files.encode_transaction,
            "start_writer": lambda stream, name: Outbox(), "set_signals": lambda service: None,
            "import_modules": lambda: None, "run": lambda *argv, **options: current().run_program(*argv, **options),
            "make_log": lambda layout, config: current().log,
            "read_boot_id": lambda: current().running.host.boot_id, "find_pid_namespace": lambda: nexus.HOST_PIDS,
            "read_machine": lambda: current().running.host.name, "find_free_port": lambda number: 20000 + number % 10000,
            "find_program": lambda name, path=None, mode=0: f"/usr/bin/{name}",
            "find_programs": lambda names, path=None: {name: f"/usr/bin/{name}" for name in names}, "import_psutil": lambda: PSUTIL,
            "measure_memory": measure_memory,
            "MIN_JOURNAL_BYTES": 4000,          # so that state.json is written often
            "find_user": lambda uid: current().users.get(uid) or find_user(uid),
            "find_process_user": find_process_user,
            "count_oom_kills": lambda: 0}
        self.former = {name: getattr(nexus, name) for name in replaced}
        self.former_os, self.path = (os.getpid, os.geteuid, os.kill, os.umask, signal.signal), os.environ["PATH"]
        for name, stand_in in replaced.items():
            setattr(nexus, name, stand_in)
        os.getpid, os.geteuid = lambda: current().running.pid, lambda: current().current.uid if current().current else REAL_UID
        os.umask, signal.signal = (lambda mask: 0o022), lambda number, handler: None    # type: ignore
        os.kill = lambda pid, number: current().running.host.processes[pid].hear(number) if (
            pid in current().running.host.processes) else None

    def __exit__(self, *_: object) -> None:
        for name, real in self.former.items():
            setattr(nexus, name, real)
        os.getpid, os.geteuid, os.kill, os.umask, signal.signal = self.former_os
        os.environ["PATH"] = self.path

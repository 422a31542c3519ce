"""The processes of this machine and what they use.

A process is identified by pid and start time, never by its pid alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from ..formats.proc import Process, list_oom_files, parse_proc_stat
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import Job
from .disk import Disk, disk_errors, find_user, is_locked

if TYPE_CHECKING:
    import subprocess
    from typing import Any

EXEC_LOOKS = 500                # half a millisecond apart: the longest wait for an environment during an exec
FORMER_COUNT = 10000            # ended processes whose jobs are remembered
SETTLED_S = 2.0                 # the age at which a process that is nobody's will be nobody's
PROC = "/proc"
MARKS = rb"(?:^|\0)NEXUS_(ROLE|JOB_ID|JOB_NONCE)=([^\0]*)"     # in a process's environment: whose it is
HOST_PIDS = "pid:[4026531836]"  # the namespace outside containers: PROC_PID_INIT_INO of linux/proc_ns.h


def read_proc(path: str) -> str:
    """A text of the kernel's; "" when there is none.  Raises: unavailable."""
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read().decode("utf-8", "replace")
    return ""


def list_threads(pid: int) -> list[int]:
    """The ids of a process's threads; [] when it has ended."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"{PROC}/{pid}/task")]
    return []


def find_thread(process: Process) -> int:
    """The thread whose /proc has a process's memory and environment: those of one that has ended are empty."""
    threads = list_threads(process.pid) if process.state in "ZX" else []
    return next((thread for thread in threads if thread != process.pid), process.pid)


def read_proc_words(pid: int, file: str) -> list[str]:
    """What /proc has of a process: its arguments (`cmdline`), or its variables (`environ`)."""
    with contextlib.suppress(OSError), open(f"{PROC}/{pid}/{file}", "rb") as content:
        return os.fsdecode(content.read()).split("\0")[:-1]
    return []


class Processes:
    """Finds out which processes belong to which job, from /proc alone.

    A job's processes carry its id and nonce in their environment, descend from its job.sh, or share job.sh's session:
    torchrun's workers leave the process group.  A process that was once found stays its job's, even when its parents
    are gone and it has cleared its environment.  All of /proc is read at each refresh.  The end of a job reads only
    what is new since then, or was found: so it takes no longer beside thousands of other processes.
    """

    def __init__(self) -> None:
        self.uid = os.geteuid()
        self.boot_id = read_boot_id()
        self.marks: dict[tuple[int, int, int], str | None] = {}         # {(pid, started, env_start): mark}
        self.owners: dict[int, tuple[int, str]] = {}        # {pid: (started, its job's mark)}, of ended ones too
        # What is known of processes, by their pids as in /proc: until pids wrap, none is another one
        self.settled: dict[str, str] = {}           # since the last refresh: {pid: its job's mark; "": nobody's}
        self.unowned: dict[str, int] = {}                   # {pid of one that was nobody's when it was read: its start}
        self.latest_pid = 0                                 # the last one at the last look

    def find(self, pid: int) -> Process | None:
        try:
            handle = os.open(f"{PROC}/{pid}/stat", os.O_RDONLY)
            try:
                return parse_proc_stat(os.read(handle, 4096).decode("utf-8", "replace"))
            finally:
                os.close(handle)
        except (OSError, ValueError, IndexError):
            return None

    def is_alive(self, pid: int | None, started: int | None) -> bool:
        process = self.find(pid) if pid else None
        return process is not None and process.started == started and not self.is_gone(process)

    def is_gone(self, process: Process) -> bool:
        """Whether it has ended and waits to be reaped.  When only its main thread has ended, the state is the same."""
        return process.state in "ZX" and len(list_threads(process.pid)) < 2

    def describe_stuck(self, process: Process) -> str | None:
        """What a process waits in, where no signal ends one of its threads; None: signals end it.  Source: proc(5)."""
        for thread in list_threads(process.pid):
            with contextlib.suppress(NexusError):       # it has ended, or is another user's
                folder = f"{PROC}/{process.pid}/task/{thread}"
                if read_proc(f"{folder}/stat").rpartition(") ")[2].startswith("D"):
                    call = read_proc(f"{folder}/wchan")
                    place = call if call not in ("", "0") else "the kernel"     # that keeps it to itself
                    return f"SIGKILL did not end {process.name} (pid {process.pid}): it waits in {place} (state D)"
        return None

    def find_age_s(self, started: int) -> float:
        """Seconds since a start in clock ticks, whatever the wall clock was set to."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")

    def list_pids(self) -> set[int]:
        return {int(name) for name in os.listdir(PROC) if name.isdigit()}

    def read(self, pids: Iterable[int]) -> list[Process]:
        """Those that may be ours: this user's; for root, everybody's.  Parents come first."""
        found = []
        for pid in pids:
            with contextlib.suppress(OSError):
                if self.uid == 0 or self.uid == os.stat(f"{PROC}/{pid}").st_uid:
                    process = self.find(pid)
                    if process and not process.is_kernel and not self.is_gone(process):
                        found.append(process)
        return sorted(found, key=lambda process: (process.started, process.pid))

    def read_mark(self, process: Process) -> str | None:
        """`service`, `viewer`, or `JOB NONCE`, from its environment.  During an exec it has none: wait."""
        key = process.pid, process.started, process.env_start
        if key in self.marks:
            return self.marks[key]
        for _ in range(EXEC_LOOKS):
            try:
                with open(f"{PROC}/{find_thread(process)}/environ", "rb", 0) as file:
                    content = file.read()
            except OSError:
                return None
            marks = {name: text.decode("utf-8", "replace") for name, text in re.findall(MARKS, content)}
            job_id, nonce = marks.get(b"JOB_ID"), marks.get(b"JOB_NONCE")
            mark = marks.get(b"ROLE") or (f"{job_id} {nonce}" if job_id and nonce else None)
            now = process if mark else self.find(process.pid)
            if now is None or now.started != process.started:
                return None
            if now.env_start == process.env_start and (content or now.env_start or now.state in "ZX"):
                self.marks[key] = mark
                return mark
            process = now
            time.sleep(0.0005)
        return None

    def find_members(self, jobs: Sequence[Job], over: Iterable[str] = (), *, others: Sequence[Job] = (),
                     is_refresh: bool = False) -> dict[str, list[Process]]:
        """{job id: its processes}, without job.sh, the viewer of the logs, and what job.sh of an ended job still runs.

        `over`: ids of jobs whose command has ended.  `others`: the other jobs that run here; what is known to be theirs
        is not read again.  `is_refresh`: look at all of the machine; `jobs` are all that run.
        """
        latest_pid = read_latest_pid()
        has_wrapped, self.latest_pid = not latest_pid or latest_pid < self.latest_pid, latest_pid
        names, unowned = os.listdir(PROC), {} if has_wrapped else self.unowned
        if is_refresh or has_wrapped:
            self.settled, self.unowned = {}, {name: unowned[name] for name in names if name in unowned}
        by_mark = {f"{job.id} {job.current.nonce}": job for job in (*others, *jobs)}
        runners = self.locate_runners(by_mark)
        members: dict[str, list[Process]] = {job.id: [] for job in jobs}
        asked, settled = {None, *(mark for mark, job in by_mark.items() if job.id in members)}, self.settled
        # What began before a job did is not the job's, and will not be.
        since, unowned = min((job.current.pid_started or 0 for job in jobs), default=sys.maxsize), self.unowned
        pids = [int(name) for name in names
                if settled.get(name) in asked and unowned.get(name, since) >= since and name.isdigit()]
        processes = self.read(pids)
        tidying = {pid for pid, job in runners.items() if job.id in over}
        found = dict(runners)
        for process in processes:
            pid, parent = process.pid, process.parent
            if parent in tidying and parent in runners:
                tidying.add(pid)
                continue
            leader = runners.get(process.session)
            is_others = leader is not None and leader.id not in members
            mark = "" if pid in runners or is_others else self.read_mark(process) or ""
            if parent in tidying and mark not in by_mark:
                tidying.add(pid)
                continue
            started, former_mark = self.owners.get(pid, (0, ""))
            former = by_mark.get(former_mark) if started == process.started else None
            owner = runners.get(pid) or former or by_mark.get(mark) or leader or found.get(parent)
            if owner and mark not in ("service", "viewer"):
                found[pid] = owner
                owner_mark = settled[str(pid)] = f"{owner.id} {owner.current.nonce}"
                self.owners[pid] = process.started, owner_mark
                if pid not in runners and owner.id in members:
                    members[owner.id].append(process)
            elif mark == "viewer":
                self.set_aside(pid)
            else:
                unowned[str(pid)] = process.started
        if is_refresh:
            # What is nobody's stays so; but one that has just begun may be job.sh, on its way to the command.
            young = {process.pid for process in processes if self.find_age_s(process.started) < SETTLED_S}
            settled.update((str(pid), "") for pid in pids if pid not in found and pid not in young)
            self.forget(processes)
        return members

    def find_runners(self, script: str, attempt: int) -> list[Process]:
        """Those that are, or will be, an attempt's job.sh: it is in their arguments, with the attempt's number."""
        return [process for process in self.read(self.list_pids())
                if read_proc_words(process.pid, "cmdline")[-2:] == [script, str(attempt)]]

    def set_aside(self, pid: int) -> None:
        """Note that a process is nobody's, whatever it does."""
        self.settled[str(pid)] = ""

    def locate_runners(self, jobs: Mapping[str, Job]) -> dict[int, Job]:
        """{pid of its job.sh, also when that has ended: job}.  `jobs`: {mark: job}.

        Another process may have got the pid of an ended job.sh; one of an earlier boot means nothing.
        """
        runners: dict[int, Job] = {}
        for mark, job in jobs.items():
            pid = job.current.pid
            if pid and job.current.boot_id == self.boot_id:
                leader = None if self.settled.get(str(pid)) == mark else self.find(pid)
                if leader is None or leader.started == job.current.pid_started:
                    runners[pid] = job
        return runners

    def find_catchers(self, processes: Iterable[Process], number: int) -> set[int]:
        """The pids of those that handle this signal."""
        def handles(process: Process) -> bool:
            masks = re.search("^SigCgt:\\s*([0-9a-f]+)$", read_proc(f"{PROC}/{process.pid}/status"), re.M)
            return bool(masks and int(masks[1], 16) >> (number - 1) & 1)
        return {process.pid for process in processes if handles(process)}

    def find_readers(self, processes: Sequence[Process]) -> set[int]:
        """The pids of those that read a pipe into which another one writes, like `tee` behind `|`."""
        def find_pipe(process: Process, number: int) -> str:
            with contextlib.suppress(OSError):          # it has ended
                return os.readlink(f"{PROC}/{process.pid}/fd/{number}")
            return ""

        outputs = {find_pipe(process, number) for process in processes for number in (1, 2)}
        pipes = {path for path in outputs if path.startswith("pipe:")}
        return {process.pid for process in processes if find_pipe(process, 0) in pipes}

    def forget(self, alive: Sequence[Process]) -> None:
        """Drop the marks of ended processes.  Keep the latest ones' jobs: nvidia-smi may still list them."""
        keys = {(process.pid, process.started, process.env_start) for process in alive}
        self.marks = {key: mark for key, mark in self.marks.items() if key in keys}
        ended = self.owners.keys() - {process.pid for process in alive}
        for pid in [pid for pid in self.owners if pid in ended][:-FORMER_COUNT]:
            del self.owners[pid]

    def owner_of(self, pid: int) -> str | None:
        """The job of a pid that nvidia-smi lists, as of the last refresh; None: somebody else's."""
        process, (started, mark) = self.find(pid), self.owners.get(pid, (0, ""))
        is_other = process is not None and process.started != started and not self.is_gone(process)
        return None if is_other else mark.partition(" ")[0] or None

    def send(self, process: Process, number: int) -> None:
        """Signal this process, and no other that has got its pid."""
        with contextlib.suppress(OSError):
            if self.is_alive(process.pid, process.started):
                os.kill(process.pid, number)


def read_latest_pid() -> int:
    """The last pid that was given out in this PID namespace, of which /proc/loadavg may not be; 0: unknown."""
    with contextlib.suppress(NexusError):
        return int(read_proc(f"{PROC}/sys/kernel/ns_last_pid") or 0)
    return 0


def count_oom_kills() -> int | None:
    """How many processes the kernel has ended for lack of memory: of this process's group, else of the machine."""
    with contextlib.suppress(NexusError):
        for path in (*list_oom_files(read_proc(f"{PROC}/self/cgroup")), f"{PROC}/vmstat"):
            match = re.search("(?m)^oom_kill ([0-9]{1,18})$", read_proc(path))
            if match:
                return int(match[1])
    return None


def find_process_user(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return find_user(os.stat(f"{PROC}/{pid}").st_uid)
    return None


TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def import_psutil() -> Any:
    """psutil, or None where it is not installed: then the memory of jobs, and the host's figures, are unknown."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def measure_machine(psutil: Any) -> dict[str, float | None]:
    """What the whole machine uses, since the refresh before; None: unknown."""
    if psutil is None:
        return dict.fromkeys(("cpu_percent", "memory_used_gb", "memory_total_gb"))
    memory = psutil.virtual_memory()
    return {"cpu_percent": psutil.cpu_percent(), "memory_used_gb": (memory.total - memory.available) / 2**30,
            "memory_total_gb": memory.total / 2**30}


def measure_memory(psutil: Any, processes: Iterable[Process]) -> float | None:
    """MiB of host memory that processes use, shared pages counted once (PSS).  With 100 GB it takes seconds."""
    if psutil is None:
        return None
    used_bytes = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):         # it has ended
            found = psutil.Process(find_thread(process))
            try:
                used_bytes += found.memory_full_info().pss
            except psutil.AccessDenied:         # another user's process, or root in a container
                used_bytes += found.memory_info().rss
    return used_bytes / 2**20


def read_boot_id() -> str:
    return (read_proc(f"{PROC}/sys/kernel/random/boot_id") or "unknown").strip()


CONTAINER = " (a container)"


def find_pid_namespace() -> str:
    """Where this process's pids count; "" on a kernel without namespaces."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{PROC}/self/ns/pid")
    return ""


def read_machine() -> str:
    """The name of this machine, or of this container: pids mean other processes elsewhere."""
    return socket.gethostname() + (CONTAINER if find_pid_namespace() not in ("", HOST_PIDS) else "")


def is_this_machine(running: Mapping[str, Any]) -> bool:
    """Whether a service.json is of this machine.  Its boot and PID namespace prove it: its name may be another one now.

    Containers of one machine have the same boot.
    """
    own = (read_boot_id(), find_pid_namespace())
    return running.get("machine") == read_machine() or (
        all(own) and (running.get("boot_id"), running.get("pid_namespace")) == own)


def is_elsewhere(disk: Disk, machine: str, lock_file: str = "") -> bool:
    """Whether a service may run on that machine, unseen.  Of a former container, with another name, its lock tells."""
    if machine == read_machine():
        return False
    return not machine.endswith(CONTAINER) or (bool(lock_file) and is_locked(disk, lock_file))


def is_alive(running: Mapping[str, Any]) -> bool:
    """Whether the process in a service.json still lives."""
    return running.get("boot_id") == read_boot_id() and Processes().is_alive(running.get("pid"), running.get("started"))


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a program has ended, and what it has started: it may be a wrapper of the one that hangs."""
    processes = Processes()
    return process.poll() is not None and not any(
        other.session == process.pid for other in processes.read(processes.list_pids()))

"""Section 10: other programs, processes, GPUs, sessions, leases.  Real processes; nvidia-smi is the fake one."""

import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import live
import psutil
import pytest
from live import PATIENCE_S, until
from makers import SUPPORT, config, find_faults, gpu, running

import nexus

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs to become another user")
NOBODY = 65534
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@contextlib.contextmanager
def as_user(uid):
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


# Running programs


def test_run_ends_by_sigterm_what_does_not_answer(tmp_path):
    assert nexus.run(["sh", "-c", "sleep 0.1; exit 3"], 10).exit_code == 3
    began = time.monotonic()
    with pytest.raises(nexus.NexusError, match=r"did not answer within 2 s"):
        nexus.run(["sh", "-c", f"trap 'echo term > {tmp_path}/got; exit' TERM; while :; do sleep 0.01; done"], 2)
    assert time.monotonic() - began < 20
    assert (tmp_path / "got").read_text() == "term\n", "SIGKILL at once may freeze a card"


def test_run_does_not_wait_for_what_is_left_in_the_background(tmp_path):
    """A hook's `notify &` goes on, and may speak as before."""
    os.mkfifo(tmp_path / "go")
    done = nexus.run(["sh", "-c", f"( read x < {tmp_path}/go; echo more; echo said > {tmp_path}/done ) & echo begun"], 10)
    assert (done.exit_code, done.output) == (0, "begun\n")
    (tmp_path / "go").write_text("x\n")
    until((tmp_path / "done").exists)


def test_run_ends_what_a_wrapper_began(tmp_path):
    """A script called nvidia-smi that calls the real one."""
    pid_file = tmp_path / "pid"
    with pytest.raises(nexus.NexusError):
        nexus.run(["sh", "-c", f"trap '' TERM; sleep 600 & echo $! > {pid_file}; wait; wait"], 2)
    until(lambda: (process := nexus.Processes().find(int(pid_file.read_text()))) is None or process.state in "ZX")


def in_time(act):
    """What `act` raises; fails, where it does not return."""
    raised = []

    def call():
        try:
            act()
        except Exception as error:
            raised.append(error)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for ever"
    return raised[0]


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """git and ssh cannot be ended, as in the kernel's D state, and a process of theirs in a session of its own keeps their streams."""
    program = tmp_path / "git"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nsetsid sh -c 'echo $$ >> {tmp_path}/pids; exec sleep 600' &\n"
                       "exec sleep 600\n")
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)
    monkeypatch.setattr(nexus, "STUCK", {}, raising=False)
    program.chmod(0o755)
    (tmp_path / "ssh").symlink_to(program)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nexus, "GIT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(nexus, "SSH_CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(nexus, "SSH_TIMEOUT_S", 0.5)
    yield nexus.Ssh(nexus.NodeConfig("n1", "n1"), os.environ)
    until((tmp_path / "pids").exists)
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


LAYOUT = nexus.make_layout("/nowhere", config())
HANGS = [  # reason, what is asked, words
    ("git", lambda ssh: nexus.take_snapshot("/", os.environ), "git in / did not answer within 0.5 s and cannot be ended"),
    ("an agent", lambda ssh: nexus.AgentLine(nexus.DISK, LAYOUT, ssh, "0-12345678", "12345678"), "cannot reach n1: no answer within 0.5 s"),
    ("a snapshot on its way to a node", lambda ssh: nexus.push_snapshot(ssh, "/", "a" * 40, "x", os.environ),
     "ssh to n1 did not answer within 0.5 s"),
]


@pytest.mark.parametrize("reason, ask, words", HANGS, ids=[case[0] for case in HANGS])
def test_a_program_that_hangs_hangs_nobody(hanging, reason, ask, words):
    error = in_time(lambda: ask(hanging))
    assert isinstance(error, nexus.NexusError) and error.kind == "unavailable" and words in error.message, repr(error)


# GPUs


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Sets what the fake nvidia-smi shows; `smi.runs()` are the arguments of its runs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{SUPPORT}/fake_nvidia_smi" "$@"\n')
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NVIDIA_SMI_LOG", str(tmp_path / "runs"))
    monkeypatch.setenv("FAKE_NVIDIA_SMI", str(tmp_path / "state.json"))

    def show(shown):
        (tmp_path / "runs").write_text("")
        (tmp_path / "state.json").write_text(json.dumps(shown))

    show.runs = lambda: [json.loads(line)["argv"] for line in (tmp_path / "runs").read_text().splitlines()]
    return show


def uuid(index):
    return f"GPU-{index:08x}-0000-0000-0000-{index:012x}"


def known_gpus(*indices):
    return {uuid(index): gpu(index, uuid=uuid(index), memory_used_mib=5.0, utilization=1.0) for index in indices}


LOST, RESET, UNKNOWN, HIDDEN = ({"state": state} for state in ("lost", "reset", "unknown", "hidden"))
GPUS = [  # reason, what nvidia-smi shows, indices seen before, {index: fault} now
    ("two idle ones", {"gpus": 2}, (), {0: None, 1: None}),
    ("no GPU at all", {"gpus": []}, (), {}),
    ("one that may not be opened is left out, its index too", {"gpus": [{}, HIDDEN, {}]}, (), {0: None, 2: None}),
    ("it was there before", {"gpus": [{}, HIDDEN, {}]}, (0, 1, 2), {0: None, 1: "nvidia-smi does not show it", 2: None}),
    ("the only one was there before", {"gpus": []}, (0,), {0: "nvidia-smi does not show it"}),
    ("a lost one hides the others until they are asked for", {"gpus": [{}, LOST, {}]}, (0, 1, 2), {0: None, 1: "GPU is lost", 2: None}),
    ("one that was lost before the service started", {"gpus": [{}, LOST, {}]}, (), {0: None, 1: "GPU is lost", 2: None}),
    ("the first is lost", {"gpus": [LOST, {}]}, (), {0: "GPU is lost", 1: None}),
    ("one that cannot be opened", {"gpus": [{}, UNKNOWN]}, (), {0: None, 1: "Unknown Error"}),
    ("one that must be reset", {"gpus": [RESET, {}]}, (), {0: "GPU requires reset", 1: None}),
    ("one lost and one hidden", {"gpus": [{}, LOST, HIDDEN, {}]}, (), {0: None, 1: "GPU is lost", 3: None}),
    ("lost after it was opened: 0 MiB used, and not free", {"gpus": [{}, {"error": "GPU is lost", "memory.used": 0}]}, (),
     {0: None, 1: "GPU is lost"}),
    ("must be reset, beside exit code 0", {"gpus": [{"error": "GPU requires reset"}, {}]}, (), {0: "GPU requires reset", 1: None}),
    ("an unknown error in its cells", {"gpus": [{"error": "Unknown Error"}]}, (), {0: "Unknown Error"}),
    ("readings that are not known are no fault", {"gpus": [{"memory.used": None, "utilization.gpu": None, "memory.total": None}]}, (),
     {0: None}),
]


@pytest.mark.parametrize("reason, shown, before, expected", GPUS, ids=[case[0] for case in GPUS])
def test_query_gpus(smi, reason, shown, before, expected):
    smi(shown)
    found = nexus.NvidiaSmi().query_gpus(known_gpus(*before))
    assert {one.index: one.fault for one in found} == expected
    assert [one.index for one in found] == sorted(expected)
    for one in found:
        if one.fault:
            assert one.memory_used_mib is None and one.processes == (), "what a dead card reads is not known"
        else:
            assert one.uuid == uuid(one.index)


UNAVAILABLE = [  # reason, what nvidia-smi shows, indices seen before, words of message and hint
    ("no driver", {"failure": "no-driver"}, (), ["communicate with the NVIDIA driver", "exit code 9", "lsmod"]),
    ("no library", {"failure": "no-library"}, (), ["libnvidia-ml.so", "exit code 12"]),
    ("upgraded under a running kernel", {"failure": "mismatch"}, (0,), ["Driver/library version mismatch", "exit code 18", "reboot"]),
    ("no rights", {"failure": "no-permission"}, (), ["Insufficient Permissions", "exit code 4", "/dev/nvidia"]),
    ("a container lost its devices", {"failure": "unknown-error"}, (), ["Unknown Error", "exit code 255", "container"]),
    ("no output at all", {"failure": {"stdout": "", "exit": 1}}, (), ["no output", "exit code 1"]),
    ("the only one is lost", {"gpus": [LOST]}, (), ["GPU is lost", "exit code 15"]),
]


@pytest.mark.parametrize("reason, shown, before, words", UNAVAILABLE, ids=[case[0] for case in UNAVAILABLE])
def test_unknown_is_not_free(smi, reason, shown, before, words):
    smi(shown)
    with pytest.raises(nexus.NexusError) as caught:
        nexus.NvidiaSmi().query_gpus(known_gpus(*before))
    assert caught.value.kind == "unavailable"
    said = f"{caught.value.message} {caught.value.hint}"
    assert all(word in said for word in words), said


def asked_of(answer):
    """(what asks a driver that answers so, the arguments of each question)."""
    runs, smi = [], nexus.NvidiaSmi()

    def ask(*arguments):
        runs.append(arguments)
        return answer(next(word for word in arguments if word.startswith("--query")))

    smi.ask = ask
    return smi, runs


ROW = ", A10, 23028, 1, 0, 30, 10, 150, [N/A], Default\n"


def test_an_older_driver_is_asked_for_less_from_then_on():
    answers = {",".join(nexus.GPU_FIELDS): nexus.Completed(2, 'Field "mig.mode.current" is not a valid field to query.\n'),
               ",".join(nexus.BASIC_GPU_FIELDS): nexus.Completed(0, "0, GPU-1, Tesla K80, 11441, 3\n")}
    smi, runs = asked_of(lambda query: nexus.Completed(0, "") if "compute-apps" in query else answers[query.partition("=")[2]])
    for _ in range(2):
        assert [(one.name, one.memory_used_mib) for one in smi.query_gpus({})] == [("Tesla K80", 3.0)]
    assert len(runs) == 5, "the fields it refused are asked for once"


def test_an_inforom_warning_does_not_spoil_the_rows():
    smi, _ = asked_of(lambda query: nexus.Completed(14, ("GPU-1, 77, 500\n" if "apps" in query else "0, GPU-1" + ROW)
                                                    + "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"))
    found, = smi.query_gpus({})
    assert found.fault is None and found.processes == (nexus.GpuProcess(77, 500.0),)


def test_newer_drivers_show_the_others_beside_the_error():
    smi, runs = asked_of(lambda query: nexus.Completed(0, "GPU-2, 77, 500\n") if "apps" in query else nexus.Completed(
        255, f"0, GPU-0{ROW}Unable to determine the device handle for GPU1: Unknown Error\n2, GPU-2{ROW}"))
    found = smi.query_gpus({})
    assert {one.index: one.fault for one in found} == {0: None, 1: "Unknown Error", 2: None}
    assert found[2].processes and runs[-1][:2] == ("-i", "0,2"), "the processes of the healthy ones are asked for"


def test_processes_that_cannot_be_asked_for_make_all_unknown():
    smi, _ = asked_of(lambda query: nexus.Completed(*((255, "Unknown Error\n") if "apps" in query else (0, "0, GPU-1" + ROW))))
    with pytest.raises(nexus.NexusError, match="Unknown Error"):
        smi.query_gpus({})


def test_processes_are_told_with_their_gpu(smi):
    smi({"gpus": 3, "processes": [{"gpu": 0, "pid": 11, "memory": 100}, {"gpu": 0, "pid": 12, "memory": None},
                                  {"gpu": 2, "pid": 11, "memory": 300, "name": "a, b"}]})
    found = nexus.NvidiaSmi().query_gpus({})
    assert [[(process.pid, process.memory_mib) for process in one.processes] for one in found] == [
        [(11, 100.0), (12, None)], [], [(11, 300.0)]]


def test_processes_beside_a_lost_gpu(smi):
    smi({"gpus": [{}, LOST, {}], "processes": [{"gpu": 2, "pid": 11, "memory": 100}]})
    found = nexus.NvidiaSmi().query_gpus({})
    assert [len(one.processes) for one in found] == [0, 0, 1]
    assert [argv[:2] for argv in smi.runs() if "-i" in argv] == [["-i", "0,2"]] * 2, "by indexes: a UUID is looked for in every card"


PROGRAMS = [  # reason, how the program is made, words
    ("no right to run it", ("#!/bin/sh\n", 0o644), ["cannot be run", "Permission denied"]),
    ("no program at all", ("\0\0", 0o755), ["cannot be run"]),
    ("it crashes", ("#!/bin/sh\nkill -SEGV $$\n", 0o755), ["ended by signal 11"]),
]


@pytest.mark.parametrize("reason, made, words", PROGRAMS, ids=[case[0] for case in PROGRAMS])
def test_a_broken_nvidia_smi_is_named(tmp_path, monkeypatch, reason, made, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").write_text(made[0])
    (tmp_path / "nvidia-smi").chmod(made[1])
    with pytest.raises(nexus.NexusError) as caught:
        nexus.NvidiaSmi().query_gpus({})
    assert all(word in f"{caught.value.message} {caught.value.hint}" for word in words), caught.value.message


# Processes


class Tree:
    """A real process tree with a runner at its top, which leads a session as job.sh does."""

    def __init__(self, job_id, nonce):
        self.job_id, self.nonce = job_id, nonce
        self.environ = {"PATH": os.environ["PATH"], "NEXUS_JOB_ID": job_id, "NEXUS_JOB_NONCE": nonce, "PS1": "x"}
        self.pids = []

    def start(self, script, environ=None):
        """Run a script of sh as the runner; it says pids on its stdout, one a line.

        Those that it began (`echo $!`) are waited for until they are what they shall be: of itself a process says `self $$`.
        """
        self.runner = subprocess.Popen(["sh", "-c", script + "\nwait\nexec sleep 600"], stdout=subprocess.PIPE,
                                       stdin=subprocess.DEVNULL, text=True, env=environ or {"PATH": os.environ["PATH"]},
                                       start_new_session=True, cwd="/")
        said = [self.runner.stdout.readline() for _ in range(script.count("echo $!") + script.count("echo self $$"))]
        self.pids = [int(line.split()[-1]) for line in said]
        for pid in [int(line) for line in said if line[0] != "s"]:
            until(lambda pid=pid: pathlib.Path(f"/proc/{pid}/comm").read_text() not in ("sh\n", "env\n", "setsid\n"))
        self.started = nexus.Processes().find(self.runner.pid).started
        return self.pids

    def job(self, **fields):
        return running(self.job_id, **{"nonce": self.nonce, "pid": self.runner.pid, "pid_started": self.started,
                                       "boot_id": nexus.read_boot_id(), **fields})

    def mark(self):
        """In front of a command of sh: what job.sh gives its command."""
        return f"env NEXUS_JOB_ID={self.job_id} NEXUS_JOB_NONCE={self.nonce}"

    def end(self):
        for pid in [*self.pids, self.runner.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.runner.stdout.close()
        self.runner.wait()


@pytest.fixture
def tree():
    made = []

    def make(job_id="abc", nonce=None):
        made.append(Tree(job_id, nonce or os.urandom(8).hex()))
        return made[-1]

    yield make
    for one in made:
        if hasattr(one, "runner"):
            one.end()


def member_pids(processes, *jobs, **options):
    return {job_id: {process.pid for process in members} for job_id, members in processes.find_members(jobs, **options).items()}


NOT_ITS_OWN = [  # reason, what job.sh starts
    ("what shows the logs", "MARK NEXUS_ROLE=viewer sleep 600 & echo $!"),
    ("a service that was started from inside", "MARK NEXUS_ROLE=service sleep 600 & echo $!"),
    ("what that has started", "MARK NEXUS_ROLE=service sh -c 'env -i setsid sleep 600 & echo $!; wait' &"),
]


@pytest.mark.parametrize("reason, script", NOT_ITS_OWN, ids=[case[0] for case in NOT_ITS_OWN])
def test_what_of_a_jobs_session_is_not_the_jobs(tree, reason, script):
    mine = tree()
    pids = mine.start(script.replace("MARK", mine.mark()))
    assert not member_pids(nexus.Processes(), mine.job())["abc"] & {*pids, mine.runner.pid}


def test_of_a_job_that_is_over_the_tidying_of_job_sh_is_left_alone(tree):
    mine = tree()
    child, orphan = mine.start(f"{mine.mark()} sleep 600 & echo $!\n(setsid {mine.mark()} sleep 600 & echo $!)")
    for over, left in (((), {child, orphan}), (["abc"], {orphan})):     # the subshell may still be ending
        until(lambda over=over, left=left: member_pids(nexus.Processes(), mine.job(), over=over) == {"abc": left})


def test_what_is_in_the_middle_of_an_exec_is_a_jobs(tree, monkeypatch):
    """For a moment it has no environment.  Its parents are gone and its session is its own: nothing else tells."""
    monkeypatch.setattr(nexus, "EXEC_LOOKS", 60000)
    looks = []

    def look():
        mine = tree()
        pid, = mine.start(f"(setsid {mine.mark()} sh -c 'echo self $$; exec {'env ' * 800} sleep 600' &)")
        while pathlib.Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
            assert pid in member_pids(nexus.Processes(), mine.job())["abc"]
            looks.append(pid)
        return len(looks) > 3

    until(look)


def test_an_end_reads_only_what_is_new_or_was_found(tree, monkeypatch):
    monkeypatch.setattr(nexus, "SETTLED_S", 0.0)
    mine, processes = tree(), nexus.Processes()
    before = set(mine.start(f"{mine.mark()} sleep 600 & echo $!"))
    until(lambda: member_pids(processes, mine.job(), is_refresh=True) == {"abc": before})
    looked_at, find = [], processes.find
    monkeypatch.setattr(processes, "find", lambda pid: looked_at.append(pid) or find(pid))
    orphan = subprocess.run(["sh", "-c", f"(setsid {mine.mark()} sleep 600 > /dev/null 2>&1 & echo $!)"], capture_output=True).stdout
    mine.pids.append(int(orphan))
    until(lambda: member_pids(processes, mine.job()) == {"abc": {*before, int(orphan)}})
    assert os.getpid() not in looked_at and os.getppid() not in looked_at


def test_an_end_reads_what_is_nobodys_and_older_once(tree, monkeypatch):
    with subprocess.Popen(["sleep", "600"]) as older:
        mine, processes = tree(), nexus.Processes()
        until(lambda: processes.find_age_s(processes.find(older.pid).started) > 0.05)
        members = set(mine.start(f"{mine.mark()} sleep 600 & echo $!"))
        looked_at, find = [], processes.find
        monkeypatch.setattr(processes, "find", lambda pid: looked_at.append(pid) or find(pid))
        for is_refresh, is_read in ((False, True), (False, False), (True, False)):
            looked_at.clear()
            assert member_pids(processes, mine.job(), is_refresh=is_refresh) == {"abc": members}
            assert (older.pid in looked_at) == is_read
        processes.latest_pid = sys.maxsize              # pids wrap: it may be another process
        assert member_pids(processes, mine.job()) == {"abc": members} and older.pid in looked_at
        older.kill()


def test_what_is_another_jobs_is_not_read_at_an_end(tree, monkeypatch):
    mine, other, processes = tree("abc"), tree("abd"), nexus.Processes()
    theirs = set(other.start(f"{other.mark()} sleep 600 & echo $!"))
    members = set(mine.start(f"{mine.mark()} sleep 600 & echo $!"))
    looked_at, find = [], processes.find
    monkeypatch.setattr(processes, "find", lambda pid: looked_at.append(pid) or find(pid))
    for is_read in (True, False):
        looked_at.clear()
        assert member_pids(processes, mine.job(), others=[other.job()]) == {"abc": members}
        assert bool(theirs & {*looked_at}) == is_read
    assert member_pids(processes, other.job(), others=[mine.job()]) == {"abd": theirs}


def test_another_attempt_of_the_same_job_is_another(tree):
    old, new = tree("abc"), tree("abc")
    left = set(old.start(f"(setsid {old.mark()} sleep 600 & echo $!)"))
    current = set(new.start(f"{new.mark()} sleep 600 & echo $!"))
    found = member_pids(nexus.Processes(), new.job())["abc"]
    assert current <= found and not left & found


def test_once_seen_a_process_stays_the_jobs(tree, tmp_path):
    """Its parents have gone, its session is its own, its environment is cleared: only the memory of it is left."""
    mine = tree()
    os.mkfifo(tmp_path / "go")
    pid, = mine.start(f"(setsid {mine.mark()} sh -c 'echo self $$; read x < {tmp_path}/go; exec env -i sleep 600' &)")
    processes = nexus.Processes()
    assert pid in member_pids(processes, mine.job())["abc"]
    with open(tmp_path / "go", "w") as file:
        file.write("go\n")
    until(lambda: pathlib.Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    assert pathlib.Path(f"/proc/{pid}/environ").read_text() == ""
    assert pid in member_pids(processes, mine.job())["abc"]
    assert processes.owner_of(pid) == "abc"
    assert pid not in member_pids(nexus.Processes(), mine.job())["abc"], "so this was the memory of it"


def test_a_zombie_is_gone(tree):
    mine = tree()
    pid, = mine.start(f"{mine.mark()} sleep 600 & echo $!")
    processes = nexus.Processes()
    assert pid in member_pids(processes, mine.job())["abc"]
    os.kill(pid, signal.SIGSTOP)
    os.kill(mine.runner.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    zombie = until(lambda: (lambda found: found if found and found.state == "Z" else None)(processes.find(pid)))
    assert pid not in member_pids(processes, mine.job())["abc"]
    assert not processes.is_alive(pid, zombie.started)
    assert processes.owner_of(pid) == "abc", "nvidia-smi may still name it"


def test_a_process_whose_first_thread_has_ended_is_not_gone(tree):
    """It reads as a zombie, and its other threads go on: they may hold a GPU."""
    mine = tree()
    code = ("import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
            "ctypes.CDLL(None).pthread_exit(None)")
    pid, = mine.start(f"{mine.mark()} {nexus.quote(sys.executable)} -S -c {nexus.quote(code)} & echo $!")
    processes = nexus.Processes()
    process = until(lambda: (lambda found: found if found and found.state == "Z" else None)(processes.find(pid)))
    assert pid in member_pids(processes, mine.job())["abc"]
    processes.send(process, signal.SIGKILL)
    until(lambda: not processes.is_alive(pid, process.started))


def test_a_session_of_a_reused_pid_is_not_the_jobs(tree):
    """job.sh was killed, and its pid now leads a session of somebody else's."""
    theirs = tree("bbb")
    theirs.start("sleep 600 & echo $!")
    job = nexus.change_job(theirs.job(pid_started=theirs.started - 100), id="abc", nonce="0" * 16).value
    assert member_pids(nexus.Processes(), job)["abc"] == set()


def test_send_signals_this_process_and_no_other():
    processes = nexus.Processes()
    with subprocess.Popen(["sleep", "600"]) as child:
        process = processes.find(child.pid)
        processes.send(nexus.replace(process, started=process.started - 1), signal.SIGKILL)     # the pid was reused
        assert child.poll() is None and processes.is_alive(child.pid, process.started)
        processes.send(process, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    processes.send(process, signal.SIGKILL)             # it has gone: nobody is hit, nothing is raised


@pytest.mark.parametrize("own, other, is_locked, is_elsewhere", [
    ("gpu1", "gpu1", True, False), ("gpu1", "gpu2", False, True), ("gpu1 (a container)", "gpu2", False, True),
    ("a (a container)", "b (a container)", True, True), ("a (a container)", "b (a container)", False, False),
])
def test_what_another_machine_or_container_may_use(monkeypatch, tmp_path, own, other, is_locked, is_elsewhere):
    import fcntl
    monkeypatch.setattr(nexus, "read_machine", lambda: own)
    with open(tmp_path / "lock", "w") as file:
        if is_locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        assert nexus.is_elsewhere(nexus.DISK, other, str(tmp_path / "lock")) == is_elsewhere


# What processes and the host take


def test_memory_that_may_not_be_looked_at_counts_whole(monkeypatch):
    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    assert nexus.measure_memory(psutil, [nexus.Processes().find(os.getpid())]) > 5


# Whose socket is it?

def test_the_uid_of_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        with listener.accept()[0]:
            own, peer = client.getsockname(), client.getpeername()
            assert nexus.find_socket_uid(own, peer) == nexus.find_socket_uid(peer, own) == os.geteuid(), "the accepted end is ours too"
            assert nexus.find_socket_uid(own, (peer[0], peer[1] ^ 1)) is None and nexus.find_socket_uid((own[0], own[1] ^ 1), peer) is None
            client.close()
            assert nexus.find_socket_uid(own, peer) is None, "who sends and closes at once reads as uid 0: it is not known"


def test_a_v6_socket_that_speaks_to_a_mapped_address():
    """What Java does; the server sees an IPv4 address."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        assert nexus.find_socket_uid(("127.0.0.1", client.getsockname()[1]), listener.getsockname()) == os.geteuid()


@needs_root
def test_the_uid_of_another_user():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        speak = f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]}; read x"
        with subprocess.Popen(["bash", "-c", speak], user=NOBODY, stdin=subprocess.PIPE), listener.accept()[0] as accepted:
            assert nexus.find_socket_uid(accepted.getpeername(), accepted.getsockname()) == NOBODY


# Leases


@pytest.fixture
def leases():
    """Make Leases of a service in one folder, which other users reach too."""
    top = tempfile.mkdtemp(prefix="nexus-test-")
    os.chmod(top, 0o755)
    folder = os.path.join(top, "nexus-leases")
    made = []

    def make(service_id="0-aaaaaaaa"):
        made.append(nexus.Leases(nexus.DISK, folder, service_id))
        return made[-1]

    make.folder = folder
    yield make
    for one in made:
        for job_id in list(one.held):
            one.close_own(job_id)
    shutil.rmtree(top)


OWN_NAME = nexus.find_user(os.geteuid())
ALL = ["GPU-1", "GPU-2", "GPU-3", "GPU-4"]


def test_two_services_do_not_have_one_gpu(leases):
    one, two = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    one.take("abc", ["GPU-1", "GPU-2"])
    with pytest.raises(nexus.NexusError) as caught:
        two.take("xyz", ["GPU-3", "GPU-2"])
    assert caught.value.kind == "conflict" and caught.value.message == f"the nexus of {OWN_NAME} took GPU-2 first"
    assert not two.held and one.find_holders(ALL) == {}, "all or none"
    two.take("xyz", ["GPU-3"])
    assert one.find_holders(ALL) == {"GPU-3": OWN_NAME} and set(two.find_holders(ALL)) == {"GPU-1", "GPU-2"}
    one.close_own("abc")
    assert two.find_holders(ALL) == {}
    two.take("uvw", ["GPU-1"])


def test_the_jobs_of_one_service_may_share(leases):
    one, two = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    for job_id in ("abc", "xyz"):
        one.take(job_id, ["GPU-1"])
    one.close_own("abc")
    assert one.find_holders(ALL) == {} and set(two.find_holders(ALL)) == {"GPU-1"}


def test_a_lease_that_cannot_be_written_as_on_a_full_disk_is_none(leases):
    one, limits = leases(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(nexus.NexusError, match="File too large") as caught:
            one.take("abc", ["GPU-1", "GPU-2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.kind == "unavailable" and not one.held and leases("0-bbbbbbbb").find_holders(ALL) == {}


def test_its_files_can_be_used_by_all_whatever_the_umask(leases):
    before = os.umask(0o077)
    try:
        leases().take("abc", ["GPU-1", "MIG-GPU-1/2/0"])
    finally:
        os.umask(before)
    modes = {path: os.stat(os.path.join(leases.folder, path)).st_mode & 0o7777 for path in ("", *os.listdir(leases.folder))}
    assert modes == {"": 0o1777, "GPU-1": 0o666, "MIG-GPU-1_2_0": 0o666}


@needs_root
@pytest.mark.parametrize("call, where", [("mkdir", ""), ("open", "GPU-1")])
def test_killed_before_all_may_use_what_it_has_made(leases, call, where):
    """Its user's next look mends it, for the other users too."""
    code = ("import os, sys; sys.path.insert(0, sys.argv[1]); import nexus; made = getattr(nexus.Disk, sys.argv[4])\n"
            "def die(disk, path, *rest, **named):\n"
            "    handle = made(disk, path, *rest, **named)\n"
            "    if path == (sys.argv[5] or sys.argv[2]): os.kill(os.getpid(), 9)\n"
            "    return handle\n"
            "setattr(nexus.Disk, sys.argv[4], die); nexus.Leases(nexus.DISK, sys.argv[2], sys.argv[3]).find_holders(['GPU-1'])")
    done = subprocess.run([sys.executable, "-c", code, live.NEXUS.parent, leases.folder, "0-cccccccc", call, where])
    assert done.returncode == -9 and not os.stat(os.path.join(leases.folder, where)).st_mode & 0o077
    leases().take("abc", ["GPU-1"])
    with as_user(NOBODY):
        assert nexus.Leases(nexus.DISK, leases.folder, f"{NOBODY}-bbbbbbbb").find_holders(ALL) == {"GPU-1": "root"}


PLANTED = [  # reason, how it is made in the place of a GPU's file
    ("a FIFO", os.mkfifo), ("a link to a file", lambda path: os.symlink("GPU-2", path)),
    ("a link to nothing", lambda path: os.symlink("/nowhere", path)), ("a folder", os.mkdir),
    ("a socket", lambda path: socket.socket(socket.AF_UNIX).bind(path)),
    ("a second name of another file", lambda path: (pathlib.Path(path + ".x").touch(), os.link(path + ".x", path))),
]


@pytest.mark.parametrize("reason, plant", PLANTED, ids=[case[0] for case in PLANTED])
def test_what_somebody_puts_there_costs_that_gpu_alone(leases, reason, plant):
    """It is named, not opened, and not changed."""
    one, two = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    two.take("xyz", ["GPU-2"])
    path = os.path.join(leases.folder, "GPU-1")
    plant(path)
    blocked = f"{OWN_NAME} (who put something else at {path})"
    assert one.find_holders(ALL) == {"GPU-1": blocked, "GPU-2": OWN_NAME}
    with pytest.raises(nexus.NexusError) as caught:
        one.take("abc", ["GPU-1"])
    assert caught.value.kind == "conflict" and blocked in caught.value.message
    one.take("abc", ["GPU-3"])
    assert pathlib.Path(leases.folder, "GPU-2").read_text() == f"0-bbbbbbbb {OWN_NAME}\n"


@needs_root
def test_a_file_that_its_owner_closed_to_others_costs_that_gpu_alone(leases):
    leases().take("abc", ["GPU-1"])
    os.chmod(os.path.join(leases.folder, "GPU-1"), 0o600)
    with as_user(NOBODY):
        said = nexus.Leases(nexus.DISK, leases.folder, f"{NOBODY}-bbbbbbbb").find_holders(ALL)
        assert list(said) == ["GPU-1"] and said["GPU-1"].startswith("root (who put something else at ")


def test_no_file_outside_the_folder_is_touched(leases, tmp_path):
    """Whoever made a file may put a link in its place at any moment."""
    secret, one = tmp_path / "secret", leases()
    secret.write_text("mine")
    secret.chmod(0o600)
    os.utime(secret, (1, 1))

    def exchange():
        for name in os.listdir(one.folder) if os.path.isdir(one.folder) else ():
            os.unlink(f"{one.folder}/{name}")
            os.symlink(secret, f"{one.folder}/{name}")

    one.disk = nexus.Disk()
    for name in [name for name in vars(nexus.Disk) if not name.startswith("_")]:
        call = getattr(one.disk, name)
        setattr(one.disk, name, lambda *given, call=call, **named: exchange() or call(*given, **named))
    for _ in range(3):
        with contextlib.suppress(nexus.NexusError):
            one.take("abc", ["GPU-1"])
        with contextlib.suppress(nexus.NexusError):
            one.find_holders(ALL)
        one.close_own("abc")
    assert (secret.read_text(), secret.stat().st_mode & 0o777, secret.stat().st_mtime) == ("mine", 0o600, 1)


FOLDERS = [  # reason, how it is made, words
    ("a private folder that the owner named by mistake", lambda path: os.mkdir(path, 0o700), "chmod 1777"),
    ("a folder where one may remove another's files", lambda path: (os.mkdir(path), os.chmod(path, 0o777)), "chmod 1777"),
    ("a link to such a folder", lambda path: (os.mkdir(path + "2"), os.chmod(path + "2", 0o1777), os.symlink(path + "2", path)),
     "Not a directory"),
]


@pytest.mark.parametrize("reason, make, words", FOLDERS, ids=[case[0] for case in FOLDERS])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, reason, make, words):
    (tmp_path / "top").mkdir()
    folder = str(tmp_path / "top" / "nexus-leases")
    make(folder)
    with pytest.raises(nexus.NexusError) as caught:
        nexus.Leases(nexus.DISK, folder, "0-aaaaaaaa").find_holders(ALL)
    assert caught.value.kind == "unavailable" and words in f"{caught.value.message} {caught.value.hint}"


def test_no_cleaner_finds_a_lease_old(leases):
    one = leases()
    one.take("abc", ["GPU-1"])
    path, handle, _ = one.paths("abc")[0]
    runner = subprocess.Popen(["flock", "-s", handle, "-c", "echo have; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert runner.stdout.readline() == b"have\n"
    one.close_own("abc")
    os.utime(path, (1, 1))
    leases("0-bbbbbbbb").find_holders(ALL)
    assert os.stat(path).st_mtime > 1000
    runner.communicate(b"\n")


# Screen


@pytest.fixture
def short():
    """A folder with a short path: sockets must have one."""
    path = tempfile.mkdtemp(prefix="nx", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def screens(short, monkeypatch):
    """Make a Screen in a folder of its own, and end its sessions afterwards."""
    os.mkdir(f"{short}/s", 0o700)
    monkeypatch.setenv("SCREENDIR", f"{short}/s")
    monkeypatch.delenv("STY", raising=False)
    made, started = [], []

    def make(home=short):
        os.makedirs(home, exist_ok=True)
        made.append(nexus.Screen(nexus.DISK, nexus.make_layout(home, config())))
        return made[-1]

    def start(screen, name, command=("sleep", "600")):
        process = subprocess.Popen(screen.argv(name, command, is_daemon=False), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=screen.environ(), start_new_session=True, cwd="/")
        started.append(process)
        until(lambda: f"{process.pid}.{name}" in screen.list_sessions())
        return process

    make.start = start
    yield make
    for process in started:
        process.terminate()
        process.wait()


needs_screen = pytest.mark.skipif(not shutil.which("screen"), reason="screen is not installed")


@needs_screen
def test_sessions_are_told_apart_by_pid_and_whole_name(screens):
    screen = screens()
    screen.prepare()
    names = ["nexus_job_ab", "nexus_job_abc", "nexus_job_abcd", "nexus"]
    processes = {name: screens.start(screen, name) for name in names}
    assert screen.list_sessions() == {f"{process.pid}.{name}": "Detached" for name, process in processes.items()}
    screens().prepare()                         # sessions that run are no fault
    processes["nexus_job_abc"].kill()
    processes["nexus_job_abc"].wait()
    assert screen.list_sessions()[f"{processes['nexus_job_abc'].pid}.nexus_job_abc"].startswith("Dead")
    screens().prepare()
    assert {session.partition(".")[2] for session in screen.list_sessions()} == {"nexus_job_ab", "nexus_job_abcd", "nexus"}


@needs_screen
def test_a_broken_screendir_is_replaced_by_one_of_nexus(screens, short):
    os.chmod(f"{short}/s", 0o755)               # "Directory ... must have mode 700."
    screen = screens()
    screen.prepare()
    assert screen.folder == f"{short}/screen" and os.stat(screen.folder).st_mode & 0o777 == 0o700
    process = screens.start(screen, "nexus_job_abc")
    assert list(screen.list_sessions()) == [f"{process.pid}.nexus_job_abc"]
    assert os.listdir(f"{short}/screen") == [f"{process.pid}.nexus_job_abc"]


@needs_screen
def test_where_no_place_is_short_enough_the_reason_is_said(screens, short):
    os.chmod(f"{short}/s", 0o755)
    screen = screens(f"{short}/{'x' * 80}")
    with pytest.raises(nexus.NexusError) as caught:
        screen.prepare()
    assert re.match("screen: .*mode 700.* too long", caught.value.message) and "SCREENDIR" in caught.value.hint


NO_LAUNCHER = [  # reason, its program (None: none), why
    ("not installed", None, "is not installed"),
    ("it cannot be run", "\0\0", "Exec format"),
    ("it fails as it likes", "#!/bin/sh\necho getpwuid can not identify your account >&2; exit 1\n", "getpwuid"),
]
WITH_SESSIONS = [name for name, kind in nexus.LAUNCHERS.items() if kind.session_prefix]


@pytest.mark.parametrize("launcher", WITH_SESSIONS)
@pytest.mark.parametrize("reason, program, words", NO_LAUNCHER, ids=[case[0] for case in NO_LAUNCHER])
def test_a_launcher_that_cannot_be_used(short, monkeypatch, launcher, reason, program, words):
    """Jobs run directly then."""
    name, layout = nexus.LAUNCHERS[launcher].program, nexus.make_layout(short, config())
    os.mkdir(f"{short}/bin")
    monkeypatch.setenv("PATH", f"{short}/bin")
    if program is not None:
        with open(f"{short}/bin/{name}", "w") as file:
            file.write(program)
        os.chmod(f"{short}/bin/{name}", 0o755)
    machine = nexus.Machine(config(launcher=launcher, mock_gpus=1), layout, nexus.DISK, "0-aaaaaaaa")
    error = machine.launcher_error
    assert type(machine.launcher) is nexus.Direct and machine.terminal_error == error.message
    assert error.message.startswith(name) and words in error.message and name in error.hint


# Launchers


def test_every_launcher_of_the_configuration_is_one_of_the_table():
    assert [*nexus.LAUNCHERS] == nexus.JobsConfig.FIELDS["launcher"].schema["enum"]


@pytest.mark.parametrize("name", [name for name in nexus.LAUNCHERS if name not in WITH_SESSIONS])
def test_a_launcher_without_sessions(short, name):
    machine = nexus.Machine(config(launcher=name, mock_gpus=1), nexus.make_layout(short, config()), nexus.DISK, "0-aaaaaaaa")
    assert (machine.terminal_error, machine.launcher_error) == (f'launcher is "{name}"', None)
    assert not machine.launcher.list_sessions() and not machine.launcher.login_variables()
    # Nothing of another launcher's is there.
    assert {*machine.launcher.environ()} <= {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "USER", "LOGNAME", "SHELL"}


SESSIONS = [  # session, its launcher
    *((f"12.{nexus.LAUNCHERS[name].session_prefix}abc", name) for name in WITH_SESSIONS),
    ("12.nexus_job_abc", "screen"), ("12.whatever", "screen"),
]


@pytest.mark.parametrize("session, launcher", SESSIONS)
def test_a_session_tells_its_launcher(session, launcher):
    """So a job is attached to by the one that started it, whatever the configuration says by then, here or on a node."""
    assert nexus.find_launcher(session) is nexus.LAUNCHERS[launcher]
    assert not find_faults(nexus.FACT_KINDS["Session"].schema, session)


# OpenSSH

def ssh_to(**facts):
    return nexus.Ssh(nexus.NodeConfig(**{"name": "n1", "host": "10.0.0.5", **facts}), {"PATH": "/bin", "HOME": "/root"})


def test_how_a_person_reaches_a_node():
    assert ssh_to().by_hand == "ssh 10.0.0.5"
    assert ssh_to(user="gpu", port=2222, jump="me@gate:2200", identity_file="/my keys/id").by_hand == (
        "ssh -J me@gate:2200 -p 2222 -i '/my keys/id' gpu@10.0.0.5")


def test_ssh_through_a_jump_host_asks_nothing_and_uses_the_same_key():
    words = ssh_to(jump="me@gate:2200", identity_file="/my keys/id").list_options()
    assert "BatchMode=yes" in words and "ForwardAgent=no" in words and words[words.index("-i") + 1] == "/my keys/id"
    proxy = next(word for word in words if word.startswith("ProxyCommand="))
    assert "BatchMode=yes" in proxy and "-i '/my keys/id' -p 2200 -l me -W [%h]:%p gate" in proxy
    assert not any("StrictHostKeyChecking" in word or "assword" in word for word in words), "as OpenSSH itself has it"


SAID = [  # what ssh says, what is said, what to do
    ("Received disconnect: Too many authentication failures\n", "Too many authentication failures", "--identity FILE"),
    ("channel 2: open failed: administratively prohibited: open failed\n", "administratively prohibited", "AllowTcpForwarding yes"),
    ("ssh: connect to host 10.0.0.5 port 22: No route to host\r\n", "No route to host", "try it by hand: ssh 10.0.0.5"),
    ("mkdir: cannot create directory: Permission denied\n", "mkdir: cannot create", "try it by hand: ssh 10.0.0.5"),
    ("nexus: the port is taken\nhint: free it\n", "n1: nexus: the port is taken", "free it; try it by hand: ssh 10.0.0.5"),
    ("", "the line was cut", "try it by hand: ssh 10.0.0.5"),
    ("\x1b[2Jhello\n", "?[2Jhello", "try it by hand"),
]


@pytest.mark.parametrize("said, words, hint", SAID, ids=[case[1] for case in SAID])
def test_what_ssh_says_is_passed_on_with_what_to_do(said, words, hint):
    fault = ssh_to().make_error("cannot reach", said)
    assert fault.kind == "unavailable" and fault.message.startswith("cannot reach n1: ") and hint in fault.hint
    assert words.replace("?", "") in fault.message.replace("\\x1b", "") and "\x1b" not in fault.message


def test_ssh_that_is_not_there(tmp_path):
    made = nexus.Ssh(nexus.NodeConfig("n1", "10.0.0.5"), {"PATH": str(tmp_path)})
    with pytest.raises(nexus.NexusError) as caught:
        nexus.AgentLine(nexus.DISK, LAYOUT, made, "0-12345678", "12345678")
    assert caught.value.kind == "unavailable" and "openssh-client" in caught.value.hint


@pytest.mark.parametrize("script, words", [
    ("exec yes", "its login prints more than 1000 lines"),
    ("echo nexus-agent: needs; exec cat >/dev/null", "has changed since the service began")])
def test_a_node_to_which_no_agent_can_be_brought(tmp_path, script, words):
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    made = nexus.Ssh(nexus.NodeConfig("n1", "10.0.0.5"), {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    error = in_time(lambda: nexus.AgentLine(nexus.DISK, LAYOUT, made, "0-12345678", "12345678"))
    assert isinstance(error, nexus.NexusError) and error.kind == "unavailable" and words in error.message, repr(error)


def test_a_node_gets_the_code_with_which_the_service_was_started(tmp_path, monkeypatch):
    """Also once another nexus.py was copied over that."""
    monkeypatch.setattr(nexus, "SSH_TIMEOUT_S", 0.5)
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho nexus-agent: needs; exec cat > {tmp_path}/received\n")
    (tmp_path / "ssh").chmod(0o755)
    layout, code = nexus.make_layout(str(tmp_path), config()), b"# the former one\n"
    digest = nexus.hash_code(code)
    (tmp_path / "cache").mkdir()
    pathlib.Path(layout.copy_of(digest, ".py")).write_bytes(code)
    made = nexus.Ssh(nexus.NodeConfig("n1", "10.0.0.5"), {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    with pytest.raises(nexus.NexusError):               # nobody runs it there
        nexus.AgentLine(nexus.DISK, layout, made, "0-12345678", digest)
    assert (tmp_path / "received").read_bytes().endswith(b"\n%d\n%s" % (len(code), code))


# Programs that go on by themselves

@pytest.mark.parametrize("folder", ["/", "/tmp"], ids=["by posix_spawn", "by subprocess"])
def test_a_spawned_program_inherits_what_it_is_passed_and_nothing_else(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(folder)
    with open(tmp_path / "given", "w") as given, open(tmp_path / "passed", "w") as first, open(tmp_path / "passed", "w") as second:
        os.set_inheritable(given.fileno(), True)
        nexus.withhold_descriptors()
        (tmp_path / "look").write_text("#!/bin/sh\nexec > \"$1\"; ls -l /proc/self/fd; pwd; grep SigIgn /proc/self/status; "
                                       "ps -o sid= -p $$; echo $$; echo \"$TEXT\"\n")
        (tmp_path / "look").chmod(0o755)
        handles = [first.fileno(), second.fileno()]
        child = nexus.spawn(["look", str(tmp_path / "said")], {"PATH": f"{tmp_path}/none:{tmp_path}:{os.environ['PATH']}", "TEXT": "a b"},
                            handles)
        until(lambda: child.poll() is not None)
        assert not any(os.get_inheritable(handle) for handle in handles)
    listing, _, rest = (tmp_path / "said").read_text().partition("\n/\n")
    assert rest, listing
    ignored, session, pid, text = rest.splitlines()
    assert session.strip() == pid == str(child.pid) and text == "a b"
    assert int(ignored.split()[1], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
    assert sorted(map(int, re.findall(r" (\d+) -> .*/passed", listing))) == sorted(handles)
    assert "/given" not in listing and re.search(r" 0 -> /dev/null\n", listing) and re.search(r" 2 -> /dev/null\n", listing)


@pytest.mark.parametrize("folder", ["/", "/tmp"], ids=["by posix_spawn", "by subprocess"])
def test_a_program_that_is_not_there_cannot_be_spawned(monkeypatch, folder):
    monkeypatch.chdir(folder)
    with pytest.raises(FileNotFoundError):
        nexus.spawn(["no-such-program"], {"PATH": os.environ["PATH"]})


def test_a_start_waits_for_what_comes_next(tmp_path, monkeypatch):
    """So a short job is heard of once.  An end, or whatever else wakes the service, is not kept waiting."""
    monkeypatch.setattr(nexus, "STARTS_WAIT_S", 600.0)
    events = nexus.RunnerEvents(str(tmp_path / "events"), None)
    said = [b"start abc 1 100 1000 1000\n", b"end abc 1 0 250\n"]
    for lines, count in (([*said], 2), ([said[1]], 1), ([said[0], b"\n"], 1)):
        threading.Thread(target=lambda lines=lines: [(time.sleep(0.01), os.write(events.target, line)) for line in lines]).start()
        assert len(events.wait(600)) == count
    os.write(events.target, said[0])
    monkeypatch.setattr(nexus, "STARTS_WAIT_S", 0.01)
    assert len(events.wait(600)) == 1
    os.close(events.source)

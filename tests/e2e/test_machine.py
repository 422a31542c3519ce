"""Real programs, process trees, screens, users and folders that hang, below everything else."""

import contextlib
import os
import pathlib
import re
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
from makers import config, running

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


def uuid(index):
    return f"GPU-{index:08x}-0000-0000-0000-{index:012x}"


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
    """It reads as a zombie, and its other threads go on: they may hold a GPU.  Its environment and memory are theirs."""
    mine = tree()
    code = ("import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
            "ctypes.CDLL(None).pthread_exit(None)")
    pid, = mine.start(f"(setsid {mine.mark()} {nexus.quote(sys.executable)} -S -c {nexus.quote(code)} & echo $!)")
    processes = nexus.Processes()
    process = until(lambda: (lambda found: found if found and found.state == "Z" else None)(processes.find(pid)))
    assert pid in member_pids(processes, mine.job())["abc"]
    assert nexus.measure_memory(nexus.import_psutil(), [process]) > 1
    processes.send(process, signal.SIGKILL)
    until(lambda: not processes.is_alive(pid, process.started))


def test_a_session_of_a_reused_pid_is_not_the_jobs(tree):
    """job.sh was killed, and its pid now leads a session of somebody else's."""
    theirs = tree("bbb")
    theirs.start("sleep 600 & echo $!")
    job = nexus.change_job(theirs.job(pid_started=theirs.started - 100), id="abc", nonce="0" * 16).value
    assert member_pids(nexus.Processes(), job)["abc"] == set()


@needs_root
def test_the_uid_of_another_user():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        speak = f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]}; read x"
        with subprocess.Popen(["bash", "-c", speak], user=NOBODY, stdin=subprocess.PIPE), listener.accept()[0] as accepted:
            assert nexus.find_socket_uid(accepted.getpeername(), accepted.getsockname()) == NOBODY


# Leases

ALL = ["GPU-1", "GPU-2", "GPU-3", "GPU-4"]


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


@needs_root
def test_a_file_that_its_owner_closed_to_others_costs_that_gpu_alone(leases):
    leases().take("abc", ["GPU-1"])
    os.chmod(os.path.join(leases.folder, "GPU-1"), 0o600)
    with as_user(NOBODY):
        said = nexus.Leases(nexus.DISK, leases.folder, f"{NOBODY}-bbbbbbbb").find_holders(ALL)
        assert list(said) == ["GPU-1"] and said["GPU-1"].startswith("root (who put something else at ")


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


# PATH, of which a folder may hang


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """(a folder that does not answer, PATH with it between two others)"""
    monkeypatch.setattr(nexus, "FOLDER_TIMEOUT_S", 0.3)
    for name in ("first", "hung", "last"):
        (tmp_path / name).mkdir()
    for path in (tmp_path / "first/one", tmp_path / "last/two"):
        path.write_text("#!/bin/sh\necho $0\n")
        path.chmod(0o755)
    folder = str(tmp_path / "hung")
    with live.hung_folder(folder, is_taken=True):
        yield folder, f"{tmp_path}/first:{folder}:{tmp_path}/last:{os.environ['PATH']}"
    until(lambda: folder not in nexus.list_hung_folders())


def test_a_folder_of_path_that_hangs_is_passed_over_and_asked_once(hung, tmp_path):
    folder, path = hung
    assert nexus.find_program("one", path) == str(tmp_path / "first/one") and nexus.list_hung_folders() == []
    before = psutil.Process().children()
    for _ in range(20):
        assert nexus.find_program("two", path) == str(tmp_path / "last/two") and nexus.find_program("three", path) is None
    waiting, = {*psutil.Process().children()} - {*before}
    assert nexus.list_hung_folders() == [folder] and "looking" not in str(threading.enumerate()), "no thread of this process waits"
    waiting.kill()
    assert waiting.status() != psutil.STATUS_ZOMBIE and nexus.list_hung_folders() == [folder], "no signal ends what waits"
    assert nexus.leave_out_hung(path) == path.replace(f"{folder}:", "")
    assert nexus.find_program("one", folder) is None and nexus.find_program(f"{folder}/one") is None


def test_a_program_is_run_where_a_folder_of_path_hangs(hung, tmp_path):
    folder, path = hung
    done = nexus.run(["two"], 20, {"PATH": path})
    assert done.output == f"{tmp_path}/last/two\n"
    with pytest.raises(nexus.NexusError, match=f"three was not found on PATH; {folder} does not answer"):
        nexus.run(["three"], 20, {"PATH": path})

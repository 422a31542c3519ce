"""job.sh as it really runs, with and without screen; and what keeps the service running."""

import contextlib
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from unittest import mock

import pytest
import samples
from live import until
from makers import config, running

import nexus

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a file system")
needs_screen = pytest.mark.skipif(not shutil.which("screen"), reason="screen is not installed")
NOBODY = 65534
SHELLS = {"dash": shutil.which("dash") or "/bin/sh", "bash as sh": shutil.which("bash")}


class Box:
    """A ~/.nexus, and the runners that were started in it."""

    def __init__(self, home):
        os.makedirs(home, exist_ok=True)
        self.home = home
        self.layout = nexus.make_layout(home, config())
        os.mkfifo(self.layout.events_file)
        self.fifo = os.open(self.layout.events_file, os.O_RDWR | os.O_NONBLOCK)
        self.heard = ""
        self.started = []
        self.screen = None

    def use_screen(self):
        self.screen = nexus.Screen(nexus.DISK, self.layout)
        self.screen.prepare()

    def prepare(self, command, leases=(), environment=None, handles=(), **fields):
        """Write job.sh; return the job."""
        given = {"cwd": self.home, "attempt": 1, "command": command, "gpu_uuids": (), **fields}
        job = running(given.pop("id", "abc"), **given)
        folder = self.layout.job_folder(job.id)
        os.makedirs(folder, exist_ok=True)
        variables = {"PATH": os.environ["PATH"]} if environment is None else environment
        script = nexus.build_script(job, variables, self.layout, leases, handles)
        nexus.write_atomic(nexus.DISK, f"{folder}/job.sh", [script], 0o700)
        return job

    def start(self, job, before=(), **options):
        argv = [*before, "bash", f"{self.layout.job_folder(job.id)}/job.sh", str(job.attempt)]
        if self.screen:
            argv = self.screen.argv(f"nexus_job_{job.id}", argv, is_daemon=False)
            options.setdefault("env", self.screen.environ())
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/",
                   "start_new_session": True, "env": {"PATH": os.environ["PATH"]}, **options}
        self.started.append(subprocess.Popen(argv, **options))
        return self.started[-1]

    def run(self, command, **options):
        """Run a command as a job to its end; return its result."""
        job = self.prepare(command, **options)
        process = self.start(job)
        result = until(lambda: self.result(job))
        assert process.wait(60) == 0
        return result

    def result(self, job):
        return nexus.read_result(nexus.DISK, self.layout.job_folder(job.id), job.attempt_key)

    def path(self, name, job_id="abc"):
        return os.path.join(self.layout.job_folder(job_id), name)

    def text(self, name, job_id="abc"):
        with open(self.path(name, job_id), "rb") as file:
            return file.read().decode("utf-8", "surrogateescape")

    def hear(self, verb):
        """Wait for a saying with this verb; return the sayings since the last call up to it."""
        said = []

        def listen():
            with contextlib.suppress(BlockingIOError):
                self.heard += os.read(self.fifo, 65536).decode()
            while "\n" in self.heard:
                line, _, self.heard = self.heard.partition("\n")
                said.append(nexus.parse_runner_event(line))
                assert said[-1], line
                if said[-1].verb == verb:
                    return said
            return None

        return until(listen, verb)

    def close(self):
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        marks = b"\0NEXUS_TEST_HOME=" + os.fsencode(self.home) + b"\0"
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if marks in b"\0" + file.read():
                    os.kill(int(pid), signal.SIGKILL)
        os.close(self.fifo)


@pytest.fixture
def box(monkeypatch):
    top = tempfile.mkdtemp(prefix="nx", dir="/tmp")         # a short path: screen's sockets must have one
    os.mkdir(f"{top}/s", 0o700)
    monkeypatch.setenv("SCREENDIR", f"{top}/s")
    monkeypatch.delenv("STY", raising=False)
    made = Box(f"{top}/home")
    yield made
    made.close()
    shutil.rmtree(top, ignore_errors=True)


# How a command ends

COMMANDS = [  # reason, command, exit code, stdout, what its stderr matches
    ("nothing to say", "true", 0, "", ""),
    ("the exit code is kept", "exit 37", 37, "", ""),
    ("the highest one", "exit 255", 255, "", ""),
    ("SIGTERM", "kill -TERM $$", 143, "", ""),
    ("SIGKILL", "kill -KILL $$", 137, "", ""),
    ("SIGHUP: what job.sh survives, the command does not", "kill -HUP $$", 129, "", ""),
    ("not found", "no-such-program", 127, "", "no-such-program"),
    ("no bash", "if", 2, "", "syntax error"),
    ("two streams", "echo out; echo err >&2", 0, "out\n", "err\n"),
    ("bash, and not sh", "a=(x y); [[ ${a[1]} == y ]] && echo ${a[@]^^}", 0, "X Y\n", ""),
    ("a comment at its end", "echo a # b", 0, "a\n", ""),
    ("a here-document", "cat <<'EOF'\n$x `y` \"z\"\nEOF\n", 0, "$x `y` \"z\"\n", ""),
    ("quotes of all kinds", """echo 'it'"'"'s' "a \\"b\\"" $'\\t|'""", 0, "it's a \"b\" \t|\n", ""),
    ("percent signs and backslashes", r"printf '%s\n' '%d\n' '\\' \$HOME", 0, "%d\\n\n\\\\\n$HOME\n", ""),
    ("bytes that are no text", "echo '\udcff\udc81\udc88'", 0, "\udcff\udc81\udc88\n", ""),
    ("a dash first", "-x", 127, "", "-x"),
    ("no input", "cat; echo $?", 0, "0\n", ""),
    ("what has left its session is not waited for",
     "setsid sleep 600 & until grep -q ^sleep /proc/$!/cmdline; do :; done; echo left", 0, "left\n", ""),
    ("piped into tee", "cd / && (echo out; exit 3) 2>&1 | tee /dev/null", 3, "out\n", ""),
    ("the last that failed counts", "set -eu; (exit 3) | (cat; exit 4) | cat | tee; # x\n", 4, "", ""),
    ("unless it is expected to", "(exit 3) | tee /dev/null || true", 0, "", ""),
    ("tee itself failed", "(exit 3) | tee /nowhere/log", 1, "", "nowhere"),
    ("in a loop the last time counts", "for code in 3 4; do (exit $code) | tee /dev/null; done", 4, "", ""),
    ("a condition is none", "if (exit 3) | tee /dev/null; then echo out; fi", 0, "out\n", ""),
    ("what stands before it failed", "true | false && echo out | tee /dev/null", 1, "", ""),
    ("an earlier pipeline does not count", "yes | head -1 && echo out | tee /dev/null", 0, "y\nout\n", ""),
    ("nor does one before a test", "(exit 3) | true; [[ -e /nowhere ]] && echo out | tee /dev/null", 1, "", ""),
]


@pytest.mark.parametrize("reason, command, code, out, err", COMMANDS, ids=[case[0] for case in COMMANDS])
def test_a_command_runs_to_its_end(box, reason, command, code, out, err):
    began = time.time()
    result = box.run(command, environment={"PATH": os.environ["PATH"], "NEXUS_TEST_HOME": box.home})
    assert result.exit_code == code, box.text("stderr.log")
    assert box.text("stdout.log") == out and re.search(err, box.text("stderr.log"))
    assert result.cause is None and began - 1 <= result.finished_at <= time.time() and 0 <= result.runtime_seconds < 10
    start, end = box.hear("end")
    assert (start.verb, start.job_id, start.attempt) == ("start", "abc", 1)
    pid, started, began_at = map(int, start.words)
    assert pid == box.started[0].pid and began_at >= started
    assert nexus.read_claim(nexus.DISK, box.layout.job_folder("abc"), "abc-1-1") == nexus.Claim(pid, started, began_at)
    assert end.words[0] == str(code) and float(end.words[1]) / 100 == result.runtime_seconds
    assert sorted(os.listdir(box.layout.job_folder("abc"))) == ["attempt-1", "job.sh", "result-1.json", "stderr.log",
                                                                "stdout.log"], "no litter"



# Claims


def test_of_fifty_at_once_one_runs(box):
    job = box.prepare("echo ran; sleep 0.2")
    processes = [box.start(job) for _ in range(50)]
    assert all(process.wait(60) == 0 for process in processes)
    assert box.text("stdout.log") == "ran\n"
    assert [saying.verb for saying in box.hear("end")] == ["start", "end"]


def test_a_late_runner_finds_its_attempt_taken(box):
    job = box.prepare("echo ran")
    assert [nexus.take_claim(nexus.DISK, box.layout.job_folder("abc"), "abc-1-1") for _ in range(2)] == [nexus.OUR_CLAIM] * 2
    assert box.start(job).wait(60) == 0
    assert sorted(os.listdir(box.layout.job_folder("abc"))) == ["attempt-1", "job.sh"] and box.heard == ""
    assert nexus.read_claim(nexus.DISK, box.layout.job_folder("abc"), "abc-1-1") == nexus.OUR_CLAIM
    job = box.prepare("echo ran", attempt=2)
    box.start(job)
    until(lambda: box.result(job))
    assert box.text("stdout.log") == "ran\n", "the next attempt is another"


def test_runner_and_service_race_for_the_claim(box):
    outcomes, processes = set(), nexus.Processes()
    for number in range(30):
        job = box.prepare("echo ran", attempt=number + 1)
        process = box.start(job)
        time.sleep(0.0005 * (number % 10))
        while True:
            is_gone, writers = nexus.withdraw(nexus.DISK, processes, box.layout.job_folder("abc"), job.attempt_key)
            if not writers:
                break
        process.wait(60)
        assert is_gone == (box.result(job) is None), "either or"
        outcomes.add(is_gone)
    assert outcomes, "both ways are seen on most days, but need not be"


def slow_claim(box, job, number):
    """Have job.sh stopped when its claim is open and not written yet: it gets the signal `number` there."""
    script = pathlib.Path(box.path("job.sh"))
    text = script.read_text()
    assert text.count("\nset +C\n") == 1
    script.write_text(text.replace("\nset +C\n", f"\nkill -{int(number)} $$\nset +C\n"))


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_slow_runner_is_waited_for(box, goes_on):
    job, folder, processes = box.prepare("echo ran"), box.layout.job_folder("abc"), nexus.Processes()
    slow_claim(box, job, signal.SIGSTOP)
    process = box.start(job)
    until(lambda: os.path.exists(box.path("attempt-1")) and processes.find(process.pid).state == "T")
    for _ in range(3):
        is_gone, writers = nexus.withdraw(nexus.DISK, processes, folder, "abc-1-1")
        assert not is_gone and [writer.pid for writer in writers] == [process.pid]
    assert nexus.withdraw(nexus.DISK, processes, folder, "abc-1-11")[0], "another attempt is another's"
    process.send_signal(signal.SIGCONT if goes_on else signal.SIGKILL)
    process.wait(60)
    assert nexus.withdraw(nexus.DISK, processes, folder, "abc-1-1") == (not goes_on, [])
    assert (box.result(job) is None) == (not goes_on)


@pytest.mark.parametrize("first", range(1, 9))
def test_killed_at_each_step(box, first):
    """Before each simple command of job.sh, one after another: what is left tells whether the command has run."""
    for step in itertools.count(first, 8):
        job = box.prepare("echo ran; echo ran >&2", attempt=step)
        script = pathlib.Path(box.path("job.sh"))
        head, rest = script.read_text().split("\n", 1)
        trap = f"steps=0; set -T; trap '((++steps != {step})) || kill -9 $$' DEBUG"
        script.write_text(f"{head}\n{trap}\n{rest}")
        is_killed = box.start(job).wait(60) == -signal.SIGKILL
        began = nexus.read_claim(nexus.DISK, box.layout.job_folder("abc"), job.attempt_key) or nexus.OPEN_CLAIM
        is_gone, writers = nexus.withdraw(nexus.DISK, nexus.Processes(), box.layout.job_folder("abc"), job.attempt_key)
        log = pathlib.Path(box.path("stdout.log"))
        ran = log.read_text() if log.exists() else ""
        assert writers == [] and is_gone == (not began.pid) and ran in ("", "ran\n"), step
        assert not ran or began.began, "what has no begin did not run"
        result = box.result(job)
        assert result is None or (ran and result.exit_code == 0), "no result without a run"
        if not is_killed:
            assert result and step > 60, "it goes through all of it"
            return
        log.unlink(missing_ok=True)


def test_a_disk_that_takes_no_claim(box):
    """Its file is there, and empty: nobody has the attempt."""
    job = box.prepare("echo ran")
    script = pathlib.Path(box.path("job.sh"))
    script.write_text(script.read_text().replace('exec 8>"$dir/attempt-$attempt"', 'exec 8>"$dir/attempt-$attempt" 8>/dev/full'))
    process = box.start(job)
    assert "cannot be written" in " ".join(box.hear("fail")[-1].words) and process.wait(60) == 0
    assert nexus.withdraw(nexus.DISK, nexus.Processes(), box.layout.job_folder("abc"), "abc-1-1") == (True, []) and box.result(job) is None


def test_a_claim_that_is_removed(box):
    """And made again: job.sh reads it back before anything of the job begins."""
    job = box.prepare("echo ran")
    script = pathlib.Path(box.path("job.sh"))
    script.write_text(script.read_text().replace(
        "\nexec 8>&-\n", '\nexec 8>&-\nrm "$dir/attempt-$attempt"\nprintf "0 0\\n" > "$dir/attempt-$attempt"\n', 1))
    assert box.start(job).wait(60) == 0 and box.result(job) is None and box.heard == ""


# What cannot be launched

ODD = "a 'b' \"c\" $(d) `e` \\ é %s @id@ *"
NOT_LAUNCHED = [  # reason, fields of the job, environment, words of cause_line
    ("the directory is gone", {"cwd": "/nowhere/at/all"}, None, "/nowhere/at/all cannot be entered"),
    ("one with an odd name", {"cwd": f"/nowhere/{ODD}\udcff\n"}, None, f"/nowhere/{ODD}\udcff\n cannot be entered"),
    ("no bash on the job's PATH", {}, {"PATH": "/nowhere"}, "bash was not found on PATH"),
    ("an empty PATH", {"cwd": "/"}, {"PATH": ":"}, "bash was not found on PATH"),
]


@pytest.mark.parametrize("reason, fields, environment, words", NOT_LAUNCHED, ids=[case[0] for case in NOT_LAUNCHED])
def test_why_it_could_not_be_launched(box, reason, fields, environment, words):
    result = box.run("echo ran", environment=environment, **fields)
    assert (result.exit_code, result.cause, result.runtime_seconds) == (None, "launch", 0.0)
    assert nexus.format_line(words).replace("\udcff", "\ufffd") in result.cause_line
    assert words.split("\n")[0] in box.text("stderr.log"), "who looks at the log finds it too"
    assert not os.path.exists(box.path("stdout.log"))


def test_log_files_that_cannot_be_written(box):
    job = box.prepare("echo ran")
    os.mkdir(box.path("stdout.log"))
    box.start(job)
    result = until(lambda: box.result(job))
    assert result.cause == "launch" and "log files" in result.cause_line


def test_a_file_system_without_hard_links(box):
    disk = nexus.Disk()
    with mock.patch.object(disk, "link", side_effect=PermissionError):
        assert nexus.take_claim(disk, box.layout.job_folder("abc"), "abc-1-1") == nexus.OUR_CLAIM
        assert nexus.take_claim(disk, box.layout.job_folder("abc"), "abc-1-1") == nexus.OUR_CLAIM
    assert os.listdir(box.layout.job_folder("abc")) == ["attempt-1"]


def test_a_log_folder_that_is_gone(box):
    job = box.prepare("echo ran")
    script = f"{box.home}/job.sh"
    os.rename(box.path("job.sh"), script)
    os.rmdir(box.layout.job_folder("abc"))
    process = subprocess.Popen(["bash", script, "1"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    said = box.hear("fail")[-1]
    assert "cannot be written" in " ".join(said.words) and process.wait(60) == 0 and box.result(job) is None


# What the command is given


def seen_environment(box):
    """What a command wrote of its environment into `environ`."""
    with open(f"{box.home}/environ", "rb") as file:
        return [entry.decode("utf-8", "surrogateescape") for entry in file.read().split(b"\0")[:-1]]


ENVIRONMENT = {
    "PATH": os.environ["PATH"], "EMPTY": "", "SPACES": "  a  b ", "NEWLINES": "a\nb\n\n", "QUOTES": "it's \"so\"", "BACKSLASH": "\\n\\",
    "DOLLAR": "$HOME `id` $(id)", "UNICODE": "größe 数 🦊", "BYTES": "".join(chr(n) if n < 128 else chr(0xdc00 + n) for n in range(1, 256)),
    "BASH_FUNC_x%%": "() {  echo hi\n}", "a.b-c": "dots", "1": "a digit", "equals": "a=b=c", "LD_LIBRARY_PATH": "/opt/cuda/lib64",
    "HOLE": "@id@ @dir@", "%s": "percent", "with space": "x", "ünïcode": "x", "\udcff": "x", "BASH_ENV": "", "ENV": "/nowhere", "IFS": "x",
    "CDPATH": "/", "PS4": "$(touch pwned)", "SHELLOPTS_": "x", "TERM": "xterm", "-i": "a dash", "--": "two", "_": "x",
    "NEXUS_JOB_NONCE": "cafe",
}


@pytest.mark.parametrize("environment", [
    ENVIRONMENT, {"PATH": os.environ["PATH"], "OLDPWD": "/x", "PWD": "/y", "HOME": "/z", "dir": "a", "attempt": "", "pair": "x",
                  "leases": "x", "NEXUS_JOB_NONCE": "cafe"},
    {"PATH": os.environ["PATH"], "UID": "5", "RANDOM": "5", "SECONDS": "x", "POSIXLY_CORRECT": "1", "LC_ALL": "nowhere", "HISTCMD": "x",
     "OPTIND": "x", "SHLVL": "7", "TZ": "x", "PPID": "x", "BASHOPTS": "x", "SHELLOPTS": "braceexpand", "GROUPS": "x", "FUNCNAME": "x"},
    {"dir": "no PATH"}], ids=["all", "those of the script", "those of bash", "no PATH"])
def test_the_environment_is_exactly_what_it_was(box, environment):
    result = box.run("cat /proc/$$/environ > environ", environment=environment)
    assert result.exit_code == 0, box.text("stderr.log")
    seen = [entry for entry in seen_environment(box) if not entry.startswith("_=")]         # bash as sh sets it for all that it begins
    assert sorted(seen) == sorted(f"{name}={text}" for name, text in environment.items() if name != "_")


def test_no_argument_shows_a_variable(box):
    """Every user of the machine can read the arguments of each process."""
    box.prepare("true", environment={"PATH": os.environ["PATH"], "WANDB_API_KEY": "hush"})
    before, words, arguments = box.text("job.sh").partition('"$@" bash -c')
    assert words and "WANDB_API_KEY=hush" in before and "hush" not in arguments


def test_a_large_environment_and_command(box):
    environment = {"PATH": os.environ["PATH"], "LARGE": "x" * 100000, **{f"N{n}": "y" * 1000 for n in range(300)}}
    box.run("cat /proc/$$/environ > environ; echo " + "z" * 100000, environment=environment)
    assert len(seen_environment(box)) == len(environment) + 1 and len(box.text("stdout.log")) == 100001


def test_no_descriptor_but_the_three_in_its_directory(box):
    folder = pathlib.Path(f"{box.home}/{ODD}\n\udcff")
    folder.mkdir()
    box.run("ls /proc/$$/fd > fds; true", cwd=str(folder))
    assert (folder / "fds").read_text().split() == ["0", "1", "2"]


def test_no_signal_is_ignored(box):
    def reset():
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)           # whoever runs the tests may ignore some

    job = box.prepare("grep SigIgn /proc/$$/status")
    box.start(job, preexec_fn=reset)
    until(lambda: box.result(job))
    assert int(box.text("stdout.log").split()[1], 16) & 0x7fffffff == 0, "1 to 31; the C library has 32 for itself"


# What job.sh survives


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "TERM"])
def test_job_sh_outlives_signals_of_the_terminal(box, name):
    os.mkfifo(f"{box.home}/go")
    job = box.prepare("read x < go; exit 7")
    process = box.start(job)
    box.hear("start")
    until(lambda: os.path.exists(box.path("stderr.log")))
    os.kill(process.pid, getattr(signal, f"SIG{name}"))
    with open(f"{box.home}/go", "w") as file:
        file.write("go\n")
    assert until(lambda: box.result(job)).exit_code == 7


def test_a_stop_does_not_keep_job_sh_from_finding_what_goes_on(box):
    """Its grep was taken for the command's, and ended: job.sh left, and screen hung up on a program that saved its work."""
    binaries = pathlib.Path(box.home, "bin")
    binaries.mkdir()
    (binaries / "grep").write_text(
        f'#!/bin/sh\necho $$ > {box.home}/pid\nread x < {box.home}/go\nPATH={os.environ["PATH"]} exec grep "$@"\n')
    (binaries / "grep").chmod(0o755)
    os.mkfifo(f"{box.home}/go")
    job = box.prepare("sleep 600 &", environment={"PATH": os.environ["PATH"], "NEXUS_TEST_HOME": box.home})
    box.start(job, env={"PATH": f"{binaries}:{os.environ['PATH']}"})
    pid = int(until(lambda: os.path.exists(f"{box.home}/pid") and pathlib.Path(box.home, "pid").read_text()))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(pid, number)
    go = os.open(f"{box.home}/go", os.O_RDWR)
    os.write(go, b"go\n")
    assert until(lambda: box.result(job)).goes_on
    os.close(go)


@pytest.mark.parametrize("is_short", [True, False], ids=["above its own pid", "among all processes"])
def test_a_process_whose_first_thread_has_ended_works_on(box, is_short):
    """It reads as a zombie; a real one counts for nothing."""
    alive = ("import ctypes, sys, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
             "open('abc', 'w').close(); ctypes.CDLL(None).pthread_exit(None)")
    gone = ("import os, time; os.fork() or os._exit(0); os.setsid(); os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT); "
            "open('abd', 'w').close(); time.sleep(600)")
    for job_id, code, goes_on in (("abc", alive, True), ("abd", gone, False)):
        job = box.prepare(f"python3 -S -c {nexus.quote(code)} & until [ -e {job_id} ]; do sleep 0.05; done; sleep 0.1", id=job_id,
                          cwd=box.home, environment={"PATH": os.environ["PATH"], "NEXUS_TEST_HOME": box.home})
        if not is_short:
            path = pathlib.Path(box.path("job.sh", job_id))
            before, mark, after = path.read_text().partition("took < 1000")
            assert mark
            nexus.write_atomic(nexus.DISK, str(path), [f"{before}0{after}"], 0o700)
        box.start(job)
        assert until(lambda job=job: box.result(job)).goes_on == goes_on


@needs_root
def test_a_job_that_takes_the_rights_on_its_folder(box):
    """Its job.sh does not stay for ever.  Of root, only one without capabilities is kept out."""
    job = box.prepare(f"chmod 500 {box.layout.job_folder('abc')}; exit 3")
    process = box.start(job, ["setpriv", "--bounding-set=-all"])
    assert until(lambda: box.result(job)).exit_code == 3 and process.wait(60) == 0


UPTIMES = [  # reason, /proc/uptime at first, and when the command ends; the runtime that is told
    ("a container's, which has just begun", "0.08 0.01", "0.98 0.01", 0.9),
    ("lxcfs was started again, and shows the host's", "90.00 0.01", "20.00 0.01", 0.0),
    ("lxcfs has gone", "90.00 0.01", "", 0.0),
    ("there was none", "", "", 0.0),
]


@needs_root
@pytest.mark.parametrize("reason, first, last, runtime_s", UPTIMES, ids=[case[0] for case in UPTIMES])
def test_the_uptime_of_a_container(box, reason, first, last, runtime_s):
    """It is no clock for others: when the job began is told by that of the processes' starts."""
    path = pathlib.Path(box.home, "uptime")
    path.write_text(first and f"{first}\n")
    job = box.prepare(f"printf '%s' '{last}{last and chr(10)}' > {path}; exit 3")
    process = box.start(job, ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /proc/uptime; exec "$@"', str(path)])
    result = until(lambda: box.result(job))
    assert (result.exit_code, result.runtime_seconds) == (3, runtime_s)
    claim = nexus.read_claim(nexus.DISK, box.layout.job_folder("abc"), "abc-1-1")
    assert claim.pid == process.pid and 0 <= claim.began - claim.started < 6000


# A terminal for stdout


@pytest.mark.skipif(not shutil.which("script"), reason="script is not installed")
@pytest.mark.parametrize("place", ["direct", "screen"])
def test_tty(box, place):
    if place == "screen":
        if not shutil.which("screen"):
            pytest.skip("screen is not installed")
        box.use_screen()
    result = box.run("test -t 1 && echo \"it's\" $X; exit 7", tty=True, environment={"PATH": os.environ["PATH"], "X": "y"})
    assert result.exit_code == 7 and box.text("stdout.log") == "it's y\r\n"


@pytest.mark.skipif(not shutil.which("script"), reason="script is not installed")
@pytest.mark.parametrize("shell", [None, "/bin/false", "/bin/bash", "/nowhere", ""])
def test_a_terminal_whatever_the_login_shell(box, shell):
    environment = {"PATH": os.environ["PATH"], **({} if shell is None else {"SHELL": shell})}
    result = box.run("tr '\\0' '\\n' < /proc/$$/environ | grep ^SHELL=; exit 7", tty=True, environment=environment)
    assert result.exit_code == 7, box.text("stderr.log")
    assert box.text("stdout.log") == ("" if shell is None else f"SHELL={shell}\r\n")


# By hand


def test_by_hand_it_just_runs_the_command(box):
    box.prepare("echo $X $(pwd) $NEXUS_JOB_NONCE; echo err >&2; umask; exit 7", cwd="/usr", umask=0o027,
                environment={"PATH": os.environ["PATH"], "X": "it's", "NEXUS_JOB_NONCE": "cafe"})      # it is nobody's to end
    done = subprocess.run(["bash", box.path("job.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "it's /usr\n0027\n", "err\n")
    assert os.listdir(box.layout.job_folder("abc")) == ["job.sh"] and box.heard == ""
    done = subprocess.run([box.path("job.sh")], capture_output=True, text=True)
    assert done.returncode == 7, "it can be run as it is"


def test_shellcheck_finds_nothing_in_a_whole_job_sh():
    """Of its parts .ci/run checks what is right in each alone.  Here: they set all that the others use."""
    job = nexus.change_job(running("abc"), snapshot="a", snapshot_repo="/repo").value
    text = nexus.build_script(job, {"A": "b", "a b": "c"}, nexus.make_layout("/h", config()), [("/leases/1", "/proc/2/fd/3", "0-a")], [10])
    excluded = ("SC2086",               # what is split into words is meant to be
                "SC2119,SC2120")        # its command takes what Slurm adds
    done = subprocess.run(["shellcheck", f"--exclude={','.join(excluded)}", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0 and "unpack=(" in text, done.stdout + done.stderr


# Leases


@pytest.fixture
def leases(box):
    made = []

    def make(service_id="0-aaaaaaaa"):
        made.append(nexus.Leases(nexus.DISK, f"{box.home}/leases", service_id))
        return made[-1]

    yield make
    for one in made:
        for job_id in list(one.held):
            one.close_own(job_id)


GPUS = [f"GPU-{number}" for number in range(12)]            # more than a shell's one-digit descriptors


@pytest.mark.parametrize("is_passed", [False, True], ids=["shared", "passed on"])
def test_the_leases_are_held_while_it_runs_and_dropped_before_the_end_is_said(box, leases, is_passed):
    mine, theirs = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    mine.take("abc", GPUS)
    os.mkfifo(f"{box.home}/go")
    given = {"handles": mine.handles("abc")} if is_passed else {"leases": mine.paths("abc")}
    assert min(mine.handles("abc")) >= nexus.FIRST_LEASE
    box.start(box.prepare("read x < go", gpu_uuids=GPUS, **given), pass_fds=given.get("handles", ()))
    box.hear("start")
    mine.close_own("abc")
    assert theirs.find_holders([*GPUS, "GPU-x"]) == dict.fromkeys(GPUS, nexus.find_user(os.geteuid()))
    with pytest.raises(nexus.NexusError, match="GPU-7"):
        theirs.take("xyz", ["GPU-x", "GPU-7"])
    with open(f"{box.home}/go", "w") as file:
        file.write("go\n")
    box.hear("end")
    assert theirs.find_holders(GPUS) == {}
    theirs.take("xyz", GPUS)


def service_killed(mine, theirs):
    mine.close_own("abc")
    theirs.take("xyz", ["GPU-2"])


def lease_removed(mine, theirs):
    os.unlink(mine.paths("abc")[1][0])


def lease_exchanged(mine, theirs):
    lease_removed(mine, theirs)
    os.mkfifo(mine.paths("abc")[1][0])


BOUNCES = [  # reason, what happens between the service's and the runner's turn
    ("its service was killed, and another took a GPU", service_killed),
    ("a lease was cleaned away", lease_removed),
    ("whose file it is has put something else there", lease_exchanged),
]


@pytest.mark.parametrize("is_late", [False, True], ids=["before it opens the leases", "before it locks the last one"])
@pytest.mark.parametrize("reason, happens", BOUNCES, ids=[case[0] for case in BOUNCES])
def test_a_start_that_bounces(box, leases, reason, happens, is_late):
    mine, theirs = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    mine.take("abc", ["GPU-1", "GPU-2"])
    job = box.prepare("echo ran", leases=mine.paths("abc"), gpu_uuids=("GPU-1", "GPU-2"))
    if is_late:
        os.mkdir(f"{box.home}/bin")
        os.mkfifo(f"{box.home}/turn")
        with open(f"{box.home}/bin/flock", "w") as file:
            file.write(f"#!/bin/sh\n[ -e {box.home}/first ] || {{ : > {box.home}/first; exec {shutil.which('flock')} \"$@\"; }}\n"
                       f": > {box.home}/turn\nread x < {box.home}/turn\nexec {shutil.which('flock')} \"$@\"\n")
        os.chmod(f"{box.home}/bin/flock", 0o700)
        process = box.start(job, env={"PATH": f"{box.home}/bin:{os.environ['PATH']}"})
        open(f"{box.home}/turn").close()
        happens(mine, theirs)
        with open(f"{box.home}/turn", "w") as file:
            file.write("go\n")
    else:
        happens(mine, theirs)
        process = box.start(job)
    said, = box.hear("bounce")
    assert " ".join(said.words) == "a GPU lease was lost before its job began" and process.wait(60) == 0
    assert not os.path.exists(box.path("stdout.log"))
    left = box.result(job)                      # who did not hear it reads it
    assert (left.exit_code, left.cause, left.cause_line) == (None, "bounce", " ".join(said.words))
    assert not [name for name in os.listdir(box.layout.job_folder("abc")) if name.startswith("claim")]
    mine.close_own("abc")
    if happens is not lease_exchanged:
        theirs.take("uvw", ["GPU-1", "GPU-2"])


# What keeps the service running


@pytest.fixture(params=SHELLS)
def supervise(request, tmp_path):
    """Run the supervisor with a service that ends with each of these codes in turn; return (starts, delays)."""
    shell = SHELLS[request.param] or pytest.skip(f"no {request.param}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to(shell)
    for name, text in {"sleep": f'echo "$1" >> {tmp_path}/delays', "service": (
            f'echo "$*" >> {tmp_path}/starts; echo said >&2; read code rest < {tmp_path}/codes; sed -i 1d {tmp_path}/codes; '
            f'case $rest in told) echo > {tmp_path}/start_error.json;; stopped) echo > {tmp_path}/stopped;; esac; '
            'if [ "$code" = kill ]; then kill -9 $$; fi; exit $code')}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def go(codes):
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        (tmp_path / "delays").write_text("")
        subprocess.run([str(tmp_path / "bin" / "sh"), "-c", nexus.SUPERVISOR_SCRIPT, "nexus", str(tmp_path), "service", "serve", "--x y"],
                       env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=60)
        assert (tmp_path / "service.log").read_text().count("said\n") == len((tmp_path / "starts").read_text().splitlines())
        return (tmp_path / "starts").read_text().splitlines(), (tmp_path / "delays").read_text().split()

    return go


SUPERVISED = [  # reason, exit codes of the service in turn, delays between them
    ("stopped", [0], []), ("a bad config, which whoever started it is told", ["2 told"], []), ("another service has it", [4], []),
    ("what was told before does not count", [1, "6 told"], ["1"]), ("stopped by somebody while it waits", ["1 stopped"], ["1"]),
    ("another service, after a crash", [1, 4], ["1"]),
    ("killed", ["kill", 0], ["1"]), ("killed, where another one could not start", ["kill told", 0], ["1"]),
    ("a fault of its own", [1, 0], ["1"]), ("unavailable", [6, 0], ["1"]),
    ("again and again, slower and slower", [1] * 7 + [0], ["1", "2", "4", "8", "16", "16", "16"]),
]


@pytest.mark.parametrize("reason, codes, delays", SUPERVISED, ids=[case[0] for case in SUPERVISED])
def test_the_supervisor(supervise, reason, codes, delays):
    starts, waited = supervise(codes)
    assert starts == ["serve --x y"] * len(codes) and waited == delays


CANDIDATES = [  # reason, how the folder `good` with the program python3 comes to be as it is, whether the supervisor runs that
    ("the owner's", "", True),
    ("a link to what is the owner's", "mv good/python3 other/python; ln -s ../other/python good/python3", True),
    ("only its name says the version", "mv good/python3 good/python3.12", True),
    ("below a folder like /tmp", "chmod 1777 .", True),
    ("a folder that all may write into", "chmod 777 good", False),
    ("a folder that a group may write into", "chmod 775 good", False),
    ("a folder like /tmp, with a program that all may write", "chmod 1777 good; chmod 1777 good/python3", False),
    ("below a folder that all may write into", "chmod 777 .", False),
    ("a program that all may write", "chmod 757 good/python3", False),
    ("another user's program", "chown 65534 good/python3", False),
    ("another user's folder", "chown 65534 good", False),
    ("below another user's folder", "chown 65534 .", False),
    ("a link to a program in a folder of all", "mv good/python3 other/python; chmod 777 other; ln -s ../other/python good/python3", False),
    ("by a folder of all to a folder of all", "chmod 777 other; mv good/python3 other; rmdir good; ln -s other good", False),
    ("not executable", "chmod 644 good/python3", False),
    ("a folder", "rm good/python3; mkdir good/python3", False),
    ("one that cannot run it", "echo '#!/bin/sh\nexit 1' > good/python3", False),
]


@pytest.mark.parametrize("reason, change, is_used, shell", [
    (*case, shell) for shell, count in zip(SHELLS, (len(CANDIDATES), 4)) if SHELLS[shell] for case in samples.choose(CANDIDATES, count)])
def test_the_supervisor_takes_another_python(tmp_path, reason, change, is_used, shell):
    """Once the service has run, and its Python cannot any more.  What others could have put there is not even tried."""
    place = tmp_path / "place"
    for folder in (tmp_path / "bin", place / "good", place / "other"):
        folder.mkdir(parents=True)
    place.chmod(0o755)
    (tmp_path / "bin" / "sleep").write_text(f"#!/bin/sh\n[ -e {tmp_path}/waited ] && : > {tmp_path}/stopped\n: > {tmp_path}/waited\n")
    (tmp_path / "bin" / "first").write_text(f"#!/bin/sh\n[ ! -e {tmp_path}/ran ] || exit 127\n: > {tmp_path}/ran\nkill -9 $$\n")
    (place / "good" / "python3").write_text(f'#!/bin/sh\necho "$NEXUS_ROLE $NEXUS_FORMER_PYTHON $*" >> {tmp_path}/told\n')
    for path in (*(tmp_path / "bin").iterdir(), place / "good" / "python3"):
        path.chmod(0o755)
    subprocess.run(["bash", "-c", change], cwd=place, check=True)
    subprocess.run([SHELLS[shell], "-c", nexus.SUPERVISOR_SCRIPT, "nexus", str(tmp_path), "first", "serve", "--x y"],
                   env={"PATH": f"{tmp_path}/bin:{place}/good:good:/bin"}, stdin=subprocess.DEVNULL, timeout=60, cwd=place)
    told = (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []
    assert told == (["check  serve --x y", " first serve --x y"] if is_used else [])
    said = "neither first nor another Python here can run the service\n"
    assert (said in (tmp_path / "service.log").read_text()) != is_used


PLAIN = (
    "/usr/bin/env", " env  ", "env -u NEXUS_JOB_ID A=1 printenv A SHLVL PWD", "echo a  b=c", "kill -l", "no_such_program --x=1",
    "./no_such_program", "/tmp", "type ls", "false", "./script one two", "./no_interpreter", "sh -c exit", "printenv words place PWD",
    "echo @BASH@ @PWD@ @WORDS@", "/bin/echo @BASH@ @PWD@ @WORDS@")


def test_what_bash_does_itself():
    words = subprocess.run(["bash", "-c", "compgen -bk"], capture_output=True, text=True, check=True).stdout.split()
    known = [word for word in words if re.fullmatch(nexus.PLAIN_COMMAND, word)]
    assert [word for word in known if not re.fullmatch(nexus.BASH_WORDS, word)] == [] and len(known) > 50


PLAIN_IN = [{}, {"SHLVL": "3", "words": "w", "place": "p", "OLDPWD": "/"}, {"PWD": "@link"}, {"PWD": "/"}, {"PWD": "/@WORDS@ @BASH@"},
            {"BASH_ENV": "/dev/null"}, {"BASH_FUNC_env%%": "() { echo mine; }"}]


@pytest.mark.parametrize("command, environment", samples.choose(itertools.product(PLAIN, PLAIN_IN), 30), ids=str)
def test_a_plain_command_does_what_bash_does_with_it(box, command, environment):
    """As it is, and with a comment behind it, so that job.sh runs bash: output, exit code and variables are the same."""
    link = f"{box.home}-link"
    os.symlink(box.home, link)
    for name, text in (("script", 'echo "$0" "$@"; exit 7'), ("no_interpreter", "#!/no/such/program")):
        pathlib.Path(box.home, name).write_text(text + "\n")
        os.chmod(f"{box.home}/{name}", 0o700)
    given = {name: text.replace("@link", link) for name, text in environment.items()}
    seen = []
    for number, text in enumerate((command, f"{command} #'")):
        variables = nexus.build_environment(running("abc", nonce="n"), {"PATH": os.environ["PATH"], **given}, (), 20001)
        result = box.run(text, id=f"abc{number}", environment=variables)
        output, errors = (box.text(name, f"abc{number}") for name in ("stdout.log", "stderr.log"))
        seen.append((result.exit_code, sorted(output.splitlines()), re.sub(r"(?m)^\S+: line \d+: ", "", errors)))
    assert seen[0] == seen[1]

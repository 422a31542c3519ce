"""Nothing of a job's environment stands in a log, a reason, a message, a screen window, or an argument of a program."""

import contextlib
import json
import os
import pathlib
import pty
import re
import subprocess
import time

import live
import pytest
import shared
import slurm
from test_conda import BIN, conda
from test_runner import box as runner_box
from test_snapshot import of, repo

import nexus

__all__ = ["conda", "repo", "runner_box"]       # fixtures, found by their names
SECRET = "hunter2"
SIGNALS = {"ABRT": 134, "KILL": 137, "SEGV": 139, "BUS": 135, "FPE": 136, "ILL": 132, "TERM": 143}
VARIABLES = {
    "MY_TOKEN": SECRET, "NEWLINES": f"a\n{SECRET}\n", "LC_SECRET": SECRET, "HISTFILE": f"/{SECRET}", "JAVA_OPTS": SECRET, "PS1": SECRET,
    "UID": SECRET, "BASH_FUNC_module%%": f"() {{ {SECRET}; }}", "a.b": SECRET, "OLDPWD": f"/{SECRET}", "SHELL": f"/{SECRET}/sh",
    "CUDA_DEVICE_ORDER": SECRET, "CUDA_VISIBLE_DEVICES": SECRET, "_": f"/{SECRET}", "BASH_ENV": f"/{SECRET}", "NEXUS_JOB_NONCE": "cafe"}
MADE_TO_HOLD_IT = r"(job\.sh|state\.json.*|journal\.jsonl.*|job\.json)$"
ENDS = {                                        # {how: (command, exit code)}
    **{name: (f"kill -{name} $$", code) for name, code in SIGNALS.items()},
    "program": ("python3 -c 'import os; os.abort()'", 134),
    "core": ("ulimit -c unlimited; cd $(mktemp -d); exec python3 -c 'import os; os.abort()'", 134),
    "inner": ("bash -c 'kill -SEGV $$'; exit 9", 9),
}
SOME_ENDS = {name: ENDS[name] for name in ("KILL", "core", "inner")}


def search(folder, words=SECRET):
    """The files below a folder that hold these words, but for those that are made to hold an environment."""
    found = []
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file() and not re.search(MADE_TO_HOLD_IT, path.name) and words.encode() in live.read_bytes(path):
            found.append(str(path))
    return found


def run_watched(box, job):
    """Run job.sh in a terminal, as screen does; return (what its window showed, [what each program got as arguments])."""
    trace = f"{box.home}/../trace"
    window, inside = pty.openpty()
    argv = ["strace", "-f", "-qq", "-e", "trace=execve", "-s", "1000000", "-o", trace, "bash", box.path("job.sh"), "1"]
    with subprocess.Popen(argv, stdin=inside, stdout=inside, stderr=inside, cwd="/", start_new_session=True,
                          env={"PATH": os.environ["PATH"]}) as process:
        os.close(inside)
        shown = b""
        with contextlib.suppress(OSError):      # its last writer has ended
            while piece := os.read(window, 65536):
                shown += piece
        process.wait(live.PATIENCE_S)
    os.close(window)
    return shown.decode("utf-8", "replace"), [line for line in live.read(trace).splitlines() if "execve(" in line]


def prepare(how, command, box, conda, repo):
    fields, environment = {}, {**VARIABLES, "PATH": f"{os.environ['PATH']}:/{SECRET}", "NEXUS_TEST_HOME": box.home}
    if how == "conda":
        fields, environment = {"conda": "ml"}, {**environment, **conda.environ(), "PATH": f"{BIN}:/{SECRET}"}
    elif how == "tty":
        fields = {"tty": True}
    elif how == "snapshot":
        fields = of(nexus.take_snapshot(str(repo.top), os.environ))
    return box.prepare(command, environment=environment, **fields)


@pytest.mark.parametrize("how", ["plain", "tty", "conda", "snapshot"])
def test_neither_logs_nor_window_nor_arguments_tell_it(runner_box, conda, repo, how):
    box = runner_box
    for name, (command, code) in ENDS.items() if how == "plain" else SOME_ENDS.items():
        job = prepare(how, command, box, conda, repo)
        window, arguments = run_watched(box, job)
        assert box.result(job).exit_code == code, (name, box.text("stderr.log"))
        assert not search(box.layout.job_folder("abc")), name
        assert SECRET not in window and "job.sh: line" not in window, (name, window)
        assert any('"bash", "-c"' in line or '"bash", "-p"' in line for line in arguments)
        assert not [line for line in arguments if SECRET in line], name
        assert "job.sh" not in box.text("stderr.log"), (name, box.text("stderr.log"))
        for path in os.listdir(box.layout.job_folder("abc")):
            if path != "files":
                os.unlink(box.path(path))


def test_by_hand_a_signal_tells_nothing_either(runner_box):
    for name, (command, code) in ENDS.items():
        runner_box.prepare(command, environment={**VARIABLES, "PATH": os.environ["PATH"]})
        done = subprocess.run(["bash", runner_box.path("job.sh")], capture_output=True, text=True)
        assert done.returncode in (code, 128 - code), name
        assert SECRET not in done.stdout + done.stderr, (name, done.stderr)
    runner_box.prepare("true", cwd="/nowhere")
    done = subprocess.run(["bash", runner_box.path("job.sh")], capture_output=True, text=True)
    assert done.returncode and "/nowhere" in done.stderr, "bash says why it cannot begin"


@pytest.mark.parametrize("python, seen", [("", [f"a.b={SECRET}"]), ("none", [])])
def test_without_python_only_what_bash_cannot_pass_on_is_missing(runner_box, monkeypatch, python, seen):
    if python:
        monkeypatch.setattr(nexus.sys, "executable", "/nowhere/python")
        monkeypatch.setattr(nexus, "UNPACK_SCRIPT", nexus.UNPACK_SCRIPT.replace("/usr/bin/python3", "/nowhere/too"))
    result = runner_box.run("tr '\\0' '\\n' < /proc/$$/environ | grep -e ^X= -e ^a.b=; true",
                            environment={"PATH": os.environ["PATH"], "X": "y", "a.b": SECRET})
    assert result.exit_code == 0 and sorted(runner_box.text("stdout.log").split()) == sorted(["X=y", *seen])
    note = "nexus: without Python these variables are not set: a.b\n"
    assert runner_box.text("stderr.log") == (note if python else "")


REFUSED = [  # reason, options of the job, variables
    ("no bash", {}, {"PATH": f"/{SECRET}"}),
    ("no conda", {"conda": "ml"}, {"HOME": f"/{SECRET}", "PATH": BIN}),
]


@pytest.mark.parametrize("reason, fields, variables", REFUSED, ids=[case[0] for case in REFUSED])
def test_no_reason_tells_it(runner_box, reason, fields, variables):
    result = runner_box.run("true", environment=variables, **fields)
    assert result.cause == "launch" and SECRET not in result.cause_line
    assert not search(runner_box.layout.job_folder("abc"))


def test_a_conda_that_cannot_be_parsed_or_found(runner_box, conda):
    for text in ("echo \"export PATH='$PATH\"", "exit 1"):
        program = pathlib.Path(conda.exe)
        program.write_text(f"#!/bin/sh\n[ \"$1\" = env ] || {{ {text}; }}\n")
        hidden = program.parent / SECRET
        hidden.mkdir(exist_ok=True)
        (hidden / "conda").write_text(program.read_text())
        (hidden / "conda").chmod(0o755)
        result = runner_box.run("true", conda="ml", environment={"PATH": f"{BIN}:/{SECRET}", "CONDA_EXE": str(hidden / "conda")})
        assert result.cause == "launch" and SECRET not in result.cause_line + runner_box.text("stderr.log")
        for name in ("attempt-1", "result-1.json"):
            os.unlink(runner_box.path(name))


def test_git_that_is_killed(runner_box, repo):
    made = nexus.take_snapshot(str(repo.top), os.environ)
    binaries = pathlib.Path(runner_box.home, "bin")
    binaries.mkdir()
    (binaries / "git").write_text("#!/bin/sh\nkill -9 $$\n")
    (binaries / "git").chmod(0o755)
    result = runner_box.run("true", environment={"PATH": f"{binaries}:{BIN}", "X": SECRET}, **of(made))
    assert result.cause == "launch" and result.cause_line.endswith("cannot be checked out: git was ended by a signal")


# A whole service

CRASH = "python3 -c 'import os, sys; sys.stderr.write(\"terminate called: NCCL timeout\\n\"); sys.stderr.flush(); os.abort()'"
BAR = "printf '\\r 40%%|##  | 2/5 [00:10<00:12]\\r 45%%|##  | 3/5 [00:10<00:12,  1.1s/it]' >&2"


def check_home(box):
    assert not search(box.home) and SECRET not in json.dumps(box.ask("GET", "/jobs")), search(box.home)
    assert SECRET not in box.nexus().stdout + box.nexus("history").stdout


@pytest.fixture(scope="module")
def service():
    with shared.Service(gpus=0, default_gpus=0, launcher="screen", cpu_slots=8, kill_grace_seconds=0.3) as made:
        yield made


@pytest.fixture
def box(service):
    with service.lend() as box:
        yield box


def test_the_cause_is_the_programs_own_line_and_its_signal(box):
    inner = f"bash -c \"$CRASH; true\" && exit 134; {BAR}; kill -ABRT $$"
    jobs = {name: box.add(command, env={**{key: text for key, text in VARIABLES.items() if not key.startswith("NEXUS")},
                                        "CRASH": CRASH}, **options)
            for name, command, options in (
                ("plain", "eval \"$CRASH\"", {}), ("inner", inner, {}), ("bar", f"{BAR}; kill -SEGV $$", {}),
                ("timeout", "trap '' TERM; while :; do sleep 0.1; done", {"timeout_seconds": 0.5}))}
    ended = {name: box.wait(job, "failed") for name, job in jobs.items()}
    for name in ("plain", "inner"):
        job = ended[name]
        assert (job["cause"], job["signal"], job["cause_line"]) == ("signal", 6, "terminate called: NCCL timeout"), job
        for shown in (box.nexus("show", job["id"]), box.nexus("why", job["id"]), box.nexus("history"), box.nexus("jobs")):
            assert "SIGABRT" in shown.stdout, shown.stdout
        assert f"Job {job['id']} failed: signal SIGABRT, exit code 134 (terminate called: NCCL timeout)" in box.log()
    assert (ended["bar"]["cause"], ended["bar"]["signal"], ended["bar"]["cause_line"]) == ("signal", 11, None)
    assert (ended["timeout"]["cause"], ended["timeout"]["exit_code"]) == ("timeout", 137)
    check_home(box)


def test_a_line_of_an_older_job_sh_is_no_reason(box):
    words = ("/home/ann/.nexus/logs/job_abc/job.sh: line 15:   565 Aborted                 NEXUS_JOB_NONCE=\"${attempt:+cafe}\" "
             "MY_TOKEN='hun'ter2 MULTI='a\nhun'ter2 /usr/bin/env -u _ -- PATH=/hun'ter2 \"$@\" bash -c 'python train.py\nhun'ter2'")
    said = box.path("said")
    said.write_text(f"RuntimeError: NCCL\n{words}\n")
    job = box.wait(box.add(f"cat {said} >&2; kill -ABRT $$"), "failed")
    assert job["cause_line"] == "RuntimeError: NCCL" and job["last_line"] in (None, "RuntimeError: NCCL")
    shown = box.nexus("show", job["id"]).stdout + box.log()
    assert "ter2" not in shown.replace(str(said), ""), shown


FAULTS = [  # body of POST /queue
    {"command": "true", "env": {"MY_TOKEN": [SECRET]}}, {"command": "true", "env": SECRET}, {"command": "true", "env": [f"A={SECRET}"]},
    {"command": "true", "env": {f"A={SECRET}": "x"}}, {"command": "true", "environment": {"A": f"{SECRET}\0"}},
    {"command": "true", "environment": [SECRET]}, [[{"command": "true", "env": {"A": SECRET}}]], [[[SECRET]]],
    {"command": "true", "env": {"A": SECRET * 100000}}]


def test_no_refusal_shows_a_variable(box):
    for body in FAULTS:
        status, answer = box.call("POST", "/queue", body)
        assert status in (400, 413) and SECRET not in json.dumps(answer), answer
    job = box.add("sleep 600", begin="+1h")
    for change in ({"env": {"A": [SECRET]}}, {"env": SECRET}, {"env": {"A": SECRET}}):
        assert SECRET not in json.dumps(box.call("PATCH", f"/queue/{job}", change)[1])
        assert SECRET not in json.dumps(box.call("POST", "/jobs/retry", {"ids": [job], **change})[1])
    assert SECRET not in box.log()
    told = box.nexus("add", "--env", f"={SECRET}", "true")
    assert told.returncode == 2 and "--env" in told.stderr and SECRET not in told.stderr
    assert SECRET not in box.log()


def test_under_slurm():
    with slurm.Cluster() as cluster, cluster.box() as box:
        variables = {**{name: text for name, text in VARIABLES.items() if not name.startswith("NEXUS")}, "ROCR_VISIBLE_DEVICES": SECRET}
        jobs = [box.add(command, env=variables) for command in (CRASH, "kill -KILL $$")]
        for job, number in zip(jobs, (6, 9)):
            ended = box.wait(job, "failed")
            assert (ended["cause"], ended["signal"]) == ("signal", number), ended
        seen = box.add("tr '\\0' '\\n' < /proc/$$/environ | grep -e ^MY_TOKEN= -e ^a.b= -e ^SLURM_JOB_ID= | cut -d= -f1", env=variables)
        box.wait(seen, "completed")
        assert sorted(box.logs(seen).split()) == ["MY_TOKEN", "SLURM_JOB_ID", "a.b"]
        check_home(box)


# The kernel's lack of memory

EAT = "python3 -c 'import time; kept = bytearray(400 << 20); time.sleep(60)'"


@contextlib.contextmanager
def memory_group(limit_mib):
    """The path of a memory group of this test's; None where none can be made."""
    name = f"nexus-test-{os.getpid()}-{time.monotonic_ns()}"
    for folder, limit in ((f"/sys/fs/cgroup/memory/{name}", "memory.limit_in_bytes"), (f"/sys/fs/cgroup/{name}", "memory.max")):
        try:
            os.mkdir(folder)
        except OSError:
            continue
        try:
            if os.path.exists(f"{folder}/{limit}"):
                pathlib.Path(folder, limit).write_text(str(limit_mib << 20))
                yield folder
                return
        finally:
            pids = live.read(f"{folder}/cgroup.procs").split()
            live.kill(*map(int, pids))
            live.until(lambda: not live.read(f"{folder}/cgroup.procs").split(), "the end of what is in it")    # noqa: B023
            os.rmdir(folder)
    yield None


def test_a_program_that_the_kernel_ends_for_lack_of_memory():
    live.need_root()
    with memory_group(250) as group:
        if not group:
            pytest.skip("no memory group can be made here")
        with live.Box(gpus=0, default_gpus=0, launcher="screen", cpu_slots=3) as box:
            live.until(lambda: box.status()["version"], "its first look")
            procs = pathlib.Path(group, "cgroup.procs")
            for pid in live.find_processes(f"{box.folder}/"):
                procs.write_text(str(pid))
            other = box.wait(box.add("kill -9 $$"), "failed")
            assert (other["cause"], other["signal"], other["cause_line"]) == ("signal", 9, None), "that was not the kernel"
            job = box.wait(box.add(EAT), "failed")
            assert (job["cause"], job["signal"], job["cause_line"]) == ("signal", 9, nexus.LACK_OF_MEMORY), (job, box.log())
            eats = box.add(f"{EAT} & sleep 600")
            box.wait_started(eats)
            box.ask("DELETE", f"/jobs/{eats}")
            assert box.wait(eats, "cancelled")["cause"] == "killed"

"""How long a job lasts when its command has ended, and in which order its processes are told to end."""

import pathlib
import shutil
import stat
import time

import live
import pytest

# Works for so many seconds, or until there is a file of its own, then leaves a word.
WORK = """
import os, sys, time
end = time.time() + float(sys.argv[1])
while time.time() < end and not os.path.exists(sys.argv[2] + ".stop"): pass
open(sys.argv[2], "a").write("done\\n")
"""
# Has two workers, as a data loader has.  Told to end, it needs them for a second, and then saves its work.
TRAIN = """
import signal, subprocess, sys, time
workers = [subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]) for _ in range(2)]
def save(number, frame):
    print("saving", flush=True)         # fails when `tee` has ended
    time.sleep(1)
    alive = sum(worker.poll() is None for worker in workers)
    open(sys.argv[1], "w").write(f"{signal.Signals(number).name} {alive}")
    for worker in workers: worker.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
open(sys.argv[1] + ".began", "w").close()
while True: time.sleep(600)
"""

# Its data loader inherits the handler.
WARNED = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("saved", flush=True))
os.fork()
while True: signal.pause()
"""


@pytest.fixture(scope="module")
def box():
    with live.Box(gpus=[{"index": 0, "uuid": "GPU-1", "name": "A100"}], launcher="screen", cpu_slots=40, kill_grace_seconds=20) as box:
        make_program(box, "work", WORK)
        make_program(box, "train", TRAIN)
        shutil.copy(shutil.which("sleep"), box.bin / "dozing")          # a program of its own name
        yield box


def make_program(box, name, text):
    program = box.bin / name
    program.write_text(f"#!{box.python} -IS{text}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def find_runner(box, job):
    return int(live.read(f"{box.home}/logs/job_{job}/attempt-1").split()[0])


def run(box, *commands, **options):
    """The jobs of commands that may say {out}, a file of their own, when they have ended, with what is in the file."""
    outs = [box.path(f"out-{time.monotonic_ns()}-{number}") for number in range(len(commands))]
    ids = [box.add(command.replace("{out}", str(out)), **{"gpus": 0, **options}) for command, out in zip(commands, outs)]
    return [(box.wait(job_id), live.read(out)) for job_id, out in zip(ids, outs)]


# a command, its exit code, how often `done` is there when its job has ended
GOES_ON = [
    ("the usual last line of a script", "work 2 {out} &", 0, 1),
    ("nohup", "nohup work 2 {out} > /dev/null 2>&1 &", 0, 1),
    ("a loop", "for i in 1 2 3; do work 2 {out} & done", 0, 3),
    ("the exit code is the command's", "work 2 {out} & exit 7", 7, 1),
    ("a program that lets go of what it has opened",
     "python3 -c 'import subprocess, sys; subprocess.Popen(sys.argv[1:])' work 2 {out}", 0, 1),
    ("workers in sessions of their own", "python3 -c 'import subprocess, sys; "
     "subprocess.run(sys.argv[1:], start_new_session=True)' work 2 {out} &", 0, 1),
    ("one after the other", "(work 1 {out}; work 1 {out}) &", 0, 2),
    ("what has left the session is ended at once", "setsid work 60 {out} & sleep 0.5", 0, 0),
    ("nothing", "true", 0, 0),
]


def test_a_job_goes_on_while_what_its_command_left_works(box):
    jobs = run(box, *(command for _, command, _, _ in GOES_ON))
    for (reason, _, code, count), (job, out) in zip(GOES_ON, jobs):
        assert (job["exit_code"], out) == (code, "done\n" * count), (reason, job, box.log())
        assert job["status"] == ("failed" if code else "completed") and job["processes_left"] is None
        if count:
            assert job["runtime_seconds"] >= 1.5 and job["finished_at"] > job["started_at"], (reason, job)


def test_what_idles_is_ended_and_shown(box):
    """A monitor that is forgotten ends; what works goes on for longer than that takes, as does what has memory of a GPU: it may wait."""
    gpu = {"index": 0, "uuid": "GPU-1", "name": "A100"}
    idle, busy = (box.add(command, gpus=0) for command in ("dozing 600 & while sleep 1; do date; done &", "work 24 /dev/null &"))
    computes = box.add("dozing 25 & echo $! > pid", cwd=str(box.folder))
    pid = int(live.until(lambda: live.read(box.path("pid")), "its pid"))
    box.show([gpu], processes=[{"gpu": "GPU-1", "pid": pid, "memory": 100}])
    live.until(lambda: box.job(idle)["processes_left"], "the first look at what is left")
    assert "running; its command has ended, " in box.nexus("show", idle).stdout.splitlines()[0]
    assert all("processes go on" in box.nexus(*command).stdout for command in ((), ("top",)))
    job = box.wait(idle, "completed")
    assert job["runtime_seconds"] >= 20 and "dozing (pid " in " ".join(job["notes"]), job
    assert "dozing (pid " in box.nexus("show", idle).stdout
    assert box.wait(busy, "completed")["runtime_seconds"] >= 22 and not box.job(busy)["notes"]
    assert box.wait(computes, "completed")["runtime_seconds"] >= 22
    box.show([gpu])


def test_without_a_service_it_goes_on(box):
    outs = [box.path(f"away-{number}") for number in range(3)]
    first, second, third = jobs = [box.add(f"work 600 {out} & exit 5", gpus=0) for out in outs]
    live.until(lambda: all(box.job(job)["processes_left"] for job in jobs), "the end of their commands")
    box.kill_all_of_service()
    pathlib.Path(f"{outs[0]}.stop").touch()
    live.until(lambda: not live.is_alive(find_runner(box, first)), "the end of the first one's runner")
    box.start()
    pathlib.Path(f"{outs[1]}.stop").touch()
    for job, out in zip((first, second), outs):
        ended = box.wait(job, "failed")
        assert (ended["exit_code"], ended["cause"], live.read(out)) == (5, "exit", "done\n"), ended
    assert box.job(third)["processes_left"] == 1
    box.ask("DELETE", f"/jobs/{third}")
    ended = box.wait(third, "cancelled")
    assert (ended["cause"], ended["exit_code"]) == ("killed", 5) and not live.find_commands(str(outs[2]))


def test_the_time_limit_counts_for_what_is_left(box):
    (job, _), = run(box, "work 600 {out} &", timeout_seconds=2)
    assert (job["status"], job["cause"], job["exit_code"]) == ("failed", "timeout", 0)


def test_a_killed_runner_is_told(box):
    job = box.add(f"work 600 {box.path('runner')} &", gpus=0)
    live.until(lambda: box.job(job)["processes_left"], "the end of its command")
    box.kill_all_of_service()
    runner = find_runner(box, job)
    live.kill(runner)
    live.until(lambda: not live.is_alive(runner), "its death")
    box.path("runner.stop").touch()
    box.start()
    assert box.wait(job, "failed")["cause"] == "session-lost"


# how the program is started; what the file says when it has saved its work: the signal, and the workers it still had
SAVES = [
    ("plainly", "train {out}"),
    ("after cd", "cd / && train {out}; echo next"),
    ("a script", "printf 'train \"$1\"\\necho next\\n' > {out}.sh; bash {out}.sh {out}"),
    ("piped into tee", "train {out} 2>&1 | tee {out}.log"),
    ("into tee, by a substitution", "train {out} > >(tee {out}.log) 2>&1"),
    ("timeout and nice", "timeout 500 nice train {out}"),
    ("two shells", "bash -c 'sh -c \"train {out}; true\"; true'"),
    ("a trap", "trap 'echo $? > {out}.trap' TERM; train {out}; true"),
    ("in the background", "train {out} & wait"),
    ("left by its command", "nohup train {out} > {out}.log &"),
    ("behind a program that ends at once", "python3 -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' train {out}"),
    ("reads a pipe", "while sleep 1; do echo; done | train {out}"),
]


def start_training(box, options):
    outs = [box.path(f"save-{time.monotonic_ns()}-{number}") for number in range(len(SAVES) + 1)]
    commands = [command for _, command in SAVES]
    ids = [box.add(command.replace("{out}", str(out)), gpus=0, tty=out is outs[-1], **options)
           for command, out in zip([*commands, commands[0]], outs)]
    live.until(lambda: all(pathlib.Path(f"{out}.began").exists() for out in outs), "all to have begun")
    return dict(zip(ids, zip([reason for reason, _ in SAVES] + ["in a terminal"], outs)))


@pytest.mark.parametrize("signal", ["TERM", "USR1"])
def test_a_program_is_told_before_what_it_started(box, signal):
    jobs = start_training(box, {})
    assert box.nexus("kill", *jobs, "--signal", signal).returncode == 0
    for job_id, (reason, out) in jobs.items():
        assert box.wait(job_id, "cancelled")["cause"] == "killed"
        assert live.read(out) == f"SIG{signal} 2", (reason, box.logs(job_id))


def test_a_time_limit_lets_it_save_too(box):
    jobs = start_training(box, {"timeout_seconds": 5})
    for job_id, (reason, out) in jobs.items():
        assert box.wait(job_id, "failed")["cause"] == "timeout"
        assert live.read(out) == "SIGTERM 2", (reason, box.logs(job_id))


def test_its_program_is_warned_before_its_time_limit(box):
    """Once, also when the service is another one by then; who does not handle the signal would die of it."""
    make_program(box, "warned", WARNED)
    wrapped = "python3 -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' warned; true"
    job, deaf = (box.add(command, gpus=0, timeout_seconds=600, warn="USR1@590s") for command in (wrapped, "sleep 600"))
    live.until(lambda: "saved" in box.logs(job), "the signal")
    live.until(lambda: "nothing of it handles that" in str(box.job(deaf)["notes"]), "the note")
    box.kill_all_of_service()
    box.start()
    box.wait(box.add("true", gpus=0), "completed")
    assert box.job(deaf)["status"] == box.job(job)["status"] == "running"
    box.ask("DELETE", f"/jobs/{job}")
    assert "USR1 before its time limit: sent to " in str(box.wait(job, "cancelled")["notes"])
    assert box.logs(job).split().count("saved") == 1
    assert box.nexus("clear", job).returncode == 0 and not (box.home / f"logs/job_{job}").exists()
    for options, words in (((), "this job has none"), (("--timeout", "60s"), "is stopped after 1m")):
        refused = box.nexus("add", "--warn", "USR1@90s", *options, "true")
        assert refused.returncode == 2 and words in refused.stderr
    box.ask("DELETE", f"/jobs/{deaf}")


@pytest.mark.parametrize("on_reboot, statuses, cause", [
    ("fail", ["failed"], "reboot"), ("requeue", ["pending", "running"], "requeued")])
def test_a_reboot_lets_it_save_too(on_reboot, statuses, cause):
    """systemd ends the service first; what it then leaves is killed without a word."""
    with live.Box(gpus=0, cpu_slots=2, kill_grace_seconds=20, on_reboot=on_reboot) as box:
        make_program(box, "train", TRAIN)
        outs = [box.path("saved"), box.path("left")]
        jobs = [box.add(f"train {outs[0]}", gpus=0), box.add(f"train {outs[1]} &", gpus=0)]
        live.until(lambda: all(pathlib.Path(f"{out}.began").exists() for out in outs), "their begin")
        live.until(lambda: box.job(jobs[1])["processes_left"], "the end of its command")
        other = box.add(f"train {box.path('other')}", gpus=0)
        make_program(box, "systemctl", "\nprint('stopping')\n")
        pid = box.pid()
        live.kill(pid, number=15)
        live.until(lambda: not live.is_alive(pid), "the service's end")
        assert [live.read(out) for out in outs] == ["SIGTERM 2"] * 2
        assert f"Started job {other}" not in box.log().partition("Service ended")[0]
        box.start()
        for job in map(box.job, jobs):
            first = job["attempts"][0]
            assert job["status"] in statuses and (first["cause"], first["processes_left"]) == (cause, None), job

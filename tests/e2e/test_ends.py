"""How long a job lasts when its command has ended, and in which order its processes are told to end."""

import pathlib
import shutil
import stat
import time

import live
import pytest
import shared

# Works for so many seconds, or until there is a file of its own, then leaves a word.  A third of a core is work enough.
WORK = """
import os, sys, time
end = time.time() + float(sys.argv[1])
while time.time() < end and not os.path.exists(sys.argv[2] + ".stop"):
    until = time.process_time() + 0.01
    while time.process_time() < until: pass
    time.sleep(0.02)
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


CARD = {"index": 0, "uuid": "GPU-1", "name": "A100"}


@pytest.fixture(scope="module")
def service():
    with shared.Service(gpus=[CARD], launcher="screen", cpu_slots=40, kill_grace_seconds=20) as made:
        yield made


@pytest.fixture
def box(service):
    with service.lend() as box:
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
    ("the usual last line of a script", "work 1 {out} &", 0, 1),
    ("nohup", "nohup work 1 {out} > /dev/null 2>&1 &", 0, 1),
    ("a loop", "for i in 1 2 3; do work 1 {out} & done", 0, 3),
    ("the exit code is the command's", "work 1 {out} & exit 7", 7, 1),
    ("a program that lets go of what it has opened",
     "python3 -c 'import subprocess, sys; subprocess.Popen(sys.argv[1:])' work 1 {out}", 0, 1),
    ("workers in sessions of their own", "python3 -c 'import subprocess, sys; "
     "subprocess.run(sys.argv[1:], start_new_session=True)' work 1 {out} &", 0, 1),
    ("one after the other", "(work 0.6 {out}; work 0.6 {out}) &", 0, 2),
    ("what has left the session is ended at once", "setsid work 60 {out} & sleep 0.5", 0, 0),
    ("nothing", "true", 0, 0),
]


def test_a_job_goes_on_while_what_its_command_left_works(box):
    jobs = run(box, *(command for _, command, _, _ in GOES_ON))
    for (reason, _, code, count), (job, out) in zip(GOES_ON, jobs):
        assert (job["exit_code"], out) == (code, "done\n" * count), (reason, job, box.log())
        assert job["status"] == ("failed" if code else "completed") and job["processes_left"] is None
        if count:
            assert job["runtime_seconds"] >= 0.7 and job["finished_at"] > job["started_at"], (reason, job)


def test_what_idles_is_ended_and_shown(box):
    """A monitor that is forgotten ends; what works goes on for longer than that takes, as does what has memory of a GPU: it may wait."""
    box.kill_all_of_service()
    box.serve("nexus.IDLE_WINDOW_S = 5.0")              # rather than 20 s
    computes = box.add("dozing 600 & echo $! > pid; until [ -e seen ]; do sleep 0.1; done", cwd=str(box.folder))
    pid = int(live.until(lambda: live.read(box.path("pid")), "its pid"))
    box.show([CARD], processes=[{"gpu": "GPU-1", "pid": pid, "memory": 100}])
    live.until(lambda: [one["pid"] for one in box.gpu(0)["processes"]] == [pid], "a look at the GPU")
    box.path("seen").touch()
    # Two that work: on a busy machine one may get less than the tenth of a core that counts as work
    idle, busy = (box.add(command, gpus=0) for command in (
        "dozing 600 & while sleep 1; do date; done &", "work 8 /dev/null & work 8 /dev/null &"))
    live.until(lambda: box.job(idle)["processes_left"], "the first look at what is left")
    assert "running; its command has ended, " in box.nexus("show", idle).stdout.splitlines()[0]
    assert all("processes go on" in box.nexus(*command).stdout for command in ((), ("top",)))
    job = box.wait(idle, "completed")
    assert job["runtime_seconds"] >= 5 and "dozing (pid " in " ".join(job["notes"]), job
    assert "dozing (pid " in box.nexus("show", idle).stdout
    assert box.wait(busy, "completed")["runtime_seconds"] >= 7 and not box.job(busy)["notes"]
    assert box.job(computes)["processes_left"] == 1
    live.kill(pid)
    box.wait(computes, "completed")
    box.kill_service()


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


IN_A_TERMINAL = [SAVES[0], SAVES[1], SAVES[7]]           # whose shell takes it from them when it dies


def start_training(box, options, ways=SAVES):
    starts = [(reason, command, False) for reason, command in ways]
    starts += [(f"{reason}, in a terminal", command, True) for reason, command in IN_A_TERMINAL]
    outs = [box.path(f"save-{time.monotonic_ns()}-{number}") for number in range(len(starts))]
    ids = [box.add(command.replace("{out}", str(out)), gpus=0, tty=is_tty, **options)
           for (_, command, is_tty), out in zip(starts, outs)]
    live.until(lambda: all(pathlib.Path(f"{out}.began").exists() for out in outs), "all to have begun")
    return dict(zip(ids, zip([reason for reason, _, _ in starts], outs)))


@pytest.mark.parametrize("signal", ["TERM", "USR1"])
def test_a_program_is_told_before_what_it_started(box, signal):
    jobs = start_training(box, {}, SAVES if signal == "TERM" else SAVES[::4])
    assert box.nexus("kill", *jobs, "--signal", signal).returncode == 0
    for job_id, (reason, out) in jobs.items():
        assert box.wait(job_id, "cancelled")["cause"] == "killed"
        assert live.read(out) == f"SIG{signal} 2", (reason, box.logs(job_id))


def test_a_time_limit_lets_it_save_too(box):
    jobs = start_training(box, {"timeout_seconds": 5}, SAVES[::4])
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
    with live.Box(gpus=0, cpu_slots=2, kill_grace_seconds=20, on_reboot=on_reboot, is_supervised=False) as box:
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


# What a job puts in the place of the files that its job.sh writes, in its log folder.  MINE is a folder of the user's.

PLANTED = [  # reason, command, in the log folder
    ("its result is a FIFO", "mkfifo result-1.json"),
    ("a link to a device without end", "ln -s /dev/zero result-1.json"),
    ("a link to a file", "ln -s MINE/data result-1.json"),
    ("another name of a file", "ln MINE/data result-1.json"),
    ("a link to nothing yet", "ln -s MINE/new result-1.json"),
    ("a folder", "mkdir result-1.json; touch result-1.json/made"),
    ("a folder, and others by the names that it may get", "mkdir -p result-1.json result-1.json.{before,old}-{1,2}/made"),
    ("a link to a folder", "ln -s MINE result-1.json"),
    ("conda's words are a FIFO", "mkfifo fault-1"),
    ("they have no end", "ln -s /dev/zero fault-1"),
    ("they are a file's", "ln -s MINE/data fault-1"),
    ("they are there", "echo it could not be activated > fault-1"),
    ("its claim is a FIFO", "rm attempt-1; mkfifo attempt-1"),
    ("its logs are links", "rm *.log; ln -s MINE/data stdout.log; ln -s MINE/new stderr.log"),
    ("its logs are FIFOs", "rm *.log; mkfifo stdout.log stderr.log"),
    ("its logs are folders", "rm *.log; mkdir stdout.log stderr.log; touch stdout.log/made"),
    ("the files of its next attempt are FIFOs", "mkfifo attempt-2 result-2.json fault-2"),
    ("they are links", "ln -s MINE/data attempt-2; ln -s MINE/new result-2.json; ln -s MINE/data fault-2"),
    ("its job.sh is a link", "rm job.sh; ln -s MINE/data job.sh"),
    ("its job.sh is a folder", "rm job.sh; mkdir -p job.sh/made"),
    ("its log folder is a link", "cd ..; mv $OLDPWD MINE-away-$NEXUS_JOB_ID; ln -s MINE $OLDPWD"),
    ("its log folder is a file", "cd ..; mv $OLDPWD MINE-away-$NEXUS_JOB_ID; echo 1 > $OLDPWD"),
    ("its log folder is gone", "rm -rf $PWD"),
]


def test_what_a_job_puts_in_the_place_of_files(box):
    """It ends as it did, job.sh and its window too; a further attempt runs; and no file of the user's is touched."""
    mine = box.path("mine")
    mine.mkdir()
    for name in ("data", "stdout.log", "stderr.log", "fault-1", "job.sh"):
        (mine / name).write_text("mine\n")
    before = {path: path.read_bytes() for path in mine.iterdir()}
    first = "[ -e MARK ] || { touch MARK; sleep 0.3; cd HOME/logs/job_$NEXUS_JOB_ID; PLANT; exit 3; }; echo again"
    ids = {}
    for number, (reason, command) in enumerate(PLANTED):
        plant = first.replace("PLANT", command).replace("MINE", str(mine)).replace("MARK", str(box.path(f"mark-{number}")))
        ids[reason] = box.add(plant.replace("HOME", str(box.home)), gpus=0, retries=1)
    for reason, job_id in ids.items():
        job = box.wait(job_id)
        told = [(one["exit_code"], one["cause"]) for one in job["attempts"]]
        assert (told, job["status"]) == ([(3, "exit"), (0, None)], "completed"), (reason, told)
        assert box.nexus("logs", job_id).stdout.splitlines()[-1:] == ["again"], reason
    live.until(lambda: not any(live.find_commands(f"job_{job_id}/job.sh") for job_id in ids.values()), "the end of job.sh and its window")
    assert {path: path.read_bytes() for path in mine.iterdir()} == before
    box.nexus("clear", *ids.values())
    assert {path: path.read_bytes() for path in mine.iterdir()} == before

"""Kill and end leave nothing of a job behind, and touch nothing of another."""

import os
import shutil
import signal
import time

import live
import pytest

# what it does, its command, how many of its processes must be there before it is killed.  {sleep} is a program of the job's own,
# {folder} one of the test's: other tests run beside it.
NASTY = [
    ("plain", "{sleep} 600", 1),
    ("leaves the session", "setsid {sleep} 600 & {sleep} 601", 2),
    ("double fork", "(setsid {sleep} 600 &); (({sleep} 601 &) &); {sleep} 602", 3),
    ("ignores SIGTERM", "trap '' TERM; {sleep} 600 & {sleep} 601; {sleep} 602", 2),
    ("stopped", "{sleep} 600 & kill -STOP $!; {sleep} 601", 2),
    ("stopped, ignores SIGTERM", "trap '' TERM; {sleep} 600 & kill -STOP $!; {sleep} 601", 2),
    ("stops itself", "{sleep} 600 & kill -STOP $$; wait", 1),
    ("clears its environment", "env -i setsid {sleep} 600 & env -i {sleep} 601", 2),
    ("nohup", "nohup {sleep} 600 & {sleep} 601", 2),
    ("200 processes", "for i in $(seq 200); do {sleep} 600 & done; wait", 200),
    ("a deep tree", "f() { if [ $1 -gt 0 ]; then (f $(($1 - 1)); :); else {sleep} 600; fi; }; f 30", 1),
    ("screen inside", "screen -dmS {name}inner {sleep} 600; {sleep} 601", 2),
    ("tmux inside", "tmux -S {folder}/{name} -f /dev/null new-session -d '{sleep} 600'; {sleep} 601", 2),
    ("begins something when it is told to end", "trap '{sleep} 600 & {sleep} 601 &' TERM; {sleep} 602 & wait; {sleep} 603", 1),
    ("begins something in a session of its own when told to end", "trap 'setsid {sleep} 600 & exit' TERM; {sleep} 602 & wait", 1),
]
NAMES = [f"{a}{b}" for a in "abcd" for b in "efgh"]


def make_sleep(box, name):
    """A sleep of its own name, by which its processes are found whatever they do to themselves."""
    path = box.bin / f"sleep-{name}-"
    shutil.copy(shutil.which("sleep"), path)
    path.chmod(0o755)
    return str(path)


def fill(command, box, sleep, name):
    return command.replace("{sleep}", sleep).replace("{name}", name).replace("{folder}", str(box.folder))


def find_steady(sleep):
    """Its processes that stay until they are killed: shells that have that word come and go."""
    return {pid for pid in live.find_commands(sleep)
            if live.read_bytes(f"/proc/{pid}/cmdline").startswith(sleep.encode()) or live.stat(pid)[:1] == ["T"]}


def nothing_left(sleep):
    left = live.find_commands(sleep)
    return [(pid, live.read_bytes(f"/proc/{pid}/cmdline"), live.stat(pid)[:4]) for pid in left if live.is_alive(pid)]


def start_nasty(box, mark):
    """{job id: its sleep} of all of them, once their processes are there."""
    sleeps = {}
    for (_, command, _), name in zip(NASTY, NAMES):
        sleep = make_sleep(box, f"{mark}{name}")
        sleeps[box.add(fill(command, box, sleep, name), gpus=0)] = sleep
    for (job_id, sleep), (_, _, count) in zip(sleeps.items(), NASTY):
        live.until(lambda sleep=sleep, count=count: len(find_steady(sleep)) >= count, f"the processes of {job_id}")
    return sleeps


def test_kill_leaves_nothing_and_touches_nothing_else():
    with live.Box(gpus=0, launcher="screen", cpu_slots=40, kill_grace_seconds=1) as box:
        sleeps = start_nasty(box, "Z")
        members = {job_id: find_steady(sleep) for job_id, sleep in sleeps.items()}
        for job_id, sleep in sleeps.items():
            box.ask("DELETE", f"/jobs/{job_id}")
            assert box.wait(job_id, "cancelled")["cause"] == "killed"
            assert not nothing_left(sleep), job_id
            del members[job_id]
            for other, pids in members.items():
                assert pids <= find_steady(sleeps[other]), f"killing {job_id} hit {other}"
        for word in ("tail -qn", "nexus_job_", "job.sh"):
            live.until(lambda word=word: not [pid for pid in live.find_processes(f"{box.folder}/") if word.encode() in live.read_bytes(
                f"/proc/{pid}/cmdline").replace(b"\0", b" ")], f"the end of {word}")


def test_all_at_once():
    """Killed together, they do not get in each other's way."""
    with live.Box(gpus=0, launcher="direct", cpu_slots=40, kill_grace_seconds=0.5) as box:
        sleeps = start_nasty(box, "Y")
        for job_id in sleeps:
            box.ask("DELETE", f"/jobs/{job_id}")
        for job_id, sleep in sleeps.items():
            box.wait(job_id, "cancelled")
            assert not nothing_left(sleep), job_id


LEFT_BEHIND = [
    ("a child", "{sleep} 600 & exit 0"),
    ("left the session", "setsid {sleep} 600 & exit 0"),
    ("double fork", "(setsid {sleep} 600 &); exit 0"),
    ("deaf", "trap '' TERM; (setsid {sleep} 600 &); exit 0"),
    ("stopped", "{sleep} 600 & kill -STOP $!; exit 0"),
    ("without an environment, in the session", "env -i {sleep} 600 & exit 0"),
    ("without an environment, seen before its parent went", "env -i setsid {sleep} 600 & {sleep} 3; exit 0"),
    ("tmux", "tmux -S {folder}/{name} -f /dev/null new-session -d '{sleep} 600'; exit 0"),
    ("many", "for i in $(seq 100); do setsid {sleep} 600 & done; exit 0"),
]


def test_what_outlives_a_job_ends_with_it():
    with live.Box(gpus=0, launcher="direct", cpu_slots=40, kill_grace_seconds=0.5) as box:
        sleeps = {}
        for number, (_, command) in enumerate(LEFT_BEHIND):
            sleep = make_sleep(box, f"X{NAMES[number]}")
            sleeps[box.add(fill(command, box, sleep, NAMES[number]), gpus=0)] = sleep
        for job_id, sleep in sleeps.items():
            assert box.wait(job_id, "completed")["exit_code"] == 0
            assert not nothing_left(sleep), job_id


def test_completed_waits_for_what_is_left():
    """The next job on the GPU starts when the memory of the last is free, not before."""
    with live.Box(gpus=1, kill_grace_seconds=4) as box:
        sleep, began = make_sleep(box, "left"), time.monotonic()
        first = box.add(f"trap '' TERM; setsid {sleep} 600 & echo $! > {box.path('pid')}; exit 0")
        then = box.add(f"[ -z \"$(tr -d '\\0' < /proc/$(cat {box.path('pid')})/cmdline)\" ] || echo still there")     # a zombie's is empty
        job = box.wait(first, "completed")
        took_s = time.monotonic() - began
        assert took_s > 4 and not live.find_commands(sleep)
        assert job["runtime_seconds"] < took_s - 3 and job["exit_code"] == 0        # the job's own, not what it left
        assert box.wait(then, "completed") and "still there" not in box.logs(then, "stdout")


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_kill_while_starting(launcher):
    with live.Box(gpus=4, launcher=launcher, kill_grace_seconds=1) as box:
        sleep = make_sleep(box, "early")
        jobs = []
        for _ in range(12):
            job_id = box.add(f"{sleep} 600")
            live.until(lambda job_id=job_id: box.job(job_id)["status"] != "pending", interval_s=0)
            box.ask("DELETE", f"/jobs/{job_id}")
            jobs.append(job_id)
        for job_id in jobs:
            assert box.wait(job_id, "cancelled")["cause"] == "killed"
        assert not live.find_commands(sleep)
        box.wait(box.add("true"), "completed")


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_runner_is_stopped(launcher):
    with live.Box(gpus=1, launcher=launcher, kill_grace_seconds=1) as box:
        sleep = make_sleep(box, "stopped")
        job = box.wait_started(box.add(f"{sleep} 600"))
        live.until(lambda: live.find_commands(sleep))
        live.kill(job["pid"], number=signal.SIGSTOP)
        box.ask("DELETE", f"/jobs/{job['id']}")
        assert box.wait(job["id"], "cancelled")["cause"] == "killed"
        assert not live.find_commands(sleep) and live.until(lambda: not live.is_alive(job["pid"]))


def test_grace_is_respected():
    """SIGTERM first, and time to save; SIGKILL only for what is deaf, and not before."""
    with live.Box(gpus=2, kill_grace_seconds=8, is_starting=False) as box:
        box.serve("nexus.RUNNER_TIMEOUT_S = 30")           # a busy machine may take longer than 2 s to write a result
        saves = box.add(f"trap 'sleep 0.5; echo saved > {box.path('saved')}; exit 7' TERM; touch {box.path('a')}; sleep 600 & wait")
        deaf = box.add(f"trap '' TERM; touch {box.path('b')}; while :; do sleep 0.1; done")
        live.until(lambda: os.path.exists(box.path("a")) and os.path.exists(box.path("b")))
        began = time.monotonic()
        box.ask("DELETE", f"/jobs/{saves}")
        box.ask("DELETE", f"/jobs/{deaf}")
        job = box.wait(saves, "cancelled")
        assert live.read(box.path("saved")) == "saved\n" and job["exit_code"] == 7
        assert box.job(deaf)["status"] == "running" or time.monotonic() - began >= 8
        job = box.wait(deaf, "cancelled")
        assert time.monotonic() - began >= 8 and (job["exit_code"], job["signal"]) == (137, 9)


def test_kill_twice_is_one_kill():
    with live.Box(gpus=1, kill_grace_seconds=2) as box:
        job_id = box.add(f"trap '' TERM; touch {box.path('deaf')}; while :; do sleep 0.1; done")
        live.until(box.path("deaf").exists, "its trap")
        for _ in range(3):
            assert box.call("DELETE", f"/jobs/{job_id}")[0] == 204
        box.wait(job_id, "cancelled")
        assert [status for status, _ in box.job(job_id)["status_history"]] == ["pending", "running", "cancelled"]


def test_no_grace_keeps_the_exit_code():
    with live.Box(gpus=1, kill_grace_seconds=0, is_starting=False) as box:
        box.serve("nexus.RUNNER_TIMEOUT_S = 30")
        for _ in range(3):
            job_id = box.wait_started(box.add("sleep 600"))["id"]
            live.until(lambda job_id=job_id: box.call("DELETE", f"/jobs/{job_id}")[0] == 204)
            assert box.wait(job_id, "cancelled")["exit_code"] == 137

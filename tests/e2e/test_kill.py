"""Kill and end leave nothing of a job behind, and touch nothing of another."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import live
import pytest
import shared

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
    ("100 processes", "for i in $(seq 100); do {sleep} 600 & done; wait", 100),
    ("a deep tree", "f() { if [ $1 -gt 0 ]; then (f $(($1 - 1)); :); else {sleep} 600; fi; }; f 30", 1),
    ("screen inside", "screen -dmS {name}inner {sleep} 600; {sleep} 601", 2),
    ("tmux inside", "tmux -S {folder}/{name} -f /dev/null new-session -d '{sleep} 600'; {sleep} 601", 2),
    ("begins something when it is told to end", "trap '{sleep} 600 & {sleep} 601 &' TERM; {sleep} 602 & wait; {sleep} 603", 1),
    ("begins something in a session of its own when told to end", "trap 'setsid {sleep} 600 & exit' TERM; {sleep} 602 & wait", 1),
]
@pytest.fixture(scope="module")
def services():
    options = {"gpus": 4, "cpu_slots": 40}
    with shared.Service(launcher="screen", kill_grace_seconds=1, **options) as screen, \
            shared.Service(launcher="direct", kill_grace_seconds=0.5, **options) as direct:
        yield {"screen": screen, "direct": direct}


@pytest.fixture
def box(services, request):
    with services[getattr(request, "param", "direct")].lend() as box:
        yield box


on_screen = pytest.mark.parametrize("box", ["screen"], indirect=True)
on_both = pytest.mark.parametrize("box", ["screen", "direct"], indirect=True)
NAMES = [f"{a}{b}" for a in "abcd" for b in "efgh"]


def make_sleep(box, name):
    """A sleep of its own name, by which its processes are found whatever they do to themselves."""
    path = box.bin / f"sleep-{name}-"
    shutil.copy(shutil.which("sleep"), path)
    path.chmod(0o755)
    return str(path)


def fill(command, box, sleep, name):
    return command.replace("{sleep}", sleep).replace("{name}", name).replace("{folder}", str(box.folder))


def find_all_steady(sleeps):
    """Of each of these programs the processes that stay until they are killed: shells that have that word come and go."""
    found = {sleep: set() for sleep in sleeps}
    for pid in live.all_pids():
        words = live.read_bytes(f"/proc/{pid}/cmdline")
        for sleep in sleeps:
            if sleep.encode() in words and (words.startswith(sleep.encode()) or live.stat(pid)[:1] == ["T"]) and live.is_alive(pid):
                found[sleep].add(pid)
    return found


def nothing_left(sleep):
    left = live.find_commands(sleep)
    return [(pid, live.read_bytes(f"/proc/{pid}/cmdline"), live.stat(pid)[:4]) for pid in left if live.is_alive(pid)]


def start_nasty(box, mark):
    """{job id: its sleep} of all of them, once their processes are there."""
    sleeps = {}
    for (_, command, _), name in zip(NASTY, NAMES):
        sleep = make_sleep(box, f"{mark}{name}")
        sleeps[box.add(fill(command, box, sleep, name), gpus=0)] = sleep
    counts = [count for _, _, count in NASTY]
    live.until(lambda: all(len(pids) >= count for pids, count in zip(find_all_steady(sleeps.values()).values(), counts)),
               lambda: f"all of {find_all_steady(sleeps.values())}", interval_s=0.2)
    return sleeps


@on_screen
def test_kill_leaves_nothing_and_touches_nothing_else(box):
    sleeps = start_nasty(box, "Z")
    members = find_all_steady(sleeps.values())
    for job_id, sleep in sleeps.items():
        box.ask("DELETE", f"/jobs/{job_id}")
        assert box.wait(job_id, "cancelled")["cause"] == "killed"
        assert not nothing_left(sleep), job_id
        del members[sleep]
        now = find_all_steady(members)
        for other, pids in members.items():
            assert pids <= now[other], f"killing {job_id} hit {other}"
    for word in ("tail -qn", "nexus_job_", "job.sh"):
        live.until(lambda word=word: not [pid for pid in live.find_processes(f"{box.folder}/") if word.encode() in live.read_bytes(
            f"/proc/{pid}/cmdline").replace(b"\0", b" ")], f"the end of {word}")


def test_all_at_once(box):
    """Killed together, they do not get in each other's way."""
    sleeps = start_nasty(box, "Y")
    box.ask("POST", "/jobs/cancel", {"ids": list(sleeps)})
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
    ("many", "for i in $(seq 50); do setsid {sleep} 600 & done; exit 0"),
]


def test_what_outlives_a_job_ends_with_it(box):
    sleeps = {}
    for number, (_, command) in enumerate(LEFT_BEHIND):
        sleep = make_sleep(box, f"X{NAMES[number]}")
        sleeps[box.add(fill(command, box, sleep, NAMES[number]), gpus=0)] = sleep
    for job_id, sleep in sleeps.items():
        assert box.wait(job_id, "completed")["exit_code"] == 0
        assert not nothing_left(sleep), job_id


UNKNOWN = [  # reason, command, whether a process of it survives
    ("all three at once, before it was seen", "env -i setsid sh -c '{sleep} 600 &'; {sleep} 1", True),
    ("its environment is left", "setsid sh -c '{sleep} 600 &'; {sleep} 1", False),
    ("its session is left", "env -i sh -c '{sleep} 600 &'; {sleep} 1", False),
    ("its parent is left", "env -i setsid {sleep} 600 & {sleep} 1", False),
]


def find_settled(sleep):
    """Its processes that sleep, once the `sh` that began them has gone."""
    return [pid for pid in live.find_commands(sleep)
            if live.read_bytes(f"/proc/{pid}/cmdline").split(b"\0")[:2] == [sleep.encode(), b"600"]
            and not live.read_bytes(f"/proc/{live.stat(pid)[1]}/cmdline").startswith(b"sh\0")]


def test_what_survives_is_what_the_documents_say():
    with live.Box(gpus=0, launcher="direct", cpu_slots=40, kill_grace_seconds=0.5, refresh_rate_seconds=30,
                  is_supervised=False) as box:
        for number, (reason, command, survives) in enumerate(UNKNOWN):
            sleep = make_sleep(box, f"U{NAMES[number]}")
            job = box.add(fill(command, box, sleep, NAMES[number]), gpus=0)
            live.until(lambda sleep=sleep: find_settled(sleep), f"what is left where {reason}")
            box.ask("DELETE", f"/jobs/{job}")
            box.wait(job)
            left = live.find_commands(sleep)
            live.kill(*left)
            assert bool(left) == survives, reason


def test_completed_waits_for_what_is_left():
    """The next job on the GPU starts when the memory of the last is free, not before."""
    with live.Box(gpus=1, kill_grace_seconds=2, is_supervised=False) as box:
        sleep, began = make_sleep(box, "left"), time.monotonic()
        first = box.add(f"trap '' TERM; setsid {sleep} 600 & echo $! > {box.path('pid')}; exit 0")
        then = box.add(f"[ -z \"$(tr -d '\\0' < /proc/$(cat {box.path('pid')})/cmdline)\" ] || echo still there")     # a zombie's is empty
        job = box.wait(first, "completed")
        took_s = time.monotonic() - began
        assert took_s > 2 and not live.find_commands(sleep)
        assert job["runtime_seconds"] < took_s - 1 and job["exit_code"] == 0        # the job's own, not what it left
        assert box.wait(then, "completed") and "still there" not in box.logs(then, "stdout")


@on_both
def test_kill_while_starting(box):
    sleep = make_sleep(box, "early")
    jobs = []
    for _ in range(6):
        job_id = box.add(f"{sleep} 600")
        live.until(lambda job_id=job_id: box.job(job_id)["status"] != "pending", interval_s=0)
        box.ask("DELETE", f"/jobs/{job_id}")
        jobs.append(job_id)
    for job_id in jobs:
        assert box.wait(job_id, "cancelled")["cause"] == "killed"
    assert not live.find_commands(sleep)
    box.wait(box.add("true"), "completed")


@on_both
def test_runner_is_stopped(box):
    sleep = make_sleep(box, "stopped")
    job = box.wait_started(box.add(f"{sleep} 600"))
    live.until(lambda: live.find_commands(sleep))
    live.kill(job["pid"], number=signal.SIGSTOP)
    box.ask("DELETE", f"/jobs/{job['id']}")
    assert box.wait(job["id"], "cancelled")["cause"] == "killed"
    assert not live.find_commands(sleep) and live.until(lambda: not live.is_alive(job["pid"]))


@contextlib.contextmanager
def frozen_disk(box):
    """A file system that takes no writes for now: who writes waits in the kernel, and no signal ends that."""
    live.need_root()
    folder, image = box.path("frozen"), box.path("image")
    folder.mkdir()
    image.write_bytes(bytes(8 * 2**20))
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        subprocess.run(["fsfreeze", "-f", folder], check=True)
        yield folder
    finally:
        subprocess.run(["fsfreeze", "-u", folder], capture_output=True)
        live.until(lambda: not subprocess.run(["umount", folder], capture_output=True).returncode, "the end of its users")


def is_in_kernel(mark):
    return any(b") D " in live.read_bytes(path) for pid in live.find_processes(mark, ["environ"])
               for path in pathlib.Path(f"/proc/{pid}/task").glob("*/stat"))


STUCK = [  # reason, command
    ("its only thread", "echo x > {frozen}/a"),
    ("one thread, while the first one has ended", """python3 -S -c '
import threading; threading.Thread(target=open, args=("{frozen}/b", "w")).start()'"""),
    ("left by its command", "echo x > {frozen}/c &"),
]


def test_what_no_signal_ends_is_named(box):
    """By its pid and what it waits in, where one looks; it is the job's until it has gone."""
    with frozen_disk(box) as frozen:
        jobs = {reason: box.add(command.format(frozen=frozen), gpus=0) for reason, command in STUCK}
        for reason, job in jobs.items():
            live.until(lambda job=job: is_in_kernel(f"NEXUS_JOB_ID={job}"), reason)
            box.ask("DELETE", f"/jobs/{job}")
        for reason, job in jobs.items():
            note = live.until(lambda job=job: next((note for note in box.job(job)["notes"] if "state D" in note), ""), reason)
            name, pid = re.match(r"SIGKILL did not end (\S+) \(pid (\d+)\): it waits in (?:\w+) \(state D\); .*see dmesg", note).groups()
            assert live.read(f"/proc/{pid}/comm").strip() == name and name in ("bash", "python3"), note
            assert note in box.ask("GET", f"/jobs/{job}/why")["why"] and f"(pid {pid})" in box.nexus("show", job).stdout
            assert box.job(job)["status"] == "running" and box.log().count(note) == 1
        subprocess.run(["fsfreeze", "-u", frozen], check=True)
        assert {box.wait(job)["status"] for job in jobs.values()} == {"cancelled"}
        assert all(box.log().count(f"Job {job}: SIGKILL did not end") == 1 for job in jobs.values())


def test_grace_is_respected():
    """SIGTERM first, and time to save; SIGKILL only for what is deaf, and not before."""
    with live.Box(gpus=2, kill_grace_seconds=5, is_starting=False, is_supervised=False) as box:
        box.serve("nexus.RUNNER_TIMEOUT_S = 30")           # a busy machine may take longer than 2 s to write a result
        saves = box.add(f"trap 'sleep 0.5; echo saved > {box.path('saved')}; exit 7' TERM; touch {box.path('a')}; sleep 600 & wait")
        deaf = box.add(f"trap '' TERM; touch {box.path('b')}; while :; do sleep 0.1; done")
        live.until(lambda: os.path.exists(box.path("a")) and os.path.exists(box.path("b")))
        began = time.monotonic()
        box.ask("DELETE", f"/jobs/{saves}")
        box.ask("DELETE", f"/jobs/{deaf}")
        job = box.wait(saves, "cancelled")
        assert live.read(box.path("saved")) == "saved\n" and job["exit_code"] == 7
        assert box.job(deaf)["status"] == "running" or time.monotonic() - began >= 5
        job = box.wait(deaf, "cancelled")
        assert time.monotonic() - began >= 5 and (job["exit_code"], job["signal"]) == (137, 9)


def test_kill_twice_is_one_kill(box):
    job_id = box.add(f"trap '' TERM; touch {box.path('deaf')}; while :; do sleep 0.1; done")
    live.until(box.path("deaf").exists, "its trap")
    for _ in range(3):
        assert box.call("DELETE", f"/jobs/{job_id}")[0] == 204
    box.wait(job_id, "cancelled")
    assert [status for status, _ in box.job(job_id)["status_history"]] == ["pending", "running", "cancelled"]


def test_no_grace_keeps_the_exit_code():
    with live.Box(gpus=1, kill_grace_seconds=0, is_starting=False, is_supervised=False) as box:
        box.serve("nexus.RUNNER_TIMEOUT_S = 30")
        for _ in range(2):
            job_id = box.wait_started(box.add("sleep 600"))["id"]
            live.until(lambda job_id=job_id: box.call("DELETE", f"/jobs/{job_id}")[0] == 204)
            assert box.wait(job_id, "cancelled")["exit_code"] == 137

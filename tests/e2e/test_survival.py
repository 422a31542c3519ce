"""What a researcher must not lose: real services, runners and screens, killed at the worst moments."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import live
import pytest

import nexus


@contextlib.contextmanager
def small_disk(path, options="size=2m"):
    """A real file system of 2 MB, mounted there."""
    live.need_root()
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "nexus-test", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], capture_output=True)


def fill(path):
    """Take all room that is there."""
    with open(path / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 1024)


class Load:
    """Submits jobs without a pause, each until it is acknowledged; what each job did is in a file."""

    def __init__(self, box, pause_s=0.02):
        self.box, self.pause_s, self.ids, self.refused = box, pause_s, [], 0
        self.done = box.path("done")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        number = 0
        while not self.stop.is_set():
            number += 1
            command = f'echo "$NEXUS_JOB_ID {number}" >> {self.done}; sleep 0.0{number % 7}; exit {number % 3}'
            while True:
                try:
                    status, answer = self.box.call("POST", "/queue", {"command": command}, key=f"load-{number:08d}")
                except live.Lost:
                    time.sleep(0.02)
                    continue
                if status == 200:
                    break
                assert status == 503, (status, answer)
                self.refused += 1
                time.sleep(0.05)
            self.ids.append((answer["id"], number))
            self.stop.wait(self.pause_s)

    def check(self):
        """Every acknowledged job ran, once, and its exit code is known."""
        self.stop.set()
        self.thread.join(live.PATIENCE_S)
        assert self.ids and not self.thread.is_alive()
        jobs = live.until(lambda: (jobs := self.box.ask("GET", "/jobs")) and all(
            job["status"] in ("completed", "failed") for job in jobs) and jobs, lambda: f"the last jobs\n{self.box.log()[-3000:]}")
        jobs = {job["id"]: job for job in jobs}
        ran = [tuple(line.split()) for line in self.done.read_text().splitlines()]
        assert sorted(ran) == sorted((job_id, str(number)) for job_id, number in self.ids)
        for job_id, number in self.ids:
            assert (jobs[job_id]["exit_code"], jobs[job_id]["cause"]) == (number % 3, "exit" if number % 3 else None), jobs[job_id]
        return len(self.ids)


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_service_killed_at_random_moments(launcher):
    """No acknowledged job is lost, and none is started twice."""
    chance = random.Random(launcher)
    with live.Box(gpus=4, launcher=launcher) as box:
        load = Load(box)
        for _ in range(10):
            time.sleep(chance.random() * 0.5)           # the moment is the point
            box.kill_service()
            if chance.random() < 0.8:                   # somebody types a command, or the supervisor is faster
                box.nexus("start")
            box.await_service()
        assert load.check() > 3


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_supervisor_starts_it_again(launcher):
    with live.Box(gpus=1, launcher=launcher) as box:
        job = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.1; done; exit 5"))
        waits = box.add("true")
        for _ in range(2):
            old = box.kill_service()
            assert box.await_service() != old
            assert box.job(job["id"])["status"] == "running" and box.job(waits)["status"] == "pending"
        box.path("go").touch()
        assert box.wait(job["id"], "failed")["exit_code"] == 5
        box.wait(waits, "completed")


def test_stopped_while_the_supervisor_is_about_to_start_it():
    """`stop` means stop, also in the second between a crash and the next start."""
    with live.Box(gpus=1, launcher="screen") as box:
        box.kill_service()
        assert box.nexus("stop").returncode == 0
        live.until(lambda: not box.supervisors(), "the supervisor to give up")
        assert not box.pid()
        box.start()                                     # and the next start is as good as any
        box.kill_service()
        box.await_service()


def test_job_that_ends_while_the_service_is_down():
    with live.Box(gpus=1, launcher="direct") as box:
        job = box.wait_started(box.add(f"echo begun; while [ ! -e {box.path('go')} ]; do sleep 0.05; done; echo ended; exit 7"))
        box.kill_all_of_service()
        box.path("go").touch()
        result = pathlib.Path(job["log_dir"], "result-1.json")
        live.until(lambda: result.exists() and not live.is_alive(job["pid"]), "the job's end")
        time.sleep(1.2)                                 # another second on the clock
        box.start()
        job = box.wait(job["id"], "failed")
        told = json.loads(result.read_text())
        assert (job["exit_code"], job["cause"], job["runtime_seconds"]) == (7, "exit", told["runtime_seconds"])
        assert job["finished_at"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(result.stat().st_mtime))
        assert box.logs(job["id"], "stdout") == "begun\nended\n"


DEATHS = [  # who is killed, what becomes of the job
    ("screen", ("failed", "exit", 3)),
    ("runner", ("failed", "session-lost", None)),
    ("service screen runner", ("failed", "session-lost", None)),
    ("command", ("failed", "signal", 137)),
]


@pytest.mark.parametrize("victims, wanted", DEATHS, ids=[case[0] for case in DEATHS])
def test_deaths(victims, wanted):
    with live.Box(gpus=1, launcher="screen", kill_grace_seconds=1) as box:
        go = box.path("go")
        script = box.path("work.sh")
        script.write_text(f"echo begun; while [ ! -e {go} ]; do sleep 0.05; done; echo ended; exit 3\n")
        job = box.wait_started(box.add(f"exec sh {script}"))
        then = box.add("true")
        command = live.until(lambda: [pid for pid in live.find_commands(f"sh {script}") if live.stat(pid)[1:2] == [str(job["pid"])]])[0]
        live.until(lambda: box.logs(job["id"], "stdout") == "begun\n")
        if "service" in victims:
            box.kill_all_of_service()
        pids = {"screen": int(job["session"].partition(".")[0]), "runner": job["pid"], "command": command}
        live.kill(*(pids[name] for name in victims.split() if name != "service"))
        live.until(lambda: not any(live.is_alive(pids[name]) for name in victims.split() if name != "service"))
        if "service" in victims:
            box.start()
        go.touch()
        job = box.wait(job["id"], "failed")
        assert (job["status"], job["cause"], job["exit_code"]) == wanted
        assert not live.find_commands(f"sh {script}")
        if wanted[1] == "exit":
            assert box.logs(job["id"], "stdout") == "begun\nended\n"
        box.wait(then, "completed")


def test_stop_while_jobs_run():
    with live.Box(gpus=2, launcher="screen") as box:
        go = box.path("go")
        jobs = [box.wait_started(box.add(f"while [ ! -e {go} ]; do sleep 0.05; done; exit {code}"))["id"] for code in (0, 9)]
        waits = box.add("true")
        done = box.nexus("stop")
        assert done.returncode == 0 and not box.pid() and not (box.home / "service.json").exists()
        live.until(lambda: not box.supervisors(), "the supervisor to end with it")
        assert box.nexus("stop").returncode == 0        # it does not run: that is fine
        box.start()
        assert [box.job(job_id)["status"] for job_id in (*jobs, waits)] == ["running", "running", "pending"]
        assert [gpu["job_id"] for gpu in box.status()["gpu_status"]] == jobs
        go.touch()
        assert box.wait(jobs[0], "completed")["attempt"] == 1 and box.wait(jobs[1], "failed")["exit_code"] == 9
        box.wait(waits, "completed")


def test_an_accepted_kill_survives_the_service():
    with live.Box(gpus=1, kill_grace_seconds=2) as box:
        job = box.wait_started(box.add("trap '' TERM; while :; do sleep 0.1; done"))
        box.ask("DELETE", f"/jobs/{job['id']}")
        box.kill_service()
        box.start()
        assert box.wait(job["id"], "cancelled")["cause"] == "killed"


def test_two_services_at_once():
    with live.Box(gpus=1, is_starting=False) as box:
        both = [subprocess.Popen(box.argv("serve"), env=box.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True) for _ in range(2)]
        box.await_service()
        loser = live.until(lambda: next((one for one in both if one.poll() is not None), None), "the loser to leave")
        out, err = loser.communicate()
        assert loser.returncode == 4 and "runs already" in err and not out
        winner = next(one for one in both if one is not loser)
        assert box.pid() == winner.pid and box.wait(box.add("true"), "completed")
        done = box.nexus("serve")
        assert done.returncode == 4 and f"pid {winner.pid}" in done.stderr
        winner.terminate()
        assert winner.wait(live.PATIENCE_S) == 0
        winner.communicate()


def test_many_commands_start_one_service():
    with live.Box(gpus=1, is_starting=False, launcher="screen") as box:
        adds = [subprocess.Popen(box.argv("add", f"echo {number} >> {box.path('done')}"), env=box.environ, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for number in range(5)]
        answers = [(*add.communicate(timeout=live.PATIENCE_S), add.returncode) for add in adds]
        assert all(code == 0 for _, _, code in answers), answers
        for out, _, _ in answers:
            box.wait(out.strip(), "completed")
        assert sorted(live.read(box.path("done")).split()) == list("01234")
        live.until(lambda: len(box.supervisors()) <= 2, "the other supervisors to leave")


def edit(box, old, new):
    """Another machine, or another boot, wrote the state: as if it had."""
    for path in [*box.home.glob("state.json*"), *box.home.glob("journal.jsonl*")]:
        path.write_text(live.seal(path.read_text().replace(old, new)))


@pytest.mark.parametrize("on_reboot, wanted", [("fail", ("failed", "reboot", 1)), ("requeue", ("completed", None, 2))])
def test_the_machine_went_down(on_reboot, wanted):
    with live.Box(gpus=2, launcher="screen", on_reboot=on_reboot) as box:
        job = box.wait_started(box.add(f"[ -e {box.path('go')} ] || sleep 600"))
        ended = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done; exit 4"))
        waits = box.add("true")
        box.kill_all_of_service()
        box.path("go").touch()
        live.until(lambda: os.path.exists(f"{ended['log_dir']}/result-1.json"))
        live.kill_all(f"{box.folder}/")
        boot_id = live.read("/proc/sys/kernel/random/boot_id").strip()
        edit(box, boot_id, "11111111-2222-3333-4444-555555555555")
        # The pid is another process now
        with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
            edit(box, f'"pid":{job["pid"]},', f'"pid":{other.pid},')
            box.start()
            job = box.wait(job["id"], wanted[0])
            assert (job["status"], job["cause"], job["attempt"]) == wanted
            assert box.wait(ended["id"], "failed")["exit_code"] == 4
            box.wait(waits, "completed")
            assert other.poll() is None
            other.kill()


def test_home_shared_with_another_machine():
    with live.Box(gpus=1) as box:
        box.kill_all_of_service()
        (box.home / "service.json").write_text(json.dumps({**box.info(), "machine": "gpu1"}))
        before = {path: path.read_bytes() for path in box.home.iterdir() if path.name.startswith(("state", "journal"))}
        for command in (["start"], ["add", "true"], ["status"], ["serve"], ["stop"]):
            done = box.nexus(*command)
            assert done.returncode == 4, (command, done)
            for words in ("the service runs on gpu1", "set NEXUS_HOME=~/.nexus-$(hostname) or NEXUS_URL"):
                assert words in done.stderr, (command, done.stderr)
        assert {path: path.read_bytes() for path in before} == before


def newest(box):
    """The journals that hold something, in order."""
    return [path for path in (box.home / "journal.jsonl.prev", box.home / "journal.jsonl") if path.exists() and path.stat().st_size]


def damage_all_but_the_last(box):
    """What is lost can be made good from what is left."""
    for name in ("state.json", "service.json"):
        (box.home / name).write_bytes(os.urandom(5000))
    (box.home / "token").write_bytes(b"")
    (box.home / "events").unlink()
    (box.home / "events").write_text("x")


def damage_all(box):
    for path in [*box.home.glob("state.json*"), *newest(box)]:
        path.write_bytes(os.urandom(500))


@pytest.mark.parametrize("damage, is_whole", [(damage_all_but_the_last, True), (damage_all, False)])
def test_damaged_files(damage, is_whole):
    with live.Box(gpus=1) as box:
        ended = box.add("exit 3")
        box.wait(ended, "failed")
        box.nexus("restart")                            # a snapshot
        box.ask("POST", "/service/pause")
        kept = [box.add(f"echo {number}") for number in range(3)]
        box.nexus("restart")                            # and another, so that there is a state.json.prev
        kept += [box.add(f"echo {number}") for number in range(3, 6)]
        box.kill_all_of_service()
        assert (box.home / "state.json.prev").exists() and newest(box)
        damage(box)
        box.start()
        jobs = {job["id"]: job for job in box.ask("GET", "/jobs")}
        if is_whole:
            assert set(jobs) == {ended, *kept} and jobs[ended]["exit_code"] == 3
            assert [job["id"] for job in box.ask("GET", "/queue")] == kept
        # More changes, and another kill
        box.ask("POST", "/service/pause")               # that too may have been lost
        later = [box.add("true") for _ in range(3)]
        cancelled = later.pop()
        box.ask("DELETE", f"/queue/{cancelled}")
        jobs = {job["id"]: job["status"] for job in box.ask("GET", "/jobs")}
        box.kill_all_of_service()
        box.start()
        assert {job["id"]: job["status"] for job in box.ask("GET", "/jobs")} == jobs
        box.ask("POST", "/service/resume")
        for job_id in later:
            box.wait(job_id, "completed")
        assert box.nexus("restart").returncode == 0
        assert {job["id"] for job in box.ask("GET", "/jobs")} == set(jobs) and box.job(cancelled)["status"] == "cancelled"


def test_state_of_a_newer_nexus():
    """It is told, and nothing is moved or write_aside."""
    with live.Box(gpus=1) as box:
        box.ask("POST", "/service/pause")
        job_id = box.add("true")
        assert box.nexus("stop").returncode == 0
        path = box.home / "state.json"
        path.write_text(path.read_text().replace('"version": 3', '"version": 4'))
        before = {path: path.read_bytes() for path in box.home.iterdir() if path.name.startswith(("state", "journal"))}
        done = box.nexus("queue")
        assert done.returncode == 4 and "newer nexus" in done.stderr and "hint: nothing was changed" in done.stderr
        assert {path: path.read_bytes() for path in box.home.iterdir() if path.name.startswith(("state", "journal"))} == before
        path.write_text(path.read_text().replace('"version": 4', '"version": 3'))
        box.start()
        assert [job["id"] for job in box.ask("GET", "/queue")] == [job_id] and box.health()["is_healthy"]


def test_a_job_that_cannot_be_understood_is_kept_and_told():
    with live.Box(gpus=1) as box:
        box.ask("POST", "/service/pause")
        bad, good = box.add("echo bad"), box.add("echo good")
        assert box.nexus("restart").returncode == 0 and box.nexus("stop").returncode == 0
        for path in [*box.home.glob("state.json*"), *box.home.glob("journal.jsonl*")]:
            path.write_text(re.sub(f'"{bad}": ?{{', f'"{bad}":{{"retries":"2",', path.read_text()))
        path = box.home / "state.json"
        path.write_text(path.read_text().replace('"paused": true', '"paused": false'))
        box.start()
        assert [job["id"] for job in box.ask("GET", "/jobs")] == [good]
        kept, = box.home.glob("state.json.damaged-*")
        assert "echo bad" in kept.read_text() and f"job {bad}" in box.log() and str(kept) in box.log()
        told = box.nexus("health")
        assert told.returncode and str(kept) in told.stdout
        kept.unlink()
        assert not box.health()["is_healthy"] and box.status()["is_paused"], "until it is resumed"
        box.ask("POST", "/service/resume")
        assert box.health()["is_healthy"]
        box.wait(good, "completed")


def flip_last(path, word, changed):
    """Change a bit of a word in the last line that has it."""
    lines = path.read_text().splitlines(keepends=True)
    at = max(number for number, line in enumerate(lines) if word in line)
    lines[at] = changed.join(lines[at].rsplit(word, 1))
    path.write_text("".join(lines))


def test_a_flipped_bit_runs_nothing_again_and_is_told_until_it_is_resumed():
    """Of the last records of a job that runs and of one that has ended."""
    with live.Box(gpus=4, is_starting=False) as box:
        health = box.path("health")
        box.write_config(on_unhealthy=f'echo "$NEXUS_HEALTH $NEXUS_HEALTH_REASON" >> {health}')
        box.start()
        ended = box.add(f"echo ended >> {box.path('runs')}", env={"TOKEN": "hunter2"})
        box.wait(ended, "completed")
        running = box.add(f"echo running >> {box.path('runs')}; until [ -e {box.path('go')} ]; do sleep 0.1; done")
        live.until(lambda: "running" in live.read(box.path("runs")), "it to begin")
        live.until(lambda: box.job(running)["pid"], "its pid to be known")
        box.kill_all_of_service()
        for job_id in (ended, running):
            flip_last(box.home / "journal.jsonl", f'"id":"{job_id}"', f'"ie":"{job_id}"')
        box.start()
        later = box.add(f"echo later >> {box.path('runs')}")
        for _ in range(2):
            status, health_now = box.status(), box.health()
            assert status["is_paused"] and any("the queue is paused" in hint and "change" in hint for hint in status["hints"])
            assert not health_now["is_healthy"] and "damage" in status["bad_checks"]
            assert "nexus resume" in box.job(later)["waiting_for"] and "damaged" in box.job(later)["waiting_for"]
            for words in (box.nexus().stdout, box.nexus("health").stdout, box.log(), json.dumps(status)):
                assert "paused" in words and "hunter2" not in words
            assert box.ask("GET", "/status?after=0")["hints"]
            live.until(lambda: live.read(health).startswith("UNHEALTHY"), "on_unhealthy")
            box.kill_all_of_service()                       # it lasts
            box.start()
        box.path("go").touch()
        box.wait(running, "completed")
        assert box.job(ended)["status"] == "completed" and box.job(later)["status"] == "pending"
        assert box.nexus("resume").returncode == 0
        box.wait(later, "completed")
        assert sorted(live.read(box.path("runs")).split()) == ["ended", "later", "running"]
        assert "damage" not in box.status()["bad_checks"] and not box.status()["is_paused"]
        box.kill_all_of_service()
        box.start()
        assert not box.status()["is_paused"]


def test_a_job_whose_start_is_lost_does_not_start_again():
    """The journal ends before it, as if its last writes had never been: the job is held, and runs once."""
    with live.Box(gpus=4) as box:
        job_id = box.add(f"echo $NEXUS_JOB_ID >> {box.path('runs')}; until [ -e {box.path('go')} ]; do sleep 0.1; done")
        live.until(lambda: live.read(box.path("runs")), "it to begin")
        box.kill_all_of_service()
        journal = box.home / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True)
        added = next(number for number, line in enumerate(lines) if job_id in line)
        journal.write_text("".join(lines[:added + 1]))
        box.start()
        assert box.job(job_id)["is_held"] and box.status()["is_paused"]
        assert any(job_id in hint for hint in box.status()["hints"])
        assert box.nexus("resume").returncode == 0
        other = box.add("true")
        box.wait(other, "completed")
        assert box.job(job_id)["status"] == "pending" and live.read(box.path("runs")).split() == [job_id]
        box.path("go").touch()


def test_the_pause_ends_by_an_edit_while_the_service_is_down():
    with live.Box(gpus=4) as box:
        box.ask("POST", "/service/pause")
        kept = box.add("true")
        assert box.nexus("restart").returncode == 0
        box.kill_all_of_service()
        path = box.home / "state.json"
        path.write_text(path.read_text().replace('"status":"pending"', '"status":"qending"'))
        box.start()
        assert box.status()["is_paused"] and "damage" in box.status()["bad_checks"]
        box.kill_all_of_service()
        body = json.loads(path.read_text())
        path.write_text(json.dumps({**body, "paused": False}, indent=2))
        box.start()
        assert not box.status()["is_paused"] and "damage" not in box.status()["bad_checks"]
        box.wait(kept, "completed")


def test_two_damages_in_turn_lose_nothing():
    """state.json and its .prev are two files from the first start on, and after each recovery."""
    with live.Box(gpus=4) as box:
        state, former = box.home / "state.json", box.home / "state.json.prev"
        assert not state.samefile(former)
        box.ask("POST", "/service/pause")
        ids = [box.add("true") for _ in range(6)]
        box.kill_all_of_service()
        os.truncate(state, 50)
        box.start()
        assert not state.samefile(former)
        ids.append(box.add("true"))
        box.kill_all_of_service()
        with open(state, "r+b") as file:
            file.write(os.urandom(500))
        box.start()
        assert [job["id"] for job in box.ask("GET", "/queue")] == ids and box.status()["is_paused"]
        box.ask("POST", "/service/resume")
        for job_id in ids:
            box.wait(job_id, "completed")
        assert not state.samefile(former)


def test_a_damaged_last_line_is_told():
    with live.Box(gpus=4) as box:
        box.ask("POST", "/service/pause")
        ids = [box.add(f"echo {number}") for number in range(3)]
        box.kill_all_of_service()
        with open(box.home / "journal.jsonl", "r+b") as file:
            file.seek(-20, os.SEEK_END)
            file.write(b"\0\0")
        box.start()
        assert [job["id"] for job in box.ask("GET", "/queue")] == ids[:2]
        kept, = box.home.glob("state.json.damaged-*")
        assert "echo 2" in kept.read_text() and "last line cannot be read" in box.nexus("health").stdout


def test_the_home_of_the_version_before_goes_on(tmp_path):
    """Its jobs run, with their commands and environments as they were."""
    sample = pathlib.Path(__file__).parents[1] / "samples/homes/waiting"
    with live.Box(gpus=0, cpu_slots=4, is_starting=False) as box:
        for path in sample.iterdir():
            text = path.read_text().replace('"host": "gpu1"', f'"host": "{nexus.read_machine()}"').replace('"/home/ann', f'"{box.folder}')
            (box.home / path.name).write_text(text)
        box.start()
        assert box.health()["is_healthy"] and not box.status()["is_paused"] and "Recovery" not in box.log()
        assert sorted(job["id"] for job in box.ask("GET", "/jobs")) == ["abc", "abd", "abe", "abf", "abg"]
        assert json.loads((box.home / "state.json").read_text())["version"] == 3
        box.nexus("resume", "abe")
        box.wait("abe")
        assert "python train.py" in box.job("abe")["command"]


def test_a_disk_that_hangs_holds_up_no_reader():
    """Until it has been written nothing is acknowledged, and nothing of it is shown."""
    with live.Box(gpus=1, is_starting=False) as box:
        gate = box.folder / "hangs"
        box.serve("import os, time; real = os.fdatasync; os.fdatasync = lambda fd: [time.sleep(0.01) for _ in iter("
                  f"lambda: os.path.exists({str(gate)!r}), False)] and None or real(fd)")
        box.ask("POST", "/service/pause")
        first = box.add("true")
        gate.touch()
        answers = []
        writer = threading.Thread(target=lambda: answers.append(box.add("false")))
        writer.start()
        for path in ("/status", "/queue", "/jobs", f"/jobs/{first}", "/health", "/metrics", "/gpus", "/") * 3:
            box.call("GET", path)
        assert [job["id"] for job in box.ask("GET", "/queue")] == [first] and not answers
        gate.unlink()
        writer.join()
        assert [job["id"] for job in box.ask("GET", "/queue")] == [first, *answers]


def test_full_disk_for_the_state():
    with contextlib.ExitStack() as stack:
        box = live.Box(gpus=2, is_starting=False)
        stack.callback(box.close)
        disk = stack.enter_context(small_disk(box.folder / "disk"))
        stack.enter_context(box)
        box.write_config(state_file=str(disk / "state.json"))
        box.start()
        pid = box.pid()
        load = Load(box)
        for number in range(3):
            known, refused = len(load.ids), load.refused
            live.until(lambda known=known: len(load.ids) > known + 10, "some jobs")
            fill(disk)
            live.until(lambda refused=refused: load.refused > refused + 3, "refusals")
            status, answer = box.call("POST", "/queue", {"command": "true"})
            if status == 503:                           # a page that has room yet may take one more line
                assert answer["error"] == "unavailable" and "No space left" in answer["message"] and answer["hint"]
                live.until(lambda: any("No space left" in hint for hint in box.status()["hints"]) and not box.health()["is_healthy"])
            else:
                box.ask("GET", f"/jobs/{answer['id']}")
            if number == 1:                             # killed while it is full
                box.kill_service()
                box.nexus("start")
                pid = box.await_service()
            (disk / "filler").unlink()
            known = len(load.ids)
            live.until(lambda known=known: len(load.ids) > known + 3, "it to go on by itself")
            assert box.pid() == pid
        load.stop.set()
        load.thread.join()
        extra = {job["id"] for job in box.ask("GET", "/jobs")} - {job_id for job_id, _ in load.ids}
        for job_id in extra:
            box.wait(job_id, "completed")
        load.check()
        assert "Internal error" not in box.log()


def test_full_disk_for_the_logs():
    with contextlib.ExitStack() as stack:
        box = live.Box(gpus=0, cpu_slots=20, launcher="screen", is_starting=False)
        stack.callback(box.close)
        disk = stack.enter_context(small_disk(box.folder / "disk"))
        stack.enter_context(box)
        box.write_config(log_dir=str(disk / "logs"))
        box.start()
        pid = box.pid()
        waiting = {}
        for code in (0, 5, 6):
            command = f"while [ ! -e {box.path(f'go{code}')} ]; do sleep 0.05; done; exit {code}"
            waiting[code] = box.wait_started(box.add(command, gpus=0))["id"]
        # A job that fills it with what it prints
        noisy = box.wait(box.add("head -c 5000000 /dev/zero", gpus=0), "failed")
        assert noisy["cause"] == "exit" and noisy["exit_code"] == 1 and "No space left on device" in noisy["cause_line"]
        fill(disk)
        # One that is to start now
        late = box.add("echo hello", gpus=0)
        live.until(lambda: re.search("No space left|cannot be written", box.job(late)["waiting_for"] or ""), "why it waits")
        # Those that end now
        box.path("go0").touch()
        box.path("go5").touch()
        assert box.wait(waiting[0], "completed")["exit_code"] == 0
        assert box.wait(waiting[5], "failed")["exit_code"] == 5
        live.until(lambda: not box.health()["is_healthy"], "a look at the disks")
        assert box.pid() == pid
        # And one that ends while the service is away too
        box.kill_all_of_service()
        box.path("go6").touch()
        live.until(lambda: not live.find_commands(f"{box.path('go6')}"), "its command's end")
        box.start()
        pid = box.pid()
        assert box.wait(waiting[6], "failed")["exit_code"] == 6
        (disk / "filler").unlink()
        for path in (disk / "logs").glob("*/stdout.log"):
            path.write_bytes(b"")
        assert box.wait(late, "completed") and box.pid() == pid
        live.until(lambda: (disk / "logs" / f"job_{waiting[6]}" / "result-1.json").exists(), "the results that were not written")
        assert "Internal error" not in box.log()


@pytest.mark.parametrize("uid", [65534, 0], ids=["another user's", "an own one"])
def test_another_program_on_the_port(uid):
    with live.Box(gpus=1, is_starting=False) as box, live.listener(box.port, uid) as heard:
        done = box.nexus("add", "true")
        assert done.returncode == 4 and f"port {box.port}" in done.stderr and "in use" in done.stderr and "[service] port" in done.stderr
        # service.json names a process that lives, as while a service starts or ends: the port is not called in place of api.sock
        own = os.getpid()
        box.home.joinpath("service.json").write_text(json.dumps({
            "pid": own, "started": int(live.stat(own)[19]), "boot_id": nexus.read_boot_id(), "url": f"http://127.0.0.1:{box.port}",
            "port": box.port, "socket": str(box.home / "api.sock"), "machine": nexus.read_machine()}))
        for command in (["add", "true"], ["status"], ["logs", "-f", "abc"], ["stop"]):
            done = box.nexus(*command)
            assert done.returncode == 6 and not done.stdout and "api.sock is gone" in done.stderr and f"kill {own}" in done.stderr, done
        assert heard() == "listens\n"


def test_the_socket_was_deleted():
    """A command says so at once, and what it says to type helps."""
    with live.Box(gpus=1, launcher="screen") as box:
        job, pid = box.wait_started(box.add("sleep 300")), box.pid()
        box.home.joinpath("api.sock").unlink()
        began = time.monotonic()
        done = box.nexus("status")
        assert done.returncode == 6 and "api.sock is gone" in done.stderr and f"\nhint: kill {pid} ends it" in done.stderr, done
        assert time.monotonic() - began < 10            # a lost connection is tried again for 30 s
        os.kill(pid, signal.SIGTERM)
        live.until(lambda: not box.pid(), "the service to end")
        assert job["id"] in box.nexus("status").stdout and box.pid() != pid
        assert box.job(job["id"])["status"] == "running"


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_service_started_from_inside_a_job(launcher):
    """It is not the job's: it knows nothing of the job's environment, and survives the job."""
    with live.Box(gpus=2, kill_grace_seconds=1) as box, live.Box(gpus=1, launcher=launcher, is_starting=False) as inner:
        start = f"NEXUS_HOME={inner.home} NEXUS_MOCK_GPUS=1 {sys.executable} {live.NEXUS}"
        killed = box.add(f"{start} add 'echo inner $NEXUS_JOB_ID; sleep 600' > {box.path('id')}; sleep 600")
        inner_job = live.until(lambda: live.read(box.path("id")).strip(), "the job inside")
        pid, inner_pid = inner.await_service(), inner.wait_started(inner_job)["pid"]
        environ = live.read_bytes(f"/proc/{pid}/environ").split(b"\0")
        assert not [entry for entry in environ if entry.startswith((b"NEXUS_JOB_", b"CUDA_VISIBLE_DEVICES="))]
        assert not [target for fd in os.listdir(f"/proc/{pid}/fd") if str(box.folder) in (target := read_link(f"/proc/{pid}/fd/{fd}"))]
        box.ask("DELETE", f"/jobs/{killed}")
        box.wait(killed, "cancelled")
        ended = box.add("true")
        box.wait(ended, "completed")
        assert live.is_alive(pid) and live.is_alive(inner_pid) and inner.supervisors()
        assert inner.job(inner_job)["status"] == "running" and f"inner {inner_job}" not in inner.logs(inner_job, "stderr")
        inner.ask("DELETE", f"/jobs/{inner_job}")
        inner.wait(inner_job, "cancelled")


def read_link(path):
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


SIGNALS = [  # a command that signals its group, what is said of its end
    ("trap 'kill 0' EXIT; sleep 600 & exit 3", ("signal", 143)),       # many scripts end so
    ("kill 0; sleep 9", ("signal", 143)), ("kill $PPID; exit 3", ("exit", 3)),
    ("kill -INT 0; sleep 9", ("signal", 130)), ("kill -HUP 0; sleep 9", ("signal", 129)),
]


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_jobs_that_signal_their_group(launcher):
    with live.Box(gpus=1, launcher=launcher) as box:
        for job_id, (_, wanted) in zip([box.add(command) for command, _ in SIGNALS], SIGNALS):
            job = box.wait(job_id, "failed")
            assert (job["cause"], job["exit_code"]) == wanted
        box.wait(box.add("true"), "completed")


@contextlib.contextmanager
def small_home(options="size=6m", **settings):
    """A box whose home is a small disk of its own."""
    with contextlib.ExitStack() as stack:
        box = live.Box(gpus=2, is_starting=False, **settings)
        stack.callback(box.close)
        config = live.read(box.home / "config.toml")
        stack.enter_context(small_disk(box.home, options))
        stack.enter_context(box)
        (box.home / "config.toml").write_text(config)
        yield box


UNRECORDED = "it has ended with {}, to be recorded when there is room"


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_home_on_a_full_disk(launcher):
    """Killed while its whole home is full, it comes back, shows all, and goes on when there is room."""
    with small_home(launcher=launcher) as box:
        box.start()
        ran, go = box.path("ran"), box.path("go")
        ids = {code: box.wait_started(box.add(f"echo {code} >> {ran}; while [ ! -e {go} ]; do sleep 0.05; done; exit {code}"))["id"]
               for code in (0, 5)}
        after = [box.add(f"echo after >> {ran}", after=[ids[0]])]
        waiter = subprocess.Popen(box.argv("wait", ids[0]), env=box.environ, cwd="/")
        fill(box.home)

        def is_refused():
            status, answer = box.call("POST", "/queue", {"command": f"echo after >> {ran}", "after": [ids[0]]})
            after.extend([answer["id"]] if status == 200 else [])
            return status == 503
        live.until(is_refused, "the end of the page that the journal has", interval_s=0)
        (box.home / "supervisor.sh").write_text("exit 1 # of an older nexus\n" if launcher == "direct" else nexus.SUPERVISOR_SCRIPT)
        box.kill_all_of_service()
        go.touch()
        live.until(lambda: not live.find_commands(f"{go} ]"), "the commands' ends")
        old = box.info()

        done = box.nexus("jobs")
        assert done.returncode == 0 and ids[0] in done.stdout and box.info() == old, done
        for code, job_id in ids.items():
            words = UNRECORDED.format(code)
            live.until(lambda words=words: f"running; {words}" in box.nexus("jobs").stdout, words)
            assert f"Job {job_id}: running; {words}\n" in box.nexus("show", job_id).stdout
            assert box.nexus().stdout.count(words) == 1 and words in box.nexus("top").stdout
            job, row = box.job(job_id), box.ask("GET", "/status?after=0")["jobs"][job_id]
            assert (job["status"], job["exit_code"], job["unrecorded"]) == ("running", None, words) and row["unrecorded"] == words
        assert [box.job(job_id)["status"] for job_id in after] == ["pending"] * len(after) and waiter.poll() is None
        for command in (["add", "true"], ["kill", ids[0]]):
            done = box.nexus(*command)
            assert done.returncode == 6 and "No space left" in done.stderr and "goes on by itself" in done.stderr, (command, done)
        assert any("service.json: No space left" in hint for hint in box.status()["hints"]) and box.nexus("health").returncode

        # service.json still tells of the service that was killed: this one is found, stopped and started without it
        pid = box.ask("GET", "/")["pid"]
        assert pid != old["pid"] and "runs already" in box.nexus("start").stderr
        assert box.nexus("restart").returncode == 0 and not live.is_alive(pid)
        pid = box.ask("GET", "/")["pid"]
        live.kill(pid)
        live.until(lambda: box.ask("GET", "/")["pid"] != pid, "the supervisor to start it again")
        pid = box.ask("GET", "/")["pid"]
        assert box.nexus("stop").returncode == 0 and not live.is_alive(pid) and "does not run" in box.nexus("stop").stderr
        assert box.nexus("jobs").returncode == 0 and box.job(ids[5])["status"] == "running"

        (box.home / "filler").unlink()
        job = box.wait(ids[0], "completed")
        assert job["attempt"] == 1 and "No space left on device" in " ".join(job["notes"]) and job["unrecorded"] is None
        assert "(the job's logs may be cut)" in box.nexus("show", ids[0]).stdout
        job = box.wait(ids[5], "failed")
        assert (job["attempt"], job["exit_code"], job["cause"]) == (1, 5, "exit") and "No space left" in job["cause_line"]
        assert waiter.wait(live.PATIENCE_S) == 0
        for job_id in after:
            box.wait(job_id, "completed")
        assert sorted(ran.read_text().split()) == ["0", "5", *["after"] * len(after)]
        box.await_service()                             # by service.json
        live.until(lambda: box.health()["is_healthy"], "a look at the disks")
        assert box.wait(box.add("true"), "completed")["notes"] == [] and "Internal error" not in box.log()


def test_a_job_that_ends_on_a_full_disk_while_no_service_runs():
    """And none does before there is room: its runner has seen it."""
    with small_home(launcher="direct") as box:
        box.start()
        job = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done"))
        box.kill_all_of_service()
        fill(box.home)
        box.path("go").touch()
        live.until(lambda: not live.find_commands(f"{box.path('go')} ]"), "its command's end")
        live.until(lambda: [pid for pid in live.descendants(job["pid"]) if live.read(f"/proc/{pid}/comm") == "sleep\n"], "a pause")
        (box.home / "filler").unlink()
        live.until(lambda: not live.is_alive(job["pid"]), "its runner's end")
        box.start()
        job = box.wait(job["id"], "completed")
        assert job["attempt"] == 1 and "the job's logs may be cut" in " ".join(job["notes"])


def test_a_home_in_which_no_file_can_be_made():
    """No inode is left: the files that are there are enough for a start, and the journal takes jobs."""
    with small_home("size=9m,nr_inodes=120", launcher="direct") as box:
        box.start()
        before = box.add("exit 3")
        box.wait(before, "failed")
        box.kill_all_of_service()
        made = 0
        with contextlib.suppress(OSError):
            for made in range(1000):
                (box.home / f"filler-{made}").touch()
        done = box.nexus("jobs")
        assert done.returncode == 0 and before in done.stdout, (made, done)
        late = box.add("true")
        live.until(lambda: "No space left" in (box.job(late)["waiting_for"] or ""), lambda: box.job(late))
        for path in box.home.glob("filler-*"):
            path.unlink()
        box.wait(late, "completed")
        box.await_service()


def test_a_first_start_on_a_full_disk():
    with small_home(launcher="direct") as box:
        fill(box.home)
        done = box.nexus()
        assert done.returncode == 0 and "No space left" in done.stdout and not (box.home / "state.json").exists(), done
        done = box.nexus("add", "true")
        assert done.returncode == 6 and "No space left" in done.stderr, done
        (box.home / "filler").unlink()
        live.until(lambda: box.nexus("add", "true").returncode == 0, "it to go on by itself")
        box.await_service()
        assert (box.home / "state.json").exists() and len((box.home / "token").read_text()) > 16


def test_without_its_fifo():
    """Somebody removed it: starts and ends are noticed all the same."""
    with live.Box(gpus=1) as box:
        (box.home / "events").unlink()
        for _ in range(2):
            assert box.wait(box.add("exit 3"), "failed")["exit_code"] == 3


def test_log_folder_removed_under_a_running_job():
    with live.Box(gpus=1) as box:
        job = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done; exit 3"))
        subprocess.run(["rm", "-rf", job["log_dir"]], check=True)
        box.path("go").touch()
        assert box.wait(job["id"], "failed")["exit_code"] == 3
        live.until(lambda: not live.is_alive(job["pid"]), "its job.sh to end")
        box.wait(box.add("true"), "completed")


def test_a_service_whose_home_is_removed_ends():
    """Nothing could be told it any more, and its port would be taken for whoever begins anew."""
    with live.Box(gpus=1, launcher="screen") as box:
        pid, supervisors = box.pid(), box.supervisors()
        subprocess.run(["rm", "-rf", box.home], check=True)
        live.until(lambda: not live.is_alive(pid) and not any(map(live.is_alive, supervisors)), "both to end")
        box.home.mkdir(mode=0o700)
        box.write_config()
        box.start()
        box.wait(box.add("true"), "completed")


def test_stopped_service_delays_no_job():
    """SIGSTOP: runners go on saying things to it, and what they said is heard later."""
    with live.Box(gpus=1) as box:
        jobs = [box.add(f"exit {code}") for code in (0, 3)]
        running = box.wait_started(box.add(f"touch {box.path('on')}; while [ ! -e {box.path('go')} ]; do sleep 0.05; done; exit 4"))
        live.until(lambda: box.path("on").exists())
        pid = box.pid()
        live.kill(pid, number=signal.SIGSTOP)
        box.path("go").touch()
        live.until(lambda: not live.find_commands(f"{box.path('go')}"), "its command's end")     # its runner may wait for another job
        live.kill(pid, number=signal.SIGCONT)
        assert box.wait(running["id"], "failed")["exit_code"] == 4
        assert box.wait(jobs[0], "completed") and box.wait(jobs[1], "failed")["exit_code"] == 3


READ_ONLY = [  # words, exit code, part of stdout, part of stderr
    ([], 0, "Queue: 1 job pending", ""), (["status", "--json"], 0, '"queued_jobs": 1', ""), (["jobs"], 0, "exit 3", ""),
    (["history"], 0, "exit 3", ""), (["queue"], 0, "Read-only file system", ""), (["why", "later"], 0, "Read-only file system", ""),
    (["show", "later"], 0, "echo later", ""), (["logs", "-n", "1", "first"], 0, "hello", ""), (["usage"], 0, "1 of 1 ended", ""),
    (["health"], 1, "BAD  state", ""), (["metrics"], 0, "Total Jobs: 1", ""), (["config"], 0, "port = ", ""),
    (["logs", "service", "-n", "1"], 0, "Service ended", ""), (["token", "list"], 0, "", ""),
    (["add", "true"], 6, "", "nothing can be changed, and no service runs"), (["cancel", "later"], 6, "", "nothing can be changed"),
    (["wait", "later"], 6, "", "nothing can be changed"), (["logs", "-f", "first"], 0, "hello", ""),
    (["open"], 6, "", "nothing can be changed"), (["pause"], 6, "", "nothing can be changed"),
]


def test_what_reads_works_in_a_home_that_takes_no_writes():
    """No service can run there."""
    with live.Box(gpus=2, is_starting=False) as box, small_disk(box.home, "size=50m"):
        box.write_config()
        box.start()
        box.wait(box.add("echo hello; exit 3", name="first"), "failed")
        box.nexus("add", "--begin", "+1h", "--name", "later", "echo later")
        assert box.nexus("stop").returncode == 0
        subprocess.run(["mount", "-o", "remount,ro", box.home], check=True)
        for words, code, out, err in READ_ONLY:
            done = box.nexus(*words)
            assert done.returncode == code and out in done.stdout and err in done.stderr, (words, done)
        subprocess.run(["mount", "-o", "remount,rw", box.home], check=True)
        box.nexus("edit", "later", "--begin", "none")
        box.wait(json.loads(box.nexus("show", "later", "--json").stdout)["id"], "completed")

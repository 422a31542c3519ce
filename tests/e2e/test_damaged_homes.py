"""What becomes of damaged, lost and foreign files of a home."""

import json
import os
import pathlib
import re

import live
import pytest
import shared
from test_survival import hold

import nexus


@pytest.fixture(scope="module")
def service():
    with shared.Service(gpus=4, launcher="direct", cpu_slots=8, kill_grace_seconds=1, is_supervised=False) as made:
        yield made


@pytest.fixture
def box(service):
    with service.lend() as box:
        yield box


def restart(box):
    assert box.nexus("stop").returncode == 0
    box.start()


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


def test_damaged_files(box):
    """What can be made good from what is left; then all of it, and what is added after that is kept."""
    ended = box.add("exit 3")
    box.wait(ended, "failed")
    box.ask("POST", "/service/pause")
    kept = [box.add(f"echo {number}") for number in range(3)]
    restart(box)                                    # a checkpoint, and a state.json.prev
    kept += [box.add(f"echo {number}") for number in range(3, 6)]
    box.kill_service()
    assert (box.home / "state.json.prev").exists() and newest(box)
    damage_all_but_the_last(box)
    box.start()
    jobs = {job["id"]: job for job in box.ask("GET", "/jobs")}
    assert set(jobs) == {ended, *kept} and jobs[ended]["exit_code"] == 3
    assert [job["id"] for job in box.ask("GET", "/queue")] == kept
    box.kill_service()
    damage_all(box)
    box.start()
    box.ask("POST", "/service/pause")               # that too may have been lost
    later = [box.add("true") for _ in range(3)]
    cancelled = later.pop()
    box.ask("DELETE", f"/queue/{cancelled}")
    jobs = {job["id"]: job["status"] for job in box.ask("GET", "/jobs")}
    box.kill_service()
    box.start()
    assert {job["id"]: job["status"] for job in box.ask("GET", "/jobs")} == jobs
    box.ask("POST", "/service/resume")
    for job_id in later:
        box.wait(job_id, "completed")
    assert box.job(cancelled)["status"] == "cancelled"


def test_state_of_a_newer_nexus(box):
    """It is told, and nothing is moved or write_aside."""
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


def test_a_job_that_cannot_be_understood_is_kept_and_told(box):
    box.ask("POST", "/service/pause")
    bad, good = box.add("echo bad"), box.add("echo good")
    restart(box)
    assert box.nexus("stop").returncode == 0
    for path in [*box.home.glob("*.broken-*"), *box.home.glob("*.damaged-*")]:         # of the test before
        path.unlink()
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


def begin_journal(box):
    """Have what comes now be in the journal: there is no checkpoint before the service ends."""
    box.kill_service()
    box.start()


def flip_last(path, word, changed):
    """Change a bit of a word in the last line that has it."""
    lines = path.read_text().splitlines(keepends=True)
    at = max(number for number, line in enumerate(lines) if word in line)
    lines[at] = changed.join(lines[at].rsplit(word, 1))
    path.write_text("".join(lines))


def test_a_flipped_bit_runs_nothing_again_and_is_told_until_it_is_resumed(box):
    """Of the last records of a job that runs and of one that has ended."""
    begin_journal(box)
    health = box.path("health")
    ended = box.add(f"echo ended >> {box.path('runs')}", env={"TOKEN": "hunter2"})
    box.wait(ended, "completed")
    running = box.add(f"echo running >> {box.path('runs')}; {hold(box)}")
    live.until(lambda: "running" in live.read(box.path("runs")), "it to begin")
    live.until(lambda: box.job(running)["pid"], "its pid to be known")
    box.kill_service()
    for job_id in (ended, running):
        flip_last(box.home / "journal.jsonl", f'"id":"{job_id}"', f'"ie":"{job_id}"')
    box.write_config(on_unhealthy=f'echo "$NEXUS_HEALTH $NEXUS_HEALTH_REASON" >> {health}')
    box.start()
    later = box.add(f"echo later >> {box.path('runs')}")
    for is_first in (True, False):
        status, health_now = box.status(), box.health()
        assert status["is_paused"] and any("the queue is paused" in hint and "change" in hint for hint in status["hints"])
        assert not health_now["is_healthy"] and "damage" in status["bad_checks"]
        assert "nexus resume" in box.job(later)["waiting_for"] and "damaged" in box.job(later)["waiting_for"]
        for words in (box.nexus().stdout, box.nexus("health").stdout, box.log(), json.dumps(status)):
            assert "paused" in words and "hunter2" not in words
        assert box.ask("GET", "/status?after=0")["hints"]
        if is_first:
            live.until(lambda: live.read(health).startswith("UNHEALTHY"), "on_unhealthy")
            box.kill_service()                                 # it lasts
            box.start()
    box.path("go").touch()
    box.wait(running, "completed")
    assert box.job(ended)["status"] == "completed" and box.job(later)["status"] == "pending"
    assert box.nexus("resume").returncode == 0
    box.wait(later, "completed")
    assert sorted(live.read(box.path("runs")).split()) == ["ended", "later", "running"]
    assert "damage" not in box.status()["bad_checks"] and not box.status()["is_paused"]
    box.kill_service()
    box.start()
    assert not box.status()["is_paused"]


def test_a_job_whose_start_is_lost_does_not_start_again(box):
    """The journal ends before it, as if its last writes had never been: the job is held, and runs once."""
    begin_journal(box)
    job_id = box.add(f"echo $NEXUS_JOB_ID >> {box.path('runs')}; until [ -e {box.path('go')} ]; do sleep 0.1; done")
    live.until(lambda: live.read(box.path("runs")), "it to begin")
    box.kill_service()
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


def test_the_pause_ends_by_an_edit_while_the_service_is_down(box):
    box.ask("POST", "/service/pause")
    kept = box.add("true")
    restart(box)
    box.kill_service()
    path = box.home / "state.json"
    path.write_text(path.read_text().replace('"status":"pending"', '"status":"qending"'))
    box.start()
    assert box.status()["is_paused"] and "damage" in box.status()["bad_checks"]
    box.kill_service()
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "paused": False}, indent=2))
    box.start()
    assert not box.status()["is_paused"] and "damage" not in box.status()["bad_checks"]
    box.wait(kept, "completed")


def test_two_damages_in_turn_lose_nothing(box):
    """state.json and its .prev are two files from the first start on, and after each recovery."""
    state, former = box.home / "state.json", box.home / "state.json.prev"
    assert not state.samefile(former)
    box.ask("POST", "/service/pause")
    ids = [box.add("true") for _ in range(6)]
    box.kill_service()
    os.truncate(state, 50)
    box.start()
    assert not state.samefile(former)
    ids.append(box.add("true"))
    box.kill_service()
    with open(state, "r+b") as file:
        file.write(os.urandom(500))
    box.start()
    assert [job["id"] for job in box.ask("GET", "/queue")] == ids and box.status()["is_paused"]
    box.ask("POST", "/service/resume")
    for job_id in ids:
        box.wait(job_id, "completed")
    assert not state.samefile(former)


def test_a_damaged_last_line_is_told(box):
    box.ask("POST", "/service/pause")
    ids = [box.add(f"echo {number}") for number in range(3)]
    box.kill_service()
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
    with live.Box(gpus=0, cpu_slots=4, is_starting=False, is_supervised=False) as box:
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

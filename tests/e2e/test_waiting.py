"""Runners that wait for a job: the same as others, whatever is killed, and gone when there is nothing to do."""

import collections
import fcntl
import os
import random
import signal
import time

import live
import pytest

import nexus

GPU = {"index": 0, "uuid": "GPU-11111111-0000-0000-0000-000000000000", "name": "A100"}


def waiting_runners(box):
    """The pids of those of a box; of those that have been given a job as well."""
    return live.find_commands(f"{box.home}/cache/runner.sh")


def claim_of(job):
    return live.read(f"{job['log_dir']}/attempt-{job['attempt']}").splitlines()


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_jobs_are_run_as_by_others(launcher):
    with live.Box(gpus=1, launcher=launcher) as box:
        command = "echo $NEXUS_JOB_ID $NEXUS_GPU_ID; env | sort >&2; sleep 0.06; exit"
        jobs = [box.add(f"{command} {code}", env={"OWN": "a b"}) for code in range(12)]
        over = [box.wait(job) for job in jobs]
        waited = [job for job in over if "waiting" in claim_of(job)[0]]
        assert len(waited) > 3, [claim_of(job) for job in over]
        assert [job["exit_code"] for job in over] == list(range(12))
        environments = []
        for job in over:
            assert live.read(f"{job['log_dir']}/stdout.log") == f"{job['id']} 0\n"
            lines = live.read(f"{job['log_dir']}/stderr.log").splitlines()
            environments.append({line for line in lines if not line.startswith("NEXUS_JOB_")})
        assert all(environment == environments[0] for environment in environments) and "OWN=a b" in environments[0]
        long = box.wait_started(box.add("sleep 600"))
        assert "waiting" in claim_of(long)[0] and box.job(long["id"])["runtime_seconds"] < 30
        if launcher == "screen":
            live.until(lambda: f"{long['session']}\t" in box.nexus("screens").stdout.replace(" ", "\t"), "the session to have its name")
        live.until(lambda: len(waiting_runners(box)) == (2 if launcher == "screen" else 1), "the others to be gone when nothing is started")
        box.ask("DELETE", f"/jobs/{long['id']}")
        box.wait(long["id"], "cancelled")
        live.until(lambda: not waiting_runners(box), "its runner to be gone")


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_one_runner_runs_many_short_jobs_and_nothing_of_one_is_the_next_ones(launcher, tmp_path):
    with live.Box(gpus=[GPU], launcher=launcher) as box:
        folders = [tmp_path / str(number) for number in range(3)]
        for folder in folders:
            folder.mkdir()
        look = "pwd; umask; echo $A-$B-$OLDPWD-$HOME; ls /proc/$$/fd; cd /; umask 0; export A=9"
        jobs = [box.add(look, cwd=str(folders[number % 3]), umask=number % 2 * 0o77, env={"AB"[number % 2]: str(number)})
                for number in range(12)]
        runners = collections.Counter()
        for number, job in enumerate(map(box.wait, jobs)):
            assert job["exit_code"] == 0, (job["cause"], job["cause_line"], job["log_dir"], live.read(f"{job['log_dir']}/stderr.log"))
            said = live.read(f"{job['log_dir']}/stdout.log").split("\n")
            values = f"{number}--" if number % 2 == 0 else f"-{number}-"
            assert said[:2] == [str(folders[number % 3]), ("0000", "0077")[number % 2]] and said[2].startswith(values + "-"), said
            assert set(said[3:-1]) <= {"0", "1", "2", "3", "9", "255"}, "no pipe of the runner's"
            runners[claim_of(job)[0]] += "waiting" in claim_of(job)[0]
        assert max(runners.values()) > 1, runners
        live.until(lambda: not any(map(live.read, (box.folder / "leases").iterdir())), "leases of those that wait to name no GPU")


def test_a_runner_whose_job_left_something_behind_gets_no_other():
    with live.Box(gpus=1, launcher="direct") as box:
        jobs = [box.wait(box.add("setsid sleep 600 > /dev/null 2>&1 &")) for _ in range(6)]
        claims = [claim_of(job)[0] for job in jobs]
        assert len(set(claims)) == 6 and any("waiting" in claim for claim in claims), claims


def count_runs(file):
    return collections.Counter(live.read(file).split())


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_a_service_that_is_killed_takes_those_along_that_have_no_job(launcher):
    with live.Box(gpus=[GPU], launcher=launcher) as box:
        ran = box.folder / "ran"
        jobs = box.ask("POST", "/queue", [{"command": f"echo $NEXUS_JOB_ID >> {ran}; sleep 0.05"} for _ in range(60)], key="all-of-them")
        ids = [job["id"] for job in jobs] if isinstance(jobs, list) else jobs["ids"]
        for _ in range(2):
            before = len(count_runs(ran))
            live.until(lambda before=before: len(count_runs(ran)) > before + 6, "jobs to run", interval_s=0.003)
            box.kill_service()
        for job_id in ids:
            assert box.wait(job_id)["status"] == "completed"
        assert count_runs(ran) == dict.fromkeys(ids, 1), "each once"
        live.until(lambda: not waiting_runners(box), "all to be gone")
        live.until(lambda: os.listdir(box.folder / "leases") == ["lock"], "their leases to be gone")


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_runners_that_are_killed_start_nothing_twice_and_lose_nothing_that_waits(launcher):
    with live.Box(gpus=2, launcher=launcher) as box:
        ran, chance = box.folder / "ran", random.Random(7)
        jobs = [box.add(f"echo $NEXUS_JOB_ID >> {ran}; sleep 0.05") for _ in range(50)]
        while any(job["status"] == "pending" for job in box.ask("GET", "/jobs?limit=1000")):
            for pid in waiting_runners(box):
                if chance.random() < 0.2:
                    live.kill(pid, number=chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)))
        over, runs = [box.wait(job_id) for job_id in jobs], count_runs(ran)
        for job in over:                                # the command's own shell has the same name before it becomes that
            is_killed = job["cause"] in ("session-lost", "signal") and runs[job["id"]] <= 1
            assert is_killed or (job["status"], runs[job["id"]]) == ("completed", 1), job
        live.until(lambda: not waiting_runners(box), "all to be gone")


def test_a_runner_whose_lease_was_removed_is_given_no_job():
    with live.Box(gpus=[GPU]) as box:
        for job in [box.add("sleep 0.05") for _ in range(4)]:
            box.wait(job)
        for path in (box.folder / "leases").iterdir():
            if path.name != "lock":
                path.unlink()
        assert box.wait(box.add("true"))["attempt"] == 1


def test_a_lease_that_is_not_taken_leaves_no_descriptor_open(tmp_path, monkeypatch):
    leases = nexus.Leases(str(tmp_path / "leases"), "0-aaaaaaaa")
    make = leases.make

    def make_and_lock(key):
        make(key)
        fcntl.flock(lock, fcntl.LOCK_EX)
    with leases.locked():
        lock = os.open(tmp_path / "leases" / "lock", os.O_RDONLY)
    monkeypatch.setattr(leases, "make", make_and_lock)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(nexus.NexusError, match="keeps"):
        leases.take("abc", [GPU["uuid"]])
    assert len(os.listdir("/proc/self/fd")) == len(before) and not leases.held
    os.close(lock)


def test_the_time_that_a_runner_waited_is_not_its_jobs_after_a_restart():
    with live.Box(gpus=1) as box:
        for job in [box.add("sleep 0.05") for _ in range(4)]:
            box.wait(job)
        time.sleep(3.5)
        job = box.wait_started(box.add("sleep 4", timeout_seconds=5))
        assert "waiting" in claim_of(job)[0]
        time.sleep(1)
        box.kill_service()
        assert box.wait(job["id"])["status"] == "completed"

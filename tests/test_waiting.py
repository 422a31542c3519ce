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

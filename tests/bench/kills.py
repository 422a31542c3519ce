#!/usr/bin/env python3
"""Kill a service, its runners and screens again and again, and see that no job notices.

    python3 tests/bench/kills.py --kills 1000 --seed 7          as root; about a second for each kill

Jobs of no GPU, of halves and of whole ones come all the time, in groups, with retries, after others.  Each attempt writes
its begin and its end into one file, the ledger.  At random moments SIGKILL takes the service, runners, screens, or several
of them at once; now and then the disk of ~/.nexus is full for some seconds, and the killing goes on.  At the end each job
that was accepted must be there and over, no attempt may have run twice, each exit code must be the one in the ledger, no
GPU may have been given twice, and nothing of the jobs may be left: no process, no lease.  Exit code 1, and the folder is
kept, if it is otherwise.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP), str(TOP / "tests" / "support")]
import live  # noqa: E402

GPUS = 4
MOST_WAITING = 30                       # jobs are added while fewer wait
DISK_MB = 2048                          # of ~/.nexus
KILLS_BETWEEN_FULL = 25                 # the disk is full once in so many kills
# What is killed at once, and how often of a hundred times
VICTIMS = {"service": 35, "runner": 25, "screen": 10, "service runner": 12, "service screen runner": 8, "service service": 10}
FINAL = ("completed", "failed", "cancelled")
# id, pid of job.sh, nonce, begin or end, GPUs or exit code, time; $n counts the attempts of this job that have begun
COMMAND = """say() {{ echo "$NEXUS_JOB_ID $PPID $NEXUS_JOB_NONCE $1 ${{2:--}} $EPOCHREALTIME" >> {ledger}; }}
say begin "$NEXUS_GPU_ID"; n=$(grep -c "^$NEXUS_JOB_ID .* begin" {ledger})
echo "attempt $n"; sleep {seconds}
code={code}; [ $n -gt {failures} ] || code=9
say end $code; exit $code"""


class Jobs:
    """Adds jobs in a thread, each until it is acknowledged."""

    def __init__(self, box: live.Box, chance: random.Random) -> None:
        self.box, self.chance = box, chance
        self.ledger = box.path("ledger")
        self.ledger.touch()
        self.accepted: dict[str, dict[str, Any]] = {}       # {id: what was asked for}
        self.refused = 0                                    # answers that the disk is full
        self.error = ""
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def make(self) -> dict[str, Any]:
        chance, job = self.chance, dict[str, Any]()
        job["gpus"] = chance.choice([0, 0, 0.5, 0.5, 1, 1, 2])
        job["retries"] = chance.choice([0, 0, 1, 2])
        if chance.random() < 0.3:
            job["group"] = f"group-{chance.randrange(5)}"
        recent = list(self.accepted)[-20:]
        if recent and chance.random() < 0.3:
            job[chance.choice(["after", "after_any"])] = chance.sample(recent, min(len(recent), chance.randint(1, 3)))
        job["command"] = COMMAND.format(ledger=self.ledger, seconds=round(chance.random() * 1.5, 2), failures=chance.choice([0, 0, 0, 1]),
                                        code=chance.choice([0, 0, 0, 3, 77]))
        return job

    def run(self) -> None:
        number = 0
        while not self.is_over.is_set():
            number += 1
            job = self.make()
            while not self.is_over.is_set():
                try:
                    if self.box.call("GET", "/status", timeout_s=20)[1]["queued_jobs"] < MOST_WAITING:
                        status, answer = self.box.call("POST", "/queue", job, key=f"kills-{number:08d}", timeout_s=20)
                        if status == 200:
                            self.accepted[answer["id"]] = job
                            break
                        if status != 503:
                            self.error = f"POST /queue: {status} {answer}"
                            return
                        self.refused += 1
                except (live.Lost, TypeError, KeyError):    # it was killed meanwhile; 503 while it starts
                    pass
                time.sleep(0.05)
            time.sleep(0.02)


class Killer:
    """Kills, fills the disk and empties it."""

    def __init__(self, box: live.Box, chance: random.Random) -> None:
        self.box, self.chance = box, chance
        self.counts: collections.Counter[str] = collections.Counter()
        self.runners: set[tuple[str, int]] = set()          # (job, pid of the runner) that was killed
        self.away_s: list[float] = []                       # from a kill of the service to its next answer
        self.full_times = 0

    def find_running(self) -> list[dict[str, Any]]:
        with contextlib.suppress(live.Lost):
            status, jobs = self.box.call("GET", "/jobs?status=running&fields=id,pid,session", timeout_s=20)
            if status == 200:                               # a pid that is somebody else's by now is left alone
                return [job for job in jobs if job["pid"] and f"/job_{job['id']}/" in live.read(f"/proc/{job['pid']}/cmdline")]
        return []

    def kill(self) -> None:
        """One kill of one or several at once."""
        words = self.chance.choices(list(VICTIMS), list(VICTIMS.values()))[0].split()
        jobs = self.find_running() if {"runner", "screen"} & {*words} else []
        job = self.chance.choice(jobs) if jobs else None
        pids = []
        if job and "screen" in words and job["session"]:
            pids.append(int(job["session"].partition(".")[0]))
        if job and "runner" in words:
            self.runners.add((job["id"], job["pid"]))
            pids.append(job["pid"])
        service = self.box.pid() if "service" in words else None
        if service:
            pids.append(service)
        if not pids:
            return
        live.kill(*pids)
        self.counts[" and ".join(dict.fromkeys(words)) + (" as it starts" if words.count("service") > 1 else "")] += 1
        if service:
            self.await_service(service, words.count("service") > 1)

    def await_service(self, killed: int, again: bool) -> None:
        """Until it answers; `again`: it is killed once more while it starts."""
        began, starts = time.monotonic(), []
        if self.chance.random() < 0.9:                  # somebody types a command; else the supervisor, which waits longer each time
            starts.append(self.start())
        if again:
            live.until(lambda: self.box.pid() not in (None, killed) or time.monotonic() - began > 5)
            time.sleep(self.chance.random() * 0.3)
            if (pid := self.box.pid()) not in (None, killed):
                live.kill(pid)
                starts.append(self.start())
        self.box.await_service(120)
        self.away_s.append(time.monotonic() - began)
        for start in starts:
            start.wait(120)

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.box.argv("start"), env=self.box.environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL, cwd="/")

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.box.home], check=True)

    @contextlib.contextmanager
    def full_disk(self) -> Any:
        """No further page can be written in ~/.nexus meanwhile."""
        disk = os.statvfs(self.box.home)
        self.full_times += 1
        with contextlib.suppress(subprocess.CalledProcessError):        # what is in use has just grown
            self.resize(str((disk.f_blocks - disk.f_bfree) * disk.f_frsize + 8192))
        try:
            yield
        finally:
            self.resize(f"{DISK_MB}m")

    def run(self, kills: int) -> None:
        fill_at = KILLS_BETWEEN_FULL // 2
        while (count := self.counts.total()) < kills:
            time.sleep(self.chance.random() * 0.6)          # the moment is the point
            if count >= fill_at:
                fill_at += KILLS_BETWEEN_FULL
                with self.full_disk():
                    for _ in range(3):
                        time.sleep(self.chance.random())
                        self.kill_while_full()
                self.await_service(0, False)
            self.kill()
            if count // 10 < self.counts.total() // 10:
                print(f"{self.counts.total()} of {kills} kills", file=sys.stderr, flush=True)

    def kill_while_full(self) -> None:
        """The service, or a runner; the service need not come back before there is room."""
        jobs = self.find_running()
        if jobs and self.chance.random() < 0.5:
            job = self.chance.choice(jobs)
            self.runners.add((job["id"], job["pid"]))
            live.kill(job["pid"])
            self.counts["runner, the disk full"] += 1
        elif pid := self.box.pid():
            live.kill(pid)
            self.counts["service, the disk full"] += 1


class Verdict:
    """What is wrong with what became of the jobs."""

    def __init__(self, box: live.Box, jobs: Jobs, killer: Killer) -> None:
        self.box, self.asked, self.killer = box, jobs.accepted, killer
        self.faults: list[str] = []
        self.about: set[str] = set()                        # the jobs that faults are about
        self.runs: dict[str, dict[str, dict[str, Any]]] = {}            # {job: {nonce: its begin and end}}
        for line in jobs.ledger.read_text().splitlines():
            job_id, pid, nonce, verb, fact, at = line.split()
            run = self.runs.setdefault(job_id, {}).setdefault(nonce, {"pid": int(pid)})
            if verb in run:
                self.blame(job_id, f"the attempt of {nonce} has two lines '{verb}'")
            run[verb], run[f"{verb}_at"] = fact, float(at)

    def blame(self, job_id: str, words: str) -> None:
        self.faults.append(f"{job_id}: {words}")
        self.about.add(job_id)

    def check(self) -> None:
        found = {job["id"]: job for job in self.box.ask("GET", "/jobs")}
        self.found = found
        for job_id in self.asked.keys() - found.keys():
            self.blame(job_id, "it was accepted, and is lost")
        for job_id in found.keys() - self.asked.keys():
            self.blame(job_id, "nobody was told of it")         # its key was sent until it was acknowledged
        for job_id in self.asked.keys() & found.keys():
            self.check_job(found[job_id], self.asked[job_id])
        self.check_gpus()
        self.check_rest()

    def check_job(self, job: dict[str, Any], asked: dict[str, Any]) -> None:
        job_id, all_runs = job["id"], self.runs.get(job["id"], {}).values()
        orphans = [run for run in all_runs if run["pid"] == 1]      # its runner was killed before the command could see its pid
        runs = {run["pid"]: run for run in all_runs if run["pid"] != 1}
        if len(runs) + len(orphans) != len(all_runs):
            self.blame(job_id, "two attempts had one runner")
        attempts = [each for each in job["attempts"] if each["started_at"] is not None]
        # On a full disk job.sh cannot begin with its attempt: the next one is no retry.
        attempts = [each for each in attempts[:-1] if (each["cause"], each["pid"]) != ("launch", None)] + attempts[-1:]
        for attempt in attempts:
            run = runs.pop(attempt["pid"], None)
            if run is None and orphans and (job_id, attempt["pid"]) in self.killer.runners:
                run = orphans.pop(0)
            self.check_attempt(job_id, attempt, run)
        for run in [*runs.values(), *orphans]:
            self.blame(job_id, f"an attempt ran that is not among its attempts: {run}")
        tried = [each for each in attempts if each["cause"] != "requeued"]
        parents = [self.found.get(parent, {}) for parent in asked.get("after", [])]
        if job["status"] == "cancelled":
            if job["cause"] != "dependency" or all(parent.get("status") == "completed" for parent in parents):
                self.blame(job_id, f"it was cancelled for {job['cause']}, and its parents {[parent.get('status') for parent in parents]}")
        elif job["status"] not in FINAL:
            self.blame(job_id, f"it is {job['status']}: {job['waiting_for']}")
        elif (job["status"] == "completed") != (job["exit_code"] == 0):
            self.blame(job_id, f"it is {job['status']} with exit code {job['exit_code']}")
        elif job["status"] == "failed" and len(tried) != asked["retries"] + 1:
            self.blame(job_id, f"it failed after {len(tried)} attempts, with {asked['retries']} retries")
        if job["status"] != "cancelled" and any(parent.get("status") != "completed" for parent in parents):
            self.blame(job_id, f"it is {job['status']}, and came after what did not complete")
        began = min((run["begin_at"] for run in self.runs.get(job_id, {}).values()), default=None)
        for parent_id in [*asked.get("after", []), *asked.get("after_any", [])]:
            ended = max((run.get("end_at", 0.0) for run in self.runs.get(parent_id, {}).values()), default=0.0)
            if began is not None and began < ended:
                self.blame(job_id, f"it began before the end of {parent_id}, after which it comes")

    def check_attempt(self, job_id: str, attempt: dict[str, Any], run: dict[str, Any] | None) -> None:
        """An exit code is the one of the ledger; there is none where the runner was killed before it could say it."""
        code, was_killed = attempt["exit_code"], (job_id, attempt["pid"]) in self.killer.runners
        wanted = run.get("end") if run else None
        words = f"attempt {attempt['attempt']} (pid {attempt['pid']}): {attempt['cause']}, exit code {code}; in the ledger {run}"
        if code is not None and str(code) != wanted:
            self.blame(job_id, f"a wrong code; {words}")
        if code is None and attempt["cause"] == "session-lost" and not was_killed:
            self.blame(job_id, f"its runner was not killed; {words}")
        if code is None and attempt["cause"] not in ("session-lost", "requeued"):
            self.blame(job_id, f"no code; {words}")

    def check_gpus(self) -> None:
        """Of attempts that have begun and ended, no two had more than one GPU of a GPU at one time."""
        spans = collections.defaultdict(list)
        for job_id, runs in self.runs.items():
            for run in runs.values():
                if "begin" in run and "end" in run and run["begin"] != "-" and job_id in self.asked:
                    for gpu in run["begin"].split(","):
                        spans[gpu].append((run["begin_at"], run["end_at"], min(1, self.asked[job_id]["gpus"]), job_id))
        for gpu, taken in spans.items():
            for began, _, _, job_id in taken:
                beside = [(share, other) for start, end, share, other in taken if start <= began < end]
                if sum(share for share, _ in beside) > 1:
                    self.blame(job_id, f"GPU {gpu} was {' and '.join(other for _, other in beside)}'s at one time")

    def check_rest(self) -> None:
        """No process, session, lease or GPU is a job's any more."""
        def left() -> list[int]:
            return [pid for pid in live.find_processes(f"{self.box.folder}/", ["environ"])
                    if b"NEXUS_JOB_ID=" in live.read_bytes(f"/proc/{pid}/environ")]
        with contextlib.suppress(AssertionError):
            live.until(lambda: not left(), timeout_s=30)
        self.faults += [f"a process of a job is left: {pid} {live.read(f'/proc/{pid}/cmdline')!r}" for pid in left()]
        for file in self.box.path("leases").iterdir():
            with open(file) as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    self.faults.append(f"the lease {file} is held")
        self.faults += [f"GPU {gpu['index']} has {gpu['job_ids']}" for gpu in self.box.status()["gpu_status"] if gpu["job_ids"]]
        self.faults += [line for line in self.box.log().splitlines() if "Internal error" in line or "Traceback" in line]

    def describe(self, job_id: str) -> str:
        """What is needed to look into it."""
        folder = self.box.home / "logs" / f"job_{job_id}"
        files = [f"{path.name}: {live.read(path)[:200]!r}" for path in sorted(folder.glob("[arf]*-*"))] if folder.is_dir() else []
        lines = [line for line in self.box.log().splitlines() if job_id in line.split() or f"{job_id}:" in line.split()]
        ledger = [f"{nonce} {run}" for nonce, run in self.runs.get(job_id, {}).items()]
        whole = [json.dumps(each.get(job_id)) for each in (self.asked, self.found)]
        return "\n    ".join([f"---- {job_id}", *whole, *ledger, *files, *lines])


def run(kills: int, seed: int, launcher: str) -> int:
    live.need_root()
    chance, began = random.Random(seed), time.monotonic()
    box = live.Box(gpus=[{}] * GPUS, launcher=launcher, is_starting=False)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,nr_inodes=0,mode=0700", "nexus-kills", box.home], check=True)
    box.write_config(history_limit=1000000, cpu_slots=4, kill_grace_seconds=1, retry_backoff_seconds=0.2, guard_failures=0,
                     guard_seconds=0)                     # no group is held because its jobs fail soon: here they are killed
    box.start()
    jobs, killer, error = Jobs(box, random.Random(seed + 1)), Killer(box, chance), ""
    try:
        killer.run(kills)
        box.await_service(120)
        jobs.is_over.set()
        jobs.thread.join(60)
        live.until(lambda: not box.ask("GET", "/jobs?status=pending,running&limit=1"), "the last jobs", 300)
    except AssertionError as failure:
        jobs.is_over.set()
        error = f"it came to no end: {failure}"
    verdict = Verdict(box, jobs, killer)
    verdict.faults += filter(None, [error, jobs.error])
    with contextlib.suppress(AssertionError):
        verdict.check()
    attempts = [each for job in getattr(verdict, "found", {}).values() for each in job["attempts"]]
    causes = collections.Counter(each["cause"] or "completed" for each in attempts)
    away = sorted(killer.away_s) or [0.0]
    rows = [("seed, launcher, minutes", f"{seed}, {launcher}, {(time.monotonic() - began) / 60:.1f}"), ("SIGKILLs", killer.counts.total()),
            *((f"    of {what}", count) for what, count in sorted(killer.counts.items())),
            ("the disk was full", f"{killer.full_times} times, {jobs.refused} refusals"),
            ("the service was away", f"median {away[len(away) // 2]:.1f} s, most {away[-1]:.1f} s"),
            ("jobs accepted", len(jobs.accepted)), ("attempts that began", sum(map(len, verdict.runs.values()))),
            *((f"    {cause}", count) for cause, count in sorted(causes.items())), ("faults", len(verdict.faults))]
    print("\n".join(f"{what:<40} {found}" for what, found in rows), flush=True)
    if not verdict.faults:
        box.close()
        return 0
    print("\n".join([*verdict.faults[:50], *map(verdict.describe, sorted(verdict.about)[:10])]))
    kept = Path(f"{box.folder}-kept")                       # the disk goes with the box
    subprocess.run(["cp", "-a", "--one-file-system", f"{box.home}/.", kept], check=False)
    subprocess.run(["cp", jobs.ledger, kept], check=False)
    print(f"kept: {kept}")
    box.close()
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--launcher", choices=["screen", "direct"], default="screen")
    given = parser.parse_args()
    sys.exit(run(given.kills, given.seed, given.launcher))

#!/usr/bin/env python3
"""How users with services of their own share one box: python3 tests/bench/fair.py [COMMIT...], as root.

Each case is played with this nexus.py, and with that of each commit: real services of several uids, jobs that sleep, and
a made-up nvidia-smi.  It says what share of the GPUs' time each user had while several wanted them, how long the last
user waited for a first start, and which part of that time no GPU was in use.
"""
from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
FIRST_UID = 64001
SMI = """#!/bin/sh
case $* in *compute-apps*) exit;; esac
i=0
while [ $i -lt {gpus} ]; do echo "$i, GPU-bench-$i, NVIDIA H100, 81559, 0, 0, 30, 70.00, 700.00, [N/A], Default"; i=$((i + 1)); done
"""
# name: GPUs, then for each user: when it begins, how many jobs, of how many seconds, with how many GPUs
CASES: dict[str, tuple[int, list[tuple[float, int, float, int]]]] = {
    "1 GPU: bob's 64 of 1 s, then ann's one": (1, [(0, 64, 1.0, 1), (5, 1, 1.0, 1)]),
    "4 GPUs: bob's 200 of 1 s, then ann's one of 4 GPUs": (4, [(0, 200, 1.0, 1), (5, 1, 1.0, 4)]),
    "1 GPU, 2 users: 0.5 and 2 s": (1, [(0, 400, 0.5, 1), (0, 400, 2.0, 1)]),
    "2 GPUs, 3 users: 0.5, 1 and 2 s": (2, [(0, 400, 0.5, 1), (0, 400, 1.0, 1), (0, 400, 2.0, 1)]),
    "4 GPUs, 4 users: 1 s, one has jobs of 2 GPUs": (4, [(0, 400, 1.0, 1), (0, 400, 1.0, 1), (0, 400, 1.0, 1), (0, 400, 1.0, 2)]),
}
PLAYED_S = 30.0


class Player:
    """A user with a service of its own."""

    def __init__(self, folder: Path, number: int, program: Path) -> None:
        self.uid, self.program, self.home = FIRST_UID + number, program, folder / f"home{number}"
        self.home.mkdir()
        (self.home / "config.toml").write_text(
            f'[service]\nport = {20000 + 8 * (os.getpid() % 2000) + number}\nrefresh_rate_seconds = 1\n'
            f'[gpu]\nlease_dir = "{folder}/leases"\n'
            '[jobs]\nlauncher = "direct"\nreserve_after_seconds = 1\n')
        self.environ = {**os.environ, "NEXUS_HOME": str(self.home), "HOME": str(self.home), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        self.environ.pop("NEXUS_MOCK_GPUS", None)
        for path in (self.home, self.home / "config.toml"):
            os.chown(path, self.uid, self.uid)

    def command(self, *words: str) -> None:
        subprocess.run(["/usr/bin/python3", str(self.program), *words], env=self.environ, check=True, capture_output=True,
                       user=self.uid, group=self.uid, extra_groups=[], cwd=self.home)

    def add(self, count: int, seconds: float, gpus: int, stamps: Path) -> None:
        command = (f"echo {self.uid} begin $NEXUS_JOB_ID $NEXUS_GPU_ID $(date +%s.%N) >> {stamps}; sleep {seconds}; "
                   f"echo {self.uid} end $NEXUS_JOB_ID $NEXUS_GPU_ID $(date +%s.%N) >> {stamps}")
        self.command("add", "--gpus", str(gpus), *(["--sweep", f"n=1..{count}", f"true {{n}}; {command}"] if count > 1 else [command]))


@contextlib.contextmanager
def make_players(program: Path, gpus: int, count: int) -> Iterator[tuple[Path, list[Player]]]:
    folder = Path(tempfile.mkdtemp(prefix="nexus-fair-"))
    folder.chmod(0o755)
    (folder / "bin").mkdir()
    (folder / "leases").mkdir()
    (folder / "leases").chmod(0o1777)
    (folder / "bin/nvidia-smi").write_text(SMI.format(gpus=gpus))
    (folder / "bin/nvidia-smi").chmod(0o755)
    (folder / "stamps").touch()
    (folder / "stamps").chmod(0o666)
    shutil.copy(program, folder / "nexus.py")
    (folder / "nexus.py").chmod(0o755)
    players = [Player(folder, number, folder / "nexus.py") for number in range(count)]
    try:
        for player in players:
            player.command("start")
        yield folder, players
    finally:
        for player in players:
            with contextlib.suppress(subprocess.CalledProcessError):
                player.command("cancel", "--status", "pending", "--status", "running")
            with contextlib.suppress(subprocess.CalledProcessError):
                player.command("stop")
        shutil.rmtree(folder, ignore_errors=True)


def play(program: Path, gpus: int, users: list[tuple[float, int, float, int]]) -> str:
    with make_players(program, gpus, len(users)) as (folder, players):
        began, added = time.time(), {}
        for player, (at, count, seconds, wanted) in sorted(zip(players, users), key=lambda pair: pair[1][0]):
            time.sleep(max(0.0, began + at - time.time()))
            added[player.uid] = time.time()
            player.add(count, seconds, wanted, folder / "stamps")
        time.sleep(PLAYED_S)
        ended = time.time()
        stamps = (folder / "stamps").read_text().splitlines()
    spans: dict[str, list[Any]] = {}
    for line in stamps:
        uid, verb, job, places, at = line.split()
        if verb == "begin":
            spans[uid + job] = [int(uid), places.count(",") + 1, float(at), ended]
        else:
            spans[uid + job][3] = float(at)
    begin = max(added.values()) + 2
    had = dict.fromkeys(added, 0.0)
    for uid, count, since, until in spans.values():
        had[uid] += count * max(0.0, min(until, ended) - max(since, begin))
    total = sum(had.values())
    last = max(added, key=lambda uid: added[uid])
    first = min((since for uid, _, since, _ in spans.values() if uid == last), default=None)
    wait = "never" if first is None else f"{first - added[last]:.1f} s"
    shares = " ".join(f"{100 * seconds / total:.0f}%" for seconds in had.values())
    return f"shares {shares:<18} last user's first start {wait:<8} idle {100 * (1 - total / gpus / (ended - begin)):.0f}%"


def main(commits: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        programs = {"now": TOP / "nexus.py"}
        for commit in commits:
            programs[commit] = Path(folder) / f"{commit}.py"
            shown = subprocess.run(["git", "-C", str(TOP), "show", f"{commit}:nexus.py"], check=True, capture_output=True)
            programs[commit].write_bytes(shown.stdout)
        for name, (gpus, users) in CASES.items():
            for label, program in programs.items():
                print(f"{name:<52} {label:<8} {play(program, gpus, users)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

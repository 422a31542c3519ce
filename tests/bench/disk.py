#!/usr/bin/env python3
"""Every bit, and thousands of other damages, of a small home; run by hand: python3 tests/bench/disk.py [SEED [MUTATIONS]]

Prints what was not noticed.  The exit code is 1 then.
"""
from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP), str(TOP / "tests/support")]
import damage  # noqa: E402

FILES = (  # the file that is damaged, those that are missing besides
    ("state.json", ()), ("journal.jsonl", ()), ("state.json", ("state.json.prev", "journal.jsonl.prev")),
    ("state.json.prev", ("state.json",)), ("journal.jsonl.prev", ("state.json",)))


def list_damages(content: bytes, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    for bit in range(len(content) * 8):
        yield f"bit {bit % 8} of byte {bit // 8}", damage.flip(content, bit)
    source = random.Random(seed)
    for _ in range(count):
        yield damage.mutate(content, source)


def main(seed: int = 0, count: int = 2000) -> int:
    failures = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        home = damage.Home(f"{folder}/home")
        for name, missing in FILES:
            began, tried, bad = time.monotonic(), 0, 0
            for words, content in list_damages((home.folder / name).read_bytes(), seed, count):
                fault = home.find_fault(name, content, f"{folder}/copy", missing)
                tried += 1
                if fault:
                    bad += 1
                    print(f"{name}: {words}: {fault}", flush=True)
            alone = f", without {', '.join(missing)}" if missing else ""
            print(f"{name}{alone}: {tried} damages, {bad} unnoticed, {time.monotonic() - began:.0f} s", flush=True)
            failures += bad
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

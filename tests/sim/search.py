"""Looks for histories that fail, in one process, for as long as it is told."""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
FOUND = FOLDER / "found"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/sim/run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to look (default: 1)")
    parser.add_argument("--seed", type=int, help="only this history, with each of its steps")
    parser.add_argument("--file", help="only the history in this file, as they stand in tests/sim/found")
    parser.add_argument("--from", type=int, default=1, dest="first", help="the first seed (default: 1)")
    parser.add_argument("--fault", help="put this fault in by hand first: see faults.py")
    parser.add_argument("--keep", action="store_true", help="go on after a failure; keep each in tests/sim/found")
    options = parser.parse_args(argv)
    if options.fault:
        from faults import put_in
        put_in(options.fault)
    import history
    if options.seed is not None or options.file:
        seed, steps = read_history(Path(options.file)) if options.file else (options.seed, history.make_steps(options.seed))
        outcome = history.run_history(seed, steps, print)
        print(outcome.traceback, outcome.words or "all holds")
        return bool(outcome.words)
    began, seed, failures = time.monotonic(), options.first, 0
    while time.monotonic() - began < 60 * options.minutes:
        steps = history.make_steps(seed)
        outcome = history.run_history(seed, steps)
        if outcome.words:
            failures += 1
            tell_failure(seed, steps[:outcome.at], outcome, options.keep)
            if not options.keep:
                return 1
        seed += 1
    count, minutes = seed - options.first, (time.monotonic() - began) / 60
    print(f"{count} histories in {minutes:.1f} minutes: {count / minutes:.0f} a minute; {failures} failed")
    return bool(failures)


def read_history(path: Path) -> tuple[int, list[tuple[str, int]]]:
    body = json.loads(path.read_text())
    return body["seed"], [(name, number) for name, number in body["steps"]]


def tell_failure(seed: int, steps: Sequence[tuple[str, int]], outcome: object, is_kept: bool) -> None:
    """Print the seed and the shortest history that still fails, and keep that."""
    import history
    words = outcome.words                       # type: ignore[attr-defined]
    print(f"\nseed {seed} fails: {words}\n{outcome.traceback}", flush=True)     # type: ignore[attr-defined]
    shortest = history.shorten(seed, steps, words)
    print("the shortest history found that still fails:")
    again = history.run_history(seed, shortest, print)
    print(again.words, flush=True)
    path = (FOUND if is_kept else Path("/tmp")) / f"seed-{seed}.json"
    path.write_text(json.dumps({"seed": seed, "failed": words[:300], "steps": shortest}, indent=None) + "\n")
    print(f"kept as {path}: tests/sim/run --file {path}", flush=True)
    sys.stdout.flush()

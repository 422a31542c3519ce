"""Looks for histories that fail, in one process, for as long as it is told."""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FOUND = FOLDER / "found"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/sim/run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to look (default: 1)")
    parser.add_argument("--seed", type=int, help="only this history, with each of its steps")
    parser.add_argument("--file", help="only the history in this file, as they stand in tests/sim/found")
    parser.add_argument("--from", type=int, default=int(time.time()), dest="first",
                        help="the first seed (default: one that nobody has had)")
    parser.add_argument("--fault", help="put this fault in by hand first: see faults.py")
    parser.add_argument("--turns", action="store_true", help="histories of several users on one box: see boxes.py")
    parser.add_argument("--keep", action="store_true", help="go on after a failure; keep each in tests/sim/found")
    options = parser.parse_args(argv)
    if options.fault:
        from faults import put_in
        put_in(options.fault)
    if options.turns:
        return look_at_turns(options)
    import history
    if options.seed is not None or options.file:
        seed = options.seed or 0
        setup = history.Setup(seed)
        steps = history.make_steps(setup)
        if options.file:
            setup, steps = read_history(Path(options.file))
        outcome = history.run_history(setup, steps, print)
        print(outcome.traceback, outcome.words or "all holds")
        return bool(outcome.words)
    print(f"from seed {options.first} on", flush=True)
    began, seed, failures = time.monotonic(), options.first, 0
    while time.monotonic() - began < 60 * options.minutes:
        setup = history.Setup(seed)
        steps = history.make_steps(setup)
        outcome = history.run_history(setup, steps)
        if outcome.words:
            failures += 1
            tell_failure(setup, steps[:outcome.at], outcome, options.keep)
            if not options.keep:
                return 1
        seed += 1
    count, minutes = seed - options.first, (time.monotonic() - began) / 60
    print(f"{count} histories in {minutes:.1f} minutes: {count / minutes:.0f} a minute; {failures} failed")
    return bool(failures)


def look_at_turns(options: argparse.Namespace) -> int:
    """Histories of several users on one box, until one fails."""
    import boxes
    began, seed = time.monotonic(), options.first if options.seed is None else options.seed
    first = seed
    while seed == first or (options.seed is None and time.monotonic() - began < 60 * options.minutes):
        outcome = boxes.run_box(boxes.Setup(seed), print if options.seed is not None else None)
        if outcome.words:
            print(f"seed {seed} fails: {outcome.words}\n{outcome.traceback}", flush=True)
            return 1
        seed += 1
    print(f"{seed - first} histories from seed {first} on: all holds")
    return 0


def read_history(path: Path) -> tuple[Any, list[tuple[str, int]]]:
    """(the setup, the steps) of a history that was kept."""
    import history
    body = json.loads(path.read_text())
    return history.Setup.read(body["setup"]), [(name, number) for name, number in body["steps"]]


def tell_failure(setup: Any, steps: Sequence[tuple[str, int]], outcome: Any, is_kept: bool) -> None:
    """Print the seed and the shortest history that still fails, and keep that."""
    import history
    words, seed = outcome.words, setup.seed
    print(f"\nseed {seed} fails: {words}\n{outcome.traceback}", flush=True)
    shortest = history.shorten(setup, steps, words)
    print("the shortest history found that still fails:")
    again = history.run_history(setup, shortest, print)
    print(again.words, flush=True)
    path = (FOUND if is_kept else Path("/tmp")) / f"seed-{seed}.json"
    path.write_text(json.dumps({"failed": words[:300], "setup": vars(setup), "steps": shortest}) + "\n")
    print(f"kept as {path}: tests/sim/run --file {path}", flush=True)
    sys.stdout.flush()

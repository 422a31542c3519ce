#!/usr/bin/env python3
"""Mutants: small faults that are put into src, to see whether a check notices each; run by hand.

    python3 tests/bench/mutate --folder schedule            300 mutants of src/schedule
    python3 tests/bench/mutate --room values/changes --count 50 --seed 2
    python3 tests/bench/mutate --folder schedule --resume   go on where it was interrupted
    python3 tests/bench/mutate --folder schedule --alive    once more those that lived
    python3 tests/bench/mutate --only values/changes:05346fc0       this one, with what the tests print
    python3 tests/bench/mutate --folder schedule --table    only the table of what is known

mutmut's operators make them: another comparison, `or` for `and`, a number more, a branch always or never taken,
None for what is assigned, a default for what is given, a word with XX around it; and what is done only for its
effect (a call, a yield, a raise) is left out.  Not changed are annotations, imports, decorators, docstrings,
`__slots__`, what is under TYPE_CHECKING, logging, hints, examples, texts with a blank, functions describe_...(), and
arguments without a name: that would change only words or nothing, or fail wherever it is run.  The sample follows
from the seed.  No line has a second mutant in it before each has its first.

Each is put into its room, as build.py joins it, in a fork of one warm process.  First come the unit tests that run
the line, those of its room first, until one fails; which those are is measured once for each file of tests.  Then
come ten seconds of histories, of turns for the rooms of turns.  What takes too long counts as noticed.
equivalent.txt has those that no check can notice: the room, the lines that go and come, and why.  Results are lines
of JSON, in build/mutate: the latest of a mutant counts.
"""
from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TOP = FOLDER.parents[2]
RESULTS = TOP / "build/mutate"
VENV = TOP / ".venv/mutate"
ROOMS = {  # folder: its rooms; None for all.  Of hosting and service, those that decide, not those that talk to others.
    "values": None,
    "schedule": None,
    "hosting": "termination hosted_job job_host loop node_protocol slurm node_news pool",
    "service": (
        "outcomes starter access selection dependencies queue_limits script_rules validation transactions admission "
        "editing cancellation gpu_watch housekeeping health job_lists estimates groups turn_taking"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/bench/mutate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = sorted(path.name for path in (TOP / "tests/unit").iterdir() if path.is_dir())
    parser.add_argument("--folder", choices=ROOMS, action="append", help="of src (default: all)")
    parser.add_argument("--room", action="append", help="only this one, like schedule/plan")
    parser.add_argument("--count", type=int, default=300, help="how many mutants of each folder (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: 1)")
    parser.add_argument("--only", metavar="ID", action="append", help="this mutant, whatever the sample")
    parser.add_argument("--resume", action="store_true", help="not those that have a result")
    parser.add_argument("--alive", action="store_true", help="only those whose result is that they live")
    parser.add_argument("--tests", choices=folders, action="append", help="unit tests of this folder (default: all)")
    parser.add_argument("--quick", type=float, metavar="SECONDS", help="no unit test that takes longer")
    parser.add_argument("--histories", type=float, default=10.0, metavar="SECONDS",
                        help="of CPU; 0: unit tests alone (default: 10)")
    parser.add_argument("--measure", action="store_true", help="measure anew which tests run which lines")
    parser.add_argument("--table", action="store_true", help="try none, print what is known")
    options = parser.parse_args()
    enter_venv()
    sys.path[:0] = [str(FOLDER), str(TOP)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = choose_mutants(options)
    results = read_results()
    if not options.table:
        try_mutants(chosen, results, options)
    print_table(chosen, results)
    return 0


def enter_venv() -> None:
    """Go on in an environment that has what tests and mutants need, which is made if it is missing."""
    if Path(sys.prefix) == VENV:
        return
    wanted = [TOP / "tests/requirements.txt", FOLDER / "requirements.txt"]
    stamp, text = VENV / "installed", "".join(path.read_text() for path in wanted)
    if not stamp.exists() or stamp.read_text() != text:
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        words = [word for path in wanted for word in ("-r", path)]
        subprocess.run([VENV / "bin/python", "-m", "pip", "install", "-q", *words], check=True)
        stamp.write_text(text)
    os.execv(VENV / "bin/python", [str(VENV / "bin/python"), str(FOLDER), *sys.argv[1:]])


def choose_mutants(options: argparse.Namespace) -> list[Any]:
    import mutants

    import build
    if options.only:
        rooms = dict.fromkeys(name.split(":")[0] for name in options.only)
        return [mutant for room in rooms for mutant in mutants.list_mutants(room) if mutant.id in options.only]
    chosen = []
    for folder, names in ROOMS.items():
        rooms = [f"{folder}/{name}" for name in (names or build.FOLDERS[folder]).split()]
        rooms = [room for room in rooms if room in (options.room or rooms)]
        if options.room or folder in (options.folder or ROOMS):
            chosen += mutants.choose(rooms, options.seed, options.count)
    return chosen


def read_results() -> dict[str, Any]:
    """{id of a mutant: its latest result}."""
    found = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["id"]] = row
    return found


def read_equivalent() -> dict[tuple[str, str], str]:
    """{(room, its diff): why no check can notice it}: a paragraph each."""
    found = {}
    for paragraph in (FOLDER / "equivalent.txt").read_text().split("\n\n"):
        lines = [line for line in paragraph.split("\n") if line and not line.startswith("#")]
        if lines:
            diff = [line for line in lines[1:] if line[:2] in ("- ", "+ ")]
            found[lines[0], "\n".join(diff)] = " ".join(line for line in lines[1:] if line not in diff)
    return found


def try_mutants(chosen: list[Any], results: dict[str, Any], options: argparse.Namespace) -> None:
    import joined as joining
    import lines
    import pytest
    import session as sessions
    import trials
    joined, equivalent = joining.Joined(), read_equivalent()
    trials.warm_up(joined)
    known = lines.Lines(joined, RESULTS / "lines.json")
    known.measure(options.measure, options.tests or ["."])
    joining.install(joined.codes)

    def work(session: sessions.Session) -> None:
        os.nice(10)
        if options.histories:
            importlib.import_module("history")
            words, _ = trials.fork(lambda: session.ask_histories(None, False, options.histories), 120)
            if words != "":
                pytest.exit(f"histories fail without any mutant: {words or 'they take too long'}")
        for number, mutant in enumerate(chosen, 1):
            former = results.get(mutant.id, {}).get("end")
            is_known = (mutant.room, "\n".join(mutant.diff)) in equivalent or (options.resume and former)
            if not options.only and (is_known or (options.alive and former != "alive")):
                continue
            log = RESULTS / "log" if options.only else Path(os.devnull)
            tests = {name: took_s for name, took_s in known.choose_tests(mutant).items()
                     if took_s <= (options.quick or took_s)}
            result = {"id": mutant.id, "line": mutant.first, "diff": mutant.diff, **session.judge(
                mutant, tests, known.is_used_early(mutant), options.histories, str(log))}
            results[mutant.id] = result
            with open(RESULTS / "results.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{number} of {len(chosen)}: {format_result(result)}", flush=True)
            if options.only:
                print(*mutant.diff, log.read_text(), sep="\n")

    trials.run_pytest(["-s", *known.files], sessions.Session(joined, work))


def format_result(result: dict[str, Any]) -> str:
    return f"{result['id']} line {result['line']}: {result['end']} ({result['cpu_s']} s) {result['by']}"


def print_table(chosen: list[Any], results: dict[str, Any]) -> None:
    """A row for each room, and each survivor with its place and its lines."""
    equivalent = read_equivalent()
    rows: dict[str, dict[str, int]] = {}
    alive = []
    for mutant in chosen:
        end = results.get(mutant.id, {}).get("end", "not tried")
        if (mutant.room, "\n".join(mutant.diff)) in equivalent:
            end = "equivalent"
        for name in (mutant.room, f"{mutant.room.split('/')[0]}, all"):
            row = rows.setdefault(name, {})
            row[end] = row.get(end, 0) + 1
        if end == "alive":
            alive.append(mutant)
    for mutant in alive:
        print(f"\nsrc/{mutant.room}.py:{mutant.first}  {mutant.id}", *mutant.diff, sep="\n  ")
    ends = ("unit", "histories", "alive", "equivalent", "not tried")
    print(f"\n{'room':28}{'mutants':>10}", *(f"{end:>{len(end) + 2}}" for end in (*ends, "noticed")))
    for name, row in rows.items():
        unit, histories, lives = (row.get(end, 0) for end in ends[:3])
        noticed = f"{(unit + histories) / (unit + histories + lives):.0%}" if unit + histories + lives else "-"
        counts = [f"{row.get(end, 0):{len(end) + 2}}" for end in ends]
        print(f"{name:28}{sum(row.values()):10}", *counts, f"{noticed:>9}")


if __name__ == "__main__":
    sys.exit(main())

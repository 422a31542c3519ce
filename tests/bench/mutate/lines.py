"""Which unit tests run which lines of nexus.py: measured once for each file of tests, and kept."""
from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest
from joined import NEXUS, Joined, install
from mutants import TOP, Mutant
from trials import fork, get_function, run_pytest

IMPORT = "import nexus"
UNIT = TOP / "tests/unit"
NOT_ASKED = ("test_layout.py", "test_build.py", "test_numbers.py", "test_promises.py")     # they read src and docs


class Recorder:
    """Records which lines of nexus.py each test function runs, and how long it takes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.times = measured, dict[str, float]()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        self.measured.switch_context(collector.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        name, began = get_function(item), time.process_time()
        self.measured.switch_context(name)
        try:
            return (yield)
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.process_time() - began


class Lines:
    """What was measured."""

    def __init__(self, joined: Joined, path: Path) -> None:
        self.joined, self.path = joined, path
        self.files: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.keys = make_keys(joined)

    def measure(self, is_anew: bool, folders: Sequence[str]) -> None:
        """Measure the files of tests that are new or were changed, or all.  Exits when one of their tests fails."""
        present = [path for folder in folders for path in sorted((UNIT / folder).rglob("test_*.py"))
                   if path.name not in NOT_ASKED]
        chosen = {}
        for path in present:
            name, sha = path.relative_to(TOP).as_posix(), hashlib.sha1(path.read_bytes()).hexdigest()
            if is_anew or self.files.get(name, {}).get("sha") != sha:
                self.files[name] = {"sha": sha, **self.ask(name)}
                self.path.write_text(json.dumps(self.files))
            chosen[name] = self.files[name]
        self.files = chosen

    def ask(self, name: str) -> dict[str, Any]:
        """What a file of tests runs, measured in a child."""
        aside, log = self.path.with_suffix(".new"), self.path.with_suffix(".log")
        aside.unlink(missing_ok=True)
        fork(lambda: self.measure_file(name, aside), 1200.0, str(log))
        if not aside.exists():
            sys.exit(f"{name} fails without any mutant: see {log}")
        found: dict[str, Any] = json.loads(aside.read_text())
        print(f"{name}: {len(found['times'])} tests, {sum(found['times'].values()):.1f} s", flush=True)
        return found

    def measure_file(self, name: str, aside: Path) -> None:
        measured = coverage.Coverage(data_file=None, config_file=False, include=[str(NEXUS)])
        measured.start()
        measured.switch_context(IMPORT)
        install(self.joined.codes)
        recorder = Recorder(measured)
        code = run_pytest([name], recorder)
        measured.stop()
        if code:
            return
        names, lines = list(recorder.times), dict[str, list[int]]()
        found = measured.get_data().contexts_by_lineno(str(NEXUS))
        for line, contexts in found.items():
            if line in self.keys:               # what runs while the file is imported is a part of all its tests
                lines[self.keys[line]] = [number for number, test in enumerate(names) if {test, name} & {*contexts}]
        early = [self.keys[line] for line, contexts in found.items() if IMPORT in contexts and line in self.keys]
        aside.write_text(json.dumps({"times": recorder.times, "lines": lines, "early": early}))

    def is_used_early(self, mutant: Mutant) -> bool:
        """Whether what it changes runs while nexus is imported."""
        keys = {self.keys[line] for line in find_lines(self.joined, mutant)}
        return not keys or any(not keys.isdisjoint(file["early"]) for file in self.files.values())

    def choose_tests(self, mutant: Mutant) -> dict[str, float]:
        """{test function: its seconds} of those that run what a mutant changes: its room's first, then quick ones."""
        own = f"tests/unit/{os.path.dirname(mutant.room)}/test_{os.path.basename(mutant.room)}.py"
        keys = {self.keys[line] for line in find_lines(self.joined, mutant)}
        times = {name: took_s for file in self.files.values() for name, took_s in file["times"].items()}
        found = set[str]()
        for file in self.files.values():
            names = list(file["times"])
            found |= {names[number] for key in keys & file["lines"].keys() for number in file["lines"][key]}
        if not is_in_function(mutant) or self.is_used_early(mutant):    # tables are used where no name of a row stands
            found |= {name for name in times if name.startswith(f"{os.path.dirname(own)}/")}
        return {name: times[name] for name in sorted(
            found or times, key=lambda name: (not name.startswith(own), times[name]))}


def make_keys(joined: Joined) -> dict[int, str]:
    """{line of nexus.py: a name for it that is the same when others are added above it}."""
    counts: dict[tuple[str, str], int] = {}
    keys = {}
    for line, (path, _) in joined.rooms.items():
        text = joined.lines[line - 1].strip()
        counts[path, text] = counts.get((path, text), 0) + 1
        keys[line] = hashlib.sha1(f"{path} {text} {counts[path, text]}".encode()).hexdigest()[:12]
    return keys


def find_lines(joined: Joined, mutant: Mutant) -> set[int]:
    """The lines of nexus.py whose run shows what a mutant changes; none: any may.

    In a function they are those of the statement.  A default is used where its function runs, and what stands outside
    of functions where its name stands in one.
    """
    path = f"src/{mutant.room}.py"
    tree = ast.parse((TOP / path).read_text(encoding="utf-8"))
    node, function = find_statement(tree, mutant.first), None
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef) and each.lineno <= mutant.first <= (each.end_lineno or 0):
            function = each
    if function and mutant.first < function.body[0].lineno:
        numbers: Iterable[int] = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
    elif function:
        body = getattr(node, "body", None)
        numbers = range(node.lineno, max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0) + 1)
    else:
        names = {each.id for target in getattr(node, "targets", [getattr(node, "target", node)])
                 for each in ast.walk(target) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        pattern = re.compile("^ .*(" + ("|".join(rf"\b{name}\b" for name in names) or "$^") + ")")
        return {line for line in joined.rooms if pattern.search(joined.lines[line - 1])}
    return {joined.find_line(mutant.room, number) for number in numbers if (path, number) in joined.places}


def is_in_function(mutant: Mutant) -> bool:
    tree = ast.parse((TOP / f"src/{mutant.room}.py").read_text(encoding="utf-8"))
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    return any(each.lineno <= mutant.first <= (each.end_lineno or 0) for each in functions)


def find_statement(tree: ast.Module, line: int) -> ast.stmt:
    """The innermost statement of a line."""
    around = [node for node in ast.walk(tree)
              if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))

"""Who notices a mutant: the unit tests that run its lines, then histories.  Each works in a fork of a warm process."""
from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from joined import Joined, exchange, install
from mutants import TOP, Mutant
from trials import fork, get_function, run_pytest

TURNS = ("schedule/turns", "service/turn_taking")       # rooms that only histories of several users of a box run
SPARE_S = 30.0                  # of CPU: what a trial may take besides, before it counts as endless


class Picked:
    """Runs the chosen tests in their order, and keeps the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.ranks, self.failed = {name: rank for rank, name in enumerate(tests)}, ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if get_function(item) in self.ranks),
                          key=lambda item: self.ranks[get_function(item)])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} cannot be imported"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


class Session:
    """One session of pytest that has collected all tests, and runs chosen ones in its forks."""

    def __init__(self, joined: Joined, work: Callable[[Session], None]) -> None:
        self.joined, self.work, self.failed = joined, work, ""
        self.items: dict[str, list[pytest.Item]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self.items.setdefault(get_function(item), []).append(item)
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def run(self, tests: Sequence[str]) -> str:
        """The first test that fails, in a child."""
        items = [item for name in tests for item in self.items.get(name, ())]
        for item, following in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                break
        return self.failed

    def ask_unit(self, mutant: Mutant, tests: Sequence[str], is_used_early: bool) -> str:
        """The first test that fails, in a child; "" when none does."""
        if not is_used_early and exchange(self.joined, mutant):
            return self.run(tests)
        forget_modules()
        install(self.joined.put_in(mutant))
        picked = Picked(tests)
        code = run_pytest(["-x", *dict.fromkeys(name.split("::")[0] for name in tests)], picked)
        return picked.failed or ("" if code in (0, 5) else f"pytest ends with {code}")

    def ask_histories(self, mutant: Mutant | None, is_used_early: bool, cpu_s: float) -> str:
        """What does not hold in one of the first histories, in a child; "" when all does.  `cpu_s`: so long."""
        if is_used_early or (mutant and not exchange(self.joined, mutant)):
            forget_modules()
            install(self.joined.put_in(mutant))
        began, seed = time.process_time(), 0
        while time.process_time() - began < cpu_s:
            seed += 1
            if mutant and mutant.room in TURNS:
                boxes = importlib.import_module("boxes")
                outcome = boxes.run_box(boxes.Setup(seed))
            else:
                history = importlib.import_module("history")
                setup = history.Setup(seed)
                outcome = history.run_history(setup, history.make_steps(setup))
            if outcome.words:
                return f"seed {seed}: {outcome.words}"[:400]
        print(f"{seed} histories")
        return ""

    def judge(self, mutant: Mutant, tests: Mapping[str, float], is_used_early: bool, histories_s: float,
              log: str = os.devnull) -> dict[str, Any]:
        """How a mutant ends: `end` is unit, histories, or alive; `by` says what noticed it."""
        steps: list[tuple[str, Callable[[], str], float]] = []
        if tests:
            steps.append(("unit", lambda: self.ask_unit(mutant, list(tests), is_used_early), sum(tests.values())))
        if histories_s:
            steps.append(("histories", lambda: self.ask_histories(mutant, is_used_early, histories_s), histories_s))
        spent = 0.0
        for end, work, most in steps:
            by, cpu_s = fork(work, SPARE_S + 2 * most, log)
            spent += cpu_s
            if by != "":
                return {"end": end, "by": by or "it takes too long, or dies", "cpu_s": round(spent, 1)}
        return {"end": "alive", "by": "", "cpu_s": round(spent, 1)}


def forget_modules() -> None:
    """Have what belongs to the tests, and nexus itself, imported anew."""
    ours = str(TOP / "tests/bench")
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(f"{TOP}/") and not path.startswith((ours, f"{TOP}/.venv", str(TOP / "build.py"))):
            del sys.modules[name]

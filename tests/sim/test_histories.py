"""Histories with known seeds, and all that ever failed.  New ones are looked for by tests/sim/run."""

import pathlib

import history
import pytest
import search

FOUND = sorted((pathlib.Path(__file__).parent / "found").glob("*.json"))
SEEDS = [range(first, first + 25) for first in range(1, 301, 25)]


@pytest.mark.parametrize("seeds", SEEDS, ids=[f"{seeds[0]}-{seeds[-1]}" for seeds in SEEDS])
def test_what_nexus_promises_holds_in_each_history(seeds):
    failed = {}
    for seed in seeds:
        outcome = history.run_history(history.Setup(seed), history.make_steps(seed))
        if outcome.words:
            failed[seed] = f"{outcome.words}\n{outcome.traceback}"
    assert not failed, "tests/sim/run --from SEED finds the shortest history that fails so"


@pytest.mark.parametrize("path", FOUND, ids=[path.stem for path in FOUND])
def test_what_once_failed_does_not_fail_again(path):
    outcome = history.run_history(*search.read_history(path))
    assert not outcome.words, outcome.traceback


def test_a_history_is_the_same_each_time():
    told = [[], []]
    for lines in told:
        history.run_history(history.Setup(7), history.make_steps(7), lines.append)
    assert told[0] == told[1] and len(told[0]) > history.STEPS

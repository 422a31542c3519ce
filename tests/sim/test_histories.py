"""Histories with known seeds, and all that ever failed.  New ones are looked for by tests/sim/run."""

import logging
import pathlib
import random

import actions
import history
import pytest
import samples
import search
from world import Host, SimProcess, World

import nexus

FOUND = sorted((pathlib.Path(__file__).parent / "found").glob("*.json"))
SEEDS = [range(first, first + 10) for first in range(1, 301 if samples.is_whole else 101, 10)]


@pytest.mark.parametrize("seeds", SEEDS, ids=[f"{seeds[0]}-{seeds[-1]}" for seeds in SEEDS])
def test_what_nexus_promises_holds_in_each_history(seeds):
    failed = {}
    for seed in seeds:
        setup = history.Setup(seed)
        outcome = history.run_history(setup, history.make_steps(setup))
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
        setup = history.Setup(7)
        history.run_history(setup, history.make_steps(setup), lines.append)
    assert told[0] == told[1] and len(told[0]) > actions.STEPS


@pytest.mark.parametrize("seeds", SEEDS[:4], ids=[f"{seeds[0]}-{seeds[-1]}" for seeds in SEEDS[:4]])
def test_a_power_cut_takes_nothing_of_a_journal_that_was_synced_and_is_no_damage(seeds):
    """Whatever the disk keeps of the rest, and in which order; also what a killed service has left unsynced."""
    taken = 0
    for seed in seeds:
        rnd = random.Random(seed)
        host = Host(World(seed), "gpu1", 0)
        SimProcess(host, "shell").disk.makedirs("/home")
        host.files.root.sync()
        layout, synced, last, is_cut = nexus.make_layout("/home", nexus.Config()), 0, 0, False
        for _ in range(12):
            store = nexus.Store(layout, nexus.Clock(), SimProcess(host, "nexus").disk, logging.Logger("sim", logging.CRITICAL))
            store.recover()
            assert not store.state.damage and synced <= store.state.seq <= last, f"seed {seed}: {store.state.damage}"
            taken += is_cut and store.state.seq < last
            for _ in range(rnd.randrange(6)):
                is_synced, change = rnd.random() < 0.3, nexus.Put("seen", f"{rnd.randrange(2**64):016x}", 1)
                store.update(lambda _, change=change: [change], is_synced=is_synced)
                synced = store.state.seq if is_synced else synced
            last, is_cut = store.state.seq, rnd.random() < 0.7
            if rnd.random() < 0.1:
                store.save_checkpoint()
            store.disk.process.end(137)
            if is_cut:
                host.files.cut_power(rnd)
                synced = min(synced, last)
    assert taken

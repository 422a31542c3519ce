"""Histories of several users on one box, with known seeds.  New ones are looked for by tests/sim/run --turns."""

import boxes
import pytest
import samples


@pytest.mark.parametrize("seed", samples.choose(range(1, 101), 12))
def test_users_take_turns(seed):
    outcome = boxes.run_box(boxes.Setup(seed))
    assert not outcome.words, f"{outcome.traceback}tests/sim/run --turns --seed {seed} shows it"

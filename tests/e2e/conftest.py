"""Tests use the stages of other tests: test_conda.Conda, test_runner.box.  Homes of users at the command line."""

import pathlib
import sys

import live
import pytest
from console import Home

sys.path.insert(0, str(pathlib.Path(__file__).parent))

HOME = {"cpu_slots": 20, "kill_grace_seconds": 1, "retry_backoff_seconds": 0.1}


@pytest.fixture(scope="module")
def shared_home():
    with Home(is_quick=True, **HOME) as made:
        yield made


@pytest.fixture
def home(shared_home):
    """The tests of a module have it one after another: there are no jobs but the test's."""
    before = shared_home.status()["state_version"]
    yield shared_home
    if shared_home.status()["state_version"] != before:
        live.clear_jobs(shared_home)


@pytest.fixture
def fresh_home():
    """Nothing was ever there."""
    with Home(is_quick=True, **HOME) as made:
        yield made


@pytest.fixture
def bare_home():
    """Nothing runs yet."""
    with Home(**HOME) as made:
        yield made

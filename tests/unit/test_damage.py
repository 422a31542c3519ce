"""What a disk does to state.json and the journal is noticed, or changes nothing."""

import random

import damage
import pytest


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return damage.Home(tmp_path_factory.mktemp("damage") / "home")


FILES = [  # reason, the file that is damaged, those that are missing besides
    ("state.json", "state.json", ()), ("the journal", "journal.jsonl", ()),
    ("state.json, and nothing is older", "state.json", ("state.json.prev", "journal.jsonl.prev")),
    ("state.json.prev, and nothing is newer", "state.json.prev", ("state.json",)),
    ("the journal before", "journal.jsonl.prev", ("state.json",)),
]


@pytest.mark.parametrize("reason, name, missing", FILES, ids=[case[0] for case in FILES])
def test_what_is_damaged_is_noticed_or_changes_nothing(home, tmp_path, reason, name, missing):
    """No job that has begun starts again, and no value of an environment is told, whatever happens."""
    content, source = (home.folder / name).read_bytes(), random.Random(reason)
    assert home.find_fault(name, content, tmp_path / "copy", missing) == "", "nothing is damaged"
    for _ in range(100):
        words, damaged = damage.mutate(content, source)
        fault = home.find_fault(name, damaged, tmp_path / "copy", missing)
        assert not fault, f"{words}: {fault}"

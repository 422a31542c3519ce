"""What of a job follows from its fields."""

import pytest
from makers import job

import nexus

SHARES = [  # GPUs, whether alone, hundredths of each
    (0, False, []), (1, False, [100]), (3, False, [100, 100, 100]), (0.5, False, [50]), (0.01, False, [1]),
    (1.5, False, [100, 50]), (2.25, False, [100, 100, 25]), (0.29, False, [29]), (1.15, False, [100, 15]),
    (0.5, True, [100]), (1.5, True, [100, 100]), (2, True, [100, 100]), (0, True, []),
]


@pytest.mark.parametrize("gpus, exclusive, shares", SHARES)
def test_list_shares(gpus, exclusive, shares):
    assert nexus.list_shares(job(gpus=gpus, exclusive=exclusive)) == shares


MARKS = {"asked", "kept", "public", "live", "live_in_slurm", "for_gpus", "form", "hidden", "repeats"}       # of docs/design.md
OTHERS = set(vars(nexus.Field(nexus.LINE))) | {name for name in vars(nexus.Field) if not name.startswith("_")}


@pytest.mark.parametrize("name", nexus.JOB_FIELDS)
def test_a_row_says_only_what_rows_may_say(name):
    assert MARKS <= OTHERS and set(vars(nexus.JOB_FIELDS[name])) <= OTHERS

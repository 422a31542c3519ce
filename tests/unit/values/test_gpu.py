"""Which GPUs a place means; the means of their readings."""

import pytest
from makers import MINUTE, gpu, means, mig_slice

import nexus

MEANT = [  # what is named, the places of this machine, which is called head, those that are meant
    ("0", ["0", "1"], ["0"]), ("0", ["0.0", "0.1", "1"], ["0.0", "0.1"]), ("0.1", ["0.0", "0.1"], ["0.1"]),
    ("head:0", ["0", "n1:0"], ["0"]), ("n1:0", ["0", "n1:0", "n1.x:0"], ["n1:0"]), ("1", ["10", "0.1"], None),
    ("n1.2:0", ["n1.2:0.1", "n1:0"], ["n1.2:0.1"]), ("n2:0", ["0"], None)]


@pytest.mark.parametrize("wanted, places, meant", MEANT)
def test_which_gpus_a_place_means(wanted, places, meant):
    if meant is None:
        with pytest.raises(nexus.NexusError, match=f"there is no GPU {wanted}"):
            nexus.find_places(wanted, places, "head")
    else:
        assert nexus.find_places(wanted, places, "head") == meant


TYPES = [  # what --gpu-type asks for, a GPU, whether it is that
    (None, gpu(), True), (None, mig_slice(), True), ("full", gpu(), True), ("Full", mig_slice(), False), ("rtx 30", gpu(), True),
    ("H100", gpu(), False), ("a100", mig_slice(), True), ("1g.10gb", mig_slice(), True), ("1g.10gb", mig_slice(gb=20), False)]


@pytest.mark.parametrize("wanted, one, expected", TYPES)
def test_which_gpus_are_of_a_type(wanted, one, expected):
    assert one.is_type(wanted) is expected


@pytest.mark.parametrize("one, places, expected", [
    (gpu(1), (1,), True), (gpu(1), ("0", "1"), True), (gpu(1), ("1.0", 0, "10"), False), (gpu(1), (), False),
    (mig_slice(1), ("0.1",), True), (mig_slice(1), (0,), True), (mig_slice(1), ("0.0", 1), False)])
def test_which_gpus_are_named(one, places, expected):
    """A card's number means all its slices."""
    assert one.is_named(places) is expected


COMBINED = [  # reason, parts, the mean of all their readings
    ("each reading counts as one", [means(count=3, utilization=10.0), means(utilization=50.0)], means(count=4, utilization=20.0)),
    ("what a part does not know does not count", [means(count=9), means(utilization=50.0)], means(count=10, utilization=50.0)),
    ("what no part knows is unknown", [means(), means(power_watts=3.0)], means(count=2, power_watts=3.0)),
    ("others had it for half of the time", [means(others=100.0), means(others=0.0)], means(count=2, others=50.0)),
]


@pytest.mark.parametrize("reason, parts, expected", COMBINED, ids=[case[0] for case in COMBINED])
def test_means(reason, parts, expected):
    assert nexus.combine_means(MINUTE, parts) == expected

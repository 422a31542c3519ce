"""The records of the history of GPUs."""

import pytest
from makers import means

import nexus

RECORDS = [  # reason, what is written, what is read back; None: the same
    ("all is known", means(count=20, utilization=87.5, memory_used_mib=81559.0, temperature=71.0, power_watts=699.5, others=25.0), None),
    ("nothing is known", means(), None),
    ("a slice tells its memory alone", means(memory_used_mib=4863.0), None),
    ("nothing is not unknown", means(utilization=0.0, memory_used_mib=0.0, temperature=0.0, power_watts=0.0, others=0.0), None),
    ("finer than a record", means(utilization=33.333, power_watts=70.06, temperature=70.4),
     means(utilization=33.3, power_watts=70.1, temperature=70.0)),
    ("more than a record has room for", means(count=10**6, power_watts=1e5, temperature=300.0, memory_used_mib=1e11),
     means(count=65535, power_watts=6553.4, temperature=254.0, memory_used_mib=2.0**32 - 2)),
    ("less than nothing", means(temperature=-3.0), means(temperature=0.0)),
]


@pytest.mark.parametrize("reason, written, read", RECORDS, ids=[case[0] for case in RECORDS])
def test_records(reason, written, read):
    record = nexus.encode_means(written)
    assert len(record) == nexus.RECORD_BYTES <= 20
    assert nexus.decode_means(record) == (read or written)


def test_each_flipped_bit_of_a_record_is_noticed():
    record = nexus.encode_means(means(utilization=50.0))
    for bit in range(8 * len(record)):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        assert nexus.decode_means(bytes(flipped)) is None
    assert nexus.decode_means(bytes(nexus.RECORD_BYTES)) is None and nexus.decode_means(record[:-1]) is None

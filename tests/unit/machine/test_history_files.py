"""The files of the history of GPUs."""

import os

import pytest
from makers import MINUTE, NOW, gpu, means

import nexus

DISK = nexus.Disk()
HEAD = nexus.format_history_head(gpu())


def write(path, *minutes, head=HEAD):
    nexus.write_means(DISK, str(path), head, minutes)


def read(path, ring, begin, end):
    return nexus.read_means(DISK, str(path), ring, begin, end)


def test_a_file_has_a_day_of_minutes_and_a_month_of_ten(tmp_path):
    path = tmp_path / "a"
    write(path, means())
    assert path.stat().st_size == nexus.HISTORY_BYTES and 8 * nexus.HISTORY_BYTES <= 10**6
    assert path.stat().st_blocks * 512 >= nexus.HISTORY_BYTES, "all of its room is taken at once"
    assert nexus.MINUTES.count * nexus.MINUTES.step_s == 86400 and nexus.HISTORY_S == 31 * 86400
    assert nexus.read_history_head(DISK, str(path)) == nexus.HistoryHead("GPU-0", "0", "", "RTX 3090")


STORIES = [  # reason, the minutes that are written (after MINUTE, load), read then in minutes and in tens of them
    ("one after the other", [(0, 10), (1, 20)], {0: 10, 1: 20}, {0: 15}),
    ("what was not read is a gap", [(0, 10), (7, 20)], {0: 10, 7: 20}, {0: 15}),
    ("a restart within a minute", [(0, 10), (0, 30)], {0: 20}, {0: 20}),
    ("a minute over a border", [(9, 10), (10, 20)], {9: 10, 10: 20}, {0: 10, 10: 20}),
    ("the next day takes the place of this one", [(0, 10), (1440, 20)], {1440: 20}, {0: 10, 1440: 20}),
    ("a clock that is set back by a day overwrites nothing", [(1440, 20), (0, 10)], {1440: 20}, {1440: 20}),
    ("nor by a month", [(31 * 1440, 20), (0, 10)], {31 * 1440: 20}, {31 * 1440: 20}),
    ("one that is set back by an hour adds to what is there", [(0, 10), (60, 20), (0, 30)], {0: 20, 60: 20}, {0: 20, 60: 20}),
]
TEN = NOW // 600 * 600


@pytest.mark.parametrize("reason, written, minutes, tens", STORIES, ids=[case[0] for case in STORIES])
def test_what_is_written_is_read(reason, written, minutes, tens, tmp_path):
    for number, load in written:
        write(tmp_path / "a", means(TEN + 60 * number, utilization=float(load)))
    for ring, expected in ((nexus.MINUTES, minutes), (nexus.TENS, tens)):
        found = {}
        for number in {number // 10 * 10 for number, _ in written}:
            begin = TEN + 60 * number
            found |= {(each.at - TEN) / 60: each.utilization for each in read(tmp_path / "a", ring, begin, begin + 599)}
        assert found == expected


def test_all_of_a_ring_is_read_wherever_it_begins(tmp_path):
    count = nexus.MINUTES.count
    write(tmp_path / "a", *[means(MINUTE + 60 * number, utilization=number % 100) for number in range(count)])
    end = MINUTE + 60 * (count - 1)
    found = read(tmp_path / "a", nexus.MINUTES, MINUTE, end)
    assert [each.utilization for each in found] == [number % 100 for number in range(count)]
    assert read(tmp_path / "a", nexus.MINUTES, 0, end) == found, "no more than there are"


def test_a_torn_record_is_a_gap(tmp_path):
    path = tmp_path / "a"
    write(path, *[means(TEN + 60 * number, utilization=50.0) for number in range(3)])
    with path.open("r+b") as file:
        file.seek(nexus.MINUTES.find_at(int(TEN) // 60 + 1) + 7)
        file.write(b"\xff\xff")
    assert [each.at for each in read(path, nexus.MINUTES, TEN, TEN + 180)] == [TEN, TEN + 120]
    write(path, means(TEN + 60, utilization=70.0))
    assert [each.utilization for each in read(path, nexus.MINUTES, TEN, TEN + 180)] == [50, 70, 50]


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\0" * (nexus.HISTORY_BYTES + 1)])
def test_a_file_of_a_wrong_length_is_made_anew(content, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(content)
    assert read(path, nexus.MINUTES, MINUTE, MINUTE) == []
    write(path, means(utilization=50.0))
    assert read(path, nexus.MINUTES, MINUTE, MINUTE) == [means(utilization=50.0)] and os.listdir(tmp_path) == ["a"]


def test_a_card_that_moves_has_its_new_place_in_its_file(tmp_path):
    path, seen = tmp_path / "a", gpu(2, uuid="n1/GPU-0", node="n1", name="é" * 90)
    write(path, means(utilization=50.0))
    write(path, means(MINUTE + 60), head=nexus.format_history_head(seen))
    assert nexus.read_history_head(DISK, str(path)) == nexus.HistoryHead("n1/GPU-0", "n1:2", "n1", "?" * 80)
    assert read(path, nexus.MINUTES, MINUTE, MINUTE) == [means(utilization=50.0)]

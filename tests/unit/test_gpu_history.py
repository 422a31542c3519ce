"""Sections 4 to 9: the history of GPUs: means, records and their files, what ran, and what the picture is made of."""

import os

import pytest
from makers import NOW, finished, foreign, gpu, job, mig_slice, ours, running

import nexus

DISK = nexus.Disk()
MINUTE = NOW // 60 * 60
HEAD = nexus.format_history_head(gpu())


def means(at=MINUTE, count=1, **facts):
    return nexus.GpuMeans(at, count, **facts)


# Readings and means

READINGS = [  # reason, a GPU, the jobs that have it, percent of the time in which others use it
    ("it is free", gpu(), [], 0),
    ("a job of ours has it", gpu(processes=(ours("abc", 8),), memory_used_mib=8192.0), [running()], 0),
    ("a process of somebody else's", gpu(processes=(foreign(),)), [], 100),
    ("beside a job of ours", gpu(processes=(ours("abc", 8), foreign())), [running()], 100),
    ("memory that no listed process accounts for", gpu(memory_used_mib=9000.0), [], 100),
    ("memory of a job whose processes are not told", gpu(memory_used_mib=9000.0), [running()], 0),
    ("another user's nexus has its lease", gpu(lease_holder="bob"), [], 100),
    ("the MPS server, which stays", gpu(processes=(foreign(name="nvidia-cuda-mps-server"),)), [], 0),
    ("a slice", mig_slice(processes=(foreign(),)), [], 100),
]


@pytest.mark.parametrize("reason, seen, jobs, others", READINGS, ids=[case[0] for case in READINGS])
def test_a_reading_tells_whether_others_use_a_gpu(reason, seen, jobs, others):
    reading = nexus.read_gpu(seen, jobs, nexus.GpuConfig(), MINUTE)
    assert reading == means(others=others, **{name: getattr(seen, name) for name in nexus.SERIES[:4]})


COMBINED = [  # reason, parts, the mean of all their readings
    ("each reading counts as one", [means(count=3, utilization=10.0), means(utilization=50.0)], means(count=4, utilization=20.0)),
    ("what a part does not know does not count", [means(count=9), means(utilization=50.0)], means(count=10, utilization=50.0)),
    ("what no part knows is unknown", [means(), means(power_watts=3.0)], means(count=2, power_watts=3.0)),
    ("others had it for half of the time", [means(others=100.0), means(others=0.0)], means(count=2, others=50.0)),
]


@pytest.mark.parametrize("reason, parts, expected", COMBINED, ids=[case[0] for case in COMBINED])
def test_means(reason, parts, expected):
    assert nexus.combine_means(MINUTE, parts) == expected


# Records

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


# Files

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


# What ran

def attempt(number=1, begin=-60, end=0, **facts):
    return nexus.Attempt(**{"number": number, "gpu_uuids": ("GPU-0",), "gpu_indices": (0,), "started_at": NOW + begin,
                            "finished_at": None if end is None else NOW + end, **facts})


RAN = [  # reason, job, (attempt, status, outcome) of what ran
    ("it waits", job(), []),
    ("it runs", running(), [(1, "running", None)]),
    ("it is done", finished(), [(1, "completed", "exit 0")]),
    ("it failed", finished(status="failed", exit_code=1, cause="exit"), [(1, "failed", "exit 1")]),
    ("it never ran", finished(status="cancelled", started_at=None, cause="killed"), []),
    ("it has no GPU", finished(gpu_indices=(), gpu_uuids=()), []),
    ("it was preempted, and waits", job(attempts=(attempt(cause="preempted"),)), [(1, "preempted", "preempted")]),
    ("it was preempted, and runs", job(status="running", attempts=(attempt(cause="preempted"), attempt(2, end=None))),
     [(1, "preempted", "preempted"), (2, "running", None)]),
    ("it went down with its machine, and waits", job(attempts=(attempt(cause="requeued"),)), [(1, "requeued", "requeued")]),
    ("its first attempt failed", job(status="completed", attempts=(attempt(cause="cuda-oom"), attempt(2, exit_code=0))),
     [(1, "failed", "cuda-oom"), (2, "completed", "exit 0")]),
]


@pytest.mark.parametrize("reason, seen, expected", RAN, ids=[case[0] for case in RAN])
def test_each_attempt_is_a_row(reason, seen, expected):
    assert [(ran.attempt, ran.status, ran.outcome) for ran in nexus.list_gpu_runs(seen)] == expected


def test_a_row_has_a_name_to_be_recognized_by():
    assert [ran.name for ran in nexus.list_gpu_runs(finished(name="lr-1"))] == ["lr-1"]
    assert [ran.name for ran in nexus.list_gpu_runs(finished())] == ["python train.py"]


LINES = [  # reason, lines of runs.jsonl, how many rows are read, whether the file is whole
    ("all is well", [nexus.seal(ran) + "\n" for ran in nexus.list_gpu_runs(finished())], 1, True),
    ("a torn end", [nexus.seal(ran)[:-1] for ran in nexus.list_gpu_runs(finished())], 0, False),
    ("no end of the line", [nexus.seal(ran) for ran in nexus.list_gpu_runs(finished())], 0, False),
    ("a flipped bit", [nexus.seal(ran).replace("GPU-0", "GPU-1") + "\n" for ran in nexus.list_gpu_runs(finished())], 0, False),
    ("what is no row", ["{}\n", "7\n", "\n", nexus.seal({"id": "abc"}) + "\n"], 0, False),
    ("zeros of a power cut", ["\0\0\0\n"], 0, False),
]


@pytest.mark.parametrize("reason, lines, count, is_whole", LINES, ids=[case[0] for case in LINES])
def test_rows_are_read_back(reason, lines, count, is_whole):
    found, whole = nexus.parse_runs([line.encode() for line in lines])
    assert (len(found), whole) == (count, is_whole)
    assert found == list(nexus.list_gpu_runs(finished()))[:count]


def ran(begin, end, id="abc", status="completed", **facts):
    return nexus.GpuRun(**{"id": id, "attempt": 1, "user": "ann", "gpu_uuids": ("GPU-0",), "started_at": NOW + begin,
                           "status": status, "name": "train", "finished_at": None if end is None else NOW + end, **facts})


MERGED = [  # reason, what ran, (id, begin, end, counts) of the rows for a picture whose pixel is a minute
    ("long ones stay", [ran(0, 600), ran(600, 900, "b")], [("abc", 0, 600, None), ("b", 600, 900, None)]),
    ("a short one alone stays", [ran(0, 10)], [("abc", 0, 10, None)]),
    ("short ones that follow each other are one", [ran(0, 10), ran(11, 20, "b"), ran(20, 30, "c")],
     [("c", 0, 30, {"completed": 3})]),
    ("a failure among them is the one to open", [ran(0, 10), ran(11, 20, "b", "failed"), ran(20, 30, "c")],
     [("b", 0, 30, {"completed": 2, "failed": 1})]),
    ("a pause between them is seen", [ran(0, 10), ran(100, 110, "b")], [("abc", 0, 10, None), ("b", 100, 110, None)]),
    ("a long one between them", [ran(0, 10), ran(10, 200, "b"), ran(200, 210, "c")],
     [("abc", 0, 10, None), ("b", 10, 200, None), ("c", 200, 210, None)]),
    ("one that runs stays", [ran(0, 10), ran(10, None, "b", "running")], [("abc", 0, 10, None), ("b", 10, None, None)]),
    ("on other GPUs", [ran(0, 10), ran(5, 15, "b", gpu_uuids=("GPU-1",)), ran(12, 20, "c")],
     [("c", 0, 20, {"completed": 2}), ("b", 5, 15, None)]),
    ("of other users", [ran(0, 10), ran(11, 20, "b", user="bob")], [("abc", 0, 10, None), ("b", 11, 20, None)]),
]


@pytest.mark.parametrize("reason, runs, expected", MERGED, ids=[case[0] for case in MERGED])
def test_what_is_too_short_to_be_seen_is_merged(reason, runs, expected):
    rows = nexus.merge_runs(runs[::-1], 60.0)
    found = [(row.id, row.started_at - NOW, row.finished_at and row.finished_at - NOW, counts) for row, counts in rows]
    assert found == expected
    assert [row for row, counts in nexus.merge_runs(runs, 0.0)] == runs, "without `merge` all are there"


def test_two_thousand_short_jobs_are_few_rows_that_still_say_when_some_failed():
    runs = [ran(10 * number, 10 * number + 10, f"j{number}", "failed" if number in (500, 1500) else "completed")
            for number in range(2000)]
    rows = nexus.merge_runs(runs, 120.0)
    assert len(rows) <= 2000 * 10 / (nexus.MAX_MERGED * 120) + 1 and sum(sum(counts.values()) for _, counts in rows) == 2000
    failed = [row for row, counts in rows if counts["failed"]]
    assert [row.id for row in failed] == ["j500", "j1500"] and failed[0].started_at < NOW + 5000 < failed[0].finished_at


def test_a_series_has_a_number_for_each_step():
    found = nexus.series_json([means(MINUTE + 60, utilization=49.6)], nexus.MINUTES, MINUTE, MINUTE + 125, ("utilization",))
    assert found == {"utilization": [None, 50, None]}


USED = [  # reason, job, means, how long it ran, the note
    ("all is told", finished(), [means(utilization=50.0)], 60, None),
    ("a share", finished(gpus=0.5), [means(utilization=50.0)], 60, "of the whole GPU, which it shared"),
    ("it was too short", finished(), [], 40, "it ran for less than 1m: that is too short for curves"),
    ("nexus was away", finished(), [], 600, "nothing of its GPUs was recorded while it ran"),
    ("no GPU", finished(gpu_uuids=(), gpu_indices=()), [], 600, "it has no GPU that is read"),
]


@pytest.mark.parametrize("reason, seen, told, ran_s, note", USED, ids=[case[0] for case in USED])
def test_what_a_jobs_gpus_did(reason, seen, told, ran_s, note):
    last = seen.attempts[-1]
    shown = nexus.job_usage_json(seen, last, dict.fromkeys(last.gpu_uuids, told), nexus.MINUTES, MINUTE, MINUTE, ran_s)
    assert shown["note"] == note and shown["attempt"] == 1
    assert [row["max"].get("utilization") for row in shown["gpus"]] == [50 if told else None] * len(last.gpu_uuids)

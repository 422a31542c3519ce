"""The history of GPUs: what ran, and what the picture is made of."""

import pytest
from makers import MINUTE, NOW, finished, job, means, running

import nexus


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


def test_a_row_tells_what_the_document_says_and_others_no_name():
    [ran] = nexus.list_gpu_runs(finished(name="lr-1"))
    own, others = nexus.run_json(ran, None, True), nexus.run_json(ran, None, False)
    assert own.keys() == nexus.RUN_ROW.keys() and (own["name"], own["outcome"]) == ("lr-1", "exit 0")
    assert others == {**own, "name": None, "outcome": None}


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


OTHERS_USE = [  # reason, means of ten minutes: (their beginning, percent of it that others used the GPU), seconds
    ("a whole step, half a step", [(-1800, 100.0), (-1200, 50.0)], 900), ("nobody told", [(-1800, None)], 0),
    ("what was before", [(-4200, 100.0), (-3000 - 700, 100.0)], 500), ("the step that goes on", [(-120, 100.0)], 120)]


@pytest.mark.parametrize("reason, told, seconds", OTHERS_USE, ids=[case[0] for case in OTHERS_USE])
def test_for_how_long_others_used_a_gpu(reason, told, seconds):
    found = [means(NOW + at, others=others) for at, others in told]
    assert nexus.sum_others_s(found, 600, NOW - 3600, NOW) == pytest.approx(seconds), reason


def test_others_have_a_row_where_users_have():
    made = nexus.State()
    assert nexus.usage_json(made, "user", NOW - 60, NOW, lambda user: True, 179.0) == [], "0.0 GPU-hours are no news"
    row, = nexus.usage_json(made, "user", NOW - 60, NOW, lambda user: False, 5400.0)
    assert row == {"user": nexus.OTHER_PEOPLE, "jobs": 0, "ended": 0, "failed": 0, "gpu_hours": 1.5, "cpu_job_hours": 0.0,
                   "forgotten_since": None}
    assert nexus.usage_json(made, "group", NOW - 60, NOW, lambda user: True, 5400.0) == []

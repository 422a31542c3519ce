"""The JSON of jobs and GPUs in the API."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import NOW, config, finished, foreign, gpu, job, jobs, ours, running, state
from shown import FAILED

import nexus

JOB_KEYS = {
    "id", "name", "group", "user", "node", "command", "cwd", "status", "position", "waiting_for", "reason", "estimated_start",
    "priority", "gpus", "gpu_ids", "gpu_mem_mib", "gpu_index", "gpu_indices", "gpu_uuids", "created_at", "started_at",
    "finished_at", "runtime_seconds", "exit_code", "signal", "cause", "cause_line", "attempt", "retries",
    "timeout_seconds", "expected_time", "after", "pid", "session", "log_dir", "peak_gpu_mem_mib", "mean_gpu_util",
    "peak_rss_mib", "cpu_seconds", "snapshot", "status_history"}


def test_a_job_has_every_key_of_the_api():
    assert set(nexus.job_json(job(), NOW, "here")) >= JOB_KEYS


JOBS = [  # reason, job, keys and what they say
    ("pending", job("abc", gpu_ids=(0, 1), priority=0), {
        "id": "abc", "status": "pending", "node": "gpu1", "position": 2, "waiting_for": "GPU 0 runs job xyz", "gpus": 1,
        "gpu_ids": (0, 1), "gpu_index": None, "gpu_indices": (), "created_at": "2024-10-24T15:29:15Z",
        "started_at": None, "runtime_seconds": None, "cause": None, "attempt": 0, "estimated_start": "2024-10-24T15:30:25Z"}),
    ("running: its time so far", running("abc", (2, 3), stop_cause="killed"), {
        "status": "running", "gpus": 2, "gpu_index": 2, "gpu_indices": (2, 3), "gpu_uuids": ("GPU-2", "GPU-3"),
        "started_at": "2024-10-24T15:29:15Z", "runtime_seconds": 60.0, "attempt": 1, "stopping": "killed"}),
    ("a clock that went back", running("abc", started_at=NOW + 5), {"runtime_seconds": 0.0}),
    ("done: its time as its runner measured it", finished("abc", runtime_seconds=12.34567), {
        "status": "completed", "exit_code": 0, "runtime_seconds": 12.346, "finished_at": "2024-10-24T15:30:15Z"}),
    ("failed", finished("abc", status="failed", exit_code=137, signal=9, cause="signal", cause_line="Killed"), {
        "exit_code": 137, "signal": 9, "cause": "signal", "cause_line": "Killed"}),
    ("its attempts before", job("abc", retries=2, retry_at=NOW + 5, attempts=(FAILED,)), {
        "attempt": 1, "retries": 2, "retry_at": "2024-10-24T15:30:20Z", "started_at": None, "exit_code": None, "gpu_indices": (),
        "attempts": [{
            "attempt": 1, "started_at": "2024-10-24T15:29:15Z", "finished_at": "2024-10-24T15:30:15Z", "runtime_seconds": 60.04,
            "exit_code": 3, "signal": None, "cause": "exit", "cause_line": "no data", "last_line": "done", "metric_line": None,
            "outcome": "exit 3",
            "gpu_indices": (0, 1), "gpu_uuids": (), "gpu_places": ["0", "1"], "node": "n2",
            "stopped_by": None, "commit": None, "pid": None, "session": None, "peak_rss_mib": 512.0, "cpu_seconds": None,
            "peak_gpu_mem_mib": None, "mean_gpu_util": None, "notes": (), "slurm_id": None, "processes_left": None}]}),
    ("what it took", finished("abc", peak_gpu_mem_mib=1000.0, mean_gpu_util=45.678, peak_rss_mib=2000.04, cpu_seconds=12.34), {
        "peak_gpu_mem_mib": 1000.0, "mean_gpu_util": 45.7, "peak_rss_mib": 2000.0, "cpu_seconds": 12.3}),
    ("its history", job(status_history=(("pending", NOW), ("cancelled", NOW + 1)), status="cancelled"), {
        "status_history": [["pending", "2024-10-24T15:30:15Z"], ["cancelled", "2024-10-24T15:30:16Z"]]}),
]


@pytest.mark.parametrize("reason, one, expected", JOBS, ids=[case[0] for case in JOBS])
def test_job_json(reason, one, expected):
    made = nexus.job_json(one, NOW, "gpu1", position=2, waiting_for="GPU 0 runs job xyz", estimated_start=nexus.format_time(NOW + 10))
    assert {key: made[key] for key in expected} == expected, reason


def test_what_is_known_just_now_is_its_last_attempts_too():
    one = running("abc", (0,), attempts=(FAILED,), retries=1)
    made = nexus.job_json(one, NOW, "here", runtime_seconds=7.5, peak_rss_mib=512.0, cpu_seconds=3.0, rss_mib=100.0)
    last = made["attempts"][-1]
    assert {name: made[name] for name in last if name not in ("node", "stopped_by")} == {
        name: fact for name, fact in last.items() if name not in ("node", "stopped_by")}
    assert (last["runtime_seconds"], last["peak_rss_mib"], made["rss_mib"], made["attempts"][0]["cause"]) == (7.5, 512.0, 100.0, "exit")


@given(jobs)
def test_a_job_shows_as_json_without_its_environment(one):
    marked = nexus.begin_attempt(nexus.replace(one, environment="digest-of-secrets"), nonce="nonce-of-this-attempt", started_at=NOW)
    text = json.dumps(nexus.job_json(marked, NOW, "here"))
    assert "digest-of-secrets" not in text and "nonce-of-this-attempt" not in text


PLANNED = {"position": 3, "waiting_for": "GPU 0 runs job xyz", "reason": {"code": "resources"}, "estimated_start": None}


def as_json(content):
    return json.loads(nexus.encode_json(content))


@given(st.lists(jobs, max_size=5), st.booleans(), st.data())
def test_the_text_of_a_job_says_what_its_json_says(some, is_public, data):
    """Also when it is asked for again, of another version, among jobs that have more or less in common with it."""
    texts = nexus.JobTexts(is_public)
    versions = [nexus.replace(one, id=f"j{number % 3}", attempts=()) for number, one in enumerate(some)]
    for one in data.draw(st.permutations(versions * 2)):
        whole = nexus.job_json(one, NOW, "n1", **PLANNED, python="/usr/bin/python3")
        shown = nexus.hide_private(whole, nexus.PUBLIC_JOB_KEYS) if is_public else whole
        text = texts.format(one, {**PLANNED, **nexus.place_json(one, "n1")}, 2, lambda job: {"python": "/usr/bin/python3"})
        assert json.loads(text) == as_json(shown)
    assert len(texts.kept) <= 2


@given(jobs, st.lists(st.sampled_from(sorted(nexus.JOB)), min_size=1, unique=True))
def test_some_fields_of_a_job_are_those_of_all_its_json(one, fields):
    whole = nexus.job_json(one, NOW, "n1", **PLANNED)
    assert as_json(nexus.pick_json(one, NOW, "n1", fields, **PLANNED)) == as_json(nexus.pick(whole, fields))


SHARED = [  # reason, jobs, allocated, ids
    ("nobody's", [], 0, []), ("a share", [running("abc", gpus=0.5)], 0.5, ["abc"]),
    ("two shares", [running("abc", gpus=0.5), running("abd", gpus=0.3)], 0.8, ["abc", "abd"]),
    ("the last of one and a half", [running("abc", (1, 0), gpus=1.5)], 0.5, ["abc"]),
    ("after a CUDA out-of-memory", [running("abc", gpus=0.5, exclusive=True)], 1, ["abc"]),
]


@pytest.mark.parametrize("reason, jobs, allocated, ids", SHARED, ids=[case[0] for case in SHARED])
def test_what_of_a_gpu_is_given_out(reason, jobs, allocated, ids):
    made = nexus.gpu_json(gpu(0, utilization_mean=45.25, utilization_peak=99.0), state(*jobs), config().gpu, None)
    assert (made["allocated"], made["job_ids"], made["is_available"]) == (allocated, ids, not jobs), reason
    assert (made["utilization_mean"], made["utilization_peak"]) == (45.2, 99.0)


def test_a_gpu_is_told_by_its_uuid():
    made = nexus.gpu_json(gpu(0, uuid="GPU-1"), state(running("abc", (1,))), config().gpu, None)
    assert made["job_ids"] == ["abc"], "it had index 1 before the reboot"


def test_what_computes_on_a_gpu_is_told():
    made = nexus.gpu_json(gpu(0, processes=(foreign(), ours("abc", 2))), state(), config().gpu, None)
    assert made["processes"] == [
        {"pid": 4242, "memory_mib": 16384.0, "job_id": None, "user": "bob", "name": "python"},
        {"pid": 77, "memory_mib": 2048.0, "job_id": "abc", "user": None, "name": None}]


OUTCOMES = [  # reason, facts, words
    ("it went well", {"exit_code": 0}, "exit 0"), ("it did not", {"exit_code": 3, "cause": "exit"}, "exit 3"),
    ("a signal", {"exit_code": 137, "signal": 9, "cause": "signal"}, "SIGKILL"),
    ("a signal without a usual name", {"exit_code": 162, "signal": 34, "cause": "signal"}, "signal 34"),
    ("taken out of the queue", {"status": "cancelled", "cause": "killed", "started_at": None}, "removed"),
    ("somebody killed it", {"exit_code": 143, "signal": 15, "cause": "killed"}, "killed"),
    ("it could not be started", {"cause": "launch"}, "launch"), ("nothing yet", {"status": "running", "finished_at": None}, None),
]


@pytest.mark.parametrize("reason, facts, words", OUTCOMES)
def test_find_outcome(reason, facts, words):
    ended = finished("abc", **{"status": "failed", "exit_code": None, **facts})
    shown = nexus.job_json(ended, NOW, "here")
    assert shown["outcome"] == words and all(attempt["outcome"] == words for attempt in shown["attempts"]), reason


NOTICES = [  # reason, job, its status in words, the address of the page, the lines of the message
    ("it went well", finished("abc", name="base line", runtime_seconds=3700.0), "completed", "",
     ["job abc (base line) completed", "runtime 1h 1m"]),
    ("it failed", finished("abc", status="failed", command="python train.py", exit_code=3, cause="exit",
                           cause_line="ValueError: y\x1b[2J", runtime_seconds=2.0), "failed", "https://gpu1/",
     ["job abc (python train.py) failed (exit 3)", "ValueError: y [2J", "runtime 2s", "https://gpu1/#/jobs/abc"]),
    ("it never ran", finished("abc", status="cancelled", command="sleep 5", exit_code=None, cause="dependency", cause_line="after abd",
                              started_at=None, runtime_seconds=None), "cancelled", "http://gpu1:6234",
     ["job abc (sleep 5) cancelled (dependency)", "after abd", "http://gpu1:6234/#/jobs/abc"]),
]


@pytest.mark.parametrize("reason, one, word, url, lines", NOTICES, ids=[case[0] for case in NOTICES])
def test_a_message_says_what_became_of_a_job(reason, one, word, url, lines):
    assert nexus.describe_notice(one, word, url) == lines, reason

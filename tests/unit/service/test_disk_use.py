"""How large the logs are: what is measured, how often, and what clearing frees."""

import pytest

import nexus


@pytest.fixture
def w(world):
    return world(gpus=0, cpu_slots=10)


def add_job(w, size, is_over=True):
    job_id = w.add("true", gpus=0)
    w.turn()
    w.claim(job_id, 100 + len(w.store.state.jobs))
    if is_over:
        w.end(job_id)
        w.turn()
    grow(w, job_id, size)
    return job_id


def grow(w, job_id, size):
    (w.folder_of(job_id) / "stdout.log").write_bytes(b"x" * size)


def test_logs_are_measured_with_the_largest_first(w):
    assert w.service.health.check()["disk_use"] is None and w.service.disk_use.tell() == "", "it was not measured yet"
    small, large, empty = add_job(w, 1000), add_job(w, 3 * 2**20), add_job(w, 0)
    (w.folder_of(small) / "files").mkdir()
    (w.folder_of(small) / "files/model.pt").write_bytes(b"x" * 10**6)
    (w.folder_of(empty) / "stderr.log").symlink_to(w.folder_of(large) / "stdout.log")
    assert w.service.disk_use.measure() == nexus.MEASURE_INTERVAL_S
    found = w.service.health.check()["disk_use"]
    assert found["largest"] == [{"id": large, "log_bytes": 3 * 2**20}, {"id": small, "log_bytes": 1000}]
    assert (found["jobs"], found["log_bytes"]) == (3, 3 * 2**20 + 1000), "neither what a job made, nor what a link leads to"
    assert w.service.disk_use.tell().startswith(f"3MB of 3 jobs, the largest: {large} 3MB, {small} 1KB; history ")


def test_a_finished_job_is_measured_once_and_a_running_one_each_time(w):
    over, runs = add_job(w, 10), add_job(w, 10, is_over=False)
    for size in (10, 20):
        grow(w, over, size)
        grow(w, runs, size)
        w.service.disk_use.measure()
        assert w.service.disk_use.measured["log_bytes"] == 10 + size


def test_many_are_measured_a_part_at_a_time(w, monkeypatch):
    monkeypatch.setattr(nexus, "MAX_MEASURED", 2)
    for _ in range(5):
        add_job(w, 10)
    told = [(w.service.disk_use.measure(), w.service.disk_use.measured["jobs"]) for _ in range(4)]
    assert told == [(nexus.REST_S, 2), (nexus.REST_S, 4), (nexus.MEASURE_INTERVAL_S, 5), (nexus.MEASURE_INTERVAL_S, 5)]


def test_what_clearing_frees_is_told_before_and_after(w):
    job_id = add_job(w, 5000)
    w.clock.pass_(86400)
    young = add_job(w, 100)
    choice = nexus.Choice(older="1h")
    for dry_run in (True, False):
        assert w.service.housekeeping.clear(choice, w.service.owner, dry_run) == {"ids": [job_id], "freed_bytes": 5000}
    assert list(w.store.state.jobs) == [young] and not w.folder_of(job_id).exists()
    assert w.service.disk_use.worker.wanted.is_set(), "the rest is measured anew"

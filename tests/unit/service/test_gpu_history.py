"""Samples of GPUs and of jobs are kept over a restart."""

import os

import makers
import night
import pytest

import nexus

# What is known


def test_samples_of_a_job_are_kept_over_a_restart_and_a_retry_begins_anew(world):
    w = world()
    job_id = w.add(retries=1)
    w.turn()
    w.claim(job_id, 100)
    w.machine.processes.start(200, job_id)
    for used, busy, cpu_s in ((4000.0, 50.0, 1.0), (9000.0, 100.0, 2.5), (2000.0, 30.0, 3.0)):
        w.machine.processes.take(200, 500.0, cpu_s)
        w.machine.shown = [makers.gpu(0, utilization=busy, memory_used_mib=used, processes=(nexus.GpuProcess(200, used),)), makers.gpu(1)]
        w.probe()
        w.turn(seconds=1)
    told = w.api(job_id)
    assert (told["peak_gpu_mem_mib"], told["mean_gpu_util"], told["peak_rss_mib"], told["cpu_seconds"]) == (9000, 60, 500, 3)
    assert (told["rss_mib"], told["cpu_percent"]) == (500, 50)
    status = w.service.status.describe()["gpu_status"][0]
    assert status["utilization_peak"] == 100 and status["utilization_mean"] == 50      # of 0, 50, 100: up to the look before
    w.service.outcomes.keep_samples()
    w.crash()
    w.machine.shown = [makers.gpu(0), makers.gpu(1)]
    w.machine.processes.alive.pop(200)
    w.end(job_id, 1)
    kept = w.job(job_id)
    assert kept.status == "pending" and kept.current.peak_gpu_mem_mib is None
    assert [(ran.peak_gpu_mem_mib, ran.peak_rss_mib, ran.cpu_seconds) for ran in kept.attempts] == [(9000, 500, 3)]


def test_a_restart_forgets_nothing_of_the_mean_load_of_a_jobs_gpus(world):
    w = world()
    job_id = w.run(w.add(), 100)
    for busy, seconds in ((50.0, 1), (50.0, 595)):
        w.machine.shown = [makers.gpu(0, utilization=busy), makers.gpu(1)]
        w.probe()
        w.turn(seconds=seconds)
    w.service.outcomes.keep_samples()
    w.crash()
    w.machine.shown = [makers.gpu(0, utilization=100.0), makers.gpu(1)]
    w.probe()
    w.turn(seconds=1)
    assert 50 < w.api(job_id)["mean_gpu_util"] < 51, "it counts as one reading of 120"


# What is kept of GPUs, and for how long

def test_a_gpu_that_cannot_be_read_has_a_gap(world):
    w = world()
    history, others = w.service.gpu_history, makers.gpu(0, node="n1", uuid="n1/GPU-0", utilization=50)
    history.minutes.clear()
    history.take_readings([makers.gpu(0, utilization=50), makers.gpu(1, fault="GPU is lost"), others], {"n1"})
    assert history.minutes.keys() == {"GPU-0"}
    history.take_readings([others], ())
    assert history.minutes.keys() == {"GPU-0", "n1/GPU-0"}


DAY_S = 86400.0


@pytest.mark.parametrize("most, kept", [(20000, [6, 5, 4, 1]), (3, [5, 4, 1])])
def test_what_ran_is_kept_for_seven_days_and_the_latest_of_too_many(world, monkeypatch, most, kept):
    w, names = world(), {days: night.make_id(number) for number, days in enumerate((8, 6, 5, 4, 1))}
    monkeypatch.setattr(nexus, "MAX_RUNS", most)
    os.makedirs(w.layout.history_dir, exist_ok=True)
    night.place_runs(w.layout, w.clock.now(), [{"card": 0, "begin": 24 * days + 1, "end": 24 * days} for days in names])
    history = w.service.gpu_history
    history.runs = None
    assert [run.id for run in history.list_runs(0.0)] == [names[days] for days in kept]


def test_the_file_of_a_gpu_that_is_gone_stays_for_31_days(world):
    w = world()
    history, now = w.service.gpu_history, w.clock.now()
    os.makedirs(w.layout.history_dir, exist_ok=True)
    for uuid, days in (("GPU-0", 99), ("GPU-gone", 30.9), ("GPU-long-gone", 31.1)):
        path = w.layout.history_file(uuid)
        open(path, "w").close()
        os.utime(path, (now - days * DAY_S,) * 2)
    w.probe()
    w.turn()
    history.clean()
    assert sorted(os.path.basename(path) for path in history.find_files()) == sorted(
        os.path.basename(w.layout.history_file(uuid)) for uuid in ("GPU-0", "GPU-gone")), "GPU-0 is there"


@pytest.mark.parametrize("since_s, hours", [(3600, 1), (2 * DAY_S, 30), (90 * DAY_S, 30)])
def test_what_others_used_counts_as_far_as_the_history_goes(world, since_s, hours):
    """For 30 hours somebody else has had GPU-0, and a node's GPU."""
    w = world()
    history, now = w.service.gpu_history, w.clock.now() // 600 * 600
    os.makedirs(w.layout.history_dir, exist_ok=True)
    w.clock.pass_(now + 600 - w.clock.now())
    w.turn()
    for one in (makers.gpu(0), makers.gpu(0, uuid="n1/GPU-0", node="n1")):
        minutes = [makers.means(now + 600 - 60 * number, others=100.0) for number in range(30 * 60, 0, -1)]
        nexus.write_means(nexus.DISK, w.layout.history_file(one.uuid), nexus.format_history_head(one), minutes)
    assert history.measure_others(w.clock.now() - since_s) / 3600 == pytest.approx(hours, rel=0.01)
    row, = w.service.status.list_usage(w.service.owner, since_s, "user")
    assert row["user"] == nexus.OTHER_PEOPLE and row["gpu_hours"] == pytest.approx(hours, rel=0.01)
    assert w.service.status.list_usage(w.service.owner, since_s, "group") == []

"""GPUs that are paused, and GPUs that do nothing."""

import types

import makers
import pytest
from turns import fail

import nexus

# GPUs that are bad


def on_gpu(w, index, command, code, pid, seconds=1):
    job_id = w.add(f"./program --letter {command}", gpu_ids=[index])
    w.turn()
    assert w.job(job_id).current.gpu_indices == (index,), w.api(job_id)
    if code is not None:
        fail(w, job_id, pid, code, "CUDA error\n", seconds)


def test_the_last_usable_gpu_is_never_paused(world):
    w = world(gpus=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    w.service.gpu_watch.set_gpu_paused("1", True, "ann")
    on_gpu(w, 0, "b", 1, 102)
    on_gpu(w, 0, "c", 1, 103)
    assert [gpu["is_paused"] for gpu in w.service.status.describe()["gpu_status"]] == [False, True]


GUARDED = [  # reason, what ends one after the other: (GPU, program, exit code, or None: it goes on, seconds); is GPU 0 paused then?
    ("they fail at once, and one runs well elsewhere", [(0, "a", 1, 1), (1, "a", 0, 60), (0, "b", 1, 10)], True),
    ("where one still runs", [(0, "a", 1, 1), (1, "a", 0, 60), (1, "c", None, 0), (0, "b", 1, 1)], True),
    ("they fail later", [(0, "a", 1, 11), (1, "a", 0, 60), (0, "b", 1, 11)], False),
    ("one fails later", [(0, "a", 1, 1), (1, "a", 0, 60), (0, "b", 1, 10.1)], False),
    ("one ran well there meanwhile", [(0, "a", 1, 1), (1, "a", 0, 60), (0, "c", 0, 60), (0, "b", 1, 1)], False),
    ("it ran well elsewhere before that", [(1, "a", 0, 60), (0, "a", 1, 1), (0, "b", 1, 1)], False),
    ("it fails elsewhere, too", [(0, "a", 1, 1), (1, "a", 0, 60), (1, "b", 1, 1), (0, "b", 1, 1)], False),
]


def test_a_gpu_that_somebody_uses_is_usable(world):
    """The other one is not the last."""
    w = world(gpus=2, guard_failures=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    w.machine.shown = [makers.gpu(0), makers.gpu(1, processes=(makers.foreign(),), memory_used_mib=16384.0)]
    w.probe()
    on_gpu(w, 0, "b", 1, 102)
    assert [gpu["is_paused"] for gpu in w.service.status.describe()["gpu_status"]] == [True, False]


@pytest.mark.parametrize("reason, ends, is_paused", GUARDED, ids=[case[0] for case in GUARDED])
def test_a_gpu_is_paused_where_jobs_fail_at_once_that_run_well_elsewhere(world, reason, ends, is_paused):
    w = world(gpus=2, guard_failures=2, guard_seconds=10)
    for pid, end in enumerate(ends, 100):
        on_gpu(w, *end[:3], pid, end[3])
    assert [gpu["is_paused"] for gpu in w.service.status.describe()["gpu_status"]] == [is_paused, False]
    assert any("GPU 0 is paused: 2 jobs in a row failed there within 10 s" in line for line in w.lines) == is_paused


def test_a_resumed_gpu_begins_anew(world):
    w = world(gpus=2, guard_failures=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    on_gpu(w, 0, "b", 1, 102)
    assert w.service.status.describe()["gpu_status"][0]["is_paused"]
    w.service.gpu_watch.set_gpu_paused("0", False, "ann")
    on_gpu(w, 1, "b", 0, 103, 60)
    on_gpu(w, 0, "c", 1, 104)
    assert not w.service.status.describe()["gpu_status"][0]["is_paused"]
    w.service.gpu_watch.set_gpu_paused("0", True, "ann")
    assert w.service.gpu_watch.see_gpus(w.store.state)[0].pause_reason is None, "ann has another one"


def test_the_log_says_once_what_gpus_there_are(world):
    w = world(gpus=2)
    lost = nexus.NexusError("unavailable", "it cannot be read")
    for shown in ([0, 1], [0], [0], lost, lost, [0, 1], [0, 1]):
        w.machine.shown = shown if shown is lost else [makers.gpu(index, fault="GPU is lost" if index else None) for index in shown]
        w.probe()
    assert [line for line in w.lines if "GPU" in line] == [
        "Found 2 GPUs", "GPU 1: GPU is lost", "Found 1 GPU", "GPUs: it cannot be read", "Found 2 GPUs", "GPU 1: GPU is lost"]


def test_gpus_that_come_are_paused_by_their_places_and_else_nothing_is_recorded(world):
    for paused, wanted, is_recorded in (((), (), False), (("GPU-0",), ("GPU-0",), False), (("GPU-0", "1"), ("GPU-0", "GPU-1"), True)):
        w = world(gpus=1)
        makers.put(w.store.state, *makers.facts_put(paused_gpus=paused))
        before = w.store.state.seq
        w.machine.shown = [makers.gpu(0), makers.gpu(1)]
        w.probe()
        assert (w.store.state.paused_gpus, w.store.state.seq > before) == (wanted, is_recorded)


def test_the_mean_and_the_peak_of_a_gpu_are_of_the_last_hour(world):
    w = world(gpus=0)
    for seconds, load, mean, peak in ((1, 10.0, 10.0, 10.0), (1, 50.0, 30.0, 50.0), (3599, None, 50.0, 50.0), (1, None, None, None)):
        w.clock.pass_(seconds)
        w.machine.shown = [makers.gpu(0, utilization=load)]
        w.probe()
        w.service.gpu_watch.show_gpus()
        gpu, = w.service.gpu_watch.gpus
        assert (gpu.utilization_mean, gpu.utilization_peak) == (mean, peak)


def test_of_the_time_between_two_readings_little_is_known(world):
    """The machine may have slept: two readings of an idle GPU, an hour apart, are no hour."""
    w = world(idle_kill_minutes=2)
    job_id = w.run(w.add(), 100)
    for seconds, wanted in ((30, None), (3600, None), (50, None), (50, None), (50, "idle")):
        w.machine.shown = [makers.gpu(0, utilization=0.0)]
        w.clock.pass_(seconds)
        w.probe()
        w.turn(seconds=1.1)
        assert w.api(job_id)["stopping"] == wanted, seconds


def test_a_job_whose_gpus_do_nothing_is_idle(world):
    w = world(idle_kill_minutes=40, on_idle="true", refresh_rate_seconds=700)
    called = []
    w.service.hooks.queue = lambda name, jobs: called.extend(job.id for job in jobs)
    job_id = w.add(gpus=2)
    w.turn()
    w.claim(job_id, 100)

    def look(seconds, *busy):
        w.machine.shown = [makers.gpu(index, utilization=percent) for index, percent in enumerate(busy)]
        w.turn(seconds=seconds)
        w.probe()
        w.turn(seconds=1)
        return w.api(job_id)["idle_since"] is not None, len(called)

    assert look(10, 0.0, 0.0) == (False, 0), "it may still be loading"
    assert look(1700, 0.0, 4.9) == (False, 0)
    w.clock.wall += 86400
    assert look(10, 0.0, 4.9) == (False, 0), "the clock was set, or the machine slept"
    w.clock.wall -= 86400
    assert look(100, 0.0, 4.9) == (True, 1) and w.api(job_id)["stopping"] is None
    w.crash()
    w.service.hooks.queue = lambda name, jobs: called.extend(job.id for job in jobs)
    assert look(10, 0.0, 70.0) == (False, 1), "one of them works"
    assert look(10, 0.0, 0.0) == (False, 1)
    assert look(1900, 0.0, None) == (False, 1), "what is unknown is not idle"
    assert look(10, 0.0, 0.0) == (False, 1)
    w.machine.shown = nexus.NexusError("unavailable", "it cannot be read")
    w.turn(seconds=1900)
    w.probe()
    w.turn()
    assert w.api(job_id)["idle_since"] is None, "nor is what cannot be read"
    assert look(10, 0.0, 0.0) == (False, 1)
    assert look(1900, 0.0, 0.0) == (True, 1), "each job is told of once"
    assert look(600, 0.0, 0.0) == (True, 1) and w.api(job_id)["stopping"] == "idle"
    w.end(job_id, 143)
    ended = w.job(job_id).current
    assert ended.cause == "idle" and "its GPUs did nothing for 41m" in ended.cause_line and "idle_kill_minutes is 40" in ended.cause_line


def test_slurm_that_is_away_holds_up_no_job_here(world):
    """It still has jobs from before `launcher` was changed."""
    w = world()
    w.turn()
    w.service.cluster = types.SimpleNamespace(find_reason=lambda: "Slurm is away")
    assert w.service.gpu_watch.find_gpu_error() is None
    w.service.cluster = None

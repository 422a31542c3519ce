"""GPUs that are paused, and GPUs that do nothing."""

import makers
import pytest
from turns import fail

# GPUs that are bad


def on_gpu(w, index, command, code, pid, seconds=1):
    job_id = w.add(f"./program --letter {command}", gpu_ids=[index])
    w.turn()
    assert w.job(job_id).current.gpu_indices == (index,), w.api(job_id)
    fail(w, job_id, pid, code, "CUDA error\n", seconds)


def test_the_last_usable_gpu_is_never_paused(world):
    w = world(gpus=2)
    on_gpu(w, 0, "a", 1, 100)
    on_gpu(w, 1, "a", 0, 101, 60)
    w.service.gpu_watch.set_gpu_paused("1", True, "ann")
    on_gpu(w, 0, "b", 1, 102)
    on_gpu(w, 0, "c", 1, 103)
    assert [gpu["is_paused"] for gpu in w.service.status.describe()["gpu_status"]] == [False, True]


@pytest.mark.parametrize("seconds, is_paused", [(1, True), (11, False)])
def test_a_gpu_is_paused_for_failures_within_seconds_alone(world, seconds, is_paused):
    w = world(gpus=2, guard_failures=2, guard_seconds=10)
    on_gpu(w, 0, "a", 1, 100, seconds)
    on_gpu(w, 1, "a", 0, 101, 60)
    on_gpu(w, 0, "b", 1, 102, seconds)
    assert [gpu["is_paused"] for gpu in w.service.status.describe()["gpu_status"]] == [is_paused, False]


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


def test_a_job_whose_gpus_do_nothing_is_idle(world):
    w = world(idle_kill_minutes=40, on_idle="true")
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
    assert look(1900, 0.0, 0.0) == (True, 1), "each job is told of once"
    assert look(600, 0.0, 0.0) == (True, 1) and w.api(job_id)["stopping"] == "idle"
    w.end(job_id, 143)
    ended = w.job(job_id).current
    assert ended.cause == "idle" and "its GPUs did nothing for 41m" in ended.cause_line and "idle_kill_minutes is 40" in ended.cause_line

"""A phase, or a worker's step, that fails stops no other."""

import pytest

import nexus


def test_a_worker_goes_on_after_a_step_that_failed(world, monkeypatch):
    w, taken = world(), []

    def step():
        taken.append(len(taken))
        if len(taken) == 2:
            raise ZeroDivisionError("oh")
        if len(taken) == 3:
            worker.wanted.set()
            return None                             # no further step before it is wanted
        w.service.is_stopping = len(taken) == 4
        return 0.0

    monkeypatch.setattr(nexus, "WATCH_INTERVAL_S", 0.01)
    worker = nexus.Worker(w.service, "counting", step)
    worker.thread.start()
    worker.thread.join(60)
    assert taken == [0, 1, 2, 3] and w.service.failure_count == 1 and any("counting" in line for line in w.lines)

# One failure stays one failure
PHASES = [  # where, what, as it is told
    ("local", "poll", "hearing of jobs here"), ("gpu_watch", "take_in_observation", "reading GPUs"),
    ("pool", "take_stock", "looking at nodes"), ("", "record_ends_and_start", "scheduling")]


@pytest.mark.parametrize("part, method, phase", PHASES, ids=[f"{case[0]}.{case[1]}" for case in PHASES])
def test_a_phase_that_fails_stops_no_other(world, monkeypatch, part, method, phase):
    w = world()
    done = []
    for where, name, told in PHASES:
        monkeypatch.setattr(getattr(w.service, where, w.service), name, lambda *_, told=told: done.append(told) or ())
    monkeypatch.setattr(getattr(w.service, part, w.service), method, lambda *_: (_ for _ in ()).throw(ZeroDivisionError("oh")))
    w.turn()
    assert done == [told for _, _, told in PHASES if told != phase]
    health = w.service.health.check()
    reading = next(check for check in health["checks"] if check["name"] == "failures")
    assert not health["is_healthy"] and not reading["is_ok"] and phase in reading["reading"] and "oh" in reading["reading"]
    w.clock.pass_(301)
    w.turn()
    assert w.service.failure_count == 2

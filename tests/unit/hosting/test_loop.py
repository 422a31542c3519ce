"""A phase, or a worker's step, that fails stops no other."""

import os

import live
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


SLOTS = [({}, 4), ({"cpu_slots": 0}, 4), ({"cpu_slots": 2}, 2), ({"cpu_slots": 9}, 9)]          # config, how many


@pytest.mark.parametrize("keys, count", SLOTS, ids=[str(row[0]) for row in SLOTS])
def test_cpu_slots_are_the_cores_of_the_machine(world, keys, count):
    """The stand-in has four; a node's agent tells its own."""
    w = world(gpus=0, **keys)
    ids = [w.add(gpus=0) for _ in range(10)]
    w.turn()
    assert [w.job(job_id).status for job_id in ids].count("running") == count
    assert w.api(ids[-1])["waiting_for"] == f"all {count} CPU slots are taken ([jobs] cpu_slots)"
    assert nexus.Machine.cpu_count == os.cpu_count()


def test_a_turn_is_a_tick_with_what_was_heard(world, monkeypatch):
    w, ticks = world(), []
    monkeypatch.setattr(w.service.events, "wait", lambda seconds: [seconds])
    monkeypatch.setattr(w.service, "tick", ticks.append)
    w.service.turn()
    assert ticks == [[w.service.find_wait_s()]]


def test_gpus_and_memory_are_read_beside_the_loop(world, monkeypatch):
    w, begun = world(), []
    monkeypatch.setattr(nexus.Worker, "run", lambda worker: begun.append(worker.doing))
    workers = [nexus.Worker(w.service, "counting", lambda: None)]
    w.service.begin_workers(*workers)
    live.until(lambda: len(begun) == 3)
    assert sorted(begun) == ["asking for the GPUs", "counting", "measuring jobs' memory"]
    w.service.commit_worker.end()           # it was made before, and runs


def test_a_failure_is_logged_once_a_minute(world):
    """Repeated ones must not fill the disk; each is counted, and the loop rests a second after it."""
    w, told = world(), []
    for seconds, doing in ((0, "a"), (1, "a"), (1, "b"), (59, "b"), (61, "b"), (1, "a")):
        w.clock.pass_(seconds)
        before = len(w.lines)
        w.service.run_guarded(doing, lambda: 1 / 0)
        told.append(len(w.lines) - before)
    assert told == [1, 0, 1, 0, 1, 1] and w.service.failure_count == 6
    w.service.find_due_s = lambda: 0.25
    assert w.service.find_wait_s() == nexus.WATCH_INTERVAL_S
    w.clock.pass_(1.1)
    assert w.service.find_wait_s() == 0.25


def test_while_nothing_can_be_recorded_each_refusal_is_not_logged(world):
    """The log has the first one."""
    w = world()

    def refuse():
        raise nexus.NexusError("unavailable", "cannot write journal.jsonl")

    w.lines.clear()
    w.service.run_guarded("taking notes", refuse)
    w.store.last_error = nexus.NexusError("unavailable", "cannot write journal.jsonl")
    w.service.run_guarded("taking notes", refuse)
    assert w.lines == ["taking notes: cannot write journal.jsonl"] and w.service.failure_count == 0


def test_who_may_be_without_gpus(world, monkeypatch):
    """A service that has nodes.  A node without is a fault: its agent tells it."""
    w = world()
    assert not w.service.may_lack_gpus and not object.__new__(nexus.Agent).may_lack_gpus
    monkeypatch.setattr(w.service.pool, "nodes", {"n1": None})
    assert w.service.may_lack_gpus
    monkeypatch.undo()

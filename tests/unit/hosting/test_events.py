"""What runners say, as the loop hears it."""

import os
import threading
import time

import nexus

# How an attempt ended, and what the job becomes


def test_end_is_heard_at_once(world):
    w = world(gpus=1)
    first, then = w.add(), w.add()
    w.run(first, 100)
    assert w.api(then)["waiting_for"] == f"GPU 0 runs job {first}"
    w.turn(f"end {first} 1 0 250")
    assert w.job(first).status == "completed" and w.job(then).status == "running" and w.job(first).current.runtime_seconds == 2.5
    assert w.lines[-2:] == [f"Job {first} completed successfully on GPU 0", f"Started job {then} on GPU 0: python train.py"]


def test_a_start_and_an_end_that_are_heard_together_are_two_lines(world):
    """What is learned with an end is recorded with it."""
    w = world(gpus=0)
    job_id = w.add(gpus=0)
    w.turn()
    w.claim(job_id, 100, is_said=False)
    del w.machine.processes.alive[100]
    seq = w.store.state.seq
    w.turn(f"start {job_id} 1 100 1000 1000", f"end {job_id} 1 0 250")
    assert (w.job(job_id).status, w.job(job_id).current.pid, w.store.state.seq - seq) == ("completed", 100, 1)


def test_sayings_of_nobody_change_nothing(world):
    w = world()
    job_id = w.run(w.add(), 100)
    before = w.job(job_id)
    w.turn(f"end {job_id} 7 0 250", "end zzz 1 0 250", f"start {job_id} 2 5 5 5", f"bounce {job_id} 9 why")
    assert w.job(job_id) == before


def test_who_else_reads_the_fifo_does_not_stop_the_loop(world, monkeypatch):
    events = world(gpus=0).service.events
    os.write(events.source, b"start abc 1 2 3 4\n")
    read = os.read
    monkeypatch.setattr(os, "read", lambda handle, size: (read(handle, size), read(handle, size))[1])
    assert events.wait(60) == [], "a read by the other one comes first: then there is nothing left"


def test_a_start_waits_for_what_comes_next(tmp_path, monkeypatch):
    """So a short job is heard of once.  An end, or whatever else wakes the service, is not kept waiting."""
    monkeypatch.setattr(nexus, "STARTS_WAIT_S", 600.0)
    events = nexus.RunnerEvents(str(tmp_path / "events"), None)
    said = [b"start abc 1 100 1000 1000\n", b"end abc 1 0 250\n"]
    for lines, count in (([*said], 2), ([said[1]], 1), ([said[0], b"\n"], 1)):
        threading.Thread(target=lambda lines=lines: [(time.sleep(0.01), os.write(events.target, line)) for line in lines]).start()
        assert len(events.wait(600)) == count
    os.write(events.target, said[0])
    monkeypatch.setattr(nexus, "STARTS_WAIT_S", 0.01)
    assert len(events.wait(600)) == 1
    os.close(events.source)

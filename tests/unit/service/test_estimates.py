"""When a job starts, as far as that is known."""

import pytest

import nexus


def test_a_start_that_was_asked_for_is_known_of_the_last_in_the_queue_too(world, monkeypatch):
    monkeypatch.setattr(nexus, "MAX_ESTIMATED_JOBS", 2)
    w = world()
    ids = [w.add(begin="+1h", gpus=0) for _ in range(3)]
    w.turn()
    assert w.api(ids[-1])["estimated_start"] == w.api(ids[0])["estimated_start"] == nexus.format_time(w.clock.now() + 3600)


def test_a_start_is_never_told_to_be_over(world, monkeypatch):
    """Estimates are made once a minute at most."""
    w = world()
    job_id = w.add(is_held=True)
    monkeypatch.setattr(w.service.estimates, "find_starts", lambda: {job_id: w.clock.now() - 30})
    assert w.api(job_id)["estimated_start"] == nexus.format_time(w.clock.now())


@pytest.mark.parametrize("took_s, pause_s", [(0.0, nexus.ESTIMATE_INTERVAL_S), (0.5, 50), (9, 60)])
def test_estimates_take_a_small_part_of_the_time(world, monkeypatch, took_s, pause_s):
    """However often somebody asks, and whatever has changed since."""
    w, made = world(gpus=0), []
    w.store.update(lambda state: [nexus.Put("facts", "paused", False)])
    monkeypatch.setattr(w.service.estimates, "make_starts", lambda: made.append(w.clock.monotonic()) or w.clock.pass_(took_s) or {})
    for seconds in (0, pause_s - 1, 0.9, 0.2):
        w.clock.pass_(seconds)
        w.add(gpus=0)
        w.service.estimates.find_starts()
    assert len(made) == 2 and made[1] - made[0] == pytest.approx(took_s + pause_s + 0.1)


def test_no_start_is_expected_while_nothing_can_start(world):
    w = world(gpus=1)
    w.run(w.add(expected_time=10000), 100)
    job_id = w.add()

    def is_known():
        w.clock.pass_(61)
        w.probe()
        w.turn()
        return job_id in w.service.estimates.find_starts()

    assert is_known()
    w.service.editor.set_paused(True, "ann")
    assert not is_known()
    w.service.editor.set_paused(False, "ann")
    assert is_known()
    w.service.job_host.start_backoff.fail(w.clock.monotonic() + 60, "the disk is full; it is tried again")
    assert not is_known()

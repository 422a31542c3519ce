"""When a job starts, as far as that is known."""

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

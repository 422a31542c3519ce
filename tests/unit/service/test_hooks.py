"""What on_finish is run for."""

import makers
from turns import ANN

import nexus

# Hooks


def test_on_finish_runs_for_each_job_that_ended_while_it_was_configured(world, monkeypatch):
    """Also when the service died before it ran, and when the job would no longer be kept."""
    calls = []
    monkeypatch.setattr(nexus, "run", lambda argv, timeout_s, environ=None: calls.append(environ["NEXUS_JOB_ID"]) or nexus.Completed(0, ""))
    w = world(history_limit=1)

    def end():
        job_id = w.add()
        w.service.cancellation.cancel(nexus.Choice([job_id], ("pending",)), ANN)
        w.turn(seconds=1)
        return job_id

    end()
    w.config = makers.config(history_limit=1, on_finish="notify me")
    w.crash()
    w.service.hooks.begin()
    ended = [end() for _ in range(3)]
    w.service.housekeeping.trim_history()
    assert w.service.hooks.look() == 0 and calls == ended[:1]
    w.crash()
    w.service.hooks.begin()
    while w.service.hooks.look() == 0:
        pass
    assert calls == ended
    w.service.housekeeping.trim_history()
    assert list(w.service.store.state.jobs) == ended[2:]
    w.crash()
    w.service.hooks.begin()
    assert w.service.hooks.look() is None and len(calls) == 3

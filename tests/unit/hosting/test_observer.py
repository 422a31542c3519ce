"""How often GPUs and memory are looked at, and what is said of a slow nvidia-smi."""

import makers
import pytest

import nexus


def test_until_nvidia_smi_answers(world):
    """What it said last is not relied upon for as long as a slow driver may take."""
    w = world(gpus=1, refresh_rate_seconds=5)
    w.turn(seconds=14)
    assert w.service.status.describe()["gpu_trouble"] is None and w.service.health.check()["is_healthy"]
    w.turn(seconds=2)
    job_id = w.add()
    w.turn()
    words = "nvidia-smi has not answered for 16 s"
    assert w.service.status.describe()["gpu_trouble"] == words and words in w.api(job_id)["waiting_for"]
    assert not w.service.health.check()["is_healthy"]
    w.probe()
    w.turn()
    assert w.job(job_id).status == "running" and w.service.status.describe()["gpu_trouble"] is None


def test_a_slow_nvidia_smi_is_waited_for_and_said(world):
    w = world(gpus=1, refresh_rate_seconds=5)
    w.service.observer.latest = nexus.replace(w.service.observer.observation, took_s=24.0, began_at=w.clock.monotonic() - 24.0)
    w.turn(seconds=120 + 30)
    assert w.service.status.describe()["gpu_trouble"] is None and "nvidia-persistenced" in " ".join(w.service.status.describe()["hints"])


def test_how_often_nvidia_smi_is_asked(world):
    w = world(refresh_rate_seconds=600)
    w.machine.query_gpus = lambda known: (w.clock.pass_(8), (_ for _ in ()).throw(nexus.NexusError("unavailable", "no")))[1]
    assert w.service.probe() == nexus.TROUBLE_INTERVAL_S, "soon again, when it fails"
    w.service.observer.config = makers.config(refresh_rate_seconds=1)
    for took_s, pause_s in ((0.02, 1), (3, 30), (40, 120), (400, 120)):
        w.machine.query_gpus = lambda known, took_s=took_s: (w.clock.pass_(took_s), [makers.gpu(0)])[1]
        assert w.service.probe() == pause_s, "seldom, when it is slow; and within two minutes"
        w.service.observer.observation = w.service.observer.latest
        w.clock.pass_(pause_s)
        assert w.service.observer.find_gpu_error() is None
        w.clock.pass_(3 * took_s + 10)
        assert "has not answered for" in w.service.observer.find_gpu_error()


@pytest.mark.parametrize("took_s, pause_s", [(0.01, 5), (3, 30), (40, 120)])
def test_no_slow_look_puts_off_the_next_for_long(world, monkeypatch, took_s, pause_s):
    """At the memory of jobs, and at their logs."""
    w = world(gpus=1, refresh_rate_seconds=5)
    job_id = w.add()
    w.turn("", f"start {w.add()} 1 4711 777 100")
    monkeypatch.setattr(nexus, "measure_memory", lambda *_: w.clock.pass_(took_s))
    w.service.observer.members = {f"{job_id}-1": []}
    assert w.service.observer.measure_memory() == pause_s
    monkeypatch.setattr(w.service, "running_jobs", lambda: w.clock.pass_(took_s) or [w.job(job_id)])
    assert w.service.log_watch.look() == pytest.approx(max(0.1, min(20 * took_s, 120)))


class OthersLeases:
    """Leases as others have them; `asked`: of which GPUs it was asked."""
    folder = "/run/lock/nexus-leases"

    def __init__(self):
        self.holders, self.asked, self.kept, self.lost = {}, [], {}, []

    def find_holders(self, uuids, used=()):
        self.asked.append((list(uuids), set(used)))
        return {uuid: holder for uuid, holder in self.holders.items() if uuid in uuids}


@pytest.mark.parametrize("former, now, is_otherwise, is_free", [
    ({}, {}, False, True), ({}, {"GPU-1": "bob"}, True, False), ({"GPU-1": "bob"}, {"GPU-1": "bob"}, False, False),
    ({"GPU-1": "bob"}, {}, True, True), ({"GPU-1": "bob"}, {"GPU-1": "eve"}, True, False)])
def test_between_two_readings_it_is_seen_which_gpus_others_take_and_give_back(world, former, now, is_otherwise, is_free):
    """Of a GPU that a job of one's own has nothing is asked: its lease is back a moment before its end is known."""
    w = world(gpus=2)
    job_id = w.add(gpus=1)
    w.turn()
    assert w.job(job_id).current.gpu_uuids == ("GPU-0",)
    observer, leases = w.service.observer, OthersLeases()
    observer.machine.leases, leases.holders = leases, former
    observer.see_leases([w.job(job_id)])
    leases.holders = {"GPU-0": "bob", **now}
    assert observer.see_leases([w.job(job_id)]) is is_otherwise
    assert leases.asked == [(["GPU-1"], set())] * 2
    assert (observer.gpus[1].lease_holder is None) is is_free and observer.gpus[0].lease_holder is None

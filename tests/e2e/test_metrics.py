"""GET /metrics: valid for the official parser, by Prometheus' own rules for names, and true."""

import math

import live
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import config, gpu, mig_slice, ours, running, state
from prometheus_client.parser import text_string_to_metric_families
from stage import Bench

import nexus

OTHER_UNITS = ("milliseconds", "minutes", "hours", "mib", "gb", "percent", "kilobytes", "megabytes")


def parse(text):
    """{name: family}."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(families, name):
    """{labels' values: value} of a family's samples of its own name."""
    family = families[name.removesuffix("_total") if name.endswith("_total") else name]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples if sample.name == name}


def check_rules(text):
    """What promtool checks."""
    families = parse(text)
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == text.count("# HELP")
    for family in families.values():
        assert family.documentation and family.type in ("gauge", "counter") and family.name.islower()
        assert not family.name.endswith(("_total", "_info_total", "_count", "_sum", "_bucket"))
        assert not set(family.name.split("_")) & set(OTHER_UNITS), "base units"
        found = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(found) == len(set(found)), "each sample once"
        for sample in family.samples:
            assert sample.name == family.name + "_total" * (family.type == "counter") and math.isfinite(sample.value)
    return families


@given(st.dictionaries(st.sampled_from(["gpu", "name", "cause"]), st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
       st.floats(allow_nan=False) | st.integers(-2**53, 2**53) | st.booleans())
def test_whatever_labels_say_the_parser_reads_it(labels, number):
    (family,) = text_string_to_metric_families(nexus.format_prometheus([("nexus_x", "A test.", [(labels, number)])]))
    (sample,) = family.samples
    assert (sample.labels, sample.value) == (labels, float(number))


def test_gpus_as_the_status_tells_them():
    """By machine, under the UUID that their driver tells, and by which other exporters there know them."""
    busy = gpu(0, name='A "B" \\ C', memory_used_mib=1024.0, utilization=50.0, temperature=40.0, power_watts=100.5,
               processes=(ours("abc", 1),))
    silent = gpu(1, memory_used_mib=None, memory_total_mib=None, utilization=None)
    there, cut = gpu(0, node="n1", uuid="n1/GPU-7"), mig_slice(1, uuid="MIG-GPU-0/7/0", memory_used_mib=512.0)
    known = state(running("abc", (0,)))
    shown = [nexus.gpu_json(one, known, config().gpu, None, one.node or "gpu1") for one in (busy, silent, there, cut)]
    with Bench() as bench:
        status = {**bench.ask("GET", "/status")[1], "gpu_status": shown}
    families = check_rules(nexus.format_prometheus(nexus.list_metrics(status, {"checks": []}, {})))
    place, far = ("gpu1", "0", 'A "B" \\ C', "GPU-0"), ("n1", "0", "RTX 3090", "GPU-7")
    assert samples(families, "nexus_gpu_memory_used_bytes")[place] == 2**30
    assert samples(families, "nexus_gpu_memory_used_bytes")["gpu1", "0.1", "A100 MIG 1g.10gb", "MIG-GPU-0/7/0"] == 2**29
    assert samples(families, "nexus_gpu_utilization_ratio") == {place: 0.5, far: 0}, "what is not known is left out"
    assert samples(families, "nexus_gpu_power_watts") == {place: 100.5}
    assert list(samples(families, "nexus_gpu_allocated_ratio").values()) == [1, 0, 0, 0]


def test_a_change_that_the_disk_refuses_is_not_counted(monkeypatch):
    with Bench() as bench:
        job_id = bench.add()
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(bench.store.journal, "append", lambda *_: (_ for _ in ()).throw(full))
        assert bench.ask("DELETE", f"/queue/{job_id}")[0] == 503
        monkeypatch.undo()
        assert bench.service.end_counts["cancelled", "killed"] == 0
        assert bench.ask("DELETE", f"/queue/{job_id}")[0] == 204
        child = bench.add(after=[bench.add()])
        bench.ask("DELETE", f"/queue/{bench.ask('GET', '/queue')[1][0]['id']}")
        assert bench.ask("GET", f"/jobs/{child}")[1]["cause"] == "dependency"
        assert bench.service.end_counts == {
            ("completed", ""): 0, ("failed", "exit"): 0, ("cancelled", "killed"): 2, ("cancelled", "dependency"): 1}


@pytest.mark.smoke
def test_metrics_of_a_service_that_works():
    with live.Box(gpus=2, retry_backoff_seconds=0.05) as box:
        for command, status in (("true", "completed"), ("exit 3", "failed"), ("kill -9 $$", "failed")):
            box.wait(box.add(command), status)
        box.wait(box.add("exit 1", retries=1), "failed")
        runs = box.add("sleep 1000", gpus=2)
        box.wait_started(runs)
        box.add("true")
        before = check_rules(box.call("GET", "/metrics")[1])
        assert samples(before, "nexus_jobs") == {("pending",): 1, ("running",): 1}
        assert samples(before, "nexus_jobs_finished_total") == {
            ("cancelled", "killed"): 0, ("completed", ""): 1, ("failed", "exit"): 2, ("failed", "signal"): 1}
        assert list(samples(before, "nexus_gpu_allocated_ratio").values()) == [1, 1]
        box.kill_service()
        box.await_service()
        after = check_rules(box.call("GET", "/metrics")[1])
        assert sum(samples(after, "nexus_jobs_finished_total").values()) == 0, "counters begin anew"

"""GET /metrics: valid for the official parser, by Prometheus' own rules for names, and true."""

import math
import types

import live
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import config, finished, gpu, job, ours, running, state
from prometheus_client.parser import text_string_to_metric_families
from test_server import Bench

import nexus

BASE_UNITS = ("seconds", "bytes", "ratio", "celsius", "watts")
OTHER_UNITS = ("milliseconds", "minutes", "hours", "mib", "gb", "percent", "kilobytes", "megabytes")


def parse(text):
    """{name: family}."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(families, name):
    """{labels' values: value} of a family's samples of its own name."""
    family = families[name.removesuffix("_total") if name.endswith("_total") else name]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples if sample.name == name}


def number(families, name):
    (found,) = samples(families, name).values()
    return found


def check_rules(text):
    """What promtool checks, and that histograms add up."""
    families = parse(text)
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == text.count("# HELP")
    for family in families.values():
        assert family.documentation and family.type in ("gauge", "counter", "histogram") and family.name.islower()
        assert not family.name.endswith(("_total", "_info_total", "_count", "_sum", "_bucket"))
        assert not set(family.name.split("_")) & set(OTHER_UNITS), "base units"
        seen = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(seen) == len(set(seen)), "each sample once"
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == f"{family.name}_total" and sample.value >= 0
            if family.type == "gauge":
                assert sample.name == family.name and math.isfinite(sample.value)
        if family.type == "histogram":
            buckets = [(float(sample.labels["le"]), sample.value) for sample in family.samples if sample.name.endswith("_bucket")]
            assert buckets == sorted(buckets) and [count for _, count in buckets] == sorted(count for _, count in buckets)
            assert buckets[-1] == (math.inf, next(sample.value for sample in family.samples if sample.name.endswith("_count")))
    return families


@given(st.dictionaries(st.sampled_from(["gpu", "name", "cause"]), st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
       st.floats(allow_nan=False) | st.integers(-2**53, 2**53) | st.booleans())
def test_whatever_labels_say_the_parser_reads_it(labels, number):
    names, words = list(labels), tuple(labels.values()) if len(labels) > 1 else "".join(labels.values())
    text = nexus.format_prometheus([("nexus_x", "A test.", lambda seen: {words: number, "ab": None} if labels else number, *names)], {})
    (family,) = text_string_to_metric_families(text)
    (sample,) = family.samples
    assert (sample.labels, sample.value) == (labels, float(number))


@given(st.lists(st.floats(0, 100) | st.sampled_from([1, 5, 10]), max_size=30))
def test_a_histogram_counts_what_is_at_most_its_bounds(durations):
    measured = nexus.Histogram((1, 5, 10))
    for seconds in durations:
        measured.note(seconds)
    families = check_rules(nexus.format_prometheus([("nexus_x_seconds", "A test.", "x")], {"x": measured}))
    found = {sample.labels.get("le", sample.name): sample.value for sample in families["nexus_x_seconds"].samples}
    for bound in (1, 5, 10):
        assert found[str(bound)] == sum(seconds <= bound for seconds in durations)
    assert found["nexus_x_seconds_count"] == len(durations) and found["nexus_x_seconds_sum"] == pytest.approx(sum(durations))


def format_gpus(gpus):
    return nexus.format_prometheus([metric for metric in nexus.METRICS if metric[0].startswith("nexus_gpu_")], {"gpu_status": gpus})


def test_gpus_as_the_status_tells_them():
    busy = gpu(0, name='A "B" \\ C', memory_used_mib=1024.0, utilization=50.0, temperature=40.0, power_watts=100.5, power_limit_watts=350.0,
               processes=(ours("abc", 1),))
    silent = gpu(1, memory_used_mib=None, memory_total_mib=None, utilization=None, is_paused=True)
    lost = gpu(2, fault="it is lost")
    known = state(running("abc", (0,)))
    seen = [nexus.gpu_json(one, known, config().gpu, None, "gpu1") for one in (busy, silent, lost)]
    families = check_rules(format_gpus(seen))
    place = ("gpu1", "0", "GPU-0", 'A "B" \\ C')
    assert samples(families, "nexus_gpu_memory_used_bytes")[place] == 2**30
    known = {place: 0.5, ("gpu1", "2", "GPU-2", "RTX 3090"): 0}
    assert samples(families, "nexus_gpu_utilization_ratio") == known, "what is not known is left out"
    assert [list(samples(families, f"nexus_gpu_{name}").values()) for name in ("power_watts", "power_limit_watts")] == [[100.5], [350]]
    expected = {"jobs": [1, 0, 0], "allocated_ratio": [1, 0, 0], "available": [0, 0, 0], "paused": [0, 1, 0], "faulty": [0, 0, 1]}
    for name, told in expected.items():
        assert list(samples(families, f"nexus_gpu_{name}").values()) == told, name


def test_gpus_of_several_machines():
    """By machine, under the UUID that their driver tells, and by which other exporters there know them."""
    seen = [nexus.gpu_json(one, state(), config().gpu, None, node) for node, one in (
        ("gpu1", gpu(0)), ("n1", gpu(0, node="n1", uuid="n1/GPU-0")), ("n2", gpu(0, node="n2", uuid="n2/GPU-7", memory_used_mib=None)))]
    families = check_rules(format_gpus(seen))
    assert samples(families, "nexus_gpu_available") == {
        ("gpu1", "0", "GPU-0", "RTX 3090"): 1, ("n1", "0", "GPU-0", "RTX 3090"): 1, ("n2", "0", "GPU-7", "RTX 3090"): 1}
    assert ("n2", "0", "GPU-7", "RTX 3090") not in samples(families, "nexus_gpu_memory_used_bytes")


def test_a_box_without_gpus_has_valid_metrics():
    families = check_rules(format_gpus([]))
    assert not any(family.samples for family in families.values())


MOVES = [  # reason, jobs as they have become, [status, cause, count], retries, bounces, how many run times
    ("completed", [finished()], ("completed", "", 1), {}, 0, 1),
    ("failed", [finished(status="failed", cause="cuda-oom", exit_code=1)], ("failed", "cuda-oom", 1), {}, 0, 1),
    ("removed before it ran", [job(status="cancelled", cause="killed")], ("cancelled", "killed", 1), {}, 0, 0),
    ("tried again", [job(started_at=0.0, finished_at=5.0, runtime_seconds=5.0, cause="exit")], ("failed", "exit", 0), {"exit": 1}, 0, 1),
    ("back in the queue", [job(finished_at=5.0, cause=nexus.REQUEUED)], ("failed", "exit", 0), {}, 1, 0),
    ("started", [running()], ("completed", "", 0), {}, 0, 0),
]


@pytest.mark.parametrize("reason, jobs, end, retries, bounces, run_times", MOVES, ids=[move[0] for move in MOVES])
def test_what_becomes_of_jobs_is_counted(reason, jobs, end, retries, bounces, run_times):
    counters = nexus.Counters()
    counters.note_moves(jobs)
    assert counters.ends[end[:2]] == end[2] and sum(counters.ends.values()) == (jobs[0].status in nexus.FINAL)
    assert {cause: count for cause, count in counters.retries.items() if count} == retries
    assert (counters.bounces, sum(counters.run_times.counts)) == (bounces, run_times)


def test_a_change_that_the_disk_refuses_is_not_counted(monkeypatch):
    with Bench() as bench:
        job_id = bench.add()
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(bench.store.journal, "append", lambda *_: (_ for _ in ()).throw(full))
        assert bench.ask("DELETE", f"/queue/{job_id}")[0] == 503
        monkeypatch.undo()
        assert bench.service.counters.ends["cancelled", "killed"] == 0
        assert bench.ask("DELETE", f"/queue/{job_id}")[0] == 204
        child = bench.add(after=[bench.add()])
        bench.ask("DELETE", f"/queue/{bench.ask('GET', '/queue')[1][0]['id']}")
        assert bench.ask("GET", f"/jobs/{child}")[1]["cause"] == "dependency"
        assert bench.service.counters.ends == {
            ("completed", ""): 0, ("failed", "exit"): 0, ("cancelled", "killed"): 2, ("cancelled", "dependency"): 1}


def test_metrics_over_http_without_a_loop():
    def fail(known):
        raise nexus.NexusError("unavailable", "nvidia-smi is silent")

    with Bench() as bench:
        bench.add(priority="high")
        bench.add(priority="low")
        response = bench.respond("GET", "/metrics")
        assert (response.status, response.content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
        families = check_rules(response.body.decode())
        assert samples(families, "nexus_jobs") == {("pending",): 2, ("running",): 0}
        assert samples(families, "nexus_jobs_pending") == {("high",): 1, ("normal",): 0, ("low",): 1}
        assert samples(families, "nexus_build_info") == {(nexus.__version__, bench.service.hash): 1}
        here = (bench.service.node,)
        assert samples(families, "nexus_node_up") == {here: 1} and samples(families, "nexus_node_jobs") == {here: 0}
        assert samples(families, "nexus_node_silence_seconds") == {here: 0} and number(families, "nexus_nvidia_smi_failures_total") == 0
        assert number(families, "nexus_nvidia_smi_up") == 1 and set(samples(families, "nexus_gpu_available").values()) == {1}
        bench.service.machine.gpus = types.SimpleNamespace(query_gpus=fail)
        nexus.probe_gpus(bench.service)
        bench.service.gpu_watch.observation = nexus.replace(bench.service.gpu_watch.latest, took_s=2.5)
        families = check_rules(bench.respond("GET", "/metrics").body.decode())
        assert number(families, "nexus_nvidia_smi_up") == 0 and set(samples(families, "nexus_gpu_available").values()) == {0}
        assert samples(families, "nexus_check_ok")["GPUs",] == 0
        assert number(families, "nexus_nvidia_smi_failures_total") == 1 and number(families, "nexus_nvidia_smi_duration_seconds") == 2.5


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
        assert samples(before, "nexus_job_retries_total") == {("exit",): 1} and number(before, "nexus_job_starts_total") == 6
        count = {name: sample.value for name in ("nexus_job_wait_seconds", "nexus_job_run_seconds", "nexus_loop_turn_seconds")
                 for sample in before[name].samples if sample.name == f"{name}_count"}
        assert (count["nexus_job_wait_seconds"], count["nexus_job_run_seconds"]) == (6, 5) and count["nexus_loop_turn_seconds"] > 5
        assert 0 <= number(before, "nexus_loop_lag_seconds") < 30 and 0 <= number(before, "nexus_nvidia_smi_age_seconds") < 30
        assert number(before, "process_resident_memory_bytes") > 10**7 and number(before, "process_open_fds") > 5
        assert number(before, "process_cpu_seconds_total") > 0 and number(before, "process_threads") > 2
        assert number(before, "nexus_loop_errors_total") == 0
        assert list(samples(before, "nexus_gpu_jobs").values()) == [1, 1]
        shown = box.nexus("metrics", "--prometheus")
        assert shown.returncode == 0 and parse(shown.stdout).keys() == before.keys()
        box.kill_service()
        box.await_service()
        after = check_rules(box.call("GET", "/metrics")[1])
        assert number(after, "nexus_job_starts_total") == 0 and number(after, "nexus_jobs_kept") == 4, "counters begin anew"
        assert number(after, "process_start_time_seconds") > number(before, "process_start_time_seconds")

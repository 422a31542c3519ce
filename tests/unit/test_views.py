"""Section 7: values to what people and programs read."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import GB, NOW, config, finished, foreign, gpu, job, jobs, mig_slice, running, state

import nexus

PLAIN, COLOURFUL, TERMINAL = nexus.Paint(""), nexus.Paint("a-mark"), nexus.Paint("", 80)

# JSON of the API

JOB_KEYS = {
    "id", "name", "group", "user", "node", "command", "cwd", "status", "position", "waiting_for", "reason", "estimated_start",
    "priority", "gpus", "gpu_ids", "gpu_mem_mib", "gpu_index", "gpu_indices", "gpu_uuids", "created_at", "started_at",
    "finished_at", "runtime_seconds", "exit_code", "signal", "cause", "cause_line", "attempt", "retries",
    "timeout_seconds", "expected_time", "after", "pid", "session", "log_dir", "peak_gpu_mem_mib", "mean_gpu_util",
    "peak_rss_mib", "cpu_seconds", "snapshot", "status_history"}


def test_a_job_has_every_key_of_the_api():
    assert set(nexus.job_json(job(), NOW, "here")) >= JOB_KEYS


FAILED = nexus.Attempt(1, "n2", gpu_indices=(0, 1), started_at=NOW - 60, finished_at=NOW, runtime_seconds=60.04, exit_code=3,
                       cause="exit", cause_line="no data", last_line="done", peak_rss_mib=512.0)
JOBS = [  # reason, job, keys and what they say
    ("pending", job("abc", gpu_ids=(0, 1), priority=0), {
        "id": "abc", "status": "pending", "node": "gpu1", "position": 2, "waiting_for": "GPU 0 runs job xyz", "gpus": 1,
        "gpu_ids": (0, 1), "gpu_index": None, "gpu_indices": (), "created_at": "2024-10-24T15:29:15Z",
        "started_at": None, "runtime_seconds": None, "cause": None, "attempt": 0, "estimated_start": "2024-10-24T15:30:25Z"}),
    ("running: its time so far", running("abc", (2, 3), stop_cause="killed"), {
        "status": "running", "gpus": 2, "gpu_index": 2, "gpu_indices": (2, 3), "gpu_uuids": ("GPU-2", "GPU-3"),
        "started_at": "2024-10-24T15:29:15Z", "runtime_seconds": 60.0, "attempt": 1, "stopping": "killed"}),
    ("a clock that went back", running("abc", started_at=NOW + 5), {"runtime_seconds": 0.0}),
    ("done: its time as its runner measured it", finished("abc", runtime_seconds=12.34567), {
        "status": "completed", "exit_code": 0, "runtime_seconds": 12.346, "finished_at": "2024-10-24T15:30:15Z"}),
    ("failed", finished("abc", status="failed", exit_code=137, signal=9, cause="signal", cause_line="Killed"), {
        "exit_code": 137, "signal": 9, "cause": "signal", "cause_line": "Killed"}),
    ("its attempts before", job("abc", retries=2, retry_at=NOW + 5, attempts=(FAILED,)), {
        "attempt": 1, "retries": 2, "retry_at": "2024-10-24T15:30:20Z", "started_at": None, "exit_code": None, "gpu_indices": (),
        "attempts": [{
            "attempt": 1, "started_at": "2024-10-24T15:29:15Z", "finished_at": "2024-10-24T15:30:15Z", "runtime_seconds": 60.04,
            "exit_code": 3, "signal": None, "cause": "exit", "cause_line": "no data", "last_line": "done", "outcome": "exit 3",
            "gpu_indices": (0, 1), "gpu_uuids": (), "gpu_places": ["0", "1"], "node": "n2",
            "stopped_by": None, "pid": None, "session": None, "peak_rss_mib": 512.0, "cpu_seconds": None,
            "peak_gpu_mem_mib": None, "mean_gpu_util": None, "notes": (), "slurm_id": None, "processes_left": None}]}),
    ("what it took", finished("abc", peak_gpu_mem_mib=1000.0, mean_gpu_util=45.678, peak_rss_mib=2000.04, cpu_seconds=12.34), {
        "peak_gpu_mem_mib": 1000.0, "mean_gpu_util": 45.7, "peak_rss_mib": 2000.0, "cpu_seconds": 12.3}),
    ("its history", job(status_history=(("pending", NOW), ("cancelled", NOW + 1)), status="cancelled"), {
        "status_history": [["pending", "2024-10-24T15:30:15Z"], ["cancelled", "2024-10-24T15:30:16Z"]]}),
]


@pytest.mark.parametrize("reason, one, expected", JOBS, ids=[case[0] for case in JOBS])
def test_job_json(reason, one, expected):
    made = nexus.job_json(one, NOW, "gpu1", position=2, waiting_for="GPU 0 runs job xyz", estimated_start=nexus.format_time(NOW + 10))
    assert {key: made[key] for key in expected} == expected, reason


def test_what_is_known_just_now_is_its_last_attempts_too():
    one = running("abc", (0,), attempts=(FAILED,), retries=1)
    made = nexus.job_json(one, NOW, "here", runtime_seconds=7.5, peak_rss_mib=512.0, cpu_seconds=3.0, rss_mib=100.0)
    last = made["attempts"][-1]
    assert {name: made[name] for name in last if name not in ("node", "stopped_by")} == {
        name: fact for name, fact in last.items() if name not in ("node", "stopped_by")}
    assert (last["runtime_seconds"], last["peak_rss_mib"], made["rss_mib"], made["attempts"][0]["cause"]) == (7.5, 512.0, 100.0, "exit")


@given(jobs)
def test_a_job_shows_as_json_without_its_environment(one):
    marked = nexus.begin_attempt(nexus.replace(one, environment="digest-of-secrets"), nonce="nonce-of-this-attempt", started_at=NOW)
    text = json.dumps(nexus.job_json(marked, NOW, "here"))
    assert "digest-of-secrets" not in text and "nonce-of-this-attempt" not in text


PLANNED = {"position": 3, "waiting_for": "GPU 0 runs job xyz", "reason": {"code": "resources"}, "estimated_start": None}


def as_json(content):
    return json.loads(nexus.encode_json(content))


@given(st.lists(jobs, max_size=5), st.booleans(), st.data())
def test_the_text_of_a_job_says_what_its_json_says(some, is_public, data):
    """Also when it is asked for again, of another version, among jobs that have more or less in common with it."""
    texts = nexus.JobTexts(is_public)
    versions = [nexus.replace(one, id=f"j{number % 3}", attempts=()) for number, one in enumerate(some)]
    for one in data.draw(st.permutations(versions * 2)):
        whole = nexus.job_json(one, NOW, "n1", **PLANNED)
        shown = nexus.hide_private(whole, nexus.PUBLIC_JOB_KEYS) if is_public else whole
        text = texts.format(one, {**PLANNED, **nexus.place_json(one, "n1")}, 2)
        assert json.loads(text) == as_json(shown)
    assert len(texts.kept) <= 2


@given(jobs, st.lists(st.sampled_from(sorted(nexus.JOB)), min_size=1, unique=True))
def test_some_fields_of_a_job_are_those_of_all_its_json(one, fields):
    whole = nexus.job_json(one, NOW, "n1", **PLANNED)
    assert as_json(nexus.pick_json(one, NOW, "n1", fields, **PLANNED)) == as_json(nexus.pick(whole, fields))


GPUS = [  # reason, GPU, jobs, trouble, is available, why not, used by, line of the snapshot
    ("free", gpu(0), [], None, True, None, None, "GPU 0 (RTX 3090, 24GB): Available"),
    ("another user's", gpu(2, processes=(foreign(),)), [], None, False, "is in use by bob (pid 4242 python, 16GB)",
     "bob (pid 4242 python, 16GB)", "GPU 2 (RTX 3090, 24GB): In use by bob (pid 4242 python, 16GB)"),
    ("lost", gpu(1, fault="GPU is lost", memory_total_mib=None), [], None, False, "is unusable (GPU is lost)", None,
     "GPU 1 (RTX 3090): Unusable (GPU is lost)"),
    ("paused", gpu(0, is_paused=True), [], None, False, "is paused", None, "GPU 0 (RTX 3090, 24GB): Paused"),
    ("paused while bob uses it", gpu(0, is_paused=True, processes=(foreign(),)), [], None, False, "is paused", None,
     "GPU 0 (RTX 3090, 24GB): Paused"),
    ("its memory is in use, nobody knows by whom", gpu(0, memory_used_mib=20 * GB), [], None, False,
     "is in use by processes that cannot be seen (20GB)", "processes that cannot be seen (20GB)",
     "GPU 0 (RTX 3090, 24GB): In use by processes that cannot be seen (20GB)"),
    ("cut into nothing", gpu(0, is_mig=True), [], None, False,
     "is in MIG mode without slices (sudo nvidia-smi mig -cgi PROFILE -C makes them)", None,
     "GPU 0 (RTX 3090, 24GB): In MIG mode without slices (sudo nvidia-smi mig -cgi PROFILE -C makes them)"),
    ("a slice", mig_slice(1), [], None, True, None, None, "GPU 0.1 (A100 MIG 1g.10gb, 10GB): Available"),
    ("a node's slice", mig_slice(1, node="n1"), [], None, True, None, None, "GPU n1:0.1 (A100 MIG 1g.10gb, 10GB): Available"),
    ("leased", gpu(0, lease_holder="Bob"), [], None, False, "is held by the nexus of Bob", None,
     "GPU 0 (RTX 3090, 24GB): Held by the nexus of Bob"),
    ("cannot be read", gpu(0), [], "nvidia-smi is silent", False, "cannot be read", None,
     "GPU 0 (RTX 3090, 24GB): Cannot be read"),
    ("a name of many lines", gpu(0, name="RTX\n\x1b[2J3090"), [], None, True, None, None,
     "GPU 0 (RTX  [2J3090, 24GB): Available"),
]


@pytest.mark.parametrize("reason, one, jobs, trouble, is_available, unavailable, used_by, line", GPUS,
                         ids=[case[0] for case in GPUS])
def test_an_idle_gpu(reason, one, jobs, trouble, is_available, unavailable, used_by, line):
    made = nexus.gpu_json(one, state(*jobs), config().gpu, trouble)
    assert (made["is_available"], made["unavailable"], made["used_by"]) == (is_available, unavailable, used_by), reason
    assert (made["state"] == "In use") == (": In use" in line), reason
    assert PLAIN.join(nexus.format_gpu(made, {}, PLAIN)) == line + "\n"
    json.dumps(made)


def test_a_stranger_beside_a_job_is_shown_wherever_the_job_is():
    bob, alone = foreign(), running("abc", gpus=0.5)
    for facts in ({}, {"is_paused": True}):
        made = status([alone, running("abd", gpus=0.5)], [gpu(0, processes=(bob,), **facts), gpu(1)])
        assert made["gpu_status"][0]["used_by"] == "bob (pid 4242 python, 16GB)"
        text = nexus.format_snapshot(made, PLAIN)
        assert text.count("bob") == 1 and re.search(r"Job ID: abd\n(  .*\n)*  Also used by: bob \(pid 4242 python, 16GB\)\n", text)
        top = nexus.list_top(made, [], 0, [], [], PLAIN)
        assert [job_id for line, job_id in top if "(also used by bob (pid 4242 python, 16GB)) python train.py" in line] == ["abc", "abd"]
        shown = nexus.format_job(nexus.job_json(alone, NOW, "here"), PLAIN, (), made["gpu_status"])
        assert "  also on GPU 0: bob (pid 4242 python, 16GB)\n" in shown
        used = nexus.describe_gpu_use(made["gpu_status"][0], PLAIN)
        assert used.endswith("; also used by bob (pid 4242 python, 16GB)")
    assert "also" not in nexus.format_job(nexus.job_json(running("abe", (1,)), NOW, "here"), PLAIN, (), made["gpu_status"])


SHARED = [  # reason, jobs, allocated, ids
    ("nobody's", [], 0, []), ("a share", [running("abc", gpus=0.5)], 0.5, ["abc"]),
    ("two shares", [running("abc", gpus=0.5), running("abd", gpus=0.3)], 0.8, ["abc", "abd"]),
    ("the last of one and a half", [running("abc", (1, 0), gpus=1.5)], 0.5, ["abc"]),
    ("after a CUDA out-of-memory", [running("abc", gpus=0.5, exclusive=True)], 1, ["abc"]),
]


@pytest.mark.parametrize("reason, jobs, allocated, ids", SHARED, ids=[case[0] for case in SHARED])
def test_what_of_a_gpu_is_given_out(reason, jobs, allocated, ids):
    made = nexus.gpu_json(gpu(0, utilization_mean=45.25, utilization_peak=99.0), state(*jobs), config().gpu, None)
    assert (made["allocated"], made["job_ids"], made["is_available"]) == (allocated, ids, not jobs), reason
    assert (made["utilization_mean"], made["utilization_peak"]) == (45.2, 99.0)


def test_a_gpu_is_told_by_its_uuid():
    made = nexus.gpu_json(gpu(0, uuid="GPU-1"), state(running("abc", (1,))), config().gpu, None)
    assert made["job_ids"] == ["abc"], "it had index 1 before the reboot"


# The snapshot


def status(jobs=(), gpus=None, trouble=None, **facts):
    """What GET /status answers; of one idle GPU, if not said otherwise."""
    made, gpus = state(*jobs), [gpu(0)] if gpus is None else gpus
    return {
        "is_paused": False, "queued_jobs": len(made.pending),
        **{f"{word}_jobs": sum(one.status == word for one in made.jobs.values()) for word in nexus.FINAL},
        "gpu_trouble": trouble,
        "gpu_status": [nexus.gpu_json(one, made, config().gpu, trouble) for one in gpus],
        "running_jobs": [{**nexus.job_json(one, NOW, "here"), "rss_mib": 2048.0, "cpu_percent": 99.5}
                         for one in made.running.values()],
        "hints": [], "bad_checks": [], "nodes": [], "version": "0.1.0", "uptime_seconds": 3600.4,
        "queued_by_priority": {"high": 1, "normal": 2, "low": 0},
        "host": {"name": "gpu1", "cpu_percent": 12.0, "memory_used_gb": 40.25, "memory_total_gb": 128.0}, **facts}


SNAPSHOTS = [  # reason, status, part
    ("one job, not 1 jobs", status([job()]), "Queue: 1 job pending [RUNNING]\nHistory: 0 jobs completed\n"),
    ("who failed has not completed", status([finished("abc"), finished("abd", status="failed"), finished("abe", status="cancelled")]),
     "History: 1 job completed, 1 failed, 1 cancelled\n"),
    ("nobody was cancelled", status([finished("abd", status="failed")]), "History: 0 jobs completed, 1 failed\n"),
    ("no GPU", status(gpus=()), "GPUs:\nnone\n"),
    ("the driver does not answer", status(gpus=(), trouble="nvidia-smi is silent"), "GPUs:\nnvidia-smi is silent\n"),
    ("CPU jobs have a place of their own", status([running("abc", ())], ()), "\nCPU:\n  Job ID: abc\n"),
    ("a job on a GPU that was lost under it", status([running("abc", (0,))], [gpu(0, fault="GPU is lost")]),
     "GPU 0 (RTX 3090, 24GB): GPU is lost\n  Job ID: abc\n"),
    ("two GPUs, one job: at both", status([running("abc", (0, 1))], [gpu(0), gpu(1)]),
     "  Started: 15:29\nGPU 1 (RTX 3090, 24GB):\n  Job ID: abc\n"),
    ("it is being stopped", status([running("abc", (0,), stop_cause="killed")]), "  Job ID: abc (stopping: killed)\n"),
    ("a command that would clear the screen", status([running("abc", (0,), command="echo '\x1b[2J'\nls")]),
     "  Command: echo ' [2J' ls\n"),
    ("what to do next", status(hints=["nexus add"]), "\n\nhint: nexus add\n"),
]


COLOURS = [  # what, text with its colour
    ("the queue", "\x1b[34mQueue: 1 job pending\x1b[0m"), ("its state", "\x1b[33m[RUNNING]\x1b[0m"),
    ("headers", "\x1b[1mGPUs:\x1b[0m"), ("free GPUs", "\x1b[92mAvailable\x1b[0m"),
    ("job ids", "Job ID: \x1b[35mabc\x1b[0m"),
    ("commands", "Command: \x1b[1mpython train.py\x1b[0m"), ("runtimes", "Runtime: \x1b[36m1m\x1b[0m"),
    ("times", "Started: \x1b[36m15:29\x1b[0m"), ("errors", "\x1b[31mUnusable (GPU is lost)\x1b[0m"),
]


def test_colours():
    made = status([running("abc", (0,)), job("qqq", 2)], [gpu(0), gpu(1), gpu(2, fault="GPU is lost")])
    assert [what for what, text in COLOURS if text not in nexus.format_snapshot(made, COLOURFUL)] == []


def uncoloured(text):
    return re.sub("\x1b\\[[0-9]+m", "", text)


def test_colour_changes_nothing_else():
    made = status([running("abc", (0,)), running("cpu", (), number=5), job("qqq", 2)], [gpu(0), gpu(1, is_paused=True)])
    listed = [nexus.job_json(one, NOW, "here") for one in (job("abc"), running("abd"), finished("abe"))]
    health = {"is_healthy": False, "checks": [{"name": "disk", "is_ok": False, "reading": "full"}]}
    for format in (lambda paint: nexus.format_snapshot(made, paint),
                   lambda paint: nexus.format_detailed(made, health, paint),
                   lambda paint: nexus.format_queue(listed, nexus.Paint(paint.mark, 80)),
                   lambda paint: nexus.format_jobs(listed, nexus.Paint(paint.mark, 80)),
                   lambda paint: nexus.format_job(listed[1], paint), lambda paint: nexus.format_health(health, paint)):
        assert uncoloured(format(COLOURFUL)) == format(PLAIN) != format(COLOURFUL)


def test_detailed():
    made = nexus.format_detailed(pool(
        [gpu(0, temperature=61.0, power_watts=250.4), gpu(1, is_paused=True), gpu_of("n2", 1)], node("n2", gpus=1, **AWAY),
        jobs=[running("abc", (0,)), running("cpu", (), number=2)]), {"is_healthy": True}, PLAIN)
    for line in ("Status: running", "Uptime: 3600 seconds (1h)", "  Total Jobs: 0", "  High Priority: 1",
                 "  GPU 0: 100% allocated (memory 0GB of 24GB, 0% busy, 61°C, 250 W)",
                 "  GPU 1: PAUSED (memory 0GB of 24GB, 0% busy)", "  GPU n2:1: 0% allocated (memory 0GB of 80GB, 0% busy)",
                 "Nodes:", "  n2: 1 GPU, 0 jobs, unknown since 10-24 14:02: cannot reach n2: No route to host",
                 "Host: gpu1, CPU 12%, memory 40.2 of 128GB", "Active Jobs: 2",
                 "  abc: python train.py (gpu1, GPUs: [0], memory 2GB, CPU 99.5%)",
                 "  cpu: python train.py (gpu1, no GPU, memory 2GB, CPU 99.5%)", "Health: HEALTHY"):
        assert line in made.splitlines()


# Lists


def listed(*jobs, **facts):
    return [{**nexus.job_json(one, NOW, "here"), **facts} for one in jobs]


def test_the_queue_to_a_file_is_one_line_a_job():
    waiting = listed(job("abc", name="lr 1"), job("abd", gpus=0, priority=0), waiting_for="GPU 0 is paused",
                     estimated_start="2024-10-24T15:40:15Z")
    made = nexus.format_queue(waiting + listed(job("abe", gpus=0.5, priority=2)), PLAIN)
    assert made == """\
ID   PRIORITY  GPUS  ADDED        STARTS       NAME  COMMAND          WAITING FOR
abc  normal    1     10-24 15:29  10-24 15:40  lr 1  python train.py  GPU 0 is paused
abd  high      0     10-24 15:29  10-24 15:40  -     python train.py  GPU 0 is paused
abe  low       0.5   10-24 15:29  -            -     python train.py
"""


def test_the_queue_on_a_terminal_gives_the_reason_a_line_of_its_own_once():
    made = nexus.format_queue(listed(job("abc"), job("abd"), waiting_for="GPU 0 is paused"), TERMINAL)
    assert [line.split()[0] for line in made.splitlines() if "GPU 0 is paused" not in line] == ["ID", "abc", "abd"]
    assert [number for number, line in enumerate(made.splitlines()) if "GPU 0 is paused" in line] == [2]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_lists_fit_the_screen(width):
    many = listed(job("abc", command="python train.py " + "x" * 500 + "\n"), job("abd", command="python 训练.py " + "数" * 500),
                  waiting_for="GPU 0 runs job " + "y" * 500)
    for line in (nexus.format_queue(many, nexus.Paint("", width)) + nexus.format_jobs(many, nexus.Paint("", width))).splitlines():
        assert nexus.count_columns(line) <= width


OUTCOMES = [  # reason, facts, words
    ("it went well", {"exit_code": 0}, "exit 0"), ("it did not", {"exit_code": 3, "cause": "exit"}, "exit 3"),
    ("a signal", {"exit_code": 137, "signal": 9, "cause": "signal"}, "SIGKILL"),
    ("a signal without a usual name", {"exit_code": 162, "signal": 34, "cause": "signal"}, "signal 34"),
    ("taken out of the queue", {"status": "cancelled", "cause": "killed", "started_at": None}, "removed"),
    ("somebody killed it", {"exit_code": 143, "signal": 15, "cause": "killed"}, "killed"),
    ("it could not be started", {"cause": "launch"}, "launch"), ("nothing yet", {"status": "running", "finished_at": None}, None),
]


@pytest.mark.parametrize("reason, facts, words", OUTCOMES)
def test_find_outcome(reason, facts, words):
    ended = finished("abc", **{"status": "failed", "exit_code": None, **facts})
    shown = nexus.job_json(ended, NOW, "here")
    assert shown["outcome"] == words and all(attempt["outcome"] == words for attempt in shown["attempts"]), reason


SHOWN = [  # reason, job, line of `nexus show`
    ("its outcome", finished("abc", exit_code=3, status="failed", cause="exit"), "Job abc: failed (exit 3)"),
    ("exit code 0 is a fact", finished("abc"), "  exit code: 0"),
    ("so is GPU 0", running("abc", (0,)), "  where: GPU 0 of here"),
    ("and no GPU at all", running("abc", ()), "  GPUs: 0"),
    ("and the highest priority, by its name", job("abc", priority=0), "  priority: high"),
    ("any other priority by its number", job("abc", priority=7), "  priority: 7"),
    ("times of the reader's clock", finished("abc"), "  ended: 2024-10-24 15:30:15"),
    ("its runtime", finished("abc"), "  runtime: 1m"),
    ("harmless", job("abc", command="a\x1b[2J\nb"), "  command: a [2J b"),
    ("several GPUs", running("abc", (0, 1)), "  where: GPU 0, 1 of here"),
    ("a time limit", job("abc", timeout_seconds=5400), "  time limit: 1h 30m"),
    ("what it asked of a GPU", job("abc", gpu_mem_mib=10240), "  GPU memory: 10GB free on each"),
    ("a flag", job("abc", tty=True), "  terminal: yes"),
    ("what it used", finished("abc", peak_rss_mib=13.8), "  peak memory 14MB"),
    ("of its GPUs", finished("abc", peak_gpu_mem_mib=20480.0), "  GPU memory up to 20GB"),
    ("and how much", finished("abc", mean_gpu_util=49.6), "  GPUs 50% busy on average"),
    ("what ended it", finished("abc", status="failed", signal=9, cause="signal", exit_code=137), "  signal: SIGKILL"),
    ("its attempts before", job("abc", attempts=(FAILED,)), "  attempt 1: exit 3 on GPU 0, 1 of n2, 2024-10-24 15:29:15, 1m (no data)"),
    ("and the present one", running("abc", attempts=(FAILED,)), "  attempt 2: running on GPU 0, 2024-10-24 15:29:15, 1m"),
    ("and the last one", finished("abc", attempts=(FAILED,)), "  attempt 2: exit 0 on GPU 0, 2024-10-24 15:29:15, 1m"),
    ("when it is tried again", job("abc", retry_at=NOW + 5), "  next attempt: 2024-10-24 15:30:20"),
    ("a share", job("abc", gpus=1.5), "  GPUs: 1.5"), ("those before it", job("abc", after=("abd", "abe")), "  after: abd, abe"),
    ("what it went through", job("abc", status_history=(("pending", NOW),)), "  history: pending 15:30:15"),
]


@pytest.mark.parametrize("reason, one, line", SHOWN, ids=[case[0] for case in SHOWN])
def test_format_job(reason, one, line):
    assert line in nexus.format_job(nexus.job_json(one, NOW, "here"), PLAIN).splitlines(), reason


def test_show_groups_what_it_says():
    text = nexus.format_job(nexus.job_json(finished("abc", peak_rss_mib=2048.0), NOW, "here"), PLAIN, ["epoch 1", "epoch 2"])
    assert [line for line in text.splitlines() if not line.startswith("  ")] == [
        "Job abc: completed (exit 0)", "Asked for", "Where and when", "How it ended", "What it used", "Last lines"]
    assert text.endswith("What it used\n  peak memory 2GB\nLast lines\n  epoch 1\n  epoch 2\n")


def test_format_health():
    health = {"is_healthy": False, "checks": [
        {"name": "GPUs", "is_ok": True, "reading": "4 read 2s ago"},
        {"name": "disk", "is_ok": False, "reading": "0GB left"}]}
    assert nexus.format_health(health, PLAIN) == "ok   GPUs: 4 read 2s ago\nBAD  disk: 0GB left\nUNHEALTHY\n"


def test_why_tells_the_decision_gpu_by_gpu():
    told = {"id": "abc", "status": "pending", "why": "GPU 0 runs job xyz", "facts": ["it is first in the queue"],
            "gpus": [{"node": "here", "place": "0", "index": 0, "verdict": "runs job xyz"},
                     {"node": "here", "place": "1", "index": 1, "verdict": None}]}
    assert nexus.format_why(told, PLAIN) == """\
Job abc waits: GPU 0 runs job xyz
  it is first in the queue
  GPU 0: runs job xyz
  GPU 1: it could have this one
"""
    ended = {**told, "status": "failed", "why": "ValueError: \x1b[2Jx", "facts": [], "gpus": []}
    assert nexus.format_why(ended, PLAIN) == "Job abc is failed: ValueError:  [2Jx\n"


# nexus top


def group_of(name, position=0, hold=None, **counts):
    return {"name": name, "position": position, "hold": hold,
            **{each: counts.get(each, 0) for each in ("pending", "running", "completed", "failed", "cancelled")}}


def test_top_names_the_types_of_gpus_where_there_are_several():
    shown = nexus.list_top(status(gpus=[mig_slice(0), mig_slice(1, 20), gpu(1)]), [], 0, [], [], PLAIN)
    assert [line.split()[:3] for line, _ in shown[3:] if line] == [
        ["GPU", "TYPE", "UTIL"], ["0.0", "1g.10gb", "-"], ["0.1", "2g.20gb", "-"], ["1", "RTX", "3090"]]
    assert "TYPE" not in str(nexus.list_top(status(gpus=[gpu(0), gpu(1)]), [], 0, [], [], PLAIN))


def test_top_of_eight_gpus_fits_a_small_terminal():
    """Each GPU has a row with its job; who else uses one is named; what waits stands below, a group in one row."""
    busy = {"utilization": 98.0, "memory_used_mib": 20 * GB, "temperature": 70.0, "power_watts": 300.0}
    gpus = [*(gpu(index, **busy) for index in range(4)), gpu(4, processes=(foreign(),)), gpu(5, is_paused=True),
            gpu(6, fault="GPU is lost"), gpu(7)]
    made = status([running("abc", (0, 1, 2), command="torchrun train.py --lr 1e-3 " + "x" * 100, started_at=NOW - 8100),
                   running("abd", (3,), number=2, stop_cause="killed"), running("abe", (), number=3, name="load"),
                   *(job(f"qq{letter}", number) for number, letter in enumerate("abcdefgh", 4))], gpus)
    waiting = listed(job("qqa", gpus=2), job("qqb"), waiting_for="no GPU is free", position=1)
    waiting_groups = [group_of("old", completed=3), group_of("sweep", pending=4, running=1, failed=2, hold="paused by ann")]
    shown = nexus.list_top(made, waiting, 2, waiting_groups, listed(finished("zzz", number=9)), TERMINAL)
    text = "\n".join(line for line, _ in shown)
    assert all(nexus.count_columns(line) <= 80 for line in text.splitlines()) and len(text.splitlines()) <= 23, text
    host, _, _, *rows = text.splitlines()
    assert host == "gpu1  CPU 12%, memory 40.2 of 128GB" and "old" not in text
    assert "\n".join(rows) == """\
GPU  UTIL  MEMORY     TEMP  POWER  JOB  RUNTIME  COMMAND
0    98%   20GB/24GB  70C   300W   abc  2h 15m   torchrun train.py…xxxxxxxxxxxxx
1    98%   20GB/24GB  70C   300W   abc  2h 15m   torchrun train.py…xxxxxxxxxxxxx
2    98%   20GB/24GB  70C   300W   abc  2h 15m   torchrun train.py…xxxxxxxxxxxxx
3    98%   20GB/24GB  70C   300W   abd  1m       (stopping: killed…thon train.py
4    0%    0GB/24GB   -     -      -    -        in use by bob (pi…python, 16GB)
5    0%    0GB/24GB   -     -      -    -        paused
6    0%    0GB/24GB   -     -      -    -        unusable (GPU is lost)
7    0%    0GB/24GB   -     -      -    -        available
-    -     -          -     -      abe  1m       load: python train.py

WAITING  GPUS  STARTS  COMMAND          WHY
group    -     -       sweep            7 jobs: 1 running, 2 fa…g; paused by ann
qqa      2     -       python train.py  no GPU is free
qqb      1     -       python train.py  no GPU is free
… 2 more jobs

FINISHED  RESULT  RUNTIME  COMMAND
zzz       exit 0  1m       python train.py"""
    assert [job_id for _, job_id in shown if job_id] == ["abc", "abc", "abc", "abd", "abe", "qqa", "qqb", "zzz"]


# Where there are nodes


def node(name, **facts):
    """What GET /nodes tells of one."""
    return {"name": name, "gpus": 0, "gpu_names": [], "running_jobs": 0, "is_reachable": True, "is_leaving": False, "trouble": None,
            "hint": None, "unknown_since": None, **facts}


def gpu_of(name, index, **fields):
    return gpu(index, node=name, uuid=f"{name}/GPU-{index}", name="H100", memory_total_mib=80 * GB, **fields)


def pool(gpus, *nodes, jobs=(), **facts):
    """What GET /status answers where there are nodes, beside this machine, which is called gpu1."""
    made = status(jobs, gpus, nodes=[node("gpu1"), *nodes], **facts)
    for told in made["gpu_status"]:
        told["node"] = told["place"].rpartition(":")[0] or "gpu1"
    for told in made["running_jobs"]:
        one = next(one for one in jobs if one.id == told["id"])
        told["node"], told["unknown_since"] = one.current.node or "gpu1", next((
            each["unknown_since"] for each in nodes if each["name"] == one.current.node), None)
    return made


AWAY = {"unknown_since": "2024-10-24T14:02:00Z", "is_reachable": False, "trouble": "cannot reach n2: No route to host",
        "hint": "try it by hand: ssh n2"}


POOLS = [  # reason, status, part of the snapshot
    ("never reached", pool([], node("n2", **AWAY)), "GPUs:\nn2: unknown since 10-24 14:02: cannot reach"),
    ("its own queue is paused", pool([gpu_of("n1", 0)], node("n1", trouble="its queue is paused")), "GPUs:\nn1: its queue is paused\n"),
    ("the head's driver is silent", pool([gpu_of("n1", 0)], node("n1"), trouble="nvidia-smi is silent"), "GPUs:\nnvidia-smi is silent\n"),
]


@pytest.mark.parametrize("reason, given, part", [*SNAPSHOTS, *POOLS], ids=[case[0] for case in [*SNAPSHOTS, *POOLS]])
def test_format_snapshot(reason, given, part):
    assert part in nexus.format_snapshot(given, PLAIN), reason


def test_lists_tell_the_machine_where_there_are_several():
    here, there, waits = job("abd", only_node="", number=2), job("abe", only_node="n1", number=3), job("abc")
    made = [nexus.job_json(one, NOW, where) for one, where in ((waits, None), (here, "gpu1"), (there, "n1"))]
    assert nexus.format_queue(made, PLAIN) == """\
ID   NODE  GPUS  ADDED        COMMAND          WAITING FOR
abc  any   1     10-24 15:29  python train.py
abd  gpu1  1     10-24 15:29  python train.py
abe  n1    1     10-24 15:29  python train.py
"""
    ran = [nexus.job_json(finished("abf", node="n1"), NOW, "n1"),
           nexus.job_json(finished("abg", status="failed", exit_code=3, cause="exit"), NOW, "gpu1"),
           {**nexus.job_json(running("abh", (1,), node="n1"), NOW, "n1"), "unknown_since": "2024-10-24T14:02:00Z"}]
    assert nexus.format_jobs([made[0], *ran], PLAIN) == """\
ID   STATUS     NODE  GPU  RESULT   RUNTIME  STARTED      FINISHED     COMMAND
abc  pending    -     -    -        -        -            -            python train.py
abf  completed  n1    0    exit 0   1m       10-24 15:29  10-24 15:30  python train.py
abg  failed     gpu1  0    exit 3   1m       10-24 15:29  10-24 15:30  python train.py
abh  running    n1    1    unknown  1m       10-24 15:29  -            python train.py
"""
    assert "FINISHED" not in nexus.format_jobs([ran[2]], PLAIN)


METRICS = [  # reason, jobs, part of what `nexus metrics` says
    ("nothing yet", [], "Total Jobs: 0\nAvg Execution Time: unknown\nMedian Execution Time: unknown\n\nGPU"),
    ("mean, median", [finished("aaa", runtime_seconds=1.0), finished("bbb", status="failed", cause="timeout", runtime_seconds=2.0),
                              finished("ccc", status="failed", cause="exit", runtime_seconds=6.0),
                              finished("ddd", status="cancelled", started_at=None, runtime_seconds=0.0, cause="killed")],
     "Total Jobs: 4 (1 completed, 2 failed, 1 cancelled)\nAvg Execution Time: 3s\nMedian Execution Time: 2s\n"),
    ("GPUs", [], "GPU Utilization (last hour):\n  GPU 0: 45.2% avg, 99% peak\n  GPU 1: unknown avg, unknown peak (PAUSED)\n"),
]


@pytest.mark.parametrize("reason, jobs, part", METRICS, ids=[case[0] for case in METRICS])
def test_metrics(reason, jobs, part):
    seen = status(gpus=[gpu(0, utilization_mean=45.25, utilization_peak=99.0), gpu(1, is_paused=True)])
    made = nexus.make_metrics(seen, listed(*jobs))
    assert part in nexus.format_metrics(made, PLAIN), reason
    assert uncoloured(nexus.format_metrics(made, COLOURFUL)) == nexus.format_metrics(made, PLAIN)
    assert json.loads(json.dumps(made)) == made and made["total_jobs"] == sum(made["by_status"].values())


def test_each_field_of_the_form_has_a_label_in_words():
    rows = nexus.form_rows()
    assert {row["name"] for row in rows} >= nexus.FORM_LABELS.keys()
    labels = [row["label"] for row in rows]
    assert len({*labels}) == len(labels) and not [label for label in labels if "_" in label or not label[0].isupper()]

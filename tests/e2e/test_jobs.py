"""What users ask of a queue for GPUs, with whole services: shares, memory, retries, groups, job files, hooks, estimates."""

import json
import os
import shutil
import subprocess
import sys

import live
import pytest
import shared
from test_conda import Conda

import nexus

OOM = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity)"


def cli(box, *words, code=0, **options):
    """What a command prints; its exit code is as expected."""
    done = box.nexus(*words, **options)
    assert done.returncode == code, (words, done.stdout, done.stderr, box.log()[-3000:])
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def service():
    with shared.Service(gpus=4, cpu_slots=10, retry_backoff_seconds=0.2, kill_grace_seconds=1) as made:
        yield made


@pytest.fixture
def box(service):
    with service.lend() as box:
        yield box


def use(box, count):
    """Have only so many of its GPUs be used."""
    for index in range(count, 4):
        box.ask("POST", f"/gpus/{index}/pause")


def held(box, name):
    """A command that runs until release(box, name)."""
    return f"while [ ! -e {box.path(f'go-{name}')} ]; do sleep 0.1; done"


def release(box, *names):
    for name in names:
        box.path(f"go-{name}").touch()


def statuses(box, *ids):
    return [box.job(job_id)["status"] for job_id in ids]


# Shares of GPUs


def test_two_halves_share_a_gpu(box):
    use(box, 1)
    one, two, three = (cli(box, "add", "--gpus", "0.5", held(box, name)).strip() for name in "abc")
    whole = box.add("true")
    box.wait_started(one), box.wait_started(two)
    assert f"jobs {one}, {two}" in box.await_reason(three, "GPU 0 runs jobs")
    gpu = box.gpu(0)
    assert (gpu["allocated"], gpu["job_ids"], gpu["is_available"]) == (1.0, [one, two], False)
    refused = cli(box, "kill", "0", code=4)
    assert one in refused and two in refused and "--all" in refused and statuses(box, one, two) == ["running"] * 2
    release(box, "b")
    assert box.wait_started(three)["gpu_index"] == 0 and statuses(box, one, whole) == ["running", "pending"]
    cli(box, "kill", "0", "--all")
    assert statuses(box, one, three) == ["cancelled"] * 2
    assert box.wait(whole, "completed")["gpu_indices"] == [0]


def test_memory_that_is_declared():
    """It counts until it is taken: what is free now is not all to be had."""
    with live.Box(gpus=[{"memory.used": 15000}, {}], max_unseen_mem_mib=15000, is_supervised=False) as box:
        box.status()
        small = box.wait_started(cli(box, "add", "--gpu-mem", "9000M", "sleep 600").strip())
        assert small["gpu_index"] == 0 and small["gpu_mem_mib"] == 9000             # where it fits tightest
        first = box.wait_started(box.add("sleep 600", gpus=0.5, gpu_mem_mib=10240))
        second = box.wait_started(box.add("sleep 600", gpus=0.25, gpu_mem_mib=10240))
        assert first["gpu_index"] == second["gpu_index"] == 1
        third = box.add("sleep 600", gpus=0.25, gpu_mem_mib=10240)
        assert "less than the 10GB asked for" in box.await_reason(third, "GPU 1 has")
        box.show([{"memory.used": 15000}, {"memory.used": 2000}], processes=[{"gpu": 1, "pid": first["pid"], "name": "sh", "memory": 2000}])
        box.await_gpu(1, memory_used_mib=2000)
        assert box.job(third)["status"] == "pending"                                # it has taken 2 of its 10, and may want the rest
        box.ask("DELETE", f"/jobs/{second['id']}")
        assert box.wait_started(third)["gpu_index"] == 1
        assert "the largest has 24GB" in cli(box, "add", "--gpu-mem", "30G", "true", code=2)


# Attempts


def test_attempts_are_kept(box):
    use(box, 1)
    count = box.path("count")
    command = f'n=$(cat {count} 2>&- || echo 0); echo $((n + 1)) > {count}; echo "try $n" >&2; [ $n -ge 2 ] || exit $((n + 3))'
    job_id = cli(box, "add", "--retries", "2", command).strip()
    box.wait(job_id, "completed")
    job = json.loads(cli(box, "show", job_id, "--json"))
    assert [(one["attempt"], one["exit_code"], one["cause"], one["gpu_indices"]) for one in job["attempts"]] == [
        (1, 3, "exit", [0]), (2, 4, "exit", [0]), (3, 0, None, [0])]
    assert [one["cause_line"] for one in job["attempts"]] == ["try 0", "try 1", None]
    assert all(one["pid"] and one["finished_at"] for one in job["attempts"])
    assert (job["attempt"], job["exit_code"], job["cause"]) == (3, 0, None)
    assert [status for status, _ in job["status_history"]] == [*["pending", "running"] * 3, "completed"]
    assert box.logs(job_id, "stderr") == "try 0\ntry 1\ntry 2\n"
    shown = cli(box, "show", job_id)
    assert "attempt 1: exit 3 on GPU 0, " in shown and "attempt 3: exit 0 on GPU 0, " in shown

    count.unlink()
    job = box.wait(box.add(command, retries=1), "failed")
    assert (job["exit_code"], job["cause_line"], len(job["attempts"])) == (4, "try 1", 2)
    again = cli(box, "retry", "--failed").split()
    assert len(again) == 1 and box.wait(again[0], "completed")["retries"] == 1
    assert cli(box, "retry", "--failed") == ""


def test_out_of_gpu_memory():
    """The next attempt takes the emptiest card, alone."""
    with live.Box(gpus=[{"memory.used": 1000}, {"memory.used": 2000}, {"memory.used": 100}], retry_backoff_seconds=0.1,
                  is_supervised=False) as box:
        box.status()
        once = box.path("once")
        command = f"[ -e {once} ] || {{ touch {once}; echo Traceback >&2; echo '{OOM}' >&2; echo bye >&2; exit 1; }}; sleep 600"
        job_id = box.add(command, gpus=0.5, retries=1)
        job = live.until(lambda: (job := box.job(job_id))["attempt"] == 2 and job["pid"] and job, "the second attempt")
        assert [(one["cause"], one["exit_code"], one["gpu_indices"]) for one in job["attempts"]] == [
            ("cuda-oom", 1, [1]), (None, None, [2])]
        assert job["gpu_indices"] == [2] and box.gpu(2)["allocated"] == 1.0
        beside = box.add("true", gpus=0.5, gpu_ids=[2])
        box.await_reason(beside, f"GPU 2 runs job {job_id}")
        job = box.wait(box.add(f"echo '{OOM}' >&2; exit 1"), "failed")
        assert (job["cause"], job["cause_line"]) == ("cuda-oom", OOM)


# Time and memory


TIMES = [  # reason, options, what is said
    ("timeout", ["--timeout", "0.5s"], "its time limit is"),
    ("expect", ["--expect", "0.3s"], "timeout_multiplier"),
    ("timeout before expect", ["--expect", "1h", "--timeout", "0.5s"], "its time limit is"),
    ("of the configuration", [], "timeout_seconds is"),
]


def test_time_limits():
    with live.Box(gpus=4, timeout_seconds=1.2, kill_grace_seconds=1, is_supervised=False) as box:
        jobs = {}
        for number, (_, options, words) in enumerate(TIMES):
            sleep = str(box.bin / f"sleep-{number}-")
            shutil.copy(shutil.which("sleep"), sleep)
            jobs[cli(box, "add", *options, f"setsid {sleep} 600 & {sleep} 601").strip()] = sleep, words
        none = cli(box, "add", "--gpus", "0", "--timeout", "0", "sleep 600").strip()
        for job_id, (sleep, words) in jobs.items():
            job = box.wait(job_id, "failed")
            assert job["cause"] == "timeout" and words in job["cause_line"] and job["runtime_seconds"] < 60, job
            assert not live.find_commands(sleep)
        assert statuses(box, none) == ["running"]


SHARING = """
import os, time
block = bytearray(os.urandom(1 << 20) * 100)
for _ in range(3):
    if not os.fork():
        own = bytearray(b"x") * (OWN << 20)
        sum(block[::4096])
        time.sleep(600)
time.sleep(600)
"""


def test_host_memory_that_is_shared_is_no_reason_to_stop_a_job():
    """Four times 100 MB that are the same 100 MB, as the workers of a data loader share them; and four that are not."""
    with live.Box(gpus=0, cpu_slots=2, max_memory_gb=0.25, refresh_rate_seconds=0.5, kill_grace_seconds=1,
                  is_supervised=False) as box:

        def add(name, own):
            script = box.folder / f"{name}.py"
            script.write_text(SHARING.replace("OWN", str(own)))
            return box.add(f"{sys.executable} {script}", gpus=0)

        shares = add("shares", 0)
        live.until(lambda: 90 < (box.job(shares)["rss_mib"] or 0) < 250, "its processes, what they share counted once")
        does_not = add("does-not", 100)
        job = box.wait(does_not, "failed")
        assert job["cause"] == "host-memory" and "max_memory_gb is 0.25" in job["cause_line"] and job["peak_rss_mib"] > 256
        assert box.job(shares)["status"] == "running", "it was looked at just as closely, and earlier"


# Jobs that go together


def test_one_after_the_other(box):
    order, fixed = box.path("order"), box.path("fixed")
    first = box.add(f"{held(box, 'first')}; [ -e {fixed} ] || exit 3; echo first >> {order}")
    second = cli(box, "add", "--after", first, f"echo second >> {order}").strip()
    third = cli(box, "add", "--after", f"{second},{first}", f"echo third >> {order}").strip()
    other = box.add(f"echo other >> {order}")
    box.wait(other, "completed")
    assert f"after job {first}" in box.await_reason(second, first)
    release(box, "first")
    box.wait(first, "failed")
    for job_id, parent in ((second, first), (third, first)):
        job = box.wait(job_id, "cancelled")
        assert job["cause"] == "dependency" and parent in job["cause_line"], job
    assert "which failed (exit 3)" in box.job(second)["cause_line"]
    late = box.add("true", after=[first])           # it can never run
    assert box.wait(late, "cancelled")["cause"] == "dependency"
    fixed.touch()
    ids = cli(box, "retry", first, second, third).split()       # each comes after what its parents were retried as
    assert len(ids) == 3 and box.job(ids[2])["after"] == [ids[1], ids[0]]
    for job_id in ids:
        box.wait(job_id, "completed")
    assert live.read(order).split() == ["other", "first", "second", "third"]
    assert "no job 'Zzz'" in cli(box, "add", "--after", "Zzz", "true", code=3)


def test_after_a_process_that_was_begun_by_hand(box):
    """Also when the service is another one by then."""
    with subprocess.Popen(["sleep", "600"]) as by_hand:
        job = box.nexus("add", "--after-pid", str(by_hand.pid), "true").stdout.strip()
        assert box.job(job)["waiting_for"] == f"after process {by_hand.pid}"
        box.kill_all_of_service()
        box.start()
        assert box.wait(box.add("true"), "completed") and box.job(job)["status"] == "pending"
        by_hand.kill()
        by_hand.wait()
        box.wait(job, "completed")
        refused = box.nexus("add", "--after-pid", str(by_hand.pid), "true")
        assert refused.returncode == 2 and "there is no process" in refused.stderr


def test_a_group_has_its_limit(box):
    log = box.path("log")
    command = f"echo + >> {log}; [ {{n}} -lt 2 ] && {{ {held(box, 'g')}; }}; sleep 0.1; echo - >> {log}"
    ids = cli(box, "add", "--gpus", "0", "--group", "g", "--max-concurrent", "2", "--sweep", "n=0..6", command).split()
    assert len(ids) == 7
    box.await_reason(ids[2], "2 jobs of group g run", "--max-concurrent")
    assert statuses(box, *ids) == ["running"] * 2 + ["pending"] * 5
    box.wait(box.add("true", gpus=0), "completed")                  # others do not mind
    assert len(json.loads(cli(box, "queue", "--group", "g", "--json"))) == 5
    release(box, "g")
    cli(box, "wait", "--group", "g")
    now = most = 0
    for sign in live.read(log).split():
        now += 1 if sign == "+" else -1
        most = max(most, now)
    assert most == 2 and now == 0


def test_a_group_that_fails_is_held():
    with live.Box(gpus=0, cpu_slots=1, is_supervised=False) as box:
        fixed = box.path("fixed")
        command = f"[ -e {fixed} ] || {{ echo 'no such file: data.csv' >&2; exit 3; }}; echo {{n}}"
        sweep = ("add", "--gpus", "0", "--group", "g", "--sweep", "n=1..6", command)
        for is_first in (True, False):
            done = box.nexus(*sweep)
            ids = done.stdout.split()
            assert (done.returncode, done.stderr) == (0, ""), "a hold ends with the group's last pending job"
            for job_id in ids[:3]:
                box.wait(job_id, "failed")
            reason = box.await_reason(ids[3], "group g is held", "no such file: data.csv", "nexus resume --group g")
            if is_first:
                added = box.nexus("add", "--group", "g", "--gpus", "0", "true")
                assert "it waits: group g is held: its first 3 jobs failed" in added.stderr
                said = box.nexus("cancel", "--group", "g").stderr
                assert said.startswith("nexus: 4 jobs: ") and said.endswith("nexus: 4 pending jobs of group g cancelled\n"), said
                cli(box, "clear", "--group", "g")
        assert statuses(box, *ids) == ["failed"] * 3 + ["pending"] * 3 and reason in cli(box, "why", ids[5])
        assert "group g is held" in cli(box)
        box.wait(box.add("true", gpus=0), "completed")
        fixed.touch()
        cli(box, "resume", "--group", "g")
        for job_id in ids[3:]:
            box.wait(job_id, "completed")
        again = cli(box, "retry", "--group", "g").split()
        assert len(again) == 3 and cli(box, "wait", *again) == ""
        assert [box.logs(job_id, "stdout") for job_id in again] == ["1\n", "2\n", "3\n"]


def test_the_service_is_killed_while_jobs_wait():
    """For another attempt, for another job, for the group's limit: all goes on as it would have."""
    with live.Box(gpus=0, cpu_slots=10, retry_backoff_seconds=5) as box:
        once = box.path("once")
        parent = box.wait_started(box.add(held(box, "parent"), gpus=0))["id"]
        child = box.add("true", gpus=0, after=[parent])
        limited = [box.add(held(box, "limited"), gpus=0, group="g", max_concurrent=1) for _ in range(3)]
        box.await_reason(limited[1], "--max-concurrent")
        retried = box.add(f"[ -e {once} ] || {{ touch {once}; exit 3; }}", gpus=0, retries=1)       # the last one: its wait has an end
        box.await_reason(retried, "attempt 1 failed (exit)", "tried again in")
        box.kill_service()
        release(box, "parent")
        box.await_service()
        job = box.wait(retried, "completed")
        assert [(one["attempt"], one["exit_code"]) for one in job["attempts"]] == [(1, 3), (2, 0)]
        box.wait(parent, "completed"), box.wait(child, "completed")
        assert statuses(box, *limited) == ["running", "pending", "pending"]
        release(box, "limited")
        for job_id in limited:
            assert box.wait(job_id, "completed")["attempt"] == 1


# Files


SCRIPT = """import json, os, sys
name = os.path.basename(sys.argv[0])
words = {key: os.environ.get(key) for key in ("CUDA_VISIBLE_DEVICES", "NEXUS_GPU_ID", "CONDA_PREFIX")}
print(json.dumps({"name": name, "arguments": sys.argv[1:], **words}))
"""
SHARES = {"default_requirement": 1.0, "models": {"qwen2.5-3b-inst": 0.5, "qwen2.5-7b-inst": 1.0, "qwen2.5-32b-inst": 2.0}}


def test_the_jobs_file_of_other_schedulers():
    folder = live.make_folder()
    conda = Conda(f"{folder}/conda")
    conda.make(f"{folder}/conda/envs/pytorch_env")
    (folder / "conda/envs/pytorch_env/bin/python").unlink()
    (folder / "conda/envs/pytorch_env/bin/python").symlink_to(sys.executable)
    for name in ("train.py", "eval.py", "inference.py", "late.py"):
        (folder / name).write_text(SCRIPT)
    (folder / "llm_config.json").write_text(json.dumps(SHARES))
    jobs = folder / "jobs.txt"
    jobs.write_text("# Comments start with #\n"
                    f"0,{folder}/train.py,pytorch_env,--llm qwen2.5-3b-inst --cuda 7 --epochs 100,2-3\n"
                    f"1,{folder}/eval.py,pytorch_env,--llm qwen2.5-7b-inst --dataset test,\n"
                    f"2,{folder}/inference.py,,--llm qwen2.5-32b-inst --batch_size 1,1,2,3\n\n")
    try:
        with live.Box(gpus=4, environ={"CONDA_EXE": conda.exe}, jobs_file=str(jobs), llm_config=str(folder / "llm_config.json"),
                      jobs_file_interval_seconds=0.2, is_supervised=False) as box:
            def named(name):
                return live.until(lambda: [job for job in box.ask("GET", "/jobs") if name in job["command"]], name)[0]

            def readings():
                return [check["reading"] for check in box.health()["checks"]]

            def said(name):
                return json.loads(box.logs(box.wait(named(name)["id"], "completed")["id"], "stdout"))

            train, evaluate, inference = named("train.py"), named("eval.py"), named("inference.py")
            assert [(job["gpus"], job["priority"], job["gpu_ids"], job["conda"]) for job in (train, evaluate, inference)] == [
                (0.5, 0, [2, 3], "pytorch_env"), (1, 1, None, "pytorch_env"), (2, 2, [1, 2, 3], None)]
            told = said("train.py")
            place = str(box.job(train["id"])["gpu_index"])
            assert place in "23" and told["arguments"] == ["--llm", "qwen2.5-3b-inst", "--cuda", place, "--epochs", "100"]
            assert place in (told["CUDA_VISIBLE_DEVICES"] or "0,1,2,3").split(",") and told["CUDA_VISIBLE_DEVICES"] != place
            assert told["CONDA_PREFIX"] == f"{folder}/conda/envs/pytorch_env"
            told = said("eval.py")
            assert told["arguments"] == ["--llm", "qwen2.5-7b-inst", "--dataset", "test"]       # no --cuda is put there
            assert told["CUDA_VISIBLE_DEVICES"] == told["NEXUS_GPU_ID"] == str(box.job(evaluate["id"])["gpu_index"])
            assert said("inference.py")["CONDA_PREFIX"] is None and len(box.job(inference["id"])["gpu_indices"]) == 2

            # It grows: a good line, a bad one, one that lacks its newline for longer than the interval
            with jobs.open("a") as file:
                file.write(f"high,{folder}/late.py,,--seed 1,0\nsoon,{folder}/bad.py,,,\n0,{folder}/late.py,,--seed 2")
                file.flush()
                assert box.wait(named("late.py --seed 1")["id"], "completed")["priority"] == 0
                reading = live.until(lambda: next((text for text in readings() if "line 7" in text), None), "the bad line in /health")
                assert f"soon,{folder}/bad.py" in reading and "priority" in reading
                assert "line 7" in cli(box) and "line 7" in cli(box, "health")
            box.wait(named("late.py --seed 2")["id"], "completed")
            jobs.write_text(jobs.read_text().replace(f"soon,{folder}/bad.py,,,\n", ""))
            live.until(lambda: f"{jobs} is watched" in readings(), "the good file in /health")
            count = len(box.ask("GET", "/jobs"))
            cli(box, "restart")
            with jobs.open("a") as file:                # read anew for certain: this one comes
                file.write(f"\n1,{folder}/late.py,,--seed 3,\n")
            box.wait(named("--seed 3")["id"], "completed")
            assert len(box.ask("GET", "/jobs")) == count + 1 == 6
    finally:
        live.remove_folder(folder)


def test_state_is_edited_from_outside(box):
    path = box.home / "state.json"

    def edit(**facts):
        state = {**json.loads(live.until(lambda: live.read(path))), **facts}
        (box.home / "edited").write_text(json.dumps(state))
        (box.home / "edited").rename(path)

    edit(paused_gpus=[1, 2, 3])
    box.await_gpu(1, is_paused=True)
    edit(paused=True)
    live.until(lambda: box.status()["is_paused"])
    waits = box.add("true")
    box.await_reason(waits, "the queue is paused")
    assert box.gpu(1)["is_paused"]
    edit(paused=False, paused_gpus=[0, 2, 3])
    assert box.wait(waits, "completed")["gpu_index"] == 1
    assert box.gpu(0)["is_paused"] and not box.gpu(1)["is_paused"]


# What happens, is told


def test_hooks_run():
    """Linux takes no variable of more than 128 KiB with its name, and a command may have as much without one: it is cut."""
    with live.Box(gpus=[{}], is_starting=False, is_supervised=False) as box:
        told, health = box.path("told"), box.path("health")
        box.write_config(
            on_finish='printf "%s\n" "$NEXUS_JOB_ID,$NEXUS_JOB_STATUS,$NEXUS_JOB_CAUSE,$NEXUS_JOB_EXIT_CODE,$NEXUS_JOB_GPU,$NEXUS_JOB_NAME,'
                      f'$NEXUS_JOB_TITLE,$NEXUS_JOB_COMMAND" >> {told}; [ "$NEXUS_JOB_COMMAND" != true ] || {{ echo oh dear; exit 9; }}',
            on_unhealthy=f'echo "$NEXUS_HEALTH $NEXUS_HEALTH_REASON" >> {health}')
        box.serve("nexus.HEALTH_INTERVAL_S = 0.2")
        box.status()
        good, bad = box.add("true", name="n1"), box.add("exit 3")
        waits = box.add("true", after=[bad])
        live.until(lambda: live.read(told).count("\n") == 3, "three calls")
        assert live.read(told).splitlines() == [
            f"{good},completed,,0,0,n1,job {good} (n1) completed,true",
            f"{bad},failed,exit,3,0,,job {bad} (exit 3) failed (exit 3),exit 3",
            f"{waits},cancelled,dependency,,,,job {waits} (true) cancelled (dependency),true"]
        live.until(lambda: box.log().count("on_finish: exit code 9: oh dear") == 2)
        commands = ["true " + "\u00e9" * 65533, "true " + "x" * 20000]
        ids = [box.add(command, gpus=0) for command in commands]
        live.until(lambda: live.read(told).count("\n") == 5, lambda: f"two more calls: {box.log()[-2000:]}")
        for job_id, command in zip(ids, commands):
            line = next(line for line in live.read(told).splitlines() if line.startswith(f"{job_id},completed,,0,,,"))
            assert line.endswith(f",{command[:32000]}")
        assert box.log().count("on_finish") == 2
        box.show([{}], failure="no-driver")
        live.until(lambda: live.read(health).startswith("UNHEALTHY GPUs: ") and live.read(health).count("\n") == 1, "on_unhealthy")
        box.show([{}])
        live.until(lambda: live.read(health).splitlines()[1:2] == ["HEALTHY "], "on_unhealthy, once it is well")


def test_a_hook_that_hangs():
    with live.Box(gpus=1, is_starting=False, is_supervised=False) as box:
        told = box.path("told")
        box.write_config(on_finish=f"echo $NEXUS_JOB_ID >> {told}; sleep 600")
        box.serve("nexus.HOOK_TIMEOUT_S = 600")
        jobs = [box.add("true") for _ in range(4)]
        for job_id in jobs:
            box.wait(job_id, "completed")
        live.until(lambda: live.read(told), "the first hook")
        assert live.read(told).split() == jobs[:1]                      # it hangs, and they did not wait for it
        box.kill_service()
        told.unlink()
        box.serve("nexus.HOOK_TIMEOUT_S = 1.5")         # a shell that is ended before it has written is not started again
        jobs = [box.add("true") for _ in range(2)]
        live.until(lambda: live.read(told).split()[-2:] == jobs, "its time limit")
        assert "on_finish: " in box.log() and box.health()["is_healthy"]


def test_the_log_as_json():
    with live.Box(gpus=2, log_format="json", retry_backoff_seconds=0.1, is_supervised=False) as box:
        job_id = box.add("exit 3", gpus=1.5, retries=1)
        box.wait(job_id, "failed")
        live.until(lambda: box.log().count(job_id) >= 6, "what is said of it")
        lines = [json.loads(line) for line in box.log().splitlines()]
        assert all(set(line) >= {"timestamp", "level", "logger", "thread", "message"} for line in lines)
        own = [line for line in lines if line.get("job_id") == job_id]
        assert {line["attempt"] for line in own} == {1, 2} and all(
            sorted(line["gpu_ids"]) == [0, 1] and line["required_gpus"] == 1.5 for line in own), own


def test_a_gpu_on_which_jobs_fail_is_paused(box):
    use(box, 2)
    scripts = [box.path(f"{name}.sh") for name in "ab"]
    for path in scripts:
        path.write_text("[ $NEXUS_GPU_ID != 0 ] || { echo no kernel image >&2; exit 1; }\n")
    # One typo, also where others run well, is no fault of a GPU's
    typo = [box.add("python3 tpyo.py", group="typo") for _ in range(6)]
    live.until(lambda: box.job(typo[2])["status"] == "failed")
    cli(box, "kill", "--group", "typo")
    assert not any(gpu["is_paused"] for gpu in box.status()["gpu_status"][:2])
    box.ask("POST", "/queue", [{"command": f"sh {scripts[number // 2 % 2]}"} for number in range(60)], key="sixty-jobs")
    gpu = box.await_gpu(0, is_paused=True)
    assert "failed there within 10 s" in gpu["unavailable"] and "GPU 0" in box.log()
    assert "GPU 0 (Mock GPU, 24GB): " in cli(box) and "failed there within" in cli(box)
    left = box.ask("GET", "/queue")[-1:]
    for job in left:
        box.wait(job["id"], "completed")            # on the other one, which is never paused
    cli(box, "resume", "0")
    assert not box.gpu(0)["is_paused"] and box.wait(box.add("true", gpu_ids=[0]), "completed")
    assert not box.gpu(0)["is_paused"]


def test_what_is_known(box):
    """Why a job waits, when it will start, and what those before it took."""
    use(box, 2)
    box.wait(box.add("true"), "completed"), box.wait(box.add("exit 3"), "failed")
    one = box.wait_started(cli(box, "add", "--expect", "10m", "sleep 600").strip())
    two = box.wait_started(cli(box, "add", "--expect", "20m", "sleep 600").strip())
    next_id, last_id = (cli(box, "add", "--expect", "30m", "--gpus", gpus, "true").strip() for gpus in ("1", "2"))

    def minutes(queue, job_id):
        stamp = next(job for job in queue if job["id"] == job_id)["estimated_start"]
        return stamp and (nexus.parse_time(stamp) - nexus.parse_time(one["started_at"])) / 60

    queue = live.until(lambda: all(job["estimated_start"] for job in box.ask("GET", "/queue")) and
                       json.loads(cli(box, "queue", "--json")), "estimates")
    assert minutes(queue, next_id) == pytest.approx(10, abs=0.2) and minutes(queue, last_id) == pytest.approx(40, abs=0.3)
    why = cli(box, "why", last_id)
    assert "1 job before it" in why and f"GPU 0: runs job {one['id']}" in why and f"GPU 1: runs job {two['id']}" in why
    assert json.loads(cli(box, "why", last_id, "--json"))["gpus"][0]["verdict"] == f"runs job {one['id']}"
    for job in (one, two):
        cli(box, "kill", job["id"])
    box.wait(next_id, "completed")
    box.wait(last_id, "completed")
    unknown = [box.add("sleep 600"), box.add("sleep 600")]
    then = box.add("true", gpus=2, expected_time=60)
    box.wait_started(unknown[1])
    assert live.until(lambda: box.job(then)["waiting_for"]) and box.job(then)["estimated_start"] is None     # never invented
    metrics = json.loads(cli(box, "metrics", "--json"))
    assert metrics["total_jobs"] == 6 and metrics["by_status"]["completed"] == 3
    text = cli(box, "metrics")
    assert "Total Jobs: 6" in text and "Median Execution Time: " in text and "GPU 0: 0% avg, 0% peak" in text


# The right code, the right environment


def make_tree(box):
    """(a folder that will be a work tree, what runs git there)."""
    def git(*words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tree), *words], check=True,
                              capture_output=True, text=True, env=box.environ).stdout

    tree = box.path("tree")
    tree.mkdir()
    return tree, git


def test_a_snapshot(box):
    use(box, 1)
    tree, git = make_tree(box)

    git("init", "-q")
    (tree / "train.py").write_text("print('committed')\n")
    git("add", "-A"), git("commit", "-qm", "one")
    (tree / "train.py").write_text("print('edited, as submitted')\n")
    (tree / "helper.txt").write_text("untracked\n")
    before, holds = git("status", "--porcelain"), box.wait_started(box.add(held(box, "a")))
    command = f"{sys.executable} train.py; cat helper.txt; echo 0.1 > loss.txt"
    job_id = cli(box, "add", "--snapshot", "--cwd", str(tree), command).strip()
    assert git("status", "--porcelain") == before
    (tree / "train.py").write_text("print('edited later')\n")
    (tree / "helper.txt").unlink()
    release(box, "a")
    box.wait(holds["id"], "completed")
    job = box.wait(job_id, "completed")
    assert box.logs(job_id, "stdout") == "edited, as submitted\nuntracked\n", box.logs(job_id)
    assert f"snapshot: {job['snapshot']}" in cli(box, "show", job_id)
    assert "edited, as submitted" in git("show", f"{job['snapshot']}:train.py")
    kept = os.path.join(job["log_dir"], "files", "loss.txt")
    assert live.until(lambda: live.read(kept)) == "0.1\n" and not (tree / "loss.txt").exists()
    assert "not in a git work tree" in cli(box, "add", "--snapshot", "--cwd", "/", "true", code=2)


def test_a_script_is_read_when_its_job_starts(box):
    use(box, 1)
    script = box.path("train.sh")
    script.write_text("#!/bin/sh\necho as submitted\n")
    holds = box.wait_started(box.add(held(box, "a")))
    job_id = cli(box, "add", str(script)).strip()
    script.write_text("#!/bin/sh\necho edited; exit 3\n")
    release(box, "a")
    box.wait(holds["id"], "completed"), box.wait(job_id, "failed")
    script.write_text("#!/bin/sh\necho mended\n")
    again = cli(box, "retry", job_id).strip()
    box.wait(again, "completed")
    assert [box.logs(each, "stdout") for each in (job_id, again)] == ["edited\n", "mended\n"]


def test_a_snapshot_is_tidied_while_what_the_job_left_is_ended(box):
    use(box, 1)
    tree, git = make_tree(box)
    for number in range(300):
        (tree / f"file-{number}").write_text(f"{number}\n")

    git("init", "-q")
    git("add", "-A"), git("commit", "-qm", "one")
    job_id = cli(box, "add", "--snapshot", "--cwd", str(tree), "echo 1 > made; trap '' TERM; setsid sleep 600 & sleep 0.1").strip()
    job = box.wait(job_id, "completed")
    files = os.path.join(job["log_dir"], "files")
    assert live.until(lambda: os.path.isdir(files) and os.listdir(files)) == ["made"]
    ended = box.nexus("run", "--snapshot", "--cwd", str(tree), "cat file-7")
    assert (ended.returncode, ended.stdout) == (0, "7\n"), ended.stderr


# Several GPUs at once


def test_a_job_for_two_gpus_is_not_starved():
    with live.Box(gpus=2, reserve_after_seconds=600, is_supervised=False) as box:
        long = box.wait_started(box.add(held(box, "long"), expected_time=600))["id"]
        first = box.wait_started(box.add(held(box, "first")))["id"]
        both = box.add(held(box, "both"), gpus=2)
        passing, late = box.add(held(box, "passing")), box.add("true")
        release(box, "first")
        box.wait(first, "completed")
        box.wait_started(passing)                       # until it has waited for long enough they pass it
        box.write_config(reserve_after_seconds=0.1)
        cli(box, "restart")
        release(box, "passing")
        box.wait(passing, "completed")
        reason = box.await_reason(late, f"is kept for job {both} (2 GPUs)")
        kept = f"ept for {both} (2 GPUs)"
        assert f"GPU 1 (Mock GPU, 24GB): K{kept}" in cli(box, "status") and f"k{kept}" in cli(box, "top")
        shown = box.ask("GET", "/status")["gpu_status"][1]
        assert (shown["state"], shown["is_available"], shown["kept_for"]) == ("Unavailable", False, both)
        assert f"when job {long} has ended" in cli(box, "why", both) or "it will start in about" in cli(box, "why", both)
        assert f"GPU 0 runs job {long}" in reason
        short = cli(box, "add", "--expect", "20s", "true").strip()
        assert box.wait(short, "completed")["gpu_index"] == 1           # it ends long before
        assert statuses(box, both, late) == ["pending", "pending"] and "GPUs are kept for it" in cli(box, "why", both)
        release(box, "long")
        assert sorted(box.wait_started(both)["gpu_indices"]) == [0, 1]
        release(box, "both")
        box.wait(late, "completed")


def test_an_upgrade_under_a_running_service_is_told():
    with live.Box(gpus=1, is_supervised=False) as box:
        copy = shared.give_program(box)
        cli(box, "stop")

        def call(*words):
            return subprocess.run(box.argv(*words), env=box.environ, check=True, capture_output=True, text=True, cwd="/")

        assert call().stderr == ""                      # it starts the service
        copy.write_text(live.NEXUS.read_text() + "# another one\n")
        assert "nexus restart brings them together" in call().stderr
        copy.write_text(live.NEXUS.read_text().replace("status['queued_jobs']", "status['jobs_in_queue']"))
        done = subprocess.run(box.argv(), env=box.environ, capture_output=True, text=True, cwd="/")
        assert done.returncode == 6 and "the service that runs is of another nexus.py" in done.stderr and "Traceback" not in done.stderr
        copy.write_text(live.NEXUS.read_text() + "# another one\n")
        call("restart")
        assert call().stderr == ""


# The directory of a job


def test_a_directory_that_is_not_there_is_refused_by_all_ways_in(box):
    """In the same words; of several jobs none is added.  A snapshot brings its own."""
    gone = box.path("gone")
    gone.mkdir()
    words = f"cwd {gone} is not a directory"
    ended = [cli(box, "add", "--gpus", "0", "--group", "g", "--cwd", str(gone), "true").strip() for _ in range(2)]
    for job_id in ended:
        box.wait(job_id, "completed")
    gone.rmdir()
    job, far = {"command": "true", "cwd": str(gone)}, {"NEXUS_URL": f"http://127.0.0.1:{box.port}", "NEXUS_TOKEN": live.read(
        box.home / "token").strip()}
    for method, path, body in (
            ("POST", "/queue", job), ("POST", "/queue", {**job, "dry_run": True}),
            ("POST", "/queue", {**job, "node": box.status()["host"]["name"]}),
            ("POST", "/queue", [{"command": "true"}, job]), ("POST", "/queue", {"each": [{"command": "true"}, job]}),
            ("POST", "/jobs/retry", {"ids": ended}), ("POST", "/jobs/retry", {"group": "g", "status": "completed"}),
            ("POST", "/queue", {**job, "cwd": str(box.path("config.toml"))})):
        status, answer = box.call(method, path, body)
        assert status == 400 and answer["message"].endswith(" is not a directory"), (path, body, answer)
        assert answer["hint"] == "make it first: the job runs in it"
    for way in (["add", "--cwd", str(gone), "true"], ["run", "--cwd", str(gone), "true"], ["retry", ended[0]]):
        assert words in cli(box, *way, code=2)
    assert words in cli(box, "add", "--cwd", str(gone), "true", code=2, environ=far)
    with pytest.raises(nexus.NexusError, match=words):
        nexus.Client(f"http://127.0.0.1:{box.port}").add("true", cwd=str(gone))
    assert [one["id"] for one in box.ask("GET", "/jobs")] == ended
    gone.mkdir()
    box.wait(box.ask("POST", "/jobs/retry", {"ids": ended[:1]})["ids"][0], "completed")

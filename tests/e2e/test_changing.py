"""Jobs are changed, run again, moved, held, cancelled, killed and forgotten, by id, name, group and status."""

import functools
import json
import os
import re
import subprocess
import time

import pytest
from console import Home, add, add_and_wait
from live import until

import nexus


def test_edit(home):
    home.main("pause")
    job_id = add(home, "exit 1")
    done = home.main("edit", job_id, "--command", "exit 0", "--gpus", "1", "--name", "n", "--begin", "+1h")
    assert (done.code, done.out) == (0, "") and f"job {job_id} is changed" in done.err
    job = home.job(job_id)
    assert (job["command"], job["gpus"], job["name"], bool(job["begin_at"])) == ("exit 0", 1, "n", True)
    assert home.run("edit", job_id, "--begin", "22:00+05:30", TZ="America/New_York").code == 0
    begin_at = home.job(job_id)["begin_at"]
    assert begin_at.endswith("T16:30:00Z") and 0 < nexus.parse_time(begin_at) - time.time() <= 86400
    done = home.main("edit", job_id)
    assert done.code == 2 and "nothing to change" in done.err
    assert home.main("edit", job_id, "--gpus", "99").code == 2 and home.job(job_id)["gpus"] == 1
    assert home.main("edit", job_id, "--begin", "now").code == 0
    home.main("resume")
    assert home.main("wait", job_id).code == 0
    done = home.main("edit", job_id, "--gpus", "2")
    assert done.code == 4 and "is completed" in done.err


def test_edit_of_a_running_job(home):
    job_id = add(home, "sleep 1000", "--timeout", "1h", "--name", "n")
    home.wait(job_id, "running")
    done = home.main("edit", "n", "--time", "2h", "--group", "g", "--priority", "low", "--retries", "1", "--name", "m")
    assert done.code == 0 and "time limit 2h" in done.err and "priority low" in done.err, done
    job = home.job("m")
    assert [job[key] for key in ("timeout_seconds", "group", "priority", "retries")] == [7200, "g", 2, 1]
    for words, says in ((["edit", job_id, "--gpus", "2"], "a running one takes --priority, --name"),
                        (["hold", job_id], f"job {job_id} runs, and running jobs cannot be suspended\nhint: nexus cancel {job_id}"),
                        (["move", job_id, "--first"], "can be changed so")):
        done = home.main(*words)
        assert done.code == 4 and says in done.err and "kill" not in done.err, done
    assert home.main("edit", job_id, "--retries", "0", "--timeout", "0.1s").code == 0
    assert home.wait(job_id, "failed")["cause"] == "timeout"


def test_what_a_pending_job_waits_for_is_changed(home):
    failed = add_and_wait(home, "exit 3", "--name", "bad")
    home.main("pause")
    first, second = (home.main("add", "--env", "A=1", "echo $A $B $C").id for _ in range(2))
    edit = functools.partial(home.main, "edit")
    assert edit(second, "--after", first, "--group", "g", "--env", "B=2", "--env", "C=3").code == 0
    job = home.job(second)
    assert (job["after"], job["group"]) == ([first], "g")
    for words, says in (([first, "--after-any", second], "would wait for itself"), ([second, "--after", second], "would wait for itself"),
                        ([second, "--after", "bad"], "which failed (exit 3)"), ([second, "--after", "zzz"], "no job 'zzz'"),
                        ([second, "--env", "x"], "NAME=VALUE")):
        done = edit(*words)
        assert done.code in (2, 3, 4) and says in done.err, (words, done)
    done = edit(second, "--after-any", "bad", "--after", "none")
    assert done.code == 0 and "is changed: after none, after any bad" in done.err, done
    assert (home.job(second)["after_any"], home.job(second)["after"]) == ([failed], [])
    done = home.main("retry", "--dry-run", second)
    assert done.code == 4 and "only a finished one can be run again" in done.err
    home.main("resume")
    assert home.main("wait", second).code == 0 and home.main("logs", second).out == "1 2 3\n"


def test_what_was_set_is_taken_away(home):
    home.main("pause")
    job_id = home.main("add", "--name", "n", "--group", "g", "--gpus", "0.5", "--gpu-mem", "1G", "--timeout", "2h", "--expect", "1h",
                           "--retries", "2", "--priority", "low", "--begin", "+9h", "true").id
    none = ("--name", "--group", "--gpus", "--gpu-mem", "--timeout", "--expect", "--retries", "--priority", "--begin")
    done = home.main("edit", job_id, *(word for flag in none for word in (flag, "none")))
    assert done.code == 0 and "time limit none" in done.err, done
    job = home.job(job_id)
    plain = home.job(home.main("add", "true").id)
    fields = ("name", "group", "gpus", "gpu_mem_mib", "timeout_seconds", "expected_time", "retries", "priority", "begin_at")
    assert [job[name] for name in fields] == [plain[name] for name in fields]
    assert home.main("edit", job_id, "--timeout", "1h").code == home.main("cancel", job_id).code == 0
    again = home.main("retry", job_id, "--timeout", "none").out.strip()
    assert home.job(again)["timeout_seconds"] is None
    with pytest.raises(nexus.NexusError, match="command must be"):
        home.client().edit(again, command=None)


SECOND_TRIES = [  # options, what the job has then
    (["--env", "A=2"], {}), (["--cwd", "/"], {"cwd": "/"}), (["--gpu-mem", "1G", "--gpus", "1"], {"gpu_mem_mib": 1024, "gpus": 1}),
    (["--command", "echo two"], {"command": "echo two"}), (["--conda", "base"], {"conda": "base"}),
    (["--after", "first", "--after-any-group", "g"], {"after": ["FIRST"], "after_any_group": ["g"]}),
    (["--after-any", "first", "--after-group", "g"], {"after_any": ["FIRST"], "after_group": ["g"]}),
    (["--node", "HERE"], {"only_node": "HERE"}), (["--tty", "--preemptible"], {"tty": True, "preemptible": True}),
    (["--no-tty", "--no-cuda-arg"], {"tty": False, "cuda_arg": False}), (["--retries", "2"], {"retries": 2}),
    (["--begin", "+2h", "--timeout", "none"], {"timeout_seconds": None}),
    (["--", "python", "train.py", "--lr", "0.1 1"], {"command": "python train.py --lr '0.1 1'"}),
    (["--", "echo a | tail"], {"command": "echo a | tail"}),
    (["--snapshot"], {"snapshot": "COMMIT"}), (["--no-snapshot"], {"snapshot": None}),
]


@pytest.fixture
def home_of_screens():
    """As interactive jobs need them."""
    with Home(is_quick=True, launcher="screen", cpu_slots=20) as made:
        yield made


def test_retry_and_edit_take_the_options_of_add(home_of_screens, tmp_path):
    home = home_of_screens
    listed = {name: {*home.main("complete", name, "--").out.split()} for name in ("add", "retry", "edit")}
    assert listed["add"] - listed["retry"] == {"--sweep", "--file", "--unique", "--unless-active"}
    assert listed["add"] - listed["edit"] == {"--sweep", "--file", "--unique", "--unless-active", "--json"}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=ann", "-c", "user.email=ann@x"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    here = home.main("status", "--json").json["host"]["name"]
    home.main("pause")
    first = add(home, "true", "--name", "first", "--group", "g")
    old = add(home, "echo $A$B", "--env", "A=1", "--env", "B=1", "--tty", "--timeout", "1h", "--cwd", str(tmp_path))
    home.main("cancel", old)
    for options, wanted in SECOND_TRIES:
        options = [here if word == "HERE" else word for word in options]
        again, edited = home.main("retry", old, *options), add(home, "true", "--cwd", str(tmp_path), "--tty")
        done = home.main("edit", edited, *options)
        assert again.code == done.code == 0, (options, again, done)
        for job_id in (again.id, edited):
            job = home.job(job_id)
            found = {"FIRST": first, "HERE": here, "COMMIT": head}
            expected = {name: [found.get(each, each) for each in fact] if isinstance(fact, list) else found.get(fact, fact)
                        for name, fact in wanted.items()}
            assert {name: job[name] for name in wanted} == expected, (options, job_id == edited)
    others = home.main("retry", old, "--env", "A=2", "--cwd", "/", "--no-tty", "--", "echo $A$B $(pwd)").id
    assert home.job(home.main("retry", old).id)["cwd"] == str(tmp_path), "what is not named is as it was"
    home.main("resume")
    assert home.main("wait", others).code == 0 and home.main("logs", others).out == "21 /\n"


REFUSED_TRIES = [  # options of retry, the exit code, what is said
    (["--cwd", "/nowhere"], 2, "/nowhere"), (["--node", "n9"], 2, "there is no node n9"),
    (["--after-pid", "4194303"], 2, "there is no process"), (["--llm", "qwen"], 2, "llm_config is not set"),
    (["--max-concurrent", "2"], 2, "this job has none"), (["--after", "zzz"], 3, "no job 'zzz'"),
    (["--after-group", "zzz"], 3, "there is no job of group"), (["--unique"], 2, "unrecognized"), (["--sweep", "a=1,2"], 2, "unrecognized"),
    (["--command", "a", "--", "b"], 2, "the command is given twice"), (["--"], 2, "after -- comes the command, of one job"),
    (["OTHER", "--", "true"], 2, "after -- comes the command, of one job"), (["--command", "echo '"], 2, "bash cannot read the command"),
    (["--gpus", "99"], 2, "99"), (["--snapshot", "--cwd", "/"], 2, "git"), (["--env", "x"], 2, "NAME=VALUE"),
]


def test_a_second_try_is_checked_as_the_first(home):
    old, other = (add_and_wait(home, "exit 3") for _ in range(2))
    before = {job["id"] for job in home.main("jobs", "--json", "-n", "0").json}
    for options, code, says in REFUSED_TRIES:
        done = home.main("retry", old, *(other if word == "OTHER" else word for word in options))
        assert done.code == code and says in done.err, (options, done)
    assert {job["id"] for job in home.main("jobs", "--json", "-n", "0").json} == before


def test_retry_failed(home):
    done = home.main("retry", "--failed")
    assert (done.code, done.out) == (0, "") and "no failed job" in done.err
    flag = home.file("flag")
    bad = add_and_wait(home, f"test -e {flag}")
    other = add_and_wait(home, "exit 4", "--group", "g")
    add_and_wait(home, "true")
    child = add(home, "true", "--after", bad)
    assert home.job(child)["cause"] == "dependency"
    assert home.main("retry", "--failed", bad).code == 2
    assert home.main("retry", bad).id not in (bad, other)
    flag.touch()
    done = home.main("retry", "--failed", "--group", "g")
    again = done.out.split()
    assert [home.job(job_id)["command"] for job_id in again] == ["exit 4"]
    assert home.main("wait", *again).code == 4
    third = home.main("retry", "--failed").out.split()
    assert "exit 4" in [home.job(job_id)["command"] for job_id in third], "the latest failure of it counts"
    assert home.main("retry", "--group", "x").code == 3


def test_retry_with_other_options(home):
    bad = add_and_wait(home, "exit 4", "--timeout", "5m")
    done = home.main("retry", "--failed", "--timeout", "1:00:00", "--set-name", "longer", "--dry-run")
    assert done.out == f"{bad}: exit 4\n" and "1 job would be added, with name longer, time limit 1h; this was a dry run" in done.err, done
    assert len(home.client().jobs()) == 1
    waits = home.main("add", "true", "--begin", "+1h").id
    refused = [home.main("retry", waits, *words).err for words in ([], ["--dry-run"])]
    assert refused[0] == refused[1] and "only a finished one" in refused[0], "a dry run refuses what a retry does, in its words"
    again = home.job(home.main("retry", "--failed", "--timeout", "1:00:00", "--command", "true").id)
    assert (again["timeout_seconds"], again["command"], again["name"]) == (3600, "true", None)
    assert home.main("wait", again["id"]).code == 0


def make_venv(folder):
    """The variables of a shell where a made-up venv is active: its Python has a module that others lack."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho it has torch in $(pwd) $(umask)\n")
    program.chmod(0o755)
    return {"VIRTUAL_ENV": str(folder), "PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_a_retry_in_another_environment(home, tmp_path):
    """The job was added where no venv was active: that is told by its failure, by `show`, and by a retry; --this-env takes it."""
    bare = tmp_path / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1\n")
    bare.chmod(0o755)
    outside = {"PATH": f"{bare.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": None, "CONDA_PREFIX": None}
    inside = make_venv(tmp_path / "v")
    there = str(tmp_path / "v/bin/python")
    bad = home.main("add", "--gpus", "0", "--env", "MODE=off", "python train.py; s=$?; echo mode $MODE; exit $s", **outside).id
    hint = f"hint: nexus retry {bad} --this-env, in a shell where the venv or conda environment that has it is active"
    assert hint in home.main("wait", bad, **outside).err
    shown, job = home.main("show", bad).out, home.job(bad)
    assert hint in shown and f"  Python: {bare}\n" in shown and "environment:" not in shown
    assert (job["python"], job["python_env"], job["remedy"]) == (str(bare), None, hint.partition(" ")[2])
    told = f"has {bare}, and this shell has {there} (venv {tmp_path / 'v'}); if it is to be this shell's: nexus cancel "
    for words in ([bad], ["--failed"]):
        done = home.main("retry", *words, **inside)
        assert told + f"{done.id}; nexus retry {done.id} --this-env" in done.err, done
        assert home.main("wait", done.id).code == 1 and home.job(done.id)["python"] == str(bare)
    assert "this shell has" not in home.main("retry", bad, **outside).err
    again = home.run("retry", bad, "--this-env", cwd=str(tmp_path), **inside)
    assert again.err == "" and home.main("wait", again.id).code == 0
    assert home.main("logs", again.id).out.startswith(f"it has torch in {tmp_path} 00") and "mode off" in home.main("logs", again.id).out
    job = home.job(again.id)
    assert (job["python"], job["python_env"], job["cwd"]) == (there, f"venv {tmp_path / 'v'}", str(tmp_path))
    assert f"  environment: venv {tmp_path / 'v'}\n" in home.main("show", again.id).out
    home.main("pause")
    waits = home.main("add", "--gpus", "0", "true", **outside).id
    done = home.run("edit", waits, "--this-env", "--cwd", "/", **inside)
    assert done.err.endswith(f"job {waits} is changed: this shell's variables and umask, directory /\n"), done
    assert (home.job(waits)["python"], home.job(waits)["cwd"]) == (there, "/")
    home.main("resume")
    done = home.main("retry", bad, "--this-env", NEXUS_URL="http://gpubox:6234")
    assert done.code == 2 and "NEXUS_URL is set" in done.err


def test_a_failed_cell_runs_with_another_value(home, tmp_path):
    for name in ("b4", "b8", "b96"):
        (tmp_path / name).mkdir()
    command = "echo lr=$LR bs={bs} $(pwd); test {bs} -lt 90"
    done = home.run("add", "--gpus", "0", "--group", "exp1", "--sweep", "lr=1,2", "--sweep", "bs=8,96", "--env", "LR={lr}",
                    "--cwd", "b{bs}", command, cwd=str(tmp_path))
    home.main("wait", *done.out.split())
    for words, says in ((["--set", "batch=4"], "has no batch in its sweep: it has lr, bs"), (["--set", "bs=4", "--set", "bs=2"], "twice"),
                        (["--set", "bs"], "is not like NAME=VALUE"), (["--set", "bs=5"], "b5 is not a directory")):
        refused = home.main("retry", "--group", "exp1", "--failed", *words)
        assert refused.code == 2 and says in refused.err, refused
    again = home.main("retry", "--group", "exp1", "--failed", "--set", "bs=4,8").out.split()
    assert home.main("wait", *again).code == 0
    assert [home.main("logs", job_id).out for job_id in again] == [
        f"lr={lr} bs={bs} {tmp_path}/b{bs}\n" for lr in "12" for bs in "48"]
    assert [home.job(job_id)["name"] for job_id in again][:2] == ["lr=1 bs=4", "lr=1 bs=8"]
    rows = home.main("results", "exp1", "--csv").out
    assert "96" not in rows and rows.count("completed") == 6
    assert home.main("retry", again[0], "--set", "bs=4", NEXUS_URL=home.client().url).code == 0


def test_a_chain_that_broke_heals(home):
    flag = home.file("chain")
    prep = add(home, f"test -e {flag}", "--name", "prep")
    train = add(home, "true", "--name", "train", "--after", "prep")
    report = add(home, "true", "--name", "report", "--after", "train")
    assert home.main("wait", report).code == 1 and home.job(report)["cause"] == "dependency"
    done = home.main("retry", prep)
    said = (f"2 jobs that came after stay cancelled: {train}, {report}; --downstream runs these again, too; now: nexus retry "
            f"{train} {report}")
    assert said in done.err, done
    home.main("wait", done.id)
    shown = home.main("show", train).out
    assert f"  {prep} prep: failed (exit 1), again as {done.id}\n>   {train} train: cancelled (dependency)\n" in shown
    assert f"      {report} report: cancelled (dependency)\n" in shown
    flag.touch()
    again = home.main("retry", done.id, "--downstream")
    ids = again.out.split()
    assert len(ids) == 3 and "stay cancelled" not in again.err, again
    assert home.main("wait", *ids).code == 0 and [home.job(job_id)["name"] for job_id in ids] == ["prep", "train", "report"]
    assert [row["id"] for row in home.client().ask("GET", f"/jobs/{ids[1]}/chain")] == ids
    assert "Chain" not in home.main("show", add_and_wait(home)).out


def test_after_a_lack_of_gpu_memory_the_line_is_there(home):
    """It can be typed as it is."""
    line = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.' >&2"
    failed = home.main("add", f'[ "$PYTORCH_CUDA_ALLOC_CONF" ] || {{ {line}; exit 1; }}').id
    done = home.main("wait", failed)
    assert home.job(failed)["cause"] == "cuda-oom", done
    hint = (f"hint: nexus retry {failed} --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or with more memory free on its "
            "GPU: --gpu-mem 20G")
    assert hint in done.err and hint in home.main("show", failed).out
    words = hint.partition(",")[0].split()[2:]
    assert home.main("wait", home.main(*words).id).code == 0
    assert home.main("retry", failed, "--gpu-mem", "20G").code == 0
    assert "hint" not in home.main("show", add_and_wait(home, "exit 3")).out


def test_move(home):
    home.main("pause")
    ids = [add(home, f"true {name}") for name in "abc"]

    def order():
        return [ids.index(job["id"]) for job in home.main("queue", "--json").json]
    assert home.main("move", ids[2], "--first").err == f"nexus: job {ids[2]} is now first\n"
    assert order() == [2, 0, 1]
    home.main("move", ids[2], "--last")
    assert order() == [0, 1, 2]
    home.main("move", ids[1], "--priority", "high")
    assert order() == [1, 0, 2]
    home.main("move", ids[2], "--first")
    assert order() == [2, 1, 0], "the first passes priorities"
    assert home.job(ids[2])["priority"] == 0 and home.main("status", "--json").json["queued_by_priority"]["high"] == 2
    for words, code in (([ids[0]], 2), ([ids[0], "--first", "--last"], 2), ([ids[0], "--priority", "x"], 2), (["zzz", "--first"], 3)):
        assert home.main("move", *words).code == code
    home.main("remove", ids[0])
    assert home.main("move", ids[0], "--first").code == 4


def test_pause_and_resume(home):
    done = home.main("pause")
    assert (done.code, done.out) == (0, "") and "running jobs go on" in done.err
    assert "[PAUSED]" in home.main().out
    home.main("resume")
    assert "[RUNNING]" in home.main().out
    home.main("pause", "0", "1")
    job_id = home.main("add", "true").id
    until(lambda: "paused" in home.job(job_id)["waiting_for"], "why it waits")
    home.main("resume", "1")
    home.main("wait", job_id)
    assert home.job(job_id)["gpu_index"] == 1
    for words, code in ((["9"], 3), (["x"], 3), (["-1"], 3)):
        assert home.main("pause", *words).code == code, words
    assert [gpu["is_paused"] for gpu in home.main("status", "--json").json["gpu_status"]] == [True, False]


def test_pause_and_resume_a_group(home):
    first = add_and_wait(home, "true", "--group", "g")
    done = home.main("pause", "--group", "g")
    assert (done.code, done.err) == (0, "nexus: group g is paused; running jobs go on\n")
    done = home.main("add", "--gpus", "0", "--group", "g", "true")
    home.main("cancel", done.id)
    again = home.main("retry", done.id)
    held = again.id
    assert all("it waits: group g is held: paused by" in one.err for one in (done, again)), "a user's hold stays with no job pending"
    home.main("wait", add(home))
    assert home.job(held)["status"] == "pending" and first != held
    assert held in home.main("queue", "--group", "g").out and "no job of group x is pending" in home.main("queue", "--group",
        "x").err
    done = home.main("why", held)
    assert done.code == 0 and "group g is held" in done.out and home.main("why", held, "--json").json["id"] == held
    assert home.main("resume", "--group", "g").code == 0 and home.main("wait", held).code == 0
    for command in ("pause", "resume"):
        done = home.main(command, "--group", "gg")
        assert done.code == 3 and "did you mean 'g'?" in done.err
    home.main("pause", "1")
    assert home.main("resume").err == "nexus: the queue is resumed\nnexus: still paused: GPU 1; nexus resume 1\n"
    assert home.main("resume", "1").err == "nexus: GPU 1 is resumed\n"


def test_a_pending_job_is_held(home):
    home.main("pause")
    job_id = home.main("add", "--name", "later", "true").id
    assert f"job {job_id} is held: nexus resume {job_id}" in home.main("hold", "later").err
    home.main("resume")
    other = add_and_wait(home, "true")
    assert home.job(other)["status"] == "completed" and home.job(job_id)["reason"]["code"] == "held"
    assert f"held (nexus resume {job_id})" in home.main("queue").out and home.job(job_id)["estimated_start"] is None
    assert home.main("pause", other).code == 4, "it has ended"
    assert home.main("release", job_id).code == 0 and home.main("wait", job_id).code == 0


def test_a_name_does_where_an_id_does(home):
    """For reading it is the latest of that name; for a change, the only one that can be changed so."""
    first = add_and_wait(home, "echo first; exit 3", "--name", "lr 2")
    assert home.main("logs", "lr 2").out == "first\n" and home.main("wait", "lr 2").code == 3
    home.main("pause")
    second = home.main("add", "--name", "lr 2", "true").id
    assert json.loads(home.main("show", "lr 2", "--json").out)["id"] == second and home.main("why", "lr 2").code == 0
    assert home.main("edit", "lr 2", "--gpus", "0").code == 0 and home.job(second)["gpus"] == 0
    child = home.main("add", "--name", "child", "--after", second, "true").id
    named = home.main("add", "--after-any", "child", "true").id
    assert home.job(named)["after_any"] == [child]
    third = home.main("add", "--name", "lr 2", "true").id
    done = home.main("cancel", "lr 2")
    assert done.code == 4 and f"2 jobs have the name 'lr 2': {second}, {third}" in done.err, done
    assert home.main("remove", second).code == 0 and home.main("cancel", "lr 2").code == 0
    assert home.job(third)["status"] == "cancelled" and home.main("clear", first, second).code == 0
    again = home.main("retry", "lr 2").id
    assert home.job(third)["retried_as"] == again
    assert "no job 'lr'" in home.main("show", "lr").err


def test_ids_stand_in_a_list(home):
    """Wherever ids are taken, unless a job has that very name."""
    home.main("pause")
    first, second = add(home, "echo 1"), add(home, "echo 2", "--name", "b")
    both = add(home, "true", "--name", f"{first},b")
    assert home.main("show", f"{first},b").out.startswith(f"Job {both}")
    assert home.main("cancel", both).code == home.main("clear", both).code == 0
    for command in ("hold", "release"):
        assert home.main(command, f"{first},b").code == 0
        assert [home.job(each)["is_held"] for each in (first, second)] == [command == "hold"] * 2
    assert home.main("edit", f"{first},{second}", "--timeout", "1h").code == home.main("pause", "0,1").code == 0
    assert [gpu["is_paused"] for gpu in home.client().status()["gpu_status"]][:2] == [True, True]
    assert home.main("scancel", f"{first},", second).code == 0
    assert {home.job(each)["status"] for each in (first, second)} == {"cancelled"}
    assert home.main("wait", f"{first},{second}").code == 1


def test_a_group_without_a_name_is_none(home):
    """As of a variable that is not set: not all the jobs that have no group."""
    job_id = home.main("add", "--gpus", "0", "sleep 600").out.strip()
    for command in ("kill", "cancel"):
        done = home.main(command, "--group", "")
        assert done.code == 2 and "--group needs a value" in done.err, done
    assert home.job(job_id)["status"] in ("pending", "running") and home.main("cancel", job_id).code == 0
    other = home.main("run", "--gpus", "0", "true").err.split()[2]
    assert "no such job is pending or running" in home.main("cancel", job_id, other).err


def test_one_bad_id_of_several_changes_nothing(home):
    running = add(home, "sleep 60")
    home.wait_for(running, "running")
    ended = add_and_wait(home)
    home.main("pause")
    waiting = add(home)
    before = {job["id"]: job["status"] for job in home.main("jobs", "--json").json}
    for command, good in (("retry", ended), ("remove", waiting), ("cancel", waiting), ("kill", running)):
        done = home.main(command, good, "zzz")
        assert done.code == 3 and "zzz" in done.err and done.out == "", done
        assert {job["id"]: job["status"] for job in home.main("jobs", "--json").json} == before, command
        assert home.job(good).get("stopping") is None, command


def test_kill_by_id_and_by_gpu(home):
    first, second = home.main("add", "sleep 60").id, home.main("add", "trap '' TERM; sleep 60 & wait; wait").id
    for job_id in (first, second):
        home.wait_for(job_id, "running")
    index = home.job(second)["gpu_index"]
    done = home.main("kill", first)
    assert (done.code, done.out) == (0, "") and done.err == f"nexus: job {first} cancelled (killed)\n"
    assert home.job(first)["cause"] == "killed"
    done = home.main("kill", str(index))
    assert done.code == 0 and home.job(second)["status"] == "cancelled", "it returns when it is gone"
    for target, code, says in ((first, 4, "cancelled"), (str(index), 3, f"GPU {index}"), ("7", 3, "GPU 7"), ("zzz", 3, "zzz"),
                               ("²", 3, "²"), ("9" * 5000, 2, "at most 200")):
        done = home.main("kill", target)
        assert done.code == code and says in done.err and "Traceback" not in done.err and len(done.err) < 500, done


def test_kill_with_another_signal(home):
    command = "trap 'echo saved; exit 5' INT; trap 'exit 6' TERM; echo ready; while :; do sleep 0.05; done"
    job_id = home.main("add", command).id
    until(lambda: home.main("logs", job_id).out == "ready\n")
    assert "FOO" in home.main("kill", "--signal", "FOO", job_id).err and home.job(job_id)["status"] == "running"
    assert home.main("kill", "--signal", "INT", job_id).code == 0
    job = home.job(job_id)
    assert (job["exit_code"], job["cause"], home.main("logs", job_id).out) == (5, "killed", "ready\nsaved\n")


def test_cancel_remove_and_retry(home):
    home.main("pause")
    waiting, other = add(home), add(home)
    assert home.main("kill", waiting).code == 4 and "nexus remove" in home.main("kill", waiting).err
    assert home.main("remove", waiting).code == 0 and home.job(waiting)["status"] == "cancelled"
    assert home.main("remove", waiting).code == 4
    home.main("resume")
    home.main("wait", other)
    running = add(home, "sleep 60")
    home.wait_for(running, "running")
    assert home.main("remove", running).code == 4
    home.main("pause")
    waiting = add(home)
    done = home.main("cancel", running, waiting)
    assert done.code == 0 and {home.job(job_id)["status"] for job_id in (running, waiting)} == {"cancelled"}
    done = home.main("retry", running, waiting)
    assert re.fullmatch(r"([A-Za-z]{3,4}\n){2}", done.out) and done.err == "nexus: it waits: the queue is paused (nexus resume)\n"
    assert len(home.main("queue", "--json").json) == 2


def test_cancel_by_status_and_group(home):
    home.main("pause")
    ids = [home.main("add", "--group", group, "true").id for group in ("g", "g", "h")]
    assert home.main("cancel").code == 2 and home.main("cancel", ids[0], "--group", "g").code == 2
    assert home.main("cancel", "--group", "g").code == 0
    assert [home.job(job_id)["status"] for job_id in ids] == ["cancelled", "cancelled", "pending"]
    assert home.main("cancel", "--status", "pending").code == 0 and home.job(ids[2])["status"] == "cancelled"
    done = home.main("cancel", "--status", "pending,running")
    assert done.code == 0 and "no such job is pending or running" in done.err
    assert f"job {ids[2]} never ran: job {ids[2]} cancelled" in home.main("logs", ids[2]).err


def test_a_cancel_names_what_goes_with_it(home):
    home.main("pause")
    first = add(home, "true")
    second = add(home, "true", "--after", first)
    third = add(home, "true", "--after", second)
    done = home.main("cancel", first, "nope")
    assert done.code == 3 and "nothing was done to the others" in done.err and home.job(first)["status"] == "pending"
    done = home.main("cancel", first)
    assert f"with it 2 jobs that came after: {second}, {third}" in done.err
    assert f"nexus retry {first} {second} {third}" in done.err, done
    parents = [add(home, "true") for _ in range(2)]
    child = add(home, "true", "--after", ",".join(parents))
    assert child in home.main("cancel", parents[0]).err and child not in home.main("cancel", parents[1]).err, "it had gone before"
    token = home.main("token", "create", "ann").out.strip()
    environ = {"NEXUS_URL": f"http://127.0.0.1:{home.port}", "NEXUS_TOKEN": token}
    mine = home.main("add", "true", **environ).id
    child = home.main("add", "--after", mine, "true", **environ).id
    done = home.main("cancel", mine, **environ)
    assert done.code == 0 and f"with it 1 job that came after: {child}" in done.err, "others' jobs do not show what they come after"
    other = add(home, "true")
    assert "1 of these jobs had ended before" in home.main("cancel", first, other).err


def test_a_cancelled_sweep_pushes_out_nothing_that_ran():
    with Home(history_limit=3) as home:
        ran = [add_and_wait(home, "echo out"), add_and_wait(home, "exit 3")]
        ids = home.main("add", "--begin", "+1h", "--sweep", "a=1..40", "echo {a}").out.split()
        done = home.main("cancel", "--status", "pending")
        assert done.code == 0 and re.fullmatch("nexus: 40 jobs: .*, and 35 more\nnexus: 40 pending jobs cancelled\n", done.err), done
        until(lambda: "Trimmed 37 jobs beyond history_limit" in home.file("service.log").read_text(), "those that never ran to go")
        assert [home.job(job_id)["exit_code"] for job_id in ran] == [0, 3] and home.main("logs", ran[0]).out == "out\n"
        kept = {job["id"] for job in home.client().jobs()}
        gone = [job_id for job_id in ids if job_id not in kept]
        done = home.main("wait", gone[0], ran[0], *kept)
        assert done.code == 3 and f"no job '{gone[0]}'" in done.err


def test_clear(home):
    bad, good, runs = add_and_wait(home, "exit 3"), add_and_wait(home), add(home, "sleep 60")
    done = home.main("clear", "--status", "failed")
    assert (done.code, done.out) == (0, "") and "1 finished job forgotten" in done.err
    assert not home.file(f"logs/job_{bad}").exists() and home.file(f"logs/job_{good}").exists()
    assert home.main("show", bad).code == 3 and home.main("clear", runs).code == 4
    assert home.main("clear").code == 2 and "nexus clear --older 30d" in home.main("clear").err
    assert "1 finished job" in home.main("clear", "--all").err and [job["id"] for job in home.client().jobs()] == [runs]
    done = home.main("clear", "--status", "done")
    assert done.code == 2 and "with commas" in done.err and "nexus help clear" in done.err


def test_who_clears_all_at_a_terminal_is_asked(home):
    add_and_wait(home, "echo 12345")
    for answer, left in (("\n", 1), ("y\n", 0)):
        with home.terminal("clear", "--all") as terminal:
            terminal.wait_for("forget 1 finished job, with all logs?")
            terminal.type(answer)
            terminal.end()
        assert len(home.client().jobs()) == left

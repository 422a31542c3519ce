"""Each subcommand, as its user sees it.  Data on stdout, words on stderr."""

import datetime
import functools
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv

import live
import pytest
from console import COMMAND, SCRIPT, Home, Terminal
from live import until

import nexus


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def add(home, command="true", *options):
    return home.main("add", "--gpus", "0", *options, command).id


def add_and_wait(home, command="true", *options):
    job_id = add(home, command, *options)
    home.main("wait", job_id)
    return job_id


# Status

PAUSED = """\
Queue: 1 job pending [PAUSED]
History: 1 job completed

GPUs:
GPU 0 (Mock GPU, 24GB):
  Job ID: ID
  Command: sleep 60
  Runtime: TIME
  Started: CLOCK
GPU 1 (Mock GPU, 24GB): Paused

hint: these GPUs are made up; for the real ones: nexus restart, without NEXUS_MOCK_GPUS
"""


def blur(text):
    return re.sub(r"Started: (\x1b\[36m)?\d\d:\d\d", r"Started: \1CLOCK", re.sub(r"Runtime: (\x1b\[36m)?\d+s", r"Runtime: \1TIME", re.sub(
        r"Job ID: (\x1b\[35m)?[A-Za-z]{3,4}", r"Job ID: \1ID", text)))


def test_the_snapshot_plain_and_in_colour(home):
    add_and_wait(home)
    running = home.main("add", "sleep 60").id
    home.wait_for(running, "running")
    home.main("pause")
    home.main("pause", "1")
    home.main("add", "true")
    for words in (["status"], []):
        done = home.main(*words)
        assert (done.code, blur(done.out), done.err) == (0, PAUSED, "")
    coloured = ("\x1b[34mQueue: 1 job pending\x1b[0m \x1b[33m[PAUSED]\x1b[0m\n\x1b[1mHistory: 1 job completed\x1b[0m\n\n"
                "\x1b[1mGPUs:\x1b[0m\n\x1b[1mGPU 0 (Mock GPU, 24GB):\x1b[0m\n  Job ID: \x1b[35mID\x1b[0m\n"
                "  Command: \x1b[1msleep 60\x1b[0m\n  Runtime: \x1b[36mTIME\x1b[0m\n  Started: \x1b[36mCLOCK\x1b[0m\n"
                "\x1b[1mGPU 1 (Mock GPU, 24GB):\x1b[0m \x1b[33mPaused\x1b[0m\n")
    with home.terminal() as terminal:
        code, shown = terminal.end()
        assert code == 0 and blur(shown).startswith(coloured)
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        with home.terminal(**environ) as terminal:
            code, shown = terminal.end()
            assert blur(shown) == PAUSED, environ
    home.main("kill", running)
    home.main("resume", "1")
    home.main("remove", home.main("queue", "--json").json[0]["id"])
    with home.terminal("status") as terminal:
        assert "\x1b[1mGPU 1 (Mock GPU, 24GB):\x1b[0m \x1b[92mAvailable\x1b[0m\n" in terminal.end()[1]


def test_without_a_terminal_top_is_printed_once(home):
    done = home.run("status", "--watch")
    assert (done.code, done.out.count("Queue: "), done.err) == (0, 1, "") and "\x1b" not in done.out
    nexus_top = f"{sys.executable} {COMMAND} top"
    for line in (f"{nexus_top} < /dev/null", f"set -o pipefail; {nexus_top} | cat"):
        with Terminal(["bash", "-c", line], home.environ) as terminal:
            code, shown = terminal.end()
            assert (code, shown.count("Queue: ")) == (0, 1) and "\x1b" not in shown, line


def test_status_watch_leaves_a_stopped_service_stopped(bare_home):
    with bare_home.terminal("top") as terminal:
        terminal.wait_for("does not run")
        terminal.type("q")
        assert terminal.end()[0] == 0 and not bare_home.file("service.json").exists()
    bare_home.main("pause")
    for number in range(12):
        add(bare_home, f"true {number}")
    with bare_home.terminal("status", "--watch", rows=12) as terminal:
        terminal.wait_for(rb"Queue: [\s\S]*?q ends  \S+ \d+ more lines")
        bare_home.main("stop")
        terminal.wait_for("does not run")
        assert not bare_home.file("service.json").exists()
        bare_home.main("start")
        terminal.wait_for("Queue: ")
        terminal.type("\x03")
        code, shown = terminal.end()
        assert code == 0 and shown.endswith("\x1b[?1049l") and "Traceback" not in shown


# Adding

def test_add_prints_the_id_alone(home):
    done = home.main("add", "--gpus", "0", "echo a")
    assert nexus.is_job_id(done.out.strip()) and done.out.count("\n") == 1 and done.err == "" and done.code == 0
    assert home.main("add", "--gpus", "0", "--json", "echo a").json.keys() == {"id"}


def test_a_job_has_the_environment_directory_and_umask_of_its_submitter(home):
    folder = os.path.join(home.top, "a folder with 'quotes'")
    os.makedirs(folder, exist_ok=True)
    script = (f'umask 027; exec "{sys.executable}" "{COMMAND}" run --gpus 0 '
              '\'pwd; echo "$OWN"; umask; echo "$LD_LIBRARY_PATH"\'')
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=folder, timeout=60, env={
        **home.environ, "OWN": "two\nlines 'and' \"quotes\" $HOME", "LD_LIBRARY_PATH": "/opt/lib"})
    assert done.stdout.decode().splitlines() == [folder, "two", "lines 'and' \"quotes\" $HOME", "0027", "/opt/lib"], done


WORDS = [  # what is typed, the command
    (["echo a b"], "echo a b"),
    (["echo", "a b", "$HOME"], "echo 'a b' '$HOME'"),
    (["--", "python", "train.py", "--lr", "0.1"], "python train.py --lr 0.1"),
    (["echo a; echo b | cat"], "echo a; echo b | cat"),
    (["echo 'größe 数据 🚀'"], "echo 'größe 数据 🚀'"),
]


@pytest.mark.parametrize("words, command", WORDS, ids=[case[1] for case in WORDS])
def test_how_words_become_a_command(home, words, command):
    assert home.job(home.main("add", "--gpus", "0", *words).id)["command"] == command


BAD_ADDS = [  # reason, words, what it says
    ("nothing", [], "no command"),
    ("NUL", ["a\0b"], "NUL"),
    ("1 MB", ["x" * 2**20], "put it into a script"),
    ("options of the command", ["python", "train.py", "--lr", "1"], "'python train.py --lr 1'"),
    ("no number", ["--gpus", "many", "true"], "--gpus/-g must be"),
    ("too many", ["--gpus", "3", "true"], "3 GPUs"),
    ("too many named", ["--gpus", "2", "--gpu-ids", "1", "true"], "gpu_ids"),
    ("not there", ["--gpu-ids", "7", "true"], "7"),
    ("backwards", ["--gpu-ids", "3-1", "true"], "0-3,5"),
    ("no priority", ["--priority", "urgent", "true"], "urgent"),
    ("no variable", ["--env", "A", "true"], "NAME=VALUE"),
    ("no directory", ["--cwd", "/no/such/folder", "true"], "/no/such/folder"),
    ("a file and a command", ["--file", "x", "true"], "not both"),
    ("no file", ["--file", "/no/such/file"], "/no/such/file"),
    ("an endless file", ["--file", "/dev/zero"], "/dev/zero: it is longer than 64MB"),
    ("a script", ["--file", SCRIPT], "hint: nexus add job.sh"),
    ("an unknown option", ["--gpu", "1", "true"], "--gpu"),
    ("three decimals", ["--gpus", "0.125", "true"], "two decimals"),
    ("no size", ["--gpu-mem", "much", "true"], "--gpu-mem"),
    ("more memory than there is", ["--gpu-mem", "9999G", "true"], "with 9999GB"),
    ("a group of two lines", ["--group", "a\nb", "true"], "--group"),
    ("a limit of no group", ["--max-concurrent", "2", "true"], "--group NAME"),
    ("after no id", ["--after", ",", "true"], "--after"),
    ("half a retry", ["--retries", "1.5", "true"], "--retries"),
    ("no time", ["--timeout", "soon", "true"], "--timeout"),
    ("a model without a table", ["--llm", "qwen", "true"], "llm"),
    ("a sweep without a name", ["--sweep", "1,2", "t"], "NAME=VALUE"),
    ("a sweep of another name", ["--sweep", "lr=1", "t {rl}"], "no {lr}"),
    ("a sweep of a variable", ["--sweep", "lr=1", "t ${lr}"], "no {lr}"),
    ("brackets that do not match", ["--sweep", "l=[1,2", "t {l}"], "character 1"),
    ("a sweep of no file", ["--sweep", "s=@/no/such", "t {s}"], "@@/no/such"),
    ("a sweep of directories, one of which is missing", ["--sweep", "d=/,/no/such", "--cwd", "{d}", "t"], "/no/such"),
    ("a limit of no group in a sweep", ["--sweep", "a=1", "--max-concurrent", "2", "t {a}"], "--group NAME"),
    ("too many combinations", ["--sweep", "a=1..1000", "--sweep", "b=1..1000", "t {a} {b}"], "combinations"),
    ("no git tree", ["--snapshot", "--cwd", "/", "true"], "git"),
]


@pytest.mark.parametrize("reason, words, says", BAD_ADDS, ids=[case[0] for case in BAD_ADDS])
def test_what_add_refuses(home, reason, words, says):
    home.main("status")
    before = len(home.client().jobs())
    for command in ("add", "run"):
        done = home.main(command, *words)
        assert (done.code, done.out) == (2, "") and says in done.err and "\nhint: " in done.err, done
        assert done.err.startswith("nexus: ") and "Traceback" not in done.err and len(done.err) < 1000
    assert len(home.client().jobs()) == before


def test_a_snapshot_for_another_machine_is_refused(home):
    home.main("status")
    there = {"NEXUS_URL": f"http://127.0.0.1:{home.port}", "NEXUS_TOKEN": home.file("token").read_text().strip()}
    for words in (["add"], ["add", "--dry-run"], ["run", "--dry-run"]):
        done = home.main(*words, "--snapshot", "true", **there)
        assert (done.code, done.out) == (2, "") and "work tree on the service's own machine" in done.err, done


@pytest.mark.parametrize("by", ["file", "stdin"])
def test_add_a_file_of_commands(home, by):
    content = b"\xef\xbb\xbf# first\r\n\n  echo a  \r\necho caf\xe9\necho b \\\n  > log"
    path = os.path.join(home.top, "commands.txt")
    with open(path, "wb") as file:
        file.write(content)
    done = home.run("add", "--gpus", "0", "--file", path if by == "file" else "-", stdin=content if by == "stdin" else b"")
    assert [home.client().job(job_id)["command"] for job_id in done.out.split("\n")[:-1]] == ["echo a", "echo caf\udce9", "echo b   > log"]


@pytest.mark.parametrize("content, says", [
    (b"# a\n\n", "no command"), (b"# a\n\necho \0\n", "line 3, 'echo "), (b"echo a\n" + b"x" * 200000, "line 2, 'xxx"),
    (b"echo a \\\n  b\necho \0\n", "line 3, 'echo "),
    (b"#!/bin/sh\necho a\n", "nexus add "),
    (b"echo a\necho 'b\n", "line 2, 'echo 'b': bash cannot read the command"), ("echo a\r\n".encode("utf-16"), "line 1, ")])
@pytest.mark.parametrize("by", ["file", "stdin"])
def test_nothing_of_a_bad_file_is_added(home, content, says, by):
    home.main("status")
    before, path = len(home.client().jobs()), home.file("commands.txt")
    path.write_bytes(content)
    done = home.run("add", "--gpus", "0", "--file", str(path) if by == "file" else "-", stdin=content if by == "stdin" else b"")
    assert done.code == 2 and done.out == "" and says in done.err and "hint:" in done.err, done
    assert len(home.client().jobs()) == before


def test_odd_commands_run_and_show_as_one_harmless_line(home):
    odd = {"echo one\necho two\n": b"one\ntwo\n", "printf 'a\x1b[2Jb'": b"a\x1b[2Jb", "echo caf\udce9": b"caf\xe9\n",
           "echo '" + "y" * 100000 + "'": b"y" * 100000 + b"\n", "echo \\\n  joined": b"joined\n"}
    for command, output in odd.items():
        job_id = add_and_wait(home, command, "--name", "odd")
        done = home.run("logs", job_id)
        assert (done.code, done.bytes) == (0, output)
        for words in (["jobs"], ["show", job_id], ["history", "-n", "0"]):
            shown = home.main(*words)
            assert shown.code == 0 and "\x1b" not in shown.out and "Traceback" not in shown.err
        assert home.job(job_id)["command"] == command
    lines = [line for line in home.run("jobs").out.split("\n") if "  odd  " in line]
    assert len(lines) == len(odd)


# Running

def test_run_passes_everything_through_and_exits_with_the_jobs_code(home):
    done = home.run("run", "--gpus", "0", "printf 'a\\377\\000\\r\\nb'; printf 'x\\376y' >&2; exit 42")
    assert done.code == 42 and done.bytes == b"a\xff\x00\r\nb"
    told, _, rest = done.err_bytes.partition(b"\n")
    rest = re.sub(rb"^nexus: it waits: .*\n", b"", rest)          # on a busy machine it does, for a moment
    assert re.fullmatch(rb"nexus: job [A-Za-z]{3,4}", told)
    assert re.fullmatch(rb"x\xfey\nnexus: job [A-Za-z]{3,4} failed \(exit 42\)\n", rest), rest
    for command, code in (("true", 0), ("false", 1), ("kill -9 $$", 137), ("no-such-program", 127), ("(exit 3) 2>&1 | tee log", 3)):
        assert home.run("run", "--gpus", "0", command).code == code, command
    assert home.main("jobs", "-n", "1", "--json").json[0]["command"] == command, "as it was typed"


def test_run_of_a_megabyte_on_both_streams(home):
    done = home.run("run", "--gpus", "0", "seq 200000; seq 200000 >&2")
    expected = "".join(f"{number}\n" for number in range(1, 200001))
    assert done.code == 0 and done.out == expected
    told, shown, rest = done.err.partition(f"\n{expected}")
    assert shown and "\n" not in told and re.fullmatch("nexus: job [A-Za-z]+ completed\n", rest)


def test_ctrl_c_leaves_the_job_running(home):
    with home.terminal("run", "--gpus", "0", "echo begun; sleep 60") as terminal:
        job_id = terminal.wait_for(rb"nexus: job ([A-Za-z]+)")[1].decode()
        terminal.wait_for("begun")
        terminal.type("\x03")
        code, shown = terminal.end()
    assert code == 130 and f"job {job_id} goes on" in shown and f"nexus logs -f {job_id}" in shown and "Traceback" not in shown
    assert home.job(job_id)["status"] == "running"
    assert home.main("kill", job_id).code == 0


def test_run_tells_when_nobody_reads_on(home):
    gate = home.file("gate of head")
    process = home.popen("run", "--gpus", "0", f"echo first; until [ -e '{gate}' ]; do sleep 0.02; done; echo second; sleep 60")
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    job_id = process.stderr.readline().split()[-1].decode()
    gate.touch()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read().decode().endswith(
        f"nexus: job {job_id} goes on; follow it: nexus logs -f {job_id}; stop it: nexus cancel {job_id}\n")
    assert home.job(job_id)["status"] == "running" and home.main("kill", job_id).code == 0


def test_a_group_without_a_name_is_none(home):
    """As of a variable that is not set: not all the jobs that have no group."""
    job_id = home.main("add", "--gpus", "0", "sleep 600").out.strip()
    for command in ("kill", "cancel"):
        done = home.main(command, "--group", "")
        assert done.code == 2 and "--group needs a value" in done.err, done
    assert home.job(job_id)["status"] in ("pending", "running") and home.main("cancel", job_id).code == 0
    other = home.main("run", "--gpus", "0", "true").err.split()[2]
    assert "no such job is pending or running" in home.main("cancel", job_id, other).err


def test_run_says_why_it_waits(home):
    home.main("pause")
    process = home.popen("run", "echo done")
    assert process.stderr.readline().startswith(b"nexus: job ")
    assert process.stderr.readline() == b"nexus: it waits: the queue is paused (nexus resume)\n"
    home.main("resume")
    assert process.communicate(timeout=60)[0] == b"done\n"


def test_wait_exits_with_the_jobs_code(home):
    good, bad, worse = add(home), add(home, "exit 3"), add(home, "sleep 0.1; exit 4")
    assert (home.main("wait", good).code, home.main("wait", bad).code, home.main("wait", good, worse, bad).code) == (0, 3, 4)
    done = home.main("wait", bad)
    assert done.out == "" and done.err.startswith(f"nexus: job {bad} failed (exit 3)")
    assert home.main("wait", "zzz").code == 3
    assert home.main("wait", good, good).code == 0
    stopped = add(home, "trap 'exit 0' TERM; sleep 60 & wait", "--timeout", "5s")         # by then it has its trap
    assert home.main("wait", stopped).code == 1, "that it ended well is no success"


def test_wait_for_any(home):
    slow, quick = add(home, "sleep 60"), add(home, "exit 4")
    done = home.main("wait", slow, quick, "--any")
    assert done.code == 4 and f"job {quick} failed" in done.err and slow not in done.err
    home.main("kill", slow)
    done = home.main("wait", slow, quick)
    assert done.code == home.job(slow)["exit_code"] and "2 of 2 have ended" in done.err


def test_clear(home):
    bad, good, runs = add_and_wait(home, "exit 3"), add_and_wait(home), add(home, "sleep 60")
    done = home.main("clear", "--status", "failed")
    assert (done.code, done.out) == (0, "") and "1 finished job forgotten" in done.err
    assert not home.file(f"logs/job_{bad}").exists() and home.file(f"logs/job_{good}").exists()
    assert home.main("show", bad).code == 3 and home.main("clear", runs).code == 4
    assert home.main("clear").code == 2 and "nexus clear --all" in home.main("clear").err
    assert "1 finished job" in home.main("clear", "--all").err and [job["id"] for job in home.client().jobs()] == [runs]
    done = home.main("clear", "--status", "done")
    assert done.code == 2 and "with commas" in done.err and "nexus help clear" in done.err


def test_a_job_after_several_ids(home):
    home.main("pause")
    ids = home.main("add", "--sweep", "n=0..1", "echo {n}").out
    job_id = home.main("add", "--after", ids, "echo done").id
    assert home.job(job_id)["after"] == ids.split()
    first, second = ids.split()
    job_id = home.main("add", "--after", second, "--after", f"{first},{second}", "--after-any", first, "echo done").id
    assert home.job(job_id)["after"] == [second, first] and home.job(job_id)["after_any"] == [first]
    assert "after " + ", ".join(ids.split()) in home.main("edit", job_id, "--after", first, "--after", second).err
    assert home.job(job_id)["after"] == ids.split()
    assert home.main("edit", job_id, "--after", "none").code == 0 and home.job(job_id)["after"] == []
    done = home.main("edit", job_id, "--gpus", "x")
    assert "nexus: --gpus/-g must be a number" in done.err, "its name, as add says it"


def test_dry_run(home):
    before = len(home.client().jobs())
    for command in ("add", "run"):
        done = home.main(command, "--dry-run", "--gpus", "0.5", "echo one")
        assert (done.code, done.out) == (0, "echo one\n") and "1 job would be added" in done.err
    done = home.main("add", "--dry-run", "--sweep", "lr=1e-3,1e-4", "--sweep", "seed=0..1",
        'a --lr {lr} --seed {seed} ${HOME} ${lr} \'{"x": {y}}\'')
    rest = '${HOME} ${lr} \'{"x": {y}}\''
    assert done.out.splitlines() == [f"a --lr {lr} --seed {seed} {rest}" for lr in ("1e-3", "1e-4")
        for seed in "01"] and "4 jobs" in done.err
    done = home.main("add", "--dry-run", "--json", "--gpus", "0", "x")
    assert done.json[0].items() >= {"command": "x", "gpus": 0, "priority": 1}.items()
    assert home.main("add", "--dry-run", "--gpus", "9", "x").code == 2 and home.main("add", "--dry-run", "--after", "zzz", "x").code == 3
    assert len(home.client().jobs()) == before


def test_a_dry_run_leaves_out_what_would_not_be_added_or_would_not_run(home):
    first, failed = add_and_wait(home, "echo 1"), add_and_wait(home, "false")
    words = ("add", "--dry-run", "--gpus", "0")
    done = home.main(*words, "--unique", "--sweep", "n=1,2,2", "echo {n}")
    assert done.out == "echo 2\n" and f"job {first} is the same and is there already" in done.err and "1 job would be added" in done.err
    done = home.main(*words, "--after", failed, "echo 3")
    assert (done.code, done.out) == (0, "") and "0 jobs would be added" in done.err
    assert f"it would be cancelled at once: {home.job(add_and_wait(home, 'true', '--after', failed))['cause_line']}" in done.err


def test_a_sweep_of_a_file(home):
    home.file("swept").write_text("echo {a}\n# not {a}\necho {a}{a}\n")
    done = home.main("add", "--gpus", "0", "--sweep", "a=1,2", "--file", str(home.file("swept")))
    ids = done.out.split()
    assert [home.job(job_id)["command"] for job_id in ids] == ["echo 1", "echo 2", "echo 11", "echo 22"]
    assert home.main("run", "--sweep", "a=1,2", "echo {a}").code == 2 and home.main("run", "--gpus", "0", "--sweep", "a=7",
        "echo {a}").out == "7\n"
    assert len(home.main("add", "--gpus", "0", "--sweep", "a=7", "echo {a}").out.split()) == 1


def test_a_sweep_fills_names_groups_variables_and_directories(home, tmp_path):
    for folder in ("a,b", "c"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dirs.txt").write_text("a,b\n\nc\n")
    done = home.main("add", "--gpus", "0", "--sweep", f"d=@{tmp_path}/dirs.txt", "--sweep", "k=['x,y',{z}]",
        "--name", "run-{d}", "--group", "g-{k}", "--env", "SEED=s{k}", "--env", "SAME=yes", "--cwd", str(tmp_path / "{d}"),
        "echo {k} ${SEED} $SAME {d} ${#d} {lr}; pwd")
    assert done.err == "nexus: {lr} stays as it is, as no --sweep has that name\n"
    jobs = [home.job(job_id) for job_id in done.out.split()]
    assert [(job["name"], job["group"], job["cwd"]) for job in jobs] == [
        (f"run-{folder}", "g-[x,y,{z}]", str(tmp_path / folder)) for folder in ("a,b", "c")]
    assert jobs[0]["command"] == "echo ['x,y',{z}] ${SEED} $SAME a,b ${#d} {lr}; pwd", "quotes stay in the command, in one pass"
    home.main("wait", jobs[0]["id"])
    assert home.main("logs", jobs[0]["id"]).out == f"[x,y,{{z}}] s[x,y,{{z}}] yes a,b 0 {{lr}}\n{tmp_path}/a,b\n"
    assert not {"variables", "env"}.intersection(jobs[0])


def test_a_script_has_the_values_of_its_sweep_and_jobs_that_it_adds_do_not(home, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\necho $NEXUS_TASK_ID $NEXUS_SWEEP_s $NEXUS_SWEEP_lr; echo $SEED\n"
                      f"{sys.executable} {COMMAND} add --gpus 0 'env | grep -c ^NEXUS_[ST][WA]; echo in $SEED' "
                      "> inner.$NEXUS_TASK_ID\n")
    words = ("--gpus", "0", "--sweep", "s=8..9", "--sweep", "lr=0.1,'a,b'", "--env", "SEED={s}", "--cwd", str(tmp_path))
    ids = home.main("add", *words, str(script)).out.split()
    assert home.main("wait", *ids).code == 0
    assert [home.main("logs", job_id).out for job_id in ids] == [
        "0 8 0.1\n8\n", "1 8 a,b\n8\n", "2 9 0.1\n9\n", "3 9 a,b\n9\n"]
    inner = (tmp_path / "inner.3").read_text().strip()
    home.main("wait", inner)
    assert home.main("logs", inner).out == "0\nin 9\n"
    assert home.main("add", "--unique", *words, str(script)).out.split() == ids, "each has variables of its own"
    again = home.main("retry", ids[3]).out.strip()
    home.main("wait", again)
    assert home.main("logs", again).out == "3 9 a,b\n9\n"
    held = home.main("add", "--gpus", "0", "--begin", "+1h", "--sweep", "s=8", "--env", "SEED={s}", "echo $SEED").id
    home.main("edit", held, "--env", "SEED=5", "--begin", "none")
    home.main("wait", held)
    assert home.main("logs", held).out == "5\n", "a later --env counts"


def test_each_over_http_says_what_differs(home):
    added = home.client().submit({"gpus": 0, "group": "g", "env": {"A": "1", "B": "1"}, "each": [
        {"command": "echo $A$B", "name": "x"}, {"command": "echo $A$B", "group": "h", "env": {"A": "2"}}]})["ids"]
    assert home.main("wait", *added).code == 0
    assert [home.main("logs", job_id).out for job_id in added] == ["11\n", "21\n"]
    assert [(home.job(job_id)["name"], home.job(job_id)["group"]) for job_id in added] == [("x", "g"), (None, "h")]
    for body in ({"each": [{"name": "x"}]}, {"each": []}, {"command": "x", "each": [{"command": "x"}]},
                 {"each": [{"command": "x", "gpus": 1}]}, {"each": [{"command": "x", "env": {"A": "x" * 70000}}]}):
        with pytest.raises(nexus.NexusError) as caught:
            home.client().submit(body)
        assert caught.value.kind == "usage", body


NOTED = [  # reason, command, what is said of it
    ("GPUs of its own", "CUDA_VISIBLE_DEVICES=1 true", "--gpu-ids 3 asks for GPU 3"),
    ("conda of a terminal", "conda activate ml; python -c 1", "a job has none: leave it out, and say --conda ml"),
    ("after a cd", "cd / && micromamba activate /opt/ml&& true", "--conda /opt/ml"),
    ("conda as scripts use it", ". /opt/conda/etc/profile.d/conda.sh; conda activate ml", ""),
    ("a shell", "bash", "bash waits for what is typed: at a terminal, nexus run --tty bash is an interactive job; nexus attach ID"),
    ("with options", "/bin/bash -l", "nexus run --tty '/bin/bash -l'"), ("an interpreter", "python3", "nexus run --tty python3"),
    ("an editor", "vim a b", "nexus run --tty 'vim a b'"), ("a shell with work", "bash job", ""), ("a module", "python3 -m x", ""),
    ("a command in a shell", "bash -c true", ""), ("a version", "python3 -V", ""), ("a script of vim's", "vim -es x", ""),
    ("conda's hook", 'eval "$(conda shell.bash hook)" && conda activate ml', ""), ("nothing", "true", ""),
]


@pytest.mark.parametrize("reason, command, says", NOTED, ids=[case[0] for case in NOTED])
def test_what_will_not_do_what_was_meant_is_noted_when_it_is_added(home, reason, command, says):
    done = home.main("add", "--gpus", "0", "--begin", "+1h", command)
    assert (says in done.err if says else not done.err) and home.main("cancel", done.id).code == 0


def test_a_script_that_needs_slurm_is_noted(home, tmp_path):
    script = tmp_path / "job.sh"
    for line, says in (("srun python train.py", "it calls srun"), ("  exec srun -n 4 x", "it calls srun"), ("echo srun", ""),
                       ("mkdir out.$SLURM_JOB_ID", "it reads $SLURM_JOB_ID"), ("echo ${SLURM_PROCID:-0}", "it reads $SLURM_PROCID"),
                       ("echo $SLURM_ARRAY_TASK_ID", "")):
        script.write_text(f"#!/bin/bash\n{line}\n")
        done = home.main("add", "--gpus", "0", "--begin", "+1h", str(script))
        assert (f"{script}: {says}" in done.err if says else not done.err), line
        home.main("cancel", done.id)


def test_a_notebook_is_run_by_jupyter(home, tmp_path):
    (tmp_path / "nb.ipynb").write_text("{}")
    done = home.main("add", "--cwd", str(tmp_path), "nb.ipynb")
    assert done.code == 2 and "hint: nexus add 'jupyter nbconvert --to notebook --execute --inplace nb.ipynb'" in done.err


def test_all_that_holds_a_job_is_told_the_shortest_first(home):
    first = home.main("add", "--gpus", "0", "--begin", "+1h", "true").id
    job_id = home.main("add", "--gpus", "0", "--begin", "+2h", "--after", first, "--group", "g", "true").id
    home.main("pause", job_id)
    home.main("pause")
    home.main("pause", "--group", "g")
    told = home.job(job_id)
    parts = told["waiting_for"].split("; ")
    assert sorted(parts, key=len) == parts and {re.sub(r"\d+[hms]\b|by \w+", "X", part) for part in parts} == {
        f"after job {first}", f"it is held (nexus resume {job_id})", "begins in X X, as asked", "the queue is paused (nexus resume)",
        "group g is held: paused X (nexus resume --group g)"}
    assert told["reason"]["code"] == "held" and told["waiting_for"] in home.main("why", job_id).out
    home.main("resume", job_id)
    home.main("resume")
    assert home.job(job_id)["reason"] == {"code": "held", "subject": "g", "detail": parts[-1]}


def test_unique_is_told(home):
    first = add(home, "echo the only one")
    done = home.main("add", "--gpus", "0", "--unique", "echo the only one")
    assert done.id == first and f"job {first} is the same and is there already" in done.err
    assert home.main("add", "--gpus", "0", "--unique", "--json", "echo the only one").json == {"id": first, "known": [first]}
    assert home.main("add", "--gpus", "0", "--unique", "--env", "A=1", "echo the only one").id != first


def test_options_arrive(home):
    words = ("--group", "g1", "--max-concurrent", "3", "--retries", "2", "--timeout", "2h", "--expect", "30m", "--gpu-mem", "1G",
        "--gpus", "0.5",
             "--gpu-ids", "0-1", "--priority", "low", "--cuda-arg", "--name", "n")
    home.main("pause")
    try:
        job = home.job(add(home, "true --cuda x", *words))
    finally:
        home.main("resume")
    wanted = {"group": "g1", "retries": 2, "timeout_seconds": 7200, "expected_time": 1800, "gpu_mem_mib": 1024, "gpus": 0.5,
        "gpu_ids": [0, 1],
              "priority": 2, "cuda_arg": True, "name": "n"}
    assert {name: job[name] for name in wanted} == wanted


def test_a_log_folder_that_was_removed_is_told(home):
    gone, kept = add_and_wait(home, "echo hello", "--group", "cleaned"), add_and_wait(home, "echo there", "--group", "cleaned")
    shutil.rmtree(home.job(gone)["log_dir"])
    says = f"the logs of job {gone} are gone: there is no {home.file('logs', f'job_{gone}')}"
    for options in ([], ["-f"], ["-n", "3"], ["--grep", "hello"], ["--stream", "stderr"]):
        done = home.main("logs", gone, *options)
        assert (done.code, done.out) == (3, "") and f"nexus: {says}\nhint: nexus show {gone} " in done.err, options
    for options in (["--group", "cleaned"], ["-f", "--group", "cleaned"], [kept, gone], [gone, kept, "--grep", "there"]):
        done = home.main("logs", *options)
        assert done.code == 3 and f"nexus: {says}\n" in done.err and f"{kept} | there\n" in done.out, options
    with pytest.raises(nexus.NexusError) as caught:
        list(home.client().logs(gone))
    assert caught.value.kind == "not_found" and caught.value.message == says
    assert home.main("logs", kept).code == 0
    done = home.main("show", gone)
    assert done.code == 0 and f"\n  {says}\n" in done.out


def test_run_waits_for_a_job_whose_log_folder_is_removed(home):
    go = home.file("goes-on")
    running = home.popen("run", "--gpus", "0", f"echo hello; until [ -e {go} ]; do sleep 0.05; done; exit 7")
    job_id = re.match(rb"nexus: job (\w+)\n", running.stderr.readline())[1].decode()
    assert running.stdout.readline() == b"hello\n"
    shutil.rmtree(home.file("logs", f"job_{job_id}"))
    until(lambda: b"are gone" in running.stderr.readline())
    go.touch()
    _, said = running.communicate(timeout=60)
    job = home.wait_for(job_id)
    assert job["status"] == "failed" and f"job {job_id} failed" in said.decode() and running.returncode not in (0, 3), (job, said)


def test_a_log_folder_that_is_removed_while_it_is_followed_is_told(home):
    running, other = add(home, "echo hello; sleep 1000"), add(home, "echo there; sleep 1000")
    for job_id in (running, other):
        live.until(lambda job_id=job_id: "e" in home.main("logs", job_id).out)
    followers = [home.popen("logs", "-f", running), home.popen("logs", "-f", running, other)]
    for process in followers:
        process.stdout.readline()
    shutil.rmtree(home.job(running)["log_dir"])
    assert followers[0].wait(60) == 3 and b"are gone: there is no" in followers[0].stderr.read()
    home.main("kill", other)
    assert followers[1].wait(60) == 3 and b"are gone: there is no" in followers[1].stderr.read()
    home.main("kill", running)
    for process in followers:
        process.stdout.close()
        process.stderr.close()


# Groups


def test_wait_for_a_group(home):
    ids = [add(home, command, "--group", "waited") for command in ("true", "exit 5", "sleep 0.2")]
    done = home.main("wait", "--group", "waited")
    assert (done.code, done.out) == (5, "") and f"job {ids[1]} failed (exit 5)" in done.err
    assert home.main("wait", "--group", "waited").code == 5, "as often as it is asked"
    again = home.main("retry", "--group", "waited").id
    home.main("wait", again)
    assert home.main("wait", "--group", "waited").code == 5 and home.job(again)["group"] == "waited"
    add_and_wait(home, "true", "--group", "fine")
    assert home.main("wait", "--group", "fine").code == 0
    assert "nexus logs --group fine" in home.main("logs", "fine").err
    done = home.main("wait", "--group", "fien")
    assert done.code == 3 and "did you mean 'fine'?" in done.err


def test_what_was_run_again_does_not_count_for_its_group(home):
    mark = home.file("mended")
    failed = add_and_wait(home, f"test -e {mark}", "--group", "mended")
    child = add_and_wait(home, "true", "--group", "mended", "--after", failed)
    assert home.job(child)["cause"] == "dependency" and home.main("wait", "--group", "mended").code == 1
    mark.touch()
    home.main("retry", "--group", "mended")
    assert home.main("wait", "--group", "mended").code == 0


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
    assert done.out == f"{bad}: exit 4\n" and "this was a dry run" in done.err, done
    assert len(home.client().jobs()) == 1
    waits = home.main("add", "true", "--begin", "+1h").id
    refused = [home.main("retry", waits, *words).err for words in ([], ["--dry-run"])]
    assert refused[0] == refused[1] and "only a finished one" in refused[0], "a dry run refuses what a retry does, in its words"
    again = home.job(home.main("retry", "--failed", "--timeout", "1:00:00", "--command", "true").id)
    assert (again["timeout_seconds"], again["command"], again["name"]) == (3600, "true", None)
    assert home.main("wait", again["id"]).code == 0


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


# Looking

def test_queue_history_jobs_and_show(home):
    for words, says in ((["queue"], "no job is pending"), (["history"], "no job has finished"), (["jobs"], "nexus add"),
                        (["squeue"], "no job is running or pending")):
        done = home.main(*words)
        assert (done.code, done.out) == (0, "") and says in done.err
        assert home.main(*words, "--json").json == []
    ended = add_and_wait(home, "exit 3")
    home.main("pause")
    waiting = add(home, "python train.py", "--priority", "low", "--name", "try")
    queue = home.main("queue").out.splitlines()
    assert queue[0].split() == ["ID", "PRIORITY", "GPUS", "ADDED", "NAME", "COMMAND", "WAITING", "FOR"]
    assert queue[1].startswith(f"{waiting}  low") and "try   python train.py" in queue[1]
    assert queue[1].endswith("the queue is paused (nexus resume)")
    history = home.main("history").out.splitlines()
    assert len(history) == 2 and history[1].startswith(f"{ended}  failed") and "exit 3" in history[1]
    assert [line.split()[:2] for line in home.main("jobs").out.splitlines()[1:]] == [[ended, "failed"], [waiting, "pending"]]
    assert [job["id"] for job in home.main("jobs", "--status", "pending", "--json").json] == [waiting]
    for choice, says in ((["--user", "nobody"], "there is no job of nobody"), (["--user", ""], "there is no job of ''"),
                         (["--group", "x", "--name", "y z"], "there is no job of group x named 'y z'"),
                         (["--group", "x", "--status", "failed"], "no job of group x is failed")):
        assert home.main("jobs", *choice).err == f"nexus: {says}\n", choice
    assert waiting in home.main("queue", "--group", "").out, "which is in none"
    assert home.main("queue", "--group", "x").err == "nexus: no job of group x is pending\n"
    shown = home.main("show", waiting).out
    assert shown.startswith(f"Job {waiting}: pending\n") and "  waits: the queue is paused" in shown and "  priority: low\n" in shown
    assert home.main("show", ended, "--json").json["exit_code"] == 3
    for number in range(3):
        home.main("remove", add(home, f"true {number}"))
    assert len(home.main("history", "-n", "2").out.splitlines()) == 3 and "the last 2 of 4" in home.main("history", "-n", "2").err
    assert len(home.main("history", "-n", "0").out.splitlines()) == 5


def test_lists_are_chosen_from_and_fit_a_terminal(home):
    home.main("pause")
    ids = [add(home, f"true {number}", "--name", f"n{number % 2}", "--group", f"g{number % 3}") for number in range(30)]
    home.main("remove", ids[0])
    with home.terminal("queue", rows=20) as terminal:
        shown = terminal.end()[1]
    assert shown.count("true ") == 14 and "… 15 more wait behind them; nexus queue -n 0 shows all" in shown, shown
    with home.terminal("jobs", rows=20) as terminal:
        shown = terminal.end()[1]
    assert f"{ids[-1]}" in shown and ids[1] not in shown and "the last 14 of 30; nexus jobs -n 0 shows all" in shown
    for words, chosen in ((["queue", "--name", "n1", "--group", "g1"], ids[1::6]), (["queue", "-n", "2"], ids[1:3]),
                          (["jobs", "--status", "cancelled,running"], ids[:1]), (["history", "--group", "g0"], ids[:1]),
                          (["jobs", "--name", "n1", "-n", "3"], ids[-5::2])):
        assert [line.split()[0] for line in home.main(*words).out.splitlines()[1:]] == chosen, words
        assert [job["id"] for job in home.main(*words, "--json").json] == chosen, words
    assert "pending" in home.main("jobs", "--status", "waiting").err


def test_logs(home):
    job_id = add_and_wait(home, "echo one; echo two; echo err >&2")
    for options, out, err in ([[], "one\ntwo\n", "err\n"], [["--stream", "stdout"], "one\ntwo\n", ""],
                              [["-f", "-n", "2"], "two\n", "err\n"], [["-n", "0"], "", ""]):
        done = home.main("logs", job_id, *options)
        assert (done.code, done.out, done.err) == (0, out, err), options
    assert home.main("logs").out == "one\ntwo\n" and f"job {job_id}, completed: echo one" in home.main("logs").err
    log = home.main("logs", "service", "-n", "2")
    assert log.code == 0 and len(log.out.splitlines()) == 2 and re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", log.out)


def test_logs_of_several_jobs_have_their_names(home):
    gate = home.folder / "have times"           # a job that ends before the service has looked at its logs has none
    waiting = f"until [ -e '{gate}' ]; do sleep 0.05; done"
    first = add(home, f"echo one; echo two; echo err >&2; {waiting}", "--name", "long name")
    second = add(home, f"echo three; {waiting}")
    live.until(lambda: len(re.findall(r"\| \d{4}-.* (?:two|three)\n", home.main("logs", first, second, "--timestamps").out)) == 2, "times")
    gate.touch()
    assert home.main("wait", first, second).code == 0
    for words in (["logs", first, second], ["logs", "-f", first, second, first]):
        done = home.main(*words)
        assert (done.code, done.out) == (0, f"long name | one\nlong name | two\n{second:9} | three\n"), words
        assert done.err == "long name | err\n"
    assert home.main("logs", second, first).out.startswith(f"{second:9} | three\n"), "in the order in which they are named"
    done = home.main("logs", first, second, "-n", "1", "--stream", "stdout", "--timestamps")
    assert re.fullmatch(rf"(?:(?:long name|{second:9}) \| \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d (?:two|three)\n){{2}}", done.out), done
    command = "printf '10%%\\r20%%'; [ -e gate ] || { touch gate; exit 3; }"
    alike = add_and_wait(home, command, "--name", "long name", "--retries", "1", "--cwd", home.top)
    done = home.main("logs", first, alike)
    assert done.out == f"long name {first} | one\nlong name {first} | two\n" + f"long name {alike} | 20%\n" * 2
    assert f"nexus: job {alike}: attempt 2, " in done.err
    assert home.main("logs", "--group", "gruop").code == 3 and "both" in home.main("logs", first, "--group", "g").err


def test_logs_of_a_group_are_followed_until_all_of_it_has_ended(home):
    """Jobs that join it later too; of those that wait nothing is lost."""
    gates = [home.folder / f"gate{number}" for number in range(3)]
    first = add(home, f"echo one; echo bad >&2; until [ -e {gates[0]} ]; do sleep 0.05; done; echo ' 10%\r 20%'; exit 3",
                "--group", "g", "--name", "a b")
    ended = add_and_wait(home, "echo over", "--group", "g")
    waiting = add(home, f"until [ -e {gates[1]} ]; do sleep 0.05; done; seq 3", "--group", "g", "--after-any", first)
    never = add(home, "true", "--group", "g", "--after", first)
    process = home.popen("logs", "-f", "-n", "2", "--group", "g")
    shown = {process.stdout.readline().decode() for _ in range(2)}
    assert shown == {f"{label:3} | {line}\n" for label, line in (("a b", "one"), (ended, "over"))}
    gates[0].touch()
    assert process.stdout.readline().decode() == "a b |  20%\n"
    later = add(home, f"seq 4; until [ -e {gates[2]} ]; do sleep 0.05; done", "--group", "g", "--name", "joined")
    assert [process.stdout.readline().decode() for _ in range(4)] == [f"joined | {number}\n" for number in range(1, 5)], "all of it"
    gates[1].touch()
    assert [process.stdout.readline().decode() for _ in range(3)] == [f"{waiting:6} | {number}\n" for number in range(1, 4)]
    assert process.poll() is None, "one still runs"
    gates[2].touch()
    rest, words = process.communicate(timeout=live.PATIENCE_S)
    assert (process.returncode, rest) == (0, b"")
    told = [f"job {first} failed (exit 3)", f"job {never} never ran", f"job {waiting} completed", f"job {later} completed"]
    assert all(f"nexus: {line}" in words.decode() for line in told), words
    done = home.main("logs", "--group", "g")
    assert set(done.out.splitlines()) == {f"{name:6} | {line}" for name, lines in (
        ("a b", ["one", " 20%"]), (ended, ["over"]), (waiting, "123"), ("joined", "1234")) for line in lines}
    assert done.out.startswith("a b") and done.err.count("a b    | bad\n") == 1
    with home.terminal("logs", "--group", "g", "-n", "1", "--stream", "stdout") as terminal:
        code, shown = terminal.end()
    labels = [(match[1], match[2]) for line in shown.splitlines() if (match := re.match(r"\x1b\[(\d+)m(.*) \|\x1b\[0m ", line))]
    assert code == 0 and {name.strip() for _, name in labels} == {"a b", ended, waiting, "joined"}
    assert len({colour for colour, _ in labels}) == 4 and {len(name) for _, name in labels} == {6}, "a colour each"
    held = add(home, "true", "--group", "h", "--begin", "+2h")
    assert f"pending: {held}" in home.main("logs", "--group", "h").err


def test_logs_are_searched(home):
    job_id = add_and_wait(home, "seq 20; echo Loss NaN >&2; echo loss 0.1")
    for words, code, out, err in ((["--grep", "loss"], 0, "loss 0.1\n", "Loss NaN\n"), (["--grep", "Loss"], 0, "", "Loss NaN\n"),
                                  (["--grep", "l.ss"], 1, "", ""), (["--grep", "9", "-C", "1"], 0, "8\n9\n10\n--\n18\n19\n20\n", ""),
                                  (["--grep", "19", "-n", "4", "--stream", "stdout"], 0, "19\n", ""),
                                  (["-f", "--grep", "20"], 0, "20\n", "")):
        done = home.main("logs", job_id, *words)
        assert (done.code, done.out, done.err) == (code, out, err), words
    other = add_and_wait(home, "echo no", "--group", "searched")
    done = home.main("logs", job_id, other, "--grep", "no")
    assert (done.code, done.out) == (0, f"{other} | no\n") and home.main("logs", "--group", "searched", "--grep", "yes").code == 1
    for words in (["--grep", ""], ["-C", "1"], ["--grep", "a", "-C", "101"]):
        assert home.main("logs", job_id, *words).code == 2, words
    assert "| grep" in home.main("logs", "service", "--grep", "x").err


def test_a_search_in_a_log_of_any_size_goes_on_to_its_end():
    """In three replies, while two others search; the service needs no more memory for it."""
    with Home(cpu_slots=20, launcher="direct") as home:
        home.serve("nexus.MAX_SEARCH_BYTES //= 32")
        job_id = add_and_wait(home)
        with open(home.file("logs", f"job_{job_id}", "stdout.log"), "wb") as file:
            for number in range(20):
                file.seek(number * 2**20)
                file.write(b"\nneedle %d\n" % number)
            file.write(b"3%\rneedle 4%\r5%\n")

        def peak_kib():
            return int(re.search(r"VmHWM:\s+(\d+)", read(f"/proc/{home.service['pid']}/status"))[1])

        before = peak_kib()
        searches = [home.popen("logs", job_id, "--grep", "needle") for _ in range(3)]
        found = [search.communicate(timeout=live.PATIENCE_S) for search in searches]
        assert [search.returncode for search in searches] == [0, 0, 0] and {err for _, err in found} == {b""}
        assert {out for out, _ in found} == {b"".join(b"needle %d\n" % number for number in range(20))}
        assert peak_kib() - before < 8000, "of 20 MB"
        assert b"".join(home.client().logs(job_id, grep="needle 1", context=0)).count(b"\n") == 11


PROGRESS = [  # words, what is shown of 1%\r2%\r\nend\r\nlast 1\rlast 2\r
    ([], "1%\r2%\r\nend\r\nlast 1\rlast 2\r"), (["-n", "1"], "last 2"), (["-n", "2"], "end\r\nlast 2"),
    (["-n", "9"], "2%\r\nend\r\nlast 2"),
    (["-f"], "1%\r2%\r\nend\r\nlast 1\rlast 2\r"), (["-f", "-n", "1"], "last 2\r")]


def test_of_a_progress_bar_the_last_lines_have_its_last_state(home):
    job_id = add_and_wait(home, r"printf '1%%\r2%%\r\nend\r\nlast 1\r'; sleep 0.1; printf 'last 2\r'")
    for words, shown in PROGRESS:
        assert home.run("logs", job_id, *words).bytes == shown.encode(), words


def test_a_long_progress_bar_is_neither_sent_nor_shown_whole(home):
    """It was: 3.5 s and 180 MB for `show`."""
    job_id = add_and_wait(home, "echo begin; echo end")
    until(lambda: not live.find_commands(f"job_{job_id}"), "the end of its screen")
    bar = b"".join(b"\r%7d/600000 %s" % (number, b"#" * 85) for number in range(1000)) * 600
    home.file("logs", f"job_{job_id}", "stderr.log").write_bytes(bar)
    last = bar[-99:].decode().strip()

    def moved():
        """Bytes that the service has read and write_aside."""
        lines = dict(line.split(": ") for line in read(f"/proc/{home.service['pid']}/io").splitlines())
        return int(lines["rchar"]), int(lines["wchar"])

    read_before, wrote_before = moved()
    done = home.run("show", job_id)
    read_after, wrote_after = moved()
    assert all(f"  {line}\n" in done.out for line in (last, "begin", "end")), done
    assert read_after - read_before < 2e7 and wrote_after - wrote_before < 1e5, "of 60 MB"
    for words, out, err in (([], "begin\nend\n", last), (["-n", "3"], "begin\nend\n", last), (["-n", "2"], "end\n", last),
                            (["-n", "1", "--stream", "stdout"], "end\n", "")):
        done = home.run("logs", job_id, *words)
        assert (done.out, done.err.strip()) == (out, err), words
    assert moved()[1] - wrote_after < 1e5


LAST_LINES = [  # command, its last line, its cause's line
    ("echo a; echo b", "b", None), ("echo out; sleep 0.3; echo err >&2", "err", None),
    ("echo err >&2; sleep 0.3; echo out; exit 1", "out", "err"),
    ("echo loss 0.5; echo 'error: no such file'; exit 1", "error: no such file", "error: no such file"),
    (r"echo bad; printf ' 10%%|#   | 1/9\r 90%%|### | 8/9'; exit 1", "90%|### | 8/9", "bad"), ("true", None, None), ("exit 1", None, None),
    ("echo out; kill -SEGV $$", "out", None)]


def test_an_ended_job_keeps_its_last_line(home):
    ids = [add(home, command) for command, _, _ in LAST_LINES]
    again = add(home, "[ -e once ] || { touch once; echo first; exit 3; }", "--retries", "1", "--cwd", home.top)
    home.main("wait", *ids, again)
    for job_id, (command, line, cause) in zip(ids, LAST_LINES):
        job = home.job(job_id)
        assert (job["last_line"], job["attempts"][-1]["last_line"], job["cause_line"]) == (line, line, cause), command
    job = home.job(again)
    assert job["last_line"] is None and [one["last_line"] for one in job["attempts"]] == ["first", None], "each attempt its own"
    home.kill_service()
    home.start()
    assert home.job(ids[0])["last_line"] == "b"
    home.file("logs", f"job_{ids[0]}", "stdout.log").unlink()
    assert "Last lines\n  b\n" in home.main("show", ids[0]).out


def test_logs_come_in_order_with_their_times_attempt_by_attempt(home):
    turns = "for i in 1 2; do echo out $i; sleep 0.3; echo err $i >&2; sleep 0.3; done; [ -e done ] || { touch done; exit 3; }"
    job_id = home.main("add", turns, "--retries", "1", "--cwd", home.top).id
    assert home.main("wait", job_id).code == 0
    lines = ["out 1", "err 1", "out 2", "err 2"]
    with home.terminal("logs", job_id) as terminal:
        shown = terminal.end()[1].splitlines()
    assert shown[:4] == shown[5:] == lines and re.fullmatch(r"nexus: attempt 2, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", shown[4]), shown
    shown = home.main("show", job_id).out
    assert "Last lines\n  err 2\n" + "".join(f"  {line}\n" for line in lines) in shown and "----" not in shown, shown
    alike = home.main("add", "echo one; echo '---- attempt 9, noon ----'").id
    assert home.main("wait", alike).code == 0
    assert "Last lines\n  one\n  ---- attempt 9, noon ----\n" in home.main("show", alike).out, "the job's own words"
    done = home.main("logs", job_id, "--timestamps", "--stream", "stdout")
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d out [12]\n){4}", done.out) and "attempt 2" in done.err
    long = home.main("add", "head -c 200000 /dev/zero | tr '\\0' x; echo").id
    assert home.main("wait", long).code == 0
    assert re.fullmatch(r"[-: .\d]{21,22} x{200000}\n", home.main("logs", long, "--timestamps").out)


def test_logs_of_a_job_that_waits_are_followed_from_its_start(home):
    home.main("pause")
    job_id = add(home, "echo begun")
    assert home.main("logs", job_id).out == ""
    process = home.popen("logs", "-f", job_id)
    time.sleep(0.2)
    home.main("resume")
    assert process.communicate(timeout=60)[0] == b"begun\n" and process.returncode == 0


# Ending and moving

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


OTHER_WORDS = [  # what users of other queues type; what it shows
    (["submit", "-g", "0", "-n", "mine", "--time", "1-00:00:00", "echo out"], ""), (["tail", "mine"], "out"), (["cat", "mine"], "out"),
    (["info", "mine"], "Job "), (["ls"], "mine"), (["gpus"], "GPU 0"), (["squeue"], ""), (["sacct"], "mine"), (["watch"], "GPU  UTIL")]


def test_words_of_other_queues(home):
    for words, says in OTHER_WORDS:
        done = home.main(*words)
        assert done.code == 0 and says in done.out, (words, done)
    assert home.job("mine")["timeout_seconds"] == 86400
    job_id = add(home, "sleep 600")
    assert home.main("stop", job_id).code == 0 and home.job(job_id)["status"] == "cancelled", "and not the service"
    told = " ".join(home.main("help").out.split())
    assert "sbatch = add" in told and "stop ID = cancel ID" in told


@pytest.mark.parametrize("words, hint", [
    (["train.py"], "nexus add 'python train.py'"), (["train.py --lr 3"], "nexus add 'python train.py --lr 3'"),
    (["train.py", "--lr", "3"], "'train.py --lr 3'"), (["job.sh"], "nexus add 'bash job.sh'"), (["cmds.txt"], "nexus add --file cmds.txt"),
    (["tool 1"], "nexus add './tool 1'")])
def test_a_file_is_no_command(home, tmp_path, words, hint):
    for name in ("train.py", "job.sh", "cmds.txt", "tool"):
        (tmp_path / name).write_text("")
    (tmp_path / "tool").chmod(0o755)
    done = home.main("add", "--cwd", str(tmp_path), *words)
    assert done.code == 2 and hint in done.err, done


@pytest.mark.parametrize("words, hint", [
    (["python3", "train.py", "-n", "5"], "nexus add 'python3 train.py -n 5'"),
    (["-g", "0", "--name=x", "python3", "train.py", "--gpus", "2"], "nexus add -g 0 --name=x 'python3 train.py --gpus 2'")])
def test_options_after_the_first_word_are_nobodys(home, words, hint):
    """Without quotes they could be the command's."""
    done = home.main("add", *words)
    assert done.code == 2 and f"hint: {hint}\n" in done.err, done
    for fine in (["--dry-run", "echo", "x"], ["echo x", "--gpus", "0", "--dry-run"], ["--dry-run", "--", "echo", "-n", "x"]):
        assert home.main("add", *fine).code == 0, fine


def test_a_program_is_no_command_of_nexus(home):
    done = home.main("python3", "train.py")
    assert done.code == 2 and "hint: to queue it: nexus add 'python3 train.py'\n" in done.err


def test_usage(fresh_home):
    for command in ("true", "true", "exit 3"):
        add_and_wait(fresh_home, command, "--group", "g", "--gpus", "0")
    add_and_wait(fresh_home, "true")
    told = json.loads(fresh_home.main("usage", "--by", "group", "--json").out)
    assert {row["group"]: (row["jobs"], row["failed"]) for row in told} == {"g": (3, 1), "-": (1, 0)}
    assert re.search(r"^root +4 +0\.0 +1 of 4 ended$", fresh_home.main("usage").out, re.MULTILINE)
    assert fresh_home.main("usage", "--since", "0").out.splitlines()[1:] == []
    assert fresh_home.main("open").out == f"{fresh_home.client().url}\n"


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


def test_what_comes_after_a_group_is_typed_as_the_rest(home):
    """With add, its --file, a script's options, edit, and completion; --after is for jobs."""
    home.main("pause")
    for name in ("g", "h, i"):
        add(home, "true", "--group", name)
    several = ("--after-group", "g", "--after-group", "h, i", "--after-group", "g", "--after-any-group", "g")
    home.file("list").write_text("echo 1\necho 2\n")
    home.file("job.sh").write_text("#!/bin/bash\n#NEXUS --after-group g --after-any-group 'h, i'\ntrue\n")
    made = [home.main("add", *several, "true").id, *home.main("add", *several, "--file", str(home.file("list"))).out.split()]
    assert [(home.job(id)["after_group"], home.job(id)["after_any_group"]) for id in made] == [(["g", "h, i"], ["g"])] * 3
    script = home.job(home.main("add", str(home.file("job.sh"))).id)
    assert (script["after_group"], script["after_any_group"]) == (["g"], ["h, i"])
    done = home.main("edit", made[0], "--after-group", "none", "--after-any-group", "h, i")
    assert done.code == 0 and "is changed: after group none, after any group h, i" in done.err, done
    assert (home.job(made[0])["after_group"], home.job(made[0])["after_any_group"]) == ([], ["h, i"])
    for words, code, says in ((["add", "--after", "g", "true"], 3, "after all of it: --after-group g"),
                              (["add", "--after-any-group", "k", "true"], 3, "there is no job of group 'k'"),
                              (["add", "--group", "g", "--after-group", "g", "true"], 4, "the job would wait for itself"),
                              (["edit", made[0], "--group", "h, i"], 4, f"job {made[0]} would wait for itself")):
        done = home.main(*words)
        assert done.code == code and says in done.err, (words, done)
    assert home.main("complete", "add", "--after-group", "").out == "g\n", "bash would take a name with blanks apart"


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
    assert listed["add"] - listed["retry"] == {"--sweep", "--file", "--unique"}
    assert listed["add"] - listed["edit"] == {"--sweep", "--file", "--unique", "--json"}
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


def test_a_script_that_is_not_there_is_noted(home, tmp_path):
    home.main("pause")
    for command, is_noted in (("typo.sh", True), ("./typo", True), ("typo.sh 1", False), ("true", False)):
        done = home.main("add", "--cwd", str(tmp_path), command)
        assert done.code == 0 and (f"there is no file {command} yet" in done.err) == is_noted, done


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


def test_who_clears_all_at_a_terminal_is_asked(home):
    add_and_wait(home, "echo 12345")
    for answer, left in (("\n", 1), ("y\n", 0)):
        with home.terminal("clear", "--all") as terminal:
            terminal.wait_for("forget 1 finished job, with all logs?")
            terminal.type(answer)
            terminal.end()
        assert len(home.client().jobs()) == left


@pytest.mark.parametrize("words, piped, says", [
    (["add"], b"echo 1", "nexus add --file -"), (["add", "-"], b"", "nexus add --file -"),
    (["add", "-n", "5", "true"], b"", "would be taken for a GPU")])
def test_what_could_not_be_meant_is_refused(home, words, piped, says):
    done = home.run(*words, stdin=piped)
    assert done.code == 2 and says in done.err and not done.out, done


@pytest.mark.parametrize("line, hint", [
    ("srun --pty bash", "--tty: nexus run --tty bash"), ("add -it bash", "nexus run --tty bash"), ("salloc", "nexus run --tty bash"),
    ("salloc --gres=gpu:1", "nexus run --tty bash"),
    ("sbatch -J foo x", "--name=foo"), ("add --gpus 1 --gres=gpu:2 x", "--gpus=2"), ("run -o out x", "nexus logs ID"),
    ("squeue -u root", "--user root"), ("scancel -u ann", "nexus cancel --user ann"), ("scancel -uann", "nexus cancel --user ann"),
    ("scancel -n lr=*", "nexus cancel --name 'lr=*'"), ("scancel -t pending", "nexus cancel --status pending"),
    ("scancel --state=RUNNING", "nexus cancel --status running"), ("scancel --me", "nexus cancel --status pending,running"),
    ("cancel all", "nexus cancel --status pending,running"), ("stop --all", "nexus cancel --status pending,running"),
    ("-k abc", "nexus kill ID"), ("kill -9 abc", "--signal KILL"), ("scontrol show job x", "hint: nexus show x\n"),
    ("help upgrade", "nexus restart"), ("jobs abc", "nexus show abc"), ("history failed", "--status running,failed"),
    ("abc", "nexus show abc"), ("add python3 t.py --lr 3", "nexus add 'python3 t.py --lr 3'"),
    ("run --gpus 0 sh -c true", "nexus run --gpus 0 'sh -c true'"), ("add --gpu 2 x", "did you mean '--gpus'?"),
    ("add --time 5 x", "--timeout/--time must be"),
    ("add --time 10:00 x", "hint: --timeout=600s\n"), ("edit abc --time=10", "hint: --timeout=600s\n"),
    ("add --begin=now+1hour x", "hint: --begin=+1h\n"), ("add --begin=soon9 x", "hint: like \"22:00\""),
    ("add --gpus a100:2 x", "hint: --gpus=2 --gpu-type=a100\n"),
    ("sbatch -o out.log x", "hint: leave it out; instead: nexus logs ID\n"), ("sbatch -H x", "hint: --hold\n"),
    ("sbatch --export=ALL,SEED=3,A=b x", "hint: --env=SEED=3 --env=A=b\n"), ("sbatch --export=ALL x", "leave it out; instead: --env\n"),
    ("retry abc --export=ALL,SEED=3", "--env=SEED=3"), ("sbatch --parsable x", "add prints the id alone"),
    ("sbatch --test-only x", "--dry-run"),
    ("sbatch -n 1 x", "the number of tasks: leave it out"),
    ("squeue -n sw", "hint: --name sw\n"), ("hold -n sw*", "hint: --name 'sw*'\n"), ("release --jobname=sw", "hint: --name sw\n"),
    ("squeue -t pending", "hint: --status pending\n"), ("squeue -t PD,R", "hint: --status pending,running\n"),
    ("squeue --state=PENDING", "hint: --status pending\n"), ("sacct --state failed", "hint: --status failed\n"),
    ("sacct -s FAILED,TIMEOUT", "hint: --status failed\n"), ("scancel -t PD", "nexus cancel --status pending\n"),
    ("jobs --status PD", "hint: --status pending\n"), ("sacct -S now-1days", "hint: --since 1d\n"),
    ("sacct --starttime=yesterday", "hint: --since 1d\n"), ("sacct -a", "leave it out"), ("sacct -u ann", "hint: --user ann\n"),
    ("sacct --me", 'hint: --user "$USER"\n'), ("history --since yesterday", "hint: --since 1d\n"),
    ("usage --since 1day", "hint: --since 1d\n"),
    ("squeue -j abc", "hint: nexus show abc\n"), ("sacct -j abc", "hint: nexus show abc\n"), ("sstat -j abc", "hint: nexus show abc\n"),
    ("scontrol top abc", "hint: nexus move abc --first\n"), ("scontrol requeue abc", "hint: nexus retry abc\n"),
    ("scontrol hold a b,c", "hint: nexus hold a b c\n"), ("scontrol show job abc", "hint: nexus show abc\n"),
    ("scontrol show JobId=abc", "hint: nexus show abc\n"), ("scontrol show nodes", "hint: nexus node list\n"),
    ("scontrol update JobId=a TimeLimit=2h", "hint: nexus edit a --time 2h\n"),
    ("scontrol update jobid=a TimeLimit=10 JobName=x", "hint: nexus edit a --timeout=600s --name=x\n"),
    ("scontrol reboot", "nexus show ID, edit ID"), ("sbatch -d singleton x", "afterok"),
    ("move abc top", "--first"), ("move abc --top", "--first")])
def test_what_was_learned_elsewhere_is_answered_with_what_to_type(home, line, hint):
    done = home.main(*line.split())
    assert done.code == 2 and hint in done.err, done


def test_a_file_that_is_piped_in_is_no_input(home):
    path = os.path.join(home.top, "data")
    with open(path, "w") as file:
        file.write("1\n")
    with open(path) as file:
        done = subprocess.run([sys.executable, COMMAND, "add", "--dry-run", "cat -"], stdin=file, capture_output=True, text=True,
                              env=home.with_changes({}))
    assert done.returncode == 0 and "does not reach the job" in done.stderr, done


def test_a_guess_at_a_job_is_answered(home):
    home.main("pause")
    first = add(home, "true", "--name", "Long-One", "--group", "g1")
    add(home, "true")
    for line, says in (("cancel g1", "--group g1"), ("cancel Long*", "--name 'Long*'"), ("wait n[12]", "--name 'n[12]'"),
                        ("show long-one", "did you mean 'Long-One'?"), ("move Long-One top", "--first"),
                        ("scancel g1", "hint: it is a group, see nexus cancel --group g1\n"), ("hold g1", "nexus pause --group g1\n"),
                        ("wait Long*", "nexus wait --name 'Long*'\n"), ("show x,y", "no job 'x,y'"), (f"hold {first},x", "no job 'x'")):
        done = home.main(*line.split())
        assert done.code in (2, 3) and says in done.err, done
    home.main("cancel", "--status", "PENDING")
    assert len(home.main("history", "--since", "1h", "-n", "2").out.splitlines()) == 3
    assert len(home.main("history", "--since", "1h").out.splitlines()) == 3
    assert "no job of the last 0s has finished yet" in home.main("history", "--since", "0s").err
    assert home.main("logs", "Long-One").err.startswith(f"nexus: job {first}, cancelled")


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


def test_run_leaves_what_is_piped_to_it_to_the_loop_around_it(home):
    loop = f'while read -r line; do {sys.executable} {COMMAND} run --gpus 0 "$line" || exit; done'
    done = subprocess.run(["sh", "-c", loop], input="echo a\necho b\necho c", env=home.environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a\nb\n"), done      # sh reads no line without an end


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


# Screens

def test_attach_and_leave(bare_home):
    job_id = add(bare_home, "echo in the window; read answer; echo \"got $answer\"; sleep 60")
    bare_home.wait_for_start(job_id)
    with bare_home.terminal("attach", job_id) as terminal:
        terminal.wait_for("in the window")
        terminal.type("hello\r")
        terminal.wait_for("got hello")
        terminal.type("\x01d")
        code, shown = terminal.end()
        assert code == 0 and f"job {job_id} goes on; nexus attach {job_id} comes back to it" in shown
    assert bare_home.job(job_id)["status"] == "running"

    def list_screens():
        done = bare_home.run("screens")
        assert done.code == 0
        return done.out

    until(lambda: re.search(rf"^\d+\.nexus_job_{job_id} +Detached", list_screens(), re.MULTILINE), list_screens)
    assert re.search(r"^\d+\.nexus  ", list_screens(), re.MULTILINE)
    with bare_home.terminal("attach", job_id, TERM="no-such-terminal") as terminal:
        terminal.wait_for("got hello")
        terminal.type("\x01d")
        assert terminal.end()[0] == 0
    assert bare_home.run("attach", job_id).code == 2, "without a terminal"
    other = bare_home.main("add", "echo begun; sleep 60").id
    with bare_home.terminal("attach", str(bare_home.wait_for_start(other)["gpu_index"])) as terminal:
        terminal.wait_for("begun")
        terminal.type("\x03")
        assert "failed (SIGINT)" in terminal.end()[1]
    bare_home.main("kill", job_id)
    for target, code in ((job_id, 4), ("zzz", 3), ("1", 3)):
        done = bare_home.run("attach", target)
        assert done.code == code and "hint:" in done.err


# The service

def test_start_stop_restart(bare_home):
    done = bare_home.main("stop")
    assert (done.code, done.out) == (0, "") and "does not run" in done.err
    done = bare_home.main("start")
    assert (done.code, done.out) == (0, "") and f"http://127.0.0.1:{bare_home.port}" in done.err, done
    pid = bare_home.service["pid"]
    assert "runs already" in bare_home.main("start").err and bare_home.service["pid"] == pid
    with bare_home.terminal("serve") as terminal:
        code, shown = terminal.end()
    assert code == 4 and "runs already" in shown and "serving" not in shown
    job_id = add(bare_home, "sleep 60")
    bare_home.wait_for_start(job_id)
    waits = add(bare_home, "true", "--begin", "+1h")
    assert bare_home.main("restart").code == 0 and bare_home.service["pid"] != pid
    assert bare_home.wait_for(job_id, "running")["status"] == "running"
    done = bare_home.main("stop")
    assert done.code == 0 and "jobs go on" in done.err and not bare_home.file("service.json").exists()
    assert "1 pending job may start then" in done.err, (waits, done)

    def sessions():
        return subprocess.run(["screen", "-ls"], capture_output=True, env=bare_home.environ).stdout.decode()
    until(lambda: ".nexus\t" not in sessions(), "the end of its session")
    assert f".nexus_job_{job_id}" in sessions()
    log = bare_home.main("logs", "service")
    assert log.code == 0 and "Service stopped" in log.out and "the service does not run" in log.err, "one wants it most now"
    assert not bare_home.file("service.json").exists(), "and it is not started for that"


def test_what_only_looks_starts_no_service(bare_home):
    assert bare_home.run("top").code == 6
    done = bare_home.main("logs", "service")
    assert done.code == 6 and "there is no log" in done.err and not bare_home.file("service.json").exists()


def test_the_services_log_is_followed_over_a_restart(bare_home):
    bare_home.main("start")
    process = bare_home.popen("logs", "service", "-f", "-n", "99")
    while b"Service started" not in process.stdout.readline():
        pass
    bare_home.main("restart")
    while b"Service started" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and process.stderr.read() == b""


def test_stop_over_nexus_url_promises_nothing(fresh_home):
    there = {"NEXUS_URL": f"http://127.0.0.1:{fresh_home.port}", "NEXUS_TOKEN": fresh_home.file("token").read_text().strip()}
    done = fresh_home.main("stop", **there)
    assert done.code == 0 and "nexus start on its own machine" in done.err and "next nexus command" not in done.err
    assert fresh_home.main("status", **there).code == 6, "it answers no more"
    until(lambda: not fresh_home.file("service.json").exists(), "its end")


def test_serve_in_the_foreground(bare_home):
    process = bare_home.popen("serve", "--log-level", "DEBUG")
    until(lambda: bare_home.file("service.json").exists(), "the service")
    assert bare_home.service["pid"] == process.pid
    done = bare_home.run("serve")
    assert done.code == 4 and f"pid {process.pid}" in done.err and "nexus stop" in done.err
    job_id = add_and_wait(bare_home)
    assert bare_home.job(job_id)["status"] == "completed"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"", b"") and not bare_home.file("service.json").exists()


def test_another_config_file(bare_home):
    path = str(bare_home.folder / "other.toml")
    (bare_home.folder / "other.toml").write_text(bare_home.file("config.toml").read_text().replace("[gpu]\n", "[gpu]\nids = [1]\n"))
    assert bare_home.main("start", "--config", path).code == 0
    assert [gpu["index"] for gpu in bare_home.main("status", "--json").json["gpu_status"] if gpu["is_available"]] == [1]
    done = bare_home.main("restart", "--config", "/no/such/file")
    assert done.code == 2 and "/no/such/file" in done.err, done
    assert bare_home.file("service.json").exists(), "the one that runs is not ended for it"
    assert bare_home.main("restart").code == 0
    assert [gpu["index"] for gpu in bare_home.main("status", "--json").json["gpu_status"] if gpu["is_available"]] == [1], "as before"


def test_a_service_is_started_on_its_own_machine(home):
    there = {"NEXUS_URL": f"http://127.0.0.1:{home.port}"}
    for command in ("start", "restart"):
        done = home.main(command, **there)
        assert done.code == 2 and "own machine" in done.err and "unset NEXUS_URL" in done.err
        assert home.main("status", **there).code == 0, "it was not ended"


REFUSED_TOGETHER = [
    ("status --watch --json", "not allowed with argument"), ("status --json --detailed", "not allowed with argument"),
    ("history -n -5", "not -5"), ("run --json true", "unrecognized arguments: --json"),
]


@pytest.mark.parametrize("line, says", REFUSED_TOGETHER, ids=[case[0] for case in REFUSED_TOGETHER])
def test_options_that_would_be_ignored(home, line, says):
    done = home.main(*line.split())
    assert done.code == 2 and says in done.err


# Configuration

def test_config_path_sample_and_show(bare_home):
    assert bare_home.main("config", "path").out == str(bare_home.file("config.toml")) + "\n"
    sample = bare_home.main("config", "sample").out
    shown = bare_home.main("config").out
    assert f"\nport = {bare_home.port} " in shown and shown.startswith(f"# {bare_home.file('config.toml')}\n")
    bare_home.file("config.toml").write_text(sample)
    assert "\nport = 6234 " in bare_home.main("config").out
    bare_home.file("config.toml").unlink()
    assert "there is none" in bare_home.main("config").out and not bare_home.file("service.json").exists()


def test_all_faults_of_a_config_are_listed_and_nothing_starts(bare_home):
    bare_home.file("config.toml").write_text('[service]\nport = 0\nhots = "x"\n[jobs]\nlauncher = "telepathy"\n[gpus]\nids = [0]\n')
    for words in (["config"], ["start"], ["add", "true"], ["status"], ["serve"]):
        done = bare_home.main(*words)
        assert (done.code, done.out) == (2, ""), done
        for says in (str(bare_home.file("config.toml")), "service.port must be", "1 to 65535",
                     "'hots' is not a key of [service]", "'host'",
                     "telepathy", "'gpus' is not a key of config.toml", "'gpu'", "nexus config sample"):
            assert says in done.err, (says, done.err)
    bare_home.file("config.toml").write_text("[service\n")
    done = bare_home.main("add", "true")
    assert done.code == 2 and "not valid TOML" in done.err and "line 1" in done.err
    assert not bare_home.file("state.json").exists() and not bare_home.file("service.json").exists()


def test_config_edit(bare_home):
    editor = os.path.join(bare_home.top, "my editor")
    with open(editor, "w") as file:
        file.write('#!/bin/sh\nsed -i "s/^port = .*/port = $1/" "$2"\n')
    os.chmod(editor, 0o755)
    done = bare_home.run("config", "edit", EDITOR=f"'{editor}' 6543")
    assert done.code == 0 and "port = 6543" in bare_home.file("config.toml").read_text()
    done = bare_home.run("config", "edit", VISUAL=f"'{editor}' 99999", EDITOR="false")
    assert done.code == 2 and "not 99999" in done.err
    done = bare_home.run("config", "edit", EDITOR="no-such-editor")
    assert done.code == 2 and "EDITOR" in done.err
    bare_home.file("config.toml").unlink()
    assert bare_home.run("config", "edit", EDITOR="true").code == 0
    assert bare_home.file("config.toml").read_text() == nexus.format_sample_config()


STRICT = [  # words; ID is an ended job
    "status", "top", "queue", "jobs", "history", "show ID", "why ID", "wait ID", "logs ID", "logs -f ID", "logs -n 1 service",
    "retry ID", "run --gpus 0 exit\\ 3", "pause", "resume", "health", "metrics", "usage", "screens",
    "config", "node list", "token list", "show nope",
    "kill 0", "restart", "stop"]


def test_nothing_is_left_open_for_python_to_warn_of(fresh_home):
    """PYTHONWARNINGS=error made a traceback of each socket."""
    job_id = add_and_wait(fresh_home, "echo x")
    for line in STRICT:
        words = [job_id if word == "ID" else word for word in shlex.split(line)]
        done = fresh_home.run(*words, script=SCRIPT if line == "status" else COMMAND, PYTHONWARNINGS="error")    # one compiles it, too
        assert "Warning" not in done.err and done.code in (0, 3), (line, done)


# Installing

FAKES = {
    "systemctl": '#!/bin/sh\necho "systemctl $*" >> "$RECORD"\n[ -n "$NO_USER_MANAGER" ] && exit 1\nexit 0\n'}


@pytest.fixture
def installing():
    with Home(name="nexus 'home'") as made:
        binaries = os.path.join(made.top, "fakes")
        os.makedirs(binaries)
        for name, text in FAKES.items():
            with open(os.path.join(binaries, name), "w") as file:
                file.write(text)
            os.chmod(os.path.join(binaries, name), 0o755)
        made.environ.update(HOME=os.path.join(made.top, "my home"), PATH=f"{binaries}:{made.environ['PATH']}",
                            RECORD=os.path.join(made.top, "record"))
        os.makedirs(made.environ["HOME"])
        made.binaries = os.path.join(made.environ["HOME"], ".local", "bin")
        made.compiled = pathlib.Path(made.environ["HOME"], ".local/share/nexus/__pycache__")
        keep_compiled(made.compiled)
        yield made


def keep_compiled(folder):
    """Put there what the first command would compile: Python takes such a file for right, whatever the age of its source."""
    path = pathlib.Path(importlib.util.cache_from_source(SCRIPT))
    folder.mkdir(parents=True)
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)       # PEP 552: by hash, unchecked
    (folder / path.name).write_bytes(head + path.read_bytes()[len(head):])


def list_compiled(installing):
    """{compiled form: (inode, time of writing)} of what is installed, and in the home."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for top in (installing.environ["HOME"], installing.path)
            for path in pathlib.Path(top).rglob("nexus*.pyc")}


def test_install(installing):
    """It compiles, and so does an upgrade, but no command after it, nor the service that one starts: each would take seconds."""
    shutil.rmtree(installing.file("cache"))
    shutil.rmtree(installing.compiled)
    done = installing.run("install")
    command = os.path.join(installing.binaries, "nexus")
    assert (done.code, done.out) == (0, "") and command in done.err and "not on PATH yet" in done.err
    assert os.access(command, os.X_OK)
    data = os.path.join(installing.environ["HOME"], ".local", "share")
    assert read(os.path.join(data, "nexus", "nexus.py")) == read(SCRIPT)

    def call(*words):
        environ = {**installing.environ, "PATH": f"{installing.binaries}:{installing.environ['PATH']}"}
        return subprocess.run(["nexus", *words], capture_output=True, timeout=60, env=environ)

    compiled = list_compiled(installing)
    assert len(compiled) == 1, compiled
    ran = call("run", "echo installed")
    assert (ran.returncode, ran.stdout) == (0, b"installed\n") and list_compiled(installing) == compiled, ran
    assert call("--version").stdout.decode() == installing.run("--version").out
    again = call("install")
    assert again.returncode == 0 and b"not on PATH" not in again.stderr, "from itself"
    script = pathlib.Path(installing.top, "another", "nexus.py")
    script.parent.mkdir()
    script.write_text("# an upgrade\n" + read(SCRIPT))
    assert installing.run("install", script=script).code == 0
    compiled = list_compiled(installing)
    assert len(compiled) == 1, compiled
    for words in (["restart"], ["run", "--gpus", "0", "true"]):
        ran = call(*words)
        assert ran.returncode == 0, ran
    assert list_compiled(installing) == compiled


COMPLETED = [  # words, what the last one may be; ID: the job
    (["re"], ["remove", "retry", "resume", "restart", "results"]),
    (["help", "to"], ["top", "token"]),
    (["token", ""], ["create", "list", "revoke"]),
    (["token", "create", "bob", "--d"], ["--days"]),
    (["add", "--gpu"], ["--gpus", "--gpu-ids", "--gpu-mem", "--gpu-type"]),
    (["logs", ""], ["ID"]),
    (["pause", ""], ["ID"]),
    (["scancel", ""], ["ID"]),
    (["add", "--after", ""], ["ID"]),
    (["wait", "--group", "e"], ["exp1"]),
    (["wait", "--group=e"], ["--group=exp1"]),
    (["wait", "--group", "=", "e"], ["exp1"]),
    (["jobs", "--status", "r"], ["running"]),
    (["clear", "--status", "completed,fa"], ["completed,failed"]),
    (["add", "--priority", ""], ["high", "normal", "low"]),
    (["move", "ID", "--priority", "n"], ["normal"]),
    (["logs", "--stream", "std"], ["stdout", "stderr"]),
    (["add", "--file", "com"], []), (["add", "--name", "exp1", "--cwd", ""], []),
]


def test_what_is_completed(home):
    job_id = add(home, "true", "--group", "exp1")
    for words, completions in COMPLETED:
        done = home.main("complete", *(word.replace("ID", job_id) for word in words))
        assert done.code == 0 and {*done.out.split()} == {word.replace("ID", job_id) for word in completions}, (words, done)


TYPED = [  # what is typed in each shell, what the last word may be
    ("re", ["remove", "retry", "resume", "restart", "results"]),
    ("token ", ["create", "list", "revoke"]),
    ("logs ", ["ID"]),
    ("wait --group=e", ["exp1"]),
    ("clear --status completed,fa", ["completed,failed"]),
    ("add --file com", ["commands.txt"]),
    ("add --name exp1 --cwd ", ["a_folder", "commands.txt"]),
]
BASH = """source "$XDG_DATA_HOME/bash-completion/completions/nexus"
complete() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nexus
  [ "${#COMPREPLY[@]}" -gt 0 ] || COMPREPLY=($(compgen -f -- "${@: -1}"))        # as -o default says
  echo "${COMPREPLY[@]}"
}
"""
ZSH = """stty kill undef         # before zsh reads a line, the terminal itself would drop what is typed ahead
PS1=
fpath+=("$XDG_DATA_HOME/zsh/site-functions")
autoload -Uz compinit
compinit -u -D
compadd() {
  local -a added
  [[ ${argv[(I)-[OAD]]} -gt 0 ]] || { builtin compadd -O added "$@"; print -r -- "${added[@]}" >> "$ZDOTDIR/answers"; }
  builtin compadd "$@"
}
"""


def type_in_bash(home, lines):
    def split(line):                            # as readline does
        return re.findall(r"=|[^\s=]+", line) + ([""] if line.endswith(" ") else [])

    script = BASH + "".join(f"complete {' '.join(map(nexus.quote, ['nexus', *split(line)]))}\n" for line in lines)
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60, env=home.environ, cwd=home.work)
    return done.stdout.splitlines()


def type_in_fish(home, lines):
    script = "".join(f"echo (complete -C {nexus.quote(f'nexus {line}')} | string split -f 1 \\t)\n" for line in lines)
    done = subprocess.run(["fish", "-c", script], capture_output=True, text=True, timeout=60, env=home.environ, cwd=home.work)
    return done.stdout.splitlines()


def type_in_zsh(home, lines):
    answers = home.work.parent / "answers"
    (home.work.parent / ".zshrc").write_text(ZSH)
    answers.touch()
    found = []
    with Terminal(["zsh", "-i"], {**home.environ, "ZDOTDIR": str(answers.parent), "TERM": "xterm"}) as terminal:
        for line in [f"cd {nexus.quote(str(home.work))}\n", *(f"nexus {line}\t" for line in lines)]:
            answers.write_text("")
            terminal.type(f"{line}\x15print -r END >> $ZDOTDIR/answers\n")
            until(lambda: terminal.read(0.02) != b"" and "END\n" in answers.read_text(), line)
            found.append(" ".join(answers.read_text().split("\n")[:-2]))
    return found[1:]


SHELLS = {"bash": type_in_bash, "fish": type_in_fish, "zsh": type_in_zsh}


def test_completion(installing):
    """The same in each shell; where nexus knows nothing, files."""
    home = installing
    home.environ.update(PATH=f"{home.binaries}:{home.environ['PATH']}", XDG_DATA_HOME=f"{home.top}/my data")
    keep_compiled(pathlib.Path(home.top, "my data/nexus/__pycache__"))
    home.work = pathlib.Path(home.top, "work")
    (home.work / "a_folder").mkdir(parents=True)
    (home.work / "commands.txt").touch()
    told = home.run("install").err
    assert "completion for bash, fish and zsh" in told and "before compinit:  fpath+=('" in told
    job_id = home.run("add", "--group", "exp1", "true").id
    for shell, type_in in SHELLS.items():
        for (line, words), answer in zip(TYPED, type_in(home, [line for line, _ in TYPED])):
            # bash replaces what stands behind the sign alone.
            found = {word.rpartition("=")[2].rstrip("/") for word in answer.split()}
            assert found == {word.replace("ID", job_id) for word in words}, (shell, line, answer)


def test_install_with_an_interpreter_in_a_folder_with_blanks(installing):
    folder = os.path.join(installing.top, "my python")
    os.makedirs(folder)
    os.symlink(sys.executable, os.path.join(folder, "python3"))
    with open(os.path.join(os.path.dirname(folder), "pyvenv.cfg"), "w") as file:
        file.write(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    done = installing.run("install", python=(os.path.join(folder, "python3"),))
    assert done.code == 0, done
    ran = subprocess.run([os.path.join(installing.binaries, "nexus"), "--version"], capture_output=True, env=installing.environ)
    assert ran.returncode == 0 and ran.stdout.startswith(b"nexus "), ran


def read_launcher(home):
    """(its path, the Python that it runs)."""
    path = os.path.join(home.binaries, "nexus")
    return path, shlex.split(re.search("(?m)^python=(.*)$", read(path))[1])[0]


@pytest.mark.parametrize("has_psutil", [False, True])
def test_install_takes_no_virtual_environment_where_nothing_is_lost(installing, has_psutil):
    folder = pathlib.Path(installing.top, "v")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    if has_psutil:
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "psutil.py").write_text("")
    done = installing.run("install", python=(python,))
    chosen = read_launcher(installing)[1]
    assert done.code == 0 and f", run by {chosen}" in done.err, done
    ran = subprocess.run([chosen, "-E", "-c", "import psutil"], capture_output=True)
    assert (chosen == str(python)) == (f"{chosen} of a virtual environment, as no Python outside has psutil" in done.err)
    assert ran.returncode == 0 if has_psutil else chosen != str(python), done


def test_the_installed_nexus_outlives_the_python_that_installed_it(installing):
    folder = pathlib.Path(installing.top, "moved")
    venv.create(folder, symlinks=True)
    (next(folder.glob("lib/python*/site-packages")) / "psutil.py").write_text("raise ImportError\n")
    assert installing.run("install", python=(folder / "bin" / "python",)).code == 0
    path, _ = read_launcher(installing)
    text = re.sub("(?m)^python=.*$", f"python={folder}/bin/python", read(path))     # whatever other Python this machine has
    pathlib.Path(path).write_text(text)
    os.rename(folder, f"{folder}-away")
    with Terminal([path, "--version"], installing.environ) as terminal:
        code, shown = terminal.end()
    assert code == 0 and re.search(rf"nexus: {folder}/bin/python is gone, so /.*python\S* runs it: nexus install", shown), shown
    line = installing.run("install", "--boot", NO_USER_MANAGER="1").out[len("@reboot "):]
    pathlib.Path(path).write_text(text)
    for words in (f"sh -c {shlex.quote(line)}", f"{shlex.quote(path)} run --gpus 0 'exit 3'"):
        done = subprocess.run(words, shell=True, capture_output=True, timeout=120, env=installing.environ)
        assert done.returncode == (3 if "exit 3" in words else 0) and b"is gone" not in done.stderr, done


def test_the_installed_nexus_looks_for_a_python_that_can_run_it(installing):
    assert installing.run("install").code == 0
    path, _ = read_launcher(installing)
    places = pathlib.Path(installing.top, "other pythons")
    places.mkdir()
    script = re.sub("(?m)^python=.*$", "python=/no/python", read(path)).replace("/usr/bin:/usr/local/bin:$PATH", f'"{places}"')
    for reason, text, code in (("none", None, 127), ("one that is too old", "exit 1", 127),
                               ("a newer one", f'exec {sys.executable} "$@"', 0)):
        if text:
            (places / "python3.9").write_text(f"#!/bin/sh\n{text}\n")
            (places / "python3.9").chmod(0o755)
        done = subprocess.run(["/bin/sh", "-c", script, "nexus", "--version"], capture_output=True, timeout=60, env=installing.environ)
        assert done.returncode == code, (reason, done)
        assert (b"nexus: /no/python is gone, and no other Python here can run it" in done.stderr) == (code == 127), (reason, done)


def test_install_where_it_cannot_write(installing):
    shutil.rmtree(installing.environ["HOME"])
    with open(installing.environ["HOME"], "w"):
        pass
    done = installing.run("install")
    assert done.code == 6 and "cannot write" in done.err and installing.environ["HOME"] in done.err


def test_install_at_boot_by_systemd(installing):
    done = installing.run("install", "--boot")
    assert done.code == 0 and "enable-linger" in done.err, done
    unit = os.path.join(installing.environ["HOME"], ".config", "systemd", "user", "nexus.service")
    text = read(unit)
    assert "KillMode=process\n" in text and "WantedBy=default.target" in text
    record = read(installing.environ["RECORD"])
    assert "systemctl --user daemon-reload" in record and "systemctl --user enable nexus.service" in record
    assert f'ExecStart=/bin/sh "{installing.binaries}/nexus" serve\n' in text and f'Environment="NEXUS_HOME={installing.path}"\n' in text


def test_install_at_boot_from_folders_with_special_characters(installing):
    """% and quotes mean something in a unit, and % in a crontab, which is for machines without a user manager."""
    home, nexus_home = (os.path.join(installing.top, name) for name in ('my "100%h" home\\', 'nexus "50%" home'))
    shutil.copytree(installing.path, nexus_home)
    os.mkdir(home)
    places = {"HOME": home, "NEXUS_HOME": nexus_home}
    keep_compiled(pathlib.Path(home, ".local/share/nexus/__pycache__"))
    assert installing.run("install", "--boot", **places).code == 0
    unit = pathlib.Path(home, ".config", "systemd", "user", "nexus.service")
    words = dict(re.findall(r'^(\w+)=(?:/bin/sh )?"((?:[^"\\]|\\.)*)"', unit.read_text(), re.MULTILINE))
    plain = {key: re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for key, word in words.items()}
    assert plain == {"ExecStart": f"{home}/.local/bin/nexus", "Environment": f"NEXUS_HOME={nexus_home}"}
    assert not re.search("(?<!%)(%%)*%(?!%)", unit.read_text()), "no specifier is left"
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, timeout=60, text=True)
        assert not [line for line in done.stderr.splitlines() if "nexus" in line], done.stderr
    told = installing.run("install", "--boot", NO_USER_MANAGER="1", **places)
    line = told.out
    assert told.code == 0 and "crontab -e" in told.err and line.startswith("@reboot ") and line.count("\n") == 1
    assert line.count("%") == line.count("\\%") > 0
    started = subprocess.run(["sh", "-c", line[len("@reboot "):].replace("\\%", "%")], capture_output=True, timeout=60,
                             env={**installing.environ, "HOME": home})
    assert started.returncode == 0 and os.path.exists(os.path.join(nexus_home, "service.json")), started
    assert installing.run("install", "--boot", **{**places, "NEXUS_HOME": f"{nexus_home}\n"}).code == 2


def test_until_when_a_token_is_good_is_a_local_time(home):
    shown = {}
    for zone in ("UTC0", "NZST-12"):
        made = home.run("token", "create", f"user{zone[:2]}", "--days", "30", TZ=zone).err
        shown[zone] = re.search(r"in until (\d{4}-\d\d-\d\d \d\d:\d\d);", made)[1]
        assert f"good until {shown[zone]}\n" in home.run("token", "list", TZ=zone).out
    utc, there = (datetime.datetime.strptime(text, "%Y-%m-%d %H:%M") for text in shown.values())
    assert datetime.timedelta(hours=12) <= there - utc <= datetime.timedelta(hours=12, minutes=5)

"""nexus run and wait: they pass on what a job prints and how it ends."""

import re
import shutil
import subprocess
import sys

from console import COMMAND, add, add_and_wait
from live import until


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


def test_run_says_why_it_waits(home):
    home.main("pause")
    process = home.popen("run", "echo done")
    assert process.stderr.readline().startswith(b"nexus: job ")
    assert process.stderr.readline() == b"nexus: it waits: the queue is paused (nexus resume)\n"
    home.main("resume")
    assert process.communicate(timeout=60)[0] == b"done\n"


def test_run_leaves_what_is_piped_to_it_to_the_loop_around_it(home):
    loop = f'while read -r line; do {sys.executable} {COMMAND} run --gpus 0 "$line" || exit; done'
    done = subprocess.run(["sh", "-c", loop], input="echo a\necho b\necho c", env=home.environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a\nb\n"), done      # sh reads no line without an end


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

"""What nexus, top, lists, show, why and usage tell; how guesses and the words of other queues are answered."""

import csv
import datetime
import json
import re
import sys

import pytest
from console import COMMAND, Terminal, add, add_and_wait

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


@pytest.mark.parametrize("width", [60, 80, 100, 132])
def test_every_table_fits_the_terminal(home, width):
    """And a sweep's rows begin with their values, which are whole."""
    home.main("add", "--gpus", "0", "--group", "exp1", "--sweep", "lr=1e-3,1e-4", "--sweep", "bs=32,64",
              "echo loss: 0.5 of {lr} {bs} in /scratch/ann/a-directory-that-is-far-away and even further; false")
    home.main("wait", "--group", "exp1")
    home.main("pause")
    home.main("add", "--group", "exp2", "--sweep", "seed=0..3", "python /scratch/ann/a-directory-that-is-far-away/train.py --seed {seed}")
    for words, label in ((["jobs"], "lr=1e-3 bs=64"), (["history"], "lr=1e-3 bs=64"), (["queue"], "seed=2"), (["usage"], "FAILED"),
                         (["results", "exp1"], "loss"), (["node", "list"], "NODE"), ([], "Queue: ")):
        with home.terminal(*words, columns=width, NO_COLOR="1") as terminal:
            code, shown = terminal.end()
            table = [line for line in shown.splitlines() if not line.startswith(("nexus: ", "hint: "))]
            assert code == 0 and label in shown and max(map(len, table)) <= width, shown


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


def test_usage(fresh_home):
    for command in ("true", "true", "exit 3"):
        add_and_wait(fresh_home, command, "--group", "g", "--gpus", "0")
    add_and_wait(fresh_home, "true")
    told = json.loads(fresh_home.main("usage", "--by", "group", "--json").out)
    assert {row["group"]: (row["jobs"], row["failed"]) for row in told} == {"g": (3, 1), "-": (1, 0)}
    assert re.search(r"^root +4 +0\.0 +1 of 4 ended$", fresh_home.main("usage").out, re.MULTILINE)
    assert fresh_home.main("usage", "--since", "0").out.splitlines()[1:] == []
    assert fresh_home.main("open").out == f"{fresh_home.client().url}\n"


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
    told = " ".join(home.main("help", "more").out.split())
    assert "sbatch = add" in told and "stop ID = cancel ID" in told


@pytest.mark.parametrize("line, hint", [
    ("srun --pty bash", "--tty: nexus run --tty bash"), ("add -it bash", "nexus run --tty bash"), ("salloc", "nexus run --tty bash"),
    ("salloc --gres=gpu:1", "nexus run --tty bash"),
    ("sbatch -J foo x", "--name=foo"), ("add --gpus 1 --gres=gpu:2 x", "--gpus=2"), ("run -o out x", "nexus logs ID"),
    ("squeue -u root", "--user root"), ("scancel -u ann", "nexus cancel --user ann"), ("scancel -uann", "nexus cancel --user ann"),
    ("scancel -n lr=*", "nexus cancel --name 'lr=*'"), ("scancel -t pending", "nexus cancel --status pending"),
    ("scancel --state=RUNNING", "nexus cancel --status running"), ("scancel --me", "nexus cancel --status pending,running"),
    ("cancel all", "nexus cancel --status pending,running"), ("stop --all", "nexus cancel --status pending,running"),
    ("-k abc", "nexus kill abc"), ("kill -9 abc", "--signal KILL"), ("scontrol show job x", "hint: nexus show x\n"),
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
    ("edit abc --set lr=2", "nexus edit ID -- COMMAND; or cancel it, and nexus retry ID --set lr=2\n"),
    ("sbatch -n 1 x", "the number of tasks: leave it out"),
    ("squeue -n sw", "hint: --name sw\n"), ("hold -n sw*", "hint: --name 'sw*'\n"), ("release --jobname=sw", "hint: --name sw\n"),
    ("squeue -t pending", "hint: --status pending\n"), ("squeue -t PD,R", "hint: --status pending,running\n"),
    ("squeue --state=PENDING", "hint: --status pending\n"), ("sacct --state failed", "hint: --status failed\n"),
    ("sacct -s FAILED,TIMEOUT", "hint: --status failed\n"), ("scancel -t PD", "nexus cancel --status pending\n"),
    ("jobs --status PD", "hint: --status pending\n"), ("sacct -S now-1days", "hint: --since 1d\n"),
    ("sacct --starttime=yesterday", "hint: --since 1d\n"), ("sacct -a", "leave it out"), ("sacct -u ann", "hint: --user ann\n"),
    ("sacct --me", 'hint: --user "$USER"\n'), ("history --since now-2days", "hint: --since 2d\n"),
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


def test_until_when_a_token_is_good_is_a_local_time(home):
    shown = {}
    for zone in ("UTC0", "NZST-12"):
        made = home.run("token", "create", f"user{zone[:2]}", "--days", "30", TZ=zone).err
        shown[zone] = re.search(r"in until (\d{4}-\d\d-\d\d \d\d:\d\d);", made)[1]
        assert f"good until {shown[zone]}\n" in home.run("token", "list", TZ=zone).out
    utc, there = (datetime.datetime.strptime(text, "%Y-%m-%d %H:%M") for text in shown.values())
    assert datetime.timedelta(hours=12) <= there - utc <= datetime.timedelta(hours=12, minutes=5)


def test_lists_have_the_columns_that_are_chosen(home):
    job_id = add(home, "exit 3", "--name", "bad", "--group", "g1")
    home.main("wait", job_id)
    home.main("pause")
    waits = add(home, "true", "--name", "later")
    assert home.main("history", job_id, "--columns", "id,result,group").out == f"ID   RESULT  GROUP\n{job_id}  exit 3  g1\n"
    assert home.main("jobs", "--group", "g1", "--columns", "name", "--json").json == [{"name": "bad"}]
    for command in ("jobs", "history", "queue"):
        rows = list(csv.DictReader(home.main(command, "--csv").out.splitlines()))
        assert {row["id"] for row in rows} >= {waits if command == "queue" else job_id} and len(rows[0]) > 10, command
    assert home.main("queue", "--columns", "why", "--csv").out == "waiting_for\nthe queue is paused (nexus resume)\n"
    used = list(csv.DictReader(home.main("usage", "--by", "group", "--csv").out.splitlines()))
    assert next(row for row in used if row["group"] == "g1")["failed"] == "1"
    assert home.main("usage", "--columns", "jobs,gpu_hours").out.splitlines()[0] == "JOBS  GPU HOURS"
    assert home.main("jobs", "--group", "none-such", "--csv").out.count("\n") == 1, "a program reads the heading"
    assert "--by group" in home.main("usage", "--columns", "group,jobs").err and home.main("jobs", "--csv", "--json").code == 2
    with home.terminal("jobs", "-n", "1", "--csv") as terminal:
        assert "id,name,group,user" in terminal.end()[1], "nothing is cut"

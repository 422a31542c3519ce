"""The results of a group, from outside: values of its sweep, last lines and their numbers; and a sweep by the API."""

import csv
import io
import json

import live
import pytest
import samples
from stage import Bench
from test_after_groups import Stage

import nexus


@pytest.fixture
def stage():
    with Stage() as made:
        yield made


def read_table(stage, query=None, headers=None, group="g"):
    """The reply, and its rows as [{title: cell}]."""
    status, reply = stage.ask("GET", f"/groups/{group}/results", query=query, headers=headers)
    assert status == 200, reply
    titles = [column["title"] for column in reply["columns"]]
    return reply, [dict(zip(titles, row["cells"])) for row in reply["rows"]]


def column_of(rows, title):
    return [row[title] for row in rows]


def add_swept(stage, line=None, status="completed", id=None, **values):
    """A job of group g with these values; how it ended, and its last line."""
    job_id = stage.add(id, group="g", sweep_values=values)
    if status != "pending":
        stage.end(job_id, status, last_line=line, runtime_seconds=2.5, peak_gpu_mem_mib=1500.0)
    return job_id


def test_a_sweep_is_a_table(stage):
    add_swept(stage, "epoch 3/3 loss: 0.5 - acc: 0.8", lr="1e-2", seed="0")
    best = add_swept(stage, "epoch 3/3 loss: 0.25 - acc: 0.9", lr="1e-3", seed="0")
    add_swept(stage, "loss=nan acc=0.1", lr="1e-1", seed="0")
    add_swept(stage, "RuntimeError: code: 7", "failed", lr="1", seed="0")
    add_swept(stage, None, "pending", lr="1e-4", seed="0")
    reply, rows = read_table(stage)
    assert [(column["title"], column["kind"], column["form"], column["direction"]) for column in reply["columns"]] == [
        ("Job", "fixed", "text", None), ("lr", "sweep", "text", None), ("seed", "sweep", "text", None),
        ("loss", "metric", "number", "low"), ("acc", "metric", "number", "high"), ("Status", "fixed", "text", None),
        ("Runtime", "fixed", "duration", None), ("GPU memory", "fixed", "size", None), ("Last line", "fixed", "text", None)]
    assert column_of(rows, "lr") == ["1e-3", "1e-2", "1e-1", "1", "1e-4"], "completed ones first, the lowest loss first, nan last"
    assert column_of(rows, "loss") == [0.25, 0.5, "nan", None, None], "an error makes no column"
    assert (reply["order"], reply["best_id"], reply["total"]) == ("metric.loss", best, 5)
    assert column_of(rows, "Status") == ["completed", "completed", "completed", "failed", "pending"]
    assert (rows[0]["Runtime"], rows[0]["GPU memory"], rows[0]["Last line"]) == (2.5, 1500.0, "epoch 3/3 loss: 0.25 - acc: 0.9")
    assert rows[4]["Runtime"] is rows[4]["Last line"] is None


ORDERS = [  # which column is sorted by, the rows then
    (None, ["b", "d", "a", "c"]), ("-metric.loss", ["a", "d", "b", "c"]), ("sweep.lr", ["d", "b", "a", "c"]),
    ("-sweep.lr", ["c", "a", "b", "d"]),
    ("sweep.who", ["a", "b", "c", "d"]), ("-metric.acc", ["b", "a", "c", "d"]), ("status", ["a", "b", "c", "d"])]


def test_it_is_sorted_by_any_column(stage):
    """Numbers as numbers, then texts; nan last."""
    add_swept(stage, "loss=3 acc=0.2", lr="10", who="a")
    add_swept(stage, "loss=1 acc=0.3", lr="9", who="b")
    add_swept(stage, "loss=nan", lr="none", who="c")
    add_swept(stage, "loss=2", lr="1e-2", who="d")
    assert read_table(stage, {"order": "-loss"})[0]["order"] == "-metric.loss", "by its name for people"
    for order, values in ORDERS:
        assert column_of(read_table(stage, order and {"order": order})[1], "who") == values, order


def test_what_there_is_no_column_for_is_refused(stage):
    add_swept(stage, "loss=3", lr="1")
    status, error = stage.ask("GET", "/groups/g/results", query={"order": "metric.los"})
    assert (status, error["error"]) == (400, "usage") and "metric.loss" in error["hint"]


def test_a_column_of_a_strange_name_does_not_hide_another(stage):
    add_swept(stage, "Status: 3 loss: 4", status="completed", loss="0.1", id="aaa")
    reply, rows = read_table(stage)
    assert [column["key"] for column in reply["columns"]] == [
        "id", "sweep.loss", "metric.Status", "status", "runtime_seconds", "peak_gpu_mem_mib", "last_line"]
    assert rows[0]["metric.Status"] == 3 and rows[0]["Status"] == "completed" and rows[0]["loss"] == "0.1"


def test_the_last_retry_of_a_combination_counts(stage):
    failed = add_swept(stage, "boom", "failed", lr="1")
    again, = stage.retry(failed)
    assert column_of(read_table(stage)[1], "Job") == [again] and read_table(stage)[1][0]["lr"] == "1"
    stage.fail(again)
    third, = stage.retry(again)
    stage.edit(third, name="other")
    assert [read_table(stage)[1][0][title] for title in ("Job", "lr", "Status")] == [third, "1", "pending"]
    stage.edit(third, command="false")
    assert read_table(stage)[1][0]["Name"] == "other", "another command may not have these values"


def test_without_a_sweep_the_names_tell_the_jobs_apart(stage):
    stage.add("aaa", group="g", command="python train.py", name="first")
    stage.add("bbb", group="g", command="python train.py --big")
    assert column_of(read_table(stage)[1], "Name") == ["first", "python train.py --big"]
    script = stage.ask("POST", "/queue", {"group": "old", "each": [{"command": "true", "env": {"NEXUS_SWEEP_lr": "3"}}]})[1]
    assert read_table(stage, group="old")[1][0]["lr"] == "3", script


def test_seeds_are_one_row(stage):
    for seed, line in enumerate(("loss=0.5", "loss=0.7", "loss=nan")):
        add_swept(stage, line, lr=str(seed // 2), seed=str(seed))
    reply, rows = read_table(stage, {"mean": "true"})
    assert (reply["over"], column_of(rows, "loss"), column_of(rows, "Jobs")) == ("seed", [0.6, "nan"], [2, 1])
    assert read_table(stage, {"over": "lr"})[0]["total"] == 3 and read_table(stage)[0]["over"] is None
    status, error = stage.ask("GET", "/groups/g/results", query={"over": "bs"})
    assert (status, error["error"]) == (400, "usage") and "lr, seed" in error["hint"]


def test_a_part_of_the_rows(stage):
    add_swept(stage, "loss=3", lr="1")
    add_swept(stage, "loss=2", lr="2")
    for number in range(3):
        add_swept(stage, None, "pending", lr=f"{number + 3}")
    reply, rows = read_table(stage, {"status": "completed,running", "limit": "1"})
    assert (column_of(rows, "lr"), reply["total"]) == (["2"], 5)
    assert stage.get("/groups/g/results", {"status": "completed,running", "limit": "1"}).headers["Total-Count"] == "2"
    assert stage.get("/groups/g/results", {"limit": "0"}).headers["Total-Count"] == "5"


def test_who_has_a_token_sees_his_own_jobs(stage):
    add_swept(stage, "loss=3", lr="1")
    bob = stage.make_bearer("bob")
    status, error = stage.ask("GET", "/groups/g/results", headers=bob)
    assert (status, error["error"]) == (404, "not_found")
    stage.ask("POST", "/queue", {"command": "true", "group": "own", "sweep_values": {"lr": "2"}}, headers=bob)
    assert column_of(read_table(stage, headers=bob, group="own")[1], "lr") == ["2"]
    status, error = stage.ask("GET", "/groups/h/results")
    assert (status, error["error"]) == (404, "not_found") and "there is no job of group 'h'" in error["message"]


CELLS = [  # last line, its cell of a CSV file
    ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("@SUM(1)", "'@SUM(1)"), ("+1+2", "'+1+2"), ("-x", "'-x"), ("-0.5", "-0.5"),
    ("+1e5", "+1e5"), ("-inf", "-inf"), ('a "b", c', 'a "b", c'), ("a=1", "a=1"), ("ü", "ü"), ("\t=1", "'=1")]


def test_no_cell_of_a_csv_file_is_a_formula(stage):
    for number, (line, _) in enumerate(CELLS):
        add_swept(stage, line, n=str(number))
    add_swept(stage, None, "pending", n="-1-1")
    reply = stage.get("/groups/g/results", {"csv": "true", "order": "sweep.n"})
    assert reply.content_type.startswith("text/csv")
    head, *rows = csv.reader(io.StringIO(reply.body.decode()))
    assert head[0] == "id" and head[-4:] == ["status", "runtime_seconds", "peak_gpu_mem_mib", "last_line"] and "n" in head
    lines = {row[1]: row[-1] for row in rows}
    assert {int(n): cell for n, cell in lines.items() if not n.startswith("'")} == {n: cell for n, (_, cell) in enumerate(CELLS)}
    assert lines["'-1-1"] == "" and all(cell == "" for cell in rows[-1][2:-4])


def test_a_sweep_of_many_is_quick():
    """Thousands of jobs, each with a last line of its own: a reply reads no log."""
    count = samples.count(2000, 10000)
    with Bench() as bench:
        bench.ask("POST", "/queue", {"command": "t {n}", "group": "g", "gpus": 0, "sweep": [f"n=1..{count}"]})

        def change(state):
            for job in list(state.jobs.values()):
                yield nexus.Put("jobs", job.id, nexus.replace(
                    job, status="completed", attempts=(nexus.Attempt(number=1, started_at=1.0, last_line=f"loss: {job.number / 7}"),)))

        bench.store.update(change)
        began = live.time.thread_time()
        status, reply = bench.ask("GET", "/groups/g/results", query={"limit": "200"})
        assert status == 200 and (len(reply["rows"]), reply["total"]) == (200, count) and reply["rows"][0]["cells"][1] == "1"
        assert live.time.thread_time() - began < 3 * count / 10000


SWEEPS = [  # reason, a submission, [(command, name, group, cwd, values)] of its jobs; or what is said
    ("one", {"command": "t {lr}", "sweep": ["lr=1e-3,0.1"]}, [("t 1e-3", "lr=1e-3", None, "/tmp", {"lr": "1e-3"}),
                                                               ("t 0.1", "lr=0.1", None, "/tmp", {"lr": "0.1"})]),
    ("two", {"command": "t {lr} {s}", "name": "base", "sweep": ["lr=1", "s=0..1"]}, [
        ("t 1 0", "base lr=1 s=0", None, "/tmp", {"lr": "1", "s": "0"}), ("t 1 1", "base lr=1 s=1", None, "/tmp", {"lr": "1", "s": "1"})]),
    ("in all texts", {"command": "t", "name": "n{a}", "group": "g{a}", "cwd": "/{a}", "sweep": ["a=tmp"]},
     [("t", "ntmp", "gtmp", "/tmp", {"a": "tmp"})]),
    ("in a variable", {"command": "t", "env": {"A": "{a}", "B": "b"}, "sweep": ["a=7"]}, [("t", "a=7", None, "/tmp", {"a": "7"})]),
    ("quoted", {"command": "t {a}", "sweep": ["a='x, y'"]}, [("t 'x, y'", "a=x, y", None, "/tmp", {"a": "x, y"})]),
    ("of commands", {"commands": ["t {a}", "u {a}"], "sweep": ["a=1"]}, [("t 1", "a=1", None, "/tmp", {"a": "1"}),
                                                                        ("u 1", "a=1", None, "/tmp", {"a": "1"})]),
    ("an unused one", {"command": "t", "sweep": ["lr=1,2"]}, "there is no {lr} in the command t"),
    ("no values", {"command": "t {lr}", "sweep": ["lr"]}, "is not like NAME=VALUE,VALUE"),
    ("a file", {"command": "t {lr}", "sweep": ["lr=@/etc/passwd"]}, "only nexus add --sweep reads files"),
    ("too many", {"command": "t {a} {b}", "sweep": ["a=1..200", "b=1..200"]}, "more than 10000"),
    ("too long", {"command": "t {a}" + " x" * 20000, "sweep": ["a=1..9999"]}, "too long commands"),
    ("too long by its values", {"command": "t " + "{a}" * 3000, "sweep": ["a=" + "x" * 30000]}, "too long commands"),
    ("too long for a command", {"command": "t " + "{a}" * 300, "sweep": ["a=" + "x" * 3000]}, "bytes"),
    ("with each", {"each": [{"command": "t"}], "sweep": ["a=1"]}, "sweep is for a command"),
    ("without a command", {"sweep": ["a=1"]}, "sweep is for a command"), ("none", {"command": "t", "sweep": []}, "sweep must be a list"),
    ("a limit without a group", {"command": "t {a}", "max_concurrent": 2, "sweep": ["a=1"]}, "max_concurrent is for a group"),
]


@pytest.mark.parametrize("reason, body, jobs", SWEEPS, ids=[row[0] for row in SWEEPS])
def test_the_api_spreads_a_sweep(stage, reason, body, jobs):
    status, answer = stage.ask("POST", "/queue", {"cwd": "/tmp", **body})
    if isinstance(jobs, str):
        assert status == 400 and jobs in answer["message"], answer
        assert not stage.store.state.jobs
        return
    assert status == 200, answer
    made = [stage.store.state.jobs[job_id] for job_id in answer["ids"]]
    assert [(job.command, job.name, job.group, job.cwd, dict(job.sweep_values)) for job in made] == jobs
    if reason == "in a variable":
        assert dict(made[0].variables) == {"A": "7"}


def test_a_dry_run_says_how_many_jobs_a_sweep_makes(stage):
    sweep = {"command": "t {a}", "sweep": ["a=1..9"]}
    answer = stage.respond("POST", "/queue", {**sweep, "dry_run": True}, query={"limit": "1"})
    assert answer.headers["Total-Count"] == "9" and [job["command"] for job in json.loads(answer.body)["jobs"]] == ["t 1"]
    status, error = stage.ask("POST", "/queue", sweep, query={"limit": "1"})
    assert status == 400 and "limit is for a dry run" in error["message"] and not stage.store.state.jobs


LONG = "a long text that is not cut"


def test_a_sweep_from_its_commands_to_its_table():
    """Real jobs: bars after their results, an error, a restart, the command line."""
    with live.Box(gpus=2, is_supervised=False) as box:
        script = ("[ {lr} = 5 ] && { echo 'val_loss: 0.1'; sleep 0.3; echo 'ValueError: n: 3' >&2; exit 1; }; "
                  "echo epoch 1/1 val_loss: 0.{lr} acc=0.9; "
                  "echo Done.; "
                  r"printf '\r 50%%|##  | 1/2 [00:01<00:01, 1.0s/it]\r100%%|####| 2/2 [00:02<00:00, 1.0s/it]\n' >&2")
        done = box.nexus("add", "--gpus", "0", "--group", "exp 1/a", "--sweep", "lr=3,2,5", "--sweep", f"note='{LONG}'",
                         script + "; : {note}")
        ids = done.stdout.split()
        assert done.returncode == 0 and len(ids) == 3, done.stderr
        held = box.add("true", group="exp 1/a", is_held=True, sweep_values={"lr": "9", "note": "x"})
        for job_id, status in zip(ids, ("completed", "completed", "failed")):
            box.wait(job_id, status)
        assert box.job(ids[0])["sweep_values"] == {"lr": "3", "note": LONG}
        assert "sweep values: lr=3" in box.nexus("show", ids[0]).stdout
        before = json.loads(box.nexus("results", "exp 1/a", "--json").stdout)
        assert [row["id"] for row in before["rows"]] == [ids[1], ids[0], ids[2], held] and before["best_id"] == ids[1]
        assert [column["title"] for column in before["columns"]][:5] == ["Job", "lr", "note", "val_loss", "acc"]
        assert before["rows"][0]["cells"][3:5] == [0.2, 0.9] and before["rows"][0]["cells"][-1] == "Done."
        text = box.nexus("results", "exp 1/a")
        assert json.loads(box.nexus("results", "exp 1/a", "--order", "-val_loss", "--json").stdout)["order"] == "-metric.val_loss"
        means = box.nexus("results", "exp 1/a", "--over", "lr")
        assert "0.250 ± 0.071" in means.stdout and (f"{ids[1]} +1" in means.stdout or f"{ids[0]} +1" in means.stdout), means
        assert "no job of the group has a value seed" in box.nexus("results", "exp 1/a", "--mean").stderr
        assert LONG in text.stdout and held not in text.stdout
        assert "1 more waits" in text.stderr and f"best by val_loss (lowest): job {ids[1]}" in text.stderr
        rows = list(csv.DictReader(io.StringIO(box.nexus("results", "exp 1/a", "--csv").stdout)))
        assert [(row["id"], row["lr"], row["val_loss"], row["status"]) for row in rows] == [
            (ids[1], "2", "0.2", "completed"), (ids[0], "3", "0.3", "completed"), (ids[2], "5", "", "failed"), (held, "9", "", "pending")]
        box.add("true", group="plain", is_held=True)
        assert box.nexus("complete", "results", "").stdout == "plain\n", "bash would take the other apart"
        assert box.nexus("results", "exp").returncode == 3 and "exp 1/a" in box.nexus("results", "exp").stderr
        box.kill_service()
        box.start()
        assert json.loads(box.nexus("results", "exp 1/a", "--json").stdout)["rows"][:3] == before["rows"][:3], "kept over a restart"

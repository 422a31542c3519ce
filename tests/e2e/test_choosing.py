"""Which jobs a command is for: those that are named, or those that filters choose; and changes of many, all or none."""

import json
import os

import pages
import pytest
from console import Home

COMMANDS = [  # words, of which jobs it takes those in these statuses, in the order of `jobs`
    (["cancel"], "pending running"), (["kill"], "pending running"), (["scancel"], "pending running"), (["remove"], "pending"),
    (["hold"], "pending"), (["release"], "held"), (["wait"], "pending running failed cancelled"),
    (["edit", "--timeout", "4h"], "pending running"), (["move", "--first"], "pending"), (["move", "--last"], "pending"),
    (["move", "--priority", "low"], "pending"), (["move", "--before", "other"], "pending"), (["retry"], "failed"),
    (["retry", "--status", "completed"], "completed"), (["retry", "--status", "cancelled,failed"], "failed cancelled"),
    (["dismiss"], "failed"), (["clear"], "completed failed cancelled")]
READING = [["show"], ["why"], ["logs"], ["history"], ["jobs"], ["queue"]]
JOBS = (("completed", "true"), ("failed", "exit 3"), ("running", "sleep 1000"), ("cancelled", "true"), ("pending", "echo 12345"),
        ("held", "echo 12345"))


@pytest.fixture(scope="module")
def shared_home():
    with Home(is_quick=True, cpu_slots=20, kill_grace_seconds=1) as made:
        yield made


@pytest.fixture
def home(shared_home):
    """One that tests use one after another."""
    yield shared_home
    pages.clear_jobs(shared_home)


@pytest.fixture(scope="module")
def shared():
    """{status: id} in `ids`: of a job of each; and others, which no filter of these tests chooses."""
    with Home(is_quick=True, cpu_slots=20, kill_grace_seconds=1) as home:
        home.ids = {status: add(home, command, "--name", f"lr=0.1 {status}", "--group", "g", "--cwd", home.path)
                    for status, command in JOBS[:3]}
        home.main("wait", home.ids["completed"], home.ids["failed"])
        home.wait(home.ids["running"], "running")
        for status, command in JOBS[3:]:
            home.ids[status] = add(home, command, "--name", f"lr=0.1 {status}", "--group", "g", "--cwd", home.path, "--begin", "+1h")
        home.main("cancel", home.ids["cancelled"])
        home.main("hold", home.ids["held"])
        home.other = add(home, "true", "--name", "other", "--begin", "+1h")
        yield home


def add(home, command="true", *options):
    return home.main("add", "--gpus", "0", *options, command).id


def queue(home):
    return [job["name"] for job in home.main("queue", "--json").json]


def told(text):
    """The ids that a dry run names."""
    return [line.partition(":")[0] for line in text.splitlines()]


@pytest.mark.parametrize("words, statuses", COMMANDS, ids=[" ".join(case[0]) for case in COMMANDS])
def test_each_command_takes_what_jobs_takes(shared, words, statuses):
    wanted = {shared.ids[status] for status in statuses.split()}
    wanted |= {shared.ids["held"]} if "pending" in statuses and words != ["hold"] else set()
    for filters in (["--name", "lr=0.*"], ["--group", "g", "--name", "lr=0.1 [a-z]*"], ["--text", shared.path],
                    ["--name", "lr=*", "--since", "1h"], ["--user", shared.job(shared.other)["user"], "--group", "g", "--text", "LR="]):
        if filters == ["--group", "g"] and words[0] in ("hold", "release"):
            continue                            # that is the group itself
        done = shared.main(*words, *filters, "--dry-run")
        assert done.code == 0 and {*told(done.out)} == wanted, done
        number = f"{len(wanted)} job{'s' * (len(wanted) > 1)}"
        assert done.err.startswith(f"nexus: {number}: ") and "nothing was done" in done.err, done
        assert all(f"{job_id} lr=0.1 " in done.err for job_id in wanted), done
    assert shared.main(*words, "--name", "lr", "--dry-run").code == 3, "a pattern is of the whole name"
    assert shared.main(*words, "--name", "LR=*", "--dry-run").code == 3, "with its capitals"
    assert shared.main(*words, "--since", "0", "--name", "lr=*", "--dry-run").code == 3
    job_id = shared.ids["running" if words == ["kill"] else statuses.split()[0]]
    by_id = shared.main(*words[:1], *[word for word in words[1:] if "status" not in word and "," not in word and word != "completed"],
                        job_id, "--dry-run")
    assert by_id.code == 0 and told(by_id.out) == [job_id], by_id


@pytest.mark.parametrize("words", READING, ids=[words[0] for words in READING])
def test_lists_and_what_is_read_take_them_too(shared, words):
    job_id = shared.ids["held" if words[0] in ("why", "queue") else "failed"]
    name = shared.job(job_id)["name"]
    also = [] if words == ["logs"] else ["--group", "g", "--json"]
    done = shared.main(*words, "--name", f"{name[:-2]}*", "--since", "1h", *also)
    if words == ["logs"]:
        assert done.code == 0 and f"job {job_id}, failed" in done.err
        several = shared.main("logs", "--name", "lr=*")
        assert several.code == 0 and f"pending: {shared.ids['pending']}" in several.err, several
    else:
        assert [job["id"] for job in done.json] == [job_id]
    if words[0] in ("show", "why", "history"):
        assert job_id in shared.main(*words, name).out
    if words == ["show"]:
        both = shared.main("show", *list(shared.ids.values())[:2])
        assert all(f"Job {job_id}: " in both.out for job_id in list(shared.ids.values())[:2])
        assert shared.main("show", name, "--json").json["id"] == job_id, "one that is named is no list"
    if words == ["history"]:
        done = shared.main("history", shared.ids["pending"])
        assert done.code == 4 and "history is for jobs that are finished" in done.err
    assert shared.main(*words, "--name", "x*").code == (0 if words[0] in ("history", "jobs", "queue") else 3)


def test_the_api_and_the_lists_mean_the_same(shared):
    for query, count in (("name=lr=0.1*", 6), ("name=lr=0.1", 0), ("name=lr=0.1+%5Bcf%5D*", 3), ("since=1h", 7), ("since=0", 0),
                         ("name=*&since=1h&group=g", 6)):
        assert len(shared.ask("GET", f"/jobs?{query}")) == count, query
        shown = shared.ask("GET", f"/status?after=0&{query}")
        assert len(shown["waiting"]) + len(shown["ended"]) + len(shown["found"]["running"] or ()) == count, query
    for body in ({}, {"text": ""}, {"signal": "INT"}, {"since": "long"}, {"since": 5}):
        assert shared.call("POST", "/jobs/cancel", body)[0] == 400, body
    assert shared.call("POST", "/jobs/retry", {"change": {"gpus": 0}})[0] == 400
    for body in ({"change": {"priority": 2}}, {"ids": ["abc"]}, {"group": "g", "change": {}}, {"text": "", "change": {"priority": 2}}):
        assert shared.call("PATCH", "/queue", body)[0] == 400, body
    assert shared.main("jobs", "--status", "pending", "--json").json, "and nothing was cancelled"


def test_what_joins_meanwhile_is_left_alone(home):
    """The choice is made once, and goes to the service as ids."""
    home.main("pause")
    for number in range(3):
        add(home, "true", "--name", f"lr={number}", "--group", "g")
    client, asked = home.client(), []
    send = type(client).ask

    def ask(self, method, path, *rest, **more):
        if path.startswith("/jobs/cancel"):
            asked.append(rest[0])
            late.append(add(home, "true", "--name", "lr=late", "--group", "g"))
        return send(self, method, path, *rest, **more)

    late = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(client), "ask", ask)
        assert home.main("cancel", "--name", "lr=*", "--group", "g").code == 0
    assert len(asked[0]["ids"]) == 3 and home.job(late[0])["status"] == "pending"


def test_a_choice_is_of_ones_own_jobs(home):
    own = add(home, "true", "--name", "lr=1", "--begin", "+1h")
    token = home.main("token", "create", "ann").out.strip()
    there = {"NEXUS_URL": f"http://127.0.0.1:{home.port}", "NEXUS_TOKEN": token, "NEXUS_HOME": os.path.join(home.top, "elsewhere")}
    anns = home.main("add", "--gpus", "0", "--name", "lr=2", "--begin", "+1h", "true", **there).id
    for filters in (["--status", "pending"], ["--name", "lr=*"], ["--since", "1h"], ["--text", "lr"]):
        assert told(home.main("cancel", *filters, "--dry-run", **there).out) == [anns], filters
        assert {*told(home.main("cancel", *filters, "--dry-run").out)} == {own, anns}, filters
    done = home.main("cancel", "--user", home.job(own)["user"], **there)
    assert done.code == 0 and "no such job" in done.err and home.job(own)["status"] == "pending", done
    assert home.main("cancel", "--status", "pending", **there).code == 0
    assert [home.job(job_id)["status"] for job_id in (own, anns)] == ["pending", "cancelled"]
    assert home.main("edit", "--name", "lr=1", "--timeout", "1h", **there).code == 3
    assert home.main("move", own, "--before", anns, **there).code == 5


def test_with_ids_a_name_is_a_new_value(home):
    home.main("pause")
    first, second = (add(home, "true", "--name", f"lr={number}", "--group", "g") for number in (1, 2))
    assert home.main("edit", first, "--name", "x", "--group", "h").code == 0
    assert [home.job(first)[key] for key in ("name", "group")] == ["x", "h"]
    assert home.main("edit", first, "--set-name", "y", "--group", "none").code == 0
    assert [home.job(first)[key] for key in ("name", "group")] == ["y", None]
    done = home.main("edit", "--name", "lr=*", "--group", "g", "--set-name", "z", "--set-group", "k")
    assert done.code == 0 and f"1 job: {second} lr=2" in done.err and [home.job(second)[key] for key in ("name", "group")] == ["z", "k"]
    home.main("cancel", first, second)
    again = home.main("retry", second, "--name", "again", "--group", "h").id
    assert [home.job(again)[key] for key in ("name", "group")] == ["again", "h"]
    again = home.main("retry", "--name", "y", "--status", "cancelled", "--set-group", "h").id
    assert [home.job(again)[key] for key in ("name", "group", "command")] == ["y", "h", "true"]
    assert home.main("retry", "--name", "y").code == 0, "it was run again"


def test_many_are_moved_and_keep_their_order(home):
    home.main("pause")
    ids = {name: add(home, "true", "--name", name, "--group", name[0]) for name in ("a1", "b1", "a2", "b2", "a3")}
    for words, wanted in ((["b2", "a3", "--first"], "b2 a3 a1 b1 a2"), (["--group", "a", "--last"], "b2 b1 a3 a1 a2"),
                          (["--group", "b", "--before", "a2"], "a3 a1 b2 b1 a2"), (["a2", "--before", ids["a3"]], "a2 a3 a1 b2 b1"),
                          (["--name", "b*", "--before", "a1"], "a2 a3 b2 b1 a1"), (["--status", "pending", "--first"], "a2 a3 b2 b1 a1"),
                          (["--group", "a", "--priority", "low"], "b2 b1 a1 a2 a3"), (["a1", "--before", "b1"], "b2 a1 b1 a2 a3")):
        done = home.main("move", *words)
        assert done.code == 0 and " ".join(queue(home)) == wanted, (words, done)
    assert "the first of them" in home.main("move", "a1", "a2", "--first").err
    assert home.main("restart").code == 0 and " ".join(queue(home)) == "a1 a2 b2 b1 a3", "a restart finds it so"
    for words, code, says in ((["a1", "--before", "a1"], 4, "cannot be before itself"), (["--group", "a", "--before", "a2"], 4, "itself"),
                              (["a1", "--before", "zzz"], 3, "no job 'zzz'"), (["a1", "--before", "a2", "--first"], 2, "not allowed with"),
                              (["--group", "x", "--first"], 3, "no job of group 'x'"), (["a1", "zzz", "--last"], 3, "nothing was done")):
        done = home.main("move", *words)
        assert done.code == code and says in done.err and " ".join(queue(home)) == "a1 a2 b2 b1 a3", done
    home.main("remove", "b2")
    assert home.main("move", "a1", "--before", ids["b2"]).code == 4, "it waits no more"


def test_edit_of_many_is_all_or_none(home):
    home.main("pause")
    ids = [add(home, "true", "--name", f"lr={number}", "--group", "g", *(["--gpus", "1", "--gpu-ids", "0"] if number == 2 else []))
           for number in range(4)]
    done = home.main("edit", "--group", "g", "--timeout", "4h")
    assert done.code == 0 and "4 jobs are changed: time limit 4h" in done.err
    assert [home.job(job_id)["timeout_seconds"] for job_id in ids] == [14400] * 4
    done = home.main("edit", "--group", "g", "--gpus", "2", "--timeout", "1h")
    assert done.code == 2 and f"1 of 4 jobs cannot be changed so, and none was: {ids[2]}: " in done.err, done
    done = home.main("edit", *ids, "--after", ids[1])
    assert done.code == 4 and f"1 of 4 jobs cannot be changed so, and none was: {ids[1]}: would wait for itself" in done.err, done
    done = home.main("edit", ids[0], ids[3], "nope", "--gpus", "1")
    assert done.code == 3 and "no job 'nope'" in done.err and "nothing was done" in done.err
    running = home.ask("POST", "/queue", {"command": "sleep 1000", "gpus": 0, "group": "g"})["id"]
    home.main("resume")
    home.wait(running, "running")
    later = [add(home, "true", "--group", "h", "--begin", "+1h") for _ in range(2)]
    home.main("edit", running, "--group", "h")
    done = home.main("edit", "--group", "h", "--gpus", "1")
    assert done.code == 4 and f"1 of 3 jobs cannot be changed so, and none was: {running}: is running" in done.err, done
    assert [home.job(job_id)["gpus"] for job_id in later] == [0, 0]
    assert home.main("edit", "--group", "h", "--status", "pending", "--gpus", "1").code == 0
    assert [home.job(job_id)["gpus"] for job_id in (*later, running)] == [1, 1, 0]
    assert home.main("edit", "--group", "h", "--timeout", "5h").code == 0 and home.job(running)["timeout_seconds"] == 18000
    done = home.main("hold", later[0], running)
    assert done.code == 4 and home.job(later[0])["is_held"] is False, "nor is one of them held"


def test_a_change_of_many_is_one_for_the_disk(home):
    home.main("pause")
    ids = home.main("add", "--gpus", "0", "--sweep", "n=1..300", "--group", "g", "true {n}").out.split()

    def count_lines():                  # of the journal, which begins anew when state.json is written: their numbers go on
        lines = home.file("journal.jsonl").read_text().splitlines()
        return json.loads(lines[-1] if lines else home.file("state.json").read_text())["seq"]

    before = count_lines()
    assert home.main("move", "--group", "g", "--first").code == home.main("edit", "--group", "g", "--timeout", "1h").code == 0
    assert 2 <= count_lines() - before <= 4             # the service may write one of its own
    assert [job["id"] for job in home.main("queue", "--json").json] == ids


def test_a_group_is_paused_as_before(home):
    home.main("pause")
    job_id = add(home, "true", "--group", "g", "--name", "n")
    assert "group g is paused" in home.main("hold", "--group", "g").err and not home.job(job_id)["is_held"]
    assert "group g is resumed" in home.main("release", "--group", "g").err
    assert home.main("hold", "--group", "g", "--name", "n").code == 0 and home.job(job_id)["is_held"]
    assert home.main("release", "--status", "pending").code == 0 and not home.job(job_id)["is_held"]


def test_nothing_is_asked_at_a_terminal(home):
    add(home, "exit 3", "--name", "bad")
    home.main("wait", "bad")
    with home.terminal("clear", "--status", "failed") as terminal:
        code, shown = terminal.end()
    assert code == 0 and "1 finished job forgotten" in shown and "y: yes" not in shown


def test_a_retry_of_many_failures_is_asked_at_a_terminal(home):
    """`--failed` takes all of the history: so it is asked above ten, but not in a script, nor where a filter is given."""
    ids = home.main("add", "--gpus", "0", "--group", "many", "--sweep", "n=1..12", "exit {n}").out.split()
    home.main("wait", *ids)
    home.main("resume", "--group", "many")              # failures at once hold a group
    home.main("wait", *ids)
    home.main("pause")
    question = b"run all 12 jobs again, the oldest of [A-Z][a-z][a-z] 20[0-9-]+\\? \\(y: yes\\)"
    for typed, says in (("n\n", "nothing was run again; --since 1d takes those of the last day"), ("y\n", ids[0])):
        with home.terminal("retry", "--failed") as terminal:
            terminal.wait_for(question)
            terminal.type(typed)
            code, shown = terminal.end()
        jobs = home.client().jobs(status="pending", fields="id")
        assert code == 0 and (says in shown if typed == "n\n" else len(jobs) == 12) and bool(jobs) == (typed == "y\n"), shown
    home.main("cancel", "--status", "pending")
    for words in (["--group", "many", "--status", "cancelled"], ["--group", "many", "--status", "cancelled", "--dry-run"]):
        with home.terminal("retry", *words) as terminal:
            code, shown = terminal.end()
        assert code == 0 and "y: yes" not in shown, shown
    home.main("resume")


def test_failures_are_dismissed(home):
    """As the page's button does."""
    bad, other = (add(home, "exit 3", "--name", name) for name in ("bad", "other"))
    home.main("wait", bad, other)
    assert home.main("dismiss", bad).err == "nexus: 1 failure dismissed\n"
    assert home.main("dismiss", "--all", "--dry-run").out == f"{bad}: bad: exit 3\n{other}: other: exit 3\n"
    done = home.main("dismiss", "--all")
    assert done.err.endswith("nexus: 1 failure dismissed\n"), "one was before"
    assert home.client().ask("GET", "/status?after=0")["found"]["failures"] == 0
    assert home.main("dismiss", "--name", "bad", "--undo").err.endswith("nexus: 1 failure shown again\n")
    assert home.client().ask("GET", "/status?after=0")["found"]["failures"] == 1
    again = home.main("retry", "--failed").out.split()
    home.main("wait", *again)
    assert home.main("dismiss", bad).code == 0 and home.job(bad)["status"] == "failed"
    assert home.main("dismiss", "nobody").code == 3
    good = add(home, "true")
    home.main("wait", good)
    assert home.main("dismiss", good).code == 4


def test_what_is_old_is_cleared(home):
    """`--dry-run` says what it would free."""
    old = add(home, "head -c 3000000 /dev/zero", "--name", "old")
    home.main("wait", old)
    done = home.main("clear", "--older", "0s", "--dry-run")
    assert done.out == f"{old}: old: head -c 3000000 /dev/zero\n"
    assert "1 job; 3MB of logs would be freed; this was" in done.err, done
    assert home.main("jobs", "--older", "0s", "--json").json[0]["id"] == old and home.main("jobs", "--older", "1h", "--json").json == []
    assert "no such job is finished" in home.main("clear", "--older", "2000-01-01").err
    done = home.main("clear", "--older", "0s")
    assert "1 finished job forgotten, with its logs (3MB)" in done.err and home.main("show", old).code == 3, done

"""What `nexus usage` says stays the same when jobs are forgotten, whatever happens meanwhile."""

import json
import time

import live
import pytest

DIES = """import os
append = nexus.Journal.append
def dying(self, record, is_synced):
    is_it = b'"usage"' in record
    if is_it and {is_before}: os.kill(os.getpid(), 9)
    append(self, record, is_synced)
    if is_it: os.kill(os.getpid(), 9)
nexus.Journal.append = dying"""


def ask_usage(box, **headers):
    """{by: {name: (jobs, ended, failed, seconds on GPUs, seconds without)}} of the last days."""
    return {by: {row[by]: (row["jobs"], row["ended"], row["failed"], *(pytest.approx(row[f"{kind}_hours"] * 3600, abs=0.01)
                           for kind in ("gpu", "cpu_job")))
                 for row in box.call("GET", f"/usage?by={by}", **headers)[1]} for by in ("user", "group")}


def run_all(box, *jobs, **headers):
    ids = [box.call("POST", "/queue", {"command": "sleep 0.2", "gpus": 0, **job}, **headers)[1]["id"] for job in jobs]
    for job_id in ids:
        live.until(lambda: box.call("GET", f"/jobs/{job_id}", **headers)[1]["finished_at"], f"the end of {job_id}")     # noqa: B023
    return ids


def make_token(box, user):
    done = box.nexus("token", "create", user)
    assert done.returncode == 0, done.stderr
    return {"Authorization": f"Bearer {done.stdout.strip()}"}


def clear(box, *ids):
    assert box.ask("POST", "/jobs/clear", {"ids": list(ids)})["ids"] == list(ids)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_service_that_is_killed_while_it_forgets_counts_nothing_twice(is_before):
    with live.Box(gpus=2, is_supervised=False) as box:
        ids = run_all(box, {"gpus": 1, "group": "g"}, {"gpus": 0.5, "group": "g", "command": "exit 3", "retries": 1}, {})
        before = ask_usage(box)
        assert before["group"]["g"][:3] == (2, 2, 1) and before["user"]["root"][:3] == (3, 3, 1)
        box.kill_service()
        box.serve(f"exec({DIES.format(is_before=is_before)!r})")
        with pytest.raises(live.Lost):
            box.call("POST", "/jobs/clear", {"ids": ids})
        live.until(lambda: not box.pid(), "its death")
        box.start()
        assert len(box.ask("GET", "/jobs")) == (3 if is_before else 0)
        assert ask_usage(box) == before
        if is_before:
            clear(box, *ids)
            assert box.ask("GET", "/jobs") == [] and ask_usage(box) == before
        box.kill_service()
        box.start()
        assert ask_usage(box) == before


def test_what_is_beyond_history_limit_counts():
    with live.Box(gpus=0, is_supervised=False, history_limit=2, cpu_slots=4) as box:
        run_all(box, *[{"group": f"g{number % 2}"} for number in range(6)])
        live.until(lambda: len(box.ask("GET", "/jobs")) == 2, "the others to go")
        usage = ask_usage(box)
        assert usage["user"]["root"][:3] == (6, 6, 0) and {group: row[0] for group, row in usage["group"].items()} == {"g0": 3, "g1": 3}
        assert usage["user"]["root"][4].expected >= 6 * 0.2


def test_groups_beyond_twenty_are_one():
    with live.Box(gpus=0, is_supervised=False, cpu_slots=8) as box:
        ids = run_all(box, *[{"group": f"g{number:02}", "command": "true"} for number in range(23)], {"command": "true"})
        before = ask_usage(box)
        assert len(before["group"]) == 24
        clear(box, *ids)
        usage = ask_usage(box)
        assert usage["user"] == before["user"]
        wanted = {**{f"g{number:02}": 1 for number in range(20)}, "-": 1, "(other)": 3}
        assert {group: row[0] for group, row in usage["group"].items()} == wanted


def test_a_user_with_a_token_sees_no_groups_of_others():
    with live.Box(gpus=0, is_supervised=False, cpu_slots=4) as box:
        tokens = {user: make_token(box, user) for user in ("ann", "bob")}
        ids = [job_id for user, token in tokens.items() for job_id in run_all(box, {"group": f"of-{user}"}, {}, **token)]
        before = [ask_usage(box, **token) for token in tokens.values()]
        assert [{group: row[0] for group, row in usage["group"].items()} for usage in before] == [
            {"of-ann": 1, "-": 1}, {"of-bob": 1, "-": 1}]
        clear(box, *ids)
        assert [ask_usage(box, **token) for token in tokens.values()] == before
        assert all({user: row[0] for user, row in usage["user"].items()} == {"ann": 2, "bob": 2} for usage in before)
        assert {group: row[0] for group, row in ask_usage(box)["group"].items()} == {"of-ann": 1, "of-bob": 1, "-": 2}
        token = tokens["ann"]["Authorization"].split()[1]
        told = box.nexus("usage", "--by", "group", environ={
            "NEXUS_URL": f"http://127.0.0.1:{box.port}", "NEXUS_TOKEN": token, "NEXUS_HOME": str(box.folder / "elsewhere")})
        assert "of-ann" in told.stdout and "of-bob" not in told.stdout, told


def test_where_since_cuts_a_day_the_answer_says_that_it_is_whole():
    with live.Box(gpus=0, is_supervised=False) as box:
        job_id, = run_all(box, {})
        assert json.loads(box.nexus("usage", "--since", "0", "--json").stdout) == []
        clear(box, job_id)
        day = time.strftime("%Y-%m-%d", time.gmtime())
        row, = json.loads(box.nexus("usage", "--since", "0", "--json").stdout)
        assert (row["user"], row["jobs"], row["forgotten_since"]) == ("root", 1, f"{day}T00:00:00Z")
        assert f"of jobs that are forgotten, whole days since {day}\n" in box.nexus("usage", "--since", "0").stderr
        row, = box.ask("GET", "/usage?since=2d")
        assert row["forgotten_since"] is None and "forgotten" not in box.nexus("usage").stderr
        assert box.call("GET", "/usage?since=99999w")[0] == 200
        for query in ("since=soon", "by=command", "group=g"):
            assert box.call("GET", f"/usage?{query}")[0] == 400

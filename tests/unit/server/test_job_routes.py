"""Jobs are added, chosen, listed, ended and run again."""

import json

import pytest
from stage import ANN, BOB, Bench

import nexus


def test_several_are_ended_or_run_again_all_or_none(bench):
    def status(job_id):
        return bench.ask("GET", f"/jobs/{job_id}")[1]["status"]

    first, child = bench.add(), bench.add()
    later = bench.ask("POST", "/queue", {"command": "true", "after": [first]})[1]["id"]
    refused = bench.ask("POST", "/jobs/cancel", {"ids": [first, child], "status": ["running"]})
    assert refused[0] == 409 and "nothing was done to the others" in refused[1]["message"]
    assert bench.ask("POST", "/jobs/cancel", {"ids": [first, "xyz"]})[0] == 404
    assert [status(job_id) for job_id in (first, child, later)] == ["pending"] * 3
    assert bench.ask("POST", "/jobs/retry", {"ids": [first]})[0] == 409
    status_code, answer = bench.ask("POST", "/jobs/cancel", {"ids": [first]})
    assert (status_code, answer["ids"]) == (202, [first])
    assert [(job["id"], job["status"], job["outcome"]) for job in answer["jobs"]] == [(first, "cancelled", "removed")]
    assert bench.ask("POST", "/jobs/cancel", {"ids": [first]})[1]["ids"] == [], "it is over, which is what was wanted"
    assert bench.ask("POST", "/jobs/cancel", {"ids": [first], "status": ["running"]})[0] == 409, "it was to be running"
    assert bench.ask("POST", "/jobs/retry", {"ids": [first, child]})[0] == 409
    assert bench.ask("POST", "/jobs/cancel", {"ids": [first, child, child, later]})[1]["ids"] == [child], "of several one may be over"
    assert [status(job_id) for job_id in (first, child, later)] == ["cancelled"] * 3
    again = bench.ask("POST", "/jobs/retry", {"ids": [first, later]})[1]["ids"]
    assert bench.ask("GET", f"/jobs/{again[1]}")[1]["after"] == [again[0]]
    assert [job["id"] for job in bench.ask("GET", "/queue")[1]] == again


def test_jobs_of_a_group_or_a_status_are_ended_or_run_again(bench):
    a, b, c, d = (bench.add(group=group) for group in ("g", "g", "h", "g"))
    bench.become(a, "failed", exit_code=1)
    bench.become(b, "running")
    for bad in ({}, {"ids": None}, {"group": None, "status": None}, {"ids": []}, {"status": "x"}, {"x": 1}, []):
        assert bench.ask("POST", "/jobs/cancel", bad)[0] == bench.ask("POST", "/jobs/retry", bad)[0] == 400, bad
    assert bench.ask("POST", "/jobs/cancel", {"group": "k"})[0] == 404
    assert bench.ask("POST", "/jobs/cancel", {"group": "g", "status": "pending"})[1]["ids"] == [d]
    assert bench.ask("POST", "/jobs/cancel", {"group": "g"})[1]["ids"] == [b]
    assert bench.ask("POST", "/jobs/cancel", {"status": ["pending", "failed"]})[1]["ids"] == [c]
    again = bench.ask("POST", "/jobs/retry", {"group": "g"})[1]["ids"]
    assert len(again) == 1 and bench.ask("GET", f"/jobs/{a}")[1]["retried_as"] == again[0], "the one that failed"
    assert bench.ask("POST", "/jobs/retry", {"group": "g"})[1]["ids"] == [], "it was run again"
    assert len(bench.ask("POST", "/jobs/retry", {"status": "cancelled"})[1]["ids"]) == 2
    theirs = bench.make_bearer("ann")
    assert bench.ask("POST", "/jobs/cancel", {"status": "pending"}, theirs)[1]["ids"] == [], "of others nothing is ended"
    for group in ("g", "gg"):
        answer = bench.ask("POST", "/jobs/retry", {"group": group}, theirs)
        assert answer[0] == 404 and "'g'" not in answer[1]["hint"], "nor told of their groups"
    assert bench.ask("POST", "/jobs/retry", {"ids": [a], "status": "cancelled"})[0] == 409
    assert bench.ask("POST", "/jobs/cancel", {"ids": [c], "group": "g"})[0] == 409, "what is named is not left out"


def test_jobs_are_chosen_and_listed_part_by_part(bench):
    made = [bench.add(command=f"c{number}", group="g" if number else None, name=f"n{number}") for number in range(4)]
    bench.become(made[0], "completed", exit_code=0)
    bench.become(made[1], "running")
    user = bench.service.user
    for query, expected in [({}, made), ({"status": "pending"}, made[2:]), ({"status": "running"}, [made[1]]),
                            ({"status": "completed"}, [made[0]]), ({"status": "failed"}, []), ({"limit": "2"}, made[:2]),
                            ({"limit": "0"}, []), ({"limit": "99"}, made), ({"user": user}, made), ({"user": "x"}, []),
                            ({"group": "g"}, made[1:]), ({"name": "n3"}, [made[3]]), ({"text": "C2"}, [made[2]]),
                            ({"sort": "-created_at", "limit": "2"}, [made[3], made[2]]),
                            ({"sort": "runtime_seconds"}, made)]:
        response = bench.get("/jobs", query)
        assert [job["id"] for job in json.loads(response.body)] == expected, query
        assert response.headers["Total-Count"] == str(len(expected if "limit" not in query else made))
    assert bench.ask("GET", "/queue", query={"text": "c3"})[1][0]["position"] == 1
    assert bench.ask("GET", "/jobs", query={"fields": "status,id,position", "limit": "3"})[1][2] == {
        "status": "pending", "id": made[2], "position": 0}
    assert bench.ask("GET", "/jobs", query={"sort": "name"})[0] == 400
    assert set(nexus.SORTED_BY) <= nexus.PUBLIC_JOB_KEYS, "the order tells what is sorted by"
    assert "fields[1] must be one of status, " in bench.ask("GET", "/jobs", query={"fields": "id,statu"})[1]["message"]
    theirs = bench.make_bearer("ann")
    for query, count in (({}, 4), ({"user": user}, 4), ({"fields": "status"}, 4), ({"text": "c1"}, 0), ({"name": "n1"}, 0),
                         ({"group": "g"}, 0)):
        seen = bench.ask("GET", "/jobs", None, theirs, query)[1]
        assert len(seen) == count and all(job.get("command") is None for job in seen), "nothing hidden is found"


def test_the_end_of_a_job_is_waited_for(bench):
    job_id = bench.add()
    assert json.loads(b"".join(bench.get(f"/jobs/{job_id}", {"wait": "1"}).stream))["status"] == "pending"
    answer = bench.get(f"/jobs/{job_id}", {"wait": "60"}).stream
    assert next(answer) == b"", "whoever waits may go"
    bench.become(job_id, "failed", exit_code=1)
    assert json.loads(b"".join(answer))["status"] == "failed"
    assert bench.ask("GET", f"/jobs/{job_id}", query={"wait": "60"})[1]["status"] == "failed", "it has ended already"
    for bad in ("x", "-1", "1e3", "3601"):
        assert bench.ask("GET", f"/jobs/{job_id}", query={"wait": bad})[0] == 400


def test_another_environment_is_the_owners_to_send_and_is_written_nowhere(bench):
    own, theirs = bench.add(), bench.make_bearer("ann")
    hers = bench.ask("POST", "/queue", {"command": "true"}, theirs)[1]["id"]
    change = {"environment": {"API_KEY": "secret-value"}, "umask": 0o27}
    for request in (("PATCH", f"/queue/{hers}", change), ("POST", "/jobs/retry", {"ids": [hers], "change": change})):
        bench.ask("POST", "/jobs/cancel", {"ids": [hers]}) if request[0] == "POST" else None
        status, answer = bench.ask(*request, theirs)
        assert status == 403 and "the whole environment is for" in answer["message"]
    assert bench.ask("PATCH", f"/queue/{own}", {"environment": None})[0] == 400
    assert bench.ask("PATCH", f"/queue/{own}", change)[0] == 200
    changed, = [line for line in bench.lines if " changed by " in line]
    assert "API_KEY" in changed and "secret-value" not in "".join(bench.lines)
    assert "secret-value" not in json.dumps(bench.ask("GET", f"/jobs/{own}")[1])


def test_a_list_is_added_wholly_or_not_at_all(bench):
    status, answer = bench.ask("POST", "/queue", [{"command": "a"}, {"command": "b", "gpus": 0}])
    assert status == 200 and len(answer["ids"]) == 2 and bench.commands == ["a", "b"]
    for bad in ({"command": "d", "gpus": 9}, {"command": ""}, {"command": "d", "x": 1}, 7):
        assert bench.ask("POST", "/queue", [{"command": "c"}, bad])[0] == 400
    assert bench.commands == ["a", "b"]
    status, answer = bench.ask("POST", "/queue", {"commands": ["g", "h"], "gpus": 0, "name": "both"})
    assert status == 200 and len(answer["ids"]) == 2 and bench.commands == ["a", "b", "g", "h"]
    assert bench.ask("POST", "/queue", {"commands": ["i", ""]})[0] == 400 and len(bench.commands) == 4


def test_a_full_queue_is_429_and_a_list_that_does_not_fit_is_not_begun():
    with Bench(queue_limit=2) as bench:
        bench.add()
        status, answer = bench.ask("POST", "/queue", [{"command": "a"}, {"command": "b"}])
        assert status == 429 and answer["error"] == "queue_full" and "queue_limit" in answer["message"]
        last = bench.add()
        assert len(bench.commands) == 2
        bench.become(last, "failed", exit_code=1)
        bench.add()
        assert bench.ask("POST", "/jobs/retry", {"ids": [last]})[0] == 429


def test_an_idempotency_key_is_known_to_the_next_service(bench):
    key = {"idempotency-key": "0123456789abcdef"}
    first = bench.ask("POST", "/queue", {"commands": ["a", "b"]}, key)
    bench.store = bench.service.store = nexus.Store(bench.layout, nexus.Clock(), nexus.DISK, bench.service.log)
    bench.store.recover()
    assert bench.ask("POST", "/queue", {"commands": ["a", "b"]}, key) == first and bench.commands == ["a", "b"]


UNIQUE = [  # reason, the commands, how many of the ids differ
    ("one of them is there already", ["old", "a", "b"], 3), ("two are the same", ["a", "b", "a"], 2), ("both", ["a", "old", "a"], 2)]


@pytest.mark.parametrize("reason, commands, count", UNIQUE, ids=[row[0] for row in UNIQUE])
def test_a_key_is_answered_with_the_same_ids_where_jobs_were_to_be_unique(bench, reason, commands, count):
    bench.ask("POST", "/queue", {"command": "old"})
    key = {"idempotency-key": "0123456789abcdef"}
    ids = [bench.ask("POST", "/queue", {"commands": commands, "unique": True}, key)[1]["ids"] for _ in range(2)]
    assert ids[0] == ids[1] and len(ids[0]) == 3 and len({*ids[0]}) == count


def test_only_finished_jobs_are_cleared_all_or_none(bench):
    over, waits = bench.add(gpus=0), bench.add(gpus=0)
    bench.become(over, "completed", exit_code=0)
    assert bench.ask("POST", "/jobs/clear", {"ids": [over, waits]})[0] == 409
    assert bench.ask("POST", "/jobs/clear", {"status": ["running"]})[0] == bench.ask("POST", "/jobs/clear", {})[0] == 400
    assert bench.ask("POST", "/jobs/clear", {"ids": ["zzz"]})[0] == bench.ask("POST", "/jobs/clear", {"group": "x"})[0] == 404
    assert len(bench.ask("GET", "/jobs")[1]) == 2


def test_a_job_that_is_cancelled_at_once_is_warned_of(bench):
    first = bench.add(gpus=0)
    bench.become(first, "failed", cause="exit", exit_code=1)
    answer = bench.ask("POST", "/queue", {"command": "b", "gpus": 0, "after": [first]})[1]
    assert answer["warning"] == f"job {answer['id']} was cancelled at once: it was to come after job {first}, which failed (exit 1)"


def test_why(bench):
    job_id = bench.add(gpus=2)
    bench.ask("POST", "/gpus/1/pause")
    bench.decide()
    status, told = bench.ask("GET", f"/jobs/{job_id}/why")
    assert status == 200 and told["why"] == "needs 2 GPUs; 1 of 2 is free; GPU 1 is paused"
    assert told["reason"] == {"code": "resources", "subject": "gpus", "detail": told["why"]}
    assert told["facts"][0] == "it is first in the queue" and [(gpu["index"], gpu["verdict"]) for gpu in told["gpus"]] == [
        (0, None), (1, "is paused")]
    bench.ask("POST", "/service/pause")
    assert bench.ask("GET", f"/jobs/{job_id}/why")[1]["why"] == "the queue is paused (nexus resume)"


def test_positions_of_a_group_are_those_of_the_queue(bench):
    ids = [bench.add(gpus=0, group=group) for group in ("a", "b", "a")]
    assert [(job["id"], job["position"]) for job in bench.ask("GET", "/queue", query={"group": "a"})[1]] == [(ids[0], 0), (ids[2], 2)]


@pytest.mark.parametrize("reason, body, code", [
    ("a whole environment", {"environment": {"PATH": "/bob"}}, 403), ("another's group", {"group": "theirs"}, 403),
    ("after another's job", {"after": ["{ann}"]}, 403), ("his own group", {"group": "his"}, 200), ("variables", {"env": {"A": "1"}}, 200),
    ("after his own", {"after": ["{bob}"]}, 200)])
def test_what_a_user_may_submit(lab_bench, reason, body, code):
    assert lab_bench.ask("POST", "/queue", {"command": "true", "group": "theirs"}, ANN)[0] == 200
    text = json.dumps({"command": "true", **body}).replace("{bob}", lab_bench.ids[0]).replace("{ann}", lab_bench.ids[1])
    got, answer = lab_bench.ask("POST", "/queue", json.loads(text), BOB)
    assert got == code, (reason, answer)
    assert len(lab_bench.store.state.jobs) == (5 if code == 200 else 4)


def test_the_same_key_of_another_user_is_another_key(lab_bench):
    key = {"idempotency-key": "0123456789abcdef"}
    ids = [lab_bench.ask("POST", "/queue", {"command": "true"}, {**who, **key})[1]["id"] for who in (BOB, ANN, BOB, {})]
    assert ids[0] == ids[2] and len(set(ids)) == 3


def test_unique_is_among_ones_own(lab_bench):
    first = lab_bench.ask("POST", "/queue", {"command": "true", "unique": True}, ANN)[1]["id"]
    assert lab_bench.ask("POST", "/queue", {"command": "true", "unique": True}, BOB)[1]["id"] != first
    assert lab_bench.ask("POST", "/queue", {"command": "true", "unique": True}, ANN)[1] == {"id": first, "known": [first]}

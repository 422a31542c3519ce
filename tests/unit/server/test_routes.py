"""What is refused, whatever the route."""

import json

import pytest
from stage import is_error

REFUSALS = [  # reason, method, path, query, body, headers, status, what its message says
    ("a list of nothing", "POST", "/queue", {}, [], {}, 400, "empty"),
    ("neither a job nor a list", "POST", "/queue", {}, "x", {}, 400, "object"),
    ("no JSON", "POST", "/queue", {}, b"{", {}, 400, "not valid JSON"),
    ("no UTF-8", "POST", "/queue", {}, b'{"command": "\xff"}', {}, 400, "UTF-8"),
    ("nested without end", "POST", "/queue", {}, b"[" * 100000, {}, 400, "not valid JSON"),
    ("NaN", "POST", "/queue", {}, b'{"command": "x", "gpus": NaN}', {}, 400, "NaN"),
    ("no command", "POST", "/queue", {}, {"name": "x"}, {}, 400, "command"),
    ("an unknown key", "POST", "/queue", {}, {"command": "x", "gpu": 1}, {}, 400, "'gpu'"),
    ("a bad one in a list", "POST", "/queue", {}, [{"command": "x"}, {"command": 1}], {}, 400, "job 2 of 2"),
    ("commands and command", "POST", "/queue", {}, {"commands": ["a"], "command": "b"}, {}, 400, "commands"),
    ("more GPUs than there are", "POST", "/queue", {}, {"command": "x", "gpus": 3}, {}, 400, "2"),
    ("a GPU that is not there", "POST", "/queue", {}, {"command": "x", "gpu_ids": [7]}, {}, 400, "7"),
    ("it comes after nothing", "POST", "/queue", {}, {"command": "x", "after": ["xyz"]}, {}, 404, "xyz"),
    ("a model without a table", "POST", "/queue", {}, {"command": "x", "llm": "qwen"}, {}, 400, "qwen"),
    ("a snapshot of nothing", "POST", "/queue", {}, {"command": "x", "snapshot": "a" * 40}, {}, 400, "snapshot_repo"),
    ("a dry run of what is refused", "POST", "/queue", {}, {"command": "x", "gpus": 3, "dry_run": True}, {}, 400, "3 GPUs"),
    ("why of nothing", "GET", "/jobs/xyz/why", {}, None, {}, 404, "xyz"),
    ("no such group to pause", "POST", "/service/pause", {"group": "none"}, None, {}, 404, "none"),
    ("a GPU of a group", "POST", "/gpus/0/pause", {"group": "g"}, None, {}, 400, "'group'"),
    ("an id, which is nexus's to choose", "POST", "/queue", {}, {"command": "x", "id": "xyz"}, {}, 400, "'id' is not a key"),
    ("a short key", "POST", "/queue", {}, {"command": "x"}, {"idempotency-key": "x"}, 400, "Idempotency-Key"),
    ("an unknown parameter", "GET", "/status", {"verbose": "1"}, None, {}, 400, "'verbose'"),
    ("not a status", "GET", "/jobs", {"status": "done"}, None, {}, 400, '"done"'),
    ("not a number", "GET", "/jobs", {"limit": "-1"}, None, {}, 400, "limit"),
    ("not a stream", "GET", "/jobs/abc/logs", {"stream": "stdin"}, None, {}, 400, "stream"),
    ("not a flag", "GET", "/service/logs", {"follow": "maybe"}, None, {}, 400, "follow"),
    ("nothing to look for", "GET", "/jobs/abc/logs", {"grep": ""}, None, {}, 400, "grep"),
    ("two lines", "GET", "/jobs/abc/logs", {"grep": "a\nb"}, None, {}, 400, "grep"),
    ("lines around nothing", "GET", "/jobs/abc/logs", {"context": "2"}, None, {}, 400, "grep"),
    ("too many lines around", "GET", "/jobs/abc/logs", {"grep": "a", "context": "101"}, None, {}, 400, "context"),
    ("not a version", "GET", "/status", {"after": "x"}, None, {}, 400, "after"),
    ("an empty change", "PATCH", "/queue/abc", {}, {}, {}, 400, "priority"),
    ("an unknown change", "PATCH", "/queue/abc", {}, {"unique": True}, {}, 400, "priority"),
    ("a change to more GPUs than there are", "PATCH", "/queue/abc", {}, {"gpus": 9}, {}, 400, "wants 9 GPUs"),
    ("a running job is not changed", "PATCH", "/queue/run", {}, {"gpus": 0}, {}, 409, "running"),
    ("a retry with an unknown change", "POST", "/jobs/retry", {}, {"ids": ["end"], "change": {"unique": True}}, {}, 400, "unique"),
    ("a retry on more GPUs than there are", "POST", "/jobs/retry", {}, {"ids": ["end"], "change": {"gpus": 9}}, {}, 400, "wants 9 GPUs"),
    ("a position in between", "PATCH", "/queue/abc", {}, {"position": 1}, {}, 400, "position"),
    ("nothing there", "GET", "/nothing", {}, None, {}, 404, "/nothing"),
    ("no such job", "GET", "/jobs/xyz", {}, None, {}, 404, "xyz"),
    ("no such job to retry", "POST", "/jobs/retry", {}, {"ids": ["xyz"]}, {}, 404, "xyz"),
    ("no such log", "GET", "/jobs/xyz/logs", {}, None, {}, 404, "xyz"),
    ("no such GPU", "POST", "/gpus/9/pause", {}, None, {}, 404, "9"),
    ("a pending job is not killed", "DELETE", "/jobs/abc", {}, None, {}, 409, "pending"),
    ("a running job is not removed", "DELETE", "/queue/run", {}, None, {}, 409, "running"),
    ("a finished job is not killed", "DELETE", "/jobs/end", {}, None, {}, 409, "completed"),
    ("a running job is not moved", "PATCH", "/queue/run", {}, {"position": 0}, {}, 409, "running"),
    ("a running job is not retried", "POST", "/jobs/retry", {}, {"ids": ["run"]}, {}, 409, "running"),
    ("a body without a type", "POST", "/queue", {}, {"command": "x"}, {"content-type": None}, 415, "application/json"),
    ("a form", "POST", "/queue", {}, b"command=x", {"content-type": "application/x-www-form-urlencoded"}, 415, "urlencoded"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=[case[0] for case in REFUSALS])
def test_what_is_refused_says_why_and_changes_nothing(shared_bench, case):
    reason, method, path, query, body, headers, status, says = case
    before = shared_bench.store.state.seq
    given_status, answer = shared_bench.ask(method, path, body, headers, query)
    assert given_status == status and is_error(answer) and says in answer["message"] + answer["hint"], (reason, answer)
    assert shared_bench.store.state.seq == before and shared_bench.service.failure_count == 0


@pytest.mark.parametrize("path, allowed", [
    ("/status", {"GET"}), ("/queue", {"GET", "POST", "PATCH"}), ("/queue/abc", {"PATCH", "DELETE"}), ("/jobs/abc", {"GET", "DELETE"}),
    ("/jobs/abc/why", {"GET"}), ("/service/stop", {"POST"}), ("/gpus/0/pause", {"POST"})])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "get", "TRACE"])
def test_other_methods_are_405_with_allow(shared_bench, method, path, allowed):
    if method in allowed:
        return
    response = shared_bench.respond(method, path)
    assert response.status == 405 and is_error(json.loads(response.body))
    assert set(response.headers["Allow"].split(", ")) == allowed


def test_a_disk_that_refuses_is_503(bench):
    bench.store.journal.append = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    status, answer = bench.ask("POST", "/queue", {"command": "a"})
    assert (status, answer["error"]) == (503, "unavailable") and "No space left" in answer["message"] and answer["hint"]
    assert bench.commands == [] and bench.ask("GET", "/health")[0] == 503


def test_an_exception_of_ours_is_500_and_counted(bench):
    bench.service.status.describe_service = lambda: 1 / 0
    status, answer = bench.ask("GET", "/")
    assert status == 500 and is_error(answer) and answer["error"] == "internal" and bench.service.failure_count == 1

"""Section 18: routes and who may call them, as a function; then the same through sockets and curl."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from console import Home
from hypothesis import given
from hypothesis import strategies as st
from live import PATIENCE_S, free_port, listener, until
from makers import config as make_config

import nexus

TOKEN = "secret-token-of-the-owner"
OWNER = os.geteuid()


# Without a socket: a Service that does not run, so that jobs change only where a test changes them


class Bench:
    """An Api over a Service that is not run."""

    def __init__(self, **keys):
        self.folder = tempfile.mkdtemp(prefix="nx", dir="/tmp")
        self.config = make_config(**{"mock_gpus": 2, "launcher": "direct", **keys})
        self.layout = nexus.make_layout(self.folder, self.config)
        nexus.make_folder(nexus.DISK, self.layout.log_dir)
        clock, disk, log = nexus.Clock(), nexus.Disk(), logging.getLogger(f"test-{os.path.basename(self.folder)}")
        log.propagate = False
        self.lines = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        log.handlers = [handler]
        log.setLevel("INFO")
        self.store = nexus.Store(self.layout, clock, disk, log)
        self.store.recover()
        machine = nexus.Machine(self.config, self.layout, disk, self.store.service_id)
        self.service = nexus.Service(self.config, self.layout, self.store, machine, clock, disk, log,
                                     {"HOME": "/root", "SERVICE": "1"})
        self.service.probe()
        self.service.gpu_watch.take_in_observation()
        self.api = nexus.Api(self.service, TOKEN)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder)
        self.service.wake = bool                # nobody listens any more
        os.close(self.service.events.source)

    def ask(self, method, path, body=None, headers=None, query=None, uid=OWNER, peer="127.0.0.1"):
        """(status, the answer's JSON or bytes)."""
        response = self.respond(method, path, body, headers, query, uid, peer)
        content = response.body + b"".join(response.stream or ())
        if response.content_type == "application/json" and content:
            return response.status, json.loads(content)
        return response.status, content

    def respond(self, method, path, body=None, headers=None, query=None, uid=OWNER, peer="127.0.0.1"):
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {"host": "127.0.0.1:6234", **({} if body is None else {"content-type": "application/json"}), **(headers or {})}
        query = {key: [given] for key, given in (query or {}).items()}
        return self.api.handle(nexus.Request(
            method, path, query, {name: text for name, text in headers.items() if text is not None},
            lambda: content, peer, uid, len(content)))

    def get(self, path, query=None, headers=None):
        return self.respond("GET", path, None, headers, query)

    def make_bearer(self, user):
        nexus.change_tokens(nexus.DISK, self.layout.tokens_file, lambda tokens: nexus.add_token(
            tokens, user, f"secret-of-{user}", None, time.time()))
        return {"authorization": f"Bearer secret-of-{user}"}

    def add(self, id=None, **job):
        """`id`: the one that nexus is to choose."""
        if id:
            self.service.clock.new_job_id = lambda taken: id
        status, answer = self.ask("POST", "/queue", {"command": "true", **job})
        vars(self.service.clock).pop("new_job_id", None)
        assert status == 200, answer
        return answer["id"]

    def become(self, job_id, status, **facts):
        """Have a pending job run, or end."""
        def change(state):
            job = state.jobs[job_id]
            if job.status == "pending" and status != "cancelled":
                begun = nexus.begin_attempt(job, started_at=time.time())
                yield nexus.change_status(begun, "running", time.time(), **facts)
            if status != "running":
                yield nexus.end_one(state.jobs[job_id], status, time.time(), **facts)
        self.store.update(change)

    def decide(self):
        """What the loop would decide now; nothing is started."""
        self.service.plan = nexus.plan(self.store.state, self.service.gpu_watch.see_gpus(self.store.state), None, self.config, time.time())

    @property
    def commands(self):
        return [job["command"] for job in self.ask("GET", "/queue")[1]]


@pytest.fixture
def bench():
    with Bench() as made:
        yield made


def test_a_job_in_slurms_queue_is_pending_for_all_who_ask():
    """Each GET, each choice by status, what a change answers and how it is refused: `submitted` never leaves nexus."""
    with Bench(launcher="slurm") as bench:
        ids = [bench.add(name=name, group="g") for name in ("one", "two")]

        def submit(state):
            for number, job in enumerate(list(state.jobs.values())):
                yield nexus.change_status(nexus.begin_attempt(job, slurm_key=f"k{number}", slurm_id=f"7{number}"), "submitted", time.time())

        bench.store.update(submit)
        bench.service.take_in(bench.service.cluster, ())
        answers = {route.pattern: bench.respond("GET", route.pattern.replace("{id}", ids[0])) for route in nexus.ROUTES
                   if route.method == "GET" and "{" not in route.pattern.replace("{id}", "")}
        told = {path: (answer.body + b"".join(answer.stream or ())).decode() for path, answer in answers.items()}
        told["changes"] = json.dumps(bench.ask("GET", "/status", query={"after": "0"})[1])
        read = {path: json.loads(text) for path, text in told.items() if text.startswith(("{", "["))}
        assert [job["id"] for job in read["/queue"]] == [job["id"] for job in read["/jobs"]] == ids
        assert {job["status"] for job in read["/jobs"]} == {read["/jobs/{id}"]["status"], read["/jobs/{id}/why"]["status"]} == {"pending"}
        assert [status for status, _ in read["/jobs/{id}"]["status_history"]] == ["pending"]
        assert (read["/jobs/{id}"]["position"], read["/jobs/{id}"]["slurm_id"], read["/jobs/{id}"]["attempt"]) == (0, "70", 1)
        assert read["/status"]["queued_jobs"] == read["/status"]["slurm"]["handed_jobs"] == 2
        assert 'nexus_jobs{status="pending"} 2\n' in told["/metrics"]
        assert read["changes"]["counts"]["pending"] == 2 and read["changes"]["waiting"] == ["group:g"]
        assert [(group["pending"], group["position"]) for group in read["/groups"]] == [(2, 0)]
        for status, found in (("pending", ids), ("running", [])):
            for path in ("/jobs", "/status"):
                query = {"status": status, **({"after": "0"} if path == "/status" else {})}
                answer = bench.ask("GET", path, query=query)[1]
                assert (answer["waiting"] if path == "/status" else [job["id"] for job in answer]) == found
        refused = [bench.ask("POST", f"/jobs/{what}", {"ids": ids, **choice}) for what, choice in (
            ("cancel", {"status": ["running"]}), ("clear", {}), ("retry", {}))]
        assert all(status == 409 and "is pending" in answer["message"] for status, answer in refused)
        assert bench.ask("GET", "/jobs", query={"status": "submitted"})[0] == 400
        told["known"] = json.dumps(bench.ask("POST", "/queue", {"command": "true", "unique": True})[1])
        assert json.loads(told["known"])["known"] == ids[1:]
        told["changed"] = json.dumps(bench.ask("PATCH", "/queue/one", {"name": "uno"}))
        told["ended"] = json.dumps(bench.ask("POST", "/jobs/cancel", {"ids": ids, "status": ["pending"]}))
        told["api"] = json.dumps(bench.ask("GET", f"/api/results/{ids[0]}"))
        assert not [where for where, text in told.items() if '"submitted"' in text]


def is_error(answer):
    return (isinstance(answer, dict) and answer.keys() == {"error", "message", "hint"} and answer["error"] in nexus.KINDS
            and all(isinstance(text, str) for text in answer.values()) and bool(answer["message"]))


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


@pytest.fixture(scope="module")
def shared_bench():
    with Bench() as made:
        for job_id in ("abc", "run", "end"):
            made.add(id=job_id)
        made.become("run", "running", pid=1)
        made.become("end", "completed", exit_code=0)
        yield made


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


# Who may call

FOREIGN_ORIGIN, OWN_ORIGIN = {"origin": "http://evil.example"}, {"origin": "http://127.0.0.1:6234"}
BEARER, WRONG = {"authorization": f"Bearer {TOKEN}"}, {"authorization": "Bearer secret-token-of-the-ownes"}
LOOPBACK, PUBLIC = {}, {"host": "0.0.0.0"}
NAMED = {"allowed_hosts": ["gpu.example.org", "GPU2.example.org"]}
CALLERS = [  # reason, config, headers, uid, peer, status
    ("the owner", LOOPBACK, {}, OWNER, "127.0.0.1", 200),
    ("the owner over IPv6", LOOPBACK, {"host": "[::1]:6234"}, OWNER, "::1", 200),
    ("another user", LOOPBACK, {}, OWNER + 1, "127.0.0.1", 401),
    ("root, or a socket that is closed and reads as uid 0", LOOPBACK, {}, 0 if OWNER else 4242, "127.0.0.1", 401),
    ("a socket that is not found", LOOPBACK, {}, None, "127.0.0.1", 401),
    ("another machine, whose port is one of ours too", LOOPBACK, {}, OWNER, "192.0.2.7", 401),
    ("another user with the token", LOOPBACK, BEARER, OWNER + 1, "127.0.0.1", 200),
    ("another machine with the token", LOOPBACK, BEARER, None, "192.0.2.7", 200),
    ("a wrong token", LOOPBACK, WRONG, OWNER + 1, "127.0.0.1", 401),
    ("a wrong token, though it is the owner", LOOPBACK, WRONG, OWNER, "127.0.0.1", 401),
    ("another scheme", LOOPBACK, {"authorization": f"Basic {TOKEN}"}, OWNER, "127.0.0.1", 401),
    ("a token that is not ASCII", LOOPBACK, {"authorization": "Bearer t\xf6ken"}, OWNER, "127.0.0.1", 401),
    ("forwarded", LOOPBACK, {"forwarded": "for=192.0.2.7"}, OWNER, "127.0.0.1", 401),
    ("via a proxy", LOOPBACK, {"via": "1.1 proxy"}, OWNER, "127.0.0.1", 401),
    ("x-forwarded-anything", LOOPBACK, {"x-forwarded-proto": "https"}, OWNER, "127.0.0.1", 401),
    ("forwarded, with the token", LOOPBACK, {"x-forwarded-for": "192.0.2.7", **BEARER}, OWNER, "127.0.0.1", 200),
    ("localhost", LOOPBACK, {"host": "localhost:6234"}, OWNER, "127.0.0.1", 200),
    ("another port, as of ssh -L", LOOPBACK, {"host": "localhost:9999"}, OWNER, "127.0.0.1", 200),
    ("no Host", LOOPBACK, {"host": None}, OWNER, "127.0.0.1", 403),
    ("a Host of another site (DNS rebinding)", LOOPBACK, {"host": "evil.example:6234"}, OWNER, "127.0.0.1", 403),
    ("a Host that begins like ours", LOOPBACK, {"host": "localhost.evil.example"}, OWNER, "127.0.0.1", 403),
    ("a Host that ends like ours", LOOPBACK, {"host": "evil.example#localhost"}, OWNER, "127.0.0.1", 403),
    ("a Host with a user", LOOPBACK, {"host": "localhost@evil.example"}, OWNER, "127.0.0.1", 403),
    ("a bare IPv6 address", LOOPBACK, {"host": "::1"}, OWNER, "127.0.0.1", 403),
    ("another address of this machine", LOOPBACK, {"host": "192.0.2.1:6234"}, OWNER, "127.0.0.1", 403),
    ("another address, with the token", LOOPBACK, {"host": "192.0.2.1:6234", **BEARER}, OWNER, "127.0.0.1", 403),
    ("an allowed Host without a token", NAMED, {"host": "gpu.example.org"}, OWNER, "127.0.0.1", 401),
    ("an allowed Host with the token", NAMED, {"host": "gpu.example.org:443", **BEARER}, None, "127.0.0.1", 200),
    ("an allowed Host in other letters", NAMED, {"host": "gpu2.Example.ORG", **BEARER}, None, "127.0.0.1", 200),
    ("one that is not allowed, with the token", NAMED, {"host": "www.example.org", **BEARER}, None, "127.0.0.1", 403),
    ("its own Origin", LOOPBACK, OWN_ORIGIN, OWNER, "127.0.0.1", 200),
    ("its own Origin behind TLS", LOOPBACK, {"origin": "https://127.0.0.1:6234"}, OWNER, "127.0.0.1", 200),
    ("another site's Origin", LOOPBACK, FOREIGN_ORIGIN, OWNER, "127.0.0.1", 403),
    ("another site's Origin, with the token", LOOPBACK, {**FOREIGN_ORIGIN, **BEARER}, OWNER, "127.0.0.1", 403),
    ("a file's Origin", LOOPBACK, {"origin": "null"}, OWNER, "127.0.0.1", 403),
    ("another port's Origin", LOOPBACK, {"origin": "http://127.0.0.1:8888"}, OWNER, "127.0.0.1", 403),
    ("listening everywhere: the owner too needs a token", PUBLIC, {}, OWNER, "127.0.0.1", 401),
    ("listening everywhere: with the token", PUBLIC, BEARER, OWNER, "127.0.0.1", 200),
    ("listening everywhere: by address, with the token", PUBLIC, {"host": "192.0.2.1:6234", **BEARER}, None, "192.0.2.7", 200),
    ("listening everywhere: by address, without", PUBLIC, {"host": "192.0.2.1:6234"}, None, "192.0.2.7", 401),
    ("listening everywhere: by name, with the token", PUBLIC, {"host": "evil.example", **BEARER}, None, "192.0.2.7", 403),
    ("listening by a name: by it, with the token", {"host": "gpu1"}, {"host": "gpu1:6234", **BEARER}, None, "192.0.2.7", 200),
    ("listening by a name: by it, without", {"host": "gpu1"}, {"host": "gpu1:6234"}, OWNER, "127.0.0.1", 401),
]


@pytest.mark.parametrize("case", CALLERS, ids=[case[0] for case in CALLERS])
@pytest.mark.parametrize("method, path", [("GET", "/"), ("POST", "/service/pause")])
def test_who_may_call(case, method, path):
    reason, keys, headers, uid, peer, status = case
    with Bench(**keys) as bench:
        response = bench.respond(method, path, None, headers, None, uid, peer)
        assert response.status == (204 if status == 200 and method == "POST" else status), (reason, response.body)
        assert bench.store.state.paused == (status == 200 and method == "POST")
        if status != 200:
            assert is_error(json.loads(response.body))
            assert any(line.startswith(f"Refused {method} {path} from {peer}") for line in bench.lines), "each refusal is in the log"
        if status == 401:
            assert response.headers["WWW-Authenticate"] == "Bearer"
        assert not any(TOKEN in line for line in bench.lines)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "FOO"])
def test_host_is_checked_on_every_method_and_path(shared_bench, method):
    for path in ("/", "/status", "/nothing"):
        assert shared_bench.ask(method, path, None, {"host": "evil.example"})[0] == 403


# What the routes answer


def test_info_and_status(bench):
    assert bench.ask("GET", "/")[1]["name"] == "nexus"
    status, answer = bench.ask("GET", "/status")
    assert status == 200 and (answer["is_paused"], answer["queued_jobs"], answer["completed_jobs"]) == (False, 0, 0)
    first = answer["gpu_status"][0]
    assert (first["index"], first["name"], first["memory_total"], first["memory_used"], first["job_id"], first["job_ids"]) == (
        0, "Mock GPU", "24GB", "0GB", None, [])


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


def merge(document, patch):
    """RFC 7396"""
    if not isinstance(patch, dict):
        return patch
    merged = {**document} if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def test_news_are_waited_for(bench):
    def ask(version):
        return bench.get("/status", {"after": str(version)}).stream

    document = merge({}, json.loads(b"".join(ask(0))))
    version = document["state_version"]
    assert document.pop("is_whole")
    changes = [lambda: bench.add(id="abc"), lambda: bench.ask("PATCH", "/queue/abc", {"name": "x"}),
               lambda: bench.ask("POST", "/service/pause"), lambda: bench.ask("POST", "/gpus/0/pause"),
               lambda: bench.become("abc", "running"), lambda: bench.become("abc", "failed"),
               lambda: bench.ask("POST", "/jobs/clear", {"ids": ["abc"]})]
    for change in changes:
        answer = ask(version)
        assert next(answer) == next(answer) == b"", "whoever waits may go"
        change()
        news = json.loads(b"".join(answer))
        assert news["state_version"] > version and not news.pop("is_whole")
        version, document = news["state_version"], merge(document, news)
    for other in (0, 10**18 - 1):               # of an earlier service, perhaps with another clock
        whole = json.loads(next(ask(other)))
        assert whole.pop("is_whole") and whole["state_version"] == version and merge({}, whole) == document
    assert document["is_paused"] and document["gpus"]["0"]["is_paused"] and not document["jobs"]
    bench.service.clock.monotonic = (number / 10 for number in range(10**6)).__next__
    *silence, last = ask(version)
    assert silence and not any(silence) and json.loads(last)["state_version"] == version, "after 15 s in any case"


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


def test_only_finished_jobs_are_cleared_all_or_none(bench):
    over, waits = bench.add(gpus=0), bench.add(gpus=0)
    bench.become(over, "completed", exit_code=0)
    assert bench.ask("POST", "/jobs/clear", {"ids": [over, waits]})[0] == 409
    assert bench.ask("POST", "/jobs/clear", {"status": ["running"]})[0] == bench.ask("POST", "/jobs/clear", {})[0] == 400
    assert bench.ask("POST", "/jobs/clear", {"ids": ["zzz"]})[0] == bench.ask("POST", "/jobs/clear", {"group": "x"})[0] == 404
    assert len(bench.ask("GET", "/jobs")[1]) == 2


def test_only_a_job_that_wants_a_gpu_is_said_to_wait_for_them():
    with Bench(default_gpus=0) as bench:
        watch = bench.service.gpu_watch
        watch.observer.observation = nexus.replace(watch.observer.observation, error="nvidia-smi is silent", gpus=())
        assert "warning" not in bench.ask("POST", "/queue", {"command": "a"})[1]
        assert bench.ask("POST", "/queue", {"command": "b", "gpus": 1})[1]["warning"] == "it waits: nvidia-smi is silent"


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


# The log


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_service_log_is_rotated_in_its_format(tmp_path, log_format):
    config = make_config(log_format=log_format, log_backups=2)
    layout = nexus.make_layout(str(tmp_path), config)
    log = nexus.make_log(layout, nexus.replace(config.service, log_max_mb=0.001))
    for _ in range(50):
        log.info("Started job %s", "x" * 100, extra={"job_id": "abc"})
    log.handlers[0].close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["service.log", "service.log.1", "service.log.2"]
    for path in tmp_path.iterdir():
        assert 0 < path.stat().st_size <= 1048
        for line in path.read_text().splitlines():
            if log_format == "json":
                assert json.loads(line)["job_id"] == "abc"
            else:
                assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] Started job x{100}", line)


def test_who_changed_something_is_in_the_log(bench):
    job_id = bench.add(command="python train.py\n\x1b[2J")
    bench.ask("POST", "/service/pause", None, BEARER, None, None, "192.0.2.7")
    bench.ask("DELETE", f"/queue/{job_id}")
    log = "\n".join(bench.lines)
    user = bench.service.user
    assert f"Job {job_id} added by {user}: python train.py" in log and "\x1b" not in log
    assert f"Queue paused by {user} (token, 192.0.2.7)" in log and f"Job {job_id}: stopped by {user}" in log


def test_a_disk_that_refuses_is_503(bench):
    bench.store.journal.append = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    status, answer = bench.ask("POST", "/queue", {"command": "a"})
    assert (status, answer["error"]) == (503, "unavailable") and "No space left" in answer["message"] and answer["hint"]
    assert bench.commands == [] and bench.ask("GET", "/health")[0] == 503


LOG_TIMES = [  # out, err as they grow: (which, bytes); the end of each step is noted
    ("in turns", [(0, b"a\n"), (1, b"b\n"), (0, b"c\n"), (1, b"d\n")], b"a\nb\nc\nd\n"),
    ("a line comes in two parts", [(0, b"a"), (1, b"b\n"), (0, b"a\n"), (1, b"d")], b"b\naa\nd"),
    ("a progress bar", [(1, b"\r10%"), (0, b"x\n"), (1, b"\r20%"), (0, b"y\n"), (1, b"\r30%\n")], b"\rx\n10%\ry\n20%\r30%\n"),
]


@pytest.mark.parametrize("reason, steps, expected", LOG_TIMES, ids=[row[0] for row in LOG_TIMES])
def test_both_streams_come_in_order(bench, reason, steps, expected):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    watch, now = bench.service.log_watch, 1e9
    watch.look()
    bench.service.clock.now = lambda: now
    path = f"/jobs/{job_id}/logs"
    followed = bench.get(path, {"follow": "true"}).stream
    live = b""
    for stream, piece in steps:
        with open(os.path.join(folder, ("stdout.log", "stderr.log")[stream]), "ab") as file:
            file.write(piece)
        now += 0.5
        watch.look()
        live += next(followed)
        now += 0.5
    bench.become(job_id, "completed", exit_code=0)
    assert watch.look() is None, "nobody runs, so nobody is watched"
    assert live + b"".join(followed) == b"".join(piece for _, piece in steps) or reason != "in turns"
    assert bench.ask("GET", path) == (200, expected)
    assert bench.ask("GET", path, query={"tail": "2"})[1] == b"".join(expected.splitlines(True)[-2:]) or reason != "in turns"
    entries = list(map(json.loads, b"".join(bench.get(path, headers={"accept": nexus.NDJSON}).stream).splitlines()))
    for name in ("stdout", "stderr"):
        own = [entry for entry in entries if entry["stream"] == name]
        with open(os.path.join(folder, f"{name}.log"), encoding="utf-8", newline="") as file:
            assert "".join(entry["text"] for entry in own) == file.read() and own[-1]["end"] == file.tell()
    if reason == "in turns":
        assert [entry["at"][-5:] for entry in entries] == ["40.5Z", "41.5Z", "42.5Z", "43.5Z"]
        assert bench.ask("GET", path, query={"timestamps": "true", "tail": "1"})[1] == b"2001-09-09T01:46:43.5Z d\n"
        os.unlink(os.path.join(folder, nexus.LOG_TIMES))
        assert bench.ask("GET", path)[1] == b"a\nc\nb\nd\n", "without the notes all is there"
        with open(os.path.join(folder, "stdout.log"), "ab") as file:
            file.write(b"x" * 200000 + b"\n")
        body = bench.ask("GET", path, query={"timestamps": "true", "stream": "stdout", "tail": "1"})[1]
        assert re.fullmatch(rb"- +x{200000}\n", body), "a long line has one time"


def test_lines_have_their_times_also_after_the_clock_was_set_back(bench):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    clock, watch = bench.service.clock, bench.service.log_watch
    for number in range(8):
        clock.now, clock.monotonic = (lambda number=number: 1e9 + number - 3600 * (number > 2)), lambda number=number: 50.0 + number
        with open(os.path.join(folder, "stdout.log"), "a", encoding="ascii") as file:
            file.write(f"{number}\n")
        watch.look()
    bench.become(job_id, "completed", exit_code=0)
    watch.look()
    lines = bench.ask("GET", f"/jobs/{job_id}/logs", query={"timestamps": "true"})[1].decode().splitlines()
    assert lines == [f"2001-09-09T0{1 - (number > 2)}:46:{40 + number}.0Z {number}" for number in range(8)]


def make_huge(path):
    with open(path, "wb") as file:
        file.truncate(2**28)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_huge, lambda path: os.symlink("/dev/zero", path)],
                         ids=["a pipe", "a folder", "zeros", "a link"])
def test_what_a_job_leaves_in_the_place_of_its_log_times(bench, make):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    os.mkdir(folder)
    make(os.path.join(folder, nexus.LOG_TIMES))
    bench.become(job_id, "running", log_dir=folder)
    watch = bench.service.log_watch
    for name in ("stdout.log", "stderr.log"):
        watch.look()
        with open(os.path.join(folder, name), "w", encoding="ascii") as file:
            file.write(f"{name}\n" * 3)
    watch.look()
    began = time.process_time()
    assert bench.ask("GET", f"/jobs/{job_id}/logs", query={"tail": "5"})[1] == b"stdout.log\n" * 2 + b"stderr.log\n" * 3
    watch.end()
    assert time.process_time() - began < 5


def test_an_exception_of_ours_is_500_and_counted(bench):
    bench.service.answers.info = lambda: 1 / 0
    status, answer = bench.ask("GET", "/")
    assert status == 500 and is_error(answer) and answer["error"] == "internal" and bench.service.failure_count == 1


def test_logs(bench):
    job_id = bench.add()
    assert bench.ask("GET", f"/jobs/{job_id}/logs") == (200, b""), "nothing yet"
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    for name, content in (("stdout.log", b"a\nb\xff\nc"), ("stderr.log", b"x\ny\n")):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    for query, expected in [({}, b"a\nb\xff\nx\ny\nc"), ({"stream": "stdout"}, b"a\nb\xff\nc"), ({"stream": "stderr"}, b"x\ny\n"),
                            ({"tail": "1"}, b"c"), ({"tail": "2"}, b"y\nc"), ({"tail": "3"}, b"x\ny\nc"),
                            ({"offset": "2,2"}, b"b\xff\ny\nc"),
                            ({"tail": "2", "stream": "stderr"}, b"x\ny\n"), ({"tail": "0"}, b""),
                            ({"tail": "99", "stream": "stdout"}, b"a\nb\xff\nc")]:
        assert bench.ask("GET", f"/jobs/{job_id}/logs", query=query) == (200, expected), query
    for query, start, expected in [({"offset": "2"}, 2, b"b\xff\nc"), ({"offset": "6"}, 6, b""), ({"offset": "7"}, 0, b"a\nb\xff\nc"),
                                   ({"tail": "2"}, 2, b"b\xff\nc"), ({}, 0, b"a\nb\xff\nc")]:
        response = bench.respond("GET", f"/jobs/{job_id}/logs", query={"stream": "stdout", **query})
        assert (response.headers["Log-Offset"], b"".join(response.stream)) == (str(start), expected), query
    both = bench.respond("GET", f"/jobs/{job_id}/logs", query={"offset": "1", "tail": "2"})
    assert (both.headers["Log-Offset"], b"".join(both.stream)) == ("5,2", b"y\nc"), "what begins later counts"
    both = bench.respond("GET", f"/jobs/{job_id}/logs", query={"offset": "3", "tail": "9"})
    assert (both.headers["Log-Offset"], b"".join(both.stream)) == ("3,3", b"\xff\n\nc"), "what begins later counts"
    bench.become(job_id, "failed", exit_code=1)
    assert bench.ask("GET", f"/jobs/{job_id}/logs", query={"follow": "true"}) == (200, b"a\nb\xff\nx\ny\nc"), "it ends"
    assert bench.ask("GET", f"/jobs/{job_id}/logs", query={"follow": "true", "offset": "5"}) == (200, b"x\ny\nc")


def make_logs(bench, out, err=b"", status="running"):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    for name, content in (("stdout.log", out), ("stderr.log", err)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    if status != "running":
        bench.become(job_id, status, exit_code=0)
    return job_id, f"/jobs/{job_id}/logs"


GREPS = [  # query, what is found
    ({"grep": "loss"}, b"Loss 1\n30% loss 2\nloss 3\n"), ({"grep": "Loss"}, b"Loss 1\n"), ({"grep": "los."}, b""),
    ({"grep": "30%"}, b"30% loss 2\n"),
    ({"grep": "20%"}, b""), ({"grep": "loss", "stream": "stderr"}, b"loss 3\n"), ({"grep": "loss 3"}, b"loss 3\n"),
    ({"grep": "a", "context": "1"}, b"Loss 1\na\nb\n--\nc\nd a\ne\n"), ({"grep": "a", "context": "0"}, b"a\nd a\n"),
    ({"grep": "a", "offset": "9,0"}, b"d a\n"), ({"grep": "loss", "tail": "2"}, b"loss 3\n"),
    ({"grep": "loss 3", "timestamps": "true"}, b"-                      loss 3\n"), ({"grep": "c", "follow": "true"}, b"c\n"),
]


@pytest.mark.parametrize("query, found", GREPS, ids=[str(row[0]) for row in GREPS])
def test_logs_are_searched(bench, query, found):
    _, path = make_logs(bench, b"Loss 1\na\nb\nb\nc\nd a\ne\n 10%\r20%\r30% loss 2\n", b"x\nloss 3", "completed")
    assert bench.ask("GET", path, query=query) == (200, found)
    entries = map(json.loads, b"".join(bench.respond("GET", path, None, {"accept": nexus.NDJSON}, query).stream).splitlines())
    texts = ["--\n" * ("is_after_gap" in entry) + entry["text"] for entry in entries]
    assert "timestamps" in query or "".join(texts).encode() == found


def test_a_search_in_a_large_log_goes_on_where_the_last_reply_ended(bench, monkeypatch):
    """Each reply looks through so many bytes, in small steps, each of which looks whether the caller is still there."""
    monkeypatch.setattr(nexus, "MAX_SEARCH_BYTES", 10**6)
    lines = [b"line %d%s\n" % (number, b" needle" * (number % 10000 == 0)) for number in range(200000)]
    _, path = make_logs(bench, b"".join(lines), b"needle\n" * 3)
    query, found, replies = {"grep": "needle"}, b"", 0
    while query:
        response = bench.respond("GET", path, query=query)
        pieces = list(response.stream)
        assert (len(pieces) > 6 or "Log-Next" not in response.headers) and max(map(len, pieces)) < 2000, "small steps"
        found, replies = found + b"".join(pieces), replies + 1
        query = {"grep": "needle", "offset": response.headers["Log-Next"]} if "Log-Next" in response.headers else None
    assert sorted(found.splitlines(True)) == sorted([line for line in lines if b"needle" in line] + [b"needle\n"] * 3) and replies == 3
    followed = bench.respond("GET", path, query={"grep": "needle", "follow": "true"})
    assert followed.headers["Log-Next"] and b"".join(followed.stream).count(b"needle") > 3, "the next one follows"


def test_what_is_found_later_is_followed(bench):
    job_id, path = make_logs(bench, b"a 1\nb\na")
    stream = bench.respond("GET", path, query={"grep": "a", "follow": "true"}).stream
    assert next(stream) == b"a 1\n"
    with open(os.path.join(bench.layout.log_dir, f"job_{job_id}", "stdout.log"), "ab") as file:
        file.write(b" 2\nb\na 3")
    until(lambda: next(stream) == b"a 2\n")
    bench.become(job_id, "completed", exit_code=0)
    assert b"".join(stream) == b"a 3\n"


def test_two_searches_at_once_and_a_third_is_told_to_wait(bench):
    _, path = make_logs(bench, b"x\n" * 10**6)
    query = {"grep": "needle", "follow": "true"}
    first, second = [bench.respond("GET", path, query=query) for _ in range(2)]
    for again in (query, {"grep": "x"}):
        status, answer = bench.ask("GET", path, query=again)
        assert (status, answer["error"]) == (503, "unavailable") and "2 searches" in answer["message"] and answer["hint"]
    assert bench.ask("GET", path, query={"tail": "1"}) == (200, b"x\n"), "logs are shown as ever"
    first.after()                                   # its caller has gone: the connection's end calls that
    assert bench.ask("GET", path, query={"grep": "y"}) == (200, b"")
    third = bench.respond("GET", path, query=query)
    assert bench.ask("GET", path, query=query)[0] == 503
    until(lambda: next(second.stream) == b"" and len(bench.api.searches) == 1, "its turn is over when it has seen what was there")
    third.after()


# /api: a script by form

FORM_TYPE = {"content-type": "multipart/form-data; boundary=B"}
MINE = 'token: "my-secret-token"\n'
ME = nexus.find_user(OWNER)


def make_form(config=MINE, code=b"print()\n"):
    return b"".join(f'--B\r\nContent-Disposition: form-data; name="{name}"; filename="../../x"\r\n\r\n'.encode() + content + b"\r\n"
                    for name, content in (("code", code), ("config_file", config.encode()))) + b"--B--\r\n"


def add_tokens(bench):
    """myuser's, and two of hers that are over."""
    def change(tokens):
        tokens = nexus.add_token(tokens, "myuser", "my-secret-token", None, 1e9)
        tokens = nexus.add_token(tokens, "myuser", "my-expired-token", 1.1e9, 1e9)
        return nexus.revoke_tokens(nexus.add_token(tokens, "myuser", "my-revoked-token", None, 1e9), "my-revoked-token")
    nexus.change_tokens(nexus.DISK, bench.layout.tokens_file, change)


def submit(bench, config=MINE, code=b"print()\n", headers=None, uid=OWNER + 1, peer="127.0.0.1"):
    return bench.ask("POST", "/api/submit", make_form(config, code), {**FORM_TYPE, **(headers or {})}, uid=uid, peer=peer)


def kept_code(bench):
    folder = bench.layout.code_folder
    return sorted(os.listdir(folder)) if os.path.exists(folder) else []


@pytest.fixture
def lab():
    """A Bench that myuser has a token for."""
    with Bench(allowed_hosts=["gpu.example.org"], queue_limit=3) as made:
        add_tokens(made)
        yield made


MY_BEARER = {"authorization": "Bearer my-secret-token"}
FORWARDED = {"x-forwarded-for": "192.0.2.7"}
SUBMITTERS = [  # reason, config_file, headers, uid, status, whose job it is (or a word of the refusal)
    ("another user of the machine, by her token", MINE, {}, OWNER + 1, 200, "myuser"),
    ("she says who she is", MINE + "user_id: myuser", {}, OWNER + 1, 200, "myuser"),
    ("she says that she is another", MINE + "user_id: bob", {}, OWNER + 1, 403, "bob"),
    ("no token", "user_id: myuser", {}, OWNER + 1, 401, "this machine"),
    ("a wrong token", "token: my-secret-tokem", {}, OWNER + 1, 401, "not right"),
    ("a wrong token, though it is the owner", "token: my-secret-tokem", {}, OWNER, 401, "not right"),
    ("an expired token", "token: my-expired-token", {}, OWNER + 1, 401, "not right"),
    ("the owner", "name: x", {}, OWNER, 200, ME),
    ("the owner, for another", "user_id: bob", {}, OWNER, 200, "bob"),
    ("the owner's token", f"token: {TOKEN}\nuser_id: bob", {}, OWNER + 1, 200, "bob"),
    ("her token in the header", "name: x", MY_BEARER, OWNER + 1, 200, "myuser"),
    ("the owner's in the header, hers in the file", MINE, BEARER, OWNER + 1, 200, "myuser"),
    ("a wrong one in the header", MINE, WRONG, OWNER + 1, 200, "myuser"),
    ("through a proxy", MINE, FORWARDED, OWNER, 200, "myuser"),
    ("through a proxy, without a token", "name: x", FORWARDED, OWNER, 401, "forwarded"),
    ("through a tunnel", MINE, {"host": "gpu.example.org"}, None, 200, "myuser"),
    ("through another tunnel", MINE, {"host": "evil.example"}, OWNER, 403, "evil.example"),
    ("another site's page", MINE, {"origin": "http://evil.example"}, OWNER, 403, "Origin"),
]


@pytest.mark.parametrize("reason, config, headers, uid, status, word", SUBMITTERS, ids=[case[0] for case in SUBMITTERS])
def test_who_may_submit_a_script(lab, reason, config, headers, uid, status, word):
    given, answer = submit(lab, config, headers=headers, uid=uid)
    assert given == status, answer
    if status == 200:
        assert answer == {"job_id": answer["job_id"], "node_id": 0, "status": "pending", "queue_position": 0}
        assert lab.ask("GET", f"/jobs/{answer['job_id']}")[1]["user"] == word and len(kept_code(lab)) == 1
        assert f"added by {'myuser (token' if word == 'myuser' else ME}" in lab.lines[-1]
    else:
        assert is_error(answer) and word in answer["message"] and kept_code(lab) == [] and lab.commands == []
        named = "myuser (token, " if word == "bob" else ""
        assert f"Refused POST /api/submit from {named}" in lab.lines[-1] and "my-" not in lab.lines[-1] + answer["message"] + answer["hint"]


FORM_REFUSALS = [  # reason, body, headers, status, words
    ("JSON", b"{}", {"content-type": "application/json"}, 415, "multipart/form-data"),
    ("nothing", b"", {"content-type": None}, 415, "nothing"),
    ("no boundary", make_form(), {"content-type": "multipart/form-data"}, 400, "boundary"),
    ("no form", b"hello", {}, 400, "begin"),
    ("no code", make_form().replace(b'name="code"', b'name="name"'), {}, 400, "fields code and config_file"),
    ("empty code", make_form(code=b""), {}, 400, "code is empty"),
    ("too large a script", make_form(code=b"x" * (5 * 2**20 + 1)), {}, 413, "code"),
    ("too large a form", b"x" * (10 * 2**20 + 1), {}, 413, "10485760"),
    ("nested YAML", make_form(MINE + "gpus: [1]"), {}, 400, "config_file: gpus"),
    ("an unknown key", make_form(MINE + "expectedtime: 1"), {}, 400, "config_file: 'expectedtime'"),
    ("more GPUs than there are", make_form(MINE + "gpus: 3"), {}, 400, "3 GPUs"),
    ("a bad key", make_form(), {"idempotency-key": "x"}, 400, "Idempotency-Key"),
]


@pytest.mark.parametrize("reason, body, headers, status, words", FORM_REFUSALS, ids=[case[0] for case in FORM_REFUSALS])
def test_forms_are_refused(lab, reason, body, headers, status, words):
    given, answer = lab.ask("POST", "/api/submit", body, {**FORM_TYPE, **headers}, uid=OWNER + 1)
    assert given == status and is_error(answer) and words in answer["message"], answer
    assert kept_code(lab) == [] and lab.commands == []


def write_script(lab, job):
    lab.service.job_host.write_script(lab.service.starter.make_order(job, {}))


def test_a_submitted_script(lab):
    code = b"\xff\xfe\r\n\0\r--B\n"
    job_id = submit(lab, "gpus: 0.5\npriority: low\nname: x\n" + MINE, code)[1]["job_id"]
    job = lab.ask("GET", f"/jobs/{job_id}")[1]
    assert (job["user"], job["gpus"], job["priority"], job["name"]) == ("myuser", 0.5, 2, "x")
    with open(lab.layout.code_file(lab.store.state.jobs[job_id].code), "rb") as file:
        assert file.read() == code
    assert os.stat(file.name).st_mode & 0o777 == 0o600 and os.stat(lab.layout.code_folder).st_mode & 0o777 == 0o700
    lab.become(job_id, "running", log_dir=lab.layout.job_folder(job_id))
    write_script(lab, lab.store.state.jobs[job_id])
    main = os.path.join(job["cwd"], "main.py")
    os.unlink(main)
    os.symlink("/etc/passwd", main)                             # what the first attempt made of it
    write_script(lab, nexus.begin_attempt(lab.store.state.jobs[job_id]))
    with open(main, "rb") as file:
        assert file.read() == code and not os.path.islink(main)
    os.unlink(os.path.join(lab.layout.code_folder, kept_code(lab)[0]))
    with pytest.raises(nexus.NexusError):
        write_script(lab, lab.store.state.jobs[job_id])


def test_a_script_that_cannot_be_kept_is_no_job(lab, monkeypatch):
    def fail(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(lab.service.disk, "replace", fail)
        status, answer = submit(lab, "name: x", uid=OWNER)
    assert status == 503 and "No space" in answer["message"] and lab.commands == [] and kept_code(lab) == []
    for _ in range(3):
        assert submit(lab)[0] == 200
    assert submit(lab)[0] == 429 and len(kept_code(lab)) == 3, "what no job came to need goes again"
    key = {"idempotency-key": "12345678"}
    lab.ask("DELETE", f"/queue/{lab.ask('GET', '/queue')[1][0]['id']}")
    answers = [submit(lab, headers=key)[1]["job_id"] for _ in range(2)]
    assert answers[0] == answers[1] and len(kept_code(lab)) == 4


def test_only_allowed_scripts_may_be_submitted():
    with Bench(allowed_script_paths=["/"]) as bench:
        status, answer = submit(bench, "name: x", uid=OWNER)
        assert status == 403 and "code may not be given" in answer["message"] and not kept_code(bench)


def test_which_python(bench, tmp_path):
    bench.service.environ["PATH"] = str(tmp_path)
    (tmp_path / "bash").touch(mode=0o755)
    for name, command in (("python3", "python3 main.py"), ("python", "python main.py")):
        (tmp_path / name).touch(mode=0o755)
        job_id = submit(bench, "name: x", uid=OWNER)[1]["job_id"]
        assert bench.ask("GET", f"/jobs/{job_id}")[1]["command"] == command


def test_jobs_of_others_are_seen_from_outside(lab):
    mine, others = (submit(lab, config, uid=OWNER)[1]["job_id"] for config in (MINE + "project_id: p", "user_id: bob\nproject_id: p"))
    rows = lab.ask("GET", "/api/jobs", headers=MY_BEARER, uid=None)[1]
    assert [(row["job_id"], row["user_id"], row["project_id"], row["waiting_for"] is None) for row in rows] == [
        (mine, "myuser", "p", False), (others, "bob", None, True)]
    for path in ("/api/status/", "/api/results/"):
        assert lab.ask("GET", path + others, headers=MY_BEARER, uid=None)[0] == 403
        assert lab.ask("GET", path + mine, uid=OWNER + 1)[0] == 401 and lab.ask("GET", path + "xyz")[0] == 404
        assert lab.ask("HEAD", path + mine)[0] == 200
    assert lab.ask("POST", f"/api/cancel/{others}", headers=MY_BEARER, uid=None)[0] == 403

    def list_ids(**query):
        return [row["job_id"] for row in lab.ask("GET", "/api/jobs", query=query)[1]]

    assert list_ids(user_id="bob") == [others] and list_ids(status="pending") == [mine, others] and list_ids(status="running") == []
    assert list_ids(limit="1") == [mine] and list_ids(user_id="x") == []
    assert lab.ask("GET", "/api/jobs", query={"status": "done"})[0] == 400 and lab.ask("GET", "/api/jobs", query={"user": "bob"})[0] == 400


# Through sockets: the adapter alone, before an Api over a Service that is not run


class Listening(Bench):
    """A Bench that listens."""

    def __init__(self, **keys):
        super().__init__(**keys)
        self.port = free_port()
        self.server = nexus.Server(self.api, self.config.service.host, self.port, nexus.load_tls(self.config.service))
        self.server.serve()

    def __exit__(self, *_):
        for each in self.server.listeners:
            each.shutdown()
            each.server_close()
        self.service.is_stopping = True
        super().__exit__()

    def count_open(self):
        return sum(map(len, self.server.connections.values()))

    def connect(self, source="127.0.0.1"):
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S, (source, 0))

    def exchange(self, request):
        """Send bytes; return all that comes back until the other side closes."""
        with self.connect() as line:
            line.sendall(request)
            answer = b""
            while piece := line.recv(65536):
                answer += piece
            return answer


@pytest.fixture
def listening():
    with Listening() as made:
        yield made


@pytest.fixture(scope="module")
def shared_listening():
    with Listening() as made:
        yield made


def split_answers(answer):
    """[(status, headers, body)] of what came back on one connection."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines)}
        if "content-length" in headers:
            size = int(headers["content-length"])
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while True:
                length, _, rest = rest.partition(b"\r\n")
                piece, rest = rest[:int(length, 16)], rest[int(length, 16) + 2:]
                body += piece
                if not piece:
                    break
            found.append((int(status_line.split()[1]), headers, body))
            answer = rest
            continue
        else:
            size = 0 if headers.get("connection") != "close" else len(rest)
        found.append((int(status_line.split()[1]), headers, rest[:size]))
        answer = rest[size:]
    return found


HOST = b"Host: 127.0.0.1\r\n"
CLOSE = HOST + b"Connection: close\r\n"
ADD = b'{"command": "true", "gpus": 0}'
JSON = b"Content-Type: application/json\r\n"


def test_a_connection_is_for_one_request(listening):
    add = b"POST /queue HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: %d\r\n\r\n" % len(ADD) + ADD
    answers = split_answers(listening.exchange(add * 3))
    assert [status for status, _, _ in answers] == [200] and answers[0][1]["connection"] == "close"
    assert len(listening.commands) == 1


@pytest.mark.parametrize("path", ["/queue", "/status", "/nothing", "/service/logs", "/jobs"])
def test_a_body_nobody_asked_for_is_not_the_next_request(listening, path):
    smuggled = b"POST /service/pause HTTP/1.1\r\n" + HOST + b"\r\n"
    first = b"GET " + path.encode() + b" HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(smuggled) + smuggled
    answers = split_answers(listening.exchange(first + b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n"))
    assert answers[0][0] in (200, 404) and not listening.store.state.paused
    assert len(answers) == 1 or (answers[1][0] == 200 and json.loads(answers[1][2])["name"] == "nexus")
    assert len(answers) == 2 or answers[0][1]["connection"] == "close"


def test_http_1_0_and_0_9(listening):
    listening.add()
    answer = listening.exchange(b"GET /queue HTTP/1.0\r\n" + HOST + b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head and b"chunked" not in head and len(json.loads(body)) == 1
    answer = listening.exchange(b"GET /status\r\n\r\n")
    assert is_error(json.loads(answer.partition(b"\r\n\r\n")[2] or answer))
    assert listening.service.failure_count == 0


MALFORMED = [  # reason, the request, status
    ("no request", b"hello\r\n\r\n", 400),
    ("a made-up version", b"GET / HTTP/x\r\n\r\n", 400),
    ("bytes that are no text", b"\xff\xfe\x00 / HTTP/1.1\r\n" + CLOSE + b"\r\n", 405),
    ("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ("a method nobody knows", b"BREW /queue HTTP/1.1\r\n" + CLOSE + b"\r\n", 405),
    ("a path that looks like a host", b"GET //evil.example/status HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
    ("an address that is none", b"GET http://[x HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
    ("a path with NUL", b"GET /\0 HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
    ("the path of an escape", b"GET /jobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
    ("CR LF in a path", b"GET /a%0d%0aSet-Cookie:%20x=y HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
    ("a line that is too long", b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n", 400),
    ("a header that is too long", b"GET / HTTP/1.1\r\n" + CLOSE + b"X: " + b"x" * 70000 + b"\r\n\r\n", 400),
    ("no Host", b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 403),
    ("two Hosts", b"GET / HTTP/1.1\r\n" + CLOSE + HOST + b"\r\n", 400),
    ("two lengths", b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
    ("a length below 0", b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Content-Length: -1\r\n\r\n", 400),
    ("a length that is no number", b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Content-Length: ten\r\n\r\n", 400),
    ("a list of lengths", b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    ("no body", b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"\r\n", 400),
    ("a body in chunks", b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
    ("a body that is far too large", b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Content-Length: 99999999999\r\n\r\n{", 413),
]


@pytest.mark.parametrize("reason, request_bytes, status", MALFORMED, ids=[case[0] for case in MALFORMED])
def test_malformed_requests(shared_listening, reason, request_bytes, status):
    answers = split_answers(shared_listening.exchange(request_bytes))
    assert [answer[0] for answer in answers] == [status], (reason, answers)
    assert is_error(json.loads(answers[0][2])) and "x=y" not in answers[0][1].values()
    assert answers[0][1]["content-type"] == "application/json"
    assert shared_listening.service.failure_count == 0 and not shared_listening.commands


def test_a_body_that_ends_early_or_never_comes_is_the_callers_fault(monkeypatch):
    size = len(ADD) + 1
    with Listening() as listening:
        request = b"POST /queue HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: %d\r\n\r\n" % size + ADD
        with monkeypatch.context() as patch:                        # a head may come late, and its body not at all
            patch.setattr(nexus, "BODY_BYTES_PER_S", -size / (nexus.REQUEST_TIMEOUT_S - 0.3))
            answer = split_answers(listening.exchange(request))
        assert answer[0][0] == 400 and b"%d bytes" % size in answer[0][2], "it waited no longer"
        until(lambda: not listening.count_open(), "its end")
        with listening.connect() as line:
            line.sendall(request)
            until(lambda: listening.count_open(), "its turn")        # who has closed an end before that is not served
            line.shutdown(socket.SHUT_WR)
            assert re.search(b" 40[01] ", line.recv(65536)), "half closed it reads as nobody's"
        for _ in range(3):                                          # gone in the middle, with a reset
            line = listening.connect()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            line.sendall(request)
            line.close()
        until(lambda: not listening.count_open(), "their ends")
        monkeypatch.setattr(nexus.Handler, "timeout", 0.3)
        assert listening.exchange(b"GET / HT") == b"", "a request that never ends gets no answer"
        assert listening.commands == [] and listening.service.failure_count == 0


def test_a_slow_body_is_waited_for(listening):
    with listening.connect() as line:
        line.sendall(b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Content-Length: %d\r\n\r\n" % len(ADD))
        for byte in ADD:
            line.sendall(bytes([byte]))
            time.sleep(0.005)
        assert b" 200 " in line.recv(65536)
    assert len(listening.commands) == 1


def test_expect_100_continue(listening):
    with listening.connect() as line:
        line.sendall(b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(ADD))
        assert line.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(ADD)
        assert b" 200 " in line.recv(65536)


@pytest.mark.parametrize("path, status", [("/queue", b"200"), ("/", b"200"), ("/nothing", b"404")])
def test_head_says_what_get_would_without_the_body(listening, path, status):
    answer = listening.exchange(f"HEAD {path} HTTP/1.1\r\n".encode() + HOST + b"\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [status] and b"{" not in answer and b"[]" not in answer


def test_an_escaped_path_and_a_whole_address_are_understood(listening):
    job_id = listening.add()
    for path in (f"/jobs/{job_id}", f"/jobs/%{ord(job_id[0]):02x}{job_id[1:]}", f"http://127.0.0.1/jobs/{job_id}", f"/jobs/{job_id}?"):
        answer = split_answers(listening.exchange(f"GET {path} HTTP/1.1\r\n".encode() + CLOSE + b"\r\n"))
        assert answer[0][0] == 200 and json.loads(answer[0][2])["id"] == job_id, path
    answer = split_answers(listening.exchange(b"GET /jobs?status=pen%64ing&user= HTTP/1.1\r\n" + CLOSE + b"\r\n"))
    assert (answer[0][0], answer[0][2]) == (200, b"[]\n"), "an empty user is no user"


@pytest.mark.parametrize("path", ["/jobs/{id}/logs?follow=true", "/service/logs?follow=1", "/jobs/{id}?wait=60"])
def test_who_leaves_while_following_leaves_no_thread_behind(listening, path):
    job_id = listening.add()
    before = set(threading.enumerate())
    lines = [listening.connect() for _ in range(5)]
    for line in lines:
        line.sendall(f"GET {path.format(id=job_id)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert line.recv(65536).startswith(b"HTTP/1.1 200")
    assert len(set(threading.enumerate()) - before) == 5
    for line in lines:
        line.close()
    until(lambda: not set(threading.enumerate()) - before, "the end of the threads")
    assert listening.service.failure_count == 0


def test_a_search_ends_when_its_caller_has_gone(listening, monkeypatch):
    monkeypatch.setattr(nexus, "MAX_SEARCH_BYTES", 2**50)
    job_id = listening.add()
    folder = os.path.join(listening.layout.log_dir, f"job_{job_id}")
    os.mkdir(folder)
    with open(os.path.join(folder, "stdout.log"), "wb") as file:
        file.truncate(2**40)                        # it would take an hour
    listening.become(job_id, "running", log_dir=folder)
    before = set(threading.enumerate())
    lines = [listening.connect() for _ in range(3)]
    for line, code in zip(lines, (200, 200, 503)):
        line.sendall(f"GET /jobs/{job_id}/logs?grep=needle HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert line.recv(65536).startswith(b"HTTP/1.1 %d" % code)
    for line in lines:
        line.close()
    until(lambda: not set(threading.enumerate()) - before, "the end of the threads")
    assert listening.api.searches == set() and listening.service.failure_count == 0


def test_a_client_that_does_not_read_delays_nobody_and_is_dropped(monkeypatch):
    monkeypatch.setattr(nexus, "IDLE_TIMEOUT_S", 1.0)
    with Listening() as it, socket.socket() as slow:
        job_id = it.add()
        folder = os.path.join(it.layout.log_dir, f"job_{job_id}")
        os.mkdir(folder)
        pathlib.Path(folder, "stdout.log").write_bytes(b"x" * 99999 + b"\n")
        with open(os.path.join(folder, "stdout.log"), "ab") as file:
            for _ in range(200):                # 20 MB: more than the kernel takes in for it
                file.write(b"x" * 99999 + b"\n")
        it.become(job_id, "running", log_dir=folder)
        request = f"GET /jobs/{job_id}/logs HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
        before = set(threading.enumerate())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", it.port))
        slow.sendall(request)
        until(lambda: set(threading.enumerate()) - before, "its thread")
        assert len(it.exchange(request).partition(b"\r\n\r\n")[2]) == 201 * 100000
        until(lambda: not set(threading.enumerate()) - before, "the end of the slow one's thread")
        assert it.service.failure_count == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "999.1.1.1", "::ffff:x", "ü" * 70, "x" * 100])
def test_an_address_that_is_not_ours_is_a_usage_error(host):
    with Bench() as bench, pytest.raises(nexus.NexusError) as raised:
        nexus.Server(bench.api, host, 6234)
    assert raised.value.kind == "usage" and raised.value.hint


@given(st.binary(max_size=300), st.booleans())
def test_whatever_bytes_come_are_no_fault_of_ours(shared_listening, content, is_continued):
    start = b"POST /queue HTTP/1.1\r\n" + CLOSE if is_continued else b""
    with shared_listening.connect() as line:
        line.sendall(start + content)
        line.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := line.recv(65536):
                answer += piece
    for status, _, body in split_answers(answer):
        assert status != 500 and is_error(json.loads(body))
    assert shared_listening.service.failure_count == 0


# The whole service, and curl


def curl(home, path, *options, timeout=60, host="127.0.0.1"):
    """(status, body) by the real curl."""
    done = subprocess.run(["curl", "-sSg", "-w", "\n%{http_code}", *options, f"http://{host}:{home.port}{path}"],
                          capture_output=True, timeout=timeout)
    body, _, status = done.stdout.rpartition(b"\n")
    assert done.returncode == 0, (done.stderr, done.stdout)
    return int(status), body.decode("utf-8", "replace")


@pytest.fixture(scope="module")
def home():
    with Home(cpu_slots=20, kill_grace_seconds=1) as made:
        assert made.main("start").code == 0
        yield made


POST_JSON = ("-H", "Content-Type: application/json", "-d")


def add_by_curl(home, command, **keys):
    status, answer = curl(home, "/queue", *POST_JSON, json.dumps({"command": command, "gpus": 0, **keys}))
    assert status == 200, answer
    return json.loads(answer)["id"]


def test_a_job_added_over_rest_has_the_services_environment_and_the_home_directory(home):
    job_id = add_by_curl(home, "pwd; echo $TERM.$NEXUS_ROLE.$NEXUS_JOB_ID."
                               "$NEXUS_GPU_ID.$CUDA_VISIBLE_DEVICES.$CUDA_DEVICE_ORDER.$PYTHONUNBUFFERED")
    home.wait_for(job_id, "completed")
    directory, variables = curl(home, f"/jobs/{job_id}/logs")[1].splitlines()
    assert directory == home.top and variables.endswith(f".{job_id}...PCI_BUS_ID.1")


@pytest.mark.parametrize("size_kb, options, status", [
    (1000, ("-H", "Content-Type: text/plain"), 415), (70000, ("-H", "Content-Type: application/json"), 413),
    (70000, ("-H", "Content-Type: application/json", "-H", "Expect:"), 413), (1000, ("-H", "Host: evil.example"), 403),
    (1000, ("-H", "Authorization: Bearer wrong"), 401)])
def test_the_answer_to_a_large_body_that_is_refused_arrives(home, size_kb, options, status):
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * size_kb * 1000)
        file.flush()
        for _ in range(3):
            given_status, answer = curl(home, "/queue", "--data-binary", f"@{file.name}", *options)
            assert given_status == status and is_error(json.loads(answer))


def test_a_follower_sees_lines_as_they_come_and_ends_with_the_job(home):
    gate = os.path.join(home.top, "gate")
    job_id = add_by_curl(home, f"echo one; until [ -e {gate}1 ]; do sleep 0.02; done; echo two >&2; "
                               f"until [ -e {gate}2 ]; do sleep 0.02; done; "
                               "printf three; exit 3")
    follower = subprocess.Popen(["curl", "-sSN", f"http://127.0.0.1:{home.port}/jobs/{job_id}/logs?follow=true"], stdout=subprocess.PIPE)
    assert follower.stdout.readline() == b"one\n"
    open(gate + "1", "w").close()
    assert follower.stdout.readline() == b"two\n"
    open(gate + "2", "w").close()
    assert follower.stdout.read() == b"three" and follower.wait(60) == 0
    assert home.job(job_id)["exit_code"] == 3
    assert curl(home, f"/jobs/{job_id}/logs?follow=true") == (200, "one\ntwo\nthree")
    assert curl(home, f"/jobs/{job_id}/logs?stream=stderr&tail=1") == (200, "two\n")


def test_a_job_of_a_million_lines_is_followed_whole(home):
    job_id = add_by_curl(home, "seq 1000000")
    status, text = curl(home, f"/jobs/{job_id}/logs?follow=true&stream=stdout")
    assert status == 200 and text == "".join(f"{number}\n" for number in range(1, 1000001))


def test_two_hundred_clients_that_go_leave_nothing(home):
    def count():
        """(descriptors, threads) of the service."""
        return [len(os.listdir(f"/proc/{home.service['pid']}/{what}")) for what in ("fd", "task")]

    home.client().health()                      # its threads have begun
    before = count()
    lines = [socket.create_connection(("127.0.0.1", home.port), PATIENCE_S) for _ in range(200)]
    for line in lines:
        line.sendall(b"GET /service/logs?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for line in lines:
        assert line.recv(65536).startswith(b"HTTP/1.1 200")
    assert count()[1] > 200
    home.wait_for(add_by_curl(home, "true"), "completed")
    for number, line in enumerate(lines):       # closed, cut off, or only half closed
        if number % 3 == 1:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR) if number % 3 == 2 else line.close()
    until(lambda: all(now <= then + 3 for now, then in zip(count(), before)), lambda: f"as before, {before}: {count()}")
    for line in lines:
        line.close()
    assert home.client().health()["is_healthy"]


@pytest.mark.skipif(OWNER != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("uid", [65534, 12345])
def test_another_user_of_the_machine_is_refused(home, uid):
    token = home.file("token").read_text().strip()
    for options, status in (((), 401), (("-H", f"Authorization: Bearer {token}"), 200), (("-H", "Authorization: Bearer x"), 401)):
        done = subprocess.run(["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", *options, f"http://127.0.0.1:{home.port}/status"],
                              capture_output=True, timeout=60, preexec_fn=lambda: os.setuid(uid))
        assert done.stdout.decode() == str(status)
    assert "Refused " in home.file("service.log").read_text()
    assert os.stat(home.file("token")).st_mode & 0o777 == 0o600 and os.stat(home.path).st_mode & 0o077 in (0, 0o055), "the home is private"


def test_a_connection_that_sends_and_closes_at_once_is_nobodys(home):
    before = len(home.client().jobs())
    body = b'{"command": "true"}'
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", home.port)) as line:
            line.sendall(b"POST /queue HTTP/1.1\r\n" + CLOSE + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert home.client().health()["is_healthy"] and len(home.client().jobs()) in range(before, before + 21)


@pytest.mark.parametrize("host, others", [
    ("0.0.0.0", ["127.0.0.1", "127.0.0.2"]), ("::1", ["[::1]", "127.0.0.1"]), ("localhost", ["localhost", "127.0.0.1", "[::1]"]),
    (None, ["127.0.0.1", "[::1]", "localhost"])])
def test_a_service_on_another_address(host, others):
    with Home(**({"host": host} if host else {})) as made:
        done = made.run("run", "--gpus", "0", "echo hello")
        assert (done.code, done.out) == (0, "hello\n"), done
        token = made.file("token").read_text().strip()
        for address in others:
            url = f"http://{address}:{made.port}/status"
            codes = [subprocess.run(["curl", "-sS", "-g", "-o", "/dev/null", "-w", "%{http_code}", *options, url], capture_output=True,
                                    timeout=60).stdout.decode() for options in ((), ("-H", f"Authorization: Bearer {token}"))]
            assert codes == ["200" if host != "0.0.0.0" else "401", "200"], (address, codes)
        assert made.run("stop").code == 0


@pytest.mark.skipif(OWNER != 0, reason="only root can make a network of its own")
def test_a_machine_without_ipv6():
    setup = 'ip link set lo up; echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; exec "$@"'
    with Home() as made:
        done = made.run("run", "--gpus", "0", "echo hello", python=("unshare", "-n", "sh", "-c", setup, "sh", sys.executable))
        assert (done.code, done.out) == (0, "hello\n"), done


@pytest.mark.skipif(OWNER != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.2", "127.0.0.1"])
def test_nobody_has_what_localhost_may_lead_to(host):
    port = free_port()
    with contextlib.ExitStack() as held:
        for own in nexus.listen(host, port).values():
            held.enter_context(own)
        for address in ("127.0.0.1", "::1"):
            with listener(port, host=address) as heard:
                assert heard() == "", address


def test_a_request_alone_writes_no_line_however_much_is_logged(listening):
    logging.getLogger(f"test-{os.path.basename(listening.folder)}").setLevel("DEBUG")
    before = len(listening.lines)
    listening.exchange(b"GET /docs?\x1b]0;x" + b"a" * 5000 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert not listening.lines[before:]


def test_a_restart_has_both_addresses_again():
    with Home() as made:
        made.client()
        with socket.create_connection(("::1", made.port)) as line:
            assert is_open(line)                # one that is still there when the service ends
            assert made.run("restart").code == 0
        assert [curl(made, "/jobs", host=host)[0] for host in ("127.0.0.1", "[::1]")] == [200, 200]


def test_stop_over_rest_answers_and_ends_it():
    with Home() as made:
        assert made.main("start").code == 0
        pid = made.service["pid"]
        assert curl(made, "/service/stop", "-X", "POST") == (204, "")
        until(lambda: not os.path.exists(f"/proc/{pid}") and not made.file("service.json").exists(), "the end of the service")


# Tokens of other users


BOB, ANN = {"authorization": "Bearer secret-of-bob"}, {"authorization": "Bearer secret-of-ann"}


@pytest.fixture
def lab_bench():
    """A Bench that bob and ann may call, each with a token, and each with a job: bob's, then ann's, then the owner's."""
    with Bench() as bench:
        for user in ("bob", "ann"):
            nexus.change_tokens(nexus.DISK, bench.layout.tokens_file, lambda tokens, user=user: nexus.add_token(
                tokens, user, f"secret-of-{user}", None, time.time()))
        bench.ids = [bench.ask("POST", "/queue", {"command": f"echo {word}", "name": word}, headers)[1]["id"]
                     for word, headers in (("bobs", BOB), ("anns", ANN), ("own", {}))]
        yield bench


def test_who_may_change_a_job(lab_bench):
    bobs, _, own = lab_bench.ids
    assert lab_bench.ask("PATCH", f"/queue/{bobs}", {"name": "n"}, BOB)[1]["name"] == "n"
    assert lab_bench.ask("PATCH", f"/queue/{own}", {"name": "n"}, BOB)[0] == 403
    assert lab_bench.ask("PATCH", f"/queue/{bobs}", {"priority": "high"}, BOB)[0] == 403
    lab_bench.become(bobs, "failed", cause="exit", exit_code=1)
    assert lab_bench.ask("POST", "/jobs/retry", {"ids": [bobs], "change": {"priority": "high"}}, BOB)[0] == 403
    assert lab_bench.ask("POST", "/jobs/retry", {"ids": [bobs], "change": {"name": "m"}}, BOB)[0] == 200


def test_a_user_has_its_own_jobs(lab_bench):
    for headers, user, own in ((BOB, "bob", 0), (ANN, "ann", 1)):
        for at, id in enumerate(lab_bench.ids):
            for method, path, body, status in (
                    ("GET", f"/jobs/{id}", None, 200), ("GET", f"/jobs/{id}/why", None, 200), ("GET", f"/jobs/{id}/logs", None, 200),
                    ("PATCH", f"/queue/{id}", {"priority": 2}, 200), ("DELETE", f"/jobs/{id}", None, 409),
                    ("POST", "/jobs/retry", {"ids": [id]}, 409)):
                code, answer = lab_bench.ask(method, path, body, headers)
                assert code == (status if at == own else 403), (method, path, user, answer)
        assert lab_bench.ask("GET", f"/jobs/{lab_bench.ids[own]}", None, headers)[1]["user"] == user
    assert lab_bench.ask("DELETE", f"/queue/{lab_bench.ids[1]}", None, BOB)[0] == 403
    assert lab_bench.ask("DELETE", f"/queue/{lab_bench.ids[0]}", None, BOB)[0] == 204
    assert lab_bench.ask("POST", "/jobs/retry", {"ids": [lab_bench.ids[0]]}, BOB)[0] == 200
    assert lab_bench.ask("GET", f"/jobs/{lab_bench.ids[0]}", None)[1]["stopped_by"] == "bob (token, 127.0.0.1)"


def test_a_user_sees_of_others_that_they_are_there(lab_bench):
    for path in ("/jobs", "/queue"):
        listed = lab_bench.ask("GET", path, None, BOB)[1]
        assert [job["id"] for job in listed] == lab_bench.ids and [job["position"] for job in listed] == [0, 1, 2]
        assert [job["command"] for job in listed] == ["echo bobs", None, None]
        assert all(nexus.JOB[key].public for key, fact in listed[1].items() if fact is not None)
        assert {job["user"] for job in listed} == {"bob", "ann", lab_bench.service.user}
        assert set(listed[1]) == set(listed[0]), "the same keys"


OWNERS = [("POST", "/service/pause"), ("POST", "/service/resume"), ("POST", "/service/stop"), ("GET", "/service/logs"),
          ("POST", "/gpus/0/pause"), ("POST", "/gpus/0/resume"), ("POST", "/service/pause?group=g")]


@pytest.mark.parametrize("method, path", OWNERS)
def test_what_is_the_owners(lab_bench, method, path):
    path, _, query = path.partition("?")
    code, answer = lab_bench.ask(method, path, None, BOB, dict([query.split("=")]) if query else None)
    assert code == 403 and is_error(answer) and lab_bench.service.user in answer["message"]
    assert not lab_bench.store.state.paused and not lab_bench.service.is_stopping and not lab_bench.store.state.paused_gpus


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


ENDS = [
    ("unknown", None), ("revoked", lambda tokens, now: nexus.revoke_tokens(tokens, "bob")),
    ("expired", lambda tokens, now: {sha256: nexus.replace(token, expires_at=now - 1) for sha256, token in tokens.items()})]


@pytest.mark.parametrize("reason, change", ENDS, ids=[case[0] for case in ENDS])
def test_tokens_that_are_over(lab_bench, reason, change):
    slept = []
    lab_bench.service.clock.sleep = slept.append
    headers = BOB if change else {"authorization": "Bearer secret-of-bop"}
    if change:
        nexus.change_tokens(nexus.DISK, lab_bench.layout.tokens_file, lambda tokens: change(tokens, time.time()))
    code, answer = lab_bench.ask("GET", "/jobs", None, headers)
    assert (code, answer["message"]) == (401, "the token is not right")
    assert slept == [nexus.WRONG_TOKEN_DELAY_S]
    assert "not right" in lab_bench.lines[-1] and not any("secret-of" in line for line in lab_bench.lines), lab_bench.lines
    assert lab_bench.ask("GET", "/jobs", None, BEARER)[0] == 200 and len(slept) == 1, "a right one is not slowed"


def test_a_token_file_that_is_garbage_keeps_only_users_out(lab_bench):
    with open(os.path.join(lab_bench.layout.home, "tokens.json"), "w") as file:
        file.write("{")
    assert lab_bench.ask("GET", "/jobs", None, BOB)[0] == 503
    assert lab_bench.ask("GET", "/jobs")[0] == 200


# Limits of connections, through sockets


def is_open(line):
    """Whether the other side still listens: it answers a request."""
    try:
        line.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return line.recv(4096).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def test_who_has_sent_no_request_gives_way(monkeypatch):
    monkeypatch.setattr(nexus, "MAX_CONNECTIONS", 3)
    with Listening() as it, contextlib.ExitStack() as held:
        lines = [held.enter_context(it.connect()) for _ in range(3)]
        lines[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        until(lambda: it.count_open() == 3)
        assert is_open(held.enter_context(it.connect()))
        assert lines[0].recv(1) == b"" and is_open(lines[1])


def test_others_leave_room_for_the_owner(monkeypatch):
    monkeypatch.setattr(nexus, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(nexus, "find_peer_uid", lambda line, address: OWNER if address[0] == "127.0.0.1" else None)
    with Listening() as it, contextlib.ExitStack() as held:
        others = [held.enter_context(it.connect(f"127.0.0.{number}")) for number in (2, 3, 4)]
        for line in others:
            line.sendall(f"GET /service/logs?follow=true HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert line.recv(100).startswith(b"HTTP/1.1 200")
        assert held.enter_context(it.connect("127.0.0.5")).recv(1) == b"", "none of those that are served gives way"
        assert is_open(held.enter_context(it.connect()))
        others.pop().close()
        until(lambda: it.count_open() < 3)


def test_a_body_that_drips_in_is_not_waited_for(listening, monkeypatch):
    monkeypatch.setattr(nexus, "REQUEST_TIMEOUT_S", 0.5)
    began = time.monotonic()
    with listening.connect() as line, contextlib.suppress(ConnectionError):
        line.sendall(b"POST /queue HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n")
        line.settimeout(0.02)
        while time.monotonic() - began < PATIENCE_S:
            line.sendall(b" ")
            with contextlib.suppress(socket.timeout):
                if not line.recv(1000):
                    break
    assert 0.5 <= time.monotonic() - began < PATIENCE_S
    monkeypatch.undo()
    with listening.connect() as other:
        assert is_open(other)
    assert not listening.service.failure_count


@contextlib.contextmanager
def descriptors_left(count):
    """So many more may be opened, by anyone in this process."""
    import resource
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probes = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    for probe in probes:
        os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probes[count], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_with_the_last_descriptor_the_server_does_not_end(count):
    with Listening() as it, socket.socket() as line:
        looked, pauses, began = [], [], time.monotonic()
        it.service.clock.sleep = lambda seconds: (pauses.append(seconds), time.sleep(seconds))
        find, nexus.find_socket_uid = nexus.find_socket_uid, lambda *asked: looked.append(find(*asked)) or looked[-1]
        try:
            with descriptors_left(count):
                line.connect(("127.0.0.1", it.port))            # its own descriptor is there
                until(lambda: pauses or looked)
        finally:
            nexus.find_socket_uid = find
        assert len(pauses) < 3 + (time.monotonic() - began) / nexus.ACCEPT_PAUSE_S, "it waits for a free one, and not at full speed"
        with it.connect() as other:
            other.sendall(b"GET /queue HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert other.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_fault_while_accepting_ends_one_connection_at_most(listening, monkeypatch):
    faults, works = [ZeroDivisionError("a fault of ours")], nexus.find_peer_uid

    def fail_once(*given):
        if faults:
            raise faults.pop()
        return works(*given)

    monkeypatch.setattr(nexus, "find_peer_uid", fail_once)
    with listening.connect() as line:
        until(lambda: listening.service.failure_count, "the fault")
        assert line.recv(1) == b""
    assert listening.exchange(b"GET /queue HTTP/1.0\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert listening.service.failure_count == 1 and "a fault of ours" in listening.service.last_failure


# What the dashboard needs: its page for those who would rather have one, the last hour of each GPU, the head of a long queue

ACCEPTED = [  # reason, Accept, whether the page is the answer
    ("chromium", "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8", True),
    ("curl", "*/*", False),
    ("nothing said", "", False),
    ("JSON alone", "application/json", False),
    ("JSON rather", "text/html;q=0.5, application/json", False),
    ("both alike", "text/html, application/json", False),
]


@pytest.mark.parametrize(("reason", "accept", "is_page"), ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_a_browser_gets_the_page(bench, reason, accept, is_page):
    bench.api.page = "<style>a</style><script>b</script>"
    response = bench.respond("GET", "/", headers={"accept": accept})
    assert response.status == 200 and response.content_type.startswith("text/html") == is_page
    if is_page:
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "script-src 'sha256-PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0='" in policy      # of b
    assert bench.respond("GET", "/status", headers={"accept": accept}).content_type == "application/json"


def test_the_page_needs_no_token_and_what_it_asks_for_does(bench):
    bench.api.page = "<p>"
    assert bench.ask("GET", "/", headers={"accept": "text/html"}, uid=None) == (200, b"<p>")
    assert bench.ask("GET", "/status", uid=None)[0] == 401
    assert bench.ask("GET", "/", headers={"accept": "text/html", "host": "evil.example"})[0] == 403


# What the loop changes while requests read it


def test_a_status_may_be_repeated(listening):
    ids = {status: listening.add(gpus=0) for status in nexus.STATUSES}
    for status in ("completed", "failed", "cancelled", "running"):
        listening.become(ids[status], status)
    for path, key in (("/jobs", "id"), ("/api/jobs", "job_id")):
        for asked in (["failed", "pending"], ["running"], ["failed", "failed"], []):
            query = "&".join(f"status={status}" for status in asked)
            answer = listening.exchange(f"GET {path}?{query} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            jobs = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert {job[key] for job in jobs} == {ids[status] for status in asked or nexus.STATUSES}, (path, asked)
    assert b" 400 " in listening.exchange(b"GET /jobs?limit=1&limit=2 HTTP/1.0\r\nHost: localhost\r\n\r\n"), "which one?"
    assert b" 400 " in listening.exchange(b"GET /jobs?status=failed&status=x HTTP/1.0\r\nHost: localhost\r\n\r\n")
    client = nexus.encode_query({"status": ["failed", "pending"], "limit": 3, "user": None})
    assert client == "?status=failed&status=pending&limit=3"


# What a stranger may try


@pytest.mark.parametrize("reason, head", [
    ("a name that ends in a blank", "X-Foo : a\r\nX-Forwarded-For: 192.0.2.7\r\n"), ("no colon", "garbage\r\nOrigin: http://evil.example\r\n"),
    ("two Origins", "Origin: http://evil.example\r\nOrigin: http://localhost\r\n"),
    ("two CRs", "X: a\r\r\n"),
    ("the end of a form", "Content-Type: multipart/form-data; boundary=x\r\ngarbage\r\n--x--\r\n"), ("a CR before a line", "\rX: a\r\n"),
    ("two tokens", "Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"), ("two types", "Content-Type: a/b\r\nContent-Type: c/d\r\n")])
def test_a_head_that_hides_something(listening, reason, head):
    answer = listening.exchange(f"POST /service/pause HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: 0\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400"), (reason, answer)
    assert not listening.store.state.paused


def test_a_refused_body_that_drips_in_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(nexus, "LINGER_S", 0.5)
    began = time.monotonic()
    with Listening() as it, it.connect() as line:
        line.sendall(b"POST /queue HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 60000\r\n\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 403")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < PATIENCE_S and it.count_open():
                line.sendall(b" ")
                time.sleep(0.02)
        assert 0.5 <= time.monotonic() - began < PATIENCE_S


def test_a_user_goes_before_nobody(lab_bench):
    for body, code in (({"priority": "high"}, 403), ({"priority": -5}, 403), ({"priority": "low"}, 200), ({}, 200)):
        assert lab_bench.ask("POST", "/queue", {"command": "true", **body}, BOB)[0] == code
    assert lab_bench.ask("PATCH", f"/queue/{lab_bench.ids[0]}", {"priority": 0}, BOB)[0] == 403
    assert lab_bench.ask("PATCH", f"/queue/{lab_bench.ids[0]}", {"priority": 0})[0] == 200, "the owner may"


@pytest.mark.parametrize("who, given, expected", [
    (BOB, "high", 1), (BOB, "normal", 1), (BOB, "low", 2), ({}, "high", 0), ({}, "low", 2)])
def test_a_retry_goes_before_others_for_the_owner_alone(lab_bench, who, given, expected):
    child = lab_bench.ask("POST", "/queue", {"command": "true", "after": [lab_bench.ids[0]]}, BOB)[1]["id"]
    for id in (lab_bench.ids[0], child):
        assert lab_bench.ask("PATCH", f"/queue/{id}", {"priority": given})[0] == 200
    assert lab_bench.ask("DELETE", f"/queue/{lab_bench.ids[0]}")[0] == 204
    for id in (lab_bench.ids[0], child):
        again = lab_bench.ask("POST", "/jobs/retry", {"ids": [id]}, who)[1]["ids"][0]
        assert lab_bench.ask("GET", f"/jobs/{again}")[1]["priority"] == expected


def test_a_log_that_is_followed_is_not_the_next_jobs_of_that_id(lab_bench):
    stream = lab_bench.respond("GET", f"/jobs/{lab_bench.ids[0]}/logs", None, BOB, {"follow": "true"}).stream
    assert next(stream) == b""
    job = lab_bench.store.state.jobs[lab_bench.ids[0]]

    def swap(state):
        yield nexus.Put("jobs", job.id, None)
        yield nexus.Put("jobs", job.id, nexus.replace(job, user="ann", number=999, log_dir="/etc"))
    lab_bench.store.update(swap)
    assert b"".join(stream) == b""


def test_a_revoked_token_ends_its_streams(lab_bench):
    stream = lab_bench.respond("GET", f"/jobs/{lab_bench.ids[0]}/logs", None, BOB, {"follow": "true"}).stream
    assert next(stream) == b""
    nexus.change_tokens(nexus.DISK, lab_bench.layout.tokens_file, lambda tokens: nexus.revoke_tokens(tokens, "bob"))
    with pytest.raises(nexus.NexusError, match="revoked"):
        next(stream)


# Another user of this machine

STRANGER, OTHER_STRANGER = 65534, 12345
needs_root = pytest.mark.skipif(OWNER != 0, reason="only root can become somebody else")
BY_STRANGER = """
import os, resource, socket, struct, sys
uid, family, host, port = int(sys.argv[1]), *map(eval, sys.argv[2:4]), int(sys.argv[4])
os.setuid(uid)
def say(*words): print(*words, flush=True)
def connect(source=None):
    line = socket.socket(family)
    if source: line.bind((source, 0))
    line.connect((host, port))
    return line
"""


def start_stranger(home, code, uid=STRANGER, host="127.0.0.1"):
    family = "socket.AF_INET6" if ":" in host else "socket.AF_INET"
    return subprocess.Popen([sys.executable, "-c", BY_STRANGER + code, str(uid), family, repr(host), str(home.port)],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


SEND_AND_RESET = """
body = b'{"command": "id", "gpus": 0}'
for _ in range(5):
    line = connect()
    line.sendall(b"POST /queue HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
                 b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    say(line.getsockname()[1])
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()
"""


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_somebody_sent_who_has_gone_is_not_sent_by_who_has_the_port_now(host):
    """Linux still delivers what came before a reset; meanwhile the owner calls from the same port."""
    with Home() as home, contextlib.ExitStack() as held:
        pid = home.client().jobs() == [] and home.service["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            stranger = start_stranger(home, SEND_AND_RESET, host=host)
            ports = list(map(int, stranger.communicate(timeout=60)[0].split()))
            lines = []
            for port in ports:
                with contextlib.suppress(OSError):          # another program of this machine has just got it
                    lines.append(held.enter_context(socket.create_connection((host, home.port), 60, (host, port))))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert lines and all(map(is_open, lines)), "the owner's own are answered"
        assert len(ports) == 5 and home.client().jobs() == []


@needs_root
def test_a_service_worker_that_is_not_ours_goes(home):
    """Whoever asks, whatever the path and the Host: a browser that asks for it runs somebody else's."""
    for path, host in (("/sw.js", "localhost"), ("/queue", "127.0.0.1"), ("/", "gpu1.example.org"), ("/docs", "localhost")):
        done = subprocess.run(["curl", "-sS", "-i", "-H", "Service-Worker: script", "-H", "Accept: */*", "-H", f"Host: {host}:{home.port}",
                               f"http://127.0.0.1:{home.port}{path}"], capture_output=True, text=True, timeout=60,
                              preexec_fn=lambda: os.setuid(STRANGER))
        head, _, body = done.stdout.partition("\n\n")
        assert " 200 " in head and "Content-Type: text/javascript" in head and "no-store" in head and "unregister()" in body, (path, done)


HOLD_CONNECTIONS = """
resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
lines = []
for request in [b"", b"G", b"GET /docs HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n"] * 400:
    line = socket.socket(family)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)         # it reads no reply
    line.connect((host, port))
    try: line.sendall(request)
    except OSError: pass
    lines.append(line)
say("held")
input()
"""


@needs_root
def test_who_holds_1200_connections_keeps_the_owner_from_nothing(home):
    with start_stranger(home, HOLD_CONNECTIONS) as holding:
        assert holding.stdout.readline() == "held\n"
        began = time.monotonic()
        for _ in range(10):
            assert curl(home, "/status")[0] == 200
        assert "<script>" in curl(home, "/", "-H", "Accept: text/html")[1] and home.run("status").code == 0
        assert time.monotonic() - began < PATIENCE_S
        status = pathlib.Path(f"/proc/{home.service['pid']}/status").read_text()
        assert int(re.search(r"Threads:\s+(\d+)", status)[1]) < 420 and int(re.search(r"VmRSS:\s+(\d+)", status)[1]) < 200_000
        holding.communicate("\n")


def test_refusals_have_one_line_a_minute_with_their_number(bench):
    now = [0.0]
    bench.service.clock.monotonic = lambda: now[0]
    for number in range(20):
        bench.ask("GET", "/queue", uid=STRANGER + number)
    now[0] = 61.0
    bench.ask("GET", "/queue", headers={"host": "evil.example"}, uid=STRANGER)
    first, second = [line for line in bench.lines if line.startswith("Refused")]
    assert first.startswith("Refused GET /queue from 127.0.0.1 (") and second.endswith("(19 more since the last such line)")


NAMED = [  # who asks, for what, who is named
    ("a token's user", "bob", "POST", "/service/stop", "bob (token, 127.0.0.1)"),
    ("nobody known", None, "POST", "/service/stop", "127.0.0.1 ("),
    ("a token's user, of another's job", "bob", "DELETE", "/queue/{}", "bob (token, 127.0.0.1)")]


@pytest.mark.parametrize("reason, user, method, path, named", NAMED, ids=[case[0] for case in NAMED])
def test_a_refusal_names_the_caller_as_what_is_accepted_does(bench, reason, user, method, path, named):
    path = path.format(bench.add())
    bearer = bench.make_bearer(user) if user else {}
    if user:
        bench.ask("POST", "/queue", {"command": "true"}, bearer)
        assert bench.lines[-1].endswith(f" added by {named}: true"), "accepted"
    status, _ = bench.ask(method, path, None, bearer, uid=STRANGER)
    assert status == 403 if user else 401 and bench.lines[-1].startswith(f"Refused {method} {path} from {named}"), bench.lines[-1]


def test_the_head_of_an_answer_tells_no_version(listening):
    for request in (b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n", b"nonsense\r\n\r\n"):
        assert split_answers(listening.exchange(request))[0][1]["server"] == "nexus"


# An answer that cannot be made to its end


BROKEN = [  # reason, what goes wrong in the middle of a list, whether it is a fault of ours
    ("a fault of ours", ValueError("made up"), True), ("a disk that fails", OSError(errno.EIO, "made up"), True),
    ("an error that is known", nexus.NexusError("unavailable", "made up"), False), ("a revoked token", None, False)]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("reason, error, is_counted", BROKEN, ids=[case[0] for case in BROKEN])
def test_part_of_an_answer_does_not_look_like_all_of_it(monkeypatch, listening, reason, error, is_counted, version):
    nexus.change_tokens(nexus.DISK, listening.layout.tokens_file, lambda tokens: nexus.add_token(
        tokens, "bob", "secret-of-bob", None, time.time()))

    def make_part(*_):
        yield b"[1,\n"
        if error:
            raise error
        nexus.change_tokens(nexus.DISK, listening.layout.tokens_file, lambda tokens: nexus.revoke_tokens(tokens, "bob"))
        yield b"2]\n"

    monkeypatch.setattr(nexus.Api, "reply_when", lambda *_: nexus.Response(200, stream=make_part()))
    with listening.connect() as line:
        line.sendall(b"GET /status?after=1 HTTP/" + version + b"\r\n" + HOST + b"Authorization: Bearer secret-of-bob\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            while line.recv(65536):
                pass
    assert listening.service.failure_count == is_counted
    assert any(line == "Internal error while answering GET /status" for line in listening.lines) == is_counted
    assert any("bob's token" in line for line in listening.lines) == (error is None)

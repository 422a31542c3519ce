"""A node that says what no nexus does, over real HTTP: it is closed with the reason, and nothing else of its head suffers."""

import contextlib
import http.server
import json
import os
import socketserver
import threading
import types

import live
import makers
import pytest
import test_service

import nexus

world = test_service.world


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads, request_queue_size = True, 16


class BadNode:
    """What stands at the other end of a node's line: `change(answer)` makes what it says of what a nexus would say."""

    def __init__(self, path):
        self.path, self.change, self.number, self.sent = path, lambda answer: answer, 0, 0
        node = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = node.change(node.answer(asked))
                if isinstance(answer, types.GeneratorType):
                    self.close_connection, node.sent = True, 0
                    with contextlib.suppress(OSError):
                        for piece in answer:
                            self.wfile.write(piece)
                            node.sent += len(piece)
                    return
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

            def log_message(self, *_):
                pass

        self.server = Server(path, Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, asked):
        self.number += 1
        if self.number > 1:
            threading.Event().wait(0.02)
        return answer(self.number, [{**JOB, "key": one["key"], "status": "pending"} for one in asked.get("want", ()) if "order" in one])

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def answer(number=1, jobs=(), gpus=None):
    """What a nexus with a GPU says."""
    return {"service_id": "0-12345678", "number": number, "now": makers.NOW, "logs": {}, "jobs": list(jobs), "cpu_slots": 4, "hold": "",
            "gpus": [json.loads(nexus.encode_json(gpu)) for gpu in gpus or [makers.gpu(0, uuid="G0")]]}


@pytest.fixture
def bad(world, tmp_path, monkeypatch):
    """(a world with a GPU of its own and the node n1, what is at n1)."""
    there = BadNode(f"{tmp_path}/n1")

    def connect(node):
        node.number = None
        node.socket = there.path

    monkeypatch.setattr(nexus.Node, "connect", connect)
    monkeypatch.setattr(nexus, "RECONNECT_S", (0.01, 0.05))
    w = world(gpus=1)
    w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann")
    w.node = w.service.pool.nodes["n1"]
    live.until(lambda: w.node.trouble is None, "n1")
    yield w, there
    w.node.end()
    there.close()


def told(w, words):
    live.until(lambda: (trouble := w.node.trouble) and words in trouble.message, lambda: w.node.trouble)


def of_gpu(**fields):
    return lambda answer: {**answer, "gpus": [{**answer["gpus"][0], **fields}]}


JOB = json.loads(nexus.encode_json(test_service.remote(makers.job("zzz", remote_id="zzz"), "running", pid=5, started_at=makers.NOW,
                                                       finished_at=makers.NOW, cause="exit", session="5.s", cpu_seconds=1.0)))


def of_job(**fields):
    return lambda answer: {**answer, "jobs": [{**JOB, **fields}]}


def of_attempt(**fields):
    return of_job(attempt={**JOB["attempt"], **fields})


def without(key):
    return lambda answer: {name: fact for name, fact in answer.items() if name != key}


def endless(answer):
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 400000000\r\n\r\n"
    while True:
        yield b" " * 65536


def endless_chunks(answer):
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"10000\r\n" + b" " * 65536 + b"\r\n"


def endless_chunk(answer):
    """http.client would take a size of -1 for all that comes."""
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"
    while True:
        yield b" " * 65536


BAD = [  # reason, what it says, words
    ("a text for a number", of_gpu(memory_total_mib="x"), "memory_total_mib is 'x', and not float | None"),
    ("no number", of_gpu(memory_used_mib=float("nan")), "memory_used_mib is nan"),
    ("no GPU", lambda answer: {**answer, "gpus": [None]}, "gpus is None, and not Gpu"),
    ("half a GPU", lambda answer: {**answer, "gpus": [{"index": 0, "processes": []}]}, "uuid"),
    ("an odd exit code", of_attempt(exit_code="1"), "exit_code is '1'"),
    ("odd sizes", of_job(log_sizes=[1]), "log_sizes is list, and not tuple[int, int]"),
    ("no base64", lambda answer: {**answer, "logs": {"abc": {"stdout": "?"}}}, "base64"),
    ("nothing", lambda answer: b"", "is None, and not Synced"),
    ("no JSON", lambda answer: b"<html>", "n1 answers what no nexus does: Expecting value"),
    ("more than there is room for", endless, "more than 8MB"),
    ("in pieces", endless_chunks, "more than 8MB"),
    ("a chunk of -1", endless_chunk, "it does not speak HTTP"),
    ("an error of odd types", lambda answer: iter_bytes(
        b'HTTP/1.1 500 X\r\nContent-Length: 48\r\n\r\n{"error": ["x"], "message": {"a": 1}, "hint": 1}'), "{'a': 1}"),
    ("no HTTP", lambda answer: iter_bytes(b"SSH-2.0-x\r\n"), "the connection to n1 was lost"),
]


def iter_bytes(*pieces):
    yield from pieces


@pytest.mark.parametrize("reason, change, words", BAD, ids=[case[0] for case in BAD])
def test_a_bad_answer_closes_its_node_alone(bad, reason, change, words):
    w, there = bad
    away = w.add(node="n1")
    w.turn()
    assert w.job(away).current.node == "n1"
    there.change = change
    told(w, words)
    assert there.sent < 2 * nexus.MAX_ANSWER_BYTES
    here, waits = w.add(), w.add(node="n1")
    w.turn(seconds=40)
    w.probe()
    w.turn()
    assert w.service.failure_count == 0 and w.job(here).status == w.job(away).status == "running"
    assert words in w.api(waits)["waiting_for"] and w.api(away)["unknown_since"]
    node, = (node for node in w.service.pool.list_nodes() if node["name"] == "n1")
    assert words in node["trouble"] and not node["is_reachable"]
    check, = (check for check in w.service.views.health()["checks"] if check["name"] == "node n1")
    assert not check["is_ok"] and words in check["reading"]
    there.change = lambda answer: answer
    live.until(lambda: w.node.trouble is None, "n1 to be well again")


def test_an_answer_that_drips_in_is_cut(bad, monkeypatch):
    w, there = bad

    def drip(answer):
        yield b"HTTP/1.1 200 OK\r\n"
        for number in range(10**6):
            yield b"X-%d: 1\r\n" % (number % 9)
            threading.Event().wait(0.01)

    monkeypatch.setattr(nexus, "SYNC_WAIT_S", 0.0)
    monkeypatch.setattr(nexus, "SYNC_TIMEOUT_S", 0.1)
    asked = there.number
    live.until(lambda: there.number > asked + 1, "an exchange with this patience")
    there.change = drip
    live.until(lambda: w.node.trouble is not None, "the end of patience")
    assert w.service.failure_count == 0


@pytest.mark.parametrize("told", [{"refusal": [1]}, {"refusal": "no"}, {"refusal": {"error": 1}}, {"jobs": []}], ids=str)
def test_a_bad_answer_to_an_order_closes_the_node_until_it_is_well(bad, told):
    w, there = bad
    there.change = lambda answer: {**answer, **told} if answer["jobs"] else answer          # to the question with the order
    job_id = w.add(node="n1")
    w.turn()
    live.until(lambda: w.node.trouble, "the fault")
    waits = w.add(node="n1")
    live.until(lambda: w.turn() or "n1 answers what no nexus does: " in w.api(waits)["waiting_for"], "the reason")
    assert w.job(job_id).status == "running" and w.service.failure_count == 0
    there.change = lambda answer: answer
    live.until(lambda: w.node.trouble is None and w.node.heard[nexus.find_order_key(w.job(job_id))], "n1 to be well again")


def test_an_order_that_is_refused(bad):
    w, there = bad
    refusal = {"error": "queue_full", "message": "there are too many", "hint": "wait"}
    there.change = lambda answer: {**answer, "jobs": [], "refusal": refusal} if answer["jobs"] else answer
    job_id = w.add(node="n1")
    w.turn()
    live.until(lambda: w.turn() or w.job(job_id).status == "pending", "its return")
    assert w.node.trouble is None and w.api(job_id)["waiting_for"] == "n1: there are too many"


def test_a_line_that_is_cut_as_an_order_is_given_is_no_fault_of_the_node(bad):
    """The node is well, for health too, as long as it is heard; what was not sent is sent again."""
    w, there = bad
    there.change = lambda answer: (
        iter_bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{") if answer["jobs"] else answer)
    job_id = w.add(node="n1")
    w.turn()
    live.until(lambda: w.node.trouble, "the cut")
    assert "the connection to n1 was lost" in w.node.trouble.message
    check, = (check for check in w.service.views.health()["checks"] if check["name"] == "node n1")
    assert check["is_ok"]
    there.change = lambda answer: answer
    live.until(lambda: w.node.heard[nexus.find_order_key(w.job(job_id))], "the order")


def test_output_that_a_full_disk_refuses_is_asked_for_again(bad, monkeypatch):
    w, _ = bad
    job_id = w.add(node="n1")
    w.turn()
    number = str(nexus.find_order_key(w.job(job_id))[1])

    def come(piece):
        w.node.make_question(None)
        w.node.take_logs({number: {"stdout": piece}})

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for _ in range(3):
            come(b"b")
    assert [line for line in w.lines if "cannot be kept" in line] == [
        f"Node n1: output of jobs there, like {job_id}, cannot be kept ([Errno 28] No space left on device); it is tried again"]
    come(b"b")
    assert (w.folder_of(job_id) / "stdout.log").read_bytes() == b"b"


def test_one_node_whose_news_cannot_be_taken_in_keeps_no_other_waiting(world, monkeypatch):
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())
    w = world(gpus=1)
    for name in ("n1", "n2"):
        w.service.pool.add_node(nexus.NodeConfig(name, "10.0.0.5"), "ann")
    heard = []
    monkeypatch.setattr(w.service.pool, "poll_node", lambda node, found: heard.append(1 / (node.name != "n1")))
    w.turn()
    assert heard == [1] and w.service.failure_count == 1 and "ZeroDivision" in w.service.last_failure

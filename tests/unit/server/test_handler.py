"""HTTP, through sockets: what is a request, and what its answer looks like."""

import contextlib
import errno
import json
import logging
import os
import re
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import PATIENCE_S, until
from stage import ADD, CLOSE, HOST, JSON, Listening, is_error, is_open, split_answers

import nexus


@pytest.fixture(scope="module")
def shared_listening():
    with Listening() as made:
        yield made


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
    ("a head of too many lines", b"GET /nothing HTTP/1.1\r\n" + CLOSE + (b"X: " + b"x" * 7000 + b"\r\n") * 20 + b"\r\n", 400),
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
            line.shutdown(socket.SHUT_WR)
            assert b" 400 " in line.recv(65536)
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


def test_a_request_alone_writes_no_line_however_much_is_logged(listening):
    logging.getLogger(f"test-{os.path.basename(listening.folder)}").setLevel("DEBUG")
    before = len(listening.lines)
    listening.exchange(b"GET /docs?\x1b]0;x" + b"a" * 5000 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n")
    assert not listening.lines[before:]


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

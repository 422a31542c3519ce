"""How many connections somebody may have, through sockets."""

import contextlib
import json
import socket
import time

import pytest
from live import PATIENCE_S, until
from stage import ADD, HOST, JSON, OWNER, Listening, make_form, split_answers

import nexus


@pytest.fixture
def crowded(monkeypatch):
    """A Listening with little room, where 127.0.0.1 is the owner's and other addresses are other machines."""
    for name, limit in {"MAX_UNKNOWN": 3, "MAX_CONNECTIONS": 4, "MAX_USER_CONNECTIONS": 3, "USER_ROOM": 1, "MAX_FORMS": 3, "MAX_BODIES": 2,
                        "ROOM_WAIT_S": 0.3, "LEAST_TIME_S": 0.0}.items():
        monkeypatch.setattr(nexus, name, limit)
    monkeypatch.setattr(nexus, "find_peer_uid", lambda line, address: OWNER if address[0] == "127.0.0.1" else None)
    with Listening() as it, contextlib.ExitStack() as held:
        def send(request, source):
            line = held.enter_context(it.connect(source))
            line.sendall(request)
            return line
        it.send = send
        it.bob, it.ann = (f"Authorization: {it.make_bearer(user)['authorization']}\r\n".encode() for user in ("bob", "ann"))
        yield it


def ask_for(path, head=b""):
    return b"GET %s HTTP/1.1\r\n" % path.encode() + HOST + head + b"\r\n"


def make_form_head(size, head=b""):
    return (b"POST /api/submit HTTP/1.1\r\n" + HOST + head + b"Content-Type: multipart/form-data; boundary=B\r\n"
            b"Content-Length: %d\r\n\r\n" % size)

FOLLOW = "/service/logs?follow=true"

HELD = [  # reason, what somebody unknown sends, to wait then
    ("nothing", b""), ("a head without an end", b"GET / HTTP/1.1\r\nHost: local"),
    ("a form without an end", make_form_head(9999) + b"--B\r\n"),
    ("a large form without an end", make_form_head(9999999) + b"--B\r\n"),
    ("a request, and reads nothing", ask_for("/docs")),
    ("a wrong token", ask_for("/queue", b"Authorization: Bearer x\r\n")),
    ("a body for another call", ask_for("/queue", b"Content-Length: 9999\r\n")),
]


@pytest.mark.parametrize("reason, request_bytes", HELD, ids=[case[0] for case in HELD])
def test_who_is_not_known_takes_nobodys_room(crowded, reason, request_bytes):
    for number in range(12):
        crowded.send(request_bytes, f"127.0.0.{2 + number % 2}")
    for source, head in (("127.0.0.4", crowded.bob), ("127.0.0.5", crowded.ann), ("127.0.0.1", b"")):
        assert crowded.send(ask_for("/queue", head), source).recv(100).startswith(b"HTTP/1.1 200"), source
    form = make_form('token: "secret-of-bob"')
    assert crowded.send(make_form_head(len(form)) + form, "127.0.0.4").recv(100).startswith(b"HTTP/1.1 200")
    assert len(crowded.server.connections.unknown) <= nexus.MAX_UNKNOWN + nexus.MAX_FORMS and not crowded.service.failure_count


def test_who_opens_connections_too_fast_is_refused_and_others_are_not(crowded, monkeypatch):
    monkeypatch.setattr(nexus, "LEAST_TIME_S", PATIENCE_S)
    lines = [crowded.send(b"", "127.0.0.2") for _ in range(5)]
    assert [line.recv(1) for line in lines[3:]] == [b"", b""]
    assert crowded.send(ask_for("/queue", crowded.bob), "127.0.0.3").recv(100)[9:12] == b"200"
    assert lines[0].recv(1) == b"", "it gave way"

DRIPS = [  # reason, the limits of time, what comes at first, and then byte by byte
    ("a head", {"UNKNOWN_TIMEOUT_S": 0.5}, b"GET / HTTP/1.1\r\n"),
    ("a form", {"UNKNOWN_TIMEOUT_S": 0.5}, make_form_head(9999)),
    ("a large form", {"UNKNOWN_TIMEOUT_S": 0.5}, make_form_head(9999999)),
    ("a body that is not wanted", {"REQUEST_TIMEOUT_S": 0.5}, b"POST /nothing HTTP/1.1\r\n" + HOST + b"Content-Length: 9999\r\n\r\n"),
]


@pytest.mark.parametrize("reason, limits, first", DRIPS, ids=[case[0] for case in DRIPS])
def test_a_trickle_of_somebody_unknown_has_one_limit_of_time(crowded, monkeypatch, reason, limits, first):
    for name, limit in limits.items():
        monkeypatch.setattr(nexus, name, limit)
    line, began = crowded.send(first, "127.0.0.2"), time.monotonic()
    line.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while crowded.count_open() or time.monotonic() < began + 0.3:
            assert time.monotonic() < began + 20, "it is still waited for"
            line.sendall(b"x")
            with contextlib.suppress(socket.timeout):
                line.recv(1000)
    until(lambda: not crowded.count_open(), "its end")
    assert not crowded.service.failure_count


def test_a_user_leaves_room_for_others_and_the_owner(crowded):
    follow = {}
    for who, head in (("bob", crowded.bob), ("ann", crowded.ann)):
        answer = crowded.exchange(b"POST /queue HTTP/1.1\r\n" + HOST + head + JSON + b"Content-Length: %d\r\n\r\n" % len(ADD) + ADD)
        follow[who] = ask_for(f"/jobs/{json.loads(split_answers(answer)[0][2])['id']}/logs?follow=true", head)

    def begin(who, source):
        line = crowded.send(follow[who], source)
        return line, line.recv(4096)

    assert [begin("bob", "127.0.0.2")[1][9:12] for _ in range(3)] == [b"200"] * 3
    line, answer = begin("bob", "127.0.0.3")
    assert answer[9:12] == b"503" and b"bob has as many connections" in answer + line.recv(4096), "more than one user's share"
    ann = [begin("ann", "127.0.0.2") for _ in range(2)]
    assert [answer[9:12] for _, answer in ann] == [b"200", b"503"], "all is taken"
    assert begin("ann", "127.0.0.2")[1][9:12] == b"503"
    ann[0][0].close()
    until(lambda: len(crowded.server.connections.users) == 3, "an end")
    assert begin("ann", "127.0.0.2")[1][9:12] == b"200", "each user has some room of its own"
    owners = [crowded.send(ask_for(FOLLOW), "127.0.0.1").recv(100)[9:12] for _ in range(5)]
    assert owners == [b"200"] * 4 + [b"503"]


def test_large_forms_of_somebody_unknown_take_turns(crowded):
    large = make_form(code=b"x" * 70000)
    crowded.send(make_form_head(999999), "127.0.0.2"), crowded.send(make_form_head(999999), "127.0.0.2")
    until(lambda: len(crowded.server.connections.bodies) == 2, "two that are read")
    rows = [("more from there", "127.0.0.2", b"", large, b"503"), ("a small one from there", "127.0.0.2", b"", make_form(), b"401"),
            ("one from elsewhere", "127.0.0.3", b"", large, b"401"), ("with a token in its head", "127.0.0.2", crowded.bob, large, b"401")]
    for reason, source, head, form, status in rows:
        assert crowded.send(make_form_head(len(form), head) + form, source).recv(100)[9:12] == status, reason


def test_a_waiting_request_has_the_room_that_becomes_free(crowded, monkeypatch):
    monkeypatch.setattr(nexus, "ROOM_WAIT_S", PATIENCE_S)
    lines = []
    for _ in range(4):                                  # one after another: of those unknown there is room for three
        lines.append(crowded.send(ask_for("/service/logs?follow=true"), "127.0.0.1"))
        assert lines[-1].recv(100)[9:12] == b"200"
    waiting = crowded.send(ask_for("/queue"), "127.0.0.1")
    lines[0].close()
    assert waiting.recv(100)[9:12] == b"200"

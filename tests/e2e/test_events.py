"""GET /events: resumed without a gap from any point, and a client that is slow or gone costs nothing."""

import contextlib
import itertools
import json
import os
import socket
import threading
import time

import live
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server import Bench, Listening

import nexus


def parse_events(text):
    """[(id, type, data)] as a browser reads them (https://html.spec.whatwg.org/multipage/server-sent-events.html), and the last id."""
    found, last, kind, data = [], None, "message", []
    for line in text.split("\n"):
        name, _, fact = line.partition(": ")
        if not line:
            if data:
                found.append((last, kind, json.loads("\n".join(data))))
            kind, data = "message", []
        elif name == "id":
            last = int(fact)
        elif name == "event":
            kind = fact
        elif name == "data":
            data.append(fact)
    return found, last


class Follower:
    """A client that may be cut off at any moment and comes back as browsers do, or by `since`."""

    def __init__(self, bench):
        self.bench, self.seen, self.resets, self.last, self.stream = bench, [], 0, None, None

    def connect(self, by_header=True):
        last = None if self.last is None else str(self.last)
        response = self.bench.respond("GET", "/events", headers={"last-event-id": last} if by_header and last else {},
                                      query={} if by_header or not last else {"since": last})
        assert response.status == 200
        self.stream = response.stream
        self.take(next(self.stream))

    def take(self, piece):
        found, last = parse_events(piece.decode())
        self.last = self.last if last is None else last
        self.resets += sum(kind == "reset" for _, kind, _ in found)
        self.seen += [data["n"] for _, kind, data in found if kind == "queue"]

    def read_all(self):
        while self.last < self.bench.store.events.next_number - 1:
            self.take(next(self.stream))


@pytest.fixture(scope="module")
def bench():
    with Bench() as made:
        yield made


def renew(bench, kept=5000):
    """Events anew, from number 1,000,000 on."""
    bench.store.events = nexus.EventLog(10**6, kept)
    return bench.store.events


steps = st.lists(st.one_of(st.tuples(st.just("publish"), st.integers(1, 6)), st.tuples(st.just("read"), st.just(0)),
                           st.tuples(st.just("cut"), st.booleans())), max_size=30)


@given(steps=steps, kept=st.sampled_from([3, 10, 5000]))
@settings(max_examples=200)
def test_resumed_from_any_point_nothing_is_missed_or_told_twice(bench, steps, kept):
    events = renew(bench, kept)
    numbers = itertools.count()
    follower = Follower(bench)
    follower.connect()
    for step, fact in steps:
        if step == "publish":
            events.publish([("queue", {"n": next(numbers)}) for _ in range(fact)])
        elif step == "cut":
            follower.connect(by_header=fact)
        else:
            follower.read_all()
    follower.read_all()
    everything = list(range(next(numbers)))
    assert follower.seen == sorted(set(follower.seen)), "in order, none twice"
    if not follower.resets:
        assert follower.seen == everything
    else:
        assert kept < len(everything) and follower.seen[-min(kept, len(follower.seen)):] == everything[-min(kept, len(follower.seen)):]
    if kept == 5000:
        assert not follower.resets
    seen = follower.resets
    events.publish([("queue", {"n": next(numbers)})])
    follower.connect()
    follower.read_all()
    assert follower.resets == seen, "told once, not at each return"


@given(st.text(st.characters(max_codepoint=255), max_size=20).filter(lambda text: not text.isdecimal()) | st.just("9" * 19))
def test_a_number_that_is_none_is_refused(bench, text):
    assert bench.ask("GET", "/events", headers={"last-event-id": text})[0] == 400
    assert bench.ask("GET", "/events", query={"since": text})[0] == 400


@pytest.mark.parametrize("since", [0, 999, 2 * 10**6, 10**18 - 1])
def test_a_number_of_another_time_brings_a_reset_once(bench, since):
    events = renew(bench)
    events.publish([("queue", {"n": 1})])
    follower = Follower(bench)
    follower.last = since
    follower.connect()
    follower.take(next(follower.stream))
    assert follower.resets == 1 and follower.last == events.next_number - 1
    follower.connect()
    events.publish([("queue", {"n": 2})])
    follower.read_all()
    assert follower.resets == 1 and follower.seen[-1] == 2


# Through sockets


def open_stream(port, since=None, receive_buffer=None):
    line = socket.socket()
    if receive_buffer:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    line.settimeout(live.PATIENCE_S)
    line.connect(("127.0.0.1", port))
    line.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n" + (b"Last-Event-ID: %d\r\n" % since if since else b"") + b"\r\n")
    return line


def test_a_client_that_does_not_read_delays_nobody_and_is_dropped(monkeypatch):
    monkeypatch.setattr(nexus, "IDLE_TIMEOUT_S", 1000.0)
    with Listening() as listening:
        before = set(threading.enumerate())

        def publish():
            for number in range(2000):              # 10 MB: more than the kernel takes in for it
                listening.store.events.publish([("queue", {"n": number, "text": "x" * 5000})])

        def read_more(line):
            piece = line.recv(1 << 20)
            assert piece, "the quick one was dropped"
            return piece

        slow, quick = open_stream(listening.port, receive_buffer=2048), open_stream(listening.port)
        assert quick.recv(65536).startswith(b"HTTP/1.1 200")
        live.until(lambda: len(set(threading.enumerate()) - before) == 2, "their threads")
        began, received = time.monotonic(), b""
        publish()
        while nexus.encode_json({"n": 1999})[:-1].encode() not in received[-200000:]:
            received += read_more(quick)
        assert time.monotonic() - began < nexus.IDLE_TIMEOUT_S, "the slow one is waited for"
        monkeypatch.setattr(nexus, "IDLE_TIMEOUT_S", 1.0)
        others = set(threading.enumerate())
        dropped = open_stream(listening.port, receive_buffer=2048)
        thread = live.until(lambda: set(threading.enumerate()) - others, "the next slow one's thread").pop()
        live.until(lambda: not thread.is_alive() or publish(), "the end of the slow one's thread")
        listening.store.events.publish([("queue", {"n": "later"})])
        while b'"later"' not in received[-1000:]:
            received += read_more(quick)
        assert listening.service.failure_count == 0 and len(listening.store.events.items) <= 5000
        for line in (slow, quick, dropped):
            line.close()
        live.until(lambda: not set(threading.enumerate()) - before, "the end of all")


def count_of(box):
    """(descriptors, threads) of the service."""
    pid = box.pid()
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.smoke
def test_two_hundred_clients_that_go_leave_nothing():
    with live.Box(gpus=1) as box:
        box.add("true", gpus=0)
        live.until(lambda: not box.status()["running_jobs"] and not box.status()["queued_jobs"], "quiet")
        time.sleep(0.5)
        descriptors, threads = count_of(box)
        lines = [open_stream(box.port) for _ in range(200)]
        for line in lines:
            assert line.recv(65536).startswith(b"HTTP/1.1 200")
        assert count_of(box)[1] > 200
        box.wait(box.add("true", gpus=0), "completed")      # they are told, and the queue goes on
        for number, line in enumerate(lines):   # closed, cut off, or only half closed
            if number % 3 == 1:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_WR) if number % 3 == 2 else line.close()
        live.until(lambda: count_of(box)[0] <= descriptors + 3 and count_of(box)[1] <= threads + 3,
                   lambda: f"descriptors and threads as before, {(descriptors, threads)}: {count_of(box)}")
        for line in lines:
            line.close()
        assert box.ask("GET", "/health")["is_healthy"]


@pytest.mark.smoke
def test_over_a_restart_the_numbers_grow_and_a_reset_is_told():
    with live.Box(gpus=1) as box:
        def read(line, is_enough):
            text = ""
            while not is_enough(parse_events(text)[0]):
                text += line.recv(65536).decode().replace("\r\n", "\n")
            return parse_events(text)

        line = open_stream(box.port)
        box.add("true", gpus=0)
        found, last = read(line, lambda events: any(kind == "job" and data["status"] == "completed" for _, kind, data in events))
        line.close()
        with open_stream(box.port, since=last) as again:            # the same service: nothing was missed
            job_id = box.add("true", gpus=0)
            events, _ = read(again, lambda events: any(kind == "job" and data["status"] == "completed" for _, kind, data in events))
            assert {data["id"] for _, kind, data in events if kind == "job"} == {job_id} and "reset" not in [kind for _, kind, _ in events]
        box.kill_service()
        box.await_service()
        with open_stream(box.port, since=last) as again:
            events, new = read(again, lambda events: "reset" in [kind for _, kind, _ in events])
            assert new >= last and all(number > found[0][0] for number, _, _ in events)

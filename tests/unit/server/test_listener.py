"""Connections, through sockets: they come, go, or stay without reading."""

import contextlib
import os
import pathlib
import socket
import threading
import time

import pytest
from live import PATIENCE_S, make_certificate, until
from stage import HOST, Bench, Listening

import nexus


def test_a_connection_that_is_slow_to_accept_holds_up_no_other(listening, monkeypatch):
    """Each step of it waits for the interpreter, beside requests that take long."""
    going_on, admit = threading.Event(), listening.server.connections.admit

    def admit_late(line, source):
        return (line.getpeername()[0] != "127.0.0.2" or going_on.wait(PATIENCE_S)) and admit(line, source)

    monkeypatch.setattr(listening.server.connections, "admit", admit_late)
    with listening.connect("127.0.0.2"):
        assert listening.exchange(b"GET /queue HTTP/1.1\r\n" + HOST + b"\r\n").startswith(b"HTTP/1.1 200")
        assert not going_on.is_set()
        going_on.set()


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
    assert listening.api.search_limit.searches == set() and listening.service.failure_count == 0


def test_a_client_that_does_not_read_delays_nobody_and_is_dropped(monkeypatch):
    monkeypatch.setattr(nexus, "IDLE_TIMEOUT_S", 2.0)
    with Listening() as it, socket.socket() as slow:
        job_id = it.add()
        folder = os.path.join(it.layout.log_dir, f"job_{job_id}")
        os.mkdir(folder)
        pathlib.Path(folder, "stdout.log").write_bytes(b"x" * 99999 + b"\n")
        with open(os.path.join(folder, "stdout.log"), "ab") as file:
            for _ in range(80):                 # 8 MB: more than the kernel takes in for it
                file.write(b"x" * 99999 + b"\n")
        it.become(job_id, "running", log_dir=folder)
        request = f"GET /jobs/{job_id}/logs HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
        before = set(threading.enumerate())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", it.port))
        slow.sendall(request)
        until(lambda: set(threading.enumerate()) - before, "its thread")
        assert len(it.exchange(request).partition(b"\r\n\r\n")[2]) == 81 * 100000
        until(lambda: not set(threading.enumerate()) - before, "the end of the slow one's thread")
        assert it.service.failure_count == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "999.1.1.1", "::ffff:x", "ü" * 70, "x" * 100])
def test_an_address_that_is_not_ours_is_a_usage_error(host):
    with Bench() as bench, pytest.raises(nexus.NexusError) as raised:
        nexus.Server(bench.api, host, 6234)
    assert raised.value.kind == "usage" and raised.value.hint


def test_a_handshake_has_the_same_limit_of_time(tmp_path, monkeypatch):
    monkeypatch.setattr(nexus, "UNKNOWN_TIMEOUT_S", 0.5)
    cert, key = make_certificate(tmp_path)
    with Listening(tls_cert=str(cert), tls_key=str(key)) as it, it.connect() as line:
        line.sendall(b"\x16\x03\x01\x02\x00\x01")
        until(lambda: it.count_open() == 1, "its beginning")
        until(lambda: not it.count_open(), "its end")
        assert not it.service.failure_count


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
        most = nexus.ACCEPTERS * (2 + (time.monotonic() - began) / nexus.ACCEPT_PAUSE_S)
        assert len(pauses) < most, "each thread that accepts waits for a free one, and not at full speed"
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


def test_sockets_are_offered_to_each_who_asks(tmp_path):
    """The first may be a service that a former supervisor has just started, and that ends as nobody wants it."""
    disk, layout = nexus.Disk(), nexus.make_layout(str(tmp_path), nexus.Config())
    listener = nexus.listen_on("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with nexus.offer_sockets(disk, layout, {"127.0.0.1": listener}):
        with socket.socket(socket.AF_UNIX) as gone:             # one that is killed before it gets an answer
            gone.connect(nexus.open_socket_path(layout.offer_file)[0])
        for _ in range(2):
            [(address, taken)] = nexus.take_offered(disk, layout, port).items()
            assert (address, taken.getsockname()[1]) == ("127.0.0.1", port)
            taken.close()
    assert nexus.take_offered(disk, layout, port) == {}

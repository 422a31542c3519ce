"""The whole service, with curl, other users of the machine, and their connections."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from console import Home
from live import PATIENCE_S, free_port, listener, until
from stage import CLOSE, HOST, JSON, OWNER, STRANGER, is_error, is_open

import nexus

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
    with Home(is_quick=True, cpu_slots=20, kill_grace_seconds=1) as made:
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
    status, text = curl(home, f"/jobs/{job_id}/logs?follow=true")
    assert status == 200 and sorted(text.split()) == ["one", "three", "two"], "all was written within a tenth of a second: any order"
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
    for number, line in enumerate(lines):       # closed, cut off, or half closed before
        if number % 3 == 1:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        with contextlib.suppress(OSError):
            if number % 3 == 2:
                line.shutdown(socket.SHUT_WR)
            line.close()
    until(lambda: all(now <= then + 3 for now, then in zip(count(), before)), lambda: f"as before, {before}: {count()}")
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


def start_stranger(home, code, *words, uid=STRANGER, host="127.0.0.1"):
    family = "socket.AF_INET6" if ":" in host else "socket.AF_INET"
    return subprocess.Popen([sys.executable, "-c", BY_STRANGER + code, str(uid), family, repr(host), str(home.port), *words],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


HALF_CLOSED = [  # reason, method, path, status, how the reply ends
    ("a reply at once", "GET", "/queue", 200, b"]\n"), ("a change", "POST", "/queue", 200, b"}\n"),
    ("a reply that is waited for", "GET", "/jobs/{}?wait=60", 200, b"}\n"),
    ("a log that is followed", "GET", "/jobs/{}/logs?follow=true", 200, b"the end\n"),
]


def exchange_half_closed(line, request):
    """Send all, say that nothing more comes, as `printf … | nc -N` does, and read what comes back."""
    with line:
        line.settimeout(PATIENCE_S)
        line.sendall(request)
        line.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: line.recv(65536), b""))


@pytest.mark.parametrize("family", ["127.0.0.1", "::1", "api.sock"])
def test_who_sends_nothing_more_but_reads_is_served(home, family):
    body = b'{"command": "true"}'
    for reason, method, path, status, end in HALF_CLOSED:
        job_id = add_by_curl(home, "sleep 0.3; echo the end") if "{}" in path else ""
        content = body if method == "POST" else b""
        request = (f"{method} {path.format(job_id)} HTTP/1.0\r\n".encode() + HOST + JSON
                   + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        if family == "api.sock":
            line = socket.socket(socket.AF_UNIX)
            line.connect(os.path.join(home.path, "api.sock"))
        else:
            line = socket.create_connection((family, home.port))
        answer = exchange_half_closed(line, request)
        assert answer.startswith(b"HTTP/1.1 %d" % status) and answer.endswith(end), (reason, answer)


BY_HALF = """
line = connect()
line.sendall(b"GET /queue HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n")
line.shutdown(socket.SHUT_WR)
say(line.recv(100)[9:12].decode())
"""


@needs_root
def test_another_user_who_sends_nothing_more_is_refused(home):
    assert start_stranger(home, BY_HALF).communicate(timeout=60)[0] == "401\n"


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
    with Home(is_quick=True, **({"host": host} if host else {})) as made:
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

SEND_AND_GO = """
body = b'{"command": "id", "gpus": 0}'
how, lines = sys.argv[5], []
for _ in range(5):
    line = connect()
    line.sendall(b"POST /queue HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
                 b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    say(line.getsockname()[1])
    if how == "reset": line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)      # a second after a close the port is free
    if how == "half closed": line.shutdown(socket.SHUT_WR)
    else: line.close()
    lines.append(line)
"""


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("how", ["reset", "closed", "half closed"])
def test_what_somebody_sent_who_has_gone_is_not_sent_by_who_has_the_port_now(home, host, how):
    """Linux still delivers what came before an end; meanwhile the owner calls from the same port."""
    with contextlib.ExitStack() as held:
        before, pid = home.client().jobs(), home.service["pid"]

        def call_from(port):
            with contextlib.suppress(OSError):              # not free yet
                return held.enter_context(socket.create_connection((host, home.port), 60, (host, port)))

        os.kill(pid, signal.SIGSTOP)
        try:
            stranger = start_stranger(home, SEND_AND_GO, how, host=host)
            ports = list(map(int, stranger.communicate(timeout=60)[0].split()))
            lines = [until(lambda port=port: call_from(port), "the port") for port in ports]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert lines and all(map(is_open, lines)), "the owner's own are answered"
        assert len(ports) == 5 and {job["id"] for job in home.client().jobs()} == {job["id"] for job in before}


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

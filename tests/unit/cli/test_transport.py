"""What comes back from a service, or from what is none."""

import contextlib
import http.server
import threading

import pytest
from console import call_main
from live import free_port

import nexus


class Stranger(http.server.BaseHTTPRequestHandler):
    """What answers at NEXUS_URL: each request with `server.answer`."""

    def handle(self):
        self.request.recv(65536)
        with contextlib.suppress(OSError):
            self.request.sendall(self.server.answer)


@pytest.fixture
def stranger():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    server.daemon_threads = True
    server.environ = {"NEXUS_URL": f"http://127.0.0.1:{server.server_address[1]}"}
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()

OK = b"HTTP/1.0 200 OK\r\n\r\n"

STRANGE = [("no HTTP", b"220 smtp.example.org\r\n\r\n"), ("a list", OK + b"[1]"), ("null", OK + b"null"), ("deep", OK + b"[" * 100000),
           ("types", OK + b'{"queued_jobs": "x", "gpu_status": [], "running_jobs": [], "nodes": [], "is_paused": "x", "hints": 5}'),
           ("rows", OK + b'[{"id": [], "status": {}, "exit_code": "x"}]')]


@pytest.mark.parametrize("reason, answer", STRANGE, ids=[case[0] for case in STRANGE])
def test_an_answer_that_is_none_of_nexus_is_no_fault_of_nexus(stranger, reason, answer):
    stranger.answer = answer
    for words in (["status"], ["add", "true"], ["wait", "abc"], ["health"], ["jobs"], ["queue"], ["complete", "kill", ""],
                  ["logs", "abc"], ["show", "abc"], ["metrics"], ["retry", "--failed"], ["kill", "0"]):
        done = call_main(*words, **stranger.environ)
        assert "fault of nexus itself" not in done.err and "Traceback" not in done.err and done.code in (0, 3, 6), (words, done)
        assert done.code != 6 or "not nexus" in done.err or "failed" in done.err or "lost" in done.err, (words, done)


@pytest.mark.parametrize("kind", ['["usage"]', '{"usage": 1}', "5", "null", '"no-such-kind"'])
def test_an_error_of_no_kind(stranger, kind):
    stranger.answer = b'HTTP/1.0 400 x\r\n\r\n{"error": %s, "message": {"a": 1}, "hint": [2]}' % kind.encode()
    for words in (["status"], ["logs", "abc"]):
        done = call_main(*words, **stranger.environ)
        assert done.code == 1 and "{'a': 1}" in done.err and "Traceback" not in done.err, done


def test_a_refused_connection_at_nexus_url_is_told_at_once():
    client, tried = nexus.Client.find({"NEXUS_URL": f"http://127.0.0.1:{free_port()}"}), []
    connect = client.connect
    client.connect = lambda: tried.append(True) or connect()
    with pytest.raises(nexus.NexusError, match="refused") as raised:
        client.status()
    assert raised.value.kind == "unavailable" and "NEXUS_URL" in raised.value.hint and len(tried) == 1


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)

HEAD, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

CUT, NO_HTTP = "was lost (it closed the connection before its answer was complete)", "is not nexus, or another version of it: it does not"

ANSWERS = [  # reason, what comes until the end, its body as JSON, or words of the error
    ("a length", HEAD + b"Content-Length: 2\r\n\r\n123", 12), ("no length", HEAD + b"\r\n123", 123),
    ("chunks", CHUNKED + chunked(b"[1,", b" " * 100000 + b"2]", b""), [1, 2]), ("a body of none", b"HTTP/1.0 204 X\r\n\r\n", None),
    ("nothing", b"", CUT), ("half a head", HEAD, CUT), ("half a line", HEAD + b"X: " + b"a" * 70000, CUT),
    ("a length that is not reached", HEAD + b"Content-Length: 4\r\n\r\n123", CUT),
    ("no last chunk", CHUNKED + chunked(b"12"), CUT), ("half a chunk", CHUNKED + b"5\r\n12", CUT),
    ("no HTTP", b"220 smtp\r\n\r\n", NO_HTTP), ("a head without end", HEAD + b"X: a\r\n" * 20000, NO_HTTP),
    ("an odd length", HEAD + b"Content-Length: x\r\n\r\n", "is not nexus"),
    ("an odd chunk", CHUNKED + b"xy\r\n", NO_HTTP), ("a chunk of -1", CHUNKED + b"-1\r\n", NO_HTTP),
]


@pytest.mark.parametrize("reason, comes, expected", ANSWERS, ids=[case[0] for case in ANSWERS])
def test_an_answer_is_read_whole_or_not_at_all(stranger, reason, comes, expected):
    stranger.answer, client = comes, nexus.Client.find(stranger.environ)
    if not isinstance(expected, str):
        assert client.ask("POST", "/x", {}) == expected
    else:
        with pytest.raises(nexus.NexusError) as raised:
            client.ask("POST", "/x", {})
        assert raised.value.kind == "unavailable" and expected in raised.value.message, raised.value.message

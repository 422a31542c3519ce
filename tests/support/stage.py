"""An Api over a Service that does not run, so that jobs change only where a test changes them; with sockets, or without.

    def test_it(bench):
        job_id = bench.add(command="true")              # POST /queue
        bench.become(job_id, "running", pid=1)
        status, answer = bench.ask("DELETE", f"/queue/{job_id}")
        assert status == 409 and is_error(answer)

`listening` is a Bench whose server listens at `port`; what comes back on a connection is read by split_answers().
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from unittest import mock

from live import PATIENCE_S, free_port
from makers import config as make_config

import nexus

TOKEN = "secret-token-of-the-owner"
OWNER = os.geteuid()
STRANGER, OTHER_STRANGER = 65534, 12345
BEARER, WRONG = {"authorization": f"Bearer {TOKEN}"}, {"authorization": "Bearer secret-token-of-the-ownes"}
BOB, ANN = {"authorization": "Bearer secret-of-bob"}, {"authorization": "Bearer secret-of-ann"}
HOST = b"Host: 127.0.0.1\r\n"
CLOSE = HOST + b"Connection: close\r\n"
ADD = b'{"command": "true", "gpus": 0}'
JSON = b"Content-Type: application/json\r\n"
FORM_TYPE = {"content-type": "multipart/form-data; boundary=B"}
MINE = 'token: "my-secret-token"\n'
ME = nexus.find_user(OWNER)


def make_form(config=MINE, code=b"print()\n"):
    return b"".join(f'--B\r\nContent-Disposition: form-data; name="{name}"; filename="../../x"\r\n\r\n'.encode() + content + b"\r\n"
                    for name, content in (("code", code), ("config_file", config.encode()))) + b"--B--\r\n"


def is_error(answer):
    return (isinstance(answer, dict) and answer.keys() == {"error", "message", "hint"} and answer["error"] in nexus.KINDS
            and all(isinstance(text, str) for text in answer.values()) and bool(answer["message"]))


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


def is_open(line):
    """Whether the other side still listens: it answers a request."""
    try:
        line.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return line.recv(4096).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


class Bench:
    """An Api over a Service that is not run."""

    def __init__(self, **keys):
        self.folder = tempfile.mkdtemp(prefix="nx", dir="/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")
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
        # Where programs are in the first folder of PATH, no process looks for them
        with mock.patch.dict(os.environ, PATH="/usr/bin:/bin"):
            machine = nexus.Machine(self.config, self.layout, disk, self.store.service_id)
            self.service = nexus.Service(self.config, self.layout, self.store, machine, clock, disk, log,
                                         {"HOME": "/root", "SERVICE": "1"})
            self.service.probe()
        self.service.gpu_watch.take_in_observation()
        self.api = nexus.Api(self.service, TOKEN)
        # A thread that follows a node would call ssh, and outlive the test
        self.following = mock.patch.object(nexus.Node, "follow", lambda node: node.follower.end())

    def __enter__(self):
        self.following.start()
        return self

    def __exit__(self, *_):
        for node in self.service.pool.nodes.values():
            node.end()
            for worker in (node.follower, node.unpushed.worker):
                worker.thread.join()
        self.following.stop()
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
            self.service.clock.new_job_id = lambda *_: id
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


class Listening(Bench):
    """A Bench that listens."""

    def __init__(self, **keys):
        super().__init__(**keys)
        self.port = free_port()
        self.server = nexus.Server(self.api, self.config.service.host, self.port, nexus.load_tls(nexus.DISK, self.config.service))
        self.server.serve()

    def __exit__(self, *_):
        ending = [threading.Thread(target=each.shutdown) for each in self.server.listeners]
        for thread in ending:
            thread.start()
        for each in self.server.listeners:              # otherwise each looks only every half second whether it is to end
            with contextlib.suppress(OSError):          # several have one socket
                each.socket.shutdown(socket.SHUT_RDWR)
        for thread, each in zip(ending, self.server.listeners):
            thread.join()
            each.server_close()
        self.service.is_stopping = True
        super().__exit__()

    def count_open(self):
        return len(self.server.connections.unknown) + len(self.server.connections.users)

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

"""Client as the Python API, and what it does when the service goes away or is not ours."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import threading
import time

import pytest
from console import Home
from live import PATIENCE_S, free_port, listener, until

import nexus


def wait_out(client, command="true", **options):
    job_id = client.add(command, gpus=0, **options)
    return client.wait([job_id])[0]


def test_the_python_api(home):
    client = home.client()
    job_id = client.add("echo out; echo err >&2; exit 3", gpus=0, name="first", cwd="/tmp", env={"A": "1"})
    ended = client.wait([job_id])
    assert [(job["id"], job["status"], job["exit_code"], job["cause"]) for job in ended] == [(job_id, "failed", 3, "exit")]
    assert client.job(job_id)["name"] == "first"
    assert b"".join(client.logs(job_id)) == b"out\nerr\n"
    assert b"".join(client.logs(job_id, stream="stderr")) == b"err\n"
    assert b"".join(client.logs(job_id, follow=True, stream="stdout", tail=1)) == b"out\n"
    [again] = client.retry(ids=[job_id])
    assert again != job_id and client.wait([again])[0]["exit_code"] == 3
    assert {job_id, again} <= {job["id"] for job in client.jobs(status="failed")} and client.jobs(user="nobody-we-know") == []
    assert client.status()["queued_jobs"] == 0 and client.queue() == [] and client.health()["is_healthy"]
    assert b"Service started" in b"".join(client.logs("service"))


def test_the_queue_by_python(home):
    client = home.client()
    client.pause()
    ids = client.add_all(["echo a", "echo b", "echo c"], gpus=0, group="a b")
    client.edit(ids[2], position=0)
    client.edit(ids[0], priority=2)
    assert [job["id"] for job in client.queue()] == [ids[2], ids[1], ids[0]]
    client.cancel(ids=ids[1:2])
    assert client.job(ids[1])["status"] == "cancelled"
    client.pause(gpu=1)
    assert [gpu["is_paused"] for gpu in client.status()["gpu_status"]] == [False, True]
    client.resume(gpu=1)
    client.pause(group="a b")
    client.resume()
    assert until(lambda: "held" in client.why(ids[0])["why"]) and client.queue(group="x") == []
    client.resume(group="a b")
    seen = []
    ended = client.wait([ids[0], ids[2]], on_end=seen.append)
    assert [job["id"] for job in ended] == [ids[0], ids[2]], "in the order asked for"
    assert sorted(job["id"] for job in seen) == sorted([ids[0], ids[2]])


def test_paths_are_taken_and_a_text_is_one_id(home):
    client = home.client()
    folder = pathlib.Path(home.top)
    job_id = client.add("pwd; echo $PLACE", gpus=0, cwd=folder, env={"PLACE": folder / "x"})
    [job] = client.wait(job_id)
    assert (job["id"], job["cwd"], b"".join(client.logs(job_id))) == (job_id, str(folder), f"{folder}\n{folder}/x\n".encode())
    [alone] = client.add_all("true", gpus=0)
    assert [job["id"] for job in client.wait({alone, job_id})] in ([alone, job_id], [job_id, alone])
    assert [job["id"] for job in client.wait(one for one in (alone, job_id))] == [alone, job_id]

LOOP: dict = {}

LOOP["loop"] = LOOP

FAULTS = [  # reason, what is asked, kind, what it says
    ("no such job to wait for", lambda client: client.wait(["zzz"]), "not_found", "zzz"),
    ("no such log", lambda client: list(client.logs("zzz", follow=True)), "not_found", "zzz"),
    ("an id that is a path", lambda client: client.job("../status"), "not_found", "../status"),
    ("an id that is a query", lambda client: client.job("a?b=c#d"), "not_found", "a?b=c#d"),
    ("an id with a line break", lambda client: client.job("a\r\nX: y"), "not_found", "a  X: y"),
    ("an id that is no text at all", lambda client: client.job("\udcff"), "not_found", "no job"),
    ("an unknown option", lambda client: client.add("true", gpu=1), "usage", "'gpu'"),
    ("one bad of many", lambda client: client.add_all(["true", "\0"]), "usage", "commands[1] must be"),
    ("no such GPU", lambda client: client.pause(gpu=7), "not_found", "7"),
    ("no such group", lambda client: client.pause(group="x y&z=/?"), "not_found", "'x y&z=/?'"),
    ("a set", lambda client: client.add("true", gpu_ids={1}), "usage", "JSON has no form for a set"),
    ("bytes", lambda client: client.add(b"true"), "usage", "a bytes"), ("no command", lambda client: client.add(None), "usage", "command"),
    ("a key that is no text", lambda client: client.add("true", env={(1, 2): "x"}), "usage", "cannot be sent"),
    ("a loop", lambda client: client.add("true", env=LOOP), "usage", "cannot be sent"),
    ("a number for an id", lambda client: client.job(5), "usage", "an id is a text, not 5"),
    ("no id", lambda client: client.why(None), "usage", "an id is a text, not None"),
    ("a number to wait for", lambda client: client.wait(5), "usage", "job_ids must be a text or a list of texts, not 5"),
    ("nothing to wait for", lambda client: client.wait([None]), "usage", "job_ids must be"),
    ("the log of a number", lambda client: list(client.logs(5)), "usage", "an id is a text"),
    ("a tail that is no number", lambda client: list(client.logs("zzz", tail="x")), "usage", "tail"),
    ("a text for a list", lambda client: client.cancel(ids="zzz"), "usage", "ids must be"),
    ("no list of commands", lambda client: client.add_all(7), "usage", "commands must be"),
    ("a status of its own", lambda client: client.jobs(status=object()), "usage", "status"),
    ("no address", lambda client: nexus.Client("gpubox"), "usage", "NEXUS_URL"),
    ("an address that is no text", lambda client: nexus.Client(None), "usage", "NEXUS_URL"),
    ("a token of two lines", lambda client: nexus.Client(client.url, "a\nX: y").status(), "usage", "token"),
]


@pytest.mark.parametrize("reason, ask, kind, says", FAULTS, ids=[case[0] for case in FAULTS])
def test_faults_are_raised_as_the_service_says_them(home, reason, ask, kind, says):
    client = home.client()
    before = len(client.jobs())
    with pytest.raises(nexus.NexusError) as raised:
        ask(client)
    assert raised.value.kind == kind and says in raised.value.message, reason
    assert len(client.jobs()) == before


def test_find_does_not_start_a_service_unless_it_may(bare_home):
    with pytest.raises(nexus.NexusError) as raised:
        nexus.Client.find(bare_home.environ, is_starting=False)
    assert raised.value.kind == "unavailable" and raised.value.hint == "nexus start"
    assert not bare_home.file("service.json").exists()


def test_following_over_a_sigkill_of_the_service_loses_and_repeats_nothing(bare_home):
    client = bare_home.client()
    gate = os.path.join(bare_home.top, "gate")
    job_id = client.add(f"seq 1 5; until [ -e {gate} ]; do sleep 0.05; done; seq 6 10; exit 4", gpus=0)
    pieces = []

    def follow():
        pieces.extend(entry["text"].encode() for entry in client.follow(job_id, "stdout"))
    follower = threading.Thread(target=follow)
    waited = []
    waiter = threading.Thread(target=lambda: waited.extend(bare_home.client().wait([job_id])))
    follower.start()
    waiter.start()
    until(lambda: b"".join(pieces) == b"1\n2\n3\n4\n5\n", "the first half")
    pid = bare_home.kill_service()
    open(gate, "w").close()
    follower.join(60)
    waiter.join(60)
    assert b"".join(pieces) == b"".join(b"%d\n" % number for number in range(1, 11))
    assert [(job["status"], job["exit_code"]) for job in waited] == [("failed", 4)]
    assert bare_home.service["pid"] != pid


def test_following_the_end_over_a_restart_loses_nothing(fresh_home):
    """What is printed while there is no service comes too."""
    client = fresh_home.client()
    gates = [os.path.join(fresh_home.top, name) for name in ("first", "second")]
    wait = "until [ -e {} ]; do sleep 0.02; done"
    job_id = client.add(f"seq 1 5; {wait.format(gates[0])}; seq 6 8; touch {gates[0]}.done; {wait.format(gates[1])}; seq 9 10", gpus=0)
    until(lambda: b"".join(client.logs(job_id)) == b"1\n2\n3\n4\n5\n", "the first lines")
    pieces, streams, open_stream = [], [], client.open_stream

    def note_stream(*words):
        streams.append(open_stream(*words))
        return streams[-1]

    client.open_stream = note_stream
    follower = threading.Thread(target=lambda: pieces.extend(
        entry["text"].encode() for entry in client.follow(job_id, "stdout", 2)))
    follower.start()
    until(lambda: streams, "its first answer")
    assert fresh_home.main("stop").code == 0
    open(gates[0], "w").close()
    until(lambda: os.path.exists(f"{gates[0]}.done"), "the lines of the time without a service")
    fresh_home.client().status()
    open(gates[1], "w").close()
    follower.join(60)
    assert b"".join(pieces) == b"".join(b"%d\n" % number for number in range(4, 11))


def test_waiting_over_a_restart_for_what_is_no_longer_kept():
    with Home(is_quick=True, cpu_slots=20, history_limit=2) as home:
        client = home.client()
        ended, going = client.add("true", gpus=0), client.add("sleep 60", gpus=0)
        seen, answer = [], []
        waiting = threading.Thread(target=lambda: answer.extend(client.wait([ended, going], lambda job: seen.append(job["id"]))))
        waiting.start()
        until(lambda: seen == [ended], "the first to end")
        others = home.client()
        for _ in range(3):
            wait_out(others)
        assert home.main("restart").code == 0
        others = home.client()
        others.cancel(ids=[going])
        waiting.join(60)
        assert [job["id"] for job in answer] == [ended, going] and seen == [ended, going], "each is told once"


def test_adding_while_the_service_is_killed_adds_exactly_once(bare_home):
    client = bare_home.client()
    client.pause()
    added, stop = [], threading.Event()

    def add():
        own = bare_home.client()
        while not stop.is_set():
            added.append(own.add(f"echo {len(added)}", gpus=0))
    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        count = len(added)
        until(lambda count=count: len(added) > count + 20, "jobs")
        bare_home.kill_service()
    count = len(added)
    until(lambda: len(added) > count + 20, "jobs after it is back")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert sorted(job["id"] for job in client.queue()) == sorted(added) and len(set(added)) == len(added)


def test_what_is_silent_is_followed_for_as_long_as_it_takes(home, monkeypatch):
    client = home.client()
    gate = os.path.join(home.top, "gate")
    job_id = client.add(f"echo a; until [ -e {gate} ]; do sleep 0.05; done; echo b", gpus=0)
    until(lambda: b"".join(client.logs(job_id)) == b"a\n", "its first line")
    monkeypatch.setattr(nexus, "ANSWER_TIMEOUT_S", 0.3)
    pieces = []
    follower = threading.Thread(target=lambda: pieces.extend(client.logs(job_id, follow=True)), daemon=True)
    follower.start()
    until(lambda: pieces, "what was there before")
    monkeypatch.undo()
    follower.join(1)                        # longer than the time limit of a reply
    assert pieces == [b"a\n"] and follower.is_alive()
    open(gate, "w").close()
    follower.join(PATIENCE_S)
    assert b"".join(pieces) == b"a\nb\n"
    with nexus.Client(f"http://127.0.0.1:{home.port}").connect() as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "or the end of another machine would never be noticed"


class Wire:
    """A wire to a service's port, which is cut `breaks` times when a request has come, or its answer."""

    def __init__(self, port, is_answer, breaks):
        self.target, self.is_answer, self.breaks, self.port = port, is_answer, breaks, free_port()
        self.server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                line, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.pass_on, args=(line,), daemon=True).start()

    def pass_on(self, line):
        with line, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as service:
            request = line.recv(1 << 20)
            is_cut, self.breaks = self.breaks > 0, self.breaks - 1
            if is_cut and not self.is_answer:
                return
            service.sendall(request)
            while piece := service.recv(1 << 20):
                if is_cut:
                    return
                line.sendall(piece)


@pytest.mark.parametrize("is_answer", [False, True], ids=["the request is lost", "the answer is lost"])
def test_what_may_be_repeated_is_repeated_over_nexus_url(fresh_home, is_answer):
    fresh_home.main("pause")
    token = fresh_home.file("token").read_text().strip()
    wire = Wire(fresh_home.port, is_answer, 0)
    try:
        client = nexus.Client.find({"NEXUS_URL": f"http://127.0.0.1:{wire.port}", "NEXUS_TOKEN": token})
        client.status()                                         # what has replied once is waited for
        wire.breaks = 2
        job_id = client.add("true", gpus=0)
        assert [job["id"] for job in fresh_home.client().queue()] == [job_id], "once"
        for look in (lambda: client.job(job_id), lambda: list(client.logs(job_id)), client.status):
            wire.breaks = 2
            look()
        wire.breaks = 1
        with pytest.raises(nexus.NexusError, match="POST /jobs/cancel") as raised:
            client.cancel(ids=[job_id])
        assert raised.value.hint == "it may have been done or not: look before you repeat it"
        waited = []
        waiter = threading.Thread(target=lambda: waited.extend(client.wait([client.add("true", gpus=0)])))
        waiter.start()
        until(lambda: fresh_home.client().queue(), "what is waited for")
        fresh_home.main("restart")
        fresh_home.main("resume")
        waiter.join(60)
        assert [job["status"] for job in waited] == ["completed"]
    finally:
        wire.server.shutdown(socket.SHUT_RDWR)          # ends accept(), which would go on with another listener of that number
        wire.server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_listener_on_the_port_is_sent_nothing(fresh_home):
    client = fresh_home.client()
    other = free_port()
    text = fresh_home.file("service.json").read_text()                # as of a service that had that port
    fresh_home.file("service.json").write_text(text.replace(f":{fresh_home.port}", f":{other}").replace(f" {fresh_home.port}", f" {other}"))
    with listener(other) as heard:
        client = nexus.Client.find(fresh_home.environ, is_starting=False)
        assert client.url.endswith(f":{other}")
        job_id = client.add("echo $SECRET", env={"SECRET": "x"}, gpus=0)
        assert client.wait([job_id])[0]["status"] == "completed" and client.status() and b"".join(client.logs(job_id)) == b"x\n"
        done = fresh_home.run("add", "--gpus", "0", "echo")
        assert done.code == 0, "the service is asked by its socket, whoever has its port"
        assert heard() == "listens\n"


def test_the_socket_is_its_owners(fresh_home):
    fresh_home.client()
    path = fresh_home.file("api.sock")
    assert path.stat().st_mode & 0o777 == 0o600
    ask = ["curl", "-sS", "--unix-socket", str(path), "http://localhost/status"]
    assert json.loads(subprocess.run(ask, capture_output=True, text=True, timeout=60).stdout)["queued_jobs"] == 0
    if os.geteuid() == 0:                                           # even if he is let through to it
        for folder in (fresh_home.top, *list(path.parents)[:2]):
            os.chmod(folder, 0o755)
        os.chmod(path, 0o666)
        done = subprocess.run(ask, capture_output=True, text=True, timeout=60, preexec_fn=lambda: os.setuid(65534))
        assert json.loads(done.stdout)["error"] == "unauthorized" and nexus.find_user(os.geteuid()) in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_a_port_that_another_user_has_is_named_at_the_start(bare_home, host):
    with listener(bare_home.port, host=host) as heard:
        done = bare_home.run(*(["add", "true"] if host == "127.0.0.1" else ["serve"]))
        assert done.code == 4 and not done.out
        address = "::1" if ":" in host else "127.0.0.1"
        assert f"port {bare_home.port} on {address} is in use by {nexus.find_user(65534)}\n" in done.err and "nexus config edit" in done.err
        assert heard() == "listens\n"
    with contextlib.closing(socket.socket()) as both:           # nothing is kept of the one that was free
        both.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        both.bind(("127.0.0.1", bare_home.port))
        both.listen()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_nexus_url_on_this_machine_sends_nothing_to_whom_it_does_not_name(home):
    port, user = free_port(), nexus.find_user(65534)
    with listener(port) as heard:
        for command in (["status"], ["add", "true"], ["logs", "service"], ["logs", "-f", "abc"], ["wait", "abc"]):
            for url in (f"http://127.0.0.1:{port}", f"http://localhost:{port}", f"http://root@127.0.0.1:{port}"):
                done = home.main(*command, NEXUS_URL=url, NEXUS_TOKEN="secret-token")
                assert done.code == 5 and f"belongs to a program of {user}: nothing was sent" in done.err and f"//{user}@" in done.err, done
        assert home.main("status", NEXUS_URL=f"http://no-such-user@127.0.0.1:{port}").code == 5
        assert heard() == "listens\n"
        with contextlib.suppress(nexus.NexusError):             # but who is named gets it
            nexus.Client.find({"NEXUS_URL": f"http://{user}@127.0.0.1:{port}", "NEXUS_TOKEN": "secret-token"}).status()
        until(lambda: "Bearer secret-token" in heard(), heard)


def find_own_addresses():
    """This machine's that are not loopback, as far as a connection shows them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
        line.connect(("192.0.2.1", 9))
        return [line.getsockname()[0]]
    return []


def name_in_hosts():
    """This machine's name, where it can be looked up."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        return [socket.gethostname()]
    return []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("host", ["LOCALHOST", "0.0.0.0", "0", "[::ffff:127.0.0.1]", "2130706433", "127.0.0.9", *name_in_hosts(),
                                  *find_own_addresses()])
def test_however_this_machine_is_called_another_users_program_is_sent_nothing(host):
    port, user = free_port(), nexus.find_user(65534)
    with listener(port, host="0.0.0.0") as heard:
        with pytest.raises(nexus.NexusError, match=f"belongs to a program of {user}: nothing was sent") as raised:
            nexus.Client.find({"NEXUS_URL": f"http://{host}:{port}", "NEXUS_TOKEN": "secret-token"}).status()
        assert raised.value.kind == "forbidden"
        assert heard() == "listens\n"


def test_nexus_url_and_nexus_token(home):
    home.client()
    token = home.file("token").read_text().strip()
    url = f"http://127.0.0.1:{home.port}"
    away = {"NEXUS_URL": url, "NEXUS_TOKEN": token, "NEXUS_HOME": os.path.join(home.top, "elsewhere")}
    done = home.run("run", "--gpus", "0", "--cwd", "/", "echo over the wire; pwd", **away)
    assert (done.code, done.out) == (0, "over the wire\n/\n"), done
    assert home.run("status", **{**away, "NEXUS_TOKEN": "wrong"}).code == 5
    assert home.run("status", **{**away, "NEXUS_URL": f"http://127.0.0.1:{free_port()}"}).code == 6
    assert not os.path.exists(away["NEXUS_HOME"]), "nothing is started here"
    for command in (["attach", "abc"], ["screens"]):
        done = home.run(*command, **away)
        assert done.code == 2 and "own machine" in done.err


@pytest.mark.parametrize("url", ["127.0.0.1:6234", "ftp://x", "http://", "http://a b", "http://x:99999999", "http://x/path",
                                 "https://u@127.0.0.1", "http://u:p@127.0.0.1"])
def test_an_url_that_is_none(home, url):
    done = home.main("status", NEXUS_URL=url)
    assert done.code == 2 and url in done.err and "http://gpu1:6234" in done.err


def test_a_service_that_is_gone_for_good_is_told_soon(fresh_home, monkeypatch):
    monkeypatch.setattr(nexus, "RETRY_TIMEOUT_S", 0.5)
    client = fresh_home.client()
    fresh_home.main("stop")
    for ask in (client.status, lambda: client.add("true"), lambda: client.cancel(ids=["abc"]), lambda: client.wait(["abc"])):
        began = time.monotonic()
        with pytest.raises(nexus.NexusError) as raised:
            ask()
        assert raised.value.kind == "unavailable" and "nexus" in raised.value.hint + raised.value.message
        assert time.monotonic() - began < PATIENCE_S


def test_stop_through_a_tunnel_sees_the_end(fresh_home):
    """ssh -L accepts each connection, and only then finds that nothing listens."""
    fresh_home.client()
    wire = Wire(fresh_home.port, False, 0)
    try:
        done = fresh_home.run("stop", NEXUS_URL=f"http://127.0.0.1:{wire.port}")
        assert done.code == 0 and "has ended" in done.err, done
    finally:
        wire.server.shutdown(socket.SHUT_RDWR)          # ends accept(), which would go on with another listener of that number
        wire.server.close()

"""Section 16: Client as the Python API, and what it does when the service goes away or is not ours."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from console import Home
from live import free_port, until

import nexus


@pytest.fixture(scope="module")
def home():
    with Home("jobs.cpu_slots = 20\njobs.kill_grace_seconds = 1") as made:
        yield made


@pytest.fixture
def own_home():
    with Home("jobs.cpu_slots = 20") as made:
        yield made


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
    again, = client.retry(job_id)
    assert again != job_id and client.wait([again])[0]["exit_code"] == 3
    assert {job_id, again} <= {job["id"] for job in client.jobs(status="failed")} and client.jobs(user="nobody-we-know") == []
    assert client.status()["queued_jobs"] == 0 and client.queue() == [] and client.health()["is_healthy"]
    assert b"Service started" in b"".join(client.logs("service"))


def test_the_queue_by_python(own_home):
    client = own_home.client()
    client.pause()
    ids = client.add_all(["echo a", "echo b", "echo c"], gpus=0)
    assert [job["id"] for job in client.queue()] == ids
    client.move(ids[2], position=0)
    client.move(ids[0], priority=2)
    assert [job["id"] for job in client.queue()] == [ids[2], ids[1], ids[0]]
    client.remove(ids[1])
    assert client.job(ids[1])["status"] == "cancelled"
    client.pause(gpu=1)
    assert [gpu["is_paused"] for gpu in client.status()["gpu_status"]] == [False, True]
    client.resume(gpu=1)
    client.resume()
    seen = []
    ended = client.wait([ids[0], ids[2]], on_end=seen.append)
    assert [job["id"] for job in ended] == [ids[0], ids[2]], "in the order asked for"
    assert sorted(job["id"] for job in seen) == sorted([ids[0], ids[2]])
    held = client.add("true", gpus=0, group="a b", after=[ids[0]])
    assert client.wait([held])[0]["status"] == "completed" and [job["id"] for job in client.jobs(group="a b")] == [held]
    client.pause(group="a b")
    other = client.add("true", gpus=0, group="a b")
    assert until(lambda: "held" in client.why(other)["why"])
    assert client.queue(group="a b")[0]["id"] == other and client.queue(group="x") == []
    client.resume(group="a b")
    assert client.wait([other])[0]["exit_code"] == 0
    running = client.add("sleep 60", gpus=0)
    until(lambda: client.job(running)["status"] == "running")
    client.kill(running)
    assert client.wait([running])[0]["cause"] == "killed"


FAULTS = [  # reason, what is asked, kind, what it says
    ("no such job", lambda client: client.job("zzz"), "not_found", "zzz"),
    ("no such job to wait for", lambda client: client.wait(["zzz"]), "not_found", "zzz"),
    ("no such log", lambda client: list(client.logs("zzz", follow=True)), "not_found", "zzz"),
    ("an id that is a path", lambda client: client.job("../status"), "not_found", "../status"),
    ("an id that is a query", lambda client: client.job("a?b=c#d"), "not_found", "a?b=c#d"),
    ("an empty id", lambda client: client.job(""), "not_found", "no job"),
    ("an id with a line break", lambda client: client.job("a\r\nX: y"), "not_found", "a  X: y"),
    ("an id that is no text at all", lambda client: client.job("\udcff"), "not_found", "no job"),
    ("an empty command", lambda client: client.add(""), "usage", "command"),
    ("an unknown option", lambda client: client.add("true", gpu=1), "usage", "'gpu'"),
    ("more GPUs than there are", lambda client: client.add("true", gpus=3), "usage", "3 GPUs"),
    ("nothing to add", lambda client: client.add_all([]), "usage", "commands"),
    ("one bad of many", lambda client: client.add_all(["true", "\0"]), "usage", "job 2 of 2"),
    ("no such status", lambda client: client.jobs(status="done"), "usage", "done"),
    ("no such GPU", lambda client: client.pause(gpu=7), "not_found", "7"),
    ("no such group", lambda client: client.pause(group="x y&z=/?"), "not_found", "'x y&z=/?'"),
    ("no such job to ask why", lambda client: client.why("../status"), "not_found", "status"),
    ("no such job to retry", lambda client: client.retry("zzz"), "not_found", "zzz"),
    ("it comes after nothing", lambda client: client.add("true", after=["zzz"]), "not_found", "zzz"),
    ("an odd share", lambda client: client.add("true", gpus=0.333), "usage", "two decimals"),
    ("no priority", lambda client: client.add("true", priority="urgent"), "usage", "priority"),
    ("a time below 0", lambda client: client.add("true", timeout_seconds=-1), "usage", "timeout_seconds"),
]


@pytest.mark.parametrize("reason, ask, kind, says", FAULTS, ids=[case[0] for case in FAULTS])
def test_faults_are_raised_as_the_service_says_them(home, reason, ask, kind, says):
    client = home.client()
    before = len(client.jobs())
    with pytest.raises(nexus.NexusError) as raised:
        ask(client)
    assert raised.value.kind == kind and says in raised.value.message, reason
    assert len(client.jobs()) == before


def test_find_does_not_start_a_service_unless_it_may(own_home):
    with pytest.raises(nexus.NexusError) as raised:
        nexus.Client.find(own_home.environ, is_starting=False)
    assert raised.value.kind == "unavailable" and raised.value.hint == "nexus start"
    assert not own_home.file("service.json").exists()


def test_two_who_start_it_at_once_find_the_same(own_home):
    found, faults = [], []

    def start():
        try:
            found.append(own_home.client().ask("GET", "/")["pid"])
        except nexus.NexusError as error:
            faults.append(error.message)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and len(found) == 4 and len(set(found)) == 1


def test_following_over_a_sigkill_of_the_service_loses_and_repeats_nothing(own_home):
    client = own_home.client()
    gate = os.path.join(own_home.top, "gate")
    job_id = client.add(f"seq 1 5; until [ -e {gate} ]; do sleep 0.05; done; seq 6 10; exit 4", gpus=0)
    pieces = []

    def follow():
        pieces.extend(client.follow(job_id, "stdout"))
    follower = threading.Thread(target=follow)
    waited = []
    waiter = threading.Thread(target=lambda: waited.extend(own_home.client().wait([job_id])))
    follower.start()
    waiter.start()
    until(lambda: b"".join(pieces) == b"1\n2\n3\n4\n5\n", "the first half")
    pid = own_home.kill_service()
    open(gate, "w").close()
    follower.join(60)
    waiter.join(60)
    assert b"".join(pieces) == b"".join(b"%d\n" % number for number in range(1, 11))
    assert [(job["status"], job["exit_code"]) for job in waited] == [("failed", 4)]
    assert own_home.service["pid"] != pid


@pytest.mark.parametrize("tail, expected", [(2, range(4, 11)), (0, range(6, 11))])
def test_following_the_end_over_a_restart_loses_nothing(own_home, tail, expected):
    """What is printed while there is no service comes too."""
    client = own_home.client()
    gates = [os.path.join(own_home.top, name) for name in ("first", "second")]
    wait = "until [ -e {} ]; do sleep 0.02; done"
    job_id = client.add(f"seq 1 5; {wait.format(gates[0])}; seq 6 8; touch {gates[0]}.done; {wait.format(gates[1])}; seq 9 10", gpus=0)
    until(lambda: b"".join(client.logs(job_id)) == b"1\n2\n3\n4\n5\n", "the first lines")
    pieces, heads, open_stream = [], [], client.open_stream

    def note_stream(path, told):
        heads.append(told)
        return open_stream(path, told)

    client.open_stream = note_stream
    follower = threading.Thread(target=lambda: pieces.extend(client.follow(job_id, "stdout", tail)))
    follower.start()
    until(lambda: heads and heads[0], "its first answer")
    assert own_home.main("stop").code == 0
    open(gates[0], "w").close()
    until(lambda: os.path.exists(f"{gates[0]}.done"), "the lines of the time without a service")
    own_home.client().status()
    open(gates[1], "w").close()
    follower.join(60)
    assert b"".join(pieces) == b"".join(b"%d\n" % number for number in expected)


def test_waiting_over_a_restart_for_what_is_no_longer_kept():
    with Home("jobs.cpu_slots = 20\nstate.history_limit = 2") as own_home:
        client = own_home.client()
        ended, going = client.add("true", gpus=0), client.add("sleep 60", gpus=0)
        seen, answer = [], []
        waiting = threading.Thread(target=lambda: answer.extend(client.wait([ended, going], lambda job: seen.append(job["id"]))))
        waiting.start()
        until(lambda: seen == [ended], "the first to end")
        others = own_home.client()
        for _ in range(3):
            wait_out(others)
        assert own_home.main("restart").code == 0
        others = own_home.client()
        others.kill(going)
        waiting.join(60)
        assert [job["id"] for job in answer] == [ended, going] and seen == [ended, going], "each is told once"


def test_a_service_that_ends_lets_the_next_have_its_home(tmp_path):
    """It takes its service.json away before the last of its memory is given back, and its lock with it."""
    layout = nexus.Layout(str(tmp_path), "", "")
    held = [nexus.take_lock(layout.lock_file)]

    class Clock:
        ticks = 0.0

        def monotonic(self):
            return self.ticks

        def sleep(self, seconds):
            self.ticks += seconds
            if self.ticks > 1 and held:
                os.close(held.pop())

    nexus.take_service_lock(layout, Clock())
    assert Clock.ticks == 0 and not held
    with pytest.raises(nexus.RunsAlready, match="pid unknown"):
        nexus.take_service_lock(layout, Clock())
    (tmp_path / "service.json").write_text('{"pid": 77}')
    with pytest.raises(nexus.RunsAlready, match="pid 77"):
        nexus.take_service_lock(layout, Clock())


def test_adding_while_the_service_is_killed_adds_exactly_once(own_home):
    client = own_home.client()
    client.pause()
    added, stop = [], threading.Event()

    def add():
        own = own_home.client()
        while not stop.is_set():
            added.append(own.add(f"echo {len(added)}", gpus=0))
    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for count in (20, 40):
        until(lambda count=count: len(added) > count, "jobs")
        own_home.kill_service()
    until(lambda: len(added) > 60, "jobs after it is back")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert sorted(job["id"] for job in client.queue()) == sorted(added) and len(set(added)) == len(added)


class Listener:
    """Somebody who listens on a port, and what he was sent."""

    def __init__(self, port):
        self.server = socket.socket()
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.server.bind(("127.0.0.1", port))
        self.server.listen()
        self.received = b""
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                line, _ = self.server.accept()
            except OSError:
                return
            with line:
                line.settimeout(1)
                try:
                    self.received += line.recv(65536)
                    line.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                except OSError:
                    pass


LISTEN_AS_ANOTHER = """
import os, socket, sys
os.setuid(65534)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen()
server.settimeout(30)
print("listens", flush=True)
line, _ = server.accept()
line.settimeout(2)
print("received", line.recv(65536), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_listener_on_the_port_is_sent_nothing(own_home):
    client = own_home.client()
    service = own_home.service
    supervisors = [pid for pid in own_home.processes() if pid != service["pid"]]
    for pid in supervisors:                                     # so that it does not come back
        os.kill(pid, signal.SIGKILL)
    os.kill(service["pid"], signal.SIGSTOP)                     # service.json still says that it runs, and where
    other = free_port()
    text = own_home.file("service.json").read_text()
    own_home.file("service.json").write_text(text.replace(f'"port": {own_home.port}', f'"port": {other}'))
    listener = subprocess.Popen([sys.executable, "-c", LISTEN_AS_ANOTHER, str(other)], stdout=subprocess.PIPE)
    try:
        assert listener.stdout.readline() == b"listens\n"
        client = nexus.Client.find(own_home.environ, is_starting=False)
        assert client.port == other
        for ask in (lambda: client.add("echo $SECRET", env={"SECRET": "x"}), client.status, lambda: list(client.logs("service")),
                    lambda: client.wait(["abc"])):
            with pytest.raises(nexus.NexusError) as raised:
                ask()
            assert raised.value.kind == "forbidden"
            assert nexus.find_user(65534) in raised.value.message and str(other) in raised.value.message
        done = own_home.run("add", "echo")
        assert done.code == 5 and "nothing was sent" in done.err and not done.out
        assert listener.poll() is None, "nobody connected"
    finally:
        listener.kill()
        assert b"received" not in listener.communicate()[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_port_that_another_user_has_is_named_at_the_start(own_home):
    listener = subprocess.Popen([sys.executable, "-c", LISTEN_AS_ANOTHER, str(own_home.port)], stdout=subprocess.PIPE)
    try:
        assert listener.stdout.readline() == b"listens\n"
        done = own_home.run("add", "true")
        assert done.code == 4 and not done.out
        assert f"port {own_home.port}" in done.err and nexus.find_user(65534) in done.err and "nexus config edit" in done.err
    finally:
        listener.kill()
        assert b"received" not in listener.communicate()[0]


def test_what_is_no_nexus_is_told():
    port = free_port()
    listener = Listener(port)
    try:
        client = nexus.Client.find({"NEXUS_URL": f"http://127.0.0.1:{port}", "NEXUS_TOKEN": "the-token"})
        with pytest.raises(nexus.NexusError) as raised:
            client.status()
        assert raised.value.kind == "unavailable" and "not nexus" in raised.value.message
        assert b"Authorization: Bearer the-token" in listener.received
    finally:
        listener.server.close()


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
        assert done.code == 2 and "on the machine itself" in done.err


@pytest.mark.parametrize("url", ["127.0.0.1:6234", "ftp://x", "http://", "http://a b", "http://x:99999999", "http://x/path", "http://u@x"])
def test_an_url_that_is_none(home, url):
    done = home.main("status", NEXUS_URL=url)
    assert done.code == 2 and url in done.err and "http://gpu1:6234" in done.err


def test_urls():
    assert nexus.parse_url("http://gpu1") == ("gpu1", 80, False)
    assert nexus.parse_url("http://gpu1.example.org:6234/") == ("gpu1.example.org", 6234, False)
    assert nexus.parse_url("http://[::1]:6234") == ("::1", 6234, False)
    assert nexus.parse_url("https://gpu1.example.org") == ("gpu1.example.org", 443, True)


def test_a_service_that_is_gone_for_good_is_told_soon(own_home, monkeypatch):
    client = own_home.client()
    monkeypatch.setattr(nexus, "RETRY_PATIENCE_S", 0.5)
    own_home.main("stop")
    for ask in (client.status, lambda: client.add("true"), lambda: client.kill("abc"), lambda: client.wait(["abc"])):
        began = time.monotonic()
        with pytest.raises(nexus.NexusError) as raised:
            ask()
        assert raised.value.kind == "unavailable" and "nexus" in raised.value.hint + raised.value.message
        assert time.monotonic() - began < 5


def test_stop_by_python(own_home):
    client = own_home.client()
    client.stop()
    until(lambda: nexus.find_service(client.layout) is None, "its end")

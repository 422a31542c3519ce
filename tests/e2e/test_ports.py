"""The port of a service: who names none gets one of his own, on a machine that many users share."""

import contextlib
import json
import os
import py_compile
import signal
import subprocess

import live
import pytest

import nexus


def find_block():
    """Three ports in a row that nobody has."""
    ports = [live.free_port() for _ in range(3)]
    while ports[2] - ports[0] != 2:
        ports = [*ports[1:], live.free_port()]
    return ports


@pytest.fixture(scope="module")
def tools():
    made = live.Tools()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ports(tools):
    """The first three of those from which a service chooses: others may have the real ones."""
    found = find_block()
    text = live.NEXUS.read_text()
    assert text.count("        6234, integer_in") == 1 and range(6234, 6300) == nexus.PORTS
    (tools.folder / "nexus.py").write_text(text.replace("        6234, integer_in", f"        {found[0]}, integer_in"))
    py_compile.compile(str(tools.folder / "nexus.py"))
    return found


@pytest.fixture
def make_box(tools, ports):
    with contextlib.ExitStack() as stack:
        def make(**settings):
            """Of a user of its own, with a configuration that names no port."""
            user = live.User(tools)
            stack.callback(user.remove)
            box = stack.enter_context(live.Box(gpus=1, user=user, is_starting=False))
            del box.settings["port"]
            box.write_config(**settings)
            return box
        yield make


def port_of(box):
    box.port = box.info()["port"]
    return box.port


def test_the_second_user_has_a_port_of_his_own(make_box, ports):
    ann, bob = make_box(), make_box()
    done = ann.nexus("start")
    assert (done.returncode, port_of(ann)) == (0, ports[0]) and f"http://127.0.0.1:{ports[0]}\n" in done.stderr, done
    assert "Page:" not in ann.nexus().stdout
    done, url = bob.nexus("add", "--gpus", "0", "true"), f"http://127.0.0.1:{ports[1]}"
    assert (done.returncode, port_of(bob), done.stderr) == (0, ports[1], f"nexus: the service runs at {url}\n"), done
    assert f"\nPage: {url}\n" in bob.nexus().stdout and json.loads(bob.nexus("status", "--json").stdout)["url"] == url
    assert bob.nexus("open", "--url", environ={"SSH_CONNECTION": "1"}).stdout == f"{url}\n"
    assert f"ssh -L {ports[1]}:127.0.0.1:{ports[1]} " in bob.nexus("open", environ={"SSH_CONNECTION": "1"}).stderr
    assert f"\nport = {ports[1]} " in bob.nexus("config").stdout and live.read(bob.home / "port") == f"{ports[1]}\n"
    ann.nexus("stop")
    for verb in ("restart", "stop", "start"):               # the first port is free now
        assert bob.nexus(verb).returncode == 0 and (verb == "stop" or port_of(bob) == ports[1])


def test_a_caller_at_another_users_port_is_told_whose_it_is(make_box):
    ann, bob = make_box(), make_box()
    for box in (ann, bob):
        box.start()
        port_of(box)
    token = live.read(bob.home / "token").strip()
    for words in ([], ["-H", f"Authorization: Bearer {token}"], ["-H", "X-Forwarded-For: 192.0.2.1"]):
        done = subprocess.run([*bob.user.become(), "curl", "-sS", *words, f"http://127.0.0.1:{ann.port}/status"],
                              capture_output=True, text=True, timeout=60)
        answer = json.loads(done.stdout)
        assert answer["error"] == "unauthorized" and f"this is the nexus of {ann.user.name}: " in answer["message"], done
        assert "nexus open" in answer["hint"]


def test_a_kept_port_that_somebody_has_is_left_and_told(make_box, ports):
    box = make_box()
    with live.listener(ports[0], host="::1"):
        box.start()
        assert port_of(box) == ports[1]
    box.nexus("stop")
    with live.listener(ports[1]):
        with live.listener(ports[0]):
            done = box.nexus("start")
            assert (done.returncode, port_of(box), live.read(box.home / "port")) == (0, ports[2], f"{ports[2]}\n"), done
        moved = (f"port {ports[1]}, where nexus was, is that of nobody now: close tabs and tunnels to it; "
                 f"nexus is at http://127.0.0.1:{ports[2]}")
        assert f"hint: {moved}\n" in box.nexus().stdout and f"ok   port: {moved}\n" in box.nexus("health").stdout
        assert moved in box.nexus("open").stderr and moved in box.ask("GET", "/status")["hints"]
        assert box.nexus("open", "--url").stderr == "", "for scripts"
    box.nexus("restart")
    assert port_of(box) == ports[2] and f"{ports[1]}, where nexus was, is free now" in box.nexus("health").stdout, "it stays there"


def test_the_supervisor_never_moves(make_box, ports):
    box = make_box()
    box.start()
    supervisors = box.supervisors()
    for pid in supervisors:
        os.kill(pid, signal.SIGSTOP)
    box.kill_service()
    with live.listener(ports[0]):
        for pid in supervisors:
            os.kill(pid, signal.SIGCONT)
        live.until(lambda: "is in use by nobody" in live.read(box.home / "start_error.json"), "a start that fails")
    live.until(box.pid, "a service")
    assert port_of(box) == ports[0]


NAMED = [  # reason, settings
    ("the usual one, named", lambda ports: {"port": ports[0], "host": "127.0.0.1"}),
    ("one for other machines", lambda ports: {"host": "0.0.0.0"}),
]


def test_no_other_port_is_chosen(make_box, ports):
    box = make_box()
    box.nexus("token", "create", "bob")
    with live.listener(ports[0]):
        for reason, settings in NAMED:
            box.settings.pop("port", None)
            box.write_config(**settings(ports))
            done = box.nexus("start")
            assert done.returncode == 4 and "in use by nobody" in done.stderr and "[service] port" in done.stderr, (reason, done)
            assert not (box.home / "port").exists()


def test_two_first_starts_at_once(make_box, ports):
    boxes = [make_box(), make_box()]
    started = [subprocess.Popen(box.argv("start"), env=box.environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/")
               for box in boxes]
    for process in started:
        assert process.wait(60) == 0, process.stderr.read()
        process.stderr.close()
    assert {port_of(box) for box in boxes} <= set(ports) and boxes[0].port != boxes[1].port


def test_a_home_of_before_keeps_its_port(make_box, ports):
    """Its service runs, and has kept none."""
    box = make_box()
    with live.listener(ports[0]):
        box.start()
        assert port_of(box) == ports[1]
        os.unlink(box.home / "port")
        assert box.nexus("restart").returncode == 0 and port_of(box) == ports[1] and live.read(box.home / "port") == f"{ports[1]}\n"


def test_what_a_job_starts_has_another_port():
    """A job that it adds, and each job of a service that it starts; but one that was set stays."""
    with live.Box(gpus=1, is_supervised=False) as box, live.Box(gpus=1, is_starting=False) as other:
        for number, own in enumerate(("", "MASTER_PORT=7 PET_MASTER_PORT=7")):
            out = [box.path(f"{name}-{number}") for name in ("parent", "child", "grandchild")]
            echo = "echo $MASTER_PORT $PET_MASTER_PORT $NEXUS_JOB_PORT > "
            nexus_there = f"{box.python} {live.COMMAND}"
            command = (f"{echo} {out[0]}; export {own}; {nexus_there} add --gpus 0 '{echo} {out[1]}'; export NEXUS_HOME={other.home}; "
                       f"{nexus_there} start && curl -sS -d '{json.dumps({'command': f'{echo} {out[2]}', 'gpus': 0})}' "
                       f"-H 'Content-Type: application/json' http://127.0.0.1:{other.port}/queue")
            box.wait(box.add(command, gpus=0, environment=box.environ), "completed")
            parent, *others = [live.until(lambda path=path: live.read(path).split(), path) for path in out]
            assert len(set(parent)) == 1
            assert others[0][2] != parent[2]
            for ports in others:
                assert ports[:2] == (["7", "7"] if own else [ports[2]] * 2)
            assert other.nexus("stop").returncode == 0          # its environment is that of the job

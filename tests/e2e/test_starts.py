"""Starting the service: with which configuration, after what, in which container; and what must not stop the one that runs."""

import json
import pathlib
import socket
import subprocess

import live
import pytest


def other_config(box, name="other.toml", **settings):
    """A config file beside the home's, which has all of that and these settings."""
    path = box.path(name)
    usual = (box.home / "config.toml").read_text()
    box.write_config(**settings)
    (box.home / "config.toml").rename(path)
    (box.home / "config.toml").write_text(usual)
    return str(path)


BAD = [  # reason, settings, what is said
    ("a log folder that cannot be made", {"log_dir": "/proc/none"}, "/proc/none"),
    ("a state folder that is a file", {"state_file": "/etc/passwd/state.json"}, "/etc/passwd"),
    ("a certificate that is missing", {"tls_cert": "/no/cert.pem", "tls_key": "/no/key.pem"}, "/no/cert.pem"),
    ("a value out of range", {"cpu_slots": -1}, "cpu_slots"),
]


@pytest.fixture(scope="module")
def running():
    with live.Box(gpus=1) as box:
        assert box.nexus("token", "create", "bob").returncode == 0      # so that other machines may be let in
        yield box


@pytest.mark.parametrize("is_chosen", [False, True], ids=["config.toml", "--config"])
@pytest.mark.parametrize("reason, settings, says", BAD, ids=[case[0] for case in BAD])
def test_a_restart_that_cannot_succeed_stops_nothing(running, reason, settings, says, is_chosen):
    box, pid, usual = running, running.pid(), dict(running.settings)
    if is_chosen:
        done = box.nexus("restart", "--config", other_config(box, **settings))
    else:
        box.write_config(**settings)
        done = box.nexus("restart")
    box.settings = usual
    box.write_config()
    assert done.returncode not in (0, 1) and says in done.stderr, done
    assert box.pid() == pid and box.call("GET", "/jobs?limit=1")[0] == 200


def test_a_restart_on_another_address_of_the_same_port(running):
    """Which its own service has."""
    usual = dict(running.settings)
    for host in ("127.0.0.1", "0.0.0.0", "localhost", "::1", "127.0.0.1"):
        done = running.nexus("restart", "--config", other_config(running, host=host))
        assert done.returncode == 0, (host, done)
        assert running.info()["url"].startswith(f"http://[{host}]:" if ":" in host else f"http://{host}:")
    running.settings = usual
    running.write_config()
    assert running.nexus("restart", "--config", str(running.home / "config.toml")).returncode == 0


def test_the_chosen_config_is_used_until_another_is_chosen():
    with live.Box(gpus=2, is_starting=False) as box:
        chosen, usual = other_config(box, ids=[1]), str(box.home / "config.toml")

        def used(*command):
            done = box.nexus(*command)
            assert done.returncode == 0, done
            return box.info().get("config")
        assert used("start", "--config", chosen) == chosen
        box.kill_service()
        assert used("status") == chosen                     # the supervisor started it again
        assert used("restart") == chosen
        box.nexus("stop")
        assert box.nexus("config", "path").stdout == f"{chosen}\n"
        assert used("status") == chosen                     # a command started it
        box.kill_all_of_service()
        assert used("start") == chosen
        assert used("restart", "--config", usual) == usual
        box.nexus("stop")
        assert used("status") == usual and box.nexus("config", "path").stdout == f"{usual}\n"
        assert used("restart", "--config", chosen) == chosen
        box.nexus("stop")
        pathlib.Path(chosen).unlink()
        done = box.nexus("status")
        assert done.returncode == 2 and f"there is no file {chosen}" in done.stderr and usual in done.stderr
        assert used("start", "--config", usual) == usual


def test_a_choice_that_cannot_be_used_is_not_remembered():
    with live.Box(gpus=1, is_starting=False) as box, socket.create_server(("127.0.0.1", 0)) as other:
        assert box.nexus("start", "--config", other_config(box, port=other.getsockname()[1])).returncode == 4
        done = box.nexus("status")
        assert done.returncode == 0 and box.info()["config"] == str(box.home / "config.toml"), done


class Container:
    """Processes and a host name on this machine's files."""

    def __init__(self, box, name):
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
             f"hostname {name}; echo ready; exec sleep 100000"], stdout=subprocess.PIPE, env=box.environ)
        assert self.process.stdout.readline() == b"ready\n"
        self.box, self.init = box, live.descendants(self.process.pid)[0]

    def nexus(self, *arguments):
        return subprocess.run(["nsenter", "--target", str(self.init), "--mount", "--uts", "--pid", *self.box.argv(*arguments)],
                              env=self.box.environ, capture_output=True, text=True, timeout=60, cwd="/", stdin=subprocess.DEVNULL)

    def end(self):
        live.kill(self.init, self.process.pid)
        self.process.wait()
        self.process.stdout.close()
        live.until(lambda: not live.is_alive(self.init), "the end of all that runs in it")


@pytest.mark.parametrize("launcher", ["direct", "screen"])
def test_a_new_container_with_the_same_files(launcher):
    """One container after the other has the home, and none while a service of another one is alive."""
    live.need_root()
    with live.Box(gpus=1, launcher=launcher, is_starting=False) as box:
        one, two, three = (Container(box, name) for name in ("one", "two", "three"))
        try:
            job_id = one.nexus("add", "sleep 600").stdout.strip()
            live.until(lambda: json.loads(one.nexus("show", job_id, "--json").stdout)["pid"], "the job's start")
            for command in ("status", "start"):
                done = two.nexus(command)
                assert done.returncode == 4 and "the service runs on one" in done.stderr, done
            one.end()                                       # with all that ran there
            assert (box.home / "service.json").exists()
            done = two.nexus("show", job_id, "--json")
            assert done.returncode == 0, done
            live.until(lambda: json.loads(two.nexus("show", job_id, "--json").stdout)["cause"] == "session-lost")
            assert two.nexus("run", "echo hello").stdout == "hello\n"
            assert three.nexus("status").returncode == 4
            two.nexus("stop")
            assert three.nexus("run", "echo hello").stdout == "hello\n"
            three.nexus("stop")
        finally:
            for container in (one, two, three):
                container.end()

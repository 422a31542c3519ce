"""Starting the service: with which configuration, after what, in which container; and what must not stop the one that runs."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request

import live
import pytest
import shared

import nexus


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


TAKEN = [  # reason, who listens (uid, address), settings, what is said
    ("a port of another program", (0, "127.0.0.1"), {}, "is in use by root"),
    ("a port of another user", (65534, "127.0.0.1"), {}, "is in use by nobody"),
    ("a port of which another user has ::1", (65534, "::1"), {}, "is in use by nobody"),
    ("its own port, where another user has it", (65534, "127.0.0.9"), {"host": "127.0.0.9", "port": None}, "in use by nobody"),
    ("an address that is not ours", None, {"host": "203.0.113.1"}, "cannot listen on 203.0.113.1"),
    ("an address that is not ours, on its own port", None, {"host": "203.0.113.1", "port": None}, "cannot listen on 203.0.113.1"),
]


@pytest.mark.parametrize("reason, other, settings, says", TAKEN, ids=[case[0] for case in TAKEN])
def test_a_restart_on_an_address_that_cannot_be_had_stops_nothing(running, reason, other, settings, says):
    box, pid, usual = running, running.pid(), dict(running.settings)
    job_id = box.add("sleep 600", gpus=0)
    settings = {"port": live.free_port(), **settings}
    settings["port"] = settings["port"] or box.port
    path = other_config(box, **settings)
    box.settings = usual
    with live.listener(settings["port"], *other) if other else contextlib.nullcontext():
        done = box.nexus("restart", "--config", path)
    assert done.returncode in (2, 4) and says in done.stderr and "the service goes on as it was" in done.stderr, done
    assert box.pid() == pid and box.call("GET", "/jobs?limit=1")[0] == 200
    assert box.nexus("config", "path").stdout == f"{box.home}/config.toml\n" and not (box.home / "offer.sock").exists()
    assert box.ask("POST", "/jobs/cancel", {"ids": [job_id]}, key=job_id)


def test_a_restart_has_the_new_address_before_the_old_service_ends():
    """While one service ends and the other one starts, nobody can take it.  Here the sockets' paths are too long for the kernel."""
    with live.Box(gpus=1, name="h" * 120) as box:
        job_id, old = box.add("sleep 600", gpus=0), box.port
        box.wait_started(job_id)
        pid = box.pid()
        box.port = live.free_port()
        box.write_config(port=box.port)
        os.kill(pid, signal.SIGSTOP)                        # it does not end yet
        with subprocess.Popen(box.argv("restart"), env=box.environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as restart:
            live.until((box.home / "offer.sock").exists, "the offer")
            for address in ("127.0.0.1", "::1"):
                with live.listener(box.port, host=address) as heard:
                    assert heard() == ""
            os.kill(pid, signal.SIGCONT)
            assert restart.wait(60) == 0, restart.stderr.read()
        assert box.pid() != pid and box.info()["port"] == box.port and box.job(job_id)["status"] == "running"
        assert not (box.home / "offer.sock").exists()
        with socket.create_connection(("::1", box.port)), socket.create_server(("127.0.0.1", old)):
            pass
        shared.crash(box)                                   # the supervisor's next one opens the address itself


NEW = [  # reason, what the new one does otherwise, whether the old service ends, what is said, launcher
    ("it dies at its import", "if 'NEXUS_ROLE' in os.environ: raise RuntimeError('broken')", False, "RuntimeError: broken", "direct"),
    ("it lacks a module", 'MODULES = ("no_such_module", *MODULES)', False, "No module named 'no_such_module'", "screen"),
    ("it cannot read the state", "Store.recover = lambda store: refuse('the state is too old')", True, "the state is too old", "screen"),
    ("it dies before it listens", "Store.recover = lambda store: os._exit(3)", True, "did not start", "direct"),
    ("it hangs", "Store.recover = lambda store: time.sleep(1000)", True, "did not start", "screen"),
    ("it dies when it has the address", "Server.serve = lambda server: os._exit(3)", True, "the new service cannot start", "direct"),
]
TIMEOUT_S = 6.0                 # of a start: a working one takes half a second on an idle machine


@pytest.mark.parametrize("reason, change, ends, says, launcher", NEW, ids=[case[0] for case in NEW])
def test_a_new_nexus_that_does_not_work_leaves_the_old_one(reason, change, ends, says, launcher):
    """It was copied over the old one, and the config was edited; then both are again as they were."""
    with live.Box(gpus=1, launcher=launcher, is_starting=False, cpu_slots=3) as box:
        program = shared.give_program(box)
        shared.write_program(program)
        assert box.nexus("start", "--log-level", "DEBUG").returncode == 0
        runs, waits = box.add("sleep 600", gpus=0), box.add("true", begin="+1h")
        box.wait_started(runs)
        pid, before, usual, choice = box.pid(), box.info(), dict(box.settings), box.home / "config.toml"
        shared.write_program(program, f"START_TIMEOUT_S = RETRY_TIMEOUT_S = {TIMEOUT_S}\n{change}")
        path = other_config(box, port=live.free_port())     # a choice that is to be forgotten
        box.settings = usual
        box.write_config(cpu_slots=1)
        done = box.nexus("restart", "--config", path)
        assert done.returncode not in (0, 2) or "too old" in says, done
        assert says in done.stderr and ("runs again" if ends else "goes on as it was") in done.stderr, done
        box.await_service()
        after = box.info()
        assert (after["hash"], after["port"]) == (before["hash"], before["port"]) and (after["pid"] != pid) == ends
        assert box.job(runs)["status"] == "running" and box.job(waits)["status"] == "pending"
        assert box.ask("GET", "/status")["hash"] == before["hash"]
        assert [box.wait_started(box.add("sleep 60", gpus=0)) for _ in range(2)], "its own cpu_slots"
        assert len(box.shells()) == 1, "the new one's supervisor has ended"
        done = subprocess.run([sys.executable, live.COMMAND, "config", "path"], env=box.environ, capture_output=True, text=True)
        assert done.stdout == f"{choice}\n"
        if reason == "it dies before it listens":
            shared.crash(box)
            assert box.info()["hash"] == before["hash"], "it is kept running"


def test_copies_of_the_last_two_are_kept():
    """And where the old one's are gone, a restart with another that does not work says so."""
    with live.Box(gpus=1, is_starting=False) as box:
        program, hashes = shared.give_program(box), []
        for number in range(3):
            shared.write_program(program, f"# {number}")
            box.write_config(cpu_slots=number + 1)
            assert box.nexus("restart").returncode == 0
            hashes.append(box.info()["hash"])
        assert {path.name for path in box.home.glob("cache/nexus-*.py")} == {f"nexus-{each}.py" for each in hashes[1:]}
        assert len(list(box.home.glob("cache/nexus-*.toml"))) == 2
        for copy in box.home.glob("cache/nexus-*.py"):
            copy.unlink()
        shared.write_program(program, "Store.recover = lambda store: refuse('it is too old')")
        done = box.nexus("restart")
        assert done.returncode == 2 and "it is too old" in done.stderr, done
        assert "its nexus.py (nexus 1.0.0) is not there any more" in done.stderr, done


class Python:
    """An interpreter of its own, which can be removed under what runs with it."""

    def __init__(self, folder):
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.folder, self.path, library = folder, folder / "bin" / version, folder / "lib" / version
        self.path.parent.mkdir(parents=True)
        library.mkdir(parents=True)
        shutil.copy(os.path.realpath(sys.executable), self.path)
        for name in os.listdir(sysconfig.get_path("stdlib")):
            if name not in ("site-packages", "dist-packages"):
                (library / name).symlink_to(pathlib.Path(sysconfig.get_path("stdlib"), name))
        shutil.copytree(sysconfig.get_path("purelib"), library / "site-packages", symlinks=True,
                        ignore=lambda _, names: [name for name in names if not name.startswith(("psutil", "tomli", "_"))])
        (library / "dist-packages").symlink_to("site-packages")         # where Debian's looks

    def remove(self):
        shutil.rmtree(self.folder)


FORM = b"".join(b'--x\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n%s\r\n' % pair for pair in (
    (b"code", b"print('submitted')"), (b"config_file", b"\xef\xbb\xbfcompetition_id: a\nproject_id: b\nuser_id: c\n"))) + b"--x--\r\n"
CALLS = ("/status", "/health", "/metrics", "/openapi.json", "/docs", "/", "/gpus/history?hours=1", "/jobs?text=echo", "/queue",
         "/api/nodes", "/groups", "/service/logs", "/events?limit=1", "/nothing%20there")


def test_its_python_is_removed(tmp_path):
    """The service needs nothing of it any more.  After a kill another Python runs it, in time for a job that is to begin."""
    (tmp_path / "jobs.csv").touch()
    with live.Box(gpus=[{"memory_total": 24000}], is_starting=False, on_finish=f"echo $NEXUS_JOB_ID >> {tmp_path}/finished",
                  jobs_file=str(tmp_path / "jobs.csv"), jobs_file_interval_seconds=1) as box:
        python = Python(box.path("python"))
        box.python = str(python.path)
        box.start()
        box.python = sys.executable
        python.remove()
        answers = {path: box.call("GET", path) for path in CALLS}
        assert {path: status for path, (status, _) in answers.items() if status not in (200, 404)} == {}, answers
        assert box.call("GET", "/status", Authorization="Bearer no")[0] == 401
        (tmp_path / "repo").mkdir()
        for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"]):
            subprocess.run(["git", "-C", tmp_path / "repo", *words], check=True)
        (tmp_path / "jobs.csv").write_text('1,"a.py",,"--x 1",\n')
        for words in (["echo hello"], ["--snapshot", "--cwd", str(tmp_path / "repo"), "echo hello"], ["--retries", "1", "echo hello"]):
            done = box.nexus("run", *words)
            assert (done.returncode, done.stdout) == (0, "hello\n"), done
        done = subprocess.run(["curl", "-sS", f"http://127.0.0.1:{box.port}/api/submit", "--data-binary", "@-",
                               "-H", "Content-Type: multipart/form-data; boundary=x"], input=FORM, capture_output=True)
        assert b"job_id" in done.stdout, done
        live.until(lambda: len(live.read(tmp_path / "finished").split()) >= 4, "the hooks")
        live.until(lambda: "a.py" in str(box.ask("GET", "/jobs")), "the row of the jobs file")
        assert box.nexus("node", "add", "nobody@127.0.0.1", "--port", "1").returncode not in (0, 1)
        assert "ModuleNotFoundError" not in box.log() and "Traceback" not in box.log()

        begins = box.add("echo begun", begin="+2s")
        shared.crash(box)
        assert box.wait(begins, "completed")
        word = f"since {python.path} cannot any more"
        assert word in box.log() and word in box.nexus("status").stdout and word in box.nexus("health").stdout
        found = live.read_bytes(f"/proc/{box.pid()}/cmdline").split(b"\0")[0].decode()
        assert found in box.nexus("health").stdout and not found.startswith(str(box.folder))
        shared.crash(box)                               # and that one is kept running
        assert box.nexus("restart").returncode == 0 and word not in box.nexus("health").stdout


def test_no_other_python_is_said_and_the_first_one_may_come_back(tmp_path):
    """None has the psutil that the configuration needs."""
    with live.Box(gpus=1, is_starting=False, max_memory_gb=50, environ={"PATH": "/usr/bin:/bin"}) as box:
        python = Python(box.path("python"))
        box.python = str(python.path)
        box.start()
        away = box.path("python.away")
        os.rename(python.folder, away)
        box.kill_service()
        live.until(lambda: "nor another Python here can run the service" in box.log(), "what is said")
        os.rename(away, python.folder)
        box.await_service()
        assert "cannot any more" not in box.nexus("health").stdout


def test_a_restart_on_another_address_of_the_same_port(running):
    """Which its own service has."""
    usual = dict(running.settings)
    for host in ("0.0.0.0", "localhost", "::1"):
        done = running.nexus("restart", "--config", other_config(running, host=host))
        assert done.returncode == 0, (host, done)
        assert running.info()["url"].startswith(f"http://[{host}]:" if ":" in host else f"http://{host}:")
    running.settings = usual
    running.write_config()
    assert running.nexus("restart", "--config", str(running.home / "config.toml")).returncode == 0


def test_a_service_that_is_killed_comes_back_where_its_address_has_gone():
    """Another DHCP lease: a first start says so and fails, but jobs that wait do not wait for the address."""
    address, lost = "203.0.113.77", "203.0.113.77 is no address of this machine now: nexus listens on http://127.0.0.1:"

    def change(verb):
        subprocess.run(["ip", "addr", verb, f"{address}/32", "dev", "lo"], check=verb == "add", stderr=subprocess.DEVNULL)

    change("del")
    with live.Box(gpus=1, is_starting=False, host=address) as box, contextlib.ExitStack() as stack:
        stack.callback(change, "del")
        done = box.nexus("start")
        assert done.returncode == 2 and f"cannot listen on {address}, port {box.port}" in done.stderr, done
        assert not box.supervisors(), "who has been told so is the last to try it"
        change("add")
        assert box.nexus("start").returncode == 0 and box.info()["url"] == f"http://{address}:{box.port}"
        change("del")
        pid = box.kill_service()
        live.until(lambda: box.pid() not in (None, pid) and box.nexus("jobs").returncode == 0, "a service without the address")
        assert box.info()["url"] == f"http://127.0.0.1:{box.port}" and lost in box.nexus("status").stdout + box.nexus("status").stderr
        health = box.nexus("health")
        assert health.returncode == 1 and lost in health.stdout and f"{address} is no address of this machine now" in box.log()
        assert box.nexus("run", "--gpus", "0", 'env; [ -z "$NEXUS_HAS_RUN" ]').returncode == 0
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{box.port}/jobs", timeout=60)
        assert refused.value.code == 401, "the rules are those of an address for other machines"
        done = box.nexus("restart")
        assert done.returncode == 2 and "the service goes on as it was" in done.stderr, done
        change("add")
        assert box.nexus("restart").returncode == 0 and box.info()["url"] == f"http://{address}:{box.port}"
        assert lost not in box.nexus("health").stdout


def test_the_chosen_config_is_used_until_another_is_chosen():
    with live.Box(gpus=2, is_starting=False) as box:
        chosen, usual = other_config(box, ids=[1]), str(box.home / "config.toml")

        def used(*command):
            done = box.nexus(*command)
            assert done.returncode == 0, done
            return box.info().get("config")
        assert used("start", "--config", chosen) == chosen
        shared.crash(box)
        assert used("status") == chosen                     # the supervisor started it again
        box.nexus("stop")
        assert box.nexus("config", "path").stdout == f"{chosen}\n"
        assert used("status") == chosen                     # a command started it
        assert used("restart") == chosen
        assert used("restart", "--config", usual) == usual
        box.nexus("stop")
        assert used("status") == usual and box.nexus("config", "path").stdout == f"{usual}\n"
        box.nexus("stop")
        assert used("start", "--config", chosen) == chosen
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

    def __init__(self, box, name, script=":"):
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
             f"hostname {name}; {script}; echo ready; exec sleep 100000"], stdout=subprocess.PIPE, env=box.environ)
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


def test_a_new_container_with_the_same_files():
    """One container after the other has the home, and none while a service of another one is alive."""
    live.need_root()
    with live.Box(gpus=1, launcher="screen", is_starting=False) as box:
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


# As lxcfs does, /proc/uptime is that of the container, which has just begun, and /proc/loadavg has the host's last pid.
LXCFS = """cd {folder}; echo 1.07 0.50 > uptime; echo 0.07 0.08 0.09 1/300 2000123 > loadavg
for file in uptime loadavg; do mount --bind $file /proc/$file; done"""
WORK = "end=$(($(date +%s) + 2)); while [ $(date +%s) -lt $end ]; do :; done; echo done"
IN_LXCFS = [  # reason, command, output
    ("it has run for less than its time limit", "sleep 2; echo done", "done\n"),
    ("what its command left works on", f"({WORK}) &", "done\n"),
    ("so does what has no subshell", f"bash -c {nexus.quote(WORK)} & sleep 1", "done\n"),
    ("what idles in another session is ended", "setsid sleep 600 & sleep 0.2; echo done", "done\n"),
]


def test_a_container_with_a_clock_of_its_own():
    """Processes start by the host's clock, which is minutes further: a time limit is not reached before its time."""
    live.need_root()
    with live.Box(gpus=1, launcher="direct", is_starting=False, cpu_slots=9) as box:
        container = Container(box, "lxc", LXCFS.format(folder=box.folder))
        try:
            ids = [container.nexus("add", "--gpus", "0", "--timeout", "30s", command).stdout.strip() for _, command, _ in IN_LXCFS]
            assert container.nexus("wait", *ids).returncode == 0, box.log()
            for (reason, _, output), job_id in zip(IN_LXCFS, ids):
                job = json.loads(container.nexus("show", job_id, "--json").stdout)
                assert (job["status"], container.nexus("logs", job_id).stdout) == ("completed", output), (reason, job)
                assert job["runtime_seconds"] < 20, (reason, job)
        finally:
            container.nexus("stop")
            container.end()

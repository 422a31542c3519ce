"""The commands that start, end and configure the service; what they leave open."""

import os
import shlex
import signal
import subprocess

import pytest
from console import COMMAND, SCRIPT, add, add_and_wait
from live import until

import nexus


def test_start_stop_restart(bare_home):
    done = bare_home.main("stop")
    assert (done.code, done.out) == (0, "") and "does not run" in done.err
    done = bare_home.main("start")
    assert (done.code, done.out) == (0, "") and f"http://127.0.0.1:{bare_home.port}" in done.err, done
    pid = bare_home.service["pid"]
    assert "runs already" in bare_home.main("start").err and bare_home.service["pid"] == pid
    with bare_home.terminal("serve") as terminal:
        code, shown = terminal.end()
    assert code == 4 and "runs already" in shown and "serving" not in shown
    job_id = add(bare_home, "sleep 60")
    bare_home.wait_for_start(job_id)
    waits = add(bare_home, "true", "--begin", "+1h")
    assert bare_home.main("restart").code == 0 and bare_home.service["pid"] != pid
    assert bare_home.wait_for(job_id, "running")["status"] == "running"
    done = bare_home.main("stop")
    assert done.code == 0 and "jobs go on" in done.err and not bare_home.file("service.json").exists()
    assert "1 pending job may start then" in done.err, (waits, done)

    def sessions():
        return subprocess.run(["screen", "-ls"], capture_output=True, env=bare_home.environ).stdout.decode()
    until(lambda: ".nexus\t" not in sessions(), "the end of its session")
    assert f".nexus_job_{job_id}" in sessions()
    log = bare_home.main("logs", "service")
    assert log.code == 0 and "Service stopped" in log.out and "the service does not run" in log.err, "one wants it most now"
    assert not bare_home.file("service.json").exists(), "and it is not started for that"


def test_what_only_looks_starts_no_service(bare_home):
    assert bare_home.run("top").code == 6
    done = bare_home.main("logs", "service")
    assert done.code == 6 and "there is no log" in done.err and not bare_home.file("service.json").exists()


def test_the_services_log_is_followed_over_a_restart(bare_home):
    bare_home.main("start")
    process = bare_home.popen("logs", "service", "-f", "-n", "99")
    while b"Service started" not in process.stdout.readline():
        pass
    bare_home.main("restart")
    while b"Service started" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and process.stderr.read() == b""


def test_stop_over_nexus_url_promises_nothing(fresh_home):
    there = {"NEXUS_URL": f"http://127.0.0.1:{fresh_home.port}", "NEXUS_TOKEN": fresh_home.file("token").read_text().strip()}
    done = fresh_home.main("stop", **there)
    assert done.code == 0 and "nexus start on its own machine" in done.err and "next nexus command" not in done.err
    assert fresh_home.main("status", **there).code == 6, "it answers no more"
    until(lambda: not fresh_home.file("service.json").exists(), "its end")


def test_serve_in_the_foreground(bare_home):
    process = bare_home.popen("serve", "--log-level", "DEBUG")
    until(lambda: bare_home.file("service.json").exists(), "the service")
    assert bare_home.service["pid"] == process.pid
    done = bare_home.run("serve")
    assert done.code == 4 and f"pid {process.pid}" in done.err and "nexus stop" in done.err
    job_id = add_and_wait(bare_home)
    assert bare_home.job(job_id)["status"] == "completed"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"", b"") and not bare_home.file("service.json").exists()


def test_another_config_file(bare_home):
    path = str(bare_home.folder / "other.toml")
    (bare_home.folder / "other.toml").write_text(bare_home.file("config.toml").read_text().replace("[gpu]\n", "[gpu]\nids = [1]\n"))
    assert bare_home.main("start", "--config", path).code == 0
    assert [gpu["index"] for gpu in bare_home.main("status", "--json").json["gpu_status"] if gpu["is_available"]] == [1]
    done = bare_home.main("restart", "--config", "/no/such/file")
    assert done.code == 2 and "/no/such/file" in done.err, done
    assert bare_home.file("service.json").exists(), "the one that runs is not ended for it"
    assert bare_home.main("restart").code == 0
    assert [gpu["index"] for gpu in bare_home.main("status", "--json").json["gpu_status"] if gpu["is_available"]] == [1], "as before"


def test_a_service_is_started_on_its_own_machine(home):
    there = {"NEXUS_URL": f"http://127.0.0.1:{home.port}"}
    for command in ("start", "restart"):
        done = home.main(command, **there)
        assert done.code == 2 and "own machine" in done.err and "unset NEXUS_URL" in done.err
        assert home.main("status", **there).code == 0, "it was not ended"


REFUSED_TOGETHER = [
    ("status --watch --json", "not allowed with argument"), ("status --json --detailed", "not allowed with argument"),
    ("history -n -5", "not -5"), ("run --json true", "unrecognized arguments: --json"),
]


@pytest.mark.parametrize("line, says", REFUSED_TOGETHER, ids=[case[0] for case in REFUSED_TOGETHER])
def test_options_that_would_be_ignored(home, line, says):
    done = home.main(*line.split())
    assert done.code == 2 and says in done.err


def test_config_path_sample_and_show(bare_home):
    assert bare_home.main("config", "path").out == str(bare_home.file("config.toml")) + "\n"
    sample = bare_home.main("config", "sample").out
    shown = bare_home.main("config").out
    assert f"\nport = {bare_home.port} " in shown and shown.startswith(f"# {bare_home.file('config.toml')}\n")
    bare_home.file("config.toml").write_text(sample)
    assert "\nport = 6234 " in bare_home.main("config").out
    bare_home.file("config.toml").unlink()
    assert "there is none" in bare_home.main("config").out and not bare_home.file("service.json").exists()


def test_all_faults_of_a_config_are_listed_and_nothing_starts(bare_home):
    bare_home.file("config.toml").write_text('[service]\nport = 0\nhots = "x"\n[jobs]\nlauncher = "telepathy"\n[gpus]\nids = [0]\n')
    for words in (["config"], ["start"], ["add", "true"], ["status"], ["serve"]):
        done = bare_home.main(*words)
        assert (done.code, done.out) == (2, ""), done
        for says in (str(bare_home.file("config.toml")), "service.port must be", "1 to 65535",
                     "'hots' is not a key of [service]", "'host'",
                     "telepathy", "'gpus' is not a key of config.toml", "'gpu'", "nexus config sample"):
            assert says in done.err, (says, done.err)
    bare_home.file("config.toml").write_text("[service\n")
    done = bare_home.main("add", "true")
    assert done.code == 2 and "not valid TOML" in done.err and "line 1" in done.err
    assert not bare_home.file("state.json").exists() and not bare_home.file("service.json").exists()


def test_config_edit(bare_home):
    editor = os.path.join(bare_home.top, "my editor")
    with open(editor, "w") as file:
        file.write('#!/bin/sh\nsed -i "s/^port = .*/port = $1/" "$2"\n')
    os.chmod(editor, 0o755)
    done = bare_home.run("config", "edit", EDITOR=f"'{editor}' 6543")
    assert done.code == 0 and "port = 6543" in bare_home.file("config.toml").read_text()
    done = bare_home.run("config", "edit", VISUAL=f"'{editor}' 99999", EDITOR="false")
    assert done.code == 2 and "not 99999" in done.err
    done = bare_home.run("config", "edit", EDITOR="no-such-editor")
    assert done.code == 2 and "EDITOR" in done.err
    bare_home.file("config.toml").unlink()
    assert bare_home.run("config", "edit", EDITOR="true").code == 0
    assert bare_home.file("config.toml").read_text() == nexus.format_sample_config()


STRICT = [  # words; ID is an ended job
    "status", "top", "queue", "jobs", "history", "show ID", "why ID", "wait ID", "logs ID", "logs -f ID", "logs -n 1 service",
    "retry ID", "run --gpus 0 exit\\ 3", "pause", "resume", "health", "metrics", "usage", "screens",
    "config", "node list", "token list", "show nope",
    "kill 0", "restart", "stop"]


def test_nothing_is_left_open_for_python_to_warn_of(fresh_home):
    """PYTHONWARNINGS=error made a traceback of each socket."""
    job_id = add_and_wait(fresh_home, "echo x")
    for line in STRICT:
        words = [job_id if word == "ID" else word for word in shlex.split(line)]
        done = fresh_home.run(*words, script=SCRIPT if line == "status" else COMMAND, PYTHONWARNINGS="error")    # one compiles it, too
        assert "Warning" not in done.err and done.code in (0, 3), (line, done)

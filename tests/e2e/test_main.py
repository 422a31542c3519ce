"""Section 22: main(argv, environ, out, err) -> exit code; and the file as a program in strange surroundings."""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import venv

import pytest
from console import SCRIPT, Home, Stream
from live import until

import nexus

LISTED = [
    "status", "top", "add", "run", "queue", "history", "jobs", "show", "why", "wait", "logs", "kill", "cancel", "remove", "retry",
    "edit", "clear", "move", "attach", "screens", "pause", "resume", "start", "stop", "restart", "serve", "metrics", "usage", "results",
    "open", "health", "token", "node", "config", "install", "help"]


@pytest.fixture(scope="module")
def home():
    with Home(cpu_slots=20) as made:
        yield made


@pytest.fixture
def own_home():
    with Home() as made:
        yield made


def main(*argv, **environ):
    out, err = Stream(), Stream()
    code = nexus.main(argv, {"NEXUS_HOME": "/dev/null/nexus", **environ}, out, err)
    return code, out.text, err.text


# Words


def test_help():
    for words in (["help"], ["--help"], ["-h"]):
        code, out, err = main(*words)
        assert (code, err) == (0, "")
        assert re.findall(r"^  ([a-z]+) ", out, re.MULTILINE) == LISTED
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize("command", LISTED)
def test_help_of_each_command(command):
    answers = [main(*words) for words in (["help", command], ["--help", command], [command, "--help"], [command, "-h"])]
    if command != "help":
        assert answers[0][0] == 0 and answers[0][1].startswith(f"usage: nexus {command}") and answers[0][2] == ""
    assert answers[0] == answers[1]


def test_help_of_a_command_of_two_words():
    answer = main("help", "node", "add")
    assert answer == main("node", "add", "--help") and answer[1].startswith("usage: nexus node add")


def test_help_goes_to_where_data_goes(capsys):
    code, out, err = main("add", "--help")
    assert code == 0 and out.startswith("usage: nexus add") and err == "" and capsys.readouterr() == ("", "")


def test_version():
    for flag in ("--version", "-V"):
        code, out, err = main(flag)
        assert (code, err) == (0, "") and re.fullmatch(rf"nexus {re.escape(nexus.__version__)} \([0-9a-f]{{8}}\)\n", out)


WRONG = [  # words, what it says
    (["stats"], "did you mean 'status'?"), (["quue"], "did you mean 'queue'?"), (["xyzzy"], "nexus help lists them"),
    (["help", "ad"], "did you mean 'add'?"), (["status", "--wacth"], "--wacth"), (["--wacth"], "--wacth"), (["show"], "ID"),
    (["kill"], "--group"), (["jobs", "--status", "done"], "done"), (["logs", "abc", "--stream", "x"], "stderr"),
    (["move", "abc"], "--first"), (["config", "delete"], "sample"), (["start", "--log-level", "LOUD"], "WARNING"), (["status", "x"], "x"),
    (["\x1b[31mred"], "[31mred"), ([""], "''"), (["caf\udce9"], "not a command"),
    (["wait"], "--group"), (["retry"], "--failed"), (["kill", "abc", "--group", "g"], "--group"),
    (["pause", "0", "--group", "g"], "not both"),
    (["why"], "ID"), (["retry", "--failed", "a"], "not both"), (["clear", "a", "--all"], "not both"),
    *(([command, *words, "--name", ""], "--name needs a value") for command, *words in (
        ["cancel"], ["kill"], ["remove"], ["wait"], ["pause"], ["resume"], ["edit", "--gpus", "1"], ["move", "--last"], ["retry"],
        ["clear"])),
    *(([command, *words], "ids or names") for command, *words in (
        ["cancel"], ["remove"], ["edit", "--gpus", "1"], ["move", "--last"], ["clear"], ["show"], ["attach"])),
    (["edit", "a", "--name", "x", "--set-name", "y"], "mean the same"), (["pause", "--dry-run"], "the queue"),
    (["metrics", "x"], "x"), (["queue", "--group"], "--group"),
    (["kill", "--gruop", "g"], "did you mean '--group'?"), (["edit", "a", "--retry", "b"], "hint: did you mean '--retries'?"),
    (["add", "--gpu=1", "x"], "did you mean '--gpus'?"),
    (["add", "--cpus", "4", "x"], "hint: nexus help add"), (["add", "--mem", "4G", "x"], "hint: leave it out"),
]


@pytest.mark.parametrize("words, says", WRONG, ids=[" ".join(case[0]).encode("ascii", "backslashreplace").decode() for case in WRONG])
def test_wrong_words_are_usage_errors(words, says):
    code, out, err = main(*words)
    assert (code, out) == (2, "") and says in err and err.startswith("nexus: ") and "\nhint: " in err and err.endswith("\n"), err
    assert "\x1b" not in err and "Traceback" not in err          # before any service was asked: none can be started in /dev/null


@pytest.mark.parametrize("words, command", [(["ls"], "jobs"), (["ps"], "jobs"), (["rm", "abc"], "remove"), (["submit", "true"], "add")])
def test_words_of_other_queues_are_understood(words, command):
    found = nexus.find_command(words, nexus.COMMANDS)
    assert found.name == command and nexus.parse_words(found, words[1:], Stream()).chosen


EXAMPLES = [(command, example) for command in nexus.COMMANDS for example in command.examples]


@pytest.mark.parametrize("command, example", EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_examples_of_the_help_can_be_typed(command, example):
    words = shlex.split(example.partition(" && ")[0])
    assert words[0] == command.name and nexus.parse_words(command, words[1:], Stream()).chosen
    assert f"  nexus {example}\n" in main("help", command.name)[1]


def test_a_fault_of_ours_shows_its_traceback_and_is_1(monkeypatch):
    monkeypatch.setattr(nexus, "COMMANDS", (nexus.Command("status", "x", lambda call: 1 / 0),))
    code, out, err = main()
    assert (code, out) == (1, "") and err.startswith("nexus: this is a fault of nexus itself") and "ZeroDivisionError" in err


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(call):
        raise KeyboardInterrupt
    monkeypatch.setattr(nexus, "COMMANDS", (nexus.Command("status", "x", interrupt),))
    assert main() == (130, "", "")


def test_errors_are_red_at_a_terminal_alone(own_home):
    with own_home.terminal("stats") as terminal:
        assert terminal.end() == (2, "nexus: \x1b[31m'stats' is not a command\x1b[0m\nhint: did you mean 'status'?\n")
    with own_home.terminal("stats", NO_COLOR="1") as terminal:
        assert "\x1b" not in terminal.end()[1]


# Surroundings


def test_broken_pipes_are_silent(home):
    for number in range(3):
        home.main("add", "--gpus", "0", f"true {number} " + "x" * 100000)
    for words in ("jobs", "jobs --json", "help", "config sample", "status"):
        done = subprocess.run(["bash", "-c", f'set -o pipefail; "{sys.executable}" "{SCRIPT}" {words} | head -1 > /dev/null'],
                              capture_output=True, env=home.environ, timeout=60)
        assert (done.returncode, done.stderr) == (0, b""), words
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" "{SCRIPT}" run --gpus 0 "seq 100000" 2>/dev/null | head -1'],
                          capture_output=True, env=home.environ, timeout=60)
    assert (done.stdout, done.stderr) == (b"1\n", b"")


def test_a_full_device_is_said(home):
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" "{SCRIPT}" status > /dev/full'],
                          capture_output=True, env=home.environ, timeout=60)
    assert done.returncode == 6 and b"No space left" in done.stderr and b"Traceback" not in done.stderr, done


def test_closed_streams(home):
    for closed in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
        done = subprocess.run(["bash", "-c", f'"{sys.executable}" "{SCRIPT}" run --gpus 0 "echo a" {closed}'], capture_output=True,
                              env=home.environ, timeout=60)
        assert b"Traceback" not in done.stderr and done.returncode == 0, (closed, done)


def block(folder, *modules):
    """A folder for PYTHONPATH in which these modules cannot be imported."""
    os.makedirs(folder, exist_ok=True)
    for module in modules:
        with open(os.path.join(folder, f"{module}.py"), "w") as file:
            file.write(f"raise ImportError('no {module} here')\n")
    return folder


def test_modules_of_a_project_do_not_keep_the_service_from_starting(own_home):
    environ = {"PYTHONPATH": block(os.path.join(own_home.top, "project"), "types", "sitecustomize")}
    done = own_home.run("run", "--gpus", "0", "echo $PYTHONPATH", python=(sys.executable, "-I"), **environ)     # as it is installed
    assert (done.code, done.out) == (0, environ["PYTHONPATH"] + "\n"), done


def test_a_service_that_cannot_start_says_why(own_home, monkeypatch):
    python = own_home.file("python")
    python.write_text("#!/bin/sh\necho 'ImportError: it is broken' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(nexus, "START_TIMEOUT_S", 2.0)
    done = own_home.main("start")
    assert done.code == 6 and "did not start within 2 s\n" in done.err and "nexus serve" in done.err
    assert f"see {own_home.file('service.log')}" in done.err and "it is broken" in own_home.file("service.log").read_text()


@pytest.mark.parametrize("has_psutil", [True, False])
def test_what_is_known_with_psutil_and_without(own_home, has_psutil):
    python = sys.executable
    if not has_psutil:                                  # an environment without packages, but what reads config.toml
        venv.create(own_home.file("bare"), with_pip=False)
        python = str(own_home.file("bare") / "bin" / "python")
        if sys.version_info < (3, 11):
            tomli, = importlib.util.find_spec("tomli").submodule_search_locations
            packages, = own_home.file("bare").glob("lib/python*/site-packages")
            shutil.copytree(tomli, packages / "tomli")
    job_id = own_home.run("add", "sleep 60 & setsid sleep 60 & wait", python=(python,)).id
    own_home.wait_for_start(job_id)
    until(lambda: own_home.job(job_id)["cpu_percent"] is not None, "two looks at it")
    if has_psutil:
        until(lambda: own_home.job(job_id)["peak_rss_mib"], "its memory")
    detailed = own_home.run("status", "--detailed", python=(python,)).out
    assert ("psutil is not installed" in detailed) == (not has_psutil), detailed
    assert own_home.run("kill", job_id, python=(python,)).code == 0
    own_home.wait_for(job_id, "cancelled")
    job = own_home.job(job_id)
    assert job["cpu_seconds"] is not None and (job["peak_rss_mib"] is None) == (not has_psutil)
    assert own_home.run("health", python=(python,)).code == 0
    own_home.write_config(max_memory_gb=8)
    done = own_home.run("restart", python=(python,))
    if has_psutil:
        assert done.code == 0, done
    else:
        assert done.code == 2 and "max_memory_gb needs psutil" in done.err and f"{python} -m pip install psutil" in done.err, done
        assert own_home.run("health", python=(python,)).code == 0, "the former service goes on"


def bare_path(home, *left_out):
    """A PATH with all of the system's programs but some."""
    folder = os.path.join(home.top, "programs")
    os.makedirs(folder)
    for source in ("/bin", "/usr/bin", "/usr/local/bin"):
        for name in os.listdir(source):
            if name not in left_out and not os.path.lexists(os.path.join(folder, name)):
                os.symlink(os.path.join(source, name), os.path.join(folder, name))
    return folder


def test_without_screen(own_home):
    path = bare_path(own_home, "screen")
    done = own_home.run("run", "echo hello; exit 3", PATH=path)
    assert (done.code, done.out) == (3, "hello\n"), done
    hint = "hint: screen is not installed: jobs run directly, without attach (install it: apt install screen)"
    assert hint in own_home.run("status", PATH=path).out
    job_id = own_home.run("add", "sleep 60", PATH=path).id
    job = own_home.wait_for_start(job_id)
    assert job["session"] is None
    done = own_home.run("attach", job_id, PATH=path)
    assert done.code == 4 and "screen" in done.err and f"nexus logs -f {job_id}" in done.err
    assert own_home.run("screens", PATH=path).code == 6
    with own_home.terminal("run", "--tty", "bash", PATH=path) as terminal:
        code, text = terminal.end()
        assert code == 2 and "screen is not installed" in text and "hint: apt install screen, then nexus restart; to see only" in text
    pid = own_home.kill_service()
    until(lambda: own_home.file("service.json").exists() and own_home.service["pid"] != pid, "its return")
    assert own_home.run("kill", job_id, PATH=path).code == 0
    assert own_home.run("stop", PATH=path).code == 0
    until(lambda: not own_home.processes(), "the end of everything")


def runs(python):
    """A pyenv shim is there for versions, too, that it does not run."""
    return bool(python) and os.path.exists(python) and subprocess.run([python, "-c", "pass"], capture_output=True).returncode == 0


OLD_PYTHONS = [path for minor, patch in ((9, 18), (10, 13)) for path in [next(filter(runs, (
    os.path.expanduser(f"~/.pyenv/versions/3.{minor}.{patch}/bin/python3"), shutil.which(f"python3.{minor}"))), None)] if path]


@pytest.mark.parametrize("python", OLD_PYTHONS)
def test_without_tomli_on_an_old_python(own_home, python):
    environ = {"PYTHONPATH": block(os.path.join(own_home.top, "stubs"), "tomli")}
    for words in (["add", "true"], ["serve"], ["config"]):
        done = own_home.run(*words, python=(python,), **environ)
        assert (done.code, done.out) == (2, "") and "has no TOML parser" in done.err and "-m pip install tomli" in done.err, done
        assert str(own_home.file("config.toml")) in done.err
    own_home.file("config.toml").unlink()
    assert own_home.run("config", python=(python,), **environ).code == 0
    assert own_home.run("config", "sample", python=(python,), **environ).code == 0


@pytest.mark.parametrize("python", OLD_PYTHONS[:1])
def test_the_oldest_python_runs_a_job_with_nothing_installed(own_home, python):
    own_home.file("config.toml").unlink()
    there = pathlib.Path(SCRIPT).read_text(encoding="utf-8")
    text = there.replace("        6234, integer_in", f"        {own_home.port}, integer_in")
    assert text != there, "without a configuration it would meet whoever has the usual port"
    script = os.path.join(own_home.top, "nexus.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(text)
    done = own_home.run("run", "echo hello; exit 3", python=(python, "-I", "-S"), script=script)
    assert (done.code, done.out) == (3, "hello\n"), done


def test_no_path_no_home_no_terminal(own_home):
    environ = {"NEXUS_HOME": own_home.path, "NEXUS_MOCK_GPUS": "2", "SCREENDIR": own_home.environ["SCREENDIR"]}
    done = subprocess.run([sys.executable, SCRIPT, "run", "echo hello; echo $HOME; echo $PATH"], capture_output=True, env=environ,
                          timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"hello\n"), done
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, env=environ, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"Queue: 0 jobs"), done


@pytest.mark.parametrize("name", ["with blanks and 'quotes'", 'double "quotes" $HOME `x`', "größe 数据", "100% {name} \\n", "-n"])
def test_a_home_of_any_name(name):
    with Home(name=name) as made:
        done = made.run("run", "echo hello; exit 3")
        assert (done.code, done.out) == (3, "hello\n"), done
        job_id = made.main("add", "sleep 60").id
        made.wait_for_start(job_id)
        made.kill_service()
        assert made.run("kill", job_id).code == 0
        assert made.run("logs", "service", "-n", "1").code == 0 and made.run("stop").code == 0


def test_a_home_of_a_very_long_name():
    with Home(name="long" * 50) as made:
        made.environ.pop("SCREENDIR")
        done = made.run("run", "echo hello; exit 3")
        assert (done.code, done.out) == (3, "hello\n"), done


def test_a_deleted_directory(own_home):
    folder = os.path.join(own_home.top, "gone")
    script = f'cd "{folder}" && rmdir "{folder}" && exec "{sys.executable}" "{SCRIPT}" "$@"'

    def run(*words):
        os.makedirs(folder)
        return subprocess.run(["bash", "-c", script, "nexus", *words], capture_output=True, env=own_home.environ, timeout=60)
    done = run("add", "true")
    assert done.returncode == 2 and b"current directory has been deleted" in done.stderr and b"hint:" in done.stderr and not done.stdout
    done = run("run", "--cwd", "/tmp", "pwd")
    assert (done.returncode, done.stdout) == (0, b"/tmp\n")
    done = run("add", "--cwd", "relative", "true")
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    for words in (["status"], ["jobs"], ["config", "path"], ["stop"], ["start"]):
        assert run(*words).returncode == 0, words


@pytest.mark.parametrize("setting, says", [
    ("", "Mock GPU"), ("two", 'from 0 to 1024, not "two"'), ("-1", "1024, not -1"), ("99999", "1024")])
def test_a_number_of_mock_gpus_that_is_none(own_home, setting, says):
    done = own_home.main("status", NEXUS_MOCK_GPUS=setting)
    assert (done.code == 2 and says in done.err and "hint:" in done.err) if setting else done.code == 0


def test_a_home_that_cannot_be_made(own_home):
    blocked = os.path.join(own_home.top, "file")
    open(blocked, "w").close()
    for path in (os.path.join(blocked, "nexus"), blocked, "/proc/nexus"):
        done = own_home.main("add", "true", NEXUS_HOME=path)
        assert done.code == 6 and path in done.err and "Traceback" not in done.err, done


def test_the_environment_of_a_job_that_starts_the_service_is_not_the_services(own_home):
    done = own_home.run("add", "true", NEXUS_JOB_ID="abc", NEXUS_GPU_ID="7", NEXUS_JOB_NONCE="x", CUDA_VISIBLE_DEVICES="7")
    assert done.code == 0
    with open(f"/proc/{own_home.service['pid']}/environ", "rb") as file:
        names = {word.partition(b"=")[0] for word in file.read().split(b"\0")}
    assert not names & {b"NEXUS_JOB_ID", b"NEXUS_GPU_ID", b"NEXUS_JOB_NONCE", b"CUDA_VISIBLE_DEVICES"}
    assert {os.readlink(f"/proc/{own_home.service['pid']}/fd/{number}") for number in (0, 1)} == {"/dev/null"}

"""The command line as a program in strange surroundings."""

import importlib.util
import os
import pathlib
import pwd
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from console import COMMAND, SCRIPT, Home
from live import until

import nexus


def test_errors_are_red_at_a_terminal_alone(home):
    with home.terminal("stats") as terminal:
        assert terminal.end() == (2, "nexus: \x1b[31m'stats' is not a command\x1b[0m\nhint: did you mean 'status'?\n")
    with home.terminal("stats", NO_COLOR="1") as terminal:
        assert "\x1b" not in terminal.end()[1]


# Surroundings


def test_broken_pipes_are_silent(home):
    for number in range(3):
        home.main("add", "--gpus", "0", f"true {number} " + "x" * 100000)
    for words in ("jobs", "jobs --json", "help", "config sample", "status"):
        done = subprocess.run(["bash", "-c", f'set -o pipefail; "{sys.executable}" "{COMMAND}" {words} | head -1 > /dev/null'],
                              capture_output=True, env=home.environ, timeout=60)
        assert (done.returncode, done.stderr) == (0, b""), words
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" "{COMMAND}" run --gpus 0 "seq 100000" 2>/dev/null | head -1'],
                          capture_output=True, env=home.environ, timeout=60)
    assert (done.stdout, done.stderr) == (b"1\n", b"")


def test_a_full_device_is_said(home):
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" "{COMMAND}" status > /dev/full'],
                          capture_output=True, env=home.environ, timeout=60)
    assert done.returncode == 6 and b"No space left" in done.stderr and b"Traceback" not in done.stderr, done


def test_closed_streams(home):
    for closed in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
        done = subprocess.run(["bash", "-c", f'"{sys.executable}" "{COMMAND}" run --gpus 0 "echo a" {closed}'], capture_output=True,
                              env=home.environ, timeout=60)
        assert b"Traceback" not in done.stderr and done.returncode == 0, (closed, done)


def block(folder, *modules):
    """A folder for PYTHONPATH in which these modules cannot be imported."""
    os.makedirs(folder, exist_ok=True)
    for module in modules:
        with open(os.path.join(folder, f"{module}.py"), "w") as file:
            file.write(f"raise ImportError('no {module} here')\n")
    return folder


def test_modules_of_a_project_do_not_keep_the_service_from_starting(bare_home):
    environ = {"PYTHONPATH": block(os.path.join(bare_home.top, "project"), "types", "sitecustomize")}
    done = bare_home.run("run", "--gpus", "0", "echo $PYTHONPATH", python=(sys.executable, "-I"), **environ)     # as it is installed
    assert (done.code, done.out) == (0, environ["PYTHONPATH"] + "\n"), done


def test_a_service_that_cannot_start_says_why(bare_home, monkeypatch):
    python = bare_home.file("python")
    python.write_text(f"#!/bin/sh\n[ \"$2\" != -S ] || exec {sys.executable} \"$@\"\n"         # -S: what starts the supervisor
                      "echo 'ImportError: it is broken' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(nexus, "START_TIMEOUT_S", 2.0)
    done = bare_home.main("start")
    assert done.code == 6 and "did not start within 2 s\n" in done.err and "nexus serve" in done.err
    assert f"see {bare_home.file('service.log')}" in done.err and "it is broken" in bare_home.file("service.log").read_text()


@pytest.mark.parametrize("has_psutil", [True, False])
def test_what_is_known_with_psutil_and_without(bare_home, has_psutil):
    python = sys.executable
    if not has_psutil:                                  # an environment without packages, but what reads config.toml
        venv.create(bare_home.file("bare"), with_pip=False)
        python = str(bare_home.file("bare") / "bin" / "python")
        if sys.version_info < (3, 11):
            tomli, = importlib.util.find_spec("tomli").submodule_search_locations
            packages, = bare_home.file("bare").glob("lib/python*/site-packages")
            shutil.copytree(tomli, packages / "tomli")
    job_id = bare_home.run("add", "sleep 60 & setsid sleep 60 & wait", python=(python,)).id
    bare_home.wait_for_start(job_id)
    until(lambda: bare_home.job(job_id)["cpu_percent"] is not None, "two looks at it")
    if has_psutil:
        until(lambda: bare_home.job(job_id)["peak_rss_mib"], "its memory")
    detailed = bare_home.run("status", "--detailed", python=(python,)).out
    assert ("psutil is not installed" in detailed) == (not has_psutil), detailed
    assert bare_home.run("kill", job_id, python=(python,)).code == 0
    bare_home.wait_for(job_id, "cancelled")
    job = bare_home.job(job_id)
    assert job["cpu_seconds"] is not None and (job["peak_rss_mib"] is None) == (not has_psutil)
    assert bare_home.run("health", python=(python,)).code == 0
    bare_home.write_config(max_memory_gb=8)
    done = bare_home.run("restart", python=(python,))
    if has_psutil:
        assert done.code == 0, done
    else:
        assert done.code == 2 and "max_memory_gb needs psutil" in done.err and f"{python} -m pip install psutil" in done.err, done
        assert bare_home.run("health", python=(python,)).code == 0, "the former service goes on"


def bare_path(home, *left_out):
    """A PATH with all of the system's programs but some."""
    folder = os.path.join(home.top, "programs")
    os.makedirs(folder)
    for source in ("/bin", "/usr/bin", "/usr/local/bin"):
        for name in os.listdir(source):
            if name not in left_out and not os.path.lexists(os.path.join(folder, name)):
                os.symlink(os.path.join(source, name), os.path.join(folder, name))
    return folder


def test_without_screen(bare_home):
    path = bare_path(bare_home, "screen")
    done = bare_home.run("run", "echo hello; exit 3", PATH=path)
    assert (done.code, done.out) == (3, "hello\n"), done
    hint = "hint: screen is not installed: jobs run directly, without attach (install it: apt install screen)"
    assert hint in bare_home.run("status", PATH=path).out
    job_id = bare_home.run("add", "sleep 60", PATH=path).id
    job = bare_home.wait_for_start(job_id)
    assert job["session"] is None
    done = bare_home.run("attach", job_id, PATH=path)
    assert done.code == 4 and "screen" in done.err and f"nexus logs -f {job_id}" in done.err
    assert bare_home.run("screens", PATH=path).code == 6
    with bare_home.terminal("run", "--tty", "bash", PATH=path) as terminal:
        code, text = terminal.end()
        assert code == 2 and "screen is not installed" in text and "hint: apt install screen, then nexus restart; to see only" in text
    pid = bare_home.kill_service()
    until(lambda: bare_home.file("service.json").exists() and bare_home.service["pid"] != pid, "its return")
    assert bare_home.run("kill", job_id, PATH=path).code == 0
    assert bare_home.run("stop", PATH=path).code == 0
    until(lambda: not bare_home.processes(), "the end of everything")


def runs(python):
    """A pyenv shim is there for versions, too, that it does not run."""
    return bool(python) and os.path.exists(python) and subprocess.run([python, "-c", "pass"], capture_output=True).returncode == 0

OLD_PYTHONS = [path for minor, patch in ((9, 18), (10, 13)) for path in [next(filter(runs, (
    os.path.expanduser(f"~/.pyenv/versions/3.{minor}.{patch}/bin/python3"), shutil.which(f"python3.{minor}"))), None)] if path]


@pytest.mark.parametrize("python", OLD_PYTHONS[:1])
def test_without_tomli_on_an_old_python(bare_home, python):
    environ = {"PYTHONPATH": block(os.path.join(bare_home.top, "stubs"), "tomli")}
    for words in (["add", "true"], ["serve"], ["config"]):
        done = bare_home.run(*words, python=(python,), **environ)
        assert (done.code, done.out) == (2, "") and "has no TOML parser" in done.err and "-m pip install tomli" in done.err, done
        assert str(bare_home.file("config.toml")) in done.err
    bare_home.file("config.toml").unlink()
    assert bare_home.run("config", python=(python,), **environ).code == 0
    assert bare_home.run("config", "sample", python=(python,), **environ).code == 0


@pytest.mark.parametrize("python", OLD_PYTHONS[:1])
def test_the_oldest_python_runs_a_job_with_nothing_installed(bare_home, python):
    bare_home.file("config.toml").unlink()
    there = pathlib.Path(SCRIPT).read_text(encoding="utf-8")
    text = there.replace("        6234, integer_in", f"        {bare_home.port}, integer_in")
    assert text != there, "without a configuration it would meet whoever has the usual port"
    script = os.path.join(bare_home.top, "nexus.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(text)
    done = bare_home.run("run", "echo hello; exit 3", python=(python, "-I", "-S"), script=script)
    assert (done.code, done.out) == (3, "hello\n"), done


def test_no_path_no_home_no_terminal(bare_home):
    environ = {"NEXUS_HOME": bare_home.path, "NEXUS_MOCK_GPUS": "2", "SCREENDIR": bare_home.environ["SCREENDIR"]}
    done = subprocess.run([sys.executable, COMMAND, "run", "echo hello; echo $HOME; echo $PATH"], capture_output=True, env=environ,
                          timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"hello\n"), done
    done = subprocess.run([sys.executable, COMMAND], capture_output=True, env=environ, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(b"Queue: 0 jobs"), done


@pytest.mark.parametrize("name", ["'quotes' \"double\" $HOME `x` größe 数据 100% {name} \\n", "-n"])
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


def test_a_deleted_directory(bare_home):
    folder = os.path.join(bare_home.top, "gone")
    script = f'cd "{folder}" && rmdir "{folder}" && exec "{sys.executable}" "{COMMAND}" "$@"'

    def run(*words):
        os.makedirs(folder)
        return subprocess.run(["bash", "-c", script, "nexus", *words], capture_output=True, env=bare_home.environ, timeout=60)
    done = run("add", "true")
    assert done.returncode == 2 and b"current directory has been deleted" in done.stderr and b"hint:" in done.stderr and not done.stdout
    done = run("run", "--cwd", "/tmp", "pwd")
    assert (done.returncode, done.stdout) == (0, b"/tmp\n")
    done = run("add", "--cwd", "relative", "true")
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    for words in (["status"], ["jobs"], ["config", "path"], ["stop"], ["start"]):
        assert run(*words).returncode == 0, words


def test_a_number_of_mock_gpus_that_is_none(bare_home):
    for setting, says in (("two", 'from 0 to 1024, not "two"'), ("-1", "1024, not -1"), ("99999", "1024")):
        done = bare_home.main("status", NEXUS_MOCK_GPUS=setting)
        assert done.code == 2 and says in done.err and "hint:" in done.err, done
    assert bare_home.main("status", NEXUS_MOCK_GPUS="").code == 0


def test_a_home_that_cannot_be_made(bare_home):
    blocked = os.path.join(bare_home.top, "file")
    open(blocked, "w").close()
    for path in (os.path.join(blocked, "nexus"), blocked, "/proc/nexus"):
        done = bare_home.main("add", "true", NEXUS_HOME=path)
        assert done.code == 6 and path in done.err and "Traceback" not in done.err, done


def test_a_user_without_a_home(bare_home, monkeypatch, tmp_path):
    """As in a container with `--user 4242`: nothing is made in the current directory, least of all a folder named ~."""
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    for words, given in ((["status"], ""), (["status"], "~/.nexus"), (["config", "path"], "~nobody-of-this-name/x"),
                         (["install"], bare_home.path)):
        done = bare_home.main(*words, HOME="", NEXUS_HOME=given)
        assert (done.code, done.out) == (2, "") and "no home directory is known" in done.err and "hint: export HOME" in done.err, done
    assert list(tmp_path.iterdir()) == []


def test_the_environment_of_a_job_that_starts_the_service_is_not_the_services(bare_home):
    done = bare_home.run("add", "true", NEXUS_JOB_ID="abc", NEXUS_GPU_ID="7", NEXUS_JOB_NONCE="x", CUDA_VISIBLE_DEVICES="7")
    assert done.code == 0
    with open(f"/proc/{bare_home.service['pid']}/environ", "rb") as file:
        names = {word.partition(b"=")[0] for word in file.read().split(b"\0")}
    assert not names & {b"NEXUS_JOB_ID", b"NEXUS_GPU_ID", b"NEXUS_JOB_NONCE", b"CUDA_VISIBLE_DEVICES"}
    assert {os.readlink(f"/proc/{bare_home.service['pid']}/fd/{number}") for number in (0, 1)} == {"/dev/null"}

# What wraps nexus
SHOW = "printf '%s|' \"$PATH\" \"${VIRTUAL_ENV-none}\" \"${UV-none}\" \"${UV_RUN_RECURSION_DEPTH-none}\""


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    """uv, offline, with a nexus.py that needs nothing from outside, a wheel of it, and a venv of the user's."""
    program = shutil.which("uv", path=f"{sys.prefix}/bin:{os.environ['PATH']}")
    if not program:
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("uv")
    source = pathlib.Path(SCRIPT).read_text()
    (folder / "nexus.py").write_text(re.sub("(?m)^# dependencies = .*$", "# dependencies = []", source))
    about = {"METADATA": "Metadata-Version: 2.1\nName: nexus-gpu-queue\nVersion: 1\n", "RECORD": "",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
             "entry_points.txt": "[console_scripts]\nnexus = nexus:entry\n"}
    with zipfile.ZipFile(folder / "nexus_gpu_queue-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nexus.py", source)
        for name, text in about.items():
            wheel.writestr(f"nexus_gpu_queue-1.dist-info/{name}", text)
        if sys.version_info < (3, 11):      # nexus needs tomli there, and nothing is downloaded here
            tomli = pathlib.Path(importlib.util.find_spec("tomli").origin).parent
            shutil.copytree(tomli, folder / "tomli")
            for path in tomli.glob("*.py"):
                wheel.write(path, f"tomli/{path.name}")
    venv.create(folder / "venv", symlinks=True)
    return program, folder


@pytest.mark.parametrize("words, is_active, is_dropped", [
    (["run", "nexus.py"], True, True), (["tool", "run", "--from", "nexus_gpu_queue-1-py3-none-any.whl", "nexus"], False, True),
    (["run", "python", "nexus.py"], True, False)])
def test_a_job_of_a_nexus_that_uv_runs(home, uv, words, is_active, is_dropped):
    program, folder = uv
    path = f"{folder}/venv/bin:{os.environ['PATH']}" if is_active else os.environ["PATH"]
    environ = {**home.environ, "PATH": path, "UV_CACHE_DIR": str(folder / "cache"), "UV_OFFLINE": "1", "UV_PYTHON_DOWNLOADS": "never",
               **({"VIRTUAL_ENV": str(folder / "venv")} if is_active else {})}
    done = subprocess.run([program, *words, "run", "--gpus", "0", SHOW], cwd=folder, env=environ, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done
    active = str(folder / "venv") if is_active else "none"
    shown = done.stdout.split("|")
    assert shown[:2] == [path if is_dropped else f"{folder}/venv/bin:{path}", active] and (shown[2] == "none") == is_dropped, done

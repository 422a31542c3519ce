"""--conda: the environment is activated for real, and the command is none the wiser.

The conda here is tests/support/fake_conda.
"""

import contextlib
import json
import os
import pathlib
import shlex
import signal
import sys

import pytest
from live import until
from makers import SUPPORT
from test_runner import ENVIRONMENT, box, seen_environment

__all__ = ["box"]                               # a fixture, found by its name
BIN = "/usr/local/bin:/usr/bin:/bin"
KINDS = ["conda", "micromamba", "mamba"]


class Conda:
    """An installation with the environments base and ml."""

    def __init__(self, root, kind="conda"):
        self.root, self.kind, self.exe = root, kind, f"{root}/bin/{kind}"
        make_program(self.exe, f'exec {shlex.quote(sys.executable)} -IS {shlex.quote(str(SUPPORT / "fake_conda"))} "$0" "$@"')
        self.make(root)
        self.make(f"{root}/envs/ml", activate="export ML=from_ml ML_AT=$CONDA_PREFIX", deactivate="unset ML; export ML_LEFT=yes")

    def make(self, prefix, **scripts):
        """Make an environment, with a python that says where it is; return its prefix."""
        os.makedirs(f"{prefix}/conda-meta", exist_ok=True)
        make_program(f"{prefix}/bin/python", 'echo "python of $0"')
        for kind, text in scripts.items():
            folder = pathlib.Path(prefix, "etc/conda", f"{kind}.d")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "it.sh").write_text(f"{text}\n", encoding="utf-8", errors="surrogateescape")
        return prefix

    def environ(self, **more):
        """Of a job that was submitted where this conda is initialized."""
        own = {"CONDA_EXE": self.exe} if self.kind == "conda" else {"MAMBA_EXE": self.exe, "MAMBA_ROOT_PREFIX": self.root}
        return {"PATH": BIN, "HOME": f"{self.root}/nobody", **own, **more}


def make_program(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(f"#!/bin/sh\n{text}\n")
    os.chmod(path, 0o755)


@pytest.fixture
def conda(tmp_path):
    return Conda(f"{tmp_path}/root")


@pytest.fixture(params=KINDS)
def each_conda(request, tmp_path):
    return Conda(f"{tmp_path}/root", request.param)


def no_environment(name, program):
    return (f"the conda environment '{name}' was not found, or could not be activated, by {os.path.basename(program)}: "
            "stderr.log says why, and which there are")


def folder_of(box):
    return sorted(os.listdir(box.layout.job_folder("abc")))


WHOLE = ["attempt-1", "job.sh", "result-1.json", "stderr.log", "stdout.log"]


# The environment


def test_it_is_activated(box, each_conda):
    prefix = f"{each_conda.root}/envs/ml"
    result = box.run('echo $CONDA_PREFIX $CONDA_DEFAULT_ENV $CONDA_SHLVL $ML $ML_AT; python; echo "$PATH"', conda="ml",
                     environment=each_conda.environ())
    assert result.exit_code == 0 and result.cause is None, box.text("stderr.log")
    assert box.text("stdout.log").splitlines() == [f"{prefix} ml 1 from_ml {prefix}", f"python of {prefix}/bin/python",
                                                   f"{prefix}/bin:{each_conda.root}/condabin:{BIN}"]
    assert box.text("stderr.log") == "" and folder_of(box) == WHOLE, "no litter"


PLACES = [  # reason, what --conda says ({}: the installation's root), prefix
    ("base", "base", "{}"), ("a path", "{}/envs/ml", "{}/envs/ml"), ("a path elsewhere", "{}/own", "{}/own"),
    ("a path from the job's directory", "./own", "{}/own"), ("a path with blanks", "{}/a  b $(c) \"d\"", None),
    ("a name with blanks", "x  y", "{}/envs/x  y"),
]


@pytest.mark.parametrize("reason, said, prefix", PLACES, ids=[case[0] for case in PLACES])
def test_by_name_or_path(box, each_conda, reason, said, prefix):
    root = each_conda.root
    said = said.replace("{}", root)
    prefix = said if prefix is None else prefix.replace("{}", root)
    each_conda.make(prefix)
    box.run('echo "$CONDA_PREFIX"; python', conda=said, cwd=root, environment=each_conda.environ())
    assert box.text("stdout.log").splitlines() == [prefix, f"python of {prefix}/bin/python"], box.text("stderr.log")


@pytest.mark.parametrize("gpus", ["0,1", ""])
def test_variables_of_the_environment_but_the_gpus_of_nexus(box, conda, gpus):
    pathlib.Path(conda.root, "envs/ml/conda-meta/state").write_text(json.dumps({"env_vars": {
        "CUDA_VISIBLE_DEVICES": "7", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "OMP_NUM_THREADS": "3"}}))
    box.run('echo "[$CUDA_VISIBLE_DEVICES]" $CUDA_DEVICE_ORDER $OMP_NUM_THREADS', conda="ml",
                environment=conda.environ(CUDA_VISIBLE_DEVICES=gpus, CUDA_DEVICE_ORDER="PCI_BUS_ID"))
    assert box.text("stdout.log") == f"[{gpus}] PCI_BUS_ID 3\n"


def test_the_rest_of_the_environment_is_what_it_was(box, conda):
    given = {**ENVIRONMENT, "name": "x", "words": "y", "line": "z", **conda.environ()}
    box.run("cat /proc/$$/environ > environ", conda="ml", environment=given)
    seen = dict(entry.partition("=")[::2] for entry in seen_environment(box))
    changed = {"PATH", "_", "PWD", "SHLVL", "OLDPWD", "IFS", "PS4"}        # by each bash, so by the command's own too
    assert {name: seen.get(name) for name in given if name not in changed} == {name: text for name, text in given.items()
                                                                               if name not in changed}
    assert {name for name in set(seen) - set(given) if not name.startswith(("CONDA_", "_CE_"))} - changed == {"ML", "ML_AT"}


# Submitted where another environment is active


@pytest.mark.parametrize("name, said", [("other", "2 from_ml"), ("ml", "1 from_ml")])
def test_from_another_environment(box, each_conda, name, said):
    """Or from the same one."""
    active, prefix = each_conda.make(f"{each_conda.root}/envs/{name}", deactivate="unset OTHER"), f"{each_conda.root}/envs/ml"
    result = box.run('echo $CONDA_PREFIX $CONDA_SHLVL $OTHER $ML; python; echo "$PATH"', conda="ml", environment=each_conda.environ(
        CONDA_PREFIX=active, CONDA_SHLVL="1", CONDA_DEFAULT_ENV=name, OTHER="set", PATH=f"{active}/bin:{BIN}"))
    assert result.exit_code == 0 and box.text("stdout.log").splitlines() == [
        f"{prefix} {said}", f"python of {prefix}/bin/python", f"{prefix}/bin:{BIN}"]


def test_from_a_venv(box, conda):
    """Its python would come before that of the environment, which took the place of base behind it."""
    make_program(f"{conda.root}/v env/bin/python", "echo the venv")
    box.run('python; echo "$PATH" [$VIRTUAL_ENV]', conda="ml", environment=conda.environ(
        CONDA_PREFIX=conda.root, CONDA_SHLVL="1", VIRTUAL_ENV=f"{conda.root}/v env", PATH=f"{conda.root}/v env/bin:{conda.root}/bin:{BIN}"))
    prefix = f"{conda.root}/envs/ml"
    assert box.text("stdout.log").splitlines() == [
        f"python of {prefix}/bin/python", f"{prefix}/bin:{conda.root}/v env/bin:{prefix}/bin:{BIN} []"]


# Where conda is looked for

FOUND = [  # reason, program ({}: the home), variables
    ("CONDA_EXE", "{}/x/bin/conda", {"CONDA_EXE": "{}/x/bin/conda"}),
    ("MAMBA_EXE", "{}/x/bin/micromamba", {"MAMBA_EXE": "{}/x/bin/micromamba"}),
    ("conda on PATH", "{}/x/bin/conda", {"PATH": f"{{}}/x/bin:{BIN}"}),
    ("micromamba on PATH", "{}/x/bin/micromamba", {"PATH": f"{{}}/x/bin:{BIN}"}),
    ("mamba on PATH", "{}/a b/bin/mamba", {"PATH": f"{{}}/a b/bin:{BIN}"}),
    ("a CONDA_EXE that is gone", "{}/miniconda3/bin/conda", {"CONDA_EXE": "{}/gone/bin/conda"}),
    *((f"~/{place}", f"{{}}/{place}", {}) for place in (
        "miniconda3/bin/conda", "miniforge3/bin/conda", "mambaforge/bin/conda", "anaconda3/bin/conda", ".local/bin/micromamba",
        "bin/micromamba")),
]


@pytest.mark.parametrize("reason, program, variables", FOUND, ids=[case[0] for case in FOUND])
def test_where_conda_is_found(box, tmp_path, reason, program, variables):
    program = pathlib.Path(program.replace("{}", str(tmp_path)))
    made = Conda(str(program.parent.parent), program.name)
    result = box.run("echo $CONDA_PREFIX", conda="ml", environment={
        "PATH": BIN, "HOME": str(tmp_path), **{name: text.replace("{}", str(tmp_path)) for name, text in variables.items()}})
    assert result.exit_code == 0 and box.text("stdout.log") == f"{made.root}/envs/ml\n", box.text("stderr.log")


# What cannot be launched


def test_a_missing_environment(box, each_conda):
    result = box.run("echo ran", conda="x", environment=each_conda.environ())
    words = no_environment("x", each_conda.exe)
    assert (result.exit_code, result.cause, result.cause_line, result.runtime_seconds) == (None, "launch", words, 0.0)
    said = box.text("stderr.log")
    assert said.endswith(f"nexus: {words}\n") and f"{each_conda.root}/envs/ml" in said, "who looks at the log finds it too"
    assert ("Could not find conda environment: x" if each_conda.kind == "conda" else "prefix does not exist") in said
    assert box.text("stdout.log") == "" and folder_of(box) == sorted([*WHOLE, "fault-1"]), "no litter"


def test_a_missing_environment_with_an_odd_name(box, conda):
    """It is neither run nor expanded, and said as one line."""
    name = "a 'b' \"c\" \\ \\n %s $(touch pwned) `touch pwned`; touch pwned * /*\t\x1b[2J größe\udcff"
    result = box.run("echo ran", conda=name, environment=conda.environ())
    said = name.replace("\t\x1b", "??").replace("\udcff", "\ufffd")
    assert result.cause == "launch" and result.cause_line == no_environment(said, conda.exe)
    assert box.text("stdout.log") == "" and not os.path.exists(f"{box.home}/pwned")


def test_no_conda_at_all(box, tmp_path):
    result = box.run("echo ran", conda="ml", environment={"PATH": BIN, "HOME": str(tmp_path)})
    if "was not found" in result.cause_line:
        pytest.skip("this machine has a conda in /opt")
    assert result.cause == "launch" and result.exit_code is None
    for place in ("'ml'", "CONDA_EXE", "PATH", "{~,/opt}/{miniconda3,", "~/.local}/bin/micromamba", "/opt/conda"):
        assert place in result.cause_line
    assert str(tmp_path) not in result.cause_line, "a reason holds nothing of the environment"
    assert box.text("stderr.log") == f"nexus: {result.cause_line}\n" and box.text("stdout.log") == ""


def test_a_conda_that_does_not_work(box, conda, tmp_path):
    """It is broken, cannot quote the prefix, or activates whatever it is told, as old micromambas do."""
    make_program(f"{tmp_path}/micromamba", f"[ $1 = env ] || echo export CONDA_PREFIX={tmp_path}/envs/$3")
    for attempt, (name, environment, program) in enumerate([
            ("ml", conda.environ(FAKE_CONDA_BROKEN="conda"), conda.exe), (conda.make(f"{conda.root}/it's"), conda.environ(), conda.exe),
            ("x", {"PATH": BIN, "HOME": "/", "MAMBA_EXE": f"{tmp_path}/micromamba"}, f"{tmp_path}/micromamba")], 1):
        result = box.run("echo ran", conda=name, environment=environment, attempt=attempt)
        assert (result.cause, result.cause_line) == ("launch", no_environment(name, program))
    assert "ModuleNotFoundError" in box.text("stderr.log") and box.text("stdout.log") == ""


# What activation scripts do

SCRIPTS = [  # reason, activate.d script, stdout of the job, stderr
    ("it prints", "echo hello; echo oops >&2", "ran 0\n", "hello\noops\n"),
    ("it fails", "no_such_program 2>/dev/null; false", "ran 0\n", ""),
    ("it reads", "read -r line; echo \"got [$line]\"", "ran 0\n", "got []\n"),
    ("its options", "set -euf -o pipefail; shopt -s nullglob; IFS=a", "ran 0\n", ""),
    ("its functions and traps", "nexus() { :; }; echo() { :; }; export -f nexus; trap 'printf trapped' EXIT; set -- a b", "ran 0\n", ""),
    ("its own names", "name=x words=y exe=z command=false; set -- z", "ran 0\n", ""),
]


@pytest.mark.parametrize("reason, script, out, err", SCRIPTS, ids=[case[0] for case in SCRIPTS])
def test_activation_scripts(box, conda, reason, script, out, err):
    conda.make(f"{conda.root}/envs/ml", activate=script)
    result = box.run('false | true; echo $undefined ran $?', conda="ml", environment=conda.environ())
    assert result.exit_code == 0 and box.text("stdout.log") == out
    assert box.text("stderr.log") == err


ENDS = [("it exits", "exit 3", 3), ("it exits as if all were well", "exit 0", 0), ("set -e", "set -e; (exit 5)", 5)]


@pytest.mark.parametrize("reason, script, code", ENDS, ids=[case[0] for case in ENDS])
def test_an_activation_script_that_ends_the_shell(box, conda, reason, script, code):
    conda.make(f"{conda.root}/envs/ml", activate=script)
    result = box.run("echo ran", conda="ml", environment=conda.environ())
    assert result.cause == "launch" and result.exit_code is None
    assert result.cause_line == f"a script of the conda environment 'ml' ended the activation with exit code {code}"
    assert box.text("stdout.log") == "" and folder_of(box) == sorted([*WHOLE, "fault-1"])


# The command


def test_no_shell_stays_between(box, conda):
    """A signal finds the command itself."""
    os.mkfifo(f"{box.home}/go")
    job = box.prepare("trap 'echo told; exit 9' TERM; echo $$ $PPID; read x < go", conda="ml", environment=conda.environ())
    process = box.start(job)
    until(lambda: os.path.exists(box.path("stdout.log")) and box.text("stdout.log").endswith("\n"))
    pid, parent = map(int, box.text("stdout.log").split())
    assert parent == process.pid

    def signal_it():                                        # again, should it have come just before `read` began to wait
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return box.result(job)

    assert until(signal_it).exit_code == 9 and "told" in box.text("stdout.log")


def test_a_signal_while_it_is_activated(box, conda):
    os.mkfifo(f"{box.home}/wait")
    conda.make(f"{conda.root}/envs/ml", activate=f"cat {box.home}/wait")
    job = box.prepare("echo ran", conda="ml", environment=conda.environ())
    process = box.start(job)
    with open(f"{box.home}/wait", "w"):         # opens when cat is there
        os.killpg(process.pid, signal.SIGTERM)
        result = until(lambda: box.result(job))
    assert process.wait(60) == 0
    assert (result.exit_code, result.cause) == (143, None) and box.text("stdout.log") == "" and folder_of(box) == WHOLE

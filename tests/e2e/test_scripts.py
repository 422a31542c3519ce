"""allowed_script_paths: what somebody who has a token can run, tried from outside."""

import json
import os
import shutil
import subprocess
import sys

import live
import pytest


class Guarded:
    """A box where only scripts below its folder `scripts` may be run, and what bob, who has a token, can do there."""

    def __init__(self, box):
        self.box, self.mark = box, box.path("mark")
        self.scripts, self.evil = box.path("scripts"), box.path("evil")
        for folder, line in ((self.scripts, 'echo "$0 $* $PWD"'), (self.evil, f"touch {self.mark}")):
            (folder / "sub").mkdir(parents=True)
            for name in ("show.sh", "+x", "+c"):
                (folder / name).write_text(f"#!/bin/sh\n{line}\n")
                (folder / name).chmod(0o755)
        for name, first, mode in (("tool", "#!/bin/sh", 0o644), ("notes", "see `./show.sh`", 0o755), ("README.md", "`./show.sh`", 0o644)):
            (self.scripts / name).write_text(f'{first}\necho "$0 $*"; umask\n')
            (self.scripts / name).chmod(mode)
        for name, first in (("near", "#!bin/python"), ("nearer", "#!/usr/bin/env -S bin/python")):
            (self.scripts / name).write_text(f"{first}\n")
            (self.scripts / name).chmod(0o755)
        for name, first in (("by-env", "#!/usr/bin/env python3"), ("by-env-S", "#!/usr/bin/env -S python3 -u"),
                            ("by-path", f"#!{box.bin}/python3")):
            (self.scripts / name).write_text(f"{first}\nimport sys; print(*sys.argv)\n")
        (self.scripts / "by-perl").write_text("#!/usr/bin/env perl\n")
        for name in ("by-env", "by-env-S", "by-path", "by-perl"):
            (self.scripts / name).chmod(0o755)
        (self.evil / ".tool-versions").write_text(f"touch {self.mark}\n")
        (self.evil / "bin").mkdir()
        (self.evil / "bin/python").symlink_to(self.evil / "show.sh")
        (self.scripts / "model").write_text("#!/usr/bin/env -S python3 -u\nprint(__file__)\n")
        (self.scripts / "show.py").write_text("import os, sys; print(*sys.argv, os.getcwd(), os.environ.get('JOB_X'))\n")
        (self.scripts / "name=show.sh").symlink_to("show.sh")
        (self.scripts / "clock.sh").write_text("#!/bin/sh\ndate > /dev/null && echo $?\n")
        (self.evil / "date").write_text("#!/bin/sh\nexit 1\n")
        (self.evil / "date").chmod(0o755)
        (self.evil / "usercustomize.py").write_text(f"open({str(self.mark)!r}, 'w')\n")
        token = box.nexus("token", "create", "bob").stdout.strip()
        self.bearer = {"Authorization": f"Bearer {token}"}

    def submit(self, **job):
        """(HTTP status, answer) to bob."""
        text = json.dumps({"cwd": str(self.scripts), "gpus": 0, **job})
        for name in ("scripts", "evil", "mark"):
            text = text.replace(f"@{name}", str(getattr(self, name)))
        return live.ask_service(self.box.line(live.PATIENCE_S), "POST", "/queue", json.loads(text), self.bearer)

    def run(self, **job):
        """How a job of bob's ended, and what it printed; None when it was refused."""
        status, answer = self.submit(**job)
        if status != 200:
            assert status == 403, answer
            return None
        ended = self.box.wait(answer["id"])
        return ended["status"], self.box.logs(answer["id"])


@pytest.fixture(scope="module")
def guarded():
    with live.Box(gpus=1, is_starting=False) as box:
        box.write_config(allowed_script_paths=[str(box.path("scripts"))], log_dir=str(box.path("scripts") / "logs"))
        box.environ["PATH"] = f".:{box.environ['PATH']}"
        for name, program in (("python3", sys.executable), ("bash", shutil.which("bash"))):     # as of mise, asdf, pyenv
            (box.bin / name).write_text(f'#!/bin/sh\n[ ! -e .tool-versions ] || . ./.tool-versions\nexec {program} "$@"\n')
            (box.bin / name).chmod(0o755)
        box.start()
        yield Guarded(box)


RUNS = [  # reason, the job, what it prints (python: the interpreter that runs is of no matter)
    ("bash", {"command": "bash show.sh a --b"}, "@scripts/show.sh a --b @scripts"),
    ("sh, in another directory", {"command": "sh @scripts/show.sh", "cwd": "/"}, "@scripts/show.sh  /"),
    ("no interpreter", {"command": "./show.sh 1"}, "@scripts/show.sh 1 @scripts"),
    ("python", {"command": "python3 sub/../show.py x=1"}, "@scripts/show.py x=1 @scripts None"),
    ("a variable of one's own",
     {"command": "python3 show.py", "env": {"JOB_X": "{'a': 1} #", "SEED": "-1"}}, "@scripts/show.py @scripts {'a': 1} #"),
    ("a file that says by what", {"command": "bash tool x"}, "@scripts/tool x\n0022"),
    ("a file that says so in another way", {"command": "python3 model"}, "@scripts/model"),
    ("the umask is the owner's", {"command": "sh tool", "umask": 0}, "@scripts/tool \n0022"),
    ("a folder of the PATH that is not absolute", {"command": "sh @scripts/clock.sh", "cwd": "@evil"}, "0"),
    *[(f"a version manager of the directory: {command}", {"command": command, "cwd": "@evil"}, printed) for command, printed in (
        ("python3 @scripts/show.py", "@scripts/show.py @evil None"), ("bash @scripts/show.sh", "@scripts/show.sh  @evil"),
        *[(f"@scripts/{name} a", f"@scripts/{name} a") for name in ("by-env", "by-env-S", "by-path")])],
    ("a terminal", {"command": "bash show.sh", "tty": True}, "@scripts/show.sh  @scripts"),
    ("--cuda", {"command": "bash show.sh --cuda 7", "cuda_arg": True, "gpus": 1}, "@scripts/show.sh --cuda 0 @scripts"),
]


@pytest.mark.parametrize("reason, job, printed", RUNS, ids=[case[0] for case in RUNS])
def test_what_may_run(guarded, reason, job, printed):
    status, output = guarded.run(**job)
    expected = printed.replace("@scripts", str(guarded.scripts)).replace("@evil", str(guarded.evil))
    assert (status, output.replace("\r", "").strip()) == ("completed", expected), output
    assert not guarded.mark.exists()


WAYS = [  # reason, the job
    ("a function for the interpreter's name", {"command": "python3 show.py", "env": {"BASH_FUNC_python3%%": "() { touch @mark; }"}}),
    ("a trace that runs commands", {"command": "bash show.sh", "env": {"SHELLOPTS": "xtrace", "PS4": "$(touch @mark)"}}),
    ("the prompt of a trace alone", {"command": "bash show.sh", "env": {"PS4": "$(touch @mark)"}}),
    ("bash +x FILE", {"command": "bash +x @evil/show.sh"}), ("bash +c FILE", {"command": "bash +c @evil/show.sh"}),
    ("sh +c FILE", {"command": "sh +c @evil/show.sh"}), ("an option of python", {"command": "python3 -m usercustomize", "cwd": "@evil"}),
    ("a home with modules", {"command": "python3 show.py", "env": {"HOME": "@evil", "PYTHONUSERBASE": "@evil"}}),
    ("modules", {"command": "python3 show.py", "env": {"PYTHONPATH": "@evil"}}),
    ("what bash reads first", {"command": "bash show.sh", "env": {"BASH_ENV": "@evil/show.sh"}}),
    ("what sh reads first", {"command": "sh show.sh", "env": {"ENV": "@evil/show.sh"}}),
    ("what zsh reads first", {"command": "sh show.sh", "env": {"ZDOTDIR": "@evil"}}),
    ("a library", {"command": "sh show.sh", "env": {"LD_PRELOAD": "@evil/x.so"}}),
    ("a library of the driver's", {"command": "sh show.sh", "env": {"CUDA_INJECTION64_PATH": "@evil/x.so"}}),
    ("another PATH", {"command": "bash show.sh", "env": {"PATH": "@evil"}}),
    ("the whole environment", {"command": "bash show.sh", "environment": {"BASH_ENV": "@evil/show.sh", "PATH": "/usr/bin:/bin"}}),
    ("another directory", {"command": "bash show.sh", "cwd": "@evil"}), ("the way out", {"command": "bash ../evil/show.sh"}),
    ("a conda environment", {"command": "bash show.sh", "conda": "@evil"}),
    ("a work tree", {"command": "bash show.sh", "snapshot": "0" * 40, "snapshot_repo": "@scripts"}),
    ("a shell's work", {"command": "bash show.sh ; touch @mark"}), ("a line more", {"command": "bash show.sh\ntouch @mark"}),
    *[(f"a value of {name}: {text}", {"command": "bash show.sh", "env": {name: text}}) for name, text in (
        ("SEED", "a[$(touch @mark)]"), ("SEED", "1" * 19), ("SEED", "a"), ("OMP_NUM_THREADS", "a[$(touch @mark)]"), ("NO_COLOR", "a b"),
        ("TZ", ":@evil/x"), ("TZ", "@evil/x"), ("TZ", "a/../../x"), ("JOB_X", "$(touch @mark)"), ("JOB_X", "`touch @mark`"),
        ("JOB_X", "a[b]"), ("JOB_X", "1\n2"), ("WANDB_NAME", "a[$(touch @mark)]"))],
    ("a program", {"command": "touch @mark"}), ("a program's path", {"command": "/usr/bin/touch @mark"}),
]


@pytest.mark.parametrize("reason, job", WAYS, ids=[case[0] for case in WAYS])
def test_ways_around(guarded, reason, job):
    assert guarded.run(**job) is None and not guarded.mark.exists()


NO_FILES = [  # reason, the job, why it does not start
    ("a script of PATH", {"command": "bash ldd --version"}, "/ldd is not a file"),
    ("a folder of modules", {"command": "python3 sub"}, "/sub is not a file"),
    ("a text for bash", {"command": "bash @scripts/README.md", "cwd": "@evil"}, "/README.md is no script of bash"),
    ("a text with the x bit", {"command": "@scripts/notes", "cwd": "@evil"}, "/notes cannot be run by itself"),
    ("an interpreter in the job's directory", {"command": "@scripts/near", "cwd": "@evil"}, "/near cannot be run by itself"),
    ("one by env(1)", {"command": "@scripts/nearer", "cwd": "@evil"}, "/nearer cannot be run by itself"),
    ("one that env(1) looks up", {"command": "./by-perl"}, "perl may not be looked up by env(1)"),
    ("a module for sh", {"command": "sh show.py"}, "/show.py is no script of sh"),
    ("a script for another", {"command": "python3 tool"}, "/tool is no script of python3"),
    ("an interpreter that is not there", {"command": "python3.99 show.py"}, "python3.99 was not found"),
]


@pytest.mark.parametrize("reason, job, why", NO_FILES, ids=[case[0] for case in NO_FILES])
def test_what_is_no_file_is_not_run(guarded, reason, job, why):
    status, answer = guarded.submit(**job)
    assert status == 200, answer
    ended = guarded.box.wait(answer["id"], "failed")
    assert ended["cause"] == "launch" and why in ended["cause_line"]


def test_what_users_write_is_no_script(guarded):
    """The log folder lies below the allowed one; and nobody brings a script along."""
    job_id = guarded.submit(command="./show.sh touch @mark")[1]["id"]
    guarded.box.wait(job_id, "completed")
    assert guarded.run(command=f"bash logs/job_{job_id}/job.sh") is None
    status, answer = guarded.submit(command=f"bash logs/job_{job_id}/stdout.log")
    assert status == 403 and "in a folder of nexus" in answer["message"] and not guarded.mark.exists()


def test_what_a_script_writes_is_not_open_to_others(guarded):
    """Python's compiled modules: who can exchange one runs commands as the owner."""
    (guarded.scripts / "helper.py").write_text("")
    (guarded.scripts / "imports.py").write_text("import helper\n")
    assert guarded.run(command="python3 imports.py", umask=0)[0] == "completed"
    assert (guarded.scripts / "__pycache__").stat().st_mode & 0o777 == 0o755


def test_a_directory_that_becomes_another_changes_nothing(guarded):
    """What runs is the file that was allowed, by its real path, wherever the link of the job's directory leads by then."""
    link = guarded.box.path("link")
    link.symlink_to(guarded.scripts)
    status, output = guarded.run(command="bash show.sh", cwd=str(link))
    assert status == "completed" and output.startswith(f"{guarded.scripts}/show.sh ")
    guarded.box.ask("POST", "/service/pause")
    job_id = guarded.submit(command="bash show.sh", cwd=str(link))[1]["id"]
    link.unlink()
    link.symlink_to(guarded.evil)
    guarded.box.ask("POST", "/service/resume")
    ended = guarded.box.wait(job_id, "failed")
    assert ended["cause"] == "launch" and "may not be run here" in ended["cause_line"] and not guarded.mark.exists()


def test_an_equals_sign_makes_no_variable_of_a_script(guarded):
    """env(1) takes A=B before the program for a variable, and the next word for the program."""
    (guarded.scripts / "link").symlink_to(guarded.scripts / "a=b")
    (guarded.scripts / "a=b").write_text("#!/usr/bin/perl\n")
    (guarded.scripts / "a=b").chmod(0o755)
    ended = guarded.box.wait(guarded.submit(command="./link touch @mark")[1]["id"], "failed")
    assert "holds =" in ended["cause_line"] and not guarded.mark.exists()


def test_what_waited_when_the_paths_were_set():
    """A job that was added before, with variables of its own, and one with a conda environment."""
    with live.Box(gpus=1) as box:
        guarded = Guarded(box)
        box.ask("POST", "/service/pause")
        one = guarded.submit(command="bash show.sh", env={"BASH_ENV": "@evil/show.sh", "SEED": "a[0]", "JOB_X": "1"})[1]["id"]
        two = guarded.submit(command="bash show.sh", conda="@evil")[1]["id"]
        box.write_config(allowed_script_paths=[str(guarded.scripts)])
        assert box.nexus("restart").returncode == 0
        box.ask("POST", "/service/resume")
        box.wait(one, "completed")
        assert "conda may not be given" in box.wait(two, "failed")["cause_line"] and not guarded.mark.exists()


def test_the_owner_brings_the_own_environment():
    """Only the owner can send it: it is as good as config.toml, and the interpreter is the one of that PATH."""
    with live.Box(gpus=1, is_starting=False) as box:
        box.write_config(allowed_script_paths=[str(box.path("scripts"))])
        guarded = Guarded(box)
        tools = box.path("tools")
        tools.mkdir()
        (tools / "python3").write_text(f'#!/bin/sh\necho mine\nexec {sys.executable} "$@"\n')
        (tools / "python3").chmod(0o755)
        done = subprocess.run(box.argv("run", f"python3 {guarded.scripts}/show.py"), capture_output=True, text=True, timeout=60, cwd="/",
                              stdin=subprocess.DEVNULL, env={**box.environ, "PATH": f".:{tools}:{os.environ['PATH']}", "JOB_X": "2"})
        assert done.stdout == f"mine\n{guarded.scripts}/show.py / 2\n", done
        assert box.nexus("add", "--env", "HOME=/", f"python3 {guarded.scripts}/show.py").returncode == 5

"""allowed_script_paths: what somebody who has a token can run, tried from outside."""

import json
import os
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
        (self.scripts / "tool.sh").write_text('echo "$0 $*"; umask\n')
        for name, text in (("notes", "see `./show.sh`\n"), ("near", "#!bin/python\n"), ("by-env", "#!/usr/bin/env sh\necho $0 $*\n")):
            (self.scripts / name).write_text(text)
            (self.scripts / name).chmod(0o755)
        (self.scripts / "README.md").write_text("`./show.sh`\n")
        (self.scripts / "show.py").write_text("import os, sys; print(*sys.argv, os.getcwd(), os.environ.get('JOB_X'))\n")
        (self.evil / "usercustomize.py").write_text(f"open({str(self.mark)!r}, 'w')\n")
        (self.scripts / "out.sh").symlink_to(self.evil / "show.sh")
        (self.scripts / "away").symlink_to(self.evil)
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
        box.start()
        yield Guarded(box)


RUNS = [  # reason, the job, what it prints
    ("bash", {"command": "bash show.sh a --b"}, "@scripts/show.sh a --b @scripts"),
    ("sh, in another directory", {"command": "sh @scripts/show.sh", "cwd": "@scripts/sub"}, "@scripts/show.sh  @scripts/sub"),
    ("beside its script, where it names no directory", {"command": "sh @scripts/show.sh", "cwd": None}, "@scripts/show.sh  @scripts"),
    ("no interpreter", {"command": "./show.sh 1"}, "@scripts/show.sh 1 @scripts"),
    ("python", {"command": "python3 sub/../show.py x=1"}, "@scripts/show.py x=1 @scripts None"),
    ("the umask is the owner's", {"command": "sh tool.sh", "umask": 0}, "@scripts/tool.sh \n0022"),
    ("an interpreter that env(1) looks up", {"command": "./by-env a"}, "@scripts/by-env a"),
    ("a terminal", {"command": "bash show.sh", "tty": True}, "@scripts/show.sh  @scripts"),
    ("--cuda", {"command": "bash show.sh --cuda 7", "cuda_arg": True, "gpus": 1}, "@scripts/show.sh --cuda 0 @scripts"),
]


@pytest.mark.parametrize("reason, job, printed", RUNS, ids=[case[0] for case in RUNS])
def test_what_may_run(guarded, reason, job, printed):
    status, output = guarded.run(**job)
    expected = printed.replace("@scripts", str(guarded.scripts)).replace("@evil", str(guarded.evil))
    assert (status, output.replace("\r", "").strip()) == ("completed", expected), output
    assert not guarded.mark.exists()


NO_FILES = [  # reason, the job, why it does not start
    ("a script of PATH", {"command": "bash ldd.sh --version"}, "/ldd.sh is not a file"),
    ("a text with the x bit", {"command": "./notes"}, "/notes cannot be run by itself"),
    ("an interpreter in the job's directory", {"command": "@scripts/near", "cwd": "@scripts/sub"}, "/near cannot be run by itself"),
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
    status, answer = guarded.submit(command=f"logs/job_{job_id}/stdout.log")
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
    assert ended["cause"] == "launch" and "may not be used here" in ended["cause_line"] and not guarded.mark.exists()


def test_an_equals_sign_makes_no_variable_of_a_script(guarded):
    """env(1) and a shell take A=B before the program for a variable, and the next word for the program."""
    (guarded.scripts / "link").symlink_to(guarded.scripts / "a=b")
    (guarded.scripts / "a=b").write_text("#!/usr/bin/perl\n")
    (guarded.scripts / "a=b").chmod(0o755)
    assert guarded.run(command="./link touch @mark")[0] == "completed" and not guarded.mark.exists()


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
    """It is as good as config.toml, and the interpreter is the one of that PATH."""
    with live.Box(gpus=1, is_starting=False) as box:
        box.write_config(allowed_script_paths=[str(box.path("scripts"))])
        guarded = Guarded(box)
        tools = box.path("tools")
        tools.mkdir()
        (tools / "python3").write_text(f'#!/bin/sh\necho mine\nexec {sys.executable} "$@"\n')
        (tools / "python3").chmod(0o755)
        done = subprocess.run(box.argv("run", "--env", "JOB_X=2", f"python3 {guarded.scripts}/show.py"), capture_output=True, text=True,
                              timeout=60, cwd="/", stdin=subprocess.DEVNULL, env={**box.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
        assert done.stdout == f"mine\n{guarded.scripts}/show.py / 2\n", done
        assert box.nexus("add", "echo").returncode == 5


def test_scripts_on_a_file_system_that_hangs_wait_and_nothing_else_does():
    with live.Box(gpus=1, is_starting=False) as box:
        box.write_config(allowed_script_paths=["/usr/bin", str(box.path("scripts"))])
        box.start()
        guarded = Guarded(box)
        running = box.wait_started(box.add("/usr/bin/sleep 600", gpus=0))["id"]
        box.ask("POST", "/service/pause")
        waiting = guarded.submit(command="bash show.sh")[1]["id"]
        with live.hung_folder(guarded.scripts):
            box.ask("POST", "/service/resume")
            live.until(lambda: "does not answer" in str(box.job(waiting)["waiting_for"]), lambda: box.job(waiting))
            assert box.nexus("kill", running).returncode == 0
            box.wait(running, "cancelled")
            assert f"/usr/bin or {guarded.scripts} does not answer" in str(box.health()), "programs are still looked for in /usr/bin"
        box.wait(waiting, "completed")
        assert "does not answer" not in str(box.health())

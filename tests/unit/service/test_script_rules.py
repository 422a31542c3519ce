"""allowed_script_paths: which jobs are scripts that may run, and how these run.  tests/e2e/test_scripts.py runs some."""

import json
import pathlib
import tempfile

import makers
import pytest
from stage import ME, Bench

import nexus


@pytest.fixture(scope="module")
def guarded():
    """A Bench where only what lies below its folder `scripts` may run; a link leads out of it, and one into it."""
    with tempfile.TemporaryDirectory() as name:
        top = pathlib.Path(name).resolve()
        for folder in ("scripts/sub", "evil"):
            (top / folder).mkdir(parents=True)
        (top / "scripts/out.sh").symlink_to(top / "evil/show.sh")
        (top / "scripts/away").symlink_to(top / "evil")
        (top / "link").symlink_to(top / "scripts")
        for name, text in {"show.sh": "echo", "notes": "`./show.sh`", "tool": "#!/bin/sh", "near": "#!bin/sh", "elf": "\x7fELF"}.items():
            (top / "scripts" / name).write_text(f"{text}\n")
        with Bench(allowed_script_paths=[str(top / "scripts")], log_dir=str(top / "scripts/logs")) as bench:
            bench.top, bench.bob = top, bench.make_bearer("bob")
            yield bench


def fill(guarded, value):
    """With the folders of the test for @scripts, @evil, @link and @mark."""
    text = json.dumps(value)
    for name in ("scripts", "evil", "link", "mark"):
        text = text.replace(f"@{name}", str(guarded.top / name))
    return json.loads(text)


WAYS = [  # reason, the job of bob, who has a token
    *[(f"env {name}", {"command": "bash show.sh", "env": {name: text}}) for name, text in (
        ("BASH_FUNC_python3%%", "() { touch @mark; }"), ("PS4", "$(touch @mark)"), ("PYTHONPATH", "@evil"), ("HOME", "@evil"),
        ("BASH_ENV", "@evil/show.sh"), ("ENV", "@evil/show.sh"), ("LD_PRELOAD", "@evil/x.so"), ("PATH", "@evil"), ("JOB_X", "1"))],
    ("one job's variables", {"command": None, "each": [{"command": "bash show.sh", "env": {"BASH_ENV": "@evil/show.sh"}}]}),
    ("the whole environment", {"command": "bash show.sh", "environment": {"BASH_ENV": "@evil/show.sh", "PATH": "/usr/bin:/bin"}}),
    ("bash +x FILE", {"command": "bash +x @evil/show.sh"}), ("bash +c FILE", {"command": "bash +c @evil/show.sh"}),
    ("an option of python", {"command": "python3 -m usercustomize"}), ("an interpreter alone", {"command": "python3"}),
    ("a script in another directory", {"command": "bash show.sh", "cwd": "@evil"}),
    ("the way out", {"command": "bash ../evil/show.sh"}), ("a link around it", {"command": "bash out.sh"}),
    ("a folder's link around it", {"command": "bash away/show.sh"}),
    ("no directory, and a script that may not run", {"command": "bash @evil/show.sh", "cwd": None}),
    ("a script at home", {"command": "bash show.sh", "cwd": None}),
    ("a directory of one's own", {"command": "python3 @scripts/show.py", "cwd": "@evil"}),
    ("one that nexus makes", {"command": "python3 @scripts/show.py", "cwd": "@scripts/logs"}),
    ("a conda environment", {"command": "bash show.sh", "conda": "@evil"}),
    ("a work tree", {"command": "bash show.sh", "snapshot": "0" * 40, "snapshot_repo": "@scripts"}),
    *[(f"the shell's {text!r}", {"command": f"bash show.sh {text}"}) for text in (
        "; touch @mark", "\ntouch @mark", "$(touch @mark)", "`id`", "> @mark", "& touch @mark", "'a", '"a', "*", "\u00a0a")],
    ("a text for bash", {"command": "bash README.md"}), ("a module for sh", {"command": "sh show.py"}),
    ("a script for another", {"command": "python3 tool.sh"}), ("another interpreter", {"command": "Rscript show.R"}),
    ("a program", {"command": "touch @mark"}), ("a program's path", {"command": "/usr/bin/touch @mark"}),
    ("a variable before it", {"command": "BASH_ENV=@evil/show.sh bash show.sh"}),
]


@pytest.mark.parametrize("reason, job", WAYS, ids=[case[0] for case in WAYS])
def test_ways_around(guarded, reason, job):
    status, answer = guarded.ask("POST", "/queue", fill(guarded, {"cwd": "@scripts", "gpus": 0, **job}), guarded.bob)
    assert (status, answer["error"]) == (403, "forbidden")


STARTS = [  # reason, the command, what runs then, or why nothing does
    ("by its real path", "bash ../link/show.sh a --b", "bash @scripts/show.sh a --b"),
    ("all words are quoted", "./tool x=^1", "@scripts/tool 'x=^1'"),
    ("a program", "./elf", "@scripts/elf"), ("a text", "./notes", "forbidden: @scripts/notes cannot be run by itself"),
    ("an interpreter in the directory", "./near", "forbidden: @scripts/near cannot be run by itself"),
    ("no file", "bash gone.sh", "forbidden: @scripts/gone.sh is not a file"),
    ("a folder", "./sub", "forbidden: @scripts/sub is not a file"),
    ("it leads elsewhere by now", "bash out.sh", "forbidden: @evil/show.sh may not be used here"),
    ("with an environment of one's own", None, "forbidden: conda may not be given"),
]


@pytest.mark.parametrize("reason, command, runs", STARTS, ids=[case[0] for case in STARTS])
@pytest.mark.parametrize("user", ["bob", ME])
def test_what_runs_is_what_was_allowed(guarded, reason, command, runs, user):
    """Whatever has become of it since: with the owner's variables and umask, in the real directory; the owner's own as asked for."""
    job = makers.job(command=command or "./elf", conda=None if command else "base", user=user, cwd=str(guarded.top / "link"), umask=0,
                     variables=(("A", "1"),))
    try:
        order = guarded.service.starter.make_order(job, {"B": "2"})
    except nexus.NexusError as error:
        assert f"{error.kind}: {error.message}".startswith(fill(guarded, runs))
        return
    ran = order.job
    assert ran.command == fill(guarded, runs)
    assert (ran.cwd, ran.umask, ran.variables, dict(order.variables)) == (
        (str(guarded.top / "scripts"), 0o022, (), guarded.service.environ) if user == "bob" else (job.cwd, 0, job.variables, {"B": "2"}))


@pytest.mark.parametrize("command, folder", [("sh @scripts/sub/a.sh", "@scripts/sub"), ("@scripts/elf", "@scripts")])
def test_a_script_runs_beside_itself_where_no_directory_is_named(guarded, command, folder):
    status, answer = guarded.ask("POST", "/queue", fill(guarded, {"command": command, "gpus": 0}), guarded.bob)
    assert status == 200 and guarded.store.state.jobs[answer["id"]].cwd == fill(guarded, folder)

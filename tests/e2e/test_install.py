"""nexus install: the command, its Python, completion, the start at boot."""

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
from console import SCRIPT, Home, Terminal, add
from live import read, until

import nexus

FAKES = {
    "systemctl": '#!/bin/sh\necho "systemctl $*" >> "$RECORD"\n[ -n "$NO_USER_MANAGER" ] && exit 1\nexit 0\n'}


@pytest.fixture
def installing():
    with Home(name="nexus 'home'") as made:
        binaries = os.path.join(made.top, "fakes")
        os.makedirs(binaries)
        for name, text in FAKES.items():
            with open(os.path.join(binaries, name), "w") as file:
                file.write(text)
            os.chmod(os.path.join(binaries, name), 0o755)
        made.environ.update(HOME=os.path.join(made.top, "my home"), PATH=f"{binaries}:{made.environ['PATH']}",
                            RECORD=os.path.join(made.top, "record"))
        os.makedirs(made.environ["HOME"])
        made.binaries = os.path.join(made.environ["HOME"], ".local", "bin")
        made.compiled = pathlib.Path(made.environ["HOME"], ".local/share/nexus/__pycache__")
        keep_compiled(made.compiled)
        yield made


def keep_compiled(folder):
    """Put there what the first command would compile: Python takes such a file for right, whatever the age of its source."""
    path = pathlib.Path(importlib.util.cache_from_source(SCRIPT))
    folder.mkdir(parents=True)
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)       # PEP 552: by hash, unchecked
    (folder / path.name).write_bytes(head + path.read_bytes()[len(head):])


def list_compiled(installing):
    """{compiled form: (inode, time of writing)} of what is installed, and in the home."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for top in (installing.environ["HOME"], installing.path)
            for path in pathlib.Path(top).rglob("nexus*.pyc")}


def test_install(installing):
    """An upgrade compiles, and no command after it, nor the service that one starts: each would take seconds."""
    shutil.rmtree(installing.file("cache"))
    done = installing.run("install")
    command = os.path.join(installing.binaries, "nexus")
    assert (done.code, done.out) == (0, "") and command in done.err and "not on PATH yet" in done.err
    assert os.access(command, os.X_OK)
    data = os.path.join(installing.environ["HOME"], ".local", "share")
    assert read(os.path.join(data, "nexus", "nexus.py")) == read(SCRIPT)

    def call(*words):
        environ = {**installing.environ, "PATH": f"{installing.binaries}:{installing.environ['PATH']}"}
        return subprocess.run(["nexus", *words], capture_output=True, timeout=60, env=environ)

    compiled = list_compiled(installing)
    assert len(compiled) == 1, compiled
    ran = call("run", "echo installed")
    assert (ran.returncode, ran.stdout) == (0, b"installed\n") and list_compiled(installing) == compiled, ran
    assert call("--version").stdout.decode() == installing.run("--version").out
    again = call("install")
    assert again.returncode == 0 and b"not on PATH" not in again.stderr, "from itself"
    script = pathlib.Path(installing.top, "another", "nexus.py")
    script.parent.mkdir()
    script.write_text("# an upgrade\n" + read(SCRIPT))
    assert installing.run("install", script=script).code == 0
    compiled = list_compiled(installing)
    assert len(compiled) == 1, compiled
    for words in (["restart"], ["run", "--gpus", "0", "true"]):
        ran = call(*words)
        assert ran.returncode == 0, ran
    assert list_compiled(installing) == compiled


COMPLETED = [  # words, what the last one may be; ID: the job
    (["re"], ["remove", "retry", "resume", "restart", "results"]),
    (["help", "to"], ["top", "token"]),
    (["token", ""], ["create", "list", "revoke"]),
    (["token", "create", "bob", "--d"], ["--days"]),
    (["add", "--gpu"], ["--gpus", "--gpu-ids", "--gpu-mem", "--gpu-type"]),
    (["logs", ""], ["ID"]),
    (["pause", ""], ["ID"]),
    (["scancel", ""], ["ID"]),
    (["add", "--after", ""], ["ID"]),
    (["wait", "--group", "e"], ["exp1"]),
    (["wait", "--group=e"], ["--group=exp1"]),
    (["wait", "--group", "=", "e"], ["exp1"]),
    (["jobs", "--status", "r"], ["running"]),
    (["clear", "--status", "completed,fa"], ["completed,failed"]),
    (["add", "--priority", ""], ["high", "normal", "low"]),
    (["move", "ID", "--priority", "n"], ["normal"]),
    (["logs", "--stream", "std"], ["stdout", "stderr"]),
    (["add", "--file", "com"], []), (["add", "--name", "exp1", "--cwd", ""], []),
]


def test_what_is_completed(home):
    job_id = add(home, "true", "--group", "exp1")
    for words, completions in COMPLETED:
        done = home.main("complete", *(word.replace("ID", job_id) for word in words))
        assert done.code == 0 and {*done.out.split()} == {word.replace("ID", job_id) for word in completions}, (words, done)


TYPED = [  # what is typed in each shell, what the last word may be
    ("re", ["remove", "retry", "resume", "restart", "results"]),
    ("token ", ["create", "list", "revoke"]),
    ("logs ", ["ID"]),
    ("wait --group=e", ["exp1"]),
    ("clear --status completed,fa", ["completed,failed"]),
    ("add --file com", ["commands.txt"]),
    ("add --name exp1 --cwd ", ["a_folder", "commands.txt"]),
]
BASH = """source "$XDG_DATA_HOME/bash-completion/completions/nexus"
complete() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nexus
  [ "${#COMPREPLY[@]}" -gt 0 ] || COMPREPLY=($(compgen -f -- "${@: -1}"))        # as -o default says
  echo "${COMPREPLY[@]}"
}
"""
ZSH = """stty kill undef         # before zsh reads a line, the terminal itself would drop what is typed ahead
PS1=
fpath+=("$XDG_DATA_HOME/zsh/site-functions")
autoload -Uz compinit
compinit -u -D
compadd() {
  local -a added
  [[ ${argv[(I)-[OAD]]} -gt 0 ]] || { builtin compadd -O added "$@"; print -r -- "${added[@]}" >> "$ZDOTDIR/answers"; }
  builtin compadd "$@"
}
"""


def type_in_bash(home, lines):
    def split(line):                            # as readline does
        return re.findall(r"=|[^\s=]+", line) + ([""] if line.endswith(" ") else [])

    script = BASH + "".join(f"complete {' '.join(map(nexus.quote, ['nexus', *split(line)]))}\n" for line in lines)
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60, env=home.environ, cwd=home.work)
    return done.stdout.splitlines()


def type_in_fish(home, lines):
    script = "".join(f"echo (complete -C {nexus.quote(f'nexus {line}')} | string split -f 1 \\t)\n" for line in lines)
    done = subprocess.run(["fish", "-c", script], capture_output=True, text=True, timeout=60, env=home.environ, cwd=home.work)
    return done.stdout.splitlines()


def type_in_zsh(home, lines):
    answers = home.work.parent / "answers"
    (home.work.parent / ".zshrc").write_text(ZSH)
    answers.touch()
    found = []
    with Terminal(["zsh", "-i"], {**home.environ, "ZDOTDIR": str(answers.parent), "TERM": "xterm"}) as terminal:
        for line in [f"cd {nexus.quote(str(home.work))}\n", *(f"nexus {line}\t" for line in lines)]:
            answers.write_text("")
            terminal.type(f"{line}\x15print -r END >> $ZDOTDIR/answers\n")
            until(lambda: terminal.read(0.02) != b"" and "END\n" in answers.read_text(), line)
            found.append(" ".join(answers.read_text().split("\n")[:-2]))
    return found[1:]


SHELLS = {"bash": type_in_bash, "fish": type_in_fish, "zsh": type_in_zsh}


def test_completion(installing):
    """The same in each shell; where nexus knows nothing, files."""
    home = installing
    home.environ.update(PATH=f"{home.binaries}:{home.environ['PATH']}", XDG_DATA_HOME=f"{home.top}/my data")
    keep_compiled(pathlib.Path(home.top, "my data/nexus/__pycache__"))
    home.work = pathlib.Path(home.top, "work")
    (home.work / "a_folder").mkdir(parents=True)
    (home.work / "commands.txt").touch()
    told = home.run("install").err
    assert "completion for bash, fish and zsh" in told and "before compinit:  fpath+=('" in told
    job_id = home.run("add", "--group", "exp1", "true").id
    for shell, type_in in SHELLS.items():
        for (line, words), answer in zip(TYPED, type_in(home, [line for line, _ in TYPED])):
            # bash replaces what stands behind the sign alone.
            found = {word.rpartition("=")[2].rstrip("/") for word in answer.split()}
            assert found == {word.replace("ID", job_id) for word in words}, (shell, line, answer)


def test_install_with_an_interpreter_in_a_folder_with_blanks(installing):
    folder = os.path.join(installing.top, "my python")
    os.makedirs(folder)
    os.symlink(sys.executable, os.path.join(folder, "python3"))
    with open(os.path.join(os.path.dirname(folder), "pyvenv.cfg"), "w") as file:
        file.write(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    done = installing.run("install", python=(os.path.join(folder, "python3"),))
    assert done.code == 0, done
    ran = subprocess.run([os.path.join(installing.binaries, "nexus"), "--version"], capture_output=True, env=installing.environ)
    assert ran.returncode == 0 and ran.stdout.startswith(b"nexus "), ran


def read_launcher(home):
    """(its path, the Python that it runs)."""
    path = os.path.join(home.binaries, "nexus")
    return path, shlex.split(re.search("(?m)^python=(.*)$", read(path))[1])[0]


@pytest.mark.parametrize("has_psutil", [False, True])
def test_install_takes_no_virtual_environment_where_nothing_is_lost(installing, has_psutil):
    folder = pathlib.Path(installing.top, "v")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    if has_psutil:
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "psutil.py").write_text("")
    done = installing.run("install", python=(python,))
    chosen = read_launcher(installing)[1]
    assert done.code == 0 and f", run by {chosen}" in done.err, done
    ran = subprocess.run([chosen, "-E", "-c", "import psutil"], capture_output=True)
    assert (chosen == str(python)) == (f"{chosen} of a virtual environment, as no Python outside has psutil" in done.err)
    assert ran.returncode == 0 if has_psutil else chosen != str(python), done


def test_the_installed_nexus_outlives_the_python_that_installed_it(installing):
    folder = pathlib.Path(installing.top, "moved")
    venv.create(folder, symlinks=True)
    (next(folder.glob("lib/python*/site-packages")) / "psutil.py").write_text("raise ImportError\n")
    assert installing.run("install", python=(folder / "bin" / "python",)).code == 0
    path, _ = read_launcher(installing)
    text = re.sub("(?m)^python=.*$", f"python={folder}/bin/python", read(path))     # whatever other Python this machine has
    pathlib.Path(path).write_text(text)
    os.rename(folder, f"{folder}-away")
    with Terminal([path, "--version"], installing.environ) as terminal:
        code, shown = terminal.end()
    assert code == 0 and re.search(rf"nexus: {folder}/bin/python is gone, so /.*python\S* runs it: nexus install", shown), shown
    line = installing.run("install", "--boot", NO_USER_MANAGER="1").out[len("@reboot "):]
    pathlib.Path(path).write_text(text)
    for words in (f"sh -c {shlex.quote(line)}", f"{shlex.quote(path)} run --gpus 0 'exit 3'"):
        done = subprocess.run(words, shell=True, capture_output=True, timeout=120, env=installing.environ)
        assert done.returncode == (3 if "exit 3" in words else 0) and b"is gone" not in done.stderr, done


def test_the_installed_nexus_looks_for_a_python_that_can_run_it(installing):
    assert installing.run("install").code == 0
    path, _ = read_launcher(installing)
    places = pathlib.Path(installing.top, "other pythons")
    places.mkdir()
    script = re.sub("(?m)^python=.*$", "python=/no/python", read(path)).replace("/usr/bin:/usr/local/bin:$PATH", f'"{places}"')
    for reason, text, code in (("none", None, 127), ("one that is too old", "exit 1", 127),
                               ("a newer one", f'exec {sys.executable} "$@"', 0)):
        if text:
            (places / "python3.9").write_text(f"#!/bin/sh\n{text}\n")
            (places / "python3.9").chmod(0o755)
        done = subprocess.run(["/bin/sh", "-c", script, "nexus", "--version"], capture_output=True, timeout=60, env=installing.environ)
        assert done.returncode == code, (reason, done)
        assert (b"nexus: /no/python is gone, and no other Python here can run it" in done.stderr) == (code == 127), (reason, done)


def test_install_where_it_cannot_write(installing):
    shutil.rmtree(installing.environ["HOME"])
    with open(installing.environ["HOME"], "w"):
        pass
    done = installing.run("install")
    assert done.code == 6 and "cannot write" in done.err and installing.environ["HOME"] in done.err


def test_install_at_boot_by_systemd(installing):
    done = installing.run("install", "--boot")
    assert done.code == 0 and "enable-linger" in done.err, done
    unit = os.path.join(installing.environ["HOME"], ".config", "systemd", "user", "nexus.service")
    text = read(unit)
    assert "KillMode=process\n" in text and "WantedBy=default.target" in text
    record = read(installing.environ["RECORD"])
    assert "systemctl --user daemon-reload" in record and "systemctl --user enable nexus.service" in record
    assert f'ExecStart=/bin/sh "{installing.binaries}/nexus" serve\n' in text and f'Environment="NEXUS_HOME={installing.path}"\n' in text


def test_install_at_boot_from_folders_with_special_characters(installing):
    """% and quotes mean something in a unit, and % in a crontab, which is for machines without a user manager."""
    home, nexus_home = (os.path.join(installing.top, name) for name in ('my "100%h" home\\', 'nexus "50%" home'))
    shutil.copytree(installing.path, nexus_home)
    os.mkdir(home)
    places = {"HOME": home, "NEXUS_HOME": nexus_home}
    keep_compiled(pathlib.Path(home, ".local/share/nexus/__pycache__"))
    assert installing.run("install", "--boot", **places).code == 0
    unit = pathlib.Path(home, ".config", "systemd", "user", "nexus.service")
    words = dict(re.findall(r'^(\w+)=(?:/bin/sh )?"((?:[^"\\]|\\.)*)"', unit.read_text(), re.MULTILINE))
    plain = {key: re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for key, word in words.items()}
    assert plain == {"ExecStart": f"{home}/.local/bin/nexus", "Environment": f"NEXUS_HOME={nexus_home}"}
    assert not re.search("(?<!%)(%%)*%(?!%)", unit.read_text()), "no specifier is left"
    if shutil.which("systemd-analyze"):
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, timeout=60, text=True)
        assert not [line for line in done.stderr.splitlines() if "nexus" in line], done.stderr
    told = installing.run("install", "--boot", NO_USER_MANAGER="1", **places)
    line = told.out
    assert told.code == 0 and "crontab -e" in told.err and line.startswith("@reboot ") and line.count("\n") == 1
    assert line.count("%") == line.count("\\%") > 0
    started = subprocess.run(["sh", "-c", line[len("@reboot "):].replace("\\%", "%")], capture_output=True, timeout=60,
                             env={**installing.environ, "HOME": home})
    assert started.returncode == 0 and os.path.exists(os.path.join(nexus_home, "service.json")), started
    assert installing.run("install", "--boot", **{**places, "NEXUS_HOME": f"{nexus_home}\n"}).code == 2

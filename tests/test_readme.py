"""README.md: what it shows works as it stands there."""

import pathlib
import re
import subprocess
import sys

import live
import network
import pytest

import nexus

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
NAMED = [command for command in re.findall(r"`nexus ([a-z]+)|^nexus ([a-z]+)", README, re.MULTILINE) for command in command if command]


def test_the_scheduler_from_python():
    exec(next(block for block in PYTHON if "Replay" in block), {})


@pytest.mark.smoke
def test_the_client_from_python():
    with live.Box(gpus=1) as box:
        done = subprocess.run([sys.executable, "-c", next(block for block in PYTHON if "Client" in block)], env=box.environ, text=True,
                              capture_output=True, timeout=60, cwd=live.NEXUS.parent)
        assert done.stdout == "completed 42\n\n", done.stderr


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_commands_exist(name):
    assert name in [command.name for command in nexus.COMMANDS]


def test_options_exist():
    commands = [each for command in nexus.COMMANDS for each in (command, *command.verbs)]
    known = {flag for command in commands for argument in command.arguments for flag in argument[0]}
    blocks = "\n".join(line for line in README.splitlines() if line.startswith("nexus "))
    used = set(re.findall(r"(?<!\S)(--[a-z-]+)", re.sub(r'"[^"]*"', "", blocks)))
    assert used <= known


def test_config_keys_exist():
    keys = {key for table in nexus.SECTIONS.values() for key in nexus.fields_of(type(table))}
    named = set(re.findall(r"`(?:\[[a-z]+\] )?([a-z]+_[a-z_]+)(?: = [^`]*)?`", README))
    ours = {"jobs_file", "llm_config", "log_format", "allowed_script_paths", "max_memory_gb", "max_running", "guard_failures",
            "reserve_after_seconds", "launch_attempts", "jobs_file_interval_seconds"}
    assert ours <= named & keys


def test_addresses_are_those_nexus_has():
    """`localhost` may be an address that another user has."""
    assert "127.0.0.1:6234" in README and "localhost:" not in README


# What is typed at a shell: as it stands there, but for the port, the host and the ids of the jobs

SHELL = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if re.search(r"^(curl|wget) ", block, re.MULTILINE)]


def list_calls(block):
    """The statements of a block: a here-document belongs to what it is given to."""
    block = re.sub(r"(<<'END'\n.*?\nEND)\n", lambda match: match[1].replace("\n", "\0") + "\n", block, flags=re.DOTALL)
    return [line.replace("\0", "\n") for line in block.splitlines() if line.strip()]


@pytest.mark.smoke
@pytest.mark.parametrize("block", SHELL, ids=[block.split("\n")[0][:40] for block in SHELL])
def test_curl_and_wget_lines(block):
    with live.Box(gpus=4) as box:
        (box.folder / "my_script.py").write_text("print('hello')\n")
        box.nexus("token", "create", "bob", "bobs-secret-token")
        bobs = box.call("POST", "/queue", {"command": "sleep 600"}, Authorization="Bearer bobs-secret-token")[1]["id"]
        box.wait(bobs, "running")
        box.wait(box.add("sleep 600"), "running")
        (box.bin / "nexus").write_text(f'#!/bin/sh\nexec {sys.executable} {live.NEXUS} "$@"\n')
        (box.bin / "nexus").chmod(0o755)
        setting = ""
        for line in list_calls(block):
            if line.startswith("export "):
                setting = line.replace("http://gpubox:6234", f"http://127.0.0.1:{box.port}") + "; "
                continue
            line = line.replace("6234", str(box.port)).replace("--cwd /data/bob", "--cwd /tmp").replace('"python train.py"', '"true"')
            line = line.replace("/home/me/exp", "/tmp")
            line = re.sub(r"(/jobs/|/results/)abc\b", rf"\g<1>{bobs}", line)
            if "/queue/abc" in line:
                line = line.replace("/queue/abc", f"/queue/{box.add('true', gpus=4)}")
            is_stream = "follow=true" in line or "-N " in line
            if line.startswith("curl "):
                line = line.replace("curl ", f"curl -sS --fail-with-body --max-time {3 if is_stream else 60} ", 1)
            done = subprocess.run(["bash", "-c", setting + line], env=box.environ, cwd=box.folder, capture_output=True, text=True,
                                  timeout=60)
            assert done.returncode in ((28,) if is_stream else (0,)), (line, done)


def test_nodes_are_added_as_it_says():
    block = next(block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "nexus node add" in block)
    front = {"is_behind_jump": False}
    with network.Net(nodes=[front, front, {}], jump=True) as net:
        head, names = net.head, {"gpuuser@10.0.0.5": net.nodes[0].target, "gpuuser@10.1.0.7": net.nodes[2].target,
                                 "me@gateway": net.jump.target, '"python train.py"': '"hostname; cat model"'}
        (head.bin / "nexus").write_text(f'#!/bin/sh\nexec {head.python} {net.folder}/nexus.py "$@"\n')
        (head.bin / "nexus").chmod(0o755)

        def run(line):
            done = subprocess.run([*head.machine.become(), "bash", "-ec", f"mkdir -p ~/exp; cd ~/exp; {line}"], env=head.environ,
                                  capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, (line, done)
            return done.stdout
        git = "git -c user.name=ann -c user.email=ann@x"
        run(f"git init -q .; echo first > model; git add .; {git} commit -qm first; echo second > model")
        told = {}
        for line in list_calls(block):
            for name, ours in names.items():
                line = line.replace(name, ours)
            told[line.partition("#")[0].strip()] = run(line)
        assert [name for name in ("n1", "n2", "n3") if f"{name}: 2 GPUs" in "".join(told.values())] == ["n1", "n2", "n3"]
        [snapshot] = [answer.strip() for line, answer in told.items() if "--snapshot" in line]
        [bound] = [answer.strip() for line, answer in told.items() if "--node" in line]
        head.wait(snapshot, "completed")
        assert re.fullmatch(r"n[123]\nsecond\n", head.logs(snapshot))
        assert head.wait(bound, "failed")["cause_line"].startswith("n1: the directory ") and head.job(bound)["node"] == "n1"
        live.until(lambda: "GPUs n1:0-1 (Mock GPU, 24GB): Available" in run("nexus"))

"""README.md: what it shows works as it stands there."""

import pathlib
import re
import subprocess
import sys

import live
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
    known = {flag for command in nexus.COMMANDS for argument in command.arguments for flag in argument[0]}
    blocks = "\n".join(line for line in README.splitlines() if line.startswith("nexus "))
    used = set(re.findall(r"(?<!\S)(--[a-z-]+)", re.sub(r'"[^"]*"', "", blocks)))
    assert used <= known


def test_config_keys_exist():
    keys = {setting.key for setting in nexus.SETTINGS}
    named = set(re.findall(r"`(?:\[[a-z]+\] )?([a-z]+_[a-z_]+)(?: = [^`]*)?`", README))
    ours = {"jobs_file", "llm_config", "log_format", "allowed_script_paths", "max_memory_gb", "max_running", "guard_failures",
            "reserve_after_seconds", "launch_attempts", "jobs_file_interval_seconds"}
    assert ours <= named & keys

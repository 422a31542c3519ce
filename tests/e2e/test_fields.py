"""A field that is added to the table of a job is everywhere."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from live import COMMAND, free_port, kill_all, until

import nexus

ROW = '''    made_up: str | None = optional(
        None, LINE, "a meaning of its own", "asked kept public", flag="--made-up WORD")
'''


def read_order(path, **facts):
    """The job that a node is sent, for a job of these facts, by that nexus.py."""
    spec = importlib.util.spec_from_file_location("made_up_nexus", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    job = module.begin_attempt(module.Job("abc", "true", "/", "ann", 0.0, (0, 1, 1), environment="", **facts), gpu_indices=(0,))
    return module.decode("Order", json.loads(module.encode_json(module.Order(job, {})))).job


def test_a_row_is_all_that_a_field_of_a_job_takes(tmp_path):
    """Its option, help, check, JSON, description, who sees it, what a retry keeps, what a node is sent, what a restart finds.

    And the page's form.
    """
    source = pathlib.Path(nexus.__file__).read_text(encoding="utf-8")
    place = source.index("    tty: bool = optional(", source.index("class Job(Value):"))
    (tmp_path / "nexus.py").write_text(source[:place] + ROW + source[place:], encoding="utf-8")
    assert read_order(tmp_path / "nexus.py", made_up="blue").made_up == "blue", "a node is sent it"
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'[service]\nport = {free_port()}\nrefresh_rate_seconds = 0.3\n[jobs]\nlauncher = "direct"\n')
    environ = {**os.environ, "NEXUS_HOME": str(home), "NEXUS_MOCK_GPUS": "1"}
    shutil.copy(COMMAND, tmp_path)                      # which takes the nexus.py beside it

    def run(*words, code=0):
        argv = [sys.executable, str(tmp_path / COMMAND.name), *words]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (words, done)
        return done.stderr if code else done.stdout

    def read(path, **headers):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": "text/html", **headers})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def ask(path, **headers):
        return json.loads(read(path, **headers))

    port = re.search(r"port = (\d+)", (home / "config.toml").read_text())[1]
    help = " ".join(run("help", "add").split())
    assert "--made-up WORD a meaning of its own" in help
    assert "--made-up must be one line of at most 200 bytes" in run("add", "--made-up", " ", "true", code=2)
    try:
        job_id = run("add", "--made-up", "blue", "exit 3").strip()
        run("wait", job_id, code=3)
        assert json.loads(run("show", job_id, "--json"))["made_up"] == "blue" and "  made up: blue\n" in run("show", job_id)
        again = run("retry", job_id).strip()
        run("wait", again, code=3)
        sleeper = run("add", "--made-up", "red", "sleep 1000").strip()
        token = run("token", "create", "ann").strip().splitlines()[-1]
        run("restart")
        until(lambda: ask(f"/jobs/{sleeper}")["status"] == "running")
        assert ask(f"/jobs/{again}")["made_up"] == "blue", "a retry keeps it, and so does the disk"
        told = {"Authorization": f"Bearer {token}", "X-Forwarded-For": "192.0.2.7"}
        assert [job["made_up"] for job in ask("/jobs", **told)].count("blue") == 2, "others see it"
        assert '"name": "made_up", "help": "a meaning of its own"' in read("/"), "the page's form asks for it"
        schemas = ask("/openapi.json")["components"]["schemas"]
        for name in ("Submission", "Job"):
            assert schemas[name]["properties"]["made_up"]["description"] == "a meaning of its own", name
        body = json.dumps({"command": "true", "made_up": "a\nb"}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/queue", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert "made_up must be one line" in json.loads(refused.value.read())["message"]
    finally:
        run("kill", sleeper)
        run("stop")
        kill_all(str(home))

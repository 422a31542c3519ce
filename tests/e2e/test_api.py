"""Seed 001: its session, typed into a shell as it stands there; and what a submitted script lives through."""

import contextlib
import hashlib
import os
import re
import subprocess

import live
import pytest

import nexus

SCRIPT = '''import time
print("Hello from GPU!")
time.sleep(5)
print("Job complete!")
'''
CONFIG = '''competition_id: "comp123"
project_id: "proj456"
user_id: "myuser"
expected_time: 10  # seconds
token: "my-secret-token"
'''
SUBMIT = '''curl -X POST http://localhost:8000/api/submit \\
  -F "code=@my_script.py" \\
  -F "config_file=@config.yaml"
'''
STATUS = "curl http://localhost:8000/api/status/abc-123-uuid"
RESULTS = "curl http://localhost:8000/api/results/abc-123-uuid"
CANCEL = '''curl -X POST http://localhost:8000/api/cancel/abc-123-uuid \\
  -H "Authorization: Bearer my-secret-token"
'''
NODES = "curl http://localhost:8000/api/nodes"
JOBS = "curl http://localhost:8000/api/jobs"
JOBS_OF_USER = "curl http://localhost:8000/api/jobs?user_id=myuser"
JOBS_RUNNING = "curl http://localhost:8000/api/jobs?status=running"
BEARER = ' -H "Authorization: Bearer my-secret-token"'


@pytest.fixture
def box():
    with make_box(is_starting=False) as made:
        made.serve("nexus.CANCEL_TIMEOUT_S = 60")          # a busy machine may take longer than 2 s to end a job
        yield made


@contextlib.contextmanager
def make_box(**settings):
    with live.Box(gpus=2, is_supervised=False, **settings) as made:
        layout = nexus.make_layout(str(made.home), nexus.parse_config({}, ""))
        nexus.change_tokens(nexus.DISK, layout.tokens_file, lambda tokens: nexus.add_token(tokens, "myuser", "my-secret-token", None, 1e9))
        made.desk = made.folder / "desk"
        made.desk.mkdir()
        write_files(made)
        yield made


def write_files(box, script=SCRIPT, config=CONFIG):
    (box.desk / "my_script.py").write_bytes(script if isinstance(script, bytes) else script.encode())
    (box.desk / "config.yaml").write_text(config)


def shell(box, line, job_id="", user=None):
    """What a line of the seed prints, as JSON; typed by the owner, or another user of the machine."""
    line = line.replace(":8000", f":{box.port}").replace("abc-123-uuid", job_id).replace("curl ", "curl -sS ", 1)
    done = subprocess.run([*(user.become() if user else ()), "bash", "-c", line], cwd=box.desk, capture_output=True, text=True,
                          timeout=live.PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return nexus.parse_json(done.stdout, line)


def submit(box, script=SCRIPT, config=CONFIG):
    write_files(box, script, config)
    answer = shell(box, SUBMIT)
    assert answer.keys() == {"job_id", "node_id", "status", "queue_position"}, answer
    return answer["job_id"]


def list_code(box):
    return sorted(path.name for path in (box.home / "submitted-code").glob("*"))


def test_the_session_of_the_seed(box):
    go = box.path("go")
    write_files(box, SCRIPT.replace("time.sleep(5)", f"import os\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"))
    answer = shell(box, SUBMIT)
    job_id = answer["job_id"]
    assert answer == {"job_id": job_id, "node_id": 0, "status": "pending", "queue_position": 0}
    box.wait_started(job_id)
    [running] = shell(box, JOBS_RUNNING)
    assert shell(box, STATUS, job_id) == running and running["status"] == "running"
    assert (running["user_id"], running["competition_id"], running["project_id"], running["expected_time"]) == (
        "myuser", "comp123", "proj456", 10)
    [node] = shell(box, NODES)
    assert (node["node_id"], node["gpus"], node["free_gpus"], node["running_jobs"], node["is_healthy"]) == (0, 2, 1, 1, True)
    live.until(lambda: shell(box, RESULTS, job_id)["stdout"] == "Hello from GPU!\n", "what it prints at once")
    go.touch()
    box.wait(job_id, "completed")
    seen = {"job_id": job_id, "status": "completed", "stdout": "Hello from GPU!\nJob complete!\n", "stderr": "", "exit_code": 0}
    assert seen.items() <= shell(box, RESULTS, job_id).items()
    assert shell(box, CANCEL, job_id)["error"] == "conflict", "it is over"
    assert shell(box, JOBS) == shell(box, JOBS_OF_USER) == [shell(box, STATUS, job_id)] and shell(box, JOBS_RUNNING) == []
    assert re.search(rf"Job {job_id} added by myuser \(token, 127.0.0.1\): python3? main.py", box.log())


def test_cancel(box):
    ids = [submit(box, "import time\ntime.sleep(600)\n") for _ in range(3)]
    box.wait_started(ids[0])
    waits = shell(box, STATUS, ids[2])
    assert (waits["status"], waits["queue_position"]) == ("pending", 0) and waits["waiting_for"]
    for job_id in (ids[2], ids[0]):
        assert shell(box, CANCEL, job_id) == {"job_id": job_id, "status": "cancelled"}
    assert shell(box, STATUS, ids[0])["cause"] == "killed"


def test_another_user_of_the_machine(box):
    """The token in config.yaml alone lets her submit; all else needs it in the header."""
    with contextlib.ExitStack() as stack:
        tools = live.Tools()
        stack.callback(tools.close)
        user = live.User(tools)
        stack.callback(user.remove)
        for folder in (box.folder, box.desk):
            folder.chmod(0o755)
        write_files(box, "import time\ntime.sleep(600)\n", CONFIG.replace("10", "1000"))
        job_id = shell(box, SUBMIT, user=user)["job_id"]
        box.wait_started(job_id)
        for line in (STATUS, RESULTS, NODES, JOBS, JOBS_OF_USER):
            assert shell(box, line, job_id, user)["error"] == "unauthorized"
            shell(box, line + BEARER, job_id, user)
        assert shell(box, STATUS + BEARER, job_id, user)["user_id"] == "myuser"
        other = box.add("sleep 600")
        assert shell(box, RESULTS + BEARER, other, user)["error"] == shell(box, CANCEL, other, user)["error"] == "forbidden"
        assert [(row["user_id"], row["waiting_for"]) for row in shell(box, JOBS + BEARER, user=user) if row["job_id"] == other] == [
            (nexus.find_user(os.geteuid()), None)]
        assert shell(box, CANCEL, job_id, user)["status"] == "cancelled"
        for config, kind in ((CONFIG.replace("my-secret-token", "another-token"), "unauthorized"),
                             (CONFIG.split("token")[0], "unauthorized"), (CONFIG.replace("myuser", "bob"), "forbidden")):
            write_files(box, config=config)
            assert shell(box, SUBMIT, user=user)["error"] == kind
        nexus.change_tokens(nexus.DISK, str(box.home / "tokens.json"), lambda tokens: nexus.revoke_tokens(tokens, "myuser"))
        write_files(box)
        assert shell(box, SUBMIT, user=user)["error"] == shell(box, SUBMIT)["error"] == "unauthorized", "it is revoked"


def test_the_script_runs_as_it_was_sent_in_a_folder_of_its_own(box):
    script = (b"# -*- coding: latin-1 -*-\r\n# gr\xfc\xdfe\nimport hashlib, os\r"
              b"print(hashlib.sha256(open('main.py', 'rb').read()).hexdigest())\n"
              b"print(os.getcwd()); open('model.bin', 'w').close(); open('main.py', 'w').close(); raise SystemExit(3)")
    job_id = submit(box, script)
    job = box.wait(job_id, "failed")
    folder = f"{box.home}/logs/job_{job_id}/work"
    expected = f"{hashlib.sha256(script).hexdigest()}\n{folder}\n"
    assert (job["exit_code"], box.logs(job_id, "stdout"), job["cwd"]) == (3, expected, folder)
    assert sorted(os.listdir(folder)) == ["main.py", "model.bin"], "what it wrote is kept beside its logs"
    again = box.ask("POST", "/jobs/retry", {"ids": [job_id]})["ids"][0]
    box.wait(again, "failed")
    assert box.logs(again, "stdout") == expected.replace(job_id, again), "as it was sent, not as it made itself"


def test_a_path_for_a_file_name(box):
    line = SUBMIT.replace("my_script.py", "my_script.py;filename=../../../canary.py")
    write_files(box, "print('x')")
    job_id = shell(box, line)["job_id"]
    box.wait(job_id, "completed")
    assert not list(box.folder.rglob("canary*")) and os.listdir(f"{box.home}/logs/job_{job_id}/work") == ["main.py"]


def test_restart_retry_and_the_end_of_the_history():
    with make_box(history_limit=1) as box:
        job_id = submit(box, "open('model.pt', 'w').write('a week of work')")
        box.wait(job_id, "completed")
        [kept] = list_code(box)
        folder = box.home / "logs" / f"job_{job_id}"
        held = [box.add("sleep 600") for _ in range(2)]
        waits = submit(box, "print('after the restart')")
        box.kill_service()
        box.start()
        assert len(list_code(box)) == 2 and kept in list_code(box)
        for each in held:
            box.ask("DELETE", f"/jobs/{each}")
        box.wait(waits, "completed")
        live.until(lambda: list(folder.rglob("*")) == [folder / "work", folder / "work/model.pt"], "the end of the first job's logs")
        live.until(lambda: re.search(rf"history_limit = 1, with their logs: .*{job_id}", box.log()))
        live.until(lambda: kept not in list_code(box), "its script's end")
        again = box.ask("POST", "/jobs/retry", {"ids": [waits]})["ids"][0]
        box.wait(again, "completed")
        assert box.logs(again) == "after the restart\n"
        added = box.call("POST", "/queue", {"command": "true"}, Authorization="Bearer my-secret-token")[1]
        box.wait(added["id"], "completed")      # of the same user: another's jobs end none of his
        live.until(lambda: list_code(box) == [], "the end of all scripts")
        assert box.call("GET", f"/api/status/{again}")[0] == 404

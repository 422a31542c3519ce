"""A node that says what no agent does, to a real service.  What else it may say, and what comes of it: tests/unit/hosting."""

import json
import os
import sys

import far_end
import live

# What stands in for ssh: an agent with one GPU, where each job runs.  It replies with what is in BAD, if that is there.
SSH = """\
#!{python} -IS
import json, os, sys, time
print("a greeting of the login\\nnexus-agent: begins")
print(os.environ["HELLO"], flush=True)
for line in sys.stdin:
    if not line.startswith('{{"number"'):
        continue
    question = json.loads(line)
    jobs = [dict(key=one["key"], progress=dict(pid=77, pid_started=5), log_sizes=[0, 0]) for one in question["jobs"]]
    text = os.environ["GOOD"]
    if jobs and os.path.exists(os.environ["BAD"]):
        with open(os.environ["BAD"]) as file:
            text = file.read()
    text = text.replace('"JOBS"', json.dumps(jobs)).replace('"NUMBER"', str(question["number"]))
    time.sleep(0.02)
    print(text.replace('"JOB"', json.dumps(jobs[0]["key"] if jobs else "abc-1-1")), flush=True)
"""


def test_what_broke_out_does_not_any_more(tmp_path):
    """Two of the replies of the report, literally."""
    environ = {"HELLO": json.dumps(far_end.HELLO), "GOOD": json.dumps(far_end.GOOD), "BAD": str(tmp_path / "bad")}
    with live.Box(gpus=0, launcher="direct", cpu_slots=2, environ=environ, is_starting=False) as box:
        (box.bin / "ssh").write_text(SSH.format(python=sys.executable))
        (box.bin / "ssh").chmod(0o755)
        box.start()
        assert box.nexus("node", "add", "n1").returncode == 0
        there = box.add("sleep 600", node="n1", gpus=0, retries=5)
        live.until(lambda: box.job(there)["pid"] == 77, lambda: box.job(there))
        before = box.job(there)
        for _, reply, words in far_end.BAD_JOBS[:2]:
            (tmp_path / "new").write_text(json.dumps(reply))
            os.replace(tmp_path / "new", tmp_path / "bad")
            live.until(lambda: any(words in note for note in box.job(there)["notes"]), lambda: box.job(there))      # noqa: B023
            assert [box.call("GET", path)[0] for path in ("/status", "/jobs", "/nodes")] == [200] * 3
            for key in ("command", "cwd", "only_node", "status", "status_history", "attempt", "pid", "finished_at", "exit_code"):
                assert box.job(there)[key] == before[key]
        shown = box.nexus("show", there).stdout
        assert "n1 answers what no nexus does of it" in shown and "nothing known since" in shown
        assert not os.path.exists("/tmp/PWNED") and "Internal error" not in box.log()
        assert box.nexus("stop").returncode == 0

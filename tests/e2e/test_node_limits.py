"""The limits of the head hold on a node, which has a config.toml of its own: a real agent, by a stand-in for ssh."""

import json
import shutil
import sys
import time

import forks
import live
import network
import pytest

# It runs the command that ssh would bring to the node here, as if it were another machine: with a name and a home of its own.
SSH = """\
#!/bin/sh
for word; do command=$word; done
export NEXUS_HOME={folder}/far PATH={folder}/far-bin:/usr/bin:/bin
exec unshare --uts sh -c 'echo n1 > /proc/sys/kernel/hostname; exec '"$command"
"""
# Holds 600 MB, and writes when it was told to end.
HOLDER = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("told at", time.time(), flush=True))
held = bytearray(600 * 2**20)
print("holds", flush=True)
while True:
    time.sleep(0.1)
"""


DAMAGE = """\
import os
while piece := os.read(0, 65536):
    os.write(1, piece.replace(b"HostLoop", b"HostL00p"))
"""


@pytest.fixture(scope="module")
def head():
    """A head whose node n1 has lower and higher limits of its own, which do not count; psutil is there as here."""
    live.need_root()
    with live.Box(gpus=0, launcher="direct", max_memory_gb=0.5, kill_grace_seconds=1, timeout_seconds=600, refresh_rate_seconds=0.5,
                  is_starting=False) as made:
        (made.folder / "far").mkdir()
        (made.folder / "far-bin").mkdir()
        network.write_quick_python(made.folder / "far-bin" / "python3", sys.executable, live.NEXUS, forks.listen(made.folder / "forks"))
        (made.folder / "far" / "config.toml").write_text(
            "[service]\nrefresh_rate_seconds = 0.5\n"
            '[jobs]\nlauncher = "direct"\nmax_memory_gb = 100\ntimeout_seconds = 0.01\nkill_grace_seconds = 500\n')
        (made.bin / "ssh").write_text(SSH.format(folder=made.folder))
        (made.bin / "ssh").chmod(0o755)
        (made.folder / "holder.py").write_text(HOLDER)
        made.holder = f"{sys.executable} {made.folder}/holder.py"
        made.start()
        assert made.nexus("node", "add", "n1").returncode == 0
        await_node(made)
        yield made


@pytest.fixture
def box(head):
    """Tests use it one after the other; each gets an agent of its own when it has changed what that finds there."""
    yield head
    for path in (head.folder / "far" / "agent" / "psutil.py", head.folder / "far-bin" / "nvidia-smi", head.folder / "hung"):
        path.unlink(missing_ok=True)
    if (head.bin / "ssh").read_text() != SSH.format(folder=head.folder):
        (head.bin / "ssh").write_text(SSH.format(folder=head.folder))
        kill_agent(head)
    for job in head.ask("GET", "/jobs?status=running"):
        head.call("DELETE", f"/jobs/{job['id']}")
        head.wait(job["id"])
    await_node(head)


def await_node(box):
    def look():
        node = box.ask("GET", "/nodes")[1]
        return node["is_reachable"] or (box.ask("POST", "/nodes", {"name": "n1", "host": "n1"}), time.sleep(0.2))[0]     # at once
    live.until(look, lambda: box.ask("GET", "/nodes"))


def test_host_memory_and_the_grace_of_the_head_hold_there(box):
    job = box.wait(box.add(box.holder, node="n1", gpus=0), "failed")
    assert job["cause"] == "host-memory" and "max_memory_gb is 0.5" in job["cause_line"], job
    assert "told at" in box.nexus("logs", job["id"]).stdout, "SIGKILL came after the head's grace"


def test_a_nexus_that_arrives_damaged_is_not_run(box):
    """The way in checks what has come, and not only what was there."""
    ssh = box.bin / "ssh"
    sound = ssh.read_text()
    (box.folder / "damage.py").write_text(DAMAGE)
    pipe = box.folder / "pipe"                      # nothing but the agent holds the line open
    ssh.write_text(sound.replace("exec unshare", f"exec 3<&0; rm -f {pipe}; mkfifo {pipe}\n"
                                 f"{sys.executable} -IS {box.folder}/damage.py <&3 >{pipe} & exec <{pipe} 3<&-; exec unshare"))
    for path in (box.folder / "far" / "agent").glob("nexus-*.py"):
        path.unlink()
    kill_agent(box)
    live.until(lambda: "nexus.py has not arrived whole there" in (box.call("GET", "/nodes")[1][1]["trouble"] or ""),
               lambda: box.call("GET", "/nodes"))
    ssh.write_text(sound)
    await_node(box)


def kill_agent(box):
    pids = [pid for pid in live.find_commands(" agent ") if str(box.folder).encode() in live.read_bytes(f"/proc/{pid}/cmdline")]
    assert pids
    live.kill(*pids)


def test_limits_hold_for_the_next_agent(box):
    """Nobody can connect for a while, and the agent of before is gone: the next one knows the limits by its files.

    An agent of 1f82866 wrote one of them, which kept no limits but the job's time limit.
    """
    # They must run until their agent is killed, and a busy machine may take some seconds to come to that
    ids = [box.add("sleep 600", node="n1", gpus=0, timeout_seconds=8) for _ in range(2)]
    for job_id in ids:
        live.until(lambda job_id=job_id: box.job(job_id)["pid"], "its begin")
    (box.bin / "ssh").rename(box.bin / "ssh-away")
    shutil.copy("/bin/false", box.bin / "ssh")
    kill_agent(box)
    (file,) = (box.folder / "far" / "agent").glob(f"*/jobs/job_{ids[0]}-*/job.json")
    kept = json.loads(file.read_text())
    del kept["limits"]
    file.write_text(json.dumps(kept))
    (box.bin / "ssh-away").rename(box.bin / "ssh")
    for job_id in ids:
        job = box.wait(job_id, "failed")
        assert job["cause"] == "timeout" and "its time limit is 8s" in job["cause_line"], job


def test_without_psutil_there_the_job_says_so(box):
    (box.folder / "far" / "agent" / "psutil.py").write_text("raise ImportError")
    kill_agent(box)
    job_id = box.add("sleep 600", node="n1", gpus=0)
    live.until(lambda: any("psutil is missing there" in note for note in box.job(job_id)["notes"]), lambda: box.job(job_id))


def test_a_program_that_hangs_there_holds_up_no_limit(box):
    """What reads the GPUs keeps neither memory from being measured, nor the agent from its head."""
    smi, ssh, hung = box.folder / "far-bin" / "nvidia-smi", box.bin / "ssh", box.folder / "hung"
    smi.write_text(f"#!/bin/sh\n[ -e {box.folder}/hang ] || exit 6\ntouch {hung}\nexec sleep 600\n")
    smi.chmod(0o755)
    ssh.write_text(ssh.read_text().replace("export ", "unset NEXUS_MOCK_GPUS; export "))
    kill_agent(box)
    job_id = box.add(f"until [ -e {box.folder}/grow ]; do sleep 0.1; done; exec {box.holder}", node="n1", gpus=0)
    live.until(lambda: box.job(job_id)["peak_rss_mib"], "its first measurement")
    (box.folder / "hang").touch()
    live.until(hung.exists, "a call that hangs")
    before_s = box.job(job_id)["runtime_seconds"]
    (box.folder / "grow").touch()
    job = box.wait(job_id, "failed")
    assert job["cause"] == "host-memory" and job["runtime_seconds"] - before_s < 30, job
    hung.unlink()
    kill_agent(box)
    live.until(hung.exists, "the next agent's call")
    await_node(box)
    (box.folder / "hang").unlink()


# What a job may do in its own folder on the node, and to the FIFO of its agent
SABOTAGE = r"""
cd "$(dirname "$(ls FAR/agent/*/jobs/job_"$NEXUS_JOB_ID"-*/job.sh)")" || exit 9
for name in job.json log.times attempt-2; do rm -f $name; ln -s /dev/zero $name; done
rm -f attempt-1; echo "99999999999999999999 5" > attempt-1
mkfifo result-2.json; printf '{"exit_code": 18446744073709551615, "runtime_seconds": 1e300, "cause": "killed"}' > result-1.json
for words in "1 99999999999999999999 5 5" "1 4194304 99999999999999999999 5"; do echo "start $NEXUS_JOB_ID $words" > ../../events; done
echo "end $NEXUS_JOB_ID 1 0 99999999999999999999" > ../../events
sleep 2; echo done; exit 3
"""


def test_a_job_cannot_make_a_sound_agent_answer_badly(box):
    job_id = box.add(SABOTAGE.replace("FAR", f"{box.folder}/far"), node="n1", gpus=0)
    job = box.wait(job_id, "failed")
    assert job["exit_code"] == 3 and job["cause"] == "exit", job
    assert "done" in box.nexus("logs", job_id).stdout and "answers what no nexus does" not in box.log()
    assert box.call("GET", "/nodes")[1][1]["is_reachable"]

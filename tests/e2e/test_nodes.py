"""Jobs on other machines: real services on hosts of their own, reached by real OpenSSH, whose lines are cut at the worst moments."""

import concurrent.futures
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import console
import live
import network
import pytest
import samples
from makers import SUPPORT
from test_conda import Conda, make_program

import nexus

COUNTED = 'echo "$NEXUS_JOB_ID" >> ~/ran; '         # what each job begins with: how often it ran is counted on the machine it ran on


def add_node(net, node, *options):
    """Have the head give jobs to a node, by its name in ~/.ssh/config unless told otherwise; CompletedProcess."""
    done = net.head.nexus("node", "add", *(options or (node.name,)))
    assert done.returncode == 0, done.stderr + net.head.log()[-3000:]
    return done


def make_net(**options):
    net = network.Net(**options)
    try:
        for node in net.nodes:
            add_node(net, node)
    except BaseException:
        net.close()
        raise
    return net


def info(net, node):
    """What GET /nodes says of a node."""
    return next(told for told in net.head.ask("GET", "/nodes") if told["name"] == node.name)


def is_reached(net, node):
    told = info(net, node)
    return told["is_reachable"] and not told["trouble"]


def hurry(net, node):
    """Let the head try to reach a node now, and not at the end of a pause."""
    net.head.ask("POST", "/nodes", {"name": node.name, "host": node.name})


def await_nodes(net):
    """Until all nodes can be used."""
    for node in net.nodes:
        live.until(lambda node=node: is_reached(net, node) or (hurry(net, node), time.sleep(0.3))[0], lambda node=node: info(net, node))


USUAL = {"guard_failures": 0, "on_reboot": "requeue", "node_lost_after_seconds": 0}       # jobs fail here on purpose


def configure(net, **config):
    """Have the head's service run with these settings, and else the usual ones."""
    wanted = {**USUAL, **config}
    if not wanted.items() <= net.head.settings.items():
        net.head.write_config(**wanted)
        assert net.head.nexus("restart").returncode == 0
        await_nodes(net)


def runs(net, job_id):
    """The names of the nodes on which a job has begun, as often as it has."""
    return [node.name for node in net.nodes for line in live.read(node.home / "ran").splitlines() if line == job_id]


def is_idle(net):
    return not net.head.ask("GET", "/jobs?status=running") and not net.head.ask("GET", "/queue")


def log_of(net, job, stream="stdout"):
    return live.read_bytes(pathlib.Path(job["log_dir"]) / f"{stream}.log")


@pytest.fixture(scope="module")
def shared():
    net = make_net(nodes=2, gpus=2, retry_backoff_seconds=0.1, **USUAL)
    with net:
        yield net


@pytest.fixture
def net(shared, request):
    """A head without a GPU and two nodes with two each, which tests use one after the other; a mark `config` says what is set."""
    mark = request.node.get_closest_marker("config")
    configure(shared, **(mark.kwargs if mark else {}))
    yield shared
    shared.head.set_ssh()
    for node in shared.nodes:
        node.repair()
    shared.head.await_service()
    await_nodes(shared)
    for job in shared.head.ask("GET", "/jobs"):
        if job["status"] in ("pending", "running"):
            shared.head.call("POST", f"/api/cancel/{job['id']}")
    live.until(lambda: is_idle(shared), "an idle queue")
    shared.head.ask("POST", "/service/resume")


CARD = {"name": "NVIDIA A100-SXM4-80GB", "memory.total": 81920, "mig": [{"name": "1g.10gb", "uuid": "MIG-GPU-0/7/0"}, "2g.20gb"]}
ODD = {  # what is special about a machine, by its name; n2 is as good as any
    "n1": {"gpus": [{}, {}]}, "n2": {}, "n3": {"has_git": False, "has_screen": False}, "n4": {"has_lfs": False}, "n5": {"python": "old"},
    "n6": {"python": None}, "n7": {"disk_mib": 4}, "n8": {"gpus": None}, "n9": {"gpus": [CARD, {}]}, "n10": {"twin": 1}}


@pytest.fixture(scope="module")
def machines():
    with network.Net(nodes=list(ODD.values()), gpus=1, guard_failures=0) as net:
        yield net


@pytest.fixture
def odd(machines):
    """A head without GPUs and nodes; beside it are the machines of ODD, which a test may add."""
    head = machines.head
    yield machines
    for job in head.ask("GET", "/jobs"):
        if job["status"] in ("pending", "running"):
            head.call("POST", f"/api/cancel/{job['id']}")
    for node in head.ask("GET", "/nodes")[1:]:
        head.ask("DELETE", f"/nodes/{node['name']}?force=1")
    live.until(lambda: len(head.ask("GET", "/nodes")) == 1 and is_idle(machines), "no node and no job")


# Adding and removing

def test_a_node_is_added_and_listed():
    with network.Net(nodes=1, gpus=2, jump=True) as net:
        node, head = net.nodes[0], net.head
        for name in ("config", "known_hosts"):                       # nothing but what is said here
            if name == "config":
                (head.folder / ".ssh" / name).unlink()
        done = head.nexus("node", "add", node.target, "--name", "n1", "--jump", net.jump.target, "--identity",
                          str(head.folder / ".ssh" / "id_ed25519"), "--port", "22")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"n1: 2 GPUs (Mock GPU), Python {'.'.join(map(str, os.sys.version_info[:3]))}\n"
        told = head.nexus("node", "list").stdout.splitlines()
        assert told[0].split() == ["NODE", "ADDRESS", "GPUS", "MODEL", "JOBS", "STATE"]
        assert told[1].split() == ["head", "here", "0", "0", "ok"] and told[2].split() == ["n1", node.target, "2", "Mock", "GPU", "0", "ok"]
        assert "GPU n1:0 (Mock GPU, 24GB): Available\nGPU n1:1 (Mock GPU, 24GB): Available" in head.nexus().stdout
        file, = (node.home / ".nexus" / "agent").glob("nexus-*.py")
        assert file.read_bytes() == live.NEXUS.read_bytes()
        before = file.stat()
        again = head.nexus("node", "add", node.target, "--name", "n1")
        assert again.returncode == 4 and "there is a node n1 already" in again.stderr, again.stderr
        assert file.stat().st_ino == before.st_ino
        file.write_bytes(b"# another\n")
        node.kill_agent()
        live.until(lambda: file.read_bytes() == live.NEXUS.read_bytes() and is_reached(net, node), "the right one to be brought there")
        assert head.wait(head.add("true"), "completed")["node"] == "n1"
        assert head.nexus("restart").returncode == 0                # it is kept
        head.await_service()
        assert head.wait(head.add("true"), "completed")["node"] == "n1"
        assert (node.home / ".nexus").stat().st_mode & 0o777 == 0o700


REFUSED = [  # words on the command line, what is said, what to do
    (["n1", "n2"], "node: unrecognized arguments: n2", "nexus help node"),
    (["n1", "--force"], "node: unrecognized arguments: --force", "nexus help node"),
    (["--", "-oProxyCommand=true"], "name must be a name of letters", ""),
    (["--name", "n9", "me@-oProxyCommand=true"], "host must be an address", ""),
    (["n1", "--port", "seven"], "--port must be a whole number", ""),
    (["n1", "--port", "70000"], "port must be a whole number", ""),
    (["n1", "--name", "a b"], "name must be a name of letters", "n1"),
    (["n1", "--name", "head"], "head is this machine's name", "--name n1"),
]


def test_a_node_that_cannot_be_added(net):
    for words, said, hint in REFUSED:
        done = net.head.nexus("node", "add", *words)
        assert done.returncode in (2, 4) and said in done.stderr and hint in done.stderr, (words, done)


def test_remove_drains(net):
    head, node = net.head, net.nodes[1]
    job = head.add(f"{COUNTED} until [ -e ~/go ]; do sleep 0.05; done", node="n2")
    head.wait_started(job)
    removing = subprocess.Popen(head.argv("node", "remove", "n2"), env=head.environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                text=True, cwd="/")
    assert "1 job there still runs" in removing.stderr.readline()
    waiting = head.add("true", node="n2")
    assert "n2 is being removed" in head.await_reason(waiting, "removed")
    assert head.wait(head.add("true"), "completed")["node"] == "n1"
    (node.home / "go").touch()
    assert removing.wait(live.PATIENCE_S) == 0 and "n2 is removed" in removing.stderr.read()
    assert head.wait(job, "completed") and runs(net, job) == ["n2"]
    assert "n2" not in head.nexus("node", "list").stdout and "there is no node n2" in head.await_reason(waiting, "no node")
    assert head.nexus("node", "remove", "n2").returncode == 3
    assert head.nexus("add", "true", "--node", "n2").returncode == 2
    assert not list(node.home.glob(".nexus/agent/*/jobs/*")), "it need not keep them"
    add_node(net, node)
    assert head.wait(waiting, "completed")["node"] == "n2"


def test_remove_by_force(net):
    head, node = net.head, net.nodes[1]
    job = head.add(f"{COUNTED} sleep 600.5", node="n2")
    other = head.add(f"{COUNTED} sleep 600.5", retries=1)
    head.wait_started(job), head.wait_started(other)
    moved = head.job(other)["node"] == "n2"
    assert head.nexus("node", "remove", "n2", "--force").returncode == 0
    assert head.wait(job, "failed")["cause"] == "node-lost"
    live.until(lambda: not node.find("sleep 600.5"), "what ran there to be ended")
    assert head.job(other)["status"] == ("pending" if moved else "running") or moved
    head.call("POST", f"/api/cancel/{other}")
    add_node(net, node)


# Jobs

def test_remove_by_force_while_an_order_is_on_its_way(net):
    node = net.nodes[0]
    node.delay(300)
    try:
        job = net.head.add("sleep 777.5", node="n1")
        net.head.wait_started(job)
        assert net.head.nexus("node", "remove", "n1", "--force").returncode == 0
        assert net.head.wait(job, "failed")["cause"] == "node-lost"
        live.until(lambda: "n1" not in [told["name"] for told in net.head.ask("GET", "/nodes")], "it to be forgotten")
        live.until(lambda: not node.find("sleep 777.5") and not node.find(".py agent "), "its end there")
    finally:
        node.delay(0)
        add_node(net, node)


def test_a_job_runs_there_as_here(net):
    head = net.head
    job = head.wait(head.add("echo out; hostname; pwd; echo $HOME $USER; echo err >&2; exit 3", env={"MINE": "1"}, node="n2"), "failed")
    node = net.nodes[1]
    assert (job["exit_code"], job["cause"], job["node"], job["gpu_indices"]) == (3, "exit", "n2", [0])
    out = f"out\nn2\n{node.home}\n{node.home} {node.user}\n"
    assert head.logs(job["id"], "stdout") == out and head.logs(job["id"], "stderr") == "err\n"
    assert head.ask("GET", f"/api/results/{job['id']}")["stdout"] == out
    done = head.nexus("logs", job["id"])
    assert (done.stdout, done.stderr) == (out, "err\n")
    assert head.nexus("wait", job["id"]).returncode == 3
    done = head.nexus("run", "echo run; exit 5", "--node", "n1", "--cwd", "/tmp")
    assert (done.returncode, done.stdout) == (5, "run\n"), done.stderr
    assert "n2" in head.nexus("show", job["id"]).stdout
    assert head.nexus("run", "hostname", "--node", "nowhere").returncode == 2


def test_the_environment_is_the_submitters_and_the_machines(net):
    head, node = net.head, net.nodes[0]
    environ = {"WANDB_MODE": "disabled", "PATH": f"/opt/only-here/bin:{head.environ['PATH']}", "BASH_FUNC_module%%": "() {  echo mod\n}",
               "SSH_AUTH_SOCK": "/tmp/agent", "XDG_RUNTIME_DIR": "/run/user/1", "LC_ALL": "C"}
    done = subprocess.run(head.argv("run", "env", "--node", "n1", "--env", "MORE=1"), env={**head.environ, **environ}, cwd="/tmp",
                          capture_output=True, text=True)
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if re.match(r"\w+=", line))
    assert told["WANDB_MODE"] == "disabled" and told["LC_ALL"] == "C" and told["MORE"] == "1", done.stderr
    assert told["HOME"] == str(node.home) and told["USER"] == node.user
    assert "SSH_AUTH_SOCK" not in told and "XDG_RUNTIME_DIR" not in told
    path = told["PATH"].split(":")
    assert path[0] == "/opt/only-here/bin" and f"{node.folder}/bin" in path and len(path) == len(set(path))
    assert (told["CUDA_VISIBLE_DEVICES"], told["NEXUS_GPU_ID"]) == ("0", "0")


def test_follow_and_run_see_lines_at_once(net):
    head = net.head
    job = head.add("echo first; until [ -e ~/next ]; do sleep 0.02; done; echo second", node="n1")
    follower = subprocess.Popen(head.argv("logs", "-f", job), env=head.environ, stdout=subprocess.PIPE, text=True, cwd="/")
    assert follower.stdout.readline() == "first\n"
    (net.nodes[0].home / "next").touch()
    assert follower.stdout.readline() == "second\n" and follower.wait(live.PATIENCE_S) == 0
    (net.nodes[0].home / "next").unlink()


def test_kill_ends_all_of_it(net):
    head, node = net.head, net.nodes[0]
    job = head.add("setsid sleep 601.5 & sleep 601.25", node="n1")
    live.until(lambda: node.find("sleep 601.5") and node.find("sleep 601.25"), "the job's processes")
    assert head.nexus("kill", job).returncode == 0
    assert head.wait(job, "cancelled")["cause"] == "killed"
    assert not node.find("sleep 601.5") and not node.find("sleep 601.25")
    job = head.add("sleep 601.5", node="n2")
    head.wait_started(job)
    assert head.nexus("kill", "n2:0").returncode == 0 and head.wait(job, "cancelled")
    job = head.add("trap 'exit 5' INT; trap 'exit 6' TERM; echo ready; while :; do sleep 0.05; done", node="n1")
    live.until(lambda: head.logs(job) == "ready\n", "its traps")
    assert head.nexus("kill", "--signal", "INT", job).returncode == 0 and head.job(job)["exit_code"] == 5


def test_time_limits_hold_there(net):
    job = net.head.wait(net.head.add("sleep 602.5", timeout_seconds=0.5, node="n1"), "failed")
    assert job["cause"] == "timeout" and 0.4 < job["runtime_seconds"] < 60
    job = net.head.add("sleep 602.5", node="n1")
    net.head.wait_started(job)
    assert net.head.nexus("edit", job, "--timeout", "0.1s").returncode == 0
    assert net.head.wait(job, "failed")["cause"] == "timeout"
    job = net.head.add("trap 'echo saved; exit 0' USR1; echo ready; while :; do sleep 0.1; done", timeout_seconds=600, node="n1")
    live.until(lambda: net.head.logs(job) == "ready\n", "its trap")
    assert net.head.nexus("edit", job, "--warn", "USR1@599s").returncode == 0
    assert net.head.wait(job, "completed")["notes"][0].startswith("USR1 before its time limit: sent to bash")


def test_a_job_that_ended_in_time_is_no_timeout_when_it_is_heard_of_late(net):
    head, node = net.head, net.nodes[0]
    gate = node.home / "end-in-time"
    job = head.add(f"until [ -e {gate} ]; do sleep 0.02; done", timeout_seconds=5, node="n1")
    began_at = nexus.parse_time(head.wait_started(job)["started_at"])
    node.cut()
    gate.touch()                                        # after the cut: an end before it would be heard of in time
    live.until((folder_there(node, job) / "result-1.json").exists, "its end")
    live.until(lambda: time.time() > began_at + 7, "the time limit to be over")
    node.mend()
    assert head.wait(job, "completed")["exit_code"] == 0


def test_mig_slices_of_a_node(odd):
    """They come by their UUIDs, whatever these look like, and are named with the node."""
    head = odd.head
    add_node(odd, odd.nodes[8])
    live.until(lambda: len(head.status()["gpu_status"]) == 3, "its GPUs")
    assert head.nexus("pause", "n9:0.1").returncode == 0
    live.until(lambda: [(gpu["place"], gpu["is_paused"]) for gpu in head.status()["gpu_status"]] == [
        ("n9:0.0", False), ("n9:0.1", True), ("n9:1", False)])
    job = head.wait_started(head.add("echo $CUDA_VISIBLE_DEVICES $NEXUS_GPU_ID; sleep 603.5", gpu_type="1g.10gb"))
    assert (job["node"], job["gpu_places"], job["gpu_uuids"]) == ("n9", ["0.0"], ["n9/MIG-GPU-0/7/0"])
    live.until(lambda: head.logs(job["id"]) == "MIG-GPU-0/7/0 0.0\n")
    assert "where: GPU 0.0 of n9" in head.nexus("show", job["id"]).stdout
    assert head.nexus("kill", "n9:0.0").returncode == 0
    head.wait(job["id"], "cancelled")


def test_shares_and_several_gpus(net):
    head = net.head
    shared = [head.add("echo $CUDA_VISIBLE_DEVICES; sleep 603.5", gpus=0.5, node="n1") for _ in range(4)]
    for job in shared:
        head.wait_started(job)
    assert sorted(head.job(job)["gpu_indices"] for job in shared) == [[0], [0], [1], [1]]
    both = head.add("echo $CUDA_VISIBLE_DEVICES; hostname", gpus=2)
    assert head.wait(both, "completed")["node"] == "n2" and head.logs(both) == "0,1\nn2\n"
    whole = head.add("true", gpus=1, node="n1")
    assert "runs" in head.await_reason(whole, "GPU n1:0 runs", "GPU n1:1 runs")
    head.ask("DELETE", f"/queue/{whole}")
    one = head.add("echo $CUDA_VISIBLE_DEVICES", gpu_ids=[1], node="n2")
    assert head.wait(one, "completed")["gpu_indices"] == [1] and head.logs(one) == "1\n"
    status, told = head.call("POST", "/queue", {"command": "true", "gpus": 3})
    assert status == 400 and "wants 3 GPUs, no machine has more than 2" in told["message"], told
    status, told = head.call("POST", "/queue", {"command": "true", "gpu_ids": [5]})
    assert status == 400 and "of index 5, no machine has more than 0; the indices are 0, 1" in told["message"], told
    assert head.call("POST", "/queue", {"command": "true", "gpus": 1.5})[0] == 200


def test_gpus_are_shared_out_and_paused(net):
    head = net.head
    jobs = [head.add("sleep 604.5") for _ in range(4)]
    for job in jobs:
        head.wait_started(job)
    assert sorted((head.job(job)["node"], head.job(job)["gpu_index"]) for job in jobs) == [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)]
    head.nexus("kill", *jobs)
    assert head.nexus("pause", "n1:0", "n1:1").returncode == 0
    assert head.wait(head.add("true"), "completed")["node"] == "n2"
    assert "paused" in head.await_reason(head.add("true", node="n1"), "GPU n1:0")
    assert head.nexus("resume", "n1:0", "n1:1").returncode == 0


def test_a_job_without_a_gpu(net):
    jobs = [net.head.add("hostname", gpus=0, node=name) for name in ("n1", "n2", "head")]
    assert [(net.head.wait(job, "completed")["node"], net.head.logs(job)) for job in jobs] == [
        ("n1", "n1\n"), ("n2", "n2\n"), ("head", "head\n")]


def test_a_directory_that_is_not_there(net):
    head, node = net.head, net.nodes[1]
    folder = f"/tmp/only-on-n2-{os.getpid()}"
    node.run(f"mkdir {folder}")
    for _ in range(3):                                              # whichever is tried first
        job = head.wait(head.add("pwd", cwd=folder), "completed")
        assert job["node"] == "n2" and head.logs(job["id"]) == f"{folder}\n"
    job = head.add("pwd", cwd=folder, node="n1")
    head.await_reason(job, f"the directory {folder} does not exist on n1", "--snapshot")
    net.nodes[0].run(f"mkdir {folder}")
    assert head.wait(job, "completed") and head.logs(job) == f"{folder}\n"
    anywhere = head.add("pwd", cwd="/nowhere")
    head.await_reason(anywhere, "the directory /nowhere does not exist on n", "n1", "n2", ": make it there, or")


def test_output_of_all_sizes_arrives_whole(net):
    head, node = net.head, net.nodes[0]
    job = head.add("head -c 6000000 /dev/urandom | tee ~/big; head -c 3000000 /dev/urandom | tee ~/more >&2", node="n1")
    told = head.wait(job, "completed")
    assert log_of(net, told) == (node.home / "big").read_bytes() and log_of(net, told, "stderr") == (node.home / "more").read_bytes()
    job = head.wait(head.add("printf 'no newline \\303'", node="n1"), "completed")
    assert log_of(net, job) == b"no newline \xc3"


LOGS = [  # what a job does with its stderr.log, that log in the end
    ("it begins anew", "echo why > /dev/stderr", b"why\n"),
    ("and grows on", "echo why > /dev/stderr; sleep 1; echo that long, in the end >&2", b"why\nthat long, in the end\n"),
    ("it is gone", "rm $log", b"before\n"), ("a FIFO", "rm $log; mkfifo $log", b"before\n"),
    ("it cannot be read", "chmod 0 $log", b"before\n"),
]


def test_jobs_that_handle_their_own_logs(net):
    """All at once."""
    head, home = net.head, net.nodes[0].home
    go = home / "handle-it"
    ids = [head.add(f"log=$(readlink /proc/$$/fd/2); echo before >&2; until [ -e {go} ]; do sleep 0.05; done; {does}; exit 3",
                    node="n1", gpus=0.25, retries=0) for _, does, _ in LOGS]
    for job in ids:
        head.wait_started(job)
        path = pathlib.Path(head.job(job)["log_dir"]) / "stderr.log"
        live.until(lambda path=path: live.read_bytes(path) == b"before\n", lambda path=path: live.read_bytes(path))
    go.touch()
    for job, (reason, _, end) in zip(ids, LOGS):
        told = head.wait(job, "failed")
        assert told["exit_code"] == 3 and log_of(net, told, "stderr") == end, reason


def test_code_of_the_api_travels(net):
    head = net.head
    (head.folder / "train.py").write_text("import os, socket, sys\nprint(socket.gethostname(), os.environ['NEXUS_JOB_ID'])\nsys.exit(4)\n")
    (head.folder / "config.yaml").write_text(f"expected_time: 10\ntoken: {live.read(head.home / 'token').strip()}\n")
    done = net.head.machine.run(f"curl -s -X POST http://localhost:{head.port}/api/submit -F code=@{head.folder}/train.py "
                                f"-F config_file=@{head.folder}/config.yaml")
    told = json.loads(done.stdout)
    job = head.wait(told["job_id"], "failed")
    results = head.ask("GET", f"/api/results/{job['id']}")
    assert (results["stdout"], results["exit_code"]) == (f"{job['node']} {job['id']}\n", 4), results
    seen = head.ask("GET", "/api/nodes")
    number = head.ask("GET", f"/api/status/{job['id']}")["node_id"]
    assert [node["node_id"] for node in seen] == [0, 1, 2] and seen[number]["name"] == job["node"], seen
    assert sorted((node["name"], node["gpus"], node["is_healthy"]) for node in seen) == [
        ("head", 0, True), ("n1", 2, True), ("n2", 2, True)]


# Faults

def reach_not(node):
    """From now on whoever comes is refused, and those who are there are thrown out: a fault that is noticed at once."""
    node.stop_sshd()
    node.close_sessions()


def reach(net, node):
    node.start_sshd()
    hurry(net, node)


def fail_all(net, node):
    node.kill_agent()
    net.head.kill_service()
    node.close_sessions()


def pull_and_plug(net, node):
    node.cut()
    time.sleep(0.5)                                     # packets are lost, and TCP sends them again
    node.mend()


FAULTS = {
    "the line is cut": lambda net, node: node.close_sessions(),
    "packets are lost": pull_and_plug,
    "the agent is killed": lambda net, node: node.kill_agent(),
    "the head's service is killed": lambda net, node: net.head.kill_service(),
    "all of that": fail_all,
}


@pytest.fixture(params=FAULTS)
def fault(request):
    return FAULTS[request.param]


def is_there(node, job_id):
    """Whether a job has arrived on a node."""
    return any(node.home.glob(f".nexus/agent/*/jobs/job_{job_id}-*/job.json"))


def test_a_fault_at_any_moment(net, fault):
    """Jobs of which the node knows nothing yet, or the head not that it has them; that print, and that end."""
    head, node = net.head, net.nodes[0]
    go = node.home / f"go-{random.getrandbits(40):x}"
    prints, ends = (head.add(f"{COUNTED} {does}", node="n1", gpus=0) for does in (
        f'for i in $(seq 1 50); do seq -f "$i-%g" 1 300; echo "$i" >&2; sleep 0.02; done; until [ -e {go} ]; do sleep 0.05; done; exit 3',
        f"until [ -e {go} ]; do sleep 0.01; done; echo last; exit 7"))
    live.until(lambda: runs(net, ends), "it to begin")
    live.until(lambda: len(head.logs(prints)) > 20_000, "a part of the log")
    node.delay(400)
    arrived = head.add(f"{COUNTED} echo done", node="n1")
    live.until(lambda: is_there(node, arrived), "the order to arrive", interval_s=0.005)
    sent = head.add(f"{COUNTED} echo done", node="n1")
    go.touch()
    fault(net, node)
    node.delay(0)
    await_nodes(net)
    told = head.wait(prints, "failed")
    assert (told["exit_code"], told["cause"], runs(net, prints)) == (3, "exit", ["n1"])
    assert log_of(net, told) == "".join(f"{i}-{k}\n" for i in range(1, 51) for k in range(1, 301)).encode()
    assert log_of(net, told, "stderr") == "".join(f"{i}\n" for i in range(1, 51)).encode()
    told = head.wait(ends, "failed")
    assert (told["exit_code"], runs(net, ends), log_of(net, told)) == (7, ["n1"], b"last\n")
    for job in (arrived, sent):
        told = head.wait(job, "completed")
        assert runs(net, job) == ["n1"] and log_of(net, told) == b"done\n"
    assert len(told["attempts"]) == 1, "a start that came to nothing, since the line was cut just then, is no attempt"


def folder_there(node, job_id):
    folder, = node.home.glob(f".nexus/agent/*/jobs/job_{job_id}-*")
    return folder


def test_whatever_lies_in_the_folder_of_an_agent(net):
    """The next agent leaves it alone, and looks after its jobs."""
    node = net.nodes[0]
    job = net.head.add(f"{COUNTED} until [ -e ~/end-litter ]; do sleep 0.05; done; echo done", node="n1")
    net.head.wait_started(job)
    jobs = folder_there(node, job).parent
    (jobs / ".nfs0001").write_text("x")
    (jobs / "job_abc-1" / "job.json").mkdir(parents=True)
    (jobs / "job_abd-1").mkdir()
    (jobs / "job_abd-1" / "job.json").write_text("{")
    node.kill_agent()
    (node.home / "end-litter").touch()
    assert net.head.logs(net.head.wait(job, "completed")["id"]) == "done\n" and runs(net, job) == ["n1"]
    for path in (jobs / ".nfs0001", jobs / "job_abc-1", jobs / "job_abd-1"):
        assert path.exists()
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_running_job_whose_folder_is_lost_there_does_not_run_again(net):
    """With its folder its result is lost, but nobody can know that it does not run any more.  Of one, a file is in its place."""
    node = net.nodes[0]
    gone, file, other = ids = [net.head.add(f"{COUNTED} sleep {length}", gpus=0.5, node="n1", retries=0)
                               for length in ("641.5", "642.5", "643.5")]
    for job in ids:
        net.head.wait_started(job)
    live.until(lambda: len(node.find("sleep 64")) >= 3, "them to run")
    folders = [folder_there(node, job) for job in (gone, file)]
    node.kill_agent()
    for folder in folders:
        shutil.rmtree(folder)
    folders[1].write_text("x")
    for job in (gone, file):
        told = net.head.wait(job, "failed")
        assert told["cause"] == "session-lost" and runs(net, job) == ["n1"]
    assert net.head.job(other)["status"] == "running", "it is another one's folder"
    net.head.ask("DELETE", f"/jobs/{other}")
    net.head.wait(other, "cancelled")
    live.kill(*node.find("sleep 641.5"), *node.find("sleep 642.5"))
    folders[1].unlink()


def test_a_node_gets_another_name_while_a_job_runs(net):
    node = net.nodes[0]
    former = node.run("hostname").stdout.strip()
    job = net.head.add(f"{COUNTED} echo begun; until [ -e ~/renamed ]; do sleep 0.1; done; exit 3", node="n1", retries=1)
    live.until(lambda: net.head.logs(job), "its log")
    try:
        node.root("echo other > /proc/sys/kernel/hostname")
        node.kill_agent()
        live.until(lambda: is_reached(net, node) and node.find(".py agent "), "the next agent")
        (node.home / "renamed").touch()
        live.until(lambda: net.head.job(job)["attempt"] == 2, "its first end")
        first = net.head.job(job)["attempts"][0]
        assert (first["cause"], first["exit_code"]) == ("exit", 3)
        assert net.head.wait(job, "failed")["exit_code"] == 3 and runs(net, job) == ["n1", "n1"]
    finally:
        node.root(f"echo {former} > /proc/sys/kernel/hostname")
        node.kill_agent()


def test_the_log_of_another_attempt_is_cut_on_the_head(net):
    job = net.head.add("[ -e ~/tried ] || { touch ~/tried; seq 1000; exit 1; }; echo second; until [ -e ~/cut ]; do sleep 0.1; done; "
                       "echo last", node="n1", retries=1)
    live.until(lambda: net.head.job(job)["attempt"] == 2 and "second" in net.head.logs(job), "its second attempt")
    path = pathlib.Path(net.head.job(job)["log_dir"]) / "stdout.log"
    os.truncate(path, 0)
    (net.nodes[0].home / "cut").touch()
    net.head.wait(job, "completed")
    assert path.read_bytes().strip(b"\0") == b"second\nlast\n"


def test_a_result_is_on_the_disk_of_its_node_before_the_head_has_it(net):
    node = net.nodes[0]
    path = node.folder / "bin/sync"
    path.write_text(f'#!/bin/sh\necho "$@" >> {node.home}/synced\nexec /usr/bin/sync "$@"\n')
    path.chmod(0o755)
    try:
        node.kill_agent()                               # the next one has it on its PATH
        live.until(lambda: is_reached(net, node) and node.find(".py agent "), "the next agent")
        net.head.wait(net.head.add("true", node="n1"), "completed")
        live.until(lambda: "result-1.json" in live.read(node.home / "synced"), "the disk")
    finally:
        path.unlink()


def test_silence_is_unknown_and_then_the_truth(net):
    """Packets vanish: one job has not been sent yet, one runs, one ends meanwhile."""
    head, node = net.head, net.nodes[0]
    head.set_ssh("-oServerAliveInterval=1", "-oServerAliveCountMax=2", "-oConnectTimeout=2")        # or it takes 20 s
    node.close_sessions()
    live.until(lambda: not is_reached(net, node), "the loss to be noticed")
    await_nodes(net)
    ends = head.add(f"{COUNTED} until [ -e ~/end-silent ]; do sleep 0.02; done; echo ended; exit 5", node="n1")
    head.wait_started(ends)
    node.drop()
    sent = head.add(f"{COUNTED} echo hello", node="n1")
    head.wait(sent, "running")
    (node.home / "end-silent").touch()
    live.until(lambda: head.job(ends)["unknown_since"], "the silence to be noticed")
    assert head.job(ends)["status"] == head.job(sent)["status"] == "running" and head.job(sent)["unknown_since"]
    assert not runs(net, sent)
    for words in (["node", "list"], []):
        assert "unknown since" in head.nexus(*words).stdout
    assert "n1" in head.await_reason(head.add("true", node="n1"), "n1")
    assert head.wait(head.add("true"), "completed")["node"] == "n2"
    head.set_ssh()
    node.mend()
    await_nodes(net)
    told = head.wait(ends, "failed")
    assert (told["exit_code"], told["unknown_since"], log_of(net, told)) == (5, None, b"ended\n")
    assert head.wait(sent, "completed") and runs(net, sent) == runs(net, ends) == ["n1"]


def test_kill_while_it_cannot_be_reached(net):
    head, node = net.head, net.nodes[0]
    job = head.add("sleep 605.5", node="n1")
    live.until(lambda: node.find("sleep 605.5"), "it to begin")
    reach_not(node)
    live.until(lambda: head.job(job)["unknown_since"], "the head to notice")
    head.ask("DELETE", f"/jobs/{job}")
    assert head.job(job)["status"] == "running" and head.job(job)["stopping"] == "killed"
    reach(net, node)
    assert head.wait(job, "cancelled")["cause"] == "killed"
    assert not node.find("sleep 605.5")


def test_a_job_that_was_never_sent_is_killed(net):
    """It was recorded as sent, and nothing came through."""
    head, node = net.head, net.nodes[0]
    node.cut()
    job = head.add(f"{COUNTED} true", node="n1")
    head.wait(job, "running")
    head.ask("DELETE", f"/jobs/{job}")
    node.mend()
    assert head.wait(job, "cancelled")["cause"] == "killed"
    assert runs(net, job) in ([], ["n1"])               # it may have been on its way
    job = head.add(f"{COUNTED} true", node="n1")
    assert head.wait(job, "completed")


def test_retries_on_the_same_node(net):
    head = net.head
    command = f'{COUNTED} n=$(grep -c "^$NEXUS_JOB_ID$" ~/ran); echo "attempt $n"; echo "error $n" >&2; [ $n = 3 ]'
    job = head.wait(head.add(command, node="n1", retries=4), "completed", timeout_s=120)
    assert runs(net, job["id"]) == ["n1"] * 3 and job["attempt"] == 3
    assert log_of(net, job) == b"attempt 1\nattempt 2\nattempt 3\n" and log_of(net, job, "stderr") == b"error 1\nerror 2\nerror 3\n"
    assert [attempt["cause"] for attempt in job["attempts"]] == ["exit", "exit", None]


def test_a_storm(net):
    """Lines and services die at random while many jobs come and go: each runs once, and nothing of its output is lost."""
    head, chance, over = net.head, random.Random(7), threading.Event()
    ids = []

    def submit():
        for number in itertools.count():
            if over.is_set():
                return
            command = f"{COUNTED} echo {number}; sleep 0.{number % 4}; seq {number * 50}; exit {number % 3}"
            ids.append((head.add(command), number))
            over.wait(0.1)

    line, lost, service, own, *_ = FAULTS.values()
    often = samples.count(1, 3)                         # a service that dies often is started ever later
    faults = [*[line] * 2 * often, lost, *[service] * often, own]
    chance.shuffle(faults)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        submitting = pool.submit(submit)
        try:
            for fault in faults:
                fault(net, chance.choice(net.nodes))
                time.sleep(chance.uniform(0, 1))
        finally:
            over.set()
        submitting.result()
    live.until(lambda: is_idle(net) or (await_nodes(net), False)[1], "all jobs to end", timeout_s=240)
    for job_id, number in ids:
        job = head.job(job_id)
        assert job["exit_code"] == number % 3 and len(runs(net, job_id)) == 1, (job, runs(net, job_id))
        assert log_of(net, job).decode() == f"{number}\n" + "".join(f"{k}\n" for k in range(1, number * 50 + 1)), job


def test_two_heads_share_a_node(odd):
    """Each has an agent there; what one runs is somebody else's for the other, by the leases."""
    net = odd
    add_node(net, net.nodes[0])
    node, head = net.nodes[0], net.head
    home = head.folder / "second"
    home.mkdir()
    port = live.free_port()
    config = live.read(head.home / "config.toml")
    (home / "config.toml").write_text(re.sub(r"(?m)^port = .*$", f"port = {port}", config))
    head.machine.own(home)
    head.machine.own(home / "config.toml")

    def second(*words, code=0):
        done = head.nexus(*words, environ={"NEXUS_HOME": str(home)})
        assert done.returncode == code, done.stderr
        return done.stdout.strip()

    second("node", "add", node.target, "--name", "n1")
    ours = [head.add("sleep 615.5"), second("add", "sleep 616.5")]
    for length in ("615.5", "616.5"):
        live.until(lambda length=length: node.find(f"sleep {length}"), f"sleep {length} on the node")
    waiting = [head.add(f"{COUNTED} true"), second("add", "--name", "later", f"{COUNTED} true")]
    head.await_reason(waiting[0], "0 of 2 are free", node.user)
    live.until(lambda: node.user in second("why", waiting[1]), lambda: second("why", waiting[1]))
    assert not live.read(node.home / "ran")
    # Somebody removes them: each agent has its own again.
    live.until(lambda: node.run("rm -rf /run/lock/nexus-leases").returncode == 0, "no look at them meanwhile")
    locked = "cd /run/lock/nexus-leases && [ $(ls | wc -l) = 2 ] && for file in *; do ! flock -n $file true || exit; done"
    live.until(lambda: node.run(locked).returncode == 0, "the locks of both")
    head.nexus("kill", ours[0])
    head.wait(waiting[0], "completed")
    second("kill", ours[1])
    second("wait", waiting[1])
    assert sorted(live.read(node.home / "ran").split()) == sorted(waiting)
    second("stop")


# Snapshots, terminals

def test_a_snapshot_travels(net):
    head = net.head
    tree = head.folder / "tree"
    head.machine.run(f"mkdir -p {tree}/sub && cd {tree} && git init -q && echo first > sub/file && git add -A && "
                     "git -c user.name=a -c user.email=a@b commit -qm one && echo kept > sub/file && echo new > sub/untracked")
    done = head.nexus("add", "--snapshot", "--cwd", str(tree / "sub"), "cat file untracked; pwd; hostname; sleep 0.2")
    assert done.returncode == 0, done.stderr
    head.machine.run(f"echo edited > {tree}/sub/file; rm {tree}/sub/untracked")
    job = head.wait(done.stdout.strip(), "completed")
    kept, new, where, name = head.logs(job["id"]).splitlines()
    assert (kept, new, name) == ("kept", "new", job["node"]) and where.endswith("/sub") and str(tree) not in where
    later = [head.nexus("add", "--snapshot", "--cwd", f"{tree}/sub", "--node", name, "cat file").stdout.strip() for name in ("n1", "n2")]
    assert [head.logs(head.wait(job, "completed")["id"]) for job in later] == ["edited\n"] * 2


def test_a_snapshot_travels_with_what_git_lfs_keeps(net):
    """What is there is not sent again, what is not here is said."""
    head = net.head
    tree = head.folder / "large"
    git = "git -c user.name=a -c user.email=a@b"
    head.machine.run(f"mkdir -p {tree} && cd {tree} && git init -q && git lfs install --local && git lfs track '*.bin' && "
                     f"echo first > a.bin && git add -A && {git} commit -qm one && echo changed > a.bin && echo new > b.bin")

    def add():
        return head.nexus("add", "--snapshot", "--cwd", str(tree), "--node", "n1", "cat a.bin b.bin").stdout.strip()

    job = head.wait(add(), "completed")
    assert head.logs(job["id"]) == "changed\nnew\n"
    head.machine.run(f"echo newer > {tree}/b.bin")
    assert head.logs(head.wait(add(), "completed")["id"]) == "changed\nnewer\n"
    [kept] = net.nodes[0].home.glob(".nexus/agent/snapshots/*.git/lfs")
    assert len([path for path in kept.rglob("*") if path.is_file()]) == 3 and not list(kept.glob("part.*"))
    head.machine.run(f"cd {tree} && git add -A && {git} commit -qm two && rm -r .git/lfs/objects && echo other > new")
    job = head.wait(add(), "failed")
    assert job["cause"] == "launch" and "git-lfs has not fetched 2 files of the snapshot (git -C" in job["cause_line"]


def test_attach_at_a_terminal(net):
    head, node = net.head, net.nodes[0]
    job = head.add("read line; echo got $line", node="n1")
    head.wait_started(job)
    assert "attach needs a terminal" in head.nexus("attach", job).stderr
    with console.Terminal(head.argv("attach", job), {**head.environ, "TERM": "xterm"}) as terminal:
        terminal.wait_for("on n1: Ctrl-A D leaves")
        live.until(lambda: node.find("screen -x"), "screen there")
        terminal.type("hello\n")
        head.wait(job, "completed")
        assert head.logs(job) == "got hello\n"
    job = head.add("sleep 611.5", node="n1")
    head.wait_started(job)
    reach_not(node)
    live.until(lambda: not info(net, node)["is_reachable"], "the loss to be noticed")
    with console.Terminal(head.argv("attach", job), {**head.environ, "TERM": "xterm"}) as terminal:
        terminal.wait_for("Connection refused")
    reach(net, node)
    await_nodes(net)


def test_an_interactive_job(net):
    head = net.head
    words = head.argv("run", "--tty", "--node", "n1", 'PS1="there> " exec bash --norc --noprofile -i')

    def open_terminal(argv):
        return console.Tmux(argv, {**head.environ, "TERM": "xterm"}, head.folder)

    def find_line():
        return [pid for pid in live.find_processes(f"{head.folder}/") if live.read(f"/proc/{pid}/comm") == "ssh\n"
                and b"screen -x" in live.read_bytes(f"/proc/{pid}/cmdline")]

    with open_terminal(words) as terminal:
        terminal.wait_for("^nexus: on n1: Ctrl-A D leaves; keys and Ctrl-C go to the program$")
        terminal.wait_for(r"^there>\n*\Z")
        terminal.resize(70, 20)
        live.until(lambda: terminal.type("clear; stty size") or re.search("^20 70$", terminal.picture(), re.MULTILINE), terminal.picture)
        terminal.type("clear; echo be''gun; sleep 611.6")
        terminal.wait_for("^begun$")
        terminal.press("C-c")
        terminal.wait_for(r"^there>\n*\Z")
        terminal.type("exit 7")
        terminal.wait_for("ended with 7")
    with open_terminal(words) as terminal:
        terminal.wait_for(r"^there>\n*\Z")
        live.kill(*find_line(), number=signal.SIGTERM)
        terminal.wait_for("ended with 255")
        job = head.ask("GET", "/jobs?status=running")[0]["id"]
        assert f"nexus: the line to n1 was lost; job {job} goes on; nexus attach {job} comes back to it" in terminal.picture()
    with open_terminal(head.argv("attach", job)) as terminal:
        terminal.wait_for(r"^there>\n*\Z")
        terminal.press("C-a", "d")
        terminal.wait_for(f"job {job} goes on; nexus attach {job} comes back to it\nended with 0")
    with open_terminal(head.argv("attach", job)) as terminal:
        terminal.wait_for(r"^there>\n*\Z")
        terminal.type("exit 5")
        terminal.wait_for(rf"^nexus: job {job} failed \(exit 5\); what it printed: nexus logs {job}\nended with 0$")


def test_two_names_for_one_machine(net):
    head = net.head
    job = head.add(f"{COUNTED} until [ -e ~/twin ]; do sleep 0.05; done", node="n1")
    head.wait_started(job)
    done = head.nexus("node", "add", net.nodes[0].target, "--name", "twin")
    assert done.returncode == 6 and "twin is n1" in done.stderr and done.stderr.endswith("hint: it needs no second name\n"), done.stderr
    (net.nodes[0].home / "twin").touch()
    assert head.wait(job, "completed") and runs(net, job) == ["n1"]
    assert "twin" not in head.nexus("node", "list").stdout


# Other settings of the head

@pytest.mark.parametrize("here", ["requeue", pytest.param("fail", marks=pytest.mark.config(guard_failures=2, on_reboot="fail"))])
def test_a_node_reboots(net, here):
    head, node = net.head, net.nodes[0]
    second = node.home / f"second-{here}"               # the job looks before it says that it has begun: then it is put there
    job = head.add(f"{COUNTED} [ -e {second} ] && again=1; echo begun; [ $again ] || sleep 606.5; echo done", node="n1")
    live.until(lambda: "begun" in head.logs(job), "it to begin")
    second.touch()
    node.power_off()
    for path in folder_there(node, job).iterdir():
        if path.name != "job.json":
            os.truncate(path, 0)                        # as a power cut leaves what was not synced
    node.power_on()
    node.mend()
    await_nodes(net)
    if here == "fail":
        told = head.wait(job, "failed")
        assert told["cause"] == "reboot" and runs(net, job) == ["n1"] and log_of(net, told) == b"begun\n"
        again = head.add("true", node="n1")
        assert head.wait(again, "completed") and runs(net, job) == ["n1"]
    else:
        told = head.wait(job, "completed")
        assert runs(net, job) == ["n1", "n1"] and log_of(net, told) == b"begun\nbegun\ndone\n"


@pytest.mark.config(guard_failures=2, on_reboot="fail")
def test_a_gpu_on_which_jobs_fail_is_paused_here(net):
    """It runs elsewhere, they do not: the head sees that, and whoever may resume there may resume it."""
    head = net.head
    (net.nodes[0].home / "train.sh").write_text("[ $NEXUS_GPU_ID = 1 ]\n")
    for number, gpu in enumerate((0, 1, 0)):
        assert head.wait(head.add(f"sh train.sh {number}", node="n1", gpu_ids=[gpu]))["status"] == ("completed" if gpu else "failed")
    head.await_reason(head.add("true", node="n1", gpu_ids=[0]), "GPU n1:0 is paused (2 jobs in a row failed there", "nexus resume n1:0)")
    assert head.nexus("resume", "n1:0").returncode == 0


@pytest.mark.config(node_lost_after_seconds=1)
def test_a_lost_node_and_another_attempt(net):
    """What still runs of the attempt that was given up ends when the node is back."""
    head = net.head
    script = f"{COUNTED} echo on $(hostname); [ $(hostname) = {{}} ] && exit 0; sleep 607.5"
    head.ask("POST", "/gpus/n2:0/pause"), head.ask("POST", "/gpus/n2:1/pause")
    retried, given_up = head.add(script.format("n2"), retries=1), head.add("sleep 607.75", node="n1")
    live.until(lambda: runs(net, retried) and net.nodes[0].find("sleep 607.75"), "both to begin on n1")
    live.until(lambda: "on n1" in head.logs(retried), "its output")
    head.ask("POST", "/gpus/n2:0/resume"), head.ask("POST", "/gpus/n2:1/resume")
    reach_not(net.nodes[0])
    told = head.wait(given_up, "failed")
    assert told["cause"] == "node-lost" and "n1 could not be reached for" in told["cause_line"]
    told = head.wait(retried, "completed")
    assert runs(net, retried) == ["n1", "n2"] and log_of(net, told) == b"on n1\non n2\n" and told["node"] == "n2"
    assert net.nodes[0].find("sleep 607.5") and net.nodes[0].find("sleep 607.75")
    reach(net, net.nodes[0])
    live.until(lambda: not net.nodes[0].find("sleep 607.5") and not net.nodes[0].find("sleep 607.75"), "the end of what was given up")
    assert head.job(retried)["status"] == "completed" and log_of(net, told) == b"on n1\non n2\n"


# Machines that lack something

def refused(net, *words):
    """What `node add` says when it fails."""
    done = net.head.nexus("node", "add", *words)
    assert done.returncode == 6 and not done.stdout, done
    assert len(net.head.ask("GET", "/nodes")) == 1, "it is not added"
    return done.stderr


def test_ssh_says_what_is_wrong(odd):
    net = odd
    node, head = net.nodes[0], net.head
    said = refused(net, node.target, "--port", "2222")
    assert "cannot reach" in said and "Connection refused" in said and f"try it by hand: ssh -p 2222 {node.target}" in said
    said = refused(net, "nobody@n1", "--name", "x")
    assert "Permission denied (publickey)" in said and "log in by key, without a password: ssh-copy-id nobody@n1" in said
    said = refused(net, "10.77.9.9")
    assert "unreachable" in said
    said = refused(net, "no-such-host.invalid")
    assert "Could not resolve hostname no-such-host.invalid" in said
    node.stop_sshd()
    assert "Connection refused" in refused(net, "n1")
    node.start_sshd()
    known = head.folder / ".ssh" / "known_hosts"
    kept = known.read_text()
    known.write_text("")
    said = refused(net, "n1")
    assert "Host key verification failed" in said and "accept its host key once, after you have checked it: ssh n1 true" in said
    keys = {line.split()[0]: line.split(" ", 1)[1] for line in kept.splitlines()}
    ours, other = (next(names for names in keys if names.startswith(f"{name},")) for name in ("n1", "n2"))
    known.write_text(f"{ours} {keys[other]}\n")                 # its key has changed
    said = refused(net, "n1")
    assert "ssh-keygen -R" in said and "find out why" in said, said
    known.write_text(kept)
    with open(node.folder / "sshd_config", "a") as file:
        file.write("AllowStreamLocalForwarding no\nAllowTcpForwarding no\n")
    node.stop_sshd(), node.start_sshd()
    add_node(net, node)


def test_nodes_that_lack_something(odd):
    net, small = odd, odd.nodes[6]
    head = net.head
    said = refused(net, "n5")
    assert "cannot use n5: it has no Python that nexus can use: it needs 3.9 or newer there" in said
    assert "install one and put it on PATH" in said
    assert "cannot use n6: it has no Python that nexus can use" in refused(net, "n6")
    small.run("head -c 3800000 /dev/zero > ~/filler")
    said = refused(net, "n7")
    assert "No space left on device" in said and not list(small.home.glob(".nexus/agent/*.py")), said
    (small.home / "filler").unlink()
    add_node(net, net.nodes[2])
    job = head.wait(head.add("echo without; hostname"), "completed")
    assert head.logs(job["id"]) == "without\nn3\n" and job["session"] is None
    done = add_node(net, net.nodes[7])
    assert "n8: 0 GPUs" in done.stdout and "nvidia-smi" in done.stderr
    assert head.wait(head.add("hostname", gpus=0, node="n8"), "completed")
    assert "never: wants 1 GPU, n8 has 0" in head.await_reason(head.add("true", node="n8"), "GPU")


def test_a_node_without_git(odd):
    """And one with git alone, which has what git alone keeps."""
    net = odd
    for node in net.nodes[2:4]:
        add_node(net, node)
    head = net.head
    tree = head.folder / "tree"
    head.machine.run(f"mkdir -p {tree} && cd {tree} && git init -q && echo first > file && git add -A && "
                     "git -c user.name=a -c user.email=a@b commit -qm one")

    def add(*options):
        done = head.nexus("add", "--snapshot", "--cwd", str(tree), *options, "cat file; hostname")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    jobs = [add() for _ in range(2)]                            # whichever is tried first
    assert [head.logs(head.wait(job, "completed")["id"]) for job in jobs] == ["first\nn4\n"] * 2
    job = head.wait(add("--node", "n3"), "failed")
    assert job["cause"] == "launch" and "cannot keep the snapshot on n3: sh: 1: git: not found" in job["cause_line"]
    assert head.logs(head.wait(head.add("hostname", node="n3"), "completed")["id"]) == "n3\n", "else it is as good as the other"
    head.machine.run(f"cd {tree} && git lfs install --local && git lfs track '*.bin' && echo large > a.bin")
    job = head.wait(add("--node", "n4"), "failed")
    assert job["cause"] == "launch" and "cannot keep the snapshot on n4: git-lfs is not installed" in job["cause_line"]


def test_a_conda_environment_that_only_one_node_has(odd):
    net = odd
    for node in net.nodes[:2]:
        add_node(net, node)
    head, node = net.head, net.nodes[1]
    shutil.copy(SUPPORT / "fake_conda", net.folder)
    conda = Conda(f"{node.home}/miniconda3")
    make_program(conda.exe, f'exec {node.python} -IS {net.folder}/fake_conda "$0" "$@"')
    node.own(node.home)
    jobs = [head.add("hostname; echo $CONDA_DEFAULT_ENV $ML", conda="ml") for _ in range(3)]       # whichever is tried first
    assert [head.logs(head.wait(job, "completed")["id"], "stdout") for job in jobs] == ["n2\nml from_ml\n"] * 3
    job = head.wait(head.add("true", conda="ml", node="n1"), "failed")
    assert job["cause"] == "launch" and job["cause_line"].startswith("n1: no conda was found for the environment 'ml'")
    assert len(job["attempts"]) == 1, "it is not tried again"


def test_a_full_disk_there(odd):
    net, head, node = odd, odd.head, odd.nodes[6]
    for each in (node, odd.nodes[1]):
        add_node(net, each)
    job = head.add(f"{COUNTED} echo begun; until [ -e ~/end ]; do sleep 0.05; done; echo done", node="n7")
    live.until(lambda: "begun" in head.logs(job), "it to begin")
    node.run("cat /dev/zero > ~/filler")
    (node.home / "end").touch()
    waiting = head.add(f"{COUNTED} true", node="n7")
    live.until(lambda: "No space left" in str(info(net, node)["trouble"]), lambda: info(net, node))
    assert head.wait(head.add("true"), "completed")["node"] == "n2"
    (node.home / "filler").unlink()
    assert head.wait(job, "completed", "failed") and runs(net, job) == ["n7"]
    told = head.wait(waiting)                       # as on this machine, a full disk may be a job's end
    assert runs(net, waiting) == ["n7"] if told["status"] == "completed" else (
        told["cause"] == "launch" and "No space left" in told["cause_line"] and not runs(net, waiting))


def test_one_home_on_two_machines(odd):
    """The second has a nexus of its own there, beside the first one's."""
    net = odd
    for node in (net.nodes[1], net.nodes[9]):
        add_node(net, node)
    jobs = [net.head.add("hostname", node=name) for name in ("n2", "n10")]
    assert [net.head.logs(net.head.wait(job, "completed")["id"]) for job in jobs] == ["n2\n", "n10\n"]


def test_clocks_that_differ(odd):
    """The node's clock is ahead by an hour."""
    net, node, head = odd, odd.nodes[3], odd.head
    (node.packages() / "sitecustomize.py").write_text(
        "import time\nreal, real_ns = time.time, time.time_ns\n"
        "time.time, time.time_ns = lambda: real() + 3600, lambda: real_ns() + 3600 * 10**9\n")
    (node.folder / "bin" / "date").write_text('#!/bin/sh\n[ "$1" = +%s ] && exec expr $(/usr/bin/date +%s) + 3600\n'
                                              'exec /usr/bin/date "$@"\n')
    (node.folder / "bin" / "date").chmod(0o755)
    add_node(net, node)
    before = time.time()
    job = head.wait(head.add("sleep 1.1"), "completed")
    began, ended = (nexus.parse_time(job[name]) for name in ("started_at", "finished_at"))
    assert before - 2 < began < time.time() and began < ended < time.time() + 2 and 1 < job["runtime_seconds"] < 600


# The whole picture: a head, a jump host, machines with eight GPUs each

def test_nodes_behind_a_jump_host():
    """What the README of such systems promises, with curl; and many jobs.  With --all it is eight machines and a thousand."""
    nodes, jobs = samples.count(2, 8), samples.count(100, 1000)
    with network.Net(nodes=nodes, gpus=8, jump=True, history_limit=5000) as net:
        head = net.head
        for node in net.nodes:
            add_node(net, node)
        token = head.nexus("token", "create", "myuser", "my-secret-token", "--days", "30")
        assert token.returncode == 0, token.stderr
        (head.folder / "my_script.py").write_text('import time\nprint("Hello from GPU!")\ntime.sleep(0.5)\nprint("Job complete!")\n')
        (head.folder / "config.yaml").write_text(
            'competition_id: "comp123"\nproject_id: "proj456"\nuser_id: "myuser"\nexpected_time: 10\ntoken: "my-secret-token"\n')

        def curl(words, path):
            done = head.machine.run(f"cd {head.folder}; curl -s {words} http://localhost:{head.port}{path}")
            return json.loads(done.stdout)

        head.ask("POST", "/service/pause")              # so that all of them start together, however slow curl is
        ids = [curl("-X POST -F code=@my_script.py -F config_file=@config.yaml", "/api/submit")["job_id"] for _ in range(2 * nodes)]
        head.ask("POST", "/service/resume")
        for job_id in ids:
            head.wait(job_id, "completed")
            told = head.ask("GET", f"/api/results/{job_id}")
            assert (told["stdout"], told["exit_code"]) == ("Hello from GPU!\nJob complete!\n", 0)
        assert curl("", f"/api/results/{ids[0]}")["exit_code"] == 0 and curl("", f"/api/status/{ids[0]}")["node_id"]
        assert {head.ask("GET", f"/api/status/{job_id}")["node_id"] for job_id in ids} == set(range(1, nodes + 1)), "each machine had some"
        seen = curl("", "/api/nodes")
        assert [(node["node_id"], node["name"], node["free_gpus"]) for node in seen[1:]] == [(k, f"n{k}", 8) for k in range(1, nodes + 1)]
        long_one = head.add("sleep 612.5")
        head.wait_started(long_one)
        curl(f"-X POST -H 'Authorization: Bearer {live.read(head.home / 'token').strip()}'", f"/api/cancel/{long_one}")
        assert head.wait(long_one, "cancelled")
        assert len(curl("", "/api/jobs?user_id=myuser")) == 2 * nodes

        began = time.monotonic()
        many = head.ask("POST", "/queue", [{"command": f"{COUNTED} echo {number}"} for number in range(jobs)])["ids"]
        live.until(lambda: is_idle(net), "many jobs", timeout_s=240, interval_s=0.1)
        print(f"{jobs} jobs on {nodes} machines: {time.monotonic() - began:.1f} s")
        ran = sorted(line for node in net.nodes for line in live.read(node.home / "ran").splitlines())
        assert ran == sorted(many), "each once"
        jobs = {job["id"]: job for job in head.ask("GET", "/jobs") if job["id"] in set(many)}
        assert {job["status"] for job in jobs.values()} == {"completed"}
        wrong = [(job_id, number, log_of(net, jobs[job_id])) for number, job_id in enumerate(many)
                 if log_of(net, jobs[job_id]) != f"{number}\n".encode()]
        assert not wrong


def test_a_node_of_the_configuration_and_scripts_that_are_allowed():
    """The head says what may run, by its real path: the node's own nexus allows all."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, network.Net(nodes=1, gpus=1) as net:
        head, scripts, node = net.head, pathlib.Path(folder, "scripts"), net.nodes[0]
        scripts.mkdir()
        pathlib.Path(folder).chmod(0o755)
        (scripts / "show.sh").write_text('echo "$0 $1"\n')
        pathlib.Path(folder, "link").symlink_to(scripts)
        add_node(net, node)                             # puts nexus there
        assert head.nexus("node", "remove", "n1").returncode == 0
        head.write_config(allowed_script_paths=[str(scripts)])
        with open(head.home / "config.toml", "a") as file:
            file.write(f'\n[[nodes]]\nname = "box"\nhost = "{node.address}"\nuser = "{node.user}"\n')
        assert head.nexus("restart").returncode == 0
        head.await_service()
        job = head.wait(head.add("sh show.sh a", cwd=f"{folder}/link"), "completed")
        assert (job["node"], head.logs(job["id"])) == ("box", f"{scripts}/show.sh a\n")
        refused = head.nexus("node", "remove", "box")
        assert refused.returncode == 4 and "config.toml" in refused.stderr, refused
        assert head.call("POST", "/queue", {"command": "echo", "cwd": "/"})[0] == 403
        (scripts / "notes").write_text("`id`\n")
        (scripts / "notes").chmod(0o755)                # a shell there would run it
        assert "does not begin with #!" in head.wait(head.add(f"{scripts}/notes"), "failed")["cause_line"]

"""What people and programs see of several machines: the command line, /status, /health and /metrics."""

import contextlib
import json
import subprocess
import time

import live
import network
import pytest
from test_metrics import check_rules, samples


@pytest.fixture(scope="module")
def net():
    with network.Net(nodes=2, gpus=2, head_gpus=1) as made:
        for name in ("n1", "n2"):
            done = made.head.nexus("node", "add", name)
            assert done.returncode == 0, done.stderr
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(net):
    yield
    for node in net.nodes:
        node.mend()
    for job in net.head.ask("GET", "/queue")[::-1]:
        net.head.call("DELETE", f"/queue/{job['id']}")
    for job in net.head.ask("GET", "/jobs?status=running"):
        net.head.call("DELETE", f"/jobs/{job['id']}")
        net.head.wait(job["id"])
    live.until(lambda: all(node["is_reachable"] for node in net.head.ask("GET", "/nodes")), "all nodes to be heard")


@contextlib.contextmanager
def cut_off(net, node):
    node.close_sessions()                               # while the link is up: the head hears of it at once
    node.cut()
    live.until(lambda: any(not each["is_reachable"] for each in net.head.ask("GET", "/nodes")), f"{node.name} to be missed")
    yield
    node.mend()
    live.until(lambda: is_heard(net, node) or (net.head.ask("POST", "/nodes", {"name": node.name, "host": node.name}), time.sleep(0.3))[0],
               f"{node.name} to be heard again, at once and not at the end of a pause")


def is_heard(net, node):
    return next(each for each in net.head.ask("GET", "/nodes") if each["name"] == node.name)["is_reachable"]


def show(net, *words):
    done = net.head.nexus(*words)
    assert done.returncode == 0, done
    return done.stdout


def test_the_snapshot_and_lists(net):
    free = "".join(f"GPU {place} (Mock GPU, 24GB): Available\n" for place in ("0", "n1:0", "n1:1", "n2:0", "n2:1"))
    live.until(lambda: free in show(net), lambda: f"all GPUs: {show(net)}")
    job_id = net.head.wait_started(net.head.add("sleep 600", node="n2"))["id"]
    waits = net.head.add("true", gpus=2, node="n2")
    cpu = net.head.wait_started(net.head.add("sleep 600", gpus=0, node="n1"))["id"]
    shown = show(net)
    assert f"GPU n2:0 (Mock GPU, 24GB):\n  Job ID: {job_id}\n" in shown and "GPU n2:1 (Mock GPU, 24GB): Available\n" in shown
    assert f"CPU:\n  Job ID: {cpu}\n  Node: n1\n" in shown
    [line] = [line for line in show(net, "jobs").splitlines() if line.startswith(job_id)]
    assert line.split()[:4] == [job_id, "running", "n2", "0"]
    assert show(net, "queue").splitlines()[0].split()[:2] == ["ID", "NODE"]
    assert show(net, "why", waits).splitlines()[-2:] == [f"  GPU n2:0: runs job {job_id}", "  GPU n2:1: it could have this one"]
    assert "  where: GPU 0 of n2\n" in show(net, "show", job_id)
    assert "  GPU n2:0: 100% allocated" in show(net, "status", "--detailed") and "  GPU n2:0: " in show(net, "metrics")
    show(net, "kill", "n2:0")
    assert net.head.job(job_id)["cause"] == "killed"


def test_statistics_by_number(net):
    """GET /api/nodes: what runs on each machine, and what waits; the queue that is for any is that of number 0."""
    head = net.head

    def nodes(*keys):
        return [tuple(node[key] for key in keys) for node in head.ask("GET", "/api/nodes")]

    keys = ("node_id", "name", "gpus", "free_gpus", "running_jobs", "pending_jobs", "queue_seconds", "is_healthy")
    live.until(lambda: nodes(*keys) == [
        (0, "head", 1, 1, 0, 0, 0, True), (1, "n1", 2, 2, 0, 0, 0, True), (2, "n2", 2, 2, 0, 0, 0, True)], lambda: nodes(*keys))
    ids = [head.add("sleep 600", expected_time=1000, node=name, gpus=gpus) for name, gpus in (("n1", 2), ("n2", 2), ("head", 1))]
    for job_id in ids:
        head.wait_started(job_id)
    pinned, free = head.add("sleep 600", expected_time=300, node="n2", gpus=2), head.add("true", expected_time=100)
    assert nodes("free_gpus", "running_jobs", "pending_jobs") == [(0, 1, 1), (0, 1, 0), (0, 1, 1)]
    told = {job["job_id"]: job["node_id"] for job in head.ask("GET", "/api/jobs")}
    assert [told[job_id] for job_id in (*ids, pinned, free)] == [1, 2, 0, 2, None], "one that may run anywhere has no place yet"
    seconds = [node["queue_seconds"] for node in head.ask("GET", "/api/nodes")]
    assert 900 < seconds[1] <= 1000 < seconds[0] <= 1100 < seconds[2] <= 1300, seconds
    head.add("true", node="n1")
    assert nodes("pending_jobs", "queue_seconds")[1] == (1, None), "nobody knows how long that takes"


def test_a_gpu_of_a_node_is_paused(net):
    show(net, "pause", "n1:1")
    assert "GPU n1:1 (Mock GPU, 24GB): Paused\n" in show(net)
    show(net, "resume", "n1:1")
    for words, message in ((("pause", "n1:7"), "there is no GPU n1:7"), (("pause", "n7:0"), "there is no node 'n7'")):
        done = net.head.nexus(*words)
        assert done.returncode == 3 and message in done.stderr


def test_a_node_that_is_not_heard(net):
    """Red, with why; its jobs are unknown, not failed; monitoring hears of it."""
    head = net.head
    job_id = head.wait_started(head.add("echo before; sleep 600", node="n1"))["id"]
    waits = head.add("true", node="n1", gpus=2)
    live.until(lambda: head.logs(job_id) == "before\n")
    with cut_off(net, net.nodes[0]):
        shown = show(net)
        assert "\nn1: unknown since " in shown and "try it by hand: ssh n1\n" in shown
        assert f"GPU n1:0 (Mock GPU, 24GB):\n  Job ID: {job_id} unknown since " in shown and "GPU n1:1" not in shown
        assert head.job(job_id)["status"] == "running" and head.job(job_id)["unknown_since"]
        assert "  nothing known since: " in show(net, "show", job_id) and " unknown " in show(net, "jobs")
        assert "UNKNOWN" not in shown and "mux" not in shown, "ssh's words, where they say something"
        assert head.await_reason(waits, "n1") and head.job(waits)["waiting_for"].count("n1") < 4, "said once, not GPU by GPU"
        assert "  GPU n1:1: " in show(net, "why", waits)
        done = head.nexus("logs", job_id)
        assert done.stdout == "before\n" and "n1 has not been heard since" in done.stderr
        gpus = [gpu for gpu in head.status()["gpu_status"] if gpu["node"] == "n1"]
        assert {(gpu["memory_used_mib"], gpu["utilization"], gpu["is_available"]) for gpu in gpus} == {(None, None, False)}
        [node] = [node for node in head.ask("GET", "/api/nodes") if node["name"] == "n1"]
        assert [node[key] for key in ("is_healthy", "gpus", "free_gpus", "running_jobs")] == [False, 2, 0, 1], "as far as is known"
        [check] = [check for check in head.health()["checks"] if check["name"] == "node n1"]
        assert check["reading"].startswith("not heard for ")
        families = check_rules(head.call("GET", "/metrics")[1])
        assert samples(families, "nexus_node_up") == {("head",): 1, ("n1",): 0, ("n2",): 1}
        assert ("n1", "0", "Mock GPU", "MOCK-0") not in samples(families, "nexus_gpu_utilization_ratio")
        killing = subprocess.Popen([*head.argv("kill", job_id)], env=head.environ, stderr=subprocess.PIPE, text=True, cwd="/")
        assert "n1 has not been heard since" in killing.stderr.readline()
    assert killing.wait(live.PATIENCE_S) == 0 and head.job(job_id)["cause"] == "killed"
    head.wait(waits, "completed")
    assert "\nn1" not in show(net)


def test_a_kill_on_a_node_that_has_just_gone_silent(net):
    """It is said at once that it is done when the line is back, long before the node counts as lost."""
    head, node = net.head, net.nodes[0]
    job_id = head.wait_started(head.add("sleep 600", node="n1"))["id"]
    node.drop()
    try:
        killing = subprocess.Popen([*head.argv("kill", job_id)], env=head.environ, stderr=subprocess.PIPE, text=True, cwd="/")
        line = killing.stderr.readline()
        assert "n1 has not been heard since" in line and f"job {job_id} is ended when it is back (Ctrl-C leaves it so" in line
        assert all(each["is_reachable"] for each in head.ask("GET", "/nodes")), "nobody else has missed it yet"
    finally:
        node.mend()
    assert killing.wait(live.PATIENCE_S) == 0 and head.job(job_id)["cause"] == "killed"
    live.until(lambda: all(each["is_reachable"] for each in head.ask("GET", "/nodes")))


def test_others_do_not_hear_how_nodes_are_reached(net):
    token = show(net, "token", "create", "bob").strip().splitlines()[-1]
    answer = live.ask_service(net.head.line(live.PATIENCE_S), "GET", "/status", None, {"Authorization": f"Bearer {token}"})[1]
    assert [node["name"] for node in answer["nodes"]] == ["head", "n1", "n2"]
    assert not any(node[key] for node in answer["nodes"] for key in ("host", "user", "screen", "path", "python", "trouble"))
    assert live.ask_service(net.head.line(live.PATIENCE_S), "GET", "/nodes", None, {"Authorization": f"Bearer {token}"})[0] == 403


def test_the_list_of_nodes(net):
    rows = json.loads(show(net, "node", "list", "--json"))
    assert [(row["name"], row["gpus"], row["is_reachable"]) for row in rows] == [("head", 1, True), ("n1", 2, True), ("n2", 2, True)]
    assert show(net, "node", "list").splitlines()[1].split() == ["head", "here", "1", "Mock", "GPU", "0", "ok"]


def test_the_cards_of_nodes_have_lanes(net):
    head = net.head

    def lanes():
        return {lane["place"]: lane for lane in head.ask("GET", "/gpus/history?since=1h&step=10m")["gpus"]}

    job_id = head.add("exit 3", node="n1")
    head.wait(job_id, "failed")
    live.until(lambda: lanes().keys() >= {"0", "n1:0", "n1:1", "n2:0"}, lambda: lanes().keys())
    live.until(lambda: 0 in lanes()["n1:0"]["others"], "a reading of the node's card")
    lane = lanes()["n1:0"]
    assert lane["node"] == "n1" and lane["uuid"].startswith("n1/")
    [row] = [row for row in head.ask("GET", "/gpus/history?since=1h")["rows"] if row["id"] == job_id]
    assert (row["status"], row["gpu_uuids"]) == ("failed", [lane["uuid"]])
    assert [gpu["place"] for gpu in head.ask("GET", f"/jobs/{job_id}/usage")["gpus"]] == ["n1:0"]
    head.nexus("restart")
    assert (head.home / "history" / f"{lane['uuid'].replace('/', '%2F')}.means").stat().st_size > 0

"""Whether a node is heard, and what health says of it."""

import os
import threading
import types

import live
import makers
import pytest
from turns import edit, news, report

import nexus


def unfollowed(error=None, heard_at=0.0, due_s=float("-inf"), **told):
    """A node that no thread follows, at 100 s: what is known of it is given."""
    node = object.__new__(nexus.Node)
    node.clock, node.error, node.heard_at = types.SimpleNamespace(monotonic=lambda: 100.0), error, heard_at
    node.questions = types.SimpleNamespace(due_at=100.0 - due_s)
    node.reports = object.__new__(nexus.Reports)
    vars(node.reports).update({"gpus": (makers.gpu(0),), "gpu_error": "", "faults": {}, **told})
    return node


@pytest.mark.parametrize("reason, error, stop_cause, due_s, expected", [
    ("it replies", None, "killed", float("-inf"), False), ("a reply is on its way", None, "killed", 0.5, False),
    ("it is late, and the job is to end", None, "killed", 1.5, True), ("nothing is wanted of the job", None, None, 1.5, False),
    ("it is lost", "cannot reach n1", None, float("-inf"), True)])
def test_when_a_job_is_unheard(reason, error, stop_cause, due_s, expected):
    assert unfollowed(error, due_s=due_s).is_unheard(makers.running(stop_cause=stop_cause)) == expected, reason


def test_a_node_that_is_silent_for_long_is_bad_for_health():
    silent = unfollowed(nexus.NexusError("unavailable", "cannot reach n1"), 1000.0)
    for silence_s, is_ok in ((1, True), (29, True), (31, False)):
        assert nexus.check_node(silent, 1000.0 + silence_s) == (is_ok, f"not heard for {silence_s}s: cannot reach n1")
    for told, fault in (({}, ""), ({"gpu_error": "nvidia-smi does not answer"}, "nvidia-smi does not answer"),
                        ({"gpus": (makers.gpu(0, fault="GPU is lost"), makers.gpu(1))}, "GPU 0: GPU is lost"),
                        ({"faults": {"abc-1-1": ("it is wrong", 1.0)}}, "of job abc it answers what no nexus does: it is wrong")):
        assert nexus.check_node(unfollowed(None, 1000.0, **told), 1000.0) == (not fault, fault or "1 GPU")


def begin(w, job_id):
    w.slurm.set("1", "RUNNING")


def test_a_node_that_is_added_again_as_it_goes_stays(head, monkeypatch):
    w = head()
    record = w.service.pool.set_node

    def add_meanwhile(name, known):
        monkeypatch.setattr(w.service.pool, "set_node", record)
        adding.start()
        adding.join(0.2)
        record(name, known)

    adding = threading.Thread(target=lambda: w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann"))
    w.service.pool.remove_node("n1", False, "ann")
    news(w)
    monkeypatch.setattr(w.service.pool, "set_node", add_meanwhile)
    w.turn()
    adding.join(live.PATIENCE_S)
    assert not w.service.pool.nodes["n1"].is_ended and list(w.store.state.nodes) == ["n1"]


@pytest.mark.parametrize("host", ["10.0.0.5", "10.0.0.77"])
def test_a_node_that_is_added_again_before_it_goes_stays(head, monkeypatch, host):
    """Also where the name is another machine's by then."""
    w = head()
    node, adds = w.service.pool.nodes["n1"], [nexus.NodeConfig("n1", host)]
    w.service.pool.remove_node("n1", False, "ann")
    news(w)
    monkeypatch.setattr(node.questions, "ask_anew", lambda: None)
    monkeypatch.setattr(node, "list_own", lambda: w.service.pool.add_node(adds.pop(), "ann") or [])
    w.service.pool.take_stock()
    assert not adds and w.service.pool.nodes["n1"].address.host == host and not w.service.pool.nodes["n1"].is_ended
    assert w.store.state.nodes == {"n1": nexus.KnownNode(nexus.NodeConfig("n1", host))}


@pytest.mark.parametrize("now", [(), (nexus.NodeConfig("n1", "10.0.0.77"),)], ids=["gone", "elsewhere"])
def test_a_node_that_config_toml_has_lost_is_seen_to_until_its_jobs_are_over(head, now):
    w = head(nodes=())

    def begin(*nodes):
        w.service.pool.config = nexus.replace(w.service.config, nodes=nodes)
        for node in w.service.pool.nodes.values():
            node.unpushed.worker.end()
        w.service.pool.nodes = {}
        w.service.pool.begin_nodes()

    begin(nexus.NodeConfig("n1", "10.0.0.5"))
    head.connect(w)
    job_id = w.add()
    w.turn()
    begin(*now)
    node = head.connect(w)
    assert (node.address.host, node.is_leaving) == ("10.0.0.5", True)
    news(w, report(w.job(job_id), {"exit_code": 0}))
    w.turn()
    w.turn()
    assert w.job(job_id).status == "completed" and "n1" in w.service.pool.nodes, "it does not know"
    news(w)
    w.turn()
    assert not w.service.pool.nodes and w.store.state.nodes == {}
    begin(*now)
    assert [node.address.host for node in w.service.pool.nodes.values()] == [config.host for config in now]


def test_pauses_of_node_gpus_last(head):
    """The head restarts, and somebody else edits the list, before the node is reached again; by then `n1:0` is a name, too."""
    w = head(gpus=2)
    w.service.gpu_watch.set_gpu_paused("n1:0", True, "ann")
    w.crash()
    w.service.pool.begin_nodes()
    edit(w, lambda body: {**body, "paused_gpus": [*body["paused_gpus"], 1]})
    assert w.store.state.paused_gpus == ("n1/G0", "GPU-1")
    head.connect(w)
    edit(w, lambda body: {**body, "paused_gpus": [0, "n1:0", "n2:0", "n2/G0"]})
    assert w.store.state.paused_gpus == ("GPU-0", "n1/G0")
    assert [gpu.place for gpu in w.service.gpu_watch.see_gpus(w.store.state) if gpu.is_paused] == ["0", "n1:0"]


MINE, THERE = nexus.NodeConfig("n1", "10.0.0.5"), nexus.NodeConfig("n1", "10.0.0.77")
ADDS = [  # reason, what config.toml has, whether a job runs on n1 (10.0.0.5), what is added; why it is not, or None
    ("again", (), True, MINE, None), ("with another jump host", (), True, nexus.replace(MINE, jump="gate"), None),
    ("another machine", (), False, THERE, None), ("another machine, and jobs run there", (), True, THERE, "another machine, 10.0.0.5"),
    ("another port, and jobs run there", (), True, nexus.replace(MINE, port=2222), "another machine, 10.0.0.5"),
    ("as in config.toml", (MINE,), True, MINE, None), ("otherwise than there", (MINE,), False, THERE, "another address in config.toml"),
    ("this machine's name", (), False, nexus.NodeConfig("here", "10.0.0.9"), "here is this machine's name"),
    ("where Slurm places jobs", "slurm", False, nexus.NodeConfig("n2", "10.0.0.9"), "jobs run under Slurm here"),
]


@pytest.mark.parametrize("reason, configured, is_busy, added, error", ADDS, ids=[case[0] for case in ADDS])
def test_add_node(head, monkeypatch, reason, configured, is_busy, added, error):
    w = head()
    if is_busy:
        job_id = w.add()
        w.turn()
        assert w.job(job_id).current.node == "n1"
    pool, former = w.service.pool, w.service.pool.nodes["n1"]
    pool.config = nexus.replace(w.config, nodes=configured if configured != "slurm" else ())
    monkeypatch.setattr(w.service, "node", "here")
    monkeypatch.setattr(w.service, "is_slurm", configured == "slurm")
    if error:
        with pytest.raises(nexus.NexusError, match=error) as refused:
            pool.add_node(added, "ann")
        assert refused.value.kind == "conflict" and pool.nodes == {"n1": former} and not former.is_ended
    else:
        pool.add_node(added, "ann")
        node = pool.nodes[added.name]
        assert node.address == added == w.store.state.nodes[added.name].config
        assert former.is_ended == (added != MINE) == (node is not former)
        assert w.store.state.nodes[added.name].was_configured == bool(configured)
        seq = w.store.state.seq
        pool.add_node(added, "ann")
        assert (w.store.state.seq, pool.nodes[added.name]) == (seq, node), "nothing is written for one that is there"
    monkeypatch.undo()
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())
    former.unpushed.worker.end()


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_node_that_is_removed_goes_when_its_jobs_are_over(head, is_forced):
    """With --force they are over at once."""
    w = head()
    job_id = w.add()
    w.turn()
    w.service.pool.remove_node("n1", is_forced, "ann")
    node = w.service.pool.nodes["n1"]
    assert node.is_leaving and w.store.state.nodes["n1"].is_leaving and node.find_reason(0.0) == "n1 is being removed"
    w.turn(), w.turn()
    ended = w.job(job_id).current
    assert ((w.job(job_id).status, ended.cause, ended.cause_line) == ("failed", "node-lost", "its node n1 was removed by ann")) == is_forced
    news(w) if is_forced else news(w, report(w.job(job_id), {"exit_code": 0}))
    w.turn(), w.turn()
    if not is_forced:
        assert w.job(job_id).status == "completed" and "n1" in w.service.pool.nodes
        news(w)
        w.turn()
    assert not w.service.pool.nodes and not w.store.state.nodes and node.is_ended


def test_what_cannot_be_removed(head):
    w = head()
    with pytest.raises(nexus.NexusError, match="there is no node 'nn1'") as refused:
        w.service.pool.remove_node("nn1", True, "ann")
    assert refused.value.kind == "not_found" and "n1" in refused.value.hint
    w.service.pool.config = nexus.replace(w.config, nodes=(MINE,))
    with pytest.raises(nexus.NexusError, match="n1 is in config") as refused:
        w.service.pool.remove_node("n1", True, "ann")
    assert refused.value.kind == "conflict" and not w.service.pool.nodes["n1"].is_leaving


def test_a_list_of_nodes_says_what_is_known_of_each(head):
    w = head(nodes=("n1", "n2"), gpus=2)
    n1, n2 = w.service.pool.nodes.values()
    n1.hello, n1.address = nexus.replace(n1.hello, screen=("SCREENDIR=/s",)), nexus.NodeConfig("n1", "10.0.0.5", "bob", 22, "gate", "/key")
    job_id = w.add(node="n1")
    w.turn()
    assert w.job(job_id).current.node == "n1"
    n1.reports.gpu_error = "nvidia-smi does not answer"
    n2.hello, n2.error, n2.is_leaving = None, nexus.NexusError("unavailable", "cannot reach n2", "ssh n2"), True
    empty = dict.fromkeys(("host", "port", "jump", "identity_file", "python", "path", "screen", "user", "trouble", "hint", "unknown_since"))
    there = {"gpus": 1, "gpu_names": ["RTX 3090"], "host": "10.0.0.5", "is_leaving": False}
    assert w.service.pool.list_nodes() == [
        {**empty, "name": w.service.node, "gpus": 2, "gpu_names": ["RTX 3090"], "running_jobs": 0, "user": w.service.user,
         "is_reachable": True, "is_leaving": False},
        {**empty, **there, "name": "n1", "running_jobs": 1, "user": "bob", "port": 22, "jump": "gate", "identity_file": "/key",
         "python": "3.11.7", "path": "/nexus.py", "screen": ("SCREENDIR=/s",), "is_reachable": True,
         "trouble": "nvidia-smi does not answer"},
        {**empty, **there, "name": "n2", "running_jobs": 0, "is_reachable": False, "trouble": "cannot reach n2", "hint": "ssh n2",
         "unknown_since": nexus.format_time(w.clock.now()), "is_leaving": True}]
    assert [check.hint for check in w.service.health.list_checks() if check.name == "node n1"] == [""]
    n1.reports.gpu_error = ""
    n1.start_backoff.fail(w.clock.monotonic(), "bob took GPU 0 first")
    assert w.service.pool.list_nodes()[1]["trouble"] == "bob took GPU 0 first"
    w.service.observer.observation = nexus.replace(w.service.observer.observation, error="no driver")
    assert w.service.pool.list_nodes()[0]["trouble"] == "no driver"


def test_a_plan_sees_of_a_node_what_it_has(head):
    """Of its directories those that are there, and the home of each user."""
    w, home = head(), os.path.expanduser("~")
    node = w.service.pool.nodes["n1"]
    node.reports.folders = {"/data": True, "/gone": False}
    view, = w.service.pool.view_nodes()
    assert (view.name, view.cpu_slots, view.reason, view.folders) == ("n1", 4, None, {home, "/data"})
    node.hello = None
    assert w.service.pool.view_nodes()[0].cpu_slots == 0
    for cwd, machine, snapshot in (("/b", None, None), ("/a", "n1", None), ("/a", None, None), (home, None, None),
                                   ("/c", w.service.node, None), ("/d", None, "a" * 40)):
        job_id = w.add(begin="+1h", gpus=0, node=machine)
        w.store.update(lambda state: [nexus.change_job(state.jobs[job_id], cwd=cwd, snapshot=snapshot)])      # noqa: B023
    w.service.pool.take_stock()
    assert w.service.pool.list_folders(node) == ("/b", "/a")

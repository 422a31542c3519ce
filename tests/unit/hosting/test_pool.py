"""Whether a node is heard, and what health says of it."""

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

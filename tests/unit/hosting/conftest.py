"""A service with a GPU of its own and the node n1, whose far end is the test's."""

import far_end
import makers
import pytest
from turns import ANN, FakeLine

import nexus


@pytest.fixture
def far(world, monkeypatch):
    """n1 is connected; far.world is its head."""
    far = far_end.FarEnd()
    monkeypatch.setattr(nexus, "AgentLine", far.connect)
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())         # the test does that, and no thread
    far.world = w = world(gpus=1)
    w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann")
    far.node = w.node = w.service.pool.nodes["n1"]
    far.follow()
    assert far.node.error is None
    yield far
    far.node.end()


@pytest.fixture
def away(far):
    """(a world, its far end, the id of a job that runs on n1)."""
    w = far.world
    job_id = w.add(node="n1", gpus=0)
    for _ in range(3):
        w.turn()
        far.follow()
    assert w.job(job_id).current.pid == 77
    return w, far, job_id


@pytest.fixture
def head(world, monkeypatch):
    """A world whose node n1 has one GPU, and is well."""
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())

    def make(nodes=("n1",), **config):
        w = world(gpus=config.pop("gpus", 0), **config)
        for name in nodes:
            w.service.pool.add_node(nexus.NodeConfig(name, "10.0.0.5"), "ann")
            connect(w, name)
        return w

    def connect(w, name="n1"):
        node = w.service.pool.nodes[name]
        node.questions.line, node.error, node.reports.folders = FakeLine(), None, {"/": True}
        node.questions.latest = nexus.Question(0, (), ())
        node.hello = nexus.Hello(f"boot {name}", f"boot-{name}", "3.11.7", (), "/nexus.py", 4)
        node.reports.gpus = (nexus.replace(makers.gpu(0), node=name, uuid=f"{name}/G0"),)
        return node

    make.connect = connect
    return make


@pytest.fixture
def on(world):
    """(a world, a job that runs there with the pid 100; put() adds a process of it, stop() kills it, look() lists what was sent)."""
    w = world(gpus=0, kill_grace_seconds=10)
    w.job_id = w.run(w.add(gpus=0), 100)

    def put(pid, **fields):
        w.machine.processes.start(pid, w.job_id, parent=fields.pop("parent", 1))
        process, owner = w.machine.processes.alive[pid]
        w.machine.processes.alive[pid] = nexus.replace(process, **fields), owner

    def stop(signal=None):
        w.service.cancellation.cancel(nexus.Choice([w.job_id]), ANN, signal)
        return look(0)

    def look(seconds):
        w.turn(seconds=seconds)
        sent = [one for one in w.machine.processes.signals if one[1] != 18]         # SIGCONT: a stopped one handles its signals then
        w.machine.processes.signals.clear()
        return sent

    w.put, w.stop, w.look = put, stop, look
    return w

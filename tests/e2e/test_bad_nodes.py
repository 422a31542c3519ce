"""A node that says what no agent does: it is closed with the reason, and nothing else of its head suffers."""

import json
import os
import sys

import live
import makers
import pytest
import test_service

import nexus

world = test_service.world

# What stands in for ssh: an agent that has one GPU, and replies to the second look with what BAD holds.
SSH = """\
#!{python} -IS
import json, os, sys, time
good = json.loads(os.environ["GOOD"])
print("a greeting of the login\\nnexus-agent: begins", flush=True)
print(json.dumps(dict(machine="m", boot_id="b", python="3.11.7", screen=[], path="/nexus.py", cpu_slots=4)), flush=True)
looks = 0
for line in sys.stdin:
    if not line.startswith('{{"jobs"'):
        continue
    looks += 1
    if looks > 1 and os.path.exists(os.environ["BAD"]):
        with open(os.environ["BAD"], "rb") as file:
            content = file.read()
        while True:
            os.write(1, content)
            if content[-1:] == b"\\n" or not content:
                break
    else:
        time.sleep(0.02)
        print(json.dumps(good), flush=True)
    if not content if looks > 1 and os.path.exists(os.environ["BAD"]) else False:
        sys.exit("it had enough of nexus")
"""
GPU = json.loads(nexus.encode_json(makers.gpu(0, uuid="G0")))
GOOD = {"now": makers.NOW, "jobs": [], "folders": {}, "trouble": "", "gpus": [GPU]}


def report(**fields):
    progress = {"result": {"exit_code": 0}, "is_over": True, **fields.pop("progress", {})}
    return {**GOOD, "jobs": [{"key": "zzz-1", "attempt": 1, "progress": progress, "log_sizes": [0, 0], "logs": ["", ""], "samples": {},
                              "rss_mib": None, **fields}]}


BAD = [  # reason, the reply, words
    ("a text for a number", {**GOOD, "gpus": [{**GPU, "memory_total_mib": "x"}]}, "memory_total_mib is 'x', and not float | None"),
    ("no number", {**GOOD, "gpus": [{**GPU, "memory_used_mib": float("nan")}]}, "memory_used_mib is nan"),
    ("no GPU", {**GOOD, "gpus": [None]}, "gpus is None, and not Gpu"),
    ("half a GPU", {**GOOD, "gpus": [{"index": 0, "processes": []}]}, "uuid"),
    ("an odd exit code", report(progress={"result": {"exit_code": "1"}}), "exit_code is '1'"),
    ("odd sizes", report(log_sizes=[1]), "log_sizes is list, and not tuple[int, int]"),
    ("no base64", report(logs=["?", ""]), "base64"),
    ("nothing", None, "n1 answers what no nexus does"),
    ("no JSON", b"<html>\n", "n1 answers what no nexus does: Expecting value"),
    ("an endless line", b" " * 2**20, "its reply does not end"),
    ("its end", b"", "it had enough of nexus"),
]


@pytest.fixture
def bad(world, tmp_path, monkeypatch):
    """(a world with a GPU of its own and the node n1, the file with its bad reply)."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH.format(python=sys.executable))
    ssh.chmod(0o755)
    monkeypatch.setattr(nexus, "RECONNECT_S", (0.01, 0.05))
    w = world(gpus=1)
    w.service.environ.update(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", GOOD=json.dumps(GOOD), BAD=str(tmp_path / "bad"))
    monkeypatch.setenv("PATH", w.service.environ["PATH"])
    w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann")
    w.node = w.service.pool.nodes["n1"]
    live.until(lambda: w.node.trouble is None, lambda: w.node.trouble)
    yield w, tmp_path / "bad"
    w.node.end()


@pytest.mark.parametrize("reason, reply, words", BAD, ids=[case[0] for case in BAD])
def test_a_bad_reply_closes_its_node_alone(bad, reason, reply, words):
    w, file = bad
    away, here = w.add(node="n1", gpus=0), w.add(node=w.service.node)
    file.write_bytes(reply if isinstance(reply, bytes) else json.dumps(reply).encode() + b"\n")
    live.until(lambda: (trouble := w.node.trouble) and words in trouble.message, lambda: w.node.trouble)
    w.turn()
    assert w.job(away).status == "pending" and w.job(here).status == "running"
    file.unlink()
    live.until(lambda: w.node.trouble is None, "it to be well again")
    assert w.service.failure_count == 0


def test_one_node_whose_news_cannot_be_taken_in_keeps_no_other_waiting(world, monkeypatch):
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())
    w, seen = world(), []
    for name in ("n1", "n2"):
        w.service.pool.add_node(nexus.NodeConfig(name, "10.0.0.5"), "ann")
    monkeypatch.setattr(nexus.Node, "poll", lambda node, events: seen.append(node.name) or (1 / (node.name != "n1") and ()))
    w.turn()
    assert seen == ["n1", "n2"] and w.service.failure_count == 1

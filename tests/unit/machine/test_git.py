"""git and a node: what an ssh at the other end of a push may say and do."""

import os
import subprocess
import sys

import pytest

import nexus

ELSEWHERE = """\
#!{python} -IS
import os, sys
with open(os.environ["REPLIES"], "a") as file:
    print(*sys.argv[1:-1], file=file)
sys.exit("git-receive-pack" in sys.argv[-1] or print(os.environ["PLACE"]))
"""
REFS = """\
#!{python} -IS
import os, sys
if "git-receive-pack" not in sys.argv[-1]:
    sys.exit(print("/snapshots"))
number, first = 0, b" refs/nexus/0" + bytes(1) + b"report-status"
while True:
    refs = [b"%040x" % at + (b" refs/nexus/%040x" % at if at else first) for at in range(number, number + 1000)]
    os.write(1, b"".join(b"%04x" % (len(ref) + 4) + ref for ref in refs))
    number += 1000
"""
PUSH = """\
#!{python} -IS
import os, sys
if "git-receive-pack" not in sys.argv[-1]:
    sys.exit(print("/snapshots"))
while True:
    os.write(2, b"x" * 65536)
"""


@pytest.fixture
def push(tmp_path, monkeypatch):
    """A function of an ssh's text: the error of a snapshot's push to the node behind it."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("REPLIES", str(tmp_path / "replies"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for words in ("init -q", "-c user.name=a -c user.email=a commit -q --allow-empty -m a"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    def make(text):
        (tmp_path / "bin" / "ssh").write_text(text.format(python=sys.executable))
        (tmp_path / "bin" / "ssh").chmod(0o755)
        with pytest.raises(nexus.NexusError) as caught:
            nexus.push_snapshot(nexus.Ssh(nexus.NodeConfig("n1", "10.0.0.5"), os.environ), str(tmp_path), head, "r", os.environ)
        return caught.value.message

    return make


def test_what_git_says_of_a_node_is_bounded(push):
    assert "writes more than 1MB" in push(PUSH)


def test_git_hears_of_no_refs_without_end(push, monkeypatch):
    """It keeps them all in memory."""
    monkeypatch.setattr(nexus, "GIT_TIMEOUT_S", 30.0)
    assert "git push says" in push(REFS)


@pytest.mark.parametrize("place", ["/x@[10.6.6.6]/y", "/x@[10.6.6.6:66]/y", "/x%40%5b10.6.6.6%5d/y", "/x@[-oProxyCommand=id]/y", "/~eve/y"])
def test_a_node_sends_git_to_no_other_place(push, tmp_path, monkeypatch, place):
    """git would find a host, a port and a user in such a path."""
    monkeypatch.setenv("PLACE", place)
    push(ELSEWHERE)
    first, second = [line.split() for line in (tmp_path / "replies").read_text().splitlines()]
    assert first[-1] == second[-1] == "10.0.0.5" and "-p" not in second

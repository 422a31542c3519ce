"""git and a node: what an ssh at the other end of a push may say and do."""

import os
import subprocess
import sys

import pytest
from makers import job

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


def git(folder, *words):
    who = ["-c", "user.name=ann", "-c", "user.email=ann@box", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A work tree with a commit, what git ignores, a link and a submodule."""
    top = str(tmp_path_factory.mktemp("trees") / "exp")
    os.makedirs(f"{top}/src/deep")
    for folder in ("data", ".venv/bin", "runs", "models"):
        os.makedirs(f"{top}/{folder}")
    files = {"train.py": "", "data/x.csv": "", ".venv/bin/python": "", ".gitignore": "data/\n.venv/\n*.pt\n", "src/deep/a.py": "",
             "src/w.pt": "", "runs/.gitkeep": "", "runs/a.pt": "", "models/.gitkeep": ""}
    for name, text in files.items():
        with open(f"{top}/{name}", "w", encoding="ascii") as file:
            file.write(text)
    git(top, "init", "-q", "-b", "main")
    os.symlink("/usr/share", f"{top}/shared")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "first")
    git(top, "clone", "-q", top, f"{top}/other")
    git(top, "submodule", "--quiet", "add", f"{top}/other", "sub")
    git(top, "commit", "-q", "-m", "second")
    return top


def pack(top):
    git(top, "pack-refs", "--all")


def detach(top):
    git(top, "checkout", "-q", "--detach", "HEAD~1")


def link_head(top):
    os.rename(f"{top}/.git/HEAD", f"{top}/.git/real")
    os.symlink("real", f"{top}/.git/HEAD")


def pipe_head(top):
    os.unlink(f"{top}/.git/HEAD")
    os.mkfifo(f"{top}/.git/HEAD")


def write_head(text):
    def write(top):
        with open(f"{top}/.git/HEAD", "w", encoding="ascii") as file:
            file.write(text)
    return write


def link_git(top):
    os.rename(f"{top}/.git", f"{top}.git")
    os.symlink(f"{top}.git", f"{top}/.git")


COMMITS = [  # reason, what is done to the work tree, the folder in it, whether its commit is known
    ("a branch", None, "", True), ("a folder in it", None, "src/deep", True), ("packed refs", pack, "", True),
    ("a detached head", detach, "", True), ("none yet", write_head("ref: refs/heads/new\n"), "", False),
    ("a linked work tree", lambda top: git(top, "worktree", "add", "-q", "--detach", "linked", "HEAD~1"), "linked", True),
    ("one with a branch", lambda top: git(top, "worktree", "add", "-q", "-b", "side", "linked"), "linked", True),
    ("a submodule", None, "sub", True), ("a head that is a link", link_head, "", False), ("one that is a pipe", pipe_head, "", False),
    ("a way out", write_head("ref: refs/../../../HEAD\n"), "", False), ("a ring", write_head("ref: refs/../HEAD\n"), "", False),
    ("words", write_head("hello\n"), "", False),
    ("a huge file", write_head("a" * 10**6), "", False), ("a link to .git", link_git, "", False)]


@pytest.mark.parametrize("reason, change, folder, is_known", COMMITS, ids=[row[0] for row in COMMITS])
def test_the_commit_of_a_folder_is_read_from_gits_files(tree, tmp_path, reason, change, folder, is_known):
    top = str(tmp_path / "exp")
    subprocess.run(["cp", "-a", tree, top], check=True)
    if change:
        change(top)
    found = nexus.read_commit(nexus.Disk(), f"{top}/{folder}")
    assert found == (git(f"{top}/{folder}", "rev-parse", "HEAD") if is_known else None), reason


def test_no_commit_is_known_of_what_is_no_work_tree(tmp_path):
    disk = nexus.Disk()
    assert nexus.read_commit(disk, str(tmp_path)) is None
    (tmp_path / "exp/.git").mkdir(parents=True)
    (tmp_path / "exp/.git/HEAD").write_text("a" * 40)
    (tmp_path / "exp/src").mkdir()
    (tmp_path / "link").symlink_to("exp/src")
    assert nexus.read_commit(disk, str(tmp_path / "link")) == "a" * 40, "where the kernel says it is"
    assert nexus.find_commit(disk, job(cwd=str(tmp_path / "none"))) is None
    assert nexus.find_commit(disk, job(cwd="/work", snapshot="a" * 40)) is None, "it has a checkout of its own"


ABSENT = [  # reason, the command, the folder it runs in, what the snapshot lacks
    ("a Python", ".venv/bin/python train.py", "", [".venv/bin/python"]),
    ("a folder", "python train.py --data=data/ --out out", "", ["data/"]),
    ("a file of it", "python train.py 'data/x.csv' data/x.csv", "", ["data/x.csv"]),
    ("what is there", "python train.py src ./src/deep", "", []),
    ("a folder that has an ignored file", "python train.py src", "", []), ("one that has no other", "t runs", "", ["runs"]),
    ("an empty one", "t models", "", []),
    ("from below", "python deep/a.py --init w.pt ../data", "src", ["w.pt", "../data"]),
    ("a link", "ls shared/doc shared", "", []), ("another repository", "python sub/train.py other", "", ["sub/train.py", "other"]),
    ("a whole path", "ls /usr ~/data $HOME/data {data}", "", []),
    ("several commands", "cd src && ls ../data; cat<data/x.csv", "", ["data/x.csv"]),
    ("a way out", "ls ../exp", "", [])]


@pytest.mark.parametrize("reason, command, folder, absent", ABSENT, ids=[row[0] for row in ABSENT])
def test_what_a_command_names_and_its_snapshot_lacks(tree, reason, command, folder, absent):
    snapshot = nexus.take_snapshot(f"{tree}/{folder}", os.environ)
    assert nexus.list_absent(nexus.Disk(), snapshot, f"{tree}/{folder}", os.environ, [command]) == absent, reason

"""A git work tree kept as it is, and job.sh in a checkout of that; with the git there is."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import live
import pytest
from live import until
from test_runner import box, needs_root

import nexus

__all__ = ["box"]                               # a fixture, found by its name
pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
BIN = {"PATH": os.environ["PATH"]}


MADE_ONCE = []                                  # the folder of the repository that each test has a copy of


class Repo:
    """A repository with one commit: train.py, run.sh (executable), link -> train.py, sub/part.py; *.ign is ignored."""

    def __init__(self, top, environ):
        self.top, self.environ = pathlib.Path(top), environ
        if not MADE_ONCE:
            MADE_ONCE.append(tempfile.TemporaryDirectory())
            self.top = pathlib.Path(MADE_ONCE[0].name, "repo")
            self.make()
            self.top = pathlib.Path(top)
        shutil.copytree(pathlib.Path(MADE_ONCE[0].name, "repo"), self.top, symlinks=True)
        self.git("update-index", "-q", "--refresh")

    def make(self):
        self.top.mkdir()
        self.git("init", "-q", "-b", "main")
        self.write("train.py", "one\n")
        self.write("run.sh", "#!/bin/sh\necho ran\n").chmod(0o755)
        self.write("sub/part.py", "part\n")
        self.write(".gitignore", "*.ign\nignored/\n")
        (self.top / "link").symlink_to("train.py")
        self.commit()

    def git(self, *arguments, **options):
        return subprocess.run(["git", "-C", str(self.top), *arguments], env=self.environ, check=True, capture_output=True, **options).stdout

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "a commit")

    def write(self, name, text):
        path = self.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))
        return path

    def snapshot(self, folder="", **environ):
        return nexus.take_snapshot(os.path.join(self.top, folder) if folder else str(self.top), {**self.environ, **environ})

    def files(self, commit):
        """{path: (mode, content)} of a commit."""
        found = {}
        for entry in self.git("ls-tree", "-rz", commit).split(b"\0")[:-1]:
            facts, _, path = entry.partition(b"\t")
            mode, kind, sha = facts.split()
            found[os.fsdecode(path)] = mode.decode(), self.git("cat-file", "blob", sha).decode() if kind == b"blob" else None
        return found

    def bytes_of_all(self):
        """All that is the user's: every file below the top, .git's too, but for the snapshots and their objects."""
        kept = {}
        for folder, folders, names in os.walk(self.top):
            if folder == str(self.top / ".git"):
                folders.remove("objects")
            if folder == str(self.top / ".git/refs"):
                folders[:] = [name for name in folders if name != "nexus"]
            for name in (*folders, *names):
                path = os.path.join(folder, name)
                status = os.lstat(path)
                is_file = os.path.isfile(path) and not os.path.islink(path) and os.access(path, os.R_OK)
                kept[path] = (status.st_mode, os.readlink(path) if os.path.islink(path) else None,
                              (0 if name.startswith("sharedindex.") else status.st_mtime_ns,     # git marks whenever it reads one
                               status.st_ino, pathlib.Path(path).read_bytes()) if is_file else None)
        return kept


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.gitconfig").write_text(
        "[user]\nname = Ann\nemail = ann@example.org\n[commit]\ngpgsign = true\n[gpg]\nprogram = false\n")
    environ = {**BIN, "HOME": str(tmp_path / "home"), "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "commit.gpgsign",
               "GIT_CONFIG_VALUE_0": "false"}
    return Repo(tmp_path / "repo", environ)


# What is kept

ODD = "a 'b' \"c\"\n\t$(d) \\ é *\udcff"
HEAD_FILES = {"train.py": ("100644", "one\n"), "run.sh": ("100755", "#!/bin/sh\necho ran\n"), "link": ("120000", "train.py"),
              "sub/part.py": ("100644", "part\n"), ".gitignore": ("100644", "*.ign\nignored/\n")}


def conflict(repo):
    """Two branches that change the same line, half merged; one of them has removed run.sh."""
    repo.git("checkout", "-qb", "other")
    repo.write("train.py", "theirs\n")
    repo.write("run.sh", "theirs\n")
    repo.commit()
    repo.git("checkout", "-q", "main")
    repo.write("train.py", "ours\n")
    repo.git("rm", "-q", "run.sh")
    repo.commit()
    subprocess.run(["git", "-C", repo.top, "merge", "other"], env=repo.environ, capture_output=True, check=False)
    assert b"UU train.py" in repo.git("status", "--porcelain")
    repo.write("train.py", "resolved\n")
    (repo.top / "run.sh").unlink()


def make_sparse(repo):
    repo.git("sparse-checkout", "set", "--no-cone", "/*", "!/sub/")
    assert not (repo.top / "sub").exists()
    repo.write("sub/new.py", "new\n")


def make_sparse_index(repo):
    """What is outside of the cone is one entry of the index; a file of it is on the disk all the same."""
    repo.write("other/a.py", "a\n")
    repo.commit()
    repo.git("sparse-checkout", "set", "--cone", "--sparse-index", "sub")
    assert not (repo.top / "other").exists()


def mark_all(repo, mark):
    """Of all that is marked, train.py is changed."""
    repo.git("update-index", mark, "-z", "--stdin", input=repo.git("ls-files", "-z"))
    repo.write("train.py", "two\n")
    assert repo.git("status", "--porcelain") == b""


def replace_file_by_folder(repo):
    (repo.top / "train.py").unlink()
    repo.write("train.py/inner", "x\n")
    shutil.rmtree(repo.top / "sub")
    repo.write("sub", "a file now\n")


def put_fifo(path):
    path.unlink()
    os.mkfifo(path)


def use_crlf(repo):
    repo.git("config", "core.autocrlf", "input")
    repo.git("config", "core.safecrlf", "true")
    repo.write("train.py", "one\r\ntwo\r\n")


def change_all(repo):
    """Staged and not; deleted and new; executable and not any more; ignored, which is not kept, but for what is tracked."""
    repo.write("train.py", "two\n")
    repo.git("add", "train.py")
    repo.write("train.py", "three\n")
    (repo.top / "sub/part.py").unlink()
    repo.write("new/a.py", "new\n")
    repo.write("new/run", "x").chmod(0o755)
    (repo.top / "run.sh").chmod(0o644)
    (repo.top / "new/link").symlink_to("/nowhere")
    repo.write(ODD, "x")
    repo.write("y.ign", "x"), repo.write("ignored/x", "x"), repo.write("x.ign", "x")
    repo.git("add", "-f", "x.ign")
    repo.write("x.ign", "y")


KEPT = [  # reason, what the user did, {path: (mode, content) or None = not there}, less what HEAD has
    ("nothing", lambda repo: None, {}),
    ("whatever is changed, made or removed", change_all, {
        "train.py": ("100644", "three\n"), "sub/part.py": None, "new/a.py": ("100644", "new\n"), "new/run": ("100755", "x"),
        "run.sh": ("100644", "#!/bin/sh\necho ran\n"), "new/link": ("120000", "/nowhere"), ODD: ("100644", "x"),
        "x.ign": ("100644", "y")}),
    ("half merged", conflict, {"train.py": ("100644", "resolved\n"), "run.sh": None}),
    ("a sparse checkout", make_sparse, {"sub/new.py": ("100644", "new\n")}),
    ("a sparse checkout with a sparse index", lambda repo: (make_sparse_index(repo), repo.write("sub/part.py", "two\n")),
     {"sub/part.py": ("100644", "two\n"), "other/a.py": ("100644", "a\n")}),
    ("a file that a sparse checkout leaves out is there", lambda repo: (make_sparse_index(repo), repo.write("other/a.py", "two\n")),
     {"other/a.py": ("100644", "two\n")}),
    ("nothing of a sparse checkout is there", lambda repo: (
        repo.git("sparse-checkout", "set", "--no-cone", "/nothing"), repo.write("new", "x")), {"new": ("100644", "x")}),
    ("marked assume-unchanged", lambda repo: mark_all(repo, "--assume-unchanged"), {"train.py": ("100644", "two\n")}),
    ("marked skip-worktree", lambda repo: mark_all(repo, "--skip-worktree"), {"train.py": ("100644", "two\n")}),
    ("marked so, and absent", lambda repo: (mark_all(repo, "--skip-worktree"), (repo.top / "train.py").unlink()), {}),
    ("marked both ways, one of them an odd name", lambda repo: (
        repo.write(ODD, "x"), repo.commit(), mark_all(repo, "--skip-worktree"), mark_all(repo, "--assume-unchanged"),
        repo.write(ODD, "y")), {"train.py": ("100644", "two\n"), ODD: ("100644", "y")}),
    ("git marks each file by itself", lambda repo: (
        repo.git("config", "core.ignoreStat", "true"), repo.write("train.py", "x"), repo.commit(), repo.write("train.py", "two\n")),
     {"train.py": ("100644", "two\n")}),
    ("a file where a folder was, and the other way", replace_file_by_folder,
     {"train.py": None, "train.py/inner": ("100644", "x\n"), "sub/part.py": None, "sub": ("100644", "a file now\n")}),
    ("line ends as git would commit them", use_crlf, {"train.py": ("100644", "one\ntwo\n")}),
]


def hook_everything(repo):
    """Hooks that leave a trace, wherever git would run one."""
    for name in ("pre-commit", "post-commit", "post-checkout", "reference-transaction", "post-index-change", "fsmonitor"):
        repo.write(f".git/hooks/{name}", f"#!/bin/sh\ntouch {repo.top.parent}/hooked\n").chmod(0o755)
    repo.git("config", "core.logAllRefUpdates", "always")
    repo.git("config", "core.fsmonitor", ".git/hooks/fsmonitor")


@pytest.mark.parametrize("reason, change, expected", KEPT, ids=[case[0] for case in KEPT])
def test_the_tree_is_kept_and_nothing_else_is_touched(repo, reason, change, expected):
    repo.write("train.py", "stashed\n")
    repo.git("stash")
    change(repo)
    hook_everything(repo)
    with contextlib.suppress(FileNotFoundError):
        (repo.top.parent / "hooked").unlink()
    head, before = repo.git("rev-parse", "HEAD").decode().strip(), repo.bytes_of_all()
    made = repo.snapshot()
    assert repo.bytes_of_all() == before and not (repo.top.parent / "hooked").exists()
    files = {**repo.files(head), **expected} if reason == "half merged" else {**HEAD_FILES, **expected}
    assert repo.files(made.commit) == {path: fact for path, fact in files.items() if fact}
    assert made.repository == str(repo.top)
    assert repo.snapshot() == made, "the same tree, the same commit"
    assert repo.git("for-each-ref", "--format=%(objectname) %(refname)", "refs/nexus").decode().split() == [
        made.commit, f"refs/nexus/{made.commit}"]
    if expected:
        assert repo.git("log", "--format=%P %an %ce", "-1", made.commit).decode() == f"{head} nexus nexus@localhost\n"
    else:
        assert made.commit == head


def test_git_does_not_collect_it_before_it_is_released(repo):
    repo.write("train.py", "two\n")
    made = repo.snapshot()
    repo.git("gc", "-q", "--prune=now")
    assert repo.files(made.commit)["train.py"] == ("100644", "two\n")
    nexus.release_snapshot(made.repository, made.commit, BIN)
    nexus.release_snapshot(made.repository, made.commit, BIN)
    nexus.release_snapshot("/nowhere", made.commit, BIN)
    assert repo.git("for-each-ref", "refs/nexus") == b""


def test_before_the_first_commit(repo):
    shutil.rmtree(repo.top / ".git")
    repo.git("init", "-q")
    made = repo.snapshot()
    assert repo.files(made.commit) == HEAD_FILES and repo.git("log", "--format=%P %ct", made.commit) == b" 0\n"
    assert not (repo.top / ".git/index").exists() and repo.snapshot().commit == made.commit


def test_in_a_linked_work_tree(repo):
    other = repo.top.parent / "other"
    repo.git("worktree", "add", "-q", str(other), "-b", "other")
    (other / "train.py").write_text("other\n")
    made = nexus.take_snapshot(str(other), repo.environ)
    assert made.repository == str(other) and repo.files(made.commit)["train.py"] == ("100644", "other\n")


def test_from_a_hook_with_its_variables(repo):
    repo.write("train.py", "two\n")
    expected = repo.snapshot().commit
    misled = {"GIT_DIR": "/nowhere", "GIT_WORK_TREE": "/", "GIT_INDEX_FILE": "/nowhere/index", "GIT_PREFIX": "x/",
              "GIT_LITERAL_PATHSPECS": "1", "GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z",
              "GIT_OBJECT_DIRECTORY": "/nowhere", "GIT_TRACE": "1", "LC_ALL": "de_DE.UTF-8"}
    assert repo.snapshot(**misled).commit == expected


def test_repositories_inside(repo):
    """Whatever is a repository of its own is left out."""
    inner = Repo(repo.top.parent / "inner", repo.environ)
    repo.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner.top), "module")
    repo.commit()
    Repo(repo.top / "nested", repo.environ)
    subprocess.run(["git", "init", "-q", repo.top / "fresh"], env=repo.environ, check=True)
    (repo.top / "module/train.py").write_text("changed\n")
    before = repo.bytes_of_all()
    made = repo.snapshot()
    assert repo.bytes_of_all() == before
    assert made.commit == repo.git("rev-parse", "HEAD").decode().strip(), "what is inside a submodule is not the tree's"
    assert repo.snapshot("nested").repository == str(repo.top / "nested")


# What is refused

def make_bare(repo):
    repo.git("config", "core.bare", "true")


def make_huge(repo):
    repo.write("small", "x")
    with open(repo.top / "data.bin", "wb") as file:
        file.truncate(600 * 2**20)


REFUSED = [  # reason, what the user did, variables, kind, words of the message, words of the hint
    ("no work tree", lambda repo: shutil.rmtree(repo.top / ".git"), {}, "usage", "{top} is not in a git work tree", "--cwd DIR"),
    ("a bare repository", make_bare, {}, "usage", "{top} is not in a git work tree", "checkout"),
    ("too much", make_huge, {}, "usage", "2 files that git neither tracks nor ignores, 600MB together; a snapshot takes 500MB",
     "data.bin (600MB): add it to .gitignore"),
    ("no git", lambda repo: None, {"PATH": "/nowhere"}, "unavailable", "git was not found on PATH", "install git"),
    ("a tracked file that is a FIFO now", lambda repo: put_fifo(repo.top / "train.py"), {}, "unavailable",
     "train.py: can only add regular files", "git -C {top}"),
]


@pytest.mark.parametrize("reason, change, variables, kind, words, hint", REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_refused(repo, reason, change, variables, kind, words, hint):
    change(repo)
    with pytest.raises(nexus.NexusError) as told:
        repo.snapshot(**variables)
    assert told.value.kind == kind and words.format(top=repo.top) in told.value.message and hint.format(top=repo.top) in told.value.hint
    assert "\n" not in told.value.message
    assert not (repo.top / ".git/refs/nexus").exists()


def test_a_filter_of_the_users_own_is_run(repo):
    """git-lfs, in most cases."""
    repo.git("config", "--global", "filter.up.clean", "tr a-z A-Z")
    repo.git("config", "filter.up.smudge", "false")
    repo.write(".git/info/attributes", "*.py filter=up\n")
    repo.write("train.py", "two\n")
    assert repo.files(repo.snapshot().commit)["train.py"] == ("100644", "TWO\n")


CUTS = [  # reason, what the filter does first, signals, exit code
    ("TERM", "", [signal.SIGTERM], 143),
    ("HUP", "", [signal.SIGHUP], 129),
    ("Ctrl-C", "", [signal.SIGINT], 130),
    ("Ctrl-C, and again, of a filter that ignores it", "trap '' TERM", [signal.SIGINT, signal.SIGINT, signal.SIGTERM], 130),
]


@pytest.mark.parametrize("reason, trap, numbers, code", CUTS, ids=[case[0] for case in CUTS])
def test_cut_off_it_leaves_nothing_behind(repo, reason, trap, numbers, code):
    mark, scratch = repo.top.parent / "begun", repo.top.parent / "scratch"
    scratch.mkdir()
    repo.git("config", "filter.slow.clean", f"{trap or ':'}; touch {mark}; sleep 600; cat")
    repo.write(".git/info/attributes", "*.py filter=slow\n")
    repo.write("train.py", "two\n")
    before = repo.bytes_of_all()
    adding = subprocess.Popen([sys.executable, live.COMMAND, "add", "--snapshot", "true"], cwd=repo.top, stderr=subprocess.PIPE, text=True,
                              env={**repo.environ, "TMPDIR": str(scratch), "NEXUS_HOME": str(repo.top.parent / "nexus")})
    until(mark.exists)
    until(lambda: any("sleep" in live.read(f"/proc/{pid}/comm") for pid in live.descendants(adding.pid)))
    started = live.descendants(adding.pid)
    assert len(started) > 1 and os.listdir(scratch)
    for number in numbers:
        adding.send_signal(number)
    err = adding.communicate(timeout=60)[1]
    assert (adding.returncode, err) == (code, "")
    assert [pid for pid in started if live.is_alive(pid)] == [] and os.listdir(scratch) == []
    assert repo.bytes_of_all() == before and repo.git("for-each-ref", "refs/nexus") == b""


def test_which_code_ran(repo):
    """The commit of its directory at its begin; with a snapshot, what that lacks is said."""
    repo.write("ignored/data.csv", "1\n")
    with live.Box(gpus=1) as box:
        added = box.nexus("add", "--gpus", "0", "--cwd", str(repo.top / "sub"), "cat part.py")
        job_id = added.stdout.strip()
        commit = repo.git("rev-parse", "HEAD").decode().strip()
        box.wait(job_id, "completed")
        assert box.job(job_id)["commit"] == commit and f"commit of its directory: {commit}" in box.nexus("show", job_id).stdout
        lacking = box.nexus("add", "--gpus", "0", "--snapshot", "--cwd", str(repo.top), "cat ignored/data.csv run.sh")
        assert lacking.returncode == 0 and "the snapshot lacks ignored/data.csv:" in lacking.stderr, lacking
        assert str(repo.top / "ignored/data.csv") in lacking.stderr and "run.sh" not in lacking.stderr
        assert box.nexus("add", "--gpus", "0", "--snapshot", "--cwd", str(repo.top), "cat run.sh").stderr == ""


# job.sh


@contextlib.contextmanager
def mounted(path, options):
    os.makedirs(path, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def of(made, **fields):
    """The fields of a job that runs in a snapshot."""
    return {"snapshot": made.commit, "snapshot_repo": made.repository, "cwd": made.repository, **fields}


LOOK = "pwd; cat train.py; ./run.sh; readlink link; git rev-parse HEAD"


def test_a_job_runs_in_a_checkout_of_its_own(box, repo):
    repo.write("train.py", "two\n")
    repo.write(ODD, "x")
    hook_everything(repo)
    made = repo.snapshot()
    repo.write("train.py", "edited since\n")
    before = repo.bytes_of_all()
    assert box.run(f"{LOOK}; echo more > train.py; mkdir -m 555 locked; git log --format=%an -2", **of(made)).exit_code == 0
    assert box.text("stdout.log") == (f"{box.layout.job_folder('abc')}/files\ntwo\nran\ntrain.py\n{made.commit}\nnexus\nAnn\n"), box.text(
        "stderr.log")
    assert repo.bytes_of_all() == before and not (repo.top.parent / "hooked").exists()
    assert repo.git("worktree", "list").count(b"\n") == 1


@pytest.mark.parametrize("name", ["sub", "ignored/deep", ODD], ids=["a tracked one", "an ignored one", "an odd one"])
def test_in_its_folder_there(box, repo, name):
    (repo.top / name).mkdir(parents=True, exist_ok=True)
    made = repo.snapshot(name)
    shutil.rmtree(repo.top / name)
    result = box.run("pwd; cat $(git rev-parse --show-toplevel)/train.py", **of(made, cwd=str(repo.top / name)))
    assert result.exit_code == 0, box.text("stderr.log")
    assert box.text("stdout.log") == f"{box.layout.job_folder('abc')}/files/{name}\none\n"


def make_link(repo, target):
    (repo.top.parent / "data").write_text("data\n")
    (repo.top / "data").symlink_to(target.format(repo.top.parent))


def write_windows_lines(repo):
    repo.git("config", "core.autocrlf", "true")
    repo.write("new", "a\nb\n")


def ask_filter(repo):
    repo.git("config", "filter.tell.smudge", "echo \"path ${PATH:+is} home ${HOME:+is} mine ${MINE-is not} set\"")
    repo.write(".git/info/attributes", "new filter=tell\n")
    repo.write("new", "x")


CHECKED_OUT = [  # what the guide says, what the user did, command, output
    ("a relative link out of the tree leads nowhere", lambda repo: make_link(repo, "../data"), "cat data || readlink data", "../data\n"),
    ("an absolute one", lambda repo: make_link(repo, "{}/data"), "cat data", "data\n"),
    ("line ends as in a fresh clone", write_windows_lines, "od -An -c new", "   a  \\r  \\n   b  \\r  \\n\n"),
    ("filters see PATH and HOME alone", ask_filter, "echo $MINE; cat new", "yes\npath is home is mine is not set\n"),
]


@pytest.mark.parametrize("reason, change, command, out", CHECKED_OUT, ids=[case[0] for case in CHECKED_OUT])
def test_what_is_checked_out(box, repo, reason, change, command, out):
    change(repo)
    made = repo.snapshot()
    assert box.run(command, environment={"PATH": os.environ["PATH"], "MINE": "yes"}, **of(made)).exit_code == 0
    assert box.text("stdout.log") == out


STEP = "pwd; mkdir -p out; echo step >> out/checkpoint; wc -l < out/checkpoint; cat train.py"


def attempts_of(box):
    """What STEP has printed, an attempt a line: [lines of the checkpoint, train.py, ...]."""
    place = f"{box.layout.job_folder('abc')}/files\n"
    first, *others = box.text("stdout.log").split(place)
    assert not first, "each attempt is in the same place"
    return [one.split() for one in others]


def test_a_further_attempt_goes_on_in_the_tree_of_the_one_before(box, repo):
    """With what it made and changed; what it has removed comes back, and what it has put elsewhere stays."""
    repo.write("data", "x")
    made = repo.snapshot()
    for attempt, more in ((1, "echo two > train.py; rm run.sh; rm data; mkdir data; touch data/made"), (2, "ls run.sh sub data; exit 1"),
                          (4, "ls run.sh sub data")):
        box.run(f"{STEP}; {more}; exit 1", **of(made, attempt=attempt))
    assert attempts_of(box) == [["1", "one"], *([str(number), "two", "run.sh", "data:", "made", "sub:", "part.py"] for number in (2, 3))]
    assert kept_of(box) == {"out/checkpoint": "step\n" * 3, "train.py": "two\n", "data/made": ""}


def test_the_end_is_said_when_that_is_put_away(box, repo):
    """The next attempt may begin at once, in the same checkout."""
    os.mkdir(f"{box.home}/bin")
    gate = pathlib.Path(f"{box.home}/gate")
    gate.touch()
    git = pathlib.Path(f"{box.home}/bin/git")
    git.write_text(f"#!/bin/sh\ncase $* in *diff-files*) touch {gate}.met; while [ -e {gate} ]; do sleep 0.01; done;; esac\n"
                   f"exec {shutil.which('git')} \"$@\"\n")
    git.chmod(0o755)
    job = box.prepare(f"{STEP}; exit 1", environment={"PATH": f"{box.home}/bin:{os.environ['PATH']}"}, **of(repo.snapshot()))
    box.start(job)
    box.hear("start")
    until(lambda: os.path.exists(f"{gate}.met"))
    assert box.result(job) is None
    gate.unlink()
    box.hear("end")
    assert kept_of(box) == {"out/checkpoint": "step\n"} and not os.path.exists(box.path("files/.git"))
    until(lambda: box.result(job))


def test_after_an_attempt_whose_job_sh_was_killed(box, repo):
    """Before it could put away anything; git was in the middle of something."""
    made = repo.snapshot()
    process = box.start(box.prepare(f"{STEP}; touch .git/index.lock; rm train.py; sleep 60", **of(made)))
    until(lambda: os.path.exists(box.path("files/out/checkpoint")) and not os.path.exists(box.path("files/train.py")))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    assert box.run(STEP, **of(made, attempt=2)).exit_code == 0
    assert attempts_of(box) == [["1", "one"], ["2", "one"]] and kept_of(box) == {"out/checkpoint": "step\n" * 2}


def test_a_checkout_that_fails_costs_nothing_of_what_was_made(box, repo):
    made = repo.snapshot()
    box.run(f"{STEP}; exit 1", **of(made))
    os.rename(repo.top, f"{repo.top}-away")
    assert box.run(STEP, **of(made, attempt=2)).cause == "launch"
    os.rename(f"{repo.top}-away", repo.top)
    assert box.run(STEP, **of(made, attempt=3)).exit_code == 0
    assert attempts_of(box) == [["1", "one"], ["2", "one"]] and kept_of(box) == {"out/checkpoint": "step\n" * 2}


def remove_repository(repo, made):
    shutil.rmtree(repo.top)


def break_filter(repo, made):
    repo.write(".git/info/attributes", "*.py filter=odd\n")
    repo.git("config", "filter.odd.smudge", "echo 'no \"such\" \\ file' >&2; false")
    repo.git("config", "filter.odd.required", "true")


NOT_MADE = [  # reason, what happens between submit and start, words of the cause
    ("the repository is gone", remove_repository, "No such file or directory"),
    ("a filter fails", break_filter, "smudge filter odd failed"),
]


@pytest.mark.parametrize("reason, change, words", NOT_MADE, ids=[case[0] for case in NOT_MADE])
def test_a_checkout_that_fails(box, repo, reason, change, words):
    repo.write("train.py", "two\n")
    made = repo.snapshot()
    change(repo, made)
    result = box.run("echo ran", **of(made))
    assert (result.exit_code, result.cause) == (None, "launch") and not os.path.exists(box.path("stdout.log"))
    assert result.cause_line.startswith(f"the snapshot of {repo.top} cannot be checked out: ") and words in result.cause_line
    assert words in box.text("stderr.log")


def test_stopped_while_it_is_checked_out(box, repo):
    repo.write(".git/info/attributes", "*.py filter=slow\n")
    repo.git("config", "filter.slow.smudge", f"touch {box.home}/begun; exec sleep 60")
    job = box.prepare("echo ran", **of(repo.snapshot()))
    process = box.start(job)
    until(lambda: os.path.exists(f"{box.home}/begun"))
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0 and box.result(job).cause == "launch" and kept_of(box) is None


@needs_root
def test_a_disk_that_the_job_fills_costs_it_nothing_of_what_it_made(box, repo):
    """Until there is room for its result, its checkout stays; then what it made is kept."""
    made = repo.snapshot()
    with mounted(box.layout.log_dir, "size=512k"):
        job = box.prepare("echo 1 > checkpoint; cat /dev/zero > $DIR/big; exit 5", environment={
            "PATH": os.environ["PATH"], "DIR": box.layout.log_dir}, **of(made))
        process = box.start(job)
        for _ in range(2):
            box.hear("end")                         # at once, and after an attempt to write it
        assert box.result(job) is None and os.path.exists(box.path("files/train.py"))
        os.unlink(f"{box.layout.log_dir}/big")
        assert process.wait(60) == 0 and box.result(job).exit_code == 5 and kept_of(box) == {"checkpoint": "1\n"}


# What the job made

MADE = [  # reason, command, what is kept beside its logs: {path: content}
    ("nothing", "cat train.py", None),
    ("what is new or changed, and of folders and links what is in them", "echo 1 > loss.txt; mkdir -p out/a out/empty; echo 1 > out/a/b; "
     f"echo more >> train.py; echo 1 > model.ign; mkdir ignored; echo 2 > ignored/x; echo 1 > {nexus.quote(ODD + '2')}; ln -s /etc to",
     {"loss.txt": "1\n", "out/a/b": "1\n", "train.py": "one\nmore\n", "model.ign": "1\n", "ignored/x": "2\n", ODD + "2": "1\n",
      "to": "-> /etc"}),
    ("only empty folders, what was only touched, compiled Python", "mkdir -p out/a; mkdir -m 555 locked; "
     "touch -d tomorrow train.py run.sh; mkdir -p sub/__pycache__ p/__pycache__; "
     "echo x > sub/__pycache__/part.pyc; echo x > p/__pycache__/y", None),
    ("tracked files that it removed", "rm train.py; rm -r sub", None),
    ("what it added to the index", "echo 1 > a; echo 2 > train.py; git add -A", {"a": "1\n", "train.py": "2\n"}),
    ("what it committed", "echo 1 > a; echo 2 > train.py; git add -A; git -c user.name=a -c user.email=a@b commit -qm x", {"a": "1\n",
     "train.py": "2\n"}),
    ("a git that was killed", "echo 1 > a; echo 2 > train.py; touch .git/index.lock", {"a": "1\n", "train.py": "2\n"}),
    ("failed", "echo 1 > a; exit 3", {"a": "1\n"}),
]


def kept_of(box):
    """{path: content} of what is kept, None when that is nothing."""
    top = pathlib.Path(box.path("files"))
    if not top.exists():
        return None
    return {str(path.relative_to(top)): f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text()
            for path in top.rglob("*") if path.is_symlink() or path.is_file()}


@pytest.mark.parametrize("reason, command, kept", MADE, ids=[case[0] for case in MADE])
def test_what_a_job_made_is_kept_and_nothing_else(box, repo, reason, command, kept):
    repo.write("notes", "mine\n")
    repo.write(ODD, "x")
    made = repo.snapshot()
    before = repo.bytes_of_all()
    box.run(command, **of(made))
    assert kept_of(box) == kept
    top = box.path("files")
    assert not os.path.exists(f"{top}/.git") and not any(not names for _, names, files in os.walk(top) for names in [names + files])
    assert repo.bytes_of_all() == before


def test_what_a_job_changed_is_kept_where_git_marks_each_file_as_unchanged(box, repo):
    repo.git("config", "core.ignoreStat", "true")
    box.run("echo two > train.py", **of(repo.snapshot()))
    assert kept_of(box) == {"train.py": "two\n"}


# What a job puts in the way of the clean-up.  OTHER is a folder of the user's: a repository like the job's, and files named as its own.

LED = [  # reason, command, what is kept: {path: content} or None
    ("folders are links to the originals, to one of which only a mark is tracked, and to one in a folder",
     "rm -rf sub data deep/data; ln -s OTHER/sub sub; ln -s OTHER/data data; ln -s OTHER/data deep/data",
     {"sub": "-> OTHER/sub", "data": "-> OTHER/data", "deep/data": "-> OTHER/data"}),
    ("a link to a link", "rm -rf data; ln -s OTHER/way data", {"data": "-> OTHER/way"}),
    ("a link to another folder of the checkout", "rm -rf data; ln -s sub data", {"data": "-> sub"}),
    ("compiled Python", "ln -s OTHER/__pycache__ sub/__pycache__; ln -s OTHER p", {
        "sub/__pycache__": "-> OTHER/__pycache__", "p": "-> OTHER"}),
    ("a file is a FIFO", "rm train.py; mkfifo train.py; rm -r sub; mkfifo sub", {}),
    ("a file in place of a folder", "rm -r sub data; echo 1 > sub; touch data", {"sub": "1\n", "data": ""}),
    ("a repository in place of a submodule's", "rmdir module; git init -q module; touch module/x; "
     "git -C module config core.fsmonitor 'touch OTHER/led; true'", ...),
    ("the git folder is another repository's", "rm -rf .git; ln -s OTHER/.git .git; echo 1 > a", ...),
    ("the git folder is one of another repository", "rm -rf .git; echo gitdir: OTHER/.git > .git; echo 1 > a", ...),
    ("its index", "ln -sf OTHER/.git/index .git/index; echo 1 > a", ...),
    ("its index is a FIFO", "rm .git/index; mkfifo .git/index; echo 1 > a", ...),
    ("its lock", "ln -s OTHER/.git/HEAD .git/index.lock; echo 1 > a", {"a": "1\n"}),
    ("its common folder", "echo OTHER/.git > .git/commondir; echo 1 > a; echo 2 > train.py", {"a": "1\n", "train.py": "2\n"}),
    ("its head", "ln -sf OTHER/.git/HEAD .git/HEAD; echo 1 > a", {"a": "1\n"}),
    ("folders of it", "ln -s OTHER/.git/objects .git/objects; ln -s OTHER/data .git/lfs; ln -s OTHER/.git/refs .git/refs; echo 1 > a",
     {"a": "1\n"}),
    ("what the clean-up makes", "ln -s OTHER/.git .git.nexus; echo 1 > a", {"a": "1\n"}),
    ("the checkout is another repository", "cd ..; rm -rf files; ln -s OTHER files", ...),
    ("the checkout is its own, at another place", "cd ..; mv files OTHER/moved; ln -s OTHER/moved files", ...),
    ("the checkout is a file", "cd ..; rm -rf files; echo 1 > files", ...),
    ("the checkout is gone", "rm -rf $PWD", None),
    ("the log folder is a link", "cd ../..; mv job_abc HOME/kept; ln -s OTHER job_abc", ...),
]


def list_all(top):
    """All below a folder, with what is in it; the marks that git gives an index when it reads it do not count."""
    return {path: (path.lstat().st_mode, os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None)
            for path in sorted(pathlib.Path(top).rglob("*"))}


@pytest.fixture(scope="module")
def rich_once(tmp_path_factory):
    return tmp_path_factory.mktemp("rich")


@pytest.fixture
def rich(repo, rich_once):
    """The repository has a submodule and folders with data; OTHER, beside it, is returned.  Both are made once."""
    if (rich_once / "repo").exists():
        shutil.rmtree(repo.top)
        for name in ("repo", "other"):
            shutil.copytree(rich_once / name, repo.top.parent / name, symlinks=True)
        other = object.__new__(Repo)
        other.top, other.environ = repo.top.parent / "other", repo.environ
        repo.git("update-index", "-q", "--refresh")
        return other
    repo.write("data/.gitkeep", "")
    repo.write("deep/data/x", "x")
    repo.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(Repo(repo.top.parent / "inner", repo.environ).top), "module")
    repo.commit()
    other = Repo(repo.top.parent / "other", repo.environ)
    for name in ("data/.gitkeep", "data/train.csv", "__pycache__/x.pyc", "files/train.py", "files/.git/index.lock", "deep/data/x"):
        other.write(name, "mine\n")
    other.write("sub/part.py", "part\n")
    (other.top / "empty").mkdir()
    (other.top / "way").symlink_to("data")
    for each in (repo, other):
        shutil.copytree(each.top, rich_once / each.top.name, symlinks=True)
    return other


@pytest.mark.parametrize("reason, command, kept", LED, ids=[case[0] for case in LED])
def test_nothing_leads_the_clean_up_elsewhere(box, repo, rich, reason, command, kept):
    """And the next attempt finds what is there, in a checkout."""
    other = rich
    made, before = repo.snapshot(), repo.bytes_of_all()
    mine = list_all(other.top)
    command = command.replace("OTHER", str(other.top)).replace("HOME", box.home)
    process = box.start(box.prepare(f"{command}; exit 3", **of(made)))
    assert process.wait(60) == 0 and box.hear("end")[-1].words[0] == "3"
    seen = list_all(other.top)
    moved = {path: fact for path, fact in seen.items() if "moved" in path.parts}
    assert {path: fact for path, fact in seen.items() if path not in moved} == mine and bool(moved) == ("moved" in command)
    if kept is not ...:
        assert kept_of(box) == (kept and {path: text.replace("OTHER", str(other.top)) for path, text in kept.items()})
    if os.path.islink(box.layout.job_folder("abc")):
        return                                  # the service puts it aside
    result = box.run("cat train.py link; git rev-parse HEAD; ls run.sh > /dev/null", **of(made, attempt=2), environment={
        "PATH": os.environ["PATH"]}) if "FIFO" not in reason else box.run("git rev-parse HEAD", **of(made, attempt=2))
    assert result.exit_code == 0, box.text("stderr.log")
    assert box.text("stdout.log").splitlines()[-1] == made.commit
    seen = list_all(other.top)
    assert {path: fact for path, fact in seen.items() if path not in moved} == mine and moved.items() <= seen.items()
    assert repo.bytes_of_all() == before


def test_its_directory_is_made_through_no_link(box, repo):
    """An ignored folder in one that the first attempt has exchanged."""
    deep, other = repo.top / "ignored/deep/er", repo.top.parent / "other"
    deep.mkdir(parents=True)
    other.mkdir()
    job = of(repo.snapshot(), cwd=str(deep))
    assert box.run(f"cd ../..; rm -r deep; ln -s {other} deep; exit 3", **job).exit_code == 3
    result = box.run("echo ran", **{**job, "attempt": 2})
    assert result.cause == "launch" and "has put a link above" in result.cause_line and not os.listdir(other)
    (other / "er").mkdir()
    assert box.run("pwd -P; exit 4", **{**job, "attempt": 3}).exit_code == 4 and box.text("stdout.log") == f"{other}/er\n"


# git-lfs

@pytest.fixture
def lfs(repo, monkeypatch):
    """The repository with a.bin in the care of git-lfs."""
    if not shutil.which("git-lfs"):
        pytest.skip("git-lfs is not installed")
    monkeypatch.setenv("HOME", repo.environ["HOME"])        # for git in job.sh
    repo.git("lfs", "install", "--skip-repo")
    repo.git("lfs", "track", "*.bin")
    repo.write("a.bin", "first\n")
    repo.commit()
    assert b"oid sha256:" in repo.git("cat-file", "blob", "HEAD:a.bin")
    return repo


def link_work_tree(repo):
    other = repo.top.parent / "other"
    repo.git("worktree", "add", "-q", str(other), "-b", "other")
    return other


def move_lfs_storage(repo):
    repo.git("config", "lfs.storage", str(repo.top.parent / "storage"))
    repo.write("a.bin", "again\n")
    repo.commit()
    repo.write("a.bin", "first\n")
    return repo.top


LFS_TREES = [  # reason, the work tree that it makes
    ("a work tree", lambda repo: repo.top),
    ("a linked one", link_work_tree),
    ("the objects are elsewhere", move_lfs_storage),
]


@pytest.mark.parametrize("reason, make", LFS_TREES, ids=[case[0] for case in LFS_TREES])
def test_what_git_lfs_keeps_comes_whole(box, lfs, reason, make):
    """The committed, the changed and the new; what the job writes is no object of the repository, also where git-lfs is asked about it."""
    top = make(lfs)
    (top / "b.bin").write_text("second\n")
    made = nexus.take_snapshot(str(top), lfs.environ)
    before = lfs.bytes_of_all()
    result = box.run("cat a.bin b.bin; echo FIRST > a.bin; echo third > c.bin; exit 3", **of(made))
    assert (result.exit_code, box.text("stdout.log")) == (3, "first\nsecond\n"), box.text("stderr.log")
    assert kept_of(box) == {"a.bin": "FIRST\n", "c.bin": "third\n"} and not os.path.exists(box.path("files/.git"))
    assert lfs.bytes_of_all() == before


def test_a_job_that_removes_its_git_folder_touches_no_repository_around_it(box, repo):
    """The log folder may lie in the very repository: a home with its dotfiles."""
    made = repo.snapshot()
    pathlib.Path(box.home, ".git").write_text(f"gitdir: {repo.top}/.git\n")
    before = repo.bytes_of_all()
    box.run("rm -rf .git; echo 1 > a; echo 2 > train.py", **of(made))
    kept = kept_of(box)
    assert kept["a"] == "1\n" and kept["train.py"] == "2\n" and kept["sub/part.py"] == "part\n", "git cannot tell what is new: all is kept"
    assert repo.bytes_of_all() == before

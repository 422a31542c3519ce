"""Snapshots of work trees: how one is taken, released and pushed to a node.

A work tree is kept through an index of its own: only git's objects and one ref, refs/nexus/COMMIT, are written into
the user's repository.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from ..values.errors import NexusError
from ..values.job import FACT_KINDS, Job
from ..values.schema import PATH, fits_alone
from ..values.submission import JOB_FIELDS
from ..values.text import cut_words, format_count, format_line, format_memory
from ..values.value import Value
from .disk import Disk, disk_errors, find_status, read_whole
from .programs import run
from .search_path import ask_folder
from .ssh import MAX_SAID_BYTES, Ssh, describe_bad_node

GIT_TIMEOUT_S = 600.0
MAX_UNTRACKED_MIB = 500
GIT_OPTIONS = [word for setting in (            # no hook, no daemon; the whole tree, as it is on the disk
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.sparseCheckout=false", "core.ignoreStat=false",
    "core.splitIndex=false", "core.safecrlf=false", "core.logAllRefUpdates=false") for word in ("-c", setting)]


class TreeSnapshot(Value):
    """A git work tree, kept as a commit."""
    commit: str
    repository: str                     # the work tree's top, without symbolic links


def run_git(folder: str, environ: Mapping[str, str], *arguments: str, stdin: str = "", most_bytes: int = 0,
            **variables: str) -> str:
    """The output of git in a folder.  Raises: unavailable, with git's errors, without its warnings and advice."""
    own = {name: text for name, text in environ.items() if not name.startswith("GIT_")}     # a hook's: another index
    own.update({"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", **variables})
    done = run(["git", *GIT_OPTIONS, "-C", folder, *arguments], GIT_TIMEOUT_S, own, stdin=stdin, is_apart=True,
               undecodable="surrogateescape", most_bytes=most_bytes, purpose=f"git in {folder}",
               hint="are there large files? add them to .gitignore",
               install="install git, or add the job without --snapshot")
    if done.exit_code:
        errors = [line for line in done.errors.splitlines() if line.startswith(("fatal: ", "error: "))]
        words = format_line(" ".join(errors or done.errors.split()) or "nothing", 300)
        raise NexusError("unavailable", f"the snapshot of {folder} failed: git {arguments[0]} says: {words}",
                         hint=f"try it by hand: git -C {folder} status; or add the job without --snapshot")
    return done.output


def find_commit(disk: Disk, job: Job) -> str | None:
    """The commit that a job's directory is at; None: unknown.  A folder that hangs is waited for a few seconds."""
    if job.snapshot or job.code:
        return None
    with contextlib.suppress(OSError, ValueError):
        return ask_folder(job.cwd, lambda: read_commit(disk, job.cwd))
    return None


def read_commit(disk: Disk, folder: str) -> str | None:
    """The commit of the work tree that a folder is in, from git's files; None: it is in none.

    It asks no program.  No link is followed, and no other file system entered but where a `.git` file points.
    """
    path, status = folder, disk.stat(folder)
    while not find_status(disk, f"{path}/.git", is_followed=False):
        path, below = f"{path}/..", status                  # the kernel knows what is above, whatever links lead here
        status = disk.stat(path)
        if status.st_dev != below.st_dev or status.st_ino == below.st_ino:
            return None
    git_dir = find_git_dir(disk, f"{path}/.git")
    return read_head(disk, git_dir) if git_dir else None


def find_git_dir(disk: Disk, path: str) -> str | None:
    """Where git keeps what belongs to a work tree: a folder; of a linked work tree or submodule what a file names."""
    status = find_status(disk, path, is_followed=False)
    if status and stat.S_ISDIR(status.st_mode):
        return path
    word, _, place = read_git_file(disk, path).partition("gitdir: ")
    return os.path.join(os.path.dirname(path), place) if place and not word else None


def read_head(disk: Disk, git_dir: str) -> str | None:
    common = os.path.join(git_dir, read_git_file(disk, os.path.join(git_dir, "commondir")))
    text = read_git_file(disk, os.path.join(git_dir, "HEAD"))
    for _ in range(MAX_SYMBOLIC_REFS):
        word, _, name = text.partition("ref: ")
        if word or not name:
            return text if re.fullmatch(COMMIT, text) else None
        if not name.startswith("refs/") or ".." in name:
            return None
        text = (read_git_file(disk, os.path.join(git_dir, name)) or read_git_file(disk, os.path.join(common, name))
                or find_packed_ref(read_git_file(disk, os.path.join(common, "packed-refs"), MAX_REFS_BYTES), name))
    return None


def find_packed_ref(text: str, name: str) -> str:
    found = re.search(f"(?m)^({COMMIT}) {re.escape(name)}$", text)
    return found[1] if found else ""


COMMIT = "[0-9a-f]{40,64}"
MAX_SYMBOLIC_REFS = 5


def read_git_file(disk: Disk, path: str, most_bytes: int = 4096) -> str:
    """The text of a regular file, without its last newline; "" where there is none, or a link or a longer one."""
    with contextlib.suppress(OSError, ValueError):
        return read_whole(disk, path, most_bytes, os.O_NOFOLLOW).decode("utf-8", "surrogateescape").rstrip("\r\n")
    return ""


def list_absent(disk: Disk, tree: TreeSnapshot, cwd: str, environ: Mapping[str, str],
                commands: Sequence[str]) -> list[str]:
    """What these commands name of a work tree and a snapshot of it lacks: files that git ignores, other repositories.

    Raises: unavailable.
    """
    names: dict[str, str] = {}                  # {path below the top: as it is written}
    for word in dict.fromkeys(word for command in commands for word in list_path_words(command)):
        path = find_first_link(disk, tree.repository, os.path.relpath(os.path.join(cwd, word), tree.repository))
        if path and find_status(disk, os.path.join(tree.repository, path), is_followed=False):
            names.setdefault(path, word)
    if not names:
        return []

    def git(*arguments: str, paths: Iterable[str]) -> list[str]:
        words = ["--literal-pathspecs", *arguments, "--", *paths]
        return run_git(tree.repository, environ, *words).split("\0")[:-1] if words[-1] != "--" else []

    asked = "".join(f"{tree.commit}:{path}\n" for path in names)
    replies = run_git(tree.repository, environ, "cat-file", "--batch-check=%(objecttype)", stdin=asked).splitlines()
    kinds = dict(zip(names, replies))           # what is not there, and another repository, has none of these two
    folders = [path for path in names if kinds[path] == "tree"]
    inside = git("ls-tree", "-z", "--name-only", tree.commit, paths=[f"{path}/" for path in folders])
    full = [path for path in inside if not os.path.basename(path).startswith(".")]
    hollow = [path for path in folders if not any(other.startswith(f"{path}/") for other in full)]  # but for .gitkeep
    ignored = git("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory", paths=hollow)
    lost = {path for path in hollow if any(other.startswith(f"{path}/") for other in ignored)}
    return [word for path, word in names.items() if kinds[path] not in ("blob", "tree") or path in lost]


MAX_PATH_WORDS = 1000


def list_path_words(command: str) -> list[str]:
    """The words of a command that may be paths below its directory: `data/`, and `--out=data`."""
    words = [re.sub("^-[^=]*=", "", word) for word in re.split(r"[\s;&|()<>\"'`]+", command[:100000])]
    return [word for word in words[:MAX_PATH_WORDS] if re.fullmatch("[^-~/$*?{][^$*?{]*", word) and word != "."]


def find_first_link(disk: Disk, top: str, path: str) -> str:
    """The first part of a path that is a link, which a snapshot has as it is; "" of one that leads out of the top."""
    parts = path.split("/")
    if ".." in parts or path == ".":
        return ""
    starts = ["/".join(parts[:number]) for number in range(1, len(parts) + 1)]
    statuses = ((start, find_status(disk, os.path.join(top, start), is_followed=False)) for start in starts)
    return next((start for start, status in statuses if status and stat.S_ISLNK(status.st_mode)), path)


def take_snapshot(cwd: str, environ: Mapping[str, str]) -> TreeSnapshot:
    """Keep the work tree that `cwd` is in: tracked files, and those that git does not ignore.

    The snapshot is a commit on top of HEAD, on no branch; HEAD itself when nothing differs.  Nothing else changes.
    Raises: usage, when there is no work tree or too much in it; unavailable.
    """
    import shutil
    import tempfile
    top = find_work_tree(cwd, environ)
    with tempfile.TemporaryDirectory(prefix="nexus-") as aside:
        index = os.path.join(aside, "index")

        def git(*arguments: str, stdin: str = "", **variables: str) -> str:
            return run_git(top, environ, *arguments, stdin=stdin, most_bytes=0, GIT_INDEX_FILE=index, **variables)

        own_index = os.path.join(top, run_git(top, environ, "rev-parse", "--git-path", "index")[:-1])
        with disk_errors("copy git's index to", aside), contextlib.suppress(FileNotFoundError):     # nothing added yet
            shutil.copy2(own_index, index)      # it holds git's record of unchanged files, and has a time
        # git does not look at files that are marked so.  What a sparse checkout leaves out keeps its mark.
        marks = [(line[0], line[2:]) for line in git("ls-files", "-z", "-v").split("\0")[:-1]]
        assumed = [path for mark, path in marks if mark.islower()]
        present = [path for mark, path in marks if mark in "Ss" and os.path.lexists(os.path.join(top, path))]
        for option, paths in (("--no-assume-unchanged", assumed), ("--no-skip-worktree", present)):
            if paths:
                git("update-index", "-z", option, "--stdin", stdin="".join(f"{path}\0" for path in paths))
        untracked = git("ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]
        # git adds a repository inside this one as a link, and refuses one that has no commit.
        nested = [path[:-1] for path in untracked if path.endswith("/")]
        check_sizes(top, [path for path in untracked if not path.endswith("/")])
        git("add", "-A", *(["--", ".", *(f":(exclude,literal){path}" for path in nested)] if nested else []))
        tree = git("write-tree", "--missing-ok").strip()        # a partial clone lacks objects
        head, head_tree, date = "", "", "0"
        with contextlib.suppress(NexusError, ValueError):       # no commit yet
            head, head_tree, date = git("log", "-1", "--no-show-signature", "--format=%H %T %ct", "HEAD").split()
        commit = head
        if tree != head_tree:                                   # the commit depends on nothing but these two
            who = {f"GIT_{role}_{fact}": text for role in ("AUTHOR", "COMMITTER")
                   for fact, text in (("NAME", "nexus"), ("EMAIL", "nexus@localhost"), ("DATE", f"@{date} +0000"))}
            commit = git("commit-tree", tree, *(["-p", head] if head else []), "-m",
                         "nexus: the work tree as it was at submit", **who).strip()
        if not (fits_alone(JOB_FIELDS["snapshot"].schema, commit) and fits_alone(PATH, top)):
            raise NexusError("unavailable", f"the snapshot of {cut_words(top, 200)} failed: git calls it "
                             f"{cut_words(commit, 60)}", hint="try it by hand: git --version")
        git("update-ref", f"refs/nexus/{commit}", commit)
    return TreeSnapshot(commit, top)


def find_work_tree(cwd: str, environ: Mapping[str, str]) -> str:
    """The top of a folder's work tree.  Raises: usage, unavailable."""
    try:
        return run_git(cwd, environ, "rev-parse", "--show-toplevel")[:-1]
    except NexusError as error:
        if not re.search("not a git repository|must be run in a work tree", error.message):
            raise
        raise NexusError("usage", f"{cwd} is not in a git work tree, and --snapshot needs one", hint=
                         "name your checkout with --cwd DIR, or cd there; or leave --snapshot out") from None


def check_sizes(top: str, untracked: Sequence[str]) -> None:
    """Raises: usage, when the files that git neither tracks nor ignores are too many or too large."""
    sizes = []
    for path in untracked:
        with contextlib.suppress(OSError):              # the file is gone
            sizes.append((os.lstat(os.path.join(top, path)).st_size / 2**20, path))
    total_mib = sum(size_mib for size_mib, _ in sizes)
    if total_mib > MAX_UNTRACKED_MIB:
        size_mib, path = max(sizes)
        raise NexusError("usage", f"{top} has {format_count(len(sizes), 'file')} that git neither tracks nor ignores, "
                         f"{format_memory(total_mib)} together; a snapshot takes {MAX_UNTRACKED_MIB}MB of them",
                         hint=f"the largest is {format_line(path)} ({format_memory(size_mib)}): add it to .gitignore")


def release_snapshot(repository: str, commit: str, environ: Mapping[str, str]) -> None:
    """Let `git gc` remove a snapshot that no job needs, if the repository still exists."""
    with contextlib.suppress(NexusError):
        run_git(repository, environ, "update-ref", "-d", f"refs/nexus/{commit}")


# git keeps in memory all refs that the other side tells of: so it hears no more than MAX_REFS_BYTES.  dd passes on at
# once what it reads.
SSH_FOR_GIT = '"$@" | dd bs=65536 iflag=count_bytes count="$0" 2> /dev/null'
MAX_REFS_BYTES = 2**24          # 100,000 snapshots have less
RECEIVE_PUSH = 'exec git-receive-pack "$0"'     # git adds the URL's path


def push_snapshot(ssh: Ssh, repository: str, commit: str, name: str, environ: Mapping[str, str]) -> str:
    """Push a snapshot into a node's repository `name`; return its path there.  Raises: as Ssh.run()."""
    script = (f'd=${{NEXUS_HOME:-$HOME/.nexus}}/agent/snapshots/{name}.git; umask 077; mkdir -p "$d" && cd "$d" && '
              "{ [ -e HEAD ] || git init -q --bare .; } && pwd -P")
    said = ssh.run("cannot keep the snapshot on", f"sh -c {quote(script)}")
    path = said.strip().rpartition("\n")[2]
    if not fits_alone(FACT_KINDS["FilePath"].schema, path):
        raise describe_bad_node(ssh.node.name, f"the snapshot's place is {path}")
    through = " ".join(map(quote, ["sh", "-c", SSH_FOR_GIT, str(MAX_REFS_BYTES), *ssh.list_words()[:-1]]))
    # The node's path is no part of the URL: git would take another host, port or user from one like /x@[host:22]/y.
    receive = f"sh -c {quote(RECEIVE_PUSH)} {quote(path)}"
    run_git(repository, environ, "push", "-q", f"--receive-pack={receive}", f"ssh://{ssh.node.destination}/{name}.git",
            f"{commit}:refs/nexus/{commit}", most_bytes=MAX_SAID_BYTES, GIT_SSH_COMMAND=through, GIT_SSH_VARIANT="ssh")
    push_large_files(ssh, repository, commit, path, environ)
    return path


# `git push` leaves out what git-lfs keeps.  A node's repository gets that beside it, and requires git-lfs from then on:
# else a checkout would have git-lfs's pointers in the place of the files.  One line each: csh takes no more in quotes.
PREPARE_LFS = (
    'cd "$0" || exit; git lfs version > /dev/null 2>&1 || { echo "git-lfs is not installed" >&2; exit 1; }; '
    "is_set() { git config filter.lfs.required > /dev/null; }; "
    "is_set || git lfs install --local --skip-repo > /dev/null || is_set || exit; "
    'mkdir -p lfs/objects && cd lfs/objects && number=0 && while read -r name; do [ -e "$name" ] || echo $number; '
    "number=$((number + 1)); done")                     # the numbers of the names that are not there
SEND_LFS = 'tar -C "$0" -chf - -T - | "$@"'
RECEIVE_LFS = (
    'cd "$0/lfs" && part=$(mktemp -d part.XXXXXX) && trap \'rm -rf "$part"\' EXIT && '
    'tar -C "$part" -xf - && cp -Rlf "$part/." objects/')


def push_large_files(ssh: Ssh, repository: str, commit: str, path: str, environ: Mapping[str, str]) -> None:
    """Send the files of a snapshot that git-lfs keeps to a node's repository.  Raises: as Ssh.run()."""
    def on_node(script: str) -> str:
        return f"sh -c {quote(script)} {quote(path)}"

    if "filter.lfs.clean" not in run_git(repository, environ, "config", "--list", "--name-only").split():
        return
    listing = run_git(repository, environ, "lfs", "ls-files", "--long", commit)
    listed = re.findall("^([0-9a-f]{64}) [*-] ", listing, re.M)
    if not listed:
        return
    [folder] = re.findall("^LocalMediaDir=(.*)", run_git(repository, environ, "lfs", "env"), re.M)
    names = sorted({f"./{digest[:2]}/{digest[2:4]}/{digest}" for digest in listed})
    absent = [name for name in names if not os.path.exists(os.path.join(folder, name))]
    if absent:
        raise NexusError("not_found", f"git-lfs has not fetched {format_count(len(absent), 'file')} of the snapshot",
                         hint=f"git -C {repository} lfs fetch")
    said = ssh.run("cannot keep the snapshot on", on_node(PREPARE_LFS), "".join(f"{name}\n" for name in names))
    numbers = set(said.split())
    wanted = "".join(f"{name}\n" for number, name in enumerate(names) if str(number) in numbers)
    if wanted:
        done = run(["sh", "-c", SEND_LFS, folder, *ssh.list_words(on_node(RECEIVE_LFS))], GIT_TIMEOUT_S, ssh.environ,
                   stdin=wanted, is_apart=True, most_bytes=MAX_SAID_BYTES, purpose=f"git-lfs to {ssh.node.name}")
        if done.exit_code:
            raise ssh.make_error("cannot keep the snapshot's large files on", done.errors)

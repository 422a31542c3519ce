"""Snapshots of work trees: how one is taken, released and pushed to a node.

A work tree is kept through an index of its own: only git's objects and one ref, refs/nexus/COMMIT, are written into
the user's repository.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from shlex import quote

from ..values.errors import NexusError
from ..values.job import FACT_KINDS
from ..values.schema import PATH, fits_alone
from ..values.submission import JOB_FIELDS
from ..values.text import cut_words, format_count, format_line, format_memory
from ..values.value import Value
from .disk import disk_errors
from .programs import run
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

"""job.sh: what runs around each job.

job.sh is bash and a few coreutils: it costs little while the job lives, and can be read and run by hand.  It claims
its attempt, shares the lock of the GPU lease with the service, says `start`, runs the command with its output
straight into the log files, says `end`, and leaves a result file.  Its events are acted upon at once; its files say
the same to a service that missed them.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from shlex import quote

from .. import text_of
from ..formats.jobs_file import TEE_ENDING, TEE_PIPE
from ..machine.git import GIT_OPTIONS
from ..machine.layout import Layout
from ..values.job import Job
from ..values.text import MAX_ARGUMENT_BYTES, fill_marks

# job.sh, after build_script()'s assignments.  The functions come first, then what happens, in its order.
JOB_SCRIPT = text_of("job.sh")

# Of a job with --snapshot.  Its checkout is $tree, whose .git borrows all but HEAD and index from the repository: a
# folder `objects` there would hide the repository's git-lfs objects from git-lfs.
# `git worktree add` would write into that, and break other git programs that run at that moment.
# A job may exchange its checkout, a folder in it, .git or the log folder for a link to the user's own files: nothing is
# written or removed through one.  $top is $tree without links, as it was before the command.
SNAPSHOT_SCRIPT = text_of("snapshot.sh")


CONDA_SCRIPT = text_of("conda.sh")


# What the runner itself was given is not the job's, but for $kept: Slurm's GPUs, job and node.
HIDE_SCRIPT = text_of("hide.sh")
SLURM_NAMES = "SLURM[A-Z0-9_]*|[A-Z]+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"


# Everybody can read the arguments of a program: so job.sh gives a job its variables as assignments before its command.
# What bash cannot pass on so comes as NEXUS_JOB_VARIABLE_1, whose text is `NAME=TEXT`: names that are none for bash,
# like those of exported functions, and those that only bash itself sets.
BASH_NAMES = (r"BASH(_VERSINFO|_ARG[CV]|_SOURCE|_LINENO|OPTS|PID)|SHELLOPTS|E?UID|PPID|GROUPS|FUNCNAME"
              r"|(?![A-Za-z_][A-Za-z0-9_]*$)(.|\n)*")
MAX_CACHED = 1000               # characters of a text that quote_variable() keeps
UNPACK_PROGRAM = (              # one line: sh has no $'\n'.  Python may have changed os.environ
    'import os, sys; mark = b"NEXUS_JOB_VARIABLE_"; '
    'found = open("/proc/self/environ", "rb").read().split(bytes(1))[:-1]; '
    'texts = [text.partition(b"=")[2] if text.startswith(mark) else text for text in found]; '
    'os.execvpe(sys.argv[1], sys.argv[1:], dict(text.split(b"=", 1) for text in texts))')
# Of a job with such variables, in command_of_the_job().  Python may be elsewhere on a node of Slurm's.
UNPACK_SCRIPT = text_of("unpack.sh")


# bash makes way for a command that is one program with plain words: so job.sh runs that at once, without its start.
# Not what bash does itself, nor where the job's environment has it do more: BASH_ENV, exported functions.
BASH_WORDS = (
    r"[.:]|alias|bg|bind|break|builtin|caller|case|cd|command|compgen|complete|compopt|continue|coproc|declare|dirs"
    r"|disown|do|done|echo|elif|else|enable|esac|eval|exec|exit|export|false|fc|fg|fi|for|function|getopts|hash|help"
    r"|history|if|in|jobs|kill|let|local|logout|mapfile|popd|printf|pushd|pwd|read|readarray|readonly|return|select"
    r"|set|shift|shopt|source|suspend|test|then|time|times|trap|true|type|typeset|ulimit|umask|unalias|unset|until"
    r"|wait|while")
PLAIN_COMMAND = " *([A-Za-z0-9_./][A-Za-z0-9_./+-]*)( +[A-Za-z0-9_./:,+@%=-]+)* *"


@functools.lru_cache(1024)
def quote_variable(name: str, text: str) -> str | None:
    """A variable as an assignment before a command; None: bash cannot pass it on so.  Jobs share most of theirs."""
    return None if re.fullmatch(BASH_NAMES, name) else f"{name}={quote(text)}"


def build_assignments(environment: Mapping[str, str], is_slurm: bool) -> tuple[dict[str, str], list[str]]:
    """({name: assignment} that give a command its variables; the names that come as NEXUS_JOB_VARIABLE_n)"""
    # Without the nonce, a job.sh that is run by hand is not this job, which the service would end.
    nonce = environment.get("NEXUS_JOB_NONCE", "")
    pairs = {"NEXUS_JOB_NONCE": f'NEXUS_JOB_NONCE="${{attempt:+{nonce}}}"'} if nonce else {}
    if is_slurm:
        pairs["CUDA_VISIBLE_DEVICES"] = 'CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-}"'
        pairs["NEXUS_GPU_ID"] = 'NEXUS_GPU_ID="${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES-}}"'
    carried = list[str]()
    for name, text in environment.items():
        if name in ("NEXUS_JOB_NONCE", "_"):
            continue
        build = quote_variable if len(text) < MAX_CACHED else quote_variable.__wrapped__
        pair = build(name, text)
        if pair is None:
            carried.append(name)
            pairs[name] = f"NEXUS_JOB_VARIABLE_{len(carried)}={quote(f'{name}={text}')}"
        elif is_slurm and re.fullmatch(SLURM_NAMES, name):      # Slurm's own counts more
            pairs[name] = f"{name}=${{{name}-{quote(text)}}}"
        else:
            pairs[name] = pair
    return pairs, carried


def build_launch(job: Job, environment: Mapping[str, str], has_carried: bool) -> tuple[str, dict[str, str], list[str]]:
    """(a script; {name: further assignment}; the quoted words that run a job's command: bash, in a terminal, in conda).

    `has_carried`: "${unpack[@]}" unpacks some of its variables.
    """
    command, pairs = job.command, dict[str, str]()
    if re.search(TEE_PIPE, command) and len(command.encode("utf-8", "replace")) + len(TEE_ENDING) < MAX_ARGUMENT_BYTES:
        command += TEE_ENDING
    launch = list(map(quote, ["bash", "-c", *(["--"] if command.startswith(("-", "+")) else []), command]))
    match, is_bare = re.fullmatch(PLAIN_COMMAND, command), not (has_carried or job.tty or job.conda)
    if match and not re.fullmatch(BASH_WORDS, match[1]) and is_bare and "BASH_ENV" not in environment:
        # Like bash it keeps a PWD that goes through links; bash says why a program cannot be run.
        script = (f"\n  local place={quote(environment.get('PWD', ''))} program=({command})\n"
                  '  [ "$place" -ef . ] || place=$PWD\n'
                  f'  PATH=$job_path type -P "${{program[0]}}" > /dev/null || program=({" ".join(launch)})')
        return script, {"PWD": 'PWD="$place"'}, ['"${program[@]}"']
    words = ['"${unpack[@]}"', *launch] if has_carried else launch
    if job.tty:                                 # script(1) runs $SHELL, which may be fish, or /bin/false
        before, shell = "unset SHELL", environment.get("SHELL")
        if shell is not None:
            pairs["NEXUS_JOB_SHELL"] = f"NEXUS_JOB_SHELL={quote(shell)}"
            before = 'export SHELL="$NEXUS_JOB_SHELL"; unset NEXUS_JOB_SHELL'
        unpack = '"${unpack[*]@Q}"' if has_carried else ""
        inner = quote(f"{before}; exec ") + unpack + quote(f" {' '.join(launch)}")
        words = ["/usr/bin/env SHELL=/bin/sh script -q -e -f -c", inner, "/dev/null"]
    if job.conda:                               # -p: this bash ignores BASH_ENV, which is the command's
        pairs["NEXUS_JOB_FAULT"] = 'NEXUS_JOB_FAULT="${attempt:+$dir/fault-$attempt}"'
        words = [*map(quote, ["bash", "-p", "-c", CONDA_SCRIPT, "nexus", job.conda]), *words]
    return "", pairs, words


def build_script(job: Job, environment: Mapping[str, str], layout: Layout, leases: Sequence[tuple[str, str, str]] = (),
                 handles: Sequence[int] = (), recorder: int = 0) -> str:
    """The text of a job's job.sh.

    `leases`: Leases.paths(), of which it takes the locks.  `handles`: it gets these open files, which have the locks.
    `recorder`: the pid of a service beside it, which records its end: job.sh need not wait for the disk; 0: none.
    """
    is_slurm = job.current.slurm_key is not None
    variables, carried = build_assignments(environment, is_slurm)
    script, others, words = build_launch(job, environment, bool(carried))
    if carried:
        script += fill_marks(UNPACK_SCRIPT, PYTHON=quote(sys.executable), PROGRAM=quote(UNPACK_PROGRAM),
                             NAMES=" ".join(map(quote, carried)))
    folder, cwd = layout.folder_of(job), job.cwd
    settings = {"id": job.id, "key": job.attempt_key,
                "dir": folder, "recorder": str(0 if is_slurm else recorder), "events": layout.events_file,
                "kept": SLURM_NAMES if is_slurm else "", "job_path": environment.get("PATH") or os.defpath,
                "commit": job.snapshot or "", "conda": job.conda or ""}
    if job.snapshot_repo:
        tree = os.path.join(folder, "files")
        cwd = os.path.join(tree, os.path.relpath(job.cwd, job.snapshot_repo))
        settings.update(repo=job.snapshot_repo, tree=tree, home=os.environ.get("HOME") or "/",
                        git_options=" ".join(GIT_OPTIONS))
    settings["cwd"] = cwd
    if leases:
        settings["service_id"] = leases[0][2]
    umask = "$(umask)" if job.umask is None else f"{job.umask:04o}"
    user = re.sub("[^A-Za-z0-9_.-]", "?", job.user)
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# Job {job.id} of nexus, user {user}.  Run by hand (bash job.sh) it just runs the command; nexus calls it "
        "with the attempt's number.", "attempt=${1:-}",
        *(f"{name}={quote(text)}" for name, text in settings.items()), f"umask={umask}",
        f"leases=({' '.join(map(str, handles))})",
        f"lease_files=({' '.join(quote(path) for path, _, _ in leases)})",
        f"lease_handles=({' '.join(path for _, path, _ in leases)})", "",
        HIDE_SCRIPT,
        "# $1: `exec`, by hand.", "command_of_the_job() {", '  umask "$umask"', "  hide_environment" + script,
        *(f"  {pair} \\" for pair in others.values()),           # first: a job may have a `dir` of its own
        *(f"  {pair} \\" for name, pair in variables.items() if name not in others),
        f'    "$@" {" ".join(words)} >&6 2>&5 5>&- 6>&- 7>&-', "}",
        *([SNAPSHOT_SCRIPT] if job.snapshot else []), JOB_SCRIPT])

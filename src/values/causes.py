"""Why an attempt did not complete: all causes, and what follows from each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .config import LIMITS
from .value import Value

LAUNCH, EXIT, SIGNAL, CUDA_OOM = "launch", "exit", "signal", "cuda-oom"
SESSION_LOST, NODE_LOST, NODE_FAIL, REBOOT = "session-lost", "node-lost", "node-fail", "reboot"
KILLED, DEPENDENCY, PREEMPTED, REQUEUED = "killed", "dependency", "preempted", "requeued"
TIMEOUT, HOST_MEMORY = LIMITS["timeout_seconds"], LIMITS["max_memory_gb"]
BOUNCE = "bounce"               # what job.sh tells when somebody else has its GPU: no attempt keeps it, it is requeued
RUNNER_CAUSES = (LAUNCH, BOUNCE)                # what job.sh may tell


class Cause(Value):
    """A row of CAUSES.  Where a cause neither cancels nor requeues, its job has failed, or is retried if it may be."""
    meaning: str                                # for people
    remedy: str = ""                            # what may help them, with a command to type; {id} is the job's
    cancels: bool = False                       # its job is cancelled
    requeues: bool = False                      # its job waits again, and no retry is spent
    is_stop: bool = False                       # an attempt may be stopped for it: its stop_cause
    is_reported: bool = False                   # what looks after attempts on a node may tell it
    may_be_quick: bool = True                   # soon after the start it is one of the failures that hold a group
    blames_gpu: bool = False                    # and one of those that pause a GPU: see find_bad_gpu()
    shows_line: bool = False                    # a message about the next attempt has its cause_line, too


CAUSES: Mapping[str, Cause] = {                 # {the word: what it means, and what follows}
    LAUNCH: Cause("its command could not be started", shows_line=True),
    EXIT: Cause("its command ended with an exit code other than 0", blames_gpu=True),
    SIGNAL: Cause("its command was ended by a signal", is_reported=True, blames_gpu=True),
    CUDA_OOM: Cause(
        "it ran out of GPU memory, as its stderr says", blames_gpu=True,
        remedy="nexus retry {id} --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or with more memory free "
               "on its GPU: --gpu-mem 20G"),
    **{word: Cause(f"it reached its limit, {key}", is_stop=True, may_be_quick=word != TIMEOUT)
       for key, word in LIMITS.items()},
    KILLED: Cause("somebody cancelled or killed it", cancels=True, is_stop=True),
    DEPENDENCY: Cause("a job that it comes after did not complete", cancels=True),
    PREEMPTED: Cause("another job needed its GPUs", requeues=True, is_stop=True),
    REQUEUED: Cause("it could not begin, or its machine went down", requeues=True, shows_line=True),
    SESSION_LOST: Cause("its job.sh was killed, or its files are gone", is_reported=True),
    REBOOT: Cause("its machine went down", is_stop=True, is_reported=True, may_be_quick=False),
    NODE_LOST: Cause("its node was removed, or was not reached for too long"),
    NODE_FAIL: Cause("its node failed, as Slurm says"),
}
REQUEUES = tuple(word for word, row in CAUSES.items() if row.requeues)
UNKNOWN_CAUSE = Cause("")


def get_cause(word: str | None) -> Cause:
    """The row of a cause.  One of another version of nexus, and None, have the defaults."""
    return CAUSES.get(word or "", UNKNOWN_CAUSE)


MISSING_PYTHON = r"\bNo module named |\bpython[\d.]*: (command )?not found"
THIS_ENV = "nexus retry {id} --this-env, in a shell where the venv or conda environment that has it is active"


def find_remedy(cause: str | None, line: str | None, job_id: str) -> str:
    """What may help a job that failed for this cause, as this line tells; "" where nothing is known."""
    is_missing = cause == EXIT and re.search(MISSING_PYTHON, line or "")
    return (THIS_ENV if is_missing else get_cause(cause).remedy).format(id=job_id)


def describe_causes() -> str:
    """What each cause means: `killed: somebody cancelled or killed it; ...`."""
    return "; ".join(f"{word}: {row.meaning}" for word, row in CAUSES.items())

"""What programs inherit from this process: CPUs, limits, open files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..values.errors import NexusError
from ..values.text import parse_indices
from .processes import PROC, read_proc


@contextlib.contextmanager
def on_cpus(cpus: str | None) -> Iterator[None]:
    """What this thread starts in the block may use only these CPUs; None: those that the thread may use."""
    if not cpus:
        yield
        return
    own = os.sched_getaffinity(0)
    with contextlib.suppress(OSError, NexusError):
        os.sched_setaffinity(0, map(int, parse_indices(cpus)))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def describe_inherited() -> str:
    """What this process has from its starter, and passes on to all jobs, as CLEAN_STARTER could not reset it; or ""."""
    import resource
    nice, score = os.getpriority(os.PRIO_PROCESS, 0), int(read_proc(f"{PROC}/self/oom_score_adj") or 0)
    limits = {resource.RLIMIT_CPU: "CPU time", resource.RLIMIT_FSIZE: "the size of files",
              resource.RLIMIT_AS: "memory (ulimit -v)", resource.RLIMIT_DATA: "memory (ulimit -d)"}
    limited = [name for limit, name in limits.items() if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY]
    classes = {os.SCHED_BATCH: "SCHED_BATCH", os.SCHED_IDLE: "SCHED_IDLE", os.SCHED_FIFO: "SCHED_FIFO",
               os.SCHED_RR: "SCHED_RR"}
    policy = os.SCHED_OTHER
    with contextlib.suppress(OSError):                  # musl refuses the call
        policy = os.sched_getscheduler(0)
    return ", ".join(filter(None, (
        f"nice {nice}" if nice else "", classes.get(policy, ""),
        f"oom_score_adj {score}" if score else "", f"a limit of {' and '.join(limited)}" if limited else "",
        "no_new_privs, with which sudo does not work"
        if "\nNoNewPrivs:\t1\n" in read_proc(f"{PROC}/self/status") else "")))


def withhold_descriptors() -> None:
    """Have no program inherit what this process was given, as none inherits what it opens itself."""
    for number in map(int, os.listdir(f"{PROC}/self/fd")):
        with contextlib.suppress(OSError):              # the one of this look
            os.set_inheritable(number, number <= 2)

"""/proc: a process, and where a job's processes are counted when memory lacks."""

from __future__ import annotations

from ..values.value import Value

PF_KTHREAD = 0x00200000         # source: include/linux/sched.h


class Process(Value):
    """A process.  pid and started together are unique in this boot."""
    pid: int
    started: int                # clock ticks since boot
    parent: int
    session: int
    state: str                  # R, S, D, Z, T ...
    env_start: int              # address of its environment; it changes at an exec, and is 0 during one
    is_kernel: bool = False     # a kernel thread
    cpu_ticks: int = 0          # its own, and those of its ended children
    name: str = ""              # the program's


def parse_proc_stat(text: str) -> Process:
    """Parse /proc/PID/stat.  The name, in parentheses, may hold blanks and parentheses.  Source: proc(5)."""
    pid, _, rest = text.partition(" ")
    name, _, more = rest.rpartition(") ")
    cells = more.split()
    return Process(int(pid), int(cells[19]), int(cells[1]), int(cells[3]), cells[0], int(cells[47]),
                   bool(int(cells[6]) & PF_KTHREAD), sum(map(int, cells[11:15])), name[1:])


CGROUPS = "/sys/fs/cgroup"


def list_oom_files(text: str) -> list[str]:
    """The files that may count a group's `oom_kill`.  `text`: /proc/PID/cgroup.

    In a container, the group may be what is shown as the topmost one.
    Source: cgroups(7), admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst.
    """
    groups = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    second = [f"{CGROUPS}{path.rstrip('/')}/memory.events" for _, names, path in groups if not names]
    first = [f"{CGROUPS}/memory{path.rstrip('/')}/memory.oom_control" for _, names, path in groups
             if "memory" in names.split(",")]
    return [*second, *first, f"{CGROUPS}/memory.events", f"{CGROUPS}/memory/memory.oom_control"]

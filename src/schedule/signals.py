"""The processes of a job that must end, or whose command has ended: who gets the signal."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from ..formats.proc import Process
from ..values.value import Value

SHELLS = frozenset(("sh", "bash", "dash", "zsh", "fish", "ksh", "ash"))
WRAPPERS = frozenset((          # they end with the program that they run, and some pass each signal on to it
    "script", "env", "nice", "time", "timeout", "uv", "conda", "mamba", "micromamba"))
IDLE_WINDOW_S, IDLE_CPU = 20.0, 0.1     # processes idle that together used less of a core for so long


def choose_signaled(members: Sequence[Process], first_pids: Container[int], signaled: Container[int],
                    readers: Container[int], catchers: Container[int]) -> list[Process]:
    """The processes of a job that get the first signal now: its programs, and not what these have started.

    It goes down through shells, which may have a trap, and through wrappers, to the first program of each branch.  The
    children of a program get it when that has ended, and who reads a pipe when its writer has ended: a program that
    saves its work needs both.  A shell that leads a session, as one below script(1) does, takes the terminal from its
    programs when it dies: it gets the signal before them only if it has a trap.  `first_pids`: the pids when it all
    began; what a trap starts later is spared with its shell.  `signaled`: who has got it.  `readers`: of
    Processes.find_readers().  `catchers`: the leaders of sessions that handle the signal.
    """
    pids, below = {process.pid for process in members}, dict[int, list[Process]]()
    for process in members:
        if process.pid in first_pids:
            below.setdefault(process.parent, []).append(process)
    chosen, todo = [], [process for process in members if process.parent not in pids]
    for process in todo:                        # it grows
        children = below.get(process.pid, [])
        if process.name in SHELLS or process.name in WRAPPERS:
            todo += children
        ends_terminal = process.name in SHELLS and process.pid == process.session and process.pid not in catchers
        if not children or not (process.name in WRAPPERS or ends_terminal):
            chosen.append(process)
    return [process for process in chosen if process.pid not in signaled and process.pid not in readers]


def choose_warned(members: Sequence[Process], catchers: Container[int], signal: str) -> list[Process]:
    """The first of each branch that handles a signal: a trainer, and not torchrun above it or its data loaders below.

    A wrapper handles it only to end, or to pass it on, and bash handles INT always: what handles it below them counts.
    `members`: parents first.  `catchers`: the pids of those that handle it; the others would die of it.
    """
    parents, above = {process.pid: process.parent for process in members}, set[int]()
    for process in members:
        pid = process.parent if process.pid in catchers else 0
        while pid in parents and pid not in above:
            above.add(pid)
            pid = parents[pid]
    chosen, below = [], set[int]()
    for process in members:
        is_between = process.name in WRAPPERS or (process.name in SHELLS and signal == "INT")
        if process.parent in below:
            below.add(process.pid)
        elif process.pid in catchers and not (is_between and process.pid in above):
            chosen.append(process)
            below.add(process.pid)
    return chosen


def choose_session(members: Iterable[Process], session: int | None) -> list[Process]:
    """The processes of a session, and what they have started.  `members`: parents first."""
    chosen = dict[int, Process]()
    for process in members:
        if process.session == session or process.parent in chosen:
            chosen[process.pid] = process
    return list(chosen.values())


class Work(Value):
    """The CPU time that processes use together."""
    ticks: Mapping[int, int] = {}                       # {pid: its CPU ticks at the last reading}
    readings: tuple[tuple[float, int], ...] = ()        # (monotonic, ticks since the first), back to IDLE_WINDOW_S

    def add(self, processes: Iterable[Process], now: float) -> Work:
        ticks = {process.pid: process.cpu_ticks for process in processes}
        used = sum(max(0, count - self.ticks.get(pid, 0)) for pid, count in ticks.items()) if self.readings else 0
        readings = (*self.readings, (now, used + (self.readings[-1][1] if self.readings else 0)))
        late = sum(at <= now - IDLE_WINDOW_S for at, _ in readings)
        return Work(ticks, readings[max(0, late - 1):])

    def is_idle(self, tick_s: float) -> bool:
        """Whether they used less than IDLE_CPU over IDLE_WINDOW_S.  `tick_s`: seconds of a CPU tick."""
        (began_at, before), (now, used) = self.readings[0], self.readings[-1]
        return now - began_at >= IDLE_WINDOW_S and (used - before) * tick_s < IDLE_CPU * IDLE_WINDOW_S

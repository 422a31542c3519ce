"""What jobs do in a history: a command works for a while, hears signals, prints, takes memory, idles, leaves something."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from world import Run, SimProcess, World

SIGKILL, USR1, USR2 = 9, 10, 12
PRINT_INTERVAL_S = 5.0          # between two lines of a command that prints
NAP_S, AWAKE_S = 50.0, 10.0     # of one that naps: how long its GPUs do nothing, and then something
BUSY_PERCENT = 50.0             # utilization of a GPU on which a command computes
OOM_LINE = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"


class Command:
    """`work SECONDS EXIT_CODE WAYS...`: each way is something else that it does.

    stubborn: no signal but SIGKILL ends it; polite: it ends with 0 when it hears one; saves: it handles USR1 and USR2, and goes on.
    leaves, detaches: at its end something goes on in its session, or in another one; forks: it has a child while it runs.
    prints: a line now and then on both streams; oom: its last line says that the GPU has no memory left.
    idle, naps: its GPUs do nothing, or nothing most of the time; cuda: it fails at once on a bad card; eats=MIB: its memory.
    """

    def __init__(self, words: Sequence[str], world: World) -> None:
        longest_s = 1.0 if world.is_hasty else float("inf")
        self.began_at = world.now
        self.ends_at, self.code = world.now + min(longest_s, float(words[0])), int(words[1])
        self.ways = frozenset(words[2:])
        self.memory_mib = max([100.0, *(float(way.partition("=")[2]) for way in self.ways if way.startswith("eats="))])
        self.heard: list[tuple[float, int]] = []        # (when, which signal)
        self.senders: list[SimProcess | None] = []      # of those
        self.children: list[SimProcess] = []            # also what it has left at its end
        self.run: Run | None = None                     # of a job's command
        self.is_child = False
        self.line_count = 0

    def start(self, process: SimProcess, run: Run) -> None:
        """It begins, as a job's."""
        self.run = run
        if "cuda" in self.ways and any(card.is_bad and card.uuid in run.shares for card in process.host.cards):
            self.ends_at, self.code = process.world.now, 1
        if "forks" in self.ways:
            self.add_child(process, process.pid, process.session).is_child = True

    def add_child(self, process: SimProcess, parent: int, session: int) -> Command:
        from world import SimProcess
        child = SimProcess(process.host, "worker", parent, session, mark=process.mark)
        child.command = Command(["30", "0"], process.world)
        for handle, opened in process.handles.items():
            child.add_handle(opened, handle)
        self.children.append(child)
        return child.command

    def go_on(self, process: SimProcess) -> None:
        """What it does by now: it prints what is due, or ends."""
        now = process.world.now
        if process.state == "T":
            return
        while "prints" in self.ways and self.began_at + self.line_count * PRINT_INTERVAL_S <= min(now, self.ends_at):
            self.print(process, self.line_count % 3 == 2, f"line {self.line_count} of {process.pid}\n".encode())
            self.line_count += 1
        if now >= self.ends_at and not self.is_child:
            self.finish(process)

    def print(self, process: SimProcess, stream: int, content: bytes) -> None:
        """Print, as far as the disk takes it."""
        if not self.run:
            return
        path = f"{self.run.folder}/{('stdout.log', 'stderr.log')[stream]}"
        try:
            handle = process.disk.open(path, os.O_WRONLY)
            try:
                size = process.disk.pwrite(handle, content, process.disk.size(handle))
            finally:
                process.disk.close(handle)
        except OSError:
            return
        process.world.note_printed(self.run.job.id, stream, content[:size])

    def finish(self, process: SimProcess) -> None:
        """It ends by itself, its child with it, and may leave something in its session, or in another one."""
        if "prints" in self.ways:
            self.print(process, 0, b"\xff\rdone")        # no text, and no newline
        if "oom" in self.ways:
            self.print(process, 1, OOM_LINE.encode())
        for child in self.children:
            child.end(0)
        for way, session in (("leaves", process.session), ("detaches", 0)):
            if way in self.ways:
                self.add_child(process, 1, session)
        process.end(self.code)

    def handles(self, number: int) -> bool:
        """Whether its program has a handler for a signal, with which it goes on."""
        return number in (USR1, USR2) and "saves" in self.ways

    def is_busy(self, now: float) -> bool:
        """Whether its GPUs have something to do."""
        return "idle" not in self.ways and not ("naps" in self.ways and (now - self.began_at) % (NAP_S + AWAKE_S) < NAP_S)

    def hear(self, process: SimProcess, number: int) -> None:
        self.heard.append((process.world.now, number))
        self.senders.append(process.world.current)
        if number == SIGKILL:
            process.end(128 + SIGKILL)
        elif "stubborn" not in self.ways and not self.handles(number):
            process.end(0 if "polite" in self.ways else 128 + number)

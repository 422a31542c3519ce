"""What the threads of a service or an agent share: a loop that survives faults, and the FIFO of the runners."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from ..formats.runner_events import RunnerEvent, parse_runner_event
from ..opening import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

    from .loop import HostLoop

WATCH_INTERVAL_S = 1.0          # how often runners' pids are checked; their events come at once
STARTS_WAIT_S = 0.02            # how long a start waits for the next event: that of a short job is its end


class Worker:
    """A thread that calls step() again and again, also when that fails.

    step() returns the pause in seconds; None: until `wanted` is set, which ends any pause.
    """

    pause_s: float | None = 0.0

    def __init__(self, loop: HostLoop, doing: str, step: Callable[[], float | None]) -> None:
        import threading
        self.loop, self.doing, self.step, self.is_ended = loop, doing, step, False
        self.wanted, self.thread = threading.Event(), threading.Thread(target=self.run, name=doing, daemon=True)

    def end(self) -> None:
        """Call step() no more."""
        self.is_ended = True
        self.wanted.set()

    def run(self) -> None:
        while True:
            self.wanted.wait(self.pause_s)
            self.wanted.clear()
            if self.is_ended or self.loop.is_stopping:
                return
            try:
                self.pause_s = self.step()
            except Exception as error:
                self.loop.fail(self.doing, error)
                self.pause_s = None if self.pause_s is None else max(self.pause_s, WATCH_INTERVAL_S)


class RunnerEvents:
    """The FIFO into which runners say that they start and end.  It is also what wakes a loop that waits."""

    def __init__(self, path: str, log: logging.Logger) -> None:
        self.received = b""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.mkfifo(path, 0o600)
            self.source = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)       # so a runner finds a reader
            self.target = self.source
        except OSError as error:
            log.warning("%s: %s; ends of jobs are noticed within %g s", path, error, WATCH_INTERVAL_S)
            self.source, self.target = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """End the wait.  Safe in a signal handler and in any thread."""
        with contextlib.suppress(BlockingIOError):          # it is full: the loop wakes anyway
            os.write(self.target, b"\n")

    def wait(self, timeout_s: float) -> list[RunnerEvent]:
        """Wait for events or wake(); return the events.  Starts, on which nothing waits, wait a little for others."""
        give_up_at, events, is_over = time.monotonic() + timeout_s, list[RunnerEvent](), False
        while not is_over:
            lines = self.read(max(0.0, give_up_at - time.monotonic()))
            parsed = [parse_runner_event(line.decode("utf-8", "replace")) for line in lines if line]
            events += [event for event in parsed if event]
            is_over = not lines or b"" in lines or any(event.verb != "start" for event in events)
            give_up_at = min(give_up_at, time.monotonic() + STARTS_WAIT_S)
        return events

    def read(self, timeout_s: float) -> list[bytes]:
        """The lines that come next; b"" is a wake()."""
        import select
        select.select([self.source], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):          # it is empty
            self.received += os.read(self.source, 65536)
        *lines, self.received = self.received.split(b"\n")
        self.received = self.received[-4096:]
        return lines

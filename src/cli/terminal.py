"""The terminal: its size, colours, output that may break off."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

from ..machine.clock import Clock
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..views.status_text import Paint

if TYPE_CHECKING:
    from typing import TextIO


def write_to(stream: TextIO, piece: str | bytes) -> None:
    """Raises: unavailable; BrokenPipeError, when the reader has closed the pipe."""
    try:
        if isinstance(piece, bytes) and hasattr(stream, "buffer"):
            stream.flush()
            stream.buffer.write(piece)
        else:
            stream.write(piece if isinstance(piece, str) else piece.decode("utf-8", "replace"))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NexusError("unavailable", f"the output cannot be written: {error.strerror}",
                         hint="check where stdout goes") from None


def make_paint(stream: TextIO, environ: Mapping[str, str]) -> Paint:
    is_colourful = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    width, height = find_terminal_size(stream, environ) if stream.isatty() else (0, 0)
    return Paint(Clock().new_token() if is_colourful else "", width, height)


def find_terminal_size(stream: TextIO, environ: Mapping[str, str]) -> tuple[int, int]:
    """(columns, lines).  Some terminals do not tell them, as in containers, CI and serial consoles: they say 0."""
    size = os.get_terminal_size(stream.fileno())
    given = [int(text) if re.fullmatch("[0-9]{1,4}", text := environ.get(name, "")) else 0
             for name in ("COLUMNS", "LINES")]
    return size.columns or given[0] or 80, size.lines or given[1] or 24


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Let TERM and HUP end a command as Ctrl-C does: what it has begun is ended, and its files are removed, first."""
    import signal

    def end(number: int, _: object) -> None:
        for other in former:
            signal.signal(other, lambda *_: None)       # a second one would cut that off
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    former = {number: handler for number, handler in former.items() if handler != signal.SIG_IGN}      # nohup
    for number in former:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)

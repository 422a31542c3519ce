"""Files without a name, for what a program prints."""

from __future__ import annotations

import contextlib
import os

from ..opening import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from typing import IO


def limit_output(process: subprocess.Popen[bytes], most_bytes: int) -> None:
    """End a program that writes more into a file, such as its open_scratch()."""
    import resource
    with contextlib.suppress(OSError):                  # it has ended
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def open_scratch() -> IO[bytes]:
    """A file without a name; in memory where possible, so that a full disk does not truncate output."""
    try:
        return os.fdopen(os.memfd_create("nexus"), "w+b")
    except (AttributeError, OSError):                   # Python was built for an older C library
        import tempfile
        return tempfile.TemporaryFile()


def read_scratch(file: IO[bytes], undecodable: str = "replace") -> str:
    """Its content.  The file's position is shared with its writer, and stays."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", undecodable)

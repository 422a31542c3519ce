"""The history of the GPUs on disk.

Nothing of it is synced: a record that a power cut has torn counts as none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from ..formats.gpu_history import (
    HISTORY_BYTES,
    HISTORY_HEAD_BYTES,
    MINUTES,
    RECORD_BYTES,
    TENS,
    HistoryHead,
    Ring,
    decode_means,
    encode_means,
    parse_history_head,
    parse_runs,
)
from ..values.gpu import GpuMeans, GpuRun, combine_means
from .disk import Disk, measure, open_file, read_whole, write_aside, write_at
from .log_reader import read_part


def read_ring(disk: Disk, handle: int, ring: Ring, begin: float, end: float) -> Iterator[GpuMeans]:
    """The records of the steps from that of `begin` to that of `end`.  Raises: OSError."""
    last = int(end) // ring.step_s
    first = max(int(begin) // ring.step_s, last - ring.count + 1)
    before = min(last + 1 - first, ring.count - first % ring.count) * RECORD_BYTES      # the end of the ring
    content = disk.pread(handle, before, ring.find_at(first))
    content += disk.pread(handle, (last + 1 - first) * RECORD_BYTES - before, ring.start)
    for number in range(first, last + 1):
        at = (number - first) * RECORD_BYTES
        means = decode_means(content[at:at + RECORD_BYTES])
        if means and means.at == number * ring.step_s:
            yield means


def put_means(disk: Disk, handle: int, ring: Ring, means: GpuMeans, is_part: bool = False) -> None:
    """Write a record, unless what is in its place is newer: the clock was set back.  Raises: OSError.

    `is_part`: other readings of the same time may be there already.
    """
    at = ring.find_at(int(means.at) // ring.step_s)
    former = decode_means(disk.pread(handle, RECORD_BYTES, at))
    if former and former.at == means.at and is_part:
        means = combine_means(means.at, [former, means])
    if former is None or former.at <= means.at:
        write_at(disk, handle, encode_means(means), at)


def write_means(disk: Disk, path: str, head: str, minutes: Iterable[GpuMeans]) -> None:
    """Write means of minutes, and those of the ten minutes around them, into a GPU's file.

    A file of another length is made anew, as long as it will ever be: later no room is needed.
    Raises: OSError, unavailable.
    """
    if measure(disk, path) != HISTORY_BYTES:
        empty = head + "\0" * (HISTORY_BYTES - HISTORY_HEAD_BYTES)
        with write_aside(disk, f"{path}.new", [empty], is_synced=False) as aside:
            disk.replace(aside, path)
    with open_file(disk, path, os.O_RDWR) as handle:
        if disk.pread(handle, HISTORY_HEAD_BYTES, 0) != head.encode():
            write_at(disk, handle, head.encode(), 0)
        for minute in minutes:
            put_means(disk, handle, MINUTES, minute, is_part=True)
            begin = minute.at // TENS.step_s * TENS.step_s
            parts = list(read_ring(disk, handle, MINUTES, begin, begin + TENS.step_s - 1))
            if parts:
                put_means(disk, handle, TENS, combine_means(begin, parts))


def read_means(disk: Disk, path: str, ring: Ring, begin: float, end: float) -> list[GpuMeans]:
    """The records from `begin` to `end`; none where there is no whole file."""
    with contextlib.suppress(OSError):
        if measure(disk, path) == HISTORY_BYTES:
            with open_file(disk, path, os.O_RDONLY) as handle:
                return list(read_ring(disk, handle, ring, begin, end))
    return []


def read_history_head(disk: Disk, path: str) -> HistoryHead | None:
    return parse_history_head(read_part(disk, path, 0, HISTORY_HEAD_BYTES))


def read_runs(disk: Disk, path: str) -> tuple[list[GpuRun], bool]:
    """(the rows of runs.jsonl, whether all its lines are whole).  Raises: OSError."""
    import io
    with contextlib.suppress(FileNotFoundError):
        return parse_runs(io.BytesIO(read_whole(disk, path)))
    return [], True

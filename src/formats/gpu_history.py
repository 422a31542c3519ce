"""The history of a GPU, a file of a fixed size.

After its head, a line that says which GPU it is of, come rings of records: a record's place in its ring follows
from its time.  One that has a wrong checksum, or another time than its place is for, counts as none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ..opening import TYPE_CHECKING
from ..values.gpu import Gpu, GpuMeans, GpuRun
from ..values.text import load_json
from ..values.value import Value
from .codec import decode, decode_value
from .state_file import check_seal, seal

if TYPE_CHECKING:
    from typing import Any

    from ..values.job import Name, Uuid

HISTORY_HEAD_BYTES = 512
RECORD = "<IIHHHBB"             # time, MiB, tenths of a percent, tenths of a watt, readings, degrees, percent by others
RECORD_BYTES = 20               # with the checksum


class Ring(Value):
    """Where a file has the records of one length of time."""
    step_s: int
    count: int
    start: int                                  # in bytes

    def find_at(self, number: int) -> int:
        """Where the record of the `number`th step since 1970 is, in bytes."""
        return self.start + number % self.count * RECORD_BYTES


MINUTES = Ring(60, 24 * 60, HISTORY_HEAD_BYTES)
TENS = Ring(600, 31 * 24 * 6, HISTORY_HEAD_BYTES + MINUTES.count * RECORD_BYTES)
HISTORY_S = TENS.step_s * TENS.count            # how far back it goes
HISTORY_BYTES = TENS.start + TENS.count * RECORD_BYTES


def encode_means(means: GpuMeans) -> bytes:
    import struct
    import zlib

    def fit(number: float | None, scale: int, limit: int) -> int:
        return limit if number is None else max(0, min(round(number * scale), limit - 1))       # the limit: unknown

    body = struct.pack(
        RECORD, int(means.at), fit(means.memory_used_mib, 1, 2**32 - 1), fit(means.utilization, 10, 2**16 - 1),
        fit(means.power_watts, 10, 2**16 - 1), min(means.count, 2**16 - 1), fit(means.temperature, 1, 255),
        fit(means.others, 1, 255))
    return body + struct.pack("<I", zlib.crc32(body))


def decode_means(record: bytes) -> GpuMeans | None:
    """None when there is no whole record."""
    import struct
    import zlib
    body, crc = record[:-4], record[-4:]
    if len(record) != RECORD_BYTES or crc != struct.pack("<I", zlib.crc32(body)):
        return None
    at, memory, load, watts, count, degrees, others = struct.unpack(RECORD, body)
    told = [(load, 10, 2**16 - 1), (memory, 1, 2**32 - 1), (degrees, 1, 255), (watts, 10, 2**16 - 1), (others, 1, 255)]
    return GpuMeans(at, count, *(None if number == limit else number / scale for number, scale, limit in told))


def format_history_head(gpu: Gpu) -> str:
    """The first line of a GPU's file, with blanks to its length."""
    name = gpu.name.encode("ascii", "replace").decode()[:80]
    head = seal({"uuid": gpu.uuid, "place": gpu.place, "node": gpu.node, "name": name})
    return f"{head:{HISTORY_HEAD_BYTES - 1}}\n"


class HistoryHead(Value):
    """Which GPU a file is of, for when that is gone."""
    uuid: Uuid
    place: Name
    node: Name
    name: Name


def parse_history_head(text: bytes) -> HistoryHead | None:
    with contextlib.suppress(ValueError, TypeError):
        body = decode("dict", load_json(text))
        if check_seal(body):
            return decode_value(HistoryHead, body)
    return None


def parse_runs(lines: Iterable[bytes]) -> tuple[list[GpuRun], bool]:
    """(the rows of runs.jsonl, whether all its lines are whole)."""
    runs, is_whole = [], True
    kept: dict[Any, Any] = {}                   # equal facts are one in memory
    for line in lines:
        try:
            body = decode("dict", load_json(line))
            if not (check_seal(body) and line.endswith(b"\n")):
                raise ValueError("it has no checksum, or no end")
            facts = vars(decode_value(GpuRun, body))
            runs.append(GpuRun(**{name: kept.setdefault(facts[name], facts[name]) for name in GpuRun.NAMES
                                  if name in facts}))
        except (ValueError, TypeError):
            is_whole = False
    return runs, is_whole

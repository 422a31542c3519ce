"""state.json and journal.jsonl: their rows, their checksums, and older versions of them.

state.json has State's facts, and its tables with a line for each row.  A line of the journal is one transaction:
{"put": {table: {key: the whole row, or null}}, "seq": its number}.  decode_row() reads both. Each line of the
journal, each row of state.json, and its facts together, have a checksum, `crc`: a bit that the disk has changed
must not start a job again.  It is made of the values, so another program may lay them out anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import PENDING, STATUSES, SUBMITTED, Job
from ..values.state import EDITABLE, FACTS, Put, State
from ..values.text import format_count, format_line, is_job_id, join_some, load_json
from ..values.value import Value, replace
from .codec import decode, encode_inner

if TYPE_CHECKING:
    from typing import Any

STATE_VERSION = 3
ROWS: Mapping[str, str] = {
    "environments": "Mapping[str, str]", "groups": "Group", "seen": "int", "nodes": "KnownNode", "usage": "PastUsage",
    "jobs": "Job"}
FIRST_TABLES = ("environments", "groups", "seen", "nodes", "jobs")      # of files that do not name theirs
WRAPPED = {"environments": "variables", "seen": "count"}        # rows that are no values: {"key": …, this name: row}
OWN_KEYS: Mapping[str, Callable[[Any], str]] = {                # the key of a row, as the row itself has it
    "groups": lambda row: row.name, "nodes": lambda row: row.config.name, "usage": lambda row: row.key,
    "jobs": lambda row: row.id}
# Names in files of version 2 that no longer mean anything.  Others that are unknown there are damaged.
RETIRED = frozenset((
    "content", "head", "head_attempt", "hooks_since", "inventory", "is_collected", "is_told", "limits", "machine_id",
    "may_pass", "remote_id"))

encode_sorted = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=encode_inner).encode
LIKE_INTEGERS = r"\.0[],}]|e\+"     # floats without a fraction, as they are written


def find_crc(text: str) -> int:
    """The checksum of what encode_sorted() has made; the same for 1.0 as for 1, as programs write either."""
    import zlib
    return zlib.crc32(write_integers(text).encode("ascii"))


def write_integers(text: str) -> str:
    """What encode_sorted() has made, with 1 for 1.0."""
    if re.search(LIKE_INTEGERS, text):
        return encode_sorted(json.loads(text, parse_float=lambda digits: shorten_float(float(digits))))
    return text


def shorten_float(number: float) -> float:
    return int(number) if number.is_integer() else number


def seal(body: Any) -> str:
    """The JSON of an object, with its checksum."""
    text = encode_sorted(body)
    return f'{text[:-1]},"crc":{find_crc(text)}}}'


def check_seal(body: Mapping[str, Any]) -> bool:
    """Whether an object has a checksum.  Raises: ValueError, when it is wrong."""
    if "crc" not in body:
        return False
    if body["crc"] != find_crc(encode_sorted({name: fact for name, fact in body.items() if name != "crc"})):
        raise ValueError("its checksum is wrong")
    return True


def is_known(table: str, key: str) -> bool:
    return key in FACTS if table == "facts" else table in ROWS


def encode_row(table: str, key: str, row: Any) -> Any:
    return {"key": key, WRAPPED[table]: row} if table in WRAPPED and row is not None else row


def decode_row(table: str, key: str, given: Any) -> Any:
    """Raises: KeyError, TypeError or ValueError, whose words show nothing of an environment."""
    kind = State.__annotations__[key] if table == "facts" else ROWS[table]
    if given is None:
        return None
    if table in WRAPPED:
        name, fact = given["key"], given[WRAPPED[table]]
        is_texts = isinstance(fact, dict) and all(isinstance(text, str) for text in fact.values())
        if table == "environments" and not is_texts:
            raise TypeError("its variables are not texts")
        row = decode(kind, fact, WRAPPED[table])
    else:
        row = decode(kind, given, key)
        name = OWN_KEYS[table](row) if table in OWN_KEYS else key
    if isinstance(row, Job) and not (name == key and is_job_id(key) and row.shown_status in STATUSES
                                     and len(row.queue_key) == 3):
        raise ValueError(f"its id is {row.id}, its status {row.status} and its queue_key {row.queue_key}")
    if name != key:
        raise ValueError(f"its name is {name}")
    if isinstance(row, Job) and row.status == PENDING and any(
            attempt.slurm_key is not None and attempt.finished_at is None for attempt in row.attempts[-1:]):
        return replace(row, status=SUBMITTED)           # older ones had no word for what is in Slurm's queue
    return row


def decode_sealed_row(table: str, key: str, given: Any) -> Any:
    """decode_row() of a row of state.json.  Raises: as decode_row()."""
    if not check_seal(decode("dict", given, key)):
        raise ValueError("it has no checksum")
    return decode_row(table, key, given)


def decode_old_row(table: str, key: str, given: Any) -> Any:
    """decode_row() of a row as version 2 wrote it.  Raises: as decode_row(); ValueError, for an unknown name in it."""
    if table in WRAPPED:
        return decode_row(table, key, encode_row(table, key, given))
    row = decode_row(table, key, given)
    unknown = set(list_unknown(row, given)) - RETIRED
    if unknown:
        raise ValueError(f"it has no {join_some(sorted(unknown))}")
    return row


def list_unknown(row: Any, given: Any) -> Iterator[str]:
    """The names in JSON that are no fields of what was decoded from it."""
    if isinstance(row, Value):
        for name, fact in given.items():
            if name in row.NAMES:
                yield from list_unknown(getattr(row, name), fact)
            else:
                yield name
    elif isinstance(row, tuple):
        for kind, fact in zip(row, given):
            yield from list_unknown(kind, fact)


def encode_puts(changes: Iterable[Put]) -> tuple[str, str]:
    """The part of a transaction's line that takes long for many changes; and what its checksum is of."""
    tables: dict[str, dict[str, Any]] = {}
    for change in changes:
        tables.setdefault(change.table, {})[change.key] = encode_row(*vars(change).values())
    text = encode_sorted(tables)
    return text, write_integers(text)


def encode_transaction(seq: int, puts: tuple[str, str], unsynced: int = 0) -> str:
    """A line of the journal, as seal() makes it.  `unsynced`: how many right before it a power cut may still take."""
    import zlib
    rest = f',"seq":{seq}' + (f',"unsynced":{unsynced}' if unsynced else "")
    text, plain = (f'{{"put":{each}{rest}}}' for each in puts)
    return f'{text[:-1]},"crc":{zlib.crc32(plain.encode("ascii"))}}}\n'


def read_transaction(line: bytes) -> tuple[int, dict[str, Any], bool]:
    """(its number, {table: rows}, whether it has a checksum) of a line of the journal.

    Raises: KeyError, TypeError or ValueError.
    """
    body: dict[str, Any] = decode("dict", load_json(line))
    is_sealed = check_seal(body)
    if not is_sealed and len(body) > 2:
        raise ValueError("it has an unknown name and no checksum")
    return decode("int", body["seq"], "seq"), decode("dict", body["put"], "put"), is_sealed


def encode_state(state: State) -> Iterator[str]:
    head = {"version": STATE_VERSION, "seq": state.seq, "checksums": True, "tables": list(ROWS),
            "rows": sum(len(getattr(state, table)) for table in ROWS), **{name: getattr(state, name) for name in FACTS}}
    head["crc"] = find_crc(encode_sorted(leave_out_editable(head)))
    yield "{" + ",\n".join(f"{json.dumps(key)}: {json.dumps(fact)}" for key, fact in head.items())
    for table in ROWS:
        rows = ",\n".join(f"{json.dumps(key)}: {seal(encode_row(table, key, row))}"
                          for key, row in getattr(state, table).items())
        yield f',\n"{table}": {{\n{rows}\n}}'
    yield "}\n"


def leave_out_editable(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in body.items() if name not in EDITABLE}


class StateFile(Value):
    """A state.json as it was read; its rows are still to be decoded."""
    version: int
    seq: int                                    # the number of the last change that it contains
    tables: dict[str, Any]                      # {"facts": State's facts, table: rows}
    is_sealed: bool                             # its rows have checksums, and so have later lines of the journal
    faults: tuple[str, ...] = ()                # what is not as nexus wrote it


def read_state(text: str) -> StateFile:
    """Raises: KeyError, TypeError or ValueError, when it is no state.json; conflict, for a newer nexus's."""
    body: dict[str, Any] = decode("dict", load_json(text))
    version, seq = decode("int", body["version"], "version"), decode("int", body["seq"], "seq")
    if version > STATE_VERSION:
        raise NexusError("conflict", "state.json was written by a newer nexus: its version is "
                         f"{version}, and this one reads {STATE_VERSION}",
                         hint="nothing was changed: use the newer nexus.py, or give this one a home of its own: "
                         "NEXUS_HOME=~/.nexus-2 nexus start")
    decode("dict", body["jobs"], "jobs")
    tables = {"facts": {name: body[name] for name in FACTS if name in body},
              **{table: body[table] for table in ROWS if table in body}}
    is_sealed = version == STATE_VERSION or "crc" in body or "checksums" in body
    faults = list(find_head_faults(body) if is_sealed else (
        f"it has no {format_line(name, 60)}" for name in body
        if name not in ("version", "seq", *tables, *tables["facts"], *RETIRED)))
    return StateFile(version, seq, tables, is_sealed, tuple(faults))


def find_head_faults(body: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong in a state.json, but for its rows.  A newer nexus may have further facts and tables."""
    parts = leave_out_editable(body)
    tables = {name: rows for name, rows in parts.items() if isinstance(rows, dict)}
    try:
        if not check_seal({name: fact for name, fact in parts.items() if name not in tables}):
            yield "its facts have no checksum"
    except ValueError:
        yield "the checksum of its facts is wrong"
    named = body.get("tables")
    missing = [table for table in (named if isinstance(named, list) else FIRST_TABLES) if table not in tables]
    if missing:
        yield f"it has no {join_some(missing)}"
    count = sum(map(len, tables.values()))
    if count != body.get("rows"):
        yield f"it has {format_count(count, 'row')}, and had {body.get('rows')}"

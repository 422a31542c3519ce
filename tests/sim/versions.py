"""Other versions of nexus, as far as the files that they leave: an older one's have no checksums, a newer one's have more.

All of them run the same code; what a service writes and may read is that of the nexus.py with which it was started.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import nexus

if TYPE_CHECKING:
    from world import Host, SimProcess

CODE = os.path.abspath(nexus.__file__)
VERSIONS = {"older": 2, "this": nexus.STATE_VERSION, "newer": nexus.STATE_VERSION}      # of their state.json
# The real ones, which have stand-ins while a history runs
find_recovery, read_state = nexus.find_recovery, nexus.read_state
encode_state, encode_transaction = nexus.encode_state, nexus.encode_transaction


def copy_code(process: SimProcess, version: str) -> None:
    """Somebody copies another nexus.py over the one that is there."""
    nexus.write_atomic(process.disk, CODE, [f"# nexus.py, {version}\n"])


def find_version(host: Host) -> str:
    """The version of the nexus.py on a machine."""
    return bytes(host.files.find(CODE).content).decode().split()[-1]


class Files:
    """How the process that runs reads and writes the state's files: stands in for functions of nexus."""

    def __init__(self, get_running: Any) -> None:
        self.get_running = get_running

    def read_state(self, text: str) -> nexus.StateFile:
        version = VERSIONS[self.get_running().version]
        if version < nexus.STATE_VERSION and json.loads(text)["version"] > version:
            raise nexus.NexusError("conflict", "state.json was written by a newer nexus", "")
        return read_state(text)

    def encode_state(self, state: nexus.State) -> Iterator[str]:
        version = self.get_running().version
        pieces = encode_state(state)
        if version == "this":
            return pieces
        body = json.loads("".join(pieces))
        return iter([json.dumps((write_old_state if version == "older" else write_new_state)(body)) + "\n"])

    def encode_transaction(self, seq: int, puts: tuple[str, str], unsynced: int = 0) -> str:
        version, line = self.get_running().version, encode_transaction(seq, puts, unsynced)
        if version == "this":
            return line
        body = json.loads(line)
        if version == "older":
            return json.dumps({"seq": seq, "put": unwrap(body["put"])}, separators=(",", ":")) + "\n"
        return nexus.seal({**leave_out_crc(body), "put": add_names(body["put"])}) + "\n"


def write_old_state(body: dict[str, Any]) -> dict[str, Any]:
    """state.json of version 2: without checksums, and with the bare rows of two tables."""
    kept = {name: fact for name, fact in body.items() if name not in ("crc", "checksums", "tables", "rows")}
    return {**unwrap(kept), "version": 2}


def unwrap(tables: dict[str, Any]) -> dict[str, Any]:
    for name, rows in tables.items():
        if name in nexus.WRAPPED:
            tables[name] = {key: row and row[nexus.WRAPPED[name]] for key, row in rows.items()}
        elif name in nexus.ROWS:
            tables[name] = {key: leave_out_crc(row) for key, row in rows.items()}
    return tables


def leave_out_crc(row: Any) -> Any:
    return {name: fact for name, fact in row.items() if name != "crc"} if isinstance(row, dict) else row


def write_new_state(body: dict[str, Any]) -> dict[str, Any]:
    """state.json of a nexus that has a further table, a further fact, and jobs with a further field."""
    tables = {name: {key: json.loads(nexus.seal(leave_out_crc(row))) for key, row in rows.items()}
              for name, rows in add_names({name: body[name] for name in nexus.ROWS}).items()}
    shapes = {"round": json.loads(nexus.seal({"key": "round"}))}
    facts = {**{name: fact for name, fact in body.items() if name not in tables and name != "crc"},
             "hue": 3, "tables": [*body["tables"], "shapes"], "rows": body["rows"] + 1}
    crc = nexus.find_crc(nexus.encode_sorted(nexus.leave_out_editable(facts)))
    return {**facts, "crc": crc, **tables, "shapes": shapes}


def add_names(tables: dict[str, Any]) -> dict[str, Any]:
    jobs = {key: row and {**row, "colour": [1.0]} for key, row in tables.get("jobs", {}).items()}
    return {**tables, "jobs": jobs} if jobs else tables

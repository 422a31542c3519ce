"""One transport: requests to the service, by its socket or by HTTP, and their answers.

This machine's service is reached by its socket in the home, which only its owner can open.  Before anything is sent
to it, or to a NEXUS_URL on this machine, the kernel is asked whose program listens there: another user's gets
nothing.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping

from ..machine.disk import Disk, find_user
from ..machine.layout import Layout
from ..opening import TYPE_CHECKING
from ..server.connections import MAX_HEAD_BYTES
from ..server.handler import read_credentials
from ..server.listener import open_socket_path
from ..values.errors import NexusError, decode_error
from ..values.text import format_line, load_json, refuse
from ..values.value import Value

if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Any

DISK = Disk()                   # of this process; commands and clients have no other
OWNER_TIMEOUT_S = 5.0           # until a program has accepted a connection

# One request a connection.  http.client would cost `nexus add` 35 ms.
CUT_OFF, NO_HTTP = "it closed the connection before its answer was complete", "it does not speak HTTP"


class Answer(Value):
    status: int
    headers: Mapping[str, str]                          # {name in lower case: value}
    pieces: Iterator[bytes]                             # of the body, as they arrive


def send_request(connection: socket.socket, method: str, path: str, headers: Mapping[str, str],
                 content: bytes = b"") -> Answer:
    """Raises, also while pieces are read: OSError, when the connection breaks; ValueError, when it is no HTTP."""
    fields = {**headers, "Connection": "close"}
    if content:
        fields.update({"Content-Type": "application/json", "Content-Length": str(len(content))})
    request = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in fields.items() if text), "", ""]
    with connection:                                # the reader keeps it open, until it is gone itself
        connection.sendall("\r\n".join(request).encode("latin-1", "replace") + content)
        reader = connection.makefile("rb")
    lines = [reader.readline(MAX_HEAD_BYTES)]
    while lines[-1].strip() and len(lines) < 200:
        lines.append(reader.readline(MAX_HEAD_BYTES))
    match = re.match(rb"HTTP/1\.[01] (\d{3})\b", lines[0])
    if not lines[-1]:
        raise ConnectionError(CUT_OFF)
    if not match or lines[-1].strip():
        raise ValueError(NO_HTTP)
    rows = [line.decode("latin-1").partition(":") for line in lines[1:-1]]
    fields = {name.lower(): text.strip() for name, _, text in rows}
    size = int(fields["content-length"]) if "content-length" in fields else float("inf")
    pieces = read_chunks(reader) if "transfer-encoding" in fields else read_pieces(reader, size)
    return Answer(int(match[1]), fields, pieces)


def read_pieces(reader: BufferedReader, size: float) -> Iterator[bytes]:
    """So many bytes, or all until the end."""
    while size > 0 and (piece := reader.read1(int(min(size, 65536)))):
        size -= len(piece)
        yield piece
    if 0 < size < float("inf"):
        raise ConnectionError(CUT_OFF)


def read_chunks(reader: BufferedReader) -> Iterator[bytes]:
    size = 1
    while size:
        text = reader.readline(MAX_HEAD_BYTES)
        if not re.match(b"[0-9a-fA-F]{1,15}\r?\n", text):
            raise ValueError(NO_HTTP) if text.endswith(b"\n") else ConnectionError(CUT_OFF)
        size = int(text, 16)
        yield from read_pieces(reader, size)
        reader.readline(MAX_HEAD_BYTES)


def split_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of a stream, as they are complete, without their ends."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def read_answer(answer: Answer) -> Any:
    """The reply as JSON, text or None.  Raises: the service's error; OSError; ValueError, when it is no nexus."""
    content = b"".join(answer.pieces)
    if answer.status < 400 and answer.headers.get("content-type", "").startswith("text/plain"):
        return content.decode()
    data = load_json(content.strip() or b"null")
    if answer.status >= 400 and not (isinstance(data, dict) and "checks" in data):      # GET /health: 503 with a body
        raise decode_error(data, f"HTTP status {answer.status}")
    return data


def describe_stranger(url: str, error: str) -> NexusError:
    return NexusError("unavailable", f"what answers at {url} is not nexus, or another version of it: {error}",
                      hint="check NEXUS_URL, and nexus --version here and there")


def quote_path(text: str) -> str:
    """Quote a word as part of a path.  Raises: usage."""
    import urllib.parse
    if not isinstance(text, str):
        refuse(f"an id is a text, not {format_line(repr(text), 60)}", hint="")
    return urllib.parse.quote(text, safe="", errors="surrogateescape") or "%20"


def encode_query(query: Mapping[str, Any]) -> str:
    import urllib.parse
    given = {name: fact for name, fact in query.items() if fact is not None}
    return "?" + urllib.parse.urlencode(given, doseq=True, errors="surrogateescape") if given else ""


def connect_to_own(layout: Layout, timeout_s: float) -> socket.socket:
    """A connection to api.sock.  Raises: OSError; forbidden, when it is another user's program that listens there."""
    connection, (path, home) = socket.socket(socket.AF_UNIX), open_socket_path(layout.socket_file)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        _, uid = read_credentials(connection)
        if uid != os.geteuid():
            raise NexusError("forbidden",
                             f"{layout.socket_file} belongs to a program of {find_user(uid)}: nothing was sent to it",
                             hint=f"others could write into {layout.home}: look at what is in it; then "
                                  f"rm {layout.socket_file} {layout.service_file}, and nexus start")
        return connection
    except BaseException:
        connection.close()
        raise
    finally:
        if home >= 0:
            os.close(home)

"""HTTP, by http.server: a request from its socket, a response to it."""

from __future__ import annotations

import contextlib
import re
import socket
import sys

from ..machine.peers import TCP_CLOSE_WAIT, TCP_ESTABLISHED, find_socket_uid, unmap
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.text import format_line, refuse
from .connections import BODY_BYTES_PER_S, REQUEST_TIMEOUT_S, UNKNOWN_TIMEOUT_S, Connections, HeadReader
from .routes import Request, Response, error_response

if TYPE_CHECKING:
    from typing import Any

    from .listener import Listener

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler
else:                               # the service adds it: importing http.server would cost each command 25 ms
    BaseHTTPRequestHandler = object

MAX_BODY_BYTES = 64 * 2**20
IDLE_TIMEOUT_S = 75.0                   # a connection that reads nothing for so long is closed
LINGER_S = 5.0                          # how long the rest of a refused body is read
SINGLE_HEADERS = ("host", "origin", "authorization", "content-type", "content-length")


def find_peer_uid(connection: socket.socket, address: Any) -> int | None:
    """The uid at the other end of a connection; None: not on this machine, closed, or unknown.

    A port is reused: what a sender that is gone has sent must not count as the present caller's.  So our end is looked
    at last.  While it is open, or waits for the reply to a caller who sends nothing more, no other connection of both
    ports gets beyond its SYN; it is neither any more once the sender was gone and its port has come again.
    """
    if connection.family == socket.AF_UNIX:
        return read_credentials(connection)[1]
    uid = find_socket_uid(unmap(address[:2]), unmap(connection.getsockname()[:2]))
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]        # tcp(7)
    return uid if state in (TCP_ESTABLISHED, TCP_CLOSE_WAIT) else None


def read_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected a Unix socket, or that listens at its other end.  Source: unix(7)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)      # pid, uid, gid
    return int.from_bytes(credentials[:4], sys.byteorder), int.from_bytes(credentials[4:8], sys.byteorder)


class Handler(BaseHTTPRequestHandler):
    """One request on a connection, its reply, and the end.  http.server reads the head, with its own limits."""
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"            # for what is no request: the reply has a head
    server: Listener
    client_address: Any                             # (the peer's address, its uid), from Listener
    timeout = UNKNOWN_TIMEOUT_S
    rbufsize = 0                                    # setup() has a buffer of its own

    @property
    def connections(self) -> Connections:
        return self.server.server.connections

    def setup(self) -> None:
        super().setup()
        self.rfile = HeadReader(self.rfile)

    def do_GET(self) -> None:
        self.connections.prolong(self.connection, REQUEST_TIMEOUT_S)
        try:
            response = self.server.api.handle(self.read_request())
        except NexusError as error:
            response = error_response(error)
        try:
            self.send(response)
            self.linger()
        except (OSError, NexusError):           # after a partial reply: a reset shows that it is not complete
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        finally:
            if response.after:
                response.after()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what http.server cannot read, or a method that no call has."""
        kind = "method_not_allowed" if code == 501 else "usage"
        fault = f"this is no request of HTTP: {format_line(message or '', 200)}"
        self.send(error_response(NexusError(kind, fault, hint="")))
        self.linger()

    def version_string(self) -> str:
        return "nexus"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass                                        # Api.note_error() logs what matters

    def read_request(self) -> Request:
        """Raises: usage; length_required."""
        import urllib.parse
        headers = {name.lower(): text.strip(" \t") for name, text in self.headers.items()}
        # A line that http.server does not understand ends the head for it, and would hide the lines after it.
        has_strange_line = self.headers.get_payload() or self.headers.preamble or self.headers.epilogue
        if has_strange_line or any(len(self.headers.get_all(name, [])) > 1 for name in SINGLE_HEADERS):
            refuse(f"each line of a head is `Name: text`, and {', '.join(SINGLE_HEADERS)} stand there once", hint="")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers:
            raise NexusError("length_required", "a body needs a Content-Length", hint="do not send it in chunks")
        if not re.fullmatch("[0-9]{1,18}", length):
            raise NexusError("usage", "Content-Length must be one number")
        path, _, rest = re.sub("^https?://[^/?]*", "", self.path).partition("?")
        query = urllib.parse.parse_qs(rest, keep_blank_values=True)
        peer, uid = self.client_address
        return Request(self.command, path, query, headers, lambda: self.read_body(int(length)), peer, uid, int(length),
                       lambda caller: self.connections.identify(self.connection, caller))

    def read_body(self, expected: int) -> bytes:
        """Raises: usage; too_large."""
        if expected > MAX_BODY_BYTES:
            raise NexusError("too_large", f"the body has {expected} bytes; at most {MAX_BODY_BYTES} are taken",
                             hint="send fewer jobs at once")
        clock, body = self.server.api.service.clock, bytearray()
        with self.connections.read_body(self.connection, expected) as grace_s:
            began = clock.monotonic()
            try:
                while len(body) < expected:
                    left_s = began + grace_s + len(body) / BODY_BYTES_PER_S - clock.monotonic()
                    self.connection.settimeout(max(0.001, left_s))
                    piece = self.rfile.read1(min(65536, expected - len(body))) if left_s > 0 else b""
                    if not piece:
                        reason = "is too slow" if left_s <= 0 else "ended"
                        refuse(f"the body {reason}: {len(body)} of {expected} bytes", hint="")
                    body += piece
            except OSError as error:
                raise NexusError(
                    "usage", f"the body of {expected} bytes did not come: {error.strerror or error}") from None
        return bytes(body)

    def send(self, response: Response) -> None:
        """Send a reply.  Raises: OSError; the stream's own errors."""
        import select
        is_chunked = response.stream is not None and self.request_version == "HTTP/1.1"
        headers = {"X-Content-Type-Options": "nosniff",
                   # Another site's page gets neither replies nor a hold on a window that shows one.
                   "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
                   "Vary": "Accept, Authorization", "Cache-Control": "no-store", "Connection": "close",
                   **response.headers}
        if response.status != 204:
            headers["Content-Type"] = response.content_type
        if is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif response.stream is None and response.status != 204:
            headers["Content-Length"] = str(len(response.body))
        self.connection.settimeout(IDLE_TIMEOUT_S)
        self.send_response(response.status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(response.body)
        poll = select.poll()                    # select() cannot take descriptors above 1023
        poll.register(self.connection, select.POLLRDHUP)
        for piece in response.stream or ():
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
            elif any(self.has_gone(event) for _, event in poll.poll(0)):
                raise ConnectionResetError
        self.wfile.write(b"0\r\n\r\n" if is_chunked else b"")

    def has_gone(self, event: int) -> bool:
        """Whether a caller who sends nothing more has closed its end, or may have: of others nothing is known."""
        import select
        if event & (select.POLLHUP | select.POLLERR) or self.connection.family == socket.AF_UNIX:
            return bool(event & (select.POLLHUP | select.POLLERR))
        return find_peer_uid(self.connection, self.connection.getpeername()) is None

    def linger(self) -> None:
        """Let the caller finish sending what is not wanted: a reset would destroy the reply."""
        clock = self.server.api.service.clock
        give_up_at = clock.monotonic() + LINGER_S
        self.connection.settimeout(LINGER_S)
        with contextlib.suppress(OSError):      # the caller is gone, or sends nothing more
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(65536) and clock.monotonic() < give_up_at:
                pass

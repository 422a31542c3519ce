"""The way to a service: connecting, checking whose it is, asking, and asking again while it restarts."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from ..machine.disk import find_user
from ..machine.layout import Layout
from ..machine.peers import find_socket_uid, is_loopback, unmap, watch_line
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.text import format_line, load_json, refuse
from .find_service import find_service
from .transport import OWNER_TIMEOUT_S, Answer, connect_to_own, describe_stranger, read_answer, send_request

if TYPE_CHECKING:
    from typing import Any

    from ..opening import T

RETRY_TIMEOUT_S = 30.0          # a restart may take as long as a start
NOT_SENT = (ConnectionRefusedError, FileNotFoundError, BlockingIOError)     # nothing was sent: it is down, or too busy
ANSWER_TIMEOUT_S = 120.0        # for a silent connection; on a stream that may be silent, the kernel probes the peer


def parse_url(url: str) -> tuple[str, int, bool, str]:
    """(host, port, whether it is https, owner or "") of NEXUS_URL.  Raises: usage."""
    match = re.fullmatch(r"(https?)://(?:([\w.-]+)@)?(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?/?", str(url))
    if not match or (match[2] and match[1] != "http"):
        raise NexusError("usage", f"NEXUS_URL={url} is not an address like http://gpu1:6234 or "
                         "https://gpu1.example.org; for the service of ann on this machine http://ann@127.0.0.1:6234",
                         hint="unset NEXUS_URL to use your own service on this machine")
    port = int(match[4] or (443 if match[1] == "https" else 80))
    return match[3].strip("[]"), port, match[1] == "https", match[2] or ""


def encode_body(body: object) -> bytes:
    """A body as JSON, with paths as texts; empty for None.  Raises: usage."""
    def encode_path(part: object) -> str:
        if isinstance(part, os.PathLike):
            return os.fsdecode(part)
        raise TypeError(f"JSON has no form for a {type(part).__name__}")

    try:
        return b"" if body is None else json.dumps(body, separators=(",", ":"), default=encode_path).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        refuse(f"what is asked cannot be sent: {format_line(str(error), 200)}", hint="")


class Channel:
    """Requests to one service.  It checks whose that is, and repeats what was interrupted where that is safe."""

    def __init__(self, url: str, token: str = "", layout: Layout | None = None) -> None:
        """`layout`: of this machine's service; it is reached by its socket.  None: by the address.  Raises: usage."""
        if not re.fullmatch("[!-~]*", token):
            refuse("a token has letters, digits and signs, and no blanks", hint="look at NEXUS_TOKEN")
        self.url, self.token, self.layout = url, token, layout
        self.host, self.port, self.is_secure, self.owner = ("localhost", 0, False, "") if layout else parse_url(url)
        self.has_started = False            # find() has started the service
        self.retry_timeout_s = RETRY_TIMEOUT_S if layout else 0.0       # with an address, until it has replied once

    def ask(self, method: str, path: str, body: object = None, key: str = "") -> Any:
        """One call; return JSON, a text, or None.  Raises: the service's error; unavailable; usage, for no JSON."""
        content = encode_body(body)
        return self.repeat(f"{method} {path}", lambda: read_answer(self.send(method, path, content, key)),
                           is_repeatable=method == "GET" or bool(key))

    def ask_list(self, path: str) -> tuple[list[dict[str, Any]], int]:
        """(a list or the requested part of it, the length of the whole list)."""
        headers, pieces = self.open_stream(path)
        items = list(load_json(b"".join(pieces)))
        return items, int(headers.get("total-count", len(items)))

    def open_stream(self, path: str, accept: str = "") -> tuple[Mapping[str, str], Iterator[bytes]]:
        """(a reply's headers, its pieces as they arrive; they may be silent for as long as the peer is there).

        Raises: the service's error; unavailable, also later, when the connection breaks.
        """
        def begin() -> Answer:
            answer = self.send("GET", path, accept=accept, is_stream=True)
            if answer.status >= 400:
                read_answer(answer)
            return answer

        def pieces() -> Iterator[bytes]:
            try:
                yield from answer.pieces
            except (OSError, ValueError) as error:
                raise self.describe_loss(f"GET {path}", error) from None

        answer = self.repeat(f"GET {path}", begin)
        return answer.headers, pieces()

    def repeat(self, what: str, act: Callable[[], T], is_repeatable: bool = True) -> T:
        """Call `act`; repeat it while the connection fails, if it may run twice or nothing was sent.

        Raises: unavailable.
        """
        give_up_at = time.monotonic() + self.retry_timeout_s
        while True:
            try:
                result = act()
                self.retry_timeout_s = RETRY_TIMEOUT_S
                return result
            except (OSError, ValueError) as error:
                is_safe = is_repeatable or isinstance(error, NOT_SENT)
                if not is_safe or not isinstance(error, OSError) or time.monotonic() > give_up_at:
                    hint = "" if is_safe else "it may have been done or not: look before you repeat it"
                    raise self.describe_loss(what, error, hint) from None
            time.sleep(0.1)                             # the supervisor restarts it

    def describe_loss(self, what: str, error: Exception, hint: str = "") -> NexusError:
        if not isinstance(error, OSError):
            return describe_stranger(self.url, format_line(str(error), 100))
        usual = "nexus start" if self.layout else "check NEXUS_URL, and whether nexus runs there"
        if "CERTIFICATE" in str(error):
            usual = "SSL_CERT_FILE=cert.pem trusts a certificate of your own"
        reason = getattr(error, "strerror", None) or error or "it was closed"
        asked = what.partition("?")[0]
        return NexusError("unavailable", f"{asked}: the connection to the service at {self.url} was lost ({reason})",
                          hint or usual)

    def connect(self) -> socket.socket:
        """Raises: OSError; forbidden, for another user's program; unavailable, when api.sock was deleted."""
        if self.layout:
            running = find_service(self.layout)
            if not running:
                raise ConnectionRefusedError("it does not run")
            try:
                return connect_to_own(self.layout, ANSWER_TIMEOUT_S)
            except FileNotFoundError:
                if find_service(self.layout) != running:
                    raise                               # else it lives, and has not just ended
                raise NexusError("unavailable", f"the service cannot be reached: {self.layout.socket_file} is gone",
                                 hint=f"kill {running['pid']} ends it, and the next command starts it anew; "
                                 "jobs go on") from None
        connection = socket.create_connection((self.host, self.port), ANSWER_TIMEOUT_S)
        try:
            watch_line(connection, ANSWER_TIMEOUT_S)
            if self.is_secure:
                import ssl
                return ssl.create_default_context().wrap_socket(connection, server_hostname=self.host)
            self.check_listener(connection)
            return connection
        except BaseException:
            connection.close()
            raise

    def check_listener(self, connection: socket.socket) -> None:
        """Check whose program has the other end, if that is on this machine.

        Raises: forbidden, when it is no owner's; ConnectionError, when it cannot be known.
        """
        here, there = unmap(connection.getsockname()[:2]), unmap(connection.getpeername()[:2])
        if not is_loopback(there[0]) and there[0] != here[0]:
            return
        give_up_at = time.monotonic() + OWNER_TIMEOUT_S
        while (uid := find_socket_uid(there, here)) is None:        # it has not accepted the connection yet
            if time.monotonic() > give_up_at:
                raise ConnectionError("it did not accept the connection")
            time.sleep(0.001)
        user = find_user(uid)
        # Without a name in NEXUS_URL: one's own programs, as ssh -L is, and root's.
        if user != self.owner if self.owner else uid not in (os.geteuid(), 0):
            raise NexusError("forbidden",
                             f"port {there[1]} on {there[0]} belongs to a program of {user}: nothing was sent to it",
                             hint=f"if you mean the nexus of {user}: NEXUS_URL="
                                  + re.sub("//(.*@)?", f"//{user}@", self.url))

    def send(self, method: str, path: str, content: bytes = b"", key: str = "", accept: str = "",
             is_stream: bool = False) -> Answer:
        """One request on a new connection.  Raises: as connect() and send_request()."""
        host, connection = f"[{self.host}]" if ":" in self.host else self.host, self.connect()
        answer = send_request(connection, method, path, {
            "Host": f"{host}:{self.port}" if self.port else host, "Idempotency-Key": key, "Accept": accept,
            "Authorization": f"Bearer {self.token}" if self.token else ""}, content)
        if is_stream:
            connection.settimeout(None)
        return answer

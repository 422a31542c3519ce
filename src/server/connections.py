"""Connections: how many there may be, whose they are, how long they may take."""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Callable, Iterator

from ..machine.clock import Clock
from ..service.access import Identity
from ..service.log_watch import LOG_LOOK_S
from ..values.errors import NexusError

MAX_HEAD_BYTES = 2**16                  # of a request or a reply of HTTP
# Over TCP.  All limits together leave descriptors for jobs, of the usual 1024.
MAX_UNKNOWN = 256                       # connections whose user is not known yet
MAX_CONNECTIONS = 256                   # so many of the owner, and so many of all others
MAX_USER_CONNECTIONS = 128              # of another user
USER_ROOM = 8                           # each other user has so many, however many there are in all
ROOM_WAIT_S = 5.0                       # how long a request waits for the end of others
LEAST_TIME_S = 1.0                      # before a newer connection from the same source may replace it
MAX_FORMS = 8                           # of unknown users, read at once: the token may stand in the form alone
MAX_BODIES = 4                          # of these from one source; and so many large bodies of a user
SMALL_FORM_BYTES = 65536                # a smaller form, and a smaller body, are not counted
SMALL_BODY_BYTES = 2**20
UNKNOWN_TIMEOUT_S = 10.0                # for a head, and the handshake of TLS before it
REQUEST_TIMEOUT_S = 30.0                # for a body besides its bytes; for the reply to somebody unknown
BODY_BYTES_PER_S = 65536                # a body that is slower than this is refused


class Connections:
    """The open TCP connections.  Each is unknown at first; a request that shows its user makes it that user's.

    Unknown ones have little room, for seconds, and none of the users'.  No user can take all of that.
    """

    def __init__(self, clock: Clock) -> None:
        import threading
        self.clock, self.lock = clock, threading.Lock()
        self.unknown: dict[socket.socket, tuple[str, float, float]] = {}    # {of nobody yet: (source, since, until)}
        self.users: dict[socket.socket, str] = {}                       # {a user's: the user; "": the owner}
        self.bodies: dict[socket.socket, str] = {}                      # {of a large body: the user, or the source}

    def admit(self, connection: socket.socket, source: str) -> bool:
        """Whether there is room for a new connection.  If not, the oldest one from the most frequent source is closed.

        If that is this source, and was opened just now, the new one is refused: that costs less than a thread.
        """
        from collections import Counter
        now = self.clock.monotonic()
        with self.lock:
            others = {each: place for each, (place, *_) in self.unknown.items() if each not in self.bodies}
            if len(others) >= MAX_UNKNOWN:
                counts = Counter(others.values())
                oldest = max(others, key=lambda each: counts[others[each]])         # the first of them
                if others[oldest] == source and self.unknown[oldest][1] > now - LEAST_TIME_S:
                    return False
                self.close(oldest)
            self.unknown[connection] = source, now, now + UNKNOWN_TIMEOUT_S
            return True

    def close(self, connection: socket.socket) -> None:
        del self.unknown[connection]                # now: it must not be chosen a second time
        with contextlib.suppress(OSError):          # its thread notices
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def close_overdue(self) -> None:
        now = self.clock.monotonic()
        with self.lock:
            for connection in [each for each, (*_, close_at) in self.unknown.items() if now > close_at]:
                self.close(connection)

    def prolong(self, connection: socket.socket, time_s: float) -> None:
        """Give an unknown connection so much time from now on."""
        with self.lock:
            if connection in self.unknown:
                self.unknown[connection] = *self.unknown[connection][:2], self.clock.monotonic() + time_s

    def remove(self, connection: socket.socket) -> None:
        with self.lock:
            for table in (self.unknown, self.users, self.bodies):
                table.pop(connection, None)

    def identify(self, connection: socket.socket, caller: Identity) -> None:
        """Count a connection as the caller's.  Raises: unavailable, when there is no room for it."""
        self.wait_for_room(lambda: self.take_room(connection, "" if caller.is_owner else caller.user), NexusError(
            "unavailable", f"{caller.user} has as many connections as there is room for",
            hint="end some, like `nexus logs -f` and `nexus wait`, or try again soon"))

    def wait_for_room(self, take: Callable[[], bool], error: NexusError) -> None:
        """Wait until `take` was successful.  Raises: `error`, when that takes too long."""
        give_up_at = self.clock.monotonic() + ROOM_WAIT_S
        while not take():
            if self.clock.monotonic() > give_up_at:
                raise error
            self.clock.sleep(LOG_LOOK_S)            # others are not woken up all at once

    def take_room(self, connection: socket.socket, user: str) -> bool:
        """Whether a connection counts as the user's now."""
        with self.lock:
            users = list(self.users.values())
            own, others = users.count(user), len(users) - users.count("")
            is_full = own >= MAX_USER_CONNECTIONS or (own >= USER_ROOM and others >= MAX_CONNECTIONS)
            if connection not in self.unknown:      # it came by api.sock, counts already, or has just been closed
                return True
            if is_full if user else own >= MAX_CONNECTIONS:
                return False
            del self.unknown[connection]
            self.users[connection] = user
            return True

    @contextlib.contextmanager
    def read_body(self, connection: socket.socket, size: int) -> Iterator[float]:
        """Have room for a body; yield the seconds that it may take besides its bytes.  Raises: unavailable."""
        grace_s = UNKNOWN_TIMEOUT_S if connection in self.unknown else REQUEST_TIMEOUT_S
        self.wait_for_room(lambda: self.take_body(connection, size), NexusError(
            "unavailable", "others send as much as may be sent at once",
            hint="try again; a form with the token in its head too, Authorization: Bearer, waits for no strangers"))
        try:
            self.prolong(connection, grace_s + size / BODY_BYTES_PER_S + REQUEST_TIMEOUT_S)
            yield grace_s
        finally:
            with self.lock:
                self.bodies.pop(connection, None)

    def take_body(self, connection: socket.socket, size: int) -> bool:
        """Whether a body may be read now.  That of the owner may; and small ones."""
        with self.lock:
            source, user = self.unknown.get(connection, ("", 0))[0], self.users.get(connection, "")
            if size <= (SMALL_FORM_BYTES if source else SMALL_BODY_BYTES) or not (source or user):
                return True
            who, reading = source or f"{user}'s", list(self.bodies.values())
            form_count = sum(each in self.unknown for each in self.bodies)
            if reading.count(who) >= MAX_BODIES or (source and form_count >= MAX_FORMS):
                return False
            self.bodies[connection] = who
            return True


class HeadReader(io.BufferedReader):
    """Reads what comes on a connection: lines of a head, up to a limit, and then its body."""
    head_bytes_left = MAX_HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        import http.client
        if self.head_bytes_left <= 0:
            raise http.client.LineTooLong("head")
        line = super().readline(min(size or 0, self.head_bytes_left))
        self.head_bytes_left -= len(line)
        return line

"""The addresses and sockets where requests arrive.

`nexus restart` listens on a new address before the old service ends, and gives the sockets to the new one: nobody
takes the address in between.  Where the old service has the address, the new one opens it after the old one's end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping

from ..formats.codec import encode_json
from ..machine.disk import Disk, disk_errors, find_status, remove_file
from ..machine.layout import Layout
from ..machine.peers import LOOPBACK, find_port_users, find_socket_uid, unmap, watch_line
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.text import load_json
from .api import Api
from .connections import Connections
from .handler import IDLE_TIMEOUT_S, Handler, find_peer_uid
from .routes import SOCKET_PEER

if TYPE_CHECKING:
    import ssl
    from typing import Any

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer
else:                               # the service adds it: importing http.server would cost each command 25 ms
    ThreadingHTTPServer = object

ACCEPTERS = 4                           # threads that accept at each address: each waits for the interpreter many times
ACCEPT_PAUSE_S = 0.1                    # after a failed accept, as when no descriptor is left


def listen(host: str, port: int, given: Mapping[str, socket.socket] = {},
           former_port: int | None = None, is_needed: bool = True) -> dict[str, socket.socket]:
    """Listen on `host` and on everything that localhost may lead to, or on nothing; return {address: its socket}.

    `given`: sockets that listen already, by address.  `former_port`: of this user's service that is about to end;
    what it has of these addresses is left out.  Not `is_needed`: so is `host`, if this machine does not have it.
    Another user with such an address could answer http://localhost in the owner's browser.  That page's requests to
    nexus would come from nexus's own address, and could not be told from the owner's.
    Raises: conflict, naming who has the port; usage, when there is no such address.
    """
    import errno
    first = address = LOOPBACK[0] if host == "localhost" else host
    unused, sockets, covered = dict(given), dict[str, socket.socket](), tuple[str, ...]()
    try:
        for address in (first, *LOOPBACK):
            if address in covered:
                continue
            try:
                sockets[address] = unused.pop(address) if address in unused else listen_on(address, port)
            except OSError as error:
                is_held = (error.errno == errno.EADDRINUSE and port == former_port
                           and find_socket_uid((address, port), None) in (None, os.geteuid()))
                # None: of 0.0.0.0 or ::, or of a name, it has a part.
                # A machine without IPv6 has no ::1, and neither has anybody else there.
                is_missing = (error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
                              or isinstance(error, socket.gaierror)) and (address != first or not is_needed)
                if not is_held and not is_missing:
                    raise
            if address == first:
                name, port = unmap(sockets[first].getsockname()[:2]) if sockets else (first, port)
                covered = {"0.0.0.0": LOOPBACK[:1], "::": LOOPBACK}.get(name, (name,))      # `::` takes IPv4 too
        return sockets
    except (OSError, OverflowError, TypeError, ValueError) as error:            # or a name that cannot be looked up
        for listener in sockets.values():       # before it is looked up who has the port
            listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            users = find_port_users(port, address)
            raise NexusError("conflict", f"port {port} on {address} is in use" + (f" by {users}" if users else ""),
                             hint="set another one: nexus config edit, [service] port") from None
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]
        raise NexusError("usage", f"cannot listen on {address}, port {port}: {reason}",
                         hint="nexus config edit, [service] host and port") from None
    finally:
        for listener in unused.values():
            listener.close()


def listen_on(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024,
                                dualstack_ipv6=":" in address and address != LOOPBACK[1])


MAX_SOCKET_PATH = 107           # bytes: the kernel's limit


def open_socket_path(path: str) -> tuple[str, int]:
    """(a socket path that the kernel takes, the descriptor of its folder that it needs, or -1).  Raises: OSError."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path, -1
    folder = os.open(os.path.dirname(path), os.O_PATH)
    return f"/proc/{os.getpid()}/fd/{folder}/{os.path.basename(path)}", folder


def listen_to_own(disk: Disk, layout: Layout) -> tuple[socket.socket, str]:
    """(api.sock for the owner's programs, the path by which they reach it).  Raises: unavailable."""
    return listen_at(disk, layout.socket_file)


def listen_at(disk: Disk, path: str) -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX)
    with disk_errors("make", path):
        remove_file(disk, path)
        path, _ = open_socket_path(path)                # its descriptor stays open
        listener.bind(path)
        disk.chmod(path, 0o600)
        listener.listen(1024)
    return listener, path


# `nexus restart` listens on a new address before the old service ends, and gives the sockets to the new one: nobody
# takes the address in between.  Where the old service has the address, the new one opens it after the old one's end.

OFFER_TIMEOUT_S = 5.0


@contextlib.contextmanager
def offer_sockets(disk: Disk, layout: Layout, sockets: Mapping[str, socket.socket]) -> Iterator[None]:
    """Give sockets, {address: socket}, to the service that starts in the block.  Raises: unavailable."""
    import threading
    if not sockets:
        yield
        return
    listener, _ = listen_at(disk, layout.offer_file)

    def give() -> None:
        # To each that asks: one that a former supervisor has just started may ask first, and see that it is not wanted.
        with contextlib.suppress(OSError):          # it is closed
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    handles = [each.fileno() for each in sockets.values()]
                    socket.send_fds(connection, [encode_json(list(sockets)).encode()], handles)

    threading.Thread(target=give, daemon=True).start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)     # so that give() ends
        for each in (listener, *sockets.values()):
            each.close()
        remove_file(disk, layout.offer_file)


def take_offered(disk: Disk, layout: Layout, port: int) -> dict[str, socket.socket]:
    """What a `nexus restart` offers: {address: a socket that listens there, on this port}."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(OFFER_TIMEOUT_S)
        if find_status(disk, layout.offer_file):
            line.connect(open_socket_path(layout.offer_file)[0])
            if find_peer_uid(line, None) != os.geteuid():
                return {}
            text, handles, *_ = socket.recv_fds(line, 4096, 8, socket.MSG_CMSG_CLOEXEC)
            found = zip(load_json(text.decode()), [socket.socket(fileno=handle) for handle in handles])
            return {address: listener for address, listener in found if listener.getsockname()[1] == port}
    return {}


class Listener(ThreadingHTTPServer):
    """One of the threads that accept at an address.  Each connection has a thread."""
    daemon_threads = True

    def __init__(self, server: Server, listening: socket.socket, handler: type[Handler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()                         # the one that http.server made
        self.socket, self.server, self.api = listening, server, server.api
        listening.setblocking(False)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except BlockingIOError:                     # another thread has accepted it
            raise
        except OSError:                             # as when no descriptor is left
            self.api.service.clock.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        peer, uid = SOCKET_PEER, find_peer_uid(request, client_address)
        if request.family != socket.AF_UNIX:
            peer = unmap(client_address[:2])[0]
            watch_line(request, IDLE_TIMEOUT_S)
            if self.server.tls:                     # the handshake comes with the first read
                request = self.server.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            if not self.server.connections.admit(request, name_source(peer, uid)):
                request.close()
                return
        super().process_request(request, (peer, uid))

    def service_actions(self) -> None:
        self.server.connections.close_overdue()

    def shutdown_request(self, request: Any) -> None:
        self.server.connections.remove(request)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):         # else: the caller has gone
            self.api.service.fail("a connection", error)


class Server:
    """Listens on the port and on the owner's socket."""

    def __init__(self, api: Api, host: str, port: int, tls: ssl.SSLContext | None = None,
                 is_needed: bool = True) -> None:
        """Raises: conflict, when the port is taken; usage, when there is no such address and it `is_needed`."""
        import http.server
        self.api, self.tls = api, tls
        offered = take_offered(api.service.disk, api.service.layout, port)
        found = listen(host, port, offered, is_needed=is_needed)
        sockets = list(found.values())
        self.port: int = sockets[0].getsockname()[1]
        self.host = host if host == "localhost" or host in found else LOOPBACK[0]
        own, self.socket_path = listen_to_own(api.service.disk, api.service.layout)
        self.connections = Connections(api.service.clock)
        handler = type("Handler", (Handler, http.server.BaseHTTPRequestHandler), {})
        listener = type("Listener", (Listener, http.server.ThreadingHTTPServer), {})
        self.listeners: list[Listener] = [
            listener(self, each.dup() if number else each, handler)
            for each in (*sockets, own) for number in range(ACCEPTERS)]

    def serve(self) -> None:
        import threading
        for listener in self.listeners:
            threading.Thread(target=listener.serve_forever, name="http", daemon=True).start()


def name_source(peer: str, uid: int | None) -> str:
    """Where a connection is from: a user of this machine, an address, or of IPv6 a network, as one host has that."""
    if uid is not None:
        return f"uid {uid}"
    with contextlib.suppress(OSError):
        return socket.inet_pton(socket.AF_INET6, peer.partition("%")[0])[:8].hex()
    return peer

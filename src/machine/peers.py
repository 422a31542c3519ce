"""The other end of a connection: whose socket it is, and whether it is still there."""

from __future__ import annotations

import contextlib
import socket

from .disk import find_user

# Source: include/net/tcp_states.h.
LOOPBACK = ("127.0.0.1", "::1")         # what localhost may resolve to
TCP_ESTABLISHED, TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_CLOSE_WAIT, TCP_LISTEN = 1, 4, 5, 8, 10


def find_socket_uid(source: tuple[str, int], destination: tuple[str, int] | None) -> int | None:
    """The uid of the TCP socket at `source` connected to `destination` (None: of the listening one); None: it has none.

    A socket that only reads any more has one; that which no process has open any more has none.
    It reads the kernel's socket table, as `ss` does.  Source: sock_diag(7), linux/inet_diag.h.
    """
    import struct
    states = (TCP_LISTEN,) if destination is None else (TCP_ESTABLISHED, TCP_FIN_WAIT1, TCP_FIN_WAIT2)
    wanted = sum(1 << state for state in states)
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    peer = destination or (("::" if ":" in source[0] else "0.0.0.0"), 0)
    with contextlib.suppress(OSError):          # out of descriptors; or no numeric address: a name, or fe80::1%eth0
        request = struct.pack(                  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST
            "=IHHIIBBBxIHH16s16sIII", 72, 20, 1, 1, 0, family, socket.IPPROTO_TCP, 0, wanted,
            socket.htons(source[1]), socket.htons(peer[1]), socket.inet_pton(family, source[0]),
            socket.inet_pton(family, peer[0]),
            1, 2**32 - 1, 2**32 - 1)            # 1 is lo: include sockets bound to that device
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as netlink:         # NETLINK_SOCK_DIAG
            netlink.settimeout(2.0)
            netlink.send(request)
            answer = netlink.recv(8192)
        if struct.unpack_from("=H", answer, 4)[0] != 2:                                 # NLMSG_ERROR: no such socket
            found_state, uid, inode = answer[17], *struct.unpack_from("=II", answer, 16 + 4 + 48 + 12)
            return uid if found_state in states and (inode or found_state == TCP_LISTEN) else None
    return None


def find_port_users(port: int, *addresses: str) -> str:
    """Who listens on a port at these addresses, or at what localhost may lead to: `ann or bob`; "" for nobody."""
    holders = [find_socket_uid((host, port), None) for host in (*addresses, "0.0.0.0", "::", *LOOPBACK)]
    return " or ".join(sorted({find_user(uid) for uid in holders if uid is not None}))


def is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def unmap(address: tuple[str, int]) -> tuple[str, int]:
    """An IPv4 address that an IPv6 socket reports, as IPv4."""
    return (address[0][7:] if address[0].startswith("::ffff:") and "." in address[0] else address[0]), address[1]


def watch_line(line: socket.socket, timeout_s: float) -> None:
    """Detect a TCP peer that is off, asleep or cut off, even while nothing is sent."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in ((socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, max(1, int(timeout_s))),
                           (socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))):       # for data that is not acknowledged
        line.setsockopt(socket.IPPROTO_TCP, option, number)

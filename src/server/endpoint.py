"""The address of a service: its port, TLS and the token of its owner."""

from __future__ import annotations

import os
from collections.abc import Callable
from shlex import quote

from ..formats.codec import encode_json
from ..machine.disk import (
    CONFIG_BYTES,
    Disk,
    read_json,
    read_text,
    read_whole,
    write_atomic,
)
from ..machine.layout import Layout
from ..machine.peers import is_loopback
from ..opening import TYPE_CHECKING
from ..values.config import PORTS, ServiceConfig
from ..values.errors import NexusError
from ..values.schema import fits_alone
from ..values.text import guess_number
from ..values.value import is_given

if TYPE_CHECKING:
    import ssl

    from ..opening import T


def find_port(disk: Disk, layout: Layout, config: ServiceConfig) -> int | None:
    """The port that the service must have: that of the configuration, else of the first start; None: it chooses one.

    None is chosen where other machines call: they know it.  Raises: unavailable.
    """
    if is_given(config, "port") or not is_loopback(config.host):
        return config.port
    kept = guess_number((read_text(disk, layout.port_file) or "").strip())
    return int(kept) if fits_alone(ServiceConfig.FIELDS["port"].schema, kept) else None


def keep_port(disk: Disk, layout: Layout, config: ServiceConfig, port: int, now: float) -> None:
    """Have the same one at each start, if it was chosen, and remember the former one.  Raises: unavailable."""
    former = find_port(disk, layout, config)
    if former == port:
        return
    if former is not None:
        write_atomic(disk, layout.moved_file, [encode_json({"former": former, "port": port, "at": now}) + "\n"])
    write_atomic(disk, layout.port_file, [f"{port}\n"])


def find_former_port(disk: Disk, layout: Layout, port: int, now: float) -> int | None:
    """The port that the service had before this one, for MOVED_S after the change; None: it has not changed."""
    moved = read_json(disk, layout.moved_file) or {}
    former, at = moved.get("former"), moved.get("at")
    if not (isinstance(former, int) and isinstance(at, (int, float)) and moved.get("port") == port):
        return None
    return former if now - at < MOVED_S else None


MOVED_S = 7 * 86400.0           # for so long it is told that the port has changed


def open_port(disk: Disk, layout: Layout, config: ServiceConfig, act: Callable[[int], T], may_move: bool = True) -> T:
    """act(port), which listens there: on the port that the service must have, or else on the first that is free.

    `may_move`: from a port that nobody configured and somebody has, to another one.
    Raises: conflict, with what chooses another one; as `act`.
    """
    port = find_port(disk, layout, config)
    is_chosen = not is_given(config, "port") and is_loopback(config.host)
    others = [each for each in PORTS if each != port] if port is None or (is_chosen and may_move) else []
    for each in (*([] if port is None else [port]), *others):
        try:
            return act(each)
        except NexusError as error:
            if error.kind != "conflict" or not is_chosen:
                raise
            last = error
    if others:
        raise NexusError("conflict", f"all ports from {PORTS[0]} to {PORTS[-1]} are in use", last.hint)
    raise NexusError("conflict", last.message,
                     hint=f"rm {quote(layout.port_file)} has the next start choose another one")


def load_tls(disk: Disk, config: ServiceConfig) -> ssl.SSLContext | None:
    """The context for https; None for http.  Raises: usage."""
    if not config.tls_cert and not config.tls_key:
        return None
    import ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cert, key = [os.path.abspath(os.path.expanduser(path)) for path in (config.tls_cert, config.tls_key)]
    try:
        for path in (cert, key):
            read_whole(disk, path, CONFIG_BYTES)        # ssl itself waits for a pipe
        context.load_cert_chain(cert, key, lambda: "")
    except (OSError, ValueError) as error:              # SSLError is an OSError
        files = f"tls_cert {config.tls_cert} and tls_key {config.tls_key}"
        reason = getattr(error, "strerror", None) or error
        raise NexusError("usage", f"[service] {files} cannot be used: {reason}",
                         hint="both must be PEM files that can be read, of one key, without a passphrase") from None
    return context


def read_token(disk: Disk, layout: Layout) -> str | None:
    """The owner's token; None: there is none yet.  Raises: unavailable."""
    token = (read_text(disk, layout.token_file) or "").strip()
    return token if len(token) >= 16 else None


def keep_token(disk: Disk, layout: Layout, token: str) -> None:
    """Write the owner's token, unless there is one.  Raises: unavailable."""
    if read_token(disk, layout) is None:
        write_atomic(disk, layout.token_file, [token + "\n"])

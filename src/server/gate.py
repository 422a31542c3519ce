"""Who may call: tokens, hosts, origins, and how much at once."""

from __future__ import annotations

import json
import os
import re
import socket
import time

from ..machine.clock import Clock
from ..machine.peers import is_loopback
from ..machine.tokens import read_tokens
from ..service.access import Identity
from ..service.log_watch import LOG_LOOK_S
from ..service.service import Service
from ..values.errors import NexusError
from ..values.text import format_line, hash_text
from .routes import SOCKET_PEER, Request

WRONG_TOKEN_DELAY_S = 0.3
REFUSAL_INTERVAL_S = 60.0
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
FORWARDING = (                          # headers that proxies and tunnels add
    "forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "x-forward-for",
    "x-original-forwarded-for", "client-ip", "x-cluster-client-ip", "fly-client-ip", "tailscale-user-login")
LOOK_FACTOR = 10                        # requests of a user that are held look for a tenth of the time at most
MAX_LOOK_S, MAX_LOOK_PAUSE_S = 0.05, 3.0        # of one look, this much counts
MAX_SEARCHES = 2                        # in logs, at once


class Gate:
    """Decides who calls: by the token or the kernel; and refuses what another site's page sends."""

    def __init__(self, service: Service, token: str) -> None:
        """`token`: the owner's."""
        self.service, self.token, self.config = service, token, service.config.service
        self.refusal_logged_at, self.unlogged_refusals = float("-inf"), 0

    def check_site(self, request: Request) -> None:
        """Refuse requests that another site's page makes in the owner's browser.  Raises: forbidden."""
        host_header = request.headers.get("host", "")
        name = request.host_name
        is_ip = re.fullmatch(r"[\d.]+|\[[0-9a-f:.]+\]", name) is not None
        names = [host.lower() for host in (*LOCAL_HOSTS, *self.config.allowed_hosts, self.config.host)]
        own = [each.lower().partition(".")[0] for each in (self.service.node, socket.gethostname())]  # it may change
        is_own = not is_loopback(self.config.host) and (is_ip or name.partition(".")[0] in own)
        if name not in names and not is_own:
            raise NexusError("forbidden",
                             f"the Host '{format_line(host_header, 60)}' is not one by which nexus may be called",
                             hint="its owner can allow it: [service] allowed_hosts = "
                                  f"[{json.dumps(format_line(name, 60))}]; "
                                  "on this machine call it 127.0.0.1")
        is_change = request.method not in ("GET", "HEAD")
        own_sites = (f"http://{host_header}".lower(), f"https://{host_header}".lower())
        for header in ("origin", "referer") if is_change else ("origin",):
            site = request.headers.get(header)
            if site is not None and "/".join(site.lower().split("/")[:3]) not in own_sites:
                raise NexusError("forbidden", f"the {header.title()} '{format_line(site, 60)}' is another site's", "")
        # Another site's page cannot read a reply, but can tell whether it is an error; not so in a window of its own.
        kind = [request.headers.get(f"sec-fetch-{name}") for name in ("mode", "dest")]
        is_link = not is_change and kind == ["navigate", "document"]
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_link:
            raise NexusError("forbidden", "another site's page sent this", hint="")

    def identify(self, request: Request, token: str | None = None) -> Identity:
        """Find the caller, whose the connection is from now on.  `token`: the one in its form.

        Raises: unauthorized; unavailable, when the caller has too many connections.
        """
        caller = self.find_caller(request) if token is None else self.find_bearer(token, request)
        if request.identify:
            request.identify(caller)
        return caller

    def find_caller(self, request: Request) -> Identity:
        """The caller: of its token, or else the one that the kernel names.  Raises: unauthorized."""
        given = request.headers.get("authorization")
        if given is not None:
            bearer = re.fullmatch(r"[Bb]earer +(\S+)", given)
            return self.find_bearer(bearer[1] if bearer else "", request)
        is_here = is_loopback(request.peer)
        where = f"the owner's is in {self.service.layout.token_file}, others'" if is_here else (
            f"{self.service.user} makes it")
        hint = f"send Authorization: Bearer TOKEN; {where}: nexus token create USER"
        forwarded = [name for name in request.headers if name in FORWARDING or name.startswith("x-forwarded-")]
        if forwarded:
            raise self.describe_caller(request, f"a forwarded request ({forwarded[0]}) needs a token", hint)
        if request.host_name not in LOCAL_HOSTS:
            host_header = format_line(request.headers.get("host", ""), 60)
            raise self.describe_caller(request, f"a request to {host_header} needs a token", hint)
        if not is_loopback(self.config.host) and request.peer != SOCKET_PEER:
            raise self.describe_caller(
                request, f"nexus listens on {self.config.host}, so every request needs a token", hint)
        if request.uid != os.geteuid() or not is_loopback(request.peer):
            raise self.describe_caller(
                request, f"only {self.service.user}, on this machine, may call without a token", hint)
        return self.service.owner

    def describe_caller(self, request: Request, message: str, hint: str) -> NexusError:
        """Why a caller is refused; another user of this machine may have meant a nexus of his own."""
        if request.uid not in (None, os.geteuid()):
            message = f"this is the nexus of {self.service.user}: {message}"
            hint = f"{hint}; nexus open prints the address of your own"
        return NexusError("unauthorized", message, hint)

    def find_bearer(self, text: str, request: Request) -> Identity:
        """The owner of a token.  Wrong tokens all take the same time.  Raises: unauthorized."""
        import hmac
        if hmac.compare_digest(text.encode(), self.token.encode()):
            return Identity(self.service.user, f"{self.service.user} (token, {request.peer})")
        tokens = read_tokens(self.service.disk, self.service.layout.tokens_file)
        token = tokens.get(hash_text(text))             # hashed: its time tells nothing
        if token and token.is_good(self.service.clock.now()):
            return Identity(token.user, f"{token.user} (token, {request.peer})", False, token.sha256)
        self.service.clock.sleep(WRONG_TOKEN_DELAY_S)
        raise self.describe_caller(
            request, "the token is not right", hint=f"{self.service.user} makes them: nexus token create USER")

    def check_token(self, caller: Identity) -> None:
        """Raises: unauthorized, when the caller's token is good no more."""
        if caller.sha256:
            token = read_tokens(self.service.disk, self.service.layout.tokens_file).get(caller.sha256)
            if not (token and token.is_good(self.service.clock.now())):
                raise NexusError(
                    "unauthorized", f"{caller.user}'s token was good until now; it was revoked, or has expired")

    def log_refusal(self, text: str) -> None:
        """Log one refusal in REFUSAL_INTERVAL_S: anybody can cause them.  Its line counts those that have none."""
        now = self.service.clock.monotonic()
        if now < self.refusal_logged_at + REFUSAL_INTERVAL_S:
            self.unlogged_refusals += 1
            return
        count, self.unlogged_refusals, self.refusal_logged_at = self.unlogged_refusals, 0, now
        self.service.log.warning("%s%s", text, f" ({count} more since the last such line)" if count else "")


class PollThrottle:
    """When requests that are held look for something new.

    Those of one user together look for a tenth of the time, however many they are; no other user's wait for that.
    """

    def __init__(self, clock: Clock) -> None:
        import threading
        self.clock, self.lock = clock, threading.Lock()
        self.free_at: dict[str, float] = {}         # {user: when another look may begin}

    def charge(self, user: str, used_s: float) -> float:
        """Add the CPU time of a look; return how long the user's next one has to wait."""
        with self.lock:
            now = self.clock.monotonic()
            self.free_at[user] = max(now, self.free_at.get(user, now)) + LOOK_FACTOR * min(used_s, MAX_LOOK_S)
            return min(self.free_at[user] - now, MAX_LOOK_PAUSE_S)


class HeldRequest:
    """A request that is held: its looks.  All are by one thread."""

    def __init__(self, throttle: PollThrottle, caller: Identity) -> None:
        self.throttle, self.user, self.began_s = throttle, caller.user, time.thread_time()

    def charge(self) -> float:
        return self.throttle.charge(self.user, time.thread_time() - self.began_s)

    def pause(self, least_s: float = LOG_LOOK_S) -> None:
        """Wait for the next look."""
        self.throttle.clock.sleep(max(least_s, self.charge()))
        self.began_s = time.thread_time()


class SearchLimit:
    """Who searches in logs: MAX_SEARCHES at once."""

    def __init__(self) -> None:
        import threading
        self.searches, self.lock = set[object](), threading.Lock()

    def begin(self, search: object) -> None:
        """Raises: unavailable, when others search already."""
        with self.lock:
            if len(self.searches) >= MAX_SEARCHES:
                raise NexusError("unavailable", f"{MAX_SEARCHES} searches in logs run already", hint="try again soon")
            self.searches.add(search)

    def end(self, search: object) -> None:
        self.searches.discard(search)

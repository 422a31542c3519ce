"""How a request is answered: who calls, which route it is, and what all routes need.

Api.handle() decides everything, with a request as a value.  localhost is no boundary: a caller is the owner if the
kernel says that the socket at the other end is the owner's, or with the owner's token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .. import text_of
from ..machine.disk import find_user
from ..machine.log_reader import LineCounts
from ..opening import TYPE_CHECKING
from ..service.access import Identity, find_own_job
from ..service.service import Service
from ..values.errors import NexusError
from ..values.job import Job
from ..values.text import format_line
from ..values.value import replace
from .gate import Gate, HeldRequest, PollThrottle, SearchLimit
from .routes import Request, Response, error_response, json_response, match_route, page_response, read_arguments

if TYPE_CHECKING:
    import threading

MAX_USER_BODY_BYTES = 8 * 2**20         # with a user's token
USER_TURNS = 4                          # so many requests of a user are worked out at once; further ones wait
WORKER_SCRIPT = text_of("worker.js")


class Api:
    """Answers requests by the routes, which are functions with an Api as their first argument."""

    def __init__(self, service: Service, token: str, page: str = "") -> None:
        """`token`: the owner's.  `page`: for browsers at /; without it they get JSON as others do."""
        self.service, self.page, self.gate = service, page, Gate(service, token)
        self.throttle, self.search_limit = PollThrottle(service.clock), SearchLimit()
        self.turns: dict[str, threading.Semaphore] = {}         # {user: how many more may be worked out}
        self.line_counts = LineCounts(service.disk)
        self.openapi: Response | None = None                        # cached after the first request

    def handle(self, request: Request) -> Response:
        if request.headers.get("service-worker") == "script":
            return Response(200, WORKER_SCRIPT.encode(), "text/javascript",
                            {"Cache-Control": "no-store", "Service-Worker-Allowed": "/"})
        who: Identity | None = None
        try:
            self.gate.check_site(request)
            accepted = request.headers.get("accept", "").lower()
            if (self.page and request.path == "/" and request.method in ("GET", "HEAD") and "text/html" in accepted
                    and "application/json" not in accepted):
                return page_response(self.page)       # for anyone: it has no data
            endpoint, path_parameters = match_route(request.method, request.path)
            who = None if endpoint.access == "anyone" else self.gate.identify(request)
            caller = who or Identity("", request.peer, is_owner=False)
            if endpoint.access == "owner" and not caller.is_owner:
                raise NexusError("forbidden", f"{endpoint.method} {endpoint.pattern} is for {self.service.user}, "
                                 "whose service this is")
            if not caller.is_owner and "body" in endpoint.arguments and request.body_length > MAX_USER_BODY_BYTES:
                raise NexusError("too_large", f"the body has {request.body_length} bytes; at most "
                                 f"{MAX_USER_BODY_BYTES} are taken with a user's token", "send fewer jobs at once")
            if "body" in endpoint.arguments:            # not in a turn: it may come slowly
                body = request.read_body()
                request = replace(request, read_body=lambda: body)
            with contextlib.nullcontext() if endpoint.access == "anyone" else self.turn_of(caller):
                response = endpoint.handler(self, caller, **read_arguments(request, endpoint, path_parameters))
                if not isinstance(response, Response):
                    response = json_response(response) if endpoint.answer else Response(204)
            if response.stream:
                response = replace(response, stream=self.check_stream(request, caller, response.stream))
            return response
        except Exception as error:
            return error_response(self.note_error(request, error, who))

    def turn_of(self, caller: Identity) -> contextlib.AbstractContextManager[object]:
        """In which a request is worked out: of each user but the owner USER_TURNS at once.

        More would leave little of the interpreter to others, most of all where all their connections are accepted.
        """
        import threading
        return contextlib.nullcontext() if caller.is_owner else self.turns.setdefault(
            caller.user, threading.Semaphore(USER_TURNS))

    def in_turns(self, caller: Identity, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Work out each piece in a turn: none is held while a piece is sent, which may take long."""
        while True:
            with self.turn_of(caller):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def note_error(self, request: Request, error: Exception, caller: Identity | None) -> NexusError:
        """The error for the caller.  Refusals, and faults of nexus, are logged too.  `caller`: None when unknown."""
        asked = f"{format_line(request.method, 20)} {format_line(request.path, 100)}"
        if not isinstance(error, NexusError):
            self.service.fail(f"answering {asked}", error)
            return NexusError("internal", "nexus failed to answer this", hint="nexus logs service")
        if error.http_status in (401, 403):
            peer = f"{request.peer} ({find_user(request.uid)})" if request.uid is not None else request.peer
            self.gate.log_refusal(f"Refused {asked} from {caller.name if caller else peer}: {error.message}")
        return error

    def check_stream(self, request: Request, caller: Identity, stream: Iterator[bytes]) -> Iterator[bytes]:
        """Pass a stream on.  It raises where it ends early, so that nobody takes a part of it for the whole.

        Raises: unauthorized, when the caller's token is revoked meanwhile; internal; the stream's own errors.
        """
        try:
            for piece in stream:
                self.gate.check_token(caller)
                yield piece
        except Exception as error:
            raise self.note_error(request, error, caller) from None

    def find_job(self, id: str, caller: Identity) -> Job:
        """Raises: not_found."""
        return find_own_job(self.service.store.state, id, caller)

    def find_now(self, job: Job) -> Job | None:
        """The job as it is now; None when it is forgotten, though a new one may have its id."""
        now = self.service.store.state.jobs.get(job.id)
        return now if now and now.number == job.number else None

    def reply_when(self, caller: Identity, find_reply: Callable[[], object], timeout_s: float,
                   describe: Callable[[], object]) -> Response:
        """Reply when there is a reply; with another when that takes too long, or when the service ends."""
        def wait() -> Iterator[bytes]:
            clock, held = self.service.clock, HeldRequest(self.throttle, caller)
            give_up_at = clock.monotonic() + timeout_s
            held.pause(0.0)                         # who asks anew at once looks no more often
            while (reply := find_reply()) is None:
                if clock.monotonic() >= give_up_at or self.service.is_stopping:
                    reply = describe()
                    break
                yield b""                           # checks whether the caller is still connected
                held.pause()
            held.charge()
            yield json_response(reply).body

        return Response(200, stream=wait())

"""One exception, and a table of what it means outside.

Whoever finds a fault says what was tried, on what, and why it failed (message), and what to type or check next
(hint). The command line prints both and exits with the kind's code; the server sends them with the kind's HTTP
status; the client raises them again.
"""

from __future__ import annotations

KINDS = {                            # kind: (exit code, HTTP status, what it means)
    "internal": (1, 500, "a fault of nexus itself"),
    "usage": (2, 400, "malformed, or more than there is"),
    "not_found": (3, 404, "there is no such thing"),
    "conflict": (4, 409, "not in its present state"),
    "unauthorized": (5, 401, "no token where one is needed, or a wrong one"),
    "forbidden": (5, 403, "not yours, or a Host or Origin by which nexus may not be called"),
    "unavailable": (6, 503, "not now: the disk refuses, the service has just begun, or too much is asked at once"),
    "queue_full": (6, 429, "no room for further jobs"),
    "method_not_allowed": (2, 405, "not a method of this path"),
    "length_required": (2, 411, "a body needs a Content-Length"),
    "too_large": (2, 413, "the body is too large"),
    "unsupported_media_type": (2, 415, "the body is of another type"),
}


class NexusError(Exception):
    """A fault that somebody can do something about.  `kind` is a key of KINDS."""

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint
        self.exit_code, self.http_status, _ = KINDS[kind]

    def to_json(self) -> dict[str, str]:
        return {"error": self.kind, "message": self.message, "hint": self.hint}


def describe_exception(error: BaseException) -> str:
    """Its type and words.  repr() of a UnicodeError holds all of the text, which may be a job's environment."""
    return f"{type(error).__name__}: {error}"


def decode_error(told: object, otherwise: str = "") -> NexusError:
    """The error that to_json() encoded; `otherwise`: its message if no nexus sent it."""
    told = told if isinstance(told, dict) else {}
    kind = told.get("error")
    return NexusError(kind if isinstance(kind, str) and kind in KINDS else "internal",
                      str(told.get("message", otherwise)), str(told.get("hint", "")))

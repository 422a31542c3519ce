"""Requests, responses, and the table of routes with their parameters."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..formats.codec import encode_json
from ..machine.log_reader import MAX_BAR_BYTES
from ..opening import TYPE_CHECKING
from ..service.access import Identity
from ..values.choice import FILTERS, Choice
from ..values.errors import NexusError
from ..values.gpu import SERIES
from ..values.job import DURATION_TEXT
from ..values.schema import GPU_PLACE, MAX_NAME, NAMED, STRING, check, integer_in, list_of, matching, one_of
from ..values.text import SURROGATES, format_line, parse_duration, parse_json, refuse, suggest
from ..values.value import Field, Value, replace
from ..views.api_json import JOB
from ..views.usage import HISTORY_SINCE, STEPS, USAGE_SINCE

if TYPE_CHECKING:
    from typing import Any

    from ..opening import T

# Every caller may read these fields, so every caller may sort by them.
SORTED_BY = ("created_at", "started_at", "finished_at", "runtime_seconds", "gpus", "user")
MAX_BODY_VALUES = 2 * 10**6             # about: JSON of more holds up all threads while it is parsed
SOCKET_PEER = "localhost"               # the peer of a caller at api.sock; other peers are addresses
STREAMS = ("stdout", "stderr", "both")
NDJSON = "application/x-ndjson"
MAX_SEARCH_BYTES = 2**28                # that one request searches
MAX_CONTEXT = 100                       # lines of a log before one that is found: all are kept


class Request(Value):
    method: str
    path: str                                   # still quoted, with %2F
    query: Mapping[str, Sequence[str]]          # {name: all values}
    headers: Mapping[str, str]                  # {name in lower case: value}
    read_body: Callable[[], bytes]
    peer: str = "127.0.0.1"                     # the caller's address
    uid: int | None = None                      # of the caller's socket, if that is on this machine and known
    body_length: int = 0
    identify: Callable[[Identity], None] | None = None     # counts the connection as the caller's.  Raises: unavailable

    @property
    def host_name(self) -> str:
        """The name by which nexus is called, without the port."""
        return re.sub(r":\d*$", "", self.headers.get("host", "")).lower()


class Response(Value):
    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}
    stream: Iterator[bytes] | None = None       # instead of a body; at an empty piece the connection is checked
    after: Callable[[], None] | None = None     # called when the reply is sent


class Route(Value):
    """A call of the API: the function that answers it, and its description."""
    method: str
    pattern: str
    access: str                                 # "owner"; "user": with a token, for its own jobs; "anyone": without one
    summary: str
    handler: Callable[..., Any]                 # (api, caller, **arguments) -> Response, JSON, or None for 204
    arguments: Sequence[str]                    # "request"; "body", its JSON; "choice"; names of parameters
    parameters: Mapping[str, Field]             # {name in the request: row}
    answer: str                                 # the reply, for make_answer(); "": none, with 204
    body: str                                   # the request's body, in the same form
    statuses: tuple[int, ...]                   # of a good reply


COUNT = integer_in(0, 10**18 - 1)
COUNTS = matching(
    "^-?[0-9]{1,18}(,-?[0-9]{1,18})?$", "a number of bytes, or two with a comma", examples=["0", "100,20"])
QUERY_FLAG = matching("^([Tt]rue|[Ff]alse|1|0|)$", "true or false", examples=["true"])


def parse_offsets(text: str) -> Sequence[int]:
    """(offset in stdout.log, offset in stderr.log); one number counts for both."""
    numbers = [int(number) for number in text.split(",")]
    return numbers if len(numbers) == 2 else numbers * 2


def parse_flag(text: str) -> bool:
    """`?follow` without a value is true."""
    return text.lower() in ("", "true", "1")


PARAMETERS: Mapping[str, Field] = {             # names with a dash are headers; what jobs are chosen by: class Choice
    "id": Field({**NAMED, "examples": ["abc"]}, "the job's id or name"),
    "index": Field(matching(f"^{GPU_PLACE}$", "a GPU like 0 or n1:0", examples=["0"]),
                   "the GPU's index; 0.1 is a MIG slice of GPU 0; of a node, with its name: n1:0"),
    "name": Field({**NAMED, "examples": ["n1"]}, "a node's name"),
    "force": Field(QUERY_FLAG, "forget it at once: its jobs are given up", parse=parse_flag),
    "status": FILTERS["status"],
    "user_id": FILTERS["user"],
    "group": Field(NAMED, "only this group"),
    "sort": Field(one_of(*(sign + name for name in SORTED_BY for sign in ("", "-"))),
                  "by this field, with - in reverse: sort=-finished_at; jobs without it last"),
    "limit": Field(COUNT, "at most so many, the first ones; the header Total-Count says how many there are"),
    "fields": Field(list_of(one_of(*JOB), most=2 * len(JOB)),
                    "only these fields of each job: fields=id,status,exit_code"),
    "after": Field(COUNT, "reply when something has changed since this state_version, or after 15 s; 0: at once"),
    "since": Field(DURATION_TEXT, f"at most so old, like 24h (of usage {USAGE_SINCE}, of the history {HISTORY_SINCE})",
                   parse=parse_duration),
    "hours": Field(integer_in(1, 744), "since so many hours ago: hours=24 is since=24h"),
    "order": Field({**STRING, "maxLength": 2 * MAX_NAME}, "sorted by the column of this key or name, with - in reverse",
                   default=None),
    "mean": Field(QUERY_FLAG, "a row for all jobs of one status that differ only in their `seed`: means, deviations",
                  parse=parse_flag),
    "over": Field({**STRING, "maxLength": 2 * MAX_NAME}, "the same, over this value of the sweep", default=None),
    "csv": Field(QUERY_FLAG, "as CSV, and not as JSON", parse=parse_flag),
    "step": Field(one_of(*STEPS), "means of so long; of a minute there are those of a day (1m up to 24h, else 10m)"),
    "series": Field(list_of(one_of(*SERIES), most=2 * len(SERIES)), "only these series: series=utilization,others"),
    "merge": Field(DURATION_TEXT, "attempts that are shorter, and follow each other on a GPU, are one row",
                   parse=parse_duration),
    "by": Field(one_of("user", "group"), "a row for each user (the default) or group"),
    "wait": Field(integer_in(0, 3600), "reply only when the job has ended, or after so many seconds; of logs, also "
                  "when there is more after the offset"),
    "follow": Field(QUERY_FLAG, "go on as it grows, until the end", parse=parse_flag),
    "tail": Field(COUNT, "begin so many lines before the end; a progress bar is shown as it was last"),
    "stream": Field(one_of(*STREAMS), "which of the two files"),
    "grep": Field(matching(f"^[^\n\0{SURROGATES}]{{1,1000}}$", "a text of one line", examples=["loss"]),
                  "only lines with this text, as it stands; without a capital in it, in any case; of a progress bar "
                  f"its last state.  A reply searches {MAX_SEARCH_BYTES // 2**20} MiB at most; the header Log-Next is "
                  "the offset to go on from, if there is more, and Log-End that of the log's end"),
    "context": Field(integer_in(0, MAX_CONTEXT), "with grep: so many lines before and after each"),
    "offset": Field(COUNTS, "from this byte of the files on, or from 0 in a shorter, new one; negative: from the end; "
                    "two numbers are of stdout.log and of stderr.log; the header Log-Offset says where the reply "
                    f"begins; without it a progress bar of more than {MAX_BAR_BYTES} bytes is shown as it was last",
                    parse=parse_offsets),
    "line": Field(integer_in(1, 10**15), "begin at this line, counted from 1 over what `stream` chooses, in the order "
                  "in which lines ended"),
    "lines": Field(integer_in(1, 10**15), "at most so many lines; a progress bar is shown as it was last"),
    "numbers": Field(QUERY_FLAG, "begin each line with its number, as `line` counts; what comes before is read for it",
                     parse=parse_flag),
    "timestamps": Field(
        QUERY_FLAG, "begin each line with its time of arrival, to a tenth of a second where it is known",
        parse=parse_flag),
    "Idempotency-Key": Field(
        matching("^[\\x21-\\x7e]{8,128}$", "8 to 128 visible characters", examples=["0f0bd5a2-4d1e"]),
        "a random one for each submission: the same again adds nothing, and is answered as the first time"),
}
ROUTES: list[Route] = []


def argument_of(name: str) -> str:
    """The name of a parameter in its handler."""
    return name.lower().replace("-", "_")


def read_parameter(name: str, row: Field, texts: Sequence[str]) -> Any:
    """Parse a parameter.  Raises: usage."""
    value: Any = texts[0]
    if row.place == "path":                     # a name is looked up by its handler; one that is longer is nothing's
        value = value[:MAX_NAME + 1]
    else:
        kind = row.schema.get("type")
        if len(texts) > 1 and kind != "array":
            refuse(f"{name} may be given once, and stands in the address {len(texts)} times", hint="")
        is_whole = kind == "integer" and re.fullmatch("[0-9]{1,18}", value)
        if kind == "array":                     # words have no commas
            value = ",".join(texts).split(",") if "enum" in row.schema["items"] else texts
        value = check(row.schema, int(value) if is_whole else value, name)
    return row.parse(value) if row.parse else value


def route(call: str, access: str, summary: str, answer: str = "", body: str = "", statuses: tuple[int, ...] = (),
          without: Sequence[str] = ()) -> Callable[[T], T]:
    """Make a function answer a call.

    Its arguments are the Api and the caller, and then names of parameters, `body` (its JSON), `request`, or `choice`:
    all FILTERS, but those in `without`.
    """
    method, pattern = call.split(" ")

    def add(handler: Any) -> Any:
        arguments = handler.__code__.co_varnames[2:handler.__code__.co_argcount]
        filters = {name: row for name, row in FILTERS.items() if "choice" in arguments and name not in without}
        others = {name: row for name, row in PARAMETERS.items() if argument_of(name) in arguments}
        parameters = {}
        for name, row in {**filters, **others}.items():
            place = "path" if f"{{{name}}}" in pattern else "header" if "-" in name else "query"
            parse = None if row.text else row.parse             # of an option's text
            parameters[name] = Field(row.schema, row.help, parse=parse, place=place)
        ROUTES.append(Route(method, pattern, access, summary, handler, arguments, parameters, answer, body,
                            statuses or ((200,) if answer else (204,))))
        return handler

    return add


def match_route(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """(the request's route, its path parameters).  Raises: not_found, method_not_allowed."""
    import urllib.parse
    allowed = []
    for row in ROUTES:
        match = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", row.pattern), path)
        if match and row.method in (method, "GET" if method == "HEAD" else method):
            return row, {name: urllib.parse.unquote(text) for name, text in match.groupdict().items()}
        allowed += [row.method] if match else []
    if allowed:
        raise NexusError("method_not_allowed", f"{method} is not for {path}", hint=f"it takes {', '.join(allowed)}")
    raise NexusError("not_found", f"there is nothing at {format_line(path, 100)}", hint="GET / says what is")


def error_response(error: NexusError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.http_status == 401 else {}
    if error.kind == "method_not_allowed":
        headers["Allow"] = error.hint.replace("it takes ", "")
    return replace(json_response(error.to_json(), error.http_status), headers=headers)


def json_response(data: object, status: int = 200) -> Response:
    return Response(status, (encode_json(data) + "\n").encode())


@functools.lru_cache(maxsize=1)
def page_response(page: str) -> Response:
    """A page that may only run its own <script> and <style>, which the policy names by their hashes."""
    import base64
    import hashlib

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    policy = (f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
              "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return Response(200, page.encode(), "text/html; charset=utf-8", {
        "Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"})


def read_json_body(request: Request) -> Any:
    """The body.  Raises: unsupported_media_type, usage, too_large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NexusError("unsupported_media_type",
                         f"the body must be application/json, not {format_line(kind, 60) or 'nothing'}",
                         hint="curl: -H 'Content-Type: application/json' -d '{\"command\": \"python train.py\"}'")
    body = request.read_body()
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_BODY_VALUES:
        raise NexusError("too_large", f"the body has more than {MAX_BODY_VALUES} values", "send fewer jobs at once")
    return parse_json(body, "the body")


def read_arguments(request: Request, endpoint: Route, path_parameters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a route's handler.  Raises: usage; as read_json_body()."""
    names = [name for name, row in endpoint.parameters.items() if row.place == "query"]
    for name in request.query:
        if name not in names:
            refuse(f"'{format_line(name, 40)}' is not a parameter of {endpoint.pattern}", hint=suggest(name, names))
    found: dict[str, Any] = {"request": request} if "request" in endpoint.arguments else {}
    places: dict[str, Mapping[str, Any]] = {
        "path": path_parameters, "query": request.query, "header": request.headers}
    for name, row in endpoint.parameters.items():
        texts = places[row.place].get(name.lower())
        if texts is not None:
            found[argument_of(name)] = read_parameter(name, row, [texts] if isinstance(texts, str) else texts)
    if "choice" in endpoint.arguments:
        found["choice"] = Choice(**{name: found.pop(name) for name in FILTERS if name in found})
    if "body" in endpoint.arguments:
        found["body"] = read_json_body(request)
    return found

"""The routes of logs, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence

from ..formats.log_lines import LogEntry, LogSearch
from ..machine.disk import is_folder
from ..machine.log_reader import MAX_BAR_BYTES, MAX_LOG_LINE, LogReader
from ..service.access import Identity
from ..values.errors import NexusError
from ..values.job import FINAL, NO_ATTEMPT, Attempt, Job
from ..values.text import format_memory, format_time, refuse
from ..values.value import replace
from .api import Api
from .gate import HeldRequest
from .routes import MAX_SEARCH_BYTES, NDJSON, STREAMS, Request, Response, route

PLAIN_TEXT = "text/plain; charset=utf-8"
MAX_COUNTED_BYTES = 2**33               # of a log whose lines are counted


def find_attempt(piece: LogEntry, attempts: Sequence[Attempt]) -> Attempt:
    return next((attempt for attempt in attempts if attempt.number == piece.attempt), NO_ATTEMPT)


def make_log_json(has_numbers: bool) -> Callable[[LogEntry, Sequence[Attempt]], bytes]:
    """Make the function that turns log entries into lines of JSON.

    Bytes that are no UTF-8 become lone surrogates, as with Python's surrogateescape.
    """
    def make_json(piece: LogEntry, attempts: Sequence[Attempt]) -> bytes:
        attempt = find_attempt(piece, attempts)
        return (json.dumps({
            "attempt": piece.attempt, "started_at": format_time(attempt.started_at),
            "has_earlier": any(attempt.log_start), "stream": STREAMS[piece.stream], "at": format_tenths(piece.at),
            "end": piece.end, **({"line": piece.line} if has_numbers else {}),
            "text": piece.content.decode("utf-8", "surrogateescape"),
            **({"is_after_gap": True} if piece.is_after_gap else {})}) + "\n").encode()

    return make_json


def number_lines(content: bytes, first: int, is_at_line: bool) -> bytes:
    """Put its number before each line; not before the first, where that continues a line."""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
    return b"".join((b"%6d " % number if is_at_line or number > first else b"") + line
                    for number, line in enumerate(lines, first))


def stamp_lines(content: bytes, stamp: str, is_at_line: bool) -> bytes:
    """Put the stamp before each line; not before the first, where that continues a line."""
    mark = stamp.encode()
    return (mark if is_at_line else b"") + re.sub(rb"\n(?!\Z)", b"\n" + mark, content)


def format_tenths(at: float | None) -> str | None:
    """A UTC time to a tenth of a second."""
    return None if at is None else f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at * 10) % 10}Z"


def make_log_text(has_times: bool = False, is_both: bool = False,
                  has_numbers: bool = False) -> Callable[[LogEntry, Sequence[Attempt]], bytes]:
    """Make the function that turns log entries into text.  `is_both`: of both streams, with a line between attempts."""
    former, is_line_whole, last = 0, True, [b"\n", b"\n"]       # `last`: the last byte of each stream

    def make_text(piece: LogEntry, attempts: Sequence[Attempt]) -> bytes:
        nonlocal former, is_line_whole
        heading, content = b"", piece.content
        attempt = find_attempt(piece, attempts)
        if is_both and any(attempt.log_start) and piece.attempt != former:
            began = format_tenths(attempt.started_at) or "-"
            heading = (b"" if is_line_whole else b"\n") + f"---- attempt {piece.attempt}, {began} ----\n".encode()
        elif piece.is_after_gap:
            heading = b"--\n"                       # as grep has it
        former = piece.attempt
        is_at_line = last[piece.stream] in b"\r\n" or bool(heading)
        if has_times:
            content = stamp_lines(content, f"{format_tenths(piece.at) or '-':22} ", is_at_line)
        if has_numbers:
            content = number_lines(content, piece.line, is_at_line)
        last[piece.stream] = content[-1:]
        is_line_whole = content.endswith(b"\n")
        return heading + content

    return make_text


@route("GET /jobs/{id}/logs", "user",
       "what a job printed, or prints, in the order in which it came; for programs with Accept: "
       "application/x-ndjson", "text/plain")
def get_logs(api: Api, caller: Identity, request: Request, id: str, follow: bool = False, stream: str = "both",
             tail: int | None = None, offset: Sequence[int] | None = None, timestamps: bool = False,
             grep: str | None = None, context: int | None = None, wait: int = 0, line: int | None = None,
             lines: int | None = None, numbers: bool = False) -> Response:
    if context is not None and grep is None:
        refuse("context is of lines that grep finds", hint="grep=TEXT&context=3")
    if wait and (follow or grep is not None):
        refuse("wait is for one reply with all that is new: without follow and grep", hint="offset=100,20&wait=30")
    if lines and grep is not None:
        refuse("lines are not counted of what grep finds", hint="grep=TEXT, or line=100&lines=20")
    if line and (offset is not None or tail is not None):
        refuse("a reply begins at a line, at an offset, or at a tail", hint="line=100&lines=20")
    job, streams = api.find_job(id, caller), [STREAMS.index(stream)] if stream != "both" else [0, 1]

    def look() -> tuple[str, Sequence[Attempt], bool]:
        """(the folder, "" before the job has started; its attempts; whether it is over)."""
        now = api.find_now(job)
        folder = find_log_folder(api, now) if now else job.log_dir or ""
        return folder, (now or job).attempts, now is None or now.status in FINAL

    folder, attempts, _ = look()
    reader = LogReader(api.service.disk, folder, streams, measure_now=api.service.log_watch.measure_now)
    if folder and (line or numbers):
        size = sum(reader.measure())
        if size > MAX_COUNTED_BYTES:
            raise NexusError("too_large", f"the lines of a log of {format_memory(size / 2**20)} are not counted: "
                             f"at most {format_memory(MAX_COUNTED_BYTES / 2**20)}", "use offset=, or nexus logs --grep")
    reader.lines_left = lines
    reader.begin(attempts, offset or (0, 0), tail)
    if folder and (line or numbers):
        api.search_limit.begin(reader)
        try:
            if line:
                reader.begin_at_line(attempts, line)
            else:
                reader.count_lines(api.line_counts)
        finally:
            api.search_limit.end(reader)
    # Who names an offset goes on where lines may have begun already.
    longest = 0 if tail is not None else MAX_BAR_BYTES if offset is None else None
    is_json = NDJSON in request.headers.get("accept", "")
    make_text = make_log_json(numbers) if is_json else make_log_text(timestamps, len(streams) > 1, numbers)
    kind = NDJSON if is_json else PLAIN_TEXT
    if grep is None:
        return send_logs(api, caller, reader, look, make_text, follow, kind, longest, wait)
    return search_logs(api, caller, reader, look, LogSearch(grep, context or 0, make_text), follow, kind)


def find_log_folder(api: Api, job: Job) -> str:
    """Where its logs are; "" before it has started.  Raises: not_found, when that was removed."""
    has_begun = job.status in FINAL or job.current.pid is not None
    if job.log_dir and has_begun and not is_folder(api.service.disk, job.log_dir):
        raise NexusError("not_found", f"the logs of job {job.id} are gone: there is no {job.log_dir}",
                         hint=f"nexus show {job.id} tells what else is known of it")
    return job.log_dir or ""


def search_logs(api: Api, caller: Identity, reader: LogReader, look: Callable[[], tuple[str, Sequence[Attempt], bool]],
                search: LogSearch, is_followed: bool, kind: str) -> Response:
    """Stream what a search finds in MAX_SEARCH_BYTES.  Raises: unavailable, when others search already."""
    folder, attempts, _ = look()
    headers = {"Log-End": reader.format_offsets(reader.measure())}
    has_more = bool(folder) and reader.limit(attempts, MAX_SEARCH_BYTES)
    api.search_limit.begin(search)
    response = send_logs(api, caller, reader, look, search, is_followed and not has_more, kind, 0)
    if has_more:
        headers["Log-Next"] = reader.format_offsets(reader.limits)
    return replace(response, headers={**response.headers, **headers}, after=lambda: api.search_limit.end(search))


def send_logs(api: Api, caller: Identity, reader: LogReader, look: Callable[[], tuple[str, Sequence[Attempt], bool]],
              make_text: Callable[[LogEntry, Sequence[Attempt]], bytes], is_followed: bool,
              kind: str = PLAIN_TEXT, longest: int | None = None, wait_s: float = 0) -> Response:
    """Stream logs from the reader's offsets; with `is_followed`, until the job is over.

    `look`: where the logs are, and whether the job is over.  `longest`: for read(), of what is there at first.
    `wait_s`: how long to wait for more when there is nothing.
    """
    search = make_text if isinstance(make_text, LogSearch) else None

    def pieces() -> Iterator[bytes]:
        clock, held = api.service.clock, HeldRequest(api.throttle, caller)
        is_on, limit, give_up_at = True, longest, clock.monotonic() + wait_s
        while is_on:
            reader.folder, attempts, was_over = look()
            # Small entries are joined: each piece costs a system call.  A piece, if empty, also finds who has gone.
            found, size, text = False, 0, bytearray()
            for piece in reader.read_some(attempts, limit) if reader.folder else ():
                found = True
                size += len(piece.content)
                text += make_text(piece, attempts)
                if max(size, len(text)) > MAX_LOG_LINE:
                    yield bytes(text)
                    size = 0
                    text.clear()
            limit, is_on = limit if search else None, is_followed and (found or not was_over)
            # A part of a line is worth a reply too: read() keeps it until flush().
            is_held = not (found or reader.partial or was_over or api.service.is_stopping)
            is_on = (is_on or (is_held and clock.monotonic() < give_up_at)) and reader.lines_left != 0
            # A search takes whole lines alone.
            for piece in reader.flush() if not is_on or not (found or search) else ():
                text += make_text(piece, attempts)
            yield bytes(text)
            if search:
                api.search_limit.end(search)       # what comes now is little
            if is_on:
                held.pause()

    headers = {"Log-Offset": reader.format_offsets(reader.offsets)}
    return Response(200, content_type=kind, headers=headers, stream=pieces())


@route("GET /service/logs", "owner", "the service's log", "text/plain")
def get_service_logs(api: Api, caller: Identity, follow: bool = False, tail: int | None = None) -> Response:
    layout = api.service.layout
    reader = LogReader(api.service.disk, layout.home, (0,), [os.path.basename(layout.service_log)])
    reader.begin((), (0, 0), tail)
    return send_logs(
        api, caller, reader, lambda: (reader.folder, (), api.service.is_stopping), make_log_text(), follow)

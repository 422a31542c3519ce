"""`nexus logs` and `metrics`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from shlex import quote

from ..machine.log_reader import MAX_LOG_LINE, LogReader, settle_lines
from ..opening import TYPE_CHECKING
from ..server.routes import STREAMS
from ..values.errors import NexusError
from ..values.job import FINAL, PENDING, STATUSES
from ..values.text import count_columns, format_line, join_some, refuse
from ..views.results import format_metrics, make_metrics
from ..views.show import describe_end, describe_seen_end
from ..views.status_text import name_or_command
from .change import say_unheard
from .chosen import check_choice, find_chosen, find_targets, read_choice
from .client import WAIT_S, Reader
from .context import Context
from .find_service import find_service
from .run import describe_attempt, format_stamp, pass_on_logs
from .terminal import make_paint, write_to
from .transport import DISK, split_lines

if TYPE_CHECKING:
    import queue
    from typing import Any

    from ..opening import Json


def cmd_metrics(context: Context) -> None:
    context.show(make_metrics(context.client.status(), context.client.jobs(status=list(FINAL))), format_metrics)


def cmd_logs(context: Context) -> int:
    """Print the logs of a job (default: the one that started last), of several, or of the service.

    Returns 1 when --grep finds nothing, as grep does.
    """
    options, choice = context.options, read_choice(context)
    if options.context is not None and options.grep is None:
        refuse("-C is for the lines around those that --grep finds", hint="nexus logs abc --grep error -C 3")
    if options.ids or choice:
        check_choice(context, options.ids)
    if options.ids == ["service"]:
        if options.grep is not None:
            refuse("--grep searches logs of jobs", hint=f"nexus logs service | grep {quote(options.grep)}")
        show_service_log(context)
        return 0
    jobs = [context.client.job(find_targets(context, target)[0]) for target in options.ids]
    if choice:
        jobs = find_chosen(context, STATUSES)
    elif not jobs:
        begun = [status for status in STATUSES if status != PENDING]
        jobs = context.client.jobs(sort="-started_at", limit=1, status=begun)
    if not jobs:
        raise NexusError("not_found", "no job has started yet", hint="nexus queue says what waits, and why")
    is_one = len(jobs) == 1 and "group" not in choice
    if is_one:
        return int(not show_log(context, jobs[0]) and options.grep is not None)
    logs = JobLogs(context, jobs)
    has_shown = logs.show()
    return logs.error.exit_code if logs.error else int(options.grep is not None and not has_shown)


def read_log(context: Context, job_id: str, is_followed: bool, is_new: bool = False) -> Iterator[dict[str, Any]]:
    """What the options want of a job's log.  `is_new`: it has begun since the command did, so all of it."""
    options = context.options
    return context.client.follow(job_id, options.stream, None if is_new else options.number, is_followed,
                                 options.grep, options.context)


def show_log(context: Context, job: Json) -> bool:
    """Print one job's log as it is; return whether there was anything."""
    import itertools
    options = context.options
    if job["id"] not in options.ids:
        context.say(f"job {job['id']}, {job['status']}: {name_or_command(job)}")
    if job["status"] == PENDING:
        context.say(f"job {job['id']} is pending: {job['waiting_for']}")
    elif not job["started_at"]:
        context.say(f"job {job['id']} never ran: {describe_end(job)}")
    if job["unknown_since"]:
        say_unheard(context, job, f"what job {job['id']} prints comes when it is back")
    pieces = read_log(context, job["id"], options.follow)
    first = next(pieces, None)
    if first:
        pass_on_logs(context, itertools.chain([first], pieces), options.timestamps,
                     options.number is not None and not options.follow)
    return first is not None


LABEL_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")
LOGGED_FIELDS = "id,name,status,started_at,outcome,cause_line,node,unknown_since"


class JobLogs:
    """Prints the logs of several jobs, each line with its job's name before it; with --follow, as they come.

    A line of a progress bar is shown when it ends, as it was last.
    """

    def __init__(self, context: Context, jobs: Sequence[Json]) -> None:
        import queue
        self.context, self.ids, self.has_shown = context, list(dict.fromkeys(job["id"] for job in jobs)), False
        self.is_followed = context.options.follow and not isinstance(context.client, Reader)   # there, no more comes
        self.paints = {"stdout": context.paint, "stderr": make_paint(context.err, context.environ)}
        self.labels: dict[str, str] = {}                        # {job id: what stands before its lines}
        self.begun, self.followed = set[str](), set[str]()      # the jobs whose logs were begun; that are followed now
        self.attempts: dict[str, int] = {}                      # {job id: the attempt of its last line}
        self.rests: dict[tuple[str, str], tuple[bytes, bytes]] = {}     # {(job id, stream): (stamp, incomplete line)}
        # (job id, what came of its log; None: all of it has come; or why it cannot be read)
        self.arrived: queue.Queue[tuple[str, Json | Exception | None]] = queue.Queue(maxsize=100)
        self.error: NexusError | None = None                    # of the last log that is gone

    def show(self) -> bool:
        """Print the logs; return whether there was anything."""
        is_first = True
        while True:
            jobs = self.find_jobs()
            waiting = [job["id"] for job in jobs if job["status"] == PENDING]
            self.make_labels(jobs)
            for job in jobs:
                if job["id"] not in self.begun and job["status"] != PENDING:
                    self.begun.add(job["id"])
                    self.begin(job, not is_first)
            if not self.is_followed or not (self.followed or waiting):
                break
            is_first = False
            self.pass_on()
        if waiting:
            self.context.say(f"pending: {join_some(waiting, 10)}; nexus why ID says why")
        return self.has_shown

    def find_jobs(self) -> list[dict[str, Any]]:
        """The jobs as they are now, also those that are of the chosen group by now."""
        choice = read_choice(self.context)
        if "group" in choice:
            return self.context.client.jobs(**choice, fields=LOGGED_FIELDS, sort="started_at")
        found = {job["id"]: job for job in self.context.client.jobs(fields=LOGGED_FIELDS)}
        return [found[job_id] for job_id in self.ids if job_id in found]

    def make_labels(self, jobs: Sequence[Json]) -> None:
        """Name the new jobs; where another has this name too, the id stands beside it."""
        from collections import Counter
        width = self.context.paint.width // 3
        names = {job["id"]: format_line(job["name"] or job["id"], width) for job in jobs}
        counts = Counter([*names.values(), *self.labels.values()])
        self.labels.update({job_id: name if counts[name] == 1 or name == job_id else f"{name} {job_id}"
                            for job_id, name in names.items() if job_id not in self.labels})

    def begin(self, job: Json, is_new: bool) -> None:
        """Print a job's log, or begin to follow it in a thread."""
        import threading
        context, job_id = self.context, job["id"]
        if not job["started_at"]:
            return context.say(f"job {job_id} never ran: {describe_end(job)}")
        if job["unknown_since"]:
            say_unheard(context, job, f"what job {job_id} prints comes when it is back")
        pieces = read_log(context, job_id, self.is_followed, is_new)
        if not self.is_followed or job["status"] in FINAL:
            try:
                for piece in pieces:
                    self.print(job_id, piece)
            except NexusError as error:
                self.note_loss(error)
            return self.end_lines(job_id)

        def follow() -> None:
            try:
                for piece in pieces:
                    self.arrived.put((job_id, piece))
                self.arrived.put((job_id, None))
            except Exception as error:              # it is raised where it is seen
                self.arrived.put((job_id, error))

        self.followed.add(job_id)
        threading.Thread(target=follow, daemon=True).start()

    def pass_on(self) -> None:
        """Print what comes, until a job ends or it is time to look for others."""
        import queue
        look_at = time.monotonic() + WAIT_S
        while (left_s := look_at - time.monotonic()) > 0:
            try:
                job_id, piece = self.arrived.get(timeout=left_s)
            except queue.Empty:
                return
            if piece is None or isinstance(piece, Exception):
                self.end_lines(job_id)
                self.followed.discard(job_id)
            if isinstance(piece, Exception):
                return self.note_loss(piece)
            if piece is None:
                return self.context.say(describe_seen_end(self.context.client.job(job_id)))
            self.print(job_id, piece)

    def note_loss(self, error: Exception) -> None:
        """Say that a job's log is gone, and go on with those of others.  Raises: any other error."""
        if not (isinstance(error, NexusError) and error.kind == "not_found"):
            raise error
        self.error = error
        self.context.say(error.message)

    def print(self, job_id: str, piece: Json) -> None:
        """Print the lines that a piece completes."""
        key = job_id, piece["stream"]
        if piece["attempt"] != self.attempts.get(job_id, 1) and piece["has_earlier"]:
            self.end_lines(job_id)
            self.context.say(f"job {job_id}: {describe_attempt(piece)}")
        self.attempts[job_id] = piece["attempt"]
        stamp = format_stamp(piece).encode() if self.context.options.timestamps else b""
        _, rest = self.rests.pop(key, (b"", b""))
        *lines, rest = settle_lines(rest + piece["text"].encode("utf-8", "surrogateescape"), 0).split(b"\n")
        if len(rest) > MAX_LOG_LINE:
            lines, rest = [*lines, rest], b""
        self.print_lines(*key, [*([b"--"] if "is_after_gap" in piece else []), *(stamp + line for line in lines)])
        if rest:
            self.rests[key] = stamp, rest

    def end_lines(self, job_id: str) -> None:
        """Print the lines whose ends will not come."""
        for stream in STREAMS[:2]:
            if (job_id, stream) in self.rests:
                self.print_lines(job_id, stream, [b"".join(self.rests.pop((job_id, stream)))])

    def print_lines(self, job_id: str, stream: str, lines: Iterable[bytes]) -> None:
        label, paint = self.labels[job_id], self.paints[stream]
        colour = LABEL_COLOURS[list(self.labels).index(job_id) % len(LABEL_COLOURS)]
        blanks = max(map(count_columns, self.labels.values())) - count_columns(label)
        head = paint.join([paint(colour, f"{label}{' ' * blanks} |")]).rstrip("\n").encode("utf-8", "surrogateescape")
        content = b"".join(head + b" " + line.rstrip(b"\r") + b"\n" for line in lines)
        if content:
            write_to(self.context.out if stream == "stdout" else self.context.err, content)
            self.has_shown = True


def show_service_log(context: Context) -> None:
    follow, number = context.options.follow, context.options.number
    pieces = context.client.logs("service", follow, tail=number) if context.is_remote else read_service_log(context)
    for line in split_lines(pieces):    # print() escapes control characters: other people's names are in the log
        context.print(line.decode("utf-8", "replace"))


def read_service_log(context: Context) -> Iterator[bytes]:
    """Read the file itself: it is needed most when the service is down."""
    layout = context.layout
    if find_service(layout) is None:
        if not os.path.exists(layout.service_log):
            raise NexusError("unavailable", f"the service for {layout.home} does not run, and there is no log of it",
                             hint="nexus start")
        context.say("the service does not run; this is its last log (to start it: nexus start)")
    reader = LogReader(DISK, layout.home, (0,), [os.path.basename(layout.service_log)])
    reader.begin((), (0, 0), context.options.number)
    while True:
        yield from (piece.content for piece in [*reader.read(), *reader.flush()])
        if not context.options.follow:
            return
        time.sleep(0.2)

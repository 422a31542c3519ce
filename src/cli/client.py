"""The Python API: a method for each thing that is asked of the service, which it finds, or starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..machine.clock import Clock
from ..machine.config_file import choose_config, load_config
from ..machine.layout import Layout, find_home, make_layout
from ..machine.machine import Machine
from ..opening import TYPE_CHECKING
from ..server.api import Api
from ..server.routes import NDJSON, SOCKET_PEER, STREAMS, Request
from ..service.service import Service
from ..store.store import Store
from ..values.errors import NexusError
from ..values.job import FINAL
from ..values.text import format_line, load_json, refuse
from .channel import Channel
from .find_service import find_service, start_service
from .transport import DISK, Answer, encode_query, quote_path, split_lines

if TYPE_CHECKING:
    from typing import Any

WAIT_S = 2                      # between two looks at several jobs that are waited for


def list_texts(given: str | Iterable[str], name: str) -> list[str]:
    """Texts as a list; a text alone is one of them.  Raises: usage."""
    texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not all(isinstance(text, str) for text in texts):
        refuse(f"{name} must be a text or a list of texts, not {format_line(repr(given), 60)}", hint="")
    return texts


def is_read_only(error: NexusError) -> bool:
    """Whether a file system that takes no writes is at fault."""
    import errno
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EROFS


class Client(Channel):
    """The API for Python and the command line.  Its methods raise the service's NexusErrors."""

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None, is_starting: bool = True) -> Client:
        """The client of NEXUS_URL, or of this user's service, which is started unless it runs.

        Raises: unavailable, when no service runs and is_starting is False; conflict, for another machine's service.
        """
        environ = os.environ if environ is None else environ
        if environ.get("NEXUS_URL"):
            return cls(environ["NEXUS_URL"], environ.get("NEXUS_TOKEN", ""))
        layout = Layout(find_home(DISK, environ), "", "")
        running = find_service(layout)
        if running is None and not is_starting:
            raise NexusError("unavailable", f"the nexus service for {layout.home} does not run", hint="nexus start")
        has_started = running is None
        try:
            running = running or start_service(layout, environ, choose_config(DISK, layout))
        except NexusError as error:
            if not is_read_only(error):
                raise
            return Reader(layout, environ, error)
        client = cls(running["url"], "", layout)
        client.has_started = has_started
        return client

    def add(self, command: str, **options: Any) -> str:
        """Queue a command; return the job's id.  Options are the keys of POST /queue."""
        return str(self.submit({"command": command, **options})["id"])

    def add_all(self, commands: str | Iterable[str], **options: Any) -> list[str]:
        """Queue many commands that share their options, all or none; return their ids."""
        return list(self.submit({"commands": list_texts(commands, "commands"), **options})["ids"])

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /queue; return `{"id"}` or `{"ids"}`, with `known` ids that `unique` or `unless_active` found, and a
        `warning` when jobs will not start soon.  It is repeated until it is done, and done once.
        """
        return dict(self.ask("POST", "/queue", body, key=os.urandom(16).hex()))

    def status(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/status"))

    def health(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/health"))

    def queue(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/queue" + encode_query(query)))

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/jobs" + encode_query(query)))

    def usage(self, **query: Any) -> list[dict[str, Any]]:
        """What jobs used, as GET /usage: since="7d", by="user" or "group"."""
        return list(self.ask("GET", "/usage" + encode_query(query)))

    def results(self, group: str, **query: Any) -> dict[str, Any]:
        """The jobs of a group as a table, as GET /groups/{group}/results."""
        return dict(self.ask("GET", f"/groups/{quote_path(group)}/results" + encode_query(query)))

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/jobs/{quote_path(job_id)}"))

    def why(self, job_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/jobs/{quote_path(job_id)}/why"))

    def cancel(self, **choice: Any) -> list[str]:
        """End jobs, all or none: `ids`, or those of a `group` or `status`; return the ids of those not yet over."""
        return list(self.ask("POST", "/jobs/cancel", choice)["ids"])

    def edit(self, job_id: str, **change: Any) -> dict[str, Any]:
        """Change a job that has not ended by the keys of PATCH /queue/{id}, like `gpus=2`; return the job."""
        return dict(self.ask("PATCH", f"/queue/{quote_path(job_id)}", change))

    def edit_all(self, job_ids: str | Iterable[str], **change: Any) -> list[str]:
        """Change jobs that have not ended, all or none, as edit() does one; return their ids."""
        return list(self.ask("PATCH", "/queue", {"ids": list_texts(job_ids, "job_ids"), "change": change})["ids"])

    def clear(self, **choice: Any) -> list[str]:
        """Forget finished jobs and their logs: `ids`, those of a `group` or `status`, or `older`; return their ids.

        `dry_run`: forget none of them.
        """
        return list(self.ask("POST", "/jobs/clear", choice)["ids"])

    def dismiss(self, **choice: Any) -> list[str]:
        """Take failures off one's list: `ids`, or those of a `group`; `undo`: put them back.  Return their ids."""
        return list(self.ask("POST", "/jobs/dismiss", choice)["ids"])

    def retry(self, **choice: Any) -> list[str]:
        """Queue finished jobs again, all or none: `ids`, or those of a `group` or `status`; return the new ids.

        `change`: new values, like `{"gpus": 2}`.
        """
        return list(self.ask("POST", "/jobs/retry", choice)["ids"])

    def pause(self, gpu: int | str | None = None, group: str | None = None, verb: str = "pause") -> None:
        """Pause or resume the queue, a group, or a GPU: 0, or "n1:0" on a node."""
        what = "service" if gpu is None else f"gpus/{quote_path(str(gpu))}"
        self.ask("POST", f"/{what}/{verb}" + encode_query({"group": group}))

    def resume(self, gpu: int | str | None = None, group: str | None = None) -> None:
        self.pause(gpu, group, "resume")

    def nodes(self) -> list[dict[str, Any]]:
        """This machine and the nodes."""
        return list(self.ask("GET", "/nodes"))

    def stop(self) -> None:
        self.ask("POST", "/service/stop")

    def logs(self, job_id: str, follow: bool = False, stream: str = "both", tail: int | None = None,
             grep: str | None = None, context: int | None = None) -> Iterator[bytes]:
        """A job's output, or the service's log with "service", in pieces as they arrive.

        `grep`: only lines with this text, and `context` lines around each.
        """
        query = {"follow": "true" if follow else None, "tail": tail, "stream": None if job_id == "service" else stream,
                 "grep": grep, "context": context}
        path = "/service/logs" if job_id == "service" else f"/jobs/{quote_path(job_id)}/logs"
        headers, pieces = self.open_stream(path + encode_query(query))

        def go_on(headers: Mapping[str, str], pieces: Iterator[bytes]) -> Iterator[bytes]:
            yield from pieces
            while "log-next" in headers:
                rest = {**query, "tail": None, "offset": headers["log-next"]}
                headers, pieces = self.open_stream(path + encode_query(rest))
                yield from pieces

        return go_on(headers, pieces)

    def follow(self, job_id: str, stream: str = "both", tail: int | None = None, is_followed: bool = True,
               grep: str | None = None, context: int | None = None) -> Iterator[dict[str, Any]]:
        """A job's output until it ends, as `LogEntry` objects; a restart of the service loses and repeats nothing.

        `grep`, `context`: as logs() has them.  It waits while others search.
        """
        where: dict[str, Any] = {"tail": tail}
        names = STREAMS[:2] if stream == "both" else (stream,)
        asked = {"follow": "true" if is_followed else None, "stream": stream, "grep": grep, "context": context}
        while True:
            query = encode_query({**asked, **where})
            try:
                headers, pieces = self.open_stream(f"/jobs/{quote_path(job_id)}/logs{query}", NDJSON)
                where = {"offset": headers["log-offset"]}
                offsets = dict(zip(names, headers["log-offset"].split(",")))
                for line in split_lines(pieces):
                    piece = load_json(line)
                    offsets[piece["stream"]] = str(piece["end"])
                    where = {"offset": ",".join(offsets.values())}
                    yield piece
                if "log-next" not in headers:
                    return
                where = {"offset": headers["log-next"]}
                continue
            except NexusError as error:
                if error.kind != "unavailable":
                    raise
            time.sleep(0.1)                             # the server may close each stream at once
            self.ask("GET", "/")                        # waits until the service replies again

    def wait(self, job_ids: str | Iterable[str], on_end: Callable[[dict[str, Any]], None] = lambda job: None,
             is_any: bool = False,
             on_look: Callable[[dict[str, Any]], None] = lambda job: None) -> list[dict[str, Any]]:
        """Wait until jobs have finished, or with `is_any` one of them; return them.  The service may restart meanwhile.

        `on_look` is called with each job that goes on, at each look.
        Raises: not_found, for a job that is gone and was not seen to end.
        """
        finished: dict[str, dict[str, Any]] = {}
        job_ids = list_texts(job_ids, "job_ids")
        unfinished, wait_s = list(dict.fromkeys(job_ids)), 0
        while unfinished and not (is_any and finished):
            # The end of the last is heard of at once, that of the others at the next look.
            last = self.ask("GET", f"/jobs/{quote_path(unfinished[-1])}" + encode_query({"wait": wait_s or None}))
            wait_s = WAIT_S
            others = self.jobs(fields="id,status,node,unknown_since") if len(unfinished) > 1 else []
            jobs = {job["id"]: job for job in [*others, last]}
            for job_id in unfinished:
                job = jobs.get(job_id) or self.job(job_id)
                if job["status"] in FINAL and not (is_any and finished):
                    finished[job_id] = job if job is last else self.job(job_id)
                    on_end(finished[job_id])
                elif job["status"] not in FINAL:
                    on_look(job)
            unfinished = [job_id for job_id in unfinished if job_id not in finished]
        return [finished[job_id] for job_id in job_ids if job_id in finished]


class Reader(Client):
    """Answers in this process what only reads, where no service can run as its home takes no writes."""

    def __init__(self, layout: Layout, environ: Mapping[str, str], error: NexusError) -> None:
        """`error`: why no service can run.  Raises: what keeps the home from being read."""
        import logging
        super().__init__("http://localhost", "", layout)
        self.error = NexusError(
            "unavailable", f"nothing can be changed, and no service runs: {error.message}", error.hint)
        clock, log = Clock(), logging.getLogger("nexus")
        config = load_config(DISK, choose_config(DISK, layout), environ)
        log.addHandler(logging.NullHandler())
        log.propagate = False                           # what cannot be written is told by the error alone
        layout = make_layout(layout.home, config)
        store = Store(layout, clock, DISK, log)
        store.recover()
        store.last_error = store.last_error or error    # so that jobs say why they wait
        machine = Machine(config, layout, DISK, store.service_id)
        service = Service(config, layout, store, machine, clock, DISK, log, environ)
        service.observer.probe(True)
        service.run_guarded("reading GPUs", service.gpu_watch.take_in_observation)
        self.api = Api(service, "", "")

    def send(self, method: str, path: str, content: bytes | None = None, key: str = "", accept: str = "",
             is_stream: bool = False) -> Answer:
        """Raises: unavailable, for what would change something or wait for a change."""
        import urllib.parse
        plain, _, rest = path.partition("?")
        query = urllib.parse.parse_qs(rest, keep_blank_values=True)
        query.pop("follow", None)                       # nothing more would come
        if method != "GET" or "wait" in query:
            raise self.error
        response = self.api.handle(Request(
            "GET", plain, query, {"host": "localhost", "accept": accept}, bytes, SOCKET_PEER, os.geteuid()))
        headers = {name.lower(): text for name, text in response.headers.items()}
        return Answer(response.status, {**headers, "content-type": response.content_type},
                      iter([response.body]) if response.stream is None else response.stream)

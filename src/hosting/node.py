"""Another machine: whether it can be reached, and what becomes of its jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from ..formats.runner_events import News, Result, RunnerEvent
from ..machine.clock import Backoff
from ..machine.processes import read_machine
from ..machine.ssh import Ssh, describe_bad_node
from ..opening import TYPE_CHECKING
from ..schedule.capacity import may_run_on, may_use
from ..schedule.ends import MACHINE_DOWN
from ..values.causes import LAUNCH, NODE_LOST, REBOOT
from ..values.config import NodeConfig
from ..values.errors import NexusError
from ..values.job import Job, list_shares
from ..values.text import format_count, format_duration, format_line, format_time
from ..values.value import replace
from .events import Worker
from .hosted_job import Order, Progress
from .loop import MachineBackend, list_news
from .node_line import AgentLine
from .node_news import Reports
from .node_protocol import LOOK_WAIT_S, Hello, Question, Report, read_report
from .node_questions import Questions

if TYPE_CHECKING:
    from typing import Any

    from ..service.service import Service
    from .loop import Finding

NOT_REACHED = "it has not been reached yet"
RECONNECT_S = (1.0, 10.0)       # backoff between attempts to reach a node: at first, at most
LATE_S = 1.0                    # what is new in a question is replied to at once; after this it is late
SILENCE_S = 15.0                # a reply that is later than expected by this means that the connection is lost
START_BACKOFF_S = 5.0           # a node that could not start a job, or went down with one, gets none for so long

class Unpushed:
    """The attempts whose snapshot must be pushed to a node before they begin.

    One thread does that for all: the node may claim to have slots without end.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.waiting: dict[str, tuple[Job, Mapping[str, str] | None]] = {}      # {attempt_key: (job, its variables)}
        self.worker = Worker(node.service, f"pushing snapshots to node {node.name}", self.send)
        self.worker.thread.start()

    def add(self, job: Job, variables: Mapping[str, str] | None) -> None:
        self.waiting[job.attempt_key] = job, variables
        self.worker.wanted.set()

    def withdraw(self, job: Job) -> bool:
        """Whether this attempt was there, and is not any more."""
        return self.waiting.pop(job.attempt_key, None) is not None

    def send(self) -> float | None:
        """Have those that wait started; return the pause."""
        for job, variables in list(self.waiting.values()):
            if self.withdraw(job) and not self.node.is_ended:
                self.node.send(job, variables)
        return 0.0 if self.waiting else None


class Node(MachineBackend):
    """Another machine, whose agent runs jobs for this nexus.

    A thread asks it again and again for their progress and output.
    """

    def __init__(self, service: Service, address: NodeConfig, is_leaving: bool) -> None:
        super().__init__(service)
        self.address, self.name, self.is_leaving = address, address.name, is_leaving
        self.ssh = Ssh(address, service.environ)
        self.hello: Hello | None = None                     # of the last connection
        self.error: NexusError | None = NexusError("unavailable", NOT_REACHED)
        self.heard_at = self.clock.monotonic()              # its last reply
        self.questions, self.reports = Questions(self), Reports(self)
        self.trees: dict[str, str] = {}                     # {commit: its path on the node}
        self.start_backoff = Backoff(START_BACKOFF_S, START_BACKOFF_S)
        self.given_up_by = ""                               # the user who removed it with --force
        self.is_ended, self.reconnect_backoff = False, Backoff(*RECONNECT_S)
        self.unpushed = Unpushed(self)
        self.follower = Worker(service, f"following node {self.name}", self.follow)
        self.follower.thread.start()

    def follow(self) -> float:
        """Ask, and take in a reply; return the pause before the next one in seconds."""
        try:
            line = self.questions.line or self.connect()
            self.questions.ask()
            began_s = time.thread_time()
            reply = line.read_line(LOOK_WAIT_S + SILENCE_S)
            question = self.questions.latest
            assert question
            report, faults = read_report(reply, question)
            self.heard_at = self.clock.monotonic()
            self.take(question, report, faults)
            self.reconnect_backoff.succeed()
            return 2 * (time.thread_time() - began_s + min(1.0, self.service.tick_s))  # a third of a core at most
        except Exception as error:
            self.lose(error)
            self.reconnect_backoff.fail(self.clock.monotonic())
            return self.reconnect_backoff.rest_s

    def connect(self) -> AgentLine:
        """Raises: unavailable; conflict, when the machine has another name here."""
        line = AgentLine(self.disk, self.layout, self.ssh, self.store.service_id, self.service.hash)
        twin = next((node.name for node in self.service.pool.nodes.values()
                     if node is not self and node.hello and node.hello.machine == line.hello.machine), None)
        if twin or line.hello.machine == f"{self.machine.boot_id} {read_machine()}":
            line.close()
            raise NexusError("conflict", f"{self.name} is {twin or 'this very machine'}",
                             hint=f"it needs no second name: nexus node remove {self.name} --force")
        self.hello = line.hello
        self.questions.begin(line)
        if self.is_ended:
            self.questions.end()
        return line

    def take(self, question: Question, report: Report, faults: Mapping[str, str]) -> None:
        """Take in what is new.  `faults`: of read_report()."""
        self.reports.take(question, report, faults)
        self.questions.note_reply(question, report)
        if self.error is not None:
            self.error = None
            self.log.info("Node %s: connected, %s", self.name, format_count(len(self.reports.gpus), "GPU"))
        self.service.wake()

    def lose(self, error: Exception) -> None:
        """Note that the node cannot be reached or used."""
        self.questions.end()
        if self.is_ended:
            return
        if isinstance(error, (KeyError, TypeError, ValueError)):
            error = describe_bad_node(self.name, error)
        elif not isinstance(error, (OSError, NexusError)):
            self.service.fail(f"following node {self.name}", error)
        if not isinstance(error, NexusError):
            error = NexusError("unavailable", f"{self.name}: {error}")
        is_news, self.error = self.error is None or self.error.message != error.message, error
        if is_news:
            self.log.warning("Node %s: %s", self.name, error.message)
            self.service.wake()

    def start(self, job: Job, variables: Mapping[str, str] | None) -> bool:
        if job.snapshot and job.snapshot not in self.trees:     # to push it may take long
            self.unpushed.add(job, variables)
        else:
            self.send(job, variables)
        return True

    def send(self, job: Job, variables: Mapping[str, str] | None) -> None:
        """Have an attempt started.  On any error the job must not wait for ever."""
        try:
            order: Order = self.service.starter.make_node_order(self, job, variables)
            self.questions.add(job.attempt_key, order)
        except Exception as error:
            is_lost = isinstance(error, NexusError) and error.kind == "unavailable"
            hint = f" ({error.hint})" if isinstance(error, NexusError) and error.hint else ""
            message = format_line(f"{error}{hint}", 1000)
            self.reports.set(job.attempt_key, Progress(requeue=message) if is_lost else Progress(
                result=Result(None, None, 0.0, LAUNCH, message), is_over=True))
        self.service.wake()

    def list_progress(self) -> Iterator[tuple[Job, Progress]]:
        lost = self.find_lost()
        for job in self.list_own():
            if lost:
                yield job, Progress(result=lost, is_over=True)
            elif job.current.stop_cause and self.unpushed.withdraw(job):
                yield job, Progress(requeue="it was killed before it began")
            elif report := self.reports.jobs.get(job.attempt_key):
                yield job, self.reports.translate(job, report)

    def find_lost(self) -> Result | None:
        """How its jobs have ended, when it is given up."""
        error, limit_s = self.error, self.config.service.node_lost_after_seconds
        silence_s = self.clock.monotonic() - self.heard_at
        if self.given_up_by:
            return Result(None, None, None, NODE_LOST, f"its node {self.name} was removed by {self.given_up_by}")
        if error is not None and limit_s and silence_s >= limit_s:
            since = f"{self.name} could not be reached for {format_duration(silence_s)}"
            return Result(None, None, None, NODE_LOST, f"{since}: {error.message}")
        return None

    def describe_unknown(self, job: Job) -> dict[str, Any]:
        """What a job's JSON has when nothing can be known of it now."""
        words, at = self.reports.faults.get(job.attempt_key, ("", 0.0))
        if self.is_unheard(job):
            return {"unknown_since": self.since}
        if words:
            return {"unknown_since": format_time(at), "notes": [
                *job.current.notes, f"{self.name} answers what no nexus does of it: {words}"]}
        return {}

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterator[Finding]:
        for job, news in list_news(self.list_progress()):
            if news.requeue:
                self.start_backoff.fail(self.clock.monotonic(), news.requeue)
                news = replace(news, requeue=f"{self.name}: {news.requeue}")
            elif news.result and news.result.cause == REBOOT:
                self.start_backoff.fail(self.clock.monotonic(), MACHINE_DOWN)
            elif news.result and news.result.cause == LAUNCH and not (
                    news.result.may_pass or job.current.stop_cause):
                news = self.exclude(job, news.result.cause_line or "it could not be started")
            yield job, news

    def exclude(self, job: Job, error: str) -> News:
        """What becomes of a job that cannot begin there: another machine may have what is missing."""
        elsewhere = replace(job, excluded_nodes=(*job.excluded_nodes, (self.name, error)))
        usable = [gpu for gpu in self.service.gpu_watch.see_gpus(self.store.state) if may_use(elsewhere, gpu)]
        for name in ("", *self.service.pool.nodes):
            gpus = [gpu for gpu in usable if gpu.node == name]
            if may_run_on(elsewhere, name) and len(gpus) >= len(list_shares(job)):
                return News(requeue=f"{self.name}: {error}", excluded_nodes=elsewhere.excluded_nodes)
        return News(result=Result(None, None, 0.0, LAUNCH, f"{self.name}: {error}"))

    def end(self) -> None:
        self.is_ended = True
        self.follower.end()
        self.unpushed.worker.end()
        self.questions.end()

    def is_unheard(self, job: Job) -> bool:
        """Whether nothing is known of a job there; of one that is to end, also while the node takes long to reply."""
        is_late = self.clock.monotonic() - self.questions.due_at > LATE_S
        return self.error is not None or (job.current.stop_cause is not None and is_late)

    @property
    def since(self) -> str:
        """The time of its last reply."""
        return format_time(self.clock.now() - self.clock.monotonic() + self.heard_at) or ""

    def find_reason(self, now: float) -> str | None:
        """Why it gets no job now; None: it does."""
        if self.is_leaving:
            return f"{self.name} is being removed"
        error = self.error                                  # its thread may set it meanwhile
        if error:
            return error.message                            # it names the node
        reason = self.reports.find_limit() or self.start_backoff.find_error(now)
        return f"{self.name}: {reason}" if reason else None

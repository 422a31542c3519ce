"""What a node is asked: which attempts are wanted there, with an order for each that it does not have yet."""

from __future__ import annotations

from ..formats.codec import encode_value
from ..opening import TYPE_CHECKING
from ..schedule.limits import find_limits
from ..values.errors import NexusError
from ..values.job import Job
from ..values.value import replace
from .hosted_job import Order
from .loop import Component
from .node_line import AgentLine
from .node_news import measure_output
from .node_protocol import Question, Report, Wanted

if TYPE_CHECKING:
    from .node import Node

MAX_CHANGES = 10                # of what is wanted, without a reply; then a change waits for one
MAX_ORDERS = 100                # in one question: a node may claim to have slots without end, and read nothing


class Questions(Component):
    """The questions to a node, and the line on which they are asked.  What the service's loop has recorded is wanted.

    The node's thread asks, and so does the loop, as soon as something else is wanted.
    """

    def __init__(self, node: Node) -> None:
        import threading
        super().__init__(node.service)
        self.node = node
        self.guard = threading.RLock()                      # held to send a question, and to change what is next
        self.line: AgentLine | None = None
        self.latest: Question | None = None                 # on this line
        self.heard_number = 0                               # of the question that the last reply was about
        self.due_at = float("inf")                          # since when a reply to what is wanted is due; inf: none is
        self.has_none = False                               # the agent knows that no job is wanted
        # {attempt_key} that the agent may know: recorded by an earlier service (None), or ordered
        self.orders: dict[str, Order | None] = {job.attempt_key: None for job in node.list_own()}

    def begin(self, line: AgentLine) -> None:
        """Ask on this line from now on."""
        with self.guard:
            self.line, self.latest, self.heard_number, self.due_at = line, None, 0, float("inf")

    def end(self) -> None:
        """Close the line."""
        with self.guard:
            line, self.line = self.line, None
        if line:
            line.close()

    def ask(self) -> None:
        """Ask what is known of the jobs that are wanted now."""
        with self.guard:
            if not self.line:
                return
            recorded = {job.attempt_key for job in self.node.list_own()}
            self.orders = {key: order for key, order in self.orders.items() if key in recorded}
            former = self.latest
            self.latest = Question(
                former.number if former else 0, self.list_wanted(), self.service.pool.list_folders(self.node))
            if former is None or former.wants != self.latest.wants:
                self.latest = replace(self.latest, number=self.latest.number + 1)
                self.due_at = min(self.due_at, self.clock.monotonic())
            self.has_none = self.has_none and not self.latest.jobs
            self.line.ask(encode_value(self.latest))

    def ask_anew(self) -> None:
        """Ask again when the wanted jobs or directories are others than in the latest question."""
        with self.guard:
            latest = self.latest
            if not self.line or not latest or latest.number - self.heard_number >= MAX_CHANGES:
                return
            wanted = [(job.attempt_key, find_limits(job, self.config.jobs), job.current.stop_cause)
                      for job, _ in self.list_due()]
            if latest.wants != (self.service.pool.list_folders(self.node), wanted):
                self.ask()

    def add(self, key: str, order: Order) -> None:
        """Order an attempt with the next question.  Raises: unavailable."""
        with self.guard:
            if self.line is None:                           # it was lost since plan()
                raise NexusError("unavailable", "it cannot be reached")
            self.orders[key] = order                        # ask_anew() sends all that start together

    def list_due(self) -> list[tuple[Job, Order | None]]:
        """The attempts that it shall have now, with the orders of those that it does not have: MAX_ORDERS of them.

        The oldest orders come first: what it was sent once stays wanted.  The caller holds `guard`.
        """
        jobs = {job.attempt_key: job for job in self.node.list_own()}
        due = [(jobs[key], order) for key, order in self.orders.items() if key in jobs]
        later = {job.id for job in [job for job, order in due if order][MAX_ORDERS:]}
        return [(job, order) for job, order in due if job.id not in later]

    def list_wanted(self) -> tuple[Wanted, ...]:
        return tuple(Wanted(job.attempt_key, measure_output(self.disk, job), find_limits(job, self.config.jobs),
                            job.current.stop_cause, job.current.stop_signal, order, job.current.pid is not None)
                     for job, order in self.list_due())

    def note_reply(self, question: Question, report: Report) -> None:
        """Note what the node has and knows.  `question`: the latest when the reply came."""
        with self.guard:
            self.orders.update((row.key, None) for row in report.jobs if row.key in self.orders)        # it has these
            is_heard = self.latest is not None and report.number == self.latest.number
            self.heard_number = report.number
            self.due_at = float("inf") if is_heard else self.clock.monotonic()
            self.has_none = is_heard and not question.jobs

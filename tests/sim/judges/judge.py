"""What a judge is: it follows a history from outside, and says what does not hold.

A judge is written from the documents, not from the code: what it expects follows from what people asked for, from what the
API answers, and from what really happened in the world (Run, Command, Card).  It calls none of nexus's own decisions.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actions import Actions
    from homes import Home
    from world import Notice, Run


class Judge:
    """The hooks are called in this order, as things happen; a judge has those that it needs."""

    def __init__(self, actions: Actions) -> None:
        self.actions, self.world, self.homes, self.setup = actions, actions.world, actions.homes, actions.setup

    def fail(self, words: str) -> None:
        """A promise does not hold: the history ends here."""
        self.world.violations.append(words)

    def list_homes(self) -> list[Home]:
        """Those whose service runs."""
        return [home for home in self.homes if home.is_up]

    def read_jobs(self, home: Home) -> list[dict[str, Any]]:
        """All jobs as the API shows them now, for all judges that ask now."""
        key = home.path, self.world.now, self.world.rounds, home.service.store.state.seq
        if self.actions.jobs_read[0] != key:
            status, jobs = home.call("GET", "/jobs")
            self.actions.jobs_read = key, jobs if status == 200 else []
        return self.actions.jobs_read[1]

    def on_request(self, home: Home, method: str, path: str, body: Any, user: str, status: int, reply: Any) -> None:
        """Somebody has asked for something (user "": the owner), and had an answer; status 0: none, the service was killed."""

    def on_begin(self, run: Run) -> None:
        """The command of a job begins, at world.now."""

    def on_end(self, run: Run) -> None:
        """The command of a job has ended, by itself or not; world.now is at most a step later."""

    def on_notice(self, notice: Notice) -> None:
        """A hook is run."""

    def after_step(self) -> None:
        """After each step: must cost next to nothing where nothing has changed."""

    def look(self) -> None:
        """Every CHECK_INTERVAL steps, and once more when all has ended."""

    def on_settled(self) -> None:
        """The faults have stopped and all jobs have ended."""

"""What a request changes, as one transaction; the requests of a user wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..values.job import Job
from ..values.state import Put, State, find_groups
from .queue_limits import count_links

if TYPE_CHECKING:
    import threading
    from typing import Any

    from .service import Service

MANY = 100                      # jobs, and links of them, of a request that others need not wait for


class Transactions(Component):
    """Commits what requests change."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.user_locks: dict[str, threading.Lock] = {}

    def update(self, user: str, jobs: Sequence[Job], yield_changes: Callable[[State], Iterable[Put]]) -> Any:
        """Make the changes of a user's request for these jobs, which others wait for only where it is of few.

        Requests of one user wait for each other: side by side they would conflict again and again.
        """
        import threading
        with self.user_locks.setdefault(user, threading.Lock()):
            state = self.store.state
            is_large = len(jobs) + sum(map(count_links, jobs)) > MANY or any(
                job.id in state.dependents or not state.followers.keys().isdisjoint(find_groups(job)) for job in jobs)
            return self.store.update_large(yield_changes) if is_large else self.store.update(yield_changes)

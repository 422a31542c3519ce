"""The time, waiting, and fresh ids."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from ..opening import TYPE_CHECKING
from ..values.text import ID_LETTERS, list_case_variants

if TYPE_CHECKING:
    from typing import Any

    from ..opening import T


class Clock:
    """The real clock; tests pass another.  now() jumps when the clock is set, so it is for timestamps only."""
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def new_token(self) -> str:
        return os.urandom(24).hex()

    def new_job_id(self, taken: Mapping[str, Any], is_one_of_many: bool = False) -> str:
        """An id that no kept job has: of three letters while there are plenty, then four.

        It differs from theirs by more than case, but for more than 400,000 kept jobs: then there are too few.
        Many at once have four, so that others' meanwhile are not the same.
        """
        length, may_differ_by_case = 3 if len(taken) < 3000 and not is_one_of_many else 4, len(taken) > 400000
        while True:
            job_id = "".join(ID_LETTERS[byte % len(ID_LETTERS)] for byte in os.urandom(length))
            variants = [job_id] if may_differ_by_case else list_case_variants(job_id)
            if not any(variant in taken for variant in variants):
                return job_id


def wait_until(look: Callable[[], T], timeout_s: float, interval_s: float = 0.01) -> T:
    """Call look() until it returns something true, or the time is over; return its last result."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        found = look()
        if found or time.monotonic() > give_up_at:
            return found
        time.sleep(interval_s)


class Backoff:
    """The pause after failures: longer after each one, short again after a success.  Times are monotonic."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self.first_s, self.most_s = first_s, most_s
        self.succeed()

    def succeed(self) -> None:
        self.error: Any = None                              # of the last failure; None: the last try was a success
        self.rest_s, self.until = 0.0, float("-inf")

    def fail(self, now: float, error: Any = True) -> None:
        """Note a failure.  One during the pause does not count: its attempt began before the pause."""
        self.error = error
        if now >= self.until:
            self.rest_s = min(self.most_s, max(self.first_s, 2 * self.rest_s))
            self.until = now + self.rest_s

    def find_error(self, now: float) -> Any:
        """The error of the last failure, during the pause; else None."""
        return self.error if now < self.until else None

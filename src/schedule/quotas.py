"""The limits on several jobs together: of a group, of a user, of all."""

from __future__ import annotations

import collections

from ..values.config import JobsConfig
from ..values.job import Job
from ..values.queue_order import list_holds
from ..values.state import State
from ..values.text import format_count
from .reasons import Reason


class Quotas:
    """The limits on jobs that run together.  A further one is a sum in count(), and a step of check()."""

    def __init__(self, state: State, config: JobsConfig) -> None:
        self.groups, self.holds = state.groups, list_holds(state)
        self.most_of_user, self.most_in_all = config.max_running_per_user, config.max_running
        self.in_group, self.of_user, self.in_all = collections.Counter[str](), collections.Counter[str](), 0
        for job in state.live.values():
            self.count(job)

    def count(self, job: Job) -> None:
        """Count a job that runs, or starts now."""
        self.in_group[job.group or ""] += 1
        self.of_user[job.user] += 1
        self.in_all += 1

    def check(self, job: Job) -> Reason | None:
        """Why no further job like this may start; None if one may."""
        group = self.groups.get(job.group or "")
        if group and group.name in self.holds:
            return Reason("held", group.name, self.holds[group.name])
        if group and group.limit and self.in_group[group.name] >= group.limit:
            return make_quota_reason(group.name, group.limit, f"of group {group.name}", "its --max-concurrent")
        if self.most_of_user and self.of_user[job.user] >= self.most_of_user:
            return make_quota_reason(job.user, self.most_of_user, f"of {job.user}", "max_running_per_user")
        if self.most_in_all and self.in_all >= self.most_in_all:
            return make_quota_reason("max_running", self.most_in_all, "", "max_running")
        return None


def make_quota_reason(subject: str, limit: int, whose: str, setting: str) -> Reason:
    """`2 jobs of ann run, as many as max_running_per_user allows`."""
    words = [format_count(limit, "job"), whose, "runs" if limit == 1 else "run"]
    return Reason("quota", subject, f"{' '.join(filter(None, words))}, as many as {setting} allows")

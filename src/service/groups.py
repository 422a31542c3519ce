"""Groups in JSON: how many of their jobs wait, run and have ended, and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..schedule.reasons import format_reasons
from ..values.changes import find_retried
from ..values.job import COMPLETED, FAILED, FINAL, PENDING, RUNNING, Job
from ..values.queue_order import PendingQueue
from ..values.state import Group, State
from ..values.submission import GROUP_LIMITS
from ..values.text import format_time
from ..views.results import make_results
from .access import Identity, check_group, list_visible_groups
from .job_lists import find_group_user

if TYPE_CHECKING:
    from typing import Any


class Groups(Component):
    """Describes the groups that a caller may see."""

    def list_groups(self, caller: Identity) -> list[dict[str, Any]]:
        """GET /groups: the groups that the caller may see, in the order in which they start."""
        state = self.store.state
        groups = list(self.describe_groups(state, list_visible_groups(state, caller)).values())
        return sorted(groups, key=lambda group: (group["position"] is None, group["position"] or 0))

    def describe_groups(self, state: State, users_of: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
        """{name: row of GET /groups} of these groups, {name: whose jobs there count}."""
        queue, planned = PendingQueue(state), self.service.explainer.find_plan(state)
        groups: dict[str, dict[str, Any]] = {}
        running: dict[str, list[Job]] = {}
        for job in state.running.values():
            running.setdefault(job.group or "", []).append(job)
        for name, users in users_of.items():
            here = [job for job in running.get(name, ()) if job.user in users]
            ends = [end for user in users for end in state.ended_in.get((user, name), ())]
            ended = [state.jobs[job_id] for *_, job_id in sorted(ends)]
            places = {user: state.queued_in[user, name] for user in users if (user, name) in state.queued_in}
            first, rules = next(queue.walk(places), None), state.groups.get(name) or Group(name)
            statuses, failed = [job.status for job in ended], None
            for job in reversed(ended if FAILED in statuses else ()):
                if job.status == FAILED and not job.retried_as:
                    failed = job
                    break
            times = [job.current.runtime_seconds or 0.0 for job in ended if here and job.status == COMPLETED]
            counts = {PENDING: sum(map(len, places.values())), RUNNING: len(here),
                      **{status: statuses.count(status) for status in FINAL}}
            # As many go on to run at once as now
            left_s = sum(times) / len(times) * (counts[PENDING] / len(here) + 0.5) if times else None
            end = None if left_s is None else self.clock.now() + left_s
            groups[name] = {
                "name": name, "user": find_group_user(queue, name, users), **counts,
                **{limit: getattr(rules, limit) for limit in GROUP_LIMITS.values()},
                "hold": rules.hold, "position": first and queue.find_position(first),
                "waiting_for": first and format_reasons(self.service.explainer.list_reasons(first, state, planned)),
                "fraction": self.find_group_fraction(counts, here),
                "failed_id": failed and failed.id, "failed_line": failed and failed.current.cause_line,
                "estimated_end": format_time(end and math.ceil(end / 60) * 60)}
        return groups

    def find_group_fraction(self, counts: Mapping[str, int], running: Sequence[Job]) -> float | None:
        """How far all jobs of a group are together, where some run; None: nothing is known of those."""
        now = self.clock.now()
        fractions = [self.service.estimates.estimate_progress(job, now).get("fraction") or 0.0 for job in running]
        ended = sum(counts[status] for status in FINAL)
        return round((ended + sum(fractions)) / sum(counts.values()), 3) if any(fractions) else None

    def list_results(self, caller: Identity, group: str, order: str | None, mean: bool,
                     over: str | None) -> dict[str, Any]:
        """GET /groups/{group}/results, with all rows.  Raises: not_found; usage, when there is no such column."""
        state, now, latest = self.store.state, self.clock.now(), dict[str, str]()
        check_group(state, group, caller)
        ids = {find_retried(state, job_id, latest) for user, job_id in state.members[group] if caller.may_see(user)}
        jobs = sorted((state.jobs[job_id] for job_id in ids), key=lambda job: job.number)
        live = {job.id: self.service.job_serializer.measure_running(job, now) for job in jobs if job.status == RUNNING}
        return make_results(group, jobs, live, order, mean, over)

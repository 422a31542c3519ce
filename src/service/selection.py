"""The jobs that a request is for: by their ids or names, or by filters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from ..values.changes import list_jobs
from ..values.choice import FILTERS, Choice, describe_filters
from ..values.errors import NexusError
from ..values.job import STATUSES, Job
from ..values.state import State
from ..values.text import refuse
from .access import Identity, check_group, find_own_job


def choose_jobs(state: State, choice: Choice, caller: Identity, statuses: Sequence[str], now: float) -> list[Job]:
    """The jobs of a choice, for a change of jobs in these statuses.  Raises: not_found; forbidden; conflict."""
    if choice.ids:
        try:
            found = [find_own_job(state, told, caller, choice.status or statuses) for told in dict.fromkeys(choice.ids)]
        except NexusError as error:
            rest = "; nothing was done to the others" if len(choice.ids) > 1 else ""
            raise NexusError(error.kind, error.message + rest, error.hint) from None
        named = list({job.id: job for job in found}.values())
        check_filters(named, choice, now)
        return named
    if not choice.given:
        refuse("nothing says which jobs", hint='send "ids", "group" or "status"')
    if choice.group:
        check_group(state, choice.group, caller)
    own = [job for job in list_jobs(state, choice.status or STATUSES) if caller.may_see(job.user)]
    return choice.select(own, caller.may_see, now)


def confirm_jobs(state: State, chosen: Sequence[Job], choice: Choice, now: float) -> list[Job]:
    """What jobs that were chosen from an earlier State are now; only those that have changed are looked at again.

    Raises: not_found, conflict: as choose_jobs() of those that were named.
    """
    fits, changed, found = choice.make_test(now), list[Job](), list[Job]()
    for former in chosen:
        job = state.jobs.get(former.id)
        if job is former:
            found.append(job)
        elif job is None or job.number != former.number:
            if choice.ids:
                raise NexusError("not_found", f"job {former.id} was just forgotten", "nothing was done")
        elif choice.ids or (job.shown_status in (choice.status or STATUSES) and fits(job)):
            found.append(job)
            changed.append(job)
    check_filters(changed if choice.ids else (), choice, now)
    return found


def check_filters(jobs: Iterable[Job], choice: Choice, now: float) -> None:
    """Raises: conflict, when the filters of a choice do not match a job that it names."""
    fits = choice.make_test(now)
    for job in jobs:
        if not fits(job):
            filters = {name: getattr(choice, name) for name in choice.given if name in FILTERS}
            others = {name: fact for name, fact in filters.items() if not Choice(**{name: fact}).make_test(now)(job)}
            raise NexusError("conflict", f"job {job.id} is not{describe_filters(others, repr)}", "nothing was done")


def check_status(job: Job, statuses: Container[str], rule: str, hints: Mapping[str, str] = {}) -> Job:
    """Return the job if its status is one of `statuses`.  `hints`: {its status: what to do}.  Raises: conflict."""
    if job.shown_status not in statuses:
        raise NexusError("conflict", f"job {job.id} is {job.shown_status}{rule and '; '}{rule}",
                         hints.get(job.shown_status, f"nexus show {job.id}"))
    return job

"""What jobs used, also those that are forgotten.

A job that is forgotten leaves what it used: sums by user, group and local day, after USAGE_DAYS by month.  Usage is
that of the jobs kept and these sums together.  Days are texts like 2024-10-24, whose order is that of time.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..opening import TYPE_CHECKING
from .job import FINAL, Job
from .state import PastUsage, Put, State, UsageSums
from .value import replace

if TYPE_CHECKING:
    from .state import Changes

USAGE_DAYS = 60                 # so many days stay days
USAGE_MONTHS_DAYS = 365         # months that are older are dropped
MAX_USAGE_GROUPS = 20           # of a user in a period: further ones count as OTHER_GROUPS
OTHER_GROUPS = "(other)"


def shift_day(day: str, days: int) -> str:
    import datetime
    return (datetime.date.fromisoformat(day) + datetime.timedelta(days=days)).isoformat()


def find_day(at: float) -> str:
    """The local day of a time."""
    import datetime
    return datetime.date.fromtimestamp(at).isoformat()


def find_day_start(period: str) -> float:
    """When a local day, or the first one of a month, begins: at midnight, or at what the clock has in its place."""
    import datetime
    return datetime.datetime.fromisoformat(period if len(period) > 7 else f"{period}-01").timestamp()


def split_days(begin: float, end: float) -> Iterator[tuple[str, float]]:
    """(local day, seconds) of the days from `begin` to `end`; of the first one at least."""
    day = find_day(begin)
    while True:
        following = shift_day(day, 1)
        midnight = find_day_start(following)
        yield day, max(0.0, min(end, midnight) - begin)
        if midnight >= end:
            return
        begin, day = midnight, following


def list_runs(job: Job, now: float) -> list[tuple[float, float]]:
    """When its attempts that ran began and ended, or when it is now; nothing of it lies in the future."""
    runs = [(attempt.started_at, min(now, now if attempt.finished_at is None else attempt.finished_at))
            for attempt in job.attempts if attempt.started_at is not None]
    return [(min(begin, end), end) for begin, end in runs]


def measure_run(job: Job, seconds: float, status: str = "") -> UsageSums:
    """What a job uses in so many seconds.  `status`: its last one, if it ended then."""
    gpu_seconds, cpu_job_seconds = (seconds * job.gpus, 0.0) if job.gpus else (0.0, seconds)
    return UsageSums(gpu_seconds, cpu_job_seconds, *(int(status == final) for final in FINAL))


def split_usage(job: Job, now: float) -> dict[str, UsageSums]:
    """{local day: what a finished job used in it}.  The job counts in the day in which its last attempt ended."""
    day = ""
    oldest = now - (USAGE_MONTHS_DAYS + 32) * 86400         # of before then nothing is kept
    seconds_of = dict[str, float]()
    for begin, end in list_runs(job, now):
        for day, seconds in split_days(max(begin, oldest), end):
            seconds_of[day] = seconds_of.get(day, 0.0) + seconds
    return {day_of: measure_run(job, seconds, job.status if day_of == day else "") for day_of,
            seconds in seconds_of.items()}


def find_period(period: str, today: str) -> str:
    """Where the usage of a day or month is kept: as that day, in its month, or "" for nowhere."""
    if period >= shift_day(today, -USAGE_DAYS):
        return period
    return period[:7] if period[:7] >= shift_day(today, -USAGE_MONTHS_DAYS)[:7] else ""


def add_usage(state: State, period: str, user: str, group: str, more: UsageSums) -> Put:
    """The change that adds to the sums of a user's group in a period."""
    row = PastUsage(period, user)
    row = state.usage.get(row.key, row)
    is_new = group and group not in row.groups
    if is_new and len(row.groups.keys() - {"", OTHER_GROUPS}) >= MAX_USAGE_GROUPS:
        group = OTHER_GROUPS
    return Put("usage", row.key, replace(row, groups={**row.groups, group: row.groups.get(group, UsageSums()) + more}))


def age_usage(state: State, now: float) -> Changes:
    """The changes that make months of the days that are old, and drop the months that are."""
    today = find_day(now)
    for row in list(state.usage.values()):
        period = find_period(row.period, today)
        if period != row.period:
            yield Put("usage", row.key, None)
            for group, sums in row.groups.items() if period else ():
                yield add_usage(state, period, row.user, group, sums)


def list_usage(state: State, since: float, now: float) -> Iterator[tuple[str, str, int, UsageSums, float]]:
    """(user, group, jobs, their sums, since when) of what jobs used since then.

    It is earlier for jobs that are forgotten: of them a period counts as a whole.
    """
    for job in state.jobs.values():
        runs = list_runs(job, now)
        if runs and runs[-1][1] >= since:
            seconds = sum(max(0.0, end - max(begin, since)) for begin, end in runs)
            yield job.user, job.group or "", 1, measure_run(job, seconds, job.status), since
    first_day, oldest_day = find_day(since), shift_day(find_day(now), -USAGE_DAYS)
    for row in state.usage.values():
        is_day = len(row.period) > 7
        if row.period >= first_day if is_day else first_day < oldest_day and row.period >= first_day[:7]:
            begin = min(since, find_day_start(row.period))
            for group, sums in row.groups.items():
                yield row.user, group, sums.completed + sums.failed + sums.cancelled, sums, begin

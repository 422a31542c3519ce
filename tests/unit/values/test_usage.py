"""What jobs used, split by local day, and what is left of that when they are forgotten."""

import datetime
import time

import pytest
from makers import NOW, finished, job, put, running, state

import nexus

BERLIN, HAVANA, BRASILIA = "CET-1CEST,M3.5.0,M10.5.0/3", "CST5CDT,M3.2.0/0,M11.1.0/1", "<-03>3<-02>,M10.3.0/0,M2.3.0/0"
DAY_S, HOUR_S = 86400, 3600


@pytest.fixture
def zone(monkeypatch):
    def change(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield change
    monkeypatch.undo()
    time.tzset()


def at(text):
    """UTC epoch seconds of a UTC time."""
    return datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()


SPLITS = [  # reason, time zone, when it began in UTC, how long it ran, [(local day, hours)]
    ("within a day", "UTC0", "2024-10-24 10:00", HOUR_S, [("2024-10-24", 1)]),
    ("over midnight", "UTC0", "2024-10-24 23:00", 3 * HOUR_S, [("2024-10-24", 1), ("2024-10-25", 2)]),
    ("midnight is that of the local clock", BERLIN, "2024-10-24 21:00", 3 * HOUR_S, [("2024-10-24", 1), ("2024-10-25", 2)]),
    ("until midnight", "UTC0", "2024-10-24 22:00", 2 * HOUR_S, [("2024-10-24", 2)]),
    ("from midnight on", "UTC0", "2024-10-24 00:00", HOUR_S, [("2024-10-24", 1)]),
    ("no time at all", "UTC0", "2024-10-24 00:00", 0, [("2024-10-24", 0)]),
    ("over a month's end", "UTC0", "2024-02-29 12:00", DAY_S, [("2024-02-29", 12), ("2024-03-01", 12)]),
    ("a day of 25 hours", BERLIN, "2024-10-26 21:00", 27 * HOUR_S, [("2024-10-26", 1), ("2024-10-27", 25), ("2024-10-28", 1)]),
    ("a day of 23 hours", BERLIN, "2024-03-30 22:00", 25 * HOUR_S, [("2024-03-30", 1), ("2024-03-31", 23), ("2024-04-01", 1)]),
    ("a midnight that comes twice", HAVANA, "2024-11-03 03:00", 27 * HOUR_S,
     [("2024-11-02", 1), ("2024-11-03", 25), ("2024-11-04", 1)]),
    ("a midnight that there is not", BRASILIA, "2024-10-20 02:00", 25 * HOUR_S,
     [("2024-10-19", 1), ("2024-10-20", 23), ("2024-10-21", 1)]),
    ("the hour before midnight comes twice", BRASILIA, "2024-02-18 00:00", 4 * HOUR_S, [("2024-02-17", 3), ("2024-02-18", 1)]),
    ("weeks", "UTC0", "2024-10-01 12:00", 20 * DAY_S,
     [("2024-10-01", 12), *((f"2024-10-{day:02}", 24) for day in range(2, 21)), ("2024-10-21", 12)]),
]


@pytest.mark.parametrize("reason, name, begin, seconds, days", SPLITS, ids=[case[0] for case in SPLITS])
def test_split_days(zone, reason, name, begin, seconds, days):
    zone(name)
    assert list(nexus.split_days(at(begin), at(begin) + seconds)) == [(day, hours * HOUR_S) for day, hours in days]


def ran(*spans, **fields):
    """A finished job with attempts of these seconds, (begin, end) before NOW."""
    attempts = tuple(nexus.Attempt(number, started_at=NOW - begin, finished_at=NOW - end)
                     for number, (begin, end) in enumerate(spans, 1))
    return job(**{"status": nexus.COMPLETED, "attempts": attempts, **fields})


def change(made, changes):
    """Make each change before the next is decided, as Store does."""
    for one in changes:
        put(made, one)


def forget(made, *jobs, now=NOW):
    change(made, nexus.forget_jobs(made, jobs, now))


def sum_rows(rows):
    total = nexus.UsageSums()
    for _, _, _, sums, _ in rows:
        total += sums
    return sum(count for _, _, count, _, _ in rows), total


USED = [  # reason, a job
    ("one attempt", ran((5000, 100), gpus=2)), ("a share of a GPU", ran((5000, 100), gpus=0.25)),
    ("without a GPU", ran((5000, 100), gpus=0)), ("several attempts", ran((90000, 80000), (70000, 1000), status=nexus.FAILED)),
    ("over many days", ran((5.5 * DAY_S, 0.3 * DAY_S), status=nexus.CANCELLED)),
    ("it never ran", job(status=nexus.CANCELLED, attempts=(nexus.Attempt(0, finished_at=NOW),))),
    ("the clock was set back while it ran", ran((100, 5000))), ("and after it", ran((100, -5000))),
]


@pytest.mark.parametrize("reason, one", USED, ids=[case[0] for case in USED])
def test_a_job_that_is_forgotten_has_used_the_same(reason, one, zone):
    zone(BERLIN)
    made = state(one)
    before = list(nexus.list_usage(made, NOW - 7 * DAY_S, NOW))
    forget(made, one)
    after = list(nexus.list_usage(made, NOW - 7 * DAY_S, NOW))
    assert not made.jobs and sum_rows(after) == sum_rows(before)
    assert {row[:2] for row in after} == {row[:2] for row in before} == ({("ann", "")} if before else set())


def test_jobs_that_are_forgotten_together_have_used_the_same(zone):
    zone(BERLIN)
    jobs = [ran((5000, 100), id=id, gpus=gpus, group="g") for id, gpus in (("abA", 2), ("abB", 1), ("abC", 0.5))]
    made = state(*jobs)
    before = sum_rows(list(nexus.list_usage(made, NOW - 7 * DAY_S, NOW)))
    forget(made, *jobs)
    assert not made.jobs and sum_rows(list(nexus.list_usage(made, NOW - 7 * DAY_S, NOW))) == before


def test_usage_is_that_of_each_user_and_group(zone):
    zone("UTC0")
    jobs = [ran((7200, 3600), id="abA", group="g", gpus=2), ran((7200, 3600), id="abB", user="bob", status=nexus.FAILED),
            running("abC", group="g", started_at=NOW - 60), finished("abD", group="g", started_at=NOW - 1800)]
    made = state(*jobs)
    forget(made, *jobs[:2])
    whole = nexus.usage_json(made, "group", NOW - DAY_S, NOW, lambda user: True)
    assert [(row["group"], row["jobs"], row["ended"], row["failed"], round(row["gpu_hours"], 2)) for row in whole] == [
        ("g", 3, 2, 0, 2.52), ("-", 1, 1, 1, 1.0)]
    own = nexus.usage_json(made, "group", NOW - DAY_S, NOW, lambda user: user == "bob")
    assert [(row["group"], row["jobs"]) for row in own] == [("-", 1)], "no group of others', nor in the sums of those without"
    users = nexus.usage_json(made, "user", NOW - DAY_S, NOW, lambda user: False)
    assert {row["user"]: row["jobs"] for row in users} == {"ann": 3, "bob": 1}


def test_groups_beyond_twenty_of_a_user_and_day_are_one(zone):
    zone("UTC0")
    jobs = [ran((60, 0), id=f"a{first}{second}", group=f"g{number}", user=user)
            for user, first in (("ann", "A"), ("bob", "B"))
            for number, second in enumerate("ABCDEFGHJKLMNPQRSTUVWXYZ")]
    plain = ran((60, 0), id="xyz")
    made = state(*jobs, plain)
    forget(made, plain, *jobs)
    forget(made, ran((60, 0), id="xyy", group="g3"), ran((DAY_S, DAY_S - 60), id="xyx", group="g23"))
    today = {key: sorted((sums.completed, group) for group, sums in row.groups.items()) for key, row in made.usage.items()}
    kept = [f"g{number}" for number in range(20)]
    assert today["2024-10-24 bob"] == sorted([*((1, group) for group in kept), (4, "(other)")])
    assert today["2024-10-24 ann"] == sorted([*((1, group) for group in kept if group != "g3"), (1, ""), (2, "g3"), (4, "(other)")])
    assert today["2024-10-23 ann"] == [(1, "g23")], "another day has room"


def test_days_become_months_and_months_go(zone):
    zone("UTC0")
    made = state()
    for days in range(0, 500, 10):
        forget(made, ran((days * DAY_S + 3600, days * DAY_S), group=f"g{days % 30}"))
    assert min(made.usage) == "2023-10 ann", "what is older goes at once"
    assert {len(row.period) for row in made.usage.values() if row.period < "2024-08-25"} == {7}
    days = sorted(row.period for row in made.usage.values() if len(row.period) > 7)
    assert (days[0], days[-1], len(days)) == ("2024-08-25", "2024-10-24", 7), "sixty days ago, and today"
    _, total = sum_rows(list(nexus.list_usage(made, NOW - 300 * DAY_S, NOW)))
    assert total.completed == 33, "the month in which it begins is whole"
    sizes = []
    for later in (1, 30, 90, 366, 500):
        _, before = sum_rows(list(nexus.list_usage(made, NOW - 200 * DAY_S, NOW)))
        change(made, nexus.age_usage(made, NOW + later * DAY_S))
        _, after = sum_rows(list(nexus.list_usage(made, NOW - 200 * DAY_S, NOW + later * DAY_S)))
        assert after == before or later > 90, "what is younger than a year is all there"
        sizes.append(len(made.usage))
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 0


PERIODS = [  # a day or a month, today, as what its usage is kept; "": it is not
    ("2024-10-24", "2024-10-24", "2024-10-24"), ("2024-08-25", "2024-10-24", "2024-08-25"), ("2024-08-24", "2024-10-24", "2024-08"),
    ("2024-08", "2024-10-24", "2024-08"), ("2024-03-01", "2025-03-01", "2024-03"),
    ("2024-02", "2025-03-01", ""), ("2024-02-29", "2025-03-01", "")]


@pytest.mark.parametrize("period, today, kept", PERIODS)
def test_sixty_days_are_kept_as_days_and_a_year_as_months(period, today, kept):
    assert nexus.find_period(period, today) == kept


CUTS = [  # reason, days before NOW (15:30 UTC) when the job ended, those of since, whether it counts, from when on
    ("the same day, before", 0.3, 0.1, True, "2024-10-24T00:00:00Z"), ("the day before", 1, 0.5, False, None),
    ("within the time", 0.1, 0.3, True, "2024-10-24T00:00:00Z"), ("a later day", 0.3, 2, True, None),
    ("a month, within it", 100, 95, True, "2024-07-01T00:00:00Z"), ("a month, whole", 100, 130, True, None),
    ("a month, another", 100, 80, False, None), ("the days of a month that are still days", 65, 58, False, None),
    ("more than there are", 100, 19000, True, None), ("a time before 1970", 1, 30000, True, None),
]


@pytest.mark.parametrize("reason, ended, since, counts, begin", CUTS, ids=[case[0] for case in CUTS])
def test_where_since_cuts_a_day_that_is_whole(zone, reason, ended, since, counts, begin):
    zone("UTC0")
    made = state()
    forget(made, ran((ended * DAY_S + 60, ended * DAY_S)))
    rows = nexus.usage_json(made, "user", max(0.0, NOW - since * DAY_S), NOW, lambda user: True)
    assert [(row["user"], row["forgotten_since"]) for row in rows] == ([("ann", begin)] if counts else [])


def test_attempts_of_years_cost_no_more_than_one(zone):
    zone("UTC0")
    made = state()
    forget(made, ran((NOW, 0)), now=NOW)
    forget(made, ran((3600, -200 * 365 * DAY_S)), now=NOW)
    assert len(made.usage) <= 61 + 13 and max(made.usage) == "2024-10-24 ann"

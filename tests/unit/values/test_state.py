"""State: its indexes follow its jobs; a copy is another; tokens, changes of an attempt."""

import pytest
from makers import NOW, check_indexes, finished, job, put, running, state

import nexus

VERSIONS = [  # what a job may be, one after the other or at once
    job(), job(name="lr", group="g"), job(name="lr", user="bob", priority=0), job(name="mnist", priority=2, preemptible=True),
    job(is_held=True, group="g"), job(after=("abd",), pending_dependencies=("abd",)), job(gpus=0, group="h", retried_groups=("g",)),
    job(after_group=("g", "h"), pending_groups=("g",)),
    job(after_group=("g",), attempts=(nexus.Attempt(1, cause="exit", started_at=NOW),), name="lr"),
    job(status=nexus.SUBMITTED, name="lr", started_at=None), running(name="lr", group="g"), running(user="bob", started_at=None),
    finished(name="lr", group="g"), finished(status="failed", group="g", name="lr", status_history=(("failed", NOW),)),
    finished(status="failed", group="g", name="lr", retried_as="abd"), finished(status="cancelled", retried_groups=("g",)),
]


def test_the_indexes_say_what_the_jobs_say():
    """Whatever a job becomes, and also when it is forgotten; of a copy nothing shows in what was copied."""
    other = [nexus.replace(one, id=f"x{number}", number=number) for number, one in enumerate(VERSIONS, 2)]
    made = state(*other)
    for before in VERSIONS:
        for after in (*VERSIONS, None):
            put(made, nexus.Put("jobs", "abc", before))
            kept = made.copy()
            put(made, nexus.Put("jobs", "abc", after))
            if after is VERSIONS[0] or before is VERSIONS[0]:
                check_indexes(made)
                check_indexes(kept)
    put(made, *(nexus.Put("jobs", one.id, None) for one in (*other, job())))
    assert not any(getattr(made, name) for name in nexus.INDEXES)


KEPT = (nexus.Job, nexus.Attempt, nexus.Group, nexus.KnownNode, nexus.NodeConfig, nexus.Token, nexus.PastUsage, nexus.UsageSums,
        nexus.GpuRun, nexus.GpuMeans)
FULL = {"gpus": 1, "priority": 1, "status": "pending", "next_number": 1, "log_base": (0, 0), "log_start": (0, 0)}
EMPTY = {"str": "", "Words": "", "bool": False, "int": 0, "Count": 0, "float": 0.0, "Amount": 0.0, "tuple": (), "Mapping": {}}


@pytest.mark.parametrize("name, kind, default", [
    *((name, cls.KINDS[name], getattr(cls, name)) for cls in KEPT for name in cls.NAMES if name not in cls.REQUIRED),
    *((name, nexus.State.__annotations__[name], default) for name, default in nexus.FACTS.items())])
def test_what_files_leave_out_is_empty(name, kind, default):
    """Fields at their defaults are not written: another default would change what the files of an older nexus say."""
    wanted = FULL.get(name, None if kind.endswith(" | None") else EMPTY[kind.partition("[")[0]])
    assert (default, type(default)) == (wanted, type(wanted))


def test_a_list_of_an_index_is_copied_once():
    made = state(job("abc"), job("abd", 2))
    copied = made.copy()
    assert copied.queued["ann"] is made.queued["ann"]
    put(copied, nexus.Put("jobs", "abe", job("abe", 3)))
    own = copied.queued["ann"]
    put(copied, nexus.Put("jobs", "abc", None))
    assert copied.queued["ann"] is own and (len(own), len(made.queued["ann"])) == (2, 2)


FOLLOWED = [  # reason, a job, the groups of which it waits for each job that joins
    ("it waits", {}, ["g", "h"]), ("for one of them", {"pending_groups": ("h",)}, ["g", "h"]),
    ("it runs", {"status": "running"}, []),
    ("it is to run again", {"attempts": (nexus.Attempt(1, cause="exit"),), "pending_groups": ("h",)}, ["h"])]


@pytest.mark.parametrize("reason, fields, groups", FOLLOWED, ids=[case[0] for case in FOLLOWED])
def test_who_joins_a_group_counts_until_its_follower_starts(reason, fields, groups):
    assert list(nexus.find_followed(job(after_group=("g",), after_any_group=("h",), **fields))) == groups


@pytest.mark.parametrize("expires_at, is_good", [(None, True), (NOW + 1, True), (NOW, False), (NOW - 1, False)])
def test_a_token_is_good_until_it_expires(expires_at, is_good):
    assert nexus.Token("bob", "0" * 64, NOW - 5, expires_at).is_good(NOW) is is_good


def test_who_resumes_the_queue_knows_what_was_damaged():
    made = state(damage="state.json was torn")
    put(made, *nexus.pause_queue(True))
    assert (made.paused, made.damage) == (True, "state.json was torn")
    put(made, *nexus.pause_queue(False))
    assert (made.paused, made.damage) == (False, "")


def test_a_change_of_an_attempt_is_one_of_the_last():
    one = running(attempts=(nexus.Attempt(1, pid=6),))
    for changed in (nexus.change_attempt(one, pid=7), nexus.change_job(one, pid=7)):
        assert (changed.table, changed.key, [each.pid for each in changed.value.attempts]) == ("jobs", "abc", [6, 7])
    with pytest.raises(TypeError, match="missing or unknown: priority"):
        nexus.change_attempt(one, priority=1)

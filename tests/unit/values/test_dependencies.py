"""Jobs that come after others, or never can."""

import pytest
from makers import finished, job, put, running, state

import nexus


def test_what_can_never_start_after_others():
    made = state(job("abc"), job("abd", 2, after=("abc",), pending_dependencies=("abc",)),
                 job("abe", 3, after_any=("abc",), pending_dependencies=("abc",)),
                 job("abf", 4, after=("abd", "abc"), pending_dependencies=("abd", "abc")))
    assert nexus.find_branch(made, ["abc"]) == {"abd": "abc", "abf": "abc"}
    assert nexus.find_branch(made, ["abd", "abc"]) == {"abf": "abd"}


CHAINED = [finished("abc", number=1), job("abd", 2, after=("abc",), group="g"), job("abe", 3, after_any=("abd", "abc")),
           job("abf", 4, after_group=("g",)), job("abg", 5), job("abh", 6, after=("abg",)), job("abi", 7, after=("gone", "abg"))]


@pytest.mark.parametrize("job_id, chain", [
    ("abc", [(0, "abc"), (1, "abd"), (2, "abe"), (2, "abf")]), ("abe", [(0, "abc"), (1, "abd"), (2, "abe")]),
    ("abd", [(0, "abc"), (1, "abd"), (2, "abe"), (2, "abf")]), ("abf", [(0, "abf")]),
    ("abg", [(0, "abg"), (1, "abh"), (1, "abi")]), ("abi", [(0, "abg"), (1, "abi")])])
def test_what_a_job_comes_after_and_what_comes_after_it(job_id, chain):
    made = state(*CHAINED)
    assert [(depth, each.id) for depth, each in nexus.list_chain(made, made.jobs[job_id])] == chain


def waits(id, after=(), groups=(), group=None):
    return job(id, after=after, pending_dependencies=after, after_group=groups, pending_groups=groups, group=group)


RINGS = [  # reason, jobs of which the first is new, what is told; "": none waits for itself
    ("each for the other", [waits("abc", ("abd",)), waits("abd", ("abc",))], "it comes after job abd, which comes after it"),
    ("three", [waits("abc", ("abd",)), waits("abd", ("abe",)), waits("abe", ("abc",))],
     "it comes after job abd, which comes after job abe, which comes after it"),
    ("for itself", [waits("abc", ("abc",))], "it comes after it"),
    ("for its own group", [waits("abc", groups=("g",), group="g")], "it comes after group g, which has it"),
    ("for a group with a job that waits for it", [waits("abc", groups=("h",), group="g"), waits("abd", ("abc",), group="h")],
     "it comes after group h, which has job abd, which comes after it"),
    ("for a group that waits for its own", [waits("abc", groups=("h",), group="g"), waits("abd", groups=("g",), group="h")],
     "it comes after group h, which has job abd, which comes after group g, which has it"),
    ("two ways to one", [waits("abc", ("abd", "abe")), waits("abd", ("abf",)), waits("abe", ("abf",)), waits("abf")], ""),
    ("a billion ways, and each is gone once", [
        waits("abd", ("abc",)), waits("abc", ("A0", "B0")), waits("A30"), waits("B30"),
        *(waits(f"{side}{number}", (f"A{number + 1}", f"B{number + 1}")) for side in "AB" for number in range(30))], ""),
    ("those before it are no matter of a ring", [waits("abc", ("abd",)), waits("abd"), waits("abe", ("abc",))], ""),
    ("for a group whose jobs have ended", [waits("abc", group="g"), finished("abd", group="h"), waits("abe", ("abc",), ("h",))], ""),
    ("the ring is of others", [waits("abc", ("abd",)), waits("abd", ("abe",)), waits("abe", ("abd",))], ""),
]


@pytest.mark.parametrize("reason, jobs, told", RINGS, ids=[case[0] for case in RINGS])
def test_no_job_waits_for_itself(reason, jobs, told):
    made = state(*jobs)
    if not told:
        return nexus.check_rings(made, ["abc"])
    for is_new, subject in ((True, "the job"), (False, "job abc")):
        with pytest.raises(nexus.NexusError) as refused:
            nexus.check_rings(made, ["abc"], is_new)
        assert (refused.value.kind, refused.value.message) == ("conflict", f"{subject} would wait for itself: {told}")
    assert ("another group" in refused.value.hint) == ("group" in told)


def test_of_several_jobs_one_in_a_ring_is_told():
    with pytest.raises(nexus.NexusError) as refused:
        nexus.check_rings(state(waits("abb"), waits("abc", ("abe",)), waits("abd", ("abc",)), waits("abe", ("abd",))), ["abb", "abd"])
    assert refused.value.message == "job abd would wait for itself: it comes after job abc, which comes after job abe, which comes after it"


def test_the_ring_is_told_from_the_job_that_was_asked_for():
    after = {"aaa": "abc", "abc": "abe", "abd": "abf", "abe": "abd", "abf": "abe"}
    with pytest.raises(nexus.NexusError, match="job abd would wait for itself: it comes after job abf, which comes after job abe"):
        nexus.check_rings(state(*(waits(id, (other,)) for id, other in after.items())), ["abc", "abd"])


NEVER = [  # reason, a job that is to wait, those there, the groups, why it can never start
    ("all go on", waits("abc", ("abd",), ("g",)), [running("abd"), job("abe", group="g")], [], ""),
    ("one has completed", waits("abc", ("abd",)), [finished("abd")], [], ""),
    ("one has failed", waits("abc", ("abe", "abd")), [job("abe"), finished("abd", status="failed", cause="exit", exit_code=3)], [],
     "it was to come after job abd, which failed (exit 3)"),
    ("one was cancelled", waits("abc", ("abd",)), [finished("abd", status="cancelled")], [],
     "it was to come after job abd, which was cancelled"),
    ("its retry goes on", waits("abc", groups=("g",)), [finished("abd", status="failed", group="g", retried_as="abe")], [], ""),
    ("one of a group has failed", waits("abc", groups=("g",)), [finished("abd", status="failed", group="g", cause="timeout")], [],
     "it was to come after group g, whose job abd failed (timeout)"),
    ("it is forgotten", waits("abc", groups=("h", "g")), [], [nexus.Group("g", lost="job abd failed, and is forgotten")],
     "it was to come after group g, whose job abd failed, and is forgotten"),
]


@pytest.mark.parametrize("reason, one, others, groups, why", NEVER, ids=[case[0] for case in NEVER])
def test_why_a_job_can_never_start(reason, one, others, groups, why):
    assert nexus.find_lost(state(one, *others, groups=groups), one, one.after_group) == why


GROUPS = [  # reason, jobs, who waits for a job of group g that has failed, and so can never start
    ("its followers", [waits("abd", groups=("g",)), waits("abe", ("abd",))], {"abd": "abc", "abe": "abd"}),
    ("and its own", [waits("abd", ("abc",)), waits("abe", groups=("g",))], {"abd": "abc", "abe": "abc"}),
    ("not those to which each end is as good", [job("abd", after_any_group=("g",), pending_groups=("g",))], {}),
    ("not those of another group", [waits("abd", groups=("h",))], {}),
]


@pytest.mark.parametrize("reason, followers, lost", GROUPS, ids=[case[0] for case in GROUPS])
def test_what_can_never_start_after_a_group(reason, followers, lost):
    assert nexus.find_branch(state(job("abc", group="g"), *followers), ["abc"]) == lost


HOLDS = [  # reason, the group, its other jobs, whether it is held once its pending job has been cancelled
    ("none is left", nexus.Group("g", hold="its first 3 jobs failed"), [], False),
    ("another one waits", nexus.Group("g", hold="its first 3 jobs failed"), [job("abd", 2, group="g")], True),
    ("somebody has paused it", nexus.Group("g", hold="paused by ann", is_paused=True), [], True),
]


@pytest.mark.parametrize("reason, group, others, is_held", HOLDS, ids=[case[0] for case in HOLDS])
def test_a_group_that_failed_is_held_until_none_of_it_waits(reason, group, others, is_held):
    made = state(job("abc", group="g"), *others, groups=[group])
    for change in nexus.end_job(made, made.jobs["abc"], nexus.CANCELLED, 1.0, cause="killed"):
        put(made, change)
    assert made.groups["g"] == (group if is_held else nexus.Group("g"))

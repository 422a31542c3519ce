"""What may become of a job, and of those that come after it."""

import pytest
from makers import NOW, check_indexes, finished, job, put, running, state

import nexus

CHANGES = [  # from, to, allowed
    ("pending", "running", True), ("pending", "cancelled", True), ("pending", "completed", False),
    ("pending", "failed", False),
    ("pending", "pending", False), ("pending", "submitted", True),
    ("submitted", "running", True), ("submitted", "cancelled", True), ("submitted", "pending", True),
    ("submitted", "submitted", False), ("submitted", "completed", False), ("submitted", "failed", False),
    ("running", "completed", True), ("running", "failed", True), ("running", "cancelled", True),
    ("running", "pending", True),
    ("running", "running", False), ("running", "submitted", False),
    *[(final, status, False) for final in ("completed", "failed", "cancelled")
      for status in ("pending", "submitted", "running", "completed", "failed", "cancelled")],
]
SHOWN = {"submitted": "pending"}            # how it is shown; all others as what they are


@pytest.mark.parametrize("old, new, allowed", CHANGES, ids=[f"{old}-{new}" for old, new, _ in CHANGES])
def test_change_status(old, new, allowed):
    before = job(status=old, status_history=((old, NOW - 5),), started_at=NOW - 5)
    if not allowed:
        with pytest.raises(nexus.NexusError) as caught:
            nexus.change_status(before, new, NOW)
        assert caught.value.kind == "conflict" and "abc" in caught.value.message and f"is {SHOWN.get(old, old)} and" in caught.value.message
        return
    change = nexus.change_status(before, new, NOW, exit_code=3)
    after = change.value
    assert (change.table, change.key, after.status, after.attempts[-1].exit_code) == ("jobs", "abc", new, 3)
    assert after.status_history == ((old, NOW - 5), *([] if new == "submitted" else [(new, NOW)]))
    assert after.shown_status == SHOWN.get(new, new)


def test_the_table_of_changes_is_complete():
    assert len(CHANGES) == len({*nexus.STATUSES, nexus.SUBMITTED}) ** 2
    assert set(nexus.FINAL) == set(nexus.STATUSES) - set(nexus.TRANSITIONS)


def letters(number):
    """An id for a number."""
    base = nexus.ID_LETTERS
    return base[number // len(base) ** 2 % len(base)] + base[number // len(base) % len(base)] + base[number % len(base)]


def test_finished_jobs_stand_in_the_order_in_which_they_ended():
    made = state(job("aaa"), job("bbb", 2), job("ccc", 3))
    for id in ("bbb", "ccc", "aaa"):
        put(made, nexus.change_status(made.jobs[id], nexus.RUNNING, NOW))
    for at, id in enumerate(("ccc", "aaa", "bbb")):
        put(made, nexus.change_status(made.jobs[id], nexus.COMPLETED, NOW + at))
    assert [one.id for one in nexus.list_finished(made)] == ["ccc", "aaa", "bbb"]


# The end of a job, and of those that come after it


def list_startable(made):
    return [one.id for one in nexus.list_pending(made) if nexus.find_class(one)]


def end(made, id, status, **facts):
    """{id: status} of the jobs that are changed; each change is made as it comes."""
    before = dict(made.jobs)
    for change in nexus.end_job(made, made.jobs[id], status, NOW, **facts):
        put(made, change)
        check_indexes(made)
    return {one.id: one.status for one in made.jobs.values() if one != before[one.id]}


def child(id, number, *parents, **fields):
    return job(id, number, after=parents, pending_dependencies=parents, **fields)


def follower(id, number, *groups, **fields):
    """One that comes after groups, of which a job has not ended."""
    return job(id, number, **{"after_group": groups, "pending_groups": groups, **fields})


ENDS = [  # reason, jobs, status and facts of the first one's end, who is changed and what it is then, who may start then
    ("it completed: the next may start", [running("aaa"), child("bbb", 2, "aaa")], "completed", {},
     {"aaa": "completed", "bbb": "pending"}, ["bbb"]),
    ("but not while it comes after another", [running("aaa"), running("xxx", (1,), number=9), child("bbb", 2, "aaa", "xxx")],
     "completed", {}, {"aaa": "completed", "bbb": "pending"}, []),
    ("and those after that, too", [running("aaa"), child("bbb", 2, "aaa"), child("ccc", 3, "bbb"), job("ddd", 4)],
     "failed", {"cause": "exit", "exit_code": 3}, {"aaa": "failed", "bbb": "cancelled", "ccc": "cancelled"}, ["ddd"]),
    ("one that comes after two of them ends once",
     [running("aaa"), child("bbb", 2, "aaa"), child("ccc", 3, "aaa"), child("ddd", 4, "bbb", "ccc")], "failed", {},
     {"aaa": "failed", "bbb": "cancelled", "ccc": "cancelled", "ddd": "cancelled"}, []),
    ("it was the last one of a group", [running("aaa", group="g"), follower("bbb", 2, "g")], "completed", {},
     {"aaa": "completed", "bbb": "pending"}, ["bbb"]),
    ("but not of this one", [running("aaa", group="g"), job("xxx", 9, group="g", is_held=True), follower("bbb", 2, "g")],
     "completed", {}, {"aaa": "completed"}, []),
    ("nor of all groups", [running("aaa", group="g"), job("xxx", 9, group="h", is_held=True), follower("bbb", 2, "g", "h")],
     "completed", {}, {"aaa": "completed", "bbb": "pending"}, []),
    ("a group of which one failed, and what comes after that", [
        running("aaa", group="g"), follower("bbb", 2, "g", group="h"), follower("ccc", 3, "h"), child("ddd", 4, "ccc"),
        follower("eee", 5, "g", after_group=(), after_any_group=("g",))], "failed", {},
     {"aaa": "failed", "bbb": "cancelled", "ccc": "cancelled", "ddd": "cancelled", "eee": "pending"}, ["eee"]),
    ("it counted for the group of the failure that it did again", [
        running("aaa", group="h", retried_groups=("g",)), follower("bbb", 2, "g")], "failed", {},
     {"aaa": "failed", "bbb": "cancelled"}, []),
    ("it was taken out of the queue", [job("aaa"), child("bbb", 2, "aaa")], "cancelled", {"cause": "killed"},
     {"aaa": "cancelled", "bbb": "cancelled"}, []),
]


@pytest.mark.parametrize("reason, jobs, status, facts, changed, free", ENDS, ids=[case[0] for case in ENDS])
def test_end_job(reason, jobs, status, facts, changed, free):
    made = state(*jobs)
    assert end(made, "aaa", status, **facts) == changed, reason
    assert list_startable(made) == free


@pytest.mark.parametrize("attempts", [(), (nexus.Attempt(1, started_at=NOW - 90, cause="exit"), nexus.Attempt(2, cause="exit"))])
def test_what_is_taken_out_of_the_queue_has_a_last_attempt_that_never_ran(attempts):
    made = state(job("aaa", attempts=attempts))
    end(made, "aaa", "cancelled", cause="killed")
    assert made.jobs["aaa"].attempts == (*attempts, nexus.Attempt(len(attempts), finished_at=NOW, cause="killed"))


@pytest.mark.parametrize("has_hook, has_group_hook, group, due", [
    (False, False, "g", (False, False)), (True, False, "g", (True, False)), (False, True, "g", (False, True)),
    (True, True, None, (True, False))])
def test_which_hooks_are_due_of_a_job_that_ends(has_hook, has_group_hook, group, due):
    made = state(running("aaa", group=group), child("bbb", 2, "aaa", group=group), has_hook=has_hook, has_group_hook=has_group_hook)
    end(made, "aaa", "failed", cause="exit", exit_code=1)
    assert [(one.is_hook_due, one.is_group_due) for one in made.jobs.values()] == [due, due], "of what goes with it, too"


def test_jobs_are_listed_by_their_ends_their_starts_and_their_turns():
    made = state(job("aaa", 1, priority=2), job("bbb", 2), running("ccc", (1,)), running("fff", (2,)),
                 finished("ddd", status_history=(("completed", NOW),)),
                 finished("eee", status="failed", status_history=(("failed", NOW - 9),)))
    listed = {"completed": ["ddd"], "failed": ["eee"], "running": ["ccc", "fff"], "pending": ["bbb", "aaa"]}
    for status, ids in listed.items():
        assert [one.id for one in nexus.list_jobs(made, (status,))] == ids
    assert [one.id for one in nexus.list_jobs(made, nexus.STATUSES)] == ["eee", "ddd", "ccc", "fff", "bbb", "aaa"]


LOST = [  # reason, a job that is forgotten, the others, group g before, and then
    ("it failed", finished(status="failed", cause="exit", exit_code=3, group="g"), [job("abd", group="g")], None,
     nexus.Group("g", lost="job abc failed (exit 3), and is forgotten")),
    ("it has a limit, too", finished(status="cancelled", cause="killed", group="g"), [job("abd", group="g")], nexus.Group("g", 2),
     nexus.Group("g", 2, lost="job abc was cancelled (killed), and is forgotten")),
    ("it completed", finished(group="g"), [job("abd", group="g")], None, None),
    ("it was retried", finished(status="failed", retried_as="abd", group="g"), [job("abd", group="g")], None, None),
    ("none is left in it", finished(status="failed", cause="exit", group="g"), [], None, None),
    ("it failed in its place", finished(status="failed", cause="timeout", retried_groups=("g",)), [job("abd", group="g")], None,
     nexus.Group("g", lost="job abc failed (timeout), and is forgotten")),
]


@pytest.mark.parametrize("reason, gone, others, group, left", LOST, ids=[case[0] for case in LOST])
def test_what_a_group_has_lost_counts_until_nobody_is_in_it(reason, gone, others, group, left):
    made = state(gone, *others, groups=[group] if group else [])
    for change in nexus.forget_jobs(made, [gone], NOW):
        put(made, change)
    assert made.groups.get("g") == left
    assert list(nexus.renew_group(made, "g")) == [], "who joins those that wait comes after what was lost"
    put(made, *(nexus.Put("jobs", id, None) for id in [*made.jobs]))
    renewed = [nexus.Put("groups", "g", nexus.replace(left, lost=None))] if left else []
    assert list(nexus.renew_group(made, "g")) == renewed and list(nexus.renew_group(made, None)) == []


PARENTS = [  # reason, what became of the parent, what its child's cause_line says
    ("its exit code", {"status": "failed", "cause": "exit", "exit_code": 3}, "job aaa, which failed (exit 3)"),
    ("its cause", {"status": "failed", "cause": "timeout", "exit_code": 143}, "job aaa, which failed (timeout)"),
    ("cancelled", {"status": "cancelled", "cause": "killed"}, "job aaa, which was cancelled (killed)"),
]


@pytest.mark.parametrize("reason, facts, part", PARENTS)
def test_a_cancelled_child_names_its_parent(reason, facts, part):
    made = state(running("aaa"), child("bbb", 2, "aaa"), child("ccc", 3, "bbb"))
    end(made, "aaa", **facts)
    assert made.jobs["bbb"].current.cause == made.jobs["ccc"].current.cause == "dependency"
    assert part in made.jobs["bbb"].current.cause_line, reason
    assert "job bbb, which was cancelled (dependency)" in made.jobs["ccc"].current.cause_line, "the next one up, not the first"
    assert made.jobs["bbb"].current.finished_at == NOW and made.jobs["bbb"].status_history[-1] == ("cancelled", NOW)
    assert made.dependents == {}


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_after_any_an_end_is_as_good_as_another(status):
    made = state(running("aaa"), job("bbb", 2, after_any=("aaa",), pending_dependencies=("aaa",)),
                 job("ccc", 3, after=("aaa",), after_any=("aaa",), pending_dependencies=("aaa",)))
    end(made, "aaa", status=status)
    assert (made.jobs["bbb"].status, made.jobs["bbb"].pending_dependencies) == ("pending", ())
    assert made.jobs["ccc"].status == ("pending" if status == "completed" else "cancelled"), "after says more"
    assert made.dependents == {}


def test_a_chain_of_thousands_ends_at_once():
    names = [letters(number) for number in range(3000)]
    made = state(running(names[0]), *[child(id, number, names[number - 1]) for number, id in enumerate(names) if number])
    for change in nexus.end_job(made, made.jobs[names[0]], "failed", NOW, cause="exit", exit_code=1):
        put(made, change)
    causes = {one.current.cause for one in nexus.list_finished(made)}
    assert not made.pending and made.dependents == {} and causes == {"exit", "dependency"}


TRIMMED = [  # reason, (user, whether it ran) of the finished jobs in the order of their ends, the limit, what goes by its number
    ("one user's thousand end nobody else's", [("bob", True)] + 4 * [("ann", True)] + [("bob", True)], 2, [1, 2]),
    ("what never ran pushes out nothing that ran", [("ann", True)] + 5 * [("ann", False)], 2, [1, 2, 3]),
    ("nor the other way round", [("ann", False)] + 3 * [("ann", True)], 2, [1]),
    ("as many as may stay", 2 * [("ann", True)] + 2 * [("ann", False)], 2, [])]


@pytest.mark.parametrize("reason, ended, limit, gone", TRIMMED, ids=[case[0] for case in TRIMMED])
def test_of_whom_the_history_is_shortened(reason, ended, limit, gone):
    made = state(*(finished(letters(number), number=number, user=user, started_at=NOW if has_run else None,
                            status_history=(("completed", NOW + number),)) for number, (user, has_run) in enumerate(ended)))
    assert [one.number for one in nexus.choose_trimmed(made, limit)] == gone


NOTES = [  # reason, known, told, notes then
    ("new ones come last", ("a",), ["a", "b"], ("a", "b")), ("none is new", ("a", "b"), ["b"], ("a", "b")),
    ("known ones keep their places", ("a", "b"), ["a", "c"], ("a", "b", "c")),
    ("one twice", (), ["a", "a"], ("a",)), ("too many", (), [str(number) for number in range(30)], tuple(map(str, range(10, 30)))),
    ("too many with those before", tuple("abcdefghijklmnopqrst"), ["c", "x"], (*"bdefghijklmnopqrst", "c", "x")),
]


@pytest.mark.parametrize("reason, known, told, notes", NOTES, ids=[case[0] for case in NOTES])
def test_add_notes(reason, known, told, notes):
    assert nexus.add_notes(known, told) == notes and nexus.add_notes(notes, told) == notes


REQUEUES = [  # reason, why it was to be stopped, its status then, the cause
    ("its GPU was taken", None, "pending", "requeued"),
    ("somebody had cancelled it", "killed", "cancelled", "killed"),
    ("it made room before it began", "preempted", "pending", "requeued"),
    ("its GPU idled for too long before it began", "idle", "pending", "requeued"),
    ("job.sh needed more than its time before it began", "timeout", "pending", "requeued"),
    ("the machine was going down", "reboot", "pending", "requeued"),
]


@pytest.mark.parametrize("reason, stop_cause, status, cause", REQUEUES, ids=[row[0] for row in REQUEUES])
def test_an_attempt_that_has_not_begun_ends_its_job_only_if_somebody_has_cancelled_it(reason, stop_cause, status, cause):
    history = ("pending", NOW - 90), ("running", NOW - 60)
    there = state(running("abc", stop_cause=stop_cause, processes_left=2, status_history=history))
    for change in nexus.requeue(there, there.jobs["abc"], "a GPU was taken", NOW):
        put(there, change)
    after = there.jobs["abc"]
    assert (after.status, after.attempts[-1].cause, after.attempts[-1].processes_left) == (status, cause, None)
    if status == "pending":
        assert after.status_history == (("pending", NOW - 90),), "it waits since it came"
        assert (after.attempts[-1].started_at, after.attempts[-1].finished_at) == (None, NOW)


def test_what_has_run_waits_anew():
    there = state(running("abc", status_history=(("pending", NOW - 90), ("running", NOW - 60))))
    put(there, *nexus.requeue(there, there.jobs["abc"], "the machine went down", NOW, has_run=True))
    after = there.jobs["abc"]
    assert after.status_history == (("pending", NOW - 90), ("running", NOW - 60), ("pending", NOW))
    assert (after.attempts[-1].started_at, after.attempts[-1].cause_line) == (NOW - 60, "the machine went down")


def test_the_latest_retry_of_a_job_counts():
    retries = {"aaa": "bbb", "bbb": "ccc", "ccc": None, "ddd": "forgotten"}
    made, latest = state(*(finished(id, retried_as=later) for id, later in retries.items())), {}
    assert [nexus.find_retried(made, id, latest) for id in [*retries, "aaa"]] == ["ccc", "ccc", "ccc", "ddd", "ccc"]
    assert latest == {"aaa": "ccc", "bbb": "ccc"}, "so that a chain is gone along once"


LEFT = [  # status, cause, its retry, whether `retry` of all takes it
    ("failed", "exit", None, True), ("failed", "exit", "abd", False), ("cancelled", "dependency", None, True),
    ("cancelled", "dependency", "abd", False), ("cancelled", "killed", None, False), ("completed", None, None, False)]


@pytest.mark.parametrize("status, cause, retried_as, is_left", LEFT)
def test_what_is_left_to_retry(status, cause, retried_as, is_left):
    assert nexus.is_left_to_retry(status, cause, retried_as) is is_left


@pytest.mark.parametrize("status", nexus.TRANSITIONS)
def test_only_what_has_ended_is_run_again(status):
    if status in nexus.FINAL:
        return nexus.check_can_retry("abc", status)
    with pytest.raises(nexus.NexusError) as caught:
        nexus.check_can_retry("abc", status)
    assert (caught.value.kind, caught.value.message) == ("conflict", f"job abc is {status}; only a finished one can be run again")

"""Section 4: jobs, what may become of them, and State with its indexes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import NOW, finished, job, put, running, state

import nexus

# What may become of a job

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


# State and its indexes


def check_indexes(made):
    """That every index of State says what its jobs say."""
    pending = {one.id: one for one in made.jobs.values() if one.status in (nexus.PENDING, nexus.SUBMITTED)}
    ordered = nexus.list_pending(made)
    assert {one.id: one for one in ordered} == pending and len(ordered) == len(pending)
    assert made.pending == pending
    queue = nexus.PendingQueue(made)
    assert [queue.find_position(one) for one in ordered] == list(range(len(ordered)))
    by_class, dependents, named, members, queued, queued_in, prioritized, ended_by, ended_in = ({} for _ in range(9))
    unretried, followers, awaited, lost = ({} for _ in range(4))
    for one in made.jobs.values():
        if one.status in nexus.FINAL:
            item = one.status_history[-1][1] if one.status_history else 0.0, one.number, one.id
            ended_by.setdefault(one.status, []).append(item)
            ended_in.setdefault((one.user, one.group or ""), []).append(item)
        for user in (None, one.user) if one.name else ():
            named.setdefault((user, one.name), []).append((one.number, one.id))
            if one.retried_as is None:
                unretried.setdefault((user, one.name), []).append((one.number, one.id))
        for group in {one.group, *one.retried_groups} - {None}:
            if one.status not in nexus.FINAL:
                awaited.setdefault(group, []).append((one.number, one.id))
            elif one.status != nexus.COMPLETED and one.retried_as is None:
                lost.setdefault(group, []).append(one.id)
        if one.group:
            members.setdefault(one.group, []).append((one.user, one.id))
    for one in pending.values():
        place = one.preemptible, *one.queue_key, one.id, one.gpus or 0.01
        queued.setdefault(one.user, []).append(place)
        queued_in.setdefault((one.user, one.group or ""), []).append(place)
        prioritized.setdefault("high" if one.priority < 1 else "low" if one.priority > 1 else "normal", []).append(one.id)
        if not one.is_held and not one.pending_dependencies and not one.pending_groups and one.status == nexus.PENDING:
            by_class.setdefault(nexus.find_class(one), []).append((one.queue_key, one.id))
        for parent in one.pending_dependencies:
            dependents.setdefault(parent, []).append(one.id)
        groups = one.pending_groups if one.attempts else (*one.after_group, *one.after_any_group)
        for group in {*groups} if one.status == nexus.PENDING else ():
            followers.setdefault(group, []).append(one.id)
    for index, wanted in ((made.ready, by_class), (made.dependents, dependents), (made.named, named), (made.members, members),
                          (made.queued, queued), (made.queued_in, queued_in), (made.prioritized, prioritized),
                          (made.ended, ended_by), (made.ended_in, ended_in), (made.unretried, unretried),
                          (made.followers, followers), (made.awaited, awaited), (made.lost, lost)):
        assert index == {key: sorted(items) for key, items in wanted.items()}
    assert made.running == {id: one for id, one in made.jobs.items() if one.status == nexus.RUNNING}
    assert made.live == {id: one for id, one in made.jobs.items() if one.status in (nexus.RUNNING, nexus.SUBMITTED)}
    ended = {id: one for id, one in made.jobs.items() if one.status in nexus.FINAL}
    assert {one.id: one for one in nexus.list_finished(made)} == ended
    assert all(id == one.id for id, one in made.jobs.items())
    assert all(one.number < made.next_number for one in made.jobs.values())


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


SHARES = [  # GPUs, whether alone, hundredths of each
    (0, False, []), (1, False, [100]), (3, False, [100, 100, 100]), (0.5, False, [50]), (0.01, False, [1]),
    (1.5, False, [100, 50]), (2.25, False, [100, 100, 25]), (0.29, False, [29]), (1.15, False, [100, 15]),
    (0.5, True, [100]), (1.5, True, [100, 100]), (2, True, [100, 100]), (0, True, []),
]


@pytest.mark.parametrize("gpus, exclusive, shares", SHARES)
def test_list_shares(gpus, exclusive, shares):
    assert nexus.list_shares(job(gpus=gpus, exclusive=exclusive)) == shares


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


# The order of the queue

def listed(made):
    return [one.id for one in nexus.list_pending(made)]


def test_lower_priority_numbers_run_first_and_equal_ones_in_the_order_of_their_coming():
    made = nexus.State()
    for id, priority in (("aaa", 1), ("bbb", 2), ("ccc", 0), ("ddd", 1), ("eee", -5)):
        put(made, *nexus.add_job(job(id, **nexus.next_place(made, priority))))
    assert listed(made) == ["eee", "ccc", "aaa", "ddd", "bbb"]


MOVES = [  # reason, jobs as user, number and priority, (which is moved, to the front?) one after the other, the queue then, its priority
    ("to the front, twice", "a1.1 a2.1 a3.1", [("a3", True), ("a2", True)], "a2 a3 a1", 1),
    ("to the end, twice", "a1.1 a2.1 a3.1", [("a1", False), ("a2", False)], "a3 a1 a2", 1),
    ("where it is", "a1.1 a2.1", [("a1", True), ("a2", False)], "a1 a2", 1),
    ("the front passes priorities", "a1.0 a2.1 a3.2", [("a3", True)], "a3 a1 a2", 0),
    ("an urgent one stays urgent", "a1.1 a2.0 a3.2", [("a2", True)], "a2 a1 a3", 0),
    ("the end is of the last priority", "a1.0 a2.1 a3.2", [("a1", False)], "a2 a3 a1", 2),
    ("before everybody's", "a1.1 a2.1 b3.1 b4.1", [("a2", True)], "a2 b3 a1 b4", 1),
    ("the last of many users' is the last of its own", "a1.1 a2.1 b3.1 b4.1", [("b3", False)], "a1 b4 a2 b3", 1),
    ("alone", "a1.2", [("a1", True), ("a1", False)], "a1", 2),
    ("several keep their order", "a1.1 a2.0 a3.2 a4.1", [("a4 a3", True)], "a4 a3 a2 a1", 0),
    ("as they are named, to the end", "a1.1 a2.1 a3.1", [("a2 a1", False)], "a3 a2 a1", 1),
    ("before another", "a1.1 a2.1 a3.1 a4.1", [("a4 a1", "a3")], "a2 a4 a1 a3", 1),
    ("before the first", "a1.1 a2.1 a3.1", [("a3 a2", "a1")], "a3 a2 a1", 1),
    ("before one of another priority", "a1.0 a2.1 a3.2", [("a1", "a3")], "a2 a1 a3", 2),
    ("before one that was moved", "a1.1 a2.1 a3.1", [("a3", True), ("a1", False), ("a2", "a3")], "a2 a3 a1", 1),
]


@pytest.mark.parametrize("reason, jobs, moves, expected, priority", MOVES, ids=[case[0] for case in MOVES])
def test_move_jobs(reason, jobs, moves, expected, priority):
    made = state(*[job(name[:2], int(name[1]), user=name[0], priority=int(name[3])) for name in jobs.split()])
    for names, where in moves:
        moved = [made.jobs[name] for name in names.split()]
        is_place = isinstance(where, bool)
        changes = nexus.move_jobs(made, moved, where) if is_place else nexus.move_before(made, moved, made.jobs[where])
        put(made, *list(changes))
    assert " ".join(listed(made)) == expected, reason
    assert made.jobs[moves[-1][0].split()[0]].priority == priority
    put(made, *nexus.add_job(job("new", user="a", **nexus.next_place(made, 2))))
    assert listed(made)[-1] == "new", "a new job comes last, whatever was moved"
    check_indexes(made)


def test_there_is_always_room_before_a_job():
    """However often jobs move, where halves of numbers come to an end."""
    made = state(*(job(name, number) for number, name in enumerate(["aaa", "bbb", "ccc", "ddd"], 1)))
    for turn in range(200):
        moved = ["aaa", "bbb"] if turn % 2 else ["bbb", "aaa"]
        put(made, *list(nexus.move_before(made, [made.jobs[name] for name in moved], made.jobs["ddd"])))
        assert listed(made) == ["ccc", *moved, "ddd"], turn
        put(made, *list(nexus.move_before(made, [made.jobs["ccc"]], made.jobs[moved[1]])))
        assert listed(made) == [moved[0], "ccc", moved[1], "ddd"], turn
    for _ in range(200):
        put(made, *list(nexus.move_jobs(made, [made.jobs["ccc"], made.jobs["aaa"]], False)))
        assert listed(made) == ["bbb", "ddd", "ccc", "aaa"] or listed(made)[2:] == ["ccc", "aaa"]
    check_indexes(made)



SHARING = [  # reason, running jobs (user, GPUs), waiting ones (user, GPUs, priority) in the order of their coming, the users as they start
    ("by turns, who came first begins", [], [("a", 1, 1), ("a", 1, 1), ("a", 1, 1), ("b", 1, 1), ("b", 1, 1)], "a b a b a"),
    ("who has fewer GPUs in use", [("a", 2)], [("a", 1, 1), ("b", 1, 1), ("b", 1, 1), ("b", 1, 1)], "b b b a"),
    ("large jobs count as what they take", [], [("a", 4, 1), ("a", 1, 1), *[("b", 1, 1)] * 5], "a b b b b a b"),
    ("shares, too", [], [("a", 0.5, 1), ("a", 0.5, 1), ("a", 0.5, 1), ("b", 1, 1), ("b", 1, 1)], "a b a a b"),
    ("a priority is before all shares", [("a", 8)], [("b", 1, 1), ("a", 1, 0), ("b", 1, 1)], "a b b"),
    ("what starts in one priority counts in the next", [], [("a", 2, 0), ("a", 1, 1), ("b", 1, 1), ("b", 1, 1)], "a b b a"),
    ("CPU slots by turns, too", [], [("a", 0, 1), ("a", 0, 1), ("b", 0, 1), ("b", 0, 1)], "a b a b"),
]


@pytest.mark.parametrize("reason, busy, waiting, expected", SHARING, ids=[case[0] for case in SHARING])
def test_users_share_the_gpus(reason, busy, waiting, expected):
    made = state(*[running(f"r{n}", tuple(range(gpus)), user=user) for n, (user, gpus) in enumerate(busy)],
                 *[job(f"w{n}", n, user=user, gpus=gpus, priority=priority) for n, (user, gpus, priority) in enumerate(waiting)])
    assert " ".join(one.user for one in nexus.list_pending(made)) == expected, reason
    check_indexes(made)


queued_jobs = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 0, 0.5, 1, 2]), st.sampled_from([0, 1, 1]),
                                 st.booleans(), st.sampled_from([None, "g", "h"])), max_size=30)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 0.5, 1, 2])), max_size=4), queued_jobs)
def test_a_part_of_the_queue_has_the_order_of_the_whole(busy, waiting):
    """The positions, too, are those of the list in which all pending jobs start one after the other."""
    made = state(*[running(f"r{n}", (90 + n,), user=user, gpus=gpus) for n, (user, gpus) in enumerate(busy)],
                 *[job(f"w{n}", n, user=user, gpus=gpus, priority=priority, preemptible=preemptible, group=group)
                   for n, (user, gpus, priority, preemptible, group) in enumerate(waiting)])
    check_indexes(made)
    classes, used, whole = {}, nexus.count_use(made), []
    for key, one in sorted((one.queue_key, one.id) for one in made.pending.values()):
        classes.setdefault((made.jobs[one].user, made.jobs[one].preemptible), []).append((key, one))
    for _, one in nexus.walk_queue(made, classes, used):
        whole.append(one)
        nexus.add_use(used, one)
    queue = nexus.PendingQueue(made)
    assert list(queue.walk(made.queued)) == whole
    for group in ("", "g", "h"):
        places = {user: items for (user, name), items in made.queued_in.items() if name == group}
        assert list(queue.walk(places)) == [one for one in whole if (one.group or "") == group]


# What a submission may say

ACCEPTED = [  # reason, keys beside the command, field, value
    ("the least", {}, "job", {"command": "ls"}),
    ("GPUs by index", {"gpu_ids": [5, 0, 5]}, "gpu_ids", (0, 5)),
    ("as the command line writes them", {"gpu_ids": "0-3,5"}, "gpu_ids", (0, 1, 2, 3, 5)),
    ("null is as if it were not there", {"gpus": None, "gpu_ids": None, "name": None, "cwd": None, "env": None},
     "name", None),
    ("priority by name", {"priority": "high"}, "priority", 0),
    ("bytes that are no UTF-8, as Python reads them", {"cwd": "/home/\udcff"}, "cwd", "/home/\udcff"),
    ("after others, in a text", {"after": "abc,abd"}, "after", ("abc", "abd")), ("after nobody", {"after": []}, "after", ()),
    ("no retries, whatever the configuration says", {"retries": 0}, "retries", 0),
    ("a time in words", {"timeout_seconds": "1h30m"}, "timeout_seconds", 5400),
    ("memory in words", {"gpu_mem_mib": "10G"}, "gpu_mem_mib", 10240),
    ("of the folder itself", {"snapshot": "a" * 40, "snapshot_repo": "/home/ann/x", "cwd": "/home/ann/x"}, "snapshot_repo", "/home/ann/x"),
]


@pytest.mark.parametrize("reason, keys, field, value", ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_parse_submission(reason, keys, field, value):
    [asked] = nexus.parse_submission({"command": "ls", **keys})
    assert getattr(asked if field in nexus.Asked.NAMES else asked_job(asked), field) == value, reason


def asked_job(asked):
    """The job that is asked for; by default with one GPU."""
    made = job(**{"name": None, "cwd": None, **asked.job})
    nexus.check_gpus(made)
    return made


REFUSED = [  # reason, submission, what the message names
    ("a list", [], "a job must be an object"),
    ("NUL in a command", {"command": "a\0b"}, "NUL"),
    ("a command Linux would not take", {"command": "x" * 131072}, "131071"),
    ("half a character", {"command": "echo \ud800"}, "Unicode"),
    ("an unknown key, and the nearest", {"command": "ls", "gpu": 1}, "'gpu' is not a key of a job; did you mean 'gpus'?"),
    ("no command", {}, "command is missing"),
    ("no GPU named", {"command": "ls", "gpu_ids": []}, "gpu_ids"),
    ("more GPUs than named", {"command": "ls", "gpus": 3, "gpu_ids": [0, 1, 1]}, "3 GPUs"),
    ("GPUs named for a CPU job", {"command": "ls", "gpus": 0, "gpu_ids": [0]}, "gpu_ids"),
    ("a priority that is none", {"command": "ls", "priority": "urgent"}, "urgent"),
    ("a name no variable can have", {"command": "ls", "env": {"A=B": "1"}}, "a key of env must be the name of a variable"),
    ("NUL in a variable", {"command": "ls", "env": {"A": "a\0"}}, "A"),
    ("a variable longer than Linux takes", {"command": "ls", "env": {"A": "x" * 131070}}, "A"),
    ("a third decimal", {"command": "ls", "gpus": 0.125}, "two decimals"),
    ("--cuda for a CPU job", {"command": "ls", "gpus": 0, "cuda_arg": True}, "cuda_arg"),
    ("a limit without a group", {"command": "ls", "max_concurrent": 2}, "max_concurrent"),
    ("after two lines", {"command": "ls", "after": ["a\nb"]}, "after"),
    ("a limit of years in words", {"command": "ls", "timeout_seconds": "99w"}, "timeout_seconds must be a number from 0 to"),
    ("an option for conda", {"command": "ls", "conda": "--help"}, "conda"),
    ("a snapshot that is no commit", {"command": "ls", "snapshot": "HEAD", "snapshot_repo": "/x", "cwd": "/x"}, "snapshot"),
    ("a snapshot of nothing", {"command": "ls", "snapshot": "a" * 40}, "snapshot_repo"),
]


@pytest.mark.parametrize("reason, data, part", REFUSED, ids=[case[0] for case in REFUSED])
def test_parse_submission_refuses(reason, data, part):
    with pytest.raises(nexus.NexusError) as caught:
        asked_job(nexus.parse_submission(data)[0])
    assert caught.value.kind == "usage" and part in f"{caught.value.message}; {caught.value.hint}", reason
    assert caught.value.hint and len(caught.value.message) < 300


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


FILTERED = {  # filter: what is chosen by, a job that it fits, one that it does not
    "user": ("ann", {"user": "ann"}, {"user": "bob"}),
    "group": ("g", {"group": "g"}, {"group": "gg"}),
    "name": ("lr*", {"name": "lr=1"}, {"name": "a lr"}),
    "since": ("1h", {"created_at": NOW - 60}, {"created_at": NOW - 7200}),
    "text": ("Train", {"command": "python train.py"}, {"command": "true"}),
}


def test_each_filter_chooses():
    assert FILTERED.keys() == nexus.FILTERS.keys() - {"status"}, "a new filter has a case here; the status is an index"
    for name, (wanted, fitting, other) in FILTERED.items():
        choice, made = nexus.Choice(**{name: wanted}), [job("abc", **fitting), job("abd", **other)]
        assert choice.given == [name] and choice.select(made, lambda user: True, NOW) == made[:1], name
        seen = choice.select(made, lambda user: False, NOW)
        assert seen == (made[:1] if nexus.FILTERS[name].public else []), f"{name}: nothing is told of what others may not see"
    assert nexus.Choice().given == [] and nexus.Choice(group="").given == ["group"], "which is: of no group"
    assert nexus.describe_filters({"status": ["failed"], "group": "g", "name": "y z"}) == " of group g named 'y z'"


NAMED = [  # a pattern of a shell, a name that it fits, one that it does not
    ("lr", "lr", "lr=1"), ("lr=*", "lr=", "LR=1"), ("*", None, "-"), ("s?[0-2]", "s=1", "s=3"), ("s[!1]", "s2", "s1"),
    ("lr=[1,2]", "lr=[1,2]", "lr=3"), ("", None, "x"), ("a*b*a*b*" * 10 + "c", "ab" * 20 + "c", "ab" * 40)]


@pytest.mark.parametrize("pattern, fitting, other", NAMED)
def test_which_names_a_pattern_means(pattern, fitting, other):
    choice = nexus.Choice(name=pattern)
    assert choice.fits(job("abc", name=fitting), NOW) and (pattern == "*" or not choice.fits(job("abd", name=other), NOW))


def test_since_counts_from_the_end_of_a_job():
    ended, old = (finished(id, created_at=NOW - 9000, status_history=(("completed", at),)) for id, at in
                  (("abc", NOW - 60), ("abd", NOW - 7200)))
    assert nexus.Choice(since="1h").select([ended, old], lambda user: True, NOW) == [ended]


MEANT = [  # what is named, the places of this machine, which is called head, those that are meant
    ("0", ["0", "1"], ["0"]), ("0", ["0.0", "0.1", "1"], ["0.0", "0.1"]), ("0.1", ["0.0", "0.1"], ["0.1"]),
    ("head:0", ["0", "n1:0"], ["0"]), ("n1:0", ["0", "n1:0", "n1.x:0"], ["n1:0"]), ("1", ["10", "0.1"], None),
    ("n1.2:0", ["n1.2:0.1", "n1:0"], ["n1.2:0.1"]), ("n2:0", ["0"], None)]


@pytest.mark.parametrize("wanted, places, meant", MEANT)
def test_which_gpus_a_place_means(wanted, places, meant):
    if meant is None:
        with pytest.raises(nexus.NexusError, match=f"there is no GPU {wanted}"):
            nexus.find_places(wanted, places, "head")
    else:
        assert nexus.find_places(wanted, places, "head") == meant


def test_what_can_never_start_after_others():
    made = state(job("abc"), job("abd", 2, after=("abc",), pending_dependencies=("abc",)),
                 job("abe", 3, after_any=("abc",), pending_dependencies=("abc",)),
                 job("abf", 4, after=("abd", "abc"), pending_dependencies=("abd", "abc")))
    assert nexus.find_branch(made, ["abc"]) == {"abd": "abc", "abf": "abc"}
    assert nexus.find_branch(made, ["abd", "abc"]) == {"abf": "abd"}

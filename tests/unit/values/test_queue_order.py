"""The order of the queue, and what moves a job in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import check_indexes, job, put, running, state

import nexus


def listed(made):
    return [one.id for one in nexus.list_pending(made)]


def test_lower_priority_numbers_run_first_and_equal_ones_in_the_order_of_their_coming():
    made = nexus.State()
    for id, priority in (("aaa", 1), ("bbb", 2), ("ccc", 0), ("ddd", 1), ("eee", -5)):
        put(made, *nexus.add_job(job(id, **nexus.next_place(made, priority))))
    assert listed(made) == ["eee", "ccc", "aaa", "ddd", "bbb"] and [one.number for one in made.jobs.values()] == [1, 2, 3, 4, 5]


MOVES = [  # reason, jobs as user, number and priority, (which is moved, to the front?) one after the other, the queue then, its priority
    ("to the front, twice", "a1.1 a2.1 a3.1", [("a3", True), ("a2", True)], "a2 a3 a1", 1),
    ("to the end, twice", "a1.1 a2.1 a3.1", [("a1", False), ("a2", False)], "a3 a1 a2", 1),
    ("where it is", "a1.1 a2.1", [("a1", True), ("a2", False)], "a1 a2", 1),
    ("the front passes priorities", "a1.0 a2.1 a3.2", [("a3", True)], "a3 a1 a2", 0),
    ("an urgent one stays urgent", "a1.1 a2.0 a3.2", [("a2", True)], "a2 a1 a3", 0),
    ("the end is of the last priority", "a1.0 a2.1 a3.2", [("a1", False)], "a2 a3 a1", 2),
    ("before everybody's", "a1.1 a2.1 b3.1 b4.1", [("a2", True)], "a2 b3 a1 b4", 1),
    ("the last of many users' is the last of its own", "a1.1 a2.1 b3.1 b4.1", [("b3", False)], "a1 b4 a2 b3", 1),
    ("the end is of the others' last priority", "a1.1 a2.2", [("a2", False)], "a1 a2", 1),
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
    put(made, *nexus.add_job(job("New", user="a", **nexus.next_place(made, 2))))
    assert listed(made)[-1] == "New", "a new job comes last, whatever was moved"
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


def test_a_move_leaves_the_others_where_they_are():
    made = state(*[job(name, number) for number, name in enumerate(("aaa", "bbb", "ccc", "ddd", "eee"))])
    changes = list(nexus.move_before(made, [made.jobs["ddd"], made.jobs["eee"]], made.jobs["bbb"]))
    assert [change.key for change in changes] == ["ddd", "eee"]
    put(made, *changes)
    assert [one.id for one in nexus.list_pending(made)] == ["aaa", "ddd", "eee", "bbb", "ccc"]


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


def test_who_was_started_longer_ago_is_next_and_what_never_ran_is_no_start():
    ended = [job(f"e{user}", 0, user=user, status="cancelled", started_at=at) for user, at in (("a", None), ("b", 5.0), ("c", 4.0))]
    made = state(*ended, *(job(f"w{user}", user=user) for user in "cbad"))
    assert [one.user for one in nexus.list_pending(made)] == ["a", "d", "c", "b"]


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

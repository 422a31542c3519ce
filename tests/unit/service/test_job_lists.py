"""Which jobs a document has the first of, and in which order."""

import pytest
from stage import ME

import nexus

OWNER, BOB = nexus.Identity(ME, ME), nexus.Identity("bob", "bob", is_owner=False)


def make_lists(lab, caller=OWNER, **choice):
    """({list: ids}, how many wait, how many have ended)."""
    state = lab.store.state
    made = nexus.JobLists(state, caller, nexus.Choice(**choice), nexus.list_visible_groups(state, caller), 0.0)
    names = ("failures", "running", "waiting", "ended")
    return {name: " ".join(job.id for job in getattr(made, name)) for name in names}, made.waiting_count, made.ended_count


LISTS = [  # reason, who asks, what is chosen, failures, what runs, waits, has ended; how many wait, and have ended
    ("all", OWNER, {}, ("fai", "run", "bob abc abd abe", "end"), 4, 1),
    ("those who run", OWNER, {"status": ("running",)}, ("fai", "run", "", ""), 0, 0),
    ("those who wait", OWNER, {"status": ("pending",)}, ("fai", "", "bob abc abd abe", ""), 4, 0),
    ("those that failed", OWNER, {"status": ("failed",)}, ("fai", "", "", "fai"), 0, 1),
    ("of a user", OWNER, {"user": "bob"}, ("fai", "", "bob", ""), 1, 0),
    ("of a group", OWNER, {"group": "g"}, ("fai", "", "abd", ""), 1, 0),
    ("of a name", OWNER, {"name": "n"}, ("fai", "", "abc", ""), 1, 0),
    ("to a user no failures of others", BOB, {}, ("", "run", "bob abc abd abe", "fai end"), 4, 2),
    ("nor a group of others", BOB, {"group": "g"}, ("", "", "", ""), 0, 0),
    ("but that they wait", BOB, {"user": ME, "status": ("pending",)}, ("", "", "abc abd abe", ""), 3, 0),
]


@pytest.mark.parametrize("reason, caller, choice, ids, waiting_count, ended_count", LISTS, ids=[case[0] for case in LISTS])
def test_lists(lab, reason, caller, choice, ids, waiting_count, ended_count):
    names = ("failures", "running", "waiting", "ended")
    assert make_lists(lab, caller, **choice) == (dict(zip(names, ids)), waiting_count, ended_count)


def test_a_group_stands_for_its_jobs(lab):
    """Where something of it waits, in the waiting list alone; else as the last that has ended."""
    lab.add(id="abf", group="g")
    lab.add(id="abA", group="g")
    lab.become("abA", "completed", exit_code=0)
    assert make_lists(lab)[0]["waiting"] == "bob abc abd abe" and make_lists(lab)[0]["ended"] == "end"
    for job_id in ("abd", "abf"):
        lab.become(job_id, "completed", exit_code=0)
    lists, waiting_count, ended_count = make_lists(lab)
    assert (lists["waiting"], lists["ended"], waiting_count, ended_count) == ("bob abc abe", "abf end", 3, 2)
    lab.become(lab.add(group="g"), "running")
    assert make_lists(lab)[0]["ended"] == "end", "something of it runs"


def test_a_group_of_two_users_is_whose_job_was_first(lab):
    """To end, else to run, else to start."""
    def find_user():
        return nexus.find_group_user(nexus.PendingQueue(lab.store.state), "h", ["bob", ME])

    own = lab.add(group="h")
    assert find_user() == "bob", "who has fewer GPUs in use comes first"
    lab.become(own, "running")
    assert find_user() == ME
    lab.become("bob", "completed", exit_code=0)
    assert find_user() == "bob"
    assert nexus.find_group_user(nexus.PendingQueue(lab.store.state), "g", [ME]) == ME


def test_failures_of_a_group_are_one_with_their_number(lab):
    for number in range(3):
        lab.become(lab.add(group="k", command=f"f{number}"), "failed", exit_code=1)
    for line in ("OutOfMemoryError: 20 GiB", "OutOfMemoryError: 24 GiB", "KeyError: 'lr'"):
        lab.become(lab.add(group="m", command=line), "failed", cause="exit", cause_line=line)
    lab.become(lab.add(command="alone"), "failed", exit_code=1)
    state = lab.store.state
    made = nexus.JobLists(state, OWNER, nexus.Choice(), nexus.list_visible_groups(state, OWNER), 0.0)
    assert [(job.command, count, kinds) for job, count, kinds in made.fold_failures()] == [
        ("alone", 1, 1), ("KeyError: 'lr'", 3, 2), ("f2", 3, 1), ("true", 1, 1)]

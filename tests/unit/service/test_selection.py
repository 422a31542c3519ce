"""Which jobs a request means."""

import pytest
from stage import ME

import nexus


@pytest.mark.parametrize("groups", [("k", "k"), ("k", "l"), (None, None)])
def test_of_several_jobs_of_a_name_the_latest_is_meant(lab, groups):
    def ask_after_twin():
        child = lab.add(after=["twin"])
        return lab.store.state.jobs[child].after

    ids = [lab.add(name="twin", group=group) for group in groups]
    assert ask_after_twin() == (ids[1],)
    lab.ask("POST", "/jobs/cancel", {"ids": [ids[0]]})
    again = lab.ask("POST", "/jobs/retry", {"ids": [ids[0]]})[1]["ids"]
    assert ask_after_twin() == (*again,)
    lab.ask("PATCH", f"/queue/{again[0]}", {"name": "other"})
    assert ask_after_twin() == (ids[1],), "a job that was run again is not meant by its name"


OTHER = [  # what the request says of job abc, which is `n`, in no group, and waits: what is told
    ({"group": "g"}, "job abc is not of group 'g'"), ({"user": ME, "group": "g"}, "job abc is not of group 'g'"),
    ({"group": "g", "name": "x*"}, "job abc is not of group 'g' named 'x*'"), ({"name": "n", "user": "bob"}, "job abc is not of 'bob'"),
    ({"status": ["running"]}, "job abc is pending"),
]


@pytest.mark.parametrize("filters, told", OTHER)
def test_what_is_named_and_is_otherwise_is_refused(lab, filters, told):
    status, answer = lab.ask("POST", "/jobs/cancel", {"ids": ["abc"], **filters})
    assert status == 409 and answer["message"].startswith(told)
    assert lab.store.state.jobs["abc"].status == "pending"


CHOICES = [  # reason, the choice, what was chosen, what became of abc meanwhile, who is left; None: it is refused
    ("nothing has changed", {"status": ("pending",)}, ["abc", "abd"], {}, ["abc", "abd"]),
    ("it has another status", {"status": ("pending",)}, ["abc", "abd"], {"status": "running"}, ["abd"]),
    ("it has another name", {"name": "n"}, ["abc"], {"name": "m"}, []),
    ("it has changed, and fits", {"name": "n"}, ["abc"], {"retries": 3}, ["abc"]),
    ("it is named, whatever it is now", {"ids": ("abc",)}, ["abc"], {"status": "running"}, ["abc"]),
    ("it is named, and a filter leaves it out now", {"ids": ("abc",), "name": "n"}, ["abc"], {"name": "m"}, None),
]


@pytest.mark.parametrize("reason, choice, ids, change, left", CHOICES, ids=[case[0] for case in CHOICES])
def test_what_was_chosen_is_looked_at_again(lab, reason, choice, ids, change, left):
    chosen = [lab.store.state.jobs[job_id] for job_id in ids]
    if "status" in change:
        lab.become("abc", "running")
    elif change:
        lab.ask("PATCH", "/queue/abc", change)
    if left is not None:
        assert [job.id for job in nexus.confirm_jobs(lab.store.state, chosen, nexus.Choice(**choice), 0.0)] == left
        return
    with pytest.raises(nexus.NexusError) as caught:
        nexus.confirm_jobs(lab.store.state, chosen, nexus.Choice(**choice), 0.0)
    assert caught.value.kind == "conflict"


def test_what_is_gone_is_told_if_it_was_named(lab):
    chosen = [lab.store.state.jobs["end"]]
    assert lab.ask("POST", "/jobs/clear", {"ids": ["end"]}) == (200, {"ids": ["end"], "freed_bytes": 0})
    assert nexus.confirm_jobs(lab.store.state, chosen, nexus.Choice(status=("completed",)), 0.0) == []
    with pytest.raises(nexus.NexusError) as caught:
        nexus.confirm_jobs(lab.store.state, chosen, nexus.Choice(ids=("end",)), 0.0)
    assert (caught.value.kind, caught.value.message) == ("not_found", "job end was just forgotten")


def test_a_name_means_the_latest_job_of_it_and_for_a_change_the_only_one_that_it_fits(lab):
    for number, status in enumerate(("failed", "pending", "completed", "failed")):
        lab.add(id=f"tw{number}", name="twin")
        if status != "pending":
            lab.become(f"tw{number}", status, exit_code=int(status == "failed"))
    assert lab.ask("GET", "/jobs/twin")[1]["id"] == "tw3"
    assert lab.ask("PATCH", "/queue/twin", {"retries": 1})[1]["id"] == "tw1"
    status, answer = lab.ask("POST", "/jobs/dismiss", {"ids": ["twin"]})
    assert status == 409 and answer["message"] == "2 jobs have the name 'twin': tw0, tw3"
    again = lab.ask("POST", "/jobs/retry", {"ids": ["tw0"], "change": {"name": "other"}})[1]["ids"][0]
    assert lab.ask("POST", "/jobs/dismiss", {"ids": ["twin"]})[1]["ids"] == ["tw3"], f"of tw0 it is {again} that is meant"
    lab.ask("POST", "/jobs/retry", {"ids": ["tw3"], "change": {"name": "other"}})
    ran = nexus.find_own_job(lab.store.state, "twin", nexus.Identity(ME, ME), ("failed",))
    assert ran.id == "tw3", "all were run again: the latest is meant"
    assert lab.ask("PATCH", "/queue/twin", {"retries": 1}, lab.bob)[0] == 404, "it is no name of bob's"


HINTS = [  # whose token, a request for something that is not there, what is proposed
    ("", ("GET", "/jobs/ennd"), "end"), ("", ("GET", "/jobs/g"), "--group g"), ("", ("GET", "/jobs/x*"), "--name 'x*'"),
    ("bob", ("GET", "/jobs/g"), "nexus jobs lists them"), ("bob", ("GET", "/jobs/h"), "--group h"),
    ("", ("POST", "/jobs/cancel", {"group": "gg"}), "g"),
    ("", ("GET", "/groups/gg/results"), "g"), ("bob", ("GET", "/groups/g/results"), "nexus jobs lists all"),
    ("bob", ("POST", "/jobs/cancel", {"group": "gg"}), "nexus jobs lists all"), ("bob", ("POST", "/jobs/cancel", {"group": "hh"}), "h"),
]


@pytest.mark.parametrize("user, request_, part", HINTS, ids=[f"{case[0]} {case[1]}" for case in HINTS])
def test_what_is_not_there_has_a_proposal_of_ones_own(lab, user, request_, part):
    status, answer = lab.ask(*request_, headers=lab.bob if user else None)
    assert status == 404 and part in answer["hint"], answer


def test_only_what_has_ended_is_cleared(lab):
    for ids in (["abc"], ["end", "run"]):
        status, told = lab.ask("POST", "/jobs/clear", {"ids": ids})
        assert status == 409 and "nothing was cleared" in told["message"]
    assert lab.ask("POST", "/jobs/clear", {"status": "running"})[0] == 400
    assert lab.ask("POST", "/jobs/clear", {"user": ME}) == (200, {"ids": ["end", "fai"], "freed_bytes": 0})
    assert sorted(lab.store.state.jobs) == ["abc", "abd", "abe", "bob", "run"]


def test_only_the_owner_gives_a_high_priority(lab):
    assert lab.ask("POST", "/queue", {"command": "true", "priority": "high"}, lab.bob)[0] == 403
    assert lab.ask("POST", "/queue", {"command": "true", "priority": "low"}, lab.bob)[0] == 200
    assert lab.ask("POST", "/queue", {"command": "true", "priority": "high"})[0] == 200

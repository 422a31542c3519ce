"""Jobs that wait are changed and moved, and failures dismissed."""

import pytest
from stage import ME

import nexus

CHANGES = [  # a job, what is asked, what it is then
    ("abc", {"command": "sleep 9"}, {"command": "sleep 9"}), ("abc", {"name": "m"}, {"name": "m"}),
    ("abc", {"gpus": 2}, {"gpus": 2}), ("abc", {"gpus": 0.5, "gpu_mem_mib": "10G"}, {"gpus": 0.5, "gpu_mem_mib": 10240}),
    ("abc", {"timeout_seconds": "1h"}, {"timeout_seconds": 3600}), ("abc", {"retries": 3}, {"retries": 3}),
    ("abc", {"group": "g"}, {"group": "g"}), ("abd", {"group": None}, {"group": None}), ("abc", {"is_held": True}, {"is_held": True}),
    ("abc", {"after": ["abd"]}, {"after": ["abd"], "waiting_for": "after job abd"}),
    ("abc", {"after": ["end"]}, {"after": ["end"]}),
    ("abc", {"after_any": ["fai", "run"]}, {"after_any": ["fai", "run"], "waiting_for": "after job run"}),
    ("abc", {"after_group": ["g"]}, {"after_group": ["g"], "waiting_for": "after 1 job of group g: abd"}),
    ("abc", {"priority": "low"}, {"priority": 2}), ("abc", {"priority": "high"}, {"priority": 0}),
    ("run", {"timeout_seconds": 50, "retries": 1}, {"timeout_seconds": 50, "retries": 1}),
    ("run", {"priority": 2, "name": "r", "group": "g"}, {"priority": 2, "name": "r", "group": "g"}),
]


@pytest.mark.parametrize("job_id, change, facts", CHANGES, ids=[f"{case[0]} {case[1]}" for case in CHANGES])
def test_a_job_is_changed(lab, job_id, change, facts):
    assert lab.ask("PATCH", f"/queue/{job_id}", change)[0] == 200
    lab.decide()
    found = lab.ask("GET", f"/jobs/{job_id}")[1]
    assert {name: found[name] for name in facts} == facts


MOVES = [  # whom, what is asked, the order of the owner's jobs then
    (["abe"], {"position": 0}, "abe abc abd"), (["abc"], {"position": -1}, "abd abe abc"), (["abe"], {"before": "abd"}, "abc abe abd"),
    (["abe"], {"before": "n"}, "abe abc abd"), (["abe", "abd"], {"position": 0}, "abe abd abc"),
    (["abe", "abc"], {"before": "abd"}, "abe abc abd"), (["abc"], {"priority": "low"}, "abd abe abc"),
    (["abe"], {"priority": "high"}, "abe abc abd"), (["abd"], {"name": "x"}, "abc abd abe"),
]


def list_own(lab):
    return " ".join(job["id"] for job in lab.ask("GET", "/queue")[1] if job["id"] != "bob")


@pytest.mark.parametrize("ids, change, order", MOVES, ids=[f"{' '.join(case[0])} {case[1]}" for case in MOVES])
def test_a_job_is_moved(lab, ids, change, order):
    assert list_own(lab) == "abc abd abe"
    assert lab.ask("PATCH", "/queue", {"ids": ids, "change": change}) == (200, {"ids": ids})
    assert list_own(lab) == order


REFUSED = [  # whose token, a job, what is asked, (status, a part of the message)
    ("", "xyz", {"name": "x"}, (404, "no job 'xyz'")), ("", "end", {"priority": 2}, (409, "job end is completed")),
    ("", "fai", {"name": "x"}, (409, "job fai is failed")),
    ("", "run", {"command": "x"}, (409, "job run is running; only a pending one can be changed so")),
    ("", "run", {"is_held": True}, (409, "running jobs cannot be suspended")),
    ("", "abc", {"nice": 3}, (400, "'nice' is not a key")), ("", "abc", {"gpus": 0, "cuda_arg": True}, (400, "cuda_arg")),
    ("", "abc", {"gpu_ids": [0], "gpus": 2}, (400, "2 GPUs asked for")), ("", "abc", {"llm": "x"}, (400, "llm_config is not set")),
    ("", "abc", {"max_concurrent": 2}, (400, "max_concurrent is for a group")),
    ("", "abc", {"node": "n7"}, (400, "there is no node n7")), ("", "abc", {"after_pid": 2**22 - 1}, (400, "there is no process")),
    ("", "abc", {"after": ["fai"]}, (409, "job abc could never start: it was to come after job fai, which failed (exit 1)")),
    ("", "abc", {"after": ["abc"]}, (409, "job abc would wait for itself")), ("", "abd", {"after_group": ["g"]}, (409, "wait for itself")),
    ("", "abc", {"after": ["xyz"]}, (404, "no job 'xyz'")), ("", "abc", {"after_group": ["k"]}, (404, "there is no job of group 'k'")),
    ("", "abc", {"before": "abc"}, (409, "job abc cannot be before itself")), ("", "abc", {"before": "run"}, (409, "job run is running")),
    ("", "abc", {"before": "xyz"}, (404, "no job 'xyz'")), ("", "abc", {"position": 0, "before": "abd"}, (400, "do not go together")),
    ("bob", "abc", {"name": "x"}, (403, "job abc is ")), ("bob", "n", {"name": "x"}, (404, "no job 'n'")),
    ("bob", "bob", {"position": 0}, (403, "may move a job ahead of other users' jobs")),
    ("bob", "bob", {"before": "abc"}, (403, "may move a job ahead of other users' jobs")),
    ("bob", "bob", {"priority": "high"}, (403, "only the owner of the service may give a priority above normal")),
    ("bob", "bob", {"group": "g"}, (403, "the group g is ")), ("bob", "bob", {"after": ["abc"]}, (403, "job abc is ")),
    ("bob", "bob", {"after_group": ["g"]}, (404, "there is no job of group 'g'")),
]


@pytest.mark.parametrize("user, job_id, change, answer", REFUSED, ids=[f"{case[0]} {case[1]} {case[2]}" for case in REFUSED])
def test_what_cannot_be_changed_stays(lab, user, job_id, change, answer):
    before = lab.store.state.seq, dict(lab.store.state.jobs)
    status, told = lab.ask("PATCH", f"/queue/{job_id}", change, lab.bob if user else None)
    assert (status, answer[1] in told["message"]) == (answer[0], True), told
    assert (lab.store.state.seq, dict(lab.store.state.jobs)) == before


def test_one_of_several_that_cannot_be_changed_keeps_all_from_it(lab):
    for change, part in (({"command": "x"}, "run: is running; only a pending one"), ({"after": ["abd"]}, "run: is running")):
        status, told = lab.ask("PATCH", "/queue", {"ids": ["abc", "run"], "change": change})
        assert status == 409 and told["message"].startswith(f"1 of 2 jobs cannot be changed so, and none was: {part}")
    lab.ask("PATCH", "/queue/abe", {"timeout_seconds": "1h"})
    status, told = lab.ask("PATCH", "/queue", {"ids": ["abc", "abd", "abe"], "change": {"warn": "USR1@2m"}})
    assert status == 400 and told["message"].startswith("2 of 3 jobs cannot be changed so, and none was: abc, abd: warn USR1@2m needs")
    status, told = lab.ask("PATCH", "/queue", {"ids": ["abc", "abd"], "change": {"before": "abc"}})
    assert status == 409 and "abc cannot be before itself" in told["message"]
    assert list_own(lab) == "abc abd abe" and lab.store.state.jobs["abc"].command == "true"


def test_a_filter_takes_those_that_wait(lab):
    assert lab.ask("PATCH", "/queue", {"user": ME, "change": {"retries": 1}})[1]["ids"] == ["run", "abc", "abd", "abe"]
    assert lab.ask("PATCH", "/queue", {"user": ME, "status": "pending", "change": {"command": "x"}})[1]["ids"] == [
        "abc", "abd", "abe"]
    assert lab.ask("PATCH", "/queue", {"group": "h", "change": {"name": "c"}})[1]["ids"] == ["bob"]
    assert lab.ask("PATCH", "/queue", {"status": "completed", "change": {"name": "c"}})[1]["ids"] == []
    assert lab.ask("PATCH", "/queue", {"status": "pending", "change": {"name": "mine"}}, lab.bob)[1]["ids"] == ["bob"]
    assert {job.name for job in lab.store.state.jobs.values()} == {"n", None, "mine"}


def test_a_variable_is_added_changed_and_taken_away(lab):
    job_id = lab.add(env={"A": "1", "B": "2"})
    assert lab.ask("PATCH", f"/queue/{job_id}", {"env": {"B": "3", "C": "4"}})[0] == 200
    job = lab.store.state.jobs[job_id]
    assert {**dict(lab.store.state.environments[job.environment]), **dict(job.variables)}.items() >= {"A": "1", "B": "3", "C": "4"}.items()


def test_what_a_job_comes_after_stays_when_something_else_is_changed(lab):
    """Also where the owner has put it after a job that its user may not name."""
    assert lab.ask("PATCH", "/queue/bob", {"after": ["abc"]})[0] == 200
    assert lab.ask("PATCH", "/queue/bob", {"name": "c"}, lab.bob)[0] == 200
    assert (lab.store.state.jobs["bob"].name, lab.store.state.jobs["bob"].after) == ("c", ("abc",))


def list_failures(lab, caller):
    return [job.id for job in nexus.JobLists(lab.store.state, caller, nexus.Choice(), {}, 0.0).failures]


def test_a_failure_that_is_dismissed_is_on_the_callers_list_no_more(lab):
    owner, bob = nexus.Identity(ME, ME), nexus.Identity("bob", "bob", is_owner=False)
    assert list_failures(lab, owner) == ["fai"] and list_failures(lab, bob) == []
    assert lab.ask("POST", "/jobs/dismiss", {"ids": ["fai"]}) == (200, {"ids": ["fai"]}) and list_failures(lab, owner) == []
    assert lab.ask("POST", "/jobs/dismiss", {"ids": ["fai"]}) == (200, {"ids": []}), "it was dismissed before"
    assert lab.ask("POST", "/jobs/dismiss", {"ids": ["fai"], "undo": True}) == (200, {"ids": ["fai"]})
    assert list_failures(lab, owner) == ["fai"]
    assert lab.ask("POST", "/jobs/dismiss", {"ids": ["end"]})[0] == 409
    assert lab.ask("POST", "/jobs/dismiss", {"ids": ["fai"]}, lab.bob)[0] == 403
    again = lab.ask("POST", "/jobs/retry", {"ids": ["fai"]})[1]["ids"]
    assert len(again) == 1 and list_failures(lab, owner) == [], "it is run again"


def test_whoever_reads_state_json_sees_that_the_queue_is_paused(lab):
    lab.store.checkpoint_wanted.clear()
    assert lab.ask("POST", "/service/pause")[0] == 204 and lab.store.state.paused
    assert lab.store.checkpoint_wanted.is_set()

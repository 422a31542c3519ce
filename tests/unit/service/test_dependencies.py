"""After which jobs and groups a job is to start."""

import re

import pytest
from turns import ANN

import nexus

HOUR, DAY = 3600, 86400
NAMES = [  # reason, the jobs of that name as (status, how long ago it was added), which is meant; else what is said
    ("the only one, that waits", [("pending", DAY)], 0),
    ("the one that waits, not last week's", [("completed", 7 * DAY), ("pending", 60)], 1),
    ("of two that wait the latest", [("pending", 120), ("pending", 60)], 1),
    ("one that runs, however old, before one that has just ended", [("running", 2 * DAY), ("completed", 60)], 0),
    ("the latest of the last hour, whether it completed", [("completed", 120), ("completed", 60)], 1),
    ("or failed: that is told as of any parent", [("completed", 120), ("failed", 60)], 1),
    ("an older one is hardly meant", [("completed", 7 * DAY)],
     "no job 'prep' waits or runs; the latest, aaa, was added 7d ago and completed"),
    ("of older ones the latest is named", [("completed", 7 * DAY), ("failed", 2 * HOUR)],
     "no job 'prep' waits or runs; the latest, aab, was added 2h ago and failed (exit 1)"),
]


def add_all(w, jobs):
    """Jobs of the name prep, and what has become of them."""
    begin, made = w.clock.now(), []
    for status, ago in jobs:
        w.clock.wall = begin - ago
        made.append(w.add(name="prep", gpus=0, is_held=status == "pending"))
        if status != "pending":
            w.run(made[-1], 100 + len(made))
        if status in nexus.FINAL:
            w.end(made[-1], 0 if status == "completed" else 1)
    w.clock.wall = begin
    return made


@pytest.mark.parametrize("field", ["after", "after_any"])
@pytest.mark.parametrize("reason, jobs, meant", NAMES, ids=[case[0] for case in NAMES])
def test_which_job_a_name_means(world, reason, jobs, meant, field):
    w = world(gpus=0, cpu_slots=9)
    made, other = add_all(w, jobs), w.add(gpus=0, is_held=True)
    if isinstance(meant, int):
        assert getattr(w.job(w.add(gpus=0, **{field: ["prep"]})), field) == (made[meant],)
        if w.job(made[meant]).status != "failed":           # else `edit` refuses what could never start
            w.service.editor.edit(nexus.Choice([other]), ANN, {field: ("prep",)})
            assert getattr(w.job(other), field) == (made[meant],)
        return
    for ask in (lambda: w.add(gpus=0, **{field: ["prep"]}), lambda: w.service.editor.edit(nexus.Choice([other]), ANN, {field: ("prep",)})):
        with pytest.raises(nexus.NexusError, match=f"^{re.escape(meant)}$") as caught:
            ask()
        assert (caught.value.kind, caught.value.hint) == ("conflict", f"if you mean that one: --{field.replace('_', '-')} {made[-1]}")
    assert getattr(w.job(w.add(gpus=0, **{field: [made[-1]]})), field) == (made[-1],), "an id is always meant"


def test_a_retry_is_meant_by_the_name_of_the_job_that_it_does_again(world):
    w = world(gpus=0, cpu_slots=9)
    failed, = add_all(w, [("failed", 60)])
    again, = w.service.admission.retry(nexus.Choice([failed]), ANN, {"name": "other"}).ids
    w.run(again, 200)
    w.end(again, 0)
    assert w.job(w.add(gpus=0, after=["prep"])).after == (again,)


def test_a_group_is_no_parent(world):
    w = world(gpus=0)
    w.add(gpus=0, group="g")
    with pytest.raises(nexus.NexusError) as caught:
        w.add(gpus=0, after=["g"])
    assert (caught.value.kind, caught.value.hint) == ("not_found", "it is a group; after all of it: --after-group g")


@pytest.mark.parametrize("ago, status, told", [
    (DAY, "completed", "nothing of group g waits or runs: its last job ended 1d ago"), (60, "completed", ""), (DAY, "running", "")])
def test_a_group_that_ended_long_ago_is_told(bench, ago, status, told):
    """Who adds a sweep and what comes after it may not see that the first of the two failed."""
    job_id = bench.add(group="g")
    now = bench.service.clock.now
    bench.service.clock.now = lambda: now() + ago
    if status != "completed":
        bench.become(job_id, status)
    else:
        bench.become(job_id, status, exit_code=0)
    for body in ({"after_group": ["g"]}, {"after_any_group": ["g"], "dry_run": True}):
        assert bench.ask("POST", "/queue", {"command": "true", **body})[1].get("warning", "") == told

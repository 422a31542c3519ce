"""Jobs that are added once, and jobs that are run again."""

import contextlib

import pytest
from turns import ANN, fail, submit

import nexus

SAME = [  # reason, what differs from the job that is there, whether it is the same
    ("nothing", {}, True), ("its priority, name and group", {"priority": 0, "name": "x", "group": "g"}, True),
    ("its GPUs and time limit", {"gpus": 0, "timeout_seconds": 5}, True), ("its environment at large", {"environment": {"X": "1"}}, True),
    ("its command", {"command": "python train.py -v"}, False), ("its directory", {"cwd": "/tmp"}, False),
    ("its conda environment", {"conda": "base"}, False), ("its variables", {"env": {"SEED": "1"}}, False),
]


@pytest.mark.parametrize("reason, other, is_same", SAME, ids=[case[0] for case in SAME])
def test_unique(world, reason, other, is_same):
    w = world()
    first = w.add()
    added = submit(w, {"unique": True, **other})
    assert added.existing == ((first,) if is_same else ()) and (added.ids == (first,)) == is_same
    assert len(w.store.state.jobs) == (1 if is_same else 2)


def test_unique_knows_variables_in_any_order(world):
    w = world()
    first = submit(w, {"env": {"A": "1", "B": "2"}}).ids
    assert submit(w, {"env": {"B": "2", "A": "1"}, "unique": True}).existing == first


@pytest.mark.parametrize("status, is_known", [("running", True), ("completed", True), ("failed", False)])
def test_unique_knows_what_runs_or_has_completed(world, status, is_known):
    w = world()
    first = w.run(w.add(), 100)
    if status != "running":
        w.end(first, 0 if status == "completed" else 1)
    assert w.job(first).status == status and submit(w, {"unique": True}).existing == ((first,) if is_known else ())


@pytest.mark.parametrize("status, is_known", [("pending", True), ("running", True), ("completed", False), ("failed", False)])
def test_unless_active(world, status, is_known):
    w = world(gpus=0, cpu_slots=9)
    first = w.add(gpus=0, is_held=status == "pending")
    if status != "pending":
        w.run(first, 100)
    if status in nexus.FINAL:
        w.end(first, 0 if status == "completed" else 1)
    added = submit(w, {"gpus": 0, "unless_active": True, "is_held": True})
    assert added.existing == ((first,) if is_known else ())
    again = submit(w, *[{"gpus": 0, "unless_active": True, "command": "twice"}] * 2, {"gpus": 0, "unless_active": True, "env": {"A": "1"}})
    assert len(again.jobs) == 2 and again.ids[0] == again.ids[1], "also of those that are added together; of another one not"
    assert submit(w, {"gpus": 0, "unique": True, "unless_active": True}).existing, "of both, each counts"


def test_a_repeated_submission_is_answered_as_the_first_time(world):
    w = world(gpus=0, cpu_slots=9)
    jobs = [{"gpus": 0, "unless_active": True, "command": command} for command in ("a", "b", "a")]
    first = submit(w, *jobs, key="12345678").ids
    assert first[0] == first[2] and submit(w, *jobs, key="12345678").ids == first
    alike = submit(w, *[{"gpus": 0, "command": "c"}] * 2, key="87654321").ids
    assert alike[0] != alike[1] and submit(w, *[{"gpus": 0, "command": "c"}] * 2, key="87654321").ids == alike


def test_unique_knows_what_was_changed(world):
    w = world()
    first, second = w.add(env={"A": "1"}), w.add()
    for job_id, env in ((first, {"B": "2"}), (second, {"A": "2"})):
        w.service.editor.edit(nexus.Choice([job_id]), ANN, {"env": env})
    for env, known in (({"A": "2"}, (second,)), ({"A": "1"}, ()), ({"B": "2"}, ())):
        assert submit(w, {"unique": True, "env": env}).existing == known


def test_a_new_job_that_would_wait_for_itself_is_told_so_without_an_id(world):
    w = world()
    with pytest.raises(nexus.NexusError, match=r"^the job would wait for itself"):
        w.add(group="g", after_group=[w.job(w.add(group="g")).group])


def test_the_number_of_a_script_in_its_sweep_is_no_part_of_it(world):
    w = world(gpus=0)

    def add(*values, **shared):
        rows = [{"command": "a", "env": {"NEXUS_TASK_ID": number, "NEXUS_SWEEP_lr": rate}} for number, rate in values]
        return w.service.admission.admit(nexus.parse_submissions([{"each": rows, "cwd": "/", "gpus": 0, **shared}]), ANN)

    there = add(("0", "1")).ids
    assert add(("1", "1"), ("0", "2"), unique=True).existing == there and len(w.store.state.jobs) == 2


def test_an_environment_is_written_once(world):
    w, sizes = world(gpus=0), []
    for _ in range(3):
        before = w.store.journal.size
        w.add(gpus=0, environment={"A": "x" * 10000})
        sizes.append(w.store.journal.size - before)
    assert sizes[0] > 10000 and max(sizes[1:]) < 2000


# Run again


def test_a_retry_is_a_new_job_that_asks_for_the_same(world):
    w = world(gpus=0, cpu_slots=9)
    good, bad = w.add("good", gpus=0), w.add("bad", gpus=0, name="b", retries=0, group="g", env={"A": "1"})
    child = w.add("child", gpus=0, after=[bad, good])
    w.turn()
    w.claim(good, 100)
    w.end(good)
    fail(w, bad, 101, 1, seconds=60)
    assert w.job(child).current.cause == "dependency"
    again = w.job(w.service.admission.retry(nexus.Choice([bad]), ANN).ids[0])
    second = w.job(w.service.admission.retry(nexus.Choice([child]), ANN).ids[0])
    changed = w.job(w.service.admission.retry(nexus.Choice([good]), ANN, {"env": {"A": "2"}, "gpus": 0, "name": "c"}).ids[0])
    assert w.store.state.environments[changed.environment]["A"] == "2" and (changed.name, changed.retried_as) == ("c", None)
    assert (again.command, again.after, again.attempts, w.job(bad).retried_as) == ("bad", (), (), again.id)
    assert (again.name, again.group, again.env_digest, again.environment) == ("b", "g", w.job(bad).env_digest, w.job(bad).environment)
    assert (second.after, second.pending_dependencies) == ((again.id, good), (again.id,))
    w.turn()
    w.claim(again.id, 102)
    w.end(again.id)
    assert w.job(second.id).status == "running" and w.job(bad).status == "failed"


def test_a_retry_with_another_value_stands_in_the_place_of_the_former(world):
    """Of two that become the same, one runs for both; of several values, each has a job."""
    w = world(gpus=0, cpu_slots=9)
    body = {"command": "t {lr} {bs}", "sweep": ["lr=1,2", "bs=96,128"], "group": "g", "cwd": "/", "gpus": 0}
    jobs = w.service.admission.admit(nexus.parse_submissions(body), ANN).ids

    def end_all(job_ids, pid):
        """The first job of all completes."""
        w.turn()
        for number, job_id in enumerate(job_ids):
            w.claim(job_id, pid + number)
        w.turn(seconds=60)
        for job_id in job_ids:
            w.end(job_id, int(job_id != jobs[0]))

    def retry(values, **choice):
        return w.service.admission.retry(nexus.Choice(**{"group": "g", **choice}), ANN, {}, values).ids

    def list_rows():
        table = w.service.groups.list_results(ANN, "g", "id", False, None)
        names = [column["key"] for column in table["columns"]]
        return sorted((row["cells"][names.index("sweep.lr")], row["cells"][names.index("sweep.bs")]) for row in table["rows"])

    end_all(jobs, 100)
    with pytest.raises(nexus.NexusError, match="has no batch in its sweep"):
        retry({"batch": ["1"]})
    with pytest.raises(nexus.NexusError, match="a new command comes instead"):
        w.service.admission.retry(nexus.Choice(jobs[1:2]), ANN, {"command": "t"}, {"bs": ["1"]})
    with pytest.raises(nexus.NexusError, match="bash cannot read the command"):
        retry({"bs": ["'"]})
    again = retry({"bs": ["48"]})
    assert [(w.job(job_id).command, w.job(job_id).name) for job_id in again] == [("t 1 48", "lr=1 bs=48"), ("t 2 48", "lr=2 bs=48")]
    assert [w.job(job_id).retried_as for job_id in jobs] == [None, again[0], again[1], again[1]]
    assert list_rows() == [("1", "48"), ("1", "96"), ("2", "48")]
    end_all(again, 200)
    third = retry({"bs": ["16", "32"]}, group=None, ids=[again[0]])
    assert [w.job(job_id).command for job_id in third] == ["t 1 16", "t 1 32"] and w.job(again[0]).retried_as == third[0]
    assert list_rows() == [("1", "16"), ("1", "32"), ("1", "96"), ("2", "48")]


@pytest.mark.parametrize("count, is_taken", [(3, True), (4, False)])
def test_a_retry_with_more_values_than_a_request_may_add_adds_none(world, monkeypatch, count, is_taken):
    w = world(gpus=0)
    monkeypatch.setattr(nexus, "MAX_JOBS", 6)
    ids = w.service.admission.admit(nexus.parse_submissions({"command": "t {lr}", "sweep": ["lr=1,2"], "cwd": "/", "gpus": 0}), ANN).ids
    w.service.cancellation.cancel(nexus.Choice(ids), ANN)
    with contextlib.nullcontext() if is_taken else pytest.raises(nexus.NexusError, match="these values make too many jobs") as refused:
        w.service.admission.retry(nexus.Choice(ids), ANN, {}, {"lr": [str(number) for number in range(count)]})
    assert is_taken or refused.value.kind == "usage"
    assert len(w.store.state.jobs) == (2 + count if is_taken else 2), "of two that become the same, one runs for both"


def test_a_chain_heals(world):
    """With those that were cancelled because of it, each after the new ones; but for one that another failure holds up."""
    w = world(gpus=0, cpu_slots=9)
    prep, other = w.add("prep", gpus=0, group="g"), w.add("other", gpus=0)
    train = w.add("train", gpus=0, after=[prep])
    report, big = w.add("report", gpus=0, after=[train, prep], group="h"), w.add("big", gpus=0, after_group=["g"])
    last, held = w.add("last", gpus=0, after_group=["h"]), w.add("held", gpus=0, after=[train, other])
    w.turn()
    for job_id, pid in ((prep, 100), (other, 101)):
        w.claim(job_id, pid)
    w.turn(seconds=60)
    for job_id in (prep, other):
        w.end(job_id, 1)
    chain = [train, report, big, last]
    assert {w.job(job_id).current.cause for job_id in (*chain, held)} == {"dependency"}

    def retry(job_id, is_downstream, change, is_dry=False):
        return w.service.admission.retry(nexus.Choice([job_id]), ANN, change, {}, is_downstream, is_dry).ids

    again, = retry(prep, False, {})
    assert w.service.admission.list_left([again], ANN) == chain, "those that it could run, too"
    w.run(again, 102)
    w.end(again, 1)
    change = {"gpus": 0, "name": "second", "environment": {"NEW": "1"}, "umask": 0o27}
    before = w.store.state
    assert len(retry(again, True, change, is_dry=True)) == 5 and w.store.state is before, "a dry run changes nothing"
    new = list(retry(again, True, change))
    assert [w.job(job_id).command for job_id in new] == ["prep", "train", "report", "big", "last"]
    names = dict(zip(("prep", "train", "report", "big", "last"), new))
    assert [w.job(names[name]).after for name in ("train", "report")] == [(names["prep"],), (names["train"], names["prep"])]
    assert [w.job(names[name]).pending_groups for name in ("big", "last")] == [("g",), ("h",)]
    assert [w.job(job_id).retried_as for job_id in chain] == new[1:] and w.job(held).retried_as is None
    assert [(w.job(job_id).name, w.job(job_id).umask) for job_id in new] == [("second", 0o27), *[(None, 0o27)] * 4]
    assert {w.store.state.environments[w.job(job_id).environment]["NEW"] for job_id in new} == {"1"}, "the shell is that of all"
    for pid, job_id in enumerate(new, 200):
        w.run(job_id, pid)
        w.end(job_id)
    assert {w.job(job_id).status for job_id in new} == {"completed"} and w.service.admission.list_left(new, ANN) == []


def test_a_retry_still_comes_after_what_may_complete(world):
    w = world(gpus=0, cpu_slots=1)
    lives, dies = w.add("lives", gpus=0), w.add("dies", gpus=0)
    child = w.add("child", gpus=0, after=[dies, lives])
    w.service.cancellation.cancel(nexus.Choice([dies], ("pending",)), ANN)
    again = w.service.admission.retry(nexus.Choice([child]), ANN).ids[0]
    assert (w.job(again).after, w.job(again).pending_dependencies) == ((lives,), (lives,))


def test_a_failure_counts_for_its_group_as_its_last_retry(world):
    """Of whichever group that is.  When it is retried anew, an earlier retry, and the retries of that, count no more."""
    w = world(gpus=0, cpu_slots=1)

    def retry(job_id, group):
        return w.service.admission.retry(nexus.Choice([job_id]), ANN, {"group": group}).ids[0]

    first = w.add("a", gpus=0, group="g")
    for pid, group in ((100, None), (101, "h"), (102, None)):
        w.turn()
        latest = [job.id for job in w.store.state.jobs.values()][-1]
        fail(w, latest, pid)
        again = retry(latest if group else first, group)
    w.service.editor.set_paused(True, "ann")
    assert w.api(w.add("b", gpus=0, after_group=["g"]))["waiting_for"].startswith(f"after 1 job of group g: {again};")


def test_a_retry_comes_after_the_groups_that_are_left(world):
    w = world(gpus=0, cpu_slots=1)
    for group in ("g", "h"):
        lost = w.add("a", gpus=0, group=group)
    child = w.add("b", gpus=0, after_group=["h"], after_any_group=["g", "h"])
    for job_id in (lost, child):
        w.service.cancellation.cancel(nexus.Choice([job_id], ("pending",)), ANN) if w.job(job_id).status == "pending" else None
    w.service.housekeeping.clear(nexus.Choice([lost]), ANN)
    again = w.job(w.service.admission.retry(nexus.Choice([child]), ANN).ids[0])
    assert (again.after_group, again.after_any_group, again.pending_groups) == ((), ("g",), ("g",))


def test_retry_of_too_many_for_the_queue_adds_none(world):
    w = world(gpus=0, queue_limit=2, cpu_slots=1)
    bad = w.add("bad", gpus=0)
    w.turn()
    fail(w, bad, 100)
    w.service.editor.set_paused(True, "ann")
    w.add("waits", gpus=0), w.add("waits", gpus=0)
    with pytest.raises(nexus.NexusError, match="queue is full"):
        w.service.admission.retry(nexus.Choice([bad]), ANN).ids[0]
    assert len(w.store.state.jobs) == 3
    with pytest.raises(nexus.NexusError, match="only a finished one"):
        w.service.admission.retry(nexus.Choice([nexus.list_pending(w.store.state)[0].id]), ANN)

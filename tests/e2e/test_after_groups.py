"""Jobs that come after a group: who counts for it, what it does to them, and what is refused."""

import time

import live
import pytest
from stage import Bench

import nexus


class Stage(Bench):
    """A service that starts nothing: each test says what becomes of its jobs."""

    def end(self, job_id, status="completed", **facts):
        """Have a job run and end, with all that follows from it."""
        now = time.time()

        def change(state):
            if status != "cancelled":
                yield nexus.change_status(nexus.begin_attempt(state.jobs[job_id], started_at=now), "running", now)
            yield from nexus.end_job(state, state.jobs[job_id], status, now, **facts)

        self.store.update(change)

    def fail(self, job_id):
        self.end(job_id, "failed", cause="exit", exit_code=3)

    def retry(self, *ids):
        status, answer = self.ask("POST", "/jobs/retry", {"ids": list(ids)})
        assert status == 200, answer
        return answer["ids"]

    def edit(self, job_id, **change):
        status, answer = self.ask("PATCH", f"/queue/{job_id}", change)
        assert status == 200, answer

    def clear(self, *ids):
        assert self.ask("POST", "/jobs/clear", {"ids": list(ids)})[0] == 200

    def parents(self, job_id):
        return self.store.state.jobs[job_id].after

    def waits(self, job_id):
        """What a job waits for, or how it has ended."""
        job = self.store.state.jobs[job_id]
        if job.status != "pending":
            return f"{job.status}: {job.current.cause_line}"
        return [id for group in job.pending_groups for _, id in self.store.state.awaited[group]]


@pytest.fixture
def stage():
    with Stage() as made:
        yield made


RINGS = [  # reason, the jobs that wait, (method, path, body) of what is refused, what is said
    ("a job of the group", [("aaa", {"group": "g"})], ("POST", "/queue", {"command": "true", "group": "g", "after_group": ["g"]}),
     "the job would wait for itself: it comes after group g, which has it"),
    ("each of those that would make the group", [], ("POST", "/queue", [
        {"command": "true", "group": "g"}, {"command": "true", "group": "g", "after_any_group": ["g"]}]),
     "the job would wait for itself: it comes after group g, which has it"),
    ("a job of it is edited", [("aaa", {"group": "g"})], ("PATCH", "/queue/aaa", {"after_group": ["g"]}),
     "job aaa would wait for itself: it comes after group g, which has it"),
    ("one that a job of it comes after", [("aaa", {}), ("bbb", {"after": ["aaa"], "group": "g"})],
     ("PATCH", "/queue/aaa", {"after_any_group": ["g"]}),
     "job aaa would wait for itself: it comes after group g, which has job bbb, which comes after it"),
    ("through another group", [("aaa", {"group": "g"}), ("bbb", {"group": "h", "after_group": ["g"]})],
     ("PATCH", "/queue/aaa", {"after_group": ["h"]}),
     "it comes after group h, which has job bbb, which comes after group g, which has it"),
    ("a new job joins", [("aaa", {"group": "g"}), ("bbb", {"after_group": ["g"]})],
     ("POST", "/queue", {"command": "true", "group": "g", "after": ["bbb"]}),
     "the job would wait for itself: it comes after job bbb, which comes after group g, which has it"),
    ("an edited one joins", [("aaa", {"group": "g"}), ("bbb", {"after_any_group": ["g"]}), ("ccc", {"after_any": ["bbb"]})],
     ("PATCH", "/queue/ccc", {"group": "g"}),
     "job ccc would wait for itself: it comes after job bbb, which comes after group g, which has it"),
]


@pytest.mark.parametrize("reason, jobs, request_, said", RINGS, ids=[case[0] for case in RINGS])
def test_a_ring_is_refused(stage, reason, jobs, request_, said):
    for job_id, fields in jobs:
        stage.add(job_id, **fields)
    before = stage.store.state
    status, answer = stage.ask(*request_)
    assert status == 409 and said in answer["message"] and "take another group" in answer["hint"], answer
    assert stage.store.state is before


def test_a_ring_is_refused_also_where_a_group_is_over_by_now(stage):
    """Who comes after it has not started, and so would wait for a job that joins."""
    stage.add("aaa", group="g")
    stage.add("bbb", after_group=["g"])
    stage.end("aaa")
    assert stage.waits("bbb") == []
    assert stage.ask("POST", "/queue", {"command": "true", "group": "g", "after": ["bbb"]})[0] == 409


def test_a_retry_that_would_close_a_ring_is_refused(stage):
    """It would join the group after which its parent comes by now."""
    stage.add("aaa", group="g")
    stage.add("bbb")
    stage.add("ccc", group="g", after=["bbb"])
    stage.end("ccc", "cancelled", cause="killed")
    stage.edit("bbb", after_any_group=["g"])
    status, answer = stage.ask("POST", "/jobs/retry", {"ids": ["ccc"]})
    assert status == 409 and "it comes after job bbb, which comes after group g, which has it" in answer["message"]


def test_there_must_be_a_job_of_the_group(stage):
    stage.add("aaa", group="exp1")
    for name, method, path in (("after_group", "POST", "/queue"), ("after_any_group", "PATCH", "/queue/aaa")):
        body = {name: ["exp"], **({"command": "true"} if method == "POST" else {})}
        status, answer = stage.ask(method, path, body)
        assert status == 404 and "there is no job of group 'exp'" in answer["message"] and "exp1" in answer["hint"], answer
    stage.end("aaa")
    stage.clear("aaa")
    assert stage.ask("POST", "/queue", {"command": "true", "after_group": ["exp1"]})[0] == 404, "it is empty"


def test_who_joins_and_leaves_counts_until_the_start(stage):
    stage.add("aaa", group="g")
    stage.add("www", after_group=["g"])
    stage.add("xxx", after_any_group=["g"])
    stage.add("bbb", group="g")
    stage.add("ccc")
    assert stage.waits("www") == stage.waits("xxx") == ["aaa", "bbb"]
    stage.edit("ccc", group="g")
    stage.edit("bbb", group=None)
    assert stage.waits("www") == ["aaa", "ccc"]
    stage.end("aaa")
    stage.edit("ccc", group="h")
    assert stage.waits("www") == stage.waits("xxx") == [], "the last one has left"
    stage.add("ddd", group="g")
    assert stage.waits("www") == ["ddd"], "it has not started"
    stage.end("ddd")
    stage.become("www", "running")
    stage.add("eee", group="g")
    assert stage.waits("xxx") == ["eee"] and stage.store.state.jobs["www"].pending_groups == ()
    stage.fail("eee")
    assert stage.waits("www").startswith("running") and stage.waits("xxx") == []


def test_what_has_started_once_waits_for_no_later_job(stage):
    stage.add("aaa", group="g")
    stage.add("www", after_group=["g"], retries=1)
    stage.end("aaa")
    stage.store.update(lambda state: [nexus.change_status(nexus.begin_attempt(
        state.jobs["www"], started_at=time.time()), "running", time.time())])
    stage.add("bbb", group="g")
    stage.store.update(lambda state: [nexus.change_status(state.jobs["www"], "pending", time.time())])
    stage.add("ccc", group="g")
    assert stage.waits("www") == []
    stage.edit("www", after_any_group=["g"])
    assert stage.waits("www") == ["bbb", "ccc"], "that is asked anew"
    stage.end("bbb")
    stage.end("ccc")
    assert stage.waits("www") == []


def test_a_failure_cancels_who_comes_after_and_what_follows(stage):
    stage.add("aaa", group="g")
    stage.add("bbb", group="g")
    stage.add("www", after_group=["g"], group="h")
    stage.add("xxx", after_group=["h"])
    stage.add("yyy", after_any_group=["g", "h"])
    stage.fail("aaa")
    assert stage.waits("www") == "cancelled: it was to come after group g, whose job aaa failed (exit 3)"
    assert stage.waits("xxx") == "cancelled: it was to come after group h, whose job www was cancelled (dependency)"
    assert stage.waits("yyy") == ["bbb"]
    status, answer = stage.ask("POST", "/queue", {"command": "true", "after_group": ["g"]})
    assert "was cancelled at once: it was to come after group g, whose job aaa failed (exit 3)" in answer["warning"]
    stage.add("zzz")
    status, answer = stage.ask("PATCH", "/queue/zzz", {"after_group": ["g"]})
    assert status == 409 and "could never start" in answer["message"] and "--after-any-group" in answer["hint"]
    # As with --after, a retry does not ask again for what has failed; and it waits for what is retried with it.
    assert stage.waits(stage.retry("www")[0]) == ["bbb"]
    later, first, second = stage.retry("xxx", "aaa", "www")
    assert stage.waits(second) == ["bbb", first] and set(stage.waits(later)) >= {second}
    status, answer = stage.ask("POST", "/jobs/cancel", {"ids": [first]})
    assert {second, later} <= {*answer["dependents"]}, answer


def test_a_retried_failure_counts_as_its_last_retry(stage):
    stage.add("aaa", group="g")
    stage.fail("aaa")
    second, = stage.retry("aaa")
    stage.add("www", after_group=["g"])
    assert stage.waits("www") == [second]
    stage.fail(second)
    assert "whose job " + second in stage.waits("www")
    third, = stage.retry(second)
    stage.edit(third, group="elsewhere")
    stage.add("xxx", after_group=["g"])
    assert stage.waits("xxx") == [third], "of whichever group it is"
    stage.end(third)
    assert stage.waits("xxx") == []


def test_an_earlier_retry_counts_no_more(stage):
    stage.add("aaa", group="g")
    stage.fail("aaa")
    earlier, = stage.retry("aaa")
    stage.edit(earlier, group="h")
    stage.fail(earlier)
    again, = stage.retry(earlier)
    stage.edit(again, group="k")
    stage.add("www", after_any_group=["g"])
    assert stage.waits("www") == [again]
    last, = stage.retry("aaa")
    assert stage.waits("www") == [last]
    stage.add("xxx", after_any_group=["h"])
    assert stage.waits("xxx") == [again], "it is still the last retry of that one"


def test_what_is_cleared_counts_as_it_ended(stage):
    stage.add("aaa", group="g")
    stage.add("bbb", group="g")
    stage.fail("aaa")
    again, = stage.retry("aaa")
    stage.end(again)
    stage.end("bbb")
    stage.clear(again)
    stage.add("www", after_group=["g"])
    assert stage.waits("www") == [], "the retry of aaa has completed"
    stage.add("ccc", group="g")
    stage.add("xxx", after_any_group=["g"])
    stage.fail("ccc")
    stage.clear("ccc")
    assert stage.waits("xxx") == []
    late = stage.add(after_group=["g"])
    assert stage.waits(late) == "cancelled: it was to come after group g, whose job ccc failed (exit 3), and is forgotten"
    stage.clear("aaa", "bbb")
    stage.add("ddd", group="g")
    assert stage.waits(stage.add(after_group=["g"])) == ["ddd"], "a group of which no job was left begins anew"


def test_a_report_after_a_sweep():
    """At the command line, with a service that is started again meanwhile."""
    with live.Box(gpus=0, is_supervised=False, cpu_slots=10) as box:
        log, gates = box.path("log"), {name: box.path(f"go-{name}") for name in "abc"}

        def add(*words):
            done = box.nexus("add", "--gpus", "0", *words)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        def work(name, code=0):
            return f"until [ -e {gates[name]} ]; do sleep 0.02; done; exit {code}"

        first, second = add("--group", "g", work("a")), add("--group", "g", work("b", 3))
        report = add("--after-group", "g", "--name", "report", f"echo report >> {log}")
        tidy = add("--after-any-group", "g", "--name", "tidy", f"echo tidy >> {log}")
        for shown in (box.nexus("queue").stdout, box.nexus("why", report).stdout, box.nexus("show", report).stdout):
            assert f"after 2 jobs of group g: {first}, {second}" in shown, shown
        assert "after group: g" in box.nexus("show", report).stdout
        assert box.job(report)["reason"] == {"code": "dependency", "subject": "g", "detail": f"2 jobs of group g: {first}, {second}"}
        third = add("--group", "g", work("c"))
        gates["a"].touch()
        box.wait(first, "completed")
        assert f"after 2 jobs of group g: {second}, {third}" in box.await_reason(tidy, third)
        box.kill_service()
        box.start()
        gates["b"].touch()
        box.wait(second, "failed")
        job = box.wait(report, "cancelled")
        assert job["cause"] == "dependency" and f"group g, whose job {second} failed (exit 3)" in job["cause_line"]
        assert f"after 1 job of group g: {third}" in box.await_reason(tidy, third)
        again, later = box.nexus("retry", second, report, "--command", work("a")).stdout.split()
        assert box.job(later)["after_group"] == ["g"]
        gates["c"].touch()
        for job_id in (third, again, later, tidy):
            box.wait(job_id, "completed")
        assert live.read(log).split() == ["tidy"]


# What is told of groups

def test_a_group_counts_its_jobs():
    with Bench(max_running=1) as bench:
        ids = {status: bench.add(group="g", gpus=0) for status in ("completed", "failed", "cancelled", "running", "pending")}
        other = bench.add(group="h", gpus=0, max_concurrent=2)
        bench.become(ids["running"], "running")
        for status in ("completed", "failed", "cancelled"):
            bench.become(ids[status], status, **({"cause": "exit", "cause_line": "oh dear", "exit_code": 3} if status == "failed" else {}))
        bench.ask("POST", "/service/pause", query={"group": "h"})
        first, second = sorted(bench.ask("GET", "/groups")[1], key=lambda group: group["name"])
        assert [first[status] for status in ids] == [1] * 5 and (first["position"], first["hold"], first["limit"]) == (0, None, 0)
        assert (first["failed_id"], first["failed_line"]) == (ids["failed"], "oh dear")
        assert (second["pending"], second["running"], second["position"], second["limit"]) == (1, 0, 1, 2)
        assert "paused by" in second["hold"] and "group h is held" in second["waiting_for"]
        assert bench.ask("GET", "/groups", None, bench.make_bearer("bob"))[1] == [], "whose jobs are others'"
        bench.ask("POST", "/jobs/retry", {"ids": [ids["failed"]]})
        bench.ask("DELETE", f"/queue/{other}")
        first = next(group for group in bench.ask("GET", "/groups")[1] if group["name"] == "g")
        assert (first["failed_id"], first["pending"]) == (None, 2), "what was run again is no failure any more"

"""A node that says what no agent does: nothing of its head changes by that, and nothing else of it suffers."""

import json
import os
import threading

import far_end
import live
import makers
import pytest
import samples
import turns
from turns import news, report

import nexus


def test_a_bad_reply_closes_its_node_alone(far):
    w = far.world
    there, here = w.add(node="n1", gpus=0), w.add(node=w.service.node)
    far.follow(b"{}\n")
    w.turn()
    assert w.job(there).status == "pending" and w.job(here).status == "running"
    for reason, reply, words in far_end.BAD_ENVELOPES:
        far.follow(reply)
        assert words in w.node.error.message and w.node.questions.line is None, reason
        far.follow(far_end.GOOD)
        assert w.node.error is None, reason
    w.turn()
    assert w.job(there).status == "running" and w.service.failure_count == 0


def test_a_bad_report_of_a_job_changes_nothing(away):
    w, far, job_id = away
    before, seq = w.job(job_id), w.store.state.seq
    for reason, reply, words in far_end.BAD_JOBS:
        far.follow(reply)
        w.turn()
        assert any(words in note for note in w.api(job_id)["notes"]), reason
        assert w.job(job_id) == before and w.store.state.seq == seq, "nothing of it is recorded"
        assert w.api(job_id)["unknown_since"] and w.node.error is None and "answers what no nexus does" in w.node.find_reason(0.0)
        assert not os.path.exists(w.folder_of(job_id) / "stdout.log")
        far.follow(far_end.GOOD)
        shown = w.api(job_id)
        assert (shown["unknown_since"], len(shown["notes"]), w.service.failure_count) == (None, 0, 0), reason
    next_id = w.add(node="n1", gpus=0)
    w.turn()
    far.follow(far_end.BAD_JOBS[0][1])
    w.turn()
    assert "answers what no nexus does" in w.api(next_id)["waiting_for"], "meanwhile it gets no other"


PIECES = [  # reason, size of its log there, where its 8 bytes begin in that, how many arrive
    ("what comes first", 8, 0, 8), ("a gap before it", 12, 4, 0),
]


@pytest.mark.parametrize("reason, size, offset, arrived", PIECES, ids=[case[0] for case in PIECES])
def test_output_is_taken_once_and_in_its_order(away, reason, size, offset, arrived):
    """Each reply stands alone: one that comes again, or too early, changes nothing, and is no fault of the node."""
    w, far, job_id = away
    for _ in range(5):
        far.follow(far_end.of_job(log_sizes=[size, 0], log_offsets=[offset, 0], logs=[far_end.LOG, ""]))
        w.turn()
    path = w.folder_of(job_id) / "stdout.log"
    assert (path.stat().st_size if path.exists() else 0) == arrived and not w.api(job_id)["notes"] and w.node.error is None


@pytest.mark.parametrize("reason, jobs", far_end.LATE, ids=[case[0] for case in far_end.LATE])
def test_a_late_reply_counts_for_what_it_tells(away, reason, jobs):
    w, far, job_id = away
    job = w.job(job_id)
    far.follow({**far_end.GOOD, "number": 0, "jobs": jobs})
    w.turn()
    assert w.node.questions.heard_number == 0 and w.node.error is None and w.job(job_id) == job
    assert not w.api(job_id)["notes"] and w.api(job_id)["unknown_since"] is None
    far.follow({**far_end.of_job(progress={"processes_left": 3}), "number": 0})
    w.turn()
    assert w.job(job_id).current.processes_left == 3


def test_times_of_a_node_are_within_those_of_the_job(away):
    w, far, job_id = away
    w.clock.pass_(10)
    far.follow({**far_end.ended(finished_at=4e9, runtime_seconds=1e11), "now": 0.0})
    w.turn()
    ran = w.job(job_id).current
    assert w.job(job_id).status == "completed"
    assert ran.started_at <= ran.finished_at <= w.clock.now() and ran.runtime_seconds <= w.clock.now() - ran.started_at


def test_times_are_those_of_the_heads_clock(away):
    w, far, job_id = away
    w.clock.pass_(10)
    far.follow({**far_end.ended(finished_at=w.clock.now() + 3600 - 4, runtime_seconds=5.0), "now": w.clock.now() + 3600})
    w.turn()
    ran = w.job(job_id).current
    assert (ran.finished_at, ran.runtime_seconds) == (pytest.approx(w.clock.now() - 4, abs=0.01), 5.0)


def test_an_end_waits_for_all_that_the_job_has_printed(away):
    w, far, job_id = away
    ended = far_end.ended(exit_code=0)
    for sizes, logs, status in (([8, 0], ["", ""], "running"), ([8, 0], [far_end.LOG, ""], "completed")):
        far.follow({**ended, "jobs": [{**ended["jobs"][0], "log_sizes": sizes, "logs": logs}]})
        w.turn()
        assert w.job(job_id).status == status
    assert (w.folder_of(job_id) / "stdout.log").read_text() == "x" * 8


def test_a_log_that_its_job_cuts_is_cut_here(away):
    w, far, job_id = away
    path = w.folder_of(job_id) / "stdout.log"
    for size, offset, logs, there in ((8, 0, far_end.LOG, 8), (8, 8, "", 8), (0, 8, "", 0), (8, 0, far_end.LOG, 8)):
        far.follow(far_end.of_job(log_sizes=[size, 0], log_offsets=[offset, 0], logs=[logs, ""]))
        assert path.stat().st_size == there


def test_logs_that_a_node_does_not_look_at_stay(away):
    w, far, job_id = away
    far.follow(far_end.of_job(log_sizes=None))
    w.turn()
    assert w.node.error is None and not w.api(job_id)["notes"] and not w.folder_of(job_id).joinpath("stdout.log").exists()


def test_a_job_says_where_what_it_wrote_into_its_checkout_is(away):
    w, far, job_id = away
    far.follow(far_end.of_job(progress={"files": "/there/files"}))
    w.turn()
    assert w.job(job_id).current.notes == ("files that it wrote are kept: n1:/there/files",)


def test_output_that_cannot_be_kept_is_asked_for_again(away, monkeypatch):
    """Each second; why, is logged once."""
    w, far, job_id = away
    monkeypatch.setattr(nexus, "append_log", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    reply = far_end.of_job(log_sizes=[8, 0], logs=[far_end.LOG, ""])
    for _ in range(3):
        before = w.clock.monotonic()
        far.follow(reply)
        assert w.clock.monotonic() - before == 1.0
    assert sum("cannot be kept" in line and "No space left" in line for line in w.lines) == 1
    monkeypatch.undo()
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())
    before = w.clock.monotonic()
    far.follow(reply)
    assert w.clock.monotonic() == before and (w.folder_of(job_id) / "stdout.log").read_text() == "x" * 8


def test_output_of_one_job_waits_for_no_other(head):
    w = head()
    ids = [w.add(gpus=0, node="n1") for _ in range(2)]
    w.turn()
    first, second = map(w.job, ids)
    news(w, report(first), report(second, log_sizes=(3, 0), logs=(b"abc", b"")))
    assert (w.folder_of(ids[1]) / "stdout.log").read_text() == "abc"


def test_since_when_a_report_is_wrong_is_when_the_first_was(away):
    w, far, job_id = away
    began = nexus.format_time(w.clock.now())
    for _ in range(2):
        far.follow(far_end.BAD_JOBS[0][1])
        w.turn(seconds=60)
    far.follow({**far_end.GOOD, "number": 0, "jobs": []})
    assert w.api(job_id)["unknown_since"] == began, "a reply that says nothing of it mends nothing"


def test_of_its_gpus_a_node_tells_what_it_sees_alone(far):
    """Who pauses them, and their means, is the head's; where it says nothing, they are as before."""
    far.follow(far_end.gpus({"is_paused": True, "pause_reason": "x", "utilization_mean": 5.0, "utilization_peak": 9.0, "utilization": 7.0}))
    for _ in range(2):
        gpu, = far.node.reports.gpus
        assert (gpu.node, gpu.uuid, gpu.utilization) == ("n1", "n1/G0", 7.0)
        assert (gpu.is_paused, gpu.pause_reason, gpu.utilization_mean, gpu.utilization_peak) == (False, None, None, None)
        far.follow({**far_end.GOOD, "gpus": None})


def test_a_flood_of_notes_is_cut(away):
    w, far, job_id = away
    size, clock = w.store.journal.size, w.clock.now()
    for turn in range(20):
        far.follow(far_end.of_job(progress={"notes": [f"{number} {turn % 10} " + "n" * 50000 for number in range(30)]}))
        w.turn(seconds=0.01)
    notes = w.job(job_id).current.notes
    assert len(notes) == nexus.MAX_NOTES and max(map(len, notes)) == nexus.MAX_WORDS
    assert w.store.journal.size - size < 100_000 * (1 + (w.clock.now() - clock) / nexus.NOTES_INTERVAL_S)


def test_notes_that_stay_the_same_are_recorded_once(away):
    w, far, job_id = away
    far.reply = far_end.of_job(progress={"notes": [f"note {number}" for number in range(50)]})
    far.follow()
    w.turn()
    seq = w.store.state.seq
    for _ in range(20):
        far.follow()
        w.turn(seconds=nexus.NOTES_INTERVAL_S)
    assert w.store.state.seq == seq and w.job(job_id).current.notes[-1] == "note 49"


# A node that is not in step with its head

def test_changes_wait_for_a_node_that_does_not_reply(away):
    w, far, _ = away
    count = len(far.questions)
    for number in range(50):
        w.service.pool.waiting = [makers.job("abc", cwd=f"/{number}")]
        w.node.questions.ask_anew()
    assert 0 < len(far.questions) - count <= nexus.MAX_CHANGES


def test_orders_go_to_a_node_a_few_at_a_time(far, monkeypatch):
    """It may claim to have slots without end, and read nothing."""
    w = far.world
    monkeypatch.setattr(nexus, "MAX_ORDERS", 2)
    ids = [w.add(node="n1", gpus=0) for _ in range(4)]
    for _ in range(5):
        w.turn()
        far.follow()
    assert all(w.job(job_id).current.pid for job_id in ids)
    assert max(sum(one.get("order") is not None for one in question["jobs"]) for question in far.questions) == 2
    w.node.end()
    order = nexus.Order(w.job(ids[0]), {})
    w.node.questions.orders = {w.job(job_id).attempt_key: order for job_id in (*ids[1:], ids[0])}      # that of the first was made last
    assert [job.id for job, _ in w.node.questions.list_due()] == ids[1:3], "those that were sent stay wanted"


def test_a_node_that_replies_at_once_leaves_time_to_the_service(away):
    w, far, _ = away
    w.service.tick_s = 0.2                          # what each of its replies costs
    assert far.follow() >= 2 * 0.2


def test_a_node_is_told_of_no_directory_that_is_not_for_its_jobs(far):
    w = far.world
    for node, cwd in (("n1", "/usr"), (w.service.node, "/etc"), (None, "/tmp")):
        w.add(node=node, cwd=cwd, begin="+1h")
    w.turn()
    far.follow()
    assert w.node.questions.latest.folders == ("/usr", "/tmp")


def test_a_node_that_goes_down_with_its_job_gets_none_for_a_while(away):
    w, far, job_id = away
    far.follow(far_end.ended(cause="reboot", exit_code=None))
    w.turn()
    assert w.job(job_id).status == "failed"
    next_id = w.add(node="n1", gpus=0)
    w.turn()
    far.follow(far_end.GOOD)
    w.turn()
    assert "n1: the machine went down while it ran" in w.api(next_id)["waiting_for"]


def test_health_names_a_few_faults_of_many(away):
    w, far, _ = away
    far.follow(far_end.gpus(*[{"index": number, "uuid": f"G{number}", "fault": "f" * 1000} for number in range(200)]))
    [reading] = [one["reading"] for one in w.service.health.check()["checks"] if one["name"] == "node n1"]
    assert reading.endswith("and 197 more") and len(reading) < 4000


def test_one_node_whose_news_cannot_be_taken_in_keeps_no_other_waiting(world, monkeypatch):
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())
    w, seen = world(), []
    for name in ("n1", "n2"):
        w.service.pool.add_node(nexus.NodeConfig(name, "10.0.0.5"), "ann")
    monkeypatch.setattr(nexus.Node, "poll", lambda node, events: seen.append(node.name) or (1 / (node.name != "n1") and ()))
    w.turn()
    assert seen == ["n1", "n2"] and w.service.failure_count == 1


# Snapshots

def test_a_node_with_slots_without_end_gets_one_snapshot_at_a_time(away, monkeypatch):
    w, _, job_id = away
    at_once, most, done, threads = [], [], [], threading.active_count()

    def push(*_):
        at_once.append(1)
        most.append(len(at_once))
        may_end.wait(0.01)                          # in which the others come, where they may
        at_once.pop()
        done.append(1)
        return "/r"

    may_end = threading.Event()
    monkeypatch.setattr(nexus, "push_snapshot", push)
    began = [nexus.with_facts(w.job(job_id), id=f"ab{letter}", snapshot=letter * 40, snapshot_repo="/r", cwd="/r")
             for letter in "cdefg" * 20]
    for job in began:
        w.node.start(job, {})
    assert threading.active_count() <= threads, "none for each"
    live.until(lambda: len(w.node.trees) == 5, "five commits")
    assert len(done) == 5 and max(most) == 1


def test_what_waits_for_another_snapshot_is_killed_at_once(far, monkeypatch):
    w = far.world
    pushed, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(nexus, "push_snapshot", lambda *_: pushed.set() or (may_end.wait(live.PATIENCE_S) and "/r"))
    first, second = [w.add(node="n1", gpus=0, snapshot=letter * 40, snapshot_repo="/") for letter in "ab"]
    w.turn()
    assert pushed.wait(live.PATIENCE_S) and w.job(second).status == "running"
    w.service.cancellation.cancel(nexus.Choice([second], ("running",)), turns.ANN)
    w.turn()
    assert w.job(second).status == "cancelled"
    may_end.set()
    live.until(lambda: w.turn() or (far.follow() and w.job(first).current.pid == 77), lambda: w.api(first))
    assert list(w.node.trees) == ["a" * 40]


# Mutations of a true reply

HOSTILE = [None, True, "", "x" * 100000, "\x1b]0;x\x07\n", -1, 2**62, 2**64 - 1, 1e19, -1e19, 1e300, float("nan"), float("inf"), [],
           [[]] * 50, {}, {"command": "id", "status": "x", "id": "zzzz", "status_history": "abc"}, [1], "../../x", "$(id)",
           "-oProxyCommand=id", json.loads("[" * 60 + "]" * 60)]
TRUE = far_end.of_job(progress={"session": "77.nexus_job_abc", "notes": ["a note"], "processes_left": None, "files": None, "requeue": ""},
                      samples={"peak_rss_mib": 5.0, "cpu_seconds": 1.0}, logs=["", ""])
TRUE["gpus"] = [{**far_end.GPU, "processes": [{"pid": 5, "memory_mib": 4.0, "user": "bob", "name": "python"}]}]


def mutate(rng):
    """A true reply with another value, one more key or one less somewhere."""
    path = rng.choice([path for path in makers.paths_of(TRUE) if path])
    *above, last = path
    holder = TRUE
    for key in above:
        holder = holder[key]
    how = rng.randrange(4)
    if how == 0:
        fewer = {key: one for key, one in holder.items() if key != last} if isinstance(holder, dict) else []
        return makers.put_at(TRUE, above, fewer)
    if how == 1 and isinstance(holder, dict):
        return makers.put_at(TRUE, above, {**holder, rng.choice(nexus.Job.NAMES): rng.choice(HOSTILE)})
    if how == 2 and isinstance(holder, list):
        return makers.put_at(TRUE, above, [*holder, *holder])
    return makers.put_at(TRUE, path, rng.choice(HOSTILE))


OWN = ("id", "command", "cwd", "user", "name", "gpus", "gpu_ids", "only_node", "retries", "created_at", "log_dir", "priority", "after")


def test_whatever_a_node_says_its_head_goes_on(away):
    """Its job there may end or begin anew, as any node may say; the job here, what was asked for, and all answers stay."""
    w, far, there = away
    rng, here = samples.random(), w.add(node=w.service.node)
    w.store.update(lambda state: [nexus.change_job(state.jobs[there], retries=1000)])
    w.turn()
    assert w.job(here).status == "running"
    w.claim(here, 500)
    before, kept = [w.api(job) for job in (here, there)], {*os.listdir(w.folder), "state.json.prev", "journal.jsonl.prev"}
    for _ in range(samples.count(50, 5000)):
        reply = mutate(rng)
        for _ in range(2):
            far.follow(reply)
            w.turn(seconds=0.1)
        json.dumps([w.service.job_serializer.describe_jobs(list(w.store.state.jobs.values())), w.service.pool.list_nodes()])
        for job, keys in zip(before, ((*OWN, "status", "attempt", "pid", "status_history", "notes"), OWN)):
            assert nexus.pick(w.api(job["id"]), keys) == nexus.pick(job, keys), reply
    assert kept.issuperset(os.listdir(w.folder)) and len(os.listdir(w.layout.log_dir)) == 2 and w.service.failure_count == 0, w.lines
    w.crash()
    assert w.api(there)["command"] == before[1]["command"] and not w.store.list_damaged()


def test_a_node_gets_the_nice_value_of_a_job_and_not_its_cpus(head):
    """They are those of the machine on which it was added."""
    w = head()
    w.add(nice=7, cpus="0-1", umask=0o027)
    w.turn()
    node = w.service.pool.nodes["n1"]
    order, = [wanted.order for wanted in node.questions.list_wanted() if wanted.order]
    assert (order.job.nice, order.job.cpus, order.job.umask) == (7, None, 0o027)


def test_news_that_comes_while_the_disk_is_full_is_not_lost(head, monkeypatch):
    w = head()
    job_id = w.add()
    w.turn()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.store.journal, "append", full)
    news(w, report(w.job(job_id), requeue="bob took GPU 0 first"))
    w.turn()
    w.turn()
    monkeypatch.undo()
    assert w.job(job_id).status == "running"
    w.turn()
    assert w.job(job_id).status == "pending" and w.job(job_id).attempts[-1].cause_line == "n1: bob took GPU 0 first"


def test_a_node_is_lost_between_the_plan_and_the_order(head, monkeypatch):
    """The job goes back to the queue, and there again when it can."""
    w = head()
    job_id, node = w.add(), w.service.pool.nodes["n1"]
    start = node.start

    def lose(job, submitted):
        node.questions.line = None
        return start(job, submitted)

    monkeypatch.setattr(node, "start", lose)
    w.turn()
    w.turn()
    assert w.job(job_id).status == "pending" and w.job(job_id).attempts[-1].cause_line == "n1: it cannot be reached"
    assert not node.questions.list_wanted()
    monkeypatch.undo()
    line = head.connect(w).questions.line
    w.turn(seconds=10)
    w.turn()
    assert w.job(job_id).status == "running" and len(line.orders) == 1


@pytest.mark.parametrize("error, status", [
    (FileNotFoundError(2, "No such file or directory"), "failed"), (nexus.NexusError("forbidden", "it may not be run here"), "failed"),
    (BlockingIOError(11, "Resource temporarily unavailable"), "failed"), (nexus.NexusError("unavailable", "no route"), "pending")], ids=str)
def test_what_keeps_an_order_from_being_made(head, monkeypatch, error, status):
    """Whatever it fails at, the job does not wait for ever."""
    w = head()
    job_id = w.add()
    monkeypatch.setattr(w.service.starter, "make_node_order", lambda *_: (_ for _ in ()).throw(error))
    for _ in range(3):
        w.turn()
    assert w.job(job_id).status == status and str(error) in w.job(job_id).attempts[-1].cause_line


def test_a_job_cannot_be_begun_there(head):
    """It is tried as often as one here."""
    w = head(launch_attempts=2)
    job_id = w.add()
    for failures in (1, 2):
        w.turn()
        assert w.job(job_id).status == "running"
        news(w, report(w.job(job_id), {"exit_code": None, "cause": "launch", "cause_line": "/logs: full", "may_pass": True}))
        w.turn()
        w.turn()
        assert w.job(job_id).status == ("pending" if failures == 1 else "failed")
        w.turn(seconds=60)


def test_what_a_node_could_not_take_runs_here_when_that_is_gone(head):
    w = head(gpus=1)
    job_id = w.add()
    w.service.editor.set_paused(True, "ann")
    w.store.update(lambda state: (yield nexus.change_job(state.jobs[job_id], excluded_nodes=(("n1", "there is no /data"),))))
    w.service.pool.remove_node("n1", True, "ann")
    news(w)
    w.turn()
    w.service.editor.set_paused(False, "ann")
    w.turn()
    assert not w.service.pool.nodes and w.job(job_id).status == "running"

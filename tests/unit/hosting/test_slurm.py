"""Slurm does what a real one does seldom.  tests/e2e/test_slurm.py has a real one."""

import pytest
from turns import ANN, World

import nexus

# With Slurm.  tests/e2e/test_slurm.py has a real one; here it does what a real one does seldom.


class FakeSlurm(nexus.Slurm):
    """What Slurm has: {id: SlurmJob}.  `answer` is called at each sbatch, and raises, or returns words of refusal."""

    def __init__(self, world):
        self.world, self.service_id, self.jobs, self.next_id = world, world.store.service_id, {}, 1
        self.cancelled, self.submitted, self.is_down = [], [], False
        self.answer = lambda: ""
        self.query_partitions = lambda: ()

    def run_sbatch(self, argv):
        options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
        words = self.answer()
        self.submitted.append(options["job-name"])
        if words:
            return None, words
        one = nexus.SlurmJob(str(self.next_id), "PENDING", "Resources", key=options["comment"].rpartition(":")[2])
        self.jobs[one.id] = one
        self.next_id += 1
        return one.id, ""

    def query_jobs(self):
        if self.is_down:
            raise nexus.NexusError("unavailable", "Slurm does not answer: down")
        return list(self.jobs.values())

    def query_name(self):
        return "nx"

    def cancel(self, ids):
        self.cancelled += ids
        return ""

    def set(self, slurm_id, state, **fields):
        fields = {"nodes": "n1", "started_at": self.world.clock.wall, "ended_at": self.world.clock.wall, **fields}
        self.jobs[slurm_id] = nexus.replace(self.jobs[slurm_id], state=state, **fields)


@pytest.fixture
def cluster(world):
    """A world with a Slurm; go(): a while passes, in which all is asked and submitted that is to be."""
    w = world(launcher="slurm")
    w.slurm = FakeSlurm(w)

    def take_slurm():
        w.slurm.service_id, w.service.cluster.slurm = w.store.service_id, w.slurm
        w.service.take_in(w.service.cluster, ())

    def go(turns=6, seconds=6.0):
        for _ in range(turns):
            w.clock.pass_(seconds / turns)
            w.service.cluster.looked_at = float("-inf")
            w.service.cluster.step()
            w.turn()

    def crash():
        World.crash(w)
        take_slurm()

    w.go, w.crash = go, crash
    take_slurm()
    go(1)
    return w


def result_of(w, job_id, code):
    w.folder_of(job_id).mkdir(exist_ok=True)
    (w.folder_of(job_id) / f"attempt-{w.job(job_id).attempt}").write_text("77 770\n")
    w.write_result(job_id, code)

OURS = "0 0\n"                   # the text of a claim that keeps a late runner from beginning


def claim_of(w, job_id):
    """What is in the claim of a job's first attempt, without its key; None when there is none."""
    path = w.folder_of(job_id) / "attempt-1"
    return path.read_text().replace(f" {job_id}-{w.job(job_id).number}-1", "") if path.exists() else None


@pytest.mark.parametrize("took_s, is_down, pause_s", [
    (0.01, False, 5), (3, False, 30), (40, False, 120), (0.01, True, 5), (40, True, 10)])
def test_how_often_squeue_is_run(cluster, monkeypatch, took_s, is_down, pause_s):
    """The longer it takes, the more seldom; but soon again where it did not answer."""
    w, query = cluster, cluster.slurm.query_jobs
    monkeypatch.setattr(w.slurm, "query_jobs", lambda: w.clock.pass_(took_s) or query())
    w.slurm.is_down = is_down
    w.service.cluster.looked_at = float("-inf")
    w.service.cluster.step()
    assert w.service.cluster.find_pause_s() == pytest.approx(pause_s)


def test_slurms_partitions_are_read_twice_a_minute(cluster):
    w, read_at = cluster, []
    w.service.cluster.partitions_at, begin = float("-inf"), w.clock.monotonic()
    w.slurm.query_partitions = lambda: read_at.append(w.clock.monotonic() - begin) or ()
    w.go(13, seconds=65)
    assert read_at == [5, 35, 65]


def test_that_slurm_answers_again_is_logged_once(cluster):
    w = cluster
    w.slurm.is_down = True
    w.go(2)
    w.slurm.is_down = False
    w.lines.clear()
    w.go(3)
    assert w.lines == ["Slurm answers"]


def test_the_loop_is_woken_for_what_slurm_shows_alone(cluster, monkeypatch):
    """While a kill is on its way, the loop wakes the thread: if that woke the loop each time, both would turn without a pause."""
    w, woken = cluster, []
    w.add()
    w.go()
    monkeypatch.setattr(w.service, "wake", lambda: woken.append(1))
    w.service.cluster.step()
    assert not woken
    w.slurm.set("1", "RUNNING")
    w.service.cluster.looked_at = float("-inf")
    w.service.cluster.step()
    assert woken == [1]


def test_no_job_is_submitted_before_what_slurm_has_shown_is_recorded(cluster, monkeypatch):
    """Otherwise the answer of sbatch would replace it."""
    w, start = cluster, cluster.service.cluster.start
    first = w.add()
    w.go()
    w.slurm.set("1", "RUNNING")

    def see_meanwhile(job, variables):
        w.service.cluster.looked_at = float("-inf")
        w.service.cluster.step()
        return start(job, variables)

    monkeypatch.setattr(w.service.cluster, "start", see_meanwhile)
    second = w.add()
    w.turn()
    w.service.cluster.step()
    assert w.slurm.submitted == [f"nexus_{first}"]
    w.turn()
    assert w.job(first).status == "running"
    w.service.cluster.step(), w.turn()
    assert w.job(second).current.slurm_id == "2"


def test_slurm_keeps_the_order_of_the_queue(cluster):
    """Jobs are submitted one by one: what comes late and is more urgent is the next."""
    w = cluster
    first, second = w.add(), w.add()
    w.service.cluster.worker.wanted.clear()
    w.turn()
    assert w.service.cluster.worker.wanted.is_set(), "its thread submits at once"
    urgent = w.add(priority=0)
    assert w.api(second)["waiting_for"] == "the job before it is being submitted to Slurm"
    w.go()
    assert w.slurm.submitted == [f"nexus_{job_id}" for job_id in (first, urgent, second)]
    assert all((w.folder_of(job_id) / "job.sh").exists() for job_id in (first, urgent, second))
    assert w.service.status.describe()["slurm"]["cluster"] == "nx"


def find_id(w, job_id):
    """sbatch's answer, which is lost."""
    w.slurm.answer = lambda: ""
    w.go()


def begin(w, job_id):
    w.slurm.set("1", "RUNNING")


def begin_and_end(w, job_id):
    result_of(w, job_id, 3)
    w.slurm.set("1", "COMPLETED")


def be_cancelled(w, job_id):
    w.slurm.set("1", "CANCELLED", nodes="")


def be_forgotten(w, job_id):
    del w.slurm.jobs["1"]

UNRECORDED = [  # reason, what Slurm does while the disk refuses, (status, its history, attempt, Slurm's id) once there is room
    ("it has it", find_id, ("pending", ["pending"], 1, "1")),
    ("it began", begin, ("running", ["pending", "running"], 1, "1")),
    ("it began and ended", begin_and_end, ("failed", ["pending", "running", "failed"], 1, "1")),
    ("it was cancelled there", be_cancelled, ("cancelled", ["pending", "cancelled"], 1, "1")),
    ("it was forgotten there", be_forgotten, ("pending", ["pending"], 2, "2")),
]


@pytest.mark.parametrize("reason, act, wanted", UNRECORDED, ids=[case[0] for case in UNRECORDED])
def test_what_the_disk_refuses_slurm_shows_again(cluster, monkeypatch, reason, act, wanted):
    """Meanwhile Slurm is asked on, but not in haste."""
    w, asked = cluster, []
    job_id = w.add()
    if act is find_id:
        w.slurm.answer = lambda: w.service.cluster.rest("later", "", True) or "job queue full"
    w.go()
    query, size = w.slurm.query_jobs, w.store.journal.size

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.store.journal, "append", full)
    monkeypatch.setattr(w.slurm, "query_jobs", lambda: asked.append(w.service.cluster.find_pause_s()) or query())
    act(w, job_id)
    w.go()
    assert w.api(job_id)["status"] == "pending" and w.store.journal.size == size
    assert len(asked) >= 6 and min(asked[2:]) > nexus.FAST_POLL_S
    w.slurm.is_down = True
    w.go(2)
    assert "Slurm does not answer: down" in [check["reading"] for check in w.service.health.check()["checks"] if check["name"] == "Slurm"]
    w.slurm.is_down = False
    monkeypatch.undo()
    w.go(10)
    job = w.api(job_id)
    assert (job["status"], [status for status, _ in job["status_history"]], job["attempt"], job["slurm_id"]) == wanted
    assert job["status"] != "failed" or (job["node"], job["exit_code"], job["started_at"] is not None) == ("n1", 3, True)


@pytest.mark.parametrize("reason, has_come, attempts", [("the answer alone was lost", True, 1), ("it never came there", False, 2)])
def test_slurm_answers_nothing_to_sbatch(cluster, reason, has_come, attempts):
    w = cluster

    def fail():
        w.slurm.answer = lambda: ""
        if has_come:
            w.slurm.jobs["9"] = nexus.SlurmJob("9", "PENDING", key=w.job(job_id).current.slurm_key)
        raise nexus.NexusError("unavailable", "Slurm does not answer: Socket timed out on send/recv operation")

    w.slurm.answer = fail
    job_id = w.add()
    w.go(12)
    assert (w.job(job_id).attempt, w.job(job_id).current.slurm_id) == (attempts, "9" if has_come else "1"), reason
    assert claim_of(w, job_id) == (None if has_come else OURS), "what comes late finds its attempt taken"
    assert w.slurm.cancelled == []


def test_slurm_has_what_nobody_wants_any_more(cluster):
    w = cluster
    ids = [w.add() for _ in range(3)]
    w.go()
    w.service.cancellation.cancel(nexus.Choice([ids[1]], (nexus.PENDING,)), ANN)
    assert w.job(ids[1]).status == "cancelled" and claim_of(w, ids[1]) == OURS
    w.go()
    assert set(w.slurm.cancelled) == {"2"}, "no other"
    w.slurm.set("1", "RUNNING")
    (w.folder_of(ids[0]) / "attempt-1").write_text("77 770\n")
    w.service.cancellation.cancel(nexus.Choice([ids[0]], (nexus.PENDING,)), ANN)         # it has begun, which is not seen yet
    assert w.api(ids[0])["status"] == "pending" and w.api(ids[0])["stopping"] == "killed"
    w.go()
    assert set(w.slurm.cancelled) == {"2", "1"}
    w.slurm.set("1", "CANCELLED")
    w.go(12, seconds=8)
    assert (w.job(ids[0]).status, w.job(ids[0]).current.cause) == ("cancelled", "killed")


def test_health_is_good_again_when_slurm_takes_jobs_again(cluster):
    w = cluster
    first = w.add()
    w.go()
    w.slurm.answer = lambda: "invalid partition specified: nope"
    second = w.add()
    w.go()
    assert not w.service.health.check()["is_healthy"]
    w.service.cancellation.cancel(nexus.Choice([second], (nexus.PENDING,)), ANN)
    result_of(w, first, 0)
    w.slurm.set(w.job(first).current.slurm_id, "COMPLETED")
    w.go(3)
    assert w.service.health.check()["is_healthy"] and w.service.status.describe()["slurm"]["trouble"] is None


def test_slurm_takes_only_so_many(cluster):
    w = cluster

    def limit():
        there = sum(one.state in ("PENDING", "RUNNING") for one in w.slurm.jobs.values())
        return "AssocMaxSubmitJobLimit; Job violates accounting/QOS policy" if there >= 3 else ""

    w.slurm.answer = limit
    ids = [w.add() for _ in range(10)]
    w.go()
    assert len(w.slurm.jobs) == 3 and w.job(ids[2]).current.slurm_id and not w.job(ids[4]).current.slurm_key
    words = "Slurm takes no more jobs now: AssocMaxSubmitJobLimit; Job violates accounting/QOS policy"
    assert w.api(ids[9])["waiting_for"] == words and w.api(ids[3])["waiting_for"] == f"it is being submitted to Slurm; {words}"
    assert w.service.status.describe()["slurm"]["trouble"] is None, "there is nothing to mend"
    w.turn(seconds=400)
    assert w.api(ids[9])["waiting_for"] == words, "until it is asked anew"
    w.go(40, seconds=600)
    asked = len(w.slurm.submitted)
    assert asked < 15 and w.job(ids[3]).attempt == 1, "it is asked less and less often"
    result_of(w, ids[0], 0)
    w.slurm.set(w.job(ids[0]).current.slurm_id, "COMPLETED")
    w.go(4)
    assert w.job(ids[0]).status == "completed" and w.job(ids[3]).current.slurm_id, "as soon as one has ended"
    w.service.cancellation.cancel(nexus.Choice([ids[4]], (nexus.PENDING,)), ANN)
    w.go(2)
    assert w.job(ids[4]).status == "cancelled", "the one that is refused"
    w.service.editor.set_paused(True, "ann")
    w.slurm.answer = lambda: ""
    w.go(60, seconds=600)
    assert not w.job(ids[5]).current.slurm_id
    w.service.editor.set_paused(False, "ann")
    w.go(60, seconds=600)
    assert all(w.job(job_id).current.slurm_id for job_id in ids[5:]) and w.service.cluster.submit_backoff.error is None


def test_slurm_job_is_killed_on_its_way(cluster):
    """Before its sbatch, and while that runs."""
    w = cluster
    job_id = w.add()
    w.turn()                                                # intended, and with the thread
    w.service.cancellation.cancel(nexus.Choice([job_id], (nexus.PENDING,)), ANN)
    assert w.api(job_id)["status"] == "pending" and w.api(job_id)["stopping"] == "killed"
    w.go()
    assert (w.job(job_id).status, w.job(job_id).current.cause, w.slurm.submitted) == ("cancelled", "killed", [])
    job_id = w.add()
    w.slurm.answer = lambda: (w.service.cancellation.cancel(nexus.Choice([job_id], (nexus.PENDING,)), ANN), "")[1]
    w.go()
    assert set(w.slurm.cancelled) == {"1"}
    w.slurm.set("1", "CANCELLED", nodes="")
    w.go()
    assert w.job(job_id).status == "cancelled"


def test_slurm_is_given_the_next_jobs_after_an_exception(cluster, monkeypatch):
    w = cluster
    job_id = w.add()
    monkeypatch.setattr(nexus, "build_sbatch", lambda *_: 1 / 0)
    w.turn()
    with pytest.raises(ZeroDivisionError):
        w.service.cluster.step()
    monkeypatch.undo()
    w.go(12)
    assert w.job(job_id).current.slurm_id == "1" and w.job(job_id).attempt == 2


def test_slurm_refuses_what_this_one_asks_for(cluster):
    w = cluster
    w.slurm.answer = lambda: "something that nobody has heard of"
    job_id = w.add()
    w.go(40, seconds=200)
    assert w.api(job_id)["started_at"] and w.api(job_id)["cause_line"] == "Slurm refuses it: something that nobody has heard of"
    assert w.job(job_id).status == "failed" and len(w.job(job_id).attempts) == 5, "that may pass, and is tried again for a while"


def test_sbatch_that_waits_at_a_limit_until_its_own_time_is_over_is_no_trouble(cluster):
    w = cluster

    def fail():
        raise nexus.NexusError("unavailable", "Slurm does not answer: sbatch: error: Job violates accounting/QOS policy; it took 60 s")

    w.slurm.answer = fail
    w.add()
    w.go()
    assert w.service.status.describe()["slurm"]["trouble"] is None and len(w.slurm.submitted) == 0
    assert "Slurm takes no more jobs now" in w.service.cluster.submit_backoff.error.message


@pytest.mark.parametrize("is_seen", [True, False])
def test_slurm_queues_a_job_again_that_it_has_begun(cluster, is_seen):
    """Its node was lost: nexus has the job fail as such, or tried again if it may be, and Slurm does not run it a second time."""
    w = cluster
    job_id = w.add()
    w.go()
    if is_seen:
        w.slurm.set("1", "RUNNING")
        w.go(1)
    (w.folder_of(job_id) / "attempt-1").write_text("77 770\n")
    w.slurm.set("1", "PENDING", reason="BeginTime")
    w.go(20, seconds=70)
    ended = w.job(job_id)
    assert (ended.status, ended.current.cause) == ("failed", "node-fail") and "queued again: BeginTime" in ended.current.cause_line
    w.go(1)
    assert set(w.slurm.cancelled) == {"1"}


def test_slurm_does_not_know_limits_of_seconds(cluster):
    w = cluster
    ids = [w.add(timeout_seconds=seconds) for seconds in (90, 60)]
    w.go()
    for number in ("1", "2"):
        w.slurm.set(number, "RUNNING")
    w.go(1, 1)
    w.turn(seconds=80)
    assert [w.job(job_id).current.stop_cause for job_id in ids] == [None, None]
    w.turn(seconds=12)
    assert [w.job(job_id).current.stop_cause for job_id in ids] == ["timeout", None], "that of a whole minute is Slurm's"
    assert any(line.startswith(f"Started job {ids[0]} as Slurm's 1 on n1: ") for line in w.lines)
    assert "its time limit is 1m 30s" in w.job(ids[0]).current.stop_line
    w.go()
    assert set(w.slurm.cancelled) == {"1"}


@pytest.mark.parametrize("after_s, status, cause", [(50, "completed", None), (70, "failed", "session-lost")])
def test_a_result_may_come_late_over_a_shared_file_system(cluster, after_s, status, cause):
    w = cluster
    job_id = w.add()
    w.go()
    (w.folder_of(job_id) / "attempt-1").write_text("77 770\n")
    w.slurm.set("1", "RUNNING")
    w.go(1)
    w.slurm.set("1", "COMPLETED")
    w.go(10, seconds=after_s)
    w.write_result(job_id, 0)
    w.go(2)
    assert (w.job(job_id).status, w.job(job_id).current.cause) == (status, cause)


def test_what_failed_before_its_job_sh_began_has_a_node_and_a_start(cluster):
    w = cluster
    job_id = w.add()
    w.go()
    w.slurm.set("1", "FAILED")
    w.go(10, seconds=10)
    job = w.api(job_id)
    assert (job["status"], job["cause"], job["node"], job["started_at"] is not None) == ("failed", "launch", "n1", True)
    assert "must be on a file system that the nodes share" in job["cause_line"]


CANCELS = [  # what scancel says, whether that is logged
    ("", False), ("scancel: error: Kill job error on job id 1: Invalid job id specified", False),
    ("scancel: error: Kill job error on job id 1: Access/permission denied", True)]


@pytest.mark.parametrize("words, is_told", CANCELS)
@pytest.mark.parametrize("has_key", [True, False])
def test_a_kill_is_slurms_to_carry_out(cluster, monkeypatch, words, is_told, has_key):
    """Also of a job that it knows by its id alone.  That there was nothing left to end is no news."""
    w, asked = cluster, []
    w.add()
    w.go()
    w.slurm.set("1", "RUNNING", **({} if has_key else {"key": None}))
    w.go(1)
    monkeypatch.setattr(w.slurm, "cancel", lambda ids: asked.append(ids) or words)
    w.service.cancellation.cancel(nexus.Choice(status=("running",)), ANN)
    w.go(3)
    assert asked and all(ids == ["1"] for ids in asked) and any(line == f"scancel 1: {words}" for line in w.lines) == is_told


def test_slurm_is_asked_soon_where_something_is_about_to_change(cluster):
    """When a runner has said something, and when what was found is recorded."""
    w = cluster
    job_id = w.add()
    w.turn()
    w.service.cluster.step()
    w.service.cluster.worker.wanted.clear()
    w.turn()
    assert w.job(job_id).current.slurm_id and w.service.cluster.worker.wanted.is_set(), "its thread goes on"
    w.turn(seconds=60)
    w.service.cluster.worker.wanted.clear()
    w.turn("start xyz 1 77 770 770")
    assert not w.service.cluster.worker.wanted.is_set(), "of another one"
    w.turn(f"start {job_id} 1 77 770 770")
    assert w.service.cluster.worker.wanted.is_set() and w.service.cluster.hasty_until > w.clock.monotonic()
    w.slurm.set("1", "RUNNING")
    w.go(2)
    w.turn(seconds=60)
    w.service.cancellation.cancel(nexus.Choice([job_id]), ANN)
    w.service.cluster.worker.wanted.clear()
    w.turn()
    assert w.job(job_id).status == "running" and w.service.cluster.worker.wanted.is_set(), "its thread has Slurm end it"

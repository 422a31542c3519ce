"""Starts that come to nothing, or come later; folders for logs; --cuda-arg."""

import errno
import os
import pathlib
import shutil
import types

import makers
import pytest
from turns import ANN, BrokenLeases, fail

import nexus

# Starts that come to nothing


def test_bounce_of_a_job_that_is_to_be_stopped_ends_it(world):
    w = world()
    job_id = w.add()
    w.turn()
    w.service.cancellation.cancel(nexus.Choice([job_id], (nexus.RUNNING,)), ANN)
    w.turn(f"bounce {job_id} 1 taken")
    w.turn()
    assert (w.job(job_id).status, w.job(job_id).current.cause, w.job(job_id).current.stop_by) == ("cancelled", "killed", "ann")
    assert w.machine.launched == [(job_id, 1)] and not w.service.outcomes.unrecorded and not w.service.job_host.hosted


def test_starts_that_come_to_nothing_leave_no_trail(world):
    """Whatever is in their way may be there for days: neither the job grows, nor is it tried all the time."""
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    job_id = w.add()
    for _ in range(600):
        w.probe()
        w.turn(seconds=1)
    assert len(w.job(job_id).status_history) == 1 and 5 <= w.job(job_id).attempt <= 15
    w.machine.leases.error = None
    while w.job(job_id).status == "pending":
        w.probe()
        w.turn(seconds=1)
    assert [status for status, _ in w.job(job_id).status_history] == ["pending", "running"]

LAUNCH_FAULTS = [  # error, how often the job is tried before it fails (0: until it starts), part of the words
    (OSError(errno.EMFILE, "Too many open files"), 0, "Too many open files"),
    (OSError(errno.EROFS, "Read-only file system", "/logs"), 0, "cannot start it with /logs: Read-only file system"),
    (OSError(errno.ENOSPC, "No space left on device"), 0, "/logs/job_"),
    (OSError(errno.ENOENT, "No such file or directory", "sh"), 3, "cannot start it with sh"),
    (OSError(errno.EACCES, "Permission denied"), 3, "Permission denied"),
    (nexus.NexusError("forbidden", "/x.py is not a file"), 1, "/x.py is not a file"),
]


@pytest.mark.parametrize("error, count, words", LAUNCH_FAULTS, ids=[words for _, _, words in LAUNCH_FAULTS])
@pytest.mark.parametrize("is_translated", [False, True])
def test_a_job_that_cannot_be_started(world, error, count, words, is_translated):
    if is_translated and isinstance(error, OSError):    # as by `with disk(...)`
        error, fault = nexus.NexusError("unavailable", "cannot write it"), error
        error.__cause__ = fault
    w = world(launch_attempts=3)
    w.machine.refusal = error
    job_id = w.add()
    for _ in range(40):
        w.probe()
        w.turn(seconds=10)
    job = w.job(job_id)
    if count:
        assert (job.status, job.current.cause, job.current.exit_code) == ("failed", "launch", None) and words in job.current.cause_line
        assert len(job.attempts) == count
        assert not w.claim(job_id, 100)                 # a late runner finds that its attempt is taken
    else:
        assert job.status == "pending" and words in w.api(job_id)["waiting_for"]
        w.machine.refusal = None
        for _ in range(40):
            w.probe()
            w.turn(seconds=10)
        assert [status for status, _ in w.job(job_id).status_history[:2]] == ["pending", "running"]

LOG_FOLDERS = [  # what is in its place, what makes it so, part of the words
    ("a file", lambda path: path.write_text(""), "Not a directory"),
    ("a link into a disk that is not mounted", lambda path: path.symlink_to(path.with_name("unmounted") / "logs"), "No such file"),
    ("a link to itself", lambda path: path.symlink_to(path), "Too many levels"),
]


@pytest.mark.parametrize("reason, put, words", LOG_FOLDERS, ids=[case[0] for case in LOG_FOLDERS])
def test_without_a_folder_for_logs_no_job_fails(world, reason, put, words):
    w = world(launch_attempts=2)
    folder = pathlib.Path(w.layout.log_dir)
    shutil.rmtree(folder, ignore_errors=True)
    put(folder)
    job_id = w.add()
    for _ in range(40):
        w.probe()
        w.turn(seconds=10)
    assert w.job(job_id).status == "pending" and "cannot start it with" in w.api(job_id)["waiting_for"]
    told = next(check for check in w.service.health.check()["checks"] if check["name"] == "log disk")
    assert not told["is_ok"] and f"cannot use {folder}" in told["reading"] and words in told["reading"]
    folder.unlink()
    for _ in range(40):
        w.probe()
        w.turn(seconds=10)
    assert (folder / f"job_{job_id}" / "job.sh").exists() and w.service.health.check()["is_healthy"]


# GPUs and reasons


def test_a_job_on_a_gpu_that_it_was_not_given(world, monkeypatch):
    """Its script sets CUDA_VISIBLE_DEVICES itself: there it is as anybody else is, until it ends."""
    w = world(gpus=2)
    monkeypatch.setattr(nexus, "find_process_user", lambda pid: "ann")
    astray = w.run(w.add(), 100)
    w.machine.processes.start(101, astray)
    used = (nexus.GpuProcess(101, 8192.0),)
    w.machine.shown = [makers.gpu(index, processes=used, memory_used_mib=8192.0) for index in range(2)]
    w.probe()
    assert [gpu.processes[0].job_id for gpu in w.service.gpu_watch.gpus] == [astray, None]
    then = w.add()
    w.turn()
    assert any("computes on GPU 1, which it was not given" in note for note in w.job(astray).current.notes)
    assert w.job(then).status == "pending"
    assert "GPU 1 is in use by ann (pid 101 python, 8GB)" in w.api(then)["waiting_for"]
    del w.machine.processes.alive[101]
    w.machine.processes.owner_of = lambda pid: astray           # it has gone, and nvidia-smi still shows it
    w.probe()
    w.turn()
    assert w.job(then).current.gpu_indices == (1,)


# Leases that cannot be taken are no fault of the job's


def test_a_lease_is_given_up_when_its_runner_says_that_it_has_it(world):
    """Its claim, which comes before, does not say so."""
    w = world(gpus=1)
    w.machine.leases = BrokenLeases()
    w.machine.leases.error = None
    job_id = w.add()
    w.turn()
    w.claim(job_id, 100, is_said=False)
    w.turn(seconds=10)
    assert w.job(job_id).current.pid == 100 and list(w.machine.leases.held) == [job_id]
    w.service.observer.lease_backoff.fail(w.clock.monotonic(), nexus.NexusError("unavailable", "it is held"))
    w.turn(f"start {job_id} 1 100 1000 1000")
    assert not w.machine.leases.held and w.service.observer.find_lease_error() is None


def test_leases_that_cannot_be_looked_at(world):
    """No GPU is given out before they could be, at the next look and not later; who had which stays known."""
    w = world(gpus=2)
    leases = w.machine.leases = BrokenLeases()
    leases.find_holders = lambda uuids, used: {"GPU-1": "bob"}
    w.probe()

    def refuse(uuids, used):
        raise leases.error

    leases.find_holders = refuse
    job_id = w.add(gpus=2)
    for _ in range(100):
        w.probe()
        w.turn(seconds=5)
    assert w.job(job_id).attempt == 0 and "not a folder" in w.api(job_id)["waiting_for"]
    assert w.service.gpu_watch.gpus[1].lease_holder == "bob"
    assert [check["reading"] for check in w.service.health.check()["checks"] if not check["is_ok"]] == [
        "/tmp/nexus-leases is not a folder; who: fuser"]
    assert len([line for line in w.lines if "not a folder" in line]) == 1
    leases.error, leases.find_holders = None, lambda uuids, used: {}
    w.probe()
    w.turn()
    assert w.job(job_id).status == "running" and w.service.health.check()["is_healthy"]


def test_a_start_that_the_disk_refuses_never_began(world, monkeypatch):
    w = world(gpus=1)
    job_id = w.add()

    def refuse(handle):
        raise OSError(5, "Input/output error")
    monkeypatch.setattr(w.disk, "fdatasync", refuse)
    w.turn()
    assert w.job(job_id).status == "pending" and not w.machine.children and not os.path.exists(w.layout.job_folder(job_id))
    monkeypatch.undo()
    w.turn(seconds=2)
    assert (w.job(job_id).status, w.job(job_id).attempt) == ("running", 1)


def test_a_disk_that_fills_after_a_launch_ends_no_job(world, monkeypatch):
    """What could not be noted of a job that runs is no fault of the job's."""
    w = world()
    job_id = w.add()
    launch = w.machine.launch

    def launch_and_fill(*given):
        launch(*given)
        monkeypatch.setattr(w.store.journal, "append", refuse_to_write)

    def refuse_to_write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(w.machine, "launch", launch_and_fill)
    w.turn()
    assert w.machine.launched == [(job_id, 1)] and job_id not in w.service.outcomes.unrecorded
    assert w.job(job_id).status == "running" and not w.service.failure_count


def test_a_job_begins_when_it_is_to(world):
    w = world()
    later, now = w.add(gpus=0, begin="+2h"), w.add(gpus=0)
    w.turn()
    assert (w.job(later).status, w.job(now).status) == ("pending", "running")
    assert w.job(later).begin_at == w.clock.wall + 7200 and w.service.find_wait_s() <= 7200
    w.turn(seconds=7199)
    assert w.job(later).status == "pending" and w.api(later)["waiting_for"] == "begins in 1s, as asked"
    w.turn(seconds=1.5)
    assert w.job(later).status == "running"


def test_a_launch_that_comes_to_something_later_and_costs_no_retry(world):
    w = world(launch_attempts=2)
    w.machine.refusal = OSError(71, "Protocol error", "/logs")
    job_id = w.add(retries=1)
    w.turn()
    w.turn()
    assert "attempt 1 failed (launch: cannot start it with /logs" in w.api(job_id)["waiting_for"]
    w.machine.refusal = None
    w.turn(seconds=6)
    fail(w, job_id, 100, 1)
    assert w.job(job_id).status == "pending", "its own retry is left"
    w.turn(seconds=6)
    fail(w, job_id, 101, 2)
    assert (w.job(job_id).status, w.job(job_id).current.exit_code, w.job(job_id).attempt) == ("failed", 2, 3)


AWAITED = [  # reason, what becomes of the process that a job comes after, whether the job starts
    ("it goes on", lambda w: None, False), ("also while the service ends", lambda w: w.crash(), False),
    ("it has ended", lambda w: w.machine.processes.alive.pop(4242), True),
    ("its pid is another's", lambda w: w.machine.processes.start(4242, started=7), True),
    ("so it is after a boot", lambda w: w.crash(is_reboot=True) or w.machine.processes.start(4242), True),
]


@pytest.mark.parametrize("reason, happen, is_over", AWAITED, ids=[case[0] for case in AWAITED])
def test_a_job_starts_when_a_process_has_ended(world, reason, happen, is_over):
    w = world(gpus=0)
    w.machine.processes.start(4242)
    job_id = w.add(gpus=0, after_pid=4242)
    w.turn()
    assert w.job(job_id).status == "pending" and "4242" in w.api(job_id)["waiting_for"]
    happen(w)
    w.turn(seconds=2)
    assert w.job(job_id).status == ("running" if is_over else "pending")
    assert is_over or (w.service.editor.edit(nexus.Choice([job_id]), ANN, {"after_pid": None}) and w.job(job_id).after_process is None)


# What a machine is told of a job

def test_a_job_whose_environment_was_lost_does_not_start(world):
    w = world()
    job = w.job(w.add())
    with pytest.raises(nexus.NexusError, match="its environment was lost with a damaged state file") as refused:
        w.service.starter.make_order(job, None)
    assert refused.value.kind == "not_found"


def test_a_node_is_told_of_a_job_as_it_is_there(world, monkeypatch):
    """Its snapshot, which is sent once, and its directory in that; the UUIDs of its cards; of its attempts the present one."""
    w, pushed = world(gpus=0), []
    monkeypatch.setattr(nexus, "push_snapshot", lambda *given: pushed.append(given[:4]) or f"/far/{len(pushed)}")
    node = types.SimpleNamespace(name="n1", trees={}, ssh="ssh")
    ran = makers.running(cwd="/r/sub", snapshot="a" * 40, snapshot_repo="/r", cpus="0", gpu_uuids=("n1/GPU-7",),
                         attempts=(nexus.Attempt(),))
    for job, cwd, tree in ((ran, "/far/1/sub", "/far/1"), (nexus.replace(ran, cwd="/r"), "/far/1", "/far/1"),
                           (nexus.replace(ran, snapshot="b" * 40, snapshot_repo="/s", cwd="/s/t"), "/far/2/t", "/far/2"),
                           (nexus.replace(ran, snapshot=None, snapshot_repo=None), "/r/sub", None),
                           (nexus.replace(ran, snapshot=None, snapshot_repo=None, cwd=os.path.expanduser("~")), "", None)):
        there = w.service.starter.make_node_order(node, job, {}).job
        assert (there.cwd, there.snapshot_repo, there.cpus, there.status_history) == (cwd, tree, None, ())
        assert [(one.number, one.gpu_uuids) for one in there.attempts] == [(2, ("GPU-7",))]
    assert [(ssh, repo, snapshot) for ssh, repo, snapshot, _ in pushed] == [("ssh", "/r", "a" * 40), ("ssh", "/s", "b" * 40)]
    assert len({name for *_, name in pushed}) == 2, "each repository has its place there"


def test_a_node_gets_no_variables_with_a_script_that_was_sent(world):
    """Whoever sent it gave none: they would be this service's."""
    w = world()
    job, node = w.job(w.add()), types.SimpleNamespace(name="n1", trees={})
    os.makedirs(w.layout.code_folder)
    pathlib.Path(w.layout.code_file("c0de")).write_bytes(b"print()\n")
    for code, variables, content in ((None, {"A": "1"}, None), ("c0de", {}, "print()\n")):
        order = w.service.starter.make_node_order(node, nexus.begin_attempt(nexus.replace(job, code=code)), {"A": "1"})
        assert (dict(order.variables), order.code) == (variables, content)

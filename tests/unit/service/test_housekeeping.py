"""What is forgotten, with its files and its usage; what somebody edits in state.json."""

import json
import os
import pathlib

import makers
import pytest
from turns import ANN, edit, look_for_edit

import nexus

# History


def end_all(w, ids, first_pid=100):
    """Let jobs end, in this order."""
    w.turn()
    for number, job_id in enumerate(sorted(ids)):
        w.claim(job_id, first_pid + number)
    for job_id in ids:
        (w.folder_of(job_id) / "stdout.log").write_text("said\n")
        w.end(job_id)
        w.clock.pass_(1)
    w.turn()


def test_history_is_trimmed(world):
    """With its logs; what the jobs themselves made stays."""
    w = world(gpus=0, history_limit=3, cpu_slots=10)
    jobs = [w.add("true", gpus=0) for _ in range(6)]
    made = w.folder_of(jobs[1]) / "files/out/model.pt"
    made.parent.mkdir(parents=True)
    made.write_text("a week of work")
    end_all(w, [jobs[number] for number in (4, 1, 0, 5, 2, 3)])
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text("a week of work")
    w.service.housekeeping.trim_history()
    kept = nexus.list_finished(w.store.state)
    assert [job.id for job in kept] == [jobs[5], jobs[2], jobs[3]], "those that ended last"
    assert sorted(path.name for path in w.folder_of("x").parent.iterdir() if ".old-" not in path.name) == sorted(
        f"job_{job_id}" for job_id in (jobs[1], jobs[2], jobs[3], jobs[5]))
    assert os.listdir(w.folder_of(jobs[1])) == ["files"] and made.read_text() == "a week of work"
    assert w.lines[-1] == f"Trimmed 3 jobs beyond history_limit = 3, with their logs: {jobs[4]}, {jobs[1]}, {jobs[0]}"
    w.service.housekeeping.trim_history()
    assert sum("Trimmed" in line for line in w.lines) == 1


def test_usage_of_what_was_trimmed_ages(world):
    """Also when nothing else happens, and after a crash."""
    w = world(gpus=0, history_limit=1, cpu_slots=10)
    end_all(w, [w.add("true", gpus=0) for _ in range(3)])
    w.service.housekeeping.trim_history()
    seq, periods = w.store.state.seq, []
    for days in (0, 59, 3, 300, 100):
        w.clock.pass_(days * 86400)
        w.service.housekeeping.trim_history()
        periods += sorted({len(row.period) for row in w.store.state.usage.values()})
        w.crash()
    assert periods == [10, 10, 7, 7] and not w.store.state.usage
    assert w.store.state.seq == seq + 2, "it is written when something changes"


def test_what_a_job_made_stays_when_its_id_comes_again(world):
    w = world(gpus=0, history_limit=1, cpu_slots=10)
    first, second = (w.add("true", gpus=0) for _ in range(2))
    end_all(w, [first, second])
    fill(w.folder_of(first) / "work/model.pt")
    w.service.housekeeping.trim_history()
    again = w.add("true", gpus=0)
    assert again == first
    w.turn()
    kept, = w.folder_of(first).parent.glob(f"job_{first}.old-*")
    assert (kept / "work/model.pt").exists() and not (w.folder_of(first) / "work").exists()
    assert any(str(kept) in line for line in w.lines)


def test_jobs_whose_ids_differ_by_case_alone_share_no_folder(world, monkeypatch):
    """An older nexus made such ids.  Here a link stands for a file system that takes both names for one."""
    w = world(gpus=0, cpu_slots=10)
    ids = iter(["cNY", "CNY"])
    monkeypatch.setattr(w.clock, "new_job_id", lambda *_: next(ids))
    first = w.add("true", gpus=0)
    w.run(first, 77)
    w.folder_of("CNY").symlink_to(w.folder_of(first))
    second = w.add("true", gpus=0)
    w.turn()
    w.turn()
    ended = w.job(second)
    assert (ended.status, ended.current.cause) == ("failed", "launch") and "job cNY's" in ended.current.cause_line
    assert w.job(first).status == "running" and (w.folder_of(first) / "attempt-1").exists()


def fill(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


def test_a_snapshot_goes_with_the_last_job_that_has_it(world, monkeypatch):
    w = world(gpus=0, history_limit=1)
    released = []
    monkeypatch.setattr(nexus, "release_snapshot", lambda repository, commit, environ: released.append((repository, commit)))
    of = {"snapshot": "a" * 40, "snapshot_repo": "/repo", "cwd": "/repo/sub", "gpus": 0}
    for job_id in [w.add("true", **of), w.add("true", **of), w.add("true", gpus=0)]:
        w.service.cancellation.cancel(nexus.Choice([job_id], ("pending",)), ANN)
        w.service.housekeeping.trim_history()
        assert released == [] or len(w.store.state.jobs) == 1
    assert released == [("/repo", "a" * 40)]

def test_a_script_that_was_sent_goes_with_the_last_job_that_has_it(world):
    w = world(gpus=0, history_limit=1)
    path, keep = pathlib.Path(w.layout.code_file("c0de")), w.service.housekeeping.keep_code
    with keep("c0de", b"print()"):
        assert path.read_bytes() == b"print()"
    assert not path.exists(), "no job was added"
    with keep("c0de", b"print()"):
        ids = [w.add("true", gpus=0) for _ in range(3)]
        w.store.update(lambda state: [nexus.change_job(state.jobs[job_id], code="c0de") for job_id in ids[:2]])
    for job_id in ids:
        assert path.exists()
        w.service.cancellation.cancel(nexus.Choice([job_id], ("pending",)), ANN)
        w.service.housekeeping.trim_history()
    assert not path.exists() and list(w.store.state.jobs) == ids[2:]


EDITS = [  # reason, what is written, (paused, paused GPUs) then
    ("paused, and nothing else is taken over", lambda body: {**body, "paused": True, "jobs": [], "seq": 9999, "next_number": 0,
                                                             "environments": {}, "groups": []}, (True, [])),
    ("by uuid and index, and twice", lambda body: {**body, "paused": True, "paused_gpus": ["1", 1, "GPU-1", 0]}, (True, [1, 0])),
    ("laid out anew", lambda body: json.dumps(body, indent=4), (False, [])), ("deleted", lambda body: None, (False, [])),
    ("neither", lambda body: {**body, "paused": "yes", "paused_gpus": "0"}, (False, [])),
    ("odd items", lambda body: {**body, "paused_gpus": [None, {}, 1]}, (False, [1])), ("an empty object", lambda body: {}, (False, [])),
]


@pytest.mark.parametrize("reason, act, wanted", EDITS, ids=[case[0] for case in EDITS])
def test_paused_may_be_edited(world, reason, act, wanted):
    w = world(gpus=2)
    job_id = w.run(w.add(), 100)
    waits = w.add(gpus=2)
    before = (dict(w.store.state.environments), w.store.state.next_number)
    assert edit(w, act)
    w.turn()
    status = w.service.status.describe()
    assert (status["is_paused"], [gpu["index"] for gpu in status["gpu_status"] if gpu["is_paused"]]) == (wanted[0], sorted(wanted[1]))
    assert (dict(w.store.state.environments), w.store.state.next_number) == before
    assert any("Taken over from state.json" in line for line in w.lines) == (wanted != (False, [])), "what changes something is told"
    assert w.job(job_id).current.pid == 100 and w.job(waits).status == "pending"
    body = json.loads(pathlib.Path(w.layout.state_file).read_text())
    assert len(body["jobs"]) == 2 and body["paused"] is wanted[0] and body["paused_gpus"] == [f"GPU-{index}" for index in wanted[1]]
    assert not look_for_edit(w), "what the service wrote itself is no edit"
    w.crash()
    assert w.service.status.describe()["is_paused"] is wanted[0] and w.job(job_id).current.pid == 100


def test_only_what_was_edited_is_taken_over(world):
    """The file is older than the state: what it says of the rest was true then."""
    w = world(gpus=2)
    w.store.save_checkpoint()
    w.service.editor.set_paused(True, "ann")
    path = pathlib.Path(w.layout.state_file)
    path.write_text(json.dumps({**json.loads(path.read_text()), "paused_gpus": [0]}))
    w.service.housekeeping.keep_state()
    assert (w.store.state.paused, w.store.state.paused_gpus) == (True, ("GPU-0",))


def test_what_a_full_disk_refuses_is_written_when_there_is_room(world, monkeypatch):
    """A file of the service, in its order, and state.json."""
    w, written, errors = world(gpus=0), [], [nexus.NexusError("unavailable", f"no room for {name}") for name in ("a", "state.json")]
    keep = w.service.housekeeping.keep_state

    def save():
        if errors:
            raise errors[1]
        written.append("state.json")

    def write(name):
        if errors and name == "a":
            raise errors[0]
        written.append(name)

    monkeypatch.setattr(w.store, "save_checkpoint", save)
    for name in "ab":
        w.service.housekeeping.write_soon(lambda name=name: write(name))
    w.store.checkpoint_wanted.set()
    assert (keep(), keep(), written) == (10.0, 10.0, ["b"]) and not w.service.health.check()["is_healthy"]
    assert w.lines.count("no room for a: it is tried again") == 1
    errors.clear()
    assert (keep(), keep(), written) == (1.0, 1.0, ["b", "a", "state.json"]) and w.service.health.check()["is_healthy"]


def test_an_edit_that_stays_broken_is_written_anew(world):
    w = world(gpus=2)
    job_id = w.add()
    assert not edit(w, lambda body: "{") and not look_for_edit(w)
    assert look_for_edit(w) and any("is no JSON" in line for line in w.lines)
    w.store.save_checkpoint()
    assert json.loads(pathlib.Path(w.layout.state_file).read_text())["jobs"].keys() == {job_id}
    w.crash()
    assert w.job(job_id)


def test_a_gpu_that_is_paused_while_a_reading_is_taken_in_stays_paused(world):
    w = world(gpus=2)
    update = w.store.update

    def pause_before(*arguments):
        w.store.update = update
        w.service.gpu_watch.set_gpu_paused("1", True, "ann")
        return update(*arguments)

    w.machine.shown = [makers.gpu(index) for index in range(3)]
    w.store.update = pause_before
    w.probe()
    assert w.store.update == update and w.store.state.paused_gpus == ("GPU-1",)


def test_an_edit_while_no_service_runs(world):
    w = world(gpus=2)
    w.store.save_checkpoint()
    path = pathlib.Path(w.layout.state_file)
    path.write_text(json.dumps({**json.loads(path.read_text()), "paused": True, "paused_gpus": [1]}))
    w.crash()
    assert (w.store.state.paused, w.store.state.paused_gpus) == (True, ("GPU-1",))

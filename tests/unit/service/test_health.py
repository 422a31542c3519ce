"""What `nexus health` looks at."""

import inspect
import re
import shutil
import types

import makers
import pytest

import nexus

ERROR = nexus.NexusError("unavailable", "it cannot be written", "make room")


def set_gpus(w, *gpus):
    w.machine.shown = list(gpus) or ERROR
    w.probe()


def has_damage(w):
    w.store.state.put(nexus.Put("facts", "damage", "a line of journal.jsonl"))


def set_leases(w):
    w.machine.leases = types.SimpleNamespace(folder="/run/lock/nexus-leases")
    w.service.observer.find_lease_error = lambda: ERROR


def set_cluster(w):
    w.service.cluster = types.SimpleNamespace(find_error=lambda: ERROR, took_s=0.1)


def set_jobs_file(w, **facts):
    w.service.jobs_file = types.SimpleNamespace(**{"path": "/jobs.csv", "error": "", "faults": [], "began_at": float("inf"), **facts})


def refuse_disk(w):
    w.disk.statvfs = lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    w.service.health.look_at_disks()


def remove_logs(w):
    """It is made again at the next start."""
    shutil.rmtree(w.layout.log_dir)
    w.service.health.look_at_disks()


def fill_disk(w, blocks=100, size=10**8):
    w.disk.statvfs = lambda path: types.SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_blocks=size)
    w.service.health.look_at_disks()


def have_logs(w):
    for out in (3 * 2**20, 5000, 0):
        job_id = w.add("true", gpus=0)
        w.turn()
        (w.folder_of(job_id) / "stdout.log").write_bytes(b"x" * out)
    w.service.disk_use.measure()
    w.service.health.look_at_disks()


CHECKS = [  # reason, what happens, the name of the check, whether it is ok, part of its reading, whether `nexus` says it too
    ("the loop stands still", lambda w: w.clock.pass_(31), "scheduler", False, "last turn 31", False),
    ("a fault of nexus", lambda w: w.service.fail("testing", ValueError("y")), "failures", False, "1 internal error", False),
    ("a lost GPU", lambda w: set_gpus(w, makers.gpu(0), makers.gpu(1, fault="GPU is lost")), "GPUs", False, "GPU 1: GPU is lost", False),
    ("no GPU can be read", set_gpus, "GPUs", False, "it cannot be written", True),
    ("a GPU that is not there any more", lambda w: set_gpus(w, makers.gpu(0, fault=w.machine.not_shown)), "GPUs", False,
     "if it was taken out: nexus restart", False),
    ("no bash", lambda w: setattr(w.machine, "has_bash", lambda: False), "bash", False, "bash", True),
    ("a folder of PATH hangs", lambda w: None, "folders", False, "/mnt/gone does not answer", True),
    ("the leases cannot be used", set_leases, "GPU leases", False, "it cannot be written; make room", False),
    ("its address has gone", lambda w: setattr(w.service, "lost_host", "10.0.0.5"), "address", False, "10.0.0.5 is no address", True),
    ("its port was taken", lambda w: setattr(w.service, "former_port", 1), "port", True, "port 1, where nexus was, is free now", True),
    ("another Python runs it", lambda w: setattr(w.service, "former_python", "/opt/py"), "Python", True, "/opt/py cannot any more", True),
    ("what is left of its starter", lambda w: setattr(w.service, "inherited", "no_new_privs"), "starter", True, "no_new_privs", False),
    ("it runs as it was", lambda w: setattr(w.service, "changed_files", "nexus.py"), "copies", True, "nexus.py changed meanwhile", True),
    ("a full disk refuses the state", lambda w: setattr(w.store, "last_error", ERROR), "state", False, "it cannot be written", True),
    ("or another file", lambda w: setattr(w.service.housekeeping, "write_error", ERROR), "files", False, "it cannot be written", True),
    ("part of the state was damaged", lambda w: setattr(w.store, "list_damaged", lambda: ["state.json.damaged-1"]), "lost", False,
     "state.json.damaged-1", False),
    ("and so the queue is paused", has_damage, "damage", False, "whole: a line of journal.jsonl; nexus resume goes on", True),
    ("Slurm does not answer", set_cluster, "Slurm", False, "it cannot be written", True),
    ("the jobs file cannot be read", lambda w: set_jobs_file(w, error="x", faults=["it is no file"]), "jobs file", False,
     "it is no file", True),
    ("a line of it is wrong", lambda w: set_jobs_file(w, faults=["line 7 is wrong"]), "jobs file", True, "line 7 is wrong", True),
    ("it hangs", lambda w: set_jobs_file(w, began_at=w.clock.monotonic() - 31), "jobs file", False, "it has not answered for 31s", True),
    ("a disk hangs", lambda w: w.clock.pass_(31), "disks", False, "they have not answered for 31s", False),
    ("a disk is full", fill_disk, "state disk", False, "0MB free", True),
    ("a disk has little room", lambda w: fill_disk(w, 1000 * 256), "state disk", True, "1000MB free, which is little", True),
    ("a small disk has enough", lambda w: fill_disk(w, 300 * 256, 20000 * 256), "state disk", True, "300MB free", False),
    ("a large one too", lambda w: fill_disk(w, 1030 * 256), "state disk", True, "1GB free", False),
    ("a write failed", lambda w: w.store.note_failed_write(ERROR), "writes", True, "0s ago: it cannot be written", True),
    ("a folder was removed", remove_logs, "log disk", True, "free", False),
    ("a disk has some room", lambda w: fill_disk(w, 3 * 256), "log disk", True, "3MB free", False),
    ("how large the logs are", have_logs, "logs", True, "3MB of 3 jobs, the largest: ", False),
    ("a disk cannot be used", refuse_disk, "log disk", False, "Input/output error", True),
]


@pytest.mark.parametrize("reason, happen, name, is_ok, reading, is_hint", CHECKS, ids=[case[0] for case in CHECKS])
def test_a_check_says_what_it_looks_at(world, monkeypatch, reason, happen, name, is_ok, reading, is_hint):
    w = world()
    w.turn()
    others = [check for check in w.service.health.list_checks() if check.name == name]
    assert all(check.is_ok and check.reading != reading for check in others), "before that it was well"
    assert w.service.health.check()["is_healthy"]
    monkeypatch.setattr(nexus, "list_hung_folders", lambda: ["/mnt/gone"] if name == "folders" else [])
    happen(w)
    checks = w.service.health.list_checks()
    [found] = [check for check in checks if check.name == name]
    assert found.is_ok == is_ok and reading in found.reading, found
    assert w.service.health.check()["is_healthy"] == all(check.is_ok for check in checks) == is_ok
    assert bool(found.hint) == is_hint and (found.hint in w.service.health.list_hints(checks)) == is_hint


def test_what_is_well_is_told_in_six_rows(world):
    """The others are there only when there is something to tell."""
    checks = world().service.health.list_checks()
    assert [check.name for check in checks] == ["scheduler", "failures", "GPUs", "state", "state disk", "log disk"]


def test_each_check_has_a_row():
    """Nodes' are in tests/unit/hosting/test_pool.py."""
    names = re.findall(r'yield \(?"([\w ]+)"|\("(\w+ disk)", folder', inspect.getsource(nexus.Health))
    names = {first or second for first, second in names} | {"state disk", "log disk", "logs"}
    assert names == {case[2] for case in CHECKS}


def test_a_write_that_failed_is_told_for_an_hour(world):
    w = world(gpus=0)
    w.add("true", gpus=0)
    refuse, w.store.journal.append = w.store.journal.append, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(nexus.NexusError):
        w.add("false", gpus=0)
    assert "writes" not in [row.name for row in w.service.health.list_checks()], "as long as it fails, that is said"
    w.store.journal.append = refuse
    w.add("false", gpus=0)
    w.clock.pass_(600)
    hint = [hint for hint in w.service.health.list_hints(w.service.health.list_checks()) if "a write failed 10m ago, and may again" in hint]
    assert hint and "No space left" in hint[0]
    w.clock.pass_(3001)
    assert "writes" not in [row.name for row in w.service.health.list_checks()]


def test_a_disk_that_answers_again_is_well(world):
    w = world()
    w.clock.pass_(31)
    assert nexus.Check("disks", False, "they have not answered for 31s", "") in w.service.health.list_checks()
    w.service.health.look_at_disks()
    assert "disks" not in [row.name for row in w.service.health.list_checks()]

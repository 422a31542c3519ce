"""Processes, and whose they are."""

import os
import signal
import subprocess

import psutil
import pytest

import nexus


def test_send_signals_this_process_and_no_other():
    processes = nexus.Processes()
    with subprocess.Popen(["sleep", "600"]) as child:
        process = processes.find(child.pid)
        processes.send(nexus.replace(process, started=process.started - 1), signal.SIGKILL)     # the pid was reused
        assert child.poll() is None and processes.is_alive(child.pid, process.started)
        processes.send(process, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    processes.send(process, signal.SIGKILL)             # it has gone: nobody is hit, nothing is raised


@pytest.mark.parametrize("own, other, is_locked, is_elsewhere", [
    ("gpu1", "gpu1", True, False), ("gpu1", "gpu2", False, True), ("gpu1 (a container)", "gpu2", False, True),
    ("a (a container)", "b (a container)", True, True), ("a (a container)", "b (a container)", False, False),
])
def test_what_another_machine_or_container_may_use(monkeypatch, tmp_path, own, other, is_locked, is_elsewhere):
    import fcntl
    monkeypatch.setattr(nexus, "read_machine", lambda: own)
    with open(tmp_path / "lock", "w") as file:
        if is_locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        assert nexus.is_elsewhere(nexus.DISK, other, str(tmp_path / "lock")) == is_elsewhere

HERE = {"boot_id": "b", "pid_namespace": "pid:[1]", "machine": "gpu1"}


@pytest.mark.parametrize("reason, own, changed, is_it", [
    ("as it was", {}, {}, True), ("another name", {}, {"machine": "gpu2"}, True),
    ("another boot and name", {}, {"machine": "gpu2", "boot_id": "c"}, False), ("another boot", {}, {"boot_id": "c"}, True),
    ("another container of the same machine", {}, {"machine": "gpu2", "pid_namespace": "pid:[2]"}, False),
    ("written by an older nexus", {}, {"pid_namespace": None, "machine": "gpu2"}, False),
    ("no namespaces here", {"pid_namespace": ""}, {"pid_namespace": "", "machine": "gpu2"}, False),
], ids=lambda fact: fact if isinstance(fact, str) else "")
def test_a_boot_and_a_pid_namespace_prove_which_machine_it_is(monkeypatch, reason, own, changed, is_it):
    facts = {**HERE, **own}
    for name, fact in (("read_boot_id", "boot_id"), ("find_pid_namespace", "pid_namespace"), ("read_machine", "machine")):
        monkeypatch.setattr(nexus, name, lambda fact=fact: facts[fact])
    assert nexus.is_this_machine({**HERE, **changed}) == is_it


# What processes and the host take


def test_memory_that_may_not_be_looked_at_counts_whole(monkeypatch):
    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    assert nexus.measure_memory(psutil, [nexus.Processes().find(os.getpid())]) > 5

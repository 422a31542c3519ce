"""The end of a job's processes: who gets which signal when, and what is told of those that no signal ends."""

import makers
import pytest
from turns import ANN

import nexus


def test_the_first_signal_goes_to_programs_and_sigkill_to_all(on):
    """To each once; what a program has started gets it when that has ended, and what is left SIGKILL after the grace time."""
    on.put(200, name="bash")
    on.put(201, parent=200)
    on.put(202, parent=201)
    on.machine.processes.deaf = {200, 201, 202}
    assert on.stop() == [(201, 15)]
    assert on.look(1) == on.look(4) == []
    del on.machine.processes.alive[201]
    assert sorted(on.look(1)) == [(200, 15), (202, 15)]
    assert on.look(3.5) == [] and sorted(on.look(0.6)) == [(200, 9), (202, 9)]
    assert on.machine.processes.alive.keys() == {100}, "its job.sh writes the result"


@pytest.mark.parametrize("signal, number", [(None, 15), ("INT", 2), ("USR1", 10)])
def test_the_first_signal_is_the_one_that_was_asked_for(on, signal, number):
    on.put(200)
    assert on.stop(signal) == [(200, number)]


@pytest.mark.parametrize("has_trap", [True, False])
def test_the_shell_of_a_terminal_gets_it_with_its_programs_if_it_has_a_trap(on, has_trap):
    on.put(200, name="bash")                                        # its session is its own
    on.put(201, parent=200, session=200)
    on.machine.processes.deaf = {200, 201}
    on.machine.processes.find_catchers = lambda processes, number: {process.pid for process in processes if has_trap}
    assert sorted(on.stop()) == [(200, 15)] * has_trap + [(201, 15)]


RUNNERS = [  # reason, what is otherwise of its job.sh, what it gets once it is left alone, and after the grace time and two seconds
    ("it is slow", {}, [], [(100, 9), (100, 18)]), ("it is stopped", {"state": "T"}, [(100, 18)], [(100, 9), (100, 18), (100, 18)]),
    ("its pid is another's by now", {"started": 7}, [], []),
]


@pytest.mark.parametrize("reason, fields, first, then", RUNNERS, ids=[case[0] for case in RUNNERS])
def test_a_job_sh_that_is_left_alone_has_time_to_write_the_result(on, monkeypatch, reason, fields, first, then):
    monkeypatch.setattr(nexus.HostedJob, "look_at_files", lambda *_: None)
    process, owner = on.machine.processes.alive[100]
    on.machine.processes.alive[100] = nexus.replace(process, **fields), owner
    sent = on.machine.processes.signals
    on.service.cancellation.cancel(nexus.Choice([on.job_id]), ANN)
    on.turn()
    on.turn(seconds=10 + 1.5)
    assert sent == first * 2
    on.turn(seconds=0.6)
    assert sent == first * 2 + then


def test_what_no_signal_ends_is_told_once(on):
    for pid in (200, 201, 202):
        on.put(pid)
    on.machine.processes.send = lambda process, number: None
    on.machine.processes.describe_stuck = lambda process: f"SIGKILL did not end {process.pid}" if process.pid == 200 else None
    on.stop()
    on.turn(seconds=10 + 1.9)
    assert on.job(on.job_id).current.notes == ()
    for _ in range(3):
        on.turn(seconds=1)
    assert on.job(on.job_id).current.notes == (f"SIGKILL did not end 200; {nexus.STUCK_HINT}",)
    on.machine.processes.describe_stuck = lambda process: f"SIGKILL did not end {process.pid}"
    on.turn(seconds=1)
    assert [note[:23] for note in on.job(on.job_id).current.notes] == [
        f"SIGKILL did not end {pid}" for pid in (200, 201, 202)]
    assert sum("SIGKILL did not end" in line for line in on.lines) == 3


GOING_ON = [  # reason, the session of what a command has left, seconds of CPU that it uses each second; what it gets then
    ("it has left the session", 200, 1.0, 1, [(200, 15)]), ("it works on", 100, 0.2, 30, []), ("it idles", 100, 0.05, 30, [(200, 15)]),
    ("not for long", 100, 0.05, 15, []), ("it idles, and takes no signal", 100, 0.05, 40, [(200, 15), (200, 9)]),
]


@pytest.mark.parametrize("reason, session, load, seconds, sent", GOING_ON, ids=[case[0] for case in GOING_ON])
def test_what_goes_on_after_its_command(on, reason, session, load, seconds, sent):
    """In its session it keeps the job, unless it idles; what is ended is told, and is no failure of the job."""
    on.put(200, session=session)
    on.machine.processes.deaf = {200} if len(sent) > 1 else set()
    on.turn(f"end {on.job_id} 1 0 250")
    on.write_result(on.job_id, 0, goes_on=True)
    for second in range(seconds):
        if 200 in on.machine.processes.alive:
            on.machine.processes.take(200, 1.0, cpu_s=load * second)
        on.turn(seconds=1)
    assert [one for one in on.machine.processes.signals if one[1] != 18] == sent
    job = on.job(on.job_id)
    assert (job.status, job.current.processes_left) == (("completed", None) if sent else ("running", 1))
    assert job.current.notes == (("ended after its command: python (pid 200)",) if sent else ())
    assert (job.current.runtime_seconds == 2.5) == (session == 200), "where others of its session went on, it ran longer than its command"
    if not sent:
        del on.machine.processes.alive[200], on.machine.processes.alive[100]
        on.turn(f"end {on.job_id} 1 0 3100"), on.turn(seconds=3)
        assert (on.job(on.job_id).status, on.job(on.job_id).current.runtime_seconds) == ("completed", 31.0), "the whole"


def test_what_leaves_the_session_at_once_does_not_prolong_the_job(on):
    """As `setsid x &` does: at the first look it may be in the session yet."""
    on.put(200, session=100)
    on.turn(f"end {on.job_id} 1 0 250")
    assert on.job(on.job_id).current.processes_left == 1
    on.put(200, session=200)
    on.turn(seconds=3), on.turn(seconds=3)
    ended = on.job(on.job_id)
    assert (ended.status, ended.current.runtime_seconds, ended.current.processes_left) == ("completed", 2.5, None)


def test_what_computes_on_a_gpu_does_not_idle(on):
    on.put(200, session=100)
    on.service.observer.gpus = (makers.gpu(0, processes=(makers.ours(on.job_id, 1, pid=200),)),)
    on.turn(f"end {on.job_id} 1 0 250")
    for _ in range(30):
        on.turn(seconds=1)
    assert on.job(on.job_id).current.processes_left == 1 and not on.machine.processes.signals


LOOKS = [  # seconds since the first signal, those until its processes are looked at again
    (0, 0.02), (1, 0.1), (3, 0.3), (9, 0.5)]


def test_processes_that_are_ended_are_looked_at_ever_less_often(on):
    on.put(200)
    on.machine.processes.deaf = {200}
    assert on.service.job_host.find_next_look_s() == float("inf"), "none is ended"
    on.stop()
    at = 0
    for age_s, next_s in LOOKS:
        on.turn(seconds=age_s - at)
        at = age_s
        assert on.service.job_host.find_next_look_s() == pytest.approx(next_s)
    on.machine.processes.alive.pop(200)
    on.end(on.job_id, 143)
    assert on.service.job_host.find_next_look_s() == float("inf")

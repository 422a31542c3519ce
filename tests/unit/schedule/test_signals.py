"""Which processes of a job get a signal."""

import pytest

import nexus


def process(pid, parent, name="python", session=10, cpu_ticks=0):
    return nexus.Process(pid, 100 + pid, parent, session, "S", 1, name=name, cpu_ticks=cpu_ticks)


LEADER = process(11, 10, "bash", session=11)
SH, TRAIN, WORKER = process(11, 10, "sh"), process(12, 11), process(13, 12)
SIGNALED = [  # reason, its processes, pids at the first look (None: these), told before, readers of pipes, who gets the signal now
    ("a program, not its children", [process(12, 10), WORKER], None, (), (), [12]),
    ("a shell, and the program behind it", [SH, TRAIN, WORKER], None, (), (), [11, 12]),
    ("shells in shells", [SH, process(14, 11, "bash"), process(12, 14), WORKER], None, (), (), [11, 14, 12]),
    ("each branch", [SH, TRAIN, WORKER, process(14, 11), process(15, 14)], None, (), (), [11, 12, 14]),
    ("each once", [SH, TRAIN, WORKER], (11, 12, 13), (11, 12), (), []),
    ("the children of one that has ended", [SH, process(13, 1)], (11, 12, 13), (11, 12), (), [13]),
    ("a wrapper passes it on, or ends with its program", [process(11, 10, "timeout"), TRAIN, WORKER], None, (), (), [12]),
    ("a wrapper without a program", [process(11, 10, "uv")], None, (), (), [11]),
    ("what a trap starts is spared", [SH, process(14, 11, "rsync")], (11, 12, 13), (11, 12), (), []),
    ("until its shell has ended", [process(14, 1, "rsync")], (11, 12, 13), (11, 12), (), [14]),
    ("who reads a pipe, when its writer has ended", [SH, TRAIN, process(14, 11, "tee")], None, (), (14,), [11, 12]),
    ("a terminal's shell, after its programs", [LEADER, TRAIN], None, (), (), [12]),
    ("or alone", [LEADER], (11, 12), (12,), (), [11]),
    ("its trap, at once", [LEADER, TRAIN], None, (), (), [11, 12], (11,)),
]


@pytest.mark.parametrize("reason, members, seen, told, readers, pids, catchers", [(*case, ())[:7] for case in SIGNALED],
                         ids=[case[0] for case in SIGNALED])
def test_choose_signaled(reason, members, seen, told, readers, pids, catchers):
    seen = [one.pid for one in members] if seen is None else seen
    assert [one.pid for one in nexus.choose_signaled(members, seen, told, readers, catchers)] == pids


@pytest.mark.parametrize("name", ["sh", "bash", "dash", "zsh", "fish", "ksh", "ash"])
def test_each_shell_gets_the_signal_with_its_program(name):
    assert nexus.choose_signaled([process(11, 10, name), TRAIN], [11, 12], (), (), ()) == [process(11, 10, name), TRAIN]


@pytest.mark.parametrize("name", ["script", "env", "nice", "time", "timeout", "uv", "conda", "mamba", "micromamba"])
def test_each_wrapper_leaves_the_signal_to_its_program(name):
    assert nexus.choose_signaled([process(11, 10, name), TRAIN], [11, 12], (), (), ()) == [TRAIN]


WARNED = [  # reason, its processes, who handles the signal, who gets it
    ("a trainer, and not torchrun above it", [SH, TRAIN, WORKER], [13], [13]),
    ("a trainer, and not its data loaders", [SH, TRAIN, WORKER], [12, 13], [12]),
    ("each rank", [TRAIN, WORKER, process(14, 12), process(15, 13)], [13, 14, 15], [13, 14]),
    ("a shell's trap", [SH, TRAIN], [11, 12], [11]), ("bash, which handles INT always", [SH, TRAIN], [11, 12], [12], "INT"),
    ("its trap", [SH, TRAIN], [11], [11], "INT"),
    ("conda run", [process(11, 1, "conda"), process(12, 11, "bash"), process(13, 12, "python")], [11, 12, 13], [13], "INT"),
    ("nobody", [SH, TRAIN], [], []),
]


@pytest.mark.parametrize("reason, members, catchers, pids, signal", [(*case, "USR1")[:5] for case in WARNED])
def test_choose_warned(reason, members, catchers, pids, signal):
    assert [one.pid for one in nexus.choose_warned(members, catchers, signal)] == pids


def test_choose_session():
    elsewhere = [process(20, 12, session=20), process(21, 20, session=20)]
    assert nexus.choose_session([TRAIN, *elsewhere, process(30, 1, session=30)], 10) == [TRAIN, *elsewhere]


WORKS = [  # reason, [(time, {pid: CPU ticks of 0.01 s})], whether they idle
    ("not known yet", [(0, {1: 0}), (19, {1: 0})], False), ("idle", [(0, {1: 500}), (20, {1: 500})], True),
    ("a little is idle too", [(0, {1: 0}), (10, {1: 50}), (20, {1: 150})], True),
    ("a tenth of a core", [(0, {1: 0}), (20, {1: 200})], False),
    ("together", [(0, {1: 0, 2: 0}), (20, {1: 100, 2: 100})], False), ("work ended", [(0, {1: 0}), (10, {1: 900}), (30, {1: 901})], True),
    ("only the last 20 s count", [(0, {1: 0}), (30, {1: 0}), (40, {1: 300}), (49, {1: 300})], False),
    ("one that has begun since", [(0, {1: 0}), (10, {1: 0, 2: 250}), (20, {1: 0})], False),
]


@pytest.mark.parametrize("reason, readings, is_idle", WORKS, ids=[case[0] for case in WORKS])
def test_work(reason, readings, is_idle):
    work = nexus.Work()
    for at, ticks in readings:
        work = work.add([process(pid, 1, cpu_ticks=count) for pid, count in ticks.items()], at)
    assert work.is_idle(0.01) == is_idle

"""What starts next, decided from values alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import GB, NOW, config, foreign, gpu, job, mig_slice, ours, put, running, state
from plans import (
    BOTH,
    LONG_AGO,
    MIXED,
    ONE_PROCESS,
    TWO,
    WAITED,
    box,
    box_user,
    failed_attempt,
    handed,
    running_there,
    started,
    there,
    view,
    words,
)
from replay import Replay

import nexus


def verdicts(one, made):
    return [(there.gpu.node, there.gpu.index, why and why.detail)
            for there, why in nexus.list_verdicts(one, made.gpus, config().gpu, NOW)]


def letters(number):
    """An id for a number."""
    return "".join(nexus.ID_LETTERS[number // 49**place % 49] for place in (2, 1, 0))


REST = running("rrr", (1,), expected_time=600)                # it runs on GPU 1 since a minute
PLANS = [  # reason, jobs, GPUs, keys of the configuration, {job id: GPU indices} that start
    ("a free GPU", [job("aaa")], [gpu(0)], {}, {"aaa": (0,)}),
    ("first come, first served", [job("bbb", 2), job("aaa", 1)], [gpu(0)], {}, {"aaa": (0,)}),
    ("priority before age", [job("aaa", 1), job("bbb", 2, priority=0)], [gpu(0)], {}, {"bbb": (0,)}),
    ("the rank before priority: it was moved to the front", [job("aaa", 1, priority=0), job("bbb", queue_key=(-1, 2, 2))],
     [gpu(0)], {}, {"bbb": (0,)}),
    ("a smaller one passes it", [job("aaa", 1, gpus=2), job("bbb", 2)], [gpu(0)], {}, {"bbb": (0,)}),
    ("one that nexus itself has given out", [running("rrr", (0,)), job("aaa", 2)], [gpu(0), gpu(1)], {}, {"aaa": (1,)}),
    ("the running one's GPU got another index: its uuid counts",
     [running("rrr", (0,), gpu_uuids=("GPU-1",)), job("aaa", 2)], [gpu(0), gpu(1)], {}, {"aaa": (0,)}),
    ("shared with others", [job("aaa")], [gpu(0, processes=(foreign(),))], {"share_with_others": True}, {"aaa": (0,)}),
    ("MPS, which stays", [job("aaa")], [gpu(0, memory_used_mib=30.0, processes=(
        foreign(name="nvidia-cuda-mps", memory_mib=30.0),))], {}, {"aaa": (0,)}),
    ("a card for one process gets a whole job", [job("aaa")], [gpu(0, compute_mode=ONE_PROCESS)], {}, {"aaa": (0,)}),
    ("and no share: that waits for another card", [job("aaa", gpus=0.5)], [gpu(0, compute_mode=ONE_PROCESS), gpu(1)], {}, {"aaa": (1,)}),
    ("its mode was changed while a share runs there", [running("rrr", gpus=0.5), job("aaa", 2, gpus=0.5)],
     [gpu(0, compute_mode="Exclusive_Thread"), gpu(1)], {}, {"aaa": (1,)}),
    ("one and a half", [job("aaa", gpus=1.5)], [gpu(0, compute_mode=ONE_PROCESS), gpu(1)], {}, {"aaa": (0, 1)}),
    ("who had too little memory gets all of it", [job("aaa", gpus=0.5, exclusive=True)], [gpu(0, compute_mode=ONE_PROCESS)], {},
     {"aaa": (0,)}),
    ("a share that starves reserves no such card", [running("rrr", (1,)), job("aaa", 2, gpus=0.5, **WAITED), job("bbb", 3)],
     [gpu(0, compute_mode=ONE_PROCESS), gpu(1)], {}, {"bbb": (0,)}),
    ("one that others compute on takes nobody else", [job("aaa")], [gpu(0, compute_mode=ONE_PROCESS, processes=(foreign(),))],
     {"share_with_others": True}, {}),
    ("under MPS its server is the one process", [job("aaa", gpus=0.5), job("bbb", 2, gpus=0.5)],
     [gpu(0, compute_mode=ONE_PROCESS, processes=(foreign(name="nvidia-cuda-mps", memory_mib=30.0),))], {}, {"aaa": (0,), "bbb": (0,)}),
    ("prohibited", [job("aaa"), job("bbb", 2, gpus=0.5)], [gpu(0, compute_mode="Prohibited")], {}, {}),
    ("withheld", [job("aaa"), job("bbb", 2, gpus=0.5)], [gpu(0, is_withheld=True)], {}, {}),
    ("a program that does not count", [job("aaa", gpu_mem_mib=4 * GB)], [gpu(0, processes=(foreign(name="Xorg", memory_mib=30.0),))],
     {"ignore_processes": ["Xorg"]}, {"aaa": (0,)}),
    ("by its path, as nvidia-smi has it", [job("aaa")], [gpu(0, processes=(foreign(name="Xorg"),))],
     {"ignore_processes": ["/usr/lib/xorg/Xorg"]}, {"aaa": (0,)}),
    ("one whose name is unknown counts", [job("aaa")], [gpu(0, processes=(foreign(name=None),))], {"ignore_processes": [""]}, {}),
    ("beside one that does", [job("aaa")], [gpu(0, processes=(foreign(name="Xorg"), foreign(name="python")))],
     {"ignore_processes": ["Xorg"]}, {}),
    ("a long name, of which the kernel keeps the beginning", [job("aaa")], [gpu(0, processes=(foreign(name="gnome-remote-de"),))],
     {"ignore_processes": ["gnome-remote-desktop"]}, {"aaa": (0,)}),
    ("a process of ours that is ending", [job("aaa")], [gpu(0, processes=(foreign(job_id="xxx"),))], {}, {"aaa": (0,)}),
    ("as much as windows take", [job("aaa")], [gpu(0, memory_used_mib=2048)], {}, {"aaa": (0,)}),
    ("that of a job in a container", [running("rrr", gpus=0.5), job("aaa", 2, gpus=0.5)], [gpu(0, memory_used_mib=9000)], {},
     {"aaa": (0,)}),
    ("a threshold of 0 is for GPUs nobody else uses at all", [job("aaa"), job("bbb", 2)],
     [gpu(0, memory_used_mib=1), gpu(1)], {"mem_threshold": 0}, {"aaa": (1,)}),
    ("unknown memory is no obstacle", [job("aaa")], [gpu(0, memory_total_mib=None, memory_used_mib=None)], {},
     {"aaa": (0,)}),
    ("100 % of what the query itself does", [job("aaa")], [gpu(0, utilization=100)], {}, {"aaa": (0,)}),
    ("not among those nexus may use", [job("aaa")], [gpu(0), gpu(1)], {"ids": [1]}, {"aaa": (1,)}),
    ("a CPU job needs no GPU", [job("aaa", gpus=0)], [], {}, {"aaa": ()}),
    ("but a slot", [job("aaa", gpus=0), job("bbb", 2, gpus=0), job("ccc", 3, gpus=0)], [], {"cpu_slots": 2},
     {"aaa": (), "bbb": ()}),
    ("no more than max_running", [job("aaa"), job("bbb", 2), job("ccc", 3, gpus=0)], [gpu(0), gpu(1)],
     {"max_running": 1}, {"aaa": (0,)}),
    ("no more of one user than max_running_per_user; another's may", [running("rrr"), job("aaa", 2), job("bbb", 3, user="bob"),
     job("ccc", 4, user="bob")], [gpu(0), gpu(1), gpu(2)], {"max_running_per_user": 1}, {"bbb": (1,)}),
    ("passed over long enough: the free GPU is kept",
     [running("rrr", (1,)), job("aaa", 2, gpus=2, **WAITED), job("bbb", 3)], [gpu(0), gpu(1)], {}, {}),
    ("passed over not long enough", [running("rrr", (1,)), job("aaa", 2, gpus=2, created_at=NOW - 299),
                                     job("bbb", 3)],
     [gpu(0), gpu(1)], {}, {"bbb": (0,)}),
    ("nothing is kept of those it may not have",
     [running("rrr", (0,)), job("aaa", 2, gpu_ids=(0,), **WAITED), job("bbb", 3)], [gpu(0), gpu(1)], {}, {"bbb": (1,)}),
    ("nor beside a lost GPU", [job("aaa", 1, gpus=2, **WAITED), job("bbb", 2)], [gpu(0), gpu(1, fault="GPU is lost")],
     {}, {"bbb": (0,)}),
    ("what comes after others is not looked at", [running("rrr"), job("aaa", 2, pending_dependencies=("rrr",))], [gpu(0), gpu(1)], {}, {}),
    # shares
    ("two halves", [job("aaa", gpus=0.5), job("bbb", 2, gpus=0.5)], [gpu(0), gpu(1)], {}, {"aaa": (0,), "bbb": (0,)}),
    ("a half beside a running one", [running("rrr", gpus=0.5), job("aaa", 2, gpus=0.5)], [gpu(0)], {}, {"aaa": (0,)}),
    ("not while the GPU is paused", [running("rrr", gpus=0.5), job("aaa", 2, gpus=0.5)], [gpu(0, is_paused=True)], {}, {}),
    ("ten tenths are one", [job(id, number, gpus=0.1) for number, id in enumerate([c * 3 for c in "abcdefghijk"], 1)],
     [gpu(0)], {}, dict.fromkeys([c * 3 for c in "abcdefghij"], (0,))),
    ("where it fits tightest", [running("rrr", (2,), gpus=0.3), running("sss", (1,), gpus=0.6), job("aaa", 3, gpus=0.4)],
     [gpu(0), gpu(1), gpu(2)], {}, {"aaa": (1,)}),
    ("one and a half: the whole ones first", [running("rrr", (0,), gpus=0.5), job("aaa", 2, gpus=1.5)],
     [gpu(0), gpu(1), gpu(2)], {}, {"aaa": (1, 0)}),
    # memory
    ("too little", [job("aaa", gpu_mem_mib=22 * 1024 + 1)], [gpu(0, memory_used_mib=2 * GB)], {}, {}),
    ("where it fits tightest", [job("aaa", gpu_mem_mib=5 * 1024)], [gpu(0), gpu(1, memory_used_mib=2 * GB)], {}, {"aaa": (1,)}),
    ("declared by a running job and not yet taken", [running("rrr", gpus=0.5, gpu_mem_mib=20 * 1024),
                                                     job("aaa", 2, gpus=0.5, gpu_mem_mib=5 * 1024)],
     [gpu(0, memory_used_mib=2 * GB, processes=(ours("rrr", 2),))], {}, {}),
    ("what an ended job still holds is on its way back", [job("aaa", gpu_mem_mib=20 * 1024)],
     [gpu(0, memory_used_mib=20 * GB, processes=(ours("xxx", 20),))], {}, {"aaa": (0,)}),
    ("two that start at once count against each other", [job("aaa", gpus=0.5, gpu_mem_mib=13 * 1024),
                                                         job("bbb", 2, gpus=0.5, gpu_mem_mib=13 * 1024)],
     [gpu(0), gpu(1)], {}, {"aaa": (0,), "bbb": (1,)}),
    # after a CUDA out-of-memory
    ("alone: it stands for none that may share", [running("rrr", gpus=0.5), job("aaa", 2, gpus=0.5, exclusive=True),
                                                  job("bbb", 3, gpus=0.5)], [gpu(0)], {}, {"bbb": (0,)}),
    ("alone: another place", [job("aaa", exclusive=True, attempts=(failed_attempt(1, "cuda-oom"),))], [gpu(0), gpu(1)], {}, {"aaa": (1,)}),
    ("alone: the emptiest", [job("aaa", exclusive=True, attempts=(failed_attempt(1, "cuda-oom"),))],
     [gpu(0, memory_used_mib=2 * GB), gpu(1, memory_used_mib=3 * GB), gpu(2, memory_used_mib=GB), gpu(3, memory_used_mib=GB)], {},
     {"aaa": (2,)}),
    # reservation and backfill: rrr ends in 540 s, if it does as expected
    ("it ends before the other GPU is free", [REST, job("aaa", 2, gpus=2, **WAITED), job("bbb", 3, expected_time=540)],
     [gpu(0), gpu(1)], {}, {"bbb": (0,)}),
    ("who says nothing of its length stands for none who does", [REST, job("aaa", 2, gpus=2, **WAITED), job("bbb", 3),
                                                                 job("ccc", 4, expected_time=500)], [gpu(0), gpu(1)], {}, {"ccc": (0,)}),
    ("it does not", [REST, job("aaa", 2, gpus=2, **WAITED), job("bbb", 3, expected_time=541)], [gpu(0), gpu(1)], {}, {}),
    ("who starts now counts", [job("aaa", 1, priority=0, expected_time=600), job("bbb", 2, gpus=2, **WAITED),
                               job("ccc", 3, expected_time=500)],
     [gpu(0), gpu(1)], {}, {"aaa": (0,), "ccc": (1,)}),
    ("two keep GPUs side by side", [running("rrr", (0,)), running("sss", (1,)), job("aaa", 3, **WAITED),
                                    job("bbb", 4, gpu_ids=(1,), **WAITED),
                                    job("ccc", 5, gpus=0.5)], [gpu(0), gpu(1), gpu(2, memory_used_mib=23 * GB)], {}, {}),
    ("a GPU is kept for who needs all of its memory",
     [running("rrr", (1,)), job("aaa", 2, gpus=2, gpu_mem_mib=24 * GB, **WAITED), job("bbb", 3)], [gpu(0), gpu(1)], {}, {}),
    ("a GPU that its job has filled is free when that ends", [running("rrr", (1,)), job("aaa", 2, gpus=2, **WAITED), job("bbb", 3)],
     [gpu(0), gpu(1, memory_used_mib=20 * GB, processes=(ours("rrr", 20),))], {"min_free_mem_mib": 8 * 1024}, {}),
    ("a GPU whose memory others use is not kept for who needs it",
     [running("rrr", (1,)), job("aaa", 2, gpu_mem_mib=20 * 1024, **WAITED), job("bbb", 3)],
     [gpu(0, memory_used_mib=15 * GB, processes=(foreign(),)), gpu(1)], {"share_with_others": True}, {"bbb": (0,)}),
    ("who waits for a busy GPU only holds up nobody else's reservation",
     [running("rrr", (0,)), running("sss", (1,)), job("aaa", 3, gpu_ids=(0,), **WAITED), job("bbb", 4, gpus=2, **WAITED), job("ccc", 5)],
     [gpu(0), gpu(1), gpu(2)], {}, {}),
]


@pytest.mark.parametrize("reason, jobs, gpus, keys, expected", PLANS, ids=[case[0] for case in PLANS])
def test_plan(reason, jobs, gpus, keys, expected):
    made = nexus.plan(state(*jobs), gpus, None, config(**keys), NOW)
    assert started(made) == expected, (reason, made.blocked)


ON_SLICE = running("rrr", (0,), gpu_uuids=("MIG-1",), gpu_slice=1)
SLICED = [  # reason, jobs, GPUs, keys of the configuration, {job id: the places} that start
    ("the smallest first, cards last", [job(id, number) for number, id in enumerate(("aaa", "bbb", "ccc", "ddd", "eee"), 1)], MIXED, {},
     {"aaa": ["0.1"], "bbb": ["0.2"], "ccc": ["0.0"], "ddd": ["1"]}),
    ("the smallest that fits", [job("aaa", gpu_mem_mib=15 * 1024), job("bbb", 2, gpu_mem_mib=15 * 1024)], MIXED, {},
     {"aaa": ["0.2"], "bbb": ["1"]}),
    ("a share", [job("aaa", gpus=0.5), job("bbb", 2, gpus=0.5), job("ccc", 3, gpus=0.5)], MIXED[:3], {},
     {"aaa": ["0.1"], "bbb": ["0.1"], "ccc": ["0.2"]}),
    ("two cards", [job("aaa", gpus=2)], [*MIXED, gpu(2)], {}, {"aaa": ["1", "2"]}),
    ("a slice is held by its uuid", [ON_SLICE, job("bbb", 2)], MIXED[:2], {}, {"bbb": ["0.0"]}),
    ("it was cut anew", [ON_SLICE, job("bbb", 2)], [mig_slice(1, uuid="MIG-new")], {}, {"bbb": ["0.1"]}),
    ("a card's number means all its slices", [job("aaa", gpu_ids=(0,)), job("bbb", 2, gpu_ids=(1,))], MIXED, {},
     {"aaa": ["0.1"], "bbb": ["1"]}),
    ("one of them", [job("aaa", gpu_ids=("0.0",))], MIXED, {}, {"aaa": ["0.0"]}),
    ("of unknown memory", [job("aaa"), job("bbb", 2, gpu_mem_mib=10)], [
        mig_slice(number, memory_total_mib=None, memory_used_mib=None) for number in (0, 1)], {}, {"aaa": ["0.0"]}),
    ("ids of the configuration", [job("aaa"), job("bbb", 2)], [mig_slice(0), gpu(1)], {"ids": [1]}, {"aaa": ["1"]}),
    ("of a type", [job("aaa", gpu_type="2G.20"), job("bbb", 2, gpu_type="full"), job("ccc", 3, gpu_type="a100"),
                   job("ddd", 4, gpu_type="rtx 3090")], MIXED, {}, {"aaa": ["0.2"], "bbb": ["1"], "ccc": ["0.1"]}),
    ("no type is in the way of another", [job("aaa", gpu_type="H100"), job("bbb", 2)], [gpu(0)], {}, {"bbb": ["0"]}),
    ("a foreign process", [job("aaa")], [mig_slice(0, processes=(foreign(),)), mig_slice(1)], {}, {"aaa": ["0.1"]}),
    ("the emptiest after a CUDA out-of-memory error, not the same", [job("aaa", exclusive=True, attempts=(
        nexus.replace(failed_attempt(1, "cuda-oom"), gpu_uuids=("MIG-0",)),))], [mig_slice(0), mig_slice(1)], {}, {"aaa": ["0.1"]}),
]


@pytest.mark.parametrize("reason, jobs, gpus, keys, expected", SLICED, ids=[case[0] for case in SLICED])
def test_plan_with_slices(reason, jobs, gpus, keys, expected):
    made = nexus.plan(state(*jobs), gpus, None, config(**keys), NOW)
    found = {start.job_id: list(nexus.Attempt(gpu_indices=start.gpu_indices, gpu_slice=start.gpu_slice).gpu_places)
             for start in made.starts}
    assert found == expected, (reason, made.blocked)
    assert {start.gpu_uuids for start in made.starts} == {
        tuple(gpu.uuid for place in places for gpu in gpus if gpu.place == place) for places in expected.values()}


GROUPS = [  # reason, jobs, groups, who starts on four GPUs
    ("no more of a group than its limit", [job(id, number, group="g") for number, id in enumerate(("aaa", "bbb", "ccc"), 1)],
     [nexus.Group("g", limit=2)], ["aaa", "bbb"]),
    ("others pass it", [running("rrr", group="g"), job("aaa", 2, group="g"), job("bbb", 3), job("ccc", 4, group="h")],
     [nexus.Group("g", limit=1), nexus.Group("h")], ["bbb", "ccc"]),
    ("a group that is held", [job("aaa", group="g"), job("bbb", 2)], [nexus.Group("g", hold="it fails")], ["bbb"]),
    ("of one kind, in the order of their coming, whatever the group",
     [job("aaa", 1, group="h"), job("bbb", 2, group="g"), job("ccc", 3, group="h"),
                                                                     job("ddd", 4), job("eee", 5, group="g")],
     [nexus.Group("g", limit=1)], ["aaa", "bbb", "ccc", "ddd"]),
    ("a limited one keeps no GPUs", [running("rrr", (1,), group="g"), job("aaa", 2, gpus=4, group="g", **WAITED), job("bbb", 3, gpus=3)],
     [nexus.Group("g", limit=1)], ["bbb"]),
]


@pytest.mark.parametrize("reason, jobs, groups, expected", GROUPS, ids=[case[0] for case in GROUPS])
def test_groups(reason, jobs, groups, expected):
    made = nexus.plan(state(*jobs, groups=groups), [gpu(index) for index in range(4)], None, config(), NOW)
    assert list(started(made)) == expected, reason


def test_nothing_can_be_started():
    made = nexus.plan(state(job("aaa", 3, gpus=0)), [gpu(0), gpu(1)], None, config(), NOW, reason="fork: no memory")
    assert made.starts == () and words(job("aaa", 3, gpus=0), made) == "fork: no memory"


def test_a_gpu_that_gets_no_job_is_so_while_it_is_paused_too():
    """`nexus why` said that the job could have it."""
    gpus, nodes = [gpu(0), gpu(0, node="n1", uuid="n1/GPU-0")], [nexus.NodeView("n1", reason="n1 is silent")]
    made = nexus.plan(state(paused=True), gpus, "nvidia-smi is silent", config(), NOW, nodes=nodes)
    assert verdicts(job("aaa"), made) == [("", 0, "nvidia-smi is silent"), ("n1", 0, "n1 is silent")]


# What holds for every plan


def random_gpu(index, dice):
    fields = dice.choice([{}] * 6 + [
        {"utilization": 95.0}, {"memory_used_mib": 10 * GB}, {"memory_used_mib": 10 * GB, "processes": (ours("xxx", 9),)},
        {"fault": "GPU is lost"}, {"is_paused": True}, {"is_mig": True}, {"lease_holder": "bob"},
        {"is_mig": True, "slice": 0, "name": "A100 MIG 1g.10gb"}, {"is_mig": True, "slice": 6, "name": "A100 MIG 2g.20gb"},
        {"processes": (foreign(),)}, {"compute_mode": "Prohibited"}, {"compute_mode": "Exclusive_Process"},
        {"memory_used_mib": 23 * GB}, {"memory_total_mib": None, "memory_used_mib": None}])
    return gpu(index, **fields)


def random_case(dice):
    """A queue, GPUs and a configuration."""
    gpus = [random_gpu(index, dice) for index in range(dice.choice([0, 1, 2, 4, 8])) if dice.random() < 0.9]
    made, number, indices = nexus.State(), 0, [one.index for one in gpus] + [90, 91]
    dice.shuffle(indices)
    groups = [nexus.Group("g", limit=dice.choice([0, 1, 2])), nexus.Group("h", hold=dice.choice([None, "it fails"]))]
    for group in groups[: dice.randrange(3)]:
        made.put(nexus.Put("groups", group.name, group))
    while indices and dice.random() < 0.4:              # those that run, some on GPUs that are gone or unusable now
        held, indices = indices[: dice.choice([0, 1, 1, 2])], indices[2:]
        for share in dice.choice([(1,), (1,), (0.5,), (0.3, 0.7), (0.25, 0.25)]) if len(held) == 1 else (1,):
            number += 1
            put(made, *nexus.add_job(running(
                letters(number), tuple(held), number=number, user=dice.choice(["ann", "bob"]),
                group=dice.choice([None, "g"]), gpu_mem_mib=dice.choice([None, 5 * 1024]),
                expected_time=dice.choice([None, 30, 600]), gpus=len(held) if share == 1 else share)))
    for _ in range(dice.randrange(15)):
        number += 1
        count = dice.choice([0, 1, 1, 1, 2, 2, 4, 9, 0.5, 0.5, 0.3, 0.75, 1.5, 2.25])
        some = tuple(sorted(dice.sample(range(9), dice.randrange(max(1, int(count + 0.99)), 10))))
        allowed = some if count and dice.random() < 0.4 else None
        priority = dice.choice([0, 1, 1, 2])
        put(made, *nexus.add_job(job(
            letters(number), queue_key=(dice.choice([0, 0, 0, -1]), priority, number), priority=priority, gpus=count,
            user=dice.choice(["ann", "ann", "bob"]),
            gpu_ids=allowed, gpu_type=dice.choice([None, None, None, "3090", "full", "1G.10GB"]),
            created_at=dice.choice([NOW - 60, NOW - 60, LONG_AGO]), group=dice.choice([None, None, "g", "h"]),
            gpu_mem_mib=dice.choice([None, None, 5 * 1024, 20 * 1024]) if count else None, exclusive=bool(count) and dice.random() < 0.1,
            expected_time=dice.choice([None, None, 20, 500]), retry_at=dice.choice([None] * 9 + [NOW + 5]),
            pending_dependencies=tuple(dice.sample(sorted(made.jobs), 1)) if made.jobs and dice.random() < 0.1 else ())))
    keys = {"cpu_slots": dice.choice([0, 1, 4]), "max_running": dice.choice([0, 0, 0, 2, 5]),
            "share_with_others": dice.random() < 0.2, "ids": dice.choice([[], [], [0, 1, 2]]),
            "min_free_mem_mib": dice.choice([0, 0, 0, 8 * 1024]), "max_running_per_user": dice.choice([0, 0, 1, 3])}
    return made, gpus, dice.choice([None] * 9 + ["nvidia-smi is silent"]), config(**keys)


@pytest.mark.parametrize("block", range(8))
def test_every_plan_is_sound(block):
    for seed in range(block * 150, block * 150 + 150):
        made, gpus, trouble, settings = random_case(random.Random(seed))
        planned, again = (nexus.plan(made, gpus, trouble, settings, NOW) for _ in range(2))
        assert (planned.starts, planned.blocked) == (again.starts, again.blocked), "the same values, the same plan"
        check_shares(made, gpus, trouble, settings, planned)
        check_memory(made, gpus, planned)
        check_limits(made, settings, planned)
        check_waiting(made, settings, planned)
        made.put(nexus.Put("facts", "paused", True))
        assert nexus.plan(made, gpus, trouble, settings, NOW).starts == (), "paused means nothing starts"


def shares_held(made):
    """{GPU uuid: [(job, hundredths)]} of the running jobs."""
    held = {}
    for one in made.running.values():
        for uuid, share in zip(one.current.gpu_uuids, nexus.list_shares(one)):
            held.setdefault(uuid, []).append((one, share))
    return held


def shares_given(made, planned):
    """{GPU index: [(job, hundredths)]} of the jobs that start, in their order."""
    given = {}
    for start in planned.starts:
        one = made.jobs[start.job_id]
        assert len(start.gpu_indices) == len(set(start.gpu_indices)) == len(nexus.list_shares(one)), "each GPU once"
        for index, share in zip(start.gpu_indices, nexus.list_shares(one)):
            given.setdefault(index, []).append((one, share))
    return given


def check_shares(made, gpus, trouble, settings, planned):
    """No GPU is over-committed, none given that has an obstacle or that the job may not have."""
    by_index, held = {one.index: one for one in gpus}, shares_held(made)
    assert len({start.job_id for start in planned.starts}) == len(planned.starts)
    for start in planned.starts:
        one = made.jobs[start.job_id]
        assert one.status == nexus.PENDING and not one.pending_dependencies and one.retry_at is None
        assert one.gpu_ids is None or set(start.gpu_indices) <= set(one.gpu_ids)
        slices = [by_index[index].slice for index in start.gpu_indices]
        assert slices == [start.gpu_slice] or (set(slices) <= {None} and start.gpu_slice is None), "one slice, or cards"
        wanted = {None: "", "full": "RTX 3090"}.get(one.gpu_type, one.gpu_type)
        assert all(wanted.lower() in by_index[index].name.lower() for index in start.gpu_indices)
        assert start.gpu_uuids == tuple(by_index[index].uuid for index in start.gpu_indices)
    for index, new in shares_given(made, planned).items():
        before = held.get(by_index[index].uuid, [])
        assert not trouble and sum(share for _, share in before + new) <= 100
        assert nexus.find_gpu_reason(by_index[index], settings.gpu, [one for one, _ in before]) is None
        assert by_index[index].compute_mode is None or [share for _, share in before + new] == [100], "one process for one job"
        is_busy = (by_index[index].utilization or 0) >= 80
        assert not (is_busy and len(before + new) > 1), "a second job on a busy GPU"


def check_memory(made, gpus, planned):
    """What is declared by those that start fits into what is free and not claimed."""
    by_index, held = {one.index: one for one in gpus}, shares_held(made)
    for index, new in shares_given(made, planned).items():
        asked = [one.gpu_mem_mib for one, _ in new if one.gpu_mem_mib]
        room = nexus.find_room(by_index[index], [one for one, _ in held.get(by_index[index].uuid, [])])
        assert not asked or (room is not None and sum(asked) <= room)


def check_limits(made, settings, planned):
    starting = [made.jobs[start.job_id] for start in planned.starts]
    on_cpu = [one for one in starting if not one.gpus]
    before = [one for one in made.running.values() if not one.gpus]
    assert not on_cpu or len(before) + len(on_cpu) <= settings.jobs.cpu_slots
    most = settings.jobs.max_running
    assert not most or not starting or len(made.running) + len(starting) <= most
    for group in made.groups.values():
        begun = [one for one in starting if one.group == group.name]
        there = [one for one in made.running.values() if one.group == group.name]
        assert not begun or not group.hold
        assert not begun or not group.limit or len(begun) + len(there) <= group.limit
    most = settings.jobs.max_running_per_user
    for user in {one.user for one in starting} if most else ():
        assert sum(one.user == user for one in [*starting, *made.running.values()]) <= most


def check_waiting(made, settings, planned):
    """Starts are in the queue's order; nobody waits without a reason, or for what is left after the starts."""
    starting = [start.job_id for start in planned.starts]
    bands = [made.jobs[id].queue_key[:2] for id in starting]
    assert bands == sorted(bands)
    for user in ("ann", "bob"):
        keys = [made.jobs[id].queue_key for id in starting if made.jobs[id].user == user]
        assert keys == sorted(keys)
    for one in made.jobs.values():
        if one.status != nexus.PENDING or one.id in starting:
            continue
        reason = words(one, planned, settings)
        assert reason.strip() and "\n" not in reason
        assert one.expected_time or reason != "it is about to start", f"{one.id} waits for nothing"
        is_free = not one.pending_dependencies and one.retry_at is None and not planned.quotas.check(one)
        if is_free and one.gpus and not any(one.reserved_for for one in planned.gpus):
            assert nexus.choose_gpus(one, planned.gpus, settings.gpu, NOW) is None, f"{one.id} could have started"
        elif is_free and not one.gpus:
            busy = [*made.running.values(), *(made.jobs[id] for id in starting)]
            assert sum(not other.gpus for other in busy) >= settings.jobs.cpu_slots, f"{one.id} could have started"


mixed_users = st.tuples(st.sampled_from("abc"), st.sampled_from([0, 0, 1, 1, 0.5]))


@given(st.lists(st.tuples(mixed_users, st.integers(1, 50)), max_size=6),
       st.lists(st.tuples(mixed_users, st.sampled_from([0, 1])), max_size=20))
def test_jobs_are_listed_in_the_order_in_which_they_start(busy, waiting):
    """Users who wait with jobs on GPUs and with others: lists took one's kinds for one queue, the plan did not."""
    made = state(*[running(f"r{n}", (90 + n,), user=user, gpus=gpus, started_at=NOW - ago) for n, ((user, gpus), ago) in enumerate(busy)],
                 *[job(f"w{n}", n, user=user, gpus=gpus, priority=priority) for n, ((user, gpus), priority) in enumerate(waiting)])
    planned = nexus.plan(made, [gpu(index) for index in range(20)], None, config(cpu_slots=30), NOW)
    listed = nexus.list_pending(made)
    assert [start.job_id for start in planned.starts] == [one.id for one in listed]
    for user in "abc":
        keys = [one.queue_key for one in listed if one.user == user]
        assert keys == sorted(keys), "of one user by queue_key"


# Through time


def replay(count, **keys):
    return Replay([gpu(index) for index in range(count)], config(**keys))


def fill_up(made, count, *choices, dice):
    """Queue jobs until so many wait; each is like one of `choices`: (run time, fields)."""
    while len(made.state.pending) < count:
        run_time, fields = dice.choice(choices)
        made.add(letters(made.state.next_number), run_time, **fields)


def step(made, seconds=10):
    made.advance(made.now + seconds)
    return made.start_jobs()


BIG_JOBS = [  # reason, GPUs, what the big job asks for
    ("all GPUs", 4, {"gpus": 4}),
    ("two by index", 4, {"gpus": 2, "gpu_ids": (1, 3)}),
]


@pytest.mark.parametrize("reason, count, asked", BIG_JOBS, ids=[case[0] for case in BIG_JOBS])
def test_a_big_job_starts_in_spite_of_a_stream_of_small_ones(reason, count, asked):
    dice, made = random.Random(0), replay(count, reserve_after_seconds=300)
    small = [(length, fields) for length in (50, 120, 200) for fields in ({}, {}, {"gpu_ids": (0, 1)})]
    fill_up(made, 10, *small, dice=dice)
    step(made)
    made.add("big", 100, **asked)
    while "big" not in made.started_at and made.now < 5000:
        fill_up(made, 8, *small, dice=dice)
        step(made)
    assert made.started_at["big"] <= 300 + 2 * 200 + 200 * 10 / count, reason


def test_jobs_that_ask_for_the_same_do_not_wait_one_after_the_other():
    """Each has waited since it came: who comes to be the first of them need not wait as long once more."""
    made = replay(2, reserve_after_seconds=300)
    made.add("small", 100)
    step(made)
    for id in ("one", "two", "three"):
        made.add(id, 20, gpus=2)
    while "three" not in made.started_at and made.now < 3000:
        fill_up(made, 8, (50, {}), dice=random.Random(0))
        step(made)
    first, second, third = (made.started_at[id] for id in ("one", "two", "three"))
    assert first >= 300 and second - first <= 130 and third - second <= 130


def test_a_stream_of_urgent_jobs_does_not_let_the_unimportant_pass_a_job_that_waited():
    made = replay(2, reserve_after_seconds=300)
    made.add("big", 100, gpus=2, created_at=-301)
    for number in range(0, 50, 2):
        made.add(letters(number), 9, priority=0)                # each ends before the next comes
        made.add(letters(number + 1), 9, priority=2)
        step(made)
        assert letters(number + 1) not in made.started_at or "big" in made.started_at, "GPU 1 is the waiting job's"


# The scheduler in simulated time

requests = st.fixed_dictionaries({}, optional={
    "gpus": st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2, 3]), "gpu_mem_mib": st.sampled_from([5 * 1024, 23 * 1024]),
    "group": st.sampled_from("gh"), "priority": st.sampled_from([0, 1, 2]), "expected_time": st.sampled_from([1, 20, 90]),
    "gpu_ids": st.sampled_from([(0,), (0, 1), (1, 2)])})


def is_feasible(fields, count):
    allowed = [index for index in fields.get("gpu_ids", range(count)) if index < count]
    return -(-fields.get("gpus", 1) // 1) <= len(allowed)


def fair(fields):
    """A CPU job asks for no GPU's memory and no place."""
    return fields if fields.get("gpus", 1) else {name: fact for name, fact in fields.items() if name not in ("gpu_mem_mib", "gpu_ids")}


@given(st.integers(1, 3), st.lists(st.tuples(requests.map(fair), st.integers(0, 100)), max_size=25), st.integers(0, 4), st.integers(0, 2))
def test_every_feasible_job_starts_and_no_limit_is_broken_on_the_way(count, asked, max_running, limit):
    made = replay(count, reserve_after_seconds=50, max_running=max_running, cpu_slots=2)
    made.state.put(nexus.Put("groups", "g", nexus.Group("g", limit)))
    for number, (fields, run_time) in enumerate(asked):
        made.add(letters(number), run_time, **fields)
    for _ in range(10000):
        made.start_jobs()
        there = made.state.running.values()
        held = shares_held(made.state)
        assert all(sum(share for _, share in line) <= 100 for line in held.values())
        assert all(sum(one.gpu_mem_mib or 0 for one, _ in line) <= 24 * 1024 for line in held.values())
        assert not max_running or len(there) <= max_running
        assert not limit or sum(one.group == "g" for one in there) <= limit
        upcoming = made.next_event_at()
        if upcoming is None:
            break
        made.advance(upcoming)
    feasible = {letters(number) for number, (fields, _) in enumerate(asked) if is_feasible(fields, count)}
    assert set(made.started_at) == set(made.ended_at) == feasible


# Where Slurm places the jobs

SLURM_PLANS = [  # reason, jobs, trouble, keys of the configuration, the jobs that are handed over, (a job, a word of why it waits)
    ("one at a time, whatever it asks for", [job("aaa", 1, gpus=8), job("bbb", 2)], None, {}, ["aaa"], ("bbb", "the job before it")),
    ("in the queue's order", [job("aaa", 1), job("bbb", 2, priority=0)], None, {}, ["bbb"], None),
    ("those that Slurm has count", [handed("hhh", 1), running("rrr", slurm_key="k", gpus=1), job("aaa", 2)], None,
     {"max_submitted": 2}, [], ("aaa", "max_submitted")),
    ("there is room for one more", [handed("hhh", 1), job("aaa", 2)], None, {"max_submitted": 2}, ["aaa"], None),
    ("those that run here do not", [running("rrr"), job("aaa", 2)], None, {"max_submitted": 1}, ["aaa"], None),
    ("max_running counts both", [running("rrr"), handed("hhh", 1), job("aaa", 2), job("bbb", 3)], None, {"max_running": 3}, ["aaa"],
     ("bbb", "max_running")),
    ("so does a user's limit", [handed("hhh", 1), job("aaa", 2)], None, {"max_running_per_user": 1}, [], ("aaa", "max_running_per_user")),
    ("CPU slots are this machine's", [job("aaa", gpus=0)], None, {"cpu_slots": 0}, ["aaa"], None),
    ("Slurm does not answer", [job("aaa")], "Slurm does not answer", {}, [], ("aaa", "Slurm does not answer")),
    ("a share, from before the launcher was changed", [job("aaa", 1, gpus=0.5), job("bbb", 2)], None, {}, ["bbb"], ("aaa", "whole ones")),
    ("chosen GPUs", [job("aaa", gpu_ids=(0,))], None, {}, [], ("aaa", "Slurm's to choose")),
]


@pytest.mark.parametrize("reason, jobs, trouble, keys, wanted, waits", SLURM_PLANS, ids=[case[0] for case in SLURM_PLANS])
def test_plan_with_slurm(reason, jobs, trouble, keys, wanted, waits):
    made_of, keys = state(*jobs), config(**{"launcher": "slurm", **keys})
    made = nexus.plan(made_of, [], trouble, keys, NOW)
    assert [start.job_id for start in made.starts] == wanted and all(start.gpu_indices == () for start in made.starts)
    if waits:
        assert waits[1] in words(made_of.jobs[waits[0]], made, keys)


def test_a_group_counts_what_slurm_has():
    made_of = state(handed("hhh", 1, group="g"), job("aaa", 2, group="g"), job("bbb", 3), groups=[nexus.Group("g", limit=1)])
    assert started(nexus.plan(made_of, [], None, config(launcher="slurm"), NOW)) == {"bbb": ()}


# Several machines

OWN = [gpu(0)]

PLACES = [  # reason, jobs, GPUs, machines, {job id: (machine, GPU indices)} that start
    ("this machine first, all being equal", [job("aaa")], [*OWN, *BOTH], TWO, {"aaa": ("", (0,))}),
    ("one after the other", [job("aaa"), job("bbb", 2), job("ccc", 3)], BOTH, TWO,
     {"aaa": ("n1", (0,)), "bbb": ("n2", (0,)), "ccc": ("n1", (1,))}),
    ("the one with the least to do", [running_there("rrr", "n1", expected_time=600), running_there("sss", "n2", expected_time=300),
                                      job("aaa", 3)], BOTH, TWO, {"aaa": ("n2", (1,))}),
    ("what runs counts by what is left of it", [running_there("rrr", "n1", expected_time=100),
                                                running_there("sss", "n2", expected_time=90, started_at=NOW), job("aaa", 3)], BOTH, TWO,
     {"aaa": ("n1", (1,))}),
    ("when nobody says how long, the one with fewer GPUs taken", [running_there("rrr", "n1"), job("aaa", 2)], BOTH, TWO,
     {"aaa": ("n2", (0,))}),
    ("also of those that start now", [running_there("rrr", "n1", (0, 1), gpus=2), job("aaa", 2), job("bbb", 3)],
     [*there("n1", 0, 1, 2), *there("n2", 0, 1)], TWO, {"aaa": ("n2", (0,)), "bbb": ("n2", (1,))}),
    ("where it can start, however much there is to do", [
        running_there("rrr", "n1", expected_time=10**6), running_there("sss", "n2", (0, 1), expected_time=70), job("aaa", 3)], BOTH, TWO,
     {"aaa": ("n1", (1,))}),
    ("pinned", [job("aaa", only_node="n2")], [*OWN, *BOTH], TWO, {"aaa": ("n2", (0,))}),
    ("beside one on a machine that is gone", [running_there("rrr", "n3", (0,)), job("aaa")], OWN, TWO, {"aaa": ("", (0,))}),
    ("pinned to one that is gone", [job("aaa", only_node="n3")], BOTH, TWO, {}),
    ("pinned, on a machine alone", [job("aaa", only_node="n1"), job("bbb", 2)], OWN, [], {"bbb": ("", (0,))}),
    ("one that cannot run it", [job("aaa", excluded_nodes=(("", "no directory"), ("n1", "no directory")))], [*OWN, *BOTH], TWO,
     {"aaa": ("n2", (0,))}),
    ("none can", [job("aaa", excluded_nodes=(("n1", "x"), ("n2", "y")))], BOTH, TWO, {}),
    ("all GPUs of a job are in one machine", [job("aaa", gpus=2)], [*there("n1", 0), *there("n2", 0)], TWO, {}),
    ("an index is one of each machine", [job("aaa", gpu_ids=(1,)), job("bbb", 2, gpu_ids=(1,))], BOTH, TWO,
     {"aaa": ("n1", (1,)), "bbb": ("n2", (1,))}),
    ("where its directory is", [job("aaa", cwd="/data"), job("bbb", 2, cwd="/data", only_node="n1"),
                                job("ccc", 3, cwd="/data", snapshot="a" * 40, only_node="n1")], BOTH,
     [view("n1", folders=frozenset(["/tmp"])), view("n2", folders=frozenset(["/data"]))], {"aaa": ("n2", (0,)), "ccc": ("n1", (0,))}),
    ("without a GPU: CPU slots of each", [job(letters(k), k, gpus=0) for k in range(9)], [], TWO,
     {letters(k): (name, ()) for k, name in enumerate(("", "n1", "n2", "", "n1", "n2", "", ""))}),
    ("no other machine's GPUs are kept for one that is starving", [
        running_there("rrr", "n1", (0,), expected_time=61), running_there("sss", "n2", (0,), expected_time=600),
        job("aaa", 3, gpus=2, **WAITED), job("bbb", 4), job("ccc", 5)], BOTH, TWO, {"bbb": ("n2", (1,))}),
    ("nor are any where it cannot run", [running_there("rrr", "n1", (0,)), job("aaa", 2, gpus=2, excluded_nodes=(("n2", "x"),), **WAITED),
                                         job("bbb", 3, gpus=2)], BOTH, TWO, {"bbb": ("n2", (0, 1))}),
]


def placed(made):
    """{job id: (machine, GPU indices)} of a plan."""
    return {start.job_id: (start.node, start.gpu_indices) for start in made.starts}


@pytest.mark.parametrize("reason, jobs, gpus, nodes, expected", PLACES, ids=[case[0] for case in PLACES])
def test_plan_of_several_machines(reason, jobs, gpus, nodes, expected):
    made = nexus.plan(state(*jobs), gpus, None, config(), NOW, nodes)
    assert placed(made) == expected, (reason, made.blocked)


def test_trouble_with_ones_own_gpus_closes_no_other_machine():
    made = nexus.plan(state(job("aaa"), job("bbb", 2, only_node="")), [*OWN, *BOTH], "nvidia-smi is silent", config(), NOW, TWO)
    assert placed(made) == {"aaa": ("n1", (0,))}


def test_gpu_ids_of_the_configuration_are_this_machines():
    made = nexus.plan(state(job("aaa"), job("bbb", 2)), [gpu(0), gpu(1), *there("n1", 0)], None, config(ids=[1]), NOW, TWO)
    assert placed(made) == {"aaa": ("", (1,)), "bbb": ("n1", (0,))}


@given(st.integers(0, 2**32))
def test_no_plan_of_several_machines_gives_a_gpu_twice(seed):
    chance = random.Random(seed)
    names = ["", *(f"n{k}" for k in range(chance.randrange(4)))]
    gpus = [one for name in names for one in (there(name, *range(chance.randrange(4))) if name else [gpu(k) for k in range(2)])]
    waiting = [job(letters(k), k, gpus=chance.choice([0, 0.25, 0.5, 1, 1, 2, 3]), only_node=chance.choice([None, None, *names, "gone"]),
                   excluded_nodes=tuple((name, "x") for name in names if chance.random() < 0.1),
                   expected_time=chance.choice([None, 5, 600]))
               for k in range(chance.randrange(20))]
    views = [view(name, reason=chance.choice([None, None, "away"]), cpu_slots=chance.randrange(3)) for name in names[1:]]
    made = state(*waiting)
    planned = nexus.plan(made, gpus, None, config(), NOW, views)
    given_out = {}
    for start in planned.starts:
        one = made.jobs[start.job_id]
        assert nexus.may_run_on(one, start.node) and start.node not in [node.name for node in views if node.reason]
        assert len(set(start.gpu_uuids)) == len(start.gpu_uuids) == len(nexus.list_shares(one))
        for uuid, share in zip(start.gpu_uuids, nexus.list_shares(one)):
            given_out[uuid] = given_out.get(uuid, 0) + share
            assert next(each.node for each in gpus if each.uuid == uuid) == start.node, "all of one machine"
    assert all(share <= 100 for share in given_out.values())
    assert all(words(one, planned) for one in waiting if one.id not in started(planned))


def test_memory_that_comes_free_with_another_users_lease_is_wanted():
    """The job of bob that has it now uses most of it."""
    theirs = gpu(0, lease_holder="bob", memory_used_mib=20 * GB, processes=(foreign(),))
    made = nexus.plan(state(job("aaa", gpu_mem_mib=10 * GB)), [theirs], None, config(), NOW, box=box(box_user("bob", [0])))
    assert [(one.gpus, one.uuids, one.jobs) for one in made.wants] == [(1, ("GPU-0",), 1)]

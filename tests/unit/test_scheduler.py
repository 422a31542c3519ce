"""Section 6: what to do next, decided from values alone."""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import GB, NOW, config, finished, foreign, gpu, job, mig_slice, ours, put, running, state
from replay import Replay

import nexus

LONG_AGO = NOW - 3600
WAITED = {"created_at": LONG_AGO}


def words(one, made, settings=None):
    """Why a job waits, as lists say it."""
    return nexus.format_reasons(nexus.list_reasons(one, None, made, settings or config(), NOW))


def verdicts(one, made):
    return [(there.gpu.node, there.gpu.index, why and why.detail)
            for there, why in nexus.list_verdicts(one, made.gpus, config().gpu, NOW)]


def started(made):
    """{job id: GPU indices} of a plan."""
    return {start.job_id: start.gpu_indices for start in made.starts}


def letters(number):
    """An id for a number."""
    return "".join(nexus.ID_LETTERS[number // 49**place % 49] for place in (2, 1, 0))


def failed_attempt(number, cause="exit", indices=(0,), code=1):
    return nexus.Attempt(number, gpu_indices=tuple(indices), gpu_uuids=tuple(f"GPU-{index}" for index in indices),
                         started_at=NOW - 60, finished_at=NOW - 30, runtime_seconds=30.0, exit_code=code, cause=cause)


REST = running("rrr", (1,), expected_time=600)                # it runs on GPU 1 since a minute


ONE_PROCESS = "Exclusive_Process"
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


MIXED = [mig_slice(0, 40), mig_slice(1, 10), mig_slice(2, 20), gpu(1)]
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


REASONS = [  # what is shown, jobs, GPUs, keys, part of the reason why the last of the jobs waits
    ("whose job it is", [running("rrr"), job("aaa", 2)], [gpu(0)], {}, "GPU 0 runs job rrr"),
    ("another user's pid, program and memory", [job("aaa")], [gpu(0, processes=(foreign(),))], {},
     "GPU 0 is in use by bob (pid 4242 python, 16GB)"),
    ("memory", [job("aaa")], [gpu(0, memory_used_mib=20 * GB)], {"share_with_others": True},
     "GPU 0 has 20GB of its memory in use by others"),
    ("memory that nobody owns", [job("aaa")], [gpu(0, memory_used_mib=9000)], {},
     "GPU 0 is in use by processes that cannot be seen (8.8GB)"),
    ("no memory told", [job("aaa")], [gpu(0, memory_total_mib=None)], {"min_free_mem_mib": 1},
     "GPU 0 does not tell its memory"),
    ("a fault", [job("aaa")], [gpu(0, fault="GPU is lost")], {}, "GPU 0 is unusable (GPU is lost)"),
    ("prohibited", [job("aaa")], [gpu(0, compute_mode="Prohibited"), gpu(1, is_paused=True)], {},
     "GPU 0 is unusable (compute mode Prohibited; sudo nvidia-smi -i 0 -c DEFAULT)"),
    ("no share of such a card", [running("rrr", (1,)), job("aaa", 2, gpus=0.5)], [gpu(0, compute_mode=ONE_PROCESS), gpu(1)], {},
     "needs 0.5 GPU; 0 of 2 are free: 1 taken by ann; GPU 0 is in compute mode Exclusive_Process, for one process only"),
    ("nor another one", [running("rrr", gpus=0.5), job("aaa", 2, gpus=0.5)],
     [gpu(0, compute_mode=ONE_PROCESS), gpu(1, is_paused=True)], {},
     "GPU 0 is in compute mode Exclusive_Process, for one process only"),
    ("no card can be shared", [job("aaa", gpus=0.5)], [gpu(index, compute_mode=ONE_PROCESS) for index in (3, 4)], {},
     "never: wants 0.5 GPU, and each GPU is in compute mode Exclusive_Process, for one process only; "
     "to share GPU 3: sudo nvidia-smi -i 3 -c DEFAULT"),
    ("no other card", [job("aaa", gpus=1.5)],
     [gpu(0, compute_mode="Prohibited"), *(gpu(index, compute_mode=ONE_PROCESS) for index in (1, 2))], {},
     "to share GPU 1: sudo nvidia-smi -i 1 -c DEFAULT"),
    ("a card that may come back", [job("aaa", gpus=0.5)], [gpu(0, compute_mode=ONE_PROCESS), gpu(1, fault="GPU is lost")], {},
     "needs 0.5 GPU; 0 of 2 are free; GPU 0 is in compute mode Exclusive_Process, for one process only; GPU 1 is unusable"),
    ("no slices", [job("aaa")], [gpu(0, is_mig=True)], {}, "GPU 0 is in MIG mode without slices"),
    ("slices are for one", [job("aaa", gpus=2)], [mig_slice(0), mig_slice(1)], {},
     "never: wants 2 GPUs, this machine has 0 beside MIG slices, of which a job can use only one"),
    ("slices are for less than two", [job("aaa", gpus=1.5)], [mig_slice(0), gpu(1)], {},
     "never: wants 1.5 GPUs, this machine has 1 beside MIG slices"),
    ("whole cards beside slices", [running("rrr", (1,)), job("aaa", 2, gpus=2)], [mig_slice(0), gpu(1), gpu(2)], {},
     "needs 2 GPUs; 1 of 2 is free beside MIG slices, of which a job can use only one"),
    ("no slice fits", [job("aaa", gpu_mem_mib=20 * 1024)], [mig_slice(0), mig_slice(1)], {},
     "never: wants 1 GPU with 20GB, this machine has 0; the largest has 10GB"),
    ("no such type", [job("aaa", gpu_type="H100")], MIXED, {}, "never: wants 1 GPU of type H100, this machine has 0; "
     "the types are A100 MIG 1g.10gb, A100 MIG 2g.20gb, A100 MIG 4g.40gb, RTX 3090"),
    ("not so many of a type", [job("aaa", gpus=2, gpu_type="full")], MIXED, {}, "never: wants 2 GPUs, this machine has 1 beside MIG"),
    ("all of a type are in use", [running("rrr", (1,)), job("aaa", 2, gpu_type="3090")], MIXED, {}, "GPU 1 runs job rrr"),
    ("some of a type are in use", [running("rrr", (1,)), job("aaa", 2, gpus=2, gpu_type="3090")], [*MIXED, gpu(2)], {},
     "needs 2 GPUs of type 3090; 1 of 2 is free beside MIG slices"),
    ("a type and an index", [job("aaa", gpu_type="3090", gpu_ids=(0,))], MIXED, {},
     "never: wants 1 GPU of type 3090 of index 0, this machine has 0; the indices are 0.0, 0.1, 0.2, 1"),
    ("an old list of GPUs", [job("aaa", gpu_ids=(5,))], [mig_slice(0), mig_slice(1)], {},
     "never: wants 1 GPU of index 5, this machine has 0; the indices are 0.0, 0.1"),
    ("a lease", [job("aaa")], [gpu(0, lease_holder="bob")], {}, "GPU 0 is held by the nexus of bob"),
    ("all of them", [running("rrr", (0, 1)), job("aaa", 2)], [gpu(0), gpu(1)], {}, "needs 1 GPU; 0 of 2 are free"),
    ("of many GPUs some", [job("aaa")], [gpu(index, is_paused=True) for index in range(12)], {},
     "GPU 0 is paused; GPU 1 is paused; and 10 more"),
    ("not there", [job("aaa", gpu_ids=(5,))], [gpu(0)], {}, "never: wants 1 GPU of index 5, this machine has 0; the indices are 0"),
    ("too many asked for", [job("aaa", gpus=4)], [gpu(0), gpu(1)], {}, "never: wants 4 GPUs, this machine has 2"),
    ("more memory than any has", [job("aaa", gpu_mem_mib=200 * 1024)], [gpu(0), gpu(1, memory_total_mib=80 * GB)], {},
     "never: wants 1 GPU with 200GB, this machine has 0; the largest has 80GB"),
    ("memory on each of several", [job("aaa", gpus=2, gpu_mem_mib=40 * 1024)], [gpu(0), gpu(1, memory_total_mib=80 * GB)], {},
     "never: wants 2 GPUs with 40GB, this machine has 1; the largest has 80GB"),
    ("the slots", [running("rrr", ()), job("aaa", 2, gpus=0)], [], {"cpu_slots": 1},
     "all 1 CPU slots are taken (cpu_slots)"),
    ("max_running", [running("rrr"), job("aaa", 2)], [gpu(0), gpu(1)], {"max_running": 1}, "1 job run"),
    ("max_running_per_user", [running("rrr"), job("aaa", 2)], [gpu(0), gpu(1)], {"max_running_per_user": 1},
     "1 job of ann runs, as many as max_running_per_user allows"),
    ("kept for another", [running("rrr", (1,)), job("aaa", 2, gpus=2, **WAITED), job("bbb", 3, gpu_ids=(0,))],
     [gpu(0), gpu(1)], {}, "GPU 0 is kept for job aaa"),
    ("its next attempt", [job("aaa", retry_at=NOW + 9, attempts=(failed_attempt(1), failed_attempt(2, "timeout")))], [gpu(0)], {},
     "attempt 2 failed (timeout); it is tried again in 9s"),
    ("it is held", [job("aaa", is_held=True)], [gpu(0)], {}, "it is held (nexus resume aaa)"),
    ("it is to begin later", [job("aaa", begin_at=NOW + 7200)], [gpu(0)], {}, "begins in 2h, as asked"),
    ("those before it",
     [running("rrr"), job("bbb", 2), job("aaa", 3, after=("rrr", "bbb"), pending_dependencies=("rrr", "bbb"))], [gpu(0)], {},
     "after jobs rrr, bbb"),
    ("too small a share", [running("rrr", gpus=0.7), job("aaa", 2, gpus=0.5)], [gpu(0)], {}, "GPU 0 has 0.3 free beside job rrr"),
    ("its load", [running("rrr", gpus=0.5), job("aaa", 2, gpus=0.5)], [gpu(0, utilization=97)], {},
     "GPU 0 is 97% busy with job rrr (load_threshold)"),
    ("its memory", [job("aaa", gpu_mem_mib=20 * 1024)], [gpu(0, memory_used_mib=10 * GB)], {"share_with_others": True},
     "GPU 0 has 14GB free, less than the 20GB asked for"),
    ("memory it does not tell", [job("aaa", gpu_mem_mib=1024)], [gpu(0, memory_used_mib=None)], {}, "GPU 0 does not tell its memory"),
    ("what nexus itself paused, and why", [job("aaa")], [gpu(0, is_paused=True, pause_reason="3 jobs failed there")], {},
     "GPU 0 is paused (3 jobs failed there; nexus resume 0)"),
    ("nothing is in its way", [job("aaa")], [gpu(0)], {}, "it is about to start"),
]


@pytest.mark.parametrize("reason, jobs, gpus, keys, part", REASONS, ids=[case[0] for case in REASONS])
def test_every_wait_has_a_reason(reason, jobs, gpus, keys, part):
    made = state(*jobs)
    planned = nexus.plan(made, gpus, None, config(**keys), NOW)
    found, = nexus.list_reasons(jobs[-1], None, planned, config(**keys), NOW)
    assert jobs[-1].id not in started(planned) or found.detail == "it is about to start"
    assert part in nexus.format_reason(found) and found.code in nexus.REASON_CODES, reason


def test_the_reason_of_a_job_that_has_gpus_reserved_is_the_same_whoever_was_asked_before():
    jobs = [running("rrr", (1,)), job("aaa", 2, gpus=2, **WAITED), job("bbb", 3, gpus=2)]
    planned = nexus.plan(state(*jobs), [gpu(0), gpu(1)], None, config(), NOW)
    shown = [nexus.format_reasons(nexus.list_reasons(one, None, planned, config(), NOW)) for one in (jobs[1], jobs[2], jobs[1])]
    assert shown[0] == shown[2] and "kept for job aaa" not in shown[0] and "kept for job aaa" in shown[1]


STATE_REASONS = [  # what is shown, state, why the readings cannot be relied upon, part of the reason why aaa waits
    ("the queue is paused", state(job("aaa"), paused=True), None, "the queue is paused (nexus resume)"),
    ("its group is held", state(job("aaa", group="g"), groups=[nexus.Group("g", hold="paused by ann")]), None,
     "group g is held: paused by ann"),
    ("its group's limit", state(running("rrr", group="g"), job("aaa", 2, group="g"), groups=[nexus.Group("g", limit=1)]), None,
     "1 job of group g runs, as many as its --max-concurrent allows"),
    ("the driver is silent", state(job("aaa")), "nvidia-smi is silent since 15:30", "nvidia-smi is silent since 15:30"),
]


@pytest.mark.parametrize("reason, made, trouble, part", STATE_REASONS, ids=[case[0] for case in STATE_REASONS])
def test_what_holds_for_many_is_a_reason_too(reason, made, trouble, part):
    planned = nexus.plan(made, [gpu(0), gpu(1)], trouble, config(), NOW)
    assert part in words(made.jobs["aaa"], planned), reason


STOPS = [  # reason, fields of a job that has run for 100 s, 65 of them idle, and takes 3 GB, keys, (cause, part of the line)
    ("no limit", {}, {}, None), ("not yet", {"timeout_seconds": 100.5}, {}, None),
    ("its own", {"timeout_seconds": 100}, {}, ("timeout", "stopped after 1m 40s: its time limit is 1m 40s")),
    ("the configuration's", {}, {"timeout_seconds": 90}, ("timeout", "timeout_seconds is 1m 30s")),
    ("its own before the configuration's", {"timeout_seconds": 500}, {"timeout_seconds": 90}, None),
    ("0 is none, whatever the configuration says", {"timeout_seconds": 0}, {"timeout_seconds": 90}, None),
    ("twice what was expected", {"expected_time": 50}, {}, ("timeout", "2 times its expected time (timeout_multiplier) is 1m 40s")),
    ("not yet twice", {"expected_time": 51}, {}, None), ("another multiple", {"expected_time": 51}, {"timeout_multiplier": 1.5},
                                                         ("timeout", "1.5 times its expected time (timeout_multiplier) is 1m 16s")),
    ("what is expected is before the configuration's", {"expected_time": 600}, {"timeout_seconds": 90}, None),
    ("host memory", {}, {"max_memory_gb": 2.5}, ("host-memory", "took 3GB of host memory; max_memory_gb is 2.5")),
    ("a little more than allowed", {}, {"max_memory_gb": 2.99}, ("host-memory", "took 3GB of host memory; max_memory_gb is 2.99")),
    ("its GPUs do nothing", {}, {"idle_kill_minutes": 1}, ("idle", "its GPUs did nothing for 1m 5s; idle_kill_minutes is 1")),
    ("not for so long", {}, {"idle_kill_minutes": 1.1}, None),
]


@pytest.mark.parametrize("reason, fields, keys, expected", STOPS, ids=[case[0] for case in STOPS])
def test_find_stop(reason, fields, keys, expected):
    limits = nexus.find_limits(running("rrr", **fields), config(**keys).jobs)
    cause, line = nexus.find_stop(limits, nexus.Use(100.0, 3 * GB, 65.0)) or ("", "")
    assert (cause, expected and expected[1] in line) == (expected[0] if expected else "", expected and True), reason


def test_each_limit_stops():
    assert {expected[0] for *_, expected in STOPS if expected} == set(nexus.LIMITS.values())


WARNINGS = [  # reason, fields of a job, how long it has run, keys, the signal
    ("not asked for", {"timeout_seconds": 100}, 99, {}, None), ("no time limit", {"warn": "USR1@10s"}, 99, {}, None),
    ("not yet", {"warn": "USR1@10s", "timeout_seconds": 100}, 89, {}, None),
    ("now", {"warn": "USR1@10s", "timeout_seconds": 100}, 90, {}, "USR1"),
    ("the configuration's limit", {"warn": "INT@1m"}, 60, {"timeout_seconds": 90}, "INT"),
    ("nothing is known of it yet", {"warn": "USR1@10s", "timeout_seconds": 100}, None, {}, None),
]


@pytest.mark.parametrize("reason, fields, runtime_s, keys, expected", WARNINGS, ids=[case[0] for case in WARNINGS])
def test_find_warning(reason, fields, runtime_s, keys, expected):
    assert nexus.find_warning(nexus.find_limits(running("rrr", **fields), config(**keys).jobs), runtime_s) == expected


def test_a_job_of_which_nothing_is_known_yet_is_not_stopped():
    assert nexus.find_stop(nexus.Limits(timeout_seconds=1, max_memory_gb=1, idle_kill_minutes=1), nexus.Use()) is None


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
    groups = [nexus.Group("g", dice.choice([0, 1, 2])), nexus.Group("h", 0, dice.choice([None, "it fails"]))]
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
        is_free = not one.pending_dependencies and one.retry_at is None and not planned.quotas.check(one.group, one.user)
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


PREEMPTIONS = [  # reason, the preemptible jobs that run (GPUs, since how many seconds, other fields), who waits, who ends
    ("the youngest", {"old": ((0,), 900), "new": ((1,), 90)}, job("aaa"), "new"),
    ("not in its first minute", {"old": ((0,), 900), "new": ((1,), 50)}, job("aaa"), "old"),
    ("none is old enough", {"new": ((0,), 50)}, job("aaa"), None),
    ("two for two", {"old": ((0,), 900), "new": ((1,), 90), "mid": ((2,), 300)}, job("aaa", gpus=2), "new mid"),
    ("one of two GPUs", {"two": ((0, 1), 90), "new": ((2,), 300), "mid": ((3,), 900)}, job("aaa", gpus=2), "two"),
    ("not more than needed", {"two": ((0, 1), 900), "new": ((2,), 90)}, job("aaa"), "new"),
    ("the halves of one GPU", {"aa": ((0,), 900, {"gpus": 0.5}), "bb": ((0,), 900, {"gpus": 0.5}), "cc": ((1,), 100, {"gpus": 0.5}),
                               "firm": ((1,), 900, {"gpus": 0.5, "preemptible": False})}, job("aaa"), "aa bb"),
    ("half of a GPU", {"aa": ((0,), 900, {"gpus": 0.5}), "bb": ((0,), 800, {"gpus": 0.5})}, job("aaa", gpus=0.5), "bb"),
    ("it would not help", {"aa": ((0,), 900)}, job("aaa", gpus=2), None),
    ("who ends already is enough", {"aa": ((0,), 900, {"stop_cause": nexus.PREEMPTED}), "bb": ((1,), 900)}, job("aaa"), ""),
    ("who waits is preemptible, too", {"aa": ((0,), 900)}, job("aaa", preemptible=True), None),
    ("it wants no GPU", {"aa": ((0,), 900)}, job("aaa", gpus=0), None),
    ("it may have only that one", {"aa": ((0,), 900), "bb": ((1,), 90)}, job("aaa", gpu_ids=(0,)), "aa"),
    ("memory that only an empty GPU has", {"aa": ((0,), 900, {"gpus": 0.5, "gpu_mem_mib": 15 * GB})},
     job("aaa", gpus=0.5, gpu_mem_mib=12 * GB), "aa"),
    ("a GPU becomes free anyway", {"aa": ((0,), 900, {"preemptible": False, "stop_cause": "killed"}), "bb": ((1,), 90)}, job("aaa"), ""),
]


@pytest.mark.parametrize("reason, busy, waiting, ended", PREEMPTIONS, ids=[case[0] for case in PREEMPTIONS])
def test_preempt(reason, busy, waiting, ended):
    there = [running(id, indices, **{"started_at": NOW - ago, "gpus": len(indices), "preemptible": True, **dict(*others)})
             for id, (indices, ago, *others) in busy.items()]
    count = 1 + max(index for indices, *_ in busy.values() for index in indices)
    made = state(*there, waiting)
    planned = nexus.plan(made, [gpu(index) for index in range(count)], None, config(cpu_slots=0), NOW)
    assert planned.starts == () and " ".join(id for id, _ in planned.preempted) == (ended or ""), reason
    assert {for_id for _, for_id in planned.preempted} == ({"aaa"} if ended else set())
    kept = [one for one in planned.gpus if one.reserved_for == "aaa"]
    assert bool(kept) == (ended is not None), "what becomes free is for nobody else"


YOUNG = {"preemptible": True, "started_at": NOW - 20}
NEXT = "job {} is preemptible and may be stopped for it in {}".format
WAITS = [  # reason, who runs, who waits, the GPUs, what the wait is told as
    ("in its first minute, beside others", [running("r0", (0,)), running("r1", (1,)), running("new", (2,), **YOUNG)], {},
     [*map(gpu, range(3)), gpu(3, processes=(foreign(user="nobody"),))],
     f"needs 1 GPU; 0 of 4 are free: 3 taken by your own jobs, 1 by nobody; {NEXT('new', '40s')}; "
     "GPU 3 is in use by nobody (pid 4242 python, 16GB)"),
    ("the only GPU", [running("new", **YOUNG)], {}, [gpu()], f"GPU 0 runs job new; {NEXT('new', '40s')}"),
    ("the older one is first", [running("new", (0,), **YOUNG), running("old", (1,), preemptible=True, started_at=NOW - 50)], {},
     [gpu(0), gpu(1)], f"needs 1 GPU; 0 of 2 are free: 2 taken by your own jobs; {NEXT('old', '10s')}"),
    ("two for two", [running("new", (0,), **YOUNG), running("old", (1,), preemptible=True, started_at=NOW - 500)], {"gpus": 2},
     [gpu(0), gpu(1)], "needs 2 GPUs; 0 of 2 are free: 2 taken by your own jobs; "
     "jobs new, old are preemptible and may be stopped for it in 40s"),
    ("it is being stopped", [running("new", stop_cause="preempted", **YOUNG)], {}, [gpu()],
     "GPU 0 runs job new; job new is being stopped for it"),
    ("its end is of no use", [running("new", (0,), **YOUNG), running("r1", (1,))], {"gpus": 2}, [gpu(0), gpu(1)],
     "needs 2 GPUs; 0 of 2 are free: 2 taken by your own jobs"),
    ("who waits is preemptible, too", [running("new", **YOUNG)], {"preemptible": True}, [gpu()], "GPU 0 runs job new"),
    ("another user's", [running("new", user="bob", **YOUNG), running("r1", (1,))], {}, [gpu(0), gpu(1)],
     f"needs 1 GPU; 0 of 2 are free: 1 taken by bob, 1 by your own jobs; {NEXT('new', '40s')}"),
    ("another user waits: who reads this is not bob alone", [running("r0", (0,)), running("r1", (1,), user="bob")], {"user": "bob"},
     [gpu(0), gpu(1)], "needs 1 GPU; 0 of 2 are free: 1 taken by ann, 1 by bob"),
    ("no job is in the way", [], {}, [gpu(0, is_paused=True), gpu(1, is_paused=True)],
     "needs 1 GPU; 0 of 2 are free; GPU 0 is paused; GPU 1 is paused"),
]


@pytest.mark.parametrize("reason, busy, fields, gpus, expected", WAITS, ids=[case[0] for case in WAITS])
def test_who_has_the_gpus_and_what_the_plan_waits_for(reason, busy, fields, gpus, expected):
    waiting = job("aaa", 9, **fields)
    planned = nexus.plan(state(*busy, waiting), gpus, None, config(), NOW)
    assert nexus.format_reasons(nexus.list_reasons(waiting, None, planned, config(), NOW, "ann")) == expected, reason


def test_a_sweep_preempts_as_many_as_it_has_jobs():
    made = state(*[running(f"r{n}", (n,), preemptible=True, started_at=NOW - 100 - n) for n in range(4)],
                 *[job(f"w{n}", n) for n in range(3)])
    planned = nexus.plan(made, [gpu(index) for index in range(4)], None, config(), NOW)
    assert planned.preempted == (("r0", "w0"), ("r1", "w1"), ("r2", "w2"))


@pytest.mark.parametrize("waiting, ends", [
    ([job("w0", gpus=0.5), job("w1", 1, gpus=0.5)], "r0"), ([job("w0", gpus=0.5), job("w1", 1, gpus=0.6)], "r0 two"),
    ([job("w0", gpus=0.5), job("w1", 1, gpus=0.5), job("w2", 2, gpus=0.5)], "r0 two"),
    ([job("w0", gpus=0.5, gpu_ids=(0,)), job("w1", 1, gpus=0.5, gpu_ids=(1,))], "r0 two"),
    ([job("w0", gpu_ids=(1,)), job("w1", 1)], "two"), ([job("w0", gpus=3), job("w1", 1)], "r0 two r3")])
def test_what_becomes_free_for_one_serves_the_next(waiting, ends):
    made = state(running("r0", (0,), preemptible=True, started_at=NOW - 100), running("r3", (3,), preemptible=True, started_at=NOW - 300),
                 running("two", (1, 2), gpus=2, preemptible=True, started_at=NOW - 200), *waiting)
    planned = nexus.plan(made, [gpu(index) for index in range(4)], None, config(), NOW)
    assert " ".join(id for id, _ in planned.preempted) == ends


def test_no_more_are_preempted_than_a_quota_lets_start():
    there = [running(f"r{n}", (n,), preemptible=True, started_at=NOW - 100 - n) for n in range(3)]
    waiting = [job(f"w{n}", n, group="few") for n in range(3)]
    made = state(*there, *waiting, groups=[nexus.Group("few", limit=1)])
    planned = nexus.plan(made, [gpu(index) for index in range(3)], None, config(), NOW)
    assert planned.preempted == (("r0", "w0"),)
    assert words(made.jobs["w0"], planned) == "needs 1 GPU; 0 of 3 are free: 3 taken by ann; job r0 is being stopped for it"
    planned = nexus.plan(state(*there, job("www")), [gpu(index) for index in range(3)], None, config(max_running=3), NOW)
    assert planned.preempted == (), "it could not start in its place"


def test_the_memory_of_who_is_preempted_is_free_then():
    """In a container nothing lists its processes."""
    made = state(running("aa", preemptible=True, started_at=NOW - 100), job("aaa", gpu_mem_mib=12 * GB))
    for processes, ended in (((), "aa"), ((ours("aa", 15),), "aa"), ((foreign(),), "")):
        planned = nexus.plan(made, [gpu(0, memory_used_mib=15 * GB, processes=processes)], None, config(), NOW)
        assert "".join(id for id, _ in planned.preempted) == ended


def test_what_was_preempted_comes_after_all_that_is_not():
    """Else it would take its GPU back, and be stopped again a minute later."""
    made = state(job("old", 1, preemptible=True), job("new", 2))
    planned = nexus.plan(made, [gpu(0), gpu(1)], None, config(), NOW)
    assert [one.job_id for one in planned.starts] == [one.id for one in nexus.list_pending(made)] == ["new", "old"]


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


# What becomes of a job whose attempt has ended

OOM = "Traceback\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
LAUNCH = nexus.Result(None, cause="launch", cause_line="cannot fork", may_pass=True)
ENDS = [  # reason, fields of the job, exit code or Result, stderr, keys, status, facts
    ("it went well", {}, 0, "a warning\n", {}, "completed", {"exit_code": 0, "cause": None, "cause_line": None, "signal": None}),
    ("it did not", {}, 3, "x\nValueError: y\n", {}, "failed", {"exit_code": 3, "cause": "exit", "cause_line": "ValueError: y"}),
    ("a signal", {}, 139, "", {}, "failed", {"cause": "signal", "signal": 11, "exit_code": 139}),
    ("somebody stopped it", {"stop_cause": "killed", "stop_line": "by ann"}, 143, "", {}, "cancelled",
     {"cause": "killed", "cause_line": "by ann", "signal": 15}),
    ("its time was up", {"stop_cause": "timeout", "stop_line": "stopped after 2h"}, 143, "", {}, "failed",
     {"cause": "timeout", "cause_line": "stopped after 2h"}),
    ("it had succeeded before it was signaled", {"stop_cause": nexus.PREEMPTED}, nexus.Result(0, ended_itself=True), "", {}, "completed",
     {"cause": None, "exit_code": 0}),
    ("somebody wanted its end", {"stop_cause": "killed"}, nexus.Result(0, ended_itself=True), "", {}, "cancelled", {"cause": "killed"}),
    ("it is retried", {"retries": 1, "attempt": 1}, 3, "", {}, "pending",
     {"retry_at": NOW + 5, "finished_at": NOW, "runtime_seconds": 60.0, "exit_code": 3, "cause": "exit", "exclusive": False}),
    ("the wait doubles", {"retries": 3, "attempts": (failed_attempt(1),)}, 3, "", {}, "pending", {"retry_at": NOW + 10}),
    ("a thousand retries do not wait for ever", {"retries": 1000, "attempts": tuple(failed_attempt(n) for n in range(1, 900))}, 3, "", {},
     "pending",
     {"retry_at": NOW + 3600}),
    ("out of the GPU's memory", {}, 1, OOM, {}, "failed", {"cause": "cuda-oom",
                                                           "cause_line": "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"}),
    ("then it is alone at its next attempt", {"retries": 1}, 1, OOM, {}, "pending", {"exclusive": True}),
    ("it ran out of memory, and coped", {}, 0, OOM, {}, "completed", {"cause": None}),
    ("but not without end", {"attempts": (failed_attempt(1, "launch"),) * 4}, LAUNCH, "", {}, "failed",
     {"cause": "launch", "cause_line": "cannot fork"}),
    ("what will never pass is not tried again", {"retries": 5}, nexus.Result(None, cause="launch", cause_line="cd: no"), "", {}, "failed",
     {"cause": "launch", "cause_line": "cd: no"}),
    ("nor retries launches", {"retries": 2, "attempts": (failed_attempt(1), failed_attempt(2))}, LAUNCH, "", {}, "pending",
     {"retry_at": NOW + 5}),
    ("what was requeued is no failure", {"retries": 1, "attempts": (failed_attempt(1, nexus.REQUEUED),)}, 3, "", {}, "pending",
     {"retry_at": NOW + 5}),
    ("its own time of end", {}, nexus.Result(0, NOW - 7), "", {}, "completed", {"finished_at": NOW - 7}),
    ("never before its start", {}, nexus.Result(0, NOW - 500), "", {}, "completed", {"finished_at": NOW - 60}),
]


@pytest.mark.parametrize("reason, fields, result, stderr, keys, status, facts", ENDS, ids=[case[0] for case in ENDS])
def test_judge_end(reason, fields, result, stderr, keys, status, facts):
    one = running("aaa", (0,), **fields)
    result = result if isinstance(result, nexus.Result) else nexus.Result(result)
    found, told = nexus.judge_end(one, result, nexus.Evidence(stderr), 60.0, config(**keys).jobs, NOW)
    assert (found, {name: told[name] for name in facts}) == (status, facts), reason
    after = nexus.change_job(one, status=found, **told).value
    assert after.status == status and (status == "pending") == (after.retry_at is not None)
    assert after.attempts[-1].runtime_seconds == 60.0 and len(after.attempts) == len(one.attempts)
    assert (after.current == nexus.NO_ATTEMPT) == (status == "pending"), "a job that waits again has nothing of its last attempt"
    kept = json.loads(nexus.encode_json(after))
    assert nexus.decode_row("jobs", "aaa", kept) == after, "the journal can keep it"


@pytest.mark.parametrize("result", [nexus.Result(0), nexus.Result(1, ended_itself=True)], ids=["it was signaled", "it had failed"])
def test_what_was_preempted_waits_again(result):
    one = running("abc", stop_cause=nexus.PREEMPTED, stop_line="job b needs its GPUs")
    assert nexus.judge_end(one, result, nexus.Evidence(""), 60.0, config().jobs, NOW)[0] == "pending"


KILLS = [  # reason, exit code, fields of the job, how many the kernel had ended before and has now, whether that is the cause
    ("one meanwhile", 137, {}, 0, 1, True), ("none", 137, {}, 3, 3, False), ("another signal", 139, {}, 0, 1, False),
    ("an exit", 1, {}, 0, 1, False), ("nexus sent it", 137, {"stop_cause": "timeout"}, 0, 1, False),
    ("unknown before", 137, {}, None, 1, False), ("unknown now", 137, {}, 0, None, False),
]


@pytest.mark.parametrize("reason, code, fields, before, now, is_cause", KILLS, ids=[case[0] for case in KILLS])
def test_whether_the_kernel_lacked_memory(reason, code, fields, before, now, is_cause):
    one, result = running("abc", **fields), nexus.Result(code)
    told = nexus.explain_kill(one, result, before, now)
    assert told == (nexus.Result(137, cause="signal", cause_line=nexus.LACK_OF_MEMORY) if is_cause else result)
    assert nexus.decode("Result", json.loads(nexus.encode_json(told)), is_strict=True) == told, "a node's agent may say it"
    status, facts = nexus.judge_end(one, told, nexus.Evidence("loss 0.5\n"), 60.0, config().jobs, NOW)
    if is_cause:
        assert (status, facts["signal"], facts["cause"], facts["cause_line"]) == (nexus.FAILED, 9, "signal", nexus.LACK_OF_MEMORY)
    elif fields:
        assert facts["cause"] == "timeout"


def test_what_was_seen_of_it_is_kept():
    one, samples = running("aaa", retries=1), {"peak_rss_mib": 5.0, "cpu_seconds": 2.0}
    told = nexus.judge_end(one, nexus.Result(0), nexus.Evidence(samples=nexus.Usage(**samples)), 60.0, config().jobs, NOW)[1]
    assert {name: told[name] for name in samples} == samples
    told = nexus.judge_end(one, nexus.Result(3), nexus.Evidence("x", (12, 1234)), 60.0, config().jobs, NOW)[1]
    assert told["log_base"] == (12, 1234), "its next attempt's part of the logs begins there"


def test_what_went_wrong_with_its_logs_is_told():
    told = nexus.judge_end(running("aaa"), nexus.Result(1), nexus.Evidence("x\n", error="the disk is full"), 60.0, config().jobs, NOW)[1]
    assert (told["cause"], told["cause_line"], told["notes"]) == ("exit", "the disk is full", ())
    one = running("aaa", notes=("umask",))
    told = nexus.judge_end(one, nexus.Result(0), nexus.Evidence(error="the disk is full"), 60.0, config().jobs, NOW)[1]
    assert (told["cause"], told["cause_line"], told["notes"]) == (None, None, ("umask", "the disk is full"))


GROUP_ENDS = [  # reason, group before, (status, cause, whether soon, whether more wait), failures after, part of the hold
    ("the first fails", nexus.Group("g"), ("failed", "exit", True, True), 1, None),
    ("the second", nexus.Group("g", failures=1), ("failed", "exit", True, True), 2, None),
    ("the third", nexus.Group("g", failures=2), ("failed", "exit", True, True), 0,
     "last with: ValueError: x (fix the error, then: nexus resume --group g)"),
    ("it did not fail soon", nexus.Group("g", failures=2), ("failed", "exit", False, True), -1, None),
    ("one went well", nexus.Group("g", failures=2), ("completed", None, True, True), -1, None),
    ("one had gone well before", nexus.Group("g", failures=-1), ("failed", "exit", True, True), -1, None),
    ("one that was killed says nothing", nexus.Group("g", failures=2), ("cancelled", "killed", True, True), 2, None),
    ("nor one whose parent failed", nexus.Group("g", failures=2), ("cancelled", "dependency", True, True), 2, None),
    ("nothing is left to hold", nexus.Group("g", failures=2), ("failed", "exit", True, False), 0, None),
    ("it is held already", nexus.Group("g", hold="x"), ("failed", "exit", True, True), 0, "x"),
]


@pytest.mark.parametrize("reason, group, end, failures, hold", GROUP_ENDS, ids=[case[0] for case in GROUP_ENDS])
def test_count_group_end(reason, group, end, failures, hold):
    status, cause, is_soon, has_pending = end
    made = nexus.count_group_end(group, status, cause, is_soon, "ValueError: x", has_pending)
    assert made.failures == failures and (hold in made.hold if hold else made.hold is None), reason
    assert (made.name, made.limit) == (group.name, group.limit)


def test_memory_in_a_container_where_no_process_shows():
    """What is used is the jobs' own then, and is not counted beside what they declared."""
    one = running("aaa", (0,), gpus=0.25, gpu_mem_mib=10000)
    assert nexus.find_room(gpu(0, memory_total_mib=24000, memory_used_mib=10000), [one]) == 14000
    assert nexus.find_room(gpu(0, memory_total_mib=24000, memory_used_mib=0), [one]) == 14000
    assert nexus.find_room(gpu(0, memory_total_mib=24000, memory_used_mib=12000), [one]) == 12000


# The guard of GPUs


def ends(*words):
    """`A0-` is a failure soon after its start of program A on GPU 0; `+` a success, `~` a failure later; `A01-` on both GPUs;
    `Ax0-` the same program with another argument.  Each began when the one before it ended.
    """
    made = []
    for number, word in enumerate(words):
        command, gpus = re.fullmatch(r"([A-Z][a-z]?)(\d+).", word).groups()
        uuids = tuple(f"GPU-{index}" for index in gpus)
        made.append(nexus.Ended(uuids, " --x ".join(command), word[-1] == "+", word[-1] == "-", NOW + number))
    return made


GUARDS = [  # reason, what ended, in its order, keys, whether GPU 0 is bad
    ("three in a row, two programs, while others ran well elsewhere", ends("A0-", "B0-", "A1+", "B1+", "A0-"), {}, True),
    ("one went well in between", ends("A0-", "B0-", "A1+", "C0+", "A0-"), {}, False),
    ("one program only: it is the program", ends("A0-", "A0-", "B1+", "A0-"), {}, False),
    ("nothing ran well elsewhere", ends("A0-", "B0-", "C0-"), {}, False),
    ("never, if it is off", ends("A0-", "B0-", "A1+", "A0-"), {"guard_failures": 0}, False),
    ("a sweep: one program, which runs elsewhere", ends("Aa0-", "Ab0-", "Ac1+", "Ad0-"), {}, True),
    ("a job on several GPUs ran well there", ends("A0-", "B0-", "C01+", "A1+", "A0-"), {}, False),
]


@pytest.mark.parametrize("reason, ended, keys, expected", GUARDS, ids=[case[0] for case in GUARDS])
def test_find_bad_gpu(reason, ended, keys, expected):
    found = nexus.find_bad_gpu(ended, "GPU-0", config(**keys).gpu)
    assert (found is not None) is expected, (reason, found)
    assert not found or "in a row failed there within 10 s of their start" in found


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


# When jobs will start, as far as that can be told

ESTIMATES = [  # reason, jobs, run times, keys, {pending job: seconds from now}
    ("one after the other", [running("rrr"), job("aaa", 2), job("bbb", 3)], {"rrr": 100, "aaa": 7, "bbb": 1}, {}, {"aaa": 40, "bbb": 47}),
    ("nobody knows the running one's", [running("rrr"), job("aaa", 2)], {"aaa": 5}, {}, {}),
    ("the running one takes longer than was known", [running("rrr"), job("aaa", 2)], {"rrr": 30, "aaa": 5}, {}, {}),
    ("a little longer: as much again", [running("rrr"), job("aaa", 2)], {"rrr": 55, "aaa": 5}, {}, {"aaa": 5}),
    ("what comes after one that nobody knows anything of", [running("rrr"), job("aaa", 2), job("bbb", 3), job("ccc", 4)],
     {"rrr": 100, "aaa": 5, "ccc": 5}, {}, {"aaa": 40, "bbb": 45}),
    ("its next attempt", [job("aaa", 2, retry_at=NOW + 3)], {"aaa": 5}, {}, {"aaa": 3}),
    ("a job that started at time 0", [running("rrr", started_at=0.0), job("aaa", 2)], {"rrr": NOW + 40, "aaa": 5}, {}, {"aaa": 40}),
]


@pytest.mark.parametrize("reason, jobs, run_times, keys, expected", ESTIMATES, ids=[case[0] for case in ESTIMATES])
def test_estimate_starts(reason, jobs, run_times, keys, expected):
    made = nexus.estimate_starts(jobs, [], run_times, [gpu(0)], config(**keys), NOW)
    assert made == {id: NOW + seconds for id, seconds in expected.items()}, reason


def test_memory_that_cannot_be_seen_is_taken_to_end_with_the_jobs_there():
    jobs, busy = [running("rrr"), job("aaa", 2)], gpu(0, memory_used_mib=9000)
    assert nexus.estimate_starts(jobs, [], {"rrr": 100, "aaa": 5}, [busy], config(), NOW) == {"aaa": NOW + 40}


RUN_TIMES = [  # reason, fields of the job, what has finished, seconds
    ("as it expects", {"expected_time": 5}, [finished("fff", runtime_seconds=60.0)], 5),
    ("as the same command took", {}, [finished("fff", runtime_seconds=60.0)], 60),
    ("as others of its group took", {"command": "x", "group": "g"}, [finished("fff", command="y", group="g", runtime_seconds=7.0)], 7),
    ("the command before the group", {"command": "x", "group": "g"}, [finished("eee", command="x", runtime_seconds=3.0),
                                                                     finished("fff", command="y", group="g", runtime_seconds=7.0)], 3),
    ("failures say nothing", {}, [finished("fff", status="failed", runtime_seconds=60.0)], None),
]


@pytest.mark.parametrize("reason, fields, done, seconds", RUN_TIMES, ids=[case[0] for case in RUN_TIMES])
def test_know_run_times(reason, fields, done, seconds):
    assert nexus.know_run_times([job("aaa", **fields)], done) == {"aaa": seconds}, reason


# Where Slurm places the jobs

def handed(id, number=1, **fields):
    return job(id, number, **{"status": "submitted", "slurm_key": "0123456789ab", "slurm_id": "12", "attempt": 1, **fields})


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


@pytest.mark.parametrize("fields, minutes", [
    ({}, None), ({"timeout_seconds": 0}, None), ({"timeout_seconds": 0.5}, 1), ({"timeout_seconds": 60}, 1), ({"timeout_seconds": 60.1}, 2),
    ({"expected_time": 60}, 2)])
def test_slurm_is_told_of_minutes(fields, minutes):
    asked, settings = handed("abc", **fields), config()
    command = nexus.build_sbatch(asked, "0-0", "/h", nexus.find_limits(asked, settings.jobs), settings.slurm)
    assert [word for word in command if word.startswith("--time=")] == ([f"--time={minutes}"] if minutes else [])


def ended(state, reason="None", **fields):
    return nexus.SlurmJob("12", state, reason, "n1", NOW - 10, NOW, **fields)


GOOD, BAD, TERMINATED = (nexus.Result(code, NOW, 2.5) for code in (0, 3, 143))
NO_TREE = nexus.Result(None, NOW, 0.0, "launch", "no tree")
SLURM_ENDS = [  # reason, what Slurm says, job.sh's result, whether it began, Slurm's words, (exit code, cause, a word of the line)
    ("well", ended("COMPLETED"), GOOD, True, "", (0, None, None)),
    ("an exit code", ended("COMPLETED"), BAD, True, "", (3, None, None)),
    ("it could not be launched there", ended("COMPLETED"), NO_TREE, True, "", (None, "launch", "no tree")),
    ("the time was up", ended("TIMEOUT", "TimeLimit"), TERMINATED, True, "JOB 12 DUE TO TIME LIMIT", (143, "timeout", "DUE TO TIME LIMIT")),
    ("the time was up, without words", ended("TIMEOUT", "TimeLimit"), None, True, "", (None, "timeout", "was TIMEOUT (TimeLimit) on n1")),
    ("and it ended well all the same", ended("TIMEOUT"), GOOD, True, "", (0, "timeout", "TIMEOUT")),
    ("a deadline", ended("DEADLINE"), TERMINATED, True, "", (143, "timeout", "DEADLINE")),
    ("memory", ended("OUT_OF_MEMORY"), nexus.Result(137, NOW, 2.5), True, "Detected 1 oom-kill event(s)", (137, "host-memory", "oom-kill")),
    ("memory, where no cgroup tells", ended("FAILED", "JobLaunchFailure"), None, True, "Exceeded job memory limit",
     (None, "host-memory", "memory limit")),
    ("its node", ended("NODE_FAIL", "NodeDown"), None, True, "", (None, "node-fail", "NODE_FAIL (NodeDown) on n1")),
    ("its node, before it began", ended("BOOT_FAIL"), None, False, "", (None, "node-fail", "BOOT_FAIL")),
    ("a more urgent job", ended("PREEMPTED"), TERMINATED, True, "", (143, "preempted", "PREEMPTED")),
    ("somebody", ended("CANCELLED"), TERMINATED, True, "JOB 12 CANCELLED AT", (143, "killed", "CANCELLED AT")),
    ("job.sh was killed", ended("FAILED", "NonZeroExitCode"), None, True, "", (None, "session-lost", "killed on n1")),
    ("nobody saw the log folder", ended("FAILED", "NonZeroExitCode"), None, False, "cannot open",
     (None, "launch", "file system that the nodes")),
    ("no node can", ended("FAILED", "BadConstraints"), None, False, "", (None, "launch", "BadConstraints")),
    ("forgotten, with a result", None, BAD, True, "", (3, None, None)),
    ("forgotten, without", None, None, True, "", (None, "session-lost", "not known")),
    ("forgotten, and somebody had cancelled it", None, TERMINATED, True, "JOB 12 CANCELLED AT 17:01", (143, "killed", "CANCELLED AT")),
    ("it ended well all the same", None, GOOD, True, "JOB 12 CANCELLED AT 17:01", (0, "killed", "CANCELLED AT")),
    ("its job.sh too was killed", None, None, True, "JOB 12 CANCELLED AT 17:01", (None, "killed", "CANCELLED AT")),
    ("forgotten, and the time was up", None, TERMINATED, True, "CANCELLED AT 17:01 DUE TO TIME LIMIT", (143, "timeout", "TIME LIMIT")),
    ("forgotten, and its node was down", None, None, True, "CANCELLED AT 17:01 DUE TO NODE FAILURE, SEE", (None, "node-fail", "NODE")),
    ("forgotten, and a more urgent job came", None, TERMINATED, True, "CANCELLED AT 17:01 DUE TO PREEMPTION", (143, "preempted", "DUE")),
    ("forgotten, and out of memory", None, nexus.Result(137), True, "Detected 1 oom-kill event(s)", (137, "host-memory", "oom-kill")),
]


@pytest.mark.parametrize("reason, seen, result, has_begun, words, wanted", SLURM_ENDS, ids=[case[0] for case in SLURM_ENDS])
def test_how_a_slurm_job_ended(reason, seen, result, has_begun, words, wanted):
    made = nexus.judge_slurm_end(seen, nexus.Claim(4711, 100) if has_begun else None, result, 60, words, "/h/logs/job_abc").result
    assert (made.exit_code, made.cause) == wanted[:2] and (wanted[2] or "") in (made.cause_line or "")


ENDED, KILLED = (nexus.SlurmJob("12", state, nodes="n1") for state in ("COMPLETED", "CANCELLED"))
DECISIONS = [  # reason, what Slurm says, who has claimed the attempt, result, so long ago (s), what it is
    ("it ended", ENDED, "begun", GOOD, 0, "over"),
    ("its result is on its way", ENDED, "begun", None, 59, None),
    ("its result has not come", ENDED, "begun", None, 60, "over"),
    ("it ended before it began", ENDED, "not begun", None, 3, "over"),
    ("or is that only not seen yet", ENDED, "not begun", None, 2, None),
    ("it found its attempt taken", ENDED, "ours", None, 0, "requeued"),
    ("its node went down", ended("NODE_FAIL"), "begun", None, 0, "over"),
    ("somebody cancelled it", KILLED, "begun", TERMINATED, 0, "over"),
    ("it was cancelled before it began", KILLED, "not begun", None, 3, "over"),
    ("it never came there", None, "not begun", None, 0, "requeued"),
    ("the claim was the last that a service did", None, "ours", None, 0, "requeued"),
    ("it ended before it wrote its claim", ENDED, "open", None, 60, "requeued"),
    ("or is that only not seen yet, though it is written", ENDED, "open", None, 59, None),
    ("it is queued again before it wrote its claim", ended(nexus.REQUEUED_BY_SLURM), "open", None, 60, "requeued"),
    ("forgotten before it wrote its claim", None, "open", None, 60, "requeued"),
    ("or is it forgotten that it runs", None, "open", None, 59, None),
    ("cancelled before it wrote its claim", KILLED, "open", None, 3, "over"),
    ("a claim that is not seen yet, with a result", ENDED, "open", GOOD, 0, "over"),
    ("forgotten, with a result", None, "begun", BAD, 0, "over"),
    ("forgotten, without", None, "begun", None, 3, "over"),
]


@pytest.mark.parametrize("reason, seen, claim, result, waited_s, wanted", DECISIONS, ids=[case[0] for case in DECISIONS])
def test_decide(reason, seen, claim, result, waited_s, wanted):
    claim = {"not begun": None, "ours": nexus.OUR_CLAIM, "open": nexus.OPEN_CLAIM, "begun": nexus.Claim(4711, 100)}[claim]
    news = nexus.judge_slurm_end(seen, claim, result, waited_s, "", "/h/logs/job_abc")
    assert (news and ("requeued" if news.requeue else "over")) == wanted and (news is None or news.is_end)


def test_match_slurm_jobs():
    """By the key in the comment; by the id only where somebody has rewritten the comment."""
    live = [handed("aaa", slurm_key="k1", slurm_id="1"), handed("bbb", slurm_key="k2", slurm_id="2"),
            handed("ccc", slurm_key="k3", slurm_id="3")]
    one, two, three = nexus.SlurmJob("9", "PENDING", key="k1"), nexus.SlurmJob("2", "RUNNING"), nexus.SlurmJob("3", "RUNNING", key="")
    assert nexus.match_slurm_jobs(live, [one, two, three]) == {"k1": one, "k2": two}


# Several machines

def there(node, *indices, **fields):
    """GPUs of another machine."""
    return [gpu(index, node=node, uuid=f"{node}/GPU-{index}", **fields) for index in indices]


def running_there(id, node, indices=(0,), **fields):
    return running(id, indices, node=node, gpu_uuids=tuple(f"{node}/GPU-{index}" for index in indices), **fields)


def view(name, **facts):
    return nexus.NodeView(name, **{"cpu_slots": 2, **facts})


TWO = [view("n1"), view("n2")]
OWN = [gpu(0)]
BOTH = [*there("n1", 0, 1), *there("n2", 0, 1)]

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
    ("where it can start, however much there is to do", [
        running_there("rrr", "n1", expected_time=10**6), running_there("sss", "n2", (0, 1), expected_time=70), job("aaa", 3)], BOTH, TWO,
     {"aaa": ("n1", (1,))}),
    ("pinned", [job("aaa", only_node="n2")], [*OWN, *BOTH], TWO, {"aaa": ("n2", (0,))}),
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


FAR_REASONS = [  # what is shown, job that waits, GPUs, machines, part of the reason
    ("the machine it is for is away", job("aaa", only_node="n1"), BOTH, [view("n1", reason="n1 cannot be used since 15:30: cut"), TWO[1]],
     "n1 cannot be used since 15:30: cut"),
    ("there is no such machine any more", job("aaa", only_node="n7"), BOTH, TWO, "there is no node n7"),
    ("none can run it", job("aaa", excluded_nodes=(("n1", "no directory"), ("n2", "no git"), ("", "no GPU"))), BOTH, TWO,
     "never: n1 cannot run it: no directory; n2 cannot run it: no git; this machine cannot run it: no GPU"),
    ("none can run it, for one reason", job("aaa", excluded_nodes=(("n1", "no git"), ("n2", "no git"), ("", "no GPU"))), BOTH, TWO,
     "never: n1, n2 cannot run it: no git; this machine cannot run it: no GPU"),
    ("its directory is on none", job("aaa", cwd="/data"), [*BOTH, gpu(0, lease_holder="bob")],
     [view(name, folders=frozenset()) for name in ("n1", "n2")], "the directory /data does not exist on n1, n2: make it there, or"),
    ("which GPU of which machine", job("aaa"), [*there("n1", 0, fault="GPU is lost"), *there("n2", 0, lease_holder="bob")], TWO,
     "needs 1 GPU; 0 of 2 are free; GPU n1:0 is unusable (GPU is lost)"),
    ("its directory is nowhere", job("aaa", cwd="/data", only_node="n1"), BOTH, [view("n1", folders=frozenset()), TWO[1]],
     "the directory /data does not exist on n1: make it there"),
    ("no machine has as many", job("aaa", gpus=3), BOTH, TWO, "never: wants 3 GPUs, no machine has more than 2"),
    ("CPU slots", job("aaa", gpus=0), [], [view("n1", cpu_slots=0), view("n2", reason="n2 is away")],
     "all 0 CPU slots are taken (cpu_slots); all CPU slots of n1 are taken; n2 is away"),
    ("a machine that is away is told once", job("aaa"), [*there("n1", *range(8)), *there("n2", 0, is_paused=True)],
     [view("n1", reason="n1 is away"), TWO[1]], "GPU n2:0 is paused; n1 is away"),
]


@pytest.mark.parametrize("reason, one, gpus, nodes, part", FAR_REASONS, ids=[case[0] for case in FAR_REASONS])
def test_every_wait_for_other_machines_has_a_reason(reason, one, gpus, nodes, part):
    made, keys = state(one), {"cpu_slots": 0}
    planned = nexus.plan(made, gpus, None, config(**keys), NOW, nodes)
    assert not planned.starts and part in words(one, planned, config(**keys)), reason


def test_estimates_know_other_machines():
    jobs = [running_there("rrr", "n1"), job("aaa", 2, only_node="n1"), job("bbb", 3)]
    made = nexus.estimate_starts(jobs, [], {"rrr": 100, "aaa": 5, "bbb": 5}, [*there("n1", 0), *there("n2", 0)], config(), NOW, TWO)
    assert made == {"aaa": NOW + 40, "bbb": NOW}


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


# The processes of a job

def process(pid, parent, name="python", session=10, cpu_ticks=0):
    return nexus.Process(pid, 100 + pid, parent, session, "S", 1, name=name, cpu_ticks=cpu_ticks)


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
]


@pytest.mark.parametrize("reason, members, seen, told, readers, pids", SIGNALED, ids=[case[0] for case in SIGNALED])
def test_choose_signaled(reason, members, seen, told, readers, pids):
    seen = [one.pid for one in members] if seen is None else seen
    assert [one.pid for one in nexus.choose_signaled(members, seen, told, readers)] == pids


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

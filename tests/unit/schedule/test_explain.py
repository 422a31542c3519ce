"""Every job that waits has a reason."""

import pytest
from makers import GB, NOW, config, foreign, gpu, job, mig_slice, running, state
from plans import BOTH, MIXED, ONE_PROCESS, TWO, WAITED, box, box_user, failed_attempt, handed, held_by, started, there, view, want, words

import nexus

REASONS = [  # what is shown, jobs, GPUs, keys, part of the reason why the last of the jobs waits
    ("whose job it is", [running("rrr"), job("aaa", 2)], [gpu(0)], {}, "GPU 0 runs job rrr"),
    ("another user's pid, program and memory", [job("aaa")], [gpu(0, processes=(foreign(),))], {},
     "GPU 0 is in use by bob (pid 4242 python, 16GB)"),
    ("memory", [job("aaa")], [gpu(0, memory_used_mib=20 * GB)], {"share_with_others": True},
     "GPU 0 has 20GB of its memory in use by others"),
    ("memory that nobody owns", [job("aaa")], [gpu(0, memory_used_mib=9000)], {},
     "GPU 0 is in use by processes that cannot be seen (8.8GB, above max_unseen_mem_mib)"),
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
     "all 1 CPU slots are taken ([jobs] cpu_slots)"),
    ("max_running", [running("rrr"), job("aaa", 2)], [gpu(0), gpu(1)], {"max_running": 1}, "1 job run"),
    ("max_running_per_user", [running("rrr"), job("aaa", 2)], [gpu(0), gpu(1)], {"max_running_per_user": 1},
     "1 job of ann runs, as many as max_running_per_user allows"),
    ("kept for another", [running("rrr", (1,)), job("aaa", 2, gpus=2, **WAITED), job("bbb", 3, gpu_ids=(0,))],
     [gpu(0), gpu(1)], {}, "GPU 0 is kept for job aaa (2 GPUs)"),
    ("several kept for another", [running("rrr", (2,)), job("aaa", 2, gpus=3, **WAITED), job("bbb", 3)], [gpu(0), gpu(1), gpu(2)], {},
     "needs 1 GPU; 0 of 3 are free: 1 taken by ann; GPUs 0, 1 are kept for job aaa (3 GPUs)"),
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


def test_what_can_never_be_is_told_in_full():
    for fields, told in (({"gpus": 4}, "wants 4 GPUs, this machine has 2"),
                         ({"gpu_ids": (5,)}, "wants 1 GPU of index 5, this machine has 0; the indices are 0, 1"),
                         ({"gpus": 2, "gpu_mem_mib": 80 * GB}, "wants 2 GPUs with 80GB, this machine has 0; the largest has 24GB")):
        assert nexus.find_never(job("aaa", **fields), {"": [gpu(0), gpu(1)]}).detail == told


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
    ("and it wants no GPU", job("aaa", gpus=0, cwd="/data", only_node="n1"), BOTH, [view("n1", folders=frozenset()), TWO[1]],
     "the directory /data does not exist on n1: make it there"),
    ("no machine has as many", job("aaa", gpus=3), BOTH, TWO, "never: wants 3 GPUs, no machine has more than 2"),
    ("CPU slots", job("aaa", gpus=0), [], [view("n1", cpu_slots=0), view("n2", reason="n2 is away")],
     "all 0 CPU slots are taken ([jobs] cpu_slots); all 0 CPU slots of n1 are taken ([jobs] cpu_slots); n2 is away"),
    ("a machine that is away is told once", job("aaa"), [*there("n1", *range(8)), *there("n2", 0, is_paused=True)],
     [view("n1", reason="n1 is away"), TWO[1]], "GPU n2:0 is paused; n1 is away"),
]


@pytest.mark.parametrize("reason, one, gpus, nodes, part", FAR_REASONS, ids=[case[0] for case in FAR_REASONS])
def test_every_wait_for_other_machines_has_a_reason(reason, one, gpus, nodes, part):
    made, keys = state(one), {"cpu_slots": 0}
    planned = nexus.plan(made, gpus, None, config(**keys), NOW, nodes)
    assert not planned.starts and part in words(one, planned, config(**keys)), reason


ASKED_FOR = {"retry_at": NOW + 9, "attempts": (failed_attempt(1),)}
CODES = [  # the last job of the state waits, for one GPU; GPUs, keys, what plan() is told besides, (code, subject) of each reason
    (state(job("aaa", is_held=True)), [gpu()], {}, {}, [("held", "job")]),
    (state(job("aaa"), paused=True), [gpu()], {}, {}, [("paused", "queue")]),
    (state(job("aaa", is_held=True, begin_at=NOW + 9, pending_dependencies=("rrr", "sss"))), [gpu()], {}, {},
     [("held", "job"), ("begin-time", "begin_at"), ("dependency", "rrr,sss")]),
    (state(job("aaa", group="g"), groups=[nexus.Group("g", hold="it fails")]), [gpu()], {}, {}, [("held", "g")]),
    (state(job("aaa", group="g", is_held=True), groups=[nexus.Group("g", hold="it fails")]), [gpu()], {}, {},
     [("held", "job"), ("held", "g")]),
    (state(job("aaa", pending_groups=("g", "h"))), [gpu()], {}, {}, [("dependency", "g"), ("dependency", "h")]),
    (state(job("aaa", after_process=(4711, 100))), [gpu()], {}, {}, [("dependency", "pid")]),
    (state(job("aaa", **ASKED_FOR)), [gpu()], {}, {}, [("begin-time", "retry")]),
    (state(job("aaa", begin_at=NOW + 8, **ASKED_FOR)), [gpu()], {}, {}, [("begin-time", "retry")]),
    (state(job("aaa", begin_at=NOW + 10, **ASKED_FOR)), [gpu()], {}, {}, [("begin-time", "begin_at")]),
    (state(running(), job("aaa", 2, group="g"), running("rrr", group="g"), groups=[nexus.Group("g", limit=1)]), [gpu()], {}, {},
     [("quota", "g")]),
    (state(running(), job("aaa", 2)), [gpu(1)], {"max_running_per_user": 1}, {}, [("quota", "ann")]),
    (state(running(user="bob"), job("aaa", 2)), [gpu(1)], {"max_running": 1}, {}, [("quota", "max_running")]),
    (state(job("aaa", gpus=0)), [gpu()], {"cpu_slots": 0}, {}, [("resources", "cpu_slots")]),
    (state(running("rrr"), job("aaa", 2)), [gpu()], {}, {}, [("resources", "rrr")]),
    (state(running("rrr"), running("sss", (1,)), job("aaa", 3)), [gpu(0), gpu(1)], {}, {}, [("resources", "gpus")]),
    (state(running("rrr", gpus=0.4), running("sss", gpus=0.4), job("aaa", 3, gpus=0.5)), [gpu()], {}, {}, [("resources", "rrr,sss")]),
    (state(job("aaa")), [gpu(lease_holder="bob")], {}, {}, [("resources", "0")]),
    (state(job("aaa", gpu_mem_mib=20 * GB)), [gpu(memory_used_mib=10 * GB)], {"share_with_others": True}, {}, [("resources", "0")]),
    (state(job("aaa")), [gpu(fault="GPU is lost")], {}, {}, [("node-down", "0")]),
    (state(job("aaa")), [gpu(is_paused=True)], {}, {}, [("paused", "0")]),
    (state(job("aaa")), [gpu(3, compute_mode="Prohibited")], {}, {}, [("held", "3")]),
    (state(job("aaa", gpu_type="RTX")), [gpu(is_mig=True)], {}, {}, [("held", "0")]),
    (state(job("aaa")), [gpu()], {}, {"error": "nvidia-smi is silent"}, [("node-down", "")]),
    (state(job("aaa", gpus=0)), [gpu()], {"cpu_slots": 0}, {"nodes": [view("n1", reason="n1 is away")]}, [("resources", "cpu_slots")]),
    (state(job("aaa", gpus=0, only_node="n1")), [gpu()], {}, {"nodes": [view("n1", reason="n1 is away")]}, [("node-down", "n1")]),
    (state(job("aaa")), [gpu()], {}, {"reason": "fork: no memory"}, [("node-down", "")]),
    (state(job("aaa")), [gpu()], {}, {}, [("resources", "")]),
    # What can never be
    (state(job("aaa", gpus=2)), [gpu()], {}, {}, [("never", "gpus")]),
    (state(job("aaa", gpu_type="H100")), [gpu()], {}, {}, [("never", "gpu_type")]),
    (state(job("aaa", gpu_ids=(5,))), [gpu()], {}, {}, [("never", "gpu_ids")]),
    (state(job("aaa", gpu_mem_mib=200 * GB)), [gpu()], {}, {}, [("never", "gpu_mem_mib")]),
    (state(job("aaa", gpus=0.5)), [gpu(compute_mode=ONE_PROCESS)], {}, {}, [("never", "compute_mode")]),
    (state(job("aaa", only_node="n7")), [gpu()], {}, {}, [("never", "node")]),
    # Where Slurm places them
    (state(handed("rrr"), job("aaa", 2)), [], {"launcher": "slurm", "max_submitted": 1}, {}, [("quota", "max_submitted")]),
    (state(job("bbb"), job("aaa", 2)), [], {"launcher": "slurm"}, {}, [("resources", "slurm")]),
    (state(job("aaa")), [], {"launcher": "slurm"}, {"error": "squeue is silent"}, [("node-down", "slurm")]),
    (state(job("aaa", gpus=0.5)), [], {"launcher": "slurm"}, {}, [("never", "gpus")]),
    (state(job("aaa", gpu_type="a 100")), [], {"launcher": "slurm"}, {}, [("never", "gpu_type")]),
    (state(job("aaa", gpu_ids=(1,))), [], {"launcher": "slurm"}, {}, [("never", "gpu_ids")]),
]


@pytest.mark.parametrize("made, gpus, keys, told, expected", CODES, ids=[" and ".join(map(" ".join, case[-1])) for case in CODES])
def test_a_reason_has_a_code_and_the_name_of_what_is_in_the_way(made, gpus, keys, told, expected):
    settings, waiting = config(**keys), made.jobs["aaa"]
    planned = nexus.plan(made, gpus, told.get("error"), settings, NOW, told.get("nodes", ()), told.get("reason", ""))
    reasons = nexus.list_reasons(waiting, made.groups.get(waiting.group or ""), planned, settings, NOW)
    assert [(reason.code, reason.subject) for reason in reasons] == expected


BOB = box_user("bob", [0], [want(jobs=60)])
CARL = box_user("carl", [1], [want(jobs=2)])
SHARED = [  # what is shown, jobs, the box, GPUs, the reason why the last of the jobs waits
    ("who is next, where it is the reader", [job("aaa")], box(BOB, wants=[want()]), held_by("bob", 0),
     "GPU 0 is held by the nexus of bob; bob has 60 waiting; the next GPU is for your first job"),
    ("who is next, where it is another", [job("aaa")], box(BOB, wants=[want()], had={0: 900.0}), held_by("bob", 0),
     "GPU 0 is held by the nexus of bob; bob has 60 waiting; the next turn is bob's"),
    ("the job of somebody with a token", [job("aaa", user="dora")], box(BOB, wants=[want()]), held_by("bob", 0),
     "GPU 0 is held by the nexus of bob; bob has 60 waiting; the next turn is ann's"),
    ("who has how many", [running("rrr", (2,)), job("aaa", 2)], box(BOB, CARL, wants=[want()]),
     [*held_by("bob", 0), *held_by("carl", 1), gpu(2)],
     "needs 1 GPU; 0 of 3 are free: 1 taken by bob, 1 by carl, 1 by your own jobs; bob has 60 waiting, carl has 2 waiting; "
     "the next GPU is for your first job"),
    ("a GPU is another's turn", [job("aaa")], box(box_user("bob", [], [want(jobs=9)]), had={0: 9.0}, wants=[want()]), [gpu(0)],
     "GPU 0 is bob's turn; bob has 9 waiting; the next turn is bob's"),
    ("another collects", [job("aaa")], box(box_user("bob", [], [want(2, collects=True)]), CARL, had={0: 9.0}, wants=[want()]),
     [gpu(0), *held_by("carl", 1)],
     "needs 1 GPU; 0 of 2 are free: 1 taken by carl; GPU 0 is bob's turn (for a job of 2 GPUs); "
     "bob has 1 waiting, carl has 2 waiting; the next turn is bob's"),
    ("it collects", [job("aaa", gpus=4, **WAITED)], box(CARL, wants=[want(4, collects=True)]),
     [gpu(0), *held_by("carl", 1), gpu(2), gpu(3)],
     "needs 4 GPUs; 3 of 4 are free: 1 taken by carl; carl has 2 waiting; you have 3 of the 4 GPUs"),
    ("nobody waits", [job("aaa")], box(box_user("bob", [0]), wants=[want()]), held_by("bob", 0),
     "GPU 0 is held by the nexus of bob; the next GPU is for your first job"),
    ("its holder does not take turns", [job("aaa")], box(box_user("bob", [], [want(jobs=9)]), wants=[want()]), held_by("carl", 0),
     "GPU 0 is held by the nexus of carl; bob has 9 waiting"),
    ("others use other GPUs", [running("rrr", (2,)), job("aaa", 2, gpu_ids=(2,))], box(box_user("bob", [0], [want(indices=(0, 1))])),
     [*held_by("bob", 0), gpu(1), gpu(2)], "GPU 2 runs job rrr"),
]


@pytest.mark.parametrize("reason, jobs, shared, gpus, told", SHARED, ids=[case[0] for case in SHARED])
def test_who_else_waits_and_whose_turn_is_next_is_told(reason, jobs, shared, gpus, told):
    planned = nexus.plan(state(*jobs), gpus, None, config(), NOW, box=shared)
    found, = nexus.list_reasons(jobs[-1], None, planned, config(), NOW, "ann")
    assert nexus.format_reason(found) == told, reason


def test_when_a_job_of_several_gpus_collects_them_is_told_where_others_want_them():
    def facts(is_shared=True, **fields):
        one = job("aaa", **{"gpus": 2, "created_at": NOW - 60, **fields})
        return nexus.describe_place(one, 0, None, (), config(reserve_after_seconds=600).jobs, NOW, is_shared)[2:]

    jobs = [running("rrr", (1,)), job("aaa", 2, gpus=2, **WAITED)]
    planned = nexus.plan(state(*jobs), [gpu(0), gpu(1)], None, config(), NOW)
    told = nexus.describe_place(jobs[1], 0, None, planned.gpus, config(reserve_after_seconds=600).jobs, NOW)[2:]
    assert told == ["it has waited for over 10m: GPUs are kept for it, 1 of 2 so far",
                    "it starts when job rrr has ended: when that is, no --expect and no time limit tells"]
    assert nexus.describe_place(jobs[1], 0, NOW + 60, planned.gpus, config().jobs, NOW)[3:] == ["it will start in about 1m"]
    assert facts() == ["if it waits for 9m more, GPUs are kept for it as they become free"]
    assert facts(is_shared=False) == facts(gpus=1) == facts(created_at=NOW - 700) == []


def test_what_another_user_has_is_not_yet_kept():
    one = job("aaa", gpus=2, **WAITED)
    planned = nexus.plan(state(one), [gpu(0), *held_by("carl", 1)], None, config(), NOW, box=box(CARL, wants=[want(2, collects=True)]))
    assert any("GPUs are kept for it, 1 of 2 so far" in fact for fact in nexus.describe_place(
        one, 0, None, planned.gpus, config().jobs, NOW, True))

"""Section 6: what to do next, decided from values alone."""

import heapq
import random

import pytest
from makers import GB, NOW, config, foreign, gpu, job, running, state

import nexus

LONG_AGO = NOW - 3600
PASSED = {"passed_over_at": LONG_AGO}


def started(made):
    """{job id: GPU indices} of a plan."""
    return {start.job_id: start.gpu_indices for start in made.starts}


PLANS = [  # reason, jobs, GPUs, keys of the configuration, {job id: GPU indices} that start
    ("nothing to do", [], [gpu(0)], {}, {}),
    ("a free GPU", [job("aaa")], [gpu(0)], {}, {"aaa": (0,)}),
    ("first come, first served", [job("bbb", 2), job("aaa", 1)], [gpu(0)], {}, {"aaa": (0,)}),
    ("priority before age", [job("aaa", 1), job("bbb", 2, priority=0)], [gpu(0)], {}, {"bbb": (0,)}),
    ("the rank before priority: it was moved to the front", [job("aaa", 1, priority=0), job("bbb", order=(-1, 2, 2))],
     [gpu(0)], {}, {"bbb": (0,)}),
    ("two jobs, two GPUs", [job("aaa", 1), job("bbb", 2)], [gpu(0), gpu(1)], {}, {"aaa": (0,), "bbb": (1,)}),
    ("several GPUs for one", [job("aaa", gpus=2)], [gpu(0), gpu(1), gpu(2)], {}, {"aaa": (0, 1)}),
    ("only as many as there are", [job("aaa", gpus=3)], [gpu(0), gpu(1)], {}, {}),
    ("a smaller one passes it", [job("aaa", 1, gpus=2), job("bbb", 2)], [gpu(0)], {}, {"bbb": (0,)}),
    ("one that nexus itself has given out", [running("rrr", (0,)), job("aaa", 2)], [gpu(0), gpu(1)], {}, {"aaa": (1,)}),
    ("the running one's GPU got another index: its uuid counts",
     [running("rrr", (0,), gpu_uuids=("GPU-1",)), job("aaa", 2)], [gpu(0), gpu(1)], {}, {"aaa": (0,)}),
    ("indices have gaps", [job("aaa", gpus=2)], [gpu(0), gpu(2)], {}, {"aaa": (0, 2)}),
    ("only those it may have", [job("aaa", gpu_ids=(1, 2))], [gpu(0), gpu(1)], {}, {"aaa": (1,)}),
    ("none of those it may have", [job("aaa", gpu_ids=(5,))], [gpu(0)], {}, {}),
    ("who may have any leaves nothing for who may have one", [job("aaa", 1), job("bbb", 2, gpu_ids=(0,))],
     [gpu(0), gpu(1)], {}, {"aaa": (0,)}),
    ("another user's process", [job("aaa")], [gpu(0, processes=(foreign(),))], {}, {}),
    ("shared with others", [job("aaa")], [gpu(0, processes=(foreign(),))], {"share_with_others": True}, {"aaa": (0,)}),
    ("a process of ours that is ending", [job("aaa")], [gpu(0, processes=(foreign(job_id="xxx"),))], {}, {"aaa": (0,)}),
    ("a desktop's 200 MiB", [job("aaa")], [gpu(0, memory_used_mib=214)], {}, {"aaa": (0,)}),
    ("memory in use, whoever's", [job("aaa")], [gpu(0, memory_used_mib=20 * GB)], {}, {}),
    ("memory in use by our own", [job("aaa")], [gpu(0, memory_used_mib=20 * GB, processes=(
        foreign(job_id="xxx", memory_mib=20 * GB),))], {}, {"aaa": (0,)}),
    ("just under the threshold", [job("aaa")], [gpu(0, memory_used_mib=19 * GB)], {}, {"aaa": (0,)}),
    ("a threshold of 0 is for GPUs nobody else uses at all", [job("aaa"), job("bbb", 2)],
     [gpu(0, memory_used_mib=1), gpu(1)], {"mem_threshold": 0}, {"aaa": (1,)}),
    ("less free memory than asked for", [job("aaa")], [gpu(0, memory_used_mib=5 * GB)], {"min_free_mem_mib": 20 * 1024},
     {}),
    ("just enough of it", [job("aaa")], [gpu(0, memory_used_mib=4 * GB)], {"min_free_mem_mib": 20 * 1024},
     {"aaa": (0,)}),
    ("unknown memory is no obstacle", [job("aaa")], [gpu(0, memory_total_mib=None, memory_used_mib=None)], {},
     {"aaa": (0,)}),
    ("unless a minimum is asked for", [job("aaa")], [gpu(0, memory_total_mib=None, memory_used_mib=None)],
     {"min_free_mem_mib": 1}, {}),
    ("100 % of what the query itself does", [job("aaa")], [gpu(0, utilization=100)], {}, {"aaa": (0,)}),
    ("a lost GPU reads 0 MiB", [job("aaa")], [gpu(0, fault="GPU is lost")], {}, {}),
    ("a paused GPU", [job("aaa")], [gpu(0, is_paused=True), gpu(1)], {}, {"aaa": (1,)}),
    ("a GPU cut in slices", [job("aaa")], [gpu(0, is_mig=True)], {}, {}),
    ("leased by another user's nexus", [job("aaa")], [gpu(0, lease_holder="bob")], {}, {}),
    ("not among those nexus may use", [job("aaa")], [gpu(0), gpu(1)], {"ids": [1]}, {"aaa": (1,)}),
    ("a CPU job needs no GPU", [job("aaa", gpus=0)], [], {}, {"aaa": ()}),
    ("but a slot", [job("aaa", gpus=0), job("bbb", 2, gpus=0), job("ccc", 3, gpus=0)], [], {"cpu_slots": 2},
     {"aaa": (), "bbb": ()}),
    ("a running one has one", [running("rrr", ()), job("aaa", 2, gpus=0)], [], {"cpu_slots": 1}, {}),
    ("no slots, no CPU jobs, GPU jobs all the same", [job("aaa", gpus=0), job("bbb", 2)], [gpu(0)], {"cpu_slots": 0},
     {"bbb": (0,)}),
    ("no more than max_running", [job("aaa"), job("bbb", 2), job("ccc", 3, gpus=0)], [gpu(0), gpu(1)],
     {"max_running": 1}, {"aaa": (0,)}),
    ("running ones count", [running("rrr"), job("aaa", 2)], [gpu(0), gpu(1)], {"max_running": 1}, {}),
    ("it was lowered while more ran", [running("rrr"), running("sss", (1,), number=2), job("aaa", 3)],
     [gpu(0), gpu(1), gpu(2)], {"max_running": 1}, {}),
    ("passed over long enough: the free GPU is kept",
     [running("rrr", (1,)), job("aaa", 2, gpus=2, **PASSED), job("bbb", 3)], [gpu(0), gpu(1)], {}, {}),
    ("passed over not long enough", [running("rrr", (1,)), job("aaa", 2, gpus=2, passed_over_at=NOW - 299),
                                     job("bbb", 3)],
     [gpu(0), gpu(1)], {}, {"bbb": (0,)}),
    ("only as many are kept as it needs", [running("rrr", (3,)), job("aaa", 2, gpus=4, **PASSED), job("bbb", 3)],
     [gpu(0), gpu(1), gpu(2), gpu(3), gpu(4)], {}, {"aaa": (0, 1, 2, 4)}),
    ("nothing is kept of those it may not have",
     [running("rrr", (0,)), job("aaa", 2, gpu_ids=(0,), **PASSED), job("bbb", 3)], [gpu(0), gpu(1)], {}, {"bbb": (1,)}),
    ("CPU jobs pass a job that keeps GPUs", [running("rrr", (1,)), job("aaa", 2, gpus=2, **PASSED),
                                             job("bbb", 3, gpus=0)],
     [gpu(0), gpu(1)], {}, {"bbb": ()}),
    ("who stands before it takes what is free",
     [running("rrr", (1,)), job("aaa", 1, priority=0), job("bbb", 2, gpus=2, **PASSED),
     job("ccc", 3)], [gpu(0), gpu(1)], {}, {"aaa": (0,)}),
    ("one that starts now gives its GPU back too, so the other is kept",
     [job("aaa", 1, priority=0), job("bbb", 2, gpus=2, **PASSED), job("ccc", 3)], [gpu(0), gpu(1)], {}, {"aaa": (0,)}),
    ("nothing is kept for a job that asks for more than there are", [job("aaa", 1, gpus=3, **PASSED), job("bbb", 2)],
     [gpu(0), gpu(1)], {}, {"bbb": (0,)}),
    ("nor beside a lost GPU", [job("aaa", 1, gpus=2, **PASSED), job("bbb", 2)], [gpu(0), gpu(1, fault="GPU is lost")],
     {}, {"bbb": (0,)}),
    ("nor beside another user's", [job("aaa", 1, gpus=2, **PASSED), job("bbb", 2)],
     [gpu(0), gpu(1, processes=(foreign(),))], {}, {"bbb": (0,)}),
    ("nor beside one that is paused when its job has ended",
     [running("rrr", (1,)), job("aaa", 2, gpus=2, **PASSED), job("bbb", 3)],
     [gpu(0), gpu(1, is_paused=True)], {}, {"bbb": (0,)}),
    ("nor beside a lost one whose job still hangs",
     [running("rrr", (1,)), job("aaa", 2, gpus=2, **PASSED), job("bbb", 3)],
     [gpu(0), gpu(1, fault="GPU is lost")], {}, {"bbb": (0,)}),
]


@pytest.mark.parametrize("reason, jobs, gpus, keys, expected", PLANS, ids=[case[0] for case in PLANS])
def test_plan(reason, jobs, gpus, keys, expected):
    made = nexus.plan(state(*jobs), gpus, None, config(**keys), NOW)
    assert started(made) == expected, (reason, made.reasons)


def test_starts_name_the_gpus_by_uuid_too():
    made = nexus.plan(state(job("aaa", gpus=2)), [gpu(0), gpu(2, uuid="GPU-x")], None, config(), NOW)
    assert made.starts == (nexus.Start("aaa", (0, 2), ("GPU-0", "GPU-x")),)


def test_starts_come_in_the_queues_order():
    jobs = [job("aaa", 3), job("bbb", 2, gpus=0), job("ccc", 1, gpu_ids=(1,)), job("ddd", 4, priority=0)]
    made = nexus.plan(state(*jobs), [gpu(0), gpu(1), gpu(2)], None, config(), NOW)
    assert [start.job_id for start in made.starts] == ["ddd", "ccc", "bbb", "aaa"]


def test_nothing_starts_when_paused():
    made = nexus.plan(state(job("aaa"), job("bbb", 2, gpus=0), paused=True), [gpu(0)], None, config(), NOW)
    assert made.starts == () and made.passed_over == ()
    assert set(made.reasons) == {(1, None), (0, None)} and all("paused" in reason for reason in made.reasons.values())


def test_readings_that_cannot_be_relied_upon_start_no_gpu_job():
    made = nexus.plan(state(job("aaa"), job("bbb", 2, gpus=0)), [gpu(0)], "nvidia-smi is silent since 15:30", config(),
                      NOW)
    assert started(made) == {"bbb": ()}
    assert made.reasons == {(1, None): "nvidia-smi is silent since 15:30"}


REASONS = [  # what is shown, jobs, GPUs, keys, part of the reason why jobs of the kind (1, None) or another wait
    ("whose job it is", [running("rrr"), job("aaa", 2)], [gpu(0)], {}, "GPU 0 runs job rrr"),
    ("another user's pid, program and memory", [job("aaa")], [gpu(0, processes=(foreign(),))], {},
     "GPU 0 is in use by bob (pid 4242 python, 16GB)"),
    ("a process of an unknown user", [job("aaa")],
     [gpu(0, processes=(foreign(user=None, name=None, memory_mib=None),))], {},
     "GPU 0 is in use by somebody (pid 4242)"),
    ("of many processes some", [job("aaa")], [gpu(0, processes=tuple(foreign(pid) for pid in range(1, 6)))], {},
     "and 2 more"),
    ("memory", [job("aaa")], [gpu(0, memory_used_mib=20 * GB)], {}, "GPU 0 has 20GB of its memory in use by others"),
    ("too little memory", [job("aaa")], [gpu(0, memory_used_mib=5 * GB)], {"min_free_mem_mib": 20 * 1024},
     "GPU 0 has 19GB free, less than min_free_mem_mib"),
    ("no memory told", [job("aaa")], [gpu(0, memory_total_mib=None)], {"min_free_mem_mib": 1},
     "GPU 0 does not tell its memory"),
    ("a fault", [job("aaa")], [gpu(0, fault="GPU is lost")], {}, "GPU 0 is unusable (GPU is lost)"),
    ("a pause", [job("aaa")], [gpu(0, is_paused=True)], {}, "GPU 0 is paused"),
    ("slices", [job("aaa")], [gpu(0, is_mig=True)], {}, "GPU 0 is cut into MIG slices"),
    ("a lease", [job("aaa")], [gpu(0, lease_holder="bob")], {}, "GPU 0 is held by the nexus of bob"),
    ("not ours to give", [job("aaa")], [gpu(0)], {"ids": [1]}, "GPU 0 is not among [gpu] ids"),
    ("every GPU's", [running("rrr"), job("aaa", 2)], [gpu(0), gpu(1, is_paused=True)], {},
     "GPU 0 runs job rrr; GPU 1 is paused"),
    ("of many GPUs some", [job("aaa")], [gpu(index, is_paused=True) for index in range(12)], {}, "and 4 more"),
    ("not there", [job("aaa", gpu_ids=(5,))], [gpu(0)], {}, "GPU 5 is not there"),
    ("none there", [job("aaa")], [], {}, "it needs 1 GPU, and there are 0"),
    ("too many asked for", [job("aaa", gpus=4)], [gpu(0), gpu(1)], {}, "it needs 4 GPUs, and there are 2"),
    ("some of several", [running("rrr"), job("aaa", 2, gpus=2)], [gpu(0), gpu(1)], {},
     "it needs 2 GPUs, and 1 of 2 can be had now: GPU 0 runs job rrr"),
    ("the slots", [running("rrr", ()), job("aaa", 2, gpus=0)], [], {"cpu_slots": 1},
     "all 1 CPU slots are taken (cpu_slots)"),
    ("max_running", [running("rrr"), job("aaa", 2)], [gpu(0), gpu(1)], {"max_running": 1}, "1 job run"),
    ("kept for another", [running("rrr", (1,)), job("aaa", 2, gpus=2, **PASSED), job("bbb", 3, gpu_ids=(0,))],
     [gpu(0), gpu(1)], {}, "GPU 0 is kept for job aaa"),
    ("started a moment ago", [job("aaa"), job("bbb", 2)], [gpu(0)], {}, "GPU 0 runs job aaa"),
]


@pytest.mark.parametrize("reason, jobs, gpus, keys, part", REASONS, ids=[case[0] for case in REASONS])
def test_every_wait_has_a_reason(reason, jobs, gpus, keys, part):
    made = nexus.plan(state(*jobs), gpus, None, config(**keys), NOW)
    waiting = jobs[-1]
    assert part in made.reasons[nexus.kind_of(waiting)], reason


PASSING = [  # reason, jobs, GPUs, who is passed over for the first time
    ("a smaller one starts first", [job("aaa", 1, gpus=2), job("bbb", 2)], [gpu(0)], ("aaa",)),
    ("nobody starts", [job("aaa", 1, gpus=2), job("bbb", 2, gpus=3)], [gpu(0)], ()),
    ("who started before it does not pass it", [job("aaa", 1), job("bbb", 2, gpus=2)], [gpu(0)], ()),
    ("it was passed over already", [job("aaa", 1, gpus=2, passed_over_at=NOW - 5), job("bbb", 2)], [gpu(0)], ()),
    ("two kinds", [job("aaa", 1, gpus=2), job("bbb", 2, gpus=3), job("ccc", 3)], [gpu(0)], ("aaa", "bbb")),
]


@pytest.mark.parametrize("reason, jobs, gpus, expected", PASSING, ids=[case[0] for case in PASSING])
def test_who_is_passed_over(reason, jobs, gpus, expected):
    assert nexus.plan(state(*jobs), gpus, None, config(), NOW).passed_over == expected, reason


# What holds for every plan


def random_gpu(index, dice):
    fields = dice.choice([{}] * 6 + [
        {"fault": "GPU is lost"}, {"is_paused": True}, {"is_mig": True}, {"lease_holder": "bob"},
        {"processes": (foreign(),)},
        {"memory_used_mib": 23 * GB}, {"memory_total_mib": None, "memory_used_mib": None}])
    return gpu(index, **fields)


def random_case(dice):
    """A queue, GPUs and a configuration."""
    gpus = [random_gpu(index, dice) for index in range(dice.choice([0, 1, 2, 4, 8])) if dice.random() < 0.9]
    made, number, indices = nexus.State(), 0, [one.index for one in gpus] + [90, 91]
    dice.shuffle(indices)
    while indices and dice.random() < 0.4:              # those that run, some on GPUs that are gone or unusable now
        number += 1
        held, indices = indices[: dice.choice([0, 1, 1, 2])], indices[2:]
        nexus.apply(made, nexus.JobAdded(running(letters(number), tuple(held), number=number)))
    for _ in range(dice.randrange(15)):
        number += 1
        count = dice.choice([0, 1, 1, 1, 2, 2, 4, 9])
        some = tuple(sorted(dice.sample(range(9), dice.randrange(max(1, count), 10))))
        allowed = some if count and dice.random() < 0.4 else None
        priority = dice.choice([0, 1, 1, 2])
        nexus.apply(made, nexus.JobAdded(job(
            letters(number), order=(dice.choice([0, 0, 0, -1]), priority, number), priority=priority, gpus=count,
            gpu_ids=allowed, passed_over_at=dice.choice([None, None, NOW - 5, LONG_AGO]))))
    keys = {"cpu_slots": dice.choice([0, 1, 4]), "max_running": dice.choice([0, 0, 0, 2, 5]),
            "share_with_others": dice.random() < 0.2, "ids": dice.choice([[], [], [0, 1, 2]])}
    return made, gpus, dice.choice([None] * 9 + ["nvidia-smi is silent"]), config(**keys)


def letters(number):
    return "".join(nexus.ID_LETTERS[number // 49**place % 49] for place in (2, 1, 0))


@pytest.mark.parametrize("block", range(8))
def test_every_plan_is_sound(block):
    for seed in range(block * 150, block * 150 + 150):
        made, gpus, trouble, settings = random_case(random.Random(seed))
        planned = nexus.plan(made, gpus, trouble, settings, NOW)
        assert planned == nexus.plan(made, gpus, trouble, settings, NOW), "the same values give the same plan"
        check_gpus(made, gpus, trouble, settings, planned)
        check_limits(made, settings, planned)
        check_order(made, gpus, trouble, settings, planned)
        check_reasons(made, planned)
        check_passed_over(made, planned)


def check_gpus(made, gpus, trouble, settings, planned):
    """Each GPU is given once, to one that may have it, when nothing stands in the way."""
    by_index = {one.index: one for one in gpus}
    held = {uuid for one in made.running.values() for uuid in one.gpu_uuids}
    given = [index for start in planned.starts for index in start.gpu_indices]
    assert len(given) == len(set(given)), "no GPU twice"
    assert not (trouble and given)
    for start in planned.starts:
        one = made.jobs[start.job_id]
        assert one.status == nexus.PENDING and len(start.gpu_indices) == one.gpus
        assert one.gpu_ids is None or set(start.gpu_indices) <= set(one.gpu_ids)
        assert start.gpu_uuids == tuple(by_index[index].uuid for index in start.gpu_indices)
        for index in start.gpu_indices:
            assert by_index[index].uuid not in held
            assert nexus.find_obstacle(by_index[index], settings.gpu) is None


def check_limits(made, settings, planned):
    on_cpu = [start for start in planned.starts if not made.jobs[start.job_id].gpus]
    before = [one for one in made.running.values() if not one.gpus]
    assert not on_cpu or len(before) + len(on_cpu) <= settings.jobs.cpu_slots
    most = settings.jobs.max_running
    assert not most or not planned.starts or len(made.running) + len(planned.starts) <= most
    assert len({start.job_id for start in planned.starts}) == len(planned.starts)


def check_order(made, gpus, trouble, settings, planned):
    """Nobody waits whom the GPUs that were left at its turn would have done for, except for a job that keeps some."""
    starting = {start.job_id: start for start in planned.starts}
    held = {uuid for one in made.running.values() for uuid in one.gpu_uuids}
    free = {one.index for one in gpus if not trouble and one.uuid not in held
            and nexus.find_obstacle(one, settings.gpu) is None}
    slots = settings.jobs.cpu_slots - sum(not one.gpus for one in made.running.values())
    places = settings.jobs.max_running - len(made.running) if settings.jobs.max_running else 10**9
    someone_keeps = False
    assert [start.job_id for start in planned.starts] == [id for _, id in made.order if id in starting]
    for _, id in made.order:
        one = made.jobs[id]
        allowed = free if one.gpu_ids is None else free & set(one.gpu_ids)
        if id in starting:
            free -= set(starting[id].gpu_indices)
            slots -= not one.gpus
            places -= 1
        elif one.gpus:
            assert len(allowed) < one.gpus or places <= 0 or someone_keeps, f"{id} could have started"
            someone_keeps |= one.passed_over_at == LONG_AGO
        else:
            assert slots <= 0 or places <= 0, f"{id} could have started"
    for line in made.kinds.values():
        turns = [id in starting for _, id in line]
        assert turns == sorted(turns, reverse=True), "first come, first served within a kind"


def check_reasons(made, planned):
    starting = {start.job_id for start in planned.starts}
    waiting = {kind for kind, line in made.kinds.items() if any(id not in starting for _, id in line)}
    assert set(planned.reasons) == waiting
    assert all(reason.strip() and "\n" not in reason for reason in planned.reasons.values())


def check_passed_over(made, planned):
    starting = {start.job_id for start in planned.starts}
    last = max((made.jobs[id].order for id in starting), default=())
    for id in planned.passed_over:
        one = made.jobs[id]
        assert one.status == nexus.PENDING and id not in starting and one.passed_over_at is None and one.order < last
    assert len(planned.passed_over) == len(set(planned.passed_over))
    for line in made.kinds.values():                # and nobody who was is left out
        heads = [made.jobs[id] for _, id in line if id not in starting][:1]
        for head in heads:
            on_gpu = head.gpus and "max_running" not in planned.reasons[nexus.kind_of(head)]
            assert not (on_gpu and head.order < last and head.passed_over_at is None) or head.id in planned.passed_over


# Through time: a service that does what is planned


class Box:
    """A box on which what is planned is done: jobs run for as long as `lengths` says."""

    def __init__(self, count, **keys):
        self.gpus = [gpu(index) for index in range(count)]
        self.config = config(**keys)
        self.state, self.now, self.number = nexus.State(), NOW, 0
        self.ends, self.lengths, self.began = [], {}, {}

    def add(self, length, priority=1, **fields):
        self.number += 1
        id = letters(self.number)
        self.lengths[id] = length
        nexus.apply(self.state, nexus.JobAdded(job(id, **nexus.next_place(self.state, priority), **fields)))
        return id

    def tick(self, seconds):
        self.now += seconds
        while self.ends and self.ends[0][0] <= self.now:
            id = heapq.heappop(self.ends)[1]
            nexus.apply(self.state, nexus.change_status(self.state.jobs[id], nexus.COMPLETED, self.now))
            nexus.apply(self.state, nexus.JobsRemoved((id,)))
        planned = nexus.plan(self.state, self.gpus, None, self.config, self.now)
        for id in planned.passed_over:
            nexus.apply(self.state, nexus.JobChanged(id, {"passed_over_at": self.now}))
        for start in planned.starts:
            nexus.apply(self.state, nexus.change_status(
                self.state.jobs[start.job_id], nexus.RUNNING, self.now, gpu_indices=start.gpu_indices,
                gpu_uuids=start.gpu_uuids))
            heapq.heappush(self.ends, (self.now + self.lengths[start.job_id], start.job_id))
            self.began[start.job_id] = self.now
        return planned


BIG_JOBS = [  # reason, GPUs, what the big job asks for
    ("all GPUs", 4, {"gpus": 4}),
    ("half of them", 4, {"gpus": 2}),
    ("two by index", 4, {"gpus": 2, "gpu_ids": (1, 3)}),
    ("one by index", 4, {"gpus": 1, "gpu_ids": (2,)}),
]


@pytest.mark.parametrize("reason, count, asked", BIG_JOBS, ids=[case[0] for case in BIG_JOBS])
@pytest.mark.parametrize("seed", range(4))
def test_a_big_job_starts_in_spite_of_a_stream_of_small_ones(reason, count, asked, seed):
    dice, box, longest = random.Random(seed), Box(count, reserve_after_seconds=300), 200
    for _ in range(10):
        box.add(dice.randrange(50, longest))
    box.tick(10)
    big, added_at = box.add(100, **asked), box.now
    while big not in box.began and box.now < added_at + 5000:
        while len(box.state.order) < 8:
            box.add(dice.randrange(50, longest), **dice.choice([{}, {}, {"gpu_ids": (0, 1)}]))
        box.tick(10)
    queue_before = longest * 10 / count
    assert big in box.began and box.began[big] - added_at <= 300 + 2 * longest + queue_before, reason


def test_small_jobs_run_beside_it_until_then():
    box = Box(2, reserve_after_seconds=300)
    box.add(100)
    box.tick(10)
    box.add(100, gpus=2)
    small = [box.add(50) for _ in range(3)]
    for _ in range(20):
        box.tick(10)
    assert box.began[small[0]] == NOW + 20, "a job that has not waited long holds nobody up"


def test_a_stream_of_urgent_jobs_does_not_let_the_unimportant_pass_a_job_that_waited():
    box = Box(2, reserve_after_seconds=300)
    big = box.add(100, gpus=2)
    nexus.apply(box.state, nexus.JobChanged(big, {"passed_over_at": NOW - 301}))
    for _ in range(50):
        if big in box.began:
            return
        box.add(9, priority=0)              # each ends before the next comes
        low = box.add(9, priority=2)
        box.tick(10)
        assert low not in box.began, "GPU 1 is the waiting job's"


@pytest.mark.parametrize("seed", range(12))
def test_every_job_that_can_run_does(seed):
    dice = random.Random(seed)
    box = Box(dice.choice([1, 2, 4]), cpu_slots=dice.choice([1, 2]), max_running=dice.choice([0, 0, 3]),
              reserve_after_seconds=60)
    added = []
    for _ in range(150):
        if len(added) < 60 and dice.random() < 0.7:
            count = dice.randrange(len(box.gpus) + 1)
            allowed = tuple(sorted(dice.sample(range(len(box.gpus)), dice.randrange(count, len(box.gpus) + 1)))) if (
                count and dice.random() < 0.4) else None
            added.append(box.add(dice.randrange(5, 60), priority=dice.choice([0, 1, 2]), gpus=count, gpu_ids=allowed))
        box.tick(5)
    for _ in range(2000):
        if not box.state.jobs:
            break
        box.tick(5)
    assert set(box.began) == set(added) and not box.state.jobs


def test_the_plan_looks_at_kinds_not_at_jobs():
    class CountingLine(list):
        looks = 0

        def __getitem__(self, place):
            CountingLine.looks += 1
            return super().__getitem__(place)

    made = state(*[job(letters(number), number) for number in range(1, 3000)])
    made.kinds = {kind: CountingLine(line) for kind, line in made.kinds.items()}
    planned = nexus.plan(made, [gpu(index) for index in range(4)], None, config(), NOW)
    assert len(planned.starts) == 4 and CountingLine.looks < 20

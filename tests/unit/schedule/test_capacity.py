"""What of a GPU is free, and who else uses it."""

import pytest
from makers import MINUTE, foreign, gpu, means, mig_slice, ours, running

import nexus


def test_memory_in_a_container_where_no_process_shows():
    """What is used is the jobs' own then, and is not counted beside what they declared."""
    one = running("aaa", (0,), gpus=0.25, gpu_mem_mib=10000)
    assert nexus.find_room(gpu(0, memory_total_mib=24000, memory_used_mib=10000), [one]) == 14000
    assert nexus.find_room(gpu(0, memory_total_mib=24000, memory_used_mib=0), [one]) == 14000
    assert nexus.find_room(gpu(0, memory_total_mib=24000, memory_used_mib=12000), [one]) == 12000


ROOMS = [  # reason, used MiB of 24000, processes (job, MiB), MiB that are free for others beside a job that asked for 10000
    ("it has not begun to compute", 0, [], 14000), ("it has taken a part", 4000, [("aaa", 4000)], 14000),
    ("it has taken all", 10000, [("aaa", 10000)], 14000), ("it has taken more", 12000, [("aaa", 12000)], 12000),
    ("of two processes", 10000, [("aaa", 6000), ("aaa", 4000)], 14000),
    ("beside somebody else", 7000, [("aaa", 4000), (None, 3000)], 11000),
    ("beside a job that has ended", 7000, [("aaa", 4000), ("xxx", 3000)], 14000),
]


@pytest.mark.parametrize("reason, used, processes, free", ROOMS, ids=[case[0] for case in ROOMS])
def test_memory_that_a_job_asked_for_is_its_own(reason, used, processes, free):
    there = tuple(nexus.GpuProcess(70 + n, mib, job_id) for n, (job_id, mib) in enumerate(processes))
    seen = gpu(0, memory_total_mib=24000, memory_used_mib=used, processes=there)
    assert nexus.find_room(seen, [running("aaa", (0,), gpus=0.25, gpu_mem_mib=10000)]) == free


READINGS = [  # reason, a GPU, the jobs that have it, percent of the time in which others use it
    ("it is free", gpu(), [], 0),
    ("a job of ours has it", gpu(processes=(ours("abc", 8),), memory_used_mib=8192.0), [running()], 0),
    ("a process of somebody else's", gpu(processes=(foreign(),)), [], 100),
    ("beside a job of ours", gpu(processes=(ours("abc", 8), foreign())), [running()], 100),
    ("memory that no listed process accounts for", gpu(memory_used_mib=9000.0), [], 100),
    ("memory of a job whose processes are not told", gpu(memory_used_mib=9000.0), [running()], 0),
    ("another user's nexus has its lease", gpu(lease_holder="bob"), [], 100),
    ("the MPS server, which stays", gpu(processes=(foreign(name="nvidia-cuda-mps-server"),)), [], 0),
    ("a slice", mig_slice(processes=(foreign(),)), [], 100),
]


@pytest.mark.parametrize("reason, seen, jobs, others", READINGS, ids=[case[0] for case in READINGS])
def test_a_reading_tells_whether_others_use_a_gpu(reason, seen, jobs, others):
    reading = nexus.read_gpu(seen, jobs, nexus.GpuConfig(), MINUTE)
    assert reading == means(others=others, **{name: getattr(seen, name) for name in nexus.SERIES[:4]})

"""What a service takes while nothing changes."""

import pathlib
import re
import time

import live


def measure_cpu_s(pid):
    """The CPU time of all threads of a process."""
    return sum(int(task.read_text().split()[0]) for task in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def test_a_service_with_nothing_to_do_takes_next_to_nothing():
    """30 MB and 1 % of a core, as tests/bench/bench.py measures; on a machine that has much else to do it takes more."""
    with live.Box(gpus=8) as box:
        box.wait(box.add("true"), "completed")
        before, began = measure_cpu_s(box.pid()), time.monotonic()
        time.sleep(6.0)                                 # that nothing happens; the GPUs are read once
        used = (measure_cpu_s(box.pid()) - before) / (time.monotonic() - began)
        memory_mb = int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{box.pid()}/status").read_text())[1]) / 1000
        assert used < 0.06 and memory_mb < 60, (used, memory_mb)

"""nexus beside a real card: real nvidia-smi, real CUDA programs of ours and of somebody else's.

Run by hand, as root, on a machine with a GPU that nobody needs: tests/run tests/gpu.  The programs use the driver's own
library, so that nothing else need be installed there.
"""

import os
import re
import shutil
import subprocess
import sys

import live
import pytest

HOLD = '''
"""Hold MIB of a card's memory for SECONDS, or compute on it: hold.py MIB SECONDS"""
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        told = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(told))
        raise RuntimeError(f"CUDA driver error: {told.value.decode()}")
call("cuInit", 0)
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(int(sys.argv[1]) << 20))
print("holding", sys.argv[1], "MiB", flush=True)
time.sleep(float(sys.argv[2]))
'''


def ask(*arguments):
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def card():
    """Its memory in MiB; the first one, that no program uses."""
    if not shutil.which("nvidia-smi") or not ask("-L").startswith("GPU"):
        pytest.fail("there is no NVIDIA GPU on this machine: nvidia-smi -L")
    if ask("--query-compute-apps=pid", "--format=csv,noheader").strip():
        pytest.fail("a program uses a GPU of this machine: these tests need all of them")
    return int(ask("-i", "0", "--query-gpu=memory.total", "--format=csv,noheader,nounits"))


@pytest.fixture
def box(card):
    found = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
    with live.Box(gpus=None, launcher="screen", environ=found, min_free_mem_mib=0, refresh_rate_seconds=1) as box:
        (box.folder / "hold.py").write_text(HOLD)
        box.folder.chmod(0o755)
        box.hold = lambda mib, seconds: f"{sys.executable} {box.folder}/hold.py {mib} {seconds}"
        yield box
        live.until(lambda: not ask("--query-compute-apps=pid", "--format=csv,noheader").strip() or live.kill_all(f"{box.folder}/"),
                   "the end of all that computes")


def see(box, **expected):
    """Its row of /status, once the row says this."""
    def look():
        row = box.ask("GET", "/status")["gpu_status"][0]
        return row if all(row[key] == value for key, value in expected.items()) else None
    return live.until(look, lambda: f"{expected} in {box.ask('GET', '/status')['gpu_status'][0]}")


def add(box, command, *options):
    done = box.nexus("add", "--gpu-ids", "0", *options, command)
    assert done.returncode == 0, done
    return done.stdout.strip()


def holds(box, job_id):
    live.until(lambda: "holding" in box.logs(job_id, "stdout"), f"{job_id} to hold memory")


def test_a_card(box, card):
    row = see(box, fault=None)
    assert row["memory_total_mib"] == card and row["uuid"].startswith("GPU-") and row["temperature"] > 0, row
    assert "HEALTHY" in box.nexus("health").stdout


def test_a_job_of_ours(box):
    job_id = add(box, box.hold(3000, 600))
    holds(box, job_id)
    row = live.until(lambda: (now := see(box))["memory_used_mib"] >= 3000 and now, "its memory")
    assert row["used_by"] is None, row
    assert "In use" not in box.nexus().stdout and f"Job ID: {job_id}" in box.nexus().stdout
    assert live.until(lambda: box.job(job_id).get("peak_gpu_mem_mib"), "its share of the card's memory") >= 3000
    follower = add(box, f"nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; {box.hold(3000, 0)}")
    assert box.nexus("kill", job_id).returncode == 0
    ended = box.wait(follower)
    assert ended["status"] == "completed" and float(box.logs(follower, "stdout").split()[0]) < 1000, box.logs(follower, "stdout")


def test_somebody_elses(box):
    live.need_root()
    theirs = subprocess.Popen(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *box.hold(2000, 600).split()],
                              env={**os.environ, **box.environ}, stdout=subprocess.PIPE, cwd="/")
    try:
        theirs.stdout.readline()
        live.until(lambda: re.search(rf"GPU 0 .*: In use by \S+ \(pid {theirs.pid} ", box.nexus().stdout), "the card in use")
        job_id = add(box, "nvidia-smi --query-compute-apps=pid --format=csv,noheader")
        live.until(lambda: f"pid {theirs.pid}" in (box.job(job_id)["waiting_for"] or ""), lambda: f"why it waits: {box.job(job_id)}")
    finally:
        theirs.kill()
        theirs.wait()
    box.wait(job_id, "completed")
    assert box.logs(job_id, "stdout") == "", "it began beside somebody else's"


def test_out_of_memory(box, card):
    ended = box.wait(add(box, box.hold(2 * card, 0)), "failed")
    assert (ended["cause"], ended["exit_code"]) == ("cuda-oom", 1) and "out of memory" in ended["cause_line"], ended
    for module, statement in (("torch", "[torch.empty(1 << 30, dtype=torch.uint8, device='cuda') for _ in range(1000)]"),
                              ("cupy", "[cupy.empty(1 << 30, dtype=cupy.uint8) for _ in range(1000)]")):
        tried = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, env={**os.environ, **box.environ})
        if tried.returncode == 0:
            ended = box.wait(add(box, f'{sys.executable} -c "import {module}; {statement}"'), "failed", timeout_s=120)
            assert ended["cause"] == "cuda-oom", ended


def test_shares_by_memory(box, card):
    first, second = (add(box, box.hold(card // 5, 600), "--gpus", "0.5", "--gpu-mem", f"{card // 3}M") for _ in range(2))
    holds(box, first), holds(box, second)
    third = add(box, "true", "--gpus", "0.25")
    fourth = add(box, "true", "--gpu-mem", f"{card * 2 // 3}M")
    live.until(lambda: "GPU 0" in (box.job(third)["waiting_for"] or ""), lambda: box.job(third))
    apps = ask("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits").splitlines()
    assert len(apps) == 2 and all(int(row.split(", ")[1]) >= card // 5 for row in apps), apps
    assert box.nexus("kill", first, second).returncode == 0
    box.wait(third, "completed")
    box.wait(fourth, "completed")


def test_what_a_job_leaves_behind(box):
    """A program that goes on when its job's command has ended is ended: the card is free for the next."""
    job_id = add(box, f"cd {box.folder}; setsid nohup {box.hold(2000, 600)} > left.txt 2>&1 & cd {box.folder}; "
                      "until grep -q holding left.txt; do sleep 0.1; done")
    follower = add(box, "nvidia-smi --query-compute-apps=pid --format=csv,noheader")
    ended = box.wait(job_id, "completed")
    assert [note for note in ended["notes"] if re.search(r"ended after its command: python\S* \(pid \d+\)", note)], ended
    box.wait(follower, "completed")
    assert box.logs(follower, "stdout") == "", "it began beside what the former job had left"


def test_the_service_is_killed(box):
    job_id = add(box, f"{box.hold(1000, 5)}; exit 3")
    holds(box, job_id)
    killed = box.kill_service()
    live.until(lambda: box.pid() not in (None, killed), "the service is back")
    ended = box.wait(job_id, "failed")
    assert (ended["exit_code"], len(ended["attempts"])) == (3, 1), ended

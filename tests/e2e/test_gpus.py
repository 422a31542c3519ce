"""GPUs that fail, hang, hide and belong to others, as a running service sees them through nvidia-smi."""

import json
import subprocess

import live
import pytest
import shared

import nexus

SHOW = "echo $CUDA_VISIBLE_DEVICES $NEXUS_GPU_ID $CUDA_DEVICE_ORDER"
UUIDS = [f"GPU-{index:08x}-0000-0000-0000-{index:012x}" for index in range(9)]


@pytest.fixture(scope="module")
def service():
    with shared.Service(gpus=[{}] * 3, kill_grace_seconds=1) as made:
        yield made


@pytest.fixture
def box(service):
    """It has three GPUs, and at the end of a test again."""
    with service.lend() as box:
        # The last reading may have in use what the test before showed there.
        live.until(lambda: [gpu["is_available"] for gpu in box.status()["gpu_status"]] == [True] * 3, "three free GPUs")
        yield box


def use(box, count):
    """Have only so many of its GPUs be used."""
    for index in range(count, 3):
        box.ask("POST", f"/gpus/{index}/pause")


def busy(gpu, pid, memory=16384, name="python"):
    return {"gpu": gpu, "pid": pid, "name": name, "memory": memory}


def run_everywhere(box, count=4):
    """Start `count` jobs that stay, and tell on which GPUs they are; the others wait."""
    jobs = [box.add("sleep 600") for _ in range(count)]
    live.until(lambda: box.await_probe() or all(
        job["status"] == "running" or "about to" not in job["waiting_for"] for job in map(box.job, jobs)))
    found = [box.job(job_id) for job_id in jobs]
    return sorted(job["gpu_index"] for job in found if job["status"] == "running"), [job for job in found if job["status"] == "pending"]


CARDS = [  # reason, the GPU, whether it is used, what is said of it
    ("as it should be", {}, True, None),
    ("its readings are lost", {"error": "GPU is lost"}, False, "GPU is lost"),
    ("requires reset", {"error": "GPU requires reset", "memory.used": 0}, False, "GPU requires reset"),
    ("hidden, with a gap", {"state": "hidden"}, False, None),
    ("memory N/A", {"memory.used": None, "memory.total": None}, True, None),
    ("cut into nothing", {"mig": []}, False, "in MIG mode without slices"),
    ("prohibited", {"compute_mode": "Prohibited"}, False, "compute mode Prohibited"),
    ("no compute mode told", {"compute_mode": "[Not Supported]"}, True, None),
    ("memory that nobody owns", {"memory.used": 9000}, False, "in use by processes that cannot be seen (8.8GB, above max_unseen_mem_mib)"),
    ("memory of the desktop's", {"memory.used": 2048}, True, None),
]


def test_where_jobs_land():
    with live.Box(gpus=[card for _, card, _, _ in CARDS], is_supervised=False) as box:
        box.status()
        used, waiting = run_everywhere(box, 5)
        assert used == [index for index, card in enumerate(CARDS) if card[2]] and len(waiting) == 5 - len(used)
        for index, (_, _, _, words) in enumerate(CARDS):
            if words:
                assert words in box.gpu(index)["unavailable"] and not box.gpu(index)["is_available"]
                assert words in box.await_reason(waiting[0]["id"], f"GPU {index} ")


def test_a_card_for_one_process_is_not_shared():
    """A share waits for another card; where there is none, the reason says how the mode is changed, and then it starts."""
    one_process = {"compute_mode": "Exclusive_Process"}
    with live.Box(gpus=[one_process, {}], is_supervised=False) as box:
        box.status()
        whole = box.add("sleep 600", gpu_ids=[1])
        box.wait_started(whole)
        share = box.add("sleep 600", gpus=0.5)
        box.await_reason(share, "0 of 2 are free: 1 taken by your own jobs; GPU 0 is in compute mode Exclusive_Process, for one process")
        assert box.wait_started(box.add("sleep 600"))["gpu_index"] == 0
        box.show([one_process, one_process])
        box.await_reason(share, "never: wants 0.5 GPU", "sudo nvidia-smi -i 0 -c DEFAULT")
        assert box.job(share)["reason"]["code"] == "never"
        box.show([{}, one_process])
        box.nexus("kill", "0", "1")
        assert box.wait_started(share)["gpu_index"] == 0
        assert box.wait_started(box.add("sleep 600", gpus=0.5))["gpu_index"] == 0
        box.show([one_process, one_process])
        box.await_reason(box.add("sleep 600", gpus=0.5), "never: wants 0.5 GPU")
        assert box.job(share)["status"] == "running", "what runs there goes on"


def test_devices_where_indices_have_gaps():
    """CUDA counts only what it may open: there an index would name another card.  Programs want a number."""
    with live.Box(gpus=[{}, {"state": "hidden"}, {"state": "lost"}, {}], is_supervised=False) as box:
        box.status()
        job_id = box.add(SHOW, gpu_ids=[3])
        box.wait(job_id, "completed")
        assert box.logs(job_id, "stdout") == "1 3 PCI_BUS_ID\n"


def test_devices_where_a_gpu_hides_later(box):
    box.await_gpu(1, fault=None)
    box.show([{}, {"state": "hidden"}, {}])
    box.await_gpu(1, fault=lambda fault: fault and "does not show it" in fault)
    jobs = [box.add(f"{SHOW}; sleep 600") for _ in range(3)]
    live.until(lambda: all(box.logs(job_id, "stdout") for job_id in jobs[:2]))
    assert [box.logs(job_id, "stdout").split()[0] for job_id in jobs[:2]] == ["0", "1"]
    assert "does not show it" in box.await_reason(jobs[2], "GPU 1")
    box.show([{}, {}, {}])
    assert box.wait_started(jobs[2])["gpu_index"] == 1
    assert '"-q"' not in live.read(box.folder / "smi.log"), "what only MIG slices need"


def test_gpus_that_the_service_was_given():
    """It uses those that it was started with, over a crash, too; a restart takes what holds where it is typed."""
    words = "uses 2 of 4 GPUs (CUDA_VISIBLE_DEVICES=2,GPU-00000003,MIG-7,0)"
    with live.Box(gpus=[{}] * 4, is_starting=False) as box:
        box.nexus("queue", environ={"CUDA_VISIBLE_DEVICES": "2,GPU-00000003,MIG-7,0"})
        shared.crash(box)
        assert words in str(box.health())
        assert "GPU 1 (RTX 3090, 24GB): Not in the service's CUDA_VISIBLE_DEVICES" in box.nexus().stdout
        used, waiting = run_everywhere(box, 3)
        assert used == [2, 3] and "GPU 0 is not in the service's CUDA_VISIBLE_DEVICES" in box.await_reason(waiting[0]["id"])
        refused = box.nexus("add", "--gpus", "3", "true").stderr
        assert "this machine has 2" in refused and words in refused
        box.nexus("restart")
        assert box.wait_started(waiting[0]["id"])["gpu_index"] == 0


A100 = {"name": "NVIDIA A100-SXM4-80GB", "memory.total": 81920}


def slices_of(box):
    return {gpu["place"]: gpu["state"] for gpu in box.status()["gpu_status"]}


def test_seven_jobs_get_seven_slices():
    """And the eighth the card beside them.  CUDA counts no card beside a slice: that one comes by its UUID, too."""
    slices = [{"name": "1g.10gb", "uuid": f"MIG-{number}"} for number in range(7)]
    with live.Box(gpus=[{**A100, "mig": slices}, {}], is_supervised=False) as box:
        box.status()
        jobs = [box.wait_started(box.add(f"{SHOW}; sleep 600")) for _ in range(8)]
        assert [job["gpu_places"] for job in jobs] == [*([f"0.{number}"] for number in range(7)), ["1"]]
        assert [job["gpu_uuids"] for job in jobs] == [*([f"MIG-{number}"] for number in range(7)), [UUIDS[1]]]
        shown = [live.until(lambda id=job["id"]: box.logs(id, "stdout").split()) for job in jobs]
        assert shown == [*([f"MIG-{number}", f"0.{number}", "PCI_BUS_ID"] for number in range(7)), [UUIDS[1], "1", "PCI_BUS_ID"]]
        gpu = next(gpu for gpu in box.status()["gpu_status"] if gpu["place"] == "0.1")
        assert {key: gpu[key] for key in ("index", "slice", "profile", "name", "memory_total", "utilization", "job_ids")} == {
            "index": 0, "slice": 1, "profile": "1g.10gb", "name": "A100-SXM4-80GB MIG 1g.10gb", "memory_total": "10GB",
            "utilization": None, "job_ids": [jobs[1]["id"]]}
        assert "where: GPU 0.1 of" in box.nexus("show", jobs[1]["id"]).stdout
        assert "GPU 0.1 (A100-SXM4-80GB MIG 1g.10gb, 10GB):\n  Job ID" in box.nexus().stdout
        refused = box.nexus("add", "--gpus", "2", "true").stderr
        assert "wants 2 GPUs, this machine has 1 beside MIG slices, of which a job can use only one" in refused


def test_slices_that_come_and_go():
    """A job goes on whose slice is gone; a report that fails makes no slice free."""
    slices = [{"name": "3g.40gb", "uuid": "MIG-a"}, {"name": "3g.40gb", "uuid": "MIG-b"}]
    with live.Box(gpus=[{**A100, "mig": slices}], is_starting=False) as box:
        box.serve("nexus.TROUBLE_INTERVAL_S = 1.0")     # rather than 30 s
        box.status()
        on = box.wait_started(box.add("sleep 600"))
        box.show([{**A100, "mig": ["7g.80gb"]}], report={"stdout": "Failed to initialize NVML: Unknown Error\n", "exit": 255})
        live.until(lambda: slices_of(box) == {"0.0": "Fault", "0.1": "Fault"})
        waits = box.add(SHOW)
        assert "GPU 0.1 is unusable (nvidia-smi: Failed to initialize NVML" in box.await_reason(waits, "GPU 0.1")
        box.show([{**A100, "mig": [{"name": "7g.80gb", "uuid": "MIG-c"}]}])
        box.wait(waits, "completed")
        assert box.logs(waits, "stdout") == "MIG-c 0.0 PCI_BUS_ID\n" and slices_of(box) == {"0.0": "Available"}
        assert f"On GPUs that cannot be seen now:\n  Job ID: {on['id']}" in box.nexus().stdout
        box.show([A100])
        live.until(lambda: slices_of(box) == {"0": "Available"})


def test_commands_take_slices():
    """The number of a card means all its slices."""
    with live.Box(gpus=[{**A100, "mig": ["1g.10gb", "1g.10gb", "2g.20gb"]}, {}], is_supervised=False) as box:
        assert box.nexus("pause", "0.1").stderr == "nexus: GPU 0.1 is paused; running jobs go on\n"
        assert slices_of(box) == {"0.0": "Available", "0.1": "Paused", "0.2": "Available", "1": "Available"}
        box.nexus("pause", "0")
        waits = box.nexus("add", "--gpu-ids", "0.0,0.2", "--", f"{SHOW}; sleep 600").stdout.strip()
        box.await_reason(waits, "needs 1 GPU; 0 of 2 are free; GPU 0.0 is paused; GPU 0.2 is paused")
        assert "it accepts only GPU 0.0, 0.2 (--gpu-ids)" in box.nexus("why", waits).stdout
        assert box.nexus("edit", waits, "--gpu-ids", "0").returncode == 0 and box.job(waits)["gpu_ids"] == [0]
        assert box.nexus("resume", "0.2").returncode == 0
        assert box.wait_started(waits)["gpu_places"] == ["0.2"]
        live.until(lambda: "0.2 PCI_BUS_ID" in box.nexus("logs", "0.2").stdout)
        assert box.nexus("kill", "0.0").stderr.startswith("nexus: no job of nexus runs on GPU 0.0")
        assert box.nexus("kill", "0.7").stderr.startswith("nexus: there is no GPU 0.7")
        assert box.nexus("kill", "0").returncode == 0
        box.wait(waits, "cancelled")
        path = box.home / "state.json"
        live.until(lambda: "paused_gpus" in live.read(path))
        (box.home / "edited").write_text(json.dumps({**json.loads(live.read(path)), "paused_gpus": [0.0, 1]}))
        (box.home / "edited").rename(path)
        live.until(lambda: slices_of(box) == {"0.0": "Paused", "0.1": "Available", "0.2": "Available", "1": "Paused"})


def test_failing_nvidia_smi(box):
    """Nothing starts, what runs goes on, the reason is shown; and all goes on by itself."""
    use(box, 2)
    words = "couldn't communicate with the NVIDIA driver"
    on = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done; exit 3"))
    box.show([{}] * 3, failure="no-driver")
    live.until(lambda: words in str(box.status()["gpu_trouble"]), f"{words} in the status")
    waits, cpu = box.add("true"), box.add("true", gpus=0)
    assert words in box.await_reason(waits, words)
    box.wait(cpu, "completed")
    assert box.job(on["id"])["status"] == "running" and len(box.status()["gpu_status"]) == 3
    assert [gpu["is_available"] for gpu in box.status()["gpu_status"]] == [False] * 3
    health = box.call("GET", "/health")
    assert health[0] == 503 and any(words in check["reading"] and not check["is_ok"] for check in health[1]["checks"])
    box.nexus("restart")                            # it knows no more; and still it gives nothing out
    box.await_reason(waits, words)
    assert box.status()["gpu_status"] == [] and words in str(box.status()["gpu_trouble"])
    box.path("go").touch()
    assert box.wait(on["id"], "failed")["exit_code"] == 3
    box.show([{}] * 3)
    box.wait(waits, "completed")
    assert box.call("GET", "/health")[0] == 200


def test_gone_from_the_bus():
    """`No devices were found`, where there were some, is a fault until a restart; where there were none, it is the truth."""
    with live.Box(gpus=[], is_supervised=False) as box:
        assert box.status()["gpu_status"] == [] and box.status()["gpu_trouble"] is None
        status, answer = box.call("POST", "/queue", {"command": "true"})
        assert status == 400 and "this machine has 0" in answer["message"]
        box.wait(box.add("true", gpus=0), "completed")
        box.show([{}])
        box.await_gpu(0, is_available=True)
        box.show([{"state": "hidden"}])
        box.await_gpu(0, fault="nvidia-smi does not show it")
        box.await_reason(box.add("true"), "nvidia-smi does not show it")
        box.nexus("restart")
        assert box.status()["gpu_status"] == [] and box.call("GET", "/health")[0] == 200


def test_cards_that_were_taken_out():
    """Each is a fault until a restart; a job keeps its own."""
    def faults():
        check = next(check for check in box.health()["checks"] if check["name"] == "GPUs")
        return "" if check["is_ok"] else check["reading"]

    with live.Box(gpus=[{}] * 4, is_supervised=False) as box:
        on = box.add("sleep 600", gpu_ids=[3])
        box.wait_started(on)
        box.nexus("pause", "2")
        box.show([{}] * 2)
        live.until(lambda: "GPU 3" in faults())
        assert faults().startswith("GPU 2: nvidia-smi does not show it (if it was taken out: nexus restart); GPU 3: ")
        box.await_gpu(2, is_paused=True)
        box.nexus("restart")
        assert [(gpu["index"], bool(gpu["fault"])) for gpu in box.status()["gpu_status"]] == [(0, False), (1, False)]
        assert not faults()
        box.show([{}] * 4)
        live.until(lambda: len(box.status()["gpu_status"]) == 4)
        assert box.await_gpu(3, fault=None)["job_id"] == on and box.await_gpu(2, fault=None)["is_paused"]


def test_no_nvidia_smi():
    with live.Box(gpus=[{}], is_starting=False, environ={"PATH": "/usr/bin:/bin"}, is_supervised=False) as box:
        box.start()
        assert "not found on PATH" in box.status()["gpu_trouble"]
        box.wait(box.add("true", gpus=0), "completed")
        job_id = box.add("true")
        assert "not found on PATH" in box.await_reason(job_id, "nvidia-smi")


def test_hanging_nvidia_smi():
    """It has a time limit; nothing else waits for it, there is never more than one, and half an answer is none."""
    with live.Box(gpus=[{}, {}], is_starting=False) as box:
        box.serve("nexus.SMI_TIMEOUT_S = 1.5; nexus.TROUBLE_INTERVAL_S = 2")     # rather than 60 and 30 s
        on = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done"))
        count = len(box.smi_runs())
        box.show([{}, {}], hang=1, ignore_term=True)
        live.until(lambda: len(box.smi_runs()) > count + 1, "a run that hangs")
        # Meanwhile everything else goes on
        box.path("go").touch()
        box.wait(on["id"], "completed")
        box.wait(box.add("true", gpus=0), "completed")
        live.until(lambda: "did not answer within 1.5 s" in str(box.status()["gpu_trouble"]), "the time limit")
        waits = box.add("true")
        box.await_reason(waits, "did not answer within 1.5 s")
        live.until(lambda: len([run for run in box.smi_runs() if live.is_alive(run["pid"])]) <= 1)
        box.show([{}, {}])
        box.wait(waits, "completed")


def test_nvidia_smi_that_cannot_be_killed():
    """Stuck in the kernel, SIGKILL does not end it: no second one is begun, and once it has ended all goes on by itself."""
    change = ("import os; nexus.SMI_TIMEOUT_S = 3.0; nexus.TROUBLE_INTERVAL_S = 2; "
              "os.killpg = lambda pid, number: None")
    with live.Box(gpus=[{}], is_starting=False) as box:
        box.serve(change)
        box.await_gpu(0, is_available=True)
        box.show([{}], hang=True)
        live.until(lambda: "cannot be ended" in str(box.status()["gpu_trouble"]))
        count = len(box.smi_runs())
        waits = box.add("true")
        box.await_reason(waits, "cannot be ended")
        live.until(lambda: "hangs and cannot be ended" in str(box.status()["gpu_trouble"]), "another look at it")
        assert len(box.smi_runs()) == count and box.wait(box.add("true", gpus=0), "completed")
        box.show([{}])
        live.kill(*(run["pid"] for run in box.smi_runs() if live.is_alive(run["pid"])))
        box.wait(waits, "completed")


def test_first_status_waits_for_the_first_probe():
    with live.Box(gpus=[{}, {}], is_starting=False, is_supervised=False) as box:
        box.show([{}, {}], delay=1.0)
        box.start()
        assert len(box.status()["gpu_status"]) == 2
        snapshot = box.nexus()
        assert "GPU 0 (RTX 3090, 24GB): Available" in snapshot.stdout, snapshot


def test_first_status_where_nvidia_smi_hangs():
    """It comes all the same, with what is known, long before nvidia-smi is given up."""
    with live.Box(gpus=[{}], is_starting=False) as box:
        box.show([{}], hang=True)
        box.serve("nexus.SMI_WAIT_S = -4.5")        # a first status waits for 5 s more
        status = box.status()
        assert status["gpu_trouble"] == "nvidia-smi has not answered yet" and "nvidia-persistenced" in " ".join(status["hints"])
        box.await_reason(box.add("true"), "nvidia-smi has not answered yet")
        box.wait(box.add("true", gpus=0), "completed")


def test_slow_answers_slow_the_polling():
    with live.Box(gpus=[{}], refresh_rate_seconds=0.1, is_supervised=False) as box:
        box.status()
        box.show([{}], delay=0.05)
        box.await_probe()
        first, second = [run["time"] for run in box.smi_runs()[-6:] if "--query-gpu" in str(run)][-2:]
        assert second - first > 1                    # ten times what the two queries take


def test_foreign_process(box):
    """Somebody's process keeps the GPU; the status names the user, pid, program and memory; and it is free again."""
    live.need_root()
    with subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "601.5"], env={"NX": f"{box.folder}/"}) as other:
        live.until(lambda: live.read(f"/proc/{other.pid}/comm") == "sleep\n")
        # In a container nvidia-smi names pids that are not there
        box.show([{"memory.used": 16400}, {}, {}], processes=[
            busy(0, other.pid), busy(2, 4194304 + 7, memory=None, name="[Not Found]")])
        gpu = box.await_gpu(0, used_by=f"nobody (pid {other.pid} sleep, 16GB)")
        assert not gpu["is_available"] and gpu["processes"][0]["job_id"] is None
        assert f"GPU 0 (RTX 3090, 24GB): In use by nobody (pid {other.pid} sleep, 16GB)" in box.nexus().stdout
        box.await_gpu(2, used_by="somebody (pid 4194311)")
        first, then = box.add("sleep 600"), box.add("true")
        assert box.wait_started(first)["gpu_index"] == 1
        reason = box.await_reason(then, f"nobody (pid {other.pid} sleep, 16GB)", "somebody (pid 4194311)")
        assert f"GPU 1 runs job {first}" in reason
        other.kill()
    box.show([{}, {}, {}], processes=[busy(2, 4194304 + 7)])
    assert box.wait(then, "completed")["gpu_index"] == 0


def test_a_stranger_on_the_gpu_of_a_running_job(box):
    """Wherever the owner looks for what makes it slow."""
    use(box, 1)
    live.need_root()
    job_id = box.add("sleep 600")
    box.wait_started(job_id)
    with subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "602.5"], env={"NX": f"{box.folder}/"}) as other:
        live.until(lambda: live.read(f"/proc/{other.pid}/comm") == "sleep\n")
        box.show([{"memory.used": 3100}, {}, {}], processes=[busy(0, other.pid, 3072)])
        words = f"nobody (pid {other.pid} sleep, 3GB)"
        box.await_gpu(0, used_by=words)
        for line, said in (([], f"  Also used by: {words}\n"), (["top"], f"(also used by {words}) sleep 600"),
                           (["show", job_id], f"  also on GPU 0: {words}\n"), (["status", "--detailed"], f"; also used by {words}\n")):
            assert said in box.nexus(*line).stdout, line
        token = box.nexus("token", "create", "ann").stdout.strip()
        other_user = {"NEXUS_URL": f"http://127.0.0.1:{box.port}", "NEXUS_TOKEN": token}
        assert words in box.nexus(environ=other_user).stdout, "the GPU's JSON has it for all"
        other.kill()


def test_a_wait_for_a_preemptible_job_in_its_first_minute(box):
    """Who has the GPUs, the user's own jobs too, and which job makes room, and when: not only whom nexus does not know."""
    live.need_root()
    with subprocess.Popen(["setpriv", "--reuid=65534", "--clear-groups", "sleep", "601.5"], env={"NX": f"{box.folder}/"}) as other:
        live.until(lambda: live.read(f"/proc/{other.pid}/comm") == "sleep\n")
        box.show([{}, {}, {}], processes=[busy(2, other.pid)])
        box.await_gpu(2, used_by=f"nobody (pid {other.pid} sleep, 16GB)")
        soft = box.add("sleep 600", preemptible=True)
        for job_id in (box.add("sleep 600"), soft):
            box.wait_started(job_id)
        waits = box.add("true")
        box.await_reason(waits, "needs 1 GPU; 0 of 3 are free: 2 taken by your own jobs, 1 by nobody; "
                         f"job {soft} is preemptible and may be stopped for it in ")
        words = box.job(waits)["waiting_for"].rpartition(" in ")[0]         # without the seconds, which go on
        assert soft in words and words in box.nexus("why", waits).stdout
        other.kill()


def test_own_process_is_not_foreign(box):
    """A job's own process on its GPU, also one that has left the session, is the job's; and no obstacle once it has gone."""
    use(box, 1)
    job = box.wait_started(box.add(f"setsid sleep 600 & echo $! > {box.path('pid')}; wait"))
    pid = int(live.until(lambda: live.read(box.path("pid"))))
    box.show([{"memory.used": 8000}, {}, {}], processes=[busy(0, pid, 7900)])
    live.until(lambda: any(p["job_id"] == job["id"] for p in box.gpu(0)["processes"]))
    assert box.gpu(0)["used_by"] is None and box.gpu(0)["job_id"] == job["id"]
    then = box.add("sleep 600")
    box.ask("DELETE", f"/jobs/{job['id']}")
    box.wait(job["id"], "cancelled")
    box.await_probe()                               # nvidia-smi still shows it, as a driver does for a moment
    box.wait_started(then)
    assert box.job(job["id"])["peak_gpu_mem_mib"] == 7900


def test_a_job_on_a_gpu_that_it_was_not_given(box):
    """It is told in the job and in the log; and at `add`, where the command sets the variable."""
    use(box, 2)
    done = box.nexus("add", "--cwd", "/tmp", "CUDA_VISIBLE_DEVICES=1 sleep 600")
    assert "the command sets CUDA_VISIBLE_DEVICES" in done.stderr and done.returncode == 0, done
    job = box.wait_started(done.stdout.strip())
    box.show([{}, {"memory.used": 8000}, {}], processes=[busy(1, job["pid"], 7900)])
    says = "computes on GPU 1, which it was not given"
    live.until(lambda: any(says in note for note in box.job(job["id"])["notes"]), "the job's note")
    assert f"Job {job['id']} {says}" in box.log() and says in box.nexus("show", job["id"]).stdout


def test_somebody_joins_a_running_job(box):
    """The job goes on; the next one waits for the other to go."""
    use(box, 1)
    with subprocess.Popen(["sleep", "600"]) as other:
        job = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done"))
        then = box.add("true")
        box.show([{}, {}, {}], processes=[busy(0, other.pid)])
        box.await_gpu(0, used_by=lambda text: text and str(other.pid) in text)
        box.path("go").touch()
        box.wait(job["id"], "completed")
        box.await_reason(then, "in use by root", f"pid {other.pid}")
        box.show([{}, {}, {}])
        box.wait(then, "completed")
        other.kill()


def test_gpus_that_change_their_indices(box):
    """After a card has gone, the driver counts anew: state keeps uuids, and nobody's job moves to another card."""
    cards = [{"uuid": uuid} for uuid in UUIDS[:3]]
    jobs = [box.wait_started(box.add("sleep 600"))["id"] for _ in range(3)]
    assert [box.gpu(index)["job_id"] for index in range(3)] == jobs
    box.ask("POST", "/gpus/2/pause")
    box.show([cards[0], cards[2]])
    box.await_gpu(1, uuid=UUIDS[2])
    assert box.gpu(1)["job_id"] == jobs[2] and box.gpu(0)["job_id"] == jobs[0]
    assert box.gpu(1)["is_paused"]                  # the pause is of the card
    waits = box.add("true", gpu_ids=[1])
    box.await_reason(waits, f"runs job {jobs[2]}")
    box.ask("DELETE", f"/jobs/{jobs[2]}")
    box.await_reason(waits, "GPU 1 is paused")
    box.ask("POST", "/gpus/1/resume")
    box.wait(waits, "completed")
    # And back, as it was
    box.show(cards)
    box.await_gpu(2, uuid=UUIDS[2], is_available=True)
    assert box.gpu(1)["job_id"] == jobs[1]


MEMORY = [  # config, the GPUs: the last ones may be given to no job
    ({"share_with_others": True}, [{"memory.used": 19000}, {"memory.used": 20000}]),
    ({"min_free_mem_mib": 21000, "max_unseen_mem_mib": 4000}, [{"memory.used": 3000}, {"memory.used": 4000}, {"memory.used": None}]),
]


@pytest.mark.parametrize("config, gpus", MEMORY, ids=["the threshold", "what must be free"])
def test_memory(config, gpus):
    with live.Box(gpus=gpus, **config, is_supervised=False) as box:
        box.status()
        first, then = box.add("sleep 600"), box.add("true")
        assert box.wait_started(first)["gpu_index"] == 0
        for index in range(1, len(gpus)):
            box.await_reason(then, f"GPU {index} ", "memory")
        box.show([{}] * len(gpus))
        box.wait(then, "completed")


def test_leases_that_somebody_removed(box):
    """Cleaners of /tmp, and people: no job fails for it."""
    use(box, 1)
    box.wait(box.add("true"), "completed")
    live.until(lambda: not subprocess.run(["rm", "-rf", box.folder / "leases"]).returncode, "no look at it meanwhile")
    box.wait(box.add("true"), "completed")
    assert (box.folder / "leases").stat().st_mode & 0o7777 == 0o1777


def test_the_lease_of_a_running_job_that_somebody_removed(box):
    """The service has it again, and so has the next one; with the job it is over."""
    folder, other = box.folder / "leases", nexus.Leases(nexus.DISK, str(box.folder / "leases"), "0-cccccccc")
    job = box.wait_started(box.add("sleep 600"))
    uuid = box.gpu(job["gpu_index"])["uuid"]
    assert set(other.find_holders([uuid])) == {uuid}
    for _ in range(2):
        live.until(lambda: not subprocess.run(["rm", "-rf", folder]).returncode, "no look at it meanwhile")
        live.until(lambda: (folder / uuid).exists() and other.find_holders([uuid]), "its lock")
    line = f"The lease of job {job['id']} on {uuid} was lost (does somebody remove files from {folder}?): it is held again"
    live.until(lambda: box.log().count(line) == 2, lambda: f"two times {line} in {box.log()}")
    shared.crash(box)
    live.until(lambda: other.find_holders([uuid]), "its lock")
    box.ask("DELETE", f"/jobs/{job['id']}")
    box.wait(job["id"], "cancelled")
    live.until(lambda: other.find_holders([uuid]) == {}, "the lease to be given up")    # that comes after the end is told


def test_runner_that_was_stopped_at_its_start_takes_no_gpu_twice():
    """The service is killed before a runner's claim is known; whatever comes late leaves."""
    with live.Box(gpus=[{}], launcher="screen") as box:
        for _ in range(2):
            job_id = box.add(f"echo $NEXUS_JOB_ID >> {box.path('runs')}; sleep 0.2")
            live.until(lambda job_id=job_id: box.job(job_id)["status"] != "pending", interval_s=0)
            shared.crash(box)
            box.wait(job_id, "completed")
        runs = live.read(box.path("runs")).split()
        assert len(runs) == len(set(runs)) == 2

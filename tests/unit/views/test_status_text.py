"""The status in words: the snapshot, in colours and without."""

import json
import re

import pytest
from makers import GB, NOW, config, finished, foreign, gpu, job, mig_slice, running, state
from shown import COLOURFUL, PLAIN, status, uncoloured

import nexus

GPUS = [  # reason, GPU, jobs, trouble, is available, why not, used by, line of the snapshot
    ("free", gpu(0), [], None, True, None, None, "GPU 0 (RTX 3090, 24GB): Available"),
    ("another user's", gpu(2, processes=(foreign(),)), [], None, False, "is in use by bob (pid 4242 python, 16GB)",
     "bob (pid 4242 python, 16GB)", "GPU 2 (RTX 3090, 24GB): In use by bob (pid 4242 python, 16GB)"),
    ("lost", gpu(1, fault="GPU is lost", memory_total_mib=None), [], None, False, "is unusable (GPU is lost)", None,
     "GPU 1 (RTX 3090): Unusable (GPU is lost)"),
    ("paused", gpu(0, is_paused=True), [], None, False, "is paused", None, "GPU 0 (RTX 3090, 24GB): Paused"),
    ("paused while bob uses it", gpu(0, is_paused=True, processes=(foreign(),)), [], None, False, "is paused", None,
     "GPU 0 (RTX 3090, 24GB): Paused"),
    ("its memory is in use, nobody knows by whom", gpu(0, memory_used_mib=20 * GB), [], None, False,
     "is in use by processes that cannot be seen (20GB, above max_unseen_mem_mib)",
     "processes that cannot be seen (20GB, above max_unseen_mem_mib)",
     "GPU 0 (RTX 3090, 24GB): In use by processes that cannot be seen (20GB, above max_unseen_mem_mib)"),
    ("cut into nothing", gpu(0, is_mig=True), [], None, False,
     "is in MIG mode without slices (sudo nvidia-smi mig -cgi PROFILE -C makes them)", None,
     "GPU 0 (RTX 3090, 24GB): In MIG mode without slices (sudo nvidia-smi mig -cgi PROFILE -C makes them)"),
    ("a slice", mig_slice(1), [], None, True, None, None, "GPU 0.1 (A100 MIG 1g.10gb, 10GB): Available"),
    ("a node's slice", mig_slice(1, node="n1"), [], None, True, None, None, "GPU n1:0.1 (A100 MIG 1g.10gb, 10GB): Available"),
    ("leased", gpu(0, lease_holder="Bob"), [], None, False, "is held by the nexus of Bob", None,
     "GPU 0 (RTX 3090, 24GB): Held by the nexus of Bob"),
    ("cannot be read", gpu(0), [], "nvidia-smi is silent", False, "cannot be read", None,
     "GPU 0 (RTX 3090, 24GB): Cannot be read"),
    ("a name of many lines", gpu(0, name="RTX\n\x1b[2J3090"), [], None, True, None, None,
     "GPU 0 (RTX  [2J3090, 24GB): Available"),
]


@pytest.mark.parametrize("reason, one, jobs, trouble, is_available, unavailable, used_by, line", GPUS,
                         ids=[case[0] for case in GPUS])
def test_an_idle_gpu(reason, one, jobs, trouble, is_available, unavailable, used_by, line):
    made = nexus.gpu_json(one, state(*jobs), config().gpu, trouble)
    assert (made["is_available"], made["unavailable"], made["used_by"]) == (is_available, unavailable, used_by), reason
    assert (made["state"] == "In use") == (": In use" in line), reason
    assert PLAIN.join(nexus.format_gpu(made, {}, PLAIN)) == line + "\n"
    json.dumps(made)


def test_a_stranger_beside_a_job_is_shown_wherever_the_job_is():
    bob, alone = foreign(), running("abc", gpus=0.5)
    for facts in ({}, {"is_paused": True}):
        made = status([alone, running("abd", gpus=0.5)], [gpu(0, processes=(bob,), **facts), gpu(1)])
        assert made["gpu_status"][0]["used_by"] == "bob (pid 4242 python, 16GB)"
        text = nexus.format_snapshot(made, PLAIN)
        assert text.count("bob") == 1 and re.search(r"Job ID: abd\n(  .*\n)*  Also used by: bob \(pid 4242 python, 16GB\)\n", text)
        top = nexus.list_top(made, [], 0, [], [], PLAIN)
        assert [job_id for line, job_id in top if "(also used by bob (pid 4242 python, 16GB)) python train.py" in line] == ["abc", "abd"]
        shown = nexus.format_job(nexus.job_json(alone, NOW, "here"), PLAIN, (), made["gpu_status"])
        assert "  also on GPU 0: bob (pid 4242 python, 16GB)\n" in shown
        used = nexus.describe_gpu_use(made["gpu_status"][0], PLAIN)
        assert used.endswith("; also used by bob (pid 4242 python, 16GB)")
    assert "also" not in nexus.format_job(nexus.job_json(running("abe", (1,)), NOW, "here"), PLAIN, (), made["gpu_status"])


SNAPSHOTS = [  # reason, status, part
    ("one job, not 1 jobs", status([job()]), "Queue: 1 job pending [RUNNING]\nHistory: 0 jobs completed\n"),
    ("who failed has not completed", status([finished("abc"), finished("abd", status="failed"), finished("abe", status="cancelled")]),
     "History: 1 job completed, 1 failed, 1 cancelled\n"),
    ("nobody was cancelled", status([finished("abd", status="failed")]), "History: 0 jobs completed, 1 failed\n"),
    ("no GPU", status(gpus=()), "GPUs:\nnone\n"),
    ("the driver does not answer", status(gpus=(), trouble="nvidia-smi is silent"), "GPUs:\nnvidia-smi is silent\n"),
    ("CPU jobs have a place of their own", status([running("abc", ())], ()), "\nCPU:\n  Job ID: abc\n"),
    ("a job on a GPU that was lost under it", status([running("abc", (0,))], [gpu(0, fault="GPU is lost")]),
     "GPU 0 (RTX 3090, 24GB): GPU is lost\n  Job ID: abc\n"),
    ("two GPUs, one job: at both", status([running("abc", (0, 1))], [gpu(0), gpu(1)]),
     "  Started: 15:29\nGPU 1 (RTX 3090, 24GB):\n  Job ID: abc\n"),
    ("it is being stopped", status([running("abc", (0,), stop_cause="killed")]), "  Job ID: abc (stopping: killed)\n"),
    ("a command that would clear the screen", status([running("abc", (0,), command="echo '\x1b[2J'\nls")]),
     "  Command: echo ' [2J' ls\n"),
    ("what to do next", status(hints=["nexus add"]), "\n\nhint: nexus add\n"),
]

COLOURS = [  # what, text with its colour
    ("the queue", "\x1b[34mQueue: 1 job pending\x1b[0m"), ("its state", "\x1b[33m[RUNNING]\x1b[0m"),
    ("headers", "\x1b[1mGPUs:\x1b[0m"), ("free GPUs", "\x1b[92mAvailable\x1b[0m"),
    ("job ids", "Job ID: \x1b[35mabc\x1b[0m"),
    ("commands", "Command: \x1b[1mpython train.py\x1b[0m"), ("runtimes", "Runtime: \x1b[36m1m\x1b[0m"),
    ("times", "Started: \x1b[36m15:29\x1b[0m"), ("errors", "\x1b[31mUnusable (GPU is lost)\x1b[0m"),
]


def test_colours():
    made = status([running("abc", (0,)), job("qqq", 2)], [gpu(0), gpu(1), gpu(2, fault="GPU is lost")])
    assert [what for what, text in COLOURS if text not in nexus.format_snapshot(made, COLOURFUL)] == []


def test_colour_changes_nothing_else():
    made = status([running("abc", (0,)), running("cpu", (), number=5), job("qqq", 2)], [gpu(0), gpu(1, is_paused=True)])
    listed = [nexus.job_json(one, NOW, "here") for one in (job("abc"), running("abd"), finished("abe"))]
    health = {"is_healthy": False, "checks": [{"name": "disk", "is_ok": False, "reading": "full"}]}
    for format in (lambda paint: nexus.format_snapshot(made, paint),
                   lambda paint: nexus.format_detailed(made, health, paint),
                   lambda paint: nexus.format_queue(listed, nexus.Paint(paint.mark, 80)),
                   lambda paint: nexus.format_jobs(listed, nexus.Paint(paint.mark, 80)),
                   lambda paint: nexus.format_job(listed[1], paint), lambda paint: nexus.format_health(health, paint)):
        assert uncoloured(format(COLOURFUL)) == format(PLAIN) != format(COLOURFUL)


def test_detailed():
    made = nexus.format_detailed(pool(
        [gpu(0, temperature=61.0, power_watts=250.4), gpu(1, is_paused=True), gpu_of("n2", 1)], node("n2", gpus=1, **AWAY),
        jobs=[running("abc", (0,)), running("cpu", (), number=2)]), {"is_healthy": True}, PLAIN)
    for line in ("Status: running", "Uptime: 3600 seconds (1h)", "  Total Jobs: 0", "  High Priority: 1",
                 "  GPU 0: 100% allocated (memory 0GB of 24GB, 0% busy, 61°C, 250 W)",
                 "  GPU 1: PAUSED (memory 0GB of 24GB, 0% busy)", "  GPU n2:1: 0% allocated (memory 0GB of 80GB, 0% busy)",
                 "Nodes:", "  n2: 1 GPU, 0 jobs, unknown since 10-24 14:02: cannot reach n2: No route to host",
                 "Host: gpu1, CPU 12%, memory 40.2 of 128GB", "Active Jobs: 2",
                 "  abc: python train.py (gpu1, GPUs: [0], memory 2GB, CPU 99.5%)",
                 "  cpu: python train.py (gpu1, no GPU, memory 2GB, CPU 99.5%)", "Health: HEALTHY"):
        assert line in made.splitlines()


# Where there are nodes


def node(name, **facts):
    """What GET /nodes tells of one."""
    return {"name": name, "gpus": 0, "gpu_names": [], "running_jobs": 0, "is_reachable": True, "is_leaving": False, "trouble": None,
            "hint": None, "unknown_since": None, **facts}


def gpu_of(name, index, **fields):
    return gpu(index, node=name, uuid=f"{name}/GPU-{index}", name="H100", memory_total_mib=80 * GB, **fields)


def pool(gpus, *nodes, jobs=(), **facts):
    """What GET /status answers where there are nodes, beside this machine, which is called gpu1."""
    made = status(jobs, gpus, nodes=[node("gpu1"), *nodes], **facts)
    for told in made["gpu_status"]:
        told["node"] = told["place"].rpartition(":")[0] or "gpu1"
    for told in made["running_jobs"]:
        one = next(one for one in jobs if one.id == told["id"])
        told["node"], told["unknown_since"] = one.current.node or "gpu1", next((
            each["unknown_since"] for each in nodes if each["name"] == one.current.node), None)
    return made


AWAY = {"unknown_since": "2024-10-24T14:02:00Z", "is_reachable": False, "trouble": "cannot reach n2: No route to host",
        "hint": "try it by hand: ssh n2"}


POOLS = [  # reason, status, part of the snapshot
    ("never reached", pool([], node("n2", **AWAY)), "GPUs:\nn2: unknown since 10-24 14:02: cannot reach"),
    ("its own queue is paused", pool([gpu_of("n1", 0)], node("n1", trouble="its queue is paused")), "GPUs:\nn1: its queue is paused\n"),
    ("the head's driver is silent", pool([gpu_of("n1", 0)], node("n1"), trouble="nvidia-smi is silent"), "GPUs:\nnvidia-smi is silent\n"),
]


@pytest.mark.parametrize("reason, given, part", [*SNAPSHOTS, *POOLS], ids=[case[0] for case in [*SNAPSHOTS, *POOLS]])
def test_format_snapshot(reason, given, part):
    assert part in nexus.format_snapshot(given, PLAIN), reason


def other(user, running, waiting, **facts):
    return {"user": user, "running": running, "waiting": waiting, "gpus": float(running),
            "since": nexus.format_time(NOW - 600) if waiting else None, "collects": None, **facts}


OTHERS = [  # reason, facts of the status, lines
    ("nobody else", {"others": [], "next_turn": None}, []),
    ("an older service", {}, []),
    ("one's own turn", {"others": [other("bob", 4, 60)], "next_turn": {"user": "ann", "seconds": 4.9}, "queued_jobs": 1},
     ["bob: 4 running, 60 waiting since 15:20", "Next GPU: yours, in about 4s"]),
    ("who has nothing to run would be next", {"others": [other("bob", 4, 60)], "next_turn": {"user": "ann", "seconds": 4.9}},
     ["bob: 4 running, 60 waiting since 15:20", "Next GPU: yours if you add a job, in about 4s"]),
    ("another's", {"others": [other("bob", 0, 1)], "next_turn": {"user": "bob", "seconds": 0.0}},
     ["bob: 0 running, 1 waiting since 15:20", "Next GPU: bob, at any moment"]),
    ("nobody knows when", {"others": [other("bob", 1, 2)], "next_turn": {"user": "bob", "seconds": None}},
     ["bob: 1 running, 2 waiting since 15:20", "Next GPU: bob, when a job ends"]),
    ("one who waits for nothing, one who collects", {"others": [other("bob", 4, 0), other("carl", 0, 9, collects=4)], "next_turn": None},
     ["bob: 4 running, 0 waiting", "carl: 0 running, 9 waiting since 15:20, collects 4 GPUs for one job"]),
    ("seen with a token: ann is somebody else", {"others": [other("bob", 1, 1)], "is_owner": False,
                                                 "next_turn": {"user": "ann", "seconds": 90.0}},
     ["bob: 1 running, 1 waiting since 15:20", "Next GPU: ann, in about 1m 30s"]),
]


@pytest.mark.parametrize("reason, facts, lines", OTHERS, ids=[case[0] for case in OTHERS])
def test_others_who_share_the_gpus(reason, facts, lines):
    made = status(**{"user": "ann", "is_owner": True, **facts})
    assert nexus.format_others(made, PLAIN) == lines, reason
    snapshot, top = nexus.format_snapshot(made, PLAIN), nexus.list_top(made, [], 0, [], [], PLAIN)
    if lines:
        assert snapshot.endswith("\n".join(["", nexus.SHARED, *lines, ""])) and (f"Others: {'; '.join(lines)}", "") in top
    else:
        assert snapshot == nexus.format_snapshot(status(), PLAIN) and top == nexus.list_top(status(), [], 0, [], [], PLAIN)


def test_another_user_in_json():
    one = nexus.BoxUser(1001, "bob", (nexus.Want(1, ("GPU-0",), 3, NOW - 5), nexus.Want(4, ("GPU-0",), 1, NOW - 9, True)),
                        (nexus.Holding("GPU-0", 100, NOW), nexus.Holding("GPU-1", 50, NOW)), running=2, waiting=4)
    told = nexus.other_user_json(one)
    assert told == {"user": "bob", "running": 2, "waiting": 4, "gpus": 1.5, "since": nexus.format_time(NOW - 9), "collects": 4}
    assert told.keys() == nexus.OTHER_USER.keys()
    assert nexus.other_user_json(nexus.BoxUser(1001, "bob"))["since"] is None

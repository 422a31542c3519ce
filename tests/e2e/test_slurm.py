"""`launcher = "slurm"` against a real Slurm: munged, slurmctld and slurmds of the test's own, with GPUs that are links to /dev/null."""

import json
import os
import shlex
import shutil
import subprocess
import time

import console
import jsonschema
import live
import pytest
import slurm

PARTITIONS = {"main": "Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1", "urgent": "Nodes=ALL PriorityTier=10",
              "short": "Nodes=ALL MaxTime=10 PriorityTier=1", "closed": "Nodes=ALL AllowAccounts=good PriorityTier=1"}


@pytest.fixture(scope="module")
def shared():
    # A program waits for a slurmctld that is gone for some times as long.
    with slurm.Cluster(nodes={"n1": 2}, partitions=PARTITIONS, MessageTimeout="3") as made:
        yield made


@pytest.fixture
def cluster(shared):
    """A node with two GPUs, which tests use one after the other."""
    yield shared
    shared.clean()


@pytest.fixture(scope="module")
def shared_box(shared):
    with shared.box(retry_backoff_seconds=0.1) as made:
        yield made


@pytest.fixture
def box(shared_box, cluster):
    """A nexus that gives its jobs to the cluster, with the usual settings."""
    yield shared_box
    for name in ("go", "end", "runs", "gone", "bin/squeue"):
        path = shared_box.path(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not shared_box.pid():
        shared_box.start()
    if cluster.ask("scontrol", "ping").returncode:
        cluster.start_slurmctld()
    for job in shared_box.ask("GET", "/queue") + shared_box.ask("GET", "/jobs?status=running"):
        shared_box.call("POST", f"/api/cancel/{job['id']}")
    live.until(lambda: not shared_box.ask("GET", "/queue") + shared_box.ask("GET", "/jobs?status=running"), "no job of before")


@pytest.fixture(scope="module")
def limited():
    """(a cluster that looks at what jobs use, a box, a job whose time is up): Slurm looks at that twice a minute."""
    settings = {"JobAcctGatherType": "jobacct_gather/linux", "JobAcctGatherFrequency": "task=1", "JobAcctGatherParams": "OverMemoryKill"}
    with slurm.Cluster(**settings) as made, made.box(max_memory_gb=0.05) as box:
        # Slurm signals one process after the other: the shell may see its sleep end before its own turn comes
        job_id = box.add("trap 'echo tidy; exit 0' TERM; while :; do sleep 1000 & wait; done", timeout_seconds=60, gpus=0)
        made.take_time(box.wait(job_id, "running")["slurm_id"], 1)
        yield made, box, job_id


@pytest.fixture(scope="module")
def accounted():
    """One with a real slurmdbd, which takes jobs of the account `lab` alone."""
    with slurm.Cluster(nodes={"n1": 4}, partitions={"gpu": "Nodes=ALL Default=YES"}, account="lab") as made:
        yield made


def folder_of(box, job_id):
    return box.home / "logs" / f"job_{job_id}"


def drain(cluster):
    for node in cluster.nodes:
        cluster.say("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")


def resume(cluster):
    for node in cluster.nodes:
        cluster.ask("scontrol", "update", f"nodename={node}", "state=resume")


# What a job is given, and how it ends

def test_memory(limited):
    _, box, _ = limited
    job = box.wait(box.add("python3 -c 'x = bytearray(300 * 2**20); import time; time.sleep(100)'"), "failed")
    assert job["cause"] == "host-memory" and "memory limit" in job["cause_line"]


def test_exit_codes_output_and_what_a_job_sees(cluster, box):
    show = 'echo "$CUDA_VISIBLE_DEVICES|$NEXUS_GPU_ID|$NEXUS_JOB_ID|$SLURM_JOB_ID|$SLURMD_NODENAME|$MY|$(pwd)|$(umask)|$SECRET"'
    seen = box.add(show, gpus=2, env={"MY": "a b'c\"d"}, cwd="/usr", umask=0o027)
    good = box.add("echo out; echo err >&2", gpu_type="a100")
    bad, dead = box.add("echo why >&2; exit 3"), box.add("kill -SEGV $$", gpus=0)
    nowhere = box.add("true", cwd="/nowhere")
    job = box.wait(seen, "completed")
    gpus, nexus_gpus, job_id, slurm_id, node, mine, cwd, umask, _ = box.logs(seen).strip().split("|")
    assert gpus == nexus_gpus == "0,1" and (job_id, slurm_id, node) == (seen, job["slurm_id"], job["node"]) and node == "n1"
    assert (mine, cwd, umask) == ("a b'c\"d", "/usr", "0027") and job["exit_code"] == 0 and job["runtime_seconds"] < 30
    assert cluster.fact(slurm_id, "TresPerNode") == "gres:gpu:2" and cluster.fact(slurm_id, "Requeue") == "0"
    assert cluster.fact(slurm_id, "JobName") == f"nexus_{seen}" and "nexus:0-" in cluster.fact(slurm_id, "Comment")
    assert box.logs(box.wait(good, "completed")["id"], "stdout") == "out\n" and box.logs(good, "stderr") == "err\n"
    failed = box.wait(bad, "failed")
    assert (failed["exit_code"], failed["cause"], failed["cause_line"]) == (3, "exit", "why")
    assert (box.wait(dead, "failed")["signal"], box.job(dead)["cause"]) == (11, "signal")
    assert (box.wait(nowhere, "failed")["cause"], "/nowhere" in box.job(nowhere)["cause_line"]) == ("launch", True)
    assert [status for status, _ in box.job(good)["status_history"]] == ["pending", "running", "completed"]
    follow = subprocess.run(box.argv("run", "--gpus", "1", "for i in 1 2 3; do echo $i; sleep 0.2; done; exit 5"), env=box.environ,
                            capture_output=True, text=True, timeout=live.PATIENCE_S, cwd="/")
    assert (follow.returncode, follow.stdout) == (5, "1\n2\n3\n"), follow.stderr


def test_what_the_service_has_in_its_environment_stays_there(cluster):
    environ = {"SECRET": "x", "SLURM_JOB_ID": "77", "SLURM_GPUS": "9", "SBATCH_PARTITION": "short"}
    with cluster.box(environ=environ) as box:
        job = box.wait(box.add("echo $SLURM_JOB_ID"), "completed")
        assert box.logs(job["id"]).strip() == job["slurm_id"] != "77"
        assert cluster.fact(job["slurm_id"], "Partition") == "short"            # sbatch's own variables hold, as everywhere
        assert "SECRET=x" not in cluster.say("scontrol", "show", "job", "-d", job["slurm_id"])


def test_time_limit_memory_and_the_rest_are_said_to_slurm(cluster):
    with cluster.box(
            max_memory_gb=0.5, partition="short", extra_args=["--cpus-per-task=3", "--nice=7", "--comment=lab", "--job-name=train"]) as box:
        job = box.wait(box.add("true", timeout_seconds=61, gpus=2), "completed")
        wanted = {"TimeLimit": "00:02:00", "MinMemoryNode": "512M", "Partition": "short", "NumCPUs": "3", "Nice": "7",
                  "JobName": f"nexus_{job['id']}"}
        assert {name: cluster.fact(job["slurm_id"], name) for name in wanted} == wanted


def test_killed_here_and_there(cluster, box):
    here, there, waits, taken = (box.add("sleep 1234.5", gpus=2) for _ in range(4))
    box.wait(here, "running")
    for job_id in (waits, taken):
        box.await_reason(job_id, "Slurm has it as")
    box.ask("DELETE", f"/queue/{waits}")                                    # at once: it will not run, whatever Slurm does
    assert box.job(waits)["status"] == "cancelled" and box.job(waits)["started_at"] is None
    live.until(lambda: box.job(waits)["slurm_id"] not in [slurm_id for slurm_id, state, *_ in cluster.jobs() if state == "PENDING"],
               "scancel of what waits no more")
    cluster.say("scancel", box.job(taken)["slurm_id"])
    job = box.wait(taken, "cancelled")
    assert job["cause"] == "killed" and "cancelled" in job["cause_line"].lower() and not job["started_at"] and not job["stopped_by"]
    assert box.nexus("kill", here).returncode == 0
    job = box.wait(here, "cancelled")
    assert (job["cause"], job["exit_code"], job["stopped_by"], job["cause_line"]) == ("killed", 143, "root", None)
    cluster.say("scancel", box.wait(there, "running")["slurm_id"])
    job = box.wait(there, "cancelled")
    assert job["cause"] == "killed" and "CANCELLED AT" in job["cause_line"]
    live.until(lambda: not live.find_commands("sleep 1234.5"), "the end that Slurm makes of it")


def test_node_fails_and_a_more_urgent_job_comes(cluster, box):
    job = box.wait(box.add("sleep 1000", gpus=2), "running")
    cluster.say("scontrol", "update", "nodename=n1", "state=down", "reason=broken")
    job = box.wait(job["id"], "failed")
    assert job["cause"] == "node-fail" and "NODE FAILURE" in job["cause_line"] and job["node"] == "n1"
    resume(cluster)
    job = box.wait(box.add("echo begun; sleep 1000"), "running")
    live.until(lambda: box.logs(job["id"]), "its command")           # Slurm's signal would be lost on a job.sh that has just begun
    cluster.say("scontrol", "update", f"jobid={job['slurm_id']}", "requeue=1")
    cluster.say("scontrol", "requeue", job["slurm_id"])
    job = box.wait(job["id"], "failed")
    assert job["cause"] == "node-fail", "queued again by Slurm, it is lost as with its node"
    job = box.wait(box.add("sleep 1000", gpus=2), "running")
    urgent = cluster.say("sbatch", "--parsable", "-p", "urgent", "--gres=gpu:2", "-o", "/dev/null", "--wrap", "sleep 1")
    job = live.until(lambda: (now := box.job(job["id"]))["attempt"] == 2 and now["status"] == "running" and now, "the second attempt")
    assert [attempt["cause"] for attempt in job["attempts"]] == ["preempted", None], "without retries, as one that nexus preempts"
    assert cluster.fact(urgent, "JobState") == "COMPLETED"


def test_a_log_folder_that_the_nodes_do_not_see(cluster, box):
    drain(cluster)
    job_id = box.add("true")
    assert "DRAINED" in box.await_reason(job_id, "Slurm has it as", "DRAINED")
    os.rename(folder_of(box, job_id), box.path("gone"))
    resume(cluster)
    job = box.wait(job_id, "failed")
    assert job["cause"] == "launch" and "must be on a file system that the nodes share" in job["cause_line"]


# Nothing is lost, nothing runs twice

def test_service_is_killed_while_slurm_goes_on(cluster, box):
    runs = box.add(f"until [ -e {box.path('go')} ]; do sleep 0.1; done; echo ran >> {box.path('runs')}; exit 4")
    ends = box.add(f"until [ -e {box.path('end')} ]; do sleep 0.1; done; exit 6")
    box.wait(ends, "running")
    waits = [box.add(f"echo {number} >> {box.path('runs')}") for number in range(5)]
    box.await_reason(waits[-1], "Slurm has it as")
    cluster_ids = [box.job(job_id)["slurm_id"] for job_id in (runs, ends, *waits)]
    box.kill_all_of_service()
    box.path("end").touch()
    live.until(lambda: cluster.fact(cluster_ids[1], "JobState") in ("COMPLETED", "FAILED"), "the end while nobody looks")
    live.until(lambda: live.read(box.path("runs")).split() == ["0", "1", "2", "3", "4"], "what waited to run, meanwhile")
    box.start()
    assert box.wait(ends, "failed")["exit_code"] == 6 and box.job(runs)["status"] == "running"
    for job_id in waits:
        box.wait(job_id, "completed")
    box.path("go").touch()
    assert box.wait(runs, "failed")["exit_code"] == 4
    assert [box.job(job_id)["slurm_id"] for job_id in (runs, ends, *waits)] == cluster_ids
    assert sorted(live.read(box.path("runs")).split()) == ["0", "1", "2", "3", "4", "ran"]
    assert len(cluster.jobs()) == 7


KILL = ("import os, time; run_sbatch = nexus.Slurm.run_sbatch; "
        "nexus.Slurm.run_sbatch = lambda self, argv: [time.sleep(0.05) for _ in iter(lambda: os.path.exists({}), True)] and None or {}")
CRASHES = [  # when, what is put in the place of run_sbatch(), how often Slurm is asked for the first job in the end
    ("between the intent and sbatch", "os.kill(os.getpid(), 9)", 1),
    ("between sbatch and its record", "run_sbatch(self, argv) and os.kill(os.getpid(), 9)", 1),
    ("sbatch gets through after the next service has looked",
     "os.spawnlp(os.P_NOWAIT, 'sh', 'sh', '-c', 'until [ -e GO ]; do sleep 0.05; done; exec \"$0\" \"$@\"', *argv) and "
     "os.kill(os.getpid(), 9)", 2),
]


@pytest.mark.parametrize("when, crash, count", CRASHES, ids=[case[0] for case in CRASHES])
def test_service_is_killed_while_it_hands_over(cluster, when, crash, count):
    jobs = 3
    with cluster.box(is_starting=False) as box:
        box.serve(KILL.format(repr(str(box.path("answered"))), crash.replace("GO", str(box.path("go")))))
        command = f"echo $NEXUS_JOB_ID >> {box.path('runs')}"
        ids = box.ask("POST", "/queue", [{"command": command} for _ in range(jobs)], key="key-00000001")["ids"]
        box.path("answered").touch()
        live.until(lambda: not box.pid(), "the service's death")
        box.start()
        live.until(cluster.jobs, "it to be handed over")
        box.path("go").touch()
        for job_id in ids:
            box.wait(job_id, "completed")
        if count > 1:
            live.until(lambda: len(cluster.jobs()) == jobs - 1 + count, "the late sbatch")
            over = ("COMPLETED", "CANCELLED", "FAILED")     # this when the folder that it writes to has gone by now
            live.until(lambda: all(state in over for _, state, *_ in cluster.jobs()), "its end")
        assert len(cluster.jobs()) == jobs - 1 + count
        assert sorted(live.read(box.path("runs")).split()) == sorted(ids)


def test_slurmctld_goes_and_comes_back(cluster, box):
    runs = box.add(f"until [ -e {box.path('go')} ]; do sleep 0.1; done; exit 7", gpus=2)
    box.wait(runs, "running")
    waits = box.add("echo done")
    box.await_reason(waits, "Slurm has it as")
    cluster.stop_slurmctld()
    late = box.add("echo late")
    box.await_reason(late, "Slurm does not answer: Unable to contact slurm controller")
    check = next(check for check in box.health()["checks"] if check["name"] == "Slurm")
    assert not check["is_ok"] and "Unable to contact" in check["reading"]
    assert "Unable to contact" in box.nexus().stdout and "scontrol ping" in box.nexus().stdout
    assert box.job(runs)["status"] == "running"
    cluster.start_slurmctld()
    box.path("go").touch()
    assert box.wait(runs, "failed")["exit_code"] == 7
    box.wait(waits, "completed", timeout_s=25)          # it is asked again soon
    box.wait(late, "completed")
    assert len(cluster.jobs()) == 3 and box.health()["is_healthy"]


def test_the_user_cannot_be_looked_up_for_a_while(cluster, box):
    """As when sssd is down: squeue then says so, shows no job, and ends with 0."""
    runs, waits = (box.add(f"until [ -e {box.path('go')} ]; do sleep 0.1; done; exit 7", gpus=2) for _ in range(2))
    box.wait(runs, "running")
    box.await_reason(waits, "Slurm has it as")
    lying = box.bin / "squeue"
    lying.write_text("#!/bin/sh\necho 'squeue: error: Invalid user: 61001' >&2\n")
    lying.chmod(0o755)
    box.await_reason(waits, "Slurm does not answer: Invalid user: 61001")
    assert "getent passwd" in box.nexus().stdout and not box.health()["is_healthy"]
    lying.unlink()
    box.path("go").touch()
    for job_id in (runs, waits):
        job = box.wait(job_id, "failed")
        assert (job["exit_code"], job["attempt"]) == (7, 1)
    assert len(cluster.jobs()) == 2


def test_slurmctld_crashes_and_forgets_the_latest_jobs(cluster, box):
    """It saves some seconds late; others get the ids that it has forgotten."""
    drain(cluster)
    cluster.say("scontrol", "reconfigure")              # has it save
    cluster.stop_slurmctld()
    shutil.copytree(cluster.folder / "state", cluster.folder / "saved")
    cluster.start_slurmctld()
    command = f"echo $NEXUS_JOB_ID >> {box.path('runs')}"
    ids = box.ask("POST", "/queue", [{"command": command} for _ in range(3)], key="key-00000001")["ids"]
    for job_id in ids:
        box.await_reason(job_id, "Slurm has it as")
    cluster.stop_slurmctld(9)
    shutil.rmtree(cluster.folder / "state")
    (cluster.folder / "saved").rename(cluster.folder / "state")
    time.sleep(1)                                       # Slurm tells when it began in whole seconds
    cluster.start_slurmctld()
    others = [cluster.say("sbatch", "--parsable", "--chdir=/", "--output=/dev/null", "--wrap", "true") for _ in range(2)]
    resume(cluster)
    for job_id in ids:
        assert box.wait(job_id, "completed")["attempt"] == 2
    assert sorted(live.read(box.path("runs")).split()) == sorted(ids)
    live.until(lambda: {state for slurm_id, state, *_ in cluster.jobs() if slurm_id in others} == {"COMPLETED"}, "those of others")


@pytest.mark.parametrize("is_watched", [True, False], ids=["nexus saw that they began", "nexus did not see it"])
def test_slurmctld_crashes_before_it_saves_that_jobs_began(cluster, box, is_watched):
    """It has them pending again, though they have ended.  Their results count, and nothing runs twice."""
    drain(cluster)
    command = f"echo $NEXUS_JOB_ID >> {box.path('runs')}; until [ -e {box.path('go')} ]; do sleep 0.1; done"
    well, bad = box.add(command, gpus=1, retries=1), box.add(f"{command}; exit 3", gpus=1)
    for job_id in (well, bad):
        box.await_reason(job_id, "Slurm has it as")
    if not is_watched:
        box.kill_all_of_service()
    cluster.stop_slurmctld()                            # it saves
    shutil.copytree(cluster.folder / "state", cluster.folder / "saved")
    cluster.start_slurmctld()
    resume(cluster)
    live.until(lambda: len(live.read(box.path("runs")).split()) == 2, "both to begin")
    if is_watched:
        for job_id in (well, bad):
            box.wait(job_id, "running")
    cluster.stop_slurmctld(9)
    box.path("go").touch()
    live.until(lambda: all((folder_of(box, job_id) / "result-1.json").exists() for job_id in (well, bad)), "their results")
    shutil.rmtree(cluster.folder / "state")
    (cluster.folder / "saved").rename(cluster.folder / "state")
    cluster.start_slurmctld()
    if not is_watched:
        box.start()
    assert box.wait(well, "completed")["attempt"] == 1
    assert [box.wait(bad, "failed")[key] for key in ("exit_code", "cause", "attempt")] == [3, "exit", 1]
    assert sorted(live.read(box.path("runs")).split()) == sorted([well, bad])


def test_how_a_job_ended_that_slurm_has_forgotten(cluster, box):
    """Its slurm.log says what Slurm did to it, whatever its own exit code is.  Slurm forgets after minutes: here its squeue does."""
    tidy = "trap 'exit 0' TERM; echo begun; while :; do sleep 1000 & wait; done"
    cancelled, trapped, lost = (box.wait(box.add(command, gpus=gpus), "running") for command, gpus in (
        ("sleep 1000", 0), (tidy, 0), ("sleep 1000", 1)))
    live.until(lambda: box.logs(trapped["id"]), "its trap")
    box.kill_all_of_service()
    for job in (cancelled, trapped):
        cluster.say("scancel", job["slurm_id"])
    live.until(lambda: [state for _, state, *_ in cluster.jobs()].count("CANCELLED") == 2, "their end")
    cluster.say("scontrol", "update", "nodename=n1", "state=down", "reason=broken")
    live.until(lambda: cluster.fact(lost["slurm_id"], "JobState") == "NODE_FAIL", "its end")
    (box.bin / "squeue").write_text("#!/bin/sh\n")
    (box.bin / "squeue").chmod(0o755)
    box.start()
    for job, status, cause, words in ((cancelled, "cancelled", "killed", "CANCELLED AT"), (trapped, "cancelled", "killed", "CANCELLED AT"),
                                      (lost, "failed", "node-fail", "NODE FAILURE")):
        told = box.wait(job["id"], status)
        assert told["cause"] == cause and words in told["cause_line"], told


def test_the_launcher_is_changed_while_slurm_has_jobs(cluster):
    with cluster.box() as box:
        job_id = box.add(f"until [ -e {box.path('go')} ]; do sleep 0.1; done; exit 3", gpus=2)
        then = box.add("echo $SLURM_JOB_ID")
        box.await_reason(then, "Slurm has it as")
        box.write_config(launcher="direct")
        box.environ["NEXUS_MOCK_GPUS"] = "1"
        assert box.nexus("restart").returncode == 0
        here = box.add("echo here $SLURM_JOB_ID.")
        assert box.logs(box.wait(here, "completed")["id"]) == "here .\n"
        box.path("go").touch()
        assert box.wait(job_id, "failed")["exit_code"] == 3
        assert box.logs(box.wait(then, "completed")["id"]).strip() == box.job(then)["slurm_id"]


def test_accounts(accounted):
    """A real slurmdbd: an account's limit, and a refused one."""
    with accounted.box(account="lab", partition="gpu") as box:
        accounted.say("sacctmgr", "-i", "modify", "account", "lab", "set", "MaxSubmitJobs=6")
        command = f"echo {{}} >> {box.path('runs')}; until [ -e {box.path('go')} ]; do sleep 0.1; done"
        ids = box.ask("POST", "/queue", [{"command": command.format(number), "gpus": 0} for number in range(20)],
                      key="key-00000001")["ids"]
        box.await_reason(ids[-1], "Slurm takes no more jobs now: AssocMaxSubmitJobLimit")
        box.path("go").touch()
        for job_id in ids:
            box.wait(job_id, "completed")
        accounted.say("sacctmgr", "-i", "modify", "account", "lab", "set", "MaxSubmitJobs=-1")
        assert sorted(map(int, live.read(box.path("runs")).split())) == list(range(20))
        box.write_config(account="bad")
        assert box.nexus("restart").returncode == 0
        box.await_reason(box.add("true"), "Slurm takes no jobs: Invalid account or account/partition combination specified")
        assert any("see [slurm] partition, account" in hint for hint in box.status()["hints"])


# What Slurm refuses, and why a job waits

REFUSALS = [  # reason, settings, what the job waits for, what the hints say
    ("a wrong partition", {"partition": "nope"}, "Slurm takes no jobs: invalid partition specified: nope; Invalid partition name specified",
     "see [slurm] partition"),
    ("a refused account", {"partition": "closed", "account": "nobody's"}, "Invalid account or account/partition combination specified",
     "see [slurm] partition"),
    ("an option that there is not", {"extra_args": ["--nonsense"]}, "unrecognized option '--nonsense'", "see [slurm] partition"),
]


def test_slurm_takes_no_jobs(cluster):
    """Whatever the reason: the jobs wait, and run once it is gone."""
    usual = {"partition": "main", "account": "", "extra_args": []}
    with cluster.box(is_starting=False) as box:
        for reason, settings, waits_for, hint in REFUSALS:
            box.write_config(**{**usual, **settings})
            assert box.nexus("restart" if box.pid() else "start").returncode == 0
            job_id = box.add("true")
            for each in box.ask("GET", "/queue"):
                box.await_reason(each["id"], waits_for)
            status = box.status()
            assert any(hint in one for one in status["hints"]) and waits_for in status["slurm"]["trouble"], reason
            assert not box.health()["is_healthy"] and not cluster.jobs()
        ids = [job["id"] for job in box.ask("GET", "/queue")]
        assert job_id in ids and len(ids) == len(REFUSALS)
        box.write_config(**usual)
        assert box.nexus("restart").returncode == 0
        for job_id in ids:
            box.wait(job_id, "completed")


def test_what_a_job_cannot_have(cluster):
    with cluster.box(partition="short", retry_backoff_seconds=0.1) as box:
        for options, words in (({"gpus": 0.5}, "whole ones"), ({"gpu_ids": [0]}, "gpu_ids"), ({"gpu_mem_mib": 100}, "gpu_mem_mib"),
                               ({"gpu_type": "full"}, "sinfo -o %G"), ({"gpu_type": "RTX 3090"}, "cannot be a type in Slurm")):
            status, answer = box.call("POST", "/queue", {"command": "true", **options})
            assert status == 400 and words in answer["message"], answer
        job = box.wait(box.add("true", gpus=3), "failed")
        assert job["cause"] == "launch" and "Requested node configuration is not available" in job["cause_line"]
        job = box.wait(box.add("true", timeout_seconds=1200), "failed")
        assert job["cause"] == "launch" and "Requested time limit is invalid" in job["cause_line"] and "ask for less" in job["cause_line"]
        assert box.wait(box.add("true"), "completed")


def test_held_jobs_and_other_reasons(cluster, box):
    first, held = box.add("sleep 1000", gpus=2), box.add("true")
    box.wait(first, "running")
    box.await_reason(held, "Slurm has it as", "Resources")
    slurm_id = box.job(held)["slurm_id"]
    cluster.say("scontrol", "uhold", slurm_id)
    box.await_reason(held, f"Slurm has it as {slurm_id}: JobHeldUser")
    why = box.nexus("why", held).stdout
    assert f"Slurm has it as {slurm_id}" in why and "GPU 0" not in why
    status, answer = box.call("PATCH", f"/queue/{held}", {"position": 0})
    assert status == 409 and slurm_id in answer["message"] and "scontrol update" in answer["hint"]
    status, answer = box.call("PATCH", f"/queue/{first}", {"timeout_seconds": 7200})
    assert status == 409 and "scontrol update" in answer["hint"]
    cluster.say("scontrol", "release", slurm_id)
    box.ask("DELETE", f"/jobs/{first}")
    box.wait(held, "completed")


def test_no_slurm_here():
    with live.Box(gpus={}, launcher="slurm", is_starting=False) as box:
        for name in ("python3", "sh", "bash", "ps"):
            (box.bin / name).symlink_to(subprocess.run(["which", name], capture_output=True, text=True).stdout.strip())
        box.environ["PATH"] = str(box.bin)
        box.start()
        job_id = box.add("true")
        box.await_reason(job_id, "scontrol was not found on PATH")
        assert any("run nexus where sbatch works" in hint for hint in box.status()["hints"])
        assert not box.health()["is_healthy"]
        box.ask("DELETE", f"/queue/{job_id}")
        assert box.job(job_id)["status"] == "cancelled"


# Order and limits

def test_nexus_order_and_limits_hold(cluster):
    with cluster.box(max_submitted=3) as box:
        box.ask("POST", "/service/pause")
        late = [box.add(f"echo {number} >> {box.path('runs')}", gpus=2) for number in range(4)]
        first = box.add(f"echo first >> {box.path('runs')}", gpus=2, priority="high")
        after = box.add(f"echo after >> {box.path('runs')}", after=[late[0]])
        grouped = [box.add("sleep 1000", group="g", max_concurrent=1) for _ in range(2)]
        time.sleep(0.5)
        assert not cluster.jobs() and "paused" in box.job(late[0])["waiting_for"]
        box.ask("POST", "/service/resume")
        for job_id in (*late, first, after):
            box.wait(job_id, "completed")
        order = live.read(box.path("runs")).split()
        assert order[0] == "first" and order.index("after") > order.index("0") and len(order) == 6
        box.wait(grouped[0], "running")
        box.await_reason(grouped[1], "group g")
        assert box.status()["slurm"]["running_jobs"] == 1
        more = [box.add("sleep 1000", gpus=0) for _ in range(3)]
        box.await_reason(more[2], "Slurm has 3 jobs of nexus, as many as [slurm] max_submitted allows")


# What is told

def test_status_tells_what_slurm_has(cluster, box):
    """As openapi.json describes it."""
    job_id, waits = box.add("sleep 1000", gpus=2), box.add("sleep 1000")
    box.wait(job_id, "running")
    box.await_reason(waits, "Slurm has it as")
    assert box.nexus("restart").returncode == 0         # it looks at partitions as it starts, and then twice a minute
    box.await_service()
    live.until(lambda: box.status()["slurm"]["partitions"], "a look at them")
    told = box.status()["slurm"]
    partitions = told.pop("partitions")
    assert told == {"cluster": "nx", "trouble": None, "running_jobs": 1, "handed_jobs": 1, "max_submitted": 100}
    assert {one["name"]: one["gpus"] for one in partitions} == dict.fromkeys(PARTITIONS, 2)
    line = "Partition main (default): up, 2 of 2 GPUs in use, time limit UNLIMITED\n"
    assert line in box.nexus().stdout
    components = box.ask("GET", "/openapi.json")["components"]
    for path, schema in (("/status", {"$ref": "#/components/schemas/Status"}),
                         ("/jobs", {"type": "array", "items": {"$ref": "#/components/schemas/Job"}})):
        jsonschema.validate(box.ask("GET", path), {**schema, "components": components})
    text = box.nexus().stdout
    assert "Slurm (nx): 2 jobs of nexus there, 1 running\n" in text
    assert f"  Job ID: {job_id}\n" in text and f"  Slurm: {box.job(job_id)['slurm_id']} on n1\n" in text
    assert "on n1" in box.nexus("why", job_id).stdout and "Slurm's job: " in box.nexus("show", job_id).stdout
    metrics = box.call("GET", "/metrics")[1]
    assert 'nexus_jobs{status="running"} 1\n' in metrics and 'nexus_check_ok{check="Slurm"} 1\n' in metrics
    done = box.nexus("attach", job_id)
    assert done.returncode == 4 and "no screen session" in done.stderr
    jobs = {job["id"] for job in box.ask("GET", "/jobs")}
    with console.Terminal(box.argv("run", "--tty", "bash"), {**box.environ, "TERM": "xterm"}) as terminal:
        code, text = terminal.end()
        assert code == 2 and "hint: srun --gres=gpu:1 --pty bash; to see only its output: nexus run --tty bash </dev/null" in text
    assert {job["id"] for job in box.ask("GET", "/jobs")} == jobs, "it has added none"


def test_the_section_of_the_readme(accounted):
    """As it stands there, but for the command and the ids."""
    text = (live.NEXUS.parent / "docs" / "slurm.md").read_text().partition("## With Slurm\n")[2].partition("\n## ")[0]
    block = text.partition("```toml\n")[2].partition("```")[0]
    chosen = {key: json.loads(fact.partition("#")[0]) for key, mark, fact in (line.partition(" = ") for line in block.splitlines()) if mark}
    assert chosen.pop("launcher") == "slurm"
    with accounted.box(**chosen) as box:
        shown, works = {}, f"echo trains; until [ -e {box.path('go')} ]; do sleep 0.1; done"
        for line in text.partition("```bash\n")[2].partition("```")[0].splitlines():
            command = line.partition("  #")[0].replace("python train.py", works).replace("abc", shown.get("add", ""))
            words = shlex.split(command)[1:]
            if words[:1] == ["logs"]:
                box.path("go").touch()
            done = box.nexus(*words)
            assert done.returncode == (4 if words[:1] == ["kill"] else 0), (command, done.stdout, done.stderr)     # it has ended by then
            shown[words[0] if words else ""] = done.stdout.strip()
            if words[:1] == ["add"]:
                box.wait(shown["add"], "running")
        job = box.wait(shown["add"], "completed")
        wanted = {"Partition": "gpu", "Account": "lab", "TimeLimit": "02:00:00", "TresPerNode": "gres:gpu:2", "NumCPUs": "8",
                  "Features": "a100"}
        assert {name: accounted.fact(job["slurm_id"], name) for name in wanted} == wanted
        assert "Slurm (nx): 1 job of nexus there, 1 running" in shown[""] and shown["logs"] == "trains"


# At last: by now Slurm has looked

def test_time_limits(limited):
    _, box, theirs = limited
    ours = box.add("sleep 1000", timeout_seconds=1.5)
    job = box.wait(ours, "failed")
    assert job["cause"] == "timeout" and "its time limit is 1s" in job["cause_line"] and 1.4 < job["runtime_seconds"] < 60
    job = box.wait(theirs, "failed", timeout_s=90)
    assert job["cause"] == "timeout" and "DUE TO TIME LIMIT" in job["cause_line"] and box.logs(theirs) == "tidy\n"

"""What Slurm prints, as 22.05.8 says it."""

import re

import pytest
from makers import SAMPLES

import nexus


def slurm_sample(name):
    return (SAMPLES / "slurm" / f"22.05.8_{name}.stdout").read_text()


def test_parse_slurm_jobs():
    found = {one.id: one for one in nexus.parse_slurm_jobs(slurm_sample("squeue"), "0-0a1b2c3d")}
    assert {one.id: (one.state, one.key) for one in found.values()} == {
        "1": ("COMPLETED", "aaaaaaaaaaaa"), "2": ("FAILED", "bbbbbbbbbbbb"), "3": ("RUNNING", ""), "4": ("RUNNING", ""),
        "5": ("TIMEOUT", "eeeeeeeeeeee"), "6": ("PREEMPTED", "ffffffffffff"), "7": ("COMPLETED", ""),
        "9": ("PENDING", "111111111111"), "10": ("CANCELLED", "222222222222")}, "an array is none of ours"
    assert found["5"] == nexus.SlurmJob("5", "TIMEOUT", "TimeLimit", "n1", 1795282788.0, 1795282817.0, "eeeeeeeeeeee")
    assert found["9"] == nexus.SlurmJob("9", "PENDING", "JobHeldUser", key="111111111111")
    assert not any(one.key for one in nexus.parse_slurm_jobs(slurm_sample("squeue"), "0-other")), "another service's"
    assert nexus.parse_slurm_jobs("5|RUNNING|N/A|N/A||None|nexus_abc|billing: 7", "0-0a1b2c3d")[0].key is None, "somebody has rewritten it"


def test_parse_slurm_partitions():
    found = nexus.parse_slurm_partitions(slurm_sample("partitions"), slurm_sample("nodes"))
    assert found[0] == nexus.SlurmPartition("main", "up", True, "UNLIMITED", 3, 2)
    assert [(one.name, one.is_default, one.time_limit, one.gpus, one.gpus_used) for one in found[1:3]] == [
        ("urgent", False, "UNLIMITED", 2, 2), ("short", False, "00:10:00", 3, 2)]
    assert nexus.parse_slurm_partitions("PartitionName=x State=DOWN\nslurm_load_partitions error", "") == (
        nexus.SlurmPartition("x", "down", False, "?", 0, 0),)


@pytest.mark.parametrize("text, count", [
    ("gpu:a100:2(S:0-1),gpu:1,shard:8", 3), ("gpu:a100:1(IDX:0,2)", 1), ("gpu:(null):1(IDX:0)", 1), ("(null)", 0),
    ("gpu:a100:0(IDX:N/A)", 0)])
def test_count_gres(text, count):
    assert nexus.count_gres(text) == count


@pytest.mark.parametrize("text, slurm_id", [
    ("12\n", "12"), ("12;nx\n", "12"), ("sbatch: warning: a new rule from 2025 on\n12\n", "12"), ("", None),
    ("sbatch: error: Batch job submission failed: Invalid partition name specified\n", None)])
def test_what_sbatch_answers(text, slurm_id):
    match = re.search(nexus.SBATCH_ANSWER, text)
    assert (match and match[1]) == slurm_id


SLURM_FAULTS = [  # what sbatch or squeue said, as one line, what it is the fault of, what is in the hint
    ("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition name specified\n",
     "invalid partition specified: nope; Invalid partition name specified", "config", "[slurm] partition, account, qos"),
    ("sbatch: unrecognized option '--nonsense'\nTry \"sbatch --help\" for more information\n",
     "unrecognized option '--nonsense'", "config", "extra_args"),
    ("sbatch: error: Memory specification can not be satisfied\n"
     "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
     "Memory specification can not be satisfied; Requested node configuration is not available", "job", "ask for less"),
    ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
     "limit, user's size and/or time limits)\n", "AssocMaxSubmitJobLimit; Job violates accounting/QOS policy (job submit limit, user's "
     "size and/or time limits)", "limit", "as jobs end"),
    ("sbatch: error: QOSMaxGRESPerUser\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
     "limit, user's size and/or time limits)\n", "QOSMaxGRESPerUser; Job violates accounting/QOS policy (job submit limit, user's "
     "size and/or time limits)", "job", "ask for less"),
    ("sbatch: error: QOSMaxSubmitJobPerUserLimit\n", "QOSMaxSubmitJobPerUserLimit", "", ""),
    ("sbatch: error: Slurm job queue full, sleeping and retrying\n", "Slurm job queue full, sleeping and retrying", "limit", "as jobs end"),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
     "Unable to contact slurm controller (connect failure)", "cluster", "scontrol ping"),
    ("squeue: error: If munged is up, restart with --num-threads=10\nslurm_load_jobs error: Protocol authentication error\n",
     "If munged is up, restart with --num-threads=10; Protocol authentication error", "cluster", "munge -n"),
    ("sbatch: error: something new\n", "something new", "", ""),
]


@pytest.mark.parametrize("said, words, fault, hint", SLURM_FAULTS, ids=[case[1][:40] for case in SLURM_FAULTS])
def test_why_slurm_refuses(said, words, fault, hint):
    assert nexus.clean_slurm_words(said) == words
    assert nexus.read_refusal(words)[0] == fault and hint in nexus.read_refusal(words)[1]


@pytest.mark.parametrize("line, shown", [
    ("9" * 500 + "|RUNNING|||||nexus_abc|nexus:0-0:k", []),
    ("7|RUNNING|0001-01-01T00:00:00|9999-12-31T23:59:60|n|r|nexus_abc|nexus:0-0:k", [(None, None)]),
    ("7|RUNNING|99999-01-01|-1|n|r|nexus_abc|nexus:0-0:k", [(None, None)])])
def test_hostile_rows_of_squeue_are_unusable(line, shown):
    assert [(job.started_at, job.ended_at) for job in nexus.parse_slurm_jobs(line, "0-0")] == shown

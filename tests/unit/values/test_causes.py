"""CAUSES: what follows from the row of a cause, for each of them."""

import pytest
from makers import NOW, config, finished, running

import nexus

WITH_UNKNOWN = {**nexus.CAUSES, "of-a-later-nexus": nexus.UNKNOWN_CAUSE}


@pytest.mark.parametrize("word", WITH_UNKNOWN)
def test_what_becomes_of_its_job(word):
    row = WITH_UNKNOWN[word]
    one = running("abc", stop_cause=word, stop_line="why", retries=1)
    status, facts = nexus.judge_end(one, nexus.Result(1), nexus.Evidence(""), 60.0, config().jobs, NOW)
    assert (facts["cause"], facts["cause_line"]) == (word, "why")
    assert status == ("cancelled" if row.cancels else "failed" if word == nexus.LAUNCH else "pending")
    assert ("retry_at" in facts) == (status == "pending" and not row.requeues), "a retry comes after a while"
    again = running("abc", retries=1, attempts=(nexus.Attempt(1, cause=word),))
    status, _ = nexus.judge_end(again, nexus.Result(1), nexus.Evidence(""), 60.0, config().jobs, NOW)
    assert status == ("pending" if row.requeues or word == nexus.LAUNCH else "failed"), "it was no retry of the job's"


@pytest.mark.parametrize("word", WITH_UNKNOWN)
def test_what_people_read_of_it(word):
    row = WITH_UNKNOWN[word]
    told = nexus.job_json(finished("abc", status="failed", cause=word, exit_code=1), NOW, "gpu1")
    shown = nexus.format_job(told, nexus.Paint(""))
    assert (word in nexus.CAUSES) == (f"{word}: {row.meaning}" in nexus.JOB["cause"].help) and "\n" not in row.meaning + row.remedy
    assert told["outcome"] == ("exit 1" if word == nexus.EXIT else word)
    assert ("hint: " in shown) == bool(row.remedy) and "{" not in shown and (not row.remedy or "abc" in shown.partition("hint: ")[2])
    waiting = running("abc", status="pending", cause=word, cause_line="why")
    why = ": why" if word in ("launch", "requeued") else ""
    assert nexus.describe_failure(waiting) == f"attempt 1 failed ({word}{why})", "else it is a line of its log"
    assert row.is_stop == (word in nexus.JOB["stopping"].help.split(": ")[1].split(", "))


REMEDIES = [  # cause, its line, whether the remedy is the environment of a shell
    ("exit", "ModuleNotFoundError: No module named 'torch'", True), ("exit", "ImportError: No module named torch", True),
    ("exit", "/usr/bin/python3: No module named torch", True), ("exit", "bash: line 1: python: command not found", True),
    ("exit", "sh: 1: python3.11: not found", True), ("exit", "ValueError: No module", False), ("exit", None, False),
    ("signal", "No module named torch", False),
]


@pytest.mark.parametrize("cause, line, is_missing", REMEDIES, ids=[f"{case[0]} {case[1]}" for case in REMEDIES])
def test_where_a_python_or_its_module_is_missing_the_shells_environment_may_help(cause, line, is_missing):
    remedy = nexus.find_remedy(cause, line, "abc")
    assert (remedy == nexus.THIS_ENV.format(id="abc")) == is_missing and (is_missing or not remedy)
    told = nexus.job_json(finished("abc", status="failed", cause=cause, cause_line=line, exit_code=1), NOW, None)
    assert told["remedy"] == (remedy or None) and (f"hint: {remedy}" in nexus.format_job(told, nexus.Paint(""))) == is_missing


def test_they_are_what_others_may_tell():
    """The limits, what job.sh and nodes tell, and what Slurm's words mean."""
    told = [*nexus.LIMITS.values(), *nexus.FACT_KINDS["EndCause"].schema["enum"], *filter(None, nexus.SLURM_ENDS.values()),
            *(cause for _, cause in nexus.SLURM_KILLS)]
    assert set(told) - {nexus.BOUNCE} <= nexus.CAUSES.keys()
    assert all(nexus.CAUSES[word].is_stop for word in nexus.LIMITS.values())
    assert nexus.GpuRun.FIELDS["status"].schema["enum"] == ["running", *nexus.FINAL, "preempted", "requeued"]
    blaming = {word for word, row in nexus.CAUSES.items() if row.blames_gpu}
    harmless = {word for word, row in nexus.CAUSES.items() if not row.may_be_quick}
    assert blaming == {"exit", "signal", "cuda-oom"} and harmless == {"timeout", "reboot"}, "for GPUs and for groups"
    assert nexus.get_cause(None) == nexus.get_cause("of-a-later-nexus") == nexus.UNKNOWN_CAUSE

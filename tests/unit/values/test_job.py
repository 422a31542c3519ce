"""What of a job follows from its fields."""

import json

import pytest
from jsonschema import Draft202012Validator
from makers import find_faults, job

import nexus

SHARES = [  # GPUs, whether alone, hundredths of each
    (0, False, []), (1, False, [100]), (3, False, [100, 100, 100]), (0.5, False, [50]), (0.01, False, [1]),
    (1.5, False, [100, 50]), (2.25, False, [100, 100, 25]), (0.29, False, [29]), (1.15, False, [100, 15]),
    (0.5, True, [100]), (1.5, True, [100, 100]), (2, True, [100, 100]), (0, True, []),
]


@pytest.mark.parametrize("gpus, exclusive, shares", SHARES)
def test_list_shares(gpus, exclusive, shares):
    assert nexus.list_shares(job(gpus=gpus, exclusive=exclusive)) == shares


FACTS = {  # what a file or a node may say of this kind, and what not
    "Epoch": ([0, 253402300799], [-1, 253402300800]), "Span": ([0, 0.5], [-1, "1"]), "Ticks": ([0, 10**15], [-1, 0.5]),
    "Amount": ([-40, 0.5], [None, float("nan")]), "FileSize": ([0, 2**53], [-1]), "Count": ([0, 10**9], [-1]),
    "Index": ([0, 9999], [-1, 10000]), "Pid": ([1, 2**31 - 1], [0, 2**31]), "ExitCode": ([0, 255], [-1, 256]),
    "Signal": ([1, 64], [0, 65]), "Words": (["", "x" * 9999], [1]), "Name": (["", "a b"], [None]),
    "JobId": (["abc", "wXyz"], ["ab", "ab1"]), "AttemptKey": (["abc-1-1"], ["abc", "abc-1", "ab1-1-1", "abc-1-1 "]),
    "Uuid": (["GPU-1", "n1/MIG-2"], ["", "-x", "../x", "a b"]),
    "Commit": (["a" * 40, "0" * 64], ["a" * 39, "A" * 40, "HEAD"]),
    "Session": (["123.nexus-abc"], ["123", "nexus-abc", "123.a/b", "123.a\n"]), "BootId": (["0f-aB"], ["", "a/b"]),
    "FilePath": (["/", "/" + "x" * 4094], ["x", "/a\n", "/" + "x" * 4095]), "Limit": (["timeout", "host-memory", "idle"], ["exit"]),
    "ScreenVariable": (["SCREENDIR=/run/x"], ["SCREENDIR=x", "PATH=/x", "SCREENDIR=/a\n"]),
    "EndCause": (["launch", "session-lost", "signal", "reboot"], ["killed", "timeout"])}


@pytest.mark.parametrize("kind", nexus.FACT_KINDS)
def test_what_a_fact_from_elsewhere_may_be(kind):
    schema, (taken, refused) = nexus.FACT_KINDS[kind].schema, FACTS[kind]
    assert not any(find_faults(schema, fact) for fact in taken) and all(find_faults(schema, fact) for fact in refused)


EARLIER = [  # reason, attempts before, the numbers of all then
    ("the first", [], [1]), ("it failed", [nexus.Attempt(1, pid=7, cause="exit")], [1, 2]),
    ("it never began: its place is taken", [nexus.Attempt(1, pid=7, cause="exit"), nexus.Attempt(2, cause="requeued")], [1, 3]),
    ("its machine went down", [nexus.Attempt(1, pid=7, cause="requeued")], [1, 2])]


@pytest.mark.parametrize("reason, earlier, numbers", EARLIER, ids=[case[0] for case in EARLIER])
def test_each_attempt_has_a_number_of_its_own(reason, earlier, numbers):
    begun = nexus.begin_attempt(job(number=5, attempts=tuple(earlier), log_base=(3, 4)), node="n1")
    assert [one.number for one in begun.attempts] == numbers and begun.attempts[:-1] == tuple(earlier)[:len(numbers) - 1]
    assert begun.attempts[-1] == nexus.Attempt(numbers[-1], node="n1", log_start=(3, 4))
    assert (begun.attempt, begun.attempt_key) == (numbers[-1], f"abc-5-{numbers[-1]}")


@pytest.mark.parametrize("gpus, text", [(2.0, "2"), (1, "1"), (0, "0"), (0.1 + 0.2, "0.3"), (1.25, "1.25")])
def test_how_many_gpus_are_told(gpus, text):
    assert repr(nexus.round_gpus(gpus)) == text


MARKS = {"asked", "kept", "public", "live", "live_in_slurm", "for_gpus", "form", "hidden", "repeats"}       # of docs/design.md
OTHERS = set(vars(nexus.Field(nexus.LINE))) | {name for name in vars(nexus.Field) if not name.startswith("_")}


@pytest.mark.parametrize("name", nexus.JOB_FIELDS)
def test_a_row_says_only_what_rows_may_say(name):
    assert MARKS <= OTHERS and set(vars(nexus.JOB_FIELDS[name])) <= OTHERS


@pytest.mark.parametrize("cls", [nexus.Job, nexus.Attempt, nexus.Gpu, nexus.GpuProcess, nexus.GpuRun, nexus.Asked, nexus.Choice])
def test_what_a_row_may_be_is_said_in_json_schema(cls):
    for row in cls.FIELDS.values():
        for schema in filter(None, (row.schema, row.text)):
            Draft202012Validator.check_schema(json.loads(json.dumps(schema)))

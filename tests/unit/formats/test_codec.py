"""Facts from outside: each kind has a range, and texts are cut to a harmless line."""

import re

import pytest
from makers import job

import nexus


def test_a_job_says_its_status_in_any_case():
    """One whose status is lost must not be taken for a pending one."""
    assert nexus.encode_value(job())["status"] == "pending"


EDGES = [  # kind, what is taken, what is refused
    ("Epoch", [0, 1.5, 253402300799], [-1, 253402300800, 1e19, -1e19, float("nan"), float("inf"), True, "0", None, [0]]),
    ("Span", [0, 0.5], [-0.1, 1e300, float("inf"), True, "1"]), ("ExitCode", [0, 255], [-1, 256, 2**64 - 1, 1.5, False, "0"]),
    ("Pid", [1, 2**31 - 1], [0, -1, 2**31, 10**18]), ("FileSize", [0, 2**53], [-1, 2**62]), ("Count", [0], [-1, 10**10]),
    ("Index", [0, 9999], [-1, 10000]), ("Amount", [0, -5, 1e12], [1e300, float("nan"), True]),
    ("Session", ["12.nexus_job_abc"], ["12.a b", "x.y", "12.a;id", "12.a\n", "-12.a", "12." + "a" * 99]),
    ("Uuid", ["GPU-1", "MIG-GPU-0/7/0"], ["", "-o", "$(id)", "a b", "a" * 121]),
    ("AttemptKey", ["abc-1-1"], ["abc-1", "../x-1-1", "abc-1-1\n"]),
    ("FilePath", ["/a b/c"], ["a", "-oX", "/a\nb", "/\x1b[2J", "/" + "a" * 4095]), ("BootId", ["b-1"], ["", "$(id)", "a" * 65]),
    ("ScreenVariable", ["SCREENDIR=/run/x"], ["SCREENDIR=x", "LD_PRELOAD=/x", "SCREENDIR=/x\n"]),
    ("Limit", ["timeout", "host-memory", "idle"], ["killed", ""]), ("EndCause", ["launch", "reboot"], ["node-lost", "exit"]),
]


@pytest.mark.parametrize("kind, taken, refused", EDGES, ids=[case[0] for case in EDGES])
def test_each_kind_of_fact_has_a_range(kind, taken, refused):
    for fact in taken:
        assert nexus.decode(kind, fact) == fact
    for fact in refused:
        with pytest.raises(TypeError):
            nexus.decode(kind, fact, "it")


def test_texts_from_outside_are_cut_to_one_harmless_line():
    assert nexus.decode("Words", "a\nb\x1b[2J") == "a b [2J" and nexus.decode("Name", "x" * 101) == "x" * 99 + "…"
    assert len(nexus.decode("Words", "数" * 10**6)) == nexus.MAX_WORDS == len(nexus.decode("Words", "x" * 1000))


def test_limits_that_an_older_agent_kept_hold():
    kept = {"timeout_seconds": 5.0, "timeout_name": "its time limit", "max_memory_gb": 0.5, "kill_grace_seconds": 1,
            "idle_kill_seconds": 60}               # which only the head ends jobs for
    assert nexus.decode("Limits", kept) == nexus.Limits(
        timeout_seconds=5, timeout_name="its time limit", max_memory_gb=0.5, kill_grace_seconds=1)


def test_every_kind_of_an_annotation_can_be_decoded():
    named = {word for cls in vars(nexus).values() if isinstance(cls, type) and issubclass(cls, nexus.Value)
             for kind in cls.__annotations__.values() for word in re.findall(r"\w+", kind)}
    assert nexus.FACT_KINDS.keys() <= named, "no row is for nobody"

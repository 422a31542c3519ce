"""What runners tell, and what screen tells of its sessions."""

import re

import pytest
from makers import SAMPLES

import nexus

SCREENS = [  # reason, text, sessions
    ("none", (SAMPLES / "screen" / "4.9.0_none.stdout").read_text(), {}),
    ("one attached; a name with dots and blanks", (SAMPLES / "screen" / "4.9.0_three.stdout").read_text(), {
        "8822.nexus_job_abc": "Attached", "8825.nexus": "Detached", "8828.with.dots and blanks": "Detached"}),
    ("one was killed", (SAMPLES / "screen" / "4.9.0_dead.stdout").read_text(), {
        "8822.nexus_job_abc": "Detached", "8825.nexus": "Detached", "8835.nexus_job_dead": "Dead ???",
        "8828.with.dots and blanks": "Detached"}),
    ("no date, as before 4.2", "There is a screen on:\n\t123.nexus\t(Detached)\n1 Socket in /run/screen/S-ann.\n",
     {"123.nexus": "Detached"}),
    ("a session without a name of ours", "\tnexus\t(Detached)\n\t12.\t(Detached)\n", {}),
]


@pytest.mark.parametrize("reason, text, sessions", SCREENS, ids=[case[0] for case in SCREENS])
def test_sessions_of_screen(reason, text, sessions):
    assert dict(re.findall(nexus.SCREEN_SESSION, text)) == sessions, reason


SAYINGS = [  # reason, line, saying
    ("a job began", "start abc 1 4242 267381 267384\n", nexus.RunnerEvent("start", "abc", 1, ("4242", "267381", "267384"))),
    ("and ended", "end abc 2 137 6050", nexus.RunnerEvent("end", "abc", 2, ("137", "6050"))),
    ("on a full disk", "end abc 2 137 6050 1", nexus.RunnerEvent("end", "abc", 2, ("137", "6050", "1"))),
    ("its directory is gone", "fail abc 3 cwd", nexus.RunnerEvent("fail", "abc", 3, ("cwd",))),
    ("its GPU was taken by another user's", "bounce abc 1 bob", nexus.RunnerEvent("bounce", "abc", 1, ("bob",))),
    ("another verb", "begin abc 1 2 3", None),
    ("no id", "end 123 1 0 5", None), ("no attempt", "end abc x 0 5", None), ("half a line", "end abc 1 0", None),
    ("two lines in one", "end abc 1 0 5end abd 1 0 5", None),
    ("a code that is none", "end abc 1 x 5", None), ("a digit that is no number", "end abc ² 0 5", None),
    ("a number without end", f"end abc {'9' * 5000} 0 5", None),
]


@pytest.mark.parametrize("reason, line, saying", SAYINGS, ids=[case[0] for case in SAYINGS])
def test_parse_runner_event(reason, line, saying):
    assert nexus.parse_runner_event(line) == saying, reason


HOSTILE_EVENTS = ["start abc 1 9999999999 5 5", "start abc 1 1 9999999999999999999 5", "start abc 1 0 5 5", "start abc 9999999999999 5 5 5",
                  "end abc 1 99999999999999 5", "end abc 1 0 9999999999999999999", "end abc 1 ² 5", "start abc 1 -1 5 5"]


@pytest.mark.parametrize("line", HOSTILE_EVENTS)
def test_an_event_that_no_runner_writes_is_none(line):
    assert nexus.parse_runner_event(line) is None

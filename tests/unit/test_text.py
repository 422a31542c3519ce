"""Section 2: text to value and back."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import texts

import nexus

DURATIONS = [  # reason, seconds, text
    ("minutes and seconds", 725, "12m 5s"),
    ("the third unit is dropped", 8159, "2h 15m"),
    ("no minutes, so the seconds are not worth showing", 3605, "1h"),
    ("days", 3 * 86400 + 4 * 3600, "3d 4h"),
    ("a clock that went back", -5, "0s"),
]


@pytest.mark.parametrize("reason, seconds, text", DURATIONS)
def test_format_duration(reason, seconds, text):
    assert nexus.format_duration(seconds) == text, reason


TIMES = [  # reason, epoch seconds, text
    ("the example of the API", 1729783815.0, "2024-10-24T15:30:15Z"),
    ("parts of seconds are cut", 1729783815.99, "2024-10-24T15:30:15Z"),
    ("not yet", None, None),
]


@pytest.mark.parametrize("reason, at, text", TIMES)
def test_format_time(reason, at, text):
    assert nexus.format_time(at) == text, reason
    if text is not None:
        assert nexus.parse_time(text) == int(at)


MEMORY = [  # reason, MiB, as in the API, as in a sentence
    ("a 3090 has 24 GB", 24576, "24GB", "24GB"), ("a driver that keeps some for itself", 24564, "24GB", "24GB"),
    ("an idle GPU's own use", 11, "0GB", "11MB"), ("none", 0, "0GB", "0MB"), ("an H200", 143771, "140GB", "140.4GB"),
    ("what was asked for is not rounded away", 1536, "2GB", "1.5GB"), ("a whole one says no decimal", 1024, "1GB", "1GB"),
]


@pytest.mark.parametrize("reason, mib, in_api, in_sentence", MEMORY)
def test_format_memory(reason, mib, in_api, in_sentence):
    assert nexus.format_gb(mib) == in_api, reason
    assert nexus.format_memory(mib) == in_sentence, reason


def test_amounts_that_are_compared_look_different_and_what_is_unknown_is_not_zero():
    assert (nexus.format_memory(12250, 2), nexus.format_memory(12288, 2)) == ("11.96GB", "12GB")
    assert nexus.format_gb(None) is None and nexus.format_known(None, "GB") == "unknown"
    assert [nexus.format_known(percent, "%", 0) for percent in (30, 100.0)] == ["30%", "100%"]
    assert (nexus.format_known(0.1 + 0.2, "", 2), nexus.format_known(1234567.5, "")) == ("0.3", "1234567.5")
    assert (nexus.format_count(1, "job"), nexus.format_count(2, "job")) == ("1 job", "2 jobs")


NEAR = [  # word, known words, the suggestion
    ("nam", ["node", "name"], "name"), ("prot", ["host", "port"], "port"),
    ("sreen", ["screen"], "screen"), ("--retrys", ["--retries"], "--retries"),
    ("--cpus", ["--gpus"], None), ("--mem", ["--name"], None), ("--tag", ["--tty"], None), ("cmd", ["cwd"], None), ("hh", ["h"], "h")]


@pytest.mark.parametrize("word, known, near", NEAR)
def test_what_is_suggested_begins_like_the_word_or_has_its_letters(word, known, near):
    assert nexus.suggest(word, known) == (f"did you mean '{near}'?" if near else "")


LINES = [  # reason, text, width, line
    ("plain text stays", "python train.py", 0, "python train.py"),
    ("escape sequences reach no terminal", "\x1b[31mred\x07", 0, " [31mred "),
    ("its beginning and its end stay", "python train.py --seed 14", 16, "python t…seed 14"),
    ("other scripts stay", "größe 数据", 0, "größe 数据"),
    ("and are cut by columns", "数" * 20, 11, "数数…数数数"),
    ("marks take none", "e\u0301" * 5, 5, "e\u0301" * 5),
    ("what turns the direction of all that follows", "a\u202egp.exe\u2066", 0, "a gp.exe "),
]


@pytest.mark.parametrize("reason, text, width, line", LINES)
def test_format_line(reason, text, width, line):
    assert nexus.format_line(text, width) == line, reason


@given(texts, st.integers(2, 40))
def test_a_line_is_harmless_and_fits(text, width):
    line = nexus.format_line(text, width)
    assert nexus.count_columns(line) <= width and ("…" in line or len(line) == len(text))
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in line)


LENGTHS = [  # reason, text, seconds
    ("none", "0", 0), ("seconds", "45s", 45), ("with decimals", "0.5s", 0.5), ("as a clock shows it", "1:30:00", 5400),
    ("minutes", "30m", 1800), ("hours", "2h", 7200), ("a part of one", "1.5h", 5400), ("days", "1d", 86400),
    ("weeks", "1w", 604800), ("several units", "1h30m", 5400), ("apart, as nexus writes them", "2h 15m", 8100),
    ("a blank before the unit, and around", " 2 h ", 7200),
]


def parse_length(text):
    return nexus.parse_field(nexus.ASKED["timeout_seconds"], text, "it")


@pytest.mark.parametrize("reason, text, seconds", LENGTHS)
def test_parse_duration(reason, text, seconds):
    assert parse_length(text) == seconds, reason


NO_LENGTHS = [  # reason, text
    ("nothing", ""), ("a word", "soon"), ("a unit that is none", "2y"), ("below zero", "-5"), ("no number", "nan"),
    ("a colon, of minutes or hours", "1:30"), ("no unit", "90"), ("61 minutes on a clock", "1:61:00"),
    ("a number behind the last unit", "1h30"), ("a line end", "2h\n"), ("digits of another script", "٣h"),
    ("longer than anything lasts", "9" * 5000),
]


@pytest.mark.parametrize("reason, text", NO_LENGTHS)
def test_parse_duration_refuses(reason, text):
    with pytest.raises(nexus.NexusError) as caught:
        parse_length(text)
    assert caught.value.kind == "usage" and len(caught.value.message) < 140 and "1h30m" in caught.value.hint, reason


NOON = time.mktime((2024, 10, 24, 12, 0, 0, 0, 0, -1))
BEGINS = [  # reason, text, seconds after noon
    ("in so long", "+2h", 7200), ("later today", "22:00", 36000), ("that has passed today", "8:30", 73800),
    ("now, so tomorrow", "12:00", 86400),
    ("at once", "now", 0), ("with seconds", "12:00:30", 30),
    ("on another day", "2024-10-25 12:00", 86400), ("with a T", "2024-10-24T13:00", 3600),
    ("in the past", "2024-10-24 11:00", -3600),
]


@pytest.mark.parametrize("reason, text, after_s", BEGINS)
def test_parse_begin(reason, text, after_s):
    assert nexus.parse_begin(nexus.parse_field(nexus.ASKED["begin"], text, "begin"), NOON) == NOON + after_s, reason


ZONED = [  # reason, text, UTC now, UTC then; the local clock is New York's, four hours behind
    ("in UTC", "2024-10-24T15:30:15Z", "2024-10-24T16:00:00Z", "2024-10-24T15:30:15Z"),
    ("the next 22:00 there", "22:00Z", "2024-10-24T16:00:00Z", "2024-10-24T22:00:00Z"),
    ("it has passed there, and not here", "22:00Z", "2024-10-24T22:00:00Z", "2024-10-25T22:00:00Z"),
    ("it is tomorrow there, and not here", "2:00Z", "2024-10-25T01:00:00Z", "2024-10-25T02:00:00Z"),
    ("an offset", "22:00+02:00", "2024-10-24T16:00:00Z", "2024-10-24T20:00:00Z"),
    ("one behind", "22:00:30-09:30", "2024-10-25T06:00:00Z", "2024-10-25T07:30:30Z"),
    ("a day there", "2024-10-25 01:00+02:00", "2024-10-25T06:00:00Z", "2024-10-24T23:00:00Z"),
    ("none", "22:00", "2024-10-25T01:00:00Z", "2024-10-25T02:00:00Z"),
    ("none, when the hour comes twice", "1:45", "2024-11-03T06:30:00Z", "2024-11-04T06:45:00Z"),
]


@pytest.mark.parametrize("reason, text, now, then", ZONED, ids=[case[0] for case in ZONED])
def test_parse_begin_in_a_time_zone(reason, text, now, then, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        begin = nexus.parse_begin(nexus.parse_field(nexus.ASKED["begin"], text, "begin"), nexus.parse_time(now))
        assert nexus.format_time(begin) == then, reason
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "2h", "+2", "+", "25:00", "12:60", "noon", "2024-02-30 12:00", "tomorrow", "22", "22:00 ",
                                  "0000-01-01 00:00",
                                  "9999-12-31 23:59:61", "+1:30", "22:00+24:00", "22:00UTC", "Z", "2024-10-24-05:00"])
def test_parse_begin_refuses(text):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_begin(nexus.parse_field(nexus.ASKED["begin"], text, "begin"), NOON)
    assert caught.value.kind == "usage" and "begin" in caught.value.message and caught.value.hint


AMOUNTS = [  # reason, text, MiB
    ("MiB", "500M", 500), ("GiB", "10G", 10240), ("a part of one", "1.5GB", 1536), ("as purists write", "10GiB", 10240),
    ("small letters", "24g", 24576), ("a blank before the unit", "1 T", 1048576),
]


@pytest.mark.parametrize("reason, text, mib", AMOUNTS)
def test_parse_memory(reason, text, mib):
    assert nexus.parse_field(nexus.ASKED["gpu_mem_mib"], text, "it") == mib, reason


NO_AMOUNTS = [  # reason, text
    ("nothing", ""), ("no unit: of what?", "10"), ("a unit that is none", "10K"), ("below zero", "-1G"),
    ("no end", "9" * 5000 + "G"),
]


@pytest.mark.parametrize("reason, text", NO_AMOUNTS)
def test_parse_memory_refuses(reason, text):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_field(nexus.ASKED["gpu_mem_mib"], text, "it")
    assert caught.value.kind == "usage" and len(caught.value.message) < 140 and "10G" in caught.value.hint, reason


INDICES = [  # reason, text, indices
    ("a range, both ends in", "0-3", (0, 1, 2, 3)),
    ("both", "0-3,5", (0, 1, 2, 3, 5)),
    ("in any order, each once", "5, 1-2 ,2", (1, 2, 5)),
]


@pytest.mark.parametrize("reason, text, indices", INDICES)
def test_parse_indices(reason, text, indices):
    assert nexus.parse_indices(text) == indices, reason


NO_INDICES = [  # reason, text
    ("nothing", ""), ("a hole", "1,,2"), ("backwards", "3-1"), ("a word", "abc"), ("a sign", "-1"),
    ("an open range", "1-"), ("more than any box has: it would fill the memory", "0-99999"), ("more than a job can ask for", "0-1024"),
    ("more, one by one", ",".join(map(str, range(1025)))), ("two ranges", "1-2-3"), ("a number that is no decimal digit", "²"),
]


@pytest.mark.parametrize("reason, text", NO_INDICES)
def test_parse_indices_refuses(reason, text):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_indices(text)
    assert caught.value.kind == "usage" and "0-3,5" in caught.value.hint, reason


IDS = [  # reason, text, is an id
    ("three letters", "abc", True), ("four", "wXyz", True), ("two", "ab", False), ("five", "abcde", False),
    ("a digit: it would be taken for a GPU", "ab1", False), ("l reads like 1", "abl", False), ("I too", "abI", False),
    ("O reads like 0", "abO", False), ("not ASCII", "abä", False), ("a line end after it", "abc\n", False),
    ("none", "", False),
    ("a path", "../", False),
]


@pytest.mark.parametrize("reason, text, expected", IDS)
def test_is_job_id(reason, text, expected):
    assert nexus.is_job_id(text) is expected, reason


BAD_JSON = [  # reason, text
    ("nothing", ""), ("cut off", '{"command": '), ("no JSON", "command=ls"),
    ("two values", "{} {}"), ("bytes that are no text", b"\xff\xfe{"),
    ("as deep as no list is", "[" * 200000), ("a number that takes a day to read", "[" + "9" * 100000 + "]"),
]


@pytest.mark.parametrize("reason, text", BAD_JSON, ids=[case[0] for case in BAD_JSON])
def test_parse_json_refuses(reason, text):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_json(text, "the body")
    assert caught.value.kind == "usage" and caught.value.message.startswith("the body is not valid JSON: "), reason
    assert len(caught.value.message) < 300

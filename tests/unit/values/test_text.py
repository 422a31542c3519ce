"""Text to value and back."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import NOW, texts

import nexus

FORMATS = [  # reason, function, arguments, text
    ("minutes and seconds", nexus.format_duration, (725,), "12m 5s"),
    ("the third unit is dropped", nexus.format_duration, (8159,), "2h 15m"),
    ("no minutes, so the seconds are not worth showing", nexus.format_duration, (3605,), "1h"),
    ("days", nexus.format_duration, (3 * 86400 + 4 * 3600,), "3d 4h"),
    ("a clock that went back", nexus.format_duration, (-5,), "0s"),
    ("the example of the API", nexus.format_time, (1729783815.0,), "2024-10-24T15:30:15Z"),
    ("parts of seconds are cut", nexus.format_time, (1729783815.99,), "2024-10-24T15:30:15Z"),
    ("not yet", nexus.format_time, (None,), None),
    ("a driver that keeps some for itself", nexus.format_gb, (24564,), "24GB"), ("unknown is not zero", nexus.format_gb, (None,), None),
    ("an idle GPU's own use", nexus.format_gb, (11,), "0GB"), ("in a sentence", nexus.format_memory, (11,), "11MB"),
    ("an H200", nexus.format_memory, (143771,), "140.4GB"), ("not rounded away", nexus.format_memory, (1536,), "1.5GB"),
    ("a whole one says no decimal", nexus.format_memory, (1024,), "1GB"),
    ("amounts that are compared look different", nexus.format_memory, (12250, 2), "11.96GB"),
    ("unknown", nexus.format_known, (None, "GB"), "unknown"), ("two decimals", nexus.format_known, (0.1 + 0.2, "", 2), "0.3"),
    ("no exponent", nexus.format_known, (1234567.5, ""), "1234567.5"), ("a whole one", nexus.format_known, (100.0, "%", 0), "100%"),
    ("an int", nexus.format_known, (30, "%", 0), "30%"),
    ("one", nexus.format_count, (1, "job"), "1 job"), ("several", nexus.format_count, (2, "job"), "2 jobs"),
    ("ranges, as they are read", nexus.format_ranges, ([8, 2, 0, 1, 5, 4],), "0-2,4-5,8"), ("none", nexus.format_ranges, ([],), ""),
    ("all", nexus.join_some, (["a", "b"], 2), "a, b"), ("some", nexus.join_some, (["a", "b", "c", "d"], 2), "a, b, and 2 more"),
    ("escape sequences reach no terminal", nexus.format_line, ("\x1b[31mred\x07", 0), " [31mred "),
    ("its beginning and its end stay", nexus.format_line, ("python train.py --seed 14", 16), "python…--seed 14"),
    ("a long word is cut", nexus.format_line, ("python " + "x" * 30, 16), "python…xxxxxxxxx"),
    ("as long as it may be", nexus.cut_words, ("x" * 12, 12), "x" * 12), ("longer", nexus.cut_words, ("x" * 13, 12), "x" * 11 + "…"),
    ("other scripts stay", nexus.format_line, ("größe 数据", 0), "größe 数据"),
    ("what is cut is marked", nexus.format_line, ("e" + 100 * "\u0301", 5), "e" + 4 * "\u0301" + "…" + 5 * "\u0301"),
    ("and are cut by columns", nexus.format_line, ("数" * 20, 11), "数数…数数数"),
    ("marks take none", nexus.format_line, ("e\u0301" * 5, 5), "e\u0301" * 5),
    ("what turns the direction of all that follows", nexus.format_line, ("a\u202egp.exe\u2066", 0), "a gp.exe "),
]


@pytest.mark.parametrize("reason, function, arguments, text", FORMATS)
def test_formats(reason, function, arguments, text):
    assert function(*arguments) == text, reason
    if function is nexus.format_time and text:
        assert nexus.parse_time(text) == int(arguments[0])


NEAR = [  # word, known words, the suggestion
    ("nam", ["node", "name"], "name"), ("prot", ["host", "port"], "port"),
    ("sreen", ["screen"], "screen"), ("--retrys", ["--retries"], "--retries"),
    ("--cpus", ["--gpus"], None), ("--gres", ["--group"], None),
    ("--mem", ["--name"], None), ("--tag", ["--tty"], None), ("cmd", ["cwd"], None),
    ("trian", [*(f"job{number}" for number in range(1000)), "train"], None), ("tran", [*map(str, range(1000)), "train"], "train")]


@pytest.mark.parametrize("word, known, near", NEAR)
def test_what_is_suggested_begins_like_the_word_or_has_its_letters(word, known, near):
    assert nexus.suggest(word, known) == (f"did you mean '{near}'?" if near else "")


@given(texts, st.integers(2, 40))
def test_a_line_is_harmless_and_fits(text, width):
    line = nexus.format_line(text, width)
    assert nexus.count_columns(line) <= width and ("…" in line or len(line) == len(text))
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in line)


NOON = time.mktime((2024, 10, 24, 12, 0, 0, 0, 0, -1))


END_OF_TIME = "+{:.0f}d{:.0f}s".format(*divmod(253402300799 - NOON, 86400))         # the last second of the year 9999


def parse_begin(text, now=NOON):
    return nexus.parse_begin(nexus.parse_field(nexus.ASKED["begin"], text, "begin"), now)


PARSERS = {
    "length": lambda text: nexus.parse_field(nexus.ASKED["timeout_seconds"], text, "it"), "begin": lambda text: parse_begin(text) - NOON,
    "memory": lambda text: nexus.parse_field(nexus.ASKED["gpu_mem_mib"], text, "it"), "indices": nexus.parse_indices,
    "age": lambda text: nexus.parse_age(nexus.check(nexus.AGE_TEXT, text, "since"), NOON)}
PARSED = [  # what it is, text, value
    ("length", "0", 0), ("length", "45s", 45), ("length", "0.5s", 0.5), ("length", "1:30:00", 5400), ("length", "1.5h", 5400),
    ("length", "1d", 86400), ("length", "1w", 604800), ("length", "1h30m", 5400), ("length", "2h 15m", 8100), ("length", " 2 h ", 7200),
    ("begin", "+2h", 7200), ("begin", "22:00", 36000), ("begin", "8:30", 73800), ("begin", "12:00", 86400), ("begin", "now", 0),
    ("begin", "1970-01-01T00:00:00Z", -NOON), ("begin", END_OF_TIME, 253402300799 - NOON),
    ("begin", "12:00:30", 30), ("begin", "2024-10-25 12:00", 86400), ("begin", "2024-10-24T13:00", 3600),
    ("begin", "2024-10-24 11:00", -3600),
    ("begin", "tomorrow 7:00", 68400), ("begin", "today 11:00", -3600), ("begin", "tomorrow 13:00", 90000),
    ("age", "24h", "24h"), ("age", "0", "0"), ("age", "1:30:00", "1:30:00"), ("age", "yesterday", "1d12h"), ("age", "today", "12h"),
    ("age", "2024-10-24", "12h"), ("age", "2024-10-20 8:30", "4d3h30m"), ("age", "2024-10-24T11:59:59", "1s"), ("age", "11:00", "1h"),
    ("age", "13:00", "23h"), ("age", "monday", "3d12h"),
    ("age", "thursday", "7d12h"), ("age", "friday 18:00", "5d18h"), ("age", "12:00", "0s"),
    ("memory", "500M", 500), ("memory", "10G", 10240), ("memory", "1.5GB", 1536), ("memory", "10GiB", 10240), ("memory", "24g", 24576),
    ("memory", "1 T", 1048576),
    ("indices", "0-3", (0, 1, 2, 3)), ("indices", "0-3,5", (0, 1, 2, 3, 5)), ("indices", "5, 1-2 ,2", (1, 2, 5)),
    ("indices", "1, 0.10,0.2, 0.2", ("0.10", "0.2", 1)),
]


@pytest.mark.parametrize("what, text, value", PARSED)
def test_parsers(what, text, value):
    assert PARSERS[what](text) == value


REFUSED = {  # what it is: what the hint says, texts
    "length": ("1h30m", ["", "soon", "2y", "-5", "nan", "1:30", "90", "1:61:00", "1h30", "2h\n", "٣h", "9" * 5000]),
    "begin": ("", ["", "2h", "+2", "+", "25:00", "12:60", "noon", "2024-02-30 12:00", "22", "22:00 ", "0000-01-01 00:00",
                   "9999-12-31 23:59:61", END_OF_TIME + "1s", "+1:30", "22:00+24:00", "22:00UTC", "Z", "2024-10-24-05:00"]),
    "age": ("24h", ["", "soon", "10", "now-2days", "2024-13-01", "2024-02-30", "tomorrow", "2024-10-25",
                    "today 13:00", "20:00Z", "monday2"]),
    "memory": ("10G", ["", "10", "10K", "-1G", "9" * 5000 + "G"]),
    "indices": ("0-3,5", ["", "1,,2", "3-1", "abc", "-1", "1-", "0-99999", "0-1024", ",".join(map(str, range(1025))), "1-2-3", "²",
                         "0.1-0.3", "0.1.2", ".1", "1."]),
}


@pytest.mark.parametrize("what, hint, text", [(what, hint, text) for what, (hint, refused) in REFUSED.items() for text in refused],
                         ids=lambda value: value[:20])
def test_parsers_refuse(what, hint, text):
    with pytest.raises(nexus.NexusError) as caught:
        PARSERS[what](text)
    assert caught.value.kind == "usage" and caught.value.hint and hint in caught.value.hint
    assert len(caught.value.message) < 140 or what == "indices"


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
        assert nexus.format_time(parse_begin(text, nexus.parse_time(now))) == then, reason
    finally:
        monkeypatch.undo()
        time.tzset()


IDS = [  # text, is an id; a digit would be taken for a GPU, and l, I, O read like 1 and 0
    ("abc", True), ("wXyz", True), *((text, False) for text in ("ab", "abcde", "ab1", "abl", "abI", "abO", "abä", "abc\n", "", "../")),
]


@pytest.mark.parametrize("text, expected", IDS)
def test_is_job_id(text, expected):
    assert nexus.is_job_id(text) is expected


NEW_IDS = [  # reason, ids that exist, how many others, what is drawn in turn, the new id
    ("the first one", [], 0, ["cNYx"], "cNY"), ("it exists", ["cNY"], 0, ["cNYx", "abcd"], "abc"),
    ("one differs by case", ["CNY"], 0, ["cNYx", "abcd"], "abc"), ("by the case of all", ["cny"], 0, ["CNYx", "abcd"], "abc"),
    ("there are many", ["cNYX"], 3000, ["cNYx", "abcd"], "abcd"),
    ("there are too many", ["cNYX"], 400001, ["cNYX", "cNYx"], "cNYx"),
]


@pytest.mark.parametrize("reason, taken, others, draws, expected", NEW_IDS, ids=[case[0] for case in NEW_IDS])
def test_a_new_id(monkeypatch, reason, taken, others, draws, expected):
    """Jobs whose ids differ by case alone have one log folder, where the file system takes upper and lower case for the same."""
    drawn = iter(draws)
    monkeypatch.setattr(os, "urandom", lambda count: bytes(map(nexus.ID_LETTERS.index, next(drawn)[:count])))
    assert nexus.Clock().new_job_id(dict.fromkeys([*taken, *map(str, range(others))])) == expected


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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[1", "", b"\xff"])
def test_what_is_no_json_is_a_value_error_however_deep(text):
    with pytest.raises(ValueError):
        nexus.load_json(text)


@pytest.mark.parametrize("at, text", [
    (None, None), (0, "1970-01-01T00:00:00Z"), (NOW, "2024-10-24T15:30:15Z"), (253402300799, "9999-12-31T23:59:59Z"),
    (253402300800, None), (-1, None), (1e19, None), (-1e19, None), (float("inf"), None), (float("nan"), None), (2**70, None)])
def test_format_time_never_raises(at, text):
    assert nexus.format_time(at) == text


@pytest.mark.parametrize("seconds, text", [
    (-1e300, "0s"), (float("nan"), "0s"), (float("inf"), "2932896d 23h"), (1e300, "2932896d 23h"), (2**70, "2932896d 23h")])
def test_format_duration_never_raises(seconds, text):
    assert nexus.format_duration(seconds) == text

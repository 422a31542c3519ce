"""Sweeps: what a text of values, ranges and files means, and the commands that come of it."""

import time

import pytest

import nexus

SWEEP_FILES = {"vals.txt": ["1e-3", "", "  a, b  ", "[1,2]"], "empty": []}
SWEEPS = [  # reason, text, name, values
    ("values", "lr=1e-3,1e-4", "lr", ("1e-3", "1e-4")),
    ("a range, both ends in", "seed=0..4", "seed", ("0", "1", "2", "3", "4")),
    ("below zero", "x=-1..1", "x", ("-1", "0", "1")),
    ("with a step that meets the end", "s=0..20..5", "s", ("0", "5", "10", "15", "20")),
    ("with a step that does not", "s=0..7..3", "s", ("0", "3", "6")),
    ("backwards", "s=20..0..-10", "s", ("20", "10", "0")), ("of one", "s=3..3", "s", ("3",)),
    ("decimal, and 0.1 stays 0.1", "lr=0.1..0.5..0.1", "lr", ("0.1", "0.2", "0.3", "0.4", "0.5")),
    ("a whole start and a decimal step", "x=0..1..0.5", "x", ("0.0", "0.5", "1.0")),
    ("beside values", "x=a,0..1,b", "x", ("a", "0", "1", "b")),
    ("lists", "layers=[64,64],[128,128]", "layers", ("[64,64]", "[128,128]")),
    ("brackets in brackets", 'x={"a": [1,2]},(3,4)', "x", ('{"a": [1,2]}', "(3,4)")),
    ("quotes", """x='a,b',"c,'d" """.rstrip(), "x", ("'a,b'", "\"c,'d\"")),
    ("a bracket in quotes", "x='[',b", "x", ("'['", "b")),
    ("paths and commits are no ranges", "x=../data/a,a..b,HEAD~3..HEAD,..,v1..v2", "x",
     ("../data/a", "a..b", "HEAD~3..HEAD", "..", "v1..v2")),
    ("a file", "s=0,@vals.txt", "s", ("0", "1e-3", "a, b", "[1,2]")), ("a text with an @", "s=@@vals.txt", "s", ("@vals.txt",)),
    ("an equals sign in a value", "x=a=b", "x", ("a=b",)), ("blanks stay", "x=a b, c", "x", ("a b", " c")),
    ("the most", "x=1..10000", "x", tuple(map(str, range(1, 10001)))),
]


@pytest.mark.parametrize("reason, text, name, values", SWEEPS, ids=[case[0] for case in SWEEPS])
def test_parse_sweep(reason, text, name, values):
    assert nexus.parse_sweep(text, SWEEP_FILES.__getitem__) == (name, values), reason


NO_SWEEPS = [  # reason, text, part of the message
    ("nothing", "", "not like"), ("no values", "lr", "not like"), ("none after the sign", "lr=", "not like"),
    ("a hole", "lr=1,,2", "not like"), ("a comma at the end", "lr=1,", "not like"), ("an empty file", "lr=@empty", "not like"),
    ("no name", "=1", "not like"), ("a name that is a number", "0=1", "not like"), ("a name of two words", "l r=1", "not like"),
    ("a name with braces", "{lr}=1", "not like"), ("a name with a minus", "learning-rate=1", "not like"),
    ("a range backwards", "seed=2..0", "never comes to its end"), ("a step backwards", "seed=0..20..-5", "never comes"),
    ("a step of nothing", "s=0..2..0", "never comes"), ("decimals without a step", "s=0.1..0.5", "needs a step"),
    ("exponents", "lr=1e-4..1e-2", "1e-4..1e-2 is no range"), ("no end", "x=1..", "1.. is no range"),
    ("four numbers", "x=1..2..3..4", "no range"),
    ("a bracket that is not closed", "x=[1,2", "nothing closes the [ at character 1"),
    ("one that was not opened", "x=a,1]", "nothing opens the ] at character 4"),
    ("crossed", "x=([1)]", "nothing opens the ) at character 4"),
    ("a quote", "msg=ok,it's", "nothing closes the ' at character 6"),
]


@pytest.mark.parametrize("reason, text, part", NO_SWEEPS, ids=[case[0] for case in NO_SWEEPS])
def test_parse_sweep_refuses(reason, text, part):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_sweep(text, SWEEP_FILES.__getitem__)
    assert caught.value.kind == "usage" and "sweep" in caught.value.message and part in caught.value.message, reason
    assert caught.value.hint, reason


def test_the_combinations_of_sweeps():
    lr, seed = ("lr", ("1e-3", "1e-4")), ("seed", ("0", "1"))
    found = nexus.list_combinations([lr, seed])
    assert found == [{"lr": rate, "seed": number} for rate in lr[1] for number in seed[1]], "the last name changes fastest"
    many = [(name, ("1",) * 10000) for name in "abcd"]
    for sweeps, part in (([lr, lr], "given twice"), ([many[0], seed], "more than 10000"), (many, "more than 10000")):
        with pytest.raises(nexus.NexusError, match=part):
            nexus.list_combinations(sweeps)


FILLED = [  # reason, text, values, filled
    ("each place", "a {seed} > log.{seed}", {"seed": "0"}, "a 0 > log.0"),
    ("variables survive", "a {seed} ${HOME} ${seed}", {"seed": "0"}, "a 0 ${HOME} ${seed}"),
    ("awk's braces survive", "awk '{print $1}' x.{seed}", {"seed": "0"}, "awk '{print $1}' x.0"),
    ("what has no value survives", "a {seed} {other}", {"seed": "0"}, "a 0 {other}"),
    ("a value is as it is", "a {x}", {"x": "\\1"}, "a \\1"),
    ("a value is not filled again", "{a} {b}", {"a": "{b}", "b": "{a}"}, "{b} {a}"),
]


@pytest.mark.parametrize("reason, text, values, filled", FILLED, ids=[case[0] for case in FILLED])
def test_fill_placeholders(reason, text, values, filled):
    assert nexus.fill_placeholders(text, values) == filled, reason


@pytest.mark.parametrize("text, found", [
    ("{lr} ${HOME} {a,b} {} {0} {print} '{print $1}' {x}{y}", ["lr", "x", "y"]), ("{1a} { a } {a b}", [])])
def test_find_placeholders(text, found):
    assert nexus.find_placeholders(text) == found


@pytest.mark.parametrize("text, plain", [("'a,b'", "a,b"), ('"it\'s"', "it's"), ("[1,'x']", "[1,x]"), ("plain", "plain")])
def test_strip_quotes(text, plain):
    assert nexus.strip_quotes(text) == plain


def test_what_is_no_range_is_seen_at_once():
    began = time.thread_time()
    assert nexus.parse_sweep("a=0" + "." * 200000 + "x", list)[1][0].endswith("x")
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("word, is_place", [("print", 0), ("next", 0), ("exit", 0), ("getline", 0), ("lr", 1), ("_x1", 1), ("1", 0)])
def test_words_of_awk_are_no_places(word, is_place):
    assert nexus.find_placeholders(f"awk '{{{word}}}' ${{{word}}}") == [word] * is_place


def test_a_sweep_that_changes_nothing_is_refused():
    """But a script has its values in its environment."""
    sweeps = [nexus.parse_sweep(text, SWEEP_FILES.__getitem__) for text in ("lr=1,2", "seed=0..2")]
    with pytest.raises(nexus.NexusError, match=r"sweep seed: there is no \{seed\} in the command train \{lr\}"):
        nexus.spread_sweep(sweeps, ["train {lr} {seed}", "train {lr}"], {}, {})
    for given, script in (({"name": "{seed}"}, False), ({}, True)):
        assert len(nexus.spread_sweep(sweeps, ["train {lr}"], given, {}, script).rows) == 6

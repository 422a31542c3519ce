"""One checker, for the very schemas that openapi.json shows; a class of values is one of them."""

import json
import time

import pytest
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from makers import find_faults

import nexus
from nexus import FLAG, JOB_ID, LINE, PATH, SECONDS, TEXT, TEXTS, integer_in, list_of, number_in, object_of, one_of, or_null


class Place(nexus.Value):
    """A table of fields, among them one that is no row."""
    host: str = nexus.field(LINE, "its name")
    port: int = nexus.optional(22, integer_in(0, 65535), "its sshd's")
    seen: tuple = ()
    user: "str | None" = nexus.optional(None, LINE, "who logs in", "public")


PLACE = object_of(Place.FIELDS, "a place", nulls=Place.FIELDS.keys() - {"host"})


def test_a_value_class_is_a_table():
    rows = Place.FIELDS
    assert list(rows) == ["host", "port", "user"] and (rows["host"].default, rows["port"].default) == (..., 22)
    assert rows["user"].public and not rows["port"].public
    place = Place("a")
    assert place == Place(host="a", port=22, seen=(), user=None) and len({place, Place("a"), Place("b")}) == 2
    assert nexus.replace(place, port=2222) == Place("a", 2222) and place.port == 22
    with pytest.raises(TypeError):
        Place()
    with pytest.raises(AttributeError, match=r"Place is a value: use replace\(\) to make another port"):
        place.port = 1
    assert PLACE["required"] == ["host"] and PLACE["properties"]["port"]["description"] == "its sshd's"


KEPT = [  # reason, schema, given, kept
    ("a list is kept as a tuple", list_of(list_of(integer_in(0, 9))), [[1], []], ((1,), ())),
    ("a bound is allowed", number_in(0, 1), 1, 1),
    ("null where it may stand", or_null(integer_in(0, 9)), None, None),
    ("null beside words", or_null(one_of("a", "b")), None, None),
    ("one of two schemas", {"anyOf": [integer_in(0, 9), LINE]}, "x", "x"),
    ("an object of what was given", PLACE, {"host": "a", "port": None}, {"host": "a", "port": None}),
    ("bytes that are no UTF-8", TEXT, "\udc80", "\udc80"), ("as long as it may be", LINE, "x" * 200, "x" * 200),
    ("all of ASCII", TEXT, "".join(map(chr, range(1, 128))), "".join(map(chr, range(1, 128)))),
    ("as many bytes", LINE, "ü" * 100, "ü" * 100), ("a whole number with a point", integer_in(0, 9), 2.0, 2),
]


@pytest.mark.parametrize("reason, schema, given, kept", KEPT, ids=[case[0] for case in KEPT])
def test_check_keeps(reason, schema, given, kept):
    found = nexus.check(schema, given, "it")
    assert found == kept and type(found) is type(kept) and not find_faults(schema, given)


FAULTS = [  # reason, schema, given, message, hint
    ("out of range", integer_in(1, 65535), 0, "it must be a whole number from 1 to 65535, not 0", ""),
    ("a number too small", number_in(0.1, 9), 0, "it must be a number from 0.1 to 9, not 0", ""),
    ("a number too large", number_in(0.1, 9), 9.5, "it must be a number from 0.1 to 9, not 9.5", ""),
    ("a key too many", {"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}, "it must be an object of at most 1 keys, not {", ""),
    ("a byte too many", LINE, "x" * 201, "it must be one line of at most 200 bytes, not ", ""),
    ("no truth is a number", integer_in(0, 1), True, "it must be a whole number from 0 to 1, not true", ""),
    ("no number at all", number_in(0.1, 9), float("nan"), "it must be a number from 0.1 to 9, not NaN", ""),
    ("a number too long to count", number_in(0, 9), 10**400, f"it must be a number from 0 to 9, not {'1' + 34 * '0'}…", ""),
    ("nearly a word", one_of("screen", "slurm"), "sluurm", 'it must be one of screen, slurm, not "sluurm"', "did you mean 'slurm'?"),
    ("too many bytes", LINE, "ü" * 101, "it must be one line of at most 200 bytes, not ", ""),
    ("a zero width space in a name", LINE, "lr=1\u200b", 'it must be one line of at most 200 bytes, not "lr=1\\u200b"',
     "leave out U+200B, which is in it: nobody sees it"),
    ("a name that nobody sees", LINE, "\u3164", 'it must be one line of at most 200 bytes, not "\\u3164"',
     "leave out U+3164, which is in it: nobody sees it"),
    ("a tag of emoji", LINE, "a\U000e0061", "it must be one line", "leave out U+E0061, which is in it: nobody sees it"),
    ("a number that was copied", integer_in(0, 9), "8\u200b", 'it must be a whole number from 0 to 9, not "8\\u200b"',
     "leave out U+200B, which is in it: nobody sees it"),
    ("no letter is so", TEXT, "\ud800", 'it must be a text without NUL, not "\\ud800"', ""),
    ("a line's end is no end", JOB_ID, "abc\n",
     "it must be 3 or 4 letters of the base58 alphabet (no digits, no I, O, l), not ", 'like "abc"'),
    ("an item", list_of(integer_in(0, 9)), [1, "a"], 'it[1] must be a whole number from 0 to 9, not "a"', ""),
    ("too many", list_of(TEXT, 1, 2), [], "it must be a list of at least 1 of at most 2, each a text without NUL, not []", ""),
    ("a wrong type beside two and null", or_null({"anyOf": [FLAG, integer_in(0, 9)]}), "x",
     'it must be true or false or a whole number from 0 to 9 or null, not "x"', ""),
    ("a wrong type beside null", or_null(FLAG), 3, "it must be true or false, not 3", ""),
    ("neither", {"anyOf": [integer_in(0, 9), TEXTS]}, "x",
     'it must be a whole number from 0 to 9 or a list, each a text without NUL, not "x"', ""),
    ("like none of two", {"anyOf": [integer_in(0, 9), JOB_ID]}, "?", "it must be a whole number from 0 to 9 or 3", 'like "abc"'),
    ("a key is missing", PLACE, {}, "host is missing in it", ""),
    ("an unknown key", PLACE, {"host": "a", "prot": 1}, "'prot' is not a key of a place", "did you mean 'port'?"),
    ("a key like no other", PLACE, {"host": "a", "x": 1}, "'x' is not a key of a place", "the keys are host, port, user"),
    ("all of it", PLACE, {"host": 1, "port": -1}, "it.host must be one line of at most 200 bytes, not 1; "
     "it.port must be a whole number from 0 to 65535, not -1", ""),
    ("a key's form", {"type": "object", "propertyNames": one_of("a", "b")}, {"c": 1}, 'a key of it must be one of a, b, not "c"', ""),
    ("nothing said", {**PLACE, "required": [], "minProperties": 1}, {}, "a place needs one of host, port, user", ""),
]


@pytest.mark.parametrize("reason, schema, given, message, hint", FAULTS, ids=[case[0] for case in FAULTS])
def test_check_refuses(reason, schema, given, message, hint):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.check(schema, given, "it")
    assert caught.value.kind == "usage" and caught.value.message.startswith(message) and caught.value.hint == hint


SECRET = {"type": "string", "maxLength": 3, "writeOnly": True}
SECRETS = [  # a schema with a secret in it, what does not fit and is not shown
    (SECRET, "geheim"), (or_null(SECRET), "geheim"), ({"anyOf": [SECRET, FLAG]}, "geheim"), (list_of(SECRET), ["geheim"]),
    (list_of(SECRET), "geheim"),
    ({"type": "object", "properties": {"a": SECRET}}, {"a": "geheim"}), ({"type": "object", "properties": {"a": SECRET}}, "geheim"),
    ({"type": "object", "additionalProperties": SECRET}, {"a": "geheim"}),
]


@pytest.mark.parametrize("schema, given", SECRETS)
def test_no_error_shows_a_secret(schema, given):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.check(schema, given, "it")
    assert "geheim" not in f"{caught.value.message}{caught.value.hint}"


UNSEEN = ("\u00ad\u034f\u061c\u115f\u1160\u17b4\u180e\u200b\u200d\u202e\u2060\u2069\u206f\u2800\u3164\ufe0f\ufeff\uffa0\ufffb"
          "\U0001bca0\U0001d173\U000e0001\U000e01ef")


@pytest.mark.parametrize("letter", UNSEEN)
def test_a_name_has_no_letter_that_is_not_seen(letter):
    assert not nexus.fits_alone(LINE, f"a{letter}") and not nexus.fits_alone(LINE, letter)


@pytest.mark.parametrize("name", ["baseline", "größe 1", "学習 lr=0.1", "مدل", "实验🚀", "한국어 실험", "e\u0301", "a\u00a0b"])
def test_a_name_may_have_any_letters(name):
    assert nexus.fits_alone(LINE, name)


def test_millions_of_faults_cost_no_more_than_a_few():
    many = {f"prt{number}": 1 for number in range(100000)}
    for places in ([{"host": "a", name: 1} for name in many], [{"host": "a", **many}]):
        with pytest.raises(nexus.NexusError) as caught:
            nexus.check(list_of(PLACE), places, "it")
        assert len(caught.value.message) < 2000


# What check() takes is what JSON Schema says

texts = st.text(st.sampled_from("aB0/ \t\n\x00üß€-=,"), max_size=6).map(lambda text: text.rstrip("\n"))     # $ is before one too, to Python
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats(-3, 12) | st.sampled_from([10**30, 0.5, 2.0]) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=8)
bounds = st.tuples(st.integers(-2, 10), st.integers(-2, 10)).map(sorted)
sizes = st.tuples(st.integers(0, 3), st.integers(0, 4)).map(sorted)
plain = st.one_of(
    st.sampled_from([FLAG, TEXT, LINE, PATH, SECONDS, JOB_ID, {}, one_of("a", "B"), {"type": "string", "pattern": "^[^a]+$"}]),
    bounds.map(lambda pair: integer_in(*pair)), bounds.map(lambda pair: number_in(*pair)))
schemas = st.recursive(plain, lambda inner: st.one_of(
    inner.map(or_null), st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    st.tuples(inner, sizes).map(lambda pair: list_of(pair[0], *pair[1])),
    st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("aB0"), inner, max_size=2)}, optional={
        "type": st.just("object"), "required": st.lists(st.sampled_from("aB"), max_size=1), "additionalProperties": inner | st.just(False),
        "propertyNames": st.just({"pattern": "."}) | st.just(one_of("a", "B")), "minProperties": st.integers(0, 2)})), max_leaves=6)


@given(schemas, values)
@settings(max_examples=samples.count(100, 2000), deadline=None)
def test_check_takes_what_json_schema_allows(schema, value):
    assert (not find_faults(schema, value)) == Draft202012Validator(json.loads(json.dumps(schema))).is_valid(value)


LONG = [  # reason, schema, what is too long: it is refused before it is looked through, and told in a line
    ("a text", nexus.NAMED, "a" * 10**7), ("a time", nexus.DURATION_TEXT, "1d" * 10**6), ("bytes", LINE, "\u200e" * 10**7),
    ("a list", list_of(one_of("a"), most=3), ["a"] * 10**6), ("a list of texts", list_of(nexus.NAMED, most=3), ["a" * 10**7]),
    ("a key", object_of({}, "nothing"), {"\x1b" * 10**7: 1}),
]


@pytest.mark.parametrize("reason, schema, given", LONG, ids=[case[0] for case in LONG])
def test_what_is_too_long_costs_nothing(reason, schema, given):
    began = time.thread_time()
    with pytest.raises(nexus.NexusError) as caught:
        nexus.check(schema, given, "it")
    assert time.thread_time() - began < 0.5 and len(caught.value.message) < 300

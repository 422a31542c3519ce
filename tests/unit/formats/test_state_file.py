"""The journal and state.json: what is written is read back, and nothing else is taken for it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import changes, environments, groups, job, jobs, nodes, state_facts, texts

import nexus


@given(st.integers(0, 2**53), st.lists(changes, max_size=4, unique_by=lambda change: (change.table, change.key)))
def test_a_transaction_survives_the_journal(seq, puts):
    line = nexus.encode_transaction(seq, nexus.encode_puts(puts))
    assert line.endswith("\n") and line.count("\n") == 1, "one line each"
    found, tables, is_sealed = nexus.read_transaction(line.encode())
    assert found == seq and is_sealed and sum(map(len, tables.values())) == len(puts)
    for change in puts:
        assert nexus.decode_row(change.table, change.key, tables[change.table][change.key]) == change.value


WRONG_ROWS = [  # reason, table, key, row
    ("no table", "jobz", "abc", {}), ("no fact", "facts", "seq", 5), ("a job that is a list", "jobs", "abc", []),
    ("a job without its fields", "jobs", "abc", {}),
    ("a truth that is a text", "facts", "paused", "yes"),
    ("variables that are a number", "environments", "d", {"key": "d", "variables": 1}),
    ("a variable that is a number", "environments", "d", {"key": "d", "variables": {"A": 1}}),
    ("no variables", "environments", "d", {"key": "d"}),
    ("another environment's", "environments", "d", {"key": "e", "variables": {}}),
    ("half a group", "groups", "g", {"name": "g", "limit": 0.5}), ("another group", "groups", "g", {"name": "h"}),
    ("a row seen for ever", "seen", "d", {"key": "d", "count": float("inf")}),
    ("another row", "seen", "d", {"key": "e", "count": 1}),
    ("a node without its address", "nodes", "n1", {"config": {"name": "n1"}}),
    ("another node", "nodes", "n1", {"config": {"name": "n2", "host": "n1"}}),
]


@pytest.mark.parametrize("reason, table, key, given", WRONG_ROWS, ids=[case[0] for case in WRONG_ROWS])
def test_decode_row_refuses(reason, table, key, given):
    with pytest.raises((KeyError, TypeError, ValueError)):
        nexus.decode_row(table, key, given)


WRONG_JOBS = [  # reason, fields that are not as they should be
    ("an unknown status", {"status": "paused"}), ("an id that is a path", {"id": "../x"}),
    ("an id that is a number", {"id": 5}), ("a queue_key of texts", {"queue_key": ["a"]}), ("no queue_key", {"queue_key": None}),
    ("a queue_key of two numbers", {"queue_key": [0, 1]}), ("a number that is a text", {"retries": "1"}),
    ("half an attempt", {"attempts": [[1, 2]]}), ("another job's id", {"id": "abd"}), ("a tuple of another length", {"log_base": [0]}),
    ("a truth for a number", {"gpus": True}), ("an attempt of texts", {"attempts": [["1", 2, 3, 4, 5, "exit", []]]}),
    ("nothing for a text", {"command": None}), ("a time for ever", {"created_at": float("inf")}), ("no time", {"created_at": float("nan")}),
    ("a list for one of its members", {"gpu_ids": 3}),
]


@pytest.mark.parametrize("reason, fields", WRONG_JOBS, ids=[case[0] for case in WRONG_JOBS])
def test_decode_job_refuses(reason, fields):
    with pytest.raises((KeyError, TypeError, ValueError)):
        nexus.decode_row("jobs", "abc", {**nexus.encode_value(job()), **fields})


def test_an_older_job_keeps_a_name_that_none_gets_any_more():
    old = job(name="zero\u200b", group="\u3164")
    assert nexus.decode_row("jobs", "abc", nexus.encode_value(old)) == old


SAME = [  # reason, two texts of one object
    ("laid out", '{"a":[1,{"b":"c"}]}', '{ "a" : [\n1, {"b": "c"} ] }'), ("in another order", '{"a":1,"b":2}', '{"b":2,"a":1}'),
    ("a number without a fraction", '{"a":[7200.0,{"b":-0.0}],"c":1e22}', '{"a":[7200,{"b":0}],"c":10000000000000000000000}'),
    ("a number with an exponent", '{"a":1.5e3}', '{"a":1500}'),
    ("text without escapes", '{"a":"gr\\u00f6\\u00dfe\\ud83d\\ude80"}', '{"a":"größe🚀"}'),
]
DIFFERENT = [  # reason, two texts of two objects
    ("a text that looks like a number", '{"a":"1.0,"}', '{"a":"1,"}'), ("a number as a text", '{"a":1}', '{"a":"1"}'),
    ("a name", '{"a":1}', '{"b":1}'), ("nothing", '{"a":null}', '{}'), ("a fraction", '{"a":1.25}', '{"a":1.5}'),
    ("a truth", '{"a":true}', '{"a":1}'),
    ("the order of a list", '{"a":[1,2]}', '{"a":[2,1]}'), ("a byte that is no UTF-8", '{"a":"\\udce9"}', '{"a":"\\u00e9"}'),
]


@pytest.mark.parametrize("reason, one, other, is_same", [(*case, True) for case in SAME] + [(*case, False) for case in DIFFERENT],
                         ids=[case[0] for case in SAME + DIFFERENT])
def test_a_checksum_is_of_the_values(reason, one, other, is_same):
    sealed = json.loads(nexus.seal(json.loads(one)))
    assert list(sealed)[-1] == "crc" and nexus.check_seal(sealed)
    changed = {**json.loads(other), "crc": sealed["crc"]}
    if is_same:
        assert nexus.check_seal(changed)
    else:
        with pytest.raises(ValueError, match="its checksum is wrong"):
            nexus.check_seal(changed)


def of_table(made, key):
    return st.lists(made, max_size=3, unique_by=key).map(lambda found: {key(one): one for one in found})


heads = st.fixed_dictionaries({"version": st.just(3), "seq": st.integers(0, 2**53), "host": texts, **state_facts})
tables = st.fixed_dictionaries({
    "environments": st.dictionaries(texts, environments, max_size=3),
    "jobs": of_table(jobs, lambda one: one.id), "groups": of_table(groups, lambda one: one.name),
    "nodes": of_table(nodes, lambda one: one.config.name), "seen": st.dictionaries(texts, st.integers(1, 9), max_size=3),
    "usage": st.just({})})


def decode(text):
    """The head, the facts among it, and the tables."""
    file = nexus.read_state(text)
    assert file.is_sealed and not file.faults
    rows = {table: {key: (nexus.decode_row if table == "facts" else nexus.decode_sealed_row)(table, key, given)
                    for key, given in found.items()} for table, found in file.tables.items()}
    return {"version": file.version, "seq": file.seq, **rows.pop("facts")}, rows


def encode(head, tables):
    made = nexus.State()
    for name, fact in {**head, **tables}.items():
        setattr(made, name, fact)
    return "".join(nexus.encode_state(made))


@given(heads, tables)
def test_a_state_survives_state_json(head, tables):
    text = encode(head, tables)
    found, rows = decode(text)
    assert ({name: found[name] for name in head}, rows) == (head, tables)
    assert json.loads(text)["seq"] == head["seq"], "it is JSON, for others to read"
    assert text.count("\n") > len(tables["jobs"]), "a job a line, for people to read"

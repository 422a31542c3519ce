"""Which jobs a filter chooses."""

import pytest
from makers import NOW, finished, job

import nexus

FILTERED = {  # filter: what is chosen by, a job that it fits, one that it does not
    "user": ("ann", {"user": "ann"}, {"user": "bob"}),
    "group": ("g", {"group": "g"}, {"group": "gg"}),
    "name": ("lr*", {"name": "lr=1"}, {"name": "a lr"}),
    "since": ("1h", {"created_at": NOW - 60}, {"created_at": NOW - 7200}),
    "older": ("1h", {"created_at": NOW - 7200}, {"created_at": NOW - 60}),
    "text": ("Train", {"command": "python train.py"}, {"command": "true"}),
}


def test_each_filter_chooses():
    assert FILTERED.keys() == nexus.FILTERS.keys() - {"status"}, "a new filter has a case here; the status is an index"
    for name, (wanted, fitting, other) in FILTERED.items():
        choice, made = nexus.Choice(**{name: wanted}), [job("abc", **fitting), job("abd", **other)]
        assert choice.given == [name] and choice.select(made, lambda user: True, NOW) == made[:1], name
        seen = choice.select(made, lambda user: False, NOW)
        assert seen == (made[:1] if nexus.FILTERS[name].public else []), f"{name}: nothing is told of what others may not see"
    assert nexus.Choice().given == [] and nexus.Choice(group="").given == ["group"], "which is: of no group"
    every = {"status": ["failed"], "user": "bob", "group": "g", "name": "y z", "since": "1h", "older": "1d", "text": "t"}
    assert nexus.describe_filters(every) == " of bob of group g named 'y z' of the last 1h older than 1d with the text t"
    assert nexus.describe_filters({}) == ""
    looked_at = nexus.join_texts(finished("abc", name="lr", group="g", node="n1", slurm_node="s", cause="exit", cause_line="oh"))
    assert looked_at.splitlines() == ["abc", "lr", "python train.py", "ann", "g", "/home/ann", "n1", "s", "exit", "oh"]


BODIES = [  # reason, the name of what is sent, its JSON, what is kept of it; or else what is told
    ("one status", "CHOICE", {"status": "failed"}, {"status": ("failed",)}),
    ("several", "CHOICE", {"status": ["failed", "cancelled"], "name": "lr*"}, {"status": ("failed", "cancelled"), "name": "lr*"}),
    ("a signal", "CANCEL", {"ids": ["abc"], "signal": "INT"}, {"ids": ("abc",), "signal": "INT"}),
    ("times in words", "EDIT_CHOICE", {"group": "g", "change": {"timeout_seconds": "1h", "position": -1}},
     {"group": "g", "change": {"timeout_seconds": 3600, "position": -1}}),
    ("null takes away", "EDIT_CHOICE", {"ids": ["abc"], "change": {"name": None}}, {"ids": ("abc",), "change": {"name": None}}),
    ("before another", "EDIT_CHOICE", {"ids": ["abc"], "change": {"before": "abd"}}, {"ids": ("abc",), "change": {"before": "abd"}}),
    ("again, otherwise", "RETRY", {"ids": ["abc"], "change": {"after": "abd"}}, {"ids": ("abc",), "change": {"after": ("abd",)}}),
    ("again as it was", "RETRY", {"ids": ["abc"], "change": {}}, {"ids": ("abc",), "change": {}}),
    ("a dry run", "CLEAR", {"older": "30d", "dry_run": True}, {"older": "30d", "dry_run": True}),
    ("shown again", "DISMISS", {"status": "failed", "undo": True}, {"status": ("failed",), "undo": True}),
    *((f"{name} of all by mistake", name, {}, "which jobs needs one of ids, ") for name in ("CHOICE", "CANCEL")),
    ("a retry of all by mistake", "RETRY", {}, "which jobs, and what is to be otherwise needs one of ids, "),
    ("failures of all by mistake", "DISMISS", {}, "which failures needs one of ids, "),
    ("no job", "CHOICE", {"ids": []}, "ids must be a list of at least 1"), ("no status", "CHOICE", {"status": []}, "status must be"),
    ("a long text", "CHOICE", {"text": "x" * 4096}, {"text": "x" * 4096}),
    ("a longer one", "CHOICE", {"text": "x" * 4097}, "text must be"),
    ("a long name", "CHOICE", {"name": "x" * 200}, {"name": "x" * 200}),
    ("a longer name", "CHOICE", {"name": "x" * 201}, "name must be"),
    ("no text", "CHOICE", {"text": ""}, "text must be a text that is not empty"),
    ("a signal for others", "CANCEL", {"ids": ["abc"], "signal": "STOP"}, "signal must be one of TERM"),
    ("no change", "EDIT_CHOICE", {"ids": ["abc"], "change": {}}, "a change of a job needs one of "),
    ("a change of all by mistake", "EDIT_CHOICE", {"change": {}}, "which jobs, and what is to be otherwise needs one of ids, "),
    ("a place in the middle", "EDIT_CHOICE", {"ids": ["abc"], "change": {"position": 1}}, "change.position must be 0 (before all "),
    ("no command any more", "EDIT_CHOICE", {"ids": ["abc"], "change": {"command": None}}, "change.command must be a text"),
    ("a retry once", "RETRY", {"ids": ["abc"], "change": {"unique": True}}, "'unique' is not a key of a change of a job"),
]


@pytest.mark.parametrize("reason, name, body, kept", BODIES, ids=[case[0] for case in BODIES])
def test_what_is_sent_to_change_many(reason, name, body, kept):
    rows, schema = getattr(nexus, f"{name}_KEYS"), getattr(nexus, name)
    if isinstance(kept, dict):
        assert nexus.read_object(rows, schema, body) == kept
        return
    with pytest.raises(nexus.NexusError) as caught:
        nexus.read_object(rows, schema, body)
    assert caught.value.kind == "usage" and caught.value.message.startswith(kept)


def test_what_may_be_changed_of_a_running_job():
    assert {*nexus.LIVE_IN_SLURM} == {"name", "group", "retries"}, "the others are Slurm's to change"
    assert nexus.LIVE_CHANGES.keys() == {*nexus.LIVE_IN_SLURM, "priority", "timeout_seconds", "expected_time", "warn"}


NAMED = [  # a pattern of a shell, a name that it fits, one that it does not
    ("lr", "lr", "lr=1"), ("lr=*", "lr=", "LR=1"), ("*", None, "-"), ("?*", "x", None), ("s?[0-2]", "s=1", "s=3"), ("s[!1]", "s2", "s1"),
    ("lr=[1,2]", "lr=[1,2]", "lr=3"), ("", None, "x"), ("a*b*a*b*" * 10 + "c", "ab" * 20 + "c", "ab" * 40)]


@pytest.mark.parametrize("pattern, fitting, other", NAMED)
def test_which_names_a_pattern_means(pattern, fitting, other):
    choice = nexus.Choice(name=pattern)
    fits = choice.make_test(NOW)
    assert fits(job("abc", name=fitting)) and (pattern == "*" or not fits(job("abd", name=other)))


def test_since_counts_from_the_end_of_a_job():
    ended, old = (finished(id, created_at=NOW - 9000, status_history=(("completed", at),)) for id, at in
                  (("abc", NOW - 60), ("abd", NOW - 7200)))
    assert nexus.Choice(since="1h").select([ended, old], lambda user: True, NOW) == [ended]

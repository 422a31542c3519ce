"""Which jobs a filter chooses."""

import pytest
from makers import NOW, finished, job

import nexus

FILTERED = {  # filter: what is chosen by, a job that it fits, one that it does not
    "user": ("ann", {"user": "ann"}, {"user": "bob"}),
    "group": ("g", {"group": "g"}, {"group": "gg"}),
    "name": ("lr*", {"name": "lr=1"}, {"name": "a lr"}),
    "since": ("1h", {"created_at": NOW - 60}, {"created_at": NOW - 7200}),
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
    assert nexus.describe_filters({"status": ["failed"], "group": "g", "name": "y z"}) == " of group g named 'y z'"


NAMED = [  # a pattern of a shell, a name that it fits, one that it does not
    ("lr", "lr", "lr=1"), ("lr=*", "lr=", "LR=1"), ("*", None, "-"), ("s?[0-2]", "s=1", "s=3"), ("s[!1]", "s2", "s1"),
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

"""What a submission may say."""

import re

import pytest
from makers import job

import nexus

ACCEPTED = [  # reason, keys beside the command, field, value
    ("the least", {}, "job", {"command": "ls"}),
    ("GPUs by index", {"gpu_ids": [5, 0, 5]}, "gpu_ids", (0, 5)),
    ("as the command line writes them", {"gpu_ids": "0-3,5"}, "gpu_ids", (0, 1, 2, 3, 5)),
    ("null is as if it were not there", {"gpus": None, "gpu_ids": None, "name": None, "cwd": None, "env": None},
     "name", None),
    ("priority by name", {"priority": "high"}, "priority", 0),
    ("bytes that are no UTF-8, as Python reads them", {"cwd": "/home/\udcff"}, "cwd", "/home/\udcff"),
    ("after others, in a text", {"after": "abc,abd"}, "after", ("abc", "abd")), ("after nobody", {"after": []}, "after", ()),
    ("no retries, whatever the configuration says", {"retries": 0}, "retries", 0),
    ("a time in words", {"timeout_seconds": "1h30m"}, "timeout_seconds", 5400),
    ("memory in words", {"gpu_mem_mib": "10G"}, "gpu_mem_mib", 10240),
    ("shares that were added up", {"gpus": 0.1 + 0.2}, "gpus", 0.3),
    ("values of a sweep of one's own", {"sweep_values": {"lr": "1", "a": "2"}}, "sweep_values", (("lr", "1"), ("a", "2"))),
    ("the same group again", {"after_group": ["h", "h"]}, "after_group", ("h",)),
    ("a group twice", {"after_any_group": ["h", "g", "h"]}, "after_any_group", ("h", "g")),
    ("what the shell of its submitter has", {"umask": 0o777, "nice": 0}, "nice", 0), ("the last nice value", {"nice": 19}, "nice", 19),
    ("of the folder itself", {"snapshot": "a" * 40, "snapshot_repo": "/home/ann/x", "cwd": "/home/ann/x"}, "snapshot_repo", "/home/ann/x"),
]


@pytest.mark.parametrize("reason, keys, field, value", ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_parse_submission(reason, keys, field, value):
    [asked] = nexus.parse_submission({"command": "ls", **keys})
    assert getattr(asked if field in nexus.Asked.NAMES else asked_job(asked), field) == value, reason


def asked_job(asked):
    """The job that is asked for; by default with one GPU."""
    made = job(**{"name": None, "cwd": None, **asked.job})
    nexus.check_gpus(made)
    return made


REFUSED = [  # reason, submission, what the message names
    ("a list", [], "a job must be an object"),
    ("NUL in a command", {"command": "a\0b"}, "NUL"),
    ("a command Linux would not take", {"command": "x" * 131072}, "131071"),
    ("half a character", {"command": "echo \ud800"}, "Unicode"),
    ("an unknown key, and the nearest", {"command": "ls", "gpu": 1}, "'gpu' is not a key of a job; did you mean 'gpus'?"),
    ("no command", {}, "command is missing"),
    ("what only nexus knows", {"command": "ls", "status": "running"}, "'status' is not a key of a job"),
    ("another number", {"command": "ls", "number": 7}, "'number' is not a key of a job"),
    ("a sweep of nothing", {"sweep": ["a=1,2"]}, "sweep is for a command"),
    ("a sweep of a command and of commands", {"command": "ls", "commands": ["ls"], "sweep": ["a=1"]}, "sweep is for a command"),
    ("a sweep with names", {"commands": ["echo {a}"], "sweep": ["a=1"], "names": ["x"]}, "sweep is for a command"),
    ("a sweep beside each", {"command": "echo {a}", "sweep": ["a=1"], "each": [{"command": "ls"}]}, "sweep is for a command"),
    ("a command and commands", {"command": "ls", "commands": ["ls"]}, "commands comes instead of command"),
    ("fewer names than commands", {"commands": ["ls", "ls"], "names": ["x"]}, "names has a name for each of commands"),
    ("names of nothing", {"command": "ls", "names": ["x"]}, "names has a name for each of commands"),
    ("no GPU named", {"command": "ls", "gpu_ids": []}, "gpu_ids"),
    ("more GPUs than named", {"command": "ls", "gpus": 3, "gpu_ids": [0, 1, 1]}, "3 GPUs"),
    ("GPUs named for a CPU job", {"command": "ls", "gpus": 0, "gpu_ids": [0]}, "gpu_ids"),
    ("a priority that is none", {"command": "ls", "priority": "urgent"}, "urgent"),
    ("a name no variable can have", {"command": "ls", "env": {"A=B": "1"}}, "a key of env must be the name of a variable"),
    ("NUL in a variable", {"command": "ls", "env": {"A": "a\0"}}, "A"),
    ("a variable longer than Linux takes", {"command": "ls", "env": {"A": "x" * 131070}}, "A"),
    ("variables of one of several that are too many", {"each": [{"command": "ls", "env": dict.fromkeys("ABC", "x" * 30000)}]},
     "the env of one of `each` is larger than 65536 bytes"),
    ("a third decimal", {"command": "ls", "gpus": 0.125}, "two decimals"),
    ("--cuda for a CPU job", {"command": "ls", "gpus": 0, "cuda_arg": True}, "cuda_arg"),
    ("a limit without a group", {"command": "ls", "max_concurrent": 2}, "max_concurrent"),
    ("after two lines", {"command": "ls", "after": ["a\nb"]}, "after"),
    ("a limit of years in words", {"command": "ls", "timeout_seconds": "99w"}, "timeout_seconds must be a number from 0 to"),
    ("an option for conda", {"command": "ls", "conda": "--help"}, "conda"),
    ("a snapshot that is no commit", {"command": "ls", "snapshot": "HEAD", "snapshot_repo": "/x", "cwd": "/x"}, "snapshot"),
    ("a snapshot of a folder in it", {"command": "ls", "snapshot": "a" * 40, "snapshot_repo": "/X", "cwd": "/"}, "that cwd is in"),
    ("a folder longer than Linux takes", {"command": "ls", "cwd": "/" + "x" * 4095}, "cwd must be an absolute path"),
    ("a nice value that is none", {"command": "ls", "nice": 20}, "nice must be a whole number from 0 to 19"),
    ("a snapshot of another folder", {"command": "ls", "snapshot": "a" * 40, "snapshot_repo": "/x", "cwd": "/xy"}, "that cwd is in"),
    ("a snapshot of more", {"command": "ls", "snapshot": "a" * 40, "snapshot_repo": "/x", "cwd": "/x/../y"}, "neither may have .."),
    ("more than a request may add", {"commands": ["ls {a}"] * 11, "sweep": ["a=1..10000"]}, "the sweep makes too many jobs"),
    ("more than may be kept of it", {"command": "x" * 100000 + "{a}", "sweep": ["a=1..10000"]}, "or too long commands"),
    ("a snapshot of nothing", {"command": "ls", "snapshot": "a" * 40}, "snapshot_repo"),
]


@pytest.mark.parametrize("reason, data, part", REFUSED, ids=[case[0] for case in REFUSED])
def test_parse_submission_refuses(reason, data, part):
    with pytest.raises(nexus.NexusError) as caught:
        asked_job(nexus.parse_submission(data)[0])
    assert caught.value.kind == "usage" and part in f"{caught.value.message}; {caught.value.hint}", reason
    assert caught.value.hint and len(caught.value.message) < 300


SEVERAL = [  # reason, the body, the message
    ("as many as there may be", [{}] * 100000, "job 1 of 100000: command is missing; none was added"),
    ("none", [], "the list of jobs is empty"), ("too many", [{}] * 100001, "the list has 100001 jobs; at most 100000 are taken at once"),
    ("which one", [{"command": "ls"}, {}, {"command": "ls"}], "job 2 of 3: command is missing; none was added")]


@pytest.mark.parametrize("reason, body, message", SEVERAL, ids=[case[0] for case in SEVERAL])
def test_of_several_jobs_all_are_added_or_none(reason, body, message):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submissions(body)
    assert (caught.value.kind, caught.value.message) == ("usage", message) and caught.value.hint
    assert [one.job for one in nexus.parse_submissions([{"command": "ls"}, {"commands": ["a", "b"]}])] == [
        {"command": "ls"}, {"command": "a"}, {"command": "b"}]


def test_a_sweep_names_its_jobs_without_what_is_not_seen():
    [row] = nexus.spread_sweep([("note", ["\u26a0\ufe0f new"])], ["echo {note}"], {}, {}).rows
    assert row["name"] == "note=\u26a0 new" and row["command"] == "echo \u26a0\ufe0f new"
    nexus.check(nexus.EACH, row, "it")


def test_a_sweep_has_its_values_in_the_variables_that_name_them():
    asked = nexus.parse_submission({"command": "echo {a}", "sweep": ["a=1,2"], "env": {"X": "x{a}", "Y": "y"}, "retries": 1})
    assert [one.env for one in asked] == [{"Y": "y"}] * 2
    assert [(one.job["command"], one.job["variables"], one.job["retries"]) for one in asked] == [
        ("echo 1", (("X", "x1"),), 1), ("echo 2", (("X", "x2"),), 1)]
    [one] = nexus.parse_submission({"command": "echo {a}", "sweep": ["a=1"], "name": "n", "group": "g", "cwd": "/x{a}", "gpus": 2})
    template = (("command", "echo {a}"), ("title", "n"), ("cwd", "/x{a}"))
    assert one.job == {"command": "echo 1", "sweep_values": (("a", "1"),), "name": "n a=1", "group": "g", "cwd": "/x1", "gpus": 2,
                       "template": template}
    asked = nexus.parse_submission({"commands": ["echo {a}", "ls {a}"], "sweep": ["a=1,2"], "env": {"X": "{a}"}})
    assert [one.job["command"] for one in asked] == ["echo 1", "echo 2", "ls 1", "ls 2"] and not any(one.env for one in asked)


def sweep(*values, command="t --lr {lr} --bs {bs}", **fields):
    """The last job of a sweep."""
    *_, asked = nexus.parse_submission({"command": command, "sweep": values or ["lr=0.1", "bs=96"], "cwd": "/x", **fields})
    return job("abc", **asked.job)


OTHER_VALUES = [  # reason, the job, the values, what its fields are then
    ("one, in the command and the name", sweep(), {"bs": ["48"]}, [
        {"command": "t --lr 0.1 --bs 48", "name": "lr=0.1 bs=48", "sweep_values": (("lr", "0.1"), ("bs", "48"))}]),
    ("several", sweep(), {"bs": ["48", "64"]}, [{"command": "t --lr 0.1 --bs 48"}, {"command": "t --lr 0.1 --bs 64"}]),
    ("of several names, each combination", sweep(), {"bs": ["1", "2"], "lr": ["3", "4"]}, [
        {"command": f"t --lr {lr} --bs {bs}"} for bs in "12" for lr in "34"]),
    ("behind a name that was given", sweep(name="run"), {"bs": ["48"]}, [{"name": "run lr=0.1 bs=48"}]),
    ("in all texts", sweep(name="b{bs}", group="g{bs}", cwd="/x/{bs}", env={"B": "b{bs}", "C": "c"}), {"bs": ["48"]}, [
        {"name": "b48", "group": "g48", "cwd": "/x/48", "variables": (("B", "b48"),)}]),
    ("what was changed since stays", nexus.replace(sweep(cwd="/x/{bs}", env={"B": "{bs}"}), name="mine", cwd="/y", variables=(("B", "1"),)),
     {"bs": ["48"]}, [{"command": "t --lr 0.1 --bs 48", "name": "mine", "cwd": "/y", "variables": (("B", "1"),)}]),
    ("quotes of another value stay in the command", sweep("opt='adam w'", "bs=96", command="t {opt} {bs}"), {"bs": ["4"]}, [
        {"command": "t 'adam w' 4", "name": "opt=adam w bs=4", "sweep_values": (("opt", "adam w"), ("bs", "4"))}]),
    ("and a value may get some", sweep(), {"bs": ["'4 8'"]}, [{"command": "t --lr 0.1 --bs '4 8'", "name": "lr=0.1 bs=4 8"}]),
    ("braces of a value are none", sweep("lr={bs}", "bs=1"), {"bs": ["2"]}, [{"command": "t --lr {bs} --bs 2"}]),
]


@pytest.mark.parametrize("reason, swept, values, wanted", OTHER_VALUES, ids=[case[0] for case in OTHER_VALUES])
def test_another_value_of_a_sweep(reason, swept, values, wanted):
    found = nexus.set_values(swept, values)
    changed = [nexus.replace(swept, **facts) for facts in found]
    assert [{name: getattr(one, name) for name in wanted[0]} for one in changed] == wanted, reason
    again = nexus.replace(swept, **nexus.set_values(changed[-1], {name: [dict(swept.sweep_values)[name]] for name in values})[0])
    assert "quotes" in reason or "some" in reason or again.command == swept.command, "the new job has a template, too"


@pytest.mark.parametrize("reason, swept, values, says", [
    ("no key", sweep(), {"batch": ["48"]}, "job abc has no batch in its sweep: it has lr, bs"),
    ("no sweep", job("abc"), {"bs": ["48"]}, "job abc has no values that can be set: it is of no sweep"),
    ("of an older nexus", nexus.replace(sweep(), template=()), {"bs": ["48"]}, "it was added by an older nexus, or without --sweep"),
    ("too many", sweep(), {"bs": ["1"] * 200, "lr": ["2"] * 200}, "more than 10000 combinations"),
    ("too long a name", sweep(name="b{bs}"), {"bs": ["x" * 300]}, "at most 200 bytes"),
])
def test_a_value_that_cannot_be_set(reason, swept, values, says):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.set_values(swept, values)
    assert caught.value.kind == "usage" and says in caught.value.message and (caught.value.hint or reason in ("no key", "too long a name"))


def test_each_of_several_commands_is_a_job_of_its_own():
    asked = nexus.parse_submission({"commands": ["ls", "pwd"], "names": ["a", "b"], "gpus": 2})
    assert [one.job for one in asked] == [{"command": "ls", "name": "a", "gpus": 2}, {"command": "pwd", "name": "b", "gpus": 2}]
    asked = nexus.parse_submission({"each": [{"command": "ls", "env": {"A": "1"}, "group": "g"}, {"command": "pwd"}], "retries": 1})
    assert [one.job for one in asked] == [{"command": "ls", "group": "g", "variables": (("A", "1"),), "retries": 1},
                                         {"command": "pwd", "retries": 1}]


@pytest.mark.parametrize("depth", [10, 900, 985, 990, 995, 2000, 100000])
def test_however_deep_a_text_is_nested_it_is_a_fault_of_the_text(depth):
    text = '{"command": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submissions(nexus.parse_json(text, "the body"))
    assert caught.value.kind == "usage"


def list_schemas(schema):
    """A schema and all in it."""
    for part in schema if isinstance(schema, (list, tuple)) else schema.values() if isinstance(schema, dict) else ():
        yield from list_schemas(part)
    if isinstance(schema, dict) and "type" in schema:
        yield schema


OF_A_LENGTH = ("gpu_ids", "snapshot", "node")           # as their patterns say


@pytest.mark.parametrize("name", nexus.ASKED)
def test_what_is_asked_for_has_a_limit(name):
    for schema in list_schemas(nexus.ASKED[name].schema):
        if schema["type"] == "array":
            assert schema["maxItems"] > 0
        if schema["type"] == "string" and "enum" not in schema and name not in OF_A_LENGTH:
            assert (schema.get("maxLength") or schema["x-max-bytes"]) > 0
        assert schema.get("writeOnly", True) is True


OPTIONS = [  # an option, its text, what it means; None: it is refused
    ("gpus", "2", 2), ("gpus", "0.5", 0.5), ("gpus", "two", None), ("gpu_ids", "5,0.1,0-1", (0, "0.1", 1, 5)),
    ("gpu_mem_mib", "10G", 10240), ("priority", "HIGH", 0), ("priority", "-5", -5), ("priority", "1e3", None), ("retries", "3", 3),
    ("retries", "1.5", None), ("timeout_seconds", "1h30m", 5400), ("expected_time", "30m", 1800), ("warn", "USR1@2m", "USR1@2m"),
    ("warn", "KILL@2m", None), ("max_concurrent", "2", 2), ("status", "failed,Cancelled", ("failed", "cancelled")),
    ("status", "failed,lost", None), ("since", "7d", "7d")]
OF_COMMANDS = {**nexus.ASKED, **nexus.FILTERS}


@pytest.mark.parametrize("name, text, value", OPTIONS)
def test_an_option_means_what_its_text_says(name, text, value):
    if value is not None:
        assert nexus.parse_field(OF_COMMANDS[name], text, name) == value
        return
    with pytest.raises(nexus.NexusError, match=f"{name} must be "):
        nexus.parse_field(OF_COMMANDS[name], text, name)


@pytest.mark.parametrize("name", OF_COMMANDS)
def test_what_the_help_of_an_option_shows_is_taken(name):
    row = OF_COMMANDS[name]
    form = row.text or row.schema
    has_form = row.flag and row.metavar != "NAME" and form["type"] == "string" and "examples" in form
    assert row.like or not (has_form or row.takes_pairs), "who does not know the form sees it"
    assert all(re.fullmatch("--[a-z]+(-[a-z]+)*|-[a-z]", flag) for flag in filter(None, (row.flag, *row.also)))
    for example in re.split(", | or |\n", row.like) if row.like else ():
        if name == "sweep":
            assert nexus.parse_sweep(example, list)
        else:
            assert (nexus.parse_repeated if row.repeats else nexus.parse_field)(row, example, name)


REPEATED = [  # an option that may be given several times, a text, what it adds
    ("env", "A=1", [("A", "1")]), ("env", "A=b=c", [("A", "b=c")]), ("env", "A=", [("A", "")]), ("env", "A", None), ("env", "=1", None),
    ("after", "abc,abd", ["abc", "abd"]), ("after", "abc\nabd", ["abc", "abd"]), ("after", "", None), ("after_group", "g", ["g"]),
]


@pytest.mark.parametrize("name, text, added", REPEATED)
def test_an_option_that_repeats_adds_what_its_text_says(name, text, added):
    if added is not None:
        assert nexus.parse_repeated(nexus.ASKED[name], text, name) == added
        return
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_repeated(nexus.ASKED[name], text, name)
    assert caught.value.kind == "usage" and caught.value.message.startswith(f"{name} must be ")


@pytest.mark.parametrize("gpus, words", [(0, "no GPU"), (0.5, "0.5 GPU"), (1, "1 GPU"), (1.5, "1.5 GPUs"), (2.0, "2 GPUs")])
def test_format_gpus(gpus, words):
    assert nexus.format_gpus(gpus) == words

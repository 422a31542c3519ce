"""Every key of config.toml, its default, its check."""

import contextlib
import json
import pathlib
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import CONFIG_KEYS, config, json_values

import nexus

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


ROWS = [(name, key, row) for name, table in nexus.SECTIONS.items() for key, row in table.FIELDS.items()]


def test_the_sample_file_says_the_defaults_and_explains_every_key():
    sample = nexus.format_sample_config()
    made = nexus.parse_config(tomllib.loads(sample), "config.toml.example")
    assert made == nexus.parse_config({}, "config.toml") == nexus.Config()
    assert all(getattr(getattr(made, name), key) == row.default for name, key, row in ROWS)
    lines = sample.splitlines()
    for _, key, row in ROWS:
        mark = "# " if row.chosen else ""               # an active line would name it
        line = next(line for line in lines if line.startswith(f"{mark}{key} = "))
        assert row.help and row.help in line


WORDS = {"log_format": "text json", "log_level": "DEBUG INFO WARNING ERROR", "launcher": "screen direct slurm",
         "on_reboot": "fail requeue", "cuda_arg": "replace add"}
LEAST = {"log_backups": 0, "launch_attempts": 1, "history_limit": 1, "queue_limit": 1, "max_submitted": 1, "timeout_multiplier": 1,
         "kill_grace_seconds": 0, "retry_backoff_seconds": 0, "guard_seconds": 0, "reserve_after_seconds": 0, "default_gpus": 0,
         "cpu_slots": 0, "retries": 0, "min_free_mem_mib": 0, "max_unseen_mem_mib": 0, "mem_threshold": 0, "load_threshold": 0}


def test_each_word_that_a_key_may_be_and_what_the_help_says_of_a_value():
    """Like "0 = never"."""
    assert WORDS.keys() == {key for _, key, row in ROWS if "enum" in row.schema}
    for _, key, row in ROWS:
        told = [json.loads(fact) for fact in re.findall(r'(?:^|[ (])([0-9.]+|\[]|"\w*") =', row.help)]
        for fact in [*WORDS.get(key, "").split(), *([LEAST[key]] if key in LEAST else []), *told]:
            made = config(**{key: fact})
            assert getattr(getattr(made, CONFIG_KEYS[key]), key) == (tuple(fact) if fact == [] else fact)


lines_of_text = st.text(st.characters(exclude_categories=["Cc", "Cs"]))


@given(st.fixed_dictionaries({}, optional={
    "host": lines_of_text, "allowed_hosts": st.lists(lines_of_text), "ids": st.lists(st.integers(0, 9999)),
    "refresh_rate_seconds": st.floats(0.1, 3600), "mem_threshold": st.floats(0, 1),
    "share_with_others": st.booleans()}))
def test_what_is_in_force_can_be_shown_and_read_again(keys):
    made = config(**keys)
    assert nexus.parse_config(tomllib.loads(nexus.format_config(made)), "config.toml") == made


BAD = [  # reason, TOML, what the message says
    ("a key that is none, with the nearest", "[jobs]\ncpu_slot = 2", ["'cpu_slot' is not a key of [jobs]", "did you mean 'cpu_slots'?"]),
    ("a section that is none, with the nearest", "[gpus]\nids = [0]", ["'gpus' is not a key of config.toml", "did you mean 'gpu'?"]),
    *((f"a key that {name} has not", f"[{name}]\nx = 1", [f"'x' is not a key of [{name}]"]) for name in nexus.SECTIONS),
    ("a section that is a value", "gpu = 2", ["gpu must be an object, not 2"]),
    ("a number in quotes", '[service]\nport = "6234"', ["service.port", '"6234"', "whole number from 1 to 65535"]),
    ("out of range", "[service]\nport = 70000", ["service.port", "70000", "from 1 to 65535"]),
    ("an address that is none", '[service]\npublic_url = "gpu1:6234"', ["service.public_url", "https://gpu1.example.org"]),
    ("an address with more behind it", '[service]\npublic_url = "https://gpu1/#/jobs"', ["service.public_url", "https://gpu1.example.org"]),
    ("decimals where there are none", "[jobs]\ncpu_slots = 1.5", ["jobs.cpu_slots", "1.5", "whole number"]),
    ("a choice that is none, with the nearest", '[jobs]\nlauncher = "sreen"', ['"sreen"', "direct", "did you mean 'screen'?"]),
    ("folders that are one", '[jobs]\nallowed_script_paths = "/data"', ["jobs.allowed_script_paths", "a list, each a text"]),
    ("a text no file can have", '[state]\nlog_dir = "a\\u0000b"', ["state.log_dir must be a text without NUL"]),
    ("a node that is no list", "nodes = {host = 1}", ["nodes must be a list"]),
    ("a node that is none", '[[nodes]]\nhost = "h"\n[[nodes]]\nname = "x"', ["host is missing in nodes[1]"]),
    ("a name that is none", '[[nodes]]\nhost = "h"\nname = ["x"]', ["nodes[0].name must be"]),
    ("two nodes of one name", '[[nodes]]\nhost = "n1"\n[[nodes]]\nhost = "h"\nname = "n1"', ["nodes: two have the same name: n1, n1"]),
    ("several faults of a node", '[[nodes]]\nhost = "-x"\nuser = "-y"\nport = 70000\npasword = "z"',
     ["nodes[0].host", "nodes[0].user", "nodes[0].port", "'pasword'"]),
    ("faults in all sections", '[service]\nport = 0\nprot = 1\n[gpu]\nids = 1\n[jobs]\nlauncher = "x"\n[job]\n',
     ["service.port", "'prot'", "gpu.ids must be a list", "jobs.launcher", "'job'"]),
    ("options of sbatch by which nexus would lose its jobs", '[slurm]\nextra_args = ["--nice", "--array=1-2"]',
     ["slurm.extra_args[1] must be no --array, --clusters"]),
    ("a node beside Slurm", '[jobs]\nlauncher = "slurm"\n[[nodes]]\nhost = "n1"', ["Slurm chooses where jobs run"]),
    ("half of what https needs", '[service]\ntls_cert = "c.pem"', ["belong together"]),
]


@pytest.mark.parametrize("reason, text, parts", BAD, ids=[case[0] for case in BAD])
def test_parse_config_refuses(reason, text, parts):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_config(tomllib.loads(text), "/home/ann/.nexus/config.toml")
    assert caught.value.kind == "usage" and caught.value.message.startswith("/home/ann/.nexus/config.toml: ")
    assert caught.value.hint.endswith("all keys and what they mean: nexus config sample")
    for part in parts:
        assert part in f"{caught.value.message}; {caught.value.hint}", reason


NODES = [  # reason, table, (name, host, user, port, jump, identity_file)
    ("a host is enough", {"host": "10.0.0.5"}, ("10.0.0.5", "10.0.0.5", "", 0, "", "")),
    ("all of it", {"name": "n1", "host": "gpu1.lab", "user": "ann", "port": 2222, "jump": "me@gate:2200", "identity_file": "~/.ssh/id"},
     ("n1", "gpu1.lab", "ann", 2222, "me@gate:2200", "~/.ssh/id")),
    ("a user of a directory service", {"name": "n", "host": "h", "user": "ann@lab.org"}, ("n", "h", "ann@lab.org", 0, "", "")),
]


@pytest.mark.parametrize("reason, table, facts", NODES, ids=[case[0] for case in NODES])
def test_parse_node(reason, table, facts):
    node = nexus.parse_node(table)
    assert node == nexus.NodeConfig(*facts)
    assert node.destination == (f"{facts[2]}@{facts[1]}" if facts[2] else facts[1])


WRONG_NODES = [  # reason, table, words
    ("no table", "n1", "a node must be an object"),
    ("no host", {"name": "n1"}, "host is missing"),
    ("an option of ssh", {"name": "n", "host": "-oProxyCommand=touch /tmp/x"}, "host must be an address"),
    ("what speaks to a terminal", {"name": "n", "host": "h\x1b[2J"}, "host must be an address"),
    ("an option of ssh as user", {"name": "n", "host": "h", "user": "-oProxyCommand=x"}, "user must be"),
    ("an option as jump", {"name": "n", "host": "h", "jump": "-oProxyCommand=x"}, "jump must be"),
    ("longer than Linux takes", {"name": "n", "host": "h", "identity_file": "/" + "x" * 4095}, "identity_file must be"),
    ("a relative path", {"name": "n", "host": "h", "identity_file": "id"}, "identity_file must be an absolute path"),
    ("a name with a slash", {"name": "a/b", "host": "h"}, "name must be"),
    ("a port that is none", {"name": "n", "host": "h", "port": 65536}, "port must be"),
    ("an IPv6 address needs a name", {"host": "::1"}, "name must be"),
]


@pytest.mark.parametrize("reason, table, words", WRONG_NODES, ids=[case[0] for case in WRONG_NODES])
def test_parse_node_refuses(reason, table, words):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_node(table)
    assert caught.value.kind == "usage" and caught.value.message.startswith(words)


node_keys = ("name", "host", "user", "port", "jump", "identity_file")


@given(json_values | st.fixed_dictionaries({}, optional=dict.fromkeys(node_keys, json_values)))
def test_whatever_comes_is_a_node_or_refused(table):
    with contextlib.suppress(nexus.NexusError):
        node = nexus.parse_node(table)
        assert not any(str(fact).startswith("-") for fact in nexus.encode_value(node).values())


def test_nodes_of_the_file():
    text = '[[nodes]]\nname = "n1"\nhost = "10.0.0.5"\nuser = "gpu"\n[[nodes]]\nhost = "n2"\nport = 22\n'
    made = nexus.parse_config(tomllib.loads(text), "config.toml")
    assert [(node.name, node.destination, node.port) for node in made.nodes] == [("n1", "gpu@10.0.0.5", 0), ("n2", "n2", 22)]
    assert nexus.parse_config(tomllib.loads(nexus.format_config(made)), "config.toml") == made


def test_the_sample_is_what_the_code_takes():
    sample = (pathlib.Path(nexus.__file__).parent / "config.toml.example").read_text()
    assert nexus.format_sample_config() == sample
    assert nexus.parse_config(tomllib.loads(sample), "config.toml") == nexus.Config()

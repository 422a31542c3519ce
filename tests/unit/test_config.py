"""Section 3: every key of config.toml, its default, its check."""

import contextlib
import datetime
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import config, json_values

import nexus

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


ROWS = [(name, key, row) for name, table in nexus.SECTIONS.items() for key, row in table.FIELDS.items()]


def test_an_empty_file_gives_the_defaults():
    made = nexus.parse_config({}, "config.toml")
    assert made == nexus.Config() and all(getattr(getattr(made, name), key) == row.default for name, key, row in ROWS)


def test_the_sample_file_says_the_defaults():
    sample = nexus.format_sample_config()
    assert nexus.parse_config(tomllib.loads(sample), "config.toml.example") == nexus.parse_config({}, "config.toml")


def test_the_sample_file_shows_and_explains_every_key():
    lines = nexus.format_sample_config().splitlines()
    for _, key, row in ROWS:
        line = next(line for line in lines if line.startswith(f"{key} = "))
        assert row.help and row.help in line


def test_a_key_that_is_added_is_everywhere(monkeypatch):
    """A row is all that a new key takes: it is parsed, checked, shown, explained in the sample, and named where it is misplaced."""
    row = nexus.Field(nexus.integer_in(0, 9), "how many spare parts", default=3)

    def extend(cls, **rows):
        rows = {**cls.FIELDS, **rows}
        return type(cls.__name__, (nexus.Value,), {"__annotations__": dict.fromkeys(rows, "Any"), **rows})

    GpuConfig = extend(nexus.GpuConfig, spares=row)
    Config = extend(nexus.Config, gpu=nexus.section(GpuConfig, "gpu"))
    monkeypatch.setattr(nexus, "Config", Config)
    monkeypatch.setattr(nexus, "CONFIG", nexus.object_of(Config.FIELDS, "config.toml"))
    monkeypatch.setattr(nexus, "SECTIONS", {**nexus.SECTIONS, "gpu": GpuConfig()})
    assert nexus.parse_config({}, "").gpu.spares == 3
    made = nexus.parse_config({"gpu": {"spares": 5}}, "")
    assert made.gpu.spares == 5 and re.search("^spares = 5 +# how many spare parts$", nexus.format_config(made), re.MULTILINE)
    assert re.search(r"^spares = 3 +# how many spare parts$", nexus.format_sample_config(), re.MULTILINE)
    for data, words in (({"gpu": {"spares": 10}}, "gpu.spares must be a whole number from 0 to 9, not 10"),
                        ({"gpu": {"spare": 1}}, "did you mean 'spares'?")):
        with pytest.raises(nexus.NexusError) as caught:
            nexus.parse_config(data, "config.toml")
        assert words in caught.value.message


lines_of_text = st.text(st.characters(exclude_categories=["Cc", "Cs"]))


@given(st.fixed_dictionaries({}, optional={
    "host": lines_of_text, "allowed_hosts": st.lists(lines_of_text), "ids": st.lists(st.integers(0, 9999)),
    "refresh_rate_seconds": st.floats(0.1, 3600), "mem_threshold": st.floats(0, 1),
    "share_with_others": st.booleans()}))
def test_what_is_in_force_can_be_shown_and_read_again(keys):
    made = config(**keys)
    assert nexus.parse_config(tomllib.loads(nexus.format_config(made)), "config.toml") == made


def test_a_key_has_one_home():
    keys = [key for _, key, _ in ROWS]
    assert len(keys) == len(set(keys)), "the hint for a key in the wrong section names one"


GOOD = [  # reason, TOML, section, key, value
    ("a number", "[service]\nport = 7000", "service", "port", 7000),
    ("a list of numbers", "[gpu]\nids = [0, 2]", "gpu", "ids", (0, 2)),
    ("a list of texts", '[service]\nallowed_hosts = ["gpu.example.org"]', "service", "allowed_hosts",
     ("gpu.example.org",)),
    ("the ends of a range are in it", "[gpu]\nmem_threshold = 1", "gpu", "mem_threshold", 1),
    ("a choice", '[jobs]\nlauncher = "direct"', "jobs", "launcher", "direct"),
]


@pytest.mark.parametrize("reason, text, section, key, value", GOOD, ids=[case[0] for case in GOOD])
def test_parse_config(reason, text, section, key, value):
    made = nexus.parse_config(tomllib.loads(text), "config.toml")
    assert getattr(getattr(made, section), key) == value, reason


BAD = [  # reason, TOML, what the message says
    ("a key that is none, with the nearest", "[jobs]\ncpu_slot = 2", ["'cpu_slot' is not a key of [jobs]", "did you mean 'cpu_slots'?"]),
    ("a key in the wrong section", "[jobs]\nport = 2", ["'port' is not a key of [jobs]", "it belongs to [service]"]),
    ("a section that is none, with the nearest", "[gpus]\nids = [0]", ["'gpus' is not a key of config.toml", "did you mean 'gpu'?"]),
    ("a section that is a value", "gpu = 2", ["gpu must be an object, not 2"]),
    ("a number in quotes", '[service]\nport = "6234"', ["service.port", '"6234"', "whole number from 1 to 65535"]),
    ("out of range", "[service]\nport = 70000", ["service.port", "70000", "from 1 to 65535"]),
    ("decimals where there are none", "[jobs]\ncpu_slots = 1.5", ["jobs.cpu_slots", "1.5", "whole number"]),
    ("true is no number", "[jobs]\ncpu_slots = true", ["jobs.cpu_slots", "whole number"]),
    ("not a number", "[service]\nrefresh_rate_seconds = nan", ["service.refresh_rate_seconds", "from 0.1 to 3600"]),
    ("a choice that is none, with the nearest", '[jobs]\nlauncher = "sreen"', ['"sreen"', "direct", "did you mean 'screen'?"]),
    ("folders that are one", '[jobs]\nallowed_script_paths = "/data"', ["jobs.allowed_script_paths", "a list, each a text"]),
    ("a text no file can have", '[state]\nlog_dir = "a\\u0000b"', ["state.log_dir must be a text without NUL"]),
    ("one where a list is asked for", "[gpu]\nids = 0", ["gpu.ids must be a list"]),
    ("an index below 0", "[gpu]\nids = [3, -1]", ["gpu.ids[1]", "-1"]),
    ("a node that is no list", "nodes = {host = 1}", ["nodes must be a list"]),
]


@pytest.mark.parametrize("reason, text, parts", BAD, ids=[case[0] for case in BAD])
def test_parse_config_refuses(reason, text, parts):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_config(tomllib.loads(text), "/home/ann/.nexus/config.toml")
    assert caught.value.kind == "usage" and "nexus config sample" in caught.value.hint
    for part in ["/home/ann/.nexus/config.toml", *parts]:
        assert part in caught.value.message, reason


def test_all_faults_are_named_at_once():
    data = {"service": {"port": 0, "prot": 1}, "gpu": {"ids": 1}, "jobs": {"launcher": "x"}, "job": {}}
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_config(data, "config.toml")
    for part in ("service.port", "'prot'", "gpu.ids", "jobs.launcher", "'job'"):
        assert part in caught.value.message


HIDDEN = [  # reason, TOML, all that must be said of it
    ("several of a node", '[[nodes]]\nhost = "-x"\nuser = "-y"\nport = 70000\npasword = "z"',
     ["nodes[0].host", "nodes[0].user", "nodes[0].port", "'pasword'"]),
    ("a node, where there may be none", '[jobs]\nlauncher = "slurm"\n[[nodes]]\nhost = "-x"', ["nodes[0].host", "Slurm chooses"]),
    ("half of what https needs", '[service]\nport = 0\ntls_cert = "c.pem"', ["service.port", "belong together"]),
]


@pytest.mark.parametrize("reason, text, parts", HIDDEN, ids=[case[0] for case in HIDDEN])
def test_no_fault_hides_another(reason, text, parts):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_config(tomllib.loads(text), "config.toml")
    for part in parts:
        assert part in caught.value.message, reason


near_configs = st.dictionaries(
    st.sampled_from([*nexus.SECTIONS, "nodes"]),
    json_values | st.dictionaries(
        st.sampled_from([*(key for _, key, _ in ROWS), "prot"]),
        json_values | st.floats() | st.just(datetime.date(2024, 10, 24)), max_size=4), max_size=4)


@given(near_configs)
def test_parse_config_raises_nothing_else(data):
    try:
        made = nexus.parse_config(data, "config.toml")
    except nexus.NexusError as error:
        assert error.kind == "usage" and error.message.startswith("config.toml: ")
    else:
        assert hash(made), "a configuration is a value through and through"


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
    ("no table", "n1", "must be an object"),
    ("no host", {"name": "n1"}, "host is missing"),
    ("an option of ssh", {"name": "n", "host": "-oProxyCommand=touch /tmp/x"}, "host must be an address"),
    ("an option as user", {"name": "n", "host": "h", "user": "-oProxyCommand=x"}, "user must be"),
    ("an option as jump", {"name": "n", "host": "h", "jump": "-oProxyCommand=x"}, "jump must be"),
    ("a command in jump", {"name": "n", "host": "h", "jump": "gate;reboot"}, "jump must be [user@]host[:port]"),
    ("a relative path", {"name": "n", "host": "h", "identity_file": "id"}, "identity_file must be an absolute path"),
    ("what ssh would fill in", {"name": "n", "host": "h", "identity_file": "/%d/id"}, "identity_file must be"),
    ("a port that is none", {"host": "h", "port": 70000}, "port must be a whole number from 0 to 65535"),
    ("an unknown key", {"host": "h", "password": "x"}, "'password' is not a key of a node"),
    ("a name with a slash", {"name": "a/b", "host": "h"}, "name must be"),
    ("an IPv6 address needs a name", {"host": "::1"}, "name must be"),
]


@pytest.mark.parametrize("reason, table, words", WRONG_NODES, ids=[case[0] for case in WRONG_NODES])
def test_parse_node_refuses(reason, table, words):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_node(table)
    assert caught.value.kind == "usage" and words in caught.value.message


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
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_config(tomllib.loads(text + '[[nodes]]\nname = "n1"\nhost = "h"\n[[nodes]]\nname = "x"\n'), "config.toml")
    with pytest.raises(nexus.NexusError, match="name"):
        nexus.parse_config({"nodes": [{"host": "a", "name": ["x"]}]}, "config.toml")
    assert "nodes: two have the name n1" in caught.value.message and "host is missing in nodes[3]" in caught.value.message


def test_slurm_and_nodes_exclude_each_other():
    with pytest.raises(nexus.NexusError, match="Slurm chooses where jobs run"):
        nexus.parse_config({"jobs": {"launcher": "slurm"}, "nodes": [{"host": "n1"}]}, "config.toml")

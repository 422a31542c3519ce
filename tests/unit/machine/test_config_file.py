"""How config.toml is read."""

import os

import pytest

import nexus

DISK = nexus.Disk()


def test_config_file_is_read(tmp_path):
    path = tmp_path / "config.toml"
    assert nexus.load_config(DISK, str(path), {}) == nexus.parse_config({}, "config.toml"), "no file: the defaults"
    path.write_text('[service]\nport = 7000\n[gpu]\nids = [0, 2]\n')
    for environ, mock in (({}, None), ({"NEXUS_MOCK_GPUS": "3"}, 3)):
        made = nexus.load_config(DISK, str(path), environ)
        assert (made.service.port, list(made.gpu.ids), made.mock_gpus) == (7000, [0, 2], mock)


CONFIG_FAULTS = [  # reason, content, environment, words of the message
    ("a mock that is no number", b"", {"NEXUS_MOCK_GPUS": "two"}, ["NEXUS_MOCK_GPUS must be a whole number from 0 to 1024"]),
    ("a mock that is too many", b"", {"NEXUS_MOCK_GPUS": "1025"}, ["1024"]),
    ("a mock does not hide a wrong section", b"gpu = 5\n[service]\nprot = 1\n", {"NEXUS_MOCK_GPUS": "2"}, ["prot"]),
    ("bytes that are no text", b"[service]\nhost = '\xff'\nport = 'x'\n", {}, ["port"]),
]


@pytest.mark.parametrize("reason, content, environ, words", CONFIG_FAULTS, ids=[case[0] for case in CONFIG_FAULTS])
def test_a_bad_config_is_refused_with_where_and_why(tmp_path, reason, content, environ, words):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(nexus.NexusError) as caught:
        nexus.load_config(DISK, str(path), environ)
    assert caught.value.kind == "usage"
    assert all(word in caught.value.message for word in words), caught.value.message


NO_FILES = [  # reason, how it is made
    ("a link that leads nowhere", lambda path: path.symlink_to("gone.toml")), ("a FIFO", lambda path: os.mkfifo(path)),
    ("a folder", lambda path: path.mkdir()), ("text that is nested too deeply", lambda path: path.write_text("a = " + "[" * 5000)),
]


@pytest.mark.parametrize("reason, make", NO_FILES, ids=[case[0] for case in NO_FILES])
def test_what_stands_in_the_place_of_the_file_is_not_taken_for_none(tmp_path, reason, make):
    make(tmp_path / "config.toml")
    with pytest.raises(nexus.NexusError, match=r"config\.toml is no") as caught:
        nexus.load_config(DISK, str(tmp_path / "config.toml"), {})
    assert caught.value.kind == "usage" and caught.value.hint

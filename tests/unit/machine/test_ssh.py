"""How nodes are reached, and what ssh says is passed on."""

import pytest

import nexus

# OpenSSH


def ssh_to(**facts):
    return nexus.Ssh(nexus.NodeConfig(**{"name": "n1", "host": "10.0.0.5", **facts}), {"PATH": "/bin", "HOME": "/root"})


def test_how_a_person_reaches_a_node():
    assert ssh_to().by_hand == "ssh 10.0.0.5"
    assert ssh_to(user="gpu", port=2222, jump="me@gate:2200", identity_file="/my keys/id").by_hand == (
        "ssh -J me@gate:2200 -p 2222 -i '/my keys/id' gpu@10.0.0.5")


def test_ssh_through_a_jump_host_asks_nothing_and_uses_the_same_key():
    words = ssh_to(jump="me@gate:2200", identity_file="/my keys/id").list_options()
    assert "BatchMode=yes" in words and "ForwardAgent=no" in words and words[words.index("-i") + 1] == "/my keys/id"
    proxy = next(word for word in words if word.startswith("ProxyCommand="))
    assert "BatchMode=yes" in proxy and "-i '/my keys/id' -p 2200 -l me -W [%h]:%p gate" in proxy
    assert not any("StrictHostKeyChecking" in word or "assword" in word for word in words), "as OpenSSH itself has it"

SAID = [  # what ssh says, what is said, what to do
    ("Received disconnect: Too many authentication failures\n", "Too many authentication failures", "--identity FILE"),
    ("channel 2: open failed: administratively prohibited: open failed\n", "administratively prohibited", "AllowTcpForwarding yes"),
    ("ssh: connect to host 10.0.0.5 port 22: No route to host\r\n", "No route to host", "try it by hand: ssh 10.0.0.5"),
    ("mkdir: cannot create directory: Permission denied\n", "mkdir: cannot create", "try it by hand: ssh 10.0.0.5"),
    ("nexus: the port is taken\nhint: free it\n", "n1: nexus: the port is taken", "free it; try it by hand: ssh 10.0.0.5"),
    ("", "the line was cut", "try it by hand: ssh 10.0.0.5"),
    ("\x1b[2Jhello\n", "?[2Jhello", "try it by hand"),
]


@pytest.mark.parametrize("said, words, hint", SAID, ids=[case[1] for case in SAID])
def test_what_ssh_says_is_passed_on_with_what_to_do(said, words, hint):
    fault = ssh_to().make_error("cannot reach", said)
    assert fault.kind == "unavailable" and fault.message.startswith("cannot reach n1: ") and hint in fault.hint
    assert words.replace("?", "") in fault.message.replace("\\x1b", "") and "\x1b" not in fault.message

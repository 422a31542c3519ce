"""The line to a node: whatever comes at its other end, it ends, and costs little."""

import json
import os
import sys
import time

import far_end
import pytest

import nexus


def open_line(folder, ssh, **hello):
    """An AgentLine whose ssh is this script of Python, or of sh where it begins with #!; $HELLO is what an agent says first."""
    (folder / "bin").mkdir()
    path = folder / "bin" / "ssh"
    path.write_text(ssh if ssh.startswith("#!") else f"#!{sys.executable} -IS\n{ssh}")
    path.chmod(0o755)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HELLO": json.dumps({**far_end.HELLO, **hello})}
    layout = nexus.Layout(str(folder), str(folder / "state.json"), str(folder / "logs"))
    return nexus.AgentLine(nexus.DISK, layout, nexus.Ssh(nexus.NodeConfig("n1", "10.0.0.5"), environ), "head", "0" * 64)


SAYS = """#!/bin/sh
echo "a greeting of the login"
echo "nexus-agent: begins"
echo "$HELLO"
exec {}
"""


def test_an_agent_is_heard(tmp_path):
    line = open_line(tmp_path, SAYS.format("sleep 600"), screen=["SCREENDIR=/home/ann/.nexus/screen"])
    assert (line.hello.machine, line.hello.cpu_slots, line.hello.screen) == ("m", 4, ("SCREENDIR=/home/ann/.nexus/screen",))
    line.close()
    assert line.process.returncode


HELLOS = [  # reason, what is otherwise, words
    ("an option for ssh", {"screen": ["-oProxyCommand=id"]}, "screen is '-oProxyCommand=id'"),
    ("a variable of its own", {"screen": ["LD_PRELOAD=/x.so"]}, "screen is 'LD_PRELOAD=/x.so'"),
    ("a boot that is a command", {"boot_id": "$(id)"}, "boot_id is '$(id)'"),
    ("no path", {"path": "nexus.py"}, "path is 'nexus.py'"), ("no slots", {"cpu_slots": -1}, "cpu_slots is -1"),
    ("slots without end", {"cpu_slots": float("inf")}, "cpu_slots is inf"), ("more", {"head": "x"}, "head is no key of its first line"),
    ("a list for its machine", {"machine": ["m"]}, "machine is list"),
    ("a long line", {"screen": ["SCREENDIR=/" + "x" * 4000] * 20}, "its reply is too long"),
]


@pytest.mark.parametrize("reason, fields, words", HELLOS, ids=[case[0] for case in HELLOS])
def test_a_bad_first_line(tmp_path, reason, fields, words):
    with pytest.raises(nexus.NexusError) as caught:
        open_line(tmp_path, SAYS.format("sleep 600"), **fields)
    assert words in caught.value.message


ENDS = [  # reason, what it does then, words
    ("an endless line", "head -c 20000000 /dev/zero", "its reply is too long"),
    ("its end", "sh -c 'echo it had enough of nexus >&2'", "it had enough of nexus"),
]


@pytest.mark.parametrize("reason, does, words", ENDS, ids=[case[0] for case in ENDS])
def test_a_line_that_comes_to_nothing(tmp_path, reason, does, words):
    line = open_line(tmp_path, SAYS.format(does))
    with pytest.raises(nexus.NexusError) as caught:
        line.read_line(60)
    line.close()
    assert words in caught.value.message


def test_questions_that_a_node_does_not_read_do_not_fill_the_memory(tmp_path):
    line = open_line(tmp_path, SAYS.format("sleep 600"))
    for number in range(30):
        line.ask({"number": number, "jobs": [], "folders": ["x" * 300_000]})
    assert line.outbox.qsize() <= 1
    line.close()


DRIP = """\
import fcntl, os, termios, time
print("nexus-agent: begins")
print(os.environ["HELLO"], flush=True)
os.write(1, b"x" * 8 * 2**20)
for _ in range(300):
    while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))):          # the head has not read what there is
        time.sleep(0.0005)
    os.write(1, b"x")
os.write(1, b"\\n")
time.sleep(600)
"""


def test_single_bytes_cost_little(tmp_path):
    line = open_line(tmp_path, DRIP)
    began_s = time.thread_time()
    assert len(line.read_line(60)) == 8 * 2**20 + 300
    assert time.thread_time() - began_s < 0.5
    line.close()

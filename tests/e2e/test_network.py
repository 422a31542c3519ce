"""The network that other tests run on: hosts of their own, which are cut off, slow, restarted, or not what one hopes for."""

import socket
import subprocess
import time

import live
import network
import pytest

import nexus


def connect_s(net, node, timeout_s=live.PATIENCE_S):
    """How long the head takes to get a TCP connection to sshd."""
    began = time.monotonic()
    network.inside(net.head.machine.namespace, socket.create_connection, (node.address, 22), timeout_s).close()
    return time.monotonic() - began


def test_the_head_logs_in():
    with network.Net(nodes=2, gpus=3, head_gpus=1) as net:
        for node in net.nodes:
            done = net.head.ssh(node.target, "id -un; hostname; echo $NEXUS_MOCK_GPUS")
            assert (done.returncode, done.stdout) == (0, f"{node.user}\n{node.name}\n3\n"), done.stderr
        assert net.head.nexus("jobs").returncode == 0 and net.head.wait(net.head.add("hostname"), "completed")
        net.head.machine.reboot()
        assert not net.head.pid()
        net.head.start()
        assert net.head.wait(net.head.add("ssh n2 hostname"), "completed")


def test_through_the_jump_host_only():
    with network.Net(nodes=[{}, {"is_behind_jump": False}], jump=True, is_starting=False) as net:
        node = net.nodes[0]
        assert "unreachable" in net.head.ssh(node.target, "true").stderr
        assert net.head.ssh("-J", net.jump.target, node.target, "hostname").stdout == "n1\n"
        assert net.head.ssh("n1", "hostname").stdout == "n1\n"              # as its ~/.ssh/config says
        assert net.head.ssh(net.nodes[1].target, "hostname").stdout == "n2\n"


def test_a_host_that_is_not_known():
    with network.Net(nodes=1, known_hosts=False, is_starting=False) as net:
        assert "Host key verification failed" in net.head.ssh("n1", "true").stderr


def test_dropped_packets_are_dropped_in_silence():
    with network.Net(nodes=1, is_starting=False) as net:
        node = net.nodes[0]
        line = network.inside(net.head.machine.namespace, socket.create_connection, (node.address, 22), live.PATIENCE_S)
        assert line.recv(100).startswith(b"SSH-2.0-")
        node.drop()
        line.sendall(b"not a line of SSH\n")
        line.settimeout(0.5)
        with pytest.raises(socket.timeout):             # neither an answer nor an error
            line.recv(100)
        net.head.machine.root("ip neigh flush dev eth0")
        with pytest.raises(socket.timeout):
            connect_s(net, node, timeout_s=0.5)
        live.until(lambda: "lladdr" in net.head.machine.root("ip neigh show"))      # without it, the host would be called unreachable, soon
        node.mend()
        line.settimeout(live.PATIENCE_S)
        assert line.recv(100)
        line.close()


def test_reboot():
    with network.Net(nodes=2, is_starting=False) as net:
        node, other = net.nodes
        assert node.run("cat /proc/sys/kernel/random/boot_id").stdout.strip() == node.boot_id != nexus.read_boot_id() != other.boot_id
        before = node.boot_id
        assert node.run("bash -lc 'command -v python3'").stdout.strip() == node.python
        sleeper = subprocess.Popen([*node.become(), "sleep", "600.5"], stdin=subprocess.DEVNULL)
        live.until(lambda: node.find("sleep 600.5"))
        assert not other.find("sleep 600.5")
        node.run("echo kept > kept; touch /run/lock/gone; touch ~/kept")
        node.reboot()
        assert sleeper.wait(live.PATIENCE_S) != 0 and not node.find("sleep 600.5")
        done = net.head.ssh("n1", "cat /proc/sys/kernel/random/boot_id; ls ~ /run/lock")
        assert done.stdout.splitlines()[0] == node.boot_id != before
        assert "kept" in done.stdout and "gone" not in done.stdout


def test_without_power_nobody_answers():
    with network.Net(nodes=1, is_starting=False) as net:
        node = net.nodes[0]
        node.power_off()
        node.mend()
        with pytest.raises(OSError) as caught:
            connect_s(net, node, timeout_s=0.3)
        assert not isinstance(caught.value, ConnectionRefusedError)
        node.power_on()
        connect_s(net, node)


def test_no_machine_is_another():
    """They share neither /tmp nor /run/lock, neither names nor pids."""
    with network.Net(nodes=2, is_starting=False) as net:
        for node in net.nodes:
            node.run("touch /tmp/own-$USER /run/lock/own-$USER")
            others = [f"own-{other.user}" for other in net.nodes if other is not node]
            seen = node.run("ls /tmp /run/lock").stdout
            assert seen.count(f"own-{node.user}") == 2 and not any(name in seen for name in others)
            assert (node.folder / "tmp" / f"own-{node.user}").exists()
        facts = [node.run("cat /etc/machine-id; hostname; echo $$").stdout.split() for node in net.nodes]
        assert len({live.read("/etc/machine-id").strip(), *(machine_id for machine_id, _, _ in facts)}) == 3
        assert [name for _, name, _ in facts] == ["n1", "n2"] and all(int(pid) < 1000 for _, _, pid in facts)
        assert net.nodes[0].run("ps ax").stdout.count("[listener]") == 1


def test_nodes_that_lack_something():
    nodes = [{"python": "old"}, {"python": None}, {"has_screen": False}, {"gpus": None},
             {"gpus": [{"name": "NVIDIA H100"}]}, {"disk_mib": 2}]
    with network.Net(nodes=nodes, is_starting=False) as net:
        def says(number, command):
            done = net.nodes[number - 1].run(command)
            return done.returncode, done.stdout.strip()

        asks = "python3 -I -c 'import sys; print(sys.version_info[:2], sys.version_info >= (3, 9))'"
        assert says(1, asks) == (0, "(3, 8) False") and net.head.ssh("n1", asks).stdout == "(3, 8) False\n"
        assert says(1, "python3 --version") == (0, "Python 3.8.10") and says(1, "command -v python3.11 python")[0] != 0
        assert says(2, "python3 --version")[0] == 127 and says(2, "/usr/bin/python3 --version")[0] == 127
        assert says(3, "command -v screen")[0] != 0
        assert says(4, "nvidia-smi; echo $? $NEXUS_MOCK_GPUS") == (0, "127")
        assert "NVIDIA H100" in says(5, "nvidia-smi --query-gpu=name --format=csv")[1]
        net.nodes[4].show([{"name": "NVIDIA A100"}])
        assert "NVIDIA A100" in says(5, "nvidia-smi --query-gpu=name --format=csv")[1]
        assert says(6, "head -c 4000000 /dev/zero > filler")[0] == 1
        assert says(6, "ls ~")[1] == "filler" and (net.nodes[5].home / "filler").exists()


def test_nothing_stays():
    with network.Net(nodes=1, jump=True) as net:
        folder, box = net.folder, net.head.folder
        net.nodes[0].run("setsid sleep 600.75 > /dev/null 2>&1 &")
    assert not folder.exists() and not box.exists() and not live.find_processes(f"{folder}/") and not live.find_commands("sleep 600.75")
    assert str(folder) not in live.read("/proc/mounts")

"""The network that other tests run on: hosts of their own, which are cut off, slow, or restarted."""

import network


def test_the_head_logs_in():
    with network.Net(nodes=2, gpus=3) as net:
        for node in net.nodes:
            done = net.head.ssh(node.target, "id -un; hostname; echo $NEXUS_MOCK_GPUS; python3 -c 'import psutil'")
            assert (done.returncode, done.stdout) == (0, f"{node.user}\n{node.name}\n3\n"), done.stderr
        assert net.head.status()["gpu_status"] == [] and net.head.nexus("jobs").returncode == 0


def test_through_the_jump_host_only():
    with network.Net(nodes=1, jump=True, is_starting=False) as net:
        node = net.nodes[0]
        assert "unreachable" in net.head.ssh(node.target, "true").stderr
        assert net.head.ssh("-J", net.jump.target, node.target, "hostname").stdout == "n1\n"
        assert net.head.ssh("n1", "hostname").stdout == "n1\n"              # as its ~/.ssh/config says


def test_cut_and_mended():
    with network.Net(nodes=1, is_starting=False) as net:
        net.nodes[0].cut()
        assert net.head.ssh("-o", "ConnectTimeout=1", "n1", "true").returncode == 255
        net.nodes[0].mend()
        assert net.head.ssh("n1", "true").returncode == 0

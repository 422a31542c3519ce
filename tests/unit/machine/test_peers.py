"""Whose a connection is."""

import os
import socket

import nexus

# Whose socket is it?


def test_the_uid_of_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        with listener.accept()[0]:
            own, peer = client.getsockname(), client.getpeername()
            assert nexus.find_socket_uid(own, peer) == nexus.find_socket_uid(peer, own) == os.geteuid(), "the accepted end is ours too"
            assert nexus.find_socket_uid(own, (peer[0], peer[1] ^ 1)) is None and nexus.find_socket_uid((own[0], own[1] ^ 1), peer) is None
            client.close()
            assert nexus.find_socket_uid(own, peer) is None, "who sends and closes at once reads as uid 0: it is not known"


def test_a_v6_socket_that_speaks_to_a_mapped_address():
    """What Java does; the server sees an IPv4 address."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        assert nexus.find_socket_uid(("127.0.0.1", client.getsockname()[1]), listener.getsockname()) == os.geteuid()

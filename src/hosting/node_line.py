"""The line to a node: an ssh at whose other end an agent begins."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from .. import text_of
from ..formats.codec import decode_value, encode_json
from ..machine.disk import Disk, read_bytes
from ..machine.layout import Layout, hash_code
from ..machine.scratch import limit_output, open_scratch, read_scratch
from ..machine.search_path import find_program
from ..machine.ssh import INSTALL_SSH, SSH_TIMEOUT_S, Ssh, describe_bad_node
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.text import load_json
from .node_protocol import Hello, start_writer

if TYPE_CHECKING:
    from typing import Any

ANSWER_S = 120.0                # in which a whole reply must arrive, however slow the connection
MAX_ANSWER_BYTES = 16 * 2**20
PIECE_PAUSE_S = 0.001           # between the pieces of a reply: a node that sends single bytes costs little CPU
MAX_LOGIN_LINES = 1000          # that a login may print before the agent begins
MAX_LOGIN_BYTES = 65536         # of such a line, and of the agent's first
# Run on a node: find a Python, bring this nexus.py there if it lacks it, and become the agent.  The last line does all
# of it: however far a shell reads ahead, what is sent after that line is for `read`, `head` and the agent.
AGENT_SCRIPT = text_of("agent.sh")


def read_own_code(disk: Disk, layout: Layout, digest: str) -> bytes:
    """The nexus.py that this service was started with, or the copy of it that was kept.  Raises: unavailable."""
    path = os.path.abspath(__file__)
    for each in (path, layout.copy_of(digest, ".py")):
        with contextlib.suppress(NexusError):
            content = read_bytes(disk, each)
            if hash_code(content) == digest:
                return content
    raise NexusError("unavailable", f"{path} has changed since the service began",
                     hint="nexus restart: then the nodes get the new one")


class AgentLine:
    """A connection to a node's agent."""

    def __init__(self, disk: Disk, layout: Layout, ssh: Ssh, head: str, digest: str) -> None:
        """Connect, and bring nexus.py there if it is missing.  Raises: unavailable, with ssh's words."""
        import subprocess
        self.ssh, self.name, self.received, self.errors = ssh, ssh.node.name, bytearray(), open_scratch()
        try:
            self.process = subprocess.Popen(
                ssh.list_words(f"sh -s {digest} {head}"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors, env=ssh.environ, start_new_session=True,
                executable=find_program("ssh", ssh.environ.get("PATH")))
        except OSError as error:
            raise NexusError("unavailable", f"ssh cannot be run: {error.strerror}", INSTALL_SSH) from None
        limit_output(self.process, MAX_ANSWER_BYTES)
        assert self.process.stdin
        self.outbox = start_writer(self.process.stdin, f"to node {self.name}")
        try:
            self.outbox.put(AGENT_SCRIPT.encode())
            word = self.read_word()
            if word == "needs":
                content = read_own_code(disk, layout, digest)
                self.outbox.put(b"%d\n%s" % (len(content), content))
                word = self.read_word()
            first = load_json(self.read_line(SSH_TIMEOUT_S, MAX_LOGIN_BYTES))
            self.hello = decode_value(Hello, first, "its first line", True)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, TypeError, ValueError)):
                raise describe_bad_node(self.name, error) from None
            raise

    def ask(self, question: Mapping[str, Any]) -> None:
        """Send a question, in the place of one that is still to be sent: a node may read none."""
        import queue
        with contextlib.suppress(queue.Empty):
            self.outbox.get_nowait()
        self.outbox.put(encode_json(question).encode("ascii") + b"\n")

    def read_word(self) -> str:
        """The next line `nexus-agent: WORD`.  A login may print other lines.  Raises: unavailable."""
        for _ in range(MAX_LOGIN_LINES):
            line = self.read_line(SSH_TIMEOUT_S, MAX_LOGIN_BYTES)
            if line.startswith(b"nexus-agent: "):
                return line.decode("utf-8", "replace").split()[-1]
        raise NexusError("unavailable", f"cannot use {self.name}: its login prints more than {MAX_LOGIN_LINES} lines",
                         hint=f"see what its shell prints: {self.ssh.by_hand} true")

    def read_line(self, silence_s: float, most_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """Raises: unavailable."""
        import select
        assert self.process.stdout
        handle, give_up_at = self.process.stdout.fileno(), time.monotonic() + silence_s + ANSWER_S
        end = self.received.find(b"\n")
        while end < 0:
            size = len(self.received)
            if time.monotonic() > give_up_at:
                raise describe_bad_node(self.name, "its reply does not end")
            if size:
                time.sleep(PIECE_PAUSE_S)
            is_ready, _, _ = select.select([handle], [], [], silence_s)
            piece = os.read(handle, 65536) if is_ready else b""
            if not piece:
                self.close()                                # so that ssh has said why
                default = "the line was cut" if is_ready else f"no answer within {silence_s:g} s"
                words = read_scratch(self.errors)
                raise self.ssh.make_error("cannot use" if "nexus" in words else "cannot reach", words or default)
            self.received += piece
            end = self.received.find(b"\n", size)
            line_size = len(self.received) if end < 0 else end
            if line_size > most_bytes:
                raise describe_bad_node(self.name, "its reply is too long")
        line = bytes(self.received[:end])
        del self.received[:end + 1]
        return line

    def close(self) -> None:
        """End ssh, and what its ProxyCommand has started."""
        import signal
        import subprocess
        self.outbox.put(b"")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)                          # it may be ending by itself
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(1.0)

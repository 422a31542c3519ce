"""Nodes are reached by OpenSSH, which handles keys, agents, jump hosts and host keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from shlex import quote

from ..values.config import NodeConfig
from ..values.errors import NexusError
from ..values.text import format_line
from .programs import run

SSH_TIMEOUT_S = 40.0            # for connecting, also through a jump host
SSH_CALL_TIMEOUT_S = 120.0      # for a command there
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3",
               "ForwardAgent=no", "ForwardX11=no", "PermitLocalCommand=no", "ControlPersist=no", "RemoteCommand=none",
               "StreamLocalBindUnlink=yes")
MAX_SAID_BYTES = 2**20          # of what a command on a node may print, also by git
INSTALL_SSH = "install OpenSSH's client: apt install openssh-client"
SSH_NOISE = ("@", "Warning: Permanently added", "mux_client", "kex_exchange_identification",
             "Connection closed by UNKNOWN", "Connection to UNKNOWN")
SSH_HINTS = (                   # (pattern of ssh's words, what to do)
    ("IDENTIFICATION HAS CHANGED",
     "its host key is another than before: find out why; then ssh-keygen -R {host} forgets the old one"),
    ("Host key verification failed", "accept its host key once, after you have checked it: {ssh} true"),
    ("Permission denied (", "log in by key, without a password: {copy}"),
    ("Too many authentication failures", "name the key that is right: --identity FILE"),
    ("administratively prohibited",
     "the jump host's sshd must allow it: AllowTcpForwarding yes in sshd_config"))


def ssh_flags(**given: object) -> list[str]:
    """ssh's one-letter options for the given values."""
    return [word for letter, text in given.items() if text for word in (f"-{letter}", str(text))]


class Ssh:
    """The OpenSSH connection to a node."""

    def __init__(self, node: NodeConfig, environ: Mapping[str, str]) -> None:
        self.node = node
        self.environ = {**environ, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}

    def list_options(self) -> list[str]:
        node, options = self.node, [word for option in SSH_OPTIONS for word in ("-o", option)]
        options += ssh_flags(i=os.path.expanduser(node.identity_file))
        if node.jump:                                   # -J would ask questions, and ignores -i
            user, _, place = node.jump.rpartition("@")
            host, _, port = place.partition(":")
            jump = " ".join(map(quote, ["ssh", *options, *ssh_flags(p=port, l=user)]))
            options += ["-o", f"ProxyCommand={jump} -W [%h]:%p {quote(host)}"]
        return [*options, *ssh_flags(p=node.port)]

    @property
    def by_hand(self) -> str:
        """The command by which a person reaches the node."""
        node = self.node
        words = ["ssh", *ssh_flags(J=node.jump, p=node.port, i=node.identity_file), node.destination]
        return " ".join(map(quote, words))

    def make_error(self, what: str, said: str) -> NexusError:
        """The error with the words of ssh, or of a nexus there."""
        said, _, advice = said.partition("\nhint: ")
        lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(SSH_NOISE)]
        last = format_line("; ".join(lines[-3:]), 300) or "the line was cut"
        hint = next((hint for words, hint in SSH_HINTS if words in said), "try it by hand: {ssh}").format(
            host=self.node.host, ssh=self.by_hand,
            copy=self.by_hand.replace("ssh ", "ssh-copy-id ", 1).replace(" -J ", " -o ProxyJump="))
        return NexusError("unavailable", f"{what} {self.node.name}: {last}",
                          f"{format_line(advice.strip(), 300)}; {hint}" if advice else hint)

    def run(self, what: str, command: str, stdin: str = "") -> str:
        """The output of a command there.  Raises: unavailable, with ssh's words; not_found, when the command fails."""
        done = run(self.list_words(command), SSH_CALL_TIMEOUT_S, self.environ, stdin=stdin, is_apart=True,
                   most_bytes=MAX_SAID_BYTES, purpose=f"ssh to {self.node.name}",
                   hint=f"try it by hand: {self.by_hand}",
                   install=INSTALL_SSH)
        if done.exit_code:
            error = self.make_error(what, done.errors or done.output or f"exit code {done.exit_code}")
            raise NexusError("unavailable" if done.exit_code == 255 else "not_found", error.message, error.hint)
        return done.output

    def list_words(self, *command: str, is_tty: bool = False) -> list[str]:
        options = [*self.list_options(), "-oClearAllForwardings=yes", "-tt" if is_tty else "-T"]
        return ["ssh", *options, self.node.destination, *command]


def describe_bad_node(name: str, error: object) -> NexusError:
    words = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return NexusError("unavailable", f"{name} answers what no nexus does: {format_line(words, 200)}",
                      hint=f"see what is wrong there, or give it up: nexus node remove {name} --force")

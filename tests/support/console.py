"""A user at the command line: a NEXUS_HOME of his own with mock GPUs and a free port, and terminals to type into.

    with Home() as home:
        job_id = home.main("add", "true").id        # in this process; home.run() in one of its own
        with home.terminal("attach", job_id) as terminal:
            terminal.wait_for("text")
            terminal.type("\x01d")
"""

import contextlib
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import forks
import live
from live import COMMAND, PATIENCE_S

import nexus

SCRIPT = os.path.abspath(nexus.__file__)


class Stream(io.StringIO):
    """A stream as main() takes it: text, with a buffer of bytes below."""

    def __init__(self):
        super().__init__()
        self.pieces = []
        self.buffer = self

    def write(self, piece):
        self.pieces.append(piece if isinstance(piece, bytes) else piece.encode("utf-8", "backslashreplace"))
        return len(piece)

    @property
    def bytes(self):
        return b"".join(self.pieces)

    @property
    def text(self):
        return self.bytes.decode("utf-8", "replace")


class Done:
    """What a command line ended with."""

    def __init__(self, code, out, err):
        self.code, self.bytes, self.err_bytes = code, out, err
        self.out, self.err = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    def __repr__(self):
        return f"exit {self.code}\n--- stdout\n{self.out}--- stderr\n{self.err}"

    @property
    def id(self):
        assert self.code == 0 and re.fullmatch(r"[A-Za-z]{3,4}\n", self.out), self
        return self.out.strip()

    @property
    def json(self):
        assert self.code == 0, self
        return json.loads(self.out)


def call_main(*argv, **environ):
    """The command line in this process, where no service can be."""
    out, err = Stream(), Stream()
    code = nexus.main(argv, {"NEXUS_HOME": "/dev/null/nexus", **environ}, out, err)
    return Done(code, out.bytes, err.bytes)


class Home(live.Box):
    """A box, and whoever works in it at the command line; the service is started by the first command that needs it.

    `is_quick`: it runs already, without a supervisor and without screen.
    """

    def __init__(self, is_quick=False, **options):
        options.setdefault("launcher", "direct" if is_quick else "screen")
        super().__init__(environ={"TERM": "xterm-256color"}, is_starting=is_quick, is_supervised=not is_quick, **options)
        self.top, self.path = str(self.folder), str(self.home)

    def file(self, *names):
        return self.home.joinpath(*names)

    def main(self, *argv, **environ):
        """The command line in this process."""
        out, err = Stream(), Stream()
        code = nexus.main(argv, self.with_changes(environ), out, err)
        return Done(code, out.bytes, err.bytes)

    def with_changes(self, changes):
        return {name: text for name, text in {**self.environ, **changes}.items() if text is not None}

    def run(self, *argv, stdin=b"", cwd=None, script=COMMAND, python=(sys.executable,), timeout=PATIENCE_S, **environ):
        """The command line in a process of its own."""
        environ, cwd = self.with_changes(environ), cwd or self.top
        if (script, python) == (COMMAND, (sys.executable,)) and forks.can_run(environ):
            done = forks.run(argv, environ, cwd, stdin, timeout)
        else:
            done = subprocess.run([*python, script, *argv], input=stdin, capture_output=True, timeout=timeout, cwd=cwd, env=environ,
                                  start_new_session=True)
        return Done(done.returncode, done.stdout, done.stderr)

    def popen(self, *argv, cwd=None, **environ):
        """A command that goes on beside the test."""
        return forks.Process(argv, self.with_changes(environ), cwd or self.top)

    def terminal(self, *argv, columns=100, rows=30, **environ):
        return Terminal([sys.executable, COMMAND, *argv], self.with_changes(environ), columns, rows)

    def client(self, **environ):
        return nexus.Client.find(self.with_changes(environ))

    def tmux(self, *argv, inside=(), **environ):
        return Tmux([*inside, sys.executable, COMMAND, *argv], self.with_changes(environ), self.folder)

    def job(self, job_id):
        return self.main("show", job_id, "--json").json

    wait_for, wait_for_start = live.Box.wait, live.Box.wait_started

    @property
    def service(self):
        """What service.json says."""
        return json.loads(self.file("service.json").read_text())

    def processes(self):
        """Whatever carries this home in its environment or its arguments."""
        return live.find_processes(f"{self.folder}/")


def add(home, command="true", *options):
    """The id of a job without a GPU."""
    return home.main("add", "--gpus", "0", *options, command).id


def add_and_wait(home, command="true", *options):
    job_id = add(home, command, *options)
    home.main("wait", job_id)
    return job_id


class Terminal:
    """A program at a terminal of its own; nexus is a fork there."""

    def __init__(self, argv, environ, columns=100, rows=30):
        import fcntl
        import struct
        import termios
        self.side, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

        def take_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        if argv[:2] == [sys.executable, COMMAND] and forks.can_run(environ):
            self.process = forks.Process(argv[2:], environ, os.getcwd(), other)
        else:
            self.process = subprocess.Popen(argv, stdin=other, stdout=other, stderr=other, env=environ, preexec_fn=take_terminal)
        os.close(other)
        self.shown = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.side)

    def read(self, timeout_s=0.05):
        poll = select.poll()            # select() takes no descriptor above 1023
        poll.register(self.side, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            try:
                piece = os.read(self.side, 65536)
            except OSError:             # the other side is closed
                piece = b""
            self.shown += piece
            return piece
        return None

    def wait_for(self, pattern, patience_s=PATIENCE_S):
        """Read until it shows; return the match and forget what came before its end."""
        give_up_at = time.monotonic() + patience_s
        pattern = pattern if isinstance(pattern, bytes) else re.escape(pattern.encode())
        while True:
            match = re.search(pattern, self.shown)
            if match:
                self.shown = self.shown[match.end():]
                return match
            assert self.read() != b"" and time.monotonic() < give_up_at, f"{pattern!r} did not show: {self.shown!r}"

    def type(self, text):
        os.write(self.side, text.encode())

    def end(self):
        """Read until the program ends: (its exit code, all that was not read before)."""
        give_up_at = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < give_up_at, f"it does not end: {self.shown!r}"
        while self.read():
            pass
        return self.process.returncode, self.shown.decode("utf-8", "replace").replace("\r\n", "\n")


class Tmux:
    """A program in tmux: a terminal whose picture can be read, as a person at it sees it.  Then its exit code is shown."""

    NUMBERS = itertools.count()
    TELLING = 'stty -echo; trap : INT; "$@"; echo "ended with $?"; exec sleep 600'

    def __init__(self, argv, environ, folder, columns=100, rows=30):
        self.server, self.environ = ["tmux", "-S", f"{folder}/tmux-{next(self.NUMBERS)}", "-f", "/dev/null"], environ
        self.call("new-session", "-d", "-x", str(columns), "-y", str(rows), "sh", "-c", self.TELLING, "sh", *argv)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run([*self.server, "kill-server"], env=self.environ, capture_output=True)

    def call(self, *words):
        return subprocess.run([*self.server, *words], env=self.environ, capture_output=True, text=True, check=True).stdout

    def picture(self):
        return self.call("capture-pane", "-p")

    def wait_for(self, pattern):
        """Until it is in the picture; the match."""
        return live.until(lambda: re.search(pattern, self.picture(), re.MULTILINE), lambda: f"{pattern!r} in {self.picture()}")

    def type(self, text):
        """Its characters, then Enter."""
        self.call("send-keys", "-l", text)
        self.press("Enter")

    def press(self, *keys):
        """Keys by tmux's names, like C-c."""
        self.call("send-keys", *keys)

    def resize(self, columns, rows):
        self.call("resize-window", "-x", str(columns), "-y", str(rows))

"""A user at the command line: a NEXUS_HOME of his own with mock GPUs and a free port, and terminals to type into."""

import contextlib
import io
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from live import COMMAND, PATIENCE_S, find_service, free_port, is_alive, keep_compiled, until

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


class Home:
    """A NEXUS_HOME and whoever works in it.  Use it in a `with`: all that was started in it ends with it."""

    def __init__(self, config="", gpus=2, name="home", host=None):
        self.top = tempfile.mkdtemp(prefix="nx", dir="/tmp")
        self.port = free_port()
        self.path = os.path.join(self.top, name)
        os.makedirs(self.path, mode=0o700)
        keep_compiled(self.path)
        os.makedirs(os.path.join(self.top, "screens"), mode=0o700)
        self.write_config(config, host)
        self.environ = {
            "PATH": os.environ["PATH"], "HOME": self.top, "TERM": "xterm-256color", "TZ": "UTC", "LANG": "C.UTF-8",
            "NEXUS_HOME": self.path, "NEXUS_MOCK_GPUS": str(gpus), "SCREENDIR": os.path.join(self.top, "screens")}

    def write_config(self, config="", host=None):
        """`config` is of lines like `jobs.cpu_slots = 1`."""
        sections = {"service": [f"port = {self.port}"] + ([f'host = "{host}"'] if host else [])}
        for line in filter(str.strip, config.splitlines()):
            section, _, setting = line.strip().partition(".")
            sections.setdefault(section, []).append(setting)
        text = "\n".join("\n".join([f"[{section}]", *settings]) for section, settings in sections.items())
        self.file("config.toml").write_text(text + "\n")

    def file(self, *names):
        return pathlib.Path(self.path, *names)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def main(self, *argv, **environ):
        """The command line in this process."""
        out, err = Stream(), Stream()
        code = nexus.main(argv, self.with_changes(environ), out, err)
        return Done(code, out.bytes, err.bytes)

    def with_changes(self, changes):
        return {name: text for name, text in {**self.environ, **changes}.items() if text is not None}

    def run(self, *argv, stdin=b"", cwd=None, script=COMMAND, python=(sys.executable,), timeout=PATIENCE_S, **environ):
        """The command line in a process of its own."""
        done = subprocess.run([*python, script, *argv], input=stdin, capture_output=True, timeout=timeout, cwd=cwd or self.top,
                              env=self.with_changes(environ), start_new_session=True)
        return Done(done.returncode, done.stdout, done.stderr)

    def popen(self, *argv, cwd=None, **environ):
        return subprocess.Popen([sys.executable, COMMAND, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, cwd=cwd or self.top, env=self.with_changes(environ), start_new_session=True)

    def terminal(self, *argv, columns=100, rows=30, **environ):
        return Terminal([sys.executable, COMMAND, *argv], self.with_changes(environ), columns, rows)

    def client(self, **environ):
        return nexus.Client.find(self.with_changes(environ))

    def job(self, job_id):
        return self.main("show", job_id, "--json").json

    def wait_for(self, job_id, status):
        return until(lambda: (job := self.job(job_id))["status"] == status and job, f"{job_id} {status}")

    def wait_for_start(self, job_id):
        """Until its runner has said that it runs: `running` alone is only what the service is about to do."""
        return until(lambda: (job := self.job(job_id))["pid"] and job, f"the start of {job_id}")

    @property
    def service(self):
        """What service.json says."""
        return json.loads(self.file("service.json").read_text())

    def kill_service(self):
        """SIGKILL the one that runs; its supervisor starts another."""
        pid = until(lambda: find_service(self.path), "a service to kill")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid), "the service's death")
        return pid

    def processes(self):
        """Whatever carries this home in its environment or its arguments."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                told = pathlib.Path("/proc", pid, "cmdline").read_bytes() + b"\0" + pathlib.Path("/proc", pid, "environ").read_bytes()
                if int(pid) != os.getpid() and self.top.encode() + b"/" in told:
                    found.append(int(pid))
        return found

    def end(self):
        for _ in range(200):                # what is killed may have started something in the meantime
            pids = self.processes()
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.01)
        shutil.rmtree(self.top, ignore_errors=True)


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, argv, environ, columns=100, rows=30):
        import fcntl
        import struct
        import termios
        self.side, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

        def take_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

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

"""Runs nexus in a fork of a process that has loaded it, for a tenth of what a new Python costs.

    done = forks.run(["queue", "--json"], environ)              # a CompletedProcess with bytes, as subprocess.run() has it
    pid = forks.start(["serve"], environ, "service.log")        # goes on by itself
    process = forks.Process(["logs", "-f"], environ)            # in part a subprocess.Popen with pipes, or at a terminal

/proc shows the arguments and variables of a fork as if it had been executed.  What depends on how Python itself starts has a Python of
its own: `can_run(environ)` is False with variables like PYTHONPATH, or with another locale.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor

SUPPORT = pathlib.Path(__file__).resolve().parent
COMMAND = SUPPORT / "nexus"
LOCALE = {"LANG": "C.UTF-8"}


class Server:
    """The process that forks, for one process of tests."""

    def __init__(self):
        self.line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # What is written over later: a fork has room here for arguments and variables of its own
        with other:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), "." * 8000], pass_fds=[other.fileno()], start_new_session=True,
                cwd="/", stdin=subprocess.DEVNULL, env={"PATH": os.environ["PATH"], **LOCALE, "ROOM": "." * 30000})

    def fork(self, argv, environ, cwd, streams, change=""):
        """(pid, the descriptor that tells its exit status when it has ended)."""
        request, (reader, writer) = os.memfd_create("request"), os.pipe()
        try:
            os.write(request, json.dumps([argv, environ, cwd, change]).encode("utf-8", "surrogateescape"))
            socket.send_fds(self.line, [b"fork"], [request, writer, *streams])
        finally:
            os.close(request)
            os.close(writer)
        pid = os.read(reader, 8)
        assert pid, "the process that forks nexus has ended"
        return int(pid), reader


def find_server(servers={}, lock=threading.Lock()):  # noqa: B006, B008
    with lock:
        if os.getpid() not in servers:
            servers[os.getpid()] = Server()
        return servers[os.getpid()]


def can_run(environ):
    """Whether a fork has what a new Python would have made of these variables."""
    return ({name: text for name, text in environ.items() if name.startswith(("LANG", "LC_"))} == LOCALE
            and not any(name.startswith(("PYTHON", "LD_")) for name in environ))


def run(argv, environ, cwd="/", stdin=b"", timeout_s=60.0):
    """A command of nexus, to its end."""
    given, out, err = streams = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    try:
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)
        pid, reader = find_server().fork(list(map(str, argv)), environ, str(cwd), streams)
        try:
            if not select.select([reader], [], [], timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(argv, timeout_s)
            code = os.waitstatus_to_exitcode(int(os.read(reader, 8)))
        finally:
            os.close(reader)
        return subprocess.CompletedProcess(argv, code, *(os.pread(each, os.fstat(each).st_size, 0) for each in (out, err)))
    finally:
        for each in streams:
            os.close(each)


def start(argv, environ, log, change="", cwd="/"):
    """A command that goes on; what it says is added to the file `log`.  Its pid.  `change`: Python that changes nexus before."""
    with open(os.devnull, "r+b") as nothing, open(log, "ab") as told:
        pid, reader = find_server().fork(list(map(str, argv)), environ, str(cwd), [nothing.fileno(), nothing.fileno(), told.fileno()],
                                       change)
        os.close(reader)
        return pid


class Process:
    """A command that goes on beside the test.  `terminal`: the descriptor of one that shall be its own; otherwise it has pipes."""

    def __init__(self, argv, environ, cwd="/", terminal=None):
        self.returncode, self.argv = None, list(map(str, argv))
        if terminal is not None:
            self.pid, self.reader = find_server().fork(self.argv, environ, str(cwd), [terminal] * 3)
            return
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull, "rb") as nothing:
            self.pid, self.reader = find_server().fork(self.argv, environ, str(cwd), [nothing.fileno(), out_end, err_end])
        os.close(out_end)
        os.close(err_end)
        self.stdout, self.stderr = os.fdopen(out, "rb"), os.fdopen(err, "rb")

    def poll(self, timeout_s=0.0):
        if self.returncode is None and select.select([self.reader], [], [], timeout_s)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self.reader, 8)))
            os.close(self.reader)
        return self.returncode

    def wait(self, timeout=None):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.argv, timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """What it still prints until it has ended."""
        with ThreadPoolExecutor() as pool:
            found = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                os.kill(self.pid, signal.SIGKILL)           # else the pool would wait on
                raise
            return tuple(each.result() for each in found)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


# In the process that forks

def serve(line):
    """Fork for each request.  Returns only in a fork: what it shall change before it runs."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    statuses = {}                                       # {pid: where its exit status is told}
    while True:
        for ready in select.select([line, woken], [], [])[0]:
            if ready is woken:
                os.read(woken, 4096)
                tell_ends(statuses)
                continue
            word, descriptors, _, _ = socket.recv_fds(line, 16, 8)
            if not word:
                os._exit(0)                             # the tests have ended
            request, writer, *streams = descriptors
            pid = os.fork()
            if not pid:
                line.detach()
                return become(request, streams)
            statuses[pid] = writer
            with contextlib.suppress(OSError):
                os.write(writer, f"{pid:<8}".encode())
            for each in (request, *streams):
                os.close(each)


def tell_ends(statuses):
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            writer = statuses.pop(pid)
            with contextlib.suppress(OSError):          # nobody waits
                os.write(writer, f"{status:<8}".encode())
            os.close(writer)


def become(request, streams):
    """In a fork: take over the arguments, variables, folder and streams of the request; returns its change."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    argv, environ, cwd, change = json.loads(os.pread(request, os.fstat(request).st_size, 0).decode("utf-8", "surrogateescape"))
    for number, each in enumerate(streams):
        os.dup2(each, number)
    os.closerange(3, 1024)
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = os.fdopen(0, errors="surrogateescape", closefd=False)
    sys.stdout = os.fdopen(1, "w", errors="surrogateescape", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    sys.argv = [str(COMMAND), *argv]
    # Fields 48 to 51 of stat are where the kernel reads what cmdline and environ show
    with open("/proc/self/stat") as file:
        places = list(map(int, file.read().rpartition(") ")[2].split()[45:49]))
    write_over(places[0], places[1], [sys.executable, *sys.argv])
    write_over(places[2], places[3], [f"{name}={text}" for name, text in sorted(environ.items(), key=lambda row: row[0] != "NEXUS_HOME")])
    return change


def write_over(first, end, words):
    text = os.fsencode("".join(f"{word}\0" for word in words))[:end - first - 1]
    ctypes.memset(first, 0, end - first)
    ctypes.memmove(first, text, len(text))


if __name__ == "__main__":
    sys.path.insert(0, str(SUPPORT.parent.parent))
    import ssl  # noqa: F401

    import nexus

    nexus.import_modules()
    nexus.import_psutil()
    for name in ("argparse", "http.client", "random", "tomllib" if sys.version_info >= (3, 11) else "tomli", "typing"):
        __import__(name)
    gc.collect()
    gc.freeze()
    exec(serve(socket.socket(fileno=int(sys.argv[1]))), {"nexus": nexus, "sys": sys})
    code = nexus.entry()
    threading._shutdown()
    os._exit(code)                              # without looking through all that it has loaded, as Python does at its end

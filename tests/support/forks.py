"""Runs nexus in a fork of a process that has loaded it, for a tenth of what a new Python costs.

    done = forks.run(["queue", "--json"], environ)              # a CompletedProcess with bytes, as subprocess.run() has it
    pid = forks.start(["serve"], environ, "service.log")        # goes on by itself
    process = forks.Process(["logs", "-f"], environ)            # in part a subprocess.Popen with pipes, or at a terminal

/proc shows the arguments and variables of a fork as if it had been executed.  What depends on how Python itself starts has a Python of
its own: `can_run(environ)` is False with variables like PYTHONPATH, or with another locale.

A Place is another user's, or another machine's.  The agents of nodes are forks, too: what runs LAUNCH there becomes one (listen()).
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

SUPPORT = pathlib.Path(__file__).resolve().parent
COMMAND = SUPPORT / "nexus"
libc = ctypes.CDLL(None, use_errno=True)
LOCALE = {"LANG": "C.UTF-8"}
F_SETSIG = 10                                           # of fcntl.h, which Python lacks
SPACES = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "mnt": 0x00020000}   # for setns(); files last
# What a stand-in for Python does to be a fork: it hands over its streams, and ends as that does.
LAUNCH = """\
import _socket, os
line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
line.connect("{path}")
line.sendmsg([b"fork"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(n.to_bytes(4, "{order}") for n in (0, 1, 2)))])
nothing = os.open(os.devnull, os.O_RDWR)
for n in (0, 1, 2):
    os.dup2(nothing, n)
code = line.recv(8)
os._exit(int(code)) if code else os.kill(os.getpid(), 9)
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """Whose a fork is and where: a user, its python and nexus.py, and the process whose namespaces it enters, if any."""

    uid: int
    gid: int
    python: str
    program: str
    library: str                                        # of that Python
    pid: "int | None" = None


class Server:
    """The process that forks, for one process of tests."""

    def __init__(self):
        self.line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # What is written over later: a fork has room here for arguments and variables of its own
        with other:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), "." * 8000], pass_fds=[other.fileno()], start_new_session=True,
                cwd="/", stdin=subprocess.DEVNULL, env={"PATH": os.environ["PATH"], **LOCALE, "ROOM": "." * 30000})

    def fork(self, argv, environ, cwd, streams, change="", place=None):
        """(pid, the descriptor that tells its exit status when it has ended)."""
        request, (reader, writer) = os.memfd_create("request"), os.pipe()
        try:
            told = [argv, environ, cwd, change, place and dataclasses.asdict(place)]
            os.write(request, json.dumps(told).encode("utf-8", "surrogateescape"))
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


def can_run(environ, place=None):
    """Whether a fork has what a new Python would have made of these variables."""
    known = {**LOCALE, "PYTHONPATH": os.path.dirname(place.program)} if place else LOCALE
    return LOCALE.items() <= environ.items() and all(
        text == known.get(name) for name, text in environ.items()
        if name.startswith(("LANG", "LC_", "PYTHON", "LD_")) and name != "PYTHONWARNINGS")


def run(argv, environ, cwd="/", stdin=b"", timeout_s=60.0, place=None):
    """A command of nexus, to its end."""
    given, out, err = streams = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    try:
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)
        pid, reader = find_server().fork(list(map(str, argv)), environ, str(cwd), streams, place=place)
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


def listen(path):
    """From now on what a Python is given, as `-c CODE PROGRAM ARGUMENTS`, runs in a fork, in the namespaces of that Python; the code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o666)
        listener.listen(100)
        socket.send_fds(find_server().line, [b"listen"], [listener.fileno()])
    return LAUNCH.format(path=path, order=sys.byteorder)


# In the process that forks

def serve(line):
    """Fork for each request.  Returns only in a fork: what it shall change before it runs, and where it tells how it ended."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    statuses, listeners = {}, []                        # {pid: where its exit status is told}
    while True:
        for ready in select.select([line, woken, *listeners], [], [])[0]:
            if ready is woken:
                os.read(woken, 4096)
                tell_ends(statuses)
                continue
            if ready is not line:
                teller = launch(ready)
                if teller:
                    forget(line, *listeners)
                    return "", teller
                continue
            word, descriptors, _, _ = socket.recv_fds(line, 16, 8)
            if not word:
                os._exit(0)                             # the tests have ended
            if word == b"listen":
                listeners.append(socket.socket(fileno=descriptors[0]))
                continue
            request, writer, *streams = descriptors
            pid = os.fork()
            if not pid:
                forget(line, *listeners)
                return become(request, streams), None
            statuses[pid] = writer
            with contextlib.suppress(OSError):
                os.write(writer, f"{pid:<8}".encode())
            for each in (request, *streams):
                os.close(each)


def forget(*sockets):
    """In a fork, which closes all that it does not need, and does not say of these that they were left open."""
    for one in sockets:
        one.detach()


def tell_ends(statuses):
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            writer = statuses.pop(pid, None)
            if writer is None:                          # the first of the two forks of launch()
                continue
            with contextlib.suppress(OSError):          # nobody waits
                os.write(writer, f"{status:<8}".encode())
            os.close(writer)


def become(request, streams):
    """In a fork: take over the arguments, variables, folder and streams of the request; returns its change."""
    argv, environ, cwd, change, place = json.loads(os.pread(request, os.fstat(request).st_size, 0).decode("utf-8", "surrogateescape"))
    os.setsid()
    take_over([place["python"] if place else sys.executable, str(COMMAND), *argv], environ, streams)
    if place:
        move(place.pop("pid"))
        settle(**place)
    os.chdir(cwd)
    return change


def launch(listener):
    """Have what runs LAUNCH be a fork of its own namespaces; in that fork, where its exit code is told."""
    line, _ = listener.accept()
    pid, uid, gid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    _, streams, _, _ = socket.recv_fds(line, 16, 3)
    if os.fork():
        line.close()
        for each in streams:
            os.close(each)
        return None
    facts = dict(row.split(":\t", 1) for row in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    words, variables = (pathlib.Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
                        for name in ("cmdline", "environ"))
    cwd, teller = os.readlink(f"/proc/{pid}/cwd"), line.detach()
    words[1:] = words[words.index("-c") + 2:]
    take_over(words, dict(row.split("=", 1) for row in variables), streams, teller)
    move(pid)
    for _ in range(2):                                  # the first fork is in the namespace of pids, the second one's parent, too
        if os.fork():
            os._exit(0)
    os.setsid()
    settle(uid, gid, words[0], words[1], groups=list(map(int, facts["Groups"].split())), mask=int(facts["Umask"], 8))
    os.chdir(cwd)
    # Whoever kills what runs LAUNCH means the fork, too: the end of the line is SIGKILL
    fcntl.fcntl(teller, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(teller, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(teller, fcntl.F_SETFL, os.O_ASYNC)
    return teller


def take_over(words, environ, streams, kept=3):
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, each in enumerate(streams):
        os.dup2(each, number)
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = os.fdopen(0, errors="surrogateescape", closefd=False)
    sys.stdout = os.fdopen(1, "w", errors="surrogateescape", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.closerange(3, kept)
    os.closerange(kept + (kept > 3), 1024)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    if "PYTHONWARNINGS" in environ:
        warnings.simplefilter(environ["PYTHONWARNINGS"])
    sys.executable, sys.argv = words[0], words[1:]
    # Fields 48 to 51 of stat are where the kernel reads what cmdline and environ show
    with open("/proc/self/stat") as file:
        places = list(map(int, file.read().rpartition(") ")[2].split()[45:49]))
    write_over(places[0], places[1], words)
    write_over(places[2], places[3], [f"{name}={text}" for name, text in sorted(environ.items(), key=lambda row: row[0] != "NEXUS_HOME")])


def move(pid):
    """Enter the namespaces of a process; only what is forked then is in that of its pids."""
    handles = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in SPACES} if pid else {}
    for name, handle in handles.items():
        if libc.setns(handle, SPACES[name]):
            raise OSError(ctypes.get_errno(), f"setns: {name}")
        os.close(handle)


def settle(uid, gid, python, program, library="", groups=(), mask=0o022):
    """Be a user, with a Python and a nexus.py of its own.  `library`: where that Python is, if it has no other packages."""
    import psutil
    os.umask(mask)
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    libc.prctl(4, 1, 0, 0, 0)                           # PR_SET_DUMPABLE: /proc shows it as its user's
    nexus.__file__ = program
    nexus.__spec__ = importlib.machinery.ModuleSpec("nexus", nexus.__loader__, origin=program)
    nexus.__spec__.cached = importlib.util.cache_from_source(program)
    own = f"{sys.base_prefix}/lib/"
    paths = [f"{library}/{path[len(own):]}" for path in sys.path if path.startswith(own)] if library else sys.path
    sys.path[:] = [os.path.dirname(program), *paths]
    found = importlib.machinery.PathFinder.find_spec("psutil", sys.path)
    if not found or found.origin != psutil.__file__:    # there is none, or another one
        for name in [name for name in sys.modules if name.partition(".")[0] == "psutil"]:
            del sys.modules[name]


def write_over(first, end, words):
    text = os.fsencode("".join(f"{word}\0" for word in words))[:end - first - 1]
    ctypes.memset(first, 0, end - first)
    ctypes.memmove(first, text, len(text))


if __name__ == "__main__":
    sys.path.insert(0, str(SUPPORT.parent.parent))
    import encodings.idna  # noqa: F401
    import ssl  # noqa: F401

    import nexus

    nexus.import_modules()
    nexus.import_psutil()
    for name in ("argparse", "http.client", "random", "tomllib" if sys.version_info >= (3, 11) else "tomli", "typing"):
        __import__(name)
    gc.collect()
    gc.freeze()
    change, teller = serve(socket.socket(fileno=int(sys.argv[1])))
    exec(change, {"nexus": nexus, "sys": sys})
    code = nexus.entry()
    threading._shutdown()
    if "PYTHONWARNINGS" in os.environ:
        gc.collect()                            # it warns of what is still open
    if teller:
        os.write(teller, f"{code:<8}".encode())
    os._exit(code)                              # without looking through all that it has loaded, as Python does at its end

"""A real service in a home of its own: start it, call it, kill it, and leave nothing of it behind.

    with live.Box(gpus=2) as box:                       # made-up GPUs; a list or dict: the fake nvidia-smi shows them;
                                                        # None: this machine's own
        job = box.wait(box.add("exit 3"), "failed")

Everything a box starts carries its folder's name in its environment or its arguments; close() finds it by that.
"""

import contextlib
import ctypes
import functools
import http.client
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import pwd
import py_compile
import random
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import forks

import nexus

SUPPORT = pathlib.Path(__file__).resolve().parent
NEXUS = SUPPORT.parents[1] / "nexus.py"
COMMAND = SUPPORT / "nexus"     # the same as an installed command, which starts in a third of the time
PATIENCE_S = 60.0                       # for what takes a second on an idle machine; the tests run four at once on two cores


def until(look, what="it", timeout_s=PATIENCE_S, interval_s=0.02):
    """Ask until the answer is true, and return it.  The longer it takes, the longer are the pauses: a tenth of that, at most 0.1 s."""
    began_at = time.monotonic()
    give_up_at = began_at + timeout_s
    while True:
        answer = look()
        if answer:
            return answer
        assert time.monotonic() < give_up_at, f"waited {timeout_s:g} s for {what() if callable(what) else what}"
        time.sleep(max(interval_s, min(0.1, (time.monotonic() - began_at) / 10)))


def need_root():
    assert os.geteuid() == 0, "this test makes users and mounts: run it as root (sudo tests/run ...)"


def blocks_of_ports():
    """Blocks of 64 ports for this process alone: whoever has a block has the abstract socket of its name for as long as he lives.

    They lie outside of the range of which outgoing connections take theirs.
    """
    firsts = list(range(10000, 32000, 64))
    random.SystemRandom().shuffle(firsts)
    marks = []
    for first in firsts:
        mark = socket.socket(socket.AF_UNIX)
        marks.append(mark)
        try:
            mark.bind(f"\0nexus-tests-{first}")
        except OSError:
            continue
        yield from range(first, first + 64)


PORTS = blocks_of_ports()


def free_port():
    """A port that nobody listens on, and that no other test is given: it stays free until it is used, however late."""
    for port in PORTS:
        with socket.socket() as probe, socket.socket(socket.AF_INET6) as other, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            other.bind(("::1", port))
            return port
    raise RuntimeError("no port from 10000 to 32000 is free")


def read(path):
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_bytes(path):
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return b""


def stat(pid):
    """[state, parent, group, session, ...] of a process; [] when there is none."""
    return read(f"/proc/{pid}/stat").rpartition(") ")[2].split()


def is_running(now):
    """Of what stat() says.  When only its main thread has ended, the others still have its files, also those that listen."""
    return bool(now) and (now[0] not in "ZX" or int(now[17]) > 1)


def is_alive(pid):
    return is_running(stat(pid))        # asked once: it may go at any moment


def all_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def find_processes(mark, files=("cmdline", "environ")):
    """The processes with these words in their arguments or environment."""
    mark = mark.encode()
    found = [pid for pid in all_pids() if pid != os.getpid()
             and any(mark in read_bytes(f"/proc/{pid}/{file}").replace(b"\0", b" ") for file in files)]
    return [pid for pid in found if is_alive(pid)]


def find_commands(mark):
    """Those with these words in their arguments."""
    return find_processes(mark, ["cmdline"])


def kill(*pids, number=signal.SIGKILL):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(mark):
    """Kill what has this mark, until nothing has."""
    until(lambda: kill(*find_processes(mark)) or not find_processes(mark), f"the end of all that has {mark}")


def read_service(home):
    """What service.json says; {} when there is none."""
    try:
        return json.loads(read(pathlib.Path(home, "service.json")) or "{}")
    except ValueError:
        return {}


def find_service(home):
    """The pid of the service that runs now; None when none does."""
    told = read_service(home)
    now = stat(told["pid"]) if told else []
    return told["pid"] if is_running(now) and int(now[19]) == told["started"] else None


def descendants(pid):
    parents = {other: int(now[1]) for other in all_pids() if (now := stat(other))}     # asked once, as above
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def seal(text):
    """A state.json or journal.jsonl whose text was changed, with the checksums that nexus would have write_aside."""
    def shorten(digits):
        return int(float(digits)) if float(digits).is_integer() else float(digits)

    def mend(body, left_out=()):
        plain = {name: fact for name, fact in body.items() if name != "crc" and name not in left_out}
        whole = json.loads(json.dumps(plain), parse_float=shorten)
        return {**body, "crc": zlib.crc32(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode())}

    if not text.startswith('{"version"'):
        return "".join(json.dumps(mend(json.loads(line)), separators=(",", ":")) + "\n" for line in text.splitlines())
    body = json.loads(text)
    tables = {name: {key: mend(row) for key, row in body[name].items()} for name in body["tables"]}
    return json.dumps({**mend(body, ["paused", "paused_gpus", *tables]), **tables})


def make_folder():
    """A folder of this process's; what processes that were killed have left of theirs goes first."""
    for owner in pathlib.Path("/tmp").glob("nx-*/owner"):
        pid, _, started = read(owner).partition(" ")
        with contextlib.suppress(FileNotFoundError):            # another worker is faster
            if started and stat(pid)[19:20] != [started] and os.geteuid() in (0, owner.stat().st_uid):
                remove_folder(owner.parent)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="nx-", dir="/tmp"))
    (folder / "owner.new").write_text(f"{os.getpid()} {stat(os.getpid())[19]}")
    (folder / "owner.new").rename(folder / "owner")
    return folder


def remove_folder(folder):
    """With the processes, mounts and users that go with it."""
    kill_all(f"{folder}/")
    for path in folder.glob("user-*"):
        subprocess.run(["userdel", path.name.partition("-")[2]], capture_output=True)
    for line in read("/proc/mounts").splitlines():
        if line.split()[1].startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", line.split()[1]], capture_output=True)
    if not [line for line in read("/proc/mounts").splitlines() if line.split()[1].startswith(f"{folder}/")]:
        shutil.rmtree(folder, ignore_errors=True)       # never the interpreter that is mounted there


def take_requests(handle, is_over):
    """Read the requests of a FUSE, and reply to the first one alone, which asks for its version.  Source: linux/fuse.h."""
    while not is_over.is_set():
        if select.select([handle], [], [], 0.02)[0]:
            request = os.read(handle, 2**20)
            code, number = struct.unpack_from("=IQ", request, 4)
            if code == 26:                              # FUSE_INIT
                reply = struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0)
                os.write(handle, struct.pack("=IiQ", 16 + len(reply), 0, number) + reply)


@contextlib.contextmanager
def hung_folder(path, is_taken=False):
    """A folder that answers nothing, as one of a server that is gone.  Afterwards it fails at once.

    It is a FUSE that nobody serves: SIGKILL ends who waits.  `is_taken`: its program takes each request, and no signal ends who waits.
    """
    need_root()
    if not os.path.exists("/dev/fuse"):
        import pytest
        pytest.skip("this kernel has no FUSE")
    system, handle = ctypes.CDLL(None, use_errno=True), os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={handle},rootmode=40000,user_id=0,group_id=0,allow_other"
        assert system.mount(b"hung", os.fsencode(path), b"fuse", 0, options.encode()) == 0, os.strerror(ctypes.get_errno())
        is_over = threading.Event()
        server = threading.Thread(target=take_requests, args=(handle, is_over))
        if is_taken:
            server.start()
        try:
            yield
        finally:
            is_over.set()
            if is_taken:
                server.join()
    finally:
        os.close(handle)
        system.umount2(os.fsencode(path), 2)            # MNT_DETACH


def clear_jobs(box):
    """Leave nothing of one test's jobs and pauses for the next one in the same box."""
    box.ask("POST", "/jobs/cancel", {"status": ["pending", "running"]})
    until(lambda: not box.ask("GET", "/jobs?status=pending,running"), "the end of all jobs")
    box.ask("POST", "/service/resume")
    box.ask("POST", "/jobs/clear", {"status": ["failed", "cancelled", "completed"]})
    for gpu in box.status()["gpu_status"]:
        if gpu["is_paused"]:
            box.ask("POST", f"/gpus/{gpu['place']}/resume")
    assert box.ask("GET", "/jobs") == box.ask("GET", "/groups") == []


LISTEN = """
import os, socket, sys
host = sys.argv[1]
os.setuid(int(sys.argv[3]))
server = socket.socket(socket.AF_UNIX if "/" in host else socket.AF_INET6 if ":" in host else socket.AF_INET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if ":" in host: server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
server.bind(host if "/" in host else (host, int(sys.argv[2])))
if "/" in host: os.chmod(host, 0o777)
server.listen(50)
print("listens", flush=True)
while True:
    line, _ = server.accept()
    line.settimeout(5)
    try: piece = line.recv(65536)
    except OSError: piece = b""
    if piece: print("received", piece, flush=True)
    line.close()
"""


@contextlib.contextmanager
def listener(port, uid=65534, host="127.0.0.1"):
    """A program of that user's on the port, or at the path `host`; yields what it says: that it listens, and what it received."""
    need_root()
    with tempfile.TemporaryFile() as out, subprocess.Popen(
            [sys.executable, "-c", LISTEN, host, str(port), str(uid)], stdout=out, stderr=subprocess.DEVNULL) as process:
        def heard():
            return os.pread(out.fileno(), 99999, 0).decode()
        try:
            until(lambda: heard() or process.poll() is not None, "the listener")
            yield heard
        finally:
            process.kill()


class User:
    """A user of this machine, made for a test, with an interpreter and a nexus.py that any user may run."""

    def __init__(self, tools):
        need_root()
        self.name = f"nx{random.SystemRandom().getrandbits(40):010x}"
        # Another test may have the lock of /etc/passwd
        until(lambda: subprocess.run(["useradd", "-M", "-N", "-d", "/", self.name], capture_output=True).returncode == 0, "useradd")
        self.uid = pwd.getpwnam(self.name).pw_uid
        self.folder, self.python, self.library = tools.folder, tools.python, tools.library
        (tools.folder / f"user-{self.name}").touch()

    def become(self):
        return ["setpriv", f"--reuid={self.uid}", "--regid=65534", "--clear-groups", "--inh-caps=-all",
                "env", f"LD_LIBRARY_PATH={self.library}"]       # where the interpreter is linked to a library of its own

    def place(self):
        return forks.Place(self.uid, 65534, self.python, f"{self.folder}/{NEXUS.name}", self.library)

    def remove(self):
        """The user, and all its processes."""
        until(lambda: kill(*(found := self.processes())) or not found, f"the end of {self.name}'s processes")
        until(lambda: subprocess.run(["userdel", self.name], capture_output=True).returncode in (0, 6), "userdel")

    def processes(self):
        return [pid for pid in all_pids() if is_alive(pid) and find_uid(pid) == self.uid]


def find_uid(pid):
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return None


def is_ours(program):
    """Whether a copy of nexus.py is as it was made."""
    return len({(told.st_size, told.st_mtime_ns) for told in map(os.stat, (program, NEXUS))}) == 1


class Tools:
    """What users need and may not read where it lies: the interpreter (mounted anew), nexus.py, the fake nvidia-smi."""

    def __init__(self):
        need_root()
        self.folder = make_folder()
        self.folder.chmod(0o755)
        for path in (NEXUS, COMMAND, SUPPORT / "fake_nvidia_smi"):
            shutil.copy2(path, self.folder / path.name)         # as old as it is, so that what is compiled of it fits
            (self.folder / path.name).chmod(0o755)
        compiled = pathlib.Path(importlib.util.cache_from_source(str(self.folder / NEXUS.name)))
        compiled.parent.mkdir()
        if os.path.exists(importlib.util.cache_from_source(str(NEXUS))):
            shutil.copy(importlib.util.cache_from_source(str(NEXUS)), compiled)
        else:
            py_compile.compile(str(self.folder / NEXUS.name))
        if sys.version_info < (3, 11):                  # found by PYTHONPATH, as a user's own packages are
            import tomli
            shutil.copytree(os.path.dirname(tomli.__file__), self.folder / "tomli")
        for name, mode in (("shared", 0o1777), ("open", 0o777)):
            (self.folder / name).mkdir()
            (self.folder / name).chmod(mode)
        base = pathlib.Path(sys.base_prefix)
        self.mount = self.folder / "python"
        self.mount.mkdir()
        subprocess.run(["mount", "--bind", base, self.mount], check=True)
        # Where a run was killed, whoever removes what it left must not remove the interpreter.
        subprocess.run(["mount", "-o", "remount,bind,ro", self.mount], check=True)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.python, self.library = str(self.mount / "bin" / version), str(self.mount / "lib")

    def close(self):
        remove_folder(self.folder)


def make_certificate(folder):
    """(certificate, key) for localhost, two files made by openssl."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert],
                   check=True, capture_output=True)
    return cert, key


SMI = """\
#!/bin/sh
export FAKE_NVIDIA_SMI={folder}/state.json FAKE_NVIDIA_SMI_LOG={folder}/smi.log
command . {folder}/answers 2> /dev/null         # there may be none
exec {python} -I -S {tests}/fake_nvidia_smi "$@"
"""
SMI_ANSWERS = """\
case "$*" in
'--query-gpu={fields} --format=csv,noheader,nounits') answer={gpus} ;;
'--query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits') answer={apps} ;;
*) return 0
esac
echo '{{"pid": '$$', "argv": ["'$1'", "'$2'"]}}' >> $FAKE_NVIDIA_SMI_LOG
printf %s "$answer"
exit
"""


def make_nvidia_smi(bin_folder, folder, python, tests):
    """The fake one: it shows the folder's state.json, and writes its runs down in smi.log.

    What is asked again and again a shell answers, for a tenth of what a Python costs, where nothing is wrong.
    """
    path = bin_folder / "nvidia-smi"
    path.write_text(SMI.format(folder=folder, python=python, tests=tests))
    path.chmod(0o755)
    (folder / "smi.log").touch()
    (folder / "smi.log").chmod(0o666)


@functools.cache
def load_fake_smi():
    loader = importlib.machinery.SourceFileLoader("fake_nvidia_smi", str(SUPPORT / "fake_nvidia_smi"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def show_gpus(folder, gpus, **state):
    """What it shows from now on: a list of GPUs, or the whole state as a dict."""
    state = {**gpus, **state} if isinstance(gpus, dict) else {"gpus": gpus, **state}
    (folder / "answers").unlink(missing_ok=True)
    put(folder / "state.json", json.dumps(state))
    if answers := load_fake_smi().find_answers(state, nexus.GPU_FIELDS):
        told, running = map(shlex.quote, answers)
        put(folder / "answers", SMI_ANSWERS.format(fields=",".join(nexus.GPU_FIELDS), gpus=told, apps=running))


def put(path, text):
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(text)
    aside.chmod(0o644)
    aside.replace(path)


class Lost(Exception):
    """The connection failed: it may have been done or not."""


def ask_service(line, method, path, body, headers):
    """(HTTP status, JSON or text).  Raises: Lost."""
    content = None if body is None else json.dumps(body)
    if body is not None:
        headers = {**headers, "Content-Type": "application/json"}
    try:
        line.request(method, path, content, headers)
        answer = line.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if answer.headers["Content-Type"] == "application/json" and text else text
    except (OSError, http.client.HTTPException) as error:
        raise Lost(error) from None
    finally:
        line.close()


def keep_compiled(home, program=NEXUS):
    """Put into a home what its first service would compile: most tests wait for a service, few for the compiler."""
    cache = pathlib.Path(home, "cache")
    cache.mkdir(mode=0o700)
    kept = cache.joinpath(*program.parts[1:-1])
    kept.mkdir(parents=True)
    with contextlib.suppress(FileNotFoundError):        # where Python writes no compiled files, as PYTHONDONTWRITEBYTECODE says
        shutil.copy(importlib.util.cache_from_source(str(program)), kept)
    subprocess.run(["chmod", "-R", "go=", cache], check=True)           # as nexus makes it


class Box:
    """A home, a port, GPUs, and the service that goes with them."""

    def __init__(self, gpus=2, launcher="direct", user=None, environ=None, is_starting=True, is_supervised=True, name="home", **config):
        """`is_supervised`: whether its service is started as `nexus start` does; otherwise it is a fork that nobody starts again."""
        self.folder = make_folder()
        self.home, self.is_supervised = self.folder / name, is_supervised
        self.user, self.port = user, free_port()
        self.python, self.tests = (user.python, user.folder) if user else (sys.executable, SUPPORT)
        self.bin = self.folder / "bin"
        self.bin.mkdir(exist_ok=True)
        self.home.mkdir(mode=0o700, exist_ok=True)
        keep_compiled(self.home, user.folder / NEXUS.name if user else NEXUS)
        (self.folder / "screen").mkdir(mode=0o700, exist_ok=True)
        self.environ = {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.folder), "NEXUS_HOME": str(self.home), "TZ": "UTC",
            "LANG": "C.UTF-8", "SCREENDIR": str(self.folder / "screen"), **(environ or {})}
        if user:
            self.environ.setdefault("PYTHONPATH", str(user.folder))
        if isinstance(gpus, int):
            self.environ["NEXUS_MOCK_GPUS"] = str(gpus)
        elif gpus is not None:
            make_nvidia_smi(self.bin, self.folder, self.python, self.tests)
            self.show(gpus)
        settings = {"refresh_rate_seconds": 0.3, "cpu_slots": 4, "kill_grace_seconds": 5, "launcher": launcher,
                    "lease_dir": str(self.folder / "leases")}
        self.settings = {**settings, **config, "port": self.port}
        self.write_config()
        if user:
            subprocess.run(["chown", "-R", str(user.uid), self.folder], check=True)
        if is_starting:
            try:
                self.start()
            except BaseException:
                self.close()
                raise

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind:
            print(f"---- service.log of {self.folder}\n{self.log()[-8000:]}")
        self.close()

    def close(self):
        remove_folder(self.folder)

    def write_config(self, **changed):
        sections = {key: name for name, table in nexus.SECTIONS.items() for key in table.FIELDS}
        self.settings.update(changed)
        tables = {}
        for key, setting in self.settings.items():
            tables.setdefault(sections[key], []).append(f"{key} = {json.dumps(setting)}\n")
        (self.home / "config.toml").write_text("".join(f"[{section}]\n{''.join(lines)}" for section, lines in tables.items()))

    # The fake nvidia-smi

    def show(self, gpus=2, **state):
        """What nvidia-smi says from now on: a list of GPUs, or the whole state as a dict."""
        show_gpus(self.folder, gpus, **state)

    def smi_runs(self):
        return [json.loads(line) for line in read(self.folder / "smi.log").splitlines()]

    def await_probe(self):
        """Until the service has asked nvidia-smi anew and has seen what it said."""
        count = len([run for run in self.smi_runs() if "--query-gpu" in str(run)])
        until(lambda: len([run for run in self.smi_runs() if "--query-gpu" in str(run)]) >= count + 3, "two more probes")

    # The service

    def argv(self, *arguments):
        if not self.user:
            return [self.python, str(COMMAND), *arguments]
        return [*self.user.become(), self.python, str(self.user.folder / COMMAND.name), *arguments]

    def nexus(self, *arguments, timeout_s=PATIENCE_S, environ=None):
        """Run a command of nexus; CompletedProcess with text."""
        environ = {**self.environ, **(environ or {})}
        place = self.user.place() if self.user and is_ours(self.user.folder / NEXUS.name) else None
        if "argv" in vars(self) or not (place or self.python == sys.executable) or not forks.can_run(environ, place):
            return subprocess.run(self.argv(*arguments), env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=timeout_s, cwd="/")
        if place:
            environ["LD_LIBRARY_PATH"] = place.library
        done = forks.run(arguments, environ, timeout_s=timeout_s, place=place)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self):
        if not self.is_supervised and not self.user and forks.can_run(self.environ):
            (self.home / "stopped").unlink(missing_ok=True)         # of nexus stop
            forks.start(["serve"], {**self.environ, "NEXUS_ROLE": "service"}, self.home / "service.log")
            self.await_service()
            return
        for _ in range(5):
            done = self.nexus("start")
            if done.returncode == 4 and "in use" in done.stderr:        # somebody was faster
                self.port = free_port()
                self.write_config(port=self.port)
                continue
            assert done.returncode == 0, done.stderr + self.log()
            return
        raise AssertionError("no port stays free")

    def serve(self, change=""):
        """Start a service in the foreground, after a change to nexus; no supervisor starts it again."""
        if not self.user and forks.can_run(self.environ):
            forks.start(["serve"], self.environ, os.devnull, change)
            self.await_service()
            return
        become, folder = (self.user.become(), self.user.folder) if self.user else ([], NEXUS.parent)
        code = (f"import sys; sys.path.insert(0, {str(folder)!r}); import nexus; {change}; "
                "sys.argv[1:] = ['serve']; sys.exit(nexus.entry())")
        subprocess.Popen([*become, self.python, "-c", code], env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, cwd="/", start_new_session=True)
        self.await_service()

    def info(self):
        return read_service(self.home)

    def pid(self):
        return find_service(self.home)

    def kill_service(self):
        """SIGKILL; returns the pid it had."""
        pid = until(self.pid, "a service to kill")
        kill(pid)
        until(lambda: not is_alive(pid), "the service's death")
        return pid

    def await_service(self, timeout_s=PATIENCE_S):
        """Until a service answers."""
        def answers():
            with contextlib.suppress(Lost):
                return self.pid() and self.call("GET", "/jobs?limit=1")[0] in (200, 401)       # 401: it wants a token
        until(answers, lambda: f"the service to answer, whose log ends with: {read(self.home / 'service.log')[-1500:]}", timeout_s)
        return self.pid()

    def supervisors(self):
        """The shells that start the service again, and the screen they run in."""
        return [pid for pid in find_processes(f"{self.folder}/") if b"NEXUS_ROLE=service" in read_bytes(f"/proc/{pid}/environ")
                and b"supervisor.sh" in read_bytes(f"/proc/{pid}/cmdline")]

    def shells(self):
        """Those of the supervisors themselves."""
        return [pid for pid in self.supervisors() if read_bytes(f"/proc/{pid}/cmdline").startswith(b"/bin/sh\0")]

    def hold_supervisor(self, shell):
        """Have a supervisor that waits before it starts the service again wait on."""
        def find_sleep():
            return [pid for pid in descendants(shell) if read_bytes(f"/proc/{pid}/cmdline").startswith(b"sleep\0")]
        os.kill(*until(find_sleep, "the supervisor to wait"), signal.SIGSTOP)

    def kill_all_of_service(self):
        """The service and what would start it again."""
        kill(*self.supervisors())
        self.kill_service()
        until(lambda: not self.supervisors(), "the supervisor's death")

    def log(self):
        return read(self.home / "service.log")

    # REST

    def line(self, timeout_s):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def call(self, method, path, body=None, key=None, timeout_s=PATIENCE_S, **headers):
        """(HTTP status, JSON or text).  Raises: Lost."""
        if self.user:                                   # only its owner may call without a token
            headers["Authorization"] = f"Bearer {read(self.home / 'token').strip()}"
        if key:
            headers["Idempotency-Key"] = key
        return ask_service(self.line(timeout_s), method, path, body, headers)

    def ask(self, method, path, body=None, key=None, timeout_s=PATIENCE_S):
        """The answer of a call that must succeed; one that may be repeated is, while the service is away."""
        def attempt():
            try:
                return (self.call(method, path, body, key),)
            except Lost:
                if method != "GET" and not key:
                    raise
        status, answer = until(attempt, f"an answer to {method} {path}", timeout_s)[0]
        assert status < 300, (method, path, status, answer)
        return answer

    def add(self, command, **options):
        """Queue a job; its id."""
        return self.ask("POST", "/queue", {"command": command, **options}, key=f"key-{random.getrandbits(64):x}")["id"]

    def job(self, job_id):
        return self.ask("GET", f"/jobs/{job_id}")

    def wait(self, job_id, *statuses, timeout_s=PATIENCE_S):
        """The job, once it has one of these statuses (without any: once it is over)."""
        wanted = statuses or ("completed", "failed", "cancelled")
        job = {}

        def look():
            nonlocal job
            job = self.job(job_id)
            assert job["status"] in wanted or job["status"] not in ("completed", "failed", "cancelled"), (job, self.log())
            return job["status"] in wanted

        until(look, lambda: f"job {job_id} to become {wanted}: {job}", timeout_s)
        return job

    def wait_started(self, job_id):
        """The job, once its command's runner is known."""
        return until(lambda: (job := self.wait(job_id, "running"))["pid"] and job, f"the runner of {job_id}")

    def status(self):
        return self.ask("GET", "/status")

    def gpu(self, index):
        return next(gpu for gpu in self.status()["gpu_status"] if gpu["index"] == index)

    def await_gpu(self, index, **facts):
        """The GPU, once /status says this of it; a function is asked."""
        seen = {}

        def look():
            nonlocal seen
            seen = next((gpu for gpu in self.status()["gpu_status"] if gpu["index"] == index), None)
            return seen and all(fact(seen[key]) if callable(fact) else seen[key] == fact for key, fact in facts.items())

        until(look, lambda: f"GPU {index} to have {facts}: {seen}")
        return seen

    def await_reason(self, job_id, *words):
        """Why a job waits, and what is told of each GPU, once these words are in it."""
        def look():
            told = self.ask("GET", f"/jobs/{job_id}/why")
            return "; ".join([told["why"], *(f"GPU {gpu['place']} {gpu['verdict']}" for gpu in told["gpus"])])

        until(lambda: all(word in look() for word in words), lambda: f"{words} in why {job_id} waits: {look()}")
        return look()

    def health(self):
        return self.call("GET", "/health")[1]

    def logs(self, job_id, stream="both"):
        return self.ask("GET", f"/jobs/{job_id}/logs?stream={stream}")

    def path(self, name):
        """A path for a job to write to."""
        return self.folder / name

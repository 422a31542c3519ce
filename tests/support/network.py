"""A head and GPU nodes as computers of their own: real OpenSSH servers in network namespaces, on a switch of the test's.

    with network.Net(nodes=2, gpus=2, jump=True) as net:        # nodes n1 and n2, which only the host `jump` reaches
        net.head.add("hostname", node="n1")                     # net.head is a live.Box, whose service runs on the head
        net.nodes[0].cut()                                      # .mend(), .delay(100), .drop(), .power_off(), .stop_sshd() ...

Nodes and jump host have each their own processes, user, host name, machine-id, boot_id, /etc, /tmp, /run and sshd.  Nothing
of it is in the namespaces of the test: no name, address or user.  Namespaces end with the processes in them, devices with
the switch, and all of those are found as the processes of a box are, by the folder's name.
"""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import fnmatch
import http.client
import os
import pathlib
import random
import shlex
import socket
import struct
import subprocess
import sys
import threading
import types
import uuid

import forks
import live

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454ca, 0x0002, 0x1000
FRONT, BACK = "10.77.0", "10.77.1"          # the head and what it reaches; what only the jump host reaches
STANDARD_PATH = "/usr/local/bin:/usr/bin:/bin"
SSHD = "/usr/sbin/sshd"                     # which wants to be called by its whole path
libc = ctypes.CDLL(None, use_errno=True)


# Namespaces, which belong to threads

def in_a_thread(function, *arguments):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def make_namespace():
    """A file descriptor of a new one, which ends with the last process in it and the last descriptor."""
    def make():
        check(libc.unshare(CLONE_NEWNET))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return in_a_thread(make)


def inside(namespace, function, *arguments):
    """What the function returns in a network namespace."""
    def enter():
        check(libc.setns(namespace, CLONE_NEWNET))
        return function(*arguments)
    return in_a_thread(enter)


def open_tap(name):
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Line(http.client.HTTPConnection):
    """HTTP to a port of 127.0.0.1 in a namespace."""

    def __init__(self, namespace, port, timeout_s):
        super().__init__("127.0.0.1", port, timeout=timeout_s)
        self.namespace = namespace

    def connect(self):
        self.sock = inside(self.namespace, socket.create_connection, ("127.0.0.1", self.port), self.timeout)


@contextlib.contextmanager
def relay(net):
    """A port of this machine that leads to the head's service, for a browser."""
    def serve():
        with contextlib.suppress(OSError):
            while True:
                near = server.accept()[0]
                try:
                    far = inside(net.head.machine.namespace, socket.create_connection, ("127.0.0.1", net.head.port))
                except OSError:
                    near.close()
                    continue
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pass_on, args=ends, daemon=True).start()

    def pass_on(source, target):
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                target.sendall(piece)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


# Processes, which have a pid within their machine and another here

def tree(pid):
    """A process and all below it: in a namespace of pids that is all below its first.  Nothing is read of other processes."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                found += map(int, live.read(f"/proc/{one}/task/{thread}/children").split())
    return found


# Machines

OLD_PYTHON_SAYS = """\
import collections, sys
numbers = collections.namedtuple("version_info", "major minor micro releaselevel serial")
sys.version_info, sys.hexversion, sys.version = numbers(3, 8, 10, "final", 0), 0x03080af0, "3.8.10 (default)"
"""
PYTHON = """\
#!/bin/sh
case $1 in
-c) [ "$2" = 'import sys; sys.exit(sys.version_info < (3, 9))' ] && exit ;;
*/agent/nexus-*.py) [ ! -e {packages}/sitecustomize.py ] && cmp -s "$1" {nexus} && exec {python} -I -S -c {launch} "$@" ;;
esac
exec {python} "$@"
"""


def write_quick_python(path, python, nexus, launch, packages=""):
    """A python3 that starts an agent as a fork of a process that has loaded nexus, if that is the same nexus.py.

    An agent is nexus.py itself, which Python would compile anew each time: half of what a connection costs.
    """
    pathlib.Path(path).write_text(PYTHON.format(nexus=nexus, python=python, launch=shlex.quote(launch), packages=packages))
    os.chmod(path, 0o755)


BOOT = """\
mount --bind /etc {folder}/etc
mount --bind {machine}/etc /etc
mount --bind {machine}/boot_id /proc/sys/kernel/random/boot_id
echo {name} > /proc/sys/kernel/hostname
echo 0 > /proc/sys/net/ipv4/ip_forward
ip -batch {machine}/addresses
"""
BOOT_NODE = """\
{hide}mount -t tmpfs -o mode=755 none /run
mkdir -m 1777 /run/lock /run/screen
mkdir -m 755 /run/sshd
mount --rbind {folder} {machine}/tmp/{folder.name}
mount --rbind {machine}/tmp /tmp
{start_sshd}
"""
STAY = """\
touch {machine}/is-up
while :; do MACHINE={machine}/ sleep 100000 & wait; done
"""


class Machine:
    """A network namespace, a user with a Python, and what makes a host of its own of them."""

    is_own_pids = True
    signs = ("is-up",)                      # the files that are there once it is up

    def __init__(self, net, name, user, addresses):
        self.net, self.name, self.user, self.addresses = net, name, user, addresses
        self.address = addresses[0]
        self.folder = net.folder / name
        self.uid = net.uid + len(net.machines)
        self.home = self.folder / "home"
        self.python = str(self.folder / "bin" / "python3")
        self.namespace = make_namespace()
        self.process, self.delay_s, self.is_lossy = None, 0.0, False
        for inner in ("bin", "etc", "home", f"tmp/{net.folder.name}"):
            (self.folder / inner).mkdir(parents=True)
        (self.folder / "tmp").chmod(0o1777)
        self.home.chmod(0o700)
        self.change_boot_id()
        self.write_addresses()
        self.make_python()

    def close(self):
        os.close(self.namespace)

    def write_addresses(self):
        lines = ["link set lo up"]
        for number, address in enumerate(self.addresses):
            lines += [f"address replace {address}/24 dev eth{number}", f"link set eth{number} txqueuelen 10000 up"]
        (self.folder / "addresses").write_text("".join(f"{line}\n" for line in lines))

    def open_taps(self):
        """[(descriptor, segment)]: its end of the links is in the namespace, the other is the switch's."""
        first = sum(len(machine.addresses) for machine in self.net.machines[:self.net.machines.index(self)])
        self.ports = range(first, first + len(self.addresses))
        return [(inside(self.namespace, open_tap, f"eth{number}"), address.rpartition(".")[0])
                for number, address in enumerate(self.addresses)]

    def packages(self):
        """The folder for Python packages; the machine's folder is a virtual environment."""
        folder = self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def make_python(self):
        (self.folder / "pyvenv.cfg").write_text(f"home = {self.net.tools.mount}/bin\ninclude-system-site-packages = false\n")
        os.symlink(self.net.tools.python, self.python)
        if (self.net.folder / "tomli").exists():
            os.symlink(self.net.folder / "tomli", self.packages() / "tomli")

    def write_etc(self):
        """The test's own /etc, but for what makes a machine; the real one is seen from within, in the net's folder."""
        own = {
            "hostname": f"{self.name}\n", "machine-id": f"{uuid.uuid4().hex}\n", "hosts": self.net.hosts(),
            "profile": f"export PATH={self.login()['PATH']}\n",
            "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n"
                      "sshd:x:103:65534::/run/sshd:/usr/sbin/nologin\n"
                      f"{self.user}:x:{self.uid}:{self.uid}::{self.home}:/bin/bash\n",
            "group": f"root:x:0:\nnogroup:x:65534:\n{self.user}:x:{self.uid}:\n", "shadow": f"root:*:::::::\n{self.user}:*:::::::\n"}
        for name in os.listdir("/etc"):
            if name not in own:
                os.symlink(self.net.folder / "etc" / name, self.folder / "etc" / name)
        for name, content in own.items():
            (self.folder / "etc" / name).write_text(content)

    def change_boot_id(self):
        self.boot_id = str(uuid.uuid4())
        (self.folder / "boot_id").write_text(f"{self.boot_id}\n")

    def boot_script(self):
        return (BOOT + STAY).format(folder=self.net.folder, machine=self.folder, name=self.name)

    def boot(self):
        """Begin to; await_boot() ends it."""
        for name in self.signs:
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "boot").write_text(self.boot_script())
        pids = ["--pid", "--fork", "--kill-child", "--mount-proc"] if self.is_own_pids else []
        with open(self.folder / "boot.log", "ab") as log:
            self.process = subprocess.Popen(
                ["nsenter", f"--net={self.net_path()}", "unshare", "--mount", "--uts", "--ipc", *pids, "sh", "-e", self.folder / "boot"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def await_boot(self):
        def is_up():
            assert self.process.poll() is None, f"{self.name} does not boot: {live.read(self.folder / 'boot.log')}"
            return all((self.folder / name).exists() for name in self.signs)
        live.until(is_up, f"{self.name} to boot", interval_s=0.005)
        self.init = tree(self.process.pid)[1] if self.is_own_pids else self.process.pid

    def net_path(self):
        return f"/proc/{os.getpid()}/fd/{self.namespace}"

    def enter(self):
        """The start of a command line that runs there, as root."""
        return ["nsenter", "-t", str(self.init), "--net", "--mount", "--uts", "--ipc", *(["--pid"] if self.is_own_pids else []), "--"]

    def become(self):
        """And as its user."""
        return [*self.enter(), "setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "--inh-caps=-all",
                "env", f"LD_LIBRARY_PATH={self.net.tools.library}"]

    def place(self):
        tools = self.net.tools
        return forks.Place(self.uid, self.uid, self.python, f"{self.net.folder}/{live.NEXUS.name}", tools.library, self.init)

    def root(self, command):
        """Run a shell command there as root; its output."""
        return subprocess.run([*self.enter(), "sh", "-c", command], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              text=True, cwd="/").stdout

    def run(self, command, timeout_s=live.PATIENCE_S):
        """Run a shell command as its user, with what a login has in its environment; CompletedProcess with text."""
        environ = [f"{name}={text}" for name, text in self.login().items()]
        return subprocess.run([*self.become(), "env", "-i", *environ, "bash", "-c", f"cd\n{command}"], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=timeout_s, cwd="/")

    def login(self):
        """What sshd puts into the environment."""
        return {"PATH": f"{self.folder}/bin:{STANDARD_PATH}", "LD_LIBRARY_PATH": f"{self.net.tools.library}", "HOME": str(self.home),
                "USER": self.user, "LOGNAME": self.user, "LANG": "C.UTF-8", "TZ": "UTC"}

    def own(self, *paths):
        for path in paths:
            subprocess.run(["chown", "-R", f"{self.uid}:{self.uid}", path], check=True)

    # Its processes, by the pids that the test sees

    def processes(self):
        return [pid for pid in tree(self.init) if live.is_alive(pid)]

    def find(self, words):
        """Those with these words in their arguments."""
        return [pid for pid in self.processes() if words.encode() in live.read_bytes(f"/proc/{pid}/cmdline").replace(b"\0", b" ")]

    def kill_agent(self):
        """SIGKILL the agent of the head, and await its end; ssh notices it."""
        pids = live.until(lambda: self.find(".py agent "), f"an agent on {self.name}")
        live.kill(*pids)
        live.until(lambda: not any(map(live.is_alive, pids)), f"the end of the agent on {self.name}")

    def power_off(self):
        """Everything there ends at once, and says goodbye to nobody: the kernel sees to that, once the first process is dead."""
        self.cut()
        victims = [self.init, *self.processes()]
        live.until(lambda: live.kill(*victims) or not any(live.is_alive(pid) for pid in victims), f"the end of {self.name}")
        self.process.wait(live.PATIENCE_S)

    def power_on(self):
        """Boot anew; what is on its disk, also in /tmp, is there still."""
        self.change_boot_id()
        self.boot()
        self.await_boot()

    def repair(self):
        """As it was when it was new, whatever a test did to it and where it stopped: with power, on the network, without a delay."""
        self.delay(0)
        if not live.is_alive(self.init):
            live.kill(self.process.pid)
            self.process.wait(live.PATIENCE_S)
            self.power_on()
        self.mend()

    # Its links

    def cut(self):
        """Pull its cables: down with the links."""
        self.set_links("down")

    def drop(self):
        """From now on all packets vanish on the way, and nobody is told."""
        self.is_lossy = True
        self.tell_switch()

    def mend(self):
        """After cut() or drop(); a delay stays.  Without power the links stay down, too."""
        self.is_lossy = False
        self.tell_switch()
        if self.process.poll() is None:
            self.set_links("up")

    def set_links(self, state):
        lines = "".join(f"link set eth{number} {state}\n" for number in range(len(self.addresses)))
        subprocess.run(["nsenter", f"--net={self.net_path()}", "ip", "-batch", "-"], input=lines, text=True, check=True)

    def delay(self, round_trip_ms):
        """To and fro, half of it each way; 0 ends it."""
        self.delay_s = round_trip_ms / 2000
        self.tell_switch()

    def tell_switch(self):
        for port in self.ports:
            self.net.tell_switch(f"{port} {self.delay_s} {int(self.is_lossy)}")


class Head(Machine):
    """The machine, not the box: it shares pids and /tmp with the tests, as any box does, so that all that a box has works."""

    is_own_pids = False

    def __init__(self, net):
        super().__init__(net, "head", "ann", [f"{FRONT}.1"])

    def processes(self):
        return [pid for pid in live.all_pids() if (pid == self.init or live.find_uid(pid) == self.uid) and live.is_alive(pid)]


class HeadBox(live.Box):
    def __init__(self, machine, **options):
        self.machine = machine
        user = types.SimpleNamespace(name=machine.user, uid=machine.uid, python=machine.python, folder=machine.net.folder,
                                     become=machine.become, place=machine.place)
        super().__init__(user=user, is_starting=False, **options)
        machine.home = self.folder
        self.environ["PATH"] = f"{self.bin}:{machine.folder}/bin:{STANDARD_PATH}"
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh $(cat {self.bin}/ssh_options) "$@"\n')
        (self.bin / "ssh").chmod(0o755)
        self.set_ssh()

    def set_ssh(self, *options):
        """What each ssh of the head is given from now on, before what nexus gives it: of two the first counts."""
        (self.bin / "ssh_options").write_text(" ".join(options))

    def line(self, timeout_s):
        return Line(self.machine.namespace, self.port, timeout_s)

class Node(Machine):
    """A machine with an sshd, which lets the head's user in; the jump host is one, too.

    `gpus`: how many made-up ones; what the fake nvidia-smi shows, as for a box; None: there is no nvidia-smi.  `python`: "old", or None.
    `disk_mib`: the home has a file system of its own, so small.  `twin`: the node that has the same user with the same home.
    """

    signs = ("is-up", "sshd.pid")

    def __init__(self, net, name, user, addresses, gpus=2, is_behind_jump=False, python="new", has_screen=True,
                 has_git=True, has_lfs=True, disk_mib=None, twin=None):
        super().__init__(net, name, user, addresses)
        self.is_behind_jump, self.gpus = is_behind_jump, gpus if isinstance(gpus, int) else None
        if twin:
            self.user, self.uid, self.home = twin.user, twin.uid, twin.home
        self.target = f"{self.user}@{self.address}"
        if python == "new":
            os.rename(self.python, self.folder / "bin" / "python")
            write_quick_python(self.python, self.folder / "bin" / "python", net.folder / live.NEXUS.name, net.launch, self.packages())
        elif python == "old":
            self.make_old_python()
        else:
            os.unlink(self.python)
        if disk_mib:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mib}m,mode=0700", "nexus-test", self.home], check=True)
        if isinstance(gpus, (list, dict)):
            live.make_nvidia_smi(self.folder / "bin", self.folder, net.tools.python, net.folder)
            self.show(gpus)
        hidden = [*(["python*"] if python != "new" else []), *([] if has_screen else ["screen"]), *([] if has_git else ["git*"]),
                  *([] if has_lfs else ["git-lfs"]), *(["nvidia-smi"] if gpus is None else [])]
        self.hide = "".join(self.hide_programs(folder, hidden) for folder in ("/usr/local/bin", "/usr/bin")) if hidden else ""

    def make_old_python(self):
        """Python 3.8 in all that it says of itself, but for `python3 -S`."""
        (self.folder / "real").mkdir()
        os.rename(self.python, self.folder / "real" / "python3")
        (self.packages() / "sitecustomize.py").write_text(OLD_PYTHON_SAYS)
        pathlib.Path(self.python).write_text(
            f'#!/bin/sh\ncase "$1" in -V|--version) echo "Python 3.8.10"; exit;; esac\nexec {self.folder}/real/python3 "$@"\n')
        os.chmod(self.python, 0o755)

    def hide_programs(self, folder, patterns):
        """A shadow of a folder of programs has links to all but those; what to mount, to see it instead."""
        shadow, real = self.folder / "shadow" / folder[1:], self.folder / "programs" / folder[1:]
        shadow.mkdir(parents=True)
        real.mkdir(parents=True)
        for name in os.listdir(folder):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                os.symlink(real / name, shadow / name)
        return f"mount --bind {folder} {real}; mount --bind {shadow} {folder}\n"

    def show(self, gpus=2, **state):
        """What nvidia-smi says from now on, as in a box."""
        live.show_gpus(self.folder, gpus, **state)

    def login(self):
        return {**super().login(), **({} if self.gpus is None else {"NEXUS_MOCK_GPUS": str(self.gpus)})}

    def boot_script(self):
        return (BOOT + BOOT_NODE + STAY).format(folder=self.net.folder, machine=self.folder, name=self.name, hide=self.hide,
                                                start_sshd=self.sshd())

    def sshd(self):
        return shlex.join([SSHD, "-f", f"{self.folder}/sshd_config", "-E", f"{self.folder}/sshd.log"])

    def make_sshd(self, public_key):
        """MaxSessions, MaxStartups and the like are what sshd takes them to be, as on its users' machines."""
        (self.home / ".ssh").mkdir(mode=0o700, exist_ok=True)
        (self.home / ".ssh" / "authorized_keys").write_text(public_key)
        self.own(self.home)
        environ = {name: text for name, text in self.login().items() if name not in ("HOME", "USER", "LOGNAME")}
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nPidFile {self.folder}/sshd.pid\nLogLevel VERBOSE\nUsePAM no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nSubsystem sftp internal-sftp\nKexAlgorithms curve25519-sha256\n"       # the quickest
            f"SetEnv {' '.join(f'{name}={text}' for name, text in environ.items())}\n")

    def start_sshd(self):
        self.root(self.sshd())
        live.until((self.folder / "sshd.pid").exists, "sshd to listen")

    def stop_sshd(self):
        """Who is logged in remains so."""
        self.root(f"kill $(cat {self.folder}/sshd.pid)")
        live.until(lambda: not (self.folder / "sshd.pid").exists(), "sshd to end")

    def repair(self):
        super().repair()
        if not (self.folder / "sshd.pid").exists():
            self.start_sshd()

    def close_sessions(self):
        """All connections end; sshd takes new ones."""
        sessions = [pid for pid in self.find("sshd: ") if b"[listener]" not in live.read_bytes(f"/proc/{pid}/cmdline")]
        live.kill(*sessions)
        live.until(lambda: not any(live.is_alive(pid) for pid in sessions), "the end of the sessions")

    def ssh_config(self):
        via = "    ProxyJump jump\n" if self.is_behind_jump else ""
        return f"Host {self.name}\n    HostName {self.address}\n    User {self.user}\n{via}"

    def host_line(self):
        return f"{self.name},{self.address} {live.read(self.folder / 'host_key.pub')}"


class Net:
    """The head (.head), the nodes (.nodes), .jump, and a switch between them.

    `nodes`: how many, or a list of dicts with options of Node; `gpus`, of each.  `jump`: nodes are behind a jump host, but for those with
    is_behind_jump=False; `twin` is the place of another node there.  The rest is for the head's box.
    """

    def __init__(self, nodes=2, gpus=2, jump=False, head_gpus=0, **config):
        live.need_root()
        self.tools = live.Tools()
        self.folder = self.tools.folder
        self.launch = forks.listen(self.folder / "agents")
        self.uid = random.SystemRandom().randrange(1_000_000, 1_000_000_000)
        self.machines, self.switch, self.head = [], None, None
        try:
            self.make_machines([{}] * nodes if isinstance(nodes, int) else nodes, gpus, jump)
            self.start_switch()
            self.head = HeadBox(self.head_machine, gpus=head_gpus, **config)
            self.make_keys()
            self.boot()
            self.head.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind:
            for machine in self.machines:
                print(f"---- {machine.name}\n{live.read(machine.folder / 'boot.log')}{live.read(machine.folder / 'sshd.log')[-4000:]}")
            print(f"---- service.log of the head\n{self.head.log()[-8000:]}")
        self.close()

    def close(self):
        if self.head:
            self.head.close()
        live.kill_all(f"{self.folder}/")
        for process in [machine.process for machine in self.machines] + [self.switch]:
            if process:
                process.wait(live.PATIENCE_S)
        if self.switch:
            self.switch.stdin.close()
            self.switch.stdout.close()
        for machine in self.machines:
            machine.close()
        self.tools.close()

    def make_machines(self, options, gpus, jump):
        (self.folder / "etc").mkdir()
        self.head_machine = self.add(Head(self))
        self.jump = self.add(Node(self, "jump", "hop", [f"{FRONT}.2", f"{BACK}.2"], gpus=0)) if jump else None
        self.nodes = []
        for number, given in enumerate(options, 1):
            given = {"gpus": gpus, "is_behind_jump": bool(jump), **given}
            if "twin" in given:
                given["twin"] = self.nodes[given["twin"]]
            address = f"{BACK if given['is_behind_jump'] else FRONT}.{10 + number}"
            self.nodes.append(self.add(Node(self, f"n{number}", f"user{number}", [address], **given)))

    def add(self, machine):
        self.machines.append(machine)
        return machine

    def hosts(self):
        named = [f"{address} {machine.name}\n" for machine in self.machines for address in machine.addresses]
        return "".join(["127.0.0.1 localhost\n", *named])

    def start_switch(self):
        taps = [tap for machine in self.machines for tap in machine.open_taps()]
        arguments = [f"{device}:{segment}" for device, segment in taps]
        try:
            self.switch = subprocess.Popen([sys.executable, "-I", "-S", live.SUPPORT / "fake_switch", *arguments], stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE, text=True, pass_fds=[device for device, _ in taps],
                                           env={"FAKE_SWITCH": f"{self.folder}/"}, start_new_session=True)
        finally:
            for device, _ in taps:
                os.close(device)

    def tell_switch(self, words):
        self.switch.stdin.write(f"{words}\n")
        self.switch.stdin.flush()
        assert self.switch.stdout.readline() == "ok\n", "the switch is gone"

    def make_keys(self):
        box, sshds = self.head, [machine for machine in self.machines if isinstance(machine, Node)]
        keys = box.folder / ".ssh"
        keys.mkdir(mode=0o700)
        making = [subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path])
                  for path in (keys / "id_ed25519", *(node.folder / "host_key" for node in sshds))]
        assert {process.wait(live.PATIENCE_S) for process in making} == {0}, "ssh-keygen"
        for node in sshds:
            node.make_sshd(live.read(keys / "id_ed25519.pub"))
        (keys / "config").write_text("".join(node.ssh_config() for node in sshds))
        (keys / "known_hosts").write_text("".join(node.host_line() for node in sshds))
        self.head_machine.own(keys)

    def boot(self):
        for machine in self.machines:
            machine.write_etc()
            machine.boot()
        for machine in self.machines:
            machine.await_boot()

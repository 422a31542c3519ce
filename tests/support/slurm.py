"""A real Slurm of its own: munged, slurmctld and a slurmd for each made-up node, all on loopback and in one folder.

    with slurm.Cluster(nodes={"n1": 2, "n2": 1}) as cluster, cluster.box() as box:      # names, and how many GPUs each has
        job = box.wait(box.add("exit 3", gpus=1), "failed")

The GPUs are links to /dev/null: Slurm gives them out, and nothing is there to use.  What a cluster starts has its folder's name in
its environment or its arguments, as a live.Box's has.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import live

SETTINGS = {
    "AuthType": "auth/munge", "CredType": "cred/munge", "SlurmUser": "root",
    "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",           # nothing listens but on loopback
    "SlurmctldDebug": "info", "SlurmdDebug": "info", "MpiDefault": "none", "SwitchType": "switch/none",
    "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none", "JobCompType": "jobcomp/none", "ReturnToService": "2",
    "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core_Memory", "SchedulerType": "sched/backfill",
    "SchedulerParameters": "sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1", "GresTypes": "gpu",
    "SlurmdParameters": "config_overrides",                             # a node has as many CPUs as slurm.conf says
    "PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL", "KillWait": "1", "EnforcePartLimits": "ANY",
    "MinJobAge": "300", "MaxArraySize": "1001", "DefMemPerCPU": "1"}
PARTITIONS = {"main": "Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1"}


DATABASE = """[mysqld]
user = root
datadir = {folder}/data
socket = {folder}/mariadb.socket
pid-file = {folder}/mariadb.pid
tmpdir = {folder}
log-error = {folder}/log/mariadb.log
skip-networking
skip-grant-tables
innodb_log_file_size = 8M
innodb_flush_log_at_trx_commit = 0
"""


class Cluster:
    """Partitions are {name: the rest of the line}; a setting None is left out.

    With `account`, the only one whose jobs are taken, there is accounting too: slurmdbd, and MariaDB without a network.
    """

    def __init__(self, nodes=None, partitions=None, cpus=64, account=None, is_starting=True, **settings):
        live.need_root()
        self.folder = live.make_folder()
        self.folder.chmod(0o755)                        # slurmd runs jobs of other users from there
        self.nodes = {"n1": 2} if nodes is None else nodes
        self.partitions = PARTITIONS if partitions is None else partitions
        self.cpus, self.account, self.former = cpus, account, set()
        self.ports = {name: live.free_port() for name in ("slurmctld", *(["slurmdbd"] if account else []), *self.nodes)}
        self.settings = {**SETTINGS, **settings}
        if account:
            self.settings.update({
                "AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": "127.0.0.1",
                "AccountingStoragePort": str(self.ports["slurmdbd"]), "AccountingStoragePass": f"{self.folder}/munge.socket",
                "AccountingStorageEnforce": "associations,limits,qos"})
        self.environ = {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.folder / "slurm.conf"), "TZ": "UTC", "LANG": "C.UTF-8"}
        for name in ("state", "spool", "log", "gpus"):
            (self.folder / name).mkdir()
        (self.folder / "plugstack.conf").touch()
        self.write_config()
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
            for path in sorted((self.folder / "log").iterdir()):
                print(f"---- {path}\n{live.read(path)[-4000:]}")
        self.close()

    def close(self):
        live.remove_folder(self.folder)

    def write_config(self):
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        paths = {
            "AuthInfo": f"socket={folder}/munge.socket", "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd.%n.pid", "SlurmdSpoolDir": f"{folder}/spool/%n", "StateSaveLocation": f"{folder}/state",
            "SlurmctldLogFile": f"{folder}/log/slurmctld.log", "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
            "PlugStackConfig": f"{folder}/plugstack.conf", "SlurmctldPort": str(self.ports["slurmctld"])}
        lines = ["ClusterName=nx", f"SlurmctldHost={host}(127.0.0.1)"]
        lines += [f"{name}={text}" for name, text in {**self.settings, **paths}.items() if text is not None]
        gres, first = ["AutoDetect=off"], 0
        for name, count in self.nodes.items():
            lines.append(f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={self.ports[name]} CPUs={self.cpus} "
                         f"RealMemory=100000 Feature=a100 {f'Gres=gpu:a100:{count} ' if count else ''}State=UNKNOWN")
            for index in range(first, first + count):
                with contextlib.suppress(FileExistsError):
                    os.symlink("/dev/null", folder / f"gpus/gpu{index}")
            if count:
                gres.append(f"NodeName={name} Name=gpu Type=a100 File={folder}/gpus/gpu[{first}-{first + count - 1}]")
            first += count
        lines += [f"PartitionName={name} {rest} State=UP" for name, rest in self.partitions.items()]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "gres.conf").write_text("\n".join(gres) + "\n")

    # Its daemons

    def start(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.begin("munged", f"--key-file={key}", f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid",
                   f"--log-file={self.folder}/log/munged.log", f"--seed-file={self.folder}/munge.seed", "--num-threads=2", "--force")
        if self.account:
            self.start_database()
        self.start_slurmctld("-c")
        for name in self.nodes:
            self.start_slurmd(name)
        try:
            self.await_idle(timeout_s=15)
        except AssertionError:                          # on a busy machine a slurmd's first word to slurmctld may be lost; it says no other
            for name in self.nodes:
                if live.is_alive(int(live.read(self.folder / f"slurmd.{name}.pid") or 0)):
                    self.stop_slurmd(name, signal.SIGKILL)
                self.start_slurmd(name)
            self.await_idle()

    def find(self, program):
        return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or program

    def begin(self, *argv):
        """Start a daemon, which goes to the background by itself."""
        done = subprocess.run([self.find(argv[0]), *argv[1:]], env=self.environ, capture_output=True, text=True, cwd="/",
                              timeout=live.PATIENCE_S)
        assert done.returncode == 0, done.stderr

    def start_database(self):
        folder, share = self.folder, pathlib.Path("/usr/share/mysql")
        (folder / "data").mkdir()
        (folder / "my.cnf").write_text(DATABASE.format(folder=folder))
        tables = "".join((share / f"mysql_system_tables{name}.sql").read_text() for name in ("", "_data"))
        mariadb = [self.find("mariadbd"), f"--defaults-file={folder}/my.cnf"]
        subprocess.run([*mariadb, "--bootstrap"], input=f"create database mysql;\nuse mysql;\n{tables}", text=True, env=self.environ,
                       check=True, capture_output=True)
        subprocess.Popen(mariadb, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        live.until(lambda: (folder / "mariadb.socket").exists(), "MariaDB")
        host = socket.gethostname().partition(".")[0]
        (folder / "slurmdbd.conf").write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\nDbdAddr=127.0.0.1\nDbdHost={host}\n"
            f"DbdPort={self.ports['slurmdbd']}\nSlurmUser=root\nStorageType=accounting_storage/mysql\nStorageHost=localhost\n"
            f"StorageUser=root\nStoragePass=none\nLogFile={folder}/log/slurmdbd.log\nPidFile={folder}/slurmdbd.pid\n"
            "CommunicationParameters=NoInAddrAny\n")
        (folder / "slurmdbd.conf").chmod(0o600)
        subprocess.Popen([self.find("slurmdbd"), "-D"], env={**self.environ, "MYSQL_UNIX_PORT": f"{folder}/mariadb.socket"},
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        live.until(lambda: self.ask("sacctmgr", "-n", "show", "cluster").returncode == 0, "slurmdbd")
        self.say("sacctmgr", "-i", "add", "cluster", "nx")
        self.say("sacctmgr", "-i", "add", "account", self.account, "Description=test", "Organization=test")
        self.say("sacctmgr", "-i", "add", "user", "root", f"Account={self.account}")

    def start_slurmctld(self, *options):
        self.begin("slurmctld", "-f", str(self.folder / "slurm.conf"), *options)
        live.until(lambda: self.ask("scontrol", "ping").returncode == 0, "slurmctld to answer")

    def stop_slurmctld(self, number=signal.SIGTERM):
        self.stop("slurmctld.pid", number)

    def start_slurmd(self, node):
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        self.begin("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def stop_slurmd(self, node, number=signal.SIGTERM):
        self.stop(f"slurmd.{node}.pid", number)

    def stop(self, pid_file, number):
        pid = int(live.read(self.folder / pid_file) or 0)
        assert pid, f"no {pid_file}"
        live.kill(pid, number=number)
        live.until(lambda: not live.is_alive(pid), f"the end of {pid_file}")

    def await_idle(self, timeout_s=live.PATIENCE_S):
        def states():
            return set(self.ask("sinfo", "-h", "-N", "-o", "%t").stdout.split())
        live.until(lambda: states() == {"idle"}, lambda: f"all nodes to be idle: {states()}", timeout_s)

    # What a user types

    def ask(self, *argv):
        return subprocess.run(argv, env=self.environ, capture_output=True, text=True, cwd="/", timeout=live.PATIENCE_S)

    def say(self, *argv):
        """The output of a command that must succeed."""
        done = self.ask(*argv)
        assert done.returncode == 0, (argv, done.stdout, done.stderr)
        return done.stdout.strip()

    def jobs(self):
        """[(id, state, name, comment)] of all that Slurm knows and that clean() has not seen."""
        rows = self.say("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%j|%k").splitlines()
        return [tuple(row.split("|", 3)) for row in rows if row.partition("|")[0] not in self.former]

    def clean(self):
        """As it was when it was new, whatever a test did to it and where it stopped; jobs() tells of none that was before."""
        if self.ask("scontrol", "ping").returncode:
            self.start_slurmctld()
        for node in self.nodes:
            if not live.is_alive(int(live.read(self.folder / f"slurmd.{node}.pid") or 0)):
                self.start_slurmd(node)
            self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        self.ask("scancel", "-u", "root")
        live.until(lambda: not self.say("squeue", "-h", "-r", "-o", "%i"), "all jobs to end")
        self.await_idle()
        shutil.rmtree(self.folder / "saved", ignore_errors=True)
        self.former = set()
        self.former = {slurm_id for slurm_id, *_ in self.jobs()}

    def fact(self, slurm_id, name):
        """A field of `scontrol show job`."""
        cells = dict(cell.partition("=")[::2] for cell in self.say("scontrol", "show", "job", "-d", "-o", slurm_id).split())
        return cells.get(name)

    def take_time(self, slurm_id, seconds):
        """Let a job's time be up so soon."""
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + seconds))
        self.say("scontrol", "update", f"jobid={slurm_id}", f"EndTime={end}")

    def box(self, **config):
        """A nexus that hands its jobs to this cluster; nobody starts its service again."""
        environ = {**config.pop("environ", {}), "SLURM_CONF": str(self.folder / "slurm.conf")}
        return live.Box(gpus=config.pop("gpus", {}), launcher="slurm", environ=environ, is_supervised=False, **config)

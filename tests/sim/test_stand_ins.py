"""The stand-ins have the methods of the real classes; the model of job.sh does what the real one does, step by step."""

import inspect
import os
import re
import subprocess

import cluster
import faults
import pytest
import world
from disk import SimDisk
from live import until
from makers import config, running
from runner import Settings, run_job

import nexus

STAND_INS = [  # the stand-in, the real class, what works as it is
    (SimDisk, nexus.Disk, ()), (world.SimClock, nexus.Clock, ()), (world.SimMachine, nexus.Machine, ("has_bash",)),
    (world.SimProcesses, nexus.Processes, ()), (world.SimScreen, nexus.Screen, (
        "argv", "attach", "call", "choose_folder", "environ", "find_leave_keys", "login_variables", "variables")),
    (world.SimEvents, nexus.RunnerEvents, ("wait",)), (world.SimGpus, nexus.GpuSource, ("not_shown",)),
    (world.SimLine, nexus.AgentLine, ("read_word",)), (world.SimServer, nexus.Server, ()),
    (cluster.SimSlurm, nexus.Slurm, ()), (world.SimWorker, nexus.Worker, ("end", "run"))]


def list_methods(kind):
    return {name for one in kind.__mro__[:-1] for name, found in vars(one).items()
            if (callable(found) or isinstance(found, (staticmethod, property))) and not name.startswith("_")}


@pytest.mark.parametrize("stand_in, real, kept", STAND_INS, ids=[case[1].__name__ for case in STAND_INS])
def test_a_stand_in_has_the_methods_of_the_real_class(stand_in, real, kept):
    """A new method is missed at once: it must be made here, or be among those that work as they are."""
    own = {name for name in list_methods(real) if name in vars(stand_in)}
    assert list_methods(real) - own == set(kept)
    for name in own:
        found, meant = getattr(stand_in, name), getattr(real, name)
        if inspect.isfunction(found) and inspect.isfunction(meant):
            assert list(inspect.signature(found).parameters) == list(inspect.signature(meant).parameters), name


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_can_still_be_put_in(name):
    fault = faults.FAULTS[name]
    assert fault.count_places() == 1 and fault.piece != fault.wrong, f"look in src/{fault.room}.py where it belongs now"


STOPS = [  # a step of the model, the line of job.sh after which it has been made
    ("forked", "trap : INT QUIT TERM                      # Ctrl-C, or `kill 0`, ends the command, not this script"),
    ("claim made", "set +C"),
    ("claimed", "exec 8>&-"),
    ("leases held", "hold_leases || refuse bounce a GPU lease was lost before its job began"),
    ("begun", """printf '%s\\n' "$began" >> "$dir/attempt-$attempt" || fail "the log folder $dir cannot be written\""""),
    ("start said", 'say start "$id" "$attempt" "$$" "$started" "$began"'),
    ("logs opened",
     """exec 5>>"$dir/stderr.log" 6>>"$dir/stdout.log" || refuse launch "the log files in $dir cannot be written\""""),
    ("command ended", "code=$?"),
    ("end said", 'say end "$id" "$attempt" "$code" "$took"'),
    ("result written", 'finish "$code"'),
    ("done", "end_viewer"),
]
CASES = [  # what happens, the command here, the command of the model, fields of the job, whether another has the attempt
    ("it ends well", "echo run abc 1", "work 0 0", {}, False),
    ("it fails", "echo run abc 1; exit 3", "work 0 3", {}, False),
    ("it leaves a process in its session", "echo run abc 1; sleep 600 & exit 0", "work 0 0 leaves", {}, False),
    ("its directory is gone", "echo run abc 1", "work 0 0", {"cwd": "/nowhere"}, False),
    ("another has the attempt", "echo run abc 1", "work 0 0", {}, True),
]


def normalize(text, folder):
    """Without what differs from one run to the next: its folder, pids, times."""
    text = text.replace(str(folder), "FOLDER")
    return re.sub(r"\d{2,}(\.\d+)?|\d+\.\d+", "N", re.sub(r'("runtime_seconds": |end abc 1 \d+ )[\d.]+', r"\1N", text)).strip()


def describe(files, said, folder):
    kept = {name: normalize(text, folder) for name, text in files.items() if name != "job.sh"}
    return kept, [normalize(line, folder) for line in said]


FILL = """dd if=/dev/zero of={home}/filler bs=4k 2> /dev/null
filler=0; while : > {home}/filler-$filler; do filler=$((filler + 1)); done 2> /dev/null"""
SAID_IN_VAIN = '    say end "$id" "$attempt" "$1" "$took" 1'
# Where the runner stops: whether its GPU's lease is still held, once the service holds it no more.
LOOK = """: > {home}/reached; read -r _
exec 9< {home}/leases/GPU-a; if flock -n 9; then echo free; else echo held; fi > "$dir/lease"; exec 9<&-"""


class Real:
    """job.sh as bash runs it, in a folder."""

    def __init__(self, home, command, fields, is_taken=False, lease=""):
        self.home, self.layout = home, nexus.make_layout(str(home), config())
        self.folder = home / "logs" / "job_abc"
        self.folder.mkdir(parents=True)
        os.mkfifo(self.layout.events_file)
        self.fifo = os.open(self.layout.events_file, os.O_RDWR | os.O_NONBLOCK)
        job = running("abc", **{"cwd": str(home), "attempt": 1, "command": command, "gpu_uuids": (), **fields})
        self.leases = nexus.Leases(nexus.DISK, str(home / "leases"), "0-12345678")
        paths, self.handles = take_lease(self.leases, nexus.DISK, lease)
        self.script = nexus.build_script(job, {"PATH": os.environ["PATH"]}, self.layout, paths, self.handles)
        if is_taken:
            (self.folder / "attempt-1").write_text("0 0\n")

    def run(self, line, full_after=None):
        """Run it until it has made this line; None: to its end, or until only what it waits for is left.

        `full_after`: the line after which the disk is full, until the result was written in vain.
        """
        text = self.script
        if full_after is not None:
            text = add_after(text, SAID_IN_VAIN, f"rm -f {self.home}/filler*")
            text = add_after(text, full_after, FILL.format(home=self.home))
        if line is not None:
            look = LOOK.format(home=self.home) if self.leases.held else ""
            text = add_after(text, line, f"{look}\nkill -9 $$")
        path = self.folder / "job.sh"
        path.write_text(text)
        with subprocess.Popen(["bash", str(path), "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=self.handles,
                              stderr=subprocess.DEVNULL, start_new_session=True) as process:
            until(lambda: process.poll() is not None or (self.home / "reached").exists())
            self.leases.close_own("abc")
            process.communicate(b"\n")
        subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
        said = b""
        try:
            said = os.read(self.fifo, 65536)
        except BlockingIOError:
            pass
        os.close(self.fifo)
        return describe({one.name: one.read_text() for one in self.folder.iterdir()}, said.decode().splitlines(), self.folder)


def add_after(script, line, more):
    """A script with more lines after the last of these."""
    lines = script.split("\n")
    places = [number for number, one in enumerate(lines) if one == line]
    lines.insert(places[-1] + 1, more)
    return "\n".join(lines)


def take_lease(leases, disk, way):
    """(leases, handles), as build_script() takes them, of a GPU that the service has taken; `way`: what is wrong with it."""
    if not way:
        return (), ()
    leases.take("abc", ["GPU-a"])
    if way == "inherited":
        return (), leases.handles("abc")
    paths = leases.paths("abc")
    if way == "its service has ended":
        leases.close_own("abc")
    elif way == "another service is named":
        disk.pwrite(leases.handles("abc")[0], b"0-87654321 eve\n", 0)
    elif way == "another file is there":
        disk.unlink(paths[0][0])
        disk.close(disk.open(paths[0][0], os.O_WRONLY | os.O_CREAT))
    else:
        assert way == "shared"
    return paths, ()


class Model:
    """The same in the simulator."""

    def __init__(self, command, fields, is_taken=False, lease=""):
        self.sim = world.World(1)
        self.host = host = self.sim.hosts["a"] = world.Host(self.sim, "a", 1)
        service = world.SimProcess(host, "nexus")
        with service.being_run():
            layout = nexus.make_layout("/home/ann/.nexus", config())
            self.events = world.SimEvents(layout.events_file, self.sim.log)
            given = {"cwd": world.WORK_FOLDER, "attempt": 1, "command": command, "gpu_uuids": (), **fields}
            self.job, self.folder = running("abc", **given), layout.job_folder("abc")
            service.disk.makedirs(self.folder)
            self.leases = nexus.Leases(service.disk, world.LEASE_FOLDER, "0-12345678")
            paths, handles = take_lease(self.leases, service.disk, lease)
            text = nexus.build_script(self.job, {"PATH": os.environ["PATH"]}, layout, paths, handles)
            if is_taken:
                nexus.write_atomic(service.disk, f"{self.folder}/attempt-1", ["0 0\n"])
        self.process = world.SimProcess(host, "bash")
        for handle in handles:
            self.process.add_handle(service.handles[handle], handle)
        self.steps = run_job(self.process, Settings(text), self.job, "abc 1", "/home/ann/.nexus")

    def run(self, last, full_after=None):
        """The files and the words after step `last`."""
        files = self.host.files
        with self.process.being_run():
            for step in self.steps:
                self.sim.end_commands()
                if step == full_after:
                    files.is_full = True
                elif step == "waiting for room":
                    files.is_full = False
                    self.sim.now += 1.0
                if step == last:
                    break
                assert step != "others go on", "it was to be stopped before that"
        found = {name: file.content.decode() for name, file in files.find(self.folder).names.items()}
        if step == last and self.leases.held:
            self.leases.close_own("abc")
            found["lease"] = "held" if files.find(f"{world.LEASE_FOLDER}/GPU-a").locks else "free"
        return describe(found, [line.decode() for line in self.events.queue], self.folder)


def run_model(last, full_after=None, *arguments):
    with world.Patches():
        model = Model(*arguments)
        try:
            return model.run(last, full_after)
        finally:
            model.sim.close()


# Where the command leaves something, job.sh waits for that, and is not done.
STOPPED = [(*case, *stop) for case in CASES for stop in STOPS if not ("leaves" in case[2] and stop[0] == "done")]


@pytest.mark.parametrize("reason, command, modelled, fields, is_taken, step, line", STOPPED,
                         ids=[f"{case[0]}-{case[-2]}" for case in STOPPED])
def test_the_model_does_what_job_sh_does(tmp_path, reason, command, modelled, fields, is_taken, step, line):
    assert Real(tmp_path, command, fields, is_taken).run(line) == run_model(step, None, modelled, fields, is_taken)


LEASES = ["inherited", "shared", "its service has ended", "another service is named", "another file is there"]
# In a refusal, job.sh has other lines than these.
LEASE_STOPS = [(way, *stop) for way in LEASES for stop in STOPS if way in LEASES[:2] or stop[0] in ("claimed", "leases held", "done")]


@pytest.mark.parametrize("way, step, line", LEASE_STOPS, ids=[f"{way}-{step}" for way, step, _ in LEASE_STOPS])
def test_the_model_holds_leases_as_job_sh_does(tmp_path, way, step, line):
    real = Real(tmp_path, "echo run abc 1", {}, lease=way).run(line)
    assert real == run_model(step, None, "work 0 0", {}, False, way)
    if step == "done":
        assert real[1][0].startswith("start" if way in LEASES[:2] else "bounce")


@pytest.fixture
def small_disk(tmp_path):
    """A file system that can be filled."""
    path = tmp_path / "home"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=40,mode=0700", "nexus-test", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("step, line", STOPS[:-2], ids=[step for step, _ in STOPS[:-2]])
def test_the_model_does_what_job_sh_does_on_a_full_disk(small_disk, step, line):
    """It is full after this step, until the result was written in vain."""
    real = Real(small_disk, "echo run abc 1; exit 0", {}).run(None, line)
    assert real == run_model(None, step, "work 0 0", {})

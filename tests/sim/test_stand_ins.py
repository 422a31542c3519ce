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
    (SimDisk, nexus.Disk, ()), (world.SimClock, nexus.Clock, ()), (world.SimMachine, nexus.Machine, ()),
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
    piece, wrong = faults.FAULTS[name]
    assert faults.NEXUS.read_text().count(piece) == 1 and piece != wrong


STOPS = [  # a step of the model, the line of job.sh after which it has been made
    ("forked", "trap : INT QUIT TERM                      # Ctrl-C, or `kill 0`, ends the command, not this script"),
    ("claim made", "set +C"),
    ("claimed", "exec 8>&-"),
    ("leases held", "hold_leases || refuse bounce a GPU lease was lost before its job began"),
    ("begun", """printf '%s\\n' "$up" >> "$dir/attempt-$attempt" || fail "the log folder $dir cannot be written\""""),
    ("start said", 'say start "$id" "$attempt" "$$" "$started" "$up"'),
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


def normalize(text):
    """Without what differs from one run to the next: pids, times."""
    return re.sub(r"\d{2,}(\.\d+)?|\d+\.\d+", "N", re.sub(r'("runtime_seconds": |end abc 1 \d+ )[\d.]+', r"\1N", text)).strip()


def describe(files, said):
    kept = {name: normalize(text) for name, text in files.items() if name != "job.sh"}
    return kept, [normalize(line) for line in said]


class Real:
    """job.sh as bash runs it, in a folder."""

    def __init__(self, home, command, fields, is_taken):
        self.layout = nexus.make_layout(str(home), config())
        self.folder = home / "logs" / "job_abc"
        self.folder.mkdir(parents=True)
        os.mkfifo(self.layout.events_file)
        self.fifo = os.open(self.layout.events_file, os.O_RDWR | os.O_NONBLOCK)
        job = running("abc", **{"cwd": str(home), "attempt": 1, "command": command, "gpu_uuids": (), **fields})
        self.script = nexus.build_script(job, {"PATH": os.environ["PATH"]}, self.layout)
        if is_taken:
            (self.folder / "attempt-1").write_text("0 0\n")

    def run(self, line):
        """Run it until it has made this line; None: to its end, or until only what it waits for is left."""
        lines = self.script.split("\n")
        if line is not None:
            places = [number for number, one in enumerate(lines) if one == line]
            lines.insert(places[-1] + 1, "kill -9 $$")
        path = self.folder / "job.sh"
        path.write_text("\n".join(lines))
        process = subprocess.Popen(["bash", str(path), "1"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        until(lambda: process.poll() is not None)
        subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
        said = b""
        try:
            said = os.read(self.fifo, 65536)
        except BlockingIOError:
            pass
        os.close(self.fifo)
        return describe({one.name: one.read_text() for one in self.folder.iterdir()}, said.decode().splitlines())


def run_model(command, fields, is_taken, last):
    """The files and the words of the model after step `last`."""
    with world.Patches():
        sim = world.World(1)
        host = sim.hosts["a"] = world.Host(sim, "a", 1)
        service = world.SimProcess(host, "nexus")
        try:
            with service.being_run():
                layout = nexus.make_layout("/home/ann/.nexus", config())
                events = world.SimEvents(layout.events_file, sim.log)
                given = {"cwd": world.WORK_FOLDER, "attempt": 1, "command": command, "gpu_uuids": (), **fields}
                job, folder = running("abc", **given), layout.job_folder("abc")
                service.disk.makedirs(folder)
                text = nexus.build_script(job, {"PATH": os.environ["PATH"]}, layout)
                if is_taken:
                    nexus.write_atomic(service.disk, f"{folder}/attempt-1", ["0 0\n"])
            process = world.SimProcess(host, "bash")
            with process.being_run():
                for step in run_job(process, Settings(text), job, "abc 1", "/home/ann/.nexus"):
                    sim.end_commands()
                    if step == last:
                        break
                    assert step != "others go on", "it was to be stopped before that"
            files = {name: file.content.decode() for name, file in host.files.find(folder).names.items()}
            return describe(files, [line.decode() for line in events.queue])
        finally:
            sim.close()


# Where the command leaves something, job.sh waits for that, and is not done.
STOPPED = [(*case, *stop) for case in CASES for stop in STOPS if not ("leaves" in case[2] and stop[0] == "done")]


@pytest.mark.parametrize("reason, command, modelled, fields, is_taken, step, line", STOPPED,
                         ids=[f"{case[0]}-{case[-2]}" for case in STOPPED])
def test_the_model_does_what_job_sh_does(tmp_path, reason, command, modelled, fields, is_taken, step, line):
    assert Real(tmp_path, command, fields, is_taken).run(line) == run_model(modelled, fields, is_taken, step)

"""What keeps the service running."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from .. import text_of
from ..machine.disk import Disk, write_if_changed
from ..machine.launchers import Launcher
from ..machine.layout import Layout
from ..machine.processes import Processes, read_proc_words
from ..machine.search_path import find_program, leave_out_hung
from ..values.errors import NexusError
from .environment import find_visible_devices, list_inherited

SUPERVISOR_SCRIPT = text_of("supervisor.sh")


# The supervisor, the service and all jobs inherit what this process has.  So it resets what whoever typed the first
# command may have, as far as it may: scheduling class, nice value, CPUs, I/O priority, NUMA policy, oom_score_adj,
# limits of CPU time, memory and the size of files, ignored and blocked signals.
# The numbers are those of ioprio_set() and set_mempolicy().  An older C library refuses more CPUs than a kernel has.
CLEAN_STARTER = text_of("clean_starter.py")


# The service runs the compiled form, kept beside nexus.py if that was imported, as `nexus install` has it, or else in
# its own folder.  A child compiles: that takes 28 MB, which stay with it.
# After a crash it runs the code that ran, from the copy that keep_copies() made: nexus.py may be another one by then,
# one that does not work, half of one, or gone.
SERVICE_STARTER = text_of("service_starter.py")


def service_argv(layout: Layout, program: str, options: Sequence[str]) -> list[str]:
    """How the supervisor runs a nexus.py as the service, with this Python."""
    compiled = __spec__.cached if __spec__ and program == os.path.abspath(__file__) else None
    cache = "" if compiled and os.access(compiled, os.W_OK) else layout.cache_dir
    # -I: a types.py in PYTHONPATH must not hide Python's own.  This sys.path comes last: tomli may be anywhere in it.
    return [sys.executable, "-I", "-c", SERVICE_STARTER, os.pathsep.join(sys.path), cache, program, "serve", *options]


def service_environ(layout: Layout, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service that is started here, without what is the job's in which this may be."""
    started = list_inherited(environ)
    if find_visible_devices(environ) is None:
        started.pop("CUDA_VISIBLE_DEVICES", None)
    return {**started, "NEXUS_HOME": layout.home, "NEXUS_ROLE": "service"}


def start_supervisor(disk: Disk, layout: Layout, launcher: Launcher, environ: Mapping[str, str],
                     argv: Sequence[str]) -> None:
    """Start the supervisor, which keeps the service running: in the session `nexus`, if the launcher has any."""
    import subprocess
    try:
        write_if_changed(disk, layout.supervisor_script, SUPERVISOR_SCRIPT)
        script = [layout.supervisor_script]
    except NexusError:                          # the disk is full: what waits on it is shown all the same
        script = ["-c", SUPERVISOR_SCRIPT, layout.supervisor_script]
    command = launcher.argv("nexus", ["/bin/sh", *script, layout.home, *argv], is_daemon=True)
    started = {**service_environ(layout, environ), **launcher.variables()}
    # Its own programs are looked for on PATH: in no folder that hangs, unless they are there.
    if "PATH" in started and find_program(command[0], started["PATH"]) and find_program("sleep", started["PATH"]):
        started["PATH"] = leave_out_hung(started["PATH"])
    end_supervisors(layout, waiting_only=True)      # one would start the former service again
    subprocess.Popen([sys.executable, "-I", "-S", "-c", CLEAN_STARTER, *command], stdin=subprocess.DEVNULL,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env=started,
                     start_new_session=True).wait()


def end_supervisors(layout: Layout, waiting_only: bool = False) -> bool:
    """Kill the supervisors of this home, and the service that each runs; jobs go on.  Return whether there were any.

    `waiting_only`: only those that wait before they start a service again.
    """
    import signal
    processes = Processes()
    found = processes.read(processes.list_pids())
    words = {each.pid: read_proc_words(each.pid, "cmdline") for each in found}
    mine = [layout.supervisor_script, layout.home]
    ours = {pid for pid, argv in words.items() if mine in (argv[1:3], argv[3:5]) and argv[0] == "/bin/sh"}
    waiting = {each.parent for each in found if words[each.pid][:1] == ["sleep"]}
    ended = ours & waiting if waiting_only else ours
    for each in found:                          # parents come first: none starts another service
        if each.pid in ended or each.parent in ended:
            processes.send(each, signal.SIGKILL)
    return bool(ours)

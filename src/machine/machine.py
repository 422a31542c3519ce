"""This machine: its programs, processes, GPUs and leases together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ..opening import TYPE_CHECKING
from ..values.config import Config
from ..values.errors import NexusError
from ..values.job import Job
from .disk import Disk
from .gpu_sources import GpuSource, MockGpus, NvidiaSmi
from .inherited import on_cpus, withhold_descriptors
from .launchers import prepare_launcher
from .layout import Layout
from .leases import Leases, find_lease_folder
from .processes import Processes, count_oom_kills, import_psutil, read_boot_id
from .programs import Spawned, run, spawn
from .search_path import find_job_python, find_programs, keep_needed

if TYPE_CHECKING:
    import subprocess


# What job.sh runs beside the command
RUNNER_PROGRAMS = ("bash", "sh", "nice", "screen", "flock", "tail", "script", "git", "python3", "python", "env", "rm",
                   "mkdir", "rmdir", "mv", "chmod", "sync", "sleep", "cat", "sed", "grep", "find")
NO_BASH = "bash was not found on the service's PATH: no job can start"
NO_BASH_HINT = "install bash; or nexus restart in a shell where `type bash` finds it"


class Machine:
    """This machine as the service uses it: GPUs, processes, sessions, leases and launching."""

    cpu_count = os.cpu_count() or 1

    def __init__(self, config: Config, layout: Layout, disk: Disk, service_id: str) -> None:
        is_slurm = config.jobs.launcher == "slurm"
        self.is_mock = config.mock_gpus is not None and not is_slurm
        # With Slurm nothing of this machine is used: the GPUs are Slurm's.
        self.gpu_source: GpuSource = NvidiaSmi()
        if is_slurm or self.is_mock:
            self.gpu_source = MockGpus(0 if is_slurm else config.mock_gpus or 0)
        self.uid = os.geteuid()
        self.processes = Processes()
        self.psutil = import_psutil()
        self.leases = (
            None if self.is_mock or is_slurm else Leases(disk, find_lease_folder(disk, config.gpu), service_id))
        self.launcher, self.launcher_error = prepare_launcher(config.jobs.launcher, disk, layout)
        self.terminal_error: str | None = None          # why jobs have none to attach to
        if not self.launcher.session_prefix:
            error = self.launcher_error
            self.terminal_error = error.message if error else f'launcher is "{config.jobs.launcher}"'
        self.children: dict[str, subprocess.Popen[bytes] | Spawned] = {}        # {job id: what launch() has started}
        self.boot_id = read_boot_id()
        # screen and bash start sooner without a locale; who attaches brings one.
        path = keep_needed(self.launcher.path, RUNNER_PROGRAMS)
        self.environ = {**self.launcher.environ(), "LC_ALL": "C", "PATH": path}
        self.look_for_programs()
        withhold_descriptors()

    def launch(self, job: Job, script: str, handles: Sequence[int] = ()) -> str | None:
        """Start a job's script; return the PID.NAME of its session, if it has one.  Raises: OSError.

        `handles`: open files for it, of a launcher that passes them.
        """
        command, name = ["bash", script, str(job.attempt)], f"{self.launcher.session_prefix}{job.id}"
        argv = self.launcher.argv(name, command, is_daemon=False)
        more = (job.nice or 0) - os.getpriority(os.PRIO_PROCESS, 0)
        if more > 0:
            argv = ["nice", "-n", str(more), *argv]
        with on_cpus(job.cpus):
            child = self.children[job.id] = spawn(self.places.get(argv[0], argv[0]), argv, self.environ, handles)
        if not self.launcher.session_prefix:
            return None
        self.processes.set_aside(child.pid)
        return f"{child.pid}.{name}"

    def look_for_programs(self) -> None:
        """Find what starts jobs: off the loop and the requests, as a folder may hang."""
        names = [name for name in ("bash", "nice", self.launcher.program) if name]
        self.places = find_programs(names, self.launcher.path)

    def has_bash(self) -> bool:
        """Whether job.sh can be run, as was seen last."""
        return "bash" in self.places

    def find_job_python(self, path: str, now: float) -> str | None:
        """The Python of a job with this PATH; None: it has none."""
        return find_job_python(path, int(now // 60))

    def count_oom_kills(self) -> int | None:
        return count_oom_kills()

    def is_going_down(self) -> bool:
        """Whether the machine is being shut down, as far as systemd says."""
        with contextlib.suppress(NexusError):
            return run(["systemctl", "is-system-running"], 5).output.strip() == "stopping"
        return False

    def reap(self) -> list[str]:
        """The jobs for which what launch() started has ended since the last call."""
        alive = {job_id: child for job_id, child in self.children.items() if child.poll() is None}
        ended, self.children = [job_id for job_id in self.children if job_id not in alive], alive
        return ended

"""The thread that reads the GPUs of a machine, and the memory that its jobs use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..formats.nvidia_smi import drop_doubles, parse_visible_devices
from ..formats.proc import Process
from ..machine.clock import Backoff, Clock
from ..machine.leases import Leases
from ..machine.machine import Machine
from ..machine.processes import TICK_S, find_process_user, measure_memory
from ..machine.search_path import find_program
from ..opening import TYPE_CHECKING
from ..values.config import Config
from ..values.errors import NexusError
from ..values.gpu import Gpu, GpuProcess
from ..values.job import Job, Usage
from ..values.value import Value, replace

if TYPE_CHECKING:
    import logging

TROUBLE_INTERVAL_S = 30.0       # the longest pause before a failed query is repeated
SMI_WAIT_S = 10.0               # a refresh waits so long; then it uses the last readings
LEASE_BACKOFF_S = (5.0, 60.0)   # first and longest time without new GPUs after a lease failed
PROBE_BACKOFF_FACTOR = 10       # pause after nvidia-smi or squeue, as a multiple of its run time
MAX_PROBE_PAUSE_S = 120.0       # but never longer: one slow run says little of the next


def find_probe_pause_s(refresh_s: float, took_s: float) -> float:
    """The pause after a look at the machine that took so long."""
    return max(refresh_s, min(PROBE_BACKOFF_FACTOR * took_s, MAX_PROBE_PAUSE_S))


class Observation(Value):
    """What a GpuSource told, or why it told nothing."""
    gpus: tuple[Gpu, ...]
    error: str | None
    hint: str
    began_at: float                 # monotonic
    took_s: float


class JobUsage(Value):
    """The resources that a running job uses, as of the last refresh."""
    samples: Usage = Usage()
    rss_mib: float | None = None
    cpu_percent: float | None = None
    cpu_read: tuple[float, float] | None = None         # (CPU seconds of its processes, monotonic time of the reading)
    look_count: int = 0                                 # readings in mean_gpu_util

    def add(self, processes: Sequence[Process], rss_mib: float | None, gpu_mem_mib: float, loads: Sequence[float],
            now: float) -> JobUsage:
        """The usage after another reading.  `loads`: its GPUs' utilization in percent."""
        cpu_s = sum(process.cpu_ticks for process in processes) * TICK_S
        former_s, at = self.cpu_read or (0.0, now)
        count = self.look_count + bool(loads)
        # CPU time is a maximum too: a process that ends takes its time with it.
        latest = {"peak_rss_mib": rss_mib, "cpu_seconds": cpu_s, "peak_gpu_mem_mib": gpu_mem_mib or None}
        samples = {name: max(number, getattr(self.samples, name) or 0.0)
                   for name, number in latest.items() if number is not None}
        if loads:
            former = self.look_count * (self.samples.mean_gpu_util or 0.0)
            samples["mean_gpu_util"] = (former + sum(loads) / len(loads)) / count
        cpu_percent = 100 * max(0.0, cpu_s - former_s) / (now - at) if now > at else None
        return JobUsage(replace(self.samples, **samples), rss_mib, cpu_percent, (cpu_s, now), count)


class Observer:
    """The GPUs of the machine that this process runs on, who uses them, and what jobs take there."""

    def __init__(self, machine: Machine, clock: Clock, config: Config, log: logging.Logger,
                 visible_devices: str | None) -> None:
        self.machine, self.clock, self.config, self.log, self.visible_devices = (
            machine, clock, config, log, visible_devices)
        self.observation = Observation(
            (), f"{machine.gpu_source.program} has not answered yet", machine.gpu_source.slow_hint, 0.0, 0.0)
        self.latest = self.observation                      # from probe(); take_in() copies it
        self.gpus: tuple[Gpu, ...] = ()                     # with the jobs and users of their processes
        self.released_at: dict[str, float] = {}             # {GPU uuid: monotonic time when a job of ours left it}
        # Other threads read these without a lock: values are replaced, or one key.
        self.usage: dict[str, JobUsage] = {}                # of running jobs
        self.members: Mapping[str, Sequence[Process]] = {}  # {attempt_key: its processes}
        self.misplaced: dict[str, str] = {}                 # {attempt_key: that it uses what it was not given}
        self.memory_mib: Mapping[str, float | None] = {}    # {attempt_key: its host memory}
        self.oom_kills: tuple[int | None, ...] = ()         # Machine.count_oom_kills() at the last two refreshes
        self.lease_holders: Mapping[str, str] = {}          # {GPU uuid: the user whose nexus holds it}
        self.lease_error: NexusError | None = None          # why the leases could not be read
        self.lease_backoff = Backoff(*LEASE_BACKOFF_S)      # jobs get no GPU until it is over

    def probe(self, may_lack: bool) -> float:
        """Ask for the GPUs once; return the seconds until the next time.  `may_lack`: the program may be missing."""
        began, refresh_s = self.clock.monotonic(), self.config.service.refresh_rate_seconds
        earlier = {gpu.uuid: replace(gpu, fault=None) for gpu in self.latest.gpus}          # the last good reading
        gpus, words, hint = tuple(earlier.values()), None, ""
        try:
            gpus = tuple(drop_doubles(self.machine.gpu_source.query_gpus(earlier)))
        except NexusError as error:
            if not may_lack or find_program(self.machine.gpu_source.program):
                words, hint = error.message, error.hint
        took_s = self.clock.monotonic() - began
        if self.visible_devices is not None:
            visible = parse_visible_devices(self.visible_devices, gpus)
            gpus = tuple(replace(gpu, is_withheld=gpu not in visible) for gpu in gpus)
        self.latest = Observation(gpus, words, hint, began, took_s)
        pause_s = find_probe_pause_s(refresh_s, took_s)
        return min(pause_s, TROUBLE_INTERVAL_S) if words else pause_s

    def take_in(self, running: Sequence[Job]) -> bool:
        """Take a new reading; find the owners of GPU processes, and what the running jobs take.  False: none is new."""
        if self.latest is self.observation:
            return False
        self.observation = self.latest
        self.oom_kills = (*self.oom_kills[-1:], self.machine.count_oom_kills())
        here = [job for job in running if job.current.boot_id == self.machine.boot_id]
        members = self.machine.processes.find_members(here, is_refresh=True)
        self.misplaced = {job.attempt_key: self.misplaced.get(job.attempt_key, "") for job in running}
        self.annotate(running)
        self.measure_jobs(here, members)
        return True

    def annotate(self, jobs: Iterable[Job], is_seen: bool = False) -> None:
        """Find who uses the GPUs.  `jobs`: those that run here.  `is_seen`: who has which lease was just seen."""
        observation, gpus = self.observation, []
        running = {job.id: job for job in jobs}
        held = {uuid for job in running.values() for uuid in job.current.gpu_uuids}
        if observation.gpus and self.machine.leases and not is_seen:
            self.look_at_leases(self.machine.leases, running.values())
        for gpu in observation.gpus:
            # Our job left after the reading: its memory is free.  Unless told per process, memory in use is unknown.
            was_left = self.released_at.get(gpu.uuid, float("-inf")) >= observation.began_at
            processes = tuple(self.annotate_processes(gpu, running, was_left or gpu.uuid in held))
            is_itemized = bool(processes) and all(process.memory_mib is not None for process in processes)
            is_unknown = was_left and not is_itemized and not self.config.gpu.min_free_mem_mib
            gpus.append(replace(
                gpu, memory_used_mib=None if is_unknown else gpu.memory_used_mib, processes=processes,
                lease_holder=self.lease_holders.get(gpu.uuid)))
        self.gpus = tuple(gpus)

    def look_at_leases(self, leases: Leases, running: Iterable[Job]) -> None:
        """Find which GPUs others have, and have back those leases of the running jobs that somebody has removed."""
        # A runner gives up its leases when its command has ended.
        used = {uuid: job.id for job in running if job.current.pid and job.current.processes_left is None
                for uuid in job.current.gpu_uuids}
        former = self.lease_holders
        try:
            self.lease_holders, self.lease_error = leases.find_holders(
                [gpu.uuid for gpu in self.observation.gpus], used), None
        except NexusError as error:
            if self.lease_error is None:
                self.log.error("No GPU can be given out: %s (%s)", error.message, error.hint)
            self.lease_error = error
            return
        taken = [uuid for uuid in used if self.lease_holders.get(uuid, former.get(uuid)) != former.get(uuid)]
        for uuid in (*leases.lost, *taken):
            now = f"the nexus of {self.lease_holders[uuid]} has it" if uuid in taken else "it is held again"
            self.log.warning("The lease of job %s on %s was lost (does somebody remove files from %s?): %s", used[uuid],
                             uuid, leases.folder, now)

    def see_leases(self, running: Sequence[Job]) -> bool:
        """Look between two readings at the leases that no job of ours has; return whether others have them otherwise.

        What others have given back is as good as released by a job of ours: what the reading tells of its users is
        over.  A lease of ours may be back before this service knows that its job has ended: a reading looks at those.
        """
        former, held = self.lease_holders, {uuid for job in running for uuid in job.current.gpu_uuids}
        if self.machine.leases:
            with contextlib.suppress(NexusError):       # a reading tells of it
                self.lease_holders = {
                    **{uuid: holder for uuid, holder in former.items() if uuid in held},
                    **self.machine.leases.find_holders([gpu.uuid for gpu in self.gpus if gpu.uuid not in held])}
        if self.lease_holders == former:
            return False
        released = [uuid for uuid in former if uuid not in self.lease_holders]
        self.released_at.update(dict.fromkeys(released, self.clock.monotonic()))
        self.annotate(running, is_seen=True)
        return True

    def annotate_processes(self, gpu: Gpu, running: Mapping[str, Job], is_ours: bool) -> Iterator[GpuProcess]:
        """Add each process's job or user.  `is_ours`: a job of ours has the GPU, or had it at the reading."""
        for process in gpu.processes:
            owner, found = self.machine.processes.owner_of(process.pid), self.machine.processes.find(process.pid)
            if owner is None and found is None and is_ours:
                continue            # a short process of our job, already gone
            # A job that ignores CUDA_VISIBLE_DEVICES and uses a GPU that it was not given counts there as foreign.
            job = running.get(owner or "") if found else None
            if owner and (job is None or gpu.uuid in job.current.gpu_uuids):
                yield replace(process, job_id=owner)
            else:
                if job and not self.misplaced.get(job.attempt_key):
                    fault = (f"computes on GPU {gpu.place}, which it was not given (it sets CUDA_VISIBLE_DEVICES "
                           "itself?)")
                    self.misplaced[job.attempt_key] = fault
                    self.log.warning("Job %s %s", job.id, fault)
                yield replace(process, user=find_process_user(process.pid), name=found.name if found else None)

    def find_usage(self, job_id: str) -> JobUsage:
        return self.usage.get(job_id, JobUsage())

    def measure_jobs(self, running: Iterable[Job], members: Mapping[str, Sequence[Process]]) -> None:
        now = self.clock.monotonic()
        self.members = {job.attempt_key: members.get(job.id, ()) for job in running}
        for job in running:
            gpus = [gpu for gpu in self.gpus if gpu.uuid in job.current.gpu_uuids]
            used = sum(process.memory_mib or 0.0
                       for gpu in gpus for process in gpu.processes if process.job_id == job.id)
            loads = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
            self.usage[job.id] = self.find_usage(job.id).add(
                members.get(job.id, ()), self.memory_mib.get(job.attempt_key), used, loads, now)

    def measure_memory(self) -> float:
        """Measure the host memory of running jobs; return the seconds until the next call: this one may take long."""
        began = self.clock.monotonic()
        self.memory_mib = {key: measure_memory(self.machine.psutil, processes)
                           for key, processes in self.members.items()}
        took_s = self.clock.monotonic() - began
        return find_probe_pause_s(self.config.service.refresh_rate_seconds, took_s)

    def find_error(self) -> str | None:
        """Return why jobs get no GPU now, or None."""
        error = self.find_lease_error()
        return self.find_gpu_error() or (error.message if error else None)

    def find_lease_error(self) -> NexusError | None:
        return self.lease_error or self.lease_backoff.find_error(self.clock.monotonic())

    def find_gpu_error(self) -> str | None:
        """Return why the GPUs cannot be read, or that it takes much longer than before; or None."""
        observation = self.observation
        silent_s = self.clock.monotonic() - observation.began_at - observation.took_s
        pause_s = find_probe_pause_s(self.config.service.refresh_rate_seconds, observation.took_s)
        longest_s = pause_s + max(SMI_WAIT_S, 2 * observation.took_s)
        is_silent = silent_s > longest_s
        return observation.error or (
            f"{self.machine.gpu_source.program} has not answered for {silent_s:.0f} s" if is_silent else None)

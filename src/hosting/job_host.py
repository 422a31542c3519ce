"""A JobHost starts, follows and ends attempts on the machine that this process runs on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from ..formats.runner_events import News, Result, RunnerEvent
from ..machine.clock import Backoff
from ..machine.disk import Disk, describe_disk_error, is_folder, is_machine_fault, write_atomic, write_new
from ..machine.git import find_commit
from ..machine.job_files import make_job_folder, make_way
from ..machine.layout import Layout
from ..runner.environment import build_environment, fill_cuda_numbers
from ..runner.script import build_script
from ..values.causes import LAUNCH
from ..values.errors import NexusError
from ..values.job import Job, Limits
from ..values.state import with_facts
from ..values.text import format_line
from ..values.value import replace
from .events import WATCH_INTERVAL_S
from .hosted_job import HostedJob, Order, Progress
from .observer import Observer

HOLD_S = (5.0, 300.0)           # backoff after the machine could not start a job: at first, at most


def find_free_port(number: int) -> int:
    """A TCP port for a job, below those that Linux gives out: no other of the jobs that run at once has it."""
    import socket
    for attempt in range(100):
        port = 20000 + (number + os.getuid() * 101 + attempt * 997) % 10000
        with contextlib.suppress(OSError), socket.socket() as line:
            line.bind(("", port))
            break
    return port


class JobHost:
    """Starts, follows and ends attempts on the machine that this process runs on."""

    def __init__(self, observer: Observer, layout: Layout, disk: Disk, umask: int,
                 get_limits: Callable[[Job], Limits], run_guarded: Callable[..., None], recorder: int) -> None:
        self.observer, self.layout, self.disk = observer, layout, disk
        self.umask = umask                              # for jobs without one
        self.get_limits = get_limits                    # of a job: its head decides
        self.recorder = recorder                        # build_script()
        self.machine, self.clock, self.config, self.log = (
            observer.machine, observer.clock, observer.config, observer.log)
        self.run_guarded = run_guarded                  # what is wrong with one job must not hold up the others
        self.begun: list[HostedJob] = []                # whose directories' commits are to be read, in a thread
        self.call_reader: Callable[[], None] = lambda: None
        self.hosted: dict[str, HostedJob] = {}          # {attempt_key: the attempt here}; one of a job has processes
        self.checked_at = float("-inf")                 # monotonic
        self.start_backoff = Backoff(*HOLD_S)           # nothing is started here during it, nor on nodes or in Slurm

    def start(self, order: Order) -> bool:
        """Start an attempt, or have its progress say why not; return whether it begins.

        Raises: OSError, NexusError; then it is for fail(), with judge_start_error().
        """
        job, leases = order.job, self.machine.leases if order.job.current.gpu_uuids else None
        reason = self.start_backoff.find_error(self.clock.monotonic())
        if not reason and leases:
            reason = self.observer.find_error()
        if reason:
            return self.fail(job, News(requeue=reason))
        try:
            if leases:
                leases.take(job.id, job.current.gpu_uuids)
        except NexusError as error:                     # not the job's fault
            if error.kind != "conflict":
                self.observer.lease_backoff.fail(self.clock.monotonic(), error)
            return self.fail(job, News(requeue=error.message))
        handles = leases.handles(job.id) if leases and self.machine.launcher.passes_handles else ()
        script = self.write_script(order, leases.paths(job.id) if leases and not handles else (), handles)
        hosted = self.hosted[job.attempt_key] = HostedJob(self, job)
        hosted.launched_at = self.clock.monotonic()
        hosted.session = self.machine.launch(job, script, handles)
        self.start_backoff.succeed()
        self.begun.append(hosted)
        self.call_reader()
        return True

    def read_commits(self) -> None:
        """In a thread: read at which commits the directories are of jobs that have just begun."""
        while self.begun:
            hosted = self.begun.pop(0)
            hosted.commit = find_commit(self.disk, hosted.job)

    def fail(self, job: Job, news: News) -> bool:
        """Note an attempt that was not started, so that nobody looks for its runner.  Returns False."""
        hosted = self.hosted[job.attempt_key] = HostedJob(self, job)
        hosted.requeue, hosted.result, hosted.is_over = news.requeue, news.result, news.result is not None
        return False

    def judge_start_error(self, error: OSError | NexusError, job: Job) -> News:
        """What becomes of a job that could not be started.  A fault of the machine keeps all others waiting, too."""
        disk_error = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(disk_error, OSError):             # its script has changed or is gone
            return News(result=Result(None, None, 0.0, LAUNCH, format_line(str(error), 300)))
        path = disk_error.filename or self.layout.folder_of(job)
        message = format_line(describe_disk_error(disk_error, "start it with", path).message, 300)
        is_log_dir_gone = not is_folder(self.disk, os.path.dirname(self.layout.folder_of(job)))     # not mounted?
        if not is_machine_fault(disk_error) and not is_log_dir_gone:
            return News(result=Result(None, None, 0.0, LAUNCH, message, may_pass=True))
        self.start_backoff.fail(self.clock.monotonic(), f"{message}; it is tried again")
        self.log.error("Nothing is started for %.0f s: %s", self.start_backoff.rest_s, message)
        return News(requeue=message)

    def write_script(self, order: Order, leases: Sequence[tuple[str, str, str]] = (),
                     handles: Sequence[int] = ()) -> str:
        """Write a job's folder and its job.sh; return the path of that.  Raises: OSError."""
        job, gpus = order.job, self.observer.observation.gpus
        folder = self.layout.folder_of(job)
        make_job_folder(self.disk, folder)
        if order.code is not None:                      # an earlier attempt may have changed the file
            path = os.path.join(job.cwd, "main.py")
            make_job_folder(self.disk, job.cwd)
            make_way(self.disk, path)
            write_atomic(self.disk, path, [order.code], is_synced=False)
        job = replace(fill_cuda_numbers(job, gpus), umask=self.umask if job.umask is None else job.umask)
        environ = build_environment(job, order.variables, gpus, find_free_port(job.number))
        text = build_script(job, environ, self.layout, leases, handles, self.recorder)
        script = os.path.join(folder, "job.sh")
        if not write_new(self.disk, script, text, 0o700):       # a shell may be reading that of an earlier attempt
            write_atomic(self.disk, script, [text], 0o700, is_synced=False)
        return script

    def tick(self, jobs: Sequence[Job], events: Sequence[RunnerEvent] = ()) -> list[tuple[Job, Progress]]:
        """Take in events, check files and processes, end what must end; return what is known of each job."""
        now, hosted = self.clock.monotonic(), [self.find(job) for job in jobs]
        told: dict[tuple[str, int], HostedJob] = {}
        for hosted_job in hosted if events else ():
            if not hosted_job.requeue:
                told[hosted_job.job.id, hosted_job.job.attempt] = hosted_job
        for event in events:
            addressed = told.get((event.job_id, event.attempt))
            if addressed:
                addressed.hear(event)
        gone = self.machine.reap()                      # each time: the end of a job looks at all that are dead
        is_time = now - self.checked_at >= WATCH_INTERVAL_S
        if is_time:
            self.checked_at = now
        for hosted_job in hosted:
            if is_time or hosted_job.job.id in gone:
                self.run_guarded(f"looking at job {hosted_job.job.id}", hosted_job.check, hosted_job.job.id in gone)
        for hosted_job in hosted:
            hosted_job.follow_stop(now)
        self.end_processes([hosted_job for hosted_job in hosted if hosted_job.is_due(now)], now)
        return [(job, hosted_job.progress) for job, hosted_job in zip(jobs, hosted)]

    def find(self, job: Job) -> HostedJob:
        hosted = self.hosted.get(job.attempt_key)
        if not hosted:
            hosted = self.hosted[job.attempt_key] = HostedJob(self, job)
        hosted.job = job
        stop = hosted.limit_watch.stop
        if stop and not job.current.stop_cause:             # a full disk, where that cannot be recorded, spares no job
            hosted.job = with_facts(job, stop_cause=stop[0], stop_line=stop[1])
        return hosted

    def end_processes(self, due: Sequence[HostedJob], now: float) -> None:
        """End jobs with a stop_cause, and what ended commands have left; warn those whose time limit is near."""
        hosted = list(self.hosted.values())
        warned = [each for each in hosted if each.limit_watch.is_warning_due
                  and not (each.result or each.job.current.stop_cause)]
        if not due and not warned:
            return
        asked = dict.fromkeys((*due, *warned))
        # No process outlives a boot: is_here.
        here = [hosted_job.see_runner() for hosted_job in asked if hosted_job.is_here]
        others = [hosted_job.see_runner() for hosted_job in hosted if hosted_job.is_here and hosted_job not in asked]
        over = [hosted_job.job.id for hosted_job in hosted if hosted_job.result]
        members = self.machine.processes.find_members(here, over, others=others)
        for hosted_job in warned:
            hosted_job.limit_watch.is_warning_due = False
            self.run_guarded(f"warning job {hosted_job.job.id}", hosted_job.limit_watch.warn,
                             members.get(hosted_job.job.id, []))
        for hosted_job in due:
            self.run_guarded(f"ending job {hosted_job.job.id}", hosted_job.look_at_processes,
                             members.get(hosted_job.job.id, []), now)

    def find_next_look_s(self) -> float:
        """Seconds until processes that are being ended must be looked at again; infinite: there are none."""
        due = [hosted_job.termination.next_look_at for hosted_job in self.hosted.values()
               if hosted_job.termination.began_at is not None and not hosted_job.is_over]
        return max(0.0, min(due, default=float("inf")) - self.clock.monotonic())

    def forget(self, job: Job) -> None:
        """Drop an attempt that is over."""
        self.observer.released_at.update(dict.fromkeys(job.current.gpu_uuids, self.clock.monotonic()))
        self.hosted.pop(job.attempt_key, None)
        leases = self.machine.leases
        if leases:
            leases.close_own(job.id)
            for uuid in leases.kept.keys() & job.current.gpu_uuids:
                if not any(uuid in other.job.current.gpu_uuids for other in self.hosted.values()):
                    leases.drop(uuid)

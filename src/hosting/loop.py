"""A HostLoop drives a machine's JobHost and Observer: the service here, an agent on a node.

The service sees them as a Backend, which reports news.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..formats.runner_events import News, RunnerEvent
from ..machine.clock import Clock
from ..machine.disk import Disk
from ..machine.layout import Layout
from ..machine.machine import Machine
from ..opening import TYPE_CHECKING
from ..schedule.limits import find_limits
from ..values.changes import add_notes
from ..values.config import Config
from ..values.errors import NexusError, describe_exception
from ..values.job import Job, Limits
from ..values.value import replace
from .events import WATCH_INTERVAL_S, RunnerEvents, Worker
from .hosted_job import Progress
from .job_host import JobHost
from .observer import Observer

if TYPE_CHECKING:
    import logging
    from typing import Any

    from ..service.service import Service


class HostLoop:
    """The loop of a process that looks after jobs on its machine: the service, or the agent of a node.

    The FIFO (a job started or ended), wake(), and timeouts wake it.  Threads read the GPUs and measure memory, so that
    neither holds up the loop, or the other.
    """

    def __init__(self, config: Config, layout: Layout, machine: Machine, clock: Clock, disk: Disk, log: logging.Logger,
                 visible_devices: str | None, umask: int, recorder: int = 0) -> None:
        if not config.jobs.cpu_slots:
            config = replace(config, jobs=replace(config.jobs, cpu_slots=machine.cpu_count))
        self.config, self.layout, self.machine, self.clock, self.disk, self.log = (
            config, layout, machine, clock, disk, log)
        self.is_stopping = False
        self.failure_count = 0
        self.failed_at = float("-inf")                  # monotonic
        self.last_failure = ""
        self.events = RunnerEvents(layout.events_file, log)
        self.gpu_worker: Worker | None = None           # reads them
        self.observer = Observer(machine, clock, config, log, visible_devices)
        self.job_host = JobHost(self.observer, layout, disk, umask, self.get_limits, self.run_guarded, recorder)
        self.commit_worker = Worker(self, "reading commits", self.job_host.read_commits)
        self.job_host.call_reader = self.commit_worker.wanted.set

    def get_limits(self, job: Job) -> Limits:
        return find_limits(job, self.config.jobs)

    @property
    def may_lack_gpus(self) -> bool:
        """Whether the machine may be without a GPU, and without what reads them."""
        return False

    @property
    def disk_error(self) -> NexusError | None:
        """Why nothing can be recorded now, which is in the log; other words of that are not."""
        return None

    def begin_workers(self, *others: Worker) -> None:
        self.gpu_worker = Worker(self, "asking for the GPUs", self.probe)
        memory_worker = Worker(self, "measuring jobs' memory", self.observer.measure_memory)
        for worker in (self.gpu_worker, memory_worker, self.commit_worker, *others):
            worker.thread.start()

    def probe(self) -> float:
        """Read the GPUs once; return the seconds until the next time."""
        pause_s = self.observer.probe(self.may_lack_gpus)
        self.wake()
        return pause_s

    def wake(self) -> None:
        self.events.wake()

    def turn(self) -> None:
        """Wait until something is to be done, and do it."""
        self.tick(self.events.wait(self.find_wait_s()))

    def tick(self, runner_events: Sequence[RunnerEvent]) -> None:
        """Run one tick.  A phase that fails is logged and counted; the other phases still run."""
        raise NotImplementedError

    def find_wait_s(self) -> float:
        """Seconds until something must be looked at; longer after a failure."""
        if self.clock.monotonic() - self.failed_at < WATCH_INTERVAL_S:
            return WATCH_INTERVAL_S
        return min(WATCH_INTERVAL_S, self.find_due_s(), self.job_host.find_next_look_s())

    def find_due_s(self) -> float:
        """Seconds until something is due besides what the jobs here need; infinite: nothing is."""
        raise NotImplementedError

    def run_guarded(self, doing: str, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act`; log an error instead of raising it."""
        try:
            act(*arguments)
        except NexusError as error:
            if self.disk_error is None:
                self.log.warning("%s: %s", doing, error.message)
        except Exception as error:
            self.fail(doing, error)

    def fail(self, doing: str, error: BaseException) -> None:
        self.failure_count += 1
        failure, before = f"{doing}: {describe_exception(error)}", self.failed_at
        self.failed_at = self.clock.monotonic()
        if failure != self.last_failure or self.failed_at - before > 60:    # repeated errors must not fill the disk
            self.log.error("Internal error while %s", doing, exc_info=error)
        self.last_failure = failure


if TYPE_CHECKING:
    Finding = tuple[Job, News]


class Component:
    """A part of the service with its own duty; it shares the service's machine, store and clock."""

    def __init__(self, service: Service) -> None:
        self.service, self.config, self.layout, self.store = service, service.config, service.layout, service.store
        self.machine, self.clock, self.disk = service.machine, service.clock, service.disk
        self.log, self.environ = service.log, service.environ


class Backend(Component):
    """Where jobs run: this machine, the nodes, or Slurm.  The loop polls it, and has it start what is recorded.

    A job that must end is recorded too: it has a stop_cause, and its backend ends it.
    """
    name = ""                                           # of the machine or the cluster; "": this machine

    def has(self, job: Job) -> bool:
        """Whether the job's attempt belongs to this backend."""
        raise NotImplementedError

    def start(self, job: Job, variables: Mapping[str, str] | None) -> bool:
        """Start an attempt whose intent is on disk, with its submitter's `variables`; return whether it begins now.

        poll() tells of one that cannot be started.  Raises: OSError, NexusError.
        """
        raise NotImplementedError

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterable[Finding]:
        """Return what is not recorded yet of attempts.  Runner events may concern any backend's jobs."""
        raise NotImplementedError


def list_news(seen: Iterable[tuple[Job, Progress]]) -> Iterator[Finding]:
    """What is not recorded yet of jobs' progress.  A Result comes when none of the job's processes is left."""
    for job, progress in seen:
        facts: dict[str, Any] = {}
        if progress.stop and not job.current.stop_cause:
            facts.update(stop_cause=progress.stop[0], stop_line=progress.stop[1])
        if progress.pid is not None and job.current.pid is None:
            facts.update(pid=progress.pid, pid_started=progress.pid_started, session=progress.session)
        if progress.commit and job.current.commit is None:
            facts.update(commit=progress.commit)
        notes = add_notes(job.current.notes, progress.notes)
        if (notes, progress.processes_left) != (job.current.notes, job.current.processes_left):
            facts.update(processes_left=progress.processes_left, notes=notes)
        if progress.requeue:
            yield job, News(requeue=progress.requeue)
        elif facts or progress.is_over:
            yield job, News(facts, progress.result if progress.is_over else None)


class MachineBackend(Backend):
    """Jobs that run on one machine: this one, or a node."""

    def has(self, job: Job) -> bool:
        return job.current.slurm_key is None and job.current.node == self.name

    def list_own(self) -> list[Job]:
        return [job for job in self.service.running_jobs() if self.has(job)]


class Local(MachineBackend):
    """This machine."""

    def start(self, job: Job, variables: Mapping[str, str] | None) -> bool:
        return self.service.job_host.start(self.service.starter.make_order(job, variables))

    def poll(self, runner_events: Sequence[RunnerEvent]) -> Iterator[Finding]:
        job_host: JobHost = self.service.job_host
        jobs = [job for job in self.store.state.live.values()       # and those that could not be given to their backend
                if self.has(job) or job.attempt_key in job_host.hosted]
        return list_news(job_host.tick(jobs, runner_events))

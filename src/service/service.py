"""One loop: observe, plan, carry out.

The FIFO (a job started or ended), requests, and timeouts wake it.  Each tick polls the backends, which end
the jobs that must stop, records in one transaction which jobs ended and which start next, then starts them.
A separate thread reads the GPUs and passes the readings to the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..formats.runner_events import RunnerEvent
from ..hosting.events import Worker
from ..hosting.loop import Backend, HostLoop, Local
from ..hosting.pool import NodePool
from ..hosting.slurm import SlurmBackend
from ..hosting.termination import RUNNER_TIMEOUT_S, TERMINATION_INTERVAL_S
from ..machine.clock import Clock
from ..machine.disk import Disk, find_user, read_bytes, remove_file
from ..machine.layout import Layout, hash_code
from ..machine.machine import Machine
from ..machine.processes import CONTAINER
from ..opening import TYPE_CHECKING
from ..runner.environment import find_visible_devices, list_inherited
from ..schedule.ends import MACHINE_DOWN
from ..schedule.plan import plan
from ..schedule.reasons import Plan, Reason
from ..store.store import Store
from ..values.causes import EXIT, KILLED, PREEMPTED, REBOOT
from ..values.config import Config
from ..values.errors import NexusError
from ..values.job import CANCELLED, COMPLETED, FAILED, FINAL, Job
from ..values.state import Put, State, change_job, with_facts
from .access import Identity
from .admission import Admission
from .cancellation import Cancellation
from .disk_use import DiskUse
from .editing import Editor
from .estimates import Estimates
from .explanation import Explainer
from .gpu_history import GpuHistory
from .gpu_watch import GpuWatch
from .groups import Groups
from .health import Health
from .hooks import Hooks
from .housekeeping import Housekeeping
from .job_serializer import JobSerializer
from .jobs_file import JobsFile
from .log_watch import LogWatch
from .outcomes import Outcomes
from .overview import Overview
from .script_rules import ScriptRules
from .starter import Starter
from .status import ServiceStatus
from .transactions import Transactions
from .turn_taking import TurnTaking
from .validation import Validator

if TYPE_CHECKING:
    import logging
    from typing import Any

    from ..values.state import Changes


class Service(HostLoop):
    """The service: its parts take requests, watch, start and end jobs; its loop drives them."""

    def __init__(self, config: Config, layout: Layout, store: Store, machine: Machine, clock: Clock, disk: Disk,
                 log: logging.Logger, environ: Mapping[str, str]) -> None:
        from collections import Counter
        self.is_slurm = config.jobs.launcher == "slurm"
        self.visible_devices = None if self.is_slurm else find_visible_devices(environ)
        self.umask = int(environ.get("NEXUS_UMASK", "022"), 8)      # for hooks, and for jobs without one
        super().__init__(config, layout, machine, clock, disk, log, self.visible_devices, self.umask, os.getpid())
        self.store = store
        self.environ = list_inherited(environ)          # `nexus serve` may be typed in a job
        self.former_python = environ.get("NEXUS_FORMER_PYTHON", "")     # in whose place the supervisor took another
        self.former_port: int | None = None                 # that it had until lately, and somebody else has now
        self.lost_host = ""                                 # [service] host, when this machine has it no more
        self.changed_files = environ.get("NEXUS_CHANGED", "")           # in whose place a crash left it their copies
        self.inherited = ""                             # describe_inherited()
        self.user = find_user(os.geteuid())
        self.owner = Identity(self.user, self.user)
        self.hash = file_hash(disk)                         # of the running code: the file may change later
        self.url = ""                                       # where it listens, once it does
        self.node = store.machine_id.partition(CONTAINER)[0]
        self.started_monotonic = clock.monotonic()
        self.is_going_down = False
        self.plan = Plan(reason=Reason("node-down", "", "the service has not read the GPUs yet"))
        self.turned_at = clock.monotonic()                  # when the last tick ended
        self.tick_s = 0.0                                   # how long that took
        # Jobs that have ended since this service started, for GET /metrics
        self.end_counts = Counter({(COMPLETED, ""): 0, (FAILED, EXIT): 0, (CANCELLED, KILLED): 0})
        store.note_status_changes = self.note_status_changes
        self.hooks = Hooks(self)
        self.jobs_file = JobsFile(self, config.jobs.jobs_file) if config.jobs.jobs_file else None
        self.scripts = ScriptRules(self)
        self.validator = Validator(self)
        self.transactions = Transactions(self)
        self.admission = Admission(self)
        self.editor = Editor(self)
        self.cancellation = Cancellation(self)
        self.gpu_watch = GpuWatch(self)
        self.gpu_history = GpuHistory(self)
        self.turn_taking = TurnTaking(self)
        self.outcomes = Outcomes(self)
        self.starter = Starter(self)
        self.local = Local(self)
        self.pool = NodePool(self)
        self.disk_use = DiskUse(self)
        self.housekeeping = Housekeeping(self)
        self.log_watch = LogWatch(self)
        self.health = Health(self)
        self.estimates = Estimates(self)
        self.explainer = Explainer(self)
        self.job_serializer = JobSerializer(self)
        self.groups = Groups(self)
        self.status = ServiceStatus(self)
        self.overview = Overview(self)
        has_slurm_jobs = any(job.current.slurm_key for job in store.state.live.values())
        self.cluster = SlurmBackend(self) if self.is_slurm or has_slurm_jobs else None

    @property
    def may_lack_gpus(self) -> bool:
        return bool(self.pool.nodes)

    @property
    def disk_error(self) -> NexusError | None:
        return self.store.last_error

    def change(self, yield_changes: Callable[[State], Iterable[Put]], message: str, *details: object) -> Any:
        """Commit the changes of a request, log the message, wake the loop.  Raises: what Store.update() raises."""
        answer = self.store.update(yield_changes)
        self.log.info(message, *details)
        self.wake()
        return answer

    def stop(self) -> None:
        """End the loop.  Safe in a signal handler."""
        self.is_stopping = True
        self.wake()

    def withdraw(self) -> None:
        """Remove what clients find this service by.  Raises: unavailable."""
        for path in (self.layout.service_file, self.layout.socket_file):
            remove_file(self.disk, path)

    def note_status_changes(self, jobs: Sequence[Job]) -> None:
        """The store calls this with jobs whose status has changed."""
        if not self.log_watch.growths:
            self.log_watch.worker.wanted.set()
        self.hooks.note_status_changes(jobs)
        self.gpu_history.note_ends(jobs)
        for job in jobs:
            if job.status in FINAL:
                self.end_counts[job.status, job.current.cause or ""] += 1

    def running_jobs(self) -> list[Job]:
        return list(self.store.state.running.values())

    # The loop

    def run(self, lock: int) -> None:
        """Work until stop() is called, or until somebody has removed the home, or the lock that it holds there."""
        self.run_guarded("looking for jobs whose hook is due", self.hooks.begin)
        self.outcomes.adopt()
        self.begin_workers(Worker(self, "looking at the disks", self.health.look_at_disks),
                           Worker(self, "writing state.json", self.housekeeping.keep_state),
                           Worker(self, "trimming the history", self.housekeeping.trim_history),
                           self.hooks.worker, self.log_watch.worker, self.gpu_history.worker, self.disk_use.worker,
                           *(part.worker for part in (self.cluster, self.jobs_file) if part))
        while not self.is_stopping:
            self.turn()
            if not self.disk.stat(lock).st_nlink:
                self.log.warning("Service ended: %s was removed", self.layout.lock_file)
                return
        self.run_guarded("ending jobs", self.end_for_reboot)
        for node in self.pool.nodes.values():
            node.end()
        self.run_guarded("at the end", self.store.look_for_edit, self.housekeeping.apply_edit)
        self.run_guarded("at the end", self.outcomes.keep_samples)
        self.run_guarded("at the end", self.log_watch.end)
        self.run_guarded("at the end", self.gpu_history.end)
        self.run_guarded("at the end", self.turn_taking.end)

    def end_for_reboot(self) -> None:
        """When the machine goes down, let the jobs here save their work: systemd would kill them all at once."""
        if not self.local.list_own() or not self.machine.is_going_down():
            return
        self.is_going_down = True

        def end(state: State) -> Changes:
            for job in list(state.running.values()):
                hosted = self.job_host.hosted.get(job.attempt_key)
                is_over = job.id in self.outcomes.unrecorded or (hosted and hosted.result and not hosted.processes_left)
                if self.local.has(job) and not job.current.stop_cause and not is_over:
                    yield change_job(job, stop_cause=REBOOT, stop_line=MACHINE_DOWN)

        self.store.update(end)
        self.log.info("The machine goes down: its jobs are ended")
        give_up_at = self.clock.monotonic() + self.config.jobs.kill_grace_seconds + 2 * RUNNER_TIMEOUT_S
        while self.local.list_own() and self.clock.monotonic() < give_up_at:
            self.turn()

    def tick(self, runner_events: Sequence[RunnerEvent]) -> None:
        began = self.clock.monotonic()
        for backend in self.backends:
            self.run_guarded(f"hearing of jobs {backend.name or 'here'}", self.take_in, backend, runner_events)
        self.run_guarded("reading GPUs", self.gpu_watch.take_in_observation)
        self.run_guarded("looking for idle jobs", self.gpu_watch.look_for_idle_jobs)
        self.run_guarded("looking at nodes", self.pool.take_stock)
        self.run_guarded("looking for processes that jobs wait for", self.starter.release_waiting)
        self.run_guarded("hearing of other users' services", self.turn_taking.look)
        self.run_guarded("scheduling", self.record_ends_and_start)
        self.run_guarded("telling other users' services", self.turn_taking.note_plan, self.plan)
        self.turned_at = self.clock.monotonic()
        self.tick_s = self.turned_at - began

    def take_in(self, backend: Backend, runner_events: Sequence[RunnerEvent]) -> None:
        """Record the news of a backend: what is learned of jobs that go on together, of others with their ends."""
        learned: dict[str, Mapping[str, Any]] = {}
        for seen, news in backend.poll(runner_events):
            job = self.store.state.jobs.get(seen.id)
            if job and (job.attempt, job.status) == (seen.attempt, seen.status):        # else it will be seen again
                if news.is_end or job.current.slurm_key is not None:        # Slurm's thread goes on once it is recorded
                    self.run_guarded(f"hearing of job {job.id}", self.outcomes.take_news, job, news)
                else:
                    learned[job.id] = news.facts
        if learned:
            self.run_guarded("hearing of running jobs", self.outcomes.learn, learned)

    @property
    def backends(self) -> Sequence[Backend]:
        return (self.local, *self.pool.nodes.values(), *([self.cluster] if self.cluster else []))

    def find_due_s(self) -> float:
        if self.store.last_error:                           # it is tried again as after any failure
            return float("inf")
        if self.outcomes.unrecorded:
            return TERMINATION_INTERVAL_S
        until, turn_s = self.plan.delayed_until, self.turn_taking.find_due_s()
        return turn_s if until is None else min(turn_s, max(0.01, until - self.clock.now()))

    def record(self, job: Job, is_synced: bool = True, /, **facts: Any) -> None:
        """Change fields of a job, or of its last attempt.  Raises: unavailable."""
        self.store.update(lambda state: [change_job(state.jobs[job.id], **facts)], is_synced)

    def record_ends_and_start(self) -> None:
        """Record the ends of jobs and plan starts in one transaction; then start the jobs."""
        now, error, nodes = self.clock.now(), self.gpu_watch.find_gpu_error(), self.pool.view_nodes()
        over = dict(self.outcomes.unrecorded)
        evidence = {job.id: self.outcomes.gather_evidence(job, over[job.id])
                    for job in self.store.state.live.values() if job.id in over}
        reason = self.job_host.start_backoff.find_error(self.clock.monotonic()) or ""
        if self.is_going_down:
            reason = "the machine goes down"
        starting: list[tuple[Job, Mapping[str, str] | None]] = []

        def yield_changes(state: State) -> Changes:
            if self.store.last_error:                       # a harmless write tells whether the disk works again
                yield Put("facts", "paused_gpus", state.paused_gpus)
            ended = []
            for job_id, proof in evidence.items():          # only here a running job ends: it still runs
                if job := state.live.get(job_id):           # in Slurm's queue it may have been cancelled by now
                    job = with_facts(job, **self.outcomes.learned.get(job_id, {}))
                    yield from self.outcomes.end_attempt(state, job, over[job_id], proof, now)
                    ended.append((job, state.jobs[job_id]))
            planned = plan(state, self.gpu_watch.see_gpus(state), error, self.config, now, nodes, reason,
                           self.turn_taking.box)
            ends = [(job_id, f"job {by}, which is not preemptible,") for job_id, by in planned.preempted]
            ends += [(job_id, f"{user}, who waits,") for job_id, user in planned.yielded]
            for job_id, who in ends:
                yield change_job(state.jobs[job_id], stop_cause=PREEMPTED, stop_by=None,
                                 stop_line=f"{who} needs its GPUs")
            for start in planned.starts:
                yield self.starter.intend(state.jobs[start.job_id], start, now)
            jobs = [state.jobs[start.job_id] for start in planned.starts]
            starting.extend((job, state.environments.get(job.environment)) for job in jobs)
            return planned, ended

        self.plan, ended = self.store.update(yield_changes)
        for job_id, waiting_id in self.plan.preempted:
            self.log.info("Job %s is stopped and queued again: job %s needs its GPUs", job_id, waiting_id)
        for job_id, user in self.plan.yielded:
            self.log.info("Job %s is stopped and queued again: %s waits for its GPUs", job_id, user)
        for job_id in over:
            self.outcomes.unrecorded.pop(job_id, None)
        for before, after in ended:
            self.outcomes.forget(before)
            self.turn_taking.note_end(before, after.attempts[-1])
        for before, after in ended:         # in the log, an end stands before the start that it made possible
            self.outcomes.report_end(before, after)
        for job, variables in starting:
            self.run_guarded(f"starting job {job.id}", self.starter.start, job, variables)
        for uuid in dict.fromkeys(uuid for before, _ in ended for uuid in before.current.gpu_uuids):
            self.gpu_watch.guard_gpu(uuid)

    def tell(self, job: Job, message: str, *details: object) -> None:
        """Log a message about a running job; JSON logs get its fields too."""
        self.log.info(message, *details, extra={
            "job_id": job.id, "gpu_ids": list(job.current.gpu_indices), "required_gpus": job.gpus,
            "attempt": job.attempt})


def file_hash(disk: Disk) -> str:
    return hash_code(read_bytes(disk, os.path.abspath(__file__)))

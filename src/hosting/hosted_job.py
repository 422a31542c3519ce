"""A job that runs on this machine: whether it has begun and ended, what it uses, whether it must end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from ..formats.proc import Process
from ..formats.runner_events import Result, RunnerEvent
from ..machine.disk import find_status, is_machine_fault, write_atomic
from ..machine.job_files import make_job_folder
from ..machine.processes import TICK_S
from ..opening import TYPE_CHECKING
from ..runner.claims import read_claim, read_result, withdraw
from ..schedule.ends import ENDED_EARLY, MACHINE_DOWN, Claim, explain_kill
from ..schedule.limits import find_stop, find_warning
from ..schedule.signals import Work, choose_session, choose_warned
from ..values.causes import BOUNCE, LAUNCH, REBOOT, SESSION_LOST
from ..values.errors import NexusError
from ..values.job import Job, Limits, Use
from ..values.state import with_facts
from ..values.text import format_line, join_some
from ..values.value import Value, replace
from .termination import Termination

if TYPE_CHECKING:
    from ..values.job import Commit, Count, FilePath, Limit, Pid, Session, Ticks, Words
    from .job_host import JobHost

LAUNCH_TIMEOUT_S = 30.0         # what was launched and has no claim after this time will not begin

NO_PSUTIL = "max_memory_gb does not hold for it: psutil is missing there (python3 -m pip install psutil)"


class Progress(Value):
    """What a machine knows of an attempt there."""
    pid: Pid | None = None                      # of its job.sh, once that has claimed the attempt
    pid_started: Ticks | None = None
    session: Session | None = None
    result: Result | None = None                # its command has ended
    is_over: bool = False                       # and none of its processes is left
    requeue: Words = ""                         # it never began, and never will: why
    processes_left: Count | None = None         # that go on after its command; None: it has not ended
    notes: tuple[Words, ...] = ()               # what was ended after its command
    files: FilePath | None = None               # on a node: the folder with what it wrote into its checkout
    stop: tuple[Limit, Words] | None = None     # the limit that it has reached: find_stop()
    commit: Commit | None = None                # that its directory was at when it began


class Order(Value):
    """What a machine needs to start an attempt."""
    job: Job
    variables: Mapping[str, str]                # the submitter's environment
    code: str | None = None                     # the Python that was uploaded as its main.py


class LimitWatch:
    """Whether a job has reached one of its limits, and whether it is time for the signal of --warn."""

    def __init__(self, hosted: HostedJob) -> None:
        self.hosted = hosted
        self.stop: tuple[str, str] | None = None        # find_stop()
        self.is_warning_due = False                     # find_warning()

    @property
    def limits(self) -> Limits:
        return self.hosted.job_host.get_limits(self.hosted.job)

    @property
    def warned_file(self) -> str:
        """It is there when the signal of --warn was sent for the time limit that the job has now."""
        return f"{self.hosted.folder}/warned-{self.hosted.job.attempt}-{self.limits.timeout_seconds}"

    def measure_use(self) -> Use:
        """What the job has taken so far, as far as this machine sees it.  Raises: OSError."""
        return Use(
            runtime_s=self.hosted.find_runtime_s(),
            memory_mib=self.hosted.job_host.observer.memory_mib.get(self.hosted.key))

    def check(self) -> None:
        """Raises: OSError."""
        limits, use = self.limits, self.measure_use()
        self.stop = self.stop or find_stop(limits, use)
        self.is_warning_due = (find_warning(limits, use.runtime_s) is not None
                               and not self.stop and not find_status(self.hosted.disk, self.warned_file))

    def warn(self, members: Sequence[Process]) -> None:
        """Send the signal of --warn.  Raises: OSError."""
        import signal
        hosted, name = self.hosted, (self.limits.warn or "").partition("@")[0]
        number, processes = signal.Signals[f"SIG{name}"], hosted.machine.processes
        warned = choose_warned(members, processes.find_catchers(members, number), name)
        make_job_folder(hosted.disk, hosted.folder)
        write_atomic(hosted.disk, self.warned_file, [], is_synced=False)
        for process in warned:
            processes.send(process, number)
        names = join_some([f"{process.name} (pid {process.pid})" for process in warned])
        outcome = f"sent to {names}" if warned else "nothing of it handles that"
        hosted.notes += (f"{name} before its time limit: {outcome}",)
        hosted.job_host.log.info("Job %s: %s", hosted.job.id, hosted.notes[-1])


class HostedJob:
    """An attempt on this machine, as far as this process has followed it."""

    def __init__(self, job_host: JobHost, job: Job) -> None:
        self.job_host, self.job = job_host, job
        self.machine, self.clock, self.disk = job_host.machine, job_host.clock, job_host.disk
        self.key = job.attempt_key
        self.folder = job_host.layout.folder_of(job)
        self.pid, self.pid_started = job.current.pid, job.current.pid_started       # known here before it is recorded
        self.session: str | None = None                 # known here, if this process has launched it
        self.began: int | None = None                   # clock ticks since boot: Claim.began
        self.launched_at: float | None = None           # monotonic; None: another process launched it
        self.requeue = ""                               # it never began, and never will: why
        self.result: Result | None = None               # its command has ended
        self.is_over = False                            # and none of its processes is left
        self.work: Work | None = None                   # of what goes on after its command
        self.has_idled = False                          # that idles, and is being ended
        self.processes_left: int | None = None
        self.notes: tuple[str, ...] = ()
        self.commit: str | None = None
        self.limit_watch, self.termination = LimitWatch(self), Termination(self)

    @property
    def is_here(self) -> bool:
        """Whether the machine has not been booted since."""
        return self.job.current.boot_id == self.machine.boot_id

    @property
    def progress(self) -> Progress:
        ran, stop = self.job.current, None if self.is_over else self.limit_watch.stop
        if ran.stop_cause and ran.stop_line:            # of this job, and not of this process
            stop = ran.stop_cause, ran.stop_line
        use = self.job_host.observer.misplaced.get(self.key)
        unmet = NO_PSUTIL if not self.machine.psutil and self.limit_watch.limits.max_memory_gb else None
        return Progress(self.pid, self.pid_started, self.session, self.result, self.is_over, self.requeue,
                        self.processes_left, (*self.notes, *filter(None, (use, unmet))), stop=stop, commit=self.commit)

    def see_runner(self) -> Job:
        """The job with the pid of its job.sh, which may not be recorded yet."""
        if self.job.current.pid == self.pid:
            return self.job
        return with_facts(self.job, pid=self.pid, pid_started=self.pid_started)

    def find_runtime_s(self) -> float | None:
        """Seconds since its begin, whatever the wall clock was set to.

        It cannot have begun before its job.sh did, nor in the future: an older one may say so beside lxcfs.
        """
        if self.pid_started is None or not self.is_here:
            return None
        find_age_s = self.machine.processes.find_age_s
        ages = [find_age_s(at) for at in (self.pid_started, self.began) if at is not None]
        return min((age_s for age_s in ages if age_s >= 0), default=0.0)

    def hear(self, event: RunnerEvent) -> None:
        line = format_line(" ".join(event.words), 300)
        if event.verb == "start":
            self.pid, self.pid_started, self.began = map(int, event.words)
            self.launched_at = None
            if self.machine.leases:                     # the runner has the lease by now
                self.machine.leases.close_own(event.job_id)
                self.job_host.observer.lease_backoff.succeed()
        elif event.verb == "end":
            code, took_cs, *is_cut = map(int, event.words)
            self.take_result(Result(min(code, 255), None, took_cs / 100, is_cut=any(is_cut)))
        elif event.verb == "fail":
            self.fail_launch(line)
        else:
            self.take_bounce(line)

    def fail_launch(self, cause_line: str) -> None:
        """Its job.sh could not begin with it."""
        self.take_result(Result(None, None, 0.0, LAUNCH, cause_line, may_pass=True))

    def take_bounce(self, reason: str) -> None:
        """Its runner could not have a GPU."""
        leases = self.machine.leases
        self.requeue = reason or "a GPU was taken"
        if leases and self.job.id in leases.held:       # while it is held here, no runner can lock it
            self.job_host.observer.lease_backoff.fail(self.clock.monotonic(), NexusError(
                "unavailable", self.requeue, hint=f"does somebody remove files from {leases.folder}?"))

    def take_result(self, result: Result) -> None:
        if result.cause == BOUNCE:
            return self.take_bounce(result.cause_line or "")
        if result.exit_code == 128 + 9:
            before = next(iter(self.job_host.observer.oom_kills), None)
            result = explain_kill(self.job, result, before, self.machine.count_oom_kills())
        longest_s, took_s = self.find_runtime_s(), result.runtime_seconds
        if longest_s is not None and took_s is not None and took_s > longest_s:     # the clock of its job.sh has jumped
            result = replace(result, runtime_seconds=longest_s)
        if not self.result or self.result.goes_on:      # the first end counts, unless others of its session went on
            self.result = result
        elif result.is_cut:                             # job.sh says it again when there is no room for its result
            self.result = replace(self.result, is_cut=True)
        self.termination.next_look_at = 0.0

    def check(self, is_child_gone: bool) -> None:
        """See whether it has started or ended, and whether it has reached a limit.  Raises: OSError."""
        if not self.result and not self.requeue:
            self.look_at_files(is_child_gone)
        if not self.requeue and (self.result is None or self.processes_left):
            self.limit_watch.check()

    def look_at_files(self, is_child_gone: bool) -> None:
        """Look at its files and its pid: the second way to learn that it has started or ended.  Raises: OSError."""
        result, claim = read_result(self.disk, self.folder, self.key), None
        with contextlib.suppress(*[] if self.pid is None else [NexusError]):    # a job may have taken its own rights
            claim = read_claim(self.disk, self.folder, self.key)
        if not self.is_here:
            # What went on after its command has gone down, too.
            is_whole = result and not result.goes_on
            self.take_result(result if result and is_whole else Result(None, None, None, REBOOT, MACHINE_DOWN))
        elif self.pid is None:
            self.look_for_claim(claim, is_child_gone)
        elif result and not result.goes_on:
            self.take_result(result)
        elif self.machine.processes.is_alive(self.pid, self.pid_started):
            if result:
                self.take_result(result)
        elif result:
            cause_line = "its job.sh was killed while processes went on after its command"
            self.take_result(replace(result, cause=SESSION_LOST, cause_line=cause_line))
        elif (last := read_claim(self.disk, self.folder, self.key)) and last.pid and last.began is None:
            self.fail_launch("its job.sh ended before it began")
        else:
            # It may have begun, and written its result, since the first looks.
            self.take_result(read_result(self.disk, self.folder, self.key) or Result(
                None, None, None, SESSION_LOST, "its job.sh was killed: the exit code is not known"))
        if self.pid is not None and self.began is None:
            self.began = (claim and claim.began) or self.pid_started

    def look_for_claim(self, claim: Claim | None, is_child_gone: bool) -> None:
        """Find its runner; if none will come, claim the attempt in its place.  Raises: OSError."""
        import signal
        launched_at = self.launched_at
        if claim and claim.pid:
            self.pid, self.pid_started = claim.pid, claim.started
            return
        if not is_child_gone and launched_at is not None and self.clock.monotonic() - launched_at <= LAUNCH_TIMEOUT_S:
            return
        try:
            is_mine, writers = withdraw(self.disk, self.machine.processes, self.folder, self.key)
        except OSError as error:
            # Its runner may still begin, until the claim is taken: another attempt would run beside it.
            if is_machine_fault(error):
                return
            raise
        if not is_mine:
            for writer in writers if self.job.current.stop_cause else ():
                self.machine.processes.send(writer, signal.SIGKILL)
        elif claim and claim.is_open:
            self.requeue = ENDED_EARLY
        elif launched_at is None:
            self.requeue = "the service ended before it began"
        else:
            self.fail_launch("screen or sh did not begin with it")

    def follow_stop(self, now: float) -> None:
        """Begin to end its processes, once its command has ended or it must stop."""
        termination, is_stopped = self.termination, bool(self.job.current.stop_cause)
        if self.must_end() and (termination.began_at is None or (is_stopped and not termination.is_stop)):
            termination.begin(now, is_stopped)

    def must_end(self) -> bool:
        return not (self.is_over or self.requeue) and bool(self.job.current.stop_cause or self.result)

    def is_due(self, now: float) -> bool:
        """Whether its processes must be looked at, as they are to end."""
        return self.must_end() and now >= self.termination.next_look_at

    def look_at_processes(self, members: Sequence[Process], now: float) -> None:
        """End what must end of its processes.  `members`: all of them."""
        going_on = self.find_going_on(members, now)
        self.processes_left = len(going_on) or None
        ended = [process for process in members if process not in going_on]
        if ended or going_on or not self.result:
            return self.termination.send_signals(ended, now, bool(going_on))
        self.is_over = True
        self.result = replace(self.result, ended_itself=not self.termination.may_be_signaled)
        if self.result.runtime_seconds is None:
            self.result = replace(self.result, runtime_seconds=self.find_runtime_s())

    def find_going_on(self, members: Sequence[Process], now: float) -> list[Process]:
        """The processes for which the job goes on after its command: those of its session, unless they idle."""
        result, going_on, observer = self.result, choose_session(members, self.pid), self.job_host.observer
        if self.job.current.stop_cause or not result or result.exit_code is None or not going_on or self.has_idled:
            return []
        if self.work:                   # at the first look they may be about to leave the session, as `setsid x &` does
            # They are over at another time than the command.
            result = replace(result, finished_at=None, runtime_seconds=None)
        self.result = replace(result, goes_on=True)
        self.work = (self.work or Work()).add(going_on, now)
        pids = {process.pid for process in going_on}
        is_computing = any(process.pid in pids for gpu in observer.gpus for process in gpu.processes)
        if self.work.is_idle(TICK_S) and not is_computing and not (self.job.gpus and observer.find_gpu_error()):
            self.has_idled = True
            self.termination.begin(now, False)
            return []
        return going_on

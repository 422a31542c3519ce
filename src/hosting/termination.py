"""The end of a job's processes on this machine: the signals that they get, and those that no signal ends."""

from __future__ import annotations

from collections.abc import Sequence

from ..formats.proc import Process
from ..machine.programs import STUCK_HINT
from ..opening import TYPE_CHECKING
from ..schedule.signals import choose_signaled
from ..values.text import join_some

if TYPE_CHECKING:
    from .hosted_job import HostedJob

TERMINATION_INTERVAL_S = 0.02   # how often the processes of a job being ended are checked, at first
RUNNER_TIMEOUT_S = 2.0          # for job.sh to write the result of a killed job


class Termination:
    """Ends the processes of a job: when it must stop, and again when its command has ended and left some."""

    def __init__(self, hosted: HostedJob) -> None:
        self.hosted, self.processes = hosted, hosted.machine.processes
        self.began_at: float | None = None              # monotonic
        self.is_stop = False                            # it began for a stop
        self.may_be_signaled = bool(hosted.job.current.stop_cause)      # by a stop: also of a former service
        self.next_look_at = 0.0                         # monotonic
        self.first_pids: set[int] = set()               # the pids when the first signal was due
        self.signaled: set[int] = set()                 # the pids that got it
        self.stuck: set[int] = set()                    # the pids that are noted as such

    def begin(self, now: float, is_stop: bool) -> None:
        self.began_at, self.is_stop, self.next_look_at = now, is_stop, now
        self.first_pids, self.signaled = set(), set()

    def send_signals(self, members: Sequence[Process], now: float, goes_on: bool) -> None:
        """Signal these processes: first the programs, after the grace time all.  `goes_on`: others go on."""
        import signal
        hosted, age_s = self.hosted, now - (now if self.began_at is None else self.began_at)
        ran, grace_s = hosted.job.current, hosted.limit_watch.limits.kill_grace_seconds
        longest_s = 2.0 if goes_on and not members else 0.5
        self.next_look_at = now + min(longest_s, max(TERMINATION_INTERVAL_S, age_s / 10))
        runner = self.processes.find(hosted.pid) if hosted.pid and hosted.is_here else None
        if runner and runner.started != hosted.pid_started:
            runner = None                               # the pid was given to another process
        if not members and not goes_on and runner and age_s >= grace_s + RUNNER_TIMEOUT_S:
            members = [runner]                          # only its job.sh is left, stopped or stuck
        if members and not self.first_pids:
            self.first_pids = {process.pid for process in members}
            if not ran.stop_cause:
                names = join_some([f"{process.name} (pid {process.pid})" for process in members])
                hosted.job_host.log.info("Job %s: its command has ended; ending what it left: %s", hosted.job.id, names)
                hosted.notes += (f"ended after its command: {names}",)
        signaled, number = list(members), signal.SIGKILL
        if age_s < grace_s:
            number = signal.Signals[f"SIG{ran.stop_signal or 'TERM'}"]
            leaders = [process for process in members if process.pid == process.session]
            signaled = choose_signaled(members, self.first_pids, self.signaled, self.processes.find_readers(members),
                                       self.processes.find_catchers(leaders, number))
        self.may_be_signaled |= self.is_stop and bool(signaled)
        for process in signaled:
            self.processes.send(process, number)
            self.processes.send(process, signal.SIGCONT)        # a stopped process handles its signals only then
        self.signaled.update(process.pid for process in signaled)
        if runner and runner.state == "T":
            self.processes.send(runner, signal.SIGCONT)
        if age_s >= grace_s + RUNNER_TIMEOUT_S:
            self.note_stuck(members)

    def note_stuck(self, members: Sequence[Process]) -> None:
        """Note which processes no signal ends, once each."""
        for process in members:
            words = None if process.pid in self.stuck else self.processes.describe_stuck(process)
            if words:
                self.stuck.add(process.pid)
                self.hosted.notes += (f"{words}; {STUCK_HINT}",)
                self.hosted.job_host.log.warning("Job %s: %s", self.hosted.job.id, self.hosted.notes[-1])

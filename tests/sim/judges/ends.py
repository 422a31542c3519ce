"""How jobs end: signals, limits, retries, causes, exit codes.

What nexus tells of an attempt (its cause and its exit code) is compared with what its command did and heard, and with why
it had to end: somebody had cancelled it, or it had reached a limit that it had then.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from judges.judge import Judge

if TYPE_CHECKING:
    from command import Command
    from homes import Home
    from world import Run, SimProcess

    import nexus

SIGKILL, SIGTERM = 9, 15
WARNINGS = {"USR1": 10, "USR2": 12}
SIGNALS = {"INT": 2, "TERM": 15, **WARNINGS}
FINAL = ("completed", "failed", "cancelled")
NO_FAILURES = ("preempted", "requeued")         # no retry is spent on these
LIMIT_CAUSES = ("timeout", "host-memory", "idle")
CAUSES = {"completed": {None}, "cancelled": {"killed", "dependency"}}
LATE_S, LATE_ROUNDS = 3.0, 25   # what is due must be done when all has gone on so often, and so long
LATEST_S = 205.0                # the longest time that passes at once, and a little
FAR_ROUNDS = 60                 # on a node, whose line takes its time
LONGEST_BACKOFF_S = 3600.0
ROUNDING_S = 0.2


class Wish:
    """What people have asked for a job, and when that came to be so."""

    def __init__(self, job: nexus.Job, at: float) -> None:
        self.job = job
        self.limits: list[tuple[float, float]] = []         # (since when, its time limit)
        self.retries: list[int] = []
        self.warnings: list[tuple[float, str]] = []         # (since when, --warn)
        self.killed_at: float | None = None
        self.signal = "TERM"
        self.was_running = False                            # as it was cancelled
        self.is_hurried = False                             # somebody has changed when it begins

    def find_limit(self, at: float) -> float:
        return next(limit for since, limit in reversed(self.limits) if since <= at)


class Watch:
    """A run that goes on."""

    def __init__(self, run: Run) -> None:
        self.run, self.heard_count, self.main_count = run, 0, 0
        self.due_since: tuple[float, int, int] | None = None        # (when, round, how many services had begun)
        self.first_stop_at: float | None = None
        self.warned: list[float] = []
        self.reasons: set[str] = set()                      # why it might be ended, at its signals and its end
        self.stopped_by: list[SimProcess | None] = []       # who has sent it a first signal

    @property
    def family(self) -> list[Command]:
        """Its command, and what that has started."""
        command = self.run.process.command
        assert command
        return [command, *(child.command for child in command.children if child.command)]


class Ends(Judge):
    def __init__(self, actions: Any) -> None:
        super().__init__(actions)
        self.wishes: dict[str, Wish] = {}                   # {job id: what was asked}
        self.unclear: set[str] = set()                      # jobs of which that is not known
        self.watches: dict[tuple[str, int], Watch] = {}     # {(job id, attempt): those that were begun}
        self.going_on: list[Watch] = []                     # those of which a process lives, or may
        self.checked: set[tuple[str, int]] = set()          # attempts whose told end was compared
        self.settings = dict(self.setup.limits)
        self.is_slurm = self.setup.launcher == "slurm"

    def find_setting(self, key: str, default: float) -> float:
        return float(self.settings.get(key, default))

    # What people ask for

    def on_request(self, home: Home, method: str, path: str, body: Any, user: str, status: int, reply: Any) -> None:
        if status == 0 and method != "GET":         # whether it was done is not known
            for job_id in [path.rpartition("/")[2], *((body.get("ids") or ()) if isinstance(body, dict) else ())]:
                self.wishes.pop(job_id, None)
                self.unclear.add(job_id)
        if not 200 <= status < 300 or not home.is_up:
            return
        if method in ("POST", "PATCH") and (path.startswith("/queue") or path == "/jobs/retry"):
            is_new = method == "POST"
            ids = [reply["id"]] if "id" in reply else reply.get("ids", [])
            for job_id in ids:
                self.note_wish(home, job_id, is_new)
        elif path == "/jobs/cancel" or method == "DELETE":
            signal = (body or {}).get("signal") or "TERM"
            for job_id in reply["ids"] if body else [path.rpartition("/")[2]]:
                wish = self.wishes.get(job_id)
                if wish and wish.killed_at is None:
                    wish.killed_at, wish.signal = self.world.now, signal
                    wish.was_running = bool((job_id, wish.job.attempt) in self.watches)

    def note_wish(self, home: Home, job_id: str, is_new: bool) -> None:
        job, now = home.service.store.state.jobs.get(job_id), self.world.now
        if job is None or job_id in self.unclear:
            return
        if job_id not in self.wishes:
            self.wishes[job_id] = Wish(job, now)
        elif is_new:
            return                              # it was known: --unique, or the same key
        wish = self.wishes[job_id]
        wish.job = job
        wish.retries.append(job.retries)
        wish.limits.append((now, self.find_time_limit(job)))
        if job.warn:
            wish.warnings.append((now, job.warn))
        wish.is_hurried |= not is_new

    def find_time_limit(self, job: nexus.Job) -> float:
        """--timeout, or else twice --expect, or else that of the configuration; 0 is none."""
        if job.timeout_seconds is not None:
            limit = job.timeout_seconds
        elif job.expected_time is not None:
            limit = job.expected_time * self.find_setting("timeout_multiplier", 2)
        else:
            limit = self.find_setting("timeout_seconds", 0)
        return limit or float("inf")

    # What runs

    def on_begin(self, run: Run) -> None:
        key = run.job.id, run.job.attempt
        watch = self.watches[key] = Watch(run)
        self.going_on.append(watch)
        for other in self.world.runs:
            if other is not run and other.job.id == run.job.id and other.code == 0 and not self.may_run_again(other):
                self.fail(f"job {run.job.id} had succeeded, and runs again")
        if not self.is_slurm and run.job.id in self.wishes:
            self.check_retry(run)

    def may_run_again(self, run: Run) -> bool:
        """Whether its exit code 0 is no success: it was cut off, or stopped, as far as that can be known."""
        command = run.process.command
        family = command, *(child.command for child in command.children)            # also what it has left
        # A jump of the time may make its limit come before its end is heard.
        ran_s = (run.ended_at or self.world.now) - run.launched_at
        is_late = run.job.timeout_seconds or ran_s >= self.find_time_limit(run.job)
        if run.was_cut or is_late or any(one.heard for one in family):
            return True
        recorded = [job for home in self.list_homes() if (job := home.service.store.state.jobs.get(run.job.id))]
        stop_causes = [one.stop_cause for job in recorded for one in job.attempts if one.nonce == run.job.current.nonce]
        is_to_stop = run.job.preemptible or not recorded or any(stop_causes)
        return is_to_stop and self.world.has_other_host(run)

    def on_end(self, run: Run) -> None:
        watch = self.watches.get((run.job.id, run.job.attempt))
        if watch and run.job.id in self.wishes:
            watch.reasons |= set(self.find_reasons(watch, self.world.now))

    def check_retry(self, run: Run) -> None:
        """A job runs again as often as it may, and after its backoff.  A former attempt's cause is checked where it is told."""
        wish, former = self.wishes[run.job.id], run.job.attempts[:-1]
        failed = [attempt for attempt in former if attempt.cause not in (*NO_FAILURES, "launch")]
        if len(failed) > max(wish.retries):
            self.fail(f"job {run.job.id} runs after {len(failed)} failures, and has {max(wish.retries)} retries")
        if any(attempt.cause == "killed" for attempt in former):
            self.fail(f"job {run.job.id} was killed, and runs again")
        last = self.watches.get((run.job.id, former[-1].number)) if former else None
        if self.world.has_moved or wish.is_hurried:
            return                              # wall clocks count, and whoever edits a job may let it start at once
        if not failed or failed[-1] is not former[-1] or not last or last.run.ended_at is None:
            return
        first_s = self.find_setting("retry_backoff_seconds", 5)
        backoff_s = min(first_s * 2 ** (len(failed) - 1), LONGEST_BACKOFF_S)
        if run.launched_at - last.run.ended_at < backoff_s - ROUNDING_S:
            self.fail(f"job {run.job.id} runs again {run.launched_at - last.run.ended_at:.1f} s after failure {len(failed)}: "
                      f"{backoff_s} s were to pass")

    def after_step(self) -> None:
        if self.is_slurm or not self.going_on:
            return                              # Slurm ends jobs in its own way
        for watch in list(self.going_on):
            self.look_at_signals(watch)
            if self.setup.is_calm and watch.run.process.is_alive:
                self.check_late(watch)
            if not watch.run.process.is_alive and not watch.run.left:
                self.going_on.remove(watch)

    def look_at_signals(self, watch: Watch) -> None:
        family = watch.family
        count = sum(len(one.heard) for one in family)
        if count == watch.heard_count:
            return
        if self.can_be_judged(watch.run):
            main = family[0]
            for (at, number), sender in zip(main.heard[watch.main_count:], main.senders[watch.main_count:]):
                self.check_signal(watch, at, number, sender)
            for child in family[1:]:
                self.check_child(watch, child)
        watch.heard_count, watch.main_count = count, len(family[0].heard)

    def check_child(self, watch: Watch, child: Command) -> None:
        """What a program has started gets its first signal when that has ended."""
        for at, number in child.heard:
            if number == SIGKILL:
                self.check_grace(watch, at)
            elif child.is_child and (watch.run.ended_at is None or at < watch.run.ended_at):
                self.fail(f"what job {watch.run.job.id} has started got signal {number} before its program had ended")

    def can_be_judged(self, run: Run) -> bool:
        """A damaged state may have lost the job, whose node ends it then; a node has several heads."""
        return run.job.id in self.wishes and not any(home.is_damaged or home.lost_power for home in self.homes)

    def check_signal(self, watch: Watch, at: float, number: int, sender: SimProcess | None) -> None:
        run, wish = watch.run, self.wishes[watch.run.job.id]
        reasons = set(self.find_reasons(watch, at))
        watch.reasons |= reasons
        if number == SIGKILL:
            self.check_grace(watch, at)
            return
        if number in WARNINGS.values() and wish.warnings and not ("killed" in reasons and SIGNALS.get(wish.signal) == number):
            self.check_warning(watch, at, number)
            return
        elif number != SIGNALS[wish.signal] and not reasons - {"killed"}:
            self.fail(f"job {run.job.id} gets signal {number}, and {wish.signal} was asked for")
        elif sender in watch.stopped_by:        # a service or agent that has begun since does not know of that signal
            self.fail(f"job {run.job.id} gets its first signal twice")
        if not reasons:
            self.fail(f"job {run.job.id} gets signal {number} after {at - run.launched_at:.1f} s, and there is no reason")
        watch.first_stop_at = at                # with that of a service which has begun since, its grace time begins anew
        watch.stopped_by.append(sender)

    def find_reasons(self, watch: Watch, at: float) -> Iterator[str]:
        """Why this run may be ended at that time."""
        run, wish = watch.run, self.wishes[watch.run.job.id]
        if wish.killed_at is not None and wish.killed_at <= at:
            yield "killed"
        # Who has reached a limit stays one who has, though it is raised then.
        if at - run.launched_at >= min(limit for since, limit in wish.limits if since <= at) - ROUNDING_S:
            yield "timeout"
        most_mib = self.find_setting("max_memory_gb", 0) * 1024
        if most_mib and sum(one.memory_mib for one in watch.family) > most_mib:
            yield "host-memory"
        idle_s = self.find_setting("idle_kill_minutes", 0) * 60
        if idle_s and run.shares and self.find_longest_idle(run, at) >= idle_s - ROUNDING_S:
            yield "idle"
        if run.was_cut:
            yield "session-lost"                        # somebody has killed its job.sh
        if run.job.preemptible:
            yield "preempted"                           # by whom is what judges of starts know

    def find_longest_idle(self, run: Run, at: float) -> float:
        """For how long its GPUs did nothing, as their driver said, until this time or not long before.

        A job is stopped a little later than that is seen, and what a node sees arrives some time later.
        """
        if run.process.host.name != "a":
            return float("inf")
        busy_at = run.process.host.busy_at
        times = sorted({run.launched_at, at, *(when for uuid in run.shares for when in busy_at.get(uuid, ())
                                               if run.launched_at < when < at)})
        return max((end - begin for begin, end in zip(times, times[1:]) if end >= at - LATEST_S), default=0.0)

    def check_grace(self, watch: Watch, at: float) -> None:
        """SIGKILL comes after the grace time, which begins with the stop: a command that begins later has less of it."""
        run = watch.run
        wish, grace_s = self.wishes[run.job.id], self.find_setting("kill_grace_seconds", 10)
        times = [when for one in watch.family for when, number in one.heard
                 if number != SIGKILL and number not in WARNINGS.values()]
        times += [wish.killed_at] if wish.killed_at is not None and wish.killed_at <= at else []
        times += [run.launched_at + limit for since, limit in wish.limits if since <= at]
        if not {"idle", "preempted", "session-lost"}.isdisjoint(watch.reasons):
            times.append(run.launched_at if run.began_at > run.launched_at + grace_s else at)     # maybe before its command began
        if at - min(times, default=at) < grace_s - ROUNDING_S:
            self.fail(f"job {run.job.id} gets SIGKILL {at - min(times, default=at):.1f} s after its first signal: "
                      f"kill_grace_seconds is {grace_s}")

    def check_warning(self, watch: Watch, at: float, number: int) -> None:
        """The signal of --warn comes once for a time limit, and no sooner than it says."""
        run, wish = watch.run, self.wishes[watch.run.job.id]
        watch.warned.append(at)
        since_s = [limit - float(warn.partition("@")[2][:-1]) for _, limit in wish.limits for _, warn in wish.warnings
                   if warn.partition("@")[2].endswith("s")]
        if since_s and at - run.launched_at < min(since_s) - ROUNDING_S:
            self.fail(f"job {run.job.id} is warned after {at - run.launched_at:.1f} s, and not {min(since_s)} s")
        if len(watch.warned) > len({limit for _, limit in wish.limits}):
            self.fail(f"job {run.job.id} is warned {len(watch.warned)} times")

    def check_late(self, watch: Watch) -> None:
        """What must end is signaled soon, and is gone when its grace time is over.

        Its time counts from when its job.sh has begun: no sooner than that was launched, no later than its command begins.
        """
        run, now = watch.run, self.world.now
        wish = self.wishes.get(run.job.id)
        if not wish:
            return
        due_at = min(run.began_at + wish.find_limit(now), float("inf") if wish.killed_at is None else wish.killed_at)
        if watch.first_stop_at is not None:
            due_at = watch.first_stop_at + self.find_setting("kill_grace_seconds", 10)
        key = max(due_at, run.began_at) + LATE_S
        if now < key:
            watch.due_since = None
            return
        if watch.due_since is None or watch.due_since[::2] != (key, len(self.world.machines_begun_at)):
            watch.due_since = key, self.world.rounds, len(self.world.machines_begun_at), now
        longest = LATE_ROUNDS if run.process.host.name == "a" else FAR_ROUNDS
        if self.world.rounds - watch.due_since[1] > longest and now - watch.due_since[3] > LATE_S:
            what = "has heard nothing" if watch.first_stop_at is None else "lives after its grace time"
            self.fail(f"job {run.job.id} was to end {now - due_at:.1f} s ago, and {what}")

    # What is told

    def look(self) -> None:
        self.check_codes()
        if self.is_slurm:
            return
        for home in self.list_homes():
            for job in self.read_jobs(home) if not home.is_damaged else ():
                self.check_job(home, job)

    def check_codes(self) -> None:
        """An exit code that is shown is the command's; what was damaged may have lost which attempt it was."""
        for home in self.list_homes():
            for job in home.service.store.state.jobs.values() if not home.is_damaged else ():
                for number, attempt in enumerate(job.attempts, 1):
                    codes = [run.code for run in self.world.runs
                             if (run.job.id, run.job.current.nonce) == (job.id, attempt.nonce)]
                    if attempt.exit_code is not None and attempt.exit_code not in codes:
                        self.fail(f"job {job.id}, attempt {number}: exit code {attempt.exit_code} is shown, and its command "
                                  f"has ended with {codes}")

    def check_job(self, home: Home, job: dict[str, Any]) -> None:
        ended = [attempt for attempt in job["attempts"] if attempt["finished_at"]]
        key = job["id"], len(ended) + 1000 * (job["status"] in FINAL)
        wish = self.wishes.get(job["id"])
        if key in self.checked or not wish:
            return
        self.checked.add(key)
        for attempt in ended:
            self.check_attempt(job, attempt)
        failed = [attempt for attempt in ended if attempt["cause"] not in (*NO_FAILURES, "launch", "killed", None)]
        allowed = CAUSES.get(job["status"])
        if job["status"] in FINAL and (job["cause"] not in allowed if allowed else job["cause"] in (None, "killed", *NO_FAILURES)):
            self.fail(f"job {job['id']} is {job['status']}, and its cause is {job['cause']}")
        if job["cause"] == "killed" and wish.killed_at is None and self.setup.is_calm:
            self.fail(f"nobody has cancelled job {job['id']}, and its cause is killed")
        if job["cause"] == "dependency" and not (job["after"] or job["after_group"]):
            self.fail(f"job {job['id']} comes after nothing, and its cause is dependency")
        if not self.setup.is_calm:
            return
        if job["status"] == "failed" and job["cause"] != "launch" and len(failed) <= min(wish.retries):
            self.fail(f"job {job['id']} has failed {len(failed)} times, has {min(wish.retries)} retries, and is given up")
        if wish.killed_at is not None and wish.was_running and job["status"] in ("failed", "completed"):
            self.fail(f"job {job['id']} was killed while it ran, and is {job['status']} ({job['cause']})")

    def check_attempt(self, job: dict[str, Any], attempt: dict[str, Any]) -> None:
        """The end of an attempt is told as it was."""
        name = f"attempt {attempt['attempt']} of job {job['id']}"
        watch, code, cause = self.watches.get((job["id"], attempt["attempt"])), attempt["exit_code"], attempt["cause"]
        if attempt["signal"] != (code - 128 if code is not None and 128 < code < 160 else None):
            self.fail(f"{name} has ended with {code}, and its signal is {attempt['signal']}")
        if cause == "reboot" and not any(host.boots for host in self.world.hosts.values()):
            self.fail(f"{name} ended by a reboot, and there was none")
        if not self.setup.is_calm:
            return
        if watch is None:
            wish = self.wishes[job["id"]]
            killed = ["killed"] if wish.killed_at is not None else []
            if cause not in ("launch", *NO_FAILURES, *LIMIT_CAUSES, *killed):       # job.sh may take longer than it has
                self.fail(f"{name} has not begun its command, and its cause is {cause}")
            return
        run = watch.run
        if run.ended_at is None or run.left:
            self.fail(f"{name} is told as ended ({cause}), and goes on")
            return
        # Where job.sh is stuck when a stopped job's time is over, it is ended too, and tells no exit code.
        is_cut = bool(watch.reasons | {*self.find_reasons(watch, self.world.now)}) and run.runner.exit_code == 128 + SIGKILL
        if code != run.code and not (is_cut and code is None):
            self.fail(f"{name} ended with {run.code}, and {code} is told")
        self.check_cause(watch, name, cause)
        took_s = run.ended_at - run.began_at
        if not is_cut and attempt["runtime_seconds"] < took_s - ROUNDING_S:
            self.fail(f"{name} took {took_s:.2f} s, and {attempt['runtime_seconds']} s are told")

    def check_cause(self, watch: Watch, name: str, cause: str | None) -> None:
        """What a job does by itself has a cause of its own, but where it had to end before that was noticed."""
        run, code = watch.run, watch.run.code
        assert run.process.command
        expected = "exit" if code else None
        if code is not None and 128 < code < 160:
            expected = "signal"
        if code and run.shares and b"CUDA out of memory" in self.world.printed[run.job.id][1] and "oom" in run.process.command.ways:
            expected = "cuda-oom"
        reasons = watch.reasons | set(self.find_reasons(watch, self.world.now))
        stops = [number for _, number in run.process.command.heard if number not in WARNINGS.values() or watch.first_stop_at]
        is_cut = run.runner.exit_code == 128 + SIGKILL                      # its job.sh was stuck
        if not (is_cut or any(one.heard for one in watch.family) or self.world.has_other_host(run)):
            reasons -= {*LIMIT_CAUSES, "preempted"} if code == 0 else set()         # it has succeeded before that was noticed
        if (cause != expected and cause not in reasons) or (stops and cause not in reasons):
            self.fail(f"{name} ended with {code} after the signals {stops}: its cause is {cause}, and not {expected}; "
                      f"to end it was reason {sorted(reasons)}")

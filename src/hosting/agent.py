"""The agent: what looks after a head's jobs on a node.

A job's runner needs no service beside it, so a node has none.  On it an agent, this program at the other end
of an ssh, looks after the jobs of its head with the same JobHost.  It keeps files only, in ~/.nexus/agent there.
When the connection is cut, it goes on for as long as jobs run; the next agent of the same head takes its place.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from ..formats.codec import decode, decode_value, encode_json, encode_value
from ..formats.runner_events import News, Result, RunnerEvent
from ..machine.clock import Clock, wait_until
from ..machine.disk import Disk, is_folder, read_job_file, remove_file, sync_folder, write_atomic
from ..machine.job_files import STREAM_FILES, clear_way, make_job_folder, measure_logs, remove_job_files
from ..machine.layout import Layout
from ..machine.log_reader import read_part
from ..machine.machine import Machine
from ..machine.processes import read_machine
from ..machine.search_path import find_python
from ..opening import TYPE_CHECKING
from ..runner.claims import split_key, withdraw
from ..runner.environment import find_visible_devices, mix_environments
from ..schedule.capacity import is_left_out
from ..values.causes import KILLED, LAUNCH, SESSION_LOST
from ..values.config import Config
from ..values.errors import NexusError
from ..values.job import Job, Limits
from ..values.state import with_facts
from ..values.text import format_line, load_json
from ..values.value import Value, replace
from .events import Worker
from .hosted_job import Order, Progress
from .loop import HostLoop
from .node_protocol import LOOK_WAIT_S, Hello, JobReport, Question, Report, Wanted, start_writer
from .observer import SMI_WAIT_S

if TYPE_CHECKING:
    import logging

LOG_INTERVAL_S = 0.1            # how often logs are looked at
HEAD_SILENCE_S = 180.0          # an agent without jobs ends when nobody has asked it for so long
FOLDERS_INTERVAL_S = 1.0        # how often an agent looks whether directories are there


class Agent(HostLoop):
    """PollThrottle after a head's jobs on the machine that it runs on.

    Each line on stdin is a Question, each line on stdout a Report.  What the latest question wants and is not known
    here yet is started, what it does not want is ended.  It is replied to when the reply differs from the last one.
    """

    def __init__(self, layout: Layout, config: Config, disk: Disk, head: str, environ: Mapping[str, str],
                 log: logging.Logger) -> None:
        import collections
        machine, visible_devices = Machine(config, layout, disk, head), find_visible_devices(environ)
        super().__init__(config, layout, machine, Clock(), disk, log, visible_devices, os.umask(0o077))
        self.environ = environ
        self.limits: dict[str, Limits] = {}             # {attempt_key: what the head has said last}
        self.jobs: dict[str, Job] = {}                  # {attempt_key: an attempt here}
        self.unread: collections.deque[bytes] = collections.deque(maxlen=1)     # a question
        self.replies = start_writer(sys.stdout.buffer, "replies")
        self.is_connected = True
        self.question: Question | None = None           # the latest
        self.wanted: Mapping[str, Wanted] = {}          # {attempt_key: what that says of it}
        self.is_due = False                             # it has no reply yet
        self.asked_at = self.clock.monotonic()
        self.told: Report | None = None                 # the last reply, without the time and the bytes of logs
        self.folders: dict[str, bool] = {}

    def run(self) -> None:
        """Serve until the connection has ended, and no job is left."""
        import threading
        self.begin_workers(Worker(self, "looking at directories", self.look_at_folders))
        threading.Thread(target=self.read, daemon=True).start()
        wait_until(lambda: self.observer.latest is not self.observer.observation, SMI_WAIT_S, 0.01)
        self.send(Hello(
            f"{self.machine.boot_id} {read_machine()}", self.machine.boot_id, ".".join(map(str, sys.version_info[:3])),
            self.machine.launcher.login_variables(), os.path.abspath(__file__), self.config.jobs.cpu_slots))
        for name in self.disk.listdir(self.layout.log_dir):     # an earlier agent's; limits hold without a request
            with contextlib.suppress(KeyError, TypeError, ValueError, NexusError):      # what is no job's is left alone
                self.take_over(name)
        self.job_host.tick(list(self.jobs.values()))
        while self.is_asked() or any(not (hosted_job.is_over or hosted_job.requeue)
                                     for hosted_job in self.job_host.hosted.values()):
            self.turn()

    def get_limits(self, job: Job) -> Limits:
        """The limits of a job.  Of one that an older agent kept: what this machine's configuration says."""
        return self.limits.get(job.attempt_key) or super().get_limits(job)

    def take_over(self, name: str) -> None:
        """Go on with a job of an earlier agent, from its folder.  Raises: KeyError, TypeError, ValueError, NexusError.

        The job may have changed the file: it must be of this folder's job.
        """
        folder = os.path.join(self.layout.log_dir, name)
        kept = decode("dict", load_json(read_job_file(self.disk, os.path.join(folder, "job.json")) or ""))
        job = decode_value(Job, kept)
        key = decode("AttemptKey", job.attempt_key)
        if not (self.find_folder(key) == job.log_dir == folder and job.attempts):
            raise ValueError(f"{folder} has the file of another job")
        if "limits" in kept:
            self.limits[key] = decode("Limits", kept["limits"])
        self.jobs[key] = job

    def find_folder(self, key: str) -> str:
        """The folder of an attempt; those of one job have the same, with the files that they share."""
        return self.layout.job_folder(split_key(key)[0])

    def is_asked(self) -> bool:
        """Whether a head is there.  That it has vanished without a word, the connection shows much later."""
        return self.is_connected and self.clock.monotonic() - self.asked_at < HEAD_SILENCE_S

    def look_at_folders(self) -> float:
        """See which of the head's directories are there, in a thread, as a file system may hang; return the pause."""
        question = self.question
        found = {path: is_folder(self.disk, path) for path in (question.folders if question else ())}
        if question and found != self.folders:
            self.folders = found
            self.wake()
        return FOLDERS_INTERVAL_S if found else 0.05

    def read(self) -> None:
        """In a thread: read the questions."""
        for line in sys.stdin.buffer:
            self.unread.append(line)
            self.wake()
        self.is_connected = False
        self.wake()

    def send(self, answer: Value) -> None:
        self.replies.put(encode_json(encode_value(answer)).encode("ascii") + b"\n")

    def find_due_s(self) -> float:
        return LOG_INTERVAL_S if self.is_due and self.jobs else float("inf")

    def tick(self, runner_events: Sequence[RunnerEvent]) -> None:
        self.run_guarded("taking a question", self.take_question)
        hosted = self.job_host.hosted                   # they know the runners' pids
        self.run_guarded("reading GPUs", self.observer.take_in, [
            hosted[key].see_runner() if key in hosted else job
            for key, job in self.jobs.items() if not self.is_refused(key)])
        self.run_guarded("looking after jobs", self.look_after_jobs, runner_events)
        self.run_guarded("replying", self.reply)

    def take_question(self) -> None:
        """Take in what a new question wants of the jobs here; the others are ended."""
        if not self.unread:
            return
        self.question = question = decode("Question", load_json(self.unread.pop()), "a question")
        self.is_due, self.asked_at = True, self.clock.monotonic()
        self.wanted = {wanted.key: wanted for wanted in question.jobs}
        for key, job in self.jobs.items():
            wanted = self.wanted.get(key)
            if wanted and wanted.limits != self.limits.get(key):
                self.limits[key] = wanted.limits
                if not self.is_refused(key):                # its folder is another attempt's
                    self.run_guarded(f"keeping job {key}", self.keep, job)
            cause, name = (wanted.stop_cause, wanted.stop_signal) if wanted else (KILLED, None)
            if cause and not job.current.stop_cause:
                self.jobs[key] = with_facts(job, stop_cause=cause, stop_signal=name)
                if not self.is_refused(key):                # a later agent must know that it may have been signaled
                    self.run_guarded(f"keeping job {key}", self.keep, self.jobs[key])

    def is_refused(self, key: str) -> bool:
        """Whether an attempt never began, and never will."""
        hosted = self.job_host.hosted.get(key)
        return hosted is not None and bool(hosted.requeue)

    def look_after_jobs(self, runner_events: Sequence[RunnerEvent]) -> None:
        """Follow the jobs; forget what is over and not wanted, then start what is wanted and not here."""
        for job, progress in self.job_host.tick(list(self.jobs.values()), runner_events):
            key = job.attempt_key
            if progress.stop and not job.current.stop_cause:
                self.run_guarded(f"stopping job {key}", self.stop, key, *progress.stop)
            if self.question and key not in self.wanted and (progress.is_over or progress.requeue):
                self.run_guarded(f"forgetting job {key}", self.forget, key)
        for wanted in self.wanted.values():
            if wanted.order and wanted.key not in self.jobs:
                self.run_guarded(f"starting job {wanted.key}", self.start, wanted, wanted.order)

    def start(self, wanted: Wanted, order: Order) -> None:
        """Start an attempt; its progress says why one cannot be started."""
        folder, job, environ = self.find_folder(wanted.key), order.job, mix_environments(order.variables, self.environ)
        job = replace(job, log_dir=folder, cwd=job.cwd or os.path.expanduser("~"))
        if order.code is not None:
            job = replace(job, cwd=os.path.join(folder, "work"), command=f"{find_python(environ)} main.py")
        reason = ""
        if wanted.stop_cause:
            reason = "it was killed before it began"
        elif job.current.boot_id != self.machine.boot_id:
            reason = "it has just been booted"
        elif job.id in [other.id for other in self.jobs.values()]:
            reason = f"an earlier job {job.id} is still being ended"
        self.limits[wanted.key], self.jobs[wanted.key] = wanted.limits, job
        if reason:
            self.job_host.fail(job, News(requeue=reason))
            return
        try:
            make_job_folder(self.disk, folder)
            clear_way(self.disk, folder, job.attempt)
            for name in STREAM_FILES:                           # of an earlier attempt: the head has them
                remove_file(self.disk, os.path.join(folder, name))
            self.keep(job)                                      # before anything of it can begin
            self.job_host.start(Order(job, environ, order.code))
        except (OSError, NexusError) as error:
            self.job_host.fail(job, self.job_host.judge_start_error(error, job))

    def keep(self, job: Job) -> None:
        """Write what a later agent must know of a job, also after a power cut.  Raises: OSError, unavailable."""
        kept = {**encode_value(job), "limits": self.get_limits(job)}
        make_job_folder(self.disk, job.log_dir or "")
        write_atomic(self.disk, os.path.join(job.log_dir or "", "job.json"), [encode_json(kept)])
        sync_folder(self.disk, self.layout.log_dir)

    def stop(self, key: str, cause: str, line: str) -> None:
        """End a job that has reached a limit: the head may not be there."""
        self.jobs[key] = with_facts(self.jobs[key], stop_cause=cause, stop_line=line)
        self.keep(self.jobs[key])

    def report(self, wanted: Wanted, most_bytes: int) -> JobReport:
        """What is known of an attempt, and its new output.  Raises: OSError, NexusError."""
        job, hosted = self.jobs.get(wanted.key), self.job_host.hosted.get(wanted.key)
        folder = job.log_dir if job and job.log_dir else self.find_folder(wanted.key)
        if job is None or hosted is None:
            # What has begun may run still, though its files are gone.
            is_gone, writers = (False, []) if wanted.has_begun else withdraw(
                self.disk, self.machine.processes, folder, wanted.key)
            if is_gone or writers:
                return JobReport(wanted.key, Progress(requeue="it was not started there" if is_gone else ""))
            lost = Result(None, None, None, SESSION_LOST, f"its files are gone: {folder}")
            return JobReport(wanted.key, Progress(result=lost, is_over=True))
        progress, usage = hosted.progress, self.observer.find_usage(job.id)
        if progress.requeue or (progress.result and progress.result.cause == LAUNCH):
            return JobReport(wanted.key, progress)          # the output that may be there is another attempt's
        if progress.is_over and is_folder(self.disk, f"{folder}/files"):
            progress = replace(progress, files=f"{folder}/files")
        # What was lost, or cannot be read, counts if it has arrived.
        here, is_this_boot = measure_logs(self.disk, folder), job.current.boot_id == self.machine.boot_id
        out, err = [size if size and (is_this_boot or size > have) else have for size,
                    have in zip(here, wanted.log_sizes)]
        report = JobReport(wanted.key, progress, (out, err), samples=usage.samples, rss_mib=usage.rss_mib)
        if report.log_sizes == wanted.log_sizes:
            return report
        return replace(report, log_offsets=wanted.log_sizes, logs=tuple(
            read_part(self.disk, f"{folder}/{name}", have, min(most_bytes, size - have)) if size > have else b""
            for name, have, size in zip(STREAM_FILES, wanted.log_sizes, (out, err))))

    def reply(self) -> None:
        """Reply to the latest question, if that differs from the last reply or is due by now."""
        question = self.question
        if not (question and self.is_due):
            return
        jobs: list[JobReport] = []
        for wanted in question.jobs:
            try:
                jobs.append(self.report(wanted, question.most_bytes))
            except (OSError, NexusError) as error:      # what is wrong with one job's folder holds up no other
                note = format_line(f"its folder on the node cannot be used: {error}", 300)
                jobs.append(JobReport(wanted.key, Progress(notes=(note,))))
        trouble = self.observer.find_error() or ""
        gpus = tuple(replace(gpu, fault=gpu.fault or trouble or None) for gpu in self.observer.gpus
                     if not is_left_out(gpu, self.config.gpu))
        report, former = Report(question.number, self.clock.now(), tuple(jobs), self.folders, trouble, gpus), self.told
        has_output = any(any(job_report.logs) for job_report in jobs)
        told = replace(report, now=0.0, jobs=tuple(
            replace(job_report, logs=(b"", b"")) if any(job_report.logs) else job_report for job_report in jobs))
        if told != former or has_output or self.clock.monotonic() - self.asked_at >= LOOK_WAIT_S:
            self.told, self.is_due = told, False
            self.send(replace(report, gpus=None) if former and former.gpus == gpus else report)

    def forget(self, key: str) -> None:
        """Drop an attempt that the head does not know any more.  Files that it wrote in its checkout stay."""
        folder = self.find_folder(key)
        self.job_host.forget(self.jobs.pop(key))
        self.limits.pop(key, None)
        if folder not in map(self.find_folder, (*self.jobs, *self.wanted)):
            remove_job_files(self.disk, self.layout.log_dir, folder)

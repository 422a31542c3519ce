"""What a node has told: the output of its jobs, what became of them, its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ..machine.disk import Disk, open_file
from ..machine.job_files import STREAM_FILES, append_log, measure_logs
from ..opening import TYPE_CHECKING
from ..schedule.capacity import find_age
from ..values.changes import add_notes
from ..values.gpu import Gpu
from ..values.job import Job
from ..values.value import replace
from .hosted_job import Progress
from .loop import Component
from .node_protocol import JobReport, Question, Report
from .observer import JobUsage

if TYPE_CHECKING:
    from .node import Node

NOTES_INTERVAL_S = 5.0          # notes of a job that runs on a node are recorded no more often


def measure_output(disk: Disk, job: Job) -> tuple[int, int]:
    """(bytes of stdout.log, bytes of stderr.log) that this attempt's node has sent so far."""
    sizes = measure_logs(disk, job.log_dir)
    return max(0, sizes[0] - job.log_base[0]), max(0, sizes[1] - job.log_base[1])


class Reports(Component):
    """What is known of a node, and of its jobs: its thread takes in each reply, and the loop looks at that."""

    def __init__(self, node: Node) -> None:
        import threading
        super().__init__(node.service)
        self.node = node
        self.guard = threading.Lock()                       # held to change `jobs`
        # {attempt_key: the last report, also that its order could not be made or sent}
        self.jobs: Mapping[str, JobReport] = {}
        # {attempt_key: (what is wrong with its latest report, UTC when the first such came)}
        self.faults: Mapping[str, tuple[str, float]] = {}
        self.noted_at: dict[str, float] = {}                # {attempt_key: monotonic, when its notes changed last}
        self.gpus: tuple[Gpu, ...] = ()
        self.gpu_error = ""                                 # why its agent gives no GPU
        self.folders: Mapping[str, bool] = {}               # directories that were asked for: is it there?
        self.clock_offset_s = 0.0                           # its clock minus ours
        self.log_error = ""                                 # why output could not be written

    def take(self, question: Question, report: Report, faults: Mapping[str, str]) -> None:
        """Take in what is new.  `faults`: of read_report()."""
        jobs = {job.attempt_key: job for job in self.node.list_own()}
        found = [(jobs[job_report.key], job_report) for job_report in report.jobs if job_report.key in jobs]
        self.append_output(found)
        self.note_faults(jobs, {job_report.key for _, job_report in found}, faults)
        with self.guard:
            reports = {key: former for key, former in self.jobs.items() if key in jobs}
            reports.update((job_report.key, replace(job_report, logs=(b"", b""))) for _, job_report in found)
            self.jobs = reports
        self.folders = {path: report.folders[path] for path in question.folders if path in report.folders}
        self.gpu_error = report.trouble
        self.clock_offset_s = report.now - self.clock.now()
        if report.gpus is not None:                         # of all other fields the head decides
            self.gpus = tuple(replace(
                gpu, node=self.node.name, uuid=f"{self.node.name}/{gpu.uuid}", is_paused=False, pause_reason=None,
                utilization_mean=None, utilization_peak=None) for gpu in report.gpus)

    def append_output(self, found: Iterable[tuple[Job, JobReport]]) -> None:
        """Append jobs' output that comes next in their logs here.

        A log that the job has cut, as `echo done > /dev/stderr` does, begins anew here too.
        """
        former, self.log_error = self.log_error, ""
        for job, report in found:
            have, there = report.log_offsets, report.log_sizes
            if not job.log_dir or not there or there == have:
                continue                                    # there is nothing new
            if have != measure_output(self.disk, job):
                continue                                    # it is not what comes next
            try:
                for number, name in enumerate(STREAM_FILES):
                    path, start = os.path.join(job.log_dir, name), job.log_base[number]
                    if report.logs[number]:
                        append_log(self.disk, path, report.logs[number], start)
                    elif there[number] < have[number]:
                        with open_file(self.disk, path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW) as handle:
                            self.disk.truncate(handle, start)
            except OSError as error:
                self.log_error = f"output of jobs there, like {job.id}, cannot be kept ({error}); it is tried again"
        if self.log_error:
            self.clock.sleep(1.0)
            if self.log_error != former:
                self.log.warning("Node %s: %s", self.node.name, self.log_error)

    def note_faults(self, jobs: Mapping[str, Job], told: set[str], faults: Mapping[str, str]) -> None:
        """Note what is wrong.  Of what is not told, or told wrongly, that before it counts: nothing changes."""
        now, former = self.clock.now(), self.faults
        latest = {key: fault for key, fault in former.items() if key in jobs and key not in told}
        for key, words in faults.items():
            if key in jobs:
                began_at = former[key][1] if key in former else now
                latest[key] = words, began_at
        self.faults = latest
        for key in latest.keys() - former.keys():
            self.log.warning("Node %s: of job %s it answers what no nexus does: %s",
                             self.node.name, jobs[key].id, latest[key][0])

    def set(self, key: str, progress: Progress) -> None:
        """Note what became of an attempt that could not be ordered."""
        with self.guard:
            self.jobs = {**self.jobs, key: JobReport(key, progress)}

    def translate(self, job: Job, report: JobReport) -> Progress:
        """What is known of a job there, with this machine's times.  It is over when all its output has arrived."""
        self.service.observer.usage[job.id] = JobUsage(report.samples, report.rss_mib)
        result, progress, age_s = report.progress.result, report.progress, find_age(job, self.clock.now())
        if result and result.finished_at:
            result = replace(result, finished_at=result.finished_at - self.clock_offset_s)
        if result and result.runtime_seconds and age_s > 0:
            result = replace(result, runtime_seconds=min(result.runtime_seconds, age_s))
        is_over = progress.is_over and report.log_sizes in (None, measure_output(self.disk, job))
        notes, left = progress.notes, progress.processes_left
        if progress.files:
            notes = (*notes, f"files that it wrote are kept: {self.node.name}:{progress.files}")
        ran, key, now = job.current, job.attempt_key, self.clock.monotonic()
        if (add_notes(ran.notes, notes), left) != (ran.notes, ran.processes_left):
            if not is_over and now < self.noted_at.get(key, float("-inf")) + NOTES_INTERVAL_S:
                notes, left = ran.notes, ran.processes_left     # else each reply could be a line of the journal
            else:
                self.noted_at = {**{noted: at for noted, at in self.noted_at.items() if noted in self.jobs}, key: now}
        return replace(progress, result=result, is_over=is_over, notes=notes, processes_left=left)

    def find_limit(self) -> str | None:
        """What is wrong with the latest reply, which is taken in all the same."""
        return next((f"of job {key.partition('-')[0]} it answers what no nexus does: {words}"
                     for key, (words, _) in self.faults.items()), None)

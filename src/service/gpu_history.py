"""What each GPU did: kept by minute, and as runs of jobs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Container, Iterable

from ..formats.gpu_history import HISTORY_S, MINUTES, TENS, HistoryHead, Ring, format_history_head
from ..formats.state_file import seal
from ..hosting.events import WATCH_INTERVAL_S, Worker
from ..hosting.loop import Component
from ..machine.disk import append_whole, disk_errors, find_files, make_folder, open_file, read_changed_at, remove_file, write_atomic
from ..machine.history_files import read_history_head, read_means, read_runs, write_means
from ..machine.layout import HISTORY_ENDING
from ..opening import TYPE_CHECKING
from ..schedule.capacity import read_gpu
from ..values.errors import NexusError
from ..values.gpu import SERIES, Gpu, GpuMeans, GpuRun, combine_means
from ..values.job import NO_ATTEMPT, RUNNING, Job
from ..values.text import format_time, parse_duration
from ..values.value import replace
from ..views.usage import (
    FINE_S,
    HISTORY_SINCE,
    STEPS,
    find_used,
    job_usage_json,
    list_gpu_runs,
    merge_runs,
    run_json,
    series_json,
    sum_others_s,
)
from .access import Identity

if TYPE_CHECKING:
    from typing import Any

    from .service import Service

MAX_UNWRITTEN = 10000           # minutes of GPUs that wait for a disk
MAX_GONE_GPUS = 64              # whose history is kept
RUNS_S = 7 * 86400.0            # how long what ran on GPUs is kept, apart from the jobs
MAX_RUNS = 20000
MIN_RUNS = 1000                 # that may be too many in runs.jsonl before it is written anew


class GpuHistory(Component):
    """What each GPU did, minute by minute, and what ran on it: for longer than State has these jobs.

    The loop takes readings, requests read files, and a thread writes: so a slow or a full disk holds up neither.
    """

    def __init__(self, service: Service) -> None:
        import collections
        import threading
        super().__init__(service)
        self.lock, self.writing = threading.Lock(), threading.Lock()        # of the readings; of the files and `runs`
        self.minutes: dict[str, GpuMeans] = {}              # {GPU uuid: of the minute that goes on}
        self.heads: dict[str, str] = {}                     # {GPU uuid: the head of its file}
        self.unwritten: collections.deque[tuple[str, GpuMeans]] = collections.deque(maxlen=MAX_UNWRITTEN)
        self.ended: collections.deque[Job] = collections.deque()        # jobs whose attempts may be new
        self.runs: dict[tuple[str, int, float], GpuRun] | None = None   # by their keys; None: they are not read yet
        self.unwritten_runs: list[GpuRun] = []
        self.line_count = -1                                # of runs.jsonl; -1: it must be written anew
        self.cleaned_at = float("-inf")                     # monotonic
        self.write_error: NexusError | None = None
        self.worker = Worker(service, "keeping the GPUs' history", self.write)

    def take_readings(self, gpus: Iterable[Gpu], unread: Container[str]) -> None:
        """Add a reading of each GPU to its minute.  `unread`: machines of which the readings are old."""
        at, jobs = self.clock.now() // MINUTES.step_s * MINUTES.step_s, dict[str, list[Job]]()
        for job in self.service.running_jobs():
            for uuid in job.current.gpu_uuids:
                jobs.setdefault(uuid, []).append(job)
        with self.lock:
            for gpu in gpus:
                if gpu.fault or gpu.node in unread:
                    continue
                reading = read_gpu(gpu, jobs.get(gpu.uuid, ()), self.config.gpu, at)
                former = self.minutes.get(gpu.uuid)
                if former and former.at == at:
                    reading = combine_means(at, [former, reading])
                else:
                    self.unwritten.extend([(gpu.uuid, former)] if former else [])
                    self.heads[gpu.uuid] = format_history_head(gpu)
                self.minutes[gpu.uuid] = reading

    def note_ends(self, jobs: Iterable[Job]) -> None:
        """Keep the last attempts of these jobs, whose status has changed, soon."""
        ended = [job for job in jobs if job.attempts and job.attempts[-1].gpu_uuids and job.status != RUNNING]
        if ended:
            self.ended.extend(ended)
            self.worker.wanted.set()

    def keep(self, jobs: Iterable[Job]) -> None:
        """Keep the attempts of jobs that are about to be forgotten: a kill may have come before that."""
        self.ended.extend(jobs)
        with contextlib.suppress(NexusError):               # the disk is full: the thread tries again
            self.write_runs()

    def write(self) -> float:
        """Write what is whole; return the seconds until the next minute is."""
        now = self.clock.now()
        errors = list[NexusError]()
        acts: list[Callable[[], None]] = [lambda: self.write_minutes(now // MINUTES.step_s * MINUTES.step_s)]
        if self.ended or self.runs is not None:             # to read them may take a second: not before that
            acts.append(self.write_runs)
        for act in acts:                                    # what holds up one of them does not hold up the other
            try:
                with disk_errors("write", self.layout.history_dir):
                    act()
            except NexusError as error:
                errors.append(error)
        if errors and self.write_error is None and not self.store.last_error:
            self.log.error("%s: the history of the GPUs has a gap until it can be written", errors[0].message)
        self.write_error = errors[0] if errors else None
        return MINUTES.step_s - now % MINUTES.step_s + WATCH_INTERVAL_S

    def write_minutes(self, present: float) -> None:
        """Write the minutes, but for the one that began at `present`.  Raises: OSError, unavailable."""
        minutes, errors = dict[str, list[GpuMeans]](), list[NexusError]()
        with self.writing:
            with self.lock:
                for uuid in [uuid for uuid, minute in self.minutes.items() if minute.at != present]:
                    self.unwritten.append((uuid, self.minutes.pop(uuid)))
                for uuid, minute in self.unwritten:
                    minutes.setdefault(uuid, []).append(minute)
            if minutes:
                make_folder(self.disk, self.layout.history_dir)
            for uuid, those in minutes.items():
                path = self.layout.history_file(uuid)
                try:
                    with disk_errors("write", path):
                        write_means(self.disk, path, self.heads[uuid], those)
                except NexusError as error:
                    errors.append(error)
                    continue
                with self.lock:
                    for minute in those:
                        self.unwritten.remove((uuid, minute))
            if minutes and self.clock.monotonic() - self.cleaned_at > TENS.step_s:
                self.cleaned_at = self.clock.monotonic()
                self.clean()
        if errors:
            raise errors[0]

    def clean(self) -> None:
        """Remove the files of GPUs that have been gone for longer than they go back.  Raises: unavailable."""
        present = {self.layout.history_file(gpu.uuid) for gpu in self.service.gpu_watch.all_gpus()}
        changed = {path: read_changed_at(self.disk, path) / 1e9 for path in self.find_files() if path not in present}
        for number, path in enumerate(sorted(changed, key=lambda path: -changed[path])):
            if number >= MAX_GONE_GPUS or self.clock.now() - changed[path] > HISTORY_S:
                remove_file(self.disk, path)

    def find_files(self) -> list[str]:
        return find_files(self.disk, os.path.join(self.layout.history_dir, ""), HISTORY_ENDING)

    def end(self) -> None:
        """Write all that there is: the next service adds to this minute.  Raises: unavailable."""
        with disk_errors("write", self.layout.history_dir):
            if self.ended or self.unwritten_runs:
                self.write_runs()
            self.write_minutes(0.0)

    def write_runs(self) -> None:
        """Write the attempts that are not written yet.  Raises: unavailable."""
        with self.writing, disk_errors("write", self.layout.runs_file):
            runs = self.take_runs()
            lines = [seal(ran) + "\n" for ran in self.unwritten_runs]
            is_anew = self.line_count < 0 or self.line_count > 2 * len(runs) + MIN_RUNS
            if is_anew or lines:
                make_folder(self.disk, self.layout.history_dir)
            if is_anew:
                lines = [seal(ran) + "\n" for ran in runs.values()]
                write_atomic(self.disk, self.layout.runs_file, lines)
                self.line_count = 0
            elif lines:
                with open_file(self.disk, self.layout.runs_file,
                               os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK) as handle:
                    append_whole(self.disk, handle, "".join(lines).encode())
            self.line_count += len(lines)
            self.unwritten_runs = []

    def take_runs(self) -> dict[tuple[str, int, float], GpuRun]:
        """The attempts of the last days that have ended, with those that ended just now.  Raises: OSError."""
        if self.runs is None:
            found, is_whole = read_runs(self.disk, self.layout.runs_file)
            self.runs = {ran.key: ran for ran in found}
            self.line_count = len(found) if is_whole else -1
            self.ended.extend(self.store.state.jobs.values())       # a killed service may not have written the last
        oldest = self.clock.now() - RUNS_S
        while self.ended:
            for ran in list_gpu_runs(self.ended.popleft()):
                if ran.finished_at is not None and ran.finished_at > oldest and ran.key not in self.runs:
                    self.runs[ran.key] = ran
                    self.unwritten_runs.append(ran)
        while self.runs:
            key, first = next(iter(self.runs.items()))
            if len(self.runs) <= MAX_RUNS and (first.finished_at or 0.0) > oldest:
                break
            del self.runs[key]
        return self.runs

    def list_runs(self, begin: float) -> list[GpuRun]:
        """The attempts that go on, or ended after `begin`."""
        live = [ran for job in self.service.running_jobs() for ran in list_gpu_runs(job) if ran.finished_at is None]
        runs = list[GpuRun]()
        with contextlib.suppress(NexusError), self.writing, disk_errors("read", self.layout.runs_file):
            runs = [ran for ran in self.take_runs().values() if (ran.finished_at or 0.0) > begin]
        ended = {ran.key for ran in runs}                   # one may have ended just now
        return [*runs, *(ran for ran in live if ran.key not in ended)]

    def read(self, uuid: str, ring: Ring, begin: float, end: float) -> list[GpuMeans]:
        """The means of a GPU, with those of the minute that goes on."""
        means = {each.at: each for each in read_means(self.disk, self.layout.history_file(uuid), ring, begin, end)}
        with self.lock:
            parts = [minute for name, minute in self.unwritten if name == uuid]
            parts += [self.minutes[uuid]] if uuid in self.minutes else []
        for part in parts:
            at = part.at // ring.step_s * ring.step_s
            if begin // ring.step_s * ring.step_s <= at <= end:
                means[at] = combine_means(at, [*([means[at]] if at in means else []), part])
        return list(means.values())

    def list_heads(self, begin: float) -> list[tuple[HistoryHead, bool]]:
        """(a GPU, whether it is gone) of all GPUs that are there, and of those that were after `begin`."""
        gpus = self.service.gpu_watch.all_gpus()
        heads = [(HistoryHead(gpu.uuid, gpu.place, gpu.node or self.service.node, gpu.name), False) for gpu in gpus]
        present = {self.layout.history_file(gpu.uuid) for gpu in gpus}
        for path in self.find_files():
            if path not in present and read_changed_at(self.disk, path) / 1e9 > begin:
                head = read_history_head(self.disk, path)
                if head:
                    heads.append((replace(head, node=head.node or self.service.node), True))
        return heads

    def measure_others(self, begin: float) -> float:
        """For how many seconds since then others used GPUs of this machine, all of these together."""
        now = self.clock.now()
        ring = MINUTES if now - begin <= MINUTES.step_s * (MINUTES.count - 1) else TENS
        begin = max(begin, now - ring.step_s * (ring.count - 1))
        return sum(sum_others_s(self.read(head.uuid, ring, begin, now), ring.step_s, begin, now)
                   for head, _ in self.list_heads(begin) if head.node == self.service.node)

    def describe(self, caller: Identity, since_s: float | None, step: str | None, series: Collection[str],
                 merge_s: float) -> dict[str, Any]:
        """GET /gpus/history.  Raises: unavailable."""
        from collections import Counter
        now = self.clock.now()
        since_s = min(parse_duration(HISTORY_SINCE) if since_s is None else since_s, HISTORY_S)
        finest = MINUTES if since_s <= MINUTES.step_s * MINUTES.count else TENS
        ring = STEPS[step] if step else finest
        begin = max(0.0, now - since_s) // ring.step_s * ring.step_s
        begin = max(begin, now // ring.step_s * ring.step_s - (ring.count - 1) * ring.step_s)
        heads, runs = self.list_heads(begin), self.list_runs(begin)
        means = {head.uuid: self.read(head.uuid, ring, begin, now) for head, _ in heads}
        gpus = [{**vars(head), "is_gone": is_gone,
                 **series_json(means[head.uuid], ring, begin, now, series or SERIES)} for head, is_gone in heads]
        rows = merge_runs(runs, merge_s)
        told = [*(each.at for those in means.values() for each in those), *(ran.started_at for ran in runs)]
        first = max(begin, min(told, default=begin))
        others_s = sum(sum_others_s(those, ring.step_s, first, now) for those in means.values())
        return {"begin": format_time(begin), "end": format_time(now), "step_seconds": ring.step_s,
                "used": round(find_used(runs, [*means], first, now), 3),
                "used_by_others": round(others_s / max(1.0, (now - first) * len(means)), 3),
                "counts": Counter(ran.status for ran in runs), "gpus": gpus,
                "rows": [run_json(ran, counts, caller.may_see(ran.user)) for ran, counts in rows]}

    def describe_job(self, job: Job) -> dict[str, Any]:
        """GET /jobs/{id}/usage: the readings of the GPUs of its last attempt that began."""
        last = next((attempt for attempt in reversed(job.attempts) if attempt.started_at is not None), NO_ATTEMPT)
        now, begin = self.clock.now(), last.started_at or 0.0
        end = last.finished_at or now
        is_fine = end - begin <= FINE_S and begin > now - MINUTES.step_s * (MINUTES.count - 1)
        ring = MINUTES if is_fine else TENS
        # A step counts where most of it is of the attempt.
        first = (begin + ring.step_s / 2) // ring.step_s * ring.step_s
        final = (end - ring.step_s / 2) // ring.step_s * ring.step_s
        is_long = end - begin >= ring.step_s
        found = {uuid: self.read(uuid, ring, first, final) if is_long else [] for uuid in last.gpu_uuids}
        return job_usage_json(job, last, found, ring, first, max(first, final), end - begin)

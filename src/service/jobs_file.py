"""The jobs file that is watched: each of its lines becomes a job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from shlex import quote

from ..formats.jobs_file import CUDA_OPTION, JobsRow, parse_jobs_file
from ..hosting.events import Worker
from ..machine.disk import read_text, stamp_of
from ..machine.search_path import find_python
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import COMMAND
from ..values.schema import check
from ..values.state import Put
from ..values.submission import Asked
from ..values.text import format_line, hash_text, list_some
from ..values.value import replace

if TYPE_CHECKING:
    from .service import Service

JOBS_FILE_BYTES = 16 * 2**20

MAX_FAULTS_LOGGED = 20          # each time the jobs file is read


class JobsFile:
    """Queues the jobs of the jobs file whenever the file changes."""

    def __init__(self, service: Service, path: str) -> None:
        self.service, self.path = service, os.path.abspath(os.path.expanduser(path))
        self.error = ""                                     # why it cannot be read, or its jobs not be queued
        self.began_at = float("inf")                        # when this reading began, monotonic; inf: none goes on
        self.faults: list[str] = []                         # that, and what is wrong with its lines
        self.stamp: tuple[int, ...] | None = None
        self.worker = Worker(service, "reading the jobs file", self.watch)

    def watch(self) -> float:
        """Read the file; return the seconds until the next call."""
        self.began_at = self.service.clock.monotonic()
        before, self.stamp = self.stamp, stamp_of(self.service.disk, self.path)
        self.load(self.stamp == before)
        self.began_at = float("inf")
        return self.service.config.jobs.jobs_file_interval_seconds

    def load(self, is_whole: bool) -> None:
        """Queue new rows of the jobs file; log new faults.  `is_whole`: nobody is writing the file now."""
        faults = list[str]()
        try:
            text = read_text(self.service.disk, self.path, JOBS_FILE_BYTES)
            self.error = f"there is no file {self.path}" if text is None else ""
            rows, faults = parse_jobs_file((text or "") + "\n" * is_whole)      # its last line may lack the newline
            faults += self.submit_rows(rows, is_whole and bool(text))       # empty: a program may be about to write it
        except NexusError as error:
            self.error = error.message
        faults, former = [*filter(None, [self.error]), *faults], set(self.faults)
        for fault in list_some([fault for fault in faults if fault not in former], MAX_FAULTS_LOGGED):
            self.service.log.warning("%s: %s", self.path, fault)
        self.faults = faults

    def submit_rows(self, rows: Sequence[JobsRow], is_whole: bool) -> list[str]:
        """Queue rows with new content; if the file `is_whole`, forget rows that are gone.  Return the faults."""
        from collections import Counter
        digests, faults = [hash_text(row.content)[:16] for row in rows], list[str]()
        counts, caller = Counter(digests), replace(self.service.owner, name="the jobs file")
        before = self.service.store.state.seen
        # A row that was removed from the file counts as new when it comes back.
        seen = {digest: min(count, counts[digest]) if is_whole else count for digest, count in before.items()}
        for digest, row in dict(zip(digests, rows)).items():
            if counts[digest] > seen.get(digest, 0):
                try:
                    self.service.admission.admit([self.make_asked(row)], caller)
                    seen[digest] = counts[digest]
                except NexusError as error:
                    faults.append(f"line {row.line}, '{format_line(row.script, 100)}': {error.message}")
        puts = [Put("seen", digest, count or None) for digest, count in seen.items() if count != before.get(digest)]
        if puts:
            self.service.store.update(lambda state: puts)
        return faults

    def make_asked(self, row: JobsRow) -> Asked:
        script, is_adding = os.path.expanduser(row.script), self.service.config.jobs.cuda_arg == "add"
        program = "bash"
        if not script.endswith(".sh"):
            program = "python" if row.conda else find_python(self.service.environ)
        command = check(COMMAND, " ".join(filter(None, [program, quote(script), row.arguments])), "the command")
        cuda_arg = is_adding or bool(re.search(CUDA_OPTION, command))
        return Asked({"command": command, "cwd": os.path.dirname(self.path), "priority": row.priority,
                      "conda": row.conda, "gpu_ids": row.gpu_ids, "cuda_arg": cuda_arg}, unique=True)

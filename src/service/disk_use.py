"""How large the logs and the history are, and whose logs are the largest.

That is measured in a thread of its own, now and then: no request waits for a disk.  The logs of a finished job do not
grow, so they are measured once.  What a job itself made in its folder, like `files`, does not count: nexus never
removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..hosting.events import Worker
from ..hosting.loop import Component
from ..machine.disk import find_files, measure
from ..machine.job_files import measure_logs
from ..opening import TYPE_CHECKING
from ..values.job import FINAL, Job
from ..values.text import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from typing import Any

    from .service import Service

MEASURE_INTERVAL_S = 600.0
MAX_MEASURED = 2000             # jobs at a time: more are measured after REST_S
REST_S = 5.0
SAID_LARGEST = 5


class DiskUse(Component):
    """Knows how many bytes logs and history took when they were last measured."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.sizes: dict[tuple[str, int], int] = {}         # {(job id, number): bytes of its logs}, of finished jobs
        self.measured: dict[str, Any] | None = None         # of GET /health and the page; None: not yet
        self.measured_at = 0.0
        self.worker = Worker(service, "measuring the logs", self.measure)

    def measure(self) -> float:
        """Measure what is not known yet; return the seconds until the next time."""
        jobs = [job for job in list(self.store.state.jobs.values()) if job.log_dir]
        sizes, left = dict[tuple[str, int], int](), MAX_MEASURED
        for job in jobs:
            key = job.id, job.number
            size = self.sizes.get(key)
            if size is None and left:
                left, size = left - 1, self.measure_jobs([job])
            if size is not None:
                sizes[key] = size
        self.sizes = {(job.id, job.number): sizes[job.id, job.number] for job in jobs
                      if job.status in FINAL and (job.id, job.number) in sizes}
        self.measured_at = self.clock.now()
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:SAID_LARGEST]
        self.measured = {
            "jobs": len(sizes), "log_bytes": sum(sizes.values()),
            "history_bytes": sum(measure(self.disk, path) for path in find_files(
                self.disk, os.path.join(self.layout.history_dir, ""))),
            "largest": [{"id": job_id, "log_bytes": size} for (job_id, _), size in largest if size]}
        return MEASURE_INTERVAL_S if len(sizes) == len(jobs) else REST_S

    def measure_jobs(self, jobs: Iterable[Job]) -> int:
        """The bytes of these jobs' logs as they are now."""
        return sum(sum(measure_logs(self.disk, job.log_dir)) for job in jobs)

    def tell(self) -> str:
        """`12.3GB of 980 jobs, the largest: abc 4GB, abd 2GB; history 3MB; 5m ago`; empty before it was measured."""
        found = self.measured
        if found is None:
            return ""
        largest = ", ".join(f"{row['id']} {format_bytes(row['log_bytes'])}" for row in found["largest"])
        return (f"{format_bytes(found['log_bytes'])} of {format_count(found['jobs'], 'job')}"
                f"{largest and ', the largest: '}{largest}; history {format_bytes(found['history_bytes'])}; "
                f"{format_duration(self.clock.now() - self.measured_at)} ago")

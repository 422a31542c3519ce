"""What has the backends start a job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from ..formats.runner_events import News, Result
from ..hosting.events import WATCH_INTERVAL_S
from ..hosting.hosted_job import Order
from ..hosting.loop import Component
from ..hosting.node import Node
from ..machine.disk import find_status, read_bytes
from ..machine.git import push_snapshot
from ..machine.job_files import clear_way, make_job_folder, put_aside
from ..machine.search_path import ask_folder
from ..opening import TYPE_CHECKING
from ..schedule.reasons import Start
from ..values.causes import LAUNCH
from ..values.changes import change_status
from ..values.errors import NexusError, describe_exception
from ..values.job import RUNNING, SUBMITTED, Job, begin_attempt
from ..values.state import Put
from ..values.text import format_line, hash_text, join_some, list_case_variants
from ..values.value import replace
from ..views.show import format_place

if TYPE_CHECKING:
    from typing import Any


class Starter(Component):
    """Starts jobs through their backends."""

    looked_at = float("-inf")                   # monotonic: when the processes of --after-pid were looked at

    def intend(self, job: Job, start: Start, now: float) -> Put:
        where: dict[str, Any] = {"nonce": self.clock.new_token()[:16]}
        cwd = self.layout.work_folder(job.id) if job.code else job.cwd
        folders = {"log_dir": self.layout.job_folder(job.id), "cwd": cwd}
        if self.service.is_slurm:
            begun = begin_attempt(job, slurm_key=self.clock.new_token()[-12:], **where)
            return change_status(begun, SUBMITTED, now, **folders)
        node = self.service.pool.nodes.get(start.node)
        hello = node.hello if node else None
        where.update(node=start.node, boot_id=hello.boot_id if hello else self.machine.boot_id)
        begun = begin_attempt(job, gpu_indices=start.gpu_indices, gpu_uuids=start.gpu_uuids,
                              gpu_slice=start.gpu_slice, started_at=now, **where)
        return change_status(begun, RUNNING, now, **folders)

    def release_waiting(self) -> None:
        """Record which processes of --after-pid have ended."""
        if self.clock.monotonic() - self.looked_at < WATCH_INTERVAL_S:
            return
        self.looked_at = self.clock.monotonic()
        for job in list(self.store.state.pending.values()):
            pid, started, boot_id = job.after_process or (0, 0, "")
            if pid and not (boot_id == self.machine.boot_id and self.machine.processes.is_alive(pid, started)):
                self.service.record(job, after_process=None)
                self.log.info("Job %s: process %d has ended, after which it was to start", job.id, pid)

    def start(self, job: Job, variables: Mapping[str, str] | None) -> None:
        """Start a job whose intent is on disk.  After a crash before its claim, the next service requeues it."""
        host, is_begun = self.service.job_host, False
        try:
            self.make_room(job)
            backend = next((backend for backend in self.service.backends if backend.has(job)), self.service.local)
            is_begun = backend.start(job, variables)
        except (OSError, NexusError) as error:
            host.fail(job, host.judge_start_error(error, job))
        except Exception as error:
            hosted = host.hosted.get(job.attempt_key)
            if not hosted or hosted.launched_at is None:
                cause_line = format_line(describe_exception(error), 300)
                host.fail(job, News(result=Result(None, None, 0.0, LAUNCH, cause_line)))
            raise
        if is_begun:
            self.tell_start(job)
        else:
            self.service.wake()                             # poll() tells why not

    def tell_start(self, job: Job) -> None:
        """Log a start."""
        ran = job.current
        place = format_place(ran.gpu_places, ran.slurm_node or ran.node) or " on the CPU"
        slurm = f" as Slurm's {ran.slurm_id}" if ran.slurm_id else ""
        self.service.tell(job, "Started job %s%s%s: %s", job.id, slurm, place, format_line(job.command, 500))

    def make_room(self, job: Job) -> None:
        """Make the folder of a job's logs; what a forgotten job has left there is put aside.  Raises: OSError."""
        folder = self.layout.folder_of(job)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return self.disk.mkdir(folder)
        others = [other for other in list_case_variants(job.id) if other != job.id and other in self.store.state.jobs]
        for other in others:                            # an older nexus gave such ids
            theirs, ours = (find_status(self.disk, path) for path in (self.layout.job_folder(other), folder))
            if theirs and ours and (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
                raise NexusError("conflict", f"its log folder {folder} is job {other}'s: this file system takes upper "
                                 f"and lower case for the same", hint=f"add it again: nexus retry {job.id}")
        if job.attempt == 1 and find_status(self.disk, folder, is_followed=False):
            aside = put_aside(self.disk, folder)
            self.log.info("Job %s: what was in %s is kept as %s", job.id, folder, aside)
        make_job_folder(self.disk, folder)
        clear_way(self.disk, folder, job.attempt)

    def make_order(self, job: Job, variables: Mapping[str, str] | None) -> Order:
        """What a machine needs to start it.  Raises: OSError; forbidden, when it may not run any more; not_found."""
        code = None
        if job.code:
            code = read_bytes(self.disk, self.layout.code_file(job.code)).decode("utf-8", "surrogateescape")
        if variables is None:
            raise NexusError("not_found", "its environment was lost with a damaged state file; add the job again")
        scripts, folders = self.service.scripts, self.config.jobs.allowed_script_paths
        if folders:                             # on a file system that hangs, it waits as when the disk is full
            return Order(*ask_folder(join_some(folders, mark=" or "), lambda: scripts.restrain(job, variables)), code)
        return Order(*scripts.restrain(job, variables), code)

    def make_node_order(self, node: Node, job: Job, variables: Mapping[str, str] | None) -> Order:
        """make_order() with places, GPUs and limits as they are on the node."""
        order = self.make_order(job, variables)
        job = order.job
        cwd = "" if job.cwd == os.path.expanduser("~") else job.cwd
        if job.snapshot and job.snapshot_repo:
            if job.snapshot not in node.trees:
                name = hash_text(f"{self.store.service_id} {job.snapshot_repo}")[:16]
                node.trees[job.snapshot] = push_snapshot(
                    node.ssh, job.snapshot_repo, job.snapshot, name, self.environ)
            tree = node.trees[job.snapshot]
            cwd = os.path.normpath(os.path.join(tree, os.path.relpath(job.cwd, job.snapshot_repo)))
            job = replace(job, snapshot_repo=tree)
        uuids = tuple(uuid.partition("/")[2] for uuid in job.current.gpu_uuids)
        job = replace(job, cwd=cwd, cpus=None, status_history=(), attempts=(replace(job.current, gpu_uuids=uuids),))
        # Whoever sent a script gave no environment: it would be this service's.
        return Order(job, {} if job.code else order.variables, order.code)

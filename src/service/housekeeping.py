"""What is kept, and for how long: jobs, logs, snapshots, and what a full disk needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..formats.codec import encode_json
from ..hosting.events import WATCH_INTERVAL_S
from ..hosting.loop import Component
from ..machine.disk import make_folder, remove_file, write_atomic
from ..machine.git import release_snapshot
from ..machine.job_files import remove_job_files
from ..opening import TYPE_CHECKING
from ..values.changes import choose_trimmed, forget_jobs
from ..values.choice import Choice
from ..values.errors import NexusError
from ..values.job import FINAL, Job
from ..values.state import State, pause_queue
from ..values.text import format_count, format_line, join_some, refuse
from ..values.usage import age_usage, find_day
from .access import Identity
from .gpu_watch import pause_gpus
from .selection import check_status, choose_jobs

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes
    from .service import Service


class Housekeeping(Component):
    """Keeps the disk in order: forgets finished jobs with their files, keeps sent scripts, writes state.json."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.unwritten: list[Callable[[], None]] = []       # what writes each file that the disk refused
        self.write_error: NexusError | None = None          # with which it did
        self.usage_day = ""                                 # in which age_usage() was done last

    def write_soon(self, write: Callable[[], None]) -> None:
        """Call `write`, and while it raises `unavailable` call it again: a full disk keeps no service from its jobs."""
        self.unwritten.append(write)
        self.write_rest()

    def write_rest(self) -> None:
        write_error = None
        for write in list(self.unwritten):
            try:
                write()
                self.unwritten.remove(write)
            except NexusError as error:
                write_error = error
        if write_error and not self.write_error:
            self.log.error("%s: it is tried again", write_error.message)
        self.write_error = write_error
        if write_error:
            self.store.note_failed_write(write_error)

    def clear(self, choice: Choice, caller: Identity, dry_run: bool = False) -> dict[str, Any]:
        """Forget finished jobs, with their logs; return which, and how large these were.

        `dry_run`: forget nothing.  Raises: usage; as choose_jobs(); unavailable.
        """
        if not set(choice.status or FINAL) <= set(FINAL):
            refuse(f"only finished jobs can be cleared: {', '.join(FINAL)}", "nexus cancel ends jobs that wait or run")

        jobs = choose_jobs(self.store.state, choice, caller, FINAL, self.clock.now())
        for job in jobs if choice.ids else ():
            check_status(job, choice.status or FINAL, "nothing was cleared")
        gone = [job for job in jobs if job.status in FINAL]
        freed_bytes = self.service.disk_use.measure_jobs(gone)
        if not dry_run:
            self.remove(gone, f"as {caller.name} asked", caller.user)
        return {"ids": [job.id for job in gone], "freed_bytes": freed_bytes}

    def trim_history(self) -> float:
        """Remove the finished jobs beyond history_limit; return the seconds until the next call."""
        limit = self.config.state.history_limit
        gone = choose_trimmed(self.store.state, limit)
        now = self.clock.now()
        with contextlib.suppress(NexusError):               # the disk is full; starting a job reports it
            self.remove(gone, f"beyond history_limit = {limit}", "")
            if self.usage_day != (today := find_day(now)):
                self.store.update(lambda state: age_usage(state, now))
                self.usage_day = today
        return WATCH_INTERVAL_S

    def remove(self, gone: Sequence[Job], reason: str, user: str) -> None:
        """Forget finished jobs, with their logs, but not what they used.  `user`: who asked; "": nobody.

        Raises: unavailable.

        Logs go before State: if the service dies between, the next service still knows the jobs.
        """
        if not gone:
            return
        now = self.clock.now()
        self.service.run_guarded("keeping what ran on the GPUs", self.service.gpu_history.keep, gone)

        def forget(state: State) -> Changes:
            # Another request may have removed one meanwhile, and a new job may have its id.
            numbered = [(state.jobs.get(job.id), job.number) for job in gone]
            return forget_jobs(state, [job for job, number in numbered if job and job.number == number], now)

        for job in gone:
            if job.log_dir:
                self.service.run_guarded(f"After job {job.id}", remove_job_files, self.disk, self.layout.log_dir,
                                         job.log_dir)
        self.service.transactions.update(user, gone, forget)
        for code in {job.code for job in gone if job.code}:
            self.service.run_guarded(f"After script {code}", self.drop_code, code)
        for repository, snapshot in {(job.snapshot_repo, job.snapshot) for job in gone if job.snapshot}:
            self.service.run_guarded(f"After snapshot {snapshot}", self.drop_snapshot, repository, snapshot)
        self.service.disk_use.worker.wanted.set()
        self.log.info("Trimmed %s %s, with their logs: %s", format_count(len(gone), "job"), reason,
                      join_some([job.id for job in gone]))

    def drop_snapshot(self, repository: str | None, snapshot: str) -> None:
        """Let go of a snapshot unless a job has it."""
        if repository and not any(job.snapshot == snapshot for job in self.store.state.jobs.values()):
            release_snapshot(repository, snapshot, self.environ)

    @contextlib.contextmanager
    def keep_code(self, name: str, code: bytes | None) -> Iterator[None]:
        """Write a submitted script, if any, before its job is queued; remove it if no job needs it in the end."""
        try:
            if code is not None:
                make_folder(self.disk, self.layout.code_folder)
                write_atomic(self.disk, self.layout.code_file(name), [code.decode("utf-8", "surrogateescape")])
            yield
        finally:
            if code is not None:
                self.drop_code(name)

    def drop_code(self, name: str) -> None:
        """Remove a submitted script unless a job has it: also a retry of the job that it came with."""
        if not any(job.code == name for job in self.store.state.jobs.values()):
            remove_file(self.disk, self.layout.code_file(name))

    # state.json

    def keep_state(self) -> float:
        """Apply edits of state.json; write it when the journal has grown.  Return the seconds until the next call."""
        self.write_rest()
        try:
            if self.store.unsettled:
                self.store.settle()
            self.store.look_for_edit(self.apply_edit)
            if self.store.checkpoint_wanted.is_set() and not self.store.bad_edits:
                self.store.checkpoint_wanted.clear()
                self.store.save_checkpoint()
            return WATCH_INTERVAL_S
        except (OSError, NexusError) as error:
            self.log.warning("state.json could not be written (%s); the journal goes on", error)
            self.store.checkpoint_wanted.set()
            return 10.0

    def apply_edit(self, edit: Mapping[str, Any]) -> None:
        """Apply an edit of state.json.  `paused`: bool; `paused_gpus`: places or uuids of GPUs.  Ignores the rest."""
        is_paused, listed = edit.get("paused"), edit.get("paused_gpus")

        def change(state: State) -> Changes:
            before = state.paused, state.paused_gpus
            if isinstance(is_paused, bool):
                yield from pause_queue(is_paused)
            if isinstance(listed, tuple):
                yield from pause_gpus(state, self.service.gpu_watch.find_uuids(state, listed))
            return before != (state.paused, state.paused_gpus)

        if self.store.update(change):
            self.log.info("Taken over from state.json: %s", format_line(encode_json(edit), 300))
            self.service.wake()

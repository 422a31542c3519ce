"""Jobs are ended, and failures are taken off the list of them."""

from __future__ import annotations

from ..hosting.loop import Component
from ..hosting.slurm import take_slurm_claim
from ..opening import TYPE_CHECKING
from ..schedule.ends import OUR_CLAIM
from ..values.causes import KILLED
from ..values.changes import end_branch
from ..values.choice import Choice
from ..values.dependencies import find_branch, release_dependents
from ..values.errors import NexusError
from ..values.job import CANCELLED, FAILED, FINAL, PENDING, RUNNING, SUBMITTED, Job
from ..values.state import State, change_job
from ..values.text import join_some
from .access import Identity
from .selection import check_status, choose_jobs, confirm_jobs

if TYPE_CHECKING:
    from ..values.state import Changes

class Cancellation(Component):
    """Ends jobs for who may: a caller its own."""

    def cancel(self, choice: Choice, caller: Identity, signal: str | None = None) -> tuple[list[Job], list[str]]:
        """Remove pending jobs from the queue and stop running jobs.

        Returns the jobs that end, as they are then, and which others cannot start after them.  Finished jobs are
        skipped.  All named ones must have `choice.status`.  Raises: not_found, forbidden, conflict.
        """
        now = self.clock.now()
        chosen = choose_jobs(self.store.state, choice, caller, (PENDING, RUNNING), now)

        def find(state: State) -> list[Job]:
            jobs = confirm_jobs(state, chosen, choice, now)
            left = [job for job in jobs if job.status not in FINAL]
            if choice.ids and choice.status:
                for job in jobs if len(jobs) == 1 else left:
                    check_status(job, choice.status, "nothing was done to the others" if len(jobs) > 1 else "", {
                        PENDING: f"take it out of the queue: nexus remove {job.id}",
                        RUNNING: f"stop it: nexus kill {job.id}"})
            if signal and any(job.current.slurm_id for job in left):
                raise NexusError("conflict", "Slurm sends its own signals to the jobs that it runs",
                                 "leave the signal out")
            return left

        # Only when nothing speaks against it: a job whose attempt is claimed here does not run any more.
        withdrawn = {job.current.slurm_key for job in find(self.store.state)
                     if job.status == SUBMITTED and job.current.slurm_id
                     and take_slurm_claim(self.disk, job, self.layout.folder_of(job)) == OUR_CLAIM}

        def stop(state: State) -> Changes:
            left, over = find(state), list[str]()
            branch = [job_id for job_id in find_branch(state, [job.id for job in left])
                      if caller.may_see(state.jobs[job_id].user)]
            for job_id in [job.id for job in left]:
                job = state.jobs[job_id]                            # a job before it may have ended it too
                if job.status == PENDING or job.current.slurm_key in withdrawn:
                    over += yield from end_branch(state, job, CANCELLED, now, cause=KILLED, stop_by=caller.name)
                elif job.status not in FINAL and job.current.stop_cause != KILLED:      # killed means no retry
                    yield change_job(job, stop_cause=KILLED, stop_by=caller.name, stop_line=None, stop_signal=signal)
            yield from release_dependents(state, over)
            return [state.jobs[job.id] for job in left], branch

        ended, dependents = self.service.transactions.update(caller.user, chosen, stop)
        if ended:
            self.log.info("Job %s: stopped by %s", join_some([job.id for job in ended]), caller.name)
            self.service.wake()
        return ended, dependents

    def dismiss(self, choice: Choice, caller: Identity, is_undone: bool) -> list[str]:
        """Take failed jobs off the caller's list of failures, or put them back; return the ids of those that changed.

        Raises: usage, not_found, forbidden; conflict, for a named one that has not failed.
        """
        now = self.clock.now()
        chosen = choose_jobs(self.store.state, choice, caller, (FAILED,), now)

        def mark(state: State) -> Changes:
            jobs, changed = confirm_jobs(state, chosen, choice, now), list[str]()
            for job in jobs if choice.ids else ():
                check_status(job, (FAILED,), "nothing was dismissed")
            for job in jobs:
                others = tuple(user for user in job.dismissed_by if user != caller.user)
                users = others if is_undone else (*others, caller.user)
                if job.status == FAILED and {*users} != {*job.dismissed_by}:
                    yield change_job(job, dismissed_by=users)
                    changed.append(job.id)
            return changed

        return list(self.service.transactions.update(caller.user, chosen, mark))

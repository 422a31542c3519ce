"""Jobs are changed, moved and held; the queue and groups are paused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..formats.codec import encode_json
from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..values.changes import renew_group
from ..values.choice import LIVE_CHANGES, LIVE_FLAGS, LIVE_IN_SLURM, Choice
from ..values.dependencies import find_lost, find_ring
from ..values.errors import NexusError
from ..values.job import FINAL, PENDING, RUNNING, Job
from ..values.queue_order import move_before, move_jobs
from ..values.state import Group, Put, State, change_job, pause_queue
from ..values.submission import check_gpus
from ..values.text import format_line, join_some, refuse
from ..values.value import replace
from .access import Identity, check_group, check_own_group, find_own_job
from .dependencies import LINKS, find_links, list_links, settle_groups
from .queue_limits import check_link_count, find_group_limits, limit_group
from .selection import check_status, choose_jobs, confirm_jobs

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes


class Editor(Component):
    """Changes jobs that have not ended.  `caller`: who may change only their own."""

    def edit(self, choice: Choice, caller: Identity, change: Mapping[str, Any]) -> list[Job]:
        """Change jobs that have not ended, all or none, by the keys of EDIT_KEYS; return them.

        Raises: usage, not_found, forbidden, conflict: of several jobs, with those that cannot be changed so.
        """
        now, asked = self.clock.now(), {*change}
        statuses = (PENDING, RUNNING) if asked <= LIVE_CHANGES.keys() else (PENDING,)
        fields = {name: fact for name, fact in change.items() if name not in ("position", "before")}
        position, before = change.get("position"), change.get("before")
        chosen = choose_jobs(self.store.state, choice, caller, statuses, now)

        def find(state: State) -> list[Job]:
            jobs = confirm_jobs(state, chosen, choice, now)
            return jobs if choice.ids else [job for job in jobs if job.status not in FINAL]

        self.service.scripts.check_env(change.get("env"), caller)
        fields = self.check_change(find(self.store.state), fields, caller)
        if not asked.isdisjoint(("position", "before")) and not caller.is_owner:
            raise NexusError("forbidden", f"only {self.service.user} may move a job ahead of other users' jobs",
                             hint="a priority may be given")
        if asked.issuperset(("position", "before")):
            refuse("position and before do not go together", hint="leave one of the two out")

        def edit(state: State) -> Changes:
            jobs, refused = find(state), dict[str, NexusError]()
            if not asked.isdisjoint(LINKS):
                check_link_count(state, [replace(job, **list_links(state, job, fields)) for job in jobs],
                                 self.service.user)
            for job in jobs:
                try:
                    check_can_edit(job, asked, statuses)
                    yield from self.edit_job(state, job, fields, change, find_group_limits(change), caller)
                except NexusError as error:
                    refused[job.id] = error
            raise_refused(refused, len(jobs))
            moved = [state.jobs[job.id] for job in jobs]
            if not asked.isdisjoint(("group", *LINKS)):
                try:
                    yield from settle_groups(state, [*jobs, *moved])
                except NexusError as error:
                    ring = {name for is_group, name in find_ring(state, [job.id for job in moved]) if not is_group}
                    raise_refused({job.id: error for job in moved if job.id in ring}, len(jobs))
                    raise
            if position is not None and moved:
                yield from move_jobs(state, moved, position == 0)
            elif before is not None:
                yield from self.move_before(state, moved, before, caller)
            return [job.id for job in jobs]

        ids: list[str] = self.service.transactions.update(caller.user, chosen, edit)
        if ids:
            secret = {name: sorted(change[name]) for name in ("env", "environment") if change.get(name) is not None}
            told = {**change, **fields, **secret}
            self.log.info("Job %s changed by %s: %s", join_some(ids), caller.name, format_line(encode_json(told), 300))
            self.service.wake()
        return [self.store.state.jobs[job_id] for job_id in ids]

    def check_change(self, jobs: Sequence[Job], change: Mapping[str, Any], caller: Identity) -> dict[str, Any]:
        """As make_change(), whose error of several jobs says which they are."""
        try:
            return self.service.validator.make_change(jobs, change, caller)
        except NexusError:
            refused, alike = dict[str, NexusError](), dict[object, list[Job]]()
            for job in jobs if "command" not in change else ():
                alike.setdefault(self.service.validator.find_checked(replace(job, command="")), []).append(job)
            for some in alike.values() if len(jobs) > 1 else ():
                try:
                    self.service.validator.make_change(some[:1], change, caller)
                except NexusError as error:
                    refused.update((job.id, error) for job in some)
            raise_refused(refused, len(jobs))
            raise

    def edit_job(self, state: State, job: Job, change: Mapping[str, Any], asked: Mapping[str, Any],
                 limits: Mapping[str, Any], caller: Identity) -> Changes:
        """Change a job by fields of it, by the variables of what was `asked`, and by its group's limits.

        Raises: not_found, forbidden, conflict, usage.
        """
        facts = dict(change)
        if "group" in change and change["group"] != job.group:
            check_own_group(state, change["group"], caller)
        if not change.keys().isdisjoint(LINKS):
            links = list_links(state, job, change)
            facts.update(find_links(state, replace(job, **links), caller, self.clock.now()))
            if lost := find_lost(state, replace(job, **facts), change.get("after_group", ())):
                raise NexusError("conflict", f"job {job.id} could never start: {lost}",
                                 "--after-any or --after-any-group: however that ended")
        own, variables = self.service.validator.change_env(state, job, asked)
        if variables is not None:
            facts.update(own)
            yield Put("environments", facts["environment"], variables)
        if limits:
            check_own_group(state, facts.get("group", job.group), caller)
            yield from limit_group(state, facts.get("group", job.group), limits)
        if facts:
            check_gpus(replace(job, **facts))           # another request may have changed the job
            place = {"queue_key": (0, change["priority"], job.number)} if "priority" in change else {}
            yield from renew_group(state, change.get("group"))
            yield change_job(job, **facts, **place)

    def move_before(self, state: State, moved: Sequence[Job], told: str, caller: Identity) -> Changes:
        """Raises: not_found, conflict."""
        other = check_status(find_own_job(state, told, caller, (PENDING,)), (PENDING,), "nothing was moved")
        if other.id in [job.id for job in moved]:
            raise NexusError("conflict", f"job {other.id} cannot be before itself", "name one that is not moved")
        yield from move_before(state, moved, other)

    def set_paused(self, is_paused: bool, who: str, name: str | None = None) -> None:
        """Pause or resume the queue, or one group.  Raises: not_found."""
        def change(state: State) -> Changes:
            if name is None:
                yield from pause_queue(is_paused)
                return
            check_group(state, name)
            group = state.groups.get(name) or Group(name)
            hold = f"paused by {who} (nexus resume --group {name})" if is_paused else None
            yield Put("groups", name, replace(
                group, hold=hold, is_paused=is_paused, failures=0 if group.hold and not is_paused else group.failures))

        what = f"Group {name}" if name else "Queue"
        self.service.change(change, "%s %s by %s", what, "paused" if is_paused else "resumed", who)
        self.store.checkpoint_wanted.set()                  # other programs read and edit state.json


def check_can_edit(job: Job, asked: Collection[str], statuses: Sequence[str]) -> None:
    """Check a job whose fields `asked` are to be changed, which those in `statuses` take.  Raises: conflict."""
    if "is_held" in asked and job.status == RUNNING:
        raise NexusError("conflict", f"job {job.id} runs, and running jobs cannot be suspended", hint=(
            f"nexus cancel {job.id} ends it, and nexus retry {job.id} runs it again later; nexus pause keeps "
            "others from starting"))
    check_status(job, statuses, "only a pending one can be changed so", {RUNNING: f"a running one takes {LIVE_FLAGS}"})
    if job.current.slurm_key is not None and not {*asked} <= LIVE_IN_SLURM:
        there = job.current.slurm_id or "one that is just being submitted"
        raise NexusError("conflict", f"Slurm has job {job.id} as {there}, and orders it among its own",
                         "there: scontrol update, or top; [slurm] max_submitted says how many it gets at once")


def raise_refused(refused: Mapping[str, NexusError], count: int) -> None:
    """Raises: the error of the job that cannot be changed; of some of `count` jobs, one that names each."""
    if not refused:
        return
    first = next(iter(refused.values()))
    if count == 1:
        raise first
    told = dict[str, list[str]]()               # {what is wrong: the jobs}
    for job_id, error in refused.items():
        told.setdefault(error.message.removeprefix(f"job {job_id} "), []).append(job_id)
    reasons = join_some([f"{join_some(ids)}: {message}" for message, ids in told.items()], 5, "; ")
    raise NexusError(first.kind, f"{len(refused)} of {count} jobs cannot be changed so, and none was: {reasons}",
                     first.hint)

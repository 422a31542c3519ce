"""Jobs are added to the queue: new ones, and retries of those that have ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..values.changes import check_can_retry, find_cancelled, find_retried, is_left_to_retry, renew_group
from ..values.choice import Choice
from ..values.errors import NexusError
from ..values.job import CANCELLED, COMPLETED, FAILED, FINAL, MAX_JOBS, PENDING, PRIORITIES, Job
from ..values.queue_order import next_place
from ..values.state import Put, State, add_job, change_job, find_groups
from ..values.submission import KEPT, Asked, set_values
from ..values.text import format_line, join_some, refuse
from ..values.value import Value, replace
from ..views.api_json import pick
from .access import Identity, check_own_group, check_priority
from .dependencies import LINKS, find_left_groups, find_links, settle_added
from .queue_limits import check_link_count, check_queue_limit, find_group_limits, limit_group
from .selection import check_status, choose_jobs, confirm_jobs
from .transactions import MANY

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes


class Added(Value):
    """The result of a submission."""
    ids: tuple[str, ...]                        # one for each submitted job
    existing: tuple[str, ...] = ()              # the ids of jobs that were there before; of retries, one for each
    jobs: Sequence[Job] = ()                    # the new jobs


class Repeat(Value):
    """A job that is run again, and what of it is to be otherwise."""
    job: Job
    fields: Mapping[str, Any]                   # of Job, as they were checked
    change: Mapping[str, Any]                   # of which those were made
    values: Mapping[str, Sequence[str]] = {}    # other values of its sweep


class DryRun(Exception):
    """Aborts the transaction of a dry run.  Its argument: the Added that a real submission would return."""


class Admission(Component):
    """Takes jobs into the queue.  A `caller` may name only its own jobs."""

    def admit(self, submissions: Sequence[Asked], caller: Identity, key: str | None = None,
              is_dry: bool = False) -> Added:
        """Queue jobs, all or none; a dry run changes nothing.  A `key` used before returns the earlier jobs."""
        if key and caller.user != self.service.user:
            key = f"{caller.user} {key}"
        if sum(not (asked.unique or asked.unless_active) for asked in submissions) > self.config.jobs.queue_limit:
            raise NexusError("queue_full", f"{len(submissions)} jobs are more than the queue takes: queue_limit is "
                             f"{self.config.jobs.queue_limit}", hint="raise [jobs] queue_limit")
        for asked in submissions:
            check_priority(asked.job.get("priority"), caller)
            self.service.scripts.check_env(asked.env or asked.job.get("variables"), caller)
        checked, now = self.service.validator.make_jobs(submissions, caller.user), self.clock.now()

        def add(state: State) -> Changes:
            ids, repeated, new_jobs = list[str](), list[str](), list[Job]()
            earlier = [job for job in state.jobs.values() if job.key == key] if key else []
            same = {name: map_contents(state, name) if any(getattr(asked, name) for asked in submissions) else {}
                    for name in ("unique", "unless_active")}
            if earlier:
                contents = {**same["unless_active"], **same["unique"]}
                return Added(list_again(earlier, contents, [content_of(job) for job, _, _ in checked]))
            check_link_count(state, [job for job, _, _ in checked], self.service.user)
            for checked_job, variables, asked in checked:
                content = content_of(checked_job)
                there = [same[name][content] for name in same if getattr(asked, name) and content in same[name]]
                job_id = there[0] if there else None
                if job_id:
                    repeated.append(job_id)
                else:
                    limits = find_group_limits(vars(asked))
                    job = yield from self.add_job(state, checked_job, caller, now, variables, limits,
                                                  len(checked) > MANY, key=key)
                    job_id = same["unique"][content_of(job)] = same["unless_active"][content_of(job)] = job.id
                    new_jobs.append(job)
                ids.append(job_id)
            yield from settle_added(state, new_jobs, now)
            added = Added(tuple(ids), tuple(repeated), [state.jobs[job.id] for job in new_jobs])
            if is_dry:
                raise DryRun(added)
            return added

        try:
            added: Added = self.service.transactions.update(caller.user, [job for job, _, _ in checked], add)
        except DryRun as tried:
            added = tried.args[0]
            return added
        if added.jobs:
            self.log.info("Job %s added by %s: %s", join_some([job.id for job in added.jobs]), caller.name,
                          format_line(added.jobs[0].command, 300))
            self.service.wake()
        return added

    def add_job(self, state: State, job: Job, caller: Identity, now: float, variables: Mapping[str, str] | None = None,
                limits: Mapping[str, Any] = {}, is_one_of_many: bool = False, **facts: Any) -> Changes:
        """Queue a job; settle_added() follows.  `variables`: None: State has them; `limits`: its group's.

        Raises: queue_full, not_found, forbidden, conflict.
        """
        check_queue_limit(state, job.user, self.config.jobs.queue_limit, self.service.user)
        check_own_group(state, job.group, caller)
        links = find_links(state, job, caller, now)
        if job.environment not in state.environments and variables is not None:
            yield Put("environments", job.environment, variables)
        yield from renew_group(state, job.group)
        yield from limit_group(state, job.group, limits)
        job_id = self.clock.new_job_id(state.jobs, is_one_of_many)
        job = replace(job, id=job_id, cwd=self.layout.work_folder(job_id) if job.code else job.cwd, created_at=now,
                      status_history=((PENDING, now),), **{**links, **next_place(state, job.priority), **facts})
        yield from add_job(job)
        return job

    def retry(self, choice: Choice, caller: Identity, change: Mapping[str, Any] = {},
              values: Mapping[str, Sequence[str]] = {}, is_downstream: bool = False, is_dry: bool = False) -> Added:
        """Queue finished jobs again as new ones, all or none, with a `change` by the keys of CHANGES.

        `values`: those of their sweep that are to be others; of several, each has a job.  `is_downstream`: also the
        jobs that were cancelled because of them; of the change, these take the shell's variables and umask alone.
        `is_dry`: nothing is changed.

        A new job depends on the latest retries of the old job's parents, and what its groups have lost so far does not
        count.  Without ids, those are retried that failed, or lost a parent, or have the status given, and were not
        retried yet.
        Raises: usage, not_found, forbidden, conflict, queue_full.
        """
        now = self.clock.now()
        self.service.scripts.check_env(change.get("env"), caller)
        chosen = choose_jobs(self.store.state, choice, caller, FINAL, now)

        def find(state: State) -> list[Job]:
            jobs = confirm_jobs(state, chosen, choice, now)
            if choice.ids:
                return jobs
            jobs = sorted(jobs, key=lambda job: job.number)             # as they were added, and not as they ended
            if choice.status:
                return [job for job in jobs if job.status in FINAL and not job.retried_as]
            return [job for job in jobs if is_left_to_retry(job.status, job.current.cause, job.retried_as)]

        def add(state: State) -> Changes:
            jobs = find(state)
            for job in jobs:
                check_can_retry(job.id, job.shown_status)
                check_status(job, choice.status or FINAL, "nothing was done")
            left = [job for job in followers if state.jobs.get(job.id) is job]      # what was changed meanwhile is not
            repeats = [*(Repeat(job, fields, change, values) for job in jobs),
                       *(Repeat(job, shell_fields, shell) for job in left)]
            check_link_count(state, [replace(each.job, **pick(each.fields, LINKS & each.fields.keys()))
                                     for each in repeats], self.service.user)
            added = yield from self.run_again(state, repeats, caller, now)
            yield from settle_added(state, [job for job, _ in added], now, fields.get("after_group", ()))
            result = Added(tuple(job.id for job, _ in added), tuple(former for _, former in added),
                           [state.jobs[job.id] for job, _ in added])
            if is_dry:
                raise DryRun(result)
            return result

        earlier = find(self.store.state)
        fields = self.service.validator.make_change(earlier, change, caller)
        self.service.validator.check_folders([replace(job, **fields) for job in earlier])
        self.check_values(earlier, values, change, fields)
        followers = self.list_cancelled(earlier, caller) if is_downstream else []
        shell = pick(change, change.keys() & {"environment", "umask"})
        shell_fields = self.service.validator.make_change(followers, shell, caller)
        try:
            added: Added = self.service.transactions.update(caller.user, [*earlier, *followers], add)
        except DryRun as tried:
            added = tried.args[0]
            return added
        if added.ids:
            self.log.info("Job %s added by %s, as retries", join_some(added.ids), caller.name)
            self.service.wake()
        return added

    def run_again(self, state: State, repeats: Sequence[Repeat], caller: Identity, now: float) -> Changes:
        """Queue jobs as new ones; return each with the id of the former one.  settle_added() follows."""
        added, latest, made = list[tuple[Job, str]](), dict[str, str](), dict[object, Job]()
        for each in repeats:
            job = each.job
            after, after_any = (
                tuple(dict.fromkeys(find_retried(state, parent, latest) for parent in parents if parent in state.jobs))
                for parents in (job.after, job.after_any))
            after = tuple(parent for parent in after if state.jobs[parent].status not in (FAILED, CANCELLED))
            links = {"after": after, "after_any": after_any, **find_left_groups(state, job)}
            # check_priority(): only the owner may give a priority above normal.
            priority = job.priority if caller.is_owner else max(job.priority, PRIORITIES["normal"])
            kept = {name: getattr(job, name) for name in KEPT}
            for number, facts in enumerate(set_values(job, each.values) if each.values else [{}]):
                own, variables = self.service.validator.change_env(state, replace(job, **facts), each.change)
                again = Job(**{**kept, **links, "priority": priority, **facts, **each.fields, **own}, id="",
                            created_at=now, queue_key=())
                new = made.get(content_of(again)) if each.values else None
                if not new:
                    new = yield from self.add_job(state, again, caller, now, variables,
                                                  find_group_limits(each.change), len(repeats) > MANY)
                    made[content_of(new)] = new
                    added.append((new, job.id))
                if number == 0:
                    yield from replace_failure(state, job, state.jobs[new.id])
        return added

    def list_cancelled(self, jobs: Iterable[Job], caller: Identity) -> list[Job]:
        """The jobs that a retry of these leaves cancelled, unless it is told to run them, too; parents first."""
        found = find_cancelled(self.store.state, [job.id for job in jobs])
        return [job for job in found if caller.may_see(job.user)]

    def list_left(self, new_ids: Iterable[str], caller: Identity) -> list[str]:
        """The ids of those that were cancelled because of the jobs of which these are retries."""
        wanted = set(new_ids)
        former = [job for job in self.store.state.jobs.values() if job.retried_as in wanted]
        return [job.id for job in self.list_cancelled(former, caller)]

    def check_values(self, jobs: Sequence[Job], values: Mapping[str, Sequence[str]], change: Mapping[str, Any],
                     fields: Mapping[str, Any]) -> None:
        """Check these jobs with other values of their sweep.  Raises: usage, forbidden."""
        if values and "command" in change:
            refuse("--set fills in the command, and a new command comes instead of it", hint="leave one of the two out")
        if len(jobs) * math.prod(map(len, values.values())) > MAX_JOBS:
            refuse("these values make too many jobs", hint="name fewer jobs, or fewer values")
        if values:
            changed = [replace(job, **{**facts, **fields}) for job in jobs for facts in set_values(job, values)]
            self.service.validator.check_changed(changed, change, {"cwd"})


def replace_failure(state: State, job: Job, again: Job) -> Changes:
    """The changes by which a retry counts in place of a failure, for the groups of that, and no earlier retry does."""
    yield change_job(job, retried_as=again.id)
    if job.status != COMPLETED and find_groups(job):    # with another value one may do several of them again
        yield change_job(again, retried_groups=tuple(dict.fromkeys((*again.retried_groups, *find_groups(job)))))
    groups, earlier = tuple[str, ...](), state.jobs.get(job.retried_as or "")
    while earlier and earlier.retried_groups:   # the earlier one, and the retries of that
        yield change_job(earlier, retried_groups=groups)
        groups = tuple(find_groups(state.jobs[earlier.id]))
        earlier = state.jobs.get(earlier.retried_as or "")


def list_again(earlier: Sequence[Job], contents: Mapping[Any, str], wanted: Sequence[object]) -> tuple[str, ...]:
    """The ids with which a submission was answered before.  `earlier`: the jobs that it added; `wanted`: the contents.

    Where it was unique, several of it may be one job, or one that was there before: `contents`.
    """
    added = sorted(earlier, key=lambda job: job.number)
    ids = tuple(job.id for job in added)
    if not contents or len(ids) == len(wanted):
        return ids
    ids_of: dict[Any, str] = {**contents, **{content_of(job): job.id for job in added}}
    return tuple(ids_of[content] for content in wanted) if ids_of.keys() >= {*wanted} else ids


def map_contents(state: State, option: str) -> dict[object, str]:
    """{the content of a job: its id} of those that `unique` or `unless_active` does not add again."""
    jobs = state.jobs.values() if option == "unique" else (*state.pending.values(), *state.running.values())
    return {content_of(job): job.id for job in jobs if job.status not in (FAILED, CANCELLED)}


def content_of(job: Job) -> tuple[object, ...]:
    """The key by which --unique and --unless-active compare jobs.  The number of a script in its sweep is no part."""
    own = tuple(pair for pair in job.variables if pair[0] != "NEXUS_TASK_ID")
    return job.user, job.command, job.cwd, job.conda, job.env_digest, own

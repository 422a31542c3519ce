"""The routes of jobs, of the queue and of groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..opening import TYPE_CHECKING
from ..schedule.reasons import find_pause
from ..service.access import Identity, check_environment
from ..service.dependencies import describe_old_groups
from ..service.job_lists import choose_pending
from ..service.job_serializer import JOBS_A_PIECE
from ..values.changes import list_jobs
from ..values.choice import (
    CANCEL,
    CANCEL_KEYS,
    CLEAR,
    CLEAR_KEYS,
    DISMISS,
    DISMISS_KEYS,
    EDIT,
    EDIT_CHOICE,
    EDIT_CHOICE_KEYS,
    EDIT_KEYS,
    RETRY,
    RETRY_KEYS,
    Choice,
)
from ..values.dependencies import list_chain
from ..values.job import FINAL, PENDING, RUNNING, STATUSES, Job
from ..values.queue_order import PendingQueue, list_holds
from ..values.schema import read_object
from ..values.submission import ASKED, Asked, parse_submissions
from ..values.text import refuse
from ..values.value import replace
from ..views.api_json import field_json
from ..views.results import format_results_csv
from .api import Api
from .routes import Response, json_response, route

if TYPE_CHECKING:
    from typing import Any


@route("GET /queue", "user", "pending jobs in the order they would start", "Job[]", without=("status",))
def get_queue(api: Api, caller: Identity, choice: Choice, limit: int | None = None,
              fields: Sequence[str] = ()) -> Response:
    return answer_jobs(api, caller, replace(choice, status=(PENDING,)), limit, fields)


@route("POST /queue", "user", "add a job, or a list of jobs, all or none", "Added", body="Submissions")
def post_queue(api: Api, caller: Identity, body: Any, idempotency_key: str | None = None,
               limit: int | None = None) -> Response:
    submissions = parse_submissions(body)
    is_dry = any(asked.dry_run for asked in submissions)
    if limit is not None and not is_dry:
        refuse("limit is for a dry run, whose answer has the jobs", hint="leave it out")
    for asked in submissions:
        check_environment(asked.environment, caller, api.service.user)
    added = api.service.admission.admit(submissions, caller, None if is_dry else idempotency_key, is_dry)
    waiting = [job for job in added.jobs if job.status == PENDING]
    lost = next((job for job in added.jobs if job.status != PENDING), None)
    warning = lost and f"job {lost.id} was cancelled at once: {lost.current.cause_line}"
    groups = dict.fromkeys(name for asked in submissions for key in ("after_group", "after_any_group")
                           for name in asked.job.get(key, ()))
    old = describe_old_groups(api.service.store.state, groups, api.service.clock.now())
    warning = find_delay(api, waiting) or warning or old
    if is_dry:
        answer = describe_tried(waiting[:limit])
        new = {job.id for job in added.jobs}            # they exist only in the transaction that was tried
        repeated = [job_id for job_id in added.existing if job_id not in new]
        warning = (lost and f"it would be cancelled at once: {lost.current.cause_line}") or old
    else:
        is_one = isinstance(body, dict) and "command" in body and not body.get("sweep")
        answer = {"id": added.ids[0]} if is_one else {"ids": added.ids}
        repeated = list(added.existing)
    answer.update({"known": repeated} if repeated else {}, **({"warning": warning} if warning else {}))
    return replace(json_response(answer), headers={"Total-Count": str(len(added.ids))} if is_dry else {})


def describe_tried(jobs: Sequence[Job]) -> dict[str, Any]:
    """The answer to a dry run that would add these jobs."""
    shown = [name for name in ASKED if name not in ("umask", "nice", "cpus", *Asked.FIELDS)]
    return {"dry_run": True, "jobs": [{name: field_json(job, name) for name in shown} for job in jobs]}


def find_delay(api: Api, jobs: Sequence[Job]) -> str:
    """Why new jobs will not start soon; "" when nothing is known to hold them up."""
    waiting = [job for job in jobs if job.status == PENDING]
    state = api.service.store.state
    holds = list_holds(state)
    held = next((holds[job.group] for job in waiting if job.group in holds), None)
    error = api.service.observer.observation.error if any(job.gpus for job in waiting) else None
    pause = find_pause(state)
    reason = pause.detail if pause and waiting else held or error
    return f"it waits: {reason}" if reason else ""


@route("PATCH /queue/{id}", "user", "change a job that has not ended, or its position", "Job", body="Edit")
def patch_queue(api: Api, caller: Identity, id: str, body: Any) -> dict[str, Any]:
    job, = api.service.editor.edit(Choice((id,)), caller, read_object(EDIT_KEYS, EDIT, body))
    return describe_job(api, job)


@route("PATCH /queue", "user", "change jobs that have not ended, or their places, all or none; together they keep "
       "their order", "Ids", body="EditChoice")
def patch_jobs(api: Api, caller: Identity, body: Any) -> dict[str, Any]:
    choice = read_object(EDIT_CHOICE_KEYS, EDIT_CHOICE, body)
    change = choice.pop("change")
    return {"ids": [job.id for job in api.service.editor.edit(Choice(**choice), caller, change)]}


@route("GET /jobs", "user", "all jobs kept: finished, running, pending", "Job[]")
def get_jobs(api: Api, caller: Identity, choice: Choice, sort: str = "", limit: int | None = None,
             fields: Sequence[str] = ()) -> Response:
    return answer_jobs(api, caller, choice, limit, fields, sort)


def sort_jobs(jobs: Sequence[Job], by: str) -> list[Job]:
    """Sort by a field of SORTED_BY; `-field` puts the highest first.  Jobs without a value come last."""
    name = by.lstrip("-")
    pairs = [(job, getattr(job if hasattr(job, name) else job.current, name)) for job in jobs]
    with_value = [pair for pair in pairs if pair[1] is not None]
    with_value.sort(key=lambda pair: (pair[1], pair[0].number), reverse=name != by)
    return [job for job, _ in with_value] + [job for job, value in pairs if value is None]


def answer_jobs(api: Api, caller: Identity, choice: Choice, limit: int | None = None, fields: Sequence[str] = (),
                sort: str = "", rename: Callable[[dict[str, Any]], dict[str, Any]] = lambda job: job) -> Response:
    """The first jobs of a list, with Total-Count, the length of all of it."""
    import itertools
    state, now = api.service.store.state, api.service.clock.now()
    if {*choice.status} == {PENDING} and not sort:
        waiting, total = choose_pending(PendingQueue(state), caller, choice, now)
        jobs = list(itertools.islice(waiting, limit))
    else:
        jobs = choice.select(list_jobs(state, choice.status or STATUSES), caller.may_see, now)
        jobs, total = (sort_jobs(jobs, sort) if sort else jobs)[:limit], len(jobs)
    pieces, headers = api.service.job_serializer.encode_jobs(caller, jobs, fields, rename), {"Total-Count": str(total)}
    if len(jobs) <= JOBS_A_PIECE:
        return Response(200, b"".join(pieces), headers=headers)
    return Response(200, headers=headers, stream=api.in_turns(caller, pieces))


@route("GET /jobs/{id}", "user", "one job", "Job")
def get_job(api: Api, caller: Identity, id: str, wait: int = 0) -> Response | dict[str, Any]:
    job = api.find_job(id, caller)
    if not wait or job.status in FINAL:
        return describe_job(api, job)
    return reply_when_over(api, caller, job, wait, lambda now: describe_job(api, now or job))


def reply_when_over(api: Api, caller: Identity, job: Job, timeout_s: float,
                    describe: Callable[[Job | None], object]) -> Response:
    """Reply when a job is over, or when that takes too long."""
    def is_over() -> object:
        now = api.find_now(job)
        return describe(now) if now is None or now.status in FINAL else None

    return api.reply_when(caller, is_over, timeout_s, lambda: describe(api.find_now(job)))


def describe_job(api: Api, job: Job) -> dict[str, Any]:
    return api.service.job_serializer.describe_jobs([job])[0]


@route("POST /jobs/cancel", "user",
       "end jobs, pending or running, all or none; those that are over stay as they are", "Ended",
       body="CancelChoice", statuses=(202,))
def post_cancel(api: Api, caller: Identity, body: Any) -> Response:
    choice = read_object(CANCEL_KEYS, CANCEL, body)
    signal = choice.pop("signal", None)
    jobs, dependents = api.service.cancellation.cancel(Choice(**choice), caller, signal)
    keys = ("id", "status", "node", "unknown_since", "outcome", "cause_line")
    return json_response({
        "ids": [job.id for job in jobs], "jobs": api.service.job_serializer.describe_jobs(jobs, keys),
        "dependents": dependents}, 202)


@route("POST /jobs/clear", "user",
       "forget finished jobs, with their logs: those named, or all of a group or status; `freed_bytes`: of the logs",
       "Cleared", body="Choice")
def post_clear(api: Api, caller: Identity, body: Any) -> dict[str, Any]:
    choice = read_object(CLEAR_KEYS, CLEAR, body)
    dry_run = choice.pop("dry_run", False)
    return api.service.housekeeping.clear(Choice(**choice), caller, dry_run)


@route("POST /jobs/dismiss", "user",
       "take failed jobs off the caller's list of failures: those named, or all of a group; `undo` puts them back",
       "Ids", body="DismissChoice")
def post_dismissals(api: Api, caller: Identity, body: Any) -> dict[str, Any]:
    choice = read_object(DISMISS_KEYS, DISMISS, body)
    is_undone = choice.pop("undo", False)
    return {"ids": api.service.cancellation.dismiss(Choice(**choice), caller, is_undone)}


@route("POST /jobs/retry", "user",
       "run finished jobs again, as new ones, all or none: those named; or of a group or status those that were "
       "not queued again since, the failed ones if none is given", "Ids", body="RetryChoice")
def post_retries(api: Api, caller: Identity, body: Any) -> dict[str, Any]:
    choice = read_object(RETRY_KEYS, RETRY, body)
    change, values = choice.pop("change", {}), choice.pop("set", {})
    is_downstream, is_dry = choice.pop("downstream", False), choice.pop("dry_run", False)
    added = api.service.admission.retry(Choice(**choice), caller, change, values, is_downstream, is_dry)
    if is_dry:
        answer = describe_tried(added.jobs)
        for row, former in zip(answer["jobs"], added.existing):
            row["retry_of"] = former
        return answer
    left = api.service.admission.list_left(added.ids, caller)
    warning = find_delay(api, added.jobs)
    return {"ids": added.ids, **({"warning": warning} if warning else {}), **({"downstream": left} if left else {})}


@route("GET /groups/{group}/results", "user", "the jobs of a group as a table: the values of its sweep, and the "
       "numbers that the jobs print", "Results")
def get_results(api: Api, caller: Identity, group: str, status: Sequence[str] = (), limit: int | None = None,
                order: str | None = None, csv: bool = False, mean: bool = False, over: str | None = None) -> Response:
    results = api.service.groups.list_results(caller, group, order, mean, over)
    rows = [row for row in results["rows"] if row["status"] in (status or STATUSES)]
    results, headers = {**results, "rows": rows[:limit]}, {"Total-Count": str(len(rows))}
    if csv:
        return Response(200, format_results_csv(results).encode(), "text/csv; charset=utf-8", headers)
    return replace(json_response(results), headers=headers)


@route("GET /jobs/{id}/chain", "user", "a job with those that it comes after and that come after it, directly or "
       "through others: `depth` is how many are before each, one after the other", "Chain[]")
def get_chain(api: Api, caller: Identity, id: str, limit: int | None = None) -> Response:
    state = api.service.store.state
    rows = [row for row in list_chain(state, api.find_job(id, caller)) if caller.may_see(row[1].user)]
    jobs = api.service.job_serializer.describe_jobs([job for _, job in rows[:limit]], CHAIN_KEYS)
    answer = json_response([{**shown, "depth": depth} for shown, (depth, _) in zip(jobs, rows)])
    return replace(answer, headers={"Total-Count": str(len(rows))})


CHAIN_KEYS = ("id", "name", "command", "status", "outcome", "retried_as", "after", "after_any", "after_group",
              "after_any_group")

# Routes that only pass on their arguments

route("DELETE /queue/{id}", "user", "take a pending job out of the queue")(
    lambda api, caller, id: api.service.cancellation.cancel(Choice((id,), (PENDING,)), caller))
route("DELETE /jobs/{id}", "user", "kill a running job")(
    lambda api, caller, id: api.service.cancellation.cancel(Choice((id,), (RUNNING,)), caller))
route("GET /jobs/{id}/why", "user", "why a job waits, GPU by GPU", "Why")(
    lambda api, caller, id: api.service.explainer.explain(id, caller))
route("GET /jobs/{id}/usage", "user", "what the GPUs of a job did while it ran", "JobUsage")(
    lambda api, caller, id: api.service.gpu_history.describe_job(api.find_job(id, caller)))
route("GET /groups", "user", "jobs by group: how many wait, run, have ended, and what holds them up", "GroupInfo[]")(
    lambda api, caller: api.service.groups.list_groups(caller))
route("GET /usage", "user", "jobs, GPU-hours and failures of each user, or of each group of one's own", "Usage[]")(
    lambda api, caller, since=None, by="user": api.service.status.list_usage(caller, since, by))

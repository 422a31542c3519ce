"""The routes under /api: uploaded scripts, in the words of an earlier server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from ..formats.submit_form import parse_submit_form
from ..hosting.observer import SMI_WAIT_S
from ..machine.log_reader import read_tail
from ..machine.search_path import find_python
from ..opening import TYPE_CHECKING
from ..service.access import Identity
from ..values.choice import Choice
from ..values.errors import NexusError
from ..values.job import CANCELLED, PENDING, RUNNING, Job
from ..values.submission import JOB_FIELDS, Asked
from ..values.text import format_line
from ..views.api_json import SUBMITTED_FROM, submitted_json
from .api import Api
from .job_routes import answer_jobs, describe_job, reply_when_over
from .routes import STREAMS, Request, Response, error_response, route

if TYPE_CHECKING:
    from typing import Any

MAX_FORM_BYTES = 10 * 2**20
MAX_RESULT_BYTES = 2**20
CANCEL_TIMEOUT_S = 2.0                  # how long /api/cancel waits for the job's end


@route("POST /api/submit", "anyone", "queue a script: a form of code and config_file, with a token in that",
       "FormAdded", body="Form")
def post_api_submit(api: Api, caller: Identity, request: Request,
                    idempotency_key: str | None = None) -> Response | dict[str, Any]:
    """`caller` is nobody: a token in config_file identifies the sender, and is checked even if none is needed."""
    if request.body_length > MAX_FORM_BYTES:
        raise NexusError("too_large", f"the form has {request.body_length} bytes; at most {MAX_FORM_BYTES} are taken",
                         hint="let the script read what is large from a file")
    with contextlib.suppress(NexusError):   # else the form must say who it is
        api.gate.identify(request)
    code, config = parse_submit_form(request.read_body(), request.headers.get("content-type", ""))
    caller = api.gate.identify(request, config.get("token"))
    try:
        return add_form(api, caller, code, config, idempotency_key)
    except NexusError as error:
        return error_response(api.note_error(request, error, caller))


def add_form(api: Api, caller: Identity, code: bytes, config: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """Raises: forbidden; as submit()."""
    user = config.get("user_id", caller.user)
    if not caller.may_see(user):
        raise NexusError("forbidden", f"the token is {caller.user}'s, and user_id is {format_line(user, 60)}",
                         hint=f"user_id: \"{caller.user}\"")
    if user != caller.user:
        caller = Identity(user, f"{caller.name} for {format_line(user, 60)}")
    labels = tuple((name, config[name]) for name in ("competition_id", "project_id") if name in config)
    admission, name = api.service.admission, api.service.clock.new_token()
    asked = Asked({"labels": labels, **{name: value for name, value in config.items() if name in JOB_FIELDS},
                   "command": f"{find_python(api.service.environ)} main.py", "code": name})
    with api.service.housekeeping.keep_code(name, code):
        job = describe_job(api, api.find_job(admission.admit([asked], caller, key).ids[0], caller))
    return {"job_id": job["id"], "node_id": api.service.pool.number_nodes().get(job["node"]), "status": PENDING,
            "queue_position": job["position"] or 0}        # 0 for one that has started by now, too


@route("GET /api/status/{id}", "user", "where a submitted script stands", "Submitted")
def get_api_status(api: Api, caller: Identity, id: str) -> dict[str, Any]:
    return submitted_json(describe_job(api, api.find_job(id, caller)), api.service.pool.number_nodes())


@route("GET /api/results/{id}", "user", "what it printed, and its exit code", "Results")
def get_api_results(api: Api, caller: Identity, id: str) -> dict[str, Any]:
    job = api.find_job(id, caller)
    disk, folder = api.service.disk, job.log_dir
    printed = {name: read_tail(disk, os.path.join(folder, f"{name}.log"), 0, MAX_RESULT_BYTES) if folder else ""
               for name in STREAMS[:2]}
    return {"job_id": job.id, "status": job.shown_status, **printed, "exit_code": job.current.exit_code,
            "cause": job.current.cause, "cause_line": job.current.cause_line}


@route("POST /api/cancel/{id}", "user", "take it out of the queue, or stop it", "Cancelled")
def post_api_cancel(api: Api, caller: Identity, id: str) -> Response:
    """Most jobs end at once, and the caller need not ask again."""
    job = api.find_job(id, caller)
    api.service.cancellation.cancel(Choice((job.id,), (PENDING, RUNNING)), caller)
    return reply_when_over(api, caller, job, CANCEL_TIMEOUT_S, lambda now: {
        "job_id": job.id, "status": now.shown_status if now else CANCELLED})


@route("GET /api/nodes", "user", "machines: their GPUs, what runs there, and what waits", "Node[]")
def get_api_nodes(api: Api, caller: Identity) -> list[dict[str, Any]]:
    """A job for any machine counts in this machine's queue, number 0; a job for one node in that node's."""
    service = api.service
    service.gpu_watch.first_probe.wait(SMI_WAIT_S + 5)
    now = service.clock.now()
    gpus = service.status.list_gpus(service.store.state)
    running = service.running_jobs()
    waiting = service.store.state.pending.values()
    bad = [row for row in service.health.check()["checks"]
           if not row["is_ok"] and not row["name"].startswith("node ")]

    def find_machine(job: Job) -> str:
        node = job.only_node
        return node if node and node in service.pool.nodes else service.node

    def describe(number: int, name: str) -> dict[str, Any]:
        own = [gpu for gpu in gpus if gpu["node"] == name]
        here = [job for job in running if (job.current.node or service.node) == name]
        wait = [job for job in waiting if find_machine(job) == name]
        times = [None if job.expected_time is None else
                 max(0.0, job.expected_time - service.outcomes.find_runtime_s(job, now)) for job in here]
        times += [job.expected_time for job in wait]
        is_well = not bad if number == 0 else service.pool.nodes[name].error is None
        return {"node_id": number, "name": name, "gpus": len(own),
                "free_gpus": sum(gpu["is_available"] for gpu in own),
                "running_jobs": len(here), "pending_jobs": len(wait),
                "queue_seconds": None if None in times else round(sum(filter(None, times)), 3),
                "is_healthy": is_well}
    return [describe(number, name) for number, name in enumerate([service.node, *service.pool.nodes])]


@route("GET /api/jobs", "user", "all jobs kept: finished, running, pending", "Submitted[]")
def get_api_jobs(api: Api, caller: Identity, user_id: str | None = None, status: Sequence[str] = (),
                 limit: int | None = None) -> Response:
    nodes = api.service.pool.number_nodes()
    return answer_jobs(api, caller, Choice(status=status, user=user_id), limit, fields=SUBMITTED_FROM,
                       rename=lambda job: submitted_json(job, nodes))

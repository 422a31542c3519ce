"""The OpenAPI 3.1 document."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

from ..formats.submit_form import FORM_FIELDS, FORM_KEYS
from ..opening import TYPE_CHECKING
from ..values.choice import CANCEL, CLEAR, DISMISS, EDIT, EDIT_CHOICE, RETRY
from ..values.config import NODE
from ..values.errors import KINDS
from ..values.job import MAX_JOBS
from ..values.schema import STRING, list_of, one_of, or_null
from ..values.submission import SUBMISSION
from ..values.value import Field
from .api_json import ATTEMPT, GPU, JOB, NEXT_TURN, OTHER_USER, PROCESS, PUBLIC_JOB_KEYS, object_ref
from .results import RESULTS, TABLE_COLUMN, TABLE_ROW
from .usage import GPU_HISTORY, HISTORY, JOB_USAGE, RUN_ROW, USAGE

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Schema

API_DESCRIPTION = """A job queue for the GPUs of one machine, and of others that it reaches by ssh.

Whoever calls from this machine as the owner of the service needs no token; everybody else sends one as
`Authorization: Bearer TOKEN`.  The owner's may do all; a user's may submit, read, and cancel its own jobs, and sees of
others' jobs only that they are there: the rest is null.  Every refusal is the object Error.

`GET /status?after=0` replies with all that one looks at: GPUs, running jobs, the first ones that wait (or their
groups), the last that ended, failures, counts.  `?after=STATE_VERSION` replies when something of that has changed, at
the latest after 15 seconds, with the changes as a JSON merge patch (RFC 7396: null is what has gone), or with all of
it when it says `is_whole`.  A choice by text, status, user or group restricts the lists, `limit` their length.
`failures`, of a group and of all, are the failed jobs that were neither retried nor dismissed by the caller, in the
list the last of each group, how many of it there are, and of how many kinds; a row's `label` tells it from others of
its sweep or group, like `lr=1e-3 bs=64`.

The machines under /api have numbers: 0 is this one, then come the nodes in the order of GET /nodes."""


FORM = {
    "type": "object", "title": "a script, and what it needs", "required": list(FORM_FIELDS),
    "additionalProperties": False, "properties": {
        "code": {**STRING, "maxLength": FORM_FIELDS["code"], "contentMediaType": "application/octet-stream",
                 "description": "the script"},
        "config_file": {**STRING, "maxLength": FORM_FIELDS["config_file"], "contentMediaType": "application/yaml",
                        "examples": ["expected_time: 10\n"],
                        "description": f"lines like expected_time: 10; its keys are {', '.join(FORM_KEYS)}"}}}
BODIES = {                                      # {name: schema} of request bodies
    "Submission": SUBMISSION, "Edit": EDIT, "Choice": CLEAR, "CancelChoice": CANCEL, "DismissChoice": DISMISS,
    "RetryChoice": RETRY,
    "EditChoice": EDIT_CHOICE,
    "NodeAdded": NODE, "Form": FORM,
    "Submissions": {"title": "a job, or a list of jobs",
                    "anyOf": [object_ref("Submission"), list_of(object_ref("Submission"), 1, MAX_JOBS)],
                    "examples": SUBMISSION["examples"]}}
ERROR = {
    "error": Field(one_of(*KINDS), "; ".join(f"{kind}: {meaning}" for kind, (_, _, meaning) in KINDS.items())),
    "message": Field(STRING, "what was tried, on what, and why it failed"),
    "hint": Field(STRING, "what to do next"),
}


def object_schema(rows: Mapping[str, Field], public: Container[str] | None = None) -> Schema:
    """The schema of a reply with these keys.  `public`: the keys that are not null for other users; None: all."""
    properties = {}
    for name, row in rows.items():
        is_nullable = row.default is None or (public is not None and name not in public)
        properties[name] = {**(or_null(row.schema) if is_nullable else row.schema), "description": row.help}
    return {"type": "object", "properties": properties}


OBJECTS = {                                     # {name: schema} of replies; those not here are described in words only
    "Job": object_schema(JOB, PUBLIC_JOB_KEYS), "Attempt": object_schema(ATTEMPT), "Gpu": object_schema(GPU),
    "Process": object_schema(PROCESS), "Results": object_schema(RESULTS), "ResultColumn": object_schema(TABLE_COLUMN),
    "ResultRow": object_schema(TABLE_ROW), "Error": object_schema(ERROR), "Usage": object_schema(USAGE),
    "History": object_schema(HISTORY), "GpuHistory": object_schema(GPU_HISTORY), "GpuRun": object_schema(RUN_ROW),
    "JobUsage": object_schema(JOB_USAGE), "OtherUser": object_schema(OTHER_USER), "NextTurn": object_schema(NEXT_TURN),
    "Status": object_schema({
        "gpu_status": Field(list_of(object_ref("Gpu")), "the GPUs of all machines"),
        "others": Field(list_of(object_ref("OtherUser")), "users who have services of their own on this machine, and "
                        "take turns with this one on its GPUs: while they have jobs on them or wait for them"),
        "next_turn": Field(or_null(object_ref("NextTurn")), "who gets the next GPU, if there are others")})}


def make_openapi(routes: Sequence[Any], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for row in routes:
        if row.summary:
            paths.setdefault(row.pattern, {})[row.method.lower()] = make_operation(row)
    return {
        "openapi": "3.1.0",
        "info": {"title": "nexus", "version": version, "description": API_DESCRIPTION, "license": {"name": "MIT"}},
        "servers": [{"url": "/"}], "security": [{}, {"bearer": []}], "paths": paths,
        "components": {
            "schemas": {**OBJECTS, **BODIES},
            "responses": {"Error": {"description": "refused, or failed", "content": make_content("Error")}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "a token of nexus token create"}}}}


def make_operation(endpoint: Any) -> dict[str, Any]:
    answer = {"description": endpoint.summary, "content": make_content(endpoint.answer)}
    operation = {
        "operationId": re.sub(r"\W+", "_", endpoint.method.lower() + endpoint.pattern).strip("_"),
        "summary": endpoint.summary + (" (the owner alone)" if endpoint.access == "owner" else ""),
        "parameters": [{
            "name": name, "in": row.place, "required": row.place == "path", "description": row.help,
            "schema": row.schema}
            for name, row in endpoint.parameters.items()],
        "responses": {**{str(status): answer for status in endpoint.statuses},
                      "default": {"$ref": "#/components/responses/Error"}}}
    if endpoint.body:
        operation["requestBody"] = {"required": True, "content": make_content(endpoint.body)}
    return operation


def make_content(content: str) -> dict[str, Any]:
    """{media type: {"schema": schema}} of a reply or body: a media type, an object's name, or `Job[]` for a list."""
    if not content or "/" in content:
        return {content: {"schema": STRING}} if content else {}
    name = content.removesuffix("[]")
    schema: Schema = {"type": "object", "title": name}
    if name in OBJECTS or name in BODIES:
        schema = object_ref(name)
    media_type = "multipart/form-data" if name == "Form" else "application/json"
    return {media_type: {"schema": schema if name == content else list_of(schema)}}

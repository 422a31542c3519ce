"""/openapi.json and /docs: the document is valid and complete, and the service does what it says, whoever asks and whatever comes."""

import functools
import itertools
import json
import re
import time

import live
import openapi_spec_validator
import pytest
import samples
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from stage import Bench, is_error

import nexus

schemathesis = pytest.importorskip("schemathesis", minversion="4.30", reason="the last schemathesis for Python 3.9 judges otherwise")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

DESCRIBED = [route for route in nexus.ROUTES if not route.pattern.startswith("/node/")]       # those are between nexuses
DOCUMENT = json.loads(json.dumps(nexus.make_openapi(nexus.ROUTES, nexus.__version__)))
ENDLESS = ("/node/sync",)                   # of nexus alone
LEFT_OUT = {"post_service_stop", "post_service_resume", "post_nodes"}        # what is submitted here is no command to run, no host to call

OFTEN_USED = {"GET /status", "GET /metrics", "GET /openapi.json", "POST /queue"}


def test_the_document_is_valid():
    openapi_spec_validator.validate(DOCUMENT, cls=openapi_spec_validator.OpenAPIV31SpecValidator)
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_route_is_in_it():
    told = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert told == {(route.method, route.pattern) for route in DESCRIBED} and len(told) == len(DESCRIBED)
    for route in DESCRIBED:
        operation = DOCUMENT["paths"][route.pattern][route.method.lower()]
        assert operation["operationId"].startswith(route.method.lower()) and operation["summary"]
        assert {each["name"] for each in operation["parameters"] if each["in"] == "path"} == set(re.findall(r"{(\w+)}", route.pattern))
        assert all(each["description"] for each in operation["parameters"]) and "default" in operation["responses"]
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    assert all(f"{kind}: {meaning}" in DOCUMENT["components"]["schemas"]["Error"]["properties"]["error"]["description"]
               for kind, (_, _, meaning) in nexus.KINDS.items())


WITHOUT = {("GET", "/jobs"): set(), ("GET", "/queue"): {"status"}, ("GET", "/status"): set()}     # which filter a list lacks


def test_a_filter_is_served_wherever_jobs_are_chosen():
    for (method, path), without in WITHOUT.items():
        rows = DOCUMENT["paths"][path][method.lower()]["parameters"]
        assert {name: row.help for name, row in nexus.FILTERS.items() if name not in without}.items() <= {
            row["name"]: row["description"] for row in rows}.items(), path
        assert not without & {row["name"] for row in rows}
    for body in ("Choice", "CancelChoice", "RetryChoice", "EditChoice"):
        keys = DOCUMENT["components"]["schemas"][body]["properties"].keys()
        assert keys & {"ids", *nexus.FILTERS} == {"ids", *nexus.FILTERS}, body
    for command in nexus.COMMANDS:
        flags = {flag for flags, settings in command.arguments for flag in flags if settings.get("dest", "").startswith("by_")}
        filters = {row.flag for row in nexus.FILTERS.values() if row.flag}
        takes_ids = any(flags[0] in ("ids", "targets") for flags, _ in command.arguments)
        if takes_ids or command.name == "jobs":
            assert flags - {"-n"} == filters, command.name


def test_a_parameter_means_one_thing():
    told = {}
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            for row in operation["parameters"]:
                told[method.upper(), path, row["name"]] = row["description"]
    assert "node" not in told["GET", "/jobs", "name"] and "job" not in told["DELETE", "/nodes/{name}", "name"]
    assert "of no group" in told["GET", "/queue", "group"] and "of no group" not in told["POST", "/service/pause", "group"]


def test_every_key_says_what_it_means():
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for key, row in schema.get("properties", {}).items():
            assert row.get("description"), (name, key)


def test_its_references_lead_somewhere():
    schemas = DOCUMENT["components"]["schemas"]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert named == set(schemas), "each is there, and none is without use"


WITH_EXAMPLES = [(route.method, route.pattern, route.body) for route in nexus.ROUTES if route.body and route.body != "Form"]


@pytest.mark.parametrize("method, path, body", WITH_EXAMPLES, ids=[row[1] for row in WITH_EXAMPLES])
def test_the_examples_run(method, path, body):
    with Bench() as bench:
        for job_id in ("abc", "abd"):
            bench.add(id=job_id, command="true", group="sweep", gpus=0)
        if path in ("/jobs/retry", "/jobs/clear"):
            bench.ask("POST", "/jobs/cancel", {"ids": ["abc", "abd"]})
        for example in nexus.BODIES[body]["examples"][:1 if path == "/jobs/clear" else None]:
            status, answer = bench.ask(method, path.replace("{id}", "abc"), example)
            assert status < 300 or (path == "/nodes" and status == 503), answer


# The service does what the document says


class Fleet:
    """A paused service with jobs of every status, of the owner's and of ann's."""

    def __init__(self, box):
        self.box = box
        done = box.add("echo out; echo err >&2", gpus=0)
        failed = box.add("exit 3", gpus=0, retries=1)
        box.wait(done, "completed")
        box.wait(failed, "failed")
        self.token = box.nexus("token", "create", "ann").stdout.strip().splitlines()[-1]
        self.running = [box.add("sleep 1000", gpus=gpus) for gpus in (0, 1)]
        for job_id in self.running:
            box.wait_started(job_id)
        box.ask("POST", "/service/pause")
        self.ids = [done, failed, *self.running, *(box.add("true", name="mine") for _ in range(12)), *self.add_for_ann(12)]

    def add_for_ann(self, count):
        body = {"command": "true", "name": "secret", "group": "g"}
        return [self.box.call("POST", "/queue", body, Authorization=f"Bearer {self.token}")[1]["id"] for _ in range(count)]


@pytest.fixture(scope="module")
def fleet():
    with live.Box(gpus=2, retry_backoff_seconds=0.05, refresh_rate_seconds=2, is_supervised=False) as box:
        yield Fleet(box)


def list_operations():
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    found = [result.ok() for result in schema.get_all_operations()]
    found = [operation for operation in found if operation.definition.raw["operationId"] not in LEFT_OUT and operation.path not in ENDLESS]
    chosen = {operation.label for operation in samples.choose(found, 9)} | OFTEN_USED
    return [operation for operation in found if operation.label in chosen]


def has_what_can_be_wrong(operation):
    raw = operation.definition.raw
    return "requestBody" in raw or any(parameter["in"] != "path" or "pattern" in parameter["schema"] for parameter in raw["parameters"])


def check_answer(response):
    """What holds for every answer."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        answer = response.json()
        assert is_error(answer) and nexus.KINDS[answer["error"]][1] == response.status_code
        assert response.status_code != 401 or response.headers["www-authenticate"] == ["Bearer"]


def is_following(query):
    return str(query.get("follow", "false")).lower() not in ("false", "0")


def for_each(strategy, count, look):
    @settings(max_examples=count, derandomize=not samples.is_whole, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(case):
        look(case)

    run()


CALLERS = {     # {who: (its headers, how many calls of each kind, how many with --all)}
    "the owner": (lambda fleet: {}, 3, 100), "a user": (lambda fleet: {"Authorization": f"Bearer {fleet.token}"}, 3, 100),
    "nobody": (lambda fleet: {"Via": "1.1 proxy"}, 1, 10)}


@pytest.mark.parametrize("who", CALLERS)
def test_schemathesis(fleet, who):
    """Valid and invalid calls, checked by schemathesis against the document: of some routes, and of every one with --all."""
    make_headers, usual, whole = CALLERS[who]
    count = samples.count(usual, whole)
    headers, base_url = make_headers(fleet), f"http://127.0.0.1:{fleet.box.port}"
    statuses, turn = {}, itertools.count()

    def ask(case, excluded):
        if is_following(case.query or {}):
            return                              # a pending job's log has no end while the queue is paused
        if (case.query or {}).get("wait") in range(2, 3601):
            case.query["wait"] = 1
        if case.path_parameters and "id" in case.path_parameters and next(turn) % 3:
            case.path_parameters["id"] = fleet.ids[next(turn) % len(fleet.ids)]
        if isinstance(case.body, dict) and case.operation.label == "POST /queue":
            case.body.setdefault("command", "true")
            case.body.pop("gpu_type", None)                 # of what is made up there is none
        case.headers.pop("Authorization", None)         # made up, and each wrong token waits longer
        response = case.call(base_url=base_url, headers=headers, timeout=60)
        check_answer(response)
        statuses.setdefault(case.operation.label, set()).add(response.status_code)
        case.validate_response(response, excluded_checks=excluded)

    for operation in list_operations():
        # What goes with what is not in a schema: 400 may be the answer to what it allows
        raw = operation.definition.raw
        has_rules = "requestBody" in raw or "grep" in {parameter["name"] for parameter in raw["parameters"]}
        excluded = [positive_data_acceptance] if has_rules else []
        for mode in [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if has_what_can_be_wrong(operation) else [GenerationMode.POSITIVE]:
            for_each(operation.as_strategy(generation_mode=mode), count, functools.partial(ask, excluded=excluded))
    open_to_all = {"GET /openapi.json", "GET /docs"}
    if who == "nobody":
        assert all(seen <= {401} for label, seen in statuses.items() if label not in {*open_to_all, "POST /api/submit"}), statuses
        assert all({200} <= seen <= {200, 400} for label, seen in statuses.items() if label in open_to_all), statuses
    else:
        assert {200} == statuses["GET /metrics"] and 200 in statuses["GET /status"]
        assert 200 in statuses["POST /queue"] or not samples.is_whole
    owners = {f"{route.method} {route.pattern}" for route in nexus.ROUTES if route.access == "owner"}
    if who == "a user":
        assert all(seen <= {400, 403, 404} for label, seen in statuses.items() if label in owners), statuses
    assert fleet.box.ask("GET", "/health")["is_healthy"]


def conforms(answer, name):
    """Against the shape of this name, in which no key is missing."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(answer)
    assert set(answer) <= set(DOCUMENT["components"]["schemas"][name]["properties"]), "each key is described"


def test_answers_have_the_keys_that_are_described(fleet):
    box = fleet.box
    for headers in ({}, {"Authorization": f"Bearer {fleet.token}"}):
        get = lambda path, headers=headers: box.call("GET", path, **headers)[1]  # noqa: E731
        for job in [*get("/jobs"), *get("/queue")]:
            conforms(job, "Job")
        for attempt in [attempt for job in get("/jobs") for attempt in job["attempts"] or ()]:
            conforms(attempt, "Attempt")
        for gpu in get("/status")["gpu_status"]:
            conforms(gpu, "Gpu")
        for row in [*get("/usage"), *get("/usage?by=group")]:
            conforms(row, "Usage")
        for job in get("/status")["running_jobs"]:
            assert set(job) <= set(DOCUMENT["components"]["schemas"]["Job"]["properties"]), "each key is one of a job's"
    box.add("true")
    hidden = [job for job in box.call("GET", "/jobs", Authorization=f"Bearer {fleet.token}")[1] if job["user"] != "ann"]
    assert hidden and all(job["command"] is None and job["log_dir"] is None for job in hidden)


def test_docs_bring_all_they_need():
    with Bench() as bench:
        bench.api.page = nexus.DASHBOARD_PAGE
        response = bench.respond("GET", "/docs", uid=12345)
        assert response.status == 200 and response.content_type.startswith("text/html")
        policy = response.headers["Content-Security-Policy"]
        for part in ("default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
                     "script-src 'sha256-"):
            assert part in policy
        assert "unsafe" not in policy
        began = time.process_time()
        assert bench.ask("GET", "/openapi.json", uid=12345)[1] == DOCUMENT and time.process_time() - began < 1

"""The state of the service, its news, its page."""

import json
import time

import pytest
from stage import Bench

import nexus


def test_a_job_in_slurms_queue_is_pending_for_all_who_ask():
    """Each GET, each choice by status, what a change answers and how it is refused: `submitted` never leaves nexus."""
    with Bench(launcher="slurm") as bench:
        ids = [bench.add(name=name, group="g") for name in ("one", "two")]

        def submit(state):
            for number, job in enumerate(list(state.jobs.values())):
                yield nexus.change_status(nexus.begin_attempt(job, slurm_key=f"k{number}", slurm_id=f"7{number}"), "submitted", time.time())

        bench.store.update(submit)
        bench.service.take_in(bench.service.cluster, ())
        answers = {route.pattern: bench.respond("GET", route.pattern.replace("{id}", ids[0])) for route in nexus.ROUTES
                   if route.method == "GET" and "{" not in route.pattern.replace("{id}", "")}
        told = {path: (answer.body + b"".join(answer.stream or ())).decode() for path, answer in answers.items()}
        told["changes"] = json.dumps(bench.ask("GET", "/status", query={"after": "0"})[1])
        read = {path: json.loads(text) for path, text in told.items() if text.startswith(("{", "["))}
        assert [job["id"] for job in read["/queue"]] == [job["id"] for job in read["/jobs"]] == ids
        assert {job["status"] for job in read["/jobs"]} == {read["/jobs/{id}"]["status"], read["/jobs/{id}/why"]["status"]} == {"pending"}
        assert [status for status, _ in read["/jobs/{id}"]["status_history"]] == ["pending"]
        assert (read["/jobs/{id}"]["position"], read["/jobs/{id}"]["slurm_id"], read["/jobs/{id}"]["attempt"]) == (0, "70", 1)
        assert read["/status"]["queued_jobs"] == read["/status"]["slurm"]["handed_jobs"] == 2
        assert 'nexus_jobs{status="pending"} 2\n' in told["/metrics"]
        assert read["changes"]["counts"]["pending"] == 2 and read["changes"]["waiting"] == ["group:g"]
        assert [(group["pending"], group["position"]) for group in read["/groups"]] == [(2, 0)]
        for status, found in (("pending", ids), ("running", [])):
            for path in ("/jobs", "/status"):
                query = {"status": status, **({"after": "0"} if path == "/status" else {})}
                answer = bench.ask("GET", path, query=query)[1]
                assert (answer["waiting"] if path == "/status" else [job["id"] for job in answer]) == found
        refused = [bench.ask("POST", f"/jobs/{what}", {"ids": ids, **choice}) for what, choice in (
            ("cancel", {"status": ["running"]}), ("clear", {}), ("retry", {}))]
        assert all(status == 409 and "is pending" in answer["message"] for status, answer in refused)
        assert bench.ask("GET", "/jobs", query={"status": "submitted"})[0] == 400
        told["known"] = json.dumps(bench.ask("POST", "/queue", {"command": "true", "unique": True})[1])
        assert json.loads(told["known"])["known"] == ids[1:]
        told["changed"] = json.dumps(bench.ask("PATCH", "/queue/one", {"name": "uno"}))
        told["ended"] = json.dumps(bench.ask("POST", "/jobs/cancel", {"ids": ids, "status": ["pending"]}))
        told["api"] = json.dumps(bench.ask("GET", f"/api/results/{ids[0]}"))
        assert not [where for where, text in told.items() if '"submitted"' in text]


# What the routes answer


def test_info_and_status(bench):
    assert bench.ask("GET", "/")[1]["name"] == "nexus"
    status, answer = bench.ask("GET", "/status")
    assert status == 200 and (answer["is_paused"], answer["queued_jobs"], answer["completed_jobs"]) == (False, 0, 0)
    first = answer["gpu_status"][0]
    assert (first["index"], first["name"], first["memory_total"], first["memory_used"], first["job_id"], first["job_ids"]) == (
        0, "Mock GPU", "24GB", "0GB", None, [])


def merge(document, patch):
    """RFC 7396"""
    if not isinstance(patch, dict):
        return patch
    merged = {**document} if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def test_news_are_waited_for(bench):
    def ask(version):
        return bench.get("/status", {"after": str(version)}).stream

    document = merge({}, json.loads(b"".join(ask(0))))
    version = document["state_version"]
    assert document.pop("is_whole")
    changes = [lambda: bench.add(id="abc"), lambda: bench.ask("PATCH", "/queue/abc", {"name": "x"}),
               lambda: bench.ask("POST", "/service/pause"), lambda: bench.ask("POST", "/gpus/0/pause"),
               lambda: bench.become("abc", "running"), lambda: bench.become("abc", "failed"),
               lambda: bench.ask("POST", "/jobs/clear", {"ids": ["abc"]})]
    for change in changes:
        answer = ask(version)
        assert next(answer) == next(answer) == b"", "whoever waits may go"
        change()
        news = json.loads(b"".join(answer))
        assert news["state_version"] > version and not news.pop("is_whole")
        version, document = news["state_version"], merge(document, news)
    for other in (0, 10**18 - 1):               # of an earlier service, perhaps with another clock
        whole = json.loads(next(ask(other)))
        assert whole.pop("is_whole") and whole["state_version"] == version and merge({}, whole) == document
    assert document["is_paused"] and document["gpus"]["0"]["is_paused"] and not document["jobs"]
    bench.service.clock.monotonic = (number / 10 for number in range(10**6)).__next__
    bench.service.clock.sleep = lambda seconds: None
    *silence, last = ask(version)
    assert silence and not any(silence) and json.loads(last)["state_version"] == version, "after 15 s in any case"


def test_only_a_job_that_wants_a_gpu_is_said_to_wait_for_them():
    with Bench(default_gpus=0) as bench:
        watch = bench.service.gpu_watch
        watch.observer.observation = nexus.replace(watch.observer.observation, error="nvidia-smi is silent", gpus=())
        assert "warning" not in bench.ask("POST", "/queue", {"command": "a"})[1]
        assert bench.ask("POST", "/queue", {"command": "b", "gpus": 1})[1]["warning"] == "it waits: nvidia-smi is silent"


ACCEPTED = [  # reason, Accept, whether the page is the answer
    ("chromium", "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8", True),
    ("curl", "*/*", False),
    ("nothing said", "", False),
    ("JSON alone", "application/json", False),
    ("JSON rather", "text/html;q=0.5, application/json", False),
    ("both alike", "text/html, application/json", False),
]


@pytest.mark.parametrize(("reason", "accept", "is_page"), ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_a_browser_gets_the_page(bench, reason, accept, is_page):
    bench.api.page = "<style>a</style><script>b</script>"
    response = bench.respond("GET", "/", headers={"accept": accept})
    assert response.status == 200 and response.content_type.startswith("text/html") == is_page
    if is_page:
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "script-src 'sha256-PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0='" in policy      # of b
    assert bench.respond("GET", "/status", headers={"accept": accept}).content_type == "application/json"


def test_the_page_needs_no_token_and_what_it_asks_for_does(bench):
    bench.api.page = "<p>"
    assert bench.ask("GET", "/", headers={"accept": "text/html"}, uid=None) == (200, b"<p>")
    assert bench.ask("GET", "/status", uid=None)[0] == 401
    assert bench.ask("GET", "/", headers={"accept": "text/html", "host": "evil.example"})[0] == 403

"""Who may call, and who may see and change what."""

import json
import os
import socket
import time

import pytest
from stage import ANN, BEARER, BOB, OWNER, STRANGER, TOKEN, WRONG, Bench, is_error

import nexus

# Who may call
FOREIGN_ORIGIN, OWN_ORIGIN = {"origin": "http://evil.example"}, {"origin": "http://127.0.0.1:6234"}

LOOPBACK, PUBLIC = {}, {"host": "0.0.0.0"}

NAMED = {"allowed_hosts": ["gpu.example.org", "GPU2.example.org"]}

CALLERS = [  # reason, config, headers, uid, peer, status
    ("the owner", LOOPBACK, {}, OWNER, "127.0.0.1", 200),
    ("the owner over IPv6", LOOPBACK, {"host": "[::1]:6234"}, OWNER, "::1", 200),
    ("another user", LOOPBACK, {}, OWNER + 1, "127.0.0.1", 401),
    ("root, or a socket that is closed and reads as uid 0", LOOPBACK, {}, 0 if OWNER else 4242, "127.0.0.1", 401),
    ("a socket that is not found", LOOPBACK, {}, None, "127.0.0.1", 401),
    ("another machine, whose port is one of ours too", LOOPBACK, {}, OWNER, "192.0.2.7", 401),
    ("another user with the token", LOOPBACK, BEARER, OWNER + 1, "127.0.0.1", 200),
    ("another machine with the token", LOOPBACK, BEARER, None, "192.0.2.7", 200),
    ("a wrong token", LOOPBACK, WRONG, OWNER + 1, "127.0.0.1", 401),
    ("a wrong token, though it is the owner", LOOPBACK, WRONG, OWNER, "127.0.0.1", 401),
    ("another scheme", LOOPBACK, {"authorization": f"Basic {TOKEN}"}, OWNER, "127.0.0.1", 401),
    ("a token that is not ASCII", LOOPBACK, {"authorization": "Bearer t\xf6ken"}, OWNER, "127.0.0.1", 401),
    ("forwarded", LOOPBACK, {"forwarded": "for=192.0.2.7"}, OWNER, "127.0.0.1", 401),
    ("via a proxy", LOOPBACK, {"via": "1.1 proxy"}, OWNER, "127.0.0.1", 401),
    ("x-forwarded-anything", LOOPBACK, {"x-forwarded-proto": "https"}, OWNER, "127.0.0.1", 401),
    ("forwarded, with the token", LOOPBACK, {"x-forwarded-for": "192.0.2.7", **BEARER}, OWNER, "127.0.0.1", 200),
    ("localhost", LOOPBACK, {"host": "localhost:6234"}, OWNER, "127.0.0.1", 200),
    ("another port, as of ssh -L", LOOPBACK, {"host": "localhost:9999"}, OWNER, "127.0.0.1", 200),
    ("no Host", LOOPBACK, {"host": None}, OWNER, "127.0.0.1", 403),
    ("a Host of another site (DNS rebinding)", LOOPBACK, {"host": "evil.example:6234"}, OWNER, "127.0.0.1", 403),
    ("a Host that begins like ours", LOOPBACK, {"host": "localhost.evil.example"}, OWNER, "127.0.0.1", 403),
    ("a Host that ends like ours", LOOPBACK, {"host": "evil.example#localhost"}, OWNER, "127.0.0.1", 403),
    ("a Host with a user", LOOPBACK, {"host": "localhost@evil.example"}, OWNER, "127.0.0.1", 403),
    ("a bare IPv6 address", LOOPBACK, {"host": "::1"}, OWNER, "127.0.0.1", 403),
    ("another address of this machine", LOOPBACK, {"host": "192.0.2.1:6234"}, OWNER, "127.0.0.1", 403),
    ("another address, with the token", LOOPBACK, {"host": "192.0.2.1:6234", **BEARER}, OWNER, "127.0.0.1", 403),
    ("an allowed Host without a token", NAMED, {"host": "gpu.example.org"}, OWNER, "127.0.0.1", 401),
    ("an allowed Host with the token", NAMED, {"host": "gpu.example.org:443", **BEARER}, None, "127.0.0.1", 200),
    ("an allowed Host in other letters", NAMED, {"host": "gpu2.Example.ORG", **BEARER}, None, "127.0.0.1", 200),
    ("one that is not allowed, with the token", NAMED, {"host": "www.example.org", **BEARER}, None, "127.0.0.1", 403),
    ("its own Origin", LOOPBACK, OWN_ORIGIN, OWNER, "127.0.0.1", 200),
    ("its own Origin behind TLS", LOOPBACK, {"origin": "https://127.0.0.1:6234"}, OWNER, "127.0.0.1", 200),
    ("another site's Origin", LOOPBACK, FOREIGN_ORIGIN, OWNER, "127.0.0.1", 403),
    ("another site's Origin, with the token", LOOPBACK, {**FOREIGN_ORIGIN, **BEARER}, OWNER, "127.0.0.1", 403),
    ("a file's Origin", LOOPBACK, {"origin": "null"}, OWNER, "127.0.0.1", 403),
    ("another port's Origin", LOOPBACK, {"origin": "http://127.0.0.1:8888"}, OWNER, "127.0.0.1", 403),
    ("listening everywhere: the owner too needs a token", PUBLIC, {}, OWNER, "127.0.0.1", 401),
    ("listening everywhere: with the token", PUBLIC, BEARER, OWNER, "127.0.0.1", 200),
    ("listening everywhere: by address, with the token", PUBLIC, {"host": "192.0.2.1:6234", **BEARER}, None, "192.0.2.7", 200),
    ("listening everywhere: by address, without", PUBLIC, {"host": "192.0.2.1:6234"}, None, "192.0.2.7", 401),
    ("listening everywhere: by name, with the token", PUBLIC, {"host": "evil.example", **BEARER}, None, "192.0.2.7", 403),
    ("listening by a name: by it, with the token", {"host": "gpu1"}, {"host": "gpu1:6234", **BEARER}, None, "192.0.2.7", 200),
    ("listening by a name: by it, without", {"host": "gpu1"}, {"host": "gpu1:6234"}, OWNER, "127.0.0.1", 401),
]


@pytest.mark.parametrize("case", CALLERS, ids=[case[0] for case in CALLERS])
@pytest.mark.parametrize("method, path", [("GET", "/"), ("POST", "/service/pause")])
def test_who_may_call(case, method, path):
    reason, keys, headers, uid, peer, status = case
    with Bench(**keys) as bench:
        response = bench.respond(method, path, None, headers, None, uid, peer)
        assert response.status == (204 if status == 200 and method == "POST" else status), (reason, response.body)
        assert bench.store.state.paused == (status == 200 and method == "POST")
        if status != 200:
            assert is_error(json.loads(response.body))
            assert any(line.startswith(f"Refused {method} {path} from {peer}") for line in bench.lines), "each refusal is in the log"
        if status == 401:
            assert response.headers["WWW-Authenticate"] == "Bearer"
        assert not any(TOKEN in line for line in bench.lines)


def test_a_name_that_the_machine_gets_while_the_service_runs(monkeypatch):
    """As by DHCP: where other machines call, it may be called by that name too, and by no third one."""
    with Bench(**PUBLIC) as bench:
        former = socket.gethostname()
        monkeypatch.setattr(socket, "gethostname", lambda: "fresh")
        for name, status in (("fresh", 200), (f"{former}:6234", 200), ("evil.example", 403)):
            assert bench.respond("GET", "/status", None, {"host": name, **BEARER}, None, None, "192.0.2.7").status == status, name


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "FOO"])
def test_host_is_checked_on_every_method_and_path(shared_bench, method):
    for path in ("/", "/status", "/nothing"):
        assert shared_bench.ask(method, path, None, {"host": "evil.example"})[0] == 403


def test_who_changed_something_is_in_the_log(bench):
    job_id = bench.add(command="python train.py\n\x1b[2J")
    bench.ask("POST", "/service/pause", None, BEARER, None, None, "192.0.2.7")
    bench.ask("DELETE", f"/queue/{job_id}")
    log = "\n".join(bench.lines)
    user = bench.service.user
    assert f"Job {job_id} added by {user}: python train.py" in log and "\x1b" not in log
    assert f"Queue paused by {user} (token, 192.0.2.7)" in log and f"Job {job_id}: stopped by {user}" in log


def test_who_may_change_a_job(lab_bench):
    bobs, _, own = lab_bench.ids
    assert lab_bench.ask("PATCH", f"/queue/{bobs}", {"name": "n"}, BOB)[1]["name"] == "n"
    assert lab_bench.ask("PATCH", f"/queue/{own}", {"name": "n"}, BOB)[0] == 403
    assert lab_bench.ask("PATCH", f"/queue/{bobs}", {"priority": "high"}, BOB)[0] == 403
    lab_bench.become(bobs, "failed", cause="exit", exit_code=1)
    assert lab_bench.ask("POST", "/jobs/retry", {"ids": [bobs], "change": {"priority": "high"}}, BOB)[0] == 403
    assert lab_bench.ask("POST", "/jobs/retry", {"ids": [bobs], "change": {"name": "m"}}, BOB)[0] == 200


def test_a_user_has_its_own_jobs(lab_bench):
    for headers, user, own in ((BOB, "bob", 0), (ANN, "ann", 1)):
        for at, id in enumerate(lab_bench.ids):
            for method, path, body, status in (
                    ("GET", f"/jobs/{id}", None, 200), ("GET", f"/jobs/{id}/why", None, 200), ("GET", f"/jobs/{id}/logs", None, 200),
                    ("PATCH", f"/queue/{id}", {"priority": 2}, 200), ("DELETE", f"/jobs/{id}", None, 409),
                    ("POST", "/jobs/retry", {"ids": [id]}, 409)):
                code, answer = lab_bench.ask(method, path, body, headers)
                assert code == (status if at == own else 403), (method, path, user, answer)
        assert lab_bench.ask("GET", f"/jobs/{lab_bench.ids[own]}", None, headers)[1]["user"] == user
    assert lab_bench.ask("DELETE", f"/queue/{lab_bench.ids[1]}", None, BOB)[0] == 403
    assert lab_bench.ask("DELETE", f"/queue/{lab_bench.ids[0]}", None, BOB)[0] == 204
    assert lab_bench.ask("POST", "/jobs/retry", {"ids": [lab_bench.ids[0]]}, BOB)[0] == 200
    assert lab_bench.ask("GET", f"/jobs/{lab_bench.ids[0]}", None)[1]["stopped_by"] == "bob (token, 127.0.0.1)"


def test_a_user_sees_of_others_that_they_are_there(lab_bench):
    for path in ("/jobs", "/queue"):
        listed = lab_bench.ask("GET", path, None, BOB)[1]
        assert [job["id"] for job in listed] == lab_bench.ids and [job["position"] for job in listed] == [0, 1, 2]
        assert [job["command"] for job in listed] == ["echo bobs", None, None]
        assert all(nexus.JOB[key].public for key, fact in listed[1].items() if fact is not None)
        assert {job["user"] for job in listed} == {"bob", "ann", lab_bench.service.user}
        assert set(listed[1]) == set(listed[0]), "the same keys"

OWNERS = [("POST", "/service/pause"), ("POST", "/service/resume"), ("POST", "/service/stop"), ("GET", "/service/logs"),
          ("POST", "/gpus/0/pause"), ("POST", "/gpus/0/resume"), ("POST", "/service/pause?group=g")]


@pytest.mark.parametrize("method, path", OWNERS)
def test_what_is_the_owners(lab_bench, method, path):
    path, _, query = path.partition("?")
    code, answer = lab_bench.ask(method, path, None, BOB, dict([query.split("=")]) if query else None)
    assert code == 403 and is_error(answer) and lab_bench.service.user in answer["message"]
    assert not lab_bench.store.state.paused and not lab_bench.service.is_stopping and not lab_bench.store.state.paused_gpus

ENDS = [
    ("unknown", None), ("revoked", lambda tokens, now: nexus.revoke_tokens(tokens, "bob")),
    ("expired", lambda tokens, now: {sha256: nexus.replace(token, expires_at=now - 1) for sha256, token in tokens.items()})]


@pytest.mark.parametrize("reason, change", ENDS, ids=[case[0] for case in ENDS])
def test_tokens_that_are_over(lab_bench, reason, change):
    slept = []
    lab_bench.service.clock.sleep = slept.append
    headers = BOB if change else {"authorization": "Bearer secret-of-bop"}
    if change:
        nexus.change_tokens(nexus.DISK, lab_bench.layout.tokens_file, lambda tokens: change(tokens, time.time()))
    code, answer = lab_bench.ask("GET", "/jobs", None, headers)
    assert (code, answer["message"]) == (401, "the token is not right")
    assert slept == [nexus.WRONG_TOKEN_DELAY_S]
    assert "not right" in lab_bench.lines[-1] and not any("secret-of" in line for line in lab_bench.lines), lab_bench.lines
    assert lab_bench.ask("GET", "/jobs", None, BEARER)[0] == 200 and len(slept) == 1, "a right one is not slowed"


def test_a_token_file_that_is_garbage_keeps_only_users_out(lab_bench):
    with open(os.path.join(lab_bench.layout.home, "tokens.json"), "w") as file:
        file.write("{")
    assert lab_bench.ask("GET", "/jobs", None, BOB)[0] == 503
    assert lab_bench.ask("GET", "/jobs")[0] == 200


def test_a_user_goes_before_nobody(lab_bench):
    for body, code in (({"priority": "high"}, 403), ({"priority": -5}, 403), ({"priority": "low"}, 200), ({}, 200)):
        assert lab_bench.ask("POST", "/queue", {"command": "true", **body}, BOB)[0] == code
    assert lab_bench.ask("PATCH", f"/queue/{lab_bench.ids[0]}", {"priority": 0}, BOB)[0] == 403
    assert lab_bench.ask("PATCH", f"/queue/{lab_bench.ids[0]}", {"priority": 0})[0] == 200, "the owner may"


@pytest.mark.parametrize("who, given, expected", [
    (BOB, "high", 1), (BOB, "normal", 1), (BOB, "low", 2), ({}, "high", 0), ({}, "low", 2)])
def test_a_retry_goes_before_others_for_the_owner_alone(lab_bench, who, given, expected):
    child = lab_bench.ask("POST", "/queue", {"command": "true", "after": [lab_bench.ids[0]]}, BOB)[1]["id"]
    for id in (lab_bench.ids[0], child):
        assert lab_bench.ask("PATCH", f"/queue/{id}", {"priority": given})[0] == 200
    assert lab_bench.ask("DELETE", f"/queue/{lab_bench.ids[0]}")[0] == 204
    for id in (lab_bench.ids[0], child):
        again = lab_bench.ask("POST", "/jobs/retry", {"ids": [id]}, who)[1]["ids"][0]
        assert lab_bench.ask("GET", f"/jobs/{again}")[1]["priority"] == expected


def test_refusals_have_one_line_a_minute_with_their_number(bench):
    now = [0.0]
    bench.service.clock.monotonic = lambda: now[0]
    for number in range(20):
        bench.ask("GET", "/queue", uid=STRANGER + number)
    now[0] = 61.0
    bench.ask("GET", "/queue", headers={"host": "evil.example"}, uid=STRANGER)
    first, second = [line for line in bench.lines if line.startswith("Refused")]
    assert first.startswith("Refused GET /queue from 127.0.0.1 (") and second.endswith("(19 more since the last such line)")

NAMED = [  # who asks, for what, who is named
    ("a token's user", "bob", "POST", "/service/stop", "bob (token, 127.0.0.1)"),
    ("nobody known", None, "POST", "/service/stop", "127.0.0.1 ("),
    ("a token's user, of another's job", "bob", "DELETE", "/queue/{}", "bob (token, 127.0.0.1)")]


@pytest.mark.parametrize("reason, user, method, path, named", NAMED, ids=[case[0] for case in NAMED])
def test_a_refusal_names_the_caller_as_what_is_accepted_does(bench, reason, user, method, path, named):
    path = path.format(bench.add())
    bearer = bench.make_bearer(user) if user else {}
    if user:
        bench.ask("POST", "/queue", {"command": "true"}, bearer)
        assert bench.lines[-1].endswith(f" added by {named}: true"), "accepted"
    status, _ = bench.ask(method, path, None, bearer, uid=STRANGER)
    assert status == 403 if user else 401 and bench.lines[-1].startswith(f"Refused {method} {path} from {named}"), bench.lines[-1]

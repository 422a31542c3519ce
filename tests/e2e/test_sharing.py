"""A service for other people and machines: tokens, https, NEXUS_URL, turns.  Real services, users and clients."""

import json
import os
import socket
import subprocess
import sys

import live
import pytest

CURL = ["curl", "-sS", "-g", "--max-time", "60"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) for localhost, made by openssl."""
    return live.make_certificate(tmp_path_factory.mktemp("tls"))


def curl(*words):
    done = subprocess.run([*CURL, "-w", "\n%{http_code}", *words], capture_output=True, text=True, timeout=60)
    body, _, code = done.stdout.rpartition("\n")
    return int(code), json.loads(body) if body.startswith(("{", "[")) else body, done.stderr


# From another machine


def test_the_commands_by_nexus_url(tmp_path):
    """What a user does on a laptop: nothing of that machine's is sent or looked at but what is asked for."""
    with live.Box(gpus=2) as box:
        theirs = box.add("sleep 600", gpus=1)
        box.wait(theirs, "running")
        token = box.nexus("token", "create", "bob").stdout.strip()
        there = {"NEXUS_URL": f"http://127.0.0.1:{box.port}", "NEXUS_TOKEN": token, "NEXUS_HOME": str(tmp_path / "none"), "LAPTOP": "yes"}

        def nexus(*words):
            return box.nexus(*words, environ=there)

        done = nexus("run", "--env", "A=1", "--cwd", "/tmp", "echo $A $LAPTOP; pwd; echo err >&2; exit 3")
        assert (done.returncode, done.stdout) == (3, "1\n/tmp\n") and "err" in done.stderr, done
        added = nexus("add", "echo hello; sleep 600")
        job_id = added.stdout.strip()
        assert "home directory" in added.stderr and "--cwd" in added.stderr
        box.wait(job_id, "running")
        live.until(lambda: nexus("logs", job_id).stdout == "hello\n", "its output")
        assert f"Job ID: {job_id}" in nexus().stdout and "(root's)" in nexus().stdout and "None" not in nexus("status", "--detailed").stdout
        assert [job["user"] for job in json.loads(nexus("jobs", "--json").stdout)] == ["root", "bob", "bob"]
        assert "sleep 600" not in nexus("jobs", "--user", "root").stdout
        assert nexus("kill", job_id).returncode == 0 and box.wait(job_id)["stopped_by"].startswith("bob (token")
        assert nexus("wait", job_id).returncode != 0
        for words in (["kill", theirs], ["pause"], ["stop"], ["logs", "service"], ["show", theirs], ["logs", theirs]):
            done = nexus(*words)
            assert done.returncode == 5 and "root" in done.stderr and "Traceback" not in done.stderr, (words, done)
        assert not (tmp_path / "none").exists(), "no service was started here"
        assert box.nexus("token", "revoke", "bob").returncode == 0
        done = nexus("status")
        assert done.returncode == 5 and "token is not right" in done.stderr, done


@pytest.mark.parametrize("url, words", [
    ("http://127.0.0.1:1", "check NEXUS_URL"), ("https://127.0.0.1:1", "check NEXUS_URL"), ("http://nowhere.invalid", "nowhere.invalid")])
def test_a_service_elsewhere_that_does_not_answer(tmp_path, url, words):
    done = subprocess.run([sys.executable, live.NEXUS, "add", "true"], capture_output=True, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "NEXUS_URL": url, "NEXUS_TOKEN": "x" * 20})
    assert done.returncode == 6 and words in done.stderr and "Traceback" not in done.stderr, done


# https


def test_https(certificate, tmp_path):
    cert, key = certificate
    with live.Box(gpus=1, is_starting=False, tls_cert=str(cert), tls_key=str(key)) as box:
        done = box.nexus("run", "--gpus", "0", "echo hello")
        assert (done.returncode, done.stdout) == (0, "hello\n"), done
        token = box.nexus("token", "create", "bob").stdout.strip()
        url = f"https://localhost:{box.port}"
        assert curl("--cacert", cert, f"{url}/status")[0] == 200, "the owner needs no token here either"
        assert curl("--cacert", cert, "-H", f"Authorization: Bearer {token}", f"{url}/jobs")[1][0]["user"] == "root"
        assert curl(f"{url}/status")[0] == 0, "nobody trusts it unasked"
        assert curl(f"http://localhost:{box.port}/status")[0] == 0
        there = {"NEXUS_URL": url, "NEXUS_TOKEN": token, "NEXUS_HOME": str(tmp_path / "none")}
        done = box.nexus("status", environ=there)
        assert done.returncode == 6 and "SSL_CERT_FILE" in done.stderr, done
        trusting = {**there, "SSL_CERT_FILE": str(cert)}
        done = box.nexus("run", "--gpus", "0", "echo over; sleep 0.3; echo tls", environ=trusting)
        assert (done.returncode, done.stdout) == (0, "over\ntls\n"), done
        assert box.nexus("restart").returncode == 0 and f"https://127.0.0.1:{box.port}" in box.log()
        job_id = box.nexus("add", "--gpus", "0", "seq 100000").stdout.strip()
        assert curl("--cacert", cert, f"{url}/jobs/{job_id}?wait=60")[1]["status"] == "completed"
        follower = subprocess.run([*CURL, "-N", "--cacert", cert, f"{url}/jobs/{job_id}/logs?follow=true"], stdout=subprocess.PIPE)
        assert follower.stdout.split() == [b"%d" % number for number in range(1, 100001)]
        assert box.nexus("stop").returncode == 0


def test_a_certificate_of_another_key(certificate, tmp_path):
    other = tmp_path / "other.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", other], check=True,
                   capture_output=True)
    with live.Box(is_starting=False, tls_cert=str(certificate[0]), tls_key=str(other)) as box:
        done = box.nexus("start")
        assert done.returncode == 2 and "cannot be used" in done.stderr and "tls_cert" in done.stderr, done


# Whom the service lets in


PROXIES = ("Forwarded", "Via", "X-Forwarded-Proto", "X-Real-IP", "X-Client-IP", "True-Client-IP", "CF-Connecting-IP", "X-Forward-For",
           "X-Original-Forwarded-For", "Client-IP", "X-Cluster-Client-IP", "Fly-Client-IP", "Tailscale-User-Login")
LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
FROM_PAGES = [  # headers (@: where nexus listens), the HTTP status of a reading call, of a change
    *[({"Sec-Fetch-Site": site}, 200, 204) for site in ("none", "same-origin")],
    *[({"Sec-Fetch-Site": site, **more}, 403, 403) for site in ("cross-site", "same-site", "new-site") for more in (
        {}, {**LINK, "Sec-Fetch-Dest": "object"}, {**LINK, "Sec-Fetch-Dest": "iframe"}, {**LINK, "Sec-Fetch-Mode": "no-cors"})],
    *[({"Sec-Fetch-Site": site, **LINK}, 200, 403) for site in ("cross-site", "same-site")],
    *[({"Referer": referer}, 200, status) for referer, status in (
        ("http://@/jobs?text=a", 204), ("https://@", 204), ("http://@.evil.example/", 403), ("http://localhost:8888/", 403), ("", 403))],
    *[({name: "192.0.2.7"}, 401, 401) for name in PROXIES],
]


def test_what_a_page_or_a_proxy_sends():
    with live.Box() as box:
        for headers, *expected in FROM_PAGES:
            given = {name: text.replace("@", f"127.0.0.1:{box.port}") for name, text in headers.items()}
            for methods, status in zip((("GET", "HEAD"), ("POST",)), expected):
                for method in methods:
                    path = "/service/pause" if method == "POST" else "/jobs"
                    assert box.call(method, path, **given)[0] == status, (method, headers)
        for path in ("/", "/docs", "/jobs", "/service/logs", "/nothing"):       # a stream and an error too
            head = subprocess.run([*CURL, "-I", f"http://127.0.0.1:{box.port}{path}"], capture_output=True, text=True).stdout
            assert "Cross-Origin-Resource-Policy: same-origin\n" in head, (path, head)


def test_a_revoked_token_is_refused_at_once_and_its_jobs_go_on():
    with live.Box() as box:
        token = box.nexus("token", "create", "bob").stdout.strip()
        header, url = ("-H", f"Authorization: Bearer {token}"), f"http://127.0.0.1:{box.port}"
        code, answer, _ = curl(*header, "-H", "Content-Type: application/json", "-d", '{"command": "sleep 600"}', f"{url}/queue")
        assert code == 200
        box.wait(answer["id"], "running")
        box.nexus("token", "revoke", "bob")
        assert curl(*header, f"{url}/jobs")[0] == 401 and box.job(answer["id"])["status"] == "running"
        assert "the token is not right" in box.log() and token not in box.log()
        assert json.loads(box.nexus("token", "list", "--json").stdout) == []


def test_nobody_gets_a_token_in_the_owners_name():
    """It would be good for the owner's jobs."""
    with live.Box(is_starting=False) as box:
        for words in (["root"], ["root", "chosen-by-somebody"], ["root", "--days", "3"]):
            done = box.nexus("token", "create", *words)
            assert (done.returncode, done.stdout) == (2, "") and "root owns this service" in done.stderr, done
            assert f"{box.home}/token" in done.stderr and box.nexus("token", "list").stdout == ""
        assert box.nexus("token", "create", "roots").returncode == 0


# Many at once


TCP_REPAIR = 19             # closed in repair mode, a socket goes without a word, as when its machine loses power


def test_a_follower_whose_machine_has_gone_is_not_waited_for():
    """Of a silent job nothing is sent that would tell."""
    with live.Box(gpus=1, is_starting=False) as box:
        box.serve("nexus.IDLE_TIMEOUT_S = 1.0")
        job_id = box.add("sleep 600")
        box.wait(job_id, "running")

        def threads():
            return len(os.listdir(f"/proc/{box.pid()}/task"))

        before = threads()
        lines = [socket.create_connection(("127.0.0.1", box.port)) for _ in range(20)]
        for line in lines:
            line.sendall(f"GET /jobs/{job_id}/logs?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert line.recv(1000).startswith(b"HTTP/1.1 200")
        assert threads() >= before + 15
        for line in lines:
            line.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            line.close()
        live.until(lambda: threads() < before + 5, "the end of their threads")

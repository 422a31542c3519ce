"""Section 23: the page in a real browser (Debian's chromium), before a real service."""

import contextlib
import hashlib
import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time

import live
import network
import pytest
from pages import FORWARDED, axe, row, visit
from playwright.sync_api import expect

import nexus


def curl(box, command, **more):
    """Submit a job as the README says; its id."""
    done = subprocess.run(["curl", "-sS", "-H", "Content-Type: application/json", "-d", json.dumps({"command": command, **more}),
                           f"http://127.0.0.1:{box.port}/queue"], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)["id"]


def cancel(page, job_id):
    """On its page."""
    page.locator("#job").get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()


def open_log(page, job_id):
    """From the overview; the lines of the log."""
    row(page, job_id).get_by_role("link", name=f"Job {job_id}").first.click()
    return page.get_by_role("log")


def go_home(page):
    page.get_by_role("link", name="\u2190").click()


# The answer itself

def test_browsers_get_the_page_and_all_others_json(box):
    status, text = box.call("GET", "/", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert status == 200 and text.startswith("<!doctype html>")
    assert box.call("GET", "/")[1]["name"] == "nexus"
    assert box.call("GET", "/", Accept="application/json, text/html;q=0.9")[1]["name"] == "nexus"
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|\burl\(", text), "no outside resource"
    assert not re.search(r"\son\w+=|style=|innerHTML\s*=|insertAdjacentHTML|document\.write\b|\beval\(", text.replace("no innerHTML", ""))


# Jobs come, print and go

def test_a_job_submitted_with_curl_appears_streams_its_log_and_is_cancelled(browser, box):
    with visit(browser, box) as page:
        loaded_at = page.evaluate("loadedAt")
        go = box.path("go")
        command = f"echo first; until [ -e {go} ]; do sleep 0.05; done; echo second; echo oops >&2; sleep 1000"
        job_id = curl(box, command, name="streams")
        expect(page.locator("[data-gpu='0']")).to_contain_text("streams")
        expect(page.locator("[data-gpu='0']")).to_contain_text(job_id)
        expect(page.locator("#counts")).to_contain_text("1 running")
        expect(row(page, job_id).locator(".line")).to_have_text("first")
        lines = open_log(page, job_id)
        expect(lines).to_have_text("first")
        go.touch()
        expect(lines.locator("div:not(.err)")).to_have_text(["first", "second"])
        expect(lines.locator("div.err")).to_have_text("oops")
        button = page.locator("#job").get_by_role("button", name="Cancel")
        button.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(f"Cancel job {job_id}?")
        expect(dialog.get_by_role("button", name="Keep")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(button).to_be_focused()
        cancel(page, job_id)
        expect(page.locator("#notices")).to_contain_text(f"Cancelled job {job_id}.")
        expect(page.locator("#job .head .badge").first).to_have_text("cancelled: killed")
        go_home(page)
        expect(page.locator("#ended").locator(f"[data-job={job_id}]")).to_contain_text("killed")
        assert box.job(job_id)["cause"] == "killed"
        assert page.evaluate("loadedAt") == loaded_at, "without a reload"


def test_texts_stay_texts(browser, box):
    evil = "<img src=x onerror=alert(1)>"
    with visit(browser, box, is_expecting_errors=True) as page:
        quoted = f"echo '{evil}'; echo '<script>alert(2)</script>' >&2; sleep 1000 # {evil}"
        job_id = curl(box, quoted, name=evil, gpus=0)
        curl(box, evil, after=[job_id], name=evil, group=evil)
        expect(row(page, job_id)).to_contain_text(evil)
        expect(page.locator(".group")).to_contain_text(evil)
        expect(open_log(page, job_id).locator("div:not(.err)")).to_have_text(evil)
        expect(page.locator("#job .log [role=log]")).to_contain_text("<script>alert(2)</script>")
        expect(page.locator("#job")).to_contain_text(quoted)
        page.locator("#job").get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("dialog")).to_contain_text(evil)
        page.keyboard.press("Escape")
        page.goto(page.url.split("#")[0] + "#/jobs/%3Cimg%20src%3Dx%20onerror%3Dalert(3)%3E")
        expect(page.locator("#job h1")).to_contain_text("no job")
        assert page.evaluate("document.images.length") == 0


# Logs

def test_colours_and_progress_bars(browser, box):
    text = (r"plain \033[31mred\033[0m \033[1;4mbold\033[0m \033[38;5;214mamber\033[0m \033[48;2;1;2;3mdeep\033[0m\n"
            r" 10%%|#   |\r 50%%|##  |\r100%%|####|\n\033]0;a title\007after\033[2J\n")
    with visit(browser, box) as page:
        job_id = curl(box, f"printf '{text}'; sleep 1000", gpus=0)
        expect(row(page, job_id).locator(".line")).to_have_text("after")
        lines = open_log(page, job_id)
        expect(lines.locator("div")).to_have_text(["plain red bold amber deep", "100%|####|", "after"])
        assert page.evaluate("[...document.querySelectorAll('.lines span')].map((span) => [span.textContent, span.className])") == [
            ["red", "sgr31"], ["bold", "sgr1 sgr4"], ["amber", "sgr39"], ["deep", "sgr39"]]


TERMINALS = [  # reason, what is printed, the lines then
    ("an escape over three chunks", ["\x1b", "[3", "1mred"], ["red"]),
    ("a progress bar", ["1%\r", "2%\r", "3%\n"], ["3%"]),
    ("CR LF", ["a\r\nb\r", "\nc"], ["a", "b", "c"]),
    ("a progress bar with colours", ["\x1b[31mabc\x1b[32mdef\x1b[0m\r\x1b[1mAB\x1b[0m"], ["AB"]),
    ("what a terminal does beside its lines is dropped", ["\x1b[2J\x1b[Ha\x1b]0;title\x07b\x1b(Bc\x1bPq\x1b\\d\x07\x00e"], ["abcde"]),
    ("an empty line stays", ["a\n\nb\n"], ["a", "", "b"]),
    ("tabs stay", ["a\tb"], ["a\tb"]),
    ("half a colour", ["\x1b[38;5mx\x1b[38;2;1mx\x1b[mx"], ["xxx"]),
]


def test_the_terminal_whatever_the_chunks(browser, box):
    with visit(browser, box) as page:
        run = """(chunks) => {
            const source = new LogSource(null);
            const lines = chunks.flatMap((chunk) => source.feed(chunk)).map(([runs]) => runs);
            if (source.raw) lines.push(renderLine(source.raw, source.style)[0]);
            return lines.map((runs) => runs.map(([text]) => text).join('')); }"""
        for reason, chunks, wanted in TERMINALS:
            assert page.evaluate(run, chunks) == wanted, reason
            assert page.evaluate(run, list("".join(chunks))) == wanted, f"{reason}, a letter at a time"
        long = page.evaluate(run, ["x" * 1_000_000 + "\nnext"])
        assert len(long[0]) == 20000 and long[1] == "next"
        bar = [f"{number} %|{'#' * 90}|\r" for number in range(1000)]
        assert page.evaluate(run, ["".join(bar)]) == page.evaluate(run, bar) == [f"999 %|{'#' * 90}|"]


def test_a_log_in_order_with_attempts_and_addresses(browser, box):
    turns = "for i in $(seq 3); do echo out $i; sleep 0.25; echo see https://example.org/$i?a=b. >&2; sleep 0.25; done"
    once = box.path("once")
    job_id = box.add(f"{turns}; [ -e {once} ] || {{ touch {once}; echo 'KeyError: lr' >&2; exit 3; }}; echo KeyError: lr >&2; exit 4",
                     gpus=0, retries=1)
    box.wait(job_id, "failed")
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        lines = page.locator(".lines > div")
        first = ["out 1", "see https://example.org/1?a=b.", "out 2", "see https://example.org/2?a=b.", "out 3",
                 "see https://example.org/3?a=b.", "KeyError: lr"]
        expect(lines).to_have_text([*first, re.compile("^attempt 2, "), *first])
        assert lines.nth(1).get_by_role("link").get_attribute("href") == "https://example.org/1?a=b"


def test_a_long_log_opens_at_its_end_and_earlier_lines_are_loaded_when_one_wants_them(browser, box):
    job_id = box.wait(box.add("seq 1000000; sleep 0.5; echo last >&2", gpus=0), "completed")["id"]
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        lines, state = page.locator(".lines > div"), page.locator(".log [role=status]")
        expect(lines).to_have_count(2000)
        expect(lines.last).to_have_text("last")
        expect(lines.last).to_be_in_viewport()
        expect(state).to_contain_text("scroll up for earlier ones")
        page.get_by_role("log").evaluate("(node) => { node.scrollTop = 0; }")
        expect(lines).to_have_count(20000)
        expect(page.get_by_text("998002", exact=True)).to_be_in_viewport()
        expect(state).to_contain_text("scroll up for earlier ones")
        page.get_by_role("log").evaluate("(node) => { node.scrollTop = 0; }")          # as far as one likes
        expect(state).to_contain_text("lines 979,")
        expect(page.get_by_text("980002", exact=True)).to_be_in_viewport()
        page.get_by_role("log").evaluate("(node) => { node.scrollTop = node.scrollHeight; }")
        expect(lines).to_have_count(4000)
        page.get_by_role("button", name="To the end").click()
        expect(lines.last).to_have_text("last")
        expect(lines.last).to_be_in_viewport()


def test_100000_lines_leave_the_page_responsive(browser, box):
    with visit(browser, box) as page:
        go = box.path("flood")
        flood = "seq -f 'line %.0f of a log that is in a hurry' 1 100000"
        job_id = curl(box, f"until [ -e {go} ]; do sleep 0.05; done; {flood}; echo done; sleep 1000", gpus=0)
        open_log(page, job_id)
        page.evaluate("""() => { window.longest = 0; let last = performance.now();
            const look = () => {
                const now = performance.now(); longest = Math.max(longest, now - last); last = now; requestAnimationFrame(look); };
            requestAnimationFrame(look); }""")
        state = page.locator(".log [role=status]")
        expect(state).to_have_text("live \u00b7 0 lines")              # else only the end of it would be read
        go.touch()
        expect(page.locator(".lines > div").last).to_have_text("done")
        assert page.evaluate("document.querySelectorAll('.lines > div').length") <= 20000
        assert page.evaluate("longest") < 10000, "milliseconds without a frame, on two busy cores"


def test_the_log_stays_where_its_reader_is(browser, box):
    with visit(browser, box) as page:
        go = box.path("scrolled")
        job_id = curl(box, f"seq 1 500; until [ -e {go} ]; do sleep 0.05; done; seq 501 600; sleep 1000", gpus=0)
        lines = open_log(page, job_id)
        expect(lines.locator("div").last).to_have_text("500")
        expect(lines.locator("div").last).to_be_in_viewport()
        lines.evaluate("(node) => { node.scrollTop = 100; }")
        go.touch()
        expect(lines.locator("div").last).to_have_text("600")
        assert lines.evaluate("(node) => node.scrollTop") == 100
        page.get_by_role("button", name="New lines").click()
        expect(lines.locator("div").last).to_be_in_viewport()
        expect(page.get_by_role("button", name="New lines")).to_be_hidden()


# Many tabs: a browser has six connections to a host, for all of them

HURRY = """
    const patient = setTimeout;
    window.setTimeout = (act, time, ...more) => patient(act, {20000: 500}[time] ?? time, ...more);
    window.logSilence = 40000;
    const patience = AbortSignal.timeout;
    AbortSignal.timeout = (time) =>
        patience.call(AbortSignal, {20000: 1000, 40000: window.logSilence, 2000: 500, 45000: SILENCE}[time] ?? time);
    Object.defineProperty(document, 'hidden', {get: () => window.isHidden ?? false});
    window.hide = (isHidden) => { window.isHidden = isHidden; document.dispatchEvent(new Event('visibilitychange')); };
"""


def hurry(page, silence_ms=45000):
    """Load the page again with shorter waits, and with hide(true) for what another tab before it does."""
    page.add_init_script(HURRY.replace("SILENCE", str(silence_ms)))
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")


def add_printing(box, go):
    """A job that prints on both, and on both again when `go` is there."""
    command = f"say() {{ echo $*; echo $* >&2; }}; say begins; until [ -e {go} ]; do sleep 0.05; done; say goes on; sleep 1000"
    return box.wait_started(box.add(command, gpus=0))["id"]


def test_four_tabs_with_live_logs_go_on_and_can_cancel(browser, box):
    go = box.path("four")
    ids = [add_printing(box, go) for _ in range(4)]
    with visit(browser, box, f"#/jobs/{ids[0]}") as page:
        tabs = [page, *(page.context.new_page() for _ in ids[1:])]
        for tab, job_id in zip(tabs[1:], ids[1:]):
            tab.goto(page.url.replace(ids[0], job_id))
        for tab in tabs:
            expect(tab.locator("#connection")).to_have_text("live")
            expect(tab.get_by_role("log").locator("div.err")).to_have_text("begins")
        go.touch()
        for tab in tabs:
            expect(tab.get_by_role("log").locator("div:not(.err)")).to_have_text(["begins", "goes on"])
            expect(tab.get_by_role("log").locator("div.err")).to_have_text(["begins", "goes on"])
        for tab, job_id in zip(tabs, ids):
            tab.bring_to_front()
            cancel(tab, job_id)
            expect(tab.locator("#job .head .badge").first).to_have_text("cancelled: killed")
            expect(tab.locator(".log [role=status]").first).to_contain_text("complete")


def test_a_tab_that_nobody_sees_asks_little_and_tells_of_failures(browser, box):
    with visit(browser, box) as page:
        hurry(page)
        job_id = add_printing(box, box.path("unseen"))
        open_log(page, job_id)
        expect(page.get_by_role("log").locator("div")).to_have_count(2)
        go_home(page)
        page.evaluate("hide(true)")
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        box.wait(box.add("exit 3", gpus=0, name="fails"), "failed")
        until(page, lambda: page.title().startswith("\u2717 "))
        assert "e5322d" in page.locator("#icon").get_attribute("href"), "the icon has a red dot"
        assert not [url for url in asked if "/status" not in url]
        page.evaluate("hide(false)")
        expect(page.locator("#failures")).to_contain_text("fails")


def test_what_is_never_answered_is_told_and_asked_again(browser, box):
    job_id = box.wait_started(box.add("sleep 1000", gpus=0))["id"]
    with visit(browser, box) as page:
        hurry(page, silence_ms=1000)
        page.route("**/status*", lambda route: None)
        box.add("true", gpus=0)
        expect(page.locator("#connection")).to_have_text("reconnecting")
        page.unroute("**/status*")
        expect(page.locator("#connection")).to_have_text("live")
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        hurry(page)
        page.route("**/jobs/cancel", lambda route: None)
        cancel(page, job_id)
        expect(page.locator("#notices")).to_contain_text("The service has not answered for 20 seconds.")
        expect(page.locator("#connection")).to_have_text("live")


def test_a_log_whose_connection_breaks_or_hangs_comes_back(browser, box):
    first, second = box.path("breaks"), box.path("hangs")
    job_id = box.wait_started(box.add(
        f"echo 0; until [ -e {first} ]; do sleep 0.05; done; echo 1; until [ -e {second} ]; do sleep 0.05; done; echo 2; sleep 1000",
        gpus=0))["id"]
    with visit(browser, box, f"#/jobs/{job_id}", is_expecting_errors=True) as page:
        hurry(page)
        lines, state = page.get_by_role("log").locator("div"), page.locator(".log [role=status]").first
        expect(lines).to_have_text(["0"])
        for go, break_it in ((first, lambda route: route.abort("connectionreset")), (second, lambda route: None)):
            page.route("**/logs?*", break_it)
            page.evaluate("logSilence = 1000")
            go.touch()                          # the question that is held is answered, the next one is not
            expect(state).to_contain_text("the connection is lost")
            expect(page.locator("#connection")).to_have_text("live")
            page.evaluate("logSilence = 40000")
            page.unroute("**/logs?*")
            expect(state).to_contain_text("live")
        expect(lines).to_have_text(["0", "1", "2"])


# The one channel: each answer has what has changed


def test_answers_are_changes_and_nothing_else_is_asked(browser, box):
    box.ask("POST", "/service/pause")
    ids = box.ask("POST", "/queue", [{"command": f"true {number}", "gpus": 0} for number in range(60)])["ids"]
    with visit(browser, box) as page:
        expect(row(page, ids[0])).to_contain_text("paused")
        expect(page.locator("#lanes")).to_be_visible()
        asked = []
        page.on("response", lambda answer: asked.append(answer))
        box.ask("PATCH", f"/queue/{ids[1]}", {"name": "renamed"})
        expect(row(page, ids[1])).to_contain_text("renamed")
        box.ask("POST", "/jobs/cancel", {"ids": ids[:1]})
        expect(page.locator("#waiting")).not_to_contain_text(ids[0])
        expect(page.locator("#ended")).to_contain_text(ids[0])
        expect(page.locator("#waiting-count")).to_have_text("59")
        assert {answer.url.partition("?")[0].rpartition("/")[2] for answer in asked} == {"status"}
        assert all(len(answer.body()) < 2500 for answer in asked)




# When something is missing, late or wrong

def test_a_jobs_page_is_shown_before_the_status_is_there(browser, box):
    running = box.wait_started(box.add("echo printed; sleep 1000", gpus=0, name="the one"))["id"]
    box.ask("POST", "/service/pause")
    pending = box.add("true", gpus=0)
    for job_id, texts in ((running, ["the one", "echo printed", "printed"]), (pending, ["pending", "Why it waits"])):
        with visit(browser, box, f"#/jobs/{job_id}", is_waiting=False) as page:
            page.route("**/status*", lambda route: None)
            page.reload()
            for text in texts:
                expect(page.locator("#job")).to_contain_text(text)
            expect(page.locator("#connection")).to_have_text("connecting")


@pytest.mark.parametrize("missing", ["gpus", "hints"])
def test_a_fault_while_drawing_is_shown(browser, box, missing):
    with visit(browser, box, is_expecting_errors=True) as page:
        broken = page.get_by_role("alert").filter(has_text="An error in this page")
        expect(broken).to_be_hidden()
        status = box.ask("GET", "/status?after=0")
        page.route("**/status*", lambda route: route.fulfill(json={**status, missing: None}))
        page.reload()
        expect(broken.first).to_be_visible()
        page.unroute("**/status*")
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        expect(broken).to_have_count(0)


def until(page, look):
    live.until(lambda: page.wait_for_timeout(20) or look())


# Who may look

def test_the_token_is_asked_for_and_kept_for_the_tab(browser, box):
    owner = live.read(box.home / "token").strip()
    job_id = box.add("sleep 1000", gpus=0, name="seen by the owner")
    with visit(browser, box, is_expecting_errors=True, is_waiting=False, extra_http_headers=FORWARDED) as page:
        field = page.locator("#login").get_by_label("Token")
        expect(field).to_be_focused()
        expect(page.locator("#login")).to_contain_text("needs a token")
        assert field.get_attribute("type") == "password"
        field.fill("wrong")
        field.press("Enter")
        expect(page.locator("#login")).to_contain_text("the token is not right")
        field.fill(owner)
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#connection")).to_have_text("live")
        expect(row(page, job_id)).to_contain_text("seen by the owner")
        late = box.add("sleep 1000", gpus=0)
        expect(row(page, late)).to_be_visible()         # the stream carries the token as well
        page.reload()
        expect(row(page, job_id)).to_be_visible()
        assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
        other = page.context.new_page()
        other.goto(page.url)
        expect(other.locator("#login").get_by_label("Token")).to_be_visible()
        other.close()
        page.get_by_role("button", name="Forget the token").click()
        expect(field).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_a_user_sees_what_is_his_and_is_offered_nothing_else(browser, box):
    text = "a-token-of-alices-000"
    token = nexus.Token("alice", hashlib.sha256(text.encode()).hexdigest(), time.time())
    nexus.change_tokens(nexus.DISK, str(box.home / "tokens.json"), lambda tokens: {token.sha256: token})
    job_id = box.wait_started(box.add("echo secret; sleep 1000 # secret", gpus=0))["id"]
    box.ask("POST", "/service/pause")
    own = box.call("POST", "/queue", {"command": "true", "gpus": 0}, Authorization=f"Bearer {text}", **FORWARDED)[1]["id"]
    with visit(browser, box, is_expecting_errors=True, is_waiting=False, extra_http_headers=FORWARDED) as page:
        page.locator("#login").get_by_label("Token").fill(text)
        page.locator("#login").get_by_label("Token").press("Enter")
        expect(row(page, job_id)).to_contain_text("(root's)")
        assert "secret" not in page.content()
        for name in ("Pause the queue", f"Cancel job {job_id}", "Pause GPU 0"):
            expect(page.get_by_role("button", name=name)).to_be_hidden()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page.url.split("#")[0] + f"#/jobs/{job_id}")
        expect(page.locator("#job h1")).to_have_text(f"job {job_id} is root's")
        expect(page.locator("#job")).to_contain_text("alice's own: nexus jobs --user alice")
        box.add("true", gpus=0)
        until(page, lambda: any("/status" in url for url in asked))      # the page goes on to refresh, but for this job
        page.wait_for_timeout(200)
        assert len([url for url in asked if job_id in url]) == 1
        expect(page.locator("#notices > *")).to_have_count(0)
        page.goto(page.url.split("#")[0] + f"#/jobs/{own}")
        expect(page.locator("#job").get_by_role("button", name="Cancel")).to_be_visible()
        expect(page.locator("#job").get_by_role("button", name="Change")).to_be_visible()
        expect(page.get_by_role("button", name="Move")).to_have_count(0)


# The queue, the history, the GPUs

def test_pause_and_resume(browser, box):
    with visit(browser, box) as page:
        page.get_by_role("button", name="Pause the queue").click()
        expect(page.locator("#banners")).to_contain_text("The queue is paused")
        job_id = curl(box, "sleep 1000")
        expect(row(page, job_id)).to_contain_text("paused")
        page.get_by_role("button", name="Resume the queue").click()
        expect(page.locator("#gpus")).to_contain_text(job_id)
        expect(page.locator("#banners")).not_to_contain_text("The queue is paused")
        gpu = page.locator("[data-gpu='1']")
        gpu.get_by_role("button", name="Pause GPU 1").click()
        expect(gpu).to_contain_text("Paused")
        assert box.gpu(1)["is_paused"]
        gpu.get_by_role("button", name="Resume GPU 1").click()
        expect(gpu).to_contain_text("Available")
        assert not box.gpu(1)["is_paused"]


def test_the_queue_is_moved_and_cancelled(browser, box):
    box.ask("POST", "/service/pause")
    ids = [box.add(f"true {number}") for number in range(3)]
    with visit(browser, box) as page:
        def expect_order(*places):
            expect(page.locator("#waiting .id")).to_have_text([ids[place] for place in places])
            assert [job["id"] for job in box.ask("GET", "/queue")] == [ids[place] for place in places]
        expect_order(0, 1, 2)
        page.get_by_role("button", name=f"Cancel job {ids[0]}").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
        expect_order(1, 2)
        expect(page.locator(f"#ended [data-job={ids[0]}]")).to_contain_text("removed")
        page.locator(f"#waiting [data-job={ids[2]}] a").click()
        page.get_by_role("button", name="Move to the front").click()
        live.until(lambda: [job["id"] for job in box.ask("GET", "/queue")] == [ids[2], ids[1]])
        page.get_by_role("button", name="Move to the end").click()
        live.until(lambda: [job["id"] for job in box.ask("GET", "/queue")] == [ids[1], ids[2]])
        page.get_by_role("button", name="Change").click()
        page.get_by_label("Priority").fill("high")
        page.get_by_role("dialog").get_by_role("button", name="Change").click()
        live.until(lambda: [job["id"] for job in box.ask("GET", "/queue")] == [ids[2], ids[1]])
        go_home(page)
        expect_order(2, 1)


def test_a_pending_job_is_held_and_resumed(browser, box):
    box.ask("POST", "/service/pause")
    job_id = box.add("true")
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        page.get_by_role("button", name=f"Hold job {job_id}").click()
        expect(page.locator("#job .head").first).to_contain_text("held")
        assert box.job(job_id)["is_held"]
        go_home(page)
        page.set_viewport_size({"width": 390, "height": 844})
        expect(row(page, job_id).locator(".badge")).to_have_text("held")
        row(page, job_id).get_by_text("true").click()          # all of its name is the link
        expect(page.get_by_role("heading", name=f"Job {job_id}")).to_be_focused()
        go_home(page)
        row(page, job_id).get_by_role("button", name=f"Resume job {job_id}").click()
        expect(row(page, job_id).locator(".badge")).to_have_count(0)
        assert not box.job(job_id)["is_held"]


def test_what_show_tells_stands_on_a_jobs_page(browser, box):
    job_id = box.wait(box.add("sleep 1000 & echo done", gpus=1, timeout_seconds=7200), "completed")["id"]
    assert box.job(job_id)["notes"] and box.job(job_id)["finished_at"]
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        expect(page.locator("#job .warn")).to_contain_text("ended after its command: sleep")
        expect(page.locator("#job")).to_contain_text(re.compile("just now.*started .* ended .* time limit 2h"))
        page.get_by_text("Details").click()
        for text in ("GPUs: 1", "priority: normal", "time limit: 2h", "exit code: 0", "notes: ended after",
                     re.compile(r"peak memory [\d.]+ MB"), re.compile(r"submitted: \w+ \d+, ")):
            expect(page.locator("#job .facts")).to_contain_text(text)


def test_the_reason_and_the_estimate_stand_in_the_queue(browser, box):
    for _ in range(2):
        box.wait_started(box.add("sleep 1000", expected_time=600))
    waits, same = box.add("true"), box.add("true")
    with visit(browser, box) as page:
        expect(row(page, waits)).to_contain_text("0 of 2 are free")
        expect(row(page, same)).to_contain_text("as above")
        expect(row(page, waits)).to_contain_text(re.compile(r"starts in about \d+m"))
        page.goto(page.url.split("#")[0] + f"#/jobs/{waits}")
        expect(page.locator("#job")).to_contain_text("it is first in the queue")


def test_failures_stay_until_they_are_dismissed_or_tried_again(browser, box):
    first, other = (box.wait(box.add(f"echo 'ValueError: bad learning rate {number}' >&2; exit 3", gpus=0), "failed")["id"]
                    for number in range(2))
    many = box.ask("POST", "/queue", [{"command": "exit 4", "group": "sweep", "gpus": 0}] * 3)["ids"]
    for job_id in many:
        box.wait(job_id, "failed")
    with visit(browser, box) as page:
        failures = page.locator("#failures")
        expect(page).to_have_title(re.compile("^\u2717 5 "))
        expect(failures.locator("li")).to_have_count(4)              # the group is one line; and those for all
        expect(failures).to_contain_text("+2 of sweep")
        page.get_by_role("button", name="Dismiss 3 failures of group sweep").click()
        page.get_by_role("button", name=f"Dismiss job {other}").click()
        expect(failures.locator("li")).to_have_count(1)
        page.reload()
        expect(failures).to_contain_text("ValueError: bad learning rate 0")
        expect(failures.locator("li")).to_have_count(1)
        expect(page.locator(f"#ended [data-job={other}]")).to_contain_text("exit 3")
        failures.get_by_role("link", name=f"Job {first}").click()
        expect(page.get_by_role("heading", name=f"Job {first}")).to_be_focused()
        expect(page.locator("#job [role=log]")).to_contain_text("ValueError: bad learning rate")
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        assert "ValueError" in download.value.path().read_text()
        page.get_by_role("button", name="Retry", exact=True).click()
        expect(page.locator("#notices")).to_contain_text(f"Job {first} runs again as")
        expect(page.locator("#job h1")).not_to_have_text(f"Job {first}")
        expect(page.locator("#job")).to_contain_text("failed: exit 3")


def test_the_log_of_a_failed_attempt_is_shown_before_the_next_one(browser, box):
    go = box.path("attempts")
    job_id = box.add(f"until [ -e {go} ]; do sleep 0.05; done; echo the first one fails; exit 1", gpus=0, retries=1)
    box.wait_started(job_id)
    box.ask("POST", "/service/pause")
    go.touch()
    assert box.wait(job_id, "pending")["attempt"] == 1
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        expect(page.get_by_role("log")).to_have_text("the first one fails")
        expect(page.locator(".log [role=status]")).to_contain_text("the next attempt has not started")
        expect(page.locator("#job")).to_contain_text("1: exit 1")


def test_filters(browser, box):
    failed = box.wait(box.add("exit 3", gpus=0), "failed")["id"]
    running = box.wait_started(box.add("sleep 1000 # alpha"))["id"]
    box.ask("POST", "/service/pause")
    first, second = box.add("python alpha.py", group="one"), box.add("python beta.py", name="Second")
    with visit(browser, box) as page:
        expect(row(page, second)).to_be_visible()
        page.keyboard.press("/")
        expect(page.get_by_label("Filter jobs")).to_be_focused()
        page.keyboard.type("ALPHA")
        expect(row(page, second)).to_be_hidden()
        expect(row(page, first)).to_be_visible()
        expect(page.locator("#waiting-count")).to_have_text("1")
        expect(page.locator("#running")).to_contain_text(running)
        expect(page.locator("[data-gpu='0']")).to_contain_text(running)
        page.get_by_role("link", name="Show all").click()
        expect(page.get_by_label("Filter jobs")).to_have_value("")
        page.locator("#waiting").get_by_role("link", name="one", exact=True).click()
        expect(row(page, first)).to_be_visible()
        expect(row(page, second)).to_be_hidden()
        page.get_by_role("button", name="group one \u00d7").click()
        page.locator("#counts").get_by_role("link", name="failed").click()
        expect(page.locator("#ended .id")).to_have_text([failed])
        expect(page.locator("#waiting")).to_have_count(0)
        page.get_by_role("button", name="cancelled").click()
        expect(page.locator("#ended")).to_contain_text("No job matches the filter.")
        page.get_by_role("link", name="Show all").click()
        expect(row(page, second)).to_be_visible()


def test_the_filter_is_in_the_address_and_back_keeps_the_place(browser, box):
    box.ask("POST", "/service/pause")
    ids = box.ask("POST", "/queue", [{"command": f"python train{number}.py"} for number in range(40)])["ids"]
    box.add("something else", name="other one")
    with visit(browser, box) as page:
        page.get_by_label("Filter jobs").fill("train")
        expect(page).to_have_url(re.compile(r"#/\?text=train$"))
        expect(page.locator("#waiting-count")).to_have_text("40")
        row(page, ids[30]).scroll_into_view_if_needed()
        top = page.evaluate("scrollY")
        row(page, ids[30]).get_by_role("link").first.click()
        expect(page.get_by_role("heading", name=f"Job {ids[30]}")).to_be_focused()
        page.go_back()
        expect(page.get_by_label("Filter jobs")).to_have_value("train")
        expect(row(page, ids[30]).get_by_role("link").first).to_be_focused()
        assert abs(page.evaluate("scrollY") - top) < 200 and top > 200
        page.reload()
        expect(page.locator("#waiting-count")).to_have_text("40")
        expect(page.get_by_label("Filter jobs")).to_have_value("train")


def test_a_group_is_a_row_that_opens_and_is_acted_on_as_one(browser, box):
    bad = box.add("echo 'RuntimeError: no data' >&2; exit 3", group="sweep", gpus=0)
    box.wait(bad, "failed")
    box.ask("POST", "/service/pause")
    ids = box.ask("POST", "/queue", [{"command": f"true {number}", "group": "sweep", "gpus": 0} for number in range(60)])["ids"]
    with visit(browser, box) as page:
        group = page.locator("[data-group=sweep]")
        expect(group.get_by_role("link", name="60 \u2026 pending")).to_be_visible()
        expect(group.get_by_role("link", name="1 \u2717 failed")).to_be_visible()
        expect(group.get_by_label("1 of 61 have ended")).to_be_visible()
        group.get_by_role("button", name="Pause group sweep").click()
        expect(group).to_contain_text("paused by")
        group.get_by_role("button", name="Resume group sweep").click()
        expect(group).not_to_contain_text("paused by")
        group.get_by_role("button", name="Retry failed group sweep").click()
        expect(group.get_by_role("link", name="61 \u2026 pending")).to_be_visible()
        group.get_by_role("link", name="sweep", exact=True).click()
        expect(page.locator("#results tbody tr")).to_have_count(61)
        expect(row(page, ids[0])).to_be_visible()
        expect(row(page, bad)).to_have_count(0)                 # its retry stands for it
        page.get_by_role("button", name="waiting", exact=True).click()
        expect(page.locator("#waiting [data-job]")).to_have_count(50)
        page.get_by_role("button", name="Show 11 more of 11").click()
        expect(page.locator("#waiting [data-job]")).to_have_count(61)
        page.get_by_role("button", name="waiting", exact=True).click()
        expect(page.locator("#results")).to_be_visible()
        page.get_by_role("button", name="Pause group sweep").click()           # on its own page, too
        expect(group).to_contain_text("paused by")
        page.get_by_role("button", name="Resume group sweep").click()
        page.get_by_role("link", name="Show all").click()
        group.get_by_role("button", name="Cancel group sweep").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel group sweep").click()
        expect(page.locator("#ended [data-group=sweep]")).to_contain_text("61")
        expect(page.locator("#counts")).to_contain_text("0 waiting")


def test_an_unwell_service_is_not_green_and_an_idle_job_is_amber(browser, box):
    job_id = box.wait_started(box.add("sleep 1000"))["id"]
    with visit(browser, box) as page:
        status = box.ask("GET", "/status?after=0")
        status["bad_checks"], status["jobs"][job_id]["idle_since"] = ["log disk"], "2024-10-24T15:30:15Z"
        page.route("**/status*", lambda route: route.fulfill(json=status))
        page.reload()
        expect(page.locator("#connection")).to_have_text("not well")
        expect(page.locator("#banners")).to_contain_text("Not well: log disk. What to do, on the machine: nexus health")
        expect(page.locator("[data-gpu='0'].warn")).to_contain_text("idle for ")
        expect(page.locator("[data-gpu='0']")).to_contain_text(job_id)
        page.unroute_all(behavior="ignoreErrors")


def test_an_end_that_the_disk_does_not_take_is_shown(browser):
    with live.Box(gpus=1, is_starting=False) as box:
        words = "it has ended with 0, to be recorded when there is room"
        box.serve(f"nexus.Outcomes.describe_unrecorded = lambda *_: {words!r}")
        job = box.wait_started(box.add("sleep 600"))
        with visit(browser, box) as page:
            expect(row(page, job["id"])).to_contain_text(f"running; {words}")
            open_log(page, job["id"])
            expect(page.locator("#job")).to_contain_text(f"running; {words}")


def test_a_job_is_added(browser, box):
    with visit(browser, box, is_expecting_errors=True) as page:
        page.get_by_role("button", name="Add job").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_label("Command")).to_be_focused()
        dialog.get_by_label("Command").fill("sleep $LENGTH")
        dialog.get_by_label("GPUs", exact=True).fill("77")
        dialog.get_by_label("Name").fill("by hand")
        dialog.get_by_label("Time limit").fill("soon")
        dialog.get_by_role("button", name="Add job").click()
        expect(dialog.get_by_role("alert")).to_contain_text('not "soon"')
        dialog.get_by_label("Time limit").fill("1h30m")
        dialog.get_by_role("button", name="Add job").click()
        expect(dialog.get_by_role("alert")).to_contain_text("77")
        dialog.get_by_label("GPUs", exact=True).fill("0")
        dialog.get_by_text("More: priority").click()
        dialog.get_by_label("Priority").fill("high")
        dialog.get_by_label("Directory").fill("/tmp")
        dialog.get_by_label("Variables").fill("LENGTH=1000")
        dialog.get_by_role("button", name="Add job").click()
        expect(dialog).to_be_hidden()
        expect(page.locator("#gpus")).to_contain_text("by hand")
        job = box.ask("GET", "/jobs?status=running")[0]
        assert (job["cwd"], job["timeout_seconds"], job["priority"], job["gpus"]) == ("/tmp", 5400, 0, 0)


def test_what_is_sent_again_is_added_once_and_what_was_changed_is_another_job(browser, box):
    box.ask("POST", "/service/pause")
    with visit(browser, box, is_expecting_errors=True) as page:
        def lose(route):
            route.fetch()
            route.abort("connectionreset")
        page.get_by_role("button", name="Add job").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Command").fill("echo one")
        dialog.get_by_label("GPUs", exact=True).fill("0")
        page.route("**/queue", lose)
        dialog.get_by_role("button", name="Add job").click()
        expect(dialog.get_by_role("alert")).to_contain_text("cannot be reached")
        dialog.get_by_role("button", name="Add job").click()
        expect(dialog.get_by_role("button", name="Add job")).to_be_enabled()
        page.unroute("**/queue")
        dialog.get_by_label("Command").fill("echo two")
        dialog.get_by_role("button", name="Add job").click()
        expect(dialog).to_be_hidden()
        assert [job["command"] for job in box.ask("GET", "/queue")] == ["echo one", "echo two"]


def test_a_job_is_changed_and_the_rest_of_it_stays(browser, box):
    box.ask("POST", "/service/pause")
    given = {"timeout_seconds": 5405, "retries": 2, "conda": "ml", "gpus": 1, "gpu_ids": [1], "name": "n", "group": "g", "cwd": "/tmp"}
    others = [box.add("true", group=group) for group in ("h", "i, j")]
    job_id = box.add("python a.py", env={"A": "1"}, gpu_mem_mib=100, **given)
    with visit(browser, box, f"#/jobs/{job_id}", is_expecting_errors=True) as page:
        dialog = page.get_by_role("dialog")
        page.get_by_role("button", name="Change").click()
        expect(dialog.get_by_label("Only these GPUs")).to_have_value("1")
        expect(dialog.get_by_label("Time limit")).to_have_value("1h 30m 5s")
        expect(dialog.get_by_label("Priority")).to_have_value("normal")
        expect(dialog.get_by_label("Retries")).to_have_value("2")
        expect(dialog.get_by_label("Conda environment")).to_have_value("ml")
        dialog.get_by_label("Command").fill("python b.py")
        dialog.get_by_label("GPU memory").fill("much")
        dialog.get_by_role("button", name="Change").click()
        expect(dialog.get_by_role("alert")).to_contain_text("much")
        dialog.get_by_label("GPU memory").fill("1.5G")
        dialog.get_by_label("Group", exact=True).fill("")
        expect(dialog.get_by_label("Terminal")).not_to_be_checked()
        dialog.get_by_label("Preemptible").check()
        dialog.get_by_label("After a group has succeeded").fill("h\ni, j\n")
        dialog.get_by_role("button", name="Change").click()
        expect(dialog).to_be_hidden()
        expect(page.locator("#job")).to_contain_text("python b.py")
        expect(page.locator("#job").get_by_role("link", name="i, j")).to_be_visible()
        assert box.job(job_id)["after_group"] == ["h", "i, j"] and box.job(job_id)["preemptible"]
        page.locator("#job").get_by_role("button", name="Cancel").click()
        dialog.get_by_role("button", name="Cancel job").click()
        page.get_by_role("button", name="Change and retry").click()
        expect(dialog.get_by_label("After a group has succeeded")).to_have_value("h\ni, j")
        dialog.get_by_label("Preemptible").uncheck()
        dialog.get_by_label("Variables").fill("A=2")
        dialog.get_by_label("Expected time").fill("1h 30m")
        dialog.get_by_label("Time limit").fill("0")
        dialog.get_by_role("button", name="Retry").click()
        expect(page.get_by_role("button", name="to the front")).to_be_visible()
        [job] = [job for job in box.ask("GET", "/queue") if job["id"] not in others]
        changed = {**given, "timeout_seconds": 0, "command": "python b.py", "gpu_mem_mib": 1536, "expected_time": 5400, "group": None,
                   "preemptible": False, "after_group": ["h", "i, j"]}
        assert {name: job[name] for name in changed} == changed and job["env_digest"]


def test_a_running_jobs_time_limit_is_changed(browser, box):
    job_id = box.wait_started(box.add("sleep 1000", gpus=0, timeout_seconds=3600))["id"]
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        page.get_by_role("button", name="Change").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_label("Name")).to_be_focused()
        expect(dialog.get_by_label("Command")).to_have_count(0)
        dialog.get_by_label("Time limit").fill("2h")
        page.keyboard.press("Enter")
        expect(page.locator("#job")).to_contain_text("time limit 2h")
        assert box.job(job_id)["timeout_seconds"] == 7200


def test_by_keyboard(browser, box):
    box.wait_started(box.add("echo hello; sleep 1000", gpus=0))
    with visit(browser, box) as page:
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        for name in ("Pause GPU 0", "Pause GPU 1"):
            page.keyboard.press("Tab")
            expect(page.get_by_role("button", name=name)).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("log")).to_have_text("hello")
        page.keyboard.press("/")
        page.keyboard.type("nothing")
        page.keyboard.press("Escape")
        expect(page.get_by_label("Filter jobs")).to_have_value("")


# Where there are nodes

def show_pool(page, box, gpus=8, away="n6"):
    """Let the page see eight nodes with so many GPUs each, of which one is not heard; what runs here runs on n1."""
    status = box.ask("GET", "/status?after=0")
    [mould, *_] = status["gpus"].values()
    ids = [job["id"] for job in status["jobs"].values() if job["status"] == "running"]
    paused, busy, names = ("n2", 1), ("n1", 0), ["gpu1", *(f"n{number}" for number in range(1, 9))]
    status["host"]["name"] = names[0]
    status["gpus"] = {f"{name}:{index}": {
        **mould, "index": index, "node": name, "place": f"{name}:{index}", "uuid": f"{name}/GPU-{index}",
        "job_ids": ids if (name, index) == busy else [], "is_paused": (name, index) == paused,
        "is_available": name != away and (name, index) not in (busy, paused),
        "state": "Unknown" if name == away else {paused: "Paused", busy: "Busy"}.get((name, index), "Available")}
        for name in names[1:] for index in range(gpus)}
    status["nodes"] = {name: {
        "name": name, "gpus": gpus if number else 0, "gpu_names": ["H100"], "running_jobs": 0, "is_leaving": name == "n8",
        **({"unknown_since": "2024-10-24T14:02:00Z", "trouble": "cannot reach n6: No route to host", "hint": "try it by hand: ssh n6"}
           if name == away else {})} for number, name in enumerate(names)}
    page.route("**/status*", lambda route: route.fulfill(json=status))


def machine(page, name):
    return page.locator(f"[data-machine={name}]")


def test_many_gpus_are_folded_by_machine_until_one_wants_more(browser, box):
    job_id = box.wait_started(box.add("sleep 1000", gpus=0))["id"]
    with visit(browser, box) as page:
        show_pool(page, box)
        page.reload()
        expect(page.locator("#gpus-count")).to_have_text("54 of 64 available")
        expect(page.locator("[data-gpu='n1:0']")).to_be_hidden()
        expect(machine(page, "n8")).to_contain_text("being removed")
        expect(machine(page, "n6")).to_contain_text("cannot reach n6: No route to host. To do: try it by hand: ssh n6")
        machine(page, "n1").locator("summary").focus()
        page.keyboard.press("Enter")
        expect(page.locator("[data-gpu='n1:0']")).to_contain_text(job_id)
        expect(page.locator("[data-gpu='n1:0']")).to_be_visible()
        machine(page, "n2").locator("summary").click()
        expect(page.get_by_role("button", name="Resume GPU n2:1")).to_be_visible()
        show_pool(page, box, gpus=2, away="")
        page.reload()
        expect(page.locator("[data-gpu='n1:0']")).to_be_visible()           # few are shown at once


def test_mig_slices(browser):
    with live.Box(gpus=[{"mig": ["1g.10gb", "2g.20gb"]}, {}]) as box, visit(browser, box) as page:
        expect(page.locator("[data-gpu] b")).to_have_text(["0.0", "0.1", "1"])
        expect(page.locator("[data-gpu='0.1']")).to_contain_text("2g.20gb")
        expect(page.locator("[data-gpu='0.1']")).to_contain_text("\u2013")
        page.get_by_role("button", name="Pause GPU 0.1").click()
        expect(page.locator("[data-gpu='0.1']")).to_contain_text("Paused")
        expect(page.locator("[data-gpu='0.0']")).to_contain_text("Available")


@pytest.fixture(scope="module")
def net():
    with network.Net(nodes=1, gpus=2, head_gpus=1) as made, contextlib.ExitStack() as stack:
        done = made.head.nexus("node", "add", "n1")
        assert done.returncode == 0, done.stderr
        made.port = stack.enter_context(network.relay(made))
        yield made


def visit_net(browser, net, path=""):
    token = live.read(net.head.home / "token").strip()
    return visit(browser, net, path, extra_http_headers={"Authorization": f"Bearer {token}"})


def test_a_job_of_a_node_from_the_form_to_its_end(browser, net):
    with visit_net(browser, net) as page:
        page.get_by_role("button", name="Add job").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Command").fill("hostname; sleep 1000")
        dialog.get_by_label("Name").fill("elsewhere")
        dialog.get_by_text("More: priority").click()
        dialog.get_by_label("Only on").fill("n1")
        dialog.get_by_role("button", name="Add job").click()
        gpu = page.locator("[data-gpu='n1:0']")
        expect(gpu).to_contain_text("elsewhere")
        job_id = gpu.locator("[data-job]").get_attribute("data-job")
        expect(open_log(page, job_id)).to_have_text("n1")
        expect(page.locator("#job")).to_contain_text("n1 · GPU 0")
        cancel(page, job_id)
        expect(page.locator("#job")).to_contain_text("cancelled: killed")
        go_home(page)
        expect(page.locator(f"#ended [data-job={job_id}]")).to_be_visible()
        expect(gpu).to_contain_text("Available")


def test_a_gpu_of_a_node_is_paused(browser, net):
    with visit_net(browser, net) as page:
        gpu = page.locator("[data-gpu='n1:1']")
        gpu.get_by_role("button", name="Pause GPU n1:1").click()
        expect(gpu).to_contain_text("Paused")
        assert [each["place"] for each in net.head.status()["gpu_status"] if each["is_paused"]] == ["n1:1"]
        gpu.get_by_role("button", name="Resume GPU n1:1").click()
        expect(gpu).to_contain_text("Available")


def test_a_node_that_is_cut_off_and_comes_back(browser, net):
    job_id = net.head.wait_started(net.head.add("sleep 1000", node="n1", name="far away"))["id"]
    with visit_net(browser, net, f"#/jobs/{job_id}") as page:
        expect(page.locator("#job")).to_contain_text("n1 · GPU 0")
        net.nodes[0].cut()
        net.nodes[0].close_sessions()
        expect(page.locator("#job")).to_contain_text("n1 has not been heard since")
        go_home(page)
        expect(machine(page, "n1")).to_contain_text("unknown since")
        expect(row(page, job_id)).to_contain_text("unknown for 1m")
        net.nodes[0].mend()
        expect(page.get_by_text("unknown")).to_have_count(0)
        net.head.call("DELETE", f"/jobs/{job_id}")


# When the service goes

def test_it_reconnects_after_a_restart(browser):
    with live.Box(gpus=1) as box, visit(browser, box, is_expecting_errors=True) as page:
        job_id = box.add("echo before; sleep 1000", gpus=0)
        expect(open_log(page, job_id)).to_have_text("before")
        loaded_at = page.evaluate("loadedAt")
        box.kill_all_of_service()
        expect(page.locator("#connection")).to_have_text("reconnecting")
        expect(page.locator("body")).to_have_class(re.compile("offline"))
        box.start()
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#offline")).to_be_hidden()
        late = box.add("sleep 1000", gpus=0)
        expect(page.get_by_role("log")).to_have_text("before")
        go_home(page)
        expect(row(page, late)).to_be_visible()
        assert page.evaluate("loadedAt") == loaded_at


# For everybody

@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1600, 390, 320])
def test_accessible_and_no_wider_than_the_screen(browser, box, scheme, width):
    box.wait(box.add("echo 'RuntimeError: CUDA out of memory' >&2; exit 1", gpus=0, name="fails"), "failed")
    job_id = box.add("printf '\\033[31mred\\033[0m \\033[90mgrey\\033[0m\\n'; sleep 1000 # " + "long" * 60, gpus=0, group="g" * 60)
    box.wait_started(job_id)
    waiting = box.add("python train.py --" + "x" * 200, after=[job_id], name="n" * 80)
    in_group = box.add("true", after=[job_id], group="sweep")
    with visit(browser, box, width=width, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce") as page:
        def check(where):
            assert axe(page) == [], where
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{where} is too wide"
        expect(row(page, waiting)).to_be_visible()
        check("the overview")
        page.goto(page.url.split("#")[0] + "#/?group=sweep")
        expect(row(page, in_group)).to_be_visible()
        check("a group")
        for each in (job_id, waiting):
            page.goto(page.url.split("#")[0] + f"#/jobs/{each}")
            page.get_by_text("Details").click()
            expect(page.locator("#job .facts")).to_contain_text("submitted: ")
            if each == job_id:
                expect(page.get_by_role("log")).to_contain_text("red grey")
            check(f"the page of {each}")
        page.locator("#job").get_by_role("button", name="Cancel").click()
        check("the question")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Add job").click()
        check("the form")
        page.keyboard.press("Escape")
        show_pool(page, box)
        page.goto(page.url.split("#")[0] + "#/")
        page.reload()
        machine(page, "n6").locator("summary").click()
        machine(page, "n2").locator("summary").click()
        check("many machines")
        page.unroute_all(behavior="ignoreErrors")


# Firefox, Debian's own


class Firefox:
    """Driven by its own protocol, Marionette: LENGTH:[0, number, command, parameters], answered by [1, number, error, result]."""

    def __init__(self, folder):
        port = live.free_port()
        facts = {"marionette.port": port, "browser.aboutwelcome.enabled": False, "browser.shell.checkDefaultBrowser": False,
                 "datareporting.policy.dataSubmissionEnabled": False, "network.manage-offline-status": False}
        (folder / "user.js").write_text("".join(f'user_pref("{name}", {json.dumps(fact)});\n' for name, fact in facts.items()))
        self.process = subprocess.Popen([shutil.which("firefox-esr"), "--headless", "--marionette", "--no-remote", "--profile", folder],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.line = self.number = 0
        live.until(lambda: self.connect(port), "Firefox", live.PATIENCE_S)
        self.read()                             # who it is
        self.ask("WebDriver:NewSession", capabilities={})

    def connect(self, port):
        with contextlib.suppress(OSError):
            self.line = socket.create_connection(("127.0.0.1", port), live.PATIENCE_S)
        return self.line

    def read(self):
        length = b""
        while (digit := self.line.recv(1)) != b":":
            length += digit
        content = b""
        while len(content) < int(length):
            content += self.line.recv(65536)
        return json.loads(content)

    def ask(self, command, **parameters):
        self.number += 1
        message = json.dumps([0, self.number, command, parameters]).encode()
        self.line.sendall(b"%d:%s" % (len(message), message))
        _, number, error, result = self.read()
        assert number == self.number and not error, (command, error)
        return result

    def navigate(self, url):
        self.ask("WebDriver:Navigate", url=url)

    def execute(self, script, *arguments):
        return self.ask("WebDriver:ExecuteScript", script=script, args=arguments)["value"]


@pytest.fixture
def firefox(tmp_path):
    driver = Firefox(tmp_path)
    yield driver
    driver.process.terminate()
    driver.process.wait(live.PATIENCE_S)
    driver.line.close()


def test_firefox_shows_and_does_the_same(firefox, box):
    turns = "for i in 1 2; do echo out $i; sleep 0.3; echo err $i >&2; sleep 0.3; done; exit 3"
    failed = box.wait(box.add(turns, gpus=0, name="a failure"), "failed")["id"]
    box.ask("POST", "/service/pause")
    ids = box.ask("POST", "/queue", [{"command": "true", "group": "by firefox"}] * 3)["ids"]

    def shows(selector, text):
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        live.until(lambda: text in firefox.execute(script, selector), lambda: f"{text} in {selector} of a page that is " + (
            firefox.execute("return (document.hidden ? 'hidden: ' : 'seen: ') + document.body.innerText")), live.PATIENCE_S)

    def click(selector):
        firefox.execute("document.querySelector(arguments[0]).click()", selector)

    firefox.navigate(f"http://127.0.0.1:{box.port}/")
    shows("#connection", "live")
    shows("#gpus", "2 of 2 available")
    shows("#failures", failed)
    shows("[data-group='by firefox']", "3 \u2026")
    click("[data-group='by firefox'] a.title")
    shows("#results", ids[2])
    click("#lists .head button:nth-of-type(2)")         # pending
    shows("#waiting", ids[2])
    click(f"[data-job={ids[0]}] button")
    click("dialog .danger")
    click("#lists .head button:nth-of-type(2)")
    shows(f"#results [data-job={ids[0]}]", "cancelled")
    firefox.navigate(f"http://127.0.0.1:{box.port}/#/jobs/{failed}")
    shows("#job h1", f"Job {failed}: a failure")
    shows(".lines", "out 1\nerr 1\nout 2\nerr 2")
    assert firefox.execute("return document.documentElement.scrollWidth <= innerWidth")
    box.ask("POST", "/service/resume")
    firefox.navigate(f"http://127.0.0.1:{box.port}/docs")
    shows("#calls", "/jobs/cancel")


# /docs

def try_call(page, name):
    """The form of an operation, open_file."""
    call = page.locator(f"#{name}")
    if not call.evaluate("call => call.open"):
        call.locator("summary").first.click()
    return call


def test_docs_show_every_call_and_let_one_try_them(browser, box):
    with visit(browser, box, "docs", is_waiting=False) as page:
        expect(page.locator("#calls > details:has(pre)")).to_have_count(len(nexus.ROUTES))
        expect(page.locator("#about code").first).to_have_text("Authorization: Bearer TOKEN")
        box.ask("POST", "/service/pause")
        call = try_call(page, "post_queue")
        expect(call.locator("dl").first).to_contain_text("the same again adds nothing")
        expect(call.locator("dl").nth(1)).to_contain_text("where it runs")
        expect(call.locator("dl").nth(1)).to_contain_text("(integer | string)[] | string")
        call.get_by_label("Body").fill('{"command": "true # it\'s", "gpus": 0}')
        expect(call.get_by_label("the same with curl")).to_contain_text("true # it'\\''s")
        call.get_by_role("button", name="Send").click()
        expect(call.locator("form [aria-live]")).to_contain_text("200 OK")
        job_id = json.loads(call.get_by_label("the answer", exact=True).text_content())["id"]
        call = try_call(page, "get_jobs_id")
        expect(call.get_by_label("the same with curl")).to_contain_text("/jobs/ID")
        call.get_by_label("Address").fill(f"jobs/{job_id}")
        expect(call.get_by_label("the same with curl")).to_contain_text(f"/jobs/{job_id}")
        call.get_by_label("Address").press("Enter")
        expect(call.get_by_label("the answer", exact=True)).to_contain_text('"command": "true # it\'s"')
        box.call("DELETE", f"/queue/{job_id}")
        curl_command = try_call(page, "post_api_submit").get_by_label("the same with curl")
        expect(curl_command).to_contain_text("-F code=@code -F config_file=@config_file")


def test_docs_keep_the_token_for_the_tab_and_send_it(browser, box):
    with visit(browser, box, "docs", is_expecting_errors=True, is_waiting=False, extra_http_headers=FORWARDED) as page:
        field = page.get_by_role("dialog").get_by_label("Token")
        call = try_call(page, "get_jobs")
        call.get_by_label("Address").fill("jobs?group=kept")
        call.get_by_role("button", name="Send").click()
        expect(page.locator("#login")).to_contain_text("needs a token")
        field.fill("wrong")
        field.press("Enter")
        expect(call.get_by_label("the same with curl")).to_contain_text("Bearer $NEXUS_TOKEN")
        call.get_by_role("button", name="Send").click()
        expect(field).to_be_focused()
        expect(page.locator("#login")).to_contain_text("the token is not right")
        expect(call.locator("form [aria-live]")).to_contain_text("401")
        field.fill((box.home / "token").read_text().strip())
        field.press("Enter")
        expect(call.get_by_label("the same with curl")).to_contain_text("Bearer $NEXUS_TOKEN")
        call.get_by_role("button", name="Send").click()
        expect(call.locator("form [aria-live]")).to_contain_text("200 OK")
        expect(call.get_by_label("Address")).to_have_value("jobs?group=kept")
        expect(call.get_by_label("the same with curl")).to_contain_text("/jobs?group=kept")
        page.reload()
        call = try_call(page, "get_jobs")
        call.get_by_role("button", name="Send").click()
        expect(call.locator("form [aria-live]")).to_contain_text("200 OK")
        expect(page.get_by_role("button", name="Forget the token")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_docs_are_for_everybody(browser, box, scheme, width):
    with visit(browser, box, "docs", width=width, color_scheme=scheme, bypass_csp=True, is_waiting=False) as page:
        expect(page.locator("#post_queue")).to_be_visible()
        page.locator("#get_jobs > summary").focus()
        page.keyboard.press("Enter")            # by keyboard alone
        page.locator("#get_jobs").get_by_label("Address").focus()
        page.keyboard.press("End")
        page.keyboard.type("?limit=1")
        page.keyboard.press("Enter")
        expect(page.locator("#get_jobs form [aria-live]")).to_contain_text("200 OK")
        try_call(page, "post_queue")
        try_call(page, "shape-Job")
        assert axe(page) == []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


# Somebody else had the port while nexus was stopped

PLANTED_PAGE = b"""<!doctype html><title>planted</title>
<script>
navigator.serviceWorker.register('/app/worker.js', {scope: '/'});
navigator.serviceWorker.ready.then(() => { document.title = 'ready'; });
</script>"""
PLANTED_WORKER = b"""
addEventListener('install', () => skipWaiting());
addEventListener('activate', (event) => event.waitUntil(clients.claim()));
addEventListener('fetch', (event) => {
  const page = new Response('<title>planted</title>', {headers: {'Content-Type': 'text/html'}});
  if (event.request.mode === 'navigate') event.respondWith(page);
});
"""


class Planter(http.server.BaseHTTPRequestHandler):
    """A page that wants to stay: its service worker answers in place of whoever has the port later."""

    def do_GET(self):
        kind, body = ("text/javascript", PLANTED_WORKER) if self.path == "/app/worker.js" else ("text/html", PLANTED_PAGE)
        self.send_response(200)
        for name, text in (("Content-Type", kind), ("Content-Length", len(body)), ("Service-Worker-Allowed", "/"),
                           ("Cache-Control", "max-age=31536000, immutable")):
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_the_service_worker_of_somebody_else_is_removed(browser):
    with live.Box(gpus=1, is_starting=False) as box, contextlib.ExitStack() as stack:
        planter = http.server.ThreadingHTTPServer(("127.0.0.1", box.port), Planter)     # a browser connects before it has to ask
        planter.daemon_threads = True
        thread = threading.Thread(target=planter.serve_forever, args=(0.01,))
        thread.start()
        context = browser.new_context()
        stack.callback(context.close)
        page = context.new_page()
        page.goto(f"http://localhost:{box.port}/")
        expect(page).to_have_title("ready")
        page.goto("about:blank")
        planter.shutdown()
        planter.server_close()
        thread.join()
        box.start()
        assert page.goto(f"http://localhost:{box.port}/").from_service_worker, "the browser does not ask nexus for it"
        expect(page.locator("#connection")).to_have_text("live")
        assert page.evaluate("navigator.serviceWorker.getRegistrations().then((found) => found.length)") == 0


# Pages of other sites, open in the same browser

class Stranger(http.server.BaseHTTPRequestHandler):
    """An empty page, for a test's scripts."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, *_):
        pass


# What another site's page learns of an address: {way: what it is told}
PROBES = """async (address) => {
    const add = (name, facts, told = ['load', 'error']) => new Promise((tell) => {
        const node = Object.assign(document.createElement(name), facts);
        for (const event of told) node.addEventListener(event, () => tell(event));
        document.body.append(node);
    });
    const ended = (promise) => promise.then((answer) => `${answer.type} ${answer.status}`, () => 'error');
    const ways = {
        img: add('img', {src: address}), script: add('script', {src: address}), object: add('object', {data: address}),
        iframe: add('iframe', {src: address}), embed: add('embed', {src: address}), video: add('video', {src: address}),
        style: add('link', {rel: 'stylesheet', href: address}), prefetch: add('link', {rel: 'prefetch', href: address}),
        preload: add('link', {rel: 'preload', as: 'fetch', href: address}), module: ended(import(address)),
        fetch: ended(fetch(address, {mode: 'no-cors'})), head: ended(fetch(address, {mode: 'no-cors', method: 'HEAD'})),
        cors: ended(fetch(address)),
    };
    const found = {};
    for (const [way, told] of Object.entries(ways)) found[way] = await told;
    return found;
}"""
OPENED = """(address) => new Promise((tell) => {
    const opened = window.open(address);
    const look = () => opened.closed ? tell('out of reach') : setTimeout(look, 20);
    look();
})"""


def test_a_page_of_another_site_learns_nothing(browser, box):
    """Not whether a text is in a job's command, neither on another port nor under another name of this machine."""
    box.add("sleep 600 # key-5f3a", gpus=0)
    right, wrong = (f"/jobs?text={text}" for text in ("key-5f3a", "key-0000"))
    assert [len(box.ask("GET", path)) for path in (right, wrong)] == [1, 0]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger, contextlib.ExitStack() as stack:
        threading.Thread(target=stranger.serve_forever, args=(0.01,)).start()
        stack.callback(stranger.shutdown)
        for its_name, our_name in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("a.localhost", "localhost")):
            context = browser.new_context()
            stack.callback(context.close)
            page, statuses = context.new_page(), set()
            page.goto(f"http://{its_name}:{stranger.server_address[1]}/")
            page.on("response", lambda answer, seen=statuses: "text=" in answer.url and seen.add(answer.status))
            ours = f"http://{our_name}:{box.port}"
            told = [page.evaluate(PROBES, ours + path) for path in (right, wrong)]
            assert told[0] == told[1] and statuses == {403}, (its_name, told)
            assert [page.evaluate(OPENED, ours + path) for path in (right, wrong)] == ["out of reach"] * 2
            page.evaluate("(address) => document.body.append(Object.assign(document.createElement('a'), {href: address, text: 'nexus'}))",
                          f"{ours}/")
            page.get_by_role("link", name="nexus").click()
            expect(page.locator("#connection")).to_have_text("live")

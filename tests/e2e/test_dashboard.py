"""The page in a real browser (Debian's chromium), before a real service."""

import hashlib
import re
import time

import live
import pytest
import samples
from pages import FORWARDED, axe, cancel, curl, go_home, machine, open_log, row, until, visit
from playwright.sync_api import expect

import nexus

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
    many = box.ask("POST", "/queue", {"commands": ["exit 4", "exit 5", "nosuch"], "group": "sweep", "gpus": 0})["ids"]
    for job_id in many:
        box.wait(job_id, "failed")
    with visit(browser, box) as page:
        failures = page.locator("#failures")
        expect(page).to_have_title(re.compile("^\u2717 5 "))
        expect(failures.locator("li")).to_have_count(4)              # the group is one line; and those for all
        expect(failures).to_contain_text("+2 of sweep, 2 kinds")
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


def test_what_was_cancelled_by_a_failure_is_run_again_too(browser, box):
    go = box.path("chain")
    first = box.add(f"test -e {go}", gpus=0, is_held=True)
    second = box.add("true", gpus=0, after=[first])
    third = box.add("true", gpus=0, after=[second])
    box.ask("PATCH", f"/queue/{first}", {"is_held": False})
    box.wait(third, "cancelled")
    go.touch()
    with visit(browser, box, f"#/jobs/{first}") as page:
        page.get_by_role("button", name="Retry", exact=True).click()
        expect(page.locator("#notices")).to_contain_text("2 jobs that came after it stay cancelled.")
        page.get_by_role("button", name="Run again too").click()
        expect(page.locator("#notices")).to_contain_text("2 jobs run again.")
    again = box.job(third)["retried_as"]
    assert box.wait(again, "completed")["after"] == [box.job(second)["retried_as"]]


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
        expect(group.get_by_role("link", name="60 waiting")).to_be_visible()
        expect(group.get_by_role("link", name="1 failed")).to_be_visible()
        expect(group.get_by_label("1 of 61 have ended")).to_be_visible()
        group.get_by_role("button", name="Pause group sweep").click()
        expect(group).to_contain_text("paused by")
        group.get_by_role("button", name="Resume group sweep").click()
        expect(group).not_to_contain_text("paused by")
        group.get_by_role("button", name="Retry failed group sweep").click()
        expect(group.get_by_role("link", name="61 waiting")).to_be_visible()
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
        dialog.get_by_label("Directory").fill("/tmp")
        dialog.get_by_text("More: priority").click()
        dialog.get_by_label("Priority").fill("high")
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

SCREENS = [(1600, "light"), (390, "dark"), (1600, "dark"), (390, "light"), (320, "light"), (320, "dark")]


@pytest.mark.parametrize("width, scheme", SCREENS[:samples.count(2, 6)])
def test_accessible_and_no_wider_than_the_screen(browser, box, scheme, width):
    box.wait(box.add("echo 'RuntimeError: CUDA out of memory' >&2; exit 1", gpus=0, name="fails"), "failed")
    job_id = box.add("printf '\\033[31mred\\033[0m \\033[90mgrey\\033[0m\\n'; sleep 1000 # " + "long" * 60, gpus=0, group="g" * 60)
    box.wait_started(job_id)
    waiting = box.add("python train.py --" + "x" * 200, after=[job_id], name="n" * 80)
    in_group = box.add("true", after=[job_id], group="sweep")
    with visit(browser, box, width=width, color_scheme=scheme, reduced_motion="reduce") as page:
        def check(where):
            assert axe(page) == [], where
            for each in (320, 390, 1600):
                page.set_viewport_size({"width": each, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{where} is too wide for {each}"
            page.set_viewport_size({"width": width, "height": 900})
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

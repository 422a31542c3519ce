"""The form of a job and the tab's title, in a browser."""

import live
import pytest
from pages import visit
from playwright.sync_api import expect


def test_what_was_typed_is_there_again_until_it_is_sent(browser, box):
    box.ask("POST", "/service/pause")
    job_id = box.add("true", name="other")
    with visit(browser, box) as page:
        dialog, add = page.get_by_role("dialog"), page.get_by_role("button", name="Add job").first
        add.click()
        expect(dialog).not_to_contain_text("typed before")
        dialog.get_by_label("Command").fill("python train.py\n  --lr 0.1")
        dialog.get_by_text("More: priority").click()
        dialog.get_by_label("Run in a terminal").check()
        dialog.get_by_label("Retries after a failure").fill("2")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        # Another form has nothing of it
        page.locator(f"#waiting [data-job={job_id}] a").click()
        page.get_by_role("button", name="Change").click()
        expect(dialog).not_to_contain_text("typed before")
        dialog.get_by_label("Name").fill("changed")
        dialog.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Change").click()
        expect(dialog).to_contain_text("This is what you typed before.")
        expect(dialog.get_by_label("Name")).to_have_value("changed")
        dialog.get_by_role("button", name="Start anew").click()
        expect(dialog.get_by_label("Name")).to_have_value("other")
        expect(dialog).not_to_contain_text("typed before")
        page.keyboard.press("Escape")
        # It is offered again, and sent from the textarea
        add.click()
        expect(dialog.get_by_label("Command")).to_have_value("python train.py\n  --lr 0.1")
        expect(dialog.get_by_label("Run in a terminal")).to_be_checked()
        expect(dialog.get_by_label("Retries after a failure")).to_have_value("2")
        dialog.get_by_label("Command").focus()
        page.keyboard.press("Control+Enter")
        expect(dialog).to_be_hidden()
        job = live.until(lambda: next((job for job in box.ask("GET", "/queue") if job["id"] != job_id), None))
        assert (job["command"], job["tty"], job["retries"]) == ("python train.py\n  --lr 0.1", True, 2)
        add.click()
        expect(dialog.get_by_label("Command")).to_have_value("")
        expect(dialog).not_to_contain_text("typed before")
        assert len(box.ask("GET", "/queue")) == 2


@pytest.mark.parametrize("key", ["Control+Enter", "Meta+Enter"])
def test_a_form_that_is_refused_says_so_and_is_sent_once(browser, box, key):
    box.ask("POST", "/service/pause")
    with visit(browser, box, is_expecting_errors=True) as page:
        dialog = page.get_by_role("dialog")
        page.get_by_role("button", name="Add job").click()
        dialog.get_by_label("Command").fill("true")
        dialog.get_by_label("Time limit").fill("soon")
        page.keyboard.press(key)
        expect(dialog.get_by_role("alert")).to_contain_text('not "soon"')
        dialog.get_by_label("Time limit").fill("1h")
        page.keyboard.press(key)
        page.keyboard.press(key)
        expect(dialog).to_be_hidden()
        assert len(box.ask("GET", "/queue")) == 1


def test_the_tab_has_its_title_at_once(browser, box):
    job_id = box.wait_started(box.add("sleep 1000", gpus=0, name="the one"))["id"]
    with visit(browser, box, f"#/jobs/{job_id}", is_waiting=False, is_expecting_errors=True) as page:
        page.route("**/status*", lambda route: None)
        page.route("**/jobs/*", lambda route: None)
        page.reload()
        expect(page).to_have_title(f"{job_id} \u00b7 nexus")
        page.unroute("**/jobs/*")
        page.evaluate("loadJob()")
        expect(page).to_have_title("\u25b6 the one \u00b7 nexus")
        page.evaluate("location.hash = '#/jobs/zzz'")
        expect(page).to_have_title("zzz \u00b7 nexus")
        page.unroute_all(behavior="ignoreErrors")


def test_a_job_runs_where_the_last_one_did_unless_another_directory_is_typed(browser, box):
    box.ask("POST", "/service/pause")
    box.add("true", cwd="/usr")
    with visit(browser, box) as page:
        dialog, add = page.get_by_role("dialog"), page.get_by_role("button", name="Add job").first
        for number, (typed, cwd) in enumerate(((None, "/usr"), ("/tmp", "/tmp"), (None, "/tmp")), 2):
            add.click()
            expect(dialog.get_by_label("Directory")).to_be_visible()            # it is not folded away
            expect(dialog).not_to_contain_text("typed before")
            dialog.get_by_label("Command").fill("true")
            if typed:
                dialog.get_by_label("Directory").fill(typed)
            page.keyboard.press("Control+Enter")
            expect(dialog).to_be_hidden()
            expect(page.locator("#waiting-count")).to_have_text(f"{number}")
            assert box.ask("GET", "/queue")[-1]["cwd"] == cwd
        add.click()
        expect(dialog.get_by_label("Directory")).to_have_value("/tmp")
        dialog.get_by_label("Directory").fill("/var")
        page.keyboard.press("Escape")
        add.click()
        expect(dialog.get_by_label("Directory")).to_have_value("/var")
        dialog.get_by_role("button", name="Start anew").click()
        expect(dialog.get_by_label("Directory")).to_have_value("/tmp")

"""A group's page is the table of its results; a sweep in the form of a job."""

import csv
import json

import live
import pytest
from pages import axe, visit
from playwright.sync_api import expect

GROUP = "lr sweep/1"
PATH = "#/?group=lr+sweep%2F1"


def finish(box, line, code=0, **values):
    job_id = box.add(f"echo '{line}'; exit {code}", group=GROUP, gpus=0, sweep_values=values)
    box.wait(job_id)
    return job_id


@pytest.fixture(scope="module")
def swept():
    """Two results, one that is none, a failure, 151 that wait."""
    with live.Box(gpus=2) as box:
        ids = [finish(box, f"epoch 9/9 val_loss: {loss} - acc: {acc}", lr=lr, layers="[64, 128, 256, 512, 1024]")
               for loss, acc, lr in ((0.5, 0.25, "1e-2"), (0.25, 0.125, "1e-3"), ("nan", 0.75, "1"))]
        ids.append(finish(box, "no data", 3, lr="2", layers="[8]"))
        held = {"command": "true", "group": GROUP, "is_held": True}
        box.ask("POST", "/queue", [{**held, "sweep_values": {"lr": str(number), "layers": "[1]"}} for number in range(151)])
        yield box, ids


def rows(page):
    return page.locator("#results tbody tr")


def ids_of(page):
    return rows(page).evaluate_all("rows => rows.map(row => row.dataset.job)")


def test_the_heading_stays_in_view(browser, swept):
    box, _ = swept
    with visit(browser, box, PATH, height=600) as page:
        page.get_by_role("button", name="151 more, waiting").click()
        expect(rows(page)).to_have_count(155)
        table = page.locator(".results")
        table.evaluate("(node) => { node.scrollTop = 2000; }")
        top = page.locator("#results thead th").nth(1).bounding_box()["y"]
        assert abs(top - table.bounding_box()["y"]) < 4 and table.evaluate("(node) => node.scrollTop") > 1000


def test_which_setting_won(browser, swept):
    box, (second, best, nan, failed) = swept
    with visit(browser, box, PATH) as page:
        expect(rows(page)).to_have_count(4)
        assert ids_of(page) == [best, second, nan, failed]
        heads = page.locator("#results thead th")
        assert heads.all_inner_texts() == ["Job", "lr", "layers", "val_loss", "acc", "Status", "Runtime", "Last line"]
        first = rows(page).first
        expect(first).to_contain_text("best")
        assert first.locator("td").all_inner_texts()[:5] == ["1e-3", "[64, 128, 256, 512, 1024]", "0.25", "0.125", "completed"]
        assert page.locator("#results .best").count() == 1
        expect(page.locator("#results")).to_contain_text("4 of 155 jobs")
        group = page.locator(f"[data-group='{GROUP}']")
        expect(group.get_by_role("button", name=f"Cancel group {GROUP}")).to_be_visible()
        assert page.locator("#waiting, #ended").count() == 0
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert axe(page) == [], scheme


def test_a_header_sorts_by_the_keyboard(browser, swept):
    box, (second, best, nan, failed) = swept
    with visit(browser, box, PATH) as page:
        head = page.locator("#results th", has_text="acc")
        expect(page.locator("#results th[aria-sort]")).to_have_text("val_loss")
        head.get_by_role("button").focus()
        page.keyboard.press("Enter")
        expect(head).to_have_attribute("aria-sort", "descending")
        assert ids_of(page) == [nan, second, best, failed]
        expect(head.get_by_role("button")).to_be_focused()
        page.keyboard.press("Enter")
        expect(head).to_have_attribute("aria-sort", "ascending")
        assert ids_of(page) == [best, second, nan, failed]


def test_seeds_become_one_row_by_a_switch(browser, box):
    for lr, seed in (("1", "0"), ("1", "1"), ("2", "0")):
        values = {"lr": lr, "seed": seed}
        box.wait(box.add(f"echo loss=0.$((5 + 2 * {seed}))", group=GROUP, gpus=0, sweep_values=values))
    with visit(browser, box, PATH) as page:
        expect(rows(page)).to_have_count(3)
        switch = page.get_by_role("button", name="Mean over seed")
        expect(switch).to_have_attribute("aria-pressed", "false")
        switch.click()
        expect(rows(page)).to_have_count(2)
        expect(rows(page).nth(1)).to_contain_text("0.60 \u00b1 0.14")
        expect(rows(page).nth(1).locator("th")).to_contain_text("+1")
        expect(switch).to_have_attribute("aria-pressed", "true")
        assert axe(page) == []
        switch.click()
        expect(rows(page)).to_have_count(3)


def test_what_waits_is_behind_a_button(browser, swept):
    box, _ = swept
    with visit(browser, box, PATH) as page:
        page.get_by_role("button", name="151 more, waiting").click()
        expect(rows(page)).to_have_count(155)
        assert page.get_by_role("button", name=" more").count() == 0


def test_more_than_a_page_has_ended(browser, box):
    box.ask("POST", "/service/pause")
    ids = box.ask("POST", "/queue", [{"command": "true", "group": GROUP}] * 250)["ids"]
    box.ask("POST", "/jobs/cancel", {"ids": ids[:230]})
    with visit(browser, box, PATH) as page:
        expect(rows(page)).to_have_count(200)
        page.get_by_role("button", name="50 more").click()
        expect(rows(page)).to_have_count(250)


def test_the_table_as_a_file(browser, swept):
    box, (_, best, _, _) = swept
    with visit(browser, box, PATH) as page:
        with page.expect_download() as saved:
            page.get_by_role("button", name="Download CSV").click()
        assert saved.value.suggested_filename == "lr_sweep_1.csv"
        table = list(csv.DictReader(live.read(saved.value.path()).splitlines()))
        assert len(table) == 155 and (table[0]["id"], table[0]["lr"], table[0]["val_loss"]) == (best, "1e-3", "0.25")


def test_on_a_phone_the_values_and_the_first_number_are_seen(browser, swept):
    box, _ = swept
    with visit(browser, box, PATH, width=390, height=844, has_touch=True) as page:
        expect(rows(page)).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        right = page.evaluate("Math.max(...[...document.querySelectorAll('#results tr > :nth-child(4)')]"
                              ".map(cell => cell.getBoundingClientRect().right))")
        assert right <= 390, "val_loss"
        region = page.get_by_role("region", name=f"Results of group {GROUP}")
        region.evaluate("box => { box.scrollLeft = 500; }")
        left = page.evaluate("document.querySelector('#results tbody th').getBoundingClientRect().left")
        assert 0 <= left < 30, "which job it is stays"


def test_an_idle_group_asks_for_nothing_and_a_change_is_seen(browser, box):
    finish(box, "loss=0.5", lr="1")
    asked = []
    with visit(browser, box, PATH) as page:
        expect(rows(page)).to_have_count(1)
        page.on("request", lambda request: "/results" in request.url and asked.append(request.url))
        page.reload()
        expect(rows(page)).to_have_count(1)
        for number in range(3):             # the page draws, as something else changes
            box.wait(box.add("true", gpus=0, name=f"other {number}"))
            expect(page.locator("#counts")).to_contain_text("0 running")
        assert (len(asked), page.evaluate("results.timer ?? null")) == (1, None), "none is asked, and none is planned"
        best = finish(box, "loss=0.25", lr="2")
        expect(rows(page)).to_have_count(2)
        assert ids_of(page)[0] == best


def test_a_column_that_it_is_sorted_by_goes(browser, box):
    kept, cleared = finish(box, "loss=0.5", lr="1"), finish(box, "loss=0.75 acc=0.5", lr="2")
    with visit(browser, box, PATH, is_expecting_errors=True) as page:
        page.get_by_role("button", name="acc").click()
        expect(rows(page).first).to_have_attribute("data-job", cleared)
        box.ask("POST", "/jobs/clear", {"ids": [cleared]})
        expect(rows(page)).to_have_count(1)
        assert ids_of(page) == [kept]
        expect(page.locator("#results th[aria-sort]")).to_have_text("loss")


def test_a_sweep_is_added_in_the_form(browser, box):
    with visit(browser, box, is_expecting_errors=True) as page:
        box.ask("POST", "/service/pause")
        page.get_by_role("button", name="Add job").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Command").fill("train --lr {lr} --seed {seed}")
        dialog.get_by_label("Group", exact=True).fill("exp1")
        dialog.get_by_label("Sweep").fill("lr=1e-3,1e-4\nsead=0..4")
        expect(dialog).to_contain_text("there is no {sead} in the command")
        dialog.get_by_label("Sweep").fill("lr=1e-3,1e-4\nseed=0..4")
        expect(dialog).to_contain_text("10 jobs, the first: train --lr 1e-3 --seed 0")
        dialog.get_by_role("button", name="Add 10 jobs").click()
        expect(page.locator("#notices")).to_contain_text("10 jobs were added")
        added = box.ask("GET", "/queue")
        assert [(job["command"], job["group"]) for job in added[:2]] == [
            ("train --lr 1e-3 --seed 0", "exp1"), ("train --lr 1e-3 --seed 1", "exp1")]
        assert json.dumps(added[9]["sweep_values"]) == '{"lr": "1e-4", "seed": "4"}' and len(added) == 10
        page.goto(page.url.split("#")[0] + "#/?group=exp1")
        expect(rows(page)).to_have_count(10)    # all wait

"""The picture of what ran on the GPUs, and the charts of a job's own page, in a real browser before a real service."""

import re
import time

import live
import night
import pytest
from pages import axe, visit
from playwright.sync_api import expect
from test_night import move_start

import nexus

DAY = [  # what ran, in hours before now
    {"card": 0, "begin": 23, "end": 15, "name": "resnet50"},
    {"card": 0, "begin": 14.5, "end": 9, "name": "llama-sft", "status": "failed", "outcome": "cuda-oom"},
    {"card": 0, "begin": 8, "end": 2, "name": "bert", "status": "preempted", "outcome": "preempted"},
    {"card": 1, "begin": 12, "end": 6, "name": "half-a"}, {"card": 1, "begin": 11, "end": 5, "name": "half-b"},
    {"cards": (2, 3), "begin": 10, "end": 4, "name": "wide", "status": "cancelled", "outcome": "killed"},
    *({"card": 4, "begin": 20 - number / 360, "end": 20 - (number + 0.9) / 360, "name": f"seed={number}",
       "status": "failed" if number == 700 else "completed"} for number in range(2000))]


@pytest.fixture(scope="module")
def box():
    """A night on six GPUs: others had the last one for some hours, and for an hour nobody could read any."""
    with live.Box(gpus=6, is_starting=False) as made:
        now = time.time()
        layout = night.place_night(made.home, now, cards=6, others=(5, 12, 8), gap=(7, 6))
        night.place_runs(layout, now, [dict(facts) for facts in DAY])
        made.start()
        yield made


def bar(page, name):
    return page.locator(f"#night .run[aria-label*='{name}']")


def box_of(locator):
    """(left, right) in the picture, in hours before now."""
    left, width, whole = locator.evaluate(
        "(node) => [...['x', 'width'].map((name) => Number(node.querySelector('rect').getAttribute(name))), "
        "Number(node.closest('svg').getAttribute('width'))]")
    return tuple(round(24 * (1 - each / whole), 1) for each in (left, left + width))


def test_usage_has_a_row_of_others(box):
    told = box.nexus("usage", "--since", "24h")
    assert re.search(r"^\(others\) +- +4\.0 +-$", told.stdout, re.MULTILINE) and "(others): as far as the history" in told.stderr, told


def test_the_night_is_a_picture(browser, box):
    with visit(browser, box, width=1600, is_expecting_errors=True) as page:        # these jobs are forgotten
        expect(page.locator("#night h2")).to_have_text("Last 24 hours")
        for words in ("of the recorded time", "2 runs failed", "1 run preempted", "others used them for 3 %"):     # 4 hours of one of six
            expect(page.locator("#night summary").first).to_contain_text(words)
        looks = "(node) => { const {fill, stroke, strokeDasharray} = getComputedStyle(node); return [fill, stroke, strokeDasharray]; }"
        looks = [bar(page, name).locator("rect").first.evaluate(looks) for name in ("bert", "wide")]
        assert all(preempted != cancelled for preempted, cancelled in zip(*looks)), looks
        for name, span, status in (("resnet50", (23.0, 15.0), "completed"), ("llama-sft", (14.5, 9.0), "failed"),
                                   ("bert", (8.0, 2.0), "preempted")):
            assert box_of(bar(page, name)) == span and status in bar(page, name).get_attribute("class").split()
        expect(bar(page, "resnet50")).to_have_text(re.compile("resnet50"))
        assert re.fullmatch(r"Job \w+ llama-sft · GPU 0 · failed · cuda-oom · \S+( [AP]M)? to \S+( [AP]M)? · 5h 30m",
                            bar(page, "llama-sft").get_attribute("aria-label"))
        dashes = "(node) => getComputedStyle(node).strokeDasharray"
        assert bar(page, "bert").locator("line").evaluate(dashes) != "none", "it is hatched"
        assert bar(page, "wide").count() == 2, "a bar in the lane of each of its GPUs"
        tops = [bar(page, name).locator("rect").first.get_attribute("y") for name in ("half-a", "half-b")]
        assert tops[0] != tops[1], "those that share a GPU do not hide each other"

        # Two thousand short jobs are few bars, which say how many of them failed, and where
        sweep = page.locator("#night .run[aria-label^='Jobs such as']")
        told = sweep.evaluate_all("(nodes) => nodes.map((node) => node.ariaLabel)")
        assert 15 <= len(told) <= 40 and sum(int(count.replace(",", "")) for label in told
                                             for count in re.findall(r"([\d,]+) (?:completed|failed)", label)) == 2000
        assert len([label for label in told if "1 failed" in label]) == 1 and page.locator("#night .part").count() == 1

        # Behind the bars: the load, other people's use, and a gap where nothing was read
        lane = page.locator("#night g:has(> .known)")
        assert lane.count() == 6
        for number in range(6):
            assert lane.nth(number).locator(".load").get_attribute("d").count("M") > 100
            assert bool(lane.nth(number).locator(".others").get_attribute("d")) == (number == 5)
            known = [float(at) for at in re.findall(r"M([\d.]+)", lane.nth(number).locator(".known").get_attribute("d"))]
            assert 5 <= (max(b - a for a, b in zip(known, known[1:]))) / (known[3] - known[2]) <= 8, "an hour has no record"

        bar(page, "llama-sft").click()
        expect(page).to_have_url(re.compile("#/jobs/" + bar_id(box, "llama-sft")))


def bar_id(box, name):
    return next(row["id"] for row in box.ask("GET", "/gpus/history?since=24h")["rows"] if row["name"] == name)


def test_the_picture_by_keyboard_and_as_a_table(browser, box):
    with visit(browser, box, is_expecting_errors=True) as page:
        expect(bar(page, "bert")).to_be_visible()
        assert page.locator("#night .run[tabindex='0']").count() == 1, "a sweep is no row of 2,000 stops"
        page.locator("#night .run[tabindex='0']").focus()
        for keys, name in ((["ArrowUp"] * 9, "GPU 0"), (["End"], "bert"), (["ArrowLeft"], "llama-sft"), (["ArrowLeft"], "resnet50"),
                           (["ArrowLeft"], "resnet50"), (["ArrowRight"], "llama-sft"), (["ArrowDown"], "half-a"),
                           (["ArrowDown"], "wide"), (["ArrowUp", "ArrowUp", "Home"], "resnet50")):
            for key in keys:
                page.keyboard.press(key)
            expect(page.locator("#night .run:focus")).to_have_attribute("aria-label", re.compile(name))
        expect(page.locator("#night .run:focus")).to_have_attribute("tabindex", "0")
        box.wait(box.add("true", gpus=0))                       # all is drawn again
        expect(page.locator("#ended")).to_contain_text("completed")
        expect(page.locator("#night .run:focus")).to_have_attribute("aria-label", re.compile("resnet50"))
        page.keyboard.press("Enter")
        expect(page.locator("#job h1")).to_contain_text(bar_id(box, "resnet50"))
        page.go_back()

        page.locator("#night-table summary").click()
        row = page.locator("#night-table tr", has_text="llama-sft")
        expect(row).to_contain_text("failed · cuda-oom")
        assert row.locator("td").first.inner_text() == "0" and row.locator("td").last.inner_text() == "5h 30m"
        row.get_by_role("link").click()
        expect(page.locator("#job h1")).to_contain_text(bar_id(box, "llama-sft"))


def test_another_time_is_chosen_and_nothing_is_asked_for_what_is_folded(browser, box):
    with visit(browser, box) as page:
        asked = []
        page.on("request", lambda request: "history" in request.url and asked.append(request.url))
        expect(bar(page, "bert")).to_be_visible()
        page.get_by_role("button", name="1 h", exact=True).click()
        expect(page.locator("#night h2")).to_have_text("Last hour")
        expect(page.locator("#night .run")).to_have_count(0)
        page.get_by_role("button", name="7 d", exact=True).click()
        expect(page.locator("#night h2")).to_have_text("Last 7 days")
        expect(page.get_by_role("button", name="7 d", exact=True)).to_have_attribute("aria-pressed", "true")
        expect(bar(page, "resnet50")).to_have_count(1)
        assert [re.search("since=(..?.)&", url)[1] for url in asked] == ["1h", "7d"]
        page.locator("#night summary").first.click()
        page.wait_for_function("localStorage.getItem('nexus-night')")      # a browser tells that a moment later
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        box.wait(box.add("true", gpus=0))
        expect(page.locator("#ended")).to_contain_text("completed")
        assert len(asked) == 2
        page.locator("#night summary").first.click()
        expect(bar(page, "bert")).to_be_visible()
        for _ in range(3):                                      # news make it no more often than once a minute
            box.wait(box.add("true", gpus=0))
        expect(page.locator("#ended-count")).to_have_text(re.compile("[4-9]"))
        assert len(asked) == 3


@pytest.mark.parametrize("scheme, width", [("light", 390), ("dark", 820), ("light", 1100), ("dark", 1600)])
def test_accessible_and_the_newest_at_the_right(browser, box, scheme, width):
    with visit(browser, box, color_scheme=scheme, width=width, height=844 if width < 500 else 900) as page:
        expect(bar(page, "bert")).to_be_attached()
        page.locator("#night-table summary").click()
        lanes = page.locator("#lanes")
        page.wait_for_function("document.getElementById('lanes').scrollWidth > 300")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        live.until(lambda: lanes.evaluate("(node) => node.scrollWidth - node.clientWidth - node.scrollLeft") < 2, "the newest")
        assert lanes.evaluate("(node) => node.scrollWidth > node.clientWidth + 2") == (width < 900)
        expect(page.get_by_text("Scroll the picture for what was before")).to_have_count(int(width < 900))
        assert axe(page) == []
        if width < 500:                                         # who scrolls back stays there
            lanes.evaluate("(node) => { node.scrollLeft = 10; }")
            box.wait(box.add("true", gpus=0))
            expect(page.locator("#ended")).to_contain_text("completed")
            assert lanes.evaluate("(node) => node.scrollLeft") == 10


def test_a_jobs_own_page_has_its_load_memory_power_and_temperature(browser):
    with live.Box(gpus=2) as box:
        whole, half, short = box.add("sleep 600"), box.add("sleep 600", gpus=0.5), box.add("sleep 600", gpus=0.5)
        for job_id in (whole, half, short):
            box.wait_started(job_id)
        box.nexus("stop")
        night.place_night(box.home, time.time(), cards=2, hours=4)
        for job_id in (whole, half):
            move_start(box, job_id, 2)
        box.start()
        with visit(browser, box, f"#/jobs/{whole}") as page:
            charts = page.locator("#usage figure")
            expect(charts).to_have_count(4)
            expect(page.locator("#usage h2")).to_have_text("Its GPU")
            for number, (name, unit) in enumerate((("Load", "%"), ("Memory", "GB"), ("Power", "W"), ("Temperature", "°C"))):
                expect(charts.nth(number)).to_have_text(re.compile(rf"^{name} mean [\d.]+ {unit}, max [\d.]+ {unit}$"))
                expect(charts.nth(number).get_by_role("img")).to_have_attribute("aria-label", re.compile(f"{name}: mean .* max"))
                assert charts.nth(number).locator("path").last.get_attribute("d").count("H") > 100
            assert axe(page) == []
            page.goto(f"http://127.0.0.1:{box.port}/#/jobs/{half}")
            expect(page.locator("#usage")).to_contain_text("of the whole GPU, which it shared")
            page.goto(f"http://127.0.0.1:{box.port}/#/jobs/{short}")
            expect(page.locator("#usage")).to_contain_text("it ran for less than 1m: that is too short for curves")
            expect(charts).to_have_count(0)


def test_on_its_first_day_it_begins_with_an_hour(browser):
    with live.Box(gpus=1) as box, visit(browser, box) as page:
        expect(page.locator("#night h2")).to_have_text("Last hour")
        page.get_by_role("button", name="24 h", exact=True).click()
        expect(page.locator("#night h2")).to_have_text("Last 24 hours")         # who has chosen keeps it
        box.wait(box.add("true", gpus=0))
        expect(page.locator("#ended")).to_contain_text("completed")
        expect(page.locator("#night h2")).to_have_text("Last 24 hours")


def test_a_machine_without_gpus_has_no_picture(browser):
    with live.Box(gpus=0) as box, visit(browser, box) as page:
        box.wait(box.add("true", gpus=0))
        expect(page.locator("#ended")).to_contain_text("completed")
        assert page.locator("#night").count() == 0


def test_a_picture_costs_little(box):
    """One of 24 h, as the page asks for it, at most each 5 minutes while nothing happens."""
    query = "/gpus/history?since=24h&step=10m&merge=1m&series=utilization,others"
    line = box.line(60)
    line.request("GET", query, headers={"Accept-Encoding": "gzip"})
    answer = line.getresponse()
    body = answer.read()
    assert answer.headers["Content-Encoding"] == "gzip" and len(body) < 5000
    assert box.ask("GET", query)["step_seconds"] == 600 and nexus.SERIES[0] == "utilization"

"""Logs in the page while they come, in one tab and in many, and what the page asks for meanwhile."""

import re

from pages import cancel, curl, go_home, open_log, row, until, visit
from playwright.sync_api import expect


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
        state = page.locator(".log [role=status]")
        expect(state).to_have_text("live \u00b7 0 lines")              # else only the end of it would be read
        page.evaluate("() => { window.frames = 0; const look = () => { frames++; requestAnimationFrame(look); }; look(); }")
        go.touch()
        expect(page.locator(".lines > div").last).to_have_text("done")
        assert page.evaluate("document.querySelectorAll('.lines > div').length") <= 20000
        assert page.evaluate("frames") > 10, "it is drawn while it comes"


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


def hurry(silence_ms=45000):
    """For a visit whose waits are shorter, with hide(true) for what another tab before it does."""
    return {"script": HURRY.replace("SILENCE", str(silence_ms))}


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
    with visit(browser, box, **hurry()) as page:
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
    with visit(browser, box, **hurry(silence_ms=1000)) as page:
        page.route("**/status*", lambda route: None)
        box.add("true", gpus=0)
        expect(page.locator("#connection")).to_have_text("reconnecting")
        page.unroute("**/status*")
        expect(page.locator("#connection")).to_have_text("live")
    with visit(browser, box, f"#/jobs/{job_id}", **hurry()) as page:
        page.route("**/jobs/cancel", lambda route: None)
        cancel(page, job_id)
        expect(page.locator("#notices")).to_contain_text("The service has not answered for 20 seconds.")
        expect(page.locator("#connection")).to_have_text("live")


def test_a_log_whose_connection_breaks_or_hangs_comes_back(browser, box):
    first, second = box.path("breaks"), box.path("hangs")
    job_id = box.wait_started(box.add(
        f"echo 0; until [ -e {first} ]; do sleep 0.05; done; echo 1; until [ -e {second} ]; do sleep 0.05; done; echo 2; sleep 1000",
        gpus=0))["id"]
    with visit(browser, box, f"#/jobs/{job_id}", is_expecting_errors=True, **hurry()) as page:
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

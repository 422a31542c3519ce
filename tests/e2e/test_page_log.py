"""A job's log as the page reads it: held questions, and what is asked for it."""

import contextlib
import json
import os
import re
import shutil
import threading
import time

import live
import pytest
from pages import FORWARDED, axe, visit
from playwright.sync_api import expect

ENDS = [  # what ends the wait for more of a log, what the job does then, the reply
    ("a line", "echo more", "more\n"),
    ("a part of a line", "printf 12%%", "12%"),
    ("its end", "exit 0", ""),
]


def ask_later(box, path):
    """Ask in a thread; a function that waits for the reply and returns (seconds, status, text)."""
    told = []
    began = time.monotonic()
    thread = threading.Thread(target=lambda: told.append(box.call("GET", path)), daemon=True)
    thread.start()

    def read():
        thread.join(live.PATIENCE_S)
        return (time.monotonic() - began, *told[0])
    return read


@pytest.mark.parametrize("what, does, text", ENDS, ids=[row[0] for row in ENDS])
def test_a_question_for_more_of_a_log_is_held_until_there_is_more(box, what, does, text):
    go = box.path(f"held-{what.replace(' ', '-')}")
    job_id = box.add(f"echo begins; until [ -e {go} ]; do sleep 0.05; done; {does}; [ '{text}' ] && sleep 1000", gpus=0)
    live.until(lambda: box.logs(job_id) == "begins\n")
    read = ask_later(box, f"/jobs/{job_id}/logs?offset=7,0&wait=50")
    status, short = box.call("GET", f"/jobs/{job_id}/logs?offset=7,0&wait=1")
    assert (status, short) == (200, ""), "the other one goes on"
    go.touch()
    took_s, status, answer = read()
    assert (status, answer) == (200, text) and 1 <= took_s < 40, what


def test_what_is_there_is_answered_at_once_and_a_search_or_a_stream_is_not_held(box):
    job_id = box.wait(box.add("echo there", gpus=0))["id"]
    for query in ("offset=0&wait=50", "tail=1&wait=50"):
        assert box.ask("GET", f"/jobs/{job_id}/logs?{query}") == "there\n"
    assert box.ask("GET", f"/jobs/{job_id}/logs?offset=6,0&wait=50") == "", "it is over"
    for query in ("follow=true&wait=5", "grep=a&wait=5"):
        status, refusal = box.call("GET", f"/jobs/{job_id}/logs?{query}")
        assert status == 400 and "wait" in refusal["message"], query


BOTH = "for i in $(seq 5); do echo out $i; sleep 0.25; echo err $i >&2; sleep 0.25; done"
PARTS = [  # reason, query, what is shown
    ("a line and those after it", "line=3", ["out 2", "err 2", "out 3", "err 3", "out 4", "err 4", "out 5", "err 5"]),
    ("so many", "line=3&lines=2", ["out 2", "err 2"]),
    ("of one stream", "line=3&lines=2&stream=stderr", ["err 3", "err 4"]),
    ("the first ones", "lines=1", ["out 1"]),
    ("after an offset", "offset=6,6&lines=1", ["out 2"]),
    ("after the end", "line=99", []),
    ("with numbers", "line=3&lines=2&numbers=true", ["     3 out 2", "     4 err 2"]),
    ("of the last ones", "tail=2&numbers=true", ["     9 out 5", "    10 err 5"]),
    ("with numbers of one stream", "offset=0,6&stream=stderr&lines=1&numbers=true", ["     2 err 2"]),
    ("of what is found", "grep=OUT%204&numbers=true", []),
    ("of what is found in any case", "grep=out%204&numbers=true", ["     7 out 4"]),
    ("of what stands around it", "grep=out%204&numbers=true&context=1", ["     6 err 3", "     7 out 4", "     8 err 4"]),
]
REFUSED = ["line=0", "line=3&tail=1", "line=3&offset=1", "lines=0", "lines=3&grep=a", "numbers=2"]


def test_lines_are_counted_and_found_by_their_number(box):
    job_id = box.wait(box.add(BOTH, gpus=0), "completed")["id"]
    for reason, query, lines in PARTS:
        assert box.ask("GET", f"/jobs/{job_id}/logs?{query}").splitlines() == lines, reason
    for query in REFUSED:
        assert box.call("GET", f"/jobs/{job_id}/logs?{query}")[0] == 400, query
    _, text = box.call("GET", f"/jobs/{job_id}/logs?line=4&lines=2&numbers=true", Accept="application/x-ndjson")
    assert [(entry["line"], entry["stream"], entry["end"], entry["text"]) for entry in map(json.loads, text.splitlines())] == [
        (4, "stderr", 12, "err 2\n"), (5, "stdout", 18, "out 3\n")]
    bars = box.wait(box.add(r"for i in 1 2 3; do printf '10%%\r50%%\r100%% '$i'\n'; done", gpus=0), "completed")["id"]
    assert box.ask("GET", f"/jobs/{bars}/logs?line=2&lines=1&numbers=true") == "     2 100% 2\n"


def test_an_open_log_that_prints_nothing_costs_ten_requests_a_minute(browser, box):
    job_id = box.wait_started(box.add("echo begins; sleep 1000", gpus=0))["id"]
    with visit(browser, box) as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        with page.expect_request("**/logs?*wait=30"):           # held for half a minute, and that for news for a quarter
            page.evaluate(f"location.hash = '#/jobs/{job_id}'")
        expect(page.get_by_role("log")).to_have_text("begins")
        live.until(lambda: not asked.clear() and (page.wait_for_timeout(1000) or not asked), "a second without a request")
        page.wait_for_timeout(5000)
        assert len(asked) <= 1, asked
        # Another tab that is seen holds no second connection; the first one gives its own back when it is left.
        other = page.context.new_page()
        other.goto(page.url)
        with other.expect_request("**/logs?offset=*") as question:
            pass
        assert "wait=0" in question.value.url
        page.evaluate("location.hash = '#/'")
        with other.expect_request("**/logs?*wait=30") as question:
            pass


# What one looks for in a log

@pytest.fixture
def page_of(browser, box):
    with contextlib.ExitStack() as stack:
        def open_page(job_id, address="", **options):
            return stack.enter_context(visit(browser, box, f"#/jobs/{job_id}{address}", **options))
        yield open_page


def write_log(box, job_id, pieces):
    """Give a job that is over a log: [(stream, text)], in the order of arrival, a second apart."""
    folder, sizes, marks = box.home / "logs" / f"job_{job_id}", [0, 0], ""
    texts = ["", ""]
    for number, (stream, text) in enumerate(pieces):
        texts[stream] += text
        sizes[stream] += len(text.encode())
        marks += f"{17900000000 + 10 * number} {sizes[0]} {sizes[1]}\n"
    for name, text in zip(("stdout.log", "stderr.log", "log.times"), [*texts, marks]):
        (folder / name).write_text(text)


def add_long(box):
    """9,000 lines, and one on stderr after each thousand; its error stands far above what it printed last."""
    job_id = box.wait(box.add("echo 'ValueError: lr is nan' >&2; exit 1", gpus=0, name="long"), "failed")["id"]
    pieces = []
    for epoch in range(1, 10):
        pieces += [(0, "".join(f"line {number}\n" for number in range(epoch * 1000 - 999, epoch * 1000 + 1))), (1, f"Epoch {epoch} of 9\n")]
    write_log(box, job_id, [*pieces, (1, "ValueError: lr is nan\n"), (0, "".join(f"{number}\n" for number in range(1, 12001)))])
    return job_id


def is_centred(page):
    return page.evaluate("""() => {
        const [line, box] = ['.lines .marked', '.lines'].map((each) => document.querySelector(each).getBoundingClientRect());
        return Math.abs(line.top + line.height / 2 - box.top - box.height / 2) < 30; }""")


def test_a_log_is_searched_opened_at_its_error_and_has_numbers_times_and_links(box, page_of):
    job_id = add_long(box)
    page = page_of(job_id)
    log, state = page.get_by_role("log"), page.locator("#search-state")
    marked = log.locator(".marked")
    # It opens at its error, which is not among the last 2,000 lines
    expect(marked).to_have_text("ValueError: lr is nan")
    assert is_centred(page) and page.evaluate("location.hash") == f"#/jobs/{job_id}"
    # The whole file is searched
    page.keyboard.press("/")
    expect(page.get_by_label("Search in this log")).to_be_focused()
    page.keyboard.type("epoch")
    page.keyboard.press("Enter")
    expect(state).to_have_text("1 of 9 lines")
    expect(marked).to_have_text("Epoch 1 of 9")
    assert is_centred(page)
    page.keyboard.press("Enter")
    expect(state).to_have_text("2 of 9 lines")
    expect(marked).to_have_text("Epoch 2 of 9")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")
    expect(state).to_have_text("9 of 9 lines")
    expect(marked).to_have_text("Epoch 9 of 9")
    log.focus()
    page.keyboard.press("N")
    expect(marked).to_have_text("Epoch 8 of 9")
    page.keyboard.press("n")
    expect(marked).to_have_text("Epoch 9 of 9")
    page.get_by_role("button", name="Line found before this").click()
    expect(marked).to_have_text("Epoch 8 of 9")
    assert page.evaluate("location.hash") == f"#/jobs/{job_id}?line=8008"
    # Numbers and times
    page.get_by_label("Numbers").check()
    page.get_by_label("Times").check()
    expect(marked.locator(".number")).to_have_text("8008")
    shown = page.evaluate("getComputedStyle(document.querySelector('.marked'), '::before').content")
    assert re.fullmatch(r'"\d\d-\d\d \d\d:\d\d:\d\d"', shown)
    assert log.locator("div").first.locator(".number").inner_text() == str(8008 - 1000)
    log.get_by_role("link", name="8010", exact=True).click()
    expect(marked).to_have_text("8010line 8002")
    address = page.evaluate("location.hash")
    assert address == f"#/jobs/{job_id}?line=8010"
    # What is not there, and the end of the search
    page.keyboard.press("/")
    page.keyboard.type("EPOCH")
    page.keyboard.press("Enter")
    expect(state).to_have_text("nothing found")
    page.keyboard.press("Escape")
    expect(page.locator("#search")).to_be_hidden()
    expect(log.locator(".marked, .found")).to_have_count(0)
    # The link leads there, and to an error far above the button
    other = page_of(job_id, address.removeprefix(f"#/jobs/{job_id}"))
    expect(other.get_by_role("log").locator(".marked")).to_have_text("line 8002")
    expect(other.get_by_role("log").locator(".marked")).to_be_in_viewport()
    other.get_by_role("button", name="Go to the error").click()
    expect(other.get_by_role("log").locator(".marked")).to_have_text("ValueError: lr is nan")
    other.get_by_role("button", name="To the end").click()
    expect(other.get_by_role("log").locator("div").last).to_have_text("12000")
    beyond = page_of(job_id, "?line=99999")
    expect(beyond.locator("#notices")).to_contain_text("This log has no line 99,999.")
    expect(beyond.get_by_role("log").locator("div").last).to_have_text("12000")


def test_a_search_of_a_running_job_is_repeated(box, page_of):
    go = box.path("again")
    command = f"seq 20; until [ -e {go} ]; do sleep 0.05; done; echo '\u0130\u0130 7 again'; sleep 1000"
    page = page_of(box.wait_started(box.add(command, gpus=0))["id"])
    text, state, again = page.get_by_label("Search in this log"), page.locator("#search-state"), page.get_by_role("button", name="Again")
    expect(page.get_by_role("log").locator("div")).to_have_count(20)
    page.get_by_role("button", name="Search").click()
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    expect(state).to_have_text("1 of 2 lines")
    page.keyboard.press("Enter")
    expect(state).to_have_text("2 of 2 lines")
    text.fill("again")
    page.keyboard.press("Enter")
    expect(state).to_have_text("nothing found")
    go.touch()
    expect(page.get_by_role("log").locator("div")).to_have_count(21)
    again.click()
    expect(state).to_have_text("1 of 1 line")
    text.fill("7")
    text.press("Enter")
    expect(state).to_have_text("1 of 3 lines")
    text.press("Enter")
    again.click()
    expect(state).to_have_text("2 of 3 lines")
    expect(page.get_by_role("log").locator(".found")).to_have_text(["7", "17", "\u0130\u0130 7 again"])
    text.fill("")
    expect(page.get_by_role("log").locator(".found, .marked")).to_have_count(0)


def test_a_search_of_a_huge_log_goes_on_and_waits_for_others(box, page_of):
    """Of 600 MiB, in three replies; others search at first."""
    job_id = box.wait(box.add("true", gpus=0))["id"]
    with open(box.home / "logs" / f"job_{job_id}" / "stdout.log", "wb") as file:
        for number in range(600):
            file.seek(number * 2**20)
            file.write(b"\n" * 3000 + b"needle %d\n" % number + b"\n" * 3000)
        file.write(b"the end\n")
    page = page_of(job_id, is_expecting_errors=True)
    expect(page.get_by_role("log").locator("div").last).to_have_text("the end")
    refusals = [1, 2]

    def refuse(route):
        if refusals:
            refusals.pop()
            return route.fulfill(status=503, json={"error": "unavailable", "message": "2 searches in logs run already", "hint": ""})
        return route.continue_()

    page.route("**/logs?grep=*", refuse)
    page.keyboard.press("/")
    page.keyboard.type("needle 59")
    page.keyboard.press("Enter")
    expect(page.locator("#search-state")).to_have_text("1 of 11 lines")
    expect(page.get_by_role("log").locator(".marked")).to_have_text("needle 59")
    (box.home / "logs" / f"job_{job_id}" / "stdout.log").unlink()


def test_a_log_is_saved_as_it_comes_also_with_a_token(browser, box):
    job_id = box.wait(box.add("seq 3; echo end", gpus=0))["id"]
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        assert download.value.path().read_text() == "1\n2\n3\nend\n" and download.value.suggested_filename == f"nexus-{job_id}.log"
        assert download.value.url.startswith("http"), "the browser writes it as it comes"
        with page.context.expect_page() as opened:
            page.get_by_role("link", name="Raw").click()
        expect(opened.value.locator("body")).to_contain_text("end")
    token = live.read(box.home / "token").strip()
    with visit(browser, box, f"#/jobs/{job_id}", is_expecting_errors=True, is_waiting=False,
               extra_http_headers=FORWARDED) as page:
        page.evaluate("""() => {
            window.saved = '';
            const write = (piece) => { saved += new TextDecoder().decode(piece); };
            window.showSaveFilePicker = async ({suggestedName}) => {
                saved = `${suggestedName}: `;
                return {createWritable: async () => new WritableStream({write})}; }; }""")
        page.locator("#login").get_by_label("Token").fill(token)
        page.locator("#login").get_by_label("Token").press("Enter")
        expect(page.get_by_role("log")).to_contain_text("end")
        expect(page.get_by_role("link", name="Raw")).to_be_hidden()
        page.get_by_role("link", name="Download").click()
        live.until(lambda: page.wait_for_timeout(20) or page.evaluate("saved") == f"nexus-{job_id}.log: 1\n2\n3\nend\n")
        page.evaluate("window.showSaveFilePicker = null")
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        assert download.value.path().read_text() == "1\n2\n3\nend\n"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_log_on_a_phone_and_for_everybody(box, page_of, scheme):
    job_id = box.wait(box.add("seq 300; echo 'KeyError: 7' >&2; exit 1", gpus=0), "failed")["id"]
    page = page_of(job_id, width=390, height=844, color_scheme=scheme)
    expect(page.get_by_role("log").locator(".marked")).to_have_text("KeyError: 7")
    head = page.locator("#log .head").first
    assert head.bounding_box()["height"] < 100
    page.get_by_role("button", name="Search").click()
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    expect(page.locator("#search-state")).to_contain_text("1 of ")
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Numbers").check()
    page.get_by_label("Times").check()
    expect(page.get_by_role("log").locator(".marked .number")).to_have_text("7")
    assert page.get_by_role("log").bounding_box()["height"] > 844 / 3
    assert axe(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_lines_of_a_log_of_many_gigabytes_are_not_counted(box):
    job_id = box.wait(box.add("echo hello", gpus=0), "completed")["id"]
    os.truncate(f"{box.job(job_id)['log_dir']}/stdout.log", 9 * 2**30)
    for query in ("line=5", "tail=1&numbers=true", "grep=hello&numbers=true"):
        status, answer = box.call("GET", f"/jobs/{job_id}/logs?{query}")
        assert status == 413 and "9GB are not counted: at most 8GB" in answer["message"], answer
    os.truncate(f"{box.job(job_id)['log_dir']}/stdout.log", 6)
    assert box.call("GET", f"/jobs/{job_id}/logs?line=1")[1] == "hello\n"


def test_the_page_tells_that_a_log_folder_was_removed(box, browser):
    job_id = box.wait(box.add("echo hello", gpus=0), "completed")["id"]
    shutil.rmtree(box.job(job_id)["log_dir"])
    with visit(browser, box, f"#/jobs/{job_id}", is_expecting_errors=True) as page:
        expect(page.locator("#log-state")).to_contain_text(f"the logs of job {job_id} are gone: there is no /")

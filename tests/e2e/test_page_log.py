"""A job's log as the page reads it: held questions, and what is asked for it."""

import json
import threading
import time

import live
import pytest
import test_dashboard
from test_dashboard import visit

box, browser, nothing_is_left = test_dashboard.box, test_dashboard.browser, test_dashboard.nothing_is_left      # fixtures

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


def count_requests(page, milliseconds):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(milliseconds)
    return asked


def test_an_open_log_that_prints_nothing_costs_ten_requests_a_minute(browser, box):
    job_id = box.wait_started(box.add("echo begins; sleep 1000", gpus=0))["id"]
    with visit(browser, box, f"#/jobs/{job_id}") as page:
        live.until(lambda: page.get_by_role("log").inner_text() == "begins" or page.wait_for_timeout(20))
        page.wait_for_timeout(3000)
        asked = count_requests(page, 30000)
        assert len(asked) <= 5, asked
        # Another tab that is seen holds no second connection; the first one gives its own back when it is left.
        other = page.context.new_page()
        other.goto(page.url)
        with other.expect_request("**/logs?offset=*") as question:
            pass
        assert "wait=0" in question.value.url
        page.evaluate("location.hash = '#/'")
        with other.expect_request("**/logs?*wait=30") as question:
            pass
